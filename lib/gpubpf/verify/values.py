"""Values of the second gate: what it knows while it follows a program, and its result (`Checked`)."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import NamedTuple

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import STACK_SIZE, BpfFunction, Program
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.record import Record, field
from gpubpf.verify.ranges import ANY, Range

# The call instructions (by number) that lead into a subprogram; () is the program itself.
Chain = tuple[int, ...]
CodePlace = tuple[Chain, int]


class Value(NamedTuple):
    """What a register or stack slot holds: a number, or an address.

    kind      "number", or for an address the object that it points to: "context", "stack", "map" (the map itself), "value" (a value of
              a map) or "record"
    range     the number; or the address's offset from the beginning of the object, in bytes
    object    for "stack", the number of the frame; for "map" and "value", the map's name; for "record", its size in bytes
    id        copies of a value have the same id
    nullable  whether the address may be NULL; a test against NULL clears this
    """

    kind: str
    range: Range
    object: str | int | None = None
    id: int = 0
    nullable: bool = False


class CheckedAccess(Record):
    """The memory that an instruction accesses, the same on every path.

    kind       "stack", "memory" (global memory), "context" or "param"
    name       for "context", the field; for "param", the map
    offset     for "context", the offset in the field, in bytes
    alignment  for "memory", the alignment of the access, in bytes
    """

    kind: str
    name: str = ""
    offset: int = 0
    alignment: int = 0


class CheckedCall(Record):
    """A helper call, the same on every path.

    map       the map that it works on
    pointers  where its address arguments point to, by register: `stack`, `memory`, or `text` for a constant %s string
    size      the constant size in bytes
    flags     the flags of an update
    text      the constant text
    numbers   the offsets of the numbers in an array of printed values
    """

    helper: int
    map: str = ""
    pointers: Mapping[int, str] = field(default_factory=dict)
    size: int = 0
    flags: int = 0
    text: str = ""
    numbers: tuple[int, ...] = ()


class Checked(Record):
    """A program that passed the second gate, and what the gate learnt.

    accesses   the memory accesses, by place
    calls      the helper calls, by place
    reached    all reachable places
    edges      the ways that conditional jumps can go: (place, whether the jump is taken)
    constants  the results of loads from constant maps, by place
    """

    function: BpfFunction
    accesses: Mapping[CodePlace, CheckedAccess]
    calls: Mapping[CodePlace, CheckedCall]
    reached: frozenset[CodePlace]
    edges: frozenset[tuple[CodePlace, bool]]
    # Loops with an unknown number of iterations: the place where an iteration begins → the registers (>= 0) and the offsets of 8 stack
    # bytes (< 0) that may hold any number there.
    loops: Mapping[CodePlace, frozenset[int]]
    steps: int
    stack_low: int  # lowest stack offset that is written
    constants: Mapping[CodePlace, int] = field(default_factory=dict)


NUMBER = Value("number", ANY)


Byte = tuple[Value, int, int]  # byte k of a value that was stored as n bytes


class Checkpoint:
    """A state at a jump target.

    open     the number of paths from here that were not yet followed to their end
    read     the stack bytes whose value at this place was read on some path from here, as a mask (`frame_bytes`); complete once no
             path is open
    written  the stack bytes that were written between the parent and this checkpoint, as a mask
    widened  whether the state stands for all iterations of a loop
    """

    __slots__ = ("open", "parent", "read", "state", "widened", "written")

    def __init__(self, state: State, parent: Checkpoint | None, widened: bool = False) -> None:
        self.state, self.parent, self.open, self.widened = state, parent, 1, widened
        self.read, self.written = 0, state.written


class State:
    """The state of the abstract machine at one place on one path."""

    __slots__ = ("chain", "effect", "held", "mark", "pc", "registers", "returns", "stacks", "written")

    def __init__(self) -> None:
        self.pc = 0
        self.registers: list[Value | None] = [None] * 11
        self.stacks: list[dict[int, Byte]] = [{}]
        self.chain: Chain = ()
        self.returns: list[tuple[Value | None, ...]] = []  # the callers' r6 to r9
        self.held: dict[int, tuple[str, int]] = {}  # reserved records: map and instruction, by id
        self.effect: int | None = (
            None  # the first instruction that changed memory, if the program may begin again
        )
        self.mark: Checkpoint | None = None
        self.written = 0  # the stack bytes that were written since `mark`

    def copy(self) -> State:
        other = State.__new__(State)
        other.pc, other.chain, other.mark, other.written = self.pc, self.chain, self.mark, self.written
        other.registers = list(self.registers)
        other.stacks = [dict(stack) for stack in self.stacks]
        other.returns = list(self.returns)
        other.held = dict(self.held)
        other.effect = self.effect
        return other

    def reads(self, bytes_: int) -> None:
        """Record that stack bytes are read, in all checkpoints on this path back to where the bytes were written."""
        bytes_ &= ~self.written
        mark = self.mark
        while mark is not None:
            bytes_ &= ~mark.read  # these bytes are already recorded, also in the parents
            if not bytes_:
                return
            mark.read |= bytes_
            bytes_ &= ~mark.written
            mark = mark.parent


def frame_bytes(frame: int, at: int, size: int) -> int:
    """Return the mask of bytes in the stack of a frame."""
    return ((1 << size) - 1) << (frame * STACK_SIZE + STACK_SIZE + at)


def place_of(program: Program, function: BpfFunction, pc: int) -> str:
    """Return the place of an error for its message: program, instruction, C line."""
    line = function.instructions[pc].line if 0 <= pc < len(function.instructions) else 0
    text = program.quote(line)
    where = f"C line {line}" + (f" `{text}`" if text else "") if line else "C line not known"
    return f"{title(function)}, instruction {pc}, {where}"


def title(function: BpfFunction) -> str:
    """Return the name of a program in messages: `device program NAME` or `host program NAME`."""
    return f"{'device' if function.point in b.DEVICE_POINTS else 'host'} program {function.name}"


def signed64(value: int) -> int:
    return b.signed(value, 64)


def value_alignment(definition: MapDefinition) -> int:
    """Return the alignment in bytes of every value of the map, at most 16."""
    if definition.kind == "param":
        return 8
    if definition.kind == "hash":
        return 8
    return gcd(16, definition.stride)


def value_covers(old: Value | None, new: Value | None, ids: dict[int, object]) -> bool:
    """Return whether each value that `new` may have is one that `old` may have.

    ids: id in the old state → the value in the new state that it stands for. Copies in the old state must be copies in the new state.
    """
    if old is None:
        return True
    if old is not new:
        if new is None or old.kind != new.kind or old.object != new.object or old.nullable != new.nullable:
            return False
        if not old.range.includes(new.range):
            return False
    if not old.id:
        return True
    same: object = new.id
    if not new.id:  # without an id, two values are copies only if they are the same constant
        number = new.range.constant
        same = object() if number is None else ("constant", number)
    return ids.setdefault(old.id, same) == same
