"""eBPF → LLVM IR, for every back end. A `Backend`, a table, has the differences between them.

eBPF registers become 64-bit variables, which LLVM promotes to registers. A stack address is a plain number, NOT_NULL plus the offset
in one array for the whole stack. LLVM sees constant offsets, and promotes the array to registers. Addresses of map values are real.
Verification has determined which memory each instruction accesses (`Checked`).
"""

from __future__ import annotations

from collections.abc import Mapping

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import STACK_SIZE, Instruction, Program
from gpubpf.ebpf.maps import BLOCKS, SHAPED
from gpubpf.lower import storage
from gpubpf.lower.backend import Backend
from gpubpf.lower.emitter import NOT_NULL
from gpubpf.lower.fragment import Argument
from gpubpf.lower.helper_calls import HelperCalls
from gpubpf.record import Record
from gpubpf.verify.values import Checked, CheckedAccess

ENTRY = "gpubpf_program"
LOOP_TURNS = 1 << 20  # most iterations of all loops of unknown length in one run together (`Checked.loops`)
STOPPED = f": a loop was stopped after {LOOP_TURNS} turns\n"  # what a stopped program prints, after its name


class LoweredModule(Record):
    """A lowered program: the LLVM IR of the function ENTRY, its arguments in order, and the texts that it prints, by number."""

    text: str
    arguments: tuple[Argument, ...]
    formats: Mapping[int, str]


def lower(program: Program, checked: Checked, backend: Backend) -> LoweredModule:
    """Lower a verified program for a back end."""
    return _Lowering(program, checked, backend).run()


