"""The names of kernels: from symbols, from registrations, and from code that registers, before and after the tool attaches."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpubpf_cuda
import gpubpf_hip
from cudasim import launcher
from gpubpf.calls import kernel_names
from gpubpf.calls.api import Api, cuda, hip
from gpubpf.calls.kernel_names import BY_HANDLE, BY_NAME, REGISTERED, KernelNames, _ElfFile
from gpubpf.calls.probes import CallOptions, CallProbes
from gpubpf.errors import ImageError
from gpubpf.kernel import bpf_syscall
from gpubpf.record import replace
from gpubpf.traced.device import LIBRARIES
from gpubpf_host import needs_bpf

HERE = Path(__file__).with_name("hip")
TEXT = "#include <gpubpf_calls.h>\n#include <gpubpf_kernels.h>\n"
SAXPY, PLAIN = "saxpy(float, float const*, float*, int)", "plain_kernel"
REDUCE = "void math::reduce<float, 256>(float const*, float*, int)"
OURS = {"hipLaunchKernel": {SAXPY, REDUCE}, "hipLaunchKernel_spt": {PLAIN}, "hipLaunchKernelExC": {SAXPY}}
LAUNCHES = ("hipLaunchKernel", "launch", "hipLaunchKernel_spt", "hipLaunchKernelExC")

needs_uprobes = pytest.mark.skipif(not bpf_syscall._UPROBE_TYPE.exists(), reason="needs uprobes")


def test_a_user_with_many_names_does_not_take_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process can report any names, as often as it likes."""
    monkeypatch.setattr(kernel_names, "_MOST_NAMES", 160)
    monkeypatch.setattr(kernel_names.scans, "user_of", lambda pid: pid // 100)
    kept = KernelNames(hip())
    for number in range(20):
        kept._keep(700, number, f"theirs{number}")
    for pid in (100, 101, 102):
        for number in range(1000):
            kept._keep(pid, number, "x" * (300 * (number % 3)))
            kept._keep(pid, number, "y")  # another name of the same handle
    assert kept._known[700] == {number: f"theirs{number}" for number in range(20)}
    assert kept._cost == sum(kept._costs.values()) <= 160 + 3
    costs = {pid: sum(map(kernel_names._cost, known.values())) for pid, known in kept._known.items()}
    assert costs == dict(kept._costs) and kept._known.keys() == kept._users.keys()
    kept._forget(700)
    assert 700 not in kept._known and kept._cost == sum(kept._costs.values())


@dataclass
class Seen:
    """What a tool knows: the names of launched kernels by process and function."""

    calls: CallProbes
    kernels: KernelNames

    def names(self) -> dict[int, dict[str, set[str | None]]]:
        self.kernels.read(self.calls.host)
        found: dict[int, dict[str, set[str | None]]] = {}
        for row in self.calls.sums():
            pid, handle = int(row["tgid"]), int(row["kernel"])
            if handle:
                name = self.kernels.name(pid, handle)
                function = self.calls.api.functions[row["function"]].name
                found.setdefault(pid, {}).setdefault(function, set()).add(name.full if name else None)
        return found


@contextlib.contextmanager
def watching(api: Api, *paths: Path) -> Iterator[Seen]:
    """Trace calls to libraries that are known before a process maps them."""
    api = replace(api, libraries=tuple(str(p) for p in paths))
    calls = CallProbes(api, api.choose(), CallOptions(), lambda text: None, TEXT)
    kernels = KernelNames(api, calls.bpf)
    calls.start()
    try:
        yield Seen(calls, kernels)
    finally:
        calls.close()


def started(seen: Seen, command: list[str], **how: Any) -> subprocess.Popen[str]:
    """Start a process that is traced from its first call on, with its children."""
    seen.calls.trace(os.getpid())
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **how)
    finally:
        seen.calls.forget(os.getpid())


