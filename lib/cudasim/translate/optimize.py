"""Compile parts of modules again, with more optimization, for programs that run them for long.

    start(["…/KEY.0.c", "…/KEY.0.optimized.so"])

Both are files of the embedded device's cache. Another process does the work, as long as it takes, and may outlive the program. It
leaves no file but the result. What cannot be compiled or stored stays as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpubpf import cache

from .compiler import SOURCES, CompilerError, compile_c, level_of

LIMITS = ((resource.RLIMIT_CPU, 300), (resource.RLIMIT_AS, 4 << 30))  # seconds and bytes of each process


def start(words: Sequence[str]) -> None:
    """Start a process that compiles these files, each C text to the shared object whose path follows."""
    if os.fork():
        return
    try:
        os.setsid()
        os.nice(10)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # the program waits until nobody can write to standard error any more
            os.dup2(null, descriptor)
        os.environ.pop("TMPDIR", None)  # the directory of the process that returns
        for limit, value in LIMITS:
            with contextlib.suppress(OSError, ValueError):  # a lower limit stays
                resource.setrlimit(limit, (value, value))
        for source, output in zip(words[::2], words[1::2], strict=True):
            with contextlib.suppress(CompilerError, OSError):
                optimize(Path(source), Path(output))
    finally:
        os._exit(0)


def optimize(source: Path, output: Path) -> None:
    """Compile a C text of the cache, unless a higher level than before is not worth its time. Raises CompilerError, OSError."""
    with source.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: another process is at it
        text = cache.content(source.name, file.read())
        if text is not None and not output.exists():
            _optimize(text.decode(), output)


def _optimize(text: str, output: Path) -> None:
    level = level_of(text, optimized=True)
    if level == level_of(text):
        return
    before = _version()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TMPDIR"] = directory  # for the compiler's files
        compiled = Path(directory) / "part.so"
        compile_c(text, str(compiled), level)
        kept = cache.sealed(output.name, compiled.read_bytes())
    if _version() != before:  # an update changed what the text includes
        return
    descriptor, temporary = tempfile.mkstemp(prefix=cache.TEMPORARY, dir=output.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(kept)
        os.replace(temporary, output)
    except OSError:
        os.unlink(temporary)
        raise


def _version() -> str:
    return cache.key_of_files(sorted(SOURCES.glob("*.h")))
