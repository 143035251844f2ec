"""Which GPUs there are, by hip-python where it is installed (https://pypi.org/project/hip-python). It is asked in a process of its
own, since it loads the runtime; nothing waits for it long. Not verified with a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gpubpf.show import table

WAIT = 2.0  # seconds, at the end of a measurement
# hipGetDeviceProperties gives what HIP's headers name; `ok` is hipSuccess.
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


class Inventory:
    """The question is under way once this is made."""

    def __init__(self) -> None:
        self._devices: list[dict[str, Any]] | None = None
        self._asked: subprocess.Popen[bytes] | None = None
        try:
            there = importlib.util.find_spec("hip") is not None
        except (ImportError, ValueError):
            there = False
        if there:
            self._asked = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM],  # nothing from the working directory
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the tool
            )  # fmt: skip

    def devices(self, wait: float = 0.0) -> Sequence[Mapping[str, Any]] | None:
        """`gpu`, `name`, `architecture`, `memory_bytes`, `compute_units` of each; None where that is not known (yet, or in `wait`
        seconds, then never)."""
        if self._asked is not None:
            try:
                text, _ = self._asked.communicate(timeout=wait)
            except subprocess.TimeoutExpired:
                if wait:
                    self.close()
                return None
            self._asked = None
            try:
                self._devices = json.loads(text or b"[]")
            except ValueError:
                self._devices = []
        return self._devices or None

    def close(self) -> None:
        if self._asked is not None:
            self._asked.kill()
            self._asked.communicate()
            self._asked = None


def line(device: Mapping[str, Any]) -> str:
    """``GPU 0: AMD Instinct MI300X, gfx942, 304 compute units, 192 GB``."""
    what = (
        device["name"],
        device["architecture"],
        f"{device['compute_units']} compute units",
        table.size(device["memory_bytes"]),
    )
    return f"GPU {device['gpu']}: {', '.join(part for part in what if part)}"
