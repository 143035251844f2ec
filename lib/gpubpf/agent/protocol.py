"""The messages between tool and agent, encoded and decoded, as definitions.py declares them. `src/wire.h` is the agent's side.

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
    PROTOCOL_VERSION,
    RING_LIMIT,
    SHARDS,
    SITES_LIMIT,
    SLOT,
    SLOTS,
    AgentConfig,
    Ahead,
    Answer,
    Consumed,
    Context,
    Drain,
    Drained,
    Found,
    Hello,
    Hooked,
    Image,
    KernelFailed,
    KernelLayout,
    KernelName,
    Log,
    Message,
    NoRoom,
    Patched,
    PatchFailed,
    PatchTable,
    Place,
    RangeName,
    Ranges,
    Ready,
    Reason,
    RingPlace,
    SharedFile,
    Sidecar,
    Snapshot,
    Stack,
    StackFrame,
    Stubs,
    VariableSlot,
    Vendor,
    WantedKernel,
    Welcome,
    Working,
)
from gpubpf.agent.packing import Malformed, Packed, decode, encode
from gpubpf.ebpf import maps
from gpubpf.process import limits, target_socket
from gpubpf.record import Record, field, replace

GPUS = 256  # of a machine, at most
REASON_NAMES = tuple(reason.name.lower().replace("_", " ") for reason in Reason)


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


def hello(payload: bytes) -> Hello:
    """Decode HELLO."""
    if payload[:4] != struct.pack("<I", PROTOCOL_VERSION):
        raise Malformed("a greeting of another protocol version")
    greeting = decode(Hello, payload)
    return replace(greeting, name=greeting.name[:64])


def hooked(payload: bytes) -> tuple[list[str], dict[str, list[str]], tuple[int, ...]]:
    """Decode HOOKED: lines "function: reason" of the functions that cannot be hooked, and a number for each GPU.

    The first value: functions that the agent needs; empty if the hooks are live. The second: optional ones, by what the agent lacks
    without them (LACKS_... in definitions.py). The third: `Hooked.numbers`."""
    told = decode(Hooked, payload)
    by_lack: dict[str, list[str]] = {}
    for line in told.left_out[:4096].splitlines():
        lack, _, rest = line.partition(": ")
        by_lack.setdefault(lack, []).append(rest)
    numbers = tuple(number for number in told.numbers if _is_capability(number))
    return told.failed[:4096].splitlines(), by_lack, numbers


def _is_capability(number: int) -> bool:
    return 10 <= number < 1000


def image(payload: bytes, vendor: Vendor = Vendor.NVIDIA) -> Image:
    """Decode IMAGE."""
    made = decode(Image, payload)
    valid = made.compute_capability == 0 if vendor == Vendor.AMD else _is_capability(made.compute_capability)
    if made.size + made.ptx > IMAGE_LIMIT or not valid:
        raise Malformed("an image of an invalid size or compute capability")
    return made


def found(payload: bytes) -> Found:
    """Decode FOUND."""
    made = decode(Found, payload)
    if not _is_capability(made.compute_capability):
        raise Malformed("a module of an invalid compute capability")
    if not made.kernels:
        raise Malformed("a module without kernels")
    return made


def wanted_kernel(payload: bytes) -> WantedKernel:
    """Decode KERNEL."""
    wanted = decode(WantedKernel, payload)
    if not _is_capability(wanted.compute_capability):
        raise Malformed("a kernel of an invalid compute capability")
    return wanted


def patch_table(payload: bytes) -> PatchTable:
    """Decode PATCH_TABLE."""
    table = decode(PatchTable, payload)
    if not _is_capability(table.compute_capability):
        raise Malformed("a table of an invalid compute capability")
    return table


def ready(payload: bytes) -> int:
    """Return the request whose copies are installed."""
    return decode(Ready, payload).request


def slot_and_text(payload: bytes) -> tuple[int, str]:
    """Decode NAME (the kernel's name) or REFUSED (the reason): the slot, and the text."""
    told = decode(KernelName, payload)
    if len(told.text) > 65536:
        raise Malformed("a text that is too long")
    return _valid_slot(told.slot), told.text


def _valid_slot(slot: int) -> int:
    """Return the slot. Raises Malformed if there is none of this number."""
    if slot >= SLOTS:
        raise Malformed("a kernel number out of range")
    return slot


def no_room(payload: bytes) -> NoRoom:
    """Decode NO_ROOM."""
    told = decode(NoRoom, payload)
    _valid_slot(told.slot)
    return told


def kernel_failed(payload: bytes) -> KernelFault:
    """Decode KERNEL_FAILED."""
    told = decode(KernelFailed, payload)
    place = told.place
    if place is None:
        return KernelFault(told.gpu, told.error, patch=told.patch)
    source = (place.file, place.line) if place.file and place.line else None
    return KernelFault(
        told.gpu,
        told.error,
        place.kernel,
        source,
        place.block,
        place.thread,
        place.address or None,
        told.patch,
    )


def snapshot(payload: bytes) -> Snapshot:
    """Decode SNAPSHOT. Checks that all maps lie in the file's `size` bytes, but not the file itself."""
    made = decode(Snapshot, payload)
    if made.size > MEMORY_LIMIT:
        raise Malformed("map memory of an invalid size")
    parts = [(array.offset, array.size) for instance in made.instances for array in instance.arrays]
    parts += made.shared.values()
    for ring in made.rings:
        parts += ((ring.control, maps.HEADER), (ring.offset, ring.size))
    for offset, size in parts:
        if offset > made.size or size > made.size - offset:
            raise Malformed("a map outside its memory")
    if sum(size for _, size in parts) > made.size:
        raise Malformed("a map outside its memory")
    for instance in made.instances:
        _valid_slot(instance.slot)
    return made


def ring(payload: bytes) -> RingPlace:
    """Decode RING."""
    made = decode(RingPlace, payload)
    if (
        made.place not in (Place.HOST_RING, Place.GPU_RING)
        or not 1 <= made.shards <= SHARDS
        or made.capacity < LEAST_CAPACITY
        or made.capacity & (made.capacity - 1)
        or made.size > RING_LIMIT
    ):
        raise Malformed("a ring of an invalid size")
    return made


def log(payload: bytes) -> int:
    """Return the records that the log has room for."""
    records = decode(Log, payload).records
    if not 0 < records <= LOG_LIMIT or records & (records - 1):
        raise Malformed("a log of an invalid size")
    return records


def context(payload: bytes) -> tuple[int, int]:
    """Return the number of a context, and the ordinal of its GPU."""
    made = decode(Context, payload)
    if made.gpu >= GPUS:
        raise Malformed("an invalid GPU number")
    return made.number, made.gpu


def stack(payload: bytes) -> tuple[int, tuple[StackFrame, ...]]:
    """Return the number of a host stack, and its frames, innermost first."""
    told = decode(Stack, payload)
    return told.number, tuple(
        replace(frame, file=frame.file[:4096], symbol=frame.symbol[:4096]) for frame in told.frames
    )


def ranges(payload: bytes) -> tuple[int, tuple[RangeName, ...]]:
    """Return the number of a combination of ranges, and the ranges, the outermost first."""
    told = decode(Ranges, payload)
    return told.number, tuple(RangeName(one.domain[:4096], one.name[:4096]) for one in told.ranges)


def drained(payload: bytes) -> tuple[int, bool]:
    """Return the sequence number of the request, and whether every context was read."""
    told = decode(Drained, payload)
    return told.sequence, told.complete


def frame(kind: int, payload: bytes) -> bytes:
    """Return a frame: header and payload."""
    return struct.pack("<II", kind, len(payload)) + payload


def _frame(message: Packed) -> bytes:
    return frame(message.message, encode(message))


def welcome(config: AgentConfig, process: int) -> bytes:
    """Return the WELCOME frame. `process`: the number of the process, from 1; the ids of its launches begin with it."""
    owner = f"{os.path.basename(sys.argv[0]).removesuffix('.py')}, pid {os.getpid()}"
    return _frame(Welcome(PROTOCOL_VERSION, process, owner[:100], config))


def shared(number: int, size: int) -> bytes:
    """Return the frame that goes with the file of shared map `number`. Send it before WELCOME."""
    return _frame(SharedFile(number, size))


def consumed(number: int, context: int, positions: Sequence[int]) -> bytes:
    """Return the frame that says up to which position each shard of a ring in GPU memory was read."""
    return _frame(Consumed(number, context, positions))


def drain(sequence: int, wait: float, flags: int) -> bytes:
    """Return the frame that asks for snapshots. `wait`: seconds that running kernels get to finish first. `flags`: of DrainFlag."""
    return _frame(Drain(sequence, wait, flags))


def working() -> bytes:
    """Return the frame that tells an agent that its sidecar is being made."""
    return _frame(Working())


def patched() -> bytes:
    """Return the frame that tells an agent that the tool has applied its patches."""
    return _frame(Patched())


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
    """Return an answer to an image; the sidecar's own image goes with it as a file. See `Answer`.

    ahead: nobody has asked for the sidecar yet; it is for contexts on GPUs of this compute capability."""
    answer = Answer(image_size, tuple(kernels), refusals, variables, launched, later, first, patches)
    return _frame(Sidecar(request, answer) if ahead is None else Ahead(ahead, request, answer))


def sites_and_shards(capacity: int) -> tuple[int, int]:
    """Split the capacity of a site array into sites and shards. Raises Malformed if it is invalid."""
    sites, shards = maps.sites_and_shards(capacity)
    if sites > SITES_LIMIT or shards > SHARDS or shards & (shards - 1):
        raise Malformed("an invalid number of sites")
    return sites, shards


def _needs_file(kind: int, payload: bytes) -> bool:
    try:
        if kind == Message.STUBS:  # a process that could not make the file says so
            return decode(Stubs, payload).made
        if kind == Message.RING:
            return decode(RingPlace, payload).place == Place.HOST_RING
    except Malformed:
        return False
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
