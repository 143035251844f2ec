"""launchlate from its command line to its results, on programs with known times; on the virtual clock exact to the nanosecond."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
import gpubpf_traces
from gpubpf_commands import quoted
from gpubpf_host import needs_open_checkout

REPOSITORY = Path(__file__).resolve().parents[2]
_numbers = itertools.count()
TOOL = [sys.executable, str(REPOSITORY / "tools/launchlate.py"), "--device", "sim"]

pytestmark = gpubpf_cuda.needs_cuda

# app MODE
PROGRAM = r"""
#include <cstdio>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <unistd.h>
#include <vector>
#include <sys/prctl.h>
#include <sys/syscall.h>
#define CHECK(call) do { if (cudaError_t e = (call)) { fprintf(stderr, "%s: %d\n", #call, e); _exit(97); } } while (0)
__global__ void nap(unsigned ns) { while (ns) { unsigned part = ns < 500000 ? ns : 500000; __nanosleep(part); ns -= part; } }
__global__ void uneven(unsigned ns) { if (threadIdx.x == 7 && blockIdx.x == 3) __nanosleep(ns); }
__global__ void late(unsigned block, unsigned ns) { if (blockIdx.x == block) __nanosleep(ns); }
__global__ void dies(int *p) { __nanosleep(1000); *p = 1; }
static void pairs() {  // 8 threads with a stream each: every launch has a length of its own, a graph's kernels too
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 8; t++)
        threads.emplace_back([t] {
            cudaStream_t stream;
            cudaGraph_t graph;
            cudaGraphExec_t exec;
            CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            for (unsigned n = 0; n < 2; n++) nap<<<1, 1, 0, stream>>>(400000 + 1000 * (10 * t + n));
            CHECK(cudaStreamEndCapture(stream, &graph));
            CHECK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
            for (unsigned i = 0; i < 6; i++) {
                nap<<<1, 1, 0, stream>>>(1000 * (10 * t + i));
                if (i % 2) CHECK(cudaGraphLaunch(exec, stream));
            }
            CHECK(cudaStreamSynchronize(stream));
            printf("%ld %u\n", syscall(SYS_gettid), t);
        });
    for (auto &thread : threads) thread.join();
}
static void random_work(unsigned seed) {  // on streams of every kind
    constexpr int kStreams = 7, kEvents = 5;
    cudaStream_t stream[kStreams] = {nullptr, cudaStreamPerThread};
    cudaEvent_t event[kEvents];
    for (int i = 2; i < kStreams; i++) CHECK(cudaStreamCreateWithFlags(&stream[i], i % 2 ? cudaStreamNonBlocking : cudaStreamDefault));
    for (auto &one : event) CHECK(cudaEventCreateWithFlags(&one, cudaEventDisableTiming));
    char *device, *host;
    CHECK(cudaMalloc(&device, 1 << 20));
    CHECK(cudaMallocHost(&host, 1 << 20));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream[3], cudaStreamCaptureModeThreadLocal));
    nap<<<1, 1, 0, stream[3]>>>(1000);
    CHECK(cudaEventRecord(event[0], stream[3]));
    CHECK(cudaStreamWaitEvent(stream[5], event[0], 0));
    nap<<<1, 2, 0, stream[3]>>>(2000);
    nap<<<1, 3, 0, stream[5]>>>(3000);
    CHECK(cudaEventRecord(event[0], stream[5]));
    CHECK(cudaStreamWaitEvent(stream[3], event[0], 0));
    nap<<<1, 4, 0, stream[3]>>>(500);
    CHECK(cudaStreamEndCapture(stream[3], &graph));
    CHECK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    for (auto &one : event) CHECK(cudaEventRecord(one, stream[2]));
    srand(seed);
    for (int i = 0; i < 250; i++) {
        cudaStream_t s = stream[rand() % kStreams];
        size_t bytes = 1 + rand() % (1 << 17);
        switch (rand() % 16) {
            default: nap<<<1, 32, 0, s>>>(rand() % 20000); break;
            case 0: CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, s)); break;
            case 1: CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, s)); break;
            case 2: CHECK(cudaMemsetAsync(device, 0, bytes, s)); break;
            case 3: case 4: CHECK(cudaEventRecord(event[rand() % kEvents], s)); break;
            case 5: case 6: CHECK(cudaStreamWaitEvent(s, event[rand() % kEvents], 0)); break;
            case 7: CHECK(cudaGraphLaunch(exec, s)); break;
            case 8: if (rand() % 4 == 0) CHECK(cudaStreamSynchronize(s)); break;
            case 9: if (rand() % 4 == 0) CHECK(cudaEventSynchronize(event[rand() % kEvents])); break;
            case 10: if (rand() % 8 == 0) CHECK(cudaDeviceSynchronize()); break;
        }
    }
}
int main(int, char **argv) {
    const char *mode = argv[1];
    if (!strcmp(mode, "pairs")) pairs();
    if (!strcmp(mode, "uneven")) uneven<<<4, 64>>>(12345);
    if (!strcmp(mode, "legacy")) {
        cudaStream_t blocking, free_;
        CHECK(cudaStreamCreate(&blocking));
        CHECK(cudaStreamCreateWithFlags(&free_, cudaStreamNonBlocking));
        nap<<<1, 1, 0, blocking>>>(50000);
        nap<<<1, 2>>>(20000);
        nap<<<1, 3, 0, free_>>>(1000);
        nap<<<1, 4, 0, blocking>>>(1000);
    }
    if (!strcmp(mode, "function")) {
        CHECK(cudaLaunchHostFunc(nullptr, [](void *) { usleep(100000); }, nullptr));
        nap<<<1, 1>>>(1000);
    }
    if (!strcmp(mode, "random")) random_work(atoi(argv[2]));
    if (!strcmp(mode, "cleared")) {  // cudaMemset does not wait for the GPU
        char *p;
        CHECK(cudaMalloc(&p, 1000000));
        CHECK(cudaMemset(p, 0, 1000000));
        nap<<<1, 1>>>(1000);
    }
    if (!strcmp(mode, "never")) {  // streams that waited for an event that was never recorded, or for a capture's
        cudaStream_t a, b;
        cudaEvent_t event;
        cudaGraph_t graph;
        CHECK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
        CHECK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
        CHECK(cudaEventCreate(&event));
        CHECK(cudaStreamWaitEvent(a, event, 0));
        nap<<<1, 1, 0, a>>>(1000);
        CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
        CHECK(cudaEventRecord(event, a));
        CHECK(cudaStreamWaitEvent(b, event, 0));
        CHECK(cudaEventRecord(event, b));
        CHECK(cudaStreamWaitEvent(a, event, 0));
        CHECK(cudaStreamEndCapture(a, &graph));
        nap<<<1, 1, 0, b>>>(1000);
    }
    if (!strcmp(mode, "off")) {  // the second kernel of three is switched off
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        cudaGraphNode_t nodes[3];
        unsigned ns = 1000;
        void *arguments[] = {&ns};
        cudaKernelNodeParams params = {};
        params.func = (void *)nap;
        params.gridDim = params.blockDim = 1;
        params.kernelParams = arguments;
        CHECK(cudaGraphCreate(&graph, 0));
        for (int i = 0; i < 3; i++) CHECK(cudaGraphAddKernelNode(&nodes[i], graph, nodes + i - 1, i > 0, &params));
        CHECK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
        CHECK(cudaGraphNodeSetEnabled(exec, nodes[1], 0));
        CHECK(cudaGraphLaunch(exec, 0));
    }
    if (!strcmp(mode, "names")) {
        std::thread([] { prctl(PR_SET_NAME, "helper"); nap<<<1, 1>>>(10); nap<<<1, 1>>>(10); CHECK(cudaDeviceSynchronize()); }).join();
        nap<<<1, 1>>>(10);
    }
    if (!strcmp(mode, "shapes")) {  // one block ends last, whichever multiprocessor it is on
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CHECK(cudaStreamCreate(&stream));
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (unsigned blocks : {1, 100, 2, 600}) late<<<blocks, 32, 0, stream>>>(blocks / 3, 10000 * blocks);
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
        for (unsigned turn = 0; turn < 40; turn++) {
            for (unsigned blocks : {1, 80}) late<<<blocks, 32, 0, stream>>>(turn * 7 % blocks, 1000 * (turn + 5));
            if (turn % 10 == 0) CHECK(cudaGraphLaunch(exec, stream));
        }
    }
    if (!strcmp(mode, "many"))  // more than the slots of launchlate's arrays
        for (int i = 0; i < 150000; i++) {
            nap<<<1, 1>>>(10);
            if (i % 1024 == 0) CHECK(cudaDeviceSynchronize());
        }
    if (!strcmp(mode, "killed")) {
        for (int i = 0; i < 5; i++) nap<<<1, 1>>>(10);
        CHECK(cudaDeviceSynchronize());
        nap<<<1, 1>>>(4000000000u);
        usleep(300000);
        raise(9);
    }
    if (!strcmp(mode, "exec")) {  // the same process id, another program
        nap<<<1, 1>>>(10);
        CHECK(cudaDeviceSynchronize());
        execl("/proc/self/exe", argv[0], "uneven", nullptr);
    }
    if (!strcmp(mode, "overlap")) {  // 1 ms of a kernel beside 2 ms of a copy
        const size_t bytes = 20000000;
        cudaStream_t one, other;
        void *from, *to;
        CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
        CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        CHECK(cudaMallocHost(&from, bytes));
        CHECK(cudaMalloc(&to, bytes));
        nap<<<1, 1, 0, one>>>(1000000);
        CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, other));
    }
    if (!strcmp(mode, "waits and faults")) {
        cudaStream_t stream;
        cudaEvent_t event;
        int *memory, value;
        CHECK(cudaMalloc(&memory, 4));
        CHECK(cudaStreamCreate(&stream));
        CHECK(cudaEventCreate(&event));
        nap<<<1, 1, 0, stream>>>(10000);
        CHECK(cudaStreamSynchronize(stream));
        nap<<<1, 1, 0, stream>>>(20000);
        CHECK(cudaEventRecord(event, stream));
        CHECK(cudaEventSynchronize(event));
        nap<<<1, 1, 0, stream>>>(30000);
        CHECK(cudaDeviceSynchronize());
        nap<<<1, 1>>>(40000);
        CHECK(cudaMemcpy(&value, memory, 4, cudaMemcpyDeviceToHost));
        uneven<<<4, 64>>>(10);
        dies<<<1, 1>>>((int *)8);
        return cudaDeviceSynchronize() != cudaSuccess ? 0 : 1;
    }
    if (!strcmp(mode, "fault")) {
        nap<<<1, 1>>>(10);
        dies<<<1, 1>>>((int *)8);
        return cudaDeviceSynchronize() != cudaSuccess ? 0 : 1;
    }
    CHECK(cudaDeviceSynchronize());
    return 0;
}
"""


@pytest.fixture(scope="module")
def app():
    # Not in pytest's directory, which another user cannot enter.
    with tempfile.TemporaryDirectory(prefix="launchlate-") as directory:
        Path(directory).chmod(0o777)
        yield str(gpubpf_cuda.build(PROGRAM, Path(directory) / "app"))


def trace(
    command: list[str], *options: str, clock: str = "virtual", tool: tuple[str, ...] = (), **environment: str
) -> tuple[subprocess.CompletedProcess, list[dict[str, Any]]]:
    """Run the tool on a command. Returns the finished process, with the output of the command, and the tool's records."""
    results = Path(command[0]).parent / f"results-{next(_numbers)}"
    more = os.environ | {"CUDASIM_CLOCK": clock, "CUDASIM_HOSTILE": "1"} | environment
    line = [*tool, *TOOL, "--json", "-o", str(results), *options, "--", *command]
    done = subprocess.run(line, capture_output=True, text=True, env=more, timeout=120)
    return done, [json.loads(text) for text in results.read_text().splitlines()]


