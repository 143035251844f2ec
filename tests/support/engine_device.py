"""The engine of the embedded device, driven by ctypes: PTX text, NumPy arrays, launches."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from gpubpf_cuda import run_nvcc

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "lib" / "cudasim" / "src"
HARNESS = Path(__file__).parents[1] / "cudasim" / "engine_harness.cpp"
_BUILD = ROOT / "build" / "tests"


@functools.cache
def library() -> ctypes.CDLL:
    """The engine and the harness as a shared object; rebuilt when a source is newer."""
    _BUILD.mkdir(parents=True, exist_ok=True)
    with open(_BUILD / "lock", "w") as lock:  # several test processes at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _library()


def _made_for_the_device(source: Path) -> Path:
    """Where the embedded device's Makefile puts the object of a source; of one that is not the device's, a path of no file."""
    folder = next((f for f in (SOURCES, ROOT / "lib") if source.is_relative_to(f)), ROOT)
    return ROOT / "lib" / "cudasim" / "build" / source.relative_to(folder).with_suffix(".o")


def _library() -> ctypes.CDLL:
    embedded = ROOT / "lib" / "embedded"
    sources = [
        *sorted((SOURCES / "engine").glob("*.cpp")),
        SOURCES / "error_text.cpp",
        embedded / "cache.cpp",
        HARNESS,
    ]
    device = [SOURCES / "device_abi.h", SOURCES / "device_collectives.h"]
    headers = [*(SOURCES / "engine").glob("*.h"), *device, *embedded.glob("*.h")]
    extra = os.environ.get("CUDASIM_TEST_CXXFLAGS", "").split()
    objects, compiling = [], []
    for source in sources:
        newest = max(p.stat().st_mtime for p in (source, *headers))
        made = _made_for_the_device(source)
        if not extra and made.exists() and made.stat().st_mtime >= newest:
            objects.append(made)
            continue
        target = _BUILD / (source.stem + "".join(extra).replace("/", "_") + ".o")
        objects.append(target)
        if not target.exists() or target.stat().st_mtime < newest:
            command = [
                "g++",
                "-std=c++17",
                "-O2",
                "-g",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-fPIC",
                *extra,
                f"-I{SOURCES}",
                f"-I{ROOT / 'lib'}",
                "-c",
            ]
            compiling.append((target, subprocess.Popen([*command, str(source), "-o", str(target)])))
    for target, process in compiling:
        if process.wait() != 0:
            target.unlink(missing_ok=True)
            raise RuntimeError(f"{target.stem} does not compile")
    output = _BUILD / ("libengine" + "".join(extra).replace("/", "_") + ".so")
    if not output.exists() or any(o.stat().st_mtime > output.stat().st_mtime for o in objects):
        subprocess.run(
            ["g++", *extra, "-shared", *map(str, objects), "-o", str(output), "-ldl", "-lpthread"], check=True
        )
    os.environ.setdefault("CUDASIM_PYTHON", sys.executable)
    os.environ.setdefault("CUDASIM_PYTHONPATH", str(ROOT / "lib"))
    found = ctypes.CDLL(str(output))
    found.harness_allocate.restype = ctypes.c_uint64
    found.harness_allocate.argtypes = [ctypes.c_uint64]
    found.harness_load.restype = ctypes.c_void_p
    found.harness_variable.restype = ctypes.c_uint64
    found.harness_printed.restype = ctypes.c_uint64
    return found


class Array:
    """Device memory that NumPy sees, too."""

    def __init__(self, data: np.ndarray) -> None:
        data = np.ascontiguousarray(data)
        self.address = library().harness_allocate(max(1, data.nbytes))
        buffer = (ctypes.c_uint8 * max(1, data.nbytes)).from_address(self.address)
        self.host = np.frombuffer(buffer, dtype=data.dtype, count=data.size).reshape(data.shape)
        self.host[...] = data


class DeviceFault(Exception):
    def __init__(self, code: int, message: str, where: list[int]) -> None:
        super().__init__(message)
        self.code = code
        self.address = where[0]
        self.block = tuple(where[1:4])
        self.thread = tuple(where[4:7])
        self.line = where[7]


class TranslateFailure(Exception):
    def __init__(self, code: int, log: str) -> None:
        super().__init__(log)
        self.code = code


class Device:
    """A loaded module; `virtual`: on the virtual clock.

    Of the last launch there: its `duration` in ns, and when each thread ended (`ends`; 0 for one that did not).
    """

    def __init__(self, ptx: str, virtual: bool = False) -> None:
        self.duration = 0
        self.ends = np.zeros(0, np.uint64)
        text = ptx.encode()
        code = ctypes.c_int(0)
        log = ctypes.create_string_buffer(4096)
        self.module = library().harness_load(
            text, ctypes.c_uint64(len(text)), int(virtual), ctypes.byref(code), log, ctypes.c_uint64(4096)
        )
        if not self.module:
            raise TranslateFailure(code.value, log.value.decode())

    def variable(self, name: str, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
        address = library().harness_variable(ctypes.c_void_p(self.module), name.encode())
        assert address, name
        count = int(np.prod(shape))
        buffer = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
        return np.frombuffer(buffer, dtype=dtype).reshape(shape)

    def kernel(self, name: str) -> tuple[int, ...]:
        out = (ctypes.c_uint32 * 6)()
        assert library().harness_kernel(ctypes.c_void_p(self.module), name.encode(), out) == 0
        return tuple(out)

    def launch(
        self,
        name: str,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *arguments: object,
        shared: int = 0,
        stack: int = 1024,
        seed: int | None = None,
        start: int = 0,
    ) -> None:
        """Arguments: Array, NumPy scalars (of the parameter's size), ints (64 bits), bytes."""

        def three(n: int | tuple[int, ...]) -> ctypes.Array:
            values = (n,) if isinstance(n, int) else n
            return (ctypes.c_uint32 * 3)(*values, *([1] * (3 - len(values))))

        kept = []
        for a in arguments:
            if isinstance(a, Array):
                kept.append(ctypes.c_uint64(a.address))
            elif isinstance(a, (np.generic, bytes)):
                raw = a if isinstance(a, bytes) else a.tobytes()
                kept.append((ctypes.c_uint8 * len(raw)).from_buffer_copy(raw))
            else:
                kept.append(ctypes.c_uint64(int(a) & (1 << 64) - 1))
        values = (ctypes.c_void_p * max(1, len(kept)))(
            *[ctypes.cast(ctypes.byref(k), ctypes.c_void_p) for k in kept]
        )
        message = ctypes.create_string_buffer(1024)
        where = (ctypes.c_uint64 * 8)()
        duration = ctypes.c_uint64()
        self.ends = np.zeros(int(np.prod(three(grid)) * np.prod(three(block))), np.uint64)
        code = library().harness_launch(
            ctypes.c_void_p(self.module),
            name.encode(),
            three(grid),
            three(block),
            ctypes.c_uint32(shared),
            values,
            ctypes.c_uint32(stack),
            int(seed is not None),
            ctypes.c_uint64(seed or 0),
            message,
            ctypes.c_uint64(1024),
            where,
            ctypes.c_uint64(start),
            ctypes.byref(duration),
            self.ends.ctypes.data_as(ctypes.POINTER(ctypes.c_uint64)),
        )
        self.duration = duration.value
        if code == -1:
            raise KeyError(name)
        if code:
            raise DeviceFault(code, message.value.decode(), list(where))


def printed() -> str:
    out = ctypes.create_string_buffer(1 << 20)
    n = library().harness_printed(out, ctypes.c_uint64(1 << 20))
    return out.raw[:n].decode()


def nvcc() -> str | None:
    return shutil.which("nvcc") or next(
        (p for p in ("/usr/local/cuda/bin/nvcc", "/usr/local/cuda-13.0/bin/nvcc") if Path(p).exists()), None
    )


@functools.cache
def compile_cuda(source: str, *options: str) -> str:
    """CUDA C++ → PTX by nvcc."""
    program = nvcc()
    assert program is not None
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernels.cu"
        path.write_text(source)
        command = [program, "-ptx", "-arch=sm_80", *options, str(path), "-o", str(path) + ".ptx"]
        run_nvcc(command, env={k: v for k, v in os.environ.items() if k != "LD_PRELOAD"})
        return Path(str(path) + ".ptx").read_text()
