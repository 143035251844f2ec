# PYTHON_ARGCOMPLETE_OK
"""The `cudasim` command: run a program on the embedded CUDA device, without a tool."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpubpf import embedded

EPILOG = """\
examples:
  cudasim -- ./vectoradd            run ./vectoradd where there is no GPU
  CUDASIM_HOSTILE=1 cudasim -- ./a  at least as strict as any driver
  CUDASIM_DEVICES=2 cudasim -- ./a  with two devices

The program must contain PTX and use the shared CUDA runtime (nvcc -cudart
shared) or the driver. Results are exact. Times mean nothing, except on the
virtual clock (--clock virtual): there 1 ns is one PTX instruction of a thread,
10 bytes copied or 100 bytes set, a launch call takes 1,000 ns, and all runs
show the same times.
"""
DEVICE = embedded.EmbeddedDevice(
    name="cudasim",
    libraries=Path(__file__).resolve().parent / "lib",
    library="libcuda.so.1",
    description="Run a program on the embedded CUDA device: a GPU in software.",
    epilog=EPILOG,
)


def environment(current: Mapping[str, str], clock: str | None = None) -> dict[str, str]:
    """Return `current` with the variables that make a program use the embedded device. Raises LauncherError."""
    return embedded.environment(DEVICE, current, clock)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of the command line on the embedded device; return the exit status if it cannot be run."""
    return embedded.main(DEVICE, argv)


if __name__ == "__main__":
    sys.exit(main())
