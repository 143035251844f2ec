"""What tool and agent say to each other. `src/wire.h` and `src/control.h` are the other side.

A frame is ``{u32 type, u32 length}`` and `length` bytes, little-endian; a file descriptor may come with its first byte. What an
agent sends is untrusted: it runs in the traced process. Every length, count and offset is checked, and files that it hands over
are read with `pread`, never mapped (their owner could shrink them), but for those that `sealed` says cannot shrink.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpubpf.agent.definitions import (
    FRAME_LIMIT,
    NO_FIELD,
    PROTOCOL_VERSION,
    SLOTS,
    FoundFlag,
    Message,
    Place,
    Reason,
    Unit,
    WelcomeFlag,
)
from gpubpf.ebpf.bytecode import HOST_POINTS
from gpubpf.ebpf.maps import RING_PAGE, RING_SHARD
from gpubpf.errors import SessionError

IMAGE_LIMIT = 1 << 29
MEMORY_LIMIT = 1 << 40
SITES_LIMIT = 1 << 22  # of a kernel
SHARDS = 256  # of a ring or a site array, at most
LEAST_CAPACITY = 4096  # records of a shard
RING_BYTES = 1 << 36
LOG_RECORDS = 1 << 28
FRAMES_LIMIT = 256  # of a host stack
GPUS = 256  # of a machine

# The control block (src/control.h).
CONTROL_HEADER = 128
CONTROL_SIZE = CONTROL_HEADER + 256 * SLOTS
REASONS = tuple(reason.name.lower().replace("_", " ") for reason in Reason)


class Malformed(SessionError):
    """A process sent what no agent sends."""

    def __init__(self, what: str) -> None:
        super().__init__(f"a traced process sent {what}; it is no longer traced")


@dataclass(frozen=True)
class MapSpec:
    """A map's storage, in bytes: `fixed` for each context, or for each instance `fixed` and `per_unit` for every unit (of a site
    array: for every site in every shard).
    `initial` is what it begins with; the rest is zero. Of a ring: `fixed` bytes of records, `per_unit` the stride of one."""

    fixed: int
    per_unit: int
    initial: bytes
    unit: Unit = Unit.CONTEXT
    place: Place = Place.GPU


@dataclass(frozen=True)
class HostCode:
    """A host program that runs in the traced process at `point`, one of HOST_POINTS: `arguments` are (kind, map number, value), as in
    src/log/marker.h."""

    point: str
    code: bytes
    parameters: bytes
    arguments: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Wanted:
    """What a process is asked to do. Waits in seconds, `map_memory` in bytes, `launches` the first and the last that are
    instrumented. `log_records`: of the operation log, a power of two, 0 for none. `pump`: launches after which maps are read
    without being asked, 0 for never. `host`: programs that run there; or the points, of HOST_POINTS, at which programs run in the
    kernel."""

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
    pump: int = 0
    host: Sequence[HostCode] | frozenset[str] = ()


@dataclass(frozen=True)
class BlockField:
    """Where the address (and for arrays by launch shape or site the capacity) of map number `map` goes in the launch block."""

    map: int
    base_offset: int
    capacity_offset: int | None


@dataclass(frozen=True)
class KernelLayout:
    """How an instrumented kernel is launched: the application's `parameters`, then `block` at `block_offset`. `pid_tgid`, `kernel`,
    `epoch`: where in the block the launching thread, the kernel's number and the allocation epoch go; None: nowhere."""

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


@dataclass(frozen=True)
class VariableSlot:
    """Slot `index` of the table of variables; `kernels` are those that need it (none named: all)."""

    name: str
    index: int
    copied: bool
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Image:
    """A module that was loaded. `linked`: how many inputs cuLink made it of, 0 where it did not; the image is the PTX among them,
    where there was some, with a zero between two texts."""

    request: int
    compute_capability: int  # major * 10 + minor
    gpu: int
    size: int
    linked: int = 0


