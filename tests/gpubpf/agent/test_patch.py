"""The agent's inline hooks: instruction lengths against objdump, and entry points of a real driver."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
AGENT = HERE.parent.parent.parent / "lib" / "gpubpf" / "agent"
SOURCES = AGENT / "src"


def built(name: str, place: Path, *libraries: str) -> Path:
    """A test program, with the agent's patch.cpp and prologue.cpp."""
    program = place / name
    compiler = [shutil.which("g++") or "c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        [
            *compiler,
            f"-I{AGENT / 'lib' / 'build'}",  # definitions.h, which make generates
            "-o",
            program,
            HERE / f"{name}.cpp",
            SOURCES / "patch.cpp",
            SOURCES / "prologue.cpp",
            *libraries,
        ],
        check=True,
    )
    return program


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("patch")


def library_path(name: str) -> str:
    found = subprocess.check_output([shutil.which("gcc") or "cc", f"-print-file-name={name}"], text=True)
    return str(Path(found.strip()).resolve())


def instructions(library: str) -> dict[str, str]:
    """Of a library's functions: bytes in hexadecimal → text."""
    command = ["objdump", "-d", "-w", "-j", ".text", library]
    lines = (line.split("\t") for line in subprocess.check_output(command, text=True).splitlines())
    return {
        parts[1].replace(" ", ""): parts[2] for parts in lines if len(parts) > 2 and "(bad)" not in parts[2]
    }


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs binutils")
def test_instruction_lengths(place: Path) -> None:
    found = instructions(library_path("libstdc++.so.6"))
    program = built("decode_lengths", place)
    answer = subprocess.run(
        [program], input="\n".join(found) + "\n", capture_output=True, text=True, check=True
    )
    lengths = [int(line) for line in answer.stdout.split()]
    assert len(lengths) == len(found) > 10_000
    wrong = {
        code: (found[code], n) for code, n in zip(found, lengths, strict=True) if n not in (0, len(code) // 2)
    }
    assert not wrong
    assert lengths.count(0) < len(found) / 500  # what is not known is refused, not guessed


def test_functions_of_many_shapes_can_be_hooked(place: Path) -> None:
    subprocess.run([built("hook_shapes", place)], check=True, timeout=60)


def test_hooks_are_taken_out_under_load_and_put_in_again(place: Path) -> None:
    subprocess.run([built("hooks_again", place, "-pthread")], check=True, timeout=60)


def test_entry_points_of_a_real_driver(place: Path) -> None:
    name = os.environ.get("GPUBPF_LIBCUDA", "/usr/lib/x86_64-linux-gnu/libcuda.so.1")
    if not Path(name).exists():
        if os.environ.get("GPUBPF_REQUIRE_LIBCUDA") == "1":
            pytest.fail(f"no {name}; install NVIDIA's driver library (Debian non-free: libcuda1)")
        pytest.skip("no driver library here (Debian non-free: libcuda1)")
    subprocess.run([built("hook_driver", place, "-ldl"), name], check=True, timeout=60)
