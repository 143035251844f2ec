"""What PTX documents for each form of an arithmetic instruction: results, or how far those of an approximation may be off.

Python's integers and fractions compute the results. The functions of approximations are those of doubles, which are far more
precise than what PTX promises.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from engine_forms import COMPARISONS, RELATIONS, Form
from engine_instructions import bits
from engine_values import (
    FORMATS,
    MODES,
    Reference,
    Value,
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
    is_subnormal,
    mul,
    negative,
    of_values,
    packed,
    related,
    signed,
    sqrt,
)

M32 = 0xFFFFFFFF
FLOAT_PAIRS = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32"}
INTEGER_PAIRS = {"u16x2": "u16", "s16x2": "s16"}


# ptxas accepts these forms, but the PTX ISA does not have them.
UNDOCUMENTED = frozenset(
    """
    addc.u16 addc.s16 subc.u16 subc.s16 madc.lo.u16 madc.lo.s16 madc.hi.u16 madc.hi.s16
    rcp.rn.ftz.f64 rcp.rz.ftz.f64 rcp.rm.ftz.f64 rcp.rp.ftz.f64
    """.split()
)


# --- approximations (PTX ISA 9.7.3, 9.7.4) ---


@dataclass(frozen=True)
class Approximation:
    """`exact` computes a value from the operands; None is any result. `error` is the documented bound for a value."""

    t: str
    exact: Callable[..., Value | None]
    error: Callable[[Fraction, Value], Fraction]
    ftz: bool = False
    low_bits_are_zero: bool = False

    def allows(self, got: int, *patterns: int) -> bool:
        f = FORMATS[self.t]
        if self.ftz:
            patterns = tuple(flushed(p, self.t) for p in patterns)
        values = [decoded(p, self.t) for p in patterns]
        exact = self.exact(*values)
        if exact is None:
            return True
        if self.low_bits_are_zero and exact == exact and got & M32:
            return False
        if isinstance(exact, float):
            wanted = encoded(exact, self.t)
            return (got & ~f.sign > f.infinity) if math.isnan(exact) else got == wanted
        made = decoded(got, self.t)
        if made != made or is_negative(made) != (exact < 0):
            return False
        error = self.error(abs(exact), values[0])
        smallest = Fraction(2) ** (f.least + f.precision - 1)
        if self.ftz and is_subnormal(got, self.t):
            return False
        if self.ftz and abs(exact) - error < smallest and made == 0:
            return True
        if abs(exact) - error < smallest:
            error += Fraction(2) ** f.least  # the results there have fewer bits
        if isinstance(made, float) and made:
            return encoded(abs(exact) + error, self.t) == f.infinity
        return abs(Fraction(made) - exact) <= error


def ulps(count: int, t: str) -> Callable[[Fraction, Value], Fraction]:
    f = FORMATS[t]

    def error(exact: Fraction, x: Value) -> Fraction:
        exponent = math.floor(math.log2(exact)) if exact > Fraction(1, 2**1000) else -1000
        return count * Fraction(2) ** max(exponent - f.precision + 1, f.least)

    return error


def relative(exponent: float) -> Callable[[Fraction, Value], Fraction]:
    return lambda exact, x: exact * Fraction(2.0**exponent)


def absolute(exponent: float) -> Callable[[Fraction, Value], Fraction]:
    return lambda exact, x: Fraction(2.0**exponent)


def _logarithm_error(exact: Fraction, x: Value) -> Fraction:
    """The error of lg2 is absolute between 0.5 and 2, and relative elsewhere."""
    return Fraction(2.0**-22) * (1 if 0.5 < x < 2 else exact)


def _angle_error(exact: Fraction, x: Value) -> Fraction:
    """Nothing is promised for sin and cos beyond 100 pi."""
    return Fraction(2.0 ** (-20.5 if abs(x) <= 2 * math.pi else -14.7 if abs(x) <= 100 * math.pi else 2))


def _exact(x: float) -> Value:
    return Fraction(x) if x and math.isfinite(x) else x


def sine(x: Value) -> Value:
    return x if x == 0 else _exact(math.sin(x)) if math.isfinite(x) else math.nan


def cosine(x: Value) -> Value:
    return _exact(math.cos(x)) if math.isfinite(x) else math.nan


def logarithm(x: Value) -> Value:
    if x == 0:
        return -math.inf
    return _exact(math.log2(x) if x == math.inf or x > 0 else math.nan)


def power(x: Value) -> Value:
    return (
        _exact(math.inf)
        if x >= 1024
        else 0.0
        if x == -math.inf
        else Fraction(math.exp2(max(x, -1000)))
        if x == x
        else math.nan
    )


def tangent(x: Value) -> Value:
    return x if x == 0 else _exact(math.tanh(x))


def reciprocal(x: Value) -> Value:
    return div(Fraction(1), x, "rn")


def root(x: Value) -> Value:
    return sqrt(x, "rn")


def reciprocal_root(x: Value) -> Value:
    return div(Fraction(1), sqrt(x, "rn"), "rn")


def high_half(function: Callable[[Value], Value]) -> Callable[[Value], Value]:
    """rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64 use the upper 32 bits of their operand."""

    def of(x: Value) -> Value:
        return function(decoded(encoded(x, "f64") >> 32 << 32, "f64")) if x == x else math.nan

    return of


def fast_quotient(a: Value, b: Value) -> Value | None:
    """div.approx of a divisor above 2**126 is 0, or NaN for an infinite dividend."""
    if 2**126 < abs(b) < math.inf:
        return mul(a, -0.0 if is_negative(b) else 0.0, "rn")
    if 0 < abs(b) < Fraction(2) ** -126:
        return None
    return div(a, b, "rn")


FUNCTIONS: dict[str, tuple[Callable[..., Value | None], Callable[[str], Callable[[Fraction, Value], Fraction]]]] = {
    "sin.f32": (sine, lambda t: _angle_error),
    "cos.f32": (cosine, lambda t: _angle_error),
    "lg2.f32": (logarithm, lambda t: _logarithm_error),
    "ex2.f32": (power, lambda t: ulps(2, t)),
    "ex2.f16": (power, lambda t: relative(-9.9)),
    "ex2.bf16": (power, lambda t: relative(-7)),
    "tanh.f32": (tangent, lambda t: relative(-11)),
    "tanh.f16": (tangent, lambda t: absolute(-10.987)),
    "tanh.bf16": (tangent, lambda t: absolute(-8)),
    "rcp.f32": (reciprocal, lambda t: ulps(1, t)),
    "sqrt.f32": (root, lambda t: relative(-23)),
    "rsqrt.f32": (reciprocal_root, lambda t: relative(-22.9)),
    "rsqrt.f64": (reciprocal_root, lambda t: ulps(1, t)),
    "div.approx.f32": (fast_quotient, lambda t: ulps(2, t)),
    "div.full.f32": (lambda a, b: div(a, b, "rn"), lambda t: ulps(2, t)),
}  # fmt: skip


def approximation(form: Form) -> Approximation | None:
    """Return what is documented for a form that approximates; None for other forms."""
    if not {"approx", "full"} & set(form.modifiers):
        return None
    t = form.modifiers[-1]
    t = FLOAT_PAIRS.get(t, t)
    ftz = "ftz" in form.modifiers
    name = f"{form.opcode}.{form.modifiers[0]}.{t}" if form.opcode == "div" else f"{form.opcode}.{t}"
    if t == "f64" and ftz:
        function = {"rcp": reciprocal, "rsqrt": reciprocal_root}[form.opcode]
        return Approximation(t, high_half(function), relative(-19), True, True)
    exact, error = FUNCTIONS[name]
    return Approximation(t, exact, error(t), ftz)


# --- exact results ---


def wanted(form: Form, columns: Sequence[Sequence[int]]) -> list[int | None]:
    """Return the results for operands in columns; None for those that are not compared."""
    if form.opcode in ("set", "setp"):
        return _compared(form, columns)
    reference = EXACT[form.opcode](form, set(form.modifiers))
    if form.operands[0] in (*FLOAT_PAIRS, *INTEGER_PAIRS) and form.opcode != "cvt":
        reference = packed(reference, bits(_type(form)))
    return [reference(*patterns) for patterns in zip(*columns, strict=True)]


def result_type(form: Form) -> str:
    """Return the format of a result whose NaNs are all equal; "" if the result is compared bit by bit."""
    if form.opcode in ("mov", "selp", "slct", "copysign", "abs", "neg"):
        return ""
    return form.operands[0] if form.operands[0] in (*FORMATS, *FLOAT_PAIRS) else ""


def _type(form: Form) -> str:
    """Return the type of an operation; of a packed one, that of an element."""
    t = next(m for m in reversed(form.modifiers) if m[-1].isdigit())
    return FLOAT_PAIRS.get(t) or INTEGER_PAIRS.get(t) or t


def _mode(flags: set[str]) -> str:
    return next((m for m in MODES if m in flags), "rn")


Make = Callable[[Form, set[str]], Reference]
EXACT: dict[str, Make] = {}


def computes(*opcodes: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        for opcode in opcodes:
            EXACT[opcode] = make
        return make

    return register


@computes(
    "add", "sub", "addc", "subc", "mul", "mad", "madc", "fma", "div", "rem", "mul24", "mad24", "rcp", "sqrt"
)
def _arithmetic(form: Form, flags: set[str]) -> Reference:
    t = _type(form)
    if t in FORMATS:
        return _float_arithmetic(form, flags, t)
    w = bits(t)
    double = "wide" in flags
    shift = 0 if "hi" not in flags else 16 if form.opcode.endswith("24") else w

    def product(a: int, b: int) -> int:
        if form.opcode.endswith("24"):
            a, b = (signed(x, 24) if t[0] == "s" else x & 0xFFFFFF for x in (a, b))
        return a * b >> shift

    def quotient(a: int, b: int) -> int:
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)

    operations: dict[str, Callable[..., int]] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "addc": lambda a, b, carry: a + b + carry,
        "subc": lambda a, b, carry: a - b - (1 - carry),
        "mul": product,
        "mul24": product,
        "mad": lambda a, b, c: product(a, b) + c,
        "mad24": lambda a, b, c: product(a, b) + c,
        "madc": lambda a, b, c, carry: product(a, b) + c + carry,
        "div": quotient,
        "rem": lambda a, b: a - quotient(a, b) * b,
    }
    operation = operations[form.opcode]

    def reference(*patterns: int) -> int | None:
        a, b = (integer(p, t) for p in patterns[:2])
        rest = patterns[2:]
        if "sat" in flags and rest:  # of mad
            rest = (integer(rest[0], t),)
        if form.opcode in ("div", "rem") and b == 0:
            return None
        x = operation(a, b, *rest)
        return clamped(x, t) if "sat" in flags else x & (1 << w * (1 + double)) - 1

    return reference


def _float_arithmetic(form: Form, flags: set[str], t: str) -> Reference:
    types = [m for m in form.modifiers if m in FORMATS]
    operations: dict[str, Callable[..., Value]] = {
        "add": add,
        "sub": lambda a, b, m: add(a, negative(b), m),
        "mul": mul,
        "mad": fma,
        "fma": fma,
        "div": div,
        "rcp": lambda a, m: div(Fraction(1), a, m),
        "sqrt": sqrt,
    }
    mode = _mode(flags)
    if len(types) < 2:
        plain = of_values(operations[form.opcode], t, mode, sorted(flags))
        return with_oob(plain) if "oob" in flags else plain
    single = of_values(operations[form.opcode], "f32", mode, sorted(flags))  # of f32 with a smaller type

    def reference(*patterns: int) -> int | None:
        widened = [encoded(decoded(p, t), "f32") for p in patterns[:-1]]
        return single(*widened, patterns[-1])

    return reference


def with_oob(reference: Reference) -> Reference:
    """Return a reference that gives 0 if a factor is the NaN with which tensor copies fill."""
    return lambda a, b, c: 0 if 0x7FF7 in (a & 0x7FFF, b & 0x7FFF) else reference(a, b, c)


@computes("abs", "neg")
def _sign(form: Form, flags: set[str]) -> Reference:
    t = _type(form)
    if t not in FORMATS:
        mask = (1 << bits(t)) - 1
        return lambda a: (abs(integer(a, t)) if form.opcode == "abs" else -a) & mask
    sign = FORMATS[t].sign

    def reference(a: int) -> int:
        a = flushed(a, t) if "ftz" in flags else a
        if a & ~sign > FORMATS[t].infinity:
            return None  # any NaN
        return a & ~sign if form.opcode == "abs" else a ^ sign

    return reference


@computes("min", "max")
def _extreme(form: Form, flags: set[str]) -> Reference:
    t = _type(form)
    sign = 1 if form.opcode == "max" else -1
    if t not in FORMATS:
        pick = max if sign > 0 else min
        least = [0] if "relu" in flags else []
        return lambda *p: max([pick(integer(x, t) for x in p), *least]) & (1 << bits(t)) - 1
    f = FORMATS[t]

    def reference(*patterns: int) -> int | None:
        if "abs" in flags and "xorsign" not in flags:
            patterns = tuple(p & ~f.sign for p in patterns)
        made = extreme(patterns, t, sign, sorted(flags))
        if made is not None and "relu" in flags and made & ~f.sign <= f.infinity and made & f.sign:
            return 0
        return made

    return reference


@computes("sad")
def _sad(form: Form, flags: set[str]) -> Reference:
    t = _type(form)
    return lambda a, b, c: abs(integer(a, t) - integer(b, t)) + c & (1 << bits(t)) - 1


@computes("and", "or", "xor", "not", "cnot", "mov", "selp", "slct", "lop3")
def _logic(form: Form, flags: set[str]) -> Reference:
    t = form.operands[0]
    mask = 1 if t == "pred" else (1 << bits(t.split("|")[0])) - 1

    def looked_up(a: int, b: int, c: int, q: int = 0) -> int:
        x = sum((0x6A >> (a >> k & 1) * 4 + (b >> k & 1) * 2 + (c >> k & 1) & 1) << k for k in range(32))
        p = (x != 0) | q if "or" in flags else (x != 0) & q
        return x ^ 0x5A5A5A5A * p

    def selected(a: int, b: int, c: int) -> int:
        if form.modifiers[-1] == "f32":
            c = flushed(c, "f32") if "ftz" in flags else c
            x = decoded(c, "f32")
            return a if x >= 0 else b
        return a if c < 1 << 31 else b

    operations: dict[str, Reference] = {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "not": lambda a: ~a & mask,
        "cnot": lambda a: int(a == 0),
        "mov": lambda a: a,
        "selp": lambda a, b, p: a if p else b,
        "slct": selected,
        "lop3": looked_up,
    }
    return operations[form.opcode]


@computes("shl", "shr", "shf", "popc", "clz", "bfind", "brev", "bmsk", "szext", "fns", "bfe", "bfi", "prmt")
def _bits(form: Form, flags: set[str]) -> Reference:
    t = _type(form) if form.opcode != "prmt" else "b32"
    w = bits(t)
    mask = (1 << w) - 1
    wrap = "wrap" in flags

    def amount(n: int) -> int:
        return n & 31 if wrap else min(n, 32)

    def found(a: int) -> int:
        x = integer(a, t)
        place = (x if x >= 0 else ~x).bit_length() - 1
        return M32 if place < 0 else w - 1 - place if "shiftamt" in flags else place

    def extended(a: int, n: int) -> int:
        n = amount(n)
        return signed(a, n) & M32 if t[0] == "s" and n else a & (1 << n) - 1

    def field(a: int, p: int, n: int) -> int:
        p, n = p & 255, n & 255
        sign = 0 if t[0] == "u" or n == 0 else a >> min(p + n - 1, w - 1) & 1
        return sum((a >> p + at & 1 if at < n and p + at < w else sign) << at for at in range(w))

    def inserted(a: int, b: int, p: int, n: int) -> int:
        p, n = p & 255, n & 255
        for at in range(min(n, w)):
            if p + at < w:
                b = b & ~(1 << p + at) | (a >> at & 1) << p + at
        return b

    def nth(a: int, base: int, offset: int) -> int | None:
        offset = signed(offset, 32)
        if base > 31:
            return None
        if offset == 0:
            return base if a >> base & 1 else M32
        places = range(base, 32) if offset > 0 else range(base, -1, -1)
        set_ = [at for at in places if a >> at & 1]
        return set_[abs(offset) - 1] if len(set_) >= abs(offset) else M32

    def permuted(a: int, b: int, c: int) -> int:
        s = c & 3
        chosen = {
            "f4e": [s, s + 1, s + 2, s + 3], "b4e": [s, (s - 1) % 8, (s - 2) % 8, (s - 3) % 8], "rc8": [s] * 4,
            "ecl": [max(s, k) for k in range(4)], "ecr": [min(s, k) for k in range(4)],
            "rc16": [0, 1, 0, 1] if s % 2 == 0 else [2, 3, 2, 3],
        }.get(form.modifiers[-1], [c >> 4 * k & 15 for k in range(4)])  # fmt: skip
        both, made = b << 32 | a, 0
        for k, choice in enumerate(chosen):
            byte = both >> 8 * (choice & 7) & 255
            made |= (255 * (byte >> 7) if choice & 8 else byte) << 8 * k
        return made

    operations: dict[str, Reference] = {
        "shl": lambda a, n: a << min(n, w) & mask,
        "shr": lambda a, n: integer(a, t) >> min(n, w) & mask,
        "shf": lambda a, b, n: ((b << 32 | a) << amount(n) >> 32 if "l" in flags else (b << 32 | a) >> amount(n)) & M32,
        "popc": lambda a: a.bit_count(),
        "clz": lambda a: w - a.bit_length(),
        "bfind": found,
        "brev": lambda a: int(f"{a:0{w}b}"[::-1], 2),
        "bmsk": lambda a, b: ((1 << amount(b)) - 1) << amount(a) & M32,
        "szext": extended,
        "fns": nth,
        "bfe": field,
        "bfi": inserted,
        "prmt": permuted,
    }  # fmt: skip
    return operations[form.opcode]


@computes("dp4a", "dp2a")
def _dot(form: Form, flags: set[str]) -> Reference:
    def part(x: int, at: int, w: int, t: str) -> int:
        return signed(x >> at, w) if t == "s32" else x >> at & (1 << w) - 1

    ta, tb = (m for m in form.modifiers[:3] if m in ("u32", "s32"))
    if form.opcode == "dp4a":
        return lambda a, b, c: sum(part(a, 8 * k, 8, ta) * part(b, 8 * k, 8, tb) for k in range(4)) + c & M32
    high = 16 * ("hi" in flags)
    return lambda a, b, c: (
        sum(part(a, 16 * k, 16, ta) * part(b, high + 8 * k, 8, tb) for k in range(2)) + c & M32
    )


@computes("vadd", "vsub", "vabsdiff", "vmin", "vmax", "vshl", "vshr", "vset")
def _video(form: Form, flags: set[str]) -> Reference:
    return video(form.name, ("", "", ""))


@computes("vmad")
def _vmad(form: Form, flags: set[str]) -> Reference:
    return multiplied(form.name, ("", ""), ("", "", ""))


@computes(*(f"{name}{n}" for name in "vabsdiff vadd vsub vavrg vmin vmax vset".split() for n in (2, 4)))
def _simd(form: Form, flags: set[str]) -> Reference:
    return parallel(form.name, ("", "", ""))


def chosen(x: int, part: str, t: str) -> int:
    """Return the part of a word that a selector such as "b1" names, with or without sign."""
    width = {"": 32, "b": 8, "h": 16}[part[:1]]
    bits_ = x >> int(part[1:] or 0) * width & (1 << width) - 1
    return signed(bits_, width) if t == "s32" else bits_


def multiplied(name: str, parts: Sequence[str], signs: Sequence[str]) -> Reference:
    """Return what vmad gives (PTX ISA 9.7.17.1.5). `parts`: of the sources; `signs`: "-" for each of the three that is negated."""
    _, _, ta, tb, *flags = name.split(".")
    product, third = signs[0] != signs[1], bool(signs[2])
    signed_final = "s32" in (ta, tb) or product or third

    def operation(a: int, b: int, c: int) -> int:
        made = chosen(a, parts[0], ta) * chosen(b, parts[1], tb)
        if third:
            c = ~c & M32
        if product:
            made = ~made
        made += (signed(c, 32) if signed_final else c) + (product or third or "po" in flags)
        made >>= 7 if "shr7" in flags else 15 if "shr15" in flags else 0
        return clamped(made, "s32" if signed_final else "u32") if "sat" in flags else made & M32

    return operation


def parallel(name: str, selectors: Sequence[str]) -> Reference:
    """Return what a SIMD video instruction gives (PTX ISA 9.7.17.2).

    `selectors`: of the destination, as "h1", and of the two sources, as "h30"; "" for the default.
    """
    opcode, *modifiers = name.split(".")
    count = int(opcode[-1])
    width, letter = 32 // count, "bh"[count == 2]
    result, ta, tb = ["u32", *modifiers[:2]] if opcode.startswith("vset") else modifiers[:3]
    defaults = [
        letter + "".join(map(str, reversed(r))) for r in (range(count), range(count), range(count, 2 * count))
    ]
    mask, of_a, of_b = (
        [int(digit) for digit in (given or default)[:0:-1]]
        for given, default in zip(selectors, defaults, strict=True)
    )

    def operation(a: int, b: int, c: int) -> int:
        both = b << 32 | a
        total = c if "add" in modifiers else 0
        for k in range(count):
            x, y = (
                chosen(both >> width * place[k], f"{letter}0", t) for place, t in ((of_a, ta), (of_b, tb))
            )
            made = {
                "vadd": lambda x, y: x + y,
                "vsub": lambda x, y: x - y,
                "vavrg": lambda x, y: x + y + 1 >> 1 if x + y >= 0 else x + y >> 1,
                "vabsdiff": lambda x, y: abs(x - y),
                "vmin": min,
                "vmax": max,
                "vset": lambda x, y: related(modifiers[2], Fraction(x), Fraction(y)),
            }[opcode[:-1]](x, y)
            if "sat" in modifiers:
                made = clamped(made, f"{result[0]}{width}")
            if "add" in modifiers:
                total += made if k in mask else 0
            else:
                part = int(made) if k in mask else c >> width * k
                total |= (part & (1 << width) - 1) << width * k
        return total & M32

    return operation


def video(name: str, parts: Sequence[str]) -> Reference:
    """Return what a scalar video instruction gives (PTX ISA 9.7.17). `parts`: of the destination and two sources, as "b1" or "h0"."""
    opcode, *modifiers = name.split(".")
    result = "u32" if opcode == "vset" else modifiers.pop(0)
    kinds = modifiers[:2]
    second = next((m for m in modifiers[2:] if m in ("add", "min", "max")), None)

    def operation(a: int, b: int, c: int = 0) -> int | None:
        x, y = chosen(a, parts[1], kinds[0]), chosen(b, parts[2], kinds[1])
        if opcode in ("vshl", "vshr"):
            y = min(y, 32) if "clamp" in modifiers else y % 32
        made = {
            "vadd": lambda: x + y,
            "vsub": lambda: x - y,
            "vabsdiff": lambda: abs(x - y),
            "vmin": lambda: min(x, y),
            "vmax": lambda: max(x, y),
            "vshl": lambda: signed(x << y, 34),
            "vshr": lambda: x >> y,
            "vset": lambda: related(next(m for m in modifiers if m in RELATIONS), Fraction(x), Fraction(y)),
        }[opcode]()
        width = {"": 32, "b": 8, "h": 16}[parts[0][:1]]
        low, high = (-(1 << width - 1), (1 << width - 1) - 1) if result == "s32" else (0, (1 << width) - 1)
        if "sat" in modifiers:
            made = min(max(made, low), high)
        third = chosen(c, "", result)
        if second == "add":
            made += third
        elif second is not None:
            if not low <= made <= high:  # PTX leaves open how a result is compared that is not of its type
                return None
            made = min(made, third) if second == "min" else max(made, third)
        elif parts[0]:
            first = int(parts[0][1:]) * width
            mask = (1 << width) - 1 << first
            made = made << first & mask | c & ~mask
        return made & M32

    return operation


@computes("copysign", "testp")
def _classes(form: Form, flags: set[str]) -> Reference:
    f = FORMATS[form.modifiers[-1]]
    if form.opcode == "copysign":
        return lambda a, b: a & f.sign | b & ~f.sign
    normal = 1 << f.precision - 1
    tests: dict[str, Callable[[int], bool]] = {
        "finite": lambda p: p < f.infinity,
        "infinite": lambda p: p == f.infinity,
        "number": lambda p: p <= f.infinity,
        "notanumber": lambda p: p > f.infinity,
        "normal": lambda p: normal <= p < f.infinity,
        "subnormal": lambda p: 0 < p < normal,
    }
    test = tests[form.modifiers[0]]
    return lambda p: int(test(p & ~f.sign))


# --- cvt ---

TF32 = "tf32"
# Of floats of 8 bits or fewer: precision, least exponent, largest finite, bits.
SMALL_FORMATS = {
    "e4m3x2": (4, -9, 0x7E, 8),
    "e5m2x2": (3, -16, 0x7B, 8),
    "e2m3x2": (4, -3, 0x1F, 6),
    "e3m2x2": (3, -4, 0x1F, 6),
    "e2m1x2": (2, -1, 0x7, 4),
}
WHOLE = {"rni": "rn", "rzi": "rz", "rpi": "rp", "rmi": "rm"}


@computes("cvt")
def _convert(form: Form, flags: set[str]) -> Reference:
    if "pack" in flags:
        return _pack(form.modifiers[2])
    d, s = form.modifiers[-2:]
    whole = next((mode for name, mode in WHOLE.items() if name in flags), None)
    if "x2" in d:
        return _convert_two(form, flags, d, s)
    if s not in FORMATS:
        return _from_integer(d, s, flags)
    if d[0] in "us":
        return _to_integer(d, s, whole or "rz", "ftz" in flags)

    def reference(a: int) -> int | None:
        x = decoded(flushed(a, s) if "ftz" in flags and s == "f32" else a, s)
        if whole is not None and isinstance(x, Fraction):
            rounded = MODES[whole](x)
            x = Fraction(rounded) if rounded else -0.0 if x < 0 else 0.0
        return _narrowed(x, d, flags)

    return reference


def _narrowed(x: Value, d: str, flags: set[str]) -> int | None:
    """Round a value to a format, with what modifiers ask for."""
    if d == TF32:
        return _tf32(x, flags)
    f = FORMATS[d]
    made = encoded(x, d, _mode(flags))
    nan = made & ~f.sign > f.infinity
    if "ftz" in flags and d == "f32":
        smallest = Fraction(2) ** (f.least + f.precision - 1)
        if isinstance(x, Fraction) and abs(x) < smallest and made & ~f.sign and not is_subnormal(made, d):
            return None  # whether it is flushed before it is rounded is not documented
        made = flushed(made, d)
    if "sat" in flags:
        made = 0 if nan or made & f.sign else min(made, encoded(Fraction(1), d))
    if "satfinite" in flags and made & ~f.sign == f.infinity:
        made -= 1
    if "relu" in flags and not nan and made & f.sign:
        return None if made == f.sign else 0
    return made


def _tf32(x: Value, flags: set[str]) -> int | None:
    """Round to 11 bits; the lower 13 bits of the result are not documented, and 0 here."""
    if x != x:
        return 0x7FFFFFFF
    if "relu" in flags and is_negative(x):
        return 0 if x else None
    sign = 1 << 31 if is_negative(x) else 0
    most = 0x7F7FE000
    if isinstance(x, float):
        return sign | ((most if "satfinite" in flags else 0x7F800000) if x else 0)
    wide = encoded(abs(x), "f32")
    unit = 1 << 13
    down, rest = wide & -unit, wide & unit - 1
    if "rna" in flags:
        down += unit * (rest >= unit // 2)
    elif "rz" not in flags:
        down += unit * (rest > unit // 2 or (rest == unit // 2 and bool(down & unit)))
    return sign | (most if "satfinite" in flags and down >= 0x7F800000 else down)


def _from_integer(d: str, s: str, flags: set[str]) -> Reference:
    w = bits(s)

    def value(a: int) -> int:
        a &= (1 << w) - 1
        return signed(a, w) if s[0] == "s" else a

    if d in FORMATS:
        return lambda a: _narrowed(Fraction(value(a)) if value(a) else 0.0, d, flags)
    # A register wider than the type gets the sign of a signed type.
    register = max(bits(d), 16)

    def reference(a: int) -> int:
        x = clamped(value(a), d) if "sat" in flags else value(a) & (1 << bits(d)) - 1
        return (signed(x, bits(d)) if d[0] == "s" else x) & (1 << register) - 1

    return reference


def _to_integer(d: str, s: str, mode: str, ftz: bool) -> Reference:
    w = bits(d)

    def reference(a: int) -> int:
        x = decoded(flushed(a, s) if ftz and s == "f32" else a, s)
        if x != x:
            made = 1 << w - 1 if s == "f64" or w == 64 else 0
        else:
            made = clamped(
                10**30 if x == math.inf else -(10**30) if x == -math.inf else MODES[mode](Fraction(x)), d
            )
        return (signed(made, w) if d[0] == "s" else made) & (1 << max(w, 16)) - 1

    return reference


def _small(x: Value, t: str, relu: bool) -> int | None:
    """Return the small float nearest to a value, never an infinity. Of 6 or 4 bits, there is no NaN either."""
    precision, least, most, width = SMALL_FORMATS[t]
    if x != x:
        return 0x7F if width == 8 else most
    if relu and is_negative(x):
        return 0 if x else None
    sign = 1 << width - 1 if is_negative(x) else 0
    if isinstance(x, float):
        return sign | (most if x else 0)
    exponent = math.floor(math.log2(abs(x))) if abs(x) > Fraction(1, 2**200) else -200
    unit = max(exponent - precision + 1, least)
    pattern = (unit - least << precision - 1) + round(abs(x) / Fraction(2) ** unit)
    return sign | min(pattern, most)


def _large(code: int, t: str) -> Value:
    precision, least, _, width = SMALL_FORMATS[t]
    sign, code = (-1 if code >> width - 1 & 1 else 1), code & (1 << width - 1) - 1
    if width == 8 and (code == 127 or (t == "e5m2x2" and code > 124)):
        return math.nan
    if t == "e5m2x2" and code == 124:
        return sign * math.inf
    exponent, fraction = code >> precision - 1, code & (1 << precision - 1) - 1
    number = fraction + (bool(exponent) << precision - 1)
    return Fraction(sign * number) * Fraction(2) ** (least + max(exponent - 1, 0)) if number else sign * 0.0


def _exponent(x: Value, up: bool, finite: bool) -> int:
    """Return the exponent of the power of two (ue8m0) that is next to the magnitude of a value, down or up. 255 is NaN."""
    if x != x:
        return 255
    if isinstance(x, float):
        return (254 if finite else 255) if x else 0
    power = next(k for k in range(-128, 129) if abs(x) < Fraction(2) ** (k + 1))
    if up and abs(x) != Fraction(2) ** power:
        power += 1
    return min(max(power, -127) + 127, 254 if finite else 255)


def _convert_two(form: Form, flags: set[str], d: str, s: str) -> Reference:
    width = 16 if d in FLOAT_PAIRS else 4 if d == "e2m1x2" else 8

    def one(x: Value) -> int | None:
        if d in SMALL_FORMATS:
            return _small(x, d, "relu" in flags)
        if d == "ue8m0x2":
            return _exponent(x, "rp" in flags, "satfinite" in flags)
        return _narrowed(x, FLOAT_PAIRS[d], flags)

    def power(code: int) -> Value:
        return Fraction(2) ** (code - 127) if code < 255 else math.nan

    def reference(*patterns: int) -> int | None:
        if s == "f32":
            values = [decoded(p, "f32") for p in patterns]
        elif s in FLOAT_PAIRS:
            values = [decoded(patterns[0] >> at & 0xFFFF, FLOAT_PAIRS[s]) for at in (16, 0)]
        else:
            part = 4 if s == "e2m1x2" else 8
            codes = [patterns[0] >> at & (1 << part) - 1 for at in (part, 0)]
            values = [power(code) if s == "ue8m0x2" else _large(code, s) for code in codes]
        high, low = (one(x) for x in values)
        return None if high is None or low is None else high << width | low

    return reference


def _pack(kind: str) -> Reference:
    w = int(kind[1:])

    def clamp(x: int) -> int:
        low, high = (-(1 << w - 1), (1 << w - 1) - 1) if kind[0] == "s" else (0, (1 << w) - 1)
        return min(max(signed(x, 32), low), high) & (1 << w) - 1

    return lambda a, b, c=0: (clamp(b) | clamp(a) << w | c << 2 * w) & M32


# --- set, setp ---


@functools.cache
def _relation(operator: str, t: str, ftz: bool, a: int, b: int) -> int:
    """Return the relation of two operands; of packed ones, a bit for each half."""
    if t in FLOAT_PAIRS:
        e = FLOAT_PAIRS[t]
        return _relation(operator, e, ftz, a & 0xFFFF, b & 0xFFFF) | 2 * _relation(
            operator, e, ftz, a >> 16, b >> 16
        )
    if t in FORMATS:
        a, b = (flushed(p, t) if ftz else p for p in (a, b))
        return related(operator, decoded(a, t), decoded(b, t))
    return related(operator, integer(a, t), integer(b, t))


ONES = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80}


def _compared(form: Form, columns: Sequence[Sequence[int]]) -> list[int | None]:
    flags = form.modifiers
    t = flags[-1]
    operator = next(m for m in flags if m in COMPARISONS)
    both = t in FLOAT_PAIRS
    ftz, joint = "ftz" in flags, next((m for m in flags if m in ("and", "or", "xor")), "")
    made: list[int | None] = []
    for a, b, *rest in zip(*columns, strict=True):
        x = _relation(operator, t, ftz, a, b)
        if form.operands[0] == "pred|pred" and not both:
            x |= 2 * (1 - x)
        if joint:
            c = 3 * rest[0]
            x = x & c if joint == "and" else x | c if joint == "or" else x ^ c
            x &= 3 if both or form.operands[0] == "pred|pred" else 1
        if form.operands[0] == "pred":  # of packed operands, ptxas compares the low halves
            x &= 1
        if form.opcode == "set":
            d = form.operands[0]
            one = ONES.get(d, (1 << bits(d)) - 1)
            if both:
                one = ONES.get(d, 0xFFFF)
                x = one * (x & 1) | one * (x >> 1) << 16
            else:
                x *= one
        made.append(x)
    return made
