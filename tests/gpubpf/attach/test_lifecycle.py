"""Measurements that begin and end in one process: what a tool leaves behind in a program that goes on."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from gpubpf import agent
from gpubpf.agent import protocol
from gpubpf.agent.definitions import ATTACH_FUNCTION, AttachStatus, DrainFlag, Message
from gpubpf.attach import loading, patching
from gpubpf.process import address_space, ptrace, traceable
from gpubpf.traced import device
from gpubpf_commands import words

HERE = Path(__file__).parent
TOOLS = Path(__file__).parents[3] / "tools"
HEADERS = [
    *sorted(Path("/usr/local").glob("cuda*/include")),
    *(Path(place) / "nvidia/cu13/include" for place in sys.path),
]

PIDFD_GETFD = 438  # the system call

pytestmark = pytest.mark.skipif(
    os.uname().machine != "x86_64" or not shutil.which("gcc"), reason="needs gcc on x86-64"
)


def built(at: Path, name: str) -> Path:
    if not (device.LIBRARIES / "libcuda.so.1").exists() or not agent.LIBRARY.exists():
        pytest.skip("the embedded device or the agent is not built (script/setup)")
    headers = [d for d in HEADERS if (d / "cuda.h").exists()]
    if not headers:
        pytest.skip("needs cuda.h")
    program = at / name
    command = "gcc -O1 -pthread -I{headers} {source}.c -o {program} -L{place} -lcuda -Wl,-rpath,{place}"
    names = {"headers": headers[0], "source": HERE / name, "program": program, "place": device.LIBRARIES}
    subprocess.run(words(command, **names), check=True)
    return program


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("lifecycle"), "loads")


@dataclass
class Started:
    """A program that a tool started, with its input: a line there has it end."""

    tool: subprocess.Popen[str]
    pid: int

    def end(self) -> str:
        assert self.tool.stdin is not None
        self.tool.stdin.write("\n")
        out, _ = self.tool.communicate(timeout=100)
        return out


@pytest.fixture
def started(loads: Path, tmp_path: Path) -> Iterator[Started]:
    """Under threadhist, until it measures."""
    command = ["threadhist.py", "--kernel", "fresh", "-d", "1.5", "--json", "-o", str(tmp_path / "out")]
    tool = subprocess.Popen(
        [sys.executable, str(TOOLS / command[0]), *command[1:], "--", str(loads), "4"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert tool.stderr is not None
    try:
        while "attached to " not in (line := tool.stderr.readline()):
            assert line, "it ended"
        yield Started(tool, int(line.partition("attached to ")[2].split()[0]))
    finally:
        tool.kill()
        tool.communicate()


def left(pid: int) -> list[str]:
    """What of the agent's is in a process: threads, files, mappings other than its library and moved code; changed code."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            name = Path(f"/proc/{pid}/task/{thread}/comm").read_text().strip()
            found += [f"thread {name}"] * name.startswith("gpubpf")
    for number in os.listdir(f"/proc/{pid}/fd"):
        found += [f"file {number}"] * (int(number) > 2)
    for mapping in address_space.mappings(pid):
        found += [f"mapping {mapping.path}"] * mapping.path.startswith("/memfd:gpubpf")
    with address_space.Memory(pid) as memory:
        for m in address_space.mappings(pid):
            if m.code and Path(m.path).name.startswith(("libcuda.so", "libc.so")):
                with open(m.path, "rb") as file:
                    expected = os.pread(file.fileno(), m.end - m.start, m.offset)
                held = memory.read(m.start, len(expected))
                # A breakpoint that the kernel set for another tracer is not ours.
                if held != expected:
                    changed = [a for a, b in zip(expected, held, strict=True) if a != b and b != 0xCC]
                    found += [f"code of {m.path}"] * bool(changed)
    return found


