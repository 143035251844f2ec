"""Every process that uses the driver: found, or held at its first cuInit, and let go whatever happens. The programs are in attach/."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import pickle
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpubpf_examples
import gpubpf_fuse
import gpubpf_hold
import gpubpf_locked
import gpubpf_scenes as scenes
from gpubpf import agent, elf
from gpubpf.attach import borrow, holding, loading
from gpubpf.attach.borrow import ProcessCode
from gpubpf.attach.cuinit import CALLED_CUINIT, ENDED, EXECUTED, WAIT_NS, CuInitProbes, Event
from gpubpf.errors import Error, SessionError
from gpubpf.images.sidecar import Sidecar
from gpubpf.kernel import bpf_syscall, fresh_thread, syscalls
from gpubpf.process import address_space, limits, proc, ptrace, traceable
from gpubpf.records.reasons import ENDED as ENDED_EARLY
from gpubpf.records.reasons import FORBIDDEN, NO_DRIVER, REACHED_LATE, TOO_LATE, TRACED
from gpubpf.session.session import Session
from gpubpf.traced import device, machine
from gpubpf.traced.machine import MachineWatcher
from gpubpf.traced.measurement import Measurement, Plan, Targets
from gpubpf.traced.workers import DaemonThreadPool, SidecarBuilder

HERE = Path(__file__).parents[1] / "attach"
HEADERS = [
    *sorted(Path("/usr/local").glob("cuda*/include")),
    *(Path(place) / "nvidia/cu13/include" for place in sys.path),
]
HEADER = next((place for place in HEADERS if (place / "cuda.h").exists()), None)

pytestmark = [
    pytest.mark.whole_machine,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(
        os.uname().machine != "x86_64" or not shutil.which("gcc"), reason="needs gcc on x86-64"
    ),
    pytest.mark.skipif(HEADER is None, reason="needs cuda.h"),
    pytest.mark.skipif(
        not (device.LIBRARIES / "libcuda.so.1").exists(), reason="needs the embedded device (script/setup)"
    ),
]


@pytest.fixture(scope="module")
def built() -> Iterator[Path]:
    """The programs, where every user can run them."""
    with tempfile.TemporaryDirectory(prefix="gpubpf-machine-") as name:
        at = Path(name)
        at.chmod(0o755)
        gcc = ["gcc", "-O1", "-w", "-pthread", f"-I{HEADER}"]
        cuda = [f"-L{device.LIBRARIES}", "-lcuda", "-lm", f"-Wl,-rpath,{device.LIBRARIES}"]
        for command in (
            [*gcc, "-shared", "-fPIC", HERE / "library.c", "-o", at / "library.so"],
            [*gcc, "-shared", "-fPIC", HERE / "library.c", "-o", at / "loaded.so"],
            [*gcc, "-shared", "-fPIC", HERE / "constructor.c", "-o", at / "constructor.so", *cuda],
            [*gcc, HERE / "comes.c", "-o", at / "comes", *cuda],
            [*gcc, HERE / "blocks.c", "-o", at / "blocks"],
            [
                "g++",
                "-std=c++17",
                "-O2",
                "-mavx2",
                "-w",
                "-pthread",
                HERE / "stress.cpp",
                "-o",
                at / "stress",
            ],
        ):
            subprocess.run(command, check=True)
        yield at


class Joined:
    """What a machine asks for: `join` puts a library into those of this test's processes, and leaves all others alone."""

    def __init__(self, built: Path, during: Callable[[int], None] = lambda pid: None) -> None:
        self._built, self._during = built, during
        self.held: list[int] = []
        self.ran: list[int] = []
        self.others: list[int] = []  # processes that are not of this test's programs
        self.ended: list[int] = []  # before it joined; the machine may be too busy to hold it
        self.missed: list[tuple[int, str, str]] = []
        self.failed: list[str] = []
        self.stood_ns: list[int] = []

    def join(self, pid: int, tid: int | None) -> str | None:
        try:
            program = os.readlink(f"/proc/{pid}/exe")
        except OSError:
            self.ended.append(pid)
            return "ended"
        if not program.startswith(str(self._built)):
            self.others.append(pid)
            return "of others"
        try:
            injection = loading.inject(pid, self._built / "library.so", "entry", "abc", starting=tid)
            self._during(pid)
            result = injection.wait()
            assert result == 3 or (result == 12 and tid is not None)  # "abc starting"
        except SessionError as error:
            if os.path.exists(f"/proc/{pid}/exe"):
                self.failed.append(str(error))
            else:  # nor does a zombie have it
                self.ended.append(pid)
            return str(error)
        self.stood_ns.append(injection.stood_ns)
        (self.held if result == 12 else self.ran).append(pid)
        return None

    def miss(self, pid: int, comm: str, reason: str) -> None:
        if comm in ("comes", "exe"):
            self.missed.append((pid, comm, reason))


@contextlib.contextmanager
def watching(joined: Joined, note: Callable[[str], None] = lambda text: None) -> Iterator[MachineWatcher]:
    watched = MachineWatcher(joined.join, joined.miss, note)
    watched.start()
    try:
        yield watched
    finally:
        watched.close()


def run(built: Path, *arguments: object, **how: object) -> list[float]:
    """How long it took, in milliseconds, when it is through."""
    return [took for took, _ in times(built, *arguments, **how)]


def times(built: Path, *arguments: object, **how: object) -> list[tuple[float, float]]:
    """The same, and when it was over."""
    done = subprocess.run(
        [str(built / "comes"), *map(str, arguments)], stdout=subprocess.PIPE, text=True, timeout=60, **how
    )
    assert done.returncode == 0, done
    return [(float(took), float(at)) for took, at in map(str.split, done.stdout.splitlines())]


