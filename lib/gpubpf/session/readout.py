"""Read the maps, operation logs and rings of all traced processes.

Each public function implements the `Session` method of the same name. It runs in the thread that runs `Session.intervals`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.agent import protocol
from gpubpf.agent.definitions import WARP, ArrayPart, DrainFlag, InstancePart, Place
from gpubpf.ebpf import maps, sampling
from gpubpf.record import replace
from gpubpf.records.builds import without_first_line
from gpubpf.records.results import Instance, ProcessLog, Reading, RingCounts, RingRecords, SharedArray, merged

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.ebpf.maps import MapDefinition
    from gpubpf.images.sidecar import RegisterUse
    from gpubpf.inject.values import Site
    from gpubpf.traced.measurement import Measurement
    from gpubpf.traced.traced_process import Ring, StoredSnapshot, TracedProcess

MOST_THREADS = 1024  # per block; CUDA's limit
FILLING_FAST = 0.2  # if a log or shard filled up this much since the last reading, it is read again soon


def instances(measurement: Measurement, map_name: str, separate: bool = False) -> list[Instance]:
    """See `Session.instances`."""
    (found,) = together(measurement, [map_name])
    return found if separate else merged(found)


def together(measurement: Measurement, map_names: Sequence[str]) -> list[list[Instance]]:
    """See `Session.instances_together`."""
    numbers = [measurement.numbers[name] for name in map_names]
    found: list[list[Instance]] = [[] for _ in numbers]
    until = measurement.registers_until()
    used = [
        (process, process.registers.of(process.launched_copies(), until))
        for process in measurement.all_processes()
    ]
    with measurement.lock:  # or a newer snapshot could close the file being read
        for process, registers in used:
            for stored in process.snapshots.values():
                parts = [_instances_of(measurement, process, registers, stored, number) for number in numbers]
                if len({*map(len, parts)}) == 1:  # else some are damaged
                    for whole, part in zip(found, parts, strict=True):
                        whole += part
    return found


def blocks(measurement: Measurement) -> dict[tuple[int, int, str], int]:
    """See `Session.blocks`."""
    found: dict[tuple[int, int, str], int] = {}
    processes = measurement.all_processes()
    with measurement.lock:
        for process in processes:
            for stored in process.snapshots.values():
                for instance in filter(lambda one: one.by_shape, stored.snapshot.instances):
                    key = process.number, stored.snapshot.gpu, process.names.get(instance.slot, "")
                    found[key] = found.get(key, 0) + instance.launches * _volume(instance.grid)
    return found


def _instances_of(
    measurement: Measurement,
    process: TracedProcess,
    registers: Mapping[str, RegisterUse],
    stored: StoredSnapshot,
    number: int,
) -> list[Instance]:
    """Return the instances of map `number` in one snapshot of a context."""
    definition, snapshot = measurement.definitions_of(process.vendor)[number], stored.snapshot
    counters = process.counters()[0] if registers else []
    found = []
    for instance in snapshot.instances:
        name = process.names.get(instance.slot, "")
        for array in instance.arrays:
            if array.map != number or not _size_is_valid(
                definition, instance, array, process.waves.get(name)
            ):
                continue
            raw = stored.read(array.size, array.offset)
            if len(raw) != array.size:
                continue
            before, after, spilled = None, None, 0
            if name in registers:
                of = counters[instance.slot] if instance.slot < len(counters) else protocol.Counters()
                before, after, spilled = registers[name].in_launches(of.instrumented, of.limited)
            found.append(
                Instance(
                    process.pid, process.comm, snapshot.gpu, name, instance.grid, instance.block_dim,
                    instance.launches, definition, raw, array.capacity, before, after, snapshot.taken_ns,
                    snapshot.context, process.number, spilled, process.waves.get(name), stored.idle,
                    name in process.may_wait, instance.build,
                )
            )  # fmt: skip
    if number in snapshot.shared:
        definition = measurement.as_read(definition)
        offset, size = snapshot.shared[number]
        whole = size == maps.storage_size(definition)
        raw = stored.read(size, offset) if whole else b""
        launches = stored.launches
        if whole and len(raw) == size:
            found.append(
                Instance(
                    process.pid, process.comm, snapshot.gpu, "", (0, 0, 0), (0, 0, 0),
                    launches, definition, raw, 0, None, None, snapshot.taken_ns, snapshot.context, process.number,
                )
            )  # fmt: skip
    return found


def _size_is_valid(
    definition: MapDefinition, instance: InstancePart, array: ArrayPart, wave: int | None
) -> bool:
    """Return whether an array has the number of units of its launch shape, and the matching size. The shape must be possible. Then its
    extents are in proportion to the array's memory, so tools can safely allocate arrays of that size."""
    if instance.by_shape and not (_volume(instance.grid) and 0 < _volume(instance.block_dim) <= MOST_THREADS):
        return False
    if maps.SHAPED.get(definition.kind) == "site":
        try:
            protocol.sites_and_shards(array.capacity)
        except protocol.Malformed:
            return False
    else:
        units = _units(definition, instance, wave or WARP)
        if array.capacity != units or units > maps.MAX_THREADS:
            return False
    return array.size == maps.storage_size(definition, array.capacity)


