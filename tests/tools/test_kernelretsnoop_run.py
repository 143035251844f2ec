"""kernelretsnoop from its command line to its exit status, on a program with known answers. They are exact on the virtual clock, and
lower bounds on the real one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(REPOSITORY / "tools/kernelretsnoop.py"), "--device", "sim"]
WAIT = 2000  # cycles

pytestmark = gpubpf_cuda.needs_cuda

# app KERNEL...: runs these kernels; some threads of each wait WAIT cycles, or a multiple.
PROGRAM = r"""
#include <cooperative_groups.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
__device__ void wait(long long n) { long long begin = clock64(); while (clock64() - begin < n) { } }
__device__ __noinline__ void leave_within(int lane, long long n, int *out) {
    if (lane == 9) {
        wait(n);
        asm volatile("exit;");  // LEFT IN A FUNCTION
    }
    *out = lane;
}
namespace ways {
__global__ void out(int *out, long long n) {
    int lane = threadIdx.x % 32;
    if (lane < 4) return;
    leave_within(lane, 3 * n, out);
    for (int i = 0; i < 40; i++)
        if (i == lane - 20) { wait(2 * n); return; }
}
template <typename T> __global__ void cube(T *out, long long n) {
    if (threadIdx.x != 1 || threadIdx.y != 2 || threadIdx.z != 1) return;
    wait(n);
}
__global__ void single(int *out, long long n) { wait(n); }
__global__ void even(int *out, long long n) { *out = 1; }
__global__ void cooperative(int *out, long long n) {
    cooperative_groups::this_grid().sync();
    if (blockIdx.x == 2) wait(n);
}
__global__ void streams(int *out, long long n) { if (threadIdx.x % 32 != 31) return; wait(n); }
__global__ void after(volatile int *gone, long long n) {  // lane 31 waits from when the others leave
    int lane = threadIdx.x % 32, warp = blockIdx.x * blockDim.x / 32 + threadIdx.x / 32;
    if (lane != 31) { gone[warp] = 1; return; }
    while (!gone[warp]) { }
    wait(100 * n);
}
__global__ void node(int *out, long long n) { if (threadIdx.x % 32 != 7) return; wait(n); }
__global__ void dies(int *out, long long n) { if (blockIdx.x == 1 && threadIdx.x == 40) asm volatile("trap;"); }
}
int main(int argc, char **argv) {
    int *out;
    long long n = 2000;
    if (cudaMalloc(&out, 64) || cudaMemset(out, 0, 64)) return 99;
    for (int i = 1; i < argc; i++) {
        const char *what = argv[i];
        if (!strcmp(what, "out")) ways::out<<<2, 100>>>(out, n);
        if (!strcmp(what, "cube")) ways::cube<int><<<dim3(2, 3, 2), dim3(4, 3, 2)>>>(out, n);
        if (!strcmp(what, "single")) ways::single<<<5, 1>>>(out, n);
        if (!strcmp(what, "even")) ways::even<<<4, 64>>>(out, n);
        if (!strcmp(what, "after")) ways::after<<<4, 96>>>(out + 1, n);
        if (!strcmp(what, "cooperative")) {
            void *arguments[] = {&out, &n};
            if (cudaLaunchCooperativeKernel((void *)ways::cooperative, 4, 64, arguments)) return 98;
        }
        if (!strcmp(what, "streams")) {
            cudaStream_t streams[8];
            for (auto &s : streams) cudaStreamCreate(&s);
            for (int k = 0; k < 80; k++) ways::streams<<<4, 64, 0, streams[k % 8]>>>(out, n);
        }
        if (!strcmp(what, "graph")) {
            cudaStream_t s;
            cudaGraph_t graph;
            cudaGraphExec_t exec;
            cudaStreamCreate(&s);
            cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
            ways::node<<<2, 32, 0, s>>>(out, n);
            cudaStreamEndCapture(s, &graph);
            cudaGraphInstantiate(&exec, graph, 0);
            for (int k = 0; k < 5; k++) cudaGraphLaunch(exec, s);
        }
        if (!strcmp(what, "trap")) ways::dies<<<2, 64>>>(out, n);
        int error = cudaDeviceSynchronize();
        printf("%s %d\n", what, error);
        fflush(stdout);
        if (!strcmp(what, "pause")) usleep(300000);
        if (!strcmp(what, "hang")) sleep(60);
    }
    return 7;
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    flags = ("-O2", "-lineinfo")
    return str(gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("app") / "app", *flags))


def environment(virtual):
    return os.environ | {"CUDASIM_CLOCK": "virtual" if virtual else "real", "CUDASIM_HOSTILE": "1"}


