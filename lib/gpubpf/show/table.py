"""Format tables, bars, sentences and numbers for people."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

WIDTH = 80
_SPACE = "\u2420"  # stands for a space that must not end a line
_BEFORE_UNIT = r"(?<=\d) (?=%|(?:[KMGT]?B|[num]?s)\b)"
LEAST = 8  # a name is not cut to fewer columns
COMM = 20  # maximum characters of a process's name in a sentence; a name has up to 15, but escapes make it longer


def printable(text: str) -> str:
    """Return `text` with control characters escaped: names of processes may contain terminal control sequences."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def lines(headers: Sequence[str], rows: Sequence[Sequence[object]], left: Sequence[str] = ()) -> list[str]:
    """Return a header line and a line for each row. Columns are as wide as their widest cell, with two spaces between them.

    The columns named in `left` align left, all others right. Control characters, such as line ends in names, are escaped.
    """
    import tabulate

    if not rows:
        return ["  ".join(headers)]
    alignment = ["left" if header in left else "right" for header in headers]
    tabulate.MIN_PADDING = 0  # no extra width for headers
    rows = [[printable(str(cell)) for cell in row] for row in rows]
    text = tabulate.tabulate(rows, headers, tablefmt="plain", colalign=alignment, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


def within(
    rows: Sequence[Mapping[str, object]],
    left: Sequence[str] = (),
    drop: Sequence[str] = (),
    cut: Sequence[str] = ("KERNEL", "COMM"),
    gap: int = 2,
    width: int = WIDTH,
) -> list[str]:
    """Return rows (by column name) as `lines` does, if possible no wider than a terminal.

    If the rows are too wide, the columns in `drop` are left out one by one. Then names in the columns in `cut` are shortened.
    Different names in the column KERNEL stay different.

    gap: spaces between columns.
    width: columns of the terminal.
    """
    if not rows:
        return []
    cells = [{name: printable(str(cell)) for name, cell in row.items()} for row in rows]
    widths = {name: max(len(name), *(len(row[name]) for row in cells)) for name in cells[0]}

    def surplus() -> int:
        return sum(widths.values()) + gap * (len(widths) - 1) - width

    for name in (*drop, *cut):
        if surplus() <= 0:
            break
        if name in drop:
            widths.pop(name, None)
        elif name in widths:
            widths[name] = max(widths[name] - surplus(), min(widths[name], max(len(name), LEAST)))
    if "KERNEL" in widths:
        from gpubpf.show.kernel_names import fitted  # imported here: not before probes are live

        kernels = fitted((row["KERNEL"] for row in cells), widths["KERNEL"])
        cells = [row | {"KERNEL": kernels[row["KERNEL"]]} for row in cells]
        widths["KERNEL"] = max(map(len, ("KERNEL", *kernels.values())))
    made = []
    for row in ({name: name for name in widths}, *cells):
        parts = (f"{fit(row[name], n):{'<' if name in left else '>'}{n}}" for name, n in widths.items())
        made.append((" " * gap).join(parts).rstrip())
    return made


def cut_first(
    rows: Sequence[Mapping[str, object]], left: Sequence[str], cut: Sequence[str], drop: Sequence[str]
) -> list[str]:
    """Return rows as `within` does, but first cut names. Leave columns out only if the rows are then still too wide."""
    made = within(rows, left, cut=cut)
    return made if max(map(len, made), default=0) <= WIDTH else within(rows, left, drop, cut)


def bar(value: float, largest: float, width: int) -> str:
    """Return `value` as asterisks; `largest` fills `width`. A small value above 0 is a dot."""
    length = int(value / largest * width + 0.5) if largest > 0 else 0
    return "*" * length or ("." if value > 0 else "")


def with_bars(rows: Sequence[str], values: Sequence[float], largest: float, width: int = 80) -> list[str]:
    """Return a table's header and lines with a bar behind each line: up to 28 columns wide, if there is room."""
    longest = max(map(len, rows))
    room = min(28, width - longest - 4)
    if room < 4:
        return list(rows)
    barred = [
        f"{row:<{longest}}  |{bar(value, largest, room):<{room}}|"
        for row, value in zip(rows[1:], values, strict=True)
    ]
    return [rows[0], *barred]


def ordinal(number: int) -> str:
    """Return ``2nd``, ``3rd``, ``11th``, ``21st``."""
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number:,}{'th' if number // 10 % 10 == 1 else ends.get(number % 10, 'th')}"


def count(number: int, noun: str) -> str:
    """Return ``1 launch`` or ``23 launches``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"


def fit(text: str, width: int) -> str:
    """Return `text` with control characters escaped. If it is then longer than `width`, it loses its middle."""
    from gpubpf.show.kernel_names import without_middle

    return without_middle(printable(text), width)


def fit_end(start: str, text: str) -> str:
    """Return a line that begins with `start`; `text` loses its middle if the line is wider than a terminal."""
    return start + fit(text, max(WIDTH - len(start), LEAST))


def process(comm: str, pid: int) -> str:
    """Return ``app (pid 1234)``."""
    return f"{fit(comm, COMM) or '?'} (pid {pid})"


def wrap(sentence: str, indent: int = 0, width: int = 80, glue: str = "") -> list[str]:
    """Return a sentence as lines of at most `width` columns; all but the first are indented further.

    A number and its unit stay together. Control characters are escaped.

    glue: a text with a space at which no line may end.
    """
    import textwrap  # imported here because the import is slow

    sentence = re.sub(_BEFORE_UNIT, _SPACE, printable(sentence))
    if glue:
        sentence = sentence.replace(glue, glue.replace(" ", _SPACE))
    lines = textwrap.wrap(
        sentence,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_SPACE, " ") for line in lines]


def size(count: float) -> str:
    """Return bytes as ``512 B``, ``1.50 KB`` or ``96.0 MB``; K, M … are powers of 1024."""
    return _scaled(count, 1024, 1024, ("B", "KB", "MB", "GB", "TB"))


def number(count: float) -> str:
    """Return ``31,250`` or ``1.25 M``: at most seven characters."""
    return _scaled(count, 100_000, 1000, ("", "k", "M", "G", "T"))


def _scaled(value: float, most: int, step: int, units: Sequence[str]) -> str:
    """Return a value as an integer if it is below `most`, otherwise with three digits and a unit."""
    if value < most:
        return f"{value:,.0f} {units[0]}".rstrip()
    at = 0
    while value >= 999.5 and at < len(units) - 1:
        value, at = value / step, at + 1
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {units[at]}"


def duration(ns: float) -> str:
    """Return ``752 ns``, ``1.25 us`` or ``13.2 ms``: three digits."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= 0.9995 * size:
            value = ns / size
            return f"{value:.{max(0, 3 - len(str(int(value + 0.0005))))}f} {unit}"
    return f"{ns:.0f} ns"


def moment(ns: int) -> str:
    """Return a point in time, exact to 0.1 us: ``605.0 us``, ``310.2833 ms``."""
    for unit, size, digits in (("s", 10**9, 7), ("ms", 10**6, 4)):
        if abs(ns) >= size:
            return f"{ns / size:.{digits}f} {unit}"
    return f"{ns / 1000:z.1f} us"


def us(ns: int | None) -> str:
    """Return a time in us, from 10 ms on with its unit: at most seven characters."""
    if ns is None:
        return "-"
    size, value = abs(ns), ns / 1000
    if size < 100_000:
        return f"{value:z.2f}"
    if size < 9_999_950:
        return f"{value:.1f}"
    if size < 999_500_000:
        return f"{value / 1e3:.{1 if size < 99_950_000 else 0}f}ms"
    return f"{value / 1e6:.2f}s" if size < 999_995_000_000 else f"{value / 1e6:.0f}s"


def with_unit(ns: int | None) -> str:
    """Return a time with its unit, for a sentence; "-" for an unknown time. The time may be negative."""
    if ns is None:
        return "-"
    return f"-{duration(-ns)}" if ns < 0 else duration(ns)
