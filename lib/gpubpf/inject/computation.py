"""Determine which registers a PTX instruction reads and writes, and whether it computes floating-point numbers.

    computation(instruction)   # fma.rn.f32 %f1, %f2, %f3, %f1 → Computation("f32", "f32", (Name("%f1"),), …, "fma")
    unseen_float(instruction)  # wgmma.mma_async… → "wgmma.mma_async"

Excluded are instructions that access memory (`operands` finds their values) and instructions without a result, such as branches and
barriers (PTX ISA 9.0, chapter 9.7). Accesses to textures and surfaces are included: only their coordinates, which are in registers,
show what they access.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gpubpf.ebpf.bytecode import FLOAT_OPERATIONS, TYPES
from gpubpf.ptx.access import TYPE
from gpubpf.ptx.module import Address, Group, Immediate, Name, Not, Operand, Pair, PtxInstruction, Vector
from gpubpf.ptx.opcodes import facts

Element = Name | Immediate | Not  # a register, another name, a number, or a negated predicate


@dataclass(frozen=True, slots=True)
class Computation:
    """What an instruction reads and writes. Registers count as a whole, even if the instruction uses only some of their bits.

    type          of the result or of each of its elements, one of bytecode.TYPES; f16 for f16x2, f32 for f32x2
    operand_type  of the first source operand, likewise
    written       the registers with the result, in order; `_` receives nothing
    read          the operands, each as one or more registers and numbers
    operation     one of bytecode.FLOAT_OPERATIONS; "" if the result is not a floating-point number, or is only moved
    """

    type: str
    operand_type: str
    written: tuple[Element, ...]
    read: tuple[tuple[Element, ...], ...]
    operation: str

    @property
    def most_parts(self) -> int:
        """An upper bound on the number of 16-byte parts in the result."""
        return max(1, (len(self.written) + 1) // 2)


# Matches the modifiers that are types.
_TYPE = re.compile(rf"{TYPE.pattern}|f32x2|tf32|[su]16x2|u?e\dm\d(?:x\d)?|pred")
_NAMED = {"tf32": "f32"}  # types that are reported under another name
_FLOATS = ("f16", "bf16", "f32", "f64")
# How many coordinates accesses to textures and surfaces have. Vectors with more elements are filled up (PTX ISA 9.7.10).
_COORDINATES = {"1d": 1, "2d": 2, "3d": 3, "a1d": 2, "a2d": 3, "cube": 3, "acube": 4, "2dms": 3, "a2dms": 4}
_OPERATIONS = {name: name for name in FLOAT_OPERATIONS} | {"mad": "fma", "wmma": "mma"}


def computation(instruction: PtxInstruction) -> Computation | None:
    """Return what an instruction reads and writes; None if it accesses memory or has no result.

    For an access to a texture or surface, each coordinate is an operand.
    """
    opcode, modifiers, operands = instruction.opcode, instruction.modifiers, instruction.operands
    known = facts(instruction)
    if known.is_of_image:
        return _of_image(instruction)
    if opcode in ("mov", "cvta"):
        operands = tuple(map(_without_array, operands))
    without_result = known.result in ("nothing", "any")
    if without_result or not operands or any(isinstance(o, Address | Group) for o in operands):
        return None
    first = _used(operands[0])
    types = [m for m in modifiers if _TYPE.fullmatch(m)] or ["b32"]
    kind = _element(types[0])
    if known.result in ("pred", "u32"):
        kind = known.result
    elif "wide" in modifiers and kind in ("s16", "u16", "s32", "u32"):
        kind = f"{kind[0]}{2 * int(kind[1:])}"
    return Computation(
        kind,
        _element(types[1] if len(types) > 1 and opcode != "slct" else types[0]),
        _elements(first),
        tuple(_elements(o) for o in operands[1:]),
        _OPERATIONS.get(opcode, "") if kind in _FLOATS else "",
    )


def _without_array(operand: Operand) -> Operand:
    """Return the register that chooses an element of an array, instead of the element; any other operand as it is."""
    return Name(operand.index) if isinstance(operand, Address) and operand.index is not None else operand


def _of_image(instruction: PtxInstruction) -> Computation | None:
    """Return what an access to a texture or surface reads and writes; None for an unknown form."""
    modifiers, operands = instruction.modifiers, instruction.operands
    types = [_element(m) for m in modifiers if _TYPE.fullmatch(m)]
    at = next((n for n, operand in enumerate(operands) if isinstance(operand, Address)), 2)
    count = next((_COORDINATES[m] for m in modifiers if m in _COORDINATES), 0)
    if at > 1 or not types or not count:
        return None
    address = operands[at]
    assert isinstance(address, Address)
    coordinates = _elements(address.coordinates[-1])[:count] if address.coordinates else ()
    return Computation(
        types[0],
        types[1] if len(types) > 1 else "s32",  # those of surfaces are integers
        _elements(_used(operands[0])) if at else (),
        (*((coordinate,) for coordinate in coordinates), *(_elements(o) for o in operands[at + 1 :])),
        "",
    )


def _used(result: Operand) -> Operand:
    """Return the first used result of a pair (`%p1|%p2`); any other operand as it is."""
    if isinstance(result, Pair):
        return result.second if result.first == Name("_") else result.first
    return result


def unseen_float(instruction: PtxInstruction) -> str | None:
    """Return the name of an instruction whose floating-point result programs cannot see; None for other instructions.

    Programs cannot see a result that arrives later, is only in memory (an atomic addition), or has 8 bits or fewer, for which
    `bytecode.TYPES` has no type.
    """
    known, modifiers = facts(instruction), instruction.modifiers
    if known.is_late:
        return known.name
    types = [m for m in modifiers if _TYPE.fullmatch(m)]
    if (
        instruction.opcode in ("atom", "red")
        and "add" in modifiers
        and types
        and _element(types[-1]) in _FLOATS
    ):
        return f"{instruction.opcode}.add.{types[-1]}"
    if instruction.opcode == "cvt" and types and "m" in types[0]:
        return f"cvt.{types[0]}"
    return None


def is_chosen(patterns: Collection[str], opcode: str) -> bool:
    """Return whether a glob matches an opcode with modifiers, or its beginning up to a dot: `fma`, `fma.rn`.

    Without patterns, every opcode matches.
    """
    return not patterns or any(fnmatchcase(opcode, p) or fnmatchcase(opcode, f"{p}.*") for p in patterns)


def _element(type_name: str) -> str:
    """Return the type of an element: f16 for f16x2, b8 for floating-point types of 8 bits or fewer, b32 for unknown types."""
    element = type_name.partition("x")[0]
    element = _NAMED.get(element, element)
    return element if element in TYPES else "b8" if "m" in element else "b32"


def _elements(operand: Operand) -> tuple[Element, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    whole = (Name(item.whole, item.offset) if isinstance(item, Name) else item for item in items)
    return tuple(item for item in whole if isinstance(item, Name | Immediate | Not))
