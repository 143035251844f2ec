"""The programs of examples/: their names, and what builds them."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEVICE = ROOT / "lib" / "cudasim" / "lib"
NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.cu"))


def build(*names: str, folder: str = "") -> Path:
    """Build these programs of examples/, or of a folder there; return their folder. Skips the test where they could not run."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    if not (DEVICE / "libcuda.so.1").exists():
        pytest.skip("the embedded device is not built (script/setup)")
    directory = ROOT / "examples" / folder
    with open(directory / "Makefile") as makefile:  # one process makes them, the others find them made
        fcntl.flock(makefile, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", "-j2", "-C", directory, *names], check=True, capture_output=True)
    return directory
