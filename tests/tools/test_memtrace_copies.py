"""memtrace on asynchronous copies of up to 16 bytes by each lane (cp.async), whose number is known at run time only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(REPOSITORY / "tools/memtrace.py"), "--device", "sim"]
pytestmark = gpubpf_cuda.needs_cuda

PROGRAM = r"""
template <int K> __global__ void copies(const char *in, unsigned lanes, unsigned bytes, float *out) {
    __shared__ float4 to[64];
    unsigned at = (unsigned)__cvta_generic_to_shared(to + threadIdx.x), size = threadIdx.x < lanes ? 16 : bytes;
    unsigned long long from = (unsigned long long)__cvta_generic_to_global(in + 16 * (K + threadIdx.x));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(size) : "memory");
    asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    if (to[63 - threadIdx.x].x == 5.0f) *out = 1.0f;
}
template <int K> static void run(unsigned lanes, unsigned bytes) {
    char *in;
    cudaMalloc(&in, 4096 + 256 * K);
    cudaMemset(in, 0, 4096 + 256 * K);
    copies<K><<<3, 64>>>(in, lanes, bytes, (float *)in);
}
int main() {
    run<0>(64, 0);
    run<1>(64, 0);
    run<2>(20, 0);
    run<3>(20, 8);
    run<4>(0, 6);
    return cudaDeviceSynchronize() != cudaSuccess;
}
"""
# By K, of each of three blocks: requests, lanes, bytes, sectors. The copies of K begin 16 * K bytes behind a sector.
EXPECTED = {
    0: (2, 64, 1024, 32),
    1: (2, 64, 1024, 2 * 17),
    2: (1, 20, 320, 10),
    3: (2, 64, 20 * 16 + 44 * 8, 2 * 17),
    4: (2, 64, 64 * 6, 32),
}


@pytest.mark.parametrize("options", [(), ("--no-allocations",), ("--granule", "4"), ("--block", "1")])
def test_copies_of_16_bytes_and_of_fewer(options: tuple[str, ...], tmp_path: Path) -> None:
    program = gpubpf_cuda.build(PROGRAM, tmp_path / "copies", "-arch=compute_80")
    command = [*TOOL, *options, "--json", "-o", str(tmp_path / "records"), "--", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    sites = [r for r in records if r["type"] == "site" and (r["op"], r["space"]) == ("async", "global")]
    blocks = 1 if "--block" in options else 3
    fields = ("requests", "accesses", "bytes", "sectors")
    found = sorted(tuple(site[field] for field in fields) for site in sites)
    assert found == sorted(tuple(blocks * n for n in numbers) for numbers in EXPECTED.values())
    read = {r["bytes"]: r["read_bytes"] for r in records if r["type"] == "allocation"}
    if not options or "--block" in options:
        assert read == {4096 + 256 * k: numbers[2] for k, numbers in EXPECTED.items()}
