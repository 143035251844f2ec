"""Directories in which no other user can exchange what this user has."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from gpubpf.kernel import namespaces

_SHARED = "/tmp"


def keeps_entries(path: str, user: int) -> bool:
    """Return whether no other user can exchange what `user` has in a directory: not in it, and not in the directories above it.

    Symbolic links may lead to the directory, if nobody else can exchange them either. user: user ID. Raises OSError.
    """
    owners = {0, user}
    if not namespaces.in_first_user_namespace():
        owners.add(_unmapped())  # in a container, nobody can act as the owner of the machine's directories
    for directory in {*_with_parents(os.path.abspath(path)), *_with_parents(os.path.realpath(path))}:
        state = os.stat(directory)
        others = state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX
        if state.st_uid not in owners or others:
            return False
    return True


def is_own(path: str) -> bool:
    """Return whether a directory keeps what this user has in it. False if it does not exist."""
    try:
        return keeps_entries(path, os.geteuid())
    except OSError:
        return False


def temporary() -> str:
    """Return the directory for temporary files: the one that TMPDIR names, unless another user could exchange files in it."""
    import tempfile  # imported here because the import is slow

    chosen = tempfile.gettempdir()
    return chosen if is_own(chosen) else _SHARED


def _with_parents(path: str) -> Iterator[str]:
    while True:
        yield path
        if (parent := os.path.dirname(path)) == path:
            return
        path = parent


def _unmapped() -> int:
    """Return the user ID that stands for users outside of this user namespace."""
    with open("/proc/sys/kernel/overflowuid") as file:
        return int(file.read())
