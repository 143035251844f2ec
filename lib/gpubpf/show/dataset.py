"""Write the JSON records of a tool as Parquet files: ``--parquet DIR``.

out = Dataset(DIR, "threadhist", RECORDS)       # an `Output` for JSON Lines
out.records(…); out.close()

A record goes to DIR/tool=TOOL/day=DAY/host=HOST/TYPE-RUN-N.parquet. DAY: the day, in UTC, on which the file was begun. RUN: when the
tool started, its process ID, and a random number; the column `run` has it, too. pandas, Polars, DuckDB and Spark read the names of
the directories as columns.

Files are complete at any moment. The newest records of each type are kept in memory. About once a second, all of them are written
again into a new file, which replaces the last one. When they are many, the next file begins. A tool that is killed loses the records
of the last second, or of ten times as long as a write takes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gpubpf import __version__
from gpubpf.errors import Error, missing_package
from gpubpf.kernel import privileges
from gpubpf.show.fields import Fields, Type
from gpubpf.show.new_file import Directory
from gpubpf.show.notices import note
from gpubpf.show.output import Output
from gpubpf.show.table import printable

SCHEMA_VERSION = "1"  # a later one has the same columns and more, or another number
FILE_BYTES = 32 << 20  # of JSON text, in one file
BUFFER_BYTES = 16 << 20  # of JSON text that waits; a tool that is faster has to wait
PAUSE = 1.0  # seconds between two writes
WRITE_SHARE = 10  # a pause lasts at least this many times as long as the last write
STALLED = 60.0  # seconds without any write, while records wait: the directory does not answer
ROW_GROUP = 1 << 17
_TYPE = re.compile(rb'\{"type":"(\w+)"')


class Dataset(Output):
    """An `Output` that takes JSON Lines records, and writes them as Parquet files.

    directory: DIR; it is created if need be.
    tool: the tool's name.
    declared: the records that the tool writes.

    Raises Error if pyarrow is missing, or if the directory cannot be written.
    """

    def __init__(self, directory: str, tool: str, declared: Iterable[Fields]):
        super().__init__()
        try:
            import pyarrow
            import pyarrow.json
            import pyarrow.parquet
        except ImportError as error:
            raise Error(missing_package(error)) from None
        self._arrow = pyarrow
        self._directory, self._tool = directory, tool
        started = time.gmtime()
        self.run = f"{time.strftime('%Y%m%dT%H%M%SZ', started)}-{os.getpid()}-{os.urandom(3).hex()}"
        self._places = {one.name: _Place(pyarrow, one) for one in declared}
        self._rest = b""  # a line that is not complete yet
        self._changed = threading.Condition()
        self._waiting = 0  # bytes of records that are not written yet
        self._ending = False
        self._progress = time.monotonic()  # when the thread that writes last began or ended something
        self._failure: Error | None = None
        self.rows = 0  # that were written
        self._out_of_range = 0
        with self._writable():
            opened = Directory.make(directory, *self._partition())
            opened.remove_abandoned()
            opened.close()
        self._thread = threading.Thread(target=self._write_now_and_then, name="gpubpf-parquet", daemon=True)
        self._thread.start()

    def _partition(self) -> tuple[str, ...]:
        day = time.strftime("%Y-%m-%d", time.gmtime())
        return f"tool={self._tool}", f"day={day}", f"host={_escaped(socket.gethostname())}"

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Turn errors of files into `Error`."""
        try:
            yield
        except (OSError, self._arrow.ArrowException) as error:
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            do = "free some space" if getattr(error, "errno", None) == errno.ENOSPC else "check the directory"
            raise Error(
                f"cannot write into {printable(self._directory)}: {why}; {do} or choose another one with --parquet"
            ) from None

    # --- the tool's thread ---

    def write(self, data: str | bytes) -> None:
        """Take JSON Lines. Raises Error when earlier ones could not be written."""
        self.began = True
        whole, ended, self._rest = (
            self._rest + (data.encode() if isinstance(data, str) else data)
        ).rpartition(b"\n")
        if not ended:
            return
        found: dict[str, list[bytes]] = {}
        for kind, text in _by_type(whole):
            found.setdefault(kind, []).append(text)
        with self._changed:
            for kind, texts in found.items():
                self._places[kind].waiting += texts
            self._waiting += len(whole)
            self._changed.notify_all()
            since = time.monotonic()
            while self._waiting > BUFFER_BYTES and self._failure is None:
                self._changed.wait(1)
                self._check_progress(since)
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Write everything, and print how much it was. Raises Error if it cannot be written."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        since = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(1)
            self._check_progress(since)
        if self._failure is not None:
            raise self._failure
        if self._out_of_range:
            note(
                self._tool,
                f"{self._out_of_range} integers beyond 64 bits, with the sign, are null in Parquet",
            )
        records = "1 record" if self.rows == 1 else f"{self.rows:,} records"
        note(self._tool, f"wrote {records} into {printable(self._directory)} (run {self.run})")

    def _check_progress(self, since: float) -> None:
        """Raise Error if the thread that writes is stuck, as on a network file system whose server is away.

        since: when this thread began to wait for it.
        """
        if self._thread.is_alive() and time.monotonic() - max(since, self._progress) > STALLED:
            raise Error(
                f"cannot write into {printable(self._directory)}: it has not answered for {STALLED:.0f} s; "
                "choose another directory with --parquet"
            )

    # --- the thread that writes ---

    def _write_now_and_then(self) -> None:
        pause = PAUSE
        try:  # the records have names that traced processes choose; root's thread keeps only what it needs for a user's directory
            privileges.Privileges().keep((privileges.DAC_OVERRIDE,), True)
        except Error as error:
            self._failure = error
        while True:
            with self._changed:
                while not self._waiting and not self._ending:
                    self._changed.wait()
                self._changed.wait_for(lambda: self._ending or self._waiting > BUFFER_BYTES, pause)
                ending = self._ending
                taken = {kind: place.take() for kind, place in self._places.items() if place.waiting}
                taken_bytes = self._waiting
                began = self._progress = time.monotonic()
            try:
                for kind, texts in taken.items():
                    self._add(kind, texts)
                    self._progress = time.monotonic()
            except Error as error:
                self._failure = error
            except Exception as error:  # a defect: the tool's thread reports it
                self._failure = Error(f"cannot write records as Parquet: {error}")
            pause = max(PAUSE, WRITE_SHARE * (time.monotonic() - began))
            with self._changed:
                self._waiting -= taken_bytes
                self._changed.notify_all()
                if self._failure is not None or (ending and not self._waiting):
                    return

    def _add(self, kind: str, texts: list[bytes]) -> None:
        """Write the records of a type into its newest file."""
        place = self._places[kind]
        table, out_of_range = place.table(texts)
        self._out_of_range += out_of_range
        place.tables.append(table)
        place.bytes += sum(map(len, texts))
        whole = self._arrow.concat_tables(place.tables).combine_chunks()
        place.tables = [whole]
        run = self._arrow.array([self.run], self._arrow.string())
        whole = whole.append_column("run", self._arrow.repeat(run[0], len(whole)))
        about = {"gpubpf.version": __version__, "gpubpf.schema": SCHEMA_VERSION, "gpubpf.type": kind}
        whole = whole.replace_schema_metadata(about | {"gpubpf.tool": self._tool, "gpubpf.run": self.run})
        with self._writable():
            if place.directory is None:
                place.directory = Directory.make(self._directory, *self._partition())
            with place.directory.replacing(f"{kind}-{self.run}-{place.files:04}.parquet") as stream:
                self._arrow.parquet.write_table(whole, stream, compression="zstd", row_group_size=ROW_GROUP)
        self.rows += len(table)
        if place.bytes > FILE_BYTES:
            place.begin_another()


