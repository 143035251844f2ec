"""Lower a verified program as a patch: a function that NVIDIA's Compute Sanitizer API calls at places in a kernel's machine code.

    reason = refusal(fragment, "exit")           # None: the API can give what the program reads
    text = patch_module([Patch(BLOCK_EXIT, "name", (PatchProgram(fragment),))], block, table, (9, 0))

A patch gets the instruction's address (pc) and the operands in SIGNATURES. The launch's arguments come from GPU memory, not from the
data that the API passes: all kernel nodes of a graph get the data that was set last (docs/gpu.md). From its pc and the launch's shape,
a patch finds the launch block in a table at a constant address, which the agent fills before a launch:

    table      HEADER bytes: {u64 calls in launches of an unknown shape, u64 calls in code of no known function}; then SLOTS slots of
               16 bytes: {u64 granule, u64 function}. granule: pc >> GRANULE_BITS, or 0 if the slot is free. A granule's slot is the
               first one from slot_of(granule) on that holds it, at most PROBES - 1 further. function: the address of a record, or 0.
               No program wants a function without a record.
    function   {u64 pc of its first instruction, u64 address of its first shape, or 0}
    shape      {u64 address of the next shape, or 0, u32 threads of a block x, y, z, u32 blocks of the grid x, y, z}, then the launch
               block at BLOCK. Its words for the launch's number and the replay cell have other contents: {u32 the shape's number in
               the context, u32 a bit for each program that the kernel wants, u64 the high bits of the numbers of launches (those above
               NUMBER_BITS)}.

If a program reads the launch's number, the agent sets the data: STREAM << NUMBER_BITS | the number's low bits, or for all nodes of a
graph GRAPH << NUMBER_BITS | the offset of this record from the table. Other data belongs to no launch that the agent knows.

    graph      {u64 GRAPH_MARK, u64 address of the replay cell, u32 places, u32 0}, then for each shape by its number a place: the
               offset of its nodes from the graph's record (u32), or 0 if no node has this shape.
    nodes      {u32 nodes, u32 threads of the grid, u32 offset of a counter from the graph's record}, then the number of each node
               (u32). 0 nodes: they cannot be told apart, so no program runs. Several nodes run one after the other: each thread counts
               itself when it begins, so the counter says which node runs. The agent zeroes it before each launch of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpubpf.ebpf.bytecode import KINDS
from gpubpf.ebpf.maps import SHARDS_SHIFT
from gpubpf.errors import Error
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.lower.launch_block import LaunchBlock, map_of
from gpubpf.lower.numbers import global_warp
from gpubpf.record import Record

GRANULE_BITS = 7  # functions begin at multiples of this many bytes (as a power of two) in GPU memory
SLOT_BITS = 16
SLOTS = 1 << SLOT_BITS
HASH_FACTOR = 0x9E3779B97F4A7C15  # the slot is the highest SLOT_BITS bits of the product
HEADER = 64  # bytes
RECORDS = 8 << 20  # bytes for records, behind the slots
PROBES = 32
MOST_SHAPES = 1024  # shapes of a function; the limit ends the search in a damaged list
BLOCK = 32  # offset in a shape's record
WANTED = 4  # offset of the kernel's programs in the launch block; u32
MOST_PROGRAMS = 32
INSTRUCTION_SIZE = (
    16  # bytes of a machine instruction; a site's number counts instructions from the function's beginning
)

NUMBER_BITS = 40  # these bits of a launch's number count within a process
STREAM, GRAPH = 0x5B9F57, 0x5B9F47  # kinds of data, above NUMBER_BITS
GRAPH_MARK = 0x6770756270665B9F  # the first word of a graph's record
GRAPH_PLACES = 24  # offset in a graph's record
NODES = 12  # offset of the numbers of nodes

# Kinds of instructions by the API's numbers (Sanitizer_InstructionId in sanitizer_patching.h).
BLOCK_ENTER, BLOCK_EXIT, GLOBAL_ACCESS, SHARED_ACCESS, LOCAL_ACCESS, BARRIER = 1, 2, 3, 4, 5, 6
CALL, RETURN, COPY, REMOTE_ACCESS, MATRIX_ACCESS, BARRIER_RELEASE = 9, 10, 14, 17, 19, 29
BULK_TO_SHARED, BULK_TO_GLOBAL, BULK_IN_SHARED, TENSOR_LOAD = 30, 35, 36, 43
BULK_REDUCTION_TO_GLOBAL, BULK_REDUCTION_IN_SHARED = 37, 38
# Older versions of the library do not have these (12.4 has numbers up to 29, 13.0 up to 40): a module is patched without them.
OPTIONAL = sum(1 << number for number in range(BARRIER_RELEASE + 1, 64))
# Flags of an access (Sanitizer_DeviceMemoryFlags). Reading and writing are the same bits as in `enum gpu_effect`.
_READ_WRITE, _PREFETCH, _ONLY_WRITES = 3, 8, 256
_READS, _WRITES = 1, 2  # enum gpu_effect


class Access(Record):
    """One of the accesses of an instruction. A copy has two.

    space: the memory space.
    address: the parameter with the address; "" if the address is unknown.
    size: the register with the bytes of a thread, without its prefix. Threads without bytes do not take part. "": unknown.
    effect: what the access does: _READS, _WRITES or both; 0 if the parameter `flags` says it, and with it the kind.
    """

    space: str
    address: str = "address"
    size: str = "size"
    effect: int = 0

    @property
    def kind(self) -> str:
        """The kind of the access, of bytecode.KINDS; "" if the parameter `flags` says it."""
        return "async" if self.effect else ""


class Signature(Record):
    """The parameters that the API passes to a patch at one kind of instruction.

    point: the point of the programs that can run there
    parameters: (name, PTX type) of each parameter after `data`. Newer versions of the library may pass more
    accesses: the accesses of the instruction
    fields: the context fields that a patch can supply, besides `launch`, which every point has
    prepare: PTX statements before the programs
    """

    point: str
    parameters: tuple[tuple[str, str], ...]
    accesses: tuple[Access, ...] = ()
    fields: tuple[str, ...] = ("site",)
    prepare: tuple[str, ...] = ()


_PC = (("pc", "b64"),)
_ACCESS = (*_PC, ("address", "b64"), ("size", "b32"), ("flags", "b32"), ("value", "b64"))
_ACCESSED = ("site", "address", "width", "space", "kind", "active", "effect")
# A copy that only writes zeros may have no source. How many bytes of others are zeros is known from 13.5 on, and is not asked for.
_COPIED = (
    ".reg .b32 %gpubpf_0read;",
    "setp.eq.u64 %gpubpf_0is, %gpubpf_0source, 0;",
    "selp.b32 %gpubpf_0read, 0, %gpubpf_0size, %gpubpf_0is;",
)
# Each of the threads passes the address of a row of 16 bytes. A matrix has 8 rows.
_ROWS = (
    "mov.u32 %gpubpf_0bits, %laneid;",
    "shr.u32 %gpubpf_0bits, %gpubpf_0bits, 3;",
    "setp.ge.u32 %gpubpf_0is, %gpubpf_0bits, %gpubpf_0count;",
    "@%gpubpf_0is bra $gpubpf_end;",
)
# The machine makes one copy for all active threads of a warp, so the first one counts.
_ONCE = (
    ".reg .b32 %gpubpf_0before;",
    "activemask.b32 %gpubpf_0bits;",
    "mov.u32 %gpubpf_0before, %lanemask_lt;",
    "and.b32 %gpubpf_0bits, %gpubpf_0bits, %gpubpf_0before;",
    "setp.ne.u32 %gpubpf_0is, %gpubpf_0bits, 0;",
    "@%gpubpf_0is bra $gpubpf_end;",
)
# The size of a bulk copy: 16 bytes times the low half of the parameter.
_BLOCKS = (
    *_ONCE,
    ".reg .b32 %gpubpf_0bytes;",
    "and.b32 %gpubpf_0bytes, %gpubpf_0blocks, 0xffff;",
    "shl.b32 %gpubpf_0bytes, %gpubpf_0bytes, 4;",
)


def _bulk(
    source: str, to: str, *parameters: tuple[str, str], effect: int = _WRITES, first: str = "source"
) -> Signature:
    """Return the signature of a bulk copy.

    source, to: the memory spaces.
    parameters: those after both addresses.
    effect: on the destination.
    first: the address that is passed first.
    """
    both = [("source", "b64" if source == "global" else "b32"), ("to", "b64" if to == "global" else "b32")]
    accesses = (Access(source, "source", "bytes", _READS), Access(to, "to", "bytes", effect))
    order = both if first == "source" else both[::-1]
    return Signature("access", (*_PC, *order, *parameters), accesses, _ACCESSED, _BLOCKS)


_BULK = (("barrier", "b32"), ("blocks", "b32"))
_BARRIER = (*_PC, ("index", "b32"), ("threads", "b32"), ("flags", "b32"))
SIGNATURES = {
    BLOCK_ENTER: Signature("entry", _PC),
    BLOCK_EXIT: Signature("exit", _PC, fields=("site", "work")),
    GLOBAL_ACCESS: Signature("access", _ACCESS, (Access("global"),), _ACCESSED),
    SHARED_ACCESS: Signature("access", _ACCESS, (Access("shared"),), _ACCESSED),
    LOCAL_ACCESS: Signature("access", _ACCESS, (Access("local"),), _ACCESSED),
    REMOTE_ACCESS: Signature("access", _ACCESS, (Access("shared"),), _ACCESSED),
    COPY: Signature(
        "access",
        (*_PC, ("source", "b64"), ("to", "b32"), ("size", "b32")),
        (Access("global", "source", "read", _READS), Access("shared", "to", "size", _WRITES)),
        _ACCESSED,
        _COPIED,
    ),
    MATRIX_ACCESS: Signature(
        "access",
        (*_PC, ("address", "b32"), ("size", "b32"), ("flags", "b32"), ("count", "b32"), ("value", "b64")),
        (Access("shared"),),
        _ACCESSED,
        _ROWS,
    ),
    BULK_TO_SHARED: _bulk("global", "shared", *_BULK, ("multicast", "b32")),
    BULK_TO_GLOBAL: _bulk("shared", "global", ("blocks", "b32"), first="to"),
    BULK_IN_SHARED: _bulk("shared", "shared", *_BULK),
    BULK_REDUCTION_TO_GLOBAL: _bulk(
        "shared", "global", ("blocks", "b32"), effect=_READS | _WRITES, first="to"
    ),
    BULK_REDUCTION_IN_SHARED: _bulk("shared", "shared", *_BULK, effect=_READS | _WRITES),
    TENSOR_LOAD: Signature(
        "access",
        (
            *(*_PC, ("map", "b64"), ("to", "b32"), ("barrier", "b32")),
            *((f"coordinate{number}", "b32") for number in range(5)),
            *(("dimensions", "b32"), ("multicast", "b32"), ("mask", "b32"), ("mode", "b32")),
        ),
        (Access("tensor", "", "", _READS | _WRITES),),
        _ACCESSED,
        _ONCE,
    ),
    CALL: Signature("function_entry", (*_PC, ("target", "b64"), ("flags", "b32"))),
    RETURN: Signature("function_exit", _PC),
    BARRIER: Signature("barrier_arrive", _BARRIER, fields=("site", "barrier", "threads")),
    BARRIER_RELEASE: Signature("barrier_leave", _BARRIER, fields=("site", "barrier", "threads")),
}
_SPACES = {"global": 0, "shared": 1, "local": 2, "tensor": 6}  # enum gpu_space
# The PTX version and the architecture of a patch, by the GPU's major number: the first version that has the architecture.
_ARCHITECTURES = {
    7: ("6.3", "sm_75"),
    8: ("7.0", "sm_80"),
    9: ("7.8", "sm_90"),
    10: ("8.6", "sm_100"),
    11: ("9.0", "sm_110"),
    12: ("8.7", "sm_120"),
}


class PatchProgram(Record):
    """A program in a patch.

    fragment: the program.
    kinds: accesses at which it runs (of bytecode.KINDS); () means all.
    bit: the program runs only in kernels that have this bit in their launch blocks (WANTED); None: in all.
    access: index of the access in its signature.
    """

    fragment: Fragment
    kinds: tuple[str, ...] = ()
    bit: int | None = None
    access: int = 0


class Patch(Record):
    """A function in the PTX. The API calls only one at an instruction, so it runs all programs there.

    instruction: number of the instructions, a key of SIGNATURES.
    name: of the function.
    programs: what the function runs.
    """

    instruction: int
    name: str
    programs: tuple[PatchProgram, ...] = ()


class Choice(Record):
    """How a thread's block or warp is chosen to run the programs.

    code: sets the registers `skips` and `group`. Unless programs read the launch's number, its arguments `launch` and `replay` are the
        grid's number (%gridid) and 0.
    counting: the same, for patches at BLOCK_ENTER; it also counts the chosen ones.
    skips: a predicate: this thread runs no program.
    group: a number of 32 bits that all threads of a block or warp share.
    """

    code: Fragment
    counting: Fragment
    skips: str
    group: str


def refusal(fragment: Fragment, point: str) -> str | None:
    """Return why a patch cannot run a program at a point; None if it can."""
    found = [signature for signature in SIGNATURES.values() if signature.point == point]
    if point == "value":  # the API gives only the bytes of a store
        return "machine code does not tell the types of values"
    if not found:
        return f"Compute Sanitizer has no patches at point {point}"
    if fragment.waits:
        return "a thread of the program may wait for another one, which a patch must not"
    for argument in fragment.arguments:
        if argument.kind == "context" and argument.field not in found[0].fields:
            return f"Compute Sanitizer does not give {argument.field} at point {point}"
    return None


def reads_number(fragment: Fragment) -> bool:
    """Return whether a program reads the number of its launch."""
    return any(argument.kind in ("launch", "replay") for argument in fragment.arguments)


def slot_of(granule: int) -> int:
    """Return the slot at which the search for a granule begins."""
    return (granule * HASH_FACTOR & (1 << 64) - 1) >> 64 - SLOT_BITS


def patch_module(
    patches: Sequence[Patch],
    block: LaunchBlock,
    table: int,
    cc: tuple[int, int],
    counts_elsewhere: bool = False,
    choice: Choice | None = None,
) -> str:
    """Return the PTX of patches, for `ptxas --compile-as-tools-patch` or for the embedded device.

    block: the layout of the launch blocks in the table.
    table: the table's address in GPU memory.
    cc: the GPU's compute capability.
    counts_elsewhere: count calls in code of no known function. Without it they cost less.
    choice: run the programs only in some blocks or warps; None: in all.
    If a program reads the number of its launch, there must be a patch at BLOCK_ENTER.
    Raises Error for an unknown GPU, or for a program that `refusal` refuses.
    """
    if cc[0] not in _ARCHITECTURES:
        raise Error(f"no patches for compute capability {cc[0]}.{cc[1]}; leave out --sass")
    version, architecture = _ARCHITECTURES[cc[0]]
    head = f".version {version}\n.target {architecture}\n.address_size 64\n"
    numbered = any(reads_number(program.fragment) for patch in patches for program in patch.programs)
    return head + "".join(
        _function(patch, block, table, counts_elsewhere, choice, numbered) for patch in patches
    )


def _function(
    patch: Patch,
    block: LaunchBlock,
    table: int,
    counts_elsewhere: bool,
    choice: Choice | None,
    numbered: bool,
) -> str:
    signature = SIGNATURES[patch.instruction]
    for program in patch.programs:
        if (reason := refusal(program.fragment, signature.point)) is not None:
            raise Error(f"{program.fragment.function}: {reason}")
    parameters = "".join(f", .param .{type_} {name}" for name, type_ in signature.parameters)
    lines = [f".visible .func (.param .b32 result) {patch.name}(.param .b64 data{parameters})", "{"]
    lines += [f".reg .{type_} %gpubpf_0{name};" for name, type_ in signature.parameters]
    lines += [f"ld.param.{type_} %gpubpf_0{name}, [{name}];" for name, type_ in signature.parameters]
    if signature.accesses:
        lines += _OF_ACCESS if any(not access.effect for access in signature.accesses) else _OF_COPY
    lines += signature.prepare
    lines += [line.format(table=table + HEADER) for line in _FIND]
    if numbered:
        lines += [".reg .b64 %gpubpf_0data;", "ld.param.b64 %gpubpf_0data, [data];"]
        count = _BEGINS if signature.point == "entry" else _RUNS
        lines += [line.format(table=table) for line in (*_NUMBER, *count, *_NODE)]
    group = "%gpubpf_0number"
    if choice is None:
        lines.append(f"mov.u32 {group}, %smid;")
    else:
        group = choice.group
        lines += _choose(
            choice, choice.counting if signature.point == "entry" else choice.code, block, signature, numbered
        )
    for number, program in enumerate(patch.programs):
        lines += _program(number, program, signature, block, group)
    lines.append("bra $gpubpf_end;")
    elsewhere = _ELSEWHERE if counts_elsewhere else ()
    lines += [line.format(lost=table, elsewhere=table + 8) for line in (*_LOST, *elsewhere)]
    if not counts_elsewhere:
        lines.append("$gpubpf_elsewhere:")
    lines += ["$gpubpf_end:", "st.param.b32 [result], 0;", "ret;", "}"]
    return "\n".join(lines) + "\n"


def _choose(
    choice: Choice, code: Fragment, block: LaunchBlock, signature: Signature, numbered: bool
) -> list[str]:
    """Return instructions that end the patch in threads that are not chosen."""
    lines = [f".reg .pred {choice.skips};", f".reg .b32 {choice.group};", "{"]
    lines += [f".reg .{argument.type} {argument.register};" for argument in code.arguments]
    for argument in code.arguments:
        known = None if numbered else {"launch": "%gridid", "replay": "0"}.get(argument.kind)
        if known is not None:
            lines.append(f"mov.u64 {argument.register}, {known};")
        else:
            lines += _argument(argument, signature, block, choice.group)
    return [*lines, code.ptx.strip(), "}", f"@{choice.skips} bra $gpubpf_end;"]


def _program(
    number: int, program: PatchProgram, signature: Signature, block: LaunchBlock, group: str
) -> list[str]:
    """Return instructions that run a program.

    number: of the program in its patch.
    group: the register with the thread's group (`Argument.kind`)."""
    lines, skipped = [], f"$gpubpf_skip{number}"
    if program.bit is not None:
        lines += [
            f"ld.global.u32 %gpubpf_0word, [{_LAUNCH}+{WANTED}];",
            f"and.b32 %gpubpf_0word, %gpubpf_0word, {1 << program.bit};",
            "setp.eq.u32 %gpubpf_0yes, %gpubpf_0word, 0;",
            f"@%gpubpf_0yes bra {skipped};",
        ]
    access = signature.accesses[program.access] if signature.accesses else None
    if access is not None and access.effect:
        lines += [
            f"mov.b32 %gpubpf_0kind, {KINDS.index(access.kind)};",
            f"mov.b32 %gpubpf_0effect, {access.effect};",
        ]
        if access.size:
            lines += [
                f"setp.eq.u32 %gpubpf_0is, %gpubpf_0{access.size}, 0;",
                f"@%gpubpf_0is bra {skipped};",
            ]
    elif access is not None and program.kinds:
        wanted = sum(1 << KINDS.index(kind) for kind in set(program.kinds))
        lines += [
            f"mov.b32 %gpubpf_0bits, {wanted};",
            "shr.b32 %gpubpf_0bits, %gpubpf_0bits, %gpubpf_0kind;",
            "and.b32 %gpubpf_0bits, %gpubpf_0bits, 1;",
            "setp.eq.u32 %gpubpf_0is, %gpubpf_0bits, 0;",
            f"@%gpubpf_0is bra {skipped};",
        ]
    arguments = program.fragment.arguments
    lines += ["{", *(f".reg .{argument.type} {argument.register};" for argument in arguments)]
    for argument in arguments:
        lines += _argument(argument, signature, block, group, access)
    return [*lines, program.fragment.ptx.strip(), "}", f"{skipped}:"]


