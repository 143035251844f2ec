"""Draw counts over time with Matplotlib, as SVG, PNG or PDF files: time from left to right, darker means more.

    picture.write("app.svg", heats)     # a chart for each

Matplotlib is loaded only here, as it takes a while.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gpubpf.errors import Error, missing_package
from gpubpf.kernel import directories
from gpubpf.record import Record, replace
from gpubpf.show import progress, table
from gpubpf.show.new_file import open_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

CHARTS = 16  # maximum charts in a picture: those with the highest counts
FORMATS = (".svg", ".png", ".pdf")
_UNDATED: dict[str, Any] = {".svg": {"Date": None}, ".png": {}, ".pdf": {"CreationDate": None}}
WIDE = 11.0  # inches
HEAD = 1.3  # inches of a chart for its title, the axis of time, and the caption
LABEL = 0.3  # inches between bands, for their labels
PLAIN = 3.0  # inches of a chart with one band
DOTS_PER_INCH = 120
# From yellow to dark blue: the steps look equal also in grey, and to people with colour blindness.
SCALE = "cividis_r"
MARGIN = 0.01  # of the span, beside the first and the last mark
FEW = 60  # if fewer columns have counts, draw them as marks, because a column may be narrower than a pixel
_SETTINGS = ("HOME", "MPLCONFIGDIR", "MATPLOTLIBRC", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")
_FIGURE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gpubpf",  # the same picture is the same file
    "font.size": 9,
    "axes.titlesize": 9,
}


class Rows(Record):
    """One band of a chart: counts (int64 [rows, columns, series]) of places from `first` (top) to `last`."""

    label: str
    first: float
    last: float
    counts: np.ndarray


class Chart(Record):
    """The chart of one kernel, or of one process's memory.

    span      the width in ns
    time      label of the time axis
    places    label of the place axes, and a function that writes a place
    counted   label of the colour scale
    series    names of the parts that are drawn side by side; a single name is not drawn
    caption   what the chart leaves out; may be empty
    binary    places are numbers of bytes, so marks are at powers of two
    """

    title: str
    span: int
    time: str
    places: str
    place: Callable[[float], str]
    counted: str
    series: tuple[str, ...]
    bands: tuple[Rows, ...]
    caption: str = ""
    binary: bool = False

    @property
    def height(self) -> float:
        """The height in inches. Bands take space in proportion to their rows."""
        if len(self.bands) <= 1:
            return HEAD + PLAIN
        return HEAD + sum(LABEL + len(band.counts) / 50 for band in self.bands)


class Source(Protocol):
    """The source of a chart."""

    @property
    def total(self) -> int:
        """The sum of all counts."""

    def chart(self) -> Chart:
        """Return the chart."""


def check(path: str) -> None:
    """Raise Error if a picture cannot be written to this path, or if matplotlib is not installed."""
    if Path(path).suffix.lower() not in FORMATS:
        raise Error(f"{path}: unknown picture format; choose a name that ends in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise Error(f"--heatmap: {missing_package(ModuleNotFoundError(name='matplotlib'))}")
    try:
        os.close(open_new(path, empty=False))
    except OSError as error:
        raise _unwritable(path, error) from None


def write(path: str, heats: Sequence[Source]) -> None:
    """Write a picture with a chart for each of `heats`, but at most CHARTS. Raises Error if the file cannot be written."""
    check(path)
    with progress.work("drawing the picture"), _own_settings():
        _write(path, heats)


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """Keep Matplotlib from reading settings and fonts of another user: under sudo, HOME may be that user's."""
    if os.geteuid() != 0 or directories.is_own(os.path.expanduser("~")):
        yield
        return
    import tempfile  # imported here because the import is slow

    with tempfile.TemporaryDirectory(prefix="gpubpf-picture-", dir=directories.temporary()) as place:
        before = {name: os.environ.pop(name, None) for name in _SETTINGS}
        os.environ["HOME"] = place
        try:
            yield
        finally:
            del os.environ["HOME"]
            os.environ.update({name: value for name, value in before.items() if value is not None})


