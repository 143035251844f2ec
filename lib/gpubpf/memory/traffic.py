"""Turn the cells that device programs fill (gpubpf_traffic.h) into requests, sectors, patterns and bank conflicts per site.

    traffic = Traffic()
    for kernel in traffic.read(session, since_last=False):
        for site in kernel.sites:
            site.sectors, site.least, site.pattern

The maps are site arrays: `global_cells` (also for constants), `local_cells`, `shared_cells`, `unaddressed_cells`. A cell counts
requests by pattern. Indices below PART count requests of all lanes of a warp, and of single lanes; their sectors and other numbers
follow from the width, and are derived here rather than on the device. Indices from PART on count all other requests. For textures,
surfaces, tensors and tensor memory (`unaddressed_cells`), only the numbers of requests and lanes are known. docs/memory.md defines
all numbers.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf import names
from gpubpf.ebpf.bytecode import KINDS, UNADDRESSED_SPACES
from gpubpf.ebpf.maps import SAMPLED
from gpubpf.inject.values import LINE, Site
from gpubpf.lower.patch_function import INSTRUCTION_SIZE
from gpubpf.memory.sampled_part import SUMS, SampledPart
from gpubpf.memory.updates import Updates, read_updates
from gpubpf.record import Record, replace
from gpubpf.records import kernel_shapes
from gpubpf.records.builds import joined
from gpubpf.records.fields import registers
from gpubpf.records.launch_shape import NVIDIA, Warp
from gpubpf.session.sampled import Sample

if TYPE_CHECKING:
    from gpubpf.ebpf.sampling import Sampling
    from gpubpf.records.results import Instance
    from gpubpf.session.session import Session

    Cells = Mapping[str, np.ndarray[Any, Any]]
    KernelKey = tuple[int, int, str]  # process, GPU, kernel

UNADDRESSED = "unaddressed_cells"
# Map → the spaces whose accesses it counts. The first space also stands for accesses whose space is known only at run time.
MAPS = {
    "global_cells": ("global", "const"),
    "local_cells": ("local",),
    "shared_cells": ("shared",),
    UNADDRESSED: UNADDRESSED_SPACES,
}
SEEN = "seen"  # the map of what accesses of machine code do: width_max, kind_max
UPDATED = "global_cells"  # the map of sites whose updates gpubpf_updates.h counts by address
UNIT, SHIFTED, BROADCAST, STRIDED, GATHER, SINGLE, PART = range(7)  # enum gpu_pattern of gpubpf_traffic.h
MOST_GROUPS = 32  # maximum groups of sampled blocks or warps: more would hardly improve the standard errors
SMALL_COPY = 16  # bytes of a bulk copy that each lane of a warp makes: the device counts larger ones, and PTX wants a multiple of 16
MOST_WIDTH = 64  # bytes that a lane accesses in one instruction
BANKS = 128  # bytes that all banks of shared memory deliver in one turn
_MODULUS = 1 << 64
# The JSON fields of a site that follow from addresses.
_BY_WIDTH = ("width", "bytes")
_BY_ADDRESS = tuple(
    "sectors sectors_least ratio pattern patterns strides gaps bank_ways contention_max share wasted_bytes".split()
)


class SiteTraffic(Record):
    """The accesses of one site in one memory space. A site whose generic addresses point to several spaces has one for each.

    Sums over all requests, as docs/memory.md defines them. Fields that follow from addresses are 0 if `has_addresses` is false.

    accesses    active lanes
    bytes       bytes that the lanes asked for; 0 where `has_bytes` is false
    sectors     sectors that the requests touched
    least       the fewest sectors that could hold these bytes
    patterns    requests by pattern, indexed by UNIT … SINGLE
    stride      elements from lane to lane in strided requests; None if they differ
    steps       the shortest and longest distance from lane to lane in strided requests, in bytes
    gaps        requests with idle lanes between those that take part
    contention  the most lanes of one request that accessed one address
    distinct    distinct addresses of each request; None if not counted (only atomics outside local memory are)
    updates     how often each address was updated; None if not counted
    ways        bank ways of all phases, in shared memory
    phases      number of phases, in shared memory
    ways_max    the most bank ways of one phase
    part        with sampling: the sums above cover only the sampled blocks or warps; `estimated` scales them
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
    steps: tuple[int, int] | None = None
    gaps: int = 0
    distinct: int | None = None
    updates: Updates | None = None
    warp: Warp = NVIDIA
    part: SampledPart | None = None

    @property
    def has_addresses(self) -> bool:
        """Whether the addresses are known, and with them pattern, sectors and waste. False for UNADDRESSED_SPACES."""
        return self.space not in UNADDRESSED_SPACES

    @property
    def has_bytes(self) -> bool:
        """Whether the bytes are known. False for bulk tensor copies and tcgen05.mma."""
        return not _is_tensor_copy(self.site) and not _is_multiplication(self.site)

    @property
    def in_device_memory(self) -> bool:
        """Whether the accesses move sectors: those to global, local and constant memory."""
        return self.has_addresses and self.space != "shared"

    @property
    def ratio(self) -> float:
        """See `ratio_of`."""
        return ratio_of((self,))

    @property
    def width(self) -> int:
        """Bytes of one lane's access; the mean if widths vary."""
        return _width(self.site, self.bytes, self.accesses)

    @property
    def pattern(self) -> str:
        """The pattern of all requests: `broadcast`, `unit`, `stride N`, `gather` or `mixed`; `-` if it is unknown."""
        if not self.has_addresses:
            return "-"
        unit, shifted, broadcast, strided, gather, _ = self.patterns
        by_name = {"unit": unit + shifted, "broadcast": broadcast, "gather": gather}
        found = [name for name, requests in by_name.items() if requests]
        if strided:
            found.append("mixed" if self.stride is None else f"stride {self.stride}")
        if len(found) > 1:
            return "mixed"
        return found[0] if found else "unit" if self.space == "local" else "broadcast"

    @property
    def mostly_strided(self) -> bool:
        """Whether most requests of several lanes have a stride."""
        return 4 * self.patterns[STRIDED] > 3 * (self.requests - self.patterns[SINGLE])

    @property
    def of_one_lane(self) -> bool:
        """Whether only one lane took part in each request. Then `pattern` has no meaning."""
        return self.accesses == self.requests

    @property
    def requests_by_pattern(self) -> dict[str, int]:
        """Requests by the name of their pattern. `single`: requests of one lane, which have no pattern."""
        unit, shifted, broadcast, strided, gather, single = self.patterns
        by_name = {
            "broadcast": broadcast,
            "unit": unit + shifted,
            "stride": strided,
            "gather": gather,
            "single": single,
        }
        return {name: requests for name, requests in by_name.items() if requests}

    @property
    def wasted(self) -> int:
        """Bytes moved beyond the fewest possible. Shared memory moves none: see `conflicts`."""
        return 0 if self.space == "shared" else max(0, self.sectors - self.least) * self.warp.sector

    @property
    def conflicts(self) -> int:
        """Turns that the banks of shared memory took beyond one per phase."""
        return max(0, self.ways - self.phases)

    @property
    def cost(self) -> int:
        """The key by which sites are sorted, worst first: wasted bytes.

        A turn of the banks counts as the bytes that it could move. An update that waits for another update of the same request counts
        as a sector."""
        waits = 0 if self.distinct is None else max(0, self.accesses - self.distinct)
        return self.wasted + BANKS * self.conflicts + self.warp.sector * waits

    @property
    def moved(self) -> int:
        """Bytes moved; in shared memory, the bytes that could have moved in the turns that the banks took."""
        return self.ways * BANKS if self.space == "shared" else self.sectors * self.warp.sector

    def estimated(self, value: int) -> int:
        """Return one of this site's sums scaled to all blocks; with sampling, this is an estimate."""
        return value if self.part is None else self.part.sample.scaled(value)

    @property
    def where(self) -> str:
        """The source line (``scale.cu:17``), or ``PTX line 40`` without -lineinfo."""
        return kernel_shapes.site_name(self.site)

    def record(self, share: float) -> dict[str, Any]:
        """Return the fields of a JSON record. `share`: the site's share of the kernel's traffic."""
        banks = None
        if self.phases:
            banks = {"mean": round(self.ways / self.phases, 6), "max": self.ways_max}
        patterns = {name: self.estimated(count) for name, count in self.requests_by_pattern.items()}
        errors = {} if self.part is None else self.part.errors()
        unknown = () if self.has_addresses else _BY_ADDRESS if self.has_bytes else (*_BY_ADDRESS, *_BY_WIDTH)
        record = {
            "site": self.site.number,
            "op": self.site.kind,
            "space": self.space,
            "width": self.width,
            "opcode": self.site.opcode,
            "source": self.where if self.site.source else None,
            "ptx_line": self.site.line or None,
            "offset": self.site.offset,
            **{field: self.estimated(getattr(self, name)) for name, field in SUMS.items()},
            "ratio": round(self.ratio, 6),
            "lanes_mean": round(self.accesses / self.requests, 6),
            "pattern": self.pattern,
            "patterns": patterns,
            "strides": None if self.steps is None else [step / max(self.width, 1) for step in self.steps],
            "gaps": self.estimated(self.gaps),
            "bank_ways": banks,
            "contention_max": self.contention,
            "addresses_mean": None if self.distinct is None else round(self.distinct / self.requests, 6),
            "addresses": self.updates.addresses if self.updates else None,
            "hot": self.updates.hottest if self.updates else None,
            "share": round(share, 6),
            "wasted_bytes": None if self.space == "shared" else self.estimated(self.wasted),
            **dict.fromkeys(unknown),
        }
        return record | (
            {"standard_error": errors | {name: None for name in errors if name in unknown}} if errors else {}
        )


