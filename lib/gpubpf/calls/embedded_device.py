"""Choose what hipsnoop's command runs on: an AMD GPU, or hipsim, the embedded AMD device, if there is no GPU."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path

from gpubpf.errors import SessionError

LIBRARIES = Path(__file__).resolve().parents[2] / "hipsim" / "lib"
NOTICE = "no AMD GPU here: HIP programs run on hipsim, the embedded AMD device; results are exact, times mean nothing"
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


def choose(
    wanted: str | None, environment: Mapping[str, str] = os.environ
) -> tuple[dict[str, str], str | None]:
    """Return the variables to add to the command's environment, and a notice for the user or None.

    `wanted`: "gpu", "sim", or None for "auto", which takes the embedded device if there is no GPU and the device is built.
    Raises SessionError if the device that was asked for cannot be used.
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
    path = filter(None, (str(LIBRARIES), environment.get("LD_LIBRARY_PATH")))
    return {"LD_LIBRARY_PATH": ":".join(path)}, None if wanted == "sim" else NOTICE
