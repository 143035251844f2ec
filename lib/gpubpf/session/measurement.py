"""What the parts of a session share: what is measured, and the processes that it is measured in."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpubpf.agent import protocol
from gpubpf.agent.definitions import HostArgument, Place, Unit
from gpubpf.ebpf import maps
from gpubpf.process import users
from gpubpf.process.privileges import Privileges

if TYPE_CHECKING:
    from gpubpf.ebpf.maps import MapDefinition
    from gpubpf.linux.host_programs import Host
    from gpubpf.session.device import Device
    from gpubpf.session.traced_process import TracedProcess

MAP_MEMORY = 256 << 20
IMAGE_WAIT = 120.0
NOTICES_PER_KIND, NOTICE_KINDS = 10, 64  # notices of one kind; kinds
PARAM, SHARED = "param", "shared_array"
UNITS = {
    "thread": Unit.THREAD,
    "warp": Unit.WARP,
    "block": Unit.BLOCK,
    "instance": Unit.INSTANCE,
    "site": Unit.SITE,
}


@dataclass(frozen=True)
class Follow:
    """What a tool wants of the processes beside its maps (docs/timing.md).

    log_records: of the operation log of each process, a power of two; 0: no log. stamps: timing events around what no probe times;
    cupti: where CUPTI may be, whose activity records do it in their place. stacks: the host stack of each launch; allocation_stacks:
    of each call that allocates. graphs: kernels in graphs are instrumented. pump: launches of a process after which its maps are read,
    for `readings`; 0: never by itself. ring_size: bytes of each ring and GPU, None: what the C text asks for; rings lie in host
    memory, or else in the GPU's. per_thread: records that a thread puts into the ring named, at most.
    """

    log_records: int = 0
    stamps: bool = False
    cupti: Sequence[str] = ()
    stacks: bool = False
    allocation_stacks: bool = False
    graphs: bool = False
    pump: int = 0
    ring_size: int | None = None
    ring_in_gpu: bool = False
    per_thread: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Targets:
    """Whom a session measures: a command, run as `user` (`--user`; None: as `users.command_user` says), processes that run already,
    or everyone: all processes that use the driver and all that will."""

    command: Sequence[str] = ()
    pids: Sequence[int] = ()
    all_processes: bool = False
    user: str | None = None


@dataclass(frozen=True)
class Plan:
    """What a session measures.

    device: where it runs. definitions: the maps, in any order; `params` gives the bytes of those of kind "param".
    matches: whether a mangled name was asked for (None: every kernel is); `wanted` is how the user put it, for messages.
    launches, sample: as `--launch` and `--sample`. map_memory: bytes for each context. image_wait: seconds that a process waits in a
    module load for the sidecar. host: host programs and shared arrays, already loaded; the session takes them down at its end.
    accesses: programs run at memory accesses, so the summary says which of them they cannot see. alone: the process is there for this
    session only, so it gives up privileges that the session does not need any more.
    """

    device: Device
    definitions: Sequence[MapDefinition] = ()
    params: Mapping[str, bytes] = field(default_factory=dict)
    matches: Callable[[str], bool] | None = None
    wanted: Sequence[str] = ()
    launches: tuple[int, int | None] = (1, None)
    sample: int = 1
    map_memory: int = MAP_MEMORY
    image_wait: float = IMAGE_WAIT
    follow: Follow = field(default_factory=Follow)
    host: Host | None = None
    accesses: bool = False
    owns_process: bool = False


@dataclass(frozen=True)
class Listener:
    """Who hears of what happens. From the thread that runs `intervals`: `attached`, with pid, comm and time (ns, CLOCK_MONOTONIC or
    virtual) when probes are live in a process; `watching`, with the time when all that use the driver are watched; `complain`, with
    the error that "no kernel matches" is. From any: `note`, with notices for the user; `loaded`, with the name of a process and each
    image that it loads."""

    note: Callable[[str], None] = lambda text: None
    complain: Callable[[str], None] = lambda text: None
    attached: Callable[[int, str, int], None] = lambda pid, comm, ts_ns: None
    watching: Callable[[int], None] = lambda ts_ns: None
    loaded: Callable[[str, bytes], None] = lambda comm, data: None


class Measurement:
    """What is measured, and what is known of it. `lock` is held for `processes` and what their agents say."""

    def __init__(self, targets: Targets, plan: Plan, note: Callable[[str], None]) -> None:
        self.targets = targets
        self.several = (
            targets.all_processes or len(set(targets.pids)) > 1
        )  # processes that have nothing in common
        self.user = users.command_user(targets.user)
        self.accesses = plan.accesses
        self.device = plan.device
        self.definitions = [d for d in plan.definitions if d.kind != PARAM]
        self.numbers = {d.name: number for number, d in enumerate(self.definitions)}
        self.params = dict(plan.params)
        self.matches = plan.matches or (lambda name: True)
        self.note = limit_notices(note)
        self.privileges = Privileges()
        self.follow = follow = plan.follow
        self.host = plan.host
        self.wanted = protocol.Wanted(
            [self._spec(d) for d in self.definitions],
            plan.map_memory,
            launches=plan.launches,
            sample=plan.sample,
            image_wait=plan.image_wait,
            log_records=follow.log_records,
            stamps=follow.stamps,
            stacks=follow.stacks,
            allocation_stacks=follow.allocation_stacks,
            graphs=follow.graphs,
            match_all=not plan.wanted,
            pump=follow.pump,
            host=self._host_programs(),
        )
        self.lock = threading.Condition()
        self.processes: list[TracedProcess] = []
        self._active: list[TracedProcess] = []
        self.started_ns = self.ended_ns = 0
        self.stopped = False  # the measurement is over
        self.drain_soon = False  # logs or rings fill quickly: they are to be read soon
        self.missed: dict[str, list[tuple[int, str]]] = {}  # by reason: (pid, comm) of processes not measured
        self._noted: set[str] = set()  # notices that are given once

    def all_processes(self) -> list[TracedProcess]:
        """The processes so far, to be gone through without the lock."""
        with self.lock:
            return list(self.processes)

    def add(self, process: TracedProcess) -> None:
        """The lock is held."""
        self.processes.append(process)
        self._active.append(process)

    def remove(self, process: TracedProcess) -> None:
        """It is none of the processes any more."""
        with self.lock:
            self.processes.remove(process)
            self._active = [p for p in self._active if p is not process]

    def active(self) -> list[TracedProcess]:
        """Those of which something may come, or wait to be looked at: of thousands that ended few are."""
        with self.lock:
            self._active = [p for p in self._active if not p.fully_read]
            return list(self._active)

    def record_missed(self, pid: int, comm: str, reason: str) -> None:
        """A process is not measured, or not all of it. From any thread, once: another program may have its number and name."""
        with self.lock:
            self.missed.setdefault(reason, []).append((pid, comm))

    def note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self.note(text)

    def ring_size(self, definition: MapDefinition) -> int:
        """Bytes of records that a ring is granted for each GPU."""
        if definition.name == maps.PRINTS:
            return definition.capacity
        return self.follow.ring_size or definition.capacity

    def _spec(self, definition: MapDefinition) -> protocol.MapSpec:
        if definition.kind == SHARED:
            place = Place.SHARED
            size = maps.pad8(definition.value_size) * definition.max_entries
            return protocol.MapSpec(size, 0, b"", place=place)
        if is_ring(definition):
            place = Place.GPU_RING if self.follow.ring_in_gpu else Place.HOST_RING
            return protocol.MapSpec(
                self.ring_size(definition), maps.record_stride(definition), b"", place=place
            )
        fixed = maps.storage_size(definition)
        per_unit = maps.storage_size(definition, 1) - fixed
        unit = UNITS[maps.SHAPED[definition.kind]] if definition.kind in maps.SHAPED else Unit.CONTEXT
        return protocol.MapSpec(fixed, per_unit, maps.header(definition), unit)

    def _host_programs(self) -> Sequence[protocol.HostCode] | frozenset[str]:
        """What runs in the processes, or where programs run in the kernel."""
        host = self.host
        if host is None or not host.natives:
            return host.points if host is not None else ()
        made = []
        for native in host.natives:
            parameters, arguments, places = bytearray(), [], dict[str, int]()
            for value in native.values:
                if value.kind == "param" and value.map not in places:
                    parameters += bytes(-len(parameters) % 16)
                    places[value.map] = len(parameters)
                    parameters += self.params[value.map]
                arguments.append(
                    {
                        "context": (HostArgument.CONTEXT, 0, value.number),
                        "map_base": (HostArgument.MAP_BASE, self.numbers.get(value.map, 0), 0),
                        "param": (HostArgument.PARAM, 0, places.get(value.map, 0)),
                        "helper": (HostArgument.HELPER, 0, value.number),
                    }[value.kind]
                )
            made.append(
                protocol.HostCode(
                    host.point_of(native.function), native.code, bytes(parameters), tuple(arguments)
                )
            )
        return made


def is_ring(definition: MapDefinition) -> bool:
    return definition.kind == "ringbuf"


def limit_notices(note: Callable[[str], None]) -> Callable[[str], None]:
    """`note` for notices of which processes could cause any number: of each kind, apart from numbers and the names of processes,
    NOTICES_PER_KIND are given, and one that says so."""
    given: dict[str, int] = {}
    lock = threading.Lock()

    def limited(text: str) -> None:
        kind = re.sub(r"pid \d+ \(.*?\)|\d+", "", text, flags=re.DOTALL)[:48]
        with lock:
            if kind not in given and len(given) >= NOTICE_KINDS:
                kind = ""
            count = given[kind] = given.get(kind, 0) + 1
        if count <= NOTICES_PER_KIND:
            note(text)
        elif count == NOTICES_PER_KIND + 1:
            note("there are more of these notices than can be shown")

    return limited
