"""wgmma against NumPy: types, layouts of matrices in shared memory, operands in registers."""

from __future__ import annotations

import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import engine_sparse
from engine_device import Array, Device, DeviceFault
from engine_tensor import BITS, Form, matrices, patterns, product, registers, spread
from gpubpf_sass import need

SWIZZLES = {
    0: (0, 16),
    128: (1, 128),
    64: (2, 64),
    32: (3, 32),
}  # bytes → the mode in a descriptor, bytes of a row


@dataclass(frozen=True)
class Case:
    """D, 64×N, += A × B. `turned`: whether neighbours along M (or N) are neighbours in memory, for A and B; `swizzle`: of both.

    `along`: they begin at this byte of K. `sparse`: A is, and this selects the lanes that have its metadata.
    """

    d: str
    a: str
    b: str
    n: int = 24
    swizzle: int = 0
    turned: tuple[int, int] = (0, 0)
    in_registers: bool = False
    signs: tuple[int, int] = (1, 1)
    scale: int = 1
    extra: str = ""
    along: int = 0
    sparse: int | None = None

    @property
    def k(self) -> int:
        """The columns of A as it is stored."""
        return 256 // BITS[self.a]

    @property
    def rows(self) -> int:
        """The rows of B."""
        return self.k if self.sparse is None else 2 * self.k

    @property
    def form(self) -> Form:
        """The multiplication of one of the four warps, as far as fragments of A and D of one tile go."""
        return Form(
            (16, 8, self.k),
            self.d,
            self.a,
            self.b,
            self.d,
            extra=".and.popc" if self.a == "b1" else self.extra,
        )

    @property
    def words(self) -> int:
        return self.n // 8 * self.form.words("d")

    @property
    def text(self) -> str:
        extra = ".and.popc" if self.a == "b1" else self.extra
        sp = "" if self.sparse is None else ".sp"
        types = f"{self.d}.{self.a}.{self.b}{extra}"
        name = f"wgmma.mma_async{sp}.sync.aligned.m64n{self.n}k{self.rows}.{types}"
        first = registers("b32", 50, 4) if self.in_registers else "%rd3"
        rest = ["%p1"] if self.sparse is None else ["%r54", str(self.sparse), "%p1"]
        if self.a not in ("s8", "u8", "b1"):
            rest += map(str, self.signs)
        if BITS[self.a] == 16:
            rest += map(str, self.turned[self.in_registers :])
        return f"{name} {registers(self.d, 0, self.words)}, {first}, %rd4, {', '.join(rest)};"


