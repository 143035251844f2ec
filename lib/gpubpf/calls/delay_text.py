"""The causes of delays as text and as record fields: for slow calls, --why and the GPU driver's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.calls import delays, formatting, statistics_text
from gpubpf.calls.arrays import GAP
from gpubpf.calls.call_fields import DRIVER, WHY
from gpubpf.calls.statistics import CallStatistics
from gpubpf.kernel import syscalls
from gpubpf.show import table
from gpubpf.show.table import us

NAME = 60  # maximum characters of a kernel with its launch shape in a sentence
MOST_THREADS = 8  # maximum threads that --why names
_NOT_FUNCTIONS = {GAP: "between launches", delays.PROCESS: "the process"}  # keys of `delays.by_function`

if TYPE_CHECKING:
    from gpubpf.calls.api import Api
    from gpubpf.calls.delays import Cause
    from gpubpf.calls.kfd import DriverEvent


def slow_call_lines(
    record: Mapping[str, Any], text: str, causes: Sequence[Cause], origin_ns: int, several: bool
) -> Iterator[str]:
    """Yield the lines for a slow call and the causes of its latency.

    text: from `call_texts`.
    causes: from `delays.explain`.
    several: name the process.
    """
    text = " ".join(table.fit(word, NAME) for word in text.split(" "))
    began = f"T+{(record['ts_ns'] - origin_ns) / 1e9:.6f} s"
    yield from formatting.wrap(f"{began}  {text}: {table.duration(record['lat_ns'])}")
    who = table.process(record["comm"], record["pid"]) if several else table.fit(record["comm"], table.COMM)
    off = sum(cause.ns for cause in causes if not cause.timeless)
    said = [f"{table.duration(max(record['lat_ns'] - off, 0))} on the CPU", *map(cause_text, causes[:6])]
    yield from formatting.wrap(f"thread {record['tid']} of {who}: {', '.join(said)}", 2)
    yield ""


def cause_text(cause: Cause) -> str:
    """Return a cause with its time or its count: ``blocked in futex 686 us``, ``3 page faults in hipMalloc``."""
    if cause.reason == delays.DRIVER:
        return f"{cause.text} meanwhile" + (f" for {table.duration(cause.ns)}" if cause.ns else "")
    where = f" in {cause.where}" if cause.where else ""
    if cause.timeless:
        return table.count(cause.count, cause.text.removesuffix("s")) + where
    times = f" ({cause.count:,} times)" if cause.count > 1 else ""
    return f"{cause.text} {table.duration(cause.ns)}{times}{where}"


def reason_fields(number: int, syscall: int, counts: Any) -> dict[str, Any]:
    """Return the fields of a record "why": reason, system call (None if not in one), count, and times (None
    for an event).
    """
    name = syscalls.name(syscall) if syscall >= 0 else None
    record = {"reason": delays.DELAY_REASONS[number][0], "syscall": name, "count": int(counts["count"])}
    times = {key: None if number in delays.TIMELESS else int(counts[key]) for key in ("ns", "largest_ns")}
    return record | {"ns": times["ns"], "max_ns": times["largest_ns"]}


def cause_record(cause: Cause) -> dict[str, Any]:
    """Return an item of a slow call's field `why`, with the reason as text."""
    return {"what": cause.text, "count": cause.count, "ns": None if cause.timeless else cause.ns}


