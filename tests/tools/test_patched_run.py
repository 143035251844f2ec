"""threadhist and gpucount --sass: patches in kernels without PTX. The embedded device has its own library, and runs the PTX."""

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


def tool(name: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / f"tools/{name}.py"), "--device", "sim"]


TOOL = tool("threadhist")
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
    if (cudaMalloc(&out, 4) || cudaMemset(out, 0, 4) || cudaDeviceSynchronize()) return 1;
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


DRIVER = r"""
#include <cuda.h>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
#include <string>
static const char *text[] = {"first", "second"};
static const char *form = ".visible .entry %s(.param .u64 p) {\n"
    ".reg .b64 %%at; .reg .b32 %%x; .reg .pred %%odd; ld.param.u64 %%at, [p]; mov.u32 %%x, %%tid.x; and.b32 %%x, %%x, 1;\n"
    "setp.eq.u32 %%odd, %%x, 1; @%%odd bra OUT; red.global.add.u32 [%%at], 1; ret;\nOUT: red.global.add.u32 [%%at], 2; exit; }\n";
static std::string ptx(int first, int last) {
    std::string made = ".version 7.0\n.target sm_70\n.address_size 64\n";
    for (int k = first; k <= last; k++) {
        char kernel[1000];
        snprintf(kernel, sizeof kernel, form, text[k]);
        made += kernel;
    }
    return made;
}
#define CHECK(x) do { if (int r = (x)) return printf("%s: %d\n", #x, r), 1; } while (0)
"""

