"""What a measurement gives to tools: what maps hold, how often kernels were launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gpubpf.ebpf import maps

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.agent.protocol import StackFrame
    from gpubpf.ebpf.maps import MapDefinition
    from gpubpf.session.rings import ShardCount


@dataclass(frozen=True)
class Instance:
    """What one map holds for one kernel and launch shape (site arrays: for one copy of a kernel in one context, with extents of 0;
    maps that are not by shape: for a context, with `mangled` "").

    `grid` and `block_dim` are [x, y, z]; `raw` is the storage as `maps` describes it, `capacity` its room in units (threads,
    warps, blocks; sites and shards as the launch block has them). `taken_ns`: when it was read, on the host's clock.
    `context`: its number in the process. `process`: that one's number in the session.
    """

    pid: int
    comm: str
    gpu: int
    mangled: str
    grid: tuple[int, int, int]
    block_dim: tuple[int, int, int]
    launches: int
    definition: MapDefinition
    raw: bytes = field(repr=False)
    capacity: int
    registers_before: int | None
    registers_after: int | None
    taken_ns: int = 0
    context: int = 0
    process: int = 0

    @cached_property
    def array(self) -> np.ndarray[Any, Any]:
        """The values. Arrays by shape: [entry, unit]; site arrays: [shard, site]; see `maps.decode`."""
        return maps.decode(self.definition, self.raw, self.capacity)

    @cached_property
    def demangled(self) -> str:
        from gpubpf import names

        return names.demangle(self.mangled).full

    @cached_property
    def kernel(self) -> str:
        """The name without template arguments and parameter list."""
        from gpubpf import names

        return names.demangle(self.mangled).short


@dataclass(frozen=True)
class KernelCount:
    """Launches of one kernel name in all processes."""

    mangled: str
    launches: int
    matched: bool
    instrumented: int
    not_instrumented: Mapping[str, int]


@dataclass(frozen=True)
class ProcessLog:
    """What came into a process's operation log since the last time (`records`, of `oplog.DTYPE`), and how many were ever `lost`.

    virtual: times are those of the embedded device's virtual clock, else CLOCK_MONOTONIC. names: mangled kernel names by slot.
    gpus: the GPU's ordinal by context. stacks: host stacks by number, innermost frame first. over: this was the last of it.
    """

    pid: int
    comm: str
    records: np.ndarray[Any, Any] = field(repr=False)
    lost: int
    virtual: bool
    names: Mapping[int, str] = field(repr=False)
    gpus: Mapping[int, int]
    stacks: Mapping[int, tuple[StackFrame, ...]] = field(repr=False)
    over: bool
    process: int = 0  # its number in the session: a process id comes again after exec


@dataclass(frozen=True)
class RingRecords:
    """What came into a ring since the last time; `records` are of the map's `value_dtype`."""

    pid: int
    comm: str
    gpu: int
    context: int
    records: np.ndarray[Any, Any] = field(repr=False)
    names: Mapping[int, str] = field(repr=False)
    process: int = 0  # its number in the session, which ids of launches begin with


@dataclass(frozen=True)
class RingCounts:
    """The shards of a ring of one context."""

    pid: int
    comm: str
    gpu: int
    shards: tuple[ShardCount, ...]


@dataclass(frozen=True)
class SharedArray:
    """What a shared array of one process holds: (entries,) of the map's `value_dtype`."""

    pid: int
    comm: str
    array: np.ndarray[Any, Any]
    process: int = 0  # its number in the session


@dataclass(frozen=True)
class Reading:
    """Maps of one context as they were at `taken_ns` (of the host's clock: when copying began): by name their instances. `idle`: no
    kernel was running. `names`: mangled kernel names by slot."""

    pid: int
    comm: str
    gpu: int
    context: int
    taken_ns: int
    idle: bool
    instances: Mapping[str, list[Instance]] = field(repr=False)
    names: Mapping[int, str] = field(repr=False)
    process: int = 0  # its number in the session


def merged(found: list[Instance]) -> list[Instance]:
    """Instances of the same place added up, where their values are numbers. Not those of site arrays: what a site's values mean (sums,
    maxima, bits), and how to put two of them together, its tool knows."""
    by_place: dict[tuple[Any, ...], Instance] = {}
    rest = []
    for one in found:
        if one.definition.kind == "site_array":
            rest.append(one)
            continue
        place = (one.pid, one.gpu, one.mangled, one.grid, one.block_dim)
        other = by_place.get(place)
        if other is None:
            by_place[place] = one
        elif one.definition.kind in maps.SHAPED and (total := _added(other.array, one.array)) is not None:
            raw = total.tobytes() + bytes(one.definition.value_size)  # the value that nobody reads
            by_place[place] = dataclasses.replace(other, raw=raw, launches=other.launches + one.launches)
        else:
            rest.append(one)
    return [*by_place.values(), *rest]


def _added(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """The sum, field by field; None of what is no number."""
    names = a.dtype.names
    if names is None:
        return None if a.dtype.kind == "V" else a + b
    total = a.copy()
    for name in names:
        if (part := _added(a[name], b[name])) is None:
            return None
        total[name] = part
    return total
