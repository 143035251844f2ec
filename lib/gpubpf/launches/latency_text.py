"""What launches waited for, for people: findings, tables, stories. A number that is not known is "-"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf.launches import dependencies
from gpubpf.launches.dependencies import NONE, Kind
from gpubpf.launches.latency import SPLIT, View, known
from gpubpf.launches.sums import Tally
from gpubpf.show import histogram as hist
from gpubpf.show import table
from gpubpf.show.owner_columns import Whose
from gpubpf.show.table import us, with_unit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpubpf.launches.sums import Group, Sums

    Integers: TypeAlias = NDArray[np.int64]

TITLES = {"h2d": "H->D", "d2h": "D->H", "d2d": "D->D", "h2h": "H->H", "memset": "memset"}
STACKS = 10  # that are shown
NAME = 40  # columns of a name in a sentence
MOST_WAITS = 12  # sentences on what kernels of several processes waited behind


def title(name: str) -> str:
    """Of a kernel or a copy, in a sentence."""
    return TITLES.get(name, table.fit(name, NAME))


def at_least(ns: int | None, error: int | None) -> str:
    """A time, unless it is less than it may be wrong: then ``<`` and the error."""
    return f"<{us(error)}" if ns is not None and error and abs(ns) < error else us(ns)


def finding(sums: Sums) -> Iterator[str]:
    """Where the time of all of them went."""
    parts = {name: sums.whole[name] for name in SPLIT}
    total = sum(parts.values())
    if total <= 0:
        return
    words = {"wait": "behind earlier work", "api": "in the launch call", "overhead": "on the way to the GPU"}
    order = sorted(("api", "wait", "overhead"), key=lambda name: -parts[name])
    said = ", ".join(f"{round(100 * parts[name] / total)} % {words[name]}" for name in order)
    yield from table.wrap(
        f"{table.count(sums.whole['count'], 'launch')} took {with_unit(total)} to start, in all: {said}"
    )


def kernel_table(sums: Sums, by_stream: bool, whose: Whose | None = None) -> list[str]:
    """One line for each group: how many, how long from call to start, what that was, how long they ran."""
    if whose is not None and whose.several:
        return _table_of_all(sums, by_stream, whose)
    width = 8 if by_stream else 16
    stream = " STREAM " if by_stream else ""
    titles = ("P50", "P99", "MAX", "API", "WAIT", "OVERHEAD", "EXEC")
    lines = [f"{'':23}{'latency, us':>24}{'what of it, mean us':>25}"]
    lines.append(f"{'KERNEL':<{width}}{stream}{'COUNT':>7}" + _cells(titles))
    for group in sums.groups:
        place = f" {group.stream:<7}" if by_stream else ""
        cells = list(_group_cells(group).values())
        lines.append(f"{table.fit(group.title, width):<{width}}{place}{len(group):>7}" + _cells(cells))
    return lines


def _table_of_all(sums: Sums, by_stream: bool, whose: Whose) -> list[str]:
    """The same of several processes or GPUs, whose columns leave less room."""
    rows = []
    for group in sums.groups:
        row = whose.cells(group) | {"KERNEL": table.fit(group.title, 20)}
        row |= {"STREAM": group.stream or "-"} if by_stream else {}
        rows.append(row | {"COUNT": str(len(group))} | _group_cells(group))
    drop = ("MAX", *(("API",) if by_stream or whose.gpus else ()))
    return [
        "latency and what of it (means), us",
        *table.within(rows, left=("COMM", "KERNEL", "STREAM"), drop=drop, gap=1),
    ]


def _group_cells(group: Group) -> dict[str, str]:
    error = group.clock_error
    latency = group.times["latency"].distribution() or {}
    cells = {p.upper(): at_least(latency.get(p), error) for p in ("p50", "p99", "max")}
    for what in (*SPLIT, "exec"):
        mean = (group.times[what].distribution() or {}).get("mean")
        cells[what.upper()] = at_least(mean, error) if what == "overhead" else us(mean)
    return cells


def _cells(cells: Sequence[str]) -> str:
    """The times of a table's line: the last but one is OVERHEAD."""
    return "".join(f"{cell:>{9 if n == len(cells) - 2 else 8}}" for n, cell in enumerate(cells))


