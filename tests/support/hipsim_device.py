"""The embedded AMD device for tests: its library, and programs that g++ and hipcc build."""

from __future__ import annotations

import contextlib
import ctypes.util
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HIPSIM = ROOT / "lib" / "hipsim"
PROGRAMS = Path(__file__).parents[1] / "hipsim" / "programs"
_BUILD = ROOT / "build" / "tests"


@functools.cache
def libraries() -> Path:
    """The folder with libhsakmt.so.1, brought up to date by make. Skips where AMD's headers are missing."""
    if not any(Path(folder, "hsakmt.h").exists() for folder in ("/usr/include", "/usr/include/hsakmt")):
        pytest.skip("no hsakmt.h here; install libhsakmt-dev and libhsa-runtime-dev")
    _BUILD.mkdir(parents=True, exist_ok=True)
    with open(_BUILD / "hipsim.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "--silent", "-j2", "-C", str(HIPSIM)], check=True, stdout=subprocess.DEVNULL)
    return HIPSIM / "lib"


def _built(source: Path, command: list[str], *libraries: str) -> Path:
    """The program that `command` makes of `source`; kept by content."""
    content = source.read_bytes() + " ".join(command).encode()
    _BUILD.mkdir(parents=True, exist_ok=True)
    target = _BUILD / f"hip-{source.stem}-{hashlib.sha256(content).hexdigest()[:16]}"
    if not target.exists():
        made = target.with_suffix(f".{os.getpid()}")
        run_hipcc([*command, str(source), *libraries, "-o", str(made)])
        made.replace(target)
    return target


def run_hipcc(command: list[str]) -> None:
    """Compile; with hipcc as C++14, which takes a fifth less time than C++17, or as C++17 what needs that."""
    platform = {**os.environ, "HIP_PLATFORM": "amd"}  # hipcc would take an installed nvcc
    if "hipcc" in command[0] and not any(word.startswith("-std=") for word in command):
        if subprocess.run([*command, "-std=c++14"], capture_output=True, env=platform).returncode == 0:
            return
        command = [*command, "-std=c++17"]
    subprocess.run(command, check=True, env=platform)


@functools.cache
def thunk_program(name: str) -> Path:
    """`programs/NAME.cpp`, which calls libhsakmt itself."""
    folder = libraries()
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-pthread", "-idirafter", "/usr/include/hsa"]
    command += ["-idirafter", "/usr/include/hsakmt"]
    return _built(PROGRAMS / f"{name}.cpp", command, f"-L{folder}", "-l:libhsakmt.so.1")


@functools.cache
def hipcc() -> str:
    """The compiler; skips the test where it or AMD's runtime is missing."""
    found = shutil.which("hipcc")
    if found is None:
        pytest.skip("no hipcc here; script/setup installs it where the distribution has it")
    if ctypes.util.find_library("amdhip64") is None:
        pytest.skip("no libamdhip64 here; script/setup installs it where the distribution has it")
    return found


@functools.cache
def program(name: str, *options: str, gpu: str = "gfx906", folder: Path = PROGRAMS) -> Path:
    """`programs/NAME.hip` built by hipcc."""
    command = [hipcc(), f"--offload-arch={gpu}", "-w", *options]
    return _built(folder / f"{name}.hip", command)


def environment(hostile: bool | None = None, **more: str) -> dict[str, str]:
    """The environment for a program on the embedded AMD device."""
    made = {**os.environ, "LD_LIBRARY_PATH": str(libraries()), **more}
    if hostile is not None:
        made["HIPSIM_HOSTILE"] = str(int(hostile))
    return made


def run(
    command: list[str | Path], hostile: bool | None = None, timeout: float = 300, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a program on the embedded AMD device; its output as text."""
    return subprocess.run(
        [str(part) for part in command],
        env=environment(hostile, **more),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def assert_no_code(done: subprocess.CompletedProcess[str]) -> None:
    """The program found that it has no code for the device: HIP 5.2 aborts it, HIP 5.7 returns an error."""
    aborts = done.returncode == -6 and "hipErrorNoBinaryForGpu: Unable to find code object" in done.stderr
    returns = done.returncode == 1 and re.search("no kernel image|invalid device function", done.stderr)
    assert aborts or returns, done


def measured(
    tool: str, out: Path, *words: object, **variables: str
) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    """Run a tool with --json; give its records, and how it ended."""
    libraries()
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / f"{tool}.py", "--json", "-o", out, *map(str, words)],
        capture_output=True, text=True, timeout=300, env=environment(**variables),
    )  # fmt: skip
    return [json.loads(line) for line in out.read_text().splitlines()], done


class Serving:
    """programs/serves.hip, which does what lines of its standard input say."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self._line() == "ready\n"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def does(self, *lines: str) -> None:
        assert self.process.stdin is not None
        for line in lines:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
            assert self._line() == "done\n"


@contextlib.contextmanager
def serving(*command: str | Path, gpu: str = "gfx906", **variables: str) -> Iterator[Serving]:
    process = subprocess.Popen(
        [*command, program("serves", gpu=gpu)],
        env=environment(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Serving(process)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()


@functools.cache
def hsa_program(name: str) -> Path:
    """`programs/NAME.c`, which calls ROCr itself."""
    return _built(PROGRAMS / f"{name}.c", ["gcc", "-O1", "-Wall", "-Wextra"], "-lhsa-runtime64")


@functools.cache
def code_object(name: str, gpu: str = "gfx906") -> Path:
    """`programs/NAME.hip` as a code object, which a program can load."""
    command = [hipcc(), f"--offload-arch={gpu}", "--genco", "--no-gpu-bundle-output"]
    return _built(PROGRAMS / f"{name}.hip", command)
