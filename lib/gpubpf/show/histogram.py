"""Log2 histograms, printed as bcc's tools print them.

A distribution is an array of counts: slot 0 counts the values 0 and 1, slot n those from 2**n to 2**(n+1) - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.show.table import WIDTH

if TYPE_CHECKING:
    import numpy as np

STARS = 40


def log2_slots(values: Any) -> np.ndarray:
    """Return how many of these unsigned integers are in each slot: int64, with as many slots as the largest value needs."""
    import numpy as np

    values = np.ravel(values)
    # A value's slot is the number of slot borders up to the value. Unlike a floating-point logarithm, this is exact for all of u64.
    borders = np.left_shift(np.uint64(1), np.arange(1, 64, dtype=np.uint64))
    counts = np.zeros(64, dtype=np.int64)
    for start in range(0, len(values), 1 << 20):
        part = values[start : start + (1 << 20)].astype(np.uint64, copy=False)
        counts += np.bincount(np.searchsorted(borders, part, side="right"), minlength=64)
    used = np.flatnonzero(counts)
    return counts[: int(used[-1]) + 1 if len(used) else 0]


def lines(slots: Sequence[int] | np.ndarray, value: str = "value", count: str = "count") -> list[str]:
    """Return the histogram as lines of at most 80 columns, from the first slot in use to the last.

    `value` and `count` are the column headers: the unit of the slots, and what is counted.
    """
    counts = [int(number) for number in slots]
    used = [slot for slot, number in enumerate(counts) if number]
    if not used:
        return []
    shown = range(used[0], used[-1] + 1)
    ranges = [(0 if slot == 0 else 1 << slot, (1 << (slot + 1)) - 1, counts[slot]) for slot in shown]
    return range_lines(ranges, value, count)


def range_lines(
    ranges: Sequence[tuple[int, int, int]], value: str = "value", count: str = "count"
) -> list[str]:
    """Return a line for each range of values, (lowest, highest, count), of at most 80 columns. A range of one value is a number.

    `value` and `count` are the column headers: the unit of the ranges, and what is counted.
    """
    if not ranges:
        return []
    # Like bcc: one width for ranges that fit into 32 bits, one for all others.
    digits = 10 if all(low >= -(1 << 31) and high < 1 << 32 for low, high, _ in ranges) else 20
    digits = max(digits, *(len(str(low)) for low, _, _ in ranges))  # with its sign, -2147483648 has 11
    most = max(number for _, _, number in ranges)
    wide = max(9, len(str(most)))
    stars = min(STARS, WIDTH - 2 * digits - wide - 9)
    single = all(low == high for low, high, _ in ranges)
    across = digits if single else 2 * digits + 4
    title = f"{value:>{digits}}" if single else f"{value:^{across}}"
    shown = [f"{title} : {count:<{wide}} distribution"]
    for low, high, number in ranges:
        bar = "*" * (number * stars // most) or ("." if number else "")
        place = f"{low:>{digits}}" if single else f"{low:>{digits}} -> {high:<{digits}}"
        shown.append(f"{place} : {number:<{wide}}|{bar:<{stars}}|")
    return shown
