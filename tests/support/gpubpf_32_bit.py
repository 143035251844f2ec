"""A 32-bit process for tests, made without a 32-bit compiler."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def pausing(directory: Path) -> Iterator[int]:
    """Run a 32-bit program that does nothing; give its PID. Skips on kernels that cannot run it."""
    program = directory / "small"
    code = bytes.fromhex("b81d000000cd80ebf7")  # for (;;) pause();
    header = (
        b"\x7fELF\1\1\1"
        + bytes(9)
        + struct.pack("<HHIIIIIHHHHHH", 2, 3, 1, 0x8048054, 52, 0, 0, 52, 32, 1, 0, 0, 0)
    )
    size = 84 + len(code)
    program.write_bytes(header + struct.pack("<8I", 1, 0, 0x8048000, 0x8048000, size, size, 5, 4096) + code)
    program.chmod(0o755)
    try:
        child = subprocess.Popen([program])
    except OSError:
        pytest.skip("this kernel runs no 32-bit programs")
    with child:
        try:
            while Path(f"/proc/{child.pid}/comm").read_text() != "small\n":
                time.sleep(0.01)  # until the program has replaced the copy of this process
            yield child.pid
        finally:
            child.kill()
