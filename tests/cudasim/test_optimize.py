"""Code that runs for long is compiled again, in the background. The program and later runs use the result, if it is undamaged."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cudasim_device import program, run

NEW = "right, also with the new code\n"


def launch(cache: Path, after: str, launches: int, hostile: bool = False) -> str:
    done = run(
        [program("long_running"), str(launches)],
        hostile,
        CUDASIM_CACHE=str(cache),
        CUDASIM_OPTIMIZE_AFTER=after,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(cache: Path) -> dict[str, int]:
    """The files of the cache by what their names end in, with their sizes."""
    return {path.name.partition(".")[2]: path.stat().st_size for path in cache.iterdir()}


@pytest.mark.parametrize("hostile", [False, True], ids=["kind", "hostile"])
def test_the_program_and_later_ones_use_the_new_code(tmp_path: Path, hostile: bool) -> None:
    assert launch(tmp_path, "0", 10_000, hostile) == NEW
    made = files(tmp_path)
    assert made.keys() == {"so", "0.c", "0.so", "0.optimized.so"}
    assert launch(tmp_path, "0", 20) == "right\n"  # it begins with that code, so no more is loaded
    optimized = next(tmp_path.glob("*.optimized.so"))
    plain = optimized.with_name(optimized.name.replace(".optimized", ""))
    plain.unlink()
    assert launch(tmp_path, "never", 2) == "right\n" and not plain.exists()
    os.truncate(optimized, made["0.optimized.so"] // 2)
    assert launch(tmp_path, "never", 2) == "right\n" and plain.exists()


def test_the_process_that_compiles_may_outlive_the_program(tmp_path: Path) -> None:
    assert launch(tmp_path, "0", 1) == "right\n"
    until = time.monotonic() + 300
    while "0.optimized.so" not in files(tmp_path):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert files(tmp_path).keys() == {"so", "0.c", "0.so", "0.optimized.so"}


def test_short_programs_are_not_compiled_again(tmp_path: Path) -> None:
    assert launch(tmp_path, "60", 5) == "right\n"
    assert files(tmp_path).keys() == {"so", "0.c", "0.so"}


def test_without_the_text_nothing_is_compiled_again(tmp_path: Path) -> None:
    assert launch(tmp_path, "never", 1) == "right\n"
    next(tmp_path.glob("*.0.c")).unlink()
    assert launch(tmp_path, "0", 5) == "right\n"
    assert files(tmp_path).keys() == {"so", "0.so"}