class KernelTraffic(Record):
    """The traffic of one kernel in one process, on one GPU.

    sites      the executed sites, by number
    registers  registers per thread, before and after instrumentation; None if unknown
    unknown    requests at sites that the session does not know
    spilled    bytes of local memory per thread that the copy needs in addition, because registers are spilled
    wave       the lanes of a wave, if it ran on an AMD GPU
    sample     with sampling: the part of the kernel that the sums of the sites cover
    """

    pid: int
    comm: str
    gpu: int
    mangled: str
    sites: tuple[SiteTraffic, ...]
    registers: tuple[int | None, int | None]
    launches: int
    unknown: int = 0
    spilled: int = 0
    wave: int | None = None
    sample: Sample | None = None

    @cached_property
    def warp(self) -> Warp:
        return Warp.of(self.wave)

    @cached_property
    def kernel(self) -> str:
        return names.demangle(self.mangled).short

    @cached_property
    def demangled(self) -> str:
        return names.demangle(self.mangled).full

    @cached_property
    def moved(self) -> Mapping[bool, int]:
        """Bytes moved in shared memory (True), and in all other spaces (False)."""
        return {it: sum(s.moved for s in self.sites if (s.space == "shared") is it) for it in (False, True)}

    @property
    def wasted(self) -> int:
        return sum(site.wasted for site in self.sites)

    @property
    def cost(self) -> int:
        return sum(site.cost for site in self.sites)

    def share(self, sites: Iterable[SiteTraffic]) -> float:
        """Return the share of these sites in the kernel's traffic, from 0 to 1.

        All or none of the sites must be in shared memory, which counts separately.
        """
        found = list(sites)
        whole = self.moved[found[0].space == "shared"]
        return sum(site.moved for site in found) / whole if whole else 0.0

    def estimated(self, value: int) -> int:
        """Return a sum over sites scaled to all blocks; with sampling, this is an estimate."""
        return value if self.sample is None else self.sample.scaled(value)

    def record(self) -> dict[str, Any]:
        """Return the fields of the kernel's JSON record: sums over global, local and constant memory."""
        device = [site for site in self.sites if site.in_device_memory]
        sectors, least = sum(site.sectors for site in device), sum(site.least for site in device)
        sums = {
            "requests": self.estimated(sum(site.requests for site in device)),
            "bytes": self.estimated(sum(site.bytes for site in device)),
            "sectors": self.estimated(sectors),
            "sectors_least": self.estimated(least),
            "ratio": round(ratio_of(device), 6) if least else None,
        }
        sampled: dict[str, Any] = {}
        if self.sample is not None:
            part = SampledPart.of([site.part for site in device])
            errors = {name: error for name, error in part.errors().items() if name in sums} if part else None
            sampled = {"sampled": self.sample.record(), "standard_error": errors}
        return {
            "demangled": self.demangled,
            "mangled": self.mangled,
            "launches": self.launches,
            "sites": len(self.sites),
            **sums,
            **{
                f"{space}_requests": self.estimated(sum(s.requests for s in self.sites if s.space == space))
                for space in ("shared", *UNADDRESSED_SPACES)
            },
            "wasted_bytes": self.estimated(self.wasted),
            **sampled,
            "registers": registers(*self.registers, self.spilled),
        }