def settled(pid: int) -> list[str]:
    until = time.monotonic() + 60
    while (found := left(pid)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def measured(pid: int) -> dict[str, Any]:
    """The summary of a tool that was told to end when it had counted something."""
    command = [str(TOOLS / "threadhist.py"), "--kernel", "fresh", "--json", "-p", str(pid), "0.2"]
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as tool:
        timer = threading.Timer(100, tool.kill)
        timer.start()
        assert tool.stdout is not None
        while json.loads(tool.stdout.readline())["type"] != "kernel":
            pass
        tool.terminate()
        out, _ = tool.communicate()
        timer.cancel()
    assert tool.returncode == 0
    return dict(json.loads(out.splitlines()[-1]))


def test_a_program_that_a_tool_started_runs_its_own_code_after_the_measurement(started: Started) -> None:
    assert left(started.pid)
    assert settled(started.pid) == []
    again = measured(started.pid)
    assert again["launches_instrumented"] > 0 and again["lost"] == 0
    assert settled(started.pid) == []
    assert int(started.end().split()[1]) > 0
    assert started.tool.returncode == 0


def test_a_context_that_is_retained_and_released_does_not_wait_for_its_kernels(endless: Path) -> None:
    """As libraries do while the program works. Only the last release ends the context."""
    with endless_program(endless) as program, instrumented(program):
        assert program.say("retain") < 3000  # each release would wait for 2 s, and invalidate captures
        program.say("stop")


def test_sends_of_a_running_process_have_a_timeout(endless: Path) -> None:
    """A program must not wait for a tool that is stopped. Its socket was made by the tool, not by the agent."""
    with endless_program(endless) as program, instrumented(program):
        found = []
        process = os.pidfd_open(program.process.pid)
        for number in os.listdir(f"/proc/{program.process.pid}/fd"):
            if os.readlink(f"/proc/{program.process.pid}/fd/{number}").startswith("socket:"):
                own = ctypes.CDLL(None).syscall(PIDFD_GETFD, process, int(number), 0)
                with socket.socket(fileno=own) as copy:
                    found.append(copy.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16))
        os.close(process)
        assert found and all(struct.unpack("ll", one) == (5, 0) for one in found)


@pytest.mark.every(2)
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_and_when_the_tool_ends_before_it(started: Started, end: int) -> None:
    started.tool.send_signal(end)
    assert settled(started.pid) == []
    again = measured(started.pid)
    assert again["launches_instrumented"] > 0 and again["overhead"]["hooks"] > 0
    assert settled(started.pid) == []
    assert int(started.end().split()[1]) > 0


