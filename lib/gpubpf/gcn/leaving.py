"""Find where lanes leave a kernel: instructions that disable lanes for the rest of the kernel.

A wave ends when all of its lanes have left. If an instruction disables a lane in EXEC and no later instruction re-enables the lane,
the lane leaves there. Compilers keep the lanes of a branch or loop in SGPRs (R), and re-enable them with `s_or_b64 exec, exec, R`. So
an instruction does not count if the lanes that it disables are in an R that is restored on every path to the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpubpf.gcn.calls import sgprs, use
from gpubpf.gcn.comgr import GcnInstruction
from gpubpf.gcn.kernel_code import KernelCode, writes_exec

_SAVES = re.compile(r"s_\w+_saveexec_b(?:32|64)")
_EXEC = ("exec", "exec_lo")
_ALL = "-1"


def leaving(code: KernelCode) -> list[int]:
    """Return the addresses of instructions where lanes may leave, except the exits."""
    restored = _Restored(code)
    return sorted(address for block in code.blocks() for address in _of_block(block, restored))


def _of_block(block: list[GcnInstruction], restored: _Restored) -> Iterable[int]:
    later = restored.behind_each(block)
    holding: set[str] = set()  # registers that hold at least the lanes in EXEC
    whole: set[str] = set()  # registers with the lanes that were active before all lanes were enabled
    for number, (instruction, behind) in enumerate(zip(block, later, strict=True)):
        name, operands = instruction.name, instruction.operands.split(", ")
        written = use(instruction)[0]
        if not writes_exec(instruction):
            if name in ("s_mov_b64", "s_mov_b32") and operands[1] in _EXEC:
                holding.add(operands[0])
                continue
            for register in [one for one in holding | whole if sgprs(one) & written]:
                holding.discard(register)
                whole.discard(register)
            continue
        if _SAVES.fullmatch(name):
            holding = {one for one in holding if not sgprs(one) & written} | {operands[0]}
        if ("_or_" in name and _SAVES.fullmatch(name)) or (
            name.startswith("s_or_b") and operands[1] in _EXEC
        ):
            whole = {operands[0]} if operands[-1] == _ALL else set()
            holding = set()
            continue
        if name.startswith("s_mov_b") and operands[1] == _ALL:
            whole, holding = holding, set()
            continue
        if name.startswith("s_mov_b") and operands[1] in whole:
            whole = set()
            continue
        lost = set(holding)
        if re.fullmatch(r"s_(?:andn2|xor)_b(?:32|64)", name) and operands[1] in _EXEC:
            lost.add(operands[2])
        if not lost & behind and not _keeps_the_rest(block[number : number + 2], later[number : number + 2]):
            yield instruction.address
        whole = set()
        if not re.fullmatch(r"s_(?:and|andn2|and_saveexec|andn1_saveexec)_b(?:32|64)", name):
            holding = set()


def _keeps_the_rest(two: list[GcnInstruction], behind: list[frozenset[str]]) -> bool:
    """Return whether the second instruction computes the lanes that the first disables, and later code re-enables these lanes."""
    if len(two) < 2 or not _SAVES.fullmatch(two[0].name) or not two[1].name.startswith("s_xor_b"):
        return False
    saved, (to, *values) = two[0].operands.split(", ")[0], two[1].operands.split(", ")
    return to in behind[1] and saved in values and any(exec_ in values for exec_ in _EXEC)


class _Restored:
    """The registers R whose lanes are all re-enabled on every path from a place to the end, for each place."""

    def __init__(self, code: KernelCode) -> None:
        self._blocks = [block for block in code.blocks() if block]
        starts = {block[0].address: number for number, block in enumerate(self._blocks)}
        everything = frozenset(
            operand
            for block in self._blocks
            for one in block
            if writes_exec(one)
            for operand in one.operands.split(", ")
            if sgprs(operand)
        )
        self._before = [everything] * len(self._blocks)
        self._behind = [frozenset[str]()] * len(self._blocks)
        following = [self._following(code, block, starts) for block in self._blocks]
        changed = True
        while changed:
            changed = False
            for number in reversed(range(len(self._blocks))):
                ways = [
                    self._before[other] if other is not None else frozenset() for other in following[number]
                ]
                behind = frozenset.intersection(*ways) if ways else frozenset[str]()
                before = behind
                for instruction in reversed(self._blocks[number]):
                    before = _across(instruction, before)
                self._behind[number] = behind
                if before != self._before[number]:
                    self._before[number], changed = before, True
        self._numbers = starts

    @staticmethod
    def _following(code: KernelCode, block: list[GcnInstruction], starts: dict[int, int]) -> list[int | None]:
        """Return the numbers of the possible next blocks; None stands for an unknown block."""
        last = block[-1]
        found: list[int | None] = []
        if last.address in code.branches:
            found.append(starts.get(code.branches[last.address]))
        if last.name.startswith(("s_setpc", "s_swappc")):
            return [None]
        if last.name not in ("s_branch", "s_endpgm"):
            found.append(starts.get(last.address + last.size))
        return found

    def behind_each(self, block: list[GcnInstruction]) -> list[frozenset[str]]:
        """Return the registers R after each instruction of a block."""
        here = self._behind[self._numbers[block[0].address]]
        found = []
        for instruction in reversed(block):
            found.append(here)
            here = _across(instruction, here)
        return found[::-1]


def _across(instruction: GcnInstruction, behind: frozenset[str]) -> frozenset[str]:
    """Return the registers R before an instruction, given those after it."""
    name, operands = instruction.name, instruction.operands.split(", ")
    if name.startswith(("s_setpc", "s_swappc")):
        return frozenset()
    added: set[str] = set()
    if name in ("s_or_b64", "s_or_b32"):
        if operands[0] in operands[1:] and operands[0] not in _EXEC:
            return behind  # the register only gains lanes
        if operands[0] in _EXEC and operands[1] in _EXEC:
            added.add(operands[2])
    elif re.fullmatch(r"s_or_saveexec_b(?:32|64)", name) or (
        name.startswith("s_mov_b") and operands[0] in _EXEC
    ):
        added.add(operands[1])
    if written := use(instruction)[0]:
        behind = frozenset(one for one in behind if not sgprs(one) & written)
    return behind | {one for one in added if sgprs(one)}
