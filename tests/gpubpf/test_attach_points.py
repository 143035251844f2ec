"""Every point of docs/attach-points.md: a C text of its own is put there, on a program whose counts are known, and they are exact."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

import gpubpf_cuda
import memory_model as model
from gpubpf.ebpf.bytecode import FLOAT_OPERATIONS, KINDS, RETURNS, SPACES, TYPES
from gpubpf_bcc import compiled
from memory_answers import answers

ROOT = Path(__file__).resolve().parents[2]
THREADS = 128  # of a launch, unless said

# app WHAT…: runs these.
CUDA = r"""
#include <cstdio>
#include <cstring>
__device__ __noinline__ int climb(int n) {
    int deeper = n > 0 ? climb(n - 1) : 0;
    asm volatile("" : "+r"(deeper));  // or it becomes a loop
    return deeper + 1;
}
__device__ __noinline__ int third(int lane) {
    if (lane == 3) asm volatile("exit;");  // leaves the kernel, does not return
    return lane + 1;
}
__global__ void calls(int *out) { out[blockIdx.x * 64 + threadIdx.x] = climb(threadIdx.x % 4) + third(threadIdx.x % 32); }
__global__ void paths(int *out) {
    int t = threadIdx.x + 64 * blockIdx.x;
    if (t % 4 == 0)                   // "a quarter"
        atomicAdd(out + 200, 1);      // "in a quarter"
#pragma unroll 1
    for (int i = 0; i < t % 8; i++)   // "a loop"
        atomicAdd(out + 201, i);      // "in a loop"
    if (t == 5) return;               // "one"
    out[t] = climb(t % 4);            // "the others"
}
__global__ void values(int *in, int *out) {
    int t = threadIdx.x + 64 * blockIdx.x;
    out[t] = 3 * t - 1;                                                         // "words"
    reinterpret_cast<double *>(in)[t] = t / 4.0;                                // "doubles"
    reinterpret_cast<float4 *>(in)[128 + t] = make_float4(t, 0.5f, -t, 1e38f);  // "vectors"
    double loaded = reinterpret_cast<volatile double *>(in)[t];                 // "loaded"
    int before = atomicAdd(in + 300, 2);                                        // "used"
    atomicMax(in + 301, t);                                                     // "unused"
    if (t < 40) reinterpret_cast<short *>(out)[400 + t] = before - loaded;      // "some"
}
__global__ void floats(double *out) {
    int t = threadIdx.x + 64 * blockIdx.x;
    float x = __int2float_rn(t);                           // "converted"
    float s = __fmul_rn(x, -0.5f);                         // "scaled"
    float f = __fmaf_rn(s, s, x);                          // "fused"
    double wide = x;                                       // "widened"
    double ratio = __ddiv_rn(wide, s);                     // "divided"
    unsigned pair = 0x3C004000 + (t << 16);                // { 2, as the bits of t behind 1 }
    asm volatile("add.f16x2 %0, %0, %0;" : "+r"(pair));    // "pair"
    asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f42800000; @p neg.f32 %0, %0; }" : "+f"(f));  // "negated"
    if (t % 3 == 0) ratio = __dsqrt_rn(wide);              // "rooted"
    out[t] = t % 2 ? ratio : __hiloint2double(pair, __float_as_int(f));
}
__global__ void typed(int *out, float x, char c, short3 s, double d) { *out = x + c + s.y + d; }
__global__ void early(int *out) {
    if (threadIdx.x < 10 || (blockIdx.x == 2 && threadIdx.x >= 32)) return;
    for (int i = 0; i < 20; i++) {
        if (i == threadIdx.x - 40) return;
        atomicAdd(out, 1);
    }
}
__global__ void barriers(int *out) {
    for (int i = 0; i < 3; i++) __syncthreads();
    if (threadIdx.x < 32)
        asm volatile("bar.arrive 1, 64;" ::: "memory");
    else
        asm volatile("bar.sync 1, 64;" ::: "memory");
    *out = __syncthreads_count(1);
    __syncwarp();
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}
__global__ void waits(int *out) {  // 4 warps; the last one comes last
    __nanosleep(1000 * (threadIdx.x / 32));
    asm volatile("bar.sync 3;" ::: "memory");
    __nanosleep(100 * (threadIdx.x / 32));
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
    *out = 1;
}
__constant__ int table[64];
__global__ void accesses(int *in, int *out) {
    __shared__ __align__(16) int values[256];
    int local[8];
    int t = threadIdx.x, i = blockIdx.x * 64 + t;
    unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(values));
    asm volatile("{ .reg .b32 a, b, c, d; .reg .b64 l; .reg .pred odd;\n"
        "  ld.global.nc.v2.b32 {a, b}, [%0];\n"              // load, global, 8
        "  ld.volatile.global.b32 c, [%0+256];\n"            // load, global, 4
        "  st.shared.v4.b32 [%1], {a, b, c, c};\n"           // store, shared, 16
        "  st.b16 [%2], 7;\n"                                // store, shared, 2: through a generic address
        "  ld.b8 d, [%3];\n"                                 // load, global, 1: likewise
        "  setp.ge.u32 odd, %4, 24;\n"
        "  @odd atom.global.add.u32 d, [%3], 1;\n"           // atomic, global, 4: 40 of 64 threads
        "  @!odd red.shared.or.b32 [%5], 1;\n"               // atomic, shared, 4: 24 of 64 threads
        "  @odd red.add.u64 [%6], 1;\n"                      // atomic, shared, 8: 40, through a generic address
        "  cp.async.ca.shared.global [%1], [%0], 8;\n"       // async, global and shared, 8
        "  cp.async.cg.shared.global [%5], [%7], 16, 0;\n"   // async, shared only: nothing is read
        "  cp.async.wait_all; }"
        :: "l"(in + 2 * i), "r"(at + 16 * (t % 16)), "l"(values + t), "l"(out + t), "r"(t), "r"(at), "l"((long *)values), "l"(in)
        : "memory");
    asm volatile("{ .reg .b32 a; ld.const.b32 a, [%0]; }" :: "l"(__cvta_generic_to_constant(table + t % 4)) : "memory");
    for (int k = 0; k < 8; k++) asm volatile("st.local.b32 [%0], %1;" :: "l"(__cvta_generic_to_local(local + k)), "r"(k) : "memory");
    if (t % 2) asm volatile("{ .reg .b32 a; ld.b32 a, [%0]; }" :: "l"(local + t % 8) : "memory");  // generic, local
}
int main(int argc, char **argv) {
    int *in, *out, *other;
    if (cudaMalloc(&in, 4096) || cudaMalloc(&out, 4096) || cudaMemset(in, 0, 4096)) return 99;
    for (int n = 1; n < argc; n++) {
        const char *what = argv[n];
        if (!strcmp(what, "calls")) calls<<<2, 64>>>(out);
        if (!strcmp(what, "paths")) paths<<<2, 64>>>(out);
        if (!strcmp(what, "values")) values<<<2, 64>>>(in, out);
        if (!strcmp(what, "floats")) floats<<<2, 64>>>(reinterpret_cast<double *>(out));
        if (!strcmp(what, "typed")) typed<<<2, 64>>>(out, 1.5f, 'z', make_short3(1, -2, 3), 0.1);
        if (!strcmp(what, "barriers")) barriers<<<2, 64>>>(out);
        if (!strcmp(what, "waits")) waits<<<1, 128>>>(out);
        if (!strcmp(what, "accesses")) accesses<<<2, 64>>>(in, out);
        if (!strcmp(what, "streams")) {
            cudaStream_t streams[8];
            for (auto &s : streams) cudaStreamCreate(&s);
            for (int k = 0; k < 40; k++) early<<<4, 96, 0, streams[k % 8]>>>(out);
        }
        if (!strcmp(what, "operations")) {
            char host[300] = {};
            cudaStream_t stream;
            cudaEvent_t event;
            cudaStreamCreate(&stream);
            cudaEventCreate(&event);
            cudaMalloc(&other, 1000);
            for (int k = 0; k < 3; k++) cudaMemcpy(out, host, 100 + k, cudaMemcpyHostToDevice);
            for (int k = 0; k < 2; k++) cudaMemcpyAsync(host, out, 200, cudaMemcpyDeviceToHost, stream);
            cudaMemcpyAsync(other, out, 300, cudaMemcpyDeviceToDevice, stream);
            for (int k = 0; k < 4; k++) cudaMemsetAsync(out, 0, 50, stream);
            for (int k = 0; k < 5; k++) cudaEventRecord(event, stream);
            for (int k = 0; k < 6; k++) cudaStreamWaitEvent(0, event, 0);
            for (int k = 0; k < 7; k++) cudaStreamSynchronize(stream);
            cudaFree(other);
        }
        int error = cudaDeviceSynchronize();
        printf("%s %d\n", what, error);
    }
    return 7;
}
"""
COUNTS = """
#include <gpubpf.h>
GPU_ARRAY(counts, u64, 64);
static inline void count(int which) {
    u64 *cell = counts.lookup(&which);
    if (cell)
        __sync_fetch_and_add(cell, 1);
}
"""
# found.json: every map decoded, the sites of every kernel, the summary.
SCRIPT = """
import json, sys
from gpubpf.ebpf import maps
from gpubpf.show import cli
from gpubpf.program import BPF
parser = cli.parser("probe", "", "")
for add in (cli.add_targets, cli.add_kernels, cli.add_threads, cli.add_device, cli.add_looks, cli.add_output):
    add(parser)
