"""The frames of host stacks, each with the file that the process mapped there when the stack arrived.

    files = MappedFiles(pid, user)
    frames = files.frames(sent)         # as the agent sent them

A frame is often named later, when the process has ended and its file may have been replaced. Only a file with the same identity has
its names.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from gpubpf.errors import out_of_files
from gpubpf.process import address_space, limits, proc, target_files
from gpubpf.process.patience import SHORT_WAIT, NotLooked, within
from gpubpf.record import Record

_SHORT_LIST = 4 << 20  # bytes of a list of mappings that is read while other processes wait


class Identity(NamedTuple):
    """Identifies a file and its contents, as stat(2) returns them."""

    device: int
    inode: int
    size: int
    changed_ns: int

    @classmethod
    def of(cls, state: os.stat_result) -> Identity:
        return cls(state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)


class MappedFile(Record):
    """A file that a process mapped.

    pid: the process that names the file.
    user: the user who answers for the process, see `scans.user_of`.
    """

    pid: int
    user: int
    identity: Identity


class HostFrame(Record):
    """A frame of a host stack, as `definitions.StackFrame`. mapped: the file; None outside files, and if the file is unknown."""

    address: int
    offset: int
    file: str
    symbol: str
    mapped: MappedFile | None = None
    line: int = 0
    python: bool = False


class Sent(Protocol):
    """A frame as the agent sends it."""

    @property
    def address(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def file(self) -> str: ...

    @property
    def symbol(self) -> str: ...

    @property
    def line(self) -> int: ...

    @property
    def python(self) -> bool: ...


class MappedFiles:
    """The files in the host stacks of a process.

    A file is looked up once for each place where it is loaded. (The agent, too, sends a stack with the same addresses only once.)
    """

    def __init__(self, pid: int, user: int) -> None:
        self._pid, self._user = pid, user
        self._files: dict[tuple[str, int], MappedFile | None] = {}  # by path, and address where it is loaded

    def frames(self, sent: Iterable[Sent]) -> tuple[HostFrame, ...]:
        """Return the frames that the agent sent, with their files. Call this as soon as they arrive: the process may end."""
        sent = tuple(sent)
        native = [frame for frame in sent if frame.file and not frame.python]
        new = {_key(frame): frame.address for frame in native if _key(frame) not in self._files}
        if new and len(self._files) + len(new) <= limits.NAMED_FILES:
            try:
                self._files |= within(SHORT_WAIT, self._pid, lambda: self._look(new))
            except OSError as error:
                if not _may_pass(error):
                    self._files |= dict.fromkeys(new)
        return tuple(
            HostFrame(
                one.address,
                one.offset,
                one.file,
                one.symbol,
                None if one.python else self._files.get(_key(one)),
                one.line,
                one.python,
            )
            for one in sent
        )

    def _look(self, new: dict[tuple[str, int], int]) -> dict[tuple[str, int], MappedFile | None]:
        """Return the mapped file at each address; None: no file there can be read. Addresses to look at again are left out."""
        found: dict[tuple[str, int], MappedFile | None] = {}
        for key, address in new.items():
            try:
                found[key] = mapped_at(self._pid, self._user, address, key[0])
            except OSError as error:
                if not _may_pass(error):
                    found[key] = None
        return found


def _may_pass(error: OSError) -> bool:
    """Return whether the next look costs little and may succeed."""
    return out_of_files(error) or error.errno == errno.ENOMEM or isinstance(error, NotLooked)


def _key(frame: Sent) -> tuple[str, int]:
    return frame.file, frame.address - frame.offset


def mapped_at(pid: int, user: int, address: int, path: str) -> MappedFile | None:
    """Return the file that a process maps at an address, and calls `path`. Return None if that is another file. Raises OSError."""
    mapping = address_space.mapping_at(pid, address, _SHORT_LIST)
    if mapping is None or not mapping.file[1] or not address_space.is_local(mapping.file[0], pid):
        return None  # nothing, or a file whose server may never answer
    place = opened(pid, path)
    try:
        if not address_space.on_local_mount(place, pid):
            return None
        state = os.fstat(place)
    finally:
        os.close(place)
    if state.st_ino != mapping.file[1] or not _same_device(mapping.file[0], state.st_dev):
        return None  # the file was replaced, as by a new build
    return MappedFile(pid, user, Identity.of(state))


def opened(pid: int, path: str) -> int:
    """Open what a process calls `path` with O_PATH: in its root directory and from its working directory. Raises OSError."""
    return target_files.open_path(pid, os.path.join(proc.link(pid, "cwd"), path), os.O_PATH)


def _same_device(mapped: str, device: int) -> bool:
    """Return whether a device of /proc/PID/maps may be one of stat(2). Those of btrfs and overlay differ, but neither is a disk's."""
    major, minor = (int(part, 16) for part in mapped.split(":"))
    return (major, minor) == (os.major(device), os.minor(device)) or major == os.major(device) == 0
