"""Accesses that share a probe, and executions that registers count, have the same numbers as those that are examined one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, os.environ.get("MEMTRACE", str(REPOSITORY / "tools/memtrace.py")), "--device", "sim"]
pytestmark = gpubpf_cuda.needs_cuda

# Most kernels have a loop with accesses that the analysis knows, and lanes that part in another way.
SOURCE = r"""
#include <cstdio>
#define KERNEL(name, ...) \
    __global__ void name(int n, int *out, const int *in, int pitch) { \
        __shared__ __align__(128) int s[4096]; \
        int x = threadIdx.x, y = threadIdx.y, sum = 0; \
        __VA_ARGS__; \
        out[(blockIdx.x * blockDim.y + y) * blockDim.x + x] = sum; \
    }
#define LOOP(turns) _Pragma("unroll 1") for (int i = 0; i < (turns); i++)
#define AT(index) ((volatile int *)s)[index]
KERNEL(together, LOOP(n) { AT(x) = i; __syncthreads(); sum += AT(2 * x) + AT(3 * x + 1) + AT(x * 32); })
KERNEL(rows, LOOP(n) { AT(16 * y + x) = i; __syncthreads(); sum += AT(16 * y + (i & 8) / 8) + AT(20 * x); })
KERNEL(leaving, LOOP(n) { sum += AT(x); if (i == x % 7) return; AT(x + 1) = sum; })
KERNEL(fewer, LOOP(x % 9) { sum += AT(x ^ 5); AT(x) = sum; })
KERNEL(apart, if (x & 1) { LOOP(n) sum += AT(x); } else { LOOP(2 * n) sum += AT(x) + AT(4 * x); })
KERNEL(nested, LOOP(n) { int k = i; _Pragma("unroll 1") for (int j = 0; j < 3; j++) { sum += AT(x + 8 * j); AT(x) = k; } })
KERNEL(sometimes, LOOP(n) { if (x < 5 + i % 3) sum += AT(x); if (i % 2) AT(2 * x) = sum; })
KERNEL(wide, LOOP(n) { int a, b; unsigned at = (unsigned)__cvta_generic_to_shared(s);
    asm volatile("{ .reg .b32 c, d; ld.shared.v4.u32 {%0, %1, c, d}, [%2]; st.shared.u16 [%2+2], 7; }"
                 : "=r"(a), "=r"(b) : "r"(at + 16 * x));
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(at + 8 * (x ^ 3)));
    sum += a + b; })
KERNEL(often, LOOP(70000) sum += AT(x))
KERNEL(trapped, LOOP(n) sum += AT(x); if (n == 12345) asm volatile("trap;"))
// In global memory, most accesses compare addresses: indices of 32 bits might wrap around.
#define IN(index) ((const volatile int *)in)[index]
KERNEL(strided, LOOP(n) { sum += IN(x * pitch + i); out[1024 + 2 * x + 8 * i] = sum; })
KERNEL(tile, LOOP(n) { sum += IN(y * pitch + 16 * i + x) + IN((16 * i + y) * pitch + x) + IN(y * pitch + i); })
KERNEL(shifting, LOOP(n) sum += IN(3 * x + i) + IN(x ^ 2) + IN(8 * x + 8 * i))
KERNEL(chased, LOOP(n) { int at = IN(i); sum += IN(at + 2 * x); })
KERNEL(unequal, LOOP(x % 11) { sum += IN(2 * x + 8 * i); if (i == 6) return; })
KERNEL(halves, LOOP(n) { if (i % 3) { sum += IN(4 * x + 8 * i); } else if (x < 16) { sum += IN(4 * x + 8 * i); } })
KERNEL(further, LOOP(66000) sum += IN(2 * x))
// Accesses that share a probe: of unrolled loops, and loads and stores of the same place.
#define OUT(index) ((volatile int *)out)[1024 + (index)]
KERNEL(tree, AT(x) = x; __syncthreads(); _Pragma("unroll") for (int k = 64; k; k /= 2) { if (x < k) AT(x) += AT(x + k);
    __syncthreads(); } sum = AT(0))
