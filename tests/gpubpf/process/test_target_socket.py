"""The connection to a process that does everything to make the tool wait."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from gpubpf.process import limits, target_socket
from gpubpf.process.target_socket import TargetSocket
from gpubpf.traced.traced_process import TracedProcess

pytestmark = pytest.mark.without_driver
T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call that must not wait longer than this."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "it waits"
    return results[0]


def full() -> tuple[TargetSocket, socket.socket]:
    """Return a connection whose other end has filled the socket through a duplicate that it made blocking."""
    ours, theirs = target_socket.pair()
    with socket.socket(fileno=os.dup(ours.fileno())) as stolen:
        stolen.setblocking(False)
        try:
            while True:
                stolen.send(b"x")
        except BlockingIOError:
            pass
        fcntl.fcntl(stolen, fcntl.F_SETFL, 0)
    return ours, theirs


def test_data_and_files_arrive() -> None:
    ours, theirs = target_socket.pair()
    with ours, TargetSocket(theirs) as other, open(os.devnull, "rb") as file:
        assert other.receive(100) is None
        data = bytes(range(256)) * 4096  # more than fits at once
        sending = threading.Thread(
            target=lambda: ours.send(data, [file.fileno()], until=time.monotonic() + 60)
        )
        sending.start()
        got, files = b"", []
        while len(got) < len(data):
            if (received := other.receive(1 << 20)) is not None:
                got += received.data
                files += received.files
                assert not received.truncated
        sending.join()
        assert got == data and len(files) == 1
        assert os.fstat(files[0]).st_rdev == os.fstat(file.fileno()).st_rdev
        assert fcntl.fcntl(files[0], fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.close(files[0])
        ours.shutdown()
        received = other.receive(100)
        assert received is not None and not received.data


def test_a_full_socket_is_not_waited_for() -> None:
    ours, theirs = full()
    with ours, theirs:
        assert not within(60, lambda: ours.send(b"more"))
        assert not within(60, lambda: ours.send(b"more", until=time.monotonic() + 0.1))


def test_bytes_that_somebody_else_took_are_not_waited_for() -> None:
    ours, theirs = target_socket.pair()
    with ours, theirs:
        fcntl.fcntl(ours, fcntl.F_SETFL, 0)
        assert within(60, lambda: ours.receive(100)) is None


def test_a_process_that_is_gone_is_an_error() -> None:
    ours, theirs = target_socket.pair()
    theirs.close()
    with ours, pytest.raises(BrokenPipeError):
        ours.send(b"more")


def test_closing_does_not_wait_for_a_thread_that_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEND_WAIT", 1000.0)
    ours, theirs = full()
    process = TracedProcess(ours, os.getpid(), 1)
    sending = threading.Thread(target=process.send, args=(b"more",), daemon=True)
    sending.start()
    while not process.send_lock.locked():
        time.sleep(0.001)
    with theirs:
        within(60, process.send_working)
        within(60, process.close)
    sending.join(60)
    assert not sending.is_alive()
