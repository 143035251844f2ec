"""The summary that hipsnoop and cudasnoop print: sentences and tables by function and by kernel, and rows of CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpubpf import names
from gpubpf.calls import formatting
from gpubpf.show import cli, kernel_names, table
from gpubpf.show.table import us

if TYPE_CHECKING:
    from gpubpf.calls.statistics import CallStatistics, Durations
    from gpubpf.show.owner_columns import OwnerColumns

MOST_ROWS = 24  # maximum rows of a table without -v
LEAST_SHARE = 0.01  # share of the time; sentences omit smaller shares


def time_and_errors(rows: Sequence[CallStatistics], what: str = "call") -> Iterator[str]:
    """Yield sentences about which functions took the time and which failed."""
    total = sum(row.times.ns for row in rows)
    count = sum(row.times.count for row in rows)
    if not count:
        return
    by_name: dict[str, int] = {}
    for row in rows:
        by_name[row.name] = by_name.get(row.name, 0) + row.times.ns
    largest = sorted(by_name.items(), key=lambda item: -item[1])[:3]
    parts = [
        f"{formatting.percent(ns, total)} in {name}" for name, ns in largest if ns >= LEAST_SHARE * total
    ]
    off = sum(row.times.off_ns for row in rows)
    said = f"{table.count(count, what)} took {table.duration(total)} in all: {', '.join(parts)}"
    if off >= LEAST_SHARE * total:
        said += f"; {formatting.percent(off, total)} of it off the CPU"
    yield from formatting.wrap(said)
    failed: dict[str, tuple[int, int, str]] = {}
    for row in rows:
        bad, all_, error = failed.get(row.name, (0, 0, ""))
        failed[row.name] = bad + row.errors, all_ + row.times.count, row.error_name or error
    failed = {name: entry for name, entry in failed.items() if entry[0]}
    if failed:
        order = sorted(failed.items(), key=lambda item: -item[1][0])
        codes = {error for _, _, error in failed.values()}
        same = f" ({codes.pop()})" if len(codes) == 1 else ""
        said_of = [
            f"{name} ({bad:,} of {all_:,}{'' if same else f', last {error}'})"
            for name, (bad, all_, error) in order[:4]
        ]
        more = f" and {table.count(len(order) - 4, 'other function')}" if len(order) > 4 else ""
        errors = sum(bad for bad, _, _ in failed.values())
        yield from formatting.wrap(f"{table.count(errors, 'call')} failed{same}: {', '.join(said_of)}{more}")


def function_table(
    rows: Sequence[CallStatistics], whose: OwnerColumns, everything: bool = False
) -> Iterator[str]:
    """Yield the table of functions. `everything`: show all rows instead of the first MOST_ROWS."""
    shown = rows if everything else rows[:MOST_ROWS]
    cells = [
        {
            "API": row.name,
            "COUNT": formatting.exact(row.times.count),
            "ERRORS": formatting.exact(row.errors),
            "TOTAL ms": formatting.ms(row.times.ns),
        }
        | percentiles(row.times)
        | {"OFF-CPU": formatting.percent(row.times.off_ns, row.times.ns)}
        for row in shown
    ]
    yield from _table("latency, us", cells, shown, whose, "API")
    yield from _left_out(rows, shown, "function")


def kernel_table(
    rows: Sequence[CallStatistics], whose: OwnerColumns, everything: bool = False
) -> Iterator[str]:
    """Yield the table of kernels, with the gaps before their launches."""
    shown = rows if everything else rows[:MOST_ROWS]
    labels = names.labels(row.kernel.mangled for row in shown if row.kernel is not None)
    failed = any(row.errors for row in shown)
    cells = [
        {
            "KERNEL": labels[row.kernel.mangled] if row.kernel is not None else row.name,
            "LAUNCHES": formatting.exact(row.times.count),
        }
        | ({"ERRORS": formatting.exact(row.errors)} if failed else {})
        | {"TOTAL ms": formatting.ms(row.gaps.ns)}
        | percentiles(row.gaps)
        | {"OFF-CPU": formatting.percent(row.gaps.off_ns, row.gaps.ns)}
        for row in shown
    ]
    if any(row.runs.count for row in shown):
        for cell, row in zip(cells, shown, strict=True):
            del cell["TOTAL ms"]
            if failed:
                del cell["P99"]
            cell |= {f"EXEC {key}": percentiles(row.runs)[key] for key in ("P50", "MAX")}
    yield from _table("gap since the thread's last launch, us", cells, shown, whose, "KERNEL")
    yield from _left_out(rows, shown, "kernel")


def _table(
    above: str,
    cells: Sequence[dict[str, str]],
    rows: Sequence[CallStatistics],
    whose: OwnerColumns,
    name: str,
) -> Iterator[str]:
    """Yield a table whose column `name` takes the remaining width. above: the title over the columns P50 to MAX."""
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
    fitted = kernel_names.fitted((cell[name] for cell in cells), room)
    titles = {key: key for key in cells[0]}
    end = table.WIDTH - sum(widths.get(key, 0) for key in ("OFF-CPU", "EXEC P50", "EXEC MAX"))
    yield f"{above:>{end}}"
    for cell in (titles, *cells):
        line = ""
        for key, value in cell.items():
            if key == name:
                line += f"{fitted.get(value, value):<{room}}"
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


def percentiles(times: Durations) -> dict[str, str]:
    """Return the cells P50, P99 and MAX in µs."""
    found = times.distribution() or {}
    return {key.upper(): us(found.get(key)) for key in ("p50", "p99", "max")}
