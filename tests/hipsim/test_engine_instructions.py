"""Each VALU instruction on hipsim's engine, against an evaluation of its own in Python's integers and fractions."""

import functools
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from hipsim_engine import Engine, assemble, kernel, missing
from hipsim_values import DOWN, F16, F32, F64, NEAREST, UP, ZERO, Format, floats, integers

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

# Work-items that each instruction is run with.
LANES = 4096 if os.environ.get("GPUBPF_LOOKS") == "all" else 256
FORMATS = {"f16": F16, "f32": F32, "f64": F64}
MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
OLD = 0x5A5AA5A5_C3C33C3C  # what the destination holds before


@dataclass(frozen=True)
class Case:
    """An instruction: its text, the kinds of its sources, the kind of its result, and the result of one work-item.

    The text has its sources in v[4:5], v[6:7] and v[8:9], and its result in v[10:11], or in s[20:21], one bit for each lane.
    """

    text: str
    sources: tuple[str, ...]
    result: str  # "f32", "u32", …, "mask", or "f32+mask"
    reference: Callable[..., object]
    ulps: float = 0
    mode: int | None = None  # rounding and denormals, as MODE has them
    gpus: tuple[str, ...] = ("gfx906", "gfx90a")


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def clamp(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


def ctz(x: int) -> int:
    return (x & -x).bit_length() - 1


CASES: dict[str, Case] = {}


def add(name: str, sources: str, result: str, reference: Callable[..., object], **more: object) -> None:
    """Add a case: `name` is the mnemonic, with anything that makes the case unique behind a space."""
    text = more.pop("text", None)
    kinds = tuple(sources.split())
    if text is None:
        destination = "s[20:21]" if result == "mask" else register(10, result.removesuffix("+mask"))
        if result.endswith("+mask"):
            destination += ", s[20:21]"
        operands = [register(4 + 2 * n, kind) for n, kind in enumerate(kinds)]
        text = f"{name.split()[0]} {', '.join([destination, *operands])}"
    assert name not in CASES
    CASES[name] = Case(str(text), kinds, result, reference, **more)  # type: ignore[arg-type]


def register(n: int, kind: str) -> str:
    return f"v[{n}:{n + 1}]" if "64" in kind else f"v{n}"


# Integers.
def integer_cases() -> None:
    add("v_mov_b32", "u32", "u32", lambda a: a)
    add("v_not_b32", "u32", "u32", lambda a: ~a)
    add("v_bfrev_b32", "u32", "u32", lambda a: int(f"{a:032b}"[::-1], 2))
    add("v_ffbh_u32", "u32", "u32", lambda a: 32 - a.bit_length() if a else -1)
    add("v_ffbl_b32", "u32", "u32", lambda a: ctz(a) if a else -1)
    add(
        "v_ffbh_i32",
        "u32",
        "u32",
        lambda a: -1 if a in (0, MASK32) else 32 - (a ^ (MASK32 if a >> 31 else 0)).bit_length(),
    )
    for name, f in {
        "add_u32": lambda a, b: a + b,
        "sub_u32": lambda a, b: a - b,
        "subrev_u32": lambda a, b: b - a,
        "add_i32": lambda a, b: a + b,
        "sub_i32": lambda a, b: a - b,
        "mul_lo_u32": lambda a, b: a * b,
        "mul_hi_u32": lambda a, b: a * b >> 32,
        "mul_hi_i32": lambda a, b: signed(a) * signed(b) >> 32,
        "mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
        "mul_hi_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32,
        "mul_i32_i24": lambda a, b: signed(a, 24) * signed(b, 24),
        "mul_hi_i32_i24": lambda a, b: signed(a, 24) * signed(b, 24) >> 32,
        "min_i32": lambda a, b: min(signed(a), signed(b)),
        "max_i32": lambda a, b: max(signed(a), signed(b)),
        "min_u32": min,
        "max_u32": max,
        "lshlrev_b32": lambda a, b: b << (a & 31),
        "lshrrev_b32": lambda a, b: b >> (a & 31),
        "ashrrev_i32": lambda a, b: signed(b) >> (a & 31),
        "and_b32": lambda a, b: a & b,
        "or_b32": lambda a, b: a | b,
        "xor_b32": lambda a, b: a ^ b,
        "xnor_b32": lambda a, b: ~(a ^ b),
        "bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
        "bcnt_u32_b32": lambda a, b: a.bit_count() + b,
        "cvt_pk_u16_u32": lambda a, b: min(a, 0xFFFF) | min(b, 0xFFFF) << 16,
        "cvt_pk_i16_i32": lambda a, b: (
            clamp(signed(a), -0x8000, 0x7FFF) & 0xFFFF | (clamp(signed(b), -0x8000, 0x7FFF) & 0xFFFF) << 16
        ),
    }.items():
        add(f"v_{name}", "u32 u32", "u32", f)
    for name, low, high, f in (
        ("add_u32", 0, MASK32, lambda a, b: a + b),
        ("sub_u32", 0, MASK32, lambda a, b: a - b),
        ("add_i32", -(1 << 31), (1 << 31) - 1, lambda a, b: signed(a) + signed(b)),
        ("sub_i32", -(1 << 31), (1 << 31) - 1, lambda a, b: signed(a) - signed(b)),
    ):
        text = f"v_{name}{'_e64' if name.endswith('u32') else ''} v10, v4, v6 clamp"
        add(
            f"v_{name} clamp",
            "u32 u32",
            "u32",
            lambda a, b, f=f, least=low, most=high: clamp(f(a, b), least, most),
            text=text,
        )
    for name, f in {
        "add3_u32": lambda a, b, c: a + b + c,
        "lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
        "add_lshl_u32": lambda a, b, c: (a + b & MASK32) << (c & 31),
        "xad_u32": lambda a, b, c: (a ^ b) + c,
        "and_or_b32": lambda a, b, c: a & b | c,
        "or3_b32": lambda a, b, c: a | b | c,
        "lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
        "bfi_b32": lambda a, b, c: a & b | ~a & c,
        "bfe_u32": lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1),
        "bfe_i32": lambda a, b, c: signed(signed(a) >> (b & 31), c & 31) if c & 31 else 0,
        "alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31),
        "alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
        "mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
        "mad_i32_i24": lambda a, b, c: signed(a, 24) * signed(b, 24) + c,
        "mad_u32_u16": lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) + c,
        "mad_i32_i16": lambda a, b, c: signed(a, 16) * signed(b, 16) + c,
        "min3_u32": min,
        "max3_u32": max,
        "med3_u32": lambda *s: sorted(s)[1],
        "min3_i32": lambda *s: min(map(signed, s)),
        "max3_i32": lambda *s: max(map(signed, s)),
        "med3_i32": lambda *s: sorted(map(signed, s))[1],
        "sad_u8": lambda a, b, c: sum(abs(x - y) for x, y in zip(octets(a), octets(b), strict=True)) + c,
        "sad_hi_u8": lambda a, b, c: (
            (sum(abs(x - y) for x, y in zip(octets(a), octets(b), strict=True)) << 16) + c
        ),
        "msad_u8": lambda a, b, c: (
            sum(abs(x - y) for x, y in zip(octets(a), octets(b), strict=True) if y) + c
        ),
        "sad_u16": lambda a, b, c: abs((a & 0xFFFF) - (b & 0xFFFF)) + abs((a >> 16) - (b >> 16)) + c,
        "sad_u32": lambda a, b, c: abs(a - b) + c,
        "lerp_u8": lambda a, b, c: int.from_bytes(
            (x + y + (z & 1)) >> 1 for x, y, z in zip(octets(a), octets(b), octets(c), strict=True)
        ),
        "perm_b32": permuted,
    }.items():
        add(f"v_{name}", "u32 u32 u32", "u32", f)
    add("v_lshlrev_b64", "u32 u64", "u64", lambda a, b: b << (a & 63))
    add("v_lshrrev_b64", "u32 u64", "u64", lambda a, b: b >> (a & 63))
    add("v_ashrrev_i64", "u32 u64", "u64", lambda a, b: signed(b, 64) >> (a & 63))
    add("v_add_co_u32", "u32 u32", "u32+mask", lambda a, b: (a + b, a + b > MASK32))
    add("v_sub_co_u32", "u32 u32", "u32+mask", lambda a, b: (a - b, a < b))
    add("v_subrev_co_u32", "u32 u32", "u32+mask", lambda a, b: (b - a, b < a))
    # The carry that comes in is bit 0 of the third source.
    carry = "v_and_b32 v8, 1, v8\n v_cmp_eq_u32 s[22:23], 1, v8\n "
    for name, f in {
        "addc": lambda a, b, c: (a + b + (c & 1), a + b + (c & 1) > MASK32),
        "subb": lambda a, b, c: (a - b - (c & 1), a - b - (c & 1) < 0),
        "subbrev": lambda a, b, c: (b - a - (c & 1), b - a - (c & 1) < 0),
    }.items():
        text = carry + f"v_{name}_co_u32_e64 v10, s[20:21], v4, v6, s[22:23]"
        add(f"v_{name}_co_u32", "u32 u32 u32", "u32+mask", f, text=text)
    add(
        "v_cndmask_b32",
        "u32 u32 u32",
        "u32",
        lambda a, b, c: b if c & 1 else a,
        text=carry + "v_cndmask_b32_e64 v10, v4, v6, s[22:23]",
    )
    add("v_mad_u64_u32", "u32 u32 u64", "u64+mask", lambda a, b, c: (a * b + c, a * b + c > MASK64))
    add(
        "v_mad_i64_i32",
        "u32 u32 u64",
        "u64",
        lambda a, b, c: signed(a) * signed(b) + c,
        text="v_mad_i64_i32 v[10:11], s[22:23], v4, v6, v[8:9]",
    )
    add(
        "v_sat_pk_u8_i16",
        "u32",
        "u32",
        lambda a: clamp(signed(a, 16), 0, 255) | clamp(signed(a >> 16, 16), 0, 255) << 8,
    )
    # Halves.
    for name, f in {
        "add_u16": lambda a, b: a + b,
        "sub_u16": lambda a, b: a - b,
        "subrev_u16": lambda a, b: b - a,
        "mul_lo_u16": lambda a, b: a * b,
        "lshlrev_b16": lambda a, b: b << (a & 15),
        "lshrrev_b16": lambda a, b: b >> (a & 15),
        "ashrrev_i16": lambda a, b: signed(b, 16) >> (a & 15),
        "min_u16": min,
        "max_u16": max,
        "min_i16": lambda a, b: min(signed(a, 16), signed(b, 16)),
        "max_i16": lambda a, b: max(signed(a, 16), signed(b, 16)),
    }.items():
        add(f"v_{name}", "u16 u16", "u32", lambda a, b, f=f: f(a, b) & 0xFFFF)
    for name, f in {
        "mad_u16": lambda a, b, c: a * b + c,
        "mad_i16": lambda a, b, c: signed(a, 16) * signed(b, 16) + c,
        "min3_i16": lambda *s: min(signed(x, 16) for x in s),
        "max3_u16": max,
        "med3_i16": lambda *s: sorted(signed(x, 16) for x in s)[1],
    }.items():
        add(f"v_{name}", "u16 u16 u16", "u32", lambda a, b, c, f=f: f(a, b, c) & 0xFFFF | OLD & 0xFFFF0000)
    add("v_mad_u16 op_sel", "u32 u32 u32", "u32", text="v_mad_u16 v10, v4, v6, v8 op_sel:[1,0,1,1]",
        reference=lambda a, b, c: ((a >> 16) * (b & 0xFFFF) + (c >> 16) & 0xFFFF) << 16 | OLD & 0xFFFF)  # fmt: skip
    add("v_add_i16 clamp", "u16 u16", "u32", text="v_add_i16 v10, v4, v6 clamp",
        reference=lambda a, b: clamp(signed(a, 16) + signed(b, 16), -0x8000, 0x7FFF) & 0xFFFF | OLD & 0xFFFF0000)  # fmt: skip
    for name, f in {
        "add_u16": lambda a, b: a + b,
        "sub_i16": lambda a, b: a - b,
        "mul_lo_u16": lambda a, b: a * b,
        "lshlrev_b16": lambda a, b: b << (a & 15),
        "ashrrev_i16": lambda a, b: signed(b, 16) >> (a & 15),
        "max_i16": lambda a, b: max(signed(a, 16), signed(b, 16)),
        "min_u16": min,
    }.items():
        add(f"v_pk_{name}", "u32 u32", "u32",
            lambda a, b, f=f: f(a & 0xFFFF, b & 0xFFFF) & 0xFFFF | (f(a >> 16, b >> 16) & 0xFFFF) << 16)  # fmt: skip
    add("v_pk_add_u16 op_sel", "u32 u32", "u32", text="v_pk_add_u16 v10, v4, v6 op_sel:[1,0] op_sel_hi:[0,1]",
        reference=lambda a, b: (a >> 16) + (b & 0xFFFF) & 0xFFFF | ((a & 0xFFFF) + (b >> 16) & 0xFFFF) << 16)  # fmt: skip
    add("v_pk_add_u16 clamp", "u32 u32", "u32", text="v_pk_add_u16 v10, v4, v6 clamp",
        reference=lambda a, b: min((a & 0xFFFF) + (b & 0xFFFF), 0xFFFF) | min((a >> 16) + (b >> 16), 0xFFFF) << 16)  # fmt: skip
    add("v_pk_mad_i16", "u32 u32 u32", "u32",
        lambda a, b, c: a * b + c & 0xFFFF | ((a >> 16) * (b >> 16) + (c >> 16) & 0xFFFF) << 16)  # fmt: skip
    for parts, is_signed in ((2, 1), (2, 0), (4, 1), (4, 0), (8, 1), (8, 0)):
        letter = "i" if is_signed else "u"
        name = f"v_dot{parts}_{letter}32_{letter}{32 // parts}"
        add(name, "u32 u32 u32", "u32", lambda a, b, c, p=parts, s=is_signed: dot(a, b, c, p, s))
    # Comparisons.
    comparisons = {"lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
                   "ne": lambda a, b: a != b, "ge": lambda a, b: a >= b, "f": lambda a, b: False, "t": lambda a, b: True}  # fmt: skip
    for kind in ("u32", "u64", "u16"):
        bits = int(kind[1:])
        for name, f in comparisons.items():
            add(f"v_cmp_{name}_{kind}", f"{kind} {kind}", "mask", f)
            add(
                f"v_cmp_{name}_i{bits}",
                f"{kind} {kind}",
                "mask",
                lambda a, b, f=f, n=bits: f(signed(a, n), signed(b, n)),
            )


