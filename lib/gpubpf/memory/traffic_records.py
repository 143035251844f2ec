"""memtrace's JSON records and CSV rows about the traffic of kernels: of each instruction, and of the kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpubpf.ebpf.bytecode import UNADDRESSED_SPACES
from gpubpf.memory import access_text, coverage_text, traffic_text
from gpubpf.memory.sampled_part import SUMS
from gpubpf.record import replace
from gpubpf.records.fields import DEMANGLED, KERNEL, MANGLED, OWNER, REGISTERS, SAMPLED, STAMP
from gpubpf.session.records import BUDGET, LOG_LOST, NOT_PROBED, RINGS, of_every_tool
from gpubpf.show.fields import Field, Fields, having, maybe, values_of

if TYPE_CHECKING:
    from gpubpf.memory.traffic import KernelTraffic
    from gpubpf.show.result_writer import ResultWriter

_OF_KERNEL = (*OWNER, KERNEL)
_ERRORS = having(
    *(Field(name, "number?", when="if there is such a sum") for name in (*SUMS.values(), "ratio"))
)
_NO_ADDRESS = "null if the addresses are not known"
_SECTORS = (
    Field(
        "sectors", "integer?", f"distinct sectors of each request, of 32 bytes, on AMD GPUs 64; {_NO_ADDRESS}"
    ),
    Field("sectors_least", "integer?", "the fewest sectors that hold so many bytes"),
    Field("ratio", "number?", "of these two"),
)
SITE = Fields(
    "site",
    "One for each instruction of each kernel that accesses memory, and each kind of memory that its address led to.",
    (
        *_OF_KERNEL,
        Field("site", "integer", "the number of the instruction"),
        Field("op", "load|store|atomic|async"),
        Field(
            "space",
            "|".join(("global", "shared", "local", "const", *UNADDRESSED_SPACES)),
            "in the last four, all that depends on addresses is null",
        ),
        Field(
            "width",
            "integer?",
            "bytes per lane of the whole, possibly vector, access; for copies whose size is only known at run time, the rounded "
            "mean; null for bulk tensor copies and tcgen05.mma, as bytes",
        ),
        Field("opcode", "string", "empty in kernels without PTX"),
        Field("source", "string?", "file.cu:12, or null"),
        Field("ptx_line", "integer?"),
        Field(
            "offset",
            "integer?",
            "of the instruction in its function, on an AMD GPU and in kernels without PTX",
        ),
        Field("requests", "integer", "executions by a warp"),
        Field("accesses", "integer", "lanes of all requests"),
        Field("bytes", "bytes?", "that the lanes asked for"),
        *_SECTORS,
        Field("lanes_mean", "number", "lanes that take part"),
        Field("pattern", "string?", "of the lanes that take part, as PATTERN"),
        Field("patterns", "{integer}?", "requests by pattern"),
        Field("strides", "[number]?", "the shortest and longest stride of strided requests, or null"),
        Field("gaps", "integer?", "requests with idle lanes between those that take part"),
        Field(
            "bank_ways",
            maybe(having(mean="number", max="number")),
            "over phases; a phase is the lanes that take 128 bytes together; null except for shared memory",
        ),
        Field("contention_max", "integer?", "the most lanes of one request on one address"),
        Field("addresses_mean", "number?", "for atomics, distinct addresses of a request"),
        Field(
            "addresses",
            "integer?",
            "for atomics in global memory, distinct addresses since the beginning; null if they were too many to count",
        ),
        Field("hot", "integer?", "updates of the address that had the most; null as addresses"),
        Field("share", "number?", "of the kernel's traffic in shared memory, or outside of it, 0 to 1"),
        Field("wasted_bytes", "bytes?", "moved and not needed; null in shared memory"),
        Field("standard_error", _ERRORS, "of these sums; null: unknown", when=SAMPLED.when),
        Field("advice", "string?"),
    ),
    csv=f"pid comm gpu vendor wave kernel site op space width opcode source ptx_line offset {' '.join(SUMS.values())} ratio "
    "lanes_mean pattern gaps contention_max addresses_mean addresses hot share wasted_bytes stride_min stride_max bank_ways",
    csv_fields=(Field("stride_min", "number"), Field("stride_max", "number")),
    notes="With --sample-blocks or --sample-warps, the sums are estimates, and maxima are those of the sample.",
)
_ELSEWHERE = "without shared memory, textures, surfaces, tensors and tensor memory"
KERNEL_RECORD = Fields(
    "kernel",
    "One for each kernel, after its instructions.",
    (
        *_OF_KERNEL,
        DEMANGLED,
        MANGLED,
        Field("launches", "integer", "instrumented; exact also with sampling"),
        Field("sites", "integer", "instructions"),
        Field("requests", "integer", f"as bytes, sectors, sectors_least and ratio {_ELSEWHERE}"),
        Field("bytes", "bytes", "that the lanes asked for"),
        *_SECTORS,
        *(Field(f"{space}_requests", "integer") for space in ("shared", *UNADDRESSED_SPACES)),
        Field("wasted_bytes", "bytes", f"moved and not needed, {_ELSEWHERE}"),
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
        *(
            replace(one, when="if accesses were recorded")
            for one in (
                *(LOG_LOST, *RINGS, Field("accesses", "integer"), Field("launches", "integer")),
                Field("faults", "[integer]", "processes in which a kernel failed"),
            )
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