args = cli.parse(parser, sys.argv[3:])
b = BPF(text=open(sys.argv[1]).read())
for call, options in json.loads(sys.argv[2]):
    getattr(b, call)(**options)
rings = [d.name for d in b.attached.definitions() if d.kind == "ringbuf"]
found = {name: [] for name in rings}
with b.trace(cli.Options.of(args)) as session:
    for _ in session.intervals(args.interval, args.count):
        for name in rings:
            for part in session.rings(name):
                found[name] += part.records.tolist()
for d in b.attached.definitions():
    for i in session.instances(d.name) if d.kind not in ("param", "ringbuf", "shared_array") else ():
        found[d.name] = maps.decode(d, i.raw, i.capacity).tolist()
    for shared in session.shared(d.name) if d.kind == "shared_array" else ():
        found[d.name] = shared.array.tolist()
found["sites"] = {
    kernel.mangled: {n: [s.point, s.function, s.opcode, s.kind, s.space, s.width] for n, s in session.sites(kernel.mangled).items()}
    for kernel in session.kernels()
}
found["places"] = {
    kernel.mangled: {n: [s.point, s.function, s.source_line, s.block, s.line] for n, s in session.sites(kernel.mangled).items()}
    for kernel in session.kernels()
}
found["summary"] = session.summary()
json.dump(found, open("found.json", "w"), default=str)
sys.exit(session.status)
"""


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    compiled(COUNTS + "int on_entry(struct gpu_entry *ctx) { count(0); return 0; }")
    where = tmp_path_factory.mktemp("points")
    gpubpf_cuda.build(CUDA, where / "app", "-O2", "-arch=sm_90", "-lineinfo")
    (where / "probe.py").write_text(SCRIPT)
    return where


@pytest.fixture
def run(where):
    def once(text, attach, *whats, clock="real"):
        (where / "probe.c").write_text(COUNTS + text)
        head = [sys.executable, "probe.py", "probe.c", json.dumps(attach), "--device", "sim"]
        done = subprocess.run(
            [*head, "--", "./app", *whats],
            cwd=where,
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"CUDASIM_CLOCK": clock, "CUDASIM_HOSTILE": "1"},
        )
        assert done.returncode == 7, done.stderr
        assert done.stdout.split() == [word for what in whats for word in (what, "0")]
        return json.loads((where / "found.json").read_text())

    return once


def test_kernel_entry_and_exit(run):
    """40 launches of 4 blocks of 96 threads that overlap in eight streams; half of them take another way out."""
    text = """
    int on_entry(struct gpu_entry *ctx) { count(0); return 0; }
    int on_exit(struct gpu_exit *ctx) { count(1); return 0; }
    """
    attach = [["attach_gpu_entry", {"fn_name": "on_entry"}], ["attach_gpu_exit", {"fn_name": "on_exit"}]]
    found = run(text, attach, "streams", "calls")
    assert found["counts"][:3] == [40 * 384 + THREADS, 40 * 384 + THREADS, 0]


def test_device_functions(run):
    """climb calls itself; one thread in 32 leaves the kernel inside third."""
    text = """
    GPU_THREAD_ARRAY(depth, u64, 1);
    int on_climb(struct gpu_function_entry *ctx) { count(0); return 0; }
    int off_climb(struct gpu_function_exit *ctx) { count(1); return 0; }
    int on_any(struct gpu_function_entry *ctx) {
        int key = 0;
        u64 *mine = depth.lookup(&key);
        if (mine) *mine += 1;
        count(2);
        return 0;
    }
    int off_third(struct gpu_function_exit *ctx) { count(3); return 0; }
    int off(struct gpu_exit *ctx) { count(4); return 0; }
    """
    attach = [
        ["attach_gpu_function_entry", {"fn_name": "on_climb", "function": "climb"}],
        ["attach_gpu_function_exit", {"fn_name": "off_climb", "function": ["cl*"]}],
        ["attach_gpu_function_entry", {"fn_name": "on_any"}],
        ["attach_gpu_function_exit", {"fn_name": "off_third", "function": "third"}],
        ["attach_gpu_exit", {"fn_name": "off"}],
    ]
    found = run(text, attach, "calls", "calls")
    climbs = 2 * sum(t % 4 + 1 for t in range(THREADS))
    assert found["counts"][:5] == [climbs, climbs, climbs + 2 * THREADS, 2 * (THREADS - 4), 2 * THREADS]
    assert found["depth"] == [[2 * (t % 4 + 2) for t in range(THREADS)]]
    (sites,) = (sites for name, sites in found["sites"].items() if "calls" in name)
    assert [int(number) for number in sites] == list(range(len(sites)))
    assert {point for point, *_ in sites.values()} >= {"function_entry", "function_exit", "exit"}


def test_arguments_and_results(run):
    """A kernel's arguments of several types; those of a function that calls itself, and what it returns."""
    text = """
    static inline void add(int which, u64 number) {
        u64 *cell = counts.lookup(&which);
        if (cell) __sync_fetch_and_add(cell, number);
    }
    int on_entry(struct gpu_entry *ctx) {
        if (ctx->args == 5 && ctx->arg0 && ctx->arg1 == 0x3FC00000 && ctx->arg2 == 'z' && ctx->arg3 == 0x3FFFE0001 &&
            ctx->arg4 == 0x3FB999999999999A && ctx->arg5 == 0)
            count(0);
        return 0;
    }
    int on_climb(struct gpu_function_entry *ctx) { add(1, ctx->arg0); if (ctx->args == 1) count(2); return 0; }
    int off_climb(struct gpu_function_exit *ctx) { add(3, ctx->low); add(4, ctx->high); return 0; }
    """
    attach = [
        ["attach_gpu_entry", {"fn_name": "on_entry", "kernel": "typed"}],
        ["attach_gpu_function_entry", {"fn_name": "on_climb", "function": "climb"}],
        ["attach_gpu_function_exit", {"fn_name": "off_climb", "function": "climb"}],
    ]
    found = run(text, attach, "typed", "calls")
    each = [n for t in range(THREADS) for n in range(t % 4 + 1)]  # the argument of each call
    assert found["counts"][:5] == [THREADS, sum(each), len(each), sum(n + 1 for n in each), 0]


