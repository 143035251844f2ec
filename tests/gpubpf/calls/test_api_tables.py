"""The tables of functions are complete and consistent, and they decode real calls correctly."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
import gpubpf_hip
from cudasim import launcher
from gpubpf.calls import arrays
from gpubpf.calls.api import GROUPS, KERNEL_NAMING, RESULTS, Api, ApiFunction, ArgumentPlace, cuda, hip, parse
from gpubpf.calls.probes import CallOptions, CallProbes
from gpubpf.errors import UsageError
from gpubpf.kernel import bpf_syscall
from gpubpf.record import replace
from gpubpf.traced.device import LIBRARIES
from gpubpf_hip import needs_hip
from gpubpf_host import needs_bpf

APIS = [pytest.param(hip(), id="hip"), pytest.param(cuda(), id="cuda")]
needs_uprobes = pytest.mark.skipif(not bpf_syscall._UPROBE_TYPE.exists(), reason="needs uprobes")


@pytest.mark.parametrize("api", APIS)
def test_a_table_makes_sense(api: Api) -> None:
    symbols = [f.symbol for f in api.functions]
    assert len(set(symbols)) == len(symbols)
    for function in api.functions:
        assert function.group in GROUPS and function.result in RESULTS
        assert function.kernel_name in ("", *KERNEL_NAMING)
        arrays.layout(function)  # raises ValueError if the program cannot read it
        if function.group == "launch" and ("grid" in function.places or "block" in function.places):
            assert {"kernel", "grid", "block", "shared", "stream"} <= set(function.places)
        if "count" in function.places:
            assert "bytes" in function.places
    arrays.layouts(enumerate(api.functions), 2048 * 12)  # CALL_FUNCTIONS


@pytest.mark.parametrize("api", APIS)
def test_what_does_next_to_nothing_is_chosen_by_name_only(api: Api) -> None:
    assert all(f.group != "trivial" for _, f in api.choose())
    chosen = api.choose(["*GetLastError", "launch"])
    assert {f.group for _, f in chosen} == {"trivial", "launch"}
    assert all(api.functions[number] is f for number, f in chosen)
    with pytest.raises(UsageError, match=r"no function is named 'nothing'"):
        api.choose(["*Malloc*", "nothing"])


@pytest.mark.parametrize(
    ("api", "name", "value", "failed", "text"),
    [
        (hip(), "hipMalloc", 0, False, "hipSuccess"),
        (hip(), "hipMalloc", 101, True, "hipErrorInvalidDevice"),
        (hip(), "hipMalloc", 600, True, "hipErrorNotReady"),
        (hip(), "hipEventQuery", 600, False, "hipErrorNotReady"),
        (hip(), "hipMalloc", 12345, True, "12345"),
        (hip(), "hiprtcCompileProgram", 6, True, "HIPRTC_ERROR_COMPILATION"),
        (hip(), "hipGetErrorName", 0x7F00, False, "0x7f00"),
        (cuda(), "cudaMalloc", 2, True, "cudaErrorMemoryAllocation"),
        (cuda(), "cuMemAlloc", 2, True, "CUDA_ERROR_OUT_OF_MEMORY"),
        (cuda(), "cuStreamQuery", 600, False, "CUDA_ERROR_NOT_READY"),
        (cuda(), "cudaStreamQuery_ptsz", 600, False, "cudaErrorNotReady"),
        (cuda(), "__cudaLaunchKernel", 1, True, "cudaErrorInvalidValue"),
    ],
)
def test_results(api: Api, name: str, value: int, failed: bool, text: str) -> None:
    function = next(f for f in api.functions if f.name == name)
    assert (api.failed(function, value), api.error(function, value)) == (failed, text)


def test_places() -> None:
    function = ApiFunction("f", "f", "copy", "grid=1:packed block=s0:items shared=2@24 count=#4")
    assert function.places == {
        "grid": ArgumentPlace(1, packed=True),
        "block": ArgumentPlace(6, items=True),
        "shared": ArgumentPlace(2, offset=24),
        "count": ArgumentPlace(number=4),
    }


@pytest.mark.parametrize("layout", ["kernel=6", "kernel", "what=1", "kernel=1:round", "bytes=#x"])
def test_layouts_that_say_nothing(layout: str) -> None:
    with pytest.raises(ValueError, match=r"no|from the seventh"):
        _ = ApiFunction("f", "f", "other", layout).places


def test_a_row_says_all_about_a_function() -> None:
    text = """
module:
  find kernel_name=by_name out=0 name=2 symbol=_Z4findv
