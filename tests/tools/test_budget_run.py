"""--budget, from the command line to the launches that are measured, on a program that waits until the tool has chosen."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
from gpubpf.agent.definitions import OTHER_OPERATION
from gpubpf.session.budget import one_in

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHES, THREADS, STORES = 600, 128, 10

pytestmark = gpubpf_cuda.needs_cuda

# Each thread stores 10 times. The program launches once, waits for a line, and launches 599 times. With an argument, it launches a
# graph of the kernel three times instead.
PROGRAM = r"""
#include <cstdio>
__global__ void work(volatile int *out, int turns) {
#pragma unroll 1
    for (int i = 0; i < turns; i++) out[threadIdx.x] = i;
}
int main(int argc, char **) {
    int *out;
    cudaMalloc(&out, 4 * 64);
    if (argc > 1) {
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t replayed;
        cudaStreamCreate(&stream);
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
        work<<<2, 64, 0, stream>>>(out, 10);
        cudaStreamEndCapture(stream, &graph);
        if (cudaGraphInstantiate(&replayed, graph, 0)) return 8;
        for (int i = 0; i < 3; i++) cudaGraphLaunch(replayed, stream);
        return cudaDeviceSynchronize() ? 9 : 0;
    }
    work<<<2, 64>>>(out, 10);
    if (cudaDeviceSynchronize()) return 8;
    getchar();
    for (int i = 1; i < 600; i++) work<<<2, 64>>>(out, 10);
    return cudaDeviceSynchronize() ? 9 : 0;
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("budget") / "app"))


def command(tool: str, *arguments: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / f"tools/{tool}.py"), *arguments]


