"""A process whose list of mappings and memory cannot be read (gpubpf/process/locked.c)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "gpubpf" / "process" / "locked.c"


@contextlib.contextmanager
def process(directory: Path) -> Iterator[tuple[int, int]]:
    """Yield the ID of such a process, and the address of the page that it waits for. Skips the test where it cannot be made."""
    if os.uname().machine != "x86_64" or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs FUSE on x86-64")
    subprocess.run(["gcc", "-w", "-pthread", "-o", directory / "locked", SOURCE], check=True)
    with subprocess.Popen(
        [directory / "locked", directory / "served"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as made:
        assert made.stdout is not None and made.stderr is not None
        if not (line := made.stdout.readline()):
            pytest.skip(f"no FUSE in a user namespace here: {made.stderr.read().strip()}")
        server, page = map(int, line.split())
        try:
            yield made.pid, page
        finally:
            made.kill()
            os.kill(server, signal.SIGKILL)  # else, the process cannot end