stream:
  ready returns=query stream=0
# a comment
  copy{_v2}[_ptsz] bytes=2
errors cu:
  1 CUDA_ERROR
errors cuda:
  1 cudaError
"""
    assert parse(text) == (
        (
            ApiFunction("find", "_Z4findv", "module", "out=0 name=2", "status", "by_name"),
            ApiFunction("ready", "ready", "stream", "stream=0", "query"),
            ApiFunction("copy", "copy_v2", "stream", "bytes=2"),
            ApiFunction("copy_ptsz", "copy_v2_ptsz", "stream", "bytes=2"),
        ),
        {"cu": {1: "CUDA_ERROR"}, "cuda": {1: "cudaError"}},
    )


@pytest.mark.parametrize(
    "text",
    ["nothing:", "module:\n  f returns=void", "module:\n  f kernel_name=guessed", "module:\n  f[_ptsz"],
)
def test_an_invalid_row_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a group|unknown value|not the name"):
        parse(text)


def exported(path: Path) -> set[str]:
    done = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True)
    lines = (line.split() for line in done.stdout.splitlines())
    return {line[-1].partition("@")[0] for line in lines if line[-2] == "T"}


@needs_hip
def test_the_table_has_all_functions_of_the_real_library() -> None:
    internal = {"hipEnableActivityCallback", "hipInitActivityCallback"}  # for profilers
    found = {n for n in exported(gpubpf_hip.real()) if not n.startswith(("amd_dbgapi", "_Z"))}
    assert found - {f.symbol for f in hip().functions} - internal == set()


@pytest.mark.skipif(not (LIBRARIES / "libcuda.so.1").exists(), reason="needs the embedded device")
def test_the_table_has_all_functions_of_the_embedded_device() -> None:
    found = exported(LIBRARIES / "libcuda.so.1") | exported(LIBRARIES / "libcudart.so.13")
    table = {f.symbol for f in cuda().functions}
    absent = {n for n in found - table if not n.startswith("cudasim")}
    assert {
        n for n in absent if f"{n}_v2" not in table
    } == set()  # functions of CUDA 3 and before, with 32-bit addresses


# --- calls ---


def seen(
    api: Api, libraries: list[Path], command: list[str], environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return all calls that a program makes to these libraries, with the fields of their layouts."""
    api = replace(api, libraries=tuple(str(p) for p in libraries))
    calls = CallProbes(api, api.choose(("*",)), CallOptions(events=True), lambda text: None)
    calls.start()
    try:
        calls.trace(os.getpid())
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        calls.forget(os.getpid())
        assert process.wait(200) == 0
        time.sleep(0.01)
        events = calls.events()
        assert calls.lost == 0
    finally:
        calls.close()
    return [described(api, events[i : i + 1]) for i in range(len(events)) if events["tgid"][i] == process.pid]


def described(api: Api, event: Any) -> dict[str, Any]:
    function = api.functions[int(event["function"][0])]
    found: dict[str, Any] = {"api": function.name, "result": int(event["result"][0]) & 0xFFFFFFFF}
    for field in function.places:
        if field in ("grid", "block"):
            shapes = arrays.shapes(function, event, field)
            assert shapes is not None
            found[field] = tuple(shapes[0].tolist())
        elif field != "out":
            values = arrays.values(function, event, field)
            assert values is not None
            found[field] = int(values[0])
    if "count" in found:
        found["bytes"] *= found.pop("count")
    return found