def _units(definition: MapDefinition, instance: InstancePart, warp: int) -> int:
    """Return the map's number of units (threads, warps, blocks) for an instance; 0 if the map is not by shape."""
    blocks, threads = _volume(instance.grid), _volume(instance.block_dim)
    kind = maps.SHAPED.get(definition.kind)
    return {
        "thread": blocks * threads,
        "warp": blocks * -(-threads // warp),
        "block": blocks,
        "instance": 1,
    }.get(kind or "", 0)


def _volume(extents: tuple[int, int, int]) -> int:
    return extents[0] * extents[1] * extents[2]


def spent(measurement: Measurement) -> dict[tuple[int, str], tuple[int, float]]:
    """Return the instructions of the application and the added ones in the measured launches, by process number and kernel.

    With sampling, the added ones are those that launches have on average, whichever blocks they chose."""
    number = measurement.numbers[maps.SPENT]
    share = sampling.share(measurement.params)
    found: dict[tuple[int, str], tuple[int, float]] = {}
    with measurement.lock:
        for process in measurement.processes:
            for stored in process.snapshots.values():
                for instance in _instances_of(measurement, process, {}, stored, number):
                    parts = instance.array[:, 0].reshape(-1, *maps.SPENT_SHAPE[1:]).sum(axis=(0, 2))
                    own, added, skipped = map(int, parts)
                    before = found.get((process.number, instance.mangled), (0, 0.0))
                    of_all = skipped + share * (added - skipped)
                    found[process.number, instance.mangled] = before[0] + own, before[1] + of_all
    return found


def readings(measurement: Measurement, *names: str) -> list[Reading]:
    """See `Session.readings`."""
    numbers = [measurement.numbers[name] for name in names]
    found = []
    for process in measurement.active():
        with measurement.lock:
            waiting = list(process.readings)
            process.readings.clear()
            skipped, process.skipped_readings = process.skipped_readings, 0
        if skipped:
            measurement.note_once(
                f"{process.label}: some readings of its maps were dropped, because the tool was too slow"
            )
        for stored in waiting:
            snapshot = stored.snapshot
            try:
                parts = {
                    measurement.definitions[n].name: _instances_of(measurement, process, {}, stored, n)
                    for n in numbers
                }
            finally:
                stored.close()
            found.append(
                Reading(
                    process.pid,
                    process.comm,
                    snapshot.gpu,
                    snapshot.context,
                    snapshot.taken_ns,
                    stored.idle,
                    parts,
                    process.names,
                    process.number,
                )
            )
    return found


def logs(measurement: Measurement) -> list[ProcessLog]:
    """See `Session.logs`."""
    found = []
    for process in measurement.active():
        last = process.no_more_data or (process.disconnected and measurement.stopped)
        records = process.read_log(last)
        if records is None:
            continue
        measurement.drain_soon |= len(records) > FILLING_FAST * measurement.follow.log_records
        found.append(
            ProcessLog(
                process.pid, process.comm, records, process.log_lost, process.virtual,
                process.names, process.contexts, process.stacks, last, process.number, process.waves,
                process.vendor, measurement.read, process.user, process.from_before, process.ranges,
            )
        )  # fmt: skip
    return found


def rings(measurement: Measurement, map_name: str) -> list[RingRecords]:
    """See `Session.rings`."""
    found = []
    for process, context, ring in _rings(measurement, map_name, measurement.active()):
        if ring.done:
            continue
        last = ring.closed or process.no_more_data or (process.disconnected and measurement.stopped)
        place = ring.reader.place
        if place.place == Place.HOST_RING:
            records = ring.reader.read(last)
        else:
            copied = _read_copy(measurement, process, ring, last)
            if copied is None and not last and not process.disconnected and not measurement.stopped:
                process.offer(protocol.drain(0, 0.0, DrainFlag.ONLY_RINGS))  # if not sent: at the next call
            if copied is None:
                ring.done = last
                continue
            records = copied
            if not process.disconnected:
                process.offer(
                    protocol.consumed(place.map, context, ring.reader.consumed)
                )  # or with the next copy
        measurement.drain_soon |= ring.reader.full > FILLING_FAST
        process.drained_bytes += records.nbytes
        if last:
            ring.done = True
            ring.reader.close()
        if len(records):
            found.append(
                RingRecords(
                    process.pid, process.comm, place.gpu, context, records, process.names, process.number
                )
            )
    return found


def ring_counts(measurement: Measurement, map_name: str) -> list[RingCounts]:
    """See `Session.ring_counts`."""
    return [
        RingCounts(process.pid, process.comm, ring.reader.place.gpu, tuple(ring.reader.counts()))
        for process, _, ring in _rings(measurement, map_name, measurement.all_processes())
    ]


def _rings(
    measurement: Measurement, map_name: str, processes: list[TracedProcess]
) -> list[tuple[TracedProcess, int, Ring]]:
    """Return the rings of a map as (process, context, ring)."""
    number = measurement.numbers[map_name]
    with measurement.lock:
        return [
            (process, context, ring)
            for process in processes
            for (of, context), ring in process.rings.items()
            if of == number
        ]


def _read_copy(
    measurement: Measurement, process: TracedProcess, ring: Ring, last: bool
) -> np.ndarray[Any, Any] | None:
    """Return the new records of a ring in GPU memory; None if no new copy has arrived."""
    with measurement.lock:
        copy, ring.copy = ring.copy, None
    if copy is None:
        return None
    file, offset = copy
    size = ring.reader.place.size
    try:
        if offset % mmap.PAGESIZE or not protocol.sealed(file, offset + size):
            return None
        with mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset) as area:
            return ring.reader.read_copy(area, last)
    finally:
        os.close(file)


