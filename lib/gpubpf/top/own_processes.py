"""Which processes a user who is not root can measure without naming them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable

from gpubpf.errors import SessionError
from gpubpf.process import gpu_processes
from gpubpf.show import table
from gpubpf.traced import joining
from gpubpf.traced.device import Device

GPU = Device("gpu").name

# A process that has only loaded a runtime does not use the GPU yet.
_DRIVER = re.compile(r"lib(?:cuda|hsa-runtime64)[-.]")


def found(tool: str, note: Callable[[str], None]) -> list[int]:
    """Return the user's own processes that have loaded a GPU's driver. Raises SessionError if there are none.

    They share a device: a GPU if one of them uses a GPU. note: gets a sentence about those that do not.
    """
    mine = [
        int(one["pid"])
        for one in gpu_processes.found()["processes"]
        if one["uid"] == os.geteuid() and any(map(_DRIVER.match, one["libraries"]))
    ]
    by_device: dict[str, list[int]] = {}
    for pid in mine:
        with contextlib.suppress(SessionError):  # it has ended, or cannot be traced
            by_device.setdefault(joining.device_of(pid).name, []).append(pid)
    if not by_device:
        raise SessionError(
            "none of your processes uses a GPU now; start one first, use sudo to watch every process,"
            f" or start a program with {tool} -- COMMAND"
        )
    name, chosen = max(by_device.items(), key=lambda item: (item[0] == GPU, len(item[1])))
    note("measuring your processes that use a GPU now; every process, now and later, requires root")
    if others := len(mine) - len(chosen):
        note(f"{table.count(others, 'process')} left out: on another device than {name}, or cannot be traced")
    return chosen
