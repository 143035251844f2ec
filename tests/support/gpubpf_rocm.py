"""A directory as ROCm's is, with stand-ins for its libraries, and a program that uses them. Nothing of it has seen an AMD GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpubpf.calls import device_times

SOURCES = Path(__file__).parents[1] / "gpubpf" / "calls" / "rocprofiler"


def build(place: Path) -> Path:
    """`place`, with lib/ and program in it."""
    if not device_times.ROCPROFILER.library.exists():
        pytest.skip("libgpubpf-rocprofiler.so is not built; run script/setup")
    if not device_times.loadable(device_times.ROCPROFILER.library):
        pytest.skip(f"not every user can read {device_times.ROCPROFILER.library}")
    library = place / "lib"
    library.mkdir()
    compiler = ["cc", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{SOURCES}", f"-L{library}"]
    for source, name in (
        ("register", "librocprofiler-register.so.0"),
        ("sdk", "librocprofiler-sdk.so.1"),
        ("hip", "libamdhip64.so.7"),
    ):
        shared = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN"]
        needed = ["-l:librocprofiler-register.so.0"] if source == "hip" else []
        command = [*compiler, *shared, "-o", library / name, SOURCES / f"{source}.c", *needed, "-ldl"]
        subprocess.run(command, check=True)
    (library / "librocprofiler-sdk.so").symlink_to("librocprofiler-sdk.so.1")
    linked = [f"-Wl,-rpath,{library}", "-l:libamdhip64.so.7"]
    command = [*compiler, "-rdynamic", "-o", place / "program", SOURCES / "program.c", *linked]
    subprocess.run(command, check=True)
    return place
