"""The engine's virtual clock: what threads read, when they end, and how long kernels take."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cudasim.translate import translate
from engine_device import Array, Device, DeviceFault, compile_cuda, nvcc

START = 1_000
HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
SETUP = """
    .reg .pred %p<9>; .reg .b32 %r<40>; .reg .b64 %rd<40>;
    mov.u32 %r1, %tid.x;
    ld.param.u64 %rd1, [out];
    mul.wide.u32 %rd2, %r1, 8;
    add.s64 %rd1, %rd1, %rd2;"""  # 4 ns
# kernel: what follows
BODIES = {
    "globaltimer": "mov.u64 %rd3, %globaltimer; st.global.u64 [%rd1], %rd3; ret;",
    "clock64": "mov.u64 %rd3, %clock64; st.global.u64 [%rd1], %rd3; ret;",
    "halves": """mov.u32 %r2, %globaltimer_lo; mov.u32 %r3, %globaltimer_hi; mov.u32 %r4, %clock; mov.u32 %r5, %clock_hi;
        cvt.u64.u32 %rd3, %r3; shl.b64 %rd3, %rd3, 32; cvt.u64.u32 %rd4, %r2; or.b64 %rd3, %rd3, %rd4;
        sub.u32 %r4, %r4, %r2; add.u32 %r4, %r4, %r5; sub.u32 %r4, %r4, %r3; mul.wide.u32 %rd5, %r4, 1000000;
        add.u64 %rd3, %rd3, %rd5; st.global.u64 [%rd1], %rd3; ret;""",
    "lane31": """setp.ne.u32 %p1, %r1, 31; @%p1 bra DONE; mov.u32 %r2, 0;
        AGAIN: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 100; @%p2 bra AGAIN;
        DONE: mov.u64 %rd3, %globaltimer; st.global.u64 [%rd1], %rd3; ret;""",
    "spin": """mov.u64 %rd3, %clock64;
        AGAIN: mov.u64 %rd4, %clock64; sub.u64 %rd5, %rd4, %rd3; setp.lt.u64 %p1, %rd5, 100000; @%p1 bra AGAIN;
        st.global.u64 [%rd1], %rd5; ret;""",
    "apart": """mov.u64 %rd3, %clock64; mul.wide.u32 %rd6, %r1, 1000;
        AGAIN: mov.u64 %rd4, %clock64; sub.u64 %rd5, %rd4, %rd3; setp.ge.u64 %p1, %rd5, %rd6; @!%p1 bra AGAIN;
        st.global.u64 [%rd1], %rd4; ret;""",
    "predicated": """setp.eq.u32 %p1, %r1, 0; @%p1 add.u32 %r1, %r1, 1; @!%p1 add.u32 %r1, %r1, 1;
        @%p1 nanosleep.u32 500; nanosleep.u32 %r1; ret;""",
    "barrier": """setp.eq.u32 %p1, %r1, 40; @!%p1 bra JOIN; nanosleep.u32 1000;
        JOIN: bar.sync 0; mov.u64 %rd3, %globaltimer; st.global.u64 [%rd1], %rd3; ret;""",
    "votes": """setp.eq.u32 %p1, %r1, 40; @!%p1 bra JOIN; nanosleep.u32 1000;
        JOIN: barrier.sync 0; bar.red.popc.u32 %r2, 0, %p1; mov.u64 %rd3, %globaltimer; st.global.u64 [%rd1], %rd3; ret;""",
    "warp": """setp.eq.u32 %p1, %r1, 33; @!%p1 bra JOIN; nanosleep.u32 1000;
        JOIN: and.b32 %r2, %r1, 16; mov.u32 %r3, 0xffff; shl.b32 %r3, %r3, %r2; bar.warp.sync %r3;
        mov.u64 %rd3, %globaltimer; st.global.u64 [%rd1], %rd3; ret;""",
    "cluster": """setp.eq.u32 %p1, %r1, 40; @!%p1 bra JOIN; nanosleep.u32 1000;
        JOIN: barrier.cluster.arrive; barrier.cluster.wait; mov.u64 %rd3, %globaltimer; st.global.u64 [%rd1], %rd3; ret;""",
    # the first warp sleeps and arrives; the second waits for it, but not the first for the second
    "producer": """setp.lt.u32 %p1, %r1, 32; @!%p1 bra WAIT; nanosleep.u32 700; bar.arrive 1, 64; ret;
        WAIT: bar.sync 1, 64; ret;""",
    "leaves": """setp.lt.u32 %p1, %r1, 32; @!%p1 bra WAIT; nanosleep.u32 700; ret;
        WAIT: bar.sync 0; ret;""",
    # nobody waits for anybody in a shuffle
    "shuffle": """setp.eq.u32 %p1, %r1, 3; @!%p1 bra JOIN; nanosleep.u32 100;
        JOIN: shfl.sync.idx.b32 %r2, %r1, 0, 31, -1; vote.sync.ballot.b32 %r3, %p1, -1; ret;""",
    "call": "call twice; call twice; ret;",
    "recursion": "{ .param .b32 n; st.param.b32 [n], 3; call down, (n); } ret;",
    # the first warp waits for the second, in a loop that begins with two labels
    "endless": """setp.lt.u32 %p1, %r1, 32; @!%p1 bra WAKE;
        ld.param.u64 %rd3, [out];
        ONE: TWO: ld.global.u64 %rd4, [%rd3]; setp.eq.u64 %p2, %rd4, 1000; @%p2 bra ONE;
        ret;
        WAKE: st.global.u64 [%rd1+-256], 0; ret;""",
    "falls": "nanosleep.u32 5;",
    "marked": """
        //gpubpf{
        nanosleep.u32 100000;
        bar.warp.sync -1;
        mov.u32 %r2, 0;
        AGAIN: add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, %r1; @%p1 bra AGAIN;
        mov.u64 %rd3, %globaltimer;
        //gpubpf}
        //gpubpf+3
        st.global.u64 [%rd1], %rd3; ret;""",
    "traps": "setp.eq.u32 %p1, %r1, 9; nanosleep.u32 90; @%p1 trap; nanosleep.u32 1000; ret;",
    "illegal": "nanosleep.u32 90; st.global.u64 [%rd2], %rd1; nanosleep.u32 1000; ret;",
}
FUNCTIONS = """
.func twice { .reg .b32 %r<3>; mov.u32 %r1, 1; mov.u32 %r2, 2; ret; }
.func down (.param .b32 n) {
    .reg .b32 %r<3>; .reg .pred %p;
    ld.param.b32 %r1, [n]; setp.eq.u32 %p, %r1, 0; @%p ret;
    sub.u32 %r1, %r1, 1; { .param .b32 m; st.param.b32 [m], %r1; call down, (m); } ret; }
