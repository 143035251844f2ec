"""The values that a session returns to tools: contents of maps, logs and rings, and counts of launches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gpubpf.agent.definitions import Vendor
from gpubpf.ebpf import maps
from gpubpf.record import Record, field, replace

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.agent.definitions import RangeName
    from gpubpf.ebpf.maps import MapDefinition
    from gpubpf.process.host_frames import HostFrame
    from gpubpf.records.launch_shape import Shape
    from gpubpf.records.rings import ShardCount


class Instance(Record):
    """The contents of a map for one kernel and launch shape.

    A site array has an instance for each copy of a kernel in a context, with extents of 0. A map that does not depend on the launch
    shape has one instance per context, with `mangled` "".

    grid, block_dim   [x, y, z]
    raw        the storage, in the format of `maps`
    capacity   its capacity: threads, warps or blocks; sites and shards as in the launch block
    taken_ns   when it was read, on the host's clock
    context    number of the context in the process
    process    number of the process in the session; a process gets another number when it executes another program
    spilled    bytes of local memory per thread that the copy needs in addition, because it has fewer registers than it needs
    wave       lanes per wave, if it ran on an AMD GPU
    idle       no kernel was running at the reading: all `launches` had ended
    waits      the kernel's blocks may wait for each other (ptx.call_graph.may_wait)
    build      number of the kernel's build, for `Session.sites`; if the instance adds up several builds, any one of them
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
    spilled: int = 0
    wave: int | None = None
    idle: bool = True
    waits: bool = False
    build: int = 0

    @property
    def shape(self) -> Shape:
        from gpubpf.records.launch_shape import Shape  # imports NumPy

        return Shape(self.grid, self.block_dim, self.wave)

    @cached_property
    def array(self) -> np.ndarray[Any, Any]:
        """The values: [entry, unit] for arrays by shape, [shard, site] for site arrays; see `maps.decode`."""
        return maps.decode(self.definition, self.raw, self.capacity)

    @cached_property
    def demangled(self) -> str:
        from gpubpf import names

        return names.demangle(self.mangled).full

    @cached_property
    def kernel(self) -> str:
        """The demangled name without template arguments and parameter list."""
        from gpubpf import names

        return names.demangle(self.mangled).short


class KernelCount(Record):
    """The launches of one kernel name in all processes."""

    mangled: str
    launches: int
    matched: bool
    instrumented: int
    not_instrumented: Mapping[str, int]

    def plus(self, other: KernelCount) -> KernelCount:
        """Return the sum of the launches of two kernels with the same name."""
        reasons = dict(self.not_instrumented)
        for reason, n in other.not_instrumented.items():
            reasons[reason] = reasons.get(reason, 0) + n
        launches, instrumented = self.launches + other.launches, self.instrumented + other.instrumented
        return KernelCount(self.mangled, launches, self.matched or other.matched, instrumented, reasons)


class ProcessCounts(Record):
    """What was counted in one process. No number decreases.

    number: of the process in the session; a process gets another number when it executes another program.
    over: the process has ended, and everything was read: the counts are final.
    kernels: the launches by kernel name; those of kernels whose name is unknown have the name "".
    lost: instrumented launches whose results were not read before the process ended (upper bound). 0 before that.
    hooks_ns: time that the agent's code took in the process's calls.
    """

    number: int
    pid: int
    comm: str
    over: bool
    kernels: list[KernelCount]
    lost: int
    hooks_ns: int


class ProcessLog(Record):
    """The new records of a process's operation log.

    records   new records, of `operation_log.DTYPE`
    lost      records dropped since the start
    virtual   times are on the embedded device's virtual clock; otherwise on CLOCK_MONOTONIC
    names     mangled kernel names by slot
    gpus      GPU ordinals by context
    stacks    host stacks by number, innermost frame first
    ranges    combinations of open ranges by number, the outermost range first
    over      no more records will follow
    final     the measurement is over: a name or GPU that is not known now will stay unknown
    process   number in the session; the pid is not unique, because it survives exec
    waves     lanes per wave on AMD GPUs: by mangled name of a kernel, and by ordinal of a GPU
    vendor    the vendor of its GPUs
    user      who answers for the process, see `scans.user_of`
    from_before   it may have used the GPU before the tool attached to it
    """

    pid: int
    comm: str
    records: np.ndarray[Any, Any] = field(repr=False)
    lost: int
    virtual: bool
    names: Mapping[int, str] = field(repr=False)
    gpus: Mapping[int, int]
    stacks: Mapping[int, tuple[HostFrame, ...]] = field(repr=False)
    over: bool
    process: int = 0
    waves: Mapping[str | int, int] = field(default_factory=dict, repr=False)
    vendor: Vendor = Vendor.NVIDIA
    final: bool = False
    user: int = -1
    from_before: bool = False
    ranges: Mapping[int, tuple[RangeName, ...]] = field(default_factory=dict, repr=False)


class RingRecords(Record):
    """New records of a ring buffer, with the map's `value_dtype`.

    process: number of the process, which is also in the upper bits of launch ids.
    """

    pid: int
    comm: str
    gpu: int
    context: int
    records: np.ndarray[Any, Any] = field(repr=False)
    names: Mapping[int, str] = field(repr=False)
    process: int = 0


class RingCounts(Record):
    """The counts of a ring buffer's shards in one context."""

    pid: int
    comm: str
    gpu: int
    shards: tuple[ShardCount, ...]


class SharedArray(Record):
    """The contents of a process's shared array: (entries,) with the map's `value_dtype`."""

    pid: int
    comm: str
    array: np.ndarray[Any, Any]
    process: int = 0  # its number in the session
    user: int = -1  # who answers for the process, see `scans.user_of`


class Reading(Record):
    """The maps of a context at one time.

    taken_ns    when copying began, on the host's clock
    idle        no kernel was running
    instances   by map name
    names       mangled kernel names by slot
    """

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
    """Merge instances of the same program, GPU, kernel and shape by adding their values, if these are numbers.

    Site arrays are not merged: only their tool knows whether their values are sums, maxima or bits.
    """
    by_place: dict[tuple[Any, ...], Instance] = {}
    rest = []
    for one in found:
        if one.definition.kind == "site_array":
            rest.append(one)
            continue
        place = (one.process, one.pid, one.gpu, one.mangled, one.grid, one.block_dim)
        other = by_place.get(place)
        if other is None:
            by_place[place] = one
        elif one.definition.kind in maps.SHAPED and (total := _added(other.array, one.array)) is not None:
            raw = total.tobytes() + bytes(one.definition.value_size)  # the last value, which is never read
            launches, idle = other.launches + one.launches, other.idle and one.idle
            by_place[place] = replace(other, raw=raw, launches=launches, idle=idle)
        else:
            rest.append(one)
    return [*by_place.values(), *rest]


def _added(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return the sum, field by field; None if a field is not a number."""
    names = a.dtype.names
    if names is None:
        return None if a.dtype.kind == "V" else a + b
    total = a.copy()
    for name in names:
        if (part := _added(a[name], b[name])) is None:
            return None
        total[name] = part
    return total
