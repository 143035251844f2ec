"""Lower a verified program as a patch: a function that NVIDIA's Compute Sanitizer API calls at places in a kernel's machine code.

    reason = refusal(fragment, "exit")           # None: the API supplies all that the program reads
    text = patch_module([Patch(fragment, "exit", EXIT)], block, table, (9, 0))

A patch gets the instruction's address (pc) and the operands in SIGNATURES. The launch's arguments come from GPU memory, not from the
data that the API passes: all kernel nodes of a graph get the data that was set last (docs/gpu.md). From its pc and the launch's shape,
a patch finds the launch block in a table at a constant address, which the agent fills before a launch:

    table      HEADER bytes; their first u64 counts calls in launches of an unknown shape. Then SLOTS slots of 16 bytes: {u64 granule,
               u64 function}. granule: pc >> GRANULE_BITS, or 0 if the slot is free. A lookup begins at slot_of(granule) and reads at
               most PROBES slots. function: the address of the function's record; 0 if no program runs in the function.
    function   {u64 pc of its first instruction, u64 address of its first shape, or 0}
    shape      {u64 address of the next shape, or 0, u32 threads of a block x, y, z, u32 blocks of the grid x, y, z}, then the launch
               block at BLOCK.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpubpf.ebpf.bytecode import KINDS
from gpubpf.ebpf.maps import SHARDS_SHIFT
from gpubpf.errors import Error
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.lower.launch_block import LaunchBlock, map_of
from gpubpf.record import Record

GRANULE_BITS = 7  # functions begin at multiples of this many bytes (as a power of two) in GPU memory
SLOT_BITS = 16
SLOTS = 1 << SLOT_BITS
HASH_FACTOR = 0x9E3779B97F4A7C15  # the slot is the highest SLOT_BITS bits of the product
HEADER = 64  # bytes
PROBES = 32
MOST_SHAPES = 1024  # shapes of a function; the limit ends the search in a damaged list
BLOCK = 32  # offset in a shape's record
INSTRUCTION_SIZE = (
    16  # bytes of a machine instruction; a site's number counts instructions from the function's beginning
)

# Kinds of instructions by the API's numbers (Sanitizer_InstructionId in sanitizer_patching.h).
BLOCK_ENTER, BLOCK_EXIT, GLOBAL_ACCESS, SHARED_ACCESS, LOCAL_ACCESS, BARRIER = 1, 2, 3, 4, 5, 6
BARRIER_RELEASE = 29
# Flags of an access (Sanitizer_DeviceMemoryFlags). Reading and writing are the same bits as in `enum gpu_effect`.
_READ_WRITE, _PREFETCH, _ONLY_WRITES = 3, 8, 256


class Signature(Record):
    """The parameters that the API passes to a patch at one kind of instruction.

    point: the point of the programs that can run there
    parameters: (name, PTX type) of each parameter after `data`
    space: the memory space of an access; "" at other instructions
    fields: the context fields that a patch can supply, besides `launch`, which every point has
    """

    point: str
    parameters: tuple[tuple[str, str], ...]
    space: str = ""
    fields: tuple[str, ...] = ("site",)


_PC = (("pc", "b64"),)
_ACCESS = (*_PC, ("address", "b64"), ("size", "b32"), ("flags", "b32"), ("value", "b64"))
_ACCESSED = ("site", "address", "width", "space", "kind", "active", "effect")
_BARRIER = (*_PC, ("index", "b32"), ("threads", "b32"), ("flags", "b32"))
SIGNATURES = {
    BLOCK_ENTER: Signature("entry", _PC),
    BLOCK_EXIT: Signature("exit", _PC, fields=("site", "work")),
    GLOBAL_ACCESS: Signature("access", _ACCESS, "global", _ACCESSED),
    SHARED_ACCESS: Signature("access", _ACCESS, "shared", _ACCESSED),
    LOCAL_ACCESS: Signature("access", _ACCESS, "local", _ACCESSED),
    BARRIER: Signature("barrier_arrive", _BARRIER, fields=("site", "barrier", "threads")),
    BARRIER_RELEASE: Signature("barrier_leave", _BARRIER, fields=("site", "barrier", "threads")),
}
_SPACES = {"global": 0, "shared": 1, "local": 2}  # enum gpu_space
# The PTX version and the architecture of a patch, by the GPU's major number: the first version that has the architecture.
_ARCHITECTURES = {
    7: ("6.3", "sm_75"),
    8: ("7.0", "sm_80"),
    9: ("7.8", "sm_90"),
    10: ("8.6", "sm_100"),
    11: ("9.0", "sm_110"),
    12: ("8.7", "sm_120"),
}


class Patch(Record):
    """A program as a patch: the function `name` in the PTX, for one kind of instruction (a key of SIGNATURES)."""

    fragment: Fragment
    instruction: int
    name: str


def refusal(fragment: Fragment, point: str) -> str | None:
    """Return why a patch cannot run a program at a point; None if it can."""
    found = [signature for signature in SIGNATURES.values() if signature.point == point]
    if not found:
        return f"Compute Sanitizer has no patches at point {point}"
    if fragment.waits:
        return "a thread of the program may wait for another one, which a patch must not"
    for argument in fragment.arguments:
        if argument.kind == "context" and argument.field not in found[0].fields:
            return f"Compute Sanitizer does not give {argument.field} at point {point}"
    return None


def slot_of(granule: int) -> int:
    """Return the slot at which the search for a granule begins."""
    return (granule * HASH_FACTOR & (1 << 64) - 1) >> 64 - SLOT_BITS


def patch_module(patches: Sequence[Patch], block: LaunchBlock, table: int, cc: tuple[int, int]) -> str:
    """Return the PTX of patches, for `ptxas --compile-as-tools-patch` or for the embedded device.

    block: the layout of the launch blocks in the table.
    table: the table's address in GPU memory.
    cc: the GPU's compute capability.
    Raises Error for an unknown GPU, or for a program that `refusal` refuses.
    """
    if cc[0] not in _ARCHITECTURES:
        raise Error(f"no patches for compute capability {cc[0]}.{cc[1]}; leave out --sass")
    version, architecture = _ARCHITECTURES[cc[0]]
    head = f".version {version}\n.target {architecture}\n.address_size 64\n"
    return head + "".join(_function(patch, block, table) for patch in patches)


def _function(patch: Patch, block: LaunchBlock, table: int) -> str:
    signature, fragment = SIGNATURES[patch.instruction], patch.fragment
    if (reason := refusal(fragment, signature.point)) is not None:
        raise Error(f"{fragment.function}: {reason}")
    parameters = "".join(f", .param .{type_} {name}" for name, type_ in signature.parameters)
    lines = [f".visible .func (.param .b32 result) {patch.name}(.param .b64 data{parameters})", "{"]
    lines += [f".reg .{argument.type} {argument.register};" for argument in fragment.arguments]
    lines += [f".reg .{type_} %gpubpf_0{name};" for name, type_ in signature.parameters]
    lines += [f"ld.param.{type_} %gpubpf_0{name}, [{name}];" for name, type_ in signature.parameters]
    if signature.point == "access":
        lines += _OF_ACCESS
    lines += [line.format(table=table + HEADER, lost=table) for line in _FIND]
    for argument in fragment.arguments:
        lines += _argument(argument, signature, block)
    lines += [fragment.ptx.strip(), "bra $gpubpf_end;"]
    lines += [line.format(lost=table) for line in _LOST]
    lines += ["$gpubpf_end:", "st.param.b32 [result], 0;", "ret;", "}"]
    return "\n".join(lines) + "\n"


def _argument(argument: Argument, signature: Signature, block: LaunchBlock) -> list[str]:
    register, bits = argument.register, int(argument.type[1:])
    if argument.kind == "context":
        return _field(argument, signature)
    if argument.kind == "group":
        return [f"mov.u32 {register}, %smid;"]
    if argument.kind == "shard":
        base, sites = block.bases[map_of(argument)], block.capacities[map_of(argument)]
        return [
            f"ld.global.u64 {register}, [{_LAUNCH}+{base}];",
            f"ld.global.u32 %gpubpf_0word, [{_LAUNCH}+{sites + SHARDS_SHIFT // 8}];",
            "mov.u32 %gpubpf_0number, %smid;",
            "and.b32 %gpubpf_0number, %gpubpf_0number, %gpubpf_0word;",
            f"ld.global.u32 %gpubpf_0word, [{_LAUNCH}+{sites}];",
            "mul.lo.u32 %gpubpf_0number, %gpubpf_0number, %gpubpf_0word;",
            f"mad.wide.u32 {register}, %gpubpf_0number, {argument.width}, {register};",
        ]
    words = {
        "launch": block.launch_id,
        "replay": block.replay,
        "pid_tgid": block.pid_tgid,
        "kernel": block.kernel,
        "epoch": block.epoch,
    }
    width = 8
    if argument.kind == "param":
        offset: int | None = block.params[map_of(argument)][0] + argument.offset
        width = argument.width
    elif argument.kind == "map_base":
        offset = block.bases[map_of(argument)]
    elif argument.kind == "map_capacity":
        offset = block.capacities[map_of(argument)]
    else:
        offset = words.get(argument.kind)
    if offset is None:
        raise Error(f"a device program reads {argument.kind!r}, which the launch block does not have")
    return [f"ld.global.u{min(8 * width, bits)} {register}, [{_LAUNCH}+{offset}];"]


def _field(argument: Argument, signature: Signature) -> list[str]:
    """Return instructions that set the register of an argument that is a context field."""
    register, bits = argument.register, int(argument.type[1:])
    if argument.field in ("site", "address"):
        wide = "%gpubpf_0site" if argument.field == "site" else "%gpubpf_0address"
        return [f"cvt.u{bits}.u64 {register}, {wide};" if bits < 64 else f"mov.b64 {register}, {wide};"]
    if argument.field == "active":
        narrow, lines = "%gpubpf_0word", ["activemask.b32 %gpubpf_0word;"]
    elif argument.field == "work":  # machine code is not counted
        narrow, lines = "0", []
    elif argument.field == "space":
        narrow, lines = str(_SPACES[signature.space]), []
    else:
        names = {"width": "size", "barrier": "index"}
        narrow, lines = f"%gpubpf_0{names.get(argument.field, argument.field)}", []
    if bits == 64 and narrow.startswith("%"):
        return [*lines, f"cvt.u64.u32 {register}, {narrow};"]
    return [*lines, f"mov.b{bits} {register}, {narrow};"]


_LAUNCH = "%gpubpf_0launch"  # the address of the launch block
# Turn the API's flags into the effect of an access. Prefetches access nothing. An atomic without a result counts as reading and
# writing.
_OF_ACCESS = (
    ".reg .b32 %gpubpf_0effect, %gpubpf_0kind, %gpubpf_0bits;",
    ".reg .pred %gpubpf_0is;",
    f"and.b32 %gpubpf_0bits, %gpubpf_0flags, {_PREFETCH};",
    "setp.ne.u32 %gpubpf_0is, %gpubpf_0bits, 0;",
    "@%gpubpf_0is bra $gpubpf_end;",
    f"and.b32 %gpubpf_0effect, %gpubpf_0flags, {_READ_WRITE};",
    f"and.b32 %gpubpf_0bits, %gpubpf_0flags, {_ONLY_WRITES};",
    "setp.ne.u32 %gpubpf_0is, %gpubpf_0bits, 0;",
    f"selp.b32 %gpubpf_0effect, {_READ_WRITE}, %gpubpf_0effect, %gpubpf_0is;",
    "sub.u32 %gpubpf_0kind, %gpubpf_0effect, 1;",
)
assert KINDS[:3] == ("load", "store", "atomic")  # effect - 1
# Find the launch block and the site's number.
_FIND = (
    ".reg .b64 %gpubpf_0granule, %gpubpf_0at, %gpubpf_0slot, %gpubpf_0key, %gpubpf_0site, %gpubpf_0launch;",
    ".reg .b32 %gpubpf_0left, %gpubpf_0word, %gpubpf_0number;",
    ".reg .pred %gpubpf_0yes;",
    f"shr.u64 %gpubpf_0granule, %gpubpf_0pc, {GRANULE_BITS};",
    f"mul.lo.u64 %gpubpf_0slot, %gpubpf_0granule, {HASH_FACTOR - (1 << 64)};",
    f"shr.u64 %gpubpf_0slot, %gpubpf_0slot, {64 - SLOT_BITS};",
    f"mov.u32 %gpubpf_0left, {PROBES};",
    "$gpubpf_probe:",
    "shl.b64 %gpubpf_0at, %gpubpf_0slot, 4;",
    "add.u64 %gpubpf_0at, %gpubpf_0at, {table};",
    "ld.global.u64 %gpubpf_0key, [%gpubpf_0at];",
    "setp.eq.u64 %gpubpf_0yes, %gpubpf_0key, %gpubpf_0granule;",
    "@%gpubpf_0yes bra $gpubpf_known;",
    "setp.eq.u64 %gpubpf_0yes, %gpubpf_0key, 0;",
    "@%gpubpf_0yes bra $gpubpf_end;",
    "add.u64 %gpubpf_0slot, %gpubpf_0slot, 1;",
    f"and.b64 %gpubpf_0slot, %gpubpf_0slot, {SLOTS - 1};",
    "sub.u32 %gpubpf_0left, %gpubpf_0left, 1;",
    "setp.eq.u32 %gpubpf_0yes, %gpubpf_0left, 0;",
    "@%gpubpf_0yes bra $gpubpf_end;",
    "bra $gpubpf_probe;",
    "$gpubpf_known:",
    "ld.global.u64 %gpubpf_0at, [%gpubpf_0at+8];",
    "setp.eq.u64 %gpubpf_0yes, %gpubpf_0at, 0;",
    "@%gpubpf_0yes bra $gpubpf_end;",  # no program runs in this function
    "ld.global.u64 %gpubpf_0site, [%gpubpf_0at];",
    "sub.u64 %gpubpf_0site, %gpubpf_0pc, %gpubpf_0site;",
    f"shr.u64 %gpubpf_0site, %gpubpf_0site, {INSTRUCTION_SIZE.bit_length() - 1};",
    "ld.global.u64 %gpubpf_0launch, [%gpubpf_0at+8];",
    f"mov.u32 %gpubpf_0left, {MOST_SHAPES};",
    "$gpubpf_shape:",
    "setp.eq.u64 %gpubpf_0yes, %gpubpf_0launch, 0;",
    "@%gpubpf_0yes bra $gpubpf_lost;",
    *(
        line
        for offset, special in enumerate(
            ("%ntid.x", "%ntid.y", "%ntid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z")
        )
        for line in (
            f"ld.global.u32 %gpubpf_0word, [%gpubpf_0launch+{8 + 4 * offset}];",
            f"mov.u32 %gpubpf_0number, {special};",
            "setp.ne.u32 %gpubpf_0yes, %gpubpf_0word, %gpubpf_0number;",
            "@%gpubpf_0yes bra $gpubpf_other;",
        )
    ),
    f"add.u64 %gpubpf_0launch, %gpubpf_0launch, {BLOCK};",
    "bra $gpubpf_found;",
    "$gpubpf_other:",
    "ld.global.u64 %gpubpf_0launch, [%gpubpf_0launch];",
    "sub.u32 %gpubpf_0left, %gpubpf_0left, 1;",
    "setp.eq.u32 %gpubpf_0yes, %gpubpf_0left, 0;",
    "@%gpubpf_0yes bra $gpubpf_lost;",
    "bra $gpubpf_shape;",
    "$gpubpf_found:",
)
# Count a call in a launch of an unknown shape.
_LOST = (
    "$gpubpf_lost:",
    "mov.u64 %gpubpf_0at, {lost};",
    "red.global.add.u64 [%gpubpf_0at], 1;",
)
