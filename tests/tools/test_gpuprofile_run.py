"""gpuprofile from its command line to its exit status, on a program whose stacks and times are known beforehand."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
import gpubpf_examples
import gpubpf_tools
from gpubpf_profiles import boxes_of, samples_of

pytestmark = gpubpf_cuda.needs_cuda
SOURCE = r"""
#include <cuda.h>
#include <cstdio>
#include <thread>
__global__ void wait_for(long long ns) {
    long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < ns);
}
__global__ void touch(int *at) { at[threadIdx.x]++; }
#define KEEP __attribute__((noinline, noclone))
#define NO_TAIL_CALL asm volatile("")
KEEP void launch(long long ns) { wait_for<<<1, 32>>>(ns); NO_TAIL_CALL; }
namespace app {
template <class T> KEEP void layer(T ns) { launch(ns); NO_TAIL_CALL; }
KEEP void descend(int depth, long long ns) {
    if (depth) descend(depth - 1, ns);
    else launch(ns);
    NO_TAIL_CALL;
}
KEEP void tail(long long ns) { launch(ns); }  // jumps, so it has no frame
struct Model { KEEP virtual void step(long long ns) { launch(ns); NO_TAIL_CALL; } };
}
KEEP static void hidden() { app::layer(3000LL); NO_TAIL_CALL; }
KEEP static void captured() {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStreamCreate(&stream);
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    wait_for<<<1, 32, 0, stream>>>(7000);
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&exec, graph, 0);
    for (int i = 0; i < 2; i++) cudaGraphLaunch(exec, stream);
    cudaStreamSynchronize(stream);
}
int main() {
    for (int i = 0; i < 5; i++) app::layer(1000LL);
    for (int i = 0; i < 3; i++) hidden();
    app::descend(4, 2000);
    app::descend(100, 2000);
    app::tail(1000);
    app::Model model, *volatile any = &model;
    any->step(4000);
    std::thread([] { app::layer(5000LL); }).join();
    captured();
    int *at;
    cudaMalloc(&at, 128);
    touch<<<1, 32>>>(at);
    return cudaDeviceSynchronize();
}
"""
# By kernel and the program's own frames: launches, and the shortest time of one in ns. A launch takes a few more: it reads the clock,
# and compares.
EXPECTED = {
    ("wait_for", "main > app::layer > launch"): (5, 1000),
    ("wait_for", "main > hidden > app::layer > launch"): (3, 3000),
    ("wait_for", "main > app::descend > app::descend > app::descend > app::descend > app::descend > launch"): (1, 2000),
    ("wait_for", " > ".join(["app::descend"] * 59 + ["launch"])): (1, 2000),
    ("wait_for", "main > launch"): (1, 1000),
    ("wait_for", "main > app::Model::step > launch"): (1, 4000),
    ("wait_for", "app::layer > launch"): (1, 5000),
    ("wait_for", "main > captured"): (2, 7000),
    ("touch", "main"): (1, 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("profiled")
    return gpubpf_cuda.build(SOURCE, place / "profiled", "-O2", "-Xcompiler", "-fomit-frame-pointer")


VIRTUAL = ("--clock", "virtual")
run = partial(gpubpf_tools.run, "gpuprofile", options=VIRTUAL)
records = partial(gpubpf_tools.records, "gpuprofile", options=VIRTUAL)


def own(program: Path, record: dict[str, Any]) -> str:
    """The program's own frames of a record of gpuprofile, without nvcc's stub and what starts a program or thread."""
    mine = [one["name"] for one in record["frames"] if one["file"] == str(program)]
    return " > ".join(name for name in mine if not re.match("__device_stub|_start|std::", name))


def test_time_and_launches_by_stack(program: Path, tmp_path: Path) -> None:
    found = records(tmp_path, "--graphs", "--", program)
    stacks = [one for one in found if one["type"] == "stack"]
    assert {(one["kernel"], own(program, one)): one["launches"] for one in stacks} == {
        key: launches for key, (launches, _) in EXPECTED.items()
    }
    for one in stacks:
        launches, least = EXPECTED[one["kernel"], own(program, one)]
        assert launches * least <= one["gpu_ns"] < launches * (least + 20), one
        assert one["untimed"] == 0
        assert one["complete"] == ("main" in own(program, one) or own(program, one).startswith("app::layer"))
        assert all(frame["kind"] == "native" for frame in one["frames"])
        assert not any(frame["line"] for frame in one["frames"] if frame["object"] == str(program))
    assert [one["gpu_ns"] for one in stacks] == sorted((one["gpu_ns"] for one in stacks), reverse=True)
    assert found[-1]["launches_incomplete"] == 1
    # The launches, one by one, have the same times in all.
    each = [
        one
        for one in gpubpf_tools.records(
            "launchlate", tmp_path, "-v", "--graphs", "--", program, options=VIRTUAL
        )
        if one["type"] == "launch"
    ]
    sums: Counter[str] = Counter()
    for one in stacks:
        sums[one["kernel"]] += one["gpu_ns"]
    for one in each:
        sums[one["kernel"]] -= one["exec_ns"]
    assert not any(sums.values()) and len(each) == sum(one["launches"] for one in stacks)


def test_the_forms_agree(program: Path, tmp_path: Path) -> None:
    arguments = ("--graphs", "--", program)
    stacks = [one for one in records(tmp_path, *arguments) if one["type"] == "stack"]
    expected = Counter()
    for one in stacks:
        names = [] if one["complete"] else ["[incomplete]"]
        expected[";".join([*names, *(frame["name"] for frame in one["frames"]), one["kernel"]])] += one[
            "gpu_ns"
        ]
    scope = tmp_path / "speedscope.json"
    pprof, svg = tmp_path / "pb.gz", tmp_path / "svg"
    files = ("--speedscope", scope, "--pprof", pprof, "--svg", svg)
    done = run("--folded", "-o", tmp_path / "folded", *files, *arguments)
    for file in (scope, pprof, svg):
        assert f"gpuprofile: note: wrote {file}" in done.stderr
    lines = (tmp_path / "folded").read_text().splitlines()
    assert {line.rpartition(" ")[0]: int(line.rpartition(" ")[2]) for line in lines} == expected

    made = json.loads(scope.read_text())
    (profile,) = made["profiles"]
    assert profile["endValue"] == sum(profile["weights"]) == expected.total()
    frames = [frame["name"] for frame in made["shared"]["frames"]]
    sampled = Counter()
    for sample, weight in zip(profile["samples"], profile["weights"], strict=True):
        sampled[";".join(frames[number] for number in sample)] += weight
    assert sampled == expected

    sampled = Counter()
    for frames, (_, weight) in samples_of(pprof):
        sampled[";".join(frames)] += weight
    assert sampled == expected
    boxes = [tip.splitlines() for tip, _, _ in boxes_of(svg)]
    assert [amount.partition(",")[0] for name, amount, *_ in boxes if name == "captured"] == ["14.0 us"]

    run("--csv", "-o", tmp_path / "csv", *arguments)
    rows = list(csv.DictReader((tmp_path / "csv").open()))
    assert {row["stack"]: int(row["gpu_ns"]) for row in rows} == expected


def test_the_report_for_people(program: Path) -> None:
    text = run("--graphs", "--top", "5", "-v", "--", program).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^ *\d+\.\d % +14\.0 us +2  wait_for  main > captured$", text, re.MULTILINE)
    assert "wait_for  main > hidden > app::layer > launch" in text
    assert "    hidden (profiled)\n    app::layer (profiled)\n    launch (profiled)\n" in text
    assert "16 launches from 9 host stacks" in text
    assert "and 4 rows with 4 launches" in text
    assert "1 launch with an incomplete host stack: the stack has more than 63 frames" in text
    text = run("--graphs", "--weight", "launches", "--top", "1", "--kernel", "wait_for", "--", program).stdout
    assert "33.3 %   5.04 us         5  wait_for  main > app::layer > launch" in text
    assert "[incomplete] > app::descend (59x) > launch" in run("--kernel", "wait*", "--", program).stdout
    run("--kernel", "absent", "--", program, status=1)


def test_weights_of_folded_stacks(program: Path) -> None:
    lines = run("--folded", "--weight", "launches", "--kernel", "touch", "--", program).stdout.splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["1"] and lines[0].endswith(";touch 1")


def test_forms_that_exclude_each_other(program: Path) -> None:
    assert "choose one" in run("--folded", "--json", "--", program, status=2).stderr


def test_opentelemetry_gets_what_the_records_have(program: Path, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2_grpc")
    from gpubpf_otlp import collecting, samples

    with collecting() as collector:
        url = f"http://127.0.0.1:{collector.port}"
        found = records(tmp_path, "--graphs", "--otlp", url, "--", program)
    [request] = collector.requests
    stacks = [one for one in found if one["type"] == "stack"]
    sums = {
        "gpu_time": sum(one["gpu_ns"] for one in stacks),
        "launches": sum(one["launches"] for one in stacks),
    }
    pushed = samples(request)
    assert len(pushed) == 2 * len(stacks) > 10
    for kind, expected in sums.items():
        assert sum(value for (_, of, _, _), value in pushed.items() if of == kind) == expected
    assert {stack[-1] for _, _, _, stack in pushed} == {one["kernel"] for one in stacks}


def test_a_collector_that_is_away_is_one_notice(program: Path) -> None:
    pytest.importorskip("opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2_grpc")
    done = run("--otlp", "http://127.0.0.1:1", "--", program)
    assert done.stderr.count("did not take a profile: unavailable: ") == 1 and "wait_for" in done.stdout


def test_a_hip_program(tmp_path: Path) -> None:
    saxpy = Path(gpubpf_examples.ROOT) / "examples/hip/saxpy"
    if not saxpy.exists():
        pytest.skip("examples/hip is not built here")
    (one,) = (one for one in records(tmp_path, "--", saxpy, "20") if one["type"] == "stack")
    assert (one["kernel"], one["vendor"], one["launches"], one["untimed"]) == ("saxpy", "amd", 20, 0)
    assert "main" in [frame["name"] for frame in one["frames"]] and one["complete"]


LINES = r"""
#include <cuda.h>
__global__ void one(int *at) { at[threadIdx.x]++; }
int *at;
__attribute__((noinline, noclone)) void launch() {
    one<<<1, 32>>>(at);
    asm volatile("");
}
int main() {
    cudaMalloc(&at, 128);
    launch();  // line 11
    for (int i = 0; i < 2; i++)
        launch();  // line 13
    return cudaDeviceSynchronize();
}
"""


def test_native_frames_have_source_lines(tmp_path: Path) -> None:
    program = gpubpf_cuda.build(LINES, tmp_path / "lines", "-g", "-O1")
    found = [one for one in records(tmp_path, "--", program) if one["type"] == "stack"]
    places: Counter[int | None] = Counter()
    for one in found:
        mine = [frame for frame in one["frames"] if frame["name"] in ("main", "launch")]
        assert {(frame["file"], frame["object"]) for frame in mine} == {
            (str(tmp_path / "lines.cu"), str(program))
        }
        assert mine[1]["line"] in (3, 6)  # nvcc gives its stub, which is inlined, the line of the kernel
        places[mine[0]["line"]] += one["launches"]
    assert places == {11: 1, 13: 2}
    text = run("--weight", "launches", "--", program).stdout
    assert re.findall(r"one +main:(\d+) > launch:[36]\n", text) == ["13", "11"]
    samples = run("--folded", "--weight", "launches", "--", program).stdout
    assert sum(int(line.rsplit(" ", 1)[1]) for line in samples.splitlines()) == 3
