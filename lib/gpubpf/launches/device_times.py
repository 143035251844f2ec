"""Start and end of launches, from repeated readings of the device programs' arrays (or of the host programs' in their place).

Launch number N uses slot N modulo `slots`. A cell has 16 bits of generation (N / slots) and 48 bits of time, so that an atomic maximum
suffices, without a lock. Starts hold the complement of the time (the first thread wins), ends the time itself (the last thread wins).
A cell of another generation belongs to another launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf.launches.arrays import among, as_bytes, distinct, elements, joined

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers: TypeAlias = NDArray[np.int64]

TIME_BITS = 48
MASK = (1 << TIME_BITS) - 1
GENERATIONS = 1 << 16
# What was read about a launch. `first`, `last`: numbers of the first and last reading that showed it. `past`: its slot was reused.
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
        # The last reading: starts, the largest of each slot's ends, and which slots were torn. An earlier reading of a torn slot stays
        # valid.
        self._starts, self._ends = np.zeros(slots, np.uint64), np.zeros(slots, np.uint64)
        self._torn = np.zeros(slots, bool)

    def update(self, starts: Any, ends: Any, taken: int, idle: bool) -> None:
        """Add a reading. Arrays of the wrong size are ignored.

        starts: [slots].
        ends: [slots], if the agent has already taken the largest of each launch's words; otherwise several such rows.
        taken: host time at which the reading began, ns.
        idle: no kernel was running."""
        slots = len(self._now)
        if len(starts) != slots or len(ends) % slots or not len(ends):
            return
        ends = np.maximum.reduce(ends.reshape(-1, slots))  # the largest word has the latest generation
        # Most slots do not change between two readings.
        differs = (starts != self._starts) | (ends != self._ends)
        changed = np.flatnonzero(differs)
        self._starts[changed], self._ends[changed] = starts[changed], ends[changed]
        self._readings += 1
        same = self._now["used"] & ~differs & ~self._torn
        self._now["taken"][same], self._now["last"][same] = taken, self._readings
        self._now["idle"] |= same & idle  # a reading without running kernels is final
        self._change(changed, taken, idle)

    def _change(self, changed: Integers, taken: int, idle: bool) -> None:
        """Update the slots that differ from the last reading."""
        starts, ends = self._starts[changed], self._ends[changed]
        generation, of = starts >> np.uint64(TIME_BITS), ends >> np.uint64(TIME_BITS)
        # An end counts if it has the generation of its start. Starts are copied before ends: if the slot is reused in between, some
        # of the ends are lost.
        torn, own = of > generation, (of == generation) & (ends != 0)
        seen = np.zeros(len(changed), CELL)
        seen["generation"], seen["used"], seen["taken"], seen["idle"] = generation, starts != 0, taken, idle
        seen["start"], seen["ended"] = ~starts & np.uint64(MASK), own
        seen["end"] = np.where(own, ends & np.uint64(MASK), np.uint64(0))
        before = elements(self._now, changed)
        reused = before["used"] & seen["used"] & (before["generation"] != seen["generation"])
        seen["first"] = np.where(before["used"] & ~reused, before["first"], self._readings)
        seen["last"] = self._readings
        if reused.any():
            gone = elements(before, reused)
            gone["slot"], gone["past"] = changed[reused], True
            self._past.append(gone)
        seen["idle"] |= before["idle"] & ~reused & (before["end"] == seen["end"])
        self._torn[changed] = torn
        kept = ~seen["used"] | (torn & before["used"] & ~reused)  # the previous reading remains valid
        as_bytes(self._now)[changed[~kept]] = as_bytes(seen)[~kept]

    def forget(self, counters: Integers, last: int) -> None:
        """Drop the readings of reused slots, except for the launches `counters` and for launches after `last`."""
        wanted, period = distinct(self._key(counters)), len(self._now) * GENERATIONS
        past = []
        for part in self._past:
            keys = self._keys(part)
            later = (keys - last - 1) % period < period // 2
            past.append(elements(part, later | among(keys, wanted)))
        self._past = [part for part in past if len(part)]

    def lookup(self, counters: Integers) -> tuple[NDArray[np.bool_], NDArray[Any]]:
        """Return, for each launch, whether it has a cell, and the cell."""
        slots = len(self._now)
        wanted = self._key(counters)
        found = elements(self._now, wanted % slots)
        there = found["used"] & (found["generation"] == wanted // slots)
        found["slot"] = wanted % slots
        missing = np.flatnonzero(~there)
        if self._past and len(missing):
            cells = joined(self._past, CELL)
            keys = self._keys(cells)
            order = np.argsort(keys, kind="stable")
            at = order[np.minimum(np.searchsorted(keys[order], wanted[missing]), len(keys) - 1)]
            there[missing] = past = keys[at] == wanted[missing]
            as_bytes(found)[missing[past]] = as_bytes(cells)[at[past]]
        found[~there] = 0
        return there, found

    def reused(self, counters: Integers) -> NDArray[np.bool_]:
        """Return, for each launch, whether its slot was last read with a later launch."""
        now = elements(self._now, self._key(counters) % len(self._now))
        later = (now["generation"] - self._key(counters) // len(self._now)) % GENERATIONS
        return now["used"] & (later > 0) & (later < GENERATIONS // 2)

    def _key(self, counters: Integers) -> Integers:
        """Return the keys that identify launches in these arrays."""
        return counters % (len(self._now) * GENERATIONS)

    def _keys(self, cells: NDArray[Any]) -> Integers:
        return cells["slot"] + cells["generation"].astype(np.int64) * len(self._now)
