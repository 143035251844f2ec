"""Programs with bpftime's types of map and numbers of helpers, on the embedded device: known answers end to end."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

import gpubpf_cuda
from gpubpf.ebpf import clang

pytestmark = pytest.mark.skipif(clang.find() is None, reason="needs clang")

CUDA = r"""
#include <cstdio>
__global__ void mark(int *out) { out[blockIdx.x * blockDim.x + threadIdx.x] += 1; }
int main() {
    int *out, host[4 * 64];
    cudaMalloc(&out, sizeof(host));
    cudaMemset(out, 0, sizeof(host));
    for (int launch = 0; launch < 3; launch++)
        mark<<<4, 64>>>(out);
    cudaMemcpy(host, out, sizeof(host), cudaMemcpyDeviceToHost);
    for (int block = 0; block < 4; block++) {
        int sum = 0;
        for (int thread = 0; thread < 64; thread++)
            sum += host[64 * block + thread];
        printf("%d ", sum);
    }
    printf("%s\n", cudaGetErrorString(cudaGetLastError()));
}
"""
# The last two blocks do not run the kernel.
TEXT = r"""
#include <gpubpf.h>
struct place { u64 sm, warp, lane, x, y, z, sum, missing; };
struct event { u64 block, thread; u32 launch; };
struct page { char bytes[1024]; };
GPU_THREAD_ARRAY(places, struct place, 1);
GPU_THREAD_ARRAY(runs, u64, 2);
GPU_HASH(blocks, u32, u64, 16);
GPU_HASH(gone, u32, u64, 16);
GPU_ARRAY(seen, u64, 4);
GPU_SHARED_ARRAY(total, u64, 3);
GPU_SHARED_ARRAY(last, u64, 2);
GPU_RINGBUF(events, struct page, 1);

int on_entry(struct gpu_entry *ctx) {
    u64 bx, by, bz, one = 1;
    bpf_get_block_idx(&bx, &by, &bz);
    u32 key = bx, zero = 0, beyond = 4;
    if (bpf_map_delete_elem(&seen, &zero) == -22 && !bpf_map_lookup_elem(&seen, &beyond)) {
        u64 *count = bpf_map_lookup_elem(&seen, &key);
        if (count)
            __sync_fetch_and_add(count, 1);
    }
    if (bx > 1) {
        bpf_map_update_elem(&gone, &key, &bx, 0);
        bpf_cuda_exit();
        bpf_map_update_elem(&gone, &zero, &bx, 0); /* nobody comes here */
    }
    return 0;
}

int on_exit(struct gpu_exit *ctx) {
    u64 bx, by, bz, tx, ty, tz, gx, gy, gz;
    bpf_get_block_idx(&bx, &by, &bz);
    bpf_get_thread_idx(&tx, &ty, &tz);
    bpf_get_grid_dim(&gx, &gy, &gz);
    u32 zero = 0, key = bx, second = 1;
    struct place *mine = bpf_map_lookup_elem(&places, &zero);
    if (mine) {
        mine->sm = bpf_get_sm_id() == gpu_sm();
        mine->warp = bpf_get_warp_id();
        mine->lane = bpf_get_lane_id();
        mine->x = gx;
        mine->y = gy;
        mine->z = gz;
    }
    u64 *count = bpf_map_lookup_elem(&runs, &second);
    u64 next = count ? *count + 1 : 1;
    bpf_map_update_elem(&runs, &second, &next, 0);

    for (u64 k = 0; mine && k < gx; k++) { /* the grid's size is only known on the GPU */
        u32 at = k;
        u64 *one = bpf_map_lookup_elem(&runs, &at);
        if (one)
            mine->sum += *one;
        else
            mine->missing++;
    }

    u64 *sum = bpf_map_lookup_elem(&total, &second);
    if (sum)
        __sync_fetch_and_add(sum, tx);
    if (tx == 63)
        bpf_map_update_elem(&last, &zero, &tx, 0);
    if (tx == 0) { /* one thread of each block: clang merges both calls */
        u64 *old = bpf_map_lookup_elem(&blocks, &key);
        u64 first = 100 + bx;
        if (old) {
            *old += 1;
            bpf_map_update_elem(&blocks, &key, old, 2);
        } else {
            bpf_map_update_elem(&blocks, &key, &first, 1);
        }
    }
    struct event event = {};
    event.block = bx;
    event.thread = tx;
    event.launch = 7;
    if (tx % 32 == 5)
        bpf_perf_event_output(0, &events, 0, &event, sizeof(event));
    char name[] = "block";
    if (bx == 1 && tx == 9)
        bpf_trace_printk("%s %lu: %llx\n", name, bx, 1ull << 40 | tx);
    if (bx == 0 && tx == 63)
        bpf_trace_printk("%d of %u, %p", -1, gx, tx);
    return 0;
}
"""
SCRIPT = """
import pickle, sys
from gpubpf.record import replace
from gpubpf.ebpf import compile, maps
from gpubpf.lower import programs
from gpubpf.program import BPF
from gpubpf.show import cli
from gpubpf.verify import records