def attached(seen: Seen, process: subprocess.Popen[str]) -> None:
    """Trace a running process from the moment that it is ready."""
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    seen.calls.trace(process.pid)
    seen.kernels.look(process.pid)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def library(place: Path) -> Path:
    return gpubpf_hip.standin(place, 5)


@pytest.fixture(scope="module")
def made(place: Path, library: Path) -> Path:
    return gpubpf_hip.program(place, library)


def stripped(path: Path) -> Path:
    bare = path.with_name(f"{path.name}-stripped")
    subprocess.run(["strip", "-o", str(bare), str(path)], check=True)
    return bare


# --- HIP, programs of ours ---


@pytest.mark.every(2)
@needs_bpf
@needs_uprobes
@pytest.mark.parametrize("bare", [False, True])
def test_all_that_a_program_registers_is_named(made: Path, library: Path, bare: bool) -> None:
    with watching(hip(), library) as seen:
        process = started(seen, [str(stripped(made) if bare else made), *LAUNCHES])
        process.communicate(timeout=60)
        assert seen.names() == {process.pid: OURS}
        assert seen.kernels.lost(seen.calls.host) == 0


@pytest.mark.every(3)
@needs_bpf
@needs_uprobes
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(
    "options", [("-O2",), ("-O0",), ("-Os",), ("-O2", "-no-pie", "-fno-pie"), ("-O0", "-no-pie", "-fno-pie")]
)
def test_a_program_that_registered_before_is_named(
    place: Path, library: Path, options: tuple[str, ...], bare: bool
) -> None:
    made = gpubpf_hip.program(place, library, HERE / "program.c", *options, name="before" + "".join(options))
    command = [str(stripped(made) if bare else made), "-w", *LAUNCHES]
    with watching(hip(), library) as seen:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        attached(seen, process)
        process.communicate("\n", timeout=60)  # it has ended when names are asked for
        assert seen.names() == {process.pid: OURS}


@needs_bpf
@needs_uprobes
def test_a_program_whose_file_is_gone(place: Path, made: Path, library: Path) -> None:
    copy = Path(shutil.copy(stripped(made), place / "gone"))
    with watching(hip(), library) as seen:
        command = [str(copy), "-w", *LAUNCHES]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        copy.unlink()
        attached(seen, process)
        process.communicate("\n", timeout=60)
        assert seen.names() == {process.pid: OURS}


