"""Directories that another user could exchange hold no files of root."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from gpubpf import cache
from gpubpf.kernel import directories
from gpubpf.process import children
from gpubpf.show import picture

OTHER = 65534
pytestmark = [
    pytest.mark.without_driver,
    pytest.mark.skipif(os.geteuid() != 0, reason="giving files to another user needs root"),
]


@pytest.fixture
def of_root(tmp_path: Path) -> Path:
    place = tmp_path / "root"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture
def of_other(tmp_path: Path) -> Path:
    place = tmp_path / "other"
    place.mkdir()
    os.chown(place, OTHER, OTHER)
    return place


def test_others_can_exchange_what_is_below_their_directories(of_root: Path, of_other: Path) -> None:
    assert directories.keeps_entries(str(of_root), 0)
    (of_other / "root").mkdir()
    (of_other / "link").symlink_to(of_root)
    (of_root / "link").symlink_to(of_other)
    for place in (of_other, of_other / "root", of_other / "link", of_root / "link"):
        assert not directories.keeps_entries(str(place), 0)
    assert directories.keeps_entries(str(of_other), OTHER)


def test_anybody_can_exchange_what_is_in_a_directory_of_all(of_root: Path) -> None:
    of_root.chmod(0o777)
    assert not directories.keeps_entries(str(of_root), 0)
    of_root.chmod(0o1777)
    assert directories.keeps_entries(str(of_root), 0)


def test_temporary_files_are_not_in_another_users_directory(
    of_root: Path, of_other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(of_root))
    assert directories.temporary() == str(of_root)
    monkeypatch.setattr(tempfile, "tempdir", str(of_other))
    assert directories.temporary() == "/tmp"
    with children.temporary_directory() as made:
        assert made.parent == Path("/tmp")


def test_a_link_in_another_users_home_leads_to_no_cache(
    of_root: Path, of_other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once checked, it could lead elsewhere."""
    (of_other / ".cache").symlink_to(of_root)
    monkeypatch.setenv("HOME", str(of_other))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache, "_SHARED", str(of_root))
    assert cache.default().directory == of_root / "gpubpf-0"
    assert not (of_root / "gpubpf").exists()


def test_pictures_take_no_settings_from_another_users_home(
    of_root: Path, of_other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = []
    monkeypatch.setattr(picture, "_write", lambda *_: homes.append(Path.home()))
    for home in (of_other, of_root):
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("MPLCONFIGDIR", str(home))
        picture.write(str(of_root / "picture.svg"), [])
        assert os.environ["MPLCONFIGDIR"] == str(home)
    assert homes[0].parent != of_other and not homes[0].exists() and homes[1] == of_root