def _write(path: str, heats: Sequence[Source]) -> None:
    import matplotlib

    charts = [heat.chart() for heat in sorted(heats, key=lambda heat: -heat.total)[:CHARTS]]
    if left_out := len(heats) - len(charts):
        caption = f"{charts[-1].caption} Not drawn: {table.count(left_out, 'more chart')}, with fewer {charts[-1].counted}."
        charts[-1] = replace(charts[-1], caption=caption.strip())
    matplotlib.rcdefaults()  # ignore a file `matplotlibrc` in the working directory
    with matplotlib.rc_context(_FIGURE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for example: the font has no such letter
        try:
            form = Path(path).suffix.lower()
            with open(open_new(path), "wb") as file:
                _figure(charts).savefig(file, format=form[1:], dpi=DOTS_PER_INCH, metadata=_UNDATED[form])
        except OSError as error:
            raise _unwritable(path, error) from None


def _unwritable(path: str, error: OSError) -> Error:
    return Error(f"cannot write {path}: {error.strerror}; choose another file with --heatmap")


def _figure(charts: Sequence[Chart]) -> Any:
    from matplotlib.figure import Figure

    heights = [chart.height for chart in charts] or [1.0]
    figure = Figure(figsize=(WIDE, sum(heights)), layout="constrained")
    if not charts:
        figure.text(0.02, 0.5, "nothing was recorded")
        return figure
    parts = figure.subfigures(len(charts), 1, height_ratios=heights, squeeze=False)
    for part, chart in zip(parts[:, 0], charts, strict=True):
        _draw(part, chart)
    return figure


def _draw(part: SubFigure, chart: Chart) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MultipleLocator

    most = max((int(band.counts.max(initial=0)) for band in chart.bands), default=0)
    norm = LogNorm(1, max(most, 2))
    part.suptitle(_legible(chart.title), x=0.01, ha="left", weight="bold", parse_math=False)
    axes = part.subplots(
        max(1, len(chart.bands)),
        len(chart.series),
        sharex=True,
        sharey="row",
        squeeze=False,
        gridspec_kw={"height_ratios": [len(band.counts) for band in chart.bands] or [1]},
    )
    drawn: Any = None
    for row, band in zip(axes, chart.bands, strict=False):
        for number, one in enumerate(row):
            drawn = _band(one, band.counts[:, :, number], chart.span, band.first, band.last, norm)
            one.yaxis.set_major_formatter(FuncFormatter(lambda value, _: chart.place(value)))
            one.set_ylim(band.last, band.first)
            if chart.binary:
                one.yaxis.set_major_locator(MultipleLocator(_binary_step(band.last - band.first)))
            if len(chart.bands) > 1:
                one.set_yticks([band.first, band.last])
        if band.label:
            row[0].set_title(_legible(band.label), loc="left", pad=3, parse_math=False)
    for number, name in enumerate(chart.series if len(chart.series) > 1 else ()):
        above = {"xytext": (0, 18), "textcoords": "offset points", "ha": "center", "weight": "bold"}
        axes[0][number].annotate(name, (0.5, 1), xycoords="axes fraction", **above)
    unit, size = _unit(chart.span)
    for one in axes[-1]:
        one.set_xlim(-MARGIN * chart.span, max((1 + MARGIN) * chart.span, 1))
        one.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:g} {unit}"))
        one.set_xlabel(chart.time)
    if chart.places:
        part.supylabel(chart.places, fontsize=9)
    if drawn is not None:
        narrow = max(25.0, 5 * chart.height)  # length by width
        scale = part.colorbar(
            drawn, ax=axes, label=chart.counted, format=EngFormatter(sep=""), pad=0.01, aspect=narrow
        )
        scale.locator = LogLocator(10, subs=(1.0,) if most >= 100 else (1.0, 2.0, 5.0))
        scale.minorticks_off()
        scale.update_ticks()
    if chart.caption:
        part.supxlabel(chart.caption, x=0.01, ha="left", fontsize=9)


def _binary_step(length: float) -> float:
    """Return the power of two that divides a length into 3 to 6 steps."""
    return 2.0 ** math.ceil(math.log2(max(length, 1) / 6))


def _band(one: Axes, counts: np.ndarray, span: int, first: float, last: float, norm: Any) -> Any:
    """Draw counts [rows, columns]. Return the drawn object, from which a colour scale can be made."""
    rows, columns = counts.shape
    if np.count_nonzero(counts.any(axis=0)) < FEW:
        row, column = np.nonzero(counts)
        order = np.argsort(counts[row, column])  # the darkest on top
        row, column = row[order], column[order]
        x = (column + 0.5) * span / columns
        y = first + (row + 0.5) * (last - first) / rows
        size = min(36.0, max(16.0, (72 * PLAIN / rows) ** 2))
        return one.scatter(
            x,
            y,
            size,
            counts[row, column],
            marker="s",
            cmap=SCALE,
            norm=norm,
            linewidths=0,
            rasterized=True,
        )
    shown = np.ma.masked_equal(counts, 0)
    return one.imshow(
        shown,
        SCALE,
        norm,
        aspect="auto",
        interpolation="nearest",
        extent=(0, max(span, 1), last, first),
    )


def _unit(span: int) -> tuple[str, float]:
    """Return the unit of the labels of an axis, and its length in ns."""
    return next(((u, ns) for u, ns in (("s", 1e9), ("ms", 1e6), ("us", 1e3)) if span >= ns), ("ns", 1.0))


def _legible(text: str) -> str:
    """Return `text` without control characters, which names of processes may contain and XML does not allow."""
    return "".join(char if char.isprintable() else "?" for char in text)
