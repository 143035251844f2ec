"""gputop from its command line to its exit status, on programs whose kernels, copies, memory and waits are known beforehand."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
import gpubpf_tools
from gpubpf_gpus import build_nvml
from gpubpf_tools import TOOLS

pytestmark = gpubpf_cuda.needs_cuda
WAIT_FOR = r"""
#include <cuda_runtime.h>
#include <unistd.h>
#include <sys/wait.h>
__global__ void wait_for(long long ns) {
    long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < ns);
}
__global__ void touch(char *at) { at[threadIdx.x]++; }
"""
SOURCE = (
    WAIT_FOR
    + r"""
int main() {
    cudaStream_t one, two;
    cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking);
    char *kept, *freed, host[5000] = {};
    cudaMalloc(&kept, 5000);
    cudaMalloc(&freed, 1 << 20);
    cudaFree(freed);
    cudaMallocHost(&freed, 100000);                       // pinned host memory is not GPU memory
    cudaMemcpy(kept, host, 5000, cudaMemcpyHostToDevice);
    wait_for<<<1, 32, 0, one>>>(10000);
    wait_for<<<1, 32, 0, two>>>(10000);                   // a launch call later: they overlap but for 1,000 ns
    cudaDeviceSynchronize();
    wait_for<<<1, 32, 0, one>>>(3000);
    wait_for<<<1, 32, 0, one>>>(4000);
    touch<<<1, 32, 0, one>>>(kept);
    cudaStreamSynchronize(one);
    cudaMemcpy(host, kept, 700, cudaMemcpyDeviceToHost);
    cudaMemcpy(host, host + 100, 100, cudaMemcpyHostToHost);
    return 0;
}
"""
)
DEVICES = (
    WAIT_FOR
    + r"""
int main() {
    for (int gpu = 0; gpu < 2; gpu++) {
        cudaSetDevice(gpu);
        char *at;
        cudaMalloc(&at, 1000 * (gpu + 1));
        for (int i = 0; i <= gpu; i++) wait_for<<<1, 32>>>(5000);
    }
    for (int gpu = 0; gpu < 2; gpu++) {
        cudaSetDevice(gpu);
        cudaDeviceSynchronize();
    }
}
"""
)
FAMILY = (
    WAIT_FOR
    + r"""
int main() {
    for (int i = 1; i <= 3; i++)
        if (!fork()) {
            for (int n = 0; n < i; n++) wait_for<<<1, 32>>>(1000 * i);
            return cudaDeviceSynchronize();
        }
    while (wait(nullptr) > 0);
}
"""
)
# Says when it launched, and when it is told to end. The kernel runs until the host sets the flag.
HOLDS = (
    WAIT_FOR
    + r"""
