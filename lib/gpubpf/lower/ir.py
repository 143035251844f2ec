"""eBPF → LLVM IR, for every back end. What differs between them is in a `Backend`, a table.

Registers become 64-bit variables, which LLVM promotes. A stack address is a plain number, the offset in one array for the whole
stack: LLVM sees constants, and the array dissolves into registers. Addresses of map values are real addresses. Verification has
found out which memory each instruction accesses (`Checked`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import STACK_SIZE, Instruction, Program
from gpubpf.ebpf.helpers import HELPERS, ArgumentKind
from gpubpf.ebpf.maps import (
    BLOCKS,
    DISCARDED,
    PRINT_ARGUMENTS,
    PRINTS,
    SHAPED,
    SHARDS_SHIFT,
    MapDefinition,
    internal,
)
from gpubpf.lower import storage
from gpubpf.lower.backend import Backend
from gpubpf.lower.fragment import Argument
from gpubpf.verify import Checked, CheckedAccess, CheckedCall
from gpubpf.verify.values import Chain, value_alignment

ENTRY = "gpubpf_program"
KEEP_LOOP = "llvm.loop.unroll.disable"
AXES = ("x", "y", "z")


@dataclass(frozen=True)
class LoweredModule:
    """A lowered program: the LLVM IR of the function ENTRY, its arguments in order, and the texts that it prints, by number."""

    text: str
    arguments: tuple[Argument, ...]
    formats: Mapping[int, str]


def lower(program: Program, checked: Checked, backend: Backend) -> LoweredModule:
    return _Lowering(program, checked, backend).run()


def format_number(text: str) -> int:
    """Return the number that stands for a printed text in the print ring buffer."""
    return zlib.crc32(text.encode())


class _Lowering:
    def __init__(self, program: Program, checked: Checked, backend: Backend) -> None:
        self.program, self.checked, self.backend = program, checked, backend
        self.code = checked.function.instructions
        self.body: list[str] = []
        self.count = 0
        self.loop_count = 0
        self.arguments: dict[str, Argument] = {}
        self.declared: set[str] = set()
        self.functions: dict[str, str] = {}  # internal functions for maps, by name
        self.formats: dict[int, str] = {}
        chains = {chain for chain, _ in checked.reached}
        self.chains: dict[Chain, int] = {chain: n for n, chain in enumerate(sorted(chains))}
        self.depth = 1 + max((len(chain) for chain in chains), default=0)

    def run(self) -> LoweredModule:
        first = self.elect() if self.checked.function.point in ("block_begin", "block_end") else None
        for chain in self.chains:
            for pc in sorted(pc for c, pc in self.checked.reached if c == chain):
                self.chain, self.pc = chain, pc
                self.label(self.block(chain, pc))
                self.instruction(self.code[pc])
        head = [f'target triple = "{self.backend.triple}"']
        kinds = {"b64": "i64", "b32": "i32"}
        given = [(kinds[a.type], a) for a in self.arguments.values()]
        parameters = ", ".join(f"{kind} %{a.name}" for kind, a in given) if self.backend.reads is None else ""
        start = [f"define void @{ENTRY}({parameters}) nounwind convergent {{", "entry:"]
        if self.backend.reads is not None:
            start += [
                f"  %{a.name} = call {kind} asm {self.backend.reads[a.type].format(a.register)}()"
                for kind, a in given
            ]
        start += self.known_bases()
        start += [f"  %stack = alloca [{STACK_SIZE * self.depth} x i8], align 16"]
        start += ["  %first = alloca i64", *(f"  %r{n} = alloca i64" for n in range(6))]
        start += [f"  %r{n}.{k} = alloca i64" for k in self.chains.values() for n in range(6, 10)]
        start += ["  store i64 0, ptr %r1", f"  br label %{first or self.block((), 0)}"]
        text = "\n".join(
            [
                *head,
                *sorted(self.declared),
                *self.functions.values(),
                *start,
                *self.body,
                "}",
                *self.loops(),
                "",
            ]
        )
        return LoweredModule(text, tuple(self.arguments.values()), self.formats)

    def elect(self) -> str:
        """Emit code in front of a program for blocks that elects the thread to run it. Return its label."""
        function = self.checked.function
        self.chain, self.pc = (), 0
        self.label("elect")
        base = self.base(BLOCKS + function.name)
        launch, block = self.context("launch"), self.number("block", "i64")
        threads = self.value(f"mul i32 {self.special32('ntid.x')}, {self.special32('ntid.y')}")
        threads = self.value(f"mul i32 {threads}, {self.special32('ntid.z')}")
        last = function.point == "block_end"
        text = storage.block_function("elect_thread", last, self.backend)
        who = f"i64 {base}, i64 {launch}, i64 {block}, i32 {threads}"
        call = f"call i1 {self.function('elect_thread', text)}({who})"
        self.emit(f"br i1 {self.value(call)}, label %{self.block((), 0)}, label %not_elected")
        self.label("not_elected")
        self.emit("ret void")
        return "elect"

    # Emission

    def emit(self, line: str) -> None:
        self.body.append("  " + line)

    def label(self, name: str) -> None:
        self.body.append(f"{name}:")

    def value(self, expression: str) -> str:
        self.count += 1
        name = f"%v{self.count}"
        self.emit(f"{name} = {expression}")
        return name

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def block(self, chain: Chain, pc: int) -> str:
        return f"b{self.chains[chain]}_{pc}"

    def go(self, pc: int) -> None:
        self.emit(f"br label %{self.block(self.chain, pc)}{self.back(pc)}")

    def back(self, target: int) -> str:
        """Return the metadata of a jump back, which keeps LLVM from unrolling the loop: a probe should be small, and clang has
        already unrolled what the C text asks for."""
        if target > self.pc:
            return ""
        self.loop_count += 1
        return f", !llvm.loop !{2 * self.loop_count}"

    def loops(self) -> list[str]:
        return [f'!1 = !{{!"{KEEP_LOOP}"}}'] * bool(self.loop_count) + [
            f"!{n} = distinct !{{!{n}, !1}}" for n in range(2, 2 * self.loop_count + 2, 2)
        ]

    def argument(self, kind: str, name: str, type_: str = "b64", **more: str | int) -> str:
        if name not in self.arguments:
            self.arguments[name] = Argument(name, type_, kind, **more)  # type: ignore[arg-type]
        return f"%{name}"

    def special(self, name: str) -> str:
        """Return something that only the back end knows, as i64. `membar` has no result."""
        if self.backend.calls[name][1] == "void":
            self.emit(self.call(name))
            return "0"
        result = self.value(self.call(name))
        return result if self.backend.calls[name][1] == "i64" else self.wide(result)

    def special32(self, name: str) -> str:
        return self.value(self.call(name))

    def call(self, name: str, *arguments: str) -> str:
        symbol, kind = self.backend.calls[name]
        if not symbol.startswith("asm "):
            kinds = ", ".join(argument.split()[0] for argument in arguments)
            self.declared.add(f"declare {kind} @{symbol}({kinds})")
            symbol = f"@{symbol}"
        return f"call {kind} {symbol}({', '.join(arguments)})"

    def collective(self, name: str, *arguments: str) -> str:
        """Return the result of a collective operation of the active lanes. LLVM must not move, merge or duplicate it."""
        result = self.value(f"{self.call(name, *arguments)} convergent nomerge noduplicate")
        return result if self.backend.calls[name][1] == "i64" else self.wide(result)

    def function(self, name: str, text: str) -> str:
        """Define an internal function, once; it is always inlined. `text` may have declarations. Return its name."""
        if name not in self.functions:
            lines = text.split("\n")
            self.declared.update(line for line in lines if line.startswith("declare "))
            self.functions[name] = "\n".join(line for line in lines if not line.startswith("declare "))
        return f"@{name}"

    def known_bases(self) -> list[str]:
        """Tell LLVM that no map is at address 0, so that a lookup that cannot fail needs no test."""
        bases = [a.name for a in self.arguments.values() if a.kind == "map_base"]
        if bases:
            self.declared.add("declare void @llvm.assume(i1)")
        return [
            line
            for name in bases
            for line in (
                f"  %is_{name} = icmp ne i64 %{name}, 0",
                f"  call void @llvm.assume(i1 %is_{name})",
            )
        ] + self.known_sites()

    def known_sites(self) -> list[str]:
        """Tell LLVM that the site of a probe is below the capacity, so that the lookup of its own value needs no test."""
        arrays = [
            a.name for a in self.arguments.values() if a.kind == "map_capacity" and a.map in self.program.maps
        ]
        arrays = [a for a in arrays if self.program.maps[self.arguments[a].map].kind == "site_array"]
        if not arrays or self.arguments.get("site") is None or self.arguments["site"].type != "b32":
            return []
        return [
            line
            for name in arrays
            for line in (
                f"  %sites_{name} = trunc i64 %{name} to i32",
                f"  %is_{name} = icmp ult i32 %site, %sites_{name}",
                f"  call void @llvm.assume(i1 %is_{name})",
            )
        ]

    def map(self, name: str) -> MapDefinition:
        return internal(name) or self.program.maps[name]

    def base(self, name: str) -> str:
        return self.argument("map_base", f"map_{name}", map=name)

    # Registers and memory

    def slot(self, register: int) -> str:
        return f"%r{register}" if register < 6 else f"%r{register}.{self.chains[self.chain]}"

    def get(self, register: int) -> str:
        if register == 10:
            return str(STACK_SIZE * (len(self.chain) + 1))
        return self.value(f"load i64, ptr {self.slot(register)}")

    def put(self, register: int, value: str) -> None:
        self.emit(f"store i64 {value}, ptr {self.slot(register)}")

    def operand(self, i: Instruction) -> str:
        return self.get(i.src) if i.opcode & 0x08 else str(i.imm)

    def low(self, value: str, bits: int = 32) -> str:
        return self.value(f"trunc i64 {value} to i{bits}")

    def wide(self, value: str, bits: int = 32) -> str:
        return value if bits == 64 else self.value(f"zext i{bits} {value} to i64")

    def stack(self, offset: str) -> str:
        return self.value(f"getelementptr i8, ptr %stack, i64 {offset}")

    def memory(self, base: str, offset: int | str = 0) -> str:
        pointer = self.value(f"inttoptr i64 {base} to {self.backend.pointer}")
        return self.value(f"getelementptr i8, {self.backend.pointer} {pointer}, i64 {offset}")

    def source(self, register: int, call: CheckedCall) -> tuple[str, str]:
        """Return (pointer type, pointer) of what a helper's argument points to."""
        address = self.get(register)
        if call.pointers[register] == "stack":
            return "ptr", self.stack(address)
        return self.backend.pointer, self.memory(address)

    def copy(self, to: tuple[str, str], source: tuple[str, str], size: int, alignment: int) -> None:
        """Emit a copy of `size` bytes. `alignment`: of the destination."""
        for at, width in storage.chunks(size):
            kind = f"i{8 * width}"
            a = self.value(f"getelementptr i8, {source[0]} {source[1]}, i64 {at}")
            value = self.value(
                f"load {kind}, {source[0]} {a}, align {1 if source[0] == 'ptr' else min(width, 8)}"
            )
            c = self.value(f"getelementptr i8, {to[0]} {to[1]}, i64 {at}")
            self.emit(f"store {kind} {value}, {to[0]} {c}, align {_aligned(alignment, at, width)}")

    # Instructions

    def instruction(self, i: Instruction) -> None:
        if i.cls in (b.ALU, b.ALU64):
            self.put(i.dst, self.alu(i))
        elif i.cls == b.LD:
            self.put(i.dst, str(b.signed(i.imm)) if i.map is None else "0")
            self.go(self.pc + 2)
            return
        elif i.cls == b.LDX:
            self.load(i)
        elif i.cls in (b.ST, b.STX):
            if i.opcode & 0xE0 == b.ATOMIC:
                self.atomic(i)
            else:
                self.store(i)
        else:
            self.jump(i)
            return
        self.go(self.pc + 1)

    def alu(self, i: Instruction) -> str:
        op = i.opcode & 0xF0
        bits = 64 if i.cls == b.ALU64 else 32
        if op == b.END:
            return self.byte_swap(i)
        if op == b.MOV:
            source = self.operand(i)
            if i.offset:
                narrow = self.low(source, i.offset)
                source = self.value(f"sext i{i.offset} {narrow} to i64")
            if bits == 64:
                return source
            return self.value(f"and i64 {source}, 4294967295")
        left, right = self.get(i.dst), self.operand(i)
        if bits == 32:
            left = self.low(left)
            right = self.low(right) if i.opcode & 0x08 else str(b.signed(i.imm, 32))
        kind = f"i{bits}"
        if op == b.NEG:
            result = self.value(f"sub {kind} 0, {left}")
        elif op in (b.LSH, b.RSH, b.ARSH):
            amount = self.value(f"and {kind} {right}, {bits - 1}")
            name = {b.LSH: "shl", b.RSH: "lshr", b.ARSH: "ashr"}[op]
            if self.is_short_shift(i):
                return self.short_shift(left, i.imm)
            result = self.value(f"{name} {kind} {left}, {amount}")
        elif op in (b.DIV, b.MOD):
            result = self.divide(op == b.DIV, i.offset == 1, kind, left, right)
        else:
            name = {b.ADD: "add", b.SUB: "sub", b.MUL: "mul", b.OR: "or", b.AND: "and", b.XOR: "xor"}[op]
            result = self.value(f"{name} {kind} {left}, {right}")
        return self.wide(result, bits)

    def is_short_shift(self, i: Instruction) -> bool:
        """Return whether this is a right shift of 32 bits as compilers without 32-bit instructions write it: a 64-bit shift, and a
        mask in the next instruction."""
        following = self.code[self.pc + 1]
        return (
            "shift" in self.backend.calls
            and i.opcode == b.ALU64 | b.RSH
            and 0 < i.imm < 32
            and (following.opcode, following.dst, following.imm)
            == (b.ALU64 | b.AND, i.dst, (1 << 32 - i.imm) - 1)
        )

    def short_shift(self, value: str, amount: int) -> str:
        """Emit such a shift in 32 bits, so that the computation before it can have 32 bits too. LLVM does not do this itself."""
        return self.wide(self.value(self.call("shift", f"i32 {self.low(value)}", f"i32 {amount}")))

    def divide(self, quotient: bool, is_signed: bool, kind: str, left: str, right: str) -> str:
        """Emit a division as eBPF defines it: x / 0 = 0, x % 0 = x; the smallest number divided by -1 is itself, with remainder 0."""
        zero = self.value(f"icmp eq {kind} {right}, 0")
        divisor = self.value(f"select i1 {zero}, {kind} 1, {kind} {right}")
        if is_signed:
            minus = self.value(f"icmp eq {kind} {right}, -1")
            divisor = self.value(f"select i1 {minus}, {kind} 1, {kind} {divisor}")
            name = "sdiv" if quotient else "srem"
        else:
            name = "udiv" if quotient else "urem"
        result = self.value(f"{name} {kind} {left}, {divisor}")
        if is_signed:
            opposite = self.value(f"sub {kind} 0, {left}") if quotient else "0"
            result = self.value(f"select i1 {minus}, {kind} {opposite}, {kind} {result}")
        return self.value(f"select i1 {zero}, {kind} {'0' if quotient else left}, {kind} {result}")

    def byte_swap(self, i: Instruction) -> str:
        value = self.get(i.dst)
        narrow = value if i.imm == 64 else self.low(value, i.imm)
        if i.cls == b.ALU64 or i.opcode & 0x08:
            self.declared.add(f"declare i{i.imm} @llvm.bswap.i{i.imm}(i{i.imm})")
            narrow = self.value(f"call i{i.imm} @llvm.bswap.i{i.imm}(i{i.imm} {narrow})")
        return self.wide(narrow, i.imm)

    def access(self) -> CheckedAccess:
        return self.checked.accesses[(self.chain, self.pc)]

    def place(self, register: int, offset: int, access: CheckedAccess, width: int) -> tuple[str, str, int]:
        """Return (pointer type, pointer, alignment) of an access to the stack or to memory."""
        base = self.get(register)
        if access.kind == "stack":
            return "ptr", self.stack(self.value(f"add i64 {base}, {offset}")), 1
        return self.backend.pointer, self.memory(base, offset), max(access.alignment, width)

    def load(self, i: Instruction) -> None:
        width = b.WIDTH[i.opcode & 0x18]
        kind = f"i{8 * width}"
        access = self.access()
        if access.kind == "context":
            value = self.context(access.name)
            if access.offset:
                value = self.value(f"lshr i64 {value}, {8 * access.offset}")
            if width < 8:
                value = self.low(value, 8 * width)
        elif access.kind == "param":
            name = f"param_{access.name}_{access.offset}_{width}"
            argument = self.argument(
                "param",
                name,
                "b64" if width == 8 else "b32",
                map=access.name,
                offset=access.offset,
                width=width,
            )
            value = argument if width >= 4 else self.value(f"trunc i32 {argument} to {kind}")
        else:
            kind_of, pointer, alignment = self.place(i.src, i.offset, access, width)
            value = self.value(f"load {kind}, {kind_of} {pointer}, align {alignment}")
        if width < 8:
            extend = "sext" if i.opcode & 0xE0 == b.MEMSX else "zext"
            value = self.value(f"{extend} {kind} {value} to i64")
        self.put(i.dst, value)

    def context(self, field: str) -> str:
        if field in _NARROW.get(self.checked.function.point, ()):  # so that comparisons have 32 bits
            return self.wide(self.argument("context", field, "b32", field=field))
        if field != "launch":
            return self.argument("context", field, field=field)
        launch = self.argument("launch", "launch")
        if self.checked.function.point not in b.DEVICE_POINTS:
            return launch
        # In a graph, the number counts from a word in GPU memory. It is read here, after clocks that the program reads earlier.
        cell = self.argument("replay", "replay")
        again, once = self.fresh("again"), self.fresh("once")
        self.emit("store i64 0, ptr %first")
        there = self.value(f"icmp ne i64 {cell}, 0")
        self.emit(f"br i1 {there}, label %{again}, label %{once}")
        self.label(again)
        first = self.value(f"load i64, {self.backend.pointer} {self.memory(cell)}, align 8")
        self.emit(f"store i64 {first}, ptr %first")
        self.emit(f"br label %{once}")
        self.label(once)
        return self.value(f"add i64 {launch}, {self.value('load i64, ptr %first')}")

    def store(self, i: Instruction) -> None:
        width = b.WIDTH[i.opcode & 0x18]
        value = self.get(i.src) if i.cls == b.STX else str(i.imm)
        if width < 8:
            value = self.low(value, 8 * width)
        kind, pointer, alignment = self.place(i.dst, i.offset, self.access(), width)
        self.emit(f"store i{8 * width} {value}, {kind} {pointer}, align {alignment}")

    def atomic(self, i: Instruction) -> None:
        width = b.WIDTH[i.opcode & 0x18]
        bits = 8 * width
        kind = f"i{bits}"
        value = self.get(i.src) if bits == 64 else self.low(self.get(i.src))
        expected = self.get(0) if bits == 64 else self.low(self.get(0))
        space, pointer, _ = self.place(i.dst, i.offset, self.access(), width)
        operation = i.imm & ~b.FETCH if i.imm not in (b.ATOMIC_XCHG, b.ATOMIC_CMPXCHG) else i.imm
        names = {
            b.ATOMIC_ADD: "add",
            b.ATOMIC_OR: "or",
            b.ATOMIC_AND: "and",
            b.ATOMIC_XOR: "xor",
            b.ATOMIC_XCHG: "xchg",
        }
        if space == "ptr" and self.access().kind == "stack":  # only this thread can access it
            old = self.value(f"load {kind}, ptr {pointer}, align 1")
            if operation == b.ATOMIC_CMPXCHG:
                same = self.value(f"icmp eq {kind} {old}, {expected}")
                new = self.value(f"select i1 {same}, {kind} {value}, {kind} {old}")
            else:
                new = (
                    value
                    if operation == b.ATOMIC_XCHG
                    else self.value(f"{names[operation]} {kind} {old}, {value}")
                )
            self.emit(f"store {kind} {new}, ptr {pointer}, align 1")
        elif operation == b.ATOMIC_CMPXCHG:
            pair = self.value(
                f"cmpxchg {space} {pointer}, {kind} {expected}, {kind} {value} {self.backend.scope} monotonic monotonic"
            )
            old = self.value(f"extractvalue {{ {kind}, i1 }} {pair}, 0")
        else:
            old = self.value(
                f"atomicrmw {names[operation]} {space} {pointer}, {kind} {value} {self.backend.scope} monotonic"
            )
        if operation == b.ATOMIC_CMPXCHG:
            self.put(0, self.wide(old, bits))
        elif i.imm & b.FETCH:
            self.put(i.src, self.wide(old, bits))

    def jump(self, i: Instruction) -> None:
        op = i.opcode & 0xF0
        if op == b.JA:
            self.go(self.pc + 1 + (i.imm if i.cls == b.JMP32 else i.offset))
        elif op == b.EXIT:
            if not self.chain:
                self.emit("ret void")
            else:
                self.emit(f"br label %{self.block(self.chain[:-1], self.chain[-1] + 1)}")
        elif op == b.CALL and i.src == b.PSEUDO_CALL:
            self.emit(f"br label %{self.block((*self.chain, self.pc), self.pc + 1 + i.imm)}")
        elif op == b.CALL:
            call = self.checked.calls[(self.chain, self.pc)]
            self.put(0, self.helper(call))
            self.go(self.pc + 1)
        else:
            self.branch(i, op)

    def branch(self, i: Instruction, op: int) -> None:
        target = self.pc + 1 + i.offset
        place = (self.chain, self.pc)
        if (place, False) not in self.checked.edges:
            self.go(target)
            return
        if (place, True) not in self.checked.edges:
            self.go(self.pc + 1)
            return
        left, right = self.get(i.dst), self.operand(i)
        kind = "i64"
        if i.cls == b.JMP32:
            kind = "i32"
            left = self.low(left)
            right = self.low(right) if i.opcode & 0x08 else str(b.signed(i.imm, 32))
        if op == b.JSET:
            both = self.value(f"and {kind} {left}, {right}")
            condition = self.value(f"icmp ne {kind} {both}, 0")
        else:
            condition = self.value(f"icmp {_CONDITIONS[op]} {kind} {left}, {right}")
        self.emit(
            f"br i1 {condition}, label %{self.block(self.chain, target)},"
            f" label %{self.block(self.chain, self.pc + 1)}{self.back(target)}"
        )

    # Threads

    def number(self, unit: str, kind: str) -> str:
        """Return the number of the thread, warp or block in its grid, as `kind`. An i32 may wrap: no instance has room for more."""

        def get(name: str) -> str:
            return self.special(name) if kind == "i64" else self.special32(name)

        def op(name: str, x: str, y: str) -> str:
            return self.value(f"{name} {kind} {x}, {y}")

        def number(index: str, size: str) -> str:
            row = op("add", op("mul", get(f"{index}.z"), get(f"{size}.y")), get(f"{index}.y"))
            return op("add", op("mul", row, get(f"{size}.x")), get(f"{index}.x"))

        block = number("ctaid", "nctaid")
        if unit == "block":
            return block
        of_block = op("mul", op("mul", get("ntid.x"), get("ntid.y")), get("ntid.z"))
        in_block = number("tid", "ntid")
        if unit == "warp":
            of_block = op("lshr", op("add", of_block, "31"), "5")
            in_block = op("lshr", in_block, "5")
        return op("add", op("mul", block, of_block), in_block)

    # Helpers

    def helper(self, call: CheckedCall) -> str:
        """Emit a call of a helper, as the table of helpers says, and return its result."""
        helper = HELPERS[call.helper]
        use = helper.native if self.checked.function.point in b.HOST_POINTS else helper.device
        assert use is not None
        return LOWERINGS[use.lowering](self, call, use.operand)

    def index(self, call: CheckedCall, operand: str) -> str:
        for register, axis in zip(HELPERS[call.helper].registers[ArgumentKind.RESULT], AXES, strict=True):
            value = self.special(f"{operand}.{axis}")
            kind, pointer = self.source(register, call)
            self.emit(f"store i64 {value}, {kind} {pointer}, align {1 if kind == 'ptr' else 8}")
        return "0"

    def lookup(self, call: CheckedCall, operand: str) -> str:
        definition = self.map(call.map)
        if definition.kind == "param":
            return str(1 << 62)  # never used as an address: every access names its parameter
        if definition.kind == "hash":
            return self.hash_call("find", call, definition)
        return self.element(call, definition)

    def element(self, call: CheckedCall, definition: MapDefinition) -> str:
        """Return the address of an array element, or 0."""
        kind, pointer = self.source(2, call)
        key = self.value(f"load i32, {kind} {pointer}, align {1 if kind == 'ptr' else 4}")
        inside = self.value(f"icmp ult i32 {key}, {definition.max_entries}")
        base = self.base(definition.name)
        if SHAPED.get(definition.kind, "instance") == "instance":
            address = self.at(base, key, definition.stride)
            return self.value(f"select i1 {inside}, i64 {address}, i64 0")
        capacity = self.argument("map_capacity", f"capacity_{definition.name}", map=definition.name)
        if definition.kind == "site_array":
            return self.at(base, self.of_site(key, capacity), definition.value_size)
        # A unit beyond the capacity gets the element after the last one. This needs no branch, and stays inside of the map.
        unit = self.number(SHAPED[definition.kind], "i32")
        room = self.low(capacity)
        fits = self.value(f"icmp ult i32 {unit}, {room}")
        if definition.max_entries == 1:
            index = self.wide(self.value(f"select i1 {fits}, i32 {unit}, i32 {room}"))
        else:
            row = self.value(f"mul i64 {self.wide(key)}, {capacity}")
            own = self.value(f"add i64 {row}, {self.wide(unit)}")
            last = self.value(f"mul i64 {capacity}, {definition.max_entries}")
            index = self.value(f"select i1 {fits}, i64 {own}, i64 {last}")
        offset = self.value(f"mul i64 {index}, {definition.value_size}")
        address = self.value(f"add nuw i64 {base}, {offset}")
        return self.value(f"select i1 {inside}, i64 {address}, i64 0")

    def at(self, base: str, index: str, size: int) -> str:
        """Return the address of element `index`, an i32. No map is at address 0 or wraps around."""
        if "element" in self.backend.calls:
            address = self.value(self.call("element", f"i32 {index}", f"i32 {size}", f"i64 {base}"))
            self.declared.add("declare void @llvm.assume(i1)")
            self.emit(f"call void @llvm.assume(i1 {self.value(f'icmp ne i64 {address}, 0')})")
            return address
        offset = self.value(f"mul i64 {self.wide(index)}, {size}")
        return self.value(f"add nuw i64 {base}, {offset}")

    def of_site(self, site: str, capacity: str) -> str:
        """Return the index of a site's value on this multiprocessor, or for an unknown site the index after the last."""
        sites = self.low(capacity)
        mask = self.low(self.value(f"lshr i64 {capacity}, {SHARDS_SHIFT}"))
        shard = self.value(f"and i32 {self.special32('sm')}, {mask}")
        row = self.value(f"mul i32 {shard}, {sites}")
        own = self.value(f"add i32 {row}, {site}")
        last = self.value(f"mul i32 {self.value(f'add i32 {mask}, 1')}, {sites}")
        inside = self.value(f"icmp ult i32 {site}, {sites}")
        return self.value(f"select i1 {inside}, i32 {own}, i32 {last}")

    def update(self, call: CheckedCall, operand: str) -> str:
        definition = self.map(call.map)
        if definition.kind == "hash":
            return self.hash_call(("update", "insert", "replace")[call.flags], call, definition)
        address = self.element(call, definition)
        there = self.value(f"icmp ne i64 {address}, 0")
        if call.flags == 1:  # BPF_NOEXIST: elements of an array always exist
            return self.value(f"select i1 {there}, i64 -17, i64 -7")
        write, done = self.fresh("write"), self.fresh("done")
        self.emit(f"br i1 {there}, label %{write}, label %{done}")
        self.label(write)
        self.copy(
            (self.backend.pointer, self.memory(address)),
            self.source(3, call),
            definition.value_size,
            value_alignment(definition),
        )
        self.emit(f"br label %{done}")
        self.label(done)
        return self.value(f"select i1 {there}, i64 0, i64 -7")

    def delete(self, call: CheckedCall, operand: str) -> str:
        return self.hash_call("delete", call, self.map(call.map))

    def hash_call(self, operation: str, call: CheckedCall, definition: MapDefinition) -> str:
        words = []
        kind, pointer = self.source(2, call)
        for at, width in storage.chunks(definition.key_size):
            place = self.value(f"getelementptr i8, {kind} {pointer}, i64 {at}")
            part = self.value(f"load i{8 * width}, {kind} {place}, align {1 if kind == 'ptr' else width}")
            words.append(f"i{8 * width} {part}")
        arguments = [f"i64 {self.base(definition.name)}", *words]
        if operation in ("update", "insert", "replace"):
            kind, pointer = self.source(3, call)
            for at, width in storage.chunks(definition.value_size):
                place = self.value(f"getelementptr i8, {kind} {pointer}, i64 {at}")
                part = self.value(f"load i{8 * width}, {kind} {place}, align {1 if kind == 'ptr' else width}")
                arguments.append(f"i{8 * width} {part}")
        name = f"hash_{operation}_{definition.name}"
        text = storage.hash_function(name, operation, definition, self.backend)
        return self.value(f"call i64 {self.function(name, text)}({', '.join(arguments)})")

    def reserve_room(self, definition: MapDefinition) -> tuple[str, str]:
        """Reserve a record and return (address of its header or 0, its mark)."""
        name = f"ring_{definition.name}"
        text = storage.ring_function(name, definition, self.backend)
        base, sm = self.base(definition.name), self.special32("sm")
        pair = self.value(f"call {{ i64, i32 }} {self.function(name, text)}(i64 {base}, i32 {sm})")
        return (
            self.value(f"extractvalue {{ i64, i32 }} {pair}, 0"),
            self.value(f"extractvalue {{ i64, i32 }} {pair}, 1"),
        )

    def commit(self, header: str, size: int, mark: str) -> None:
        """Store mark and size at once, after the payload also in the order that the host sees."""
        pointer = self.memory(header)
        word = self.value(f"or i64 {self.wide(mark)}, {size << 32}")
        self.emit(f"store atomic i64 {word}, {self.backend.pointer} {pointer} release, align 8")

    def record(self, definition: MapDefinition, size: int, fill: Callable[[str], None]) -> str:
        header, mark = self.reserve_room(definition)
        there = self.value(f"icmp ne i64 {header}, 0")
        write, done = self.fresh("write"), self.fresh("done")
        self.emit(f"br i1 {there}, label %{write}, label %{done}")
        self.label(write)
        fill(self.memory(header, 8))
        self.commit(header, size, mark)
        self.emit(f"br label %{done}")
        self.label(done)
        return self.value(f"select i1 {there}, i64 0, i64 -11")

    def output(self, call: CheckedCall, operand: str) -> str:
        source = self.source(HELPERS[call.helper].register(ArgumentKind.RECORD), call)

        def fill(payload: str) -> None:
            self.copy((self.backend.pointer, payload), source, call.size, 8)

        return self.record(self.map(call.map), call.size, fill)

    def reserve(self, call: CheckedCall, operand: str) -> str:
        header, mark = self.reserve_room(self.map(call.map))
        there = self.value(f"icmp ne i64 {header}, 0")
        write, done = self.fresh("write"), self.fresh("done")
        self.emit(f"br i1 {there}, label %{write}, label %{done}")
        self.label(write)
        # The size field keeps the mark until the record is submitted.
        pointer = self.memory(header, 4)
        self.emit(f"store i32 {mark}, {self.backend.pointer} {pointer}, align 4")
        self.emit(f"br label %{done}")
        self.label(done)
        payload = self.value(f"add i64 {header}, 8")
        return self.value(f"select i1 {there}, i64 {payload}, i64 0")

    def submit(self, call: CheckedCall, operand: str, state: int = 0) -> str:
        payload = self.get(1)
        header = self.value(f"add i64 {payload}, -8")
        pointer = self.memory(header, 4)
        mark = self.value(f"load i32, {self.backend.pointer} {pointer}, align 4")
        self.commit(header, call.size | state, mark)
        return "0"

    def discard(self, call: CheckedCall, operand: str) -> str:
        return self.submit(call, operand, DISCARDED)

    def print(self, call: CheckedCall, operand: str) -> str:
        number = format_number(call.text)
        self.formats[number] = call.text
        conversions = call.text.replace("%%", "").count("%")
        printed = HELPERS[call.helper].registers.get(ArgumentKind.PRINTED, ())[:conversions]
        values = [self.get(register) for register in printed]
        values += ["0"] * (PRINT_ARGUMENTS - len(values))

        def fill(payload: str) -> None:
            for at, value in enumerate([str(number), *values]):
                place = self.value(f"getelementptr i8, {self.backend.pointer} {payload}, i64 {8 * at}")
                self.emit(f"store i64 {value}, {self.backend.pointer} {place}, align 8")

        definition = self.map(PRINTS)
        return self.record(definition, definition.value_size, fill)

    def agent_function(self, call: CheckedCall, operand: str) -> str:
        """Call the C function of the agent that replaces a helper of the kernel, with the same arguments. Return its result."""
        arguments = []
        for register, argument in enumerate(HELPERS[call.helper].arguments, 1):
            if argument.kind is ArgumentKind.BUFFER:
                arguments.append(" ".join(self.source(register, call)))
            else:
                value = str(call.size) if argument.kind is ArgumentKind.SIZE else self.get(register)
                arguments.append(f"i64 {value}")
        address = self.argument("helper", f"helper_{call.helper}", offset=call.helper)
        function = self.value(f"inttoptr i64 {address} to ptr")
        return self.value(f"call i64 {function}({', '.join(arguments)})")

    def maximum(self, call: CheckedCall, operand: str) -> str:
        helper = HELPERS[call.helper]
        pointer = self.memory(self.get(helper.register(ArgumentKind.CELL)))
        value = self.get(helper.register(ArgumentKind.NUMBER))
        return self.value(
            f"atomicrmw umax {self.backend.pointer} {pointer}, i64 {value} {self.backend.scope} monotonic"
        )

    def logarithm(self, call: CheckedCall, operand: str) -> str:
        self.declared.add("declare i64 @llvm.ctlz.i64(i64, i1)")
        some = self.value(f"or i64 {self.get(1)}, 1")
        return self.value(f"xor i64 63, {self.value(f'call i64 @llvm.ctlz.i64(i64 {some}, i1 true)')}")

    def popcount(self, call: CheckedCall, operand: str) -> str:
        self.declared.add("declare i64 @llvm.ctpop.i64(i64)")
        return self.value(f"call i64 @llvm.ctpop.i64(i64 {self.get(1)})")

    def first(self, call: CheckedCall, operand: str) -> str:
        """Compare the lane's number, not a mask: then ptxas knows that only one lane goes on, and does not reduce over lanes before
        each atomic operation."""
        self.declared.add("declare i32 @llvm.cttz.i32(i32, i1)")
        lowest = self.value(f"call i32 @llvm.cttz.i32(i32 {self.low(self.get(1))}, i1 true)")
        lowest = self.value(f"freeze i32 {lowest}")  # an empty mask has no lowest lane: any number will do
        return self.wide(self.value(f"icmp eq i32 {self.special32('this_lane')}, {lowest}"), 1)

    def warp(self, call: CheckedCall, operand: str) -> str:
        row = self.value(f"mul i64 {self.special('tid.z')}, {self.special('ntid.y')}")
        row = self.value(f"add i64 {row}, {self.special('tid.y')}")
        row = self.value(f"mul i64 {row}, {self.special('ntid.x')}")
        thread = self.value(f"add i64 {row}, {self.special('tid.x')}")
        return self.value(f"lshr i64 {thread}, 5")


