"""Pictures of exits and accesses: counts by place and time, and files that other programs can read."""

from __future__ import annotations

import struct
import xml.dom.minidom
import zlib
from pathlib import Path

import numpy as np
import pytest

from gpubpf.errors import Error
from gpubpf.show import heatmap, picture
from gpubpf.show.heatmap import AddressHeat, Band, BlockHeat


def chunks(data: bytes) -> dict[bytes, bytes]:
    """Return the pixels of a PNG file; checks signature and checksums."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    found, at = {}, 8
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", data, at + 8 + size)[0] == zlib.crc32(kind + body)
        found[kind] = body
        at += 12 + size
    assert list(found) == [b"IHDR", b"IDAT", b"IEND"]
    return found


def test_exits_are_counted_by_block_and_time() -> None:
    heat = BlockHeat("k", 1000)
    heat.add(np.array([0, 3, 4, 999]), np.array([0, 0, 1, 511]))
    assert heat.counts.shape == (250, 512) and heat.counts[0, 0] == 2
    assert heat.counts[1, 1] == heat.counts[249, 511] == 1
    heat.add(np.array([999]), np.array([5000]))  # ten times as long: columns of 16 ns
    assert heat.width == 16 and heat.counts.sum() == 5
    assert heat.counts[249, 31] == heat.counts[249, 312] == 1 and heat.counts[0, 0] == 2


def test_the_picture_is_dark_where_threads_leave() -> None:
    heat = BlockHeat("k", 2)
    heat.add(np.array([0, 1]), np.array([0, 9]))
    image = heatmap.pixels(heat)
    assert image.shape == (64, 512, 3)
    assert image[0, 0].max() < 100 and image[0, -1].min() == 255
    assert image[-1, 0].min() == 255 and image[-1, -1].max() < 100


def test_a_png_is_one(tmp_path: Path) -> None:
    heat = BlockHeat("scale(float*)", 3)
    heat.add(np.arange(3), np.arange(3) * 100)
    picture.write(str(tmp_path / "a.PNG"), [heat, heat])
    found = chunks((tmp_path / "a.PNG").read_bytes())
    width, height, depth, colours = struct.unpack_from(">IIBB", found[b"IHDR"])
    assert (depth, colours) == (8, 2)
    assert len(zlib.decompress(found[b"IDAT"])) == height * (1 + 3 * width)


def test_an_svg_is_one(tmp_path: Path) -> None:
    heat = BlockHeat("scale<float>(char const&)", 1)
    heat.add(np.array([0]), np.array([0]))
    picture.write(str(tmp_path / "a.svg"), [heat])
    document = xml.dom.minidom.parseString((tmp_path / "a.svg").read_bytes())
    texts = [node.firstChild.data for node in document.getElementsByTagName("text")]
    assert (
        texts[0] == "scale<float>(char const&)" and len(document.getElementsByTagName("image")) == 2
    )  # and the legend


def test_nothing_to_show_and_nowhere_to_write(tmp_path: Path) -> None:
    picture.write(str(tmp_path / "empty.png"), [])
    picture.write(str(tmp_path / "empty.svg"), [])
    with pytest.raises(Error, match="unknown picture format"):
        picture.write("a.gif", [])
    with pytest.raises(Error, match="cannot write"):
        picture.write(str(tmp_path / "no" / "a.svg"), [])


def test_every_letter_of_a_kernel_name_is_there() -> None:
    for char in "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:<>(),*&~[]{} ".replace("{", "").replace("}", ""):
        assert char == " " or len(picture._LETTERS[char]) == 5
    assert len(set(picture._LETTERS.values())) > 50


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
    panel = heat.drawn(KNOWN).panel()
    rows = [row for row, _ in panel.beside]
    assert [text for _, text in panel.beside] == [
        "0x100000000 4.0 KiB unknown allocation",
        "0x7f0000000000 1.0 MiB cuMemAlloc",
        "0x7f0010000000 4.0 KiB variable table",
    ]
    # The middle of the allocation, in the first column, is dark and blue; the variable's beginning is written: orange.
    height = rows[2] - rows[1] - 1
    blue, orange = panel.image[rows[1] + height // 2, 0].astype(int), panel.image[rows[2], -250].astype(int)
    assert blue[2] > blue[0] and (panel.image[rows[1] + height // 4] == 255).all()
    assert orange[0] > orange[2] and panel.image.shape[1] == 512
    assert panel.most == 64 and panel.span == 10


def test_many_places_and_large_pages() -> None:
    heat = AddressHeat("app")
    known = [Band(0x1000000 * n, 4096, f"call {n}") for n in range(1, 41)]
    for n, band in enumerate(known):
        reads(heat, band.base, 8 * (n + 1), 0)
    panel = heat.drawn(known).panel()
    assert len(panel.beside) == heatmap.BANDS and "call 40" in panel.beside[-1][1]
    assert "and so are 24 regions with" in panel.axes and len(panel.image) <= picture.ROWS
    while heat.shift < 28:
        heat._coarsen()
    assert [band.name for band, _ in heat.bands(known)][:2] == ["call 1 and 14 more", "call 16 and 15 more"]


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


def test_pictures_of_memory_can_be_read(tmp_path: Path) -> None:
    heat = AddressHeat("app \x1b<&")
    picture.write(str(tmp_path / "empty.svg"), [heat.drawn(())])
    reads(heat, 0x7F0000000000, 100, 0)
    for name in ("a.svg", "a.png"):
        picture.write(str(tmp_path / name), [heat.drawn(KNOWN), BlockHeat("k", 3)])
    document = xml.dom.minidom.parseString((tmp_path / "a.svg").read_bytes())
    texts = [node.firstChild.data for node in document.getElementsByTagName("text")]
    assert "app ?<&" in texts and "0x7f0000000000 1.0 MiB cuMemAlloc" in texts
    assert {f"{what}: 1 to 100" for what in ("reads", "writes", "both")} <= set(texts)
    chunks((tmp_path / "a.png").read_bytes())


def test_sizes() -> None:
    sizes = (0, 1023, 1024, 1536, 1 << 20, 3 << 40, 1 << 63)
    assert [heatmap.size_text(size) for size in sizes] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "3.0 TiB", "8192.0 PiB",
    ]  # fmt: skip
