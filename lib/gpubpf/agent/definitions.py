"""What the tool and the agent share: messages, flags, states, limits, names, and the layout of memory that both map.

This is the only place that defines them, except for what the layers below define: the layout of rings, the fields of host programs'
contexts, the launch block. Python imports it. `make` turns all of it into the C++ header that the agent includes:

    python -m gpubpf.agent.definitions > definitions.h

With `--markdown` it prints the table of log records in docs/timing.md, which a test compares.

It imports only modules that need nothing but the standard library, because it also runs before anything is installed.
"""

from __future__ import annotations

import mmap
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Annotated, TypeAlias

from gpubpf.agent import packing
from gpubpf.agent.packing import I32, I64, U32, U64, AtMost, Packed, Seconds
from gpubpf.ebpf import maps
from gpubpf.ebpf.bytecode import CONTEXTS, HOST_POINTS, HOST_STUBS, OPERATION_STUB
from gpubpf.lower import patch_function
from gpubpf.lower.launch_block import TICK_BITS, LaunchBlock
from gpubpf.ptx.symbols import GRIDS, TABLE
from gpubpf.record import Record
from gpubpf.record import field as record_field

CLOCK_KERNEL = Path(__file__).with_name("clock.ptx")  # answers with the GPU's time
PROTOCOL_VERSION = 33  # of all that agent and tool exchange: messages, and files that both map
FRAME_LIMIT = 64 << 20  # bytes of a message
IMAGE_LIMIT = 1 << 29  # bytes of a module's image
MEMORY_LIMIT = 1 << 40  # bytes of a map
SITES_LIMIT = 1 << 22  # sites of a kernel
SHARDS = 256  # of a ring or a site array, at most; further multiprocessors share them
SITE_ARRAY_LIMIT = 8 << 20  # bytes of a site array in several shards
LEAST_CAPACITY = 2 * maps.RING_MARGIN  # records of a ring's shard, at least
RING_LIMIT = 1 << 36  # bytes of a ring
LOG_LIMIT = 1 << 28  # records of an operation log
STACK_LIMIT = 64  # frames of a host stack
MOST_STACKS = 1 << 16  # different host stacks of a process; their numbers begin with 1
# Symbols of a last frame that stands for the frames missing from a stack.
STACK_TOO_DEEP, STACK_NOT_UNWOUND = "[more frames]", "[no unwind information]"
UNKNOWN_RANGE = (
    "[unknown range]"  # name of a range, or of its domain, if the process has too many different names
)
SLOTS = 16384  # distinct kernel names of a process; all further names share the last slot
NO_FIELD = 0xFFFFFFFF  # an offset in the launch block: the field does not exist
WARP = 32  # lanes of a warp of an NVIDIA GPU
NO_SM = 0xFFFFFFFF  # multiprocessor of a bracket without its clock
NO_SLOT = 0xFFFFFFFF  # slot of a kernel whose name is unknown
NO_FUNCTION = 0xFFFFFFFF  # function of a call that is not in the agent's table
SHAPE_SIZE = 24  # bytes of the launch's shape in the launch block
NO_RECORD = 0xFFFFFFFFFFFFFFFF  # awaited record of an event that has completed or was never recorded

# --- names --------------------------------------------------------------------------------------------------------

SOCKET_VARIABLE = "GPUBPF_SOCKET"  # environment variable: the tool's socket
CUPTI_VARIABLE = "GPUBPF_CUPTI"  # environment variable: where libcupti.so may be, separated by colons
SANITIZER_VARIABLE = (
    "GPUBPF_SANITIZER"  # environment variable: the same of libsanitizer-public.so, for --sass
)
CUPTI_AUTOMATIC = "automatic:"  # before these places: use CUPTI only where the program cannot use it
# The agent exports these; agent.cpp defines them under the same names.
ATTACH_FUNCTION = "gpubpf_attach"
OWNER_VARIABLE = "gpubpf_owner"  # text: the tool that is attached
OWNER_SIZE = 128
# The argument of ATTACH_FUNCTION, and the value of SOCKET_VARIABLE: the socket's name, or this prefix and the number of a socket that
# the process has open. With the suffix, the process is inside its first cuInit.
FILE_PREFIX = "fd:"
STARTING_SUFFIX = " starting"

# --- functions that cannot be hooked --------------------------------------------------------------------------------

# HOOKED lists optional functions that could not be hooked, each as "LACK: function: reason". The agent lacks:
LACKS_OBSOLETE = "obsolete"  # launches through a function that is deprecated since CUDA 4.0 or 11.3
LACKS_HOLDING = "holding"  # a moment in which it holds back what may not end by itself
LACKS_LOG = "log"  # the records of an operation
LACKS_CALL = "call"  # the times of calls of HIP
LACKS_EXIT = "exit"  # a function of libc
LACKS_COMPILERS = "compilers"  # the PTX of cubins that NVRTC and nvJitLink make
LACKS_CUPTI = "CUPTI"  # timestamps of CUPTI; no function stands there
LACKS_SANITIZER = "sanitizer"  # patches of machine code; no function stands there
# Why a kernel that was loaded before the agent is not instrumented: it may be of several modules, which have different PTX for it. The
# agent asks again when the module has launched another kernel.
AMBIGUOUS = "ambiguous"
# A reason: the tool gives other advice then.
ALREADY_CHANGED = "another tool has changed its first instructions"

# --- numbers of operations (docs/timing.md, "Launch identity") -----------------------------------------------------

NUMBER_BITS = (
    patch_function.NUMBER_BITS
)  # of an id: they count the operations of a process; its number in the session is above
OTHER_OPERATION = 1 << 39  # set in the numbers of all operations but launches of kernels
NUMBER_MASK = (1 << NUMBER_BITS) - 1


# --- messages -------------------------------------------------------------------------------------------------


class Message(IntEnum):
    """The type of a frame. "+ file": a file descriptor comes with it."""

    # From the agent to the tool.
    HELLO = 1  # + control block
    IMAGE = 2  # + module image
    NAME = 3
    REFUSED = 4
    SNAPSHOT = 5  # + map memory
    DRAINED = 6
    HOOKED = 7
    STUBS = 8  # + file with the stubs of host programs, if the process could make it
    LOG = 9  # + operation log
    RING = 10  # + data file, if the ring is in host memory
    STACK = 11
    CONTEXT = 12
    PATCHES = 13  # + list of patches, for the tool to apply while the process is stopped
    FOUND = 14  # a module that was loaded before the agent; the tool answers with SIDECAR
    READY = 15  # the copies of a SIDECAR that answers FOUND, or of an AHEAD, are in each context that can have them
    NO_ROOM = 24  # a launch ran the original because no copy fits; once for each kernel
    KERNEL_FAILED = 25  # a kernel ended with an error, so its context cannot be used; once for each context
    NO_FILE = 26  # the process can make no file for a snapshot, so results were not read
    KERNEL = 27  # a kernel of a large module is launched for the first time; the tool answers with SIDECAR
    RANGES = 29  # what the number of a combination of ranges stands for
    PATCH_TABLE = (
        28  # where a context has the table for patches of machine code; the tool answers with SIDECAR
    )
    # From the tool to the agent.
    WELCOME = 16
    SIDECAR = 17  # + image
    DRAIN = 18
    WORKING = 19  # the tool is working on an image, or on WELCOME; sent every second
    SHARED = 20  # + file of a shared map; before WELCOME
    CONSUMED = 21  # how far the tool has read a ring in GPU memory
    PATCHED = 22  # the patches are applied
    AHEAD = 23  # + image: the sidecar of a module that may have been loaded before the agent, and not launched since