def test_blocks_begin_and_end_once(run):
    """Each of 40 overlapping launches has 4 blocks. A block ends after all its threads, whichever way they went."""
    text = """
    GPU_ARRAY(left, u64, 4096);
    int begin(struct gpu_block_begin *ctx) { count(0); return 0; }
    int off(struct gpu_exit *ctx) {
        u64 x, y, z;
        bpf_get_block_idx(&x, &y, &z);
        int key = (ctx->launch * 4 + x) & 4095;
        u64 *mine = left.lookup(&key);
        if (mine) __sync_fetch_and_add(mine, 1);
        return 0;
    }
    int end(struct gpu_block_end *ctx) {
        u64 x, y, z;
        bpf_get_block_idx(&x, &y, &z);
        int key = (ctx->launch * 4 + x) & 4095;
        u64 *mine = left.lookup(&key);
        if (mine && *mine == 96) count(1);
        count(2);
        return 0;
    }
    """
    attach = [
        ["attach_gpu_block_begin", {"fn_name": "begin"}],
        ["attach_gpu_exit", {"fn_name": "off"}],
        ["attach_gpu_block_end", {"fn_name": "end"}],
    ]
    found = run(text, attach, "streams")
    assert found["counts"][:3] == [160, 160, 160]
    assert sorted(found["left"], reverse=True)[:161] == [96] * 160 + [0]
    # where a thread leaves in a function; and only in the kernel that is asked for
    attach = [[call, {**options, "kernel": "calls"}] for call, options in attach]
    found = run(text, attach, "calls", "streams")
    assert (found["counts"][0], found["counts"][2]) == (2, 2)


