"""Gather what a report shows: report.sql aggregates the records, and here every list is cut to a bounded length."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpubpf.errors import Error, UsageError
from gpubpf.query import views
from gpubpf.query.limits import time_limit
from gpubpf.report.sources import Sources
from gpubpf.show.files_below import files_below
from gpubpf.show.table import printable

SQL = os.path.join(os.path.dirname(__file__), "report.sql")
# The tables of report.sql that become tables of the page: the order of rows, and the most rows. Facts of kernels and lines are one row
# for each.
LISTS: Mapping[str, tuple[str, int]] = {
    "findings": ("weight DESC, kernel, source, finding", 100),
    "kernels": ("", 500),
    "lines": ("", 2000),
    "about": ("runs", 1),
    "runs": ("day DESC, run DESC", 200),
    "missing": ("launches DESC", 50),
    "timelines": ("gpu_ns DESC, run", 8),
    "moments": ("run, bin, kernel", 30_000),
    "latencies": ("run, bin, half_octave", 60_000),
    "threads": ("imbalance DESC, kernel, work_kind, blocks, block_threads, y, x", 6 * 64 * 128),
}
_WEIGHTS = (
    "gpu_ns",
    "wasted_bytes",
    "lost",
    "instructions",
    "requests",
)  # what makes a kernel or line important
_LINE = re.compile(r"(.+):(\d+)$")


def gather(
    directories: Sequence[str],
    sources: Sequence[str] = (),
    memory: int | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Return what a report of some directories shows, for JSON. Names are printable.

    sources: directories with the source files of the programs.
    memory: the most that DuckDB may use, in bytes; None: 80 % of the machine's memory.
    timeout: the most that reading the records may take, in seconds; None: any time.

    Raises Error if there are no records, or none that a report shows.
    """
    found = _read(directories, memory, timeout)
    if not any(found[name] for name in ("kernels", "lines", "runs")):
        raise Error(
            "a report shows what launchlate, memtrace, warpdiv, threadhist and others keep; there is nothing of them"
        )
    found["directories"] = [printable(os.path.basename(os.path.realpath(one))) for one in directories]
    found["files"] = _files(found["lines"], Sources(sources))
    return found


def _read(
    directories: Sequence[str], memory: int | None, timeout: float | None, again: bool = False
) -> dict[str, Any]:
    """Return the lists of a report. Read once more if files were replaced meanwhile: DuckDB then finds parts of both in them."""
    started = time.time()
    try:
        with views.opened(memory) as database, time_limit(database, timeout):
            files = views.add_records(database, directories)
            views.lock(database, files, configuration=False)
            views.run_file(database, SQL)
            return _lists(database)
    except UsageError:
        raise
    except Error as error:
        late = timeout is not None and time.time() - started >= timeout
        replaced = (
            [] if late else _changed_since(directories, started - 0.1)
        )  # file systems have coarse clocks
        if not replaced:
            raise
        if again:
            raise Error(
                f"{printable(replaced[0])} was replaced while it was read ({error}); make the report when nothing writes there"
            ) from None
    return _read(directories, memory, timeout, again=True)


def _changed_since(directories: Sequence[str], moment: float) -> list[str]:
    """Return the Parquet files below some directories that were written or replaced since a moment."""
    changed = []
    for directory in directories:
        for place, names in files_below(directory):
            for path in (os.path.join(place, name) for name in names if name.endswith(".parquet")):
                with contextlib.suppress(OSError):  # it has been removed
                    if os.lstat(path).st_ctime >= moment:
                        changed.append(path)
    return changed


def _lists(database: Any) -> dict[str, Any]:
    """Return the rows of each list, cut to its length."""
    made = {name for (name,) in database.sql("SELECT table_name FROM duckdb_tables()").fetchall()}
    found: dict[str, Any] = {"left_out": {}}
    for name, (order, most) in LISTS.items():
        if name not in made:
            rows: list[dict[str, Any]] = []
        elif order:
            rows = _rows(database, f"FROM {name} ORDER BY {order} LIMIT {most + 1}")
        else:
            rows = _by_owner(database, name, most)
        if len(rows) > most:
            found["left_out"][name] = most
        found[name] = [{key: _shown(value) for key, value in row.items()} for row in rows[:most]]
    return found


def _rows(database: Any, question: str) -> list[dict[str, Any]]:
    answer = database.execute(question)
    names = [column[0] for column in answer.description]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


def _by_owner(database: Any, name: str, most: int) -> list[dict[str, Any]]:
    """Return the facts of the most important kernels or lines: one row for each, and one more if there are more."""
    keys = ("kernel", "mangled", "full_name") if name == "kernels" else ("kernel", "source")
    listed = ", ".join(keys)
    # importance: the largest share of any sum that the kernel or line has
    importance = f"max(value / nullif(total, 0)) FILTER (WHERE fact IN {_WEIGHTS})"
    chosen = f"""
        WITH totals AS (SELECT fact, sum(value) AS total FROM {name} GROUP BY fact)
        SELECT {listed}, coalesce({importance}, 0) AS importance, map_from_entries(list((fact, value))) AS facts
        FROM {name} JOIN totals USING (fact)
        WHERE value IS NOT NULL
        GROUP BY {listed}
        ORDER BY importance DESC, {listed}
        LIMIT {most + 1}
    """
    return [{key: row[key] for key in keys} | row["facts"] for row in _rows(database, chosen)]


def _shown(value: Any) -> Any:
    """Return a value for the page: text without control characters, and numbers that JSON has."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return value if value is None or isinstance(value, int) else float(value)


def _files(lines: Sequence[Mapping[str, Any]], sources: Sources) -> list[dict[str, Any]]:
    """Return the source files that the facts are about: their text, if it was found, and the facts of each line."""
    files: dict[str, dict[str, Any]] = {}
    for row in lines:
        if match := _LINE.match(row["source"]):
            file = files.setdefault(match[1], {"name": match[1], "text": None, "facts": {}})
            file["facts"].setdefault(match[2], []).append(
                {key: value for key, value in row.items() if key != "source"}
            )
    for name, file in files.items():
        file["text"], file["why"] = sources.text(name, list(map(int, file["facts"])))
    return list(files.values())
