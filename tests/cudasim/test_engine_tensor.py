"""mma and wmma of every shape and type, against NumPy."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array, Device
from engine_forms import ALL
from engine_tensor import BITS, Form, decoded, matrices, patterns, product, registers, spread
from gpubpf_sass import need


def forms() -> list[Form]:
    found = [Form((8, 8, 4), d, "f16", "f16", c, x) for x in ROW_COLUMN for d, c in SUMS[:3]]
    for k in (8, 16):
        found += [Form((16, 8, k), t, "f16", "f16", t) for t in ("f16", "f32")]
        found.append(Form((16, 8, k), "f32", "bf16", "bf16", "f32"))
    found += [Form((16, 8, k), "f32", "tf32", "tf32", "f32") for k in (4, 8)]
    for a, b, c, k in itertools.product(("e4m3", "e5m2"), ("e4m3", "e5m2"), ("f16", "f32"), (16, 32)):
        found.append(Form((16, 8, k), c, a, b, c))
    for rounding in ("", ".rn", ".rz", ".rm", ".rp"):
        found.append(Form((8, 8, 4), "f64", "f64", "f64", "f64", extra=rounding))
        found += [Form((16, 8, k), "f64", "f64", "f64", "f64", extra=rounding) for k in (4, 8, 16)]
    for bits, shapes in (
        (8, [(8, 8, 16), (16, 8, 16), (16, 8, 32)]),
        (4, [(8, 8, 32), (16, 8, 32), (16, 8, 64)]),
    ):
        for a, b, shape, extra in itertools.product("su", "su", shapes, ("", ".satfinite")):
            found.append(Form(shape, "s32", f"{a}{bits}", f"{b}{bits}", "s32", extra=extra))
    for shape, extra in itertools.product(
        [(8, 8, 128), (16, 8, 128), (16, 8, 256)], (".xor.popc", ".and.popc")
    ):
        found.append(Form(shape, "s32", "b1", "b1", "s32", extra=extra))
    return found


ROW_COLUMN = list(itertools.product(("row", "col"), repeat=2))
SUMS = [("f16", "f16"), ("f32", "f16"), ("f32", "f32"), ("f16", "f32")]
WIDE = [(16, 16, 16), (32, 8, 16), (8, 32, 16)]


def wmma_forms(every: bool = ALL) -> list[Form]:
    """Return forms of wmma.mma; without `every`, each with one of the layouts."""
    found: list[Form] = []

    def add(shape: tuple[int, int, int], d: str, a: str, c: str, extra: str = "") -> None:
        layouts = ROW_COLUMN if every else [ROW_COLUMN[len(found) % 4]]
        found.extend(Form(shape, d, a, a, c, x, extra) for x in layouts)

    for shape in WIDE:
        for d, c in SUMS:
            add(shape, d, "f16", c)
        for extra in ("", ".satfinite") if every else ("",):
            add(shape, "s32", "s8", "s32", extra)
        add(shape, "s32", "u8", "s32", ".satfinite")
        add(shape, "f32", "bf16", "f32")
    add((16, 16, 8), "f32", "tf32", "f32")
    for rounding in ("", ".rz"):
        add((8, 8, 4), "f64", "f64", "f64", rounding)
    found += [Form((8, 8, 32), "s32", t, t, "s32", extra=x) for t, x in (("s4", ""), ("u4", ".satfinite"))]
    found += [Form((8, 8, 128), "s32", "b1", "b1", "s32", extra=x) for x in (".xor.popc", ".and.popc")]
    return found


def varied(found: list[Form]) -> list[Form]:
    """Leave out forms that add no new pair of type and shape, types, layouts or extra. GPUBPF_OPERANDS keeps all."""
    seen: set[object] = set()
    kept = []
    for form in found:
        types = form.a, form.b, form.c, form.d
        new = {(form.shape, form.a, form.c, form.d), types, (form.a, form.layouts), (form.a, form.extra)}
        if ALL or not new <= seen:
            kept.append(form)
        seen |= new
    return kept


FORMS, WMMA_FORMS = varied(forms()), wmma_forms()

# --- mma


HEAD = """.version 9.0
.target sm_90
.address_size 64
"""
BEGIN = """.visible .entry {}(.param .u64 a, .param .u64 b) {{
.reg .pred %p<4>; .reg .b32 %r<64>; .reg .f32 %f<64>; .reg .f64 %d<64>; .reg .b64 %rd<12>;
ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; mov.u32 %r63, %tid.x;
"""


def mma_kernel(name: str, form: Form, around: str = "{}") -> str:
    """A kernel that loads each lane's fragments of A, B and C, 8 bytes for each register, and stores D's."""
    text = BEGIN.format(name) + "mad.wide.u32 %rd1, %r63, 256, %rd1; mad.wide.u32 %rd2, %r63, 64, %rd2;\n"
    operands, at = [], 0
    for which, first in (("a", 0), ("b", 16), ("c", 32)):
        t = getattr(form, which)
        operands.append(registers("b32" if t == "tf32" else t, first, form.words(which)))
        for register in re.findall("%[rfd]\\d+", operands[-1]):
            text += f"ld.global.b{64 if t == 'f64' else 32} {register}, [%rd1+{at}];\n"
            at += 8
    result = registers(form.d, 48, form.words("d"))
    text += around.format(f"{form.mma} {result}, {', '.join(operands)};") + "\n"
    for k, register in enumerate(re.findall("%[rfd]\\d+", result)):
        text += f"st.global.b{64 if form.d == 'f64' else 32} [%rd2+{8 * k}], {register};\n"
    return text + "ret;\n}\n"


@functools.cache
def mma_ptx() -> str:
    return HEAD + "".join(mma_kernel(f"k{n}", form) for n, form in enumerate(FORMS))


@functools.cache
def mma_device() -> Device:
    return Device(mma_ptx())


def fragments(form: Form, which: str, rng: np.random.Generator) -> np.ndarray:
    """Random registers [lane][register]."""
    bits, count = BITS[getattr(form, which)], form.words(which)
    found = patterns(rng, getattr(form, which), 32 * count * max(1, 32 // bits)).reshape(32, count, -1)
    shifts = np.arange(found.shape[2], dtype=np.uint64) * np.uint64(bits if bits < 32 else 0)
    return (found << shifts).sum(axis=2, dtype=np.uint64)


def multiplied(
    device: Device, name: str, form: Form, given: dict[str, np.ndarray], lanes: int = 32
) -> np.ndarray:
    """What a kernel stores of each lane's registers of D."""
    words = np.concatenate([given[w] for w in "abc"], axis=1)
    padded = np.zeros((32, 32), np.uint64)
    padded[:, : words.shape[1]] = words
    out = Array(np.zeros((32, 8), np.uint64))
    device.launch(name, 1, lanes, Array(padded), out)
    return out.host[:, : form.words("d")].copy()


def test_ptxas_takes_the_forms(tmp_path: Path) -> None:
    texts = [HEAD + "".join(mma_kernel(f"k{n}", form) for n, form in enumerate(forms()))]
    texts.append(HEAD + "".join(wmma_kernel(f"k{n}", form, n) for n, form in enumerate(wmma_forms(True))))
    for text in texts:
        (tmp_path / "forms.ptx").write_text(text)
        command = [need("ptxas"), "-O0", "-arch=sm_90", "-o", "/dev/null", tmp_path / "forms.ptx"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", range(len(FORMS)), ids=lambda n: str(FORMS[n]))
def test_mma(number: int) -> None:
    form = FORMS[number]
    rng = np.random.default_rng(number)
    given = {which: fragments(form, which, rng) for which in "abc"}
    if "finite" in form.extra:
        given["c"] = (np.uint64(0x7FFFFFFF) - given["c"] % 4096) ^ np.uint64(0xFFFFFFFF) * (given["c"] & 1)
    got = matrices(form, "d", multiplied(mma_device(), f"k{number}", form, given))
    for q, (a, b, c) in enumerate(zip(*(matrices(form, w, given[w]) for w in "abc"), strict=True)):
        assert (got[q] == product(form, a, b, c)).all()


# --- wmma


@dataclass(frozen=True)
class Stored:
    """How a matrix lies in memory: at a byte, row by row or column by column, `stride` elements apart."""

    at: int
    row_major: bool
    stride: int

    def write(self, memory: np.ndarray, matrix: np.ndarray, bits: int) -> None:
        """Write bit patterns of `bits` bits into bytes."""
        lines = matrix if self.row_major else matrix.T
        for n, line in enumerate(lines):
            ones = (line[:, None] >> np.arange(bits, dtype=np.uint64) & np.uint64(1)).astype(np.uint8)
            packed = np.packbits(ones.ravel(), bitorder="little")
            begin = self.at + n * self.stride * bits // 8
            memory[begin : begin + len(packed)] = packed

    def read(self, memory: np.ndarray, shape: tuple[int, int], t: str) -> np.ndarray:
        unsigned = np.dtype(f"u{BITS[t] // 8}")
        lines, length = shape if self.row_major else shape[::-1]
        words = memory[self.at :].view(unsigned)
        found = np.array([words[n * self.stride : n * self.stride + length] for n in range(lines)]).astype(
            np.uint64
        )
        return found if self.row_major else found.T


def placed(form: Form, number: int) -> dict[str, Stored]:
    """Where a form's kernel has its matrices. Every other one has gaps between rows."""
    m, n, k = form.shape
    rows = {
        "a": form.layouts[0] == "row",
        "b": form.layouts[1] == "row",
        "c": number % 4 < 2,
        "d": number % 8 < 4,
    }
    found = {}
    for (which, row_major), (height, width) in zip(
        rows.items(), ((m, k), (k, n), (m, n), (m, n)), strict=True
    ):
        gap = number % 2 * max(16, 128 // BITS[getattr(form, which)])
        at = {"a": 0, "b": 4096, "c": 8192, "d": 0}[which]
        found[which] = Stored(at, row_major, (width if row_major else height) + gap)
    return found


def wmma_kernel(name: str, form: Form, number: int) -> str:
    """A kernel that multiplies matrices in memory. Every third uses generic addresses, every third copies them to shared memory."""
    space = ("", ".global", ".shared")[number % 3]
    where = placed(form, number)
    counts = {w: 8 if w in "ab" and form.a == "f16" else form.words(w) for w in "abcd"}
    text = BEGIN.format(name) + "mov.u32 %r62, %r63; mov.u64 %rd3, %rd1; mov.u64 %rd4, %rd2;\n"
    if space == ".shared":
        text += """.shared .align 128 .b8 tile[12288]; .shared .align 128 .b8 result[4096];
mov.u64 %rd3, tile; mov.u64 %rd4, result;
IN: mul.wide.u32 %rd5, %r62, 4; add.u64 %rd6, %rd5, %rd1; add.u64 %rd7, %rd5, %rd3;
ld.global.u32 %r61, [%rd6]; st.shared.u32 [%rd7], %r61; add.u32 %r62, %r62, 32; setp.lt.u32 %p1, %r62, 3072; @%p1 bra IN;
bar.sync 0;
"""
    operands = []
    for which, first in (("a", 0), ("b", 16), ("c", 32)):
        t, matrix = getattr(form, which), where[which]
        operands.append(registers("b32" if t == "tf32" else t, first, counts[which]))
        layout = "row" if matrix.row_major else "col"
        stride = f", {matrix.stride}" if number % 2 else ""
        text += f"wmma.load.{which}.sync.aligned.{layout}.{form.size}{space}.{t} {operands[-1]}, [%rd3+{matrix.at}]{stride};\n"
    result = registers(form.d, 48, counts["d"])
    text += f"{form.wmma} {result}, {', '.join(operands)};\n"
    layout = "row" if where["d"].row_major else "col"
    text += f"mov.u32 %r60, {where['d'].stride};\n"
    text += f"wmma.store.d.sync.aligned.{layout}.{form.size}{space}.{form.d} [%rd4], {result}, %r60;\n"
    if space == ".shared":
        text += """bar.sync 0; mov.u32 %r62, %r63;
OUT: mul.wide.u32 %rd5, %r62, 4; add.u64 %rd6, %rd5, %rd2; add.u64 %rd7, %rd5, %rd4;
ld.shared.u32 %r61, [%rd7]; st.global.u32 [%rd6], %r61; add.u32 %r62, %r62, 32; setp.lt.u32 %p1, %r62, 1024; @%p1 bra OUT;
"""
    return text + "ret;\n}\n"


@functools.cache
def wmma_ptx() -> str:
    return HEAD + "".join(wmma_kernel(f"k{n}", form, n) for n, form in enumerate(WMMA_FORMS))


@functools.cache
def wmma_device() -> Device:
    return Device(wmma_ptx())


@pytest.mark.parametrize("number", range(len(WMMA_FORMS)), ids=lambda n: str(WMMA_FORMS[n]))
def test_wmma(number: int) -> None:
    form = WMMA_FORMS[number]
    m, n, k = form.shape
    rng = np.random.default_rng(number)
    where = placed(form, number)
    memory = np.zeros(12288, np.uint8)
    given = {}
    for which, shape in (("a", (m, k)), ("b", (k, n)), ("c", (m, n))):
        t = getattr(form, which)
        given[which] = patterns(rng, t, shape[0] * shape[1]).reshape(shape)
        if which == "c" and "finite" in form.extra:
            given[which] %= np.uint64(1000)
            given[which] ^= np.where(
                given[which] & np.uint64(1), np.uint64(0x7FFFFFFF), np.uint64(0x80000000)
            )
        where[which].write(memory, given[which], BITS[t])
    out = Array(np.full(4096, 0xEE, np.uint8))
    wmma_device().launch(f"k{number}", 1, 32, Array(memory), out)
    assert (where["d"].read(out.host, (m, n), form.d) == product(form, **given)).all()


# --- the rest


def one(shape: tuple[int, int, int] = (16, 8, 16), t: str = "f16", d: str = "f32") -> Form:
    return Form(shape, d, t, t, d)


@pytest.mark.parametrize(
    ("t", "one_", "most"),
    [("f16", 0x3C00, 0x7BFF), ("bf16", 0x3F80, 0x7F7F), ("tf32", 0x3F800000, 0x7F7FE000)],
)
def test_special_values(t: str, one_: int, most: int) -> None:
    """Subnormal numbers count, infinities and NaNs spread, and what is too large for the type of the sum becomes infinite."""
    form = one((16, 8, 8), t)
    infinite = {"f16": 0x7C00, "bf16": 0x7F80, "tf32": 0x7F800000}[t]
    # one row each: the smallest number, the largest twice, an infinity, infinities of both signs, a NaN
    first = np.zeros((16, 8), np.uint64)
    tiny = 0x2000 if t == "tf32" else 1
    sign = 1 << (31 if t == "tf32" else 15)
    rows = [[tiny], [most, most], [infinite], [infinite, infinite | sign], [infinite | infinite >> 1]]
    for n, row in enumerate(rows):
        first[n, : len(row)] = row
    second = np.full((8, 8), one_, np.uint64)
    given = {"a": spread(form, "a", first), "b": spread(form, "b", second), "c": np.zeros((32, 4), np.uint64)}
    got = matrices(form, "d", multiplied(special_device(), f"k{t}", form, given))[0][:, 0]
    expected = [float(decoded(np.array([tiny]), t)[0]), 2 * float(decoded(np.array([most]), t)[0]), np.inf]
    with np.errstate(over="ignore"):
        assert (got[:3].astype(np.uint32).view(np.float32) == np.array(expected).astype(np.float32)).all()
    assert (got[3:5] == 0x7FFFFFFF).all()
    assert (got[5:] == 0).all()


@functools.cache
def special_device() -> Device:
    late = "setp.lt.u32 %p1, %r63, 5; @!%p1 bra TOGETHER; mov.u32 %r62, 100;\n"
    late += "AGAIN: sub.u32 %r62, %r62, 1; setp.ne.u32 %p2, %r62, 0; @%p2 bra AGAIN;\nTOGETHER: {}"
    loop = "mov.u32 %r62, 3;\nAGAIN: {}\n"
    for k in range(4):
        loop += f"mov.f32 %f{32 + k}, %f{48 + k};\n"
    loop += "sub.u32 %r62, %r62, 1; setp.ne.u32 %p2, %r62, 0; @%p2 bra AGAIN;"
    never = "mov.f32 %f48, 0f3F800000; setp.ne.u32 %p1, %r63, %r63;\n@%p1 {}"
    text = HEAD + "".join(mma_kernel(f"k{t}", one((16, 8, 8), t)) for t in ("f16", "bf16", "tf32"))
    for name, around in (("late", late), ("loop", loop), ("never", never)):
        text += mma_kernel(name, one(), around)
    constant = re.sub(
        r"(mma\.\S+ \S+ \S+ \S+ \S+) .*;",
        r"\1 {%r0, 0x3C003C00, %r2, %r3}, {%r16, 0}, {%f32, 0f3F800000, %f34, %f35};",
        mma_kernel("constant", one()),
    )
    return Device(text + constant)


@pytest.mark.parametrize("name", ["late", "loop", "never", "constant"])
def test_around_a_multiplication(name: str) -> None:
    """Lanes that come late, an accumulator in a loop, a false predicate, constants as operands."""
    form = one()
    rng = np.random.default_rng(7)
    given = {which: fragments(form, which, rng) for which in "abc"}
    out = multiplied(special_device(), name, form, given)
    got = matrices(form, "d", out)[0].astype(np.uint32).view(np.float32)
    if name == "never":
        assert (out[:, 0] == 0x3F800000).all()
        return
    if name == "constant":
        given["a"][:, 1], given["b"][:, 1], given["c"][:, 1] = 0x3C003C00, 0, 0x3F800000
    a, b, c = (decoded(matrices(form, w, given[w])[0], getattr(form, w)) for w in "abc")
    for _ in range(3 if name == "loop" else 1):
        c = (c + a @ b).astype(np.float32)
    assert (got == c).all()


REFUSED = [
    "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32 "
    "{%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, {%r4, %r5, %r6, %r7}, {%f4, %f5, %f6, %f7}, %r8, 0;",
    "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32 "
    "{%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%f4, %f5, %f6, %f7};",
]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_missing_is_refused_by_name(text: str) -> None:
    device = Device(HEAD + BEGIN.format("k") + text + "ret; }")
    with pytest.raises(Exception, match=re.escape(text.split(" ")[0].rstrip(";"))):
        device.launch("k", 1, 32, Array(np.zeros(8)), Array(np.zeros(8)))
