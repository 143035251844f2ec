"""The state that the parts of a session share: what to measure, and the traced processes.

Tools describe a session with `Targets`, `Plan`, `Follow` and `Listener`. `Session` combines them in one `Measurement`.
"""

from __future__ import annotations

import functools
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from gpubpf.agent import protocol
from gpubpf.agent.definitions import HostArgument, HostCode, KeptMap, MapSpec, Place, Unit, Vendor
from gpubpf.ebpf import maps
from gpubpf.kernel.privileges import Privileges
from gpubpf.process import limits, users
from gpubpf.record import MutableRecord, Record, field, replace
from gpubpf.records.reasons import (
    ENDED,
    NO_DRIVER,
    NO_ROCR,
    OTHER_USER,
    OUT_OF_FILES,
    REACHED_LATE,
    UNHOOKED,
)
from gpubpf.traced.shares import Share

if TYPE_CHECKING:
    from gpubpf.ebpf.maps import MapDefinition
    from gpubpf.linux.host_programs import Host
    from gpubpf.traced.device import Device
    from gpubpf.traced.traced_process import TracedProcess

MAP_MEMORY = 256 << 20
IMAGE_WAIT = 120.0
GRAPHS_TESTED = 13  # CUDA version of the oldest driver with which copies in graphs were tested (docs/gpu.md)
# Seconds, in total, that a tool waits at its end for ptxas to count registers; longer if it shows the registers of each copy.
REGISTERS_WAIT, SHOWN_REGISTERS_WAIT = 2.0, 20.0
NOTICES_PER_KIND = 10
NOTICE_KINDS = 64  # any further kinds share one limit
PARAM, SHARED = "param", "shared_array"
UNITS = {
    "thread": Unit.THREAD,
    "warp": Unit.WARP,
    "block": Unit.BLOCK,
    "instance": Unit.INSTANCE,
    "site": Unit.SITE,
}


class Kept(Record):
    """An array whose rows have one word per launch (`source`), and the shared array that keeps each launch's largest word (`target`).

    A reading of `source` has only the largest word of each launch.

    source, target: names of the maps.
    offset: offset of the word in an element of `target`, in bytes.
    slots: number of launches in a row.
    """

    source: str
    target: str
    offset: int
    slots: int


class Follow(Record):
    """What a tool collects from each traced process in addition to its maps (docs/timing.md).

    log_records: size of the operation log in records, a power of two; 0: no log.
    stamps: record timing events around operations that no probe times.
    cupti: possible paths of the CUPTI library, for a command; its activity records then replace the timing events.
    sanitizer: possible paths of the Compute Sanitizer library, for a command; kernels without PTX are patched (`--sass`).
    cupti_automatic: use CUPTI only in processes that cannot use it themselves.
    stacks, allocation_stacks: record the host stack of each launch, or of each allocating call.
    ranges: record which ranges (NVTX) each launch is in.
    graphs: instrument kernels in CUDA graphs; None: where the driver is GRAPHS_TESTED or newer.
    pump: read a process's maps once per this many launches, for `Session.readings`; 0: only on request.
    kept: keep values of the latest launches when the program waits, so that a failed context cannot lose them.
    ring_size: bytes of each ring on each GPU; None: the size in the C text.
    ring_in_gpu: keep rings in GPU memory instead of host memory.
    per_thread: for each ring, the most records that one thread writes into it.
    only_shared: all results are in shared arrays, which outlive the context; other maps are the programs' own state.
    registers: count the registers of copies, for the summary.
    """

    log_records: int = 0
    stamps: bool = False
    cupti: Sequence[str] = ()
    cupti_automatic: bool = False
    sanitizer: Sequence[str] = ()
    stacks: bool = False
    allocation_stacks: bool = False
    ranges: bool = False
    graphs: bool | None = None
    pump: int = 0
    kept: Kept | None = None
    ring_size: int | None = None
    ring_in_gpu: bool = False
    per_thread: Mapping[str, int] = field(default_factory=dict)
    only_shared: bool = False
    registers: bool = True

    def instruments_graphs(self, driver: int) -> bool:
        """Return whether kernels in graphs are instrumented with a driver of this CUDA version (13); 0 if unknown."""
        return driver >= GRAPHS_TESTED if self.graphs is None else self.graphs


class Targets(Record):
    """The processes that a session traces: those of a command, some running processes, or all processes.

    user: run the command as this user (`--user`); None: see `users.command_user`.
    all_processes: trace every process that uses a GPU driver, now or later.
    ptx_options: set variables for the command with which libraries keep the PTX of kernels that they compile (`--no-ptx-options`).
    """

    command: Sequence[str] = ()
    pids: Sequence[int] = ()
    all_processes: bool = False
    user: str | None = None
    ptx_options: bool = True


