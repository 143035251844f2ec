"""Which device a command runs on: a GPU, or the embedded device where there is none."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpubpf.errors import SessionError

LIBRARIES = Path(__file__).resolve().parent.parent / "cudasim" / "lib"
# Device files of NVIDIA's driver: Linux, and Windows' GPU in WSL 2.
DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
NOTICE = (
    "no GPU here: the command runs on cudasim, the embedded CUDA device; counts are exact, times mean nothing"
)


@dataclass(frozen=True)
class Device:
    """`kind` is "gpu" or "sim", `notice` a line for the user or None. `environment` is what to set for the command."""

    kind: str
    environment: Mapping[str, str] = field(default_factory=dict)
    notice: str | None = None


def gpu_missing() -> str | None:
    """Why there is no GPU to use; None: there is one."""
    if not any(file.exists() for file in DEVICE_FILES):
        return "there is no " + " or ".join(map(str, DEVICE_FILES))
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"the driver library does not load ({error})"
    return None


def choose(wanted: str | None = "auto", environment: Mapping[str, str] = os.environ) -> Device:
    """The device for "auto", "gpu" or "sim". Raises SessionError where it cannot be had."""
    missing = gpu_missing() if wanted != "sim" else None
    if wanted == "gpu" and missing:
        raise SessionError(f"no GPU can be used: {missing}; use --device sim for the embedded device")
    if wanted != "sim" and not missing:
        return Device("gpu")
    if not (LIBRARIES / "libcuda.so.1").exists():
        why = f"no GPU can be used ({missing}), and " if missing else ""
        raise SessionError(f"{why}the embedded device is not built; run script/setup")
    path = ":".join(filter(None, (str(LIBRARIES), environment.get("LD_LIBRARY_PATH"))))
    return Device("sim", {"LD_LIBRARY_PATH": path}, NOTICE if wanted != "sim" else None)
