"""Standard output or ``-o FILE``: bytes, lines for people, JSON Lines, cells of CSV."""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpubpf.errors import Error
from gpubpf.show import progress
from gpubpf.show.new_file import open_new
from gpubpf.show.table import WIDTH, printable

BATCH = 4096  # lines or records per write
_FORMULA = ("=", "+", "-", "@")  # first characters of formulas in spreadsheets


class Output:
    """Standard output or a file. Text is encoded in UTF-8; every call flushes.

    `closed` becomes true when the reader closes the pipe; later writes are dropped.
    `began` becomes true with the first write.
    """

    def __init__(self, path: str | None = None):
        self.closed = False
        self.began = False
        self._file: Any = None
        if path is None:
            return
        try:
            self._file = open(open_new(path), "wb", buffering=0)  # noqa: SIM115 (open as long as the tool runs)
        except OSError as error:
            raise Error(
                f"cannot write {printable(path)}: {error.strerror}; choose another file with -o"
            ) from None

    def close(self) -> None:
        """Complete the output. Nothing is written later."""

    @property
    def width(self) -> int:
        """The columns of the terminal, at least 80; 80 if the output does not go to a terminal."""
        if self._file is not None or sys.stdout is None or not sys.stdout.isatty():
            return WIDTH
        import shutil  # imported here because the import is slow

        return max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)

    def write(self, data: str | bytes) -> None:
        """Write all of `data`. Raises Error when the file cannot be written, for example because the disk is full."""
        self.began = True
        if self.closed:
            return
        raw = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
        view = memoryview(raw)
        try:
            if self._file is not None:
                _write_all(self._file, view)
            else:
                with progress.hidden():  # both may be the same terminal
                    _write_stdout(view)
        except BrokenPipeError:
            self.closed = True
            if self._file is None:
                drop_stdout()
        except OSError as error:
            raise Error(
                f"cannot write the results: {error.strerror}; free some space or choose another file with -o"
            ) from None

    def line(self, text: str = "") -> None:
        """Write one line for people. Control characters, such as those in a process's name, are escaped."""
        self.write(printable(text) + "\n")

    def lines(self, texts: Iterable[str]) -> None:
        """Write many lines for people, `BATCH` of them at a time."""
        for batch in _batches(printable(text) + "\n" for text in texts):
            self.write(batch)

    def record(self, **fields: Any) -> None:
        """Write one JSON Lines record."""
        self.records([fields])

    def records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write JSON Lines records, `BATCH` of them at a time."""
        import json

        for batch in _batches(json.dumps(record, separators=(",", ":")) + "\n" for record in records):
            self.write(batch)


def csv_cells(cells: Iterable[object]) -> str:
    """Return cells joined by commas, quoted where RFC 4180 requires it, with control characters escaped.

    Each element of a tuple is a separate cell. Text that a spreadsheet would evaluate as a formula gets an apostrophe, because
    processes choose their own names.
    """
    quoted = []
    for part in (part for cell in cells for part in (cell if isinstance(cell, tuple) else (cell,))):
        text = printable(str(part))
        if text.startswith(_FORMULA) and isinstance(part, str) and not _is_number(text):
            text = f"'{text}"
        quoted.append('"' + text.replace('"', '""') + '"' if any(char in text for char in ',"') else text)
    return ",".join(quoted)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def drop_stdout() -> None:
    """Send buffered output, and Python's flush at exit, to /dev/null, because the reader of standard output has gone."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError, AttributeError):
        pass


def _batches(texts: Iterable[str]) -> Iterator[str]:
    from itertools import islice

    rest = iter(texts)
    while batch := "".join(islice(rest, BATCH)):
        yield batch


def _write_stdout(view: memoryview) -> None:
    """Write all of `view` to standard output. Raises OSError."""
    if sys.stdout is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    sys.stdout.flush()
    target = getattr(sys.stdout, "buffer", None)
    if target is None:  # a test or a caller has replaced sys.stdout
        sys.stdout.write(bytes(view).decode())
    else:  # unbuffered: CPython 3.11 loses the rest of the buffer when a signal interrupts the write
        _write_all(getattr(target, "raw", target), view)


def _write_all(file: Any, view: memoryview) -> None:
    """Write all of `view`. Raises OSError."""
    while view:
        written = file.write(view)
        if written is None:  # a non-blocking terminal or pipe that is full
            select.select([], [file], [])
        view = view[written or 0 :]
