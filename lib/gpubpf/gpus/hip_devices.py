"""List AMD GPUs with hip-python, if it is installed (https://pypi.org/project/hip-python).

hip-python runs in a separate process, because it loads the HIP runtime. The tool does not wait long for it.
Not tested with a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from gpubpf.process import children
from gpubpf.show import table

TIMEOUT = 2.0  # seconds to wait at the end of a measurement
# The fields of hipGetDeviceProperties are those of HIP's headers. Result 0 is hipSuccess.
_PROGRAM = """
import json
from hip import hip
def of(result):
    if int(result[0]) != 0:
        raise SystemExit(0)
    return result[1]
found = []
for number in range(of(hip.hipGetDeviceCount())):
    p = hip.hipDeviceProp_t()
    if int(hip.hipGetDeviceProperties(p, number)[0]) == 0:
        text = lambda name: bytes(getattr(p, name)).split(b"\\0")[0].decode("utf-8", "replace")
        found.append({"gpu": number, "name": text("name"), "architecture": text("gcnArchName"),
                      "memory_bytes": int(p.totalGlobalMem), "compute_units": int(p.multiProcessorCount)})
print(json.dumps(found))
"""


class HipDevices:
    """A process that lists the GPUs, started by the constructor."""

    def __init__(self) -> None:
        self._devices: list[dict[str, Any]] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            installed = importlib.util.find_spec("hip") is not None
        except (ImportError, ValueError):
            installed = False
        if installed:
            self._process = subprocess.Popen(
                children.python(_PROGRAM),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not end it
            )  # fmt: skip

    def devices(self, wait: float = 0.0) -> Sequence[Mapping[str, Any]] | None:
        """Return `gpu`, `name`, `architecture`, `memory_bytes` and `compute_units` of each GPU, or None if
        they are unknown.

        Wait at most `wait` seconds for the process. If it takes longer and `wait` is not 0, end the process: the
        GPUs stay unknown.
        """
        if self._process is not None:
            try:
                text, _ = self._process.communicate(timeout=wait)
            except subprocess.TimeoutExpired:
                if wait:
                    self.close()
                return None
            self._process = None
            try:
                self._devices = json.loads(text or b"[]")
            except ValueError:
                self._devices = []
        return self._devices or None

    def close(self) -> None:
        """End the process if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def describe(device: Mapping[str, Any]) -> str:
    """Return a line such as ``GPU 0: AMD Instinct MI300X, gfx942, 304 compute units, 192 GB``."""
    what = (
        device["name"],
        device["architecture"],
        f"{device['compute_units']} compute units",
        table.size(device["memory_bytes"]),
    )
    return f"GPU {device['gpu']}: {', '.join(part for part in what if part)}"