class Vendor(IntEnum):
    """Whose GPUs an agent serves: each has an agent of its own."""

    NVIDIA = 0
    AMD = 1

    @property
    def sector(self) -> int:
        """Bytes of the sectors that memory moves."""
        return 64 if self is Vendor.AMD else 32

    @property
    def word(self) -> str:
        """The vendor in JSON records."""
        return self.name.lower()


class DrainFlag(IntFlag):
    """STOP: instrument no more launches. ONLY_RINGS: read only rings in GPU memory."""

    STOP = 1
    ONLY_RINGS = 2


class SnapshotFlag(IntFlag):
    """CLOSED: the context is being destroyed. RUNNING: kernels were still running. FAILED: memory could not be read.
    OF_RINGS: only rings were read. UNASKED: the agent read the maps on its own, and the process continues. Kernels may be running."""

    CLOSED = 1
    RUNNING = 2
    FAILED = 4
    OF_RINGS = 8
    UNASKED = 16


class PatchFailed(IntEnum):
    """Whether a kernel failed in a patch of the tool. PERHAPS: the driver does not say where."""

    NO = 0
    PERHAPS = 1
    YES = 2


class Unit(IntEnum):
    """What a map has one value for. SITE: each site of a kernel, for all launch shapes together, in one shard per multiprocessor."""

    CONTEXT = 0
    THREAD = 1
    WARP = 2
    BLOCK = 3
    INSTANCE = 4
    SITE = 5


class Place(IntEnum):
    """Where a map is stored. HOST_RING: control block in GPU memory, records in a file that the tool maps. GPU_RING: in GPU memory.
    SHARED: in a file of the tool that the GPU can access, too. HOST: in a file of the tool that only the host program can access."""

    GPU = 0
    HOST_RING = 1
    GPU_RING = 2
    SHARED = 3
    HOST = 4


class HostArgument(IntEnum):
    """The kind of an argument of a host program's machine code, and what its value is. CONTEXT: number of a context field. MAP_BASE:
    number of a map in a shared file. PARAM: offset in the parameter bytes. HELPER: number of a helper, as in bpf.h."""

    CONTEXT = 0
    MAP_BASE = 1
    PARAM = 2
    HELPER = 3


class AttachStatus(IntEnum):
    """What `gpubpf_attach` returns."""

    ATTACHED = 0
    NO_DRIVER = 1  # the process has not loaded libcuda.so.1
    IN_USE = 2  # another tool traces the process
    FAILED = 3  # the agent has sent the reason, if it could
    ENDING = 4  # the agent has not finished detaching from the previous tool


# --- messages: their contents (packing.py) ------------------------------------------------------------------------
# From the agent to the tool. protocol.py checks what the types do not say.


class Hello(Packed, message=Message.HELLO):
    """driver: its version (12080 for CUDA 12.8; 0: unknown). From AMD's agent: how often the process initialized ROCr before.
    name: of the process."""

    version: U32  # PROTOCOL_VERSION
    driver: U32
    name: str
    vendor: Vendor


class Stubs(Packed, message=Message.STUBS):
    """made: the process could make the file."""

    made: bool


class Hooked(Packed, message=Message.HOOKED):
    """failed, left_out: lines about the functions that cannot be hooked: those that the agent needs, and optional ones.

    numbers: the compute capabilities of the GPUs on which a running process has primary contexts. From AMD's agent: the lanes of each
    GPU's waves."""

    failed: str
    left_out: str
    numbers: tuple[U32, ...]


class Patches(Packed, message=Message.PATCHES):
    """The file has the patches."""


class Image(Packed, message=Message.IMAGE):
    """A module that the process loads; of AMD GPUs a code object, which says itself which GPU it is for.

    linked: how many inputs cuLink, NVRTC or nvJitLink made it from; 0: unknown.
    ptx: bytes of PTX behind the image in its file: the inputs that were PTX, with a zero byte between two texts.
    lto: how many of the inputs were LTO-IR."""

    request: U32
    compute_capability: U32  # major * 10 + minor; 0: of AMD GPUs
    gpu: U32
    size: U64
    linked: U32 = 0
    ptx: U64 = 0
    lto: U32 = 0


class FoundKernel(Packed):
    """A kernel of a module that was loaded before the agent, as the driver describes it. -1: the driver does not say.

    parameters: (offset, size) of each, in bytes; None: unknown.
    ptx_version: the virtual architecture that it was compiled from, as major * 10 + minor."""

    name: str
    parameters: tuple[tuple[U32, U32], ...] | None
    registers: I32 = -1
    shared: I32 = -1  # static, bytes
    max_threads: I32 = -1  # of a block
    ptx_version: I32 = -1


class Found(Packed, message=Message.FOUND):
    """A module that was loaded before the agent, and has launched a kernel. The tool answers with a sidecar, as for `Image`.

    names: mangled names of its kernels. whole: `names` has all of them. kernels: those that were launched."""

    request: U32
    compute_capability: U32  # major * 10 + minor
    gpu: U32
    whole: bool
    names: tuple[str, ...]
    kernels: tuple[FoundKernel, ...]


class WantedKernel(Packed, message=Message.KERNEL):
    """A kernel (mangled) of a large module that is launched for the first time. The tool answers with its copy, perhaps with others.

    module: the request that the tool has answered with the list of such kernels (`later` in `Answer`)."""

    request: U32
    compute_capability: U32  # major * 10 + minor
    gpu: U32
    module: U32
    name: str


class PatchTable(Packed, message=Message.PATCH_TABLE):
    """Where a context has the table for patches (`lower.patch_function`). The tool answers with the patches."""

    request: U32
    compute_capability: U32  # major * 10 + minor
    gpu: U32
    address: U64


class Ready(Packed, message=Message.READY):
    """The copies of this request are installed."""

    request: U32


class KernelName(Packed, message=Message.NAME):
    """The name of the kernel in a slot."""

    slot: U32
    text: str


class Refused(Packed, message=Message.REFUSED):
    """Why the kernel in a slot is not instrumented."""

    slot: U32
    text: str


