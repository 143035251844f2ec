"""Turn warpdiv's maps into rows: branches, kernels, source lines.

divergence = Divergence()
for _ in session.intervals(…):
    found = divergence.read(session, since_last)
    found.branches, found.kernels
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf import names
from gpubpf.record import Record, replace
from gpubpf.records.fields import KERNEL, MANGLED, OWNER, STAMP
from gpubpf.records.kernel_shapes import known_site_name
from gpubpf.records.launch_shape import Warp
from gpubpf.session.records import BUDGET, LOG_LOST, NOT_PROBED, of_every_tool
from gpubpf.show.fields import Field, Fields, many

if TYPE_CHECKING:
    from gpubpf.inject.values import Site
    from gpubpf.session.session import Session

# Process, pid, comm, GPU, lanes of an AMD wave, kernel (mangled).
Owner = tuple[int, int, str, int, int | None, str]
WORK = ("instructions", "lane_instructions")  # struct block


class Place(Record):
    """A kernel in a process, on one GPU. process: its number in the session. wave: lanes of a wave, on an AMD GPU."""

    process: int
    pid: int
    comm: str
    gpu: int
    wave: int | None
    mangled: str

    @property
    def warp(self) -> Warp:
        return Warp.of(self.wave)


class Branch(Record):
    """A conditional branch of a kernel.

    executed  how often a warp executed the branch
    diverged  how often lanes of the warp went both ways
    lanes     lanes that executed it, in all
    taken     those of them that took the branch
    lost      instructions that the warp executed without a lane that the branch parted from others, added up over such lanes: up to
              where the ways of the branch meet, or to the next branch that parts the lane. None: unknown for all branches of the
              kernel, since lanes diverged in too many regions at once, or its launches overlapped
    """

    place: Place
    number: int
    site: Site | None
    executed: int
    diverged: int
    lanes: int
    taken: int
    lost: int | None

    @property
    def source(self) -> str:
        return known_site_name(self.number, self.site)

    @property
    def function(self) -> str:
        """The device function that the branch is in, or the kernel."""
        return "" if self.site is None else names.demangle(self.site.function).short

    @property
    def cause(self) -> str:
        return "" if self.site is None else self.site.cause

    @property
    def loop(self) -> bool:
        return self.site is not None and self.site.loop


class Work(Record):
    """What a kernel, one of its functions, or one of its source lines executed.

    function, source  "" for the whole kernel; source is also "" for a function
    launches          instrumented launches; None for a part of the kernel
    instructions      instructions of warps
    lane_instructions the same, of lanes
    """

    place: Place
    function: str
    source: str
    instructions: int
    lane_instructions: int
    launches: int | None = None
    threads: int | None = None

    @property
    def efficiency(self) -> float:
        """The share of lanes that work, from 0 to 1."""
        return self.lane_instructions / (self.place.warp.lanes * self.instructions)


def _of_place(field: Field) -> Field:
    """Return a field of a `Place` as a field of an object that has the place."""
    value = field.value
    return replace(field, get=lambda one: value(one.place))


_PLACE = tuple(map(_of_place, (*OWNER, KERNEL, MANGLED)))
_SOURCE = Field("source", "string", "file and line, or line of the PTX")
_FUNCTION = Field("function", "string", "the kernel, or the device function")
_WORK = (
    Field("instructions", "integer", "of warps"),
    Field("lane_instructions", "integer", "of lanes"),
    Field("efficiency", "number", "lane_instructions / (wave * instructions)"),
    STAMP,
)
_SUMS = "instructions lane_instructions efficiency mangled"
BRANCH = Fields(
    "branch",
    "One for each conditional branch that was executed, the most expensive first.",
    (
        *_PLACE,
        Field("site", "integer", "number of the branch in the kernel", get="number"),
        _SOURCE,
        _FUNCTION,
        Field("executed", "integer", "how many times a warp executed the branch"),
        Field("diverged", "integer", "how many times lanes of the warp went both ways"),
        Field(
            "lanes_mean",
            "number",
            "lanes that executed it together",
            get=lambda one: one.lanes / one.executed,
        ),
        Field("taken", "integer", "lanes that took the branch"),
        Field("not_taken", "integer", "lanes that did not", get=lambda one: one.lanes - one.taken),
        Field("lost", "integer?", "instructions that lanes lost, added up over lanes; null if unknown"),
        Field("loop", "boolean", "some lanes stay in a loop, others leave it"),
        Field(
            "cause",
            "data|grid|lane|uniform?",
            "what the condition depends on: data, the thread's place in the grid, its place in its block, or nothing that lanes can "
            "disagree about; null if unknown",
            get=lambda one: None if one.cause == "uniform" and one.diverged else one.cause or None,
        ),
        STAMP,
    ),
    csv="pid comm gpu kernel site source function executed diverged lanes_mean taken not_taken lost loop cause mangled",
)
KERNEL_WORK = Fields(
    "kernel",
    "One for each kernel, GPU and process.",
    (
        *_PLACE,
        Field("launches", "integer", "that were instrumented"),
        Field("threads", "integer", "of one launch of the last shape"),
        *_WORK,
    ),
    csv=f"pid comm gpu kernel launches threads {_SUMS}",
)
FUNCTION_WORK = Fields(
    "function",
    "With --by function, the one with most idle lanes first.",
    (*_PLACE, _FUNCTION, *_WORK),
    csv=f"pid comm gpu kernel function {_SUMS}",
)
LINE_WORK = Fields(
    "line",
    "With --by line, the one with most idle lanes first: lines where basic blocks begin.",
    (*_PLACE, _FUNCTION, _SOURCE, *_WORK),
    csv=f"pid comm gpu kernel function source {_SUMS}",
)
LAUNCHER = Fields(
    "launcher",
    "With --threads: one for each kernel and host thread that launched it.",
    (
        *_PLACE,
        Field("tid", "integer", "number of the host thread"),
        Field("name", "string?", "of the thread; null if it ended before warpdiv looked"),
        Field("launches", "integer", "instrumented launches since the start, also as nodes of graphs"),
        Field(
            "stack",
            many("string"),
            "functions of the host stack from which the thread made most of these launches, outermost first; [] if unknown",
            get=lambda one: list(one.stack),
        ),
        STAMP,
    ),
)
RECORDS = (
    KERNEL_WORK,
    BRANCH,
    LAUNCHER,
    LINE_WORK,
    FUNCTION_WORK,
    *of_every_tool(
        BUDGET,
        NOT_PROBED,
        replace(LOG_LOST, when="with --threads"),
        Field(
            "mixed_warps",
            "integer",
            "how often a warp began before the same warp of another launch had ended",
        ),
    ),
)


class Found(Record):
    """The results of one report: branches by cost, and the work of kernels, functions and lines, most idle lanes first."""

    branches: tuple[Branch, ...]
    kernels: tuple[Work, ...]
    functions: tuple[Work, ...]
    lines: tuple[Work, ...]


class Divergence:
    """Reads warpdiv's maps.

    mixed: how often a warp began while the same warp of another launch had not ended. `lost` of such kernels is unknown.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[Owner, str, int], Counter[str]] = {}
        self._launches: Counter[Owner] = Counter()
        self.mixed = 0

    def read(self, session: Session, since_last: bool) -> Found:
        """Return what was found. since_last: only what was counted since the last call."""
        now = self._counts(session)
        before = self._before if since_last else {}
        for (
            place,
            earlier,
        ) in before.items():  # a reading in a launch may have counted waits that are booked only later
            if place in now:
                now[place]["lost"] = max(now[place]["lost"], earlier["lost"])
        self._before = now
        launches = _launches(session)
        since = launches - self._launches if since_last else launches
        threads = self._threads(session)
        self._launches = launches
        mixed = {_owner(one): int(one.array["mixed"].sum()) for one in session.instances("warps")}
        self.mixed = sum(mixed.values())
        unknown = {owner for (owner, _, _), counted in now.items() if counted["unknown"]} | {
            owner for owner, times in mixed.items() if times
        }
        branches, work = [], Counter[tuple[Owner, str, str, str]]()
        sites: dict[tuple[int, str], Mapping[int, Site]] = {}
        for (owner, of, number), counted in now.items():
            counts = counted - before.get((owner, of, number), Counter())
            kernel = owner[1], owner[5]
            if kernel not in sites:
                sites[kernel] = session.sites(owner[5], owner[1])
            site = sites[kernel].get(number)
            if of == "branches" and any(counts.values()):
                is_known = owner not in unknown
                branches.append(_branch(owner, number, site, counts, is_known))
            elif of == "blocks":
                function = "" if site is None else names.demangle(site.function).short
                source = known_site_name(number, site)
                for name in WORK:
                    work[owner, function, source, name] += counts[name]
        branches.sort(key=lambda one: (-(one.lost or 0), -one.diverged, -one.executed, one.number))
        return Found(
            tuple(branches),
            tuple(_sums(work, lambda key: (key[0], "", ""), since, threads)),
            tuple(_sums(work, lambda key: (key[0], key[1], ""))),
            tuple(_sums(work, lambda key: key[:3])),
        )

    @staticmethod
    def _counts(session: Session) -> dict[tuple[Owner, str, int], Counter[str]]:
        """Return all counts of each site, by map and site."""
        found: dict[tuple[Owner, str, int], Counter[str]] = {}
        for name in ("branches", "blocks"):
            for instance in session.instances(name):
                owner = _owner(instance)
                values = instance.array
                sums = {field: values[field].sum(axis=0) for field in values.dtype.names}
                _add_whole(sums, np.uint64(Warp.of(owner[4]).lanes))
                for number in (
                    sums["executed" if name == "branches" else "instructions"].nonzero()[0].tolist()
                ):
                    counts = Counter({field: int(sums[field][number]) for field in sums})
                    key = owner, name, number
                    found[key] = found[key] + counts if key in found else counts
        for owner, number, lost in _waiting(session):
            if (key := (owner, "branches", number)) in found:
                found[key]["lost"] += lost
        return found

    @staticmethod
    def _threads(session: Session) -> dict[Owner, int]:
        """Return the threads of one launch of each kernel; of the last shape, if there are several."""
        return {_owner(one): one.shape.threads for one in session.instances("lanes")}


