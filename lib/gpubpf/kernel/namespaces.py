"""The namespaces of this process."""

from __future__ import annotations

import os
from pathlib import Path

_FIRST_USER_NAMESPACE = "user:[4026531837]"  # PROC_USER_INIT_INO, include/linux/proc_ns.h


def in_first_user_namespace(proc: Path = Path("/proc")) -> bool:
    """Return whether this process is in the machine's own user namespace. Without /proc, assume that it is."""
    try:
        return os.readlink(proc / "self/ns/user") == _FIRST_USER_NAMESPACE
    except OSError:
        return True