class Plan(Record):
    """What a session measures.

    device: the device that the traced processes use.
    definitions: the maps, in any order. params: the bytes of maps of kind "param".
    matches: return whether to trace a mangled kernel name; None: trace all kernels.
    wanted: the kernel patterns as the user typed them, for messages.
    ranges: measure only launches in a range whose name matches one of these globs (`--range`); none: all launches.
    launches, sample, budget: see `--launch`, `--sample` and `--budget`. sampled: the unit that `params` samples.
    map_memory: bytes per context.
    image_wait: seconds that a module load in a traced process waits for the sidecar.
    host: loaded host programs and shared arrays; the session detaches them at its end.
    accesses: programs run at memory accesses, branches or instructions, so the summary counts unprobed ones.
    amd: also measure kernels on AMD GPUs. amd_definitions: returns the maps of the programs for AMD GPUs; None: they are the same.
    owns_process: this Python process only runs the session, so it may drop privileges that it no longer needs.
    registers: the tool shows the registers of each copy, so its last readings wait for them.
    """

    device: Device
    definitions: Sequence[MapDefinition] = ()
    params: Mapping[str, bytes] = field(default_factory=dict)
    matches: Callable[[str], bool] | None = None
    wanted: Sequence[str] = ()
    launches: tuple[int, int | None] = (1, None)
    sample: int = 1
    budget: float | None = None
    ranges: Sequence[str] = ()
    map_memory: int = MAP_MEMORY
    image_wait: float = IMAGE_WAIT
    follow: Follow = field(default_factory=Follow)
    host: Host | None = None
    accesses: bool = False
    amd: bool = False
    amd_definitions: Callable[[], Sequence[MapDefinition]] | None = None
    owns_process: bool = False
    registers: bool = False
    sampled: Literal["", "block", "warp"] = ""


class Listener(Record):
    """Callbacks of a session.

    Called from the thread that runs `Session.intervals`:
    attached: probes are live in a process, and so are the copies of kernels that it had loaded before; gets pid, comm, time (ns,
    CLOCK_MONOTONIC or virtual), and whether the process was traced before and has executed another program since.
    waiting: probes are live in a process, but the copies of some kernels are not; also gets their number. `attached` follows, unless
    the process ends or executes another program first.
    watching: the session now watches all processes that use a driver; gets the time.
    complain: no kernel matched; gets the error message.

    Called from any thread:
    note: gets a notice for the user.
    loaded: a process loaded an image; gets its comm and the image.
    """

    note: Callable[[str], None] = lambda text: None
    complain: Callable[[str], None] = lambda text: None
    attached: Callable[[int, str, int, str], None] = lambda pid, comm, ts_ns, again: None
    waiting: Callable[[int, str, int, int], None] = lambda pid, comm, ts_ns, kernels: None
    watching: Callable[[int], None] = lambda ts_ns: None
    loaded: Callable[[str, bytes], None] = lambda comm, data: None


class MissedProcesses(MutableRecord):
    """How many processes are missed for one reason, and for how long. These are sums, since any number of processes may come and end.

    A missed process may launch kernels unseen from its start until it is measured, or until it or the measurement ends.

    count: number of missed processes.
    ended: total seconds of processes for which this time is over.
    open: number of processes for which it is not over yet.
    since: sum of the start times of these open processes, in seconds of CLOCK_BOOTTIME.
    """

    count: int = 0
    ended: float = 0.0
    open: int = 0
    since: float = 0.0


