"""Which device a command runs on: a GPU, or the embedded device where there is none."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpubpf.errors import SessionError, UsageError

LIBRARIES = Path(__file__).resolve().parents[2] / "cudasim" / "lib"
# Device files of NVIDIA's driver: Linux, and Windows' GPU in WSL 2.
DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
NOTICE = "no GPU here: programs run on cudasim, the embedded CUDA device; counts are exact, times "


@dataclass(frozen=True)
class Device:
    """`kind` is "gpu" or "sim", `notice` a line for the user or None. `environment` is what to set for the command."""

    kind: str
    environment: Mapping[str, str] = field(default_factory=dict)
    notice: str | None = None

    @property
    def virtual(self) -> bool:
        """Whether it is the embedded device on its virtual clock."""
        clock = self.environment.get("CUDASIM_CLOCK", os.environ.get("CUDASIM_CLOCK"))
        return self.kind == "sim" and clock == "virtual"

    @property
    def name(self) -> str:
        """For messages."""
        clock = " on its virtual clock" if self.virtual else ""
        return "a GPU" if self.kind == "gpu" else f"the embedded device{clock}"


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
    """The device for "auto", "gpu" or "sim". Raises SessionError where it cannot be had, UsageError for an unknown clock."""
    missing = gpu_missing() if wanted != "sim" else None
    if wanted == "gpu" and missing:
        raise SessionError(f"no GPU can be used: {missing}; use --device sim for the embedded device")
    if wanted != "sim" and not missing:
        return Device("gpu")
    if not (LIBRARIES / "libcuda.so.1").exists():
        why = f"no GPU can be used ({missing}), and " if missing else ""
        raise SessionError(f"{why}the embedded device is not built; run script/setup")
    path = ":".join(filter(None, (str(LIBRARIES), environment.get("LD_LIBRARY_PATH"))))
    clock = environment.get("CUDASIM_CLOCK") or "real"
    if clock not in ("real", "virtual"):
        raise UsageError(f"CUDASIM_CLOCK is {clock!r}; unset it, or set it to real or virtual")
    virtual = clock == "virtual"
    notice = NOTICE + ("those of its virtual clock" if virtual else "mean nothing")
    return Device("sim", {"LD_LIBRARY_PATH": path}, notice if wanted != "sim" else None)


def cupti_libraries() -> list[str]:
    """Where CUPTI's library may be, likeliest first: beside this Python's packages, in a toolkit, by its bare name."""
    places = [Path(place) for place in sys.path if place]
    found = [str(file) for place in places for file in sorted(place.glob("nvidia/*/lib/libcupti.so.*"))]
    for toolkit in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if toolkit and ":" not in toolkit:
            found += [
                str(file) for file in sorted(Path(toolkit).glob("extras/CUPTI/lib64/libcupti.so.[0-9]*"))
            ]
    return [*(file for file in found if ":" not in file), "libcupti.so.13", "libcupti.so.12", "libcupti.so"]


def compute_capability(device: Device, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(major, minor) of the first GPU; of the embedded device what CUDASIM_CC says, as there. Raises SessionError."""
    if device.kind == "sim":
        major, _, minor = environment.get("CUDASIM_CC", "").partition(".")
        return (int(major), int(minor or 0)) if major.isdigit() and (minor or "0").isdigit() else (9, 0)
    library = ctypes.CDLL("libcuda.so.1")
    number, value = ctypes.c_int(), ctypes.c_int()
    found = []
    if (error := library.cuInit(0) or library.cuDeviceGet(ctypes.byref(number), 0)) != 0:
        raise SessionError(
            f"the driver gives no GPU (error {error}); use --device sim for the embedded device"
        )
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        library.cuDeviceGetAttribute(ctypes.byref(value), attribute, number)
        found.append(value.value)
    return found[0], found[1]
