"""Tables and bars for people: aligned, units in the header, nothing wider than it has to be."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from gpubpf import cli


def lines(headers: Sequence[str], rows: Sequence[Sequence[object]], left: Sequence[str] = ()) -> list[str]:
    """A header line and one line for each row: columns as wide as their widest cell, two spaces between them.

    Numbers and words align right, the columns named in `left` align left. What a process named itself may hold ends of lines.
    """
    import tabulate

    if not rows:
        return ["  ".join(headers)]
    alignment = ["left" if header in left else "right" for header in headers]
    tabulate.MIN_PADDING = 0  # headers need no more room than cells
    rows = [[cli.printable(str(cell)) for cell in row] for row in rows]
    text = tabulate.tabulate(rows, headers, tablefmt="plain", colalign=alignment, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


def bar(value: float, largest: float, width: int) -> str:
    """`value` as asterisks, `largest` filling `width`; something that is not nothing shows at least a dot."""
    length = int(value / largest * width + 0.5) if largest > 0 else 0
    return "*" * length or ("." if value > 0 else "")


def with_bars(rows: Sequence[str], values: Sequence[float], largest: float, width: int = 80) -> list[str]:
    """A table's header and lines with a bar behind each line, as wide as there is room, at most 28 columns."""
    longest = max(map(len, rows))
    room = min(28, width - longest - 4)
    if room < 4:
        return list(rows)
    barred = [
        f"{row:<{longest}}  |{bar(value, largest, room):<{room}}|"
        for row, value in zip(rows[1:], values, strict=True)
    ]
    return [rows[0], *barred]


def count(number: int, noun: str) -> str:
    """``1 launch``, ``23 launches``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"


def fit(text: str, width: int) -> str:
    """`text`, cut in its middle where it is longer than `width`."""
    if len(text) <= width:
        return text
    front = (width - 3) * 2 // 3
    return f"{text[:front]}...{text[len(text) - (width - 3 - front) :]}"


def wrap(sentence: str, indent: int = 0, width: int = 80) -> list[str]:
    """A sentence as lines of at most `width` columns, the second and later ones indented further."""
    return textwrap.wrap(
        sentence,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
