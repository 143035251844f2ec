"""Collect each launch's kernel and shape, and the GPUs' clocks, from operation logs, for tools whose device programs write records.

shapes = KernelShapes(numbered=True)
for log in session.logs():
    shapes.take(log)
kernel = shapes.of_launch.get((process, number))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf.agent.definitions import NUMBER_MASK
from gpubpf.record import Record
from gpubpf.records import operation_log
from gpubpf.records.clock import Bracket, GpuClock
from gpubpf.records.launch_shape import Index, Shape
from gpubpf.show.table import printable

if TYPE_CHECKING:
    from gpubpf.inject.values import Site
    from gpubpf.records.results import ProcessLog

MOST_SHAPES = 4096
MOST_LAUNCHES = 1 << 20  # launches to remember, because their records may still arrive
MOST_UNNAMED = 1 << 16  # records of a log whose kernel name is not known yet
READINGS = 4096  # clock brackets to keep per GPU


class KernelShape(Record):
    """A kernel and launch shape in a process. wave: lanes per wave, if it ran on an AMD GPU. build: see `KernelShapes`."""

    pid: int
    comm: str
    gpu: int
    mangled: str
    grid: Index
    block_dim: Index
    wave: int | None = None
    build: int | None = None

    @property
    def shape(self) -> Shape:
        return Shape(self.grid, self.block_dim, self.wave)


class KernelShapes:
    """Collects launches and clocks from logs.

    numbered: also remember launches by number, because records will refer to them.
    builds: distinguish the builds of a kernel, because records will refer to their sites (`Session.sites`).

    of_launch   the kernel and shape by (process number in the session, launch number in the process, see `NUMBER_MASK`)
    launches    number of logged launches of each kernel and shape, without those that failed
    virtual     pids of processes whose times are on the virtual clock
    faults      pids of processes whose CUDA context failed
    ticks       resolution of a GPU's timer in ns, by (process, GPU); a pid may have belonged to programs that use other GPUs
    """

    def __init__(self, numbered: bool, builds: bool = False) -> None:
        self._numbered, self._builds = numbered, builds
        self.of_launch: dict[tuple[int, int], KernelShape] = {}
        self.launches: dict[KernelShape, int] = {}
        self.virtual: set[int] = set()
        self.faults: set[int] = set()
        self.ticks: dict[tuple[int, int], int] = {}
        self._lost: dict[int, int] = {}
        self._unnamed: dict[int, Any] = {}  # by process: records whose kernel name or GPU is not known yet
        self._brackets: dict[tuple[int, int], list[Bracket]] = {}
        # Each with the number of brackets that it was computed from.
        self._clocks: dict[tuple[int, int], tuple[int, GpuClock]] = {}

    @property
    def lost(self) -> int:
        """The number of operations that were dropped because a log was full."""
        return sum(self._lost.values())

    def take(self, log: ProcessLog) -> Any:
        """Take the new records of a log. Return those whose kernel names are known by now, including earlier records."""
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
            brackets = self._brackets.setdefault((log.process, gpu), [])
            brackets.append(bracket)
            if len(brackets) > READINGS:
                del brackets[1:-1:2]
            self.ticks[log.process, gpu] = max(self.ticks.get((log.process, gpu), 0), bracket.tick)
        kernels = records[
            (kinds == operation_log.KERNEL) & (records["kernel"]["outcome"] == operation_log.INSTRUMENTED)
        ]
        kernels = kernels[((kernels["flags"] & operation_log.CAPTURED) == 0) & (kernels["result"] == 0)]
        self._take_launches(log, kernels[_sensible(kernels["kernel"])])
        return records

    def _take_launches(self, log: ProcessLog, kernels: Any) -> None:
        known: dict[tuple[bytes, int, int | None], KernelShape] = {}
        for number, context, kernel in zip(
            kernels["id"].tolist(), kernels["context"].tolist(), kernels["kernel"], strict=True
        ):
            build = int(kernel["build"]) if self._builds else None
            key = kernel.tobytes()[:32], context, build
            if key not in known:
                grid, block = (tuple(kernel[name].tolist()) for name in ("grid", "block"))
                mangled = log.names.get(int(kernel["slot"]), "")
                gpu, wave = log.gpus.get(context, 0), log.waves.get(mangled)
                known[key] = KernelShape(log.pid, log.comm, gpu, mangled, grid, block, wave, build)
            kernel_shape = known[key]
            if kernel_shape not in self.launches and len(self.launches) >= MOST_SHAPES:
                continue  # its records will be counted as unknown
            if self._numbered:
                self.of_launch[log.process, number & NUMBER_MASK] = kernel_shape
                if len(self.of_launch) > MOST_LAUNCHES:
                    for old in list(self.of_launch)[: MOST_LAUNCHES // 2]:
                        del self.of_launch[old]
            self.launches[kernel_shape] = self.launches.get(kernel_shape, 0) + 1

    def _named(self, log: ProcessLog) -> Any:
        """Return the records whose GPU and kernel name are known. The agent sends both separately from the log, perhaps later."""
        kept = self._unnamed.pop(log.process, None)
        records = log.records if kept is None else np.concatenate([kept, log.records])
        launch, clock = (records["kind"] == kind for kind in (operation_log.KERNEL, operation_log.CLOCK))
        launch &= records["kernel"]["outcome"] == operation_log.INSTRUMENTED
        unknown = launch & ~np.isin(records["kernel"]["slot"], list(log.names))
        unknown |= (launch | clock) & ~np.isin(records["context"], list(log.gpus))
        if log.over or log.final or not unknown.any() or unknown.sum() > MOST_UNNAMED:
            # With more than this, stop waiting: these records will never get a name.
            return records
        self._unnamed[log.process] = records[unknown]
        return records[~unknown]

    def clock(self, process: int, gpu: int) -> GpuClock:
        """Return the clock of a GPU, computed from the brackets of the process with this number in the session."""
        brackets = self._brackets.get((process, gpu), [])
        known, clock = self._clocks.get((process, gpu), (-1, GpuClock([])))
        if known != len(brackets):
            clock = GpuClock(brackets)
            self._clocks[process, gpu] = len(brackets), clock
        return clock


def _sensible(kernels: Any) -> np.ndarray:
    """Return a mask of the kernels with a possible grid and block size. The traced program must not make the tool over-allocate."""
    blocks, threads = (kernels[name].astype(np.float64).prod(axis=1) for name in ("grid", "block"))
    return (blocks > 0) & (blocks < 2**31) & (threads > 0) & (threads <= 1024)


def site_name(site: Site) -> str:
    """Return the name of an instruction: ``scale.cu:17``; without -lineinfo ``PTX line 40``, or on AMD GPUs ``instruction +0x1b0``."""
    if site.source:
        return f"{printable(site.source.rsplit('/', 1)[-1])}:{site.source_line}"
    return f"PTX line {site.line}" if site.offset is None else f"instruction +{site.offset:#x}"


def known_site_name(number: int, site: Site | None) -> str:
    """Return the name of an instruction, or `site 12` if the tool does not know it: a traced process can write any number."""
    return f"site {number}" if site is None else site_name(site)


def file_names(paths: Collection[str]) -> dict[str, str]:
    """Return short names of files for tables: only with the directories that distinguish files with the same name."""
    found = dict.fromkeys(paths, "")
    for parts in range(1, 2 + max((path.count("/") for path in paths), default=0)):
        same = Counter(found.values())
        found |= {
            path: printable("/".join(path.split("/")[-parts:]))
            for path, name in found.items()
            if parts == 1 or same[name] > 1
        }
    return found


def site_names(sites: Mapping[int, Site]) -> Callable[[int], str | None]:
    """Return a function that returns the name of a kernel's site by number, or None for an unknown site."""

    def source(number: int) -> str | None:
        site = sites.get(number)
        return None if site is None else site_name(site)

    return source
