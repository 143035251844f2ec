"""memtrace --sass: the same traffic as with PTX. The embedded device has its own Compute Sanitizer library, and runs the PTX."""

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
LIBRARY = REPOSITORY / "lib/cudasim/lib/libsanitizer-public.so"

pytestmark = [
    *gpubpf_cuda.needs_cuda,
    pytest.mark.skipif(not LIBRARY.exists(), reason="the embedded device is built without Compute Sanitizer"),
]

# Each place of `places` has a pattern of its own: contiguous, strided, one address, gathered, with idle lanes, two widths, atomics,
# shared memory with bank conflicts, and local memory. It runs in two shapes, and in a graph.
PROGRAM = r"""
#include <cstdio>
__global__ void places(int *at, double *wide, int n) {
    __shared__ int rows[32 * 33];
    int t = threadIdx.x, mine[8];
    int sum = at[t] + at[t * 4] + at[7] + at[t * 37 % 101];
    if (t % 3 == 0) sum += at[t + 200];
    wide[t] = wide[t] + 1;
    atomicAdd(at + 900 + t / 16, 1);
    rows[t % 32 * 32] = sum;
    __syncthreads();
    sum += rows[t % 32];
    for (int i = 0; i < 8; i++) mine[(i + n) % 8] = sum + i;
    at[512 + t] = mine[n];
}
int main() {
    int *at, sum = 0;
    double *wide;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    if (cudaMalloc(&at, 4096) || cudaMalloc(&wide, 4096) || cudaStreamCreate(&stream)) return 1;
    if (cudaMemset(at, 0, 4096) || cudaMemset(wide, 0, 4096)) return 2;
    places<<<2, 64, 0, stream>>>(at, wide, 3);
    places<<<1, 40, 0, stream>>>(at, wide, 3);
    if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)) return 3;
    places<<<1, 96, 0, stream>>>(at, wide, 3);
    if (cudaStreamEndCapture(stream, &graph) || cudaGraphInstantiate(&exec, graph, 0)) return 4;
    for (int i = 0; i < 2; i++) if (cudaGraphLaunch(exec, stream)) return 5;
    if (cudaDeviceSynchronize() || cudaMemcpy(&sum, at + 900, 4, cudaMemcpyDeviceToHost)) return 6;
    printf("%d\n", sum);
}
"""
SUM = 16 * (2 + 1 + 2)  # lanes 0 to 15 of each block add 1 to the first of these numbers
SUMS = ("requests", "bytes", "sectors", "sectors_least", "wasted_bytes", "shared_requests")
THREADS = 2 * 64 + 40 + 2 * 96


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("app") / "app"))


def memtrace(*words: str, hidden: bool = True) -> subprocess.CompletedProcess[str]:
    """Run memtrace; with --sass if the PTX is hidden."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDASIM_SASS"}
    environment |= {"CUDASIM_SASS": "1"} if hidden else {}
    tool = [sys.executable, str(REPOSITORY / "tools/memtrace.py"), "--device", "sim"]
    command = [*tool, *(["--sass"] if hidden else []), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_same_traffic_as_with_ptx(app: str, tmp_path: Path) -> None:
    found: dict[bool, list[Any]] = {}
    for hidden in (True, False):
        out = tmp_path / str(hidden)
        done = memtrace("--json", "-o", str(out), "--", app, hidden=hidden)
        assert (done.returncode, done.stdout) == (0, f"{SUM}\n"), done.stderr
        records = [json.loads(line) for line in out.read_text().splitlines()]
        places = [r for r in records if r["type"] == "site" and r["space"] != "const"]
        own = ("site", "opcode", "source", "ptx_line", "offset", "advice", "share")  # of one way
        rows = [
            {name: value for name, value in place.items() if name not in (*own, "pid")} for place in places
        ]
        found[hidden] = sorted(json.dumps(row, sort_keys=True) for row in rows)
        (kernel,) = (r for r in records if r["type"] == "kernel")
        assert kernel["launches"] == 5 - 1 and records[-1]["lost"] == 0
        if hidden:
            assert all(place["offset"] == 16 * place["site"] and not place["ptx_line"] for place in places)
    assert found[True] == found[False]
    spaces = {(row["op"], row["space"]) for row in map(json.loads, found[True])}
    assert {("load", "global"), ("store", "local"), ("load", "shared"), ("atomic", "global")} <= spaces
    assert sum(row["bytes"] for row in map(json.loads, found[True]) if row["width"] == 8) == 2 * 8 * THREADS


def test_sampled_blocks(app: str, tmp_path: Path) -> None:
    """Of all blocks, everything is counted. Of some, each block of the chosen ones counts as a whole."""
    found = {}
    for share in ("", "1/1", "1/2"):
        out = tmp_path / "out"
        words = ("--sample-blocks", share, "--seed", "3") if share else ()
        done = memtrace(*words, "--json", "-o", str(out), "--", app)
        assert (done.returncode, done.stdout) == (0, f"{SUM}\n"), done.stderr
        records = [json.loads(line) for line in out.read_text().splitlines()]
        (found[share],) = (record for record in records if record["type"] == "kernel")
    whole, every, half = found.values()
    assert every["sampled"] | {"seed": 0} == {"unit": "block", "one_in": 1, "seed": 0, "chosen": 5, "of": 5}
    assert [every[name] for name in SUMS] == [whole[name] for name in SUMS]
    assert half["sampled"]["of"] == 5 and 0 <= half["sampled"]["chosen"] <= 5


def test_chosen_threads_and_the_table(app: str) -> None:
    done = memtrace("--thread", "0:7", "-v", "--", app)
    assert done.returncode == 0, done.stderr
    assert "instruction +0x" in done.stdout and "st.global" in done.stdout and "atom.global" in done.stdout


@pytest.mark.parametrize("words", [("-e",), ("--footprint",), ("--heatmap", "a.svg")])
def test_what_patches_cannot_do_is_refused(words: tuple[str, ...]) -> None:
    done = memtrace(*words, "--", "true")
    assert done.returncode == 2
    assert (
        "--sass adds up accesses by instruction; leave out -e, --parquet, --heatmap and --footprint"
        in done.stderr
    )
