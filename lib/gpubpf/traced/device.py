"""Choose the device that a command runs on: a GPU, or the embedded device if there is no GPU."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpubpf import processor
from gpubpf.agent.definitions import SANITIZER_VARIABLE
from gpubpf.errors import SessionError, UsageError
from gpubpf.record import Record, field

_QUESTION = Path(__file__).with_name("driver_question.py")
LIBRARIES = Path(__file__).resolve().parents[2] / "cudasim" / "lib"
DRIVER_TIMEOUT = 60.0  # seconds; without the persistence daemon, the driver initializes the GPU first
NOTICE = "no NVIDIA GPU: CUDA programs run on cudasim, in software; counts are exact, times "
EMBEDDED = "libcuda.so.1 is the embedded device"  # a result of `ask_driver`
_CLOCKS = ("CUDASIM_CLOCK", "HIPSIM_CLOCK")  # all devices in a run share one clock
REAL_CLOCK = "embedded device, real clock: times mean nothing"


class Device(Record):
    """A device that a command runs on.

    kind: "gpu" or "sim".
    notice: a line for the user, or None.
    environment: variables to set for the command.
    """

    kind: str
    environment: Mapping[str, str] = field(default_factory=dict)
    notice: str | None = None

    @property
    def virtual(self) -> bool:
        """Whether it is the embedded device on its virtual clock."""
        clock = self.environment.get("CUDASIM_CLOCK", os.environ.get("CUDASIM_CLOCK"))
        return self.kind == "sim" and clock == "virtual"

    @property
    def clock_notice(self) -> str | None:
        """A line for the top of a report of times, if times are meaningless; otherwise None."""
        return None if self.kind == "gpu" or self.virtual else REAL_CLOCK

    @property
    def name(self) -> str:
        """The device's name in messages."""
        clock = " on its virtual clock" if self.virtual else ""
        return "a GPU" if self.kind == "gpu" else f"the embedded device{clock}"


@functools.cache
def ask_driver() -> tuple[int, int] | str:
    """Return the compute capability of the first GPU, or a text with the reason why no GPU can be used.

    The driver is initialized in a child process. Only that proves that there is a GPU: device files can exist without one, and are
    created at first use. A crash or leftover state of the driver affects only the child.
    """
    try:
        ctypes.CDLL("libcuda.so.1")  # saves the child process
    except OSError as error:
        return f"the driver library cannot be loaded ({error})"
    answer = question(DRIVER_TIMEOUT)
    if isinstance(answer, str):
        return answer
    first = answer["gpus"][0]
    return EMBEDDED if is_embedded(first["name"]) else (first["cc"][0], first["cc"][1])


