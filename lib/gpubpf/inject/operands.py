"""Determine the value that a PTX instruction loads, stores or combines with memory.

    operands(instruction)      # st.global.v2.f32 [%rd1], {%f1, %f2} → Operands("f32", 4, given=(Name("%f1"), Name("%f2")))
    without_value(instruction) # ldmatrix… → "ldmatrix"

Covers `ld`, `ldu`, `st`, `atom`, `red` and their multimem and asynchronous forms. Not covered are instructions whose lanes share the
loaded or stored data (ldmatrix, stmatrix, wmma), and st.bulk, which stores zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpubpf.ebpf.bytecode import TYPES
from gpubpf.ptx.access import TYPE, accesses, unprobed
from gpubpf.ptx.module import Address, Immediate, Name, Operand, PtxInstruction, Vector, type_size
from gpubpf.ptx.opcodes import facts


@dataclass(frozen=True, slots=True)
class Operands:
    """What an instruction moves between registers and memory. The elements of a vector are in order.

    type   of an element, one of bytecode.TYPES; f16 for f16x2, b8 for 8-bit floats
    size   bytes of each operand in memory, at most 16; a packed pair (f16x2) is one operand
    given  the registers and numbers that are stored, or that an atomic combines with memory
    read   the registers that receive what was in memory; `_` receives nothing
    compared  what a cas of at most 8 bytes compares with memory
    """

    type: str
    size: int
    given: tuple[Name | Immediate, ...] = ()
    read: tuple[Name | Immediate, ...] = ()
    compared: tuple[Name | Immediate, ...] = ()


def operands(instruction: PtxInstruction) -> Operands | None:
    """Return the operands of an instruction with one access; None for other instructions and unknown forms."""
    modifiers = instruction.modifiers
    types = [m for m in modifiers if TYPE.fullmatch(m)]
    if not types or not facts(instruction).has_value:
        return None
    found = accesses(instruction)
    if len(found) != 1 or found[0].kind == "async":
        return None
    at = next(i for i, o in enumerate(instruction.operands) if isinstance(o, Address))
    before, after = instruction.operands[:at], instruction.operands[at + 1 :]
    kind = found[0].kind
    compared = _elements(after[:1]) if "cas" in modifiers else ()
    if kind != "load":
        # A cache policy or an mbarrier may follow the value. A cas compares with its first operand and stores the second.
        after = after[1:2] if "cas" in modifiers else after[:1]
    read = _elements(before)
    given = _elements(after) if kind != "load" else ()
    if read is None or given is None or len(before) > 1 or not (given if kind != "load" else read):
        return None
    size = type_size(types[-1])
    if size == 16 and any(isinstance(o, Immediate) for o in given):
        return None
    element = types[-1].partition("x")[0]
    type_ = element if element in TYPES else f"b{_bits(types[-1])}"
    return Operands(type_, size, given, read, (compared or ()) if size <= 8 else ())


def without_value(instruction: PtxInstruction) -> str | None:
    """Return the name of an instruction that accesses memory synchronously but has no value that programs can see; else None."""
    found = accesses(instruction)
    if not found:
        return unprobed(instruction)
    if all(access.kind == "async" for access in found) or operands(instruction) is not None:
        return None
    known = facts(instruction)
    return instruction.full_name if known.has_value else known.name


def _bits(type_name: str) -> int:
    """Return the bits of an element whose type is not in bytecode.TYPES: 8 for e4m3x4, otherwise the type's whole size."""
    return 8 if type_name.startswith("e") else 8 * type_size(type_name)


def _elements(found: tuple[Operand, ...]) -> tuple[Name | Immediate, ...] | None:
    """Return the elements of the first operand; () without operands; None if an element is not a register or number."""
    items = found[0].items if found and isinstance(found[0], Vector) else found[:1]
    kept = tuple(item for item in items if isinstance(item, Name | Immediate))
    return kept if len(kept) == len(items) else None
