"""Bulk tensor copies in im2col mode, of four rows, and for pairs of blocks, against NumPy. The driver makes the maps."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cudasim_device import libraries
from engine_device import Array, Device, DeviceFault
from gpubpf_sass import need

HEAD = ".version 8.6\n.target sm_100a\n.address_size 64\n"
TYPES = {"u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 8}
DTYPES = {
    "u8": "u1",
    "u16": "u2",
    "u32": "u4",
    "s32": "i4",
    "u64": "u8",
    "s64": "i8",
    "f16": "f2",
    "f32": "f4",
}
# Encodes a map whose arguments are in sys.argv: the library, the type, the address, the swizzle, the filling, sizes, strides, steps,
# and either the box or lower, upper, and [channels, pixels]. Prints the status and the map.
ENCODE = """
import ctypes, json, sys
library, given = ctypes.CDLL(sys.argv[1]), json.loads(sys.argv[2])
kind, address, swizzle, fill, sizes, strides, steps, *rest = given
def numbers(t, values): return (t * max(1, len(values)))(*values)
room = ctypes.create_string_buffer(192)
at = -ctypes.addressof(room) % 64
long, short = ctypes.c_uint64, ctypes.c_uint32
place = ctypes.c_void_p(ctypes.addressof(room) + at)
common = [place, kind, len(sizes), ctypes.c_void_p(address), numbers(long, sizes), numbers(long, strides)]
last = [numbers(short, steps), 0, swizzle, 0, fill]
assert library.cuInit(0) == 0
if len(rest) == 1:
    status = library.cuTensorMapEncodeTiled(*common, numbers(short, rest[0]), *last)
else:
    lower, upper, box = rest
    corners = [numbers(ctypes.c_int, corner) for corner in (lower, upper)]
    status = library.cuTensorMapEncodeIm2col(*common, *corners, *box, *last)
print(status, room.raw[at : at + 128].hex())
"""


@dataclasses.dataclass(frozen=True)
class Pixels:
    """A copy in im2col mode. Sizes, steps and coordinates: channels first. `lower`, `upper`, `offsets`: of width, height, depth."""

    type: str
    sizes: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    box: tuple[int, int]
    at: tuple[int, ...]
    offsets: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int = 0
    nan: int = 0

    @property
    def rank(self) -> int:
        return len(self.sizes)

    def places(self, offsets: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the coordinates of all elements, in their order in shared memory."""
        inner = [
            range(low, size + high, step)
            for low, high, size, step in zip(
                self.lower, self.upper, self.sizes[1:-1], self.steps[1:-1], strict=True
            )
        ]
        images = range(self.sizes[-1] + self.box[1])
        pixels = [place[::-1] for place in itertools.product(images, *reversed(inner))]
        first = pixels.index(self.at[1:])
        return [
            (
                self.at[0] + channel,
                *(x + o for x, o in zip(pixel[:-1], offsets, strict=True)),
                pixel[-1],
            )
            for pixel in pixels[first : first + self.box[1]]
            for channel in range(self.box[0])
        ]


COPIES = [
    # A convolution of 3×3 with padding of 1: each offset moves the same pixels.
    Pixels("f16", (64, 9, 7, 3), (-1, -1), (-1, -1), (64, 40), (0, -1, -1, 0), (0, 0), (1, 1, 1, 1), 3),
    Pixels("f16", (64, 9, 7, 3), (-1, -1), (-1, -1), (64, 40), (0, 4, 2, 1), (2, 1), (1, 1, 1, 1), 3, 1),
    Pixels("f32", (24, 11, 3), (-2,), (1,), (8, 30), (20, 3, 1), (1,), (1, 1, 1), 1),
    Pixels("u8", (32, 12, 10, 2), (0, -2), (-3, 0), (16, 33), (16, 4, 1, 1), (3, 2), (1, 2, 3, 1)),
    Pixels("s32", (8, 5, 4, 3, 2), (-1, 0, -1), (0, -1, 1), (8, 50), (0, 2, 1, 1, 1), (1, 1, 0), (1, 1, 1, 2, 1)),
]  # fmt: skip


