"""Pictures of exits and accesses: counts by place and time, and files that other programs can read."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpubpf.errors import Error
from gpubpf.show import heatmap, picture
from gpubpf.show.heatmap import AddressHeat, Band, BlockHeat


def test_exits_are_counted_by_block_and_time() -> None:
    heat = BlockHeat("k", 1000)
    heat.add(np.array([0, 3, 4, 999]), np.array([0, 0, 1, 511]))
    assert heat.counts.shape == (250, 512) and heat.counts[0, 0] == 2
    assert heat.counts[1, 1] == heat.counts[249, 511] == 1
    heat.add(np.array([999]), np.array([5000]))  # ten times as long: columns of 16 ns
    assert heat.width == 16 and heat.counts.sum() == 5
    assert heat.counts[249, 31] == heat.counts[249, 312] == 1 and heat.counts[0, 0] == 2


def test_few_counts_are_drawn_in_wide_columns() -> None:
    heat = BlockHeat("k", 2)
    heat.add(np.zeros(170, int), np.arange(0, 510, 3))
    chart = heat.chart()
    counts = chart.bands[0].counts[0, :, 0].tolist()
    assert (chart.span, len(counts), sum(counts)) == (508, 127, 170) and counts[:6] == [2, 1, 1, 2, 1, 1]
    regular = BlockHeat("k", 2)  # a column of 2 ns would be empty or busy by chance, and look like bursts
    regular.add(np.zeros(12800, int), np.arange(12800) // 100 * 11 // 2)
    assert regular.chart().bands[0].counts[0].min() >= 100
    phases = BlockHeat("k", 2)  # but gaps between phases stay
    phases.add(np.zeros(8000, int), np.arange(8000) // 2000 * 125 + np.arange(8000) % 64)
    assert phases.chart().bands[0].counts.shape[1] > 400
    dense = BlockHeat("k", 2)
    dense.add(np.zeros(5120, int), np.arange(5120) // 10)
    assert dense.chart().bands[0].counts.shape == (2, 512, 1)


def written(path: Path, heats: list[Any]) -> set[str]:
    """Write a picture in each format; return the texts of the SVG."""
    for suffix in (".png", ".PDF"):
        picture.write(str(path.with_suffix(suffix)), heats)
    assert path.with_suffix(".png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.with_suffix(".PDF").read_bytes()[:5] == b"%PDF-"
    return texts_of(path, heats)


def texts_of(path: Path, heats: list[Any]) -> set[str]:
    """Return the texts of a picture, which is written as an SVG."""
    picture.write(str(path.with_suffix(".svg")), heats)
    document = xml.dom.minidom.parseString(path.with_suffix(".svg").read_bytes())
    return {node.firstChild.data for node in document.getElementsByTagName("text") if node.firstChild}


@pytest.mark.every(2)
def test_exits_are_drawn_with_axes(tmp_path: Path) -> None:
    heat = BlockHeat("scale<float>($x^2$, \x1b)", 1000)
    heat.add(np.arange(1000).repeat(100), np.arange(100_000))
    texts = written(tmp_path / "a", [heat])
    assert {
        "scale<float>($x^2$, ?)",
        "block",
        "exits",
        "0",
        "200",
        "80 us",
        "A row stands for 4 blocks.",
    } <= texts
    assert "time since the first exit of a launch" in texts
    few = BlockHeat("few", 64)
    few.add(np.arange(64), np.full(64, 20_000))
    assert "few" in written(tmp_path / "b", [few, heat, heat])


def test_charts_that_are_not_drawn_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "CHARTS", 2)  # drawing one takes a second
    heats = [BlockHeat(f"kernel {n}", 3) for n in range(picture.CHARTS + 2)]
    for n, heat in enumerate(heats):
        heat.add(np.arange(3).repeat(n + 1), np.arange(3 * n + 3))
    texts = texts_of(tmp_path / "a", heats)
    assert {"kernel 2", "Not drawn: 2 more charts, with fewer exits."} <= texts and "kernel 1" not in texts
    assert not any("Not drawn" in text for text in texts_of(tmp_path / "b", heats[2:]))


@pytest.mark.parametrize("moments", [3, 3000], ids=["marks", "image"])
def test_places_grow_downwards_and_more_is_darker(moments: int) -> None:
    heat = BlockHeat("k", 64)
    heat.add(np.arange(64).repeat(moments), np.tile(np.linspace(0, 10**6, moments).astype(np.int64), 64))
    heat.add(np.zeros(1000, np.int64), np.zeros(1000, np.int64))
    figure = picture._figure([heat.chart()])
    (axes,) = (axes for axes in figure.subfigs[0].axes if axes.get_label() != "<colorbar>")
    bottom, top = axes.get_ylim()
    assert bottom > top
    (drawn,) = axes.collections or axes.images
    light, dark = (sum(drawn.cmap(drawn.norm(count))[:3]) for count in (1, 1000))
    assert drawn.cmap.name == "cividis_r" and dark < light  # a scale that the colour-blind can read
    if axes.collections:  # what is drawn last lies on top
        counts = drawn.get_array().tolist()
        assert counts == sorted(counts) and counts[-1] > counts[0]


def test_a_missing_matplotlib_is_named_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *of: None if name == "matplotlib" else find(name, *of)
    )
    with pytest.raises(Error, match=r"^--heatmap: the Python package matplotlib is missing in .*; run "):
        picture.check(str(tmp_path / "a.svg"))
    assert not list(tmp_path.iterdir())


def test_nothing_to_show_and_nowhere_to_write(tmp_path: Path) -> None:
    assert written(tmp_path / "empty", []) == {"nothing was recorded"}
    assert "k" in written(tmp_path / "none", [BlockHeat("k", 3), AddressHeat("app").drawn(())])
    with pytest.raises(Error, match="unknown picture format"):
        picture.check("a.gif")
    for call in (picture.check, lambda path: picture.write(path, [])):
        with pytest.raises(Error, match=r"cannot write .*No such file.*; choose another file with --heatmap"):
            call(str(tmp_path / "no" / "a.svg"))


def test_files_in_the_working_directory_say_nothing(tmp_path: Path) -> None:
    """Matplotlib reads settings there; with some of them it starts TeX."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfont.size: 40\nsavefig.facecolor: red\n")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from gpubpf.show import picture; picture.write('a.svg', [])"
    lib = Path(picture.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, lib], cwd=tmp_path, check=True)
    assert written(tmp_path / "b", []) == {"nothing was recorded"}
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


