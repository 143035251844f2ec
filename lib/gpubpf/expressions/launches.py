"""The launches in the operation log, with the values that expressions over launches may name.

    launches = Launches()
    for log in session.logs():
        for launch in launches.take(log):
            evaluate(node, launch.values)

These are all launches that the user asked for, including those in graphs and those of kernels that cannot be instrumented.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf.agent.definitions import NUMBER_MASK, Reason, outcome_of
from gpubpf.expressions.points import LAUNCH_NAMES
from gpubpf.record import Record
from gpubpf.records import operation_log
from gpubpf.show import table
from gpubpf.show.notices import note

if TYPE_CHECKING:
    from gpubpf.records.results import ProcessLog

MOST_UNNAMED = 1 << 16  # maximum records of a log that wait for the name of their kernel
_LEFT_OUT = (outcome_of(Reason.SAMPLED_OUT), outcome_of(Reason.FILTERED))  # by --sample and --launch


class Launch(Record):
    """A launch.

    values: by the names of `points.LAUNCH_NAMES`.
    wave: the lanes of a wave, on an AMD GPU.
    time: time of the call, ns.
    """

    pid: int
    comm: str
    gpu: int
    mangled: str
    wave: int | None
    values: Mapping[str, int]

    @property
    def time(self) -> int:
        return self.values["call_ns"]


class Launches:
    """Takes launches from operation logs. lost: the number of records that were dropped because a log was full."""

    def __init__(self) -> None:
        self._unnamed: dict[int, Any] = {}  # by process: launches whose kernel's name or GPU is not known yet
        self._lost: dict[int, int] = {}

    @property
    def lost(self) -> int:
        return sum(self._lost.values())

    def say_lost(self, tool: str) -> None:
        """Print a notice about launches that are missing from the results."""
        if self.lost:
            note(
                tool,
                f"{table.count(self.lost, 'operation')} found no room in the log; launches may be missing",
            )

    def take(self, log: ProcessLog) -> Iterator[Launch]:
        """Yield the new launches in a log, and earlier launches whose kernels' names have arrived."""
        self._lost[log.process] = log.lost
        for record in self._named(log):
            kernel = record["kernel"]
            mangled = log.names.get(int(kernel["slot"]))
            if mangled is None:
                continue
            grid, block = kernel["grid"].tolist(), kernel["block"].tolist()
            gpu = log.gpus.get(int(record["context"]), 0)
            values = (
                int(record["id"]) & NUMBER_MASK, log.pid, int(record["thread"]), gpu, int(record["stream"]),
                int(record["call_ns"]), prod(grid) * prod(block), int(kernel["shared"]),
                prod(grid), *grid, prod(block), *block,
            )  # fmt: skip
            named = dict(zip(LAUNCH_NAMES, values, strict=True))
            yield Launch(log.pid, log.comm, gpu, mangled, log.waves.get(mangled), named)

    def _named(self, log: ProcessLog) -> Any:
        """Return the records of launches that ran and whose kernel's name is known, or will never be known."""
        found = log.records[log.records["kind"] == operation_log.KERNEL]
        found = found[(found["flags"] & operation_log.CAPTURED) == 0]
        found = found[(found["result"] == 0) & ~np.isin(found["kernel"]["outcome"], _LEFT_OUT)]
        kept = self._unnamed.pop(log.process, None)
        if kept is not None:
            found = np.concatenate([kept, found])
        unknown = ~np.isin(found["kernel"]["slot"], list(log.names))
        unknown |= ~np.isin(found["context"], list(log.gpus))
        if log.over or log.final or not unknown.any() or unknown.sum() > MOST_UNNAMED:
            return found
        self._unnamed[log.process] = found[unknown]
        return found[~unknown]
