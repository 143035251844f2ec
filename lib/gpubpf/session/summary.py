"""Count launches, uninstrumented launches by reason, and losses; build the summary record.

Each public function implements the `Session` method of the same name, or returns part of a notice of `Session`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gpubpf.agent import protocol
from gpubpf.agent.definitions import SLOTS
from gpubpf.ebpf import maps, sampling
from gpubpf.record import asdict
from gpubpf.records.reasons import BEFORE_READY, LOADED_BEFORE, REFUSED, fault_record
from gpubpf.records.results import KernelCount, ProcessCounts
from gpubpf.show import table
from gpubpf.traced.measurement import SHARED, is_ring

if TYPE_CHECKING:
    from gpubpf.traced.measurement import Measurement
    from gpubpf.traced.traced_process import StoredSnapshot, TracedProcess


def summary(measurement: Measurement) -> dict[str, Any]:
    """See `Session.summary`."""
    counted = kernels(measurement)
    unnamed = sum(process.counters()[1] for process in list(measurement.processes))
    reasons: dict[str, int] = {}
    for kernel in counted:
        for reason, n in kernel.not_instrumented.items():
            reasons[reason] = reasons.get(reason, 0) + n
    # If all kernels are traced, unnamed ones match too.
    unnamed_matched = unnamed if measurement.agent_config.match_all else 0
    if unnamed_matched:
        reasons[LOADED_BEFORE] = unnamed_matched
    record: dict[str, Any] = {
        "device": measurement.device.kind,
        "launches_seen": sum(k.launches for k in counted) + unnamed,
        "launches_matched": sum(k.launches for k in counted if k.matched) + unnamed_matched,
        "launches_instrumented": sum(k.instrumented for k in counted if k.matched),
        "not_instrumented": dict(sorted(reasons.items(), key=lambda item: -item[1])),
        "lost": _lost(measurement),
        "duration_ns": _duration_ns(measurement),
        "overhead": _overhead(measurement),
    }
    if measurement.sampled:
        chosen = sampling.of_parameter(measurement.sampled, measurement.params[sampling.PARAMETER])
        record["sampling"] = asdict(chosen)
    if unnamed and not unnamed_matched:
        record["launches_unknown"] = unnamed  # launches of kernels whose name is unknown
    if graphs := sum(process.graph_launches_before() for process in measurement.all_processes()):
        record["graphs_before"] = graphs
    if graphs := graphs_unknown(measurement):
        record["graphs_unknown"] = graphs
    if grids := sum(process.grids() for process in measurement.all_processes()):
        record["launches_by_kernels"] = grids
    if unread := _uncounted(measurement):
        record["launches_unread"] = unread
    if any(lost := lost_calls(measurement)):
        record["patch_calls_lost"] = {"launches": lost.unknown, "functions": lost.elsewhere}
    if faults := [
        fault_record(process.pid, process.comm, fault)
        for process in measurement.all_processes()
        for fault in process.faults
    ]:
        record["device_faults"] = faults
    live, programs = _measured(measurement)
    if measurement.several or programs > 1 or measurement.missed:
        with measurement.lock:
            missed = {reason: found.count for reason, found in measurement.missed.items()}
        record["processes"] = {"measured": live, "missed": missed}
        if unmeasured := measurement.unmeasured_ns():
            record["processes"]["unmeasured_ns"] = unmeasured
        if programs > live:
            record["processes"]["programs"] = programs
    if measurement.accesses:
        record["not_probed"] = _not_probed(measurement, {k.mangled for k in counted if k.instrumented})
    if measurement.host is not None and measurement.host.in_kernel:
        record["host_programs"] = {
            r.function: {"runs": r.runs, "mean_ns": round(r.mean_ns)} for r in measurement.host.runs()
        }
    return record


def graphs_unknown(measurement: Measurement) -> int:
    """Return the launches of graphs for which it is unknown how often their kernels ran, except those of `graphs_before`."""
    return sum(p.graph_launches() - p.graph_launches_before() for p in measurement.all_processes())


def lost_calls(measurement: Measurement) -> protocol.LostCalls:
    """Return how often patches ran without counting."""
    columns = zip(*(process.lost_calls() for process in measurement.all_processes()), strict=True)
    return protocol.LostCalls(*map(sum, columns))


def _measured(measurement: Measurement) -> tuple[int, int]:
    """Return the number of processes that had live hooks, and the number of programs that they ran with live hooks."""
    entries = Counter((p.identity, p.vendor) for p in measurement.all_processes() if p.hooked)
    programs: dict[
        tuple[int, float], int
    ] = {}  # a process that uses the GPUs of two vendors has two entries for a program
    for (process, _), n in entries.items():
        programs[process] = max(programs.get(process, 0), n)
    return len(programs), sum(programs.values())


def _overhead(measurement: Measurement) -> dict[str, int | None]:
    """Return the tool's overhead.

    On the virtual clock, hooks take no time. Numbers that would differ between runs are None there."""
    processes = measurement.all_processes()
    registers, spilled = _extra_registers(measurement, processes)
    same: dict[str, int | None] = {
        "registers": registers,
        "images": sum(process.images for process in processes),
        "image_bytes": sum(process.image_bytes for process in processes),
    }
    if spilled:
        same["spilled_bytes"] = spilled
    if any(process.virtual or process.virtual_times()[0] for process in processes):
        return {"hooks": None, "hooks_ns": 0, "stood_ns": 0, **same, "drained_bytes": None}
    columns = zip(*(process.hook_calls() for process in processes), strict=True)
    hooks = protocol.HookCalls(*map(sum, columns))
    return {
        "hooks": hooks.calls,
        "hooks_ns": hooks.ns,
        "stood_ns": sum(process.stood_ns for process in processes),
        **same,
        "drained_bytes": sum(process.drained_bytes for process in processes),
    }


def _extra_registers(measurement: Measurement, processes: list[TracedProcess]) -> tuple[int | None, int]:
    """Return the most registers (None: unknown) and spilled bytes that a copy needs in addition to the original's.

    Of a large module, only launched kernels count (`RegisterCounts`)."""
    until = measurement.registers_until()
    more, spilled = [], 0
    for process in processes:
        slots = dict(enumerate(process.counters()[0]))
        used = {name: slots.get(slot) for slot, name in process.names.items() if name in process.matched}
        counted = process.registers.of(process.launched_copies(), until)
        for name in counted.keys() & used.keys():
            of = used[name] or protocol.Counters()
            before, after, bytes_ = counted[name].in_launches(of.instrumented, of.limited)
            more.append(after - before)
            spilled = max(spilled, bytes_)
    return max(more, default=None), spilled


def _not_probed(measurement: Measurement, launched: set[str]) -> dict[str, int]:
    """Return the number of accesses that cannot be probed, by opcode, most frequent first.

    launched: names of the kernels to count. A kernel that several processes have counts once."""
    by_kernel: dict[tuple[str, str], int] = {}
    with measurement.lock:
        for process in measurement.processes:
            for name in process.unprobed.keys() & launched:
                for opcode, n in process.unprobed[name].items():
                    by_kernel[name, opcode] = max(by_kernel.get((name, opcode), 0), n)
    places: dict[str, int] = {}
    for (_, opcode), n in by_kernel.items():
        places[opcode] = places.get(opcode, 0) + n
    return dict(sorted(places.items(), key=lambda item: (-item[1], item[0])))


def kernels(measurement: Measurement) -> list[KernelCount]:
    """See `Session.kernels`."""
    counted: dict[str, tuple[int, bool, int, dict[str, int]]] = {}
    for process, name, counters in _counted(measurement):
        matched = name in process.matched or measurement.matches(name)
        launches, was_matched, instrumented, reasons = counted.get(name, (0, False, 0, {}))
        if matched:
            for reason, n in _reasons(process, name, counters).items():
                reasons[reason] = reasons.get(reason, 0) + n
        counted[name] = (
            launches + counters.seen,
            was_matched or matched,
            instrumented + counters.instrumented,
            reasons,
        )
    made = [KernelCount(name, *rest) for name, rest in counted.items()]
    return sorted(made, key=lambda k: (-k.launches, k.mangled))


def by_process(measurement: Measurement) -> list[ProcessCounts]:
    """See `Session.by_process`."""
    unread = {process.number: launches for process, launches in unread_launches(measurement)}
    made = []
    for process in measurement.all_processes():
        over = process.fully_read
        kernels: dict[str, KernelCount] = {}
        for _, name, counters in _counted(measurement, [process]):
            matched = name in process.matched or measurement.matches(name)
            reasons = _reasons(process, name, counters) if matched else {}
            kernel = KernelCount(name, counters.seen, matched, counters.instrumented, reasons)
            kernels[name] = kernels[name].plus(kernel) if name in kernels else kernel
        if unnamed := process.counters()[1]:
            kernels[""] = KernelCount("", unnamed, True, 0, {LOADED_BEFORE: unnamed})
        made.append(
            ProcessCounts(
                process.number,
                process.pid,
                process.comm,
                over,
                list(kernels.values()),
                unread.get(process.number, 0) if over else 0,
                process.hook_calls().ns or 0,
            )
        )
    return made


def _reasons(process: TracedProcess, name: str, counters: protocol.Counters) -> dict[str, int]:
    """Return why launches of a matched kernel ran the original: reason → launches.

    Launches without another reason ran before the instrumented copy was ready."""
    slots = [slot for slot, known in process.names.items() if known == name]
    reasons: dict[str, int] = {}
    for reason, n in counters.reasons.items():
        if reason == REFUSED:
            refused = [process.refused[slot] for slot in slots if slot in process.refused]
            reason = refused[0] if refused else process.refusals.get(name, reason)
        reasons[reason] = reasons.get(reason, 0) + n
    rest = counters.seen - counters.instrumented - sum(counters.reasons.values())
    if rest > 0:
        reasons[BEFORE_READY] = reasons.get(BEFORE_READY, 0) + rest
    return reasons


def before_their_copies(measurement: Measurement) -> int:
    """Return how many launches of large modules' kernels ran the original because the copy was not loaded in time; commands only."""
    return sum(
        _reasons(process, name, counters).get(BEFORE_READY, 0)
        for process, name, counters in _counted(measurement)
        if name in process.later and not process.attached
    )


