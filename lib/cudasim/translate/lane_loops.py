"""Loops that the lanes of a warp run one after another, each for some iterations, with the registers in C variables.

In other code, every basic block is a loop over the lanes, which loads registers and stores them again. A loop qualifies if its lanes
do not need to meet: it has no barrier, call, collective, atomic or exit, does not read a clock, and does not write shared memory.
(Lanes that communicate through global memory without any of these are a race, as on a GPU.) After some iterations of one lane, the
next lane runs. So a lane that waits for another lane's store waits as before, and lanes that read neighbouring data still read the
data at about the same time.

The virtual clock has no such loops: a probe ends such a loop, and yields and faults must not depend on probes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass

from .block import Block

MOST_TURNS = 128  # jumps back of one lane until the next lane runs
MOST_STEPS = 16  # limit of the search for loops: visited blocks for each block of a function
_GENERIC = re.compile(r"at_generic\(.*?, (\d+)\)")  # finds the kind of access, as a character's code
_TOGETHER = re.compile(r"\b(?:now|mask)\b")  # a clock; the lanes that are together (activemask)


@dataclass(frozen=True, slots=True)
class LaneLoop:
    """A loop, with the loops inside.

    blocks   its blocks, in their order in the function
    entries  the targets of its jumps back. Control enters the loop at the first one; a lane that continues may begin at any of them
    exits    the blocks where control continues after the loop
    """

    blocks: tuple[Block, ...]
    entries: tuple[Block, ...]
    exits: tuple[Block, ...]


def lane_loops(blocks: list[Block], suited: Set[Block]) -> list[LaneLoop]:
    """Return the outermost loops that consist of suited blocks.

    suited: the blocks for which `suits` holds, without the first block of the function
    """
    before: dict[Block, list[Block]] = defaultdict(list)
    ends: dict[Block, list[Block]] = defaultdict(
        list
    )  # the first block of a loop → the blocks that jump back to it
    for block in blocks:
        for target in block.targets:
            before[target].append(block)
            if target.number <= block.number:
                ends[target].append(block)
    steps = MOST_STEPS * len(blocks)
    free = set(suited)
    found = []
    for first in sorted(ends, key=lambda b: b.number):  # outer loops begin before the loops inside
        if first not in free or steps <= 0:
            continue
        body, visited = _body(first, ends[first], before, free)
        steps -= visited
        if not body:
            continue
        free -= body
        inside = sorted(body, key=lambda b: b.number)
        entries = (first, *(b for b in inside if b is not first and not body.isdisjoint(ends.get(b, ()))))
        exits = {t.number: t for b in inside for t in b.targets if t not in body}
        found.append(LaneLoop(tuple(inside), entries, tuple(exits[n] for n in sorted(exits))))
    return found


def _body(
    first: Block, last: list[Block], before: dict[Block, list[Block]], suited: Set[Block]
) -> tuple[set[Block], int]:
    """Return the blocks of a loop, and the number of visited blocks. Return no blocks if one of them is not suited.

    The blocks are the first block, and those from which control reaches a jump back without passing the first block. In a loop with a
    second way in, they include the function's first block, which is not suited.

    first: the first block
    last: the blocks that jump back to the first block
    before: block → the blocks that can precede it
    suited: as in `lane_loops`
    """
    body = {first}
    todo = list(last)
    while todo:
        block = todo.pop()
        if block not in suited:
            return set(), len(body)
        if block not in body:
            body.add(block)
            todo += before[block]
    return body, len(body)


def suits(block: Block, parts: int) -> bool:
    """Return whether a lane can run a block without the other lanes.

    parts: the number of parts of the block's code, between which lanes wait for each other
    """
    if block.kind not in ("goto", "branch") or block.head is not None or block.spins or parts > 1:
        return False
    return not any(
        c.before
        or c.whole
        or c.alone
        or c.writes_shared
        or _TOGETHER.search(c.text)
        or str(ord("w")) in _GENERIC.findall(c.text)
        for c in block.codes
    )
