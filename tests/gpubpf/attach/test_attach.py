"""Putting a library into processes that run, and changing their code: they must not notice. The programs are in attach/."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpubpf_32_bit
import gpubpf_fuse
from gpubpf import agent, elf
from gpubpf.agent.definitions import ALREADY_CHANGED
from gpubpf.attach import borrow, loading, patching
from gpubpf.errors import SessionError
from gpubpf.kernel import fresh_thread
from gpubpf.process import address_space, ptrace, traceable
from gpubpf.process.target_socket import TargetSocket
from gpubpf.traced import device, server
from gpubpf_commands import words

HERE = Path(__file__).parent
ROOT = os.geteuid() == 0

needs_root = pytest.mark.skipif(not ROOT, reason="needs root")
pytestmark = pytest.mark.skipif(
    os.uname().machine != "x86_64" or not shutil.which("gcc"), reason="needs gcc on x86-64"
)


@pytest.fixture(scope="module")
def built() -> Iterator[Path]:
    """The programs, where every user can run them."""
    with tempfile.TemporaryDirectory(prefix="gpubpf-attach-") as at:
        os.chmod(at, 0o755)
        _build(Path(at))
        yield Path(at)


def _build(at: Path) -> None:
    gcc = ["gcc", "-O1", "-w", "-pthread"]
    for command in (
        [*gcc, "-shared", "-fPIC", HERE / "library.c", "-o", at / "library.so"],
        [*gcc, "-shared", "-fPIC", HERE / "library.c", "-o", at / "loaded.so"],
        [*gcc, HERE / "kinds.c", "-o", at / "kinds"],
        [*gcc, HERE / "blocks.c", "-o", at / "blocks"],
        [*gcc, "-static", HERE / "kinds.c", "-o", at / "static"],
        [*gcc, "-shared", "-fPIC", HERE / "code.c", "-o", at / "libcode.so"],
        [*gcc, HERE / "patched.c", "-o", at / "patched", f"-L{at}", "-lcode", f"-Wl,-rpath,{at}"],
        [
            "g++",
            "-std=c++17",
            "-O2",
            "-mavx2",
            "-Wall",
            "-Werror",
            "-pthread",
            "-o",
            at / "stress",
            HERE / "stress.cpp",
        ],
    ):
        subprocess.run(command, check=True)


@contextlib.contextmanager
def running(*command: object, **how: object) -> Iterator[subprocess.Popen[str]]:
    """A program that has said "ready"."""
    process = subprocess.Popen(
        [str(c) for c in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **how
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def put(pid: int, library: Path, text: str = "abc") -> int:
    return loading.inject(pid, library, "entry", text).wait()


def stop(pid: int) -> None:
    with contextlib.suppress(ptrace.NotStopped), ptrace.stopped(pid):
        pass


def places(pid: int) -> tuple[int, int, int]:
    """Threads, files, mappings."""
    return (
        len(os.listdir(f"/proc/{pid}/task")),
        len(os.listdir(f"/proc/{pid}/fd")),
        len(address_space.mappings(pid)),
    )


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def state(pid: int) -> str:
    """Of the first thread: S where it waits, Z where it has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def settled(pid: int, threads: int) -> tuple[int, int, int]:
    """When the thread of the last call has ended."""
    end = time.monotonic() + 60
    while (now := places(pid))[0] > threads and time.monotonic() < end:
        time.sleep(0.01)
    return now


# --- the machine code ---


def test_the_stub_is_its_source(tmp_path: Path) -> None:
    source = tmp_path / "stub.s"
    source.write_text(".intel_syntax noprefix\n" + borrow.STUB_SOURCE)
    subprocess.run(["as", "-o", tmp_path / "stub.o", source], check=True)
    subprocess.run(
        ["objcopy", "-O", "binary", "-j", ".text", tmp_path / "stub.o", tmp_path / "stub"], check=True
    )
    assert (tmp_path / "stub").read_bytes() == borrow.STUB
    assert borrow.STUB[borrow.STUB_END - 2 :][:4] == bytes.fromhex("0f050f0b")  # its last syscall, ud2


SETS_ITS_GROUP = """
import os, threading, time
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
print("ready", flush=True)
while True:
    os.setgid(os.getgid())
    print("set", flush=True)
    time.sleep(0.001)
"""


def test_a_worker_takes_part_when_the_program_changes_its_user_or_group() -> None:
    """glibc makes all threads call setgid, by a signal, and holds a lock meanwhile that pthread_create takes. Also if the tool is
    killed."""
    with running(sys.executable, "-c", SETS_ITS_GROUP) as process:
        assert process.stdout is not None
        for _ in range(10):
            worker, _ = loading._make_worker(process.pid)
            worker.abandon()
            begun = time.monotonic()
            for _ in range(100):
                assert process.stdout.readline() == "set\n"
            assert time.monotonic() - begun < 15  # the worker ends after 20 s


def test_a_thread_is_left_alone_when_another_holds_a_lock_for_good(built: Path) -> None:
    with running(built / "kinds", "locked") as process:
        until(lambda: len(ptrace.threads_of(process.pid)) == 2)
        time.sleep(0.1)
        for _ in range(2):
            with pytest.raises(SessionError, match="another thread holds a lock; try again"):
                put(process.pid, built / "library.so")
            assert state(process.pid) == "S" and traceable.status(process.pid)["TracerPid"] == "0"


