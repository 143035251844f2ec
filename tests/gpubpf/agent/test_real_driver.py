"""NVIDIA's own driver libraries, without a GPU: every hook can be placed and removed, and the agent comes up and leaves.

By default two drivers and one CUDA runtime from packages (gpubpf_drivers.py), and the installed driver; with GPUBPF_DRIVERS=all,
all of them. The programs have a /dev of their own without a GPU, and are an ordinary user's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubpf import agent
from gpubpf_code import changed
from gpubpf_drivers import ALL, DRIVERS, RUNTIMES, driver, runtime
from gpubpf_host import needs_open_checkout, open_directory, without_gpu
from gpubpf_machine import INCLUDES, patching_sources

HERE = Path(__file__).parent
AGENT = HERE.parents[2] / "lib" / "gpubpf" / "agent"
LAUNCHLATE = HERE.parents[2] / "tools" / "launchlate.py"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
LAUNCHES = ("cuLaunchKernel", "cuLaunchKernel_ptsz", "the cuLaunchKernel that it returns")

pytestmark = [
    pytest.mark.skipif(
        os.uname().machine != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64"
    ),
    pytest.mark.skipif(not agent.LIBRARY.exists(), reason="the agent is not built (script/setup)"),
    needs_open_checkout,
]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Programs for every user, and a folder to put a /dev."""
    warn = ["-O1", "-Wall", "-Wextra", "-Werror"]
    with open_directory() as place:
        hooks = [HERE / "hook_driver.cpp", *patching_sources()]
        for command in (
            ["g++", "-std=c++17", *warn, *INCLUDES, "-o", place / "hook_driver", *hooks, "-ldl"],
            ["gcc", *warn, "-pthread", "-o", place / "driver_calls", HERE / "driver_calls.c", "-ldl"],
        ):  # fmt: skip
            subprocess.run(command, check=True)
        (place / "dev").mkdir()
        yield place


def copied(library: Path, place: Path) -> Path:
    """Return a library's copy that every user can read, in a folder with nothing else."""
    folder = place / "-".join(library.resolve().parts[-2:])
    name = "libcuda.so.1" if library.name.startswith("libcuda.so") else library.name
    if not folder.exists():
        folder.mkdir()
        shutil.copy(library, folder / name)
    return folder / name


def calls(place: Path, wanted: str, version: str | None, rounds: int) -> list[str]:
    """Return a command that calls a driver `rounds` times, or until its stdin ends (0); by a runtime if there is a `version`."""
    path = f"LD_LIBRARY_PATH={copied(driver(wanted), place).parent}"
    by = [str(copied(runtime(version), place))] if version else []
    return ["env", path, str(place / "driver_calls"), str(rounds), "2", *by]


def results(text: str) -> dict[str, int]:
    """Return what the program's first calls returned."""
    return {
        name: int(value) for name, _, value in (line.rpartition(": ") for line in text.splitlines()) if name
    }


@pytest.mark.parametrize("wanted", DRIVERS)
def test_every_entry_point_is_hooked_and_restored(place: Path, wanted: str) -> None:
    """Also: cuGetProcAddress returns hooked functions only, for each version of CUDA."""
    library = copied(driver(wanted), place)
    command = [*without_gpu(place / "dev"), str(place / "hook_driver"), str(library)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    functions, answers = (int(word) for word in done.stdout.split() if word.isdigit())
    assert functions >= 169 and answers > 1000  # driver 470 has the fewest


# The newest driver that Debian packages is older than CUDA 13.
by_runtime = pytest.mark.parametrize("version", (None, *RUNTIMES) if ALL else ("12.4",))
by_driver = pytest.mark.parametrize("wanted", DRIVERS if ALL else ("newest",))


@by_driver
@by_runtime
def test_the_driver_loads_the_agent(place: Path, tmp_path: Path, wanted: str, version: str | None) -> None:
    """The driver initializes the agent inside cuInit even without a GPU. All calls return what they return without a tool."""
    prefix, command = without_gpu(place / "dev"), calls(place, wanted, version, rounds=2)
    alone = subprocess.run([*prefix, *command], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert results(alone.stdout)["cuInit"] == NO_DEVICE
    shared = place / tmp_path.name
    shared.mkdir()
    shared.chmod(0o777)
    tool = [sys.executable, HERE / "fake_tool.py", shared / "result", "{'device': 'gpu', 'wanted': ()}", "--"]
    done = subprocess.run([*prefix, *tool, *command], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and results(done.stdout) == results(alone.stdout)
    summary = json.loads((shared / "result").read_text())["summary"]
    assert summary["launches_seen"] >= 2 * len(LAUNCHES)  # cuInit installed the hooks before the first


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def until_ready(program: subprocess.Popen[str]) -> dict[str, int]:
    assert program.stdout is not None
    lines = list(iter(program.stdout.readline, "ready\n"))
    assert lines and lines[-1]
    return results("".join(lines))


def rounds(program: subprocess.Popen[str]) -> int:
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write("\n")
    program.stdin.flush()
    return int(program.stdout.readline())


def proceeds(program: subprocess.Popen[str]) -> None:
    """Wait until a program has made all its calls once more. Two rounds, as one may have begun before."""
    before, until = rounds(program), time.monotonic() + 30
    while rounds(program) < before + 2:
        assert time.monotonic() < until, "the program stands still"
        time.sleep(0.02)


@pytest.mark.skipif(os.geteuid() != 0, reason="attaching to another user's process needs root")
@by_driver
@by_runtime
def test_a_tool_attaches_and_detaches(place: Path, wanted: str, version: str | None) -> None:
    """While two threads call the driver."""
    command = [*without_gpu(place / "dev"), *calls(place, wanted, version, rounds=0)]
    with running(command) as program:
        assert until_ready(program)["cuInit"] == NO_DEVICE
        for _ in range(2 if ALL else 1):
            assert changed(program.pid, "/libcuda") == 0
            with running([sys.executable, str(LAUNCHLATE), "--json", "-p", str(program.pid)]) as tool:
                assert tool.stdout is not None
                assert json.loads(tool.stdout.readline())["type"] == "attached"
                assert changed(program.pid, "/libcuda") > 169
                proceeds(program)
                tool.send_signal(signal.SIGINT)
                records = [json.loads(line) for line in tool.stdout]
                assert tool.wait() == 0
            assert records[-1]["type"] == "summary" and records[-1]["launches_seen"] > 0
            until = time.monotonic() + 60
            while changed(program.pid, "/libcuda") and time.monotonic() < until:
                time.sleep(0.05)
            assert changed(program.pid, "/libcuda") == 0
            proceeds(program)
        program.communicate()
        assert program.returncode == 0  # no call ever returned anything else
