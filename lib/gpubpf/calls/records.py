"""Turn events into records of type "call": arguments, result, latency, and what the thread did meanwhile.

There may be very many calls. So `group_calls` groups calls that have the same fields, with one column per field,
and C code can format the lines (call_lines.py). `call_records` makes a dictionary for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf.calls import arrays
from gpubpf.calls.call_fields import CALL, SPENT
from gpubpf.calls.statistics import NameOrAddress
from gpubpf.names import KernelName
from gpubpf.record import Record

if TYPE_CHECKING:
    from gpubpf.calls.api import Api, ApiFunction

    NameOf: TypeAlias = Callable[[int, int], NameOrAddress]  # of a process and a handle

CHUNK = 1 << 13  # calls to format together
# Indexed by hipMemcpyKind or cudaMemcpyKind; further kinds leave the direction to the runtime.
COPIES = next(field.schema["enum"] for field in CALL.fields if field.name == "copy")
HEX = tuple(field.name for field in CALL.fields if field.type == "hex")
SHAPES = tuple(field.name for field in CALL.fields if field.type == "index")


class CallGroup(Record):
    """Calls of one function that have the same fields.

    positions: the calls' positions among the events.
    fields: the fields of the record "call" in order, without `type`, each with a sequence of values: numbers
        (also for HEX) or strings. Exceptions: `api` is one string; each of SHAPES has three sequences, x, y and
        z; `spent_ns` has a sequence for each reason.
    """

    positions: Sequence[int]
    fields: Mapping[str, Any]


def in_call_order(parts: Iterable[tuple[Sequence[int], Iterable[Any]]]) -> list[Any]:
    """Return the items of several groups in the order of the events. Each part has a group's positions and its
    items.
    """
    positions: list[int] = []
    items: list[Any] = []
    for some_positions, some_items in parts:
        positions += some_positions
        items += some_items
    return [items[index] for index in np.argsort(positions).tolist()]


def format_calls(
    events: Any, api: Api, name_of: NameOf, lines_of: Callable[[CallGroup], Iterable[str]]
) -> Iterator[str]:
    """Format all events with `lines_of`, and yield the lines of up to CHUNK calls at a time as one string."""
    for at in range(0, len(events), CHUNK):
        groups = group_calls(events[at : at + CHUNK], api, name_of)
        yield "".join(in_call_order((group.positions, lines_of(group)) for group in groups))


def call_records(events: Any, api: Api, name_of: NameOf) -> list[dict[str, Any]]:
    """Return the record "call" of each event of `CallProbes.events`, in the same order."""
    return in_call_order((group.positions, _records(group)) for group in group_calls(events, api, name_of))


def _records(group: CallGroup) -> Iterator[dict[str, Any]]:
    columns: list[Iterable[Any]] = []
    for name, values in group.fields.items():
        if name == "api":
            columns.append(repeat(values, len(group.positions)))
        elif name in HEX:
            columns.append(map("%#x".__mod__, values))
        elif name in SHAPES:
            columns.append(map(list, zip(*values, strict=True)))
        elif name == "spent_ns":
            times = zip(*values.values(), strict=True)
            columns.append([dict(zip(values, one, strict=True)) for one in times])
        else:
            columns.append(values)
    for record in zip(*columns, strict=True):
        yield {"type": "call"} | dict(zip(group.fields, record, strict=True))


def map_distinct(make: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """Apply `make` to each value, calling it only once for equal values."""
    known = {value: make(value) for value in set(values)}
    return [known[value] for value in values]


def group_calls(events: Any, api: Api, name_of: NameOf) -> Iterator[CallGroup]:
    """Group the events of `CallProbes.events` by function, and by the fields that their records have."""
    for number in np.unique(events["function"]).tolist():
        positions = np.flatnonzero(events["function"] == number)
        yield from _group_by_fields(api, api.functions[number], events[positions], positions, name_of)


def _group_by_fields(
    api: Api, function: ApiFunction, events: Any, positions: Any, name_of: NameOf
) -> Iterator[CallGroup]:
    columns, applies = _columns(function, events)
    kinds = np.zeros(len(events), np.int64)
    for bit, there in enumerate(applies.values()):
        kinds |= there.astype(np.int64) << bit
    for kind in np.unique(kinds).tolist():
        some = np.flatnonzero(kinds == kind)
        known = {name for bit, name in enumerate(applies) if kind >> bit & 1}
        found = {
            name: column[some].T.tolist()
            for name, column in columns.items()
            if name not in applies or name in known
        }
        yield CallGroup(positions[some].tolist(), _fields(api, function, found, name_of))


def _columns(function: ApiFunction, events: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of the fields, and for fields that only some calls have, which calls have them.

    The keys are fields of the record and names of SPENT. Fields that become strings are still numbers here. The
    second dictionary also has entries for a stream or shared memory of 0, so that such calls form separate
    groups: text output omits these fields.
    """
    spent, kernel = events["spent"], events["kernel"]
    comm = np.ascontiguousarray(events["comm"]).view("S16").reshape(len(events))
    gap = events["gap_ns"].astype(np.int64)
    columns = {"ts_ns": events["start_ns"], "pid": events["tgid"], "comm": comm, "tid": events["tid"]}
    columns["cgroup_id"] = events["cgroup"]
    applies = {"kernel": kernel != 0, "gap_ns": (events["after"] != 0) & (gap >= 0)}
    if function.result != "other":
        columns["ret"] = (events["result"] & np.uint64(0xFFFFFFFF)).astype("<u4").view("<i4")
        columns["error"], applies["error"] = columns["ret"], events["failed"] != 0
    columns["lat_ns"] = events["end_ns"] - events["start_ns"]
    columns["off_cpu_ns"] = arrays.off_ns(spent)
    columns["kernel"] = kernel
    for field, key in (("grid", "grid"), ("block", "block_dim")):
        if (shape := arrays.shapes(function, events, field)) is not None:
            columns[key] = shape
    for field, key in (("shared", "shared_bytes"), ("stream", "stream")):
        if (values := arrays.values(function, events, field)) is not None:
            columns[key], applies[f"{key} is not 0"] = values, values != 0
    if (size := arrays.values(function, events, "bytes")) is not None:
        count = arrays.values(function, events, "count")
        columns["bytes"] = size if count is None else size * count
    if (copied := arrays.values(function, events, "copy")) is not None:
        columns["copy"], applies["copy"] = copied, copied < len(COPIES)
    if "out" in function.places:
        columns["out"], applies["out"] = events["out"], events["failed"] == 0
    columns["gap_ns"] = gap
    for key, field in SPENT.items():
        columns[key], applies[key] = spent[field], spent[field] != 0
    columns["page_faults"], applies["page_faults"] = spent["faults"], spent["faults"] != 0
    return columns, applies


def _fields(
    api: Api, function: ApiFunction, columns: Mapping[str, list[Any]], name_of: NameOf
) -> dict[str, Any]:
    """Return the fields of a `CallGroup`."""

    def named(whose: tuple[int, int]) -> str:
        name = name_of(*whose)
        return name.short if isinstance(name, KernelName) else name or f"{whose[1]:#x}"

    fields: dict[str, Any] = {}
    for name, values in columns.items():
        if name == "comm":
            fields[name] = map_distinct(lambda c: c.partition(b"\0")[0].decode("utf-8", "replace"), values)
        elif name == "cgroup_id":
            fields |= {name: values, "api": function.name}
        elif name == "error":
            fields[name] = map_distinct(lambda value: api.error(function, value), values)
        elif name == "kernel":
            fields[name] = map_distinct(named, list(zip(columns["pid"], values, strict=True)))
            fields["fn_addr"] = values
        elif name == "copy":
            fields[name] = map_distinct(COPIES.__getitem__, values)
        elif name in SPENT:
            fields.setdefault("spent_ns", {})[name] = values
        else:
            fields[name] = values
    return fields
