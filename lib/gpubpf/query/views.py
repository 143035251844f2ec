"""DuckDB views of the Parquet files that tools wrote below directories (`show/dataset.py`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpubpf.errors import Error, UsageError, missing_package
from gpubpf.show.table import printable

READY = os.path.join(os.path.dirname(__file__), "views.sql")
_WRITES = (b"COPY", b"EXPORT", b"ATTACH")  # they can be part of a question, and write files
_FILE = re.compile(r"/tool=(\w+)/day=[\d-]+/host=[^/]+/(\w+)-[^/]+\.parquet$")


@contextmanager
def connect(directories: Sequence[str]) -> Iterator[Any]:
    """Yield a DuckDB connection with the views. It can read the files below these directories, and no others.

    TOOL_TYPE, such as launchlate_launch: the records of a type. summaries: those of all tools. The others are in views.sql.
    Raises Error: a directory cannot be read, or has no records of tools.
    """
    try:
        import duckdb
    except ImportError as error:
        raise Error(missing_package(error)) from None
    files = found(directories)
    # DuckDB otherwise takes names that it does not know from Python's variables, and writes what memory cannot hold into files.
    safe: dict[str, str | bool | int | float | list[str]] = {
        "python_enable_replacements": False,
        "temp_directory": "",
    }
    settings = safe | {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    with duckdb.connect(":memory:", config=settings) as database:
        try:
            for (tool, kind), paths in files.items():
                _create(database, f"{tool}_{kind}", kind, paths)
            if ends := [path for (_, kind), paths in files.items() if kind == "summary" for path in paths]:
                _create(database, "summaries", "summary", ends)
            for _, statement in ready():
                try:
                    database.execute(statement)
                except (duckdb.CatalogException, duckdb.BinderException):
                    continue  # these directories lack the records that it is about
            allowed = [name for one in map(os.path.realpath, directories) for name in (one, _no_glob(one))]
            database.execute("SET allowed_directories = ?", [allowed])
            for setting in ("enable_external_access = false", "lock_configuration = true"):
                database.execute(f"SET {setting}")
            yield database
        except duckdb.Error as error:
            raise Error(in_one_line(error)) from None


def ask(database: Any, question: str) -> Any:
    """Return DuckDB's cursor with the answer to a question. Raises Error if it is not one question, or DuckDB refuses it."""
    import duckdb

    try:
        statements = database.extract_statements(question)
        kinds = [statement.type.name for statement in statements]
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
        return database.execute(statements[0])
    except duckdb.CatalogException as error:
        raise Error(f"{in_one_line(error)}; gpubpf query --list DIR lists the views") from None
    except duckdb.Error as error:
        raise Error(in_one_line(error)) from None


def found(directories: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Return the files below some directories by tool and type, sorted. Raises UsageError and Error."""
    files: dict[tuple[str, str], set[str]] = {}
    for directory in map(os.path.realpath, directories):
        if not os.path.isdir(directory):
            raise UsageError(
                f"{printable(directory)} is not a directory; give the DIR of a tool's --parquet DIR"
            )
        for place, _, names in os.walk(directory):
            for name in names:
                if (match := _FILE.search(path := os.path.join(place, name))) and os.path.isfile(path):
                    files.setdefault((match[1], match[2]), set()).add(path)
    if not files:
        where = ", ".join(map(printable, directories))
        raise Error(f"there are no records of tools in {where}; a tool writes them with --parquet DIR")
    return {key: sorted(files[key]) for key in sorted(files)}


def ready() -> Iterator[tuple[str, str]]:
    """Yield description and SQL statement of each ready view."""
    with open(READY, encoding="utf-8") as file:
        _, *parts = re.split(r"^-- (.*)\n(?=CREATE)", file.read(), flags=re.M)
    return iter(list(zip(parts[::2], parts[1::2], strict=True)))


def in_one_line(error: Exception) -> str:
    """Return what DuckDB says about an error, without the text of the question."""
    return " ".join(str(error).split("\n\nLINE")[0].split())


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
        f'CREATE VIEW "{name}" AS SELECT * EXCLUDE (filename), {columns} FROM '
        f"read_parquet([{listed}], hive_partitioning = false, union_by_name = true, filename = true)"
    )


def _no_glob(path: str) -> str:
    """Return a path as a pattern that matches this path alone: DuckDB takes paths for patterns."""
    return re.sub(r"[*?\[]", r"[\g<0>]", path)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