def test_barriers(run):
    """Arrivals and leaves of each kind of barrier: by number, by how many it waits for."""
    text = """
    static inline void counted(int first, u64 barrier, u64 threads) {
        count(first + (barrier == ~0ULL ? 3 : barrier == 1 ? 2 : threads == 0 ? 0 : 1));
        if (threads == 64) count(first + 4);
    }
    int arrive(struct gpu_barrier_arrive *ctx) { counted(0, ctx->barrier, ctx->threads); return 0; }
    int leave(struct gpu_barrier_leave *ctx) { counted(10, ctx->barrier, ctx->threads); return 0; }
    """
    attach = [
        ["attach_gpu_barrier_arrive", {"fn_name": "arrive"}],
        ["attach_gpu_barrier_leave", {"fn_name": "leave"}],
    ]
    found = run(text, attach, "barriers", "barriers")
    # three times in a loop and once with a count; arrive of one warp, sync of the other; the cluster's
    assert found["counts"][:5] == [2 * 4 * THREADS, 0, 2 * THREADS, 2 * THREADS, 2 * THREADS]
    assert found["counts"][10:15] == [2 * 4 * THREADS, 0, THREADS, 2 * THREADS, THREADS]


def test_how_long_threads_wait_at_a_barrier(run):
    """On the virtual clock: warp w arrives 1000 w ns after the first, and the last one waits for nobody."""
    text = """
    GPU_WARP_ARRAY(barrier, u64, 1);
    GPU_WARP_ARRAY(cluster, u64, 1);
    int leave(struct gpu_barrier_leave *ctx) {
        int key = 0;
        u64 waited = ctx->waited;
        if (ctx->barrier == 3) {
            u64 *mine = barrier.lookup(&key);
            if (mine) gpu_max(mine, waited);
        } else {
            u64 *mine = cluster.lookup(&key);
            if (mine) gpu_max(mine, waited);
        }
        if (gpu_lane() == 0) count(0);
        return 0;
    }
    """
    found = run(text, [["attach_gpu_barrier_leave", {"fn_name": "leave"}]], "waits", clock="virtual")
    assert found["counts"][0] == 8
    for name, step in (("barrier", 1000), ("cluster", 100)):
        waited, least = found[name][0], min(found[name][0])
        assert [w - least for w in waited] == [3 * step, 2 * step, step, 0] and least <= 1


# kind, space → accesses by a block of 64 threads, bytes of them
ACCESSES = {
    ("load", "global"): (3 * 64, (8 + 4 + 1) * 64),
    ("store", "shared"): (2 * 64, (16 + 2) * 64),
    ("atomic", "global"): (40, 4 * 40),
    ("atomic", "shared"): (64, 4 * 24 + 8 * 40),
    ("async", "global"): (64, 8 * 64),
    ("async", "shared"): (2 * 64, (8 + 16) * 64),
    ("load", "const"): (64, 4 * 64),
    ("store", "local"): (8 * 64, 8 * 4 * 64),
    ("load", "local"): (32, 4 * 32),
}