def eventually(condition: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def exit_status(child: subprocess.Popen[bytes]) -> int:
    """Wait until a child has ended. This process may trace the child, and then takes a stop by tracing (-5) for the end."""
    eventually(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    return child.wait(60)


@contextlib.contextmanager
def placed() -> Iterator[CuInitProbes]:
    """A watch on the embedded device's driver."""
    watch = CuInitProbes(os.getpid(), -1)
    try:
        with open(device.LIBRARIES / "libcuda.so.1", "rb") as file:
            driver = elf.LoadedFile(file.fileno())
            entry = driver.offset(elf.exports(driver)["cuInit"].address)
            watch.attach(f"/proc/self/fd/{file.fileno()}", entry)
        yield watch
    finally:
        watch.close()


@pytest.mark.long
def test_nobody_waits_long_for_a_tool_that_does_not_answer(built: Path) -> None:
    with placed() as watch:

        def came() -> list[tuple[int, int]]:
            return [(e.kind, e.pid) for e in watch.events() if e.comm in ("comes", "exe")]

        child = subprocess.Popen([built / "comes", "execute"], stdout=subprocess.PIPE, text=True)
        out, _ = child.communicate(timeout=60)
        assert child.returncode == 0
        # Twice, as two programs. It waits for WAIT_NS, but where its processor has other things to do.
        assert [
            (CALLED_CUINIT, child.pid),
            (EXECUTED, child.pid),
            (CALLED_CUINIT, child.pid),
            (ENDED, child.pid),
        ] == came()
        assert WAIT_NS / 1e6 * 0.3 < min(float(line.split()[0]) for line in out.splitlines()) < 1000
        waits = subprocess.Popen([built / "comes", "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert waits.stdout is not None and waits.stdout.readline()
        assert came() == [(CALLED_CUINIT, waits.pid)]
        waits.communicate(b"\n", timeout=60)
        assert came() == [(ENDED, waits.pid)] and watch.lost == 0


def test_all_is_seen_in_the_middle_of_somebodys_look_at_a_map(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At tracepoints with records nothing is seen where the kernel preempts itself there. Those are not asked for."""

    def none(name: str) -> None:
        raise Error(f"this kernel has no tracepoint {name}; check its name")

    monkeypatch.setattr(bpf_syscall, "tracepoint", none)
    cpu = min(os.sched_getaffinity(0))
    with scenes.map_reader(cpu), placed() as watch:
        child = subprocess.Popen(
            ["taskset", "-c", str(cpu), built / "comes", "execute"], stdout=subprocess.PIPE
        )
        child.communicate(timeout=60)
        seen = [e.kind for e in watch.events() if e.pid == child.pid]
    assert seen == [CALLED_CUINIT, EXECUTED, CALLED_CUINIT, ENDED]


@pytest.mark.may_come_too_late
def test_who_comes_is_held_until_it_has_joined(built: Path) -> None:
    joined = Joined(built, lambda pid: time.sleep(0.2))
    with watching(joined):
        (took,) = run(built, "once")
        assert took >= 200
        assert len(joined.held) == 1 and not joined.ran
        assert run(built, "again")[0] >= 200
        assert len(joined.held) == 2
        assert len(run(built, "fork")) == 1 and len(joined.held) == 3
        first, second = run(built, "execute")
        assert min(first, second) >= 200 and joined.held[3] == joined.held[4]
        user = run(built, "once", user=65534, group=65534, extra_groups=[])
        assert user[0] >= 200
    assert len(joined.held) == 6 and not joined.ran and not joined.missed
    assert min(joined.stood_ns) > 200_000_000
    run(built, "once")
    assert len(joined.held) == 6 and not joined.ran


def test_all_its_threads_wait(built: Path) -> None:
    over: list[float] = []
    joined = Joined(built, lambda pid: time.sleep(0.3) or over.append(time.monotonic() * 1e3))
    with watching(joined):
        ends = [at for _, at in times(built, "threads")]
        eventually(lambda: over or joined.ran or joined.missed)
        # Where other work kept this one's process away for long, one thread or the process was late, which is said.
        if over and min(ends) < over[0]:
            eventually(lambda: joined.missed)
    assert len(ends) == 4
    assert len(joined.held) + len(joined.ran) == 1 or (joined.missed and not over)


@pytest.mark.may_come_too_late
def test_nobody_sees_a_stop(built: Path) -> None:
    joined = Joined(built, lambda pid: time.sleep(0.1))
    with watching(joined):
        child = subprocess.Popen([built / "comes", "threads"], stdout=subprocess.DEVNULL)
        told = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WCONTINUED | os.WEXITED)
        assert told is not None and told.si_code == os.CLD_EXITED and told.si_status == 0
        child.returncode = 0
    assert len(joined.held) == 1


def test_twenty_at_once(built: Path) -> None:
    joined = Joined(built)
    with watching(joined):
        children = [subprocess.Popen([built / "comes", "once"], stdout=subprocess.DEVNULL) for _ in range(20)]
        assert [exit_status(child) for child in children] == [0] * 20
        eventually(lambda: len(joined.held) + len(joined.ran) + len(joined.ended) == 20)
    assert sorted(joined.held + joined.ran + joined.ended) == sorted(child.pid for child in children)
    # Whoever could not be held is said to be late.
    eventually(lambda: {pid for pid, _, reason in joined.missed if reason == REACHED_LATE} >= set(joined.ran))
    assert joined.held


@pytest.mark.long
def test_those_that_wait_for_their_turn_cost_little(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held threads are checked for a deadlock at intervals, not at each message about one of them; and only while their worker
    runs something: one that waits for its turn is not looked at."""
    checked: dict[int, list[float]] = {}
    begun: set[int] = set()
    early: list[int] = []
    is_deadlocked, blocked_call = loading.Held.is_deadlocked, ptrace.blocked_call

    def check(held: loading.Held) -> bool:
        checked.setdefault(held.pid, []).append(time.monotonic())
        return is_deadlocked(held)

    def look(pid: int, tid: int) -> ptrace.BlockedCall | None:
        if pid not in begun:
            early.append(pid)
        return blocked_call(pid, tid)

    class Slow(Joined):
        def join(self, pid: int, tid: int | None) -> str | None:
            time.sleep(0.4)
            begun.add(pid)
            return super().join(pid, tid)

    monkeypatch.setattr(loading.Held, "is_deadlocked", check)
    monkeypatch.setattr(ptrace, "blocked_call", look)
    joined = Slow(built)
    with watching(joined):
        children = [subprocess.Popen([built / "comes", "once"], stdout=subprocess.DEVNULL) for _ in range(24)]
        assert [exit_status(child) for child in children] == [0] * 24
        eventually(lambda: len(joined.held) + len(joined.ran) + len(joined.ended) == 24)
    assert checked  # else nobody waited for long enough
    between = [b - a for times in checked.values() for a, b in itertools.pairwise(times)]
    assert all(seconds >= machine.TICK for seconds in between), min(between)
    assert not early


@pytest.mark.may_come_too_late
def test_who_was_started_with_a_tool_is_left_to_it(built: Path) -> None:
    joined, notes = Joined(built), list[str]()
    with watching(joined, notes.append):
        run(built, "once", env={**os.environ, "CUDA_INJECTION64_PATH": str(built / "library.so")})
        eventually(lambda: joined.missed or joined.ended)
    assert [reason for _, _, reason in joined.missed] == [TRACED] and not joined.held and not joined.ran
    assert notes == [f"pid {joined.missed[0][0]} (comes) is left to the tool that started it"]


@pytest.mark.long
@pytest.mark.may_come_too_late
def test_who_can_make_no_thread_goes_on(built: Path) -> None:
    reasons: list[str | None] = []

    class Refused(Joined):
        def join(self, pid: int, tid: int | None) -> str | None:
            reason = super().join(pid, tid)
            if reason != "of others":
                reasons.append(reason)
            return reason

    joined = Refused(built)
    with watching(joined):
        child = subprocess.Popen(
            ["prlimit", "--nproc=0", built / "comes", "waits"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=65534, group=65534, extra_groups=[],
        )  # fmt: skip
        eventually(lambda: reasons)
        out, _ = child.communicate(b"\n", timeout=60)
        assert child.returncode == 0 and len(out.split()) == 2
    assert len(reasons) == 1 and reasons[0] is not None and "cannot create a thread" in reasons[0]
    assert not joined.held and not joined.ran


def test_those_that_run_join_first(built: Path) -> None:
    child = subprocess.Popen([built / "comes", "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    joined = Joined(built)
    with watching(joined):
        assert joined.ran == [child.pid] and not joined.missed and not joined.held
        child.communicate(b"\n", timeout=60)
    assert child.returncode == 0


@pytest.mark.long
@pytest.mark.may_come_too_late
def test_it_is_let_go_when_joining_takes_long(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "HOLD", 0.3)
    monkeypatch.setattr(machine, "LEAVE", 0.1)
    gone_on = threading.Event()
    joined = Joined(built, lambda pid: gone_on.wait(60) and None)
    with watching(joined):
        child = subprocess.Popen([built / "comes", "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert 300 <= float(child.stdout.readline().split()[0]) < 30_000
        gone_on.set()
        eventually(lambda: joined.missed)
        assert joined.missed == [(child.pid, "comes", REACHED_LATE)]
        child.communicate(b"\n", timeout=60)
    assert child.returncode == 0


def test_a_lock_that_it_holds_itself_is_not_waited_for(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a constructor, it has the dynamic linker's, which loading the agent takes."""
    monkeypatch.setattr(machine, "HOLD", 30.0)
    joined = Joined(built)
    with watching(joined):
        began = time.monotonic()
        done = subprocess.run(
            [built / "comes", "library", built / "constructor.so"], stdout=subprocess.PIPE, timeout=60
        )
        assert done.returncode == 0 and done.stdout == b"loaded\n"
        assert time.monotonic() - began < holding.LIMIT
    assert not joined.held and len(joined.ran) + len(joined.missed) <= 2  # late, or it had ended


@pytest.mark.may_come_too_late
def test_who_is_killed_while_it_is_held_is_dead(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "HOLD", 30.0)
    joined = Joined(built, lambda pid: os.kill(pid, signal.SIGKILL))
    with watching(joined):
        began = time.monotonic()
        child = subprocess.Popen([built / "comes", "threads"], stdout=subprocess.DEVNULL)
        assert exit_status(child) == -signal.SIGKILL
        assert time.monotonic() - began < holding.LIMIT


@pytest.mark.may_come_too_late
def test_the_tool_is_killed_while_it_holds(built: Path) -> None:
    """All go on at once: also those threads that just stand."""
    program = f"""
import os, sys, time
from pathlib import Path
from typing import Any
from gpubpf.traced import machine
def join(pid, tid):
    if not os.readlink(f"/proc/{{pid}}/exe").startswith({str(built)!r}):
        return "of others"
    print("holding", flush=True)
    time.sleep(60)
machine.HOLD = 30.0
machine.MachineWatcher(join, lambda *a: None, print).start()
print("ready", flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(loading.__file__).parents[2])}
    tool = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert tool.stdout is not None
    while tool.stdout.readline() != "ready\n":
        assert tool.poll() is None
    child = subprocess.Popen([built / "comes", "threads"], stdout=subprocess.PIPE)
    assert select.select([tool.stdout], [], [], 60)[0] and tool.stdout.readline() == "holding\n"
    time.sleep(0.2)
    assert child.poll() is None
    tool.kill()
    began = time.monotonic()
    assert child.wait(60) == 0 and time.monotonic() - began < holding.LIMIT * 0.8
    tool.communicate()


@pytest.mark.long
def test_who_was_parked_finds_its_own_way_back(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word, after a while: every thread of a program that checks itself."""
    monkeypatch.setattr(borrow, "TURNS", 20)
    process = subprocess.Popen(
        [built / "stress", built / "loaded.so"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.1)

    def park(tid: int) -> int:
        with address_space.Memory(process.pid) as memory:
            code = ProcessCode(process.pid, memory, address_space.mappings(process.pid))
            thread = ptrace.TracedThread(process.pid, tid)
            thread.interrupt()
            if not thread.wait(time.monotonic() + 1):
                return 0
            base = borrow.make_worker_and_wait(thread, memory, code, code.functions(process.pid), False)
            if not base:
                thread.release()
            return base

    parked = 0
    for _ in range(60):
        for tid in ptrace.threads_of(process.pid):
            with contextlib.suppress(ptrace.ThreadEnded, ptrace.TraceRefused):
                parked += fresh_thread.run(lambda tid=tid: park(tid), "park") != 0
        time.sleep(0.05)
        if parked >= 40:
            break
    out, _ = process.communicate("\n", timeout=60)
    assert process.returncode == 0
    turns = {name: int(n) for name, n in re.findall(r"^(\w+) (\d+)$", out, re.M)}
    assert parked >= 20 and min(turns.values()) > 10, (parked, turns)


@pytest.mark.may_come_too_late
def test_a_driver_of_its_own_in_a_container(built: Path, tmp_path: Path) -> None:
    """A copy that no process had mapped before: found, and measured from then on. The next one is held."""
    script = (
        f"mkdir -p {tmp_path}/own && mount -t tmpfs none {tmp_path}/own && cp {device.LIBRARIES}/libcuda.so.1 {tmp_path}/own"
        f" && export LD_LIBRARY_PATH={tmp_path}/own && {built}/comes waits && {built}/comes waits"
    )
    unshare = [
        "unshare",
        "--mount",
        "--pid",
        "--net",
        "--user",
        "--map-root-user",
        "--mount-proc",
        "--fork",
        "--kill-child",
    ]
    if subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no namespaces here")
    joined = Joined(built)
    with watching(joined):
        process = subprocess.Popen(
            [*unshare, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": os.environ["PATH"]}
        )  # fmt: skip
        assert process.stdin is not None
        try:
            eventually(lambda: joined.ran and joined.missed)
            process.stdin.write(b"\n")
            process.stdin.flush()
            eventually(lambda: joined.held, 20)
            process.communicate(b"\n", timeout=60)
        finally:
            process.kill()  # and all that it started
    assert process.returncode == 0
    assert joined.missed == [(joined.ran[0], "comes", REACHED_LATE)] and joined.held[0] != joined.ran[0]


@pytest.mark.may_come_too_late
def test_who_started_after_the_probe_is_left_to_it(built: Path) -> None:
    """A scan for those that use a new driver file finds it before its first cuInit. It is held there, and is not late."""
    joined = Joined(built)
    with watching(joined) as watched:
        # Starts are known in ticks, rounded down: who starts in the tick of the probe may have been first.
        time.sleep(1 / os.sysconf("SC_CLK_TCK"))
        process = subprocess.Popen([built / "comes", "later"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        files = set(machine._drivers(process.pid))
        assert files and not watched._scan_processes(True, True, new=files)
        process.communicate(b"\n", timeout=60)
    assert joined.held == [process.pid] and not joined.ran and not joined.missed


def test_a_process_whose_driver_has_a_probe_is_seldom_scanned_again(built: Path) -> None:
    """Others are scanned after twice as long each time: many seconds pass until that takes as long."""
    with watching(Joined(built)) as watched:
        process = subprocess.Popen([built / "comes", "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        eventually(lambda: {process.pid, other.pid} <= watched._next_scan.keys())
        eventually(lambda: watched._next_scan[process.pid].pause == machine.MAX_SCAN_INTERVAL, 15)
        assert watched._next_scan[other.pid].pause < machine.MAX_SCAN_INTERVAL
        for one in (process, other):
            one.communicate(b"\n", timeout=60)


@pytest.mark.may_come_too_late
def test_a_driver_whose_mapping_changes_is_tried_again(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dynamic linker maps a library in several steps: a scan in between finds a range that is no more when it is opened."""
    shutil.copy(device.LIBRARIES / "libcuda.so.1", tmp_path)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    own = os.stat(tmp_path / "libcuda.so.1").st_ino
    drivers, stale = machine._drivers, []

    def changing(pid: int) -> dict[tuple[bytes, int], str]:
        found = drivers(pid)
        if not stale and own in (inode for _, inode in found):
            stale.append(pid)
            return dict.fromkeys(found, f"/proc/{pid}/map_files/1000-2000")
        return found

    joined = Joined(built)
    with watching(joined):
        monkeypatch.setattr(machine, "_drivers", changing)
        first = subprocess.Popen(
            [built / "comes", "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        eventually(lambda: joined.missed, 20)
        assert stale and joined.ran == [first.pid]
        assert joined.missed == [(first.pid, "comes", REACHED_LATE)]
        run(built, "once", env=environment)
        assert len(joined.held) == 1
        first.communicate(b"\n", timeout=60)


def test_who_came_unseen_is_found(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel skipped the probe for it. The next scan finds it, and it counts as late."""
    notes: list[str] = []
    skipped = 0
    joined = Joined(built)
    monkeypatch.setattr(machine.HoldHelper, "lost", property(lambda self: (0, skipped)))
    child = subprocess.Popen([built / "comes", "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    with monkeypatch.context() as nobody:
        nobody.setattr(machine, "_drivers", lambda pid: {})
        watched = MachineWatcher(joined.join, joined.miss, notes.append)
        watched.start()
    try:
        time.sleep(2 * machine.MIN_SCAN_INTERVAL)
        assert not joined.ran
        skipped = 1
        eventually(lambda: joined.missed, 20)
    finally:
        watched.close()
        child.communicate(b"\n", timeout=60)
    assert joined.missed == [(child.pid, "comes", REACHED_LATE)] and joined.ran == [child.pid]
    assert sum("skipped" in note for note in notes) == 1


def test_a_scan_without_open_files_is_repeated(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that cannot open files says so once, and looks at every process again when it can."""
    notes: list[str] = []
    joined = Joined(built)
    failing = 3
    drivers = machine._drivers
    lines = proc.lines

    def read(pid: int, name: str, *most: int) -> Iterator[bytes]:
        nonlocal failing
        if failing:
            failing -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return lines(pid, name, *most)

    child = subprocess.Popen([built / "comes", "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    monkeypatch.setattr(machine, "_drivers", lambda pid: {})
    watched = MachineWatcher(joined.join, joined.miss, notes.append)
    watched.start()
    try:
        monkeypatch.setattr(proc, "lines", read)
        monkeypatch.setattr(machine, "_drivers", drivers)
        eventually(lambda: joined.missed, 20)
    finally:
        watched.close()
        child.communicate(b"\n", timeout=60)
    assert failing == 0 and joined.missed == [(child.pid, "comes", REACHED_LATE)]
    assert [note for note in notes if "open files" in note] == [
        "processes may be attached late or missed: too many open files; raise the limit (ulimit -n)"
    ]


def test_a_scan_for_which_there_is_no_thread_is_repeated(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's processes may have used up the machine's threads. The tool says so once, and does not go blind."""
    notes: list[str] = []
    joined = Joined(built)
    refused = 0
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        nonlocal refused
        if thread.name == "gpubpf-look" and refused < 3:
            refused += 1
            raise RuntimeError("can't start new thread")
        start(thread)

    child = subprocess.Popen([built / "comes", "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    drivers = machine._drivers
    monkeypatch.setattr(machine, "_drivers", lambda pid: {})
    watched = MachineWatcher(joined.join, joined.miss, notes.append)
    watched.start()
    try:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        eventually(lambda: refused, 20)
        monkeypatch.setattr(machine, "_drivers", drivers)
        eventually(lambda: joined.missed, 20)
    finally:
        watched.close()
        child.communicate(b"\n", timeout=60)
    assert refused == 3 and joined.missed == [(child.pid, "comes", REACHED_LATE)]
    assert [note for note in notes if "threads" in note] == [
        "processes may be attached late or missed: no more threads can be started"
    ]


def test_a_probe_for_which_there_is_no_file_is_placed_later(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hold helper has no number for the probe's file: a driver that nobody had mapped is not given up.

    The driver is a copy, because other processes, such as another worker of the tests, may have mapped the usual one."""
    shutil.copy(device.LIBRARIES / "libcuda.so.1", tmp_path)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    notes: list[str] = []
    failing = 3
    request = machine.HoldHelper._request

    def asked(helper: machine.HoldHelper, **message: Any) -> Any:
        nonlocal failing
        if "place" in message and failing:
            failing -= 1
            return errno.EMFILE, []
        return request(helper, **message)

    joined = Joined(built)
    with monkeypatch.context() as nothing_known:
        nothing_known.setattr(machine.libraries, "files", lambda *a, **k: [])
        watched = MachineWatcher(joined.join, joined.miss, notes.append)
        watched.start()
    monkeypatch.setattr(machine.HoldHelper, "_request", asked)
    try:
        child = subprocess.Popen(
            [built / "comes", "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        eventually(lambda: joined.missed, 20)
    finally:
        watched.close()
        child.communicate(b"\n", timeout=60)
    assert failing == 0 and joined.missed == [(child.pid, "comes", REACHED_LATE)]
    assert sum("too many open files" in note for note in notes) == 1


@contextlib.contextmanager
def mapping(file: Path, user: int) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process of a user that maps a file as code."""
    code = (
        "import mmap, sys; f = open(sys.argv[1]); how = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC\n"
    )
    code += "m = mmap.mmap(f.fileno(), 0, *how); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, file], user=user, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_a_user_who_has_stopped_the_machine_keeps_no_file_from_getting_a_probe(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of that user are attached late. For those of others that map the same file, it gets a probe."""
    monkeypatch.setattr(machine.kernel_waits, "has_stopped_machine", lambda user: user == 65534)
    monkeypatch.setattr(machine, "MAX_SCAN_INTERVAL", 0.5)
    joined, notes = Joined(built), list[str]()
    with tempfile.TemporaryDirectory() as place, watching(joined, notes.append) as watched:
        Path(place).chmod(0o755)
        (Path(place) / "driver.c").write_text("int cuInit(int flags) { return 0; }")
        file = Path(place) / "libcuda.so.9"
        subprocess.run(["gcc", "-shared", "-fPIC", Path(place) / "driver.c", "-o", file], check=True)

        def probes() -> int:
            links = Path(f"/proc/{watched._hold_helper._process.pid}/fd")
            return sum("perf_event" in os.readlink(link) for link in links.iterdir())

        before = probes()
        assert not watched.blind
        with mapping(file, 65534) as process:
            eventually(lambda: process.pid in joined.others)
            assert probes() == before
            comm = proc.comm(process.pid)
            assert watched.blind and [note for note in notes if "has no probe" in note] == [
                f"a GPU driver that pid {process.pid} ({comm}) maps has no probe: processes of user 65534 have stopped the machine;"
                " processes that map it may be attached late or missed"
            ]
            with mapping(file, 0):
                eventually(lambda: probes() == before + 1)


@pytest.mark.own_processes
def test_one_process_gets_few_probes(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It maps many files that are named like a driver. Their probes go when it does, and others are traced as ever."""
    monkeypatch.setattr(limits, "DRIVERS_OF_PROCESS", 3)
    monkeypatch.setattr(limits, "UNMAPPED_DRIVERS", 1)
    (tmp_path / "driver.c").write_text("int cuInit(int flags) { return 0; }")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", tmp_path / "driver.c", "-o", tmp_path / "libcuda.so.0"], check=True
    )
    for number in range(1, 20):
        shutil.copy(tmp_path / "libcuda.so.0", tmp_path / f"libcuda.so.{number}")
    notes: list[str] = []
    missed: list[tuple[int, str, str]] = []
    joined = Joined(built)
    monkeypatch.setattr(joined, "miss", lambda *one: missed.append(one))

    with watching(joined, notes.append) as watched:

        def probes() -> int:
            links = Path(f"/proc/{watched._hold_helper._process.pid}/fd")
            return sum("perf_event" in os.readlink(link) for link in links.iterdir())

        before = probes()
        with gpubpf_hold.holding(gpubpf_hold.build(tmp_path), *tmp_path.glob("libcuda.so.*")) as process:
            eventually(lambda: notes)
            eventually(lambda: probes() == before + 3)
            until = time.monotonic() + 60
            while (
                not joined.held + joined.ran and time.monotonic() < until
            ):  # one may end before it is reached
                run(built, "once")
            assert joined.held + joined.ran
        eventually(lambda: probes() == before + 1)
    assert [one for one in missed if one[0] == process.pid] == [(process.pid, "hold", FORBIDDEN)]
    assert [note for note in notes if "drivers" in note] == [
        f"pid {process.pid} (hold) maps 20 files as GPU drivers; 17 of them exceed the limits of a process or user,"
        " and launches through them are not counted"
    ]


@pytest.mark.own_processes
@pytest.mark.skipif(bool(gpubpf_fuse.cannot_mount()), reason=gpubpf_fuse.cannot_mount())
def test_a_driver_that_a_program_serves_is_not_read(built: Path, tmp_path: Path) -> None:
    """Not even SIGKILL would end the wait for its pages, and so neither the tool. A notice says that the tool does not see all."""
    joined, notes = Joined(built), list[str]()
    program = gpubpf_hold.build(tmp_path)
    with (
        gpubpf_fuse.unanswered(tmp_path, name="libcuda.so.7") as served,
        gpubpf_fuse.unanswered(tmp_path, name="libcuda.so.8") as another,
        watching(joined, notes.append) as watched,
        gpubpf_hold.holding(program, served) as process,
    ):
        (file,) = machine._drivers(process.pid)
        eventually(lambda: watched._probed_files.get(file) == machine._NO_PROBE)
        with gpubpf_hold.holding(program, another) as second:
            (other,) = machine._drivers(second.pid)
            eventually(lambda: watched._probed_files.get(other) == machine._NO_PROBE)
        assert not [thread for thread in threading.enumerate() if thread.name == "gpubpf-file"]
        assert watched.blind
    assert [note for note in notes if "has no probe" in note] == [  # one for all files of a user
        f"a GPU driver that pid {process.pid} (hold) maps has no probe: it may be in a FUSE file system, whose program may never"
        " answer; processes that map it may be attached late or missed"
    ]


@pytest.mark.own_processes
@pytest.mark.parametrize("refused", [errno.EINVAL, None])
def test_a_driver_without_a_probe_is_reported(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    """The kernel refuses the probe, or does not place it in time. The tool says so, and that it may miss processes."""
    notes, answering = list[str](), threading.Event()
    request = machine.HoldHelper._request

    def asked(helper: machine.HoldHelper, **message: Any) -> Any:
        if "place" not in message:
            return request(helper, **message)
        if refused is None:
            answering.wait(60)
        return refused or 0, []

    program = gpubpf_hold.build(tmp_path)
    shutil.copy(device.LIBRARIES / "libcuda.so.1", tmp_path / "libcuda.so.7")
    with watching(Joined(built), notes.append) as watched:
        assert not watched.blind
        if refused is None:
            monkeypatch.setattr(machine, "FILE_WAIT", 0.2)
        monkeypatch.setattr(machine.HoldHelper, "_request", asked)
        with gpubpf_hold.holding(program, tmp_path / "libcuda.so.7") as process:
            eventually(lambda: watched.blind)
            answering.set()
    why = "Invalid argument" if refused else "reading it and placing the probe takes too long"
    assert [note for note in notes if "has no probe" in note] == [
        f"a GPU driver that pid {process.pid} (hold) maps has no probe: {why}; processes that map it may be attached late or missed"
    ]


@pytest.mark.own_processes
def test_the_time_for_a_driver_file_counts_for_its_user(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SCAN_SHARE", 0.0)
    monkeypatch.setattr(machine.MachineWatcher, "_probe_driver", lambda *_: limits.SCAN_BURST)
    shutil.copy(built / "comes", tmp_path / "libcuda.so.7")
    tmp_path.chmod(0o711)
    program = gpubpf_hold.build(tmp_path)
    with watching(Joined(built)) as watched, gpubpf_hold.holding(program, tmp_path / "libcuda.so.7"):
        eventually(lambda: watched._budget.exhausted(os.geteuid()))


def test_without_open_files_there_is_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.HoldHelper, "_request", lambda helper, **message: (errno.ENFILE, []))
    watched = MachineWatcher(lambda pid, tid: None, lambda *a: None, lambda text: None)
    with pytest.raises(SessionError, match="too many open files; raise the limit"):
        watched.start()


def test_what_the_kernel_skipped_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with placed() as watch:
        assert watch.skipped == 0
        monkeypatch.setattr(bpf_syscall, "statistics", lambda program: bpf_syscall.Statistics(7, 0, 3))
        assert watch.skipped == 3


def test_who_fails_to_join_for_an_unknown_reason_is_missed(built: Path) -> None:
    class Failing(Joined):
        def join(self, pid: int, tid: int | None) -> str | None:
            raise RuntimeError("a mistake")

    joined = Failing(built)
    with watching(joined):
        process = subprocess.Popen([built / "comes", "once"], stdout=subprocess.DEVNULL)
        assert exit_status(process) == 0
        eventually(lambda: process.pid in [pid for pid, _, _ in joined.missed], 20)
    # Programs of others are asked for as well.
    assert [why for pid, _, why in joined.missed if pid == process.pid] == [FORBIDDEN]


def test_a_tool_that_does_not_read_gets_all_messages_later() -> None:
    tool, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tool, end, placed() as watch:
        helper = holding._HoldHelper(end, watch)
        for number in range(2000):
            helper._send(late=number, comm="comes")
        found = []
        while len(found) < 2000:
            found.append(json.loads(tool.recv(holding.PACKET, socket.MSG_DONTWAIT))["late"])
            helper._send_all()
    assert found == list(range(2000))


class Told:
    """Probes that report what a test says."""

    file = -1

    def __init__(self) -> None:
        self.new: list[Event] = []

    def events(self) -> list[Event]:
        new, self.new = self.new, []
        return new

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


@pytest.fixture
def told_helper() -> Iterator[tuple[Any, Told, socket.socket]]:
    """A hold helper, what it is told, and where its messages arrive."""
    tool, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tool, end:
        probes: Any = Told()
        yield holding._HoldHelper(end, probes), probes, tool


def tracer(pid: int) -> int:
    return int(traceable.status(pid)["TracerPid"])


def late_ones(tool: socket.socket) -> list[int]:
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(json.loads(tool.recv(holding.PACKET, socket.MSG_DONTWAIT))["late"])
    return found


def called(pid: int, sp: int = 4096) -> Event:
    return Event(CALLED_CUINIT, time.monotonic_ns(), pid, pid, sp, 0, 0, "sleep")


def test_few_processes_of_a_user_are_held_at_a_time(
    told_helper: tuple[Any, Told, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another user are held nevertheless."""
    helper, probes, tool = told_helper
    monkeypatch.setattr(limits, "HELD_OF_USER", 3)
    monkeypatch.setattr(holding._HoldHelper, "_stop", lambda *arguments: None)
    with contextlib.ExitStack() as stack:
        children = []
        for user in (65534,) * 5 + (65533,):
            children.append(stack.enter_context(subprocess.Popen(["sleep", "60"], user=user)))
            stack.callback(children[-1].kill)
        probes.new = [called(child.pid) for child in children]
        helper._read_events()
        pids = [child.pid for child in children]
        assert list(helper._arrivals) == [*pids[:3], pids[5]] and late_ones(tool) == pids[3:5]


@pytest.mark.parametrize("sp", [4096, 8192])
def test_one_that_calls_again_before_it_has_stopped_is_let_go(
    told_helper: tuple[Any, Told, socket.socket], sp: int
) -> None:
    helper, probes, tool = told_helper
    with subprocess.Popen(["sleep", "60"]) as child:
        probes.new = [called(child.pid), called(child.pid, sp)]
        helper._read_events()
        assert tracer(child.pid) == os.getpid()

        def is_let_go() -> bool:
            for arrival in list(helper._arrivals.values()):
                helper._advance(arrival, time.monotonic())
            helper._detach_from_leaving()
            return tracer(child.pid) == 0

        eventually(is_let_go)
        assert late_ones(tool) == [child.pid] and not helper._leaving
        child.kill()


def test_one_is_reported_late_only_when_others_can_attach(
    told_helper: tuple[Any, Told, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    helper, probes, tool = told_helper
    with subprocess.Popen(["sleep", "60"]) as child:
        with monkeypatch.context() as patch:
            patch.setattr(ptrace.TracedThread, "poll", lambda thread: False)  # it has not stopped yet
            probes.new = [called(child.pid)]
            helper._read_events()
            helper._release(child.pid)
            helper._detach_from_leaving()
            assert tracer(child.pid) == os.getpid() and late_ones(tool) == []

        def is_let_go() -> bool:
            helper._detach_from_leaving()
            return tracer(child.pid) == 0

        eventually(is_let_go)
        assert late_ones(tool) == [child.pid]
        child.kill()


def test_the_parent_of_one_that_is_killed_while_it_leaves_sees_its_end(
    told_helper: tuple[Any, Told, socket.socket],
) -> None:
    helper, probes, _ = told_helper
    script = "sleep 60 & echo $!; wait $!; echo $?"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        probes.new = [called(pid)]
        helper._read_events()
        (arrival,) = helper._arrivals.values()
        eventually(lambda: arrival.threads[pid].traced.poll())
        os.kill(pid, signal.SIGKILL)
        probes.new = [Event(ENDED, time.monotonic_ns(), pid, pid, 0, 0, 0, "sleep")]
        helper._read_events()

        def nobody_leaves() -> bool:
            helper._detach_from_leaving()
            return not helper._leaving

        eventually(nobody_leaves)
        assert parent.stdout.readline() == "137\n"


@pytest.mark.skipif(bool(gpubpf_fuse.cannot_mount()), reason=gpubpf_fuse.cannot_mount())
def test_a_stack_that_never_answers_is_not_read(
    built: Path, tmp_path: Path, told_helper: tuple[Any, Told, socket.socket]
) -> None:
    helper, probes, tool = told_helper
    with gpubpf_fuse.unanswered(tmp_path) as file:
        process = subprocess.Popen([built / "blocks", "fuse", file], stdout=subprocess.DEVNULL)

        def stack() -> int:
            call = ptrace.blocked_call(process.pid, process.pid)
            return call.rsp if call is not None and call.number == syscalls.NUMBERS["pause"] else 0

        eventually(stack)

        def advance() -> None:
            probes.new = [called(process.pid, stack())]
            helper._read_events()
            while helper._arrivals or helper._leaving:
                for arrival in list(helper._arrivals.values()):
                    helper._advance(arrival, time.monotonic())
                helper._detach_from_leaving()

        thread = threading.Thread(target=advance, daemon=True)  # that traces the process
        thread.start()
        thread.join(60)
        try:
            assert not thread.is_alive()
            assert late_ones(tool) == [process.pid] and tracer(process.pid) == 0
        finally:
            process.kill()
            process.wait()


@pytest.mark.own_processes
def test_a_process_whose_mappings_do_not_arrive_delays_nobody(built: Path, tmp_path: Path) -> None:
    joined, notes, missed = Joined(built), list[str](), list[tuple[int, str, str]]()
    joined.miss = lambda *one: missed.append(one)  # type: ignore[method-assign]
    with gpubpf_locked.process(tmp_path) as (pid, _), watching(joined, notes.append) as watched:
        process = subprocess.Popen([built / "comes", "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        eventually(lambda: joined.held or joined.ran)
        process.communicate(b"\n", timeout=60)
        run(built, "once")  # it may end before it is reached, but not unseen
        eventually(lambda: sum(map(len, (joined.held, joined.ran, joined.ended, joined.failed))) > 1)
    assert (pid, "locked", FORBIDDEN) in missed
    assert [note for note in notes if f"pid {pid} (locked) cannot be traced: its list of mappings" in note]
    # It does not map a driver, so it cannot keep drivers from getting probes.
    assert not watched.blind and not any("keeps its address space locked" in note for note in notes)


@pytest.mark.own_processes
def test_a_process_that_stops_the_machine_loses_its_file_system(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds its lock while the hold helper places a probe in a driver that it maps."""
    joined, notes = Joined(built), list[str]()
    with tempfile.TemporaryDirectory() as place, watching(joined, notes.append) as watched:
        Path(place).chmod(0o777)
        driver = shutil.copy(device.LIBRARIES / "libcuda.so.1", place)
        monkeypatch.setenv("LD_PRELOAD", driver)
        with gpubpf_locked.process(Path(place), user=65534) as (pid, _):
            monkeypatch.delenv("LD_PRELOAD")
            code = "import mmap, sys; how = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC\n"
            code += "f = open(sys.argv[1]); m = mmap.mmap(f.fileno(), 0, *how); input()"
            command = [sys.executable, "-c", code, driver]
            with subprocess.Popen(command, stdin=subprocess.PIPE) as another:
                text = f"process {pid} held its lock, and stopped the machine"
                eventually(lambda: any(note.startswith(text) for note in notes), 30)
                another.communicate(b"\n")
            assert not watched._hold_helper.exited
            # From now on, the user's own drivers get no probe.
            own = shutil.copy(driver, f"{place}/libcuda.so.2")
            os.chown(own, 65534, 65534)
            with subprocess.Popen([*command[:3], own], stdin=subprocess.PIPE, user=65534) as theirs:
                eventually(lambda: theirs.pid in joined.others)
                inode = os.stat(own).st_ino
                assert not any(file[1] == inode for file in watched._probed_files)
                theirs.communicate(b"\n")
    assert any("disconnected the file systems of user 65534" in note for note in notes)


@pytest.mark.own_processes
def test_probes_are_placed_when_no_process_holds_its_lock_any_more(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined, notes, holders = Joined(built), list[str](), [os.getpid()]
    monkeypatch.setattr(machine.kernel_waits, "obstacle", lambda: holders[0])
    monkeypatch.setattr(machine, "PLACE_AGAIN", 0.1)
    with watching(joined, notes.append):
        run(built, "once")
        eventually(lambda: joined.ran or joined.ended or joined.failed)
        assert not joined.held
        holders[0] = 0
        eventually(lambda: any("drivers have probes again" in note for note in notes))
        until = time.monotonic() + 60
        while not joined.held and time.monotonic() < until:  # on a busy machine, one may come too late
            run(built, "once")
        assert joined.held


@pytest.mark.own_processes
@pytest.mark.may_come_too_late
def test_a_helper_that_a_process_keeps_waiting_is_replaced(built: Path) -> None:
    """The next one holds new processes, but none of that user."""
    joined, notes = Joined(built), list[str]()
    with tempfile.TemporaryDirectory() as place, watching(joined, notes.append) as watched:
        Path(place).chmod(0o777)
        before = watched._hold_helper
        with gpubpf_locked.process(Path(place), device.LIBRARIES / "libcuda.so.1", 65534) as (pid, _):
            eventually(lambda: watched._hold_helper is not before)
            assert before.waits_for == pid
            eventually(lambda: any("another hold helper" in note for note in notes))
            until = time.monotonic() + 60
            while not joined.held and time.monotonic() < until:  # on a busy machine, one may come too late
                run(built, "once")
            assert joined.held
            assert not watched._hold_helper.exited
    assert "another hold helper was started; processes of user 65534 are not held, and attached late" in notes


def test_attaches_may_end_while_the_helper_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scanner, which replaces the helper, must not end."""
    before: Any = SimpleNamespace(unanswered=True, waits_for=0, finished={1, 2}, close=lambda: None)

    class Next:
        def __init__(self, *callbacks: object) -> None:
            self.finished: set[int] = set()
            self.finish = self.finished.add

        def claim(self, pid: int, seen: int) -> bool:
            before.finished.add(pid + 100)
            return True

        def leave_unheld(self, users: set[int]) -> None: ...

    monkeypatch.setattr(machine, "HoldHelper", Next)
    monkeypatch.setattr(MachineWatcher, "_probe_installed", lambda watcher: None)
    watcher = MachineWatcher(lambda pid, tid: None, lambda *process: None, lambda text: None)
    watcher._hold_helper = before
    watcher._replace_helper()
    assert watcher._hold_helper.finished >= {1, 2}


@pytest.mark.own_processes
def test_a_helper_that_does_not_answer_is_ended(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New processes are found without it, and count as reached late."""
    monkeypatch.setattr(machine, "ANSWER_WAIT", 0.5)
    monkeypatch.setattr(machine, "MAX_SCAN_INTERVAL", 0.5)
    joined, notes = Joined(built), list[str]()
    with watching(joined, notes.append) as watched:
        helper = watched._hold_helper._process
        os.kill(helper.pid, signal.SIGSTOP)
        process = subprocess.Popen([built / "comes", "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        eventually(lambda: joined.ran)
        assert helper.wait(60) == -signal.SIGKILL
        eventually(lambda: joined.missed)
        process.communicate(b"\n", timeout=60)
        eventually(lambda: watched.blind, 10)
    assert joined.ran == [process.pid] and joined.missed == [(process.pid, "comes", REACHED_LATE)]
    assert notes[0] == "the hold helper does not answer; new processes will be attached late, or missed"


@pytest.mark.own_processes
def test_a_helper_is_ended_though_the_thread_that_listens_to_it_is_stuck(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of a held process may never arrive in that thread."""
    monkeypatch.setattr(machine, "ANSWER_WAIT", 0.5)
    going_on = threading.Event()
    joined, notes = Joined(built), list[str]()
    with watching(joined, notes.append) as watched:
        helper = watched._hold_helper  # the next scan may replace this one
        monkeypatch.setattr(machine.HoldHelper, "_expire_late", lambda helper: going_on.wait(120))
        eventually(lambda: watched.blind, 30)
        assert helper.exited
        going_on.set()
    assert notes[0] == "the hold helper does not answer; new processes will be attached late, or missed"


@pytest.mark.own_processes
@pytest.mark.may_come_too_late
def test_closing_does_not_wait_for_the_memory_of_a_held_process(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on, held = threading.Event(), threading.Event()
    waited: list[bool] = []
    monkeypatch.setattr(loading.Held, "close", lambda held: waited.append(going_on.wait(20)))

    def join(pid: int, tid: int | None) -> str:
        held.set()
        going_on.wait(60)
        return TOO_LATE

    watched = MachineWatcher(join, lambda *process: None, lambda text: None)
    watched.start()
    child = subprocess.Popen([built / "comes", "once"], stdout=subprocess.DEVNULL)
    assert held.wait(60)
    watched.close()
    assert not waited
    going_on.set()
    assert exit_status(child) == 0


@pytest.mark.may_come_too_late
def test_one_that_was_measured_and_has_ended_is_not_met_again(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looked at its maps while it was there asks when it is gone: it is measured, not missed as well."""
    forgotten: list[int] = []
    monkeypatch.setattr(MachineWatcher, "_on_exec_or_exit", lambda self, pid: forgotten.append(pid))
    joined = Joined(built)
    with watching(joined) as watched:
        process = subprocess.Popen([built / "comes", "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        eventually(lambda: joined.held)
        seen = time.monotonic_ns()
        process.communicate(b"\n", timeout=60)
        eventually(lambda: process.pid in forgotten)
        assert not watched._hold_helper.claim(process.pid, seen)
        assert watched._hold_helper.claim(process.pid, time.monotonic_ns())  # another one, of the same number
    assert joined.held == [process.pid] and not joined.missed


@pytest.mark.may_come_too_late
def test_another_program_is_executed_while_it_joins(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one was let go, as joining took long. The second one is held until the tool is done with that, and joins then."""
    monkeypatch.setattr(machine, "HOLD", 0.2)
    asked: list[int] = []

    class Asked(Joined):
        def join(self, pid: int, tid: int | None) -> str | None:
            asked.append(pid)
            return super().join(pid, tid)

    def during(pid: int) -> None:
        if Path(f"/proc/{pid}/comm").read_text() == "comes\n":
            eventually(lambda: Path(f"/proc/{pid}/comm").read_text() == "exe\n")
            time.sleep(0.1)
            monkeypatch.setattr(machine, "HOLD", 3.0)

    with watching(Asked(built, during)):
        child = subprocess.Popen([built / "comes", "execute"], stdout=subprocess.DEVNULL)
        assert exit_status(child) == 0
        eventually(lambda: asked.count(child.pid) == 2)


def test_a_thread_of_the_same_number_is_held_when_the_one_before_is_done_with() -> None:
    before, after = (loading.Held(os.getpid(), os.getpid(), 0, {}, 0.0) for _ in range(2))
    before.close()
    assert loading.Held.take(os.getpid(), os.getpid()) is after
    after.worker.close()


@pytest.mark.own_processes
def test_who_is_let_go_as_hooks_are_put_in_is_measured_as_it_runs(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent leaves what it had begun, as threads run now; it comes again, and is late."""
    monkeypatch.setattr(machine, "HOLD", 0.3)
    monkeypatch.setattr(machine, "LEAVE", 0.1)
    enter = loading.Held.begin_agent

    def too_long(self: loading.Held, connection: socket.socket | None) -> bool:
        entered = enter(self, connection)
        self.expire()
        return entered

    monkeypatch.setattr(loading.Held, "begin_agent", too_long)
    plan = Plan(device.Device("sim", {"CUDASIM_CLOCK": "real"}))
    with Session(
        Targets(all_processes=True), plan, SidecarBuilder(lambda image, target: Sidecar())
    ) as session:
        began = time.monotonic_ns()
        child = subprocess.Popen([built / "comes", "waits"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        eventually(lambda: REACHED_LATE in session.summary()["processes"]["missed"])
        past = time.monotonic_ns() - began
        first = session.summary()["processes"].pop("unmeasured_ns")[REACHED_LATE]
        time.sleep(0.1)  # it is measured now
        summary = session.summary()
        child.communicate(b"\n", timeout=60)
    assert child.returncode == 0
    assert summary["processes"].pop("unmeasured_ns") == {REACHED_LATE: first}
    assert 0 < first <= past + 1e9 / os.sysconf("SC_CLK_TCK")  # its start is rounded down to a tick
    assert summary["processes"] == {"measured": 1, "missed": {REACHED_LATE: 1}}


def test_time_that_is_not_measured_has_a_bound() -> None:
    """Until a process is measured or has ended; else until now. Without a driver there is nothing to measure."""
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    measured = Measurement(Targets(all_processes=True), Plan(device.Device("sim")), print)
    time.sleep(0.03)
    started = time.clock_gettime(time.CLOCK_BOOTTIME)
    measured.record_missed(ENDED_EARLY)  # when it started is unknown: before the measurement perhaps
    measured.record_missed(REACHED_LATE, started)
    measured.record_missed(TRACED, started)
    measured.record_missed(NO_DRIVER, started)
    first = measured.unmeasured_ns()
    time.sleep(0.03)
    later = measured.unmeasured_ns()
    past = (time.clock_gettime(time.CLOCK_BOOTTIME) - before) * 1e9
    assert first.keys() == {ENDED_EARLY, REACHED_LATE, TRACED}
    assert 3e7 <= first[ENDED_EARLY] == later[ENDED_EARLY] <= past
    assert 0 <= first[REACHED_LATE] == later[REACHED_LATE] <= past - 3e7
    assert first[TRACED] + 3e7 <= later[TRACED] <= past
    measured.end()
    over = measured.unmeasured_ns()
    measured.record_missed(TRACED, time.clock_gettime(time.CLOCK_BOOTTIME))  # it came too late
    assert measured.unmeasured_ns() == over and measured.missed[TRACED].count == 2


def test_any_number_of_processes_may_be_missed() -> None:
    """A user can start processes for days, which the tool only counts."""
    measured = Measurement(Targets(all_processes=True), Plan(device.Device("sim")), print)
    measured.record_missed(ENDED_EARLY)
    size = len(pickle.dumps(measured.missed))
    for _ in range(10_000):
        measured.record_missed(ENDED_EARLY)
    assert measured.missed[ENDED_EARLY].count == 10_001
    assert len(pickle.dumps(measured.missed)) < size + 100


@pytest.mark.may_come_too_late
@pytest.mark.parametrize("how", ["executes", "ends"])
def test_what_comes_to_a_number_that_is_joining_is_another_process(built: Path, how: str) -> None:
    """As one of /proc that had the number before is asked for, is joining, and has ended or executes another program."""
    joined = Joined(built)
    line = "read x" if how == "ends" else f"read x; exec {built}/comes once"
    process = subprocess.Popen(["sh", "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    with watching(joined) as watched:
        assert watched._hold_helper.claim(process.pid, time.monotonic_ns())
        process.stdin.write(b"\n")
        process.stdin.flush()
        if how == "ends":
            assert exit_status(process) == 0
        else:
            eventually(lambda: os.readlink(f"/proc/{process.pid}/exe").endswith("/comes"))
        watched._hold_helper.finish(process.pid)
        if how == "executes":
            process.communicate(timeout=60)
            assert joined.held == [process.pid]
        else:
            assert watched._hold_helper.claim(process.pid, time.monotonic_ns())  # its next one
    assert not joined.ran


@pytest.mark.own_processes
def test_a_tool_sees_every_process(repository: Path) -> None:
    if not agent.LIBRARY.exists():
        pytest.skip("the agent is not built (script/setup)")
    example = gpubpf_examples.build("vectoradd") / "vectoradd"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(device.LIBRARIES)}
    tool = subprocess.Popen(
        [sys.executable, repository / "tools" / "threadhist.py", "--json", "--device", "sim", "-d", "120"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert tool.stderr is not None
    while "watching every process" not in (line := tool.stderr.readline()):
        assert line
    runs = [subprocess.Popen([example], stdout=subprocess.DEVNULL, env=environment) for _ in range(8)]
    assert [run.wait(60) for run in runs] == [0] * 8
    tool.terminate()
    out, said = tool.communicate(timeout=60)
    summary = json.loads(out.splitlines()[-1])
    processes = summary["processes"]
    late = processes["missed"].get(REACHED_LATE, 0)
    missed = sum(processes["missed"].values()) - late
    assert processes["measured"] + missed == 8, (summary, said)
    assert summary["launches_instrumented"] >= 8 - missed - late, (summary, said)


@pytest.mark.parametrize(("result", "late"), [(None, []), ("cannot be traced", []), (TOO_LATE, [7, 8])])
def test_who_is_not_attached_to_when_the_measurement_ends_is_known(
    result: str | None, late: list[int]
) -> None:
    """`join` counts all other failures. While one waits for its turn, both are late."""
    joined = threading.Event()

    def join(pid: int, held: int | None) -> str | None:
        joined.wait(60)
        return result

    watcher = MachineWatcher(join, lambda *process: pytest.fail(str(process)), lambda text: None)
    watcher._joins = DaemonThreadPool(1)
    watcher._hold_helper = SimpleNamespace(close=lambda: None, finish=lambda pid, again: False)  # type: ignore[assignment]
    watcher._scanner = threading.Thread()
    joins = [watcher._begin_to_join(pid, "app", None, False) for pid in (7, 8)]
    assert watcher.unattached() == {7: "app", 8: "app"}
    joined.set()
    for join_of_one in joins:
        join_of_one.result(60)
    assert list(watcher.unattached()) == late
    watcher.stop_attaching()
    watcher._begin_to_join(9, "app", None, False).result(60)
    watcher.close()
    assert list(watcher.unattached()) == [*late, 9]


def test_the_report_is_prepared_before_processes_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of -d begins then, and the watcher may keep the tool's other threads from their work."""
    done: list[str] = []

    def warm_up() -> None:
        time.sleep(0.2)
        done.append("warm-up")

    monkeypatch.setattr(MachineWatcher, "start", lambda watcher: done.append("watcher"))
    monkeypatch.setattr(MachineWatcher, "close", MachineWatcher.stop_attaching)
    builder = SidecarBuilder(lambda image, target: Sidecar(), warm_up=warm_up)
    with Session(Targets(all_processes=True), Plan(device.Device("sim")), builder) as session:
        session._stop()
    assert done == ["warm-up", "watcher"]


@pytest.mark.own_processes
@pytest.mark.may_come_too_late
def test_a_held_process_continues_after_the_measurement_has_ended(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session does not wait for the attach, and counts the process once."""
    held = threading.Event()

    def join(session: Session, pid: int, *, starting: int | None = None) -> str:
        held.set()
        eventually(lambda: session._measurement.ended_ns)
        return TOO_LATE

    monkeypatch.setattr(Session, "join", join)
    plan = Plan(device.Device("sim", {"CUDASIM_CLOCK": "real"}))
    with Session(
        Targets(all_processes=True), plan, SidecarBuilder(lambda image, target: Sidecar())
    ) as session:
        child = subprocess.Popen([built / "comes", "once"], stdout=subprocess.PIPE, text=True)
        assert held.wait(60)
        session._stop()
        out, _ = child.communicate(timeout=60)
        processes = session.summary()["processes"]
    assert child.returncode == 0 and float(out.split()[1]) * 1e6 >= session._measurement.ended_ns
    assert processes["measured"] == 0 and processes["missed"] == {TOO_LATE: 1}
