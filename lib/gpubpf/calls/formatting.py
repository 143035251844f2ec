"""The text, JSON and CSV that hipsnoop and cudasnoop print: tables by function and by kernel, lines for
calls, causes of delays.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

from gpubpf.calls import delays
from gpubpf.calls.records import HEX, SHAPES, map_distinct
from gpubpf.process import syscalls
from gpubpf.show import cli, table
from gpubpf.show.table import us

if TYPE_CHECKING:
    from gpubpf.calls.delays import Cause
    from gpubpf.calls.kfd import DriverEvent
    from gpubpf.calls.records import CallGroup
    from gpubpf.calls.statistics import CallStatistics, Durations
    from gpubpf.show.owner_columns import Whose

MOST_ROWS = 24  # of a table without -v
LEAST_NAME = 12  # columns that a function's name keeps if a line is too long
LEAST_SHARE = 0.01  # of the time; a smaller share is not mentioned in a sentence
CSV_SUMS = (
    "pid",
    "comm",
    "api",
    "count",
    "errors",
    "mean_ns",
    "p50_ns",
    "p99_ns",
    "max_ns",
    "total_ns",
    "off_cpu_ns",
)
CSV_CALLS = (
    *(
        "ts_ns",
        "pid",
        "comm",
        "tid",
        "cgroup_id",
        "api",
        "ret",
        "error",
        "lat_ns",
        "off_cpu_ns",
        "kernel",
        "fn_addr",
    ),
    *("grid", "block_dim", "shared_bytes", "stream", "bytes", "copy"),
)


def percent(part: int, whole: int) -> str:
    return f"{round(100 * part / whole)} %" if whole else "-"


def _wrap(sentence: str, indent: int = 0) -> Iterator[str]:
    """Wrap a sentence, but never between a number and its percent sign."""
    for line in table.wrap(sentence.replace(" %", "\u00a0%"), indent):
        yield line.replace("\u00a0", " ")


def ms(ns: int) -> str:
    """Format a time in ms, in at most eight columns."""
    value = ns / 1e6
    return f"{value:.{2 if value < 1000 else 1 if value < 100_000 else 0}f}"


def time_and_errors(rows: Sequence[CallStatistics], what: str = "call") -> Iterator[str]:
    """Yield sentences that say which functions took the time, and which failed."""
    total = sum(row.times.ns for row in rows)
    count = sum(row.times.count for row in rows)
    if not count:
        return
    by_name: dict[str, int] = {}
    for row in rows:
        by_name[row.name] = by_name.get(row.name, 0) + row.times.ns
    largest = sorted(by_name.items(), key=lambda item: -item[1])[:3]
    parts = [f"{percent(ns, total)} in {name}" for name, ns in largest if ns >= LEAST_SHARE * total]
    off = sum(row.times.off_ns for row in rows)
    said = f"{table.count(count, what)} took {table.duration(total)} in all: {', '.join(parts)}"
    if off >= LEAST_SHARE * total:
        said += f"; {percent(off, total)} of it off the CPU"
    yield from _wrap(said)
    failed: dict[str, tuple[int, int, str]] = {}
    for row in rows:
        bad, all_, error = failed.get(row.name, (0, 0, ""))
        failed[row.name] = bad + row.errors, all_ + row.times.count, row.error_name or error
    failed = {name: entry for name, entry in failed.items() if entry[0]}
    if failed:
        order = sorted(failed.items(), key=lambda item: -item[1][0])
        codes = {error for _, _, error in failed.values()}
        same = f" ({codes.pop()})" if len(codes) == 1 else ""
        names = [
            f"{name} ({bad:,} of {all_:,}{'' if same else f', last {error}'})"
            for name, (bad, all_, error) in order[:4]
        ]
        more = f" and {table.count(len(order) - 4, 'other function')}" if len(order) > 4 else ""
        errors = sum(bad for bad, _, _ in failed.values())
        yield from _wrap(f"{table.count(errors, 'call')} failed{same}: {', '.join(names)}{more}")


def function_table(rows: Sequence[CallStatistics], whose: Whose, everything: bool = False) -> Iterator[str]:
    """Yield the table of functions. `everything`: show all rows, not only the first MOST_ROWS."""
    shown = rows if everything else rows[:MOST_ROWS]
    cells = [
        {
            "API": row.name,
            "COUNT": exact(row.times.count),
            "ERRORS": exact(row.errors),
            "TOTAL ms": ms(row.times.ns),
        }
        | percentiles(row.times)
        | {"OFF-CPU": percent(row.times.off_ns, row.times.ns)}
        for row in shown
    ]
    yield from _table("latency, us", cells, shown, whose, "API")
    yield from _left_out(rows, shown, "function")


def kernel_table(rows: Sequence[CallStatistics], whose: Whose, everything: bool = False) -> Iterator[str]:
    """Yield the table of kernels, with the gaps before their launches."""
    shown = rows if everything else rows[:MOST_ROWS]
    cells = [
        {"KERNEL": row.name, "LAUNCHES": exact(row.times.count), "TOTAL ms": ms(row.gaps.ns)}
        | percentiles(row.gaps)
        | {"OFF-CPU": percent(row.gaps.off_ns, row.gaps.ns)}
        for row in shown
    ]
    if any(row.runs.count for row in shown):
        for cell, row in zip(cells, shown, strict=True):
            del cell["TOTAL ms"]
            cell |= {f"EXEC {key}": percentiles(row.runs)[key] for key in ("P50", "MAX")}
    yield from _table("gap since the thread's last launch, us", cells, shown, whose, "KERNEL")
    yield from _left_out(rows, shown, "kernel")


def _table(
    above: str, cells: Sequence[dict[str, str]], rows: Sequence[CallStatistics], whose: Whose, name: str
) -> Iterator[str]:
    """Yield a table whose column `name` takes the room that is left. `above` is the title over the columns
    P50 to MAX.
    """
    if not cells:
        return
    several = whose.processes
    if several:
        cells = [whose.cells(row) | cell for row, cell in zip(rows, cells, strict=True)]
    cells = [{key: cli.printable(value) for key, value in cell.items()} for cell in cells]
    least = {
        "PID": 4,
        "COUNT": 7,
        "LAUNCHES": 9,
        "ERRORS": 7,
        "TOTAL ms": 9,
        "P50": 8,
        "P99": 8,
        "MAX": 8,
        "OFF-CPU": 8,
        "EXEC P50": 10,
        "EXEC MAX": 9,
    }
    if several:
        dropped = {"P50"} if any(row.errors for row in rows) else {"P50", "ERRORS"}
        cells = [{key: value for key, value in cell.items() if key not in dropped} for cell in cells]
    widths = {
        key: max(least.get(key, len(key)), *(len(cell[key]) + 1 for cell in cells))
        for key in cells[0]
        if key != name
    }
    if several:
        widths["COMM"] = max(5, min(widths["COMM"], 11))
    room = table.WIDTH - sum(widths.values())
    titles = {key: key for key in cells[0]}
    end = table.WIDTH - sum(widths.get(key, 0) for key in ("OFF-CPU", "EXEC P50", "EXEC MAX"))
    yield f"{above:>{end}}"
    for cell in (titles, *cells):
        line = ""
        for key, value in cell.items():
            if key == name:
                line += f"{table.fit(value, room):<{room}}"
            elif key == "COMM":
                line += f" {table.fit(value, widths[key] - 1):<{widths[key] - 1}}"
            elif key == "PID":
                line += f"{value:>{widths[key] - 1}}"
            else:
                line += f"{value:>{widths[key]}}"
            if key == "COMM":
                line += " "
        yield line.rstrip()


def _left_out(rows: Sequence[CallStatistics], shown: Sequence[CallStatistics], noun: str) -> Iterator[str]:
    rest = rows[len(shown) :]
    if rest:
        total = sum(row.times.ns for row in rest)
        yield f"and {table.count(len(rest), f'other {noun}')}, {table.duration(total)} in all (-v shows them)"


def exact(count: int) -> str:
    """Format a count exactly, without separators from ten million on."""
    return f"{count:,}" if count < 10_000_000 else str(count)


def percentiles(times: Durations) -> dict[str, str]:
    """Return the cells P50, P99 and MAX in µs."""
    found = times.distribution() or {}
    return {key.upper(): us(found.get(key)) for key in ("p50", "p99", "max")}


def function_row(record: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the cells of CSV_SUMS from a record "api"."""
    times = record["lat_ns"] or {}
    return (
        *(record[key] for key in ("pid", "comm", "api", "count", "errors")),
        *(times.get(key, "") for key in ("mean", "p50", "p99", "max")),
        record["total_ns"],
        record["off_cpu_ns"],
    )


