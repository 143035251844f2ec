"""Find the types of numbers in registers that the PTX loads and stores as bits.

    number_types(function.body)["%rs2"]     # "bf16", from fma.rn.bf16 %rs2, %rs3, %rs1, c

nvcc loads and stores `half` and `__nv_bfloat16` as u16, pairs of them as u32, and Triton loads and stores every type as bits. The
instructions that write or read a register show its type. If they do not agree, the register is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpubpf.ptx.module import Immediate, Name, Operand, PtxInstruction, Statement, Variable, Vector, numbered
from gpubpf.ptx.opcodes import facts

from .computation import computation

_FLOATS = ("f16", "bf16", "f32")
INTEGER = "integer"
_COPIES = ("mov", "selp")  # their operands have the type of their result


def number_types(body: Iterable[Statement]) -> Mapping[str, str]:
    """Return the type of each register whose instructions agree on one: f16 or bf16 (also for a pair), f32, or INTEGER."""
    found = _Registers()
    widened: list[tuple[str, str]] = []  # a 32-bit register, and the register that became its upper half
    for statement in body:
        if isinstance(statement, Variable) and statement.type in _FLOATS:
            found.declared[statement.name] = statement.type
        elif not isinstance(statement, PtxInstruction) or facts(statement).mixed:
            continue
        elif statement.opcode in _COPIES:
            if (pair := _widens(statement)) is not None:
                widened.append(pair)
            else:
                found.alike([name for operand in statement.operands[:3] for name in _names(operand)])
        elif (known := computation(statement)) is not None:
            for element in known.written:
                found.note(element, known.type)
            for element in (element for operand in known.read for element in operand):
                found.note(element, known.operand_type)
    for whole, half in widened:  # the upper half of an f32 is a bf16
        if found.type(whole) == "f32":
            found.note(Name(half), "bf16")
    return {name: type_ for name in found.names() if (type_ := found.type(name)) in (*_FLOATS, INTEGER)}


class _Registers:
    """Sets of registers that are copies of each other, and the types that instructions give each set (union–find)."""

    def __init__(self) -> None:
        self.declared: dict[str, str] = {}  # type by name, or by what precedes the number (`%f` of `%f<9>`)
        self._next: dict[str, str] = {}  # the next register towards the one that represents the set
        self._types: dict[str, set[str]] = {}

    def names(self) -> list[str]:
        return list(self._next)

    def alike(self, names: list[str]) -> None:
        """Record that these registers hold copies of the same value."""
        for other in names[1:]:
            one, two = self._set(names[0]), self._set(other)
            if one != two:
                self._next[two] = one
                self._types[one] |= self._types.pop(two)

    def note(self, element: object, type_: str) -> None:
        """Record that an instruction reads or writes an element with this type. A type that is only bits is ignored."""
        if isinstance(element, Name) and (type_ == "bf16" or not type_.startswith("b")):
            self._types[self._set(element.name)].add(INTEGER if type_[0] in "us" else type_)

    def type(self, name: str) -> str | None:
        """Return the type of a register; None if instructions give it no type, or several."""
        types = self._types[self._set(name)]
        return next(iter(types)) if len(types) == 1 else None

    def _set(self, name: str) -> str:
        if name not in self._next:
            self._next[name] = name
            declared = self.declared.get(name) or self.declared.get(numbered(name)[0])
            self._types[name] = {declared} if declared else set()
        while (other := self._next[name]) != name:
            self._next[name] = self._next[other]
            name = other
        return name


def _names(operand: Operand) -> list[str]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    return [item.name for item in items if isinstance(item, Name)]


def _widens(instruction: PtxInstruction) -> tuple[str, str] | None:
    """Return D and A of `mov.b32 D, {0, A}`; None for other instructions."""
    match instruction.operands:
        case (Name(name=whole), Vector(items=(Immediate(text="0"), Name(name=half)))):
            return whole, half
    return None
