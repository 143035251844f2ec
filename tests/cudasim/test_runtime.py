"""Programs that nvcc built, on the embedded device: their own checks must pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cudasim_device import CUDASIM, ROOT, nvcc, program, run
from gpubpf import __version__

HOSTILE = pytest.mark.parametrize("hostile", [False, True], ids=["kind", "hostile"])


@pytest.mark.every(8)
@HOSTILE
@pytest.mark.parametrize("name", ["basics", "streams", "graphs", "threads", "ipc", "pools"])
def test_program(name: str, hostile: bool) -> None:
    done = run([program(name)], hostile)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{name} ok\n", "")


@pytest.mark.every(2)
@HOSTILE
@pytest.mark.parametrize("name", ["basics", "graphs", "threads", "ipc", "pools"])
def test_program_on_the_virtual_clock(name: str, hostile: bool) -> None:
    done = run([program(name)], hostile, CUDASIM_CLOCK="virtual")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{name} ok\n", "")


@HOSTILE
def test_virtual_memory_management(hostile: bool) -> None:
    done = run([program("virtual", "-lcuda")], hostile)
    assert (done.returncode, done.stdout, done.stderr) == (0, "virtual ok\n", "")
    done = run([program("virtual", "-lcuda"), "fault"], hostile)
    assert (done.returncode, done.stdout) == (0, "sync: cudaErrorIllegalAddress\n")


@HOSTILE
@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_multicast_objects(hostile: bool, clock: str) -> None:
    """Of three devices. Only multimem instructions may use their addresses, and only where each device has memory."""
    made, setting = (
        program("multicast", "-arch=sm_90", "-lcuda"),
        {"CUDASIM_DEVICES": "3", "CUDASIM_CC": "9.0"},
    )
    done = run([made], hostile, CUDASIM_CLOCK=clock, **setting)
    assert (done.returncode, done.stdout, done.stderr) == (0, "multicast ok\n", "")
    for fault in ("load", "unbound", "own") if clock == "real" else ():
        done = run([made, fault], hostile, **setting)
        assert (done.returncode, done.stdout) == (0, "sync: cudaErrorIllegalAddress\n")


@HOSTILE
def test_bulk_tensor_copies(hostile: bool) -> None:
    """A device of compute capability 10 has more swizzles."""
    done = run([program("tensor_maps", "-arch=sm_90")], hostile, CUDASIM_CC="10.0" if hostile else "9.0")
    assert (done.returncode, done.stdout) == (0, "tensor_maps ok\n")
    # The last launch gives a map that no call made.
    assert "the tensor map does not fit this copy" in done.stderr


def clusters() -> Path:
    return program("clusters", "-arch=sm_90")


@HOSTILE
@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_clusters(hostile: bool, clock: str) -> None:
    done = run([clusters()], hostile, CUDASIM_CLOCK=clock)
    assert (done.returncode, done.stdout, done.stderr) == (0, "clusters ok\n", "")


@pytest.mark.parametrize(
    "said",
    [
        "illegal address 0x",  # an address in a block that the cluster does not have
        "illegal address 0x",  # past the end of another block's memory
        "shared memory of a block of the cluster that has exited: read of 4 bytes",
        "barrier.cluster.arrive twice without barrier.cluster.wait",
        "barrier.cluster.wait without barrier.cluster.arrive",
        "unspecified launch failure",  # one block stops, and the other one waits for it
        "misaligned address: read of 4 bytes",
    ],
)
def test_faults_in_clusters(said: str, request: pytest.FixtureRequest) -> None:
    number = request.node.callspec.indices["said"]
    done = run([clusters(), str(number)])
    assert done.returncode == 0, done.stdout
    assert said in done.stderr and "block (0,0,0)" in done.stderr


def test_clusters_below_compute_capability_9() -> None:
    done = run([program("no_clusters", "-arch=sm_80")], CUDASIM_CC="8.0")
    assert (done.returncode, done.stdout) == (0, "no_clusters ok\n")
    assert "a cluster of several blocks below compute capability 9.0 is not supported" in done.stderr


@pytest.mark.long
@HOSTILE
def test_two_devices_and_code_that_comes_and_goes(hostile: bool) -> None:
    plugin = program("plugin", "-shared", "-Xcompiler", "-fPIC")
    done = run([program("devices"), plugin], hostile, CUDASIM_DEVICES="2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "devices ok\n", "")


def test_default_stream_of_each_thread() -> None:
    done = run([program("basics", "--default-stream", "per-thread")])
    assert (done.returncode, done.stdout) == (0, "basics ok\n")


@HOSTILE
@pytest.mark.parametrize(
    ("how", "status", "line"),
    [
        ("stray", "cudaErrorIllegalAddress", "kernel _Z5storePii: illegal address 0x"),
        ("freed", "cudaErrorIllegalAddress", "kernel _Z5storePii: illegal address 0x"),
        ("host", "cudaErrorIllegalAddress", "kernel _Z5storePii: illegal address 0x"),
        ("trap", "cudaErrorLaunchFailure", "_Z4stopv"),
        ("assert", "cudaErrorAssert", "_Z5claimi"),
    ],
)
def test_fault(how: str, status: str, line: str, hostile: bool) -> None:
    done = run([program("faults"), how], hostile)
    assert (done.returncode, done.stdout) == (0, f"sync: {status}\n")
    message = [text for text in done.stderr.splitlines() if text.startswith("cudasim: ")]
    assert len(message) == 1 and line in message[0]
    if "stray" in line:
        assert "block (1,0,0) thread (3,0,0)" in message[0]


@HOSTILE
def test_exit_with_a_running_kernel(hostile: bool) -> None:
    done = run([program("faults"), "exit"], hostile, timeout=60)
    assert (done.returncode, done.stdout) == (7, "leaving\n")


@HOSTILE
def test_printf_comes_in_order(hostile: bool) -> None:
    done = run([program("faults"), "print"], hostile)
    lines = ["first", "kernel 1 thread 0", "kernel 1 thread 1", "second", "kernel 2 thread 0", "third"]
    assert done.stdout.splitlines() == lines


def test_machine_code_alone_is_refused_with_the_reason() -> None:
    done = run([program("faults", "-gencode", "arch=compute_90,code=sm_90"), "exit"])
    assert done.returncode == 2 and "cudaErrorNoKernelImageForDevice" in done.stdout
    assert "machine code" in done.stderr


def test_the_vendors_runtime_is_refused_with_the_reason(tmp_path: Path) -> None:
    source = tmp_path / "app.cu"
    source.write_text("int main() { void *p; return cudaMalloc(&p, 1); }")
    subprocess.run([nvcc(), "-cudart", "static", "-o", tmp_path / "app", source], check=True)
    done = run([tmp_path / "app"])
    assert done.returncode != 0 and done.stderr.count("\n") == 1
    assert "cudasim: the program contains NVIDIA's CUDA runtime" in done.stderr


def test_launcher() -> None:
    def cudasim(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cudasim", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = cudasim("--", str(program("faults")), "print")
    assert done.returncode == 0 and done.stdout.startswith("first\n")
    assert cudasim("--", "sh", "-c", "exit 5").returncode == 5
    for wrong in ((), ("--",), ("true",), ("--bogus", "--", "true"), ("--clock", "sundial", "--", "true")):
        done = cudasim(*wrong)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    for clock in ("real", "virtual"):
        done = cudasim("--clock", clock, "--", "sh", "-c", "echo $CUDASIM_CLOCK")
        assert (done.returncode, done.stdout) == (0, f"{clock}\n")
    assert cudasim("--", "").returncode == 127
    missing = cudasim("--", "no-such-program")
    assert (missing.returncode, missing.stderr.count("\n")) == (127, 1)
    assert cudasim("--", str(ROOT / "pyproject.toml")).returncode == 126
    assert cudasim("--help").returncode == 0
    assert max(map(len, cudasim("--help").stdout.splitlines())) <= 80
    done = cudasim("--version")
    assert (done.returncode, done.stdout) == (0, f"cudasim (gpubpf) {__version__}\n")
    pipe = f"'{sys.executable}' -m cudasim -- sh -c 'yes; echo $? >&2' | head -n 1"
    done = subprocess.run(["sh", "-c", pipe], capture_output=True, text=True, check=False)
    assert done.stderr == "141\n"  # SIGPIPE kills the program, as without cudasim


@pytest.mark.skipif(
    "CUDASIM_TEST_SANITIZE" not in os.environ, reason="builds for minutes; set CUDASIM_TEST_SANITIZE"
)
@HOSTILE
@pytest.mark.parametrize("name", ["basics", "streams", "graphs", "threads", "ipc", "pools"])
def test_program_under_sanitizers(name: str, hostile: bool) -> None:
    subprocess.run(
        ["make", "--silent", "-j2", "-C", str(CUDASIM), "SANITIZE=1"], check=True, stdout=subprocess.DEVNULL
    )
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    more = {"LD_PRELOAD": asan.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    done = run([program(name)], hostile, LD_LIBRARY_PATH=str(CUDASIM / "lib" / "sanitize"), **more)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{name} ok\n", "")
