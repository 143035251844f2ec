"""Large arrays, quickly: sorted values, groups of equal ones, and arrays of structures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers: TypeAlias = NDArray[np.int64]


def distinct(values: Integers) -> Integers:
    """Return the sorted distinct values. np.unique without further results takes 50 times as long for values that all differ."""
    values = np.sort(values)
    return values[np.append(len(values) > 0, values[1:] != values[:-1])] if len(values) else values


def among(values: Integers, some: Integers) -> NDArray[np.bool_]:
    """Return which values are in `some`, which is sorted. np.isin would sort all of them, which takes longer."""
    if not len(some):
        return np.zeros(len(values), bool)
    return some[np.minimum(np.searchsorted(some, values), len(some) - 1)] == values


def stable_order(values: Integers) -> Integers:
    """Return the places of values in ascending order, equal ones in their own order. Quick for numbers below 65,536."""
    small = len(values) and int(values.min()) >= 0 and int(values.max()) < 1 << 16
    return np.argsort(values.astype(np.uint16) if small else values, kind="stable")


def row_numbers(*columns: Integers) -> Integers:
    """Return a number from 0 for each row of the columns: equal rows have equal numbers, in sorted order."""
    numbers = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        if not len(column) or (column[0] == column[-1] and (column == column[0]).all()):
            continue
        _, own = np.unique(column, return_inverse=True)
        _, numbers = np.unique(numbers * (int(own.max(initial=0)) + 1) + own, return_inverse=True)
    return numbers.astype(np.int64)


def equal_runs(values: Integers) -> list[slice]:
    """Return the runs of equal neighbours."""
    if not len(values):
        return []
    borders = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [slice(a, b) for a, b in itertools.pairwise(borders)]


def elements(array: NDArray[Any], at: Any) -> NDArray[Any]:
    """Return some elements of an array of structures. NumPy would copy one field after the other, which takes 15 times as long."""
    return as_bytes(array)[at].view(array.dtype)


def as_bytes(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view of an array of structures: elements of bytes, which NumPy copies as a whole."""
    return array.view(f"V{array.itemsize}")


def joined(parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Concatenate arrays of structures of a type."""
    return np.concatenate([np.zeros(0, f"V{dtype.itemsize}"), *map(as_bytes, parts)]).view(dtype)
