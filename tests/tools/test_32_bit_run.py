"""Every tool refuses a 32-bit process in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_32_bit
from gpubpf_host import needs_bpf

TOOLS = Path(__file__).resolve().parents[2] / "tools"
NAMES = sorted(path.stem for path in TOOLS.glob("*.py"))
SPECS = {"gpucount": ["load:*"], "gputrace": ["load:*"], "gpudist": ["-C", "load:*:u32:lane"]}
SNOOPS = ("cudasnoop", "hipsnoop")


def run(tool: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOLS / f"{tool}.py", *SPECS.get(tool, ()), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "tool", [pytest.param(n, marks=needs_bpf if n in SNOOPS else ()) for n in NAMES if n != "gpurun"]
)
def test_a_32_bit_process(tool: str, tmp_path: Path) -> None:
    """gpurun is left out: it takes an object first."""
    with gpubpf_32_bit.pausing(tmp_path) as pid:
        done = run(tool, "-p", pid)
    what = f"pid {pid} (small) is a 32-bit program, which cannot use CUDA or HIP; name another process"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{tool}: {what}\n")


@needs_bpf
@pytest.mark.parametrize("tool", SNOOPS)
def test_a_32_bit_process_beside_another(tool: str, tmp_path: Path) -> None:
    with gpubpf_32_bit.pausing(tmp_path) as pid, subprocess.Popen(["sleep", "100"]) as other:
        done = run(tool, "-d", "0.5", "-p", f"{pid},{other.pid}")
        other.kill()
    assert done.returncode == 0 and f"{tool}: note: pid {pid} (small) is a 32-bit program, " in done.stderr
