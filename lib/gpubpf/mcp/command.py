"""The command `gpubpf mcp`: its options."""

from __future__ import annotations

import argparse
import importlib
import os

from gpubpf.show import cli
from gpubpf.show.table import printable

DESCRIPTION = "Serve the tools to programs that talk the Model Context Protocol, such as assistants."
EXAMPLES = """examples:
    gpubpf mcp                      serve on standard input and output
    gpubpf mcp --longest 10 runs    measure for 10 s at most, and answer
                                    questions about runs
    sudo gpubpf mcp                 also processes of other users

Configuration of a client:
    {"mcpServers": {"gpubpf": {"command": "gpubpf", "args": ["mcp"]}}}

The client can list processes and kernels, measure running processes, and ask
questions in SQL about DIR. It cannot start programs or write files.
"""


def add_options(made: cli.Parser) -> None:
    """Add the options of the command to its parser."""
    made.add_argument(
        "--longest",
        type=cli.seconds,
        default=60.0,
        metavar="S",
        help="a measurement takes at most S seconds (default: 60)",
    )
    made.add_argument(
        "directories",
        nargs="*",
        metavar="DIR",
        help="directories of --parquet DIR, about which a client may ask questions",
    )


def run(args: argparse.Namespace, made: cli.Parser) -> int:
    """Serve until standard input ends. Return the exit status. Raises ImportError without the Python package mcp."""
    if missing := [one for one in args.directories if not os.path.isdir(one)]:
        made.error(f"{printable(missing[0])} is not a directory")
    importlib.import_module("mcp")  # first: an error names this package, not one that pip installs with it
    from gpubpf.mcp import server

    server.build(args.directories, args.longest).run("stdio")
    return 0
