"""Traces that ui.perfetto.dev and chrome://tracing open: the "Trace Event Format" of Chromium, as JSON.

Each traced process has its host threads, and beside them one more process for each of its GPUs, with a thread for each stream. An
arrow leads from the call of a launch to the kernel.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpubpf.cli import printable
from gpubpf.errors import Error

NS = 1000  # a µs, which the format counts in


class Trace:
    """A trace that is being written; `close` ends it. Times in ns on one clock. Raises Error where FILE cannot be written."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._named: set[tuple[int, int | None]] = set()
        self._first = True
        try:
            self._file = Path(path).open("w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 (closed by close)
            self._file.write('{"displayTimeUnit":"ns","traceEvents":[\n')
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
