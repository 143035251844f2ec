"""What memtrace tells people of programs whose problem is known: the sentence that names the cause is there, and no other."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(REPOSITORY / "tools/memtrace.py"), "--device", "sim"]
pytestmark = gpubpf_cuda.needs_cuda

SOURCE = r"""
#include <cstdlib>
#include <cstring>
constexpr int BLOCK = 128, SIDE = 256;
template <class Step> __device__ void reduce(const int *in, int *out, Step step) {
    __shared__ int data[BLOCK];
    int t = threadIdx.x;
    data[t] = in[blockIdx.x * BLOCK + t];
    __syncthreads();
    step(data, t);
    if (t == 0) out[blockIdx.x] = data[0];
}
__global__ void interleaved(const int *in, int *out) {   // threads 0, 2, 4 …, then 0, 4, 8 … work
    reduce(in, out, [](int *data, int t) {
#pragma unroll 1
        for (int s = 1; s < BLOCK; s *= 2) {
            if (t % (2 * s) == 0) data[t] += data[t + s];
            __syncthreads();
        }
    });
}
__global__ void conflicting(const int *in, int *out) {   // threads 0, 1, 2 … work, at strides 2, 4 …
    reduce(in, out, [](int *data, int t) {
#pragma unroll 1
        for (int s = 1; s < BLOCK; s *= 2) {
            int at = 2 * s * t;
            if (at < BLOCK) data[at] += data[at + s];
            __syncthreads();
        }
    });
}
__global__ void sequential(const int *in, int *out) {    // threads 0, 1, 2 … work, side by side
    reduce(in, out, [](int *data, int t) {
#pragma unroll 1
        for (int s = BLOCK / 2; s > 0; s /= 2) {
            if (t < s) data[t] += data[t + s];
            __syncthreads();
        }
    });
}
__global__ void leaders(const int *in, int *out) {       // one of 8 lanes stores what they added up
    int at = blockIdx.x * BLOCK + threadIdx.x, sum = in[at];
    for (int s = 4; s > 0; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
    if (at % 8 == 0) out[at / 8] = sum;
}
__global__ void hot(int *out, int addresses) { atomicAdd(out + (blockIdx.x * blockDim.x + threadIdx.x) % addresses, 1); }
__global__ void privatised(int *out) {                   // each block adds up first
    __shared__ int bins[BLOCK];
    bins[threadIdx.x] = 0;
    __syncthreads();
    for (int i = 0; i < 4; i++) atomicAdd(bins + (threadIdx.x * i + blockIdx.x) % BLOCK, 1);
    __syncthreads();
    atomicAdd(out + threadIdx.x, bins[threadIdx.x]);
}
__global__ void swapped(int *out) {                      // 16 x 16 threads: x and y in the wrong places
    int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
    out[x * SIDE + y] = x ^ y;
}
__global__ void straight(int *out) {
    int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
    out[y * SIDE + x] = x ^ y;
}
__global__ void scattered(const int *in, int *out) {     // the order of the bits is reversed: no two lanes in one sector
    int at = blockIdx.x * BLOCK + threadIdx.x;
    out[at] = in[__brev(at) >> 19];
}
__global__ void rows_of_four(int *out) {                 // rows of 4 threads: half of each sector, and no common stride
    int x = threadIdx.x, y = threadIdx.y;
    out[y * y * 8 + x] = x ^ y;
}
int main(int argc, char **argv) {
    int *in, *out;
    cudaMalloc(&in, 64 * BLOCK * 4), cudaMalloc(&out, SIDE * SIDE * 4);
    cudaMemset(in, 0, 64 * BLOCK * 4), cudaMemset(out, 0, SIDE * SIDE * 4);
    dim3 tiles(SIDE / 16, SIDE / 16), tile(16, 16);
    const char *which = argv[1];
    if (!strcmp(which, "interleaved")) interleaved<<<64, BLOCK>>>(in, out);
    if (!strcmp(which, "conflicting")) conflicting<<<64, BLOCK>>>(in, out);
    if (!strcmp(which, "sequential")) sequential<<<64, BLOCK>>>(in, out);
    if (!strcmp(which, "leaders")) leaders<<<64, BLOCK>>>(in, out);
    if (!strcmp(which, "hot")) hot<<<atoi(argv[2]) > 8192 ? 512 : 64, BLOCK>>>(out, atoi(argv[2]));
    for (int i = 0; i < 2 && !strcmp(which, "privatised"); i++) privatised<<<64, BLOCK>>>(out);
    if (!strcmp(which, "swapped")) swapped<<<tiles, tile>>>(out);
    if (!strcmp(which, "straight")) straight<<<tiles, tile>>>(out);
    if (!strcmp(which, "scattered")) scattered<<<64, BLOCK>>>(in, out);
    if (!strcmp(which, "rows_of_four")) rows_of_four<<<1, dim3(4, 64)>>>(out);
    if (argc > 3) {
        int *back = (int *)malloc(SIDE * SIDE * 4);
        if (cudaMemcpy(back, out, SIDE * SIDE * 4, cudaMemcpyDeviceToHost)) return 2;
    }
    return cudaDeviceSynchronize() ? 1 : 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("advice") / "advice"
    (place.parent / "advice.cu").write_text(SOURCE)
    return str(gpubpf_cuda.build(place.parent / "advice.cu", place, "-O2", "-lineinfo", "-arch=sm_80"))


@functools.cache  # several tests read the same report
def told(program: str, *arguments: str) -> str:
    """What memtrace says, in one line."""
    done = subprocess.run([*TOOL, "--", program, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


@functools.cache
def site(program: str, kind: str, *arguments: str) -> dict:
    """The record of the only site of a kind."""
    command = [*TOOL, "--json", "--", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    (found,) = [record for record in records if record["type"] == "site" and record["op"] == kind]
    return found


@pytest.mark.every(2)
def test_idle_lanes(program: str) -> None:
    text = told(program, "interleaved")
    assert "of 32 lanes take part on average, with idle lanes between them" in text
    for innocent in ("conflicting", "sequential", "swapped", "leaders"):
        assert "take part on average" not in told(program, innocent)


@pytest.mark.every(2)
def test_bank_conflicts_of_changing_strides(program: str) -> None:
    text = told(program, "conflicting")
    assert (
        "with up to 4-way bank conflicts: neighbouring lanes are 2 to 64 words apart; let neighbouring lanes"
        in text
    )
    assert "bank conflicts" not in told(program, "sequential")


@pytest.mark.every(4)
@pytest.mark.parametrize(("addresses", "share"), [(1, "100 %"), (32, "3.1 %"), (256, "0.4 %")])
def test_hot_addresses(program: str, addresses: int, share: str) -> None:
    found = site(program, "atomic", "hot", str(addresses))
    assert (found["addresses"], found["hot"]) == (addresses, 8192 // addresses)
    assert found["addresses_mean"] == min(addresses, 32)
    text = told(program, "hot", str(addresses))
    of = f"8,192 updates of {addresses} address{'es' * (addresses > 1)}, the hottest {8192 // addresses:,} times"
    assert f"{of} ({share})" in text
    if addresses == 256:  # 64 blocks that add up first would update an address more often
        assert "add up" not in text
    elif addresses > 1:
        assert f"updates only {addresses} addresses 8,192 times: combine those of a block" in text
    else:
        assert "reduce within the warp" in text


def test_a_block_that_has_added_up_already(program: str) -> None:
    text = told(program, "privatised")
    assert "16,384 updates of 128 addresses, the hottest 128 times" in text and "add up" not in text


def test_more_addresses_than_there_is_room_for_are_unknown(program: str) -> None:
    found = site(program, "atomic", "hot", "65536")
    assert (found["addresses"], found["hot"], found["addresses_mean"]) == (None, None, 32)
    assert " updates of " not in told(program, "hot", "65536")


def test_strides_along_the_rows_of_a_block(program: str) -> None:
    found = site(program, "store", "swapped")
    assert (found["pattern"], found["patterns"]) == ("stride 256", {"stride": 2048})
    assert "stride 256: lanes next to each other in x are 1,024 bytes apart" in told(program, "swapped")
    assert "each other in y are closer: swap x and y" in told(program, "swapped")
    assert site(program, "store", "straight")["pattern"] == "unit"


def test_scattered_addresses(program: str) -> None:
    assert site(program, "load", "scattered")["pattern"] == "gather"
    assert "loads from scattered addresses: 4 of every 32 bytes moved are used; sort the indices" in told(
        program, "scattered"
    )
    assert site(program, "store", "rows_of_four")["pattern"] == "gather"
    assert "scattered" not in told(program, "rows_of_four")


def test_what_the_host_copies_back_is_read(program: str) -> None:
    assert "written, but neither read nor copied: 1 allocation" in told(program, "straight")
    assert "neither read nor copied" not in told(program, "straight", "-", "copied")
