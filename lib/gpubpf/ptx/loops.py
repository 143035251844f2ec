"""Find the loops of a function body, and what decides whether a loop ends.

loops = Loops(Flow(function.body))
loops.ends[index]    for the first instruction of each head of a loop: NEVER, VALUE, MBARRIER, COUNTS or ""
loops.polled         the loads and atomics whose value decides whether a loop ends

Every path that returns to a block passes the head of a loop. A *loop* has the blocks on the ways from its head back to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from .flow import Flow, find_names
from .module import PtxInstruction
from .opcodes import facts, is_of_parameters

NEVER = "never"  # no branch leaves the loop
VALUE = "value"  # the loop goes on as long as the values that it loads stay the same
MBARRIER = "mbarrier"  # the loop goes on as long as an mbarrier is incomplete
COUNTS = "counts"  # it ends by a register that changes from turn to turn, such as a counter; so do the loops around it
_CHANGING = ("%clock", "%globaltimer", "%pm", "%smid", "%warpid", "%envreg")
_BY_OTHERS = frozenset({"activemask", "elect"})  # their results depend on which lanes are together


class _Unknown(Exception):
    """The analysis cannot follow a value."""


class Loops:
    """The loops of a function body."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    @functools.cached_property
    def _latches(self) -> Mapping[int, list[int]]:
        """For the block at the head of each loop, the blocks that lead back to it: those edges of a depth-first search."""
        found: dict[int, list[int]] = {}
        state: dict[int, bool] = {}  # block → whether it is on the path
        for root in range(len(self.flow.blocks)):
            if root in state:
                continue
            state[root] = True
            path = [(root, iter(self.flow.blocks[root].successors))]
            while path:
                block, ways = path[-1]
                way = next(ways, None)
                if way is None:
                    state[block] = False
                    path.pop()
                elif state.get(way):
                    found.setdefault(way, []).append(block)
                elif way not in state:
                    state[way] = True
                    path.append((way, iter(self.flow.blocks[way].successors)))
        return found

    @functools.cached_property
    def _before(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.flow.blocks]
        for number, block in enumerate(self.flow.blocks):
            for way in block.successors:
                found[way].append(number)
        return found

    def _blocks(self, head: int) -> frozenset[int]:
        """Return the blocks of the loop with this head."""
        cycles = self.flow.cycles
        found, todo = {head}, list(self._latches[head])
        while todo:
            block = todo.pop()
            if block not in found and cycles.get(block) == cycles[head]:
                found.add(block)
                todo += self._before[block]
        return frozenset(found)

    @functools.cached_property
    def _loops(self) -> Mapping[int, tuple[str, frozenset[int]]]:
        """For each head: what ends the loop, and the loads and atomics that decide it."""
        found = {head: _Loop(self.flow, blocks).ends() for head, blocks in self._bodies.items()}
        for head, (end, polled) in found.items():
            if end == COUNTS and any(found[other][0] != COUNTS for other in self._around(head)):
                found[head] = "", polled
        return found

    @functools.cached_property
    def _bodies(self) -> Mapping[int, frozenset[int]]:
        return {head: self._blocks(head) for head in self._latches}

    def _around(self, head: int) -> list[int]:
        """Return the heads of the loops that the loop with this head is in, and its own."""
        return [other for other, blocks in self._bodies.items() if head in blocks]

    @functools.cached_property
    def waiting(self) -> frozenset[int]:
        """The first instructions of the heads of loops with VALUE, and of the loops around them."""
        heads = {one for head, (end, _) in self._loops.items() if end == VALUE for one in self._around(head)}
        return frozenset(self.flow.blocks[head].instructions[0] for head in heads)

    def heads(self, which: str) -> frozenset[int]:
        """Return the first instructions of the heads of `waiting` loops, of `others`, or of `all`."""
        every = frozenset(self.ends)
        return {"all": every, "waiting": self.waiting, "others": every - self.waiting}[which]

    @functools.cached_property
    def ends(self) -> Mapping[int, str]:
        """What ends each loop, by the first instruction of its head. "": unknown, since the analysis cannot follow a value."""
        return {self.flow.blocks[head].instructions[0]: end for head, (end, _) in self._loops.items()}

    @functools.cached_property
    def polled(self) -> frozenset[int]:
        """The loads and atomics that decide whether a loop ends that nothing else can end."""
        return frozenset(index for end, polled in self._loops.values() if end == VALUE for index in polled)


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
