"""How kernels use memory: what device programs add up at each site (gpubpf_traffic.h) → requests, sectors, patterns, bank conflicts.

    traffic = Traffic()
    for kernel in traffic.read(session, anew=False):
        for site in kernel.sites:
            site.sectors, site.least, site.pattern

The maps are site arrays: `global_cells` (constants, too), `local_cells`, `shared_cells`. A cell has requests by pattern, first those
of all 32 lanes (and of one alone), from PART on the others; of the former what follows from the width is worked out here. The
definitions of all numbers are in docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf import names
from gpubpf.session import kernel_shapes

if TYPE_CHECKING:
    from gpubpf.ptx.values import Site
    from gpubpf.session.results import Instance
    from gpubpf.session.session import Session

    Cells = Mapping[str, np.ndarray[Any, Any]]
    Key = tuple[int, int, str]  # process, GPU, kernel

MAPS = {"global_cells": "global", "local_cells": "local", "shared_cells": "shared"}
UNIT, SHIFTED, BROADCAST, STRIDED, GATHER, SINGLE, PART = range(7)  # as enum gpu_pattern of gpubpf_traffic.h
LANES, SECTOR, BANKS = 32, 32, 128  # bytes of all banks
_WORD = 1 << 64


@dataclass(frozen=True)
class SiteTraffic:
    """What one place of a kernel did. `space`: as docs/memory.md has it, where a generic address led to; a place whose addresses led
    into several spaces has one of these for each.

    Of all requests together: lanes that took part (`accesses`), `bytes` asked for, 32-byte `sectors`, the `least` that there could be;
    in shared memory the ways of all phases (`ways`), how many `phases`, and the most ways of one. `patterns`: requests by pattern,
    `UNIT` … `SINGLE`. `stride`: of strided ones, None where they differ. `contention`: most lanes of a request on one address.
    """

    site: Site
    space: str
    requests: int
    accesses: int
    bytes: int
    sectors: int
    least: int
    patterns: tuple[int, ...]
    stride: int | None
    contention: int
    ways: int = 0
    phases: int = 0
    ways_max: int = 0

    @property
    def ratio(self) -> float:
        return self.sectors / self.least if self.least else 0.0

    @property
    def width(self) -> int:
        """Bytes of a lane; where that varies, their mean."""
        return _width(self.site, self.bytes, self.accesses)

    @property
    def pattern(self) -> str:
        """`broadcast`, `unit`, `stride N`, `gather` or `mixed`."""
        unit, shifted, broadcast, strided, gather, _ = self.patterns
        of = {"unit": unit + shifted, "broadcast": broadcast, "gather": gather}
        found = [name for name, requests in of.items() if requests]
        if strided:
            found.append("mixed" if self.stride is None else f"stride {self.stride}")
        if len(found) > 1:
            return "mixed"
        return found[0] if found else "broadcast"

    @property
    def requests_by_pattern(self) -> dict[str, int]:
        """`single`: of one lane, which has none."""
        unit, shifted, broadcast, strided, gather, single = self.patterns
        of = {
            "broadcast": broadcast,
            "unit": unit + shifted,
            "stride": strided,
            "gather": gather,
            "single": single,
        }
        return {name: requests for name, requests in of.items() if requests}

    @property
    def wasted(self) -> int:
        """Bytes that were moved beyond the least possible; in shared memory those that could have been while banks had conflicts."""
        if self.space == "shared":
            return max(0, self.ways - self.phases) * BANKS
        return max(0, self.sectors - self.least) * SECTOR

    @property
    def moved(self) -> int:
        """Bytes, as `wasted`."""
        return self.ways * BANKS if self.space == "shared" else self.sectors * SECTOR

    @property
    def where(self) -> str:
        """``scale.cu:17``, without -lineinfo ``PTX line 40``"""
        return kernel_shapes.site_name(self.site)

    def record(self, share: float) -> dict[str, Any]:
        """The fields of a JSON record."""
        banks = None
        if self.phases:
            banks = {"mean": round(self.ways / self.phases, 6), "max": self.ways_max}
        return {
            "site": self.site.number,
            "op": self.site.kind,
            "space": self.space,
            "width": self.width,
            "opcode": self.site.opcode,
            "source": self.where if self.site.source else None,
            "ptx_line": self.site.line,
            "requests": self.requests,
            "accesses": self.accesses,
            "bytes": self.bytes,
            "sectors": self.sectors,
            "sectors_least": self.least,
            "ratio": round(self.ratio, 6),
            "lanes_mean": round(self.accesses / self.requests, 6),
            "pattern": self.pattern,
            "patterns": self.requests_by_pattern,
            "bank_ways": banks,
            "contention_max": self.contention,
            "share": round(share, 6),
            "wasted_bytes": self.wasted,
        }


@dataclass(frozen=True)
class KernelTraffic:
    """The places of one kernel in one process that were executed, by number, in so many `launches`. `unknown`: requests at places
    that are not known."""

    pid: int
    comm: str
    gpu: int
    mangled: str
    sites: tuple[SiteTraffic, ...]
    registers: tuple[int | None, int | None]
    launches: int
    unknown: int = 0

    @cached_property
    def kernel(self) -> str:
        return names.demangle(self.mangled).short

    @cached_property
    def demangled(self) -> str:
        return names.demangle(self.mangled).full

    @cached_property
    def moved(self) -> Mapping[bool, int]:
        """Bytes of shared memory (True), and of all else."""
        return {it: sum(s.moved for s in self.sites if (s.space == "shared") is it) for it in (False, True)}

    @property
    def wasted(self) -> int:
        return sum(site.wasted for site in self.sites)

    def share(self, sites: Iterable[SiteTraffic]) -> float:
        """Of the kernel's traffic, or of that in shared memory: how much these are."""
        found = list(sites)
        whole = self.moved[found[0].space == "shared"]
        return sum(site.moved for site in found) / whole if whole else 0.0

    def place(self) -> dict[str, Any]:
        """The fields that every record of it has."""
        return {"pid": self.pid, "comm": self.comm, "gpu": self.gpu, "kernel": self.kernel}

    def record(self) -> dict[str, Any]:
        """The fields of the record of the whole kernel: sums of what goes to global, local and constant memory."""
        device = [site for site in self.sites if site.space != "shared"]
        sectors, least = sum(site.sectors for site in device), sum(site.least for site in device)
        before, after = self.registers
        return {
            "demangled": self.demangled,
            "mangled": self.mangled,
            "launches": self.launches,
            "sites": len(self.sites),
            "requests": sum(site.requests for site in device),
            "bytes": sum(site.bytes for site in device),
            "sectors": sectors,
            "sectors_least": least,
            "ratio": round(sectors / least, 6) if least else None,
            "shared_requests": sum(site.requests for site in self.sites if site.space == "shared"),
            "wasted_bytes": self.wasted,
            "registers": {"before": before, "after": after},
        }