def test_memory_accesses(run):
    """Loads, stores, atomics and asynchronous copies in all spaces, through addresses of a space and generic ones."""
    text = """
    GPU_ARRAY(bytes, u64, 16);
    GPU_ARRAY(least, u64, 16);
    GPU_ARRAY(most, u64, 16);
    int on_access(struct gpu_access *ctx) {
        u32 together = gpu_active();
        int key = (ctx->kind * 4 + ctx->space) & 15;
        u64 *sum = bytes.lookup(&key), *low = least.lookup(&key), *high = most.lookup(&key);
        count(key);
        if (sum) __sync_fetch_and_add(sum, ctx->width);
        if (low) gpu_max(low, ~ctx->address);
        if (high) gpu_max(high, ctx->address + ctx->width);
        if (together != ctx->active || !(ctx->active >> gpu_lane() & 1)) count(40);
        return 0;
    }
    """
    found = run(text, [["attach_gpu_access", {"fn_name": "on_access"}]], "accesses", "accesses")
    got = {}
    for k, kind in enumerate(KINDS):
        for s, space in enumerate(SPACES):
            if found["counts"][4 * k + s]:
                got[kind, space] = found["counts"][4 * k + s], found["bytes"][4 * k + s]
    assert got == {key: (4 * count, 4 * bytes_) for key, (count, bytes_) in ACCESSES.items()}
    assert found["counts"][40] == 0
    extent = {
        (kind, space): (2**64 - 1 - found["least"][4 * k + s], found["most"][4 * k + s])
        for k, kind in enumerate(KINDS)
        for s, space in enumerate(SPACES)
    }
    # in: two elements for each of 128 threads, and one 256 bytes later; shared memory from its start; local memory below 2^20
    low, high = extent["async", "global"]
    assert high - low == 8 * 128
    assert extent["async", "shared"] == (extent["atomic", "shared"][0], 15 * 16 + 8)
    low, high = extent["store", "shared"]
    assert (low, high) == (extent["atomic", "shared"][0], low + 256)
    low, high = extent["store", "local"]
    assert high - low == 32 and high < 2**20
    assert low <= extent["load", "local"][0] and extent["load", "local"][1] <= high
    (sites,) = (sites for name, sites in found["sites"].items() if "accesses" in name)
    widths = Counter((kind, width) for point, _, _, kind, _, width in sites.values() if point == "access")
    assert widths["store", 16] == 1 and widths["store", 2] == 1 and widths["load", 1] == 1


def test_chosen_accesses(run):
    """Only atomics, and of those only in shared memory: also where a generic address leads there."""
    text = "int on_access(struct gpu_access *ctx) { count(ctx->space & 3); if (ctx->kind != GPU_ATOMIC) count(9); return 0; }"
    chosen = {"fn_name": "on_access", "kinds": ["atomic"], "spaces": ["shared"]}
    found = run(text, [["attach_gpu_access", chosen]], "accesses")
    assert found["counts"][:4] == [0, 2 * 64, 0, 0] and found["counts"][9] == 0


def test_several_programs_at_one_point(run):
    """In the order in which they were attached."""
    text = """
    GPU_THREAD_ARRAY(order, u64, 1);
    int first(struct gpu_access *ctx) {
        int key = 0;
        u64 *mine = order.lookup(&key);
        if (mine) *mine = *mine * 10 + 1;
        return 0;
    }
    int second(struct gpu_access *ctx) {
        int key = 0;
        u64 *mine = order.lookup(&key);
        if (mine) *mine = *mine * 10 + 2;
        return 0;
    }
    """
    attach = [
        ["attach_gpu_access", {"fn_name": name, "kinds": ["async"], "spaces": ["global"]}]
        for name in ("first", "second")
    ]
    found = run(text, attach, "accesses")
    assert found["order"] == [[12] * THREADS]


def source_line(mark):
    """The line of CUDA with this mark, in the file that is compiled."""
    return next(n for n, line in enumerate(CUDA.splitlines(), 1) if f'// "{mark}"' in line)