@needs_bpf
@needs_uprobes
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, unshare")
@pytest.mark.parametrize("before", [False, True])
def test_a_program_in_name_spaces_of_its_own(place: Path, made: Path, library: Path, before: bool) -> None:
    """In its mount namespace the path is another file than in the tool's. It has its own PID namespace, too."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here, as in a chroot")
    (place / "mounted").mkdir(exist_ok=True)
    script = f"mount --bind {place} {place}/mounted && exec {place}/mounted/{stripped(made).name} -w {' '.join(LAUNCHES)}"
    command = ["unshare", "-m", "-p", "-f", "--mount-proc", "--kill-child", "sh", "-c", script]
    with watching(hip(), library) as seen:
        if before:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            (child,) = map(int, children.split())
            seen.calls.trace(child)
            seen.kernels.look(child)
        else:
            process = started(seen, command)
        process.communicate("\n", timeout=60)
        assert list(seen.names().values()) == [OURS]


@needs_bpf
@needs_uprobes
def test_functions_of_modules_are_named_where_they_were_seen(made: Path, library: Path) -> None:
    calls = ["hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel", "hipExtModuleLaunchKernel"]
    more = ["hipGetFuncBySymbol", "hipModuleLaunchKernel"]
    with watching(hip(), library) as seen:
        process = started(seen, [str(made), *calls, *more])
        process.communicate(timeout=60)
        name = "from_file(float*)"
        assert seen.names() == {
            process.pid: {"hipModuleLaunchKernel": {name, SAXPY}, "hipExtModuleLaunchKernel": {name}}
        }


@needs_bpf
@needs_uprobes
def test_a_child_knows_what_its_parent_registered(made: Path, library: Path) -> None:
    with watching(hip(), library) as seen:
        process = started(seen, [str(stripped(made)), "-f", "-w", *LAUNCHES])
        process.communicate("\n", timeout=60)
        names = seen.names()
        assert len(names) == 2 and process.pid in names
        assert list(names.values()) == [OURS, OURS]


@needs_bpf
@needs_uprobes
def test_a_process_that_becomes_another_program(made: Path, library: Path) -> None:
    with watching(hip(), library) as seen:
        process = started(seen, [str(made), "-x", *LAUNCHES])
        process.communicate(timeout=60)
        assert seen.names() == {process.pid: OURS}


def test_what_another_program_of_the_process_told_is_forgotten() -> None:
    kernels = KernelNames(hip())
    process = subprocess.Popen(["sh", "-c", "read go; exec sleep 60"], stdin=subprocess.PIPE)
    try:
        kernels.look(process.pid)
        kernels.read(Told((process.pid, BY_NAME, 0x70, 0, b"first")))  # type: ignore[arg-type]
        assert kernels.name(process.pid, 0x70) is not None
        assert process.stdin is not None
        before = os.stat(f"/proc/{process.pid}/exe")
        process.stdin.write(b"\n")
        process.stdin.close()
        until = time.monotonic() + 30
        while os.stat(f"/proc/{process.pid}/exe") == before and time.monotonic() < until:
            time.sleep(0.01)
        kernels.look(process.pid)
        assert kernels.name(process.pid, 0x70) is None
    finally:
        process.kill()
        process.wait()


def test_a_handle_that_nobody_told_of_has_no_name() -> None:
    kernels = KernelNames(hip())
    kernels.look(os.getpid())
    assert kernels.name(os.getpid(), 0xDEAD0000) is None
    assert kernels.name(os.getpid(), (1 << 64) - 1) is None
    assert kernels.name(1 << 30, 0x1000) is None  # no process


def test_a_process_that_maps_a_file_whose_tables_are_made_up(tmp_path: Path) -> None:
    data = bytearray(Path("/bin/true").read_bytes())
    data[0x28:0x30] = (1 << 44).to_bytes(8, "little")  # offset of the section headers
    made_up = tmp_path / "made_up"
    made_up.write_bytes(data)
    kernels = KernelNames(hip())
    with (
        made_up.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC, flags=mmap.MAP_PRIVATE) as area,
    ):
        start = np.frombuffer(area, "u1").ctypes.data
        kernels.look(os.getpid())
        assert kernels.name(os.getpid(), start + 8) is None


# --- records of the programs ---


class Told:
    """A stand-in for a host that returns records."""

    kind = np.dtype(
        [
            *(("handle", "<u8"), ("source", "<u8"), ("tgid", "<u4"), ("kind", "<u4"), ("part", "<u4")),
            *(("bytes", "<u4"), ("text", "S1", 224)),
        ]
    )

    def __init__(self, *rows: tuple[int, int, int, int, bytes]) -> None:
        """Process, kind, handle, source, name."""
        made = []
        for pid, kind, handle, source, name in rows:
            parts = [name[i : i + 223] for i in range(0, len(name) + 1, 223)] if kind != BY_HANDLE else [b""]
            for number, part in enumerate(parts[:18]):
                row = np.zeros((), self.kind)
                for key, value in (("handle", handle), ("source", source), ("tgid", pid), ("kind", kind)):
                    row[key] = value
                row["part"], row["bytes"] = number, 0 if kind == BY_HANDLE else len(part) + 1
                row["text"][: len(part)] = list(np.frombuffer(part, "S1"))
                made.append(row)
        self.rows = np.array(made, self.kind)

    def records(self, name: str) -> Any:
        assert name == "kernel_names"
        found, self.rows = self.rows, self.rows[:0]
        return found


GONE = 1 << 30  # no process has this number


@pytest.mark.parametrize("size", [1, 222, 223, 224, 446, 3000])
def test_names_of_any_length(size: int) -> None:
    kernels = KernelNames(hip())
    name = b"k" * size
    kernels.read(Told((GONE, BY_NAME, 0x70, 0, name), (GONE, BY_NAME, 0x80, 0, b"other")))  # type: ignore[arg-type]
    found = kernels.name(GONE, 0x70)
    assert found is not None and found.full == name.decode()
    other = kernels.name(GONE, 0x80)
    assert other is not None and other.full == "other"


def test_a_name_that_is_longer_than_records_can_say_is_read_where_it_lies() -> None:
    kernels = KernelNames(hip())
    name = b"k" * 6000
    held = ctypes.create_string_buffer(name)
    kernels.read(Told((os.getpid(), BY_NAME, 0x70, ctypes.addressof(held), name)))  # type: ignore[arg-type]
    found = kernels.name(os.getpid(), 0x70)
    assert found is not None and found.full == name.decode()
    kernels.read(Told((GONE, BY_NAME, 0x80, ctypes.addressof(held), name)))  # type: ignore[arg-type]
    assert kernels.name(GONE, 0x80) is None


def test_a_handle_that_is_used_again_is_what_it_was_given_last() -> None:
    kernels = KernelNames(hip())
    kernels.read(Told((GONE, BY_NAME, 0x70, 0, b"first")))  # type: ignore[arg-type]
    kernels.read(Told((GONE, BY_NAME, 0x70, 0, b"second")))  # type: ignore[arg-type]
    found = kernels.name(GONE, 0x70)
    assert found is not None and found.full == "second"


def test_handles_that_go_in_a_circle_have_no_name() -> None:
    kernels = KernelNames(cuda())
    told = Told(
        (GONE, BY_HANDLE, 0x70, 0x80, b""),
        (GONE, BY_HANDLE, 0x80, 0x70, b""),
        (GONE, BY_HANDLE, 0x90, 0x90, b""),
    )
    kernels.read(told)  # type: ignore[arg-type]
    assert [kernels.name(GONE, h) for h in (0x70, 0x80, 0x90)] == [None] * 3


@pytest.mark.parametrize(
    "name", [b"_ZL6hiddenPi.intern.91a9f1f0af28ab7e", b"__nv_static_25__36cc2ce6_4_v_cu_1cad6548__Z6hiddenPi"]
)
def test_static_kernels_of_programs_that_are_linked_on_the_device(name: bytes) -> None:
    kernels = KernelNames(hip())
    kernels.read(Told((GONE, REGISTERED, 0x70, 0, name)))  # type: ignore[arg-type]
    found = kernels.name(GONE, 0x70)
    assert found is not None and found.full == "hidden(int*)"


# --- compilers ---

HIP_SOURCE = r"""
#include <hip/hip_runtime.h>
#include <cstdio>
__global__ void saxpy(float a, const float *x, float *y, int n) { if (n) y[0] += a * x[0]; }
namespace math { template <typename T, int N> __global__ void reduce(const T *x, T *y, int n) { y[N] = x[n]; } }
static __global__ void hidden(int *p) { *p = 1; }
extern "C" __global__ void plain_kernel(int *p) { *p = 2; }
#ifdef LIBRARY
extern "C" void work() {
#else
int main() {
    puts("ready");
    fflush(stdout);
    getchar();
#endif
    float *p = nullptr;
    saxpy<<<dim3(10, 2, 3), dim3(64, 4), 64>>>(1.f, p, p, 5);
    math::reduce<float, 256><<<7, 256>>>(p, p, 5);
    hidden<<<1, 1>>>((int *)p);
    plain_kernel<<<1, 1>>>((int *)p);
}
"""
OF_HIPCC = {"hipLaunchKernel": {SAXPY, REDUCE, "hidden(int*)", PLAIN}}


@pytest.mark.every(6)
@needs_bpf
@needs_uprobes
@pytest.mark.skipif(not shutil.which("hipcc"), reason="needs hipcc")
@pytest.mark.parametrize(
    "options", ["-O0", "-O3", "-O0 -fno-pie -no-pie", "-O3 -fno-pie -no-pie", "-O2 -fgpu-rdc", "library"]
)
def test_programs_of_hipcc(place: Path, library: Path, options: str) -> None:
    made = place / f"hipcc{options.replace(' ', '')}"
    source = made.with_suffix(".hip")
    source.write_text(HIP_SOURCE)
    environment = {**os.environ, "HIP_PLATFORM": "amd", "LD_LIBRARY_PATH": str(place)}
    compiled = ["hipcc", "--offload-arch=gfx1030", source, "-o", made]
    if options == "library":
        subprocess.run([*compiled, "-O2", "-DLIBRARY", "-shared", "-fPIC"], check=True, env=environment)
        load = f"import ctypes; work = ctypes.CDLL({str(stripped(made))!r}).work"
        code = f"{load}; print('ready', flush=True); input(); work()"
        command = ["python3", "-c", code]
    else:
        subprocess.run([*compiled, *options.split()], check=True, env=environment)
        command = [str(stripped(made))]
    with watching(hip(), library) as seen:
        process = started(seen, command, env=environment)
        process.communicate("\n", timeout=60)
        assert seen.names() == {process.pid: OF_HIPCC}
    with watching(hip(), library) as seen:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        attached(seen, process)
        process.communicate("\n", timeout=60)
        assert seen.names() == {process.pid: OF_HIPCC}


CUDA_SOURCE = r"""
#include <cstdio>
namespace { template <class T> __global__ void scale(T *p) { *p = 2; } }
static __global__ void hidden(int *p) { *p = 1; }
__global__ void add(float *p, int n) { p[n] = 1; }
int main() {
    float *p;
    puts("ready");
    fflush(stdout);
    cudaMalloc(&p, 100);
    for (int i = 0; i < 2; i++) {
        getchar();
        add<<<1, 2>>>(p, 1);
        hidden<<<1, 1>>>((int *)p);
        void *arguments[] = {&p};
        cudaLaunchKernel((const void *)scale<float>, dim3(2), dim3(2), arguments, 0, 0);
    }
    return cudaDeviceSynchronize();
}
"""
CUDA_LIBRARIES = (LIBRARIES / "libcuda.so.1", LIBRARIES / "libcudart.so.13")
OF_NVCC = {"add(float*, int)", "hidden(int*)", "void (anonymous namespace)::scale<float>(float*)"}


@pytest.mark.every(2)
@pytest.mark.whole_machine
@needs_bpf
@needs_uprobes
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_programs_of_nvcc(place: Path, bare: bool, before: bool) -> None:
    made = place / "nvcc"
    if not made.exists():
        gpubpf_cuda.build(CUDA_SOURCE, made)
    environment = launcher.environment(os.environ)
    command = [str(stripped(made) if bare else made)]
    with watching(cuda(), *CUDA_LIBRARIES) as seen:
        if before:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            attached(seen, process)
        else:
            process = started(seen, command, env=environment)
            time.sleep(0.05)
            seen.kernels.look(process.pid)
        process.communicate("\n\n", timeout=60)
        (names,) = seen.names().values()
        assert set().union(*names.values()) == OF_NVCC


DRIVER_SOURCE = r"""
#include <cuda.h>
const char *ptx = ".version 7.5\n.target sm_75\n.address_size 64\n"
                  ".visible .entry _Z5firstPi(.param .u64 p) { ret; }\n.visible .entry second(.param .u64 p) { ret; }\n";
int main() {
    CUcontext context;
    CUmodule module;
    CUlibrary library;
    CUkernel kernel;
    CUfunction function;
    void *p = nullptr, *arguments[] = {&p};
    cuInit(0);
    cuDevicePrimaryCtxRetain(&context, 0);
    cuCtxSetCurrent(context);
    if (cuModuleLoadData(&module, ptx) || cuModuleGetFunction(&function, module, "_Z5firstPi"))
        return 1;
    cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, arguments, nullptr);
    if (cuLibraryLoadData(&library, ptx, 0, 0, 0, 0, 0, 0) || cuLibraryGetKernel(&kernel, library, "second"))
        return 2;
    cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, 0, arguments, nullptr);
    if (cuKernelGetFunction(&function, kernel))
        return 3;
    CUlaunchConfig c = {};
    c.gridDimX = c.gridDimY = c.gridDimZ = c.blockDimX = c.blockDimY = c.blockDimZ = 1;
    cuLaunchKernelEx(&c, function, arguments, nullptr);
    return cuCtxSynchronize();
}
"""


@pytest.mark.whole_machine
@needs_bpf
@needs_uprobes
def test_kernels_that_cudas_driver_gives(place: Path) -> None:
    made = gpubpf_cuda.build(DRIVER_SOURCE, place / "driver", f"-L{LIBRARIES}", "-lcuda")
    with watching(cuda(), *CUDA_LIBRARIES) as seen:
        process = started(seen, [str(made)], env=launcher.environment(os.environ))
        process.communicate(timeout=60)
        assert process.returncode == 0
        assert seen.names() == {
            process.pid: {"cuLaunchKernel": {"first(int*)", "second"}, "cuLaunchKernelEx": {"second"}}
        }


# The variables in which nvcc 13 keeps handles of kernels: add(float*, int), and a static hidden(int*).
VARIABLES = r"""
#include <stdio.h>
static const char code[8] __attribute__((section(".nv_fatbin"), used));
void *add __asm__("_ZZ23__device_stub__Z3addPfiPfiE8__handle") = (void *)0x700000001000;
void *hidden __asm__("_ZZL25__device_stub__Z6hiddenPiPiE8__handle") = (void *)0x700000002000;
int main(void) { puts("ready"); fflush(stdout); return getchar() == 'x'; }
"""


def test_handles_in_variables_of_the_program(place: Path) -> None:
    source = place / "variables.c"
    source.write_text(VARIABLES)
    subprocess.run(["cc", "-o", str(place / "variables"), str(source)], check=True)
    process = subprocess.Popen(
        [str(place / "variables")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    kernels = KernelNames(cuda())
    kernels.look(process.pid)
    found = [kernels.name(process.pid, handle) for handle in (0x700000001000, 0x700000002000, 0x700000003000)]
    process.communicate("\n", timeout=60)
    assert [name and name.full for name in found] == ["add(float*, int)", "hidden(int*)", None]


# --- malicious files ---


def test_files_that_lie(place: Path, made: Path) -> None:
    """A malformed file yields some result, quickly."""
    data = bytearray(made.read_bytes())
    cases = [bytes(data[: len(data) // 2]), b"\x7fELF" + bytes(4096)]
    code = b"\x41\xb8\xff\xff\xff\xff" * 100_000
    at = data.find(b"\x41\xb8\xff\xff\xff\xff")
    cases.append(bytes(data[:at]) + code + bytes(data[at + len(code) :]))
    for offset in (32, 40, 54, 58, 60, 62):  # offsets and numbers of headers
        changed = bytearray(data)
        changed[offset : offset + 2] = b"\xff\xff"
        cases.append(bytes(changed))
    for number, case in enumerate(cases):
        path = place / f"lies{number}"
        path.write_bytes(case)
        with path.open("rb") as file, contextlib.suppress(ImageError, OSError):
            one = _ElfFile(os.dup(file.fileno()))
            assert one.symbols.name(0x12345678) is None
            assert 0x12345678 not in one.registrations
            assert one.has_kernels in (False, True)
