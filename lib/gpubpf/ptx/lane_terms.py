"""Sums of products: integers that depend only on a thread's index, and on values that are the same in a whole launch.

    x = atom(("tid", 0))                        # a Sum: threadIdx.x
    y = add(scale(x, 4), number(16))            # 4 * threadIdx.x + 16
    span(y)                                     # (16, 4108): no value is outside
    value(y, Thread((3, 0, 0), {}))             # 28

Sums are exact integers; a register holds a sum modulo a power of two. Any operation other than a sum or product is an atom: a tuple of
the operation and its arguments, which are sums again. So equal functions mostly have equal sums, and the value of each sum can be
computed for a thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from gpubpf.record import Record

# An atom: ("tid", axis), ("lane",), ("size", name), ("param", name, offset, bits), ("*", *atoms), or (operation, *numbers, *sums).
Atom = tuple[Any, ...]
# The constant, then atoms with their factors, sorted.
Sum = tuple[int, tuple[tuple[Atom, int], ...]]

MOST_SIZE = 48  # atoms of a sum, as `size` counts them; a longer sum counts as unknown
_LARGEST_BLOCK = (1023, 1023, 63)  # indices of threads (CUDA C++ Programming Guide, compute capabilities)
_BIG = 1 << 70


class Thread(Record):
    """A thread for which to compute sums.

    index      its index in the block, by axis
    constants  the values of the atoms ("size", …) and ("param", …)
    """

    index: tuple[int, int, int]
    constants: Mapping[Atom, int]

    @property
    def lane(self) -> int:
        x, y, z = self.index
        wide, high = (self.constants[("size", f"ntid.{axis}")] for axis in "xy")
        return (x + wide * (y + high * z)) % 32


def number(value: int) -> Sum:
    """Return a constant."""
    return value, ()


def atom(of: Atom) -> Sum:
    """Return the sum that consists of one atom."""
    return 0, ((of, 1),)


def size(a: Sum) -> int:
    """Return how many atoms a sum has, including the atoms in arguments of atoms."""
    return sum(_size(of) for of, _ in a[1])


def _size(of: Atom) -> int:
    if of[0] == "*":
        return sum(map(_size, of[1:]))
    return 1 + sum(size(part) for part in of[1:] if isinstance(part, tuple))


def constant(of: Sum) -> int | None:
    """Return the value of a sum without atoms; None for other sums."""
    return None if of[1] else of[0]


def add(a: Sum, b: Sum) -> Sum:
    """Return a + b."""
    terms = dict(a[1])
    for of, factor in b[1]:
        terms[of] = terms.get(of, 0) + factor
    return a[0] + b[0], tuple(sorted(((t, f) for t, f in terms.items() if f), key=_order))


def scale(a: Sum, factor: int) -> Sum:
    """Return a * factor."""
    return (a[0] * factor, tuple((t, f * factor) for t, f in a[1])) if factor else number(0)


def multiply(a: Sum, b: Sum) -> Sum:
    """Return a * b."""
    found = number(a[0] * b[0])
    for one, other in ((a, b), (b, a)):
        found = add(found, scale((0, one[1]), other[0]))
    for of, factor in a[1]:
        for with_, times in b[1]:
            parts = sorted((*_factors(of), *_factors(with_)), key=repr)
            found = add(found, scale(atom(("*", *parts)), factor * times))
    return found


def modulo(a: Sum, width: int) -> Sum:
    """Return a sum that is equal to `a` modulo 2^width. Its numbers are reduced to signed numbers of `width` bits."""
    half, whole = 1 << (width - 1), 1 << width

    def small(value: int) -> int:
        return (value + half) % whole - half

    return small(a[0]), tuple((t, small(f)) for t, f in a[1] if f % whole)


def unsigned(a: Sum, width: int) -> Sum:
    """Return the content of a register of `width` bits that holds a sum, as an unsigned number."""
    for candidate in (a, (a[0] % (1 << width), a[1])):
        low, high = span(candidate)
        if low >= 0 and high < 1 << width:
            return candidate
    return number(a[0] % (1 << width)) if not a[1] else atom(("unsigned", width, a))


def signed(a: Sum, width: int) -> Sum:
    """Return the content of a register of `width` bits that holds a sum, as a signed number."""
    low, high = span(a)
    if low >= -1 << (width - 1) and high < 1 << (width - 1):
        return a
    return modulo(a, width) if not a[1] else atom(("signed", width, a))


def split(a: Sum) -> tuple[Sum, Sum]:
    """Return the part of a sum that depends on the thread's index, and the rest."""
    return (0, tuple(t for t in a[1] if of_lanes(t[0]))), (a[0], tuple(t for t in a[1] if not of_lanes(t[0])))


