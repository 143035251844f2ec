"""launchlate's text report: findings, tables, and what happened in slow launches. "-" stands for an unknown number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf import names
from gpubpf.agent.definitions import Kind
from gpubpf.launches import arrays
from gpubpf.launches.dependencies import NONE
from gpubpf.launches.latency import SPLIT, LaunchView, known
from gpubpf.launches.sums import ValueCounts
from gpubpf.show import histogram as hist
from gpubpf.show import table
from gpubpf.show.kernel_names import fitted
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.show.table import us, with_unit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpubpf.launches.sums import LaunchGroup, LaunchSums

    Integers: TypeAlias = NDArray[np.int64]

TITLES = {
    "h2d": "H->D", "d2h": "D->H", "d2d": "D->D", "h2h": "H->H", "memset": "memset", "host function": "a host function",
}  # fmt: skip
STACKS = 10  # maximum host stacks to print
NAME = 40  # maximum characters of a name in a sentence
SHORT_NAME = 18  # maximum characters of a name in a line with two names
MOST_WAITS = 12  # maximum sentences about the waits of several processes
MOST_THREADS = 10  # maximum host threads in the table of slow launches


def title(name: str) -> str:
    """Return the name of a kernel or copy for a sentence."""
    return TITLES.get(name, table.fit(name, NAME))


def title_of(view: LaunchView, at: int, width: int = NAME) -> str:
    """Return the name of an operation for a sentence. Different kernels have different names."""
    if view.op(at) == "kernel":
        return view.shown(width)[int(view.columns.name[at])]
    return title(view.name(at))


def kernel_labels(sums: LaunchSums) -> dict[str, str]:
    """Return the labels of all kernels that were launched or waited for, by mangled name."""
    launched = {group.mangled for group in sums.groups if group.mangled is not None}
    waited = (dict(key).get("mangled") for group in sums.groups for key in group.waited)
    found = names.labels(sorted(launched.union(name for name in waited if name is not None)))
    return {mangled: label or "?" for mangled, label in found.items()}


def group_titles(sums: LaunchSums, width: int) -> list[str]:
    """Return the titles of all groups in at most `width` columns. Different kernels have different titles."""
    labels, groups = kernel_labels(sums), sums.groups
    titles = [
        group.node + labels[group.mangled] if group.mangled is not None else group.title for group in groups
    ]
    shown = fitted(titles, width)
    return [shown[text] for text in titles]


def at_least(ns: int | None, error: int | None, text: Callable[[int | None], str] = us) -> str:
    """Return a time, or ``<`` and the error if the time is smaller than its error."""
    return f"<{text(error)}" if ns is not None and error and abs(ns) < error else text(ns)


def exactly(limit: int) -> str:
    """Return the limit of --slow, given in us, with all its digits: ``500 us``, ``1.234 ms``, ``100 ms``."""
    return f"{limit} us" if limit < 1000 else f"{limit / 1000:,.15g} ms"


def report(
    sums: LaunchSums, owners: OwnerColumns, streams: bool, stacks: bool, verbose: bool = False
) -> Iterator[str]:
    """Yield the report of an interval: the finding, the table, what launches waited for, a histogram, advice."""
    yield from finding(sums)
    yield from kernel_table(sums, streams, owners)
    yield from full_names(sums, _name_width(streams, owners)) if verbose else ()
    yield from wait_lines(sums, owners)
    if sums.slowest != NONE:
        yield from (clock_line(sums), "")
        yield from (*histogram(sums), "")
    else:
        yield ""
    if stacks:
        yield from stack_lines(sums)
    yield from graph_hint(sums)


def finding(sums: LaunchSums) -> Iterator[str]:
    """Yield how the latency of all launches divides into its parts."""
    parts = {name: sums.whole[name] for name in SPLIT}
    total = sum(parts.values())
    if total <= sums.whole["error"]:
        return
    words = {"wait": "behind earlier work", "api": "in the launch call", "overhead": "on the way to the GPU"}
    order = sorted(("api", "wait", "overhead"), key=lambda name: -parts[name])
    said = ", ".join(f"{round(100 * parts[name] / total)} % {words[name]}" for name in order)
    count, left_out = sums.whole["count"], sums.count - sums.whole["count"]
    who = f"{count:,} of {table.count(sums.count, 'launch')}" if left_out else table.count(count, "launch")
    calls = sums.whole["calls"]
    who += f" by {table.count(calls, 'call')}" if calls < count else ""
    yield from table.wrap(f"{who} took {with_unit(total)} in total to start: {said}")
    if calls < count:
        yield "the call of a graph counts once here, and in API for each of its kernels"
    if left_out:
        verb, their = ("is", "its") if left_out == 1 else ("are", "their")
        yield from table.wrap(
            f"{table.count(left_out, 'launch')} {verb} left out of this: {their} wait or latency is unknown"
        )


def kernel_table(sums: LaunchSums, by_stream: bool, owners: OwnerColumns | None = None) -> list[str]:
    """Return a line for each group: the number of launches, their latency and its parts, and how long the kernels ran."""
    if owners is not None and owners.several:
        return _table_of_all(sums, by_stream, owners)
    width = _name_width(by_stream, owners)
    stream = " STREAM " if by_stream else ""
    titles = ("P50", "P99", "MAX", "API", "WAIT", "OVERHEAD", "EXEC")
    lines = [f"{'':23}{'latency, us':>24}{'parts, mean us':>25}"]
    lines.append(f"{'KERNEL':<{width}}{stream}{'COUNT':>7}" + _cells(titles))
    for group, name in zip(sums.groups, group_titles(sums, width), strict=True):
        place = f" {group.stream_name}" if by_stream else ""
        cells = list(_group_cells(group).values())
        lines.append(f"{name:<{width}}{place}{len(group):>{len(stream) + 7 - len(place)}}" + _cells(cells))
    return lines


def _name_width(by_stream: bool, owners: OwnerColumns | None) -> int:
    """Return how many columns the names of kernels have in the table."""
    return 20 if owners is not None and owners.several else 8 if by_stream else 16


def full_names(sums: LaunchSums, width: int) -> Iterator[str]:
    """Yield the full names of kernels that the table shows in `width` columns, where these differ."""
    shown = {
        short: names.demangle(group.mangled).full
        for group, short in zip(sums.groups, group_titles(sums, width), strict=True)
        if group.mangled is not None
    }
    for short, full in shown.items():
        if short != full:
            yield from table.wrap(f"{short}: {full}", indent=2)


def _table_of_all(sums: LaunchSums, by_stream: bool, owners: OwnerColumns) -> list[str]:
    """Return the table of `kernel_table` for several processes or GPUs, whose columns leave less room."""
    rows = []
    for group, name in zip(sums.groups, group_titles(sums, _name_width(by_stream, owners)), strict=True):
        row = owners.cells(group) | {"KERNEL": name}
        row |= {"STREAM": group.stream_name} if by_stream else {}
        rows.append(row | {"COUNT": str(len(group))} | _group_cells(group))
    drop = (
        "MAX",
        *(("API",) if by_stream or owners.gpus else ()),
        *(("P50",) if by_stream and owners.gpus else ()),
    )
    return [
        "latency, and its parts (means), us",
        *table.within(rows, left=("COMM", "KERNEL", "STREAM"), drop=drop, gap=1),
    ]


def _group_cells(group: LaunchGroup) -> dict[str, str]:
    # Compare each percentile with that of the errors: a few starts with a large error do not affect the others.
    errors = group.errors.distribution() or {}
    latency = group.times["latency"].distribution() or {}
    cells = {p.upper(): at_least(latency.get(p), errors.get(p)) for p in ("p50", "p99", "max")}
    for what in (*SPLIT, "exec"):
        mean = (group.times[what].distribution() or {}).get("mean")
        cells[what.upper()] = at_least(mean, errors.get("mean")) if what == "overhead" else us(mean)
    return cells


def _cells(cells: Sequence[str]) -> str:
    """Return the times in a line of the table. The second to last column, OVERHEAD, is the widest."""
    return "".join(f"{cell:>{9 if n == len(cells) - 2 else 8}}" for n, cell in enumerate(cells))


def stream_name(label: str) -> str:
    """Return the name of a stream for a sentence."""
    if label.startswith("queue"):
        return label
    if "->" in label:
        return f"copies {label}"
    if label.startswith("thread"):
        return f"{label}'s default stream"
    return "default stream" if label == "default" else f"stream {label}"


def wait_lines(sums: LaunchSums, owners: OwnerColumns | None = None) -> Iterator[str]:
    """Yield what each kernel waited for most; for several processes, only the longest waits."""
    said = [
        (name, group, *waited)
        for group, name in zip(sums.groups, group_titles(sums, NAME), strict=True)
        for waited in group.waited_for()[:2]
    ]
    labels = kernel_labels(sums)
    shown = fitted(labels.values(), NAME)
    most = len(said)
    if owners is not None and owners.processes:
        most = MOST_WAITS
        said.sort(key=lambda one: -one[-1])
    for name, group, waited, count, total in said[:most]:
        how = " through an event" if waited["kind"] == "event" else ""
        what = waited.get("of", waited["kind"])
        before = shown[labels[waited["mangled"]]] if "mangled" in waited else title(waited["name"])
        behind = f"{before}{' copies' if what == 'copy' else ''}"
        where = [stream_name(group.stream)] if group.stream else []
        if owners is not None and "kernel" in group.fields:
            where += [f"pid {group.pid}"] if owners.processes else []
            where += [owners.gpu_name(group)] if owners.gpus else []
        who = name + (f" ({', '.join(where)})" if where else "")
        sentence = f"{who}: {count:,} of {len(group):,} waited behind {behind}{how}, {with_unit(total // count)} on average"
        yield from table.wrap(sentence, indent=2)


def histogram(sums: LaunchSums) -> list[str]:
    """Return a log2 histogram of latencies, in us, or in ns if all are below 64 us."""
    if sums.slowest == NONE:
        return []
    if sums.slowest < 64_000:
        return hist.lines(sums.slots[1], "nsecs", "count")
    return hist.lines(sums.slots[1000], "usecs", "count")


def _launch_columns(owners: OwnerColumns) -> tuple[int, tuple[str, ...]]:
    """Return the width of the kernel's name, and the parts of the latency that have a column."""
    if owners.processes and owners.gpus:
        return 14, ("wait", "overhead")
    return 10 if owners.processes else 15 if owners.gpus else 17, SPLIT


