"""Decode barrier instructions (PTX ISA 9.0, 9.7.13: bar, barrier, barrier.cluster)."""

from __future__ import annotations

from dataclasses import dataclass

from .flow import find_names
from .module import Operand, PtxInstruction


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier instruction.

    arrives  the thread arrives at the barrier
    leaves   the thread waits at the barrier, then leaves it
    number   the operand with the barrier's number; None for the cluster's barrier
    threads  the operand with the number of threads; None for all threads of the block
    results  the registers that the instruction writes
    """

    arrives: bool
    leaves: bool
    number: Operand | None = None
    threads: Operand | None = None
    results: frozenset[str] = frozenset()


def barrier(instruction: PtxInstruction) -> Barrier | None:
    """Return the barrier of an instruction; None for any other instruction, `bar.warp.sync` included."""
    if instruction.opcode not in ("bar", "barrier"):
        return None
    modifiers = [m for m in instruction.modifiers if m != "cta"]
    operands = instruction.operands
    match modifiers[:1]:
        case ["sync"] if operands:
            return Barrier(True, True, operands[0], operands[1] if len(operands) > 1 else None)
        case ["arrive"] if operands:
            return Barrier(True, False, operands[0], operands[1] if len(operands) > 1 else None)
        case ["red"] if len(operands) >= 3:  # result, number, threads (only with four operands), predicate
            threads = operands[2] if len(operands) > 3 else None
            return Barrier(True, True, operands[1], threads, frozenset(find_names(operands[:1])))
        case ["cluster"]:
            return Barrier("arrive" in modifiers, "wait" in modifiers)
    return None


def mbarrier_waits(instruction: PtxInstruction) -> list[str]:
    """Return the name of an instruction that waits for an mbarrier object, in a list: PTX ISA 9.7.13.15.16. Else return []."""
    waits = instruction.opcode == "mbarrier" and instruction.modifiers[:1] in (("test_wait",), ("try_wait",))
    return [f"mbarrier.{instruction.modifiers[0]}"] if waits else []
