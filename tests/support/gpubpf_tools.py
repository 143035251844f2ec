"""Run a tool of this checkout on a program on the embedded CUDA device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def run(
    tool: str, *arguments: str | Path, options: Sequence[str] = (), status: int = 0, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a tool, which must end with this status. options: come before `arguments`. more: for `subprocess.run`."""
    command = [sys.executable, TOOLS / f"{tool}.py", "--device", "sim", *options, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **more)
    assert done.returncode == status, done.stderr
    return done


def records(tool: str, place: Path, *arguments: str | Path, **more: Any) -> list[dict[str, Any]]:
    """Run a tool with --json, and return its records. place: a directory for its output. more: for `run`."""
    run(tool, "--json", "-o", place / "out", *arguments, **more)
    return [json.loads(line) for line in (place / "out").read_text().splitlines()]
