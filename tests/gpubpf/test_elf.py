"""ELF files as they are, by address, in a process's memory, and damaged."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from gpubpf import elf
from gpubpf.errors import ImageError
from gpubpf.process import address_space

SOURCE = """
int counter = 7, uninitialised;
int twice(int x) { return 2 * x; }
__attribute__((visibility("hidden"))) int inside(int x) { return x + 1; }
"""


@pytest.fixture(scope="module", params=["gnu", "sysv"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elf")
    (folder / "a.c").write_text(SOURCE)
    made = folder / "liba.so"
    options = [f"-Wl,--hash-style={request.param}", "-Wl,-rpath,/opt/one:$ORIGIN/two"]
    options += ["-Wl,--no-as-needed", "-lm"]
    subprocess.run(["cc", "-shared", "-fPIC", folder / "a.c", *options, "-o", made], check=True)
    return made


def test_a_file(library: Path) -> None:
    data = library.read_bytes()
    with open(library, "rb") as file:
        for found in (elf.of_file(file.fileno()), elf.of_bytes(data)):
            names = [section.name for section in found.sections]
            assert {".text", ".dynsym", ".bss"} <= set(names)
            bss = found.sections[names.index(".bss")]
            assert bss.size and found.contents(bss) == b""
            assert found.search_path() == "/opt/one:$ORIGIN/two"
            assert found.needed()[0] == "libm.so.6"
            full, exported = list(found.symbol_tables((elf.STT_FUNC,)))
            assert "inside" in {elf.string_at(full[1], int(s["name"])) for s in full[0]}
            assert {elf.string_at(exported[1], int(s["name"])) for s in exported[0]} >= {"twice"}
            dynsym = found.sections[names.index(".dynsym")]
            strings = found.name_table(dynsym)
            assert "counter" in {
                strings.at(s.name) for s in found.symbols(dynsym) if s.type == elf.STT_OBJECT
            }


def test_by_address(library: Path) -> None:
    """The same functions in a file, and in a process where it is loaded; there the bytes are the same."""
    loaded = ctypes.CDLL(str(library))
    assert loaded.twice(4) == 8
    mapped = next(
        x
        for x in address_space.libraries(address_space.mappings(os.getpid()))
        if x.mappings[0].path == str(library)
    )
    with open(library, "rb") as file, address_space.Memory(os.getpid()) as memory:
        view = elf.LoadedFile(file.fileno())
        in_file, in_memory = elf.exports(view), elf.exports(memory, mapped.base)
        assert {"twice", "counter"} <= set(in_file) and "inside" not in in_file
        assert {n: (s.address - mapped.base, s.size) for n, s in in_memory.items()} == {
            n: (s.address, s.size) for n, s in in_file.items()
        }
        twice = in_file["twice"]
        code = os.pread(file.fileno(), twice.size, view.offset(twice.address))
        assert (
            view.read(twice.address, twice.size)
            == memory.read(mapped.base + twice.address, twice.size)
            == code
        )
        segment = elf.of_file(file.fileno()).loads[1]
        assert elf.address_of([segment], segment.offset) == segment.address
        assert elf.offset_of([segment], segment.address + segment.size) is None
        with pytest.raises(OSError):
            view.offset(1 << 62)


def test_other_files(tmp_path: Path) -> None:
    with open(__file__, "rb") as file:
        assert elf.exports(elf.LoadedFile(file.fileno())) == {}
        with pytest.raises(ImageError):
            elf.of_file(file.fileno())
    for data in (b"", b"\x7fELF\x02\x01", b"\x7fELF\x01\x01" + bytes(100), b"\x7fELF\x02\x02" + bytes(100)):
        with pytest.raises(ImageError):
            elf.of_bytes(data)


def test_damaged(library: Path, tmp_path: Path) -> None:
    """Whatever is in the headers: an ImageError, an OSError or a result."""
    original = library.read_bytes()
    headers = int.from_bytes(original[40:48], "little")
    chance = random.Random(1)
    made = tmp_path / "damaged.so"
    refused = 0
    for _ in range(400):
        data = bytearray(original[: chance.choice([len(original), chance.randrange(len(original))])])
        for _ in range(chance.randrange(1, 6)):
            at = chance.choice(
                [chance.randrange(64), chance.randrange(64, 600), chance.randrange(headers, len(original))]
            )
            if at < len(data):
                data[at] = chance.choice([0, 255, 127, 128, chance.randrange(256)])
        try:
            found = elf.of_bytes(bytes(data))
            list(found.symbol_tables((elf.STT_FUNC, elf.STT_OBJECT)))
            found.search_path()
            found.needed()
            for section in found.sections:
                list(found.symbols(section))
        except ImageError:
            refused += 1
        made.write_bytes(data)
        with open(made, "rb") as file:
            elf.exports(elf.LoadedFile(file.fileno()))
    assert 0 < refused < 400


def test_headers_far_away(tmp_path: Path) -> None:
    """Offsets that no file has (the kernel takes signed ones)."""
    made = tmp_path / "far"
    for place in (2**63 - 1, 2**64 - 1):
        header = struct.pack(
            "<16sHHIQQQI6H", b"\x7fELF\x02\x01", 3, 62, 1, 0, place, place, 0, 64, 56, 9, 64, 9, 1
        )
        made.write_bytes(header + bytes(4096))
        with open(made, "rb") as file:
            assert elf.exports(elf.LoadedFile(file.fileno())) == {}
            with pytest.raises(ImageError):
                _ = elf.of_file(file.fileno()).sections


def test_one_long_name_for_all() -> None:
    """A hundred thousand sections that name a string of 60,000 bytes: 6 GB, were it read each time."""
    count = 100_000
    text = b"x" * 60_000 + b"\0"
    start = 64 + len(text)
    header = struct.pack("<16sHHIQQQI6H", b"\x7fELF\x02\x01", 3, 62, 1, 0, 0, start, 0, 64, 56, 0, 64, 0, 1)
    first = struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, count, 0, 0, 0, 0)
    names = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64, len(text), 0, 0, 0, 0)
    data = header + text + first + names * (count - 1)
    tracemalloc.start()
    with pytest.raises(ImageError, match="names"):
        _ = elf.of_bytes(data).sections
    assert tracemalloc.get_traced_memory()[1] < 1 << 30
    tracemalloc.stop()


def test_numpy_is_imported_when_it_is_needed() -> None:
    program = "import sys, gpubpf.elf; sys.exit('numpy' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": str(Path(elf.__file__).parents[1])},
        ).returncode
        == 0
    )
