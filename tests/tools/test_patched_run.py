"""threadhist --sass: patches count in kernels without PTX. The embedded device has its own library for that, and runs the PTX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(REPOSITORY / "tools/threadhist.py"), "--device", "sim"]
LIBRARY = REPOSITORY / "lib/cudasim/lib/libsanitizer-public.so"

pytestmark = [
    *gpubpf_cuda.needs_cuda,
    pytest.mark.skipif(not LIBRARY.exists(), reason="the embedded device is built without Compute Sanitizer"),
]

# How often each kernel is launched: see LAUNCHES. Threads leave `ways` in three ways, and `deep` from a function that is not inlined.
PROGRAM = r"""
#include <cstdio>
__device__ __noinline__ int down(int n) { return n ? down(n - 1) + threadIdx.x % 2 : 0; }
__global__ void ways(int *out) {
    if (threadIdx.x == 3) return;
    atomicAdd(out, 1);
    if (threadIdx.x % 2) return;
    atomicAdd(out, 1);
}
__global__ void deep(int *out) { if (down(threadIdx.x % 4) == 77) *out = 0; }
__global__ void other(int *out) { atomicAdd(out, 1); }
int main() {
    int *out, sum = 0;
    cudaStream_t streams[2];
    if (cudaMalloc(&out, 4) || cudaMemset(out, 0, 4)) return 1;
    for (auto &s : streams) cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    for (int i = 0; i < 5; i++) ways<<<dim3(2, 2), dim3(8, 3), 0, streams[i % 2]>>>(out);
    ways<<<3, 40>>>(out);
    deep<<<2, 33, 0, streams[0]>>>(out);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    if (cudaDeviceSynchronize() || cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal)) return 2;
    ways<<<3, 40, 0, streams[0]>>>(out);
    deep<<<1, 64, 0, streams[0]>>>(out);
    other<<<2, 8, 0, streams[0]>>>(out);
    if (cudaStreamEndCapture(streams[0], &graph) || cudaGraphInstantiate(&exec, graph, 0)) return 3;
    for (int i = 0; i < 4; i++) if (cudaGraphLaunch(exec, streams[1])) return 4;
    if (cudaDeviceSynchronize() || cudaMemcpy(&sum, out, 4, cudaMemcpyDeviceToHost)) return 5;
    printf("%d\n", sum);
}
"""
LAUNCHES = {  # kernel, threads of the grid → launches
    ("ways", 2 * 2 * 8 * 3): 5,
    ("ways", 3 * 40): 1 + 4,
    ("deep", 2 * 33): 1,
    ("deep", 64): 4,
    ("other", 16): 4,
}
SUM = 5 * 4 * (3 * 7 + 3 * 4) + 5 * 3 * (39 + 20) + 4 * 16


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("app") / "app"))


# modules ROUNDS MILLISECONDS: in two contexts, loads a module, launches its kernel `first`, and loads another with `second` in its
# place, again and again. The launches of a round are 1 in the first context and 2 in the second. Prints the contexts' sums.
MODULES = r"""
#include <cuda.h>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
static const char *text[] = {"first", "second"};
static const char *form = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry %s(.param .u64 p) {\n"
    ".reg .b64 %%at; .reg .b32 %%x; .reg .pred %%odd; ld.param.u64 %%at, [p]; mov.u32 %%x, %%tid.x; and.b32 %%x, %%x, 1;\n"
    "setp.eq.u32 %%odd, %%x, 1; @%%odd bra OUT; red.global.add.u32 [%%at], 1; ret;\nOUT: red.global.add.u32 [%%at], 2; exit; }\n";
#define CHECK(x) do { if (int r = (x)) return printf("%s: %d\n", #x, r), 1; } while (0)
int main(int, char **argv) {
    CUcontext contexts[2];
    CUdeviceptr sums[2];
    CHECK(cuInit(0));
    for (int c = 0; c < 2; c++) {
        CHECK(cuCtxCreate(&contexts[c], nullptr, 0, 0));
        CHECK(cuMemAlloc(&sums[c], 4));
        CHECK(cuMemsetD32(sums[c], 0, 1));
    }
    for (int round = 0; round < atoi(argv[1]); round++)
        for (int c = 0; c < 2; c++) {
            CHECK(cuCtxSetCurrent(contexts[c]));
            for (int k = 0; k < 2; k++) {
                char ptx[1000];
                CUmodule module;
                CUfunction kernel;
                void *arguments[] = {&sums[c]};
                snprintf(ptx, sizeof ptx, form, text[k]);
                CHECK(cuModuleLoadData(&module, ptx));
                CHECK(cuModuleGetFunction(&kernel, module, text[k]));
                for (int i = 0; i <= c; i++) CHECK(cuLaunchKernel(kernel, 2, 1, 1, k ? 4 : 6, 1, 1, 0, 0, arguments, 0));
                CHECK(cuCtxSynchronize());
                CHECK(cuModuleUnload(module));
            }
            usleep(1000 * atoi(argv[2]));
        }
    for (int c = 0; c < 2; c++) {
        unsigned sum = 0;
        CHECK(cuCtxSetCurrent(contexts[c]));
        CHECK(cuMemcpyDtoH(&sum, sums[c], 4));
        printf("%u\n", sum);
        CHECK(cuCtxDestroy(contexts[c]));
    }
}
"""


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDASIM_SASS": "1"} | variables
    return subprocess.run([*TOOL, *words], env=environment, capture_output=True, text=True, timeout=120)


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_every_run_of_every_thread_is_counted(app: str, tmp_path: Path) -> None:
    """In streams and in a graph, in several shapes, for threads that leave in several ways."""
    out = tmp_path / "out.jsonl"
    done = run("--sass", "--json", "-o", str(out), "--", app)
    assert done.returncode == 0 and done.stdout == f"{SUM}\n", done.stderr
    found = records(out)
    kernels = [r for r in found if r["type"] == "kernel"]
    assert {(r["kernel"], r["threads"]): r["launches"] for r in kernels} == LAUNCHES
    assert all(r["runs"] == r["launches"] * r["threads"] == r["work"] for r in kernels)
    assert all(r["work_kind"] == "runs" for r in kernels)
    threads = [r for r in found if r["type"] == "thread"]
    assert len(threads) == sum(threads for _, threads in LAUNCHES)
    shapes = {(r["kernel"], *r["grid"], *r["block_dim"]): r["launches"] for r in kernels}
    assert all(r["runs"] == shapes[(r["kernel"], *r["grid"], *r["block_dim"])] for r in threads)
    summary = found[-1]
    assert summary["launches_seen"] == summary["launches_instrumented"] == sum(LAUNCHES.values())
    assert "not exact" not in done.stderr


def test_the_same_with_ptx(app: str, tmp_path: Path) -> None:
    """Copies and patches count the same, and a program with PTX is not patched."""
    found = {}
    for name, words in {"copies": (), "patches": ("--sass",)}.items():
        out = tmp_path / name
        variables = {"GPUBPF_SANITIZER": "/nowhere"} if words == () else {}
        done = run("--work", "runs", "--json", "-o", str(out), *words, "--", app, **variables)
        if not words:
            assert "SASS only" in json.dumps(records(out)[-1]["not_instrumented"])
            environment = {k: v for k, v in os.environ.items() if k != "CUDASIM_SASS"}
            done = subprocess.run(
                [*TOOL, "--work", "runs", "--json", "-o", str(out), "--", app],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
        assert done.returncode == 0, done.stderr
        keys = ("type", "kernel", "grid", "block_dim", "block", "thread", "runs", "work")
        rows = [[r.get(key) for key in keys] for r in records(out) if r["type"] == "thread"]
        found[name] = sorted(map(json.dumps, rows))
    assert found["copies"] == found["patches"]


def test_chosen_kernels_and_threads(app: str, tmp_path: Path) -> None:
    """Kernels of the same module that do not match, and threads that are not chosen, are not counted."""
    out = tmp_path / "out.jsonl"
    words = ("--kernel", "ways", "--thread", "3:4,1", "--json", "-o", str(out))
    done = run("--sass", *words, "--", app)
    assert done.returncode == 0, done.stderr
    found = records(out)
    assert {r["kernel"] for r in found if "kernel" in r} == {"ways"}
    threads = [r for r in found if r["type"] == "thread"]
    assert {tuple(r["thread"]) for r in threads} == {(3, 1, 0), (4, 1, 0)}
    assert found[-1]["launches_matched"] == 10


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> str:
    program = tmp_path_factory.mktemp("modules") / "modules"
    return str(gpubpf_cuda.build(MODULES, program, f"-L{LIBRARY.parent}", "-lcuda"))


def test_code_in_the_place_of_other_code(modules: str, tmp_path: Path) -> None:
    """A module may be unloaded, and another one loaded where its code was. Each context has its own table and patches."""
    out = tmp_path / "out.jsonl"
    done = run("--sass", "--json", "-o", str(out), "--", modules, "3", "0")
    assert (done.returncode, done.stdout) == (0, "90\n180\n"), done.stderr
    kernels = [r for r in records(out) if r["type"] == "kernel"]
    assert {r["kernel"]: (r["launches"], r["runs"]) for r in kernels} == {
        "first": (9, 9 * 12),
        "second": (9, 9 * 8),
    }


def test_the_measurement_ends_before_the_program(modules: str, tmp_path: Path) -> None:
    """The patches are removed at a moment between two launches, so all runs belong to counted launches. The program goes on."""
    out = tmp_path / "out.jsonl"
    done = run("--sass", "-d", "0.5", "--json", "-o", str(out), "--", modules, "60", "20")
    assert (done.returncode, done.stdout) == (0, f"{60 * 30}\n{60 * 60}\n"), done.stderr
    assert "not exact" not in done.stderr
    kernels = [r for r in records(out) if r["type"] == "kernel"]
    assert kernels and all(r["runs"] == r["launches"] * r["threads"] for r in kernels)


def test_the_tool_is_killed(modules: str) -> None:
    """The agent removes the patches itself."""
    words = [*TOOL, "--sass", "-o", "/dev/null", "--", modules, "60", "20"]
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDASIM_SASS": "1"},
    ) as tool:
        assert tool.stdout is not None and tool.stderr is not None
        assert any("attached to" in line for line in tool.stderr)
        tool.kill()
        assert tool.stdout.read() == f"{60 * 30}\n{60 * 60}\n"  # the program has the same output


def test_without_the_library(app: str) -> None:
    """A missing library is a notice, and the program runs as without a tool."""
    done = run("--sass", "--", app, GPUBPF_SANITIZER="/nowhere/libsanitizer-public.so")
    assert done.returncode == 0 and f"{SUM}\n" in done.stdout
    assert "kernels without PTX are not measured: libsanitizer-public.so cannot be loaded" in done.stderr


def test_another_profiler_is_named(app: str) -> None:
    done = run("--sass", "--", app, NSYS_TARGET_STD="1")
    assert done.returncode == 0 and f"{SUM}\n" in done.stdout
    assert "another profiler is in the process (NSYS_TARGET_STD); end it" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--launch", "2:3", "--", "true"), "--sass and --launch exclude each other"),
        (("--no-graphs", "--", "true"), "--sass and --no-graphs exclude each other"),
        (("--sample", "2", "--", "true"), "--sass and --sample exclude each other"),
        (("--budget", "5", "--", "true"), "--sass and --budget exclude each other"),
        (("--sample-blocks", "1/4", "--", "true"), "--sass and --sample-blocks exclude each other"),
        (("-p", "1"), "a running program cannot be patched"),
        (("--list", "file"), "--sass needs a COMMAND"),
        (("--work", "loads", "--", "true"), "--sass counts no loads, which need PTX"),
    ],
)
def test_what_patches_cannot_do_is_refused(words: tuple[str, ...], says: str) -> None:
    done = run("--sass", *words)
    assert done.returncode == 2 and says in done.stderr