class _Lowering(HelperCalls):
    """Lowers one verified program to the text of an LLVM IR function."""

    def run(self) -> LoweredModule:
        first = self.elect() if self.checked.function.point in ("block_begin", "block_end") else None
        for chain in self.chains:
            for pc in sorted(pc for c, pc in self.checked.reached if c == chain):
                self.chain, self.pc = chain, pc
                self.label(self.block(chain, pc))
                if (chain, pc) in self.checked.loops:
                    self.count_turn()
                self.instruction(self.code[pc])
        if self.checked.loops:
            self.label("too_many_turns")
            self.print_text(f"device program {self.checked.function.name}{STOPPED}")
            self.emit("ret void")
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
        if self.checked.loops:
            start += ["  %turns = alloca i64", f"  store i64 {LOOP_TURNS}, ptr %turns"]
        start += self.early
        start += [f"  store i64 {NOT_NULL}, ptr %r1", f"  br label %{first or self.block((), 0)}"]
        text = "\n".join(
            [
                *head,
                *sorted(self.declared - set(self.backend.functions.splitlines())),
                *([self.backend.functions] if self.backend.functions else []),
                *self.functions.values(),
                *start,
                *self.body,
                "}",
                "",
            ]
        )
        return LoweredModule(text, tuple(self.arguments.values()), self.formats)

    def count_turn(self) -> None:
        """Emit code that ends the program once its loops, all together, have had LOOP_TURNS iterations."""
        left, go = self.value("load i64, ptr %turns"), self.fresh("turn")
        self.emit(f"store i64 {self.value(f'sub i64 {left}, 1')}, ptr %turns")
        self.emit(f"br i1 {self.value(f'icmp eq i64 {left}, 0')}, label %too_many_turns, label %{go}")
        self.label(go)

    def elect(self) -> str:
        """Emit code before a block_begin or block_end program that elects the thread to run it. Return its label."""
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

    def known_bases(self) -> list[str]:
        """Return `known_sites`, and IR that lets LLVM assume that no map is at address 0, so that some lookups need no test."""
        bases = [a.name for a in self.arguments.values() if a.kind in ("map_base", "shard")]
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
        """Return IR that lets LLVM assume that the probe's site is below the capacity. Then the lookup of its value needs no test."""
        arrays = [
            a.name for a in self.arguments.values() if a.kind == "map_capacity" and a.map in self.program.maps
        ]
        arrays = [a for a in arrays if self.program.maps[self.arguments[a].map].kind == "site_array"]
        site = self.arguments.get("site")
        if not arrays or site is None:
            return []
        narrow = ["  %site_number = trunc i64 %site to i32"] if site.type == "b64" else []
        number = "%site_number" if narrow else "%site"
        return narrow + [
            line
            for name in arrays
            for line in (
                f"  %sites_{name} = trunc i64 %{name} to i32",
                f"  %is_{name} = icmp ult i32 {number}, %sites_{name}",
                f"  call void @llvm.assume(i1 %is_{name})",
            )
        ]

    # Instructions

    def instruction(self, i: Instruction) -> None:
        if i.cls in (b.ALU, b.ALU64):
            self.put(i.dst, self.alu(i))
        elif i.cls == b.LD:
            number = str(b.signed(i.imm) if i.map is None else NOT_NULL)
            if i.map is not None and i.src == b.PSEUDO_VALUE:
                number = self.value(f"add i64 {self.base(i.map)}, {i.imm}")
            self.put(i.dst, number)
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
        elif (
            op == b.MUL and bits == 64 and not i.opcode & 0x08 and i.imm > 0 and "scale" in self.backend.calls
        ):
            return self.scaled(left, i.imm)
        elif op in (b.DIV, b.MOD):
            result = self.divide(op == b.DIV, i.offset == 1, kind, left, right)
        else:
            name = {b.ADD: "add", b.SUB: "sub", b.MUL: "mul", b.OR: "or", b.AND: "and", b.XOR: "xor"}[op]
            result = self.value(f"{name} {kind} {left}, {right}")
        return self.wide(result, bits)

    def is_short_shift(self, i: Instruction) -> bool:
        """Return whether an instruction begins a 32-bit right shift as compilers without 32-bit instructions emit it.

        Such compilers emit a 64-bit shift, and a mask in the next instruction.
        """
        following = self.code[self.pc + 1]
        return (
            "shift" in self.backend.calls
            and i.opcode == b.ALU64 | b.RSH
            and 0 < i.imm < 32
            and (following.opcode, following.dst, following.imm)
            == (b.ALU64 | b.AND, i.dst, (1 << 32 - i.imm) - 1)
        )

    def short_shift(self, value: str, amount: int) -> str:
        """Emit a right shift in 32 bits, so that the preceding computation can use 32 bits too. LLVM does not do this itself."""
        return self.wide(self.value(self.call("shift", f"i32 {self.low(value)}", f"i32 {amount}")))

    def scaled(self, value: str, factor: int) -> str:
        """Emit a product in two halves. LLVM drops the upper half if it is known to be 0, as for an index; ptxas does not."""
        low = self.value(self.call("scale", f"i32 {self.low(value)}", f"i32 {factor}"))
        high = self.value(f"mul i64 {self.value(f'lshr i64 {value}, 32')}, {factor}")
        return self.value(f"add i64 {low}, {self.value(f'shl i64 {high}, 32')}")

    def divide(self, quotient: bool, is_signed: bool, kind: str, left: str, right: str) -> str:
        """Emit a division with eBPF semantics: x / 0 = 0, x % 0 = x; the smallest number divided by -1 is itself, with remainder 0."""
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
        known = self.checked.constants.get((self.chain, self.pc))
        if known is not None:
            value = str(b.signed(known, 8 * width))
        elif access.kind == "context":
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
        narrow = _NARROW.get(self.checked.function.point, ())  # for comparisons in 32 bits
        if field in narrow and (field not in _LANES or self.backend.warp <= 32):
            return self.wide(self.argument("context", field, "b32", field=field))
        if field != "launch":
            return self.argument("context", field, field=field)
        launch = self.argument("launch", "launch")
        if self.checked.function.point not in b.DEVICE_POINTS:
            return launch
        # In a graph, the launch's number is the argument plus a word in GPU memory.
        cell = self.argument("replay", "replay")
        if "replay" in self.backend.calls:
            return self.value(f"add i64 {launch}, {self.first_launch(cell)}")
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

    def first_launch(self, cell: str) -> str:
        """Return the word in GPU memory that is added to the number of a launch in a graph.

        The word is loaded early if addresses depend on it. The addition waits for the load; it may come after the read of a clock.

        cell: the word's address
        """
        used = {call.map for call in self.checked.calls.values() if call.map}
        early = any(self.program.maps[name].kind in SHAPED for name in used)

        def load() -> str:
            return self.value(self.call("replay", f"i64 {cell}"))

        return self.first_of_all("replay", load) if early else load()

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
        if self.backend.warps and not i.imm & b.FETCH:
            self.emit('call void asm sideeffect "", ""() nomerge')
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
            f" label %{self.block(self.chain, self.pc + 1)}"
        )


# Context fields that fit into 32 bits, by point.
_NARROW = {
    "access": ("site", "width", "space", "kind", "active", "effect"),
    "access_again": ("site", "width"),
    "basic_block": ("site", "active", "instructions", "regions"),
    "branch": ("site", "active", "taken", "region"),
    "value": ("site", "width", "space", "kind", "active", "effect", "type"),
    "float": ("site", "operation", "active", "type", "operand_type", "operands"),
    "instruction": ("site", "active", "type", "operand_type", "operands"),
}
_LANES = ("active", "taken")  # lane masks: they need 64 bits for AMD GPUs with 64 lanes

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