def launches_by_comm(measurement: Measurement) -> dict[str, dict[str, int]]:
    """See `Session.launches_by_comm`."""
    counted: dict[str, dict[str, int]] = {}
    for process, name, counters in _counted(measurement):
        of_process = counted.setdefault(process.comm, {})
        of_process[name] = of_process.get(name, 0) + counters.seen
    return counted


def _counted(
    measurement: Measurement, processes: Iterable[TracedProcess] | None = None
) -> Iterator[tuple[TracedProcess, str, protocol.Counters]]:
    """Yield (process, kernel name, that kernel's counters in the process). processes: only these; None: all."""
    for process in measurement.all_processes() if processes is None else processes:
        slots, _ = process.counters()
        for slot, counters in enumerate(slots):
            name = process.names.get(slot, "" if slot < SLOTS - 1 else "(others)")
            if name:
                yield process, name, counters


def unread_launches(measurement: Measurement) -> Iterator[tuple[TracedProcess, int]]:
    """Yield each process with incomplete counts, and an upper bound for the number of its instrumented launches that were not read.

    In an intermediate reading, launches that were still running may lack counts, so they count as not read. In a process's last
    reading they count as read: see `partly_counted` and `ended_while_running`."""
    for process in measurement.all_processes():
        instrumented = _instrumented(process)
        received = sum(
            s.launches if s.is_last(measurement.request) else s.complete for s in process.snapshots.values()
        )
        if instrumented > received:
            yield process, instrumented - received


