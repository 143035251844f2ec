"""What a report of host calls reads, and in which order."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from gpubpf.calls.report import CallReport, VendorInterfaces


class Program:
    """Names a kernel and launches it just before each reading of its records; what a reading sees is in `calls` and `names`."""

    def __init__(self) -> None:
        self.made = 0
        self.names: set[int] = set()
        self.unnamed: list[int] = []

    def calls(self) -> list[int]:
        self.made += 1
        return [self.made]

    def read_names(self, host: object) -> None:
        self.names = set(range(self.made + 1))

    def name(self, pid: int, handle: int) -> str | None:
        if handle not in self.names:
            self.unnamed.append(handle)
        return None


@pytest.mark.parametrize("events", [True, False])
def test_the_kernel_of_each_launch_that_was_read_has_its_name(events: bool) -> None:
    """The program may name and launch a kernel between two readings."""
    program = Program()
    ignored: Any = lambda *arguments: None  # noqa: E731
    report = CallReport.__new__(CallReport)
    report._out = SimpleNamespace(closed=False)  # type: ignore[assignment]
    report._driver = report._trace = None
    report._processes = SimpleNamespace(check_maps=ignored, check_calls=ignored, waiting=False)  # type: ignore[assignment]
    report._inputs = SimpleNamespace(  # type: ignore[assignment]
        calls=SimpleNamespace(
            events=program.calls,
            launched=lambda: {(1, handle) for handle in program.calls()},
            options=SimpleNamespace(events=events),
            host=None,
            seen=True,
        ),
        kernels=SimpleNamespace(read=program.read_names, name=program.name),
        delay_probes=SimpleNamespace(tick=ignored),
        processes=SimpleNamespace(started_ns=time.monotonic_ns(), stopped=False, unread=False),
        vendor=VendorInterfaces(),
    )
    taken: list[int] = []
    report._take_events = lambda found: [taken.append(h) or program.name(1, h) for h in found]  # type: ignore
    report.tick()
    report.tick()
    assert program.made == 2 and program.unnamed == []
    assert taken == ([1, 2] if events else [])
