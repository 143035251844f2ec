"""What memtrace finds in random kernels does not depend on which accesses share a probe, or are counted in registers.

So it attacks what is proven of addresses (`ptx/lanes.py`, `ptx/steady.py`), and what follows from that (`inject/deferral.py`). A wrong
proof is found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
from access_programs import SOURCE, module
from gpubpf_properties import TIMES

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = gpubpf_cuda.needs_cuda

KERNELS = 2  # of a module
SEEDS = range(1, 1 + TIMES)
# What a tool runs before it begins. The first module has addresses about which each lie is wrong.
LIES = {
    "steady": "from gpubpf.ptx.steady import Steady; Steady.bits = lambda *_: 64",
    "alike": "from gpubpf.inject import body; body.step_of = lambda *_: 4",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    libraries = f"-L{REPOSITORY / 'lib/cudasim/lib'}"
    return gpubpf_cuda.build(SOURCE, tmp_path_factory.mktemp("generated") / "launch", libraries, "-lcuda")


def found(program: Path, place: Path, seed: int, each: str, lie: str = "") -> list[Mapping[str, Any]]:
    """Return the records of sites and allocations. each: "1" to examine each access of each execution, else "".

    lie: Python code that runs before the tool
    """
    text = place / f"{seed}.ptx"
    # What a lie makes of a module is cached, and must not be used for that module without the lie.
    text.write_text(module(seed, KERNELS) + f"\n// {lie}\n")
    # On the real clock, the embedded device may run lanes apart that could run together, and probes change where it does.
    environment = {**os.environ, "GPUBPF_EACH_ACCESS": each, "CUDASIM_CLOCK": "virtual"}
    code = f"import sys; {lie or 'pass'}; from gpubpf.tools import memtrace; sys.exit(memtrace.main())"
    output = place / f"records{each}"
    command = [sys.executable, "-c", code, "--device", "sim", "--json", "-o", str(output), "--", str(program)]
    done = subprocess.run(
        [*command, str(text), str(KERNELS)], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr
    records = map(json.loads, output.read_text().splitlines())
    return [
        {name: value for name, value in record.items() if name not in ("pid", "base", "stack")}
        for record in records
        if record["type"] in ("site", "allocation")
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_sharing_and_counting_change_no_number(seed: int, program: Path, tmp_path: Path) -> None:
    shared, expected = (found(program, tmp_path, seed, each) for each in ("", "1"))
    assert len(expected) > 12 * KERNELS and shared == expected


@pytest.mark.every(4)
@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_proof_is_found(lie: str, program: Path, tmp_path: Path) -> None:
    wrong = found(program, tmp_path, SEEDS[0], "", LIES[lie])
    expected = found(program, tmp_path, SEEDS[0], "1")
    assert len(wrong) == len(expected) and wrong != expected
