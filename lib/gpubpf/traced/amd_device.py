"""Choose the device for a command's HIP code: an AMD GPU, or hipsim, the embedded AMD device, if there is no GPU."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import hipsim
from gpubpf import elf
from gpubpf.errors import ImageError, SessionError
from gpubpf.record import replace
from gpubpf.traced.device import Device
from hipsim import gpus

if TYPE_CHECKING:
    from gpubpf.show.parsed import Options

NOTICE = "no AMD GPU: HIP runs on hipsim, in software; times "
_NOTHING, _VIRTUAL = "mean nothing", "are those of its virtual clock"
_GPU_IDS = "/sys/class/kfd/kfd/topology/nodes/*/gpu_id"  # 0 for CPU nodes


def has_gpu() -> bool:
    """Return whether the Linux kernel's driver (KFD) reports an AMD GPU."""
    import glob  # imported here because the import is slow

    for path in glob.glob(_GPU_IDS):
        try:
            if int(Path(path).read_text()) != 0:
                return True
        except (OSError, ValueError):
            continue
    return False


def choose(
    wanted: str | None, program: str, environment: Mapping[str, str] = os.environ, virtual: bool = False
) -> tuple[dict[str, str], str | None]:
    """Return the environment variables to add for a command, and a notice for the user or None.

    wanted: "gpu", "sim", or None for "auto". With None, the embedded device is used if there is no GPU, the device is built, and
        `program` can run on it.
    program: the command's first word. A program that has code only for other GPUs cannot run on the embedded device.
    virtual: the embedded device uses its virtual clock.

    Raises SessionError if the requested device cannot be used.
    """
    built = (hipsim.LIBRARIES / "libhsakmt.so.1").exists()
    if wanted == "gpu":
        if not has_gpu():
            raise SessionError(
                "no AMD GPU can be used: KFD knows none; use --device sim for the embedded device"
            )
        return {}, None
    if wanted == "sim" and not built:
        raise SessionError("the embedded AMD device is not built; run script/setup")
    if wanted != "sim" and (not built or has_gpu()):
        return {}, None
    has_code_for = gpus.of_command(program)
    asked = environment.get("HIPSIM_GPU")
    if asked and asked not in gpus.GPUS:
        raise SessionError(f"HIPSIM_GPU is {asked!r}; set it to {' or '.join(gpus.GPUS)}")
    notice = None if wanted == "sim" else NOTICE + (_VIRTUAL if virtual else _NOTHING)
    if wanted != "sim" and (other := gpus.other_code(program, has_code_for, asked)):
        # HIP aborts a program that has no code for the device that it finds.
        build = f"build it with --offload-arch={asked or gpus.GPUS[0]}"
        return {}, f"{other}, so it runs without a device; {build}"
    path = filter(None, (str(hipsim.LIBRARIES), environment.get("LD_LIBRARY_PATH")))
    return {"LD_LIBRARY_PATH": ":".join(path)}, notice


@functools.cache
def is_for_hip(program: str) -> bool:
    """Return whether a command's first word is a program with code for AMD GPUs, or linked with HIP, which may compile such code."""
    if gpus.of_command(program):
        return True
    with contextlib.suppress(OSError, ValueError, ImageError), gpus.opened(program) as file:
        return any(name.startswith("libamdhip64.so") for name in elf.of_file(file.fileno()).needed())
    return False


def beside(chosen: Device, wanted: str | None, program: str) -> Device:
    """Return a device extended with what a command needs for HIP. For a HIP program, the notice is about HIP.

    On a machine with a CUDA GPU, only HIP programs get the embedded AMD device. Other programs may look for AMD GPUs, and must not
    find the embedded device.
    """
    if (
        wanted == "gpu"
        or (wanted != "sim" and has_gpu())
        or not (hipsim.LIBRARIES / "libhsakmt.so.1").exists()
    ):
        return chosen
    for_hip = is_for_hip(program)
    if chosen.kind == "gpu" and not for_hip:
        return chosen
    sim = "sim" if wanted == "sim" else None
    variables, notice = choose(sim, program, {**os.environ, **chosen.environment}, chosen.virtual)
    if (clock := chosen.environment.get("CUDASIM_CLOCK")) and variables:
        variables["HIPSIM_CLOCK"] = clock
    environment = {**chosen.environment, **variables}
    return replace(chosen, environment=environment, notice=notice if for_hip else chosen.notice)


def of_command(options: Options) -> tuple[dict[str, str], str | None]:
    """Return the result of `choose` for the command on a command line; an empty result without a command."""
    command = options.targets.command
    return choose(options.device.kind, command[0]) if command else ({}, None)
