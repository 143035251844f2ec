"""DuckDB views of the Parquet files that tools wrote below directories (`show/dataset.py`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gpubpf.errors import Error, UsageError, missing_package
from gpubpf.process import target_files
from gpubpf.show.files_below import files_below
from gpubpf.show.notices import note
from gpubpf.show.table import printable

READY = os.path.join(os.path.dirname(__file__), "views.sql")
_MAGIC = b"PAR1"  # the first and last bytes of a Parquet file
_MOST_NOTICES = 10  # about files that are left out
_WRITES = (b"COPY", b"EXPORT", b"ATTACH")  # they can be part of a question, and write files
_FILE = re.compile(r"/tool=(\w+)/day=[\d-]+/host=[^/]+/(\w+)-[^/]+\.parquet$")


@contextmanager
def connect(directories: Sequence[str], memory: int | None = None) -> Iterator[Any]:
    """Yield a DuckDB connection with the views. It can read the files with the records, and no others.

    TOOL_TYPE, such as launchlate_launch: the records of a type. summaries: those of all tools. The others are in views.sql.

    directories: the DIR of --parquet DIR.
    memory: the most that DuckDB may use, in bytes; None: 80 % of the machine's memory.

    Raises Error: a directory cannot be read, or has no records of tools.
    """
    with opened(memory) as database:
        files = add_records(database, directories)
        run_file(database, READY)
        lock(database, files)
        yield database


@contextmanager
def opened(memory: int | None = None) -> Iterator[Any]:
    """Yield a DuckDB connection that uses no network and writes no file. Turn DuckDB's errors into `Error`."""
    try:
        import duckdb
    except ImportError as error:
        raise Error(missing_package(error)) from None
    # DuckDB otherwise takes names that it does not know from Python's variables, and writes what memory cannot hold into files.
    settings: dict[str, str | bool | int | float | list[str]] = {
        "python_enable_replacements": False,
        "temp_directory": "",
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    if memory is not None:
        settings["memory_limit"] = f"{memory / (1 << 20)} MiB"
    try:
        with duckdb.connect(":memory:", config=settings) as database:
            try:
                yield database
            except duckdb.Error as error:
                if type(error) in (duckdb.Error, duckdb.InvalidInputException, duckdb.IOException) and (
                    path := _damaged(database)
                ):
                    raise Error(f"{printable(path)} is damaged; move it away") from None
                raise
    except duckdb.OutOfMemoryException:
        raise Error(
            "the question needs more memory than DuckDB may use; ask for less, or raise --memory"
        ) from None
    except duckdb.InterruptException:
        raise Error("the question took longer than --timeout allows; ask for less, or raise it") from None
    except duckdb.Error as error:
        raise Error(in_one_line(error)) from None


def add_records(database: Any, directories: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Create a view for each type of record below some directories, in the database's current schema. Return what `found` does."""
    import duckdb

    files = found(directories)
    try:
        _create_all(database, files)
    except (duckdb.InterruptException, duckdb.OutOfMemoryException):
        raise
    except duckdb.Error:
        files = _readable(database, files)
        _create_all(database, files)
    return files


def _create_all(database: Any, files: Mapping[tuple[str, str], Sequence[str]]) -> None:
    """Create the views of the records, also of those that exist."""
    for (tool, kind), paths in files.items():
        _create(database, f"{tool}_{kind}", kind, paths)
    if ends := [path for (_, kind), paths in files.items() if kind == "summary" for path in paths]:
        _create(database, "summaries", "summary", ends)


def run_file(database: Any, path: str) -> None:
    """Run the statements of an SQL file, except those about records that are missing."""
    import duckdb

    for _, statement in statements(path):
        try:
            database.execute(statement)
        except (duckdb.CatalogException, duckdb.BinderException):
            continue


def lock(database: Any, files: Mapping[tuple[str, str], Sequence[str]], configuration: bool = True) -> None:
    """Let a database read some files, and no others, from now on.

    A directory would not do: a question could read through a symbolic link there.

    files: see `found`.
    configuration: keep settings, too.
    """
    allowed = [name for paths in files.values() for path in paths for name in (path, _no_glob(path))]
    database.execute("SET allowed_paths = ?", [allowed])
    database.execute("SET enable_external_access = false")
    if configuration:
        database.execute("SET lock_configuration = true")


def ask(database: Any, question: str) -> Any:
    """Return DuckDB's cursor with the answer to a question. Raises Error if it is not one question, or DuckDB refuses it."""
    import duckdb

    try:
        asked = database.extract_statements(question)
        kinds = [statement.type.name for statement in asked]
        if len(kinds) != 1 or kinds[0] not in ("SELECT", "EXPLAIN"):
            raise UsageError(
                f"{printable(question[:40])!r} is {'not a question' if len(kinds) == 1 else f'{len(kinds)} statements'}; "
                "give one SELECT or FROM"
            )
        text = question.encode()
        tokens = [
            text[at:].split(maxsplit=1)[0] for at, kind in duckdb.tokenize(question) if kind.name == "keyword"
        ]
        if written := [word.decode() for word in tokens if word.upper().startswith(_WRITES)]:
            raise UsageError(f"{printable(written[0])} is not part of a question; give one SELECT or FROM")
        return database.execute(asked[0])
    except duckdb.CatalogException as error:
        for description, statement in statements(READY):
            if f"name {(view := statement.split()[2])} does" in str(error):
                raise Error(f"the records lack what the view {view} needs: {description}") from None
        raise Error(f"{in_one_line(error)}; gpubpf query --list DIR lists the views") from None


def found(directories: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Return the files below some directories by tool and type, sorted. A file that is cut off is left out, with a notice.

    Raises UsageError and Error."""
    files: dict[tuple[str, str], set[str]] = {}
    left_out = 0
    for directory in map(os.path.realpath, directories):
        if not os.path.isdir(directory):
            raise UsageError(
                f"{printable(directory)} is not a directory; give the DIR of a tool's --parquet DIR"
            )
        for place, names in files_below(directory):
            for name in names:
                path = os.path.join(place, name)
                if not (match := _FILE.search(path)):
                    continue
                if not (why := _defect(path)):
                    files.setdefault((match[1], match[2]), set()).add(path)
                    continue
                left_out += 1
                if left_out <= _MOST_NOTICES:
                    note("gpubpf", f"{path} {why}; its records are left out")
    if (more := left_out - _MOST_NOTICES) > 0:
        note("gpubpf", f"the records of {more:,} further file{'s' * (more > 1)} are left out")
    if not files:
        where = ", ".join(map(printable, directories))
        raise Error(f"there are no records of tools in {where}; a tool writes them with --parquet DIR")
    return {key: sorted(files[key]) for key in sorted(files)}


def statements(path: str) -> Iterator[tuple[str, str]]:
    """Yield description and SQL of each statement in a file. The description is the comment above the statement."""
    with open(path, encoding="utf-8") as file:
        _, *parts = re.split(r"^-- (.*)\n(?=CREATE|INSERT|UPDATE)", file.read(), flags=re.M)
    return iter(list(zip(parts[::2], parts[1::2], strict=True)))


def in_one_line(error: Exception) -> str:
    """Return what DuckDB says about an error, without the text of the question."""
    return " ".join(str(error).split("\n\nLINE")[0].split())


def _readable(
    database: Any, files: Mapping[tuple[str, str], Sequence[str]]
) -> dict[tuple[str, str], list[str]]:
    """Return the files whose footer DuckDB can read. Print a notice for each other one. Raises Error if none is left."""
    import duckdb

    def footer(path: str) -> bool:
        try:
            database.execute("SELECT count(*) FROM parquet_schema(?)", [_no_glob(path)]).fetchall()
        except duckdb.InterruptException:
            raise
        except duckdb.Error:
            note("gpubpf", f"{path} is damaged; its records are left out")
            return False
        return True

    left = {key: [path for path in paths if footer(path)] for key, paths in files.items()}
    if not any(left.values()):
        raise Error("all files with records of tools are damaged; measure again")
    return {key: paths for key, paths in left.items() if paths}


def _damaged(database: Any) -> str | None:
    """Return the first file of a database's views whose values DuckDB cannot read."""
    import duckdb

    views = database.sql("SELECT sql FROM duckdb_views() WHERE NOT internal").fetchall()
    for path in sorted({path for (sql,) in views for path in re.findall(r"'((?:[^']|'')+\.parquet)'", sql)}):
        try:
            database.execute(f"SELECT bit_xor(hash(COLUMNS(*))) FROM read_parquet('{path}')").fetchall()
        except (duckdb.InterruptException, duckdb.OutOfMemoryException):
            raise
        except duckdb.Error:
            return path.replace("''", "'")
    return None


def _defect(path: str) -> str:
    """Return why a file is not a Parquet file from beginning to end; "" if it is.

    Whoever owns the directory chooses what is there: a symbolic link could lead to anybody's file, and a pipe never answers."""
    try:
        with open(target_files.open_regular(path, links=False), "rb") as file:
            begins = file.read(len(_MAGIC))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - len(_MAGIC), 0))
            if begins == file.read(len(_MAGIC) + 1) == _MAGIC and size > 2 * len(_MAGIC):
                return ""
            return "is not a whole Parquet file"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _create(database: Any, name: str, kind: str, paths: Sequence[str]) -> None:
    """Create a view of some files. A file with other columns has null in those that it lacks.

    tool, day and host are parts of a path. The records of the type "summary" have the tool themselves."""
    listed = ", ".join(
        _quoted(re.sub(r"[*?\[]", r"[\g<0>]", path)) for path in paths
    )  # DuckDB takes paths for globs
    parts = {"tool": "", "day": "::DATE", "host": ""}
    if kind == "summary":
        del parts["tool"]
    columns = ", ".join(
        f"url_decode(regexp_extract(filename, '.*/{part}=([^/]+)/', 1)){its_type} AS {part}"
        for part, its_type in parts.items()
    )
    database.execute(
        f'CREATE OR REPLACE VIEW "{name}" AS SELECT * EXCLUDE (filename), {columns} FROM '
        f"read_parquet([{listed}], hive_partitioning = false, union_by_name = true, filename = true)"
    )


def _no_glob(path: str) -> str:
    """Return a path as a pattern that matches this path alone: DuckDB takes paths for patterns."""
    return re.sub(r"[*?\[]", r"[\g<0>]", path)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
