"""The embedded device for tests: its libraries, programs built by nvcc, and its driver by ctypes."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpubpf_cuda import run_nvcc

ROOT = Path(__file__).resolve().parents[2]
CUDASIM = ROOT / "lib" / "cudasim"
LIBRARIES = CUDASIM / "lib"
PROGRAMS = Path(__file__).parents[1] / "cudasim" / "programs"
_BUILD = ROOT / "build" / "tests"


@functools.cache
def libraries() -> Path:
    """The folder with libcuda.so.1 and libcudart.so.13, brought up to date by make."""
    _BUILD.mkdir(parents=True, exist_ok=True)
    with open(_BUILD / "cudasim.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "--silent", "-j2", "-C", str(CUDASIM)], check=True, stdout=subprocess.DEVNULL)
    return LIBRARIES


@functools.cache
def cuda_include() -> str | None:
    """The directory of the CUDA headers that the build finds; None where there are none."""
    command = ["make", "--silent", "-C", str(CUDASIM), "--eval", "where: ; @echo $(CUDA_INCLUDE)", "where"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def nvcc() -> str:
    """The compiler; skips the test where there is none."""
    found = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("no nvcc here; script/setup --dev installs one")
    return found


@functools.cache
def program(name: str, *options: str) -> Path:
    """`programs/NAME.cu` built by nvcc with the shared runtime; kept by content. Skips where there is no nvcc."""
    compiler = nvcc()
    source = PROGRAMS / f"{name}.cu"
    content = source.read_bytes() + (PROGRAMS / "check.h").read_bytes() + " ".join(options).encode()
    _BUILD.mkdir(parents=True, exist_ok=True)
    target = _BUILD / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}"
    if not target.exists():
        made = target.with_suffix(f".{os.getpid()}")
        runtime = ["-cudart", "none", f"-L{libraries()}", "-lcudart"]
        run_nvcc([compiler, "-w", *runtime, *options, str(source), "-o", str(made)])
        made.replace(target)
    return target


def environment(hostile: bool | None = None, **more: str) -> dict[str, str]:
    """The environment for a program on the embedded device."""
    made = {**os.environ, "LD_LIBRARY_PATH": str(libraries()), **more}
    if hostile is not None:
        made["CUDASIM_HOSTILE"] = str(int(hostile))
    return made


def run(
    command: list[str | Path], hostile: bool | None = None, timeout: float = 60, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a program on the embedded device; its output as text."""
    return subprocess.run(
        [str(part) for part in command],
        env=environment(hostile, **more),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_python(code: str, hostile: bool | None = None, timeout: float = 60, **more: str) -> str:
    """Run Python code in a process of its own, with this module's names imported; what it printed."""
    prelude = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom cudasim_device import *\n"
    )
    done = run([sys.executable, "-c", prelude + textwrap.dedent(code)], hostile, timeout, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class DriverError(Exception):
    """A driver call that returned something else than CUDA_SUCCESS."""

    def __init__(self, name: str, status: int) -> None:
        super().__init__(f"{name} gives {status}")
        self.status = status


class Driver:
    """libcuda.so.1 by ctypes: `cu.cuMemAlloc_v2(…)` raises DriverError, `cu.status("cuX", …)` returns the number."""

    def __init__(self, start: bool = True) -> None:
        self.library = ctypes.CDLL(str(libraries() / "libcuda.so.1"))
        if start:
            self.cuInit(0)
            self.context = ctypes.c_void_p()
            self.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), 0)
            self.cuCtxSetCurrent(self.context)

    def status(self, name: str, *arguments: object) -> int:
        return int(getattr(self.library, name)(*arguments))

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        function = getattr(self.library, name)

        def call(*arguments: object) -> None:
            if (status := function(*arguments)) != 0:
                raise DriverError(name, status)

        return call

    def handle(self, name: str, *arguments: object) -> ctypes.c_void_p:
        """A call whose first argument takes the handle or address that it makes."""
        made = ctypes.c_void_p()
        getattr(self, name)(ctypes.byref(made), *arguments)
        return made

    def number(self, name: str, *arguments: object, kind: type = ctypes.c_int) -> int:
        """A call whose first argument takes a number."""
        value = kind()
        getattr(self, name)(ctypes.byref(value), *arguments)
        return int(value.value)

    def module(self, ptx: str) -> ctypes.c_void_p:
        return self.handle("cuModuleLoadData", ptx.encode() + b"\0")

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        return self.handle("cuModuleGetFunction", module, name.encode())

    def memory(self, size: int) -> ctypes.c_void_p:
        return self.handle("cuMemAlloc_v2", ctypes.c_size_t(size))

    def launch_status(
        self,
        function: ctypes.c_void_p,
        *arguments: object,
        grid: int = 1,
        block: int = 1,
        shared: int = 0,
        stream: object = None,
        name: str = "cuLaunchKernel",
    ) -> int:
        """Launch with ctypes values as parameters; the status."""
        pointers = (ctypes.c_void_p * max(1, len(arguments)))(
            *(ctypes.cast(ctypes.pointer(a), ctypes.c_void_p) for a in arguments)
        )
        return self.status(name, function, grid, 1, 1, block, 1, 1, shared, stream, pointers, None)

    def launch(self, function: ctypes.c_void_p, *arguments: object, **shape: object) -> None:
        if (status := self.launch_status(function, *arguments, **shape)) != 0:  # type: ignore[arg-type]
            raise DriverError("cuLaunchKernel", status)

    def read(self, address: ctypes.c_void_p, count: int = 1) -> list[int]:
        """`count` 32-bit numbers of device memory."""
        values = (ctypes.c_int32 * count)()
        self.cuMemcpyDtoH_v2(values, address, ctypes.c_size_t(4 * count))
        return list(values)


HEADER = ".version 7.0\n.target sm_70\n.address_size 64\n"
# put(int *where, int value) stores; spin(int *flag) waits until it is not zero.
PUT = """
.visible .entry put(.param .u64 where, .param .u32 value) {
    .reg .b64 %rd<3>; .reg .b32 %r<2>;
    ld.param.u64 %rd1, [where];
    ld.param.u32 %r1, [value];
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], %r1;
    ret;
}
"""
SPIN = """
.visible .entry spin(.param .u64 flag) {
    .reg .b64 %rd<3>; .reg .b32 %r<2>; .reg .pred %p<2>;
    ld.param.u64 %rd1, [flag];
again:
    ld.volatile.global.u32 %r1, [%rd1];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra again;
    ret;
}
"""
VARIABLES = """
.global .align 4 .u32 visible_counter = 5;
.global .align 4 .u32 _ZZ4kernE5count = 6;
.const .align 4 .u32 constant_value = 7;
.visible .entry total(.param .u64 where) {
    .reg .b64 %rd<2>; .reg .b32 %r<6>;
    ld.param.u64 %rd1, [where];
    ld.global.u32 %r1, [visible_counter];
    ld.global.u32 %r2, [_ZZ4kernE5count];
    ld.const.u32 %r3, [constant_value];
    add.u32 %r4, %r1, %r2;
    add.u32 %r5, %r4, %r3;
    st.global.u32 [%rd1], %r5;
    ret;
}
"""
