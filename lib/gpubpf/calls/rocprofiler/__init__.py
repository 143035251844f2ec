"""Kernel dispatches on AMD GPUs from rocprofiler-sdk: a C library in the program (agent.c), and its reader
(dispatches.py).

Not tested on AMD hardware, only with a stand-in that follows rocprofiler-sdk's headers and documentation.
"""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpubpf.linux import libraries

LIBRARY = Path(__file__).parent / "lib" / "libgpubpf-rocprofiler.so"
_SDK = "librocprofiler-sdk.so"
# Variables that load another profiler.
OTHERS = ("ROCP_TOOL_LIBRARIES", "ROCPROFILER_REGISTER_LIBRARY", "ROCPROFILER_REGISTER_FORCE_LOAD")


def installed(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a command may find rocprofiler-sdk.

    Look where the loader looks, in the usual folders, and in the Python packages of the command's
    environment.
    """
    if libraries.files(libraries.LibraryNames(_SDK)):
        return True
    places = environment.get("LD_LIBRARY_PATH", "").split(":")
    places += [
        f"{glob.escape(environment[name])}/lib" for name in ("ROCM_PATH", "HIP_PATH") if environment.get(name)
    ]
    program = shutil.which(command[0], path=environment.get("PATH")) if command else None
    prefixes = [
        environment.get("VIRTUAL_ENV"),
        environment.get("CONDA_PREFIX"),
        program and os.path.dirname(os.path.dirname(program)),
    ]
    for prefix in prefixes:
        if prefix:
            places.append(f"{glob.escape(prefix)}/lib/python3*/site-packages/*/lib")
    return any(glob.glob(f"{place}/{_SDK}*") for place in places if place)


def loadable(library: Path) -> bool:
    """Return whether every process of a command can load the library: librocprofiler-register ends a process
    that cannot.

    A command that root starts may change its user, so every user must be able to read the library.
    """
    if os.geteuid() == 0:
        for part, bits in [(library, stat.S_IROTH), *((parent, stat.S_IXOTH) for parent in library.parents)]:
            if not part.stat().st_mode & bits:
                return False
    try:
        ctypes.CDLL(str(library))
    except OSError:  # a noexec mount, or another C library
        return False
    return True
