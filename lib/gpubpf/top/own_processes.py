"""Which processes a user who is not root can measure without naming them."""

from __future__ import annotations

import os
import re

from gpubpf.errors import SessionError
from gpubpf.process import gpu_processes

# A process that has only loaded a runtime does not use the GPU yet.
_DRIVER = re.compile(r"lib(?:cuda|hsa-runtime64)[-.]")


def found(tool: str) -> list[int]:
    """Return the user's own processes that have loaded a GPU's driver. Raises SessionError if there are none."""
    mine = [
        int(one["pid"])
        for one in gpu_processes.found()["processes"]
        if one["uid"] == os.geteuid() and any(map(_DRIVER.match, one["libraries"]))
    ]
    if not mine:
        raise SessionError(
            "none of your processes uses a GPU now; start one first, use sudo to watch every process,"
            f" or start a program with {tool} -- COMMAND"
        )
    return mine
