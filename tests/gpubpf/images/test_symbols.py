"""Names of functions by address: of programs and a library with known functions, of files that are none."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import gpubpf_fuse
from gpubpf.images import symbols
from gpubpf.process import limits

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
        assert symbols.lookup(str(library), at) == symbols.FunctionOffset(name, 0)
        assert symbols.lookup(str(library), at + 2) == symbols.FunctionOffset(name, 2)
    assert symbols.describe(str(library), places["plain"] + 1) == "plain+0x1 (libx.so)"
    assert symbols.lookup(str(library), 1) is None
    assert symbols.describe(str(library), 1) == "libx.so+0x1"


def test_without_the_full_table_exported_functions_are_known(library: Path, tmp_path: Path) -> None:
    places = addresses(library)
    bare = tmp_path / "libx.so"
    subprocess.run(["strip", "-o", bare, library], check=True)
    assert symbols.lookup(str(bare), places["plain"]) == symbols.FunctionOffset("plain", 0)
    assert symbols.lookup(str(bare), places["_ZL6hiddeni"]) is None


def test_a_program_whose_addresses_are_not_offsets_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.cpp").write_text(SOURCE + "int main() { return seen(1); }")
    subprocess.run(["g++", "-O1", "-no-pie", "-o", tmp_path / "x", tmp_path / "x.cpp"], check=True)
    at = addresses(tmp_path / "x")["_ZL6hiddeni"]
    assert at > (tmp_path / "x").stat().st_size
    assert symbols.lookup(str(tmp_path / "x"), at) == symbols.FunctionOffset("hidden", 0)


def test_the_file_is_that_of_the_process(library: Path, tmp_path: Path) -> None:
    """Names are relative to the process's directory. When it has ended, they are looked for from here."""
    process = subprocess.Popen(["sleep", "100"], cwd=library.parent)
    try:
        at = addresses(library)["plain"]
        expected = symbols.FunctionOffset("plain", 0)
        assert symbols.lookup("libx.so", at, process.pid) == expected
        assert symbols.lookup("libx.so", at) is None
    finally:
        process.kill()
        process.wait()
    assert symbols.lookup(str(library), at, process.pid) == expected


@pytest.mark.skipif(bool(gpubpf_fuse.cannot_mount()), reason=gpubpf_fuse.cannot_mount())
def test_a_file_that_never_arrives_is_not_opened(tmp_path: Path) -> None:
    with gpubpf_fuse.unanswered(tmp_path) as file:
        assert symbols.lookup(str(file), 0x1100) is None
        assert not any(thread.name == "gpubpf-look" for thread in threading.enumerate())


def test_a_process_cannot_take_all_time_of_the_tool(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, other = addresses(library)["plain"], library.with_name("liby.so")
    shutil.copy(library, other)
    assert symbols.lookup(str(library), at) is not None
    monkeypatch.setattr(limits, "SYMBOLS", -1)
    assert symbols.lookup(str(other), at) is None
    assert symbols.lookup(str(library), at) is not None  # is read already


def test_an_address_in_this_process(library: Path) -> None:
    loaded = ctypes.CDLL(str(library))
    address = ctypes.cast(loaded.seen, ctypes.c_void_p).value
    assert address is not None
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split()
        low, high = (int(part, 16) for part in words[0].split("-"))
        if low <= address < high:
            assert symbols.lookup(words[5], address - low + int(words[2], 16)) == symbols.FunctionOffset(
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
        symbols.lookup(str(file), 0x1100)  # whatever it says: no exception
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), str(tmp_path), "/no/such", "[vdso]", ""):
        assert symbols.lookup(path, 0x1100) is None
