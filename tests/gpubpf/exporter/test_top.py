"""Counters with a bounded number of series."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpubpf.exporter import top
from gpubpf.exporter.metrics import MOST_LETTERS, label
from gpubpf.exporter.top import TopCounters

ROUNDS = st.lists(st.dictionaries(st.integers(0, 12), st.integers(1, 100), max_size=8), max_size=30)


def values(counters: TopCounters[int]) -> dict[int | None, float]:
    return {key: found[0] for key, found in counters.series()}


@given(ROUNDS, st.integers(1, 4))
def test_no_series_decreases_and_nothing_is_lost(rounds: list[dict[int, int]], most: int) -> None:
    counters: TopCounters[int] = TopCounters(most, 1)
    largest: dict[int | None, float] = {}
    total = 0
    for amounts in rounds:
        for key, amount in amounts.items():
            counters.add(key, [amount], amount)
            total += amount
        counters.rank()
        now = values(counters)
        assert len(now) <= 2 * most + 1
        for key, value in now.items():
            assert value >= largest.get(key, 0), "a series that comes back continues where it was"
            largest[key] = value
    assert sum(largest.values()) == total, "each amount is in one series, for good"


def test_a_key_that_becomes_large_gets_a_series() -> None:
    counters: TopCounters[int] = TopCounters(2, 1)
    for key, amount in ((1, 10), (2, 1), (3, 1)):
        counters.add(key, [amount], amount)
    counters.rank()
    assert values(counters) == {1: 10, 2: 1, None: 1}
    counters.add(3, [100], 100)
    counters.rank()
    counters.add(3, [5], 5)
    counters.add(2, [7], 7)
    assert values(counters) == {1: 10, 2: 1, 3: 5, None: 1 + 100 + 7}


def test_a_little_more_does_not_make_series_come_and_go() -> None:
    counters: TopCounters[int] = TopCounters(1, 1)
    for turn in range(50):
        counters.add(1, [10], 10)
        counters.add(2, [11 if turn % 2 else 9], 11 if turn % 2 else 9)
        counters.rank()
    assert set(values(counters)) == {1, None}


def test_memory_does_not_depend_on_the_number_of_keys() -> None:
    counters: TopCounters[int] = TopCounters(3, 1)
    for key in range(3 * top.MOST_WEIGHED):
        counters.add(key, [1], 1 + key)
        if key % 500 == 0:
            counters.rank()
    counters.rank()
    assert len(counters._weights) <= top.MOST_WEIGHED + 3 and len(counters._left) <= top.MOST_WEIGHED
    assert len(values(counters)) <= 7


@given(st.text(st.characters(exclude_categories=())))
def test_labels_are_short_and_harmless(text: str) -> None:
    shown = label(text)
    assert len(shown) <= MOST_LETTERS and shown.isprintable()
    shown.encode()


def test_long_labels_that_differ_stay_different() -> None:
    assert label("k" * 500) != label("k" * 501)
    assert label("k" * MOST_LETTERS) == "k" * MOST_LETTERS