def _add_whole(sums: dict[str, np.ndarray[Any, Any]], lanes: np.uint64) -> None:
    """Add what whole warps did, which is counted apart, to the other counts of `struct branch` or `struct block`."""
    if "whole" in sums:
        whole = sums.pop("whole")
        sums["instructions"] = sums["instructions"] + whole
        sums["lane_instructions"] = sums["lane_instructions"] + lanes * whole
        return
    taken, others = sums.pop("whole_taken"), sums.pop("whole_not")
    sums["executed"] = sums["executed"] + taken + others
    sums["lanes"] = sums["lanes"] + lanes * (taken + others)
    sums["taken"] = sums["taken"] + lanes * taken


def _waiting(session: Session) -> Iterator[tuple[Owner, int, int]]:
    """Yield by branch what lanes have lost since they executed something last, such as lanes that left the kernel early."""
    read = [session.instances(name, separate=True) for name in ("lanes", "warps", "regions")]
    for of_lanes, of_warps, of_regions in zip(*read, strict=False):
        shapes = {
            (one.process, one.context, one.mangled, one.grid, one.block_dim)
            for one in (of_lanes, of_warps, of_regions)
        }
        if len(shapes) > 1:  # a snapshot came in between
            return
        lanes, owner = of_lanes.array[0], _owner(of_lanes)
        of_block, size = math.prod(of_lanes.block_dim), Warp.of(owner[4]).lanes
        thread = np.arange(len(lanes))
        warp = thread // of_block * -(-of_block // size) + thread % of_block // size
        issued = of_warps.array[0]["issued"][warp].astype(np.uint32)
        waited = (issued - lanes["seen"]).astype(np.int32)
        late = ((waited > 0) & (lanes["open"] != 0)).nonzero()[0]
        parted = of_regions.array[:, late]
        last = _innermost(lanes["open"][late], parted, owner[4] is not None)
        sites = parted["site"][last, np.arange(len(late))]
        # The traced process can write any number into its maps.
        known, at = np.unique(sites, return_inverse=True)
        for site, lost in zip(known.tolist(), np.bincount(at, weights=waited[late]).tolist(), strict=True):
            yield owner, site, int(lost)


