"""Check and map the file of an operation log. This module avoids NumPy, whose import takes longer than attaching.

operation_log.py reads the records. The traced process can write to the file, so its contents are untrusted.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from gpubpf.agent.definitions import LOG_HEADER, LOG_LIMIT, RECORD_SIZE
from gpubpf.errors import SessionError

HEADER = LOG_HEADER.size
RECORD = RECORD_SIZE


class LogFile:
    """Maps the file of an operation log, and takes ownership of it. Raises SessionError if it is not a valid log, and OSError if
    resources run out.

    virtual: its times are from the embedded device's virtual clock. capacity: in records."""

    def __init__(self, file: int) -> None:
        try:
            self.map, self.capacity, self.virtual = _map(file)
        finally:
            os.close(file)

    @property
    def begun(self) -> int:
        """The number of records ever started, modulo 2^64, according to the process."""
        return LOG_HEADER.value(self.map, "reserved")


def _map(file: int) -> tuple[mmap.mmap, int, bool]:
    wrong = SessionError("a traced process sent an invalid log; it is no longer traced")
    try:
        size = os.fstat(file).st_size
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
        header = os.pread(file, HEADER, 0)
    except OSError:
        raise wrong from None
    if not seals & fcntl.F_SEAL_SHRINK or len(header) < HEADER:
        raise wrong
    capacity, clock = (LOG_HEADER.value(header, name) for name in ("capacity", "clock"))
    if not 0 < capacity <= LOG_LIMIT or capacity & (capacity - 1) or clock > 1:
        raise wrong
    if size < HEADER + capacity * RECORD:
        raise wrong
    try:
        return mmap.mmap(file, HEADER + capacity * RECORD), capacity, clock == 1
    except ValueError:
        raise wrong from None
