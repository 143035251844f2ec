"""A tool of one's own, with a program at the kernel's entry, on a HIP program: that of docs/device-programs.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hipsim_device import ROOT, environment, libraries, program


@pytest.mark.parametrize("gpu", ["gfx906", "gfx1030"])
def test_threads_of_each_compute_unit(tmp_path: Path, gpu: str) -> None:
    libraries()
    page = (ROOT / "docs" / "device-programs.md").read_text()
    tool = tmp_path / "smcount.py"
    tool.write_text(re.split(r"^```(?:python)?\n", page, flags=re.MULTILINE)[1])
    done = subprocess.run(
        [sys.executable, tool, "--", program("probed", gpu=gpu)],
        capture_output=True, text=True, timeout=300, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said, *lines = done.stdout.splitlines()
    counts = [int(line.split()[2].replace(",", "")) for line in lines]
    assert said == "right" and len(counts) > 1 and sum(counts) == 5 * 1024 + 20 * 1024 + 1024 + 2 * 192
