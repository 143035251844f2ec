"""memtrace --sass: the same traffic as with PTX. The embedded device has its own Compute Sanitizer library, and runs the PTX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = REPOSITORY / "lib/cudasim/lib/libsanitizer-public.so"

pytestmark = [
    *gpubpf_cuda.needs_cuda,
    pytest.mark.skipif(not LIBRARY.exists(), reason="the embedded device is built without Compute Sanitizer"),
]

# Each place of `places` has a pattern of its own: contiguous, strided, one address, gathered, with idle lanes, two widths, atomics,
# shared memory with bank conflicts, and local memory. It runs in two shapes, and in a graph.
PROGRAM = r"""
#include <cstdio>
__global__ void places(int *at, double *wide, int n) {
    __shared__ int rows[32 * 33];
    int t = threadIdx.x, mine[8];
    int sum = at[t] + at[t * 4] + at[7] + at[t * 37 % 101];
    if (t % 3 == 0) sum += at[t + 200];
    wide[t] = wide[t] + 1;
    atomicAdd(at + 900 + t / 16, 1);
    rows[t % 32 * 32] = sum;
    __syncthreads();
    sum += rows[t % 32];
    for (int i = 0; i < 8; i++) mine[(i + n) % 8] = sum + i;
    at[512 + t] = mine[n];
}
int main() {
    int *at, sum = 0;
    double *wide;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    if (cudaMalloc(&at, 4096) || cudaMalloc(&wide, 4096) || cudaStreamCreate(&stream)) return 1;
    if (cudaMemset(at, 0, 4096) || cudaMemset(wide, 0, 4096)) return 2;
    places<<<2, 64, 0, stream>>>(at, wide, 3);
    places<<<1, 40, 0, stream>>>(at, wide, 3);
    if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)) return 3;
    places<<<1, 96, 0, stream>>>(at, wide, 3);
    if (cudaStreamEndCapture(stream, &graph) || cudaGraphInstantiate(&exec, graph, 0)) return 4;
    for (int i = 0; i < 2; i++) if (cudaGraphLaunch(exec, stream)) return 5;
    if (cudaDeviceSynchronize() || cudaMemcpy(&sum, at + 900, 4, cudaMemcpyDeviceToHost)) return 6;
    printf("%d\n", sum);
}
"""
# Copies of 8 and 16 bytes by each thread; matrices; by the first thread copies in bulk, and of a tensor.
COPIES = r"""
#include <cstdint>
#include <cstdio>
#include <cuda.h>
#define OK(x) do { int e = (x); if (e) { printf("%s: %d\n", #x, e); return 1; } } while (0)
static __device__ uint32_t at(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
static __device__ uint64_t from(const void *p) { return __cvta_generic_to_global(p); }
__global__ void copies(const char *in) {
    __shared__ float4 to[64];
    unsigned place = at(to + threadIdx.x);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" :: "r"(place), "l"(from(in + 16 * threadIdx.x + 16)) : "memory");
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(place), "l"(from(in + 8 * threadIdx.x)) : "memory");
    asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
}
__global__ void matrices(unsigned *out) {
    __shared__ __align__(16) unsigned tile[256];
    unsigned x, y, z, w;
    for (int i = threadIdx.x; i < 256; i += 32) tile[i] = i;
    __syncwarp();
    unsigned row = at(tile + threadIdx.x % 16 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(w) : "r"(row));
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" :: "r"(row), "r"(x), "r"(y) : "memory");
    out[threadIdx.x] = x + y + z + w;
}
__global__ void bulk(const char *in, char *out, unsigned bytes) {
    __shared__ __align__(128) char buffer[4096];
    __shared__ __align__(8) uint64_t barrier;
    if (threadIdx.x) return;
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at(&barrier)));
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(at(&barrier)), "r"(bytes));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(at(buffer)), "l"(from(in)), "r"(bytes), "r"(at(&barrier)) : "memory");
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }" :: "r"(at(&barrier)) : "memory");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(from(out)), "r"(at(buffer)), "r"(bytes) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], 64;"
                 :: "l"(from(out)), "r"(at(buffer)) : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
}
__global__ void tile(const __grid_constant__ CUtensorMap map) {
    __shared__ __align__(128) float box[128];
    __shared__ __align__(8) uint64_t barrier;
    if (threadIdx.x) return;
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at(&barrier)) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 512;" :: "r"(at(&barrier)) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0, %3}], [%2];"
                 :: "r"(at(box)), "l"(&map), "r"(at(&barrier)), "r"(blockIdx.x * 8) : "memory");
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }" :: "r"(at(&barrier)) : "memory");
}
int main() {
    char *in, *out;
    OK(cudaMalloc(&in, 4096)); OK(cudaMalloc(&out, 4096)); OK(cudaMemset(in, 1, 4096)); OK(cudaMemset(out, 0, 4096));
    copies<<<3, 64>>>(in);
    matrices<<<2, 32>>>((unsigned *)out);
    for (unsigned bytes : {16u, 48u, 4096u}) bulk<<<2, 32>>>(in, out, bytes);
    CUtensorMap map;
    cuuint64_t sizes[] = {16, 16}, strides[] = {64};
    cuuint32_t part[] = {16, 8}, steps[] = {1, 1};
    OK(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, in, sizes, strides, part, steps,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    tile<<<2, 32>>>(map);
    OK(cudaDeviceSynchronize());
    unsigned sum = 0;
    OK(cudaMemcpy(&sum, out, 4, cudaMemcpyDeviceToHost));
    printf("%u\n", sum);
}
"""
SUM = 16 * (2 + 1 + 2)  # lanes 0 to 15 of each block add 1 to the first of these numbers
SUMS = ("requests", "bytes", "sectors", "sectors_least", "wasted_bytes", "shared_requests")
THREADS = 2 * 64 + 40 + 2 * 96


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("app") / "app"))


def memtrace(
    *words: str, hidden: bool = True, highest: str = "47", name: str = "memtrace"
) -> subprocess.CompletedProcess[str]:
    """Run memtrace, or the tool `name`; with --sass if the PTX is hidden. highest: number of an instruction that the library knows."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDASIM_SASS"}
    environment |= {"CUDASIM_SASS": "1"} if hidden else {}
    environment["CUDASIM_SANITIZER_INSTRUCTIONS"] = highest
    tool = [sys.executable, str(REPOSITORY / f"tools/{name}.py"), "--device", "sim"]
    command = [*tool, *(["--sass"] if hidden else []), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_same_traffic_as_with_ptx(app: str, tmp_path: Path) -> None:
    found: dict[bool, list[Any]] = {}
    for hidden in (True, False):
        out = tmp_path / str(hidden)
        done = memtrace("--json", "-o", str(out), "--", app, hidden=hidden)
        assert (done.returncode, done.stdout) == (0, f"{SUM}\n"), done.stderr
        records = [json.loads(line) for line in out.read_text().splitlines()]
        places = [r for r in records if r["type"] == "site" and r["space"] != "const"]
        own = ("site", "opcode", "source", "ptx_line", "offset", "advice", "share")  # of one way
        rows = [
            {name: value for name, value in place.items() if name not in (*own, "pid")} for place in places
        ]
        found[hidden] = sorted(json.dumps(row, sort_keys=True) for row in rows)
        (kernel,) = (r for r in records if r["type"] == "kernel")
        assert kernel["launches"] == 5 - 1 and records[-1]["lost"] == 0
        if hidden:
            assert all(place["offset"] == 16 * place["site"] and not place["ptx_line"] for place in places)
    assert found[True] == found[False]
    spaces = {(row["op"], row["space"]) for row in map(json.loads, found[True])}
    assert {("load", "global"), ("store", "local"), ("load", "shared"), ("atomic", "global")} <= spaces
    assert sum(row["bytes"] for row in map(json.loads, found[True]) if row["width"] == 8) == 2 * 8 * THREADS


def test_copies_and_matrices(tmp_path: Path) -> None:
    """Asynchronous copies, and matrices in shared memory. A copy has two ends; of a tensor copy, only the number is known."""
    program = tmp_path / "copies"
    gpubpf_cuda.build(COPIES, program, "-arch=compute_90", f"-L{LIBRARY.parent}", "-lcuda")
    found = {}
    for hidden in (True, False):
        out = tmp_path / str(hidden)
        words = () if hidden else ("--no-allocations",)
        done = memtrace(*words, "--json", "-o", str(out), "--", str(program), hidden=hidden)
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in out.read_text().splitlines()]
        own = ("site", "opcode", "source", "ptx_line", "offset", "advice", "share", "pid")  # of one way
        places = [r for r in records if r["type"] == "site" and r["space"] != "const"]
        rows = [{name: value for name, value in place.items() if name not in own} for place in places]
        found[hidden] = sorted(json.dumps(row, sort_keys=True) for row in rows)
        assert records[-1]["lost"] == 0 and "patch_calls_lost" not in records[-1]
    assert found[True] == found[False]
    rows = [json.loads(row) for row in found[True]]
    kinds = {(row["kernel"], row["op"], row["space"]) for row in rows}
    both = {("async", "global"), ("async", "shared")}
    assert kinds >= {("copies", *k) for k in both} | {("bulk", *k) for k in both}
    assert kinds >= {
        ("matrices", "load", "shared"),
        ("matrices", "store", "shared"),
        ("tile", "async", "tensor"),
    }


