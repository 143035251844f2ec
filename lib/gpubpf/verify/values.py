"""What the second gate knows while it follows a program, and what it has learnt at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import STACK_SIZE, BpfFunction, Program
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.verify.ranges import ANY, Range

# The calls (instruction numbers) that lead into a subprogram; () is the program itself.
Chain = tuple[int, ...]
CodePlace = tuple[Chain, int]


class Value(NamedTuple):
    """What a register or stack slot holds: a number, or an address.

    kind `number`: `range` is its value. All other kinds are addresses, and `range` is the offset in bytes from the beginning of
    `context`; `stack` (`object`: number of the frame); `map` (the map itself, `object`: its name); `value` (of the map `object`);
    `record` (`object`: its size in bytes). Copies of a value have the same `id`. `nullable`: it may be NULL, until a jump has tested
    that.
    """

    kind: str
    range: Range
    object: str | int | None = None
    id: int = 0
    nullable: bool = False


@dataclass(frozen=True)
class CheckedAccess:
    """The memory that an instruction accesses, on every path.

    kind `stack`, `memory` (global memory; `alignment` of the access), `context` (`name` of the field, `offset` in it), `param`
    (`name` of the map).
    """

    kind: str
    name: str = ""
    offset: int = 0
    alignment: int = 0


@dataclass(frozen=True)
class CheckedCall:
    """A call of a helper, on every path: the map that it works on, where its address arguments point to (`stack` or `memory`, by
    register), the constant size in bytes, the flags of an update, the constant text, and in an array of printed values the offsets of
    those that are numbers."""

    helper: int
    map: str = ""
    pointers: Mapping[int, str] = field(default_factory=dict)
    size: int = 0
    flags: int = 0
    text: str = ""
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Checked:
    """A program that passed the second gate, with what was learnt: accesses and calls by place, all places that can be reached, and
    the ways that each conditional jump can go. `constants`: what loads from constant maps give, by place."""

    function: BpfFunction
    accesses: Mapping[CodePlace, CheckedAccess]
    calls: Mapping[CodePlace, CheckedCall]
    reached: frozenset[CodePlace]
    edges: frozenset[tuple[CodePlace, bool]]
    # Where loops begin a turn whose number is only known when the program runs, and what may be any number there: registers, and the
    # offsets of 8 bytes on the stack.
    loops: Mapping[CodePlace, frozenset[int]]
    steps: int
    stack_low: int  # lowest stack offset that is written
    constants: Mapping[CodePlace, int] = field(default_factory=dict)


NUMBER = Value("number", ANY)


Byte = tuple[Value, int, int]  # byte k of a value that was stored as n bytes


class Checkpoint:
    """A state at a jump target, and the number of paths from it that are not followed to their end yet (`open`).

    `read`: the bytes of the stacks whose value, here, some path from here has read. Complete once no path is open. `written`: the
    bytes that were written between the parent and this checkpoint. Both are masks (`frame_bytes`). `widened`: the state is that of
    any turn of a loop.
    """

    __slots__ = ("open", "parent", "read", "state", "widened", "written")

    def __init__(self, state: State, parent: Checkpoint | None, widened: bool = False) -> None:
        self.state, self.parent, self.open, self.widened = state, parent, 1, widened
        self.read, self.written = 0, state.written


class State:
    """Everything that is known at one place on one path."""

    __slots__ = ("chain", "effect", "held", "mark", "pc", "registers", "returns", "stacks", "written")

    def __init__(self) -> None:
        self.pc = 0
        self.registers: list[Value | None] = [None] * 11
        self.stacks: list[dict[int, Byte]] = [{}]
        self.chain: Chain = ()
        self.returns: list[tuple[Value | None, ...]] = []  # the callers' r6 to r9
        self.held: dict[int, tuple[str, int]] = {}  # records reserved: map and instruction, by id
        self.effect: int | None = (
            None  # the instruction that wrote to memory first, where a program may begin again
        )
        self.mark: Checkpoint | None = None
        self.written = 0  # the bytes of the stacks that were written since `mark`

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
        """Tell all checkpoints on the way here, back to where these bytes of the stacks were written, that their value is read."""
        bytes_ &= ~self.written
        mark = self.mark
        while mark is not None:
            bytes_ &= ~mark.read  # those were told to the parents too
            if not bytes_:
                return
            mark.read |= bytes_
            bytes_ &= ~mark.written
            mark = mark.parent


def frame_bytes(frame: int, at: int, size: int) -> int:
    """Return a mask of bytes in the stack of a frame."""
    return ((1 << size) - 1) << (frame * STACK_SIZE + STACK_SIZE + at)


def place_of(program: Program, function: BpfFunction, pc: int) -> str:
    """Return where an error is, for its message: program, instruction, C line."""
    line = function.instructions[pc].line if 0 <= pc < len(function.instructions) else 0
    text = program.quote(line)
    where = f"C line {line}" + (f" `{text}`" if text else "") if line else "C line not known"
    return f"{title(function)}, instruction {pc}, {where}"


def title(function: BpfFunction) -> str:
    """Return how messages name a program: `device program NAME` or `host program NAME`."""
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
    """Return whether everything that `new` can be, `old` can be too.

    `ids` says which value of the new state each id of the old one stands for: copies in the old state must be copies in the new one.
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
    if not new.id:  # equal to another only if both are the same constant
        number = new.range.constant
        same = object() if number is None else ("constant", number)
    return ids.setdefault(old.id, same) == same