# --- accesses by address ---

KNOWN = [Band(0x7F0000000000, 1 << 20, "cuMemAlloc"), Band(0x7F0010000000, 4096, "variable table")]


def reads(heat: AddressHeat, address: int, count: int, time: int, written: bool = False) -> None:
    """Add reads of `count` consecutive words at one time."""
    addresses = address + 4 * np.arange(count, dtype=np.uint64)
    heat.add(addresses.astype(np.uint64), np.full(count, written), np.full(count, time, np.int64))


def test_accesses_are_counted_by_address_and_time() -> None:
    heat = AddressHeat("app")
    reads(heat, 0x7F0000000000, 16, 1000)
    reads(heat, 0x7F0000000000, 8, 1511, written=True)
    assert (heat.shift, heat.width, heat.origin) == (5, 1, 1000)
    assert heat.pages.tolist() == [0x7F0000000000 >> 5, 0x7F0000000020 >> 5]
    assert heat.counts[:, 0, 0].tolist() == [8, 8] and heat.counts[:, 511, 1].tolist() == [8, 0]
    assert heat.total == 24


def test_time_grows_at_both_ends() -> None:
    heat = AddressHeat("app")
    reads(heat, 0, 1, 1_000_000)
    reads(heat, 0, 1, 1_005_000)  # columns of 16 ns
    reads(heat, 0, 1, 999_990)  # from a multiprocessor whose records come late
    reads(heat, 0, 1, 900_000)
    assert heat.width == 256 and heat.total == 4
    columns = np.flatnonzero(heat.counts[0, :, 0])
    starts = heat.origin + columns * heat.width
    assert [any(at <= t < at + heat.width for at in starts) for t in (900_000, 999_990, 1_005_000)] == [
        True
    ] * 3
    reads(heat, 0, 5, 1 << 62)
    assert heat.left_out == 5 and heat.width == 256


def test_times_that_no_gpu_says_are_no_crash() -> None:
    random, heat = np.random.default_rng(1), AddressHeat("app")
    for first in (0, 1 << 63, (1 << 63) - 1, 1_800_000_000 * 10**9):  # the last is a date
        heat = AddressHeat("app")
        for _ in range(20):
            time = random.integers(0, 2**64, 100, np.uint64)
            time[0] = first
            heat.add(random.integers(0, 2**64, 100, np.uint64), time % 2 == 0, time.astype(np.int64))
        assert heat.total + heat.left_out == 2000
    assert heat.total >= 20


def test_memory_of_any_size_takes_bounded_room() -> None:
    heat, random = AddressHeat("app"), np.random.default_rng(1)
    for turn in range(5):
        address = random.integers(0, 2**64, 10_000, np.uint64)
        heat.add(address, address % 2 == 0, random.integers(0, 2**40, 10_000))
        assert len(heat.pages) <= heatmap.MOST_PAGES and heat.total == 10_000 * (turn + 1)
    assert (np.diff(heat.pages.astype(np.float64)) > 0).all() and heat.shift > 50
    page = address >> np.uint64(heat.shift)
    assert np.isin(page, heat.pages).all()


