"""What ring buffers are made of: leaders of diverged lanes, reservations, orderings, maxima; on both clocks."""

from __future__ import annotations

import time
from functools import cache

import numpy as np
import pytest

from engine_device import Array, Device, compile_cuda, nvcc

pytestmark = pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")

SOURCE = r"""
#define ASM(...) asm volatile(__VA_ARGS__)
typedef unsigned u32; typedef unsigned long long u64;

// Each lane reserves lane % 4 + 1 times, in a loop that lanes leave one after the other: one reservation by the lowest active
// lane for all that are active there.
extern "C" __global__ void reserve(u64 *count, u32 *records, u32 *together)
{
    u32 lane; ASM("mov.u32 %0, %%laneid;" : "=r"(lane));
    for (u32 turn = 0; turn <= lane % 4; turn++) {
        u32 active, before, leader, n; u64 first = 0;
        ASM("activemask.b32 %0;" : "=r"(active));
        ASM("mov.u32 %0, %%lanemask_lt;" : "=r"(before));
        leader = __ffs(active) - 1;
        n = __popc(active);
        if (lane == leader)
            ASM("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(first) : "l"(count), "l"((u64)n) : "memory");
        u32 low = (u32)first;
        ASM("shfl.sync.idx.b32 %0, %0, %1, 31, %2;" : "+r"(low) : "r"(leader), "r"(active));
        u32 mine = low + __popc(active & before);
        records[mine] = (blockIdx.x * blockDim.x + threadIdx.x) * 4 + turn + 1;
        together[mine] = n;
    }
}

extern "C" __global__ void maxima(u64 *out, u32 *shared_max)
{
    u64 mine = 0x100000000ull * (threadIdx.x * 7 % 64) + blockIdx.x;
    u64 old;
    ASM("red.relaxed.gpu.global.max.u64 [%0], %1;" :: "l"(out), "l"(mine) : "memory");
    ASM("atom.relaxed.sys.global.max.u64 %0, [%1], %2;" : "=l"(old) : "l"(out + 1), "l"(mine) : "memory");
    ASM("red.sys.global.min.u64 [%0], %1;" :: "l"(out + 2), "l"(mine) : "memory");
    ASM("red.release.gpu.global.or.b64 [%0], %1;" :: "l"(out + 3), "l"(1ull << threadIdx.x) : "memory");
    ASM("atom.acq_rel.gpu.global.exch.b64 %0, [%1], %2;" : "=l"(old) : "l"(out + 4 + threadIdx.x), "l"(mine) : "memory");
    ASM("red.global.max.s32 [%0], %1;" :: "l"(shared_max), "r"((int)threadIdx.x - 100) : "memory");
}

// A value, and behind each kind of fence a mark; another thread waits for the mark and reads the value.
template <int KIND> __device__ void fence()
{
    if (KIND == 0) ASM("membar.sys;" ::: "memory");
    if (KIND == 1) ASM("membar.gl;" ::: "memory");
    if (KIND == 2) ASM("fence.acq_rel.sys;" ::: "memory");
    if (KIND == 3) ASM("fence.sc.gpu;" ::: "memory");
    if (KIND == 4) ASM("membar.cta;" ::: "memory");
}
template <int KIND> __device__ void hand_over(u32 *cells, u32 *out)
{
    u32 *value = cells + 2 * KIND, *mark = value + 1, seen = 0;
    if (threadIdx.x == 0) {
        ASM("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(value), "r"(KIND + 40) : "memory");
        fence<KIND>();
        if (KIND & 1) ASM("st.volatile.global.u32 [%0], 1;" :: "l"(mark) : "memory");
        else ASM("st.release.sys.global.u32 [%0], 1;" :: "l"(mark) : "memory");
    } else if (threadIdx.x == 32) {
        while (!seen) {
            if (KIND & 1) ASM("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mark) : "memory");
            else ASM("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mark) : "memory");
        }
        fence<KIND>();
        ASM("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(out[KIND]) : "l"(value) : "memory");
    }
}
extern "C" __global__ void fences(u32 *cells, u32 *out)
{
    hand_over<0>(cells, out); hand_over<1>(cells, out); hand_over<2>(cells, out);
    hand_over<3>(cells, out); hand_over<4>(cells, out);
}

// In two halves of a warp at once: every third lane of one, and the rest.
extern "C" __global__ void diverged(u32 *out)
{
    u32 lane = threadIdx.x, mask, vote, any, all, match, same, up, uniform;
    if (lane % 3 == 0) {
        ASM("activemask.b32 %0;" : "=r"(mask));
        vote = __ballot_sync(mask, lane > 15); any = __any_sync(mask, lane == 30); all = __all_sync(mask, lane % 3 == 0);
        match = __match_any_sync(mask, lane / 8); up = __shfl_up_sync(mask, lane, 3);
        same = __match_all_sync(mask, 7, (int *)&uniform);
    } else {
        ASM("activemask.b32 %0;" : "=r"(mask));
        vote = __ballot_sync(mask, lane > 20); any = __any_sync(mask, lane == 30); all = __all_sync(mask, lane > 1);
        match = __match_any_sync(mask, (u64)lane / 16); up = __shfl_sync(mask, lane, 31);
        same = __match_all_sync(mask, lane / 16, (int *)&uniform);
    }
    u32 *mine = out + lane * 8;
    mine[0] = mask; mine[1] = vote; mine[2] = any; mine[3] = all; mine[4] = match; mine[5] = up; mine[6] = same; mine[7] = uniform;
}

extern "C" __global__ void places(u32 *sm, u64 *clocks)
{
    u32 n;
    ASM("mov.u32 %0, %%smid;" : "=r"(sm[blockIdx.x]));
    ASM("mov.u32 %0, %%nsmid;" : "=r"(n));
    sm[gridDim.x + blockIdx.x] = n;
    u64 before, after, cycles;
    ASM("mov.u64 %0, %%globaltimer;" : "=l"(before));
    ASM("mov.u64 %0, %%clock64;" : "=l"(cycles));
    ASM("mov.u64 %0, %%globaltimer;" : "=l"(after));
    clocks[3 * blockIdx.x] = before; clocks[3 * blockIdx.x + 1] = cycles; clocks[3 * blockIdx.x + 2] = after;
}
"""