"""


@cache
def device() -> Device:
    kernels = (f".visible .entry {n}(.param .u64 out)\n{{{SETUP}\n{body}\n}}\n" for n, body in BODIES.items())
    return Device(HEAD + FUNCTIONS + "".join(kernels), virtual=True)


def run(name: str, threads: int = 64) -> tuple[list[int], list[int]]:
    """What the threads stored, and when they ended, both since the start."""
    out = Array(np.full(threads, START, np.int64))
    device().launch(name, 1, threads, out, start=START)
    ends = (device().ends.astype(np.int64) - START).tolist()
    assert device().duration == max(ends)
    return (out.host - START).tolist(), ends


@pytest.mark.parametrize("name", ["globaltimer", "clock64"])
def test_a_clock_shows_what_came_before_it(name: str) -> None:
    assert run(name) == ([4] * 64, [7] * 64)


def test_halves_of_clocks_read_the_same_clock() -> None:
    # %globaltimer_lo is the first, %clock the third
    assert run("halves")[0] == [4 + 2_000_000] * 64


def test_lanes_have_times_of_their_own() -> None:
    assert run("lane31", 32) == ([6] * 31 + [6 + 1 + 300], [9] * 31 + [310])


def test_a_thread_that_waits_for_a_time_sees_it_come() -> None:
    waited, ends = run("spin")
    assert set(waited) == {100_001 - START}  # the first turn of 4 ns that ends at 100,000 or more
    assert set(ends) == {4 + 100_001 + 4 + 2}


def test_threads_that_wait_for_different_times() -> None:
    seen, ends = run("apart")
    # turns of 4 ns, the first of which reads the clock 2 ns after the time that they count from
    expected = [4 + (2 if t == 0 else 2 + -(-(1000 * t - 2) // 4) * 4) for t in range(64)]
    assert seen == expected
    assert ends == [t + 4 + 2 for t in expected]


def test_sleep_counts_where_it_is_reached_with_a_true_predicate() -> None:
    _, ends = run("predicated", 3)
    assert ends == [4 + 6 + 500 + 1, 4 + 6 + 2, 4 + 6 + 3]


@pytest.mark.parametrize("name", ["barrier", "cluster", "votes"])
def test_a_barrier_waits_for_the_last(name: str) -> None:
    arrival = 4 + 2 + 1001 + (2 if name != "barrier" else 1)
    assert run(name) == ([arrival] * 64, [arrival + 3] * 64)


CLUSTER = """.version 8.0\n.target sm_90\n.address_size 64
.visible .entry {name}(.param .u64 out) .explicitcluster .reqnctapercluster 2 {{
    .reg .pred %p<3>; .reg .b32 %r<4>; .reg .b64 %rd<4>;
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r3, %r2, 32, %r1;
    ld.param.u64 %rd1, [out]; mad.wide.u32 %rd1, %r3, 8, %rd1;
    setp.eq.u32 %p1, %r3, 40; setp.eq.u32 %p2, %r3, 5; {body}
    barrier.cluster.wait; mov.u64 %rd3, %globaltimer; st.global.u64 [%rd1], %rd3; ret;
}}"""  # 7 ns before the body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # The last thread to arrive is one of block 1. Thread 5 has other work until later.
        (
            "@%p1 nanosleep.u32 1000; barrier.cluster.arrive; @%p2 nanosleep.u32 3000;",
            [1009 + 2 if t == 40 else 3000 + 11 if t == 5 else 1010 for t in range(64)],
        ),
        # It exits instead.
        (
            "@%p1 nanosleep.u32 1000; @%p1 ret; barrier.cluster.arrive;",
            [0 if t == 40 else 1010 for t in range(64)],
        ),
        # Nobody waits for a thread that has arrived and exits later.
        (
            "barrier.cluster.arrive; @%p1 nanosleep.u32 1000; @%p1 ret; @%p2 nanosleep.u32 3000;",
            [0 if t == 40 else 3000 + 12 if t == 5 else 12 for t in range(64)],
        ),
    ],
    ids=["arrives", "exits", "arrives and exits"],
)
def test_the_barrier_of_a_cluster_waits_for_the_last_thread_of_its_blocks(
    body: str, expected: list[int]
) -> None:
    out = Array(np.zeros(64, np.int64))
    Device(CLUSTER.format(name="meet", body=body), virtual=True).launch("meet", 2, 32, out, start=START)
    assert [max(0, time - START) for time in out.host.tolist()] == expected


def test_a_barrier_of_a_warp_waits_for_its_members() -> None:
    times, _ = run("warp")
    assert times == [10] * 32 + [1011] * 16 + [10] * 16


def test_who_only_arrives_does_not_wait() -> None:
    _, ends = run("producer")
    assert ends == [4 + 2 + 701 + 2] * 32 + [4 + 2 + 701 + 1 + 1] * 32


def test_a_barrier_waits_for_threads_that_leave_instead() -> None:
    _, ends = run("leaves")
    assert ends == [4 + 2 + 701 + 1] * 32 + [4 + 2 + 701 + 1 + 1] * 32


def test_a_shuffle_is_no_barrier() -> None:
    _, ends = run("shuffle", 32)
    assert ends == [4 + 2 + 3 + (101 if lane == 3 else 0) for lane in range(32)]


def test_functions_count() -> None:
    assert run("call", 1)[1] == [4 + 2 * (1 + 3) + 1]
    assert run("recursion", 1)[1] == [4 + 2 + 3 * 7 + 3 + 1]


def test_a_warp_that_waits_gives_way() -> None:
    _, ends = run("endless")
    assert min(ends[:32]) > max(ends[32:])


def test_a_function_may_end_without_a_return() -> None:
    assert run("falls", 1)[1] == [4 + 6]


def test_what_is_marked_costs_nothing() -> None:
    assert run("marked", 8) == ([4] * 8, [4 + 3 + 2] * 8)


@pytest.mark.parametrize(
    ("name", "code", "time"), [("traps", 719, 4 + 1 + 91 + 1), ("illegal", 700, 4 + 91 + 1)]
)
def test_a_kernel_that_fails_takes_the_time_up_to_the_fault(name: str, code: int, time: int) -> None:
    with pytest.raises(DeviceFault) as caught:
        device().launch(name, 1, 64, Array(np.zeros(64, np.int64)), start=START)
    assert caught.value.code == code
    assert device().duration == time


def test_the_real_clock_is_as_it_was() -> None:
    text = f"{HEAD}.visible .entry k(.param .u64 out)\n{{{SETUP}\n{BODIES['marked']}\n}}\n"
    assert "elapsed" not in translate(text)
    for word in ("time[", "TICK", "TURN"):
        assert word not in translate(text), word
        assert word in translate(text.replace("st.global", "st.volatile.global"), virtual=True), word


# --- threads that communicate: the earliest goes first, whatever the schedule ------------------------------

COMMUNICATING = Path(__file__).with_name("communicating.cu")
SCRIPT = """
import hashlib, sys
import numpy as np
from test_virtual_clock import communicated
print(communicated(None if sys.argv[1] == "none" else int(sys.argv[1])))
"""


def communicated(seed: int | None) -> str:
    """A digest of the ends and results of all threads of these kernels."""
    device = Device(compile_cuda(COMMUNICATING.read_text()), virtual=True)
    found = []
    for name in ("queue", "locks", "grid_barrier", "last_block", "floats", "races"):
        out = Array(np.zeros(640, np.int64))
        device.launch(name, 10, 64, out, seed=seed, start=START)
        ends = device.ends.astype(np.int64) - START
        found.append((name, ends.tolist(), out.host.tolist(), device.duration))
        if name == "grid_barrier":  # all wait for the last block, which arrives after 900 turns
            assert ends.max() - ends.min() < 40, ends
        if name == "last_block":
            assert set(np.flatnonzero(ends > ends.min() + 2000) // 64) == {0}, ends
    return str(found)


@pytest.mark.every(4)
@pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")
def test_threads_communicate_in_the_order_of_time() -> None:
    expected = communicated(None)
    assert communicated(1) == expected == communicated(2)
    here = os.path.dirname(__file__)
    environment = {**os.environ, "CUDASIM_THREADS": "7"}
    environment["PYTHONPATH"] = os.pathsep.join([here, os.path.dirname(here), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "3"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
