"""Loops that lanes run one after another give the results that lanes in lockstep give, and wait for other threads as before."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from cudasim.translate import translate
from engine_device import Array, Device

HEAD = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 flag)
{
.reg .pred %p<9>; .reg .b32 %r<30>; .reg .b64 %rd<20>;
ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [flag];
mov.u32 %r0, %tid.x; mul.wide.u32 %rd3, %r0, 4; add.u64 %rd4, %rd1, %rd3;
"""
END = "\nst.global.u32 [%rd4], %r1; ret; }\n"
# The steps (n/2 or 3n+1) until each number up to the thread's is 1, at most 3,001; plus 100,000 if n was odd an even number of times.
COLLATZ = """
mov.u32 %r1, 0; mov.u32 %r2, 1; setp.eq.u32 %p4, %r0, %r0;
NUMBERS: mov.u32 %r3, %r2;
STEPS: setp.eq.u32 %p1, %r3, 1; @%p1 bra NEXT;
    and.b32 %r4, %r3, 1; setp.eq.u32 %p2, %r4, 0; @%p2 bra EVEN;
    mad.lo.u32 %r3, %r3, 3, 1; not.pred %p4, %p4; bra COUNT;
EVEN: shr.u32 %r3, %r3, 1;
COUNT: add.u32 %r1, %r1, 1; setp.gt.u32 %p3, %r1, 3000; @%p3 bra DONE; bra STEPS;
NEXT: add.u32 %r2, %r2, 1; setp.le.u32 %p5, %r2, %r0; @%p5 bra NUMBERS;
DONE: selp.u32 %r6, 100000, 0, %p4; add.u32 %r1, %r1, %r6;
"""
# Warp 0 waits for warp 1. The loop that waits is closed by a way out of a loop that lanes run one after another.
WAITING = """
setp.ge.u32 %p3, %r0, 32; @%p3 bra SET; mov.u32 %r1, 0;
OUTER: ld.volatile.global.u32 %r5, [%rd2]; setp.ne.u32 %p1, %r5, 0;
INNER: @!%p1 bra OUTER;
add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 10; @%p2 bra INNER; bra END;
SET: mov.u32 %r1, 1; st.volatile.global.u32 [%rd2], %r1;
END:
"""
TOGETHER = """
mov.u32 %r1, 0; mov.u32 %r2, 0;
AGAIN: activemask.b32 %r3; popc.b32 %r3, %r3; add.u32 %r1, %r1, %r3;
add.u32 %r2, %r2, 1; setp.le.u32 %p1, %r2, %r0; @%p1 bra AGAIN;
"""


def result(body: str, threads: int, virtual: bool = False) -> list[int]:
    out = Array(np.zeros(threads, np.uint32))
    Device(HEAD + body + END, virtual=virtual).launch("k", 1, threads, out, Array(np.zeros(1, np.uint32)))
    return [int(value) for value in out.host]


def collatz(thread: int) -> int:
    steps, odd = 0, 0
    for number in range(1, max(thread, 1) + 1):
        while number != 1:
            odd += number % 2
            number = 3 * number + 1 if number % 2 else number // 2
            steps += 1
            if steps > 3000:
                return steps + 100_000 * (odd % 2 == 0)
    return steps + 100_000 * (odd % 2 == 0)


@pytest.mark.parametrize("virtual", [False, True])
def test_lanes_leave_a_nest_of_loops_in_several_ways_and_after_many_turns(virtual: bool) -> None:
    assert ("turns_ = 0" in translate(HEAD + COLLATZ + END, virtual)) == (not virtual)
    assert result(COLLATZ, 96, virtual) == [collatz(thread) for thread in range(96)]


def test_a_loop_that_waits_lets_the_other_warp_run() -> None:
    assert "turns_ = 0" in translate(HEAD + WAITING + END)
    assert result(WAITING, 64) == [10] * 32 + [1] * 32


def test_lanes_are_together_in_a_loop_that_asks_which_are() -> None:
    assert result(TOGETHER, 32) == [sum(32 - turn for turn in range(lane + 1)) for lane in range(32)]


@pytest.mark.every(4)
@pytest.mark.parametrize("meeting", ["", "bar.sync 0;"])
def test_the_search_for_loops_needs_little_memory(meeting: str) -> None:
    """Each of the 3,000 loops contains all that follow. If each was kept, the search alone would take 500 MB."""
    chain = "L0: add.u32 %r1, %r1, 1;" + "".join(
        f"L{k}: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, %r0; @%p1 bra L{k - 1};" for k in range(1, 3000)
    )
    tracemalloc.start()
    try:
        translate(f"{HEAD}mov.u32 %r1, 0; {chain} {meeting} bra L0; {END}")
        assert tracemalloc.get_traced_memory()[1] < 150e6
    finally:
        tracemalloc.stop()