def test_copies_are_counted(tmp_path: Path) -> None:
    """gpucount counts both ends of each copy, and the lanes that read rows of matrices."""
    program, found = tmp_path / "copies", {}
    gpubpf_cuda.build(COPIES, program, "-arch=compute_90", f"-L{LIBRARY.parent}", "-lcuda")
    for hidden in (True, False):
        out, specs = tmp_path / str(hidden), ("access:*:cp", "load:*:shared")
        done = memtrace(*specs, "--json", "-o", str(out), "--", str(program), hidden=hidden, name="gpucount")
        assert done.returncode == 0, done.stderr
        counts = [json.loads(line) for line in out.read_text().splitlines()][:-1]
        found[hidden] = {
            (r["spec"], r["kernel"]): r["threads"] for r in counts if r["type"] == "count" and r["threads"]
        }
    both_ends, rows = 2 * 2 * 3 * 64, 2 * (32 + 8)
    assert found[True] == found[False]
    assert (
        found[True]["access:*:cp", "copies"] == both_ends and found[True]["load:*:shared", "matrices"] == rows
    )


def test_an_older_library(tmp_path: Path) -> None:
    """Compute Sanitizer 12.4 has numbers of instructions up to 29. The others have no rows."""
    program, out = tmp_path / "copies", tmp_path / "out"
    gpubpf_cuda.build(COPIES, program, "-arch=compute_90", f"-L{LIBRARY.parent}", "-lcuda")
    done = memtrace("--json", "-o", str(out), "--", str(program), highest="29")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    kinds = {(r["kernel"], r["op"]) for r in records if r["type"] == "site"}
    assert {("copies", "async"), ("matrices", "load")} <= kinds and ("bulk", "async") not in kinds


