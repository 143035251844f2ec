"""What operation logs say of launches, for tools whose device programs leave records: which kernel and launch shape each launch is of,
and how the GPUs' clocks run.

    places = Places(numbered=True)
    for log in session.logs():
        places.take(log)
    place = places.of_launch.get((process, number))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf import names
from gpubpf.session import operation_log
from gpubpf.session.clock import Bracket, GpuClock
from gpubpf.session.launch_shape import Index, Shape
from gpubpf.show import cli

if TYPE_CHECKING:
    from gpubpf.ptx.values import Site
    from gpubpf.session.results import ProcessLog

MOST_PLACES = 4096
MOST_LAUNCHES = 1 << 20  # so many are remembered, since records may still come
MOST_UNNAMED = 1 << 16  # records of a log that wait for a name
READINGS = 4096  # of clocks, for each GPU
COUNT = (
    1 << 40
) - 1  # the part of a launch's number that counts within its process; the process's number is above


@dataclass(frozen=True)
class Place:
    """A kernel and launch shape in a process."""

    pid: int
    comm: str
    gpu: int
    mangled: str
    grid: Index
    block_dim: Index

    @property
    def shape(self) -> Shape:
        return Shape(self.grid, self.block_dim)

    def record(self) -> dict[str, Any]:
        """The fields that every JSON record of it has."""
        where = {"pid": self.pid, "comm": self.comm, "gpu": self.gpu}
        kernel = names.demangle(self.mangled).short
        return where | {"kernel": kernel, "grid": self.grid, "block_dim": self.block_dim}


class Places:
    """Collects what logs say. `numbered`: launches are told by number, too, of which records will come.

    of_launch: by the process's number in the session and that of the launch in it (`COUNT`). launches: so many of each place are in
    the logs. virtual: processes whose times are on the virtual clock; faults: those whose context broke; both by process id. ticks: ns
    in which the timer of a GPU counts, by process id and GPU, as `clock`.
    """

    def __init__(self, numbered: bool) -> None:
        self._numbered = numbered
        self.of_launch: dict[tuple[int, int], Place] = {}
        self.launches: dict[Place, int] = {}
        self.virtual: set[int] = set()
        self.faults: set[int] = set()
        self.ticks: dict[tuple[int, int], int] = {}
        self._lost: dict[int, int] = {}
        self._unnamed: dict[int, Any] = {}  # by process: records whose kernel's name or GPU is not known yet
        self._brackets: dict[tuple[int, int], list[Bracket]] = {}
        self._clocks: dict[tuple[int, int], tuple[int, GpuClock]] = {}  # made of so many brackets

    @property
    def lost(self) -> int:
        """Operations that found no room in a log."""
        return sum(self._lost.values())

    def take(self, log: ProcessLog) -> Any:
        """What came into a log. Gives the records whose names are known, those that waited for one among them."""
        records = self._named(log)
        if log.virtual:
            self.virtual.add(log.pid)
        self._lost[log.process] = log.lost
        kinds = records["kind"]
        if (kinds == operation_log.FAULT).any():
            self.faults.add(log.pid)
        for record in records[kinds == operation_log.CLOCK]:
            clock, gpu = record["clock"], log.gpus.get(int(record["context"]), 0)
            bracket = Bracket(*(int(clock[name]) for name in ("host_before", "gpu", "host_after", "tick_ns")))
            brackets = self._brackets.setdefault((log.pid, gpu), [])
            brackets.append(bracket)
            if len(brackets) > READINGS:
                del brackets[1:-1:2]
            self.ticks[log.pid, gpu] = max(self.ticks.get((log.pid, gpu), 0), bracket.tick)
        kernels = records[
            (kinds == operation_log.KERNEL) & (records["kernel"]["reason"] == operation_log.INSTRUMENTED)
        ]
        kernels = kernels[(kernels["flags"] & operation_log.CAPTURED) == 0]
        self._take_launches(log, kernels[_sensible(kernels["kernel"])])
        return records

    def _take_launches(self, log: ProcessLog, kernels: Any) -> None:
        shapes: dict[bytes, Place] = {}
        for number, context, kernel in zip(
            kernels["id"].tolist(), kernels["context"].tolist(), kernels["kernel"], strict=True
        ):
            key = kernel.tobytes()[:32] + context.to_bytes(4, "little")
            if key not in shapes:
                grid, block = (tuple(kernel[name].tolist()) for name in ("grid", "block"))
                mangled = log.names.get(int(kernel["slot"]), "")
                shapes[key] = Place(log.pid, log.comm, log.gpus.get(context, 0), mangled, grid, block)
            place = shapes[key]
            if place not in self.launches and len(self.launches) >= MOST_PLACES:
                continue  # its records count as left out
            if self._numbered:
                self.of_launch[log.process, number & COUNT] = place
                if len(self.of_launch) > MOST_LAUNCHES:
                    for old in list(self.of_launch)[: MOST_LAUNCHES // 2]:
                        del self.of_launch[old]
            self.launches[place] = self.launches.get(place, 0) + 1

    def _named(self, log: ProcessLog) -> Any:
        """Records whose GPU and kernel's name are known: these come by another way than the log, and may come later."""
        kept = self._unnamed.pop(log.process, None)
        records = log.records if kept is None else np.concatenate([kept, log.records])
        launch, clock = (records["kind"] == kind for kind in (operation_log.KERNEL, operation_log.CLOCK))
        launch &= records["kernel"]["reason"] == operation_log.INSTRUMENTED
        unknown = launch & ~np.isin(records["kernel"]["slot"], list(log.names))
        unknown |= (launch | clock) & ~np.isin(records["context"], list(log.gpus))
        if log.over or not unknown.any() or unknown.sum() > MOST_UNNAMED:  # so many never get one
            return records
        self._unnamed[log.process] = records[unknown]
        return records[~unknown]

    def clock(self, pid: int, gpu: int) -> GpuClock:
        """Of that GPU, as the process asked it."""
        brackets = self._brackets.get((pid, gpu), [])
        known, clock = self._clocks.get((pid, gpu), (-1, GpuClock([])))
        if known != len(brackets):
            clock = GpuClock(brackets)
            self._clocks[pid, gpu] = len(brackets), clock
        return clock


def _sensible(kernels: Any) -> np.ndarray:
    """Which have no more blocks and threads than a GPU takes: what a program says takes no memory of ours."""
    blocks, threads = (kernels[name].astype(np.float64).prod(axis=1) for name in ("grid", "block"))
    return (blocks > 0) & (blocks < 2**31) & (threads > 0) & (threads <= 1024)


def name_of(site: Site) -> str:
    """What a site of a kernel is called: ``scale.cu:17``, without -lineinfo ``PTX line 40``."""
    if site.source:
        return f"{cli.printable(site.source.rsplit('/', 1)[-1])}:{site.source_line}"
    return f"PTX line {site.line}"


def source_of(sites: Mapping[int, Site]) -> Callable[[int], str | None]:
    """The names of a kernel's sites by number; None where one is not known."""

    def source(number: int) -> str | None:
        site = sites.get(number)
        return None if site is None else name_of(site)

    return source