def stream_name(label: str) -> str:
    """In a sentence."""
    return {"default": "default stream", "thread": "a thread's default stream"}.get(label, f"stream {label}")


def wait_lines(sums: Sums, whose: Whose | None = None) -> Iterator[str]:
    """Behind what each kernel waited most. Of several processes only the longest waits."""
    said = [(group, *waited) for group in sums.groups for waited in group.waited_for()[:2]]
    most = len(said)
    if whose is not None and whose.processes:
        most = MOST_WAITS
        said.sort(key=lambda one: -one[-1])
    for group, waited, count, total in said[:most]:
        how = " through an event" if waited["kind"] == "event" else ""
        what = waited.get("of", waited["kind"])
        behind = f"{title(waited['name'])}{' copies' if what == 'copy' else ''}"
        where = [stream_name(group.stream)] if group.stream else []
        if whose is not None and "kernel" in group.fields:
            where += [f"pid {group.pid}"] if whose.processes else []
            where += [f"GPU {group.gpu}"] if whose.gpus else []
        who = table.fit(group.title, NAME) + (f" ({', '.join(where)})" if where else "")
        sentence = f"{who}: {count:,} of {len(group):,} waited behind {behind}{how}, {with_unit(total // count)} on average"
        yield from table.wrap(sentence, indent=2)


def histogram(sums: Sums) -> list[str]:
    """Of latencies. Log2, in µs, or in ns where the times are short."""
    if sums.slowest == NONE:
        return []
    if sums.slowest < 64_000:
        return hist.lines(sums.slots[1], "nsecs", "count")
    return hist.lines(sums.slots[1000], "usecs", "count")


def _launch_columns(whose: Whose) -> tuple[int, tuple[str, ...]]:
    """How wide the name of a kernel is, and which parts of the latency have a column."""
    if whose.processes and whose.gpus:
        return 14, ("wait", "overhead")
    return 10 if whose.processes else 15 if whose.gpus else 17, SPLIT


def launch_header(whose: Whose) -> str:
    """Above `launch_line`."""
    width, parts = _launch_columns(whose)
    who = f"{'PID':>7} {'COMM':<8}" if whose.processes else f"{'TID':>7}"
    gpu = "GPU " if whose.gpus else ""
    titles = ("LATENCY", *(part.upper() for part in parts), "EXEC")
    return f"{'CALL T+us':>11} {who} {gpu}{'KERNEL':<{width}}" + _cells(titles)


def launch_line(view: View, at: int, whose: Whose) -> str:
    """One launch; times in µs, from the first call of all."""
    waits, error = view.waits, known(view.found.start_error[at])
    width, parts = _launch_columns(whose)
    cells = [at_least(known(waits.latency[at]), error)]
    cells += [us(known(getattr(waits, what)[at])) for what in parts]
    cells.append("runs" if view.found.running[at] else us(known(waits.exec[at])))
    when = f"{(int(view.ops.call[at]) - view.found.origin) / 1000:.1f}"
    label = table.fit(view.labels[int(view.found.name[at])], width)
    owner = view.owner(at)
    who = (
        f"{owner.pid:>7} {table.fit(owner.comm, 8):<8}"
        if whose.processes
        else f"{int(view.found.tid[at]):>7}"
    )
    gpu = f"{owner.gpu:>3} " if whose.gpus else ""
    return f"{when:>11} {who} {gpu}{label:<{width}}" + _cells(cells)