def test_a_stop_that_comes_meanwhile_is_not_lost(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = borrow._Borrowing._prepare

    def stop_it(borrowing: borrow._Borrowing, base: int, turns: int) -> None:
        os.kill(borrowing.pid, signal.SIGSTOP)
        prepare(borrowing, base, turns)

    monkeypatch.setattr(borrow._Borrowing, "_prepare", stop_it)
    with running(built / "kinds", "pause") as process:
        time.sleep(0.1)
        worker, _ = loading._make_worker(process.pid)
        until(lambda: state(process.pid) == "T")
        process.send_signal(signal.SIGCONT)
        until(lambda: state(process.pid) == "S")
        worker.abandon()


# --- loading ---


def said(connection: TargetSocket) -> bytes:
    """Return what a library has said, and close the connection."""
    with connection:
        received = connection.receive(16)
    assert received is not None and not received.files
    return received.data


@pytest.mark.every(2)
def test_a_program_that_checks_itself_notices_nothing(built: Path) -> None:
    with running(built / "stress", built / "loaded.so") as process:
        time.sleep(0.1)
        before: tuple[int, int, int] | None = None
        for i in range(100):
            if i % 2:
                assert put(process.pid, built / "library.so", "12345") == 5
            else:
                injection = loading.inject(process.pid, built / "library.so", "entry", connect=True)
                assert injection.wait() == 77
                assert injection.socket is not None
                assert said(injection.socket) == b"hello"
            if i % 4 == 0:
                fresh_thread.run(lambda: stop(process.pid), "stop")
            if i == 40:
                before = places(process.pid)
        after = places(process.pid)
        assert before is not None
        # Two of its own threads come and go with what belongs to them.
        assert all(b - a < 8 for a, b in zip(before, after, strict=True)), (before, after)
        out, _ = process.communicate("\n", timeout=60)
        assert process.returncode == 0
        turns = {name: int(n) for name, n in re.findall(r"^(\w+) (\d+)$", out, re.M)}
        assert len(turns) == 19 and min(turns.values()) > 10, turns
        sent, masked = map(int, re.search(r"signals (\d+) (\d+)", out).groups())  # type: ignore[union-attr]
        assert sent > 100 and masked > 100


@pytest.mark.skipif(bool(gpubpf_fuse.cannot_mount()), reason=gpubpf_fuse.cannot_mount())
def test_a_stack_that_never_answers_is_not_read(built: Path, tmp_path: Path) -> None:
    """The process is refused at once, and runs on as if nothing had happened."""
    with gpubpf_fuse.unanswered(tmp_path) as file, running(built / "blocks", "fuse", file) as process:
        until(lambda: state(process.pid) == "S")
        errors: list[SessionError] = []

        def attach() -> None:
            try:
                put(process.pid, built / "library.so")
            except SessionError as error:
                errors.append(error)

        attaching = threading.Thread(target=attach, daemon=True)
        attaching.start()
        attaching.join(100)
        assert not attaching.is_alive()
        assert "maps a file where the tool has to read its memory" in str(errors[0])
        assert traceable.status(process.pid)["TracerPid"] == "0"
        until(lambda: state(process.pid) == "S")  # it runs for a moment when it is released


@contextlib.contextmanager
def frozen(pid: int, place: str) -> Iterator[None]:
    """The process is in a frozen cgroup until the block ends. `place`: of the hierarchy."""
    group = Path("/sys/fs/cgroup") / place / f"gpubpf-test-{pid}"
    file, freeze, thaw = (
        ("freezer.state", "FROZEN", "THAWED") if place == "freezer" else ("cgroup.freeze", "1", "0")
    )
    if not (group.parent / "cgroup.procs").exists():
        pytest.skip("no such cgroups here")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error.strerror}")
    own = {line.partition(":")[2].partition(":")[0]: line.rpartition(":")[2]
           for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()}  # fmt: skip
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / file).write_text(freeze)
        until(lambda: place == "freezer" or "frozen 1" in (group / "cgroup.events").read_text())
        until(lambda: place != "freezer" or (group / file).read_text() == "FROZEN\n")
        yield
    finally:
        (group / file).write_text(thaw)
        (group.parent / own["freezer" if place == "freezer" else ""].lstrip("/") / "cgroup.procs").write_text(
            str(pid)
        )
        group.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("place", [".", "unified", "freezer"])
