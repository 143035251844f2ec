"""Write memory accesses to a Parquet file, one row group at a time, so that memory use does not grow with the file.

    with parquet.Writer("app.parquet", timed=False) as file:
        file(accesses, where, None)        # a sink of access_log.AccessLog

Columns: launch u64, kernel, site u16 (65535: a larger number), source (``scale.cu:17``), op, space, address u64, width u32 (bytes),
block_x … block_z u32, thread_x … thread_z u16, pid u32, gpu u16, sm u16. With times, also ts_ns i64, null if unknown. Kernel,
source, op and space are strings; a row group stores each distinct string once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf import names
from gpubpf.ebpf.bytecode import KINDS, SPACES
from gpubpf.errors import Error, missing_package
from gpubpf.show.new_file import open_new
from gpubpf.show.table import printable

if TYPE_CHECKING:
    from gpubpf.memory.access_log import Accesses, SiteLabels

    Columns = dict[str, np.ndarray[Any, Any]]

ROWS = 1 << 19  # rows of a row group
MOST_TEXTS = 1 << 16  # maximum distinct kernels, and maximum distinct sources; further ones become "?"
NULL = np.iinfo(np.int64).min  # stands for an unknown time
_TYPES = {
    "launch": np.uint64, "kernel": np.int32, "site": np.uint16, "source": np.int32, "op": np.int8, "space": np.int8,
    "address": np.uint64, "width": np.uint32, "block_x": np.uint32, "block_y": np.uint32, "block_z": np.uint32,
    "thread_x": np.uint16, "thread_y": np.uint16, "thread_z": np.uint16, "pid": np.uint32, "gpu": np.uint16, "sm": np.uint16,
}  # fmt: skip
_INDICES = ("block_x", "block_y", "block_z", "thread_x", "thread_y", "thread_z")
_DELTA_ENCODED = ("address", *_INDICES, "ts_ns")


class _Texts:
    """Numbers distinct texts in the order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        if len(self._numbers) >= MOST_TEXTS:
            text = "?"
        return self._numbers.setdefault(text, len(self._numbers))

    def list(self) -> list[str]:
        return list(self._numbers)


