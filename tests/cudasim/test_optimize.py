"""What ran for a long time is compiled with more optimization in the next process, once; a damaged result is made again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cudasim_device import program, run
from gpubpf_commands import quoted


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A C compiler that writes down its options."""
    script = tmp_path / "gcc"
    script.write_text(f'#!/bin/sh\necho "$@" >>{quoted(tmp_path / "log")}\nexec gcc "$@"\n')
    script.chmod(0o755)
    return script


def levels(compiler: Path, after: str, hostile: bool = False) -> list[str]:
    """Run the program. Return the levels at which code was compiled; not those of the module, which has no code."""
    log = compiler.with_name("log")
    log.write_text("")
    settings = {"CUDASIM_CACHE": str(compiler.with_name("cache")), "CUDASIM_CC_COMPILER": str(compiler)}
    done = run([program("long_running")], hostile, **settings, CUDASIM_OPTIMIZE_AFTER=after)
    assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")
    return [
        next(word for word in line.split() if word.startswith("-O"))
        for line in log.read_text().splitlines()
        if "module.so" not in line
    ]


@pytest.mark.parametrize("hostile", [False, True], ids=["kind", "hostile"])
def test_the_next_process_compiles_with_more_optimization_once(compiler: Path, hostile: bool) -> None:
    assert levels(compiler, "0", hostile) == ["-O1"]
    assert levels(compiler, "0", hostile) == ["-O2"]
    assert levels(compiler, "0", hostile) == []
    assert levels(compiler, "60") == []
    assert levels(compiler, "never") == []
    (optimized,) = compiler.with_name("cache").glob("*.optimized.so")
    os.truncate(optimized, optimized.stat().st_size // 2)
    assert levels(compiler, "never") == []
    assert levels(compiler, "60") == ["-O2"]
    assert levels(compiler, "60") == []


@pytest.mark.parametrize("after", ["60", "never"])
def test_what_ran_for_a_short_time_stays_as_it_is(compiler: Path, after: str) -> None:
    assert levels(compiler, after) == ["-O1"]
    assert levels(compiler, after) == []
