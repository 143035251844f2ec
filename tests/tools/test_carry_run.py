"""Tools on a program that adds long numbers word by word, with loads and stores between the instructions that pass the carry on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
import gpubpf_specs

# 32 threads, each of which adds two numbers of 64 words. Every word is loaded, added and stored before the next. The third of every
# seven words passes on the carry that it gets.
APP = r"""
#include <cstdio>
#include <cstdlib>
#define WORDS 64
__global__ void add(const unsigned *a, const unsigned *b, unsigned *sum) {
    a += threadIdx.x * WORDS, b += threadIdx.x * WORDS, sum += threadIdx.x * (WORDS + 1);
    unsigned word;
    asm volatile("add.cc.u32 %0, %1, %2;" : "=r"(word) : "r"(a[0]), "r"(b[0]) : "memory");
    sum[0] = word;
#pragma unroll
    for (int i = 1; i < WORDS; i++) {
        asm volatile("addc.cc.u32 %0, %1, %2;" : "=r"(word) : "r"(a[i]), "r"(b[i]) : "memory");
        sum[i] = word;
    }
    asm volatile("addc.u32 %0, 0, 0;" : "=r"(word) : : "memory");
    sum[WORDS] = word;
}
int main() {
    static unsigned a[32][WORDS], b[32][WORDS], sum[32][WORDS + 1];
    unsigned *on[3], wrong = 0;
    for (int t = 0; t < 32; t++)
        for (int i = 0; i < WORDS; i++) a[t][i] = rand() * 3u, b[t][i] = i % 7 == 2 ? ~a[t][i] : rand() * 3u;
    for (auto &at : on) cudaMalloc(&at, sizeof sum);
    cudaMemcpy(on[0], a, sizeof a, cudaMemcpyHostToDevice);
    cudaMemcpy(on[1], b, sizeof b, cudaMemcpyHostToDevice);
    add<<<1, 32>>>(on[0], on[1], on[2]);
    cudaMemcpy(sum, on[2], sizeof sum, cudaMemcpyDeviceToHost);
    for (int t = 0; t < 32; t++) {
        unsigned long long carry = 0;
        for (int i = 0; i <= WORDS; i++) {
            if (i < WORDS) carry += (unsigned long long)a[t][i] + b[t][i];
            wrong += sum[t][i] != (unsigned)carry;
            carry >>= 32;
        }
    }
    printf("%u wrong words\n", wrong);
    return wrong != 0;
}
"""

pytestmark = gpubpf_specs.needs_all


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(APP, tmp_path_factory.mktemp("carry") / "carry")


def measured(tool: str, out: Path, app: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the records of a measurement in which all sums are right, on a device that loses the carry in each call."""
    done = subprocess.run(
        [
            *(sys.executable, gpubpf_specs.ROOT / "tools" / f"{tool}.py", "--device", "sim"),
            *("--json", "-o", out, *arguments, "--", app),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"CUDASIM_HOSTILE": "1"},
    )
    assert (done.returncode, done.stdout) == (0, "0 wrong words\n"), done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.every(4)
def test_sums_under_memtrace(app: Path, tmp_path: Path) -> None:
    """So many places that memtrace's programs are functions, which the kernel calls."""
    records = measured("memtrace", tmp_path / "records", app)
    operations = [record["op"] for record in records if record["type"] == "site"]
    assert (operations.count("load"), operations.count("store")) == (128, 65)
    command = [sys.executable, gpubpf_specs.ROOT / "tools" / "memtrace.py", "--ptx", app]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert text.count("call gpubpf_program0") == 193


def test_instructions_with_the_carry_are_counted(app: Path, tmp_path: Path) -> None:
    specs = ("instruction:add:*.cc.u32", "instruction:add:addc.u32")
    records = measured("gpucount", tmp_path / "records", app, *specs)
    assert [record["threads"] for record in records if record["type"] == "count"] == [64 * 32, 32]