def _uncounted(measurement: Measurement) -> int:
    """Return an upper bound of the instrumented launches whose counts were not read, because their process ended early."""
    if measurement.follow.kept is not None or measurement.follow.only_shared or not _has_counts(measurement):
        return 0
    return sum(launches for _, launches in unread_launches(measurement))


def _instrumented(process: TracedProcess) -> int:
    return sum(c.instrumented for c in process.counters()[0])


def _after_last_reading(process: TracedProcess) -> int:
    """Return the number of instrumented launches that began after the process's last reading."""
    return max(0, _instrumented(process) - sum(s.launches for s in process.snapshots.values()))


def partly_counted(measurement: Measurement) -> Iterator[TracedProcess]:
    """Yield processes in which kernels were still running when their maps were read for the last time."""
    if not _has_counts(measurement):
        return
    for process in measurement.all_processes():
        stored = process.snapshots.values()
        if any(
            s.snapshot.sequence and s.is_last(measurement.request) and not s.idle and s.launches
            for s in stored
        ):
            yield process


def ended_while_running(measurement: Measurement) -> Iterator[TracedProcess]:
    """Yield processes that ended before all their kernels had completed, for example because a kernel on an AMD GPU failed."""
    for process in measurement.all_processes():
        if (
            process.failed
            or process.dropped  # the tool does not know how the process ended
            or not process.disconnected
            or not any(c.instrumented for c in process.counters()[0])
        ):
            continue
        stored = process.snapshots.values()
        # Sequence 0: the process sent the reading without a request.
        if any(s.snapshot.sequence == 0 and s.is_last(measurement.request) and not s.idle for s in stored):
            yield process


