"""The embedded device names the same place of a fault under each tool as without a tool: lines of the original PTX."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda
from gpubpf.traced.device import LIBRARIES

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = gpubpf_cuda.needs_cuda

# Written by hand: several instructions on a line, a statement on several lines, comments, and a fault in a called function.
PTX = """.version 8.0
.target sm_80
.address_size 64

.func (.param .b32 r) twice(.param .b32 a, .param .b64 p)
{
    .reg .b32 %r<3>; .reg .b64 %rd<2>;

    ld.param.b32 %r1, [a]; ld.param.b64 %rd1, [p];
    // 10: the fault of "called"
    st.u32
        [%rd1], %r1;
    add.s32 %r2, %r1, %r1; st.param.b32 [r], %r2; ret;
}
.visible .entry called(.param .u64 p)
{
    .reg .b32 %r<5>; .reg .b64 %rd<4>; .reg .pred %p<2>;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd2, %rd1, %rd2;

    ld.global.u32 %r2, [%rd2]; setp.eq.u32 %p1, %r1, 3;

    @%p1 add.u64 %rd2, %rd2, 1073741824;
    {
        .param .b32 a; .param .b64 q; .param .b32 r;
        st.param.b32 [a], %r2; st.param.b64 [q], %rd2;
        call.uni (r), twice, (a, q);
        ld.param.b32 %r3, [r];
    }
    st.global.u32 [%rd1], %r3;
    ret;
}
.visible .entry inlined(.param .u64 p) {
    .reg .b32 %r<3>; .reg .b64 %rd<3>; ld.param.u64 %rd1, [p];
    mov.u32 %r1, 0;
again:
    mul.wide.u32 %rd2, %r1, 4096; add.u64 %rd2, %rd1, %rd2; add.u32 %r1, %r1, 1;
    /* the fault
       of "inlined" */
    st.global.u32 [%rd2], %r1; bra again; }
"""
LINES = {"called": 11, "inlined": 40}
PROGRAM = r"""
#include <cstdio>
#include <cuda.h>
int main(int argc, char **argv) {
    CUdevice device; CUcontext context; CUmodule module; CUfunction function; CUdeviceptr p;
    cuInit(0); cuDeviceGet(&device, 0); cuDevicePrimaryCtxRetain(&context, device); cuCtxSetCurrent(context);
    if (cuModuleLoad(&module, argv[1]) || cuModuleGetFunction(&function, module, argv[2])) return 2;
    cuMemAlloc(&p, 4096);
    void *arguments[] = {&p};
    cuLaunchKernel(function, 1, 1, 1, 8, 1, 1, 0, nullptr, arguments, nullptr);
    printf("%d\n", cuCtxSynchronize());
    return 0;
}
"""
ALONE = ["-m", "cudasim"]
TOOLS = ["threadhist", "kernelretsnoop", "memtrace", "launchlate"]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("faults")
    gpubpf_cuda.build(PROGRAM, path / "app", f"-L{LIBRARIES}", "-l:libcuda.so.1")
    (path / "kernels.ptx").write_text(PTX)
    return [str(path / "app"), str(path / "kernels.ptx")]


def fault(app: list[str], kernel: str, *tool: str) -> str:
    """The device's line about the fault, without the address."""
    done = subprocess.run(
        [sys.executable, *tool, "--", *app, kernel],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPOSITORY,
    )
    assert "700" in done.stdout, done
    (line,) = re.findall(r"kernel \w+: illegal address .*", done.stderr)
    return re.sub("0x[0-9a-f]+", "ADDRESS", line)


@pytest.mark.parametrize("kernel", LINES)
def test_without_a_tool(app: list[str], kernel: str) -> None:
    assert fault(app, kernel, *ALONE).endswith(f" PTX line {LINES[kernel]}")


@pytest.mark.every(2)
@pytest.mark.parametrize("kernel", LINES)
@pytest.mark.parametrize("tool", TOOLS)
def test_under_a_tool(app: list[str], tool: str, kernel: str) -> None:
    found = fault(app, kernel, str(REPOSITORY / "tools" / f"{tool}.py"), "--device", "sim")
    assert found == fault(app, kernel, *ALONE)
