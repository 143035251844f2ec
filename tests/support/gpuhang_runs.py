"""Run gpuhang on a program that hangs, and read what it writes meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOOL = Path(__file__).resolve().parents[2] / "tools/gpuhang.py"
PATIENCE = 90.0  # seconds until a test gives up


def read(out: Path) -> list[dict[str, Any]]:
    lines = out.read_text().splitlines(keepends=True) if out.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def gone(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until_told(out: Path, verdict: str, tool: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Return the records up to the places of a launch with this verdict, which the tool writes while the kernel hangs."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = read(out)
        told = [at for at, one in enumerate(found) if one["type"] == "hang" and one["verdict"] == verdict]
        if told and found[-1]["type"] != "hang":
            return found[told[-1] :]
        assert tool.poll() is None or told, found
        time.sleep(0.05)
    raise AssertionError(read(out))


@contextlib.contextmanager
def hanging(tmp_path: Path, *arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A tool that watches a program. At the end, neither is left."""
    out = tmp_path / "out"
    command = [sys.executable, TOOL, "--device", "sim", "--after", "0.3", "--json", "-o", out, *arguments]
    tool = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield tool, out
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tool.pid, signal.SIGKILL)
        tool.communicate()
