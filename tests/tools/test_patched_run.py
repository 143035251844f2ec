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
from patched_programs import LAUNCHES, LOADED, MODULES, NESTED, NESTED_SUM, PROGRAM, SUM

REPOSITORY = Path(__file__).resolve().parents[2]


def tool(name: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / f"tools/{name}.py"), "--device", "sim"]


TOOL = tool("threadhist")
LIBRARY = REPOSITORY / "lib/cudasim/lib/libsanitizer-public.so"

pytestmark = [
    *gpubpf_cuda.needs_cuda,
    pytest.mark.skipif(not LIBRARY.exists(), reason="the embedded device is built without Compute Sanitizer"),
]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("app") / "app"))


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
        ("func:*:*norm*", "does not name the functions that a kernel calls"),
        ("float:*", "no patches at point float"),
        ("store:* (isnan(value))", "machine code does not tell the types of values"),
        ("load:*:const", "no patches at accesses of the space const"),
        ("exit:*:loads (work > 1)", "machine code is not counted, so loads are unknown"),
        ("exit:* (pid == 2)", "its launch's host thread"),
        ("entry:* (args == 2)", "does not give args"),
    ],
)
def test_points_without_patches_are_refused(spec: str, says: str) -> None:
    done = gpucount("kernel:*", spec, "--", "true")
    assert done.returncode == 2 and f"--sass cannot measure '{spec}': " in done.stderr and says in done.stderr


@pytest.mark.parametrize(
    ("tool", "words", "says"),
    [
        ("gpudist", ("-H", "store:*:u32:value"), "machine code does not tell the types of values"),
        ("gpudist", ("-C", "entry:*:u32:lane"), "may wait for another one, which a patch must not"),
        ("gputrace", ("bb:*",), "no patches at point basic_block"),
        ("gputrace", ('barrier:*:leave "%lu", waited',), "does not give waited at point barrier_leave"),
        ("launchlate", ("--cupti",), "--sass and --cupti exclude each other"),
        ("nansnoop", (), "needs results of instructions, which Compute Sanitizer does not give"),
        ("warpdiv", (), "needs branches, at which Compute Sanitizer has no patches"),
        ("barrierlate", (), "needs the time of arrival at barriers, which Compute Sanitizer does not give"),
        ("gpuhang", (), "needs the heads of loops, at which Compute Sanitizer has no patches"),
        ("hipsnoop", (), "has no programs in kernels"),
    ],
)
def test_what_other_tools_refuse(tool: str, words: tuple[str, ...], says: str) -> None:
    command = [sys.executable, str(REPOSITORY / f"tools/{tool}.py"), "--sass", *words, "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


def test_a_library_without_places_of_patches(app: str, tmp_path: Path) -> None:
    """Compute Sanitizer 12.4 does not have sanitizerGetCallbackPcAndSize."""
    older = tmp_path / LIBRARY.name
    found = LIBRARY.read_bytes()
    assert found.count(b"sanitizerGetCallbackPcAndSize\0") >= 1
    older.write_bytes(found.replace(b"sanitizerGetCallbackPcAndSize\0", b"sanitizerGetCallbackPcAndNone\0"))
    out = tmp_path / "out.jsonl"
    done = run("--sass", "--json", "-o", str(out), "--", app, GPUBPF_SANITIZER=str(older))
    assert (done.returncode, done.stdout) == (0, f"{SUM}\n"), done.stderr
    kernels = [r for r in records(out) if r["type"] == "kernel"]
    assert {(r["kernel"], r["threads"]): r["launches"] for r in kernels} == LAUNCHES


def test_calls_of_functions(tiles: str, tmp_path: Path) -> None:
    """A call in the kernel's own code. The function returns in code that belongs to no known kernel."""
    out = tmp_path / "out.jsonl"
    done = gpucount("func:*", "funcret:*", "--json", "-o", str(out), "--", tiles)
    assert done.returncode == 0, done.stderr
    found = records(out)
    counts = {(r["spec"], r["kernel"]): r["threads"] for r in found if r["type"] == "count" and r["threads"]}
    assert counts == {("func:*", "called"): 32}
    assert found[-1]["patch_calls_lost"] == {"launches": 0, "functions": 32}


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
            "--work runs counts how often threads run, which a sample does not show; choose another --work",
        ),
        (("--budget", "5", "--", "true"), "--sass and --budget exclude each other"),
        (("-p", "1"), "--sass needs a COMMAND: nobody has tried yet"),
        (("--list", "file"), "--sass measures what --list shows as SASS only"),
        (("--work", "instructions", "--", "true"), "--sass cannot count instructions, which need PTX"),
        (("--work", "blocks", "--", "true"), "--sass cannot count blocks, which need PTX"),
    ],
)
def test_what_patches_cannot_do_is_refused(words: tuple[str, ...], says: str) -> None:
    done = run("--sass", *words)
    assert done.returncode == 2 and says in done.stderr
