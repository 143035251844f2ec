"""threadhist --sass: patches count in kernels without PTX. The embedded device has its own library for that, and runs the PTX."""

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
TOOL = [sys.executable, str(REPOSITORY / "tools/threadhist.py"), "--device", "sim"]
LIBRARY = REPOSITORY / "lib/cudasim/lib/libsanitizer-public.so"

pytestmark = [
    *gpubpf_cuda.needs_cuda,
    pytest.mark.skipif(not LIBRARY.exists(), reason="the embedded device is built without Compute Sanitizer"),
]

# How often each kernel is launched: see LAUNCHES. Threads leave `ways` in three ways, and `deep` from a function that is not inlined.
PROGRAM = r"""
#include <cstdio>
__device__ __noinline__ int down(int n) { return n ? down(n - 1) + threadIdx.x % 2 : 0; }
__global__ void ways(int *out) {
    if (threadIdx.x == 3) return;
    atomicAdd(out, 1);
    if (threadIdx.x % 2) return;
    atomicAdd(out, 1);
}
__global__ void deep(int *out) { if (down(threadIdx.x % 4) == 77) *out = 0; }
__global__ void other(int *out) { atomicAdd(out, 1); }
int main() {
    int *out, sum = 0;
    cudaStream_t streams[2];
    if (cudaMalloc(&out, 4) || cudaMemset(out, 0, 4)) return 1;
    for (auto &s : streams) cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    for (int i = 0; i < 5; i++) ways<<<dim3(2, 2), dim3(8, 3), 0, streams[i % 2]>>>(out);
    ways<<<3, 40>>>(out);
    deep<<<2, 33, 0, streams[0]>>>(out);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    if (cudaDeviceSynchronize() || cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal)) return 2;
    ways<<<3, 40, 0, streams[0]>>>(out);
    deep<<<1, 64, 0, streams[0]>>>(out);
    other<<<2, 8, 0, streams[0]>>>(out);
    if (cudaStreamEndCapture(streams[0], &graph) || cudaGraphInstantiate(&exec, graph, 0)) return 3;
    for (int i = 0; i < 4; i++) if (cudaGraphLaunch(exec, streams[1])) return 4;
    if (cudaDeviceSynchronize() || cudaMemcpy(&sum, out, 4, cudaMemcpyDeviceToHost)) return 5;
    printf("%d\n", sum);
}
"""
LAUNCHES = {  # kernel, threads of the grid → launches
    ("ways", 2 * 2 * 8 * 3): 5,
    ("ways", 3 * 40): 1 + 4,
    ("deep", 2 * 33): 1,
    ("deep", 64): 4,
    ("other", 16): 4,
}
SUM = 5 * 4 * (3 * 7 + 3 * 4) + 5 * 3 * (39 + 20) + 4 * 16


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("app") / "app"))


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDASIM_SASS": "1"} | variables
    return subprocess.run([*TOOL, *words], env=environment, capture_output=True, text=True, timeout=120)


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_every_run_of_every_thread_is_counted(app: str, tmp_path: Path) -> None:
    """In streams and in a graph, in several shapes, for threads that leave in several ways."""
    out = tmp_path / "out.jsonl"
    done = run("--sass", "--json", "-o", str(out), "--", app)
    assert done.returncode == 0 and done.stdout == f"{SUM}\n", done.stderr
    found = records(out)
    kernels = [r for r in found if r["type"] == "kernel"]
    assert {(r["kernel"], r["threads"]): r["launches"] for r in kernels} == LAUNCHES
    assert all(r["runs"] == r["launches"] * r["threads"] == r["work"] for r in kernels)
    assert all(r["work_kind"] == "runs" for r in kernels)
    threads = [r for r in found if r["type"] == "thread"]
    assert len(threads) == sum(threads for _, threads in LAUNCHES)
    shapes = {(r["kernel"], *r["grid"], *r["block_dim"]): r["launches"] for r in kernels}
    assert all(r["runs"] == shapes[(r["kernel"], *r["grid"], *r["block_dim"])] for r in threads)
    summary = found[-1]
    assert summary["launches_seen"] == summary["launches_instrumented"] == sum(LAUNCHES.values())
    assert "not exact" not in done.stderr


def test_the_same_with_ptx(app: str, tmp_path: Path) -> None:
    """Copies and patches count the same, and a program with PTX is not patched."""
    found = {}
    for name, words in {"copies": (), "patches": ("--sass",)}.items():
        out = tmp_path / name
        variables = {"GPUBPF_SANITIZER": "/nowhere"} if words == () else {}
        done = run("--work", "runs", "--json", "-o", str(out), *words, "--", app, **variables)
        if not words:
            assert "SASS only" in json.dumps(records(out)[-1]["not_instrumented"])
            environment = {k: v for k, v in os.environ.items() if k != "CUDASIM_SASS"}
            done = subprocess.run(
                [*TOOL, "--work", "runs", "--json", "-o", str(out), "--", app],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
        assert done.returncode == 0, done.stderr
        keys = ("type", "kernel", "grid", "block_dim", "block", "thread", "runs", "work")
        rows = [[r.get(key) for key in keys] for r in records(out) if r["type"] == "thread"]
        found[name] = sorted(map(json.dumps, rows))
    assert found["copies"] == found["patches"]


def test_chosen_kernels_and_threads(app: str, tmp_path: Path) -> None:
    """Kernels of the same module that do not match, and threads that are not chosen, are not counted."""
    out = tmp_path / "out.jsonl"
    words = ("--kernel", "ways", "--thread", "3:4,1", "--json", "-o", str(out))
    done = run("--sass", *words, "--", app)
    assert done.returncode == 0, done.stderr
    found = records(out)
    assert {r["kernel"] for r in found if "kernel" in r} == {"ways"}
    threads = [r for r in found if r["type"] == "thread"]
    assert {tuple(r["thread"]) for r in threads} == {(3, 1, 0), (4, 1, 0)}
    assert found[-1]["launches_matched"] == 10


def test_without_the_library(app: str) -> None:
    """A missing library is a notice, and the program runs as without a tool."""
    done = run("--sass", "--", app, GPUBPF_SANITIZER="/nowhere/libsanitizer-public.so")
    assert done.returncode == 0 and f"{SUM}\n" in done.stdout
    assert "kernels without PTX are not measured: libsanitizer-public.so cannot be loaded" in done.stderr


def test_another_profiler_is_named(app: str) -> None:
    done = run("--sass", "--", app, NSYS_TARGET_STD="1")
    assert done.returncode == 0 and f"{SUM}\n" in done.stdout
    assert "another profiler is in the process (NSYS_TARGET_STD); end it" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--launch", "2:3", "--", "true"), "--sass and --launch exclude each other"),
        (("--no-graphs", "--", "true"), "--sass and --no-graphs exclude each other"),
        (("--sample", "2", "--", "true"), "--sass and --sample exclude each other"),
        (("--budget", "5", "--", "true"), "--sass and --budget exclude each other"),
        (("--sample-blocks", "1/4", "--", "true"), "--sass and --sample-blocks exclude each other"),
        (("-p", "1"), "a running program cannot be patched"),
        (("--list", "file"), "--sass needs a COMMAND"),
        (("--work", "loads", "--", "true"), "--sass counts no loads, which need PTX"),
    ],
)
def test_what_patches_cannot_do_is_refused(words: tuple[str, ...], says: str) -> None:
    done = run("--sass", *words)
    assert done.returncode == 2 and says in done.stderr
