"""Sum what each process did on each GPU in an interval, for gputop. Memory depends on the number of rows, not of launches.

usage = Usage()
usage.begin(session.began_ns())          # or not, for a command
usage.know(process)                      # each traced process, whenever its log was read
usage.add(view, end_ns)                  # any number of times
interval = usage.close(end_ns, memory.on_gpus())

A GPU is busy while at least one kernel runs: kernels that overlap count once. A kernel that runs at the end of an interval counts
until then, and in the next interval from then on. `known_until` returns an end until which times are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf.agent.definitions import Kind, Vendor
from gpubpf.launches import arrays
from gpubpf.launches.dependencies import NEVER, NONE
from gpubpf.launches.overlap import COPIES, MOST, clipped, length, merged
from gpubpf.process import proc
from gpubpf.record import MutableRecord, Record, field
from gpubpf.records.launch_shape import wave_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpubpf.gpus.devices import GpuDevice
    from gpubpf.launches.latency import LaunchView
    from gpubpf.launches.launches import LoggedProcess

    Integers: TypeAlias = NDArray[np.int64]

GRAPH = ""  # stands for the mangled name where the kernels of a graph were not timed, but the whole graph was
_Key: TypeAlias = tuple[int, int]  # number of the process, GPU


class KernelUse(MutableRecord):
    """The launches of a kernel in an interval.

    mangled: its name; GRAPH: graphs as a whole.
    gpu_ns: time in which each launch ran in the interval, summed over the launches.
    launches: launches that were called in the interval; GRAPH: graphs that were timed.
    """

    mangled: str
    gpu_ns: int = 0
    launches: int = 0


class Use(MutableRecord):
    """What a process did on one GPU in an interval.

    wave: lanes of a wave on an AMD GPU, else None.
    interval_ns: the length of the interval.
    busy_ns: time in which at least one of its kernels ran; None: it launched kernels, but no time of a kernel is known.
    launches, copies: how many were called. copies_bytes: what the copies move; copies within host memory do not count.
    running: kernels that ran at the end of the interval.
    waits, wait_ns: calls that waited for the GPU and returned in the interval; their time, summed over threads.
    memory_bytes: GPU memory that was held at the end of the interval, as far as the allocations were seen.
    memory_complete: all were seen; False if the process may have allocated memory before the attach.
    ended: the process has ended.
    kernels: the kernel with the most GPU time first.
    """

    process: int
    pid: int
    comm: str
    gpu: int
    vendor: Vendor
    wave: int | None
    interval_ns: int = 0
    busy_ns: int | None = 0
    launches: int = 0
    running: int = 0
    copies: int = 0
    copies_bytes: int = 0
    waits: int = 0
    wait_ns: int = 0
    memory_bytes: int = 0
    memory_complete: bool = True
    ended: bool = False
    kernels: list[KernelUse] = field(default_factory=list)

    @property
    def share(self) -> float | None:
        """The share of the interval in which at least one kernel ran, from 0 to 1; None: not known."""
        return share_of(self.busy_ns, self.interval_ns)


class GpuUse(Record):
    """One GPU in an interval. busy_ns: time in which at least one kernel of any measured process ran; None: not known."""

    vendor: Vendor
    gpu: int
    interval_ns: int
    busy_ns: int | None
    processes: int

    @property
    def share(self) -> float | None:
        """The share of the interval in which at least one kernel ran, from 0 to 1; None: not known."""
        return share_of(self.busy_ns, self.interval_ns)


class Interval(Record):
    """An interval.

    late_ns: GPU time in earlier intervals that became known only now, and is in none of them.
    devices: the GPUs, as their drivers describe them.
    """

    begin_ns: int
    end_ns: int
    processes: tuple[Use, ...]
    gpus: tuple[GpuUse, ...]
    late_ns: int
    devices: tuple[GpuDevice, ...] = ()

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.begin_ns


def share_of(busy_ns: int | None, interval_ns: int) -> float | None:
    """Return a share from 0 to 1; None if the time is not known."""
    if busy_ns is None:
        return None
    return min(busy_ns / interval_ns, 1.0) if interval_ns > 0 else 0.0


class _Open(MutableRecord):
    """A process on a GPU in the current interval.

    spans: when kernels ran, int64 [n, 2], disjoint and in order.
    summed_ns: time of earlier spans, which were too many to keep.
    timed, queued: launches with known times, and those that had not started at the end of the interval.
    """

    use: Use
    kernels: dict[str, KernelUse] = field(default_factory=dict)
    spans: Integers = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    summed_ns: int = 0
    timed: int = 0
    queued: int = 0

    def kernel(self, mangled: str) -> KernelUse:
        return self.kernels.setdefault(mangled, KernelUse(mangled))

    def ran(self, spans: Integers) -> None:
        """Add times in which kernels ran."""
        self.spans = merged(self.spans, spans)
        if len(self.spans) > MOST:
            half = len(self.spans) // 2
            self.summed_ns += length(self.spans[:half])
            self.spans = self.spans[half:]


class Usage:
    """The current interval, and what later ones need of earlier ones.

    graphs: also count the times of graphs whose kernels were not timed. False if the user asked for some kernels only.
    """

    def __init__(self, graphs: bool = True) -> None:
        self._graphs = graphs
        self._begin: int | None = None
        self._first = NONE  # when the first interval began
        self._known: dict[int, LoggedProcess] = {}
        self._open: dict[_Key, _Open] = {}
        self._seen = np.zeros(0, np.int64)  # sorted ids of the operations that were counted
        self._timed = np.zeros(0, np.int64)  # sorted ids of the launches whose whole time was counted
        self._until: dict[
            int, int
        ] = {}  # by id of a launch whose end was not certain: until when it was counted
        self._late_ns = 0
        self._latest = 0
        self._view: LaunchView | None = None  # the last one

    def begin(self, begin_ns: int) -> None:
        """Begin the first interval. What was before does not count. Without this call, it begins with the first call in a log."""
        self._begin = self._first = begin_ns

    def know(self, process: LoggedProcess) -> None:
        """Record a traced process, so that it has a row even while it does nothing."""
        self._known[process.number] = process

    def known_until(self, now_ns: int) -> int:
        """Return the time until which the times of kernels are known: when the first of the latest readings began, or else `now_ns`.

        A process that has answered no request for a reading in this interval does not count."""
        begin = self._begin or 0
        taken = [min(one.taken_ns.values(), default=0) for one in self._known.values() if not one.ended]
        return min((one for one in taken if begin < one < now_ns), default=now_ns)

    def add(self, view: LaunchView, end_ns: int) -> None:
        """Add what is new in the operations that are known now.

        end_ns: see `known_until`. What happened later is for later intervals. The virtual clock has no such limit.
        """
        columns, ops = view.columns, view.ops
        virtual = any(process.virtual for process in columns.processes)
        end = NEVER if virtual else end_ns
        if self._begin is None and columns.origin != NEVER:
            self._begin = columns.origin
        new = ~arrays.among(ops.id, self._seen) & (ops.ret <= end)
        self._count(view, np.flatnonzero(new & (ops.ret >= self._first)))
        self._seen = arrays.distinct(
            np.append(self._seen[arrays.among(self._seen, arrays.distinct(ops.id))], ops.id[new])
        )
        self._time(view, end)

    def _count(self, view: LaunchView, new: Integers) -> None:
        """Count launches, copies and waits."""
        columns, ops = view.columns, view.ops
        waits = (ops.kind == Kind.SYNC) | ops.waits
        copies = np.isin(ops.kind, COPIES)
        launched = columns.wanted
        for key, some in self._by_owner(view, new[(waits | copies | launched)[new]]):
            use = self._of(view, key, int(some[0])).use
            took = ops.ret[some] - ops.call[some]
            use.launches += int(launched[some].sum())
            use.copies += int(copies[some].sum())
            use.copies_bytes += int(columns.bytes[some[copies[some]]].sum())
            use.waits += int(waits[some].sum())
            use.wait_ns += int(took[waits[some]].sum())
            for mangled, mine in self._by_name(view, some[launched[some]]):
                self._of(view, key, int(some[0])).kernel(mangled).launches += len(mine)
            if view.columns.processes[int(columns.process[some[0]])].virtual:
                self._latest = max(self._latest, int(ops.ret[some].max()))

    def _time(self, view: LaunchView, end: int) -> None:
        """Add the times of launches that have ended by `end`."""
        columns, ops = view.columns, view.ops
        begin = self._begin or 0
        chosen = self._launches(view)
        ended = chosen[(ops.start[chosen] != NONE) & (ops.end[chosen] != NONE) & (ops.end[chosen] <= end)]
        self._timed = self._timed[arrays.among(self._timed, arrays.distinct(ops.id))]
        ended = ended[~arrays.among(ops.id[ended], self._timed)]
        self._timed = arrays.distinct(np.append(self._timed, ops.id[ended]))
        for key, some in self._by_owner(view, ended):
            one = self._of(view, key, int(some[0]))
            starts, ends = ops.start[some], np.maximum(ops.end[some], ops.start[some])
            counted = np.maximum(starts, self._first)
            if self._until:
                before = np.array([self._until.pop(number, NONE) for number in ops.id[some].tolist()])
                counted = np.maximum(counted, before)
            self._late_ns += int(np.maximum(np.minimum(ends, begin) - counted, 0).sum())
            inside = np.stack([np.maximum(starts, begin), ends], axis=1)
            one.timed += len(some)
            one.ran(clipped(inside, begin))
            lasted = np.maximum(inside[:, 1] - inside[:, 0], 0)
            for mangled, mine in self._by_name(view, some, np.arange(len(some))):
                one.kernel(mangled).gpu_ns += int(lasted[mine].sum())
                one.kernel(mangled).launches += len(mine) if mangled == GRAPH else 0
            if columns.processes[int(columns.process[some[0]])].virtual:
                self._latest = max(self._latest, int(ends.max()))
        self._view = view

    def close(self, end_ns: int, memory: Mapping[_Key, int]) -> Interval:
        """End the interval, and return it. Call `add` before.

        end_ns: see `add`; on the virtual clock, a later time in the operations counts instead.
        memory: GPU memory that is held, by process and GPU.
        """
        begin = self._begin if self._begin is not None else end_ns
        end = max(end_ns, self._latest, begin)
        if self._view:
            self._run_on(self._view, begin, end)
        for number, process in self._known.items():
            for gpu in {*process.gpus.values(), *(gpu for of, gpu in memory if of == number)}:
                self._open.setdefault((number, gpu), _Open(_use(process, gpu)))
        uses: list[Use] = []
        spans: dict[tuple[Vendor, int], tuple[int, Integers]] = {}  # by GPU
        unknown: set[tuple[Vendor, int]] = set()
        for (number, gpu), one in self._open.items():
            use, of = one.use, (one.use.vendor, gpu)
            use.interval_ns = end - begin
            known = one.timed or one.queued or not use.launches
            use.busy_ns = min(one.summed_ns + length(clipped(one.spans, begin, end)), end - begin)
            if not known:
                use.busy_ns = None
                unknown.add(of)
            use.memory_bytes = memory.get((number, gpu), 0)
            use.kernels = sorted(
                (one for one in one.kernels.values() if one.gpu_ns or one.launches),
                key=lambda one: (-one.gpu_ns, -one.launches, one.mangled),
            )
            if number in self._known:
                process = self._known[number]
                use.comm, use.memory_complete = process.comm, not process.from_before
                # The log of a process is also over when the measurement is.
                use.ended = process.ended and not proc.exists(process.pid)
            uses.append(use)
            summed, before = spans.get(of, (0, np.zeros((0, 2), np.int64)))
            spans[of] = max(summed, one.summed_ns), merged(before, clipped(one.spans, begin, end))
        gpus = [
            GpuUse(
                *of,
                end - begin,
                None if of in unknown and not len(ran) else min(summed + length(ran), end - begin),
                sum((use.vendor, use.gpu) == of for use in uses),
            )
            for of, (summed, ran) in sorted(spans.items(), key=lambda item: (item[0][0].word, item[0][1]))
        ]
        late, self._late_ns = self._late_ns, 0
        self._open.clear()
        self._begin = end
        for number in [number for number, process in self._known.items() if process.ended]:
            del self._known[number]
        ordered = sorted(uses, key=lambda use: (-(use.busy_ns or 0), -use.launches, use.pid, use.gpu))
        return Interval(begin, end, tuple(ordered), tuple(gpus), late)

    def _run_on(self, view: LaunchView, begin: int, end: int) -> None:
        """Count launches that have not ended by the end of the interval, or whose end is not certain.

        They count until the end that they are likely to have, or else until that of the interval.
        """
        columns, ops = view.columns, view.ops
        chosen = self._launches(view)
        later = (ops.end != NONE) & (ops.end > end)
        chosen = chosen[(columns.running | later)[chosen]]
        started = (ops.start != NONE) & (ops.start < end)
        for key, some in self._by_owner(view, chosen[~started[chosen]]):
            self._of(view, key, int(some[0])).queued += len(some)
        begun = chosen[(started & ((ops.end == NONE) | later))[chosen]]
        ended = (columns.likely_end != NONE) & (columns.likely_end <= end)
        stops = np.where(ended, np.maximum(columns.likely_end, ops.start), end)
        for key, some in self._by_owner(view, begun):
            one = self._of(view, key, int(some[0]))
            one.timed += len(some)
            one.use.running += int((~ended[some]).sum())
            one.ran(clipped(np.stack([ops.start[some], stops[some]], axis=1), begin))
            for mangled, mine in self._by_name(view, some):
                starts = np.maximum(ops.start[mine], begin)
                one.kernel(mangled).gpu_ns += int(np.maximum(stops[mine] - starts, 0).sum())
        self._until = dict(zip(ops.id[begun].tolist(), stops[begun].tolist(), strict=True))

    def _launches(self, view: LaunchView) -> Integers:
        """Return the launches that may have times: kernels that the user asked for, and graphs that were timed as a whole."""
        graphs = np.array(sorted(view.opaque_graphs) if self._graphs else (), np.int64)
        return np.concatenate([np.flatnonzero(view.columns.wanted), graphs])

    def _by_owner(self, view: LaunchView, some: Integers) -> list[tuple[_Key, Integers]]:
        """Return operations by process and GPU."""
        columns = view.columns
        numbers = arrays.row_numbers(columns.process[some], columns.gpu[some])
        order = np.argsort(numbers, kind="stable")
        found = []
        for place in arrays.equal_runs(numbers[order]):
            mine = some[order[place]]
            at = int(mine[0])
            found.append(((columns.processes[int(columns.process[at])].number, int(columns.gpu[at])), mine))
        return found

    def _by_name(
        self, view: LaunchView, some: Integers, instead: Integers | None = None
    ) -> list[tuple[str, Any]]:
        """Return operations by mangled name. instead: numbers to return instead of their indices."""
        names = np.where(view.ops.kind[some] == Kind.KERNEL, view.columns.name[some], -1)
        order = np.argsort(names, kind="stable")
        values = some if instead is None else instead
        return [
            (view.columns.names[name] if (name := int(names[order[place.start]])) >= 0 else GRAPH, values[order[place]])
            for place in arrays.equal_runs(names[order])
        ]  # fmt: skip

    def _of(self, view: LaunchView, key: _Key, at: int) -> _Open:
        if key not in self._open:
            process = view.columns.processes[int(view.columns.process[at])]
            self._open[key] = _Open(_use(process, key[1]))
        return self._open[key]


def _use(process: LoggedProcess, gpu: int) -> Use:
    """Return the empty row of a process on a GPU."""
    wave = wave_of(process.waves, gpu) if process.vendor == Vendor.AMD else None
    return Use(process.number, process.pid, process.comm, gpu, process.vendor, wave)
