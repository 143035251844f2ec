"""What threadhist's device program counted in each thread, by process, GPU, kernel and launch shape; threadhist's text output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf import names
from gpubpf.record import Record
from gpubpf.records.launch_shape import By, Ranges, Shape, shape_cells
from gpubpf.session.sampled import Estimate, Sample, kernel_of, rounded
from gpubpf.session.sampled import samples as sampled_units
from gpubpf.show import histogram, table
from gpubpf.show.owner_columns import MOST_SECTIONS, OwnerColumns
from gpubpf.threads import imbalance
from gpubpf.threads.imbalance import Groups

if TYPE_CHECKING:
    from gpubpf.ebpf.sampling import Sampling
    from gpubpf.records.results import Instance
    from gpubpf.session.session import Session

NO_THREAD = "no thread of this grid matches --block and --thread"
TITLE = 46  # maximum characters of a kernel's name in a title
SCREEN = 32  # more rows than this are shown as a histogram
OF_LOOPS = ("instructions", "loads", "atomics", "basic blocks")  # what a thread does while it waits in a loop


class ThreadCounts(Record):
    """The work of the threads of one kernel and launch shape in one interval. Without intervals, the whole run is one.

    runs, work  uint64 arrays with one element per thread of the grid
    selected    bool array of the threads that --block and --thread chose; None: all of them
    wanted      how many threads --block and --thread chose
    sampled     with sampling: the sample, and the estimate of all work of the threads that --block and --thread chose

    With sampling, `runs` and `work` are scaled to all launches, and `selected` leaves out threads that ran in no chosen block or
    warp.
    """

    instance: Instance
    shape: Shape
    launches: int
    runs: Any
    work: Any
    selected: Any
    wanted: int
    sampled: tuple[Sample, Estimate] | None = None

    @property
    def pid(self) -> int:
        return self.instance.pid

    @property
    def comm(self) -> str:
        return self.instance.comm

    @property
    def gpu(self) -> int:
        return self.instance.gpu

    @property
    def wave(self) -> int | None:
        return self.instance.wave

    @property
    def mangled(self) -> str:
        return self.instance.mangled

    @property
    def no_thread(self) -> bool:
        """Whether there is no thread to show: --block and --thread leave out all, or sampling chose none of them."""
        return self.selected is not None and not self.selected.any()

    @property
    def total_work(self) -> int:
        """The work of all threads that --block and --thread chose; with sampling, an estimate."""
        if self.sampled is not None:
            return int(self.sampled[1].value)
        return int((self.work if self.selected is None else self.work[self.selected]).sum())

    @property
    def total_runs(self) -> int:
        """The runs of all threads that --block and --thread chose; with sampling, one per thread and launch."""
        if self.sampled is not None:
            return self.launches * self.wanted
        return int((self.runs if self.selected is None else self.runs[self.selected]).sum())

    def sample_fields(self) -> dict[str, Any]:
        """Return a JSON record's fields about the sample; {} without sampling."""
        if self.sampled is None:
            return {}
        sample, total = self.sampled
        return {"sampled": sample.record(), "standard_error": {"work": rounded(total.error)}}

    @property
    def nothing(self) -> str:
        """Why there is no thread to show."""
        return (
            NO_THREAD if not self.wanted else f"sampling chose no {self.shape.word(self.unit)} of this grid"
        )

    @property
    def unit(self) -> By:
        """The unit that sampling chooses."""
        return self.sampled[0].sampling.unit if self.sampled is not None else "block"

    def grouped(self, by: By) -> Groups:
        """Return the counts of the selected threads, by thread, lane, warp or block."""
        return imbalance.group(self.shape, self.runs, self.work, by, self.selected)


