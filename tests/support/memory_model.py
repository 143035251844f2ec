"""What memtrace's numbers must be, worked out in the slowest and plainest way from their definitions in docs/memory.md. Nothing
here is shared with the library.

    site = Site("load", "global", 4)
    site.add([base + 4 * lane for lane in range(32)])     # one execution by a warp: an address for each lane, None where it is off
    site.record()                                         # the fields of memtrace's site record
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True)
class Warp:
    """Lanes of a warp, and bytes of the sectors that memory moves."""

    lanes: int = 32
    sector: int = 32


NVIDIA = Warp()
LANES = NVIDIA.lanes
Addresses = Sequence[int | None]  # by lane


def active(addresses: Addresses) -> list[tuple[int, int]]:
    """(lane, address) of the lanes that take part."""
    return [(lane, address) for lane, address in enumerate(addresses) if address is not None]


def sectors(space: str, width: int, addresses: Addresses, warp: Warp = NVIDIA) -> int:
    """Distinct sectors. In local memory word n of all lanes of a warp lies side by side, so eight lanes share one of 32 bytes."""
    found = set()
    for lane, address in active(addresses):
        for byte in range(address, address + width):
            local = byte // 4, lane // (warp.sector // 4)
            found.add(local if space == "local" else (byte // warp.sector, 0))
    return len(found)


def sectors_least(width: int, addresses: Addresses, warp: Warp = NVIDIA) -> int:
    asked = len(active(addresses)) * width
    count = 0
    while warp.sector * count < asked:
        count += 1
    return count


def pattern(width: int, addresses: Addresses, space: str = "global", row: int | None = None) -> str | None:
    """None of one lane alone, which tells nothing. `row`: lanes in a row of the block, along x; lane 0 begins one."""
    taking = active(addresses)
    if len(taking) < 2:
        return None
    if space == "local":
        return "unit" if len({address for _, address in taking}) == 1 else "gather"
    whole = pattern_of(width, taking)
    there = dict(taking)
    steps = [
        there[lane] - there[lane - 1]
        for lane in there
        if lane % (row or len(addresses)) and lane - 1 in there
    ]
    if whole != "gather" or len(steps) < 7 * (len(there) - len(steps)) or len({*steps}) > 1:
        return whole
    stride, rest = divmod(steps[0], width)
    if rest:
        return whole
    return {0: "broadcast", 1: "unit"}.get(stride, f"stride {stride}")


def pattern_of(width: int, taking: list[tuple[int, int]]) -> str:
    """The pattern of all lanes that take part, wherever they are in the block."""
    if len({address for _, address in taking}) == 1:
        return "broadcast"
    (first_lane, first), (second_lane, second) = taking[:2]
    apart = (second_lane - first_lane) * width
    if (second - first) % apart == 0:
        stride = (second - first) // apart
        if all(address == first + (lane - first_lane) * stride * width for lane, address in taking):
            return "unit" if stride == 1 else f"stride {stride}"
    return "gather"


def bank_ways(width: int, addresses: Addresses) -> list[int]:
    """Of each phase with an active lane: the most distinct words in one of the 32 banks of 4 bytes."""
    together = 32  # lanes of a phase
    while together * max(width, 4) > 128:
        together //= 2
    ways = []
    for start in range(0, len(addresses), together):
        words: dict[int, set[int]] = {}
        for lane, address in active(addresses):
            if start <= lane < start + together:
                for byte in range(address, address + width):
                    words.setdefault(byte // 4 % 32, set()).add(byte // 4)
        if words:
            ways.append(max(len(of_bank) for of_bank in words.values()))
    return ways


def contention(addresses: Addresses) -> int:
    every = [address for _, address in active(addresses)]
    return max(every.count(address) for address in every)


@dataclass
class Site:
    """Everything that a site's requests come to."""

    kind: str
    space: str
    width: int
    requests: int = 0
    accesses: int = 0
    sectors: int = 0
    least: int = 0
    contention: int = 0
    row: int | None = None
    warp: Warp = NVIDIA
    distinct: int = 0
    gaps: int = 0
    patterns: set[str] = field(default_factory=set)
    ways: list[int] = field(default_factory=list)

    def add(self, addresses: Addresses) -> None:
        """One execution by a warp; none where no lane takes part."""
        lanes = len(active(addresses))
        if not lanes:
            return
        self.requests += 1
        self.accesses += lanes
        self.sectors += sectors(self.space, self.width, addresses, self.warp)
        self.least += sectors_least(self.width, addresses, self.warp)
        self.contention = max(self.contention, 1 if self.space == "local" else contention(addresses))
        self.distinct += len({address for _, address in active(addresses)})
        first, last = active(addresses)[0][0], active(addresses)[-1][0]
        self.gaps += last - first >= lanes
        if (found := pattern(self.width, addresses, self.space, self.row)) is not None:
            self.patterns.add(found)
        if self.space == "shared":
            self.ways += bank_ways(self.width, addresses)

    def pattern(self) -> str:
        if not self.patterns:
            return "unit" if self.space == "local" else "broadcast"
        return next(iter(self.patterns)) if len(self.patterns) == 1 else "mixed"

    def record(self) -> dict:
        strides = [abs(int(name.split()[1])) for name in self.patterns if name.startswith("stride")]
        return {
            "op": self.kind,
            "space": self.space,
            "width": self.width,
            "requests": self.requests,
            "accesses": self.accesses,
            "bytes": self.accesses * self.width,
            "sectors": self.sectors,
            "sectors_least": self.least,
            "ratio": self.sectors / self.least,
            "lanes_mean": self.accesses / self.requests,
            "pattern": self.pattern(),
            "bank_ways": {"mean": sum(self.ways) / len(self.ways), "max": max(self.ways)}
            if self.ways
            else None,
            "contention_max": self.contention,
            "gaps": self.gaps,
            "strides": [min(strides), max(strides)] if strides else None,
            "addresses_mean": self.distinct / self.requests
            if self.kind == "atomic" and self.space != "local"
            else None,
        }