def _has_counts(measurement: Measurement) -> bool:
    """Return whether any map has counts. The others are rings, which count their own losses, and shared arrays of the host."""
    return any(not is_ring(d) and d.kind != SHARED for d in measurement.definitions)


def describe_loss(measurement: Measurement, process: TracedProcess, launches: int) -> str | None:
    """Return a phrase for a notice: what is lost if this many launches of a process were not read; None if nothing is lost.

    Return "" if the agent kept values (`Follow.kept`): then the tool itself reports the loss."""
    if measurement.follow.kept is not None:
        return ""
    if measurement.follow.only_shared:
        return None
    parts = []
    if _has_counts(measurement):
        late = _after_last_reading(process)
        since = f" ({late:,} of them began after the last reading)" if 0 < late < launches else ""
        parts.append(f"the counts of up to {table.count(launches, 'launch')} are lost{since}")
    rings = list(_unread(measurement, process))
    for name, received, _, most in rings:
        bounded = name in measurement.follow.per_thread
        if bounded and not most:
            continue
        lost = f"at most {most:,}" if bounded else "an unknown number"
        parts.append(f"{table.count(received, 'record')} of {name} received, {lost} lost")
    if not parts and not rings:
        parts.append(f"up to {table.count(launches, 'launch')} could not be read")
    return "; ".join(parts) or None


def _lost(measurement: Measurement) -> int:
    """Return the total loss: unread launches, records of killed processes (upper bound), and drops in full maps and logs."""
    lost = sum(lost_calls(measurement))
    counted = _has_counts(measurement)
    for process, launches in () if measurement.follow.only_shared else unread_launches(measurement):
        bounds = [
            most - known
            for name, _, known, most in _unread(measurement, process)
            if name in measurement.follow.per_thread
        ]
        lost += sum(bounds) + (launches if counted or not bounds else 0)
    with measurement.lock:
        lost += sum(
            _lost_in_maps(measurement, p, stored)
            for p in measurement.processes
            for stored in p.snapshots.values()
        )
        rings = [ring.reader for p in measurement.processes for ring in p.rings.values()]
        lost += sum(p.log_lost for p in measurement.processes)
    return lost + sum(shard.lost + shard.incomplete for reader in rings for shard in reader.counts())


def _unread(measurement: Measurement, process: TracedProcess) -> Iterator[tuple[str, int, int, int]]:
    """Yield for each ring: its name, received records, records known to be lost, and an upper bound of lost records."""
    threads = sum(c.threads for c in process.counters()[0])
    for number, definition in enumerate(measurement.definitions):
        if not is_ring(definition) or definition.name in (maps.PRINTS, maps.LONG_PRINTS):
            continue
        rings = [ring.reader for (of, _), ring in process.rings.items() if of == number]
        shards = [shard for reader in rings for shard in reader.counts()]
        received, known = sum(s.received for s in shards), sum(s.lost + s.incomplete for s in shards)
        most = threads * measurement.follow.per_thread.get(definition.name, 1) - received
        yield definition.name, received, known, max(known, most)


def _lost_in_maps(measurement: Measurement, process: TracedProcess, stored: StoredSnapshot) -> int:
    """Return the number of losses that a snapshot's full maps counted."""
    lost, snapshot = 0, stored.snapshot
    places = [(a.map, a.offset, a.size) for i in snapshot.instances for a in i.arrays]
    places += [(number, *place) for number, place in snapshot.shared.items()]
    for number, offset, size in places:
        if number >= len(measurement.definitions):
            continue
        definition = measurement.definitions_of(process.vendor)[number]
        if definition.kind in maps.SHAPED:  # the last value counts the losses
            if size < definition.value_size:
                continue
            offset, size = offset + size - definition.value_size, definition.value_size
        elif size > maps.HEADER:
            size = maps.HEADER
        raw = stored.read(size, offset)
        if len(raw) == size:
            lost += maps.lost(definition, raw)
    return lost


def _duration_ns(measurement: Measurement) -> int:
    """Return the measurement's duration; on the virtual clock, from the first process's start to the last one's end."""
    times = [process.virtual_times() for process in measurement.all_processes()]
    started, ended = [s for s, _ in times if s], [e for _, e in times if e]
    if started and ended:
        return max(0, max(ended) - min(started))
    return (measurement.ended_ns or time.monotonic_ns()) - measurement.started_ns