TYPES = {"places": 1502, "runs": 1512, "blocks": 1501, "gone": 1, "seen": 1503, "total": 1504, "last": 1513, "events": 1527}

class Declared(programs.CompiledPrograms):
    '''The programs of the text, with maps of bpftime's types.'''
    def __init__(self, text, any_user):
        program = compile._compile_with_clang(text)
        declared = {
            d.name: maps.declared(d.name, TYPES[d.name], 4, d.value_size, d.max_entries, "<u4", d.value_type)
            for d in program.maps.values()
        }
        declared["events"] = maps.declared("events", 1527, 4, 1024, 16)
        self.program = records.sized(replace(program, maps=declared))
    def fragment(self, name):
        return programs.verified(self.program, name)[0]

parser = cli.parser("probe", "", "")
for add in (cli.add_targets, cli.add_kernels, cli.add_threads, cli.add_device, cli.add_looks, cli.add_output):
    add(parser)
args = cli.parse(parser, sys.argv[2:])
programs.load = Declared
b = BPF(text=open(sys.argv[1]).read())
b.attach_gpu_entry(kernel=args.kernel, fn_name="on_entry")
b.attach_gpu_exit(kernel=args.kernel, fn_name="on_exit")
found = {"prints": [], "events": []}
with b.trace(cli.Options.of(args)) as session:
    for _ in session.intervals(args.interval, args.count):
        for part in session.rings(maps.PRINTS):
            found["prints"] += maps.prints(b.attached.formats(), part.records)
        for part in session.rings("events"):
            found["events"] += [one.tobytes() for one in part.records]
for d in b.attached.definitions():
    if d.kind == "shared_array":
        (one,) = session.shared(d.name)
        found[d.name] = one.array.tolist()
    elif d.kind != "ringbuf":
        (one,) = session.instances(d.name)
        found[d.name] = one.array.tolist()
found["lost"] = sum(shard.lost for counts in session.ring_counts("events") for shard in counts.shards)
pickle.dump(found, open("found", "wb"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    where = tmp_path_factory.mktemp("bpftime")
    gpubpf_cuda.build(CUDA, where / "mark")
    (where / "probe.c").write_text(TEXT)
    (where / "probe.py").write_text(SCRIPT)
    command = [sys.executable, "probe.py", "probe.c", "--device", "sim", "--kernel", "mark", "--", "./mark"]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout, pickle.loads((where / "found").read_bytes())


@pytest.mark.every(2)
def test_threads_that_end_at_entry_run_nothing(found):
    """Neither the kernel nor a program at its exit, nor the rest of the program that ends them."""
    said, maps = found
    assert said == "192 192 0 0 no error\n"
    assert maps["runs"] == [[0] * 256, [3] * 128 + [0] * 128]
    assert dict(maps["gone"]) == {2: 2, 3: 3}


def test_every_type_of_map(found):
    _, maps = found
    assert maps["seen"] == [3 * 64] * 4
    assert dict(maps["blocks"]) == {0: 102, 1: 103}
    assert maps["total"] == [0, 3 * 2 * sum(range(64)), 0]
    assert maps["last"] == [63, 0]


def test_where_a_thread_is(found):
    _, maps = found
    (places,) = maps["places"]
    assert [place[:6] for place in places[:128]] == [
        (1, thread // 32 % 2, thread % 32, 4, 1, 1) for thread in range(128)
    ]
    assert places[128:] == [(0,) * 8] * 128


def test_a_loop_over_the_grid(found):
    """In each launch, 4 turns: 0 and the number of the launch, and two keys that the map does not have."""
    _, maps = found
    assert {place[6:] for place in maps["places"][0][:128]} == {(1 + 2 + 3, 3 * 2)}


def test_records_without_a_context(found):
    """3 launches, 2 blocks, 2 warps; records take the room of what is written."""
    _, maps = found
    records = [[int.from_bytes(r[at : at + 8], "little") for at in (0, 8, 16)] for r in maps["events"]]
    assert {len(r) for r in maps["events"]} == {24}
    assert sorted(records) == sorted([[block, thread, 7] for block in (0, 1) for thread in (5, 37)] * 3)
    assert maps["lost"] == 0


def test_prints(found):
    _, maps = found
    assert sorted(maps["prints"]) == ["-1 of 4, 0x3f"] * 3 + ["block 1: 10000000009\n"] * 3