def slow_threads(slow: Sequence[tuple[Mapping[str, Any], Sequence[Cause]]], several: bool) -> Iterator[str]:
    """Yield a table of the threads that made slow calls. `slow`: records of calls, each with its causes."""
    threads: dict[tuple[int, int], list[tuple[Mapping[str, Any], Sequence[Cause]]]] = {}
    for record, causes in slow:
        threads.setdefault((record["pid"], record["tid"]), []).append((record, causes))
    rows = []
    for (pid, tid), mine in sorted(threads.items(), key=lambda item: -len(item[1]))[:10]:
        times = sorted(record["lat_ns"] for record, _ in mine)
        spent: Counter[str] = Counter()
        for record, causes in mine:
            real = [cause for cause in causes if not cause.timeless]
            spent.update({cause.text: cause.ns for cause in real})
            spent["on the CPU"] += max(record["lat_ns"] - sum(cause.ns for cause in real), 0)
        cells = {"PID": str(pid), "COMM": mine[0][0]["comm"]} if several else {}
        cells |= {
            "TID": str(tid),
            "SLOW CALLS": formatting.exact(len(mine)),
            "P50 us": us(times[(len(times) - 1) // 2]),
        }
        rows.append(cells | {"MAX us": us(times[-1]), "MOSTLY": spent.most_common(1)[0][0]})
    if rows:
        yield "threads that make the slow calls"
        yield from table.within(rows, left=("COMM", "MOSTLY"), cut=("MOSTLY", "COMM"))
        yield ""


def why_lines(
    groups: Sequence[tuple[str, int, Sequence[Cause]]], threads: Sequence[tuple[str, Sequence[Cause]]]
) -> Iterator[str]:
    """Yield the table of causes, and a sentence for each thread about the gaps between its launches.

    `groups`: name of a function or of the gaps, total time in ns, causes. `threads`: name of a thread, causes
    in its gaps.
    """
    rows = []
    for where, total, causes in groups:
        for cause in [cause for cause in causes if cause.is_significant(total)][:4]:
            timed = not cause.timeless
            rows.append(
                {
                    "WHERE": where,
                    "WHAT": cause.text,
                    "COUNT": formatting.exact(cause.count)
                    if cause.count
                    else "-",  # 0: it began earlier and has not ended
                    "TOTAL ms": formatting.ms(cause.ns) if timed else "-",
                    "MAX us": us(cause.largest_ns) if timed else "-",
                    # The total excludes calls that have not ended.
                    "OF IT": formatting.percent(min(cause.ns, total), total) if timed and total else "-",
                }
            )
    if not rows:
        yield "no call and no gap between launches was off the CPU or had page faults"
        yield ""
        return
    yield "why: what delayed threads in calls and between launches"
    yield from table.within(rows, left=("WHERE", "WHAT"), cut=("WHERE", "WHAT"))
    yield ""
    for who, causes in threads:
        total = sum(cause.ns for cause in causes if not cause.timeless)
        said = [cause_text(cause) for cause in causes if cause.is_significant(total)]
        yield from formatting.wrap(f"{who}, between launches: {', '.join(said[:4])}", 2)
    if threads:
        yield ""


def driver_record(event: DriverEvent, comm: str) -> dict[str, Any]:
    """Return the record "driver". `pid` and `comm` are None if the event concerns all processes."""
    return DRIVER.record(
        ts_ns=event.start_ns,
        ns=event.ns,
        pid=event.pid or None,
        comm=comm if event.pid else None,
        gpu=event.gpu,
        what=event.what,
    )


def driver_event_lines(events: Sequence[DriverEvent], comm: Callable[[int], str]) -> Iterator[str]:
    """Yield a table of what AMD's driver did to the traced processes."""
    total: dict[tuple[int, int, str], list[int]] = {}
    for event in events:
        total.setdefault((event.pid, event.gpu, event.what), []).append(event.ns)
    if not total:
        return
    yield "what the GPU driver did"
    rows = [
        {
            "PID": str(pid) if pid else "-",
            "COMM": comm(pid) if pid else "-",
            "GPU": str(gpu),
            "WHAT": what,
            "COUNT": formatting.exact(len(times)),
            "TOTAL ms": formatting.ms(sum(times)) if any(times) else "-",
            "MAX us": us(max(times)) if any(times) else "-",
        }
        for (pid, gpu, what), times in sorted(total.items(), key=lambda item: -sum(item[1]))
    ]
    yield from table.within(rows, left=("COMM", "WHAT"), cut=("WHAT", "COMM"))
    yield ""


class DelayReport:
    """Formats delays for --why. `comm` returns the name of a process."""

    def __init__(self, api: Api, comm: Callable[[int], str]) -> None:
        self._api, self._comm = api, comm

    def record(self, row: Any) -> dict[str, Any]:
        """Return the record "why" of a row of `DelayProbes.delays`."""
        pid, tid, function = int(row["tgid"]), int(row["tid"]), int(row["function"])
        whose = {"pid": pid, "comm": self._comm(pid)} | ({"tid": tid} if tid else {})
        api = None if function == GAP else self._api.functions[function].name
        reason = reason_fields(int(row["reason"]), int(row["syscall"]), row)
        return WHY.record(**whose, api=api, **reason)

    def lines(
        self,
        rows: Any,
        between: Any,
        by_function: Sequence[CallStatistics],
        by_kernel: Sequence[CallStatistics],
    ) -> Iterator[str]:
        """Yield the causes in functions and gaps, largest first, then what delayed each thread between its
        launches.

        `rows`, `between`: the two arrays of `DelayProbes.delays`. `by_function`, `by_kernel`: the statistics
        of the same period.
        """
        total_ns: dict[int, int] = {}
        for row in by_function:
            total_ns[row.number] = total_ns.get(row.number, 0) + row.times.ns
        total_ns[GAP] = sum(row.gaps.ns for row in by_kernel)
        groups = []
        for number, own in delays.by_function(rows).items():
            name = _NOT_FUNCTIONS.get(number) or self._api.functions[number].name
            groups.append((name, total_ns.get(number, 0), delays.causes(own)))
        groups.sort(key=lambda group: -sum(cause.ns for cause in group[2]))
        threads = sorted(self._threads(between), key=lambda thread: -sum(cause.ns for cause in thread[1]))
        yield from why_lines(groups[: statistics_text.MOST_ROWS], threads[:MOST_THREADS])

    def _threads(self, between: Any) -> Iterator[tuple[str, list[delays.Cause]]]:
        """Yield each thread with the causes of delays between its launches, without those in launches
        themselves.
        """
        import numpy as np

        launches = [
            number for number, function in enumerate(self._api.functions) if function.group == "launch"
        ]
        between = between[(between["tid"] != 0) & ~np.isin(between["function"], launches)]
        for pid, tid in sorted(set(zip(between["tgid"].tolist(), between["tid"].tolist(), strict=True))):
            own = between[(between["tgid"] == pid) & (between["tid"] == tid)]
            yield f"thread {tid} of {self._comm(pid)}", delays.causes(own, self._function_name)

    def _function_name(self, number: int) -> str:
        """Return the function's name, or "" for GAP, when the thread was in no call."""
        return "" if number == GAP else self._api.functions[number].name
