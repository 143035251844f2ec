"""The cache: private, atomic, bounded, and never needed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpubpf import cache

KEY = cache.key("a", b"b")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache, "_SHARED", str(tmp_path / "tmp"))
    for name in ("xdg", "home", "tmp"):
        (tmp_path / name).mkdir(mode=0o700)
    return tmp_path


def test_put_and_get(environment: Path) -> None:
    store = cache.default()
    assert store.directory == environment / "xdg" / "gpubpf"
    assert store.get("ptx", KEY) is None
    path = store.put("ptx", KEY, b"body")
    assert path is not None and path.read_bytes().startswith(b"body")
    assert path == store.path("ptx", KEY)
    assert store.get("ptx", KEY) == b"body"
    assert store.get("other", KEY) is None
    assert os.stat(store.directory).st_mode & 0o777 == 0o700
    assert not [p for p in path.parent.iterdir() if p.name.startswith(".part")]


def test_keys_separate_their_parts() -> None:
    assert cache.key("ab", "c") != cache.key("a", "bc") != cache.key("abc")
    assert cache.key("ab") == cache.key(b"ab")
    assert cache.key("\udcff")  # a file name that is not UTF-8


@pytest.mark.parametrize(
    "settled", [2.0, -1000.0]
)  # seconds: the key is read from the cache only with the second
def test_keys_of_files_follow_their_contents(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: float
) -> None:
    monkeypatch.setattr(cache, "_BEGAN", time.time() + 1000)
    monkeypatch.setattr(cache, "_SETTLED", settled)
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_text("one")
    files[1].write_text("two")
    first = cache.key_of_files(files)
    assert cache.key_of_files(files) == first != cache.key_of_files(files[:1])
    files[1].write_text("three")
    assert cache.key_of_files(files) != first


def test_files_that_settled_are_read_once(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_BEGAN", time.time() + 1000)
    monkeypatch.setattr(cache, "_SETTLED", -1000.0)
    file = tmp_path / "a"
    file.write_text("one")
    first = cache.key_of_files([file])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda self: pytest.fail("it was read again"))
        assert cache.key_of_files([file]) == first
    file.write_text("two")  # of the same size
    os.utime(file, (1, 1))
    assert cache.key_of_files([file]) != first


def test_files_that_are_newer_than_the_process_have_a_key_of_its_own(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may run the code from before, whose results nobody else may get."""
    file = tmp_path / "a"
    file.write_text("one")
    monkeypatch.setattr(cache, "_BEGAN", time.time() + 1000)
    common = cache.key_of_files([file])
    monkeypatch.setattr(cache, "_BEGAN", time.time() - 1000)
    assert len({common, cache.key_of_files([file]), cache.key_of_files([file])}) == 3


@pytest.mark.parametrize(
    "stage, key",
    [("../x", KEY), ("ptx", "../../etc/passwd"), ("", KEY), ("ptx", KEY[:-1]), ("ptx", KEY + "\n")],
)
def test_only_stages_and_keys_become_paths(stage: str, key: str, environment: Path) -> None:
    with pytest.raises(ValueError):
        cache.default().get(stage, key)


def test_falls_back_to_home_then_to_tmp(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.default().directory == environment / "home" / ".cache" / "gpubpf"
    monkeypatch.delenv("HOME")
    assert cache.default().directory == environment / "tmp" / f"gpubpf-{os.geteuid()}"


def test_a_relative_directory_is_ignored(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")
    assert cache.default().directory == environment / "home" / ".cache" / "gpubpf"


def test_symlinks_are_not_followed(environment: Path) -> None:
    (environment / "elsewhere").mkdir(mode=0o700)
    (environment / "xdg" / "gpubpf").symlink_to(environment / "elsewhere")
    assert cache.default().directory == environment / "home" / ".cache" / "gpubpf"
    store = cache.default()
    store.put("ptx", KEY, b"body")
    path = store.path("ptx", KEY)
    assert path is not None
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert store.get("ptx", KEY) is None


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_directory_that_others_can_enter_is_not_used(mode: int, environment: Path) -> None:
    directory = environment / "xdg" / "gpubpf"
    directory.mkdir()
    directory.chmod(mode)
    assert cache.default().directory == environment / "home" / ".cache" / "gpubpf"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_somebody_elses_directory_is_not_used(environment: Path) -> None:
    directory = environment / "xdg" / "gpubpf"
    directory.mkdir(mode=0o700)
    os.chown(directory, 65534, 65534)
    os.chown(environment / "home", 65534, 65534)  # as under sudo
    assert cache.default().directory is None or cache.default().directory.parent == environment / "tmp"
    assert not (environment / "home" / ".cache").exists()


def test_nowhere_to_write_is_no_cache() -> None:
    program = (
        "from gpubpf import cache; cache._SHARED = '/proc'; s = cache.default();"
        "k = cache.key('x'); assert s.directory is None; assert s.put('ptx', k, b'x') is None;"
        "assert s.get('ptx', k) is None; s.sweep()"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "HOME": "/proc/nowhere"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_the_size_is_bounded_and_the_longest_unused_goes_first(environment: Path) -> None:
    store = cache.Cache(cache.default().directory, limit=1500)
    keys = [cache.key(str(i)) for i in range(20)]
    for age, key in enumerate(keys):
        path = store.put("ptx", key, bytes(100))
        if path is not None and path.exists():
            os.utime(path, (age, age))
    store.get("ptx", keys[10])  # used just now
    store.put("ptx", cache.key("last"), bytes(100))
    store.sweep()
    kept = [key for key in keys if store.get("ptx", key) is not None]
    assert 1 < len(kept) < 10
    assert kept[0] == keys[10] and kept[1:] == keys[-len(kept) + 1 :]
    assert store.put("ptx", KEY, bytes(1501)) is None
