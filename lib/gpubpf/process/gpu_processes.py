"""The processes that have loaded a GPU's libraries."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

from gpubpf.process import address_space, proc, traceable
from gpubpf.process.patience import LOOK_WAIT, within

_LIBRARY = re.compile(r"/(?:.*/)?lib(?:cuda|cudart|hsa-runtime64|amdhip64)[-.][^/]*$")


def found() -> dict[str, Any]:
    """Return the processes, and how many could not be looked at, because of their owner or because they did not answer."""
    processes = []
    unknown = 0
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        if pid == os.getpid():
            continue
        try:
            mapped = within(LOOK_WAIT, pid, partial(address_space.mappings, pid, _LIBRARY))
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            unknown += 1
            continue
        libraries = sorted({library.name for library in address_space.libraries(mapped)})
        if libraries:
            user = int(traceable.status(pid).get("Uid", "-1").split()[0])
            processes.append({"pid": pid, "comm": proc.comm(pid), "uid": user, "libraries": libraries})
    return {"processes": processes, "unknown": unknown}
