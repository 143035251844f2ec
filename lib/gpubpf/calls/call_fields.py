"""The JSON records and CSV columns of hipsnoop and cudasnoop."""

from __future__ import annotations

from operator import attrgetter

from gpubpf.record import replace
from gpubpf.show.fields import (
    BYTES,
    DISTRIBUTION,
    HEX,
    INDEX,
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
from gpubpf.show.process_records import PROCESS

_BOOTTIME = "CLOCK_BOOTTIME"
_APPLIES = "if it applies"
TIME = Field("ts_ns", NS, _BOOTTIME)
STAMP = Field("ts_ns", NS, _BOOTTIME, when="with -T")
ATTACHED = Fields("attached", "A traced process has mapped a library with probes.", (*PROCESS, TIME))
WATCHING = Fields("watching", "Every process is traced from now on.", (TIME,))
_TID = Field("tid", INTEGER, "the thread")
_API = Field("api", TEXT, "the function")
_BY_LAUNCH = "for a launch"
SPENT = {
    "preempted": "preempted_ns",
    "blocked": "blocked_ns",
    "block_io": "io_ns",
    "page_fault": "fault_ns",
    "reclaim": "reclaim_ns",
}
_SPENT = having(*(Field(name, NS, when="if there was any") for name in SPENT))
CALL = Fields(
    "call",
    "With -e and --slow, one for each call.",
    (
        Field("ts_ns", NS, f"of the entry, {_BOOTTIME}"),
        *PROCESS,
        _TID,
        Field("cgroup_id", INTEGER),
        _API,
        Field("ret", INTEGER, "what it returned", when=_APPLIES),
        Field("error", TEXT, "the name of the error", when="if it is one"),
        Field("lat_ns", NS, "from the entry to the return"),
        Field("off_cpu_ns", NS, "off the CPU"),
        Field(
            "kernel",
            TEXT,
            "without template arguments and parameters; an address if the name is not known",
            when=_BY_LAUNCH,
        ),
        Field("fn_addr", HEX, "the handle that was passed", when=_BY_LAUNCH),
        Field("grid", INDEX, "dimensions", when=_BY_LAUNCH),
        Field("block_dim", INDEX, "dimensions", when=_BY_LAUNCH),
        Field("shared_bytes", BYTES, when=_BY_LAUNCH),
        Field("stream", HEX, when=_APPLIES),
        Field("bytes", BYTES, when=_APPLIES),
        Field("copy", one_of("h2h", "h2d", "d2h", "d2d"), when=_APPLIES),
        Field("out", HEX, "a handle or address that it returned", when=_APPLIES),
        Field("gap_ns", NS, "since the thread's previous launch", when="for a launch after another"),
        Field("spent_ns", _SPENT, "off the CPU, but reclaim", when="if there was any"),
        Field("page_faults", INTEGER, "their number", when="if there were any"),
        Field(
            "why",
            many(having(Field("what", TEXT), Field("count", INTEGER), Field("ns", maybe(NS)))),
            "what the thread did inside",
            when="with --slow",
        ),
    ),
    csv="ts_ns pid comm tid cgroup_id api ret error lat_ns off_cpu_ns kernel fn_addr grid=grid block_dim=block_dim shared_bytes "
    "stream bytes copy",
)
FUNCTION = Fields(
    "api",
    "One for each process and function.",
    (
        *PROCESS,
        Field("api", TEXT, "the function", get=attrgetter("name")),
        Field("count", INTEGER, "calls that returned", get=attrgetter("times.count")),
        Field("errors", INTEGER, "how many of these returned an error"),
        Field(
            "last_error",
            TEXT,
            "its name",
            get=lambda row: row.error_name if row.errors else None,
            when="if there is one",
        ),
        Field(
            "lat_ns",
            maybe(DISTRIBUTION),
            "from the entry to the return",
            get=lambda row: row.times.distribution(),
        ),
        Field("total_ns", NS, "of all calls", get=attrgetter("times.ns")),
        Field("off_cpu_ns", NS, "of all calls, off the CPU", get=attrgetter("times.off_ns")),
        STAMP,
    ),
    csv="pid comm api count errors mean_ns=lat_ns.mean p50_ns=lat_ns.p50 p99_ns=lat_ns.p99 max_ns=lat_ns.max total_ns off_cpu_ns",
)
_KERNEL = (
    *PROCESS,
    Field(
        "kernel",
        TEXT,
        "without template arguments and parameters; an address if the name is not known",
        get=attrgetter("name"),
    ),
    Field(
        "demangled",
        TEXT,
        "in full",
        get=lambda row: row.kernel and row.kernel.full,
        when="if the name is known",
    ),
    Field("mangled", TEXT, get=lambda row: row.kernel and row.kernel.mangled, when="if the name is known"),
    Field(
        "fn_addr",
        HEX,
        "a handle",
        get=lambda row: f"{row.address:#x}" if row.address else None,
        when=_APPLIES,
    ),
    Field("count", INTEGER, "launches", get=attrgetter("times.count")),
    Field("errors", INTEGER, "launches that returned an error"),
    Field(
        "gap_ns",
        DISTRIBUTION,
        "since the thread's previous launch",
        get=lambda row: row.gaps.distribution(),
        when=_APPLIES,
    ),
    Field("gap_total_ns", NS, get=lambda row: row.gaps.ns if row.gaps.count else None, when=_APPLIES),
    Field("gap_off_cpu_ns", NS, get=lambda row: row.gaps.off_ns if row.gaps.count else None, when=_APPLIES),
)
_RUNS = (
    Field("exec_ns", DISTRIBUTION, "on the GPU", get=lambda row: row.runs.distribution(), when="if known"),
    Field("exec_total_ns", NS, get=lambda row: row.runs.ns if row.runs.count else None, when="if known"),
    Field("runs", INTEGER, "how often it ran", get=lambda row: row.runs.count or None, when="if known"),
)
KERNEL = Fields(
    "kernel",
    "One for each process and kernel.",
    (*_KERNEL, *_RUNS, STAMP),
    notes="A kernel that no call launched, but a graph or the runtime itself, has count 0. "
    "Launches without a kernel, which are those of graphs, have the name of their function: [hipGraphLaunch].",
)
_CUDA_KERNEL = Fields(
    "kernel",
    KERNEL.about,
    (*_KERNEL, STAMP),
    notes="Launches without a kernel, which are those of graphs, have the name of their function: [cudaGraphLaunch].",
)
WHY = Fields(
    "why",
    "With --why, one for each process, thread, function and reason.",
    (
        *PROCESS,
        Field("tid", INTEGER, "the thread", when="but for the whole process"),
        Field("api", maybe(TEXT), "the function; null: between launches"),
        Field(
            "reason",
            TEXT,
            "preempted, blocked, block_io, page_fault, memory, stopped, page_faults, tcp_retransmits",
        ),
        Field("syscall", maybe(TEXT), "its name; null outside of one"),
        Field("count", INTEGER, "how often"),
        Field("ns", maybe(NS), "in total; null for a reason that has no time"),
        Field("max_ns", maybe(NS), "at most; null for a reason that has no time"),
        STAMP,
    ),
)
_CALLED = (Field("stream", HEX, when=_APPLIES), Field("bytes", BYTES, when=_APPLIES))
OPERATION = Fields(
    "op",
    "With --timeline, one for each call and each kernel that ran.",
    (
        Field("t_ns", NS, "when it began"),
        Field("dur_ns", NS, "how long it took"),
        Field("op", one_of("api", "kernel"), "api: a call"),
        Field("name", TEXT, "the function or kernel"),
        Field("on", one_of("host", "gpu")),
        *PROCESS,
        Field("tid", INTEGER, when="for a call, or a kernel whose call is known"),
        Field("gpu", INTEGER, when="for a kernel that ran"),
        Field("queue", HEX, "of the hardware", when="for a kernel that ran"),
        *_CALLED,
        Field("call_ns", NS, "when the call began", when="for a kernel whose call is known"),
    ),
)
_CUDA_OPERATION = Fields(
    "op",
    "With --timeline, one for each call.",
    tuple(field for field in OPERATION.fields if field.name not in ("gpu", "queue", "call_ns")),
)
DISPATCH = Fields(
    "dispatch",
    "With -e, if there are GPU timestamps: a kernel that ran.",
    (
        *PROCESS,
        Field("gpu", INTEGER, "its number in the runtime's list"),
        Field("queue", HEX, "of the hardware"),
        Field("kernel", TEXT),
        Field("ts_ns", NS, f"when it started, {_BOOTTIME}"),
        Field("exec_ns", NS, "how long it ran"),
        Field("grid", INDEX, "in blocks"),
        Field("block_dim", INDEX),
        Field("shared_bytes", BYTES),
        *(
            replace(field, when="if its call is known")
            for field in (
                _TID,
                _API,
                Field("call_ns", NS, "when the call began"),
                Field("latency_ns", NS, "from then to the start"),
                Field("stream", HEX),
            )
        ),
    ),
)
DRIVER = Fields(
    "driver",
    "With --why and an AMD GPU: what the GPU's driver did on its own, such as evicting queues.",
    (
        TIME,
        Field("ns", NS, "how long it took"),
        *(Field(one.name, maybe(one.type), "null if this concerns no single process") for one in PROCESS),
        Field("gpu", INTEGER),
        Field("what", TEXT),
    ),
)
LISTED = Fields(
    "listed",
    "With --list, a function or a kernel.",
    (
        *(Field(one.name, maybe(one.type), "null for a FILE") for one in PROCESS),
        Field("file", maybe(TEXT)),
        Field("api", TEXT, "the function", when="for a function"),
        Field("kernel", TEXT, when="for a kernel"),
        Field("demangled", TEXT, when="for a kernel"),
        Field("mangled", TEXT, when="for a kernel"),
        Field("instrumentable", TRUTH),
        Field("reason", maybe(TEXT), "why not"),
        Field("launches", maybe(INTEGER), when="for a kernel"),
    ),
)
_COUNTS = by_name(INTEGER)
_SUMMARY = (
    Field("tool", TEXT),
    Field("calls", INTEGER),
    Field("lost", INTEGER),
    Field("duration_ns", NS),
    Field("lost_by", having(*(Field(name, INTEGER) for name in ("records", "sums", "calls", "missed")))),
    *(Field(name, INTEGER) for name in ("lost_why", "lost_names", "lost_processes")),
    Field("missed", _COUNTS),
    *(Field(name, INTEGER) for name in ("processes", "nested", "abandoned")),
    Field(
        "libraries",
        many(
            having(
                Field("path", TEXT),
                Field("functions", INTEGER),
                Field("refused", by_name(TEXT)),
                Field("late", having(*PROCESS), when="if a process mapped the library before it had probes"),
            )
        ),
    ),
    Field("host_programs", by_name(having(Field("runs", INTEGER), Field("mean_ns", NS)))),
)
_DEVICES = (
    Field(
        "devices",
        many(
            having(
                Field("gpu", INTEGER),
                Field("name", TEXT),
                Field("architecture", TEXT),
                Field("memory_bytes", BYTES),
                Field("compute_units", INTEGER),
            )
        ),
        when="if hip-python finds any",
    ),
    Field(
        "device_times",
        maybe(
            having(
                Field("source", TEXT),
                Field("device", one_of("gpu", "sim")),
                *(Field(name, INTEGER) for name in ("dispatches", "lost", "unended")),
                Field("without_call", maybe(INTEGER)),
                Field("without_name", INTEGER),
                Field("unread", maybe(TEXT)),
            )
        ),
        when="with COMMAND",
    ),
    Field("no_device_times", TEXT, when="if there are no GPU timestamps"),
)
_BOTH = (ATTACHED, WATCHING, LISTED)
CUDA = (
    *_BOTH,
    CALL,
    FUNCTION,
    _CUDA_KERNEL,
    WHY,
    _CUDA_OPERATION,
    Fields("summary", "The last record.", _SUMMARY),
)
HIP = (
    *_BOTH,
    *(CALL, FUNCTION, KERNEL, WHY, OPERATION, DISPATCH, DRIVER),
    Fields("summary", "The last record.", (*_DEVICES, *_SUMMARY)),
)