GRID, BLOCK = (10, 2, 3), (64, 4, 1)
EXPECTED: dict[str, dict[str, Any]] = {  # what hip/program.c passes; handles are checked separately
    "hipInit": {},
    "hipGetDeviceCount": {},
    "hipDeviceSynchronize": {},
    "hipMalloc": {"bytes": 65536},
    "hipMallocAsync": {"bytes": 65536},
    "hipMallocManaged": {"bytes": 65536},
    "hipMallocPitch": {"bytes": 60000},
    "hipHostMalloc": {"bytes": 65536},
    "hipMemGetInfo": {},
    "hipMemcpy": {"bytes": 4096, "copy": 1},
    "hipMemcpyAsync": {"bytes": 8192, "copy": 2},
    "hipMemcpyHtoD": {"bytes": 1234},
    "hipMemcpyDtoH": {"bytes": 4321},
    "hipMemcpy2D": {"bytes": 6000, "copy": 1},
    "hipMemcpy2DAsync": {"bytes": 4000, "copy": 1},
    "hipMemset": {"bytes": 3000},
    "hipMemsetAsync": {"bytes": 5000},
    "hipMemsetD32": {"bytes": 2800},
    "hipStreamCreate": {},
    "hipStreamSynchronize": {},
    "hipStreamQuery": {},
    "hipEventCreate": {},
    "hipEventRecord": {},
    "hipStreamWaitEvent": {},
    "hipEventQuery": {},
    "hipEventSynchronize": {},
    "hipModuleLoadData": {},
    "hipModuleGetFunction": {},
    "hipLaunchKernel": {"grid": GRID, "block": BLOCK, "shared": 64},
    "hipLaunchKernel_spt": {"grid": GRID, "block": BLOCK, "shared": 32},
    "hipExtLaunchKernel": {"grid": GRID, "block": BLOCK, "shared": 16},
    "hipLaunchCooperativeKernel": {"grid": GRID, "block": BLOCK, "shared": 8},
    "hipModuleLaunchKernel": {"grid": (7, 6, 5), "block": (32, 2, 4), "shared": 96},
    "hipExtModuleLaunchKernel": {"grid": (10, 6, 2), "block": (32, 2, 4), "shared": 112},
    "hipStreamDestroy": {},
    "hipFree": {},
}
LATER = {"hipLaunchKernelExC": {"grid": GRID, "block": BLOCK, "shared": 80}}
HANDLES = ("kernel", "stream", "name")


def plain(call: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in call.items() if key not in ("api", "result", *HANDLES)}


@needs_hip
@needs_bpf
@needs_uprobes
def test_each_call_of_the_real_library_is_seen_once_with_its_arguments(tmp_path: Path) -> None:
    """Without a GPU all calls fail: with 100 if they count devices, otherwise with 101."""
    library = gpubpf_hip.real()
    made = gpubpf_hip.program(tmp_path, library)
    told = gpubpf_hip.run([str(made), *EXPECTED])
    found = seen(hip(), [library], [str(made), *EXPECTED])
    found = [call for call in found if not call["api"].startswith("__")]
    assert {call["api"]: plain(call) for call in found} == EXPECTED
    assert [call["api"] for call in found] == list(EXPECTED)
    if told["hipInit"].result:  # no GPU
        assert {call["api"]: call["result"] for call in found} == {
            name: 100 if name == "hipGetDeviceCount" else 101 for name in EXPECTED
        }


@needs_bpf
@needs_uprobes
def test_calls_that_succeed_with_handles(tmp_path: Path) -> None:
    library = gpubpf_hip.standin(tmp_path, 7)
    made = gpubpf_hip.program(tmp_path, library)
    names = ["hipStreamCreate", *(n for n in EXPECTED if n != "hipStreamCreate")]
    names.insert(names.index("hipFree"), "hipLaunchKernelExC")
    found = seen(hip(), [library], [str(made), *names])
    found = [call for call in found if not call["api"].startswith("__")]
    calls = {call["api"]: call for call in found}
    assert {name: plain(call) for name, call in calls.items()} == EXPECTED | LATER
    assert {call["result"] for name, call in calls.items()} == {0}
    streams = {call["stream"] for name, call in calls.items() if call.get("stream")}
    assert len(streams) == 1  # the one that was created
    kernels = {name: call["kernel"] for name, call in calls.items() if "kernel" in call}
    assert kernels["hipLaunchKernel"] == kernels["hipLaunchKernelExC"] == kernels["hipExtLaunchKernel"]
    assert kernels["hipModuleLaunchKernel"] == kernels["hipExtModuleLaunchKernel"] != 0


PYTHON_PROGRAM = """
from hip import hip

ONE_WAY = hip.hipMemcpyKind.hipMemcpyHostToDevice
print(int(hip.hipGetDeviceCount()[0]))
hip.hipMalloc(12345)
hip.hipMemcpy(bytearray(4096), bytearray(4096), 4000, ONE_WAY)
module = hip.hipModuleLoadData(b"nothing")[1]
kernel = hip.hipModuleGetFunction(module, b"triton_add")[1]
hip.hipModuleLaunchKernel(kernel, gridDimX=7, gridDimY=6, gridDimZ=5, blockDimX=32, blockDimY=2, blockDimZ=4,
                          sharedMemBytes=96, stream=None, kernelParams=None, extra=None)
for _ in range(10):
    hip.hipDeviceSynchronize()
"""


