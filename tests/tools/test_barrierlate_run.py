"""barrierlate from its command line to its exit status, on programs whose answers are known beforehand or that measure themselves."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
import gpubpf_examples
import hipsim_device

pytestmark = gpubpf_cuda.needs_cuda
TOOL = Path(__file__).resolve().parents[2] / "tools/barrierlate.py"


def run(*arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOL, "--device", "sim", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    return done


def records(place: Path, *arguments: str | Path) -> list[dict[str, Any]]:
    run("--json", "-o", place / "out", *arguments)
    return [json.loads(line) for line in (place / "out").read_text().splitlines()]


def barriers_in(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in found if r["type"] == "barrier"]


@pytest.fixture(scope="module")
def example() -> Path:
    return gpubpf_examples.build("barriers") / "barriers"


def test_the_guilty_warp_is_found_and_nothing_else(example: Path, tmp_path: Path) -> None:
    found = records(tmp_path, "--", example, "3", "5")
    rows = barriers_in(found)
    assert [r["kernel"] for r in rows].count("uneven") == len(rows) / 2 == 2
    assert {(r["waits"], r["rounds"], r["barrier"], r["unknown"]) for r in rows} == {(60, 15, 0, 0)}
    worst, *others = rows
    assert worst["kernel"] == "uneven" and worst["last"] == [{"warp": 0, "count": 15}]
    # Three of four warps wait as long as warp 0 is late.
    assert worst["wait_ns"]["max"] == worst["skew_ns"]["max"] == worst["skew_ns"]["mean"] > 1000
    assert worst["wait_ns"]["mean"] == 0.75 * worst["skew_ns"]["mean"]
    assert all(r["wait_ns"]["max"] == r["skew_ns"]["max"] == 0 and r["last"] == [] for r in others)
    assert found[-1]["waits_unknown"] == 0 and "not_measured" not in found[-1]


def test_the_report_names_it(example: Path) -> None:
    text = run("--", example).stdout
    assert re.search(r"^barriers\.cu:28: warp 0 arrives last 16 of 16 times; ", text, re.M)
    assert max(map(len, text.splitlines())) <= 80
    assert "arrives last" not in run("--kernel", "shared", "--", example).stdout
    assert "no warp waited" in run("--kernel", "absent", "--", example, status=1).stdout
    rows = list(csv.DictReader(run("--csv", "--top", "1", "--", example).stdout.splitlines()[1:]))
    assert [row["kernel"] for row in rows] == ["uneven"] and rows[0]["waits"] == "64"
    assert (rows[0]["last_warp"], rows[0]["last_count"]) == ("0", "16")


def test_every_interval_has_its_own_numbers(example: Path, tmp_path: Path) -> None:
    rows = barriers_in(records(tmp_path, "--kernel", "uneven", "0.2", "--", example))
    assert sum(r["waits"] for r in rows) == 2 * 64 and sum(r["rounds"] for r in rows) == 2 * 16
    assert os.access(TOOL, os.X_OK)


def test_a_tool_that_ends_early_leaves_the_results_as_they_are(example: Path) -> None:
    done = run("-d", "0.2", "--", example, "2", "20000")
    assert "barriers: PASSED" in done.stdout


# A kernel that notes its own times: `log` has the clock of each thread right before each barrier. Lanes come at times of their own, on
# two ways, and warps in several groups at named barriers; warp 3 has 24 threads and leaves early.
NUMBERS = (0, 5, 1, 1, 2, 3, 4)  # of the barrier, by event
PRODUCED = 4  # the event at which warp 0 arrives, and does not wait
SOURCE = r"""
#include <cstdio>
#define EVENTS 28
#define AT(event, text) do { unsigned long long t; \
    asm volatile("mov.u64 %0, %%clock64;\n\t" text : "=l"(t) :: "memory"); \
    log[(blockIdx.x * EVENTS + (event) * 4 + round) * blockDim.x + threadIdx.x] = t; } while (0)

__device__ void work(unsigned seed, int *out) {
    unsigned turns = (seed * 2654435761u + blockIdx.x * 40503u) >> 24, value = seed;
#pragma unroll 1
    for (unsigned i = 0; i < turns; i++) value = value * 5 + (value >> 3);
    if (value == 12345) *out = 1;
}

