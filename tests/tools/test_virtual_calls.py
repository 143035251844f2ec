"""The tools on a program whose kernels call virtual functions: the same results, exact counts, accesses inside the functions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = gpubpf_cuda.needs_cuda

# Object i of 192 is a Square, a Circle, or (with i % 3 == 2) a Pair of both, whose functions call those of its parts.
APP = r"""
#include <cstdio>
struct Shape {
    float size;
    __device__ Shape(float size) : size(size) {}
    __device__ virtual float area(float more) const = 0;
    __device__ virtual void grow(float by) { size *= by; }
    __device__ virtual ~Shape() {}
};
struct Square : Shape {
    __device__ Square(float size) : Shape(size) {}
    __device__ float area(float more) const override { return size * size + more; }
};
struct Circle : Shape {
    float *log;
    __device__ Circle(float size, float *log) : Shape(size), log(log) {}
    __device__ float area(float more) const override {
        log[0] = size;
        return 3 * size * size - more;
    }
    __device__ void grow(float by) override { size += by; }
};
struct Pair : Shape {
    Shape *left, *right;
    __device__ Pair(Shape *left, Shape *right) : Shape(0), left(left), right(right) {}
    __device__ float area(float more) const override { return left->area(more) + right->area(more); }
    __device__ void grow(float by) override { left->grow(by), right->grow(by); }
    __device__ ~Pair() { delete left, delete right; }
};
__global__ void build(Shape **shapes, float *log) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float size = i;
    if (i % 3 == 0) shapes[i] = new Square(size);
    else if (i % 3 == 1) shapes[i] = new Circle(size, log + i);
    else shapes[i] = new Pair(new Square(size), new Circle(size, log + i));
}
__global__ void use(Shape **shapes, float *areas) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    shapes[i]->grow(2);
    areas[i] = shapes[i]->area(1);
}
__global__ void drop(Shape **shapes) { delete shapes[blockIdx.x * blockDim.x + threadIdx.x]; }
int main() {
    Shape **shapes;
    float *areas, *log;
    cudaMalloc(&shapes, 192 * sizeof *shapes);
    cudaMallocManaged(&areas, 192 * sizeof *areas);
    cudaMallocManaged(&log, 192 * sizeof *log);
    cudaMemset(log, 0, 192 * sizeof *log);
    build<<<2, 96>>>(shapes, log);
    use<<<2, 96>>>(shapes, areas);
    drop<<<2, 96>>>(shapes);
    if (cudaDeviceSynchronize()) return 9;
    for (int i = 0; i < 192; i++) {
        float twice = 2.f * i, more = i + 2.f, square = twice * twice + 1, circle = 3 * more * more - 1;
        if (areas[i] != (i % 3 == 0 ? square : i % 3 == 1 ? circle : square + circle)) return 1;
        if (log[i] != (i % 3 ? more : 0)) return 2;
    }
    puts("right");
    return 7;
}
"""


@pytest.fixture(scope="module", params=["", "-rdc=true"], ids=["one text", "linked"])
def app(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ["-lineinfo", "-arch=sm_80", *([request.param] if request.param else [])]
    return gpubpf_cuda.build(APP, tmp_path_factory.mktemp("virtual") / "app", *flags)


def measured(tool: str, app: Path, tmp_path: Path, *arguments: str) -> list[dict]:
    out = tmp_path / "out"
    options = ["--device", "sim", "--json", "-o", str(out)]
    command = [sys.executable, str(REPOSITORY / f"tools/{tool}.py"), *options, *arguments, "--", str(app)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (7, "right\n"), done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert records[-1]["launches_instrumented"] == records[-1]["launches_matched"] > 0, records[-1]
    assert not records[-1]["not_instrumented"] and not records[-1].get("lost")
    return records


def test_each_function_is_counted(app: Path, tmp_path: Path) -> None:
    names = ("Square::area", "Circle::area", "Pair::area", "Shape::grow", "Circle::grow", "Pair::grow")
    records = measured("gpucount", app, tmp_path, *(f"func:use:*{name}*" for name in names))
    threads: Counter[str] = Counter()
    for record in records:
        if record["type"] == "count":
            threads[next(name for name in names if name in record["spec"])] += record["threads"]
    assert threads == dict(zip(names, (128, 128, 64, 128, 128, 64), strict=True))


@pytest.mark.every(2)
def test_work_inside_the_functions_is_counted(app: Path, tmp_path: Path) -> None:
    records = measured("threadhist", app, tmp_path, "--kernel", "use*", "--work", "stores")
    work = {
        96 * record["block"][0] + record["thread"][0]: record["work"]
        for record in records
        if record["type"] == "thread"
    }
    # `areas`, then the size of each part, and what a Circle logs.
    assert work == {i: 1 + (1, 2, 3)[i % 3] for i in range(192)}


@pytest.mark.every(2)
@pytest.mark.parametrize("tool", ["kernelretsnoop", "launchlate", "memtrace"])
def test_other_tools(tool: str, app: Path, tmp_path: Path) -> None:
    records = measured(tool, app, tmp_path)
    if tool == "memtrace":
        logged = [
            r for r in records if r["type"] == "site" and r["op"] == "store" and r["kernel"].startswith("use")
        ]
        assert sum(r["accesses"] for r in logged) == 192 + 128 + 128 + 128
    if tool == "kernelretsnoop":
        assert {r["exits"] for r in records if r["type"] == "kernel"} == {192}


@pytest.mark.every(4)
def test_sampled_blocks(app: Path, tmp_path: Path) -> None:
    measured("memtrace", app, tmp_path, "--sample-blocks", "1/2")
