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
    """Return the counts of an array of unsigned integers by slot: int64, with as many slots as the largest value needs."""
    import numpy as np

    values = np.ravel(values)
    # A slot is the number of borders up to the value: exact for all of u64, unlike a floating-point logarithm.
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
    # Like bcc: one width for ranges that fit into 32 bits, one for all others.
    digits = 10 if used[-1] < 32 else 20
    most = max(counts)
    wide = max(9, len(str(most)))
    stars = min(STARS, WIDTH - 2 * digits - wide - 9)
    shown = [f"{value:^{2 * digits + 4}} : {count:<{wide}} distribution"]
    for slot in range(used[0], used[-1] + 1):
        low, high = (0 if slot == 0 else 1 << slot), (1 << (slot + 1)) - 1
        number = counts[slot]
        bar = "*" * (number * stars // most) or ("." if number else "")
        shown.append(f"{low:>{digits}} -> {high:<{digits}} : {number:<{wide}}|{bar:<{stars}}|")
    return shown
