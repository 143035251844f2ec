"""Choose what hipsnoop's command runs on: an AMD GPU, or hipsim, the embedded AMD device, if there is no GPU."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from gpubpf.errors import SessionError
from gpubpf.process import target_files

LIBRARIES = Path(__file__).resolve().parents[2] / "hipsim" / "lib"
NOTICE = "no AMD GPU here: HIP programs run on hipsim, the embedded AMD device; results are exact, times mean nothing"
OTHER_CODE = "has no code for {gpu}, so it runs without a device: hipsim would end it"
DEFAULT_GPU = "gfx906"  # hipsim's, where HIPSIM_GPU does not name another one
_CODE = re.compile(rb"-amdgcn-amd-amdhsa-+gfx\w")
_GPU_IDS = "/sys/class/kfd/kfd/topology/nodes/*/gpu_id"  # 0 for the nodes of CPUs


def has_gpu() -> bool:
    """Return whether the Linux kernel's driver (KFD) knows an AMD GPU."""
    for path in glob.glob(_GPU_IDS):
        try:
            if int(Path(path).read_text()) != 0:
                return True
        except (OSError, ValueError):
            continue
    return False


def _has_only_code_for_others(program: str, gpu: str) -> bool:
    """Return whether a program has code for GPUs, and none for this one: HIP aborts such a program if there is a device."""
    for_this_gpu = re.compile(rb"-amdgcn-amd-amdhsa-+" + re.escape(gpu.encode()) + rb"\b")
    has_code, end = False, b""
    with (
        contextlib.suppress(OSError, ValueError),
        open(target_files.open_regular(shutil.which(program) or program), "rb") as file,
    ):
        while part := file.read(1 << 20):
            if for_this_gpu.search(end + part):
                return False
            has_code = has_code or _CODE.search(end + part) is not None
            end = part[-64:]  # a name may begin in one part and end in the next
    return has_code


def choose(
    wanted: str | None, program: str, environment: Mapping[str, str] = os.environ
) -> tuple[dict[str, str], str | None]:
    """Return the variables to add to the environment of a command, and a notice for the user or None.

    `wanted`: "gpu", "sim", or None for "auto", which takes the embedded device if there is no GPU, the device is built, and `program`,
    the command's first word, has no code for other GPUs only. Raises SessionError if the device that was asked for cannot be used.
    """
    built = (LIBRARIES / "libhsakmt.so.1").exists()
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
    gpu = environment.get("HIPSIM_GPU") or DEFAULT_GPU
    if wanted != "sim" and _has_only_code_for_others(program, gpu):
        return {}, f"{program} {OTHER_CODE.format(gpu=gpu)}"
    path = filter(None, (str(LIBRARIES), environment.get("LD_LIBRARY_PATH")))
    return {"LD_LIBRARY_PATH": ":".join(path)}, None if wanted == "sim" else NOTICE