@needs_hip
@needs_bpf
@needs_uprobes
@pytest.mark.skipif(importlib.util.find_spec("hip") is None, reason="needs hip-python")
def test_calls_from_python(tmp_path: Path) -> None:
    (tmp_path / "libamdhip64.so").symlink_to(
        gpubpf_hip.real()
    )  # the name that the development package installs
    command = [sys.executable, "-c", PYTHON_PROGRAM]
    found = seen(hip(), [gpubpf_hip.real()], command, os.environ | {"LD_LIBRARY_PATH": str(tmp_path)})
    assert [(call["api"], plain(call)) for call in found] == [
        ("hipGetDeviceCount", {}),
        ("hipMalloc", {"bytes": 12345}),
        ("hipMemcpy", {"bytes": 4000, "copy": 1}),
        ("hipModuleLoadData", {}),
        ("hipModuleGetFunction", {}),
        ("hipModuleLaunchKernel", {"grid": (7, 6, 5), "block": (32, 2, 4), "shared": 96}),
        *[("hipDeviceSynchronize", {})] * 10,
    ]
    assert {call["result"] for call in found} <= {0, 100, 101}


CUDA_PROGRAM = r"""
#include <cuda.h>
#include <cstring>
__global__ void add(float *p, int n) { p[n] = 1; }
int main() {
    char *p, host[8192] = {};
    size_t pitch;
    cudaStream_t stream;
    cudaMalloc(&p, 8192);
    cudaStreamCreate(&stream);
    cudaMemcpy(p, host, 4096, cudaMemcpyHostToDevice);
    cudaMemcpyAsync(host, p, 2048, cudaMemcpyDeviceToHost, stream);
    cudaMemcpy2D(p, 512, host, 256, 100, 7, cudaMemcpyHostToDevice);
    cudaMemset(p, 0, 300);
    add<<<dim3(2, 3, 4), dim3(8, 2, 1), 64, stream>>>((float *)p, 1);
    int n = 1;
    void *arguments[] = {&p, &n};
    cudaLaunchConfig_t c;
    memset(&c, 0, sizeof(c));
    c.gridDim = dim3(3, 2, 1), c.blockDim = dim3(16, 1, 2), c.dynamicSmemBytes = 128, c.stream = stream;
    cudaLaunchKernelExC(&c, (const void *)add, arguments);
    cudaFunction_t f;
    cudaGetFuncBySymbol(&f, (const void *)add);
    cuLaunchKernel((CUfunction)f, 5, 4, 3, 4, 2, 8, 256, stream, arguments, nullptr);
    cuMemsetD32((CUdeviceptr)p, 1, 50);
    cuMemcpyDtoH(host, (CUdeviceptr)p, 77);
    cudaStreamSynchronize(stream);
    cudaMallocPitch(&p, &pitch, 100, 5);
    return cudaDeviceSynchronize();
}
"""


@needs_bpf
@needs_uprobes
def test_calls_of_cuda(tmp_path: Path) -> None:
    made = gpubpf_cuda.build(CUDA_PROGRAM, tmp_path / "calls", f"-L{LIBRARIES}", "-lcuda")
    libraries = [LIBRARIES / "libcuda.so.1", LIBRARIES / "libcudart.so.13"]
    found = seen(cuda(), libraries, [str(made)], launcher.environment(os.environ))
    calls = {call["api"]: call for call in found if not call["api"].startswith(("__cudaP", "__cudaR"))}
    expected: dict[str, dict[str, Any]] = {
        "cudaMalloc": {"bytes": 8192},
        "cudaMemcpy": {"bytes": 4096, "copy": 1},
        "cudaMemcpyAsync": {"bytes": 2048, "copy": 2},
        "cudaMemcpy2D": {"bytes": 700, "copy": 1},
        "cudaMemset": {"bytes": 300},
        "cudaLaunchKernelExC": {"grid": (3, 2, 1), "block": (16, 1, 2), "shared": 128},
        "cuLaunchKernel": {"grid": (5, 4, 3), "block": (4, 2, 8), "shared": 256},
        "cuMemsetD32": {"bytes": 200},
        "cuMemcpyDtoH": {"bytes": 77},
        "cudaMallocPitch": {"bytes": 500},
    }
    launch = {"grid": (2, 3, 4), "block": (8, 2, 1), "shared": 64}
    assert plain(calls.get("__cudaLaunchKernel") or calls["cudaLaunchKernel"]) == launch
    assert {name: plain(calls[name]) for name in expected} == expected
    assert {calls[name]["result"] for name in expected} == {0}
    streams = {calls[n]["stream"] for n in ("cuLaunchKernel", "cudaLaunchKernelExC", "cudaStreamSynchronize")}
    assert len(streams) == 1
