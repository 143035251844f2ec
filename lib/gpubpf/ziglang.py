"""The C compiler in the Python package ziglang (the extra `sim`), for systems with neither gcc nor clang."""

from __future__ import annotations

import importlib.util
import os
import shutil


def find() -> str | None:
    """Return the path of `zig` in this interpreter's environment; None if the package is not installed."""
    package = importlib.util.find_spec("ziglang")
    if package is None or package.origin is None:
        return None
    return shutil.which(os.path.join(os.path.dirname(package.origin), "zig"))
