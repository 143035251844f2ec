"""CUDA programs for tests: built by nvcc, to be run on the embedded device."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpubpf import agent
from gpubpf.traced.device import LIBRARIES

needs_cuda = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
    pytest.mark.skipif(
        not (LIBRARIES / "libcuda.so.1").exists() or not agent.LIBRARY.exists(),
        reason="the embedded device or the agent is not built (script/setup)",
    ),
]


def skip_without_cuda() -> None:
    """Skip the test where no program can be built or run."""
    for mark in needs_cuda:
        if mark.args[0]:
            pytest.skip(mark.kwargs["reason"])


def build(text: str | Path, program: Path, *flags: str | Path) -> Path:
    """The program of a source file, or of a text that is written beside it. Skips the test where it could not run."""
    skip_without_cuda()
    source = text
    if isinstance(text, str):
        source = program.with_suffix(".cu")
        source.write_text(text)
    run_nvcc(["nvcc", "-cudart", "shared", "-o", program, source, *flags])
    return program


def run_nvcc(command: Sequence[str | Path], **how: Any) -> None:
    """Compile as C++14, which takes nvcc a third less time than its default, C++17; as C++17 what needs it.

    A command that names another standard runs as it is.
    """
    if not any(str(word).startswith("-std=") for word in command):
        if subprocess.run([*command, "-std=c++14"], capture_output=True, **how).returncode == 0:
            return
        command = [*command, "-std=c++17"]
    subprocess.run(command, check=True, capture_output=True, **how)
