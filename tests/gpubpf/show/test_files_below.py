"""Files below a directory whose owner may be anybody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpubpf.show import files_below as module
from gpubpf.show.files_below import DEPTH, files_below


def test_files_and_directories(tmp_path: Path) -> None:
    for name in ("b/y", "a/x", "a/.hidden/z", "top", "a/c/w"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone").symlink_to(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    at = str(tmp_path)
    every = [
        (at, ["gone", "loop", "pipe", "top"]),
        (f"{at}/a", ["x"]),
        (f"{at}/b", ["y"]),
        (f"{at}/a/.hidden", ["z"]),
        (f"{at}/a/c", ["w"]),
    ]
    assert [*files_below(at)] == every
    assert [*files_below(at, hidden=False)] == [*every[:3], every[4]]
    assert [*files_below(f"{at}/none")] == [(f"{at}/none", [])]


def test_neither_deep_nor_many_directories_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """os.walk calls itself for each directory, which a chain of them makes fail."""
    before = os.open(".", os.O_PATH)
    try:
        os.chdir(tmp_path)
        for _ in range(1200):
            os.mkdir("a")
            os.chdir("a")
    finally:
        os.fchdir(before)
        os.close(before)
    assert len([*files_below(str(tmp_path))]) == DEPTH + 1
    for number in range(20):
        (tmp_path / f"f{number}").touch()
    monkeypatch.setattr(module, "MOST_ENTRIES", 10)
    assert len([*files_below(str(tmp_path))]) == 1
    for _ in range(1200):  # pytest's own removal calls itself, too
        os.rename(tmp_path / "a", tmp_path / "b")
        if (tmp_path / "b" / "a").exists():
            os.rename(tmp_path / "b" / "a", tmp_path / "a")
        os.rmdir(tmp_path / "b")
        if not (tmp_path / "a").exists():
            break