def launch_header(owners: OwnerColumns) -> str:
    """Return the header above `launch_line`."""
    width, parts = _launch_columns(owners)
    who = f"{'PID':>7} {'COMM':<8}" if owners.processes else f"{'TID':>7}"
    gpu = "GPU " if owners.gpus else ""
    titles = ("LATENCY", *(part.upper() for part in parts), "EXEC")
    return f"{'CALL T+us':>11} {who} {gpu}{'KERNEL':<{width}}" + _cells(titles)


def launch_line(view: LaunchView, at: int, owners: OwnerColumns) -> str:
    """Return the line of a launch. Times are in us; that of the call is relative to the first call."""
    waits, error = view.waits, known(view.columns.start_error[at])
    width, parts = _launch_columns(owners)
    cells = [at_least(known(waits.latency[at]), error)]
    times = {what: known(getattr(waits, what)[at]) for what in parts}
    cells += [at_least(ns, error) if what == "overhead" else us(ns) for what, ns in times.items()]
    columns = view.columns
    runs = columns.running[at] and view.ops.start[at] != NONE
    cells.append("runs" if runs else "unknown" if columns.lost[at] else us(known(waits.exec[at])))
    since = (int(view.ops.call[at]) - view.columns.origin) / 1000
    when = f"{since:.1f}" if since < 10**9 else f"{since:.0f}"
    label = view.shown(width)[int(view.columns.name[at])]
    owner = view.owner(at)
    who = (
        f"{owner.pid:>7} {table.fit(owner.comm, 8):<8}"
        if owners.processes
        else f"{int(view.columns.tid[at]):>7}"
    )
    gpu = f"{owner.gpu:>3} " if owners.gpus else ""
    return f"{when:>11} {who} {gpu}{label:<{width}}" + _cells(cells)


