"""What tool and agent say to each other. `src/wire.h` and `src/control.h` are the other side.

A frame is ``{u32 type, u32 length}`` and `length` bytes, little-endian; a file descriptor may come with its first byte. What an
agent sends is untrusted: it runs in the traced process. Every length, count and offset is checked, and files that it hands over
are read with `pread`, never mapped (their owner could shrink them).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpubpf.errors import SessionError

VERSION = 1
FRAME_LIMIT = 64 << 20
IMAGE_LIMIT = 1 << 29
MEMORY_LIMIT = 1 << 40
NO_FIELD = 0xFFFFFFFF

# Messages.
HELLO, IMAGE, NAME, REFUSED, SNAPSHOT, DRAINED, HOOKED = range(1, 8)
WELCOME, SIDECAR, DRAIN, WORKING = range(16, 20)

# Flags.
STOP = 1  # in DRAIN: swap no more launches from now on
CLOSED, RUNNING, FAILED = (
    1,
    2,
    4,
)  # in SNAPSHOT: the context is going; kernels had not ended; memory could not be read

# The control block.
SLOTS = 16384
CONTROL_SIZE = 64 + 256 * SLOTS
REASONS = (
    "sampled out",
    "filtered",
    "capture",
    "map too small",
    "occupancy",
    "refused",  # in its place goes the reason that the kernel was refused for
    "launch failed",
    "legacy launch",
)
REFUSED_REASON = REASONS.index("refused")


class Malformed(SessionError):
    """A process sent what no agent sends."""

    def __init__(self, what: str) -> None:
        super().__init__(f"a traced process sent {what}; it is no longer traced")


@dataclass(frozen=True)
class MapSpec:
    """A map's storage, in bytes: `fixed`, and for each thread of an instance `per_thread` (0: one storage for each context).
    `initial` is what it begins with; the rest is zero."""

    fixed: int
    per_thread: int
    initial: bytes


@dataclass(frozen=True)
class BlockField:
    """Where the address (and for thread arrays the capacity) of map number `map` goes in the launch block."""

    map: int
    base_offset: int
    capacity_offset: int | None


@dataclass(frozen=True)
class KernelLayout:
    """How an instrumented kernel is launched: the application's `parameters`, then `block` at `block_offset`."""

    name: str
    parameters: int
    block_offset: int
    block: bytes
    fields: tuple[BlockField, ...]
    pid_tgid: int | None = None  # where in the block the launching thread goes


@dataclass(frozen=True)
class VariableSlot:
    """Slot `index` of the table of variables; `kernels` are those that need it (none named: all)."""

    name: str
    index: int
    copied: bool
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Image:
    request: int
    compute_capability: int  # major * 10 + minor
    gpu: int
    size: int


@dataclass(frozen=True)
class ArrayPart:
    """An instance's part of the memory file: map number, offset, size, capacity in threads."""

    map: int
    offset: int
    size: int
    capacity: int


@dataclass(frozen=True)
class InstancePart:
    slot: int
    grid: tuple[int, int, int]
    block_dim: tuple[int, int, int]
    launches: int
    arrays: tuple[ArrayPart, ...]


@dataclass(frozen=True)
class Snapshot:
    """The maps of one context: `memory` holds what `instances` and `shared` (by map number: offset, size) point into."""

    sequence: int
    context: int
    gpu: int
    flags: int
    size: int
    instances: tuple[InstancePart, ...]
    shared: Mapping[int, tuple[int, int]]


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
    if r.u32() != VERSION:
        raise Malformed("another version's greeting")
    return r.text()[:64]


def hooked(payload: bytes) -> str:
    """What could not be hooked, one function in each line: empty when the hooks are live."""
    return Reader(payload).text()[:4096]


def image(payload: bytes) -> Image:
    r = Reader(payload)
    made = Image(r.u32(), r.u32(), r.u32(), r.u64())
    if made.size > IMAGE_LIMIT or not 10 <= made.compute_capability < 1000:
        raise Malformed("an image of no sensible size or kind")
    return made


