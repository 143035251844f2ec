"""Kernels of one name in several modules of a program: each access has the line of the module whose kernel made it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = gpubpf_cuda.needs_cuda

# Sites of called functions come first, so that of `next` takes the number of one of `twice` in one.cu.
TWICE = """\
template <class T> __global__ void twice(T *p) {
    p[threadIdx.x] *= 2;
}
"""
ONE = """\
#include "twice.h"
static __global__ void same(float *p) {
    p[threadIdx.x] = 1;
}
void two(float *), three(float *);
int main() {
    float *p;
    cudaMalloc(&p, 4096);
    same<<<1, 32>>>(p);
    twice<<<1, 32>>>(p);
    two(p);
    three(p);
    return cudaDeviceSynchronize();
}
"""
TWO = """\
#include "twice.h"
__device__ __noinline__ float next(const float *p) {
    return p[threadIdx.x] + 1;
}
static __global__ void same(float *p) {
    p[threadIdx.x + 32] = next(p);
    p[2 * threadIdx.x] = 2;
}
void two(float *p) {
    for (int i = 0; i < 2; ++i) same<<<1, 32>>>(p);
    for (int i = 0; i < 2; ++i) twice<<<1, 32>>>(p);
}
"""
THREE = """\
static __global__ void same(float *p) {
    p[threadIdx.x] += 3;
    p[4 * threadIdx.x] += 3;
}
void three(float *p) {
    for (int i = 0; i < 4; ++i) same<<<1, 32>>>(p);
}
"""
# Of all launches, by kernel, line (None: three.cu has none) and kind.
REQUESTS = {
    ("same", "one.cu:3", "store"): 1,
    ("same", "two.cu:3", "load"): 2,
    ("same", "two.cu:6", "store"): 2,
    ("same", "two.cu:7", "store"): 2,
    ("same", None, "load"): 8,
    ("same", None, "store"): 8,
    ("twice", "twice.h:2", "load"): 3,
    ("twice", "twice.h:2", "store"): 3,
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gpubpf_cuda.skip_without_cuda()
    folder = tmp_path_factory.mktemp("same")
    for name, text in (("twice.h", TWICE), ("two.cu", TWO), ("three.cu", THREE)):
        (folder / name).write_text(text)
    gpubpf_cuda.run_nvcc(["nvcc", "-c", "-o", folder / "three.o", folder / "three.cu"])
    return gpubpf_cuda.build(ONE, folder / "one", "-lineinfo", folder / "two.cu", folder / "three.o")


def measured(tool: str, app: Path, out: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, REPOSITORY / f"tools/{tool}.py", "--device", "sim", *arguments]
    environment = os.environ | {"CUDASIM_HOSTILE": "1"}
    done = subprocess.run(
        [*map(str, command), "--json", "-o", str(out), "--", str(app)],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.every(2)
def test_requests_by_line(app: Path, tmp_path: Path) -> None:
    found: Counter[tuple[str, str | None, str]] = Counter()
    numbers = Counter()
    for record in measured("memtrace", app, tmp_path / "out"):
        if record["type"] == "site":
            found[record["kernel"], record["source"], record["op"]] += record["requests"]
            numbers[record["kernel"], record["space"], record["site"]] += 1
    assert found == REQUESTS
    assert set(numbers.values()) == {1}


def test_every_access_has_its_line(app: Path, tmp_path: Path) -> None:
    found: Counter[tuple[str, str | None]] = Counter()
    for record in measured("memtrace", app, tmp_path / "out", "-e"):
        if record["type"] == "access":
            found[record["kernel"], record["source"]] += 1
    wanted: Counter[tuple[str, str | None]] = Counter()
    for (kernel, line, _), requests in REQUESTS.items():
        wanted[kernel, line] += 32 * requests
    assert found == wanted


@pytest.mark.every(2)
def test_events_and_keys_have_their_line(app: Path, tmp_path: Path) -> None:
    events = measured("gputrace", app, tmp_path / "out", 'store:same "%s", source')
    found = Counter(record["source"] for record in events if record["type"] == "event")
    lines = {name: n for name, n in found.items() if not name.startswith("PTX line ")}
    assert lines == {"one.cu:3": 32, "two.cu:6": 64, "two.cu:7": 64}
    assert sorted(found[name] for name in found.keys() - lines) == [128, 128]
    sums = measured("gpudist", app, tmp_path / "out", "-H", "store:same:u32:lane, source")
    keys = Counter({record["key"]: record["count"] for record in sums if record["type"] == "dist"})
    assert keys == found
    counts = measured("gpudist", app, tmp_path / "out", "-C", "store:same:u32:lane, source")
    values = [record for record in counts if record["type"] == "dist"]
    assert sum(record["count"] for record in values) == keys.total()
    assert not any(record["missing"] for record in values)