def timeline_lines(view: LaunchView, new: Integers) -> Iterator[str]:
    """Yield the operations in `new`: those of each stream, then those of each host thread. Times are in us since the first call."""
    columns, ops = view.columns, view.ops
    origin = columns.origin
    told = np.zeros(len(ops), bool)
    told[new] = True
    host = np.isin(ops.kind, (Kind.SYNC, Kind.API))
    owners = OwnerColumns().see(view.owners(np.flatnonzero(~host)))
    for process_number, process in enumerate(columns.processes):
        mine = told & (columns.process == process_number)
        for at in _parted(mine & ~host, ops.queue):
            first = int(at[0])
            stream = stream_name(view.streams[int(ops.queue[first])])
            stream += f" (0x{int(columns.stream[first]):x})" if stream.startswith("stream") else ""
            yield f"{stream} of {table.process(process.comm, process.pid)}, {owners.gpu_name(view.owner(first))}"
            yield f"{'FROM T+us':>12} {'TO T+us':>12} {'FOR us':>9}  WHAT"
            for place in at.tolist():
                if int(columns.parent[place]) not in view.opaque_graphs:
                    yield _story_line(view, place, origin)
            yield ""
        for at in _parted(mine & host, columns.tid):
            yield f"thread {int(columns.tid[at[0]])} of {table.process(process.comm, process.pid)}: waits and other calls"
            yield f"{'FROM T+us':>12} {'TO T+us':>12} {'FOR us':>9}  CALL"
            for place in at.tolist():
                yield _story_line(view, place, origin)
            yield ""


