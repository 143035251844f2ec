"""Records of every tool: about processes, and kernels of files. They need no NumPy, which would delay the first probe."""

from __future__ import annotations

from gpubpf.show.fields import Field, Fields
from gpubpf.show.remedies import remedy

PROCESS = (Field("pid", "integer", "process id"), Field("comm", "string", "name of the process"))
NOW = Field("ts_ns", "ns", "CLOCK_MONOTONIC, or the virtual time")
ATTACHED = Fields(
    "attached",
    "The tool has attached to a process.",
    (*PROCESS, NOW, Field("waiting", "integer", "kernels that are not ready yet", when="if there are any")),
)
WATCHING = Fields("watching", "The tool measures every process from now on.", (NOW,))
LISTED = Fields(
    "listed",
    "With --list, a kernel of a file or a process.",
    (
        Field("pid", "integer?", "null for a FILE", get="source.pid"),
        Field("comm", "string?", "null for a FILE", get="source.comm"),
        Field("kernel", "string", get="name.short"),
        Field("demangled", "string", get="name.full"),
        Field("mangled", "string", get="name.mangled"),
        Field("file", "string", get="source.file"),
        Field(
            "ptx", "[string]", "compute capabilities for which there is PTX", get=lambda one: list(one.ptx)
        ),
        Field("sass", "[string]", "compute capabilities with machine code", get=lambda one: list(one.sass)),
        Field(
            "gpus",
            "[string]",
            "such as gfx90a:xnack+",
            get=lambda one: list(one.gpus) or None,
            when="for HIP",
        ),
        Field("instrumentable", "boolean", get=lambda one: one.reason is None),
        Field("reason", "string?", "why not, or null"),
        Field(
            "remedy",
            "string?",
            "what to do about it, or null",
            get=lambda one: remedy(one.reason or "") or None,
        ),
        Field("launches", "integer?", "null if nothing was run"),
    ),
    csv="kernel demangled mangled file ptx sass instrumentable reason launches",
)
