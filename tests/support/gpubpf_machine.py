"""The agent's files that depend on the processor, and programs for a processor that this machine may not have."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpubpf import agent

AGENT = Path(agent.__file__).parent
SOURCES = AGENT / "src"
INCLUDES = (
    f"-I{SOURCES}",
    f"-I{AGENT / 'lib' / 'build'}",
)  # the latter has definitions.h, which make generates
CROSS = "aarch64-linux-gnu-"
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")


def patching_sources(machine: str = os.uname().machine) -> list[Path]:
    """Return the sources that a program needs to hook its own functions."""
    names = ("patch", "file_code", "wire", f"machine/{machine}/instruction", f"machine/{machine}/code")
    return [SOURCES / f"{name}.cpp" for name in names]


def missing_for_aarch64() -> str:
    """Return what is missing to build and run programs for aarch64 here; "" if nothing is."""
    missing = [name for name in (f"{CROSS}g++", f"{CROSS}objdump", EMULATOR[0]) if not shutil.which(name)]
    return ", ".join(missing)


needs_aarch64 = pytest.mark.skipif(
    bool(missing_for_aarch64()),
    reason=f"no {missing_for_aarch64()} (apt-get install g++-aarch64-linux-gnu qemu-user)",
)


def built_for_aarch64(program: Path, *arguments: str | Path) -> Path:
    """Compile and link a program for aarch64; return its path."""
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", *INCLUDES]
    subprocess.run([f"{CROSS}g++", *flags, "-o", program, *arguments], check=True)
    return program


def run_for_aarch64(command: Sequence[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a program for aarch64 in the emulator, and return its result."""
    return subprocess.run([*EMULATOR, *command], text=True, capture_output=True, timeout=300, **options)  # type: ignore[call-overload, no-any-return]
