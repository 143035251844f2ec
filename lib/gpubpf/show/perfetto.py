"""Write traces for ui.perfetto.dev and chrome://tracing, in Chromium's "Trace Event Format" (JSON).

In the trace, a traced process has its host threads. Each of its GPUs is a separate process, with a thread for each stream. An arrow
leads from the call of a launch to the kernel.
"""

from __future__ import annotations

import json
from typing import Any

from gpubpf.errors import Error
from gpubpf.show.new_file import open_new
from gpubpf.show.table import printable

NS = 1000  # ns in a us, the unit of the format


class Trace:
    """A trace that is being written; `close` ends it. All times are in ns on one clock. Raises Error if FILE cannot be written."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._named: set[tuple[int, int | None]] = set()
        # (process, thread) → for each row, its open slices: begin, end and the error of the end.
        self._rows: dict[tuple[int, int], list[list[tuple[int, int, int]]]] = {}
        self._first = True
        try:
            self._file = open(open_new(path), "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 (closed by close)
            self._file.write('{"displayTimeUnit":"ns","traceEvents":[\n')
            self._file.flush()  # fail before the measurement if the file cannot be written
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> Error:
        return Error(f"cannot write {printable(self._path)}: {error.strerror}; choose another file")

    def _event(self, **event: Any) -> None:
        try:
            self._file.write(("" if self._first else ",\n") + json.dumps(event, separators=(",", ":")))
        except OSError as error:
            raise self._failed(error) from None
        self._first = False

    def name(self, process: int, text: str, thread: int | None = None, order: int = 0) -> None:
        """Name a process, or one of its threads, once. `order`: its position among the others."""
        if (process, thread) in self._named:
            return
        self._named.add((process, thread))
        what = "process" if thread is None else "thread"
        place = {"pid": process} | ({} if thread is None else {"tid": thread})
        self._event(ph="M", name=f"{what}_name", args={"name": printable(text)}, **place)
        self._event(ph="M", name=f"{what}_sort_index", args={"sort_index": order}, **place)

    def place(
        self, process: int, thread: int, begin: int, end: int, errors: tuple[int, int] = (0, 0)
    ) -> tuple[int, int]:
        """Return the row of the thread (from 0) for a slice, and where the slice begins.

        Viewers drop a slice that partly overlaps another one of its row. When the overlap is within the `errors` of both times, the
        slice is moved behind the other.
        """
        rows = self._rows.setdefault((process, thread), [])
        for number, row in enumerate(rows):
            across = [part for part in row if part[1] > begin and not (part[0] <= begin and end <= part[1])]
            if any(part[1] > begin + errors[0] + part[2] for part in across):
                continue
            shift = max((part[1] - begin for part in across), default=0)
            around = [part for part in row if part[1] > begin + shift]
            if begin + shift >= row[-1][0] and (not around or end + shift <= around[-1][1]):
                rows[number] = [*around, (begin + shift, end + shift, errors[1])]
                return number, begin + shift
        rows.append([(begin, end, errors[1])])
        return len(rows) - 1, begin

    def slice(
        self, process: int, thread: int, name: str, begin: int, length: int, kind: str, **arguments: Any
    ) -> None:
        """Write a slice: something with a duration."""
        self._event(
            ph="X", pid=process, tid=thread, name=printable(name), cat=kind, ts=begin / NS, dur=max(length, 0) / NS,
            args=arguments,
        )  # fmt: skip

    def arrow(self, number: int, begin: tuple[int, int, int], end: tuple[int, int, int]) -> None:
        """Write an arrow between the slices at two points, each (process, thread, time)."""
        for phase, (process, thread, at), more in (("s", begin, {}), ("f", end, {"bp": "e"})):
            self._event(
                ph=phase, pid=process, tid=thread, ts=at / NS, id=number, name="launch", cat="launch", **more
            )

    def close(self) -> None:
        """Finish the file."""
        try:
            self._file.write("\n]}\n")
            self._file.close()
        except OSError as error:
            raise self._failed(error) from None
