"""Traces that ui.perfetto.dev and chrome://tracing open: the "Trace Event Format" of Chromium, as JSON.

Each traced process has its host threads, and beside them one more process for each of its GPUs, with a thread for each stream. An
arrow leads from the call of a launch to the kernel.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpubpf.errors import Error
from gpubpf.show.table import printable

NS = 1000  # a µs, which the format counts in


class Trace:
    """A trace that is being written; `close` ends it. Times in ns on one clock. Raises Error where FILE cannot be written."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._named: set[tuple[int, int | None]] = set()
        # Of each thread: what is open in each row, with begin, end and the end's error.
        self._rows: dict[tuple[int, int], list[list[tuple[int, int, int]]]] = {}
        self._first = True
        try:
            self._file = Path(path).open("w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 (closed by close)
            self._file.write('{"displayTimeUnit":"ns","traceEvents":[\n')
            self._file.flush()  # what cannot be written is known before anything is measured
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
        """What a process or one of its threads is called; told once. `order`: where it stands among its like."""
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
        """Where a slice is to be: in which row of the thread, from 0, and its begin. Viewers drop a slice that overlaps another of
        its row without lying in it. What overlaps by no more than its begin and the other's end may be wrong comes behind it."""
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
        """Something that lasted."""
        self._event(
            ph="X", pid=process, tid=thread, name=printable(name), cat=kind, ts=begin / NS, dur=max(length, 0) / NS,
            args=arguments,
        )  # fmt: skip

    def arrow(self, number: int, begin: tuple[int, int, int], end: tuple[int, int, int]) -> None:
        """From the slice that runs at one (process, thread, time) to that at another."""
        for phase, (process, thread, at), more in (("s", begin, {}), ("f", end, {"bp": "e"})):
            self._event(
                ph=phase, pid=process, tid=thread, ts=at / NS, id=number, name="launch", cat="launch", **more
            )

    def close(self) -> None:
        try:
            self._file.write("\n]}\n")
            self._file.close()
        except OSError as error:
            raise self._failed(error) from None
