"""What a measurement gives to tools: what maps hold, how often kernels were launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gpubpf import maps

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.maps import MapDefinition


@dataclass(frozen=True)
class Instance:
    """What one map holds for one kernel and launch shape (other maps than thread arrays: for a context, with `mangled` "").

    `grid` and `block_dim` are [x, y, z]; `raw` is the storage as `maps` describes it.
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

    @cached_property
    def array(self) -> np.ndarray[Any, Any]:
        """The values. Thread arrays: [entry, global thread]; see `maps.decode`."""
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


def merged(found: list[Instance]) -> list[Instance]:
    """Instances of the same place added up, where their values are numbers."""
    by_place: dict[tuple[Any, ...], Instance] = {}
    rest = []
    for one in found:
        place = (one.pid, one.gpu, one.mangled, one.grid, one.block_dim)
        other = by_place.get(place)
        if other is None:
            by_place[place] = one
        elif one.definition.kind == "thread_array" and (total := _added(other.array, one.array)) is not None:
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
