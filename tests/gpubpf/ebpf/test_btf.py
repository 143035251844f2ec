"""Types that are made to cost much, or to be more than NumPy can represent."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from gpubpf.ebpf import btf, maps

pytestmark = pytest.mark.without_driver

INT = struct.pack("<IIII", 1, btf.INT << 24, 4, 32)
STRINGS = b"\0a\0"


def types(*parts: bytes) -> btf.Types:
    data = b"".join(parts)
    header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(data), len(data), len(STRINGS))
    return btf.Types(header + data + STRINGS)


def array(of: int) -> bytes:
    """An array with one element."""
    return struct.pack("<III", 0, btf.ARRAY << 24, 0) + struct.pack("<III", of, 1, 1)


def structure(of: int) -> bytes:
    return struct.pack("<III", 1, btf.STRUCT << 24 | 1, 4) + struct.pack("<III", 1, of, 0)


@pytest.mark.parametrize("levels", [1, 2, 3, 16])
def test_the_dimensions_of_all_levels_add_up(levels: int) -> None:
    """Arrays of arrays in a structure in arrays of arrays: a field of a field has the dimensions of all of them."""
    parts: list[bytes] = []
    for _ in range(levels):
        parts += [array(len(parts) + n + 2) for n in range(25)]
        parts.append(structure(len(parts) + 2))
    layout = types(*parts, INT).layout(1)
    value = np.zeros((3, 4), [("value", maps.dtype(layout, 4))])["value"]
    while value.dtype.names:
        value = value["a"]
    assert (value.ndim, layout is None) == ((27, False) if levels == 1 else (2, True))
