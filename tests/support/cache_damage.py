"""What can be wrong with a cached file. Each function puts something else in its place."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

END = 48  # bytes of a file behind its content: the digest and a mark


def _flip(position: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[position(len(data))] ^= 4
        file.write_bytes(data)

    return damage


def _cut(size: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda file: os.truncate(file, size(file.stat().st_size))


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.unlink()
        make(file)

    return damage


def _of_another(file: Path) -> None:
    """A valid file, but that of another entry: of another version's key, for example."""
    others = sorted(path for path in file.parent.iterdir() if path.is_file() and path != file)
    if others:
        shutil.copyfile(others[0], file)
    else:
        file.rename(file.with_name("0" * 64))


def _directory(file: Path) -> None:
    file.mkdir()
    (file / "file").write_text("")


def _gigantic(file: Path) -> None:
    with open(file, "wb") as opened:
        opened.truncate(1 << 40)


def _foreign(file: Path) -> None:
    os.chown(file, 65534, 65534)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": _cut(lambda size: 0),
    "half": _cut(lambda size: size // 2),
    "last byte missing": _cut(lambda size: size - 1),
    "bit flipped at the start": _flip(lambda size: 0),
    "bit flipped in the middle": _flip(lambda size: (size - END) // 2),
    "bit flipped at the end": _flip(lambda size: size - END - 1),
    "bit flipped in the digest": _flip(lambda size: size - END),
    "bit flipped in the mark": _flip(lambda size: size - 1),
    "random bytes": lambda file: file.write_bytes(random.Random(1).randbytes(4000)) and None,
    "without a digest": _cut(lambda size: size - END),
    "another entry's file": _of_another,
    "directory": _instead(_directory),
    "FIFO": _instead(os.mkfifo),
    "symlink to itself": _instead(lambda file: file.symlink_to(file)),
    "symlink to /dev/zero": _instead(lambda file: file.symlink_to("/dev/zero")),
    "symlink to /dev/stdin": _instead(lambda file: file.symlink_to("/dev/stdin")),
    "gigantic": _gigantic,
    "writable for others": lambda file: file.chmod(0o666),
    "unreadable": lambda file: file.chmod(0),
}
if os.geteuid() == 0:
    DAMAGES["another user's"] = _foreign
    del DAMAGES["unreadable"]  # root reads it
