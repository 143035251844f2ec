"""The embedded AMD device: a software GPU under AMD's own HIP runtime and ROCr."""

from pathlib import Path

LIBRARIES = Path(__file__).resolve().parent / "lib"
