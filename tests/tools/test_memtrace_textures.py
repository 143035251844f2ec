"""memtrace on textures and surfaces: exact requests, lanes and bytes, and what it says of the addresses that it does not know."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(REPOSITORY / "tools/memtrace.py"), "--device", "sim"]
pytestmark = gpubpf_cuda.needs_cuda

# Each kernel has two blocks of 64 threads.
PROGRAM = r"""
#include <cstdio>
__global__ void linear(cudaTextureObject_t from, float *to) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    to[i] = tex1Dfetch<float>(from, i);
}
__global__ void plane(cudaTextureObject_t from, float4 *to) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    to[i] = tex2D<float4>(from, i % 8 + 0.5f, i / 8 + 0.5f);
}
__global__ void some(cudaTextureObject_t from, float *to) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    if (i % 4 == 0) sum = tex2D<float4>(from, i % 8 + 0.5f, i / 8 + 0.5f).y;
    for (int n = 0; n < i % 32; n++) sum += tex2D<float4>(from, n + 0.5f, 0.5f).x;
    to[i] = sum;
}
__global__ void surface(cudaSurfaceObject_t from, cudaSurfaceObject_t to) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, x = i % 8, y = i / 8;
    float4 v = surf2Dread<float4>(from, x * 16, y);
    if (i < 48) surf2Dwrite(make_float2(v.x, v.y), to, x * 8, y);
}
__global__ void reduce(cudaSurfaceObject_t to) {
    int x = threadIdx.x % 8 * 4, y = 0;
    asm volatile("sured.b.add.2d.u32.trap [%0, {%1, %2}], %3;" :: "l"(to), "r"(x), "r"(y), "r"(1));
}
#define OK(x) do { cudaError_t e = (x); if (e) { printf("%s: %s\n", #x, cudaGetErrorName(e)); return 1; } } while (0)
static cudaError_t make_array(cudaArray_t *array, cudaChannelFormatDesc format) {
    return cudaMallocArray(array, &format, 8, 16, cudaArraySurfaceLoadStore);
}
int main() {
    float *data, *out, flat[128], back[128];
    float4 *out4, host[128];
    for (int i = 0; i < 128; i++) host[i] = make_float4(i, 2 * i, 3 * i, 4 * i), flat[i] = i;
    OK(cudaMalloc(&data, sizeof flat));
    OK(cudaMalloc(&out, sizeof flat));
    OK(cudaMalloc(&out4, sizeof host));
    OK(cudaMemcpy(data, flat, sizeof flat, cudaMemcpyHostToDevice));
    cudaTextureObject_t line, image;
    cudaSurfaceObject_t surfaces[3];
    cudaResourceDesc of = {};
    cudaTextureDesc how = {};
    of.resType = cudaResourceTypeLinear;
    of.res.linear.devPtr = data;
    of.res.linear.desc = cudaCreateChannelDesc<float>();
    of.res.linear.sizeInBytes = sizeof flat;
    OK(cudaCreateTextureObject(&line, &of, &how, nullptr));
    cudaArray_t arrays[3];
    OK(make_array(&arrays[0], cudaCreateChannelDesc<float4>()));
    OK(make_array(&arrays[1], cudaCreateChannelDesc<float2>()));
    OK(make_array(&arrays[2], cudaCreateChannelDesc<int>()));
    OK(cudaMemcpy2DToArray(arrays[0], 0, 0, host, 8 * 16, 8 * 16, 16, cudaMemcpyHostToDevice));
    of = {};
    of.resType = cudaResourceTypeArray;
    for (int i = 0; i < 3; i++) {
        of.res.array.array = arrays[i];
        OK(cudaCreateSurfaceObject(&surfaces[i], &of));
    }
    of.res.array.array = arrays[0];
    how.addressMode[0] = how.addressMode[1] = cudaAddressModeClamp;
    OK(cudaCreateTextureObject(&image, &of, &how, nullptr));
    linear<<<2, 64>>>(line, out);
    plane<<<2, 64>>>(image, out4);
    some<<<2, 64>>>(image, out);
    surface<<<2, 64>>>(surfaces[0], surfaces[1]);
    reduce<<<2, 64>>>(surfaces[2]);
    OK(cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost));
    printf("ok %g\n", back[5]);
    return 0;
}
"""
UNKNOWN = (
    "sectors",
    "sectors_least",
    "ratio",
    "pattern",
    "patterns",
    "strides",
    "gaps",
    "bank_ways",
    "contention_max",
)
# (kernel, opcode, width) → requests, lanes. In `some`, a quarter of the lanes reads once, then lane n reads n times.
RIGHT = {
    ("linear", "tex.1d", 4): (4, 128),
    ("plane", "tex.2d", 16): (4, 128),
    ("some", "tex.2d", 4): (4 + 4 * 31, 32 + 4 * sum(range(32))),
    ("surface", "suld.2d", 8): (4, 128),
    ("surface", "sust.2d", 8): (2, 48),
    ("reduce", "sured.2d", 4): (4, 128),
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("textures") / "app", "-lineinfo", "-arch=sm_80")


def memtrace(app: Path, out: Path, *arguments: str) -> str:
    command = [*TOOL, *arguments, "-o", str(out), "--", str(app)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "ok 10\n", done.stderr
    return out.read_text()


def records(app: Path, out: Path, *arguments: str) -> list[dict]:
    return [json.loads(line) for line in memtrace(app, out, "--json", *arguments).splitlines()]


def counts(found: list[dict]) -> dict[tuple[str, str, int], tuple[int, int]]:
    """The requests and lanes of textures and surfaces."""
    sums: dict[tuple[str, str, int], tuple[int, int]] = {}
    for site in found:
        if site["space"] in ("texture", "surface"):
            parts = site["opcode"].split(".")
            name = f"{parts[0]}.{next(p for p in parts if p in ('1d', '2d'))}"
            key = site["kernel"], name, site["width"]
            assert site["bytes"] == site["width"] * site["accesses"]
            requests, lanes = sums.get(key, (0, 0))
            sums[key] = requests + site["requests"], lanes + site["accesses"]
    return sums


@pytest.mark.every(2)
def test_exact_counts(app: Path, tmp_path: Path) -> None:
    found = records(app, tmp_path / "out", "--footprint")
    sites = [record for record in found if record["type"] == "site"]
    assert counts(sites) == RIGHT
    images = [site for site in sites if site["space"] in ("texture", "surface")]
    assert all(
        site[name] is None for site in images for name in (*UNKNOWN, "share", "wasted_bytes", "advice")
    )
    assert {site["op"] for site in images} == {"load", "store", "atomic"}
    assert all(site["sectors"] for site in sites if site not in images)
    kernels = {record["kernel"]: record for record in found if record["type"] == "kernel"}
    assert kernels["surface"]["surface_requests"] == 6 and kernels["surface"]["requests"] == 0
    assert (kernels["linear"]["texture_requests"], kernels["linear"]["bytes"]) == (4, 512)
    assert found[-1]["not_probed"] == {} and found[-1]["lost"] == 0


@pytest.mark.every(2)
def test_the_text_says_what_is_unknown(app: Path, tmp_path: Path) -> None:
    text = memtrace(app, tmp_path / "out", "--footprint")
    rows = {tuple(line.split()[1:]) for line in text.splitlines() if line.startswith("app.cu:")}
    assert ("tex.1d", "4", "512", "B", "-", "-", "-") in rows  # no column LANES
    assert ("tex.2d", "124", "7.75", "KB", "-", "-", "16", "-") in rows
    assert ("sust.2d", "2", "384", "B", "-", "-", "24", "-") in rows
    said = " ".join(text.split())
    assert "textures and surfaces: asked for 512 B; addresses, and so sectors and waste, are unknown" in said
    assert (
        "kernels may have touched more: accesses to textures and surfaces, and bulk tensor copies, are not seen"
        in said
    )
    assert "incomplete: accesses to textures and surfaces" in said
    assert not any(words in said for words in ("never touched", "neither read", "not probed"))


@pytest.mark.every(2)
def test_other_looks(app: Path, tmp_path: Path) -> None:
    """Records leave these accesses out, name them, and number the other sites as the tables do."""
    out = tmp_path / "out"
    rows = list(csv.DictReader(memtrace(app, out, "--csv").splitlines()))
    stores = {row["kernel"]: row["site"] for row in rows if row["space"] == "global"}
    images = {
        (row["opcode"].split(".")[0], row["sectors"])
        for row in rows
        if row["space"] in ("texture", "surface")
    }
    assert images == {(opcode, "") for opcode in ("tex", "suld", "sust", "sured")}
    found = records(app, out, "-e")
    assert {r["kernel"]: str(r["site"]) for r in found if r["type"] == "access"} == stores
    assert {name: n for name, n in found[-1]["not_probed"].items() if name != "tex"} == {
        "suld": 1,
        "sured": 1,
        "sust": 1,
    }
    lanes = counts([r for r in records(app, out, "--block", "1", "--thread", "0:3") if r["type"] == "site"])
    assert lanes["plane", "tex.2d", 16] == (1, 4) and lanes["some", "tex.2d", 4] == (1 + 3, 1 + 3 + 2 + 1)
    sampled = [r for r in records(app, out, "--sample-warps", "1/2") if r["type"] == "site"]
    errors = [site["standard_error"] for site in sampled if site["space"] in ("texture", "surface")]
    assert errors and all(e["sectors"] is None and e["ratio"] is None for e in errors)
