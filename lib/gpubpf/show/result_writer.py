"""Open a tool's results, and write them in the form that the user chose: text, JSON Lines (``--json``) or CSV (``--csv``).

out = open_results(options.output)
results = ResultWriter(options.output, out)
for _ in session.intervals(…):
    results.begin()                                     # -T
    if results.form == "text":
        out.lines(…)
    else:
        results.records(COUNT, found)                   # the objects of a record type
results.end(session.summary())
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpubpf.show.command_line import declared
from gpubpf.show.notices import note
from gpubpf.show.output import Output, csv_cells
from gpubpf.show.summary_text import summary_lines

if TYPE_CHECKING:
    from gpubpf.show.fields import Fields
    from gpubpf.show.parsed import OutputOptions


_opened: list[Output] = []  # by `open_results`; not complete yet


def open_results(options: OutputOptions) -> Output:
    """Open the output before anything else starts. `complete_results` completes it."""
    if options.dataset:
        from gpubpf.show.dataset import Dataset  # imported here because it is seldom needed

        out: Output = Dataset(options.dataset, options.tool, declared(options.records))
    else:
        out = Output(options.path)
    _opened.append(out)
    return out


@contextmanager
def complete_results() -> Iterator[None]:
    """When the block ends, however it ends, complete what was opened in it."""
    before = len(_opened)
    try:
        yield
    finally:
        opened = _opened[before:]
        del _opened[before:]
        for out in opened:
            out.close()


class ResultWriter:
    """Writes the parts of the output that all tools share: timestamps, the header of CSV, the summary.

    options     what the user chose
    json, csv   whether this form was chosen; neither: text
    form        "json", "csv" or "text"
    out         where everything goes
    now         returns the time for `ts_ns`
    """

    def __init__(
        self, options: OutputOptions, out: Output, now: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.options, self.out = options, out
        self.json, self.csv = options.json, options.csv
        self.form = "json" if options.json else "csv" if options.csv else "text"
        self._tool, self._timestamps, self._read_time = options.tool, options.timestamps, now
        self._now = 0
        self._headed = False
        self._noted: set[str] = set()

    def head(self, text: str | None) -> None:
        """If the output is text, begin it with a line about the whole measurement; None: no line."""
        if text and not self.json and not self.csv:
            self.out.line(text)

    def note_once(self, text: str) -> None:
        """Print a notice about the results, unless the same one was printed in an earlier interval."""
        if text not in self._noted:
            self._noted.add(text)
            note(self._tool, text)

    def begin(self) -> None:
        """Begin the report of an interval. With -T a text report begins with the time of day."""
        self._now = self._read_time()
        if self._timestamps and not self.json and not self.csv:
            self.out.line(time.strftime("%H:%M:%S"))

    @property
    def stamp(self) -> dict[str, int]:
        """The field `ts_ns` of a record with -T; {} otherwise."""
        return {"ts_ns": self._now} if self._timestamps else {}

    def header(self, columns: Sequence[str]) -> None:
        """Write the header of the CSV table once. With -T `ts_ns` is its first column."""
        if not self._headed:
            self._headed = True
            self.out.write(",".join((*self.stamp, *columns)) + "\n")

    @property
    def time_cell(self) -> bytes:
        """What a CSV line begins with: with -T the time."""
        return f"{self._now},".encode() if self._timestamps else b""

    def cells(self, *cells: object) -> str:
        """Return the first cells of a CSV line. With -T the time comes before them."""
        return csv_cells((*self.stamp.values(), *cells))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Write rows of the CSV table, below its header; None is an empty cell."""
        self.header(columns)
        lines = (self.cells(*("" if cell is None else cell for cell in row)) for row in rows)
        self.out.write("".join(line + "\n" for line in lines))

    def records(self, fields: Fields, found: Iterable[Any]) -> None:
        """Write the JSON records of objects, or their rows of the CSV table."""
        records = (fields.record(one) for one in found)
        if self.json:
            self.out.records(record | self.stamp for record in records)
        else:
            self.table(fields.columns, map(fields.row, records))

    def end(self, summary: Mapping[str, Any], lines: Iterable[str] | None = None) -> None:
        """Write the summary: the last record of JSON, or the last lines of text (default: `summary_lines`). CSV has none."""
        if self.json:
            self.out.record(**({"type": "summary", "tool": self._tool} | dict(summary)))
        elif not self.csv:
            self.out.lines(summary_lines(summary) if lines is None else lines)
