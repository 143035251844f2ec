"""What threadhist's program counted in each thread, by process, GPU, kernel and launch shape; and what it says of that to people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf import names
from gpubpf.session.launch_shape import By, Ranges, Shape, shape_cells
from gpubpf.show import histogram, table
from gpubpf.show.bulk_text import CHUNK, records
from gpubpf.show.owner_columns import MOST_SECTIONS, Whose
from gpubpf.threads import imbalance
from gpubpf.threads.imbalance import Groups

if TYPE_CHECKING:
    from gpubpf.session.results import Instance
    from gpubpf.session.session import Session
    from gpubpf.show.cli import Output

SCREEN = 32  # more threads than this are shown as a histogram


@dataclass(frozen=True)
class Tally:
    """What the threads of one kernel and launch shape did in one interval; all of the run is one interval by default. `runs` and
    `work` are arrays with an element for each thread of the grid; `selected`: which of them --block and --thread chose, None: all."""

    instance: Instance
    shape: Shape
    launches: int
    runs: Any
    work: Any
    selected: Any

    @property
    def pid(self) -> int:
        return self.instance.pid

    @property
    def comm(self) -> str:
        return self.instance.comm

    @property
    def gpu(self) -> int:
        return self.instance.gpu


class Tallies:
    """Reads the map `tallies`. Counts on the device only grow; `anew`: what is given is what came since the last time."""

    def __init__(self, block: Ranges, thread: Ranges, anew: bool) -> None:
        self._block, self._thread, self._anew = block, thread, anew
        self._before: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}

    def read(self, session: Session) -> list[Tally]:
        """The busiest kernel first."""
        found = []
        for instance in session.instances("tallies"):
            key = (instance.pid, instance.gpu, instance.mangled, instance.grid, instance.block_dim)
            launches, runs, work = instance.launches, instance.array[0]["runs"], instance.array[0]["work"]
            if self._anew:
                was_launches, was_runs, was_work = self._before.get(key, (0, 0, 0))
                self._before[key] = launches, runs.copy(), work.copy()
                launches, runs, work = launches - was_launches, runs - was_runs, work - was_work
            if launches:
                shape = Shape(instance.grid, instance.block_dim)
                selected = shape.selection(self._block, self._thread)
                found.append(Tally(instance, shape, launches, runs, work, selected))
        return sorted(found, key=lambda tally: (-int(tally.work.sum()), tally.pid, tally.gpu))


def lines(
    tallies: Sequence[Tally], what: str, by: By, top: int | None, whose: Whose, verbose: bool
) -> Iterator[str]:
    """Per kernel and launch shape: what is uneven, then a row for each thread, or a histogram where these are many. Of several
    processes or GPUs first a table of all kernels, then the busiest of them one by one."""
    labels = names.labels(tally.instance.mangled for tally in tallies)
    whose.see(tallies)
    shown = tallies if verbose or not whose.processes else tallies[:MOST_SECTIONS]
    if whose.several and len(tallies) > 1:
        yield f"{what} per {by}, by {'process' if whose.processes else 'GPU'}"
        yield ""
        yield from _overview(tallies, what, by, labels, whose)
        if len(tallies) > len(shown):
            yield f"the {len(shown)} with the most {what} one by one; -v shows the others, too"
        yield ""
    for tally in shown:
        yield from _section(tally, labels[tally.instance.mangled], what, by, top, whose, verbose)


def _overview(tallies: Sequence[Tally], what: str, by: By, labels: Any, whose: Whose) -> list[str]:
    rows = []
    shapes = shape_cells([(whose.cells(t), t.instance.mangled) for t in tallies], [t.shape for t in tallies])
    for tally, shape in zip(tallies, shapes, strict=True):
        groups = imbalance.group(tally.shape, tally.runs, tally.work, by, tally.selected)
        row = whose.cells(tally) | {"KERNEL": labels[tally.instance.mangled]} | shape
        row |= {"LAUNCHES": f"{tally.launches:,}", f"{by.upper()}S": f"{len(groups):,}"}
        row |= {"WORK": _whole(int(groups.work.sum())), "IMBALANCE": f"{groups.imbalance:.2f}"}
        rows.append(row)
    return table.within(rows, left=("COMM", "KERNEL"))


def _whole(number: int) -> str:
    """In full, where that is short enough for a column."""
    return f"{number:,}" if number < 10**14 else table.number(number)


def _section(
    tally: Tally, label: str, what: str, by: By, top: int | None, whose: Whose, verbose: bool
) -> Iterator[str]:
    instance, shape = tally.instance, tally.shape
    threads = imbalance.group(shape, tally.runs, tally.work, "thread", tally.selected)
    groups = imbalance.group(shape, tally.runs, tally.work, by, tally.selected)
    grid, block_dim = (" x ".join(map(str, extents)) for extents in (shape.grid, shape.block_dim))
    yield f"{instance.demangled if verbose else table.fit(label, 46)}: {what} per {by}"
    said = [
        f"grid {grid}, block {block_dim}; {whose.name(instance)}",
        f"{table.count(tally.launches, 'launch')}, {table.count(len(threads), 'thread')}"
        + (" chosen" if tally.selected is not None else ""),
        *imbalance.findings(threads, what),
        f"imbalance {groups.imbalance:.2f} (most / mean), mean {groups.mean:,.1f} {what} per {by}",
        *(imbalance.idle_findings(shape, tally.work) if tally.selected is None else ()),
    ]
    if verbose and instance.registers_after is not None:
        said.append(
            f"registers: {instance.registers_before} as built, {instance.registers_after} with the probe"
        )
    for sentence in said:
        yield from table.wrap(sentence, indent=2)
    yield ""
    order: Any = groups.largest(top)
    if len(groups) > SCREEN:
        yield from histogram.lines(histogram.log2_slots(groups.work), what, f"{by}s")
        yield ""
        if top is None:  # the extremes
            order = sorted({groups.work.argmax(), groups.work.argmin()}, key=lambda at: -int(groups.work[at]))
    yield from _rows(groups, order, what, whose.cells(instance))
    yield ""


def _rows(groups: Groups, order: Any, what: str, whose: dict[str, str]) -> list[str]:
    """One row for each place in `order`: who, runs, work, its share of the mean with a bar."""
    rows: list[dict[str, object]] = []
    for place in order:
        work = int(groups.work[place])
        row: dict[str, object] = {**whose, **groups.labels(place)}
        row |= {} if groups.by == "thread" else {"THREADS": groups.threads[place]}
        row |= {"RUNS": groups.runs[place], f"WORK ({what})": work}
        rows.append(row | {"OF MEAN": f"{100 * work / groups.mean:.0f} %" if groups.mean else "-"})
    if not rows:
        return []
    made = table.within(rows, left=("COMM",), cut=("COMM",))
    return table.with_bars(made, [float(groups.work[place]) for place in order], float(groups.work.max()))


def write_threads(out: Output, threads: Groups, order: np.ndarray, texts: Sequence[str]) -> None:
    """Block x, y, z, thread x, y, z, runs and work of each thread in `order`, with the nine `texts` around them."""
    around = [text.encode() for text in texts]
    for begin in range(0, len(order), CHUNK):
        places = order[begin : begin + CHUNK]
        numbers = (
            *threads.shape.coordinates(threads.numbers[places]),
            threads.runs[places],
            threads.work[places],
        )
        parts = [part for pair in zip(around, (*numbers, b""), strict=True) for part in pair]
        out.write(records(parts))
