"""hipsnoop on the embedded AMD device: calls that succeed, on AMD's own library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gpubpf_host import needs_bpf
from hipsim_device import ROOT, libraries, program

TOOL = [sys.executable, str(ROOT / "tools" / "hipsnoop.py")]

pytestmark = needs_bpf


def test_a_command_runs_on_the_embedded_device_with_one_notice(tmp_path: Path) -> None:
    app, out = program("vectoradd"), tmp_path / "out"
    libraries()
    done = subprocess.run(
        [*TOOL, "--json", "-e", "-o", out, "--", app], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "1000 sums are right\n"), done.stderr
    assert done.stderr.count("no AMD GPU here: HIP programs run on hipsim") == 1
    records = [json.loads(line) for line in out.read_text().splitlines()]
    calls = [record for record in records if record["type"] == "call"]
    made = ["hipMalloc", "hipMemcpy"] * 2 + ["hipMalloc", "hipLaunchKernel", "hipMemcpy"] + ["hipFree"] * 3
    assert [call["api"] for call in calls] == made
    assert [call["ret"] for call in calls] == [0] * len(made)
    (launch,) = (call for call in calls if call["api"] == "hipLaunchKernel")
    assert (launch["kernel"], launch["grid"], launch["block_dim"]) == ("vectorAdd", [4, 1, 1], [256, 1, 1])
    copies = [call["bytes"] for call in calls if call["api"] == "hipMemcpy"]
    assert copies == [4000] * 3


def test_a_program_with_code_for_other_gpus_runs_as_without_the_tool() -> None:
    app = program("vectoradd", gpu="gfx90a")
    libraries()
    alone, traced = (
        subprocess.run(command, capture_output=True, text=True, timeout=300)
        for command in ([app], [*TOOL, "--", app])
    )
    assert traced.returncode == alone.returncode != 0
    assert alone.stderr in traced.stderr and alone.stdout in traced.stdout
    assert f"{app} has no code for gfx906, so it runs without a device" in traced.stderr


def test_no_gpu_where_one_was_asked_for() -> None:
    done = subprocess.run(
        [*TOOL, "--device", "gpu", "--", "true"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert done.stderr.startswith("hipsnoop: no AMD GPU can be used: KFD knows none;")
