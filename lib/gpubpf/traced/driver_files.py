"""Which driver files get a probe: limited for each process and user, so that nobody can use up the tool's files and time.

Any process can map any number of files that are named like a driver. Each probe costs an open file and some milliseconds of the hold
helper. It stays until the tool ends or `surplus` returns its file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from gpubpf.process import limits

FileId = tuple[bytes, int]  # a file as /proc/PID/maps identifies it: device, inode


class DriverFiles:
    """The driver files that processes map. Only the thread that scans processes uses it."""

    def __init__(self) -> None:
        self._mapped_by: dict[FileId, set[int]] = {}  # in the order in which they were first mapped
        self._of_process: dict[int, frozenset[FileId]] = {}
        self._user: dict[FileId, int] = {}  # who mapped it first
        self._of_user: Counter[int] = Counter()  # user → number of files that this user mapped first

    def admitted(self, pid: int, uid: int, files: Sequence[FileId]) -> Sequence[FileId]:
        """Record the files that a process maps. Return the files that may have a probe; the others exceed a limit."""
        own: list[FileId] = []
        for file in files[: limits.DRIVERS_OF_PROCESS]:
            if file not in self._user:
                if limits.exceeded(self._of_user, uid, limits.DRIVERS, limits.DRIVERS_OF_USER, 1):
                    continue
                self._user[file] = uid
                self._of_user[uid] += 1
            own.append(file)
        self._forget(pid)
        self._of_process[pid] = frozenset(own)
        for file in own:
            self._mapped_by.setdefault(file, set()).add(pid)
        return own

    def keep(self, pids: Set[int]) -> None:
        """Record that all processes except these have ended."""
        for pid in self._of_process.keys() - pids:
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        for file in self._of_process.pop(pid, ()):
            self._mapped_by[file].discard(pid)

    def surplus(self) -> list[FileId]:
        """Forget the files that no process maps, except the latest limits.UNMAPPED_DRIVERS files. Return the forgotten files.

        The latest files are kept because the next program of a script may map them again."""
        unmapped = [file for file, pids in self._mapped_by.items() if not pids]
        over = unmapped[: max(len(unmapped) - limits.UNMAPPED_DRIVERS, 0)]
        for file in over:
            del self._mapped_by[file]
            self._of_user[self._user.pop(file)] -= 1
        return over
