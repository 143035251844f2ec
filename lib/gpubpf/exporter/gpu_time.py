"""How long launches run on the GPU: a device program that adds up the time of each kernel's launches, and the reading of its sums.

The host need not see each launch: the sums are in GPU memory, so their cost does not depend on how often the tool reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf.record import Record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpubpf.records.results import Instance

PROGRAM = r"""
#include <gpubpf.h>

#define SLOTS 64                                 /* launch number N uses slot N modulo SLOTS */
#define SHARDS 16                                /* words for the end of a launch, so that warps do not all wait for one */
#define FIRST 256                                /* blocks that can be the first to begin: GPUs start them in order */
/* A word is how often the slot was reused << 44 | time. Both are cut off, so a word of another launch is not always smaller. */
#define BITS 44
#define TIME ((1ULL << BITS) - 1)
#define WORD(_launch, _time) ((_launch) / SLOTS << BITS | ((_time) & TIME))
#define LONGEST 3600000000000ULL                 /* ns; more is taken for a mistake */

GPU_KERNEL_ARRAY(starts, u64, SLOTS);            /* ~time, so that the first thread has the largest value */
GPU_KERNEL_ARRAY(ends, u64, SLOTS * SHARDS);     /* time of the last thread */
struct sum { u64 launches, ns; };
GPU_KERNEL_ARRAY(sums, struct sum, 1);           /* of the launches whose slots were reused */
GPU_PARAM(every_lane, u64);                      /* 1: the lanes of a warp may have different clocks (embedded device) */

/* Raises a word of a launch. Replaces the word of another launch, and returns it; otherwise returns 0. */
static inline u64 raise(u64 *word, u64 to) {
    u64 was = *word;

    if ((was ^ to) >> BITS && __sync_val_compare_and_swap(word, was, to) == was)
        return was;
    gpu_max(word, to);
    return 0;
}

/* Adds the launch that had a slot before. Only one thread replaces its word, so it is added once. */
static inline void add(int slot, u64 was) {
    u64 last = 0, start = ~was & TIME;
    int key = 0;
    struct sum *sum = sums.lookup(&key);
#pragma unroll
    for (int shard = 0; shard < SHARDS; shard++) {
        int word = slot * SHARDS + shard;
        u64 *end = ends.lookup(&word), value = end ? *end : 0;
        if (!((value ^ was) >> BITS) && (value & TIME) > last)
            last = value & TIME;
    }
    if (!sum || last < start || last - start > LONGEST)
        return;
    __sync_fetch_and_add(&sum->launches, 1);
    __sync_fetch_and_add(&sum->ns, last - start);
}

int on_entry(struct gpu_entry *ctx) {            /* in the first thread of each block */
    u64 x, y, z;
    bpf_get_thread_idx(&x, &y, &z);
    if (x | y | z)
        return 0;
    int key = 0;
    u64 *all = every_lane.lookup(&key);
    bpf_get_block_idx(&x, &y, &z);
    if (!all || (!*all && (x >= FIRST || y | z)))
        return 0;
    u64 now = bpf_get_globaltimer(), launch = ctx->launch;
    int slot = launch % SLOTS;
    u64 *start = starts.lookup(&slot);
    if (!start)
        return 0;
    u64 was = raise(start, WORD(launch, ~now));
    if (was)
        add(slot, was);
    return 0;
}

int on_exit(struct gpu_exit *ctx) {              /* in one of the lanes that exit together */
    int key = 0;
    u64 *all = every_lane.lookup(&key);
    gpu_mask active = gpu_active();
    u32 last = gpu_log2(active);
    if (!all || (!*all && gpu_lane() != last))
        return 0;
    u64 now = bpf_get_globaltimer(), launch = ctx->launch;  /* in this order: in a graph, the number is loaded from GPU memory */
    int word = launch % SLOTS * SHARDS + gpu_sm() % SHARDS;
    u64 *end = ends.lookup(&word);
    if (end)
        raise(end, WORD(launch, now));
    return 0;
}
"""
MAPS = ("starts", "ends", "sums")
_TIME_BITS = np.uint64(44)
_TIME = np.uint64((1 << 44) - 1)
_LONGEST = np.uint64(3600 * 10**9)


class Measured(Record):
    """The measured launches of a kernel in one process.

    launches: their number.
    ns: their time on the GPU, in total.
    step: every time of the GPU's clock is a multiple of this, ns; 0: no time was read.
    """

    launches: int = 0
    ns: int = 0
    step: int = 0

    def plus(self, other: Measured) -> Measured:
        step = math.gcd(self.step, other.step)
        return Measured(self.launches + other.launches, self.ns + other.ns, step)


def measured(
    starts: Iterable[Instance], ends: Iterable[Instance], sums: Iterable[Instance]
) -> dict[tuple[int, str], Measured]:
    """Return the sums of all launches, by number of the process and mangled name of the kernel.

    starts, ends, sums: the instances of the maps of these names, in the same order (`Session.instances_together`).
    """
    found: dict[tuple[int, str], Measured] = {}
    for start, end, whole in zip(starts, ends, sums, strict=True):
        key = start.process, start.mangled
        found[key] = found.get(key, Measured()).plus(_of_shape(start.array, end.array, whole.array))
    return found


def _of_shape(starts: Any, ends: Any, sums: Any) -> Measured:
    """Return the sums of one launch shape: of launches whose slots were reused, and of those that still have their slots."""
    whole = sums.reshape(-1)[0]
    launches, ns = int(whole["launches"]), int(whole["ns"])
    begun: NDArray[np.uint64] = starts.reshape(-1).astype(np.uint64)
    ended: NDArray[np.uint64] = ends.reshape(len(begun), -1).astype(np.uint64)
    own = ended >> _TIME_BITS == (begun >> _TIME_BITS)[:, None]
    last = np.where(own, ended & _TIME, np.uint64(0)).max(axis=1)
    first = ~begun & _TIME
    known = (begun != 0) & (last >= first)
    known &= last - first <= _LONGEST
    lasted, times = (last - first)[known], np.concatenate([first[known], last[known]])
    step = int(np.gcd.reduce(times)) if len(times) else 0
    return Measured(launches + len(lasted), ns + int(lasted.sum()), step)