# --- each call ---


@dataclass(frozen=True)
class CallColumns:
    """The columns of lines for calls.

    `origin_ns`: the CLOCK_BOOTTIME that is shown as 0. `several`: the calls are of several processes.
    `clock_ns`: show the time of day; this is how far CLOCK_REALTIME is ahead of CLOCK_BOOTTIME. `whole`:
    never cut names, however long a line gets.
    """

    origin_ns: int
    several: bool
    clock_ns: int | None = None
    whole: bool = False

    @property
    def header(self) -> str:
        when = f"{'TIME':<15}" if self.clock_ns is not None else f"{'TIME s':>10}"
        who = f"{'PID':>7} {'COMM':<8}" if self.several else f"{'TID':>7}"
        return f"{when} {who} {'LAT us':>7} {'OFF-CPU':>7}  CALL"

    def when(self, ns: int) -> str:
        if self.clock_ns is None:
            return f"{(ns - self.origin_ns) / 1e9:>10.6f}"
        seconds, rest = divmod(ns + self.clock_ns, 1_000_000_000)
        return f"{_clock(seconds)}.{rest // 1000:06}"

    def who(self, pid: int, comm: str, tid: int | str) -> str:
        return f"{pid:>7} {table.fit(comm, 8):<8}" if self.several else f"{tid:>7}"