class Reader:
    """Reads the maps `tallies` and `together`, and with sampling `groups`, which the device never resets.

    since_last: a read returns the increases since the last read.
    by_warp: the program uses `together`.
    runs_are_work: each run of a thread counts as one unit of work.
    """

    def __init__(
        self,
        block: Ranges,
        thread: Ranges,
        since_last: bool,
        sampling: Sampling | None = None,
        by_warp: bool = False,
        runs_are_work: bool = False,
    ) -> None:
        self._block, self._thread, self._since_last = block, thread, since_last
        self._by_warp = by_warp
        self._runs_are_work = runs_are_work
        self._sampling = sampling
        self._before: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
        self._sampled_before: dict[tuple[Any, ...], tuple[Sample, Any]] = {}

    def read(self, session: Session) -> list[ThreadCounts]:
        """Return the counts of each kernel and launch shape, most work first."""
        found = []
        chosen = sampled_units(session, self._sampling)
        groups = {kernel_of(one): one.array[:, 0] for one in session.instances("groups")} if chosen else {}
        warps = session.instances("together") if self._by_warp else ()
        together = {_place(one): one for one in warps}
        for instance in session.instances("tallies"):
            key = kernel_of(instance)
            launches, (runs, work) = instance.launches, _counts(instance, together)
            if self._runs_are_work:
                work = runs
            if self._since_last:
                was_launches, was_runs, was_work = self._before.get(key, (0, 0, 0))
                news = launches != was_launches, (runs != was_runs).any()
                # New launches are reported once one has ended. A later read includes runs without new launches.
                if not (any(news) if session.stopped else all(news)):
                    continue
                self._before[key] = launches, runs.copy(), work.copy()
                launches, runs, work = launches - was_launches, runs - was_runs, work - was_work
            if launches or runs.any():
                shape = instance.shape
                selected = shape.selection(self._block, self._thread)
                wanted = shape.threads if selected is None else int(selected.sum())
                sample = None
                if key in chosen and key in groups:
                    sample = self._estimated(key, chosen[key], groups[key])
                    measured = runs > 0 if selected is None else selected & (runs > 0)
                    selected = None if measured.all() else measured
                    runs, work = _scaled(launches, runs, work)
                found.append(ThreadCounts(instance, shape, launches, runs, work, selected, wanted, sample))
        return sorted(found, key=lambda counts: (-counts.total_work, counts.pid, counts.gpu))

    def _estimated(self, key: tuple[Any, ...], sample: Sample, groups: Any) -> tuple[Sample, Estimate]:
        """Return the sample and the estimate of all work; with `since_last`, those of the interval."""
        now = sample, groups
        if self._since_last:
            if key in self._sampled_before:
                before, were = self._sampled_before[key]
                sample, groups = sample.since(before), groups - were
            self._sampled_before[key] = now
        return sample, sample.total(groups)


def _place(instance: Instance) -> tuple[Any, ...]:
    """Return a key that the instances of all maps of one copy and launch shape share."""
    return instance.context, *kernel_of(instance)


def _counts(tallies: Instance, together: Mapping[tuple[Any, ...], Instance]) -> tuple[Any, Any]:
    """Return the runs and the work of each thread. `together` counts work that all lanes of a warp did together, once per warp."""
    own, shape = tallies.array[0], tallies.shape
    found = together.get(_place(tallies)) if together else None
    if found is None or not found.array["runs"].any():
        return own["runs"], own["work"]
    warps = found.array[0]

    def with_warps(field: str) -> Any:
        whole = np.repeat(warps[field].reshape(shape.blocks, shape.warps), shape.warp, axis=1)
        return own[field] + whole[:, : shape.block_size].reshape(-1)

    return with_warps("runs"), with_warps("work")


def _scaled(launches: int, runs: Any, work: Any) -> tuple[Any, Any]:
    """Extrapolate the runs and work of each thread from the measured launches to all. A thread that never ran keeps 0.

    In an interval, a thread may also have runs of launches that began before it."""
    every = np.where(runs > 0, np.maximum(runs, np.uint64(launches)), np.uint64(0))
    estimate = np.rint(work.astype(np.float64) * every / np.maximum(runs, 1)).astype(np.uint64)
    return every, np.where(runs == every, work, estimate)


