"""Loops that the lanes of a warp run one after another, each for some iterations, with the registers in C variables.

In other code, every basic block is a loop over the lanes, which loads registers and stores them again. A loop qualifies if no lane
can notice the order: it has no barrier, call, collective, atomic or exit, reads no clock, and does not both read and write shared
memory. After some iterations of one lane, the others have their turn. So a lane that waits for another one's store waits as before,
and lanes that read neighbouring data still read them at about the same time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .function import Block

MOST_TURNS = 128  # jumps back of one lane until the next lane runs
_GENERIC = re.compile(r"at_generic\(.*?, (\d+)\)")  # finds the kind of access, as a character's code
_CLOCK = re.compile(r"\bnow\b|w->time\b")


@dataclass(eq=False, slots=True)
class LaneLoop:
    """A loop, with the loops inside. Control enters from outside at the first of `entries`, and after a turn at any of them.

    blocks: in their order in the function. entries: the targets of the jumps back. exits: where control goes after it.
    """

    blocks: list[Block]
    entries: list[Block]
    exits: list[Block]


def lane_loops(blocks: list[Block], simple: Iterable[bool]) -> list[LaneLoop]:
    """Return the outermost loops in which all blocks are simple. `simple`: whether each block suits by itself."""
    suited = {block for block, is_simple in zip(blocks, simple, strict=True) if is_simple}
    before: dict[Block, list[Block]] = defaultdict(list)
    ends: dict[Block, list[Block]] = defaultdict(
        list
    )  # by the first block of a loop: those that jump back to it
    for block in blocks:
        for target in block.targets:
            before[target].append(block)
            if target.number <= block.number:
                ends[target].append(block)
    bodies = {first: _body(first, last, before) for first, last in ends.items()}
    taken: set[Block] = set()
    found = []
    for first, body in sorted(bodies.items(), key=lambda item: -len(item[1])):
        if not body <= suited or not body.isdisjoint(taken) or _shares(body):
            continue
        taken |= body
        inside = sorted(body, key=lambda b: b.number)
        entries = [first, *(b for b in inside if b is not first and not body.isdisjoint(ends.get(b, ())))]
        exits = {t.number: t for b in inside for t in b.targets if t not in body}
        found.append(LaneLoop(inside, entries, [exits[n] for n in sorted(exits)]))
    return found


def _body(first: Block, last: list[Block], before: dict[Block, list[Block]]) -> set[Block]:
    """Return the blocks from which control reaches the jumps back without passing the first block, and the first block."""
    body = {first}
    todo = list(last)
    while todo:
        block = todo.pop()
        if block not in body:
            body.add(block)
            todo += before[block]
    return body


def _shares(body: set[Block]) -> bool:
    """Return whether the blocks may read and write shared memory."""
    codes = [code for block in body for code in block.codes]
    generic = {chr(int(access)) for code in codes for access in _GENERIC.findall(code.text)}
    reads = any(c.reads_shared for c in codes) or "r" in generic
    return reads and (any(c.writes_shared for c in codes) or "w" in generic)


def suits(block: Block, parts: int) -> bool:
    """Return whether a lane can run a block without the other lanes. `parts`: of its code, between which the lanes meet."""
    if (
        block.kind not in ("goto", "branch")
        or block.head is not None
        or block.turn
        or block.spins
        or parts > 1
    ):
        return False
    return not any(c.before or c.whole or c.alone or _CLOCK.search(c.text) for c in block.codes)
