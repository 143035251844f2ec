"""gpurun on the embedded AMD device: an object's programs at the entry and exit of a kernel, and at its memory accesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpubpf_objects import build, needs_clang
from hipsim_device import measured, program
from hipsim_engine import GPUS

pytestmark = needs_clang

# 1,000 additions on 4 blocks of 256 threads.
TEXT = """
MAP(runs, THREAD_ARRAY, u32, u64, 1);
MAP(counts, GPU_ARRAY, u32, u64, 2);
MAP(blocks, GPU_HASH, u64, u64, 16);
const volatile u64 loud = 2;
static __attribute__((always_inline)) void add(u32 key) {
    u64 *count = bpf_map_lookup_elem(&counts, &key);
    if (count)
        __sync_fetch_and_add(count, 1);
}
SEC("kprobe/KERNEL") int on_entry(void *ctx) { add(0); return 0; }
SEC("kprobe/__memcapture") int on_access(void *ctx) { add(1); return 0; }
SEC("kretprobe/KERNEL") int on_exit(void *ctx) {
    u64 block, thread, y, z, one = 1;
    u32 zero = 0;
    u64 *mine = bpf_map_lookup_elem(&runs, &zero);
    bpf_get_block_idx(&block, &y, &z);
    bpf_get_thread_idx(&thread, &y, &z);
    if (mine)
        *mine += 1;
    bpf_map_update_elem(&blocks, &block, &one, 0);
    if (block == loud && thread == 255)
        print_all("block %lu, thread %lu %s %d %d %d", block, thread, (u64)"of", 1, -2, 3);
    return 0;
}
"""


# Each of bpftime's helpers that AMD GPUs have, and a ring: the last thread of each block tells its lane.
HELPERS = """
static u64 (*bpf_get_globaltimer)(void) = (void *)502;
static u64 (*bpf_get_block_dim)(u64 *x, u64 *y, u64 *z) = (void *)504;
static u64 (*bpf_gpu_membar)(void) = (void *)506;
static u64 (*bpf_get_grid_dim)(u64 *x, u64 *y, u64 *z) = (void *)508;
static u64 (*bpf_get_sm_id)(void) = (void *)509;
static u64 (*bpf_get_warp_id)(void) = (void *)510;
static u64 (*bpf_get_lane_id)(void) = (void *)511;
MAP(lanes, GPU_ARRAY, u32, u64, 64);
MAP(counts, SHARED_ARRAY, u32, u64, 4);
struct last { u64 block; u32 lane, thread; };
struct { int (*type)[GPU_RING]; int (*max_entries)[64]; } ring SEC(".maps");
static __attribute__((always_inline)) void add(void *map, u32 key) {
    u64 *count = bpf_map_lookup_elem(map, &key);
    if (count)
        __sync_fetch_and_add(count, 1);
}
SEC("kprobe/KERNEL") int on_entry(void *ctx) {
    u64 blocks, threads, y, z;
    bpf_get_grid_dim(&blocks, &y, &z);
    bpf_get_block_dim(&threads, &y, &z);
    add(&lanes, bpf_get_lane_id());
    if (blocks == 4 && threads == 256 && y == 1 && z == 1)
        add(&counts, 0);
    if (bpf_get_globaltimer())
        add(&counts, 1);
    bpf_gpu_membar();
    if (bpf_get_sm_id() < 8 && bpf_get_warp_id() < 64)
        add(&counts, 2);
    return 0;
}
SEC("kretprobe/KERNEL") int on_exit(void *ctx) {
    struct last last = {};
    u64 thread, y, z;
    bpf_get_block_idx(&last.block, &y, &z);
    bpf_get_thread_idx(&thread, &y, &z);
    last.thread = thread;
    last.lane = bpf_get_lane_id();
    if (thread == 255)
        bpf_ringbuf_output(&ring, &last, sizeof(last), 0);
    return 0;
}
"""


def run(place: Path, text: str, gpu: str, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run an object's programs in vectoradd; return the entries of each map, and all records."""
    path = build(text.replace("KERNEL", "_Z9vectorAddPKfS0_Pfi"), place / "probe.bpf.o")
    records, done = measured(
        "gpurun", place / "out", path, *options, "--", program("vectoradd", gpu=gpu), 1000
    )
    assert (done.returncode, done.stdout) == (0, "1000 sums are right\n"), done.stderr
    maps = {
        one["map"]: [(e.get("key"), e["value"]) for e in one["entries"]]
        for one in records
        if one["type"] == "map"
    }
    return maps, records


@pytest.mark.every(3)
@pytest.mark.parametrize("gpu", GPUS)
def test_programs_of_an_object(tmp_path: Path, gpu: str) -> None:
    maps, records = run(tmp_path, TEXT, gpu, "--set", "blocks[99]=7")
    assert maps["runs"] == [(0, [1] * 1024)]
    assert maps["counts"] == [(0, 1024), (1, 3 * 1000)]
    assert maps["blocks"] == [*((block, 1) for block in range(4)), (99, 7)]
    assert [one["text"] for one in records if one["type"] == "print"] == ["block 2, thread 255 of 1 -2 3"]


@pytest.mark.every(3)
@pytest.mark.parametrize("gpu", ["gfx1030", "gfx90a"])
def test_helpers_of_bpftime(tmp_path: Path, gpu: str) -> None:
    wave = 32 if gpu == "gfx1030" else 64
    maps, _ = run(tmp_path, HELPERS, gpu)
    assert maps["lanes"] == [(lane, 1024 // wave if lane < wave else 0) for lane in range(64)]
    assert maps["counts"] == [(0, 1024), (1, 1024), (2, 1024), (3, 0)]
    assert sorted(maps["ring"]) == [(None, [block, (wave - 1) | 255 << 32]) for block in range(4)]


def test_a_helper_that_amd_gpus_lack(tmp_path: Path) -> None:
    text = """
    static u64 (*bpf_cuda_exit)(void) = (void *)507;
    SEC("kprobe/KERNEL") int on_entry(void *ctx) { bpf_cuda_exit(); return 0; }
    """
    _, records = run(tmp_path, text, "gfx906")
    (why,) = records[-1]["not_instrumented"]
    assert why.startswith("device program on_entry calls bpf_cuda_exit, which AMD GPUs do not have")