def _parted(some: NDArray[np.bool_], by: Integers) -> Iterator[Integers]:
    """Yield the indices of some operations, separately for each value of `by`."""
    places = np.flatnonzero(some)
    places = places[np.argsort(by[places], kind="stable")]
    yield from (places[part] for part in arrays.equal_runs(by[places]))


def _story_line(view: LaunchView, at: int, origin: int) -> str:
    ops, op = view.ops, view.op(at)
    begin, end = view.span(at)

    def when(ns: int | None) -> str:
        return "-" if ns is None else f"{(ns - origin) / 1000:.2f}"

    length = us(end - begin) if begin is not None and end is not None else "-"
    start = f"{when(begin):>12} {when(end):>12} {length:>9}  "
    text = (
        f"{TITLES[op]} {table.count(int(view.columns.bytes[at]), 'byte')}" if op in TITLES else view.name(at)
    )
    node = f" (graph {int(ops.graph[at]) + 1}, node {int(ops.node[at])})" if ops.node[at] >= 0 else ""
    before = int(view.waits.waited_for[at]) if view.waits.wait[at] > 0 else -1
    called = f", called T+{when(int(ops.call[at]))}" if begin is None else ""
    if begin is not None and op == "kernel":
        called = (
            ", still running"
            if view.columns.running[at]
            else ", end unknown"
            if view.columns.lost[at]
            else ""
        )
    for width in (NAME, SHORT_NAME):
        text = title_of(view, at, width) + node if op == "kernel" else text
        after = f", after {title_of(view, before, width)}" if before >= 0 else ""
        if len(start + text + after + called) <= table.WIDTH:
            break
    return table.fit_end(start, text + after + called)


def graph_hint(sums: LaunchSums) -> list[str]:
    """Return the advice to use a graph, if that would save time."""
    best = sums.best_candidate
    if best is None:
        return []
    sentence = (
        f"{best.count:,} launches in a row, beginning with {title(best.label)}, took {with_unit(best.took)}; the GPU worked for "
        f"{with_unit(best.busy)}; one graph would take about {with_unit(best.as_graph)}"
    )
    if sums.candidates > 1:
        sentence += f" ({sums.candidates:,} such sequences; {with_unit(sums.gain)} to save in total)"
    return table.wrap(sentence)


def slow_stories(
    view: LaunchView, slow: Integers, chosen: Integers, limit: int, owners: OwnerColumns
) -> Iterator[str]:
    """Yield what happened in each slow launch, then the host threads that launched them."""
    columns, waits = view.columns, view.waits
    yield f"{len(slow):,} of {table.count(len(chosen), 'launch')} took more than {exactly(limit)} to start"
    for at in slow.tolist():
        process = columns.processes[int(columns.process[at])]
        stream = view.streams[int(view.ops.queue[at])]
        yield ""
        yield (
            f"T+{table.moment(int(view.ops.call[at]) - columns.origin)}  {title_of(view, at)}: "
            f"{at_least(int(waits.latency[at]), known(columns.start_error[at]), with_unit)}"
        )
        who = owners.name(view.owner(at)) if owners.several else table.fit(process.comm, table.COMM)
        yield from table.wrap(f"thread {int(columns.tid[at])} of {who}, {stream_name(stream)}", indent=2)
        parts = [f"{with_unit(known(waits.api[at]))} in the call"]
        if waits.wait[at] > 0:
            before = int(waits.waited_for[at])
            behind = title_of(view, before) if before >= 0 else "earlier work"
            parts.append(f"{with_unit(int(waits.wait[at]))} behind {behind}")
        elif waits.wait[at] == NONE:
            parts.append("an unknown wait")
        if waits.overhead[at] != NONE:
            parts.append(f"{with_unit(int(waits.overhead[at]))} on the way to the GPU")
        yield from table.wrap("; ".join(parts), indent=2)
        if view.activity is not None and (did := view.meanwhile(at)):
            yield from table.wrap(
                "meanwhile the thread: " + "; ".join(f"{what} {with_unit(ns)}" for what, ns in did[:4]),
                indent=2,
            )
    if len(slow):
        yield ""
        yield "slow launches by host thread"
        yield from slow_threads(view, slow, chosen, owners)
    yield ""


