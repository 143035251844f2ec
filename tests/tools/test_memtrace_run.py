"""memtrace from its command line to its exit status. What it must say comes from tests/support/memory_model.py, fed with addresses
that are known without it: from the program's text, or from memtrace's own record of every access."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import gpubpf_cuda
import memory_model as model
from memory_answers import answers, lines

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(REPOSITORY / "tools/memtrace.py"), "--device", "sim"]
pytestmark = gpubpf_cuda.needs_cuda

# (kernel, bytes of the allocation) → bytes read, written
TOUCHED = {
    "stride2": {(8192, 4096, 0), (4096, 0, 4096)},
    "misaligned": {(4100, 4096, 0), (4096, 0, 4096)},
    "broadcast": {(4, 4, 0), (4096, 0, 4096)},
    "halfWarp": {(4096, 2048, 0), (4096, 0, 2048)},
    "histogramGlobal": {(4096, 4096, 0), (32, 32, 32)},
    "asynchronous": {(8192, 4096, 0), (4096, 0, 4096)},
    "unused": {(8192, 4096, 0), (8192, 0, 4096)},
}


def run(*arguments, clock="real", status=0):
    environment = os.environ | {"CUDASIM_CLOCK": clock, "CUDASIM_HOSTILE": "1"}
    done = subprocess.run(
        [*TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == status, done.stderr
    return done


def traced(tmp_path, *arguments, **options):
    """The records of a run, and what the program said."""
    out = tmp_path / "records"
    done = run("--json", "-o", out, *arguments, **options)
    return [json.loads(line) for line in out.read_text().splitlines()], done.stdout


def sites(records):
    """kernel → its site records in the order of their numbers."""
    found = defaultdict(list)
    for record in records:
        if record["type"] == "site":
            found[record["kernel"]].append(record)
    return {kernel: sorted(rows, key=lambda row: row["site"]) for kernel, rows in found.items()}


def rounded(record):
    """Every field that the model has; quotients are printed to six digits."""
    shown = {name: record[name] for name in model.site("load", "global", 4, [[0]])}
    for name in ("ratio", "lanes_mean", "addresses_mean"):
        shown[name] = shown[name] if shown[name] is None else round(shown[name], 6)
    if ways := shown["bank_ways"]:
        shown["bank_ways"] = {"mean": round(ways["mean"], 6), "max": ways["max"]}
    return shown


def agrees(record, right):
    assert rounded(record) == rounded(right), f"{record['kernel']}, site {record['site']}"


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    program = tmp_path_factory.mktemp("memory") / "memory"
    flags = ("-O2", "-lineinfo", "-arch=sm_80", f"-I{REPOSITORY / 'examples'}")
    return str(gpubpf_cuda.build(REPOSITORY / "examples" / "memory.cu", program, *flags))


@pytest.mark.every(2)
@pytest.mark.parametrize("clock", ["real", pytest.param("virtual", marks=pytest.mark.long)])
def test_the_known_answers(memory, tmp_path, clock):
    records, said = traced(tmp_path, "--", memory, clock=clock)
    assert said == "memory: PASSED\n"
    found = sites(records)
    assert set(found) == set(answers())
    source = (REPOSITORY / "examples" / "memory.cu").read_text().splitlines()
    for kernel, right in answers().items():
        assert len(found[kernel]) == len(right), kernel
        for record, answer in zip(found[kernel], right, strict=True):
            agrees(record, answer)
            file, line = record["source"].rsplit(":", 1)
            assert file == "memory.cu"
            assert record["ptx_line"] > 0 and "//" not in source[int(line) - 1][:2]
    for kernel in ("stride2", "transposeNaive"):
        line = int(found[kernel][0]["source"].rsplit(":", 1)[1])
        assert kernel in source[line - 1] + source[line - 3]
    summary = records[-1]
    assert summary["launches_instrumented"] == summary["launches_matched"] == len(answers())
    assert summary["lost"] == 0 and summary["not_probed"] == {}


@pytest.mark.every(4)
@pytest.mark.parametrize("kernel", TOUCHED)
def test_what_is_touched_of_allocations(memory, tmp_path, kernel):
    records, _ = traced(tmp_path, "--", memory, kernel)
    allocations = [r for r in records if r["type"] == "allocation"]
    got = {
        (r["bytes"], r["read_bytes"], r["written_bytes"])
        for r in allocations
        if r["bytes"] - r["untouched_bytes"]
    }
    assert got == TOUCHED[kernel]
    for r in allocations:
        assert r["untouched_bytes"] == r["bytes"] - max(r["read_bytes"], r["written_bytes"])
        assert int(r["base"], 16) % 256 == 0


# --- kernels of the common kinds ----------------------------------------------------------------------------------------------------

COMMON = r"""
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>
constexpr int N = 64;
__global__ void matmul(const float *a, const float *b, float *c) {  // 64 x 64, tiles of 16 x 16
    __shared__ float ta[16][16], tb[16][16];
    int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
    float sum = 0;
#pragma unroll 1
    for (int k = 0; k < N; k += 16) {
        ta[threadIdx.y][threadIdx.x] = a[y * N + k + threadIdx.x];
        tb[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * N + x];
        __syncthreads();
#pragma unroll 4
        for (int i = 0; i < 16; i++) sum += ta[threadIdx.y][i] * tb[i][threadIdx.x];
        __syncthreads();
    }
    c[y * N + x] = sum;
}
__global__ void scan(const float *in, float *out) {  // of 256 in each block, sweep up and down
    __shared__ float s[256];
    int t = threadIdx.x;
    s[t] = in[blockIdx.x * 256 + t];
#pragma unroll 1
    for (int d = 1; d < 256; d *= 2) {
        __syncthreads();
        int i = 2 * d * (t + 1) - 1;
        if (i < 256) s[i] += s[i - d];
    }
#pragma unroll 1
    for (int d = 64; d >= 1; d /= 2) {
        __syncthreads();
        int i = 2 * d * (t + 1) - 1;
        if (i + d < 256) s[i + d] += s[i];
    }
    __syncthreads();
    out[blockIdx.x * 256 + t] = s[t];
}
__global__ void histogram(const float *in, float *out) {
    __shared__ unsigned bins[32];
    if (threadIdx.x < 32) bins[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < N * N; i += blockDim.x) atomicAdd(bins + (unsigned)in[i] * 7u % 31u, 1u);
    __syncthreads();
    if (threadIdx.x < 32) out[threadIdx.x] = bins[threadIdx.x];
}
__global__ void nbody(const float4 *bodies, float4 *out) {
    __shared__ float4 tile[64];
    int i = blockIdx.x * 64 + threadIdx.x;
    float4 me = bodies[i], force = {};
    for (int first = 0; first < 256; first += 64) {
        tile[threadIdx.x] = bodies[first + threadIdx.x];
        __syncthreads();
        for (int j = 0; j < 64; j++) {
            float dx = tile[j].x - me.x, dy = tile[j].y - me.y, dz = tile[j].z - me.z;
            float w = tile[j].w / (dx * dx + dy * dy + dz * dz + 1);
            force.x += dx * w, force.y += dy * w, force.z += dz * w;
        }
        __syncthreads();
    }
    out[i] = force;
}
__global__ void stencil(const float *in, float *out) {
    int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y, at = y * N + x;
    if (x > 0 && x < N - 1 && y > 0 && y < N - 1)
        out[at] = in[at] + in[at - 1] + in[at + 1] + in[at - N] + in[at + N];
}
__global__ void softmax(const float *in, float *out) {  // a warp for each row
    int row = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x;
    float most = -INFINITY, sum = 0;
    for (int i = lane; i < N; i += 32) most = fmaxf(most, in[row * N + i]);
    for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    for (int i = lane; i < N; i += 32) sum += expf(in[row * N + i] - most);
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    for (int i = lane; i < N; i += 32) out[row * N + i] = expf(in[row * N + i] - most) / sum;
}
__global__ void reduce(const float *in, float *out) {
    __shared__ float sums[8];
    float sum = 0;
    for (int i = threadIdx.x; i < N * N; i += 256) sum += in[i];
    for (int d = 16; d; d /= 2) sum += __shfl_down_sync(~0u, sum, d);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 8) {
        sum = sums[threadIdx.x];
        for (int d = 4; d; d /= 2) sum += __shfl_down_sync(0xff, sum, d);
        if (threadIdx.x == 0) *out = sum;
    }
}
__global__ void bitonic(const float *in, float *out) {  // 256 in one block
    __shared__ float s[256];
    int t = threadIdx.x;
    s[t] = in[t];
#pragma unroll 1
    for (int k = 2; k <= 256; k *= 2)
#pragma unroll 1
        for (int j = k / 2; j; j /= 2) {
            __syncthreads();
            int other = t ^ j;
            if (other > t && (s[t] > s[other]) == ((t & k) == 0)) {
                float kept = s[t];
                s[t] = s[other];
                s[other] = kept;
            }
        }
    __syncthreads();
    out[t] = s[t];
}
__device__ __noinline__ float through(const float *p) { return *p; }  // one load, in two spaces
__global__ void mixed(const float *in, float *out) {
    __shared__ float s[32];
    s[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    const float *from = threadIdx.x % 2 ? s + 31 - threadIdx.x : in + threadIdx.x;
    out[threadIdx.x] = through(from);
}
__global__ void bytes(const char *in, char *out) {  // elements of 1, 2 and 8 bytes; every third thread
    int t = threadIdx.x;
    if (t % 3 == 0) out[3 * t] = in[2 * t];
    ((short *)out)[512 + 5 * t] = ((const short *)in)[511 - t];
    ((double *)out)[512 + t / 4] = ((const double *)in)[t % 4 * 16];
}
template <typename... T>
bool launch(const char *asked, const char *name, void (*kernel)(T...), dim3 grid, dim3 block, T... arguments) {
    if (!strcmp(asked, name)) kernel<<<grid, block>>>(arguments...);
    return !strcmp(asked, name);
}
int main(int argc, char **argv) {
    float *in, *out;
    std::vector<float> values(N * N);
    for (int i = 0; i < N * N; i++) values[i] = i * 37 % 101;
    if (cudaMalloc(&in, 4 * N * N) || cudaMalloc(&out, 4 * N * N)) return 99;
    for (int i = 1; i < argc; i++) {
        cudaMemcpy(in, values.data(), 4 * N * N, cudaMemcpyHostToDevice);
        cudaMemset(out, 0, 4 * N * N);
        const char *what = argv[i];
        const float *cin = in;
        bool known = launch(what, "matmul", matmul, dim3(4, 4), dim3(16, 16), cin, cin, out) ||
            launch(what, "scan", scan, 4, 256, cin, out) || launch(what, "histogram", histogram, 2, 128, cin, out) ||
            launch(what, "nbody", nbody, 4, 64, (const float4 *)in, (float4 *)out) ||
            launch(what, "stencil", stencil, dim3(4, 4), dim3(16, 16), cin, out) ||
            launch(what, "softmax", softmax, 8, dim3(32, 8), cin, out) || launch(what, "reduce", reduce, 1, 256, cin, out) ||
            launch(what, "bitonic", bitonic, 1, 256, cin, out) || launch(what, "mixed", mixed, 1, 32, cin, out) ||
            launch(what, "bytes", bytes, 2, 128, (const char *)in, (char *)out);
        if (!known || cudaMemcpy(values.data(), out, 4 * N * N, cudaMemcpyDeviceToHost)) return 98;
        unsigned hash = 0;
        for (float v : values) { unsigned bits; memcpy(&bits, &v, 4); hash = hash * 31 + bits; }
        printf("%s %08x\n", what, hash);
        for (int k = 0; k < N * N; k++) values[k] = k * 37 % 101;
    }
    return 5;
}
"""
KINDS = "matmul scan histogram nbody stencil softmax reduce bitonic mixed bytes".split()


def test_a_choice_of_no_thread_is_said(memory):
    done = run("--block", 9999, "--", memory, "stride2")
    assert "note: no thread that accessed memory matches --block and --thread\n" in done.stderr
    assert "no memory access was counted\n" in done.stdout


EMPTY = """
__global__ void empty() {}
__global__ void one(int *p) { p[threadIdx.x] = 1; }
int main(int argc, char **) {
    int *p;
    cudaMalloc(&p, 256);
    empty<<<2, 64>>>();
    if (argc > 1) one<<<1, 64>>>(p);
    return cudaDeviceSynchronize();
}
"""


def test_kernels_that_access_no_memory(tmp_path):
    program = gpubpf_cuda.build(EMPTY, tmp_path / "empty", "-lineinfo")
    for more in ((), ("--no-allocations",), ("-e",), ("1",)):
        done = run(*more, "--", program)
        assert "counted 1 of 1 matching launches" in done.stdout, done.stdout
    records, _ = traced(tmp_path, "--", program, "with another")
    assert {kernel: [row["requests"] for row in rows] for kernel, rows in sites(records).items()} == {
        "one": [2]
    }
    assert records[-1]["launches_instrumented"] == 2


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    flags = ("-O2", "-lineinfo")
    return str(gpubpf_cuda.build(COMMON, tmp_path_factory.mktemp("common") / "common", *flags))


@pytest.fixture(scope="module")
def plain(common):
    """What the program says with nothing watching it."""
    environment = os.environ | {"LD_LIBRARY_PATH": str(gpubpf_cuda.LIBRARIES), "CUDASIM_HOSTILE": "1"}
    done = subprocess.run([common, *KINDS], capture_output=True, text=True, env=environment)
    assert done.returncode == 5
    return done.stdout


@pytest.mark.long
def test_kernels_of_the_common_kinds_from_their_source(common, plain, tmp_path):
    records, said = traced(tmp_path, "--", common, *KINDS, status=5)
    assert said == plain
    found = sites(records)
    assert set(found) == set(KINDS)

    def of(kernel, op, space, width=4):
        return [r for r in found[kernel] if (r["op"], r["space"], r["width"]) == (op, space, width)]

    def blocks16(of):
        """Requests of 4 x 4 blocks of 16 x 16 threads: a warp is two rows."""
        return [
            [of(bx, by, lane % 16, 2 * warp + lane // 16) for lane in range(32)]
            for bx in range(4)
            for by in range(4)
            for warp in range(8)
        ]

    # matmul: the result is stored once; the tiles are read without conflicts
    (stored,) = of("matmul", "store", "global")
    agrees(
        stored,
        model.site(
            "store", "global", 4, blocks16(lambda bx, by, x, y: 4 * ((16 * by + y) * 64 + 16 * bx + x)), 16
        ),
    )
    for record in of("matmul", "store", "shared"):
        right = model.site("store", "shared", 4, 4 * blocks16(lambda bx, by, x, y: 4 * (16 * y + x)), 16)
        agrees(record, right)

    # stencil: the border of 64 x 64 takes no part
    def inside(of):
        return lambda bx, by, x, y: (
            4 * of(16 * bx + x, 16 * by + y) if 0 < 16 * bx + x < 63 and 0 < 16 * by + y < 63 else None
        )

    (stored,) = of("stencil", "store", "global")
    agrees(stored, model.site("store", "global", 4, blocks16(inside(lambda x, y: 64 * y + x)), 16))
    loads = sorted((r["sectors"], r["requests"]) for r in of("stencil", "load", "global"))
    right = [
        model.site("load", "global", 4, blocks16(inside(lambda x, y, d=d: 64 * y + x + d)))
        for d in (0, -1, 1, -64, 64)
    ]
    assert loads == sorted((r["sectors"], r["requests"]) for r in right)
    # nbody: a tile is read by all lanes at one place, 16 bytes at once
    (me, tile) = of("nbody", "load", "global", 16)
    agrees(me, model.site("load", "global", 16, lines(lambda t: 16 * t, warps=8)))
    agrees(tile, model.site("load", "global", 16, 4 * lines(lambda t: 16 * t, warps=8)))
    (stored,) = of("nbody", "store", "shared", 16)
    agrees(stored, model.site("store", "shared", 16, 16 * lines(lambda t: 16 * t, warps=2)))
    assert {(r["pattern"], r["bank_ways"]["max"]) for r in of("nbody", "load", "shared", 16)} == {
        ("broadcast", 1)
    }

    # scan: 8 turns up and 7 down over a stride that doubles
    def sweep(of):
        return [
            [of(32 * warp + lane, d) for lane in range(32)]
            for _ in range(4)
            for d in [2**n for n in range(8)]
            for warp in range(8)
        ]

    def up(t, d, less=0):
        return 4 * (2 * d * (t + 1) - 1 - less * d) if 2 * d * (t + 1) <= 256 else None

    rights = [
        model.site("load", "shared", 4, sweep(lambda t, d, less=less: up(t, d, less))) for less in (0, 1)
    ]
    swept = [r for r in of("scan", "load", "shared") if r["requests"] == rights[0]["requests"]]
    for record, right in zip(swept, rights, strict=True):
        agrees(record, right)
    # bytes: elements of 1, 2 and 8 bytes
    (one,) = of("bytes", "load", "global", 1)
    agrees(one, model.site("load", "global", 1, 2 * lines(lambda t: 2 * t if t % 3 == 0 else None, warps=4)))
    (two,) = of("bytes", "load", "global", 2)
    agrees(two, model.site("load", "global", 2, 2 * lines(lambda t: 2 * (511 - t), warps=4)))
    (eight,) = of("bytes", "load", "global", 8)
    agrees(eight, model.site("load", "global", 8, 2 * lines(lambda t: 8 * (t % 4 * 16), warps=4)))


# --- the trace tells the same as what the GPU added up ------------------------------------------------------------------------------


BLOCKS = {"stencil": (16, 16), "softmax": (32, 8)}  # x, y of the blocks of those that have two dimensions


def requests_of(accesses):
    """(kernel, site, space) → requests. A warp records those of its lanes at one time, in their order: a request ends where a lane
    is not above the one before it, or at another place."""
    found = defaultdict(list)
    before: dict = {}  # what a warp did last: where, and in which lane
    for r in accesses:
        x, y, _ = r["thread"]
        thread = x + BLOCKS.get(r["kernel"], (256, 1))[0] * y
        lane = thread % 32
        warp = (r["launch"], tuple(r["block"]), thread // 32)
        place = (r["kernel"], r["site"])
        last_place, last_lane, request = before.get(warp, (None, 0, {}))
        if place != last_place or lane <= last_lane:
            request = {}  # by space: a generic address may lead each lane elsewhere
        if r["space"] not in request:
            request[r["space"]] = [None] * 32
            found[*place, r["space"]].append(request[r["space"]])
        request[r["space"]][lane] = int(r["address"], 16)
        before[warp] = place, lane, request
    return found


@pytest.mark.long
def test_every_access_put_through_the_model_is_what_the_gpu_added_up(common, plain, tmp_path):
    kinds = [kind for kind in KINDS if kind not in ("matmul", "nbody")]
    records, said = traced(tmp_path, "--", common, *kinds, status=5)
    assert said == "".join(line for line in plain.splitlines(True) if line.split()[0] in kinds)
    every, _ = traced(tmp_path, "-e", "--ring-size", "256M", "--", common, *kinds, status=5)
    assert every[-1]["lost"] == 0
    requests = requests_of([r for r in every if r["type"] == "access"])
    width = {(r["kernel"], r["site"], r["space"]): r["width"] for r in every if r["type"] == "access"}
    got = {(r["kernel"], r["site"], r["space"]): r for r in records if r["type"] == "site"}
    assert set(got) == set(requests)
    for key, record in got.items():
        row = 16 if key[0] == "stencil" else 32
        agrees(record, model.site(record["op"], key[2], width[key], requests[key], row))
