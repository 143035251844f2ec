"""Find the loops of a function body in PTX, and what decides whether a loop ends (see loop_ends.py).

loops = Loops(Flow(function.body))
loops.ends, loops.polled
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from .flow import Flow, find_names
from .loop_ends import COUNTS, MBARRIER, NEVER, VALUE, LoopEnds
from .module import PtxInstruction
from .opcodes import facts, is_of_parameters

_CHANGING = ("%clock", "%globaltimer", "%pm", "%smid", "%warpid", "%envreg")
_BY_OTHERS = frozenset({"activemask", "elect"})  # their results depend on which lanes are together


class _Unknown(Exception):
    """The analysis cannot follow a value."""


class Loops(LoopEnds):
    """The loops of a function body. Instructions are identified by their statements' indices."""

    def __init__(self, flow: Flow) -> None:
        blocks = flow.blocks
        firsts = [block.instructions[0] for block in blocks]
        super().__init__([block.successors for block in blocks], firsts, lambda of: _Loop(flow, of).ends())


class _Loop:
    """One loop, by its blocks."""

    def __init__(self, flow: Flow, blocks: frozenset[int]) -> None:
        self.flow = flow
        self.blocks = blocks
        self.polled: set[int] = set()
        self.mbarriers: set[int] = set()
        self._carried: dict[
            str, bool
        ] = {}  # register → whether it depends on an earlier turn; True while that is unknown

    def _instructions(self) -> Iterator[tuple[int, PtxInstruction]]:
        for block in self.blocks:
            for index in self.flow.blocks[block].instructions:
                yield index, self.flow.instruction(index)

    @functools.cached_property
    def _writes(self) -> Mapping[str, list[int]]:
        """The instructions of the loop that write each register."""
        found: dict[str, list[int]] = {}
        for index, one in self._instructions():
            if facts(one).result != "nothing" or _mbarrier(one):
                for name in find_names(one.operands[:1]):
                    found.setdefault(name, []).append(index)
        return found

    def ends(self) -> tuple[str, frozenset[int]]:
        """Return what ends the loop, and the loads and atomics that decide it."""
        every = dict(self._instructions())
        if any(facts(one).control == "call" or not facts(one).is_known for one in every.values()):
            return "", frozenset()
        ways_out, within = self._conditions()
        if not ways_out:
            return NEVER, frozenset()
        try:
            if any(self._is_carried(name) for name in ways_out):
                return COUNTS, frozenset()
            if any(self._is_carried(name) for name in within):
                return "", frozenset()
        except _Unknown:
            return "", frozenset()
        if not (
            self.polled or self.mbarriers
        ):  # nothing in the loop decides, but what is before it, such as a loop around it
            return "", frozenset()
        for index, one in every.items():  # a loop that only waits has no other effects
            if index not in self.polled and {"stores", "atomics", "barriers"}.intersection(facts(one).counts):
                return "", frozenset()
        return (VALUE if self.polled else MBARRIER), frozenset(self.polled)

    def _conditions(self) -> tuple[list[str], list[str]]:
        """Return the registers that decide whether a turn leaves the loop, and those that decide its way within the loop."""
        ways_out: list[str] = []
        within: list[str] = []
        for number in self.blocks:
            block = self.flow.blocks[number]
            last = self.flow.instruction(block.instructions[-1])
            known = facts(last)
            leaves = known.control in ("leave", "trap") or not self.blocks.issuperset(block.successors)
            if known.ends and last.predicate is not None:
                (ways_out if leaves else within).append(last.predicate)
            if known.control == "table":
                (ways_out if leaves else within).extend(find_names(last.operands[:1]))
        return ways_out, within

    def _is_carried(self, name: str) -> bool:
        """Return whether a register's value depends on its own value in an earlier turn. Raises _Unknown."""
        if name.startswith(_CHANGING):
            raise _Unknown
        if name not in self._carried:
            self._carried[name] = True
            found = [
                self._depends(index, self.flow.instruction(index)) for index in self._writes.get(name, ())
            ]
            self._carried[name] = any(found)
        return self._carried[name]

    def _depends(self, index: int, one: PtxInstruction) -> bool:
        """Return whether the result of an instruction depends on an earlier turn. Keep what it loads. Raises _Unknown."""
        known = facts(one)
        carried = one.predicate is not None and self._is_carried(one.predicate)
        if _mbarrier(one):
            self.mbarriers.add(index)
            return carried
        memory = {"loads", "atomics"}.intersection(known.counts)
        if memory and (one.opcode in ("ld", "ldu", "atom") and "local" not in one.modifiers):
            if not is_of_parameters(one) and "const" not in one.modifiers:
                self.polled.add(index)
                return carried
        elif memory or known.unaddressed or known.adds_carry or known.counts or one.opcode in _BY_OTHERS:
            raise _Unknown
        return any([carried, *(self._is_carried(name) for name in find_names(one.operands[1:]))])


def _mbarrier(one: PtxInstruction) -> bool:
    """Return whether an instruction tests an mbarrier for completion."""
    return one.opcode == "mbarrier" and one.modifiers[:1] in (("test_wait",), ("try_wait",))