def octets(x: int) -> bytes:
    return x.to_bytes(4, "big")


def permuted(a: int, b: int, c: int) -> int:
    both = (a << 32 | b).to_bytes(8, "little")

    def one(s: int) -> int:
        if s >= 13:
            return 0xFF
        if s == 12:
            return 0
        return (0xFF if both[2 * (s - 8) + 1] & 0x80 else 0) if s >= 8 else both[s]

    return int.from_bytes((one(s) for s in c.to_bytes(4, "little")), "little")


def dot(a: int, b: int, c: int, parts: int, is_signed: int) -> int:
    bits = 32 // parts
    total = c
    for n in range(parts):
        x, y = (v >> bits * n & ((1 << bits) - 1) for v in (a, b))
        total += signed(x, bits) * signed(y, bits) if is_signed else x * y
    return total


# Floats.
def fused(f: Format, a: int, b: int, c: int, mode: int = NEAREST) -> int:
    if not all(map(f.finite, (a, b, c))):
        x, y, z = map(f.to_double, (a, b, c))
        if math.isnan(x) or math.isnan(y) or math.isnan(z):
            return f.nan
        if math.isinf(x) or math.isinf(y):
            if x == 0 or y == 0:
                return f.nan
            product = math.copysign(math.inf, math.copysign(1, x) * math.copysign(1, y))
            return f.from_double(product + z)
        return c
    value = f.value(a) * f.value(b) + f.value(c)
    if value == 0:
        product_negative = f.negative(a) != f.negative(b)
        exact_zero = (f.is_zero(a) or f.is_zero(b)) and f.is_zero(c)
        if exact_zero and product_negative == f.negative(c):
            return f.sign if product_negative else 0
        return f.sign if mode == DOWN else 0
    return f.round(value, mode)


