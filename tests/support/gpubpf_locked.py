"""A process whose list of mappings and memory cannot be read (gpubpf/process/locked.c)."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "gpubpf" / "process" / "locked.c"


@contextlib.contextmanager
def process(
    directory: Path, driver: Path | None = None, user: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield the ID of such a process, and the address of the page that it waits for. Skips the test where it cannot be made.

    directory: where the user may write. driver: it calls cuInit of this library."""
    if os.uname().machine != "x86_64" or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs FUSE on x86-64")
    device = Path("/dev/fuse")
    if os.geteuid() == 0:
        device = directory / "device"
        os.mknod(device, stat.S_IFCHR, os.stat("/dev/fuse").st_rdev)
        device.chmod(0o666)
    subprocess.run(["gcc", "-w", "-pthread", "-o", directory / "locked", SOURCE, "-ldl"], check=True)
    with subprocess.Popen(
        [directory / "locked", directory / "served", device, *([driver] if driver else ())],
        user=user,
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
