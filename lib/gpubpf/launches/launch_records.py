"""launchlate's JSON records and CSV columns."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from gpubpf.launches.launches import METHODS
from gpubpf.records.fields import DEMANGLED, KERNEL, MANGLED, OWNER, SHAPE, STAMP
from gpubpf.session.records import HOST_PROGRAMS, of_every_tool
from gpubpf.show.fields import (
    BYTES,
    DISTRIBUTION,
    HEX,
    INTEGER,
    NS,
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

TIMES = {
    "latency": "from the call to the start",
    "api": "inside the launch call",
    "wait": "from the call's return until the work that the launch depended on was done",
    "overhead": "the rest of the latency",
    "exec": "from the start to the end",
}
_UNKNOWN = "null if not known"
_METHOD = maybe(one_of(*(name for name in METHODS if name)))
_METHODS = (
    "device (timed by probes in the kernel), stamp (by timing events around it), cupti (by CUPTI), rocr (by AMD's runtime) or null "
    "(not timed)"
)
_WAITED = (
    Field("kind", TEXT, "kernel, copy, memset, host_function, event, graph or api"),
    Field("name", TEXT, "for an event, the work that the event marked"),
    Field("of", TEXT, "the kind of that work", when="for an event"),
)
_STREAM = Field("stream", HEX, "handle")
_EXEC, _NODE = Field("exec", HEX, "handle"), Field("node", INTEGER)
LAUNCH = Fields(
    "launch",
    "With -v or --slow, one for each launch.",
    (
        *OWNER,
        Field("launch", INTEGER, "unique for each execution, replays included"),
        KERNEL,
        Field("tid", INTEGER, "the calling thread"),
        _STREAM,
        Field(
            "graph",
            maybe(having(_EXEC, _NODE, Field("replay", INTEGER, "from 1"))),
            "null for other launches",
        ),
        Field("call_ns", NS, "beginning of the call"),
        Field("return_ns", NS, "end of the call"),
        Field("start_ns", maybe(NS), f"of the first thread; {_UNKNOWN}"),
        Field("end_ns", maybe(NS), f"of the last thread; {_UNKNOWN}"),
        *(Field(f"{name}_ns", maybe(NS), f"{meaning}; {_UNKNOWN}") for name, meaning in TIMES.items()),
        Field("waited_for", maybe(having(*_WAITED)), "the work that it depended on, or null"),
        Field("method", _METHOD, _METHODS),
        Field("clock_error_ns", maybe(NS), f"of the start; {_UNKNOWN}"),
        Field("running", TRUTH, "when the measurement ended"),
        Field("stack", many(TEXT), "of the host, innermost first", when="with --stacks"),
        Field(
            "meanwhile",
            many(having(Field("what", TEXT), Field("ns", NS))),
            "what kept the launching thread",
            when="with --slow",
        ),
        *SHAPE,
    ),
)


# Below, a group is a LaunchGroup, which sums.py defines.


def _methods(group: Any) -> dict[str, int]:
    return {name: group.methods[name] for name in METHODS if name and group.methods[name]}


def _waited_for(group: Any) -> list[dict[str, Any]]:
    """Return what the launches of a group waited for, the longest wait first. Kernels of one short name are one entry."""
    waits: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for waited, count, total in group.waited_for():
        entry = waits.setdefault(tuple((k, v) for k, v in waited.items() if k != "mangled"), [0, 0])
        entry[0] += count
        entry[1] += total
    found = [dict(waited) | {"count": count, "wait_ns": total} for waited, (count, total) in waits.items()]
    return sorted(found, key=lambda one: -one["wait_ns"])


def _time(name: str, meaning: str) -> Field:
    return Field(
        f"{name}_ns",
        maybe(DISTRIBUTION),
        f"{meaning}; null if none is known",
        get=lambda group: group.times[name].distribution(),
    )


_OF_GROUP = (
    Field("stream", maybe(HEX), "handle; null without -s"),
    Field("stream_name", TEXT, "as in the column STREAM", when="with -s"),
    Field(
        "graph",
        having(_EXEC, Field(_NODE.name, _NODE.type, when="in the record kernel")),
        when="with --graphs",
    ),
    Field("count", INTEGER, "launches"),
    *(_time(name, meaning) for name, meaning in TIMES.items()),
    Field("clock_error_ns", maybe(NS), "the largest", get=attrgetter("errors.largest")),
    Field("unknown", INTEGER, "launches without a start"),
    Field("methods", by_name(INTEGER), "launches by method", get=_methods),
    Field(
        "waited_for",
        many(having(*_WAITED, Field("count", INTEGER), Field("wait_ns", NS, "in total"))),
        get=_waited_for,
    ),
    STAMP,
)
KERNEL_RECORD = Fields(
    "kernel",
    "One for each line of the table.",
    (*OWNER, KERNEL, DEMANGLED, MANGLED, *_OF_GROUP),
    csv=f"pid comm gpu kernel stream graph=graph.exec node=graph.node count {' '.join(f'{name}_ns' for name in TIMES)} "
    "clock_error_ns mangled stream_name",
)
GRAPH_RECORD = Fields(
    "graph",
    "With --graphs, one for each graph as a whole.",
    (*OWNER, *_OF_GROUP),
    notes="Its latency is that of its first kernel, or of its first copy or memset if it has any; "
    "exec lasts until all its work has ended.",
)
OPERATION = Fields(
    "op",
    "With --timeline, one for each operation.",
    (
        *OWNER,
        Field("t_ns", NS, "when it began"),
        Field("dur_ns", maybe(NS), f"how long it took; {_UNKNOWN}"),
        Field(
            "op",
            one_of(*"kernel h2d d2h d2d h2h memset host_function event graph api".split()),
        ),
        Field("name", TEXT),
        _STREAM,
        Field("tid", INTEGER, "the calling thread"),
        Field("bytes", BYTES),
        Field("call_ns", NS, "beginning of the call"),
        Field("on", one_of("gpu", "host"), "gpu: the times are those of the work; host: those of the call"),
        Field(
            "method", _METHOD, "as in the record launch; null: not timed, or the times are those of the call"
        ),
        Field("clock_error_ns", maybe(NS), f"of the start; {_UNKNOWN}"),
    ),
)
_OVERLAP = having(
    Field("gpu", INTEGER),
    Field("vendor", one_of("nvidia", "amd")),
    *(Field(name, INTEGER) for name in ("copies", "copies_untimed", "kernels_untimed")),
    *(Field(name, maybe(NS)) for name in ("copy_ns", "overlap_ns")),
)
_LOST = ("lost", "lost_by_failure", "lost_by_exit", "running", "untimed", "behind_unseen", "by_others")
RECORDS = (
    *(LAUNCH, KERNEL_RECORD, GRAPH_RECORD, OPERATION),
    *of_every_tool(
        HOST_PROGRAMS,
        *(Field(f"launches_{name}", INTEGER) for name in _LOST),
        Field("launches_timed", by_name(INTEGER)),
        Field("operations_lost", INTEGER),
        Field("clock_error_ns", maybe(NS)),
        Field("clock_steps", INTEGER),
        Field("copy_overlap", many(_OVERLAP)),
    ),
)
