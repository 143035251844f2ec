"""Programs whose device code nvlink joins (`nvcc -rdc=true`), on the embedded device, which links their PTX itself.

Three of the examples are built so; all of them with GPUBPF_LOOKS=all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda
import gpubpf_rdc
from cudasim_device import PROGRAMS, ROOT, nvcc, run, run_python
from gpubpf_examples import NAMES

EXAMPLES = NAMES if os.environ.get("GPUBPF_LOOKS") == "all" else ("cooperative", "language", "memory")
NESTED = """\
tree: right
order: right
sizes: right
out of memory
errors: right
as many as the limit: right
memory: right
fault: cudaErrorIllegalAddress
"""


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "flags",
    [
        [],
        pytest.param(["-lineinfo"], marks=pytest.mark.long),
        pytest.param(["-G"], marks=pytest.mark.long),
        pytest.param(
            ["-gencode", "arch=compute_75,code=sm_75", "-gencode", "arch=compute_80,code=compute_80"],
            marks=pytest.mark.long,
        ),
        ["-gencode", "arch=compute_75,code=compute_75"],  # nothing is linked: the driver does it
    ],
    ids=["default", "lineinfo", "debug", "list", "unlinked"],
)
def test_two_files_and_a_library(flags: list[str], tmp_path: Path) -> None:
    program = gpubpf_rdc.build(tmp_path / "rdc", *flags)
    for hostile in (False, True):
        done = run([program], hostile)
        assert (done.returncode, done.stdout, done.stderr) == (gpubpf_rdc.STATUS, gpubpf_rdc.OUTPUT, "")


@pytest.mark.every(3)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, tmp_path: Path) -> None:
    flags = ["-O2", "-rdc=true", "-I", str(ROOT / "examples")]
    arch = ["-arch=sm_80"] if name == "memory" else []
    program = gpubpf_cuda.build(ROOT / "examples" / f"{name}.cu", tmp_path / name, *flags, *arch)
    done = run([program], True)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [f"{name}: PASSED"]), done.stderr


def test_kernels_that_launch_kernels(tmp_path: Path) -> None:
    source = PROGRAMS / "nested.cu"
    program = gpubpf_cuda.build(source, tmp_path / "app", "-rdc=true", "-arch=sm_80", "-lcudadevrt")
    for clock, hostile in (("real", False), ("real", True), ("virtual", False)):
        done = run([program], hostile, CUDASIM_CLOCK=clock)
        assert (done.returncode, done.stdout) == (0, NESTED)
        assert "kernel _Z5faultPi: illegal address 0x10" in done.stderr
    assert measured("threadhist", program, tmp_path, NESTED)["launches_instrumented"] == 6


TOOLS = ("threadhist", "kernelretsnoop", "launchlate", "memtrace")


def measured(tool: str, program: Path, tmp_path: Path, printed: str, *options: str) -> dict:
    records = tmp_path / "records"
    command = [
        sys.executable,
        str(ROOT / f"tools/{tool}.py"),
        "--device",
        "sim",
        "--json",
        "-o",
        str(records),
    ]
    done = subprocess.run([*command, *options, "--", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr
    summary = json.loads(records.read_text().splitlines()[-1])
    assert not summary["not_instrumented"], summary
    return summary


@pytest.mark.parametrize(
    "tool", [TOOLS[0], *(pytest.param(t, marks=pytest.mark.every(8)) for t in TOOLS[1:])]
)
def test_grids_that_kernels_launch_are_counted(tool: str, tmp_path: Path) -> None:
    """Without the fault at the end, which would lose the counts."""
    source = tmp_path / "nested.cu"
    source.write_text((PROGRAMS / "nested.cu").read_text().replace("faulty<<<1, 1>>>();", ""))
    flags = ["-rdc=true", "-arch=sm_80", "-lcudadevrt"]
    program = gpubpf_cuda.build(source, tmp_path / "app", *flags)
    printed = NESTED.replace("cudaErrorIllegalAddress", "cudaSuccess")
    sampled = () if tool == "launchlate" else ("--sample-blocks", "1/2")
    for options in ((), sampled):
        summary = measured(tool, program, tmp_path, printed, *options)
        # By `tree`, `order`, `sizes`, `errors` and `memory`.
        assert summary["launches_by_kernels"] == 6 + 4 + 33 + 12 + 1
        assert summary["launches_instrumented"] == 5 and not summary["lost"]


def test_conditional_nodes(tmp_path: Path) -> None:
    source = PROGRAMS / "conditions.cu"
    flags = ["-rdc=true", "-arch=sm_80", "-lcudadevrt", "-I", str(PROGRAMS)]
    program = gpubpf_cuda.build(source, tmp_path / "app", *flags)
    for clock, hostile in (("real", False), ("real", True), ("virtual", False)):
        done = run([program], hostile, CUDASIM_CLOCK=clock)
        assert (done.returncode, done.stdout, done.stderr) == (0, "conditions ok\n", "")
    summary = measured("threadhist", program, tmp_path, "conditions ok\n")
    # `choices` without and with an else, and of three bodies; `loops` with two kernels in each turn.
    assert summary["launches_instrumented"] == (4 + 4 + 2) + (2 + 2 + 2) + (4 + 4 + 3) + 2 * (3 * 4 + 2 + 1)
    assert "graphs_unknown" not in summary


ONLY_IN_BODIES = r"""
__global__ void once(cudaGraphConditionalHandle handle, int *cell) { *cell = 1, cudaGraphSetConditional(handle, 0); }
int main() {
    int *cell, *other;
    cudaGraph_t graph, body;
    cudaGraphNode_t node;
    cudaStream_t stream;
    cudaGraphExec_t exec;
    cudaMalloc(&cell, 4), cudaMalloc(&other, 4), cudaStreamCreate(&stream), cudaGraphCreate(&graph, 0);
    cudaGraphConditionalHandle handle;
    cudaGraphConditionalHandleCreate(&handle, graph, 1, cudaGraphCondAssignDefault);
    cudaGraphNodeParams loop = {cudaGraphNodeTypeConditional};
    loop.conditional.handle = handle, loop.conditional.type = cudaGraphCondTypeWhile, loop.conditional.size = 1;
    cudaGraphAddNode(&node, graph, nullptr, nullptr, 0, &loop);
    cudaStreamBeginCaptureToGraph(stream, loop.conditional.phGraph_out[0], 0, 0, 0, cudaStreamCaptureModeGlobal);
    once<<<1, 1, 0, stream>>>(handle, cell);
    cudaStreamEndCapture(stream, &body);
    cudaGraphInstantiate(&exec, graph, 0), cudaGraphLaunch(exec, stream);
    int host = 0;
    cudaStreamSynchronize(stream), cudaMemcpy(&host, cell, 4, cudaMemcpyDeviceToHost);
    return host != 1;
}
"""


def test_kernels_only_in_bodies_of_conditional_nodes(tmp_path: Path) -> None:
    """With --no-graphs, it is unknown whether they ran, and what they touched."""
    (tmp_path / "app.cu").write_text(ONLY_IN_BODIES)
    flags = ["-rdc=true", "-arch=sm_80", "-lcudadevrt"]
    program = gpubpf_cuda.build(tmp_path / "app.cu", tmp_path / "app", *flags)

    def measure(*options: str) -> str:
        command = [
            sys.executable,
            str(ROOT / "tools/memtrace.py"),
            "--device",
            "sim",
            *options,
            "--",
            program,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0
        return " ".join((done.stdout + done.stderr).split())

    said = measure()
    assert "counted 1 of 1 matching launches" in said and "4 0 4 0 cuMemAlloc" in said
    assert "unknown" not in said and "may have touched more" not in said
    said = measure("--no-graphs")
    assert "how often the kernels of these graphs ran is unknown" in said
    assert "kernels may have touched more" in said
    assert "never touched" not in said and "no kernel was launched" not in said


def test_a_part_without_ptx(tmp_path: Path) -> None:
    """Only kernels that call a function of it are refused."""
    (tmp_path / "part.cu").write_text("__device__ int part(int x) { return x; }\n")
    (tmp_path / "app.cu").write_text(
        "#include <cstdio>\n__device__ int part(int);\n__global__ void with(int *p) { *p = part(1); }\n"
        "__global__ void without(int *p) { *p = 2; }\nint main() { int *p, n = 0; cudaMalloc(&p, 4);\n"
        "without<<<1, 1>>>(p); cudaMemcpy(&n, p, 4, cudaMemcpyDeviceToHost); with<<<1, 1>>>(p);\n"
        'printf("%d, %s\\n", n, cudaGetErrorName(cudaGetLastError())); }\n'
    )
    arch = ["-gencode", "arch=compute_75,code=sm_75"]
    gpubpf_cuda.run_nvcc([nvcc(), "-dc", *arch, "part.cu", "-o", "part.o"], cwd=tmp_path)
    gpubpf_cuda.run_nvcc([nvcc(), "-dc", "-arch=sm_75", "app.cu", "-o", "app.o"], cwd=tmp_path)
    link = [nvcc(), "-cudart", "shared", "-arch=sm_75", "app.o", "part.o", "-o", "app"]
    subprocess.run(link, cwd=tmp_path, check=True)
    done = run([tmp_path / "app"])
    assert done.stdout == "2, cudaErrorNotSupported\n"
    assert "kernel _Z4withPi cannot run" in done.stderr and "_Z4parti is not defined" in done.stderr


def test_code_for_link_time_optimisation_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "app.cu").write_text("__global__ void kernel(int *p) { *p = 1; }\n")
    arch = ["-gencode", "arch=compute_75,code=lto_75"]
    output = ["-o", str(tmp_path / "app.fatbin"), str(tmp_path / "app.cu")]
    gpubpf_cuda.run_nvcc([nvcc(), "-fatbin", "-rdc=true", *arch, *output])
    text = run_python(
        f"""
        import os
        os.dup2(1, 2)
        cu = Driver()
        data = open({str(tmp_path / "app.fatbin")!r}, "rb").read()
        print(cu.status("cuModuleLoadData", ctypes.byref(ctypes.c_void_p()), data))
        """
    )
    assert "link-time optimised code (-dlto) without PTX" in text and text.splitlines()[-1] == "209"


LAUNCHES = """.version 8.0
.target sm_80
.address_size 64
.extern .func (.param .b64 result) cudaGetParameterBufferV2(.param .b64 kernel, .param .align 4 .b8 grid[12],
    .param .align 4 .b8 block[12], .param .b32 shared);
