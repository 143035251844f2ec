"""tensormap.replace and tensormap.cp_fenceproxy: maps that kernels make from zeros and change, as bulk tensor copies then use them."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array, Device, DeviceFault
from gpubpf_sass import need

HEAD = ".version 8.6\n.target sm_100a\n.address_size 64\n"
# As PTX numbers them, with the types in NumPy that have the same bytes.
ELEMENT_TYPES = {
    "u8": "u1", "u16": "u2", "u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8",
    "f16": "f2", "f32": "f4", "f32.ftz": "f4", "f64": "f8", "bf16": "u2",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Box:
    """A box of a tensor, and how a copy lays it out. Sizes are in elements, the first dimension first."""

    type: str
    sizes: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    at: tuple[int, ...]
    swizzle: int = 0
    nan: bool = False
    atom: int = 0  # the swizzle moves 16, 32 (two ways) or 64 bytes together

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(ELEMENT_TYPES[self.type])

    def fields(self, space: str, at: str) -> list[str]:
        """Return the instructions that write all fields of a map at an address. The tensor's address is in %rd1."""
        width = self.dtype.itemsize
        strides = np.cumprod([width, *self.sizes])[1:-1]
        rows = [("global_address", "b64", "%rd1"), ("rank", "b32", f"{len(self.sizes) - 1}")]
        for name, values in (
            ("box_dim", self.box),
            ("global_dim", self.sizes),
            ("element_stride", self.steps),
        ):
            rows += [(name, "b32", f"{d}, {value}") for d, value in enumerate(values)]
        rows += [("global_stride", "b64", f"{d}, {stride}") for d, stride in enumerate(strides)]
        rows += [
            ("elemtype", "b32", str(list(ELEMENT_TYPES).index(self.type))),
            ("interleave_layout", "b32", "0"),
        ]
        rows += [("swizzle_mode", "b32", str(self.swizzle)), ("fill_mode", "b32", str(int(self.nan)))]
        rows.append(("swizzle_atomicity", "b32", str(self.atom)))
        return [f"tensormap.replace.tile.{name}{space}.b1024.{t} [{at}], {text};" for name, t, text in rows]

    def copied(self, tensor: np.ndarray) -> np.ndarray:
        """Return the bytes of the box in shared memory."""
        width = tensor.itemsize
        steps = (1, *self.steps[1:])
        counts = [-(-n // step) for n, step in zip(self.box, steps, strict=True)]
        out = np.zeros(int(np.prod(counts)) * width, np.uint8)
        for k, place in enumerate(itertools.product(*map(range, reversed(counts)))):
            at = [a + p * s for a, p, s in zip(self.at, reversed(place), steps, strict=True)]
            fill = np.frombuffer(b"\xf7\x7f" * 4, np.uint8)[:width] if self.nan else np.zeros(width, np.uint8)
            inside = all(0 <= x < n for x, n in zip(at, self.sizes, strict=True))
            value = tensor[tuple(reversed(at))].tobytes() if inside else fill.tobytes()
            to = k * width
            unit = (16, 32, 32, 64)[self.atom]  # row n of 128 bytes has its unit u where unit u ^ n was
            to ^= to // 128 % (16 * 2**self.swizzle // unit) * unit
            out[to : to + width] = np.frombuffer(value, np.uint8)
        return out


BOXES = [
    Box("f32", (40, 20), (8, 4), (1, 1), (36, 17), nan=True),
    Box("f16", (72, 30), (64, 8), (1, 2), (3, 25), swizzle=3),
    Box("u32", (20, 10, 6), (8, 7, 4), (1, 3, 2), (2, 1, 0)),
    Box("u8", (1024,), (256,), (1,), (900,)),
    Box("f64", (20, 10, 6), (4, 4, 3), (1, 1, 1), (15, 8, 4), swizzle=1, nan=True),
    Box("s64", (12, 6, 5, 4), (4, 3, 2, 3), (1, 1, 1, 1), (5, 2, 3, 2)),
    Box("s32", (12, 6, 5, 4, 3), (4, 3, 2, 2, 2), (1, 2, 1, 1, 1), (-2, -1, 3, 2, 2)),
    Box("bf16", (16, 16), (8, 4), (1, 1), (12, 14), nan=True),
    Box("u64", (16, 16), (8, 4), (1, 1), (3, 14)),
    Box("f32.ftz", (16, 16), (8, 4), (1, 1), (3, 14)),
    Box("u16", (64, 9), (32, 9), (8, 1), (8, 0), swizzle=2),  # the first dimension has no step
    Box("f16", (72, 30), (64, 8), (1, 2), (3, 25), swizzle=3, atom=1),
    Box("f32", (40, 20), (32, 9), (1, 1), (5, 2), swizzle=3, atom=3),
]


def load(box: Box, at: str) -> str:
    """Return instructions of one thread that copy a box to `tile`, and the block's that store the tile in [%rd3]."""
    rank, places = len(box.at), ", ".join(map(str, box.at))
    return f"""
    mbarrier.init.shared::cta.b64 [bar], 1;
    fence.proxy.tensormap::generic.acquire.gpu [{at}], 128;
    cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [tile], [{at}, {{{places}}}], [bar];
    mov.u32 %r1, tile; mov.u32 %r2, 0;
    LOOP: ld.shared.u32 %r3, [%r1]; st.global.u32 [%rd3], %r3; add.u32 %r1, %r1, 4; add.u64 %rd3, %rd3, 4;
    add.u32 %r2, %r2, 4; setp.lt.u32 %p1, %r2, 4096; @%p1 bra LOOP;"""


def kernel(body: str, name: str = "k") -> str:
    """Return a kernel of one thread. %rd1 is the tensor's address, %rd2 that of 128 bytes for a map, %rd3 that of the output."""
    return f""".visible .entry {name}(.param .u64 a, .param .u64 b, .param .u64 c) {{
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<3>;
.shared .align 128 .b8 tile[4096]; .shared .align 128 .b64 map[16]; .shared .align 8 .b64 bar;
ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [c];
{body}
ret; }}
"""


def run(device: Device, name: str, tensor: np.ndarray, room: int = 0) -> np.ndarray:
    """Return what the kernel stored. `room`: each byte of the memory for the map before the launch."""
    out = Array(np.zeros(4096, np.uint8))
    device.launch(name, 1, 1, Array(tensor), Array(np.full(128, room, np.uint8)), out)
    return out.host.copy()


def tensor_of(box: Box) -> np.ndarray:
    random = np.random.default_rng(3)
    shape = tuple(reversed(box.sizes))
    return random.integers(0, 100, shape).astype(box.dtype)


def made(box: Box, where: str) -> str:
    """Return instructions that make a map at %rd2 from zeros."""
    if where != "shared":
        return "\n".join(box.fields(where, "%rd2"))
    zeros = " ".join(f"st.shared.u64 map[{n}], 0;" for n in range(16))
    fence = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
    return "\n".join([zeros, *box.fields(".shared::cta", "map"), f"{fence} [%rd2], [map], 128;"])


def test_maps_made_from_zeros(tmp_path: Path) -> None:
    """Each is made in shared memory, in global memory, and at an address of any space."""
    kernels = {
        f"k{n}_{k}": (box, made(box, where) + load(box, "%rd2"))
        for n, box in enumerate(BOXES)
        for k, where in enumerate(("shared", ".global", ""))
        if n < 2 or n % 3 == k
    }
    text = HEAD + "".join(kernel(body, name) for name, (_, body) in kernels.items())
    (tmp_path / "k.ptx").write_text(text)
    subprocess.run([need("ptxas"), "-arch=sm_100a", tmp_path / "k.ptx", "-o", tmp_path / "k"], check=True)
    device = Device(text)
    for name, (box, _) in kernels.items():
        tensor = tensor_of(box)
        wanted = box.copied(tensor)
        assert (run(device, name, tensor)[: wanted.size] == wanted).all(), (name, box)


def test_a_map_that_is_changed_for_the_next_copy() -> None:
    first = BOXES[0]
    second = dataclasses.replace(first, box=(4, 9), at=(5, 6), nan=False)
    changes = [i for i in second.fields("", "%rd2") if "box_dim" in i or "fill_mode" in i]
    body = [made(first, ""), load(first, "%rd2"), *changes, "sub.u64 %rd3, %rd3, 4096;"]
    again = load(second, "%rd2").replace("LOOP", "AGAIN").replace("mbarrier.init", "//")
    tensor = tensor_of(first)
    wanted = second.copied(tensor)
    found = run(Device(HEAD + kernel("\n".join([*body, again]))), "k", tensor)
    assert (found[: wanted.size] == wanted).all()


def test_maps_that_no_copy_can_use_are_faults() -> None:
    box = BOXES[0]
    changes = [
        "box_dim.b1024.b32 [%rd2], 1, 257",
        "box_dim.b1024.b32 [%rd2], 0, 0",
        "box_dim.b1024.b32 [%rd2], 0, 9",  # 36 bytes
        "element_stride.b1024.b32 [%rd2], 1, 9",
        "global_stride.b1024.b64 [%rd2], 0, 8",
        "rank.b1024.b32 [%rd2], 0xffffffff",
        "swizzle_mode.b1024.b32 [%rd2], 3",  # its rows are 32 bytes
        "global_address.b1024.b64 [%rd2], 4096",
    ]
    bodies = [f"{made(box, '')} tensormap.replace.tile.{change}; {load(box, '%rd2')}" for change in changes]
    device = Device(HEAD + "".join(kernel(body, f"k{n}") for n, body in enumerate(bodies)))
    for n, change in enumerate(changes):
        message = "illegal address" if "global_address" in change else "the tensor map does not fit"
        with pytest.raises(DeviceFault, match=message):
            run(device, f"k{n}", tensor_of(box))


def test_what_is_not_a_map_is_a_fault() -> None:
    change = "tensormap.replace.tile.rank.b1024.b32 [%rd2], 1;"
    device = Device(HEAD + kernel(change, "k") + kernel(f"mov.u64 %rd2, 0; {change}", "null"))
    with pytest.raises(DeviceFault, match="this is not a tensor map"):
        run(device, "k", tensor_of(BOXES[0]), 1)
    with pytest.raises(DeviceFault, match="illegal address"):
        run(device, "null", tensor_of(BOXES[0]))


def test_values_that_are_not_supported_are_named() -> None:
    """Copies do not support the fields of the first four. PTX has no values such as the others, except for the last."""
    fields = ["elemtype.b1024.b32 [%rd2], 11", "elemtype.b1024.b32 [%rd2], 13"]
    fields += ["interleave_layout.b1024.b32 [%rd2], 1", "swizzle_atomicity.b1024.b32 [%rd2], 2"]
    bodies = [
        f"{made(BOXES[0], '')} tensormap.replace.tile.{field}; {load(BOXES[0], '%rd2')}" for field in fields
    ]
    head = HEAD.replace("8.6", "8.7")
    device = Device(head + "".join(kernel(body, f"k{n}") for n, body in enumerate(bodies)))
    for n, why in enumerate(["of .tf32 or of packed types"] * 2 + ["interleaved layout", "flip 8 bytes"]):
        with pytest.raises(DeviceFault, match=f"the embedded device does not .*{why}"):
            run(device, f"k{n}", tensor_of(BOXES[0]))
    values = ["elemtype.b1024.b32 [%rd2], 16", "swizzle_mode.b1024.b32 [%rd2], 4"]
    values += ["fill_mode.b1024.b32 [%rd2], 2", "box_dim.b1024.b32 [%rd2], 5, 1"]
    values.append("global_stride.b1024.b64 [%rd2], 4, 16")
    bodies = [f"tensormap.replace.tile.{value};" for value in values]
    device = Device(HEAD + "".join(kernel(body, f"k{n}") for n, body in enumerate(bodies)))
    for n in range(len(values)):
        with pytest.raises(DeviceFault, match=r"does not support tensormap\.replace\.tile"):
            run(device, f"k{n}", tensor_of(BOXES[0]))
