"""Hold the overhead of device programs below --budget by measuring only some launches of each kernel.

The agent measures the first launch of a kernel. It measures no further launch until the tool has read the cost of the first: the
added instructions compared with the application's own (inject/cost.py). From then on, the agent measures one launch in N, at a random
position within each N launches. N is the smallest number that keeps the added instructions within the budget. Host time (hooks, and
readings of maps) is subtracted from the budget first.
The first launch stands for the first 2 N launches, so at no time has more than one in N been measured. Each later reading updates N.
docs/sampling.md explains this to users.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from gpubpf import names
from gpubpf.agent.definitions import SLOTS, Reason
from gpubpf.agent.protocol import REASON_NAMES
from gpubpf.record import Record
from gpubpf.session import readout

if TYPE_CHECKING:
    from gpubpf.agent.protocol import Counters
    from gpubpf.traced.measurement import Measurement
    from gpubpf.traced.traced_process import TracedProcess

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds between two readings
READING_SHARE = 0.25  # share of the budget that readings may take
NEVER = 1 << 62  # as N of "one launch in N": no launch
SAMPLED_OUT = REASON_NAMES[Reason.SAMPLED_OUT]


class KernelCost(Record):
    """The cost of a kernel's launches in one process.

    slot       number of the kernel in the process
    launches   number of launches that could have been measured
    measured   number of measured launches
    own        the application's instructions in the measured launches that were read; 0: not known yet
    added      added instructions in the same launches; 0: not known yet
    one_in     the agent measures one launch in this many; 0: only the first launch so far
    """

    process: TracedProcess
    slot: int
    mangled: str
    launches: int
    measured: int
    own: int
    added: float
    one_in: int

    @property
    def of_a_launch(self) -> float | None:
        """Added instructions of a measured launch in per cent of the application's; None: unknown."""
        return 100 * self.added / self.own if self.own else None

    @property
    def overhead(self) -> float | None:
        """Added instructions in per cent of the application's in all launches, if unmeasured launches are like measured ones."""
        of_a_launch = self.of_a_launch
        return None if of_a_launch is None else of_a_launch * self.measured / self.launches


def one_in(cost: float, left: float) -> int:
    """Return N of "one launch in N". cost: per cent that a measured launch adds. left: per cent that may be spent."""
    return max(1, math.ceil(cost / left)) if left > 0 else NEVER


