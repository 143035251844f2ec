"""Draw stacks as a flame graph: one SVG file that a browser shows, with tooltips, zoom and search (flame_graph.js).

A box is a function in one context of callers. Its width is the weight of the stacks that go through it, and the box below it is its
caller. Names come from traced programs, so all are escaped.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from gpubpf.launches.frames import NATIVE, PYTHON, RANGE, Frame
from gpubpf.record import Record
from gpubpf.show import table
from gpubpf.show.table import printable

KERNEL, PROCESS = "kernel", "process"  # kinds of boxes that are not frames of a host stack
WIDTH, ROW, CHARACTER = 1200, 17, 7.25  # pixels of the picture, a box's height, and a character
_ABOVE, _BELOW = 40, 22  # pixels for the title and the buttons, and for what a search found
_LEAST = 0.1  # pixels: a narrower box is left out
_HUES = {
    NATIVE: (15, 40),
    PYTHON: (90, 50),
    RANGE: (275, 30),
    KERNEL: (195, 30),
    PROCESS: (0, 1),
}  # first hue, number of hues
_STYLE = (
    "text { font: 12px monospace } #title { font-size: 16px; text-anchor: middle } .button, .box { cursor: pointer }"
    " .box:hover rect { stroke: black } .below { opacity: 0.5 } .match rect { fill: magenta }"
)


class _Calls:
    """A function with the functions that it calls, and the weight of all stacks through it."""

    def __init__(self) -> None:
        self.weight = 0
        self.called: dict[tuple[str, str, str], _Calls] = {}  # by name, file and kind


class _Box(Record):
    """A box. depth: callers below it. x, width: as a part of the picture's width."""

    name: str
    file: str
    kind: str
    weight: int
    depth: int
    x: float
    width: float


def svg(stacks: Iterable[tuple[Sequence[Frame], int, str]], by: str) -> str:
    """Return the picture.

    stacks: for each stack, its frames, outermost first, its weight and its process. With several processes, each has a box.
    by: what the weight is, "time" (in ns) or "launches".
    """
    stacks = [stack for stack in stacks if stack[1]]
    several = len({process for _, _, process in stacks}) > 1
    whole = _Calls()
    for frames, weight, process in stacks:
        calls = whole
        calls.weight += weight
        for frame in (*([Frame(process, "", kind=PROCESS)] if several else []), *frames):
            calls = calls.called.setdefault((frame.name, frame.file, frame.kind), _Calls())
            calls.weight += weight
    boxes = [*_boxes(whole)]
    height = _ABOVE + (max((box.depth for box in boxes), default=0) + 1) * ROW + _BELOW
    title = f"{'GPU time' if by == 'time' else 'launches'} by host stack: {_amount(whole.weight, by)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text id="title" x="{WIDTH // 2}" y="20">{title}</text>',
        '<text id="reset" class="button" x="8" y="20" visibility="hidden">Reset zoom</text>',
        f'<text id="search" class="button" x="{WIDTH - 60}" y="20" visibility="hidden">Search</text>',
        f'<text id="found" x="8" y="{height - 7}"> </text>',
        *(_drawn(box, height - _BELOW - (box.depth + 1) * ROW, whole.weight, by) for box in boxes),
        f"<script><![CDATA[{Path(__file__).with_suffix('.js').read_text()}]]></script>",
        "</svg>\n",
    ]
    return "\n".join(parts)


def _boxes(calls: _Calls, depth: int = 0, x: float = 0.0, scale: float = 0.0) -> Iterator[_Box]:
    """Yield the boxes of what a function calls, by name. x: where the function's box begins. scale: width of a weight of 1."""
    scale = scale or 1 / max(calls.weight, 1)
    for (name, file, kind), called in sorted(calls.called.items()):
        width = called.weight * scale
        if width * WIDTH >= _LEAST:
            yield _Box(name, file, kind, called.weight, depth, x, width)
            yield from _boxes(called, depth + 1, x, scale)
        x += width


def _drawn(box: _Box, y: int, whole: int, by: str) -> str:
    name = printable(box.name)
    place = f"\n{printable(box.file)}" if box.file else ""
    tip = f"{name}\n{_amount(box.weight, by)}, {100 * box.weight / whole:.2f} %{place}"
    first, hues = _HUES.get(box.kind, _HUES[NATIVE])
    color = f"hsl({first + zlib.crc32(name.encode()) % hues} 80% {60 if box.kind != PROCESS else 85}%)"
    room = int((box.width * WIDTH - 6) / CHARACTER)
    label = "" if room < 3 else name if len(name) <= room else f"{name[: room - 2]}.."
    x = box.x * WIDTH
    return (
        f'<g class="box"><title>{escape(tip)}</title>'
        f'<rect x="{x:.3f}" y="{y}" width="{box.width * WIDTH:.3f}" height="{ROW - 1}" fill="{color}" rx="2"/>'
        f'<text x="{x + 3:.3f}" y="{y + ROW - 5}">{escape(label)}</text></g>'
    )


def _amount(weight: int, by: str) -> str:
    return table.duration(weight) if by == "time" else table.count(weight, "launch")
