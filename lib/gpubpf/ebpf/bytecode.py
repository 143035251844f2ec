"""eBPF instructions and programs as values. The numbers are from the kernel's Documentation/bpf/standardization."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping

from gpubpf import processor
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.record import Record

# Instruction classes (low three bits of the opcode).
LD, LDX, ST, STX, ALU, JMP, JMP32, ALU64 = range(8)
# Modes of memory instructions (opcode & 0xE0).
MEM, MEMSX, ATOMIC = 0x60, 0x80, 0xC0
# Width in bytes of opcode & 0x18.
WIDTH = {0x00: 4, 0x08: 2, 0x10: 1, 0x18: 8}
# ALU operations (opcode & 0xF0).
ADD, SUB, MUL, DIV, OR, AND, LSH, RSH, NEG, MOD, XOR, MOV, ARSH, END = range(0x00, 0xE0, 0x10)
# Jumps (opcode & 0xF0).
JA, JEQ, JGT, JGE, JSET, JNE, JSGT, JSGE, CALL, EXIT, JLT, JLE, JSLT, JSLE = range(0x00, 0xE0, 0x10)
# Operations of an atomic instruction (imm).
FETCH = 0x01
ATOMIC_ADD, ATOMIC_OR, ATOMIC_AND, ATOMIC_XOR, ATOMIC_XCHG, ATOMIC_CMPXCHG = (
    0x00,
    0x40,
    0x50,
    0xA0,
    0xE1,
    0xF1,
)
LD_IMM64 = 0x18
PSEUDO_MAP = 1  # src of an ld_imm64 whose value is a map
PSEUDO_VALUE = 2  # src of an ld_imm64 whose value is an address in the first value of a map
# Like libbpf, a call of this number replaces code that needs a member or type which the running kernel does not have.
POISON = 0xBAD2310
PSEUDO_CALL = 1  # src of a call whose imm is a relative instruction number

STACK_SIZE = 512


def _fields(*names: str) -> Mapping[str, tuple[int, int]]:
    return {name: (8 * number, 8) for number, name in enumerate(names)}


# The fields with the arguments of a kernel or function, by position.
ARGUMENTS = tuple(f"arg{number}" for number in range(16))
# The fields with the operands of an instruction, by position, and the fields with its result.
OPERANDS = tuple(f"operand{number}" for number in range(4))
_RESULT = ("active", "type", "low", "high", "operand_type", "operands", *OPERANDS)

# The points that a program can be attached to, by the type of its context: fields as (offset, size) in bytes
# (docs/attach-points.md).
CONTEXTS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "entry": _fields("launch", "site", "args", *ARGUMENTS),
    "exit": _fields("launch", "site", "work"),
    "function_entry": _fields("launch", "site", "args", *ARGUMENTS),
    "function_exit": _fields("launch", "site", "low", "high"),
    "block_begin": _fields("launch", "site"),
    "block_end": _fields("launch", "site"),
    "barrier_arrive": _fields("launch", "site", "barrier", "threads"),
    "barrier_leave": _fields("launch", "site", "barrier", "threads", "waited"),
    "access": _fields("launch", "site", "address", "width", "space", "kind", "active", "effect"),
    "access_again": _fields("launch", "site", "width", "kept", "count"),
    "basic_block": _fields("launch", "site", "active", "instructions", "regions"),
    "branch": _fields("launch", "site", "active", "taken", "region"),
    "value": _fields(
        *("launch", "site", "address", "width", "space", "kind", "active", "effect"),
        *("type", "low", "high", "old_low", "old_high"),
    ),
    "float": _fields("launch", "site", "operation", *_RESULT),
    "instruction": _fields("launch", "site", *_RESULT),
    "launch": _fields("launch", "kernel", "stream", "call_ns", "threads", "gpu"),
    "operation": _fields("id", "kind", "stream", "call_ns", "bytes", "destination", "source", "gpu"),
}
HOST_POINTS = ("launch", "operation")  # these run on the host, in the thread that calls the driver
# The code in a file of the agent that a uprobe of a host point is attached to: for launches at offset 0, for operations at
# OPERATION_STUB.
HOST_STUBS = {
    "x86_64": bytes.fromhex("0f1f440000c3"),  # nop5; ret: the kernel can replace this nop by a call
    "aarch64": bytes.fromhex("1f2003d5c0035fd6"),  # nop; ret
}
HOST_STUB = HOST_STUBS.get(processor.NAME, b"\0")  # \0: this machine has no agent
OPERATION_STUB = 64
DEVICE_POINTS = tuple(point for point in CONTEXTS if point not in HOST_POINTS)  # these run on the GPU
# Memory accesses: in the order of enum gpu_kind and gpu_space in gpubpf.h, and the bits of enum gpu_effect.
KINDS = ("load", "store", "atomic", "async")
SPACES = ("global", "shared", "local", "const")
UNADDRESSED_SPACES = (
    "texture",
    "surface",
    "tensor",
    "tmem",
)  # follow SPACES in the enum; accesses to these spaces have no address
READS, WRITES, RETURNS = 1, 2, 4
SWAPS, COMPARES = 8, 16  # an atomic stores its operand always, or only if the old value is that in `high`
# The types of values, in the order of enum gpu_type, and the kinds of accesses that have a value.
TYPES = tuple("b8 b16 b32 b64 b128 u8 u16 u32 u64 s8 s16 s32 s64 f16 bf16 f32 f64 pred".split())
VALUE_KINDS = ("load", "store", "atomic")
# Floating-point operations, in the order of enum gpu_float_operation.
FLOAT_OPERATIONS = tuple(
    "add sub mul fma div rcp sqrt rsqrt min max abs neg copysign sin cos tanh lg2 ex2 cvt mma".split()
)
# Regions of branches have numbers below this one, GPU_REGIONS in gpubpf.h; a branch without a number has this one (ptx/regions.py).
REGIONS = 16
# The kinds of work that an exit program can count (ptx/opcodes.py has the exact definitions).
WORK = ("instructions", "loads", "stores", "atomics", "barriers", "blocks")


class Instruction(Record):
    """One instruction slot. An ld_imm64 has its whole 64-bit value in `imm`; the slot after it has opcode 0.

    `line` is the line in the C text, from 1; 0 if unknown. `map` names the map whose address an ld_imm64 loads;
    with PSEUDO_VALUE, `imm` is the offset in its value.
    """

    opcode: int
    dst: int = 0
    src: int = 0
    offset: int = 0
    imm: int = 0
    line: int = 0
    map: str | None = None

    @property
    def cls(self) -> int:
        return self.opcode & 7


class BpfFunction(Record):
    """One program of a C text: its instructions, followed by those of its subprograms, as the kernel requires.

    `point`: one of CONTEXTS, `uprobe` (the context is struct pt_regs) or `host` (any other context, such as a tracepoint's record).
    The last two can only run in the kernel.
    """

    name: str
    point: str
    instructions: tuple[Instruction, ...]


# At the beginning of a C text, this makes the variant for GPUs whose warps have up to 64 lanes (gpu_mask and GPU_LANES in gpubpf.h).
WIDE = "#define GPU_LANES 64\n"


class Program(Record):
    """A compiled C text. It is relocatable: instructions name maps, and nothing refers to this process."""

    text: str
    functions: Mapping[str, BpfFunction]
    maps: Mapping[str, MapDefinition]
    license: str = "GPL"

    @property
    def lanes(self) -> int:
        """The most lanes that a warp may have."""
        return 64 if self.text.startswith(WIDE) else 32

    @property
    def device_functions(self) -> tuple[BpfFunction, ...]:
        return tuple(f for f in self.functions.values() if f.point in DEVICE_POINTS)

    @property
    def host_functions(self) -> tuple[BpfFunction, ...]:
        return tuple(f for f in self.functions.values() if f.point not in DEVICE_POINTS)

    def quote(self, number: int) -> str:
        """Return C line `number` for a message: stripped, at most 72 characters; empty if the text has no such line."""
        lines = self.text.split("\n")
        text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        return text if len(text) <= 72 else text[:71] + "…"


def decode(
    code: bytes, lines: Iterable[int] = (), maps: Mapping[int, str] | None = None
) -> tuple[Instruction, ...]:
    """Return bytecode as instructions.

    lines: the C line of each slot
    maps: names of maps by file descriptor

    Raises ValueError if `code` is not a whole number of instructions or ends inside an ld_imm64.
    """
    if len(code) % 8:
        raise ValueError("bytecode is not a multiple of 8 bytes")
    line_of = list(lines)
    line_of += [0] * (len(code) // 8 - len(line_of))
    result: list[Instruction] = []
    slots = list(struct.iter_unpack("<BBhi", code))
    at = 0
    while at < len(slots):
        opcode, registers, offset, imm = slots[at]
        src = registers >> 4
        name = None
        if opcode == LD_IMM64:
            if at + 1 >= len(slots):
                raise ValueError("bytecode ends inside an ld_imm64")
            if src == PSEUDO_MAP and maps is not None:
                name, imm = maps.get(imm), 0
            else:
                imm = (imm & 0xFFFFFFFF) | (slots[at + 1][3] & 0xFFFFFFFF) << 32
        result.append(Instruction(opcode, registers & 15, src, offset, imm, line_of[at], name))
        if opcode == LD_IMM64:
            result.append(Instruction(0, line=line_of[at]))
            at += 1
        at += 1
    return tuple(result)


def encode(instructions: Iterable[Instruction], fds: Mapping[str, int]) -> bytes:
    """Return instructions as the kernel's bytecode. `fds`: the file descriptor of each map."""
    out = bytearray()
    high = 0
    for i in instructions:
        imm = i.imm
        if i.opcode == LD_IMM64:
            if i.map is not None:
                imm = fds[i.map] | i.imm << 32
            high = imm >> 32 & 0xFFFFFFFF
        elif i.opcode == 0:
            imm, high = high, 0
        imm &= 0xFFFFFFFF
        out += struct.pack("<BBhI", i.opcode, i.dst | i.src << 4, i.offset, imm)
    return bytes(out)


def signed(value: int, bits: int = 64) -> int:
    """Return the low `bits` of `value` as a signed number."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_COMMENT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
_CONTEXT = re.compile(rf"(\w+)\s*\(\s*(?:const\s+)?struct\s+gpu_({'|'.join(CONTEXTS)})\s*\*")
_REGISTERS = re.compile(r"(\w+)\s*\(\s*(?:const\s+)?struct\s+pt_regs\s*\*")


def without_comments(text: str) -> str:
    """Return `text` with spaces in place of comments and string literals; lines and columns stay."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return _COMMENT.sub(blank, text)


def points(text: str) -> dict[str, str]:
    """Return the functions whose first parameter is one of CONTEXTS, with their points: `{"on_exit": "exit"}`."""
    return dict(_CONTEXT.findall(without_comments(text)))


def register_functions(text: str) -> frozenset[str]:
    """Return the functions whose first parameter is a struct pt_regs: programs for attach_uprobe, and functions they call."""
    return frozenset(_REGISTERS.findall(without_comments(text)))
