"""Ask AMD's ROCr for its version. This is a separate program, for a child process. It imports nothing of gpubpf.

python3 -I -S rocr_question.py /opt/rocm/lib/libhsa-runtime64.so.1
"""

from __future__ import annotations

import ctypes
import sys

_MAJOR, _MINOR = 0, 1  # hsa_system_info_t: HSA_SYSTEM_INFO_VERSION_MAJOR, _MINOR
_BUILD = 0x200  # HSA_AMD_SYSTEM_INFO_BUILD_VERSION, since ROCr 1.9


def main(path: str) -> None:
    """Print the version. Raises SystemExit with a line for the user."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise SystemExit(f"it cannot be loaded ({error})") from None
    if code := library.hsa_init():
        text = ctypes.c_char_p()
        library.hsa_status_string(code, ctypes.byref(text))
        raise SystemExit(f"hsa_init fails: {(text.value or b'no reason given').decode().split(':')[0]}")
    numbers = []
    for what in (_MAJOR, _MINOR):
        number = ctypes.c_uint16()
        library.hsa_system_get_info(what, ctypes.byref(number))
        numbers.append(str(number.value))
    build = ctypes.c_char_p()
    library.hsa_system_get_info(_BUILD, ctypes.byref(build))
    release = (build.value or b"").decode(errors="replace").strip('"')
    print(f"HSA {'.'.join(numbers)}{f', build {release}' if release else ''}")


if __name__ == "__main__":
    main(sys.argv[1])