class Budget:
    """The budget of a measurement, in per cent. All methods belong to the thread that runs `Session.intervals`."""

    def __init__(self, percent: float) -> None:
        self.percent = percent
        self._rates: dict[tuple[int, int], int] = {}  # (process, slot) → N
        self._reading_ns = 0  # total duration of this object's readings, without the latest
        self._latest: tuple[int, int | None] = (0, 0)  # begin and end of the latest reading; None: under way
        # When `_look` last ran, and when it first saw each process: (time.monotonic_ns, total duration of readings until then).
        self._looked = time.monotonic_ns(), 0
        self._since: dict[int, tuple[int, int]] = {}
        self._read_in_all: dict[int, int] = {}  # ended process → total duration of readings until its end
        self._soonest, self._next, self._pause = 0.0, 0.0, SHORTEST_PAUSE
        self._awaited: set[tuple[int, int]] = set()  # kernels that were to get their first rate in a reading
        self._measured_before = 0

    def tick(self, measurement: Measurement, read: Callable[[], int | None]) -> None:
        """Update the rates if launches have been measured since the last update. `read` requests the maps and waits for them."""
        self._look(measurement)
        if self._latest[1] is None or measurement.stopped or time.monotonic() < self._soonest:
            return
        launched = {(process.number, slot): counters for process, slot, counters in _launched(measurement)}
        measured = sum(counters.instrumented for counters in launched.values())
        waiting = {kernel for kernel in launched.keys() - self._rates.keys() if launched[kernel].instrumented}
        new = waiting - self._awaited
        if not new and time.monotonic() < self._next:
            return
        if new or waiting or measured != self._measured_before:
            self._measured_before, self._awaited = measured, self._awaited | waiting
            self.read(read)
        elif NEVER not in self._rates.values():
            return  # without new counts, only the rate NEVER can change: host time becomes a smaller share
        self._pause = min(2 * (SHORTEST_PAUSE if new else self._pause), LONGEST_PAUSE)
        self._next = max(self._soonest, time.monotonic() + self._pause)
        self._choose(measurement)

    def _look(self, measurement: Measurement) -> None:
        """Record the total duration of readings until each new process began, and until each process ended."""
        now = time.monotonic_ns()
        new = now, self._read_until(now)
        for process in measurement.all_processes():
            ended = int(process.disconnected_at * 1e9)
            self._since.setdefault(process.number, self._looked if ended else new)
            if ended and process.number not in self._read_in_all:
                self._read_in_all[process.number] = self._read_until(ended)
        self._looked = new

    def _read_until(self, at: int) -> int:
        """Return the total duration of readings until `at` (time.monotonic_ns).

        `at` must not be before the end of the second-latest reading."""
        begin, end = self._latest
        return self._reading_ns + max(0, (at if end is None else min(at, end)) - begin)

    def read(self, read: Callable[[], int | None]) -> None:
        """Read the maps, and delay the next reading so that readings take at most READING_SHARE of the budget.

        read: returns when the last process answered (time.monotonic_ns): the wait for a process that does not, as one that is stopped,
        costs no process anything. None: now."""
        start = time.monotonic_ns()
        self._reading_ns = self._read_until(start)
        self._latest = start, None
        answered: int | None = None
        try:
            answered = read()
        finally:
            self._latest = start, time.monotonic_ns() if answered is None else answered
        took = self._latest[1] - start
        share = READING_SHARE * self.percent / 100
        self._soonest = time.monotonic() + max(SHORTEST_PAUSE, took / 1e9 / share)

    def _choose(self, measurement: Measurement) -> None:
        """Choose the rate of each kernel whose counts were read. A notice reports a kernel's first rate."""
        costs = list(self.costs(measurement))
        labels = names.labels(cost.mangled for cost in costs)
        for cost in costs:
            of_a_launch = cost.of_a_launch
            if of_a_launch is None:
                continue
            # The next reading is at `_soonest` at the earliest, so this reading's cost is spread over the time until then.
            host = self.host(cost.process, int(self._soonest * 1e9)) or 0.0
            rate = one_in(of_a_launch, self.percent - host)
            self._rates[cost.process.number, cost.slot] = rate
            cost.process.set_one_in(cost.slot, rate)
            if not cost.one_in:
                where = f"{labels[cost.mangled]} in {cost.process.label}"
                measurement.note(f"budget of {self.percent:g} %: {_choice(rate)} of {where}")

    def forget(self, processes: Collection[int]) -> None:
        """Forget processes that have ended, by their numbers."""
        self._rates = {key: rate for key, rate in self._rates.items() if key[0] not in processes}
        self._awaited = {key for key in self._awaited if key[0] not in processes}
        for number in processes:
            self._since.pop(number, None)
            self._read_in_all.pop(number, None)

    def host(self, process: TracedProcess, until: int = 0) -> float | None:
        """Return the time in hooks and readings in per cent of a process's lifetime; None on the virtual clock.

        until: time.monotonic_ns at which the lifetime of a running process is taken to end, if that is later than now.

        Only readings within the lifetime count. Rare work, such as loading the copies of a new module, does not count."""
        if process.virtual or process.virtual_times()[0]:
            return None
        calls = process.hook_calls()
        hooks_ns = max(0, (calls.ns or 0) - calls.rare_ns)
        end = int(process.disconnected_at * 1e9) or max(until, time.monotonic_ns())
        since, read_before = self._since.get(process.number, self._looked)
        read_ns = self._read_in_all.get(process.number, self._read_until(end)) - read_before
        return 100 * (hooks_ns + read_ns) / max(1, end - since)

    def costs(self, measurement: Measurement) -> Iterator[KernelCost]:
        """Yield the matched kernels that were launched."""
        spent = readout.spent(measurement)
        for process, slot, counters in _launched(measurement):
            name = process.names.get(slot, "")
            launches = counters.instrumented + counters.reasons.get(SAMPLED_OUT, 0)
            own, added = spent.get((process.number, name), (0, 0.0))
            rate = self._rates.get((process.number, slot), 0)
            yield KernelCost(process, slot, name, launches, counters.instrumented, own, added, rate)

    def record(self, measurement: Measurement) -> dict[str, Any]:
        """Return the field `budget` of the summary."""
        kernels = []
        for cost in self.costs(measurement):
            name, host = names.demangle(cost.mangled), self.host(cost.process)
            of_a_launch, overhead = cost.of_a_launch, cost.overhead
            held = None if overhead is None else overhead + (host or 0.0) <= self.percent
            kernels.append(
                {
                    "pid": cost.process.pid,
                    "comm": cost.process.comm,
                    "kernel": name.short,
                    "demangled": name.full,
                    "mangled": cost.mangled,
                    "launches": cost.launches,
                    "measured": cost.measured,
                    "one_in": cost.one_in if 0 < cost.one_in < NEVER else None,
                    "launch_percent": _rounded(of_a_launch),
                    "overhead_percent": _rounded(overhead),
                    "host_percent": _rounded(host),
                    "held": held,
                }
            )
        return {"percent": self.percent, "kernels": kernels}


def _launched(measurement: Measurement) -> Iterator[tuple[TracedProcess, int, Counters]]:
    """Yield the process, slot and counters of each kernel with launches that the budget decides about."""
    for process in measurement.all_processes():
        for slot, counters in enumerate(process.counters()[0][: SLOTS - 1]):
            if counters.instrumented or counters.reasons.get(SAMPLED_OUT):
                yield process, slot, counters


def _choice(rate: int) -> str:
    return "measuring no further launches" if rate == NEVER else f"measuring one launch in {rate:,}"


def _rounded(percent: float | None) -> float | None:
    return None if percent is None else round(percent, 3)
