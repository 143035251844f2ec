"""The environment of a command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpubpf.traced.command import may_run_python, ptx_options, rocr_tool, start_command
from gpubpf.traced.device import Device
from gpubpf.traced.measurement import Measurement, Plan, Targets


@pytest.mark.parametrize(
    ("library", "environment", "variables"),
    [
        ("/opt/a/lib.so", {}, {"HSA_TOOLS_LIB": "/opt/a/lib.so"}),
        ("/opt/a/lib.so", {"HSA_TOOLS_LIB": "one two"}, {"HSA_TOOLS_LIB": "one two /opt/a/lib.so"}),
        ("/opt/a b/lib.so", {}, {"HSA_TOOLS_LIB": "lib.so", "LD_LIBRARY_PATH": "/opt/a b"}),
        (
            "/opt/a b/lib.so",
            {"HSA_TOOLS_LIB": "one", "LD_LIBRARY_PATH": "/x:/y"},
            {"HSA_TOOLS_LIB": "one lib.so", "LD_LIBRARY_PATH": "/opt/a b:/x:/y"},
        ),
    ],
)
def test_rocr_loads_the_agent_from_any_path(
    library: str, environment: dict[str, str], variables: dict[str, str]
) -> None:
    assert rocr_tool(Path(library), environment) == variables


@pytest.mark.parametrize(
    ("environment", "variables"),
    [
        ({}, {"CUPY_COMPILE_WITH_PTX": "1", "XLA_FLAGS": "--xla_gpu_asm_extra_flags=-lineinfo"}),
        (
            {"CUPY_COMPILE_WITH_PTX": "0", "XLA_FLAGS": "--one --two=3"},
            {"XLA_FLAGS": "--one --two=3 --xla_gpu_asm_extra_flags=-lineinfo"},
        ),
        ({"CUPY_COMPILE_WITH_PTX": "", "XLA_FLAGS": "--xla_gpu_asm_extra_flags=-O1"}, {}),
    ],
)
def test_libraries_keep_ptx_unless_the_user_says_otherwise(
    environment: dict[str, str], variables: dict[str, str]
) -> None:
    assert ptx_options(environment) == variables


@pytest.mark.parametrize(
    ("command", "may"),
    [
        (["python3", "train.py"], True),
        (["mpirun", "-n", "2", "/usr/bin/python3.12", "-m", "train"], True),
        (["numactl", "train.py"], True),
        (["sh", "-c", "true"], False),
        (["/nowhere/app", "--python"], False),
        (["a\0b"], False),
    ],
)
def test_commands_that_may_run_python(command: list[str], may: bool) -> None:
    assert may_run_python(command) == may


@pytest.mark.parametrize(("kind", "wanted"), [("gpu", True), ("gpu", False), ("sim", True)])
def test_a_command_on_a_gpu_keeps_ptx(
    kind: str, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command gets the variables, and one notice names them."""
    for name in ("CUPY_COMPILE_WITH_PTX", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    notes: list[str] = []
    script = tmp_path / "run"
    script.write_text(f"#!/bin/sh\necho $CUPY_COMPILE_WITH_PTX $XLA_FLAGS > {tmp_path}/out\n")
    script.chmod(0o755)
    targets = Targets([str(script)], ptx_options=wanted)
    measurement = Measurement(targets, Plan(Device(kind), ()), notes.append)
    assert start_command(targets.command, measurement, "@none").wait() == 0
    said = (tmp_path / "out").read_text().strip()
    expected = "1 --xla_gpu_asm_extra_flags=-lineinfo" if kind == "gpu" and wanted else ""
    assert said == expected
    assert [note.count("CUPY_COMPILE_WITH_PTX=1 XLA_FLAGS=--xla") for note in notes] == [1] * bool(expected)


def test_a_command_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o700)
    assert not may_run_python([str(tmp_path / "pipe")])
