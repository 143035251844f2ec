"""Find the registers that lanes keep between basic blocks, and the values that are computed again where they are used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from .block import Block
from .scope import Register
from .values import Code, c_type

FEW = 5  # registers that a kernel needs besides those for its values
MOST_STEPS = 24  # instructions to compute a value again where it is used
# Names in the C of a value that make the value differ between lanes, or depend on more than its operands. _LANE: a lane's number and
# thread index, which differ between lanes but never change.
_VARIES = re.compile(r"\b(?:l|mask|now|api|at_\w+|cs_\w+|R)\b|w->(?:at|budget)\b")
_LANE = re.compile(r"w->tid\[[0-2]\]\[l\]|\bl\b")
_FRAME = re.compile(r"R->(\w+)")


def mark_live(blocks: list[Block], results: Collection[Register]) -> None:
    """Set `live_in` and `live_out` of each block.

    results: the registers in which the function returns its results
    """
    uses: dict[int, set[Register]] = {}
    defs: dict[int, set[Register]] = {}
    for block in blocks:
        use: set[Register] = set()
        define: set[Register] = set()
        for code in block.codes:
            use |= code.uses - define
            define |= code.defs
        if block.head is not None:
            use |= block.head.uses - define
        if block.predicate is not None and block.predicate not in define:
            use.add(block.predicate)
        if block.kind == "return":
            use |= set(results) - define
        uses[block.number], defs[block.number] = use, define
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out: set[Register] = set()
            for target in block.targets:
                out |= target.live_in
            live = frozenset(uses[block.number] | (out - defs[block.number]))
            block.live_out = frozenset(out)
            if live != block.live_in:
                block.live_in = live
                changed = True


def estimated_registers(blocks: list[Block]) -> int:
    """Return an estimate of the 32-bit registers per thread: the most that are live at once, plus a few.

    docs/tools/cudasim.md compares it with ptxas.
    """
    free = _rematerializable(blocks)
    most = max(_most_live(block, free) for block in blocks)
    return min(255, most + FEW)


def _most_live(block: Block, free: set[Register]) -> int:
    """Return the most 32-bit registers that are live at once in a block, without those in `free`."""
    live: set[Register] = set()
    now = most = 0

    def use(registers: Iterable[Register]) -> None:
        nonlocal now, most
        new = {r for r in registers if r.width} - free - live
        live.update(new)
        now += sum(_words(r) for r in new)
        most = max(most, now)

    use(block.live_out)
    for code in (block.head, *reversed(block.codes)):
        if code is not None:
            now -= sum(_words(r) for r in code.defs & live)
            live.difference_update(code.defs)
            use(code.uses)
    return most


def _words(register: Register) -> int:
    return (register.width + 3) // 4


def computed_again(blocks: list[Block], kept: set[Register]) -> dict[Register, Code]:
    """Return register → instruction for the registers that are computed again at each use, so that lanes need not keep them.

    Such a register has a single definition, which precedes every use. The definition depends only on constants, the launch and the
    block, so all lanes of a warp have the same value. A copy of a lane's number or thread index is also computed again, because that
    costs as much as a load.

    kept: registers that are arguments or results
    """
    codes = [code for b in blocks for code in (*b.codes, b.head) if code is not None]
    defined = Counter(r for code in codes for r in code.defs)
    in_frame = {name for code in codes for name in _FRAME.findall(code.before + code.text)}
    shown = {r for code in codes for r in code.uses | code.whole if r.name in in_frame}
    kept = kept | blocks[0].live_in | shown
    candidates = [code for code in codes if len(code.defs) == 1 and not (code.before or code.alone)]
    candidates = [code for code in candidates if all(defined[r] == 1 and r not in kept for r in code.defs)]
    found: dict[Register, Code] = {}
    cost: dict[Register, int] = {}  # the number of instructions that compute a register
    varying: set[Register] = set()
    size = -1
    while size != len(found):
        size = len(found)
        for code in candidates:
            (register,) = code.defs
            steps = 1 + sum(cost.get(r, MOST_STEPS) for r in code.uses)
            if register in found or steps > MOST_STEPS:
                continue
            varies = bool(_LANE.search(code.text) or code.uses & varying)
            text = _LANE.sub("", code.text) if code.rematerializable else code.text
            if _VARIES.search(text) or (not code.rematerializable and (varies or code.memory)):
                continue
            found[register], cost[register] = code, steps
            if varies:
                varying.add(register)
    return found


def _rematerializable(blocks: list[Block]) -> set[Register]:
    """Return registers that a compiler need not keep, because it can compute them again at their use: kernel parameters,
    special registers, constants, and copies of these."""
    codes = [code for block in blocks for code in block.codes]
    found = set().union(*(code.defs for code in codes if code.rematerializable))
    size = -1
    while size != len(found):
        size = len(found)
        for code in codes:
            if not code.rematerializable or not code.uses <= found:
                found -= code.defs
    return found


def recomputed(again: Mapping[Register, Code], needed: set[Register]) -> tuple[list[str], list[str]]:
    """Return C that computes registers again: once for the warp, and in each lane."""
    order: dict[Register, Code] = {}

    def add(register: Register) -> None:
        if register not in order:
            code = again[register]
            for used in sorted(code.uses, key=lambda r: r.name):
                add(used)
            order[register] = code

    for register in sorted(needed, key=lambda r: r.name):
        add(register)
    whole: list[str] = []
    lanes: list[str] = []
    varying: set[Register] = set()
    for register, code in order.items():
        text = f"{c_type(register.width)} {register.name}; {code.text}"
        if _LANE.search(code.text) or code.uses & varying:
            varying.add(register)
            lanes.append(text)
        else:
            whole.append(text)
    return whole, lanes
