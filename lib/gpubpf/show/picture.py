"""Draw counts over time as SVG or PNG files. Rows go from top to bottom, time from left to right; darker means more."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Protocol

import numpy as np

from gpubpf.errors import Error
from gpubpf.show import table
from gpubpf.show.table import duration

PANELS = 16  # the most panels of a picture: those with the highest counts
ROWS, COLUMNS = 256, 512  # the most of a panel; the number of columns must be even
SCALE = 2  # pixels for each row and column
MARGIN = 24  # pixels around a panel, and for each line of text
BESIDE = 400  # pixels for the labels of rows, if a panel has any
RAMP = 60  # colours in a legend

# From few to many. Each gets steadily darker, so that a picture can be read without seeing colours.
FIRE = ((255, 240, 190), (254, 190, 90), (230, 90, 40), (150, 20, 60), (40, 0, 40))
BLUE = ((205, 225, 245), (130, 180, 230), (50, 120, 190), (15, 70, 140), (5, 30, 80))
ORANGE = ((255, 225, 190), (250, 170, 90), (230, 105, 20), (165, 60, 5), (90, 25, 0))
PURPLE = ((230, 215, 240), (190, 155, 215), (145, 90, 180), (100, 40, 130), (55, 5, 80))
BLANK, GAP = (255, 255, 255), (225, 225, 225)


@dataclass(frozen=True)
class Panel:
    """A part of a picture, ready to be drawn.

    image    uint8 [height, COLUMNS, 3]
    span     the width in ns
    most     the highest count
    legend   what is counted, and its colours from few to `most`
    beside   labels at the right of the image: row, text
    """

    title: str
    axes: str
    image: np.ndarray
    span: int
    most: int
    legend: tuple[tuple[str, tuple[tuple[int, int, int], ...]], ...]
    beside: tuple[tuple[int, str], ...] = ()


class PanelSource(Protocol):
    """The source of a panel."""

    @property
    def total(self) -> int:
        """The sum of all counts."""

    def panel(self) -> Panel:
        """Return the panel."""


def write(path: str, heats: Sequence[PanelSource]) -> None:
    """Write a picture with a panel for each of `heats`, but at most PANELS.

    The name of the file must end in .svg or .png. Raises Error for other names, and when the file cannot be written.
    """
    heats = sorted(heats, key=lambda heat: -heat.total)[:PANELS]
    kind = path.rsplit(".", 1)[-1].lower()
    if kind not in ("svg", "png"):
        raise Error(f"{path}: unknown picture format; choose a name that ends in .svg or .png")
    try:
        Path(path).write_bytes(svg(heats) if kind == "svg" else png_of(heats))
    except OSError as error:
        raise Error(f"cannot write {path}: {error.strerror}; choose another file with --heatmap") from None


def colours(level: np.ndarray, stops: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Return the colours (uint8 […, 3]) of levels from 0 to 1."""
    at, points = np.linspace(0, 1, len(stops)), np.array(stops, float)
    return np.stack([np.interp(level, at, points[:, c]) for c in range(3)], axis=-1).astype(np.uint8)


