"""Turn barrierlate's maps into rows: for each barrier, how long warps waited, and which warp arrived last.

waits = Waits()
for _ in session.intervals(…):
    for one in waits.read(session, since_last):
        …
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf.record import Record, replace
from gpubpf.records.clock import CycleLength
from gpubpf.records.fields import KERNEL, MANGLED, OWNER, STAMP
from gpubpf.records.kernel_shapes import known_site_name
from gpubpf.records.launch_shape import Warp
from gpubpf.session.records import BUDGET, NOT_PROBED, of_every_tool
from gpubpf.show import table
from gpubpf.show.fields import Field, Fields, having, many
from gpubpf.show.summary_text import summary_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpubpf.inject.values import Site
    from gpubpf.records.results import Instance
    from gpubpf.session.session import Session

# Process, pid, comm, GPU, lanes of an AMD wave, kernel (mangled).
Owner = tuple[int, int, str, int, int | None, str]


def middles(bins: int) -> np.ndarray[Any, Any]:
    """Return the middle of each of the device program's bins: 1 wide below 32; above that, each power of two has 16."""
    number = np.arange(bins)
    shift = np.maximum(number // 16 - 1, 0)
    return (number - shift * 16) * 2.0**shift + (2.0**shift - 1) / 2


class Times(Record):
    """How long something took.

    count  how many times were measured
    total  their sum, in cycles
    most   the longest, in cycles
    bins   int64 [bin]: how many times were in each bin
    """

    count: int
    total: int
    most: int
    bins: np.ndarray[Any, Any]

    @classmethod
    def of(cls, values: np.ndarray[Any, Any]) -> Times:
        """Return the sum over the shards of a map: `struct times` [shard]."""
        count, total = int(values["count"].sum()), int(values["sum"].sum())
        return cls(count, total, int(values["most"].max()), values["bins"].astype(np.int64).sum(axis=0))

    def plus(self, other: Times) -> Times:
        most = max(self.most, other.most)
        return Times(self.count + other.count, self.total + other.total, most, self.bins + other.bins)

    def since(self, before: Times) -> Times:
        """Return what was added after `before`. A longest time that is not new is replaced by the middle of the highest new bin."""
        bins = (self.bins - before.bins) & 0xFFFFFFFF  # the device counts in 32 bits
        most = self.most
        if most == before.most:
            used = bins.nonzero()[0]
            most = min(most, int(middles(len(bins))[used[-1]])) if len(used) else 0
        return Times(self.count - before.count, self.total - before.total, most, bins)

    def shorter_than(self, cycles: float) -> int:
        """Return how many times were shorter."""
        return int(self.bins[middles(len(self.bins)) < cycles].sum())

    def record(self, cycle: float | None) -> dict[str, float] | None:
        """Return the JSON fields in ns. cycle: ns of a cycle; None, if it is unknown: then return None."""
        if cycle is None or not self.count:
            return None
        below = np.cumsum(self.bins)
        found = {"mean": round(self.total / self.count * cycle, 1)}
        for name, share in (("p50", 0.50), ("p99", 0.99)):
            at = int(np.searchsorted(below, max(1, -int(-self.count * share // 1))))
            at = min(at, len(below) - 1)  # the traced process can write any number into its maps
            found[name] = round(min(float(middles(len(below))[at]), self.most) * cycle)
        return found | {"max": round(self.most * cycle)}


class Barrier(Record):
    """A barrier instruction of a kernel.

    process  the number of the process in the session
    wave     lanes of a wave, on an AMD GPU
    number   the number of the instruction's site in the kernel
    barrier  the number of the barrier in the block; None if it had several
    waits    how long warps waited there for the last arrival
    skews    from the first to the last arrival: of the rounds of the barrier that were first left there
    unknown  waits whose length is unknown
    last     by warp: how often it arrived last in these rounds, and others earlier
    cycle    ns of a cycle; None if it is unknown
    """

    process: int
    pid: int
    comm: str
    gpu: int
    wave: int | None
    mangled: str
    number: int
    site: Site | None
    barrier: int | None
    waits: Times
    skews: Times
    unknown: int
    last: Mapping[int, int]
    cycle: float | None

    @property
    def source(self) -> str:
        return known_site_name(self.number, self.site)

    @property
    def warp(self) -> Warp:
        return Warp.of(self.wave)


BARRIER = Fields(
    "barrier",
    "One for each barrier instruction at which warps waited, the one where they lost most time first.",
    (
        *OWNER,
        KERNEL,
        MANGLED,
        Field("site", "integer", "number of the instruction in the kernel", get="number"),
        Field("source", "string", "file and line, or line of the PTX"),
        Field("barrier", "integer?", "its number in the block; null if it had several"),
        Field("waits", "integer", "how many times a warp waited there", get="waits.count"),
        Field(
            "wait_ns",
            "distribution?",
            "from the arrival of the warp's last lane to the last arrival of all; null if cycles could not be converted into ns",
            get=lambda one: one.waits.record(one.cycle),
        ),
        Field("rounds", "integer", "how many times blocks passed the barrier", get="skews.count"),
        Field(
            "skew_ns",
            "distribution?",
            "from the first arrival to the last, by round; null as wait_ns, or if there are no rounds",
            get=lambda one: one.skews.record(one.cycle),
        ),
        Field(
            "last",
            many(having(warp="integer", count="integer")),
            "the warps that arrived last, and how often others had to wait for them",
            get=lambda one: [{"warp": warp, "count": count} for warp, count in one.last.items()],
        ),
        Field("unknown", "integer", "waits that could not be measured"),
        STAMP,
    ),
    csv="pid comm gpu kernel site source barrier waits wait_ns rounds skew_ns last_warp last_count unknown mangled",
    csv_fields=(
        Field("last_warp", "integer", "the warp that arrived last most often"),
        Field("last_count", "integer", "how often"),
    ),
    notes="Where instructions at several places belong to one round, the place that a warp leaves first counts the round.",
)
RECORDS = (
    BARRIER,
    *of_every_tool(
        BUDGET,
        NOT_PROBED,
        Field("not_measured", "{integer}", "by instruction", when="if launched kernels have such barriers"),
        Field("waits_unknown", "integer", "waits that could not be measured"),
    ),
)


def row(one: Barrier) -> list[Any]:
    """Return the row of the CSV table."""
    warp, count = next(iter(one.last.items()), (None, None))
    return BARRIER.row(BARRIER.record(one), last_warp=warp, last_count=count)


class Waits:
    """Reads barrierlate's maps. unknown: how many waits could not be measured."""

    def __init__(self) -> None:
        self._before: dict[tuple[Owner, int], Barrier] = {}
        self.unknown = 0

    def read(self, session: Session, since_last: bool) -> list[Barrier]:
        """Return the barriers, those where warps lost most time first. since_last: only what was measured since the last call."""
        instances = session.instances("sites")
        cycles = {
            key: 1.0 if session.device.kind == "sim" else cycle_of(instances, *key)
            for key in {(one.process, one.gpu) for one in instances}
        }
        now: dict[tuple[Owner, int], Barrier] = {}
        for one in instances:
            values = one.array
            owner = (one.process, one.pid, one.comm, one.gpu, one.wave, one.mangled)
            used = values["waits"]["count"].sum(axis=0) + values["unknown"].sum(axis=0)
            sites = session.sites(one.mangled, one.pid) if used.any() else {}
            for number in used.nonzero()[0].tolist():
                cycle = cycles[one.process, one.gpu]
                found = _barrier(owner, number, sites.get(number), values[:, number], cycle)
                key = owner, number
                now[key] = _plus(now[key], found) if key in now else found
        self.unknown = sum(one.unknown for one in now.values())
        before, self._before = self._before, now
        if since_last:
            now = {key: _since(one, before[key]) if key in before else one for key, one in now.items()}
        return _sorted(one for one in now.values() if one.waits.count or one.unknown)

    def summary(self, session: Session) -> dict[str, Any]:
        """Return the fields of the summary record."""
        found: Counter[str] = Counter()
        for kernel in session.kernels():
            if kernel.instrumented:
                sites = session.sites(kernel.mangled).values()
                found.update(one.opcode for one in sites if is_of_cluster(one))
        summary = session.summary() | {"waits_unknown": self.unknown}
        return summary | ({"not_measured": dict(sorted(found.items()))} if found else {})

    def summary_lines(self, summary: Mapping[str, Any]) -> list[str]:
        """Return the last lines of a report."""
        lines = summary_lines(summary)
        if found := summary.get("not_measured"):
            opcodes = ", ".join(f"{opcode} ({table.count(n, 'instruction')})" for opcode, n in found.items())
            lines += table.wrap(f"not measured, since other blocks take part: {opcodes}")
        if summary["waits_unknown"]:
            waits = table.count(summary["waits_unknown"], "wait")
            lines += table.wrap(f"not measured, since launches of a kernel overlapped: {waits}")
        return lines


def by_line(found: Iterable[Barrier]) -> list[Barrier]:
    """Return the barriers with those of one source line and number added up, such as the copies in an unrolled loop."""
    merged: dict[tuple[object, ...], Barrier] = {}
    for one in found:
        key = line_of(one)
        merged[key] = _plus(merged[key], one) if key in merged else one
    return _sorted(merged.values())


def line_of(one: Barrier) -> tuple[object, ...]:
    """Return what the barriers of one source line and number have in common."""
    return one.process, one.gpu, one.mangled, one.source, one.barrier


def _sorted(found: Iterable[Barrier]) -> list[Barrier]:
    return sorted(found, key=lambda one: (-one.waits.total, one.pid, one.mangled, one.number))


def is_of_cluster(site: Site) -> bool:
    """Return whether the site is at a barrier of several blocks."""
    return site.point.startswith("barrier") and "cluster" in site.opcode.split(".")


def cycle_of(instances: Iterable[Instance], process: int, gpu: int) -> float | None:
    """Return the length of a cycle of a process's GPU, in ns, from readings of both clocks; None if it is unknown."""
    parts = []
    for one in instances:
        if (one.process, one.gpu) == (process, gpu):
            looks = one.array["looks"]  # [shard, site, 2]
            shard = np.broadcast_to(np.arange(len(looks), dtype=np.uint64)[:, None, None], looks.shape)
            read = looks["time"] > 0
            parts.append(np.stack([shard[read], looks["clock"][read], looks["time"][read]]))
    both = np.concatenate(parts, axis=1).astype(np.int64)
    found = CycleLength.measured(*both) if both.size else None
    return None if found is None else found.ns


def _barrier(owner: Owner, number: int, site: Site | None, values: Any, cycle: float | None) -> Barrier:
    """Return a barrier from its values: `struct site` [shard]."""
    numbers = int(np.bitwise_or.reduce(values["numbers"]))
    last = values["last"].astype(np.int64).sum(axis=0)
    return Barrier(
        *owner,
        number,
        site,
        numbers.bit_length() - 1 if numbers.bit_count() == 1 else None,
        Times.of(values["waits"]),
        Times.of(values["skews"]),
        int(values["unknown"].sum()),
        _ordered({warp: int(last[warp]) for warp in last.nonzero()[0].tolist()}),
        cycle,
    )


def _ordered(last: Mapping[int, int]) -> dict[int, int]:
    return dict(sorted(last.items(), key=lambda one: (-one[1], one[0])))


def _plus(one: Barrier, other: Barrier) -> Barrier:
    last = Counter(one.last) + Counter(other.last)
    return replace(
        one,
        barrier=one.barrier if one.barrier == other.barrier else None,
        waits=one.waits.plus(other.waits),
        skews=one.skews.plus(other.skews),
        unknown=one.unknown + other.unknown,
        last=_ordered(last),
    )


def _since(one: Barrier, before: Barrier) -> Barrier:
    return replace(
        one,
        waits=one.waits.since(before.waits),
        skews=one.skews.since(before.skews),
        unknown=one.unknown - before.unknown,
        last=_ordered(Counter(one.last) - Counter(before.last)),
    )
