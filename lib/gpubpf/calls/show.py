"""Calls for people: where the time went, tables by function and by kernel, a line for each call."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

from gpubpf.calls import why
from gpubpf.calls.records import HEX, SHAPES, each
from gpubpf.process import syscalls
from gpubpf.show import cli, table
from gpubpf.show.table import us

if TYPE_CHECKING:
    from gpubpf.calls.kfd import Happened
    from gpubpf.calls.records import Group
    from gpubpf.calls.sums import Row, Times
    from gpubpf.calls.why import Cause
    from gpubpf.show.owner_columns import OwnerColumns

MOST = 24  # rows of a table without -v
REASONS = (
    *("preempted", "blocked", "block_io", "page_fault", "memory", "stopped"),
    *("page_faults", "tcp_retransmits"),
)
NAME = 12  # columns that a function's name is cut to
NAMED = 0.01  # of the time: less than that is not named in a sentence
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
    """Lines that do not end between a number and its percent sign."""
    for line in table.wrap(sentence.replace(" %", "\u00a0%"), indent):
        yield line.replace("\u00a0", " ")


def ms(ns: int) -> str:
    """A time in ms in at most eight columns."""
    value = ns / 1e6
    return f"{value:.{2 if value < 1000 else 1 if value < 100_000 else 0}f}"


def finding(rows: Sequence[Row], what: str = "call") -> Iterator[str]:
    """Where the time of all of them went, and what failed."""
    total = sum(row.times.ns for row in rows)
    count = sum(row.times.count for row in rows)
    if not count:
        return
    by_name: dict[str, int] = {}
    for row in rows:
        by_name[row.name] = by_name.get(row.name, 0) + row.times.ns
    largest = sorted(by_name.items(), key=lambda item: -item[1])[:3]
    parts = [f"{percent(ns, total)} in {name}" for name, ns in largest if ns >= NAMED * total]
    off = sum(row.times.off_ns for row in rows)
    said = f"{table.count(count, what)} took {table.duration(total)} in all: {', '.join(parts)}"
    if off >= NAMED * total:
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


def function_table(rows: Sequence[Row], whose: OwnerColumns, everything: bool = False) -> Iterator[str]:
    """One line for each function, most time first."""
    shown = rows if everything else rows[:MOST]
    cells = [
        {
            "API": row.name,
            "COUNT": number(row.times.count),
            "ERRORS": number(row.errors),
            "TOTAL ms": ms(row.times.ns),
        }
        | spread(row.times)
        | {"OFF-CPU": percent(row.times.off_ns, row.times.ns)}
        for row in shown
    ]
    yield from _table("latency, us", cells, shown, whose, "API")
    yield from _left_out(rows, shown, "function")


def kernel_table(rows: Sequence[Row], whose: OwnerColumns, everything: bool = False) -> Iterator[str]:
    """One line for each kernel, most launches first: the gaps before its launches."""
    shown = rows if everything else rows[:MOST]
    cells = [
        {"KERNEL": row.name, "LAUNCHES": number(row.times.count), "TOTAL ms": ms(row.gaps.ns)}
        | spread(row.gaps)
        | {"OFF-CPU": percent(row.gaps.off_ns, row.gaps.ns)}
        for row in shown
    ]
    if any(row.runs.count for row in shown):
        for cell, row in zip(cells, shown, strict=True):
            del cell["TOTAL ms"]
            cell |= {f"EXEC {key}": spread(row.runs)[key] for key in ("P50", "MAX")}
    yield from _table("gap since the thread's last launch, us", cells, shown, whose, "KERNEL")
    yield from _left_out(rows, shown, "kernel")


def _table(
    above: str, cells: Sequence[dict[str, str]], rows: Sequence[Row], whose: OwnerColumns, name: str
) -> Iterator[str]:
    """`above` stands over the columns P50 to MAX."""
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


def _left_out(rows: Sequence[Row], shown: Sequence[Row], noun: str) -> Iterator[str]:
    rest = rows[len(shown) :]
    if rest:
        total = sum(row.times.ns for row in rest)
        yield f"and {table.count(len(rest), f'other {noun}')}, {table.duration(total)} in all (-v shows them)"


def number(count: int) -> str:
    """Exact, in as few columns as there are."""
    return f"{count:,}" if count < 10_000_000 else str(count)


def spread(times: Times) -> dict[str, str]:
    found = times.distribution() or {}
    return {key.upper(): us(found.get(key)) for key in ("p50", "p99", "max")}


def function_row(record: Mapping[str, Any]) -> tuple[object, ...]:
    """A line of CSV."""
    times = record["lat_ns"] or {}
    return (
        *(record[key] for key in ("pid", "comm", "api", "count", "errors")),
        *(times.get(key, "") for key in ("mean", "p50", "p99", "max")),
        record["total_ns"],
        record["off_cpu_ns"],
    )


# --- each call ---


@dataclass(frozen=True)
class Columns:
    """Of lines for calls. `origin_ns`: from which times count; `several`: processes; `clock_ns`: how far the clock on the wall is
    ahead of CLOCK_BOOTTIME, where its time is to be shown, else None; `whole`: names, however long a line gets."""

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


def call_lines(group: Group, columns: Columns) -> list[str]:
    """Of each call one for people."""
    fields = group.fields
    threads = list(zip(fields["pid"], fields["comm"], fields["tid"], strict=True))
    values = (
        map(columns.when, fields["ts_ns"]),
        each(lambda thread: cli.printable(columns.who(*thread)), threads),
        map(us, fields["lat_ns"]),
        [us(ns) if ns else "-" for ns in fields["off_cpu_ns"]],
    )
    text, more = _call_format(group)
    made = list(map(f"%s %s %7s %7s  {text}\n".__mod__, zip(*values, *more, strict=True)))
    if not columns.whole and max(map(len, made), default=0) > table.WIDTH + 1:
        api = str(fields["api"])
        kernels = each(cli.printable, fields["kernel"]) if "kernel" in fields else repeat("")
        for place, (text, kernel) in enumerate(zip(call_texts(group), kernels, strict=False)):
            if (too_long := len(made[place]) - 1 - table.WIDTH) > 0:
                start = made[place][: -1 - len(text)]
                made[place] = f"{start}{_shorter(text, api, kernel, too_long)}\n"
    return made


def _shorter(text: str, api: str, kernel: str, too_long: int) -> str:
    """One of `call_texts`, its names cut in their middle, the kernel's first, where it is short enough then; else as it is. An address
    is cut nowhere."""
    rest = text[len(api) + len(kernel) + bool(kernel) :]
    short = kernel if kernel.startswith("0x") else _cut(kernel, too_long, table.LEAST)
    name = _cut(api, too_long - len(kernel) + len(short), NAME)
    made = f"{name} {short}{rest}" if kernel else name + rest
    return made if len(text) - len(made) >= too_long else text


def _cut(name: str, too_long: int, least: int) -> str:
    return table.fit(name, max(len(name) - too_long, least)) if too_long > 0 else name


def dispatch_line(record: Mapping[str, Any], columns: Columns) -> str:
    """A kernel that ran: when it started, and for how long."""
    gpu, kernel = f"GPU {record['gpu']}:", cli.printable(record["kernel"])
    text = f"{gpu} {kernel}<<<{dimensions(record['grid'])}, {dimensions(record['block_dim'])}>>>"
    if "latency_ns" in record:
        text += f" {us(record['latency_ns'])} us after its call"
    when = columns.when(record["ts_ns"])
    who = columns.who(record["pid"], record["comm"], record.get("tid", "-"))
    start = f"{when} {who} {us(record['exec_ns']):>7} {'-':>7}  "
    too_long = len(start) + len(text) - table.WIDTH
    return start + (text if columns.whole or too_long <= 0 else _shorter(text, gpu, kernel, too_long))


def call_texts(group: Group) -> Iterable[str]:
    """Each as one would write it: hipMemcpyAsync 4,096 B h2d, stream 0x1234 = hipErrorInvalidValue."""
    text, columns = _call_format(group)
    return map(text.__mod__, zip(*columns, strict=True)) if columns else [text] * len(group.places)


def _call_format(group: Group) -> tuple[str, list[list[Any]]]:
    """Of `call_texts`: a format, and columns with what goes there."""
    fields = group.fields
    text, columns = str(fields["api"]), []
    if "kernel" in fields:
        text += " %s"
        columns.append(each(cli.printable, fields["kernel"]))
        if "grid" in fields:
            text += "<<<%s, %s"
            columns += [each(dimensions, list(zip(*fields[key], strict=True))) for key in SHAPES]
            if fields.get("shared_bytes", (0,))[0]:  # all are 0, or none is
                text += ", %d"
                columns.append(fields["shared_bytes"])
            text += ">>>"
    more = []
    if "bytes" in fields:
        more.append("%s B" + (" %s" if "copy" in fields else ""))
        columns.append(each("{:,}".format, fields["bytes"]))
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
    """``8x2`` for [8, 2, 1]."""
    used = list(size)
    while len(used) > 1 and used[-1] == 1:
        used.pop()
    return "x".join(map(str, used))


def call_records(group: Group) -> Iterator[str]:
    """Of each call a line of JSON."""
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
            columns.append(each(json.dumps, values) if isinstance(values[0], str) else values)
    return map((text + "}\n").__mod__, zip(*columns, strict=True))


def call_rows(group: Group) -> Iterator[str]:
    """Of each call a line of CSV; what does not apply is empty."""
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
            columns.append(each(lambda text: cli.csv_cells((text,)), values) if texts else values)
    return map((",".join(parts) + "\n").__mod__, zip(*columns, strict=True))


# --- why ---


def story(
    record: Mapping[str, Any], text: str, causes: Sequence[Cause], origin_ns: int, several: bool
) -> Iterator[str]:
    """A slow call, and what its thread did inside. `text`: of `call_texts`; `causes`: see `why.explain`."""
    began = f"T+{(record['ts_ns'] - origin_ns) / 1e9:.6f} s"
    yield from _wrap(f"{began}  {text}: {table.duration(record['lat_ns'])}")
    who = f"{record['comm']} (pid {record['pid']})" if several else record["comm"]
    off = sum(cause.ns for cause in causes if not cause.timeless)
    said = [f"{table.duration(max(record['lat_ns'] - off, 0))} on the CPU", *map(cause_text, causes[:6])]
    yield from _wrap(f"thread {record['tid']} of {who}: {', '.join(said)}", 2)
    yield ""


def cause_text(cause: Cause) -> str:
    """``blocked in futex 686 us``, ``3 page faults``."""
    if cause.reason == why.DRIVER:
        return f"{cause.text} meanwhile" + (f" for {table.duration(cause.ns)}" if cause.ns else "")
    if cause.timeless:
        _, where, noun = cause.text.split(" ", 2) if cause.text.startswith("in ") else ("", "", cause.text)
        counted = table.count(cause.count, noun.removesuffix("s"))
        return f"in {where} {counted}" if where else counted
    times = f" ({cause.count:,} times)" if cause.count > 1 else ""
    return f"{cause.text} {table.duration(cause.ns)}{times}"


def reason(number: int, syscall: int, counts: Any) -> dict[str, Any]:
    """The fields of a record that say why: a word, the system call's name (null: none), how often, how long (null: it is no time)."""
    name = syscalls.name(syscall) if syscall >= 0 else None
    record = {"reason": REASONS[number], "syscall": name, "count": int(counts["count"])}
    times = {key: None if number in why.TIMELESS else int(counts[key]) for key in ("ns", "largest_ns")}
    return record | {"ns": times["ns"], "max_ns": times["largest_ns"]}


