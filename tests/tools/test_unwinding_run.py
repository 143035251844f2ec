"""Programs leave traced functions by exceptions, longjmp, and cancelled threads, as they do without a tool."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpubpf.calls.api import Api, cuda, hip
from gpubpf_host import needs_bpf

HERE = Path(__file__).with_name("unwinding")
TOOLS = Path(__file__).resolve().parents[2] / "tools"
WAYS = ("throw", "jump", "cancel", "exit", "return", "throw")

pytestmark = needs_bpf
CASES = {
    "hipsnoop": (hip(), "libamdhip64.so.6"),
    "cudasnoop": (cuda(), "libcudart.so.13"),
}


def stand_in(api: Api, name: str, folder: Path) -> tuple[Path, int]:
    """Build a library with all functions of a table, each of which calls a callback and returns its number."""
    symbols = sorted({f.symbol for f in api.functions})
    bodies = [f"long {s}(void) {{ if (act) act({i}); return {i}; }}" for i, s in enumerate(symbols)]
    text = ["void (*act)(int);", *bodies]
    text += ["void *functions[] = {" + ", ".join(f"(void *){s}" for s in symbols) + "};"]
    text += [f"int count = {len(symbols)};"]
    (folder / "library.c").write_text("\n".join(text))
    made = folder / name
    flags = "-O1 -shared -fPIC -fexceptions -fno-builtin -w".split()
    subprocess.run(["gcc", *flags, "-o", made, folder / "library.c"], check=True)
    return made, len(symbols)


@pytest.mark.parametrize("tool", CASES)
def test_every_function_can_be_left_in_every_way(tool: str, tmp_path: Path) -> None:
    library, count = stand_in(*CASES[tool], tmp_path)
    program = tmp_path / "leave"
    subprocess.run(["g++", "-O1", "-pthread", "-o", program, HERE / "leave.cpp", "-ldl"], check=True)
    command = [str(program), str(library), *WAYS]
    wanted = "".join(f"{way}: {count} of {count}\n" for way in WAYS)
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == wanted
    out = tmp_path / "out"
    options = ["--api", "*", "--json", "-o", str(out)]
    done = subprocess.run(
        [sys.executable, str(TOOLS / f"{tool}.py"), *options, "--", *command],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.returncode) == (wanted, 0), done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    (summary,) = (r for r in records if r["type"] == "summary")
    calls = count + (tool == "cudasnoop")  # and cuInit
    assert (summary["calls"], summary["abandoned"], summary["lost"]) == (calls, 5 * count, 0)


@pytest.mark.skipif(shutil.which("rustc") is None, reason="needs rustc")
def test_rust_panics_through_every_function(tmp_path: Path) -> None:
    library, count = stand_in(*CASES["hipsnoop"], tmp_path)
    program = tmp_path / "panic"
    subprocess.run(["rustc", "--edition", "2021", "-O", "-o", program, HERE / "panic.rs"], check=True)
    done = subprocess.run(
        [sys.executable, str(TOOLS / "hipsnoop.py"), "--", program, library],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "RUST_BACKTRACE": "0"},
    )
    assert (done.stdout.partition("\n")[0], done.returncode) == (f"panic: {count} of {count}", 0), done.stderr