def _aligned(alignment: int, at: int, width: int) -> int:
    """Return the alignment of byte `at` of an object that is aligned to `alignment`."""
    while alignment > 1 and at % alignment:
        alignment //= 2
    return max(alignment, 1)


# Context fields that fit into 32 bits, by point.
_NARROW = {"access": ("site", "width", "space", "kind", "active", "effect")}

_CONDITIONS = {
    b.JEQ: "eq",
    b.JNE: "ne",
    b.JGT: "ugt",
    b.JGE: "uge",
    b.JLT: "ult",
    b.JLE: "ule",
    b.JSGT: "sgt",
    b.JSGE: "sge",
    b.JSLT: "slt",
    b.JSLE: "sle",
}

# How helpers are lowered: by the names in the table of helpers, given the call and the operand there.
LOWERINGS: Mapping[str, Callable[[_Lowering, CheckedCall, str], str]] = {
    "lookup": _Lowering.lookup,
    "update": _Lowering.update,
    "delete": _Lowering.delete,
    "print": _Lowering.print,
    "output": _Lowering.output,
    "reserve": _Lowering.reserve,
    "submit": _Lowering.submit,
    "discard": _Lowering.discard,
    "function": _Lowering.agent_function,
    "constant": lambda lowering, call, operand: operand,
    "argument": lambda lowering, call, operand: lowering.argument(operand, operand),
    "special": lambda lowering, call, operand: lowering.special(operand),
    "index": _Lowering.index,
    "lanes": lambda lowering, call, operand: lowering.collective(
        operand,
        *(f"i64 {lowering.get(register)}" for register, _ in enumerate(HELPERS[call.helper].arguments, 1)),
    ),
    "shuffle": lambda lowering, call, operand: lowering.collective(
        "shuffle", f"i64 {lowering.get(1)}", f"i32 {lowering.low(lowering.get(2))}"
    ),
    "warp": _Lowering.warp,
    "thread": lambda lowering, call, operand: lowering.number("thread", "i64"),
    "maximum": _Lowering.maximum,
    "logarithm": _Lowering.logarithm,
    "popcount": _Lowering.popcount,
    "first": _Lowering.first,
}
