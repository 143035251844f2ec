"""Libraries that a user makes to keep a tool with uprobes busy: their probes, their time, and those of others."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubpf import elf
from gpubpf.errors import ImageError
from gpubpf.linux import returns, uprobes
from gpubpf.linux.library_limits import LibraryLimits
from gpubpf.process import limits, scans
from gpubpf.program import BPF
from gpubpf_host import needs_bpf

OTHER = 65534
TEXT = "int on_call(struct pt_regs *ctx) { return 0; }"
MAPS = """
import mmap, sys
kept = []
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        kept.append(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC))
print("ready", flush=True)
sys.stdin.read()
"""
pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs x86-64")


def library(path: Path, text: str) -> Path:
    """A library of assembler text."""
    subprocess.run(
        ["gcc", "-shared", "-nostdlib", "-x", "assembler", "-o", path, "-"], input=text, text=True, check=True
    )
    return path


def function(name: str, body: str) -> str:
    return f".globl {name}\n.type {name}, @function\n{name}:\n{body}\n.size {name}, . - {name}\n"


@contextlib.contextmanager
def mapping(*files: Path, user: int) -> Iterator[None]:
    """A process of a user that maps the code of files."""
    with subprocess.Popen(
        [sys.executable, "-I", "-c", MAPS, *files],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        user=user,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can read."""
    with tempfile.TemporaryDirectory(prefix="gpubpf-libraries-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@needs_bpf
def test_one_users_libraries_leave_probes_for_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LIBRARIES_OF_USER", 2)
    first = library(folder / "libmanyfiles.so.0", ".text\n" + function("many", "nop\nret"))
    copies = [Path(shutil.copy(first, folder / f"libmanyfiles.so.{n}")) for n in range(1, 5)]
    own = Path(shutil.copy(first, folder / "libmanyfiles.so.9"))
    notes: list[str] = []
    with mapping(*copies, user=OTHER), mapping(own, user=0):
        b = BPF(text=TEXT)
        b.attach_uprobe("libmanyfiles.so", ["many"], fn_name="on_call")
        host = b.host(None, notes.append)
        assert host is not None and host.uprobes is not None
        with host:
            placed = [Path(file.path) for file in host.uprobes.placed if file.functions]
    assert own in placed and len(set(placed) & set(copies)) == 2
    assert host.uprobes.incomplete
    assert notes == [f"some libraries of user {OTHER} are not traced: there are too many"]


@needs_bpf
def test_a_user_without_time_gets_probes_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = {OTHER}
    monkeypatch.setattr(LibraryLimits, "exhausted", lambda _, user: user in late)
    first = library(folder / "liblatefiles.so.0", ".text\n" + function("late", "nop\nret"))
    copies = [Path(shutil.copy(first, folder / f"liblatefiles.so.{n}")) for n in range(1, 4)]
    own = Path(shutil.copy(first, folder / "liblatefiles.so.9"))
    notes: list[str] = []
    with mapping(*copies, user=OTHER), mapping(own, user=0):
        b = BPF(text=TEXT)
        b.attach_uprobe("liblatefiles.so", ["late"], fn_name="on_call")
        host = b.host(None, notes.append)
        assert host is not None and host.uprobes is not None
        with host:
            assert [Path(file.path) for file in host.uprobes.placed] == [own]
            assert notes == [f"some libraries of user {OTHER} get probes late: reading them takes too long"]
            late.clear()
            until = time.monotonic() + 60
            while len(host.uprobes.placed) < 4 and time.monotonic() < until:
                time.sleep(0.02)
            assert {Path(file.path) for file in host.uprobes.placed} == {own, *copies}


@needs_bpf
def test_a_library_that_the_kernel_refuses_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt to find the functions that it refuses is slow."""
    names = [f"refused_{n}" for n in range(400)]
    text = ".text\n" + "".join(function(name, "nop\nret") for name in names)
    path = library(folder / "librefusedprobes.so.0", text)
    attempts = []

    def refuse(*_: object) -> int:
        attempts.append(1)
        raise OSError(errno.EINVAL, "")

    monkeypatch.setattr(uprobes, "best_method", lambda: "multi")
    monkeypatch.setattr(uprobes.Uprobes, "_loaded_program", lambda *_: 0)
    monkeypatch.setattr(uprobes.bpf_syscall, "link_uprobes", refuse)
    notes: list[str] = []
    with mapping(path, user=0):
        b = BPF(text=TEXT)
        b.attach_uprobe("librefusedprobes.so", names, fn_name="on_call")
        host = b.host(None, notes.append)
        assert host is not None and host.uprobes is not None
        with host:
            (placed,) = host.uprobes.placed
    assert set(placed.refused) == set(names) and len(attempts) < 300


def test_the_other_users_and_root_leave_each_other_a_share() -> None:
    shares = LibraryLimits()
    for user in range(1, 20):
        for _ in range(limits.LIBRARIES_OF_USER):
            if not shares.full(user):
                with shares.probing(user) as took:
                    took(True, 1, 0.0)
    assert shares.full(20) and not shares.full(0)
    most, of_user = limits.files()
    with shares.probing(0) as took:
        took(True, most - of_user, 0.0)
    assert shares.full(0)


def test_time_that_a_user_has_used_up_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, limits.SCAN_BURST / 2)  # the block takes half of the time
    monkeypatch.setattr(scans.time, "thread_time", lambda: next(clock))
    now = [1000.0]
    monkeypatch.setattr(scans.time, "monotonic", lambda: now[0])
    shares = LibraryLimits()
    with shares.probing(OTHER) as took:
        took(True, 1, limits.SCAN_BURST / 2)
    assert shares.exhausted(OTHER) and not shares.exhausted(0)
    now[0] += 1
    assert not shares.exhausted(OTHER)


def test_code_that_takes_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function with many jumps is fine; many of them use up the time for a file."""
    jumps = ".rept 100\njmp 1f\n1:\n.endr\nret"
    names = [f"jumps_{n}" for n in range(50)]
    path = library(tmp_path / "libjumps.so", ".text\n" + "".join(function(name, jumps) for name in names))
    clock = itertools.count()
    monkeypatch.setattr(returns.time, "thread_time", lambda: next(clock))
    monkeypatch.setattr(limits, "CODE", 1000)
    with open(path, "rb") as file:
        exported = elf.exports(elf.LoadedFile(file.fileno()))
        code = returns.Code(file.fileno())
        found = [code.returns(exported[name].address).unseen for name in names]
    assert found[0] == "" and found[-1] == "it has too much code"
    assert next(clock) < 1500


def test_a_table_of_imports_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = ".data\n" + "".join(f".quad outside_{n}\n" for n in range(9))
    path = library(tmp_path / "libimports.so", slots)
    with open(path, "rb") as file:
        assert len(elf.of_file(file.fileno()).imports()) == 9
        monkeypatch.setattr(elf, "_MOST_IMPORTS", 8)
        with pytest.raises(ImageError, match="it imports more than 8 functions"):
            elf.of_file(file.fileno()).imports()


def test_few_tables_of_symbols_are_read(tmp_path: Path) -> None:
    """Any number of sections can be the same table."""
    path = library(tmp_path / "libtables.so", ".text\n" + function("one", "ret"))
    data = bytearray(path.read_bytes())
    at, count = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 60)[0]
    headers = [bytes(data[at + 64 * n :][:64]) for n in range(count)]
    table = next(one for one in headers if struct.unpack_from("<I", one, 4)[0] == elf.SHT_SYMTAB)
    struct.pack_into("<Q", data, 40, len(data))
    struct.pack_into("<H", data, 60, count + 1000)
    data += b"".join((*headers, *[table] * 1000))
    assert len(list(elf.of_bytes(bytes(data)).symbol_tables([elf.STT_FUNC]))) <= 16
