"""Everything that memtrace prints of generated traffic and coverage: text that fits a terminal, valid JSON and CSV."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpubpf.ebpf.bytecode import UNADDRESSED_SPACES
from gpubpf.inject.values import Site
from gpubpf.memory import traffic, traffic_report
from gpubpf.memory.access_log import Accesses, SiteLabels
from gpubpf.memory.access_text import AccessPrinter
from gpubpf.memory.allocations import ALLOCATING, Allocation
from gpubpf.memory.coverage import AllocationCoverage, CoverageReport, Footprint, Outside
from gpubpf.memory.memory_options import MemoryOptions
from gpubpf.memory.traffic import PART, KernelTraffic
from gpubpf.process.host_frames import HostFrame
from gpubpf.records.kernel_shapes import KernelShape
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf_properties import generated, number, rare
from gpubpf_text import COMMS, FILES, KERNELS, PIDS, check, opened

LOOKS = (
    *((), ("-v",), ("--json",), ("--csv",), ("-T",), ("--footprint",), ("--footprint", "--json")),
    *(("--footprint", "--granule", "32", "-v"), ("--no-allocations",), ("--granule", "4096")),
)
MOST = 2**34  # requests
IMAGES = ("tex.level.a2d.v4.f32.f32", "tld4.r.2d.v4.f32.f32", "sured.b.add.1d.u32.trap")
TENSORS = {
    "async": "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group",
    "load": "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16",
}
TENSOR_MEMORY = {  # kind → opcodes, each with its width
    "load": (("tcgen05.ld.sync.aligned.32x32b.x128.b32", 512), ("tcgen05.ld.sync.aligned.16x64b.x1.b32", 4)),
    "store": (("tcgen05.st.sync.aligned.16x256b.x2.b32", 32),),
    "async": (("tcgen05.mma.cta_group::1.kind::f16", 0), ("tcgen05.cp.cta_group::1.128x256b", 4096)),
}
SUMS = (
    "accesses",
    "least",
    "sectors",
    "bytes",
    "steps",
    "squares",
    "longest_max",
    "shortest_max",
    "gaps",
    "contention_max",
    "addresses",
    "uncounted_max",
)
ACCESS = np.dtype([("launch", "<u8"), ("site", "<u2"), ("how", "<u4"), ("address", "<u8"), ("thread", "<u4")])


def site_traffic(rng: random.Random, place: int) -> traffic.SiteTraffic:
    kind = rng.choice(("load", "store", "atomic", "async"))
    space = rng.choice(("global", "shared", "local", "const", "texture", "surface", "tensor", "tmem"))
    width = rng.choice((0, 1, 4, 16))
    if space == "tensor":
        kind = rng.choice(tuple(TENSORS))
        width = 18 if kind == "load" else 0
    opcode = (
        TENSORS[kind]
        if space == "tensor"
        else rng.choice(IMAGES)
        if space in UNADDRESSED_SPACES
        else "ld.global.f32"
    )
    if space == "tmem":
        kind = rng.choice(tuple(TENSOR_MEMORY))
        opcode, width = rng.choice(TENSOR_MEMORY[kind])
    source = rng.choice((None, *FILES))
    site = Site(place, "k", 40 + place, source, rng.choice((1, 99_999)), "access", opcode, kind, space, width)
    if space in UNADDRESSED_SPACES:
        requests = number(rng, MOST) + 1
        return traffic.site_traffic(
            site, space, {"requests": requests, "accesses": requests * rng.randint(1, 32)}
        )
    requests = [number(rng, MOST) if rare(rng) else 0 for _ in range(2 * PART)]
    requests[rng.randrange(PART, 2 * PART)] += 1
    if not width:  # a copy of as many bytes as a register says: never counted as a whole warp of one width
        requests[:PART] = [0] * PART
    cell = {name: number(rng, 32 * MOST) for name in (*SUMS, "phases", "ways", "ways_max")}
    cell |= {name: cell[name] % 33 for name in ("contention_max", "ways_max")}
    cell |= {"sectors": cell["least"] * rng.randint(1, 32), "ways": cell["phases"] * rng.randint(1, 32)}
    return traffic.site_traffic(site, space, {"requests": requests, **cell})


def kernel(rng: random.Random, pid: int, comm: str, gpu: int) -> KernelTraffic:
    sites = tuple(site_traffic(rng, place) for place in range(rng.choice((0, 1, 3, 40))))
    unknown = rng.choice((0, 7)) if sites else 7
    registers = rng.choice(((None, None), (10, 32)))
    name = rng.choice([name for name in KERNELS if name])
    return KernelTraffic(pid, comm, gpu, name, sites, registers, number(rng, 10**9), unknown)


def stack(rng: random.Random) -> tuple[HostFrame, ...]:
    frames = range(rng.choice((0, 1, 5)))
    return tuple(HostFrame(0x1000, 0, rng.choice(FILES), rng.choice(KERNELS)) for _ in frames)


def allocation(rng: random.Random, pid: int, comm: str, gpu: int) -> AllocationCoverage:
    size = max(number(rng, 2**40), 1)
    call = rng.choice([*ALLOCATING, "variable " + rng.choice(KERNELS)])
    kind = ALLOCATING.get(call, "variable")
    made = Allocation(pid, pid, comm, gpu, 4096, size, call, kind, stack(rng), 0, None, 0, None)
    if rare(rng):
        return AllocationCoverage(made, None, None, None)
    touched = rng.choice((0, size, rng.randint(0, size)))
    return AllocationCoverage(made, rng.randint(0, touched), rng.randint(0, touched), touched)


@generated(30)
def test_a_generated_report(rng: random.Random) -> None:
    pids = PIDS[: rng.choice((0, 1, 1, 2, 12))]
    owned = [(pid, rng.choice(COMMS), rng.choice((0, 0, 7))) for pid in pids]
    kernels = [kernel(rng, *owner) for owner in owned for _ in range(rng.choice((0, 1, 3)))]
    allocations = [allocation(rng, *owner) for owner in owned for _ in range(rng.choice((0, 1, 20)))]
    footprints = [
        Footprint(
            one.pid, one.comm, one.gpu, one.mangled, *rng.choice(((None, None), (0, 0), (number(rng), 9)))
        )
        for one in kernels
    ]
    outside = {}
    for pid, comm, _ in owned:
        if rare(rng):
            behind = allocations and rng.choice((0, number(rng)))
            nearest = rng.choice(allocations).allocation if behind else None
            outside[pid, comm] = Outside(
                number(rng) + behind if behind else number(rng), behind or 0, nearest
            )
    flags = [rare(rng) for _ in range(4)]
    found = CoverageReport(allocations, outside, footprints, *flags)
    session = SimpleNamespace(has_map=lambda name: False)
    asked = rare(rng)
    for look in LOOKS:
        _, args, page, results = opened("memtrace", *look)
        owners, options = OwnerColumns(asked), MemoryOptions.of(args)
        traffic_report.show(kernels, owners, options, results)
        if not args.csv:
            covered = SimpleNamespace(report=lambda _: found)
            traffic_report.show_coverage(covered, session, owners, options.coverage, results)
        lines = check(page, args, verbose=114)  # all columns, with impossible numbers
        if not args.json and not args.csv:
            assert sum(line.endswith(": memory traffic") for line in lines) >= min(len(kernels), 8)


@generated(30)
def test_generated_lines_of_accesses(rng: random.Random) -> None:
    for form in ("", "--json", "--csv"):
        _, args, page, results = opened("memtrace", "-e", *filter(None, [form]))
        owners = OwnerColumns(rare(rng))
        put = AccessPrinter(page, results.form, False, owners)
        for pid in (1, 4194304, 2)[: rng.randrange(1, 4)]:
            shape = rng.choice(
                (((1, 1, 1), (32, 1, 1)), ((99, 99, 9), (32, 8, 1)), ((2**30, 1, 1), (1024, 1, 1)))
            )
            place = KernelShape(pid, rng.choice(COMMS), rng.choice((0, 7)), rng.choice(KERNELS), *shape)
            made: Any = np.zeros(5, ACCESS)
            made["launch"] = [number(rng, 2**32) for _ in made]
            made["site"] = [rng.choice((0, 1, 9, 0xFFFF)) for _ in made]
            made["how"] = [rng.randrange(2**16) for _ in made]
            made["address"] = [number(rng, 2**48) for _ in made]
            made["thread"] = [number(rng, min(place.shape.threads, 2**32) - 1) for _ in made]
            sites = {n: Site(n, "k", 40, rng.choice((None, *FILES)), 17) for n in range(2)}
            put(Accesses.of(place, 1, made), SiteLabels.of(sites), None)
        assert len(check(page, args)) >= 5
