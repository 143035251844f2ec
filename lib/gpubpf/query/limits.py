"""Limits of a question: memory and time."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpubpf.show import cli
from gpubpf.show.option_values import parse_size


def add_limits(made: argparse.ArgumentParser) -> None:
    """Add --memory and --timeout to the parser of a command."""
    made.add_argument(
        "--memory",
        type=parse_size,
        metavar="SIZE",
        help="let DuckDB use up to SIZE, such as 4G (default: 80 %% of the machine's memory)",
    )
    made.add_argument("--timeout", type=cli.seconds, metavar="S", help="give up after S seconds")


@contextmanager
def time_limit(database: Any, seconds: float | None) -> Iterator[None]:
    """Interrupt the questions of a database after some seconds; None: never."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, database.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
