"""A module with many kernels: each gets its copy at its first launch, and every launch is counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
from gpubpf.traced.device import LIBRARIES
from gpubpf.traced.large_modules import ALL_ABOVE

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = gpubpf_cuda.needs_cuda
KERNELS = 48  # more than images.instrument.MANY_KERNELS

# part<K> adds K + 1 for each thread, and counts its launches in two variables that all kernels share, one of them without a name that
# the host could use. Prints what it has added, and both counts.
PROGRAM = r"""
#include <cuda.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>
__device__ int launches;
static __device__ int &hidden() {
    static __device__ int count = 1000;
    return count;
}
template <int K> __global__ void part(int *a) {
    atomicAdd(&a[K], K + 1);
    if (threadIdx.x == 0) {
        atomicAdd(&launches, 1);
        if (K % 2) atomicAdd(&hidden(), 1);
    }
}
__global__ void show(int *a) { a[KERNELS] = hidden(); }
__global__ void spin(volatile int *go) { while (!*go) {} }
using Part = void (*)(int *);
template <int... K> std::vector<Part> parts(std::integer_sequence<int, K...>) { return {part<K>...}; }
int main(int argc, char **argv) {
    const char *how = argv[1];
    const auto kernels = parts(std::make_integer_sequence<int, KERNELS>());
    int *a, n = 0;
    cudaMalloc(&a, (KERNELS + 1) * sizeof(int));
    cudaMemset(a, 0, (KERNELS + 1) * sizeof(int));
    const auto launch = [&](int k, cudaStream_t stream) { kernels[k]<<<1, 32, 0, stream>>>(a); };
    cudaDeviceSynchronize();
    cudaStream_t stream;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (!strcmp(how, "some"))
        for (int times = 0; times < 3; ++times)
            for (int k = 3; k < 8; ++k) launch(k, stream);
    if (!strcmp(how, "all"))
        for (int k = 0; k < KERNELS; ++k) launch(KERNELS - 1 - k, stream);
    if (!strcmp(how, "threads")) {
        std::vector<std::thread> threads;
        for (int t = 0; t < 4; ++t)
            threads.emplace_back([&] { for (int k = 0; k < 6; ++k) launch(k, cudaStreamPerThread); });
        for (auto &t : threads) t.join();
    }
    if (!strcmp(how, "beside")) {  // another thread launches while this one captures
        cudaGraph_t graph;
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
        launch(0, stream);
        std::thread([&] { for (int k = 1; k < 4; ++k) launch(k, cudaStreamPerThread); }).join();
        printf("captured: %s\n", cudaGetErrorString(cudaStreamEndCapture(stream, &graph)));
        for (int k = 1; k < 4; ++k) launch(k, stream);
    }
    if (!strcmp(how, "child")) {
        cudaGraph_t graph, inner;
        cudaGraphExec_t exec;
        cudaGraphNode_t node, outer;
        cudaGraphCreate(&inner, 0);
        cudaGraphCreate(&graph, 0);
        void *arguments[] = {&a};
        cudaKernelNodeParams params{(void *)kernels[0], dim3(1), dim3(32), 0, arguments, nullptr};
        cudaGraphAddKernelNode(&node, inner, nullptr, 0, &params);
        cudaGraphAddChildGraphNode(&outer, graph, nullptr, 0, inner);
        cudaGraphInstantiate(&exec, graph, 0);
        cudaGraphLaunch(exec, stream);
        params.func = (void *)kernels[1];
        cudaGraphKernelNodeSetParams(node, &params);
        cudaGraphExecChildGraphNodeSetParams(exec, outer, inner);
        cudaGraphLaunch(exec, stream);
    }
    if (!strcmp(how, "capture")) {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
        for (int k = 0; k < 4; ++k) launch(k, stream);
        cudaStreamEndCapture(stream, &graph);
        cudaGraphInstantiate(&exec, graph, 0);
        for (int times = 0; times < 3; ++times) cudaGraphLaunch(exec, stream);
    }
    if (!strcmp(how, "nodes")) {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        cudaGraphNode_t nodes[2];
        cudaGraphCreate(&graph, 0);
        void *arguments[] = {&a};
        cudaKernelNodeParams params{(void *)kernels[0], dim3(1), dim3(32), 0, arguments, nullptr};
        cudaGraphAddKernelNode(&nodes[0], graph, nullptr, 0, &params);
        params.func = (void *)kernels[1];
        cudaGraphAddKernelNode(&nodes[1], graph, nodes, 1, &params);
        cudaGraphInstantiate(&exec, graph, 0);
        cudaGraphLaunch(exec, stream);
        params.func = (void *)kernels[2];
        cudaGraphExecKernelNodeSetParams(exec, nodes[1], &params);
        cudaGraphLaunch(exec, stream);
    }
    if (!strcmp(how, "devices")) {
        int *b;
        launch(1, stream);
        launch(2, stream);
        cudaDeviceSynchronize();
        cudaSetDevice(1);
        cudaMalloc(&b, (KERNELS + 1) * sizeof(int));
        for (int times = 0; times < 2; ++times)
            for (int k = 1; k < 4; ++k) kernels[k]<<<1, 32>>>(b);
        cudaDeviceSynchronize();
        cudaSetDevice(0);
    }
    if (!strcmp(how, "busy")) {  // spin ends only after the launches behind it
        int *go;
        cudaHostAlloc(&go, sizeof *go, cudaHostAllocMapped);
        *go = 0;
        launch(4, stream);
        cudaDeviceSynchronize();
        spin<<<1, 1>>>(go);
        for (int k = 0; k < 3; ++k) launch(k, stream);
        cudaSetDevice(1);
        cudaSetDevice(0);
        CUcontext context;
        CUresult (*retain)(CUcontext *, CUdevice);
        cudaDriverEntryPointQueryResult found;
        cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxRetain", (void **)&retain, 12000, 0, &found);
        retain(&context, 0);
        *go = 1;
        cudaDeviceSynchronize();
        for (int times = 0; times < 100; ++times, usleep(10000)) launch(3, stream);
    }
    if (!strcmp(how, "loop")) {
        puts("ready");
        fflush(stdout);
        for (int k = 0;; k = (k + 1) % 5) {
            launch(k, stream);
            usleep(5000);
        }
    }
    cudaDeviceSynchronize();
    show<<<1, 1>>>(a);
    int h[KERNELS + 1];
    cudaMemcpy(h, a, sizeof h, cudaMemcpyDeviceToHost);
    cudaMemcpyFromSymbol(&n, launches, sizeof n);
    for (int k = 0; k < KERNELS; ++k)
        if (h[k]) printf("%d:%d ", k, h[k] / (k + 1) / 32);
    printf("launches %d hidden %d %s\n", n, h[KERNELS], cudaGetErrorString(cudaGetLastError()));
}
"""
# How → the launches of part<K>.
LAUNCHES: dict[str, dict[int, int]] = {
    "some": dict.fromkeys(range(3, 8), 3),
    "all": dict.fromkeys(range(KERNELS), 1),
    "threads": dict.fromkeys(range(6), 4),
    "capture": dict.fromkeys(range(4), 3),
    "nodes": {0: 2, 1: 1, 2: 1},
    "child": {0: 1, 1: 1},
    "devices": {1: 3, 2: 3, 3: 2},
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = PROGRAM.replace("KERNELS", str(KERNELS))
    return gpubpf_cuda.build(text, tmp_path_factory.mktemp("large") / "large", "-lineinfo", "-lpthread")


def measured(
    tool: str, app: Path, how: str, out: Path, *options: str
) -> tuple[list[dict[str, Any]], str, str]:
    """The tool's records, and what the program and the tool print."""
    command = [sys.executable, str(REPOSITORY / f"tools/{tool}.py"), "--device", "sim", *options, "--json"]
    done = subprocess.run(
        [*command, "-o", str(out), "--", str(app), how],
        capture_output=True, text=True, timeout=120, env=environment(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()], done.stdout, done.stderr


def environment(out: Path) -> dict[str, str]:
    """A cache that is empty: in the tool's, the module might have all its copies."""
    cache = out.parent / "cache"
    cache.mkdir(exist_ok=True)
    return os.environ | {"CUDASIM_HOSTILE": "1", "CUDASIM_DEVICES": "2", "XDG_CACHE_HOME": str(cache)}


def alone(app: Path, how: str) -> str:
    run = os.environ | {"LD_LIBRARY_PATH": str(LIBRARIES), "CUDASIM_DEVICES": "2"}
    return subprocess.run([app, how], capture_output=True, text=True, check=True, timeout=60, env=run).stdout


def launches(records: list[dict[str, Any]]) -> dict[int, int]:
    """The launches of part<K> that were counted, by K."""
    found: Counter[int] = Counter()
    for record in records:
        if record["type"] == "kernel" and (k := re.search("part<([0-9]+)>", record["demangled"])):
            found[int(k[1])] += record["launches"]
    return dict(found)


@pytest.mark.every(3)
@pytest.mark.parametrize("how", LAUNCHES)
def test_every_launch_is_counted(app: Path, tmp_path: Path, how: str) -> None:
    records, printed, _ = measured("threadhist", app, how, tmp_path / "out")
    assert printed == alone(app, how)
    assert "no error" in printed
    assert launches(records) == LAUNCHES[how]
    (summary,) = [record for record in records if record["type"] == "summary"]
    assert summary["launches_instrumented"] == summary["launches_seen"] == sum(LAUNCHES[how].values()) + 1


def test_nothing_is_loaded_while_a_stream_is_captured(app: Path, tmp_path: Path) -> None:
    records, printed, _ = measured("threadhist", app, "beside", tmp_path / "out")
    assert printed == alone(app, "beside") and "captured: no error" in printed
    assert launches(records) == {1: 1, 2: 1, 3: 1}
    (summary,) = [record for record in records if record["type"] == "summary"]
    assert summary["not_instrumented"] == {"before ready": 3}


def test_graphs_that_are_left_alone(app: Path, tmp_path: Path) -> None:
    (summary,) = [
        record
        for record in measured("threadhist", app, "capture", tmp_path / "out", "--no-graphs")[0]
        if record["type"] == "summary"
    ]
    assert summary["not_instrumented"] == {"capture": 12}


def sidecars(out: Path) -> int:
    """The sidecars in the cache that the tool used."""
    return sum(1 for _ in (out.parent / "cache" / "gpubpf" / "sidecar").iterdir())


@pytest.mark.every(2)
def test_each_kernel_has_a_sidecar_of_its_own_until_many_are_launched(app: Path, tmp_path: Path) -> None:
    for how, wanted in (("some", 5 + 1), ("all", (KERNELS + 2) // ALL_ABOVE + 1)):
        out = tmp_path / how / "out"
        out.parent.mkdir()
        first, *_ = measured("threadhist", app, how, out)
        assert sidecars(out) == wanted
        again, *_ = measured("threadhist", app, how, out)  # from the cache
        assert sidecars(out) == wanted and launches(again) == launches(first) == LAUNCHES[how]


@pytest.mark.every(3)
def test_accesses_are_those_of_the_module_that_has_all_copies(app: Path, tmp_path: Path) -> None:
    def sites(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        fields = ("kernel", "source", "op", "requests", "sectors", "lanes")
        return sorted(tuple(str(r.get(f)) for f in fields) for r in records if r["type"] == "site")

    found, printed, _ = measured("memtrace", app, "some", tmp_path / "out")
    only = [option for k in range(3, 8) for option in ("--kernel", f"_Z4partILi{k}EEvPi")]
    whole, *_ = measured("memtrace", app, "some", tmp_path / "whole", *only, "--kernel", "show")
    variables = [
        [r["call"] for r in records if r["type"] == "allocation" and r["kind"] == "variable"]
        for records in (found, whole)
    ]
    assert sorted(variables[0]) == sorted(variables[1]) and "variable launches" in variables[0]
    assert sites(found) == sites(whole) and len(sites(found)) >= 5 and printed == alone(app, "some")


def test_a_launch_does_not_wait_for_a_kernel_that_waits_for_the_program(app: Path, tmp_path: Path) -> None:
    """Copies cannot be loaded while it runs, so these launches run the originals, and the tool says so."""
    records, printed, said = measured("threadhist", app, "busy", tmp_path / "out")
    assert printed == alone(app, "busy")
    (summary,) = [record for record in records if record["type"] == "summary"]
    assert summary["launches_seen"] == 106
    assert summary["launches_instrumented"] + sum(summary["not_instrumented"].values()) == 106
    assert set(summary["not_instrumented"]) <= {"before ready"}
    assert launches(records)[4] == 1 and launches(records)[3] > 0  # before, and some of those after
    (lost,) = summary["not_instrumented"].values()
    assert f"note: {lost} launches of a module with many kernels ran before the copy was loaded" in said
    again, _, said = measured("threadhist", app, "busy", tmp_path / "out")  # has these copies from the start
    assert launches(again) == {0: 1, 1: 1, 2: 1, 3: 100, 4: 1} and "ran before" not in said


def test_a_running_program_gets_the_copies_of_what_it_launches(app: Path, tmp_path: Path) -> None:
    run = environment(tmp_path / "out") | {"LD_LIBRARY_PATH": str(LIBRARIES)}
    tool = [sys.executable, str(REPOSITORY / "tools/threadhist.py"), "--json", "-o", str(tmp_path / "out")]
    counted: dict[int, int] = {}
    with subprocess.Popen([app, "loop"], stdout=subprocess.PIPE, env=run) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            for seconds in ("3", "9", "27"):  # a busy machine needs more
                command = [*tool, "-d", seconds, "-p", str(process.pid)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=run)
                assert done.returncode == 0, done.stderr
                assert process.poll() is None
                records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
                counted = launches(records)
                (summary,) = [record for record in records if record["type"] == "summary"]
                missed = summary["not_instrumented"]
                assert sum(counted.values()) == summary["launches_instrumented"]
                assert summary["launches_seen"] == summary["launches_instrumented"] + sum(missed.values())
                assert set(missed) <= {"before ready"} and sidecars(tmp_path / "out") <= 5
                if len(counted) == 5:
                    break
        finally:
            process.kill()
    assert set(counted) == set(range(5))
