# PYTHON_ARGCOMPLETE_OK
"""The `hipsim` command: run a HIP program on the embedded AMD device, with no tool."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Sequence

from gpubpf import embedded
from hipsim import LIBRARIES
from hipsim.gpus import GPUS, architectures, suitable

EPILOG = """\
examples:
  hipsim -- ./vectoradd             run ./vectoradd where there is no GPU
  HIPSIM_DEVICES=2 hipsim -- ./a    with two devices
  HIPSIM_HOSTILE=1 hipsim -- ./a    delays, failing allocations, reordered waves

The program is what hipcc built (--offload-arch=gfx906, gfx90a or gfx1030).
AMD's own libamdhip64 and libhsa-runtime64 load and run it. hipsim replaces
what is below them: the driver and the instruction set. Results are exact.
Times mean nothing, except on the virtual clock (--clock virtual): there a
kernel lasts 1 ns for each instruction of its longest wave, and a copy 1 ns
for 10 bytes.
"""


def suitable_for(program: str) -> str:
    """Return the GPU that suits a command's first word."""
    with contextlib.suppress(OSError, ValueError):
        # O_NONBLOCK: opening a FIFO must not wait.
        file = os.open(shutil.which(program) or program, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(file, "rb") as opened:
            if stat.S_ISREG(os.fstat(file).st_mode):
                return suitable(architectures(opened))
    return GPUS[0]


DEVICE = embedded.EmbeddedDevice(
    name="hipsim",
    libraries=LIBRARIES,
    library="libhsakmt.so.1",
    description="Run a HIP program on the embedded AMD device: a GPU in software.",
    epilog=EPILOG,
    gpus=GPUS,
    suitable_gpu=suitable_for,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of the command line on the embedded device; return the exit status if it cannot be run."""
    return embedded.main(DEVICE, argv)


if __name__ == "__main__":
    sys.exit(main())
