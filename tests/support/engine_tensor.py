"""Forms of mma and wmma, bit patterns as values, and the fragments of mma, written down one by one as the PTX ISA has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

import engine_values

BITS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "f64": 64,
    "e4m3": 8,
    "e5m2": 8,
    "s8": 8,
    "u8": 8,
    "s4": 4,
    "u4": 4,
}
BITS |= {"b1": 1, "f32": 32, "s32": 32}
LANES = np.arange(32)
Place = Callable[[int, int, int], tuple[int, int]]  # of g, t, i: row and column

# PTX ISA 9.7.14.5: the places of A's elements (row, column) and of B's (row), by type and shape.
HALVES_A: dict[str, Place] = {
    "16x8": lambda g, t, i: (g + 8 * (i > 1), t * 2 + (i & 1)),
    "16x16": lambda g, t, i: (g if i < 2 or 4 <= i < 6 else g + 8, t * 2 + (i & 1) + 8 * (i >= 4)),
}
WORDS_A: dict[str, Place] = {
    "8x4": lambda g, t, i: (g, t),
    "16x4": lambda g, t, i: (g + 8 * i, t),
    "16x8": lambda g, t, i: (g if i in (0, 2) else g + 8, t if i in (0, 1) else t + 4),
    "16x16": lambda g, t, i: (g if i % 2 == 0 else g + 8, t + 4 * (i // 2)),
}
BYTES_A: dict[str, Place] = {
    "8x16": lambda g, t, i: (g, t * 4 + i),
    "16x16": lambda g, t, i: (g if i < 4 else g + 8, t * 4 + (i & 3)),
    "16x32": lambda g, t, i: (g if i < 4 or 8 <= i < 12 else g + 8, t * 4 + (i & 3) + 16 * (i >= 8)),
}
FOURS_A: dict[str, Place] = {
    "8x32": lambda g, t, i: (g, t * 8 + i),
    "16x32": lambda g, t, i: (g if i < 8 else g + 8, t * 8 + (i & 7)),
    "16x64": lambda g, t, i: (g if i < 8 or 16 <= i < 24 else g + 8, t * 8 + (i & 7) + 32 * (i >= 16)),
}
ONES_A: dict[str, Place] = {
    "8x128": lambda g, t, i: (g, t * 32 + i),
    "16x128": lambda g, t, i: (g if i < 32 else g + 8, t * 32 + (i & 31)),
    "16x256": lambda g, t, i: (g if i < 32 or 64 <= i < 96 else g + 8, t * 32 + (i & 31) + 128 * (i >= 64)),
}
HALVES_B: Place = lambda g, t, i: (t * 2 + (i & 1) + 8 * (i // 2), g)  # noqa: E731
WORDS_B: Place = lambda g, t, i: (t + 4 * i, g)  # noqa: E731
BYTES_B: Place = lambda g, t, i: (t * 4 + (i & 3) + 16 * (i // 4), g)  # noqa: E731
FOURS_B: Place = lambda g, t, i: (t * 8 + (i & 7) + 32 * (i // 8), g)  # noqa: E731
ONES_B: Place = lambda g, t, i: (t * 32 + (i & 31) + 128 * (i >= 32), g)  # noqa: E731
PLACES: dict[int, tuple[dict[str, Place], Place]] = {
    16: (HALVES_A, HALVES_B),
    32: (WORDS_A, WORDS_B),
    64: (WORDS_A, WORDS_B),
    8: (BYTES_A, BYTES_B),
    4: (FOURS_A, FOURS_B),
    1: (ONES_A, ONES_B),
}


@dataclass(frozen=True)
class Form:
    """A form of mma or wmma.mma. `layouts`: row or col, of A and B. `extra`: a rounding mode, .satfinite or an operation on bits."""

    shape: tuple[int, int, int]
    d: str
    a: str
    b: str
    c: str
    layouts: tuple[str, str] = ("row", "col")
    extra: str = ""

    def __str__(self) -> str:
        return f"{self.size}.{'.'.join(self.layouts)}.{self.d}.{self.a}.{self.b}.{self.c}{self.extra}"

    @property
    def size(self) -> str:
        return "m{}n{}k{}".format(*self.shape)

    @property
    def quads(self) -> bool:
        """Whether this is four multiplications at once."""
        return self.shape == (8, 8, 4) and self.a == "f16"

    @property
    def mma(self) -> str:
        last = self.extra if "popc" in self.extra else ""
        first = "" if last else self.extra
        types = f"{self.d}.{self.a}.{self.b}.{self.c}"
        return f"mma.sync.aligned.{self.size}.{'.'.join(self.layouts)}{first}.{types}{last}"

    @property
    def wmma(self) -> str:
        first = self.extra if "popc" in self.extra else ""
        rounding = self.extra if self.a == "f64" else ""
        last = self.extra if "finite" in self.extra else ""
        types = f"{self.d}.{self.c}" if self.a == "f16" else f"{self.d}.{self.a}.{self.b}.{self.c}"
        return f"wmma.mma{first}.sync.aligned.{'.'.join(self.layouts)}.{self.size}{rounding}.{types}{last}"

    def words(self, which: str) -> int:
        """Return the registers of a fragment of mma."""
        m, n, k = self.shape
        if self.quads:
            return 2 if which in "ab" else 4 if getattr(self, which) == "f16" else 8
        elements = {"a": m * k, "b": k * n}.get(which, m * n) // 32
        return max(1, elements * min(32, BITS[getattr(self, which)]) // 32)


# --- values


def decoded(bits: np.ndarray, t: str) -> np.ndarray:
    """The values of bit patterns, as f64, which has them all."""
    if t == "f64":
        return bits.astype(np.uint64).view(np.float64)
    bits = bits.astype(np.uint32)
    if t in ("f32", "tf32"):
        return (
            (bits & np.uint32(0xFFFFE000 if t == "tf32" else 0xFFFFFFFF)).view(np.float32).astype(np.float64)
        )
    if t == "bf16":
        return (bits << np.uint32(16)).view(np.float32).astype(np.float64)
    if t == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    if t in ("e4m3", "e5m2"):
        fraction, bias = (3, 7) if t == "e4m3" else (2, 15)
        exponent = (bits >> fraction & ((1 << (7 - fraction)) - 1)).astype(int)
        mantissa = (bits & ((1 << fraction) - 1)) / (1 << fraction)
        size = np.where(exponent, (1 + mantissa) * 2.0 ** (exponent - bias), mantissa * 2.0 ** (1 - bias))
        return np.where(bits >> 7, -size, size)
    if t == "s32":
        return bits.view(np.int32).astype(np.float64)
    sign = 1 << (BITS[t] - 1) if t[0] == "s" else 0
    return (bits ^ np.uint32(sign)).astype(np.float64) - sign


def patterns(rng: np.random.Generator, t: str, count: int) -> np.ndarray:
    """Random bit patterns, of floating-point numbers whose products and sums are exact in f64."""
    if t == "f64":
        return rng.uniform(-1, 1, count).view(np.uint64)
    if t in ("f16", "bf16", "tf32", "f32", "e4m3", "e5m2"):
        exponent, fraction, bias = {
            "f16": (5, 10, 15),
            "bf16": (8, 7, 127),
            "e4m3": (4, 3, 7),
            "e5m2": (5, 2, 15),
        }.get(t, (8, 23, 127))
        sign = rng.integers(0, 2, count) << (exponent + fraction)
        power = rng.integers(bias - 5, bias + 4, count) << fraction
        return (sign | power | rng.integers(0, 1 << fraction, count)).astype(np.uint64)
    return rng.integers(0, 1 << BITS[t], count, dtype=np.uint64)


def encoded(sums: np.ndarray, t: str, finite: bool) -> np.ndarray:
    if t == "f64":
        return sums.view(np.uint64)
    if t == "f16":
        return sums.astype(np.float16).view(np.uint16).astype(np.uint64)
    if t == "f32":
        return sums.astype(np.float32).view(np.uint32).astype(np.uint64)
    if finite:
        sums = np.clip(sums, -(1 << 31), (1 << 31) - 1)
    return sums.astype(np.int64).astype(np.uint32).astype(np.uint64)


def product(form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The bit patterns of D from those of A, B and C."""
    if form.a == "b1":
        pairs = a[:, :, None] & b[None] if "and" in form.extra else a[:, :, None] ^ b[None]
        return (c + pairs.sum(axis=1)) & 0xFFFFFFFF
    x, y, z = decoded(a, form.a), decoded(b, form.b), decoded(c, form.c)
    if form.a == "f64":
        return fused(x, y, z, form.extra)
    return encoded(z + x @ y, form.d, "finite" in form.extra)


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray, rounding: str) -> np.ndarray:
    """Sums of products in the order of K, rounded at each step, by Python's fractions."""
    found = np.empty(z.shape, np.uint64)
    for row, column in np.ndindex(*z.shape):
        total = z[row, column]
        for k in range(x.shape[1]):
            exact = Fraction(x[row, k]) * Fraction(y[k, column]) + Fraction(total)
            bits = engine_values.encoded(exact, "f64", rounding[1:] or "rn")
            total = np.uint64(bits).view(np.float64)
        found[row, column] = total.view(np.uint64)
    return found