def shared(
    measurement: Measurement, map_name: str, processes: Collection[int] | None = None
) -> list[SharedArray]:
    """See `Session.shared`."""
    arrays = [
        (process, process.shared_array(map_name))
        for process in measurement.all_processes()
        if processes is None or process.number in processes
    ]
    return [SharedArray(p.pid, p.comm, array, p.number, p.user) for p, array in arrays if array is not None]


def sites(
    measurement: Measurement, mangled: str, pid: int | None = None, build: int | None = None
) -> dict[int, Site]:
    """See `Session.sites`."""
    with measurement.lock:
        tables = {
            id(table): table
            for process in measurement.processes
            if pid in (None, process.pid)
            for number, table in enumerate(process.sites.get(mangled, ()))
            if build in (None, number)
        }
    from gpubpf.images.patches import sites_of  # imported here, as a result is needed late

    if (instructions := sites_of(list(tables.values()))) is not None:
        return instructions
    one_kernel = len({without_first_line(table) for table in tables.values() if table}) == 1
    found: dict[int, Site | None] = {}
    for table in tables.values():
        for site in table:
            first = found.setdefault(site.number, site)
            if first is None or first == site:
                continue
            if replace(first, line=0) != replace(site, line=0) or not (one_kernel or site.source):
                found[site.number] = None
            elif site.source:
                found[site.number] = replace(first, line=0)
    return {number: site for number, site in found.items() if site is not None}