class _Place:
    """The records of one type: those that wait, and those in the newest file.

    waiting: JSON Lines.
    tables: the records of the newest file. bytes: how much JSON text that was.
    directory: of the newest file; None: no file has been begun.
    files: number of complete files.
    """

    def __init__(self, arrow: Any, declared: Fields):
        self._arrow = arrow
        self._fields: dict[str, Type] = declared.schema["properties"]
        self.schema = arrow.schema([_column(arrow, name, of) for name, of in self._fields.items()])
        self._flat = all(map(_is_flat, self._fields.values()))
        self._read = arrow.json.ParseOptions(explicit_schema=self.schema, unexpected_field_behavior="error")
        self.waiting: list[bytes] = []
        self.tables: list[Any] = []
        self.bytes, self.files = 0, 0
        self.directory: Directory | None = None

    def take(self) -> list[bytes]:
        """Return the records that wait, and forget them."""
        texts, self.waiting = self.waiting, []
        return texts

    def begin_another(self) -> None:
        """Leave the newest file as it is; the next record begins another one."""
        if self.directory is not None:
            self.directory.close()
        self.directory, self.tables, self.bytes = None, [], 0
        self.files += 1

    def table(self, texts: list[bytes]) -> tuple[Any, int]:
        """Return the records in JSON Lines as a table, and how many of their numbers do not fit into 64 bits."""
        if self._flat:
            with suppress(self._arrow.ArrowInvalid):  # such as a number that does not fit
                block = self._arrow.json.ReadOptions(block_size=1 << 24)
                source = self._arrow.BufferReader(b"\n".join(texts))
                read = self._arrow.json.read_json(source, block, self._read)
                return self._arrow.Table.from_arrays(read.columns, schema=self.schema), 0
        values = _Values()
        columns: dict[str, list[Any]] = {name: [] for name in self._fields}
        for line in b"\n".join(texts).split(b"\n"):
            record = json.loads(line)
            for name, of in self._fields.items():
                columns[name].append(values.fitting(record.get(name), of))
        arrays = [self._arrow.array(columns[field.name], field.type) for field in self.schema]
        return self._arrow.Table.from_arrays(arrays, schema=self.schema), values.beyond


