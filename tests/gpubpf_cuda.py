"""CUDA programs for tests: built by nvcc, to be run on the embedded device."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpubpf import agent
from gpubpf.session.device import LIBRARIES

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
    command = ["nvcc", "-cudart", "shared", "-o", program, source, *flags]
    subprocess.run(command, check=True, capture_output=True)
    return program