def png(image: np.ndarray) -> bytes:
    """Return uint8 [height, width, 3] as a PNG file (ISO/IEC 15948) with three chunks and no filter."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = image.shape[:2]
    lines = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, width * 3)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines.tobytes(), 6))
        + chunk(b"IEND", b"")
    )


# --- layout ---


@dataclass(frozen=True)
class _Text:
    """A line of text. `x` is its start, middle or end, as `anchor` says; `y` is its baseline."""

    x: int
    y: int
    text: str
    anchor: str = "start"
    bold: bool = False


@dataclass(frozen=True)
class _Image:
    """An image. `x`, `y`: its upper left corner. `scale`: pixels of the picture for each of its pixels."""

    x: int
    y: int
    pixels: np.ndarray
    scale: int = SCALE


def _laid_out(panels: Sequence[Panel]) -> tuple[int, int, list[_Text | _Image]]:
    """Return width and height of the picture, and its parts."""
    wide = SCALE * COLUMNS
    right = BESIDE if any(panel.beside for panel in panels) else 0
    parts: list[_Text | _Image] = []
    y = MARGIN
    for panel in panels:
        parts += [_Text(MARGIN, y, panel.title, bold=True), _Text(MARGIN, y + 18, panel.axes)]
        y += 26
        parts.append(_Image(MARGIN, y, panel.image))
        parts += [
            _Text(MARGIN + wide + 8, y + SCALE * row + 14, table.fit(text, BESIDE // 8))
            for row, text in panel.beside
        ]
        y += SCALE * len(panel.image) + 16
        for quarter in range(5) if panel.span >= 100 else (0, 4):
            anchor = "start" if quarter == 0 else "end" if quarter == 4 else "middle"
            label = duration(panel.span * quarter / 4) if quarter else "0"
            parts.append(_Text(MARGIN + wide * quarter // 4, y, label, anchor))
        y += 20
        x = MARGIN
        for name, stops in panel.legend:
            ramp = colours(np.linspace(0, 1, RAMP), stops)[None].repeat(5, axis=0)
            label = f"{name}: 1 to {panel.most:,}"
            parts += [_Image(x, y - 10, ramp), _Text(x + SCALE * RAMP + 8, y, label)]
            x += SCALE * RAMP + 40 + 8 * len(label)
        y += 2 * MARGIN
    return wide + right + 2 * MARGIN, max(y, MARGIN), parts


def svg(heats: Sequence[PanelSource]) -> bytes:
    """Return the picture as SVG: texts as text, each panel as an image."""
    width, height, parts = _laid_out([heat.panel() for heat in heats])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for part in parts:
        if isinstance(part, _Text):
            weight = ' font-weight="bold"' if part.bold else ""
            anchor = "" if part.anchor == "start" else f' text-anchor="{part.anchor}"'
            lines.append(
                f'<text x="{part.x}" y="{part.y}"{weight}{anchor}>{escape(_legible(part.text))}</text>'
            )
        else:
            high, wide = (part.scale * extent for extent in part.pixels.shape[:2])
            place = f'x="{part.x}" y="{part.y}" width="{wide}" height="{high}"'
            data = base64.b64encode(png(part.pixels)).decode()
            lines.append(
                f'<image {place} preserveAspectRatio="none" style="image-rendering:pixelated" '
                f'href="data:image/png;base64,{data}"/>'
            )
            lines.append(f'<rect {place} fill="none" stroke="#888"/>')
    return "\n".join([*lines, "</svg>", ""]).encode()


def _legible(text: str) -> str:
    """Return `text` without control characters: XML does not allow them, but names of processes may contain them."""
    return "".join(char if char.isprintable() else "?" for char in text)


def png_of(heats: Sequence[PanelSource]) -> bytes:
    """Return the picture as PNG, with text in the built-in font."""
    width, height, parts = _laid_out([heat.panel() for heat in heats])
    page = np.full((height, width, 3), 255, np.uint8)
    for part in parts:
        if isinstance(part, _Text):
            _letter(page, part)
            continue
        image = part.pixels.repeat(part.scale, axis=0).repeat(part.scale, axis=1)
        frame = np.pad(image, ((1, 1), (1, 1), (0, 0)), constant_values=136)
        page[part.y - 1 : part.y - 1 + len(frame), part.x - 1 : part.x - 1 + frame.shape[1]] = frame
    return png(page)


# A font of letters 3 wide and 5 high: five octal digits, one for each row from the top; bit 4 is the left column.
_LETTERS = dict(
    zip(
        "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;()-_<>+*/%&=~[]#'",
        (
            "75557 26227 71747 71717 55711 74717 74757 71222 75757 75717 "
            "25755 65656 34443 65556 74647 74644 34553 55755 72227 11153 55655 44447 57755 65555 25552 65644 25563 65655 "
            "34216 72222 55557 55552 55775 55255 55222 71247 "
            "00002 00024 02020 02024 12221 42224 00700 00007 12421 42124 02720 05250 11244 51245 25353 07070 03600 "
            "64446 31113 57575 22000"
        ).split(),
        strict=False,
    )
)


def _letter(page: np.ndarray, part: _Text) -> None:
    """Draw text in black letters, each 8 pixels wide; letters beyond the page are left out."""
    text = part.text.upper()
    back = {"start": 0, "middle": 4, "end": 8}[part.anchor] * len(text)
    for at, char in enumerate(text[: max(0, (page.shape[1] - part.x + back) // 8)]):
        for row, bits in enumerate(_LETTERS.get(char, "00000")):
            for column in range(3):
                if int(bits) >> (2 - column) & 1:
                    y, x = part.y - 10 + 2 * row, part.x - back + 8 * at + 2 * column
                    page[y : y + 2, x : x + 2] = 0
