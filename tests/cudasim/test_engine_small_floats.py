"""mma of floats of 6 and 4 bits, and block scaling (sm_120a), against sums that NumPy makes of the values that PTX defines."""

from __future__ import annotations

import functools
import itertools
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import engine_sparse
from engine_device import Array, Device
from gpubpf_sass import need

HEAD = ".version 8.7\n.target sm_120a\n.address_size 64\n"
# Exponent bits, fraction bits, and the lowest bit of the element in its byte (kind::f8f6f4, kind::mxf8f6f4).
SMALL = {"e4m3": (4, 3, 0), "e5m2": (5, 2, 0), "e3m2": (3, 2, 0), "e2m3": (2, 3, 0), "e2m1": (2, 1, 2)}


@dataclass(frozen=True)
class Form:
    """A form of mma. `scales`: the type of factors, and how many a row of A has. `sparse`: A has half of its elements."""

    kind: str
    a: str
    b: str
    d: str = "f32"
    scales: tuple[str, int] = ("", 0)
    sparse: bool = False

    @property
    def bits(self) -> int:
        return 4 if "mxf4" in self.kind else 8

    @property
    def k(self) -> int:
        return (256 // self.bits) * (2 if self.sparse else 1)

    @property
    def name(self) -> str:
        scaled = f".block_scale.scale_vec::{self.scales[1]}X" if self.scales[1] else ""
        start = "mma.sp::ordered_metadata" if self.sparse else "mma"
        types = f"{self.d}.{self.a}.{self.b}.{self.d}" + (f".{self.scales[0]}" if scaled else "")
        return f"{start}.sync.aligned.m16n8k{self.k}.row.col.kind::{self.kind}{scaled}.{types}"


FORMS = [Form("f8f6f4", a, b, d) for a, b, d in itertools.product(SMALL, SMALL, ("f32", "f16"))]
FORMS += [Form("mxf8f6f4", a, b, scales=("ue8m0", 1)) for a, b in itertools.product(SMALL, SMALL)]
FORMS += [
    Form(kind, "e2m1", "e2m1", scales=scales)
    for kind, scales in (
        ("mxf4", ("ue8m0", 2)),
        ("mxf4nvf4", ("ue8m0", 2)),
        ("mxf4nvf4", ("ue4m3", 4)),
    )
]
FORMS += [
    Form("f8f6f4", "e2m3", "e5m2", sparse=True),
    Form("mxf8f6f4", "e3m2", "e2m1", scales=("ue8m0", 1), sparse=True),
    Form("mxf4", "e2m1", "e2m1", scales=("ue8m0", 2), sparse=True),
    Form("mxf4nvf4", "e2m1", "e2m1", scales=("ue4m3", 4), sparse=True),
]
# byte-id and thread-id of A and of B; four factors fill a register.
PLACES = [((n % 2 * 2, n % 2), (2 - n % 2 * 2, n % 4)) for n in range(len(FORMS))]


def places(number: int) -> tuple[tuple[int, int], tuple[int, int]]:
    (byte_a, thread_a), (byte_b, thread_b) = PLACES[number]
    whole = FORMS[number].scales[1] == 4
    return (0 if whole else byte_a, thread_a), (0 if whole else byte_b, thread_b)


def kernel(number: int) -> str:
    """A kernel that loads 20 registers of each lane (A, B, C, metadata, factors), and stores D."""
    form = FORMS[number]
    of_b = 4 if form.sparse else 2
    words = 4 if form.d == "f32" else 2
    a, b = "{%r0, %r1, %r2, %r3}", f"{{{', '.join(f'%r{4 + n}' for n in range(of_b))}}}"
    c = f"{{{', '.join(f'%r{8 + n}' for n in range(words))}}}"
    d = f"{{{', '.join(f'%r{20 + n}' for n in range(words))}}}"
    operands = [d, a, b, c, *(["%r12", "0"] if form.sparse else [])]
    if form.scales[1]:
        byte_a, thread_a = places(number)[0]
        operands += ["{%r13}", f"{{{byte_a}, {thread_a}}}", "{%r14}", "{%h1, %h2}"]
    loads = " ".join(f"ld.global.b32 %r{n}, [%rd1+{4 * n}];" for n in range(15))
    stores = " ".join(f"st.global.b32 [%rd2+{4 * n}], %r{20 + n};" for n in range(words))
    ids = "mov.b16 %h1, {}; mov.b16 %h2, {};".format(*places(number)[1])
    return f""".visible .entry k{number}(.param .u64 a, .param .u64 b) {{
.reg .b32 %r<32>; .reg .b64 %rd<3>; .reg .b16 %h<3>; .reg .b32 %t;
ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; mov.u32 %t, %tid.x;
mad.wide.u32 %rd1, %t, 60, %rd1; mad.wide.u32 %rd2, %t, 16, %rd2; {loads} {ids}
{form.name} {", ".join(operands)};
{stores} ret; }}
"""


@functools.cache
def device() -> Device:
    return Device(HEAD + "".join(map(kernel, range(len(FORMS)))))


def value(code: int, exponent: int, fraction: int) -> float:
    """The value of a float with a sign, in its lower bits."""
    bias = 2 ** (exponent - 1) - 1
    power, rest = code >> fraction & (2**exponent - 1), code & (2**fraction - 1)
    size = (
        rest * 2.0 ** (1 - bias - fraction)
        if power == 0
        else (2**fraction + rest) * 2.0 ** (power - bias - fraction)
    )
    return -size if code >> (exponent + fraction) & 1 else size


def random(rng: np.random.Generator, t: str, shape: tuple[int, ...]) -> np.ndarray:
    """Codes that are finite: the largest exponent of e5m2, and the largest code of e4m3, are not."""
    exponent, fraction, _ = SMALL[t]
    codes = rng.integers(0, 2 ** (1 + exponent + fraction), shape)
    special = {"e5m2": codes & 0x7C == 0x7C, "e4m3": codes & 0x7F == 0x7F}.get(t, codes < 0)
    return np.where(special, 1, codes)


def factor(code: int, t: str) -> float:
    return value(code, 4, 3) if t == "ue4m3" else 2.0 ** (code - 127)


def columns(form: Form, t: int, i: int, elements: int) -> int:
    """The place along K of element i of thread t of four, in registers of one row with `elements` each."""
    return t * elements + i % elements + i // elements * 4 * elements


@pytest.mark.every(4)
@pytest.mark.parametrize("number", range(len(FORMS)), ids=lambda n: FORMS[n].name)
def test_multiplication(number: int) -> None:
    form = FORMS[number]
    rng = np.random.default_rng(number)
    stored = form.k // 2 if form.sparse else form.k
    per = 32 // form.bits
    a, b = random(rng, form.a, (16, stored)), random(rng, form.b, (form.k, 8))
    c = rng.integers(-64, 64, (16, 8)).astype(np.float32)
    words = np.zeros((32, 15), np.uint32)
    shifts = [0 if form.bits == 4 else SMALL[t][2] for t in (form.a, form.b)]
    for lane in range(32):
        g, t = divmod(lane, 4)
        for register, part in itertools.product(range(4), range(per)):
            row, column = g + 8 * (register % 2), columns(form, t, register // 2 * per + part, per)
            words[lane, register] |= int(a[row, column]) << (form.bits * part + shifts[0])
        for register, part in itertools.product(range(form.k // (4 * per)), range(per)):
            row = columns(form, t, register * per + part, per)
            words[lane, 4 + register] |= int(b[row, g]) << (form.bits * part + shifts[1])
        for i in range(4):
            x = c[g + 8 * (i // 2), 2 * t + i % 2]
            if form.d == "f32":
                words[lane, 8 + i] = x.view(np.uint32)
            else:
                words[lane, 8 + i // 2] |= int(np.float16(x).view(np.uint16)) << 16 * (i % 2)
    values = [
        np.vectorize(lambda code, t=t: value(int(code), *SMALL[t][:2]))(codes)
        for codes, t in ((a, form.a), (b, form.b))
    ]
    if form.sparse:
        chosen = engine_sparse.choose(rng, 16, form.k, form.bits, True)
        values[0] = engine_sparse.expand(values[0], chosen, form.bits)
        place = engine_sparse.FIGURES[form.bits, form.k]
        size = engine_sparse.CHUNKS[form.bits]
        for row, chunk in np.ndindex(*chosen.shape):
            lane, bit = place(0, row // 8, chunk * size)
            words[row % 8 * 4 + lane, 12] |= int(chosen[row, chunk]) << bit
    kind, count = form.scales
    if count:
        least, most = (0, 127) if kind == "ue4m3" else (117, 137)
        scale_a, scale_b = rng.integers(least, most, (16, count)), rng.integers(least, most, (count, 8))
        (byte_a, thread_a), (byte_b, thread_b) = places(number)
        words[:, 13:] = rng.integers(0, 2**32, (32, 2))  # other bytes do not count
        for row, n in np.ndindex(16, count):
            lane, byte = row % 8 * 4 + thread_a * 2 + row // 8, 8 * (byte_a + n)
            words[lane, 13] = words[lane, 13] & ~np.uint32(255 << byte) | np.uint32(
                int(scale_a[row, n]) << byte
            )
        for n, column in np.ndindex(count, 8):
            lane, byte = column * 4 + thread_b, 8 * (byte_b + n)
            words[lane, 14] = words[lane, 14] & ~np.uint32(255 << byte) | np.uint32(
                int(scale_b[n, column]) << byte
            )
        read = np.vectorize(lambda code: factor(int(code), kind))
        values[0] = values[0] * np.repeat(read(scale_a), form.k // count, axis=1)
        values[1] = values[1] * np.repeat(read(scale_b), form.k // count, axis=0)
    out = Array(np.zeros((32, 4), np.uint32))
    device().launch(f"k{number}", 1, 32, Array(words), out)
    with np.errstate(over="ignore"):
        expected = (values[0] @ values[1] + c).astype(np.float32 if form.d == "f32" else np.float16)
    for lane, i in np.ndindex(32, 4):
        g, t = divmod(lane, 4)
        word = out.host[lane, i] if form.d == "f32" else out.host[lane, i // 2] >> 16 * (i % 2) & 0xFFFF
        got = np.uint32(word).view(np.float32) if form.d == "f32" else np.uint16(word).view(np.float16)
        assert got == expected[g + 8 * (i // 2), 2 * t + i % 2], (lane, i)


def test_ptxas_takes_the_forms(tmp_path: Path) -> None:
    (tmp_path / "k.ptx").write_text(HEAD + "".join(map(kernel, range(len(FORMS)))))
    subprocess.run(
        [need("ptxas"), "-O0", "-arch=sm_120a", tmp_path / "k.ptx", "-o", tmp_path / "k"], check=True
    )
