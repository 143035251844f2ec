"""The examples give their known answers on the embedded device: those that gpu-check asks for on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.records import ANSWERS
from gpubpf_examples import DEVICE, NAMES, ROOT, build

AGENT = ROOT / "lib" / "gpubpf" / "agent" / "lib" / "libgpubpf-agent.so"


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib"), "CUDASIM_HOSTILE": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.every(6)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_alone(name: str) -> None:
    done = run([str(build(name) / name)], LD_LIBRARY_PATH=str(DEVICE))
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [f"{name}: PASSED"]), done.stderr


@pytest.mark.every(4)
@pytest.mark.skipif(not AGENT.exists(), reason="the agent is not built (script/setup)")
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: f"{answer[1]} {answer[2]}".strip())
def test_a_known_answer(answer: tuple, tmp_path: Path) -> None:
    tool, options, program, right = answer
    name, *arguments = program.split()
    command = [str(build(name) / name), *arguments]
    results = tmp_path / "results"
    traced = [
        sys.executable,
        str(ROOT / "tools" / f"{tool}.py"),
        "--device",
        "sim",
        "--json",
        "-o",
        str(results),
    ]
    done = run([*traced, *options.split(), "--", *command])
    plain = run(command, LD_LIBRARY_PATH=str(DEVICE))
    assert plain.returncode == 0, plain.stderr
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout), done.stderr
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert right(records), json.dumps(records[-3:], indent=1)
    summary = records[-1]
    missing = summary["launches_matched"] - summary["launches_instrumented"]
    assert missing == sum(summary["not_instrumented"].values())
    assert set(summary["not_instrumented"]) <= {"sampled out", "filtered"}
