"""Prove that a register has the same value in all lanes of a warp, modulo a power of two.

    bits = common_bits(function, module.variables)
    bits.get("%r7", 0)                      # 5: the values of all lanes are equal modulo 32; 0: nothing is known

The proof follows values from the indices of thread and block, kernel parameters, constants and addresses of variables through integer
instructions. It uses only registers that a single instruction writes, so that it does not matter when each lane executed the
instruction. In a tile of rows of 64 bytes, the address of row `%tid.y` is the same in all lanes modulo 64, whatever the block's shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from .flow import find_names
from .module import Address, Close, Function, Immediate, Name, Open, Operand, PtxInstruction, Variable
from .opcodes import written

UNIFORM = 64  # all bits are the same in all lanes
_MOST = 32  # the most equal bits that are tracked for a register that is not UNIFORM
_UNIFORM_REGISTERS = {f"%{name}.{axis}" for name in ("ctaid", "nctaid", "ntid") for axis in "xyz"}
_INTEGERS = {f"{sign}{width}" for sign in "usb" for width in (16, 32, 64)}
# The lower bits of the result depend on the same bits of the inputs only.
_BITWISE = {"mov", "add", "sub", "neg", "not", "or", "xor", "cvta"}


def common_bits(function: Function, variables: Collection[str] = ()) -> dict[str, int]:
    """Return register → how many lower bits are the same in all lanes of a warp; UNIFORM if all are. Unknown registers are left out.

    variables: names of the module's variables, whose addresses are the same in all lanes
    """
    declared = [s for s in function.body or () if isinstance(s, Variable)]
    names = {*variables, *(s.name for s in declared if s.space != "reg")}
    registers = [s for s in declared if s.space == "reg"]  # these may hide variables
    alike = [name for name in names if name.startswith(tuple(s.name for s in registers))]
    names -= {name for name in alike if any(s.declares(name) for s in registers)}
    found = dict.fromkeys(_UNIFORM_REGISTERS | names, UNIFORM)
    parameters = {p.name for p in function.parameters} if function.kind == "entry" else set()
    writes = _writes(function)
    for statement in function.body or ():
        if not isinstance(statement, PtxInstruction) or not statement.operands:
            continue
        written = statement.operands[0]
        # An element of a vector register has two names, and a write of the whole register also writes the element.
        if isinstance(written, Name) and writes[written.name] == 1 and "." not in written.name:
            bits = _of_result(statement, found, parameters)
            if bits:
                found[written.name] = bits
    return found


def _writes(function: Function) -> Counter[str]:
    """Return how many instructions write each register.

    A predicated instruction counts twice, since lanes may not execute it. So does an instruction in an inner scope, whose registers
    may have the names of others.
    """
    writes: Counter[str] = Counter()
    depth = 0
    for statement in function.body or ():
        depth += isinstance(statement, Open) - isinstance(statement, Close)
        if (
            isinstance(statement, PtxInstruction)
            and statement.operands
            and not isinstance(statement.operands[0], Address)
        ):
            twice = depth > 0 or statement.predicate is not None
            writes.update(dict.fromkeys(find_names(written(statement)), 1 + twice))
    return writes


def _of_result(writer: PtxInstruction, known: dict[str, int], parameters: Collection[str]) -> int:
    """Return how many lower bits of an instruction's result are the same in all lanes."""
    opcode, modifiers, operands = writer.opcode, writer.modifiers, writer.operands[1:]
    if opcode == "ld" and "param" in modifiers and isinstance(operands[0], Address):
        return UNIFORM if operands[0].base in parameters and operands[0].index is None else 0
    if not modifiers or modifiers[-1] not in _INTEGERS or {"cc", "sat"} & {*modifiers}:
        return 0
    inputs = [_of_input(operand, known) for operand in operands]
    if opcode in _BITWISE:
        return min(inputs, default=0)
    if opcode == "cvt" and len(modifiers) == 2 and modifiers[0] in _INTEGERS:
        return _limited(min(inputs[0], *(int(modifier[1:]) for modifier in modifiers)), inputs)
    if opcode in ("mul", "mad") and modifiers[0] in ("lo", "wide"):
        product = _limited(min(inputs[:2]) + sum(map(_zeros, operands[:2])), inputs[:2])
        return min([product, *inputs[2:]])
    if opcode == "shl" and inputs[1] == UNIFORM:
        distance = operands[1]
        return _limited(inputs[0] + (distance.integer if isinstance(distance, Immediate) else 0), inputs)
    if opcode == "and":
        masks = [operand.integer for operand in operands if isinstance(operand, Immediate)]
        if any(0 <= mask < 1 << min(inputs) for mask in masks):
            return UNIFORM
        return _limited(max(min(inputs), *map(_zeros, operands)), inputs)
    return 0


def _of_input(operand: Operand, known: dict[str, int]) -> int:
    if isinstance(operand, Immediate):
        return UNIFORM
    return known.get(operand.name, 0) if isinstance(operand, Name) else 0


def _zeros(operand: Operand) -> int:
    """Return how many zero bits a constant ends with; 0 for a register."""
    value = operand.integer if isinstance(operand, Immediate) and not operand.is_float else 1
    return (value & -value).bit_length() - 1 if value else _MOST


def _limited(bits: int, inputs: Sequence[int]) -> int:
    return UNIFORM if min(inputs) == UNIFORM else min(bits, _MOST)
