"""Processes that run already, several at once: they join a measurement, end, become other programs; what cannot join is counted."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pkgutil
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpubpf import agent
from gpubpf.agent import protocol
from gpubpf.attach import loading
from gpubpf.errors import out_of_files
from gpubpf.images.sidecar import Sidecar
from gpubpf.process import traceable
from gpubpf.records import reasons
from gpubpf.records.reasons import REACHED_LATE, UNHOOKED
from gpubpf.session.session import Session
from gpubpf.traced import device
from gpubpf.traced.measurement import Listener, Plan, Targets
from gpubpf.traced.server import Server
from gpubpf.traced.workers import SidecarBuilder

HERE = Path(__file__).parents[1] / "attach"
TOOLS = Path(__file__).parents[3] / "tools"
HEADERS = [
    *sorted(Path("/usr/local").glob("cuda*/include")),
    *(Path(place) / "nvidia/cu13/include" for place in sys.path),
]
HEADER = next((place for place in HEADERS if (place / "cuda.h").exists()), None)

pytestmark = [
    pytest.mark.skipif(
        os.uname().machine != "x86_64" or not shutil.which("gcc"), reason="needs gcc on x86-64"
    ),
    pytest.mark.skipif(HEADER is None, reason="needs cuda.h"),
    pytest.mark.skipif(
        not (device.LIBRARIES / "libcuda.so.1").exists() or not agent.LIBRARY.exists(),
        reason="needs the embedded device and the agent (script/setup)",
    ),
]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def built() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpubpf-several-") as place:
        cuda = [f"-I{HEADER}", f"-L{device.LIBRARIES}", "-lcuda", f"-Wl,-rpath,{device.LIBRARIES}"]
        for name in ("becomes", "loads"):
            command = ["gcc", "-O1", "-w", "-pthread", HERE / f"{name}.c", "-o", f"{place}/{name}", *cuda]
            subprocess.run(command, check=True)
        yield Path(place)


class Program:
    """One of them, which runs until `go` is told the last time."""

    def __init__(self, *command: object, **environment: str) -> None:
        self.process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        self.pid = self.process.pid
        self.ready()

    def ready(self) -> None:
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def go(self) -> None:
        """Launches again, and is done with it."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.ready()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        self.end()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # Popen.kill takes a stop that tracing makes for the end
        self.process.returncode = None
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    with contextlib.ExitStack() as stack:

        def started(*command: object, **environment: str) -> Program:
            program = Program(*command, **environment)
            stack.callback(program.kill)
            return program

        yield started


class Tool:
    """A tool, whose notices are waited for."""

    def __init__(self, *arguments: object, name: str = "threadhist", **how: Any) -> None:
        self.said: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, str(TOOLS / f"{name}.py"), *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how,
        )  # fmt: skip
        self.late = threading.Timer(200, self.process.kill)  # a test that hangs fails
        self.late.daemon = True
        self.late.start()

    def wait_for(self, text: str) -> None:
        while not any(text in line for line in self.said):
            self._read()

    def wait_until_attached(self, processes: int = 1) -> None:
        """Wait until all kernels of so many processes are instrumented."""
        while len(self.attaches()) < processes:
            self._read()

    def attaches(self) -> list[str]:
        """Return the notices about processes in which all kernels are instrumented. On a busy machine another notice comes before."""
        return [line for line in self.said if "attached to" in line and "not instrumented yet" not in line]

    def _read(self) -> None:
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert line, f"the tool ended; it reported {self.said}"
        self.said.append(line.rstrip("\n"))

    def ended(self, status: int = 0) -> list[dict[str, Any]]:
        """Its records."""
        out, error = self.process.communicate(timeout=100)
        self.late.cancel()
        self.said += error.splitlines()
        assert self.process.returncode == status, self.said
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def of(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["type"] == kind]


