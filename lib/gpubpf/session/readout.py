"""What tools get of a running measurement: what is in maps, operation logs and rings of all processes."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpubpf.agent import protocol
from gpubpf.agent.definitions import DrainFlag, Place, SnapshotFlag
from gpubpf.ebpf import maps
from gpubpf.session.results import Instance, ProcessLog, Reading, RingCounts, RingRecords, SharedArray, merged

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.ebpf.maps import MapDefinition
    from gpubpf.ptx.inject import Site
    from gpubpf.session.measurement import Measurement
    from gpubpf.session.traced_process import Process, Ring, Taken

REGISTERS_WAIT = 20.0  # seconds that results wait for ptxas to count registers
FULL = 0.2  # part of a log or ring's shard that was taken, at which it fills quickly


def instances(measured: Measurement, map_name: str) -> list[Instance]:
    """See `Session.instances`."""
    number = measured.numbers[map_name]
    found: list[Instance] = []
    used = [(process, _registers(process)) for process in measured.everyone()]
    with measured.lock:  # or else a file may be closed for a newer one
        for process, registers in used:
            for taken in process.snapshots.values():
                found += _instances_of(measured, process, registers, taken, number)
    return merged(found)


def _instances_of(
    measured: Measurement,
    process: Process,
    registers: Mapping[str, tuple[int, int]],
    taken: Taken,
    number: int,
) -> list[Instance]:
    """What one context held of map `number`."""
    definition, snapshot = measured.definitions[number], taken.snapshot
    found = []
    for instance in snapshot.instances:
        name = process.names.get(instance.slot, "")
        for array in instance.arrays:
            if array.map != number or not _sensible(definition, instance, array):
                continue
            raw = taken.read(array.size, array.offset)
            if len(raw) != array.size:
                continue
            before, after = registers.get(name, (None, None))
            found.append(
                Instance(
                    process.pid, process.comm, snapshot.gpu, name, instance.grid, instance.block_dim,
                    instance.launches, definition, raw, array.capacity, before, after, snapshot.taken_ns,
                    snapshot.context, process.number,
                )
            )  # fmt: skip
    if number in snapshot.shared:
        offset, size = snapshot.shared[number]
        whole = size == maps.storage_size(definition)
        raw = taken.read(size, offset) if whole else b""
        launches = sum(i.launches for i in snapshot.instances if i.by_shape)
        if whole and len(raw) == size:
            found.append(
                Instance(
                    process.pid, process.comm, snapshot.gpu, "", (0, 0, 0), (0, 0, 0),
                    launches, definition, raw, 0, None, None, snapshot.taken_ns, snapshot.context, process.number,
                )
            )  # fmt: skip
    return found


def _sensible(definition: MapDefinition, instance: protocol.InstancePart, array: protocol.ArrayPart) -> bool:
    """Whether an array has the room that its instance asks for, and the size that goes with it."""
    if maps.SHAPED.get(definition.kind) == "site":
        try:
            protocol.sites_and_shards(array.capacity)
        except protocol.Malformed:
            return False
    else:
        units = _units(definition, instance)
        if array.capacity != units or units > maps.MAX_THREADS:
            return False
    return array.size == maps.storage_size(definition, array.capacity)


def _units(definition: MapDefinition, instance: protocol.InstancePart) -> int:
    """How many units the map has for an instance; 0: it is not by shape."""
    blocks, threads = _volume(instance.grid), _volume(instance.block_dim)
    kind = maps.SHAPED.get(definition.kind)
    return {
        "thread": blocks * threads,
        "warp": blocks * ((threads + 31) // 32),
        "block": blocks,
        "instance": 1,
    }.get(kind or "", 0)


def _volume(extents: tuple[int, int, int]) -> int:
    return extents[0] * extents[1] * extents[2]


def _registers(process: Process) -> dict[str, tuple[int, int]]:
    """Of its instrumented kernels, where it could be found out in time."""
    found: dict[str, tuple[int, int]] = {}
    for future in process.registers:
        with contextlib.suppress(Exception):  # what ptxas says of it does not concern the measurement
            found.update(future.result(REGISTERS_WAIT))
    return found


def readings(measured: Measurement, *names: str) -> list[Reading]:
    """See `Session.readings`."""
    numbers = [measured.numbers[name] for name in names]
    found = []
    for process in measured.active():
        with measured.lock:
            taken = list(process.readings)
            process.readings.clear()
            skipped, process.skipped = process.skipped, 0
        if skipped:
            measured.note_once(f"{process.who}: maps were read faster than they could be looked at")
        for one in taken:
            s = one.snapshot
            try:
                parts = {
                    measured.definitions[n].name: _instances_of(measured, process, {}, one, n)
                    for n in numbers
                }
            finally:
                one.close()
            idle = not s.flags & SnapshotFlag.RUNNING
            found.append(
                Reading(
                    process.pid,
                    process.comm,
                    s.gpu,
                    s.context,
                    s.taken_ns,
                    idle,
                    parts,
                    process.names,
                    process.number,
                )
            )
    return found


def logs(measured: Measurement) -> list[ProcessLog]:
    """See `Session.logs`."""
    found = []
    for process in measured.active():
        last = process.over or (process.gone and measured.stopped)
        records = process.read_log(last)
        if records is None:
            continue
        measured.hurry |= len(records) > FULL * measured.follow.log_records
        found.append(
            ProcessLog(
                process.pid, process.comm, records, process.log_lost, process.virtual,
                process.names, process.contexts, process.stacks, last, process.number,
            )
        )  # fmt: skip
    return found


def rings(measured: Measurement, map_name: str) -> list[RingRecords]:
    """See `Session.rings`."""
    found = []
    for process, context, ring in _rings(measured, map_name, measured.active()):
        if ring.done:
            continue
        last = ring.closed or process.over or (process.gone and measured.stopped)
        place = ring.reader.place
        if place.place == Place.HOST_RING:
            records = ring.reader.read(last)
        else:
            copied = _take_copy(measured, process, ring, last)
            if copied is None and not last and not process.gone and not measured.stopped:
                process.send(protocol.drain(0, 0.0, DrainFlag.ONLY_RINGS))
            if copied is None:
                ring.done = last
                continue
            records = copied
            if not process.gone:
                process.send(protocol.consumed(place.map, context, ring.reader.consumed))
        measured.hurry |= ring.reader.full > FULL
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


def ring_counts(measured: Measurement, map_name: str) -> list[RingCounts]:
    """See `Session.ring_counts`."""
    return [
        RingCounts(process.pid, process.comm, ring.reader.place.gpu, tuple(ring.reader.counts()))
        for process, _, ring in _rings(measured, map_name, measured.everyone())
    ]


def _rings(measured: Measurement, map_name: str, processes: list[Process]) -> list[tuple[Process, int, Ring]]:
    number = measured.numbers[map_name]
    with measured.lock:
        return [
            (process, context, ring)
            for process in processes
            for (of, context), ring in process.rings.items()
            if of == number
        ]


def _take_copy(
    measured: Measurement, process: Process, ring: Ring, last: bool
) -> np.ndarray[Any, Any] | None:
    """The new records of a ring in GPU memory; None: there is no copy that was not looked at."""
    with measured.lock:
        copy, ring.copy = ring.copy, None
    if copy is None:
        return None
    file, offset = copy
    size = ring.reader.place.size
    try:
        if offset % mmap.PAGESIZE or not protocol.sealed(file, offset + size):
            return None
        with mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset) as area:
            return ring.reader.take(area, last)
    finally:
        os.close(file)


def shared(measured: Measurement, map_name: str) -> list[SharedArray]:
    """See `Session.shared`."""
    arrays = [(process, process.shared_array(map_name)) for process in measured.everyone()]
    return [SharedArray(p.pid, p.comm, array, p.number) for p, array in arrays if array is not None]


def sites(measured: Measurement, mangled: str, pid: int | None = None) -> dict[int, Site]:
    """See `Session.sites`."""
    with measured.lock:
        tables = {
            id(table): table
            for process in measured.processes
            if pid in (None, process.pid)
            for table in process.sites.get(mangled, ())
        }
    found: dict[int, Site | None] = {}
    for table in tables.values():
        for site in table:
            if found.setdefault(site.number, site) != site:
                found[site.number] = None
    return {number: site for number, site in found.items() if site is not None}