CASES = [
    *(Case("f32", "f16", "f16", swizzle=s) for s in SWIZZLES),
    *(Case("f32", "f16", "f16", 24 if s else 64, s, (1, 1), signs=(-1, 1)) for s in SWIZZLES),
    Case("f32", "bf16", "bf16", swizzle=128, turned=(0, 1), in_registers=True),
    Case("f16", "f16", "f16", swizzle=64, signs=(-1, -1), along=32),
    Case("f32", "tf32", "tf32", swizzle=128, along=96),
    Case("f32", "e4m3", "e5m2", 256, swizzle=32),
    Case("f16", "e5m2", "e5m2", in_registers=True, signs=(1, -1)),
    Case("s32", "s8", "u8", extra=".satfinite"),
    Case("s32", "u8", "s8", swizzle=128, scale=0),
    Case("s32", "b1", "b1", swizzle=64),
    *(Case("f32", "f16", "f16", swizzle=s, sparse=s // 128) for s in (0, 64, 128)),
    *(Case("f32", "bf16", "bf16", 64 if s else 24, s, (1, 1), sparse=0) for s in SWIZZLES),
    Case("f16", "f16", "f16", turned=(0, 1), in_registers=True, signs=(-1, 1), sparse=1),
    Case("f32", "tf32", "tf32", swizzle=128, along=64, sparse=1),
    Case("f32", "tf32", "tf32", in_registers=True, scale=0, sparse=0),
    Case("f32", "e4m3", "e5m2", 256, swizzle=128, sparse=0),
    Case("f16", "e5m2", "e4m3", swizzle=64, in_registers=True, sparse=0),
    Case("s32", "s8", "u8", extra=".satfinite", sparse=0),
]


def kernel(name: str, case: Case) -> str:
    """A kernel that copies 48 KiB to shared memory, and multiplies. Each thread has its registers of D and A in 512 bytes."""
    text = f""".visible .entry {name}(.param .u64 a, .param .u64 b, .param .u64 da, .param .u64 db, .param .u64 regs) {{
.reg .pred %p<4>; .reg .b32 %r<130>; .reg .f32 %f<130>; .reg .b64 %rd<12>; .shared .align 1024 .b8 tile[49152];
ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [da]; ld.param.u64 %rd4, [db]; ld.param.u64 %rd5, [regs];
mov.u32 %r128, %tid.x; mul.wide.u32 %rd6, %r128, 512; add.u64 %rd2, %rd2, %rd6; mul.wide.u32 %rd6, %r128, 32; add.u64 %rd5, %rd5, %rd6;
mov.u64 %rd7, tile; setp.eq.u32 %p1, {case.scale}, 1;
IN: mul.wide.u32 %rd8, %r128, 4; add.u64 %rd9, %rd8, %rd1; add.u64 %rd10, %rd8, %rd7;
ld.global.u32 %r129, [%rd9]; st.shared.u32 [%rd10], %r129; add.u32 %r128, %r128, 128; setp.lt.u32 %p2, %r128, 12288; @%p2 bra IN;
bar.sync 0;
"""
    kind = "f" if case.d == "f32" else "r"
    if case.in_registers:
        text += "ld.global.v4.b32 {%r50, %r51, %r52, %r53}, [%rd5];\n"
    if case.sparse is not None:
        text += "ld.global.b32 %r54, [%rd5+16];\n"
    text += "".join(f"ld.global.b32 %{kind}{k}, [%rd2+{4 * k}];\n" for k in range(case.words))
    text += f"wgmma.fence.sync.aligned;\n{case.text}\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
    text += "".join(f"st.global.b32 [%rd2+{4 * k}], %{kind}{k};\n" for k in range(case.words))
    return text + "ret;\n}\n"


@functools.cache
def ptx() -> str:
    head = ".version 8.4\n.target sm_90a\n.address_size 64\n"
    return head + "".join(kernel(f"k{n}", case) for n, case in enumerate(CASES))


@functools.cache
def device() -> Device:
    return Device(ptx())


def offset(shape: tuple[int, int, int], strides: tuple[int, int, int], index: int) -> int:
    """The offset of an index in a mode of a CuTe layout: its digits, the first runs fastest."""
    total = 0
    for size, stride in zip(shape, strides, strict=True):
        index, digit = divmod(index, size)
        total += digit * stride
    return total


def put(memory: np.ndarray, at: int, matrix: np.ndarray, bits: int, case: Case, turned: int) -> int:
    """Write a matrix [M or N][K] of bytes at `at` in one of the canonical layouts (PTX ISA 9.7.15.5.1.2.1.3); return its descriptor.

    Elements are bytes here: single bits come as bytes of eight.
    """
    width = max(1, bits // 8)
    mode, row = SWIZZLES[case.swizzle]
    t, units = 16 // width, row // 16
    length = matrix.shape[1]
    if turned:
        leading, stride = (length * row, 8 * row) if mode else (128, 16 * length)
        across = (t, units, 1 << 20), (width, 16, leading if mode else stride)
        along = (8, 1 << 20, 1), (row, stride if mode else leading, 0)
    else:
        leading, stride = 128, 8 * (row if mode else length * width)
        across = (8, 1 << 20, 1), (row, stride, 0)
        along = (t, 1 << 20, 1), (width, 16 if mode else leading, 0)
    for x, k in np.ndindex(*matrix.shape):
        place = at + case.along + offset(*across, x) + offset(*along, k)
        place ^= (place >> 7 & ((row // 16) - 1)) << 4  # Swizzle<log2(units), 4, 3>
        memory[place : place + width] = np.frombuffer(matrix[x, k].tobytes()[:width], np.uint8)
    return (at + case.along) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


def test_ptxas_takes_the_kernels(tmp_path: Path) -> None:
    (tmp_path / "kernels.ptx").write_text(ptx())
    command = [need("ptxas"), "-O0", "-arch=sm_90a", "-o", "/dev/null", tmp_path / "kernels.ptx"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", range(len(CASES)))
def test_wgmma(number: int) -> None:
    case = CASES[number]
    rng = np.random.default_rng(number)
    n, k, bits = case.n, case.k, BITS[case.a]
    a = patterns(rng, case.a, 64 * k).reshape(64, k)
    b = patterns(rng, case.b, n * case.rows).reshape(n, case.rows)
    memory = np.zeros(49152, np.uint8)
    eight = [np.packbits(x.astype(np.uint8), axis=1, bitorder="little").astype(np.uint64) for x in (a, b)]
    stored = eight if bits == 1 else (a, b)
    descriptors = [
        put(memory, at, x, bits, case, turned)
        for at, x, turned in zip((0, 16384), stored, case.turned, strict=True)
    ]
    c = patterns(rng, case.d, 64 * n).reshape(64, n)
    given, held = np.zeros((128, 128), np.uint32), np.zeros((128, 8), np.uint32)
    form = case.form
    for warp, tile in np.ndindex(4, n // 8):
        part = c[16 * warp : 16 * warp + 16, 8 * tile : 8 * tile + 8]
        at = tile * form.words("d")
        given[32 * warp : 32 * warp + 32, at : at + form.words("d")] = lanes_of(form, "d", part)
    for warp in range(4):
        held[32 * warp : 32 * warp + 32, :4] = lanes_of(form, "a", a[16 * warp : 16 * warp + 16])
    if case.sparse is not None:
        chosen = engine_sparse.choose(rng, 64, case.rows, bits, ordered=False)
        for warp in range(4):
            part = chosen[16 * warp : 16 * warp + 16]
            held[32 * warp : 32 * warp + 32, 4] = engine_sparse.metadata(rng, part, bits, case.sparse)
        a = engine_sparse.expand(a, chosen, bits)
    out = Array(given)
    device().launch(f"k{number}", 1, 128, Array(memory), out, *descriptors, Array(held))
    got = np.empty((64, n), np.uint64)
    for warp, tile in np.ndindex(4, n // 8):
        at = tile * form.words("d")
        words = out.host[32 * warp : 32 * warp + 32, at : at + form.words("d")].astype(np.uint64)
        got[16 * warp : 16 * warp + 16, 8 * tile : 8 * tile + 8] = matrices(form, "d", words)[0]
    if case.a not in ("s8", "u8", "b1") and case.signs[0] * case.signs[1] < 0:
        a = a ^ np.uint64(1 << (bits - 1))
    if not case.scale:
        c = np.zeros_like(c)
    assert (got == product(form, a, b.T, c)).all()


def lanes_of(form: Form, which: str, matrix: np.ndarray) -> np.ndarray:
    return spread(form, which, matrix).astype(np.uint32)


def test_a_descriptor_outside_of_shared_memory_is_a_fault() -> None:
    out = Array(np.zeros((128, 128), np.uint32))
    with pytest.raises(DeviceFault) as caught:
        device().launch(
            "k0", 1, 128, Array(np.zeros(49152, np.uint8)), out, 0x3FF0, 0x3FF0, Array(np.zeros((128, 8)))
        )
    assert caught.value.code == 700


def test_a_sparse_multiplication_with_the_rows_of_b_across_a_swizzle_is_a_fault() -> None:
    """What 64 bytes along K mean in a swizzle of 32 bytes is not documented."""
    number = next(n for n, case in enumerate(CASES) if case.sparse is not None and not case.turned[1])
    arrays = (Array(np.zeros(49152, np.uint8)), Array(np.zeros((128, 128), np.uint32)))
    with pytest.raises(DeviceFault) as caught:
        device().launch(f"k{number}", 1, 128, *arrays, 3 << 62, 3 << 62, Array(np.zeros((128, 8))))
    assert caught.value.code == 715
