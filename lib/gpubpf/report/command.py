"""The command `gpubpf report`: its options, and writing the page."""

from __future__ import annotations

import argparse
import os

from gpubpf.query.limits import add_limits
from gpubpf.show import cli
from gpubpf.show.option_values import parse_file
from gpubpf.show.table import printable, size

DESCRIPTION = "Write one HTML page about the records that tools kept with --parquet DIR."
EXAMPLES = """examples:
    launchlate -v --parquet runs -- ./app
    memtrace --parquet runs/ -- ./app
    gpubpf report runs -o report.html
    gpubpf report runs --source src -o report.html
                                    with the source, annotated line by line

The page has everything inside and loads nothing from a network.
"""


def add_options(made: cli.Parser) -> None:
    """Add the options of the command to its parser."""
    made.add_argument(
        "-o",
        dest="output",
        type=parse_file,
        required=True,
        metavar="FILE",
        help="write the page to FILE, such as report.html",
    )
    made.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="DIR",
        help="directory with the program's source files, to show them annotated; may be given several times",
    )
    made.add_argument("--title", default="gpubpf report", help="title of the page")
    add_limits(made)
    made.add_argument("directories", nargs="+", metavar="DIR", help="directories of --parquet DIR")


def run(args: argparse.Namespace, made: cli.Parser) -> int:
    """Run the command. Return its exit status. Raises Error for records that cannot be read."""
    from gpubpf.report import facts, page

    if missing := [one for one in args.source if not os.path.isdir(one)]:
        made.error(f"--source {printable(missing[0])} is not a directory")
    text = page.text(facts.gather(args.directories, args.source, args.memory, args.timeout), args.title)
    cli.open_results(cli.Options.of(args).output).write(text)
    cli.note("gpubpf", f"wrote {printable(args.output)} ({size(len(text))})")
    return 0