def sum_of(f: Format, a: int, b: int, mode: int = NEAREST) -> int:
    result = f.compute(lambda x, y: x + y, lambda x, y: x + y, a, b, mode=mode)
    if (
        mode == DOWN
        and f.finite(a)
        and f.finite(b)
        and f.value(a) + f.value(b) == 0
        and not (f.is_zero(a) and f.is_zero(b) and a == b)
    ):
        return f.sign
    return result


def product(f: Format, a: int, b: int, mode: int = NEAREST) -> int:
    return fused_product(f, a, b, mode)


def fused_product(f: Format, a: int, b: int, mode: int) -> int:
    negative = f.negative(a) != f.negative(b)
    zero = f.sign if negative else 0
    if f.is_nan(a) or f.is_nan(b):
        return f.nan
    if f.is_infinite(a) or f.is_infinite(b):
        return f.nan if f.is_zero(a) or f.is_zero(b) else f.infinity | zero
    return f.round(f.value(a) * f.value(b), mode, zero)


def extreme(f: Format, a: int, b: int, largest: bool) -> int:
    """Minimum and maximum under IEEE mode."""
    if f.is_signalling(a) or f.is_signalling(b):
        return f.nan
    if f.is_nan(a):
        return b
    if f.is_nan(b):
        return a
    key = lambda x: (f.to_double(x), 0 if f.negative(x) else 1)  # noqa: E731
    return max(a, b, key=key) if largest else min(a, b, key=key)


def median(f: Format, a: int, b: int, c: int) -> int:
    """As the ISA document has it, which decides between zeros of both signs."""
    if any(map(f.is_nan, (a, b, c))):
        return extreme(f, extreme(f, a, b, False), c, False)
    most = f.to_double(extreme(f, extreme(f, a, b, True), c, True))
    if most == f.to_double(a):
        return extreme(f, b, c, True)
    return extreme(f, a, c if most == f.to_double(b) else b, True)


def quotient(f: Format, a: int, b: int) -> int:
    """a / b."""
    zero = f.sign if f.negative(a) != f.negative(b) else 0
    if (
        f.is_nan(a)
        or f.is_nan(b)
        or (f.is_zero(a) and f.is_zero(b))
        or (f.is_infinite(a) and f.is_infinite(b))
    ):
        return f.nan
    if f.is_infinite(a) or f.is_zero(b):
        return f.infinity | zero
    if f.is_infinite(b) or f.is_zero(a):
        return zero
    return f.round(f.value(a) / f.value(b), NEAREST, zero)


def whole(f: Format, x: int, how: Callable[[Fraction], int]) -> int:
    if not f.finite(x):
        return f.quiet(x)
    return f.round(Fraction(how(f.value(x))), NEAREST, x & f.sign)


def to_integer(f: Format, x: int, low: int, high: int, how: Callable[[Fraction], int] = math.trunc) -> int:
    if f.is_nan(x):
        return 0
    if f.is_infinite(x):
        return low if f.negative(x) else high
    return clamp(how(f.value(x)), low, high)


def converted(source: Format, target: Format, x: int, mode: int = NEAREST) -> int:
    if source.is_nan(x):
        return target.nan
    sign = target.sign if source.negative(x) else 0
    if source.is_infinite(x):
        return target.infinity | sign
    return target.round(source.value(x), mode, sign)


def function(f: Format, x: int, compute: Callable[[float], float], flush: bool) -> float | int:
    """The true value of a transcendental function: as a double (compared with a tolerance)."""
    if flush:
        x = f.flush(x)
    return compute(f.to_double(x))


def log2(x: float) -> float:
    if x == 0:
        return -math.inf
    return math.log2(x) if x > 0 else math.nan


def exp2(x: float) -> float:
    return math.nan if math.isnan(x) else 2.0 ** max(-1100.0, x) if x < 1023 else math.inf


def sine(x: float) -> float:
    if math.isnan(x) or math.isinf(x):
        return math.nan
    return 0.0 if abs(x) > 256 else math.sin(2 * math.pi * math.fmod(x, 1))


def cosine(x: float) -> float:
    if math.isnan(x) or math.isinf(x):
        return math.nan
    return 1.0 if abs(x) > 256 else math.cos(2 * math.pi * math.fmod(x, 1))


def root(x: float) -> float:
    return math.sqrt(x) if x >= 0 else math.nan