def test_basic_blocks(run):
    """Blocks by number and source line; together as many as the accumulator counts."""
    text = """
    struct visits { u64 warps, threads; };
    GPU_SITE_ARRAY(visits, struct visits);
    int on_block(struct gpu_basic_block *ctx) {
        u64 site = ctx->site;
        struct visits *here = visits.lookup(&site);
        if (!(ctx->active >> gpu_lane() & 1)) count(1);
        if (here && gpu_first(ctx->active)) {
            __sync_fetch_and_add(&here->warps, 1);
            __sync_fetch_and_add(&here->threads, gpu_popcount(ctx->active));
        }
        return 0;
    }
    int on_exit(struct gpu_exit *ctx) {
        int key = 0;
        u64 *sum = counts.lookup(&key);
        if (sum) __sync_fetch_and_add(sum, ctx->work);
        return 0;
    }
    """
    attach = [
        ["attach_gpu_basic_block", {"fn_name": "on_block", "kernel": "pa*"}],
        ["attach_gpu_exit", {"fn_name": "on_exit", "accumulate": "blocks", "kernel": "pa*"}],
    ]
    found = run(text, attach, "paths", "calls", "paths")
    ((kernel, places),) = ((name, of) for name, of in found["places"].items() if "paths" in name)
    total = defaultdict(lambda: (0, 0))
    for number, (point, function, line, block, _) in places.items():
        for shard in found["visits"] if point == "basic_block" else ():
            warps, threads = shard[int(number)]  # of the multiprocessor
            before = total[function, line, block]
            total[function, line, block] = before[0] + warps, before[1] + threads
    numbers = sorted(block for function, _, block in total if function == kernel)
    assert numbers == list(range(len(numbers)))
    by_line = {line: counts for (function, line, _), counts in total.items() if function == kernel}
    assert by_line[source_line("in a quarter")][1] == 2 * THREADS // 4
    assert by_line[source_line("in a loop")][1] == 2 * THREADS // 8 * sum(range(8))
    assert by_line[source_line("the others")][1] == 2 * (THREADS - 1)
    first = {function: threads for (function, _, block), (_, threads) in total.items() if block == 0}
    climbs = sum(t % 4 + 1 for t in range(THREADS) if t != 5)
    assert first == {kernel: 2 * THREADS, "_Z5climbi": 2 * climbs}
    assert all(threads / 32 <= warps <= threads for warps, threads in total.values())
    assert found["counts"][0] == sum(threads for _, threads in total.values()) and found["counts"][1] == 0


