"""The agent has a heap of its own, and takes nothing from the program's C++ library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpubpf.traced.device import LIBRARIES

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

import fake_tool  # noqa: E402

ROOT = HERE.parents[2]
AGENT = ROOT / "lib" / "gpubpf" / "agent"


@pytest.mark.parametrize("library", ["libgpubpf-agent.so", "libgpubpf-agent-hsa.so"])
def test_a_program_can_replace_none_of_the_agents_functions(library: str) -> None:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", AGENT / "lib" / library], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1] for line in symbols.splitlines()}
    entries = (
        {"OnLoad", "OnUnload"} if "hsa" in library else {"InitializeInjection", "InitializeInjectionNvtx2"}
    )
    assert names == {"gpubpf_attach", "gpubpf_owner", *entries}


def test_blocks_keep_their_contents_in_threads_and_forked_children(tmp_path: Path) -> None:
    program = tmp_path / "heap"
    options = ["-std=c++17", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        ["g++", *options, "-o", program, HERE / "heap.cpp", AGENT / "src" / "heap.cpp"], check=True
    )
    done = subprocess.run([program, "4", "4000"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_a_program_with_its_own_operator_new_runs_as_without_a_tool(tmp_path: Path) -> None:
    program = tmp_path / "own_new"
    options = ["-std=c++17", "-O0", "-rdynamic", "-isystem", fake_tool.cuda_include()]
    driver = [f"-L{LIBRARIES}", "-l:libcuda.so.1"]
    subprocess.run(["g++", *options, "-o", program, HERE / "own_new.cpp", *driver], check=True)
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "memtrace.py", "--json", "--device", "sim", "--", program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LD_LIBRARY_PATH": str(LIBRARIES)},
    )
    assert done.returncode == 0 and "ended\n" in done.stdout, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["launches_instrumented"] == 10
