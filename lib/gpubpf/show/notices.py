"""Notices and errors on standard error. Each begins with the tool's name, and is one line; a terminal gets notices wrapped."""

from __future__ import annotations

import sys

from gpubpf.show import progress
from gpubpf.show.table import printable, wrap


def note(tool: str, text: str) -> None:
    """Print a notice: something that the user should know about the result or the measurement."""
    line = f"{tool}: note: {text}"
    _print("\n".join(wrap(line)) if progress.is_terminal() else printable(line))


def complain(tool: str, text: str) -> None:
    """Print an error in one line."""
    _print(printable(f"{tool}: {text}"))


def _print(text: str) -> None:
    """Write to standard error. The measurement continues when that is closed or full."""
    if sys.stderr is None:
        return
    try:
        with progress.hidden():
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
    except (OSError, ValueError):
        pass
