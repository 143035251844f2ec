"""The processes that have loaded a GPU's libraries."""

from __future__ import annotations

import os
import re
from typing import Any

from gpubpf.process import address_space, proc, scans, traceable
from gpubpf.process.patience import LOOK_WAIT, Unanswered, within

MOST, MOST_LIBRARIES = 1000, 16  # processes in an answer, and libraries of each
_LIBRARY = re.compile(r"/(?:.*/)?lib(?:cuda|cudart|hsa-runtime64|amdhip64)[-.][^/]*$")


def found() -> dict[str, Any]:
    """Return the processes, and how many could not be looked at: because of their owner, because they did not answer, or because
    looking at the processes of their user took too long."""
    processes: list[dict[str, Any]] = []
    unknown = 0
    budget = scans.ScanBudget()
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        if pid == os.getpid():
            continue
        owner = scans.user_of(pid)
        if budget.exhausted(owner) or len(processes) >= MOST:
            unknown += 1
            continue

        def look(pid: int = pid, owner: int = owner) -> tuple[address_space.Mapping, ...]:
            with budget.scan(owner):
                return address_space.mappings(pid, _LIBRARY)

        try:
            mapped = within(LOOK_WAIT, pid, look)
            libraries = sorted({library.name for library in address_space.libraries(mapped)})
            comm = proc.comm(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError as error:
            if isinstance(error, Unanswered):
                budget.spend(owner, LOOK_WAIT)
            unknown += 1
            continue
        if libraries:
            user = int(traceable.status(pid).get("Uid", "-1").split()[0])
            processes.append({"pid": pid, "comm": comm, "uid": user, "libraries": libraries[:MOST_LIBRARIES]})
    return {"processes": processes, "unknown": unknown}