def attached(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of processes in which all kernels are instrumented. On a busy machine, one with `waiting` comes before."""
    return [record for record in of(records, "attached") if "waiting" not in record]


def test_it_ends_when_all_have_and_what_cannot_join_is_counted(
    built: Path, start: Callable[..., Program]
) -> None:
    first, second = (start(built / "becomes", "end") for _ in range(2))
    gone = subprocess.Popen(["true"])
    gone.wait()
    idle = subprocess.Popen(["sleep", "1000"])
    pids = f"{first.pid},{gone.pid},{second.pid},{idle.pid},{first.pid}"
    tool = Tool("-p", pids, "-p", second.pid, "--json")
    try:
        tool.wait_until_attached(2)
    finally:
        idle.kill()
        idle.wait()
    assert f"threadhist: note: there is no process {gone.pid}; run ps to list the processes" in tool.said
    assert any("has not loaded the CUDA driver" in line for line in tool.said)
    for program, times in ((first, 1), (second, 2)):
        for _ in range(times):
            program.go()
        program.end()
    records = tool.ended()
    assert {r["pid"]: r["launches"] for r in of(records, "kernel")} == {first.pid: 3, second.pid: 6}
    times_ns = [r["ts_ns"] for r in attached(records)]
    assert len(times_ns) == 2 and times_ns == sorted(times_ns)
    (summary,) = of(records, "summary")
    assert summary["launches_seen"] == summary["launches_instrumented"] == 9 and summary["lost"] == 0
    processes = summary["processes"]
    assert processes.pop("unmeasured_ns").keys() == {"ended"}
    assert processes == {"measured": 2, "missed": {"ended": 1, "no CUDA driver": 1}}


def test_nobody_to_be_measured_is_one_line(built: Path, start: Callable[..., Program]) -> None:
    tool = Tool("-p", "999999,1000000")
    assert tool.ended(1) == []
    assert tool.said == [
        "threadhist: cannot trace any of the 2 processes: there is no process 999999; run ps to list the processes"
    ]


def test_clocks_that_have_nothing_in_common(built: Path, start: Callable[..., Program]) -> None:
    real = start(built / "becomes", "end")
    virtual = start(built / "becomes", "end", CUDASIM_CLOCK="virtual")
    tool = Tool("-p", f"{real.pid},{virtual.pid}")
    assert tool.ended(1) == []
    assert tool.said == [
        f"threadhist: pid {real.pid} uses the embedded device and pid {virtual.pid} uses the embedded device on its virtual"
        " clock, which share neither clock nor memory; trace them one at a time"
    ]


def test_the_virtual_clock_is_the_processes_own(built: Path, start: Callable[..., Program]) -> None:
    program = start(built / "becomes", "end", CUDASIM_CLOCK="virtual")
    tool = Tool("-p", program.pid, "--json", name="launchlate")
    tool.wait_until_attached()
    program.go()
    program.end()
    records = tool.ended()
    (kernel,) = of(records, "kernel")
    assert kernel["count"] == 3
    assert kernel["api_ns"]["max"] == 1000  # what a launch takes there
    assert attached(records)[0]["ts_ns"] < 2_000_000


def test_which_launches_are_meant_counts_from_the_attach(built: Path, start: Callable[..., Program]) -> None:
    program = start(built / "becomes", "end")
    tool = Tool("-p", program.pid, "--json", "--launch", "3:8", "--sample", "2")
    tool.wait_until_attached()
    for _ in range(4):
        program.go()
    program.end()
    (summary,) = of(tool.ended(), "summary")
    assert summary["launches_instrumented"] == 3
    assert summary["not_instrumented"] == {"filtered": 6, "sampled out": 3}


def test_a_process_that_becomes_another_program(built: Path, start: Callable[..., Program]) -> None:
    program = start(built / "becomes", "exec", "/bin/sleep", "1000")
    tool = Tool("-p", program.pid, "--json")
    tool.wait_until_attached()
    program.go()
    program.end()
    (summary,) = of(tool.ended(), "summary")  # while it sleeps
    assert program.process.poll() is None
    assert summary["launches_instrumented"] == 3
    assert any(
        "executed another program; that program's launches are not traced" in line for line in tool.said
    )


def test_a_command_that_becomes_another_program_remains_one_process(built: Path) -> None:
    program = str(built / "becomes")
    command = (program, "exec", program, "exec", program, "end")
    tool = Tool("--json", "--device", "sim", "--", *command, stdin=subprocess.DEVNULL)
    records = tool.ended()
    (summary,) = of(records, "summary")
    assert summary["launches_instrumented"] == 9
    assert summary["processes"] == {"measured": 1, "missed": {}, "programs": 3}
    (pid,) = {record["pid"] for record in attached(records)}
    first = f"threadhist: note: attached to {pid} (becomes)"
    assert tool.attaches() == [first, *[f"{first}, after it executed another program"] * 2]
    lost = [line for line in tool.said if "lost" in line]
    because = (
        f"threadhist: note: pid {pid} (becomes) executed another program before its results could be read; "
    )
    assert all(line.startswith(because) for line in lost) and bool(lost) == bool(summary["lost"])


def test_a_process_that_is_gone_has_no_children() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert traceable.children(gone.pid) == set()


def test_children_that_are_not_followed_are_said(built: Path, start: Callable[..., Program]) -> None:
    program = start(built / "becomes", "spawn", built / "becomes", "fork")
    tool = Tool("-p", program.pid, "0.3")
    tool.wait_until_attached()
    program.end()
    program.ready()  # the child
    tool.wait_for("was started by a traced process and uses the GPU, but is not traced; add it to -p")
    tool.process.send_signal(signal.SIGINT)
    tool.ended()
    assert sum("add it to -p" in line for line in tool.said) == 1


def test_one_tool_at_a_time_then_the_next(built: Path, start: Callable[..., Program]) -> None:
    program = start(built / "becomes", "end")
    first = Tool("-p", program.pid, "--json")
    first.wait_until_attached()
    second = Tool("-p", program.pid)
    assert second.ended(1) == []
    assert second.said == [
        f"threadhist: pid {program.pid} (becomes) is already traced by threadhist, pid {first.process.pid}; stop that tool first"
    ]
    program.go()
    first.process.send_signal(signal.SIGTERM)
    assert of(first.ended(), "summary")[0]["launches_instrumented"] == 3
    third = Tool("-p", program.pid, "--json")  # at once
    third.wait_until_attached()
    program.go()
    program.end()
    assert of(third.ended(), "summary")[0]["launches_instrumented"] == 3


def test_a_name_that_nothing_has(built: Path, start: Callable[..., Program]) -> None:
    program = start(built / "becomes", "end")
    tool = Tool("-p", program.pid, "--kernel", "other")
    tool.wait_until_attached()
    program.go()
    program.end()
    tool.ended(1)
    assert tool.said[-1] == "threadhist: no kernel matches 'other'; kernels seen: again"


def session(*pids: int, listener: Listener | None = None) -> Session:
    plan = Plan(device.Device("sim", {"CUDASIM_CLOCK": "real"}))
    return Session(Targets(pids=pids), plan, SidecarBuilder(lambda image, target: Sidecar()), listener)


def test_processes_join_at_any_time_from_any_thread(built: Path, start: Callable[..., Program]) -> None:
    first, second = (start(built / "becomes", "end") for _ in range(2))
    told: list[int] = []
    listener = Listener(
        attached=lambda pid, comm, ts_ns, again: told.append(pid),
        waiting=lambda pid, comm, ts_ns, kernels: told.append(pid),  # it ended before all copies were ready
    )
    answers: list[str | None] = []
    with session(first.pid, listener=listener) as measured:
        ask = [
            threading.Thread(target=lambda pid=pid: answers.append(measured.join(pid)))
            for pid in (second.pid, second.pid, 999999)
        ]
        for thread in ask:
            thread.start()
        for thread in ask:
            thread.join()
        assert sorted(answers, key=str) == [None, None, reasons.ENDED]
        assert measured.join(first.pid) is None  # it is in already
        second.go()
        first.end()
        second.end()
        for _ in measured.intervals():
            pass
    assert list(dict.fromkeys(told)) == [first.pid, second.pid]
    summary = measured.summary()
    assert summary["launches_seen"] == 3
    assert summary["processes"].pop("unmeasured_ns").keys() == {reasons.ENDED}
    assert summary["processes"] == {"measured": 2, "missed": {reasons.ENDED: 1}}


def test_another_device_is_missed(built: Path, start: Callable[..., Program]) -> None:
    first, other = start(built / "becomes", "end"), start(built / "becomes", "end", CUDASIM_CLOCK="virtual")
    with session(first.pid) as measured:
        assert measured.join(other.pid) == reasons.OTHER_DEVICE
        first.end()
        for _ in measured.intervals():
            pass


def test_a_process_that_ends_while_it_joins(built: Path, start: Callable[..., Program]) -> None:
    stays = start(built / "becomes", "end")
    files = len(os.listdir("/proc/self/fd"))
    with session(stays.pid) as measured:
        for delay in (0.0, 0.01, 0.03):
            ends = start(built / "loads", 1)
            threading.Timer(delay, os.kill, (ends.pid, signal.SIGKILL)).start()
            assert measured.join(ends.pid) in (None, reasons.ENDED)
        stays.end()
        for _ in measured.intervals():
            pass
    assert measured.summary()["lost"] == 0
    until = time.monotonic() + 60  # a thread may be about to put hooks in
    while len(os.listdir("/proc/self/fd")) > files + 3 * 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= files + 3 * 2  # the programs' own


def test_one_that_becomes_another_program_while_it_joins_has_ended(
    built: Path, start: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is another's, whom nobody forbids to be traced."""
    first = start(built / "becomes", "end")
    other = start(built / "becomes", "exec", shutil.which("sleep"), 1000)
    loaded = loading._load

    def becomes(*arguments: Any) -> tuple[int, int]:
        other.end()
        until = time.monotonic() + 60
        while traceable.comm(other.pid) != "sleep" and time.monotonic() < until:
            time.sleep(0.001)
        return loaded(*arguments)

    with session(first.pid) as measured:
        monkeypatch.setattr(loading, "_load", becomes)
        assert measured.join(other.pid) == reasons.ENDED


@pytest.mark.parametrize(
    "function", ["os.pidfd_open", "gpubpf.process.traceable.status", "gpubpf.attach.loading.inject"]
)
def test_without_files_a_process_is_missed_for_that_reason(
    built: Path, start: Callable[..., Program], monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    first, other = start(built / "becomes", "end"), start(built / "becomes", "end")
    original = pkgutil.resolve_name(function.rpartition(".")[0])
    called = getattr(original, function.rpartition(".")[2])

    def without_files(pid: int, *arguments: Any, **named: Any) -> Any:
        if pid == other.pid:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return called(pid, *arguments, **named)

    with session(first.pid) as measured:
        with monkeypatch.context() as patch:
            patch.setattr(original, function.rpartition(".")[2], without_files)
            assert measured.join(other.pid) == reasons.OUT_OF_FILES
        assert measured.join(other.pid) is None
    assert measured.summary()["processes"]["missed"] == {reasons.OUT_OF_FILES: 1}


def test_with_too_few_files_a_process_is_missed_for_that_reason(
    built: Path, start: Callable[..., Program]
) -> None:
    """Whichever of the files that an attach opens is one too many."""
    first, other = start(built / "becomes", "end"), start(built / "becomes", "end")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with session(first.pid) as measured, contextlib.ExitStack() as gaps:
        number, most = -1, max(int(name) for name in os.listdir("/proc/self/fd"))
        while number <= most:
            number = os.dup(0)
            gaps.callback(os.close, number)
        answers: list[str | None] = []
        try:
            while None not in answers and len(answers) < 40:
                resource.setrlimit(resource.RLIMIT_NOFILE, (number + 1 + len(answers), limits[1]))
                answers.append(measured.join(other.pid))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert len(answers) > 3 and set(answers[:-1]) == {reasons.OUT_OF_FILES} and answers[-1] is None


@pytest.mark.parametrize("message", ["hello", "hooked"])
@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "too many"), OSError(errno.EIO, "broken"), protocol.Malformed("a broken message")],
    ids=["files", "broken", "malformed"],
)
def test_a_process_of_which_a_message_cannot_be_read_is_missed_for_that_reason(
    built: Path,
    start: Callable[..., Program],
    monkeypatch: pytest.MonkeyPatch,
    message: str,
    error: Exception,
) -> None:
    """The first one, or the one that says that its hooks are live: then the agent takes itself for attached."""
    first, other = start(built / "becomes", "end"), start(built / "becomes", "end")

    def fails(*_: Any) -> Any:
        raise error

    with session(first.pid) as measured:
        with monkeypatch.context() as patch:
            patch.setattr(protocol, message, fails)
            reason = measured.join(other.pid)
        expected = reasons.OUT_OF_FILES if out_of_files(error) else reasons.UNHOOKED
        assert reason == expected
        assert measured.join(other.pid) is None
    processes = measured.summary()["processes"]
    assert (processes["measured"], processes["missed"]) == (2, {expected: 1})


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM])
def test_a_process_whose_shared_maps_take_too_many_files(
    built: Path, start: Callable[..., Program], monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    first, other = start(built / "becomes", "end"), start(built / "becomes", "end")

    def process() -> Any:
        raise OSError(error, os.strerror(error))

    with session(first.pid) as measured:
        with monkeypatch.context() as patch:
            patch.setattr(measured._measurement, "host", SimpleNamespace(process=process, in_kernel=True))
            reason = measured.join(other.pid)
        assert reason == (reasons.OUT_OF_FILES if error == errno.EMFILE else None)
        assert measured.join(other.pid) is None


@pytest.mark.parametrize("continues", [False, True])
def test_a_stopped_process(built: Path, start: Callable[..., Program], continues: bool) -> None:
    first, other = start(built / "becomes", "end"), start(built / "becomes", "end")
    with session(first.pid) as measured:
        os.kill(other.pid, signal.SIGSTOP)
        timer = threading.Timer(0.2 if continues else 60, os.kill, (other.pid, signal.SIGCONT))
        timer.start()
        try:
            assert measured.join(other.pid) == (None if continues else reasons.STOPPED)
        finally:
            timer.cancel()
            os.kill(other.pid, signal.SIGCONT)


@pytest.mark.parametrize("ends", [False, True])
def test_a_process_whose_main_thread_has_exited(
    built: Path, start: Callable[..., Program], monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """On a busy machine, its other threads may take a while to end, too."""
    first, other = start(built / "becomes", "end"), start(built / "becomes", "end")
    check = traceable.check_traceable

    def leaderless(pid: int) -> None:
        check(pid)
        if pid == other.pid:
            raise traceable.Exiting("its main thread has exited")

    with session(first.pid) as measured:
        monkeypatch.setattr(traceable, "check_traceable", leaderless)
        timer = threading.Timer(0.3 if ends else 60, os.kill, (other.pid, signal.SIGKILL))
        timer.start()
        try:
            assert measured.join(other.pid) == (reasons.ENDED if ends else reasons.FORBIDDEN)
        finally:
            timer.cancel()


def test_what_a_refusal_for_lack_of_files_says() -> None:
    refusal = traceable.refusal(os.getpid(), errno.ENFILE)
    assert (
        str(refusal)
        == f"pid {os.getpid()} cannot be traced: too many open files; raise the limit (ulimit -n)"
    )


def test_a_process_that_has_ended_has_no_user() -> None:
    """Above all, it is not root."""
    ended = subprocess.Popen(["true"])
    ended.wait(60)
    with pytest.raises(ProcessLookupError):
        traceable.user(ended.pid)


def test_a_dozen_at_once_with_few_files(built: Path, start: Callable[..., Program]) -> None:
    programs = [start(built / "becomes", "end") for _ in range(12)]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    tool = Tool(
        "-p", ",".join(str(program.pid) for program in programs), "--json",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard)),
    )  # fmt: skip
    tool.wait_until_attached(12)
    for program in programs:
        program.go()
        program.end()
    records = tool.ended()
    assert {r["pid"] for r in of(records, "kernel")} == {program.pid for program in programs}
    (summary,) = of(records, "summary")
    assert summary["launches_instrumented"] == 36 and summary["lost"] == 0