def test_branches(run):
    """By source line: how many threads come to a branch, and how many take it. The compiler decides which way is taken."""
    text = """
    struct branches { u64 executed, diverged, lanes, taken; };
    GPU_SITE_ARRAY(branches, struct branches);
    int on_branch(struct gpu_branch *ctx) {
        u64 site = ctx->site;
        struct branches *here = branches.lookup(&site);
        if (!(ctx->active >> gpu_lane() & 1) || ctx->taken & ~ctx->active) count(0);
        if (here && gpu_first(ctx->active)) {
            __sync_fetch_and_add(&here->executed, 1);
            if (ctx->taken != 0 && ctx->taken != ctx->active)
                __sync_fetch_and_add(&here->diverged, 1);
            __sync_fetch_and_add(&here->lanes, gpu_popcount(ctx->active));
            __sync_fetch_and_add(&here->taken, gpu_popcount(ctx->taken));
        }
        return 0;
    }
    """
    found = run(text, [["attach_gpu_branch", {"fn_name": "on_branch"}]], "paths", clock="virtual")
    (places,) = (places for kernel, places in found["places"].items() if "paths" in kernel)
    by_line = defaultdict(list)
    for number, (_, function, line, *_) in places.items():
        counts = [sum(column) for column in zip(*(s[int(number)] for s in found["branches"]), strict=True)]
        if "climb" not in function:
            by_line[line].append(counts)
    ((executed, diverged, lanes, taken),) = by_line[source_line("a quarter")]
    assert lanes == THREADS and {taken, lanes - taken} == {THREADS // 4, THREADS * 3 // 4}
    assert executed >= THREADS // 32 and diverged <= executed
    ((_, diverged, lanes, taken),) = by_line[source_line("one")]
    assert lanes == THREADS and {taken, lanes - taken} == {1, THREADS - 1} and diverged <= 1
    turns = THREADS // 8 * sum(range(8))
    ends = THREADS * 7 // 8  # threads that are in the loop at all
    before, after = sorted(by_line[source_line("a loop")], key=lambda counts: counts[2])
    assert before[2] == THREADS and {before[3], THREADS - before[3]} == {ends, THREADS - ends}
    assert after[2] == turns and {after[3], turns - after[3]} == {ends, turns - ends}
    assert found["counts"][0] == 0
    assert found["summary"]["not_probed"] == {}


def test_values(run):
    """What each line stores and loads, and what its atomics add and return, by thread."""
    text = """
    struct told { u64 low, high, old; u32 site, thread, type, effect; };
    GPU_RINGBUF(events, struct told, 256);
    int on_value(struct gpu_value *ctx) {
        struct told t = {};
        t.low = ctx->low;
        t.high = ctx->high;
        t.old = ctx->old_low;
        t.site = ctx->site;
        t.thread = gpu_global_thread();
        t.type = ctx->type;
        t.effect = ctx->effect;
        if (ctx->space != GPU_GLOBAL || !(ctx->active >> gpu_lane() & 1)) count(0);
        if (ctx->old_high || (ctx->high && ctx->width <= 8)) count(0);
        events.ringbuf_output(&t, sizeof(t), 0);
        return 0;
    }
    """
    found = run(text, [["attach_gpu_value", {"fn_name": "on_value", "kernel": "values"}]], "values", "paths")
    (places,) = (places for kernel, places in found["places"].items() if "values" in kernel)
    told = defaultdict(dict)
    for low, high, old, site, thread, type_, effect in found["events"]:
        line = told[places[str(site)][2]]
        assert thread not in line
        line[thread] = (TYPES[type_], effect, low, high, old)
    threads = range(THREADS)

    def words(form, *values):
        return struct.unpack("<2Q", struct.pack(form, *values).ljust(16, b"\0"))

    reads, writes = 1, 2
    exact = {
        "words": {t: ("u32", writes, *words("<i", 3 * t - 1), 0) for t in threads},
        "doubles": {t: ("f64", writes, *words("<d", t / 4), 0) for t in threads},
        "vectors": {t: ("f32", writes, *words("<4f", t, 0.5, -t, 1e38), 0) for t in threads},
        "loaded": {t: ("f64", reads, *words("<d", t / 4), 0) for t in threads},
        "unused": {t: ("s32", reads | writes, t, 0, 0) for t in threads},
    }
    for mark, right in exact.items():
        assert told.pop(source_line(mark)) == right, mark
    used = told.pop(source_line("used"))
    assert {row[:4] for row in used.values()} == {("u32", reads | writes | RETURNS, 2, 0)}
    assert sorted(row[4] for row in used.values()) == [2 * t for t in threads]  # in the order of the atomics
    assert told.pop(source_line("some")) == {
        t: ("u16", writes, int(used[t][4] - t / 4) & 0xFFFF, 0, 0) for t in range(40)
    }
    assert not told and found["counts"][0] == 0
    assert found["summary"]["not_probed"] == {}


def test_floats_and_instructions(run):
    """What each line computes, and from what, by thread: NumPy computes the same."""
    record = """
    struct told { u64 low, high, operand0, operand1, operand2; u32 site, thread, type, operand_type, operation, operands; };
    GPU_RINGBUF(events, struct told, 256);
    """
    body = """
        struct told t = {};
        t.low = ctx->low;
        t.high = ctx->high;
        t.operand0 = ctx->operand0;
        t.operand1 = ctx->operand1;
        t.operand2 = ctx->operand2;
        t.site = ctx->site;
        t.thread = gpu_global_thread();
        t.type = ctx->type;
        t.operand_type = ctx->operand_type;
        t.operands = ctx->operands;
        if (ctx->operand3 || ctx->high || !(ctx->active >> gpu_lane() & 1)) count(0);
    """
    end = "events.ringbuf_output(&t, sizeof(t), 0); return 0; }"
    text = f"{record} int on_float(struct gpu_float *ctx) {{ {body} t.operation = ctx->operation; {end}"
    text += f"int on_other(struct gpu_instruction *ctx) {{ {body} t.operation = ~0; {end}"
    attach = [
        ["attach_gpu_float", {"fn_name": "on_float", "kernel": "floats"}],
        [
            "attach_gpu_instruction",
            {"fn_name": "on_other", "kernel": "floats", "opcodes": ["setp.lt.f32", "sqrt"]},
        ],
    ]
    found = run(text, attach, "floats", "paths")
    (places,) = (places for kernel, places in found["places"].items() if "floats" in kernel)
    told = defaultdict(dict)
    for low, high, first, second, third, site, thread, type_, operand_type, operation, operands in found[
        "events"
    ]:
        opcode = FLOAT_OPERATIONS[operation] if operation < len(FLOAT_OPERATIONS) else "other"
        line = told[places[str(site)][2], opcode]
        assert thread not in line and high == 0
        line[thread] = (TYPES[type_], TYPES[operand_type], operands, low, first, second, third)
    threads = range(THREADS)
    x = np.arange(THREADS, dtype=np.float32)
    s = x * np.float32(-0.5)
    f = s * s + x  # small integers and quarters of such: exact
    wide = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        ratio = np.where(x == 0, np.nan, wide / s)
    pair = np.stack([np.full(THREADS, 0x4000, np.uint16), 0x3C00 + np.arange(THREADS).astype(np.uint16)], 1)
    none, half, below = np.zeros(THREADS, np.uint64), np.full(THREADS, -0.5, np.float32), f < 64
    limit = np.full(THREADS, 64, np.float32)

    def row(kind, of, *columns, where=None):
        used = [np.ascontiguousarray(column).view(f"u{column.dtype.itemsize}") for column in columns]
        given = sum(column is not none for column in columns[1:])
        where = threads if where is None else np.flatnonzero(where).tolist()
        return {t: (kind, of, given, *(int(column[t]) for column in used)) for t in where}

    f32, f64 = ("f32", "f32"), ("f64", "f64")
    ints = np.arange(THREADS, dtype=np.uint32)
    halves, doubled = pair.view(np.uint32)[:, 0], (pair.view(np.float16) * 2).view(np.uint32)[:, 0]
    thirds = ints % 3 == 0
    exact = {
        ("converted", "cvt"): row("f32", "s32", x, ints, none, none),
        ("scaled", "mul"): row(*f32, s, x, half, none),
        ("fused", "fma"): row(*f32, f, s, s, x),
        ("pair", "add"): row("f16", "f16", doubled, halves, halves, none),
        ("negated", "neg"): row(*f32, -f, f, none, none, where=below),
        ("negated", "other"): row("pred", "f32", below.astype(np.uint64), f, limit, none),
        ("rooted", "sqrt"): row(*f64, np.sqrt(wide), wide, none, none, where=thirds),
        ("rooted", "other"): row(*f64, np.sqrt(wide), wide, none, none, where=thirds),
    }
    for (mark, opcode), right in exact.items():
        assert told.pop((source_line(mark), opcode)) == right, (mark, opcode)
    divided = told.pop((source_line("divided"), "div"))
    first = divided.pop(0)
    assert np.isnan(np.uint64(first[3]).view(np.float64)) and first[4:] == (0, 1 << 63, 0)  # 0 / -0
    assert divided == {t: one for t, one in row(*f64, ratio, wide, s.astype(np.float64), none).items() if t}
    assert {opcode for _, opcode in told} == {"cvt"} and found["counts"][0] == 0  # wide, and s in wide
    assert found["summary"]["not_probed"] == {}


def test_launches_and_operations_on_the_host(run):
    text = """
    GPU_SHARED_ARRAY(host, u64, 32);
    int on_launch(struct gpu_launch *ctx) {
        int key = 31;
        u64 *cell = host.lookup(&key);
        if (cell) *cell += ctx->threads;
        return 0;
    }
    int on_operation(struct gpu_operation *ctx) {
        int key = ctx->kind & 15;
        u64 *cell = host.lookup(&key);
        if (cell) *cell += 1;
        key += 16;
        cell = host.lookup(&key);
        if (cell && key < 31) *cell += ctx->bytes;
        return 0;
    }
    """
    attach = [["attach_launch", {"fn_name": "on_launch"}], ["attach_operation", {"fn_name": "on_operation"}]]
    found = run(text, attach, "operations", "calls", "streams")
    host = found["host"]
    h2d, d2h, d2d, memset, record, wait, sync = (host[n] for n in (2, 3, 4, 6, 7, 8, 10))
    assert (h2d, d2h, d2d, memset, record, wait) == (3, 2, 1, 4 + 1, 5, 6)
    assert [host[16 + n] for n in (2, 3, 4, 6)] == [303, 400, 300, 4 * 50 + 4096]
    assert sync >= 7 + 3
    assert host[31] == THREADS + 40 * 384


def test_every_point_has_its_section_and_its_fields():
    from gpubpf.ebpf.bytecode import CONTEXTS

    page = (ROOT / "docs" / "attach-points.md").read_text()
    for point, fields in CONTEXTS.items():
        assert f"`struct gpu_{point} *`" in page
        missing = [name for name in fields if not re.search(rf"^\|[^|]*`{name}`[^|]*\|", page, re.MULTILINE)]
        assert not missing, f"{point}: {missing}"


RECORDS = """
#include <gpubpf.h>
struct access { u64 launch, address; u32 site, width, thread, active, space, kind; };
GPU_RINGBUF(events, struct access, 65536);
int on_access(struct gpu_access *ctx) {
    struct access a = {};
    a.launch = ctx->launch;
    a.address = ctx->address;
    a.site = ctx->site;
    a.width = ctx->width;
    a.thread = gpu_global_thread();
    a.active = ctx->active;
    a.space = ctx->space;
    a.kind = ctx->kind;
    events.ringbuf_output(&a, sizeof(a), 0);
    return 0;
}
"""


@pytest.fixture(scope="module")
def memory(where):
    flags = ("-O2", "-arch=sm_80", f"-I{ROOT / 'examples'}")
    return gpubpf_cuda.build(ROOT / "examples" / "memory.cu", where / "memory", *flags)


@pytest.mark.every(2)
@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_addresses(where, memory, clock):
    """Every access of examples/memory.cu, recorded by a program of our own and put through the model: known answers."""
    (where / "probe.c").write_text(RECORDS)
    attach = json.dumps([["attach_gpu_access", {"fn_name": "on_access"}]])
    done = subprocess.run(
        [sys.executable, "probe.py", "probe.c", attach, "--device", "sim", "--", memory],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"CUDASIM_CLOCK": clock, "CUDASIM_HOSTILE": "1"},
    )
    assert (done.returncode, done.stdout) == (0, "memory: PASSED\n"), done.stderr
    found = json.loads((where / "found.json").read_text())
    # A request is what the lanes of one warp do at one place, each for its nth time: no loop here is left by some lanes only.
    turns: Counter = Counter()
    requests: dict = {}
    for launch, address, site, width, thread, active, space, kind in found["events"]:
        turns[launch, site, thread] += 1
        key = launch, site, thread // 32, turns[launch, site, thread]
        how = (KINDS[kind], SPACES[space], width)
        same, together, addresses = requests.setdefault(key, (how, active, [None] * 32))
        assert (same, together) == (how, active) and addresses[thread % 32] is None
        addresses[thread % 32] = address
    launches: dict = defaultdict(dict)
    for (launch, site, _, _), (how, active, addresses) in requests.items():
        assert active == sum(1 << lane for lane, _ in model.active(addresses))
        launches[launch].setdefault(site, model.Site(*how)).add(addresses)
    assert len(launches) == len(answers())
    for (kernel, right), (_, sites) in zip(answers().items(), sorted(launches.items()), strict=True):
        assert [site.record() for _, site in sorted(sites.items())] == right, kernel
