"""Compute the numbers of the thread, its block and its warp in PTX. The instructions use the registers of WORDS."""

from __future__ import annotations

WORDS = ".reg .b32 %unit, %size, %more, %own;"
THREAD = (
    "mov.u32 %own, %tid.z;",
    "mov.u32 %size, %ntid.y;",
    "mov.u32 %more, %tid.y;",
    "mad.lo.u32 %own, %own, %size, %more;",
    "mov.u32 %size, %ntid.x;",
    "mov.u32 %more, %tid.x;",
    "mad.lo.u32 %own, %own, %size, %more;",  # the thread's number in its block
)
BLOCK = (
    "mov.u32 %unit, %ctaid.z;",
    "mov.u32 %size, %nctaid.y;",
    "mov.u32 %more, %ctaid.y;",
    "mad.lo.u32 %unit, %unit, %size, %more;",
    "mov.u32 %size, %nctaid.x;",
    "mov.u32 %more, %ctaid.x;",
    "mad.lo.u32 %unit, %unit, %size, %more;",
)
WARP = (
    *BLOCK,
    *THREAD,
    "mov.u32 %more, %ntid.x;",
    "mov.u32 %size, %ntid.y;",
    "mul.lo.u32 %size, %size, %more;",
    "mov.u32 %more, %ntid.z;",
    "mad.lo.u32 %size, %size, %more, 31;",
    "shr.u32 %size, %size, 5;",  # the warps of a block
    "shr.u32 %more, %own, 5;",
    "mad.lo.u32 %unit, %unit, %size, %more;",
)


def global_warp(register: str) -> str:
    """Return a scope that puts the number of the warp in its grid into a 32-bit register."""
    return "\n".join(["{", WORDS, *WARP, f"mov.b32 {register}, %unit;", "}"])
