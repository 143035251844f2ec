"""NVTX ranges: frames of gpuprofile, fields of launchlate, and --range, with programs whose ranges are known beforehand."""

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
from gpubpf import agent

NVTX = Path(os.environ.get("CUDA_INCLUDE", "/usr/local/cuda/include")) / "nvtx3/nvtx3.hpp"
pytestmark = [
    *gpubpf_cuda.needs_cuda,
    pytest.mark.skipif(not NVTX.exists(), reason="needs NVTX's headers, of CUDA's toolkit"),
]
TOOLS = Path(__file__).resolve().parents[2] / "tools"
SOURCE = r"""
#include <cuda.h>
#include <nvtx3/nvToolsExt.h>
#include <thread>
#include <unistd.h>
#include <sys/wait.h>
__global__ void one(int *at) { at[threadIdx.x]++; }
__global__ void two(int *at) { at[threadIdx.x]++; }
int *at;
void launch() { one<<<1, 32>>>(at); }
nvtxEventAttributes_t named(const char *name) {
    nvtxEventAttributes_t made = {};
    made.version = NVTX_VERSION;
    made.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    made.messageType = NVTX_MESSAGE_TYPE_ASCII;
    made.message.ascii = name;
    return made;
}
void graph() {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStreamCreate(&stream);
    nvtxRangePushA("capture");
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    two<<<1, 32, 0, stream>>>(at);
    cudaStreamEndCapture(stream, &graph);
    nvtxRangePop();
    cudaGraphInstantiate(&exec, graph, 0);
    nvtxRangePushA("replay");
    for (int i = 0; i < 2; i++) cudaGraphLaunch(exec, stream);
    nvtxRangePop();
    cudaGraphLaunch(exec, stream);
    cudaStreamSynchronize(stream);
}
int main() {
    const bool seen = nvtxRangePushA("before") == 0;  // before the driver is initialized
    cudaMalloc(&at, 128);
    launch();
    int levels = nvtxRangePushA("nested");  // 1
    launch();
    levels = levels * 10 + nvtxRangePop();  // 1
    launch();
    levels = levels * 10 + nvtxRangePop();  // 0
    launch();
    if (seen && (levels != 110 || nvtxRangePop() >= 0)) return 1;

    // Domains: each has its own stack.
    nvtxDomainHandle_t domain = nvtxDomainCreateA("library");
    nvtxEventAttributes_t made = named("in a domain");
    nvtxDomainRangePushEx(domain, &made);
    nvtxRangePushA("in none");
    nvtxDomainRangePop(domain);
    launch();
    nvtxRangePop();
    made.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
    made.message.registered = nvtxDomainRegisterStringA(domain, "registered");
    nvtxDomainRangePushEx(domain, &made);
    launch();
    nvtxDomainRangePop(domain);
    nvtxRangePushW(L"gr\u00fc\u00dfe \u4f60 \U0001F600");
    launch();
    nvtxRangePop();

    // Threads, and ranges of the process that another thread ends.
    nvtxRangeId_t whole = nvtxRangeStartA("process");
    nvtxRangePushA("main's");
    std::thread([] { launch(); nvtxRangePushA("never popped"); launch(); }).join();
    std::thread([] { launch(); }).join();   // perhaps with the record of the thread before
    launch();
    std::thread([=] { nvtxRangeEnd(whole); }).join();
    launch();
    nvtxRangePop();
    graph();
    for (int i = 0; i < 300; i++) nvtxRangePushA("deep");  // more than are kept
    for (int i = 0; i < 300; i++) nvtxRangePop();
    launch();
    return cudaDeviceSynchronize();
}
"""
ONE = Counter(
    {
        (): 2,
        ("before",): 2,
        ("before", "nested"): 1,
        ("in none",): 1,
        ("registered",): 1,
        ("grüße 你 😀",): 1,
        ("process",): 2,
        ("process", "never popped"): 1,
        ("process", "main's"): 1,
        ("main's",): 1,
    }
)
TWO = Counter({("replay",): 2, (): 1})


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(SOURCE, tmp_path_factory.mktemp("ranges") / "ranges", "-std=c++17")


def run(
    tool: str, *arguments: str | Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOLS / f"{tool}.py", "--device", "sim", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **(environment or {})}
    )
    assert done.returncode == 0, done.stderr
    return done


def records(place: Path, tool: str, *arguments: str | Path) -> list[dict[str, Any]]:
    run(tool, "--json", "-o", place / "out", *arguments)
    return [json.loads(line) for line in (place / "out").read_text().splitlines()]


def by_ranges(found: list[dict[str, Any]], kernel: str) -> Counter[tuple[str, ...]]:
    """The launches of a kernel by the ranges that gpuprofile shows."""
    counts: Counter[tuple[str, ...]] = Counter()
    for one in found:
        if one["type"] == "stack" and one["kernel"] == kernel:
            kinds = [frame["kind"] for frame in one["frames"]]
            assert kinds == sorted(kinds, reverse=True), "ranges are outside of all functions"
            ranges = [frame["name"] for frame in one["frames"] if frame["kind"] == "nvtx"]
            counts[tuple(ranges)] += one["launches"]
    return counts