def question(timeout: float, details: bool = False) -> dict[str, Any] | str:
    """Return what the driver reports about its GPUs, or a text with the reason why no GPU can be used.

    The result has `gpus`, a list of `name` and `cc` (the compute capability).

    timeout: in seconds.
    details: report every GPU instead of the first. The result then also has `version`, the driver's CUDA version (13000 for 13.0),
        `through`, and as far as known `release`, `mig`, `confidential` and `developer`.
    """
    options = ("-I",) if details else ("-I", "-S")
    words = ("details",) if details else ()
    try:
        done = subprocess.run(
            [sys.executable, *options, str(_QUESTION), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return f"the driver did not answer in {timeout:.0f} s"
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return said[-1] if said and done.returncode > 0 else f"the driver crashed (status {done.returncode})"
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # a driver may print, too
    return answer


def is_embedded(name: str) -> bool:
    """Return whether a GPU of this name is the embedded device."""
    return "cudasim" in name


def choose(
    wanted: str | None = "auto",
    environment: Mapping[str, str] = os.environ,
    clock: str | None = None,
    default_clock: str = "real",
    amd_gpu: bool = False,
) -> Device:
    """Return the device for "auto", "gpu" or "sim".

    `clock`: the embedded device's clock, "real" or "virtual"; None: the value of one of _CLOCKS, or else `default_clock`.
    amd_gpu: the command is for AMD GPUs, and there is one.
    Raises SessionError if the device cannot be used, and UsageError for an unknown clock or a clock with a GPU."""
    missing = ""
    if wanted != "sim":
        answer = "" if amd_gpu else ask_driver()
        if amd_gpu or isinstance(answer, tuple):
            if clock:
                raise UsageError("--clock is for the embedded device; add --device sim, or leave it out")
            return Device("gpu")
        missing = answer
        if wanted == "gpu":
            raise SessionError(f"no GPU can be used: {missing}; use --device sim for the embedded device")
    if not (LIBRARIES / "libcuda.so.1").exists():
        why = f"no GPU can be used ({missing}), and " if missing else ""
        raise SessionError(f"{why}the embedded device is not built; run script/setup")
    path = ":".join(filter(None, (str(LIBRARIES), environment.get("LD_LIBRARY_PATH"))))
    variable = next((name for name in _CLOCKS if environment.get(name)), _CLOCKS[0])
    clock = clock or environment.get(variable) or default_clock
    if clock not in ("real", "virtual"):
        raise UsageError(f"{variable} is {clock!r}; unset it, or set it to real or virtual")
    virtual = clock == "virtual"
    notice = NOTICE + ("those of its virtual clock" if virtual else "mean nothing")
    changes = {"LD_LIBRARY_PATH": path, "CUDASIM_CLOCK": clock}
    return Device("sim", changes, notice if wanted != "sim" else None)


def cupti_libraries() -> list[str]:
    """Return paths where CUPTI's library may be, likeliest first: Python packages, a toolkit, the system, bare names.

    Without `--cupti`, only those that are files are used."""
    places = [Path(place) for place in sys.path if place]
    found = [str(file) for place in places for file in sorted(place.glob("nvidia/*/lib/libcupti.so.*"))]
    for toolkit in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if toolkit and ":" not in toolkit:
            found += [
                str(file) for file in sorted(Path(toolkit).glob("extras/CUPTI/lib64/libcupti.so.[0-9]*"))
            ]
    for system in ("/usr/lib64", processor.LIBRARIES):
        found += [str(file) for file in sorted(Path(system).glob("libcupti.so.[0-9]*"))]
    return [*(file for file in found if ":" not in file), "libcupti.so.13", "libcupti.so.12", "libcupti.so"]


def sanitizer_libraries(chosen: Device) -> list[str]:
    """Return the files that may be NVIDIA's Compute Sanitizer library, likeliest first: the file that SANITIZER_VARIABLE names, the
    embedded device's own library, and those in Python packages and in a toolkit."""
    name = "libsanitizer-public.so"
    if given := os.environ.get(SANITIZER_VARIABLE):
        return given.split(":")
    if chosen.kind == "sim":
        return [str(file) for file in (LIBRARIES / name,) if file.exists()]
    found: list[Path] = []
    for place in (Path(place) for place in sys.path if place):
        for pattern in ("nvidia/*/compute-sanitizer", "nvidia/*/lib", "nvidia/cuda_sanitizer_api/*"):
            found += sorted(place.glob(f"{pattern}/{name}"))
    for toolkit in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if toolkit:
            found += sorted(Path(toolkit).glob(f"compute-sanitizer/{name}"))
    return [str(file) for file in dict.fromkeys(found) if ":" not in str(file)]


def compute_capability(device: Device, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (major, minor) of the first GPU; for the embedded device, CUDASIM_CC or 9.0. Raises SessionError."""
    if device.kind == "sim":
        major, _, minor = environment.get("CUDASIM_CC", "").partition(".")
        return (int(major), int(minor or 0)) if major.isdigit() and (minor or "0").isdigit() else (9, 0)
    if isinstance(answer := ask_driver(), str):
        raise SessionError(f"no GPU can be used: {answer}; use --device sim for the embedded device")
    return answer