def test_a_frozen_process_is_left_alone(built: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on when it is thawed."""
    monkeypatch.setattr(borrow, "PATIENCE", 0.5)
    with running(built / "kinds", "pause") as process:
        with frozen(process.pid, place):
            with pytest.raises(traceable.Stopped, match=r"is frozen \(docker pause"):
                put(process.pid, built / "library.so")
            assert traceable.status(process.pid)["TracerPid"] == "0"
        assert put(process.pid, built / "library.so") == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("place", [".", "unified", "freezer"])
def test_a_process_that_is_frozen_after_the_first_look(
    built: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(borrow, "PATIENCE", 0.5)
    with running(built / "kinds", "pause") as process, frozen(process.pid, place):
        with monkeypatch.context() as patch:
            patch.setattr(traceable, "check_traceable", lambda pid: None)
            with pytest.raises(traceable.Stopped, match=r"is frozen \(docker pause"):
                put(process.pid, built / "library.so")
        assert traceable.status(process.pid)["TracerPid"] == "0"


@pytest.mark.parametrize("kind", ["pause", "spin", "malloc", "writes", "vfork", "mutex"])
def test_a_thread_is_found(built: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrow, "PATIENCE", 20.0)  # on a busy machine, a thread rarely stops in time
    with running(built / "kinds", kind) as process:
        until(lambda: len(ptrace.threads_of(process.pid)) == 1 + (kind == "mutex"))
        time.sleep(0.15)
        if kind == "writes":
            threading.Thread(target=process.stdout.read, daemon=True).start()  # type: ignore[union-attr]
        threads = places(process.pid)[0]
        for _ in range(5):
            assert put(process.pid, built / "library.so") == 3
        assert settled(process.pid, threads)[0] == threads
        assert process.poll() is None


def test_what_a_signal_interrupted_is_left_alone(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrow, "PATIENCE", 0.2)
    with running(built / "kinds", "handler") as process:
        until(lambda: state(process.pid) == "S")  # which it is in the handler only
        with pytest.raises(SessionError, match="no thread that can be interrupted safely; try again"):
            put(process.pid, built / "library.so")
        assert process.poll() is None
        assert traceable.status(process.pid)["TracerPid"] == "0"


def test_a_coroutines_stack_is_left_alone(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have no room for a signal frame."""
    monkeypatch.setattr(borrow, "PATIENCE", 0.2)
    with running(built / "kinds", "coroutine") as process:
        until(lambda: state(process.pid) == "S")
        with pytest.raises(SessionError, match="no thread that can be interrupted safely; try again"):
            put(process.pid, built / "library.so")
        assert process.poll() is None


def test_what_dlopen_says(built: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.so"
    bad.write_bytes(b"not a library")
    with running(built / "kinds", "pause") as process:
        time.sleep(0.1)
        with pytest.raises(SessionError, match=r"cannot load bad\.so: .*too short.*; "):
            put(process.pid, bad)
        with pytest.raises(SessionError, match=r"cannot load library\.so: .*undefined symbol: nothing; "):
            loading.inject(process.pid, built / "library.so", "nothing")
        large = tmp_path / "large.so"
        command = ["gcc", "-shared", "-fPIC", "-ftls-model=initial-exec", "-xc", "-", "-o", str(large)]
        source = "__thread char of[8192]; char *first(void) { return of; }"
        subprocess.run(command, input=source, text=True, check=True)
        with pytest.raises(
            SessionError, match=r"cannot load large\.so: .* static TLS .*; restart the program"
        ):
            put(process.pid, large)
        assert put(process.pid, built / "library.so") == 3
        assert settled(process.pid, 1)[:2] == (1, 3)


def test_a_process_that_can_open_no_more_files(built: Path) -> None:
    with running(built / "kinds", "pause") as process:
        until(lambda: state(process.pid) == "S")
        _, most = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        free = next(n for n in range(most) if not Path(f"/proc/{process.pid}/fd/{n}").exists())
        for files, why in (
            (0, r"cannot load library\.so: .*Too many open files; fix the cause"),
            (
                1,
                r"\(kinds\) cannot be hooked: socketpair failed in it \(Too many open files\); raise its limits",
            ),
        ):
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (free + files, most))
            with pytest.raises(traceable.NotHookable, match=why):
                loading.inject(process.pid, built / "library.so", "entry", connect=True)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, most))
        assert put(process.pid, built / "library.so") == 3
        assert process.poll() is None


def test_the_agent_takes_little_static_tls() -> None:
    """glibc keeps some hundred bytes for all libraries that come late: other libraries', and builds of the agent."""
    if not agent.LIBRARY.exists():
        pytest.skip("the agent is not built (script/setup)")
    listed = subprocess.check_output(["readelf", "-lW", agent.LIBRARY], text=True)
    (size,) = (int(line.split()[5], 16) for line in listed.splitlines() if line.split()[:1] == ["TLS"])
    assert size <= 128


def test_an_entry_that_takes_long_is_left_to_itself(built: Path) -> None:
    with running(built / "kinds", "pause") as process:
        time.sleep(0.1)
        injection = loading.inject(process.pid, built / "library.so", "entry", "slow")
        with pytest.raises(SessionError, match="did not finish entry within 0 s"):
            injection.wait(0.05)
        assert put(process.pid, built / "library.so") == 3