def test_stacks_begin_with_the_ranges(program: Path, tmp_path: Path) -> None:
    found = records(tmp_path, "gpuprofile", "--graphs", "--", program)
    assert by_ranges(found, "one") == ONE
    assert by_ranges(found, "two") == TWO
    domains = {frame["name"]: frame["file"] for one in found for frame in one.get("frames", ())}
    assert (domains["registered"], domains["in none"]) == ("library", "")


def test_a_range_is_a_filter_of_gpuprofile(program: Path, tmp_path: Path) -> None:
    chosen = ["--range", "neste?", "--range", "proc*", "--range", "replay"]
    found = records(tmp_path, "gpuprofile", "--graphs", *chosen, "--", program)
    inside = {"nested", "process"}
    assert by_ranges(found, "one") == Counter({k: n for k, n in ONE.items() if inside & set(k)})
    assert by_ranges(found, "two") == Counter({("replay",): 2})


def test_a_range_is_a_filter_of_threadhist(program: Path, tmp_path: Path) -> None:
    found = records(tmp_path, "threadhist", "--range", "before", "--", program)
    assert {one["kernel"]: one["launches"] for one in found if one["type"] == "kernel"} == {"one": 3}
    summary = found[-1]
    counts = summary["launches_matched"], summary["launches_instrumented"]
    assert counts == (ONE.total() + TWO.total(), 3)
    assert sum(summary["not_instrumented"].values()) == counts[0] - counts[1]


def test_launchlate_has_the_ranges_of_each_launch(program: Path, tmp_path: Path) -> None:
    for option in (["--stacks"], ["--range", "*"]):
        found = records(tmp_path, "launchlate", "--graphs", "-v", *option, "--", program)
        launches = [one for one in found if one["type"] == "launch"]
        for kernel, expected in (("one", ONE), ("two", TWO)):
            counts = Counter(tuple(one["ranges"]) for one in launches if one["kernel"] == kernel)
            assert counts == Counter({k: n for k, n in expected.items() if k or option == ["--stacks"]})
    found = records(tmp_path, "launchlate", "-v", "--", program)
    assert not any("ranges" in one for one in found)


def test_no_launch_is_in_such_a_range(program: Path, tmp_path: Path) -> None:
    found = records(tmp_path, "gpuprofile", "--range", "nothing", "--", program)
    assert not any(one["type"] == "stack" for one in found)


def test_another_tool_gets_the_ranges(program: Path) -> None:
    done = run("gpuprofile", "--", program, environment={"NVTX_INJECTION64_PATH": "/of/another.so"})
    assert "NVTX_INJECTION64_PATH is set, so another tool gets the ranges" in done.stderr
    assert "[before]" not in done.stdout and "launches from" in done.stdout


def test_a_program_without_a_tool_calls_nothing(program: Path) -> None:
    """The agent alone, as NVTX loads it, neither connects to a tool nor changes what the program gets."""
    libraries = str(Path(gpubpf_cuda.LIBRARIES))
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(agent.LIBRARY), "LD_LIBRARY_PATH": libraries}
    subprocess.run([program], env=environment, check=True, timeout=60)


def test_a_running_process_needs_the_variable(tmp_path: Path) -> None:
    """Its ranges from before the attach are known if NVTX loaded the agent at the start of the process."""
    source = r"""
#include <cuda.h>
#include <cstdio>
#include <nvtx3/nvToolsExt.h>
__global__ void one(int *at) { at[threadIdx.x]++; }
int main() {
    int *at;
    nvtxRangePushA("from before");
    cudaMalloc(&at, 128);
    one<<<1, 32>>>(at);
    cudaDeviceSynchronize();
    puts("ready");
    fflush(stdout);
    getchar();
    one<<<1, 32>>>(at);
    cudaDeviceSynchronize();
    puts("done");
    fflush(stdout);
    getchar();
}
"""
    program = gpubpf_cuda.build(source, tmp_path / "running")
    libraries = str(Path(gpubpf_cuda.LIBRARIES))
    for variables, expected in (
        ({}, Counter()),
        ({"NVTX_INJECTION64_PATH": str(agent.LIBRARY)}, Counter({("from before",): 1})),
    ):
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries, **variables}
        pipe = subprocess.PIPE
        with subprocess.Popen([program], env=environment, stdin=pipe, stdout=pipe, text=True) as running:
            assert running.stdin and running.stdout
            assert running.stdout.readline() == "ready\n"
            command = [sys.executable, TOOLS / "gpuprofile.py", "--range", "from *", "--json"]
            with subprocess.Popen(
                [*command, "-p", str(running.pid)], stdout=pipe, stderr=pipe, text=True
            ) as tool:
                assert tool.stdout and tool.stderr
                while json.loads(tool.stdout.readline())["type"] != "attached":
                    pass
                running.stdin.write("\n")
                running.stdin.flush()
                assert running.stdout.readline() == "done\n"
                running.stdin.write("\n")
                running.stdin.flush()
                found = [json.loads(line) for line in tool.stdout]
                assert "a process shows its ranges only if" in tool.stderr.read()
        assert by_ranges(found, "one") == expected
