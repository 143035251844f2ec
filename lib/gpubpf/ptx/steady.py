"""Prove that a register has the same value modulo a power of two each time that a thread comes to an instruction in a loop.

    steady = Steady(function, flow, lanes)
    steady.bits(17, "%r4")                  # 7: the values of a thread at statement 17 are equal modulo 128; ALWAYS: they are equal

What is computed outside of the loop does not change in it. In the loop, a register may advance by a constant in each turn. In another
loop, or in another thread, the values may be different ones.
"""

from __future__ import annotations

from .flow import Flow
from .lane_terms import trailing
from .lanes import Lanes
from .module import Address, Function, Immediate, Name, Operand, PtxInstruction
from .opcodes import is_of_parameters

ALWAYS = 64  # all bits are the same
_CONSTANT = ("%tid", "%ntid", "%ctaid", "%nctaid", "%laneid", "WARP_SZ")
_INTEGERS = {f"{sign}{width}" for sign in "usb" for width in (32, 64)}
# The lower bits of the result depend on the same bits of the inputs only.
_BITWISE = {"mov", "add", "sub", "neg", "not", "or", "xor", "and", "cvta", "cvt"}
_MOST_STEPS = 200  # the search for one register ends after these


class Steady:
    """What is known about the registers of a function."""

    def __init__(self, function: Function, flow: Flow, lanes: Lanes) -> None:
        self._flow, self._lanes = flow, lanes
        self._parameters = {p.name for p in function.parameters} if function.kind == "entry" else set()
        self._loop = {
            i: flow.cycles.get(n) for n, block in enumerate(flow.blocks) for i in block.instructions
        }

    def bits(self, index: int, name: str) -> int:
        """Return how many lower bits of a register are the same each time that a thread reads it at statement `index`."""
        self._left = _MOST_STEPS
        return self._of_name(index, name, self._loop[index], ())

    def _of_name(self, index: int, name: str, loop: int | None, inside: tuple[tuple[int, str], ...]) -> int:
        """Return the bits of a register, a variable or a special register. inside: where the search for the registers began."""
        self._left -= 1
        definitions = self._lanes.definitions(index, name)
        if definitions is None:
            return ALWAYS if name.startswith(_CONSTANT) or not name.startswith("%") else 0
        own = [i for i in definitions if loop is not None and self._loop[i] == loop]
        if not own:
            return ALWAYS  # a thread comes to each loop that is in no other loop once at most
        if self._left < 0 or (index, name) in inside:
            return 0
        inside = (*inside, (index, name))
        if len(definitions) == 1:
            return self._of_result(own[0], loop, inside)
        # Each definition adds a constant to the register, or begins again at one value.
        begins: set[object] = {None for i in definitions if i not in own}
        most = ALWAYS
        for i in own:
            if (step := self._advance(i, (index, name), loop)) is not None:
                most = min(most, trailing(step))
            elif (start := self._start(i, loop, inside)) is not None:
                begins.add(start)
            else:
                return 0
        return most if len(begins) <= 1 else 0

    def _advance(self, index: int, of: tuple[int, str], loop: int | None) -> int | None:
        """Return the constant that an instruction adds to a register, perhaps through other registers; None if it does not."""
        total = 0
        for _ in range(_MOST_STEPS):
            instruction = self._flow.instruction(index)
            operands = instruction.operands[1:]
            if not _is_integer(instruction) or not isinstance(operands[0], Name):
                return None
            source = operands[0]
            if instruction.opcode in ("add", "sub") and len(instruction.modifiers) == 1:
                if not isinstance(operands[1], Immediate):
                    return None
                total += operands[1].integer if instruction.opcode == "add" else -operands[1].integer
            elif instruction.opcode != "mov" or source.offset:
                return None
            if self._lanes.is_same_register(index, source.name, *of):
                return total
            definitions = self._lanes.definitions(index, source.name)
            if definitions is None or len(definitions) != 1 or self._loop[definitions[0]] != loop:
                return None
            (index,) = definitions
        return None

    def _start(self, index: int, loop: int | None, inside: tuple[tuple[int, str], ...]) -> object | None:
        """Return what identifies the constant that an instruction writes; None if it writes something else."""
        instruction = self._flow.instruction(index)
        value = instruction.operands[1] if len(instruction.operands) == 2 else None
        if instruction.opcode != "mov" or not _is_integer(instruction):
            return None
        if isinstance(value, Immediate):
            return value.integer
        if not isinstance(value, Name) or self._of_name(index, value.name, loop, inside) != ALWAYS:
            return None
        return value, self._lanes.definitions(index, value.name)

    def _of_result(self, index: int, loop: int | None, inside: tuple[tuple[int, str], ...]) -> int:
        """Return the bits of an instruction's result."""
        instruction = self._flow.instruction(index)
        opcode, modifiers, operands = instruction.opcode, instruction.modifiers, instruction.operands[1:]
        if opcode == "ld" and is_of_parameters(instruction):
            place = operands[0]
            return ALWAYS if isinstance(place, Address) and place.base in self._parameters else 0
        if not _is_integer(instruction) or not operands or not isinstance(instruction.operands[0], Name):
            return 0
        inputs = [self._of_operand(index, operand, loop, inside) for operand in operands]
        if opcode in _BITWISE:
            return min(inputs)
        if opcode in ("mul", "mad") and modifiers[0] in ("lo", "wide"):
            product = _at_most(min(inputs[:2]) + sum(map(_zeros, operands[:2])), inputs[:2])
            return min([product, *inputs[2:]])
        if opcode == "shl" and isinstance(operands[1], Immediate):
            return _at_most(inputs[0] + operands[1].integer, inputs[:1])
        return ALWAYS if min(inputs) == ALWAYS else 0

    def _of_operand(
        self, index: int, operand: Operand, loop: int | None, inside: tuple[tuple[int, str], ...]
    ) -> int:
        if isinstance(operand, Immediate):
            return ALWAYS
        return self._of_name(index, operand.name, loop, inside) if isinstance(operand, Name) else 0


def _is_integer(instruction: PtxInstruction) -> bool:
    """Return whether an instruction computes with integers of at least 32 bits, in the plain way."""
    types = [m for m in instruction.modifiers if m not in ("lo", "wide", "to", "global", "shared", "const")]
    return bool(types) and all(m in _INTEGERS for m in types)


def _zeros(operand: Operand) -> int:
    """Return how many zero bits a constant ends with; 0 for a register."""
    return trailing(operand.integer) if isinstance(operand, Immediate) and not operand.is_float else 0


def _at_most(bits: int, inputs: list[int]) -> int:
    """Return the bits of a product or a shifted value; less than all of them if an input changes, since registers have 32 bits."""
    return ALWAYS if min(inputs) == ALWAYS else min(bits, 32)