@pytest.mark.every(2)
@pytest.mark.parametrize("limit", [100, 1 << 16, 9 << 20, 20 << 20])
def test_a_program_whose_files_must_be_small(
    built: Path, start: Callable[..., Program], limit: int, tmp_path: Path
) -> None:
    """A write beyond RLIMIT_FSIZE sends SIGXFSZ. The program's own files stay small."""
    warm = start(built / "becomes", "end")  # the embedded device translates its kernels, which takes files
    warm.go()
    warm.end()
    limited = ["prlimit", f"--fsize={limit}"]
    program = start(*limited, built / "becomes", "end")
    said = "attached to" if limit > 8 << 20 else "it can make no files in memory"
    tool = Tool("-p", program.pid)
    tool.wait_for(said)
    program.go()
    program.end()
    assert program.process.wait(60) == 0
    tool.ended(0 if limit > 8 << 20 else 1)
    tool = Tool("--device", "sim", "--", *limited, built / "becomes", "end", stdin=subprocess.DEVNULL)
    tool.wait_for(said)
    tool.ended()
    if limit < 8 << 20:
        command = ("--", *limited, built / "becomes", "end")
        tool = Tool("--json", "--device", "sim", *command, stdin=subprocess.DEVNULL)
        (summary,) = of(tool.ended(), "summary")
        assert summary["processes"].pop("unmeasured_ns").keys() == {reasons.UNHOOKED}
        assert summary["processes"] == {"measured": 0, "missed": {reasons.UNHOOKED: 1}}
        assert tool.said[-1].rstrip().endswith("no traced process launched a kernel")


