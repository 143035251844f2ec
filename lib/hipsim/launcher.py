# PYTHON_ARGCOMPLETE_OK
"""The `hipsim` command: run a HIP program on the embedded AMD device, with no tool."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gpubpf import embedded

EPILOG = """\
examples:
  hipsim -- ./vectoradd             run ./vectoradd where there is no GPU
  HIPSIM_DEVICES=2 hipsim -- ./a    with two devices
  HIPSIM_HOSTILE=1 hipsim -- ./a    delays, failing allocations, reordered waves

The program is what hipcc built (--offload-arch=gfx906, or gfx90a or gfx1030
with --gpu). AMD's own libamdhip64 and libhsa-runtime64 load it and run it; hipsim replaces what is below them:
the driver and the instruction set. Results are exact. Times mean nothing,
except on the virtual clock (--clock virtual): there a kernel lasts 1 ns for
each instruction of its longest wave, a copy 1 ns for 10 bytes.
"""
DEVICE = embedded.EmbeddedDevice(
    name="hipsim",
    libraries=Path(__file__).resolve().parent / "lib",
    library="libhsakmt.so.1",
    description="Run a HIP program on the embedded AMD device: a GPU in software.",
    epilog=EPILOG,
    gpus=("gfx906", "gfx90a", "gfx1030"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of the command line on the embedded device; return the exit status if it cannot be run."""
    return embedded.main(DEVICE, argv)


if __name__ == "__main__":
    sys.exit(main())
