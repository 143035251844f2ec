"""Turn gpuhang's words into records: launches that do not end, and the places where their warps stand.

hangs = Hangs(after=10)
hangs.look(session)            # often; returns launches to report
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf.agent.definitions import NUMBER_MASK, WARP
from gpubpf.process.scans import ScanBudget
from gpubpf.ptx.loop_ends import COUNTS, NEVER, VALUE
from gpubpf.ptx.symbols import original_name
from gpubpf.record import MutableRecord, Record, replace
from gpubpf.records.fields import BLOCK, KERNEL, MANGLED, STAMP, VENDOR, WAVE
from gpubpf.records.kernel_shapes import site_name
from gpubpf.records.launch_shape import Index, Shape, index_of
from gpubpf.session.records import NOT_PROBED, of_every_tool
from gpubpf.show.fields import Field, Fields, having, many, maybe
from gpubpf.show.process_records import PROCESS

if TYPE_CHECKING:
    from gpubpf.agent.protocol import KernelFault
    from gpubpf.inject.values import Site
    from gpubpf.session.session import Session

# What a warp did last, as in the tool's program.
NONE, BEGUN, BARRIER, LEFT, LOOP, CALL, EXITED = range(7)
CLUSTER = 0xFF  # the number of a cluster's barrier
LOOK = 1.0  # seconds between two looks, at most
PATIENCE = 4  # looks that may find no verdict before `unknown` is reported
LISTED = 32  # warps that a record lists
MOST_PLACES = 64  # of a launch; warps at further places share one row. A process can write any places
MOST_ADDRESSES = 8  # different words that warps may read at one line before they share a row
SEVERAL = -1  # GPUs, of a process
LAUNCH_FAILED = 719  # CUresult: among others, every thread of a block waits (embedded device)
STUCK = ("deadlock", "spinning")
_TAKES = re.compile(
    r"atom.*\.(?:cas|exch)|_atomic_(?:cmp)?swap|_(?:wrxchg|cmpst)"
)  # opcodes of atomics that can take a lock
KINDS = ("spin", "loop", "barrier", "block", "exited")  # in the order of the report


class Warp(Record):
    """A warp, by its block and its number in the block; `source` and `kind`: where it is, None if unknown."""

    block: Index
    warp: int
    source: str | None = None
    kind: str | None = None


class Place(Record):
    """Warps of a launch at one place.

    hang: the launch.
    kind: one of KINDS.
    site, source: the place; None if it is unknown.
    warps: how many warps are there.
    where: the first LISTED of them.
    turns: the fewest and most turns of the loop; None at other places.
    barrier: number of the barrier.
    missing: the first LISTED warps of the same blocks that are not at the barrier.
    address: the address of the word that a spin reads.
    is_lock: the spin tries to take a lock: by an exchange, or by a compare-and-swap.
    taken_by: the warp that took the lock last; None if that cannot be told.
    """

    hang: Hang
    kind: str
    site: int | None
    source: str | None
    warps: int
    where: tuple[Warp, ...]
    turns: tuple[int, int] | None
    barrier: int | None
    missing: tuple[Warp, ...]
    address: int | None
    is_lock: bool = False
    taken_by: Warp | None = None


class Hang(MutableRecord):
    """A launch that has not ended. exited: warps that have left the kernel."""

    pid: int
    comm: str
    gpu: int
    mangled: str
    launch: int
    shape: Shape
    running_ns: int
    verdict: str
    exited: int
    places: tuple[Place, ...] = ()

    @property
    def wave(self) -> int | None:
        """Lanes of a wave, on an AMD GPU."""
        return self.shape.wave

    @property
    def blocks(self) -> int:
        return self.shape.blocks

    @property
    def warps(self) -> int:
        return self.shape.blocks * self.shape.warps


def _of_hang(field: Field) -> Field:
    value = field.value
    return Field(field.name, field.type, field.meaning, get=lambda one: value(one.hang))


_OWNER = (
    *PROCESS,
    Field(
        "gpu",
        "integer?",
        "ordinal; null if the process uses several GPUs",
        get=lambda one: None if one.gpu == SEVERAL else one.gpu,
    ),
    VENDOR,
    WAVE,
    KERNEL,
    MANGLED,
    Field("launch", "integer", "number of the launch in its process, from 1"),
)
_WARP = (BLOCK, Field("warp", "integer", "number in its block"))


def _warps(found: Sequence[Warp], *fields: str) -> list[dict[str, Any]]:
    return [{name: getattr(one, name) for name in fields} for one in found]


HANG = Fields(
    "hang",
    "One for each launch that has run for the time of --after, or can never end; again if the verdict changes.",
    (
        *_OWNER,
        Field("running_ns", "ns", "since the tool first saw the launch run"),
        Field("verdict", "deadlock|spinning|running|unknown", "whether the launch can end"),
        Field("blocks", "integer", "of the grid"),
        Field("warps", "integer", "of the grid"),
        Field("exited", "integer", "warps that have left the kernel"),
        STAMP,
    ),
)
PLACE = Fields(
    "place",
    "After the record of a launch: one for each place where warps of the launch stand.",
    (
        *map(_of_hang, _OWNER),
        Field("kind", "|".join(KINDS), "what the warps do there"),
        Field("site", "integer?", "number of the place in the kernel"),
        Field("source", "string?", "file and line, or line of the PTX"),
        Field("warps", "integer", "how many warps are there"),
        Field(
            "where",
            many(having(*_WARP)),
            "at most 32 of them",
            get=lambda one: _warps(one.where, "block", "warp"),
        ),
        Field(
            "turns",
            maybe(having(min="integer", max="integer")),
            "turns of the loop that the warps have made in a row; null elsewhere",
            get=lambda one: None if one.turns is None else dict(zip(("min", "max"), one.turns, strict=True)),
        ),
        Field("barrier", "integer?", "number of the barrier in the block; 255 for the barrier of a cluster"),
        Field(
            "missing",
            many(having(*_WARP, Field("source", "string?"))),
            "at most 32 warps of the same blocks that are not at the barrier, and where they are",
            get=lambda one: _warps(one.missing, "block", "warp", "source"),
        ),
        Field(
            "address",
            "hex?",
            "the word that the loop reads; an offset if it is in shared memory; null if unknown",
            get=lambda one: None if one.address is None else f"{one.address:#x}",
        ),
        Field(
            "taken_by",
            maybe(having(*_WARP, Field("source", "string?"), Field("kind", f"{'|'.join(KINDS)}?"))),
            "the warp whose atomic in such a loop was the last one that changed the word, and where the warp is; null if unknown",
            get=lambda one: (
                next(iter(_warps([one.taken_by], "block", "warp", "source", "kind")), None)
                if one.taken_by
                else None
            ),
        ),
        STAMP,
    ),
    csv="pid comm gpu kernel launch verdict kind site source warps barrier address mangled",
    csv_fields=(Field("verdict", "string", "of the launch"),),
)
RECORDS = (HANG, PLACE, *of_every_tool(NOT_PROBED))

Words = np.ndarray[Any, Any]  # `struct stand` of the warps of one launch, by warp


class _Open(MutableRecord):
    """A launch that has not ended.

    since, looked: when it was first seen, and when `words` was read (time.monotonic).
    words, exited: what was read then; None: nothing yet.
    looks: looks that were compared with an earlier one.
    told: the verdict that was reported.
    head: its row of `launches`, in which a later launch may be now.
    """

    since: float
    looked: float = 0.0
    words: Words | None = None
    exited: int = 0
    looks: int = 0
    told: str = ""
    last: Hang | None = None
    head: Any = None


class Hangs:
    """Reads gpuhang's words.

    after: seconds from which on a launch is looked at.
    whole: programs run in all blocks and warps; otherwise they are sampled.
    told: whether any launch was reported.
    delayed: users whose launches are looked at less often, because they take too long.
    """

    def __init__(self, after: float, whole: bool = True) -> None:
        self.after = after
        self.whole = whole
        self.gap = min(LOOK, after / 2)
        self.told = False
        self._open: dict[tuple[int, int], _Open] = {}  # by process and number of the launch
        self._ended: list[Hang] = []
        self.delayed: set[int] = set()
        self._budget = ScanBudget()

    @property
    def stuck(self) -> bool:
        """Whether a launch that was reported as a deadlock or as spinning has not ended."""
        return any(one.told in STUCK for one in self._open.values())

    def take_ended(self) -> list[Hang]:
        """Return the launches that were reported as a deadlock or as spinning and have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def look(self, session: Session) -> list[Hang]:
        """Return launches to report: those that have run for `after` seconds, and those with another verdict than before."""
        now = time.monotonic()
        found, running = [], set()
        faults, gpus = session.faults(), session.gpus()
        kernels, waves = session.kernel_names(), session.waves()
        failed, ended = session.failed(), session.ended()
        rows = [one for one in session.shared("launches") if not self._must_wait(one.user)]
        # The words of all warps are 4 MB, so they are read only if a launch has not ended.
        lanes = {
            process: {number: waves.get(process, {}).get(name) for number, name in names.items()}
            for process, names in kernels.items()
        }
        running_in = {
            one.process for one in rows if self._may_run(one.process, one.array, lanes.get(one.process, {}))
        }
        stands = (
            {one.process: one.array for one in session.shared("stands", running_in)} if running_in else {}
        )
        locks = {one.process: one.array for one in session.shared("locks", running_in)} if stands else {}
        for one in rows:
            if one.process not in stands:
                continue
            with self._budget.scan(one.user):
                for launch, head in self._launches(one.process, one.array, stands[one.process]):
                    key = one.process, launch
                    running.add(key)
                    seen = self._open.setdefault(key, _Open(now))
                    seen.head = head
                    mangled = kernels.get(one.process, {}).get(int(head["kernel"]), "")
                    shape = _shape(head, waves.get(one.process, {}).get(mangled))
                    fault = (
                        _fault(faults.get(one.process, ()), mangled) if session.device.kind == "sim" else None
                    )
                    age, since_look = now - seen.since, now - seen.looked
                    due = since_look >= self.gap and age >= self.after - self.gap
                    if shape is None or not mangled:
                        continue
                    if fault is None and (one.process in failed or one.process in ended):
                        if (
                            not seen.told
                            and seen.last is not None
                            and seen.last.running_ns >= 1e9 * self.after
                        ):
                            seen.told = seen.last.verdict  # the process was killed while this was unknown
                            found.append(seen.last)
                        continue
                    if not due and (fault is None or seen.told):
                        continue
                    words = _of_launch(stands[one.process], int(head["launch"]), shape)
                    reading = _Reading(words, seen.words, shape, session.sites(mangled, one.pid))
                    exited = max(int(head["exited"]), reading.exited)
                    hang = Hang(
                        one.pid,
                        one.comm,
                        SEVERAL if (gpu := gpus.get(one.process)) is None else gpu,
                        mangled,
                        launch & NUMBER_MASK,
                        shape,
                        int(1e9 * age),
                        reading.verdict(
                            fault, exited > seen.exited, not self.whole or bool(head["untracked"])
                        ),
                        min(exited, shape.blocks * shape.warps),
                    )
                    hang.places = tuple(reading.places(hang, locks.get(one.process)))
                    seen.looks += seen.words is not None
                    seen.words, seen.exited, seen.looked, seen.last = words, exited, now, hang
                    if self._is_news(hang, seen, age, fault is not None):
                        seen.told = hang.verdict
                        found.append(hang)
        # What a process wrote stays after its end: a launch that never ends stays, too.
        for key in [key for key in self._open.keys() - running if key[0] in stands]:
            gone = self._open.pop(key)
            if gone.told in STUCK and gone.last is not None:
                self._ended.append(gone.last)
        self.told |= bool(found)
        return found

    def _must_wait(self, user: int) -> bool:
        """Return whether the launches of a user's processes have taken too much time."""
        if exhausted := self._budget.exhausted(user):
            self.delayed.add(user)
        return exhausted

    def _may_run(self, process: int, rows: Words, lanes: Mapping[int, int | None]) -> bool:
        """Return whether a launch of a process may not have ended: warps of the launch have not exited, or were not seen.

        lanes: lanes per wave on an AMD GPU, by the number of the kernel
        """
        used = rows[rows["launch"] != 0]
        threads = used["block"].astype(float).prod(axis=1)  # the traced process can write any shape
        widths = np.array([lanes.get(number) or WARP for number in used["kernel"].tolist()])
        warps = used["grid"].astype(float).prod(axis=1) * np.ceil(threads / widths)
        ended = (used["exited"] >= warps) & (used["untracked"] == 0)
        return bool((~ended).any()) or any(of == process for of, _ in self._open)

    def _launches(self, process: int, rows: Words, stands: Words) -> list[tuple[int, Any]]:
        """Return the launches with warps that have not left, by number: known ones first, and no more than rows."""
        live = set(stands["launch"][stands["place"] >> np.uint64(61) != EXITED].tolist()) - {0}
        found = {of[1]: seen.head for of, seen in self._open.items() if of[0] == process and of[1] in live}
        numbers = rows["launch"].tolist()
        found |= {number: rows[at].copy() for at, number in enumerate(numbers) if number in live}
        return list(found.items())[: len(rows)]

    def _is_news(self, hang: Hang, seen: _Open, age: float, failed: bool) -> bool:
        if seen.told:
            return hang.verdict in STUCK and hang.verdict != seen.told
        if failed and hang.verdict == "deadlock":
            return True
        return age >= self.after and seen.looks > 0 and (hang.verdict != "unknown" or seen.looks >= PATIENCE)

    def again(self) -> list[Hang]:
        """Return the launches that were reported and still run."""
        return [one.last for one in self._open.values() if one.told and one.last is not None]


