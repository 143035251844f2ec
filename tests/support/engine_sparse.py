"""Sparse matrices, their metadata and the lanes that have it, written down figure by figure as the PTX ISA has them (9.7.14.6)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

CHUNKS = {32: 2, 16: 4, 8: 4, 4: 8}  # bits of an element → elements along K that share four bits of metadata
ORDERED = [0b0100, 0b1000, 0b1001, 0b1100, 0b1101, 0b1110]
UNORDERED = [0b0001, 0b0010, 0b0110, 0b0011, 0b0111, 0b1011]
TF32 = {0b0100: 0, 0b1110: 1}

# By the bits of an element, and K: from a selector, whether a row is 8 or higher, and the first column of a chunk, to the lane of four
# that has the chunk's metadata, and its lowest bit. wgmma has the figures of (16, 32), (32, 16) and (8, 64).
FIGURES: dict[tuple[int, int], Callable[[int, int, int], tuple[int, int]]] = {
    (16, 16): lambda f, high, column: (f, 16 * high + column),
    (16, 32): lambda f, high, column: (2 * f + column // 16, 16 * high + column % 16 // 4 * 4),
    (32, 8): lambda f, high, column: (f, 16 * high + column // 2 * 4),
    (32, 16): lambda f, high, column: (2 * f + column // 8, 16 * high + column % 8 // 2 * 4),
    (8, 32): lambda f, high, column: (2 * f + high, column),
    (8, 64): lambda f, high, column: (high + 2 * (column // 32), column % 32),
    (4, 64): lambda f, high, column: (2 * f + high, column // 8 * 4),
    (4, 128): lambda f, high, column: (high + 2 * (column // 64), column % 64 // 8 * 4),
}


def choose(rng: np.random.Generator, rows: int, k: int, bits: int, ordered: bool) -> np.ndarray:
    """Choose four bits of metadata for each chunk."""
    values = list(TF32) if bits == 32 else ORDERED if ordered else ORDERED + UNORDERED
    return rng.choice(values, (rows, k // CHUNKS[bits]))


def expand(packed: np.ndarray, chosen: np.ndarray, bits: int) -> np.ndarray:
    """Return the matrix of K columns whose elements other than zeros are `packed`, as `chosen` says."""
    rows, half = packed.shape
    found = np.zeros((rows, 2 * half), packed.dtype)
    size = CHUNKS[bits]
    for row, chunk in np.ndindex(*chosen.shape):
        four = int(chosen[row, chunk])
        if bits == 32:
            places = [TF32[four]]
        elif bits == 4:  # pairs
            places = [2 * pair + i for pair in (four & 3, four >> 2) for i in (0, 1)]
        else:
            places = [four & 3, four >> 2]
        for i, place in enumerate(places):
            found[row, chunk * size + place] = packed[row, chunk * size // 2 + i]
    return found


def metadata(rng: np.random.Generator, chosen: np.ndarray, bits: int, selector: int) -> np.ndarray:
    """Return each lane's metadata of 16 rows. The lanes that the selector does not name have random bits."""
    rows, chunks = chosen.shape
    columns = CHUNKS[bits]
    found = rng.integers(0, 1 << 32, 32, dtype=np.uint64)
    for row, chunk in np.ndindex(rows, chunks):
        lane, bit = FIGURES[bits, chunks * columns](selector, row // 8, chunk * columns)
        found[row % 8 * 4 + lane] &= np.uint64(0xFFFFFFFF ^ 15 << bit)
        found[row % 8 * 4 + lane] |= np.uint64(int(chosen[row, chunk]) << bit)
    return found
