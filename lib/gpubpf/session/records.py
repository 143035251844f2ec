"""The records that every tool with device programs writes. `show/fields.py` explains declarations."""

from __future__ import annotations

from gpubpf.records.fields import DEMANGLED, GPU, KERNEL, MANGLED, SAMPLED
from gpubpf.show.fields import (
    BYTES,
    INDEX,
    INTEGER,
    NS,
    NUMBER,
    TEXT,
    TRUTH,
    Field,
    Fields,
    by_name,
    having,
    many,
    maybe,
    one_of,
)
from gpubpf.show.process_records import ATTACHED, LISTED, PROCESS, WATCHING

_COUNTS = by_name(INTEGER)
_SUMMARY = (
    Field("tool", TEXT),
    Field("device", one_of("gpu", "sim")),
    Field("launches_seen", INTEGER, "all launches of the traced processes"),
    Field("launches_matched", INTEGER, "launches of the kernels that you asked for"),
    Field("launches_instrumented", INTEGER),
    Field("not_instrumented", _COUNTS, "launches by reason"),
    Field("lost", INTEGER),
    Field("duration_ns", NS),
    Field(
        "overhead",
        having(
            Field("hooks", maybe(INTEGER)),
            Field("hooks_ns", maybe(NS)),
            Field("stood_ns", NS),
            Field("registers", maybe(INTEGER)),
            Field("images", INTEGER),
            Field("image_bytes", BYTES),
            Field("spilled_bytes", BYTES, when="if copies have fewer registers than they need"),
            Field("drained_bytes", maybe(BYTES)),
        ),
    ),
    Field(
        "sampling",
        having(*(Field(name, SAMPLED.type["properties"][name]) for name in ("unit", "one_in", "seed"))),
        when=SAMPLED.when,
    ),
    Field("launches_unknown", INTEGER, when="with -p and --kernel"),
    Field("graphs_before", INTEGER, when="if there are any"),
    Field("graphs_unknown", INTEGER, when="if there are any"),
    Field("launches_by_kernels", INTEGER, when="if there are any"),
    Field(
        "patch_calls_lost",
        having(Field("launches", INTEGER), Field("functions", INTEGER)),
        when="if there are any",
    ),
    Field(
        "device_faults",
        many(
            having(
                *PROCESS,
                GPU,
                Field("error", INTEGER),
                Field("kernel", maybe(TEXT)),
                Field("source", maybe(TEXT)),
                Field("block", maybe(INDEX)),
                Field("thread", maybe(INDEX)),
                Field("address", maybe(TEXT)),
                Field("patch", maybe(TRUTH)),
            )
        ),
        when="if a kernel ended with an error",
    ),
    Field(
        "processes",
        having(
            Field("measured", INTEGER),
            Field("missed", _COUNTS),
            Field("unmeasured_ns", _COUNTS, when="if there was any"),
            Field("programs", INTEGER, when="if a process executed another program"),
        ),
        when="if there are several",
    ),
)
# Fields of the summary that only some tools write.
NOT_PROBED = Field("not_probed", _COUNTS, when="for some points")
HOST_PROGRAMS = Field(
    "host_programs",
    by_name(having(Field("runs", INTEGER), Field("mean_ns", NS))),
    when="if programs ran in the Linux kernel",
)
BUDGET = Field(
    "budget",
    having(
        Field("percent", NUMBER),
        Field(
            "kernels",
            many(
                having(
                    *PROCESS,
                    KERNEL,
                    DEMANGLED,
                    MANGLED,
                    Field("launches", INTEGER),
                    Field("measured", INTEGER),
                    Field("one_in", maybe(INTEGER)),
                    *(Field(f"{of}_percent", maybe(NUMBER)) for of in ("launch", "overhead", "host")),
                    Field("held", maybe(TRUTH)),
                )
            ),
        ),
    ),
    when="with --budget",
)
LOG_LOST = Field("log_lost", INTEGER, "launches that found no room in the log")
VERIFIED_BY = Field("verified_by", many(TEXT), "whose verifiers decided about the programs")
RINGS = (
    Field("records", INTEGER),
    Field("records_lost", _COUNTS),
    Field("records_incomplete", INTEGER),
    Field("records_unknown", INTEGER),
)


def of_every_tool(*more: Field) -> tuple[Fields, ...]:
    """Return the records that every tool writes. more: fields of its summary."""
    summary = Fields("summary", "The last record.", (*_SUMMARY, *more))
    return ATTACHED, WATCHING, LISTED, summary
