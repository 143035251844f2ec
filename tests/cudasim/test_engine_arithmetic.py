"""Every family of arithmetic instructions against NumPy or exact integers, on edge cases and random values."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from engine_device import Array, Device
from engine_instructions import bits, kernel

WIDTH = {"8": 1, "16": 2, "32": 4, "64": 8}
RNG = np.random.default_rng(1)
COUNT = 512


def inputs(t: str, k: int) -> np.ndarray:
    """Bit patterns: edge cases of the type in all combinations with those of other operands, then random ones."""
    w = bits(t)
    dtype = np.dtype(f"u{w // 8}")
    mask = (1 << w) - 1
    if t in ("f32", "f64", "f16", "bf16"):
        real = {"f32": np.float32, "f64": np.float64, "f16": np.float16}.get(t)
        values = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            -1.5,
            2.5,
            3.0,
            1e-3,
            -7.25,
            np.inf,
            -np.inf,
            np.nan,
            100.7,
            65504.0,
            6e-8,
        ]
        if real is None:
            edge = (np.array(values, np.float32).view(np.uint32) >> 16).astype(dtype)
        else:
            with np.errstate(over="ignore"):
                edge = np.array(values).astype(real).view(dtype)
    else:
        edge = np.array(
            [0, 1, 2, 3, 5, 7, 31, 32, 33, 63, 64, mask, mask - 1, mask >> 1, (mask >> 1) + 1, 0x5A & mask],
            dtype,
        )
    repeat = [1, 16, 4][k]
    first = np.tile(np.repeat(edge, repeat), COUNT)[: COUNT // 2]
    if t in ("f32", "f64", "f16"):
        random = (
            (RNG.standard_normal(COUNT // 2) * 10.0 ** RNG.integers(-3, 4, COUNT // 2))
            .astype(real)
            .view(dtype)
        )
    elif t == "bf16":
        random = (RNG.standard_normal(COUNT // 2).astype(np.float32).view(np.uint32) >> 16).astype(dtype)
    else:
        random = RNG.integers(0, mask, COUNT // 2, dtype, endpoint=True)
    return np.concatenate([first, random])


def signed(x: int, w: int) -> int:
    x &= (1 << w) - 1
    return x - (1 << w) if x >> (w - 1) else x


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def value(x: int, t: str) -> float:
    dtype = {"f32": np.float32, "f64": np.float64, "f16": np.float16}[t] if t != "bf16" else None
    if dtype is None:
        return float(np.array([x << 16], np.uint32).view(np.float32)[0])
    return float(np.array([x], np.dtype(f"u{bits(t) // 8}")).view(dtype)[0])


def pattern(x: float, t: str) -> int:
    """Correctly rounded from a double."""
    with np.errstate(all="ignore"):
        dtype = {"f32": np.float32, "f64": np.float64, "f16": np.float16}[t]
        return int(np.array([x]).astype(dtype).view(np.dtype(f"u{bits(t) // 8}"))[0])


def is_nan(x: int, t: str) -> bool:
    return math.isnan(value(x, t))


def _fp8(exponent_bits: int) -> list[float]:
    """The values of the codes 0 to 127 up to the largest finite one (OCP 8-bit floating point specification)."""
    fraction, bias = 7 - exponent_bits, (1 << exponent_bits - 1) - 1
    part = 1 << fraction
    found = [
        (code % part + part * (code >= part)) / part * 2.0 ** (max(code // part, 1) - bias)
        for code in range(128)
    ]
    return found[:127] if exponent_bits == 4 else found[:124]


FP8 = {"e4m3x2": _fp8(4), "e5m2x2": _fp8(5)}


def to_fp8(x: float, numbers: list[float], relu: bool = False) -> int:
    """The nearest; of two, the one with the even code."""
    if math.isnan(x):
        return 127
    if relu and math.copysign(1, x) < 0:
        return 0
    at = bisect.bisect_left(numbers, abs(x))
    if at == len(numbers) or (at and (abs(x) - numbers[at - 1], at - 1 & 1) < (numbers[at] - abs(x), at & 1)):
        at -= 1
    return at | (128 if math.copysign(1, x) < 0 else 0)


def from_fp8(code: int, numbers: list[float]) -> int:
    sign, code = (code & 128) << 8, code & 127
    if code < len(numbers):
        return sign | pattern(numbers[code], "f16")
    return sign | 0x7C00 if len(numbers) == code == 124 else 0x7FFF


def exact(f: Callable[..., Fraction], t: str) -> Callable[..., int | None]:
    """Reference for one rounding of an exact result; None (not compared) where an operand is not finite."""

    def reference(*patterns: int) -> int | None:
        values = [value(p, t) for p in patterns]
        if not all(map(math.isfinite, values)):
            return None
        try:
            result = f(*map(Fraction, values))
        except ZeroDivisionError:
            return None
        if result == 0:
            return None  # the sign of zero has its own test
        if t == "f64":
            try:
                return pattern(result.numerator / result.denominator, "f64")
            except OverflowError:
                return None
        return nearest(result, t)

    return reference


def nearest(x: Fraction, t: str) -> int | None:
    """Round to nearest even in f32 or f16, from an exact value."""
    mantissa, least = {"f32": (24, -149), "f16": (11, -24)}[t]
    sign = x < 0
    x = abs(x)
    exponent = max(x.numerator.bit_length() - x.denominator.bit_length(), least + mantissa - 1)
    while x >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > least + mantissa - 1 and x < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - mantissa + 1)
    n = round(x / unit)  # round() of a Fraction is to even
    result = n * unit
    if result > (3.4028234663852886e38 if t == "f32" else 65504.0):
        return 0x7F800000 | sign << 31 if t == "f32" else 0x7C00 | sign << 15
    return pattern(float(result) * (-1 if sign else 1), t)


CASES: dict[str, tuple[str, list[str], Callable[..., int | None]]] = {}


def case(instruction: str, types: str, reference: Callable[..., int | None]) -> None:
    CASES[instruction] = (instruction, types.split(), reference)


def _integer_cases() -> None:
    for w in (16, 32, 64):
        u, s, m = f"u{w}", f"s{w}", (1 << w) - 1
        case(f"add.{s} {{}}, {{}}, {{}};", f"{s} {s} {s}", lambda a, b, m=m: a + b & m)
        case(f"sub.{u} {{}}, {{}}, {{}};", f"{u} {u} {u}", lambda a, b, m=m: a - b & m)
        case(f"mul.lo.{s} {{}}, {{}}, {{}};", f"{s} {s} {s}", lambda a, b, m=m: a * b & m)
        case(f"mul.hi.{u} {{}}, {{}}, {{}};", f"{u} {u} {u}", lambda a, b, w=w: a * b >> w)
        case(
            f"mul.hi.{s} {{}}, {{}}, {{}};",
            f"{s} {s} {s}",
            lambda a, b, w=w, m=m: signed(a, w) * signed(b, w) >> w & m,
        )
        case(f"mad.lo.{s} {{}}, {{}}, {{}}, {{}};", f"{s} {s} {s} {s}", lambda a, b, c, m=m: a * b + c & m)
        case(
            f"mad.hi.{u} {{}}, {{}}, {{}}, {{}};",
            f"{u} {u} {u} {u}",
            lambda a, b, c, w=w, m=m: (a * b >> w) + c & m,
        )
        case(f"div.{u} {{}}, {{}}, {{}};", f"{u} {u} {u}", lambda a, b: a // b if b else None)
        case(f"rem.{u} {{}}, {{}}, {{}};", f"{u} {u} {u}", lambda a, b: a % b if b else None)
        case(
            f"div.{s} {{}}, {{}}, {{}};",
            f"{s} {s} {s}",
            lambda a, b, w=w, m=m: quotient(signed(a, w), signed(b, w)) & m if b else None,
        )
        case(
            f"rem.{s} {{}}, {{}}, {{}};",
            f"{s} {s} {s}",
            lambda a, b, w=w, m=m: (
                signed(a, w) - quotient(signed(a, w), signed(b, w)) * signed(b, w) & m if b else None
            ),
        )
        case(
            f"min.{s} {{}}, {{}}, {{}};",
            f"{s} {s} {s}",
            lambda a, b, w=w, m=m: min(signed(a, w), signed(b, w)) & m,
        )
        case(f"max.{u} {{}}, {{}}, {{}};", f"{u} {u} {u}", lambda a, b: max(a, b))
        case(f"abs.{s} {{}}, {{}};", f"{s} {s}", lambda a, w=w, m=m: abs(signed(a, w)) & m)
        case(f"neg.{s} {{}}, {{}};", f"{s} {s}", lambda a, m=m: -a & m)
        case(
            f"sad.{s} {{}}, {{}}, {{}}, {{}};",
            f"{u} {s} {s} {u}",
            lambda a, b, c, w=w, m=m: abs(signed(a, w) - signed(b, w)) + c & m,
        )
        case(f"and.b{w} {{}}, {{}}, {{}};", f"{u} {u} {u}", lambda a, b: a & b)
        case(f"xor.b{w} {{}}, {{}}, {{}};", f"{u} {u} {u}", lambda a, b: a ^ b)
        case(f"not.b{w} {{}}, {{}};", f"{u} {u}", lambda a, m=m: ~a & m)
        case(f"cnot.b{w} {{}}, {{}};", f"{u} {u}", lambda a: int(a == 0))
        case(f"shl.b{w} {{}}, {{}}, {{}};", f"{u} {u} u32", lambda a, n, w=w, m=m: a << n & m if n < w else 0)
        case(f"shr.{u} {{}}, {{}}, {{}};", f"{u} {u} u32", lambda a, n, w=w: a >> n if n < w else 0)
        case(
            f"shr.{s} {{}}, {{}}, {{}};",
            f"{s} {s} u32",
            lambda a, n, w=w, m=m: signed(a, w) >> min(n, w - 1) & m,
        )
        for op, f in (("lt", "<"), ("ge", ">="), ("ne", "!=")):
            case(
                f"setp.{op}.{s} {{}}, {{}}, {{}};",
                f"pred {s} {s}",
                lambda a, b, w=w, f=f: int(eval(f"{signed(a, w)} {f} {signed(b, w)}")),
            )
        case(f"setp.hi.{u} {{}}, {{}}, {{}};", f"pred {u} {u}", lambda a, b: int(a > b))
        case(f"setp.le.{u} {{}}, {{}}, {{}};", f"pred {u} {u}", lambda a, b: int(a <= b))
        case(
            f"set.lt.u32.{s} {{}}, {{}}, {{}};",
            f"u32 {s} {s}",
            lambda a, b, w=w: 0xFFFFFFFF * (signed(a, w) < signed(b, w)),
        )
        if w > 16:
            case(f"popc.b{w} {{}}, {{}};", f"u32 {u}", lambda a: a.bit_count())
            case(f"clz.b{w} {{}}, {{}};", f"u32 {u}", lambda a, w=w: w - a.bit_length())
            case(f"brev.b{w} {{}}, {{}};", f"{u} {u}", lambda a, w=w: int(f"{a:0{w}b}"[::-1], 2))
            case(f"bfind.{u} {{}}, {{}};", f"u32 {u}", lambda a: a.bit_length() - 1 & 0xFFFFFFFF)
            case(
                f"bfind.shiftamt.{u} {{}}, {{}};",
                f"u32 {u}",
                lambda a, w=w: w - a.bit_length() if a else 0xFFFFFFFF,
            )
            case(
                f"bfind.{s} {{}}, {{}};",
                f"u32 {s}",
                lambda a, w=w: (
                    (signed(a, w) if signed(a, w) >= 0 else ~signed(a, w)).bit_length() - 1 & 0xFFFFFFFF
                ),
            )
            case(f"bfe.{u} {{}}, {{}}, 3, 9;", f"{u} {u}", lambda a: a >> 3 & 511)
            case(
                f"bfe.{s} {{}}, {{}}, {w - 4}, 9;",
                f"{s} {s}",
                lambda a, w=w, m=m: signed(a, w) >> (w - 4) & m,
            )
            case(
                f"bfe.{u} {{}}, {{}}, {{}}, {{}};",
                f"{u} {u} u32 u32",
                lambda a, p, n, m=m: a >> (p & 255) & ((1 << (n & 255)) - 1) & m,
            )
            case(
                f"bfi.b{w} {{}}, {{}}, {{}}, 5, 11;",
                f"{u} {u} {u}",
                lambda a, b: b & ~(2047 << 5) | (a & 2047) << 5,
            )
            case(f"selp.b{w} {{}}, {{}}, {{}}, %p1;", f"{u} {u} {u}", lambda a, b: None)
        if w < 64:
            d = 2 * w
            case(
                f"mul.wide.{s} {{}}, {{}}, {{}};",
                f"s{d} {s} {s}",
                lambda a, b, w=w: signed(a, w) * signed(b, w) & (1 << 2 * w) - 1,
            )
            case(f"mul.wide.{u} {{}}, {{}}, {{}};", f"u{d} {u} {u}", lambda a, b: a * b)
            case(
                f"mad.wide.{s} {{}}, {{}}, {{}}, {{}};",
                f"s{d} {s} {s} s{d}",
                lambda a, b, c, w=w: signed(a, w) * signed(b, w) + c & (1 << 2 * w) - 1,
            )
    del CASES["selp.b32 {}, {}, {}, %p1;"], CASES["selp.b64 {}, {}, {}, %p1;"]
    top, low = 0x7FFFFFFF, -0x80000000
    m = 0xFFFFFFFF
    case(
        "add.sat.s32 {}, {}, {};",
        "s32 s32 s32",
        lambda a, b: min(max(signed(a, 32) + signed(b, 32), low), top) & m,
    )
    case(
        "sub.sat.s32 {}, {}, {};",
        "s32 s32 s32",
        lambda a, b: min(max(signed(a, 32) - signed(b, 32), low), top) & m,
    )
    case("mul24.lo.u32 {}, {}, {};", "u32 u32 u32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) & m)
    case("mul24.hi.s32 {}, {}, {};", "s32 s32 s32", lambda a, b: signed(a, 24) * signed(b, 24) >> 16 & m)
    case(
        "mad24.lo.s32 {}, {}, {}, {};",
        "s32 s32 s32 s32",
        lambda a, b, c: signed(a, 24) * signed(b, 24) + c & m,
    )
    case(
        "shf.l.wrap.b32 {}, {}, {}, {};",
        "u32 u32 u32 u32",
        lambda a, b, n: ((b << 32 | a) << (n & 31)) >> 32 & m,
    )
    case(
        "shf.r.clamp.b32 {}, {}, {}, {};", "u32 u32 u32 u32", lambda a, b, n: (b << 32 | a) >> min(n, 32) & m
    )
    case("prmt.b32 {}, {}, {}, 0x2b9c;", "u32 u32 u32", lambda a, b: permute(a, b, 0x2B9C))
    case("prmt.b32 {}, {}, {}, {};", "u32 u32 u32 u32", permute)
    case("prmt.b32.f4e {}, {}, {}, {};", "u32 u32 u32 u32", lambda a, b, c: (b << 32 | a) >> 8 * (c & 3) & m)
    case("lop3.b32 {}, {}, {}, {}, 0xE8;", "u32 u32 u32 u32", lambda a, b, c: a & b | a & c | b & c)
    case("lop3.b32 {}, {}, {}, {}, 0x96;", "u32 u32 u32 u32", lambda a, b, c: a ^ b ^ c)
    case(
        "dp4a.u32.s32 {}, {}, {}, {};",
        "s32 u32 u32 s32",
        lambda a, b, c: sum((a >> 8 * k & 255) * signed(b >> 8 * k, 8) for k in range(4)) + c & m,
    )
    case(
        "dp2a.lo.s32.u32 {}, {}, {}, {};",
        "s32 u32 u32 s32",
        lambda a, b, c: sum(signed(a >> 16 * k, 16) * (b >> 8 * k & 255) for k in range(2)) + c & m,
    )
    case(
        "vabsdiff4.u32.u32.u32 {}, {}, {}, {};",
        "u32 u32 u32 u32",
        lambda a, b, c: sum(abs((a >> k & 255) - (b >> k & 255)) << k for k in range(0, 32, 8)),
    )
    case(
        "vabsdiff2.u32.u32.u32.add {}, {}, {}, {};",
        "u32 u32 u32 u32",
        lambda a, b, c: c + sum(abs((a >> k & m >> 16) - (b >> k & m >> 16)) for k in (0, 16)) & m,
    )
    case(
        "mapa.shared::cluster.u32 {}, {}, {};",
        "u32 u32 u32",
        lambda a, b: a & 0xFFFFFF | min(b, 16) << 24,
    )
    case("getctarank.shared::cluster.u32 {}, {};", "u32 u32", lambda a: a >> 24)
    case("fns.b32 {}, {}, 0, 3;", "u32 u32", lambda a: ([k for k in range(32) if a >> k & 1] + [m] * 3)[2])
    case(
        "bmsk.clamp.b32 {}, {}, {};",
        "u32 u32 u32",
        lambda a, b: ((1 << b) - 1) << a & m if a < 32 and b < 64 else None,
    )
    case("szext.wrap.s32 {}, {}, 7;", "s32 s32", lambda a: signed(a, 7) & m)
    case(
        "add.u16x2 {}, {}, {};",
        "u16x2 u16x2 u16x2",
        lambda a, b: (a + b & 0xFFFF) | ((a >> 16) + (b >> 16) & 0xFFFF) << 16,
    )
    case("max.s32.relu {}, {}, {};", "s32 s32 s32", lambda a, b: max(signed(a, 32), signed(b, 32), 0))
    case("min.s32.relu {}, {}, {};", "s32 s32 s32", lambda a, b: max(min(signed(a, 32), signed(b, 32)), 0))
    case(
        "max.s16x2 {}, {}, {};",
        "s16x2 s16x2 s16x2",
        lambda a, b: (
            max(signed(a, 16), signed(b, 16)) & 0xFFFF
            | (max(signed(a >> 16, 16), signed(b >> 16, 16)) & 0xFFFF) << 16
        ),
    )
    case("slct.u32.s32 {}, {}, {}, {};", "u32 u32 u32 s32", lambda a, b, c: a if signed(c, 32) >= 0 else b)
    pack = "{{ .reg .b32 lo, hi; mov.b64 {{lo, hi}}, {1}; mov.b64 {0}, {{hi, lo}}; }}"
    case(pack, "u64 u64", lambda a: a >> 32 | (a & m) << 32)


def _with_carry(op: str, t: str, a: int, b: int, c: int, carry: int) -> tuple[int, int]:
    """The result and the carry-out of an instruction with .cc. It adds as hardware does: a - b is a + ~b + 1."""
    w = bits(t)
    m = (1 << w) - 1
    if op.startswith("mad"):
        product = signed(a, w) * signed(b, w) if t[0] == "s" else a * b
        total = (product >> w if ".hi" in op else product) & m
        total += c
    else:
        total = a + (~b & m if op.startswith("sub") else b)
    if "c." in op:  # addc, subc, madc
        total += carry
    else:
        total += op.startswith("sub")
    return total & m, total >> w


def _carry_cases() -> None:
    """Every instruction that writes the carry before every one that reads it, and the carry after both."""
    for t in ("u32", "s32", "u64", "s64"):
        for first in ("add.cc", "sub.cc", "mad.lo.cc", "mad.hi.cc"):
            for second in ("addc.cc", "subc.cc", "madc.lo.cc", "madc.hi.cc"):
                if t[0] == "s" and ".hi" not in first + second:
                    continue
                one = f"{first}.{t} r, {{1}}, {{2}}" + (", {3};" if "mad" in first else ";")
                two = f"{second}.{t} s, {{3}}, {{1}}" + (", {2};" if "mad" in second else ";")
                end = f"addc.{t} c, 0, 0; mad.lo.{t} r, s, 3, r; mad.lo.{t} {{0}}, c, 5, r;"

                def reference(
                    a: int, b: int, c: int, t: str = t, first: str = first, second: str = second
                ) -> int:
                    r, carry = _with_carry(first, t, a, b, c, 0)
                    s, carry = _with_carry(second, t, c, a, b, carry)
                    return r + 3 * s + 5 * carry & (1 << bits(t)) - 1

                case(f"{{{{ .reg .{t} r, s, c; {one} {two} {end} }}}}", f"{t} {t} {t} {t}", reference)


def permute(a: int, b: int, c: int) -> int:
    v = b << 32 | a
    r = 0
    for k in range(4):
        s = c >> 4 * k & 15
        x = v >> 8 * (s & 7) & 255
        r |= (255 * (x >> 7) if s & 8 else x) << 8 * k
    return r


def _conversion_cases() -> None:
    for w1 in (8, 16, 32, 64):
        for w2 in (8, 16, 32, 64):
            if w1 == 8 or w2 == 8:
                continue  # 8-bit registers do not exist: below
            case(
                f"cvt.s{w2}.s{w1} {{}}, {{}};",
                f"s{w2} s{w1}",
                lambda a, w1=w1, w2=w2: signed(a, w1) & (1 << w2) - 1,
            )
            case(f"cvt.u{w2}.u{w1} {{}}, {{}};", f"u{w2} u{w1}", lambda a, w2=w2: a & (1 << w2) - 1)
    case("cvt.s32.s8 {}, {};", "s32 s32", lambda a: signed(a, 8) & 0xFFFFFFFF)
    case("cvt.u16.u8 {}, {};", "u16 u32", lambda a: a & 255)
    case("cvt.sat.s8.s32 {}, {};", "s32 s32", lambda a: min(max(signed(a, 32), -128), 127) & 0xFFFFFFFF)
    case("cvt.sat.u8.s32 {}, {};", "u32 s32", lambda a: min(max(signed(a, 32), 0), 255))
    case("cvt.sat.u32.s64 {}, {};", "u32 s64", lambda a: min(max(signed(a, 64), 0), 0xFFFFFFFF))
    for w in (16, 32, 64):
        for t in ("f32", "f64", "f16"):
            if not (t == "f16" and w == 64):
                case(
                    f"cvt.rn.{t}.s{w} {{}}, {{}};", f"{t} s{w}", lambda a, w=w, t=t: from_int(signed(a, w), t)
                )
            case(f"cvt.rn.{t}.u{w} {{}}, {{}};", f"{t} u{w}", lambda a, t=t: from_int(a, t))
    for t in ("f32", "f64", "f16"):
        for mode, f in (("rzi", math.trunc), ("rni", round), ("rmi", math.floor), ("rpi", math.ceil)):
            for d in ("s32", "u32", "s64", "u64", "s16", "u16"):
                case(
                    f"cvt.{mode}.{d}.{t} {{}}, {{}};", f"{d} {t}", lambda a, t=t, d=d, f=f: to_int(a, t, d, f)
                )
        case(
            f"cvt.rni.{t}.{t} {{}}, {{}};",
            f"{t} {t}",
            lambda a, t=t: (
                None
                if not math.isfinite(value(a, t)) or abs(value(a, t)) < 1
                else pattern(float(round(value(a, t))), t)
            ),
        )
        case(
            f"cvt.sat.{t}.{t} {{}}, {{}};",
            f"{t} {t}",
            lambda a, t=t: (
                pattern(min(max(value(a, t), 0.0), 1.0), t) if value(a, t) != 0 and not is_nan(a, t) else None
            ),
        )
    case(
        "cvt.rn.f32.f64 {}, {};",
        "f32 f64",
        lambda a: pattern(value(a, "f64"), "f32") if not is_nan(a, "f64") else None,
    )
    case(
        "cvt.f64.f32 {}, {};",
        "f64 f32",
        lambda a: pattern(value(a, "f32"), "f64") if not is_nan(a, "f32") else None,
    )
    case(
        "cvt.rn.f16.f32 {}, {};",
        "f16 f32",
        lambda a: pattern(value(a, "f32"), "f16") if not is_nan(a, "f32") else 0x7FFF,
    )
    case(
        "cvt.rn.f16.f64 {}, {};",
        "f16 f64",
        lambda a: pattern(value(a, "f64"), "f16") if not is_nan(a, "f64") else 0x7FFF,
    )
    case(
        "cvt.f32.f16 {}, {};",
        "f32 f16",
        lambda a: pattern(value(a, "f16"), "f32") if not is_nan(a, "f16") else None,
    )
    case(
        "cvt.f64.f16 {}, {};",
        "f64 f16",
        lambda a: pattern(value(a, "f16"), "f64") if not is_nan(a, "f16") else None,
    )
    case("cvt.rn.bf16.f32 {}, {};", "bf16 f32", lambda a: bfloat(a))
    case(
        "cvt.rn.f16x2.f32 {}, {}, {};",
        "u32 f32 f32",
        lambda a, b: (
            None
            if is_nan(a, "f32") or is_nan(b, "f32")
            else pattern(value(a, "f32"), "f16") << 16 | pattern(value(b, "f32"), "f16")
        ),
    )
    for name, numbers in FP8.items():
        case(
            f"cvt.rn.satfinite.{name}.f32 {{}}, {{}}, {{}};",
            "u16 f32 f32",
            lambda a, b, n=numbers: to_fp8(value(a, "f32"), n) << 8 | to_fp8(value(b, "f32"), n),
        )
        case(
            f"cvt.rn.satfinite.relu.{name}.f16x2 {{}}, {{}};",
            "u16 u32",
            lambda a, n=numbers: (
                to_fp8(value(a >> 16, "f16"), n, True) << 8 | to_fp8(value(a & 0xFFFF, "f16"), n, True)
            ),
        )
        case(
            f"cvt.rn.f16x2.{name} {{}}, {{}};",
            "u32 u16",
            lambda a, n=numbers: from_fp8(a >> 8, n) << 16 | from_fp8(a & 255, n),
        )
    case("cvt.rz.f32.f64 {}, {};", "f32 f64", lambda a: toward_zero(value(a, "f64")))
    case("cvt.rz.f16.f32 {}, {};", "f16 f32", lambda a: half_toward_zero(value(a, "f32")))


def bfloat(a: int) -> int:
    if is_nan(a, "f32"):
        return 0x7FFF
    return a + 0x7FFF + (a >> 16 & 1) >> 16 & 0xFFFF


def toward_zero(x: float) -> int | None:
    if not math.isfinite(x) or x == 0:
        return None
    with np.errstate(all="ignore"):
        y = np.float32(x)
        if abs(float(y)) > abs(x):
            y = np.nextafter(y, np.float32(0))
    return int(y.view(np.uint32))


def half_toward_zero(x: float) -> int | None:
    if not math.isfinite(x) or x == 0:
        return None
    with np.errstate(all="ignore"):
        y = np.float16(x)
        if abs(float(y)) > abs(x):
            y = np.nextafter(y, np.float16(0))
    return int(y.view(np.uint16))


def from_int(x: int, t: str) -> int | None:
    if t == "f64":
        return pattern(float(x), "f64")
    return pattern(0.0, t) if x == 0 else nearest(Fraction(x), t)


def to_int(a: int, t: str, d: str, f: Callable[[float], int]) -> int:
    w = int(d[1:])
    x = value(a, t)
    if math.isnan(x):
        return 1 << (w - 1) if t == "f64" or w == 64 else 0
    low, high = (-(1 << (w - 1)), (1 << (w - 1)) - 1) if d[0] == "s" else (0, (1 << w) - 1)
    if math.isinf(x):
        return (high if x > 0 else low) & (1 << w) - 1
    return min(max(f(x), low), high) & (1 << w) - 1


def _float_cases() -> None:
    for t in ("f32", "f64"):
        case(f"add.{t} {{}}, {{}}, {{}};", f"{t} {t} {t}", exact(lambda a, b: a + b, t))
        case(f"sub.rn.{t} {{}}, {{}}, {{}};", f"{t} {t} {t}", exact(lambda a, b: a - b, t))
        case(f"mul.{t} {{}}, {{}}, {{}};", f"{t} {t} {t}", exact(lambda a, b: a * b, t))
        case(f"div.rn.{t} {{}}, {{}}, {{}};", f"{t} {t} {t}", exact(lambda a, b: a / b, t))
        case(f"fma.rn.{t} {{}}, {{}}, {{}}, {{}};", f"{t} {t} {t} {t}", exact(lambda a, b, c: a * b + c, t))
        case(f"rcp.rn.{t} {{}}, {{}};", f"{t} {t}", exact(lambda a: 1 / a, t))
        case(f"abs.{t} {{}}, {{}};", f"{t} {t}", lambda a, t=t: a & ~(1 << bits(t) - 1))
        case(f"neg.{t} {{}}, {{}};", f"{t} {t}", lambda a, t=t: a ^ 1 << bits(t) - 1)
        case(f"sqrt.rn.{t} {{}}, {{}};", f"{t} {t}", lambda a, t=t: root(a, t))
        case(f"min.{t} {{}}, {{}}, {{}};", f"{t} {t} {t}", lambda a, b, t=t: extreme(a, b, t, -1))
        case(f"max.{t} {{}}, {{}}, {{}};", f"{t} {t} {t}", lambda a, b, t=t: extreme(a, b, t, 1))
        case(
            f"copysign.{t} {{}}, {{}}, {{}};",
            f"{t} {t} {t}",
            lambda a, b, t=t: a & 1 << bits(t) - 1 | b & ~(1 << bits(t) - 1),
        )
        for op in ("eq", "ne", "lt", "ge", "equ", "neu", "ltu", "gtu", "num", "nan"):
            case(
                f"setp.{op}.{t} {{}}, {{}}, {{}};",
                f"pred {t} {t}",
                lambda a, b, t=t, op=op: compare(a, b, t, op),
            )
        case(f"testp.infinite.{t} {{}}, {{}};", f"pred {t}", lambda a, t=t: int(math.isinf(value(a, t))))
        case(
            f"testp.normal.{t} {{}}, {{}};",
            f"pred {t}",
            lambda a, t=t: int(
                math.isfinite(value(a, t))
                and abs(value(a, t)) >= (1.1754943508222875e-38 if t == "f32" else 2.2250738585072014e-308)
            ),
        )
    for t in ("f16",):
        case(f"add.{t} {{}}, {{}}, {{}};", f"{t} {t} {t}", exact(lambda a, b: a + b, t))
        case(f"mul.{t} {{}}, {{}}, {{}};", f"{t} {t} {t}", exact(lambda a, b: a * b, t))
        case(f"fma.rn.{t} {{}}, {{}}, {{}}, {{}};", f"{t} {t} {t} {t}", exact(lambda a, b, c: a * b + c, t))
        case(f"setp.lt.{t} {{}}, {{}}, {{}};", f"pred {t} {t}", lambda a, b, t=t: compare(a, b, t, "lt"))
        case(f"neg.{t} {{}}, {{}};", f"{t} {t}", lambda a: a ^ 0x8000)
    case(
        "add.sat.f32 {}, {}, {};",
        "f32 f32 f32",
        lambda a, b: (
            None
            if is_nan(a, "f32")
            or is_nan(b, "f32")
            or not math.isfinite(value(a, "f32") + value(b, "f32"))
            or value(a, "f32") + value(b, "f32") == 0
            else pattern(
                min(max(float(np.float32(value(a, "f32")) + np.float32(value(b, "f32"))), 0.0), 1.0), "f32"
            )
        ),
    )
    case(
        "add.ftz.f32 {}, {}, 0f00000001;",
        "f32 f32",
        lambda a: (
            None
            if is_nan(a, "f32") or value(a, "f32") == 0
            else (0 if abs(value(a, "f32")) < 1.1754943508222875e-38 else pattern(value(a, "f32"), "f32"))
        ),
    )
    case("add.rz.f32 {}, {}, {};", "f32 f32 f32", directed(lambda a, b: a + b, "z"))
    case("mul.rp.f32 {}, {}, {};", "f32 f32 f32", directed(lambda a, b: a * b, "p"))
    case("fma.rm.f32 {}, {}, {}, {};", "f32 f32 f32 f32", directed(lambda a, b, c: a * b + c, "m"))
    case(
        "max.NaN.f32 {}, {}, {};",
        "f32 f32 f32",
        lambda a, b: 0x7FFFFFFF if is_nan(a, "f32") or is_nan(b, "f32") else extreme(a, b, "f32", 1),
    )


def directed(f: Callable[..., Fraction], mode: str) -> Callable[..., int | None]:
    def reference(*patterns: int) -> int | None:
        values = [value(p, "f32") for p in patterns]
        if not all(map(math.isfinite, values)):
            return None
        x = f(*map(Fraction, values))
        if x == 0:
            return None
        near = nearest(x, "f32")
        y = np.array([near], np.uint32).view(np.float32)[0]
        if not np.isfinite(y):
            return None
        got = Fraction(float(y))
        if mode == "z" and abs(got) > abs(x):
            y = np.nextafter(y, np.float32(0))
        elif mode == "p" and got < x:
            y = np.nextafter(y, np.float32(np.inf))
        elif mode == "m" and got > x:
            y = np.nextafter(y, np.float32(-np.inf))
        return int(y.view(np.uint32))

    return reference


def root(a: int, t: str) -> int | None:
    x = value(a, t)
    if not x > 0 or math.isinf(x):
        return None
    dtype = np.float32 if t == "f32" else np.float64
    return int(np.sqrt(dtype(x)).view(np.uint32 if t == "f32" else np.uint64))


def extreme(a: int, b: int, t: str, sign: int) -> int:
    """NaN loses; -0 is less than +0 (PTX ISA 9.7.3.11)."""
    canonical = 0x7FFFFFFF if t == "f32" else 0x7FFFFFFFFFFFFFFF
    if is_nan(a, t):
        return canonical if is_nan(b, t) else b
    if is_nan(b, t):
        return a
    x, y = value(a, t), value(b, t)
    if x == y:
        return a if (math.copysign(1, x) * sign > math.copysign(1, y) * sign) else b
    return a if (x > y) == (sign > 0) else b


def compare(a: int, b: int, t: str, op: str) -> int:
    x, y = value(a, t), value(b, t)
    unordered = math.isnan(x) or math.isnan(y)
    if op in ("num", "nan"):
        return int(unordered == (op == "nan"))
    table = {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}
    if len(op) == 3:
        return int(unordered or table[op[:2]])
    return int(not unordered and table[op])


_integer_cases()
_conversion_cases()
_carry_cases()
_float_cases()
NAMES = {instruction: f"k{k}" for k, instruction in enumerate(CASES)}


@pytest.fixture(scope="module")
def device() -> Device:
    text = ".version 8.6\n.target sm_100\n.address_size 64\n"
    for instruction, (_, types, _) in CASES.items():
        text += kernel(NAMES[instruction], instruction, types) + "\n"
    return Device(text)


@pytest.mark.parametrize("instruction", list(CASES))
def test_instruction(device: Device, instruction: str) -> None:
    _, (out, *sources), reference = CASES[instruction]
    arrays = [inputs(t, k) for k, t in enumerate(sources)]
    given = [Array(a) for a in arrays] + [0] * (3 - len(sources))
    result = Array(np.zeros(COUNT, "u4" if out == "pred" else f"u{bits(out) // 8}"))
    device.launch(NAMES[instruction], COUNT // 128, 128, result, *given)
    for k in range(COUNT):
        operands = [int(a[k]) for a in arrays]
        wanted = reference(*operands)
        if wanted is not None:
            assert int(result.host[k]) == wanted, (
                f"{[hex(x) for x in operands]}: {int(result.host[k]):#x}, not {wanted:#x}"
            )


def test_a_register_plus_a_constant() -> None:
    """ptxas computes `%r1+5` with the register's width."""
    body = """
        .reg .b64 %rd<3>; .reg .b32 %r<3>; .local .align 8 .b8 mine[8];
        ld.param.u64 %rd1, [out];
        mov.u32 %r1, %tid.x;
        add.u32 %r2, %r1+5, 3;
        st.global.u32 [%rd1], %r2+-4;
        mov.u32 %r1, 0xffffffff;
        cvt.u64.u32 %rd2, %r1+2;
        st.local.u64 [mine], %rd2+40;
        ld.local.u64 %rd2, [mine];
        st.global.u64 [%rd1+8], %rd2;
        ret;"""
    text = f".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 out) {{ {body} }}\n"
    out = Array(np.zeros(2, np.uint64))
    Device(text).launch("k", 1, 1, out)
    assert out.host.tolist() == [4, 41]