def reciprocal(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else 1 / x


def reciprocal_root(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else 1 / math.sqrt(x) if x > 0 else math.nan


def class_of(f: Format, x: int, mask: int) -> bool:
    negative = f.negative(x)
    if f.is_nan(x):
        kind = 0 if f.is_signalling(x) else 1
    elif f.is_infinite(x):
        kind = 2 if negative else 9
    elif f.is_zero(x):
        kind = 5 if negative else 6
    elif f.is_denormal(x):
        kind = 4 if negative else 7
    else:
        kind = 3 if negative else 8
    return bool(mask >> kind & 1)


def float_cases(kind: str) -> None:
    f = FORMATS[kind]
    two, three = f"{kind} {kind}", f"{kind} {kind} {kind}"
    add(f"v_add_{kind}", two, kind, lambda a, b: sum_of(f, a, b))
    add(f"v_mul_{kind}", two, kind, lambda a, b: product(f, a, b))
    if kind != "f64":
        add(f"v_sub_{kind}", two, kind, lambda a, b: sum_of(f, a, b ^ f.sign if not f.is_nan(b) else b))
        add(f"v_subrev_{kind}", two, kind, lambda a, b: sum_of(f, b, a ^ f.sign if not f.is_nan(a) else a))
        add(f"v_med3_{kind}", three, kind, lambda a, b, c: median(f, a, b, c))
        add(f"v_min3_{kind}", three, kind, lambda a, b, c: extreme(f, extreme(f, a, b, False), c, False))
        add(f"v_max3_{kind}", three, kind, lambda a, b, c: extreme(f, extreme(f, a, b, True), c, True))
    add(f"v_min_{kind}", two, kind, lambda a, b: extreme(f, a, b, False))
    add(f"v_max_{kind}", two, kind, lambda a, b: extreme(f, a, b, True))
    add(f"v_fma_{kind}", three, kind, lambda a, b, c: fused(f, a, b, c))
    suffix = "" if kind == "f64" else "_e64"
    start = f"v_add_{kind}{suffix} {register(10, kind)}, "
    add(f"v_add_{kind} neg abs", two, kind, text=f"{start} -{register(4, kind)}, |{register(6, kind)}|",
        reference=lambda a, b: sum_of(f, a ^ f.sign, b & ~f.sign))  # fmt: skip
    add(f"v_add_{kind} clamp", two, kind, text=f"{start} {register(4, kind)}, {register(6, kind)} clamp",
        reference=lambda a, b: clamp_float(f, sum_of(f, a, b)))  # fmt: skip
    add(f"v_trunc_{kind}", kind, kind, lambda a: whole(f, a, math.trunc))
    add(f"v_ceil_{kind}", kind, kind, lambda a: whole(f, a, math.ceil))
    add(f"v_floor_{kind}", kind, kind, lambda a: whole(f, a, math.floor))
    add(f"v_rndne_{kind}", kind, kind, lambda a: whole(f, a, round))
    add(f"v_fract_{kind}", kind, kind, lambda a: fract(f, a))
    mantissa = lambda a: f.quiet(a) if not f.finite(a) or f.is_zero(a) else frexp(f, a)[0]  # noqa: E731
    exponent = lambda a: 0 if not f.finite(a) or f.is_zero(a) else frexp(f, a)[1]  # noqa: E731
    add(f"v_frexp_mant_{kind}", kind, kind, mantissa)
    if kind == "f16":
        add("v_frexp_exp_i16_f16", kind, "u32", lambda a: exponent(a) & 0xFFFF)
        add("v_ldexp_f16", "f16 u16", "f16", lambda a, b: ldexp(f, a, signed(b, 16)))
    else:
        add(f"v_frexp_exp_i32_{kind}", kind, "u32", exponent)
        add(f"v_ldexp_{kind}", f"{kind} u32", kind, lambda a, b: ldexp(f, a, signed(b)))
    comparisons = {"lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
                   "lg": lambda a, b: a < b or a > b, "ge": lambda a, b: a >= b, "o": lambda a, b: a == a and b == b}  # fmt: skip
    inverse = {"nge": "ge", "nlg": "lg", "ngt": "gt", "nle": "le", "neq": "eq", "nlt": "lt", "u": "o"}
    for name, compare in comparisons.items():
        add(f"v_cmp_{name}_{kind}", two, "mask", lambda a, b, c=compare: c(f.to_double(a), f.to_double(b)))
    for name, of in inverse.items():
        add(
            f"v_cmp_{name}_{kind}",
            two,
            "mask",
            lambda a, b, c=comparisons[of]: not c(f.to_double(a), f.to_double(b)),
        )
    add(f"v_cmp_class_{kind}", f"{kind} u32", "mask", lambda a, b: class_of(f, a, b))
    flushed = kind == "f32"
    for name, compute, ulps in (("rcp", reciprocal, 1), ("rsq", reciprocal_root, 1), ("sqrt", root, 1)):
        add(f"v_{name}_{kind}", kind, kind, lambda a, c=compute: function(f, a, c, flushed), ulps=ulps)
    if kind != "f64":
        for name, compute in (("exp", exp2), ("log", log2), ("sin", sine), ("cos", cosine)):
            add(f"v_{name}_{kind}", kind, kind, lambda a, c=compute: function(f, a, c, flushed), ulps=1)
    # Rounding modes: bits 0 and 1 of MODE for f32, 2 and 3 for the others.
    for mode in (UP, DOWN, ZERO):
        bits = 0xF0 | (mode if kind == "f32" else mode << 2)
        add(f"v_add_{kind} round {mode}", two, kind, lambda a, b, m=mode: sum_of(f, a, b, m), mode=bits)
        add(f"v_mul_{kind} round {mode}", two, kind, lambda a, b, m=mode: product(f, a, b, m), mode=bits)
        add(
            f"v_fma_{kind} round {mode}", three, kind, lambda a, b, c, m=mode: fused(f, a, b, c, m), mode=bits
        )
    # No denormals, as sources or as results.
    add(f"v_mul_{kind} flush", two, kind, lambda a, b: f.flush(product(f, f.flush(a), f.flush(b))), mode=0)
    add(f"v_add_{kind} flush", two, kind, lambda a, b: f.flush(sum_of(f, f.flush(a), f.flush(b))), mode=0)
    add(
        f"v_cmp_eq_{kind} flush",
        two,
        "mask",
        lambda a, b: f.to_double(f.flush(a)) == f.to_double(f.flush(b)),
        mode=0,
    )


def clamp_float(f: Format, x: int) -> int:
    if f.is_nan(x) or f.negative(x):
        return 0
    return min(x, f.bias << f.fraction)


def fract(f: Format, x: int) -> int:
    if not f.finite(x):
        return f.nan
    value = f.value(x)
    below_one = (f.bias << f.fraction) - 1
    return min(f.round(value - math.floor(value)), below_one)


def frexp(f: Format, x: int) -> tuple[int, int]:
    value = abs(f.value(x))
    exponent = 0
    while value >= 1:
        value /= 2
        exponent += 1
    while value < Fraction(1, 2):
        value *= 2
        exponent -= 1
    return f.round(value) | x & f.sign, exponent


def ldexp(f: Format, x: int, by: int) -> int:
    if not f.finite(x):
        return f.quiet(x)
    by = clamp(by, -5000, 5000)
    value = f.value(x)
    return f.round(value * (1 << by) if by >= 0 else value / (1 << -by), NEAREST, x & f.sign)


def mixed_cases() -> None:
    f = F32
    add(
        "v_mul_legacy_f32",
        "f32 f32",
        "f32",
        lambda a, b: 0 if f.is_zero(a) or f.is_zero(b) else product(f, a, b),
    )
    flushing = lambda a, b, c: f.flush(sum_of(f, f.flush(product(f, f.flush(a), f.flush(b))), f.flush(c)))  # noqa: E731
    add("v_mad_f32", "f32 f32 f32", "f32", flushing)
    # The destination is the third source.
    add("v_mac_f32", "f32 f32 f32", "f32", flushing, text="v_mov_b32 v10, v8\n v_mac_f32 v10, v4, v6")
    add(
        "v_fmac_f32",
        "f32 f32 f32",
        "f32",
        lambda a, b, c: fused(f, a, b, c),
        text="v_mov_b32 v10, v8\n v_fmac_f32 v10, v4, v6",
    )
    add(
        "v_madak_f32",
        "f32 f32",
        "f32",
        lambda a, b: flushing(a, b, 0x40490FDB),
        text="v_madak_f32 v10, v4, v6, 0x40490fdb",
    )
    add(
        "v_madmk_f32",
        "f32 f32",
        "f32",
        lambda a, b: flushing(a, 0x40490FDB, b),
        text="v_madmk_f32 v10, v4, 0x40490fdb, v6",
    )
    add("v_cvt_f32_i32", "u32", "f32", lambda a: f.round(Fraction(signed(a))))
    add("v_cvt_f32_u32", "u32", "f32", lambda a: f.round(Fraction(a)))
    add("v_cvt_u32_f32", "f32", "u32", lambda a: to_integer(f, a, 0, MASK32))
    add("v_cvt_i32_f32", "f32", "u32", lambda a: to_integer(f, a, -(1 << 31), (1 << 31) - 1))
    add(
        "v_cvt_rpi_i32_f32",
        "f32",
        "u32",
        lambda a: to_integer(f, a, -(1 << 31), (1 << 31) - 1, lambda x: math.floor(x + Fraction(1, 2))),
    )
    add("v_cvt_flr_i32_f32", "f32", "u32", lambda a: to_integer(f, a, -(1 << 31), (1 << 31) - 1, math.floor))
    add("v_cvt_off_f32_i4", "u32", "f32", lambda a: f.round(Fraction(signed(a, 4), 16)))
    for n in range(4):
        add(f"v_cvt_f32_ubyte{n}", "u32", "f32", lambda a, n=n: f.round(Fraction(a >> 8 * n & 0xFF)))
    add("v_cvt_f32_f64", "f64", "f32", lambda a: converted(F64, F32, a))
    add("v_cvt_f64_f32", "f32", "f64", lambda a: converted(F32, F64, a))
    add("v_cvt_f32_f16", "f16", "f32", lambda a: converted(F16, F32, a))
    add("v_cvt_f16_f32", "f32", "f16", lambda a: converted(F32, F16, a))
    for mode in (UP, DOWN, ZERO):
        add(
            f"v_cvt_f16_f32 round {mode}",
            "f32",
            "f16",
            lambda a, m=mode: converted(F32, F16, a, m),
            mode=0xF0 | mode << 2,
        )
        add(
            f"v_cvt_f32_f64 round {mode}",
            "f64",
            "f32",
            lambda a, m=mode: converted(F64, F32, a, m),
            mode=0xF0 | mode,
        )
    add(
        "v_cvt_pkrtz_f16_f32",
        "f32 f32",
        "pair_f16",
        lambda a, b: (converted(F32, F16, a, ZERO), converted(F32, F16, b, ZERO)),
    )
    add("v_cvt_i32_f64", "f64", "u32", lambda a: to_integer(F64, a, -(1 << 31), (1 << 31) - 1))
    add("v_cvt_u32_f64", "f64", "u32", lambda a: to_integer(F64, a, 0, MASK32))
    add("v_cvt_f64_i32", "u32", "f64", lambda a: F64.round(Fraction(signed(a))))
    add("v_cvt_f64_u32", "u32", "f64", lambda a: F64.round(Fraction(a)))
    add("v_cvt_f16_u16", "u16", "f16", lambda a: F16.round(Fraction(a)))
    add("v_cvt_f16_i16", "u16", "f16", lambda a: F16.round(Fraction(signed(a, 16))))
    add("v_cvt_u16_f16", "f16", "u32", lambda a: to_integer(F16, a, 0, 0xFFFF) & 0xFFFF)
    add("v_cvt_i16_f16", "f16", "u32", lambda a: to_integer(F16, a, -0x8000, 0x7FFF) & 0xFFFF)
    for name, low in (("i16", -1), ("u16", 0)):
        scale = 32767 if low else 65535
        norm = lambda x, least=low, s=scale: (  # noqa: E731
            0
            if F32.is_nan(x)
            else round(
                (clamp(F32.value(x), least, 1) if F32.finite(x) else (least if F32.negative(x) else 1))
                * Fraction(s)
            )
            & 0xFFFF
        )
        add(f"v_cvt_pknorm_{name}_f32", "f32 f32", "u32", lambda a, b, n=norm: n(a) | n(b) << 16)
    add(
        "v_pk_add_f16",
        "u32 u32",
        "pair_f16",
        lambda a, b: (sum_of(F16, a & 0xFFFF, b & 0xFFFF), sum_of(F16, a >> 16, b >> 16)),
    )
    add(
        "v_pk_mul_f16",
        "u32 u32",
        "pair_f16",
        lambda a, b: (product(F16, a & 0xFFFF, b & 0xFFFF), product(F16, a >> 16, b >> 16)),
    )
    add("v_pk_fma_f16", "u32 u32 u32", "pair_f16", lambda a, b, c: (
        fused(F16, a & 0xFFFF, b & 0xFFFF, c & 0xFFFF), fused(F16, a >> 16, b >> 16, c >> 16)))  # fmt: skip
    add("v_pk_max_f16", "u32 u32", "pair_f16", lambda a, b: (
        extreme(F16, a & 0xFFFF, b & 0xFFFF, True), extreme(F16, a >> 16, b >> 16, True)))  # fmt: skip
    add("v_pk_add_f16 neg", "u32 u32", "pair_f16", text="v_pk_add_f16 v10, v4, v6 neg_lo:[1,0] neg_hi:[0,1]", reference=lambda a, b: (
        sum_of(F16, a & 0xFFFF ^ 0x8000, b & 0xFFFF), sum_of(F16, a >> 16, b >> 16 ^ 0x8000)))  # fmt: skip
    add("v_fma_mix_f32", "f16 f32 f16", "f32", text="v_fma_mix_f32 v10, v4, v6, v8 op_sel_hi:[1,0,1]",
        reference=lambda a, b, c: fused(F32, converted(F16, F32, a), b, converted(F16, F32, c)))  # fmt: skip
    # omod works without IEEE mode and without denormals.
    text = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 9, 1), 0\n v_mul_f32_e64 v10, v4, v6 mul:4"
    add("v_mul_f32 omod", "f32 f32", "f32", text=text, mode=0, reference=lambda a, b: no_negative_zero(
        f, f.flush(product(f, f.flush(product(f, f.flush(a), f.flush(b))), 0x40800000))))  # fmt: skip
    add(
        "v_mul_f32 omod ignored",
        "f32 f32",
        "f32",
        lambda a, b: product(f, a, b),
        text="v_mul_f32_e64 v10, v4, v6 mul:4",
    )


def no_negative_zero(f: Format, x: int) -> int:
    return 0 if f.is_zero(x) else x


def division_cases() -> None:
    """The steps that compilers make a division of; its result is that of one rounding."""
    text32 = """v_div_scale_f32 v12, s[22:23], v6, v6, v4
 v_div_scale_f32 v13, vcc, v4, v6, v4
 v_rcp_f32 v14, v12
 v_fma_f32 v15, -v12, v14, 1.0
 v_fma_f32 v14, v15, v14, v14
 v_mul_f32 v15, v13, v14
 v_fma_f32 v16, -v12, v15, v13
 v_fma_f32 v15, v16, v14, v15
 v_fma_f32 v12, -v12, v15, v13
 v_div_fmas_f32 v12, v12, v14, v15
 v_div_fixup_f32 v10, v12, v6, v4"""
    add("v_div_scale_f32", "f32 f32", "f32", lambda a, b: quotient(F32, a, b), text=text32)
    text64 = """v_div_scale_f64 v[12:13], s[22:23], v[6:7], v[6:7], v[4:5]
 v_rcp_f64 v[14:15], v[12:13]
 v_fma_f64 v[16:17], -v[12:13], v[14:15], 1.0
 v_fma_f64 v[14:15], v[14:15], v[16:17], v[14:15]
 v_fma_f64 v[16:17], -v[12:13], v[14:15], 1.0
 v_fma_f64 v[14:15], v[14:15], v[16:17], v[14:15]
 v_div_scale_f64 v[16:17], vcc, v[4:5], v[6:7], v[4:5]
 v_mul_f64 v[18:19], v[16:17], v[14:15]
 v_fma_f64 v[12:13], -v[12:13], v[18:19], v[16:17]
 v_div_fmas_f64 v[12:13], v[12:13], v[14:15], v[18:19]
 v_div_fixup_f64 v[10:11], v[12:13], v[6:7], v[4:5]"""
    add("v_trig_preop_f64", "f64 u32", "f64", trig_segment)
    add("v_div_scale_f64", "f64 f64", "f64", lambda a, b: quotient(F64, a, b), text=text64)


def two_over_pi(bits: int) -> int:
    """Give 2/π × 2^bits, by Machin's formula."""
    scale = bits + 64

    def inverse_tangent(n: int) -> int:
        term = total = (1 << scale) // n
        for k in range(1, scale):
            term //= n * n
            total += -term // (2 * k + 1) if k & 1 else term // (2 * k + 1)
        return total

    pi = 4 * (4 * inverse_tangent(5) - inverse_tangent(239))
    return ((2 << 2 * scale) // pi) >> 64


TWO_OVER_PI = two_over_pi(1201)


def trig_segment(x: int, segment: int) -> int:
    """53 bits of 2/π, for the reduction of large angles."""
    exponent = x >> 52 & 0x7FF
    shift = (segment & 31) * 53 + max(0, exponent - 1077)
    bits = (TWO_OVER_PI << shift) >> (1201 - 53) & ((1 << 53) - 1)
    scale = -53 - shift + (128 if exponent >= 1968 else 0)
    return F64.round(Fraction(bits) / (1 << -scale))


def placed_cases() -> None:
    """SDWA and DPP."""
    for name, select in {"BYTE_0": 0, "BYTE_3": 24, "WORD_1": 16, "WORD_0": 0}.items():
        mask = 0xFF if name.startswith("BYTE") else 0xFFFF
        text = (
            f"v_add_u32_sdwa v10, v4, v6 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:{name} src1_sel:DWORD"
        )
        add(
            f"v_add_u32 sdwa {name}",
            "u32 u32",
            "u32",
            lambda a, b, s=select, m=mask: (a >> s & m) + b,
            text=text,
        )
    text = (
        "v_add_u32_sdwa v10, sext(v4), v6 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:WORD_1"
    )
    add("v_add_u32 sdwa sext", "u32 u32", "u32", lambda a, b: signed(a >> 8, 8) + (b >> 16), text=text)
    for unused, f in {
        "UNUSED_PAD": lambda r: (r & 0xFF) << 8,
        "UNUSED_SEXT": lambda r: signed(r, 8) << 8,
        "UNUSED_PRESERVE": lambda r: (r & 0xFF) << 8 | OLD & ~0xFF00,
    }.items():
        text = f"v_or_b32_sdwa v10, v4, v6 dst_sel:BYTE_1 dst_unused:{unused} src0_sel:DWORD src1_sel:DWORD"
        add(f"v_or_b32 sdwa {unused}", "u32 u32", "u32", lambda a, b, f=f: f(a | b), text=text)
    text = "v_add_f16_sdwa v10, -v4, |v6| dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:WORD_0"
    add(
        "v_add_f16 sdwa",
        "u32 u32",
        "high_f16",
        lambda a, b: sum_of(F16, a >> 16 ^ 0x8000, b & 0x7FFF),
        text=text,
    )
    text = "v_cmp_lt_u32_sdwa s[20:21], v4, v6 src0_sel:BYTE_2 src1_sel:WORD_0"
    add("v_cmp_lt_u32 sdwa", "u32 u32", "mask", lambda a, b: (a >> 16 & 0xFF) < (b & 0xFFFF), text=text)


def lane_cases() -> None:
    """Instructions that look at other lanes: their references take the wave's sources, and give all results."""
    controls = {
        "quad_perm:[3,1,0,2]": lambda i: (i & ~3) + (3, 1, 0, 2)[i & 3],
        "row_shl:3": lambda i: i + 3 if i % 16 + 3 < 16 else None,
        "row_shr:1": lambda i: i - 1 if i % 16 else None,
        "row_ror:5": lambda i: i // 16 * 16 + (i % 16 - 5) % 16,
        "wave_shl:1": lambda i: i + 1 if i < 63 else None,
        "wave_rol:1": lambda i: (i + 1) % 64,
        "wave_shr:1": lambda i: i - 1 if i else None,
        "wave_ror:1": lambda i: (i - 1) % 64,
        "row_mirror": lambda i: i // 16 * 16 + 15 - i % 16,
        "row_half_mirror": lambda i: i // 8 * 8 + 7 - i % 8,
        "row_bcast:15": lambda i: i // 16 * 16 - 1 if i >= 16 else None,
        "row_bcast:31": lambda i: 31 if i >= 32 else None,
    }
    for control, of in controls.items():
        for row, bank, bound in ((15, 15, False), (15, 15, True), (10, 15, False), (15, 6, True)):
            text = f"v_add_u32_dpp v10, v4, v6 {control} row_mask:{row:#x} bank_mask:{bank:#x}{' bound_ctrl:0' if bound else ''}"

            def wave(a: list[int], b: list[int], of: Callable[[int], int | None] = of, row: int = row, bank: int = bank,
                     bound: bool = bound) -> list[int]:  # fmt: skip
                result = [OLD & MASK32] * 64
                for i in range(64):
                    source = of(i)
                    if row >> i // 16 & 1 and bank >> i // 4 % 4 & 1 and (source is not None or bound):
                        result[i] = (a[source] if source is not None else 0) + b[i] & MASK32
                return result

            add(f"v_add_u32 dpp {control} {row} {bank} {bound}", "u32 u32", "wave", wave, text=text)
    add(
        "v_readlane_b32",
        "u32",
        "wave",
        lambda a: [a[37]] * 64,
        text="v_readlane_b32 s22, v4, 37\n s_nop 4\n v_mov_b32 v10, s22",
    )
    add("v_readfirstlane_b32", "u32", "wave", lambda a: [a[5]] * 64,
        text="s_mov_b64 exec, 0xf0e0\n v_readfirstlane_b32 s22, v4\n s_mov_b64 exec, -1\n v_mov_b32 v10, s22")  # fmt: skip
    add(
        "v_writelane_b32",
        "u32",
        "wave",
        lambda a: [33 if i == 9 else OLD & MASK32 for i in range(64)],
        text="v_writelane_b32 v10, 33, 9",
    )
    text = """s_mov_b32 s22, 0x12345678
 s_mov_b32 s23, 0xf0f0f0f0
 v_mbcnt_lo_u32_b32 v10, s22, 5
 v_mbcnt_hi_u32_b32 v10, s23, v10"""
    counts = [5 + (0xF0F0F0F0_12345678 & (1 << i) - 1).bit_count() for i in range(64)]
    add("v_mbcnt", "u32", "wave", lambda a: counts, text=text)
    permute = "v_lshlrev_b32 v12, 2, v4\n "
    add(
        "ds_bpermute_b32",
        "u32 u32",
        "wave",
        lambda a, b: [b[x & 63] for x in a],
        text=permute + "ds_bpermute_b32 v10, v12, v6\n s_waitcnt 0",
    )
    add("ds_permute_b32", "u32 u32", "wave", lambda a, b: [b[(i - 5) % 64] for i in range(64)],
        text="v_add_u32 v12, 5, v0\n v_lshlrev_b32 v12, 2, v12\n ds_permute_b32 v10, v12, v6\n s_waitcnt 0")  # fmt: skip
    add("ds_swizzle_b32 xor", "u32", "wave", lambda a: [a[i ^ 9] for i in range(64)],
        text="ds_swizzle_b32 v10, v4 offset:0x241f\n s_waitcnt 0")  # fmt: skip
    quads = (2, 3, 0, 1)
    add("ds_swizzle_b32 quad", "u32", "wave", lambda a: [a[(i & ~3) + quads[i & 3]] for i in range(64)],
        text="ds_swizzle_b32 v10, v4 offset:swizzle(QUAD_PERM, 2, 3, 0, 1)\n s_waitcnt 0")  # fmt: skip
    add("v_swap_b32", "u32 u32", "wave", lambda a, b: list(b), text="v_mov_b32 v10, v4\n v_swap_b32 v10, v6")
    add("exec", "u32 u32", "wave", lambda a, b: [a[i] + b[i] & MASK32 if 0xF00F >> i % 16 & 1 else OLD & MASK32 for i in range(64)],
        text="s_mov_b32 exec_lo, 0xf00ff00f\n s_mov_b32 exec_hi, 0xf00ff00f\n v_add_u32 v10, v4, v6\n s_mov_b64 exec, -1")  # fmt: skip
    add("exec f64", "f64 f64", "wave64", lambda a, b: [sum_of(F64, a[i], b[i]) if i % 2 else OLD for i in range(64)],
        text="s_mov_b32 exec_lo, 0xaaaaaaaa\n s_mov_b32 exec_hi, 0xaaaaaaaa\n v_add_f64 v[10:11], v[4:5], v[6:7]\n"
        " s_mov_b64 exec, -1")  # fmt: skip
    add("gpr index", "u32 u32 u32", "wave", lambda a, b, c: list(c),
        text="s_mov_b32 s22, 4\n s_set_gpr_idx_on s22, gpr_idx(SRC0)\n v_mov_b32 v10, v4\n s_set_gpr_idx_off")  # fmt: skip


def cdna2_cases() -> None:
    """What gfx90a has, and gfx906 does not."""
    only = {"gpus": ("gfx90a",)}

    def halves(x: int) -> tuple[int, int]:
        return x & MASK32, x >> 32

    minus = F32.sign
    pair = "u64 u64"
    add("v_pk_add_f32", pair, "pair_f32", text="v_pk_add_f32 v[10:11], v[4:5], v[6:7]", **only,
        reference=lambda a, b: tuple(sum_of(F32, x, y) for x, y in zip(halves(a), halves(b), strict=True)))  # fmt: skip
    add("v_pk_mul_f32", pair, "pair_f32", text="v_pk_mul_f32 v[10:11], v[4:5], v[6:7]", **only,
        reference=lambda a, b: tuple(product(F32, x, y) for x, y in zip(halves(a), halves(b), strict=True)))  # fmt: skip
    add("v_pk_fma_f32", "u64 u64 u64", "pair_f32", text="v_pk_fma_f32 v[10:11], v[4:5], v[6:7], v[8:9]", **only,
        reference=lambda *s: tuple(fused(F32, *each) for each in zip(*map(halves, s), strict=True)))  # fmt: skip
    add("v_pk_fma_f32 op_sel neg", "u64 u64 u64", "pair_f32", **only,
        text="v_pk_fma_f32 v[10:11], v[4:5], v[6:7], v[8:9] op_sel:[1,0,1] op_sel_hi:[0,0,1] neg_lo:[0,1,0] neg_hi:[1,0,1]",
        reference=lambda a, b, c: (fused(F32, a >> 32, b & MASK32 ^ minus, c >> 32),
                                   fused(F32, a & MASK32 ^ minus, b & MASK32, c >> 32 ^ minus)))  # fmt: skip
    add("v_pk_add_f32 constants", "u64", "pair_f32", **only, text="v_pk_add_f32 v[10:11], v[4:5], 0.5 op_sel_hi:[1,0]",
        reference=lambda a: tuple(sum_of(F32, x, 0x3F000000) for x in halves(a)))  # fmt: skip
    add("v_pk_add_f32 SGPRs", "u64", "pair_f32", **only,
        text="s_mov_b32 s22, 1.0\n s_mov_b32 s23, 2.0\n v_pk_add_f32 v[10:11], v[4:5], s[22:23]",
        reference=lambda a: (sum_of(F32, a & MASK32, 0x3F800000), sum_of(F32, a >> 32, 0x40000000)))  # fmt: skip
    add("v_pk_add_f32 flush", pair, "pair_f32", mode=0, **only, text="v_pk_add_f32 v[10:11], v[4:5], v[6:7]",
        reference=lambda a, b: tuple(F32.flush(sum_of(F32, F32.flush(x), F32.flush(y)))
                                     for x, y in zip(halves(a), halves(b), strict=True)))  # fmt: skip
    add("v_pk_mul_f32 round", pair, "pair_f32", mode=0xF0 | UP, **only, text="v_pk_mul_f32 v[10:11], v[4:5], v[6:7]",
        reference=lambda a, b: tuple(F32.compute(lambda x, y: x * y, lambda x, y: x * y, x, y, mode=UP)
                                     for x, y in zip(halves(a), halves(b), strict=True)))  # fmt: skip
    add("v_pk_mov_b32", pair, "u64", text="v_pk_mov_b32 v[10:11], v[4:5], v[6:7] op_sel:[1,0]", **only,
        reference=lambda a, b: a >> 32 | (b & MASK32) << 32)  # fmt: skip
    add("v_pk_mov_b32 constant", "u64", "u64", text="v_pk_mov_b32 v[10:11], 5, v[4:5] op_sel:[0,1]", **only,
        reference=lambda a: 5 | a >> 32 << 32)  # fmt: skip
    add("v_pk_mov_b32 itself", "u64", "u64",
        text="v_pk_mov_b32 v[4:5], v[4:5], v[4:5] op_sel:[1,0]\n v_mov_b32 v10, v4\n v_mov_b32 v11, v5",
        reference=lambda a: a >> 32 | (a & MASK32) << 32, **only)  # fmt: skip
    moved = "v_mov_b32 v10, v8\n v_mov_b32 v11, v9\n "
    add("v_fmac_f64", "f64 f64 f64", "f64", text=moved + "v_fmac_f64 v[10:11], v[4:5], v[6:7]", **only,
        reference=lambda a, b, c: fused(F64, a, b, c))  # fmt: skip
    add("v_fmac_f64 e64", "f64 f64 f64", "f64", text=moved + "v_fmac_f64_e64 v[10:11], -v[4:5], |v[6:7]|", **only,
        reference=lambda a, b, c: fused(F64, a ^ F64.sign, b & ~F64.sign, c))  # fmt: skip
    moved = "v_mov_b32 v10, v8\n "
    parts = {"v_dot2c_i32_i16": 16, "v_dot4c_i32_i8": 8, "v_dot8c_i32_i4": 4}
    for name, bits in parts.items():

        def dot(a: int, b: int, c: int, bits: int = bits) -> int:
            return c + sum(signed(a >> n, bits) * signed(b >> n, bits) for n in range(0, 32, bits))

        add(name, "u32 u32 u32", "u32", dot, text=moved + f"{name} v10, v4, v6", **only)
        add(f"{name} dpp", "u32 u32 u32", "wave", **only,
            text=moved + f"{name}_dpp v10, v4, v6 row_newbcast:7 row_mask:0xd bank_mask:0xf",
            reference=lambda a, b, c, dot=dot: [dot(a[i // 16 * 16 + 7], b[i], c[i]) & MASK32 if 0xD >> i // 16 & 1 else c[i]
                                                for i in range(64)])  # fmt: skip

    def dot_of_halves(a: int, b: int, c: int) -> float:
        """Without denormals; how it rounds is not known, so one ulp is allowed."""
        values = [F16.to_double(F16.flush(x >> n & 0xFFFF)) for x in (a, b) for n in (0, 16)]
        c = F32.flush(c)
        if all(math.isfinite(v) for v in values) and F32.finite(c):
            exact = sum((Fraction(values[n]) * Fraction(values[n + 2]) for n in (0, 1)), F32.value(c))
            return F32.to_double(F32.flush(F32.round(exact)))
        return values[0] * values[2] + values[1] * values[3] + F32.to_double(c)

    add(
        "v_dot2c_f32_f16",
        "u32 u32 f32",
        "f32",
        dot_of_halves,
        ulps=1,
        text=moved + "v_dot2c_f32_f16 v10, v4, v6",
        **only,
    )
    add("v_dot2_f32_f16", "u32 u32 f32", "f32", dot_of_halves, ulps=1, **only)
    add("v_pk_fmac_f16", "u32 u32 u32", "pair_f16", text=moved + "v_pk_fmac_f16 v10, v4, v6", **only,
        reference=lambda a, b, c: (fused(F16, a & 0xFFFF, b & 0xFFFF, c & 0xFFFF), fused(F16, a >> 16, b >> 16, c >> 16)))  # fmt: skip
    add("accvgpr", "u32 u32", "u64", lambda a, b: a | b << 32, **only,
        text="v_accvgpr_write_b32 a3, v4\n v_accvgpr_write_b32 a63, v6\n v_accvgpr_mov_b32 a4, a3\n"
        " v_accvgpr_read_b32 v10, a4\n v_accvgpr_read_b32 v11, a63")  # fmt: skip
    add("accvgpr exec", "u32", "wave", lambda a: [a[i] if i < 32 else 7 for i in range(64)], **only,
        text="v_accvgpr_write_b32 a3, 7\n s_mov_b32 exec_hi, 0\n v_accvgpr_write_b32 a3, v4\n s_mov_b32 exec_hi, -1\n"
        " v_accvgpr_read_b32 v10, a3")  # fmt: skip

    def ceiled(a: list[int]) -> list[int]:
        source = [a[i // 16 * 16 + 3] for i in range(64)]
        return [whole(F64, source[i], math.ceil) if 5 >> i // 16 & 1 else OLD for i in range(64)]

    add("v_ceil_f64 dpp", "f64", "wave64", ceiled, **only,
        text="v_ceil_f64_dpp v[10:11], v[4:5] row_newbcast:3 row_mask:0x5 bank_mask:0xf")  # fmt: skip
    add("v_fmac_f64 dpp", "f64 f64 f64", "wave64", **only,
        text="v_mov_b32 v10, v8\n v_mov_b32 v11, v9\n"
        " v_fmac_f64_dpp v[10:11], v[4:5], v[6:7] row_newbcast:0 row_mask:0xf bank_mask:0xf",
        reference=lambda a, b, c: [fused(F64, a[i // 16 * 16], b[i], c[i]) for i in range(64)])  # fmt: skip
    add("v_add_u32 newbcast", "u32 u32", "wave", lambda a, b: [a[i // 16 * 16 + 15] + b[i] & MASK32 for i in range(64)],
        text="v_add_u32_dpp v10, v4, v6 row_newbcast:15 row_mask:0xf bank_mask:0xf", **only)  # fmt: skip


integer_cases()
for _kind in ("f32", "f64", "f16"):
    float_cases(_kind)
mixed_cases()
division_cases()
placed_cases()
lane_cases()
cdna2_cases()


def body(case: Case) -> str:
    """Give the instructions around a case's: load its sources, run it, store its result and mask."""
    mode = "" if case.mode is None else f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 8), {case.mode:#x}"
    old_low, old_high = OLD & MASK32, OLD >> 32
    return f"""
    s_load_dwordx8 s[8:15], s[0:1], 0x0
    s_load_dwordx2 s[16:17], s[0:1], 0x20
    s_lshl_b32 s3, s2, 6
    v_add_u32 v1, s3, v0
    v_lshlrev_b32 v1, 3, v1
    s_waitcnt lgkmcnt(0)
    global_load_dwordx2 v[4:5], v1, s[8:9]
    global_load_dwordx2 v[6:7], v1, s[10:11]
    global_load_dwordx2 v[8:9], v1, s[12:13]
    v_mov_b32 v10, {old_low:#x}
    v_mov_b32 v11, {old_high:#x}
    s_mov_b64 s[20:21], 0
    s_waitcnt vmcnt(0)
    {mode}
    {case.text}
    s_nop 4
    global_store_dwordx2 v1, v[10:11], s[14:15]
    v_mov_b32 v12, s20
    v_mov_b32 v13, s21
    s_lshl_b32 s3, s2, 3
    v_mov_b32 v14, s3
    global_store_dwordx2 v14, v[12:13], s[16:17]
"""


def label(name: str) -> str:
    return "case_" + re.sub(r"\W+", "_", name)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    """Give the engine of a GPU, with one kernel for each case that the GPU has."""

    @functools.cache
    def engine(gpu: str) -> Engine:
        place: Path = tmp_path_factory.mktemp("engine")
        started = Engine(place, gpu=gpu)
        cases = {name: case for name, case in CASES.items() if gpu in case.gpus}
        text = "".join(kernel(label(name), body(case), gpu=gpu) for name, case in cases.items())
        started.load(assemble(text, place, gpu))
        running.append(started)
        return started

    running: list[Engine] = []
    yield engine
    for started in running:
        started.close()


def choices() -> Iterator[object]:
    """Give each case on the first GPU that has it, and a part of them on the others."""
    for number, (name, case) in enumerate(CASES.items()):
        for gpu in case.gpus:
            always = gpu == case.gpus[0] or number % 8 == 0
            yield pytest.param(gpu, name, marks=() if always else pytest.mark.long)


def inputs(kind: str, generator: random.Random) -> list[int]:
    if kind in FORMATS:
        return floats(FORMATS[kind], LANES, generator)
    return integers(int(kind[1:]), LANES, generator)


def matches(f: Format, got: int, expected: object, ulps: float) -> bool:
    """Whether a float is the expected one, or near the expected value; any NaN is as good as another."""
    if isinstance(expected, int):
        return f.is_nan(got) if f.is_nan(expected) else got == expected & (f.sign * 2 - 1)
    assert isinstance(expected, float)
    if math.isnan(expected):
        return f.is_nan(got)
    rounded = f.from_double(expected)
    if not f.finite(rounded) or not f.finite(got):
        return rounded == got
    if expected == 0:
        return f.is_zero(got)
    if f.is_denormal(rounded) and f.is_zero(got):
        return True  # results of these functions may be flushed
    exponent = max((rounded >> f.fraction & f.most) or 1, 1)
    ulp = Fraction(2) ** (exponent - f.bias - f.fraction)
    # The argument of the trigonometric functions is rounded by Python; near a root that is more than one ulp.
    return abs(f.value(got) - Fraction(expected)) <= ulps * ulp + Fraction(1, 1 << 50) * (f.bits < 64)


@pytest.mark.every(4)
@pytest.mark.parametrize(("gpu", "name"), list(choices()))
def test_instruction(engines: Callable[[str], Engine], gpu: str, name: str) -> None:
    """The instruction's result in each work-item: edges, like sizes, random bits."""
    engine, case = engines(gpu), CASES[name]
    generator = random.Random(name)
    sources = [inputs(kind, generator) for kind in case.sources]
    for n, register_name in enumerate("abc"):
        values = sources[n] if n < len(sources) else [0] * LANES
        # What is above a narrow source must not matter.
        bits = int(case.sources[n][1:]) if n < len(sources) else 64
        padded = [v | generator.getrandbits(64) >> bits << bits if bits < 64 else v for v in values]
        engine.put(register_name, np.array([p & MASK64 for p in padded], dtype=np.uint64))
    engine.put("results", np.zeros(LANES, dtype=np.uint64))
    engine.put("masks", np.zeros(LANES // 64, dtype=np.uint64))
    outcome = engine.run(label(name), ("a", "b", "c", "results", "masks"), (LANES, 1, 1), (64, 1, 1))
    assert outcome.fault is None, outcome.fault
    results = [int(v) for v in engine.get("results", np.uint64)]
    masks = [int(v) for v in engine.get("masks", np.uint64)]

    if case.result.startswith("wave"):
        keep = MASK64 if case.result == "wave64" else MASK32
        for wave in range(LANES // 64):
            part = [s[64 * wave : 64 * wave + 64] for s in sources]
            expected = case.reference(*part)
            got = [r & keep for r in results[64 * wave : 64 * wave + 64]]
            if case.result == "wave64":
                assert all(matches(F64, g, e, 0) for g, e in zip(got, expected, strict=True))  # type: ignore[call-overload]
            else:
                assert got == expected
        return
    for lane in range(LANES):
        values = [s[lane] for s in sources]
        wanted = case.reference(*values)
        what = f"{name}: lane {lane}, sources {[hex(v) for v in values]}"
        result, mask = case.result, bool(masks[lane // 64] >> lane % 64 & 1)
        if result == "mask":
            assert mask == bool(wanted), what
            continue
        if result.endswith("+mask"):
            assert isinstance(wanted, tuple)
            assert mask == bool(wanted[1]), what
            wanted, result = wanted[0], result.removesuffix("+mask")
        got = results[lane]
        if result == "u64":
            assert got == wanted & MASK64, f"{what}: {got:#x}, not {wanted & MASK64:#x}"  # type: ignore[operator]
            continue
        if result == "pair_f32":
            assert isinstance(wanted, tuple)
            both = zip((got & MASK32, got >> 32), wanted, strict=True)
            assert all(matches(F32, g, e, 0) for g, e in both), f"{what}: {got:#x}, not {wanted}"
            continue
        if result == "f64":
            assert matches(F64, got, wanted, case.ulps), f"{what}: {got:#x}, not {wanted}"
            continue
        assert got >> 32 == OLD >> 32, what  # the register after the result's
        got &= MASK32
        if result == "u32":
            assert got == wanted & MASK32, f"{what}: {got:#x}, not {wanted & MASK32:#x}"  # type: ignore[operator]
        elif result == "f32":
            assert matches(F32, got, wanted, case.ulps), f"{what}: {got:#x}, not {wanted}"
        elif result == "pair_f16":
            assert isinstance(wanted, tuple)
            assert matches(F16, got & 0xFFFF, wanted[0], 0) and matches(F16, got >> 16, wanted[1], 0), (
                f"{what}: {got:#x}"
            )
        elif result == "high_f16":
            assert got & 0xFFFF == OLD & 0xFFFF, what
            assert matches(F16, got >> 16, wanted, 0), f"{what}: {got:#x}, not {wanted}"
        else:
            keeps = re.match(r"v_(fma|mad|min3|max3|med3)_f16", name) is not None
            assert got >> 16 == (OLD >> 16 & 0xFFFF if keeps else 0), what
            assert matches(F16, got & 0xFFFF, wanted, case.ulps), f"{what}: {got & 0xFFFF:#x}, not {wanted}"