class Account:
    """Compares how often threads ran with how often they should have, over all intervals. A launch may run into the next interval."""

    def __init__(self) -> None:
        self._sums: dict[
            tuple[Any, ...], tuple[str, int, int]
        ] = {}  # by kernel: its name, runs, and what was launched

    def add(self, kernels: Iterable[ThreadCounts]) -> None:
        """Add what was counted in an interval."""
        for counts in kernels:
            key = kernel_of(counts.instance)
            name, runs, launched = self._sums.get(key, (counts.instance.kernel, 0, 0))
            self._sums[key] = name, runs + counts.total_runs, launched + counts.launches * counts.wanted

    def notices(self) -> Iterator[str]:
        """Yield a notice for each kernel and shape whose threads ran more or less often than its launches made them run."""
        for name, runs, launched in self._sums.values():
            if runs != launched:
                what = f"{runs:,} runs of threads were counted, but {launched:,} launched"
                why = "; kernels may have launched it, too" if runs > launched else ""
                yield f"{name}: {what}{why}; the rows of this kernel are not exact"


# --- text ---


def lines(
    kernels: Sequence[ThreadCounts], what: str, by: By, top: int | None, owners: OwnerColumns, verbose: bool
) -> Iterator[str]:
    """Yield the text report: for each kernel and launch shape its findings, then a row per thread, or a histogram if there are many.

    With several processes or GPUs, a table of all kernels comes first. With several processes, only the busiest kernels then get
    sections, unless `verbose`.

    what: the unit of work.
    """
    mangled = [counts.instance.mangled for counts in kernels]
    labels = names.labels(mangled)
    titles = names.labels(mangled, None if verbose else TITLE, full=verbose)
    owners.see(kernels)
    shown = kernels if verbose or not owners.processes else kernels[:MOST_SECTIONS]
    if owners.several and len(kernels) > 1:
        yield f"{what} per {by}, by {'process' if owners.processes else 'GPU'}"
        yield ""
        yield from _overview(kernels, by, labels, owners)
        if len(kernels) > len(shown):
            yield f"details of the {len(shown)} with the most {what}; -v shows all"
        yield ""
    for counts in shown:
        yield from _section(counts, titles[counts.instance.mangled], what, by, top, owners, verbose)


def _overview(
    kernels: Sequence[ThreadCounts], by: By, labels: Mapping[str, str], owners: OwnerColumns
) -> list[str]:
    rows = []
    keys = [(owners.cells(counts), counts.instance.mangled) for counts in kernels]
    shapes = shape_cells(keys, [counts.shape for counts in kernels])
    for counts, shape in zip(kernels, shapes, strict=True):
        groups = counts.grouped(by)
        row = owners.cells(counts) | {"KERNEL": labels[counts.instance.mangled]} | shape
        row |= {"LAUNCHES": f"{counts.launches:,}", f"{by.upper()}S": f"{len(groups):,}"}
        row |= {"WORK": _in_full(counts.total_work), "IMBALANCE": f"{groups.imbalance:.2f}"}
        rows.append(row)
    return table.cut_first(rows, ("COMM", "KERNEL"), ("KERNEL", "COMM"), (f"{by.upper()}S", "LAUNCHES"))


def _in_full(number: int) -> str:
    """Return a number with all digits if they fit in a column, otherwise with three digits and a unit."""
    return f"{number:,}" if number < 10**14 else table.number(number)


def _mean(number: float, what: str) -> str:
    """Return a mean and the unit of work. One digit after the point, none if it is whole, two significant digits below 1."""
    text = f"{number:,.0f}" if number == int(number) else f"{number:,.1f}" if number > 1 else f"{number:.2g}"
    return imbalance.counted(1, what) if text == "1" else f"{text} {what}"


