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
_FILE = re.compile(r"tool=(\w+)/day=[\d-]+/host=[^/]+/(\w+)-[^/]+\.parquet")


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
    settings: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    with duckdb.connect(":memory:", config=settings) as database:
        try:
            for (tool, kind), paths in files.items():
                _create(database, f"{tool}_{kind}", paths)
            if summaries := [
                path for (_, kind), paths in files.items() if kind == "summary" for path in paths
            ]:
                _create(database, "summaries", summaries)
            for _, statement in ready():
                try:
                    database.execute(statement)
                except (duckdb.CatalogException, duckdb.BinderException):
                    continue  # these directories lack the records that it is about
            database.execute("SET allowed_directories = ?", [[os.path.realpath(one) for one in directories]])
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
        return database.execute(statements[0])
    except duckdb.CatalogException as error:
        raise Error(f"{in_one_line(error)}; gpubpf query --list DIR lists the views") from None
    except duckdb.Error as error:
        raise Error(in_one_line(error)) from None


def found(directories: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Return the files below some directories by tool and type, sorted. Raises UsageError and Error."""
    files: dict[tuple[str, str], list[str]] = {}
    for directory in map(os.path.realpath, directories):
        if not os.path.isdir(directory):
            raise UsageError(
                f"{printable(directory)} is not a directory; give the DIR of a tool's --parquet DIR"
            )
        for place, _, names in os.walk(directory):
            for name in names:
                if match := _FILE.search(path := os.path.join(place, name)):
                    files.setdefault((match[1], match[2]), []).append(path)
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


def _create(database: Any, name: str, paths: Sequence[str]) -> None:
    """Create a view of some files. A file with other columns has null in those that it lacks."""
    listed = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
    database.execute(
        f'CREATE VIEW "{name}" AS SELECT * FROM '
        f"read_parquet([{listed}], hive_partitioning = true, union_by_name = true, "
        "hive_types = {tool: VARCHAR, day: DATE, host: VARCHAR})"
    )
