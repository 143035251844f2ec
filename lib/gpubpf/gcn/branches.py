"""Find where lanes diverge: conditional branches of waves, and instructions that switch lanes off.

    for instruction, branch in branches(block, wave=64): …    # branch: a GcnBranch; None if its lanes are not known

A wave takes a branch as a whole. If only some lanes fulfil a condition, the compiler switches the others off in EXEC, and often adds
`s_cbranch_execz`, in case no lane is left. The lanes diverge where EXEC changes: before that, all of them are in EXEC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from gpubpf.gcn.calls import sgprs, use
from gpubpf.gcn.comgr import GcnInstruction
from gpubpf.gcn.kernel_code import writes_exec
from gpubpf.lower.amdgcn import OTHERS, WHOLE
from gpubpf.record import Record

_EXEC = ("exec", "exec_lo")
# Assembly text that puts a mask other than 0 into two SGPRs if the flag of a whole wave's branch (SCC, VCC) is not 0.
_SCC, _VCC = "s_cselect_b64 {pair}, -1, 0", "s_mov_b64 {pair}, vcc"
_OF_WAVES = {
    "s_cbranch_scc0": (_SCC, WHOLE | OTHERS),
    "s_cbranch_scc1": (_SCC, WHOLE),
    "s_cbranch_vccz": (_VCC, WHOLE | OTHERS),
    "s_cbranch_vccnz": (_VCC, WHOLE),
}
_ON_EXEC = ("s_cbranch_execz", "s_cbranch_execnz")
_AND = re.compile(r"s_and(n2)?_b(32|64)")
_MOVE = re.compile(r"s_mov_b(32|64)")
_SAVING = re.compile(r"s_and(n1)?_(?:saveexec|wrexec)_b(32|64)")
_COMPARE = re.compile(r"v_cmpx_(\w+)_(e32|e64|sdwa)")
# Instructions that switch on the lanes of another path, or all lanes.
_SWITCHES_ON = re.compile(r"s_(?:xor|or)_b|s_(?:or|andn2)_(?:saveexec|wrexec)_b|s_mov_b\d+ exec\w*, -1$")


class GcnBranch(Record):
    """How a place where lanes diverge gets its mask.

    text   assembly text, with placeholders for the registers of the mask
    facts  how to read the mask: flags `amdgcn.WHOLE` and `amdgcn.OTHERS`
    """

    text: str
    facts: int

    def mask(self, sgpr: int) -> str:
        """Return the text that puts the mask into the pair of SGPRs from `sgpr` on. The text changes no flags.

        It must stand before the instruction where the lanes diverge.
        """
        return self.text.format(pair=f"s[{sgpr}:{sgpr + 1}]", one=f"s{sgpr}")


def branches(block: Sequence[GcnInstruction], wave: int) -> Iterator[tuple[GcnInstruction, GcnBranch | None]]:
    """Yield the instructions of a basic block at which lanes diverge, each with its `GcnBranch`.

    Yield None instead of the `GcnBranch` if the lanes are not known before the instruction.

    wave: lanes per wave
    """
    for number, instruction in enumerate(block):
        if instruction.name in _OF_WAVES:
            yield instruction, GcnBranch(*_OF_WAVES[instruction.name])
        elif writes_exec(instruction) and not _SWITCHES_ON.match(
            f"{instruction.name} {instruction.operands}"
        ):
            jump = _branch_on_exec(block[number + 1 :])
            if (kept := _kept(instruction, wave, block[:number])) is not None:
                text, others = kept
                yield instruction, GcnBranch(text, OTHERS if others == (jump == "s_cbranch_execnz") else 0)
            elif jump:
                yield instruction, None


def is_of_waves(instruction: GcnInstruction) -> bool:
    """Return whether an instruction is a conditional branch that all lanes of a wave take, or none."""
    return instruction.name in _OF_WAVES


def _branch_on_exec(instructions: Iterable[GcnInstruction]) -> str:
    """Return the name of the next branch on EXEC; "" if there is none before EXEC changes."""
    found = next((one for one in instructions if one.name in _ON_EXEC or writes_exec(one)), None)
    return found.name if found is not None and found.name in _ON_EXEC else ""


def _kept(
    instruction: GcnInstruction, wave: int, before: Sequence[GcnInstruction]
) -> tuple[str, bool] | None:
    """Return the text that puts a mask into SGPRs, and whether the instruction switches off the lanes in the mask.

    If not, the instruction switches off all lanes that are not in the mask. Return None if it does something else.

    before: the instructions before it in its block
    """
    name, operands = instruction.name, instruction.operands.split(", ")
    if match := _COMPARE.fullmatch(name):
        compare, encoding = match.groups()
        encoding = "sdwa" if encoding == "sdwa" else "e64"
        if len(operands) == 2:  # GFX9 has its result as the first operand
            return f"v_cmp_{compare}_{encoding} {{one}}, {instruction.operands}", False
    elif match := _SAVING.fullmatch(name) or (_AND.fullmatch(name) if operands[1] in _EXEC else None):
        return _copied(operands[-1], match[2], wave, bool(match[1]))
    elif (match := _MOVE.fullmatch(name)) and operands[1] in _parts(before):
        return _copied(operands[1], match[1], wave, False)
    return None


def _copied(mask: str, bits: str, wave: int, others: bool) -> tuple[str, bool] | None:
    to = "{pair}" if bits == "64" else "{one}"
    return (f"s_mov_b{bits} {to}, {mask}", others) if int(bits) == wave else None


def _parts(before: Sequence[GcnInstruction]) -> set[str]:
    """Return the SGPRs that hold a part of EXEC, computed by `s_and_b64`, after these instructions.

    Without optimization (-O0), compilers move such a register to EXEC.
    """
    copies, parts = set(_EXEC), set[str]()
    for instruction in before:
        if writes_exec(instruction):
            copies, parts = set(_EXEC), set()
            continue
        result, *values = instruction.operands.split(", ")
        of_exec, written = not copies.isdisjoint(values), use(instruction)[0]
        copies, parts = ({one for one in known if not sgprs(one) & written} for known in (copies, parts))
        if of_exec and _MOVE.fullmatch(instruction.name):
            copies.add(result)
        elif of_exec and instruction.name in ("s_and_b64", "s_and_b32"):
            parts.add(result)
    return parts