def _argument(
    argument: Argument, signature: Signature, block: LaunchBlock, group: str, access: Access | None = None
) -> list[str]:
    register, bits = argument.register, int(argument.type[1:])
    if argument.kind == "context":
        return _field(argument, signature, access)
    if argument.kind == "group":
        return [f"mov.b32 {register}, {group};"]
    if argument.kind == "global_warp":
        return [global_warp(register)]
    if argument.kind in _OF_LAUNCH:
        return [f"mov.b64 {register}, {_OF_LAUNCH[argument.kind]};"]
    if argument.kind == "shard":
        base, sites = block.bases[map_of(argument)], block.capacities[map_of(argument)]
        return [
            f"ld.global.u64 {register}, [{_LAUNCH}+{base}];",
            f"ld.global.u32 %gpubpf_0word, [{_LAUNCH}+{sites + SHARDS_SHIFT // 8}];",
            f"and.b32 %gpubpf_0shard, {group}, %gpubpf_0word;",
            f"ld.global.u32 %gpubpf_0word, [{_LAUNCH}+{sites}];",
            "mul.lo.u32 %gpubpf_0shard, %gpubpf_0shard, %gpubpf_0word;",
            f"mad.wide.u32 {register}, %gpubpf_0shard, {argument.width}, {register};",
        ]
    words = {
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


def _field(argument: Argument, signature: Signature, access: Access | None) -> list[str]:
    """Return instructions that set the register of an argument that is a context field."""
    register, bits = argument.register, int(argument.type[1:])
    sources = {"site": "site", "address": access.address if access else ""}
    if source := sources.get(argument.field):
        width = int(dict(signature.parameters).get(source, "b64")[1:])
        how = f"mov.b{bits}" if width == bits else f"cvt.u{bits}.u{width}"
        return [f"{how} {register}, %gpubpf_0{source};"]
    if argument.field == "active":
        narrow, lines = "%gpubpf_0word", ["activemask.b32 %gpubpf_0word;"]
    elif argument.field == "work":  # machine code is not counted
        narrow, lines = "0", []
    elif argument.field == "space" and access is not None:
        narrow, lines = str(_SPACES[access.space]), []
    elif argument.field == "width" and access is not None:
        narrow, lines = f"%gpubpf_0{access.size}" if access.size else "0", []
    else:
        names = {"barrier": "index"}
        narrow, lines = f"%gpubpf_0{names.get(argument.field, argument.field)}", []
    if bits == 64 and narrow.startswith("%"):
        return [*lines, f"cvt.u64.u32 {register}, {narrow};"]
    return [*lines, f"mov.b{bits} {register}, {narrow};"]


_LAUNCH = "%gpubpf_0launch"  # the address of the launch block
_OF_LAUNCH = {"launch": "%gpubpf_0first", "replay": "%gpubpf_0cell"}  # the registers with the launch's number
_OF_COPY = (
    ".reg .b32 %gpubpf_0effect, %gpubpf_0kind, %gpubpf_0bits;",
    ".reg .pred %gpubpf_0is;",
)
# Turn the API's flags into the effect of an access. Prefetches access nothing. An atomic without a result counts as reading and
# writing.
_OF_ACCESS = (
    *_OF_COPY,
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
    ".reg .b32 %gpubpf_0left, %gpubpf_0word, %gpubpf_0number, %gpubpf_0shard;",
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
    "@%gpubpf_0yes bra $gpubpf_slot;",
    "setp.eq.u64 %gpubpf_0yes, %gpubpf_0key, 0;",
    "@%gpubpf_0yes bra $gpubpf_elsewhere;",
    "add.u64 %gpubpf_0slot, %gpubpf_0slot, 1;",
    f"and.b64 %gpubpf_0slot, %gpubpf_0slot, {SLOTS - 1};",
    "sub.u32 %gpubpf_0left, %gpubpf_0left, 1;",
    "setp.eq.u32 %gpubpf_0yes, %gpubpf_0left, 0;",
    "@%gpubpf_0yes bra $gpubpf_elsewhere;",
    "bra $gpubpf_probe;",
    "$gpubpf_slot:",
    "ld.global.u64 %gpubpf_0at, [%gpubpf_0at+8];",
    "setp.eq.u64 %gpubpf_0yes, %gpubpf_0at, 0;",
    "@%gpubpf_0yes bra $gpubpf_elsewhere;",  # the function is not wanted
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
# Find the launch's number. Data that is not the agent's may be any number, so its address is checked before it is used.
_NUMBER = (
    ".reg .b64 %gpubpf_0first, %gpubpf_0cell;",
    ".reg .b32 %gpubpf_0begun;",
    f"shr.u64 %gpubpf_0key, %gpubpf_0data, {NUMBER_BITS};",
    f"and.b64 %gpubpf_0first, %gpubpf_0data, {(1 << NUMBER_BITS) - 1};",
    f"setp.eq.u64 %gpubpf_0yes, %gpubpf_0key, {STREAM};",
    "@%gpubpf_0yes bra $gpubpf_stream;",
    f"setp.ne.u64 %gpubpf_0yes, %gpubpf_0key, {GRAPH};",
    "@%gpubpf_0yes bra $gpubpf_lost;",
    f"setp.gt.u64 %gpubpf_0yes, %gpubpf_0first, {HEADER + 16 * SLOTS + RECORDS - GRAPH_PLACES};",
    "@%gpubpf_0yes bra $gpubpf_lost;",
    "and.b64 %gpubpf_0key, %gpubpf_0first, 7;",
    "setp.ne.u64 %gpubpf_0yes, %gpubpf_0key, 0;",
    "@%gpubpf_0yes bra $gpubpf_lost;",
    "add.u64 %gpubpf_0slot, %gpubpf_0first, {table};",
    "ld.global.u64 %gpubpf_0key, [%gpubpf_0slot];",
    f"setp.ne.u64 %gpubpf_0yes, %gpubpf_0key, {GRAPH_MARK};",
    "@%gpubpf_0yes bra $gpubpf_lost;",
    "ld.global.u64 %gpubpf_0cell, [%gpubpf_0slot+8];",
    "ld.global.u32 %gpubpf_0left, [%gpubpf_0slot+16];",
    "ld.global.u32 %gpubpf_0number, [%gpubpf_0launch];",
    "setp.ge.u32 %gpubpf_0yes, %gpubpf_0number, %gpubpf_0left;",
    "@%gpubpf_0yes bra $gpubpf_lost;",
    "mad.wide.u32 %gpubpf_0key, %gpubpf_0number, 4, %gpubpf_0slot;",
    f"ld.global.u32 %gpubpf_0number, [%gpubpf_0key+{GRAPH_PLACES}];",
    "setp.eq.u32 %gpubpf_0yes, %gpubpf_0number, 0;",
    "@%gpubpf_0yes bra $gpubpf_lost;",
    "cvt.u64.u32 %gpubpf_0key, %gpubpf_0number;",
    "add.u64 %gpubpf_0at, %gpubpf_0slot, %gpubpf_0key;",
    "ld.global.u32 %gpubpf_0left, [%gpubpf_0at];",
    "setp.eq.u32 %gpubpf_0yes, %gpubpf_0left, 0;",
    "@%gpubpf_0yes bra $gpubpf_end;",
    "mov.b32 %gpubpf_0number, 0;",
    "setp.eq.u32 %gpubpf_0yes, %gpubpf_0left, 1;",
    "@%gpubpf_0yes bra $gpubpf_node;",
    "ld.global.u32 %gpubpf_0begun, [%gpubpf_0at+8];",
    "cvt.u64.u32 %gpubpf_0key, %gpubpf_0begun;",
    "add.u64 %gpubpf_0slot, %gpubpf_0slot, %gpubpf_0key;",
)
# How many threads began before this one or another thread of its grid: when it begins, and later.
_BEGINS = ("atom.global.add.u32 %gpubpf_0begun, [%gpubpf_0slot], 1;",)
_RUNS = (
    "ld.relaxed.gpu.global.u32 %gpubpf_0begun, [%gpubpf_0slot];",
    "sub.u32 %gpubpf_0begun, %gpubpf_0begun, 1;",
)
_NODE = (
    "ld.global.u32 %gpubpf_0word, [%gpubpf_0at+4];",
    "div.u32 %gpubpf_0number, %gpubpf_0begun, %gpubpf_0word;",
    "setp.ge.u32 %gpubpf_0yes, %gpubpf_0number, %gpubpf_0left;",
    "@%gpubpf_0yes bra $gpubpf_lost;",
    "$gpubpf_node:",
    "mad.wide.u32 %gpubpf_0key, %gpubpf_0number, 4, %gpubpf_0at;",
    f"ld.global.u32 %gpubpf_0number, [%gpubpf_0key+{NODES}];",
    "cvt.u64.u32 %gpubpf_0first, %gpubpf_0number;",
    "bra $gpubpf_numbered;",
    "$gpubpf_stream:",
    "ld.global.u64 %gpubpf_0key, [%gpubpf_0launch+8];",
    "or.b64 %gpubpf_0first, %gpubpf_0first, %gpubpf_0key;",
    "mov.b64 %gpubpf_0cell, 0;",
    "$gpubpf_numbered:",
)
# Count a call in a launch of an unknown shape.
_LOST = (
    "$gpubpf_lost:",
    "mov.u64 %gpubpf_0at, {lost};",
    "red.global.add.u64 [%gpubpf_0at], 1;",
    "bra $gpubpf_end;",
)
# Count a call in code of no known function, such as a device function that is not inlined.
_ELSEWHERE = (
    "$gpubpf_elsewhere:",
    "mov.u64 %gpubpf_0at, {elsewhere};",
    "red.global.add.u64 [%gpubpf_0at], 1;",
)