class NoRoom(Packed, message=Message.NO_ROOM):
    """A launch ran the original kernel because no copy fits: the first such launch of the kernel in `slot`.

    needed, allowed: blocks that must be resident at once, and those of a copy that can be; allowed is None if the driver does not say.
    registers, original: registers of a thread in this copy, and in the original; 0 if the driver does not say.
    """

    slot: U32
    threads: U32  # of a block
    needed: U64
    allowed: U64 | None
    registers: U32
    original: U32


class FaultPlace(Packed):
    """Where a kernel failed, as the embedded device reports it. file, line: "" and 0 without line information.
    address: of the access; 0 if it was not an access to memory."""

    kernel: str  # mangled
    file: str
    line: U32
    block: tuple[U32, U32, U32]
    thread: tuple[U32, U32, U32]
    address: U64


class KernelFailed(Packed, message=Message.KERNEL_FAILED):
    """A kernel ended with an error, and its context cannot be used any more. error: CUresult. patch: whether it failed in a patch."""

    gpu: U32
    error: U32
    patch: PatchFailed
    place: FaultPlace | None


class ArrayPart(Packed):
    """An array of an instance in the snapshot's file: map number, offset, size, capacity in units.

    The capacity of a site array is as `protocol.sites_and_shards` takes it."""

    map: U32
    offset: U64
    size: U64
    capacity: U64


class InstancePart(Packed):
    """The arrays of a kernel and launch shape. Extents of 0: the arrays that all shapes of the kernel share.

    build: which of the kernels with this name it is, of those whose sites differ (`TracedProcess.sites`)."""

    slot: U32
    build: U32
    grid: tuple[U32, U32, U32]
    block_dim: tuple[U32, U32, U32]
    launches: U64
    arrays: tuple[ArrayPart, ...]

    @property
    def by_shape(self) -> bool:
        """It belongs to one launch shape."""
        return self.grid[0] != 0


class RingPart(Packed):
    """A ring in a snapshot: the offset of its control block and, for a ring in GPU memory, offset and size of its data."""

    map: U32
    control: U64
    offset: U64
    size: U64


class Snapshot(Packed, message=Message.SNAPSHOT):
    """The maps of one context. The file that comes with it has `size` bytes; `instances`, `shared` and `rings` have offsets in it.

    shared: maps that all instances share: map number → (offset, size). taken_ns: when copying began, on the host's clock.
    flags: of SnapshotFlag."""

    sequence: U32
    context: U32
    gpu: U32
    flags: U32
    size: U64
    taken_ns: U64
    instances: tuple[InstancePart, ...]
    shared: Mapping[U32, tuple[U64, U64]]
    rings: tuple[RingPart, ...] = ()


class Drained(Packed, message=Message.DRAINED):
    """The answer to a request to read the maps. complete: every context was read."""

    sequence: U32
    complete: bool


class NoFile(Packed, message=Message.NO_FILE):
    """The process can make no file for a snapshot."""


class Log(Packed, message=Message.LOG):
    """records: how many the log has room for."""

    records: U64