@lru_cache(maxsize=8)
def _clock(seconds: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def text_lines(group: CallGroup, columns: CallColumns) -> list[str]:
    """Return a line of text for each call."""
    fields = group.fields
    threads = list(zip(fields["pid"], fields["comm"], fields["tid"], strict=True))
    values = (
        map(columns.when, fields["ts_ns"]),
        map_distinct(lambda thread: cli.printable(columns.who(*thread)), threads),
        map(us, fields["lat_ns"]),
        [us(ns) if ns else "-" for ns in fields["off_cpu_ns"]],
    )
    text, more = _call_format(group)
    made = list(map(f"%s %s %7s %7s  {text}\n".__mod__, zip(*values, *more, strict=True)))
    if not columns.whole and max(map(len, made), default=0) > table.WIDTH + 1:
        api = str(fields["api"])
        kernels = map_distinct(cli.printable, fields["kernel"]) if "kernel" in fields else repeat("")
        for place, (text, kernel) in enumerate(zip(call_texts(group), kernels, strict=False)):
            if (too_long := len(made[place]) - 1 - table.WIDTH) > 0:
                start = made[place][: -1 - len(text)]
                made[place] = f"{start}{_shorter(text, api, kernel, too_long)}\n"
    return made


def _shorter(text: str, api: str, kernel: str, too_long: int) -> str:
    """Cut the names in a text of `call_texts` in their middle, the kernel's first, to save `too_long`
    columns.

    Return the text unchanged if that does not suffice. An address is never cut.
    """
    rest = text[len(api) + len(kernel) + bool(kernel) :]
    short = kernel if kernel.startswith("0x") else _cut(kernel, too_long, table.LEAST)
    name = _cut(api, too_long - len(kernel) + len(short), LEAST_NAME)
    made = f"{name} {short}{rest}" if kernel else name + rest
    return made if len(text) - len(made) >= too_long else text


def _cut(name: str, too_long: int, least: int) -> str:
    return table.fit(name, max(len(name) - too_long, least)) if too_long > 0 else name


def dispatch_line(record: Mapping[str, Any], columns: CallColumns) -> str:
    """Return a line of text for a kernel that ran: when it started, and for how long."""
    gpu, kernel = f"GPU {record['gpu']}:", cli.printable(record["kernel"])
    text = f"{gpu} {kernel}<<<{dimensions(record['grid'])}, {dimensions(record['block_dim'])}>>>"
    if "latency_ns" in record:
        text += f" {us(record['latency_ns'])} us after its call"
    when = columns.when(record["ts_ns"])
    who = columns.who(record["pid"], record["comm"], record.get("tid", "-"))
    start = f"{when} {who} {us(record['exec_ns']):>7} {'-':>7}  "
    too_long = len(start) + len(text) - table.WIDTH
    return start + (text if columns.whole or too_long <= 0 else _shorter(text, gpu, kernel, too_long))


def call_texts(group: CallGroup) -> Iterable[str]:
    """Return a description of each call: hipMemcpyAsync 4,096 B h2d, stream 0x1234 = hipErrorInvalidValue."""
    text, columns = _call_format(group)
    return map(text.__mod__, zip(*columns, strict=True)) if columns else [text] * len(group.positions)


def _call_format(group: CallGroup) -> tuple[str, list[list[Any]]]:
    """Return the format string of `call_texts`, and a column of values for each of its places."""
    fields = group.fields
    text, columns = str(fields["api"]), []
    if "kernel" in fields:
        text += " %s"
        columns.append(map_distinct(cli.printable, fields["kernel"]))
        if "grid" in fields:
            text += "<<<%s, %s"
            columns += [map_distinct(dimensions, list(zip(*fields[key], strict=True))) for key in SHAPES]
            if fields.get("shared_bytes", (0,))[0]:  # all are 0, or none is
                text += ", %d"
                columns.append(fields["shared_bytes"])
            text += ">>>"
    more = []
    if "bytes" in fields:
        more.append("%s B" + (" %s" if "copy" in fields else ""))
        columns.append(map_distinct("{:,}".format, fields["bytes"]))
        columns += [fields["copy"]] if "copy" in fields else []
    if fields.get("stream", (0,))[0]:
        more.append("stream %#x")
        columns.append(fields["stream"])
    if "out" in fields:
        more.append("-> %#x")
        columns.append(fields["out"])
    text += f" {', '.join(more)}" if more else ""
    if "error" in fields:
        text += " = %s"
        columns.append(fields["error"])
    return text, columns


def dimensions(size: Sequence[int]) -> str:
    """Format grid or block dimensions: ``8x2`` for [8, 2, 1]."""
    used = list(size)
    while len(used) > 1 and used[-1] == 1:
        used.pop()
    return "x".join(map(str, used))


def json_lines(group: CallGroup) -> Iterator[str]:
    """Return a line of JSON for each call."""
    text, columns = '{"type":"call"', []
    for name, values in group.fields.items():
        text += f',"{name}":'
        if name == "api":
            text += json.dumps(values)
        elif name in HEX:
            text += '"%#x"'
            columns.append(values)
        elif name in SHAPES:
            text += "[%d,%d,%d]"
            columns += values
        elif name == "spent_ns":
            text += "{" + ",".join(f'"{key}":%d' for key in values) + "}"
            columns += values.values()
        else:
            text += "%s"
            columns.append(map_distinct(json.dumps, values) if isinstance(values[0], str) else values)
    return map((text + "}\n").__mod__, zip(*columns, strict=True))


def csv_lines(group: CallGroup) -> Iterator[str]:
    """Return a line of CSV for each call. Cells that do not apply are empty."""
    parts, columns = [], []
    for name in CSV_CALLS:
        values = group.fields.get(name)
        if values is None or name == "api":
            parts.append(values or "")
        elif name in SHAPES:
            parts.append("%dx%dx%d")
            columns += values
        else:
            parts.append("%#x" if name in HEX else "%s")
            texts = isinstance(values[0], str)
            columns.append(map_distinct(lambda text: cli.csv_cells((text,)), values) if texts else values)
    return map((",".join(parts) + "\n").__mod__, zip(*columns, strict=True))


# --- causes of delays ---


def slow_call_lines(
    record: Mapping[str, Any], text: str, causes: Sequence[Cause], origin_ns: int, several: bool
) -> Iterator[str]:
    """Yield the lines for a slow call and the causes of its latency.

    `text`: of `call_texts`. `causes`: of `delays.explain`. `several`: name the process.
    """
    began = f"T+{(record['ts_ns'] - origin_ns) / 1e9:.6f} s"
    yield from _wrap(f"{began}  {text}: {table.duration(record['lat_ns'])}")
    who = f"{record['comm']} (pid {record['pid']})" if several else record["comm"]
    off = sum(cause.ns for cause in causes if not cause.timeless)
    said = [f"{table.duration(max(record['lat_ns'] - off, 0))} on the CPU", *map(cause_text, causes[:6])]
    yield from _wrap(f"thread {record['tid']} of {who}: {', '.join(said)}", 2)
    yield ""


def cause_text(cause: Cause) -> str:
    """Return a cause with its time or its count: ``blocked in futex 686 us``, ``3 page faults``."""
    if cause.reason == delays.DRIVER:
        return f"{cause.text} meanwhile" + (f" for {table.duration(cause.ns)}" if cause.ns else "")
    if cause.timeless:
        _, where, noun = cause.text.split(" ", 2) if cause.text.startswith("in ") else ("", "", cause.text)
        counted = table.count(cause.count, noun.removesuffix("s"))
        return f"in {where} {counted}" if where else counted
    times = f" ({cause.count:,} times)" if cause.count > 1 else ""
    return f"{cause.text} {table.duration(cause.ns)}{times}"


def reason_fields(number: int, syscall: int, counts: Any) -> dict[str, Any]:
    """Return the fields of a record "why": reason, system call (None: not in one), count, and times (None for
    an event).
    """
    name = syscalls.name(syscall) if syscall >= 0 else None
    record = {"reason": delays.REASONS[number][0], "syscall": name, "count": int(counts["count"])}
    times = {key: None if number in delays.TIMELESS else int(counts[key]) for key in ("ns", "largest_ns")}
    return record | {"ns": times["ns"], "max_ns": times["largest_ns"]}


def cause_record(cause: Cause) -> dict[str, Any]:
    """Return an item of the field `why` of a slow call, which gives the reason as text."""
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
            "SLOW CALLS": exact(len(mine)),
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
                    "COUNT": exact(cause.count)
                    if cause.count
                    else "-",  # 0: it began earlier, and has not ended
                    "TOTAL ms": ms(cause.ns) if timed else "-",
                    "MAX us": us(cause.largest_ns) if timed else "-",
                    # The total does not contain calls that have not ended.
                    "OF IT": percent(min(cause.ns, total), total) if timed and total else "-",
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
        yield from _wrap(f"between launches {who} was: {', '.join(said[:4])}", 2)
    if threads:
        yield ""


def driver_record(event: DriverEvent, comm: str) -> dict[str, Any]:
    """Return the record "driver". `pid` and `comm` are None if the event concerns all processes."""
    owner = {"pid": event.pid or None, "comm": comm if event.pid else None}
    times = {"ts_ns": event.start_ns, "ns": event.ns}
    return {"type": "driver", **times, **owner, "gpu": event.gpu, "what": event.what}


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
            "COUNT": exact(len(times)),
            "TOTAL ms": ms(sum(times)) if any(times) else "-",
            "MAX us": us(max(times)) if any(times) else "-",
        }
        for (pid, gpu, what), times in sorted(total.items(), key=lambda item: -sum(item[1]))
    ]
    yield from table.within(rows, left=("COMM", "WHAT"), cut=("WHAT", "COMM"))
    yield ""


