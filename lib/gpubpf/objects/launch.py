"""Launch an empty kernel once: python launch.py X Y Z BLOCK_X BLOCK_Y BLOCK_Z.

gpurun --run starts this file, and instruments the kernel. The file imports nothing of gpubpf, because it runs as a separate program,
perhaps as another user.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

KERNEL = "gpubpf_run"
PTX = f".version 6.3\n.target sm_70\n.address_size 64\n.visible .entry {KERNEL}() {{ ret; }}\n"
# The limits of the CUDA C++ Programming Guide, by axis.
LARGEST_GRID = (2**31 - 1, 65535, 65535)
LARGEST_BLOCK = (1024, 1024, 64)
MOST_THREADS = 1024  # maximum threads of a block
_SET_NAME = 15  # PR_SET_NAME


def main(extents: list[int]) -> int:
    """Launch the kernel with this grid and block, and wait for it. If that fails, print one line with the reason and return 1."""
    ctypes.CDLL(None).prctl(_SET_NAME, b"gpurun", 0, 0, 0)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        print(f"gpurun: no CUDA driver ({error}); install one, or use --device sim", file=sys.stderr)
        return 1
    device, context = ctypes.c_int(), ctypes.c_void_p()
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    calls: tuple[tuple[Any, ...], ...] = (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(device), 0),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
        ("cuCtxSetCurrent", context),
        ("cuModuleLoadData", ctypes.byref(module), PTX.encode()),
        ("cuModuleGetFunction", ctypes.byref(kernel), module, KERNEL.encode()),
        ("cuLaunchKernel", kernel, *map(ctypes.c_uint, extents), 0, None, None, None),
        ("cuCtxSynchronize",),
    )
    for name, *arguments in calls:
        if status := getattr(cuda, name)(*arguments):
            print(
                f"gpurun: {name} failed with CUDA error {status}; check --grid and --block", file=sys.stderr
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]]))
