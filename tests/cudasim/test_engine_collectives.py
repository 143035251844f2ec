"""Shuffles, votes and matches of whole and partial warps, and local memory, by the engine, against Python."""

from __future__ import annotations

import numpy as np
import pytest

from engine_device import Array, Device

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
MODES = ("up", "down", "bfly", "idx")
DISTANCES = (0, 1, 5, 16, 31)
CLAMPS = {
    "up": (0, 0x1800),
    "down": (31, 0x181F),
    "bfly": (31, 0x181F),
    "idx": (31, 0x181F),
}  # of 32 and of 8 lanes
FORMS = [(mode, distance, clamp) for mode in MODES for distance in DISTANCES for clamp in CLAMPS[mode]]


def shuffled(mode: str, lane: int, distance: int, clamp: int, threads: int) -> tuple[int, int] | None:
    """Return the lane whose value a lane gets, and the predicate (PTX ISA 9.7.9.6); None if that lane has exited."""
    segment, least = clamp >> 8, lane & clamp >> 8
    most = least | (clamp & 31 & ~segment)
    source = {
        "up": lane - distance,
        "down": lane + distance,
        "bfly": lane ^ distance,
        "idx": least | (distance & 31 & ~segment),
    }[mode]
    inside = source >= most if mode == "up" else source <= most
    source = source if inside else lane
    return (source, int(inside)) if source < threads else None


def body(constant: bool) -> str:
    lines = []
    for k, (mode, distance, clamp) in enumerate(FORMS):
        b, c, members = (str(distance), str(clamp), "-1") if constant else ("%b", "%c", "%m")
        if not constant:  # two definitions, so that the translator cannot know the value
            lines.append(f"mov.u32 %b, {distance}; mov.u32 %c, {clamp}; mov.b32 %m, -1;")
        lines.append(
            f"shfl.sync.{mode}.b32 %r2|%p1, %r1, {b}, {c}, {members}; selp.u32 %r3, 1000, 0, %p1;"
            f"add.u32 %r2, %r2, %r3; st.global.u32 [%rd2+{128 * k}], %r2;"
        )
    return "\n".join(lines)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("threads", [32, 20])
def test_every_shuffle(threads: int, constant: bool) -> None:
    device = Device(
        f"{HEAD}.visible .entry k(.param .u64 out) {{ .reg .b32 %r<9>, %b, %c, %m; .reg .b64 %rd<9>; .reg .pred %p<3>;\n"
        "ld.param.u64 %rd1, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd2, %r0, 4; add.u64 %rd2, %rd1, %rd2;\n"
        f"add.u32 %r1, %r0, 100;\n{body(constant)}\nret; }}"
    )
    out = Array(np.zeros((len(FORMS), 32), np.uint32))
    device.launch("k", 1, threads, out)
    for form, row in zip(FORMS, out.host.tolist(), strict=True):
        for lane, got in enumerate(row[:threads]):
            if (right := shuffled(form[0], lane, *form[1:], threads)) is not None:
                assert got == right[0] + 100 + 1000 * right[1], (form, lane)


@pytest.mark.parametrize("threads", [32, 20])
def test_votes_and_matches_of_the_lanes_that_are_together(threads: int) -> None:
    """Also in a function that lanes call from two places: the lanes of each place vote among themselves."""
    device = Device(
        f"{HEAD}"
        ".func (.reg .b32 %v) vote(.reg .b32 %x) { .reg .b32 %t, %s, %q; .reg .pred %p;\n"
        "activemask.b32 %t; setp.ne.u32 %p, %x, 7; vote.sync.ballot.b32 %v, !%p, %t;\n"
        "activemask.b32 %s; match.all.sync.b32 %q, %x, %s; shl.b32 %q, %q, 31; xor.b32 %v, %v, %q; ret; }\n"
        ".visible .entry k(.param .u64 out) { .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<3>;\n"
        "ld.param.u64 %rd1, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd2, %r0, 4; add.u64 %rd2, %rd1, %rd2;\n"
        "setp.lt.u32 %p1, %r0, 9; @%p1 bra first; call (%r1), vote, (%r0); bra done;\n"
        "first: call (%r1), vote, (%r0); done: st.global.u32 [%rd2], %r1;\n"
        "activemask.b32 %r2; setp.gt.u32 %p2, %r0, 3; vote.sync.ballot.b32 %r3, %p2, %r2; st.global.u32 [%rd2+128], %r3; ret; }"
    )
    out = Array(np.zeros((2, 32), np.uint32))
    device.launch("k", 1, threads, out)
    assert out.host[0, :threads].tolist() == [1 << 7] * 9 + [0] * (threads - 9)
    assert out.host[1, :threads].tolist() == [(1 << threads) - 16] * threads


@pytest.mark.parametrize("size", [16, 64, 100, 4096])
def test_each_lane_has_local_memory_of_its_own(size: int) -> None:
    device = Device(
        f"{HEAD}.visible .entry k(.param .u64 out) {{ .reg .b32 %r<9>; .reg .b64 %rd<9>; .local .align 16 .b8 mine[{size}];\n"
        "ld.param.u64 %rd1, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd2, %r0, 8; add.u64 %rd2, %rd1, %rd2;\n"
        "mov.u64 %rd3, mine; cvta.local.u64 %rd3, %rd3; add.u32 %r1, %r0, 1000;\n"
        f"st.local.u32 [mine], %r0; st.u32 [%rd3+{size - 4}], %r1; bar.sync 0;\n"
        f"ld.u32 %r2, [%rd3]; ld.local.u32 %r3, [mine+{size - 4}]; st.global.v2.u32 [%rd2], {{%r2, %r3}}; ret; }}"
    )
    out = Array(np.zeros((64, 2), np.uint32))
    device.launch("k", 1, 64, out)
    assert out.host.tolist() == [[lane, lane + 1000] for lane in range(64)]


def test_constants_in_registers() -> None:
    """A mov of a number may give its parts to several registers."""
    device = Device(
        f"{HEAD}.visible .entry k(.param .u64 out) {{ .reg .b32 %r<9>; .reg .b64 %rd<9>;\n"
        "ld.param.u64 %rd1, [out]; mov.b64 {%r1, %r2}, 0x200000001; mov.u32 %r3, 7; mov.u64 %rd2, -1;\n"
        "mov.b64 {%r4, %r5}, %rd2; shfl.sync.idx.b32 %r6, %r3, %r2, 31, -1;\n"
        "st.global.v4.u32 [%rd1], {%r1, %r2, %r5, %r6};\nret; }"
    )
    out = Array(np.zeros(4, np.uint32))
    device.launch("k", 1, 32, out)
    assert out.host.tolist() == [1, 2, 0xFFFFFFFF, 7]
