"""Each call as a record: what it was given and gave, how long it took, what its thread did meanwhile.

There may be very many: `groups` has those together of which the same is known, with a column for each field of their records, so that
lines are made by C code (show.py); `calls` makes a dictionary of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf.calls import arrays
from gpubpf.calls.sums import Kernel
from gpubpf.names import Name

if TYPE_CHECKING:
    from gpubpf.calls.api import Api, Function

    NameOf: TypeAlias = Callable[[int, int], Kernel]

CHUNK = 1 << 13  # calls that are made lines together
COPIES = (
    "h2h",
    "h2d",
    "d2h",
    "d2d",
)  # hipMemcpyKind, cudaMemcpyKind; another number leaves it to the addresses
SPENT = {
    "preempted": "preempted_ns",
    "blocked": "blocked_ns",
    "block_io": "io_ns",
    "page_fault": "fault_ns",
    "reclaim": "reclaim_ns",
}
HEX = ("fn_addr", "stream", "out")
SHAPES = ("grid", "block_dim")


@dataclass(frozen=True)
class Group:
    """Calls of one function. `places`: where they are among the events. `fields`: of the record "call", in order, but for its type; of
    each a value for each call: a number, also of HEX, or a text; one text for all of `api`; three lists of SHAPES, x, y, z; of
    `spent_ns` a list by reason."""

    places: Sequence[int]
    fields: Mapping[str, Any]


def in_order(parts: Iterable[tuple[Sequence[int], Iterable[Any]]]) -> list[Any]:
    """What was made of groups, with their places, in the order of the events."""
    places: list[int] = []
    made: list[Any] = []
    for there, some in parts:
        places += there
        made += some
    return [made[place] for place in np.argsort(places).tolist()]


def texts(
    events: Any, api: Api, name_of: NameOf, lines_of: Callable[[Group], Iterable[str]]
) -> Iterator[str]:
    """What `lines_of` makes of all, CHUNK calls in a text."""
    for at in range(0, len(events), CHUNK):
        some = groups(events[at : at + CHUNK], api, name_of)
        yield "".join(in_order((group.places, lines_of(group)) for group in some))


def calls(events: Any, api: Api, name_of: NameOf) -> list[dict[str, Any]]:
    """The record "call" of each of `Calls.events`, in their order."""
    return in_order((group.places, _records(group)) for group in groups(events, api, name_of))


def _records(group: Group) -> Iterator[dict[str, Any]]:
    columns: list[Iterable[Any]] = []
    for name, values in group.fields.items():
        if name == "api":
            columns.append(repeat(values, len(group.places)))
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


def each(make: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """`make` of each value, called once for those that are equal."""
    known = {value: make(value) for value in set(values)}
    return [known[value] for value in values]


def groups(events: Any, api: Api, name_of: NameOf) -> Iterator[Group]:
    """Of `Calls.events`, by function and by which fields there are."""
    for number in np.unique(events["function"]).tolist():
        places = np.flatnonzero(events["function"] == number)
        yield from _groups(api, api.functions[number], events[places], places, name_of)


def _groups(api: Api, function: Function, events: Any, places: Any, name_of: NameOf) -> Iterator[Group]:
    """Of one function."""
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
        yield Group(places[some].tolist(), _fields(api, function, found, name_of))


def _columns(function: Function, events: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays by field of the record, or by a name of SPENT; and of those that not all calls have, which do. Texts are still numbers
    here. Groups do not differ in whether a stream or shared memory is 0 either, as lines for people leave that out."""
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
    api: Api, function: Function, columns: Mapping[str, list[Any]], name_of: NameOf
) -> dict[str, Any]:
    """Of a group, as `Group` has them."""

    def named(whose: tuple[int, int]) -> str:
        name = name_of(*whose)
        return name.short if isinstance(name, Name) else name or f"{whose[1]:#x}"

    fields: dict[str, Any] = {}
    for name, values in columns.items():
        if name == "comm":
            fields[name] = each(lambda c: c.partition(b"\0")[0].decode("utf-8", "replace"), values)
        elif name == "cgroup_id":
            fields |= {name: values, "api": function.name}
        elif name == "error":
            fields[name] = each(lambda value: api.error(function, value), values)
        elif name == "kernel":
            fields[name] = each(named, list(zip(columns["pid"], values, strict=True)))
            fields["fn_addr"] = values
        elif name == "copy":
            fields[name] = each(COPIES.__getitem__, values)
        elif name in SPENT:
            fields.setdefault("spent_ns", {})[name] = values
        else:
            fields[name] = values
    return fields
