"""What the session knows of one process."""

from __future__ import annotations

import socket

from gpubpf.agent.definitions import Vendor
from gpubpf.session.traced_process import TracedProcess


def process(number: int, pid: int = 7, started: float = 1.5, vendor: Vendor = Vendor.NVIDIA) -> TracedProcess:
    made = TracedProcess(socket.socket(), pid, number)
    made.started, made.vendor = started, vendor
    return made


def test_the_kernels_that_wait_are_counted_once() -> None:
    one = process(1)
    assert one.waiting == 0
    one.preparing[0] = frozenset({""})  # it is not known yet which there are
    assert one.waiting == 1
    one.preparing[1] = frozenset({"scale"})
    one.preparing[2] = frozenset({"scale"})  # in a copy made in advance
    assert one.waiting == 1
    one.preparing[3] = frozenset({"sum"})
    assert one.waiting == 2


def test_a_program_follows_another_in_the_same_process() -> None:
    first = process(1)
    assert process(2).follows(first) and not first.follows(process(2))
    assert not process(2, started=2.5).follows(first)  # its PID was reused
    assert not process(2, pid=8).follows(first)
    assert not process(2, vendor=Vendor.AMD).follows(first)  # the second agent of a program
