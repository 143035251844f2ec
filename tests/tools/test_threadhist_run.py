"""threadhist from its command line to its exit status, on a program with known answers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda
from gpubpf_commands import quoted

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(REPOSITORY / "tools/threadhist.py"), "--device", "sim"]

pytestmark = gpubpf_cuda.needs_cuda

# app LAUNCHES MILLISECONDS STATUS: launches `cell` on a grid of three dimensions so many times, with pauses; thread
# (x, y, z) of block (bx, by, bz) stores 1 + x + 10 y + 100 z + (bx + by + bz) % 2 times.
PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
namespace grid {
template <typename T> __global__ void cell(volatile T *out) {
    int turns = 1 + threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z + (blockIdx.x + blockIdx.y + blockIdx.z) % 2;
    for (int i = 0; i < turns; i++) *out = i;
}
__global__ void in_turn(volatile unsigned *next) {  // each block waits for the one before
    while (*next != blockIdx.x) {}
    for (int i = 0; i < 100 * blockIdx.x; i++) *next = blockIdx.x;
    *next = blockIdx.x + 1;
}
}
int main(int argc, char **argv) {
    int *out;
    if (cudaMalloc(&out, sizeof *out) || cudaMemset(out, 0, sizeof *out)) return 99;
    if (argc > 4) {
        grid::in_turn<<<4, 1>>>((unsigned *)out);
        if (cudaDeviceSynchronize()) return 97;
    }
    for (int i = 0; i < atoi(argv[1]); i++) {
        grid::cell<int><<<dim3(2, 3, 2), dim3(3, 2, 2)>>>(out);
        if (cudaDeviceSynchronize()) return 98;
        printf("launch %d\n", i);
        fflush(stdout);
        usleep(1000 * atoi(argv[2]));
    }
    if (atoi(argv[3]) < 0) abort();
    return atoi(argv[3]);
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return str(gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("app") / "app"))


def run(*arguments):
    return subprocess.run([*TOOL, *arguments], capture_output=True, text=True, timeout=60)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_thread_of_a_grid_of_three_dimensions(app, tmp_path):
    out = tmp_path / "out"
    done = run("--kernel", "grid::c*", "--work", "stores", "--json", "-o", out, "--", app, "2", "0", "5")
    assert (done.returncode, done.stdout) == (5, "launch 0\nlaunch 1\n")
    first, *threads, kernel, summary = records(out)
    assert first["type"] == "attached" and first["pid"] == kernel["pid"]
    for record in threads:
        (bx, by, bz), (x, y, z) = record["block"], record["thread"]
        assert record["work"] == 2 * (1 + x + 10 * y + 100 * z + (bx + by + bz) % 2) and record["runs"] == 2
    assert len({(*record["block"], *record["thread"]) for record in threads}) == 144 == kernel["threads"]
    assert kernel["kernel"] == "grid::cell" and "<int>" in kernel["demangled"]
    assert (summary["launches_seen"], summary["launches_instrumented"], summary["lost"]) == (2, 2, 0)


def test_waiting_in_a_loop_is_said_to_count_as_work(app):
    done = run("--kernel", "grid::in_turn", "--", app, "0", "0", "0", "in turn")
    assert done.returncode == 0, done.stderr
    assert "  blocks may wait for each other in loops; those instructions count as work\n" in done.stdout


def test_filters_choose_on_the_device(app, tmp_path):
    out = tmp_path / "out"
    run(
        "--block",
        "1,*,0",
        "--thread",
        "1:2,1",
        "--work",
        "stores",
        "--json",
        "-o",
        out,
        "--",
        app,
        "1",
        "0",
        "0",
    )
    threads = [record for record in records(out) if record["type"] == "thread"]
    assert {tuple(record["block"]) for record in threads} == {(1, y, 0) for y in range(3)}
    assert {tuple(record["thread"]) for record in threads} == {(x, 1, z) for x in (1, 2) for z in range(2)}
    assert all(record["runs"] == 1 and record["work"] > 0 for record in threads)


def test_null_probes_swap_in_copies_that_measure_nothing(app, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUBPF_NULL_PROBE", "1")
    out = tmp_path / "out"
    done = run("--json", "-o", out, "--", app, "3", "0", "5")
    assert (done.returncode, done.stdout) == (5, "launch 0\nlaunch 1\nlaunch 2\n")
    assert "note: GPUBPF_NULL_PROBE is set: probes are empty, so nothing is measured\n" in done.stderr
    attached, summary = records(out)
    assert attached["type"] == "attached" and summary["launches_instrumented"] == 3


def test_intervals_add_up(app, tmp_path):
    out = tmp_path / "out"
    run("0.3", "--work", "stores", "--json", "--top", "1", "-o", out, "--", app, "8", "100", "0")
    kernels = [record for record in records(out) if record["type"] == "kernel"]
    assert len(kernels) > 1 and sum(record["launches"] for record in kernels) == 8
    assert sum(record["runs"] for record in kernels) == 8 * 144


@pytest.mark.every(2)
@pytest.mark.parametrize(("status", "seen"), [("0", 0), ("3", 3), ("-1", 128 + signal.SIGABRT)])
def test_the_exit_status_is_the_programs(app, status, seen):
    assert run("--", app, "1", "0", status).returncode == seen


def test_what_matches_nothing_is_one_line_with_what_there_is(app):
    done = run("--kernel", "sell", "--", app, "1", "0", "0")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "note:" not in line]
    assert lines == ["threadhist: no kernel matches 'sell'; kernels seen: grid::cell, grid::in_turn"]
    assert run("--kernel", "sell", "--", app, "1", "0", "4").returncode == 4


def test_programs_that_cannot_be_run(tmp_path):
    done = run("--", str(tmp_path / "absent"))
    assert done.returncode == 127 and done.stderr.count("\n") == 1
    (tmp_path / "text").write_text("")
    assert run("--", str(tmp_path / "text")).returncode == 126
    done = run("-o", str(tmp_path / "absent" / "out"), "--", "true")
    assert done.returncode == 1 and done.stderr.startswith("threadhist: cannot write ")


@pytest.mark.long
def test_after_the_duration_the_program_goes_on(app):
    """The program ends without a delay after the result has been read."""
    script = '"$0" 30 50 0; read line; exec "$0" 1 0 6'
    command = [*TOOL, "-d", "4", "--work", "stores", "--", "sh", "-c", script, app]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tool:
        said = ""
        while "counted " not in said:
            line = tool.stdout.readline()
            assert line, said
            said += line
        assert "grid::cell: stores per thread" in said
        said, _ = tool.communicate("\n", timeout=100)
    assert tool.returncode == 6 and "launch 0\n" in said


@pytest.mark.parametrize("words", [("-d", "0.3"), ("0.3", "1")])
def test_time_begins_with_the_first_launch(app, tmp_path, words):
    """What a command does before it uses the GPU takes no time from the measurement."""
    done = run(*words, "--json", "-o", tmp_path / "out", "--", "sh", "-c", 'sleep 0.6; exec "$0" 3 0 0', app)
    assert done.returncode == 0
    assert records(tmp_path / "out")[-1]["launches_instrumented"] > 0


def started(app, out, *arguments):
    tool = subprocess.Popen(
        [*TOOL, "--json", "-o", out, *arguments, "--", app, "30", "100", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "launch 0" in tool.stdout.readline()
    return tool


def test_sigterm_prints_and_leaves_the_program_alone(app, tmp_path):
    tool = started(app, tmp_path / "out")
    tool.terminate()
    assert tool.wait(60) == 0
    assert records(tmp_path / "out")[-1]["type"] == "summary"
    assert tool.stdout.read().count("launch") == 29  # to its end


def test_interrupt_prints_and_waits(app, tmp_path):
    tool = started(app, tmp_path / "out")
    tool.send_signal(signal.SIGINT)
    assert tool.wait(30) == 2
    assert records(tmp_path / "out")[-1]["type"] == "summary"


def test_a_reader_that_leaves_does_not_disturb_the_program(app):
    tool = subprocess.Popen(
        [*TOOL, "0.1", "--", "sh", "-c", f"{quoted(app)} 5 100 0 >&2; exit 3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    tool.stdout.readline()
    tool.stdout.close()
    assert tool.stderr.read().count(b"launch") == 5
    assert tool.wait(30) == 3


def test_a_listing_of_what_ran(app):
    done = run("--list", "--json", "--", app, "3", "0", "0")
    listed, _ = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert (listed["kernel"], listed["launches"], listed["instrumentable"]) == ("grid::cell", 3, True)
    assert listed["comm"] == "app" and listed["pid"] > 0
    text = run("--ptx", app).stdout
    assert ".entry" in text and "gpubpf" in text


def test_kernels_of_graphs_count_at_each_replay(tmp_path):
    source = tmp_path / "graph.cu"
    source.write_text(r"""
