"""The tools on kernels that read textures and write surfaces: the results are those of the program alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = gpubpf_cuda.needs_cuda

PROGRAM = r"""
#include <cstdio>
__global__ void blur(cudaTextureObject_t from, cudaSurfaceObject_t to, int width) {
    int x = threadIdx.x, y = blockIdx.x;
    float4 corners = tex2Dgather<float4>(from, x + 0.5f, y + 0.5f);
    surf2Dwrite(corners.x + tex2D<float>(from, x + 0.25f, y + 0.75f), to, x * 4, y);
}
__global__ void collect(cudaSurfaceObject_t from, float *to, int width) {
    int x = threadIdx.x, y = blockIdx.x;
    to[y * width + x] = surf2Dread<float>(from, x * 4, y);
}
int main() {
    const int width = 40, height = 3;
    float texels[width * height], *to;
    for (int i = 0; i < width * height; i++) texels[i] = i * i % 17;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    cudaArray_t first, second;
    cudaMallocArray(&first, &format, width, height, cudaArrayTextureGather);
    cudaMallocArray(&second, &format, width, height, cudaArraySurfaceLoadStore);
    cudaMemcpy2DToArray(first, 0, 0, texels, width * 4, width * 4, height, cudaMemcpyHostToDevice);
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = first;
    cudaTextureDesc described = {};
    described.addressMode[0] = described.addressMode[1] = cudaAddressModeClamp;
    described.filterMode = cudaFilterModeLinear;
    cudaTextureObject_t texture;
    cudaCreateTextureObject(&texture, &resource, &described, nullptr);
    resource.res.array.array = second;
    cudaSurfaceObject_t surface;
    cudaCreateSurfaceObject(&surface, &resource);
    cudaMalloc(&to, sizeof texels);
    blur<<<height, width>>>(texture, surface, width);
    collect<<<height, width>>>(surface, to, width);
    printf("%s\n", cudaGetErrorName(cudaMemcpy(texels, to, sizeof texels, cudaMemcpyDeviceToHost)));
    for (float texel : texels) printf("%g ", texel);
    return 0;
}
"""
THREADS = 3 * 40


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("textures") / "app", "-lineinfo")


@pytest.fixture(scope="module")
def alone(app: Path) -> str:
    command = [sys.executable, "-m", "cudasim", "--", app]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY / "lib", check=True
    )
    assert done.stdout.startswith("cudaSuccess\n") and len(done.stdout.split()) == 1 + THREADS
    return done.stdout


def measured(tool: str, app: Path, out: Path, *arguments: str) -> tuple[str, list[dict]]:
    command = [sys.executable, REPOSITORY / f"tools/{tool}.py", "--device", "sim", *arguments, "--json"]
    done = subprocess.run([*command, "-o", out, "--", app], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [json.loads(line) for line in out.read_text().splitlines()]


def check(tool: str, app: Path, alone: str, out: Path) -> list[dict]:
    printed, records = measured(tool, app, out)
    assert printed == alone
    summary = records[-1]
    assert (summary["launches_seen"], summary["launches_instrumented"], summary["lost"]) == (2, 2, 0)
    assert summary["not_instrumented"] == {}
    return records


@pytest.mark.every(2)
@pytest.mark.parametrize("tool", ["threadhist", "kernelretsnoop"])
def test_results_stay_the_same(tool: str, app: Path, alone: str, tmp_path: Path) -> None:
    check(tool, app, alone, tmp_path / "out")


@pytest.mark.every(2)
def test_memtrace_counts_them(app: Path, alone: str, tmp_path: Path) -> None:
    records = check("memtrace", app, alone, tmp_path / "out")
    assert records[-1]["not_probed"] == {}
    seen = {(r["kernel"], r["op"], r["opcode"].split(".")[0]): r for r in records if r["type"] == "site"}
    # Each row has a warp of 32 threads and one of 8. tld4 gives four texels, the others one component.
    counts = {key[2]: (r["requests"], r["accesses"], r["bytes"], r["width"]) for key, r in seen.items()}
    assert counts == {
        "tld4": (6, THREADS, 4 * THREADS, 4),
        "tex": (6, THREADS, 4 * THREADS, 4),
        "sust": (6, THREADS, 4 * THREADS, 4),
        "suld": (6, THREADS, 4 * THREADS, 4),
        "st": (6, THREADS, 4 * THREADS, 4),
    }
    assert {key[:2] for key in seen} == {
        *(("blur", op) for op in ("load", "store")),
        *(("collect", op) for op in ("load", "store")),
    }
