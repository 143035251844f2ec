"""memtrace's JSON records and CSV rows about the traffic of kernels: of each instruction, and of the kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpubpf.ebpf.bytecode import UNADDRESSED_SPACES
from gpubpf.memory import access_text, coverage_text, traffic_text
from gpubpf.memory.sampled_part import SUMS
from gpubpf.records.fields import (
    DEMANGLED,
    KERNEL,
    MANGLED,
    OWNER,
    REGISTERS,
    SAMPLED,
    STAMP,
)
from gpubpf.session.records import BUDGET, LOG_LOST, NOT_PROBED, RINGS, of_every_tool
from gpubpf.show.fields import (
    BYTES,
    INTEGER,
    MEAN_AND_MAX,
    NUMBER,
    TEXT,
    Field,
    Fields,
    by_name,
    having,
    many,
    maybe,
    one_of,
    values_of,
)

if TYPE_CHECKING:
    from gpubpf.memory.traffic import KernelTraffic
    from gpubpf.show.result_writer import ResultWriter

_OF_KERNEL = (*OWNER, KERNEL)
_ERRORS = having(
    *(Field(name, maybe(NUMBER), when="if there is such a sum") for name in (*SUMS.values(), "ratio"))
)
_NO_ADDRESS = "null if the addresses are not known"
_SECTORS = (
    Field(
        "sectors",
        maybe(INTEGER),
        f"distinct sectors of each request, of 32 bytes, on AMD GPUs 64; {_NO_ADDRESS}",
    ),
    Field("sectors_least", maybe(INTEGER), "the fewest sectors that hold so many bytes"),
    Field("ratio", maybe(NUMBER), "of these two"),
)
SITE = Fields(
    "site",
    "One for each instruction of each kernel that accesses memory, and each kind of memory that its address led to.",
    (
        *_OF_KERNEL,
        Field("site", INTEGER, "the number of the instruction"),
        Field("op", one_of("load", "store", "atomic", "async")),
        Field(
            "space",
            one_of("global", "shared", "local", "const", *UNADDRESSED_SPACES),
            "in the last three, all that depends on addresses is null",
        ),
        Field(
            "width",
            maybe(INTEGER),
            "bytes per lane of the whole, possibly vector, access; for copies whose size is only known at run time, the rounded "
            "mean; null for bulk tensor copies, as bytes",
        ),
        Field("opcode", TEXT, "empty in kernels without PTX"),
        Field("source", maybe(TEXT), "file.cu:12, or null"),
        Field("ptx_line", maybe(INTEGER)),
        Field(
            "offset",
            maybe(INTEGER),
            "of the instruction in its function, on an AMD GPU and in kernels without PTX",
        ),
        Field("requests", INTEGER, "executions by a warp"),
        Field("accesses", INTEGER, "lanes of all requests"),
        Field("bytes", maybe(BYTES), "that the lanes asked for"),
        *_SECTORS,
        Field("lanes_mean", NUMBER, "lanes that take part"),
        Field("pattern", maybe(TEXT), "of the lanes that take part, as PATTERN"),
        Field("patterns", maybe(by_name(INTEGER)), "requests by pattern"),
        Field("strides", maybe(many(NUMBER)), "the shortest and longest stride of strided requests, or null"),
        Field("gaps", maybe(INTEGER), "requests with idle lanes between those that take part"),
        Field(
            "bank_ways",
            maybe(having(*MEAN_AND_MAX)),
            "over phases; a phase is the lanes that take 128 bytes together; null except for shared memory",
        ),
        Field("contention_max", maybe(INTEGER), "the most lanes of one request on one address"),
        Field("addresses_mean", maybe(NUMBER), "for atomics, distinct addresses of a request"),
        Field(
            "addresses",
            maybe(INTEGER),
            "for atomics in global memory, distinct addresses since the beginning; null if they were too many to count",
        ),
        Field("hot", maybe(INTEGER), "updates of the address that had the most; null as addresses"),
        Field("share", maybe(NUMBER), "of the kernel's traffic in shared memory, or outside of it, 0 to 1"),
        Field("wasted_bytes", maybe(BYTES), "moved and not needed; null in shared memory"),
        Field("standard_error", _ERRORS, "of these sums; null: unknown", when=SAMPLED.when),
        Field("advice", maybe(TEXT)),
    ),
    csv=f"pid comm gpu vendor wave kernel site op space width opcode source ptx_line offset {' '.join(SUMS.values())} ratio "
    "lanes_mean pattern gaps contention_max addresses_mean addresses hot share wasted_bytes stride_min stride_max bank_ways",
    csv_fields=(Field("stride_min", NUMBER), Field("stride_max", NUMBER)),
    notes="With --sample-blocks or --sample-warps, the sums are estimates, and maxima are those of the sample.",
)
_ELSEWHERE = "without shared memory, textures, surfaces and tensors"
KERNEL_RECORD = Fields(
    "kernel",
    "One for each kernel, after its instructions.",
    (
        *_OF_KERNEL,
        DEMANGLED,
        MANGLED,
        Field("launches", INTEGER, "instrumented; exact also with sampling"),
        Field("sites", INTEGER, "instructions"),
        Field("requests", INTEGER, f"as bytes, sectors, sectors_least and ratio {_ELSEWHERE}"),
        Field("bytes", BYTES, "that the lanes asked for"),
        *_SECTORS,
        *(Field(f"{space}_requests", INTEGER) for space in ("shared", *UNADDRESSED_SPACES)),
        Field("wasted_bytes", BYTES, f"moved and not needed, {_ELSEWHERE}"),
        SAMPLED,
        Field(
            "standard_error",
            maybe(_ERRORS),
            "as in site, of the sums without shared memory",
            when=SAMPLED.when,
        ),
        REGISTERS,
        STAMP,
    ),
)
RECORDS = (
    *(SITE, KERNEL_RECORD, *coverage_text.RECORDS, access_text.ACCESS),
    *of_every_tool(
        BUDGET,
        NOT_PROBED,
        LOG_LOST,
        *RINGS,
        Field("accesses", INTEGER, when="if accesses were recorded"),
        Field("launches", INTEGER, when="if accesses were recorded"),
        Field(
            "faults", many(INTEGER), "processes in which a kernel failed", when="if accesses were recorded"
        ),
    ),
)


def write(kernels: Iterable[KernelTraffic], sampled: bool, results: ResultWriter) -> None:
    """Write the records of each kernel, or its rows of CSV: one for each instruction. sampled: CSV has columns of standard errors."""
    if results.csv:
        _write_csv(kernels, sampled, results)
        return
    for kernel in kernels:
        advised = ((site, traffic_text.advice([site])) for site in kernel.sites)
        known = values_of(_OF_KERNEL, kernel)
        results.out.records(
            SITE.record(**known, **site.record(kernel.share([site])), advice=advice)
            for site, advice in advised
        )
        results.out.records([KERNEL_RECORD.record(**known, **kernel.record()) | results.stamp])


def _write_csv(kernels: Iterable[KernelTraffic], sampled: bool, results: ResultWriter) -> None:
    errors = [*SUMS.values(), "ratio"] if sampled else []
    columns = (*SITE.columns, *(f"{name}_error" for name in errors), "mangled")
    rows = []
    for kernel in kernels:
        known = values_of(_OF_KERNEL, kernel)
        for site in kernel.sites:
            record = known | site.record(kernel.share([site]))
            low, high = record["strides"] or (None, None)
            error = record.get("standard_error", {})
            row = SITE.row(record, stride_min=low, stride_max=high)
            rows.append([*row, *(error.get(name) for name in errors), kernel.mangled])
    results.table(columns, rows)