#include <cstdio>
__global__ void until(volatile int *flag) { while (!*flag); }
int main() {
    volatile int *flag;
    cudaHostAlloc((void **)&flag, 4, cudaHostAllocMapped);
    while (getchar() == 'l') {
        *flag = 0;
        until<<<1, 1>>>((volatile int *)flag);
        puts("launched");
        fflush(stdout);
        getchar();
        *flag = 1;
        cudaDeviceSynchronize();
        puts("ended");
        fflush(stdout);
    }
}
"""
)


def built(source: str, tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    return gpubpf_cuda.build(source, tmp_path_factory.mktemp(name) / name, "-O2")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(SOURCE, tmp_path_factory, "busy")


run, records = partial(gpubpf_tools.run, "gputop"), partial(gpubpf_tools.records, "gputop")


def of_type(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in found if one["type"] == kind]


def union(spans: list[tuple[int, int]]) -> int:
    """The time that the spans cover, each moment once."""
    covered, until = 0, 0
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, until))
        until = max(until, end)
    return covered


def test_known_answers_on_the_virtual_clock(program: Path, tmp_path: Path) -> None:
    found = records(tmp_path, "--", program)
    (one,) = of_type(found, "process")
    counts = ("launches", "copies", "copies_bytes", "memory_bytes", "waits", "running", "ended")
    assert [one[name] for name in counts] == [5, 2, 5700, 5000, 4, 0, True]
    assert one["memory_complete"] is True
    kernels = {kernel["kernel"]: (kernel["launches"], kernel["gpu_ns"]) for kernel in one["kernels"]}
    assert kernels["wait_for"][0] == 4 and 27_000 <= kernels["wait_for"][1] < 27_100
    assert kernels["touch"][0] == 1 and 0 < kernels["touch"][1] < 20
    assert [kernel["kernel"] for kernel in one["kernels"]] == ["wait_for", "touch"]
    # The first two kernels overlap, but for the 1,000 ns of a launch call.
    assert 11_000 + 3_000 + 4_000 <= one["busy_ns"] < 18_100
    # launchlate has the same launches, one by one.
    each = of_type(gpubpf_tools.records("launchlate", tmp_path, "-v", "--", program), "launch")
    assert one["busy_ns"] == union([(launch["start_ns"], launch["end_ns"]) for launch in each])
    assert sum(ns for _, ns in kernels.values()) == sum(launch["exec_ns"] for launch in each)
    assert one["gpu_share"] == pytest.approx(one["busy_ns"] / one["interval_ns"])
    assert 0 < one["wait_ns"] <= one["interval_ns"]
    (gpu,) = of_type(found, "gpu")
    assert (gpu["busy_ns"], gpu["processes"]) == (one["busy_ns"], 1)
    summary = found[-1]
    assert (summary["launches_seen"], summary["lost"], summary["late_ns"]) == (5, 0, 0)


def test_a_report_repeats_on_the_virtual_clock(program: Path, tmp_path: Path) -> None:
    def without_pid() -> list[dict[str, Any]]:
        found = records(tmp_path, "--", program)
        return [{name: value for name, value in one.items() if name != "pid"} for one in found]

    assert without_pid()[1:-1] == without_pid()[1:-1]


def test_only_matching_kernels_count(program: Path, tmp_path: Path) -> None:
    (one,) = of_type(records(tmp_path, "--kernel", "touch", "--", program), "process")
    assert (one["launches"], one["copies"], one["memory_bytes"]) == (1, 2, 5000)
    assert [kernel["kernel"] for kernel in one["kernels"]] == ["touch"] and one["busy_ns"] < 20


def test_each_gpu_has_a_row(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    app = built(DEVICES, tmp_path_factory, "devices")
    environment = {"env": {**os.environ, "CUDASIM_DEVICES": "2"}}
    found = records(tmp_path, "--", app, **environment)
    rows = {one["gpu"]: one for one in of_type(found, "process")}
    assert {gpu: (one["launches"], one["memory_bytes"]) for gpu, one in rows.items()} == {
        0: (1, 1000),
        1: (2, 2000),
    }
    for gpu, one in rows.items():
        assert 5_000 * (gpu + 1) <= one["busy_ns"] < 5_100 * (gpu + 1)
    assert [one["busy_ns"] for one in of_type(found, "gpu")] == [rows[0]["busy_ns"], rows[1]["busy_ns"]]
    text = run("--", app, **environment).stdout
    assert "1 process on 2 GPUs" in text and "GPU 1: kernels ran for" in text


def test_each_process_has_a_row(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = records(tmp_path, "--sort", "launches", "--", built(FAMILY, tmp_path_factory, "family"))
    rows = of_type(found, "process")
    assert [one["launches"] for one in rows] == [3, 2, 1]
    for one in rows:
        times = one["launches"]
        assert 1000 * times**2 <= one["busy_ns"] < 1000 * times**2 + 100 * times


def test_a_kernel_that_runs_counts_in_each_interval(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The kernel is launched before the second interval, and runs through several: these are busy from their begin to their end."""
    app = built(HOLDS, tmp_path_factory, "holds")
    with subprocess.Popen(["cudasim", "--", app], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        try:
            command = [sys.executable, TOOLS / "gputop.py", "--json", "0.2", "-p", str(running.pid)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tool:
                assert tool.stdout and tool.stderr and running.stdin and running.stdout
                seen = []

                def wait_until(busy: bool) -> None:
                    """Read records until the process was busy, or idle, for a whole interval."""
                    for line in tool.stdout:
                        seen.append(json.loads(line))
                        if seen[-1]["type"] == "process" and seen[-1]["gpu_share"] == float(busy):
                            return
                    raise AssertionError(tool.stderr.read())

                def do(word: bytes, answer: bytes) -> None:
                    running.stdin.write(word)
                    running.stdin.flush()
                    assert running.stdout.readline() == answer

                while not seen or seen[-1]["type"] != "process":
                    seen.append(json.loads(tool.stdout.readline()))
                do(b"l", b"launched\n")
                wait_until(busy=True)
                assert (seen[-1]["running"], seen[-1]["launches"], seen[-1]["waits"]) == (1, 0, 0)
                assert seen[-1]["busy_ns"] == seen[-1]["interval_ns"]
                do(b"s", b"ended\n")
                wait_until(busy=False)
                tool.terminate()
                seen += map(json.loads, tool.communicate(timeout=60)[0].splitlines())
                assert tool.returncode == 0
        finally:
            running.kill()
    rows = of_type(seen, "process")
    assert sum(one["launches"] for one in rows) == 1 and sum(one["waits"] for one in rows) == 1
    assert all(one["busy_ns"] <= one["interval_ns"] for one in rows)
    kernel = sum(kernel["gpu_ns"] for one in rows for kernel in one["kernels"])
    assert kernel == sum(one["busy_ns"] for one in rows)
    assert seen[-1]["type"] == "summary"


ROOT = os.geteuid() == 0
USER = 64321  # nobody else has processes of this user


@pytest.fixture
def theirs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A program of an ordinary user that launches until it is killed, and what a tool needs to run as that user."""
    if not ROOT:
        pytest.skip("needs root, to start programs of another user")
    app = gpubpf_cuda.build(
        WAIT_FOR
        + "int main() { for (;;) { wait_for<<<1, 32>>>(1000); cudaDeviceSynchronize(); usleep(1000); } }",
        tmp_path_factory.mktemp("theirs") / "theirs",
    )
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        shutil.copy(app, place)
        home = Path(place, "home")
        home.mkdir()
        os.chown(home, USER, USER)
        environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home)}
        who: dict[str, Any] = {"user": USER, "group": USER, "extra_groups": [], "env": environment}
        if subprocess.run(
            [sys.executable, TOOLS / "gputop.py", "--version"], capture_output=True, **who
        ).returncode:
            pytest.skip("another user cannot read this checkout")
        with subprocess.Popen(["cudasim", "--", Path(place, "theirs")], **who) as running:
            try:
                until(lambda: "libcuda.so" in Path(f"/proc/{running.pid}/maps").read_text())
                yield running, who
            finally:
                running.kill()


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("this never became true")


def test_without_root_ones_own_processes(theirs: tuple[subprocess.Popen[bytes], dict[str, Any]]) -> None:
    running, who = theirs
    done = run("--once", **who)
    assert "left out" not in done.stderr
    assert "measuring your processes that use a GPU now" in done.stderr
    assert re.search(rf"^ *{running.pid}  theirs ", done.stdout, re.MULTILINE), done.stdout
    running.kill()
    running.wait()
    done = run("--once", status=1, **who)
    assert done.stderr.startswith("gputop: none of your processes uses a GPU now; ")
    assert done.stderr.count("\n") == 1


def test_without_root_processes_that_share_a_device(
    theirs: tuple[subprocess.Popen[bytes], dict[str, Any]],
) -> None:
    running, who = theirs
    other = {**who, "env": who["env"] | {"CUDASIM_CLOCK": "virtual"}}
    with subprocess.Popen(running.args, **other) as another:
        try:
            until(lambda: "libcuda.so" in Path(f"/proc/{another.pid}/maps").read_text())
            done = run("--once", **who)
        finally:
            another.kill()
    assert "1 process left out: on another device than " in done.stderr


@pytest.mark.whole_machine
def test_every_process_of_the_machine(theirs: tuple[subprocess.Popen[bytes], dict[str, Any]]) -> None:
    running, _ = theirs
    command = [sys.executable, TOOLS / "gputop.py", "--json", "0.5"]
    mine: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as tool:
        assert tool.stdout
        for line in tool.stdout:
            one = json.loads(line)
            mine += [one] if one["type"] == "process" and one["pid"] == running.pid else []
            if mine and mine[-1]["launches"]:
                break
        tool.terminate()
        tool.communicate(timeout=120)
    assert mine and all(one["comm"] == "theirs" and not one["ended"] for one in mine)
    assert not any(one["memory_complete"] for one in mine), "it used the GPU before"
    assert all(one["launches"] == sum(kernel["launches"] for kernel in one["kernels"]) for one in mine)
    assert all(0 <= one["gpu_share"] <= 1 for one in mine)


def test_a_duration_is_one_report(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    app = built(
        WAIT_FOR
        + "int main() { for (;;) { wait_for<<<1, 32>>>(1000); cudaDeviceSynchronize(); usleep(1000); } }",
        tmp_path_factory,
        "steady",
    )
    with subprocess.Popen(["cudasim", "--", app]) as running:
        try:
            until(lambda: "libcuda.so" in Path(f"/proc/{running.pid}/maps").read_text())
            found = records(tmp_path, "-d", "2", "-p", str(running.pid))
        finally:
            running.kill()
    (one,) = of_type(found, "process")
    assert one["interval_ns"] >= 2_000_000_000


def test_once_is_one_report(program: Path) -> None:
    done = run("--once", "--", program)
    assert done.stdout.count("LAUNCH/s") == 1


def test_hostile_names_are_harmless(tmp_path_factory: pytest.TempPathFactory) -> None:
    name = "\x1b[31m\n" + "k" * 9
    place = tmp_path_factory.mktemp("hostile")
    source = (
        WAIT_FOR.replace("touch", "a_name_that_is_longer_than_a_terminal_is_wide_" + "x" * 290)
        + SOURCE[len(WAIT_FOR) :]
    )
    app = gpubpf_cuda.build(
        source.replace("touch<<<", "a_name_that_is_longer_than_a_terminal_is_wide_" + "x" * 290 + "<<<"),
        place / "app",
    )
    app = app.rename(place / name)
    done = run("-o", place / "out", "--", app)
    text = (place / "out").read_text()
    assert done.returncode == 0 and "\x1b" not in text
    assert "\\x1b[31m\\n" in text and "a_name_that_is" in text
    assert max(map(len, text.splitlines())) <= 80


def test_kernels_of_one_stream_never_overlap(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No call waits for these kernels, so that a reading mostly finds some of which more threads could end."""
    source = WAIT_FOR + "int main() { for (;;) { wait_for<<<1, 32>>>(20000); usleep(500); } }"
    app = built(source, tmp_path_factory, "endless")
    with subprocess.Popen(["cudasim", "--", app]) as running:
        try:
            found = records(tmp_path, "0.4", "4", "-p", str(running.pid))
        finally:
            running.kill()
    rows = of_type(found, "process")
    assert len(rows) == 4 and sum(one["launches"] for one in rows) > 10
    for one in rows:
        (kernel,) = one["kernels"]
        assert one["busy_ns"] <= kernel["gpu_ns"] <= 1.02 * one["busy_ns"] + 1000, one


GRAPHS = (
    WAIT_FOR
    + r"""
__global__ void fails(int *at) { *at = 1; }
int main(int count, char **) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStreamCreate(&stream);
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    wait_for<<<1, 32, 0, stream>>>(7000);
    wait_for<<<1, 32, 0, stream>>>(2000);
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&exec, graph, 0);
    for (int i = 0; i < 3; i++) cudaGraphLaunch(exec, stream);
    cudaStreamSynchronize(stream);
    wait_for<<<1, 32>>>(1000);
    if (count > 1) fails<<<1, 1>>>(nullptr);
    cudaDeviceSynchronize();
    return 0;
}
"""
)


def test_what_is_missing_is_told(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    app = built(GRAPHS, tmp_path_factory, "graphs")
    found = records(tmp_path, "--graphs", "--", app)
    (one,) = of_type(found, "process")
    assert [(kernel["kernel"], kernel["launches"]) for kernel in one["kernels"]] == [("wait_for", 7)]
    assert 28_000 <= one["busy_ns"] < 28_200
    # The kernels of graphs have no probes, so that each graph is timed as a whole.
    found = records(tmp_path, "--no-graphs", "--", app)
    (one,) = of_type(found, "process")
    kernels = {kernel["kernel"]: kernel for kernel in one["kernels"]}
    assert {name: kernel["launches"] for name, kernel in kernels.items()} == {"[graphs]": 3, "wait_for": 7}
    assert 27_000 <= kernels["[graphs]"]["gpu_ns"] < 27_200 and 28_000 <= one["busy_ns"] < 28_200
    assert found[-1]["launches_untimed"] == 6 and found[-1]["not_instrumented"] == {"capture": 6}
    text = run("--no-graphs", "--", app).stdout
    assert "not counted: 6 (capture)" in text and "virtual clock: times are exact" in text
    (one,) = of_type(records(tmp_path, "--no-graphs", "--kernel", "touch", "--", app), "process")
    assert (one["kernels"], one["busy_ns"]) == ([], 0), "only these kernels count"
    done = run("--graphs", "--clock", "real", "--", app, "fail")
    assert re.search(
        "launch(es)? with an unknown end: the context failed before the end was read", done.stdout
    )
    assert re.search(r"^clock error: (up to \d|unknown)", done.stdout, re.MULTILINE)


def test_what_drivers_say_of_their_gpus(program: Path, tmp_path: Path) -> None:
    """With a stand-in for NVML; tests/gpubpf/gpus/test_devices.py has the values."""
    build_nvml(tmp_path)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    found = records(tmp_path, "--", program, env=environment)
    assert [one["name"] for one in of_type(found, "device")] == ["NVIDIA Test 0", "NVIDIA Test 1"]
    done = run("0.2", "3", "--", "sh", "-c", f"{program}; sleep 2", env=environment)
    assert done.stdout.count("NVML 0 (NVIDIA Test 0): util 95 %") == 3
    assert done.stderr.count("NVML 1: utilization, power unknown: Not Supported") == 1


def test_text_and_csv(program: Path) -> None:
    text = run("--", program).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "1 process on 1 GPU, " in text and "GPU 0: kernels ran for " in text
    assert "counted 5 of 5 matching launches (5 in total)" in text
    rows = list(csv.DictReader(run("--csv", "--", program).stdout.splitlines()))
    assert [(row["launches"], row["copies_bytes"], row["kernel"]) for row in rows] == [
        ("5", "5700", "wait_for")
    ]


def test_bad_input_is_one_line_and_status_2() -> None:
    for words in (("--top", "0"), ("--sort", "size"), ("--once", "1", "3")):
        done = run(*words, "--", "/bin/true", status=2)
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("gputop: ")
