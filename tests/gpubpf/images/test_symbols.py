"""Names of functions by address: of programs and a library with known functions, of files that are none."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import gpubpf_fuse
from gpubpf.agent.protocol import StackFrame
from gpubpf.images import symbols
from gpubpf.process import host_frames, limits
from gpubpf.process.host_frames import Identity, MappedFile, MappedFiles
from gpubpf.process.patience import NotLooked

pytestmark = pytest.mark.without_driver

SOURCE = r"""
namespace ns {
template <typename T> __attribute__((noinline)) T twice(T x) { return x * 2 + 1; }
template int twice<int>(int);
}
extern "C" int plain(int x) { return ns::twice(x) - 3; }
static __attribute__((noinline, used)) int hidden(int x) { return x ^ 5; }
extern "C" int seen(int x) { return hidden(x) + 1; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("symbols")
    (place / "x.cpp").write_text(SOURCE)
    made = place / "libx.so"
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", made, place / "x.cpp"], check=True)
    return made


def addresses(library: Path) -> dict[str, int]:
    """Addresses of symbols, as another program reads them."""
    tool = shutil.which("nm")
    if tool is None:
        pytest.skip("needs nm")
    lines = subprocess.run([tool, library], capture_output=True, text=True, check=True).stdout.splitlines()
    return {words[2]: int(words[0], 16) for line in lines if len(words := line.split()) == 3}


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_read_files", "_charges", "_unreadable"):
        monkeypatch.setattr(symbols, name, {})


def mapped(file: Path, pid: int = 0, user: int = 0) -> MappedFile:
    """The file, as if a process had mapped it."""
    return MappedFile(pid or os.getpid(), user, Identity.of(file.stat()))


def lookup(file: Path, at: int, pid: int = 0, user: int = 0) -> symbols.FunctionOffset | None:
    return symbols.lookup(str(file), at, mapped(file, pid, user))


def test_functions_of_a_library(library: Path) -> None:
    places = addresses(library)
    expected = {
        "plain": "plain",
        "seen": "seen",
        "_ZL6hiddeni": "hidden",
        "_ZN2ns5twiceIiEET_S1_": "ns::twice",
    }
    for mangled, name in expected.items():
        at = places[mangled]
        assert lookup(library, at) == symbols.FunctionOffset(name, 0)
        assert lookup(library, at + 2) == symbols.FunctionOffset(name, 2)
    assert symbols.describe(str(library), places["plain"] + 1, mapped(library)) == "plain+0x1 (libx.so)"
    assert lookup(library, 1) is None
    assert symbols.describe(str(library), 1, mapped(library)) == "libx.so+0x1"


def test_without_the_full_table_exported_functions_are_known(library: Path, tmp_path: Path) -> None:
    places = addresses(library)
    bare = tmp_path / "libx.so"
    subprocess.run(["strip", "-o", bare, library], check=True)
    assert lookup(bare, places["plain"]) == symbols.FunctionOffset("plain", 0)
    assert lookup(bare, places["_ZL6hiddeni"]) is None


def test_a_program_whose_addresses_are_not_offsets_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.cpp").write_text(SOURCE + "int main() { return seen(1); }")
    subprocess.run(["g++", "-O1", "-no-pie", "-o", tmp_path / "x", tmp_path / "x.cpp"], check=True)
    at = addresses(tmp_path / "x")["_ZL6hiddeni"]
    assert at > (tmp_path / "x").stat().st_size
    assert lookup(tmp_path / "x", at) == symbols.FunctionOffset("hidden", 0)


PLAIN = symbols.FunctionOffset("plain", 0)


def test_a_relative_name_is_that_of_the_process(library: Path) -> None:
    at, there = addresses(library)["plain"], mapped(library)
    with subprocess.Popen(["sleep", "100"], cwd=library.parent) as process:
        assert symbols.lookup("libx.so", at, there) is None
        assert symbols.lookup("libx.so", at, mapped(library, process.pid)) == PLAIN
        process.kill()


def test_a_process_that_has_ended_has_names_only_of_the_file_that_it_mapped(
    library: Path, tmp_path: Path
) -> None:
    """The tool may see another file of that name: another build, or that of another container."""
    file, other = tmp_path / "libx.so", tmp_path / "other.so"
    shutil.copy(library, file)
    at = addresses(library)["plain"]
    with subprocess.Popen(["true"]) as process:
        pass
    was = mapped(file, process.pid)
    shutil.copy(library, other)
    other.rename(file)
    assert symbols.lookup(str(file), at, was) is None
    assert symbols.describe(str(file), at, was) == f"libx.so+{at:#x}"
    assert lookup(file, at, process.pid) == PLAIN
    assert symbols.lookup(str(file), at, None) is None


def test_frames_have_the_file_that_is_mapped(library: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(library, tmp_path / "liby.so"))
    loaded = ctypes.CDLL(str(file))
    address = ctypes.cast(loaded.plain, ctypes.c_void_p).value
    assert address is not None
    at = addresses(library)["plain"]
    sent = [
        StackFrame(address, at, str(file), ""),
        StackFrame(1, 1, str(file), ""),
        StackFrame(2, 0, "", "f"),
    ]
    first, nowhere, outside = MappedFiles(os.getpid(), 7).frames(sent)
    assert first.mapped == mapped(file, user=7) and symbols.frame_of(first) == "plain+0x0 (liby.so)"
    assert nowhere.mapped is None and symbols.frame_of(nowhere) == "liby.so+0x1"
    assert symbols.frame_of(outside) == "f"
    # A new build has the same name, and perhaps other functions at these addresses.
    shutil.copy(library, tmp_path / "new.so")
    (tmp_path / "new.so").rename(file)
    (late,) = MappedFiles(os.getpid(), 7).frames(sent[:1])
    assert late.mapped is None and symbols.frame_of(late) == f"liby.so+{at:#x}"


@pytest.mark.parametrize(
    "refusal", [OSError(errno.EMFILE, "too many open files"), OSError(errno.ENOMEM, "no memory"), NotLooked()]
)
def test_a_file_is_looked_up_again_after_a_failure_that_passes(
    monkeypatch: pytest.MonkeyPatch, refusal: OSError
) -> None:
    """One that does not pass is remembered: the server waits for each of these looks."""
    answers: list[OSError | MappedFile | None] = []

    def mapped_at(pid: int, user: int, address: int, path: str) -> MappedFile | None:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(host_frames, "mapped_at", mapped_at)
    files, found = MappedFiles(os.getpid(), 0), mapped(Path(__file__))
    for address, sent in ((1 << 32, [refusal, refusal, found]), (2 << 32, [OSError(errno.ENOENT, "")])):
        answers += sent
        seen = [files.frames([StackFrame(address, 0, "a", "")])[0].mapped for _ in range(5)]
        assert seen == [None, None, found, found, found] if len(sent) > 1 else seen == [None] * 5
        assert not answers


def test_the_files_of_a_process_are_limited(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(limits, "NAMED_FILES", 2)
    monkeypatch.setattr(host_frames, "mapped_at", lambda pid, user, address, path: looks.append(address))
    files = MappedFiles(os.getpid(), 0)
    for number in range(1, 9):
        files.frames([StackFrame(number << 32, 0, "a", "")] * 3)
    assert looks == [1 << 32, 2 << 32]


def test_symbols_of_a_user_are_limited(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest files of the same user make room, never those of another."""
    at = addresses(library)["plain"]
    copies = [Path(shutil.copy(library, tmp_path / f"{number}.so")) for number in range(6)]
    monkeypatch.setattr(limits, "SYMBOL_BYTES_OF_USER", 3 * symbols._LEAST_CHARGE)
    assert lookup(copies[0], at, user=8) == PLAIN
    for file in copies[1:]:
        assert lookup(file, at, user=7) == PLAIN
    kept = [identity.inode for identity in symbols._read_files]
    assert kept == [file.stat().st_ino for file in (copies[0], *copies[3:])]
    monkeypatch.setattr(limits, "SYMBOL_BYTES_OF_USER", 100)
    monkeypatch.setattr(symbols, "_read_files", {})
    assert lookup(library, at, user=7) is None


def test_a_file_with_holes_costs_nothing(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its table of names claims to be large, but its blocks are not there."""
    data = bytearray(library.read_bytes())
    sections = int.from_bytes(data[40:48], "little")
    for at in range(sections, len(data) - 63, 64):
        if int.from_bytes(data[at + 4 : at + 8], "little") == 3:  # SHT_STRTAB
            data[at + 32 : at + 40] = (200 << 20).to_bytes(8, "little")
    file = tmp_path / "sparse.so"
    file.write_bytes(data)
    os.truncate(file, 1 << 30)
    monkeypatch.setattr(limits, "SYMBOL_BYTES_OF_USER", 64 << 20)
    monkeypatch.setattr(os, "pread", lambda *args: pytest.fail("reads it") if args[1] > 60 << 20 else b"")
    assert lookup(file, 0x1100) is None


def test_without_files_it_is_tried_again(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, path: str) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    at = addresses(library)["plain"]
    with monkeypatch.context() as changed:
        changed.setattr(host_frames, "opened", refuse)
        assert lookup(library, at) is None
    assert lookup(library, at) == PLAIN


@pytest.mark.skipif(bool(gpubpf_fuse.cannot_mount()), reason=gpubpf_fuse.cannot_mount())
def test_a_file_that_never_arrives_is_not_opened(tmp_path: Path) -> None:
    with gpubpf_fuse.unanswered(tmp_path) as file:
        there = MappedFile(os.getpid(), 0, Identity(1, 2, 3, 4))
        assert symbols.lookup(str(file), 0x1100, there) is None
        assert not any(thread.name == "gpubpf-look" for thread in threading.enumerate())


def test_a_process_cannot_take_all_time_of_the_tool(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, other = addresses(library)["plain"], library.with_name("liby.so")
    shutil.copy(library, other)
    assert lookup(library, at) is not None
    monkeypatch.setattr(limits, "SYMBOLS", -1)
    assert lookup(other, at) is None
    assert lookup(library, at) is not None  # is read already


def test_an_address_in_this_process(library: Path) -> None:
    loaded = ctypes.CDLL(str(library))
    address = ctypes.cast(loaded.seen, ctypes.c_void_p).value
    assert address is not None
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split()
        low, high = (int(part, 16) for part in words[0].split("-"))
        if low <= address < high:
            assert lookup(Path(words[5]), address - low + int(words[2], 16)) == symbols.FunctionOffset(
                "seen", 0
            )
            return
    raise AssertionError("the library is not mapped")


def test_files_that_tell_nothing(library: Path, tmp_path: Path) -> None:
    whole = library.read_bytes()
    rng = random.Random(3)
    cases = [b"", b"\x7fELF", whole[:100], whole[: len(whole) // 2]]
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(40):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        damaged[: rng.choice((64, 512))] = whole[:64]
        cases.append(bytes(damaged))
    for number, data in enumerate(cases):
        file = tmp_path / f"{number}.so"
        file.write_bytes(data)
        lookup(file, 0x1100)  # whatever it says: no exception
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), str(tmp_path), "/no/such", "[vdso]", ""):
        assert symbols.lookup(path, 0x1100, MappedFile(os.getpid(), 0, Identity(1, 2, 3, 4))) is None
