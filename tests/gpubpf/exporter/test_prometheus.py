"""Prometheus scrapes `gpubpf exporter`: what its own API then has."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpubpf_cuda import build
from gpubpf_exporter import PROGRAM, ROOT, Program, exporting, until

pytest.importorskip("prometheus_client")
pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus (apt-get install prometheus)"
)

FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
LISTENS = re.compile(r'msg="Listening on" address=(\S+)')
MEAN = (
    'gpubpf_kernel_measured_seconds_total{kernel="nap"} / gpubpf_kernel_measured_launches_total{kernel="nap"}'
)
NODES = 10


class Prometheus:
    """A running Prometheus with the configuration of deploy/, but for the addresses of exporters and the time between scrapes.

    under: a command that runs Prometheus, and what asks it.
    """

    def __init__(self, directory: Path, targets: Sequence[str], under: Sequence[str] = ()) -> None:
        configuration = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
        configuration["global"]["scrape_interval"] = "1s"
        (job,) = configuration["scrape_configs"]
        job["static_configs"] = [{"targets": [*targets]}]
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(configuration))
        self._log = directory / "prometheus.log"
        command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*under, *command, "--web.listen-address=127.0.0.1:0"], stdout=log, stderr=log
            )
        self._under = under
        address = until(lambda: LISTENS.search(self._log.read_text()), self._log)[1]
        self._url = f"http://{address}/api/v1/"

    def get(self, what: str, **parameters: str) -> Any:
        """Return what the API has; None before Prometheus is ready."""
        assert self.process.poll() is None, self._log.read_text()
        url = f"{self._url}{what}?{urllib.parse.urlencode(parameters)}"
        done = subprocess.run(
            [*self._under, sys.executable, "-c", FETCH, url], capture_output=True, timeout=200
        )
        return json.loads(done.stdout)["data"] if done.returncode == 0 else None

    def values(self, expression: str) -> dict[str, float]:
        """Return the values of an expression now, by kernel; "" for other series."""
        found = self.get("query", query=expression)
        return {one["metric"].get("kernel", ""): float(one["value"][1]) for one in (found or {})["result"]}

    def wait_for(self, expression: str, value: float) -> None:
        """Wait until the only value of an expression is this."""
        seen: list[Any] = []

        def look() -> bool:
            seen[:] = [self.get("query", query=expression)]
            return bool(seen[0]) and [float(one["value"][1]) for one in seen[0]["result"]] == [value]

        until(look, seen)


@contextlib.contextmanager
def scraping(directory: Path, targets: Sequence[str], under: Sequence[str] = ()) -> Iterator[Prometheus]:
    started = Prometheus(directory, targets, under)
    try:
        yield started
    finally:
        started.process.terminate()
        started.process.wait(timeout=200)


def test_the_scrape_is_in_the_api(tmp_path: Path) -> None:
    program = Program(build(PROGRAM, tmp_path / "napping"))
    with exporting("-p", str(program.pid), "--sample", "1") as exporter:
        target = exporter.url.removeprefix("http://").removesuffix("/metrics")
        with scraping(tmp_path, [target]) as prometheus:
            prometheus.wait_for("up", 1)
            exporter.noticed(f"attached to {program.pid} (napping)\n")
            program.launch(30)
            kernel = 'kernel="nap",process="napping",job="gpubpf"'
            prometheus.wait_for(f"gpubpf_kernel_launches_total{{{kernel}}}", 30)
            prometheus.wait_for(f"gpubpf_kernel_measured_launches_total{{{kernel}}}", 30)
            (seconds,) = prometheus.values(f"gpubpf_kernel_measured_seconds_total{{{kernel}}}").values()
            assert 0.030 <= seconds < 0.031
            prometheus.wait_for(f"{MEAN} > 0.000999 < 0.001001", seconds / 30)
            program.launch(12)
            prometheus.wait_for(f"gpubpf_kernel_launches_total{{{kernel}}}", 42)
            (scraped,) = prometheus.get("targets")["activeTargets"]
            assert scraped["health"] == "up" and scraped["lastError"] == ""
            about = prometheus.get("metadata", metric="gpubpf_processes")
            assert about["gpubpf_processes"][0]["type"] == "gauge"
            (instance,) = prometheus.get("label/instance/values")
            assert instance == target
            assert set(prometheus.values("resets(gpubpf_kernel_launches_total[10m])").values()) == {0}
            assert exporter.end() == 0
            prometheus.wait_for("up", 0)
    program.end()


def test_promtool_has_nothing_to_say_about_the_metrics() -> None:
    from gpubpf.exporter.prometheus import Server
    from gpubpf.exporter.watch import Watch

    with Server("127.0.0.1", 0, Watch(5, 1.0).latest) as server, urllib.request.urlopen(server.url) as answer:
        text = answer.read()
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), done


class Rack:
    """Nodes as network namespaces, and one in which Prometheus runs, all on one bridge. Nothing changes outside of them."""

    def __init__(self, nodes: int) -> None:
        self._name = f"gpubpf{os.getpid()}"
        self._made: list[str] = []
        self.prometheus = self._namespace("p")
        self._ip("p", "link", "add", "bridge", "type", "bridge")
        self._ip("p", "addr", "add", "10.94.0.254/24", "dev", "bridge")
        self._ip("p", "link", "set", "bridge", "up")
        self.nodes = [self._namespace(str(node)) for node in range(nodes)]
        for node in range(nodes):
            pair = ("type", "veth", "peer", "name", "eth", "netns", f"{self._name}-{node}")
            self._ip("p", "link", "add", f"node{node}", *pair)
            self._ip("p", "link", "set", f"node{node}", "master", "bridge", "up")
            self._ip(str(node), "addr", "add", f"{self.address(node)}/24", "dev", "eth")
            self._ip(str(node), "link", "set", "eth", "up")

    @staticmethod
    def address(node: int) -> str:
        return f"10.94.0.{node + 1}"

    def _namespace(self, name: str) -> tuple[str, ...]:
        """Make a namespace. Return the command that runs another one in it."""
        full = f"{self._name}-{name}"
        subprocess.run(["ip", "netns", "add", full], check=True)
        self._made.append(full)
        self._ip(name, "link", "set", "lo", "up")
        return ("ip", "netns", "exec", full)

    def _ip(self, name: str, *words: str) -> None:
        subprocess.run(["ip", "-netns", f"{self._name}-{name}", *words], check=True)

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.fixture
def rack() -> Iterator[Rack]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip (apt-get install iproute2)")
    if subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("may not make network namespaces here")
    made = Rack(NODES)
    yield made
    made.close()


def test_ten_nodes_of_which_one_fails(rack: Rack, tmp_path: Path) -> None:
    path = build(PROGRAM, tmp_path / "napping")
    listen = ("--listen", "0.0.0.0:9696", "--sample", "1")
    with contextlib.ExitStack() as stack:
        programs = [Program(path, under=node) for node in rack.nodes]
        exporters = [
            stack.enter_context(exporting("-p", str(program.pid), *listen, under=node))
            for node, program in zip(rack.nodes, programs, strict=True)
        ]
        targets = [f"{rack.address(node)}:9696" for node in range(NODES)]
        prometheus = stack.enter_context(scraping(tmp_path, targets, rack.prometheus))
        for node, (program, exporter) in enumerate(zip(programs, exporters, strict=True)):
            exporter.noticed("attached to")
            program.launch(10 * (node + 1))
        prometheus.wait_for("sum(up)", NODES)
        for node, target in enumerate(targets):
            prometheus.wait_for(
                f'gpubpf_kernel_launches_total{{kernel="nap",instance="{target}"}}', 10 * (node + 1)
            )
        prometheus.wait_for('sum(gpubpf_kernel_measured_launches_total{kernel="nap"})', 550)
        exporters[3].process.kill()
        prometheus.wait_for("sum(up)", NODES - 1)
        for program in programs:
            program.launch(1)
        prometheus.wait_for('sum(gpubpf_kernel_launches_total{kernel="nap"})', 550 - 40 + 9)
    for program in programs:
        program.end()
