#!/usr/bin/env python3
"""The constants that the tool and the agent share: message numbers, flags, states and the layout of operation log records.

This is the only place that defines them. Python imports it; `make` turns it into the C++ header that the agent includes:

    definitions.py > definitions.h

`definitions.py --markdown` prints the table of log records in docs/timing.md, which a test compares.

It imports only the standard library, because it also runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag

PROTOCOL_VERSION = 6
FRAME_LIMIT = 64 << 20  # bytes of a message
SLOTS = 16384  # distinct kernel names of a process; all further names share the last slot
NO_FIELD = 0xFFFFFFFF  # an offset in the launch block: the field does not exist
NO_SLOT = 0xFFFFFFFF  # slot of a kernel whose name is unknown
NO_FUNCTION = 0xFFFFFFFF  # function of a call that is not in the agent's table
NO_RECORD = 0xFFFFFFFFFFFFFFFF  # awaited record of an event that has completed or was never recorded

# --- messages -------------------------------------------------------------------------------------------------


class Message(IntEnum):
    """The type of a frame. "+ file": a file descriptor comes with it."""

    # From the agent to the tool.
    HELLO = 1  # + control block
    IMAGE = 2  # + module image
    NAME = 3
    REFUSED = 4
    SNAPSHOT = 5  # + map memory
    DRAINED = 6
    HOOKED = 7
    MARKER = 8  # + file with the host program's stub
    LOG = 9  # + operation log
    RING = 10  # + data file, if the ring is in host memory
    STACK = 11
    CONTEXT = 12
    PATCHES = 13  # + list of patches, for the tool to apply while the process is stopped
    FOUND = 14  # a module that was loaded before the agent; the tool answers with SIDECAR
    READY = 15  # the copies of a SIDECAR that answers FOUND, or of an AHEAD, are in each context that can have them
    # From the tool to the agent.
    WELCOME = 16
    SIDECAR = 17  # + image
    DRAIN = 18
    WORKING = 19  # the tool is working on an image; sent every second
    SHARED = 20  # + file of a shared map; before WELCOME
    CONSUMED = 21  # how far the tool has read a ring in GPU memory
    PATCHED = 22  # the patches are applied
    AHEAD = 23  # + image: the sidecar of a module that may have been loaded before the agent, and not launched since


class WelcomeFlag(IntFlag):
    """What the tool asks for in WELCOME."""

    MEMORY_IS_ZERO = 1
    STAMPS = 2
    STACKS = 4
    GRAPHS = 8
    MATCH_ALL = 16
    ALLOCATION_STACKS = 32


class DrainFlag(IntFlag):
    """STOP: instrument no more launches. ONLY_RINGS: read only rings in GPU memory."""

    STOP = 1
    ONLY_RINGS = 2


class SnapshotFlag(IntFlag):
    """CLOSED: the context is being destroyed. RUNNING: kernels were still running. FAILED: memory could not be read.
    OF_RINGS: only rings were read."""

    CLOSED = 1
    RUNNING = 2
    FAILED = 4
    OF_RINGS = 8


class FoundFlag(IntFlag):
    """ALL_NAMES: the message names every kernel of the module."""

    ALL_NAMES = 1


class Unit(IntEnum):
    """What a map has one value for. SITE: each site of a kernel, for all launch shapes together, in one shard per multiprocessor."""

    CONTEXT = 0
    THREAD = 1
    WARP = 2
    BLOCK = 3
    INSTANCE = 4
    SITE = 5


class Place(IntEnum):
    """Where a map is stored. HOST_RING: control block in GPU memory, records in a file that the tool maps. GPU_RING: in GPU memory.
    SHARED: in a file of the tool that the GPU can access, too. HOST: in a file of the tool that only the host program can access."""

    GPU = 0
    HOST_RING = 1
    GPU_RING = 2
    SHARED = 3
    HOST = 4


class HostPoint(IntEnum):
    """Where a host program runs in the traced process."""

    LAUNCH = 0
    OPERATION = 1


class HostArgument(IntEnum):
    """The kind of an argument of a host program's machine code, and what its value is. CONTEXT: number of a context field. MAP_BASE:
    number of a map in a shared file. PARAM: offset in the parameter bytes. HELPER: number of a helper, as in bpf.h."""

    CONTEXT = 0
    MAP_BASE = 1
    PARAM = 2
    HELPER = 3


class AttachStatus(IntEnum):
    """What `gpubpf_attach` returns."""

    ATTACHED = 0
    NO_DRIVER = 1  # the process has not loaded libcuda.so.1
    IN_USE = 2  # another tool traces the process
    FAILED = 3  # the agent has sent the reason, if it could
    ENDING = 4  # the agent has not finished detaching from the previous tool


# --- counters of launches ---------------------------------------------------------------------------------------


class Reason(IntEnum):
    """Why a launch ran the original kernel. REFUSED: the sidecar or a REFUSED message gives the reason."""

    SAMPLED_OUT = 0
    FILTERED = 1
    CAPTURE = 2
    MAP_TOO_SMALL = 3
    OCCUPANCY = 4
    REFUSED = 5
    LAUNCH_FAILED = 6  # the driver did not accept the instrumented copy
    LEGACY_LAUNCH = 7  # cuLaunch, cuLaunchGrid


REASONS = 16  # counters that each kernel name reserves for reasons


class Outcome(IntEnum):
    """The result of instrumenting a launch, in its log record; values between the first two are 1 + Reason."""

    INSTRUMENTED = 0
    NOT_READY = 254  # the instrumented copy was not ready yet
    NOT_MATCHED = 255  # the user did not ask for the kernel, or the tool has not answered yet


# --- the operation log ------------------------------------------------------------------------------------------


class Kind(IntEnum):
    """The kind of a log record."""

    KERNEL = 1
    H2D = 2
    D2H = 3
    D2D = 4
    H2H = 5
    MEMSET = 6
    RECORDED = 7
    WAIT = 8
    GRAPH = 9
    SYNC = 10
    API = 11
    SPAN = 16
    CLOCK = 17
    NODE = 18
    EDGE = 19
    FAULT = 20
    QUEUE = 21


class RecordFlag(IntFlag):
    """GRAPH_NODE: part of a graph replay; the call's times are those of the graph launch. SYNCHRONOUS: the call itself waits.
    CAPTURED: the operation was captured into a graph and did not run by itself. HOST_CLOCK: a span with CUPTI's times, on the log's
    clock. FROM_BEFORE: the stream or allocation existed before the agent; such a stream may hold work that was not seen."""

    GRAPH_NODE = 1
    SYNCHRONOUS = 2
    CAPTURED = 4
    HOST_CLOCK = 8
    FROM_BEFORE = 16


class SyncTarget(IntEnum):
    """What the host waits for."""

    STREAM = 0
    EVENT = 1
    CONTEXT = 2


class QueueKind(IntEnum):
    """What kind of stream a queue is."""

    LEGACY = 0
    PER_THREAD = 1
    BLOCKING = 2
    NON_BLOCKING = 3


@dataclass(frozen=True)
class Field:
    """A field of a log record. type: one of `SIZES`; count: elements, 1 for a plain field."""

    type: str
    name: str
    count: int = 1
    about: str = ""


SIZES = {"u64": 8, "u32": 4, "u16": 2, "i32": 4, "char": 1}
_C_TYPES = {"u64": "uint64_t", "u32": "uint32_t", "u16": "uint16_t", "i32": "int32_t", "char": "char"}

RECORD_SIZE = 128
PART_OFFSET = 64
HEADER = (
    Field("u64", "mark", about="position + 1, written last"),
    Field("u64", "id"),
    Field("u16", "kind"),
    Field("u16", "flags"),
    Field("u32", "thread"),
    Field("u64", "call_ns", about="of the driver call, on the clock in the log's header"),
    Field("u64", "return_ns"),
    Field("u64", "stream", about="the handle as the application gave it"),
    Field("u32", "queue", about="the agent's number of the stream, because handles are reused"),
    Field("u32", "context", about="its serial number; a snapshot has its GPU"),
    Field("i32", "result", about="CUresult"),
    Field("u32", "stack", about="number of a host stack, 0 for none"),
)
_LAUNCH = (
    Field("u32", "slot", about="kernel name; ~0: never seen"),
    Field(
        "u32",
        "reason",
        about="an outcome: 0 instrumented, 254 copy not ready, 255 not matched, else 1 + reason",
    ),
    Field("u32", "grid", 3),
    Field("u32", "block", 3),
    Field("u32", "shared"),
    Field("u32", "node"),
    Field("u64", "exec"),
)


@dataclass(frozen=True)
class Part:
    """The last 64 bytes of records of these kinds."""

    name: str
    kinds: tuple[Kind, ...]
    about: str
    fields: tuple[Field, ...]

    def offsets(self) -> Iterator[tuple[Field, int]]:
        """Each field with its offset in the part: naturally aligned, as in C."""
        return _placed(self.fields)


PARTS = (
    Part(
        "kernel",
        (Kind.KERNEL,),
        "a launch; with flag GRAPH_NODE, one kernel node's part of a replay, whose call times are those of the graph launch",
        (*_LAUNCH, Field("u64", "replay")),
    ),
    Part(
        "copy",
        (Kind.H2D, Kind.D2H, Kind.D2D, Kind.H2H, Kind.MEMSET),
        "a copy or a memset",
        (Field("u64", "bytes"), Field("u64", "destination"), Field("u64", "source")),
    ),
    Part(
        "event",
        (Kind.RECORDED, Kind.WAIT),
        "an event is recorded, or a stream waits for one",
        (
            Field("u64", "event", about="its handle"),
            Field(
                "u64",
                "record",
                about="of a wait: id of the record operation; 0: unknown, ~0: the event has completed or was never recorded",
            ),
        ),
    ),
    Part(
        "graph",
        (Kind.GRAPH,),
        "a graph launch",
        (
            Field("u64", "exec", about="serial number of the executable graph"),
            Field("u64", "replay", about="from 1"),
            Field("u64", "first", about="id of the first kernel node"),
            Field("u32", "kernels", about="kernel nodes"),
            Field("u32", "others", about="other nodes"),
        ),
    ),
    Part(
        "sync",
        (Kind.SYNC,),
        "the host waits",
        (
            Field("u32", "what", about="0 stream, 1 event, 2 context"),
            Field("u64", "event", about="its handle"),
            Field("u64", "record", about="id of the record operation"),
        ),
    ),
    Part(
        "api",
        (Kind.API,),
        "any other call that is logged, such as an allocation, a free or a host function",
        (
            Field("u32", "function", about="number in the agent's table; ~0: none"),
            Field(
                "u32",
                "epoch",
                about="of an allocation: the first in which it exists, modulo 2^32; of a free: the last",
            ),
            Field("u64", "bytes"),
            Field("char", "name", 40),
            Field("u64", "address", about="of an allocation or free that the driver did"),
        ),
    ),
    Part(
        "span",
        (Kind.SPAN,),
        "device times of an operation, from timing events or, with flag HOST_CLOCK, from CUPTI",
        (
            Field("u64", "of", about="id of the operation"),
            Field("u64", "start", about="ns on the agent's event clock; 0: unknown"),
            Field("u64", "end"),
            Field("u32", "error_ns"),
        ),
    ),
    Part(
        "clock",
        (Kind.CLOCK,),
        "one bracket of the GPU's clock",
        (
            Field("u64", "host_before"),
            Field("u64", "gpu", about="globaltimer"),
            Field("u64", "host_after"),
            Field("u64", "clock64"),
            Field("u32", "sm"),
            Field("u32", "tick_ns", about="0: unknown"),
        ),
    ),
    Part(
        "node",
        (Kind.NODE,),
        "a kernel node of an executable graph, when the graph is made",
        (*_LAUNCH, Field("u64", "handle")),
    ),
    Part(
        "edge",
        (Kind.EDGE,),
        "in that graph, kernel node `after` runs after `before`",
        (
            Field("u64", "exec"),
            Field("u32", "before", about="index of a kernel node; the path may lead through other nodes"),
            Field("u32", "after"),
        ),
    ),
    Part("fault", (Kind.FAULT,), "the context broke", (Field("i32", "error"),)),
    Part(
        "queue",
        (Kind.QUEUE,),
        "a stream was first seen",
        (
            Field("u32", "queue_kind", about="0 legacy, 1 per-thread default, 2 blocking, 3 non-blocking"),
            Field("i32", "priority"),
        ),
    ),
)


def _placed(fields: Iterable[Field]) -> Iterator[tuple[Field, int]]:
    at = 0
    for field in fields:
        size = SIZES[field.type]
        at = -(-at // size) * size
        yield field, at
        at += size * field.count


def header_offsets() -> Iterator[tuple[Field, int]]:
    """Each field that all records have, with its offset."""
    return _placed(HEADER)


# --- the C++ header and the table in the documentation ------------------------------------------------------------

# Python's enum → (its name in C++, underlying type). Flags and counters are unscoped: `kStop`; the others scoped: `Message::Hello`.
_SCOPED = {
    Message: "uint32_t",
    Unit: "uint32_t",
    Place: "uint32_t",
    HostPoint: "uint32_t",
    HostArgument: "uint32_t",
    AttachStatus: "int",
    Kind: "uint16_t",
    SyncTarget: "uint32_t",
    QueueKind: "uint32_t",
}
_UNSCOPED = {
    WelcomeFlag: "uint32_t",
    DrainFlag: "uint32_t",
    SnapshotFlag: "uint32_t",
    FoundFlag: "uint32_t",
    Reason: "uint32_t",
    Outcome: "uint32_t",
    RecordFlag: "uint16_t",
}
_CONSTANTS = {
    "PROTOCOL_VERSION": "uint32_t",
    "FRAME_LIMIT": "uint32_t",
    "SLOTS": "uint32_t",
    "NO_FIELD": "uint32_t",
    "NO_SLOT": "uint32_t",
    "NO_FUNCTION": "uint32_t",
    "NO_RECORD": "uint64_t",
    "REASONS": "uint32_t",
}


def _camel(name: str) -> str:
    """``MAP_TOO_SMALL`` → ``MapTooSmall``; ``H2D`` stays."""
    return "".join(word if any(c.isdigit() for c in word) else word.capitalize() for word in name.split("_"))


def _declaration(field: Field) -> str:
    return f"{_C_TYPES[field.type]} {field.name}{f'[{field.count}]' if field.count > 1 else ''};"


def cpp() -> str:
    """Return the text of definitions.h."""
    out = ["// Made by definitions.py, which is the place to change.", "#pragma once", ""]
    out += ["#include <cstddef>", "#include <cstdint>", "", "namespace gpubpf {", ""]
    for name, type_ in _CONSTANTS.items():
        suffix = "ull" if type_ == "uint64_t" else "u"
        out.append(f"constexpr {type_} k{_camel(name)} = {globals()[name]}{suffix};")
    for enums, head, prefix in ((_SCOPED, "enum class", ""), (_UNSCOPED, "enum", "k")):
        for enum, type_ in enums.items():
            members = ", ".join(f"{prefix}{_camel(member.name)} = {member.value}" for member in enum)
            out += ["", f"{head} {enum.__name__} : {type_} {{ {members} }};"]
    for part in PARTS:
        fields = " ".join(_declaration(field) for field in part.fields)
        out += ["", f"struct {_camel(part.name)}Part {{ {fields} }};"]
    out += ["", "struct Record {"]
    for field in HEADER:
        line = _declaration(field)
        out.append("  Kind kind{};" if field.name == "kind" else f"  {line[:-1]} = 0;")
    out += ["  union {", "    uint64_t part[8] = {};"]
    out += [f"    {_camel(part.name)}Part {_member(part)};" for part in PARTS]
    out += ["  };", "};", f"static_assert(sizeof(Record) == {RECORD_SIZE});"]
    out += [f"static_assert(offsetof(Record, {f.name}) == {at});" for f, at in header_offsets()]
    out.append(f"static_assert(offsetof(Record, part) == {PART_OFFSET});")
    for part in PARTS:
        out += [
            f"static_assert(offsetof({_camel(part.name)}Part, {f.name}) == {at});" for f, at in part.offsets()
        ]
    return "\n".join([*out, "", "}  // namespace gpubpf", ""])


def _member(part: Part) -> str:
    """The part's name in `struct Record`, where all records have a field `queue`."""
    return f"{part.name}_part" if any(field.name == part.name for field in HEADER) else part.name


def markdown() -> str:
    """Return the tables of log records as they stand in the documentation."""
    rows = ["| kind | what it records | fields, each with its offset |", "|---|---|---|"]
    for part in PARTS:
        kinds = ", ".join(f"{kind.value} {kind.name.lower()}" for kind in part.kinds)
        rows.append(
            f"| {kinds} | {part.about} | {'; '.join(_described(f, at) for f, at in part.offsets())} |"
        )
    rows += ["", "| flag | meaning |", "|---|---|"]
    meanings = dict(_MEANING.findall(" ".join((RecordFlag.__doc__ or "").split())))
    rows += [f"| {flag.value} {flag.name} | {meanings[flag.name or '']} |" for flag in RecordFlag]
    return "\n".join(rows) + "\n"


_MEANING = re.compile(r"([A-Z_]{3,}): (.*?)\.(?= [A-Z_]{3,}:|$)")


def _described(field: Field, at: int) -> str:
    count = f"[{field.count}]" if field.count > 1 else ""
    about = f" ({field.about})" if field.about else ""
    return f"{field.type} {field.name}{count} at {PART_OFFSET + at}{about}"


if __name__ == "__main__":
    sys.stdout.write(markdown() if "--markdown" in sys.argv else cpp())