def slow_threads(view: LaunchView, slow: Integers, chosen: Integers, owners: OwnerColumns) -> list[str]:
    """Return a row for each host thread with slow launches: how many were slow, and how many there were."""
    columns = view.columns
    # Threads of different processes may have the same number, each in its own PID namespace.
    of_all, of_slow = (
        Counter(zip(columns.process[some].tolist(), columns.tid[some].tolist(), strict=True))
        for some in (chosen, slow)
    )
    rows = []
    for (process, tid), count in of_slow.most_common(MOST_THREADS):
        mine = slow[(columns.process[slow] == process) & (columns.tid[slow] == tid)]
        latency = ValueCounts(view.waits.latency[mine]).distribution() or {}
        spent: Counter[str] = Counter()
        for at in mine[:1000].tolist():
            spent.update(dict(view.meanwhile(at)))
        most = next((what for what, _ in spent.most_common(1)), "-")
        owner = owners.cells(view.owner(int(mine[0])))
        owner.pop("GPU", None)  # a thread may use several GPUs
        row = owner | {"TID": str(tid), "SLOW": str(count), "LAUNCHES": str(of_all[process, tid])}
        row |= {"P50 us": us(latency.get("p50")), "MAX us": us(latency.get("max")), "MEANWHILE MOSTLY": most}
        rows.append(row)
    return table.within(rows, left=("COMM", "MEANWHILE MOSTLY"), cut=("MEANWHILE MOSTLY", "COMM"))


def stack_lines(sums: LaunchSums) -> Iterator[str]:
    """Yield the host stacks that launched kernels, the most frequent first."""
    for frames, count in sums.stacks.most_common(STACKS):
        yield f"{table.count(count, 'launch')} from"
        yield from (f"    {table.fit(frame, 76)}" for frame in frames or ["unknown stack"])
        yield ""
    if len(sums.stacks) > STACKS:
        yield f"and from {table.count(len(sums.stacks) - STACKS, 'other stack')}"
        yield ""


def clock_line(sums: LaunchSums) -> str:
    """Return a line about the possible error of the times."""
    if sums.virtual:
        return "virtual clock: times are exact"
    if sums.errors.largest is None:
        return "clock error: unknown"
    text = (
        f"clock error: median {with_unit(sums.errors.percentile(50))}, max {with_unit(sums.errors.largest)}"
    )
    if sums.clock_steps:
        text += f"; {table.count(sums.clock_steps, 'clock step')}"
    return text


def loss_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return lines about what is missing from the results; [] if nothing is."""
    failed, ended = summary["launches_lost_by_failure"], summary["launches_lost_by_exit"]
    reused = summary["launches_lost"] - failed - ended
    said = (
        (summary["launches_running"], "running, or not started, when the measurement ended"),
        (failed, "with an unknown end: the context failed before the end was read"),
        (ended, "with an unknown end: the process ended or executed another program"),
        (reused, "lost: the tool could not keep up; --kernel chooses fewer"),
        (summary["launches_behind_unseen"], "may have waited for work from before attaching: wait unknown"),
        (summary["launches_untimed"], "not timed: neither a probe nor timing events"),
    )
    lines = [f"{table.count(count, 'launch')} {text}" for count, text in said if count]
    if summary["operations_lost"]:
        dropped = table.count(summary["operations_lost"], "operation")
        lines.append(f"{dropped} dropped because the log was full: waits may be attributed to the wrong work")
    return [part for line in lines for part in table.wrap(line)]


def none_chosen(filters: str, others: Counter[tuple[int, str]]) -> str:
    """Return the notice that no launch passed the host thread filters. `others`: launches by (thread, process name)."""
    threads = [f"{tid} of {comm}" for (tid, comm), _ in others.most_common(MOST_THREADS)]
    more = f" and {table.count(len(others) - MOST_THREADS, 'other')}" if len(others) > MOST_THREADS else ""
    launches = table.count(others.total(), "launch")
    return f"no launch matched {filters}; {launches} by thread{'s' if len(others) > 1 else ''} {', '.join(threads)}{more}"
