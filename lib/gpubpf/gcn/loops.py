"""Find the loops of a kernel's machine code, and what decides whether a loop ends (see ptx/loop_ends.py).

loops = GcnLoops(body)
loops.ends          for the address at which all lanes of the loop's first block are active: what ends the loop
loops.polled        the addresses of the loads and atomics whose value decides whether a loop ends

Lanes leave a loop by EXEC: a turn adds the lanes that are done to a mask, takes the mask from EXEC, and the loop ends when EXEC is 0.
Such masks depend on themselves, but they do not make a loop end: with the same loaded values, each turn gives the same mask.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpubpf.gcn import calls
from gpubpf.gcn.access import GcnAccess, accesses, is_memory
from gpubpf.gcn.comgr import GcnInstruction
from gpubpf.gcn.kernel_code import KernelCode, entered, writes_exec
from gpubpf.gcn.work import KINDS
from gpubpf.ptx.loop_ends import COUNTS, NEVER, VALUE, LoopEnds, cycles

_REGISTER = re.compile(r"\b([sva])(?:(\d+)\b|\[(\d+):(\d+)\])|\b(vcc|exec|scc|m0)(?:_lo|_hi)?\b")
_WITHOUT_RESULT = re.compile(
    r"s_(?:cmp|bitcmp|setpc|store|buffer_store|scratch_store|atomic|set|cbranch|branch|waitcnt|nop|sleep|barrier|endpgm|sendmsg|dcache"
    r"|inst_pref|clause|icache|setprio|trap|ttrace|incperf|decperf)|\w+_store_|ds_write|buffer_(?:wb|inv|gl)|exp|v_nop"
)
_TWO_RESULTS = re.compile(r"v_(?:\w+_co_|div_scale|mad_[iu]64|swap)")
_KEEPS_A_PART = re.compile(r"v_(?:\w*(?:mac|fmac|dot\w*c)_|writelane)|\w+(?:_dpp|_sdwa|_d16)|s_cmov")
_SCC_WRITERS = re.compile(
    r"s_(?:cmp|bitcmp|add|sub|min|max|and|or|xor|andn2|orn2|nand|nor|xnor|not|lsh|ash|bfe|abs|wqm|quadmask|bcnt|addk|cmpk|andn1|orn1)"
)
_SCC_READERS = re.compile(r"s_(?:cbranch_scc|cselect|addc|subb|cmov)")
# Instructions that give the same mask again if their other operands stay the same.
_OF_MASKS = re.compile(
    r"s_(?:and|or|andn2|orn2|mov)_b(?:32|64)$|s_\w+_saveexec_b(?:32|64)$|s_\w+_wrexec_b(?:32|64)$"
)
CHANGING = re.compile(
    r"s_(?:memtime|memrealtime|getreg_b32 (?!.*SH_MEM_BASES)|get_waveid|sendmsg|getpc|call|swappc)|ds_(?:append|consume|ordered)"
    r"|image_|v_writelane"
)
SCALAR_LOAD = re.compile(r"s_(?:buffer_|scratch_)?load_")
_ONES = re.compile(r"(?:s_mov_b\d+ \S+, (?:exec\w*|-1)|s_and_b\d+ \S+, (?:exec\w*, -1|-1, exec\w*))$")
_OF_VCC = {"s_cbranch_vccnz": True, "s_cbranch_vccz": False}


def polled_access(instruction: GcnInstruction) -> GcnAccess | None:
    """Return the access of a load, or of an atomic with a result, whose value of at most 8 bytes a probe can read; None for others."""
    found = accesses(instruction, False)
    if len(found) != 1 or found[0].kind == "store" or "_d16" in instruction.name:
        return None
    (one,) = found
    result = re.match(r"v(?:\d+|\[\d+:\d+\]),", instruction.operands)
    has_result = one.kind == "load" or " glc" in instruction.operands or "_rtn_" in instruction.name
    return one if result and has_result and one.width <= 8 and one.space != "local" else None


def operands_of_atomic(instruction: GcnInstruction) -> tuple[int | None, ...]:
    """Return the VGPRs of an atomic's operands: two with what it stores, then two with what it compares with memory.

    None: there is no such VGPR.
    """
    (access,) = accesses(instruction, False)
    words = access.width // 4
    given = [
        n for operand in instruction.operands.split(", ")[2:4] if (n := _first_vgpr(operand)) is not None
    ]
    stored, compared = given[0], None
    if "_cmpswap" in instruction.name:  # the value to store, then the value to compare with
        compared = stored + words
    elif "_cmpst" in instruction.name:  # in LDS, the other way round
        compared, stored = given
    return tuple(
        None if first is None or word >= words else first + word
        for first in (stored, compared)
        for word in range(2)
    )


def _first_vgpr(operand: str) -> int | None:
    match = re.match(r"v\[?(\d+)", operand)
    return int(match[1]) if match else None


class _Use(NamedTuple):
    """The registers that an instruction writes and reads, by name: v7, s4, a0, vcc, exec, scc, m0."""

    writes: frozenset[str]
    reads: frozenset[str]


def _names(operands: Sequence[str]) -> Iterator[str]:
    for kind, one, first, last, other in _REGISTER.findall(", ".join(operands)):
        if other:
            yield other
        else:
            yield from (f"{kind}{n}" for n in range(int(one or first), int(one or last) + 1))


def _use(instruction: GcnInstruction) -> _Use:
    name, operands = instruction.name, instruction.operands.split(", ")
    # From GFX10 on, v_cmpx has no result but EXEC.
    is_without = _WITHOUT_RESULT.match(name) or (name.startswith("v_cmpx") and len(operands) == 2)
    results = 0 if is_without else 1 + bool(_TWO_RESULTS.match(name))
    if KINDS["atomics"].match(name) and polled_access(instruction) is None:
        results = 0
    writes, reads = set(_names(operands[:results])), set(_names(operands[results:]))
    if _KEEPS_A_PART.match(name):
        reads |= writes
    if writes_exec(instruction):
        writes.add("exec")
        reads |= {"exec"} if "saveexec" in name or "wrexec" in name or name.startswith("v_cmpx") else set()
    writes |= {"scc"} if _SCC_WRITERS.match(name) else set()
    reads |= {"scc"} if _SCC_READERS.match(name) else set()
    reads |= {"vcc"} if name in _OF_VCC or name.startswith("v_div_fmas") else set()
    if not name.startswith("s_"):
        reads.discard("exec")  # which lanes compute does not change what a lane computes
    return _Use(frozenset(writes), frozenset(reads))


class GcnLoops(LoopEnds):
    """The loops of a kernel and of the functions that it calls.

    wide_masks: comgr names only the lower register of a mask. Then loops that can end are not understood.
    """

    def __init__(self, body: KernelCode, wide_masks: bool = False) -> None:
        self._blocks_of = list(body.blocks())
        self._numbers = {block[0].address: number for number, block in enumerate(self._blocks_of)}
        self._targets, self.understood = body.branches, not wide_masks
        # What precedes a function in the file does not run before it.
        self._begins = {region.begin for region in body.regions}
        self._kernel_begins = body.regions[0].begin
        super().__init__(
            [tuple(self._after(number)) for number in range(len(self._blocks_of))],
            [entered(block).address for block in self._blocks_of],
            lambda of: _Loop(self, of).ends(),
        )

    def block(self, number: int) -> list[GcnInstruction]:
        """Return the instructions of a block."""
        return self._blocks_of[number]

    def ways(self, number: int) -> Sequence[int]:
        """Return the blocks that may follow a block."""
        return self._successors[number]

    @functools.cached_property
    def functions(self) -> list[int]:
        """The first block of each function that the kernel calls."""
        return [self._numbers[begin] for begin in sorted(self._begins - {self._kernel_begins})]

    @functools.cached_property
    def before(self) -> list[list[int]]:
        """The blocks that may precede each block."""
        return self._before

    def _after(self, number: int) -> Iterator[int]:
        last = self._blocks_of[number][-1]
        taken = _OF_VCC.get(last.name)
        always = taken is not None and self._is_ones(number, len(self._blocks_of[number]) - 1)
        target = self._targets.get(last.address)
        if target is not None and not (always and not taken):
            yield self._numbers[target]
        following = number + 1
        if last.name in calls.NO_WAY_ON or (always and taken) or following == len(self._blocks_of):
            return
        if self._blocks_of[following][0].address not in self._begins:
            yield following

    def _is_ones(self, number: int, at: int) -> bool:
        """Return whether VCC has all lanes of EXEC at a branch, so that the branch goes one way. Compilers make endless loops so."""
        todo, seen = [(number, at, "vcc")], set[tuple[int, int, str]]()
        while todo:
            here = todo.pop()
            if here in seen:
                continue
            seen.add(here)
            block, at, name = here
            found = next(
                (
                    one
                    for one in range(at - 1, -1, -1)
                    if name in self.uses[block][one].writes or writes_exec(self.block(block)[one])
                ),
                None,
            )
            if found is None:
                earlier = self._may_precede[block]
                if not earlier:
                    return False
                todo += [(one, len(self.block(one)), name) for one in earlier]
                continue
            text = f"{self.block(block)[found].name} {self.block(block)[found].operands}"
            if writes_exec(self.block(block)[found]):
                return False
            if _ONES.match(text):
                continue
            if copied := re.fullmatch(r"s_mov_b\d+ \S+, (vcc\w*|s\d+|s\[\d+:\d+\])", text):
                todo.append((block, found, next(_names([copied[1]]))))
            else:
                return False
        return True

    @functools.cached_property
    def _may_precede(self) -> list[list[int]]:
        """The blocks that may precede each block, whatever the conditions of branches are."""
        found: list[list[int]] = [[] for _ in self._blocks_of]
        for number, block in enumerate(self._blocks_of):
            last = block[-1]
            if (target := self._targets.get(last.address)) is not None:
                found[self._numbers[target]].append(number)
            following = number + 1
            if last.name not in calls.NO_WAY_ON and following < len(self._blocks_of):
                found[following].append(number)
        return found

    @functools.cached_property
    def uses(self) -> list[list[_Use]]:
        """The registers of each instruction, by block."""
        return [[_use(one) for one in block] for block in self._blocks_of]


_At = tuple[int, int]  # a block, and the place of an instruction in it


class _Loop:
    """One loop, by its blocks."""

    def __init__(self, loops: GcnLoops, blocks: frozenset[int]) -> None:
        self.loops, self.blocks = loops, blocks
        self.polled: set[int] = set()
        self.unknown = False

    def ends(self) -> tuple[str, frozenset[int]]:
        """Return what ends the loop, and the addresses of the loads and atomics that decide that."""
        every = [(one, at) for number in self.blocks for at, one in enumerate(self.loops.block(number))]
        if any(one.name in (calls.CALL, "s_call_b64") for one, _ in every):
            return "", frozenset()
        leaving = [
            n for n in self.blocks if not self.blocks.issuperset(self.loops.ways(n)) or not self.loops.ways(n)
        ]
        if not leaving:
            return NEVER, frozenset()
        if not self.loops.understood:
            return "", frozenset()
        ways_out = [at for number in leaving for at in self._conditions(number)]
        if self._is_carried(ways_out):
            return ("" if self.unknown else COUNTS), frozenset()
        within = [at for number in self.blocks for at in (*self._conditions(number), *self._masks(number))]
        if self._is_carried(within) or self.unknown or not self.polled:
            return "", frozenset()
        others = ("stores", "atomics", "barriers")
        if any(
            one.address not in self.polled and any(KINDS[kind].match(one.name) for kind in others)
            for one, _ in every
        ):
            return "", frozenset()
        return VALUE, frozenset(self.polled)

    def _conditions(self, number: int) -> list[_At]:
        """Return the conditional branch of a block, as a list."""
        last = len(self.loops.block(number)) - 1
        return [(number, last)] if self.loops.block(number)[last].name.startswith("s_cbranch_") else []

    def _masks(self, number: int) -> list[_At]:
        """Return the instructions of a block that change EXEC."""
        return [(number, at) for at, one in enumerate(self.loops.block(number)) if writes_exec(one)]

    def _is_carried(self, roots: list[_At]) -> bool:
        """Return whether any of these instructions depends on a value that differs from turn to turn: one that depends on itself.

        Keep the loads and atomics that they depend on, and whether the analysis could not follow a value.
        """
        depends: dict[_At, list[_At]] = {}
        todo = list(roots)
        while todo:
            here = todo.pop()
            if here not in depends:
                depends[here] = list(self._depends(here))
                todo += depends[here]
        # What depends on itself by masks alone stays the same, so only circles with another instruction count.
        numbers = {at: n for n, at in enumerate(depends)}
        places = list(depends)
        circles = cycles([[numbers[one] for one in depends[at]] for at in places])
        return any(not _OF_MASKS.match(self._at(places[n]).name) for n in circles)

    def _at(self, at: _At) -> GcnInstruction:
        return self.loops.block(at[0])[at[1]]

    def _depends(self, at: _At) -> Iterator[_At]:
        """Yield the instructions of the loop that may have written what an instruction reads."""
        one = self._at(at)
        name = one.name
        if CHANGING.match(f"{name} {one.operands}"):
            self.unknown = True
        reads = self.loops.uses[at[0]][at[1]].reads
        if name.startswith(("s_cbranch_exec",)):
            reads = reads | {"exec"}
        if is_memory(one):
            if polled_access(one) is None:
                self.unknown = True
            else:
                self.polled.add(one.address)
        elif SCALAR_LOAD.match(name) and " glc" in one.operands:
            self.unknown = True
        for register in reads:
            yield from self._writers(at, register)

    def _writers(self, at: _At, register: str) -> Iterator[_At]:
        """Yield the instructions of the loop that may have written a register last."""
        todo, seen = [at], set[int]()
        while todo:
            number, before = todo.pop()
            uses = self.loops.uses[number]
            for place in range(before - 1, -1, -1):
                if register in uses[place].writes:
                    yield number, place
                    if not self._is_partial(number, place):
                        break
            else:
                for earlier in self.loops.before[number]:
                    if earlier in self.blocks and earlier not in seen:
                        seen.add(earlier)
                        todo.append((earlier, len(self.loops.block(earlier))))

    def _is_partial(self, number: int, place: int) -> bool:
        """Return whether an instruction may write a register in some of the lanes only that are in the loop."""
        return not self.loops.block(number)[place].name.startswith("s_") and number in self._narrowed

    @functools.cached_property
    def _narrowed(self) -> frozenset[int]:
        """The blocks of the loop in which EXEC may lack lanes of the loop: after s_and_saveexec, until EXEC is restored."""
        after: dict[int, int] = {}
        head = min(self.blocks)
        todo, before = [head], {head: 0}
        while todo:
            number = todo.pop()
            depth = before[number]
            for one in self.loops.block(number):
                if "saveexec" in one.name:
                    depth += 1
                elif one.name.startswith("s_or_b") and one.operands.startswith("exec"):
                    depth = max(depth - 1, 0)
            after[number] = min(depth, len(self.blocks))
            for way in self.loops.ways(number):
                if way in self.blocks and way != head and before.get(way, -1) < after[number]:
                    before[way] = after[number]
                    todo.append(way)
        return frozenset(n for n in self.blocks if before.get(n, 0) > 0 or after.get(n, 0) > 0)