def of(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["type"] == kind]


def test_each_launch_is_paired_with_its_own_execution(app):
    done, records = trace([app, "pairs"], "-v", "--graphs")
    assert done.returncode == 0, done.stderr
    number = {int(tid): int(t) for tid, t in (line.split() for line in done.stdout.splitlines())}
    launches = of(records, "launch")
    assert len({launch["launch"] for launch in launches}) == len(launches) == 8 * (6 + 3 * 2)
    plain, nodes = defaultdict(list), defaultdict(list)
    for launch in launches:
        (nodes if launch["graph"] else plain)[launch["tid"]].append(launch)
    spare = {plain[tid][0]["exec_ns"] - 10000 * t for tid, t in number.items() if t}
    assert len(spare) == 1 and 0 < min(spare) < 100  # instructions beside the sleep
    for tid, t in number.items():
        lengths = [
            launch["exec_ns"] // 1000 for launch in sorted(plain[tid], key=lambda launch: launch["call_ns"])
        ]
        assert lengths == [10 * t + i for i in range(6)]
        for node in range(2):
            mine = [launch for launch in nodes[tid] if launch["graph"]["node"] == node]
            assert {launch["exec_ns"] // 1000 for launch in mine} == {400 + 10 * t + node}
            assert sorted(launch["graph"]["replay"] for launch in mine) == [1, 2, 3]
    for launch in launches:
        parts = launch["api_ns"] + launch["wait_ns"] + launch["overhead_ns"]
        assert parts == launch["latency_ns"] and launch["overhead_ns"] == 0, launch
    summary = records[-1]
    assert (summary["lost"], summary["launches_untimed"], summary["launches_running"]) == (0, 0, 0)
    began = next(record["ts_ns"] for record in records if record["type"] == "attached")
    last = max(
        launch["return_ns"] for launch in launches
    )  # of threads that the main thread does not wait for on the GPU
    assert summary["duration_ns"] >= last - began


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_a_launch_waits_for_is_found(app, seed):
    """On the virtual clock a kernel starts when its call has returned and its predecessor has ended: there is no overhead."""
    _, records = trace([app, "random", str(seed)], "-v")
    launches = of(records, "launch")
    assert len(launches) > 80 and records[-1]["launches_untimed"] == 0
    for launch in launches:
        assert launch["overhead_ns"] == 0, launch
        assert (launch["waited_for"] is None) == (launch["wait_ns"] == 0)


def test_copies_beside_kernels(app):
    _, records = trace([app, "overlap"], "-v")
    (launch,), (overlap,) = of(records, "launch"), records[-1]["copy_overlap"]
    counts = {"gpu": 0, "vendor": "nvidia", "copies": 1, "copies_untimed": 0, "kernels_untimed": 0}
    assert overlap == counts | {"copy_ns": 2_000_000, "overlap_ns": launch["exec_ns"]}
    done = subprocess.run(
        [*TOOL, "--", app, "overlap"],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDASIM_CLOCK": "virtual"},
    )
    assert "\ncopies: 2.00 ms; kernels ran for 50 % of it (1.00 ms)\n" in done.stdout


@pytest.mark.every(4)
@pytest.mark.parametrize("clock", ["virtual", "real"])
def test_the_overlap_of_several_streams_is_that_of_the_timeline(clock, tmp_path):
    """4 streams with a copy each, and one more; 100 launches in each keep streams busy at the same time."""
    program = gpubpf_cuda.build(REPOSITORY / "examples/streams.cu", tmp_path / "streams")
    _, records = trace([str(program), "4", "100"], "--timeline", clock=clock)
    times = {"h2d": [], "d2h": [], "kernel": []}
    for op in of(records, "op"):
        if op["op"] in times:
            times[op["op"]].append((op["t_ns"], op["t_ns"] + op["dur_ns"]))
    (overlap,) = records[-1]["copy_overlap"]
    assert (overlap["copies"], overlap["copies_untimed"], overlap["kernels_untimed"]) == (5, 0, 0)
    copies, kernels = (
        {ns for begin, end in some for ns in range(begin, end)} for some in (times["d2h"], times["kernel"])
    )
    assert (overlap["copy_ns"], overlap["overlap_ns"]) == (len(copies), len(copies & kernels))


def test_first_thread_to_last_thread(app):
    _, records = trace([app, "uneven"], "-v")
    (launch,) = of(records, "launch")
    assert 12345 < launch["exec_ns"] < 12345 + 40  # the one lane that sleeps
    assert launch["latency_ns"] == launch["api_ns"] == 1000


def test_the_last_block_of_many_or_few_ends_a_launch(app):
    """Launches of all shapes are in one graph, and between its replays. The blocks run on all multiprocessors."""
    done, records = trace([app, "shapes"], "-v", "--graphs")
    assert done.returncode == 0, done.stderr
    launches = sorted(of(records, "launch"), key=lambda launch: launch["launch"])
    direct = [launch for launch in launches if not launch["graph"]]
    assert [launch["grid"][0] for launch in direct] == [1, 80] * 40
    slept = [1000 * (turn + 5) for turn in range(40) for _ in (1, 80)]
    assert all(0 < launch["exec_ns"] - ns < 100 for launch, ns in zip(direct, slept, strict=True))
    nodes = [launch for launch in launches if launch["graph"]]
    assert [launch["grid"][0] for launch in nodes] == [1, 100, 2, 600] * 4
    assert all(0 < launch["exec_ns"] - 10000 * launch["grid"][0] < 1000 for launch in nodes)


def test_the_legacy_stream_waits_and_is_waited_for(app):
    _, records = trace([app, "legacy"], "-v")
    one, two, three, four = sorted(of(records, "launch"), key=lambda launch: launch["block_dim"][0])
    assert one["wait_ns"] == three["wait_ns"] == 0
    assert two["start_ns"] == one["end_ns"] and two["wait_ns"] == one["end_ns"] - two["return_ns"]
    assert four["start_ns"] == two["end_ns"] and four["waited_for"] == {"kind": "kernel", "name": "nap"}


def test_a_memset_is_waited_for_that_the_host_did_not_wait_for(app):
    (launch,) = of(trace([app, "cleared"], "-v")[1], "launch")
    assert (launch["wait_ns"], launch["overhead_ns"]) == (9000, 0)
    assert launch["waited_for"] == {"kind": "memset", "name": "memset"}


def test_a_host_function_is_waited_for(app):
    """On the real clock, because host functions take no time on the virtual one."""
    (launch,) = of(trace([app, "function"], "-v", clock="real")[1], "launch")
    assert launch["waited_for"] == {"kind": "host_function", "name": "host function"}
    assert launch["wait_ns"] > 90_000_000 > launch["overhead_ns"]


def test_an_event_that_was_never_recorded_holds_nobody_up(app):
    launches = of(trace([app, "never"], "-v")[1], "launch")
    assert [launch["wait_ns"] for launch in launches] == [0, 0]


def test_behind_a_node_that_is_switched_off(app):
    first, last = of(trace([app, "off"], "-v")[1], "launch")
    assert last["start_ns"] == first["end_ns"] and last["wait_ns"] == first["exec_ns"]


def test_launches_whose_start_is_unknown_have_no_wait(app):
    """The first one waited for nothing, which is known, but says nothing about the others."""
    (kernel,) = of(trace([app, "off"], "--no-graphs")[1], "kernel")
    assert (kernel["count"], kernel["unknown"], kernel["latency_ns"], kernel["wait_ns"]) == (2, 2, None, None)
    line = [*TOOL, "--no-graphs", "--", app, "off"]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | {"CUDASIM_CLOCK": "virtual"})
    assert re.search(r"nap +2( +-){3} +\d+\.\d+( +-){3}\n", done.stdout)
    assert "times are exact" not in done.stdout and "\n\n\n" not in done.stdout