def test_coarser_pages_have_the_same_counts() -> None:
    heat = AddressHeat("app")
    for part in np.array_split(np.arange(3000), 30):
        heat.add((32 * part).astype(np.uint64), np.zeros(len(part), bool), part % 4)
    assert heat.shift == 7 and heat.total == 3000
    assert heat.counts[:, :4, 0].sum(axis=1).tolist() == [4] * 750
    assert heat.counts[0, :4, 0].tolist() == [1, 1, 1, 1]


def test_gaps_between_allocations_are_left_out() -> None:
    heat = AddressHeat("app")
    reads(heat, 0x7F0000000000 + (1 << 19), 64, 0)
    reads(heat, 0x7F0010000000, 8, 5, written=True)
    reads(heat, 0x100000000, 8, 9)
    reads(heat, 0x100001000, 8, 9)  # near: the same region
    bands = heat.bands(KNOWN)
    assert [(band.base, band.size, band.name) for band, _ in bands] == [
        (0x100000000, 0x1020, "unknown allocation"),
        (0x7F0000000000, 1 << 20, "cuMemAlloc"),
        (0x7F0010000000, 4096, "variable table"),
    ]
    chart = heat.drawn(KNOWN).chart()
    assert [band.label for band in chart.bands] == [
        "unknown allocation, 4 KiB at 0x100000000",
        "cuMemAlloc, 1 MiB at 0x7f0000000000",
        "variable table, 4 KiB at 0x7f0010000000",
    ]
    assert [(band.first, band.last) for band in chart.bands] == [(0, 0x1020), (0, 1 << 20), (0, 4096)]
    # The middle of the allocation is read in the first column, and the variable's beginning is written later.
    read, wrote = chart.bands[1].counts, chart.bands[2].counts
    assert read[len(read) // 2, 0].tolist() == [64, 0] and read.sum() == 64
    assert wrote[0, 5].tolist() == [0, 8] and wrote.sum() == 8
    assert chart.span == 10


def test_many_places_and_large_pages() -> None:
    heat = AddressHeat("app")
    known = [Band(0x1000000 * n, 4096, f"call {n}") for n in range(1, 41)]
    for n, band in enumerate(known):
        reads(heat, band.base, 8 * (n + 1), 0)
    chart = heat.drawn(known).chart()
    assert [band.label.partition(",")[0] for band in chart.bands] == [f"call {n}" for n in range(1, 41)]
    assert not chart.caption and all(len(band.counts) >= heatmap.LEAST_BAND for band in chart.bands)
    more = [Band(0x1000000 * n, 4096, f"call {n}") for n in range(41, 91)]
    for n, band in enumerate(more):
        reads(heat, band.base, 8 * (n + 41), 0)
    chart = heat.drawn([*known, *more]).chart()
    assert len(chart.bands) == heatmap.BANDS and "call 90" in chart.bands[-1].label
    assert chart.caption.startswith(f"Left out: {90 - heatmap.BANDS} more regions, with ")
    while heat.shift < 28:
        heat._coarsen()
    names = [band.name for band, _ in heat.bands([*known, *more])]
    assert names[:2] == ["call 1 and 14 more", "call 16 and 15 more"]


def test_what_lay_at_an_address_before_is_told() -> None:
    heat = AddressHeat("app")
    reads(heat, 4096, 4, 0)
    known = [
        Band(4096, 1000, "first"),
        Band(4096, 500, "second"),
        Band(4608, 1000, "third"),
        Band(0, 0, "none"),
    ]
    assert [(b.base, b.size, b.name) for b, _ in heat.bands(known)] == [(4096, 1512, "first, then 2 more")]


def test_memory_is_drawn_with_its_allocations(tmp_path: Path) -> None:
    heat = AddressHeat("app \x1b<&")
    reads(heat, 0x7F0000000000, 100, 0)
    reads(heat, 0x7F0010000000, 100, 50, written=True)
    texts = written(tmp_path / "a", [heat.drawn(KNOWN), BlockHeat("k", 3)])
    assert {"app ?<&", "cuMemAlloc, 1 MiB at 0x7f0000000000", "reads", "writes", "accesses", "1 MiB"} <= texts
    assert "time since the first access" in texts


def test_sizes() -> None:
    sizes = (0, 1023, 1024, 1536, 1 << 20, 3 << 40, 1 << 63)
    assert [heatmap.size_text(size) for size in sizes] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "3.0 TiB", "8192.0 PiB",
    ]  # fmt: skip
