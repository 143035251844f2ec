"""Events of the GPU's kernel driver that concern traced processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from gpubpf.calls.kfd import DriverEvent, DriverEvents

MOST_EVENTS = 10_000


class DriverLog:
    """The driver's events: the recent ones, which explain slow calls, and those since the last report of
    --why.

    report: whether --why asks for such reports.
    """

    def __init__(self, driver: DriverEvents, report: bool) -> None:
        self._driver, self._report = driver, report
        self.recent: deque[DriverEvent] = deque(maxlen=MOST_EVENTS)
        self._unreported: list[DriverEvent] = []

    def read(self, traced: Callable[[int], bool]) -> None:
        """Read new events that concern all processes, or a process for whose PID `traced` returns True."""
        found = [event for event in self._driver.take() if not event.pid or traced(event.pid)]
        self.recent += found
        if self._report and len(self._unreported) < MOST_EVENTS:
            self._unreported += found

    def unreported(self) -> Sequence[DriverEvent]:
        """Return the events since the last report."""
        found, self._unreported = self._unreported, []
        return found
