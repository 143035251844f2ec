"""The results of AMD's compiler library that hipsim keeps, so that a program starts without LLVM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hipsim_device import environment, libraries, program, run

PROGRAM = Path(__file__).parent / "comgr_program.py"
SOURCE = "kernel void store(global int *to) { *to = 3; }\n"


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    if not (libraries() / "libamd_comgr.so.2").exists():
        pytest.skip("no libamd_comgr.so.2 or amd_comgr.h here")


@pytest.fixture
def compile(tmp_path: Path) -> Callable[..., tuple[int, dict[str, tuple[int, bytes]]]]:
    """Compile a text in another process; return the size of the result, and the cache: name → inode and content."""
    place = tmp_path / "cache"
    place.mkdir(mode=0o700)

    def compiled(
        source: str = SOURCE, *options: str, **more: str
    ) -> tuple[int, dict[str, tuple[int, bytes]]]:
        variables = environment(HIPSIM_CACHE=str(place), **more)
        command = [sys.executable, str(PROGRAM), *options]
        done = subprocess.run(
            command, input=source, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout), {
            file.name: (file.stat().st_ino, file.read_bytes()) for file in place.iterdir()
        }

    return compiled


def test_a_program_compiles_once(tmp_path: Path) -> None:
    """HIP's copy kernels are compiled by the first process, and taken from the cache by all others."""

    def files() -> dict[str, int]:
        return {file.name: file.stat().st_ino for file in tmp_path.iterdir()}

    first = run([program("vectoradd")], HIPSIM_CACHE=str(tmp_path))
    kept = files()
    again = run([program("vectoradd")], HIPSIM_CACHE=str(tmp_path))
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert first.stdout == again.stdout and first.stderr == again.stderr
    assert kept and files() == kept


def test_the_same_is_compiled_once(compile: Callable) -> None:
    size, kept = compile()
    assert size > 1000 and len(kept) == 1
    assert compile() == (size, kept)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("source", "options"),
    [(SOURCE.replace("3", "4"), []), (SOURCE, ["-O3"]), (SOURCE, ["-DTO=1"]), (SOURCE + " ", [])],
    ids=["text", "option", "definition", "space"],
)
def test_what_differs_is_compiled_anew(compile: Callable, source: str, options: list[str]) -> None:
    _, first = compile()
    _, both = compile(source, *options)
    assert len(both) == 2 and first.items() <= both.items()


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("source", "options", "variables"),
    [
        ('#include "other.h"\n' + SOURCE, ["-I{}"], {}),
        ('#inc\\\nlude "other.h"\n' + SOURCE, ["-I", "{}"], {}),
        (SOURCE, ["-include", "{}/other.h"], {}),
        (SOURCE, ["-include", "other.h"], {}),
        (SOURCE, ["-imacros", "other.h"], {}),
        ("constant char when[] = __DATE__ __TIME__;\n" + SOURCE, [], {}),
        (SOURCE, [], {"AMD_COMGR_EMIT_VERBOSE_LOGS": "1"}),
        (SOURCE, [], {"CCC_OVERRIDE_OPTIONS": "+-DX=1"}),
    ],
    ids=[
        "include",
        "split include",
        "option",
        "option in its folder",
        "macros",
        "time",
        "verbose",
        "override",
    ],
)
def test_what_depends_on_something_else_is_not_kept(
    compile: Callable, tmp_path: Path, source: str, options: list[str], variables: dict[str, str]
) -> None:
    (tmp_path / "other.h").write_text("#define OTHER 1\n")
    size, kept = compile(source, *[option.format(tmp_path) for option in options], **variables)
    assert size > 1000 and not kept


@pytest.mark.every(3)
@pytest.mark.parametrize("damage", ["half", "one bit", "empty", "directory", "of another"])
def test_a_damaged_file_is_made_again(compile: Callable, tmp_path: Path, damage: str) -> None:
    size, kept = compile()
    ((name, (_, content)),) = kept.items()
    file = tmp_path / "cache" / name
    if damage == "directory":
        file.unlink()
        file.mkdir()
    elif damage == "of another":
        _, both = compile(SOURCE.replace("3", "4"))
        file.write_bytes(next(other for key, (_, other) in both.items() if key != name))
    else:
        middle = len(content) // 2
        changed = bytes([content[middle] ^ 1])
        file.write_bytes(
            {
                "half": content[:middle],
                "one bit": content[:middle] + changed + content[middle + 1 :],
                "empty": b"",
            }[damage]
        )
    again, made = compile()
    assert again == size and len(made[name][1]) == len(content)
    assert compile() == (size, made)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_the_cache_of_another_user_is_not_used(compile: Callable, tmp_path: Path) -> None:
    os.chown(tmp_path / "cache", 1, 1)
    size, kept = compile(XDG_CACHE_HOME=str(tmp_path / "own"))
    assert size > 1000 and not kept
    assert len(list((tmp_path / "own").rglob("*"))) == 3  # gpubpf/hipsim/ and a file
