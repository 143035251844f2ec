"""What the exporter knows: it takes the counts of a session's processes, and returns the metrics.

watch = Watch(top=50)
watch.see(session)                # often: who the new processes are
watch.update(session)             # after `Session.read`
for family in watch.latest(): …
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpubpf import __version__, names
from gpubpf.exporter import gpu_time
from gpubpf.exporter.gpu_time import Measured
from gpubpf.exporter.metrics import OTHER, Family, label
from gpubpf.exporter.pods import Place, Pods
from gpubpf.exporter.top import TopCounters
from gpubpf.process import proc
from gpubpf.record import MutableRecord, Record, field

if TYPE_CHECKING:
    from gpubpf.records.results import KernelCount, ProcessCounts
    from gpubpf.session.session import Session

MOST_REASONS = 30
ENOUGH = 16  # measured launches that show the steps of a clock
OWNER_LABELS = ("process", "namespace", "pod", "container")
KERNEL_LABELS = ("kernel", *OWNER_LABELS)
UNKNOWN = "(unknown)"  # a kernel whose name is not known


class Owner(Record):
    """Whose launches are counted together. Many processes may have the same owner.

    process: the name of the process (comm).
    place: where it runs.
    """

    process: str
    place: Place

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(map(label, (self.process, self.place.namespace, self.place.pod, self.place.container)))


class Known(MutableRecord):
    """What was counted of a process at the last update.

    kernels: by mangled name: launches, measured launches, and their time in ns.
    reasons: launches that were not measured, by reason.
    step: every time of the GPU's clock that was read is a multiple of this, ns.
    timed: measured launches of all kernels.
    """

    owner: Owner
    kernels: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    hooks_ns: int = 0
    step: int = 0
    timed: int = 0


class Watch:
    """Counts of all processes since the start, in bounded memory.

    top: the number of kernels, and of owners, that have series of their own.
    budget: the most overhead, in per cent; None: no limit.
    place: return where a process runs, by its pid.
    """

    def __init__(
        self, top: int, budget: float | None = None, place: Callable[[int], Place] | None = None
    ) -> None:
        self._budget, self._place = budget, place or Pods().place
        self._kernels: TopCounters[tuple[str, Owner]] = TopCounters(top, 3)
        self._owners: TopCounters[Owner] = TopCounters(top, 1)
        self._reasons: TopCounters[str] = TopCounters(MOST_REASONS, 1)
        self._missed: TopCounters[str] = TopCounters(MOST_REASONS, 1)
        self._missed_before: dict[str, int] = {}
        self._known: dict[int, Known] = {}
        self._lost = self._hooks_ns = self._updates = 0
        self._processes = 0
        self._step = 0
        self._overhead: float | None = None
        self._over_budget = 0
        self.interval = 0.0  # seconds between the last two updates
        self._latest = list(self._families())

    # --- taking counts ---

    def see(self, session: Session) -> None:
        """Find out whose the new processes are, while they run."""
        for number, (pid, comm) in session.processes().items():
            if number not in self._known:
                self._known[number] = Known(Owner(comm, self._place(pid)))

    def update(self, session: Session) -> None:
        """Add what was counted since the last update, and forget processes that have ended."""
        self.see(session)
        times = gpu_time.measured(*session.instances_together(*gpu_time.MAPS))
        over = set()
        processes = session.by_process()
        mangled = {kernel.mangled for process in processes for kernel in process.kernels}
        short = {name.mangled: name.short for name in names.demangle_all(mangled)}
        for process in processes:
            self._known.setdefault(process.number, Known(Owner(process.comm, Place())))
            self._add(process, times, short)
            if process.over:
                over.add(process.number)
        steps = [known.step for known in self._known.values() if known.timed >= ENOUGH]
        self._step = max(steps, default=self._step)
        for number in over:
            del self._known[number]
        session.forget(over)
        self._processes = len(self._known)
        for reason, count in session.missed().items():
            self._missed.add(reason, [count - self._missed_before.get(reason, 0)], 1)
            self._missed_before[reason] = count
        for counters in (self._kernels, self._owners, self._reasons, self._missed):
            counters.rank()
        self._take_overhead(session.overhead())
        self._updates += 1
        self._latest = list(self._families())

    def _add(
        self, process: ProcessCounts, times: Mapping[tuple[int, str], Measured], short: Mapping[str, str]
    ) -> None:
        known = self._known[process.number]
        for kernel in process.kernels:
            measured = times.get((process.number, kernel.mangled), Measured())
            self._add_kernel(known, kernel, measured, short.get(kernel.mangled) or UNKNOWN)
        reasons = _summed(kernel.not_instrumented for kernel in process.kernels)
        for reason, count in reasons.items():
            more = count - known.reasons.get(reason, 0)
            if more > 0:
                self._reasons.add(reason, [more], more)
        known.reasons = {
            reason: max(count, known.reasons.get(reason, 0)) for reason, count in reasons.items()
        }
        self._lost += max(0, process.lost - known.lost)
        self._hooks_ns += max(0, process.hooks_ns - known.hooks_ns)
        known.lost, known.hooks_ns = max(known.lost, process.lost), max(known.hooks_ns, process.hooks_ns)

    def _add_kernel(self, known: Known, kernel: KernelCount, measured: Measured, name: str) -> None:
        """Add what is new of a kernel. A reading may have fewer launches than the last: then a launch was just moving to the sum."""
        before = known.kernels.get(kernel.mangled, (0, 0, 0))
        now = max(before[0], kernel.launches), *before[1:]
        if measured.launches >= before[1] and measured.ns >= before[2]:
            now = now[0], measured.launches, measured.ns
        known.kernels[kernel.mangled] = now
        known.step = math.gcd(known.step, measured.step)
        known.timed = known.timed + now[1] - before[1]
        launches, timed, ns = (new - old for new, old in zip(now, before, strict=True))
        if launches or timed or ns:
            self._kernels.add((name, known.owner), [launches, timed, ns / 1e9], launches)
            self._owners.add(known.owner, [launches], launches)

    def _take_overhead(self, budget: Mapping[str, Any] | None) -> None:
        kernels = budget["kernels"] if budget else ()
        shares = [
            (kernel["overhead_percent"] or 0.0) + (kernel["host_percent"] or 0.0)
            for kernel in kernels
            if kernel["overhead_percent"] is not None
        ]
        self._overhead = max(shares, default=None)
        self._over_budget = sum(kernel["held"] is False for kernel in kernels)

    # --- metrics ---

    def latest(self) -> list[Family]:
        """Return the metrics as of the last update, and what the exporter itself takes now. From any thread."""
        return [*self._latest, *self._own()]

    def _families(self) -> Iterator[Family]:
        kernels = [(_labels(key, KERNEL_LABELS), values) for key, values in self._kernels.series()]
        for at, name, about in (
            (0, "gpubpf_kernel_launches", "Launches of the kernel, measured or not."),
            (
                1,
                "gpubpf_kernel_measured_launches",
                "Launches of the kernel whose time on the GPU was measured.",
            ),
            (2, "gpubpf_kernel_measured_seconds", "Time on the GPU of the kernel's measured launches."),
        ):
            samples = [(labels, values[at]) for labels, values in kernels]
            yield Family(name, "counter", about, KERNEL_LABELS, samples)
        yield Family(
            "gpubpf_process_launches",
            "counter",
            "Launches of all kernels by processes of this name, in this container.",
            OWNER_LABELS,
            [(_labels(key, OWNER_LABELS), values[0]) for key, values in self._owners.series()],
        )
        yield _by_reason(
            "gpubpf_launches_not_measured", "Launches that ran without probes, by reason.", self._reasons
        )
        yield _by_reason(
            "gpubpf_processes_missed", "Processes that could not be measured, by reason.", self._missed
        )
        yield from self._measurement()

    def _own(self) -> Iterator[Family]:
        """Yield the metrics about the exporter's process."""
        memory = int(proc.text(os.getpid(), "statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        yield _single(
            "gpubpf_exporter_cpu_seconds", "counter", "CPU time of the exporter.", time.process_time()
        )
        yield _single("gpubpf_exporter_memory_bytes", "gauge", "Resident memory of the exporter.", memory)

    def _measurement(self) -> Iterator[Family]:
        """Yield the metrics about the measurement itself."""
        yield _single(
            "gpubpf_launches_lost",
            "counter",
            "Measured launches whose times were not read before their process ended; an upper bound.",
            self._lost,
        )
        yield _single("gpubpf_processes", "gauge", "Processes that are measured now.", self._processes)
        yield _single(
            "gpubpf_hook_seconds",
            "counter",
            "Time that hooks took in calls of programs.",
            self._hooks_ns / 1e9,
        )
        yield _single(
            "gpubpf_clock_error_seconds",
            "gauge",
            "Largest error of a launch's time, because the GPU's clock moves in steps.",
            self._step / 1e9,
        )
        yield _single("gpubpf_exporter_updates", "counter", "How often the counts were read.", self._updates)
        yield _single(
            "gpubpf_exporter_interval_seconds",
            "gauge",
            "Time between the last two readings of the counts. It grows if readings cost too much.",
            self.interval,
        )
        yield Family(
            "gpubpf_build_info", "gauge", "1; the label has the version.", ("version",), [((__version__,), 1)]
        )
        if self._budget is not None:
            yield _single(
                "gpubpf_budget_ratio", "gauge", "The most overhead that is allowed.", self._budget / 100
            )
            yield _single(
                "gpubpf_kernels_over_budget",
                "gauge",
                "Kernels whose overhead exceeds the budget, because they had too few launches.",
                self._over_budget,
            )
        if self._overhead is not None:
            yield _single(
                "gpubpf_overhead_ratio",
                "gauge",
                "Largest overhead of a kernel: added instructions, and time of hooks and readings.",
                self._overhead / 100,
            )


def _summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for key, count in part.items():
            total[key] = total.get(key, 0) + count
    return total


def _labels(key: Any, of: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of the labels `of` for a key of `TopCounters`; for the rest, OTHER."""
    if key is None:
        return (OTHER,) * len(of)
    if isinstance(key, Owner):
        return key.labels
    name, owner = key
    return label(name), *owner.labels


def _by_reason(name: str, about: str, counters: TopCounters[str]) -> Family:
    samples = [((OTHER if key is None else label(key),), values[0]) for key, values in counters.series()]
    return Family(name, "counter", about, ("reason",), samples)


def _single(name: str, kind: Any, about: str, value: float) -> Family:
    return Family(name, kind, about, (), [((), value)])