def _shape(head: Any, wave: int | None = None) -> Shape | None:
    """Return the shape of a launch; None if it is none: the traced process can write anything.

    wave: lanes per wave, on an AMD GPU
    """
    grid, block = (tuple(head[name].tolist()) for name in ("grid", "block"))
    if not all(0 < extent < 1 << 31 for extent in (*grid, *block)) or block[0] * block[1] * block[2] > 1024:
        return None
    return Shape(grid, block, wave)


def _fault(faults: Sequence[KernelFault], mangled: str) -> KernelFault | None:
    """Return the fault of the embedded device that a deadlock may have caused."""
    for one in faults:
        if one.error == LAUNCH_FAILED and one.kernel is not None and original_name(one.kernel) == mangled:
            return one
    return None


def _of_launch(stands: Words, launch: int, shape: Shape) -> Words:
    """Return the words of a launch's warps, by warp."""
    warps = min(shape.blocks * shape.warps, 1 << 62)  # the traced process can write any shape
    found = stands[(stands["launch"] == launch) & (stands["warp"] < warps)]
    _, first = np.unique(found["warp"], return_index=True)
    return found[first]


class _Reading:
    """The words of one launch, compared with those of an earlier look, if there was one."""

    def __init__(self, words: Words, before: Words | None, shape: Shape, sites: Mapping[int, Site]) -> None:
        self.words, self.shape, self.sites = words, shape, sites
        place = words["place"]
        self.did = (place >> np.uint64(61)).astype(np.int64)
        self.barrier = (place >> np.uint64(32)).astype(np.int64) & 0xFF
        self.site = place.astype(np.int64) & 0xFFFFFFFF
        self.poll = (place >> np.uint64(40)).astype(np.int64) & 0x1FFFFF
        self.block, self.warp = np.divmod(words["warp"].astype(np.int64), shape.warps)
        self.exited = int((self.did == EXITED).sum())
        ends = {number: site.ends for number, site in sites.items()}
        self.ends = np.array([ends.get(number, "") for number in self.site.tolist()], dtype=object)
        self._waits = np.array([self._is_wait(number) for number in self.site.tolist()], dtype=bool)
        self._compare(before)

    def _is_wait(self, number: int) -> bool:
        """Return whether a warp at this barrier waits: it does not if it only arrives."""
        site = self.sites.get(number)
        return site is None or "arrive" not in site.opcode or "cluster" in site.opcode

    def _compare(self, before: Words | None) -> None:
        """Decide for each warp whether it is where it was (`same`) and whether it has got further (`further`)."""
        words, count = self.words, len(self.words)
        known: Any = np.zeros(count, dtype=bool)
        old: Any = np.zeros(count, dtype=words.dtype)
        if before is not None and len(before):
            at = np.minimum(np.searchsorted(before["warp"], words["warp"]), len(before) - 1)
            known = before["warp"][at] == words["warp"]
            old = before[at]
        did = (old["place"] >> np.uint64(61)).astype(np.int64)
        loops = (self.did == LOOP) & known & (did == LOOP)
        looped = loops & ((old["place"] & np.uint64(0xFFFFFFFF)) == self.site.astype(np.uint64))
        turned = words["events"] - old["events"]
        # Unsigned numbers wrap around, so what the traced process writes raises no errors.
        alone = looped & (turned > 0) & (words["turns"] - old["turns"] == turned)
        polled = words["polls"] != old["polls"]
        unchanged = words["changes"] == old["changes"]
        waiting = (self.ends == VALUE) & polled & unchanged
        self.spins = alone & waiting
        self.never = (self.did == LOOP) & (self.ends == NEVER)
        there = (words["place"] == old["place"]) & (words["turns"] == old["turns"])
        self.still = known & (self.did == BARRIER) & self._waits & there
        # A call says nothing: a loop that waits may call a function in each turn.
        moved = known & ~np.isin(self.did, (LOOP, CALL)) & ~there
        moved |= known & (self.did == LOOP) & ~np.isin(did, (LOOP, CALL))
        counted = loops & ((turned > 0) & (self.ends == COUNTS) | ~unchanged)
        begun = ~known if before is not None else np.zeros(count, dtype=bool)
        self.further = (moved | counted | begun) & ~self.never

    def verdict(self, fault: KernelFault | None, exited: bool, untracked: bool) -> str:
        """Return whether the launch can end.

        fault: of the embedded device, after which no thread moves. exited: warps have left since the earlier look.
        untracked: some warps have no words.
        """
        live = self.did != EXITED
        if fault is not None:
            x, y, z = fault.block
            number = x + self.shape.grid[0] * (y + self.shape.grid[1] * z)
            still = (self.did == BARRIER) & self._waits & (self.block == number)
        else:
            still = self.still
        if self._is_deadlock(live, still):
            return "deadlock"
        if self.never.any():
            return "spinning"
        if exited or self.further.any():
            return "running"
        if live.any() and not untracked and (self.spins | self.still)[live].all() and self.spins.any():
            return "spinning"
        return "unknown"

    def _is_deadlock(self, live: Words, still: Words) -> bool:
        """Return whether all warps of a block that have not left it wait at barriers of the block."""
        _, block = np.unique(self.block, return_inverse=True)
        number = np.bincount(block)
        alive = np.bincount(block, live)
        waiting = np.bincount(block, live & still & (self.barrier != CLUSTER))
        return bool(((waiting > 0) & (waiting == alive) & (number == self.shape.warps)).any())

    def places(self, hang: Hang, locks: Words | None = None) -> Iterator[Place]:
        """Yield the places where warps are. locks: `struct taken` of the process."""
        kinds = np.full(len(self.words), "block", dtype=object)
        kinds[self.did == LOOP] = "loop"
        kinds[self.spins] = "spin"
        kinds[(self.did == BARRIER) & self._waits] = "barrier"
        kinds[self.did == EXITED] = "exited"
        self._kinds = kinds.tolist()
        groups: dict[tuple[str, int, int], list[int]] = {}
        for at, kind in enumerate(kinds.tolist()):
            site = int(self.site[at])
            # The traced process can write any number: what the kernel does not have is one place.
            key = kind, site if site in self.sites else -1, int(self.barrier[at]) if kind == "barrier" else -1
            groups.setdefault(key, []).append(at)
        if len(groups) > MOST_PLACES:
            largest = sorted(groups, key=lambda one: -len(groups[one]))
            rest = [groups.pop(key) for key in largest[MOST_PLACES - 1 :]]
            groups["block", -1, -1] = [*groups.get(("block", -1, -1), ()), *itertools.chain(*rest)]
        order = sorted(groups.items(), key=lambda one: (KINDS.index(one[0][0]), -len(one[1]), one[0]))
        for (kind, site, barrier), members in order:
            for address, part in self._by_address(kind, members):
                turns = self.words["turns"][part]
                is_lock = address is not None and all(map(self._is_lock, part))
                yield Place(
                    hang,
                    kind,
                    site if site >= 0 else None,
                    self._source(site),
                    len(part),
                    tuple(self._name(at) for at in part[:LISTED]),
                    (int(turns.min()), int(turns.max())) if kind in ("spin", "loop") else None,
                    barrier if kind == "barrier" else None,
                    tuple(self._missing(part)) if kind == "barrier" else (),
                    address,
                    is_lock,
                    self._taken_by(address, part, hang.launch, locks) if is_lock else None,
                )

    def _is_lock(self, at: int) -> bool:
        """Return whether the atomic that a warp waits for is an exchange or a compare-and-swap."""
        site = self.sites.get(int(self.poll[at]))
        return site is not None and bool(_TAKES.search(site.opcode))

    def _taken_by(
        self, address: int | None, members: list[int], launch: int, locks: Words | None
    ) -> Warp | None:
        """Return the warp of this launch that took a lock last; None if it is of another launch, or was forgotten."""
        if address is None or locks is None or not len(locks):
            return None
        row = locks[(address >> 2 & 0xFFFFFFFF) % len(locks)]
        by, number = divmod(int(row["by"]), 1 << 32)
        if int(row["address"]) != address or by != launch & 0xFFFFFFFF:
            return None
        if number >= self.shape.blocks * self.shape.warps:
            return None
        block, warp = divmod(number, self.shape.warps)
        is_shared = address < 1 << 32  # then each block has a word of its own
        if is_shared and set(self.block[members].tolist()) != {block}:
            return None
        found = (self.words["warp"] == number).nonzero()[0]
        if not len(found):
            return Warp(index_of(block, self.shape.grid), warp)
        at = int(found[0])
        return replace(self._name(at, located=True), kind=self._kinds[at])

    def _by_address(self, kind: str, members: list[int]) -> Iterator[tuple[int | None, list[int]]]:
        """Yield warps that spin by the word that they read; all together if there are too many different words."""
        words = self.words["address"][members] if kind == "spin" else np.zeros(1, np.uint64)
        different = np.unique(words)
        if kind != "spin" or len(different) > MOST_ADDRESSES:
            yield None, members
            return
        for address in different.tolist():
            found = [at for at, word in zip(members, words.tolist(), strict=True) if word == address]
            known = self.ends[found[0]] == VALUE
            yield (address if known else None), found

    def _missing(self, members: list[int]) -> list[Warp]:
        """Return warps of the same blocks that are not at the same barrier."""
        barrier = self.barrier[members[0]]
        there = (self.did == BARRIER) & self._waits & (self.barrier == barrier)
        others = np.isin(self.block, self.block[members]) & ~there
        return [self._name(at, located=True) for at in others.nonzero()[0][:LISTED].tolist()]

    def _source(self, number: int) -> str | None:
        site = self.sites.get(number)
        return None if site is None else site_name(site)

    def _name(self, at: int, located: bool = False) -> Warp:
        block = index_of(int(self.block[at]), self.shape.grid)
        return Warp(block, int(self.warp[at]), self._source(int(self.site[at])) if located else None)
