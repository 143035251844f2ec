"""Copy the code before an instruction for each way into its block.

Compilers merge identical ends of branches: two helper calls with different maps, flags or memory become one call after both
branches. The lowering must know what each call does, so the gate undoes this.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import Instruction
from gpubpf.ebpf.helpers import HELPERS
from gpubpf.record import replace
from gpubpf.verify.flow import jumps, target_of

_TOGETHER = (
    "lanes",
    "shuffle",
    "any",
    "uniform",
)  # the lowerings of helpers that work on all lanes that run together


def separate(code: Sequence[Instruction], pc: int) -> tuple[Instruction, ...] | None:
    """Return the code with a separate copy of the block of `pc`, from its beginning to `pc`, for each way into the block.

    The copies follow `pc`. Return None if there is only one way into the block, or if the block calls a collective helper: lanes that
    enter the block in different ways would no longer make the call together.
    """
    targets = {target_of(at, i) for at, i in enumerate(code) if jumps(i)}
    start = pc
    while start not in targets:
        start -= 1
        if start < 0 or _leaves(code[start]):
            return None
    block = code[start : pc + 1]
    ways = [at for at, i in enumerate(code) if jumps(i) and target_of(at, i) == start]
    if not start or _leaves(code[start - 1]):  # only jumps lead here: the first keeps the block
        ways = ways[1:]
    if not ways or any(_is_collective(code, at) for at in range(start, pc + 1)):
        return None

    then = pc + 1
    size = len(block) + 1  # including the jump after the block
    copies = {way: then + 1 + size * number for number, way in enumerate(ways)}

    def moved(at: int) -> int:
        return at if at < then else at + 1 + size * len(ways)

    made: list[Instruction] = []

    def put(i: Instruction, target: int | None) -> None:
        made.append(i if target is None else _aimed(i, target - len(made) - 1))

    def put_block(begin: int, end: int) -> None:
        for at in range(begin, end):
            target = _target(at, code[at])
            put(code[at], copies.get(at, None if target is None else moved(target)))

    put_block(0, then)
    put(Instruction(b.JMP | b.JA), moved(then))
    for _ in ways:
        put_block(start, then)
        put(Instruction(b.JMP | b.JA), moved(then))
    put_block(then, len(code))
    return tuple(made)


def _leaves(i: Instruction) -> bool:
    """Return whether control never continues with the next instruction: an unconditional jump, or exit."""
    return i.opcode in (b.JMP | b.JA, b.JMP32 | b.JA, b.JMP | b.EXIT)


def _is_collective(code: Sequence[Instruction], at: int) -> bool:
    """Return whether an instruction calls a helper of _TOGETHER, or a function that may call such a helper."""
    i = code[at]
    if i.opcode != b.JMP | b.CALL:
        return False
    if i.src == 0:
        helper = HELPERS.get(i.imm)
        return helper is not None and helper.device is not None and helper.device.lowering in _TOGETHER
    return any(_is_collective(code, pc) for pc in _function(code, at + 1 + i.imm) if code[pc].src == 0)


def _function(code: Sequence[Instruction], begin: int) -> set[int]:
    """Return the numbers of all instructions of a function, and of the functions that it calls."""
    found: set[int] = set()
    to_do = [begin]
    while to_do:
        at = to_do.pop()
        if at in found or not 0 <= at < len(code):
            continue
        found.add(at)
        if (target := _target(at, code[at])) is not None:
            to_do.append(target)
        if not _leaves(code[at]):
            to_do.append(at + 1)
    return found


def _target(at: int, i: Instruction) -> int | None:
    """Return the target of a jump, or of a call of a function in the program; None for other instructions."""
    if i.opcode == b.JMP | b.CALL and i.src == b.PSEUDO_CALL:
        return at + 1 + i.imm
    return target_of(at, i) if jumps(i) else None


def _aimed(i: Instruction, distance: int) -> Instruction:
    if i.opcode == b.JMP32 | b.JA or i.opcode == b.JMP | b.CALL:
        return replace(i, imm=distance)
    return replace(i, offset=distance)
