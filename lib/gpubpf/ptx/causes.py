"""Find what the condition of a branch depends on: the reason why lanes may disagree about it.

causes = Causes(Flow(function.body), entry=True)
causes.of(index)       "data", "grid", "lane", "" …
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from .flow import Flow, find_names
from .module import Address, PtxInstruction
from .opcodes import facts

DATA, GRID, LANE, UNIFORM = "data", "grid", "lane", "uniform"
# What a register depends on, as bits: what was loaded from memory or came from other lanes, the thread's index in its block, the
# block's index in the grid, and what the analysis cannot follow.
OF_DATA, OF_THREAD, OF_BLOCK, OF_UNKNOWN = 1, 2, 4, 8
_THREADS = ("%tid", "%laneid", "%warpid", "%lanemask")
_BLOCKS = ("%ctaid", "%clusterid", "%cluster_ctaid", "%cluster_ctarank")
_CHANGING = ("%clock", "%globaltimer", "%smid", "%pm", "%envreg")


class Causes:
    """What the conditions in a function body depend on. The analysis ignores the order of instructions, so it may find too much.

    entry: the function is a kernel, whose parameters are the same for all lanes.
    """

    def __init__(self, flow: Flow, entry: bool) -> None:
        self.flow = flow
        self.entry = entry

    def of(self, index: int) -> str:
        """Return what the predicate of the branch at statement `index` depends on.

        data     values from memory, from other lanes, or from a function
        grid     the thread's place in the whole grid, as in `if (i < n)`
        lane     the thread's place in its block, as in `if (threadIdx.x < 16)`
        uniform  nothing that differs between the lanes of a warp
        ""       unknown: something that the analysis does not follow, such as local memory
        """
        predicate = self.flow.instruction(index).predicate
        return named(self._depends.get(predicate or "", 0))

    @functools.cached_property
    def _depends(self) -> Mapping[str, int]:
        """What each register depends on."""
        found: dict[str, int] = {}
        steps = [tuple(self._step(one)) for _, one in self.flow.instructions()]
        changed = True
        while changed:
            changed = False
            for step in steps:
                for written, own, read in step:
                    now = found.get(written, 0) | own
                    for name in read:
                        now |= found.get(name, 0)
                    if now != found.get(written, 0):
                        found[written] = now
                        changed = True
        return found

    def _step(self, instruction: PtxInstruction) -> Iterator[tuple[str, int, tuple[str, ...]]]:
        """Yield each register that an instruction writes, what it brings, and the registers that it reads."""
        known = facts(instruction)
        if known.result == "nothing" or not instruction.operands:
            return
        first, *rest = instruction.operands
        written = list(find_names((first,))) if not isinstance(first, Address) else []
        read = list(find_names(rest))
        if known.result == "any" or known.control == "call":
            written, read = list(find_names(instruction.operands)), []
        if instruction.predicate is not None:
            read.append(instruction.predicate)
        own = self._brings(instruction, read)
        for name in written:
            yield name, own, tuple(read)

    def _brings(self, instruction: PtxInstruction, read: list[str]) -> int:
        known = facts(instruction)
        if not known.is_known:
            return OF_UNKNOWN
        own = 0
        if known.control == "call" or known.waits:  # shuffles, votes, matches
            own |= OF_DATA
        if any(isinstance(operand, Address) for operand in instruction.operands) or known.unaddressed:
            if "local" in instruction.modifiers:
                own |= OF_UNKNOWN
            elif "param" in instruction.modifiers:
                own |= 0 if self.entry else OF_UNKNOWN
            elif known.moves:
                own |= OF_DATA
        for name in read:
            if name.startswith(_THREADS):
                own |= OF_THREAD
            elif name.startswith(_BLOCKS):
                own |= OF_BLOCK
            elif name.startswith(_CHANGING):
                own |= OF_DATA
        return own


def named(depends: int) -> str:
    """Return the name of what a condition depends on, as `Causes.of`."""
    if depends & OF_DATA:
        return DATA
    if depends & OF_UNKNOWN:
        return ""
    if depends & OF_THREAD:
        return GRID if depends & OF_BLOCK else LANE
    return UNIFORM
