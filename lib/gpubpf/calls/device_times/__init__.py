"""When kernels started and ended on AMD GPUs: the agent, a C library in the program, and the reader of its output (dispatches.py).

There are two agents. rocprofiler_agent.c uses rocprofiler-sdk. It was not tested on AMD hardware, only with a stand-in that follows
rocprofiler-sdk's headers and documentation. hsa_agent.c uses ROCr's tools interface; it was tested with AMD's ROCr on hipsim.
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
from gpubpf.record import Record
from gpubpf.traced import amd_device

_SDK = "librocprofiler-sdk.so"
HSA_WANTED = "GPUBPF_HSA_TIMES"  # environment variable: use ROCr's interface on a GPU, too


class Agent(Record):
    """A library that reports dispatches from within a program. The program loads the library that `variable` names."""

    source: str  # the source of the times, for output
    library: Path
    variable: str  # an environment variable
    others: tuple[str, ...]  # environment variables that load another profiler
    loads: str  # what a program must load to load the agent

    def refusal(self, environment: Mapping[str, str]) -> str | None:
        """Return why a command with these variables cannot have the agent, or None."""
        for name in self.others:
            if environment.get(name):
                return f"{name} is set for another profiler"
        if not self.library.exists():
            return f"{self.library.name} is not built; run script/setup"
        if not loadable(self.library.resolve()):
            return f"not every user can read and load {self.library.resolve()}; install gpubpf where every user can"
        return None


_LIBRARIES = Path(__file__).parent / "lib"
ROCPROFILER = Agent(
    "rocprofiler-sdk",
    _LIBRARIES / "libgpubpf-rocprofiler.so",
    "ROCPROFILER_REGISTER_LIBRARY",
    ("ROCP_TOOL_LIBRARIES", "ROCPROFILER_REGISTER_LIBRARY", "ROCPROFILER_REGISTER_FORCE_LOAD"),
    "librocprofiler-register (ROCm 6.2 or newer)",
)
HSA = Agent(
    "ROCr",
    _LIBRARIES / "libgpubpf-hsa.so",
    "HSA_TOOLS_LIB",
    ("HSA_TOOLS_LIB", *ROCPROFILER.others),
    "ROCr (libhsa-runtime64)",
)


def agent_for(command: Sequence[str], environment: Mapping[str, str], simulated: bool) -> Agent | str:
    """Return the agent for a command, or the reason why it cannot be used. `simulated`: the command runs on hipsim."""
    if not command:
        return "the tool did not start the program (give a COMMAND)"
    if simulated and environment.get("HIPSIM_CLOCK") == "virtual":
        return "those of the virtual clock cannot be compared with the times of calls"
    if environment.get(HSA_WANTED, "0") not in ("", "0"):
        found = HSA
    elif installed(command, environment):
        found = ROCPROFILER
    elif simulated:
        found = HSA
    else:
        if not amd_device.has_gpu():
            return "there is no AMD GPU, and the program does not run on hipsim"
        return "rocprofiler-sdk is not installed, or not found (set ROCM_PATH)"
    return found.refusal(environment) or found


def installed(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a command may find rocprofiler-sdk.

    Look where the loader looks, in the usual directories, and in the Python packages of the command's
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
    """Return whether every process of a command can load the library: librocprofiler-register terminates a
    process that cannot.

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
