"""launchlate's JSON records and CSV columns."""

from __future__ import annotations

from typing import Any

from gpubpf.launches.launches import METHODS
from gpubpf.records.fields import DEMANGLED, KERNEL, MANGLED, OWNER_OF_HOST, SHAPE, STAMP
from gpubpf.session.records import HOST_PROGRAMS, of_every_tool
from gpubpf.show.fields import Field, Fields, having, many, maybe

TIMES = {
    "latency": "from the call to the start",
    "api": "inside the launch call",
    "wait": "from the call's return until the work that the launch depended on was done",
    "overhead": "the rest of the latency",
    "exec": "from the start to the end",
}
_UNKNOWN = "null if not known"
_METHOD = "|".join(name for name in METHODS if name) + "?"
_METHODS = (
    "device (timed by probes in the kernel), stamp (by timing events around it), cupti (by CUPTI), rocr (by AMD's runtime) or null "
    "(not timed)"
)
_WAITED = (
    Field("kind", "string", "kernel, copy, memset, host_function, event, graph or api"),
    Field("name", "string", "for an event, the work that the event marked"),
    Field("of", "string", "the kind of that work", when="for an event"),
)
_STREAM = Field("stream", "hex", "handle")
_EXEC, _NODE = Field("exec", "hex", "handle"), Field("node", "integer")
LAUNCH = Fields(
    "launch",
    "With -v or --slow, one for each launch.",
    (
        *OWNER_OF_HOST,
        Field("launch", "integer", "unique for each execution, replays included"),
        KERNEL,
        Field("tid", "integer", "the calling thread"),
        _STREAM,
        Field(
            "graph",
            maybe(having(_EXEC, _NODE, Field("replay", "integer", "from 1"))),
            "null for other launches",
        ),
        Field("call_ns", "ns", "beginning of the call"),
        Field("return_ns", "ns", "end of the call"),
        Field("start_ns", "ns?", f"of the first thread; {_UNKNOWN}"),
        Field("end_ns", "ns?", f"of the last thread; {_UNKNOWN}"),
        *(Field(f"{name}_ns", "ns?", f"{meaning}; {_UNKNOWN}") for name, meaning in TIMES.items()),
        Field("waited_for", maybe(having(*_WAITED)), "the work that it depended on, or null"),
        Field("method", _METHOD, _METHODS),
        Field("clock_error_ns", "ns?", f"of the start; {_UNKNOWN}"),
        Field("running", "boolean", "when the measurement ended"),
        Field("stack", "[string]", "of the host, innermost first", when="with --stacks"),
        Field(
            "ranges",
            "[string]",
            "names of the NVTX ranges that it was in, outermost first",
            when="with --stacks or --range",
        ),
        Field(
            "meanwhile",
            many(having(what="string", ns="ns")),
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
        "distribution?",
        f"{meaning}; null if none is known",
        get=lambda group: group.times[name].distribution(),
    )


_OF_GROUP = (
    Field("stream", "hex?", "handle; null without -s"),
    Field("stream_name", "string", "as in the column STREAM", when="with -s"),
    Field(
        "graph",
        having(_EXEC, Field(_NODE.name, _NODE.type, when="in the record kernel")),
        when="with --graphs",
    ),
    Field("count", "integer", "launches"),
    *(_time(name, meaning) for name, meaning in TIMES.items()),
    Field("clock_error_ns", "ns?", "the largest", get="errors.largest"),
    Field("unknown", "integer", "launches without a start"),
    Field("methods", "{integer}", "launches by method", get=_methods),
    Field(
        "waited_for",
        many(having(*_WAITED, Field("count", "integer"), Field("wait_ns", "ns", "in total"))),
        get=_waited_for,
    ),
    STAMP,
)
KERNEL_RECORD = Fields(
    "kernel",
    "One for each line of the table.",
    (*OWNER_OF_HOST, KERNEL, DEMANGLED, MANGLED, *_OF_GROUP),
    csv=f"pid comm gpu kernel stream graph=graph.exec node=graph.node count {' '.join(f'{name}_ns' for name in TIMES)} "
    "clock_error_ns mangled stream_name",
)
GRAPH_RECORD = Fields(
    "graph",
    "With --graphs, one for each graph as a whole.",
    (*OWNER_OF_HOST, *_OF_GROUP),
    notes="Its latency is that of its first kernel, or of its first copy or memset if it has any; "
    "exec lasts until all its work has ended.",
)
OPERATION = Fields(
    "op",
    "With --timeline, one for each operation.",
    (
        *OWNER_OF_HOST,
        Field("t_ns", "ns", "when it began"),
        Field("dur_ns", "ns?", f"how long it took; {_UNKNOWN}"),
        Field("op", "kernel|h2d|d2h|d2d|h2h|memset|host_function|event|graph|api"),
        Field("name", "string"),
        _STREAM,
        Field("tid", "integer", "the calling thread"),
        Field("bytes", "bytes"),
        Field("call_ns", "ns", "beginning of the call"),
        Field("on", "gpu|host", "gpu: the times are those of the work; host: those of the call"),
        Field(
            "method", _METHOD, "as in the record launch; null: not timed, or the times are those of the call"
        ),
        Field("clock_error_ns", "ns?", f"of the start; {_UNKNOWN}"),
    ),
)
_OVERLAP = having(
    Field("gpu", "integer"),
    Field("vendor", "nvidia|amd"),
    *(Field(name, "integer") for name in ("copies", "copies_untimed", "kernels_untimed")),
    *(Field(name, "ns?") for name in ("copy_ns", "overlap_ns")),
)
_LOST = ("lost", "lost_by_failure", "lost_by_exit", "running", "untimed", "behind_unseen", "by_others")
LOSSES = (  # of the summary: see `LaunchLosses.fields`
    *(Field(f"launches_{name}", "integer") for name in _LOST),
    Field("launches_timed", "{integer}"),
    Field("operations_lost", "integer"),
    Field("clock_error_ns", "ns?"),
    Field("clock_steps", "integer"),
)
RECORDS = (
    *(LAUNCH, KERNEL_RECORD, GRAPH_RECORD, OPERATION),
    *of_every_tool(HOST_PROGRAMS, *LOSSES, Field("copy_overlap", many(_OVERLAP))),
)
