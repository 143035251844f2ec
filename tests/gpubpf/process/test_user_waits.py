"""A process that exchanges its memory under the tool's hands keeps a thread waiting, but not the tool's process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import gpubpf_fuse
from gpubpf.kernel import fresh_thread, privileges
from gpubpf.process import fuse, limits, mounts, patience, scans, target_files, user_waits
from gpubpf.process.address_space import Memory
from gpubpf.process.users import User

OTHER = 65534
pytestmark = [
    pytest.mark.without_driver,
    pytest.mark.skipif(bool(gpubpf_fuse.cannot_mount()), reason=gpubpf_fuse.cannot_mount()),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs x86-64"),
]
EXCHANGES = r"""
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
int main(int argc, char **argv) {
    int file = open(argv[1], O_RDONLY);
    char *at = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), byte;
    *at = 'a';
    printf("%ld\n", (long)at);
    fflush(stdout);
    if (read(0, &byte, 1) != 1 || mmap(at, 4096, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0) != at) return 1;
    puts("exchanged");
    fflush(stdout);
    return read(0, &byte, 1) < 0;
}
"""


@contextlib.contextmanager
def exchanging(directory: Path, file: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process of another user, and the address of a page that becomes one of a file."""
    (directory / "exchanges.c").write_text(EXCHANGES)
    program = directory / "exchanges"
    subprocess.run(["gcc", "-w", "-o", program, directory / "exchanges.c"], check=True)
    for part in (directory, *directory.parents):
        if part.stat().st_uid == os.geteuid() and not part.stat().st_mode & 1:
            part.chmod(part.stat().st_mode | 0o011)
    process = subprocess.Popen(
        [program, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, user=OTHER, bufsize=1
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("as_its_user", [True, False])
def test_a_file_that_a_process_names_keeps_nothing_waiting(
    tmp_path: Path, as_its_user: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's cache is where the process says, perhaps in a file system of its user, and so may be the agent's library.

    Other processes of the user may keep so many looks waiting that there is no further one: that protects nobody."""
    monkeypatch.setattr(patience, "_waiting", Counter({OTHER: limits.UNANSWERED_OF_USER}))
    place = tmp_path / "fuse"
    place.mkdir()
    for part in (place, *place.parents):
        if part.stat().st_uid == os.geteuid() and not part.stat().st_mode & 1:
            part.chmod(part.stat().st_mode | 0o011)
    with (
        gpubpf_fuse.unanswered(place, user=OTHER, opens=as_its_user) as file,
        subprocess.Popen(["sleep", "100"], user=OTHER) as process,
    ):
        errors: list[OSError] = []

        def read() -> None:
            try:
                with open(target_files.open_path(process.pid, str(file)), "rb") as opened:
                    if as_its_user:
                        opened.read()
            except OSError as error:
                errors.append(error)

        user = User("", OTHER, OTHER, (), "/", "")
        devices = partial(mounts.served, process.pid)
        reading = threading.Thread(
            target=target_files.as_user if as_its_user else read,
            args=(user, read, process.pid, devices) if as_its_user else (),
            daemon=True,
        )
        reading.start()
        while not user_waits._waiting:
            pass
        reading.join(0.2)
        assert reading.is_alive()
        (text,) = user_waits.end(0.2)
        assert "disconnected the file system of this user that did not answer (FUSE " in text
        reading.join(10)
        assert not reading.is_alive() and errors
        process.kill()


@pytest.mark.parametrize("mounted_by", [OTHER, OTHER - 1])
def test_the_wait_ends_with_the_tool(
    mounted_by: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may also have a user ID that is delegated to the user of the file system."""
    monkeypatch.setattr(scans, "_delegated", lambda: [(OTHER - 1, OTHER, 1)] if mounted_by != OTHER else [])
    place = tmp_path / "fuse"
    place.mkdir()
    with (
        gpubpf_fuse.unanswered(place, user=mounted_by) as file,
        exchanging(tmp_path, file) as (process, at),
        Memory(process.pid) as memory,
    ):
        assert memory.read(at, 1) == b"a"  # the mapping is known from here on
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        assert process.stdout.readline() == "exchanged\n"
        found: list[bytes] = []
        reading = threading.Thread(target=lambda: found.append(memory.some(at, 1)), daemon=True)
        reading.start()
        while not user_waits._waiting:
            pass
        reading.join(0.2)
        assert reading.is_alive()
        (text,) = user_waits.end(0.2)
        assert "disconnected the file system of this user that did not answer (FUSE " in text
        reading.join(10)
        assert found == [b""]
        assert not user_waits._waiting and user_waits.end(0.2) == []


def test_the_file_systems_of_other_users_are_left_alone(tmp_path: Path) -> None:
    """A process must not be able to choose a file system of another user."""
    with gpubpf_fuse.unanswered(tmp_path, user=OTHER - 1) as file:
        opened = os.open(file, os.O_RDONLY)

        def read() -> None:
            with user_waits.waiting(OTHER), contextlib.suppress(OSError):
                os.pread(opened, 1, 0)

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        while not user_waits._waiting:
            pass
        assert fuse.unanswered(OTHER) == []
        (text,) = user_waits.end(0.2)
        assert text.endswith("so this process cannot end before it does; end the processes of this user")
        assert reading.is_alive()
        ctypes.CDLL(None).umount2(os.fsencode(file), 1)  # MNT_FORCE
        reading.join(10)
        assert not reading.is_alive()
        with contextlib.suppress(OSError):  # the file system has gone
            os.close(opened)


def test_the_first_thread_that_waits_may_have_no_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that have them can still end its wait."""
    monkeypatch.setattr(fuse, "_mounted", functools.cache(fuse._mounted.__wrapped__))

    def without() -> Path:
        privileges.drop_all()
        return fuse.connections()

    assert fresh_thread.run(without, "test") == Path("/sys/fs/fuse/connections")
    mounted = fuse.connections()
    assert mounted.parent == Path("/proc/self/fd")
    assert fresh_thread.run(without, "test") == mounted
    os.close(int(mounted.name))


def test_nobody_waits_without_a_reason() -> None:
    with user_waits.waiting(OTHER):
        pass
    assert user_waits.end(60) == []