# --- the end ---


def device_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence about the times of kernels on the GPU: how many there are and what is missing, or why
    there are none.
    """
    if "device_times" not in summary:
        return
    times = summary["device_times"]
    if times is None:
        yield from table.wrap(f"no GPU timestamps: {summary['no_device_times']}")
        return
    dispatches = table.count(times["dispatches"], "kernel dispatch")
    said = f"rocprofiler-sdk reported {dispatches} (not tested on AMD hardware)"
    missing = (
        ("lost", "lost, because they came too fast"),
        ("unended", "whose end was not reported"),
        ("without_call", "without a known call"),
    )
    parts = [f"{times[key]:,} {what}" for key, what in missing if times[key]]
    yield from table.wrap("; ".join((said, *parts)))


def coverage_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the last lines of the output: what was counted, and what was lost."""
    calls, lost = summary["calls"], summary["lost"]
    late = [library for library in summary["libraries"] if "late" in library]
    processes = table.count(summary["processes"], "process")
    if calls:
        said = f"counted {table.count(calls, 'call')} of {processes}"
    elif summary["abandoned"]:
        said = "counted nothing"
    elif summary["processes"]:
        said = f"counted nothing: no call of {processes} matched"
    else:
        said = "counted nothing: no calls seen"
    if summary["abandoned"]:
        said += f"; {table.count(summary['abandoned'], 'call')} did not return"
    yield said + ("; none lost" if calls and not lost and not late else "")
    for library in late:
        pid, comm = library["late"]["pid"], library["late"]["comm"]
        who = f"{comm} (pid {pid})" if comm else f"process {pid}"
        yield from table.wrap(
            f"not counted: the first milliseconds of calls to {library['path']} by {who}, before it had probes"
        )
    by = summary["lost_by"]
    if by["records"]:
        yield from table.wrap(
            f"lost: the records of {table.count(by['records'], 'call')}, because the ring was full"
        )
    if by["sums"] or by["calls"]:
        yield from table.wrap(
            f"lost: {table.count(by['sums'] + by['calls'], 'call')}, because a map was full"
        )
    for key, noun, what in (
        ("lost_why", "period", "off the CPU or with page faults"),
        ("lost_names", "name", "of kernels, because the ring was full"),
        ("lost_processes", "process", "of COMMAND or -p, because the map of traced processes was full"),
    ):
        if count := summary[key]:
            yield from table.wrap(f"lost: {table.count(count, noun)} {what}", 0)
    if missed := summary["missed"]:
        runs = ", ".join(f"{table.count(count, 'run')} of {name}" for name, count in missed.items())
        yield from table.wrap(
            f"lost: runs that the kernel skipped, because the CPU was already in an eBPF program: {runs}", 0
        )
