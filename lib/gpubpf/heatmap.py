"""When the blocks of a grid finish, as a picture: a row for each block (or several), time from left to right, darker where more
threads leave. SVG or PNG, both written here."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from gpubpf.errors import Error
from gpubpf.exits import duration

PANELS = 16  # at most: those with the most exits
ROWS, COLUMNS = 256, 512  # at most; an even number of columns
SCALE = 2  # pixels of a PNG for each column
MARGIN = 24  # around a panel, and for each line of text


class Heat:
    """Exits counted by block and time, of all launches of a kernel and shape, each from its own first exit.

    counts: int64 [rows, COLUMNS]. A column is `width` ns, a power of two that grows as it has to.
    """

    def __init__(self, title: str, blocks: int) -> None:
        self.title, self.blocks, self.width = title, blocks, 1
        self.each = -(-blocks // ROWS)  # blocks of a row
        self.counts = np.zeros((-(-blocks // self.each), COLUMNS), np.int64)

    def add(self, block: np.ndarray, ns: np.ndarray) -> None:
        """Exits of one launch: the block's number, and the time since the launch's first exit."""
        latest = int(ns.max(initial=0))
        while latest >= self.width * COLUMNS:
            half = self.counts[:, 0::2] + self.counts[:, 1::2]
            self.counts = np.concatenate([half, np.zeros_like(half)], axis=1)
            self.width *= 2
        place = (block // self.each).astype(np.int64) * COLUMNS + (ns // self.width).astype(np.int64)
        self.counts += np.bincount(place, minlength=self.counts.size).reshape(self.counts.shape)

    @property
    def used(self) -> np.ndarray:
        """The counts up to the last column with an exit."""
        columns = np.flatnonzero(self.counts.any(axis=0))
        return self.counts[:, : int(columns[-1]) + 1 if len(columns) else 1]

    def labels(self) -> tuple[str, str, str]:
        """Title; what the axes show; the end of the time axis."""
        each = f", {self.each} blocks a row" if self.each > 1 else ""
        rows = f"rows: blocks 0 (top) to {self.blocks - 1:,}{each}"
        return self.title, f"{rows}; time since the first exit", duration(self.width * self.used.shape[1])


def write(path: str, heats: Sequence[Heat]) -> None:
    """A picture with a panel for each, the first PANELS; what the name of the file ends in decides: .svg or .png. Raises Error."""
    heats = sorted(heats, key=lambda heat: -int(heat.counts.sum()))[:PANELS]
    kind = path.rsplit(".", 1)[-1].lower()
    if kind not in ("svg", "png"):
        raise Error(f"{path}: no such picture; give a name that ends in .svg or .png")
    try:
        Path(path).write_bytes(svg(heats) if kind == "svg" else png_of(heats))
    except OSError as error:
        raise Error(f"cannot write {path}: {error.strerror}; choose another file with --heatmap") from None


def pixels(heat: Heat) -> np.ndarray:
    """uint8 [height, width, 3]: COLUMNS wide, each row of blocks as many pixels high as fit into ROWS."""
    counts = heat.used
    # Columns stretch to the whole width, rows to 2 to 32 pixels.
    across = counts[:, np.arange(COLUMNS) * counts.shape[1] // COLUMNS]
    tall = max(1, min(32, ROWS // len(counts)))
    level = np.log1p(across) / max(np.log1p(counts.max()), 1e-9)
    shown = _colours(np.repeat(level, tall, axis=0))
    shown[np.repeat(across == 0, tall, axis=0)] = 255
    return shown


def _colours(level: np.ndarray) -> np.ndarray:
    """0 to 1 → light yellow, orange, red, near black: it darkens steadily, so it can be read without colours too."""
    stops = np.array([[255, 240, 190], [254, 190, 90], [230, 90, 40], [150, 20, 60], [40, 0, 40]], float)
    at = np.linspace(0, 1, len(stops))
    return np.stack([np.interp(level, at, stops[:, c]) for c in range(3)], axis=-1).astype(np.uint8)


def png(image: np.ndarray) -> bytes:
    """uint8 [height, width, 3] as a PNG file (ISO/IEC 15948): three chunks, no filter."""

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


def svg(heats: Sequence[Heat]) -> bytes:
    """As SVG: text as text, each panel an image in it."""
    parts, y, width = [], MARGIN, 2 * COLUMNS + 2 * MARGIN
    for heat in heats:
        title, axes, end = (escape(label) for label in heat.labels())
        image = pixels(heat)
        high = 2 * image.shape[0]
        data = base64.b64encode(png(image)).decode()
        parts += [
            f'<text x="{MARGIN}" y="{y}" font-weight="bold">{title}</text>',
            f'<text x="{MARGIN}" y="{y + 18}">{axes}</text>',
            f'<image x="{MARGIN}" y="{y + 26}" width="{2 * COLUMNS}" height="{high}" preserveAspectRatio="none" '
            f'style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>',
            f'<rect x="{MARGIN}" y="{y + 26}" width="{2 * COLUMNS}" height="{high}" fill="none" stroke="#888"/>',
            f'<text x="{MARGIN}" y="{y + 42 + high}">0</text>',
            f'<text x="{MARGIN + 2 * COLUMNS}" y="{y + 42 + high}" text-anchor="end">{end}</text>',
        ]
        y += high + 42 + 2 * MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="#fff"/>'
    )
    return "\n".join([head, *parts, "</svg>", ""]).encode()


def png_of(heats: Sequence[Heat]) -> bytes:
    """As PNG, the text in letters of our own."""
    panels = []
    width = SCALE * COLUMNS + 2 * MARGIN
    for heat in heats:
        title, axes, end = heat.labels()
        image = np.repeat(np.repeat(pixels(heat), SCALE, axis=0), SCALE, axis=1)
        frame = np.pad(image, ((1, 1), (1, 1), (0, 0)), constant_values=136)
        body = np.full((frame.shape[0], width, 3), 255, np.uint8)
        body[:, MARGIN - 1 : MARGIN - 1 + frame.shape[1]] = frame
        blank = np.full((MARGIN // 2, width, 3), 255, np.uint8)
        panels += [blank, _line(width, title), _line(width, axes), body, _line(width, "0", end), blank]
    return png(np.concatenate(panels or [np.full((MARGIN, width, 3), 255, np.uint8)]))


# Letters 3 wide and 5 high: five octal digits, one for each row from the top, the bit of 4 on the left.
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


def _line(width: int, text: str, right: str = "") -> np.ndarray:
    """Black on white: `text` from the left, `right` up to the right margin."""
    line = np.full((MARGIN, width, 3), 255, np.uint8)
    most = (width - 2 * MARGIN) // 8
    for shown, begin in ((text[:most], MARGIN), (right[:most], width - MARGIN - 8 * len(right[:most]))):
        for at, char in enumerate(shown.upper()):
            for row, bits in enumerate(_LETTERS.get(char, "00000")):
                for column in range(3):
                    if int(bits) >> (2 - column) & 1:
                        y, x = 7 + 2 * row, begin + 8 * at + 2 * column
                        line[y : y + 2, x : x + 2] = 0
    return line