class Writer:
    """Collects row groups, which a separate thread writes.

    A context manager: leaving it completes the file, even after an exception. Raises Error if pyarrow is not installed, or if the file
    cannot be written.
    """

    def __init__(self, path: str, timed: bool = False, rows: int = ROWS) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise Error(f"--parquet: {missing_package(error)}, or use --json") from None
        self._arrow, self.path, self._rows = pyarrow, path, rows
        types = {**_TYPES, **({"ts_ns": np.int64} if timed else {})}
        self._timed = timed
        self._spare = [self._empty_columns(types) for _ in range(2)]
        self._columns, self._count = self._spare.pop(), 0
        self._kernels, self._sources = _Texts(), _Texts()
        self._source_numbers: dict[int, tuple[SiteLabels, np.ndarray[Any, Any]]] = {}
        self._queue: queue.SimpleQueue[tuple[Columns, int] | None] = queue.SimpleQueue()
        self._free = threading.Semaphore(len(self._spare))
        self._failure: Exception | None = None
        self.rows = 0
        text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
        few = pyarrow.dictionary(pyarrow.int8(), pyarrow.string())
        arrow_types = {"kernel": text, "source": text, "op": few, "space": few}
        self._schema = pyarrow.schema(
            [(name, arrow_types.get(name) or pyarrow.from_numpy_dtype(kind)) for name, kind in types.items()]
        )
        try:
            file = open_new(path)
        except OSError as error:
            raise self._unwritable(str(error.strerror)) from None
        try:
            self._file = pyarrow.parquet.ParquetWriter(
                f"/proc/self/fd/{file}",
                self._schema,
                compression="zstd",
                compression_level=1,
                store_schema=False,  # readers get plain strings: the dictionaries differ between row groups
                # Addresses, indices and times mostly grow in small steps; everything else repeats.
                use_dictionary=[name for name in types if name not in _DELTA_ENCODED],
                column_encoding={name: "DELTA_BINARY_PACKED" for name in types if name in _DELTA_ENCODED},
            )
        except (OSError, pyarrow.ArrowException) as error:
            raise self._write_error(error) from None
        finally:
            os.close(file)
        self._thread = threading.Thread(target=self._write_all, name="gpubpf-parquet", daemon=True)
        self._thread.start()

    def _empty_columns(self, types: dict[str, Any]) -> Columns:
        return {name: np.empty(self._rows, kind) for name, kind in types.items()}

    def _write_error(self, error: Exception) -> Error:
        said = (
            os.strerror(error.errno)
            if isinstance(error, OSError) and error.errno
            else str(error).split("\n")[0]
        )
        return self._unwritable(said)

    def _unwritable(self, why: str) -> Error:
        return Error(f"cannot write {printable(self.path)}: {why}; choose another file with --parquet")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except Error:
            if kind is None:
                raise

    def __call__(self, accesses: Accesses, where: SiteLabels, times: np.ndarray[Any, Any] | None) -> None:
        """Add accesses. Raises Error if the file cannot be written."""
        place = accesses.place
        sources = self._source_numbers.get(id(where))
        if sources is None:
            numbers = np.array([self._sources.number(text) for text in where.texts], np.int32)
            if len(self._source_numbers) >= MOST_TEXTS:
                self._source_numbers.clear()
            sources = self._source_numbers[id(where)] = where, numbers
        given: dict[str, Any] = {
            "launch": accesses.launch,
            "kernel": self._kernels.number(names.demangle(place.mangled).short),
            "site": accesses.site,
            "source": sources[1][where.codes(accesses.site)],
            "op": accesses.kind,
            "space": accesses.space,
            "address": accesses.address,
            "width": accesses.width,
            **dict(zip(_INDICES, accesses.coordinates(), strict=True)),
            "pid": place.pid,
            "gpu": place.gpu,
            "sm": accesses.sm,
        }
        if self._timed:
            given["ts_ns"] = NULL if times is None else times
        at = 0
        while at < len(accesses):
            n = min(len(accesses) - at, self._rows - self._count)
            for name, column in self._columns.items():
                value = given[name]
                column[self._count : self._count + n] = (
                    value[at : at + n] if isinstance(value, np.ndarray) else value
                )
            at, self._count = at + n, self._count + n
            if self._count == self._rows:
                self._hand_over()

    def _hand_over(self) -> None:
        """Pass the row group to the thread, and wait for free columns."""
        self._queue.put((self._columns, self._count))
        self.rows += self._count
        self._free.acquire()
        if self._failure is not None:
            raise self._write_error(self._failure)
        self._columns, self._count = self._spare.pop(), 0

    def _write_all(self) -> None:
        while (work := self._queue.get()) is not None:
            columns, count = work
            try:
                if self._failure is None:
                    self._write(columns, count)
            except Exception as error:  # the next _hand_over raises it
                self._failure = error
            self._spare.append(columns)
            self._free.release()

    def _write(self, columns: Columns, count: int) -> None:
        arrow = self._arrow
        texts = {"kernel": self._kernels.list(), "source": self._sources.list(), "op": KINDS, "space": SPACES}
        arrays = []
        for field in self._schema:
            column = columns[field.name][:count]
            if field.name in texts:
                dictionary = arrow.array(texts[field.name], arrow.string())
                arrays.append(arrow.DictionaryArray.from_arrays(column, dictionary, safe=False))
            else:
                arrays.append(arrow.array(column, mask=column == NULL if field.name == "ts_ns" else None))
        self._file.write_table(arrow.Table.from_arrays(arrays, schema=self._schema), row_group_size=count)

    def close(self) -> None:
        """Write the last row group and complete the file. Raises Error."""
        if self._file is None:
            return
        file, failure = self._file, None
        try:
            if self._count and self._failure is None:
                self._hand_over()
        except Error as error:
            failure = error
        self._queue.put(None)
        self._thread.join()
        self._file = None
        try:
            file.close()
        except (OSError, self._arrow.ArrowException) as error:
            failure = failure or self._write_error(error)
        if failure is None and self._failure is not None:
            failure = self._write_error(self._failure)
        if failure is not None:
            raise failure


def check(path: str) -> None:
    """Check that a file can be written by writing an empty one: better to fail now than after the measurement.

    Raises Error.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        return  # a pipe or device: the empty Parquet file could not be removed again
    with contextlib.closing(Writer(path, rows=1)):
        pass
