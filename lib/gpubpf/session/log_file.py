"""Check and map the file of an operation log, without NumPy, whose import takes longer than attaching does.

operation_log.py reads the records. The traced process can write to the file, so its contents are untrusted.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from gpubpf.agent import definitions
from gpubpf.errors import SessionError

VERSION = 1
HEADER = 4096
RECORD = definitions.RECORD_SIZE
MOST_RECORDS = 1 << 28
_BEGUN_OFFSET = 64  # in the header: how many records were begun


class LogFile:
    """Maps the file of an operation log, and takes ownership of it. Raises SessionError if it is not a valid log.

    virtual: its times are from the embedded device's virtual clock. capacity: records that it has room for."""

    def __init__(self, file: int) -> None:
        try:
            self.map, self.capacity, self.virtual = _map(file)
        finally:
            os.close(file)

    @property
    def begun(self) -> int:
        """Records that were ever begun, modulo 2^64, according to the process."""
        return int.from_bytes(self.map[_BEGUN_OFFSET : _BEGUN_OFFSET + 8], "little")


def _map(file: int) -> tuple[mmap.mmap, int, bool]:
    wrong = SessionError("a traced process sent an invalid log; it is no longer traced")
    try:
        size = os.fstat(file).st_size
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
        header = os.pread(file, 24, 0)
    except OSError:
        raise wrong from None
    if not seals & fcntl.F_SEAL_SHRINK or len(header) < 24:
        raise wrong
    version, capacity, clock = (int.from_bytes(header[i : i + 8], "little") for i in (0, 8, 16))
    if version != VERSION or not 0 < capacity <= MOST_RECORDS or capacity & (capacity - 1) or clock > 1:
        raise wrong
    if size < HEADER + capacity * RECORD:
        raise wrong
    try:
        return mmap.mmap(file, HEADER + capacity * RECORD), capacity, clock == 1
    except (OSError, ValueError):
        raise wrong from None