def run(tool: str, app: str, out: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """Run the program on the virtual clock, where hooks take no time. Return the records, and what the tool said."""
    own = ["--device", "sim", "--json", "-o", str(out), *options]
    with subprocess.Popen(
        ["timeout", "100", "env", "CUDASIM_CLOCK=virtual", *command(tool, *own, "--", app)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if "budget of" in line:
                process.stdin.write("\n")
                process.stdin.flush()
        assert process.wait() == 0, said
    return [json.loads(line) for line in out.read_text().splitlines()], said


def chosen(n: int) -> Iterator[int]:
    """Yield the launches, from 0, that are measured when one in `n` is."""
    yield 0
    for window in range(2 if n > 1 else 0, -(-LAUNCHES // n)):
        number = (window ^ window >> 16) * 0x7FEB352D % 2**32
        number = (number ^ number >> 15) * 0x846CA68B % 2**32
        place = window * n + (number ^ number >> 16) % n
        if 0 < place < LAUNCHES:
            yield place


def test_the_rate_follows_from_what_a_launch_costs(app: str, tmp_path: Path) -> None:
    percent = 5
    records, said = run("threadhist", app, tmp_path / "out", "--budget", str(percent), "--work", "stores")
    (kernel,) = (record for record in records if record["type"] == "kernel")
    (budget,) = records[-1]["budget"]["kernels"]
    cost = budget["launch_percent"]
    n = one_in(cost, percent)
    measured = len(list(chosen(n)))
    assert 1 < n < 100 and measured < LAUNCHES
    assert f"budget of {percent} %: measuring one launch in {n} of work" in said
    assert (budget["one_in"], budget["launches"], budget["measured"]) == (n, LAUNCHES, measured)
    assert budget["overhead_percent"] == pytest.approx(cost * measured / LAUNCHES, abs=0.01)
    assert budget["overhead_percent"] <= percent and budget["held"] and budget["host_percent"] is None
    assert records[-1]["not_instrumented"] == {"sampled out": LAUNCHES - measured}
    assert kernel["launches"] == measured and kernel["work"] == measured * THREADS * STORES


def test_the_launches_are_at_random_places(app: str, tmp_path: Path) -> None:
    records, _ = run("kernelretsnoop", app, tmp_path / "out", "--budget", "20", "-e")
    (budget,) = records[-1]["budget"]["kernels"]
    launches = sorted({r["launch"] % OTHER_OPERATION for r in records if r["type"] == "exit"})
    expected = list(chosen(budget["one_in"]))
    assert [number - launches[0] for number in launches] == expected and len(expected) > 10
    assert len({place % budget["one_in"] for place in expected}) > 5


def test_sampled_blocks_cost_less_so_more_launches_are_measured(app: str, tmp_path: Path) -> None:
    """All blocks do the same, so the estimate for the measured launches has no error."""
    options = ["--budget", "20", "--sample-blocks", "1/16", "--work", "stores"]
    records, _ = run("threadhist", app, tmp_path / "out", *options)
    (budget,) = records[-1]["budget"]["kernels"]
    (kernel,) = (record for record in records if record["type"] == "kernel")
    assert budget["held"] and budget["measured"] == len(list(chosen(budget["one_in"])))
    assert kernel["launches"] == budget["measured"] and kernel["sampled"]["of"] == 2 * budget["measured"]
    assert 0 < kernel["sampled"]["chosen"] < budget["measured"]
    assert kernel["work"] == budget["measured"] * THREADS * STORES and kernel["standard_error"]["work"] == 0


def test_memtrace_holds_its_budget(app: str, tmp_path: Path) -> None:
    records, _ = run("memtrace", app, tmp_path / "out", "--budget", "30")
    (budget,) = records[-1]["budget"]["kernels"]
    (site,) = (record for record in records if record["type"] == "site")
    assert budget["held"] and budget["measured"] == len(list(chosen(budget["one_in"]))) > 10
    assert site["accesses"] == budget["measured"] * THREADS * STORES
    assert not [record for record in records if record["type"] == "allocation"]


@pytest.mark.long
def test_gpucount_holds_its_budget(app: str, tmp_path: Path) -> None:
    records, _ = run("gpucount", app, tmp_path / "out", "--budget", "20", "exit:work", "store:work:global")
    (budget,) = records[-1]["budget"]["kernels"]
    counts = {record["spec"]: record["threads"] for record in records if record["type"] == "count"}
    measured = budget["measured"] * THREADS
    assert budget["held"] and budget["measured"] == len(list(chosen(budget["one_in"]))) > 10
    assert counts == {"exit:work": measured, "store:work:global": measured * STORES}


def test_too_few_launches_are_reported(app: str, tmp_path: Path) -> None:
    options = ["--device", "sim", "--launch", "1:1", "--budget", "5"]
    done = subprocess.run(
        ["env", "CUDASIM_CLOCK=virtual", *command("threadhist", *options, "--", app)],
        input="\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "budget of 5 %: not held for 1 kernel" in text
    assert "measured 1 of 1 launch (" in text and "launches would hold the budget" in text


def test_kernels_in_graphs_are_not_measured(app: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--device", "sim", "--json", "-o", str(out), "--budget", "5"]
    done = subprocess.run(
        command("threadhist", *options, "--", app, "graph"), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(out.read_text().splitlines()[-1])
    assert summary["not_instrumented"] == {"capture": 3} and summary["budget"] == {
        "percent": 5.0,
        "kernels": [],
    }


@pytest.mark.parametrize(
    ("tool", "options", "why"),
    [
        ("threadhist", ["--budget", "0"], "a percentage above 0"),
        ("threadhist", ["--budget", "101%"], "a percentage above 0"),
        ("threadhist", ["--budget", "nan"], "a percentage above 0"),
        ("threadhist", ["--budget", "5", "--sample", "2"], "--budget and --sample exclude"),
        ("memtrace", ["--budget", "5", "--footprint"], "--footprint cannot be combined with --budget"),
    ],
)
def test_refusals(tool: str, options: list[str], why: str) -> None:
    done = subprocess.run(command(tool, *options, "--", "true"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and why in done.stderr and done.stderr.count("\n") == 1