def test_a_process_that_has_just_connected_is_not_forgotten(
    built: Path, start: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that can make no files says so and does not wait. Its process may end before the server gets to it."""
    accept = Server._accept

    def slowly(server: Server) -> bool:
        time.sleep(0.1)
        return accept(server)

    with session(start(built / "becomes", "end").pid) as measured:
        monkeypatch.setattr(Server, "_accept", slowly)
        before = len(measured._measurement.processes)
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as agents:
                agents.connect("\0" + measured._server.socket_name[1:])
        measured._server.settle(60)
        assert len(measured._measurement.processes) == before + 3


def test_a_program_that_can_make_no_file_for_results(built: Path) -> None:
    """memtrace's results take more than the tables that the agent makes first, which have 8 MiB."""
    command = ("--", "prlimit", f"--fsize={9 << 20}", built / "becomes", "end")
    tool = Tool("--json", "--device", "sim", *command, name="memtrace", stdin=subprocess.DEVNULL)
    (summary,) = of(tool.ended(), "summary")
    assert summary["lost"] == summary["launches_instrumented"] > 0
    (why,) = [line for line in tool.said if "lost" in line]
    assert (
        "it could not create a file in memory for its results (ulimit -n, ulimit -f); the counts of up to"
        in why
    )


@pytest.mark.own_processes
@needs_root
def test_every_process_and_one_that_can_open_no_more_files(
    built: Path, start: Callable[..., Program]
) -> None:
    there = start(built / "becomes", "end")
    pid = there.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    free = next(n for n in range(limits[1]) if not Path(f"/proc/{pid}/fd/{n}").exists())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    tool = Tool("--json", "--device", "sim")
    tool.wait_for(f"pid {pid} (becomes) cannot be hooked: socketpair failed in it (Too many open files)")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    tool.process.send_signal(signal.SIGINT)
    (summary,) = of(tool.ended(), "summary")
    assert summary["processes"]["missed"] == {UNHOOKED: 1}
    there.go()
    there.end()
    assert there.process.wait() == 0


@pytest.mark.own_processes
@needs_root
def test_every_process_as_they_come_and_go(built: Path, start: Callable[..., Program]) -> None:
    there = start(built / "becomes", "end")
    tool = Tool("--json", "--device", "sim", "0.4")
    tool.wait_for("watching every process")
    tool.wait_until_attached()
    there.go()
    for times in (2, 3):
        comes = start(built / "becomes", "end")
        tool.wait_until_attached(times)
        comes.go()
        comes.end()
        comes.process.wait()
    tool.process.send_signal(signal.SIGINT)
    records = tool.ended()
    (watching,) = of(records, "watching")
    first = {record["pid"]: record["ts_ns"] for record in reversed(attached(records))}
    there_pid, *came = sorted(first, key=lambda pid: first[pid])
    assert len(came) == 2 and watching["ts_ns"] < first[came[0]]
    launches = Counter[int]()  # records are of what came in each interval
    for record in of(records, "kernel"):
        launches[record["pid"]] += record["launches"]
    (summary,) = of(records, "summary")
    summary["processes"].pop("unmeasured_ns", None)
    late = summary["processes"]["missed"].pop(REACHED_LATE, 0)  # on a machine with other work; which is said
    assert summary["processes"] == {"measured": 3, "missed": {}} and summary["lost"] == 0
    assert there_pid == there.pid and launches[there_pid] == 3
    assert late + sum(launches[pid] == 6 for pid in came) >= 2