class RingPlace(Packed, message=Message.RING):
    """A ring that a process made: `shards` of `capacity` records, each `stride` bytes."""

    map: U32
    context: U32
    gpu: U32
    place: Place
    shards: U32
    capacity: U64
    stride: U64

    @property
    def control_size(self) -> int:
        """Bytes of the control block."""
        return maps.HEADER + maps.RING_SHARD * self.shards

    @property
    def first(self) -> int:
        """The offset of the first record, after `RING_SHARD` bytes for each shard."""
        return -(-maps.RING_SHARD * self.shards // maps.RING_PAGE) * maps.RING_PAGE

    @property
    def size(self) -> int:
        """Bytes of the ring's data."""
        records = self.shards * self.capacity * self.stride
        return self.first + -(-records // maps.RING_PAGE) * maps.RING_PAGE


class Context(Packed, message=Message.CONTEXT):
    """gpu: the ordinal of the context's GPU."""

    number: U32
    gpu: U32


class StackFrame(Packed):
    """A frame of a host stack.

    address: in the instruction that calls the next frame: a return address less one.
    file: the program or library with this address; "" outside files.
    offset: the address in the file's own address space, as in its symbol table; 0 outside files.
    symbol: the name that the process itself found.
    line: in the source file; 0: not known.
    python: a frame of Python. Then the address is that of its code object, `file` the source file, and `symbol` the qualified name.
    """

    address: U64
    offset: U64
    file: str
    symbol: str
    line: U32 = 0
    python: bool = False


class RangeName(Packed):
    """A range that the program has marked. domain: "": the default one. name: its message."""

    domain: str
    name: str


class Ranges(Packed, message=Message.RANGES):
    """The ranges that are open at a launch, the outermost first: those of the process, then those of the thread."""

    number: U32
    ranges: Annotated[tuple[RangeName, ...], AtMost(STACK_LIMIT, "too many ranges")]


class Stack(Packed, message=Message.STACK):
    """A host stack, innermost frame first. If outer frames are missing, the last frame has no address, and its symbol says why."""

    number: U32
    frames: Annotated[tuple[StackFrame, ...], AtMost(STACK_LIMIT, "a stack that is too deep")]


# From the tool to the agent, which checks them in src/messages.cpp.

PointName: TypeAlias = Annotated[str, packing.one_of(HOST_POINTS, "HostPoint")]


class MapSpec(Packed):
    """The storage of a map, in bytes.

    A map of a context has `fixed` bytes. A map of an instance has `fixed` bytes, and `per_unit` for each unit (in a site array: for
    each site in each shard). A ring has `fixed` bytes of records, `per_unit` bytes apart.
    initial: the first bytes; the rest is zero."""

    fixed: U64
    per_unit: U64
    initial: bytes
    unit: Unit = Unit.CONTEXT
    place: Place = Place.GPU


class HostCode(Packed):
    """A host program that runs in the traced process at `point`, one of HOST_POINTS.

    code: it gets the address of an array with the values of the arguments. arguments: (kind, map number, value)."""

    point: PointName
    code: bytes
    parameters: bytes
    arguments: tuple[tuple[HostArgument, U32, U64], ...]


class KeptMap(Packed):
    """A map with rows of a word for each of `slots` launches, and where the largest word of a launch is kept after a wait.

    source, target: the maps, by number; `target` is a shared array. offset: of the word in an element of `target`, in bytes.
    slots: 0: nothing is kept. Snapshots contain only the largest word of each launch, not the whole `source`."""

    source: U32 = 0
    target: U32 = 0
    offset: U32 = 0
    slots: U32 = 0


class AgentConfig(Packed):
    """What WELCOME asks an agent to do; see `Plan` and `Follow` in traced/measurement.py.

    map_memory: bytes for each context. launches: the first and the last launch to instrument; None: no last one.
    image_wait: how long a module load waits for the sidecar. memory_is_zero: the GPU's memory is zero when it is allocated.
    log_records: size of the operation log, a power of two; 0: no log. stamps: timing events around operations that no probe measures.
    stacks: host stacks of launches. ranges: the ranges that launches are in. chosen_ranges: instrument only launches in a range whose
    name matches one of these globs; none: all launches. graphs: kernels in graphs are instrumented.
    match_all: every kernel matches, even if its name was never seen. budget: measure launches as `set_one_in` says.
    pump: send a snapshot after so many launches, without being asked; 0: never. kept: where to keep values of the latest launches.
    host: host programs that the agent runs. host_points: where host programs run in the Linux kernel.
    clock_kernels: compute capability (90 for 9.0) → cubin of clock.ptx; where none suits, the driver compiles the PTX."""

    maps: Sequence[MapSpec]
    map_memory: U64
    launches: tuple[U64, U64 | None] = (1, None)
    sample: U64 = 1
    image_wait: Seconds = 0.0
    memory_is_zero: bool = False
    log_records: U64 = 0
    stamps: bool = False
    stacks: bool = False
    allocation_stacks: bool = False
    ranges: bool = False
    chosen_ranges: Sequence[str] = ()
    graphs: bool = False
    match_all: bool = False
    budget: bool = False
    pump: U64 = 0
    kept: KeptMap = KeptMap()
    host: Sequence[HostCode] = ()
    host_points: Sequence[PointName] = ()
    clock_kernels: Mapping[U32, bytes] = record_field(default_factory=dict)


class Welcome(Packed, message=Message.WELCOME):
    """process: its number in the session, from 1; the ids of its launches begin with it. owner: name of the tool, for messages."""

    version: U32  # PROTOCOL_VERSION
    process: U64
    owner: str
    config: AgentConfig


class BlockField(Packed):
    """Where the launch block has the address of map number `map`, and the capacity of an array by launch shape or site."""

    map: U32
    base_offset: U32
    capacity_offset: U32 | None


class KernelLayout(Packed):
    """The parameters of an instrumented kernel: the application's `parameters`, then `block` at `block_offset`.

    parameters: bytes of each.
    limited: the name of a second copy, for launches that the first does not fit; "": none.
    waits: its blocks may wait for each other.
    build: see `InstancePart`.
    pid_tgid, kernel, epoch: offsets in the block of the launching thread, the kernel's number and the allocation epoch; None: not
    there.
    shape, tick, executions: offsets of the launch's shape, of the length of the GPU's tick, and of the address of the copy's counter
    of executions.
    wave: lanes of a warp.
    compute_units: of an AMD GPU, how many of them a block can use (2 in WGP mode).
    most_threads, original_threads: of an AMD GPU, how many fit on these at once, in the copy and in the original.
    references: of an AMD GPU's code object, addresses that a copied kernel computes from the program counter, and that must point into
    the original code object. Each: the offset of s_getpc_b64 from the kernel descriptor in bytes, and its two literals as one number.
    patched: the program's own kernel is launched, which has patches; `block` goes into the table of PATCH_TABLE.
    numbered: the patches read the launch's number."""

    name: str
    parameters: Sequence[U32]
    block_offset: U32
    block: bytes
    fields: tuple[BlockField, ...]
    pid_tgid: U32 | None = None
    waits: bool = True
    sites: U32 = 0
    kernel: U32 | None = None
    epoch: U32 | None = None
    limited: str = ""
    shape: U32 | None = None
    tick: U32 | None = None
    wave: U32 = WARP
    compute_units: U32 = 1
    most_threads: U32 = NO_FIELD
    original_threads: U32 = NO_FIELD
    references: Sequence[tuple[I64, U64]] = ()
    build: U32 = 0
    executions: U32 | None = None
    patched: bool = False
    numbered: bool = False


class VariableSlot(Packed):
    """Slot `index` of the table of variables. kernels: those that need it; empty: all.

    entry: unless None, the slot has not the variable's address, but the function's address at this offset in it.
    refusal: why the kernels cannot be instrumented if the program may have changed that entry; "": it cannot."""

    name: str
    index: U32
    copied: bool
    kernels: tuple[str, ...] = ()
    entry: U32 | None = None
    refusal: str = ""


class Answer(Packed):
    """What the tool made of a module; the image goes with it as a file.

    image_size: in bytes; 0: no kernel matches. refusals: kernel → why it is not instrumented.
    launched: kernels that other kernels launch, each with the name of its copy.
    later: kernels whose copies the agent asks for at their first launch. first: those that it asks for now.
    patches: the image has these patches: numbers of instructions and names of functions."""

    image_size: U64
    kernels: tuple[KernelLayout, ...]
    refusals: Mapping[str, str]
    variables: Sequence[VariableSlot]
    launched: Sequence[tuple[str, str]] = ()
    later: Sequence[str] = ()
    first: Sequence[str] = ()
    patches: Sequence[tuple[U32, str]] = ()


class Sidecar(Packed, message=Message.SIDECAR):
    """The answer to a request: `Image`, `Found`, `WantedKernel` or `PatchTable`."""

    request: U32
    answer: Answer


class Ahead(Packed, message=Message.AHEAD):
    """An answer that nobody has asked for yet; it is for contexts on GPUs of this compute capability."""

    compute_capability: U32
    request: U32
    answer: Answer


class Drain(Packed, message=Message.DRAIN):
    """A request for snapshots. wait: how long running kernels may take to finish first. flags: of DrainFlag."""

    sequence: U32
    wait: Seconds
    flags: U32


class Working(Packed, message=Message.WORKING):
    """The tool is working."""


class SharedFile(Packed, message=Message.SHARED):
    """The file of a shared map. size: in bytes."""

    map: U32
    size: U64


class Consumed(Packed, message=Message.CONSUMED):
    """Up to which position each shard of a ring in GPU memory was read."""

    map: U32
    context: U32
    positions: Sequence[U64]


class Patched(Packed, message=Message.PATCHED):
    """The tool has applied the patches."""


MESSAGES = tuple(
    one
    for one in tuple(globals().values())
    if isinstance(one, type) and issubclass(one, Packed) and one is not Packed
)  # and their parts, each behind those that it contains


# --- counters of launches ---------------------------------------------------------------------------------------


class Reason(IntEnum):
    """Why a launch ran the original kernel. REFUSED: the sidecar or a REFUSED message gives the reason."""

    SAMPLED_OUT = 0
    FILTERED = 1
    CAPTURE = 2
    MAP_TOO_SMALL = 3
    OCCUPANCY = 4
    REFUSED = 5
    LAUNCH_FAILED = 6  # the driver rejected the launch of the original, too, so nothing ran
    LEGACY_LAUNCH = 7  # cuLaunch, cuLaunchGrid, cuLaunchCooperativeKernelMultiDevice
    INCOMPLETE_BLOCKS = 8  # on an AMD GPU: the last blocks of the grid are incomplete
    PROCESS_ENDING = 9  # the maps were being read for the last time, or had been
    CONDITIONAL_NODE = (
        10  # in the body of a conditional graph node, with a program that reads the launch's number
    )
    COPY_FAILED = 11  # the instrumented copy could not be launched, and the original ran
    ALIKE_NODES = 12  # with --sass and a program that reads the launch's number: other kernel nodes of the graph are alike


REASONS = 16  # counters that each kernel name reserves for reasons; as a Reason: none


class Outcome(IntEnum):
    """The result of instrumenting a launch, in its log record: one of these numbers, or `outcome_of` a Reason."""

    INSTRUMENTED = 0
    NOT_READY = 254  # the instrumented copy was not ready yet
    NOT_MATCHED = 255  # the user did not ask for the kernel, or the tool has not answered yet


def outcome_of(reason: Reason) -> int:
    """Return the outcome of a launch that ran the original kernel for this reason. The C++ header has it, too."""
    return 1 + reason


# --- layouts ------------------------------------------------------------------------------------------------------


class Field(Record):
    """A field of a structure. type: one of `SIZES`; count: elements, 1 for a plain field; align: bytes, 0: its size."""

    type: str
    name: str
    count: int = 1
    about: str = ""
    align: int = 0


SIZES = {"u64": 8, "u32": 4, "u16": 2, "i32": 4, "char": 1, "u8": 1}
_C_TYPES = {
    "u64": "uint64_t",
    "u32": "uint32_t",
    "u16": "uint16_t",
    "i32": "int32_t",
    "char": "char",
    "u8": "uint8_t",
}
_FORMATS = {"u64": "Q", "u32": "I", "u16": "H", "i32": "i", "char": "c", "u8": "B"}


class Layout(Record):
    """A structure in a file that agent and tool share: `size` bytes, zeros behind the fields.

    name: in C++, where the fields of a structure with `atomic` are atomic. tail: a C++ declaration of what follows in the file."""

    name: str
    size: int
    fields: tuple[Field, ...]
    atomic: bool = True
    tail: str = ""

    def offsets(self) -> Iterator[tuple[Field, int]]:
        """Yield each field with its offset: naturally aligned, as in C."""
        return _placed(self.fields)

    def offset(self, name: str) -> int:
        """Return the offset of a field."""
        return next(at for field, at in self.offsets() if field.name == name)

    def values(self, data: bytes | mmap.mmap, name: str) -> tuple[int, ...]:
        """Return all elements of a field of the structure that `data` begins with."""
        field, at = next((field, at) for field, at in self.offsets() if field.name == name)
        return struct.unpack_from(f"<{field.count}{_FORMATS[field.type]}", data, at)

    def value(self, data: bytes | mmap.mmap, name: str) -> int:
        """Return the only or first element of a field."""
        return self.values(data, name)[0]

    def packing(self) -> struct.Struct:
        """Return the format of the whole structure. An array of bytes is one value."""
        text, end = "<", 0
        for field, at in self.offsets():
            text += f"{at - end}x{field.count}{'s' if field.type == 'u8' else _FORMATS[field.type]}"
            end = at + SIZES[field.type] * field.count
        return struct.Struct(f"{text}{self.size - end}x")


# Counters in a file, so that they survive the death of the process. First the counters of the whole process, then those of each
# kernel name. A launch that is neither instrumented nor counted under a reason came before the copy was ready, or its kernel does
# not match. The tool knows which.
SLOT = Layout(
    "Slot",
    256,
    (
        Field("u64", "seen"),
        Field("u64", "instrumented"),
        Field("u64", "reasons", REASONS),
        Field("u64", "number", about="launches of the kernel, as --launch and --sample count them"),
        Field(
            "u64",
            "threads",
            about="of the instrumented launches; they limit the number of records when the process is killed",
        ),
        Field("u64", "limited", about="of the instrumented launches: with the limited copy"),
        Field(
            "u64", "one_in", about="with --budget: the tool writes it; 0 until it knows what a launch costs"
        ),
    ),
)
CONTROL = Layout(
    "Control",
    192,
    (
        Field("u32", "used", about="number of slots in use"),
        Field("u32", "cut", about="the program closed the agent's files; nothing is counted from then on"),
        Field("u64", "unnamed", about="launches of functions whose name was never seen"),
        Field("u64", "graphs", about="graph launches for which the number of kernel executions is unknown"),
        Field(
            "u64",
            "started_ns",
            about="on the embedded device's virtual clock, else 0: when the agent was attached",
        ),
        Field(
            "u64", "ended_ns", about="the same: at the last reading, or when the process announced its end"
        ),
        Field(
            "u64",
            "graphs_before",
            about="launches of graphs that were instantiated before the attachment; `graphs` has them, too",
        ),
        Field("u64", "hooks", about="calls through hooks; each thread reports 64 at a time"),
        Field("u64", "hooks_timed", about="how many of them were timed"),
        Field("u64", "hooks_ticks_ns", about="time that timed calls spent in the agent, without the driver"),
        Field(
            "u64",
            "hooks_rest",
            about="calls that threads had not reported when the maps were last read",
        ),
        Field(
            "u64",
            "hooks_long",
            about="timed calls that took longer than kLong (thread.cpp); hooks_ticks_ns leaves them out",
        ),
        Field("u64", "hooks_long_ns", about="their time"),
        Field("u64", "hooks_rare_ns", about="total time of rare work that may take long (SlowPath)"),
        Field("u64", "cupti_given", about="operations that CUPTI was to record"),
        Field("u64", "cupti_reported", about="how many of them CUPTI has reported"),
        Field(
            "u64",
            "grids",
            about="grids that instrumented kernels, and kernels launched by them, had launched when the maps were last read",
        ),
        Field(
            "u64",
            "calls_unknown",
            about="calls of patches in launches that were not measured, when the maps were last read",
        ),
        Field("u64", "calls_elsewhere", about="the same: in code of no measured kernel"),
    ),
    tail="Slot slots[kSlots];",
)
# A change of code: a list of them is a file that the tool reads (attach/patching.py).
PATCH = Layout(
    "Patch",
    32,
    (
        Field("u64", "at", about="address of the code to change"),
        Field("u8", "before", 8),
        Field("u8", "after", 8),
        Field("u64", "size", about="bytes of `before` and `after` that count"),
    ),
    atomic=False,
)

# --- the operation log ------------------------------------------------------------------------------------------


class Kind(IntEnum):
    """The kind of a log record."""

    KERNEL = 1
    H2D = 2
    D2H = 3
    D2D = 4
    H2H = 5
    MEMSET = 6
    RECORDED = 7
    WAIT = 8
    GRAPH = 9
    SYNC = 10
    API = 11
    HOST_FUNCTION = 12
    SPAN = 16
    CLOCK = 17
    NODE = 18
    EDGE = 19
    FAULT = 20
    QUEUE = 21


class RecordFlag(IntFlag):
    """GRAPH_NODE: part of a graph replay; the call's times are those of the graph launch. SYNCHRONOUS: the call itself waits.
    CAPTURED: the operation was captured into a graph and did not run by itself. HOST_CLOCK: a span with CUPTI's times, on the log's
    clock. FROM_BEFORE: the stream or allocation existed before the agent; such a stream may hold work that was not seen.
    BY_ROCR: a span with the times that AMD's runtime gives, on the log's clock. HOST_MEMORY: an allocation of the host's memory, if
    the call does not say it. BATCH: several copies in one call; the record has the addresses of the first. ORDER: a wait by which HIP
    keeps its own order, and not for an event of the program. NOT_CHOSEN: a launch outside of the ranges that the user chose."""

    GRAPH_NODE = 1
    SYNCHRONOUS = 2
    CAPTURED = 4
    HOST_CLOCK = 8
    FROM_BEFORE = 16
    BY_ROCR = 32
    HOST_MEMORY = 64
    BATCH = 128
    ORDER = 256
    NOT_CHOSEN = 512


class SyncTarget(IntEnum):
    """What the host waits for. OPERATION: for a stream of HIP, and so for the operation that was given to it last."""

    STREAM = 0
    EVENT = 1
    CONTEXT = 2
    OPERATION = 3


class QueueKind(IntEnum):
    """What kind of stream a queue is. From NON_BLOCKING on, it waits for no other stream by itself. HARDWARE: a queue of ROCr's, into
    which HIP puts several streams. H2D, D2H, D2D: what copies so on an AMD GPU."""

    LEGACY = 0
    PER_THREAD = 1
    BLOCKING = 2
    NON_BLOCKING = 3
    HARDWARE = 4
    H2D = 5
    D2H = 6
    D2D = 7


LOG_HEADER = Layout(
    "LogHeader",
    4096,
    (
        Field("u64", "capacity", about="records, a power of two"),
        Field("u64", "clock", about="1: times are on the embedded device's virtual clock"),
        Field("u64", "reserved", about="records that were begun", align=64),
        Field("u64", "lost", about="records that found no room", align=64),
        Field("u64", "consumed", about="records that were read; the tool writes it", align=64),
    ),
)
RECORD_SIZE = 128
PART_OFFSET = 64
HEADER = (
    Field("u64", "mark", about="position + 1, written last"),
    Field("u64", "id"),
    Field("u16", "kind"),
    Field("u16", "flags"),
    Field("u32", "thread"),
    Field("u64", "call_ns", about="of the driver call, on the clock in the log's header"),
    Field("u64", "return_ns"),
    Field("u64", "stream", about="the handle as the application gave it"),
    Field("u32", "queue", about="the agent's number of the stream, because handles are reused"),
    Field("u32", "context", about="its serial number; a snapshot has its GPU"),
    Field("i32", "result", about="CUresult"),
    Field("u32", "stack", about="number of a host stack, 0 for none"),
)
_LAUNCH = (
    Field("u32", "slot", about="kernel name; ~0: never seen"),
    Field(
        "u32",
        "outcome",
        about="0 instrumented, 254 copy not ready, 255 not matched or no answer yet, else 1 + Reason",
    ),
    Field("u32", "grid", 3),
    Field("u32", "block", 3),
    Field("u32", "shared"),
    Field("u32", "node"),
    Field("u64", "exec"),
)
_RANGES = Field("u32", "ranges", about="number of the open ranges, 0 for none")
_KEPT = Field(
    "u64", "kept", about="of a wait: id of the first launch whose values were kept after it; 0: none"
)


class Part(Record):
    """The last 64 bytes of records of these kinds."""

    name: str
    kinds: tuple[Kind, ...]
    about: str
    fields: tuple[Field, ...]

    def offsets(self) -> Iterator[tuple[Field, int]]:
        """Yield each field with its offset in the part: naturally aligned, as in C."""
        return _placed(self.fields)


PARTS = (
    Part(
        "kernel",
        (Kind.KERNEL,),
        "a launch; with flag GRAPH_NODE, one kernel node's part of a replay, whose call times are those of the graph launch",
        (
            *_LAUNCH,
            Field("u64", "replay"),
            Field("u32", "build", about="if instrumented: the tool's number of the kernel's build"),
            _RANGES,
        ),
    ),
    Part(
        "copy",
        (Kind.H2D, Kind.D2H, Kind.D2D, Kind.H2H, Kind.MEMSET),
        "a copy or a memset",
        (Field("u64", "bytes"), Field("u64", "destination"), Field("u64", "source"), _KEPT),
    ),
    Part(
        "event",
        (Kind.RECORDED, Kind.WAIT),
        "an event is recorded, or a stream waits for one",
        (
            Field("u64", "event", about="its handle"),
            Field(
                "u64",
                "record",
                about="of a wait: id of the record operation; 0: unknown, ~0: the event has completed or was never recorded",
            ),
        ),
    ),
    Part(
        "graph",
        (Kind.GRAPH,),
        "a graph launch",
        (
            Field("u64", "exec", about="serial number of the executable graph"),
            Field("u64", "replay", about="from 1"),
            Field("u64", "first", about="id of the first kernel node"),
            Field("u32", "kernels", about="kernel nodes"),
            Field("u32", "others", about="other nodes"),
            _RANGES,
        ),
    ),
    Part(
        "sync",
        (Kind.SYNC,),
        "the host waits",
        (
            Field("u32", "what", about="0 stream, 1 event, 2 context, 3 the operation `record`"),
            Field("u64", "event", about="its handle"),
            Field("u64", "record", about="id of the record operation"),
            _KEPT,
        ),
    ),
    Part(
        "api",
        (Kind.API, Kind.HOST_FUNCTION),
        "any other call that is logged, such as an allocation or a free; a host function in a stream",
        (
            Field("u32", "function", about="number in the agent's table; ~0: none"),
            Field(
                "u32",
                "epoch",
                about="of an allocation: the first in which it exists, modulo 2^32; of a free: the last",
            ),
            Field("u64", "bytes"),
            Field("char", "name", 40),
            Field("u64", "address", about="of an allocation or free that the driver did"),
        ),
    ),
    Part(
        "span",
        (Kind.SPAN,),
        "device times of an operation, from timing events, from CUPTI (flag HOST_CLOCK), or from ROCr (flag BY_ROCR)",
        (
            Field("u64", "of", about="id of the operation"),
            Field("u64", "start", about="ns on the agent's event clock; 0: unknown"),
            Field("u64", "end"),
            Field("u32", "error_ns"),
        ),
    ),
    Part(
        "clock",
        (Kind.CLOCK,),
        "one bracket of the GPU's clock",
        (
            Field("u64", "host_before"),
            Field("u64", "gpu", about="globaltimer"),
            Field("u64", "host_after"),
            Field("u64", "clock64"),
            Field("u32", "sm", about="~0: clock64 was not read"),
            Field("u32", "tick_ns", about="0: unknown"),
        ),
    ),
    Part(
        "node",
        (Kind.NODE,),
        "a kernel node of an executable graph, when the graph is made",
        (*_LAUNCH, Field("u64", "handle")),
    ),
    Part(
        "edge",
        (Kind.EDGE,),
        "in that graph, kernel node `after` runs after `before`",
        (
            Field("u64", "exec"),
            Field("u32", "before", about="index of a kernel node; the path may lead through other nodes"),
            Field("u32", "after"),
        ),
    ),
    Part("fault", (Kind.FAULT,), "the context broke", (Field("i32", "error"),)),
    Part(
        "queue",
        (Kind.QUEUE,),
        "a stream was first seen",
        (
            Field(
                "u32",
                "queue_kind",
                about="0 legacy, 1 per-thread default, 2 blocking, 3 non-blocking, 4 hardware, 5 h2d, 6 d2h, 7 d2d",
            ),
            Field("i32", "priority"),
        ),
    ),
)


def _placed(fields: Iterable[Field]) -> Iterator[tuple[Field, int]]:
    at = 0
    for field in fields:
        size = SIZES[field.type]
        align = field.align or size
        at = -(-at // align) * align
        yield field, at
        at += size * field.count


def header_offsets() -> Iterator[tuple[Field, int]]:
    """Yield each field that all records have, with its offset."""
    return _placed(HEADER)


# --- the C++ header and the table in the documentation ------------------------------------------------------------

# Python's enum → (its name in C++, underlying type). Flags and counters are unscoped: `kStop`; the others scoped: `Message::Hello`.
_SCOPED = {
    Message: "uint32_t",
    Vendor: "uint32_t",
    Unit: "uint32_t",
    PatchFailed: "uint32_t",
    Place: "uint32_t",
    HostArgument: "uint32_t",
    AttachStatus: "int",
    Kind: "uint16_t",
    SyncTarget: "uint32_t",
    QueueKind: "uint32_t",
}
_UNSCOPED = {
    DrainFlag: "uint32_t",
    SnapshotFlag: "uint32_t",
    Reason: "uint32_t",
    Outcome: "uint32_t",
    RecordFlag: "uint16_t",
}
# The constants of the header: type → name and value.
_CONSTANTS: Mapping[str, Mapping[str, int]] = {
    "uint32_t": {
        "PROTOCOL_VERSION": PROTOCOL_VERSION,
        "FRAME_LIMIT": FRAME_LIMIT,
        "SITES_LIMIT": SITES_LIMIT,
        "STACK_LIMIT": STACK_LIMIT,
        "MOST_STACKS": MOST_STACKS,
        "SLOTS": SLOTS,
        "SHARDS": SHARDS,
        "SHARDS_SHIFT": maps.SHARDS_SHIFT,
        "REASONS": REASONS,
        "NO_FIELD": NO_FIELD,
        "NO_SLOT": NO_SLOT,
        "NO_SM": NO_SM,
        "NO_FUNCTION": NO_FUNCTION,
        "SHAPE_SIZE": SHAPE_SIZE,
        "NUMBER_BITS": NUMBER_BITS,
        "TICK_BITS": TICK_BITS,
        "OWNER_SIZE": OWNER_SIZE,
        "HOST_POINTS": len(HOST_POINTS),
        "OPERATION_STUB": OPERATION_STUB,
        "BLOCK_LAUNCH": LaunchBlock.launch_id,
        "BLOCK_REPLAY": LaunchBlock.replay,
        "GRANULE_BITS": patch_function.GRANULE_BITS,
        "SLOT_BITS": patch_function.SLOT_BITS,
        "PATCH_PROBES": patch_function.PROBES,
        "PATCH_SHAPES": patch_function.MOST_SHAPES,
        "PATCH_HEADER": patch_function.HEADER,
        "PATCH_BLOCK": patch_function.BLOCK,
        "PATCH_STREAM": patch_function.STREAM,
        "PATCH_GRAPH": patch_function.GRAPH,
        "PATCH_PLACES": patch_function.GRAPH_PLACES,
        "PATCH_NODES": patch_function.NODES,
        "INSTRUCTION_SIZE": patch_function.INSTRUCTION_SIZE,
    },
    "uint64_t": {
        "PATCH_OPTIONAL": patch_function.OPTIONAL,
        "IMAGE_LIMIT": IMAGE_LIMIT,
        "MEMORY_LIMIT": MEMORY_LIMIT,
        "SITE_ARRAY_LIMIT": SITE_ARRAY_LIMIT,
        "RING_LIMIT": RING_LIMIT,
        "LOG_LIMIT": LOG_LIMIT,
        "LEAST_CAPACITY": LEAST_CAPACITY,
        "MAP_ALIGNMENT": maps.ALIGNMENT,
        "RING_HEADER": maps.HEADER,
        "RING_SHARD": maps.RING_SHARD,
        "RING_PAGE": maps.RING_PAGE,
        "NO_RECORD": NO_RECORD,
        "OTHER_OPERATION": OTHER_OPERATION,
        "HASH_FACTOR": patch_function.HASH_FACTOR,
        "PATCH_GRAPH_MARK": patch_function.GRAPH_MARK,
        "PATCH_RECORDS": patch_function.RECORDS,
    },
}
_TEXTS = {
    "STACK_TOO_DEEP": STACK_TOO_DEEP,
    "STACK_NOT_UNWOUND": STACK_NOT_UNWOUND,
    "UNKNOWN_RANGE": UNKNOWN_RANGE,
    "SOCKET_VARIABLE": SOCKET_VARIABLE,
    "CUPTI_VARIABLE": CUPTI_VARIABLE,
    "SANITIZER_VARIABLE": SANITIZER_VARIABLE,
    "CUPTI_AUTOMATIC": CUPTI_AUTOMATIC,
    "FILE_PREFIX": FILE_PREFIX,
    "STARTING_SUFFIX": STARTING_SUFFIX,
    "LACKS_OBSOLETE": LACKS_OBSOLETE,
    "LACKS_HOLDING": LACKS_HOLDING,
    "LACKS_LOG": LACKS_LOG,
    "LACKS_CALL": LACKS_CALL,
    "LACKS_EXIT": LACKS_EXIT,
    "LACKS_COMPILERS": LACKS_COMPILERS,
    "LACKS_CUPTI": LACKS_CUPTI,
    "LACKS_SANITIZER": LACKS_SANITIZER,
    "AMBIGUOUS": AMBIGUOUS,
    "ALREADY_CHANGED": ALREADY_CHANGED,
    "VARIABLES_TABLE": TABLE,
    "GRIDS_VARIABLE": GRIDS,
}


def _camel(name: str) -> str:
    """``MAP_TOO_SMALL`` → ``MapTooSmall``; ``H2D`` stays."""
    return "".join(word if any(c.isdigit() for c in word) else word.capitalize() for word in name.split("_"))


def _declaration(field: Field) -> str:
    return f"{_C_TYPES[field.type]} {field.name}{f'[{field.count}]' if field.count > 1 else ''};"


def cpp() -> str:
    """Return the text of definitions.h."""
    out = ["// Made by definitions.py, which is the place to change.", "#pragma once", ""]
    headers = "array atomic cstddef cstdint optional string tuple utility vector"
    out += [*(f"#include <{name}>" for name in headers.split()), "", "namespace gpubpf {", ""]
    for type_, constants in _CONSTANTS.items():
        suffix = "ull" if type_ == "uint64_t" else "u"
        out += [f"constexpr {type_} k{_camel(name)} = {value}{suffix};" for name, value in constants.items()]
    out += [f'constexpr char k{_camel(name)}[] = "{text}";' for name, text in _TEXTS.items()]
    out.append(f'constexpr char kClockKernel[] = R"ptx({CLOCK_KERNEL.read_text()})ptx";')
    for machine, stub in HOST_STUBS.items():
        out.append(f"constexpr uint8_t kHostStub_{machine}[] = {{{', '.join(map(hex, stub))}}};")
    points = ", ".join(f"{_camel(point)} = {number}" for number, point in enumerate(HOST_POINTS))
    out += ["", f"enum class HostPoint : uint32_t {{ {points} }};"]
    for point in HOST_POINTS:  # the fields of the programs' contexts
        out.append(f"struct Host{_camel(point)} {{ uint64_t {', '.join(CONTEXTS[point])}; }};")
    for enums, head, prefix in ((_SCOPED, "enum class", ""), (_UNSCOPED, "enum", "k")):
        for enum, type_ in enums.items():
            members = ", ".join(f"{prefix}{_camel(member.name)} = {member.value}" for member in enum)
            out += ["", f"{head} {enum.__name__} : {type_} {{ {members} }};"]
    out += [
        "",
        f"constexpr uint32_t outcome_of(Reason reason) {{ return {outcome_of(Reason(0))} + reason; }}",
    ]
    out += [
        f"constexpr Reason reason_of(uint32_t outcome) {{ return Reason(outcome - {outcome_of(Reason(0))}); }}"
    ]
    out += ["", "namespace message {"]
    for message in MESSAGES:
        out += ["", *packing.cpp(message)]
    out += ["", "}  // namespace message"]
    for layout in (SLOT, CONTROL, LOG_HEADER, PATCH):
        out += ["", *_structure(layout)]
    for part in PARTS:
        fields = " ".join(_declaration(field) for field in part.fields)
        out += ["", f"struct {_camel(part.name)}Part {{ {fields} }};"]
    out += ["", "struct Record {"]
    for field in HEADER:
        line = _declaration(field)
        out.append("  Kind kind{};" if field.name == "kind" else f"  {line[:-1]} = 0;")
    out += ["  union {", "    uint64_t part[8] = {};"]
    out += [f"    {_camel(part.name)}Part {_member(part)};" for part in PARTS]
    out += ["  };", "};", f"static_assert(sizeof(Record) == {RECORD_SIZE});"]
    out += [f"static_assert(offsetof(Record, {f.name}) == {at});" for f, at in header_offsets()]
    out.append(f"static_assert(offsetof(Record, part) == {PART_OFFSET});")
    for part in PARTS:
        out += [
            f"static_assert(offsetof({_camel(part.name)}Part, {f.name}) == {at});" for f, at in part.offsets()
        ]
    return "\n".join([*out, "", "}  // namespace gpubpf", ""])


def _structure(layout: Layout) -> Iterator[str]:
    """Yield the declaration of a layout, and checks that the compiler places its fields as `Layout.offsets` does."""
    yield f"struct {layout.name} {{"
    end = 0
    for field, at in layout.offsets():
        end = at + SIZES[field.type] * field.count
        type_ = f"std::atomic<{_C_TYPES[field.type]}>" if layout.atomic else _C_TYPES[field.type]
        count = f"[{field.count}]" if field.count > 1 else ""
        about = f"  // {field.about}" if field.about else ""
        yield f"  {f'alignas({field.align}) ' if field.align else ''}{type_} {field.name}{count};{about}"
    if layout.size > end:
        yield f"  char rest_[{layout.size - end}];"
    if layout.tail:
        yield f"  {layout.tail}"
    yield "};"
    size = f"offsetof({layout.name}, slots)" if layout.tail else f"sizeof({layout.name})"
    yield f"static_assert({size} == {layout.size});"
    for field, at in layout.offsets():
        yield f"static_assert(offsetof({layout.name}, {field.name}) == {at});"


def _member(part: Part) -> str:
    """Return the part's name in `struct Record`, where all records have a field `queue`."""
    return f"{part.name}_part" if any(field.name == part.name for field in HEADER) else part.name


def markdown() -> str:
    """Return the tables of log records as they stand in the documentation."""
    rows = ["| at | field of the header | meaning |", "|---|---|---|"]
    rows += [_row(field, at) for field, at in _placed(LOG_HEADER.fields)]
    rows += ["", "| at | field of every record | meaning |", "|---|---|---|"]
    rows += [_row(field, at) for field, at in header_offsets()]
    rows += ["", "| kind | what it records | fields, each with its offset |", "|---|---|---|"]
    for part in PARTS:
        kinds = ", ".join(f"{kind.value} {kind.name.lower()}" for kind in part.kinds)
        rows.append(
            f"| {kinds} | {part.about} | {'; '.join(_described(f, at) for f, at in part.offsets())} |"
        )
    rows += ["", "| flag | meaning |", "|---|---|"]
    meanings = dict(re.findall(_MEANING, " ".join((RecordFlag.__doc__ or "").split())))
    rows += [f"| {flag.value} {flag.name} | {meanings[flag.name or '']} |" for flag in RecordFlag]
    return "\n".join(rows) + "\n"


_MEANING = r"([A-Z_]{3,}): (.*?)\.(?= [A-Z_]{3,}:|$)"


def _row(field: Field, at: int) -> str:
    return f"| {at} | {field.type} {field.name} | {field.about} |".replace("|  |", "| |")


def _described(field: Field, at: int) -> str:
    count = f"[{field.count}]" if field.count > 1 else ""
    about = f" ({field.about})" if field.about else ""
    return f"{field.type} {field.name}{count} at {PART_OFFSET + at}{about}"


if __name__ == "__main__":
    sys.stdout.write(markdown() if "--markdown" in sys.argv else cpp())
