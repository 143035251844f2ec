"""Format percentages, times in ms, counts and sentences."""

from __future__ import annotations

from collections.abc import Iterator

from gpubpf.show import table


def percent(part: int, whole: int) -> str:
    """Return a share as a whole percentage, or "-" if the whole is 0."""
    return f"{round(100 * part / whole)} %" if whole else "-"


def wrap(sentence: str, indent: int = 0) -> Iterator[str]:
    """Wrap a sentence, but never between a number and its percent sign."""
    yield from table.wrap(sentence, indent, glue=" %")


def ms(ns: int) -> str:
    """Format a time in ms, in at most eight columns."""
    value = ns / 1e6
    return f"{value:.{2 if value < 1000 else 1 if value < 100_000 else 0}f}"


def exact(count: int) -> str:
    """Format a count exactly, without separators from ten million on."""
    return f"{count:,}" if count < 10_000_000 else str(count)