class Measurement:
    """The state of one session: its plan, its traced processes, and those that could not be traced.

    `lock` guards `processes`, `missed`, `modules`, `_noted` and what agents change in a `TracedProcess`. It is a condition: the server
    notifies it after each message and each disconnect. Other attributes do not change after `__init__`, except `stopped`,
    `started_ns`, `ended_ns`, `read`, `request` and `drain_soon`. Only the thread that runs `Session.intervals` sets those.
    """

    def __init__(self, targets: Targets, plan: Plan, note: Callable[[str], None]) -> None:
        self.targets = targets
        # True for unrelated processes, False for the processes of one command.
        self.several = targets.all_processes or len(set(targets.pids)) > 1
        self.user = users.command_user(targets.user)
        self.accesses = plan.accesses
        self.sampled = plan.sampled
        self.amd = plan.amd
        self._registers_wait = SHOWN_REGISTERS_WAIT if plan.registers else REGISTERS_WAIT
        self._registers_until = 0.0
        self.device = plan.device
        self.definitions = [d for d in plan.definitions if d.kind != PARAM]
        self._get_amd_definitions = plan.amd_definitions
        self.numbers = {d.name: number for number, d in enumerate(self.definitions)}
        self.params = dict(plan.params)
        self.matches = plan.matches or _every_kernel
        self.note = limit_notices(note)
        self.privileges = Privileges()
        self.follow = follow = plan.follow
        self.host = plan.host
        self.agent_config = protocol.AgentConfig(
            [self._spec(d) for d in self.definitions],
            plan.map_memory,
            launches=plan.launches,
            sample=plan.sample,
            budget=plan.budget is not None,
            image_wait=plan.image_wait,
            log_records=follow.log_records,
            stamps=follow.stamps,
            stacks=follow.stacks,
            allocation_stacks=follow.allocation_stacks,
            ranges=follow.ranges,
            chosen_ranges=plan.ranges,
            match_all=not plan.wanted,
            pump=follow.pump,
            kept=self._kept_map(follow.kept),
            host=self._host_programs(),
            # Programs without machine code run in the Linux kernel.
            host_points=sorted(plan.host.points) if plan.host and not plan.host.natives else (),
        )
        self.lock = threading.Condition()
        self.processes: list[TracedProcess] = []
        self._active: list[TracedProcess] = []
        self._latest: dict[tuple[int, float, Vendor], TracedProcess] = {}  # by `TracedProcess.agent`
        self.started_ns = self.ended_ns = 0
        self.request = 0  # number of the last request to read the maps
        self.stopped = False  # the measurement has ended
        self.read = False  # and all that agents still had was read, so nothing will follow
        self.drain_soon = False  # logs or rings fill quickly; read them again soon
        self.missed: dict[str, MissedProcesses] = {}  # by reason
        self._began, self._ended = _boottime(), math.inf
        self.modules = Share("kernels and sites in modules", limits.MODULES, limits.MODULES_OF_USER)
        self._noted: set[str] = set()  # texts already given by `note_once`
        self._given_up: set[tuple[int, float]] = (
            set()
        )  # processes that were given up, by `TracedProcess.identity`

    @functools.cached_property  # few processes have AMD GPUs
    def _amd_definitions(self) -> list[MapDefinition]:
        found = self._get_amd_definitions() if self._get_amd_definitions is not None else ()
        return [definition for definition in found if definition.kind != PARAM] or self.definitions

    def definitions_of(self, vendor: Vendor) -> list[MapDefinition]:
        """Return a process's maps, by number. Only the sizes of values and arrays depend on the GPU's vendor."""
        return self._amd_definitions if vendor == Vendor.AMD else self.definitions

    def as_read(self, definition: MapDefinition) -> MapDefinition:
        """Return a map's definition as it applies to a snapshot, which has less of the array `Follow.kept`."""
        kept = self.follow.kept
        if kept is None or definition.name != kept.source:
            return definition
        return replace(definition, max_entries=kept.slots)

    def maps_of(self, vendor: Vendor) -> list[MapSpec]:
        """Return the specifications with which the agent creates these maps."""
        return [self._spec(d) for d in self.definitions_of(vendor)]

    def _kept_map(self, kept: Kept | None) -> KeptMap:
        if kept is None:
            return KeptMap()
        return KeptMap(self.numbers[kept.source], self.numbers[kept.target], kept.offset, kept.slots)

    def all_processes(self) -> list[TracedProcess]:
        """Return a copy of the list of processes, to iterate over without the lock."""
        with self.lock:
            return list(self.processes)

    def add(self, process: TracedProcess) -> None:
        """Add a process. The caller holds `lock`."""
        self.processes.append(process)
        self._active.append(process)

    def introduce(self, process: TracedProcess) -> TracedProcess | None:
        """Make this the latest entry of its process and vendor, once the vendor of its agent is known. The caller holds `lock`.

        Return the entry that was the latest before, or None."""
        before, self._latest[process.agent] = self._latest.get(process.agent), process
        return before

    def remove(self, process: TracedProcess) -> None:
        """Remove a process. From any thread, without `lock`."""
        with self.lock:
            self.processes.remove(process)
            if self._latest.get(process.agent) is process:
                del self._latest[process.agent]
            self._active = [p for p in self._active if p is not process]

    def active(self) -> list[TracedProcess]:
        """Return the processes that may still send data or have unread data. Even if thousands have ended, few are left."""
        with self.lock:
            self._active = [p for p in self._active if not p.fully_read]
            return list(self._active)

    def record_missed(self, reason: str, started: float = 0) -> None:
        """Count a process that is not traced, or not fully. From any thread. `started`: its start time, or 0 (`traceable.started`).

        Call it once per process."""
        with self.lock:
            now = min(_boottime(), self._ended)
            since = min(max(started, self._began), now)
            missed = self.missed.setdefault(reason, MissedProcesses())
            missed.count += 1
            if reason in (ENDED, REACHED_LATE):
                missed.ended += now - since
            else:  # UNREACHED: may run on
                missed.open += 1
                missed.since += since

    def drop(self, process: TracedProcess, why: str, lacking_files: bool = False) -> None:
        """Give up a process: count it as missed, or give a notice with the reason. From any thread.

        An attach that is in progress fails for this reason, and counts the process itself. The caller then closes the connection.

        why: the reason, for the user.
        lacking_files: the tool can open no more files.
        """
        with self.lock:  # the server and a worker may give up the same process
            if process.dropped:
                return
            process.dropped, process.out_of_files = True, lacking_files
            # A process may connect again, and be given up again.
            counted = process.identity in self._given_up
            self._given_up.add(process.identity)
        if process.hooked:
            self.note(f"{process.label} is no longer traced: {why}")
        elif process.attached:
            process.hook_failure = process.hook_failure or f"is not traced: {why}"
        else:
            self.note(f"{process.label} is not traced: {why}")
            if not counted:
                self.record_missed(OUT_OF_FILES if lacking_files else UNHOOKED, process.started)

    def unmeasured_ns(self) -> dict[str, int]:
        """Return, by reason, an upper bound for the time in ns in which missed processes may have launched kernels unseen."""
        end = min(_boottime(), self._ended)
        with self.lock:
            return {
                reason: round((missed.ended + missed.open * end - missed.since) * 1e9)
                for reason, missed in self.missed.items()
                if reason not in (NO_DRIVER, NO_ROCR, OTHER_USER)
            }

    def end(self) -> None:
        """Record that the measurement ends now."""
        self.ended_ns, self._ended = time.monotonic_ns(), _boottime()

    def registers_until(self) -> float:
        """Return until when (time.monotonic()) to wait for ptxas to count registers: not before the measurement has stopped.

        Called by the thread that runs `Session.intervals`."""
        if self.stopped and not self._registers_until:
            self._registers_until = time.monotonic() + self._registers_wait
        return self._registers_until

    def note_once(self, text: str) -> None:
        """Give a notice, unless the same text was already given. From any thread."""
        with self.lock:
            if text in self._noted:
                return
            self._noted.add(text)
        self.note(text)

    def ring_size(self, definition: MapDefinition) -> int:
        """Return the size of a ring's records on each GPU, in bytes."""
        if definition.name in (maps.PRINTS, maps.LONG_PRINTS):
            return definition.capacity
        return self.follow.ring_size or definition.capacity

    def _spec(self, definition: MapDefinition) -> MapSpec:
        if definition.kind == SHARED:
            place = Place.SHARED
            size = maps.pad8(definition.value_size) * definition.max_entries
            return MapSpec(size, 0, b"", place=place)
        if is_ring(definition):
            place = Place.GPU_RING if self.follow.ring_in_gpu else Place.HOST_RING
            return MapSpec(self.ring_size(definition), maps.record_stride(definition), b"", place=place)
        fixed = maps.storage_size(definition)
        per_unit = maps.storage_size(definition, 1) - fixed
        unit = UNITS[maps.SHAPED[definition.kind]] if definition.kind in maps.SHAPED else Unit.CONTEXT
        return MapSpec(fixed, per_unit, maps.header(definition), unit)

    def _host_programs(self) -> Sequence[HostCode]:
        """Return the host programs that agents run."""
        host, made = self.host, list[HostCode]()
        if host is None:
            return made
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
                HostCode(host.point_of(native.function), native.code, bytes(parameters), tuple(arguments))
            )
        return made


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _every_kernel(name: str) -> bool:
    from gpubpf import names  # imported here because the import is slow

    return names.chosen((), name)


def is_ring(definition: MapDefinition) -> bool:
    return definition.kind == "ringbuf"


def limit_notices(note: Callable[[str], None]) -> Callable[[str], None]:
    """Return a `note` that passes on at most NOTICES_PER_KIND notices of a kind, followed by a notice about the limit.

    Traced processes could cause any number of notices. Two are of one kind if they differ only in numbers and process names."""
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
            note("further notices of this kind are suppressed")

    return limited
