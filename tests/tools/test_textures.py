"""Programs at accesses to textures and surfaces: how many, and at which coordinates."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = gpubpf_cuda.needs_cuda

# Two blocks of 32 threads. Thread i reads texel (i % 8, i / 8) of an image of 8 x 8, and even threads write the surface.
APP = r"""
#include <cstdio>
__global__ void copies(cudaTextureObject_t from, cudaSurfaceObject_t to) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float texel = tex2D<float>(from, i % 8 + 0.5f, i / 8 + 0.5f);
    if (i % 2 == 0) surf2Dwrite(texel + 1, to, i % 8 * 4, i / 8);
}
int main() {
    float image[64], copy[64];
    for (int i = 0; i < 64; i++) image[i] = i;
    cudaArray_t arrays[2];
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    for (int k = 0; k < 2; k++) {
        if (cudaMallocArray(&arrays[k], &format, 8, 8, cudaArraySurfaceLoadStore)) return 9;
        cudaMemcpy2DToArray(arrays[k], 0, 0, image, 32, 32, 8, cudaMemcpyHostToDevice);
    }
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = arrays[0];
    cudaTextureDesc how = {};
    cudaTextureObject_t from;
    cudaSurfaceObject_t to;
    if (cudaCreateTextureObject(&from, &resource, &how, nullptr)) return 8;
    resource.res.array.array = arrays[1];
    if (cudaCreateSurfaceObject(&to, &resource)) return 7;
    copies<<<2, 32>>>(from, to);
    if (cudaDeviceSynchronize()) return 6;
    cudaMemcpy2DFromArray(copy, 32, arrays[1], 0, 0, 32, 8, cudaMemcpyDeviceToHost);
    for (int i = 0; i < 64; i++) if (copy[i] != i + (i % 2 == 0)) return 5;
    return 0;
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(APP, tmp_path_factory.mktemp("textures") / "app", "-lineinfo", "-arch=sm_80")


def records(tool: str, app: Path, *arguments: str) -> list[dict]:
    command = [
        sys.executable,
        str(REPOSITORY / f"tools/{tool}.py"),
        "--device",
        "sim",
        "--json",
        *arguments,
        "--",
        str(app),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_they_are_counted(app: Path) -> None:
    found = records("gpucount", app, "instruction:copies:tex", "instruction:copies:sust (value == 0)")
    counts = {r["spec"].split(" ")[0]: (r["count"], r["threads"]) for r in found if r["type"] == "count"}
    assert counts == {"instruction:copies:tex": (2, 64), "instruction:copies:sust": (2, 32)}
    assert found[-1]["launches_instrumented"] == 1


def test_coordinates_and_values(app: Path) -> None:
    texture, surface = "instruction:copies:tex:u32:operand0#x", "instruction:copies:sust:s32:operand1#y"
    *found, _ = records("gpudist", app, "-C", texture, surface)
    values = {r["label"]: r["values"] for r in found if r["type"] == "dist"}
    bits = {struct.unpack("<I", struct.pack("<f", x + 0.5))[0]: 8 for x in range(8)}
    assert {int(x): n for x, n in values["x"].items()} == bits
    assert {int(y): n for y, n in values["y"].items()} == dict.fromkeys(range(8), 4)
    *found, _ = records("gputrace", app, 'instruction:copies:sust "%d %d %x", operand0, operand1, operand2')
    texts = sorted(r["text"] for r in found if r["type"] == "event")
    assert len(texts) == 32 and "8 1 41300000" in texts  # thread 10 writes 11.0 at byte 8 of row 1
