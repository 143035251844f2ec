"""Hide the PTX of programs, so that tools find machine code only, as in most libraries of NVIDIA and of PyTorch.

    python -m cudasim.hide FILE ...

FILE is an executable, a library, a fatbin or a cubin that contains machine code for the device and PTX: `nvcc -arch=sm_90`. Its PTX
remains in place, under a name or kind that only the embedded device knows (src/driver/fatbin.cpp, cubin.cpp). So the
program runs there; a GPU runs the machine code as before.

A compressed cubin cannot be changed in place. If a program is built with -lineinfo, whose cubins contain their PTX, also give nvcc
`--compress-mode=none`.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

_FATBIN = struct.Struct("<IHHQ")  # magic, version, size of this header, size of the images
_MAGIC = struct.pack("<I", 0xBA55ED50)
_IMAGE = struct.Struct("<HHIQ")  # kind, version, size of this header, size of the payload
PTX, HIDDEN_PTX = 1, 0x5801  # kinds of images
_SECTION, _HIDDEN_SECTION = b".nv_debug_ptx_txt", b".cudasim_ptx_text"  # of a cubin; of the same length


def hide(data: bytearray) -> int:
    """Hide the PTX in the bytes of a file, in place. Return the number of images and sections of PTX."""
    count = 0
    at = data.find(_MAGIC)
    while at >= 0:
        count += _hide_images(data, at)
        at = data.find(_MAGIC, at + len(_MAGIC))
    at = data.find(_SECTION)
    while at >= 0:
        data[at : at + len(_SECTION)] = _HIDDEN_SECTION
        count += 1
        at = data.find(_SECTION, at)
    return count


def _hide_images(data: bytearray, at: int) -> int:
    """Hide the PTX of the fatbin that begins at `at`."""
    if at + _FATBIN.size > len(data):
        return 0
    _, _, header, left = _FATBIN.unpack_from(data, at)
    at += header
    end = min(at + left, len(data))
    count = 0
    while at + _IMAGE.size <= end:
        kind, _, size, payload = _IMAGE.unpack_from(data, at)
        if not size:
            break
        if kind == PTX:
            struct.pack_into("<H", data, at, HIDDEN_PTX)
            count += 1
        at += size + payload
    return count


def main(arguments: list[str]) -> int:
    if not arguments or any(name.startswith("-") for name in arguments):
        print("usage: python -m cudasim.hide FILE ...", file=sys.stderr)
        return 2
    for name in arguments:
        try:
            data = bytearray(Path(name).read_bytes())
            if not hide(data):
                print(f"{name}: it contains no PTX to hide; build it with nvcc -arch=sm_90", file=sys.stderr)
                return 1
            Path(name).write_bytes(data)
        except OSError as error:
            print(f"{name}: {error.strerror}; it was not changed", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
