"""Registers and memory as the second gate knows them on one path, and the reads and writes that it allows."""

from __future__ import annotations

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import CONTEXTS, STACK_SIZE, BpfFunction, Instruction, Program
from gpubpf.ebpf.helpers import number_of
from gpubpf.errors import VerifyError
from gpubpf.verify import ranges
from gpubpf.verify.ranges import Range, constant, truncate, within
from gpubpf.verify.values import (
    NUMBER,
    CheckedAccess,
    CheckedCall,
    CodePlace,
    State,
    Value,
    frame_bytes,
    place_of,
    signed64,
    value_alignment,
)

SELDOM = number_of("gpu_seldom")


class DiffersByPath(VerifyError):
    """The instruction at `pc` cannot be lowered, because it does different things on different paths."""

    def __init__(self, error: VerifyError, pc: int) -> None:
        super().__init__(str(error))
        self.pc = pc


class AbstractMachine:
    """The registers and memory of a program that is being verified.

    accesses, calls  the memory accesses and helper calls found, by place
    constants        the results of loads from constant maps, by place; None if the result is not always the same number
    stack_low        the lowest stack offset that the program writes
    """

    def __init__(self, program: Program, function: BpfFunction) -> None:
        self.program, self.function = program, function
        self.accesses: dict[CodePlace, CheckedAccess] = {}
        self.calls: dict[CodePlace, CheckedCall] = {}
        self.constants: dict[CodePlace, int | None] = {}
        self.stack_low = 0
        # Whether the program calls gpu_seldom, at which it may begin again. Code before the call must not have effects.
        self.begins_again = any(
            i.opcode == b.JMP | b.CALL and i.src == 0 and i.imm == SELDOM for i in function.instructions
        )
        self.sizing = False  # whether ring buffers may have no record size yet
        self._ids = 0

    def reject(self, pc: int, what: str, remedy: str) -> VerifyError:
        return VerifyError(f"{place_of(self.program, self.function, pc)}: {what}; {remedy}")

    def differs(self, pc: int, what: str, remedy: str) -> VerifyError:
        return DiffersByPath(self.reject(pc, what, remedy), pc)

    def read(self, state: State, register: int) -> Value:
        value = state.registers[register]
        if value is None:
            raise self.reject(
                state.pc, f"r{register} is read before it has a value", "give the variable a value first"
            )
        return value

    def number(self, state: State, value: Value, what: str) -> None:
        if value.kind != "number":
            raise self.reject(state.pc, what, "keep addresses in pointers")

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def _reach(self, state: State, base: Value, offset: int, size: int, write: bool) -> Range:
        """Check one access through a register and record it. Return the range of its offset."""
        pc = state.pc
        if base.kind == "number":
            raise self.reject(
                pc,
                f"{'writes to' if write else 'reads from'} an address that is only a number",
                "access only the context, the stack and map values",
            )
        if base.nullable:
            raise self.reject(
                pc, "uses a pointer that may be NULL", "test the result of lookup against NULL first"
            )
        where = ranges.operate(b.ADD, base.range, constant(offset), True, False)
        if base.kind == "map":
            raise self.reject(pc, f"reads or writes the map {base.object} itself", "use its methods")
        if base.kind == "context":
            access = self._context(pc, where, size, write)
        elif base.kind == "stack":
            at = where.constant
            if at is None:
                raise self.reject(
                    pc,
                    "indexes an array on the stack by a number that is not constant: the stack is kept in registers",
                    "unroll the loop, or use a map",
                )
            self.stack_bounds(pc, where, size, True)
            access = CheckedAccess("stack")
        else:
            access = self._value(pc, base, where, size, write)
        self._note_access(state, access)
        if write and access.kind == "memory":
            self.note_effect(state)
        return where

    def note_effect(self, state: State) -> None:
        """Record that this instruction changes memory that others see, if the program may begin again (`gpu_seldom`)."""
        if self.begins_again and state.effect is None:
            state.effect = state.pc

    def _note_access(self, state: State, access: CheckedAccess) -> None:
        place = (state.chain, state.pc)
        known = self.accesses.get(place)
        if known is not None and known.kind == access.kind == "memory":
            access = CheckedAccess("memory", alignment=min(known.alignment, access.alignment))
        elif known is not None and known != access:
            raise self.differs(
                state.pc,
                "accesses different memory on different paths",
                "write the access once in each branch",
            )
        self.accesses[place] = access

    def _context(self, pc: int, where: Range, size: int, write: bool) -> CheckedAccess:
        if write:
            raise self.reject(pc, "writes to its context", "the context is read-only; copy the field first")
        at = where.constant
        if at is None:
            raise self.reject(pc, "reads its context at an offset that is not constant", "name the field")
        for name, (start, length) in CONTEXTS[self.function.point].items():
            if start <= signed64(at) and signed64(at) + size <= start + length:
                if (at - start) % size:
                    raise self.reject(pc, "reads its context unaligned", "read whole fields")
                return CheckedAccess("context", name, at - start)
        raise self.reject(
            pc,
            f"reads byte {signed64(at)} of its context, beyond struct gpu_{self.function.point}",
            "use its fields, and the context type of where the program is attached",
        )

    def stack_bounds(self, pc: int, where: Range, size: int, aligned: bool = False) -> int:
        at = signed64(where.lo)
        if aligned and at % size:
            raise self.reject(
                pc, f"reaches stack offset {at}, size {size}, unaligned", "do not pack the structure"
            )
        if not -STACK_SIZE <= at <= at + size <= 0:
            raise self.reject(
                pc,
                f"reaches stack offset {at}, size {size}, outside of the stack",
                "stay within the variable",
            )
        return at

    def _value(self, pc: int, base: Value, where: Range, size: int, write: bool) -> CheckedAccess:
        if base.kind == "record":
            limit, what, alignment, name = int(base.object or 0), "the reserved record", 8, ""
        else:
            definition = self.program.maps[str(base.object)]
            limit, what, name = definition.value_size, f"a value of map {definition.name}", definition.name
            alignment = value_alignment(definition)
        if where.slo < 0 or where.shi + size > limit:
            bounds = str(where.slo) if where.slo == where.shi else f"{where.slo} to {where.shi}"
            raise self.reject(
                pc,
                f"reaches offset {bounds}, size {size}, of {what}, which has {limit} bytes",
                "test the index against its limits first",
            )
        if alignment % size or not where.multiple_of(size):
            raise self.reject(
                pc, f"an access of {size} bytes that is not aligned", "do not pack the structure"
            )
        if name and definition.constant and write:
            raise self.reject(pc, f"writes to a constant in {name}", "declare the variable without const")
        if name and definition.kind == "param":
            if write:
                raise self.reject(pc, f"writes to parameter {name}", "parameters are read-only; use an array")
            at = where.constant
            if at is None:
                raise self.reject(
                    pc, f"reads parameter {name} at an offset that is not constant", "unroll the loop"
                )
            return CheckedAccess("param", name, at)
        possible = where.bits | where.unknown
        known = possible & -possible if possible else alignment
        return CheckedAccess("memory", alignment=min(alignment, known))

    def load(self, state: State, i: Instruction) -> None:
        size = b.WIDTH[i.opcode & 0x18]
        base = self.read(state, i.src)
        where = self._reach(state, base, i.offset, size, False)
        known = self._constant(base, where, size)
        place = (state.chain, state.pc)
        self.constants[place] = known if self.constants.setdefault(place, known) == known else None
        if known is not None:
            value = Value("number", constant(known))
        elif base.kind == "stack":
            value = self.stack_load(state, int(base.object or 0), signed64(where.lo), size)
        elif base.kind == "context" or size == 8:
            value = NUMBER if size == 8 else Value("number", within(0, (1 << 8 * size) - 1))
        else:
            value = Value("number", within(0, (1 << 8 * size) - 1))
        if i.opcode & 0xE0 == b.MEMSX:
            self.number(state, value, "truncates an address")
            value = Value("number", ranges.extend(value.range, 8 * size))
        state.registers[i.dst] = value

    def _constant(self, base: Value, where: Range, size: int) -> int | None:
        """Return the number of `size` bytes at an offset in a constant map; None if the number is unknown."""
        data = self.constant_bytes(base, size, where)
        return int.from_bytes(data, "little") if data is not None else None

    def constant_bytes(self, base: Value, size: int, where: Range | None = None) -> bytes | None:
        """Return the `size` bytes in a constant map, which must have a single value, that an address points to; None if unknown."""
        at = (base.range if where is None else where).constant
        if base.kind != "value" or at is None:
            return None
        definition = self.program.maps[str(base.object)]
        inside = definition.constant and definition.max_entries == 1
        return (
            definition.contents[at : at + size] if inside and at + size <= len(definition.contents) else None
        )

    def stack_load(self, state: State, frame: int, at: int, size: int) -> Value:
        stack = state.stacks[frame]
        state.reads(frame_bytes(frame, at, size))
        parts = []
        for k in range(size):
            part = stack.get(at + k)
            if part is None:
                raise self.reject(
                    state.pc,
                    f"reads byte {at + k} of the stack, which was never written",
                    "give the whole variable a value first",
                )
            parts.append(part)
        first = parts[0][0]
        if all(value is first and n == size and k == number for number, (value, k, n) in enumerate(parts)):
            return first
        if any(value.kind != "number" for value, _, _ in parts):
            raise self.reject(state.pc, "reads a part of an address", "keep addresses in pointers")
        total = 0
        for number, (value, k, _) in enumerate(parts):
            byte = value.range.constant
            if byte is None:
                return Value("number", within(0, (1 << 8 * size) - 1))
            total |= (byte >> 8 * k & 0xFF) << 8 * number
        return Value("number", constant(total))

    def stack_store(self, state: State, frame: int, at: int, size: int, value: Value) -> None:
        if value.kind == "number" and size < 8:
            value = Value("number", truncate(value.range, 8 * size))
        stack = state.stacks[frame]
        self.stack_low = min(self.stack_low, at)
        state.written |= frame_bytes(frame, at, size)
        for k in range(size):
            stack[at + k] = (value, k, size)

    def store(self, state: State, i: Instruction) -> None:
        size = b.WIDTH[i.opcode & 0x18]
        base = self.read(state, i.dst)
        value = self.read(state, i.src) if i.cls == b.STX else Value("number", constant(i.imm))
        where = self._reach(state, base, i.offset, size, True)
        if base.kind == "stack":
            if value.kind != "number" and size != 8:
                raise self.reject(state.pc, "stores a part of an address", "keep addresses in pointers")
            self.stack_store(state, int(base.object or 0), signed64(where.lo), size, value)
        elif value.kind != "number":
            raise self.reject(
                state.pc, "stores an address in a map, where it means nothing to others", "store a number"
            )

    def atomic(self, state: State, i: Instruction) -> None:
        size = b.WIDTH[i.opcode & 0x18]
        base = self.read(state, i.dst)
        operand = self.read(state, i.src)
        self.number(state, operand, "an atomic operation on an address")
        if i.imm == b.ATOMIC_CMPXCHG:
            self.number(state, self.read(state, 0), "compares an address atomically")
        where = self._reach(state, base, i.offset, size, True)
        old = NUMBER if size == 8 else Value("number", within(0, ranges.U32))
        if base.kind == "stack":
            at = signed64(where.lo)
            self.number(
                state,
                self.stack_load(state, int(base.object or 0), at, size),
                "an atomic operation on an address",
            )
            self.stack_store(state, int(base.object or 0), at, size, NUMBER)
        if i.imm == b.ATOMIC_CMPXCHG:
            state.registers[0] = old
        elif i.imm & b.FETCH:
            state.registers[i.src] = old
