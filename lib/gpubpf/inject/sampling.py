"""Decide whether a thread's block or warp runs the programs, at the start of each kernel and instrumented function (ebpf/sampling.py).

`choice(unit, counts)` returns the code. It sets GROUP and the predicate SKIPS. SKIPS chooses a kernel's body (split.py); in
functions, and in kernels with a single body, probes test SKIPS.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from gpubpf.ebpf.maps import GROUPS, SAMPLED
from gpubpf.ebpf.sampling import OF_LAUNCH, OF_UNIT, PARAMETER, ROUND_1, ROUND_2, Unit
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.lower.numbers import BLOCK, THREAD, WARP, WORDS

from .values import PtxProbe

SKIPS = "%gpubpf_0skips"  # a predicate: this thread runs no program
GROUP = "%gpubpf_0group"  # the hash of the thread's block or warp

_LAUNCH = (Argument("launch", "b64", "launch"), Argument("replay", "b64", "replay"))
_PARAMETER = tuple(
    Argument(name, "b32", "param", PARAMETER, offset=offset, width=4)
    for name, offset in (("limit", 0), ("seed", 4))
)
_COUNTS = Argument("base", "b64", "map_base", SAMPLED)
_HASH = (
    "setp.eq.u64 %is, %gpubpf_replay, 0;",
    "@%is bra $gpubpf_known;",
    "ld.global.u64 %first, [%gpubpf_replay];",
    "add.s64 %gpubpf_launch, %gpubpf_launch, %first;",
    "$gpubpf_known:",
    "cvt.u32.u64 %size, %gpubpf_launch;",
    f"mad.lo.u32 %size, %size, {OF_LAUNCH}, %gpubpf_seed;",
    f"mul.lo.u32 %unit, %unit, {OF_UNIT};",
    "xor.b32 %unit, %unit, %size;",
    "shr.u32 %more, %unit, 16;",
    "xor.b32 %unit, %unit, %more;",
    f"mul.lo.u32 %unit, %unit, {ROUND_1};",
    "shr.u32 %more, %unit, 15;",
    "xor.b32 %unit, %unit, %more;",
    f"mul.lo.u32 %unit, %unit, {ROUND_2};",
    "shr.u32 %more, %unit, 16;",
    f"xor.b32 {GROUP}, %unit, %more;",
    f"setp.gt.u32 {SKIPS}, {GROUP}, %gpubpf_limit;",
)
# All lanes of a warp agree anyway. The vote tells ptxas so, and it adds no reconvergence code to the branches on SKIPS.
_UNIFORM = ("activemask.b32 %more;", f"vote.sync.any.pred {SKIPS}, {SKIPS}, %more;")
_COUNT = (
    "setp.ne.u32 %is, %own, 0;",
    "@%is bra $gpubpf_counted;",
    f"and.b32 %more, {GROUP}, {GROUPS - 1};",
    "mad.wide.u32 %gpubpf_base, %more, 8, %gpubpf_base;",
    "red.global.add.u64 [%gpubpf_base], 1;",
)


@functools.cache
def choice(unit: Unit, counts: bool) -> Fragment:
    """Return the code that sets SKIPS and GROUP. The caller declares these registers.

    The code is a fragment because it takes its arguments from the launch block, like a program.

    unit: what is sampled, blocks or warps
    counts: whether to count the chosen units in SAMPLED
    """
    lines = ["{", WORDS, ".reg .b64 %first;", ".reg .pred %is;"]
    lines += [*(BLOCK if unit == "block" else WARP), *_HASH]
    lines += _UNIFORM if unit == "warp" else ()
    if counts:
        first = THREAD if unit == "block" else ("mov.u32 %own, %laneid;",)
        lines += [f"@{SKIPS} bra $gpubpf_counted;", *first, *_COUNT, "$gpubpf_counted:"]
    arguments = (*_LAUNCH, *_PARAMETER, *((_COUNTS,) if counts else ()))
    return Fragment(f"choose_{unit}", "\n".join([*lines, "}"]), arguments)


def units(probes: Iterable[Sequence[PtxProbe]]) -> tuple[Unit, ...]:
    """Return the units that sampled programs are chosen by: none or one."""
    return tuple(dict.fromkeys(p.sampled for some in probes for p in some if p.sampled))
