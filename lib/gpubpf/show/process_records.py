"""Records of every tool: about processes, and kernels of files. They need no NumPy, which would delay the first probe."""

from __future__ import annotations

from operator import attrgetter

from gpubpf.show.fields import INTEGER, NS, TEXT, TRUTH, Field, Fields, many, maybe
from gpubpf.show.remedies import remedy

PROCESS = (Field("pid", INTEGER, "process id"), Field("comm", TEXT, "name of the process"))
NOW = Field("ts_ns", NS, "CLOCK_MONOTONIC, or the virtual time")
ATTACHED = Fields(
    "attached",
    "The tool has attached to a process.",
    (*PROCESS, NOW, Field("waiting", INTEGER, "kernels that are not ready yet", when="if there are any")),
)
WATCHING = Fields("watching", "The tool measures every process from now on.", (NOW,))
LISTED = Fields(
    "listed",
    "With --list, a kernel of a file or a process.",
    (
        Field("pid", maybe(INTEGER), "null for a FILE", get=attrgetter("source.pid")),
        Field("comm", maybe(TEXT), "null for a FILE", get=attrgetter("source.comm")),
        Field("kernel", TEXT, get=attrgetter("name.short")),
        Field("demangled", TEXT, get=attrgetter("name.full")),
        Field("mangled", TEXT, get=attrgetter("name.mangled")),
        Field("file", TEXT, get=attrgetter("source.file")),
        Field(
            "ptx", many(TEXT), "compute capabilities for which there is PTX", get=lambda one: list(one.ptx)
        ),
        Field("sass", many(TEXT), "compute capabilities with machine code", get=lambda one: list(one.sass)),
        Field(
            "gpus",
            many(TEXT),
            "such as gfx90a:xnack+",
            get=lambda one: list(one.gpus) or None,
            when="for HIP",
        ),
        Field("instrumentable", TRUTH, get=lambda one: one.reason is None),
        Field("reason", maybe(TEXT), "why not, or null"),
        Field(
            "remedy",
            maybe(TEXT),
            "what to do about it, or null",
            get=lambda one: remedy(one.reason or "") or None,
        ),
        Field("launches", maybe(INTEGER), "null if nothing was run"),
    ),
    csv="kernel demangled mangled file ptx sass instrumentable reason launches",
)
