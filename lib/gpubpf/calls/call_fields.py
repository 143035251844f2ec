"""The JSON records and CSV columns of hipsnoop and cudasnoop."""

from __future__ import annotations

from gpubpf.record import replace
from gpubpf.show.fields import Field, Fields, by_name, having, many, maybe
from gpubpf.show.process_records import PROCESS

_BOOTTIME = "CLOCK_BOOTTIME"
_APPLIES = "if it applies"
TIME = Field("ts_ns", "ns", _BOOTTIME)
STAMP = Field("ts_ns", "ns", _BOOTTIME, when="with -T")
ATTACHED = Fields("attached", "A traced process has mapped a library with probes.", (*PROCESS, TIME))
WATCHING = Fields("watching", "Every process is traced from now on.", (TIME,))
_TID = Field("tid", "integer", "the thread")
_API = Field("api", "string", "the function")
_BY_LAUNCH = "for a launch"
SPENT = {
    "preempted": "preempted_ns",
    "blocked": "blocked_ns",
    "block_io": "io_ns",
    "page_fault": "fault_ns",
    "reclaim": "reclaim_ns",
}
_SPENT = having(*(Field(name, "ns", when="if there was any") for name in SPENT))
CALL = Fields(
    "call",
    "With -e and --slow, one for each call.",
    (
        Field("ts_ns", "ns", f"of the entry, {_BOOTTIME}"),
        *PROCESS,
        _TID,
        Field("cgroup_id", "integer"),
        _API,
        Field("ret", "integer", "what it returned", when=_APPLIES),
        Field("error", "string", "the name of the error", when="if it is one"),
        Field("lat_ns", "ns", "from the entry to the return"),
        Field("off_cpu_ns", "ns", "off the CPU"),
        Field(
            "kernel",
            "string",
            "without template arguments and parameters; an address if the name is not known",
            when=_BY_LAUNCH,
        ),
        Field("fn_addr", "hex", "the handle that was passed", when=_BY_LAUNCH),
        Field("grid", "index", "dimensions", when=_BY_LAUNCH),
        Field("block_dim", "index", "dimensions", when=_BY_LAUNCH),
        Field("shared_bytes", "bytes", when=_BY_LAUNCH),
        Field("stream", "hex", when=_APPLIES),
        Field("bytes", "bytes", when=_APPLIES),
        Field("copy", "h2h|h2d|d2h|d2d", when=_APPLIES),
        Field("out", "hex", "a handle or address that it returned", when=_APPLIES),
        Field("gap_ns", "ns", "since the thread's previous launch", when="for a launch after another"),
        Field("spent_ns", _SPENT, "off the CPU, but reclaim", when="if there was any"),
        Field("page_faults", "integer", "their number", when="if there were any"),
        Field(
            "why",
            many(having(what="string", count="integer", ns="ns?")),
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
        Field("api", "string", "the function", get="name"),
        Field("count", "integer", "calls that returned", get="times.count"),
        Field("errors", "integer", "how many of these returned an error"),
        Field(
            "last_error",
            "string",
            "its name",
            get=lambda row: row.error_name if row.errors else None,
            when="if there is one",
        ),
        Field(
            "lat_ns",
            "distribution?",
            "from the entry to the return",
            get=lambda row: row.times.distribution(),
        ),
        Field("total_ns", "ns", "of all calls", get="times.ns"),
        Field("off_cpu_ns", "ns", "of all calls, off the CPU", get="times.off_ns"),
        STAMP,
    ),
    csv="pid comm api count errors mean_ns=lat_ns.mean p50_ns=lat_ns.p50 p99_ns=lat_ns.p99 max_ns=lat_ns.max total_ns off_cpu_ns",
)
_KERNEL = (
    *PROCESS,
    Field(
        "kernel",
        "string",
        "without template arguments and parameters; an address if the name is not known",
        get="name",
    ),
    Field(
        "demangled",
        "string",
        "in full",
        get=lambda row: row.kernel and row.kernel.full,
        when="if the name is known",
    ),
    Field(
        "mangled", "string", get=lambda row: row.kernel and row.kernel.mangled, when="if the name is known"
    ),
    Field(
        "fn_addr",
        "hex",
        "a handle",
        get=lambda row: f"{row.address:#x}" if row.address else None,
        when=_APPLIES,
    ),
    Field("count", "integer", "launches", get="times.count"),
    Field("errors", "integer", "launches that returned an error"),
    Field(
        "gap_ns",
        "distribution",
        "since the thread's previous launch",
        get=lambda row: row.gaps.distribution(),
        when=_APPLIES,
    ),
    Field("gap_total_ns", "ns", get=lambda row: row.gaps.ns if row.gaps.count else None, when=_APPLIES),
    Field("gap_off_cpu_ns", "ns", get=lambda row: row.gaps.off_ns if row.gaps.count else None, when=_APPLIES),
)
_RUNS = (
    Field("exec_ns", "distribution", "on the GPU", get=lambda row: row.runs.distribution(), when="if known"),
    Field("exec_total_ns", "ns", get=lambda row: row.runs.ns if row.runs.count else None, when="if known"),
    Field("runs", "integer", "how often it ran", get=lambda row: row.runs.count or None, when="if known"),
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
        Field("tid", "integer", "the thread", when="but for the whole process"),
        Field("api", "string?", "the function; null: between launches"),
        Field(
            "reason",
            "string",
            "preempted, blocked, block_io, page_fault, memory, stopped, page_faults, tcp_retransmits",
        ),
        Field("syscall", "string?", "its name; null outside of one"),
        Field("count", "integer", "how often"),
        Field("ns", "ns?", "in total; null for a reason that has no time"),
        Field("max_ns", "ns?", "at most; null for a reason that has no time"),
        STAMP,
    ),
)
_CALLED = (Field("stream", "hex", when=_APPLIES), Field("bytes", "bytes", when=_APPLIES))
OPERATION = Fields(
    "op",
    "With --timeline, one for each call and each kernel that ran.",
    (
        Field("t_ns", "ns", "when it began"),
        Field("dur_ns", "ns", "how long it took"),
        Field("op", "api|kernel", "api: a call"),
        Field("name", "string", "the function or kernel"),
        Field("on", "host|gpu"),
        *PROCESS,
        Field("tid", "integer", when="for a call, or a kernel whose call is known"),
        Field("gpu", "integer", when="for a kernel that ran"),
        Field("queue", "hex", "of the hardware", when="for a kernel that ran"),
        *_CALLED,
        Field("call_ns", "ns", "when the call began", when="for a kernel whose call is known"),
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
        Field("gpu", "integer", "its number in the runtime's list"),
        Field("queue", "hex", "of the hardware"),
        Field("kernel", "string"),
        Field("ts_ns", "ns", f"when it started, {_BOOTTIME}"),
        Field("exec_ns", "ns", "how long it ran"),
        Field("grid", "index", "in blocks"),
        Field("block_dim", "index"),
        Field("shared_bytes", "bytes"),
        *(
            replace(field, when="if its call is known")
            for field in (
                _TID,
                _API,
                Field("call_ns", "ns", "when the call began"),
                Field("latency_ns", "ns", "from then to the start"),
                Field("stream", "hex"),
            )
        ),
    ),
)
DRIVER = Fields(
    "driver",
    "With --why and an AMD GPU: what the GPU's driver did on its own, such as evicting queues.",
    (
        TIME,
        Field("ns", "ns", "how long it took"),
        *(Field(one.name, maybe(one.type), "null if this concerns no single process") for one in PROCESS),
        Field("gpu", "integer"),
        Field("what", "string"),
    ),
)
LISTED = Fields(
    "listed",
    "With --list, a function or a kernel.",
    (
        *(Field(one.name, maybe(one.type), "null for a FILE") for one in PROCESS),
        Field("file", "string?"),
        Field("api", "string", "the function", when="for a function"),
        Field("kernel", "string", when="for a kernel"),
        Field("demangled", "string", when="for a kernel"),
        Field("mangled", "string", when="for a kernel"),
        Field("instrumentable", "boolean"),
        Field("reason", "string?", "why not"),
        Field("launches", "integer?", when="for a kernel"),
    ),
)
_COUNTS = "{integer}"
_SUMMARY = (
    Field("tool", "string"),
    Field("calls", "integer"),
    Field("lost", "integer"),
    Field("duration_ns", "ns"),
    Field("lost_by", having(*(Field(name, "integer") for name in ("records", "sums", "calls", "missed")))),
    *(Field(name, "integer") for name in ("lost_why", "lost_names", "lost_processes")),
    Field("missed", _COUNTS),
    *(Field(name, "integer") for name in ("processes", "nested", "abandoned")),
    Field(
        "libraries",
        many(
            having(
                Field("path", "string"),
                Field("functions", "integer"),
                Field("refused", "{string}"),
                Field("late", having(*PROCESS), when="if a process mapped the library before it had probes"),
            )
        ),
    ),
    Field("host_programs", by_name(having(runs="integer", mean_ns="ns"))),
)
_DEVICES = (
    Field(
        "devices",
        many(
            having(
                gpu="integer",
                name="string",
                architecture="string",
                memory_bytes="bytes",
                compute_units="integer",
            )
        ),
        when="if hip-python finds any",
    ),
    Field(
        "device_times",
        maybe(
            having(
                Field("source", "string"),
                Field("device", "gpu|sim"),
                *(Field(name, "integer") for name in ("dispatches", "lost", "unended")),
                Field("without_call", "integer?"),
                Field("without_name", "integer"),
                Field("unread", "string?"),
            )
        ),
        when="with COMMAND",
    ),
    Field("no_device_times", "string", when="if there are no GPU timestamps"),
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
