"""The user that a command runs as: the user given with `--user`, or the one who called sudo."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path

from gpubpf.errors import SessionError
from gpubpf.record import Record


class User(Record):
    """The properties of a user account that a command needs."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


def command_user(name: str | None, environment: Mapping[str, str] = os.environ) -> User | None:
    """Return the user given with `--user`, or the one who called sudo; None: the user who runs the tool. Raises SessionError."""
    if name is None:
        name = environment.get("SUDO_USER") if os.geteuid() == 0 else None
        if name in (None, "root"):
            return None
    try:
        entry = pwd.getpwnam(str(name)) if not str(name).isdigit() else pwd.getpwuid(int(str(name)))
    except KeyError:
        raise SessionError(f"there is no user {name!r}; use a name from /etc/passwd") from None
    if os.geteuid() != 0:
        if entry.pw_uid == os.geteuid():
            return None
        raise SessionError(f"running the command as {entry.pw_name} requires root; use sudo, or omit --user")
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir, entry.pw_shell)


def can_read(user: User, path: Path) -> bool:
    """Return whether the mode bits of `path` and its parent directories let `user` read it."""
    for part, bits in [(path, 4), *((parent, 1) for parent in path.parents)]:
        state = part.stat()
        shift = 6 if state.st_uid == user.uid else 3 if state.st_gid in user.groups else 0
        if user.uid and not stat.S_IMODE(state.st_mode) >> shift & bits:
            return False
    return True