def encoded(
    type: str, tensor: Array, sizes: tuple[int, ...], *rest: object, swizzle: int = 0, nan: int = 0
) -> tuple[int, bytes]:
    """Return the status of the driver and the map. `rest`: steps, and the box or what im2col mode has."""
    width = tensor.host.itemsize
    strides = [int(n) for n in np.cumprod([width, *sizes])[1:-1]]
    given = json.dumps([TYPES[type], tensor.address, swizzle, nan, sizes, strides, *rest])
    command = [sys.executable, "-c", ENCODE, str(libraries() / "libcuda.so.1"), given]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    status, found = done.stdout.split()
    return int(status), bytes.fromhex(found)


def of(copy: Pixels, tensor: Array) -> bytes:
    arguments = (copy.steps, copy.lower, copy.upper, copy.box)
    status, found = encoded(copy.type, tensor, copy.sizes, *arguments, swizzle=copy.swizzle, nan=copy.nan)
    assert status == 0
    return found


def tensor_of(type: str, sizes: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(5).integers(1, 100, tuple(reversed(sizes))).astype(DTYPES[type])


def shuffled(index: int, width: int, swizzle: int) -> int:
    """Return the place in shared memory of an element: a swizzle exchanges 16-byte parts of a row."""
    at = index * width
    return at ^ (at >> 7 & (1 << swizzle) - 1) << 4


def kernel(name: str, body: str, before: str = "") -> str:
    """A kernel of one thread: %rd1 is the map, %rd2 16 KiB that go into the tile at first, %rd3 16 KiB that get it at the end."""
    return f""".visible .entry {name}(.param .u64 a, .param .u64 b, .param .u64 c) {before} {{
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<3>; .reg .b16 %h<5>;
.shared .align 1024 .b8 tile[16384]; .shared .align 8 .b64 bar;
ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [c];
mov.u32 %r1, tile; mov.u32 %r2, 0;
FILL: ld.global.u32 %r3, [%rd2]; st.shared.u32 [%r1], %r3; add.u32 %r1, %r1, 4; add.u64 %rd2, %rd2, 4;
add.u32 %r2, %r2, 4; setp.lt.u32 %p1, %r2, 16384; @%p1 bra FILL;
mbarrier.init.shared::cta.b64 [bar], 1;
{body}
mov.u32 %r1, tile; mov.u32 %r2, 0;
LOOP: ld.shared.u32 %r3, [%r1]; st.global.u32 [%rd3], %r3; add.u32 %r1, %r1, 4; add.u64 %rd3, %rd3, 4;
add.u32 %r2, %r2, 4; setp.lt.u32 %p1, %r2, 16384; @%p1 bra LOOP;
ret; }}
"""


def waited(copy: str, size: int) -> str:
    """Return a load, and a wait that ends if exactly `size` bytes have come."""
    return f"""mbarrier.arrive.expect_tx.shared::cta.b64 %rd4, [bar], {size};
    {copy}
    mbarrier.test_wait.shared::cta.b64 %p2, [bar], %rd4; @!%p2 trap;"""


def load(copy: Pixels) -> str:
    offsets = " ".join(f"mov.u16 %h{n}, {o};" for n, o in enumerate(copy.offsets))
    names = ", ".join(f"%h{n}" for n in range(len(copy.offsets)))
    places = ", ".join(map(str, copy.at))
    size = copy.box[0] * copy.box[1] * np.dtype(DTYPES[copy.type]).itemsize
    name = f"cp.async.bulk.tensor.{copy.rank}d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
    return waited(f"{offsets} {name} [tile], [%rd1, {{{places}}}], [bar], {{{names}}};", size)


def stored(copy: Pixels, operation: str = "") -> str:
    name = f"cp.{'reduce.' * bool(operation)}async.bulk.tensor.{copy.rank}d.global.shared::cta"
    places = ", ".join(map(str, copy.at))
    return f"{name}{operation and '.'}{operation}.im2col_no_offs.bulk_group [%rd1, {{{places}}}], [tile];"


def launched(device: Device, name: str, found: bytes, given: np.ndarray | None = None) -> np.ndarray:
    """Return the bytes of the tile at the end."""
    start, out = np.zeros(16384, np.uint8), Array(np.zeros(16384, np.uint8))
    if given is not None:
        start[: given.size] = given
    room = np.zeros(256, np.uint8)
    place = Array(room)
    at = -place.address % 64
    place.host[at : at + 128] = np.frombuffer(found, np.uint8)
    device.launch(name, 1, 1, place.address + at, Array(start), out)
    return out.host


def proven(text: str, folder: Path) -> Device:
    """Return the device with a module that ptxas accepts."""
    (folder / "k.ptx").write_text(text)
    subprocess.run([need("ptxas"), "-arch=sm_100a", folder / "k.ptx", "-o", folder / "k"], check=True)
    return Device(text)


def test_pixels(tmp_path: Path) -> None:
    """Loads, stores and additions of the pixels that a convolution needs."""
    bodies = [(load(c), stored(c), stored(c, "add")) for c in COPIES]
    names = itertools.product(range(len(COPIES)), range(3))
    device = proven(HEAD + "".join(kernel(f"k{n}_{k}", bodies[n][k]) for n, k in names), tmp_path)
    for n, copy in enumerate(COPIES):
        original = tensor_of(copy.type, copy.sizes)
        tensor = Array(original)
        found, width = of(copy, tensor), original.itemsize
        for k in range(3):
            if k == 2 and copy.type == "u8":
                continue  # there are no such additions
            tensor.host[...] = original
            offsets = copy.offsets if k == 0 else (0,) * len(copy.offsets)
            places = copy.places(offsets)
            data = np.random.default_rng(n).integers(1, 50, len(places)).astype(original.dtype)
            raw = np.zeros(data.nbytes, np.uint8)
            after = original.copy()
            expected = np.zeros(data.nbytes, np.uint8)
            for index, place in enumerate(places):
                to = shuffled(index, width, copy.swizzle)
                raw[to : to + width] = np.frombuffer(data[index].tobytes(), np.uint8)
                there = place[::-1]
                inside = all(0 <= x < size for x, size in zip(place, copy.sizes, strict=True))
                value = (
                    original[there].tobytes()
                    if inside
                    else (b"\xf7\x7f" * 4)[:width]
                    if copy.nan
                    else bytes(width)
                )
                expected[to : to + width] = np.frombuffer(value, np.uint8)
                if inside and k:
                    after[there] = data[index] + (after[there] if k == 2 else 0)
            tile = launched(device, f"k{n}_{k}", found, raw)
            assert (tile[: raw.size] == (expected if k == 0 else raw)).all(), (copy, k)
            assert (tensor.host == after).all(), (copy, k)


def test_a_map_of_another_mode_is_a_fault(tmp_path: Path) -> None:
    copy = COPIES[2]
    tile = "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    bodies = [load(copy), f"{tile} [tile], [%rd1, {{0, 0, 0}}], [bar];"]
    device = proven(HEAD + "".join(kernel(f"k{n}", body) for n, body in enumerate(bodies)), tmp_path)
    tensor = Array(tensor_of(copy.type, copy.sizes))
    _, tiled = encoded(copy.type, tensor, copy.sizes, (1, 1, 1), (8, 3, 1))
    for name, found in (("k0", tiled), ("k1", of(copy, tensor))):
        with pytest.raises(DeviceFault, match="the tensor map does not fit"):
            launched(device, name, found)


def test_maps_that_are_not_valid() -> None:
    copy = COPIES[0]
    tensor = Array(tensor_of(copy.type, copy.sizes))
    invalid, unsupported = 1, 801
    for change, status in (
        ({"lower": (-129, 0)}, invalid),
        ({"upper": (128, 0)}, invalid),
        ({"lower": (5, 0), "upper": (-4, 0)}, invalid),  # an empty box
        ({"box": (0, 8)}, invalid),
        ({"box": (8, 1025)}, invalid),
        ({"box": (12, 8)}, invalid),  # rows of 24 bytes
        ({"steps": (1, 9, 1, 1)}, invalid),
        ({"steps": (1, 1, 1, 2)}, unsupported),
    ):
        other = dataclasses.replace(copy, swizzle=0, **change)
        arguments = (other.steps, other.lower, other.upper, other.box)
        assert encoded(other.type, tensor, other.sizes, *arguments)[0] == status, change
    assert encoded("f16", tensor, (64, 189), (1, 1), (), (), (64, 8))[0] == invalid  # two dimensions


def test_four_rows(tmp_path: Path) -> None:
    """.tile::gather4 and .tile::scatter4: the coordinates are a column and four rows."""
    places = [5, 30, 2, -1, 7]
    text = ", ".join(map(str, places))
    gather = "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes"
    scatter = "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
    bodies = [
        waited(f"{gather} [tile], [%rd1, {{{text}}}], [bar];", 4 * 32 * 4),
        f"{scatter} [%rd1, {{{text}}}], [tile];",
    ]
    device = proven(HEAD + "".join(kernel(f"k{n}", body) for n, body in enumerate(bodies)), tmp_path)
    original = tensor_of("u32", (32, 31))
    tensor = Array(original)
    status, found = encoded("u32", tensor, (32, 31), (1, 1), (32, 1), swizzle=3)
    assert status == 0
    rows = np.zeros((4, 32), np.uint32)
    for k, row in enumerate(places[1:]):
        if 0 <= row < 31:
            rows[k, : 32 - 5] = original[row, 5:]
    order = np.argsort([shuffled(index, 4, 3) for index in range(128)])
    tile = launched(device, "k0", found)[:512].view(np.uint32)
    assert (tile == rows.ravel()[order]).all()

    data = np.arange(1000, 1128, dtype=np.uint32).reshape(4, 32)
    launched(device, "k1", found, data.ravel()[order].copy().view(np.uint8))
    after = original.copy()
    for k, row in enumerate(places[1:]):
        if 0 <= row < 31:
            after[row, 5:] = data[k, : 32 - 5]
    assert (tensor.host == after).all()
    _, tall = encoded("u32", tensor, (32, 31), (1, 1), (32, 2), swizzle=3)
    with pytest.raises(DeviceFault, match="the tensor map does not fit"):
        launched(device, "k0", tall)


def test_the_barrier_of_a_pair(tmp_path: Path) -> None:
    """With .cta_group::2, a multicast completes on the mbarriers of one block of each pair; with .cta_group::1, on each block's."""
    name = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
    )
    texts = []
    for group in (1, 2):
        body = f"""
        mov.u32 %r4, %cluster_ctarank; shl.b32 %r5, %r4, 14; cvt.u64.u32 %rd5, %r5; add.u64 %rd3, %rd3, %rd5;
        mbarrier.arrive.expect_tx.shared::cta.b64 %rd4, [bar], {512 * group};
        barrier.cluster.arrive; barrier.cluster.wait;
        mov.u16 %h1, 15; setp.ne.u32 %p1, %r4, 1; @%p1 bra DONE;
        {name}.cta_group::{group} [tile], [%rd1, {{0, 3}}], [bar], %h1;
        DONE: barrier.cluster.arrive; barrier.cluster.wait;
        mbarrier.test_wait.shared::cta.b64 %p2, [bar], %rd4; selp.u32 %r5, 1, 0, %p2; st.shared.u32 [tile+512], %r5;"""
        texts.append(kernel(f"k{group}", body, ".reqnctapercluster 4"))
    device = proven(HEAD + "".join(texts), tmp_path)
    original = tensor_of("u32", (32, 31))
    tensor = Array(original)
    _, found = encoded("u32", tensor, (32, 31), (1, 1), (32, 4))
    room = Array(np.zeros(256, np.uint8))
    at = -room.address % 64
    room.host[at : at + 128] = np.frombuffer(found, np.uint8)
    for group, complete in ((1, [1, 1, 1, 1]), (2, [0, 1, 0, 1])):
        out = Array(np.zeros((4, 4096), np.uint32))
        device.launch(f"k{group}", 4, 1, room.address + at, Array(np.zeros(16384, np.uint8)), out)
        assert (out.host[:, :128] == original[3:7].ravel()).all()
        assert out.host[:, 128].tolist() == complete
