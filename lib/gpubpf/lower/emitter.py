"""Emit LLVM IR: values, labels, calls, and the registers and memory of the program that is being lowered."""

from __future__ import annotations

from collections.abc import Callable

from gpubpf.ebpf.bytecode import STACK_SIZE, Instruction, Program
from gpubpf.ebpf.maps import MapDefinition, internal
from gpubpf.lower import storage
from gpubpf.lower.backend import Backend
from gpubpf.lower.fragment import Argument
from gpubpf.verify.values import Chain, Checked, CheckedCall

AXES = ("x", "y", "z")
# Programs get this number instead of the address of the context, of maps and of parameters, which have no address, and of the stack,
# whose address no register can hold. The second gate knows that these addresses are not NULL. So the number plus any offset that the
# gate allows (up to 2^29) must differ from 0.
NOT_NULL = 1 << 62


class Emitter:
    """Emits the body of a function in LLVM IR."""

    def __init__(self, program: Program, checked: Checked, backend: Backend) -> None:
        self.program, self.checked, self.backend = program, checked, backend
        self.code = checked.function.instructions
        self.body: list[str] = []
        self.early: list[str] = []  # see `first_of_all`
        self.early_values: dict[str, str] = {}
        self.count = 0
        self.arguments: dict[str, Argument] = {}
        self.declared: set[str] = set()
        self.functions: dict[str, str] = {}  # internal functions for maps, by name
        self.formats: dict[int, str] = {}
        chains = {chain for chain, _ in checked.reached}
        self.chains: dict[Chain, int] = {chain: n for n, chain in enumerate(sorted(chains))}
        self.chain: Chain = ()  # the chain of the instruction that is being lowered
        self.pc = 0
        self.depth = 1 + max((len(chain) for chain in chains), default=0)

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
        self.emit(f"br label %{self.block(self.chain, pc)}")

    def argument(self, kind: str, name: str, type_: str = "b64", **more: str | int) -> str:
        assert name.isascii() and name.isidentifier(), name  # it becomes part of the code
        if name not in self.arguments:
            self.arguments[name] = Argument(name, type_, kind, **more)  # type: ignore[arg-type]
        return f"%{name}"

    def special(self, name: str) -> str:
        """Return a target-specific value (`Backend.calls`, `given`) as i64; 0 for operations without a result such as `membar`."""
        if (known := self.known(name)) is not None:
            return known if self.backend.given.get(name, ("", ""))[1] == "b64" else self.wide(known)
        if self.backend.calls[name][1] == "void":
            self.emit(self.call(name))
            return "0"
        result = self.value(self.call(name))
        return result if self.backend.calls[name][1] == "i64" else self.wide(result)

    def special32(self, name: str) -> str:
        known = self.known(name)
        return known if known is not None else self.value(self.call(name))

    def known(self, name: str) -> str | None:
        """Return a target-specific value that is an argument, with the argument's type or as i32; None for other values."""
        if name in self.backend.given:
            kind, type_ = self.backend.given[name]
            return self.argument(kind, name.replace(".", "_"), type_, field=name)
        if "first_thread" not in self.backend.given or not name.startswith("tid."):
            return None
        thread, width = self.in_block("i32"), self.special32("ntid.x")
        if name == "tid.x":
            return self.value(f"urem i32 {thread}, {width}")
        row, rows = self.value(f"udiv i32 {thread}, {width}"), self.special32("ntid.y")
        return self.value(f"{'urem' if name == 'tid.y' else 'udiv'} i32 {row}, {rows}")

    def in_block(self, kind: str) -> str:
        """Return the number of the thread in its block."""
        if "first_thread" in self.backend.given:
            number = self.value(f"add i32 {self.special32('first_thread')}, {self.special32('lane')}")
            return number if kind == "i32" else self.wide(number)
        return self.linear("tid", "ntid", kind)

    def linear(self, index: str, size: str, kind: str) -> str:
        """Return (z * height + y) * width + x for a three-dimensional index, such as tid in ntid."""

        def get(name: str) -> str:
            return self.special(name) if kind == "i64" else self.special32(name)

        row = self.value(f"mul {kind} {get(f'{index}.z')}, {get(f'{size}.y')}")
        row = self.value(f"add {kind} {row}, {get(f'{index}.y')}")
        row = self.value(f"mul {kind} {row}, {get(f'{size}.x')}")
        return self.value(f"add {kind} {row}, {get(f'{index}.x')}")

    def call(self, name: str, *arguments: str) -> str:
        symbol, kind = self.backend.calls[name]
        if not symbol.startswith("asm "):
            kinds = ", ".join(argument.split()[0] for argument in arguments)
            if f" @{symbol}(" not in self.backend.functions:
                self.declared.add(f"declare {kind} @{symbol}({kinds})")
            symbol = f"@{symbol}"
        return f"call {kind} {symbol}({', '.join(arguments)})"

    def collective(self, name: str, *arguments: str) -> str:
        """Return the result of a collective operation of the active lanes as i64. LLVM must not move, merge or duplicate it."""
        result = self.value(f"{self.call(name, *arguments)} convergent nomerge noduplicate")
        return result if self.backend.calls[name][1] == "i64" else self.wide(result)

    def function(self, name: str, text: str) -> str:
        """Define an internal function, unless it is already defined, and return its name with `@`. LLVM always inlines it.

        text: the definition, and declarations that it needs
        """
        if name not in self.functions:
            lines = text.split("\n")
            self.declared.update(line for line in lines if line.startswith("declare "))
            self.functions[name] = "\n".join(line for line in lines if not line.startswith("declare "))
        return f"@{name}"

    def map(self, name: str) -> MapDefinition:
        return internal(name) or self.program.maps[name]

    def base(self, name: str) -> str:
        return self.argument("map_base", f"map_{name}", map=name)

    # Registers and memory

    def slot(self, register: int) -> str:
        return f"%r{register}" if register < 6 else f"%r{register}.{self.chains[self.chain]}"

    def get(self, register: int) -> str:
        if register == 10:
            return str(NOT_NULL + STACK_SIZE * (len(self.chain) + 1))
        return self.value(f"load i64, ptr {self.slot(register)}")

    def put(self, register: int, value: str) -> None:
        self.emit(f"store i64 {value}, ptr {self.slot(register)}")

    def operand(self, i: Instruction) -> str:
        return self.get(i.src) if i.opcode & 0x08 else str(i.imm)

    def low(self, value: str, bits: int = 32) -> str:
        return self.value(f"trunc i64 {value} to i{bits}")

    def wide(self, value: str, bits: int = 32) -> str:
        return value if bits == 64 else self.value(f"zext i{bits} {value} to i64")

    def stack(self, address: str) -> str:
        """Return a pointer to a byte of the stack."""
        return self.value(f"getelementptr i8, ptr %stack, i64 {self.value(f'sub i64 {address}, {NOT_NULL}')}")

    def memory(self, base: str, offset: int | str = 0) -> str:
        pointer = self.value(f"inttoptr i64 {base} to {self.backend.pointer}")
        return self.value(f"getelementptr i8, {self.backend.pointer} {pointer}, i64 {offset}")

    def source(self, register: int, call: CheckedCall) -> tuple[str, str]:
        """Return (pointer type, pointer) for an address argument of a helper."""
        address = self.get(register)
        if call.pointers[register] == "stack":
            return "ptr", self.stack(address)
        return self.backend.pointer, self.memory(address)

    def copy(self, to: tuple[str, str], source: tuple[str, str], size: int, alignment: int) -> None:
        """Emit a copy of `size` bytes. `alignment`: the alignment of the destination, in bytes."""
        for at, width in storage.chunks(size):
            kind = f"i{8 * width}"
            a = self.value(f"getelementptr i8, {source[0]} {source[1]}, i64 {at}")
            value = self.value(
                f"load {kind}, {source[0]} {a}, align {1 if source[0] == 'ptr' else min(width, 8)}"
            )
            c = self.value(f"getelementptr i8, {to[0]} {to[1]}, i64 {at}")
            self.emit(f"store {kind} {value}, {to[0]} {c}, align {_aligned(alignment, at, width)}")

    # Threads

    @property
    def warp_shift(self) -> str:
        return str(self.backend.warp.bit_length() - 1)

    def number(self, unit: str, kind: str) -> str:
        """Return the number of the thread, warp or block (`unit`) in its grid, with the integer type `kind`.

        An i32 may wrap around, which does not matter: no map instance has room for 2^32 units.
        """
        if kind == "i32" and self.checked.function.point == "exit":
            return self.first_of_all(unit, lambda: self.computed_number(unit, kind))
        return self.computed_number(unit, kind)

    def first_of_all(self, name: str, compute: Callable[[], str]) -> str:
        """Return a value that the program computes once, at its beginning.

        At an exit, the computation then runs while the kernel waits for its loads, before the program reads a clock. ptxas does not
        move a later computation to before the read of a clock.
        """
        if name not in self.early_values:
            body, self.body = self.body, self.early
            self.early_values[name] = compute()
            self.body = body
        return self.early_values[name]

    def computed_number(self, unit: str, kind: str) -> str:
        def get(name: str) -> str:
            return self.special(name) if kind == "i64" else self.special32(name)

        def op(name: str, x: str, y: str) -> str:
            return self.value(f"{name} {kind} {x}, {y}")

        block = self.linear("ctaid", "nctaid", kind)
        if unit == "block":
            return block
        of_block = op("mul", op("mul", get("ntid.x"), get("ntid.y")), get("ntid.z"))
        in_block = self.in_block(kind)
        if unit == "warp":
            of_block = op("lshr", op("add", of_block, str(self.backend.warp - 1)), self.warp_shift)
            in_block = op("lshr", in_block, self.warp_shift)
        return op("add", op("mul", block, of_block), in_block)


def _aligned(alignment: int, at: int, width: int) -> int:
    """Return the alignment of byte `at` of an object that is aligned to `alignment`."""
    while alignment > 1 and at % alignment:
        alignment //= 2
    return max(alignment, 1)