__global__ void meet(unsigned long long *log, int *out) {
    unsigned warp = threadIdx.x / 32, me = threadIdx.x;
#pragma unroll 1
    for (int round = 0; round < 4; round++) {
        work(me * 7 + round, out);
        AT(0, "barrier.sync 0;");
        work(me * 13 + round, out);
        if (me & 1) { work(me, out); AT(1, "barrier.sync 5;"); }
        else AT(1, "barrier.sync 5;");
        if (round == 3) break;
        work(warp * 31 + round, out);
        if (warp < 2) AT(2, "bar.sync 1, 64;");
        __syncthreads();
        work(warp * 57 + round, out);
        if (warp == 1 || warp == 2) AT(3, "bar.sync 1, 64;");
        work(warp * 91 + round, out);
        if (warp == 0) AT(4, "bar.arrive 2, 64;");
        if (warp == 1) AT(4, "bar.sync 2, 64;");
        if (round == 2) break;
        work(warp * 11 + round, out);
        AT(5, "{ .reg .pred p; .reg .b32 r; setp.ne.u32 p, 1, 0; bar.red.popc.u32 r, 3, p; }");
    }
    if (warp == 3) return;
#pragma unroll 1
    for (int round = 0; round < 3; round++) {
        work(warp * 17 + round, out);
        AT(6, "bar.sync 4, 96;");
    }
}