def test_the_second_is_told_who_was_first(started: Started) -> None:
    command = [sys.executable, str(TOOLS / "kernelretsnoop.py"), "-d", "0.2", "-p", str(started.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode:  # else the first one was over by then
        assert f"threadhist, pid {started.tool.pid}" in done.stderr
    assert int(started.end().split()[1]) > 0


def test_the_end_of_an_attachment_takes_no_signal_handler_with_it(started: Started) -> None:
    assert settled(started.pid) == []
    caught = int(traceable.status(started.pid)["SigCgt"], 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGABRT):
        assert not caught >> (number - 1) & 1
    started.end()


# --- a kernel that does not end while it is instrumented ---

LEFT_IN_PLACE = re.compile(
    r"cuCtxDestroy|cuDevicePrimaryCtxRe(lease|set)|cuGreenCtxDestroy|cuStream(Begin|End)Capture"
    r"|cu(Graph)?Launch|cuStream(WaitValue|BatchMemOp|AddCallback)"
)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("lifecycle"), "endless")


class Endless:
    """attach/endless.c, which does as it is told."""

    def __init__(self, command: list[str | Path], error: IO[str] | None = None) -> None:
        self.process = subprocess.Popen(
            [str(c) for c in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=error, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def say(self, text: str) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> None:
        out, _ = self.process.communicate("quit\n", timeout=100)
        assert self.process.returncode == 0 and "launches" in out


@contextlib.contextmanager
def endless_program(*command: str | Path, error: IO[str] | None = None) -> Iterator[Endless]:
    made = Endless(list(command), error)
    timer = threading.Timer(300, made.process.kill)
    timer.start()
    try:
        yield made
    finally:
        timer.cancel()
        made.process.kill()
        made.process.communicate()


def changed_functions(pid: int) -> set[str]:
    """Those of the driver whose code is not its file's."""
    code = [m for m in address_space.mappings(pid) if m.code and Path(m.path).name.startswith("libcuda.so")]
    changed = []  # in the file; the embedded device's code lies in memory as there
    for m in code:
        with address_space.Memory(pid) as memory, open(m.path, "rb") as file:
            expected = os.pread(file.fileno(), m.end - m.start, m.offset)
            held = memory.read(m.start, len(expected))
        # A breakpoint that the kernel set for another tracer, which may watch the whole machine, is not ours.
        changed += [m.offset + i for i in range(len(held)) if held[i] != expected[i] and held[i] != 0xCC]
    lines = subprocess.check_output(["nm", "-D", "-S", code[0].path], text=True).splitlines()
    symbols = [line.split() for line in lines]
    spans = [(int(s[0], 16), int(s[1], 16), s[3]) for s in symbols if len(s) == 4 and s[2] == "T"]
    return {name for at in changed for first, size, name in spans if first <= at < first + size}


def threads(pid: int) -> set[str]:
    return {what.removeprefix("thread ") for what in left(pid) if what.startswith("thread ")}


@contextlib.contextmanager
def instrumented(program: Endless) -> Iterator[subprocess.Popen[str]]:
    """Its endless kernel runs, and is a copy."""
    command = [sys.executable, str(TOOLS / "threadhist.py"), "--json", "-p", str(program.process.pid), "0.2"]
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert tool.stdout is not None
        while True:
            program.say("start")
            program.say("stop")
            record = json.loads(tool.stdout.readline())
            if record["type"] == "kernel" and record["kernel"] == "endless":
                break
        program.say("start")
        yield tool
    finally:
        tool.kill()
        tool.communicate()


def left_to_itself(pid: int) -> bool:
    """Within some seconds: launches run the program's own code, and what is left of the tool waits for the kernel."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        changed = changed_functions(pid)
        if changed and all(LEFT_IN_PLACE.match(name) for name in changed) and "gpubpf" not in threads(pid):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("own", "how", "end"),
    [
        ("0", "stop", signal.SIGINT),
        pytest.param("1", "destroy", signal.SIGINT, marks=pytest.mark.long),
        ("1", "stop", signal.SIGKILL),
    ],
)
def test_a_kernel_that_does_not_end_while_it_is_instrumented(
    endless: Path, own: str, how: str, end: int
) -> None:
    """In the context of all else and in one of its own; it ends, or the context does; the tool ends, or is killed."""
    with endless_program(endless, own) as program:
        pid, free = program.process.pid, program.say("free")
        with instrumented(program) as tool:
            tool.send_signal(end)
            tool.communicate(timeout=100)
        assert left_to_itself(pid)
        assert "gpubpf-free" in threads(pid)
        assert free - program.say("free") > 1 << 20
        again = measure_steady(pid)
        assert again["launches_seen"] > 0 and again["lost"] == 0
        assert (again["launches_instrumented"] > 0) == (own == "1")  # else loading would wait for it
        assert left_to_itself(pid)
        program.say(how)
        assert settled(pid) == []
        assert program.say("free") == free
        program.end()


@pytest.mark.every(2)
@pytest.mark.parametrize("own", ["1", "2"])
def test_no_thread_of_the_agent_is_in_a_context_that_ends(
    endless: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    """Threads of the agent wait for the kernel; drivers may crash if its context ends meanwhile, and the hostile device does."""
    monkeypatch.setenv("CUDASIM_HOSTILE", "1")
    with endless_program(endless, own) as program:
        with instrumented(program):
            program.say("later 2800")  # longer than the last reading waits
        assert settled(program.process.pid) == []
        program.end()


@pytest.mark.long
def test_nor_after_a_measurement_that_could_load_nothing(
    endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ran all the time. Nothing of the agent is left but the thread that waits for it."""
    monkeypatch.setenv("CUDASIM_HOSTILE", "1")
    with endless_program(endless, "0") as program:
        program.say("start")
        again = measure_steady(program.process.pid)
        assert again["launches_seen"] > again["launches_instrumented"] == 0
        assert "gpubpf-wait" in threads(program.process.pid)
        program.say("later 1000")
        assert program.process.wait(timeout=100) == 0


@pytest.mark.long
def test_and_in_a_program_that_a_tool_started(endless: Path) -> None:
    command = [sys.executable, TOOLS / "threadhist.py", "-d", "2", "-o", os.devnull, "--", endless, "0"]
    with endless_program(*command) as program:
        children = Path(f"/proc/{program.process.pid}/task").glob("*/children")
        pids = [int(n) for file in children for n in file.read_text().split()]
        (pid,) = (n for n in pids if Path(f"/proc/{n}/exe").readlink() == endless)
        program.say("start")
        assert left_to_itself(pid)
        assert "gpubpf-free" in threads(pid)
        program.say("stop")
        assert settled(pid) == []
        program.end()


@pytest.mark.every(2)
def test_more_map_memory_beside_a_kernel_that_does_not_end(
    endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver would wait for it, with a lock that the program needs: memory comes once it has ended."""
    monkeypatch.setenv("CUDASIM_HOSTILE", "1")

    def large_measured() -> bool:
        """Whether launches of 4096 blocks were, in the next interval; all the time there are some of 4."""
        assert tool.stdout is not None
        large = False
        for line in tool.stdout:
            if (record := json.loads(line))["type"] == "kernel":
                large = large or record["grid"] == [4096, 1, 1]
                if record["grid"] == [4, 1, 1]:
                    return large
        raise AssertionError("it ended")

    with endless_program(endless, "0") as program:
        command = [str(TOOLS / "threadhist.py"), "--kernel", "steady", "--map-memory", "1M", "--json"]
        tool = subprocess.Popen(
            [sys.executable, *command, "-p", str(program.process.pid), "0.2"],
            stdout=subprocess.PIPE,  # without text=True: 100,000 lines of it are read byte by byte (conftest.py)
        )
        try:
            assert not large_measured()
            program.say("start")
            for _ in range(4):
                program.say("large")
                assert not large_measured()
            program.say("stop")
            until = time.monotonic() + 60
            while not large_measured():
                program.say("large")
                assert time.monotonic() < until
        finally:
            tool.kill()
            tool.communicate()
        assert settled(program.process.pid) == []
        program.end()


def measure_steady(pid: int) -> dict[str, Any]:
    command = ["--kernel", "steady", "-d", "2", "--json", "-p", str(pid)]
    done = subprocess.run(
        [sys.executable, str(TOOLS / "threadhist.py"), *command],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("seconds", ["0.01", "0.5"])
def test_a_capture_goes_on_while_a_tool_comes_and_leaves(endless: Path, seconds: str) -> None:
    """To wait for the context would end the capture."""
    with endless_program(endless, "0") as program:
        program.say("capture")
        command = [sys.executable, TOOLS / "threadhist.py", "-p", str(program.process.pid), "-d", seconds]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        assert "attached to" in done.stderr
        program.say("captured")
        program.end()


@contextlib.contextmanager
def measured_while_a_launch_waits(endless: Path) -> Iterator[tuple[Endless, subprocess.Popen[str]]]:
    """The stream has no room, because the endless kernel runs."""
    with endless_program(endless, "0") as program:
        command = [
            str(TOOLS / "threadhist.py"),
            "--kernel",
            "steady",
            "--json",
            "-p",
            str(program.process.pid),
        ]
        tool = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert tool.stderr is not None
        while not (line := tool.stderr.readline()).endswith(f"attached to {program.process.pid} (endless)\n"):
            assert line  # a first line may say that not all kernels are instrumented yet
        time.sleep(1)
        program.say("start")
        program.say("behind")
        time.sleep(0.2)
        yield program, tool
        assert settled(program.process.pid) == []
        program.end()


def found_by(tool: subprocess.Popen[str]) -> tuple[int, int, dict[str, Any], str]:
    """Runs of threads, launches behind the endless kernel, the summary, and notices."""
    out, error = tool.communicate(timeout=100)
    *records, summary = map(json.loads, out.splitlines())
    runs = sum(record["runs"] for record in records if record["type"] == "thread")
    behind = sum(r["launches"] for r in records if r["type"] == "kernel" and r["grid"] == [2, 1, 1])
    return runs, behind, summary, error


def test_a_launch_that_is_in_the_driver_when_the_tool_leaves(
    endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last reading waits for the launch, though nothing runs before it is in its stream."""
    monkeypatch.setenv("CUDASIM_QUEUE", "1")
    with measured_while_a_launch_waits(endless) as (program, tool):
        pid = program.process.pid
        (tid,) = (
            t for t in ptrace.threads_of(pid) if Path(f"/proc/{pid}/task/{t}/comm").read_text() == "behind\n"
        )
        thread = ptrace.TracedThread(pid, tid)
        thread.interrupt()
        assert thread.wait(time.monotonic() + 10)
        tool.send_signal(signal.SIGINT)
        program.say("stop")
        time.sleep(0.4)
        thread.detach()
        runs, behind, summary, error = found_by(tool)
        assert error == "" and summary["lost"] == 0
        assert behind == 2
        assert runs == 128 * summary["launches_instrumented"] > 0


@pytest.mark.every(4)
def test_a_kernel_that_runs_when_the_tool_leaves(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches behind it were not read."""
    monkeypatch.setenv("CUDASIM_QUEUE", "1")
    with measured_while_a_launch_waits(endless) as (program, tool):
        tool.send_signal(signal.SIGINT)
        runs, _, summary, error = found_by(tool)
        assert "some kernels may still have been running at the last reading" in error
        assert runs < 128 * summary["launches_instrumented"]
        program.say("stop")


def test_a_program_that_ends_while_its_kernel_runs(endless: Path, tmp_path: Path) -> None:
    """What the kernel would still have counted is missing."""
    found = tmp_path / "found"
    command = [sys.executable, TOOLS / "threadhist.py", "--json", "-o", found, "--"]
    with (
        (tmp_path / "error").open("w") as error,
        endless_program(*command, endless, "0", error=error) as program,
    ):
        program.say("start")
        program.process.communicate("leave\n", timeout=100)
        assert program.process.returncode == 0
    error_text = (tmp_path / "error").read_text()
    assert "ended while a kernel was running or had failed; results may be incomplete" in error_text


def test_a_module_that_is_loaded_while_a_kernel_runs_that_does_not_end(
    endless: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With lazy loading, the program's own load does not wait for the kernel. The copies come once it has ended."""
    monkeypatch.setenv("CUDASIM_HOSTILE", "1")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    found = tmp_path / "found"
    command = [
        sys.executable,
        TOOLS / "threadhist.py",
        "--kernel",
        "fresh",
        "--json",
        "-o",
        found,
        "0.2",
        "--",
    ]
    with endless_program(*command, endless, "0") as program:
        program.say("start")
        before = time.monotonic()
        program.say("load")
        assert time.monotonic() - before < 60
        program.say("stop")
        until = time.monotonic() + 60
        while '"kernel":"fresh"' not in found.read_text():
            assert program.say("fresh") == 1 and time.monotonic() < until
            time.sleep(0.1)
        program.end()


# --- kernels that do not end by themselves, launched again and again, and a driver that waits for them ---


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("lifecycle"), "again")


@pytest.mark.long
@pytest.mark.parametrize("how", [[], ["graph"], ["value"]])
def test_kernels_that_do_not_end_launched_again_and_again(
    again: Path, how: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver loads and frees once such a kernel has ended, with a lock that the program needs: none may be launched meanwhile."""
    monkeypatch.setenv("CUDASIM_HOSTILE", "1")
    freed_late = 0
    with endless_program(again, *how) as program:
        pid, free = program.process.pid, program.say("free")
        for tool in ("threadhist", "launchlate"):
            command = [sys.executable, str(TOOLS / f"{tool}.py"), "-d", "1.2", "--json", "-p", str(pid)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
            assert json.loads(done.stdout.splitlines()[-1])["launches_seen"] > 0
            until = time.monotonic() + 2
            while (own := threads(pid)) and time.monotonic() < until:
                freed_late += "gpubpf-free" in own
                time.sleep(0.02)
            program.say("free")  # it still answers
        program.say("stop")
        assert settled(pid) == []
        assert program.say("free") == free
        program.end()
    assert freed_late


# --- calls of the driver that are left in their midst ---


@pytest.mark.every(2)
def test_a_program_that_jumps_out_of_calls_of_the_driver(tmp_path: Path) -> None:
    """attach/jumps.c: each launch that it comes back from is measured, and the attachment ends."""
    jumps = built(tmp_path, "jumps")
    command = [sys.executable, str(TOOLS / "threadhist.py"), "--json"]
    done = subprocess.run([*command, "--", jumps, "100"], capture_output=True, text=True, timeout=100)
    *_, kernel, summary = (json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{")
    assert done.returncode == 0, done.stderr
    assert kernel["launches"] == summary["launches_instrumented"] == 101
    assert summary["launches_seen"] == 201  # of the others, what was begun
    with subprocess.Popen([jumps], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
        for _ in range(2):
            measured = subprocess.run(
                [*command, "-d", "1", "-p", str(program.pid)],
                capture_output=True, text=True, timeout=100, check=True,
            )  # fmt: skip
            assert json.loads(measured.stdout.splitlines()[-1])["launches_instrumented"] > 20
        assert settled(program.pid) == []
        out, _ = program.communicate("\n", timeout=100)
        assert program.returncode == 0 and int(out) > 40


def test_a_stack_on_which_a_call_was_left_and_that_is_gone(tmp_path: Path) -> None:
    """attach/unmapped.c: nothing is read there, and what is launched next is measured."""
    program = subprocess.Popen(
        [built(tmp_path, "unmapped")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    with program:
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
        try:
            for seconds in ("1", "4", "16"):  # on a busy machine there are few launches in a second
                measured = subprocess.run(
                    [sys.executable, str(TOOLS / "threadhist.py"), "--json", "-d", seconds, "-p", str(program.pid)],
                    capture_output=True, text=True, timeout=90,
                )  # fmt: skip
                assert measured.returncode == 0, measured.stderr
                launches = json.loads(measured.stdout.splitlines()[-1])["launches_instrumented"]
                if launches > 20:
                    break
            ended = program.poll()
        finally:
            out, error = program.communicate("\n", timeout=30)
    assert ended is None and program.returncode == 0, error
    assert launches > 20 and int(out) > 20


# --- what no hook saw ---


@pytest.mark.parametrize("context", ["0", "1"])
def test_modules_that_no_hook_saw(tmp_path: Path, context: str) -> None:
    program = built(tmp_path, "unseen")
    alone = subprocess.run([program, context, "5"], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert int(alone) == 5 * 32 * 1001
    found = tmp_path / "found"
    command = [sys.executable, TOOLS / "threadhist.py", "--json", "-o", found, "--", program, context, "5"]
    for _ in range(2):  # the first one may have to compile, and launches until then have a reason
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        assert done.stdout == alone
        *records, summary = map(json.loads, found.read_text().splitlines())
        measured_or_not = summary["launches_instrumented"] + sum(summary["not_instrumented"].values())
        assert summary["launches_seen"] == measured_or_not == 10 and summary["lost"] == 0
    launches = {r["kernel"]: r["launches"] for r in records if r["type"] == "kernel"}
    assert launches == {"seen": 5, "unseen": 5} and summary["launches_instrumented"] == 10


# --- green contexts, and launches on several devices ---

HOSTILE = pytest.mark.parametrize("hostile", [False, True], ids=["", "hostile"])


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("contexts"), "contexts")


def summary(contexts: Path, *arguments: str, hostile: bool = False) -> dict[str, Any]:
    command = [sys.executable, str(TOOLS / "threadhist.py"), "--json", "--", str(contexts), *arguments]
    environment = os.environ | {"CUDASIM_HOSTILE": "1" if hostile else "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.every(2)
@HOSTILE
@pytest.mark.parametrize(("way", "each"), [("alone", 20), ("kept", 30)])
def test_every_launch_is_counted_until_the_context_ends(
    contexts: Path, way: str, each: int, hostile: bool
) -> None:
    found = summary(contexts, way, "4", hostile=hostile)
    assert found["launches_instrumented"] == 4 * each and found["lost"] == 0 and not found["not_instrumented"]


def test_a_launch_on_several_devices_is_counted(contexts: Path) -> None:
    found = summary(contexts, "several", "3")
    assert found["launches_instrumented"] == 0 and found["not_instrumented"] == {"legacy launch": 3}


@HOSTILE
def test_green_contexts_in_a_program_that_runs(contexts: Path, hostile: bool) -> None:
    environment = os.environ | {"CUDASIM_HOSTILE": "1" if hostile else "0"}
    with subprocess.Popen(
        [contexts, "until"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdin and program.stdout and program.stdout.readline() == "ready\n"
        command = [sys.executable, str(TOOLS / "threadhist.py"), "--json", "-p", str(program.pid), "-d", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        program.stdin.write("\n")
    assert program.returncode == 0 and done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["launches_instrumented"] > 0 and found["lost"] == 0


# --- a measurement that ends while an agent starts ---


def test_an_agent_that_is_stopped_while_it_starts_does_not_begin_to_measure(contexts: Path) -> None:
    """Its hooks come out again, and it does not report them: launches would be counted after the last reading."""
    with subprocess.Popen(
        [contexts, "until"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin and program.stdout and program.stdout.readline() == "ready\n"
        try:
            for _ in range(10):
                assert Message.HOOKED not in stopped_while_it_starts(program.pid)
                assert settled(program.pid) == []
        finally:
            program.stdin.write("\n")
    assert program.returncode == 0


def stopped_while_it_starts(pid: int) -> set[int]:
    """Attach an agent, and end the measurement when it has its hooks. Return the kinds of its messages."""
    injection = loading.inject(pid, agent.LIBRARY, ATTACH_FUNCTION, connect=True)
    assert injection.socket is not None
    frames, kinds = protocol.Frames(), set[int]()
    with injection.socket as connection:
        while select.select([connection], [], [], 60)[0]:
            if (received := connection.receive(1 << 20)) is None or not received.data:
                break
            for kind, _, file in frames.feed(received.data, received.files):
                kinds.add(kind)
                if kind == Message.STUBS:
                    connection.send(protocol.welcome(protocol.AgentConfig([], 1 << 20), 1))
                if kind == Message.PATCHES:
                    assert file is not None
                    patching.apply(pid, patching.read_patches(file))
                    connection.send(protocol.drain(1, 0, DrainFlag.STOP) + protocol.patched())
                if file is not None:
                    os.close(file)
    assert injection.wait() == AttachStatus.FAILED
    return kinds
