"""Values of PTX's types as exact fractions: formats, roundings, operations, and operands that have the edges of each type."""

from __future__ import annotations

import functools
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from engine_instructions import bits

COUNT = 128 * int(os.environ.get("GPUBPF_OPERANDS", "1"))  # operands of each instruction


@dataclass(frozen=True)
class Format:
    """A floating-point format: bits of the significand, and the exponent of the smallest number above 0."""

    width: int
    precision: int
    least: int

    @property
    def infinity(self) -> int:
        return (1 << self.width - 1) - (1 << self.precision - 1)

    @property
    def sign(self) -> int:
        return 1 << self.width - 1


FORMATS = {
    "f16": Format(16, 11, -24),
    "bf16": Format(16, 8, -133),
    "f32": Format(32, 24, -149),
    "f64": Format(64, 53, -1074),
}
MODES = {"rn": round, "rz": math.trunc, "rp": math.ceil, "rm": math.floor}
Value: TypeAlias = "Fraction | float"  # a float for -0.0, infinities and NaN


@functools.cache
def decoded(pattern: int, t: str) -> Value:
    f = FORMATS[t]
    sign, magnitude = pattern & f.sign, pattern & ~f.sign
    if magnitude >= f.infinity:
        return math.nan if magnitude > f.infinity else -math.inf if sign else math.inf
    if not magnitude:
        return -0.0 if sign else 0.0
    exponent, fraction = magnitude >> f.precision - 1, magnitude & (1 << f.precision - 1) - 1
    number = fraction + (bool(exponent) << f.precision - 1)
    return Fraction(-number if sign else number) * Fraction(2) ** (f.least + max(exponent - 1, 0))


def encoded(x: Value, t: str, mode: str = "rn") -> int:
    """Return the pattern of a value, rounded once."""
    f = FORMATS[t]
    if isinstance(x, float):
        if math.isnan(x):
            return f.infinity + 1
        return (f.sign if math.copysign(1, x) < 0 else 0) | (f.infinity if x else 0)
    sign, least = f.sign if x < 0 else 0, f.least
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    unit = max(exponent - f.precision + 1, least)
    number = abs(MODES[mode](x / Fraction(2) ** unit))
    pattern = (unit - least << f.precision - 1) + number
    if pattern < f.infinity:
        return sign | pattern
    away = mode == "rn" or (mode == "rp" and not sign) or (mode == "rm" and sign)
    return sign | (f.infinity if away else f.infinity - 1)


def is_subnormal(pattern: int, t: str) -> bool:
    f = FORMATS[t]
    return 0 < pattern & ~f.sign < 1 << f.precision - 1


def flushed(pattern: int, t: str) -> int:
    return pattern & FORMATS[t].sign if is_subnormal(pattern, t) else pattern


# --- operations on values: exact, with the rules of IEEE 754 for zeros and infinities ---


def is_finite(*values: Value) -> bool:
    return all(isinstance(x, Fraction) or x == 0 for x in values)


def is_negative(x: Value) -> bool:
    return math.copysign(1, x) < 0 if isinstance(x, float) else x < 0


def add(a: Value, b: Value, mode: str) -> Value:
    if not is_finite(a, b):
        return float(a if not is_finite(a) else 0) + float(b if not is_finite(b) else 0)
    if isinstance(a, float) and isinstance(b, float):
        if is_negative(a) == is_negative(b):
            return a
        return -0.0 if mode == "rm" else 0.0
    total = Fraction(a) + Fraction(b)
    return total if total else -0.0 if mode == "rm" else 0.0


def negative(a: Value) -> Value:
    return -a


def mul(a: Value, b: Value, mode: str) -> Value:
    sign = -1 if is_negative(a) != is_negative(b) else 1
    if not is_finite(a, b):
        if a != a or b != b or a == 0 or b == 0:
            return math.nan
        return sign * math.inf
    return Fraction(a) * Fraction(b) if a and b else sign * 0.0


def div(a: Value, b: Value, mode: str) -> Value:
    sign = -1 if is_negative(a) != is_negative(b) else 1
    if a != a or b != b or (not is_finite(a) and not is_finite(b)) or (a == 0 and b == 0):
        return math.nan
    if not is_finite(a) or b == 0:
        return sign * math.inf
    return Fraction(a) / Fraction(b) if a and is_finite(b) else sign * 0.0


def fma(a: Value, b: Value, c: Value, mode: str) -> Value:
    return add(mul(a, b, mode), c, mode)


def sqrt(a: Value, mode: str) -> Value:
    if isinstance(a, float):
        return a if a == 0 or a == math.inf else math.nan
    if a < 0:
        return math.nan
    scale = 1300
    scaled = a * (1 << 2 * scale)
    root = math.isqrt(int(scaled))
    # A bit below all that rounding looks at stands for the rest.
    return Fraction(root, 1 << scale) if root * root == scaled else Fraction(2 * root + 1, 2 << scale)


# --- operands ---


def edges(t: str) -> list[int]:
    """Return the patterns at the edges of a format: zeros, subnormal and normal numbers, infinities and NaNs."""
    f = FORMATS[t]
    one, normal = encoded(Fraction(1), t), 1 << f.precision - 1
    found = [
        0,
        1,
        2,
        normal - 1,
        normal,
        normal + 1,
        one - 1,
        one,
        one + 1,
        one + (normal >> 1),
        f.infinity - 1,
    ]
    found += [f.infinity, f.infinity + (normal >> 1), encoded(Fraction(3, 2), t), encoded(Fraction(1, 3), t)]
    found += [0x7FF7] if f.width == 16 else []  # a NaN with a meaning for fma.oob
    return found + [pattern | f.sign for pattern in found]