def _innermost(
    open_: np.ndarray[Any, Any], parted: np.ndarray[Any, Any], is_amd: bool
) -> np.ndarray[Any, Any]:
    """Return for each lane the index in its `struct parted` of the branch that parted the lane last."""
    if is_amd:
        return np.clip(open_.astype(np.int64) - 1, 0, len(parted) - 1)
    number = np.arange(len(parted), dtype=np.uint32)[:, None]
    found: np.ndarray[Any, Any] = np.where(open_ >> number & 1, parted["time"], 0).argmax(axis=0)
    return found


def _owner(instance: Any) -> Owner:
    return (
        instance.process,
        instance.pid,
        instance.comm,
        instance.gpu,
        instance.wave,
        instance.mangled,
    )


def _launches(session: Session) -> Counter[Owner]:
    found: Counter[Owner] = Counter()
    for instance in session.instances("lanes"):
        found[_owner(instance)] += instance.launches
    return found


def _branch(
    owner: Owner, number: int, site: Site | None, counts: Mapping[str, int], is_known: bool
) -> Branch:
    return Branch(
        Place(*owner),
        number,
        site,
        counts["executed"],
        counts["diverged"],
        counts["lanes"],
        counts["taken"],
        counts["lost"] if is_known else None,
    )


def _idle(sums: tuple[tuple[Owner, str, str], Mapping[str, int]]) -> int:
    """Return the sort key of a part of a kernel: those with most idle lanes come first."""
    (owner, _, _), counts = sums
    return counts["lane_instructions"] - Warp.of(owner[4]).lanes * counts["instructions"]


def _sums(
    work: Mapping[Any, int],
    part: Any,
    launches: Mapping[Owner, int] | None = None,
    threads: Mapping[Owner, int] | None = None,
) -> Iterator[Work]:
    """Yield the sums of `work` over all places with the same part (owner, function, source), most idle lanes first."""
    sums: dict[Any, Counter[str]] = {}
    for key, count in work.items():
        sums.setdefault(part(key), Counter())[key[3]] += count
    for (owner, function, source), counts in sorted(sums.items(), key=_idle):
        whole = (launches[owner], threads.get(owner)) if launches is not None and threads is not None else ()
        if counts["instructions"]:
            yield Work(Place(*owner), function, source, *(counts[name] for name in WORK), *whole)