def timeline_lines(view: View, new: Integers) -> Iterator[str]:
    """Of the operations in `new`: each stream's story, then each host thread's. Times in µs from the first call of all."""
    found, ops = view.found, view.ops
    origin = found.origin
    told = np.zeros(len(ops), bool)
    told[new] = True
    for process_number, process in enumerate(found.processes):
        mine = told & (found.process == process_number)
        host = np.isin(ops.kind, (Kind.SYNC, Kind.API))
        for at in _parted(mine & ~host, ops.queue):
            first = int(at[0])
            stream = stream_name(view.streams[int(ops.queue[first])])
            stream += f" (0x{int(found.stream[first]):x})" if stream.startswith("stream") else ""
            yield f"{stream} of {process.comm} (pid {process.pid}), GPU {int(found.gpu[first])}"
            yield f"{'FROM T+us':>12} {'TO T+us':>12} {'FOR us':>9}  WHAT"
            for place in at.tolist():
                if int(found.parent[place]) not in view.untold_graphs:
                    yield _story_line(view, place, origin)
            yield ""
        for at in _parted(mine & host, found.tid):
            yield f"thread {int(found.tid[at[0]])} of {process.comm} (pid {process.pid}): what it waited for, other calls"
            yield f"{'FROM T+us':>12} {'TO T+us':>12} {'FOR us':>9}  CALL"
            for place in at.tolist():
                yield _story_line(view, place, origin)
            yield ""


def _parted(some: NDArray[np.bool_], by: Integers) -> Iterator[Integers]:
    """The places of some operations, of each value by itself."""
    places = np.flatnonzero(some)
    places = places[np.argsort(by[places], kind="stable")]
    yield from (places[part] for part in dependencies.runs(by[places]))


def _story_line(view: View, at: int, origin: int) -> str:
    ops, op = view.ops, view.op(at)
    begin, end = view.span(at)

    def when(ns: int | None) -> str:
        return "-" if ns is None else f"{(ns - origin) / 1000:.2f}"

    length = us(end - begin) if begin is not None and end is not None else "-"
    text = {"kernel": view.labels[int(view.found.name[at])] if op == "kernel" else ""}.get(op) or view.name(
        at
    )
    if op in TITLES:
        text = f"{TITLES[op]} {int(view.found.bytes[at]):,} bytes"
    if op == "kernel" and ops.node[at] >= 0:
        text += f" (graph {int(ops.graph[at]) + 1}, node {int(ops.node[at])})"
    waited = view.waited_for(at)
    if waited and view.waits.wait[at] > 0:
        text += f", after {title(waited['name'])}"
    if begin is None:
        text += f", called T+{when(int(ops.call[at]))}"
    return f"{when(begin):>12} {when(end):>12} {length:>9}  {table.fit(text, 43)}"


def graph_hint(sums: Sums) -> list[str]:
    best = sums.best_row
    if best is None:
        return []
    sentence = (
        f"{best.count:,} launches in a row, from {title(best.label)} on, took {with_unit(best.took)}, of which the GPU worked "
        f"{with_unit(best.busy)}: as one CUDA graph about {with_unit(best.as_graph)}"
    )
    if sums.rows > 1:
        sentence += f" ({sums.rows:,} such rows; {with_unit(sums.gain)} to gain in all)"
    return table.wrap(sentence)


