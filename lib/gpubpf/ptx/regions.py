"""Find the regions of conditional branches: where lanes that a branch parts may still be apart.

regions = Regions(Flow(function.body), 16)
regions.meets[index]     the block where the two ways of the branch meet
regions.numbers[index]   the number of its region
regions.inside[block]    the numbers of the regions that a block is in, as bits

The *region* of a branch has the blocks from the branch to its immediate post-dominator, the first block that every way from the branch
leads to. Where ways lead to different exits, the region has all blocks up to the exits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

from .flow import Flow
from .opcodes import facts


class Regions:
    """The regions of the conditional branches of a function body.

    most: numbers are below this one.
    first: the lowest number to use. Lower numbers are those of regions in functions that call this one.
    called: the body is that of a called function, not of a kernel.

    Regions that end in the same block have one number, because a lane comes out of all of them at once. Other regions have different
    numbers if they have a block in common, or if one of them ends in a block of the other. A region for which no number is left has
    the number `most`.
    """

    def __init__(self, flow: Flow, most: int, first: int = 0, called: bool = False) -> None:
        self.flow = flow
        self.most = most
        self.first = first
        self.called = called

    @functools.cached_property
    def branches(self) -> Mapping[int, int]:
        """The block of each conditional branch that may part lanes (not `.uni`), by the branch's statement index."""
        found = {}
        for number, block in enumerate(self.flow.blocks):
            last = self.flow.instruction(block.instructions[-1])
            if facts(last).parts and last.predicate is not None and "uni" not in last.modifiers:
                found[block.instructions[-1]] = number
        return found

    @functools.cached_property
    def meets(self) -> Mapping[int, int | None]:
        """For each branch, the block where its ways meet; None if they meet only where the function ends, or never.

        A block after which a kernel ends is such an end: a lane that comes there early has left. From a called function, a lane
        returns, and what it waits for in the caller is not the branch's.
        """
        after = post_dominators([block.successors for block in self.flow.blocks], set(self._leaving()))
        last = {
            number
            for number, block in enumerate(self.flow.blocks)
            if not block.successors and not self.called
        }
        return {branch: None if after[n] in last else after[n] for branch, n in self.branches.items()}

    def _leaving(self) -> Iterator[int]:
        """Yield the blocks after which a thread may be at the end of the function."""
        for number, block in enumerate(self.flow.blocks):
            known = facts(self.flow.instruction(block.instructions[-1]))
            if known.control in ("leave", "trap") or not block.successors:
                yield number

    @functools.cached_property
    def _ends(self) -> Mapping[int | None, int]:
        """The position of each region, by the block where it ends."""
        return {end: position for position, end in enumerate(dict.fromkeys(self.meets.values()))}

    @functools.cached_property
    def _within(self) -> list[int]:
        """For each block, the regions that it is in, as bits: bit n is the nth of `_ends`."""
        blocks = self.flow.blocks
        own = [0] * len(blocks)
        for branch, block in self.branches.items():
            own[block] |= 1 << self._ends[self.meets[branch]]
        found = [0] * len(blocks)
        todo = list(range(len(blocks)))
        while todo:
            changed = set()
            for block in todo:
                for successor in blocks[block].successors:
                    ended = 1 << self._ends[successor] if successor in self._ends else 0
                    now = found[successor] | (found[block] | own[block]) & ~ended
                    if now != found[successor]:
                        found[successor] = now
                        changed.add(successor)
            todo = sorted(changed)
        return found

    @functools.cached_property
    def _numbers(self) -> list[int]:
        """The number of each region of `_ends`."""
        # For each region, those that have a block in common with it, or with the block where it ends.
        apart = [0] * len(self._ends)
        inside = enumerate(self._within)
        for together in {mask | (1 << self._ends[n] if n in self._ends else 0) for n, mask in inside}:
            for position in _bits(together):
                apart[position] |= together
        taken: list[int] = []
        for position, others in enumerate(apart):
            used = {taken[other] for other in _bits(others & ~(-1 << position))}
            free = (n for n in range(self.first, self.most) if n not in used)
            taken.append(next(free, self.most))
        return taken

    @functools.cached_property
    def numbers(self) -> Mapping[int, int]:
        """The number of each branch's region."""
        return {branch: self._numbers[self._ends[end]] for branch, end in self.meets.items()}

    @functools.cached_property
    def inside(self) -> Sequence[int]:
        """For each block, the numbers of the regions that it is in, as bits. Regions of calling functions are always among them."""
        taken, calling = self._numbers, (1 << self.first) - 1
        known = {
            together: calling | sum(1 << n for n in {taken[p] for p in _bits(together)} if n < self.most)
            for together in set(self._within)
        }
        return [known[together] for together in self._within]

    def leaves_loop(self, branch: int) -> bool:
        """Return whether lanes may come to the branch again on one of its ways, but not on another, before the ways meet."""
        if branch not in self.branches:
            return False
        cycles, block = self.flow.cycles, self.branches[branch]
        cycle, end = cycles.get(block), self.meets[branch]
        if cycle is None or (end is not None and cycles.get(end) == cycle):
            return False
        ways = {cycles.get(way) == cycle for way in self.flow.blocks[block].successors}
        leaves = facts(self.flow.instruction(branch)).control == "leave"
        return ways == {True, False} or (leaves and True in ways)

    @property
    def end(self) -> int:
        """The lowest number that a function which is called from here may use."""
        return max([self.first, *(n + 1 for n in self.numbers.values() if n < self.most)])


def post_dominators(successors: Sequence[Sequence[int]], leaving: set[int]) -> list[int | None]:
    """Return the immediate post-dominator of each node; None if it is the end, or if no way leads from the node to the end.

    successors: of each node
    leaving: the nodes from which a way leads directly to the end
    """
    end = len(successors)
    after = [[*ways, end] if node in leaving else list(ways) for node, ways in enumerate(successors)]
    before: list[list[int]] = [[] for _ in range(end + 1)]
    for node, ways in enumerate(after):
        for way in ways:
            before[way].append(node)
    order: list[int] = []  # from the end backwards: a node after the nodes that only it leads to
    seen = {end}
    todo = [(end, iter(before[end]))]
    while todo:
        node, leading = todo[-1]
        following = next((one for one in leading if one not in seen), None)
        if following is None:
            todo.pop()
            order.append(node)
        else:
            seen.add(following)
            todo.append((following, iter(before[following])))
    place = {node: position for position, node in enumerate(order)}
    found: dict[int, int] = {end: end}

    def common(one: int, other: int) -> int:
        while one != other:
            while place[one] < place[other]:
                one = found[one]
            while place[other] < place[one]:
                other = found[other]
        return one

    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            known = [way for way in after[node] if way in found]
            now = functools.reduce(common, known)
            if found.get(node) != now:
                found[node] = now
                changed = True
    return [None if found.get(node, end) == end else found[node] for node in range(end)]


def _bits(mask: int) -> Iterator[int]:
    """Yield the positions of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
