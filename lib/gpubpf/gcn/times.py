"""Assembly text that records the time at which each lane leaves a kernel, and passes it to the exit probe.

Before an instruction at which lanes may leave (leaving.py), the active lanes record the time. Lanes that stay overwrite it later. At
the kernel's end, the probe runs once per group of lanes with the same time, the earliest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpubpf.gcn.start import SAVED, Save, arrive, give
from gpubpf.lower import amdgcn
from gpubpf.lower.launch_block import align
from gpubpf.record import Record

# Marks for hipsim's virtual clock. Code between BEGIN and END takes no time. BEFORE begins code that is inserted before an instruction
# where lanes leave, EXIT begins code in place of the kernel's end. Clocks in such code show the time after the instruction or the end.
UNTIMED_BEGIN, UNTIMED_END, UNTIMED_BEFORE, UNTIMED_EXIT = 0x6700, 0x6780, 0x6800, 0x6880
_READ = {"clock": "s_memtime", "globaltimer": "s_memrealtime"}
_NUMBER = 0x12345678  # a placeholder that assembles to a 32-bit literal
_MASKS = 4  # SGPRs for the mask of remaining lanes, and for the earliest time


class Times(Record):
    """Where times are kept.

    vgprs  each requested name of `amdgcn.TIMES` → the first of two VGPRs
    site   the VGPR for the number of the site where a lane left
    sgpr   the first free SGPR for reading the time. None: no SGPR is free, so lanes of the prologue's save VGPR save s0 and the
           following SGPRs
    """

    vgprs: Mapping[str, int]
    site: int
    save: Save
    sgpr: int | None

    def keep(self) -> list[str]:
        """Return the text with which the active lanes record the time. The last four bytes of its code are the site's number.

        The text changes no flags, and waits for scalar loads.
        """
        first = 0 if self.sgpr is None else self.sgpr
        used = range(first, first + 2 * len(self.vgprs))
        lanes = f"v{self.save.vgpr}"
        lines = []
        if self.sgpr is None:  # the kernel may be loading into these SGPRs
            lines = ["s_waitcnt lgkmcnt(0)"] + [f"v_writelane_b32 {lanes}, s{n}, {SAVED + n}" for n in used]
        lines += [f"{_READ[name]} s[{at}:{at + 1}]" for name, at in zip(self.vgprs, used[::2], strict=True)]
        lines.append("s_waitcnt lgkmcnt(0)")
        for vgpr, at in zip(self.vgprs.values(), used[::2], strict=True):
            lines += [f"v_mov_b32 v{vgpr}, s{at}", f"v_mov_b32 v{vgpr + 1}, s{at + 1}"]
        if self.sgpr is None:
            lines += [f"v_readlane_b32 s{n}, {lanes}, {SAVED + n}" for n in used] + ["s_nop 4"]
        return [*lines, f"v_mov_b32 v{self.site}, {_NUMBER:#x}"]


class Groups(Record):
    """The site at a kernel's end, in three texts.

    head  follows the code of `Times.keep`
    body  prepares the call of the probe for the next group of lanes
    tail  follows the call; behind it are a branch back to `body` if SCC is set, and the kernel's end
    """

    head: list[str]
    body: list[str]
    tail: list[str]


def groups(times: Times, gpu: str, wave: int, probe_sgprs: int, counters: Sequence[int]) -> Groups:
    """Return the site at a kernel's end."""
    save = times.save
    left, first = _masks(save, probe_sgprs), _masks(save, probe_sgprs) + 2
    exec_, vcc, word = ("exec", "vcc", "b64") if wave == 64 else ("exec_lo", "vcc_lo", "b32")
    compared = "vcc" if gpu.startswith("gfx9") else "vcc_lo"  # comgr's name on GFX10, also for 64-lane waves
    lanes = f"s[{left}:{left + 1}]" if wave == 64 else f"s{left}"
    earliest = f"s[{first}:{first + 1}]"
    key = next(iter(times.vgprs.values()))  # the clock if requested: it is finer than globaltimer
    head = [*arrive(save, wave), f"s_mov_{word} {lanes}, {exec_}"]
    body = [
        f"s_mov_{word} {exec_}, {lanes}",
        "again:",
        f"v_readfirstlane_b32 s{first}, v{key}",
        f"v_readfirstlane_b32 s{first + 1}, v{key + 1}",
        f"v_cmp_gt_u64 {compared}, {earliest}, v[{key}:{key + 1}]",
        "s_cbranch_vccz found",
        f"s_mov_{word} {exec_}, {vcc}",
        "s_branch again",
        "found:",
        f"v_cmp_eq_u64 {compared}, {earliest}, v[{key}:{key + 1}]",
        f"s_mov_{word} {exec_}, {vcc}",
        f"s_andn2_{word} {lanes}, {lanes}, {vcc}",
    ]
    for name, at in zip(amdgcn.TIMES, range(amdgcn.TIME, amdgcn.TIME + 4, 2), strict=True):
        if name in times.vgprs:
            body += [f"v_readfirstlane_b32 s{at + n}, v{times.vgprs[name] + n}" for n in range(2)]
    body += give(save, f"v_readfirstlane_b32 s{amdgcn.SITE}, v{times.site}", counters)
    return Groups(head, body, [f"s_cmp_lg_u{wave} {lanes}, 0"])


def _masks(save: Save, probe_sgprs: int) -> int:
    """Return the first of the SGPRs that a site keeps while a probe runs."""
    return align(probe_sgprs if save.vgpr is not None else save.sgpr + SAVED, 2)


def site_sgprs(save: Save, probe_sgprs: int) -> int:
    """Return the number of SGPRs that a wave needs for a site."""
    return _masks(save, probe_sgprs) + _MASKS
