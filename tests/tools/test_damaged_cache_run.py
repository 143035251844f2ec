"""A tool on a program, with damaged caches: its output and exit status stay the same, and the caches are mended."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import gpubpf_cuda
from cache_damage import DAMAGES

ROOT = Path(__file__).resolve().parents[2]

pytestmark = gpubpf_cuda.needs_cuda


def test_a_tool_says_the_same(tmp_path: Path) -> None:
    """All files of all caches are damaged, each in another way."""
    source = (
        "__global__ void twice(int *a) { a[threadIdx.x] *= 2; }\nint main() { int *a; cudaMalloc(&a, 400);"
    )
    source += " twice<<<3, 100>>>(a); return cudaDeviceSynchronize() ? 1 : 7; }\n"
    program = gpubpf_cuda.build(source, tmp_path / "app")
    tool = [sys.executable, str(ROOT / "tools/threadhist.py"), "--device", "sim", "--", str(program)]
    home = tmp_path / "home"
    home.mkdir(0o700)
    environment = {**os.environ, "XDG_CACHE_HOME": str(home)}

    def run() -> tuple[int, str]:
        done = subprocess.run(tool, env=environment, capture_output=True, text=True, timeout=60)
        same = re.sub(r"pid \d+|[\d.,]+\s+([mu]?s|[KM]?B)\b", "", done.stdout)
        return done.returncode, " ".join(same.split())  # where lines end depends on the numbers

    def files() -> list[Path]:
        return sorted(path for path in home.rglob("*") if path.is_file())

    first = run()
    assert first[0] == 7 and "300 threads" in first[1]
    before = {path: path.read_bytes() for path in files()}
    assert {path.parent.name for path in before} >= {"sidecar", "cudasim"}
    for path, damage in zip(before, itertools.cycle(DAMAGES.values()), strict=False):
        if path.exists():
            damage(path)
    assert run() == first
    assert run() == first
    assert {path: path.read_bytes() for path in before} == before