def floats(t: str, rng: random.Random) -> list[int]:
    """Return edges of a format, numbers near 1, and any patterns."""
    f = FORMATS[t]
    one, normal, special = encoded(Fraction(1), t), 1 << f.precision - 1, edges(t)
    found = []
    for _ in range(COUNT):
        how = rng.randrange(4)
        near = (
            one + rng.randint(-8 * normal, 8 * normal)
            if t != "f16"
            else one + rng.randint(-4 * normal, 4 * normal)
        )
        found.append(
            rng.choice(special)
            if how < 2
            else near | rng.choice((0, f.sign))
            if how == 2
            else rng.getrandbits(f.width)
        )
    return found


def integers(t: str, rng: random.Random) -> list[int]:
    w = bits(t)
    mask = (1 << w) - 1
    edges = [
        0,
        1,
        2,
        3,
        5,
        7,
        8,
        15,
        16,
        31,
        32,
        33,
        63,
        64,
        65,
        127,
        128,
        255,
        256,
        mask,
        mask - 1,
        mask >> 1,
        (mask >> 1) + 1,
    ]
    return [
        rng.choice(edges) & mask if rng.random() < 0.5 else rng.getrandbits(rng.randrange(1, w + 1))
        for _ in range(COUNT)
    ]


def operands(t: str, seed: int) -> list[int]:
    rng = random.Random(seed)
    if t.endswith("x2"):
        part = t.removesuffix("x2")
        low, high = (operands(part, 2 * seed + 99 + k) for k in range(2))
        return [a | b << bits(part) for a, b in zip(low, high, strict=True)]
    return floats(t, rng) if t in FORMATS else integers(t, rng)


# --- references: the pattern of the result for the patterns of the operands; None where results are not compared ---

Reference: TypeAlias = Callable[..., "int | None"]


def of_values(
    operation: Callable[..., Value], t: str, mode: str = "rn", modifiers: Sequence[str] = ()
) -> Reference:
    """Return the reference of one operation on values of a format, with .ftz, .sat and .relu."""

    def reference(*patterns: int) -> int | None:
        if "ftz" in modifiers:
            patterns = tuple(flushed(p, t) for p in patterns)
        exact = operation(*(decoded(p, t) for p in patterns), mode)
        made = encoded(exact, t, mode)
        f = FORMATS[t]
        nan = made & ~f.sign > f.infinity
        if "ftz" in modifiers:
            smallest = Fraction(2) ** (f.least + f.precision - 1)
            if (
                isinstance(exact, Fraction)
                and abs(exact) < smallest
                and not is_subnormal(made, t)
                and made & ~f.sign
            ):
                return None  # whether it is flushed before it is rounded is not documented
            made = flushed(made, t)
        if "sat" in modifiers:
            one = encoded(Fraction(1), t)
            made = 0 if nan or made & f.sign else min(made, one)
        if "relu" in modifiers and not nan and made & f.sign:
            return None if made == f.sign else 0  # of -0, nothing is documented
        return made

    return reference


def packed(reference: Reference, width: int = 16) -> Reference:
    """Return the reference of an operation on two numbers of `width` bits in each operand."""

    def both(*patterns: int) -> int | None:
        low = reference(*(p & (1 << width) - 1 for p in patterns))
        high = reference(*(p >> width for p in patterns))
        return None if low is None or high is None else low | high << width

    return both


def extreme(patterns: Sequence[int], t: str, sign: int, modifiers: Sequence[str]) -> int | None:
    f = FORMATS[t]
    if "ftz" in modifiers:
        patterns = [flushed(p, t) for p in patterns]
    xor = 0
    for p in patterns:
        xor ^= p & f.sign
    numbers = [p for p in patterns if p & ~f.sign <= f.infinity]
    if not numbers or ("NaN" in modifiers and len(numbers) < len(patterns)):
        return f.infinity + 1
    if "xorsign" in modifiers:
        if len(numbers) < len(patterns):
            return None
        return xor | (max if sign > 0 else min)(p & ~f.sign for p in numbers)
    # Patterns of sign and magnitude are ordered as numbers are; -0 is below +0.
    return (max if sign > 0 else min)(numbers, key=lambda p: -(p & ~f.sign) - 1 if p & f.sign else p)


def signed(x: int, w: int) -> int:
    x &= (1 << w) - 1
    return x - (1 << w) if x >> w - 1 else x


def integer(pattern: int, t: str) -> int:
    return signed(pattern, bits(t)) if t[0] == "s" else pattern


def clamped(x: int, t: str) -> int:
    w = bits(t)
    low, high = (-(1 << w - 1), (1 << w - 1) - 1) if t[0] == "s" else (0, (1 << w) - 1)
    return min(max(x, low), high) & (1 << w) - 1


RELATIONS: dict[str, Callable[[Value, Value], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def related(op: str, a: Value, b: Value) -> int:
    unordered = a != a or b != b
    if op in ("num", "nan"):
        return int(unordered is (op == "nan"))
    if len(op) == 3:
        return int(unordered or RELATIONS[op[:2]](a, b))
    return int(not unordered and RELATIONS[UNSIGNED.get(op, op)](a, b))


def same(got: int, wanted: int, result: str) -> bool:
    if result.endswith("x2"):
        part = result.removesuffix("x2")
        width = bits(part)
        mask = (1 << width) - 1
        return same(got & mask, wanted & mask, part) and same(got >> width, wanted >> width, part)
    if result in FORMATS and wanted & ~FORMATS[result].sign > FORMATS[result].infinity:
        return got & ~FORMATS[result].sign > FORMATS[result].infinity
    return got == wanted