#include <cstdio>
__global__ void add(int *x) { *x += 1; }
int main() {
    int *x, result = -1;
    cudaMalloc(&x, sizeof *x);
    cudaMemset(x, 0, sizeof *x);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStreamCreate(&stream);
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    add<<<1, 1, 0, stream>>>(x);
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&exec, graph, 0);
    for (int i = 0; i < 3; i++) cudaGraphLaunch(exec, stream);
    cudaStreamSynchronize(stream);
    cudaMemcpy(&result, x, sizeof result, cudaMemcpyDeviceToHost);
    printf("%d\n", result);
}
""")
    built = gpubpf_cuda.build(source, tmp_path / "graph")
    done = subprocess.run([*TOOL, "-o", tmp_path / "out", "--", built], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "3\n")
    assert "of 3 matching launches (3 in total)" in (tmp_path / "out").read_text()


def test_a_kernel_that_the_device_cannot_run_fails_as_without_the_tool(tmp_path):
    built = gpubpf_cuda.build(
        r"""
#include <cstdio>
__global__ void odd(unsigned *x) { asm volatile("multimem.red.global.add.u32 [%0], 1;" :: "l"(x)); }
__global__ void even(unsigned *x) { *x = 2; }
int main() {
    unsigned *x;
    cudaMalloc(&x, sizeof *x);
    odd<<<1, 1>>>(x);
    printf("%s\n", cudaGetErrorName(cudaGetLastError()));
    even<<<1, 1>>>(x);
    return cudaDeviceSynchronize();
}
""",
        tmp_path / "odd",
        "-arch=sm_90",
    )
    environment = os.environ | {"LD_LIBRARY_PATH": str(REPOSITORY / "lib/cudasim/lib")}
    alone = subprocess.run([built], capture_output=True, text=True, env=environment)
    assert (alone.returncode, alone.stdout) == (0, "cudaErrorNotSupported\n") and "multimem" in alone.stderr
    done = run("--json", "-o", tmp_path / "out", "--", built)
    own = [line for line in done.stderr.splitlines() if not line.startswith("threadhist: ")]
    assert (done.returncode, done.stdout, own) == (0, alone.stdout, alone.stderr.splitlines())
    summary = records(tmp_path / "out")[-1]
    assert (summary["launches_seen"], summary["launches_instrumented"]) == (2, 1)
    assert summary["not_instrumented"] == {"the device cannot run it": 1}


def test_timestamps_are_on_the_clock_of_the_records(app, monkeypatch):
    monkeypatch.setenv("CUDASIM_CLOCK", "virtual")
    done = run("--json", "-T", "--", app, "3", "0", "0")
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    (attached,), (kernel,) = ([r for r in found if r["type"] == kind] for kind in ("attached", "kernel"))
    assert 0 < kernel["ts_ns"] - attached["ts_ns"] <= found[-1]["duration_ns"]


@pytest.mark.every(4)
@pytest.mark.parametrize("how", ["stray", "assert"])
def test_a_context_that_failed_is_not_a_process_that_ended(tmp_path, how):
    faults = REPOSITORY / "tests" / "cudasim" / "programs" / "faults.cu"
    program = gpubpf_cuda.build(faults.read_text(), tmp_path / "faults", f"-I{faults.parent}")
    done = run("--", program, how)
    assert done.returncode == 0, done.stderr
    assert (
        "(faults): its CUDA context failed before its results could be read; the counts of up to"
        in done.stderr
    )
    assert "ended" not in done.stderr
