"""What decides whether loops of AMD machine code end, in kernels that hipcc builds."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpubpf_gcn
import hipsim_device
from gpubpf.gcn.code_object import CodeObject
from gpubpf.gcn.comgr import Comgr
from gpubpf.gcn.kernel_code import read
from gpubpf.gcn.loops import GcnLoops
from gpubpf.ptx.loop_ends import COUNTS, NEVER, VALUE

KERNELS = (
    (hipsim_device.PROGRAMS / "hangs.hip").read_text()
    + r"""
__global__ void mutex(int *lock, int *sum) {  // hipcc moves the rest behind the loop
    for (int done = 0; !done;)
        if (atomicExch(lock, 1) == 0) {
            *sum += 1;
            atomicExch(lock, 0);
            done = 1;
        }
}

__global__ void counted(int *lock, int *tries) {  // has other effects than waiting
    while (atomicExch(lock, 1) != 0) atomicAdd(tries, 1);
}

__global__ void limited(volatile int *x) {
    for (int i = 0; *x == 0 && i < 1000; i++) {
    }
    x[1] = 1;
}

__global__ void timed(volatile int *x, long limit) {
    const long begin = clock64();
    while (*x == 0 && clock64() - begin < limit) {
    }
    x[1] = 1;
}

__global__ void all_of(volatile int *x) {  // in LDS, and by all lanes
    __shared__ volatile int ready[2];
    if (threadIdx.x == 0) ready[x[0] & 1] = 1;
    while (ready[0] == 0 || (threadIdx.x & 1 && ready[1] == 0)) {
    }
    x[1] = 1;
}

__global__ void sums(int *x, int n) {
    int sum = 0;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < x[i]; j++) sum += x[j];
    x[0] = sum;
}

__global__ void search(int *x) {  // a load in each turn, but from another address
    while (*x != 0) x++;
    *x = 1;
}
"""
)
# The ends of the loops of each kernel.
EXPECTED = {
    "slow": {COUNTS},
    "barrier": {VALUE},
    "lock": {VALUE},
    "blocks": {VALUE},
    "flag": {VALUE},
    "loop": {NEVER},
    "count": {COUNTS},
    "pipeline": {VALUE, COUNTS},
    "mutex": {VALUE},
    "counted": {""},
    "limited": {COUNTS},
    "timed": {""},
    "all_of": {VALUE},
    "sums": {COUNTS},
    "search": {COUNTS},
}


@pytest.fixture(scope="module", params=["gfx906", "gfx90a", "gfx1030"])
def loops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, GcnLoops]:
    hipsim_device.hipcc()
    place = tmp_path_factory.mktemp("loops")
    code = CodeObject(
        gpubpf_gcn.build(
            place, request.param, "-std=c++14", f"-I{hipsim_device.PROGRAMS}", text=KERNELS
        ).read_bytes()
    )
    comgr = Comgr(code.isa)
    return {
        next(name for name in EXPECTED if f"{len(name)}{name}" in one.name): GcnLoops(read(code, comgr, one))
        for one in code.kernels
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_what_ends_a_loop(name: str, loops: dict[str, GcnLoops]) -> None:
    assert set(loops[name].ends.values()) == EXPECTED[name]
    assert bool(loops[name].polled) == (VALUE in EXPECTED[name])
    assert loops[name].heads("waiting") | loops[name].heads("others") == loops[name].heads("all")


def test_registers_that_are_spilled_into_lanes_are_not_understood(tmp_path: Path) -> None:
    """Without optimization, each mask goes through lanes of one VGPR."""
    hipsim_device.hipcc()
    text = "#include <hip/hip_runtime.h>\n__global__ void wait(volatile int *x) { while (*x == 0) {} }"
    code = CodeObject(gpubpf_gcn.build(tmp_path, "gfx90a", "-O0", text=text).read_bytes())
    (kernel,) = code.kernels
    assert set(GcnLoops(read(code, Comgr(code.isa), kernel)).ends.values()) == {""}
