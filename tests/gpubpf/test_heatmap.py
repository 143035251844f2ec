"""Pictures of exits: what is counted where, and files that others can read."""

from __future__ import annotations

import struct
import xml.dom.minidom
import zlib
from pathlib import Path

import numpy as np
import pytest

from gpubpf import heatmap
from gpubpf.errors import Error
from gpubpf.heatmap import Heat


def chunks(data: bytes) -> dict[bytes, bytes]:
    """Of a PNG file; checks signature and sums."""
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
    heat = Heat("k", 1000)
    heat.add(np.array([0, 3, 4, 999]), np.array([0, 0, 1, 511]))
    assert heat.counts.shape == (250, 512) and heat.counts[0, 0] == 2
    assert heat.counts[1, 1] == heat.counts[249, 511] == 1
    heat.add(np.array([999]), np.array([5000]))  # ten times as long: columns of 16 ns
    assert heat.width == 16 and heat.counts.sum() == 5
    assert heat.counts[249, 31] == heat.counts[249, 312] == 1 and heat.counts[0, 0] == 2


def test_the_picture_is_dark_where_threads_leave() -> None:
    heat = Heat("k", 2)
    heat.add(np.array([0, 1]), np.array([0, 9]))
    image = heatmap.pixels(heat)
    assert image.shape == (64, 512, 3)
    assert image[0, 0].max() < 100 and image[0, -1].min() == 255
    assert image[-1, 0].min() == 255 and image[-1, -1].max() < 100


def test_a_png_is_one(tmp_path: Path) -> None:
    heat = Heat("scale(float*)", 3)
    heat.add(np.arange(3), np.arange(3) * 100)
    heatmap.write(str(tmp_path / "a.PNG"), [heat, heat])
    found = chunks((tmp_path / "a.PNG").read_bytes())
    width, height, depth, colours = struct.unpack_from(">IIBB", found[b"IHDR"])
    assert (depth, colours) == (8, 2)
    assert len(zlib.decompress(found[b"IDAT"])) == height * (1 + 3 * width)


def test_an_svg_is_one(tmp_path: Path) -> None:
    heat = Heat("scale<float>(char const&)", 1)
    heat.add(np.array([0]), np.array([0]))
    heatmap.write(str(tmp_path / "a.svg"), [heat])
    document = xml.dom.minidom.parseString((tmp_path / "a.svg").read_bytes())
    texts = [node.firstChild.data for node in document.getElementsByTagName("text")]
    assert texts[0] == "scale<float>(char const&)" and len(document.getElementsByTagName("image")) == 2  # and the legend


def test_nothing_to_show_and_nowhere_to_write(tmp_path: Path) -> None:
    heatmap.write(str(tmp_path / "empty.png"), [])
    heatmap.write(str(tmp_path / "empty.svg"), [])
    with pytest.raises(Error, match="no such picture"):
        heatmap.write("a.gif", [])
    with pytest.raises(Error, match="cannot write"):
        heatmap.write(str(tmp_path / "no" / "a.svg"), [])


def test_every_letter_of_a_kernel_name_is_there() -> None:
    for char in "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:<>(),*&~[]{} ".replace("{", "").replace("}", ""):
        assert char == " " or len(heatmap._LETTERS[char]) == 5
    assert len(set(heatmap._LETTERS.values())) > 50
