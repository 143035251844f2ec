"""Programs of HSA without HIP: they shut ROCr down, which then reports what the agents of tools did not give back."""

from pathlib import Path

import pytest

from hipsim_device import code_object, hsa_program, measured

# What the program launches in each life of ROCr.
LAUNCHES = 10
NO_GPU = "note: no NVIDIA GPU"


def run_alone(tool: str, out: Path, *words: object) -> tuple[list[dict], list[str]]:
    """Run the program under a tool. Return the records and the notices that do not depend on the machine."""
    records, done = measured(tool, out, "--", hsa_program("hsa_alone"), code_object("seen"), *words)
    lives = int(str(words[0])) if words else 1
    assert done.stdout == f"{1280 * lives} of {1280 * lives}\n" and done.returncode == 0
    return records, [line for line in done.stderr.splitlines() if NO_GPU not in line]


@pytest.mark.parametrize("tool", ["threadhist", "launchlate"])
def test_what_the_agent_owns_is_given_back_before_rocr_shuts_down(tool: str, tmp_path: Path) -> None:
    """No false notice about a kernel that was running, and ROCr finds no leaked signal. Each life of ROCr is measured."""
    records, stderr = run_alone(tool, tmp_path / "out", 4, "nested")
    assert len(stderr) == 4 and all("note: attached to" in line for line in stderr), stderr
    assert [line.endswith("after it initialized ROCr again") for line in stderr] == [False, True, True, True]
    assert records[-1]["launches_seen"] == records[-1]["launches_instrumented"] == 4 * LAUNCHES
    assert [r.get("launches", r.get("count")) for r in records if r["type"] == "kernel"] == [LAUNCHES] * 4


@pytest.mark.parametrize("lives", [1, 3])
def test_hipsnoop_gives_its_signals_back(lives: int, tmp_path: Path) -> None:
    """And it has the times of each life of ROCr."""
    records, stderr = run_alone("hipsnoop", tmp_path / "out", lives)
    assert stderr == ["hipsnoop: note: no traced process has loaded libamdhip64.so"]
    times = records[-1]["device_times"]
    assert (times["dispatches"], times["lost"], times["unended"]) == (lives * LAUNCHES, 0, 0)
    (kernel,) = (record for record in records if record["type"] == "kernel")
    assert (kernel["kernel"], kernel["runs"]) == ("seen", lives * LAUNCHES)