# --- fragments


def place(form: Form, which: str, lane: int, i: int) -> tuple[int, int, int]:
    """Which multiplication an element of a fragment belongs to, its row and its column (PTX ISA 9.7.14.5)."""
    m, _, k = form.shape
    if form.quads:
        high, quad, low = lane >= 16, lane // 4 % 4, lane % 4
        if which == "a":
            return quad, *((low + 4 * high, i) if form.layouts[0] == "row" else (i % 4 + 4 * high, low))
        if which == "b":
            return quad, *((low, i + 4 * high) if form.layouts[1] == "row" else (i, low + 4 * high))
        if getattr(form, which) == "f16":
            return quad, low + 4 * high, i
        return quad, (lane & 1) + (i & 2) + 4 * high, (i & 4) + (lane & 2) + (i & 1)
    g, t = lane >> 2, lane % 4
    if which == "a":
        return 0, *PLACES[BITS[form.a]][0][f"{m}x{k}"](g, t, i)
    if which == "b":
        return 0, *PLACES[BITS[form.b]][1](g, t, i)
    return 0, g + 8 * (i >= 2), t * 2 + (i & 1)


def elements(words: np.ndarray, bits: int) -> np.ndarray:
    """Split each lane's registers into elements."""
    if bits >= 32:
        return words.astype(np.uint64)
    each = 32 // bits
    split = words[:, :, None] >> np.arange(0, 32, bits, dtype=np.uint64) & np.uint64((1 << bits) - 1)
    return split.reshape(32, words.shape[1] * each)


def matrices(form: Form, which: str, words: np.ndarray) -> np.ndarray:
    """Gather the lanes' fragments into matrices, four for quads."""
    m, n, k = form.shape
    rows, columns = {"a": (m, k), "b": (k, n)}.get(which, (m, n))
    found = np.full((4 if form.quads else 1, rows, columns), 0xDEAD, np.uint64)
    split = elements(words, BITS[getattr(form, which)])
    for lane, i in np.ndindex(*split.shape):
        found[place(form, which, lane, i)] = split[lane, i]
    return found


def registers(t: str, first: int, count: int) -> str:
    kind = {"f64": "d", "f32": "f"}.get(t, "r")
    return "{" + ", ".join(f"%{kind}{first + k}" for k in range(count)) + "}"


def spread(form: Form, which: str, matrix: np.ndarray) -> np.ndarray:
    """The lanes' fragments of a matrix."""
    bits = BITS[getattr(form, which)]
    count = form.words(which)
    found = np.zeros((32, count), np.uint64)
    each = max(1, 32 // bits)
    for lane, i in np.ndindex(32, count * each):
        _, row, column = place(form, which, lane, i)
        found[lane, i // each] |= matrix[row, column] << np.uint64(i % each * bits)
    return found