# modules ROUNDS MILLISECONDS: in two contexts, loads a module, launches its kernel `first`, and loads another with `second` in its
# place, again and again. The launches of a round are 1 in the first context and 2 in the second. Prints the contexts' sums.
MODULES = (
    DRIVER
    + r"""
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
                CUmodule module;
                CUfunction kernel;
                void *arguments[] = {&sums[c]};
                CHECK(cuModuleLoadData(&module, ptx(k, k).c_str()));
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
)
# libraries ROUNDS: loads a library with both kernels, launches `first` three times by its handles, in odd rounds `second` once, and
# unloads the library. Then twice the same image as a module, with 3 and 1 launches of `second`. Prints the sum.
LOADED = (
    DRIVER
    + r"""
int main(int, char **argv) {
    CUcontext context;
    CUdeviceptr sum;
    CHECK(cuInit(0));
    CHECK(cuCtxCreate(&context, nullptr, 0, 0));
    CHECK(cuMemAlloc(&sum, 4));
    CHECK(cuMemsetD32(sum, 0, 1));
    void *arguments[] = {&sum};
    const std::string image = ptx(0, 1);
    for (int round = 0; round < atoi(argv[1]); round++) {
        CUlibrary library;
        CUkernel kernel;
        CUfunction function;
        CUmodule module;
        CHECK(cuLibraryLoadData(&library, image.c_str(), 0, 0, 0, 0, 0, 0));
        CHECK(cuLibraryGetKernel(&kernel, library, "first"));
        CHECK(cuKernelGetFunction(&function, kernel));
        CHECK(cuLaunchKernel(function, 2, 1, 1, 6, 1, 1, 0, 0, arguments, 0));
        for (int i = 0; i < 2; i++)
            CHECK(cuLaunchKernel((CUfunction)kernel, 2, 1, 1, 6, 1, 1, 0, 0, arguments, 0));
        if (round % 2) {
            CHECK(cuLibraryGetModule(&module, library));
            CHECK(cuModuleGetFunction(&function, module, "second"));
            CHECK(cuLaunchKernel(function, 2, 1, 1, 4, 1, 1, 0, 0, arguments, 0));
        }
        CHECK(cuCtxSynchronize());
        CHECK(cuLibraryUnload(library));
        for (int launches : {3, 1}) {
            CHECK(cuModuleLoadData(&module, image.c_str()));
            CHECK(cuModuleGetFunction(&function, module, "second"));
            for (int i = 0; i < launches; i++)
                CHECK(cuLaunchKernel(function, 2, 1, 1, 4, 1, 1, 0, 0, arguments, 0));
            CHECK(cuCtxSynchronize());
            CHECK(cuModuleUnload(module));
        }
    }
    unsigned found = 0;
    CHECK(cuMemcpyDtoH(&found, sum, 4));
    printf("%u\n", found);
}
"""
)
# Each thread of `parent` launches `child`, which the host launches, too: in the same shape and in others.
NESTED = r"""
#include <cstdio>
__global__ void child(int *out) { if (threadIdx.x % 2) return; atomicAdd(out, 1); }
__global__ void parent(int *out) {
    child<<<2, 8>>>(out);
    child<<<1, threadIdx.x % 3 + 1>>>(out);
}
__global__ void other(int *out) { atomicAdd(out, 1); }
int main() {
    int *out, sum = 0;
    if (cudaMalloc(&out, 4) || cudaMemset(out, 0, 4)) return 1;
    for (int i = 0; i < 3; i++) {
        child<<<2, 8>>>(out);  // first: the agent knows a shape from the host's first launch on
        parent<<<2, 5>>>(out);
        other<<<2, 5>>>(out);
    }
    if (cudaDeviceSynchronize() || cudaMemcpy(&sum, out, 4, cudaMemcpyDeviceToHost)) return 2;
    printf("%d\n", sum);
}
"""
# Each round has 10 threads that launch: 8 runs of the atomic, and 1, or 2 in every third thread of a block.
NESTED_SUM = 3 * (10 * 8 + 2 * (1 + 1 + 2 + 1 + 1)) + 3 * 8 + 3 * 10


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDASIM_SASS": "1"} | variables
    return subprocess.run([*TOOL, *words], env=environment, capture_output=True, text=True, timeout=120)


def gpucount(*words: str, hidden: bool = True) -> subprocess.CompletedProcess[str]:
    """Run gpucount; with --sass if the PTX is hidden."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDASIM_SASS"}
    environment |= {"CUDASIM_SASS": "1"} if hidden else {}
    command = [*tool("gpucount"), *(["--sass"] if hidden else []), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


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


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_libraries_and_modules_that_are_loaded_again(loading: str, tmp_path: Path) -> None:
    """Functions may get their place at their first launch, and the next module that of the one before."""
    program = gpubpf_cuda.build(LOADED, tmp_path / "loaded", f"-L{LIBRARY.parent}", "-lcuda")
    out = tmp_path / "out.jsonl"
    words = ("--sass", "--json", "-o", str(out), "--", str(program), "4")
    done = run(*words, CUDASIM_HOSTILE="1", CUDA_MODULE_LOADING=loading)
    first, second = 4 * 3, 4 * 4 + 2
    assert (done.returncode, done.stdout) == (0, f"{18 * first + 12 * second}\n"), done.stderr
    found = records(out)
    assert {r["kernel"]: (r["launches"], r["runs"]) for r in found if r["type"] == "kernel"} == {
        "first": (first, first * 12),
        "second": (second, second * 8),
    }
    assert "patch_calls_lost" not in found[-1] and not found[-1]["lost"]


@pytest.mark.parametrize("hostile", ["0", "1"])
def test_grids_that_kernels_launch(hostile: str, tmp_path: Path) -> None:
    """A patch does not see who launched its grid. The kernels that only the host launches are exact, and the rest is reported."""
    flags = ("-rdc=true", "-arch=sm_80", "-lcudadevrt")
    program = gpubpf_cuda.build(NESTED, tmp_path / "nested", *flags)
    out = tmp_path / "out.jsonl"
    done = run("--sass", "--json", "-o", str(out), "--", str(program), CUDASIM_HOSTILE=hostile)
    assert (done.returncode, done.stdout) == (0, f"{NESTED_SUM}\n"), done.stderr
    found = records(out)
    by_kernels = 3 * 10 * 16  # threads in the shape that the host launches
    kernels = {r["kernel"]: (r["launches"], r["runs"]) for r in found if r["type"] == "kernel"}
    assert kernels == {"parent": (3, 30), "other": (3, 30), "child": (3, 3 * 16 + by_kernels)}
    assert (
        f"child: {48 + by_kernels} runs of threads were counted, but 48 launched; kernels may have launched it, too;"
        " the rows of this kernel are not exact"
    ) in done.stderr
    assert done.stderr.count("not exact") == 1
    assert found[-1]["patch_calls_lost"] == {"launches": 3 * 2 * (1 + 2 + 3 + 1 + 2), "functions": 0}


# threadhist, with a patch that reads from an address that is not mapped.
FAULTY = """
import sys
sys.path.insert(0, LIBRARY)
from gpubpf.lower import patch_function as made
made._FIND = (".reg .b64 %gpubpf_0bad;", "mov.u64 %gpubpf_0bad, 16;", "ld.global.u64 %gpubpf_0bad, [%gpubpf_0bad];", *made._FIND)
from gpubpf.tools.threadhist import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_fault_in_a_patch_is_that_of_the_tool(app: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    code = FAULTY.replace("LIBRARY", repr(str(REPOSITORY / "lib")))
    words = ("--device", "sim", "--sass", "--json", "-o", str(out), "--", app)
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=os.environ | {"CUDASIM_SASS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "the tool's patch in kernel ways(int*) failed, not the program: illegal address" in done.stderr
    assert "run it without --sass" in done.stderr
    (fault,) = records(out)[-1]["device_faults"]
    assert (fault["patch"], fault["kernel"], fault["address"]) == (True, "ways", "0x10")


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


# `tile` is launched 3 times, and 2 times in a graph: 4 blocks of 64 threads, every fourth of which has an atomic. The only store of
# `called` is in a function that is not inlined: 32 threads. `large` has 2^20 threads.
TILES = r"""
#include <cstdio>
__device__ __noinline__ void put(int *at, int n) { *at = n; }
__global__ void tile(const int *in, int *out, int *total) {
    __shared__ int rows[64];
    int i = blockIdx.x * 64 + threadIdx.x;
    rows[threadIdx.x] = in[i];
    __syncthreads();
    int sum = rows[63 - threadIdx.x];
    if (threadIdx.x % 4 == 0) atomicAdd(total, sum);
    out[i] = sum;
}
__global__ void called(int *out) { put(out + threadIdx.x, threadIdx.x); }
__global__ void large() {}
int main(int, char **argv) {
    int *memory, sum = 0;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    if (cudaMalloc(&memory, 4096) || cudaMemset(memory, 0, 4096) || cudaStreamCreate(&stream)) return 1;
    int *in = memory, *out = memory + 256, *total = memory + 512;
    called<<<1, 32, 0, stream>>>(in);
    for (int i = 0; i < 3; i++) tile<<<4, 64, 0, stream>>>(in, out, total);
    if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)) return 2;
    tile<<<4, 64, 0, stream>>>(in, out, total);
    if (cudaStreamEndCapture(stream, &graph) || cudaGraphInstantiate(&exec, graph, 0)) return 3;
    for (int i = 0; i < 2; i++) if (cudaGraphLaunch(exec, stream)) return 4;
    if (argv[1]) large<<<1024, 1024>>>();
    if (cudaDeviceSynchronize() || cudaMemcpy(&sum, total, 4, cudaMemcpyDeviceToHost)) return 5;
    printf("%d\n", sum);
}
"""
TILES_SUM = 5 * sum(range(3, 32, 4))  # thread 0, 4, 8, … read rows 63, 59, …; those below 32 have values
WARPS, THREADS = 5 * 8, 5 * 256  # of `tile`
COUNTS = {  # specification → count and threads of `tile`
    "kernel:tile": (5, THREADS),
    "entry:tile": (WARPS, THREADS),
    "exit:tile": (WARPS, THREADS),
    "exit:tile (block.x == 1)": (WARPS // 4, THREADS // 4),
    "load:tile:global": (WARPS, THREADS),
    "store:tile:global (lane == 3)": (WARPS, WARPS),
    "atomic:tile": (WARPS, THREADS // 4),
    "load:tile:shared": (WARPS, THREADS),
    "store:tile:shared (address % 8 == 4)": (WARPS, THREADS // 2),
    "access:tile:st": (2 * WARPS, 2 * THREADS),
    "access:tile (width == 4 && effect & GPU_WRITES)": (3 * WARPS, 2 * THREADS + THREADS // 4),
    "barrier:tile": (WARPS, THREADS),
    "barrier:tile:leave (barrier == 0)": (WARPS, THREADS),
}


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(gpubpf_cuda.build(TILES, tmp_path_factory.mktemp("tiles") / "tiles"))


@pytest.mark.parametrize("hidden", [True, False])
def test_counts_at_points(tiles: str, hidden: bool, tmp_path: Path) -> None:
    """All specifications are in one run, so several programs run at one instruction. Copies count the same."""
    out = tmp_path / "out.jsonl"
    done = gpucount(*COUNTS, "--json", "-o", str(out), "--", tiles, hidden=hidden)
    assert (done.returncode, done.stdout) == (0, f"{TILES_SUM}\n"), done.stderr
    found = records(out)
    counts = {r["spec"]: (r["count"], r["threads"]) for r in found if r["type"] == "count"}
    assert counts == COUNTS
    assert found[-1]["lost"] == 0 and "patch_calls_lost" not in found[-1]


def test_accesses_in_functions_are_reported(tiles: str, tmp_path: Path) -> None:
    """A function that is not inlined has code of its own, so its kernel is unknown."""
    out = tmp_path / "out.jsonl"
    done = gpucount("store:*:global", "--json", "-o", str(out), "--", tiles)
    assert done.returncode == 0
    found = records(out)
    counts = {r["kernel"]: r["threads"] for r in found if r["type"] == "count"}
    assert counts == {"tile": THREADS, "called": 0}
    assert found[-1]["patch_calls_lost"] == {"launches": 0, "functions": 32} and found[-1]["lost"] == 32
    assert "not counted, 32 times in functions that kernels call (not inlined)" in done.stderr


def test_calls_in_launches_that_are_not_measured(tiles: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = run("--sass", "--map-memory", "1M", "--json", "-o", str(out), "--", tiles, "large")
    assert done.returncode == 0
    summary = records(out)[-1]
    assert summary["launches_matched"] - summary["launches_instrumented"] == 1
    assert summary["patch_calls_lost"] == {"launches": 1 << 20, "functions": 0}
    assert "not counted, 1,048,576 times in launches that could not be measured" in done.stderr


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("bb:*", "no patches at point basic_block"),
        ("func:*", "no patches at point function_entry"),
        ("float:*", "no patches at point float"),
        ("store:* (isnan(value))", "no patches at point value"),
        ("load:*:const", "no patches at accesses of the space const"),
        ("access:*:cp", "no patches at accesses of the kind async"),
        ("exit:*:loads (work > 1)", "machine code is not counted, so loads are unknown"),
        ("exit:* (launch == 2)", "the number of its launch"),
    ],
)
def test_points_without_patches_are_refused(spec: str, says: str) -> None:
    done = gpucount("kernel:*", spec, "--", "true")
    assert done.returncode == 2 and f"--sass cannot measure '{spec}': " in done.stderr and says in done.stderr


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
        (
            ("--sample-blocks", "1/4", "--", "true"),
            "--sass counts how often threads run, which a sample does not show",
        ),
        (("--budget", "5", "--", "true"), "--sass and --budget exclude each other"),
        (("-p", "1"), "a running program cannot be patched"),
        (("--list", "file"), "--sass needs a COMMAND"),
        (("--work", "loads", "--", "true"), "--sass counts no loads, which need PTX"),
    ],
)
def test_what_patches_cannot_do_is_refused(words: tuple[str, ...], says: str) -> None:
    done = run("--sass", *words)
    assert done.returncode == 2 and says in done.stderr
