"""Find the loops among basic blocks, from the successors of the blocks: of PTX (loops.py), and of machine code (gcn/loops.py).

loops = LoopEnds(successors, firsts, end)
loops.ends[first]    for the first instruction of each head of a loop: NEVER, VALUE, MBARRIER, COUNTS or ""
loops.polled         the loads and atomics whose value decides whether a loop ends

Every path that returns to a block passes the head of a loop. A *loop* has the blocks on the ways from its head back to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

NEVER = "never"  # no branch leaves the loop
VALUE = "value"  # the loop goes on as long as the values that it loads stay the same
MBARRIER = "mbarrier"  # the loop goes on as long as an mbarrier is incomplete
COUNTS = "counts"  # it ends by a register that changes from turn to turn, such as a counter; so do the loops around it


class LoopEnds:
    """The loops of a function.

    successors: for each basic block, the numbers of the blocks that may follow.
    firsts: for each basic block, what identifies its first instruction.
    end: returns what ends a loop, and the loads and atomics that decide that, for the numbers of the loop's blocks.
    """

    def __init__(
        self,
        successors: Sequence[Sequence[int]],
        firsts: Sequence[int],
        end: Callable[[frozenset[int]], tuple[str, frozenset[int]]],
    ) -> None:
        self._successors, self._firsts, self._end = successors, firsts, end

    @functools.cached_property
    def _latches(self) -> Mapping[int, list[int]]:
        """For the block at the head of each loop, the blocks that lead back to it: those edges of a depth-first search."""
        found: dict[int, list[int]] = {}
        state: dict[int, bool] = {}  # block → whether it is on the path
        for root in range(len(self._successors)):
            if root in state:
                continue
            state[root] = True
            path = [(root, iter(self._successors[root]))]
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
                    path.append((way, iter(self._successors[way])))
        return found

    @functools.cached_property
    def _before(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self._successors]
        for number, ways in enumerate(self._successors):
            for way in ways:
                found[way].append(number)
        return found

    @functools.cached_property
    def _cycles(self) -> Mapping[int, int]:
        return cycles(self._successors)

    def _blocks(self, head: int) -> frozenset[int]:
        """Return the blocks of the loop with this head."""
        found, todo = {head}, list(self._latches[head])
        while todo:
            block = todo.pop()
            if block not in found and self._cycles.get(block) == self._cycles[head]:
                found.add(block)
                todo += self._before[block]
        return frozenset(found)

    @functools.cached_property
    def _loops(self) -> Mapping[int, tuple[str, frozenset[int]]]:
        """For each head: what ends the loop, and the loads and atomics that decide it."""
        found = {head: self._end(blocks) for head, blocks in self._bodies.items()}
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
        return frozenset(self._firsts[head] for head in heads)

    def heads(self, which: str) -> frozenset[int]:
        """Return the first instructions of the heads of `waiting` loops, of `others`, or of `all`."""
        every = frozenset(self.ends)
        return {"all": every, "waiting": self.waiting, "others": every - self.waiting}[which]

    @functools.cached_property
    def ends(self) -> Mapping[int, str]:
        """What ends each loop, by the first instruction of its head. "": unknown, since the analysis cannot follow a value."""
        return {self._firsts[head]: end for head, (end, _) in self._loops.items()}

    def left_after(self, block: int) -> frozenset[int]:
        """Return the blocks of the loop that the last branch of a block leaves or stays in; none if there is no such loop."""
        ways = set(self._successors[block])
        left = (
            blocks for blocks in self._bodies.values() if block in blocks and ways & blocks and ways - blocks
        )
        return min(left, key=len, default=frozenset())

    @functools.cached_property
    def polled(self) -> frozenset[int]:
        """The loads and atomics that decide whether a loop ends that nothing else can end."""
        return frozenset(index for end, polled in self._loops.values() if end == VALUE for index in polled)


def cycles(successors: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return a number for each block that is on a cycle. Blocks on a common cycle have the same number."""
    order: list[int] = []
    seen: set[int] = set()
    for root in range(len(successors)):
        todo = [(root, 0)]
        while todo:
            number, at = todo.pop()
            if at == 0:
                if number in seen:
                    continue
                seen.add(number)
            if at < len(successors[number]):
                todo.append((number, at + 1))
                todo.append((successors[number][at], 0))
            else:
                order.append(number)
    predecessors: dict[int, list[int]] = {}
    for number, ways in enumerate(successors):
        for successor in ways:
            predecessors.setdefault(successor, []).append(number)
    found: dict[int, int] = {}
    placed: set[int] = set()
    for root in reversed(order):
        # Kosaraju's algorithm: follow edges backwards, in reverse order of completion.
        members, todo_back = [], [root]
        while todo_back:
            number = todo_back.pop()
            if number not in placed:
                placed.add(number)
                members.append(number)
                todo_back += predecessors.get(number, [])
        if len(members) > 1 or root in successors[root]:
            found.update(dict.fromkeys(members, root))
    return found
