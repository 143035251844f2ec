"""memtrace on which bytes are touched, from its command line on: every number is known from the program's text."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(REPOSITORY / "tools/memtrace.py"), "--device", "sim"]
pytestmark = gpubpf_cuda.needs_cuda

# Each allocation has a size of its own, which tells it in the records.
PROGRAM = r"""
#include <cstdio>
#include <cstdint>
#include <cstring>
#include <unistd.h>
#include <sys/wait.h>
#include <cuda_pipeline.h>

template <typename T> __global__ void rd(const T *p, int n, int step, int offset, T *sink) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { T v = p[offset + step * i]; if (*(const char *)&v == 77) *sink = v; }
}
template <typename T> __global__ void wr(T *p, int n, int step, int offset) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[offset + step * i] = T();
}
__global__ void back(int *p, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) p[n - 1 - i] = i; }
__global__ void holes(int *p) { if (threadIdx.x % 3) p[threadIdx.x] = 1; }
__global__ void odd(short *p) { p[threadIdx.x * threadIdx.x] = 1; }
__global__ void count(unsigned *p) { atomicAdd(p + threadIdx.x % 5 * 2, 1u); }
__global__ void swap(unsigned long long *p) { atomicCAS(p + threadIdx.x, 5ull, 6ull); }
__device__ int table[500];
__global__ void fill() { table[threadIdx.x] = 1; }
__global__ void pitched(char *p, size_t pitch) { p[blockIdx.x * pitch + threadIdx.x] = 1; }
__global__ void staged(const float4 *p, float *out) {
    __shared__ float4 s[32];
    __pipeline_memcpy_async(s + threadIdx.x, p + threadIdx.x + 3, 16);
    __pipeline_commit(); __pipeline_wait_prior(0); __syncthreads();
    out[threadIdx.x] = s[31 - threadIdx.x].x;
}
__global__ void bulk(const char *in, char *out, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    __shared__ alignas(128) char buffer[12288];
    __shared__ alignas(8) uint64_t bar;
    if (threadIdx.x) return;
    unsigned at = (unsigned)__cvta_generic_to_shared(&bar), to = (unsigned)__cvta_generic_to_shared(buffer);
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(at), "r"(bytes));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(__cvta_generic_to_global(in)), "r"(bytes), "r"(at) : "memory");
    asm volatile("{ .reg .pred p; w: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra w; }" :: "r"(at) : "memory");
    asm volatile("fence.proxy.async.shared::cta;");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(__cvta_generic_to_global(out)), "r"(to), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;"); asm volatile("cp.async.bulk.wait_group 0;");
#endif
}
template <typename T> static T *make(size_t bytes) { T *p; if (cudaMalloc(&p, bytes)) _exit(99); cudaMemset(p, 0, bytes); return p; }

static void patterns() {
    int *sink = make<int>(4);
    rd<int><<<4, 64>>>(make<int>(8001), 200, 8, 1, sink);
    rd<int><<<8, 128>>>(make<int>(20004), 1000, 1, 7, sink);
    rd<char><<<1, 100>>>(make<char>(1003), 100, 10, 2, (char *)sink);
    wr<char><<<4, 256>>>(make<char>(5005), 1001, 1, 1001);
    wr<float4><<<2, 96>>>(make<float4>(8016), 150, 2, 1);
    wr<double><<<1, 17>>>(make<double>(3007), 17, 3, 4);
    back<<<4, 256>>>(make<int>(4100), 1000);
    holes<<<1, 90>>>(make<int>(600));
    odd<<<1, 40>>>(make<short>(3300));
    count<<<3, 64>>>(make<unsigned>(104));
    swap<<<1, 33>>>(make<unsigned long long>(408));
    fill<<<1, 123>>>();
    size_t pitch; char *rows;
    if (cudaMallocPitch(&rows, &pitch, 100, 9)) _exit(98);
    pitched<<<7, 90>>>(rows, pitch);
    int *managed; if (cudaMallocManaged(&managed, 6000)) _exit(97);
    memset(managed, 1, 6000);
    wr<int><<<2, 256>>>(managed, 300, 1, 0);
    staged<<<1, 32>>>(make<float4>(1072), make<float>(136));
    bulk<<<1, 32>>>(make<char>(16128), make<char>(16256), 10000);
    make<int>(7777);
    int *gone = make<int>(9999);
    wr<int><<<1, 50>>>(gone, 50, 1, 0);
    cudaFree(gone);
}
__attribute__((noinline)) static void again(int turns) {  /* one address, another allocation each time */
    for (int k = 1; k <= turns; k++) {
        int *p = make<int>(1000 + 4 * k);
        if (k % 3) wr<int><<<1, 64>>>(p, k, 1, 0); else rd<int><<<1, 64>>>(p, k, 1, 0, p);
        cudaFree(p);
    }
}
int main(int argc, char **argv) {
    const char *what = argv[1];
    if (!strcmp(what, "patterns")) patterns();
    if (!strcmp(what, "again")) again(60);
    if (!strcmp(what, "spread"))  /* a byte in each of many pages */
        for (char *p = make<char>(304 << 20), *q = make<char>(100);; ) {
            for (int k = 0; k < 2; k++) wr<char><<<300, 256>>>(p, 72000, 4200, 0);
            wr<char><<<1, 32>>>(q, 10, 1, 0); break;
        }
    if (!strcmp(what, "both")) {
        pid_t child = fork();
        int n = child ? 10 : 20, *p = make<int>(child ? 2000 : 3000);
        wr<int><<<1, 32>>>(p, n, 1, 0);
        if (cudaDeviceSynchronize()) return 98;
        if (child) waitpid(child, 0, 0);
    }
    if (!strcmp(what, "twice")) {  /* two kernels, the same memory */
        int *p = make<int>(40000);
        for (int k = 0; k < 3; k++) wr<int><<<10, 100>>>(p, 1000, 1, 0);
        rd<int><<<10, 100>>>(p, 1000, 8, 0, p);
    }
    if (!strcmp(what, "rejected")) {  /* too much shared memory */
        int *p = make<int>(400);
        wr<int><<<1, 32, 300000>>>(p, 20, 1, 0);
        for (int n = 1; n <= 2; n++) wr<int><<<1, 32>>>(p, n, 1, 0);
    }
    return cudaDeviceSynchronize() ? 98 : 0;
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return str(gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("app") / "app", "-arch=compute_90"))


