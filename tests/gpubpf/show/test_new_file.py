"""Files for results, in directories where others can put files, too."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gpubpf.errors import Error
from gpubpf.show import picture
from gpubpf.show.new_file import Directory, open_new
from gpubpf.show.output import Output
from gpubpf.show.perfetto import Trace


def _parquet(path: str) -> object:
    pytest.importorskip("pyarrow")
    from gpubpf.memory import parquet

    return parquet.Writer(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("owner", "mode"), [(0, 0o1777), (0, 0o777), (65534, 0o755)])
def test_a_link_as_the_directory_for_records_is_refused(tmp_path: Path, owner: int, mode: int) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (place / "link").symlink_to(tmp_path / "elsewhere")
    os.chown(place / "link", 65534, 65534, follow_symlinks=False)
    os.chown(place, owner, owner)
    place.chmod(mode)
    for path in (f"{place}/link", f"{place}/link/"):
        with pytest.raises(OSError):
            Directory.make(path, "part")
    assert not list((tmp_path / "elsewhere").iterdir())
    Directory.make(f"{place}/own", "part").close()


WRITERS: list[Callable[[str], object]] = [Output, Trace, picture.check, _parquet]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    return place


@pytest.mark.parametrize("write", WRITERS)
def test_a_link_in_a_shared_directory_is_refused(
    shared: Path, tmp_path: Path, write: Callable[[str], object]
) -> None:
    target = tmp_path / "target.png"
    target.write_text("kept")
    link = shared / "out.png"
    link.symlink_to(target)
    with pytest.raises(Error, match=r"cannot write .*out\.png: it is a symbolic link in a directory"):
        write(str(link))
    assert target.read_text() == "kept"
    link.unlink()
    link.symlink_to(tmp_path / "missing")
    with pytest.raises(Error, match="symbolic link"):
        write(str(link))
    assert not (tmp_path / "missing").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("make", [lambda path: path.write_text("kept"), os.mkfifo])
def test_a_file_of_another_user_in_a_shared_directory_is_refused(
    shared: Path, make: Callable[[Path], object]
) -> None:
    made = shared / "out"
    make(made)
    os.chown(made, 12345, 12345)
    with pytest.raises(OSError, match="it belongs to another user"):
        open_new(str(made))
    assert stat.S_ISFIFO(made.stat().st_mode) or made.read_text() == "kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("owner", "mode"), [(0, 0o777), (12345, 0o755)], ids=["of all", "of a user"])
def test_links_in_a_directory_of_others_are_refused(tmp_path: Path, owner: int, mode: int) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(mode)
    os.chown(place, owner, owner)
    (place / "link").symlink_to(tmp_path / "target")
    (place / "others").write_text("kept")
    os.chown(place / "others", 23456, 23456)
    for name, why in (("link", "symbolic link"), ("others", "another user")):
        with pytest.raises(OSError, match=why):
            open_new(str(place / name))
    assert not (tmp_path / "target").exists() and (place / "others").read_text() == "kept"
    (place / "own").touch()
    os.chown(place / "own", owner, owner)
    for name in ("own", "new"):
        os.close(open_new(str(place / name)))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("owner", "mode"), [(0, 0o1777), (0, 0o777), (12345, 0o755)])
@pytest.mark.parametrize("how", ["absolute", "relative"])
def test_a_link_higher_up_leads_to_its_owner_only(
    tmp_path: Path, owner: int, mode: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write to a directory above the file chooses no place where that user could not have made the file."""
    place, victim, own = tmp_path / "place", tmp_path / "victim", tmp_path / "own"
    for directory, user in ((place, owner), (victim, 0), (victim / "below", 0), (own, 12345), (own / "x", 0)):
        directory.mkdir()
        os.chown(directory, user, user)
    place.chmod(mode)
    (victim / "below" / "out").write_text("kept")
    for name, target in (
        ("link", victim),
        ("up", "../victim"),
        ("twice", "link"),
        ("through", own / "y" / "below"),
        ("loop", "loop"),
        ("dangling", victim / "new"),
        ("theirs", own),
    ):
        (place / name).symlink_to(target)
        os.chown(place / name, 12345, 12345, follow_symlinks=False)
    (own / "y").symlink_to(victim)
    os.chown(own / "y", 12345, 12345, follow_symlinks=False)
    monkeypatch.chdir(place)
    before = "" if how == "relative" else f"{place}/"
    for path in ("link/below", "up/below", "twice/below", "through", "loop", "./link/../victim/below"):
        with pytest.raises(OSError):
            open_new(f"{before}{path}/out")
        if ".." not in path:  # os.path.abspath takes "link/.." for nothing
            with pytest.raises(OSError):
                Directory.make(f"{before}{path}/out", "part")
    with pytest.raises(OSError):
        Directory.make(f"{before}dangling/more/dir", "part")
    assert [*victim.rglob("*")] == [victim / "below", victim / "below" / "out"]
    assert (victim / "below" / "out").read_text() == "kept"
    # What the owner of the link could have made there, and links of root.
    os.close(open_new(f"{before}theirs/out"))
    Directory.make(f"{before}theirs/records", "part").close()
    assert (own / "out").exists() and (own / "records" / "part").is_dir()
    (tmp_path / "trusted").symlink_to("victim")
    os.close(open_new(f"{tmp_path}/trusted/./below//out"))
    assert (victim / "below" / "out").read_text() == ""
    Directory.make(f"{tmp_path}/trusted/new/../more/dir", "part").close()
    assert (victim / "more" / "dir" / "part").is_dir()


def test_names_that_are_not_those_of_files(tmp_path: Path) -> None:
    for path in (f"{tmp_path}/", "/", f"{tmp_path}/none/out", f"{__file__}/out", ""):
        with pytest.raises(OSError):
            open_new(path)
    os.close(open_new("/dev/null"))
    read, write = os.pipe()
    with open(open_new(f"/dev/fd/{write}"), "wb") as file:
        file.write(b"x")
    assert os.read(read, 9) == b"x"
    os.close(read)
    os.close(write)


def test_all_else_is_written(shared: Path, tmp_path: Path) -> None:
    (shared / "own").write_text("old text")
    (tmp_path / "link").symlink_to(tmp_path / "target")  # only its user can make it
    for path in (shared / "own", shared / "new", tmp_path / "link", tmp_path / "new"):
        with open(open_new(str(path)), "w") as file:
            file.write("new")
        assert path.read_text() == "new"
    assert (tmp_path / "target").exists()
    os.close(open_new(str(shared / "own"), empty=False))
    assert (shared / "own").read_text() == "new"
