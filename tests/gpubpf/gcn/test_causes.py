"""What it depends on which lanes AMD machine code switches off, in kernels that hipcc builds."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpubpf_gcn
import hipsim_device
from gpubpf.gcn.branches import branches, is_of_waves
from gpubpf.gcn.causes import GcnCauses
from gpubpf.gcn.code_object import CodeObject, GcnKernel
from gpubpf.gcn.comgr import Comgr
from gpubpf.gcn.inner_sites import _scalar_loads
from gpubpf.gcn.kernel_code import read
from gpubpf.gcn.loops import GcnLoops

KERNELS = r"""
#include <hip/hip_runtime.h>
#define WORK(n) for (int t = 0; t < (n); t++) { v = v * 3 + (v >> 5); asm volatile("" : "+v"(v)); }

__global__ void bound(int *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 3;
}

__global__ void half(int *x, int n) {
    int v = x[threadIdx.x];
    if (threadIdx.x & 1) { WORK(n) }
    x[threadIdx.x] = v;
}

__global__ void value(int *x, int n) {
    int v = x[threadIdx.x];
    if (v & 1) { WORK(n) } else { WORK(2 * n) }
    x[threadIdx.x] = v;
}

__global__ void whole(int *x, int n) {  // of the block, so no lanes are parted
    int v = x[threadIdx.x];
    if (blockIdx.x & 1) { WORK(n) }
    x[threadIdx.x] = v;
}

__global__ void turns(int *x, int n) {  // the number of turns depends on the thread
    int v = n;
    WORK((int)threadIdx.x)
    x[threadIdx.x] = v;
}

__global__ void until(int *x, int n) {  // on data
    int v = x[threadIdx.x];
    while (v & 0xffff) { v = v * 3 + (v >> 5); }
    x[threadIdx.x] = v;
}

__global__ void leaves(int *x, int n) {  // an early return by place in the grid, then by place in the block
    int i = blockIdx.x * blockDim.x + threadIdx.x, v = n;
    if (i >= n) return;
    if (threadIdx.x % 3 == 0) { WORK(n) }
    x[i] = v;
}

__global__ void chosen(int *x, int n) {  // a number that depends on data is chosen without a branch
    int i = threadIdx.x, v = n;
    int limit = x[i] > 0 ? n : 2 * n;
    WORK(limit)
    x[i] = v;
}

__global__ void after(int *x, int n) {  // the registers of what was loaded are used again
    int v = x[threadIdx.x];
    if (v & 1) { WORK(n) }
    x[threadIdx.x] = v;
    __syncthreads();
    v = n;
    if (threadIdx.x < 20) { WORK(n) }
    x[threadIdx.x + 256] = v;
}

__global__ void shared(int *x, int n) {
    __shared__ int s[256];
    s[threadIdx.x] = threadIdx.x * n;
    __syncthreads();
    int v = n;
    if (s[255 - threadIdx.x] & 1) { WORK(n) }
    x[threadIdx.x] = v;
}

__global__ void swapped(int *x, int n) {
    int v = n;
    if (__shfl_xor((int)threadIdx.x * n, 1) & 4) { WORK(n) }
    x[threadIdx.x] = v;
}

__global__ void broken(int *x, int n) {  // one way out depends on data, the other one on nothing
    int v = n;
    for (int t = 0; t < n; t++) {
        v = v * 3 + (v >> 5);
        asm volatile("" : "+v"(v));
        if (x[threadIdx.x + t] == 0) break;
    }
    x[threadIdx.x] = v;
}

__device__ __attribute__((noinline)) int inside(int v, int n) {
    if (v & 1) { WORK(n) }
    return v;
}

__global__ void calling(int *x, int n) {
    x[threadIdx.x] = inside(threadIdx.x, n);
}
"""
# What the lanes depend on that each kernel switches off.
EXPECTED = {
    "bound": {"grid"},
    "half": {"lane"},
    "value": {"data"},
    "whole": set(),
    "turns": {"lane"},
    "until": {"data"},
    "leaves": {"grid", "lane"},
    "chosen": {"data"},
    "after": {"data", "lane"},
    "shared": {"data"},
    "swapped": {"data"},
    "broken": {"data"},
    "calling": {""},
}


@pytest.fixture(scope="module", params=["gfx906", "gfx90a", "gfx1030"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    hipsim_device.hipcc()
    place = tmp_path_factory.mktemp("causes")
    code = CodeObject(gpubpf_gcn.build(place, request.param, "-std=c++14", text=KERNELS).read_bytes())
    comgr = Comgr(code.isa)
    return {
        next(name for name in EXPECTED if f"{len(name)}{name}" in one.name): _causes(code, comgr, one)
        for one in code.kernels
    }


def test_what_was_kept_in_local_memory_is_unknown(tmp_path: Path) -> None:
    source = r"""
    #include <hip/hip_runtime.h>
    extern "C" __global__ void half(int *x) {
        int t = __builtin_amdgcn_workitem_id_x(), v = 1;
        if (t & 1) for (int i = 0; i < 20; i++) v = v * 3 + (v >> 5);
        x[t] = v;
    }
    """
    made = gpubpf_gcn.build(tmp_path, "gfx906", "-O0", text=source).read_bytes()
    code = CodeObject(made)
    (kernel,) = code.kernels
    assert _causes(code, Comgr(code.isa), kernel) - {"uniform"} == {""}


def _causes(code: CodeObject, comgr: Comgr, kernel: GcnKernel) -> set[str]:
    body = read(code, comgr, kernel)
    causes = GcnCauses(GcnLoops(body), kernel, _scalar_loads(kernel, body))
    parting = [
        one
        for block in body.blocks()
        for one, branch in branches(block, kernel.descriptor.wave)
        if branch is not None
    ]
    assert {causes.of(one) for one in parting if is_of_waves(one)} <= {"uniform"}
    return {causes.of(one) for one in parting if not is_of_waves(one)}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_switched_off_lanes_depend_on(name: str, found: dict[str, set[str]]) -> None:
    assert found[name] - {"uniform"} == EXPECTED[name]
