# PYTHON_ARGCOMPLETE_OK
"""The `hipsim` command: run a HIP program on the embedded AMD device, without a tool."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gpubpf import embedded
from hipsim import LIBRARIES, gpus

EPILOG = """\
examples:
  hipsim -- ./vectoradd             run ./vectoradd where there is no GPU
  HIPSIM_DEVICES=2 hipsim -- ./a    with two devices
  HIPSIM_HOSTILE=1 hipsim -- ./a    delays, failing allocations, reordered waves

hipcc must build the program for a GPU that --gpu lists (--offload-arch=gfx906).
AMD's own libamdhip64 and libhsa-runtime64 load and run it. hipsim replaces
what is below them: the driver and the instruction set. Results are exact.
Times mean nothing, except on the virtual clock (--clock virtual): there a
kernel lasts 1 ns for each instruction of its longest wave, and a copy 1 ns
for 10 bytes.
"""


DEVICE = embedded.EmbeddedDevice(
    name="hipsim",
    libraries=LIBRARIES,
    library="libhsakmt.so.1",
    description="Run a HIP program on the embedded AMD device: a GPU in software.",
    epilog=EPILOG,
    gpus=gpus.GPUS,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of the command line on the embedded device; return the exit status if it cannot be run."""
    return embedded.main(DEVICE, argv)


if __name__ == "__main__":
    sys.exit(main())
