"""Ranges: what is known about a 64-bit number, as unsigned and signed bounds and known bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gpubpf.ebpf.bytecode import (
    ADD,
    AND,
    ARSH,
    DIV,
    JEQ,
    JGE,
    JGT,
    JLE,
    JLT,
    JNE,
    JSET,
    JSGE,
    JSGT,
    JSLE,
    JSLT,
    LSH,
    MOD,
    MUL,
    OR,
    RSH,
    SUB,
    XOR,
    signed,
)

U64 = (1 << 64) - 1
U32 = (1 << 32) - 1
SIGN = 1 << 63
S_MIN, S_MAX = -SIGN, SIGN - 1


class Range(NamedTuple):
    """lo ≤ x ≤ hi unsigned, slo ≤ x ≤ shi signed, and x has the bits `bits` wherever `unknown` is 0."""

    lo: int
    hi: int
    slo: int
    shi: int
    bits: int
    unknown: int

    @property
    def constant(self) -> int | None:
        """The only value, unsigned, or None."""
        return self.lo if self.lo == self.hi else None

    def includes(self, other: Range) -> bool:
        return (
            self.lo <= other.lo
            and other.hi <= self.hi
            and self.slo <= other.slo
            and other.shi <= self.shi
            and other.unknown & ~self.unknown == 0
            and (self.bits ^ other.bits) & ~self.unknown == 0
        )

    def multiple_of(self, size: int) -> bool:
        """Return whether the value is a multiple of `size`, a power of two."""
        return (self.bits | self.unknown) & (size - 1) == 0


ANY = Range(0, U64, S_MIN, S_MAX, 0, U64)


def constant(value: int) -> Range:
    value &= U64
    s = signed(value)
    return Range(value, value, s, s, value, 0)


def within(lo: int, hi: int) -> Range:
    """Return the range between unsigned bounds, inclusive."""
    result = _settle(lo, hi, S_MIN, S_MAX, 0, U64)
    assert result is not None
    return result


def _settle(lo: int, hi: int, slo: int, shi: int, bits: int, unknown: int) -> Range | None:
    """Tighten the bounds by the bits, and the bits by the bounds. Return None if they contradict each other, so no number fits."""
    for _ in range(2):
        lo, hi = max(lo, bits), min(hi, bits | unknown)
        slo = max(slo, signed(bits | unknown & SIGN))
        shi = min(shi, signed(bits | unknown & ~SIGN))
        if lo > hi or slo > shi:
            return None
        if (lo ^ hi) & SIGN == 0:
            slo, shi = max(slo, signed(lo)), min(shi, signed(hi))
        if slo >= 0 or shi < 0:
            lo, hi = max(lo, slo & U64), min(hi, shi & U64)
        if lo > hi or slo > shi:
            return None
        open_bits = (1 << (lo ^ hi).bit_length()) - 1
        if (bits ^ lo) & ~unknown & ~open_bits:
            return None
        bits, unknown = (bits | lo & ~open_bits), unknown & open_bits
        bits &= ~unknown & U64
    return Range(lo, hi, slo, shi, bits, unknown)


def _make(lo: int, hi: int, slo: int, shi: int, bits: int, unknown: int) -> Range:
    """Do the same as `_settle`, for facts that cannot contradict each other."""
    return _settle(lo, hi, slo, shi, bits & ~unknown & U64, unknown & U64) or ANY


def intersect(a: Range, b: Range) -> Range | None:
    if (a.bits ^ b.bits) & ~a.unknown & ~b.unknown & U64:
        return None
    unknown = a.unknown & b.unknown
    return _settle(
        max(a.lo, b.lo),
        min(a.hi, b.hi),
        max(a.slo, b.slo),
        min(a.shi, b.shi),
        (a.bits | b.bits) & ~unknown,
        unknown,
    )


def _add(a: Range, b: Range) -> Range:
    low = a.bits + b.bits
    unknown = ((low + a.unknown + b.unknown) ^ low) | a.unknown | b.unknown
    lo, hi = (a.lo + b.lo, a.hi + b.hi) if a.hi + b.hi <= U64 else (0, U64)
    slo, shi = a.slo + b.slo, a.shi + b.shi
    if slo < S_MIN or shi > S_MAX:
        slo, shi = S_MIN, S_MAX
    return _make(lo, hi, slo, shi, low, unknown)


def _sub(a: Range, b: Range) -> Range:
    difference = (a.bits - b.bits) & U64
    unknown = ((difference + a.unknown) ^ (difference - b.unknown)) | a.unknown | b.unknown
    lo, hi = (a.lo - b.hi, a.hi - b.lo) if a.lo >= b.hi else (0, U64)
    slo, shi = a.slo - b.shi, a.shi - b.slo
    if slo < S_MIN or shi > S_MAX:
        slo, shi = S_MIN, S_MAX
    return _make(lo, hi, slo, shi, difference, unknown)


def _mul(a: Range, b: Range) -> Range:
    def zeros(r: Range) -> int:
        possible = r.bits | r.unknown
        return (possible & -possible).bit_length() - 1 if possible else 64

    low = min(zeros(a) + zeros(b), 64)
    lo, hi = (a.lo * b.lo, a.hi * b.hi) if a.hi * b.hi <= U64 else (0, U64)
    return _make(lo, hi, S_MIN, S_MAX, 0, U64 & ~((1 << low) - 1))


def _and(a: Range, b: Range) -> Range:
    bits = a.bits & b.bits
    return _make(0, min(a.hi, b.hi), S_MIN, S_MAX, bits, (a.bits | a.unknown) & (b.bits | b.unknown) & ~bits)


def _or(a: Range, b: Range) -> Range:
    bits = a.bits | b.bits
    return _make(max(a.lo, b.lo), U64, S_MIN, S_MAX, bits, (a.unknown | b.unknown) & ~bits)


def _xor(a: Range, b: Range) -> Range:
    unknown = a.unknown | b.unknown
    return _make(0, U64, S_MIN, S_MAX, a.bits ^ b.bits, unknown)


def _lsh(a: Range, b: Range) -> Range:
    if (k := b.constant) is None:
        return ANY
    k &= 63
    lo, hi = (a.lo << k, a.hi << k) if a.hi << k <= U64 else (0, U64)
    return _make(lo, hi, S_MIN, S_MAX, a.bits << k, a.unknown << k)


def _rsh(a: Range, b: Range) -> Range:
    if (k := b.constant) is None:
        return within(0, a.hi)
    k &= 63
    return _make(a.lo >> k, a.hi >> k, S_MIN, S_MAX, a.bits >> k, a.unknown >> k)


def _arsh(a: Range, b: Range) -> Range:
    if (k := b.constant) is None:
        return _make(0, U64, min(a.slo, 0), max(a.shi, 0), 0, U64) if a.slo < 0 else within(0, a.hi)
    k &= 63
    unknown = signed(a.unknown) >> k & U64
    return _make(0, U64, a.slo >> k, a.shi >> k, signed(a.bits) >> k & U64, unknown)


def _div(a: Range, b: Range) -> Range:
    if (d := b.constant) is None:
        return within(0, a.hi)
    return constant(0) if d == 0 else within(a.lo // d, a.hi // d)


def _mod(a: Range, b: Range) -> Range:
    if (d := b.constant) is None or d == 0:
        return a if d == 0 else within(0, a.hi)
    return a if a.hi < d else within(0, d - 1)


_OPERATIONS: dict[int, Callable[[Range, Range], Range]] = {
    ADD: _add,
    SUB: _sub,
    MUL: _mul,
    DIV: _div,
    OR: _or,
    AND: _and,
    LSH: _lsh,
    RSH: _rsh,
    MOD: _mod,
    XOR: _xor,
    ARSH: _arsh,
}


def truncate(a: Range, bits: int = 32) -> Range:
    """Return the range of the low `bits`, zero-extended."""
    mask = (1 << bits) - 1
    if a.hi <= mask:
        return a
    if a.lo >> bits == a.hi >> bits:
        return _make(a.lo & mask, a.hi & mask, S_MIN, S_MAX, a.bits & mask, a.unknown & mask)
    return _make(0, mask, S_MIN, S_MAX, a.bits & mask, a.unknown & mask)


def extend(a: Range, bits: int) -> Range:
    """Return the range of the low `bits`, sign-extended."""
    low = truncate(a, bits)
    half = 1 << (bits - 1)
    if low.hi < half:
        return low
    if low.lo >= half:
        return _make(low.lo - 2 * half & U64, low.hi - 2 * half & U64, S_MIN, S_MAX, 0, U64)
    return _make(0, U64, -half, half - 1, 0, U64)


def swap(a: Range, bits: int) -> Range:
    """Return the range of the low `bits` with their bytes in the opposite order, zero-extended."""
    low = truncate(a, bits)

    def swapped(number: int) -> int:
        return int.from_bytes(number.to_bytes(bits // 8, "little"), "big")

    return _make(0, U64, S_MIN, S_MAX, swapped(low.bits), swapped(low.unknown))


def operate(op: int, a: Range, b: Range, wide: bool, is_signed: bool) -> Range:
    """Return the range of the result of an ALU operation. The caller handles MOV, NEG and END."""
    bits = 64 if wide else 32
    if not wide:
        a, b = truncate(a), truncate(b)
    if is_signed:  # sdiv, smod
        x, y = a.constant, b.constant
        if x is None or y is None:
            return ANY if wide else within(0, U32)
        p, q = signed(x, bits), signed(y, bits)
        if q == 0:
            return constant(0 if op == DIV else x)
        quotient = abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1)
        return constant((quotient if op == DIV else p - quotient * q) & ((1 << bits) - 1))
    if op in (LSH, RSH, ARSH) and not wide:
        b = constant(b.constant & 31) if b.constant is not None else b
        if op == ARSH:
            a = extend(a, 32)
    result = _OPERATIONS[op](a, b)
    return result if wide else truncate(result)


_OPPOSITE = {
    JEQ: JNE,
    JGT: JLE,
    JGE: JLT,
    JSGT: JSLE,
    JSGE: JSLT,
    JNE: JEQ,
    JLE: JGT,
    JLT: JGE,
    JSLE: JSGT,
    JSLT: JSGE,
}
_SWAPPED = {JLT: JGT, JLE: JGE, JSLT: JSGT, JSLE: JSGE}


def refine(op: int, a: Range, b: Range, taken: bool) -> tuple[Range, Range] | None:
    """Return the ranges of both operands after a jump on `a op b`; None if the jump cannot go this way.

    taken: whether the jump was taken
    """
    if op == JSET:
        return _refine_set(a, b, taken)
    if not taken:
        op = _OPPOSITE[op]
    if op in _SWAPPED:
        swapped = refine(_SWAPPED[op], b, a, True)
        return None if swapped is None else (swapped[1], swapped[0])
    x: Range | None
    y: Range | None
    if op == JEQ:
        x = y = intersect(a, b)
    elif op == JNE:
        x, y = _without(a, b.constant), _without(b, a.constant)
    elif op in (JGT, JGE):
        strict = op == JGT
        x = _settle(max(a.lo, b.lo + strict), *a[1:])
        y = _settle(b.lo, min(b.hi, a.hi - strict), *b[2:])
    else:
        strict = op == JSGT
        x = _settle(a.lo, a.hi, max(a.slo, b.slo + strict), *a[3:])
        y = _settle(b.lo, b.hi, b.slo, min(b.shi, a.shi - strict), *b[4:])
    return None if x is None or y is None else (x, y)


def _without(a: Range, value: int | None) -> Range | None:
    if value is None:
        return a
    s = signed(value)
    return _settle(
        a.lo + (a.lo == value), a.hi - (a.hi == value), a.slo + (a.slo == s), a.shi - (a.shi == s), *a[4:]
    )


def _refine_set(a: Range, b: Range, taken: bool) -> tuple[Range, Range] | None:
    mask = b.constant
    if mask is None:
        swapped = _refine_set(b, a, taken) if a.constant is not None else (b, a)
        return None if swapped is None else (swapped[1], swapped[0])
    if taken:
        if (a.bits | a.unknown) & mask == 0:
            return None
        if mask & (mask - 1) == 0:
            unknown = a.unknown & ~mask
            x = _settle(*a[:4], (a.bits | mask) & ~unknown, unknown)
            return None if x is None else (x, b)
        return a, b
    if a.bits & mask:
        return None
    x = _settle(*a[:4], a.bits, a.unknown & ~mask)
    return None if x is None else (x, b)


def refine32(op: int, a: Range, b: Range, taken: bool) -> tuple[Range, Range] | None:
    """Do the same as `refine` for a comparison of the low 32 bits."""
    is_signed = op in (JSGT, JSGE, JSLT, JSLE)
    limit = U32 >> 1 if is_signed else U32
    if a.hi <= limit and b.hi <= limit:
        return refine(op, a, b, taken)
    view = (lambda r: extend(r, 32)) if is_signed else truncate
    low = refine(op, view(a), view(b), taken)
    if low is None:
        return None
    x, y = (_of_low(whole, half, is_signed) for whole, half in zip((a, b), low, strict=True))
    return None if x is None or y is None else (x, y)


def _of_low(a: Range, low: Range, is_signed: bool) -> Range | None:
    """Return the range of a number after a comparison left its low 32 bits with the range `low`; None if no such number exists."""
    extended = is_signed and a.slo >= -(1 << 31) and a.shi < 1 << 31
    # Otherwise the low half is the whole number only if the high half is 0 and the low half was not treated as negative.
    return intersect(a, low) if extended or (a.hi <= U32 and low.slo >= 0) else a