class Traffic:
    """Reads the cells of a session, since the last time or in all. Maxima are always of all since the beginning."""

    def __init__(self) -> None:
        self._before: dict[tuple[Key, str], Cells] = {}

    def read(self, session: Session, anew: bool) -> list[KernelTraffic]:
        """What was counted, the kernel with the most waste first. `anew`: since the last call."""
        parts: dict[Key, dict[str, Cells]] = {}
        launches: dict[tuple[Key, str], int] = {}
        of: dict[Key, Instance] = {}
        for name in MAPS:
            for instance in session.instances(name):
                key = (instance.process, instance.gpu, instance.mangled)
                of.setdefault(key, instance)
                found = summed(instance.array)
                kept = parts.setdefault(key, {}).get(name)
                parts[key][name] = found if kept is None else together(kept, found)
                launches[key, name] = launches.get((key, name), 0) + instance.launches
        kernels = []
        for key, cells in parts.items():
            one = of[key]
            most = max(launches.get((key, name), 0) for name in cells)
            cells["launches"] = {"launches": np.array([min(most, _WORD - 1)], np.uint64)}
            if anew:
                cells = {name: self._since((key, name), values) for name, values in cells.items()}
            count = int(cells.pop("launches")["launches"][0])
            sites, unknown = rows(cells, session.sites(one.mangled, one.pid))
            if sites or unknown:
                used = one.registers_before, one.registers_after
                kernels.append(
                    KernelTraffic(one.pid, one.comm, one.gpu, one.mangled, sites, used, count, unknown)
                )
        return sorted(kernels, key=lambda kernel: (-kernel.wasted, -sum(kernel.moved.values())))

    def _since(self, key: tuple[Key, str], found: Cells) -> Cells:
        """What came to `found` since the last time; all of it where what there was before is not part of it."""
        before = self._before.get(key)
        self._before[key] = found
        if before is None or any(found[name].shape != before[name].shape for name in found):
            return found
        counts = "requests" if "requests" in found else "launches"
        if (found[counts] < before[counts]).any():
            return found
        return {name: values if is_maximum(name) else values - before[name] for name, values in found.items()}


