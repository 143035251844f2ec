"""A capture and a driver call that waits for the context keep out of each other's way, however rarely a thread is scheduled."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent
AGENT = ROOT / "lib" / "gpubpf" / "agent" / "src"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("waiting") / "waiting_calls"
    sources = [Path(__file__).with_name("waiting_calls.cpp"), AGENT / "driver" / "waiting_call.cpp"]
    options = ["-std=c++17", "-O1", "-pthread", "-Wall", "-Werror", "-iquote", AGENT]
    subprocess.run(["g++", *options, "-o", made, *sources], check=True)
    return made


@pytest.mark.parametrize("driver", ["sleeps", "spins"])
def test_no_capture_begins_while_a_thread_enters_the_driver(program: Path, driver: str) -> None:
    said = subprocess.run([program, driver], capture_output=True, text=True, timeout=120, check=True).stdout
    found = dict(zip(*[iter(said.split())] * 2, strict=True))
    assert found["early"] == found["child"] == "0", said
    assert int(found["excused"]) <= 20, said  # of 40
