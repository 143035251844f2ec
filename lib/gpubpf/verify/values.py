"""What the second gate knows while it follows a program, and what it has learnt at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import BpfFunction, Program
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.verify.ranges import ANY, Range

Chain = tuple[
    int, ...
]  # the calls (instruction numbers) that lead into a subprogram; () is the program itself
CodePlace = tuple[Chain, int]


class Value(NamedTuple):
    """What a register or stack slot holds.

    kind `number`: `range` is its value. Otherwise an address and `range` the offset from what `object` names:
    `context`; `stack` (object: frame number); `map` (itself, object: name); `value` (of the map `object`);
    `record` (object: its bytes). `id` ties copies together; `nullable`: may be 0 until a test has told.
    """

    kind: str
    range: Range
    object: str | int | None = None
    id: int = 0
    nullable: bool = False


@dataclass(frozen=True)
class CheckedAccess:
    """The memory that an instruction reaches, on every path.

    kind `stack`, `memory` (global; `alignment` of the access), `context` (`name` its field, `offset` in it), `param` (`name` its map).
    """

    kind: str
    name: str = ""
    offset: int = 0
    alignment: int = 0


@dataclass(frozen=True)
class CheckedCall:
    """A call of a helper: the map it works on, what its address arguments point into (`stack` or `memory`, by register),
    the constant size in bytes, the flags of an update, and the constant text."""

    helper: int
    map: str = ""
    pointers: Mapping[int, str] = field(default_factory=dict)
    size: int = 0
    flags: int = 0
    text: str = ""


@dataclass(frozen=True)
class Checked:
    """A device program that passed, with what was learnt: by place, memory reached and calls made; the places that are
    reached at all; and for each conditional jump that is, where it may go."""

    function: BpfFunction
    accesses: Mapping[CodePlace, CheckedAccess]
    calls: Mapping[CodePlace, CheckedCall]
    reached: frozenset[CodePlace]
    edges: frozenset[tuple[CodePlace, bool]]
    steps: int
    stack_low: int  # lowest stack offset that is written


NUMBER = Value("number", ANY)


Byte = tuple[Value, int, int]  # byte k of a value that was stored as n bytes


class Checkpoint:
    """A state at a jump target, and how many paths from it are not followed to their ends yet."""

    __slots__ = ("open", "parent", "state")

    def __init__(self, state: State, parent: Checkpoint | None) -> None:
        self.state, self.parent, self.open = state, parent, 1


class State:
    """All that is known at a place on one path."""

    __slots__ = ("chain", "held", "mark", "pc", "registers", "returns", "stacks")

    def __init__(self) -> None:
        self.pc = 0
        self.registers: list[Value | None] = [None] * 11
        self.stacks: list[dict[int, Byte]] = [{}]
        self.chain: Chain = ()
        self.returns: list[tuple[Value | None, ...]] = []  # the callers' r6 to r9
        self.held: dict[int, tuple[str, int]] = {}  # records reserved: map and instruction, by id
        self.mark: Checkpoint | None = None

    def copy(self) -> State:
        other = State.__new__(State)
        other.pc, other.chain, other.mark = self.pc, self.chain, self.mark
        other.registers = list(self.registers)
        other.stacks = [dict(stack) for stack in self.stacks]
        other.returns = list(self.returns)
        other.held = dict(self.held)
        return other


def place_of(program: Program, function: BpfFunction, pc: int) -> str:
    """Where an error is, for its message."""
    line = function.instructions[pc].line if 0 <= pc < len(function.instructions) else 0
    text = program.quote(line)
    where = f"C line {line}" + (f" `{text}`" if text else "") if line else "C line not known"
    return f"{title(function)}, instruction {pc}, {where}"


def title(function: BpfFunction) -> str:
    """What a message calls a program."""
    return f"{'device' if function.point in b.DEVICE_POINTS else 'host'} program {function.name}"


def signed64(value: int) -> int:
    return b.signed(value, 64)


def value_alignment(definition: MapDefinition) -> int:
    """The power of two that every value of the map is aligned to in storage (at most 16)."""
    if definition.kind == "param":
        return 8
    if definition.kind == "hash":
        return 8
    return gcd(16, definition.stride)


def value_covers(old: Value | None, new: Value | None, ids: dict[int, int]) -> bool:
    if old is None:
        return True
    if new is None or old.kind != new.kind or old.object != new.object or old.nullable != new.nullable:
        return False
    if old.kind == "number":
        if old.id and ids.setdefault(old.id, new.id) != new.id:
            return False
    elif (old.nullable or old.kind == "record") and ids.setdefault(old.id, new.id) != new.id:
        return False
    return old.range.includes(new.range)