@needs_open_checkout
def test_the_same_numbers_as_root_and_without(app, tmp_path):
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to be without it as well")
    helper = ("-v", "--comm", "helper")
    _, mine = trace([app, "names"], *helper)
    drop = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    cache = Path(app).parent / "cache"
    done, theirs = trace([app, "names"], *helper, tool=drop, XDG_CACHE_HOME=str(cache), HOME=str(cache))
    assert done.returncode == 0 and "no CAP_BPF: the host program runs in the agent" in done.stderr
    same = ("kernel", "call_ns", "start_ns", "end_ns", "wait_ns")
    assert [[r[n] for n in same] for r in of(mine, "launch")] == [
        [r[n] for n in same] for r in of(theirs, "launch")
    ]


def test_filters_by_thread(app):
    assert len(of(trace([app, "names"], "-v", "--comm", "helper")[1], "launch")) == 2
    assert len(of(trace([app, "names"], "-v", "--comm", "app")[1], "launch")) == 1
    done, records = trace([app, "names"], "-v", "-t", "1")
    assert not of(records, "launch") and records[-1]["launches_by_others"] == 3
    assert "no launch matched -t 1; 3 launches by threads" in done.stderr and " of app" in done.stderr
    assert trace([app, "names"], "--comm", "helper")[1][-1]["launches_by_others"] == 1
    real = os.environ | {"CUDASIM_CLOCK": "real"}
    done = subprocess.run([*TOOL, "-t", "1", "--", app, "names"], capture_output=True, text=True, env=real)
    assert done.stdout.startswith(
        "embedded device, real clock: times mean nothing\n"
        "counted 0 of 3 matching launches (3 in total)\n  not counted: 3 (by threads"
    )
    assert len(of(trace([app, "names"], "-v", "--launch", "2:")[1], "launch")) == 2


