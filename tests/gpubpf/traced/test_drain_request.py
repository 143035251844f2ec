"""Requests for maps: who does not take or answer one delays no other process."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpubpf.agent import protocol
from gpubpf.agent.definitions import DrainFlag
from gpubpf.process import limits, target_socket
from gpubpf.traced.drain_request import DrainRequest
from gpubpf.traced.traced_process import TracedProcess

pytestmark = pytest.mark.without_driver


class Counted(TracedProcess):
    """A process that counts how often somebody looks at its last answer."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "last_drain":
            type(self).looks += 1
        return super().__getattribute__(name)


@pytest.fixture
def ends() -> Iterator[list[tuple[TracedProcess, socket.socket]]]:
    """Processes, and their ends of the connections."""
    pairs = [target_socket.pair() for _ in range(40)]
    made = [(Counted(ours, os.getpid(), n), theirs) for n, (ours, theirs) in enumerate(pairs, 1)]
    yield made
    for process, theirs in made:
        process.close()
        theirs.close()


def measurement(ends: list[tuple[TracedProcess, socket.socket]]) -> Any:
    return SimpleNamespace(
        active=lambda: [process for process, _ in ends], lock=threading.Condition(), request=6
    )


def fill(process: TracedProcess) -> int:
    """Fill a connection. Return the number of bytes that it takes."""
    data = bytes(1 << 24)
    with socket.socket(fileno=os.dup(process.socket.fileno())) as same:
        return same.send(data, socket.MSG_DONTWAIT)


def test_a_process_that_does_not_take_its_message_delays_no_other(
    ends: list[tuple[TracedProcess, socket.socket]],
) -> None:
    (first, from_first), *others = ends
    filled = fill(first)
    of = measurement(ends)
    request = DrainRequest(of, 2.0, DrainFlag.STOP)
    expected = protocol.drain(7, 2.0, DrainFlag.STOP)
    for _, theirs in others:
        assert theirs.recv(100, socket.MSG_DONTWAIT) == expected
    while filled:
        filled -= len(from_first.recv(filled))
    assert not request.wait(time.monotonic())
    assert from_first.recv(100, socket.MSG_DONTWAIT) == expected
    assert set(request.unanswered()) == request.processes == {process for process, _ in ends}


def test_a_process_to_which_another_thread_sends_gets_its_message_afterwards(
    ends: list[tuple[TracedProcess, socket.socket]],
) -> None:
    process, theirs = ends[0]
    with process.send_lock:
        request = DrainRequest(measurement(ends[:1]))
    with pytest.raises(BlockingIOError):
        theirs.recv(100, socket.MSG_DONTWAIT)
    request.wait(time.monotonic())
    assert theirs.recv(100, socket.MSG_DONTWAIT) == protocol.drain(7, 0.0, 0)


def test_a_process_that_never_takes_its_message_is_disconnected(
    ends: list[tuple[TracedProcess, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEND_WAIT", 0.0)
    process, theirs = ends[0]
    filled = fill(process)
    request = DrainRequest(measurement(ends[:1]))
    assert not request.wait(time.monotonic())
    while filled:
        filled -= len(theirs.recv(filled))
    assert theirs.recv(100) == b""


def test_each_message_leads_to_few_comparisons(ends: list[tuple[TracedProcess, socket.socket]]) -> None:
    """However many processes have not answered yet."""
    of = measurement(ends)
    request = DrainRequest(of)
    waiting = threading.Thread(target=request.wait, args=(time.monotonic() + 60,))
    Counted.looks = 0
    messages = 0
    waiting.start()
    for process, theirs in reversed(ends):
        (number,) = struct.unpack_from("<I", theirs.recv(100), 8)
        for _ in range(10):  # messages of any kind
            messages += 1
            with of.lock:
                of.lock.notify_all()
            time.sleep(0)
        with of.lock:
            process.last_drain = number
            of.lock.notify_all()
            messages += 1
    waiting.join(60)
    assert not waiting.is_alive() and not request.unanswered()
    assert Counted.looks <= messages + 2 * len(ends)
