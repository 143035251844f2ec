"""Objects that are small, or of the largest size, and made to cost the reader memory or time: each is refused with one line."""

from __future__ import annotations

import functools
import resource
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpubpf import elf
from gpubpf.errors import ImageError
from gpubpf.objects import loading, object_file
from gpubpf_objects import build, needs_clang

pytestmark = [needs_clang, pytest.mark.without_driver]

TEXT = """
MAP(sums, HASH, u64, u32, 100);
u64 counts[4] = {1, 2};
static __noinline u64 twice(u64 x) { counts[1] += x; return 2 * x; }
SEC("kprobe/_Z4workPi") int on_entry(void *ctx) { u64 key = twice(1); return bpf_map_update_elem(&sums, &key, &key, 0); }
"""
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
MEMORY = 1 << 30  # bytes; address space of the readers beyond what this process already has


@functools.cache
def seed() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return build(TEXT, Path(folder) / "seed.bpf.o").read_bytes()


def headers(data: bytes) -> list[list[int]]:
    """The section headers, as lists of the fields of Elf64_Shdr."""
    _, _, _, _, _, _, at, _, _, _, _, size, count, _ = _HEADER.unpack_from(data)
    return [list(_SECTION.unpack_from(data, at + size * n)) for n in range(count)]


def number(data: bytes, name: str) -> int:
    return next(n for n, one in enumerate(elf.of_bytes(data).sections) if one.name == name)


def with_headers(data: bytes, sections: list[list[int]]) -> bytes:
    """The object with these section headers, behind its end."""
    fields = list(_HEADER.unpack_from(data))
    fields[6], fields[12] = len(data), len(sections) if len(sections) < 0xFF00 else 0
    if not fields[12]:
        sections[0][5] = len(sections)
    return _HEADER.pack(*fields) + data[64:] + b"".join(_SECTION.pack(*one) for one in sections)


def many_sections(name: str, count: int, **fields: int) -> bytes:
    """Sections like one of the seed, of the same name and content."""
    data = seed()
    found = headers(data)
    one = list(found[number(data, name)])
    for field, value in fields.items():
        one[{"type": 1, "offset": 4, "size": 5}[field]] = value
    return with_headers(data, found + [one] * count)


def replaced(name: str, content: bytes) -> bytes:
    """The object with another content of a section."""
    data = seed()
    found = headers(data)
    found[number(data, name)][4:6] = len(data), len(content)
    return with_headers(data + content, found)


def zeros() -> bytes:
    return many_sections(".data", 2000, type=8, size=64 << 20)


def data_again() -> bytes:
    return many_sections(".data", 60000, size=64 << 10, offset=0)


def relocations() -> bytes:
    """Each refers to the last of many functions or maps."""
    data = seed()
    section = number(data, ".relkprobe/_Z4workPi")
    one = elf.of_bytes(data).contents(elf.of_bytes(data).sections[section])[:16]
    return replaced(".relkprobe/_Z4workPi", b"".join(struct.pack("<Q", n) + one[8:] for n in range(3 << 20)))


def lines() -> bytes:
    """Each has a long text of its own."""
    data = seed()
    types = elf.of_bytes(data).contents(elf.of_bytes(data).sections[number(data, ".BTF")])
    _, _, _, header, _, _, strings, length = struct.unpack_from("<HBBIIIII", types)
    texts = bytes(types[header + strings :][:length]) + (b"x" * 4000 + b"\0") * 500
    types = types[: header + strings] + texts
    types = types[:20] + struct.pack("<I", len(texts)) + types[24:]
    count = 200_000
    records = b"".join(struct.pack("<IIII", 8 * n, 0, length + n, n << 10) for n in range(count))
    part = struct.pack("<III", 16, 1, count) + records
    own = struct.pack("<HBBI", 0xEB9F, 1, 0, 24) + struct.pack("<IIII", 0, 0, 0, len(part)) + part
    data = replaced(".BTF", types)
    found = headers(data)
    found[number(data, ".BTF.ext")][4:6] = len(data), len(own)
    return with_headers(data + own, found)


def code() -> bytes:
    """One function of sixty megabytes."""
    data = seed()
    content = bytes.fromhex("bf11000000000000") * (60 << 17)
    found = headers(data)
    found[number(data, "kprobe/_Z4workPi")][4:6] = len(data), len(content)
    table = found[number(data, ".symtab")]
    symbols = bytearray(data[table[4] :][: table[5]])
    for at in range(0, len(symbols), 24):
        if (
            struct.unpack_from("<H", symbols, at + 6)[0] == number(data, "kprobe/_Z4workPi")
            and symbols[at + 4] & 15 == 2
        ):
            struct.pack_into("<Q", symbols, at + 16, len(content))
    table[4] = len(data) + len(content)
    return with_headers(data + content + bytes(symbols), found)


def test_the_seed_is_accepted() -> None:
    loading.read(seed())
    loading.read(with_headers(seed(), headers(seed())))


@pytest.mark.parametrize(
    "make", [zeros, data_again, relocations, lines, code], ids=lambda make: make.__name__
)
def test_what_costs_much_is_refused(make: Callable[[], bytes]) -> None:
    data = make()
    assert len(data) < object_file.LARGEST
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    began = time.thread_time()
    try:
        with pytest.raises(ImageError):
            loading.read(data)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.thread_time() - began < 10