def slot_and_text(payload: bytes) -> tuple[int, str]:
    r = Reader(payload)
    slot, text = r.u32(), r.text()
    if slot >= SLOTS or len(text) > 65536:
        raise Malformed("a kernel out of range")
    return slot, text


def snapshot(payload: bytes) -> Snapshot:
    r = Reader(payload)
    sequence, context, gpu, flags, size = r.u32(), r.u32(), r.u32(), r.u32(), r.u64()
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
    return Snapshot(sequence, context, gpu, flags, size, tuple(instances), shared)


def drained(payload: bytes) -> tuple[int, bool]:
    """The sequence number of the request, and whether every context was read."""
    r = Reader(payload)
    return r.u32(), r.u32() != 0


def _bytes(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("<II", kind, len(payload)) + payload


def welcome(
    maps: Sequence[MapSpec],
    map_memory: int,
    launches: tuple[int, int | None],
    sample: int,
    image_wait: float,
    memory_is_zero: bool,
) -> bytes:
    """Waits in seconds, `map_memory` in bytes, `launches` the first and the last that are instrumented."""
    last = launches[1] if launches[1] is not None else (1 << 64) - 1
    parts = [
        struct.pack(
            "<IQQQQII", VERSION, map_memory, launches[0], last, sample, int(image_wait * 1000), memory_is_zero,
        ),
        struct.pack("<I", len(maps)),
    ]  # fmt: skip
    parts += [struct.pack("<QQ", m.fixed, m.per_thread) + _bytes(m.initial) for m in maps]
    return frame(WELCOME, b"".join(parts))


def drain(sequence: int, wait: float, flags: int) -> bytes:
    """`wait`: seconds that kernels get to end before memory is read; 0: it is read as it is."""
    return frame(DRAIN, struct.pack("<III", sequence, int(wait * 1000), flags))


def working() -> bytes:
    """To a process that waits for a sidecar: it is being made."""
    return frame(WORKING, b"")


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
            + struct.pack(
                "<III", k.parameters, k.block_offset, NO_FIELD if k.pid_tgid is None else k.pid_tgid
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
    return frame(SIDECAR, b"".join(parts))


class Frames:
    """Splits a stream into frames. File descriptors are handed out in the order in which they came, one to each frame that has
    one: those that `WITH_FILE` names."""

    WITH_FILE = frozenset({HELLO, IMAGE, SNAPSHOT})

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
            file = self._files.pop(0) if kind in self.WITH_FILE and self._files else None
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
    reasons: Mapping[str, int] = field(default_factory=dict)  # of REASONS; those that are 0 left out


def read_control(file: int) -> tuple[list[Counters], int]:
    """Counters by slot, and launches of functions whose name was never seen."""
    header = read_file(file, 64)
    if len(header) < 64:
        return [], 0
    used, unnamed = struct.unpack_from("<I4xQ", header)
    data = read_file(file, min(used, SLOTS) * 256, 64)
    slots = [_counters(data[at : at + 256]) for at in range(0, len(data) - 255, 256)]
    others = _counters(
        read_file(file, 256, 64 + 256 * (SLOTS - 1))
    )  # names that found no slot of their own share it
    if others.seen and used < SLOTS:
        slots += [Counters()] * (SLOTS - 1 - len(slots)) + [others]
    return slots, unnamed


def graph_launches(file: int) -> int:
    """How often the process launched a CUDA graph of which it is not known how often its kernels ran."""
    return int.from_bytes(read_file(file, 8, 16), "little")


def was_cut(file: int) -> bool:
    """Whether the process closed its agent's files, and with them the way to the tool."""
    return read_file(file, 4, 4) not in (b"", bytes(4))


def _counters(data: bytes) -> Counters:
    if len(data) < 256:
        return Counters()
    seen, instrumented, *reasons = struct.unpack_from("<18Q", data)
    return Counters(seen, instrumented, {name: n for name, n in zip(REASONS, reasons, strict=False) if n})
