"""--sample-blocks and --sample-warps, from the command line to the estimates, on a program of which every block is known."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

import gpubpf_cuda
from gpubpf.ebpf.sampling import Sampling, hashes

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ("threadhist", "memtrace", "kernelretsnoop")
GRID, THREADS, WARPS, LAUNCHES = (4, 5, 3), 80, 3, 3
BLOCKS = 4 * 5 * 3

pytestmark = gpubpf_cuda.needs_cuda

# Each thread of block b stores 1 + b % 7 times, in a function of its own. Lane 31 leaves later. With an argument: as a graph.
PROGRAM = r"""
#include <cstdio>
__device__ __noinline__ void put(volatile int *out, int what) { *out = what; }
__global__ void stores(volatile int *out) {
    int block = blockIdx.x + 4 * (blockIdx.y + 5 * blockIdx.z);
    int thread = threadIdx.x + 8 * (threadIdx.y + 5 * threadIdx.z);
#pragma unroll 1
    for (int i = 0; i < 1 + block % 7; i++) put(out + thread, i);
    if (thread % 32 == 31) __nanosleep(1000 * (block % 3));
}
int main(int argc, char **argv) {
    int *out, first;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replayed;
    cudaMalloc(&out, 4 * 80);
    if (argc > 1) {
        cudaStreamCreate(&stream);
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
        stores<<<dim3(4, 5, 3), dim3(8, 5, 2), 0, stream>>>(out);
        cudaStreamEndCapture(stream, &graph);
        if (cudaGraphInstantiate(&replayed, graph, 0)) return 8;
        for (int i = 0; i < 3; i++) cudaGraphLaunch(replayed, stream);
    }
    for (int i = 0; argc < 2 && i < 3; i++) stores<<<dim3(4, 5, 3), dim3(8, 5, 2)>>>(out);
    if (cudaDeviceSynchronize() || cudaMemcpy(&first, out, 4, cudaMemcpyDeviceToHost)) return 9;
    printf("done %d\n", first >= 0);
    return 5;
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return str(gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("sampling") / "app"))