@pytest.mark.long
def test_more_launches_than_slots(app):
    _, records = trace([app, "many"], clock="real")
    (kernel,) = of(records, "kernel")
    summary = records[-1]
    assert kernel["count"] == summary["launches_instrumented"] == 150000
    assert kernel["unknown"] <= summary["launches_lost"] == summary["lost"] < 20000
    assert kernel["latency_ns"]["p50"] > 0 and kernel["clock_error_ns"] >= 0


def test_what_was_over_before_the_end_is_known_when_the_program_is_killed(app):
    for _ in range(8):
        done, records = trace([app, "killed"], "-v", clock="real")
        assert done.returncode == 128 + signal.SIGKILL
        starts = [launch["start_ns"] for launch in of(records, "launch")]
        summary = records[-1]
        lost = (summary["lost"], summary["launches_lost"], summary["launches_running"])
        assert len(starts) == 6 and lost == (1, 1, 0)  # the end of the last
        assert summary["launches_lost_by_exit"] == 1 and summary["launches_lost_by_failure"] == 0
        assert [launch["exec_ns"] is None for launch in of(records, "launch")] == [False] * 5 + [True]
        if any(starts):
            break  # else the machine is so busy that the GPU's clock was not read before the program was killed
    assert all(starts)  # the host's memory has them


