"""The arguments of kernels in the metadata of code objects, intact and damaged."""

from __future__ import annotations

import random
import struct

import msgpack
import pytest

from gpubpf.gcn.arguments import ArgumentPlace, places
from gpubpf.gcn.code_object import CodeObject
from gpubpf.images import offload_bundle
from hipsim_device import program


@pytest.fixture(scope="module")
def data() -> bytes:
    """Give the code object of arguments.hip."""
    (one,) = offload_bundle.code_objects(program("arguments").read_bytes())
    return one


def named(data: bytes) -> dict[str, tuple[ArgumentPlace, ...]]:
    return {name[:6]: found for name, found in places(CodeObject(data)).items()}


def with_metadata(data: bytes, content: bytes) -> bytes:
    """Return the code object with other metadata, which must be no longer."""
    mark = struct.pack("<I", 32) + b"AMDGPU\0\0"
    at = data.index(mark)
    size = struct.unpack_from("<I", data, at - 4)[0]
    assert len(content) <= size
    return (
        data[: at - 4] + struct.pack("<I", len(content)) + mark + content.ljust(size, b"\0")
        + data[at + len(mark) + size :]
    )  # fmt: skip


def test_places(data: bytes) -> None:
    places_of_many = [(0, 8), (8, 4), (16, 8), (24, 1), (28, 20), (48, 2), (50, 3), (56, 4), (64, 8), (72, 1)]
    assert named(data) == {"_Z4man": tuple(ArgumentPlace(*one) for one in places_of_many), "_Z4non": ()}


@pytest.mark.parametrize(
    "known",
    [
        None, 5, [], {}, {"amdhsa.kernels": 5}, {"amdhsa.kernels": [5, {}, {".symbol": 5, ".args": []}]},
        {"amdhsa.kernels": [{".symbol": "k.kd", ".args": [{".value_kind": "by_value", ".offset": -1, ".size": 4}]}]},
        {"amdhsa.kernels": [{".symbol": "k.kd", ".args": [{".value_kind": 1, ".offset": 0, ".size": 1 << 40}]}]},
        {"amdhsa.kernels": [{".symbol": "k.kd", ".args": [{".value_kind": 1, ".offset": "0", ".size": None}]}]},
        {"amdhsa.kernels": [{".symbol": "k.kd", ".args": 7}]},
    ],
)  # fmt: skip
def test_metadata_that_is_wrong(data: bytes, known: object) -> None:
    assert places(CodeObject(with_metadata(data, msgpack.packb(known)))) == {}


def test_metadata_that_is_damaged(data: bytes) -> None:
    chance = random.Random(1)
    begin = data.index(b"AMDGPU\0\0")
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(chance.choice((1, 2, 20))):
            changed[begin - 12 + chance.randrange(2000)] = chance.randrange(256)
        places(CodeObject(bytes(changed)))
