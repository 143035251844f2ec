"""The messages between tool and agent, encoded and decoded. `src/wire.h` is the agent's side.

A frame is ``{u32 type, u32 length}`` and `length` bytes, little-endian; a file descriptor may come with its first byte. The agent runs
in the traced process, so what it sends is untrusted. All messages go through a `TargetSocket`, which never waits longer than its
caller allows. The functions check every length, count and offset, and raise `Malformed`. They
read the agent's files, which `in_memory` accepts, with `pread`. Map only files that `sealed` accepts, because the owner of any other
could shrink it.

traced/server.py decodes messages; traced/workers.py and session/session.py encode them; traced/ and session/ use the types.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpubpf.agent.definitions import (
    CONTROL,
    FRAME_LIMIT,
    IMAGE_LIMIT,
    LEAST_CAPACITY,
    LOG_LIMIT,
    MEMORY_LIMIT,
    NO_FIELD,
    NO_RECORD,
    PROTOCOL_VERSION,
    RING_LIMIT,
    SHARDS,
    SITES_LIMIT,
    SLOT,
    SLOTS,
    STACK_LIMIT,
    FoundFlag,
    Message,
    PatchFailed,
    Place,
    Reason,
    Unit,
    Vendor,
    WelcomeFlag,
)
from gpubpf.ebpf import maps
from gpubpf.ebpf.bytecode import HOST_POINTS
from gpubpf.ebpf.maps import RING_PAGE, RING_SHARD
from gpubpf.errors import SessionError
from gpubpf.process import limits, target_socket
from gpubpf.record import Record, field, replace

GPUS = 256  # of a machine, at most
REASON_NAMES = tuple(reason.name.lower().replace("_", " ") for reason in Reason)


class Malformed(SessionError):
    """A process sent a message that no agent sends. `what`: what is wrong, such as "too many rings"."""

    def __init__(self, what: str) -> None:
        super().__init__(f"its agent sent an invalid message ({what})")


class MapSpec(Record):
    """The storage of a map, in bytes.

    A map of a context has `fixed` bytes. A map of an instance has `fixed` bytes, and `per_unit` for each unit (in a site array: for
    each site in each shard). A ring has `fixed` bytes of records, `per_unit` bytes apart.
    initial: the first bytes; the rest is zero."""

    fixed: int
    per_unit: int
    initial: bytes
    unit: Unit = Unit.CONTEXT
    place: Place = Place.GPU


class HostCode(Record):
    """A host program that runs in the traced process at `point`, one of HOST_POINTS.

    arguments: (kind, map number, value), as in src/log/host_program.h."""

    point: str
    code: bytes
    parameters: bytes
    arguments: tuple[tuple[int, int, int], ...]


class KeptMap(Record):
    """A map with rows of a word for each of `slots` launches, and where the largest word of a launch is kept after a wait.

    source, target: the maps, by number; `target` is a shared array. offset: of the word in an element of `target`, in bytes."""

    source: int
    target: int
    offset: int
    slots: int


class AgentConfig(Record):
    """What WELCOME asks an agent to do; see `Plan` and `Follow` in traced/measurement.py.

    map_memory: bytes for each context. launches: the first and the last launch to instrument; None: no last one.
    image_wait: seconds that a module load waits for the sidecar. log_records: size of the operation log, a power of two; 0: no log.
    budget: measure launches as `set_one_in` says. pump: send a snapshot after so many launches, without being asked; 0: never.
    kept: where to keep values of the latest launches; None: nowhere.
    host: host programs that the agent runs; or the HOST_POINTS at which programs run in the Linux kernel.
    clock_kernels: compute capability (90 for 9.0) → cubin of clock.ptx; where none suits, the driver compiles the PTX."""

    maps: Sequence[MapSpec]
    map_memory: int
    launches: tuple[int, int | None] = (1, None)
    sample: int = 1
    image_wait: float = 0.0
    memory_is_zero: bool = False
    log_records: int = 0
    stamps: bool = False
    stacks: bool = False
    allocation_stacks: bool = False
    graphs: bool = False
    match_all: bool = False
    budget: bool = False
    pump: int = 0
    kept: KeptMap | None = None
    host: Sequence[HostCode] | frozenset[str] = ()
    clock_kernels: Mapping[int, bytes] = field(default_factory=dict)


class BlockField(Record):
    """Where the launch block has the address of map number `map`, and the capacity of an array by launch shape or site."""

    map: int
    base_offset: int
    capacity_offset: int | None


class KernelLayout(Record):
    """The parameters of an instrumented kernel: the application's `parameters`, then `block` at `block_offset`.

    pid_tgid, kernel, epoch: offsets in the block of the launching thread, the kernel's number and the allocation epoch; None: not
    there. limited: the name of a second copy, for launches that the first does not fit; "": none. shape, tick, executions: offsets of
    the launch's shape, of the length of the GPU's tick, and of the address of the copy's counter of executions. wave: lanes of a warp.
    patched: the program's own kernel is launched, which has patches; `block` goes into the table of PATCH_TABLE.
    build: see `InstancePart`. compute_units, most_threads, original_threads, references: as in `src/messages.h`."""

    name: str
    parameters: Sequence[int]  # bytes of each
    block_offset: int
    block: bytes
    fields: tuple[BlockField, ...]
    pid_tgid: int | None = None
    waits: bool = True  # its blocks may wait for each other
    sites: int = 0
    kernel: int | None = None
    epoch: int | None = None
    limited: str = ""
    shape: int | None = None
    tick: int | None = None
    wave: int = 32
    compute_units: int = 1
    most_threads: int = NO_FIELD
    original_threads: int = NO_FIELD
    references: Sequence[tuple[int, int]] = ()
    build: int = 0
    executions: int | None = None
    patched: bool = False


class VariableSlot(Record):
    """Slot `index` of the table of variables. kernels: those that need it; empty: all.

    entry, refusal: as in `gpubpf.inject.values.InjectedVariable`."""

    name: str
    index: int
    copied: bool
    kernels: tuple[str, ...] = ()
    entry: int | None = None
    refusal: str = ""


class Image(Record):
    """A module that the process loads; of AMD GPUs a code object, which says itself which GPU it is for.

    linked: how many inputs cuLink, NVRTC or nvJitLink made it from; 0: unknown.
    ptx: bytes of PTX behind the image in its file: the inputs that were PTX, with a zero byte between two texts.
    lto: how many of the inputs were LTO-IR."""

    request: int
    compute_capability: int  # major * 10 + minor; 0: of AMD GPUs
    gpu: int
    size: int
    linked: int = 0
    ptx: int = 0
    lto: int = 0


class FoundKernel(Record):
    """A kernel of a module that was loaded before the agent, as the driver describes it. -1: the driver does not say.

    parameters: (offset, size) of each, in bytes; None: unknown.
    ptx_version: the virtual architecture that it was compiled from, as major * 10 + minor."""

    name: str
    parameters: tuple[tuple[int, int], ...] | None
    registers: int = -1
    shared: int = -1  # static, bytes
    max_threads: int = -1  # of a block
    ptx_version: int = -1


class Found(Record):
    """A module that was loaded before the agent, and has launched a kernel. The tool answers with a sidecar, as for `Image`.

    names: mangled names of its kernels. whole: `names` has all of them. kernels: those that were launched."""

    request: int
    compute_capability: int  # major * 10 + minor
    gpu: int
    whole: bool
    names: tuple[str, ...]
    kernels: tuple[FoundKernel, ...]


class WantedKernel(Record):
    """A kernel (mangled) of a large module that is launched for the first time. The tool answers with its copy, perhaps with others.

    module: the request that the tool has answered with the list of such kernels (`later` in `sidecar`)."""

    request: int
    compute_capability: int  # major * 10 + minor
    gpu: int
    module: int
    name: str


class PatchTable(Record):
    """Where a context has the table for patches (`lower.patch_function`). The tool answers with the patches."""

    request: int
    compute_capability: int  # major * 10 + minor
    gpu: int
    address: int


class ArrayPart(Record):
    """An array of an instance in the snapshot's file: map number, offset, size, capacity in units.

    The capacity of a site array is as `sites_and_shards` takes it."""

    map: int
    offset: int
    size: int
    capacity: int


class InstancePart(Record):
    """The arrays of a kernel and launch shape. Extents of 0: the arrays that all shapes of the kernel share.

    build: which of the kernels with this name it is, of those whose sites differ (`TracedProcess.sites`)."""

    slot: int
    build: int
    grid: tuple[int, int, int]
    block_dim: tuple[int, int, int]
    launches: int
    arrays: tuple[ArrayPart, ...]

    @property
    def by_shape(self) -> bool:
        """It belongs to one launch shape."""
        return self.grid[0] != 0


class RingPart(Record):
    """A ring in a snapshot: the offset of its control block and, for a ring in GPU memory, offset and size of its data."""

    map: int
    control: int
    offset: int
    size: int


class Snapshot(Record):
    """The maps of one context. The file that comes with it has `size` bytes; `instances`, `shared` and `rings` have offsets in it.

    shared: maps that all instances share: map number → (offset, size). taken_ns: when copying began, on the host's clock.
    flags: of SnapshotFlag."""

    sequence: int
    context: int
    gpu: int
    flags: int
    size: int
    taken_ns: int
    instances: tuple[InstancePart, ...]
    shared: Mapping[int, tuple[int, int]]
    rings: tuple[RingPart, ...] = ()


class RingPlace(Record):
    """A ring that a process made: `shards` of `capacity` records, each `stride` bytes."""

    map: int
    context: int
    gpu: int
    place: Place
    shards: int
    capacity: int
    stride: int

    @property
    def control_size(self) -> int:
        """Bytes of the control block."""
        return maps.HEADER + RING_SHARD * self.shards

    @property
    def first(self) -> int:
        """The offset of the first record, after `RING_SHARD` bytes for each shard."""
        return -(-RING_SHARD * self.shards // RING_PAGE) * RING_PAGE

    @property
    def size(self) -> int:
        """Bytes of the ring's data."""
        return self.first + -(-self.shards * self.capacity * self.stride // RING_PAGE) * RING_PAGE


class StackFrame(Record):
    """A return address. offset, file: where it is; 0 and "" outside files. symbol: the name that the process itself found."""

    address: int
    offset: int
    file: str
    symbol: str


class PayloadReader:
    """Decodes a payload from front to back. Raises Malformed if it is too short."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise Malformed("a message that is too short")
        self._at += size
        return self._data[self._at - size : self._at]

    def u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def i32(self) -> int:
        return int.from_bytes(self._take(4), "little", signed=True)

    def u64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def count(self, least: int) -> int:
        """Return a number of items. Raises Malformed if the payload is too short for so many of `least` bytes each."""
        n = self.u32()
        if n * least > len(self._data) - self._at:
            raise Malformed("a count larger than its message")
        return n

    def text(self) -> str:
        return self._take(self.u32()).decode("utf-8", "backslashreplace")

    def triple(self) -> tuple[int, int, int]:
        x, y, z = struct.unpack("<3I", self._take(12))
        return x, y, z


def hello(payload: bytes) -> tuple[int, str, Vendor]:
    """Return the driver's version (12080 for CUDA 12.8; 0: unknown), the name of the process, and whose GPUs the agent serves.

    From AMD's agent, the first value is how often the process initialized ROCr before.
    """
    r = PayloadReader(payload)
    if r.u32() != PROTOCOL_VERSION:
        raise Malformed("a greeting of another protocol version")
    version, name, vendor = r.u32(), r.text()[:64], r.u32()
    if vendor not in tuple(Vendor):
        raise Malformed("a greeting of an unknown vendor")
    return version, name, Vendor(vendor)


def hooked(payload: bytes) -> tuple[list[str], dict[str, list[str]], tuple[int, ...]]:
    """Decode HOOKED: lines "function: reason" of the functions that cannot be hooked, and a number for each GPU.

    The first value: functions that the agent needs; empty if the hooks are live. The second: optional ones, by what the agent lacks
    without them (LACKS_... in definitions.py). The third: the compute capabilities of the GPUs on which a running process has
    primary contexts; from AMD's agent, the lanes of each GPU's waves."""
    r = PayloadReader(payload)
    failed, left_out = (r.text()[:4096].splitlines() for _ in range(2))
    by_lack: dict[str, list[str]] = {}
    for line in left_out:
        lack, _, rest = line.partition(": ")
        by_lack.setdefault(lack, []).append(rest)
    return failed, by_lack, tuple(cc for cc in (r.u32() for _ in range(r.count(4))) if 10 <= cc < 1000)


def image(payload: bytes, vendor: Vendor = Vendor.NVIDIA) -> Image:
    """Decode IMAGE."""
    r = PayloadReader(payload)
    made = Image(r.u32(), r.u32(), r.u32(), r.u64(), r.u32(), r.u64(), r.u32())
    valid = made.compute_capability == 0 if vendor == Vendor.AMD else 10 <= made.compute_capability < 1000
    if made.size + made.ptx > IMAGE_LIMIT or not valid:
        raise Malformed("an image of an invalid size or compute capability")
    return made


def found(payload: bytes) -> Found:
    """Decode FOUND."""
    r = PayloadReader(payload)
    request, compute_capability, gpu, flags = r.u32(), r.u32(), r.u32(), r.u32()
    if not 10 <= compute_capability < 1000:
        raise Malformed("a module of an invalid compute capability")
    names = tuple(r.text() for _ in range(r.count(4)))
    kernels = []
    for _ in range(r.count(28)):
        name, told = r.text(), r.u32()
        parameters = tuple((r.u32(), r.u32()) for _ in range(r.count(8)))
        kernels.append(FoundKernel(name, parameters if told else None, *(r.i32() for _ in range(4))))
    if not kernels:
        raise Malformed("a module without kernels")
    return Found(request, compute_capability, gpu, bool(flags & FoundFlag.ALL_NAMES), names, tuple(kernels))


def wanted_kernel(payload: bytes) -> WantedKernel:
    """Decode KERNEL."""
    r = PayloadReader(payload)
    wanted = WantedKernel(r.u32(), r.u32(), r.u32(), r.u32(), r.text())
    if not 10 <= wanted.compute_capability < 1000:
        raise Malformed("a kernel of an invalid compute capability")
    return wanted


def patch_table(payload: bytes) -> PatchTable:
    """Decode PATCH_TABLE."""
    r = PayloadReader(payload)
    table = PatchTable(r.u32(), r.u32(), r.u32(), r.u64())
    if not 10 <= table.compute_capability < 1000:
        raise Malformed("a table of an invalid compute capability")
    return table


def ready(payload: bytes) -> int:
    """Return the request whose copies are installed."""
    return PayloadReader(payload).u32()


def slot_and_text(payload: bytes) -> tuple[int, str]:
    """Decode NAME (the kernel's name) or REFUSED (the reason): the slot, and the text."""
    r = PayloadReader(payload)
    slot, text = r.u32(), r.text()
    if slot >= SLOTS or len(text) > 65536:
        raise Malformed("a kernel number out of range")
    return slot, text


class NoRoom(Record):
    """A launch ran the original kernel because no copy fits: the first such launch of the kernel in `slot`.

    needed, allowed: blocks that must be resident at once, and those of a copy that can be; allowed is None if the driver does not say.
    registers, original: registers of a thread in this copy, and in the original; 0 if the driver does not say.
    """

    slot: int
    threads: int  # of a block
    needed: int
    allowed: int | None
    registers: int
    original: int


def no_room(payload: bytes) -> NoRoom:
    """Decode NO_ROOM."""
    r = PayloadReader(payload)
    slot, threads, needed, allowed, registers, original = r.u32(), r.u32(), r.u64(), r.u64(), r.u32(), r.u32()
    if slot >= SLOTS:
        raise Malformed("a kernel number out of range")
    return NoRoom(slot, threads, needed, None if allowed == NO_RECORD else allowed, registers, original)


class KernelFault(Record):
    """A kernel ended with an error, and its context cannot be used any more.

    gpu       ordinal
    error     CUresult, such as 700
    kernel    mangled name; None if only the error is known, as on a GPU. Then the fields below have no meaning
    source    file and line, if the kernel has line information
    block, thread   of the first thread that failed
    address   of the access; None if it was not an access to memory
    patch     whether it failed in a patch of the tool (--sass)
    """

    gpu: int
    error: int
    kernel: str | None = None
    source: tuple[str, int] | None = None
    block: tuple[int, int, int] = (0, 0, 0)
    thread: tuple[int, int, int] = (0, 0, 0)
    address: int | None = None
    patch: PatchFailed = PatchFailed.NO


def kernel_failed(payload: bytes) -> KernelFault:
    """Decode KERNEL_FAILED."""
    r = PayloadReader(payload)
    gpu, error, number = r.u32(), r.u32(), r.u32()
    if number > max(PatchFailed):
        raise Malformed("an unknown place of a fault")
    patch = PatchFailed(number)
    if not r.u32():
        return KernelFault(gpu, error, patch=patch)
    kernel, file, line = r.text(), r.text(), r.u32()
    source = (file, line) if file and line else None
    return KernelFault(gpu, error, kernel, source, r.triple(), r.triple(), r.u64() or None, patch)


def snapshot(payload: bytes) -> Snapshot:
    """Decode SNAPSHOT. Checks that all maps lie in the file's `size` bytes, but not the file itself."""
    r = PayloadReader(payload)
    sequence, context, gpu, flags, size, taken_ns = r.u32(), r.u32(), r.u32(), r.u32(), r.u64(), r.u64()
    if size > MEMORY_LIMIT:
        raise Malformed("map memory of an invalid size")

    left = size

    def within(offset: int, length: int) -> None:
        nonlocal left
        left -= length
        if offset > size or length > size - offset or left < 0:
            raise Malformed("a map outside its memory")

    instances = []
    for _ in range(r.count(28)):
        slot, build, grid, block_dim, launches = r.u32(), r.u32(), r.triple(), r.triple(), r.u64()
        arrays = tuple(ArrayPart(r.u32(), r.u64(), r.u64(), r.u64()) for _ in range(r.count(28)))
        if slot >= SLOTS:
            raise Malformed("a kernel number out of range")
        for array in arrays:
            within(array.offset, array.size)
        instances.append(InstancePart(slot, build, grid, block_dim, launches, arrays))
    shared = {}
    for _ in range(r.count(20)):
        number, offset, length = r.u32(), r.u64(), r.u64()
        within(offset, length)
        shared[number] = (offset, length)
    rings = []
    for _ in range(r.count(28)):
        ring = RingPart(r.u32(), r.u64(), r.u64(), r.u64())
        within(ring.control, maps.HEADER)
        within(ring.offset, ring.size)
        rings.append(ring)
    return Snapshot(sequence, context, gpu, flags, size, taken_ns, tuple(instances), shared, tuple(rings))


def ring(payload: bytes) -> RingPlace:
    """Decode RING."""
    r = PayloadReader(payload)
    number, context, gpu, place, shards, _ = (r.u32() for _ in range(6))
    made = RingPlace(number, context, gpu, Place.HOST_RING, shards, r.u64(), r.u64())
    if place == Place.GPU_RING:
        made = replace(made, place=Place.GPU_RING)
    capacity = made.capacity
    if (
        not 1 <= shards <= SHARDS
        or capacity < LEAST_CAPACITY
        or capacity & (capacity - 1)
        or made.size > RING_LIMIT
    ):
        raise Malformed("a ring of an invalid size")
    return made


def log(payload: bytes) -> int:
    """Return the records that the log has room for."""
    records = PayloadReader(payload).u64()
    if not 0 < records <= LOG_LIMIT or records & (records - 1):
        raise Malformed("a log of an invalid size")
    return records


def context(payload: bytes) -> tuple[int, int]:
    """Return the number of a context, and the ordinal of its GPU."""
    r = PayloadReader(payload)
    number, gpu = r.u32(), r.u32()
    if gpu >= GPUS:
        raise Malformed("an invalid GPU number")
    return number, gpu


def stack(payload: bytes) -> tuple[int, tuple[StackFrame, ...]]:
    """Return the number of a host stack, and its frames, innermost first."""
    r = PayloadReader(payload)
    number, count = r.u32(), r.count(24)
    if count > STACK_LIMIT:
        raise Malformed("a stack that is too deep")
    return number, tuple(StackFrame(r.u64(), r.u64(), r.text()[:4096], r.text()[:4096]) for _ in range(count))


def drained(payload: bytes) -> tuple[int, bool]:
    """Return the sequence number of the request, and whether every context was read."""
    r = PayloadReader(payload)
    return r.u32(), r.u32() != 0


def _bytes(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def frame(kind: int, payload: bytes) -> bytes:
    """Return a frame: header and payload."""
    return struct.pack("<II", kind, len(payload)) + payload


def welcome(config: AgentConfig, process: int) -> bytes:
    """Return the WELCOME frame. `process`: the number of the process, from 1; the ids of its launches begin with it."""
    last = config.launches[1] if config.launches[1] is not None else (1 << 64) - 1
    flags = sum(
        bit
        for bit, on in (
            (WelcomeFlag.MEMORY_IS_ZERO, config.memory_is_zero),
            (WelcomeFlag.STAMPS, config.stamps),
            (WelcomeFlag.STACKS, config.stacks),
            (WelcomeFlag.GRAPHS, config.graphs),
            (WelcomeFlag.MATCH_ALL, config.match_all),
            (WelcomeFlag.ALLOCATION_STACKS, config.allocation_stacks),
            (WelcomeFlag.BUDGET, config.budget),
        )
        if on
    )
    parts = [
        struct.pack("<IQQQQ", PROTOCOL_VERSION, config.map_memory, config.launches[0], last, config.sample),
        struct.pack("<IIQQQ", int(config.image_wait * 1000), flags, config.log_records, config.pump, process),
        _bytes(f"{os.path.basename(sys.argv[0]).removesuffix('.py')}, pid {os.getpid()}".encode()[:100]),
        struct.pack("<I", len(config.maps)),
    ]
    for m in config.maps:
        parts.append(struct.pack("<QQII", m.fixed, m.per_unit, m.unit, m.place) + _bytes(m.initial))
    kept = config.kept or KeptMap(0, 0, 0, 0)
    parts.append(struct.pack("<IIII", kept.source, kept.target, kept.offset, kept.slots))
    parts.append(struct.pack("<I", len(config.clock_kernels)))
    parts += [struct.pack("<I", cc) + _bytes(cubin) for cc, cubin in sorted(config.clock_kernels.items())]
    if not config.host:
        parts.append(struct.pack("<I", 0))
    elif isinstance(config.host, frozenset):
        parts.append(struct.pack("<II", 1, sum(1 << HOST_POINTS.index(point) for point in config.host)))
    else:
        parts.append(struct.pack("<II", 2, len(config.host)))
        for program in config.host:
            parts.append(struct.pack("<I", HOST_POINTS.index(program.point)))
            parts.append(_bytes(program.code) + _bytes(program.parameters))
            parts.append(struct.pack("<I", len(program.arguments)))
            parts += [struct.pack("<IIQ", *argument) for argument in program.arguments]
    return frame(Message.WELCOME, b"".join(parts))


def shared(number: int, size: int) -> bytes:
    """Return the frame that goes with the file of shared map `number`. Send it before WELCOME."""
    return frame(Message.SHARED, struct.pack("<IQ", number, size))


def consumed(number: int, context: int, positions: Sequence[int]) -> bytes:
    """Return the frame that says up to which position each shard of a ring in GPU memory was read."""
    return frame(
        Message.CONSUMED, struct.pack(f"<III{len(positions)}Q", number, context, len(positions), *positions)
    )


def drain(sequence: int, wait: float, flags: int) -> bytes:
    """Return the frame that asks for snapshots. `wait`: seconds that running kernels get to finish first. `flags`: of DrainFlag."""
    return frame(Message.DRAIN, struct.pack("<III", sequence, int(wait * 1000), flags))


def working() -> bytes:
    """Return the frame that tells an agent that its sidecar is being made."""
    return frame(Message.WORKING, b"")


def patched() -> bytes:
    """Return the frame that tells an agent that the tool has applied its patches."""
    return frame(Message.PATCHED, b"")


def sidecar(
    request: int,
    image_size: int,
    kernels: Iterable[KernelLayout],
    refusals: Mapping[str, str],
    variables: Sequence[VariableSlot],
    ahead: int | None = None,
    launched: Sequence[tuple[str, str]] = (),
    later: Sequence[str] = (),
    first: Sequence[str] = (),
    patches: Sequence[tuple[int, str]] = (),
) -> bytes:
    """Return the answer to an image; the sidecar's own image goes with it as a file. Empty if no kernel matches.

    ahead: nobody has asked for the sidecar yet; it is for contexts on GPUs of this compute capability. launched: kernels that other
    kernels launch, each with the name of its copy. later: kernels whose copies the agent asks for at their first launch.
    first: those that it asks for now. patches: the image has these patches: numbers of instructions and names of functions."""
    kernels = tuple(kernels)
    parts = [
        b"" if ahead is None else struct.pack("<I", ahead),
        struct.pack("<IQI", request, image_size, len(kernels)),
    ]
    for k in kernels:
        parts.append(
            _bytes(k.name.encode())
            + _bytes(k.limited.encode())
            + struct.pack(f"<I{len(k.parameters)}I", len(k.parameters), *k.parameters)
            + struct.pack(
                "<15I",
                k.block_offset,
                NO_FIELD if k.pid_tgid is None else k.pid_tgid,
                k.waits,
                k.sites,
                k.build,
                NO_FIELD if k.kernel is None else k.kernel,
                NO_FIELD if k.epoch is None else k.epoch,
                NO_FIELD if k.shape is None else k.shape,
                NO_FIELD if k.tick is None else k.tick,
                NO_FIELD if k.executions is None else k.executions,
                k.wave,
                k.compute_units,
                k.most_threads,
                k.original_threads,
                k.patched,
            )
            + _bytes(k.block)
        )
        parts.append(struct.pack("<I", len(k.fields)))
        for f in k.fields:
            capacity = NO_FIELD if f.capacity_offset is None else f.capacity_offset
            parts.append(struct.pack("<III", f.map, f.base_offset, capacity))
        parts.append(struct.pack("<I", len(k.references)))
        parts += [struct.pack("<qQ", *reference) for reference in k.references]
    parts.append(struct.pack("<I", len(refusals)))
    parts += [_bytes(name.encode()) + _bytes(reason.encode()) for name, reason in refusals.items()]
    parts.append(struct.pack("<I", len(variables)))
    for v in variables:
        entry = NO_FIELD if v.entry is None else v.entry
        parts.append(_bytes(v.name.encode()) + struct.pack("<III", v.index, v.copied, entry))
        parts.append(_bytes(v.refusal.encode()) + struct.pack("<I", len(v.kernels)))
        parts += [_bytes(name.encode()) for name in v.kernels]
    parts.append(struct.pack("<I", len(launched)))
    parts += [_bytes(name.encode()) + _bytes(copy.encode()) for name, copy in launched]
    for names in (later, first):
        parts.append(struct.pack("<I", len(names)))
        parts += [_bytes(name.encode()) for name in names]
    parts.append(struct.pack("<I", len(patches)))
    parts += [struct.pack("<I", instruction) + _bytes(name.encode()) for instruction, name in patches]
    return frame(Message.SIDECAR if ahead is None else Message.AHEAD, b"".join(parts))


def sites_and_shards(capacity: int) -> tuple[int, int]:
    """Split the capacity of a site array into sites and shards. Raises Malformed if it is invalid."""
    sites, shards = maps.sites_and_shards(capacity)
    if sites > SITES_LIMIT or shards > SHARDS or shards & (shards - 1):
        raise Malformed("an invalid number of sites")
    return sites, shards


def _needs_file(kind: int, payload: bytes) -> bool:
    if kind == Message.STUBS:  # a process that could not make the file says so
        return payload[:4] == struct.pack("<I", 1)
    if kind == Message.RING:
        return payload[12:16] == struct.pack("<I", Place.HOST_RING)
    return kind in (Message.HELLO, Message.IMAGE, Message.SNAPSHOT, Message.LOG, Message.PATCHES)


class Frames:
    """Splits a byte stream into frames, and gives each frame that needs a file (`_needs_file`) the next file descriptor received."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._files: list[int] = []

    def feed(self, data: bytes, files: Sequence[int]) -> list[tuple[int, bytes, int | None]]:
        """Return the frames that are now complete: (type, payload, file). The caller closes the files."""
        self._files += files
        self._buffer += data
        frames: list[tuple[int, bytes, int | None]] = []
        at = 0
        while len(self._buffer) - at >= 8:
            kind, length = struct.unpack_from("<II", self._buffer, at)
            if length > FRAME_LIMIT:
                self._keep(frames)
                raise Malformed("a message that is too long")
            if len(self._buffer) - at - 8 < length:
                break
            payload = bytes(self._buffer[at + 8 : at + 8 + length])
            file = self._files.pop(0) if self._files and _needs_file(kind, payload) else None
            frames.append((kind, payload, file))
            at += 8 + length
        del self._buffer[:at]
        if len(self._files) > limits.WAITING_FILES:
            self._keep(frames)
            raise Malformed("unexpected file descriptors")
        return frames

    def _keep(self, frames: Iterable[tuple[int, bytes, int | None]]) -> None:
        """Take back the files of frames that nobody gets, for `close`."""
        self._files += [file for _, _, file in frames if file is not None]

    def take_files(self) -> list[int]:
        """Return the files of incomplete frames. The caller closes them."""
        files, self._files = self._files, []
        return files

    def close(self) -> None:
        """Discard incomplete frames, and close the files that belong to them."""
        for file in self.take_files():
            target_socket.discard(file)
        self._buffer = bytearray()

    @property
    def unfinished(self) -> int:
        """The number of bytes of incomplete frames."""
        return len(self._buffer)


def in_memory(file: int) -> bool:
    """Return whether a file is a memfd that can be read and written.

    Reading it at any place neither fails nor waits, unlike pipes, devices, files that a program serves (FUSE), and huge pages, which
    may run out."""
    try:
        fcntl.fcntl(file, fcntl.F_GET_SEALS)  # fails for files elsewhere
        plain = os.fstatvfs(file).f_bsize == mmap.PAGESIZE
        return plain and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    except OSError:
        return False


def sealed(file: int, size: int) -> bool:
    """Return whether the file has at least `size` bytes and cannot shrink, so that mapping it is safe."""
    try:
        return (
            bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
            and os.fstat(file).st_size >= size
        )
    except OSError:
        return False


def read_file(file: int, size: int, offset: int = 0) -> bytes:
    """Return `size` bytes of a file from a traced process; fewer if the file is shorter."""
    parts = []
    while size > 0:
        part = os.pread(file, min(size, 1 << 28), offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Counters(Record):
    """Launches of one kernel name, from the control block."""

    seen: int = 0
    instrumented: int = 0
    threads: int = 0  # of the instrumented launches
    reasons: Mapping[str, int] = field(default_factory=dict)  # by one of REASON_NAMES, without zeros
    limited: int = 0  # of the instrumented launches: with the limited copy


def read_control(file: int) -> tuple[list[Counters], int]:
    """Return the counters by slot, and the launches of kernels whose name is unknown."""
    used, unnamed = _control(file, "used", "unnamed")
    data = read_file(file, min(used, SLOTS) * SLOT.size, CONTROL.size)
    slots = [_counters(data[at : at + SLOT.size]) for at in range(0, len(data) - SLOT.size + 1, SLOT.size)]
    # All names beyond the slots share the last one.
    others = _counters(read_file(file, SLOT.size, CONTROL.size + SLOT.size * (SLOTS - 1)))
    if others.seen and used < SLOTS:
        slots += [Counters()] * (SLOTS - 1 - len(slots)) + [others]
    return slots, unnamed


def set_one_in(file: int, slot: int, one_in: int) -> None:
    """With --budget, let the agent measure one launch in `one_in` of the kernel in this slot."""
    os.pwrite(file, struct.pack("<Q", one_in), CONTROL.size + SLOT.size * slot + SLOT.offset("one_in"))


def graph_launches(file: int) -> int:
    """Return the launches of CUDA graphs for which it is unknown how often their kernels ran."""
    return _control(file, "graphs")[0]


def graph_launches_before(file: int) -> int:
    """Return those of `graph_launches` whose graph was instantiated before the agent was loaded, so its nodes are unknown."""
    return _control(file, "graphs_before")[0]


class HookCalls(NamedTuple):
    """Hooked calls of a process, and the time that the agent took in them, in ns.

    One call in 64 is timed. timed: the number of timed calls; long: those of more than 50 µs. short_ns, long_ns: the time of the other
    timed calls, of the long ones. rare_ns: the time of rare work, which is always timed and is not in the other numbers."""

    calls: int = 0
    timed: int = 0
    short_ns: int = 0
    long: int = 0
    long_ns: int = 0
    rare_ns: int = 0

    @property
    def ns(self) -> int | None:
        """An estimate of the time of all calls; None: no call was timed.

        A timed call is long if its thread waited or was preempted, and then says nothing about the 63 others. So it counts once,
        unless long calls are usual in this program: three or more, and more than one in 20."""
        if not self.timed:
            return self.rare_ns or (None if self.calls else 0)
        if self.long >= 3 and 20 * self.long > self.timed:
            return self.calls * (self.short_ns + self.long_ns) // self.timed + self.rare_ns
        short = self.timed - self.long
        return (self.calls * self.short_ns // short if short else 0) + self.long_ns + self.rare_ns


def hook_calls(file: int) -> HookCalls:
    """Return the counts and times of hooked calls from a control block."""
    names = ("timed", "ticks_ns", "long", "long_ns", "rare_ns")
    told, rest, *numbers = _control(file, "hooks", "hooks_rest", *(f"hooks_{name}" for name in names))
    return HookCalls(told + rest, *numbers)


def virtual_times(file: int) -> tuple[int, int]:
    """Return when the agent attached, and when it was last read or the process announced its end, in ns on the virtual clock.

    0: that has not happened yet, or the clock is real."""
    started, ended = _control(file, "started_ns", "ended_ns")
    return started, ended


def cupti_operations(file: int) -> tuple[int, int]:
    """Return how many operations CUPTI was to record, and how many it has reported."""
    given, reported = _control(file, "cupti_given", "cupti_reported")
    return given, reported


def was_cut(file: int) -> bool:
    """Return whether the process closed the agent's file descriptors, and with them the connection to the tool."""
    return _control(file, "cut")[0] != 0


def grids(file: int) -> int:
    """Return how many grids instrumented kernels had launched when the maps were last read (dynamic parallelism)."""
    return _control(file, "grids")[0]


class LostCalls(NamedTuple):
    """Calls of patches that counted nothing, when the maps were last read.

    unknown: in launches that were not measured.
    elsewhere: in code of no measured kernel, such as functions that are not inlined."""

    unknown: int = 0
    elsewhere: int = 0


def lost_calls(file: int) -> LostCalls:
    """Return the calls of patches that counted nothing, from a control block."""
    return LostCalls(*_control(file, "calls_unknown", "calls_elsewhere"))


def _control(file: int, *names: str) -> list[int]:
    """Return fields of the control block; zeros if the file is too short."""
    data = read_file(file, CONTROL.size).ljust(CONTROL.size, b"\0")
    return [CONTROL.value(data, name) for name in names]


def _counters(data: bytes) -> Counters:
    if len(data) < SLOT.size:
        return Counters()
    seen, instrumented, threads = (SLOT.value(data, name) for name in ("seen", "instrumented", "threads"))
    reasons = zip(REASON_NAMES, SLOT.values(data, "reasons"), strict=False)
    named = {name: n for name, n in reasons if n}
    return Counters(seen, instrumented, threads, named, SLOT.value(data, "limited"))
