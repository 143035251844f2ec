"""Find where the carry flag is live, and preserve it across added statements (PTX ISA 9.0, 9.7.2: the condition code register).

    carry = live_carry(flow)
    carry.before, carry.after   # the instructions before and after which added statements must preserve it
    kept(statements)            # the statements, wrapped so that they preserve the carry

`add.cc`, `sub.cc` and `mad.cc` set the carry; `addc`, `subc` and `madc` read it. It is per-thread state outside the registers. Calls
do not preserve it, and added statements may contain a call or set the carry themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpubpf.record import Record

from .emit import text
from .flow import Flow
from .module import PtxInstruction, Statement
from .opcodes import facts

KEPT = "%gpubpf_0carry"  # 32 bits: the saved carry, 0 or 1


class Carry(Record):
    """The instructions of a function, by index, before and after which the carry is live: a later instruction may read it."""

    before: frozenset[int] = frozenset()
    after: frozenset[int] = frozenset()


def sets_carry(instruction: PtxInstruction) -> bool:
    """Return whether an instruction sets the carry, if its predicate is true."""
    return "cc" in instruction.modifiers


def live_carry(flow: Flow) -> Carry:
    """Return where the carry is live. `Carry.after` omits branches and exits, because nothing is added after them."""
    if not any(facts(instruction).adds_carry for _, instruction in flow.instructions()):
        return Carry()
    blocks = [[flow.instruction(index) for index in block.instructions] for block in flow.blocks]
    # Per block: whether the carry is live at its beginning, indexed by whether it is live at its end.
    through = [(_at_begin(block, False), _at_begin(block, True)) for block in blocks]
    live = [False] * len(blocks)
    ends = live
    while True:
        ends = [any(live[s] for s in block.successors) for block in flow.blocks]
        begins = [known[end] for known, end in zip(through, ends, strict=True)]
        if begins == live:
            break
        live = begins
    before: set[int] = set()
    after: set[int] = set()
    for block, now in zip(flow.blocks, ends, strict=True):
        for index in reversed(block.instructions):
            instruction = flow.instruction(index)
            if now and not facts(instruction).ends:
                after.add(index)
            now = _live_before(instruction, now)
            if now:
                before.add(index)
    return Carry(frozenset(before), frozenset(after))


def kept(statements: Iterable[Statement]) -> list[Statement]:
    """Return the added statements between an instruction that saves the carry and one that restores it.

    ptxas removes the two if the statements do not change the carry.
    """
    return [
        text(f"addc.u32 {KEPT}, 0, 0;"),
        *statements,
        text(f"add.cc.u32 {KEPT}, {KEPT}, {2**32 - 1};"),  # sets the carry if the saved value is 1
    ]


def _at_begin(block: Iterable[PtxInstruction], live: bool) -> bool:
    for instruction in reversed(list(block)):
        live = _live_before(instruction, live)
    return live


def _live_before(instruction: PtxInstruction, live_after: bool) -> bool:
    if facts(instruction).adds_carry:
        return True
    sets = sets_carry(instruction) or instruction.opcode == "call"
    return live_after and not (sets and instruction.predicate is None)