def run(*arguments, virtual=True):
    return subprocess.run(
        [*TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=100, env=environment(virtual)
    )


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def lanes(found):
    """Return the lane records by kernel and lane."""
    result = defaultdict(dict)
    for record in found:
        if record["type"] == "lane":
            result[record["kernel"]][record["lane"]] = record
    return result


def kernels(found):
    return {record["kernel"]: record for record in found if record["type"] == "kernel"}


def near(turns):
    """Return `turns` times WAIT, with up to 2 % more."""
    return pytest.approx(1.01 * turns * WAIT, rel=0.01)


@pytest.mark.every(2)
def test_a_choice_of_no_thread_is_said(app):
    done = run("--block", 9999, "--", app, "even")
    assert "note: no thread that left a kernel matches --block and --thread\n" in done.stderr


@pytest.mark.every(2)
def test_every_way_out_of_every_shape(app, tmp_path):
    out = tmp_path / "out"
    whats = ("out", "cube", "single", "even", "cooperative", "graph")
    done = run("--json", "-o", out, "--", app, *whats)
    assert (done.returncode, done.stdout.split()) == (7, [word for what in whats for word in (what, "0")])
    found = records(out)
    by_lane, by_kernel = lanes(found), kernels(found)

    def late(kernel):
        return {n: r["late_ns"]["p50"] for n, r in by_lane[kernel].items()}

    # 100 threads: three warps, and four more lanes, which all exit first.
    ways = by_lane["ways::out"]
    assert [ways[n]["exits"] for n in (0, 3, 4, 31)] == [8, 8, 6, 6]
    assert late("ways::out")[0] == 0 and late("ways::out")[9] == near(3)
    for lane in range(20, 32):
        assert late("ways::out")[lane] == near(2)
    for lane in (*range(4, 9), *range(10, 20)):
        assert late("ways::out")[lane] < 0.1 * WAIT
    lines = PROGRAM.split("\n")
    inside = {1 + n for n, line in enumerate(lines) if "LEFT IN A FUNCTION" in line or "void wait" in line}
    assert ways[9]["source"] in {f"app.cu:{n}" for n in inside}
    assert len({ways[n]["site"] for n in (4, 9, 20)}) == 3
    # 24 threads in three dimensions: thread (1, 2, 1) is lane 1 + 2 * 4 + 12
    assert {n: v > 0 for n, v in late("ways::cube").items()} == {n: n == 21 for n in range(24)}
    assert late("ways::cube")[21] == near(1)
    assert late("ways::single") == {0: 0} and set(late("ways::even").values()) == {0}
    assert by_kernel["ways::single"]["threads"] == 5
    for name in ("warp", "block", "grid"):
        assert by_kernel["ways::even"][f"{name}_spread_ns"]["max"] == 0
    assert by_kernel["ways::cooperative"]["grid_spread_ns"]["max"] == near(1)
    assert by_kernel["ways::cooperative"]["tail_ns"]["max"] == near(1)
    idle = by_kernel["ways::cooperative"]["sm_idle_ns"]
    assert sorted(value > 0 for value in idle.values()) == [False, *[True] * (len(idle) - 1)]
    assert by_kernel["ways::node"]["launches"] == 5 and late("ways::node")[7] == near(1)
    assert all(r["launches"] == r["launches_whole"] and r["clock_error_ns"] == 0 for r in by_kernel.values())


def test_records_are_exact_and_say_the_same(app, tmp_path):
    out = tmp_path / "out"
    done = run(
        "-e", "--json", "--launch", "2:", "--block", "*,1", "-o", out, "--", app, "cube", "cube", "streams"
    )
    assert done.returncode == 7
    exits = [r for r in records(out) if r["type"] == "exit"]
    cube = [r for r in exits if r["kernel"] == "ways::cube"]
    assert len({(*r["block"], *r["thread"]) for r in cube}) == len(cube) == 2 * 2 * 24
    assert {r["block"][1] for r in cube} == {1}
    for r in cube:
        x, y, z = r["thread"]
        assert r["lane"] == x + 4 * y + 12 * z and r["warp"] == 0
    at = {r["lane"]: r["ts_ns"] for r in cube if r["block"] == [0, 1, 0]}
    assert at[21] - at[0] == near(1) and len({at[n] for n in range(20)}) == 1
    streams = [r for r in exits if r["kernel"] == "ways::streams"]
    assert not streams  # a grid of one dimension has no block (x, 1)
    summary = records(out)[-1]
    assert summary["records"] == len(exits) and summary["lost"] == summary["records_unknown"] == 0


def test_added_up_on_the_gpu(app, tmp_path):
    """On the real clock all exits are counted, also in eight streams and in graphs, and no lane is late by less than it waits."""
    out = tmp_path / "out"
    done = run("--json", "-o", out, "--", app, "even", "streams", "graph", "after", virtual=False)
    assert done.returncode == 7
    found = records(out)
    by_lane, by_kernel = lanes(found), kernels(found)
    assert {r["exits"] for r in by_lane["ways::even"].values()} == {8}
    assert {r["late_ns"]["max"] for r in by_lane["ways::even"].values()} == {0}
    assert {r["exits"] for r in by_lane["ways::streams"].values()} == {640}
    assert {r["exits"] for r in by_lane["ways::node"].values()} == {10}
    after = {n: r["late_ns"]["p50"] for n, r in by_lane["ways::after"].items()}
    assert after[31] >= 0.95 * 100 * WAIT > 2 * max(after[n] for n in range(31))
    assert by_kernel["ways::after"]["warp_spread_ns"]["p50"] >= after[31]
    assert by_kernel["ways::after"]["launches_whole"] == 1
    streams = by_kernel["ways::streams"]
    assert streams["launches"] == 80 and streams["threads"] == 256 and streams["exits"] == 80 * 256
    assert 0 < streams["launches_whole"] <= 80
    assert {record["launches_instrumented"] for record in found if record["type"] == "summary"} == {87}


@pytest.mark.parametrize("form", ["text", "csv"])
def test_chosen_threads(app, tmp_path, form):
    """Threads 30 to 31 of block 1, added up on the GPU."""
    out = tmp_path / "out"
    options = ["--csv"] if form == "csv" else []
    done = run(*options, "--block", 1, "--thread", "30:31", "-o", out, "--", app, "even", virtual=False)
    assert done.returncode == 7
    text = out.read_text()
    if form == "text":
        assert "1 launch, 2 exits of selected threads\n  the selected lanes of a warp exit together\n" in text
        assert "30-31      1        0.0    0    0    0" in text
        assert max(map(len, text.splitlines())) <= 80
    else:
        header, *rows = [line.split(",") for line in text.splitlines()]
        assert [dict(zip(header, row, strict=True))["lane"] for row in rows] == ["30", "31"]


def test_a_trap_ends_the_count_but_not_the_report(app, tmp_path):
    """Exits before the failure are counted; the summary marks the process as failed."""
    out = tmp_path / "out"
    done = run("--json", "-o", out, "--", app, "single", "trap", "single", "single")
    assert "trap 719" in done.stdout and done.returncode == 7
    found = records(out)
    single, summary = kernels(found)["ways::single"], found[-1]
    assert (single["threads"], single["launches"], single["launches_whole"]) == (5, 1, 1)
    assert summary["not_instrumented"] == {"launch failed": 2}
    assert summary["faults"] == [found[0]["pid"]] and summary["records_unknown"] == 0
    assert 5 <= summary["records"] <= 5 + 128 - 1  # the others of the warp may exit before its lane traps
    done = run("-o", out, "--", app, "trap", virtual=False)
    notice = "embedded device, real clock: times mean nothing\n"
    assert out.read_text().startswith(notice) and not run("--", app, "even").stdout.startswith(notice)
    assert (
        done.returncode == 7 and "a kernel failed; counts that had not been read are lost" in out.read_text()
    )


def test_a_killed_program_loses_nothing_that_was_written(app, tmp_path):
    out = tmp_path / "out"
    tool = subprocess.Popen(
        [*TOOL, "-e", "--json", "-o", out, "--", app, "streams", "hang"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(True),
    )
    while "hang" not in tool.stdout.readline():
        pass
    until = time.monotonic() + 60
    while not out.read_text().endswith("\n") and time.monotonic() < until:  # the record of the attach
        time.sleep(0.05)
    pid = json.loads(out.read_text().splitlines()[0])["pid"]
    os.kill(pid, signal.SIGKILL)
    assert tool.wait(30) == 137
    found = records(out)
    assert sum(r["type"] == "exit" for r in found) == 80 * 256 == found[-1]["records"]


def test_intervals_are_of_their_own_time(app, tmp_path):
    out = tmp_path / "out"
    done = run(
        "--json", "-o", out, "0.2", "--", app, "even", "pause", "pause", "pause", "even", virtual=False
    )
    assert done.returncode == 7
    reports = [r for r in records(out) if r["type"] == "kernel"]
    # An interval may end while a kernel runs: the next one has the rest of its exits, and no launch.
    assert (sum(r["launches"] for r in reports), sum(r["exits"] for r in reports)) == (2, 2 * 256)
    assert all(r["threads"] == 256 and 0 < r["exits"] <= 256 for r in reports)


def test_a_picture(app, tmp_path):
    done = run("--heatmap", tmp_path / "a.svg", "-o", tmp_path / "out", "--", app, "cooperative", "cube")
    assert done.returncode == 7
    picture = (tmp_path / "a.svg").read_text()
    assert "<svg" in picture and "ways::cube&lt;int&gt;(int*, long long): grid 2 x 3 x 2" in picture
    done = run("--heatmap", tmp_path / "no/a.svg", "--", app, "even")
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.count("\n") == 1


def test_sigterm_prints_and_leaves(app, tmp_path):
    out = tmp_path / "out"
    tool = subprocess.Popen(
        [*TOOL, "-o", out, "--", app, "even", *["pause"] * 20],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(False),
    )
    while "pause" not in tool.stdout.readline():
        pass
    tool.terminate()
    assert tool.wait(60) == 0
    assert "1 launch, 256 exits" in out.read_text()
