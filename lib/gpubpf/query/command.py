"""The command `gpubpf query`: its options, and what it prints."""

from __future__ import annotations

import argparse
from decimal import Decimal
from math import isfinite
from typing import Any

from gpubpf.errors import UsageError
from gpubpf.query.limits import add_limits, time_limit
from gpubpf.show import cli
from gpubpf.show.option_values import parse_results
from gpubpf.show.parsed import OutputOptions
from gpubpf.show.table import printable

DESCRIPTION = "Ask questions in SQL about the records that tools kept with --parquet DIR."
EXAMPLES = """examples:
    launchlate -v --parquet runs -- ./app
    gpubpf query --list runs        which views there are, and their columns
    gpubpf query 'FROM slowest_launches LIMIT 5' runs
    gpubpf query 'SELECT kernel, count(*) FROM launchlate_launch
                  GROUP BY kernel' node1/runs node2/runs
    gpubpf query --csv 'FROM worst_lines' runs > lines.csv

exit status: 0, also if nothing was found; 1 if the records or the question
are wrong; 2 if the command line is wrong.
"""
MOST_ROWS = 1000  # of a table for people
_NUMBERS = ("NUMBER", "DOUBLE", "FLOAT", "BIGINT", "INTEGER", "HUGEINT", "UBIGINT", "UINTEGER", "SMALLINT")


def add_options(made: cli.Parser) -> None:
    """Add the options of the command to its parser."""
    made.add_argument("--list", action="store_true", help="list the views and their columns; no SQL is given")
    made.add_argument(
        "-o",
        dest="output",
        type=parse_results,
        metavar="FILE",
        help="write the answer to FILE (default, or -: standard output)",
    )
    form = made.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON Lines: one object for each row")
    form.add_argument("--csv", action="store_true", help="print the answer as CSV")
    add_limits(made)
    made.add_argument(
        "words",
        nargs="+",
        metavar="SQL DIR",
        help="the question in DuckDB's SQL, and directories of --parquet DIR",
    )


def run(args: argparse.Namespace, made: cli.Parser) -> int:
    """Run the command. Return its exit status. Raises Error for what DuckDB refuses."""
    from gpubpf.query import views

    question, directories = ("", args.words) if args.list else (args.words[0], args.words[1:])
    if not directories:
        made.error("a DIR is missing; give the DIR of a tool's --parquet DIR")
    options = cli.Options.of(args).output
    out = cli.open_results(options)
    with views.connect(directories, args.memory) as database, time_limit(database, args.timeout):
        if args.list:
            _list(database, options, out)
            return 0
        _write(views.ask(database, question), options, out)
    return 0


def _list(database: Any, options: OutputOptions, out: cli.Output) -> None:
    """Print the views, the ready ones first: what each is about, and its columns."""
    from textwrap import wrap

    from gpubpf.query import views

    about = {statement.split()[2]: description for description, statement in views.statements(views.READY)}
    database.execute(
        "CREATE TEMP TABLE ready AS SELECT unnest(?) AS name, unnest(?) AS about",
        [[*about], [*about.values()]],
    )
    answer = views.ask(
        database,
        """
        SELECT table_name AS view, coalesce(any_value(ready.about), 'records') AS about, list(column_name) AS columns
        FROM duckdb_columns() LEFT JOIN ready ON ready.name = table_name
        WHERE NOT internal AND table_name <> 'ready'
        GROUP BY table_name
        ORDER BY any_value(ready.about) IS NULL, view
        """,
    )
    if options.json or options.csv:
        _write(answer, options, out)
        return
    for view, description, columns in answer.fetchall():
        out.lines(
            [
                f"{view}: {description}",
                *wrap(" ".join(columns), 76, initial_indent="    ", subsequent_indent="    "),
            ]
        )


def _write(answer: Any, options: OutputOptions, out: cli.Output) -> None:
    """Write the rows of an answer as JSON, CSV or a table."""
    names = [column[0] for column in answer.description]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two columns of the answer are called {printable(twice[0])}; rename one with AS")
    if options.json:
        while rows := answer.fetchmany(10_000):
            out.records(dict(zip(names, map(_plain, row), strict=True)) for row in rows)
        return
    if options.csv:
        out.write(cli.csv_cells(names) + "\n")
        while rows := answer.fetchmany(10_000):
            cells = (
                cli.csv_cells([("" if value is None else _text(value)) for value in row]) for row in rows
            )
            out.write("".join(f"{line}\n" for line in cells))
        return
    from gpubpf.show import table

    rows = answer.fetchmany(MOST_ROWS + 1)
    shown = [["-" if value is None else _shown(value) for value in row] for row in rows[:MOST_ROWS]]
    left = [column[0] for column in answer.description if str(column[1]) not in _NUMBERS]
    out.lines(table.lines(names, shown, left))
    if len(rows) > MOST_ROWS:
        cli.note("gpubpf query", f"only {MOST_ROWS:,} rows are shown; --json and --csv print all")


def _text(value: Any) -> str:
    """Return a value for CSV."""
    import json

    return json.dumps(_plain(value)) if isinstance(value, (dict, list)) else str(value)


def _shown(value: Any) -> str:
    """Return a value for people."""
    return f"{value:.6g}" if isinstance(value, float) and abs(value) < 1e6 else _text(value)


def _plain(value: Any) -> Any:
    """Return a value that JSON has."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (float, Decimal)):
        return float(value) if isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