@dataclass(frozen=True)
class FoundKernel:
    """A kernel of a module that was there before, as the driver describes it. parameters: (offset, size) of each, in bytes; None: not
    told. Of the numbers -1: not told. ptx_version, binary_version: major * 10 + minor, of what it was compiled from, and for."""

    name: str
    parameters: tuple[tuple[int, int], ...] | None
    registers: int = -1
    shared: int = -1  # static, bytes
    const: int = -1  # bytes
    local: int = -1  # bytes of a thread
    max_threads: int = -1  # of a block
    ptx_version: int = -1
    binary_version: int = -1


@dataclass(frozen=True)
class Found:
    """A module that was loaded before its agent came, of which a kernel was launched. names: of its kernels, mangled; `whole`: of all
    of them. kernels: those that were launched. It is answered with a sidecar, as an image is."""

    request: int
    compute_capability: int  # major * 10 + minor
    gpu: int
    whole: bool
    names: tuple[str, ...]
    kernels: tuple[FoundKernel, ...]


@dataclass(frozen=True)
class ArrayPart:
    """An instance's part of the memory file: map number, offset, size, capacity in units; of a site array `sites_and_shards`."""

    map: int
    offset: int
    size: int
    capacity: int


@dataclass(frozen=True)
class InstancePart:
    """What one launch shape of a kernel has; extents of 0: what all its shapes have together."""

    slot: int
    grid: tuple[int, int, int]
    block_dim: tuple[int, int, int]
    launches: int
    arrays: tuple[ArrayPart, ...]

    @property
    def by_shape(self) -> bool:
        return self.grid[0] != 0


@dataclass(frozen=True)
class RingPart:
    """A ring in a snapshot: offset of its control block, and offset and size of its records where they lie in GPU memory."""

    map: int
    control: int
    offset: int
    size: int


@dataclass(frozen=True)
class Snapshot:
    """The maps of one context: `memory` holds what `instances`, `shared` (by map number: offset, size) and `rings` point into.
    `taken_ns`: when its copying began, on the host's clock."""

    sequence: int
    context: int
    gpu: int
    flags: int
    size: int
    taken_ns: int
    instances: tuple[InstancePart, ...]
    shared: Mapping[int, tuple[int, int]]
    rings: tuple[RingPart, ...] = ()


