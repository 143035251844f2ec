"""What the tests of programs that make their kernels at run time share: how one is built, run, measured, attached to.

Programs (jit/programs/) check their own results, and tell how often they launched what, round by round. Python's need packages
that are not all in the development environment: GPUBPF_JIT_PYTHON names an interpreter that has them (docs/jit.md).
"""

from __future__ import annotations

import functools
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

import cudasim_device

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parents[1] / "jit" / "programs"
THREADHIST = [sys.executable, str(ROOT / "tools/threadhist.py"), "--device", "sim", "--json"]
Rounds = list[dict[str, int]]


@functools.cache
def python(*modules: str) -> str:
    """An interpreter that has these modules; skips the test where there is none."""
    for candidate in (os.environ.get("GPUBPF_JIT_PYTHON"), sys.executable):
        if candidate:
            code = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {modules!r})))"
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            if (
                subprocess.run([candidate, "-c", code], env=environment, stderr=subprocess.DEVNULL).returncode
                == 0
            ):
                return candidate
    pytest.skip(f"needs {', '.join(modules)} (docs/jit.md, GPUBPF_JIT_PYTHON)")


def nvrtc() -> str:
    """An interpreter with cuda-bindings and NVRTC."""
    found = python("cuda.bindings", "numpy")
    code = "from cuda.bindings import nvrtc; nvrtc.nvrtcVersion()"
    if subprocess.run([found, "-c", code], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs NVRTC (PyPI: nvidia-cuda-nvrtc)")
    return found


@functools.cache
def built(name: str) -> Path:
    """programs/NAME.c, built on the embedded device's driver."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    libraries = cudasim_device.libraries()
    include = os.environ.get("CUDA_INCLUDE") or _include()
    target = ROOT / "build" / "tests" / f"jit-{name}"
    made = target.with_suffix(f".{os.getpid()}")
    words = [
        "gcc",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-isystem",
        include,
        PROGRAMS / f"{name}.c",
        "-o",
        made,
    ]
    subprocess.run([*words, f"-L{libraries}", "-lcuda", "-lpthread"], check=True)
    made.replace(target)
    return target


def _include() -> str:
    command = [
        "make",
        "--silent",
        "-C",
        str(cudasim_device.CUDASIM),
        "--eval",
        "w: ; @echo $(CUDA_INCLUDE)",
        "w",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def rounds(output: str) -> Rounds:
    """What each round launched: {kernel: launches}, by the program's own account."""
    return [
        cast(dict[str, int], json.loads(text))
        for text in re.findall(r"^round \d+ (\{.*\})$", output, re.MULTILINE)
    ]


def alone(command: Sequence[str | Path], **environment: str) -> str:
    """Run a program on the embedded device with no tool; what it printed."""
    done = cudasim_device.run(list(command), **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Measured:
    """What a program said and what threadhist did."""

    rounds: Rounds
    kernels: Mapping[str, dict[str, Any]]  # by mangled name: the record `kernel`
    summary: Mapping[str, Any]
    stderr: str

    @property
    def launches(self) -> dict[str, int]:
        """Counted launches by mangled name."""
        return {name: record["launches"] for name, record in self.kernels.items()}


def _measured(output: str, results: Path, stderr: str) -> Measured:
    records = [json.loads(line) for line in results.read_text().splitlines()]
    kernels: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["type"] == "kernel":
            known = kernels.setdefault(record["mangled"], {**record, "launches": 0})
            known["launches"] += record["launches"]
    return Measured(rounds(output), kernels, records[-1], stderr)


def under_threadhist(
    command: Sequence[str | Path], results: Path, *options: str, **environment: str
) -> Measured:
    """`threadhist -- COMMAND`; the program must succeed."""
    done = subprocess.run(
        [*THREADHIST, "-o", str(results), *options, "--", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return _measured(done.stdout, results, done.stderr)


def attached(command: Sequence[str | Path], results: Path, **environment: str) -> Measured:
    """`threadhist -p PID` on a program that has done its first round; it does the second under measurement."""
    program = subprocess.Popen(
        [*map(str, command), "--again"],
        env=cudasim_device.environment(**environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    tool = None
    try:
        assert program.stdin is not None and program.stdout is not None
        said = ""
        while not said.endswith("ready\n"):
            line = program.stdout.readline()
            assert line, said + program.communicate()[1]
            said += line
        tool = subprocess.Popen(
            [*THREADHIST, "-o", str(results), "-p", str(program.pid)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        heard = _until(tool, rf"attached to {program.pid} \(.*\)\n")  # and no kernel waits for its copy
        rest, problems = program.communicate("\n", timeout=60)
        assert program.returncode == 0, said + rest + problems + heard
        stderr = heard + tool.communicate(timeout=60)[1]
        assert tool.returncode == 0, stderr
        return _measured(said + rest, results, stderr)
    finally:
        for process in (tool, program):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def _until(tool: subprocess.Popen[str], pattern: str, seconds: float = 60) -> str:
    """Return what the tool prints until `pattern` is found in it."""
    assert tool.stderr is not None
    heard, end = "", time.monotonic() + seconds
    while not re.search(pattern, heard):
        ready, _, _ = select.select([tool.stderr], [], [], max(0.0, end - time.monotonic()))
        line = tool.stderr.readline() if ready else ""
        assert line, heard + f"… and not {pattern!r}"
        heard += line
    return heard