def slow_stories(view: View, slow: Integers, chosen: Integers, limit: int, whose: Whose) -> Iterator[str]:
    """What happened in each slow launch, then which host threads launched them."""
    found, waits = view.found, view.waits
    yield f"{len(slow):,} of {table.count(len(chosen), 'launch')} took more than {limit} us to start"
    for at in slow.tolist():
        process = found.processes[int(found.process[at])]
        stream = view.streams[int(view.ops.queue[at])]
        yield ""
        yield (
            f"T+{(int(view.ops.call[at]) - found.origin) / 1000:.1f} us  {title(view.labels[int(found.name[at])])}: "
            f"{at_least(int(waits.latency[at]), known(found.start_error[at]))} us"
        )
        who = whose.name(view.owner(at)) if whose.several else process.comm
        yield f"  thread {int(found.tid[at])} of {who}, {stream_name(stream)}"
        parts = [f"{with_unit(known(waits.api[at]))} in the call"]
        if waits.wait[at] > 0:
            waited = view.waited_for(at) or {"name": "earlier work"}
            parts.append(f"{with_unit(int(waits.wait[at]))} behind {title(waited['name'])}")
        elif waits.wait[at] == NONE:
            parts.append("what it waited for is not known")
        if waits.overhead[at] != NONE:
            parts.append(f"{with_unit(int(waits.overhead[at]))} on the launch path")
        yield from table.wrap("; ".join(parts), indent=2)
        if view.activity is not None and (did := view.meanwhile(at)):
            yield from table.wrap(
                "meanwhile the thread: " + "; ".join(f"{what} {with_unit(ns)}" for what, ns in did[:4]),
                indent=2,
            )
    if len(slow):
        yield ""
        yield "which threads launch the slow kernels"
        yield from slow_threads(view, slow, chosen, whose)
    yield ""


def slow_threads(view: View, slow: Integers, chosen: Integers, whose: Whose) -> list[str]:
    """A row for each host thread that launched slow ones: how many, of how many."""
    of_all, of_slow = (Counter(view.found.tid[some].tolist()) for some in (chosen, slow))
    rows = []
    for tid, count in of_slow.most_common(10):
        mine = slow[view.found.tid[slow] == tid]
        latency = Tally(view.waits.latency[mine]).distribution() or {}
        spent: Counter[str] = Counter()
        for at in mine[:1000].tolist():
            spent.update(dict(view.meanwhile(at)))
        most = next((what for what, _ in spent.most_common(1)), "-")
        owner = whose.cells(view.owner(int(mine[0])))
        owner.pop("GPU", None)  # a thread may use several
        row = owner | {"TID": str(tid), "SLOW": str(count), "LAUNCHES": str(of_all[tid])}
        row |= {"P50 us": us(latency.get("p50")), "MAX us": us(latency.get("max")), "MEANWHILE MOSTLY": most}
        rows.append(row)
    return table.within(rows, left=("COMM", "MEANWHILE MOSTLY"), cut=("MEANWHILE MOSTLY", "COMM"))


def stack_lines(sums: Sums) -> Iterator[str]:
    """The host's stacks that launched, most launches first."""
    for frames, count in sums.stacks.most_common(STACKS):
        yield f"{table.count(count, 'launch')} from"
        yield from (f"    {table.fit(frame, 76)}" for frame in frames or ["a stack that is not known"])
        yield ""
    if len(sums.stacks) > STACKS:
        yield f"and from {len(sums.stacks) - STACKS:,} other stacks"
        yield ""


def clock_line(sums: Sums) -> str:
    """How wrong the times may be."""
    if sums.virtual:
        return "virtual clock: times are exact"
    if sums.errors.largest is None:
        return "GPU clock: not known"
    text = f"GPU times are right to {with_unit(sums.errors.percentile(50))} (at worst {with_unit(sums.errors.largest)})"
    if sums.clock_steps:
        text += f"; a clock made {table.count(sums.clock_steps, 'step')}"
    return text


def loss_lines(summary: Mapping[str, Any]) -> list[str]:
    """What was lost, for people; nothing where there is nothing to say."""
    said = {
        "launches_running": "still running when the measurement ended",
        "launches_lost": "lost: their place was used again before it was read, or their process died",
        "launches_behind_unseen": "may have waited for work from before the tool came: how long is not known",
        "launches_unknown": "not timed: no probe in them, no timing events around them",
    }
    lines = [f"{table.count(summary[name], 'launch')} {text}" for name, text in said.items() if summary[name]]
    if summary["operations_lost"]:
        lines.append(
            f"{summary['operations_lost']:,} operations found no room in the log: waits may be attributed wrongly"
        )
    return [part for line in lines for part in table.wrap(line)]
