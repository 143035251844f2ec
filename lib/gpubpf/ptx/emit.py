"""Build the statements that injection adds: text, marks for the virtual clock, hidden parameters, accumulators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .module import AT_LINE, Directive, PtxInstruction, Statement, Variable

WAITING = "gpubpf_waiting"  # prefix of the names of functions where a thread may wait for another one
RETURNED = "gpubpf_returned"  # the return parameter of a function whose original has none


def text(of: str) -> Directive:
    """Return an added statement with the given text."""
    return Directive("", of)


def counts(instructions: int) -> list[Statement]:
    """Return a mark that stands for this many instructions of the original; [] for 0."""
    return [Directive("gpubpf", f"//gpubpf+{instructions}")] if instructions else []


def marked(statements: Iterable[Statement]) -> Iterator[Statement]:
    """Put marks around added statements. Labels, scopes and declarations take no time, so they may stand on either side of a mark."""
    ours = False
    for statement in statements:
        mine = isinstance(statement, Directive) and not statement.name
        if mine != ours and isinstance(statement, Directive | PtxInstruction):
            yield Directive("gpubpf", "//gpubpf{" if mine else "//gpubpf}")
            ours = mine
        yield statement
    if ours:
        yield Directive("gpubpf", "//gpubpf}")


def at_lines(statements: Iterable[Statement]) -> Iterator[Statement]:
    """Put a mark with the original's line before each instruction of the original, unless its line follows the line before.

    With these marks, faults and errors name lines of the original.
    """
    line = 0
    for statement in statements:
        own = isinstance(statement, PtxInstruction) or (
            isinstance(statement, Directive) and statement.name in ("loc", "pragma")
        )
        if own and statement.line and statement.line != line:
            yield Directive("gpubpf", f"{AT_LINE}{statement.line}")
            line = statement.line
        yield statement
        line += 1 + (statement.text.count("\n") if isinstance(statement, Directive) else 0)


def array(name: str, size: int, align: int = 8) -> Variable:
    """Return a parameter of `size` bytes."""
    return Variable("param", "b8", name, align=align, dimensions=(size,))


def widened(result: Variable | None, offset: int, kinds: int) -> Variable:
    """Return the return parameter, extended by `kinds` 64-bit counts at `offset`."""
    if result is None:
        return array(RETURNED, 8 * kinds)
    return array(result.name, offset + 8 * kinds, max(8, result.alignment))


def accumulator(kind: str) -> str:
    """Return the register that counts a kind of work."""
    return f"%gpubpf_0{kind}"


def add(kind: str, amount: int) -> str:
    """Return the instruction that adds to the count of a kind of work."""
    return f"add.s64 {accumulator(kind)}, {accumulator(kind)}, {amount};"


def guard(instruction: PtxInstruction) -> str:
    """Return the instruction's predicate as a prefix for another instruction: `@!%p1 `; "" without a predicate."""
    if instruction.predicate is None:
        return ""
    return f"@{'!' if instruction.negated else ''}{instruction.predicate} "


def around(instruction: PtxInstruction, label: str) -> str:
    """Return a branch to `label` for the lanes that do not execute the instruction."""
    return f"@{'' if instruction.negated else '!'}{instruction.predicate} bra {label};"