int main() {
    const int blocks = 3, threads = 120, count = blocks * EVENTS * threads;
    unsigned long long *log, *read = new unsigned long long[count];
    int *out;
    if (cudaMalloc(&log, count * 8) || cudaMalloc(&out, 4) || cudaMemset(log, 0, count * 8)) return 1;
    for (int launch = 0; launch < 2; launch++) {
        meet<<<blocks, threads>>>(log, out);
        if (cudaMemcpy(read, log, count * 8, cudaMemcpyDeviceToHost)) return 2;
        for (int i = 0; i < count; i++) printf("%llu\n", read[i]);
    }
}
"""


def reference(times: list[int]) -> dict[int, dict[str, Any]]:
    """Return by barrier number what the times before the barriers, [launch][block][event * 4 + round][thread], come to."""
    waits, skews, last = defaultdict(list), defaultdict(list), defaultdict(Counter)
    for start in range(0, len(times), 120):
        here = times[start : start + 120]
        event = start // 120 % 28 // 4
        number = NUMBERS[event]
        came = {w: [t for t in here[32 * w : 32 * w + 32] if t] for w in range(4)}
        came = {w: of for w, of in came.items() if of}
        if not came:
            continue
        final = max(map(max, came.values()))
        waits[number] += [final - max(of) for w, of in came.items() if event != PRODUCED or w]
        skews[number].append(final - min(map(min, came.values())))
        if skews[number][-1]:
            last[number][max(w for w, of in came.items() if max(of) == final)] += 1
    return {n: {"waits": waits[n], "skews": skews[n], "last": last[n]} for n in waits}


def test_waits_are_exact_on_the_virtual_clock(tmp_path: Path) -> None:
    program = gpubpf_cuda.build(SOURCE, tmp_path / "meet")
    done = run("--json", "-o", tmp_path / "out", "--", program)
    rows = barriers_in([json.loads(line) for line in (tmp_path / "out").read_text().splitlines()])
    expected = reference([int(line) for line in done.stdout.split()])
    assert set(expected) == set(NUMBERS)
    for number, model in expected.items():
        mine = [r for r in rows if r["barrier"] == number and r["waits"]]
        if number == 0:  # the other place is __syncthreads, where no time is noted
            mine = [min(mine, key=lambda r: r["site"])]
        counted: Counter[int] = Counter()
        for r in mine:
            counted.update({one["warp"]: one["count"] for one in r["last"]})
        assert sum(r["waits"] for r in mine) == len(model["waits"]), number
        assert sum(r["rounds"] for r in mine) == len(model["skews"]), number
        assert not any(r["unknown"] for r in mine)
        assert counted == model["last"], number
        for field, of, count in (("wait_ns", "waits", "waits"), ("skew_ns", "skews", "rounds")):
            some = [r for r in mine if r[count]]
            assert max(r[field]["max"] for r in some) == max(model[of]), (number, of)
            total = sum(r[field]["mean"] * r[count] for r in some)
            assert abs(total - sum(model[of])) <= 0.05 * len(model[of]) + 1e-6, (number, of)
            if len(some) == 1:
                for name, share in (("p50", 0.5), ("p99", 0.99)):
                    exact = sorted(model[of])[max(1, -int(-len(model[of]) * share // 1)) - 1]
                    assert abs(some[0][field][name] - exact) <= exact / 32 + 0.5, (number, of, name)
    simulated = [sys.executable, "-m", "cudasim", "--clock", "virtual", "--", program]
    alone = subprocess.run(simulated, capture_output=True, text=True, timeout=120)
    assert alone.stdout == done.stdout


# Launches of one kernel and shape in two streams, which share their state; and barriers that are not measured.
OTHERS = r"""
#include <cstdint>
__global__ void round_and_round(int *out, int turns) {
#pragma unroll 1
    for (int i = 0; i < turns; i++) {
        out[threadIdx.x] += i;
        __syncthreads();
    }
}
__global__ void elsewhere(int *out) {
    __shared__ uint64_t object;
    unsigned at = (unsigned)__cvta_generic_to_shared(&object);
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 64;" :: "r"(at) : "memory");
    __syncthreads();
    asm volatile("{ .reg .b64 s; .reg .pred p; mbarrier.arrive.shared::cta.b64 s, [%0];\n"
                 "again: mbarrier.test_wait.shared::cta.b64 p, [%0], s; @!p bra again; }" :: "r"(at) : "memory");
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
    out[threadIdx.x] = 1;
}
int main() {
    int *out[2];
    cudaStream_t streams[2];
    for (int i = 0; i < 2; i++)
        if (cudaMalloc(&out[i], 256) || cudaStreamCreate(&streams[i])) return 1;
    for (int launch = 0; launch < 10; launch++)
        for (int i = 0; i < 2; i++) round_and_round<<<4, 64, 0, streams[i]>>>(out[i], 20);
    elsewhere<<<1, 64>>>(out[0]);
    return cudaDeviceSynchronize() != cudaSuccess;
}
"""


def test_waits_that_cannot_be_measured_are_counted(tmp_path: Path) -> None:
    program = gpubpf_cuda.build(OTHERS, tmp_path / "others", "-arch=sm_90")
    found = records(tmp_path, "--clock", "real", "--", program)
    (turning,) = (r for r in barriers_in(found) if r["kernel"] == "round_and_round")
    every = 20 * 4 * 20  # launches, blocks, turns
    assert 0 < turning["waits"] <= 2 * every
    assert turning["unknown"] or (turning["waits"], turning["rounds"]) == (2 * every, every)
    assert found[-1]["waits_unknown"] == turning["unknown"]
    (once,) = (r for r in barriers_in(found) if r["kernel"] == "elsewhere")
    assert (once["waits"], once["rounds"]) == (2, 1)
    assert found[-1]["not_probed"] == {"mbarrier.test_wait": 1}
    assert found[-1]["not_measured"] == {"barrier.cluster.arrive": 1, "barrier.cluster.wait": 1}


# The launch that was called first runs last.
OUT_OF_ORDER = r"""
#include <atomic>
#include <thread>
__global__ void meet(int *out, int turns) {
#pragma unroll 1
    for (int i = 0; i < turns; i++) {
        out[threadIdx.x] += i;
        __syncthreads();
    }
}
static std::atomic<bool> begins{false};
int main() {
    int *out;
    cudaStream_t streams[2];
    if (cudaMalloc(&out, 256) || cudaStreamCreate(&streams[0]) || cudaStreamCreate(&streams[1])) return 1;
    for (int pair = 0; pair < 5; pair++) {
        begins = false;
        if (cudaLaunchHostFunc(streams[0], [](void *) { while (!begins) std::this_thread::yield(); }, nullptr)) return 1;
        meet<<<3, 64, 0, streams[0]>>>(out, 7);
        meet<<<3, 64, 0, streams[1]>>>(out, 7);
        if (cudaStreamSynchronize(streams[1])) return 1;
        begins = true;
        if (cudaDeviceSynchronize()) return 1;
    }
}
"""


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_launches_that_run_in_another_order_than_they_were_called(clock: str, tmp_path: Path) -> None:
    program = gpubpf_cuda.build(OUT_OF_ORDER, tmp_path / "order")
    (row,) = barriers_in(records(tmp_path, "--clock", clock, "--", program))
    assert (row["waits"], row["rounds"], row["unknown"]) == (10 * 3 * 7 * 2, 10 * 3 * 7, 0)


def test_waves_of_amd_gpus(tmp_path: Path) -> None:
    """Wave n of four sleeps n times before the barrier."""
    found, done = hipsim_device.measured(
        *("barrierlate", tmp_path / "out", "--kernel", "waits", "--", hipsim_device.program("points"))
    )
    assert done.returncode == 0, done.stderr
    (row,) = barriers_in(found)
    assert (row["waits"], row["rounds"], row["last"]) == (4, 1, [{"warp": 3, "count": 1}])
    assert row["wait_ns"]["max"] == row["skew_ns"]["max"] == 2 * row["wait_ns"]["mean"] > 0


def test_copies_of_a_barrier_share_a_row(tmp_path: Path) -> None:
    source = r"""
    __global__ void unrolled(int *x) {
    #pragma unroll
        for (int i = 0; i < 4; i++) {
            x[threadIdx.x] += i;
            __syncthreads();
        }
    }
    int main() {
        int *x;
        if (cudaMalloc(&x, 4096) || cudaMemset(x, 0, 4096)) return 1;
        unrolled<<<1, 64>>>(x);
        return cudaDeviceSynchronize() != cudaSuccess;
    }
    """
    program = gpubpf_cuda.build(source, tmp_path / "unrolled", "-lineinfo")
    assert [row["waits"] for row in barriers_in(records(tmp_path, "--", program))] == [2] * 4
    rows = [line.split() for line in run("--", program).stdout.splitlines() if " unrolled " in line]
    assert [row[3] for row in rows] == ["8"]
    assert sum(" unrolled" in line for line in run("-v", "--", program).stdout.splitlines()) == 4
