"""warpdiv's counts of generated kernels are those of an independent count over their PTX, lane by lane."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import diverging
import gpubpf_cuda
from gpubpf.ebpf.bytecode import REGIONS
from gpubpf.ptx.flow import Flow
from gpubpf.ptx.parser import parse
from gpubpf.ptx.regions import Regions

pytestmark = gpubpf_cuda.needs_cuda
TOOL = Path(__file__).resolve().parents[2] / "tools/warpdiv.py"
BLOCKS, THREADS = 2, 72  # the last warp of a block has 8 lanes
KERNELS = 4  # of a module
# Loads a file with PTX, launches the kernels that the arguments name, and prints a sum of the results.
APP = r"""
#include <cuda.h>
#include <cstdio>
#include <cstdlib>
int main(int argc, char **argv) {
    CUdevice device; CUcontext context; CUmodule module; CUdeviceptr out;
    static unsigned host[BLOCKS * THREADS];
    if (cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context)) return 1;
    if (cuModuleLoad(&module, argv[1]) || cuMemAlloc(&out, sizeof host)) return 2;
    for (int i = 2; i < argc; i++) {
        CUfunction kernel; void *arguments[] = {&out};
        unsigned sum = 0;
        if (cuMemsetD8(out, 0, sizeof host) || cuModuleGetFunction(&kernel, module, argv[i])) return 3;
        if (cuLaunchKernel(kernel, BLOCKS, 1, 1, THREADS, 1, 1, 0, 0, arguments, 0)) return 4;
        if (cuMemcpyDtoH(host, out, sizeof host)) return 5;
        for (unsigned word : host) sum = sum * 31 + word;
        printf("%u\n", sum);
    }
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = APP.replace("BLOCKS", str(BLOCKS)).replace("THREADS", str(THREADS))
    return gpubpf_cuda.build(
        source, tmp_path_factory.mktemp("loader") / "loader", f"-L{gpubpf_cuda.LIBRARIES}", "-lcuda"
    )


def measured(app: Path, place: Path, text: str, kernels: list[str]) -> list[dict[str, Any]]:
    """Return warpdiv's records of these kernels of a module, whose results are those of a run without it."""
    (place / "kernels.ptx").write_text(text)
    program = [app, place / "kernels.ptx", *kernels]
    on_cudasim = os.environ | {"LD_LIBRARY_PATH": str(gpubpf_cuda.LIBRARIES)}
    alone = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True, env=on_cudasim)
    command = [sys.executable, TOOL, "--device", "sim", "--json", "-o", place / "out", "--", *program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"CUDASIM_CLOCK": "virtual"}
    )
    assert (done.returncode, done.stdout) == (0, alone.stdout), done.stderr
    return [json.loads(line) for line in (place / "out").read_text().splitlines()]


@pytest.mark.parametrize("first", range(0, 80, KERNELS))
@pytest.mark.parametrize("calls", [False, True], ids=["plain", "calls"])
@pytest.mark.every(20)
def test_counts_are_those_of_the_lanes(app: Path, tmp_path: Path, first: int, calls: bool) -> None:
    seeds = range(first, first + KERNELS)
    text = diverging.module(seeds, calls)
    parsed = parse(text)
    found = measured(app, tmp_path, text, [f"k{seed}" for seed in seeds])
    flows = {name: Flow(function.body or ()) for name, function in parsed.functions.items()}
    first_inside = max(Regions(flows[f"k{seed}"], REGIONS).end for seed in seeds)
    regions = {name: Regions(flow, REGIONS) for name, flow in flows.items()}
    if calls:
        regions["helper"] = Regions(flows["helper"], REGIONS, first_inside, called=True)
    numbers = {
        (name, branch): number for name, of in regions.items() for branch, number in of.numbers.items()
    }
    diverged = 0
    for seed in seeds:
        right = diverging.Count(flows)
        for lanes in diverging.traces(parsed, f"k{seed}", BLOCKS, THREADS):
            right.warp(lanes)
        # Too many branches that parted lanes at once.
        is_known = all(numbers[branch] < REGIONS for branch in +right.diverged)
        (kernel,) = (r for r in found if r["type"] == "kernel" and r["kernel"] == f"k{seed}")
        assert (kernel["instructions"], kernel["lane_instructions"]) == (
            right.instructions,
            right.lane_instructions,
        )
        expected = {
            (flows[name].instruction(index).line): (
                count,
                right.diverged[name, index],
                right.taken[name, index],
                right.lanes[name, index] - right.taken[name, index],
                right.lost[name, index] if is_known else None,
            )
            for (name, index), count in right.executed.items()
        }
        fields = ("executed", "diverged", "taken", "not_taken", "lost")
        branches = [r for r in found if r["type"] == "branch" and r["kernel"] == f"k{seed}"]
        assert {
            int(r["source"].removeprefix("PTX line ")): tuple(r[f] for f in fields) for r in branches
        } == expected, f"k{seed}"
        diverged += sum(right.diverged.values())
    assert diverged