def test_many_at_once(built: Path) -> None:
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(running(built / "kinds", "pause")) for _ in range(8)]
        results: list[int] = []
        threads = [
            threading.Thread(target=lambda p=p: results.append(put(p.pid, built / "library.so")))
            for p in processes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [3] * 8


def test_it_ends_meanwhile(built: Path) -> None:
    """Killed at some moment: one line, whenever it was."""
    said = set()
    for i in range(25):
        with running(built / "kinds", "pause") as process:
            killer = threading.Timer(0.001 * i, os.kill, (process.pid, signal.SIGKILL))
            killer.start()
            with contextlib.suppress(SessionError):
                try:
                    put(process.pid, built / "library.so", "slow")
                except SessionError as error:
                    said.add(re.sub(r"\d+", "N", str(error)).partition(";")[0])
                    raise
            killer.join()
    assert said <= {
        "pid N ended, or executed another program, while the tool was attaching",
        "pid N (kinds) has ended and is a zombie",
        "pid N (kinds) is exiting",
    }, said
    assert said


def test_the_tool_is_killed_meanwhile(built: Path) -> None:
    """The borrowed thread finds its own way back, wherever the tool stops. (test_killed_tool.py stops it at every step.)"""
    program = f"""
import os, sys
from pathlib import Path
from gpubpf.attach import loading
from gpubpf.process import ptrace
calls, stop = 0, int(sys.argv[2])
before = ptrace.TracedThread.to_syscall
def to_syscall(self):
    global calls
    before(self)
    calls += 1
    if calls == stop: os.kill(os.getpid(), 9)
ptrace.TracedThread.to_syscall = to_syscall
loading.inject(int(sys.argv[1]), Path({str(built / "library.so")!r}), "entry", "abc").wait()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(loading.__file__).parents[2])}
    names = "allocate load except epoll sleep registers restarted interrupted send".split()
    with running(built / "stress", built / "loaded.so", *names) as process:
        time.sleep(0.1)
        ends = [
            subprocess.run(
                [sys.executable, "-c", program, str(process.pid), str(stop)], env=environment
            ).returncode
            for stop in (1, 2, 3, 4, 5, 6, 8, 10, 12, 14)
        ]
        assert ends.count(-signal.SIGKILL) >= 6, ends
        assert put(process.pid, built / "library.so") == 3
        process.communicate("\n", timeout=60)
        assert process.returncode == 0


# --- what is refused ---


def refused(pid: int, library: Path = Path(__file__)) -> str:
    with pytest.raises(SessionError) as caught:
        put(pid, library)
    text = str(caught.value)
    assert "\n" not in text and "; " in text
    return text


def test_no_process() -> None:
    assert "there is no process 4194305" in refused(4194305)


def test_this_process() -> None:
    assert "is this tool" in refused(os.getpid())


def test_a_kernel_thread() -> None:
    assert "is a kernel thread" in refused(2)


def test_a_thread_of_a_process(built: Path) -> None:
    with running(built / "kinds", "mutex") as process:
        until(lambda: len(ptrace.threads_of(process.pid)) == 2)
        other = next(t for t in ptrace.threads_of(process.pid) if t != process.pid)
        assert f"is a thread of process {process.pid}; use -p {process.pid}" in refused(other)


def test_a_zombie() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert "has ended and is a zombie" in refused(child.pid)
    child.wait()


def test_a_process_whose_first_thread_has_ended(built: Path) -> None:
    with running(built / "kinds", "leaderless") as process:
        until(lambda: state(process.pid) == "Z")
        assert "its main thread has exited" in refused(process.pid)


def test_a_stopped_process(built: Path) -> None:
    with running(built / "kinds", "pause") as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert f"kill -CONT {process.pid}" in refused(process.pid)


def test_a_traced_process(built: Path) -> None:
    with running(built / "kinds", "pause") as process:
        thread = ptrace.TracedThread(process.pid, process.pid)
        assert f"is already traced by {Path('/proc/self/comm').read_text().strip()} (pid" in refused(
            process.pid
        )
        thread.interrupt()
        assert thread.wait(time.monotonic() + 60)
        thread.release()
        assert put(process.pid, built / "library.so") == 3


def test_a_static_program(built: Path) -> None:
    with running(built / "static", "pause") as process:
        assert "has no shared C library" in refused(process.pid)


def test_a_32_bit_program(tmp_path: Path) -> None:
    with gpubpf_32_bit.pausing(tmp_path) as pid:
        assert "is a 32-bit program" in refused(pid)


def as_nobody(work: Callable[[], None]) -> str:
    """What it says, as a user without privileges."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: its own children may look at it
            work()
        except BaseException as error:
            os.write(writer, f"{error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


@needs_root
def test_a_process_of_another_user(built: Path) -> None:
    with running(built / "kinds", "pause") as process:
        text = as_nobody(lambda: print(put(process.pid, built / "library.so")))
        assert re.fullmatch(r"pid \d+ \(kinds\) belongs to another user; use sudo", text), text


@needs_root
def test_an_ordinary_user_and_its_own_process(built: Path) -> None:
    def work() -> None:
        with running(built / "kinds", "pause") as process:
            time.sleep(0.1)
            raise ValueError(put(process.pid, built / "library.so"))

    assert as_nobody(work) == "3"

    def hidden() -> None:
        with running(built / "kinds", "dumpable") as process:
            put(process.pid, built / "library.so")

    assert re.fullmatch(
        r"pid \d+ \(kinds\) has privileges that you lack, or is not dumpable; use sudo", as_nobody(hidden)
    )


@needs_root
@pytest.mark.parametrize(
    "scope, said",
    [
        (1, r"cannot be traced without root \(kernel\.yama\.ptrace_scope is 1\); use sudo"),
        (2, r"cannot be traced without root \(kernel\.yama\.ptrace_scope is 2\); use sudo"),
        (
            3,
            r"cannot be traced: the kernel forbids all tracing \(kernel\.yama\.ptrace_scope is 3\); start .*",
        ),
    ],
)
def test_what_yama_forbids(built: Path, monkeypatch: pytest.MonkeyPatch, scope: int, said: str) -> None:
    """A real refusal; the scope is what a kernel with Yama would say."""
    monkeypatch.setattr(traceable, "ptrace_scope", lambda: scope)

    def work() -> None:
        with running(built / "kinds", "dumpable") as process:
            put(process.pid, built / "library.so")

    assert re.fullmatch(rf"pid \d+ \(kinds\) {said}", as_nobody(work))


@needs_root
def test_a_set_user_id_program(built: Path) -> None:
    program = built / "elevated"
    shutil.copy(built / "kinds", program)
    program.chmod(0o4755)

    def work() -> None:
        with running(program, "pause") as process:
            put(process.pid, built / "library.so")

    text = as_nobody(work)
    if text == "3":
        pytest.skip("set-user-ID programs are off here")
    assert re.fullmatch(r"pid \d+ \(elevated\) belongs to another user; use sudo", text), text


@needs_root
def test_from_inside_a_user_namespace(built: Path) -> None:
    """Root there, with all capabilities, but none over who is outside."""
    with running(built / "kinds", "pause") as process:

        def work() -> None:
            new_user = 0x10000000  # CLONE_NEWUSER
            if ctypes.CDLL(None).unshare(new_user) != 0:
                raise ValueError("no namespaces")
            put(process.pid, built / "library.so")

        text = as_nobody(work)
    if text == "no namespaces":
        pytest.skip("no namespaces here")
    assert re.fullmatch(
        r"pid \d+ \(kinds\) is in a user namespace in which this tool has no privileges; run the tool on the host",
        text,
    ), text


@needs_root
def test_another_users_process_that_cannot_read_the_library(built: Path) -> None:
    private = built / "private.so"
    shutil.copy(built / "library.so", private)
    private.chmod(0o600)
    with running(built / "kinds", "pause", user=65534, group=65534) as process:
        time.sleep(0.1)
        assert put(process.pid, private) == 3
        assert put(process.pid, private, "12345") == 5
        maps = [m for m in address_space.mappings(process.pid) if "private.so" in m.path and m.code]
        assert len(maps) == 1 and maps[0].path.startswith("/memfd:")
        assert settled(process.pid, 1)[:2] == (1, 3)


@needs_root
def test_no_new_privileges(built: Path) -> None:
    with running(
        "setpriv", "--no-new-privs", "--reuid=65534", "--clear-groups", built / "kinds", "pause"
    ) as process:
        time.sleep(0.1)
        assert put(process.pid, built / "library.so") == 3


@needs_root
def test_a_container(built: Path, tmp_path: Path) -> None:
    """Other mounts, process numbers, users and network; the library does not exist there."""
    library = tmp_path / "host.so"
    shutil.copy(built / "library.so", library)
    script = (
        f"cp {built}/kinds /dev/shm/kinds.$$; mount -t tmpfs none {tmp_path}; exec /dev/shm/kinds.$$ pause"
    )
    unshare = ["unshare", "--mount", "--pid", "--net", "--user", "--map-root-user", "--mount-proc", "--fork"]
    if subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no namespaces here")
    with running(*unshare, "sh", "-c", script) as process:
        time.sleep(0.2)
        inner = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        injection = loading.inject(inner, library, "entry", connect=True)
        assert injection.wait() == 77
        assert injection.socket is not None
        assert said(injection.socket) == b"hello"
        os.kill(inner, signal.SIGKILL)
    for left in Path("/dev/shm").glob("kinds.*"):
        left.unlink()


@needs_root
def test_only_sockets_get_files(built: Path, tmp_path: Path) -> None:
    """A process could name any file in place of its socket, such as one that it may only read and the tool may write."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"as it was")
    with open(precious, "rb") as file:
        process = subprocess.Popen([built / "kinds", "pause"], stdin=file, stdout=subprocess.PIPE)
        try:
            with pytest.raises(SessionError, match="returned a non-socket; not attaching"):
                loading._send(process.pid, 0, file.fileno())
        finally:
            process.kill()
            process.communicate()
    assert precious.read_bytes() == b"as it was"


class Interrupted:
    """A thread that stops again and again, but never where the tool needs it."""

    at_syscall = interrupted = False
    signal = 0

    def wait(self, until: float) -> bool:
        return True

    def registers(self) -> ptrace.Registers:
        return ptrace.Registers()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


@pytest.mark.parametrize("step", ["_call", "_restore", "_run_stub"])
def test_a_thread_that_is_interrupted_without_end_is_given_up(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(borrow, "CREATE_TIMEOUT", 0.01)
    with address_space.Memory(os.getpid()) as memory:
        code = borrow.ProcessCode(os.getpid(), memory, ())
        borrowing: Any = borrow._Borrowing(os.getpid(), memory, code, {}, 0.05)
        errors: list[Exception] = []

        def work() -> None:
            try:
                getattr(borrowing, step)(Interrupted(), *([0] if step != "_restore" else []))
            except SessionError as error:
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive() and errors


@needs_root
def test_a_symbolic_link_does_not_lead_out_of_the_root_of_a_process(built: Path, tmp_path: Path) -> None:
    """The process does not see the library, although its link leads to it from outside."""
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(built / "static", root / "static")
    library = tmp_path / "library.so"
    shutil.copy(built / "library.so", library)
    place = root / str(library)[1:]
    place.parent.parent.mkdir(parents=True)
    place.parent.symlink_to(tmp_path)
    process = subprocess.Popen(["chroot", root, "/static", "pause"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert not loading.is_visible(process.pid, library)
        place.parent.unlink()
        place.parent.mkdir()
        os.link(library, place)
        assert loading.is_visible(process.pid, library) == os.access(library, os.R_OK)
    finally:
        process.kill()
        process.communicate()


def test_only_the_tool_has_its_end_of_the_connection(built: Path) -> None:
    """The process keeps both ends of each socket pair that it is made to create. The tool's end must not be one of these."""
    with running(built / "blocks", "keeps") as process:
        injection = loading.inject(process.pid, built / "library.so", "entry", connect=True)
        assert injection.wait() == 77
        assert injection.socket is not None
        ours = os.fstat(injection.socket.fileno()).st_ino
        there = {os.readlink(f"/proc/{process.pid}/fd/{n}") for n in os.listdir(f"/proc/{process.pid}/fd")}
        assert any(link.startswith("socket:") for link in there)  # those that it keeps
        assert f"socket:[{ours}]" not in there
        assert said(injection.socket) == b"hello"


# --- patching ---


def code_of(pid: int, name: str) -> int:
    with address_space.Memory(pid) as memory:
        library = next(
            x for x in address_space.libraries(address_space.mappings(pid)) if x.name == "libcode.so"
        )
        return elf.exports(memory, library.base)[name].address


ONE, TWO = b"\xb8\1\0\0\0", b"\xb8\2\0\0\0"


def changed(pid: int, patch: patching.Patch) -> float:
    """As `patching.apply`, of code that is not as its file has it."""
    with address_space.Memory(pid) as memory:
        return patching._apply(pid, memory, address_space.mappings(pid), [patch])


def test_code_changes_while_a_hundred_threads_run_it(built: Path) -> None:
    with running(built / "patched", 100) as process:
        at = code_of(process.pid, "answer")
        stood = []
        for _ in range(20):
            stood.append(patching.apply(process.pid, [patching.Patch(at, ONE, TWO)]))
            stood.append(changed(process.pid, patching.Patch(at, TWO, ONE)))
            time.sleep(0.01)
        out, _ = process.communicate("\n\n", timeout=60)
        ones, twos = map(int, out.split()[1:])
        assert process.returncode == 0 and ones > 100 and twos > 100
        stood.sort()
        print(f"100 threads stood {stood[0] * 1e3:.2f}, {stood[20] * 1e3:.2f}, {stood[-1] * 1e3:.2f} ms")
        assert stood[20] < 1  # how long it is on an idle machine, benchmarks tell


@pytest.mark.parametrize("kind", ["inside", "handler"])
def test_code_in_which_a_thread_is_does_not_change(
    built: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It runs there, or came from there into a signal handler that is still under way."""
    with running(built / "patched", 1, kind) as process:
        at = code_of(process.pid, "inside")
        with address_space.Memory(process.pid) as memory:
            old = memory.read(at, 7)
            patches = [
                patching.Patch(at, old, old[::-1]),
                patching.Patch(code_of(process.pid, "answer"), ONE, TWO),
            ]
            monkeypatch.setattr(patching, "PATIENCE", 0.3)
            with pytest.raises(SessionError, match="its threads keep using the code to change; try again"):
                patching.apply(process.pid, patches)
            assert memory.read(at, 7) == old
            assert memory.read(patches[1].address, 5) == ONE
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "out\n"
            monkeypatch.setattr(patching, "PATIENCE", 60.0)
            patching.apply(process.pid, patches)
            assert memory.read(at, 7) == old[::-1]
        process.communicate("\n", timeout=60)
        assert process.returncode == 0


def test_code_changes_once_another_tracer_has_passed(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tool looks for a thread that it may borrow; one that stays is named."""
    there, over = threading.Event(), threading.Event()

    def stay() -> None:
        with ptrace.stopped(process.pid, 60):
            there.set()
            over.wait()

    def again(*_: float) -> float:
        over.set()
        return 0.0

    with running(built / "patched", 3) as process:
        patch = patching.Patch(code_of(process.pid, "answer"), ONE, TWO)
        other = threading.Thread(target=stay)
        other.start()
        try:
            assert there.wait(60)
            monkeypatch.setattr(patching, "PASSING", 0.0)
            with pytest.raises(traceable.AlreadyTraced, match="is already traced by"):
                patching.apply(process.pid, [patch])
            monkeypatch.setattr(patching, "PASSING", 60.0)
            monkeypatch.setattr(patching, "PATIENCE", 60.0)
            monkeypatch.setattr(random, "uniform", again)
            patching.apply(process.pid, [patch])
        finally:
            over.set()
            other.join()
        process.communicate("\n\n", timeout=60)
        assert process.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="another reason is found for an ordinary user")
def test_a_tracer_that_has_left_is_worth_another_try(built: Path) -> None:
    with running(built / "stress", built / "loaded.so", "pause") as process:
        error = traceable.refusal(process.pid, errno.EPERM)
        assert isinstance(error, traceable.RefusedForNow) and not isinstance(error, traceable.AlreadyTraced)
        assert "cannot be traced (Operation not permitted)" in str(error)
        process.communicate("\n", timeout=60)


def test_threads_that_were_not_let_go_are_free_for_the_next_attempt(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sleeps in the kernel for long can only be left to the end of the thread that traces it."""
    releases: list[int] = []
    release, used = ptrace._release, patching._ChangedCode.used

    def first_not(traced: dict[int, ptrace.TracedThread]) -> None:
        releases.append(len(traced))
        if len(releases) > 1:
            release(traced)

    monkeypatch.setattr(ptrace, "_release", first_not)
    monkeypatch.setattr(patching._ChangedCode, "used", lambda *a: not releases or used(*a))
    with running(built / "patched", 3) as process:
        patching.apply(process.pid, [patching.Patch(code_of(process.pid, "answer"), ONE, TWO)])
        # The second one again where a thread is in that code just then.
        assert len(releases) >= 2 and set(releases) == {4}
        process.communicate("\n\n", timeout=60)
        assert process.returncode == 0


def test_only_code_that_is_what_it_should_be_changes(built: Path) -> None:
    with running(built / "patched", 0) as process:
        at = code_of(process.pid, "answer")
        with pytest.raises(SessionError, match=r"another tool has already patched libcode\.so"):
            patching.apply(process.pid, [patching.Patch(at, TWO, ONE)])
        with pytest.raises(SessionError, match="is not what its agent reported"):
            changed(process.pid, patching.Patch(at, TWO, ONE))
        stack = next(m for m in address_space.mappings(process.pid) if m.path == "[stack]")
        with pytest.raises(SessionError, match="a patch outside the code of a mapped file"):
            patching.apply(process.pid, [patching.Patch(stack.start, ONE, TWO)])
        with address_space.Memory(process.pid) as memory:
            memory.write(at, b"\xcc")  # somebody's breakpoint
            with pytest.raises(SessionError, match="another tool has already patched"):
                patching.apply(process.pid, [patching.Patch(at, b"\xcc" + ONE[1:], TWO)])
            memory.write(at, ONE[:1])
        process.communicate("\n\n", timeout=60)
        assert process.returncode == 0


def _list(*records: tuple[int, bytes, bytes, int], seals: int = patching.SEALS) -> int:
    import fcntl

    file = os.memfd_create("patches", os.MFD_ALLOW_SEALING)
    os.write(file, b"".join(patching.RECORD.pack(*record) for record in records))
    if seals:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def test_a_list_of_patches_is_read() -> None:
    file = _list((4096, b"abcde", b"fghij", 5), (64, b"x", b"y", 1))
    assert patching.read_patches(file) == (
        patching.Patch(64, b"x", b"y"),
        patching.Patch(4096, b"abcde", b"fghij"),
    )


@pytest.mark.parametrize(
    "file",
    [
        lambda: _list((64, b"x", b"y", 1), seals=0),
        lambda: _list((64, b"x", b"y", 0)),
        lambda: _list((64, b"x", b"y", 9)),
        lambda: _list((1 << 60, b"x", b"y", 1)),
        lambda: _list((64, b"xxxx", b"yyyy", 4), (66, b"x", b"y", 1)),
        lambda: _list(*[(64 * i, b"x", b"y", 1) for i in range(patching.PATCH_LIMIT + 1)]),
        lambda: os.open("/dev/null", os.O_RDONLY),
    ],
)
def test_what_is_no_list_of_patches_is_refused(file: Callable[[], int]) -> None:
    with pytest.raises(SessionError, match="a traced process sent"):
        patching.read_patches(file())


# --- the tools ---


@pytest.fixture(scope="module")
def loads(built: Path) -> Path:
    """A program that loads a module again and again, on the embedded device."""
    if not (device.LIBRARIES / "libcuda.so.1").exists() or not agent.LIBRARY.exists():
        pytest.skip("the embedded device or the agent is not built (script/setup)")
    headers = [d for d in CUDA_HEADERS if (d / "cuda.h").exists()]
    if not headers:
        pytest.skip("needs cuda.h")
    libraries = device.LIBRARIES
    command = "gcc -O1 -pthread -I{headers} {here}/loads.c -o {at}/loads -L{place} -lcuda -Wl,-rpath,{place}"
    names = {"headers": headers[0], "here": HERE, "at": built, "place": libraries}
    subprocess.run(words(command, **names), check=True)
    return built / "loads"


CUDA_HEADERS = [
    *sorted(Path("/usr/local").glob("cuda*/include")),
    *(Path(place) / "nvidia/cu13/include" for place in sys.path),
]
TOOL = [sys.executable, str(Path(__file__).parents[3] / "tools" / "threadhist.py")]


def tool(pid: int, *arguments: str, end: int | None = None) -> subprocess.CompletedProcess[str]:
    """`end`: the signal that it gets once it has counted something."""
    process = subprocess.Popen(
        [*TOOL, "-p", str(pid), *arguments, *([] if end is None else ["0.2"])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(100, process.kill)
    timer.start()
    counted = ""
    if end is not None:
        assert process.stdout is not None
        while not re.search(r"\blaunches\b", counted):
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            counted += line
        process.send_signal(end)
    out, error = process.communicate()
    timer.cancel()
    return subprocess.CompletedProcess(process.args, process.returncode, counted + out, error)


def counted(records: list[dict[str, Any]]) -> dict[str, int]:
    """What each interval had, together."""
    kernels = [record for record in records if record["type"] == "kernel"]
    return {name: sum(kernel[name] for kernel in kernels) for name in ("launches", "runs", "work")}


def changed_bytes(pid: int) -> int:
    """Of the code of the driver and of the C library, but for breakpoints: who watches the machine has the kernel set some."""
    count = 0
    with address_space.Memory(pid) as memory:
        for m in address_space.mappings(pid):
            if m.code and re.search(r"/lib(cuda|c)\.so", m.path):
                with open(m.path, "rb") as file:
                    expected = os.pread(file.fileno(), m.end - m.start, m.offset)
                held = memory.read(m.start, len(expected))
                count += sum(a != b != 0xCC for a, b in zip(expected, held, strict=True))
    return count


# They would hold up the probes: NumPy takes longer than all else, and each dataclass up to 0.7 ms (see gpubpf/record.py).
NOT_BEFORE_PROBES = set(
    "numpy dataclasses inspect logging traceback concurrent.futures tempfile shutil random secrets platform glob sysconfig textwrap"
    " difflib gpubpf.ptx.module gpubpf.verify gpubpf.lower.ir gpubpf.linux.uprobes".split()
)


@pytest.mark.every(4)
@pytest.mark.may_come_too_late
@pytest.mark.parametrize("name", ["threadhist", "launchlate", "kernelretsnoop", "memtrace"])
def test_what_is_loaded_only_when_probes_are_live(loads: Path, name: str) -> None:
    """What delays them must come later."""
    with running(loads, 1) as process:
        command = [sys.executable, "-X", "importtime", Path(TOOL[1]).with_name(f"{name}.py")]
        done = subprocess.run(
            [*command, "-p", str(process.pid), "-d", "0.3"], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr[-1000:]
        # The last that is loaded on the way. What is said of the way's end may be said after NumPy has come.
        before, on_the_way, after = done.stderr.partition("gpubpf.attach.patching\n")
        assert on_the_way and "gpubpf.attach.loading" in before
        assert re.search(r"\| +numpy$", after, re.M)
        assert not set(re.findall(r"\| +([\w.]+)$", before, re.M)) & NOT_BEFORE_PROBES
        process.communicate("\n", timeout=60)


def test_who_is_beside_is_said() -> None:
    """Where all that is in the way are another tool's probes, to start the program anew would not help."""
    changed = [f"cu{name}: {ALREADY_CHANGED}" for name in "ABCD"]
    assert server._hook_failure(changed).startswith(
        "has another tool's probes at cuA, cuB, cuC; stop that tool first"
    )
    said = server._hook_failure([*changed[:1], "cuE: the end of its library"])
    assert (
        said
        == f"cannot be hooked at {changed[0]}; cuE: the end of its library; start it with the tool instead"
    )


def test_a_tool_on_a_program_that_runs(loads: Path) -> None:
    with running(loads, 4) as process:
        done = tool(process.pid, "--kernel", "fresh", "--json", end=signal.SIGTERM)
        assert done.returncode == 0, done.stderr
        assert f"attached to {process.pid} (loads)" in done.stderr
        records = [json.loads(line) for line in done.stdout.splitlines()]
        summary = next(r for r in records if r["type"] == "summary")
        kernel = counted(records)
        assert summary["launches_instrumented"] == kernel["launches"] > 0
        # Modules that threads had just loaded when probes went live.
        before = summary["launches_matched"] - kernel["launches"]
        assert summary["not_instrumented"] == ({"before ready": before} if before else {})
        assert kernel["runs"] == kernel["launches"] * 128 and kernel["work"] == kernel["runs"] * 5
        assert summary["launches_seen"] > kernel["launches"]  # those of the old module
        until(lambda: changed_bytes(process.pid) == 0)  # the agent may go on when the tool has left
        again = tool(process.pid, "--kernel", "fresh", "--json", end=signal.SIGTERM)
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout.splitlines()[-1])["launches_instrumented"] > 0
        until(lambda: changed_bytes(process.pid) == 0)
        out, _ = process.communicate("\n", timeout=60)
        assert process.returncode == 0 and int(out.split()[0]) > 20


@pytest.mark.every(2)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_tool_ends_and_the_program_goes_on(loads: Path, end: int) -> None:
    with running(loads, 4) as process:
        done = tool(process.pid, end=end)
        assert done.returncode == (0 if end != signal.SIGKILL else -end), done.stderr
        until(lambda: changed_bytes(process.pid) == 0)
        if end != signal.SIGKILL:
            assert re.search(r"counted [1-9][\d,]* of [1-9]", done.stdout), done.stdout
        time.sleep(0.3)
        out, _ = process.communicate("\n", timeout=60)
        assert process.returncode == 0 and int(out.split()[0]) > 20


def test_a_pipe_where_a_library_was_keeps_nobody_waiting(built: Path) -> None:
    """Who may not open what is mapped goes by its name, where something else may lie by now."""
    pipe = built / "libgone.so"
    os.mkfifo(pipe)
    mapping = address_space.Mapping(
        0x1000, 0x2000, "r-xp", 0, address_space.mappings(os.getpid())[0].file, str(pipe)
    )
    patch = patching.Patch(0x1000, bytes(5), bytes(5))
    with running(built / "kinds", "pause") as process:
        opening = [
            threading.Thread(target=patching._in_file, args=(process.pid, mapping, [patch]), daemon=True),
            threading.Thread(
                target=_look_at, args=(process.pid, address_space.Library(0x1000, (mapping,))), daemon=True
            ),
        ]
        for thread in opening:
            thread.start()
            thread.join(60)
            assert not thread.is_alive()


def _look_at(pid: int, library: address_space.Library) -> None:
    with address_space.library_file(pid, library) as (identity, _, _):
        assert identity is None


def test_a_program_without_the_driver(built: Path) -> None:
    with running(built / "kinds", "pause") as process:
        done = tool(process.pid)
        assert done.returncode == 1
        assert done.stderr == (
            f"threadhist: pid {process.pid} (kinds) has not loaded the CUDA driver or ROCr; wait until it uses the GPU,"
            " or start it with the tool\n"
        )