def zeros(a: Sum) -> int:
    """Return how many zero bits a sum surely ends with, at most 64."""
    return min([trailing(a[0]), *(trailing(f) for _, f in a[1])])


def trailing(value: int) -> int:
    """Return how many zero bits a number ends with, at most 64."""
    return min(64, (value & -value).bit_length() - 1) if value else 64


@functools.lru_cache(1 << 14)
def of_lanes(of: Atom) -> bool:
    """Return whether an atom depends on the thread's index."""
    if of[0] in ("tid", "lane"):
        return True
    if of[0] == "*":
        return any(map(of_lanes, of[1:]))
    return any(of_lanes(t) for part in of[1:] if isinstance(part, tuple) for t, _ in part[1])


@functools.lru_cache(1 << 14)
def span(a: Sum) -> tuple[int, int]:
    """Return the least and the greatest value that a sum may have."""
    low = high = a[0]
    for of, factor in a[1]:
        ends = [factor * end for end in _span(of)]
        low, high = low + min(ends), high + max(ends)
    return max(low, -_BIG), min(high, _BIG)


def _span(of: Atom) -> tuple[int, int]:
    name = of[0]
    if name == "tid":
        return 0, _LARGEST_BLOCK[of[1]]
    if name == "lane":
        return 0, 31
    if name == "size":
        return 1, 1024 if of[1].startswith("ntid") else (1 << 31) - 1
    if name == "param":
        return 0, (1 << of[3]) - 1
    if name == "*":
        low, high = 1, 1
        for part in of[1:]:
            ends = [x * y for x in (low, high) for y in _span(part)]
            low, high = max(min(ends), -_BIG), min(max(ends), _BIG)
        return low, high
    if name == "unsigned":
        return 0, (1 << of[1]) - 1
    if name == "signed":
        return -1 << (of[1] - 1), (1 << (of[1] - 1)) - 1
    if name in _COMPARISONS:
        return 0, 1
    spans = [span(part) for part in of[1:] if isinstance(part, tuple)]
    (low, high), *others = spans
    if name == ">>":
        distance = constant(of[2])
        return (low >> distance, high >> distance) if distance is not None else (min(low, 0), max(high, 0))
    if name == "&":
        tops = [high for low, high in spans if low >= 0]
        return (0, min(tops)) if tops else (-_BIG, _BIG)
    if name in "|^" and all(low >= 0 for low, _ in spans):
        return 0, (1 << max(high.bit_length() for _, high in spans)) - 1
    if name == "/" and low >= 0 and others[0][0] > 0:
        return low // others[0][1], high // others[0][0]
    if name == "%" and low >= 0 and others[0][0] > 0:
        return 0, min(high, others[0][1] - 1)
    if name in ("min", "max"):
        choose = min if name == "min" else max
        return choose(low, others[0][0]), choose(high, others[0][1])
    if name == "if":
        return min(low for low, _ in others), max(high for _, high in others)
    return -_BIG, _BIG


def value(a: Sum, thread: Thread) -> int:
    """Return the value of a sum for a thread."""
    return a[0] + sum(factor * _value(of, thread) for of, factor in a[1])


def _value(of: Atom, thread: Thread) -> int:
    name = of[0]
    if name == "tid":
        return thread.index[of[1]]
    if name == "lane":
        return thread.lane
    if name in ("size", "param"):
        return thread.constants[of]
    if name == "*":
        product = 1
        for part in of[1:]:
            product *= _value(part, thread)
        return product
    if name in ("unsigned", "signed"):
        whole = 1 << of[1]
        half = whole >> 1 if name == "signed" else 0
        return (value(of[2], thread) + half) % whole - half
    return _OPERATIONS[name](*(value(part, thread) for part in of[1:]))


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_COMPARISONS: Mapping[str, Callable[[int, int], int]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_OPERATIONS: Mapping[str, Callable[..., int]] = {
    **_COMPARISONS,
    ">>": lambda a, b: a >> b,
    "<<": lambda a, b: a << b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "/": _quotient,
    "%": lambda a, b: a - b * _quotient(a, b),
    "min": min,
    "max": max,
    "if": lambda a, b, c: b if a else c,
}


def _factors(of: Atom) -> tuple[Atom, ...]:
    return of[1:] if of[0] == "*" else (of,)


def _order(term: tuple[Atom, int]) -> str:
    return repr(term[0])
