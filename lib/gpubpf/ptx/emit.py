"""Statements of ours: text, marks for the virtual clock, hidden parameters, accumulators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .module import Directive, Instruction, Statement, Variable

RETURNED = "gpubpf_returned"  # result of a function that had none


def text(of: str) -> Directive:
    """A statement of ours, given as text."""
    return Directive("", of)


def counts(instructions: int) -> list[Statement]:
    """Stands for that many instructions of the original."""
    return [Directive("gpubpf", f"//gpubpf+{instructions}")] if instructions else []


def marked(statements: Iterable[Statement]) -> Iterator[Statement]:
    """With the comments around what is ours. Labels, scopes and declarations cost nothing on either side."""
    ours = False
    for statement in statements:
        mine = isinstance(statement, Directive) and not statement.name
        if mine != ours and isinstance(statement, Directive | Instruction):
            yield Directive("gpubpf", "//gpubpf{" if mine else "//gpubpf}")
            ours = mine
        yield statement
    if ours:
        yield Directive("gpubpf", "//gpubpf}")


def array(name: str, size: int, align: int = 8) -> Variable:
    """A parameter of `size` bytes."""
    return Variable("param", "b8", name, align=align, dimensions=(size,))


def widened(result: Variable | None, offset: int, kinds: int) -> Variable:
    """The return parameter with `kinds` 64-bit counts behind it, at `offset`."""
    if result is None:
        return array(RETURNED, 8 * kinds)
    return array(result.name, offset + 8 * kinds, max(8, result.alignment))


def accumulator(kind: str) -> str:
    return f"%gpubpf_0{kind}"


def add(kind: str, amount: int) -> str:
    return f"add.s64 {accumulator(kind)}, {accumulator(kind)}, {amount};"


def guard(instruction: Instruction) -> str:
    """Its predicate as text, to stand in front of an instruction: `@!%p1 `."""
    if instruction.predicate is None:
        return ""
    return f"@{'!' if instruction.negated else ''}{instruction.predicate} "


def around(instruction: Instruction, label: str) -> str:
    """A branch to `label` for the lanes that do not run the instruction."""
    return f"@{'' if instruction.negated else '!'}{instruction.predicate} bra {label};"


def opcode_of(instruction: Instruction) -> str:
    """The opcode with its modifiers: `ld.global.f32`."""
    return ".".join((instruction.opcode, *instruction.modifiers))
