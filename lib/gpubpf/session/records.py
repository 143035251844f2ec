"""The records that every tool with device programs writes. `show/fields.py` explains declarations."""

from __future__ import annotations

from gpubpf.records.fields import DEMANGLED, GPU, KERNEL, MANGLED, SAMPLED
from gpubpf.show.fields import Field, Fields, by_name, having, many
from gpubpf.show.process_records import ATTACHED, LISTED, PROCESS, WATCHING

_ANY = "if there are any"
_OVERHEAD = having(
    Field("spilled_bytes", "bytes", when="if copies have fewer registers than they need"),
    hooks="integer?",
    hooks_ns="ns?",
    stood_ns="ns",
    registers="integer?",
    images="integer",
    image_bytes="bytes",
    drained_bytes="bytes?",
)
_FAULT = having(
    *(*PROCESS, GPU),
    error="integer",
    kernel="string?",
    source="string?",
    block="index?",
    thread="index?",
    address="string?",
    patch="boolean?",
)
_PROCESSES = having(
    Field("unmeasured_ns", "{ns}", when="if there was any"),
    Field("programs", "integer", when="if a process executed another program"),
    measured="integer",
    missed="{integer}",
)
_SUMMARY = (
    Field("tool", "string"),
    Field("device", "gpu|sim"),
    Field("launches_seen", "integer", "all launches of the traced processes"),
    Field("launches_matched", "integer", "launches of the kernels that you asked for"),
    Field("launches_instrumented", "integer"),
    Field("not_instrumented", "{integer}", "launches by reason"),
    Field("lost", "integer"),
    Field("duration_ns", "ns"),
    Field("overhead", _OVERHEAD),
    Field("sampling", having(unit="block|warp", one_in="integer", seed="integer"), when=SAMPLED.when),
    Field("launches_unknown", "integer", when="with -p and --kernel"),
    *(
        Field(name, "integer", when=_ANY)
        for name in ("graphs_before", "graphs_unknown", "launches_by_kernels")
    ),
    Field(
        "launches_unread",
        "integer",
        "an upper bound of the instrumented launches whose counts are lost",
        when=_ANY,
    ),
    Field("patch_calls_lost", having(launches="integer", functions="integer"), when=_ANY),
    Field("device_faults", many(_FAULT), when="if a kernel ended with an error"),
    Field("processes", _PROCESSES, when="if there are several"),
)
# Fields of the summary that only some tools write.
NOT_PROBED = Field("not_probed", "{integer}", when="for some points")
HOST_PROGRAMS = Field(
    "host_programs",
    by_name(having(runs="integer", mean_ns="ns")),
    when="if programs ran in the Linux kernel",
)
_KERNEL_OF_BUDGET = having(
    *(*PROCESS, KERNEL, DEMANGLED, MANGLED),
    launches="integer",
    measured="integer",
    one_in="integer?",
    launch_percent="number?",
    overhead_percent="number?",
    host_percent="number?",
    held="boolean?",
)
BUDGET = Field("budget", having(percent="number", kernels=many(_KERNEL_OF_BUDGET)), when="with --budget")
LOG_LOST = Field("log_lost", "integer", "launches that found no room in the log")
VERIFIED_BY = Field("verified_by", "[string]", "whose verifiers decided about the programs")
RINGS = (
    Field("records", "integer"),
    Field("records_lost", "{integer}"),
    Field("records_incomplete", "integer"),
    Field("records_unknown", "integer"),
)


def of_every_tool(*more: Field) -> tuple[Fields, ...]:
    """Return the records that every tool writes. more: fields of its summary."""
    summary = Fields("summary", "The last record.", (*_SUMMARY, *more))
    return ATTACHED, WATCHING, LISTED, summary
