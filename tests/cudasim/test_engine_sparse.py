"""mma with a sparse A, of every shape and type, against NumPy."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import engine_sparse
from engine_device import Array, Device
from engine_forms import ALL
from engine_tensor import BITS, Form, matrices, patterns, product, registers, spread
from gpubpf_sass import need

# PTX ISA 9.7.14.6.2: the row of an element of a lane's fragment, and the first column of the chunks that its register has.
FRAGMENTS: dict[tuple[int, int], Callable[[int, int, int], tuple[int, int]]] = {
    (16, 16): lambda g, t, i: (g if i < 2 else g + 8, t * 4),
    (16, 32): lambda g, t, i: (g if i < 2 or 4 <= i < 6 else g + 8, t * 4 if i < 4 else t * 4 + 16),
    (32, 16): lambda g, t, i: (g if i in (0, 2) else g + 8, t * 2 if i < 2 else t * 2 + 8),
    (32, 8): lambda g, t, i: (g if i == 0 else g + 8, t * 2),
    (8, 32): lambda g, t, i: (g if i < 4 else g + 8, t * 8),
    (8, 64): lambda g, t, i: (g if i < 4 or 8 <= i < 12 else g + 8, t * 8 if i < 8 else t * 8 + 32),
    (4, 64): lambda g, t, i: (g if i < 8 else g + 8, t * 16),
    (4, 128): lambda g, t, i: (g if i < 8 or 16 <= i < 24 else g + 8, t * 16 if i < 16 else t * 16 + 64),
}


@dataclass(frozen=True)
class Sparse:
    """A form of mma.sp. `selector`: which lanes have the metadata."""

    form: Form
    selector: int
    ordered: bool

    def __str__(self) -> str:
        return f"{'ordered.' * self.ordered}{self.form}.{self.selector}"

    @property
    def k(self) -> int:
        return self.form.shape[2]

    @property
    def bits(self) -> int:
        return BITS[self.form.a]

    @property
    def words(self) -> int:
        return self.form.words("a") // 2

    @property
    def name(self) -> str:
        return self.form.mma.replace("mma", "mma.sp::ordered_metadata" if self.ordered else "mma.sp", 1)


def forms(every: bool = ALL) -> list[Sparse]:
    """Return all forms; without `every`, each shape and type with each selector, and not with each qualifier."""
    found = []
    kinds = [(d, "f16", "f16", k, 32 // k * 2) for d in ("f16", "f32") for k in (16, 32)]
    kinds += [("f32", "bf16", "bf16", k, 32 // k * 2) for k in (16, 32)]
    kinds += [("f32", "tf32", "tf32", k, 16 // k * 2) for k in (8, 16)]
    kinds += [("f32", a, b, 64, 1) for a, b in itertools.product(("e4m3", "e5m2"), repeat=2)]
    for bits, k in ((8, 32), (8, 64), (4, 64), (4, 128)):
        selectors = 2 if k * bits == 256 else 1
        kinds += [("s32", f"{a}{bits}", f"{b}{bits}", k, selectors) for a, b in itertools.product("su", "su")]
    for d, a, b, k, selectors in kinds:
        extras = ("", ".satfinite") if d == "s32" else ("",)
        variants = list(itertools.product((True, False), extras))
        for selector in range(selectors):
            for ordered, extra in variants if every else [variants[len(found) % len(variants)]]:
                form = Form((16, 8, k), d, a, b, d, extra=extra)
                found.append(Sparse(form, selector, ordered))
    return found


FORMS = forms()
HEAD = ".version 9.0\n.target sm_90\n.address_size 64\n"


def kernel(name: str, sparse: Sparse, metadata: str = "%r63") -> str:
    """A kernel that loads each lane's registers of A, B, C and metadata, and stores D's."""
    form = sparse.form
    text = f""".visible .entry {name}(.param .u64 a, .param .u64 b) {{
.reg .b32 %r<64>; .reg .f32 %f<64>; .reg .b64 %rd<4>;
ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; mov.u32 %r62, %tid.x;
mad.wide.u32 %rd1, %r62, 64, %rd1; mad.wide.u32 %rd2, %r62, 16, %rd2;
ld.global.b32 %r63, [%rd1];
"""
    given = [
        registers("b32", 0, sparse.words),
        registers("b32", 8, form.words("b")),
        registers(form.c, 16, form.words("c")),
    ]
    for n, register in enumerate(re.findall("%[rf]\\d+", " ".join(given))):
        text += f"ld.global.b32 {register}, [%rd1+{4 + 4 * n}];\n"
    result = registers(form.d, 24, form.words("d"))
    text += f"{sparse.name} {result}, {', '.join(given)}, {metadata}, {sparse.selector};\n"
    for n, register in enumerate(re.findall("%[rf]\\d+", result)):
        text += f"st.global.b32 [%rd2+{4 * n}], {register};\n"
    return text + "ret;\n}\n"


def texts(found: list[Sparse]) -> str:
    return HEAD + "".join(kernel(f"k{n}", sparse) for n, sparse in enumerate(found))


@functools.cache
def device() -> Device:
    text = texts(FORMS)
    for t in ("f16", "tf32"):
        text += kernel(f"constant_{t}", constant(t), "0x44444444")
    return Device(text)


def constant(t: str) -> Sparse:
    return Sparse(Form((16, 8, 16), "f32", t, t, "f32"), 0, True)


def multiplied(
    name: str, sparse: Sparse, a: np.ndarray, b: np.ndarray, c: np.ndarray, e: np.ndarray
) -> np.ndarray:
    """Return D as a kernel computes it. `a` is packed, `e` is each lane's metadata."""
    held = np.zeros((32, sparse.words), np.uint64)
    each = 32 // sparse.bits
    for lane, i in np.ndindex(32, sparse.words * each):
        row, column = FRAGMENTS[sparse.bits, sparse.k](lane >> 2, lane % 4, i)
        held[lane, i // each] |= a[row, column // 2 + i % each] << np.uint64(i % each * sparse.bits)
    given = np.zeros((32, 16), np.uint32)
    words = [e[:, None], held, spread(sparse.form, "b", b), spread(sparse.form, "c", c)]
    joined = np.concatenate(words, axis=1)
    given[:, : joined.shape[1]] = joined
    out = Array(np.zeros((32, 4), np.uint32))
    device().launch(name, 1, 32, Array(given), out)
    return matrices(sparse.form, "d", out.host[:, : sparse.form.words("d")].astype(np.uint64))[0]


def operands(rng: np.random.Generator, form: Form) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return random bit patterns: A (packed), B and C."""
    k = form.shape[2]
    a = patterns(rng, form.a, 8 * k).reshape(16, k // 2)
    b = patterns(rng, form.b, 8 * k).reshape(k, 8)
    c = patterns(rng, form.c, 128).reshape(16, 8)
    if "finite" in form.extra:
        c = (np.uint64(0x7FFFFFFF) - c % 4096) ^ np.uint64(0xFFFFFFFF) * (c & 1)
    return a, b, c


def test_ptxas_takes_the_forms(tmp_path: Path) -> None:
    (tmp_path / "forms.ptx").write_text(texts(forms(True)))
    command = [need("ptxas"), "-O0", "-arch=sm_90", "-o", "/dev/null", tmp_path / "forms.ptx"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", range(len(FORMS)), ids=lambda n: str(FORMS[n]))
def test_mma_sp(number: int) -> None:
    sparse = FORMS[number]
    rng = np.random.default_rng(number)
    a, b, c = operands(rng, sparse.form)
    chosen = engine_sparse.choose(rng, 16, sparse.k, sparse.bits, sparse.ordered)
    e = engine_sparse.metadata(rng, chosen, sparse.bits, sparse.selector)
    got = multiplied(f"k{number}", sparse, a, b, c, e)
    assert (got == product(sparse.form, engine_sparse.expand(a, chosen, sparse.bits), b, c)).all()


@pytest.mark.parametrize("t", ["f16", "tf32"])
def test_elements_that_are_left_out_do_not_count(t: str) -> None:
    """Constant metadata. The rows of B that no element of A multiplies are infinite."""
    sparse = constant(t)
    a, b, c = operands(np.random.default_rng(1), sparse.form)
    left_out = [2, 3] if t == "f16" else [1]
    rows = [row for row in range(16) if row % (2 * len(left_out)) in left_out]
    b[rows] = {"f16": 0x7C00, "tf32": 0x7F800000}[t]
    got = multiplied(f"constant_{t}", sparse, a, b, c, np.zeros(32, np.uint64))
    b[rows] = 0
    chosen = np.full((16, 16 // (2 * len(left_out))), 0b0100)
    assert (got == product(sparse.form, engine_sparse.expand(a, chosen, sparse.bits), b, c)).all()


@pytest.mark.parametrize(
    ("form", "selector"),
    [
        (Form((16, 8, 16), "f32", "f16", "f16", "f32"), 4),
        (Form((16, 8, 32), "f32", "f16", "f16", "f32"), 2),
        (Form((16, 8, 64), "s32", "s8", "u8", "s32"), 1),
    ],
)
def test_a_selector_that_names_no_lanes_is_refused(form: Form, selector: int) -> None:
    refusing = Device(HEAD + kernel("k", Sparse(form, selector, True)))
    with pytest.raises(Exception, match=f"mma.sp::ordered_metadata.*: sparsity selector {selector}"):
        refusing.launch("k", 1, 32, Array(np.zeros(8)), Array(np.zeros(8)))