.extern .func (.param .b32 result) cudaLaunchDeviceV2(.param .b64 buffer, .param .b64 stream);
.visible .entry inner(.param .u64 p) {
    .reg .b64 %a; .reg .b32 %x;
    ld.param.u64 %a, [p]; mov.u32 %x, %ctaid.x; atom.global.add.u32 %x, [%a], 1; ret;
}
.visible .entry outer(.param .u64 p) {
    .reg .b64 %a, %b, %k; .reg .b32 %x;
    .param .b64 kernel, buffer, stream, made; .param .b32 shared, status;
    .param .align 4 .b8 grid[12]; .param .align 4 .b8 block[12];
    ld.param.u64 %a, [p]; mov.u64 %k, inner;
    st.param.b64 [kernel], %k; st.param.b32 [shared], 0;
    st.param.b32 [grid], 3; st.param.b32 [grid+4], 1; st.param.b32 [grid+8], 1;
    st.param.b32 [block], 5; st.param.b32 [block+4], 1; st.param.b32 [block+8], 1;
    call.uni (made), cudaGetParameterBufferV2, (kernel, grid, block, shared);
    ld.param.b64 %b, [made]; st.u64 [%b], %a;
    st.param.b64 [buffer], %b; st.param.b64 [stream], 0;
    call.uni (status), cudaLaunchDeviceV2, (buffer, stream);
    ret;
}
"""


def test_launches_from_kernels_that_the_driver_links(tmp_path: Path) -> None:
    """As with libNVVM: PTX, and libcudadevrt.a, of which the device needs nothing."""
    (tmp_path / "launches.ptx").write_text(LAUNCHES)
    (tmp_path / "libcudadevrt.a").write_bytes(b"!<arch>\ncuda_device_runtime.o/ 0 ...")
    (tmp_path / "other.a").write_bytes(b"!<arch>\nother.o/ 0 ...")
    text = run_python(
        f"""
        os.chdir({str(tmp_path)!r})
        cu = Driver()
        link, image, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        cu.cuLinkCreate_v2(0, None, None, ctypes.byref(link))
        cu.cuLinkAddFile_v2(link, 1, b"launches.ptx", 0, None, None)
        cu.cuLinkAddFile_v2(link, 4, b"libcudadevrt.a", 0, None, None)
        print(cu.status("cuLinkAddFile_v2", link, 4, b"other.a", 0, None, None))
        cu.cuLinkComplete(link, ctypes.byref(image), ctypes.byref(size))
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        cu.cuModuleLoadData(ctypes.byref(module), image)
        cu.cuModuleGetFunction(ctypes.byref(kernel), module, b"outer")
        memory = ctypes.c_uint64()
        cu.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4))
        cu.cuMemsetD32_v2(memory, 0, ctypes.c_size_t(1))
        given = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        cu.cuLaunchKernel(kernel, 1, 1, 1, 2, 1, 1, 0, None, given, None)
        found = ctypes.c_uint32()
        cu.cuMemcpyDtoH_v2(ctypes.byref(found), memory, ctypes.c_size_t(4))
        print(found.value)
        """
    )
    assert text.split() == ["209", "30"]