KERNEL(unrolled, _Pragma("unroll 4") for (int i = 0; i < n; i++) OUT(x + 64 * i) += IN(x + 64 * i) + IN(5 * x + 2 * i))
KERNEL(updated, if (x % 3) { OUT(x) += 1; OUT(x + 1) = IN(x); OUT(x + 8) += IN(x + 8); } OUT(0) += 1; AT(3 * x) += 2)
KERNEL(bytes, volatile char *at = (volatile char *)out + 5000 + x; at[0] += 1; at[32] = at[64]; at[33] += at[1])
int main(int argc, char **) {
    int *out, *in;
    if (cudaMalloc(&out, 1 << 20) || cudaMalloc(&in, 1 << 20) || cudaMemset(in, 0, 1 << 20)) return 1;
    if (argc > 1) {
        often<<<1, 32>>>(0, out, in, 0);
        further<<<1, 32>>>(0, out, in, 0);
        return cudaDeviceSynchronize() != cudaSuccess;
    }
    together<<<3, 96>>>(20, out, in, 0);
    together<<<1, 33>>>(1, out, in, 0);
    rows<<<2, dim3(16, 10)>>>(17, out, in, 0);
    rows<<<2, dim3(8, 5)>>>(3, out, in, 0);
    leaving<<<2, 64>>>(9, out, in, 0);
    fewer<<<2, 70>>>(0, out, in, 0);
    apart<<<1, 40>>>(11, out, in, 0);
    nested<<<2, 64>>>(5, out, in, 0);
    sometimes<<<2, 48>>>(13, out, in, 0);
    wide<<<2, 64>>>(6, out, in, 0);
    trapped<<<1, 64>>>(4, out, in, 0);
    strided<<<2, 64>>>(9, out, in, 40);
    strided<<<2, 64>>>(9, out, in, 37);
    tile<<<2, dim3(16, 16)>>>(5, out, in, 256);
    tile<<<1, dim3(8, 8)>>>(3, out, in, 100);
    shifting<<<2, 70>>>(10, out, in, 0);
    chased<<<1, 64>>>(6, out, in, 0);
    unequal<<<2, 64>>>(0, out, in, 0);
    halves<<<1, 64>>>(10, out, in, 0);
    tree<<<2, 128>>>(0, out, in, 0);
    unrolled<<<2, 64>>>(11, out, in, 0);
    updated<<<3, 70>>>(0, out, in, 0);
    bytes<<<2, 40>>>(0, out, in, 0);
    return cudaDeviceSynchronize() != cudaSuccess;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(SOURCE, tmp_path_factory.mktemp("deferred") / "loops")


def records(
    program: Path, place: Path, options: tuple[str, ...], each: str, *arguments: str
) -> list[Mapping[str, Any]]:
    """Return the records of sites and allocations. each: "1" to examine each execution, else ""."""
    environment = {**os.environ, "GPUBPF_EACH_ACCESS": each}
    command = [*TOOL, *options, "--json", "-o", str(place), "--", str(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in place.read_text().splitlines()]
    return [
        {name: value for name, value in record.items() if name not in ("pid", "base", "stack")}
        for record in found
        if record["type"] in ("site", "allocation")
    ]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--no-allocations",),
        ("--footprint", "--granule", "4"),
        ("--block", "0", "--thread", "3:40"),
        ("--sample-warps", "1/2", "--seed", "3"),
        ("--launch", "1"),
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_numbers_are_those_of_each_execution(options: tuple[str, ...], program: Path, tmp_path: Path) -> None:
    found, expected = (records(program, tmp_path / f"r{each}", options, each) for each in ("", "1"))
    sites = {(r["kernel"], r["site"]): r for r in expected if r["type"] == "site"}
    for record in found:
        if record["type"] == "site":
            assert record == sites.pop((record["kernel"], record["site"]))
    assert not sites
    others = [[r for r in of if r["type"] != "site"] for of in (found, expected)]
    assert others[0] == others[1]


SUMS = ("requests", "accesses", "bytes", "sectors", "sectors_least", "gaps")


def test_intervals_add_up_to_the_whole(program: Path, tmp_path: Path) -> None:
    """Registers add their counts where threads leave, whatever interval that is in."""

    def sums(place: Path, options: tuple[str, ...], each: str) -> dict[tuple[str, int, str], int]:
        total: dict[tuple[str, int, str], int] = {}
        for r in records(program, place, options, each):
            if r["type"] == "site":
                for field in SUMS:
                    key = r["kernel"], r["site"], field
                    total[key] = total.get(key, 0) + (r[field] or 0)
        return total

    expected = sums(tmp_path / "whole", ("--no-allocations",), "1")
    assert sums(tmp_path / "parts", ("1", "--no-allocations"), "") == expected


def test_registers_are_added_before_they_overflow(program: Path, tmp_path: Path) -> None:
    found = records(program, tmp_path / "r", ("--no-allocations",), "", "long")
    sites = {
        r["kernel"]: (r["requests"], r["accesses"], r["patterns"])
        for r in found
        if r["op"] == "load" and r["type"] == "site"
    }
    assert sites == {
        "often": (70000, 70000 * 32, {"unit": 70000}),
        "further": (66000, 66000 * 32, {"stride": 66000}),
    }


def test_each_kernel_defers_accesses(program: Path) -> None:
    """The comparison above is worth something only if registers count."""
    done = subprocess.run([*TOOL, "--ptx", str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    kernels = done.stdout.split(".visible .entry ")[1:]
    assert len(kernels) == 21
    loops = [
        k for k in kernels if not any(name in k.partition("(")[0] for name in ("tree", "updated", "bytes"))
    ]
    assert len(loops) == 18
    for kernel in loops:
        counts = "%gpubpf_0turns0" in kernel or "%gpubpf_0further0" in kernel
        assert counts, kernel.partition("(")[0]