@dataclass(frozen=True)
class RingPlace:
    """A ring that a process made: `shards` of `capacity` records, each `stride` bytes."""

    map: int
    context: int
    gpu: int
    place: Place
    shards: int
    capacity: int
    stride: int

    @property
    def first(self) -> int:
        """Where in the data its records begin: after `RING_SHARD` bytes for each shard."""
        return -(-RING_SHARD * self.shards // RING_PAGE) * RING_PAGE

    @property
    def size(self) -> int:
        return self.first + -(-self.shards * self.capacity * self.stride // RING_PAGE) * RING_PAGE


@dataclass(frozen=True)
class StackFrame:
    """A return address: `offset` in the file (or 0 and "" where it is in none), `symbol` what the process itself knows."""

    address: int
    offset: int
    file: str
    symbol: str


class Reader:
    """Takes a payload apart; `Malformed` when it is too short."""

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
        """A number of items that take at least `least` bytes each."""
        n = self.u32()
        if n * least > len(self._data) - self._at:
            raise Malformed("a count beyond its message")
        return n

    def text(self) -> str:
        return self._take(self.u32()).decode("utf-8", "backslashreplace")

    def triple(self) -> tuple[int, int, int]:
        x, y, z = struct.unpack("<3I", self._take(12))
        return x, y, z


def hello(payload: bytes) -> str:
    """The name of the process."""
    r = Reader(payload)
    if r.u32() != PROTOCOL_VERSION:
        raise Malformed("another version's greeting")
    return r.text()[:64]


def hooked(payload: bytes) -> tuple[str, str]:
    """What could not be hooked, one function in each line: nothing when the hooks are live; and what goes without (its calls are
    not logged)."""
    r = Reader(payload)
    return r.text()[:4096], r.text()[:4096]


def image(payload: bytes) -> Image:
    r = Reader(payload)
    made = Image(r.u32(), r.u32(), r.u32(), r.u64(), r.u32())
    if made.size > IMAGE_LIMIT or not 10 <= made.compute_capability < 1000:
        raise Malformed("an image of no sensible size or kind")
    return made


def found(payload: bytes) -> Found:
    r = Reader(payload)
    request, compute_capability, gpu, flags = r.u32(), r.u32(), r.u32(), r.u32()
    if not 10 <= compute_capability < 1000:
        raise Malformed("a module of no sensible kind")
    names = tuple(r.text() for _ in range(r.count(4)))
    kernels = []
    for _ in range(r.count(40)):
        name, told = r.text(), r.u32()
        parameters = tuple((r.u32(), r.u32()) for _ in range(r.count(8)))
        kernels.append(FoundKernel(name, parameters if told else None, *(r.i32() for _ in range(7))))
    if not kernels:
        raise Malformed("a module of which nothing is known")
    return Found(request, compute_capability, gpu, bool(flags & FoundFlag.ALL_NAMES), names, tuple(kernels))


def slot_and_text(payload: bytes) -> tuple[int, str]:
    r = Reader(payload)
    slot, text = r.u32(), r.text()
    if slot >= SLOTS or len(text) > 65536:
        raise Malformed("a kernel out of range")
    return slot, text


def snapshot(payload: bytes) -> Snapshot:
    r = Reader(payload)
    sequence, context, gpu, flags, size, taken_ns = r.u32(), r.u32(), r.u32(), r.u32(), r.u64(), r.u64()
    if size > MEMORY_LIMIT:
        raise Malformed("memory of no sensible size")

    left = size

    def within(offset: int, length: int) -> None:
        nonlocal left
        left -= length
        if offset > size or length > size - offset or left < 0:
            raise Malformed("a map beyond its memory")

    instances = []
    for _ in range(r.count(40)):
        slot, grid, block_dim, launches = r.u32(), r.triple(), r.triple(), r.u64()
        arrays = tuple(ArrayPart(r.u32(), r.u64(), r.u64(), r.u64()) for _ in range(r.count(28)))
        if slot >= SLOTS:
            raise Malformed("a kernel out of range")
        for array in arrays:
            within(array.offset, array.size)
        instances.append(InstancePart(slot, grid, block_dim, launches, arrays))
    shared = {}
    for _ in range(r.count(20)):
        number, offset, length = r.u32(), r.u64(), r.u64()
        within(offset, length)
        shared[number] = (offset, length)
    rings = []
    for _ in range(r.count(28)):
        ring = RingPart(r.u32(), r.u64(), r.u64(), r.u64())
        within(ring.control, 64)
        within(ring.offset, ring.size)
        rings.append(ring)
    return Snapshot(sequence, context, gpu, flags, size, taken_ns, tuple(instances), shared, tuple(rings))


def ring(payload: bytes) -> RingPlace:
    r = Reader(payload)
    number, context, gpu, place, shards, _ = (r.u32() for _ in range(6))
    made = RingPlace(number, context, gpu, Place.HOST_RING, shards, r.u64(), r.u64())
    if place == Place.GPU_RING:
        made = replace(made, place=Place.GPU_RING)
    capacity = made.capacity
    if (
        not 1 <= shards <= SHARDS
        or capacity < LEAST_CAPACITY
        or capacity & (capacity - 1)
        or made.size > RING_BYTES
    ):
        raise Malformed("a ring of no sensible size")
    return made


def log(payload: bytes) -> int:
    """The records that the log has room for."""
    records = Reader(payload).u64()
    if not 0 < records <= LOG_RECORDS or records & (records - 1):
        raise Malformed("a log of no sensible size")
    return records


def context(payload: bytes) -> tuple[int, int]:
    """The number of a context, and of its GPU."""
    r = Reader(payload)
    number, gpu = r.u32(), r.u32()
    if gpu >= GPUS:
        raise Malformed("a GPU that is none")
    return number, gpu


def stack(payload: bytes) -> tuple[int, tuple[StackFrame, ...]]:
    """The number of a host stack, and its frames, innermost first."""
    r = Reader(payload)
    number, count = r.u32(), r.count(24)
    if count > FRAMES_LIMIT:
        raise Malformed("a stack that is too deep")
    return number, tuple(StackFrame(r.u64(), r.u64(), r.text()[:4096], r.text()[:4096]) for _ in range(count))


def drained(payload: bytes) -> tuple[int, bool]:
    """The sequence number of the request, and whether every context was read."""
    r = Reader(payload)
    return r.u32(), r.u32() != 0


def _bytes(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("<II", kind, len(payload)) + payload


def welcome(wanted: Wanted, process: int) -> bytes:
    """`process`: its number, from 1, that no other has; ids of what it launches begin with it."""
    last = wanted.launches[1] if wanted.launches[1] is not None else (1 << 64) - 1
    flags = sum(
        bit
        for bit, on in (
            (WelcomeFlag.MEMORY_IS_ZERO, wanted.memory_is_zero),
            (WelcomeFlag.STAMPS, wanted.stamps),
            (WelcomeFlag.STACKS, wanted.stacks),
            (WelcomeFlag.GRAPHS, wanted.graphs),
            (WelcomeFlag.MATCH_ALL, wanted.match_all),
            (WelcomeFlag.ALLOCATION_STACKS, wanted.allocation_stacks),
        )
        if on
    )
    parts = [
        struct.pack("<IQQQQ", PROTOCOL_VERSION, wanted.map_memory, wanted.launches[0], last, wanted.sample),
        struct.pack("<IIQQQ", int(wanted.image_wait * 1000), flags, wanted.log_records, wanted.pump, process),
        _bytes(f"{os.path.basename(sys.argv[0]).removesuffix('.py')}, pid {os.getpid()}".encode()[:100]),
        struct.pack("<I", len(wanted.maps)),
    ]
    for m in wanted.maps:
        parts.append(struct.pack("<QQII", m.fixed, m.per_unit, m.unit, m.place) + _bytes(m.initial))
    if not wanted.host:
        parts.append(struct.pack("<I", 0))
    elif isinstance(wanted.host, frozenset):
        parts.append(struct.pack("<II", 1, sum(1 << HOST_POINTS.index(point) for point in wanted.host)))
    else:
        parts.append(struct.pack("<II", 2, len(wanted.host)))
        for program in wanted.host:
            parts.append(struct.pack("<I", HOST_POINTS.index(program.point)))
            parts.append(_bytes(program.code) + _bytes(program.parameters))
            parts.append(struct.pack("<I", len(program.arguments)))
            parts += [struct.pack("<IIQ", *argument) for argument in program.arguments]
    return frame(Message.WELCOME, b"".join(parts))


def shared(number: int, size: int) -> bytes:
    """With the file of map `number`, before the Welcome."""
    return frame(Message.SHARED, struct.pack("<IQ", number, size))


def consumed(number: int, context: int, positions: Sequence[int]) -> bytes:
    """Up to where each shard of a ring in GPU memory was read."""
    return frame(
        Message.CONSUMED, struct.pack(f"<III{len(positions)}Q", number, context, len(positions), *positions)
    )


def drain(sequence: int, wait: float, flags: int) -> bytes:
    """`wait`: seconds that kernels get to end before memory is read; 0: it is read as it is."""
    return frame(Message.DRAIN, struct.pack("<III", sequence, int(wait * 1000), flags))


def working() -> bytes:
    """To a process that waits for a sidecar: it is being made."""
    return frame(Message.WORKING, b"")


def patched() -> bytes:
    """To a process that ran already: its hooks are in."""
    return frame(Message.PATCHED, b"")


def sidecar(
    request: int,
    image_size: int,
    kernels: Iterable[KernelLayout],
    refusals: Mapping[str, str],
    variables: Sequence[VariableSlot],
) -> bytes:
    """The answer to an image; the sidecar's own image comes as a file. Nothing in it: no kernel matches."""
    kernels = tuple(kernels)
    parts = [struct.pack("<IQI", request, image_size, len(kernels))]
    for k in kernels:
        parts.append(
            _bytes(k.name.encode())
            + struct.pack(f"<I{len(k.parameters)}I", len(k.parameters), *k.parameters)
            + struct.pack(
                "<6I",
                k.block_offset,
                NO_FIELD if k.pid_tgid is None else k.pid_tgid,
                k.waits,
                k.sites,
                NO_FIELD if k.kernel is None else k.kernel,
                NO_FIELD if k.epoch is None else k.epoch,
            )
            + _bytes(k.block)
        )
        parts.append(struct.pack("<I", len(k.fields)))
        for f in k.fields:
            capacity = NO_FIELD if f.capacity_offset is None else f.capacity_offset
            parts.append(struct.pack("<III", f.map, f.base_offset, capacity))
    parts.append(struct.pack("<I", len(refusals)))
    parts += [_bytes(name.encode()) + _bytes(reason.encode()) for name, reason in refusals.items()]
    parts.append(struct.pack("<I", len(variables)))
    for v in variables:
        parts.append(_bytes(v.name.encode()) + struct.pack("<III", v.index, v.copied, len(v.kernels)))
        parts += [_bytes(name.encode()) for name in v.kernels]
    return frame(Message.SIDECAR, b"".join(parts))


def sites_and_shards(capacity: int) -> tuple[int, int]:
    """The capacity of a site array taken apart. Raises Malformed where it is none."""
    sites, shards = capacity & 0xFFFFFFFF, (capacity >> 32) + 1
    if sites > SITES_LIMIT or shards > SHARDS or shards & (shards - 1):
        raise Malformed("sites of no sensible number")
    return sites, shards


def _brings_file(kind: int, payload: bytes) -> bool:
    if kind == Message.MARKER:  # a process without memory for one says so
        return payload[:4] == struct.pack("<I", 1)
    if kind == Message.RING:
        return payload[12:16] == struct.pack("<I", Place.HOST_RING)
    return kind in (Message.HELLO, Message.IMAGE, Message.SNAPSHOT, Message.LOG, Message.PATCHES)


class Frames:
    """Splits a stream into frames. File descriptors are handed out in the order in which they came, one to each frame that has
    one (`_brings_file`)."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._files: list[int] = []

    def feed(self, data: bytes, files: Sequence[int]) -> list[tuple[int, bytes, int | None]]:
        """The frames that are complete now: (type, payload, file). Files become the caller's, to close."""
        self._files += files
        self._buffer += data
        frames: list[tuple[int, bytes, int | None]] = []
        at = 0
        while len(self._buffer) - at >= 8:
            kind, length = struct.unpack_from("<II", self._buffer, at)
            if length > FRAME_LIMIT:
                self._files += [file for _, _, file in frames if file is not None]
                raise Malformed("a message that is too long")
            if len(self._buffer) - at - 8 < length:
                break
            payload = bytes(self._buffer[at + 8 : at + 8 + length])
            file = self._files.pop(0) if self._files and _brings_file(kind, payload) else None
            frames.append((kind, payload, file))
            at += 8 + length
        del self._buffer[:at]
        if len(self._files) > 16:
            raise Malformed("files that belong to nothing")
        return frames

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()


def sealed(file: int, size: int) -> bool:
    """Whether the file has `size` bytes and cannot lose them, so that mapping it is safe."""
    try:
        return (
            bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
            and os.fstat(file).st_size >= size
        )
    except OSError:
        return False


def read_file(file: int, size: int, offset: int = 0) -> bytes:
    """`size` bytes of a file that a process handed over; fewer where it is shorter."""
    parts = []
    while size > 0:
        part = os.pread(file, min(size, 1 << 28), offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(frozen=True)
class Counters:
    """Launches of one kernel name, as the control block has them."""

    seen: int = 0
    instrumented: int = 0
    threads: int = 0  # of the launches that were instrumented
    reasons: Mapping[str, int] = field(default_factory=dict)  # of REASONS; those that are 0 left out


def read_control(file: int) -> tuple[list[Counters], int]:
    """Counters by slot, and launches of functions whose name was never seen."""
    header = read_file(file, CONTROL_HEADER)
    if len(header) < CONTROL_HEADER:
        return [], 0
    used, unnamed = struct.unpack_from("<I4xQ", header)
    data = read_file(file, min(used, SLOTS) * 256, CONTROL_HEADER)
    slots = [_counters(data[at : at + 256]) for at in range(0, len(data) - 255, 256)]
    others = _counters(
        read_file(file, 256, CONTROL_HEADER + 256 * (SLOTS - 1))
    )  # names that found no slot of their own share it
    if others.seen and used < SLOTS:
        slots += [Counters()] * (SLOTS - 1 - len(slots)) + [others]
    return slots, unnamed


def graph_launches(file: int) -> int:
    """How often the process launched a CUDA graph of which it is not known how often its kernels ran."""
    return int.from_bytes(read_file(file, 8, 16), "little")


def graph_launches_before(file: int) -> int:
    """Those among them whose graph was made executable before the tool came: nobody knows what is in it."""
    return int.from_bytes(read_file(file, 8, 40), "little")


class HookCalls(NamedTuple):
    """Calls of a process that came through hooks, and times that they were in the agent, in ns. `timed`: one in 64, among them `long`
    ones of more than 50 µs; `short_ns` and `long_ns` of these two kinds. `rare_ns`: of what is rare and is timed always, and is in
    none of them."""

    calls: int = 0
    timed: int = 0
    short_ns: int = 0
    long: int = 0
    long_ns: int = 0
    rare_ns: int = 0

    @property
    def ns(self) -> int | None:
        """An estimate for all calls; None: nothing was timed. A thread that waits or does not run in the middle of a timed call makes
        that one long, and its time says nothing of the 63 others. So it counts once, unless long ones are usual in this program: three
        or more, and more than one in 20."""
        if not self.timed:
            return self.rare_ns or (None if self.calls else 0)
        if self.long >= 3 and 20 * self.long > self.timed:
            return self.calls * (self.short_ns + self.long_ns) // self.timed + self.rare_ns
        short = self.timed - self.long
        return (self.calls * self.short_ns // short if short else 0) + self.long_ns + self.rare_ns


def hook_calls(file: int) -> HookCalls:
    data = read_file(file, 56, 48)
    if len(data) < 56:
        return HookCalls()
    told, timed, ns, rest, long, long_ns, rare_ns = struct.unpack("<7Q", data)
    return HookCalls(told + rest, timed, ns, long, long_ns, rare_ns)


def virtual_times(file: int) -> tuple[int, int]:
    """When the process was attached to, and when it said that it ends, in ns on the embedded device's virtual clock; 0: not (yet), or
    its clock is real."""
    data = read_file(file, 16, 24)
    return (
        (0, 0) if len(data) < 16 else (int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little"))
    )


def was_cut(file: int) -> bool:
    """Whether the process closed its agent's files, and with them the way to the tool."""
    return read_file(file, 4, 4) not in (b"", bytes(4))


def _counters(data: bytes) -> Counters:
    if len(data) < 256:
        return Counters()
    seen, instrumented, *reasons, _, threads = struct.unpack_from("<20Q", data)
    return Counters(
        seen, instrumented, threads, {name: n for name, n in zip(REASONS, reasons, strict=False) if n}
    )