def _section(
    counts: ThreadCounts, title: str, what: str, by: By, top: int | None, owners: OwnerColumns, verbose: bool
) -> Iterator[str]:
    instance, shape = counts.instance, counts.shape
    threads, groups = counts.grouped("thread"), counts.grouped(by)
    grid, block_dim = (" x ".join(map(str, extents)) for extents in (shape.grid, shape.block_dim))
    selected = "selected " if counts.wanted < shape.threads else ""
    yield f"{title}: {what} per {counts.shape.word(by)}"
    if counts.no_thread:
        yield from table.wrap(f"grid {grid}, block {block_dim}; {owners.name(instance)}", indent=2)
        yield from (f"  {counts.nothing}", "")
        return
    said = [
        f"grid {grid}, block {block_dim}; {owners.name(instance)}",
        f"{table.count(counts.launches, 'launch')}, {table.count(counts.wanted, f'{selected}thread')}",
        *_of_sample(counts, len(threads), what),
        *imbalance.findings(groups, what, sampled=counts.sampled is not None),
    ]
    if groups.mean:
        if instance.waits and what in OF_LOOPS and imbalance.is_uneven(groups):
            said.append(f"blocks may wait for each other in loops; those {what} count as work")
        mean = f"mean {_mean(groups.mean, what)} per {counts.shape.word(by)}"
        said.append(f"imbalance {groups.imbalance:.2f} (max / mean); {mean}")
    said += [
        *(imbalance.idle_findings(shape, counts.work) if counts.selected is None else ()),
    ]
    if verbose and instance.registers_after is not None:
        spilled = f", {table.size(instance.spilled)} spilled" if instance.spilled else ""
        said.append(
            f"registers: {instance.registers_before} as built, {instance.registers_after} with the probe{spilled}"
        )
    for sentence in said:
        yield from table.wrap(sentence, indent=2)
    yield ""
    if not groups.mean:
        return
    if len(groups) > SCREEN:
        yield from histogram.lines(histogram.log2_slots(groups.work), what, f"{counts.shape.word(by)}s")
        yield ""
    if top is not None:
        spans = [(place, place) for place in groups.largest(top)]
    elif len(groups) > SCREEN:  # show the largest and the smallest
        ends = sorted({groups.work.argmax(), groups.work.argmin()}, key=lambda at: -int(groups.work[at]))
        spans = [(place, place) for place in ends]
    else:
        spans = groups.alike()
    yield from _rows(groups, spans, what, owners.cells(instance))
    yield ""


def _of_sample(counts: ThreadCounts, threads: int, what: str) -> list[str]:
    """Return sentences about the sample: its size, the estimate of all work, and what the rows leave out."""
    if counts.sampled is None:
        return []
    sample, total = counts.sampled
    word, left_out = counts.shape.word(counts.unit), counts.wanted - threads
    missing = (
        f"left out below: {table.count(left_out, 'thread')} without a sampled {word}" if left_out else ""
    )
    return [sample.sentence(word), f"about {total.text(what)}", *([missing] if missing else [])]


def _rows(groups: Groups, spans: Sequence[tuple[int, int]], what: str, owner: dict[str, str]) -> list[str]:
    """Return a row for each span of equal groups: first and last number, runs and work of each group, work per mean with a bar."""
    rows: list[dict[str, object]] = []
    for place, last in spans:
        work = int(groups.work[place])
        row: dict[str, object] = {**owner, **groups.labels(place)}
        if last != place:
            row[groups.by.upper()] = f"{row[groups.by.upper()]}-{groups.labels(last)[groups.by.upper()]}"
        row |= {} if groups.by == "thread" else {"THREADS": groups.threads[place]}
        row |= {"RUNS": groups.runs[place], f"WORK ({what})": f"{work:,}"}
        rows.append(row | {"OF MEAN": f"{100 * work / groups.mean:.0f} %" if groups.mean else "-"})
    if not rows:
        return []
    made = table.cut_first(rows, ("COMM",), ("COMM",), ("THREADS", "RUNS"))
    return table.with_bars(made, [float(groups.work[place]) for place, _ in spans], float(groups.work.max()))