def ratio_of(sites: Iterable[SiteTraffic]) -> float:
    """Return the sectors that sites moved, divided by the fewest sectors that could hold the bytes; 0 if they moved no sectors.

    All tables and records have this ratio.
    """
    found = list(sites)
    least = sum(site.least for site in found)
    return sum(site.sectors for site in found) / least if least else 0.0


class Traffic:
    """Reads the cells of a session: totals, or increases since the last call. Maxima are always since the beginning."""

    def __init__(self, sampling: Sampling | None = None) -> None:
        self._sampling = sampling
        self._before: dict[tuple[KernelKey, str], Cells] = {}
        self._builds: dict[
            KernelKey, list[int]
        ] = {}  # the builds of each kernel in the order of their numbers
        self._sampled_before: dict[KernelKey, Sample] = {}

    def read(self, session: Session, since_last: bool) -> list[KernelTraffic]:
        """Return the traffic of each kernel, the worst first. `since_last`: only since the last call.

        Reads those of MAPS that the session's programs use."""
        arrays: dict[KernelKey, dict[str, dict[int, list[np.ndarray[Any, Any]]]]] = {}
        launches: dict[tuple[KernelKey, str], int] = {}
        instances: dict[KernelKey, Instance] = {}
        for name in filter(session.has_map, MAPS):
            for instance in session.instances(name):
                key = _key(instance)
                instances.setdefault(key, instance)
                arrays.setdefault(key, {}).setdefault(name, {}).setdefault(instance.build, []).append(
                    instance.array
                )
                launches[key, name] = launches.get((key, name), 0) + instance.launches
        # Updates per address cannot be estimated from a sample.
        updates = {} if self._sampling else read_updates(session)
        samples = self._samples(session, since_last)
        seen = _sites_seen(session)
        kernels = []
        for key, by_map in arrays.items():
            instance = instances[key]
            most = max(launches.get((key, name), 0) for name in by_map)
            count = self._launches(key, min(most, _MODULUS - 1), since_last)
            builds = {n for builds in by_map.values() for n in builds}
            known, numbers = self._sites(session, instance, builds, seen)
            cells = self._cells(key, by_map, numbers, since_last)
            whole = {name: functools.reduce(add_cells, groups) for name, groups in cells.items()}
            warp, counted = Warp.of(instance.wave), _renumber_updates(updates.get(key, {}), numbers.values())
            sites, unknown = decode_cells(whole, known, counted, warp)
            if key in samples:
                sites = _with_parts(sites, cells, known, warp, samples[key])
            if sites or unknown:
                used = instance.registers_before, instance.registers_after
                kernels.append(
                    KernelTraffic(
                        instance.pid,
                        instance.comm,
                        instance.gpu,
                        instance.mangled,
                        sites,
                        used,
                        count,
                        unknown,
                        instance.spilled,
                        instance.wave,
                        samples.get(key),
                    )
                )
        return sorted(kernels, key=lambda kernel: (-kernel.cost, -sum(kernel.moved.values())))

    def _sites(
        self,
        session: Session,
        instance: Instance,
        builds: Collection[int],
        seen: Mapping[tuple[KernelKey, int], Mapping[int, Site]],
    ) -> tuple[dict[int, Site], dict[int, dict[int, int]]]:
        """Return the sites of a kernel's builds, and the numbers that each build's sites have there; see `builds.joined`.

        seen: see `_sites_seen`."""
        order = self._builds.setdefault(_key(instance), [])
        order += sorted(set(builds) - set(order))
        tables = [
            _with_lines(
                session.sites(instance.mangled, instance.pid, build), seen.get((_key(instance), build), {})
            )
            for build in order
        ]
        known, numbers = joined([tuple(table.values()) for table in tables])
        return known, dict(zip(order, numbers, strict=True))

    def _launches(self, key: KernelKey, launches: int, since_last: bool) -> int:
        """Return the number of a kernel's launches, in total or since the last call."""
        cells: Cells = {"launches": np.array([launches], np.uint64)}
        return int((self._growth((key, "launches"), cells) if since_last else cells)["launches"][0])

    def _cells(
        self,
        key: KernelKey,
        by_map: Mapping[str, Mapping[int, Sequence[np.ndarray[Any, Any]]]],
        numbers: Mapping[int, Mapping[int, int]],
        since_last: bool,
    ) -> dict[str, list[Cells]]:
        """Return a kernel's cells by map and by group of shards. Without sampling, there is one group.

        by_map: arrays by map and build.
        numbers: for each build, the numbers of its sites in the result."""
        unknown = 1 + max((n for own in numbers.values() for n in own.values()), default=-1)
        shards = min(
            len(array) for builds in by_map.values() for arrays in builds.values() for array in arrays
        )
        groups = min(shards, MOST_GROUPS) if self._sampling else 1

        def of_build(name: str, build: int, group: int) -> Cells:
            arrays = by_map[name][build]
            cells: Cells = functools.reduce(add_cells, [sum_shards(array[group::groups]) for array in arrays])
            if since_last:
                cells = self._growth((key, f"{name} {build} {group}"), cells)
            return cells if len(numbers) == 1 else _renumber_cells(cells, numbers[build], unknown)

        return {
            name: [
                functools.reduce(add_cells, [of_build(name, build, group) for build in builds])
                for group in range(groups)
            ]
            for name, builds in by_map.items()
        }

    def _samples(self, session: Session, since_last: bool) -> dict[KernelKey, Sample]:
        """Return the sample of each kernel; {} without sampling. `since_last`: only since the last call."""
        if self._sampling is None:
            return {}
        by_kernel: dict[KernelKey, list[Instance]] = {}
        for instance in session.instances(SAMPLED):
            by_kernel.setdefault(_key(instance), []).append(instance)
        found = {key: Sample.of(self._sampling, instances) for key, instances in by_kernel.items()}
        if not since_last:
            return found
        before, self._sampled_before = self._sampled_before, found
        return {key: sample.since(before.get(key)) for key, sample in found.items()}

    def _growth(self, key: tuple[KernelKey, str], found: Cells) -> Cells:
        """Return what was added to `found` since the last call; all of `found` if it does not continue the last values."""
        before = self._before.get(key)
        self._before[key] = found
        if before is None or any(found[name].shape != before[name].shape for name in found):
            return found
        counts = "requests" if "requests" in found else "launches"
        if (found[counts] < before[counts]).any():
            return found
        return {
            name: values if is_maximum_field(name) else values - before[name]
            for name, values in found.items()
        }


