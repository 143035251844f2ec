"""For tests of HIP calls: programs of ours on the real library, or on one whose calls take known times (hip/standin.c)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpubpf.calls.api import hip
from gpubpf.linux import libraries

HERE = Path(__file__).parents[1] / "gpubpf" / "calls" / "hip"
_REAL = libraries.files(libraries.LibraryNames("libamdhip64.so.[567]"))
needs_hip = pytest.mark.skipif(not _REAL, reason="needs libamdhip64 (libamdhip64-5 in Debian)")


def standin(directory: Path, version: int = 6) -> Path:
    """Builds the stand-in as `libamdhip64.so.VERSION` in a directory, and returns its path. Its STANDIN says what calls do."""
    made = directory / f"libamdhip64.so.{version}"
    if not made.exists():
        script = HERE / "standin.map"
        options = ("-shared", "-fPIC", f"-Wl,-soname,{made.name}", f"-Wl,--version-script={script}")
        _compile(HERE / "standin.c", made, *options)
    return made


def real() -> Path:
    """The library that is installed; skips the test where there is none. (The mark `needs_hip` does so earlier.)"""
    if not _REAL:
        pytest.skip("needs libamdhip64 (libamdhip64-5 in Debian)")
    return Path(_REAL[0])


def program(
    directory: Path, library: Path, source: Path = HERE / "program.c", *options: str, name: str = ""
) -> Path:
    """Builds a program (hip/program.c makes the calls that its arguments name) that is linked with a library, and finds it there."""
    made = directory / (name or f"{source.stem}-{library.name}")
    _compile(source, made, *options, str(library), f"-Wl,-rpath,{library.parent}")
    return made


def _compile(source: Path, made: Path, *options: str) -> None:
    # As in AMD's libraries, no function ends in a jump to another library, which would hide its return.
    flags = "-O2 -g -Wall -Wextra -Werror -fno-optimize-sibling-calls".split()
    command = ["cc", *flags, f"-I{HERE}", "-o", str(made), str(source)]
    subprocess.run([*command, *options, "-lpthread", "-ldl"], check=True)


@dataclass(frozen=True)
class Counted:
    """What hip/program.c told of a call: how often, and its last result."""

    count: int
    result: int


def told(output: str) -> dict[str, Counted]:
    """What hip/program.c wrote, by call."""
    rows = (line.split() for line in output.splitlines() if line != "ready")
    return {name: Counted(int(count), int(result)) for name, count, result in rows}


def counts(path: Path) -> dict[int, dict[str, int]]:
    """What the stand-in wrote into STANDIN_COUNTS, by process and function."""
    found: dict[int, dict[str, int]] = {}
    for line in path.read_text().splitlines():
        pid, name, count = line.split()
        found.setdefault(int(pid), {})[name] = int(count)
    return found


def run(command: list[str], environment: Mapping[str, str] | None = None) -> dict[str, Counted]:
    """Runs hip/program.c to its end."""
    done = subprocess.run(
        command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=True
    )
    return told(done.stdout)


def number(name: str) -> int:
    """A function's number in HIP's table."""
    return next(i for i, f in enumerate(hip().functions) if f.name == name)
