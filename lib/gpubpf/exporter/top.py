"""Counters with a bounded number of series: the largest have series of their own, and the rest share one.

counters = TopCounters(50, 2)
counters.add(key, (3, 0.5), weight=3)     # any number of times
counters.rank()                           # now and then
for key, values in counters.series(): …   # key None: the rest
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from heapq import nlargest
from itertools import islice
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

DECAY = 0.98  # of weights, between two rankings: the latest 50 rankings count most
AHEAD = 2.0  # how much more than a series another key must weigh to take its place
MOST_WEIGHED = 4096  # keys without a series whose weights and values are kept


class TopCounters(Generic[Key]):
    """Counters by key. A value is added either to the series of its key or to the rest, for good: no series ever decreases.

    most: the number of keys with a series.
    width: the number of values of a series.
    """

    def __init__(self, most: int, width: int) -> None:
        self._most, self._width = most, width
        self._series: dict[Key, list[float]] = {}
        self._rest: list[float] = [0.0] * width
        self._left: dict[Key, list[float]] = {}  # of keys that lost their series; the oldest first
        self._weights: dict[Key, float] = {}

    def add(self, key: Key, amounts: Sequence[float], weight: float) -> None:
        """Add amounts, one for each value of a series. weight: what decides which keys have a series."""
        self._weights[key] = self._weights.get(key, 0.0) + weight
        if key not in self._series and len(self._series) < self._most:
            self._give(key)
        values = self._series.get(key, self._rest)
        for place, amount in enumerate(amounts):
            values[place] += amount

    def rank(self) -> None:
        """Give series to keys that weigh more than others, and forget old weights."""
        for key in self._weights:
            self._weights[key] *= DECAY
        others = {key: weight for key, weight in self._weights.items() if key not in self._series}
        candidates = nlargest(MOST_WEIGHED, others, key=others.__getitem__)
        smallest = sorted(self._series, key=lambda key: self._weights.get(key, 0.0))
        for key, candidate in zip(smallest, candidates, strict=False):
            if others[candidate] <= AHEAD * self._weights.get(key, 0.0):
                break
            self._left[key] = self._series.pop(key)
            self._give(candidate)
        kept = {*candidates, *self._series}
        self._weights = {key: weight for key, weight in self._weights.items() if key in kept}
        while len(self._left) > MOST_WEIGHED:
            del self._left[next(iter(self._left))]

    def _give(self, key: Key) -> None:
        """Give a key a series. The series continues where it was, if it is remembered."""
        self._series[key] = self._left.pop(key, [0.0] * self._width)

    def series(self) -> Iterator[tuple[Key | None, tuple[float, ...]]]:
        """Yield each key with its values; last the rest, with None as its key.

        Keys that lost their series lately are among them, so that a scrape finds what was added last: at most twice `most` keys.
        """
        latest = islice(reversed(self._left.items()), self._most)
        for key, values in (*self._series.items(), *latest):
            yield key, tuple(values)
        yield None, tuple(self._rest)
