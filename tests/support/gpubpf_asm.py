"""For tests: programs written as eBPF instructions, and a plain interpreter of them to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import BpfFunction, Instruction, Program
from gpubpf.ebpf.maps import MapDefinition

Code = list[Instruction]
U64 = (1 << 64) - 1
SIZES = {1: 0x10, 2: 0x08, 4: 0x00, 8: 0x18}
VALUE = 0x10000  # where the interpreter has the value of map `out`
STACK = 0x80000  # and the end of its first stack frame
CONTEXT = 0x100000  # and the context
MAPS = 0x200000  # what it has for the address of a map


def alu(
    op: int, dst: int, src: int | None = None, imm: int = 0, wide: bool = True, offset: int = 0
) -> Instruction:
    cls = b.ALU64 if wide else b.ALU
    if src is None:
        return Instruction(cls | op, dst, 0, offset, imm)
    return Instruction(cls | op | 8, dst, src, offset)


def mov(dst: int, src: int) -> Instruction:
    return alu(b.MOV, dst, src)


def movi(dst: int, imm: int) -> Instruction:
    return alu(b.MOV, dst, imm=imm)


def load(dst: int, src: int, offset: int, size: int = 8, sign: bool = False) -> Instruction:
    return Instruction(b.LDX | (b.MEMSX if sign else b.MEM) | SIZES[size], dst, src, offset)


def store(dst: int, offset: int, src: int, size: int = 8) -> Instruction:
    return Instruction(b.STX | b.MEM | SIZES[size], dst, src, offset)


def storei(dst: int, offset: int, imm: int, size: int = 8) -> Instruction:
    return Instruction(b.ST | b.MEM | SIZES[size], dst, 0, offset, imm)


def atomic(op: int, dst: int, offset: int, src: int, size: int = 8) -> Instruction:
    return Instruction(b.STX | b.ATOMIC | SIZES[size], dst, src, offset, op)


def jump(
    op: int, dst: int, offset: int, src: int | None = None, imm: int = 0, wide: bool = True
) -> Instruction:
    cls = b.JMP if wide else b.JMP32
    if src is None:
        return Instruction(cls | op, dst, 0, offset, imm)
    return Instruction(cls | op | 8, dst, src, offset)


def ja(offset: int) -> Instruction:
    return Instruction(b.JMP | b.JA, offset=offset)


def call(helper: int) -> Instruction:
    return Instruction(b.JMP | b.CALL, imm=helper)


def call_program(distance: int) -> Instruction:
    return Instruction(b.JMP | b.CALL, src=b.PSEUDO_CALL, imm=distance)


def leave() -> Instruction:
    return Instruction(b.JMP | b.EXIT)


def load64(dst: int, value: int) -> Code:
    return [Instruction(b.LD_IMM64, dst, imm=value & U64), Instruction(0)]


def load_map(dst: int, name: str) -> Code:
    return [Instruction(b.LD_IMM64, dst, b.PSEUDO_MAP, map=name), Instruction(0)]


def lookup(name: str, key: int = 0, at: int = -4) -> Code:
    """r0 = name.lookup(&key), the key at r10 + at."""
    return [storei(10, at, key, 4), *load_map(1, name), mov(2, 10), alu(b.ADD, 2, imm=at), call(1)]


END = [movi(0, 0), leave()]
OUT = MapDefinition("out", "array", 4, 256, 1)
HASH = MapDefinition("hash", "hash", 8, 8, 64)
RING = MapDefinition("ring", "ringbuf", 0, 8, 4096)


def program(
    code: Iterable[Instruction], maps: Iterable[MapDefinition] = (OUT,), point: str = "exit", text: str = ""
) -> tuple[Program, BpfFunction]:
    function = BpfFunction("probe", point, tuple(code))
    return Program(text, {"probe": function}, {m.name: m for m in maps}), function


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


class Interpreter:
    """Runs a program on the CPU, as RFC 9669 says; helper 1 gives the value of map `out`.

    unwritten: what registers hold that have no value, at the start and after calls
    """

    unwritten: Any = 0

    def __init__(self, code: tuple[Instruction, ...], value: bytes) -> None:
        self.code = code
        self.value = bytearray(value)
        self.stack = bytearray(8 * b.STACK_SIZE)

    def memory(self, address: int) -> tuple[bytearray, int]:
        if VALUE <= address < VALUE + len(self.value):
            return self.value, address - VALUE
        return self.stack, address - (STACK - len(self.stack))

    def read(self, address: int, size: int) -> int:
        where, at = self.memory(address)
        return int.from_bytes(where[at : at + size], "little")

    def write(self, address: int, size: int, number: int) -> None:
        where, at = self.memory(address)
        where[at : at + size] = (number & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def run(self) -> None:
        r = [self.unwritten] * 11
        r[1], r[10] = CONTEXT, STACK
        frames: list[tuple[int, list[int]]] = []
        pc = 0
        while True:
            i = self.code[pc]
            pc += 1
            cls, op = i.opcode & 7, i.opcode & 0xF0
            if cls in (b.ALU, b.ALU64):
                r[i.dst] = self.arithmetic(i, r[i.dst], r[i.src] if i.opcode & 8 else i.imm & U64)
            elif cls == b.LD:
                r[i.dst] = i.imm if i.map is None else self.map(i.map)
                pc += 1
            elif cls in (b.LDX, b.ST, b.STX):
                self.access(i, r)
            elif op == b.EXIT:
                if not frames:
                    return
                pc, saved = frames.pop()
                self.leave(r[10])
                r[1:6], r[6:11] = [self.unwritten] * 5, saved
            elif op == b.CALL and i.src:
                frames.append((pc, r[6:11]))
                r[6:11] = [self.unwritten] * 4 + [r[10] - b.STACK_SIZE]
                pc += i.imm
            elif op == b.CALL:
                self.helper(i.imm, r)
                r[1:6] = [self.unwritten] * 5
            elif self.taken(i, r):
                pc += i.imm if i.opcode == 0x06 else i.offset

    def map(self, name: str) -> int:
        """Return what an ld_imm64 of a map puts into a register."""
        return MAPS

    def helper(self, number: int, r: list[int]) -> None:
        r[0] = VALUE

    def leave(self, frame: int) -> None:
        """The stack frame that ends at `frame` is no more."""

    def access(self, i: Instruction, r: list[int]) -> None:
        size = {v: k for k, v in SIZES.items()}[i.opcode & 0x18]
        if i.opcode & 7 == b.LDX:
            number = self.read(r[i.src] + i.offset, size)
            r[i.dst] = signed(number, 8 * size) & U64 if i.opcode & 0xE0 == b.MEMSX else number
            return
        address = r[i.dst] + i.offset
        if i.opcode & 7 == b.ST:
            self.write(address, size, i.imm)
        elif i.opcode & 0xE0 == b.MEM:
            self.write(address, size, r[i.src])
        else:
            mask = (1 << 8 * size) - 1
            old, operand = self.read(address, size), r[i.src] & mask
            if i.imm == b.ATOMIC_CMPXCHG:
                if old == r[0] & mask:
                    self.write(address, size, operand)
                r[0] = old
                return
            new = {0x00: old + operand, 0x40: old | operand, 0x50: old & operand, 0xA0: old ^ operand}
            self.write(address, size, operand if i.imm == b.ATOMIC_XCHG else new[i.imm & ~1])
            if i.imm & 1:
                r[i.src] = old

    @staticmethod
    def arithmetic(i: Instruction, a: int, c: int) -> int:
        bits = 64 if i.opcode & 7 == b.ALU64 else 32
        mask = (1 << bits) - 1
        op = i.opcode & 0xF0
        if op == b.END:
            width = i.imm // 8
            data = (a & ((1 << i.imm) - 1)).to_bytes(width, "little")
            swap = i.opcode & 7 == b.ALU64 or i.opcode & 8
            return int.from_bytes(data, "big" if swap else "little")
        if op == b.MOV:  # the old value may be unwritten
            return (signed(c, i.offset) if i.offset else c) & mask
        a, c = a & mask, c & mask
        if op in (b.DIV, b.MOD):
            x, y = (signed(a, bits), signed(c, bits)) if i.offset else (a, c)
            if y == 0:
                return 0 if op == b.DIV else a
            quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
            return (quotient if op == b.DIV else x - quotient * y) & mask
        shift = c & (bits - 1)
        return {
            b.ADD: a + c,
            b.SUB: a - c,
            b.MUL: a * c,
            b.OR: a | c,
            b.AND: a & c,
            b.XOR: a ^ c,
            b.LSH: a << shift,
            b.RSH: a >> shift,
            b.ARSH: signed(a, bits) >> shift,
            b.NEG: -a,
        }[op] & mask

    @staticmethod
    def taken(i: Instruction, r: list[int]) -> bool:
        bits = 64 if i.opcode & 7 == b.JMP else 32
        mask = (1 << bits) - 1
        op = i.opcode & 0xF0
        if op == b.JA:
            return True
        a, c = r[i.dst] & mask, (r[i.src] if i.opcode & 8 else i.imm) & mask
        x, y = signed(a, bits), signed(c, bits)
        return {
            b.JEQ: a == c,
            b.JNE: a != c,
            b.JGT: a > c,
            b.JGE: a >= c,
            b.JLT: a < c,
            b.JLE: a <= c,
            b.JSET: bool(a & c),
            b.JSGT: x > y,
            b.JSGE: x >= y,
            b.JSLT: x < y,
            b.JSLE: x <= y,
        }[op]


SPECIALS = {
    **{f"{name}.{axis}": "i32" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"},
    "lane": "i32",
    "sm": "i32",
    "group": "i32",
    "clock": "i64",
    "globaltimer": "i64",
    "active": "i32",
    "membar": "void",
}


class Native:
    """A device program compiled for this CPU by the lowering that GPUs get; only the table differs.

    `specials`: values of thread index and the like. Call it with the arguments by name.
    """

    def __init__(
        self, made: Program, function: BpfFunction, specials: Mapping[str, int] | None = None
    ) -> None:
        import ctypes

        import llvmlite.binding as llvm

        from gpubpf.lower import ir, nvptx
        from gpubpf.lower.backend import Backend
        from gpubpf.verify.rules import check

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.checked = check(made, function)
        triple = llvm.get_process_triple()
        table = {name: (f"test_{name}", kind) for name, kind in SPECIALS.items()}
        self.module = ir.lower(made, self.checked, Backend(triple, "ptr", "", table))
        text = self.module.text
        for name, (symbol, kind) in table.items():
            value = f"ret {kind} {(specials or {}).get(name, 1)}" if kind != "void" else "ret void"
            text = text.replace(f"declare {kind} @{symbol}()", f"define {kind} @{symbol}() {{ {value} }}")
        machine = llvm.Target.from_triple(triple).create_target_machine(opt=1)
        parsed = llvm.parse_assembly(text)
        parsed.verify()
        nvptx.optimize(parsed, machine)
        self.engine = llvm.create_mcjit_compiler(parsed, machine)
        self.engine.finalize_object()
        kinds = [ctypes.c_uint64 if a.type == "b64" else ctypes.c_uint32 for a in self.module.arguments]
        self.function = ctypes.CFUNCTYPE(None, *kinds)(self.engine.get_function_address(ir.ENTRY))

    def __call__(self, **arguments: int) -> None:
        given = {"replay": 0, **arguments}
        self.function(*(given[a.name] for a in self.module.arguments))
