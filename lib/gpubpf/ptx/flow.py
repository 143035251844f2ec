"""Analyse control flow: labels, branches and basic blocks.

flow = Flow(function.body)
flow.blocks, flow.targets, flow.falls_off
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gpubpf.errors import PtxError

from .loop_ends import cycles
from .module import (
    Address,
    Directive,
    Generic,
    Group,
    Initializer,
    Label,
    Masked,
    Name,
    Not,
    Open,
    Operand,
    Pair,
    PtxInstruction,
    Statement,
    Variable,
    Vector,
    numbered,
)
from .module import Close as CloseScope
from .opcodes import LEAVING, facts

# Functions that the driver links (CUDA C++ Programming Guide: formatted output, allocation, assertion).
SYSTEM_FUNCTIONS = frozenset({"vprintf", "malloc", "free", "__assertfail", "__assert_fail"})
# Functions of the device runtime (libcudadevrt.a) with which kernels launch kernels (dynamic parallelism).
KERNEL_LAUNCHES = re.compile(r"(?:__cudaCDP2|cuda)(?:GetParameterBuffer|LaunchDevice)")
GRID_BUFFER = re.compile(r"(?:__cudaCDP2|cuda)GetParameterBuffer\w*")
GRID_LAUNCH = re.compile(r"(?:__cudaCDP2|cuda)LaunchDevice\w*")


@dataclass(frozen=True, slots=True)
class BasicBlock:
    """A basic block, or a part of one: a call that may not return splits a block into parts.

    instructions  the indices of its statements
    entered       False for a part that follows such a call
    successors    the numbers of the blocks that may follow
    """

    instructions: tuple[int, ...]
    entered: bool
    successors: tuple[int, ...] = ()  # numbers of blocks


class Flow:
    """The control flow of one function body.

    may_not_return: takes a function's name; returns whether a call of the function may leave the kernel. Such a call splits a block.

    Raises PtxError for a branch to a missing label.
    """

    def __init__(
        self, body: tuple[Statement, ...], may_not_return: Callable[[str], bool] = lambda name: False
    ) -> None:
        self.body = body
        self.scope: list[int] = []  # the scope of each statement
        self.parent: list[int] = [0]
        self._labels: dict[tuple[int, str], int] = {}
        self._declared: dict[tuple[int, str], int] = {}
        self._ranges: dict[tuple[int, str], int] = {}  # by scope, and by `%r` of `%r<9>`
        self._meant: dict[tuple[int, str], tuple[int, ...]] = {}
        self._read_scopes()
        self.targets = {i: tuple(self._targets(i, s)) for i, s in self.instructions()}
        self.leaders = frozenset(label for labels in self.targets.values() for label in labels)
        self.blocks, self.falls_off = self._split(may_not_return)

    def instructions(self) -> Iterator[tuple[int, PtxInstruction]]:
        """Yield each instruction with its statement index."""
        for index, statement in enumerate(self.body):
            if isinstance(statement, PtxInstruction):
                yield index, statement

    def instruction(self, index: int) -> PtxInstruction:
        """Return the statement `index`, which must be an instruction."""
        statement = self.body[index]
        assert isinstance(statement, PtxInstruction)
        return statement

    def _read_scopes(self) -> None:
        current = 0
        for index, statement in enumerate(self.body):
            if isinstance(statement, Open):
                self.parent.append(current)
                current = len(self.parent) - 1
            self.scope.append(current)
            if isinstance(statement, CloseScope):
                current = self.parent[current]
            elif isinstance(statement, Label):
                self._labels[current, statement.name] = index
            elif isinstance(statement, Variable):
                declared = self._declared if statement.count is None else self._ranges
                declared[current, statement.name] = index

    def _scopes(self, scope: int) -> Iterator[int]:
        """Yield a scope and those around it, from the inside out."""
        while scope:
            yield scope
            scope = self.parent[scope]
        yield 0

    def declaration(self, index: int, name: str) -> int | None:
        """Return the index of the declaration that `name` refers to at statement `index`; None if nothing before declares it.

        The declaration may be a range of registers: `%r<9>` declares `%r8`.
        """
        key = self.scope[index], name
        if key not in self._meant:
            self._meant[key] = tuple(self._declarations(*key))
        return next((at for at in self._meant[key] if at < index), None)

    def means_same(self, index: int, elsewhere: int) -> bool:
        """Return whether the names in the instruction at statement `index` refer to the same declarations at statement `elsewhere`."""
        names = find_names(self.instruction(index).operands)
        return all(self.declaration(index, name) == self.declaration(elsewhere, name) for name in names)

    def _declarations(self, scope: int, name: str) -> Iterator[int]:
        """Yield the declarations of a name in a scope and those around it, from the inside out."""
        prefix = numbered(name)[0]
        for at in self._scopes(scope):
            if (at, name) in self._declared:
                yield self._declared[at, name]
            found = self._ranges.get((at, prefix))
            statement = self.body[found] if found is not None else None
            if found is not None and isinstance(statement, Variable) and statement.declares(name):
                yield found

    def label(self, index: int, name: str) -> int:
        """Return the index of the label that `name` refers to at statement `index`. Raises PtxError."""
        for scope in self._scopes(self.scope[index]):
            if (scope, name) in self._labels:
                return self._labels[scope, name]
        raise PtxError(f"PTX line {getattr(self.body[index], 'line', 0)}: there is no label {name}")

    def table(self, index: int) -> int:
        """Return the index of the `.branchtargets` statement that the `brx` at statement `index` names. Raises PtxError."""
        branch = self.instruction(index)
        last = branch.operands[-1] if branch.operands else None
        if isinstance(last, Name):
            found = self.label(index, last.name)
            for after in range(found + 1, len(self.body)):
                statement = self.body[after]
                if isinstance(statement, Directive) and statement.name == "branchtargets":
                    return after
                if not isinstance(statement, Directive):
                    break
        raise PtxError(f"PTX line {branch.line}: brx requires the label of a .branchtargets statement")

    def _targets(self, index: int, instruction: PtxInstruction) -> Iterator[int]:
        if instruction.opcode == "bra":
            target = instruction.operands[0] if instruction.operands else None
            if not isinstance(target, Name):
                raise PtxError(f"PTX line {instruction.line}: bra requires a label")
            yield self.label(index, target.name)
        elif instruction.opcode == "brx":
            listed = self.table(index)
            directive = self.body[listed]
            assert isinstance(directive, Directive)
            for name in directive.names:
                yield self.label(listed, name)

    def _split(self, may_not_return: Callable[[str], bool]) -> tuple[tuple[BasicBlock, ...], bool]:
        parts: list[tuple[list[int], bool]] = []
        current: list[int] = []
        entered = True
        first_of: dict[int, int] = {}  # label statement → number of the block after it
        pending: list[int] = []

        def finish(next_entered: bool) -> None:
            nonlocal current, entered
            if current:
                parts.append((current, entered))
                current = []
                entered = next_entered
            else:
                entered = entered or next_entered

        for index, statement in enumerate(self.body):
            if isinstance(statement, Label) and index in self.leaders:
                finish(True)
                pending.append(index)
            elif isinstance(statement, PtxInstruction):
                for label in pending:
                    first_of[label] = len(parts)
                pending.clear()
                current.append(index)
                if facts(statement).ends:
                    finish(True)
                elif statement.opcode == "call" and may_not_return(callee(statement) or ""):
                    finish(False)
        open_end = bool(current) or bool(pending)
        finish(True)
        blocks = []
        falls_off = open_end or not parts
        for number, (indices, was_entered) in enumerate(parts):
            last = self.body[indices[-1]]
            assert isinstance(last, PtxInstruction)
            successors = [first_of[t] for t in self.targets[indices[-1]] if t in first_of]
            if not facts(last).ends or last.predicate is not None:
                if number + 1 < len(parts):
                    successors.append(number + 1)
                else:
                    falls_off = True
            blocks.append(BasicBlock(tuple(indices), was_entered, tuple(dict.fromkeys(successors))))
        return tuple(blocks), falls_off

    @functools.cached_property
    def reachable(self) -> frozenset[int]:
        """The numbers of the blocks that are reachable from the start."""
        seen: set[int] = set()
        todo = [0] if self.blocks else []
        while todo:
            number = todo.pop()
            if number not in seen:
                seen.add(number)
                todo.extend(self.blocks[number].successors)
        return frozenset(seen)

    @functools.cached_property
    def cycles(self) -> dict[int, int]:
        """A number for each block that is on a cycle. Blocks on a common cycle have the same number."""
        return cycles([block.successors for block in self.blocks])

    def tail(self, after: int, limit: int) -> tuple[int, ...] | None:
        """Return the indices of the instructions after a statement up to a `ret` or `exit`, if they are few and simple; else None.

        Unconditional branches are followed. At most `limit` other instructions are allowed. None may access memory, synchronize, call,
        be predicated, or be in another scope.
        """
        found: list[int] = []
        position = after + 1
        plain = 0
        while position < len(self.body) and len(found) < 4 * limit + 4:
            statement = self.body[position]
            if isinstance(statement, PtxInstruction):
                found.append(position)
                if statement.predicate is not None:
                    return None
                if statement.opcode in LEAVING:
                    return tuple(found)
                if statement.opcode == "bra":
                    position = self.targets[found[-1]][0]
                elif (
                    plain == limit
                    or not facts(statement).is_simple
                    or self.scope[position] != self.scope[after]
                    or not self.means_same(position, after)
                ):
                    return None
                else:
                    plain += 1
            elif not isinstance(statement, Label | Directive):
                return None
            position += 1
        return None


def callee(call: PtxInstruction) -> str | None:
    """Return the name of the called function, or of the register with its address; None if the call has no such operand."""
    for operand in call.operands:
        if isinstance(operand, Name):
            return operand.name
    return None


def find_names(operands: Iterable[Operand]) -> Iterator[str]:
    """Yield every name in the operands, including the bases of addresses."""
    for operand in operands:
        match operand:
            case Name():
                yield operand.whole
            case Not():
                yield operand.operand.name
            case Address():
                yield from (name for name in (operand.base, operand.index) if name is not None)
                yield from find_names(operand.coordinates)
            case Vector() | Group():
                yield from find_names(operand.items)
            case Pair():
                yield from find_names((operand.first, operand.second))


def find_initializer_names(value: Initializer | None) -> Iterator[str]:
    """Yield the variables and functions whose addresses an initializer contains."""
    match value:
        case tuple():
            for item in value:
                yield from find_initializer_names(item)
        case Name():
            yield value.name
        case Generic():
            yield value.operand.name
        case Masked():
            yield from find_initializer_names(value.operand)
        case _:
            pass
