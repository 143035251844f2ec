"""Warp-level helpers, arrays by site, and the first and last thread of a block: exact on the embedded device."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import gpubpf_cuda
from gpubpf_bcc import compiled

CUDA = r"""
#include <cstdio>
__global__ void first(int *out) {
    if (threadIdx.x % 3 == 0) return;
    for (int i = 0; i < (int)threadIdx.x % 5; i++)
        atomicAdd(out, 1);
    if (threadIdx.x % 3 == 1) return;
    atomicAdd(out, 100);
}
__global__ void second(int *out) { atomicAdd(out + 1, 1); }
int main() {
    int *out;
    cudaStream_t streams[4];
    cudaMalloc(&out, 8);
    cudaMemset(out, 0, 8);
    for (auto &stream : streams)
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (int launch = 0; launch < 24; launch++)
        first<<<6, 72, 0, streams[launch % 4]>>>(out);
    cudaDeviceSynchronize();
    second<<<2, 64>>>(out);
    second<<<dim3(2, 2, 2), dim3(3, 4, 5)>>>(out);
    printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
"""
TEXT = r"""
#include <gpubpf.h>
struct found { u64 match, ballot, shuffle, kernel, epoch, below, count, active, uniform, apart, joined, warp, latest; };
struct visit { u64 threads, lanes, highest; };
GPU_THREAD_ARRAY(threads, struct found, 1);
GPU_SITE_ARRAY(sites, struct visit);
GPU_BLOCK_ARRAY(begun, u64, 1);
GPU_BLOCK_ARRAY(ended, u64, 2);
GPU_BLOCK_ARRAY(left, u64, 1);

int on_entry(struct gpu_entry *ctx) {
    int key = 0;
    u32 lane = gpu_lane();
    u64 thread = gpu_global_thread();
    u64 match = gpu_match((thread & 3) << 40 | 7), ballot = gpu_ballot(thread & 2);
    u64 shuffle = gpu_shuffle(thread << 33 | lane, lane ^ 1);
    u64 uniform = gpu_uniform(5ull << 40 | 3);
    uniform |= gpu_uniform((u64)(lane == 17) << 40) << 1;
    uniform |= gpu_uniform(lane == 17) << 2;
    uniform |= gpu_any(lane == 17) << 3 | gpu_any(1ull << 40) << 4 | gpu_any(lane > 31) << 5;
    struct found *mine = threads.lookup(&key);
    int odd = 0;
    if (!mine)
        return 0;
    mine->match = match;
    mine->ballot = ballot;
    mine->shuffle = shuffle;
    mine->kernel = gpu_kernel();
    mine->epoch = gpu_epoch();
    mine->below = gpu_lanes_below();
    mine->count = gpu_popcount(match | 1ull << 63);
    mine->active = gpu_active();
    mine->uniform = uniform;
    mine->warp = gpu_global_warp();
    gpu_max(&mine->latest, ctx->launch); /* launches overlap */
    if (thread & 1) {
        odd = 1;
        mine->apart = gpu_ballot(1);
    } else {
        mine->apart = gpu_ballot(1);
    }
    mine->joined = gpu_match(1);
    if (odd)
        mine->joined += 1ull << 32;
    return 0;
}

int on_exit(struct gpu_exit *ctx) {
    u64 site = ctx->site;
    u32 together = gpu_active();
    struct visit *here = sites.lookup(&site);
    if (!here)
        return 0;
    __sync_fetch_and_add(&here->threads, 1);
    if (!(together & gpu_lanes_below()))
        __sync_fetch_and_add(&here->lanes, gpu_popcount(together));
    gpu_max(&here->highest, gpu_global_thread());
    int own = 0;
    struct found *mine = threads.lookup(&own);
    if (mine && (mine->warp != gpu_global_warp() || mine->latest < ctx->launch)) /* the same number as at the entry, or later */
        mine->warp = ~0ull;
    int key = 0;
    u64 *gone = left.lookup(&key);
    if (gone)
        __sync_fetch_and_add(gone, 1);
    return 0;
}

int on_begin(struct gpu_block_begin *ctx) {
    int key = 0;
    u64 *count = begun.lookup(&key);
    if (count)
        __sync_fetch_and_add(count, 1);
    return 0;
}

int on_end(struct gpu_block_end *ctx) {
    int key = 0, last = 1;
    u64 *count = ended.lookup(&key), *sum = ended.lookup(&last), *gone = left.lookup(&key);
    if (count && sum && gone) {
        __sync_fetch_and_add(count, 1);
        __sync_fetch_and_add(sum, *gone);    /* of launches one after the other: all threads of the block have left */
    }
    return 0;
}
"""
SCRIPT = """
import pickle, sys
from gpubpf.ebpf import maps
from gpubpf.show import cli
from gpubpf.program import BPF
parser = cli.parser("probe", "", "")
for add in (cli.add_targets, cli.add_kernels, cli.add_device, cli.add_looks, cli.add_output):
    add(parser)
args = cli.parse(parser, sys.argv[2:])
b = BPF(text=open(sys.argv[1]).read())
b.attach_gpu_entry(fn_name="on_entry")
b.attach_gpu_exit(fn_name="on_exit")
b.attach_gpu_block_begin(fn_name="on_begin")
b.attach_gpu_block_end(fn_name="on_end")
with b.trace(cli.Options.of(args)) as session:
    for _ in session.intervals(None, None):
        pass
found = {}
for d in b.attached.definitions():
    for i in session.instances(d.name):
        found.setdefault(d.name, []).append((i.mangled, i.grid, i.array.tolist(), maps.lost(d, i.raw, i.capacity)))
sites = {k.mangled: len(session.sites(k.mangled)) for k in session.kernels()}
pickle.dump((found, sites), open("found.pickle", "wb"))
"""


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    compiled(TEXT)
    where = tmp_path_factory.mktemp("warps")
    gpubpf_cuda.build(CUDA, where / "app")
    (where / "probe.c").write_text(TEXT)
    (where / "probe.py").write_text(SCRIPT)
    return where


@pytest.fixture(scope="module", params=["hostile", "virtual"])
def found(where, request):
    setting = {"CUDASIM_HOSTILE": "1"} if request.param == "hostile" else {"CUDASIM_CLOCK": "virtual"}
    command = [sys.executable, "probe.py", "probe.c", "--device", "sim", "--", "./app"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | setting
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "no error\n"
    return pickle.loads((where / "found.pickle").read_bytes())


def by_grid(instances):
    # As objects: NumPy makes floating-point numbers of a list that has numbers above and below 2^63.
    return {(grid, mangled): np.array(array, object) for mangled, grid, array, _ in instances}


def test_nothing_is_lost(found):
    maps, _ = found
    assert {name: lost for name, all_ in maps.items() for *_, lost in all_ if lost} == {}


FIRST, FLAT, CUBE = ((6, 1, 1), "_Z5firstPi"), ((2, 1, 1), "_Z6secondPi"), ((2, 2, 2), "_Z6secondPi")
BLOCKS = {FIRST: (6, 24, 72), FLAT: (2, 1, 64), CUBE: (8, 1, 60)}  # blocks, launches, threads


def test_one_thread_of_each_block(found):
    """Also when four streams run the same kernel at once, and when threads exit in three places."""
    maps, _ = found
    begun, ended, left = (by_grid(maps[name]) for name in ("begun", "ended", "left"))
    assert set(begun) == set(BLOCKS)
    for place, (blocks, launches, threads) in BLOCKS.items():
        assert begun[place].tolist() == [[launches] * blocks]
        assert ended[place][0].tolist() == [launches] * blocks
        assert left[place].tolist() == [[launches * threads] * blocks]
        if launches == 1:  # the last thread saw the work of all others
            assert ended[place][1].tolist() == [threads] * blocks


def test_the_table_of_blocks_is_empty_in_the_end(found):
    maps, _ = found
    for name in ("gpubpf_blocks_on_begin", "gpubpf_blocks_on_end"):
        ((_, _, slots, _),) = maps[name]
        assert not any(any(slot) for slot in slots)


def test_what_lanes_find_out(found):
    maps, _ = found
    threads = by_grid(maps["threads"])
    numbers = {}
    for place, (blocks, _, size) in BLOCKS.items():
        (values,) = threads[place]
        assert len(values) == blocks * size
        for thread, value in enumerate(values):
            in_block = thread % size
            lane, start = in_block % 32, thread - in_block % 32
            lanes = [k for k in range(32) if in_block - lane + k < size]

            def mask(holds, start=start, lanes=lanes):
                return sum(1 << k for k in lanes if holds(start + k))

            same = mask(lambda other, thread=thread: other % 4 == thread % 4)
            everyone = mask(lambda other: True)
            alike = mask(lambda other, thread=thread: other % 2 == thread % 2)
            (
                match,
                ballot,
                shuffle,
                kernel,
                epoch,
                below,
                count,
                active,
                uniform,
                apart,
                joined,
                warp,
                launch,
            ) = value
            assert (match, ballot) == (same, mask(lambda other: other & 2))
            if lane ^ 1 in lanes:
                assert shuffle == (start + (lane ^ 1)) << 33 | lane ^ 1
            assert (epoch, below, count) == (0, (1 << lane) - 1, same.bit_count() + 1)
            assert (active, apart) == (everyone, alike)
            assert (warp, launch > 0) == (thread // size * -(-size // 32) + in_block // 32, True)
            # uniform only where all lanes are there, and pass the same 64 bits
            assert uniform == (len(lanes) == 32) | (17 in lanes) << 3 | 1 << 4
            # code behind a branch cannot ask all lanes; what matters is that the branch itself remains
            assert joined >> 32 == thread % 2 and joined & 1 << lane
            numbers.setdefault(place[1], set()).add(kernel)
    assert all(len(kernels) == 1 for kernels in numbers.values())
    assert len(set.union(*numbers.values())) == 2


def test_arrays_by_site(found):
    """Over all shards, each thread is counted at its own exit and nowhere else."""
    maps, sites = found
    total = {}
    for mangled, _, array, _ in maps["sites"]:
        values = np.array(array)  # [shard, site, field]
        assert values.shape[1] == sites[mangled]
        total[mangled] = values[:, :, :2].sum(axis=0)[values[:, :, 0].any(axis=0)].tolist()
        assert values[:, :, 2].max() == {"_Z5firstPi": 6 * 72 - 1, "_Z6secondPi": 8 * 60 - 1}[mangled]
    assert total["_Z5firstPi"] == [[24 * 6 * 24] * 2] * 3
    assert total["_Z6secondPi"] == [[2 * 64 + 8 * 60] * 2]