def traced(tmp_path, *arguments, hostile=False, clock="real"):
    out = tmp_path / "records"
    environment = os.environ | {"CUDASIM_CLOCK": clock} | ({"CUDASIM_HOSTILE": "1"} if hostile else {})
    done = subprocess.run(
        [*TOOL, "--json", "-o", str(out), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


def touched(records):
    """Size of the allocation → bytes read, written, untouched."""
    return {
        r["bytes"]: (r["read_bytes"], r["written_bytes"], r["untouched_bytes"])
        for r in records
        if r["type"] == "allocation"
    }


PATTERNS = {
    8001: (800, 0, 7201),
    20004: (4000, 0, 16004),
    1003: (100, 0, 903),
    5005: (0, 1001, 4004),
    8016: (0, 2400, 5616),
    3007: (0, 136, 2871),
    4100: (0, 4000, 100),
    600: (0, 240, 360),
    3300: (0, 80, 3220),
    104: (20, 20, 84),
    408: (264, 264, 144),
    2000: (0, 492, 1508),  # table
    6000: (0, 1200, 4800),
    1072: (512, 0, 560),
    136: (0, 128, 8),
    16128: (10000, 0, 6128),
    16256: (0, 10000, 6256),
    7777: (0, 0, 7777),
    9999: (0, 200, 9799),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("hostile", (False, True))
def test_each_byte_of_every_pattern(app, tmp_path, hostile):
    records = traced(tmp_path, "--", app, "patterns", hostile=hostile)
    found = touched(records)
    assert {size: found.get(size) for size in PATTERNS} == PATTERNS
    pitched = next(r for r in records if r["type"] == "allocation" and r["call"] == "cuMemAllocPitch")
    assert (pitched["read_bytes"], pitched["written_bytes"]) == (0, 630)
    assert not any(r["type"] == "unallocated" for r in records)
    by_size = {r["bytes"]: r for r in records if r["type"] == "allocation"}
    assert by_size[9999]["freed"] and not by_size[7777]["freed"]
    assert (by_size[2000]["kind"], by_size[2000]["call"]) == ("variable", "variable table")
    assert by_size[6000]["kind"] == "managed"
    assert any(frame.startswith("patterns") for frame in by_size[7777]["stack"])
    assert records[-1]["type"] == "summary" and records[-1]["lost"] == 0


def test_of_one_address_each_allocation_has_bytes_of_its_own(app, tmp_path):
    records = traced(tmp_path, "--", app, "again")
    rows = [r for r in records if r["type"] == "allocation" and r["kind"] == "device"]
    assert len({r["base"] for r in rows}) < len(rows) == 60
    for r in rows:
        k = (r["bytes"] - 1000) // 4
        least = 4 * min(k, 64)
        expected = (0, least) if k % 3 else (least, 0)
        assert (r["read_bytes"], r["written_bytes"], r["untouched_bytes"]) == (*expected, r["bytes"] - least)


def test_a_granule_is_as_exact_as_it_says(app, tmp_path):
    exact, coarse = PATTERNS, touched(traced(tmp_path, "--granule", "16", "--", app, "patterns"))
    for size, (reads, writes, _) in exact.items():
        assert reads <= coarse[size][0] <= min(16 * reads, size)
        assert writes <= coarse[size][1] <= min(16 * writes, size)
    assert coarse[20004] == (4016, 0, 15988)
    assert coarse[8016] == (0, 2400, 5616)


def test_what_found_no_room_is_not_known(app, tmp_path):
    records = traced(tmp_path, "--", app, "spread")
    assert touched(records)[304 << 20] == (None, None, None)
    (site,) = [r for r in records if r["type"] == "site"]  # requests count, whether there was room or not
    assert (site["requests"], site["accesses"]) == (2 * 72000 // 32 + 1, 2 * 72000 + 10)
    found = touched(traced(tmp_path, "--granule", "4096", "--", app, "spread"))
    assert found[304 << 20][1] == 72000 * 4096 and found[100] == (0, 100, 0)


def test_two_processes(app, tmp_path):
    records = traced(tmp_path, "--", app, "both")
    rows = {r["bytes"]: r for r in records if r["type"] == "allocation" and r["kind"] == "device"}
    assert {size: r["written_bytes"] for size, r in rows.items()} == {2000: 40, 3000: 80}
    assert rows[2000]["pid"] != rows[3000]["pid"]


def test_what_a_kernel_touches_and_comes_back_to(app, tmp_path):
    records = traced(tmp_path, "--footprint", "--no-allocations", "--", app, "twice", clock="virtual")
    found = {r["kernel"]: r for r in records if r["type"] == "footprint"}
    assert {k: (r["bytes"], r["sectors"], r["requests"], r["reuse"]) for k, r in found.items()} == {
        "wr": (4000, 125, 435, 3.48),
        "rd": (4000, 1000, 1000, 1.0),
    }
    assert not any(r["type"] == "allocation" for r in records)


def test_without_allocations_nothing_is_collected(app, tmp_path):
    records = traced(tmp_path, "--no-allocations", "--", app, "twice")
    assert {r["type"] for r in records} == {"attached", "site", "kernel", "summary"}


def test_for_people(app, tmp_path):
    done = subprocess.run([*TOOL, "--", app, "patterns"], capture_output=True, text=True, timeout=100)
    lines = done.stdout.splitlines()
    at = next(
        n for n, line in enumerate(lines) if line.startswith("bytes of each allocation that kernels touched")
    )
    assert all(len(line) <= 80 for line in lines[at:])
    assert any(line.startswith("never touched by kernels: 2 allocations") for line in lines[at:])
    assert re.search(r"patterns\+0x[0-9a-f]+ \(app\)", done.stdout)


MIXED = r"""
__global__ void mixed(char *out, const unsigned *sizes) {
    __shared__ alignas(128) char buffer[1024];
    if (threadIdx.x >= 4) return;
    unsigned from = (unsigned)__cvta_generic_to_shared(buffer + 256 * threadIdx.x), bytes = sizes[threadIdx.x];
    asm volatile("fence.proxy.async.shared::cta;");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(__cvta_generic_to_global(out + 256 * threadIdx.x)), "r"(from), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;"); asm volatile("cp.async.bulk.wait_group 0;");
}
__global__ void zeroed(const unsigned *sizes) {
    __shared__ alignas(128) char buffer[1024];
    if (threadIdx.x) return;
    unsigned at = (unsigned)__cvta_generic_to_shared(buffer);
    asm volatile("st.bulk.weak.shared::cta [%0], %1, 0;" :: "r"(at), "l"(sizes[blockIdx.x] / 2ul) : "memory");
}
int main() {
    char *out; unsigned *sizes;
    cudaMalloc(&out, 1024); cudaMallocManaged(&sizes, 32);
    unsigned first[] = {64, 16, 128, 32}, second[] = {16, 64, 32, 48};
    for (unsigned *of : {first, second}) {
        for (int i = 0; i < 4; i++) sizes[i] = of[i];
        mixed<<<1, 32>>>(out, sizes);
        if (cudaDeviceSynchronize()) return 1;
    }
    zeroed<<<4, 32>>>(sizes);
    if (cudaDeviceSynchronize()) return 2;
}
"""


def test_lanes_that_copy_few_bytes_beside_lanes_that_copy_many(tmp_path, monkeypatch):
    """Copies of at most 16 bytes are added up together, others one by one."""
    monkeypatch.setenv("CUDASIM_CC", "10.0")  # for st.bulk
    app = gpubpf_cuda.build(MIXED, tmp_path / "mixed", "-arch=compute_100")
    records = traced(tmp_path, "--", str(app))
    ends = {(r["op"], r["space"]): r for r in records if r["type"] == "site" and "bulk" in r["opcode"]}
    zeroed = ends.pop(("store", "shared"))
    assert (zeroed["accesses"], zeroed["bytes"]) == (4, 8 + 32 + 16 + 24)
    assert {space for _, space in ends} == {"global", "shared"}
    for record in ends.values():
        assert (record["accesses"], record["bytes"]) == (8, 240 + 160), record


@pytest.mark.parametrize(("options", "more"), [((), False), (("--launch", "1:2"), True)])
def test_launches_that_the_driver_rejects_touch_nothing(app, options, more):
    """Only other launches that were not measured make the counts incomplete."""
    done = subprocess.run(
        [*TOOL, *options, "--", app, "rejected"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert f"counted {1 if more else 2} of 3 matching launches" in done.stdout
    assert "1 (launch failed)" in done.stdout
    assert ("kernels may have touched more" in done.stdout) == more
