"""What the parts of a session share: what is measured, and the processes that it is measured in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpubpf import maps, users
from gpubpf.agent import protocol

if TYPE_CHECKING:
    from gpubpf.device import Device
    from gpubpf.host import Host
    from gpubpf.maps import MapDefinition
    from gpubpf.process import Process

MAP_MEMORY = 256 << 20
PARAM, SHARED = "param", "shared_array"
UNITS = {
    "thread": protocol.Unit.THREAD,
    "warp": protocol.Unit.WARP,
    "block": protocol.Unit.BLOCK,
    "instance": protocol.Unit.INSTANCE,
    "site": protocol.Unit.SITE,
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


class Measurement:
    """What is measured: see `Session` for the arguments. `lock` is held for `processes` and what their agents say."""

    def __init__(
        self,
        *,
        definitions: Sequence[MapDefinition],
        params: Mapping[str, bytes] | None,
        device: Device,
        matches: Callable[[str], bool] | None,
        wanted: Sequence[str],
        launches: tuple[int, int | None] | None,
        sample: int | None,
        map_memory: int | None,
        user: str | None,
        note: Callable[[str], None],
        follow: Follow,
        host: Host | None,
        image_wait: float,
        accesses: bool,
    ) -> None:
        self.accesses = accesses
        self.device = device
        self.user = users.command_user(user)
        self.definitions = [d for d in definitions if d.kind != PARAM]
        self.numbers = {d.name: number for number, d in enumerate(self.definitions)}
        self.params = dict(params or {})
        self.matches = matches or (lambda name: True)
        self.note = note
        self.follow = follow
        self.host = host
        self.wanted = protocol.Wanted(
            [self._spec(d) for d in self.definitions],
            map_memory or MAP_MEMORY,
            launches=launches or (1, None),
            sample=sample or 1,
            image_wait=image_wait,
            log_records=follow.log_records,
            stamps=follow.stamps,
            stacks=follow.stacks,
            allocation_stacks=follow.allocation_stacks,
            graphs=follow.graphs,
            match_all=not wanted,
            pump=follow.pump,
            host=self._host_programs(),
        )
        self.lock = threading.Condition()
        self.processes: list[Process] = []
        self.started_ns = self.ended_ns = 0
        self.stopped = False  # the measurement is over
        self.hurry = False  # logs or rings fill quickly: they are to be read soon
        self._said: set[str] = set()  # notices that are given once

    def everyone(self) -> list[Process]:
        """The processes so far, to be gone through without the lock."""
        with self.lock:
            return list(self.processes)

    def note_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.note(text)

    def ring_size(self, definition: MapDefinition) -> int:
        """Bytes of records that a ring is granted for each GPU."""
        if definition.name == maps.PRINTS:
            return definition.capacity
        return self.follow.ring_size or definition.capacity

    def _spec(self, definition: MapDefinition) -> protocol.MapSpec:
        if definition.kind == SHARED:
            place = protocol.Place.SHARED
            size = maps.pad8(definition.value_size) * definition.max_entries
            return protocol.MapSpec(size, 0, b"", place=place)
        if is_ring(definition):
            place = protocol.Place.GPU_RING if self.follow.ring_in_gpu else protocol.Place.HOST_RING
            return protocol.MapSpec(
                self.ring_size(definition), maps.record_stride(definition), b"", place=place
            )
        fixed = maps.storage_size(definition)
        per_unit = maps.storage_size(definition, 1) - fixed
        unit = (
            UNITS[maps.SHAPED[definition.kind]] if definition.kind in maps.SHAPED else protocol.Unit.CONTEXT
        )
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
                        "context": (0, 0, value.number),
                        "map_base": (1, self.numbers.get(value.map, 0), 0),
                        "param": (2, 0, places.get(value.map, 0)),
                        "helper": (3, 0, value.number),
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
