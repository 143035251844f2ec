"""Every rounding, saturation and edge of arithmetic against exact fractions and Python's integers.

test_engine_arithmetic.py has a case for each family of instructions. This table has their types, roundings and modifiers.
NaNs need only be NaNs. test_engine_forms.py has the approximations, and every other form of an instruction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from engine_device import Array, Device
from engine_instructions import bits, kernel
from engine_values import (
    COUNT,
    FORMATS,
    MODES,
    RELATIONS,
    UNSIGNED,
    Reference,
    add,
    clamped,
    decoded,
    div,
    encoded,
    extreme,
    flushed,
    fma,
    integer,
    is_negative,
    mul,
    negative,
    of_values,
    operands,
    packed,
    related,
    same,
    signed,
    sqrt,
)

# --- the table: instruction, types, reference; a reference returns None where results are not compared ---

CASES: dict[str, tuple[list[str], Reference, str]] = {}


def case(instruction: str, types: Sequence[str], reference: Reference, result: str = "") -> None:
    """`result`: the floating-point format of the result, any of whose NaNs are equal."""
    places = ", ".join(["{}"] * len(types))
    text = instruction if "{" in instruction else f"{instruction} {places};"
    CASES[text] = (list(types), reference, result)


def _float_cases() -> None:
    single = (
        ("add", add, 2),
        ("sub", lambda a, b, m: add(a, negative(b), m), 2),
        ("mul", mul, 2),
        ("fma", fma, 3),
    )
    more = (("div", div, 2), ("rcp", lambda a, m: div(Fraction(1), a, m), 1), ("sqrt", sqrt, 1))
    for t in ("f32", "f64"):
        for name, operation, count in (*single, *more):
            for mode in MODES:
                for modifiers in ((), ("ftz",), ("sat",), ("ftz", "sat")) if t == "f32" else ((),):
                    if "sat" in modifiers and name in ("div", "rcp", "sqrt"):
                        continue
                    case(
                        ".".join((name, mode, *modifiers, t)),
                        [t] * (count + 1),
                        of_values(operation, t, mode, modifiers),
                        t,
                    )
    for t in ("f16", "bf16"):
        for name, operation, count in single:
            some = [(), ("relu",)] if name == "fma" else [()]
            some += [("ftz",), ("sat",), ("ftz", "sat")] if t == "f16" else []
            for modifiers in some:
                reference = of_values(operation, t, "rn", modifiers)
                case(".".join((name, "rn", *modifiers, t)), [t] * (count + 1), reference, t)
                case(
                    ".".join((name, "rn", *modifiers, t + "x2")),
                    [t + "x2"] * (count + 1),
                    packed(reference),
                    t + "x2",
                )


def _extreme_cases() -> None:
    for name, sign in (("min", -1), ("max", 1)):
        for t in ("f32", "f16", "bf16"):
            some: list[tuple[str, ...]] = [(), ("NaN",)]
            some += [("ftz",), ("ftz", "NaN")] if t != "bf16" else []
            some += [("xorsign", "abs"), ("ftz", "xorsign", "abs")] if t == "f32" else []
            for modifiers in some:

                def reference(
                    *p: int, t: str = t, sign: int = sign, modifiers: tuple[str, ...] = modifiers
                ) -> int | None:
                    return extreme(p, t, sign, modifiers)

                text = "".join(f".{m}" for m in modifiers)
                case(f"{name}{text}.{t}", [t] * 3, reference, t)
                if t != "f32":
                    case(f"{name}{text}.{t}x2", [t + "x2"] * 3, packed(reference), t + "x2")
                elif "xorsign" not in modifiers:
                    case(f"{name}{text}.{t}", [t] * 4, reference, t)
        case(f"{name}.f64", ["f64"] * 3, lambda *p, sign=sign: extreme(p, "f64", sign, ()), "f64")
    for t in ("f16", "bf16"):
        f = FORMATS[t]
        for name, operation in (("abs", lambda p, f=f: p & ~f.sign), ("neg", lambda p, f=f: p ^ f.sign)):
            case(f"{name}.{t}", [t, t], operation, t)
            case(f"{name}.{t}x2", [t + "x2"] * 2, packed(operation), t + "x2")


def _conversion_cases() -> None:
    whole = {"rni": "rn", "rzi": "rz", "rpi": "rp", "rmi": "rm"}
    kinds = [f"{sign}{w}" for sign in "su" for w in (16, 32, 64)]
    for s in kinds:
        for d in kinds:
            ends = integer(1 << bits(s) - 1, s), (1 << bits(s) - (s[0] == "s")) - 1
            if any(integer(clamped(x, d), d) != x for x in ends):  # else PTX has no .sat
                case(f"cvt.sat.{d}.{s}", [d, s], lambda a, d=d, s=s: clamped(integer(a, s), d))
            case(f"cvt.{d}.{s}", [d, s], lambda a, d=d, s=s: integer(a, s) & (1 << bits(d)) - 1)
        for d in FORMATS:
            for mode in MODES if d in ("f32", "f64") else ("rn",):

                def of_integer(a: int, s: str = s, d: str = d, mode: str = mode) -> int:
                    x = integer(a, s)
                    return encoded(Fraction(x) if x else 0.0, d, mode)

                case(f"cvt.{mode}.{d}.{s}", [d, s], of_integer, d)
    for s in FORMATS:
        for d in FORMATS:
            wider = FORMATS[d].precision >= FORMATS[s].precision and FORMATS[d].least <= FORMATS[s].least
            if s == d:
                for name, mode in whole.items():

                    def integral(a: int, t: str = s, mode: str = mode) -> int:
                        x = decoded(a, t)
                        if isinstance(x, float):
                            return encoded(x, t)
                        rounded = MODES[mode](x)
                        return encoded(Fraction(rounded) if rounded else -0.0 if x < 0 else 0.0, t)

                    case(f"cvt.{name}.{d}.{s}", [d, s], integral, d)
                continue
            modes = [""] if wider else [*MODES] if (s, d) == ("f64", "f32") else ["rn", "rz"]
            for mode in modes:

                def narrowed(a: int, s: str = s, d: str = d, mode: str = mode or "rn") -> int:
                    return encoded(decoded(a, s), d, mode)

                case(f"cvt.{mode}.{d}.{s}".replace("..", "."), [d, s], narrowed, d)
        for d in kinds:
            for name, mode in whole.items():

                def to_integer(a: int, s: str = s, d: str = d, mode: str = mode) -> int | None:
                    x = decoded(a, s)
                    if isinstance(x, float) and (math.isnan(x) or math.isinf(x)):
                        return None if math.isnan(x) else clamped(10**30 if x > 0 else -(10**30), d)
                    return clamped(MODES[mode](Fraction(x)), d)

                case(f"cvt.{name}.{d}.{s}", [d, s], to_integer)
    for d, t in (("f16", "f32"), ("bf16", "f32")):
        for mode in ("rn", "rz"):
            for relu in (False, True):

                def two(a: int, b: int, d: str = d, mode: str = mode, relu: bool = relu) -> int | None:
                    one = of_values(lambda x, m: x, "f32")
                    made = []
                    for p in (b, a):
                        x = decoded(one(p) or 0, "f32")
                        made.append(0 if relu and is_negative(x) and x == x else encoded(x, d, mode))
                    return made[0] | made[1] << 16

                case(f"cvt.{mode}{'.relu' * relu}.{d}x2.{t}", [d + "x2", t, t], two, d + "x2")
    for kind in ("u16", "s16"):
        case(
            f"cvt.pack.sat.{kind}.s32",
            ["u32", "s32", "s32"],
            lambda a, b, kind=kind: clamped(signed(b, 32), kind) | clamped(signed(a, 32), kind) << 16,
        )
    for kind in ("u8", "s8", "u4", "s4", "u2", "s2"):
        w = int(kind[1:])
        case(
            f"cvt.pack.sat.{kind}.s32.b32",
            ["u32", "s32", "s32", "u32"],
            lambda a, b, c, kind=kind, w=w: (
                clamped(signed(b, 32), kind) | clamped(signed(a, 32), kind) << w | c << 2 * w & 0xFFFFFFFF
            ),
        )


def _comparison_cases() -> None:
    for t in (f"{sign}{w}" for sign in "su" for w in (16, 32, 64)):
        for op in (*RELATIONS, *(UNSIGNED if t[0] == "u" else ())):
            case(
                f"setp.{op}.{t}",
                ["pred", t, t],
                lambda a, b, t=t, op=op: related(op, integer(a, t), integer(b, t)),
            )
            case(
                f"set.{op}.f32.{t}",
                ["f32", t, t],
                lambda a, b, t=t, op=op: 0x3F800000 * related(op, integer(a, t), integer(b, t)),
            )
    for t in FORMATS:
        for op in (*RELATIONS, *(op + "u" for op in RELATIONS), "num", "nan"):
            case(
                f"setp.{op}.{t}",
                ["pred", t, t],
                lambda a, b, t=t, op=op: related(op, decoded(a, t), decoded(b, t)),
            )
            if t in ("f32", "f16"):
                case(
                    f"setp.{op}.ftz.{t}",
                    ["pred", t, t],
                    lambda a, b, t=t, op=op: related(
                        op, decoded(flushed(a, t), t), decoded(flushed(b, t), t)
                    ),
                )
            case(
                f"set.{op}.u32.{t}",
                ["u32", t, t],
                lambda a, b, t=t, op=op: 0xFFFFFFFF * related(op, decoded(a, t), decoded(b, t)),
            )
    for joint, f in (("and", lambda x, y: x & y), ("or", lambda x, y: x | y), ("xor", lambda x, y: x ^ y)):
        case(
            f"{{{{ .reg .pred q; setp.ne.u32 q, {{3}}, 0; setp.lt.{joint}.s32 {{0}}, {{1}}, {{2}}, q; }}}}",
            ["pred", "s32", "s32", "u32"],
            lambda a, b, c, f=f: f(int(signed(a, 32) < signed(b, 32)), int(c != 0)),
        )
    kinds = {
        "finite": lambda p, f: p < f.infinity, "infinite": lambda p, f: p == f.infinity,
        "number": lambda p, f: p <= f.infinity, "notanumber": lambda p, f: p > f.infinity,
        "normal": lambda p, f: 1 << f.precision - 1 <= p < f.infinity,
        "subnormal": lambda p, f: 0 < p < 1 << f.precision - 1,
    }  # fmt: skip
    for t in ("f32", "f64"):
        f = FORMATS[t]
        for kind, test in kinds.items():
            case(f"testp.{kind}.{t}", ["pred", t], lambda p, f=f, test=test: int(test(p & ~f.sign, f)))
    for t in ("u16", "s32", "u64", "f32", "f64"):
        case(
            f"slct.{t}.f32",
            [t, t, t, "f32"],
            lambda a, b, c: a if c & 0x7FFFFFFF <= 0x7F800000 and (c < 1 << 31 or c == 1 << 31) else b,
            t if t in FORMATS else "",
        )


def _integer_cases() -> None:
    m = 0xFFFFFFFF
    for t in (f"{sign}{w}" for sign in "su" for w in (16, 32, 64)):
        w = bits(t)
        mask = (1 << w) - 1
        case(
            f"mad.hi.{t}",
            [t] * 4,
            lambda a, b, c, t=t, w=w, mask=mask: (integer(a, t) * integer(b, t) >> w) + c & mask,
        )
        for name, pick in (("min", min), ("max", max)):
            case(
                f"{name}.{t}",
                [t] * 3,
                lambda a, b, t=t, mask=mask, pick=pick: pick(integer(a, t), integer(b, t)) & mask,
            )
        case(
            f"sad.{t}",
            [f"u{w}", t, t, f"u{w}"],
            lambda a, b, c, t=t, mask=mask: abs(integer(a, t) - integer(b, t)) + c & mask,
        )
        if w < 64:
            wide = f"{t[0]}{2 * w}"
            case(
                f"mad.wide.{t}",
                [wide, t, t, wide],
                lambda a, b, c, t=t, w=w: integer(a, t) * integer(b, t) + c & (1 << 2 * w) - 1,
            )
        if w == 16:
            continue

        def field(a: int, p: int, n: int, t: str = t, w: int = w, mask: int = mask) -> int:
            """PTX ISA 9.7.1.20, as its pseudocode has it."""
            p, n = p & 255, n & 255
            sign = 0 if t[0] == "u" or n == 0 else a >> min(p + n - 1, w - 1) & 1
            found = 0
            for at in range(w):
                found |= (a >> p + at & 1 if at < n and p + at < w else sign) << at
            return found & mask

        case(f"bfe.{t}", [t, t, "u32", "u32"], field)
        if t[0] == "u":
            for p, n in ((0, 0), (5, 11), (w - 3, 9), (0, 255), (w, 4), (255, 255)):

                def put(a: int, b: int, p: int = p, n: int = n, w: int = w) -> int:
                    for at in range(min(n, w)):
                        if p + at < w:
                            b = b & ~(1 << p + at) | (a >> at & 1) << p + at
                    return b

                case(f"bfi.b{w} {{}}, {{}}, {{}}, {p}, {n};", [t, t, t], put)
    for t in ("s32", "u32"):

        def product24(a: int, b: int, t: str = t) -> int:
            one, other = (signed(x, 24) if t == "s32" else x & 0xFFFFFF for x in (a, b))
            return one * other

        for part, shift in (("lo", 0), ("hi", 16)):
            case(f"mul24.{part}.{t}", [t] * 3, lambda a, b, f=product24, s=shift: f(a, b) >> s & m)
            case(f"mad24.{part}.{t}", [t] * 4, lambda a, b, c, f=product24, s=shift: (f(a, b) >> s) + c & m)
        for mode in ("clamp", "wrap"):

            def extended(a: int, n: int, t: str = t, mode: str = mode) -> int:
                n = n & 31 if mode == "wrap" else min(n, 32)
                low = a & (1 << n) - 1
                return low | (m << n & m if t == "s32" and n and a >> n - 1 & 1 else 0)

            case(f"szext.{mode}.{t}", [t, t, "u32"], extended)
    case(
        "mad24.hi.sat.s32", ["s32"] * 4,
        lambda a, b, c: clamped((signed(a, 24) * signed(b, 24) >> 16) + signed(c, 32), "s32"),
    )  # fmt: skip
    case(
        "mad.hi.sat.s32", ["s32"] * 4,
        lambda a, b, c: clamped((signed(a, 32) * signed(b, 32) >> 32) + signed(c, 32), "s32"),
    )  # fmt: skip
    for mode in ("clamp", "wrap"):

        def mask_of(a: int, b: int, mode: str = mode) -> int:
            a, b = (a & 31, b & 31) if mode == "wrap" else (min(a, 32), min(b, 32))
            return ((1 << b) - 1) << a & m

        case(f"bmsk.{mode}.b32", ["u32"] * 3, mask_of)
        for side in "lr":

            def funnel(a: int, b: int, n: int, side: str = side, mode: str = mode) -> int:
                n = n & 31 if mode == "wrap" else min(n, 32)
                return (b << 32 | a) << n >> 32 & m if side == "l" else (b << 32 | a) >> n & m

            case(f"shf.{side}.{mode}.b32", ["u32"] * 4, funnel)
    for table in (0x00, 0x01, 0x1B, 0x80, 0xCA, 0xF0, 0xFE, 0xFF):

        def looked_up(a: int, b: int, c: int, table: int = table) -> int:
            return sum(
                (table >> (a >> k & 1) * 4 + (b >> k & 1) * 2 + (c >> k & 1) & 1) << k for k in range(32)
            )

        case(f"lop3.b32 {{}}, {{}}, {{}}, {{}}, {table};", ["u32"] * 4, looked_up)
    selectors = {
        "f4e": lambda s: [s, s + 1, s + 2, s + 3], "b4e": lambda s: [s, (s - 1) % 8, (s - 2) % 8, (s - 3) % 8],
        "rc8": lambda s: [s] * 4, "ecl": lambda s: [max(s, k) for k in range(4)],
        "ecr": lambda s: [min(s, k) for k in range(4)], "rc16": lambda s: [0, 1, 0, 1] if s % 2 == 0 else [2, 3, 2, 3],
    }  # fmt: skip
    for mode, choose in selectors.items():
        case(
            f"prmt.b32.{mode}",
            ["u32"] * 4,
            lambda a, b, c, choose=choose: sum(
                ((b << 32 | a) >> 8 * s & 255) << 8 * k for k, s in enumerate(choose(c & 3))
            ),
        )
    for ta in ("s32", "u32"):
        for tb in ("s32", "u32"):

            def part(x: int, at: int, w: int, t: str) -> int:
                return signed(x >> at, w) if t == "s32" else x >> at & (1 << w) - 1

            case(
                f"dp4a.{ta}.{tb}",
                ["s32", ta, tb, "s32"],
                lambda a, b, c, ta=ta, tb=tb, part=part: (
                    sum(part(a, 8 * k, 8, ta) * part(b, 8 * k, 8, tb) for k in range(4)) + c & m
                ),
            )
            for half in ("lo", "hi"):
                case(
                    f"dp2a.{half}.{ta}.{tb}",
                    ["s32", ta, tb, "s32"],
                    lambda a, b, c, ta=ta, tb=tb, part=part, at=16 * (half == "hi"): (
                        sum(part(a, 16 * k, 16, ta) * part(b, at + 8 * k, 8, tb) for k in range(2)) + c & m
                    ),
                )
    for base in range(0, 32, 7):
        for offset in (-2, -1, 0, 1, 3):

            def nth(a: int, base: int = base, offset: int = offset) -> int:
                """PTX ISA 9.7.1.17: from `base` up or, below 0, down; 0 asks for the bit itself."""
                if offset == 0:
                    return base if a >> base & 1 else m
                places = range(base, 32) if offset > 0 else range(base, -1, -1)
                found = [at for at in places if a >> at & 1]
                return found[abs(offset) - 1] if len(found) >= abs(offset) else m

            case(f"fns.b32 {{}}, {{}}, {base}, {offset};", ["u32", "u32"], nth)


def group_of(text: str) -> str:
    return "setp" if text.startswith("{") else text.split(".")[0]


_float_cases()
_extreme_cases()
_conversion_cases()
_comparison_cases()
_integer_cases()
NAMES = {instruction: f"k{k}" for k, instruction in enumerate(CASES)}
GROUPS = sorted({group_of(text) for text in CASES})


@pytest.fixture(scope="module")
def device() -> Device:
    head = ".version 8.0\n.target sm_90\n.address_size 64\n"
    return Device(head + "\n".join(kernel(NAMES[text], text, types) for text, (types, *_) in CASES.items()))


@pytest.mark.every(4)
@pytest.mark.parametrize("group", GROUPS)
def test_instructions(device: Device, group: str) -> None:
    wrong = [said for text in CASES if group_of(text) == group and (said := differs(device, text))]
    assert not wrong, "\n".join(wrong)


def differs(device: Device, text: str) -> str | None:
    (out, *sources), reference, result = CASES[text]
    columns = [operands(t, k) for k, t in enumerate(sources)]
    given = [Array(np.array(column, f"u{bits(t) // 8}")) for column, t in zip(columns, sources, strict=True)]
    made = Array(np.zeros(COUNT, "u4" if out == "pred" else f"u{bits(out) // 8}"))
    device.launch(NAMES[text], COUNT // 128, 128, made, *given, *[0] * (3 - len(given)))
    for got, *patterns in zip(made.host.tolist(), *columns, strict=True):
        wanted = reference(*patterns)
        if wanted is not None and not same(got, wanted, result):
            return f"{text} {[hex(p) for p in patterns]}: {got:#x}, not {wanted:#x}"
    return None