def cause_record(cause: Cause) -> dict[str, Any]:
    """The same of one call, where reasons are told by their text."""
    return {"what": cause.text, "count": cause.count, "ns": None if cause.timeless else cause.ns}


def slow_threads(slow: Sequence[tuple[Mapping[str, Any], Sequence[Cause]]], several: bool) -> Iterator[str]:
    """A row for each thread that made slow calls, with their causes."""
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
            "SLOW CALLS": number(len(mine)),
            "P50 us": us(times[(len(times) - 1) // 2]),
        }
        rows.append(cells | {"MAX us": us(times[-1]), "MOSTLY": spent.most_common(1)[0][0]})
    if rows:
        yield "which threads make the slow calls"
        yield from table.within(rows, left=("COMM", "MOSTLY"), cut=("MOSTLY", "COMM"))
        yield ""


def why_lines(
    groups: Sequence[tuple[str, int, Sequence[Cause]]], threads: Sequence[tuple[str, Sequence[Cause]]]
) -> Iterator[str]:
    """`groups`: of functions, and of gaps, what took long and how long it was in all (ns). `threads`: what each did in gaps."""
    rows = []
    for where, total, causes in groups:
        for cause in [cause for cause in causes if cause.tells(total)][:4]:
            timed = not cause.timeless
            rows.append(
                {
                    "WHERE": where,
                    "WHAT": cause.text,
                    "COUNT": number(cause.count) if cause.count else "-",  # it goes on
                    "TOTAL ms": ms(cause.ns) if timed else "-",
                    "MAX us": us(cause.largest_ns) if timed else "-",
                    # What has not ended is in no total yet.
                    "OF IT": percent(min(cause.ns, total), total) if timed and total else "-",
                }
            )
    if not rows:
        yield "no call, and no gap between launches, was off the CPU or had a page fault"
        yield ""
        return
    yield "why: what threads did inside of calls, and between launches, beside running"
    yield from table.within(rows, left=("WHERE", "WHAT"), cut=("WHERE", "WHAT"))
    yield ""
    for who, causes in threads:
        total = sum(cause.ns for cause in causes if not cause.timeless)
        said = [cause_text(cause) for cause in causes if cause.tells(total)]
        yield from _wrap(f"between launches {who} was: {', '.join(said[:4])}", 2)
    if threads:
        yield ""


def driver_record(happened: Happened, comm: str) -> dict[str, Any]:
    """`pid` and `comm` are null where it is nobody's own."""
    whose = {"pid": happened.pid or None, "comm": comm if happened.pid else None}
    times = {"ts_ns": happened.start_ns, "ns": happened.ns}
    return {"type": "driver", **times, **whose, "gpu": happened.gpu, "what": happened.what}


def driver_lines(found: Sequence[Happened], comm: Callable[[int], str]) -> Iterator[str]:
    """What AMD's driver did to the processes that are watched."""
    total: dict[tuple[int, int, str], list[int]] = {}
    for h in found:
        total.setdefault((h.pid, h.gpu, h.what), []).append(h.ns)
    if not total:
        return
    yield "what the GPU's driver did"
    rows = [
        {
            "PID": str(pid) if pid else "-",
            "COMM": comm(pid) if pid else "-",
            "GPU": str(gpu),
            "WHAT": what,
            "COUNT": number(len(times)),
            "TOTAL ms": ms(sum(times)) if any(times) else "-",
            "MAX us": us(max(times)) if any(times) else "-",
        }
        for (pid, gpu, what), times in sorted(total.items(), key=lambda item: -sum(item[1]))
    ]
    yield from table.within(rows, left=("COMM", "WHAT"), cut=("WHAT", "COMM"))
    yield ""


# --- the end ---


def device_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Whether there were times of kernels on the GPU, and what of them is not known."""
    if "device_times" not in summary:
        return
    times = summary["device_times"]
    if times is None:
        yield from table.wrap(f"no times of the GPU: {summary['no_device_times']}")
        return
    said = f"rocprofiler-sdk told of {table.count(times['dispatches'], 'kernel')} (untried on AMD hardware)"
    missing = (
        ("lost", "lost, as they came too fast"),
        ("unended", "not known to have ended"),
        ("without_call", "of no call that is known"),
    )
    parts = [f"{times[key]:,} {what}" for key, what in missing if times[key]]
    yield from table.wrap("; ".join((said, *parts)))


def coverage(summary: Mapping[str, Any]) -> Iterator[str]:
    """The last lines: what was counted, what was lost."""
    calls, lost = summary["calls"], summary["lost"]
    late = [library for library in summary["libraries"] if "late" in library]
    processes = table.count(summary["processes"], "process")
    if calls:
        said = f"counted {table.count(calls, 'call')} of {processes}"
    elif summary["abandoned"]:
        said = "counted nothing"
    elif summary["processes"]:
        said = f"counted nothing: no call of {processes} was meant"
    else:
        said = "counted nothing: no calls seen"
    if summary["abandoned"]:
        said += f"; {table.count(summary['abandoned'], 'call')} did not return"
    yield said + ("; none lost" if calls and not lost and not late else "")
    for library in late:
        pid, comm = library["late"]["pid"], library["late"]["comm"]
        who = f"{comm} (pid {pid})" if comm else f"process {pid}"
        yield from table.wrap(
            f"not counted: calls of {library['path']} by {who} in the first ms, until it had probes"
        )
    by = summary["lost_by"]
    if by["records"]:
        yield from table.wrap(f"lost: {table.count(by['records'], 'call')} came too fast to be told of each")
    if by["sums"] or by["calls"]:
        yield from table.wrap(
            f"lost: {table.count(by['sums'] + by['calls'], 'call')}, for which there was no room"
        )
    for key, noun, what in (
        ("lost_why", "time", "that threads were off the CPU, or that pages faulted"),
        ("lost_names", "name", "of kernels, for which there was no room"),
        ("lost_processes", "process", "of the command's or of -p's, more than can be followed"),
    ):
        if count := summary[key]:
            yield from table.wrap(f"lost: {table.count(count, noun)} {what}", 0)
    if missed := summary["missed"]:
        runs = ", ".join(f"{table.count(count, 'run')} of {name}" for name, count in missed.items())
        yield from table.wrap(f"lost: what the kernel was too busy to have programs see: {runs}", 0)
