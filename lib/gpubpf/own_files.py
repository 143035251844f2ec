"""Keep the package's own files in memory, so that an upgrade does not take them from a running tool.

A tool imports many modules only when it needs them, perhaps hours after its start. When pip upgrades the package, it removes the old
files before it writes the new ones. In between, a module cannot be imported. After that, a new module may not fit the old modules that
the tool runs. So a measurement begins with `keep`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = Path(__file__).parent
# Files that are read late, besides modules.
_DATA = ("agent/clock.ptx", "agent/lib/*.so", "ebpf/prebuilt/cuinit.json", "lower/templates/*.ll")
_DELAY = 1.0  # seconds; shorter measurements do not pay for it
_HEADER = 16  # bytes of a .pyc file before its code: a magic number, flags, the source's time and size

_started: list[threading.Thread] = []
_contents: dict[str, bytes] = {}  # by path
_states: dict[str, os.stat_result] = {}  # the same


def keep() -> None:
    """Start a thread that soon reads all files that this process may still need. A second call does nothing."""
    if not _started:
        _started.append(threading.Thread(target=_keep_soon, daemon=True))
        _started[0].start()


def _keep_soon() -> None:
    time.sleep(_DELAY)
    keep_now()


def keep_now() -> None:
    """Read all files that this process may still need, now. A file that cannot be read is left out."""
    modules = {}
    for name, path in _modules():
        if name not in sys.modules and _keep_module(path):
            modules[name] = path
    for pattern in _DATA:
        with contextlib.suppress(OSError):  # the directory cannot be listed: too many open files
            for file in _PACKAGE.glob(pattern):
                _keep(str(file))
    sys.meta_path.insert(0, _Finder(modules))


def read(file: Path) -> bytes:
    """Return the kept content of a file, or its current content if the file was not kept. Raises OSError."""
    kept = _contents.get(str(file))
    return file.read_bytes() if kept is None else kept


def is_replaced(file: Path) -> bool:
    """Return whether a file that was kept has changed since."""
    kept = _states.get(str(file))
    if kept is None:
        return False
    try:
        now = file.stat()
    except OSError:
        return True
    return (kept.st_dev, kept.st_ino, kept.st_mtime_ns) != (now.st_dev, now.st_ino, now.st_mtime_ns)


def _modules() -> Iterator[tuple[str, str]]:
    """Yield the name and the path of each module of the package."""
    for directory, subdirectories, files in os.walk(_PACKAGE, followlinks=True):
        subdirectories[:] = [
            name for name in subdirectories if os.path.exists(f"{directory}/{name}/__init__.py")
        ]
        package = ".".join([_PACKAGE.name, *Path(directory).relative_to(_PACKAGE).parts])
        for file in files:
            if file == "__init__.py":
                yield package, f"{directory}/{file}"
            elif file.endswith(".py"):
                yield f"{package}.{file[:-3]}", f"{directory}/{file}"


def _keep(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            _states[path] = os.fstat(file.fileno())
            _contents[path] = file.read()
    except OSError:
        return False
    return True


def _keep_module(path: str) -> bool:
    """Keep the compiled form of a module, or its source if no compiled form belongs to exactly this source."""
    compiled = importlib.util.cache_from_source(path)
    try:
        state = os.stat(path)
    except OSError:
        return False
    source = (int(state.st_mtime) & 0xFFFFFFFF, state.st_size & 0xFFFFFFFF)
    header = importlib.util.MAGIC_NUMBER + b"".join(n.to_bytes(4, "little") for n in (0, *source))
    if _keep(compiled) and _contents[compiled][:_HEADER] == header:
        _states[path] = state
        return True
    return _keep(path)


class _Loader(SourceFileLoader):
    """Loads a module from the kept files."""

    def path_stats(self, path: Any) -> dict[str, Any]:
        state = _states[path]
        return {"mtime": state.st_mtime, "size": state.st_size}

    def get_data(self, path: Any) -> bytes:
        try:
            return _contents[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def set_data(self, path: Any, data: Any, *, _mode: int = 0) -> None:
        """Write nothing: the path may belong to another version now."""


class _Finder:
    """Finds the modules that were kept."""

    def __init__(self, modules: dict[str, str]) -> None:
        self._modules = modules  # path by name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._modules.get(name)
        if file is None:
            return None
        places = [os.path.dirname(file)] if file.endswith("/__init__.py") else None
        return importlib.util.spec_from_file_location(
            name, file, loader=_Loader(name, file), submodule_search_locations=places
        )
