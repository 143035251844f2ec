"""Start and end of launches, from arrays of the device programs (or host programs in their place) that are read again and again.

Launch number N uses slot N modulo `slots`. A cell has 16 bits of generation (N / slots) and 48 bits of time, so that the largest
cell wins without a lock. Starts hold the complement of the time (the first thread wins), ends the time itself (the last thread wins).
A cell of another generation belongs to another launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers: TypeAlias = NDArray[np.int64]

TIME_BITS = 48
MASK = (1 << TIME_BITS) - 1
GENERATIONS = 1 << 16
# What was read of a launch. `first`, `last`: numbers of the readings that showed it. `past`: its slot has been reused.
CELL = np.dtype(
    [
        ("used", "?"), ("ended", "?"), ("idle", "?"), ("past", "?"), ("generation", "<u4"), ("slot", "<u4"),
        ("first", "<u4"), ("last", "<u4"),
        ("start", "<i8"), ("end", "<i8"), ("taken", "<i8"),
    ]
)  # fmt: skip


class DeviceCells:
    """The contents of the arrays of one context: the last reading of every generation."""

    def __init__(self, slots: int) -> None:
        self._now = np.zeros(slots, CELL)
        self._past: list[NDArray[Any]] = []
        self._readings = 0

    def update(self, starts: Any, ends: Any, taken: int, idle: bool) -> None:
        """Take a reading: `starts` [slots], `ends` [slots × shards]. Arrays of the wrong size are ignored."""
        slots = len(self._now)
        if len(starts) != slots or len(ends) % slots or not len(ends):
            return
        generation = starts >> np.uint64(TIME_BITS)
        # An end counts if it has the generation of its start. Starts are copied first: the slot may be reused in the meantime, and
        # then some of the ends are lost.
        torn, ended, last = np.zeros(slots, bool), np.zeros(slots, bool), np.zeros(slots, np.uint64)
        for shard in np.ascontiguousarray(ends.reshape(slots, -1).T):
            of = shard >> np.uint64(TIME_BITS)
            torn |= of > generation
            own = of == generation
            ended |= own
            np.maximum(last, shard & np.uint64(MASK), out=last, where=own)
        ended &= ~torn
        last[torn] = 0
        seen = np.zeros(slots, CELL)
        seen["generation"], seen["used"], seen["taken"], seen["idle"] = generation, starts != 0, taken, idle
        seen["start"], seen["end"], seen["ended"] = ~starts & np.uint64(MASK), last, ended
        before = self._now
        reused = before["used"] & seen["used"] & (before["generation"] != seen["generation"])
        self._readings += 1
        seen["first"] = np.where(before["used"] & ~reused, before["first"], self._readings)
        seen["last"] = self._readings
        if reused.any():
            gone = before[reused]
            gone["slot"], gone["past"] = np.flatnonzero(reused), True
            self._past.append(gone)
        # A reading without running kernels is final.
        settled = before["idle"] & ~reused & (before["end"] == seen["end"])
        seen["idle"] |= settled
        torn &= before["used"] & ~reused  # the previous reading remains valid
        kept = ~seen["used"] | torn
        seen[kept] = before[kept]
        self._now = seen

    def forget(self, counters: Integers) -> None:
        """Drop the readings of reused slots, except for these launches."""
        slots = len(self._now)
        wanted = counters % (slots * GENERATIONS)
        past = [
            part[np.isin(part["slot"] + part["generation"].astype(np.int64) * slots, wanted)]
            for part in self._past
        ]
        self._past = [part for part in past if len(part)]

    def lookup(self, counters: Integers) -> tuple[NDArray[np.bool_], NDArray[Any]]:
        """Return whether each launch has a cell, and the cell."""
        now = self._now.copy()
        now["slot"] = np.arange(len(now))
        cells = np.concatenate([*self._past, now[now["used"]]])
        slots = len(self._now)
        keys = cells["slot"].astype(np.int64) + cells["generation"].astype(np.int64) * slots
        order = np.argsort(keys, kind="stable")
        wanted = counters % (slots * GENERATIONS)
        if not len(keys):
            return np.zeros(len(counters), bool), np.zeros(len(counters), CELL)
        at = order[np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)]
        return keys[at] == wanted, cells[at]
