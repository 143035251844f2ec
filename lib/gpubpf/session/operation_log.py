"""The operation log of a process: what it asked of the GPU, call by call (docs/timing.md, "The operation log").

    log = OpLog(LogFile(file))
    for record in log.read():            # a structured array: new records, in the order of their positions
        …
    copies = records[records["kind"] == H2D]["copy"]["bytes"]

The file is the agent's. It lies in memory that the traced process can write to, so nothing in it is believed: what comes back is
copied first, then checked; every number in a record may be anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpubpf.session.log_file import HEADER, RECORD, LogFile

# Kinds.
KERNEL, H2D, D2H, D2D, H2H, MEMSET, RECORDED, WAIT, GRAPH, SYNC, API = range(1, 12)
SPAN, CLOCK, NODE, EDGE, FAULT, QUEUE = range(16, 22)
COPIES = (H2D, D2H, D2D, H2H)

# Flags.
GRAPH_NODE = 1  # of a replay: the times of the call are those of the graph launch
SYNCHRONOUS = 2  # the call itself waits
CAPTURED = 4  # it went into a graph: it never ran as such
HOST_CLOCK = 8  # of a span: its times are CUPTI's, on the log's clock
FROM_BEFORE = 16  # of a queue: it was there before the attachment, and may hold work that nobody saw; of an allocation: it was found

# Outcomes of a launch, field "reason" of a kernel; else 1 + number of a reason of the control block (protocol.REASONS).
INSTRUMENTED, NOT_READY, NOT_MATCHED = 0, 254, 255

# What a sync waits for, and what a queue is.
STREAM, EVENT, CONTEXT = range(3)
LEGACY, PER_THREAD, BLOCKING, NON_BLOCKING = range(4)


def _of(size: int, **fields: tuple[Any, int]) -> np.dtype[np.void]:
    """A record of `size` bytes: name = (format, offset)."""
    return np.dtype(
        {
            "names": list(fields),
            "formats": [f[0] for f in fields.values()],
            "offsets": [f[1] for f in fields.values()],
            "itemsize": size,
        }
    )


_LAUNCH: dict[str, tuple[Any, int]] = {
    "slot": ("<u4", 0),
    "reason": ("<u4", 4),
    "grid": (("<u4", 3), 8),
    "block": (("<u4", 3), 20),
    "shared": ("<u4", 32),
    "node": ("<u4", 36),
    "exec": ("<u8", 40),
}
# The last 64 bytes, by kind; each is a field of a record. Those of a queue are `queue_kind` and `priority` (of the record itself).
PARTS: dict[str, np.dtype[np.void]] = {
    "kernel": _of(64, **_LAUNCH, replay=("<u8", 48)),
    "copy": _of(64, bytes=("<u8", 0), destination=("<u8", 8), source=("<u8", 16)),  # a memset, too
    "event": _of(64, event=("<u8", 0), record=("<u8", 8)),  # recorded, waited for
    "graph": _of(
        64, exec=("<u8", 0), replay=("<u8", 8), first=("<u8", 16), kernels=("<u4", 24), others=("<u4", 28)
    ),
    "sync": _of(64, what=("<u4", 0), event=("<u8", 8), record=("<u8", 16)),
    # An allocation: the epoch from which it holds (modulo 2^32); a free: the last in which what it frees is there.
    "api": _of(
        64, function=("<u4", 0), epoch=("<u4", 4), bytes=("<u8", 8), name=("S40", 16), address=("<u8", 56)
    ),
    "span": _of(64, of=("<u8", 0), start=("<u8", 8), end=("<u8", 16), error_ns=("<u4", 24)),
    "clock": _of(
        64,
        host_before=("<u8", 0),
        gpu=("<u8", 8),
        host_after=("<u8", 16),
        clock64=("<u8", 24),
        sm=("<u4", 32),
        tick_ns=("<u4", 36),
    ),
    "node": _of(64, **_LAUNCH, handle=("<u8", 48)),
    "edge": _of(64, exec=("<u8", 0), before=("<u4", 8), after=("<u4", 12)),
    "fault": _of(64, error=("<i4", 0)),
}
DTYPE = np.dtype(
    {
        "names": [
            *("mark", "id", "kind", "flags", "thread", "call_ns", "return_ns"),
            *("stream", "queue", "context", "result", "stack", "queue_kind", "priority", *PARTS),
        ],
        "formats": [
            *("<u8", "<u8", "<u2", "<u2", "<u4", "<u8", "<u8"),
            *("<u8", "<u4", "<u4", "<i4", "<u4", "<u4", "<i4", *PARTS.values()),
        ],
        "offsets": [0, 8, 16, 18, 20, 24, 32, 40, 48, 52, 56, 60, 64, 68, *[64] * len(PARTS)],
        "itemsize": RECORD,
    }
)
Records = npt.NDArray[np.void]


class OpLog:
    """Reads a log."""

    def __init__(self, file: LogFile) -> None:
        self.capacity = file.capacity
        self._header = np.frombuffer(file.map, dtype="<u8", count=HEADER // 8)
        self._records = np.frombuffer(file.map, dtype="<u8", offset=HEADER).reshape(
            self.capacity, RECORD // 8
        )
        self._next = 0  # position; the file's own is for the agent, and may say anything

    @property
    def lost(self) -> int:
        """Operations that found no room."""
        return int(self._header[16])

    def read(self, ended: bool = False) -> Records:
        """The records that came since, complete ones only, as an array of `DTYPE`; then the agent may use their room.

        `ended`: the process is gone. Then what it never completed is passed over, and nothing else will come."""
        reserved = int(self._header[8])
        available = min((reserved - self._next) % (1 << 64), self.capacity)
        at = self._next % self.capacity
        first = min(available, self.capacity - at)
        parts = (self._records[at : at + first], self._records[: available - first])
        marks = np.concatenate([part[:, 0] for part in parts])  # before the rest: a mark is written last
        complete = marks == np.arange(self._next + 1, self._next + 1 + available, dtype=np.uint64)
        if not ended:
            unfinished = np.flatnonzero(~complete)
            available = int(unfinished[0]) if len(unfinished) else available
        copied = np.concatenate(parts)[:available]
        if ended:
            copied = copied[complete]
        self._next += available
        self._header[24] = self._next
        return copied.view(DTYPE).reshape(-1)
