"""Distributions that are added up as values come, in bounded memory.

tally = Tally()
tally.add(latencies)
tally.distribution()      # {"mean": …, "p50": …, "p99": …, "max": …}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf.timeline import NONE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers: TypeAlias = NDArray[np.int64]

EXACT = 4096  # different values; of more than that each is kept to 1 part in 256
_BITS = 8


class Tally:
    """Values (int64; NONE is left out) and how often each came. Count, mean and largest are exact, percentiles are right to 0.4 %."""

    def __init__(self, values: Any = ()) -> None:
        self.count = self.total = 0
        self.largest: int | None = None
        self._values, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._exact = True
        self.add(np.asarray(values, np.int64))

    def add(self, values: Integers) -> None:
        values = values[values != NONE]
        if len(values):
            self._merge(values, np.ones(len(values), np.int64), int(values.sum()), int(values.max()))

    def plus(self, other: Tally) -> None:
        if other.largest is not None:
            self._merge(other._values, other._counts, other.total, other.largest)

    def _merge(self, values: Integers, counts: Integers, total: int, largest: int) -> None:
        self.count += int(counts.sum())
        self.total += total
        self.largest = largest if self.largest is None else max(self.largest, largest)
        counts = np.concatenate([self._counts, counts])
        values = np.concatenate([self._values, values])
        unique, places = np.unique(values, return_inverse=True)
        if self._exact and len(unique) > EXACT:
            self._exact = False
        if not self._exact:
            unique, places = np.unique(_rounded(values), return_inverse=True)
        self._counts = np.zeros(len(unique), np.int64)
        np.add.at(self._counts, places, counts)
        self._values = unique

    def percentile(self, percent: int) -> int:
        """By nearest rank. There is at least one value."""
        rank = -(-self.count * percent // 100)
        value = int(self._values[np.searchsorted(np.cumsum(self._counts), rank)])
        assert self.largest is not None
        return min(value, self.largest)

    def distribution(self) -> dict[str, int] | None:
        """Mean, p50, p99 and max; None without values."""
        if self.largest is None:
            return None
        mean = round(self.total / self.count)
        return {"mean": mean, "p50": self.percentile(50), "p99": self.percentile(99), "max": self.largest}


def _rounded(values: Integers) -> Integers:
    """To `_BITS` bits."""
    size = np.abs(values)
    _, exponent = np.frexp(size.astype(np.float64))
    shift = np.maximum(exponent - _BITS, 0).astype(np.int64)
    return np.sign(values) * ((size + (np.int64(1) << shift >> 1)) >> shift << shift)
