"""Find what it depends on which lanes a kernel's machine code switches off (see ptx/causes.py).

causes = GcnCauses(loops, kernel, scalar)
causes.of(instruction)     "data", "grid", "lane", "" …

Registers are used for many values, so the analysis follows the order of instructions: what each register depends on before an
instruction, whichever way leads there. Lanes that are switched off keep the values of their VGPRs, so once they are switched on again,
a VGPR depends on both. Like that of PTX, the analysis ignores that a branch decides which instructions execute, except in masks that
are made of EXEC.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Set

from gpubpf.gcn import calls
from gpubpf.gcn.access import is_memory
from gpubpf.gcn.branches import is_of_waves
from gpubpf.gcn.code_object import GcnKernel
from gpubpf.gcn.comgr import GcnInstruction
from gpubpf.gcn.kernel_code import writes_exec
from gpubpf.gcn.loops import CHANGING, SCALAR_LOAD, GcnLoops
from gpubpf.ptx.causes import OF_BLOCK, OF_DATA, OF_THREAD, OF_UNKNOWN, UNIFORM, named

_OTHER_LANES = re.compile(r"\w+_dpp\d*$|ds_(?:swizzle|b?permute)|v_permlane")
_OF_MASKS = re.compile(r"s_(?:and|andn2)_b(?:32|64)$")  # EXEC only limits them to active lanes
_SAVES = re.compile(r"s_\w+_saveexec_b(?:32|64)$|s_mov_b(?:32|64)$")
_SWITCHES_ON = re.compile(r"s_(?:or|mov)_b(?:32|64) exec(?:_lo)?, (?:exec(?:_lo)?, )?s\[?(\d+)")
_ALL = re.compile(r"s_mov_b(?:32|64) exec(?:_lo)?, -1$")
_LOST_IN_CALLS = 32  # the numbers of SGPRs, and of VGPRs, that a function may change without restoring them

# What each register depends on, as bits; 0 if it is not there. "@s4": what EXEC depended on when it was saved in s4.
_State = dict[str, int]


class GcnCauses:
    """What the masks in a kernel and its functions depend on.

    scalar: the addresses of scalar loads that may read the program's memory
    """

    def __init__(self, loops: GcnLoops, kernel: GcnKernel, scalar: Set[int]) -> None:
        self._loops, self._kernel, self._scalar = loops, kernel, scalar

    def of(self, instruction: GcnInstruction) -> str:
        """Return what the lanes depend on that an instruction switches off, as `ptx.causes.Causes.of`.

        A branch on a condition of the whole wave parts no lanes.
        """
        if is_of_waves(instruction):
            return UNIFORM
        if not self._loops.understood:
            return ""
        return named(self._found.get(instruction.address, OF_UNKNOWN))

    @functools.cached_property
    def _found(self) -> dict[int, int]:
        """What the mask of each instruction that changes EXEC depends on, by the instruction's address."""
        begins = dict(self._starts())
        before: dict[int, _State] = {number: dict(state) for number, state in begins.items()}
        found: dict[int, int] = {}
        todo = list(before)
        while todo:
            number = todo.pop()
            after = self._through(number, dict(before[number]), found)
            for way in self._loops.ways(number):
                known = before.get(way)
                if known is None:
                    before[way] = dict(after)
                elif not _joins(known, after):
                    continue
                if way not in todo:
                    todo.append(way)
        return found

    def _starts(self) -> Iterator[tuple[int, _State]]:
        """Yield the block where the kernel begins, and those of its functions, whose arguments are unknown."""
        descriptor = self._kernel.descriptor
        state = dict.fromkeys(("v0", "v1", "v2"), OF_THREAD)
        for at in range(sum(descriptor.workgroup_ids)):
            state[f"s{descriptor.user_sgprs + at}"] = OF_BLOCK
        yield 0, state
        unknown = {f"{kind}{number}": OF_UNKNOWN for kind in "vs" for number in range(256)}
        for number in self._loops.functions:
            yield number, unknown

    def _through(self, number: int, state: _State, found: dict[int, int]) -> _State:
        """Return the state after a block, and keep in `found` what its masks depend on. state: before the block."""
        off: dict[
            str, _State
        ] = {}  # VGPRs when lanes were switched off in this block, by the register that has EXEC
        block = self._loops.block(number)
        for at, one in enumerate(block):
            use = self._loops.uses[number][at]
            reads = use.reads - {"exec"}
            depends = functools.reduce(int.__or__, (state.get(name, 0) for name in reads), 0)
            if writes_exec(one):
                found[one.address] = found.get(one.address, 0) | depends
                self._switch(one, use.writes - {"exec"}, depends, state, off, self._leaves(number, at))
                continue
            if one.name == calls.CALL:
                _returned(state)
                continue
            if "exec" in use.reads and not _OF_MASKS.match(one.name):
                depends |= state.get("exec", 0)
            own = self._brings(one)
            depends = own if one.name.startswith("v_readlane") else depends | own
            for name in use.writes:
                state[name] = depends
                if f"@{name}" in state and name not in reads:
                    del state[f"@{name}"]
            if one.operands.endswith((", exec", ", exec_lo")) and _SAVES.match(one.name):
                state |= {f"@{name}": state.get("exec", 0) for name in use.writes}
        return state

    def _leaves(self, number: int, at: int) -> bool:
        """Return whether the kernel ends for the lanes that an instruction of a block switches off."""
        jump = self._loops.block(number)[-1]
        if jump.name != "s_cbranch_execz" or any(map(writes_exec, self._loops.block(number)[at + 1 :])):
            return False
        return any(self._loops.block(way)[0].name == "s_endpgm" for way in self._loops.ways(number))

    @staticmethod
    def _switch(
        one: GcnInstruction,
        saved: Set[str],
        depends: int,
        state: _State,
        off: dict[str, _State],
        leaves: bool,
    ) -> None:
        """Change the state by an instruction that switches lanes on or off.

        saved: the registers that the instruction writes, except EXEC
        leaves: the kernel ends for lanes that are switched off, so the others do not meet them again
        """
        if match := _SWITCHES_ON.match(f"{one.name} {one.operands}"):
            register = f"s{match[1]}"
            state["exec"] = state.get(f"@{register}", state.get(register, 0))
            _joins(state, off.pop(register, {}))
            return
        if _ALL.match(f"{one.name} {one.operands}"):
            state["exec"] = 0
            return
        now = state.get("exec", 0)
        for name in saved:
            if _SAVES.match(one.name):
                state[name] = state[f"@{name}"] = now
                off[name] = {key: value for key, value in state.items() if key[0] == "v"}
            else:
                state[name] = now | depends
        if not leaves:
            state["exec"] = now | depends

    def _brings(self, one: GcnInstruction) -> int:
        """Return what the result of an instruction depends on besides the registers that it reads."""
        name = one.name
        if name.startswith("v_readlane"):  # also of SGPRs that are kept in lanes
            return OF_UNKNOWN
        if name.startswith("v_mbcnt"):
            return OF_THREAD
        if SCALAR_LOAD.match(name):
            return OF_DATA if one.address in self._scalar else 0
        if _OTHER_LANES.match(name) or CHANGING.match(f"{name} {one.operands}"):
            return OF_DATA
        if not is_memory(one):
            return 0
        may_be_local = self._kernel.descriptor.private_bytes and not name.startswith(("global_", "ds_"))
        return OF_UNKNOWN if may_be_local else OF_DATA


def _joins(state: _State, other: _State) -> bool:
    """Add another state to a state. Return whether that changed it."""
    changed = False
    for name, value in other.items():
        now = state.get(name, 0)
        if value & ~now:
            state[name] = now | value
            changed = True
    return changed


def _returned(state: _State) -> None:
    """Change the state by a call of a function."""
    for number in range(_LOST_IN_CALLS):
        state[f"v{number}"] = state[f"s{number}"] = OF_UNKNOWN
        state.pop(f"@s{number}", None)
    state["vcc"] = state["scc"] = OF_UNKNOWN