def _key(instance: Instance) -> KernelKey:
    return instance.process, instance.gpu, instance.mangled


def _sites_seen(session: Session) -> dict[tuple[KernelKey, int], dict[int, Site]]:
    """Return the sites of kernels without PTX that were executed, by kernel and build. Their number counts instructions."""
    found: dict[tuple[KernelKey, int], dict[int, Site]] = {}
    for instance in session.instances(SEEN) if session.has_map(SEEN) else ():
        cells = sum_shards(instance.array)
        widths, kinds = cells["width_max"], cells["kind_max"]
        sites = found.setdefault((_key(instance), instance.build), {})
        for number in np.flatnonzero((kinds > 0) & (kinds <= len(KINDS))).tolist():
            kind, width = KINDS[int(kinds[number]) - 1], int(widths[number])
            if width > MOST_WIDTH and kind != "async":
                continue
            sites[number] = Site(
                number,
                instance.mangled,
                0,
                point="access",
                kind=kind,
                space="generic" if width else "tensor",
                width=width if width <= SMALL_COPY or kind != "async" else 0,  # sizes of bulk copies may vary
                offset=number * INSTRUCTION_SIZE,
            )
    return found


def _with_lines(known: dict[int, Site], seen: Mapping[int, Site]) -> dict[int, Site]:
    """Return the sites of a build: those known before it ran, or of a kernel without PTX those `seen`, with known source lines."""
    if any(site.point != LINE for site in known.values()):
        return known
    begins = sorted(known)
    found = {}
    for number, site in seen.items():
        line = known[begins[at - 1]] if (at := bisect.bisect_right(begins, number)) else None
        found[number] = (
            site if line is None else replace(site, source=line.source, source_line=line.source_line)
        )
    return found


