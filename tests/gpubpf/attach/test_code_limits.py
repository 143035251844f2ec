"""What a process maps under the names of C libraries and allocators: how much of it is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpubpf import agent, elf
from gpubpf.attach import borrow
from gpubpf.attach.borrow import ProcessCode
from gpubpf.errors import SessionError
from gpubpf.process import address_space
from gpubpf.process.address_space import Library, Mapping, Memory
from gpubpf.record import replace


def _mapping(number: int, name: str, pages: int = 1) -> Mapping:
    start = 0x7F0000000000 + number * 0x10000000
    return Mapping(start, start + pages * 4096, "r-xp", 0, ("08:01", number + 1), f"/tmp/{number}/{name}")


def test_a_process_may_map_a_few_c_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Library] = []

    def library(self: ProcessCode, library: Library) -> Any:
        read.append(library)
        functions = dict.fromkeys(borrow._FUNCTIONS, 0)
        return borrow._LibraryCode(functions, (), -1, -1, False)

    monkeypatch.setattr(ProcessCode, "_library", library)
    with Memory(os.getpid()) as memory:
        few = [_mapping(n, "libc.so.6") for n in range(3)] * 30  # each many times: link namespaces
        assert ProcessCode(1, memory, few).functions(1)
        read.clear()
        many = [_mapping(n, "libc.so.6") for n in range(1000)]
        with pytest.raises(SessionError, match="has mapped 1000 C libraries"):
            ProcessCode(1, memory, many).functions(1)
        assert not read
        allocators = [_mapping(n, "libmalloc.so") for n in range(1000)]
        code = ProcessCode(1, memory, allocators)
        # Unknown ones count as code in which a thread may hold a lock.
        assert len(code.unsafe) == 1000 - len(read) and 0 < len(read) <= 16


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can open files as they are mapped")
def test_facts_about_a_library_are_kept_by_its_name_and_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process may map the C library under another name, or only a part of it: other processes have the whole."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    os.chmod(tmp_path, 0o700)
    monkeypatch.setattr(borrow, "_library_code", {})
    mapped = [m for m in address_space.mappings(os.getpid()) if m.path.endswith("/libc.so.6")]
    alias = [replace(m, path="/tmp/my_malloc.so") for m in mapped]
    part = [m for m in mapped if not m.code]

    def facts(mappings: list[Mapping]) -> borrow._LibraryCode:
        with Memory(os.getpid()) as memory:
            code = ProcessCode(os.getpid(), memory, mappings)
            return code._library(code.libraries[0])

    found = [facts(mappings) for mappings in (alias, part, mapped)]
    with open(mapped[0].path, "rb") as file:
        malloc = elf.exports(elf.LoadedFile(file.fileno()))["malloc"].address
    assert [any(a <= malloc < b for a, b in one.unsafe) for one in found] == [False, True, True]
    assert [one.calling >= 0 for one in found] == [True, False, True]
    monkeypatch.setattr(elf, "exports", lambda *_: pytest.fail("it was read again"))
    assert facts(mapped) == found[2]
    monkeypatch.setattr(borrow, "_library_code", {})  # as for the next tool
    assert facts(mapped) == found[2]


class _Large:
    """Code without the instructions that are looked for, of any size."""

    def __init__(self) -> None:
        self.bytes = 0

    def some(self, address: int, size: int) -> bytes:
        self.bytes += size
        return bytes(size)


def test_only_some_code_of_a_library_is_searched() -> None:
    pieces = tuple(_mapping(n, "libc.so.6", 1024) for n in range(100))
    source: Any = _Large()
    assert ProcessCode._find(b"\x0f\x05", source, 0, Library(pieces[0].start, pieces)) == -1
    assert source.bytes <= 8 << 20


def test_a_library_with_too_many_symbols_has_none() -> None:
    with open(agent.LIBRARY, "rb") as file:
        library = elf.LoadedFile(file.fileno())
        found = elf.exports(library)
        assert found and elf.exports(library, most=len(found) * 100) == found
        assert elf.exports(library, most=1) == {}


class _Code:
    """Code of these bytes, at address 0."""

    def __init__(self, code: bytes) -> None:
        self.code = code

    def some(self, address: int, size: int) -> bytes:
        return self.code[address : address + size]


def test_instructions_are_found_where_two_parts_meet() -> None:
    sought, length = b"\x0f\x05\xc3", 4 * borrow._PART
    mapped = _mapping(0, "libc.so.6", length >> 12)
    for at in (3, borrow._PART - 1, borrow._PART, 3 * borrow._PART - 2, length - 3):
        source: Any = _Code(bytes(at) + sought + bytes(length - at - 3))
        assert ProcessCode._find(sought, source, 0, Library(mapped.start, (mapped,))) == at