# --- cells ---


def is_maximum(field: str) -> bool:
    return field.endswith("_max")


def summed(array: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """By field [site, …] what an array [shard, site] of cells comes to, u64; fields of a structure in it are fields, too."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name in array.dtype.names or ():
        values = array[name]
        if values.dtype.names:
            found |= summed(values)
        else:
            found[name] = values.max(axis=0) if is_maximum(name) else values.sum(axis=0, dtype=np.uint64)
    return found


def together(a: Cells, b: Cells) -> dict[str, np.ndarray[Any, Any]]:
    """Of two copies of one kernel. Where they are of different builds, what both have."""
    found = {}
    for name in a.keys() & b.keys():
        count = min(len(a[name]), len(b[name]))
        both = a[name][:count], b[name][:count]
        found[name] = np.maximum(*both) if is_maximum(name) else np.add(*both)
    return found


def rows(parts: Mapping[str, Cells], sites: Mapping[int, Site]) -> tuple[tuple[SiteTraffic, ...], int]:
    """Of one kernel, from its cells by map: the places with a request by number, and how many requests were at places that `sites`
    does not know."""
    found, unknown = [], 0
    for name, cells in parts.items():
        if not cells:
            continue
        requests = cells["requests"].sum(axis=1)
        for number in np.flatnonzero(requests).tolist():
            site = sites.get(number)
            if site is None:
                unknown += int(requests[number])
                continue
            space = MAPS[name]
            if space == "global" and site.space in ("global", "const"):
                space = site.space
            cell = {field: values[number].tolist() for field, values in cells.items()}
            found.append(site_traffic(site, space, cell))
    return tuple(sorted(found, key=lambda row: (row.site.number, row.space))), unknown


def site_traffic(site: Site, space: str, cell: Mapping[str, Any]) -> SiteTraffic:
    """From the cell of one site, whose values are integers or lists of them."""
    width = site.width
    whole, part = cell["requests"][:PART], cell["requests"][PART:]
    unit, shifted, broadcast, strided, gather, single = whole
    full = unit + shifted + broadcast + strided + gather  # of 32 lanes
    one = max(width // 4, 1) if space == "local" else 1  # sectors of a lane alone, or of all at one address
    same = max(width, 4) if space == "local" else 1
    accesses = LANES * full + single + cell["accesses"]
    requests = full + single + sum(part)
    bytes_ = accesses * width if width else cell["bytes"]
    patterns = tuple(a + b for a, b in zip(whole, part, strict=True))
    ways = phases = ways_max = 0
    if space == "shared":
        together = max(width, 4) // 4  # phases of 32 lanes
        phases = together * full + single + cell["phases"]
        ways = together * (unit + shifted + broadcast) + single + cell["ways"]
        ways_max = max(cell["ways_max"], 1)
    return SiteTraffic(
        site=site,
        space=space,
        requests=requests,
        accesses=accesses,
        bytes=bytes_,
        sectors=unit * width + shifted * (width + 1) + broadcast * same + single * one + cell["sectors"],
        least=full * width + single * -(-width // SECTOR) + cell["least"],
        patterns=patterns,
        stride=stride(patterns[STRIDED], cell["steps"], cell["squares"], _width(site, bytes_, accesses)),
        contention=LANES if broadcast else max(1, cell["contention_max"]),
        ways=ways,
        phases=phases,
        ways_max=ways_max,
    )


def stride(count: int, steps: int, squares: int, width: int) -> int | None:
    """The one stride of `count` requests, in elements of `width` bytes, from the sums of their steps and of the squares of these,
    modulo 2^64; None where they differ. They are equal just where the square of the sum is `count` times the sum of the squares."""
    total = steps - _WORD if steps >= _WORD // 2 else steps
    if not count or (steps * steps - count * squares) % _WORD or total % count:
        return None
    step, rest = divmod(total // count, max(width, 1))
    return None if rest else step


def _width(site: Site, bytes_: int, accesses: int) -> int:
    return site.width or round(bytes_ / max(accesses, 1))
