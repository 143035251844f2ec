"""Files of other users' processes, opened with those users' permissions."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

import pytest

from gpubpf.kernel import fresh_thread, libc
from gpubpf.process import target_files
from gpubpf.process.users import User

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def _may_read(path: Path, user: User) -> bool:
    """Return whether `as_user` opens a file, if the tool itself has root's group among its own."""

    def call() -> bool:
        groups = ctypes.create_string_buffer(struct.pack("=I", 0), 4)
        libc.system_call("setgroups", 1, ctypes.addressof(groups))
        before = os.getgroups()
        try:
            os.close(target_files.as_user(user, lambda: os.open(path, os.O_RDONLY)))
        except PermissionError:
            return False
        finally:
            assert os.getgroups() == before == [0] and libc.library.setfsuid(-1) == 0
        return True

    return fresh_thread.run(call, "test")


def test_only_the_users_own_groups_count(tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents[:3]):
        directory.chmod(directory.stat().st_mode | 0o711)
    file = tmp_path / "file"
    file.write_text("secret")
    user = User("12345", 12345, 12345, (4711, 4712), "/", "")
    for group, mode, allowed in [
        (0, 0o640, False),  # of root's groups
        (4711, 0o640, True),  # of the user's groups
        (4712, 0o640, True),
        (4713, 0o640, False),
        (12345, 0o640, True),
        (0, 0o644, True),
        (4711, 0o600, False),
    ]:
        os.chown(file, 0, group)
        file.chmod(mode)
        assert _may_read(file, user) is allowed, (group, oct(mode))
    assert _may_read(file, User("root", 0, 0, (0,), "/", ""))
