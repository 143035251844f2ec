"""The readers in C++, built with the sanitizers: inputs that they once read wrongly, and changed inputs, others in each commit.

GPUBPF_FUZZ_RUNS: changed inputs for each target, divided by ten.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cudasim_device import cuda_include
from fuzz import native_targets
from fuzz.native_targets import NativeTarget

RUNS = 10 * int(os.environ.get("GPUBPF_FUZZ_RUNS", "400"))


@pytest.mark.every(4)
@pytest.mark.without_driver
@pytest.mark.parametrize("native", native_targets.TARGETS.values(), ids=native_targets.TARGETS.keys())
def test_changed_inputs(native: NativeTarget, tmp_path: Path) -> None:
    """With the address and undefined-behaviour sanitizers."""
    if shutil.which("g++") is None or cuda_include() is None:
        pytest.skip("needs g++ and the CUDA headers")
    files = [tmp_path / f"input-{number}" for number in range(len(native.inputs))]
    for file, data in zip(files, native.inputs, strict=True):
        file.write_bytes(data)
    bad = tmp_path / "bad"
    done = subprocess.run(
        [native.build(tmp_path), str(RUNS), os.environ["GPUBPF_CHOICE"], *files],
        env=os.environ
        | {"FUZZ_INPUT": str(bad), "ASAN_OPTIONS": "handle_abort=1:max_allocation_size_mb=512"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = bad.read_bytes() if bad.exists() else b""
    assert done.returncode == 0, f"{native.name} reads {found[:200]!r} wrongly:\n{done.stderr[:4000]}"
