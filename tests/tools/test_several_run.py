"""What users see of several processes, of several GPUs, and of programs that were started before the tool."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
from gpubpf_commands import quoted

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ("threadhist", "kernelretsnoop", "launchlate", "memtrace")
MORE = {"memtrace": ["--footprint"], "launchlate": ["-v"]}  # records that are only there when asked for

pytestmark = [
    *gpubpf_cuda.needs_cuda,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="attaching needs x86-64"),
]

# app ROUNDS GPUS: in each round one launch of `work` and one of `rest` on each GPU. Says "ready" behind the first round; with
# ROUNDS < 0 goes on until its standard input is closed, then says how many rounds there were, and checks what was computed.
PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include <poll.h>
#include <unistd.h>
#define CHECK(x) do { if (x) { printf("failed: %s\n", #x); return 9; } } while (0)
__global__ void work(int *a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(a + i, 1);
}
__global__ void rest(volatile int *a) { if (threadIdx.x < 8) a[threadIdx.x * 31] = a[threadIdx.x * 31]; }
int main(int argc, char **argv) {
    int rounds = atoi(argv[1]), gpus = atoi(argv[2]), n = 250, done = 0;
    int *a[4];
    cudaStream_t s[4];
    for (int g = 0; g < gpus; g++) {
        CHECK(cudaSetDevice(g));
        CHECK(cudaMalloc(&a[g], 256 * sizeof(int)));
        CHECK(cudaMemset(a[g], 0, 256 * sizeof(int)));
        CHECK(cudaStreamCreate(&s[g]));
        CHECK(cudaDeviceSynchronize());
    }
    for (struct pollfd in = {0, POLLIN, 0}; rounds < 0 ? !poll(&in, 1, 10) : done < rounds; done++) {
        for (int g = 0; g < gpus; g++) {
            CHECK(cudaSetDevice(g));
            work<<<2, 128, 0, s[g]>>>(a[g], n);
            rest<<<1, 32, 0, s[g]>>>(a[g]);
        }
        for (int g = 0; g < gpus; g++) {
            CHECK(cudaSetDevice(g));
            CHECK(cudaStreamSynchronize(s[g]));
        }
        if (!done && rounds < 0) { printf("ready\n"); fflush(stdout); }
    }
    for (int g = 0; g < gpus; g++) {
        int host[256];
        CHECK(cudaSetDevice(g));
        CHECK(cudaMemcpy(host, a[g], sizeof host, cudaMemcpyDeviceToHost));
        for (int i = 0; i < 256; i++) CHECK(host[i] != (i < n ? done : 0));
    }
    printf("%d rounds\n", done);
    return 0;
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("several") / "app", "-lineinfo"))


def command(tool: str, *arguments: object) -> list[str]:
    return [sys.executable, str(REPOSITORY / f"tools/{tool}.py"), *map(str, arguments)]


def measured(tool: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(tool, *arguments), capture_output=True, text=True, timeout=100, env=os.environ | environment
    )


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextlib.contextmanager
def running(app: str, gpus: int = 1) -> Iterator[int]:
    """A process id of the program that runs already. At its end it must have computed what it should."""
    program = subprocess.Popen(
        [sys.executable, "-m", "cudasim.launcher", "--", app, "-1", str(gpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDASIM_DEVICES": str(gpus)},
    )
    assert program.stdout is not None
    try:
        assert program.stdout.readline() == "ready\n"
        yield program.pid
        out, _ = program.communicate(timeout=60)
        assert program.returncode == 0 and re.fullmatch(r"\d+ rounds\n", out), out
    finally:
        program.kill()
        program.wait()


def two(app: str) -> list[str]:
    """A command of two programs; one of them uses two GPUs."""
    return ["--device", "sim", "--", "sh", "-c", f"{quoted(app)} 3 2 & {quoted(app)} 2 1; wait"]


@pytest.mark.every(2)
@pytest.mark.parametrize("tool", TOOLS)
def test_rows_say_whose_they_are(tool: str, app: str) -> None:
    done = measured(tool, *MORE.get(tool, ()), *two(app), CUDASIM_DEVICES="2")
    lines = [line for line in done.stdout.splitlines() if not line.endswith("rounds")]
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    heads = [n for n, line in enumerate(lines) if re.match(r" *(CALL T\+us +)?PID +COMM +GPU ", line)]
    assert len(heads) >= 2
    for n in heads:
        skip = 1 if "CALL T" in lines[n] else 0
        assert re.match(rf" *(\S+ +){{{skip}}}\d+ +app +[01] ", lines[n + 1]), lines[n + 1]
    # No table without these columns.
    others = re.compile(r"(LANE|THREAD|BLOCK|WHERE|KERNEL|BYTES|FROM FIRST TO LAST) ")
    assert not [line for line in lines if others.match(line.lstrip())]
    assert "counted 16 of 16 matching launches" in done.stdout and "processes measured: 2\n" in done.stdout
    assert len(re.findall("^overhead: ", done.stdout, re.MULTILINE)) == 1


@pytest.mark.every(2)
@pytest.mark.parametrize("tool", TOOLS)
def test_records_say_whose_they_are_and_nothing_is_added_up(tool: str, app: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    measured(tool, "--json", "-o", out, *MORE.get(tool, ()), *two(app), CUDASIM_DEVICES="2")
    *found, summary = records(out)
    assert summary["processes"] == {"measured": 2, "missed": {}} and "graphs_before" not in summary
    costs = {"hooks", "hooks_ns", "stood_ns", "registers", "images", "image_bytes", "drained_bytes"}
    assert set(summary["overhead"]) == costs
    assert summary["overhead"]["images"] >= 2 and summary["overhead"]["image_bytes"] > 1000
    for record in found:
        of_host = record["type"] in ("attached", "unallocated")
        assert {"pid", "comm", *(() if of_host else ("gpu",))} <= record.keys(), record
    kernels = [r for r in found if r["type"] == "kernel"]
    launches = Counter(
        {(r["pid"], r["gpu"], r["kernel"]): r.get("launches", r.get("count")) for r in kernels}
    )
    assert sorted(launches.values()) == [2, 2, 3, 3, 3, 3] and len(kernels) == 6
    assert sorted(Counter((r["pid"], r["gpu"]) for r in kernels).values()) == [2, 2, 2]
    if tool == "memtrace":
        touched = {(r["pid"], r["gpu"], r["kernel"]): r["bytes"] for r in found if r["type"] == "footprint"}
        assert touched.keys() == launches.keys() and set(touched.values()) == {32, 1000}


@pytest.mark.every(2)
@pytest.mark.parametrize("tool", ("threadhist", "launchlate", "kernelretsnoop", "memtrace"))
def test_cells_say_whose_they_are(tool: str, app: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    measured(tool, "--csv", "-o", out, *two(app), CUDASIM_DEVICES="2")
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len({(row["pid"], row["gpu"]) for row in rows}) == 3 and {row["comm"] for row in rows} == {"app"}
    assert all(row["mangled"].startswith(f"_Z{len(row['kernel'])}{row['kernel']}") for row in rows)


@pytest.mark.long
def test_pictures_and_traces_keep_processes_and_gpus_apart(app: str, tmp_path: Path) -> None:
    picture, trace = tmp_path / "exits.svg", tmp_path / "trace.json"
    measured("kernelretsnoop", "--heatmap", picture, *two(app), CUDASIM_DEVICES="2")
    assert len(set(re.findall(r">(app \(pid \d+\), GPU [01]): work", picture.read_text()))) == 3
    measured("launchlate", "--trace", trace, *two(app), CUDASIM_DEVICES="2")
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(re.sub(r"\d+\)", "N)", name) for name in names.values()) == [
        *("app (host)", "app (host)"),
        *("app (pid N) on GPU 0", "app (pid N) on GPU 0", "app (pid N) on GPU 1"),
    ]
    kernels = Counter(e["pid"] for e in events if e.get("cat") == "kernel")
    assert sorted(kernels.values()) == [4, 6, 6]
    ends = {e["id"] for e in events if e["ph"] == "f"}
    assert len(ends) >= 16 and ends == {e["id"] for e in events if e["ph"] == "s"}


def watched(
    out: Path, enough: Callable[[list[dict[str, Any]]], bool], *command: str, end: int = signal.SIGINT
) -> tuple[list[dict[str, Any]], str]:
    """Runs a tool until what it has told is enough, then ends it: its records, what it said. It has to end well."""
    tool = subprocess.Popen([*command, "--json", "-o", str(out)], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 100

    def told() -> list[dict[str, Any]]:
        text = out.read_text() if out.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    try:
        while tool.poll() is None and time.monotonic() < until and not enough(told()):
            time.sleep(0.1)
        tool.send_signal(end)
        _, said = tool.communicate(timeout=60)
    finally:
        tool.kill()
        tool.wait()
    assert tool.returncode == 0, said
    return told(), said


def kernels_of(told: list[dict[str, Any]]) -> set[tuple[int, int, str]]:
    """Processes, GPUs and names of kernels that have been measured."""
    found = [r for r in told if r["type"] == "kernel" and r.get("methods", {"device": 1}).get("device")]
    return {(r["pid"], r["gpu"], r["kernel"]) for r in found}


@pytest.mark.every(2)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_program_that_was_started_before(tool: str, app: str, tmp_path: Path) -> None:
    with running(app, gpus=2) as pid:
        expected = {(pid, gpu, name) for name in ("work", "rest") for gpu in (0, 1)}
        told, said = watched(
            tmp_path / "out",
            lambda told: kernels_of(told) >= expected,
            *command(tool, "0.3", "-p", pid, *MORE.get(tool, ())),
        )
    first, *found, summary = told
    assert (first["type"], first["pid"], first["comm"]) == ("attached", pid, "app")
    assert f"attached to {pid} (app)" in said and kernels_of(found) == expected
    reasons = summary["not_instrumented"]
    assert 0 < summary["launches_instrumented"] == summary["launches_seen"] - sum(reasons.values())
    assert reasons.keys() <= {"before ready"} and "processes" not in summary
    cost = summary["overhead"]
    assert cost["hooks"] > 0 and cost["hooks_ns"] > 0 and cost["drained_bytes"] > 0 and cost["stood_ns"] > 0


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_several_that_were_started_before(end: int, app: str, tmp_path: Path) -> None:
    with running(app) as one, running(app) as other, subprocess.Popen(["sleep", "1000"]) as sleep:
        expected = {(pid, 0, "work") for pid in (one, other)}
        run = command("threadhist", "0.3", "-p", f"{one},{sleep.pid},{other}", "--kernel", "work")
        told, said = watched(tmp_path / "out", lambda told: kernels_of(told) >= expected, *run, end=end)
        sleep.kill()
    assert f"pid {sleep.pid} (sleep)" in said and kernels_of(told) == expected
    assert told[-1]["processes"] == {"measured": 2, "missed": {"no CUDA driver": 1}}
