"""warpdiv from its command line to its exit status, on programs whose answers are known beforehand."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
import gpubpf_examples
import hipsim_device
from gpubpf.divergence import branches as branches_of
from gpubpf.divergence import text
from gpubpf.show.owner_columns import OwnerColumns

pytestmark = gpubpf_cuda.needs_cuda
TOOL = Path(__file__).resolve().parents[2] / "tools/warpdiv.py"


def run(*arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOL, "--device", "sim", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    return done


def records(place: Path, *arguments: str | Path) -> list[dict[str, Any]]:
    run("--json", "-o", place / "out", *arguments)
    return [json.loads(line) for line in (place / "out").read_text().splitlines()]


@pytest.fixture(scope="module")
def branches() -> Path:
    return gpubpf_examples.build("branches") / "branches"


def test_the_guilty_branch_is_found_and_nothing_else(branches: Path, tmp_path: Path) -> None:
    found = records(tmp_path, "--", branches, "6", "10")
    kernels = {r["kernel"]: r for r in found if r["type"] == "kernel"}
    assert kernels["sorted"]["efficiency"] == 1
    assert (kernels["mixed"]["launches"], kernels["mixed"]["threads"]) == (1, 6 * 128)
    (worst,) = (r for r in found if r["type"] == "branch" and r["diverged"])
    assert (worst["kernel"], worst["executed"], worst["diverged"], worst["lanes_mean"]) == (
        "mixed",
        24,
        24,
        32,
    )
    assert (worst["taken"], worst["not_taken"], worst["cause"], worst["loop"]) == (384, 384, "data", False)
    assert worst["source"].startswith("branches.cu:")
    idle = 32 * kernels["mixed"]["instructions"] - kernels["mixed"]["lane_instructions"]
    assert worst["lost"] == idle
    assert kernels["mixed"]["lane_instructions"] == kernels["sorted"]["lane_instructions"]


def test_the_report_names_it(branches: Path) -> None:
    text = run("--", branches).stdout
    assert (
        "branches.cu:27: 47.4 % of the kernel's lane-instructions are lost here; the\n  condition depends on data"
        in text
    )
    assert max(map(len, text.splitlines())) <= 80
    assert "no branch split a warp" in run("--kernel", "sorted", "--", branches).stdout
    assert "no instrumented kernel ran" in run("--kernel", "absent", "--", branches, status=1).stdout


@pytest.mark.parametrize("by", ["line", "function", "kernel"])
def test_other_rows(by: str, branches: Path, tmp_path: Path) -> None:
    found = records(tmp_path, "--by", by, "--", branches)
    kernels = {r["kernel"]: r for r in found if r["type"] == "kernel"}
    for name, kernel in kernels.items():
        parts = [r for r in found if r["type"] == by and r["kernel"] == name]
        for field in ("instructions", "lane_instructions"):
            assert sum(r[field] for r in parts) == kernel[field]
    rows = list(csv.DictReader(run("--csv", "--by", by, "--", branches).stdout.splitlines()[1:]))
    assert len(rows) == len([r for r in found if r["type"] == by])


@pytest.mark.parametrize("turns", [50, 10_000])  # so many that the device lets other lanes run meanwhile
def test_early_exits_wait_until_the_kernel_ends(turns: int, tmp_path: Path) -> None:
    source = r"""
    __global__ void tail(int *x, int n) {
        int i = threadIdx.x;
        if (i >= n) return;
        int value = x[i];
    #pragma unroll 1
        for (int t = 0; t < TURNS; t++) value = value * 3 + (value >> 5);
        x[i] = value;
    }
    int main() {
        int *x;
        if (cudaMalloc(&x, 128)) return 1;
        for (int n = 30; n < 32; n++) tail<<<1, 32>>>(x, n);
        return cudaDeviceSynchronize() != cudaSuccess;
    }
    """
    found = records(tmp_path, "--", gpubpf_cuda.build(source.replace("TURNS", str(turns)), tmp_path / "tail"))
    (kernel,) = (r for r in found if r["type"] == "kernel")
    (branch,) = (r for r in found if r["type"] == "branch" and r["diverged"])
    assert (branch["executed"], branch["diverged"], branch["lanes_mean"]) == (2, 2, 32)
    assert branch["cause"] == "lane"
    # Two lanes of the first launch leave, and one of the second.
    idle = 32 * kernel["instructions"] - kernel["lane_instructions"]
    assert branch["lost"] == idle > 3 * 3 * turns


@pytest.mark.parametrize(
    ("program", "gpu"),
    [
        ("leaves", "gfx906"),
        ("diverges", "gfx906"),
        pytest.param("diverges", "gfx1030", marks=pytest.mark.long),
        pytest.param("diverges", "gfx90a", marks=pytest.mark.long),
    ],
)
def test_waves_of_amd_gpus_lose_what_their_idle_lanes_do_not_execute(
    program: str, gpu: str, tmp_path: Path
) -> None:
    built = hipsim_device.program(program, "-gline-tables-only", gpu=gpu)
    found, done = hipsim_device.measured("warpdiv", tmp_path / "out", "--", built, HIPSIM_GPU=gpu)
    assert done.returncode == 0, done.stderr
    assert done.stdout == hipsim_device.run([built], HIPSIM_GPU=gpu, HIPSIM_CLOCK="virtual").stdout
    kernels = {r["kernel"]: r for r in found if r["type"] == "kernel"}
    lost = dict.fromkeys(kernels, 0)
    for one in found:
        if one["type"] == "branch":
            lost[one["kernel"]] += one["lost"]
            assert one["diverged"] or not one["lost"]
    for name, one in kernels.items():
        assert lost[name] == one["wave"] * one["instructions"] - one["lane_instructions"]
    if program == "leaves":
        assert lost["staged"] > 0
        return
    assert all(lost.values())
    # A lane that has made its turns loses the turns of the last lane of its wave. One instruction more counts once in each wave.
    loops = [r for r in found if r["type"] == "branch" and r["kernel"] == "uneven" and r["loop"]]
    (loop,) = (r for r in loops if r["lost"])
    wave = kernels["uneven"]["wave"]
    waited = sum((t | (wave - 1)) - t for t in range(1, 128))
    assert loop["lost"] % waited == 0
    split = [r for r in found if r["type"] == "branch" and r["diverged"]]
    assert all(r["source"].startswith("diverges.hip:") for r in split if r["loop"])
    causes = {"ifelse": {"lane"}, "early": {"lane"}, "uneven": {"lane"}, "nested": {"data"}}
    assert {name: {r["cause"] for r in split if r["kernel"] == name} for name in causes} == causes


def test_host_threads_that_launch(tmp_path: Path) -> None:
    source = r"""
    #include <pthread.h>
    #include <thread>
    #include <unistd.h>
    #include <vector>
    __global__ void split(int *x) { if (threadIdx.x % 2) x[threadIdx.x] += clock(); }
    __global__ void whole(int *x) { x[threadIdx.x] += 1; }
    int main() {
        int *x;
        if (cudaMalloc(&x, 4096)) return 1;
        std::vector<std::thread> threads;
        for (int t = 0; t < 2; t++) threads.emplace_back([=] {
            pthread_setname_np(pthread_self(), t ? "heavy" : "light");
            for (int i = 0; i < 3 + 9 * t; i++)
                if (t || i == 0) split<<<1, 64>>>(x);
                else whole<<<1, 64>>>(x);
            cudaDeviceSynchronize();
            usleep(600000);
        });
        for (auto &thread : threads) thread.join();
    }
    """
    program = gpubpf_cuda.build(source, tmp_path / "threads")
    found = records(tmp_path, "--threads", "--", program)
    rows = [r for r in found if r["type"] == "launcher"]
    launches = {(r["kernel"], r["launches"]): r for r in rows}
    assert set(launches) == {("split", 12), ("split", 1), ("whole", 2)}
    assert launches["split", 1]["tid"] == launches["whole", 2]["tid"] != launches["split", 12]["tid"]
    # A busy machine may look only when the threads have ended.
    assert launches["split", 12]["name"] in ("heavy", None) and launches["whole", 2]["name"] in (
        "light",
        None,
    )
    # The frames of a process that has ended may be unknown. If the thread still had its name, they are known.
    stacks = [" ".join(r["stack"]) for r in rows if r["name"] is not None]
    assert all("operator()" in stack or "main" in stack for stack in stacks), stacks
    assert found[-1]["log_lost"] == 0
    told = run("--threads", "--by", "kernel", "--", program).stdout
    assert "split: of 13 launches: thread " in told and "whole: of 2 launches: thread " in told
    assert not any(r["type"] == "launcher" for r in records(tmp_path, "--", program))


def test_launches_of_graphs_count_for_the_thread_that_launches_the_graph(tmp_path: Path) -> None:
    source = r"""
    #include <unistd.h>
    __global__ void split(int *x) { if (threadIdx.x % 2) x[threadIdx.x] += clock(); }
    extern "C" __attribute__((noinline, visibility("default"))) void replay(cudaGraphExec_t graph, cudaStream_t stream) {
        for (int i = 0; i < 5; i++) cudaGraphLaunch(graph, stream);
        cudaStreamSynchronize(stream);
    }
    int main() {
        int *x; cudaStream_t stream; cudaGraph_t graph; cudaGraphExec_t ready;
        if (cudaMalloc(&x, 4096) || cudaStreamCreate(&stream)) return 1;
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
        for (int i = 0; i < 2; i++) split<<<1, 64, 0, stream>>>(x);
        cudaStreamEndCapture(stream, &graph);
        if (cudaGraphInstantiate(&ready, graph, 0)) return 2;
        replay(ready, stream);
        split<<<1, 64>>>(x);
        cudaDeviceSynchronize();
        usleep(600000);
    }
    """
    found = records(tmp_path, "--threads", "--", gpubpf_cuda.build(source, tmp_path / "graphs"))
    (row,) = (r for r in found if r["type"] == "launcher")
    assert row["launches"] == 11
    if row["name"] is not None:  # the process had not ended, so its frames are known
        assert row["stack"][-2:] == ["main", "replay"]


def test_losses_of_a_kernel_that_executed_nothing_in_the_interval() -> None:
    place, other = (branches_of.Place(1, 2, "app", 0, None, name) for name in ("_Z1av", "_Z1bv"))
    branch = branches_of.Branch(place, 3, None, 0, 1, 0, 0, 500)
    ran = branches_of.Work(other, "", "", 10, 320, 1, 32)
    found = branches_of.Found((branch,), (ran,), (), ())
    rows = list(text.lines(found, "branch", None, False, OwnerColumns()))
    assert rows[-1].split()[-2:] == ["500", "-"]


def test_every_interval_has_its_own_numbers(branches: Path, tmp_path: Path) -> None:
    found = records(tmp_path, "--kernel", "mixed", "0.2", "--", branches)
    assert sum(r["executed"] for r in found if r["type"] == "branch" and r["diverged"]) == 16
    assert os.access(TOOL, os.X_OK)
