"""`gpubpf exporter` beside real programs: what a scrape finds, and how the exporter begins and ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpubpf.__main__
from gpubpf.exporter.command import parse_address
from gpubpf_cuda import build
from gpubpf_exporter import PROGRAM, ROOT, Program, Samples, exporting, get, until
from hipsim_device import serving

pytest.importorskip("prometheus_client")
from gpubpf.exporter.metrics import Family
from gpubpf.exporter.prometheus import Server

MEASURED = "gpubpf_kernel_measured_launches_total"
NOT_MEASURED = "gpubpf_launches_not_measured_total"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(PROGRAM, tmp_path_factory.mktemp("program") / "napping")


@pytest.fixture
def program(path: Path) -> Iterator[Program]:
    started = Program(path)
    yield started
    started.end()


def test_every_launch_is_counted_and_timed(program: Program) -> None:
    """200 launches are more than the device program has slots, so most are in its sums."""
    with exporting("-p", str(program.pid), "--sample", "1") as exporter:
        exporter.noticed(f"attached to {program.pid} (napping)\n")
        program.launch(200)
        nap = {"kernel": "nap", "process": "napping"}
        found = exporter.wait_for(200, "gpubpf_kernel_measured_launches_total", **nap)
        assert get(found, "gpubpf_kernel_launches_total", **nap) == 200
        seconds = get(found, "gpubpf_kernel_measured_seconds_total", **nap)
        assert seconds is not None and 0.200 <= seconds < 0.201, "1 ms each, and a few instructions"
        assert get(found, "gpubpf_kernel_launches_total", kernel="one", process="napping") == 1
        assert get(found, "gpubpf_process_launches_total", process="napping") == 201
        assert get(found, "gpubpf_processes") == 1
        assert get(found, "gpubpf_launches_lost_total") == 0
        assert get(found, "gpubpf_clock_error_seconds") == 1e-9
        assert get(found, "gpubpf_exporter_cpu_seconds_total")
        assert get(found, "gpubpf_exporter_memory_bytes")
        assert get(found, "gpubpf_hook_seconds_total") is not None
        assert exporter.end() == 0
    program.launch(10)  # the exporter has detached, and the program runs on


def test_with_a_budget_each_launch_is_measured_or_sampled_out(program: Program) -> None:
    with exporting("-p", str(program.pid), "--budget", "50") as exporter:
        exporter.noticed(f"attached to {program.pid} (napping)\n")
        for _ in range(5):
            program.launch(100)
        exporter.wait_for(505, "gpubpf_process_launches_total", process="napping")

        def all_known() -> Samples:
            found = exporter.scrape()
            measured = sum(value for (name, _), value in found.items() if name == MEASURED)
            left_out = get(found, "gpubpf_launches_not_measured_total", reason="sampled out") or 0
            return found if measured + left_out == 505 and left_out else {}

        found = until(all_known, exporter.notices)
        assert (get(found, MEASURED, kernel="nap") or 0) >= 1
        assert get(found, "gpubpf_budget_ratio") == 0.5
        assert exporter.end() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_with_a_budget_launches_of_hip_are_counted_with_the_true_reason() -> None:
    with serving() as program_, exporting("-p", str(program_.process.pid), "--budget", "50") as exporter:
        exporter.noticed(f"attached to {program_.process.pid} (")
        program_.does("rounds 5", "threads 3 4")  # 5 launches of work, and of tiny 5 + 3 * 4
        why = "this tool does not measure AMD GPUs with --budget yet"
        found = exporter.wait_for(22, NOT_MEASURED, reason=why)
        assert get(found, NOT_MEASURED, reason="before ready") is None
        assert get(found, "gpubpf_kernel_launches_total", kernel="tiny") == 17
        assert get(found, MEASURED, kernel="tiny") == 0
        assert exporter.end() == 0


def test_a_kernel_beyond_the_top_is_among_the_others(program: Program) -> None:
    with exporting("-p", str(program.pid), "--sample", "1", "--top", "1") as exporter:
        exporter.noticed(f"attached to {program.pid} (napping)\n")
        program.launch(20)
        found = exporter.wait_for(21, "gpubpf_process_launches_total", process="napping")
        series = {
            dict(labels)["kernel"]: value
            for (name, labels), value in found.items()
            if name == "gpubpf_kernel_launches_total"
        }
        assert len(series) == 2 and sum(series.values()) == 21 and "other" in series
        assert exporter.end() == 0


def test_a_stopped_process_does_not_hide_the_others(path: Path) -> None:
    first, second = Program(path), Program(path)
    with exporting("-p", f"{first.pid},{second.pid}", "--budget", "50") as exporter:
        for program in (first, second):
            exporter.noticed(f"attached to {program.pid} (napping)\n")
        os.kill(second.pid, signal.SIGSTOP)
        first.launch(50)
        exporter.wait_for(51, "gpubpf_process_launches_total", process="napping")
        os.kill(second.pid, signal.SIGCONT)
        second.launch(5)
        exporter.wait_for(57, "gpubpf_process_launches_total", process="napping")
        assert exporter.end() == 0
    first.end()
    second.end()


def test_it_ends_with_the_last_process_of_p(path: Path) -> None:
    program = Program(path)
    with exporting("-p", str(program.pid)) as exporter:
        exporter.noticed("attached to")
        program.end()
        assert exporter.process.wait(timeout=200) == 0


def one_line(*words: str, **environment: str) -> tuple[int, str]:
    """Run the command, which must fail at once. Return its exit status and its only line."""
    ended = subprocess.run(
        [sys.executable, "-m", "gpubpf", "exporter", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT / "lib")} | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    return ended.returncode, line


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, line = one_line("--listen", f"127.0.0.1:{port}")
    assert status == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another" in line


def test_without_the_package_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['prometheus_client'] = None\n")
    status, line = one_line(PYTHONPATH=f"{tmp_path}:{ROOT / 'lib'}")
    assert status == 1 and "prometheus_client" in line and re.search("install|script/setup", line)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--listen", "9696"), "must be ADDRESS:PORT"),
        (("--listen", "::1:9696"), "must be ADDRESS:PORT"),
        (("--listen", "localhost:70000"), "must be ADDRESS:PORT"),
        (("--budget", "0"), "percentage"),
        (("--budget", "2", "--sample", "3"), "exclude each other"),
        (("--top", "0"), "positive integer"),
    ],
)
def test_wrong_words_are_one_line(words: tuple[str, ...], part: str) -> None:
    status, line = one_line(*words)
    assert status == 2 and part in line


def test_addresses() -> None:
    assert parse_address("127.0.0.1:9696") == ("127.0.0.1", 9696)
    assert parse_address("[::1]:0") == ("::1", 0)
    assert parse_address("localhost:80") == ("localhost", 80)


def served(address: str) -> str:
    """What a scrape of a server at an address gets."""
    family = Family("calls", "counter", 'a "quoted" text', ("kernel",), [(('a"\\\n{}',), 3)])
    with Server(address, 0, lambda: [family]) as server, urllib.request.urlopen(server.url) as answer:
        text: str = answer.read().decode()
        return text


def test_names_cannot_break_the_format() -> None:
    assert 'calls_total{kernel="a\\"\\\\\\n{}"} 3.0\n' in served("127.0.0.1")


def test_an_ipv6_address() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    assert "calls_total" in served("::1")


def test_a_client_that_says_nothing_delays_no_other() -> None:
    with Server("127.0.0.1", 0, list) as server:
        port = int(server.url.rpartition(":")[2].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)), urllib.request.urlopen(server.url) as answer:
            assert answer.status == 200


def capabilities() -> str:
    """The capabilities of the systemd unit, for setpriv."""
    text = (ROOT / "deploy/systemd/gpubpf-exporter.service").read_text()
    names = " ".join(re.findall(r"^CapabilityBoundingSet=(.*)$", text, re.MULTILINE)).split()
    return ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in names)])


@pytest.mark.own_processes
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
def test_every_process_as_programs_come_and_go(path: Path) -> None:
    """With the capabilities of the systemd unit. Some programs end, and one is killed: no counter goes backwards."""
    there = Program(path, "real")
    under = ("setpriv", f"--bounding-set={capabilities()}", "--no-new-privs")
    with exporting("--sample", "1", under=under) as exporter:
        exporter.noticed(f"attached to {there.pid} (napping)\n")
        there.launch(10)
        total = 11
        for turn in range(3):
            comes = Program(path, "real")
            exporter.noticed(f"attached to {comes.pid} (napping)\n")
            comes.launch(20)
            total += 22  # `one` also runs at the beginning
            if turn == 1:  # once its launches were read
                exporter.wait_for(total, "gpubpf_process_launches_total", process="napping")
                comes.end(signal.SIGKILL)
            else:
                comes.end()
            found = exporter.wait_for(total, "gpubpf_process_launches_total", process="napping")
        found = exporter.wait_for(1, "gpubpf_processes")
        assert get(found, "gpubpf_kernel_launches_total", kernel="nap") == 70
        measured = sum(value for (name, _), value in found.items() if name == MEASURED)
        reasons = sum(value for (name, _), value in found.items() if name == NOT_MEASURED)
        lost = get(found, "gpubpf_launches_lost_total")
        assert lost is not None and measured + reasons + lost >= total >= measured + reasons
        there.launch(5)
        exporter.wait_for(75, "gpubpf_kernel_launches_total", kernel="nap")
        assert exporter.end() == 0
    there.launch(5)
    there.end()


def test_without_root_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as ended:
        gpubpf.__main__.main(["exporter"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and line.endswith("use sudo, or name processes: gpubpf exporter -p PID")
