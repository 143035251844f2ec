"""Read the files that gpuprofile writes, as other programs do."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree


def fields_of(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: their numbers, and a number or bytes (protobuf.dev, "Encoding")."""

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    at = 0
    while at < len(data):
        key = number()
        value = number()
        if key & 7 == 2:
            at += value
            yield key >> 3, data[at - value : at]
        else:
            assert key & 7 == 0
            yield key >> 3, value


def samples_of(path: Path) -> list[tuple[list[str], list[int]]]:
    """The samples of a file for pprof: the names of the frames, outermost first, and the values."""
    whole: dict[int, list[Any]] = {}
    for number, value in fields_of(gzip.decompress(path.read_bytes())):
        whole.setdefault(number, []).append(value)
    texts = [text.decode() for text in whole[6]]
    functions = {one[1]: texts[one[2]] for one in map(dict, map(fields_of, whole.get(5, [])))}
    lines = {one[1]: dict(fields_of(one[4])) for one in map(dict, map(fields_of, whole.get(4, [])))}
    found = []
    for sample in (list(fields_of(one)) for one in whole.get(2, [])):
        places = [functions[lines[value][1]] for number, value in sample if number == 1]
        found.append((places[::-1], [value for number, value in sample if number == 2]))
    return found


def boxes_of(path: Path) -> list[tuple[str, float, float]]:
    """The boxes of a flame graph: the tooltip, and where the box begins and ends."""
    svg = "{http://www.w3.org/2000/svg}"
    found = []
    for box in ElementTree.parse(path).iter(f"{svg}g"):
        title, rect = box.find(f"{svg}title"), box.find(f"{svg}rect")
        assert title is not None and title.text is not None and rect is not None
        x = float(rect.get("x", "nan"))
        found.append((title.text, x, x + float(rect.get("width", "nan"))))
    return found
