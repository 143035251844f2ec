"""launchlate --cupti: operations without a probe have the times of CUPTI's activity records. Uses a stand-in for the library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "tests"


@pytest.fixture(scope="module")
def library() -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    made = BUILD / "libfakecupti.so"
    source = ROOT / "tests" / "gpubpf" / "agent" / "fakecupti.c"
    subprocess.run(["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", made, source], check=True)
    return made


def copies(*options: str) -> tuple[list[dict[str, Any]], str]:
    """Return the copies of a program in the timeline."""
    command = [sys.executable, ROOT / "tools" / "launchlate.py", "--timeline", "--json", "--device", "sim"]
    program = ROOT / "examples" / "vectoradd"
    subprocess.run(["make", "-s", "-C", program.parent, program.name], check=True)
    done = subprocess.run([*command, *options, "--", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [record for record in records if record.get("op") in ("h2d", "d2h")], done.stderr


def test_times_are_those_of_the_activity_records(library: Path) -> None:
    found, said = copies(f"--cupti={library}")
    assert len(found) == 3, said
    assert [copy["dur_ns"] for copy in found] == [5000] * 3


def test_a_library_that_is_none_leaves_it_to_timing_events(tmp_path: Path) -> None:
    found, said = copies(f"--cupti={tmp_path}/none.so")
    assert "note: CUPTI gives no times, it cannot be loaded; timing events do instead" in said
    assert len(found) == 3 and {copy["dur_ns"] for copy in found} != {5000}


def test_the_embedded_device_has_none() -> None:
    found, said = copies("--cupti")
    assert "note: CUPTI works on a GPU only" in said
    assert len(found) == 3
