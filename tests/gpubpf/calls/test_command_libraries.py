"""The libraries that a command's loader, its Python or its script will find."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gpubpf.calls import command_libraries
from gpubpf.calls.api import hip
from gpubpf.linux.libraries import LibraryNames
from gpubpf.process.users import User

NAMES = LibraryNames(*hip().libraries)
LIBRARY = "libamdhip64.so.6"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    made = tmp_path / "lib" / LIBRARY
    made.parent.mkdir()
    made.write_bytes(b"")
    return made


def found(command: list[str], **environment: str) -> list[str]:
    return command_libraries.find(command, {"PATH": os.environ["PATH"], **environment}, NAMES)


def program(tmp_path: Path, *options: str) -> str:
    made = tmp_path / "app"
    source = "int main(void) { return 0; }"
    subprocess.run(["cc", "-x", "c", "-", "-o", str(made), *options], input=source, text=True, check=True)
    return str(made)


@pytest.mark.parametrize("tags", ["-Wl,--enable-new-dtags", "-Wl,--disable-new-dtags"])
def test_beside_a_program_as_it_says(tmp_path: Path, library: Path, tags: str) -> None:
    assert found([program(tmp_path)]) == []
    assert found([program(tmp_path, tags, "-Wl,-rpath,/nowhere:$ORIGIN/lib")]) == [str(library)]
    assert found([program(tmp_path, tags, f"-Wl,-rpath,{library.parent}")]) == [str(library)]


def test_what_the_environment_and_the_words_of_a_command_say(tmp_path: Path, library: Path) -> None:
    app = program(tmp_path, "-Wl,-rpath,$ORIGIN/lib")
    assert found(["app"], LD_LIBRARY_PATH=f"/nowhere:{library.parent}") == [str(library)]
    assert found(["app"], LD_PRELOAD=f"/lib/x.so {library}") == [str(library)]
    assert found(["env", f"LD_LIBRARY_PATH={library.parent}", "app"]) == [str(library)]
    assert found(["nice", app, "-x"]) == [str(library)]
    assert found(["sh", "-c", f"cd /; exec {app} | cat"]) == [str(library)]
    script = tmp_path / "run.sh"
    script.write_text(f'#!/bin/sh\nexec {app} "$@"\n')
    script.chmod(0o755)
    assert found([str(script)]) == [str(library)]


def test_in_packages_of_a_python_and_of_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text("")
    python.chmod(0o755)
    ours = tmp_path / "lib/python3.11/site-packages/torch/lib"
    users = tmp_path / "home/.local/lib/python3.11/site-packages/_rocm_sdk_core/lib"
    for folder in (ours, users, tmp_path / "lib/python3.11/site-packages/other/lib"):
        folder.mkdir(parents=True)
        (folder / LIBRARY).write_bytes(b"")
    assert found([str(python)], HOME="/nowhere") == [str(ours / LIBRARY)]
    assert found([str(python)], HOME=str(tmp_path / "home")) == [str(ours / LIBRARY), str(users / LIBRARY)]
    monkeypatch.setenv("HOME", "/nowhere")
    user = User("user", 1000, 1000, (), str(tmp_path / "home"), "/bin/sh")
    assert command_libraries.with_command_libraries(hip(), [str(python)], user).libraries == (
        *hip().libraries,
        str(ours / LIBRARY),
        str(users / LIBRARY),
    )


def test_what_is_no_program_is_not_waited_for(tmp_path: Path, library: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert found([str(tmp_path / "fifo")]) == []
    (tmp_path / "fifo").chmod(0o755)
    assert found(["sh", str(tmp_path / "fifo")]) == found([str(tmp_path / "fifo")]) == []
    assert found([str(tmp_path / "absent")]) == found([]) == found([""]) == []


@pytest.mark.parametrize("size", [4, 16, 63, 200, 4000])
def test_a_program_that_is_cut_off(tmp_path: Path, library: Path, size: int) -> None:
    whole = program(tmp_path, "-Wl,-rpath,$ORIGIN/lib")
    part = tmp_path / "part"
    part.write_bytes(Path(whole).read_bytes()[:size])
    shutil.copymode(whole, part)
    assert found([str(part)]) == []
