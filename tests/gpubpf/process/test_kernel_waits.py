"""Placing and removing uprobes while processes hold their locks; tests/gpubpf/linux/test_uprobes.py has real ones."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpubpf.attach import cuinit, holding
from gpubpf.process import fuse, kernel_waits
from gpubpf.process.patience import Holder
from gpubpf.traced import machine

pytestmark = pytest.mark.without_driver


def test_this_process_does_not_fork_meanwhile() -> None:
    """fork(2) would wait, and no other thread of Python could run: Python forks with its lock."""
    order: list[str] = []
    entered, leave = threading.Event(), threading.Event()

    def place() -> None:
        with kernel_waits.guarded():
            entered.set()
            leave.wait(60)
            order.append("placed")

    placing = threading.Thread(target=place)
    placing.start()
    entered.wait()
    threading.Timer(0.2, leave.set).start()
    subprocess.run(["true"], check=True, preexec_fn=lambda: None)
    order.append("forked")
    placing.join()
    assert order == ["placed", "forked"]


def test_which_process_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that holds its lock for long, and whose user has no file system to disconnect."""
    held, disconnectable = {3}, {1}
    found = [Holder(10), Holder(11), Holder(20), Holder(30)]
    monkeypatch.setattr(kernel_waits, "lock_holders", lambda seconds: iter(found))
    monkeypatch.setattr(kernel_waits, "holds_lock", lambda pid: pid // 10 in held)
    monkeypatch.setattr(kernel_waits.scans, "user_of", lambda pid: pid // 10)
    monkeypatch.setattr(fuse, "keeps_lock", lambda pid: True)
    monkeypatch.setattr(fuse, "unanswered", lambda user: ["40"] if user in disconnectable else [])
    assert kernel_waits.obstacle() == 30
    disconnectable.add(3)
    assert kernel_waits.obstacle() == 0
    # Another process was not looked at, so it may hold its lock because of a file system that stays.
    found.append(Holder(10, unseen=True))
    assert kernel_waits.obstacle() == 10


READS = "[<0>] request_wait_answer+0x112/0x210\n[<0>] fuse_file_read_iter+0x1/0x2\n[<0>] ksys_read+0x1/0x2\n"
FORKS = "[<0>] dup_mmap+0x1/0x2\n[<0>] copy_process+0x1/0x2\n"
HOLDS = "[<0>] __folio_lock+0xf6/0x240\n[<0>] fuse_file_mmap+0x6c/0x110\n[<0>] vm_mmap_pgoff+0x124/0x210\n"


@pytest.mark.parametrize(("stacks", "aborted"), [((READS, FORKS), False), ((READS, HOLDS), True)])
def test_a_file_system_of_a_process_that_forks_and_reads_stays(
    stacks: tuple[str, str], aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fork(2) of a large process holds its lock for seconds, while its other threads read files. That is not an attack."""
    ended, connections = threading.Event(), list[str]()

    def abort(number: str) -> bool:
        connections.append(number)
        ended.set()
        return True

    looks = 0

    def holders(seconds: float) -> Iterator[Holder]:
        nonlocal looks
        looks += 1
        if looks > 2:
            ended.set()
        return iter((Holder(10),))

    monkeypatch.setattr(kernel_waits, "GRACE", 0.01)
    monkeypatch.setattr(kernel_waits, "lock_holders", holders)
    monkeypatch.setattr(kernel_waits, "holds_lock", lambda pid: True)
    monkeypatch.setattr(kernel_waits, "_stopped_by", set[int]())
    monkeypatch.setattr(kernel_waits.scans, "user_of", lambda pid: 1)
    monkeypatch.setattr(fuse.proc, "threads", lambda pid: [0, 1])
    monkeypatch.setattr(fuse.proc, "read", lambda pid, name: stacks[int(name.split("/")[1])].encode())
    monkeypatch.setattr(fuse, "unanswered", lambda user: ["40"])
    monkeypatch.setattr(fuse, "abort", abort)
    kernel_waits._watch(ended, lambda text: None)
    assert connections == ["40"] * aborted
    assert kernel_waits.has_stopped_machine(1) == aborted


def test_the_user_hears_what_the_hold_helper_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper, which has no terminal, answers with its notices."""

    def attach(program: int, path: str, offset: int) -> int:
        raise OSError(errno.EINVAL, "refused")

    @contextlib.contextmanager
    def guarded(note: Callable[[str], None]) -> Iterator[None]:
        note("disconnected FUSE 40")
        yield

    monkeypatch.setattr(cuinit.kernel_waits, "guarded", guarded)
    monkeypatch.setattr(cuinit.bpf_syscall, "attach_uprobe", attach)
    notes: list[str] = []
    probes = cuinit.CuInitProbes.__new__(cuinit.CuInitProbes)
    probes._cuinit_program, probes._uprobes, probes._note = 0, {"a": [1], "b": [2]}, notes.append
    helper = holding._HoldHelper.__new__(holding._HoldHelper)
    helper._probes = probes
    answers: Any = SimpleNamespace(_request=lambda place: helper._attach(*place))
    with pytest.raises(OSError, match="Invalid argument"):
        machine.HoldHelper.add_probe(answers, "path", 0, None, notes.append)
    assert notes == ["disconnected FUSE 40"]
    # Removing probes can take as long.
    closed: list[int] = []
    monkeypatch.setattr(cuinit.kernel_waits, "wait_for_locks", lambda: None)
    monkeypatch.setattr(cuinit.bpf_syscall, "close_all", closed.extend)
    probes._files = contextlib.ExitStack()
    probes.remove("a")
    while not closed:
        time.sleep(0.01)
    probes.close()
    assert closed == [1, 2] and notes == ["disconnected FUSE 40"] * 3


def test_a_notice_of_the_hold_helper_may_come_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper removes its probes when the tool has released everything. Nothing else that it sends counts then."""
    ends: list[socket.socket] = []

    class Helper:
        pid = 0

        def __init__(self, *some: object, pass_fds: tuple[int, ...], **more: object) -> None:
            ends.append(socket.socket(fileno=os.dup(pass_fds[0])))
            ends[0].send(b'{"ready": true}')

        def wait(self, seconds: float | None = None) -> None:
            pass

    notes, arrivals, exits = list[str](), list[int](), list[str]()
    monkeypatch.setattr(machine.subprocess, "Popen", Helper)
    helper = machine.HoldHelper(
        lambda pid, *more: arrivals.append(pid), lambda pid: None, exits.append, notes.append
    )
    with ends[0] as end:
        holding._send_note(end, "early")
        end.send(b'{"late": 7, "comm": "app"}')
        while not arrivals:
            time.sleep(0.01)
        helper.close()
        assert end.recv(100) == b""  # the end of the tool
        end.send(b'{"late": 8, "comm": "app"}')
        holding._send_note(end, "late")
        while len(notes) < 2:
            time.sleep(0.01)
    helper._thread.join(60)
    assert notes == ["early", "late"] and arrivals == [7] and exits == ["exited"]
    assert helper._connection.fileno() == -1
    holding._send_note(end, "nobody reads this")


def test_without_another_thread_the_block_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as changed:
        changed.setattr(threading.Thread, "start", refuse)
        with kernel_waits.guarded():
            assert kernel_waits._guarded == 1
    assert kernel_waits._guarded == 0