def warps(threads: Sequence[int | None]) -> Iterable[Addresses]:
    """The requests of a block whose threads, in order, each access one address (None: not)."""
    for start in range(0, len(threads), LANES):
        yield threads[start : start + LANES]


def site(
    kind: str,
    space: str,
    width: int,
    requests: Iterable[Addresses],
    row: int | None = None,
    warp: Warp = NVIDIA,
) -> dict:
    """The record of a site with these requests."""
    made = Site(kind, space, width, row=row, warp=warp)
    for addresses in requests:
        made.add(addresses)
    return made.record()


def touched(accesses: Iterable[tuple[int, int]]) -> set[int]:
    """The bytes that accesses of (address, width) touch."""
    return {byte for address, width in accesses for byte in range(address, address + width)}


def request(
    rng: random.Random,
    width: int,
    room: int,
    lanes: int = LANES,
    row: int = LANES,
    anywhere: bool = False,
) -> list[int | None]:
    """Offsets of all lanes in so many bytes, some of them None: of every pattern, forwards and backwards, whole warps and parts.

    row: lanes in a row of the block. anywhere: they need not be aligned.
    """
    units = (room - 4 * anywhere) // width
    step = rng.choice([0, 1, 1, 2, 3, 4, 5, 8, 16, 31, 32, -1, -2, -7, -32])
    while units <= (lanes - 1) * abs(step):
        step = int(step / 2)  # towards 0, which always fits
    first = rng.randrange((lanes - 1) * max(0, -step), units - (lanes - 1) * max(0, step))
    form = rng.random()
    if form < 0.6:
        found = [first + lane * step for lane in range(lanes)]
        if row < lanes and rng.random() < 0.8:  # each row begins somewhere
            away = [rng.randrange(-first, units - first) for _ in range(lanes // row)]
            found = [(lane % row * step + first + away[lane // row]) % units for lane in range(lanes)]
    elif form < 0.8:  # neighbours and outliers
        found = [rng.randrange(units) if rng.random() < 0.1 else first for _ in range(lanes)]
    else:
        few = min(rng.choice([2, 8, units]), units)
        found = [rng.randrange(few) for _ in range(lanes)]
    whole = (1 << lanes) - 1
    active = rng.choice(
        [whole, whole, whole, 0xFFFF, 0x55555555, 1 << rng.randrange(lanes), 3 << rng.randrange(31)]
    )
    chance = rng.random()
    if chance < 0.3:
        active = rng.getrandbits(lanes) | 1
    elif chance < 0.5:
        active = 1 << rng.randrange(lanes) | 1 << rng.randrange(lanes)
    more = rng.choice([0, 0, 1, 2, 4]) if anywhere else 0
    return [width * unit + more if active >> lane & 1 else None for lane, unit in enumerate(found)]


def patterns(width: int, requests: Iterable[Addresses], row: int | None = None) -> Counter[str]:
    """Requests by pattern."""
    found = (pattern(width, lanes, row=row) or "single" for lanes in requests if active(lanes))
    return Counter(name.split()[0] for name in found)


def near(found: Any, value: Any) -> bool:
    """Whether a field of a record is this value, but for rounding."""
    if isinstance(value, dict):
        return all(near(found[key], part) for key, part in value.items())
    return found == value or (
        found is not None and value is not None and found == pytest.approx(value, abs=1e-6)
    )
