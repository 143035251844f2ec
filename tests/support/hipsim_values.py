"""Exact arithmetic of floats in Python's integers and fractions, as the reference for hipsim's instructions.

A float is its bits and a `Format`. Values are computed as fractions and rounded once, by the rules of IEEE 754.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

NEAREST, UP, DOWN, ZERO = range(4)


@dataclass(frozen=True)
class Format:
    """A binary float: its number of bits and of fraction bits."""

    bits: int
    fraction: int

    @property
    def most(self) -> int:
        """The exponent field of infinities and NaNs."""
        return (1 << (self.bits - 1 - self.fraction)) - 1

    @property
    def bias(self) -> int:
        return self.most >> 1

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def infinity(self) -> int:
        return self.most << self.fraction

    @property
    def nan(self) -> int:
        return self.infinity | 1 << (self.fraction - 1)

    def is_nan(self, x: int) -> bool:
        return (x & (self.sign - 1)) > self.infinity

    def is_signalling(self, x: int) -> bool:
        return self.is_nan(x) and not x >> (self.fraction - 1) & 1

    def is_infinite(self, x: int) -> bool:
        return (x & (self.sign - 1)) == self.infinity

    def is_zero(self, x: int) -> bool:
        return (x & (self.sign - 1)) == 0

    def is_denormal(self, x: int) -> bool:
        return not self.is_zero(x) and (x & self.infinity) == 0

    def negative(self, x: int) -> bool:
        return bool(x & self.sign)

    def finite(self, x: int) -> bool:
        return (x & self.infinity) != self.infinity

    def quiet(self, x: int) -> int:
        return x | 1 << (self.fraction - 1) if self.is_nan(x) else x

    def flush(self, x: int) -> int:
        return x & self.sign if self.is_denormal(x) else x

    def value(self, x: int) -> Fraction:
        """Give the exact value of a finite float."""
        exponent, fraction = x >> self.fraction & self.most, x & ((1 << self.fraction) - 1)
        assert exponent != self.most
        if exponent:
            fraction |= 1 << self.fraction
        else:
            exponent = 1
        power = exponent - self.bias - self.fraction
        number = Fraction(fraction << power) if power >= 0 else Fraction(fraction, 1 << -power)
        return -number if self.negative(x) else number

    def round(self, value: Fraction, mode: int = NEAREST, zero: int = 0) -> int:
        """Round a value; `zero` is the result for exactly 0, which has a sign of its own."""
        if value == 0:
            return zero
        sign = self.sign if value < 0 else 0
        value = abs(value)
        # The exponent e with 2^e ≤ value < 2^(e+1).
        e = value.numerator.bit_length() - value.denominator.bit_length()
        if value < (Fraction(1 << e) if e >= 0 else Fraction(1, 1 << -e)):
            e -= 1
        e = max(e, 1 - self.bias)
        power = e - self.fraction
        scaled = value / (1 << power) if power >= 0 else value * (1 << -power)
        whole = scaled.numerator // scaled.denominator
        rest = scaled - whole
        up = {
            NEAREST: rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1),
            UP: rest > 0 and not sign,
            DOWN: rest > 0 and bool(sign),
            ZERO: False,
        }[mode]
        whole += bool(up)
        result = ((e + self.bias - 1) << self.fraction) + whole
        if result >= self.infinity:
            to_infinity = mode == NEAREST or (mode == UP and not sign) or (mode == DOWN and sign)
            result = self.infinity if to_infinity else self.infinity - 1
        return sign | result

    def compute(
        self, exact: Callable[..., Fraction], host: Callable[..., float], *s: int, mode: int = NEAREST
    ) -> int:
        """Compute from finite values exactly, and from others (and for the sign of zero) as the host's doubles do."""
        if all(self.finite(x) for x in s):
            value = exact(*(self.value(x) for x in s))
            if value == 0:
                return self.from_double(host(*(self.to_double(x) for x in s)))
            return self.round(value, mode)
        return self.from_double(host(*(self.to_double(x) for x in s)))

    def to_double(self, x: int) -> float:
        if self.is_nan(x):
            return math.nan
        if self.is_infinite(x):
            return -math.inf if self.negative(x) else math.inf
        value = float(self.value(x))
        return -0.0 if self.is_zero(x) and self.negative(x) else value

    def from_double(self, x: float, mode: int = NEAREST) -> int:
        if math.isnan(x):
            return self.nan
        if math.isinf(x):
            return self.infinity | (self.sign if x < 0 else 0)
        return self.round(Fraction(x), mode, self.sign if math.copysign(1, x) < 0 else 0)


F16, F32, F64 = Format(16, 10), Format(32, 23), Format(64, 52)


def edges(f: Format) -> list[int]:
    """Give the floats at which instructions differ: zeros, denormals, extremes, infinities, NaNs, halves, integers' ends."""
    one = f.bias << f.fraction
    values = [0, 1, (1 << f.fraction) - 1, 1 << f.fraction, one, one - 1, one + 1, f.infinity - 1, f.infinity]
    values += [
        f.nan,
        f.infinity | 1,
        one | 1 << (f.fraction - 1),
        one - (1 << f.fraction),
        one + (1 << f.fraction),
    ]
    values += [
        (f.bias + n << f.fraction) | bit
        for n in (7, 15, 16, 23, 31, 32)
        for bit in (0, 1)
        if f.bias + n < f.most
    ]
    values += [(f.bias + n << f.fraction) - 1 for n in (8, 16, 31, 32) if f.bias + n < f.most]
    return [v | s for v in values for s in (0, f.sign)]


def floats(f: Format, count: int, generator: random.Random) -> list[int]:
    """Give edges, floats of like size (so that sums and products are not all huge or tiny), and random bits."""
    known = edges(f)
    result = []
    for n in range(count):
        kind = n % 4
        if kind == 0:
            result.append(generator.choice(known))
        elif kind == 1:
            result.append(generator.getrandbits(f.bits))
        else:
            exponent = f.bias + generator.randint(-6, 6)
            result.append(
                generator.getrandbits(1) * f.sign | exponent << f.fraction | generator.getrandbits(f.fraction)
            )
    return result


def integers(bits: int, count: int, generator: random.Random) -> list[int]:
    """Give extremes, small numbers and random bits."""
    known = [
        0,
        1,
        2,
        (1 << bits) - 1,
        1 << (bits - 1),
        (1 << (bits - 1)) - 1,
        31,
        32,
        33,
        0x8000,
        0x7FFF,
        0xFFFF,
        0xFFFFFF,
        0x800000,
    ]
    return [
        generator.choice(known) & ((1 << bits) - 1)
        if n % 3 == 0
        else generator.getrandbits(bits) >> (n % 3 - 1) * generator.randint(0, bits - 1)
        for n in range(count)
    ]