class _Values:
    """Makes values for Arrow from those of JSON.

    beyond: number of integers that do not fit into 64 bits, and became None.
    """

    def __init__(self) -> None:
        self.beyond = 0

    def fitting(self, value: Any, of: Type) -> Any:
        """Return the value of a type for Arrow."""
        if value is None:
            return None
        kind = _kind(of)
        if not kind:
            return json.dumps(value, separators=(",", ":"))
        if kind == "array":
            return [self.fitting(one, of["items"]) for one in value]
        if kind == "object" and "properties" in of:
            return {name: self.fitting(one, of["properties"][name]) for name, one in value.items()}
        if kind == "object":
            return [
                (_unicode(name), self.fitting(one, of["additionalProperties"])) for name, one in value.items()
            ]
        if kind == "string":
            return _unicode(value)
        if kind == "number":
            return float(value)
        if kind == "integer" and not -(1 << 63) <= value < 1 << 63:
            self.beyond += 1
            return None
        return value


def _unicode(text: str) -> str:
    """Return a text that UTF-8 has. A file's name may have bytes that are not UTF-8, which Python keeps as surrogates."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _is_flat(of: Type) -> bool:
    """Return whether the values of a type are the same for Arrow as for JSON."""
    kind = _kind(of)
    if kind == "array":
        return _is_flat(of["items"])
    if kind == "object":
        return "properties" in of and all(map(_is_flat, of["properties"].values()))
    return bool(kind)


def _by_type(text: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the type of records and their lines."""
    first = _TYPE.match(text)
    assert first is not None, text[:80]
    if text.count(b"\n" + first[0]) == text.count(b"\n"):  # all of one type, which is usual for many
        yield first[1].decode(), text
        return
    for line in text.split(b"\n"):
        match = _TYPE.match(line)
        assert match is not None, line[:80]
        yield match[1].decode(), line


def _column(arrow: Any, name: str, of: Type) -> Any:
    """Return a field of an Arrow schema. Its metadata has the unit and the description that the JSON schema has."""
    about: dict[str, str] = {key: of[key] for key in ("unit", "description") if key in of}
    if _is_any(of):
        about["gpubpf.content"] = "JSON"
    return arrow.field(name, _arrow_type(arrow, of), metadata=about or None)


def _arrow_type(arrow: Any, of: Type) -> Any:
    """Return the Arrow type for a JSON schema. What may be anything is JSON text."""
    simple = {
        "integer": arrow.int64(),
        "number": arrow.float64(),
        "boolean": arrow.bool_(),
        "string": arrow.string(),
    }
    kind = _kind(of)
    if kind == "array":
        return arrow.list_(_arrow_type(arrow, of["items"]))
    if kind == "object" and "properties" in of:
        return arrow.struct([_column(arrow, name, its) for name, its in of["properties"].items()])
    if kind == "object":
        return arrow.map_(arrow.string(), _arrow_type(arrow, of["additionalProperties"]))
    return simple.get(kind, arrow.string())


def _kind(of: Type) -> str:
    """Return the word for a type: "array", "object" …; "": it may be anything."""
    kinds = of.get("type", [])
    kinds = [kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "null"]
    return kinds[0] if len(kinds) == 1 else ""


def _is_any(of: Type) -> bool:
    return not _kind(of)


def _escaped(name: str) -> str:
    """Return a host's name for a directory's name, as Hive writes it."""
    return re.sub(
        r"[^\w.-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), name, flags=re.A
    )