def test_sampled_blocks(app: str, tmp_path: Path) -> None:
    """Of all blocks, everything is counted. Of some, each block of the chosen ones counts as a whole."""
    found = {}
    for share in ("", "1/1", "1/2"):
        out = tmp_path / "out"
        words = ("--sample-blocks", share, "--seed", "3") if share else ()
        done = memtrace(*words, "--json", "-o", str(out), "--", app)
        assert (done.returncode, done.stdout) == (0, f"{SUM}\n"), done.stderr
        records = [json.loads(line) for line in out.read_text().splitlines()]
        (found[share],) = (record for record in records if record["type"] == "kernel")
    whole, every, half = found.values()
    assert every["sampled"] | {"seed": 0} == {"unit": "block", "one_in": 1, "seed": 0, "chosen": 5, "of": 5}
    assert [every[name] for name in SUMS] == [whole[name] for name in SUMS]
    assert half["sampled"]["of"] == 5 and 0 <= half["sampled"]["chosen"] <= 5


def test_chosen_threads_and_the_table(app: str) -> None:
    done = memtrace("--thread", "0:7", "-v", "--", app)
    assert done.returncode == 0, done.stderr
    assert "instruction +0x" in done.stdout and "st.global" in done.stdout and "atom.global" in done.stdout


@pytest.mark.parametrize("words", [("-e",), ("--footprint",), ("--heatmap", "a.svg")])
def test_what_patches_cannot_do_is_refused(words: tuple[str, ...]) -> None:
    done = memtrace(*words, "--", "true")
    assert done.returncode == 2
    assert (
        "--sass adds up accesses by instruction; leave out -e, --parquet, --heatmap and --footprint"
        in done.stderr
    )