def test_a_program_that_executes_another(app):
    _, records = trace([app, "exec"], "-v")
    first, second = of(records, "launch")
    assert (first["kernel"], second["kernel"]) == ("nap", "uneven") and first["launch"] != second["launch"]
    # The program waited for the first, so the agent kept its end.
    assert first["exec_ns"] >= 10 and second["exec_ns"] > 12345
    assert records[-1]["lost"] == 0


def test_a_fault_ends_the_program_as_without_the_tool(app):
    done, records = trace([app, "fault"], "-v", clock="real")
    assert done.returncode == 0, done.stderr
    assert [launch["kernel"] for launch in of(records, "launch")] == ["nap", "dies"]
    assert of(records, "launch")[1]["end_ns"] is None


@pytest.mark.parametrize("clock", ["virtual", "real"])
def test_what_the_program_waited_for_before_a_fault_is_timed(app, clock):
    done, records = trace([app, "waits and faults"], "-v", clock=clock)
    assert done.returncode == 0 and "failed before its results could be read\n" in done.stderr, done.stderr
    launches = of(records, "launch")
    assert [launch["kernel"] for launch in launches] == ["nap"] * 4 + ["uneven", "dies"]
    # One each before a wait for a stream, an event, the context, and a copy.
    assert [launch["exec_ns"] is None for launch in launches] == [False] * 4 + [True, True]
    if clock == "virtual":
        assert [launch["exec_ns"] // 1000 for launch in launches[:4]] == [10, 20, 30, 40]
    summary = records[-1]
    assert (summary["launches_lost"], summary["launches_lost_by_failure"], summary["lost"]) == (2, 2, 2)


def test_after_ctrl_c_a_program_may_still_launch_kernels(tmp_path):
    started = tmp_path / "started"
    command = ["sh", "-c", f"trap '' INT; touch {quoted(started)}; sleep 1"]
    tool = subprocess.Popen(
        [*TOOL, "--", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not started.exists():
        time.sleep(0.01)
    os.killpg(tool.pid, signal.SIGINT)
    assert (
        tool.communicate(timeout=60)[1] == "launchlate: note: no kernel was launched before the interrupt\n"
    )


def test_intervals_show_each_launch_once(app):
    _, records = trace([app, "pairs"], "-v", "--timeline", "0.05")
    launches = [launch["launch"] for launch in of(records, "launch")]
    assert len(launches) == len(set(launches)) == 8 * 12


def test_a_trace_and_a_timeline(app, tmp_path):
    path = tmp_path / "trace.json"
    done, records = trace([app, "legacy"], "--timeline", "--trace", str(path))
    kernels = [record for record in of(records, "op") if record["op"] == "kernel"]
    assert all(kernel["dur_ns"] is not None for kernel in kernels), (done.stderr, kernels, records[-1])
    loaded = json.loads(path.read_text())
    assert list(gpubpf_traces.problems(loaded)) == []
    spans = sorted((e["ts"], e["dur"]) for e in loaded["traceEvents"] if e.get("cat") == "kernel")
    ops = sorted((r["t_ns"] / 1000, r["dur_ns"] / 1000) for r in kernels)
    assert len(ops) == 4 and [n for pair in spans for n in pair] == pytest.approx(
        [n for pair in ops for n in pair]
    )
    assert sum(e["ph"] == "f" for e in loaded["traceEvents"]) == 4


def test_text_fits_a_terminal(app):
    line = [*TOOL, "-s", "-v", "--timeline", "--slow", "10", "--stacks", "--", app, "legacy"]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | {"CUDASIM_CLOCK": "virtual"})
    assert max(map(len, done.stdout.splitlines())) <= 80, done.stdout
    assert (
        "virtual clock: times are exact" in done.stdout
        and "2 of 4 launches took more than 10 us" in done.stdout
    )
    assert "main+" in done.stdout


def test_on_the_real_clock_the_bounds_hold(app):
    """Times are as exact as the record says; the parts of each launch are exact to the nanosecond."""
    _, records = trace([app, "legacy"], "-v", clock="real")
    for launch in of(records, "launch"):
        assert launch["latency_ns"] == launch["start_ns"] - launch["call_ns"]
        assert launch["latency_ns"] == launch["api_ns"] + launch["wait_ns"] + launch["overhead_ns"]
        assert launch["api_ns"] == launch["return_ns"] - launch["call_ns"]
        assert launch["exec_ns"] == launch["end_ns"] - launch["start_ns"]
    one, two, *_ = sorted(of(records, "launch"), key=lambda launch: launch["block_dim"][0])
    error = one["clock_error_ns"] + two["clock_error_ns"]
    assert one["method"] == "device" and one["exec_ns"] >= 50000
    assert two["start_ns"] >= one["end_ns"] - error and one["start_ns"] >= one["call_ns"] - error
    assert abs(two["wait_ns"] - max(0, one["end_ns"] - two["return_ns"])) <= error
    assert error < 10**7


def test_the_process_decides_the_device_not_the_option():
    """--device is for a COMMAND: with -p the error is about the process, whether or not there is a GPU."""
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        tool = [*TOOL[:2], "--device", "gpu", "-p", str(sleeping.pid)]
        done = subprocess.run(tool, capture_output=True, text=True, timeout=60)
        sleeping.kill()
    assert done.returncode == 1
    assert f"pid {sleeping.pid}" in done.stderr and "no GPU" not in done.stderr