@cache
def device(virtual: bool) -> Device:
    return Device(compile_cuda(SOURCE), virtual)


both = pytest.mark.parametrize("virtual", [False, True], ids=["real", "virtual"])


@both
@pytest.mark.parametrize("seed", [None, 5])
def test_reservations_have_no_gaps(virtual: bool, seed: int | None) -> None:
    blocks, threads = 6, 96
    total = blocks * threads * 10 // 4  # 1 + 2 + 3 + 4 for four lanes
    count, records, together = (
        Array(np.zeros(1, np.uint64)),
        Array(np.zeros(total, np.uint32)),
        Array(np.zeros(total, np.uint32)),
    )
    device(virtual).launch("reserve", blocks, threads, count, records, together, seed=seed)
    assert count.host[0] == total
    expected = [t * 4 + k + 1 for t in range(blocks * threads) for k in range(t % 4 + 1)]
    assert sorted(records.host.tolist()) == expected
    # the lanes of a warp leave the loop together: 32, 24, 16, 8 of them reserve at once
    sizes, counts = np.unique(together.host, return_counts=True)
    assert dict(zip(sizes.tolist(), counts.tolist(), strict=True)) == {
        n: n * blocks * 3 for n in (8, 16, 24, 32)
    }


@both
def test_maxima(virtual: bool) -> None:
    out, signed = Array(np.zeros(68, np.uint64)), Array(np.full(1, -1000, np.int32))
    out.host[2] = np.uint64((1 << 64) - 1)
    device(virtual).launch("maxima", 5, 64, out, signed)
    most = (63 << 32) + 4
    assert out.host[:4].tolist() == [most, most, 0, (1 << 64) - 1]
    assert ((out.host[4:] >> np.uint64(32)) == [t * 7 % 64 for t in range(64)]).all()
    assert signed.host[0] == -37


@both
def test_fences_hand_over(virtual: bool) -> None:
    cells, out = Array(np.zeros(10, np.uint32)), Array(np.zeros(5, np.uint32))
    device(virtual).launch("fences", 1, 64, cells, out)
    assert out.host.tolist() == [40, 41, 42, 43, 44]


@both
def test_collectives_of_diverged_lanes(virtual: bool) -> None:
    out = Array(np.zeros((32, 8), np.uint32))
    device(virtual).launch("diverged", 1, 32, out)
    thirds = [lane for lane in range(32) if lane % 3 == 0]
    rest = [lane for lane in range(32) if lane % 3]

    def bits(lanes: list[int]) -> int:
        return sum(1 << lane for lane in lanes)

    for lane in thirds:
        match = [n for n in thirds if n // 8 == lane // 8]
        vote = [n for n in thirds if n > 15]
        expected = [bits(thirds), bits(vote), 1, 1, bits(match), max(lane - 3, 0), bits(thirds), 1]
        assert out.host[lane].tolist() == expected
    for lane in rest:
        match = [n for n in rest if n // 16 == lane // 16]
        vote = [n for n in rest if n > 20]
        assert out.host[lane].tolist() == [bits(rest), bits(vote), 0, 0, bits(match), 31, 0, 0]


@both
def test_multiprocessors_have_numbers_and_clocks(virtual: bool) -> None:
    sm, clocks = Array(np.zeros(200, np.uint32)), Array(np.zeros((100, 3), np.int64))
    for _ in range(2):
        device(virtual).launch("places", 100, 1, sm, clocks, start=7)
    number, count = sm.host[:100], sm.host[100:]
    assert set(count) == {16} and set(number) == set(range(16))
    before, cycles, after = clocks.host.T
    assert (before <= after).all()
    if virtual:
        assert (before == before[0]).all() and (cycles == before + 1).all() and before[0] > 7
        return
    for k in range(16):  # the clock of each multiprocessor is so far from the common one
        of = number == k
        assert (cycles - after)[of].max() <= (cycles - before)[of].min()
    assert len({int(d) // 1_000_000_000 for d in cycles - before}) > 8


SLEEPERS = r"""
extern "C" __global__ void sleeps(unsigned long long *out)
{
    unsigned long long before, after;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(before));
    if (threadIdx.x % 2) for (int k = 0; k < 5; k++) asm volatile("nanosleep.u32 1000000000;");
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(after));
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = after - before;
}
"""


def test_threads_sleep_at_the_same_time() -> None:
    out = Array(np.zeros((40, 128), np.uint64))
    device = Device(compile_cuda(SLEEPERS))
    device.launch("sleeps", 1, 1, out)  # compiles it
    begin = time.monotonic()
    device.launch("sleeps", 40, 128, out)
    assert time.monotonic() - begin < 10  # 2,560 times 5 ms in a row would be 13 s
    assert (out.host[:, 1::2] >= 5_000_000).all()  # a millisecond is the most for one
    assert (out.host[:, ::2] < out.host[:, 1::2].min()).mean() > 0.9
