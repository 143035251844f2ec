"""Find the libraries that a command is likely to load, so that they have probes before its first instruction.

A library from another place gets its probes some milliseconds after the command has mapped it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpubpf import elf
from gpubpf.errors import ImageError
from gpubpf.linux.libraries import LibraryNames
from gpubpf.record import replace
from gpubpf.traced import device

if TYPE_CHECKING:
    from gpubpf.calls.api import Api
    from gpubpf.process.users import User

# Python packages that contain GPU libraries, and how deep the libraries are in them: nvidia/cuda_runtime/lib.
_PACKAGES = ("nvidia*", "torch*", "*rocm*", "hip*", "amd*", "cu*", "jax*", "tensorflow*", "*.libs")
_DEPTH, _FOLDERS = 3, 2048
_LONGEST = 1 << 16  # bytes of a script
_TOKEN = re.compile(r"[^\s;&|<>(){}'\"`=:$]+")
_MOST_WORDS = 64


def with_command_libraries(api: Api, command: Sequence[str], user: User | None) -> Api:
    """Return the API with the libraries that the command is likely to load. `user` runs it; None: the user of
    the tool.
    """
    environment = {**os.environ, "HOME": user.home} if user else os.environ
    found = find(command, environment, LibraryNames(*api.libraries))
    return replace(api, libraries=(*api.libraries, *found))


def find(command: Sequence[str], environment: Mapping[str, str], names: LibraryNames) -> list[str]:
    """Return the paths of libraries with these names in the directories where the command's loader or its
    Python looks, each path once.
    """
    found: dict[str, None] = {}
    for folder in dict.fromkeys(_folders(command, environment)):
        with contextlib.suppress(OSError):
            paths = (
                os.path.realpath(f"{folder}/{entry}") for entry in os.listdir(folder) if names.match(entry)
            )
            found |= dict.fromkeys(path for path in paths if os.path.isfile(path))
    return list(found)


def _folders(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    if paths := environment.get("LD_LIBRARY_PATH"):
        yield from (part or "." for part in paths.split(":"))
    yield from map(os.path.dirname, environment.get("LD_PRELOAD", "").replace(":", " ").split())
    yield str(device.LIBRARIES)  # `cudasim -- ./app`
    for word in (*_words(command), *_script(command, environment)):
        if "/" in word and os.path.isdir(word):
            yield word
        if (program := shutil.which(word, path=environment.get("PATH"))) is None:
            continue
        yield os.path.dirname(os.path.realpath(program))
        with contextlib.suppress(OSError, ValueError):
            yield from search_path(program)
        if os.path.basename(program).startswith(("python", "pypy")):
            yield from _python(program, environment)


def _words(command: Sequence[str]) -> Iterator[str]:
    """Yield the words that may be programs or directories, including those in `LD_LIBRARY_PATH=…` and in
    `sh -c '…'`.
    """
    for part in command:
        yield part
        if _TOKEN.fullmatch(part) is None:
            yield from dict.fromkeys(_TOKEN.findall(part[:_LONGEST])[:_MOST_WORDS])


def _script(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the words of a script's first line and the paths in the script; [] if the command is not a
    script.
    """
    program = shutil.which(command[0], path=environment.get("PATH")) if command else None
    if program is None:
        return []
    with contextlib.suppress(OSError):
        with open(program, "rb", opener=_open_nonblocking) as file:
            data = file.read(_LONGEST) or b""
        if data.startswith(b"#!"):
            line, _, rest = os.fsdecode(data[2:]).partition("\n")
            paths = (word for word in _TOKEN.findall(rest) if "/" in word)
            return [*line.split(), *list(dict.fromkeys(paths))[:_MOST_WORDS]]
    return []


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting, such as for the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


def search_path(program: str) -> list[str]:
    """Return the directories in which an ELF file looks for its libraries (DT_RPATH, DT_RUNPATH); none for another file.

    Raises OSError.
    """
    found: list[str] = []
    with contextlib.suppress(ImageError), open(program, "rb", buffering=0, opener=_open_nonblocking) as file:
        found = elf.of_file(file.fileno()).search_path().split(":")
    origin = os.path.dirname(os.path.realpath(program))
    return [part.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for part in found if part]


def _python(program: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the directories in Python packages that may contain GPU libraries."""
    prefixes = dict.fromkeys((Path(program).parent.parent, Path(os.path.realpath(program)).parent.parent))
    places = [site for prefix in prefixes for site in sorted(prefix.glob("lib/python3*/*-packages"))]
    places += sorted(Path(environment.get("HOME", "/")).glob(".local/lib/python3*/site-packages"))
    places += [Path(part) for part in environment.get("PYTHONPATH", "").split(":") if part]
    left = _FOLDERS
    for place in places:
        with contextlib.suppress(OSError):
            packages = [
                entry.path for entry in os.scandir(place)
                if entry.is_dir() and any(fnmatch.fnmatch(entry.name, pattern) for pattern in _PACKAGES)
            ]  # fmt: skip
            for package in packages:
                for folder, inner, _ in os.walk(package):
                    if left == 0:
                        return
                    left -= 1
                    yield folder
                    if folder.count("/") - package.count("/") >= _DEPTH:
                        inner.clear()
