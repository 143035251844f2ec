"""When users are told that a tool is attached to a process, and when that copies of kernels are missing."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from gpubpf.images.sidecar import Sidecar
from gpubpf.process.target_socket import TargetSocket
from gpubpf.session.session import Session, _NewlyHooked
from gpubpf.traced.device import Device
from gpubpf.traced.measurement import Listener, Plan, Targets
from gpubpf.traced.traced_process import TracedProcess
from gpubpf.traced.workers import SidecarBuilder


class Reports:
    """A session that has not started, with one process whose hooks are live."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        listener = Listener(
            attached=lambda pid, comm, ts_ns, again: self.told.append(("attached", pid)),
            waiting=lambda pid, comm, ts_ns, kernels: self.told.append(("waiting", pid, kernels)),
        )
        builder = SidecarBuilder(lambda image, target: Sidecar())
        self.session = Session(Targets(pids=(7,)), Plan(Device("sim")), builder, listener)
        self.process = TracedProcess(TargetSocket(socket.socket()), 7, 1)
        self.process.preparing[0] = frozenset({""})
        self.newly = _NewlyHooked(self.process, time.monotonic() + 1000)
        self.session._newly_hooked.append(self.newly)

    def report(self) -> list[tuple[Any, ...]]:
        """Return what is reported now."""
        self.told.clear()
        self.session._report_attached()
        return list(self.told)


@pytest.fixture
def reports() -> Reports:
    return Reports()


def test_attached_comes_when_all_copies_are_ready(reports: Reports) -> None:
    assert reports.report() == []
    reports.process.preparing.clear()
    assert reports.report() == [("attached", 7)]
    reports.process.preparing[1] = frozenset({"later"})  # its first launch has loaded it
    reports.newly.until = 0
    assert reports.report() == []


def test_waiting_comes_once_before_attached(reports: Reports) -> None:
    reports.process.preparing[1] = frozenset({"scale"})
    reports.newly.until = 0
    assert reports.report() == [("waiting", 7, 1)]
    assert reports.report() == []
    reports.process.preparing.clear()
    assert reports.report() == [("attached", 7)]
    assert reports.report() == []


def test_a_process_that_ends_before_is_not_attached_to(reports: Reports) -> None:
    reports.process.close()
    reports.session._background._prepare(reports.process, 0, ())  # what was under way
    assert reports.report() == [("waiting", 7, 1)]
    assert reports.report() == []
