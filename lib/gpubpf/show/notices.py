"""Notices and errors on standard error: one line each, which begins with the tool's name."""

from __future__ import annotations

import sys

from gpubpf.show import progress
from gpubpf.show.table import printable


def note(tool: str, text: str) -> None:
    """Print a notice: something that the user should know about the result or the measurement."""
    complain(tool, f"note: {text}")


def complain(tool: str, text: str) -> None:
    """Print an error in one line. The measurement continues when standard error is closed or full."""
    if sys.stderr is None:
        return
    try:
        with progress.hidden():
            sys.stderr.write(printable(f"{tool}: {text}") + "\n")
            sys.stderr.flush()
    except (OSError, ValueError):
        pass
