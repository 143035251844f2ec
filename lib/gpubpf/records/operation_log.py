"""Read the operation log of a process: each GPU operation that it requested (docs/timing.md, "The operation log").

    log = OpLog(LogFile(file))
    for record in log.read():            # a structured array of new records, in order of position
        …
    copies = records[records["kind"] == H2D]["copy"]["bytes"]

The traced process can write to the file, so its contents are untrusted. Records are copied before they are checked, and any number in
a record may have any value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gpubpf.agent import definitions
from gpubpf.agent.definitions import Field, Kind, Outcome, QueueKind, RecordFlag, SyncTarget
from gpubpf.records.log_file import HEADER, RECORD, LogFile

# fmt: off
(
    KERNEL, H2D, D2H, D2D, H2H, MEMSET, RECORDED, WAIT, GRAPH, SYNC, API, HOST_FUNCTION, SPAN, CLOCK, NODE, EDGE, FAULT, QUEUE,
) = (kind.value for kind in Kind)
# fmt: on
COPIES = (H2D, D2H, D2D, H2H)
GRAPH_NODE, SYNCHRONOUS, CAPTURED, HOST_CLOCK, FROM_BEFORE, BY_ROCR, HOST_MEMORY, BATCH, ORDER, NOT_CHOSEN = (
    flag.value for flag in RecordFlag
)
INSTRUMENTED, NOT_READY, NOT_MATCHED = (outcome.value for outcome in Outcome)
STREAM, EVENT, CONTEXT, OPERATION = (target.value for target in SyncTarget)
LEGACY, PER_THREAD, BLOCKING, NON_BLOCKING = (kind.value for kind in list(QueueKind)[:4])

_NUMPY = {"u64": "<u8", "u32": "<u4", "u16": "<u2", "i32": "<i4"}


def _dtype(fields: Iterable[tuple[str, Any, int]], size: int) -> np.dtype[np.void]:
    """Return the type of a structure of `size` bytes; `fields` are (name, format, offset)."""
    names, formats, offsets = zip(*fields, strict=True)
    return np.dtype(
        {"names": list(names), "formats": list(formats), "offsets": list(offsets), "itemsize": size}
    )


def _field(field: Field, offset: int) -> tuple[str, Any, int]:
    if field.type == "char":
        return field.name, f"S{field.count}", offset
    plain = _NUMPY[field.type]
    return field.name, (plain, field.count) if field.count > 1 else plain, offset


def _record_fields() -> Iterator[tuple[str, Any, int]]:
    header = [_field(field, at) for field, at in definitions.header_offsets()]
    yield from header
    size = definitions.RECORD_SIZE - definitions.PART_OFFSET
    for part in definitions.PARTS:
        fields = [_field(field, at) for field, at in part.offsets()]
        # For the queue part, the record's fields are the part's own fields.
        if part.name in (name for name, _, _ in header):
            yield from ((name, kind, definitions.PART_OFFSET + at) for name, kind, at in fields)
        else:
            yield part.name, _dtype(fields, size), definitions.PART_OFFSET


# A record: the fields of all kinds, and a structure for each kind in the last 64 bytes, such as `records["copy"]["bytes"]`.
DTYPE = _dtype(_record_fields(), definitions.RECORD_SIZE)
Records = npt.NDArray[np.void]
_RESERVED, _LOST, _CONSUMED = (
    definitions.LOG_HEADER.offset(name) // 8 for name in ("reserved", "lost", "consumed")
)


class OpLog:
    """Reads the records of a log. One thread at a time may use it; see `TracedProcess.read_log`."""

    def __init__(self, file: LogFile) -> None:
        self.capacity = file.capacity
        self._header = np.frombuffer(file.map, dtype="<u8", count=HEADER // 8)
        self._records = np.frombuffer(file.map, dtype="<u8", offset=HEADER).reshape(
            self.capacity, RECORD // 8
        )
        self._next = 0  # position of the next record; the header's value is untrusted

    @property
    def lost(self) -> int:
        """Operations that were not logged because the log was full."""
        return int(self._header[_LOST])

    def read(self, ended: bool = False) -> Records:
        """Return the new complete records as an array of `DTYPE`, and let the agent reuse their space.

        ended: the process has ended, so incomplete records are skipped, and no records will follow."""
        reserved = int(self._header[_RESERVED])
        available = min((reserved - self._next) % (1 << 64), self.capacity)
        at = self._next % self.capacity
        first = min(available, self.capacity - at)
        parts = (self._records[at : at + first], self._records[: available - first])
        # Read the marks first, because the agent writes them last.
        marks = np.concatenate([part[:, 0] for part in parts])
        complete = marks == np.arange(self._next + 1, self._next + 1 + available, dtype=np.uint64)
        if not ended:
            unfinished = np.flatnonzero(~complete)
            available = int(unfinished[0]) if len(unfinished) else available
        copied = np.concatenate(parts)[:available]
        if ended:
            copied = copied[complete]
        self._next += available
        self._header[_CONSUMED] = self._next
        return copied.view(DTYPE).reshape(-1)