def _with_parts(
    sites: Iterable[SiteTraffic],
    cells: Mapping[str, Sequence[Cells]],
    known: Mapping[int, Site],
    warp: Warp,
    sample: Sample,
) -> tuple[SiteTraffic, ...]:
    """Return the sites, each with its sums by group of the sample (`SampledPart`)."""
    groups = len(next(iter(cells.values())))
    sums: dict[tuple[int, str], dict[str, np.ndarray[Any, Any]]] = {}
    for group in range(groups):
        some, _ = decode_cells({name: found[group] for name, found in cells.items()}, known, None, warp)
        for site in some:
            of_site = sums.setdefault(
                (site.site.number, site.space), {name: np.zeros(groups) for name in SUMS}
            )
            for name, values in of_site.items():
                values[group] = getattr(site, name)
    return tuple(
        replace(site, part=SampledPart(sample, sums[site.site.number, site.space])) for site in sites
    )


# --- cells ---


def is_maximum_field(field: str) -> bool:
    """Return whether a field of a cell is a maximum, not a sum."""
    return field.endswith("_max")


def sum_shards(array: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the totals over all shards of an array [shard, site] of cells: u64 arrays [site, …] by field.

    Fields of nested structures become fields of the result.
    """
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name in array.dtype.names or ():
        values = array[name]
        if values.dtype.names:
            found |= sum_shards(values)
        else:
            found[name] = (
                values.max(axis=0) if is_maximum_field(name) else values.sum(axis=0, dtype=np.uint64)
            )
    return found


def add_cells(a: Cells, b: Cells) -> dict[str, np.ndarray[Any, Any]]:
    """Return the totals of two builds of one kernel, which may differ in their sites: a missing site has no requests."""
    found = {}
    for name in a.keys() & b.keys():
        count = max(len(a[name]), len(b[name]))
        both = [
            np.concatenate([one, np.zeros((count - len(one), *one.shape[1:]), one.dtype)])
            for one in (a[name], b[name])
        ]
        found[name] = np.maximum(*both) if is_maximum_field(name) else np.add(*both)
    return found


def _renumber_cells(
    cells: Cells, numbers: Mapping[int, int], unknown: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Return cells with new site numbers. Cells of sites without a new number are added up at `unknown`, behind all others."""
    count = len(next(iter(cells.values())))
    to = np.array([numbers.get(number, unknown) for number in range(count)], np.intp)
    found = {}
    for name, values in cells.items():
        found[name] = np.zeros((unknown + 1, *values.shape[1:]), values.dtype)
        (np.maximum if is_maximum_field(name) else np.add).at(found[name], to, values)
    return found


def _renumber_updates(
    updates: Mapping[int, Updates], numbers: Collection[Mapping[int, int]]
) -> dict[int, Updates]:
    """Return the updates by site number in the table of all builds.

    The device adds up the updates of builds that use the same site number. If the number means different sites, the updates are left
    out."""
    found = {}
    for number, one in updates.items():
        sites = {own[number] for own in numbers if number in own}
        if len(sites) == 1:
            found[sites.pop()] = one
    return found


def decode_cells(
    parts: Mapping[str, Cells],
    sites: Mapping[int, Site],
    updates: Mapping[int, Updates] | None = None,
    warp: Warp = NVIDIA,
) -> tuple[tuple[SiteTraffic, ...], int]:
    """Return the executed sites of one kernel, by number, and the number of requests at sites missing from `sites`.

    A site that is `like` another one has the same traffic, and no probe of its own.

    parts    cells by map name
    updates  updates of addresses in global memory, by site number
    """
    found, unknown = [], 0
    followers: dict[int | None, list[Site]] = {}
    for follower in sites.values():
        followers.setdefault(follower.like, []).append(follower)
    for name, cells in parts.items():
        if not cells:
            continue
        counts = cells["requests"]
        requests = counts.sum(axis=tuple(range(1, counts.ndim)))
        for number in np.flatnonzero(requests).tolist():
            site = sites.get(number)
            if site is None:
                unknown += int(requests[number])
                continue
            space = site.space if site.space in MAPS[name] else MAPS[name][0]
            if site.kind == "async" and site.space == "generic" and space == "global":
                site = replace(site, width=0)  # a copy may read less than it writes
            cell = {field: values[number].tolist() for field, values in cells.items()}
            counted = (
                updates.get(number) if updates and name == UPDATED and not cell["uncounted_max"] else None
            )
            row = site_traffic(site, space, cell, counted, warp)
            found += [row, *(replace(row, site=other) for other in followers.get(number, ()))]
    return tuple(sorted(found, key=lambda row: (row.site.number, row.space))), unknown


def site_traffic(
    site: Site,
    space: str,
    cell: Mapping[str, Any],
    updates: Updates | None = None,
    warp: Warp = NVIDIA,
) -> SiteTraffic:
    """Return the traffic of one site. The values in `cell` are integers, or lists of integers."""
    width, lanes = site.width, warp.lanes
    if space in UNADDRESSED_SPACES:
        requests, accesses = cell["requests"], cell["accesses"]
        return SiteTraffic(
            site, space, requests, accesses, accesses * width, 0, 0, (0,) * PART, None, 0, warp=warp
        )
    whole, part = cell["requests"][:PART], cell["requests"][PART:]
    unit, shifted, broadcast, strided, gather, single = whole
    full = unit + shifted + broadcast + strided + gather  # number of requests in which all lanes take part
    single_sectors = max(width // 4, 1) if space == "local" else 1  # sectors of a single lane
    broadcast_sectors = warp.sectors(max(width, 4)) if space == "local" else 1  # sectors of a broadcast
    accesses = lanes * full + single + cell["accesses"]
    requests = full + single + sum(part)
    bytes_ = accesses * width if width else cell["bytes"]
    if not width:  # bulk copies of the usual size by all lanes of a warp
        width = SMALL_COPY
        bytes_ += lanes * full * width
    patterns = tuple(a + b for a, b in zip(whole, part, strict=True))
    contention = lanes if broadcast else max(1, cell["contention_max"])
    if space == "local":  # Each thread has its own local memory: lanes at the same offset are adjacent.
        patterns = (
            patterns[BROADCAST],
            0,
            0,
            0,
            sum(patterns) - patterns[BROADCAST] - patterns[SINGLE],
            patterns[SINGLE],
        )
        contention = 1
    steps = _MODULUS - 1 - cell["shortest_max"], cell["longest_max"]
    ways = phases = ways_max = 0
    if space == "shared":
        word = 16 if 8 < width < 16 else max(width, 4)
        full_phases = lanes * word // BANKS  # phases of a request of all lanes
        phases = full_phases * full + single + cell["phases"]
        ways = full_phases * (unit + shifted + broadcast) + single + cell["ways"]
        ways_max = max(cell["ways_max"], 1)
    return SiteTraffic(
        site=site,
        space=space,
        requests=requests,
        accesses=accesses,
        bytes=bytes_,
        sectors=unit * warp.sectors(width)
        + shifted * (warp.sectors(width) + 1)
        + broadcast * broadcast_sectors
        + single * single_sectors
        + cell["sectors"],
        least=full * warp.sectors(width) + single * -(-width // warp.sector) + cell["least"],
        patterns=patterns,
        stride=common_stride(
            patterns[STRIDED], cell["steps"], cell["squares"], _width(site, bytes_, accesses), steps
        ),
        contention=contention,
        ways=ways,
        phases=phases,
        ways_max=ways_max,
        steps=steps if patterns[STRIDED] and steps[0] <= steps[1] else None,
        gaps=cell["gaps"],
        distinct=lanes * (unit + shifted) + broadcast + single + cell["addresses"]
        if site.kind == "atomic" and space != "local"
        else None,
        updates=updates,
        warp=warp,
    )


def common_stride(
    count: int, steps: int, squares: int, width: int, lengths: tuple[int, int] = (0, 0)
) -> int | None:
    """Return the stride that all `count` requests have, in elements of `width` bytes; None if their strides differ.

    If all steps are equal, the square of `steps` is `count` times `squares`. Because of the modulus, this can also be true of large
    steps that differ. So for large steps, the two `lengths` must be equal.

    steps: sum of the steps in bytes, modulo 2^64.
    squares: sum of the squares of the steps, modulo 2^64.
    lengths: lengths of the shortest and the longest step since the start.
    """
    total = steps - _MODULUS if steps >= _MODULUS // 2 else steps
    if not count or (steps * steps - count * squares) % _MODULUS or total % count:
        return None
    mean, (shortest, longest) = total // count, lengths
    if count * longest >= 1 << 32 and not shortest == longest == abs(mean):
        return None
    step, rest = divmod(mean, max(width, 1))
    return None if rest else step


def _is_tensor_copy(site: Site) -> bool:
    return site.space == "tensor" and site.kind == "async"


def _is_multiplication(site: Site) -> bool:
    """Return whether a site is a tcgen05.mma: only a register says which matrices it reads and writes."""
    return site.space == "tmem" and not site.width


def may_hide_bytes(site: Site) -> bool:
    """Return whether a site whose addresses are unknown may touch allocations. wgmma and tcgen05 access none."""
    return site.space in ("texture", "surface") or _is_tensor_copy(site)


def _width(site: Site, bytes_: int, accesses: int) -> int:
    return site.width or round(bytes_ / max(accesses, 1))