def run(tool, *arguments):
    command = [sys.executable, str(REPOSITORY / f"tools/{tool}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def records(tool, app, out, *options):
    """The records of a run, by type. The program's own output and exit status are its own."""
    done = run(tool, "--device", "sim", "--json", "-o", out, *options, "--", app)
    assert (done.returncode, done.stdout) == (5, "done 1\n"), done.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    return {kind: [r for r in found if r["type"] == kind] for kind in {r["type"] for r in found}}


def chosen(unit, one_in, seed):
    """Whether each launch (row) chooses each block or warp."""
    units = np.arange(BLOCKS * (WARPS if unit == "warp" else 1))
    limit = Sampling(unit, one_in, seed).limit
    return np.array([hashes(units, launch, seed) <= limit for launch in range(1, LAUNCHES + 1)])


def block_of(record):
    x, y, z = record["block"]
    return x + 4 * (y + 5 * z)


def thread_of(record):
    x, y, z = record["thread"]
    return x + 8 * (y + 5 * z)


STORES = 1 + np.arange(BLOCKS) % 7  # of each thread, by block
SIZE = {"block": np.full(BLOCKS, THREADS), "warp": np.tile([32, 32, 16], BLOCKS)}  # threads of a unit
BY_UNIT = {"block": STORES * THREADS, "warp": np.repeat(STORES, WARPS) * SIZE["warp"]}


@pytest.mark.every(2)
@pytest.mark.parametrize("unit", ["block", "warp"])
def test_threadhist_estimates_from_exactly_the_chosen(app, tmp_path, unit):
    found = records(
        "threadhist", app, tmp_path / "out", "--work", "stores", f"--sample-{unit}s", "1/4", "--seed", "7"
    )
    there = chosen(unit, 4, 7)
    (kernel,) = found["kernel"]
    assert kernel["sampled"] == {
        "unit": unit, "one_in": 4, "seed": 7, "chosen": int(there.sum()), "of": there.size,
    }  # fmt: skip
    measured = int((there * BY_UNIT[unit]).sum())
    assert kernel["work"] == round(measured * there.size / there.sum())
    assert (kernel["launches"], kernel["runs"]) == (LAUNCHES, LAUNCHES * BLOCKS * THREADS)  # exact
    truth = LAUNCHES * int(BY_UNIT[unit].sum())
    assert 0 < kernel["standard_error"]["work"] < 0.5 * truth
    assert abs(kernel["work"] - truth) < 3 * kernel["standard_error"]["work"]
    # Rows: the threads of which a run was measured, scaled to all runs.
    rows = Counter()
    for record in found["thread"]:
        assert (record["runs"], record["work"]) == (LAUNCHES, LAUNCHES * STORES[block_of(record)])
        rows[
            block_of(record) * (1 if unit == "block" else WARPS)
            + (thread_of(record) // 32 if unit == "warp" else 0)
        ] += 1
    assert rows == {n: SIZE[unit][n] for n in np.flatnonzero(there.any(axis=0)).tolist()}


@pytest.mark.every(2)
@pytest.mark.parametrize("unit", ["block", "warp"])
def test_memtrace_estimates_from_exactly_the_chosen(app, tmp_path, unit):
    found = records("memtrace", app, tmp_path / "out", f"--sample-{unit}s", "1/4", "--seed", "7")
    there = chosen(unit, 4, 7)
    requests = np.repeat(STORES, WARPS) if unit == "warp" else STORES * WARPS
    (kernel,) = found["kernel"]
    (site,) = [record for record in found["site"] if record["op"] == "store"]
    assert kernel["sampled"]["chosen"] == there.sum() and kernel["sampled"]["of"] == there.size
    assert site["requests"] == round(int((there * requests).sum()) * there.size / there.sum())
    assert site["accesses"] == round(int((there * BY_UNIT[unit]).sum()) * there.size / there.sum())
    assert abs(site["requests"] - LAUNCHES * requests.sum()) < 3 * site["standard_error"]["requests"]
    assert site["ratio"] == 1 and site["standard_error"]["ratio"] == pytest.approx(0, abs=1e-9)
    assert "allocation" not in found


@pytest.mark.every(2)
@pytest.mark.parametrize("unit", ["block", "warp"])
def test_kernelretsnoop_records_exactly_the_chosen(app, tmp_path, unit):
    found = records("kernelretsnoop", app, tmp_path / "out", "-e", f"--sample-{unit}s", "1/4", "--seed", "7")
    seen = Counter()
    for record in found["exit"]:
        own = thread_of(record) // 32
        number = block_of(record) * WARPS + own if unit == "warp" else block_of(record)
        seen[(record["launch"] & ((1 << 40) - 1)) - 1, number] += 1
    there = zip(*np.nonzero(chosen(unit, 4, 7)), strict=True)
    assert seen == {(int(launch), int(n)): SIZE[unit][n] for launch, n in there}


def test_each_replay_of_a_graph_chooses_anew(app, tmp_path):
    out = tmp_path / "out"
    options = ("--device", "sim", "-e", "--json", "--sample-blocks", "1/4", "--seed", "7", "-o", out)
    done = run("kernelretsnoop", *options, "--", app, "graph")
    assert done.returncode == 5, done.stderr
    seen = defaultdict(set)
    for record in map(json.loads, out.read_text().splitlines()):
        if record["type"] == "exit":
            seen[record["launch"]].add(block_of(record))
    assert len(seen) == LAUNCHES and len({frozenset(blocks) for blocks in seen.values()}) == LAUNCHES
    for launch, blocks in seen.items():
        assert blocks == set(np.flatnonzero(hashes(np.arange(BLOCKS), launch, 7) < 1 << 30).tolist())


@pytest.mark.parametrize("clock", ["virtual", "real"])
def test_kernelretsnoop_estimates_the_mean_lateness(app, tmp_path, clock):
    found = records(
        "kernelretsnoop", app, tmp_path / "out", "--clock", clock, "--sample-blocks", "1/4", "--seed", "7"
    )
    there = chosen("block", 4, 7)
    (kernel,) = found["kernel"]
    lanes = {record["lane"]: record for record in found["lane"]}
    assert (kernel["exits"], kernel["launches"]) == (LAUNCHES * BLOCKS * THREADS, LAUNCHES)  # exact
    assert (lanes[0]["exits"], lanes[31]["exits"]) == (LAUNCHES * BLOCKS * 3, LAUNCHES * BLOCKS * 2)
    assert kernel["grid_spread_ns"] is None and kernel["tail_ns"] is None
    if clock == "virtual":
        late = 1000 * (np.arange(BLOCKS) % 3) + 7  # the instructions that go with the sleep
        assert abs(lanes[31]["late_ns"]["mean"] - (there * late).sum() / there.sum()) < 3
        assert abs(lanes[31]["late_ns"]["mean"] - 1000) < 3 * lanes[31]["standard_error"]["mean"] + 3


def unsampled(records):
    """A kernel's records without what differs from run to run, or is about sampling."""
    left_out = {"pid", "sampled", "standard_error", "registers", "ts_ns"}
    kinds = {"thread", "site", "lane", "kernel"} & records.keys()
    return {
        kind: [{k: v for k, v in r.items() if k not in left_out} for r in records[kind]] for kind in kinds
    }


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("tool", "option"),
    [
        ("threadhist", "--by=block"),
        ("memtrace", "--no-allocations"),
        ("kernelretsnoop", "--clock=virtual"),
    ],
)
def test_one_in_one_is_the_full_answer(app, tmp_path, tool, option):
    full = records(tool, app, tmp_path / "full", option)
    every = records(tool, app, tmp_path / "every", option, "--sample-warps", "1/1")
    assert unsampled(every) == unsampled(full)
    assert {error for r in every["kernel"] for error in r.get("standard_error", {}).values()} <= {0.0}


def test_a_run_repeats_with_its_seed(app, tmp_path):
    first = records("threadhist", app, tmp_path / "first", "--sample-blocks", "1/8")
    seed = str(first["kernel"][0]["sampled"]["seed"])
    again = records("threadhist", app, tmp_path / "again", "--sample-blocks", "1/8", "--seed", seed)
    assert unsampled(again) == unsampled(first)
    assert again["kernel"][0]["sampled"] == first["kernel"][0]["sampled"]


def test_the_text_says_how_exact_it_is(app, tmp_path):
    text = run(
        "threadhist",
        "--device",
        "sim",
        "--work",
        "stores",
        "--sample-blocks",
        "1/4",
        "--seed",
        "7",
        "--",
        app,
    ).stdout
    chosen_blocks = int(chosen("block", 4, 7).sum())
    assert f"sampled {chosen_blocks} of the 180 blocks of all launches (1 in 4, seed 7)" in text
    assert " stores +- " in text and "% (standard error)" in text
    none = run("threadhist", "--device", "sim", "--sample-blocks", "1/65536", "--seed", "1", "--", app)
    assert "sampling chose no block of this grid" in none.stdout and none.returncode == 5
    assert "sampled: 1 in 65,536 blocks; --seed 1 makes the same choice\n" in none.stdout
    options = ("--json", "-o", tmp_path / "none", "--sample-blocks", "1/65536", "--seed", "1", "--", app)
    none = run("threadhist", "--device", "sim", *options)
    assert ": sampling chose no block of this grid\n" in none.stderr
    (kernel, summary) = map(json.loads, (tmp_path / "none").read_text().splitlines()[-2:])
    assert kernel["work"] is kernel["imbalance"] is None
    assert summary["sampling"] == {"unit": "block", "one_in": 65536, "seed": 1}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    "options",
    [
        *(("--sample-blocks", v) for v in ("0", "3", "1/3", "2/4", "1/0", "1/131072", "1/" + "9" * 40, "")),
        ("--sample-warps=-1/4",),
        ("--sample-blocks", "1/2", "--sample-warps", "1/2"),
        ("--seed", "1"),
        ("--sample-blocks", "1/2", "--seed", "4294967296"),
    ],
)
def test_wrong_values_are_one_line_and_status_two(tool, options, capsys):
    from gpubpf.show import cli
    from test_contract import tool_module

    with pytest.raises(SystemExit) as left:
        cli.parse(tool_module(tool).build_parser(), [*options, "--", "true"])
    text = capsys.readouterr().err
    assert left.value.code == 2 and text.startswith(f"{tool}: ") and text.count("\n") == 1


@pytest.mark.parametrize("option", [("--sample-blocks", "1/2"), ("--budget", "5")])
def test_programs_for_amd_gpus_are_refused(option, monkeypatch, capsys):
    from gpubpf.traced import amd_device
    from test_contract import tool_module

    monkeypatch.setattr(amd_device, "is_for_hip", lambda program: True)
    with pytest.raises(SystemExit) as left:
        tool_module("threadhist").main(["--device", "sim", *option, "--", "true"])
    text = capsys.readouterr().err
    assert (
        left.value.code == 2 and text.startswith("threadhist: true is for AMD GPUs") and text.count("\n") == 1
    )


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """The program, but it waits between launches, so that intervals end between them."""
    waits = PROGRAM.replace("#include <cstdio>", "#include <cstdio>\n#include <unistd.h>")
    launch = "stores<<<dim3(4, 5, 3), dim3(8, 5, 2)>>>(out);"
    waits = waits.replace(launch, f"{{ {launch} cudaDeviceSynchronize(); usleep(700000); }}")
    return str(gpubpf_cuda.build(waits, tmp_path_factory.mktemp("intervals") / "slow"))


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("tool", "option", "field", "unit"),
    [
        ("threadhist", "--work=stores", "work", "warp"),
        ("memtrace", "--no-allocations", "requests", "block"),
        ("kernelretsnoop", "--clock=real", "exits", "block"),
    ],
)
def test_the_estimates_of_intervals_add_up(slow, tmp_path, tool, option, field, unit):
    """Wherever intervals end, the chosen units are all there, once, and stand for N."""
    sampled = (f"--sample-{unit}s", "1/4", "--seed", "7")
    for attempt in range(5):  # on a busy machine, all may be in one report
        found = records(tool, slow, tmp_path / f"out{attempt}", option, *sampled, "0.4")
        if len(found["kernel"]) > 1:
            break
    there = chosen(unit, 4, 7)
    requests = np.repeat(STORES, WARPS) if unit == "warp" else STORES * WARPS
    amount = {"work": BY_UNIT[unit], "requests": requests, "exits": SIZE[unit]}[field]
    kernels = found["kernel"]
    assert len(kernels) > 1
    assert sum(kernel["launches"] for kernel in kernels) == LAUNCHES
    assert sum(kernel["sampled"]["chosen"] for kernel in kernels) == there.sum()
    assert {kernel["sampled"]["of"] for kernel in kernels} == {None}
    assert sum(kernel[field] for kernel in kernels) == 4 * int((there * amount).sum())


def test_what_needs_every_access_is_refused():
    done = run("memtrace", "--footprint", "--sample-blocks", "1/2", "--", "true")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--footprint" in done.stderr
