"""Prometheus scrapes `gpubpf exporter`: what its own API then has."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
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


class Prometheus:
    """A running Prometheus with the configuration of deploy/, but for the address of the exporter and the time between scrapes."""

    def __init__(self, directory: Path, target: str) -> None:
        configuration = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
        configuration["global"]["scrape_interval"] = "1s"
        (job,) = configuration["scrape_configs"]
        job["static_configs"] = [{"targets": [target]}]
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(configuration))
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}/api/v1/"
        command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}"]
        self.process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=-3, stderr=-3
        )

    def get(self, what: str, **parameters: str) -> Any:
        """Return what the API has; None before Prometheus is ready."""
        assert self.process.poll() is None, "Prometheus has ended"
        try:
            with urllib.request.urlopen(f"{self._url}{what}?{urllib.parse.urlencode(parameters)}") as answer:
                return json.load(answer)["data"]
        except (urllib.error.URLError, ConnectionError):
            return None

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
def scraping(directory: Path, target: str) -> Iterator[Prometheus]:
    started = Prometheus(directory, target)
    try:
        yield started
    finally:
        started.process.terminate()
        started.process.wait(timeout=200)


def test_the_scrape_is_in_the_api(tmp_path: Path) -> None:
    program = Program(build(PROGRAM, tmp_path / "napping"))
    with exporting("-p", str(program.pid), "--sample", "1") as exporter:
        target = exporter.url.removeprefix("http://").removesuffix("/metrics")
        with scraping(tmp_path, target) as prometheus:
            prometheus.wait_for("up", 1)
            exporter.noticed(f"attached to {program.pid} (napping)\n")
            program.launch(30)
            kernel = 'kernel="nap",process="napping",job="gpubpf"'
            prometheus.wait_for(f"gpubpf_kernel_launches_total{{{kernel}}}", 30)
            prometheus.wait_for(f"gpubpf_kernel_measured_launches_total{{{kernel}}}", 30)
            (seconds,) = prometheus.values(f"gpubpf_kernel_measured_seconds_total{{{kernel}}}").values()
            assert 0.030 <= seconds < 0.031
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
