"""`images.line_table`: source lines of machine code, against nvdisasm."""

from __future__ import annotations

import bisect
import random
import re
import struct
import subprocess
from pathlib import Path

import pytest

from gpubpf.elf import of_bytes
from gpubpf.errors import ImageError
from gpubpf.images import line_table
from gpubpf.images.line_table import source_lines
from gpubpf_sass import assembled, nvdisasm

# Two files, a function that is not inlined, and a loop that ptxas unrolls.
PTX = """.version 8.8
.target ARCH
.address_size 64
.func (.param .b32 r) f(.param .b32 a)
{
    .reg .b32 %r<9>;
    .loc 2 7 0
    ld.param.u32 %r1, [a];
    mul.lo.u32 %r2, %r1, 77;
    .loc 2 8 0
    st.param.b32 [r], %r2;
    ret;
}
.visible .entry first(.param .u64 p)
{
    .reg .b64 %rd<9>; .reg .b32 %r<9>;
    .loc 1 300 0
    ld.param.u64 %rd1, [p];
    .loc 1 301 0
    ld.global.u32 %r1, [%rd1];
    { .param .b32 a; .param .b32 r; st.param.b32 [a], %r1; call (r), f, (a); ld.param.b32 %r2, [r]; }
    .loc 2 20 0
    st.global.u32 [%rd1+16], %r2;
    .loc 1 302 0
    ret;
}
.visible .entry second(.param .u64 p)
{
    .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .pred %p;
    .loc 1 5 0
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, 0;
LOOP:
    .loc 1 6 0
    ld.global.u32 %r2, [%rd1];
    .loc 1 7 0
    add.u32 %r2, %r2, %r1;
    st.global.u32 [%rd1+64], %r2;
    .loc 1 6 0
    add.s64 %rd1, %rd1, 4;
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p, %r1, 4;
    @%p bra LOOP;
    ret;
}
.file 1 "/src/scale.cu"
.file 2 "/usr/include/helpers.cuh"
"""


def cubin_of(arch: str, folder: Path, *options: str) -> Path:
    return assembled(PTX.replace("ARCH", arch), arch, folder, *options)[0]


def of_nvdisasm(cubin: Path) -> dict[str, dict[int, tuple[str, int]]]:
    """The line of each instruction, by section and offset."""
    words = [nvdisasm(), "-g", "-c", str(cubin)]
    found: dict[str, dict[int, tuple[str, int]]] = {}
    place: tuple[str, int] | None = None
    name = ""
    for row in subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.(\w+)", row):
            name, place = section[1], None
        elif line := re.search(r'//## File "([^"]*)", line (\d+)', row):
            place = line[1], int(line[2])
        elif place and (made := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+\S", row)):
            found.setdefault(name, {})[int(made[1], 16)] = place
    return found


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_lines_are_those_of_nvdisasm(arch: str, tmp_path: Path) -> None:
    cubin = cubin_of(arch, tmp_path, "-lineinfo")
    found = source_lines(cubin.read_bytes())
    expected = of_nvdisasm(cubin)
    assert expected.keys() == {"first", "second"}
    for name, places in expected.items():
        begins = [at for at, _, _ in found[name]]
        assert begins == sorted(begins)
        for at, place in places.items():
            assert found[name][bisect.bisect_right(begins, at) - 1][1:] == place
    assert {("/usr/include/helpers.cuh", 7), ("/usr/include/helpers.cuh", 20), ("/src/scale.cu", 302)} <= {
        place for places in found.values() for _, *rest in places for place in [tuple(rest)]
    }


def test_a_small_table_does_not_become_large() -> None:
    """Each file costs five bytes, and its path repeats the name of its folder. A row costs one byte."""

    def table(files: int, rows: int, folder: bytes = b"f") -> bytes:
        names = folder + b"\0\0" + b"n\0\1\0\0" * files + b"\0"
        header = struct.pack("<BBbBB", 1, 1, 0, 1, 10) + bytes(9) + names
        program = b"\n" * rows + b"\0\1\1"  # special opcodes, then the end of the sequence
        content = struct.pack("<HI", 2, len(header)) + header + program
        return struct.pack("<I", len(content)) + content

    most = line_table.MOST_ROWS
    assert [len(rows) for rows in line_table._rows(table(3, 7))] == [8]
    assert [len(rows) for rows in line_table._rows(table(3, 5) + table(1, most - 7))] == [6, most - 6]
    for wrong, why in (
        (table(3, most), "too many rows"),
        (table(3, most // 2) * 2, "too many rows"),
        (table(100_000, 1, b"f" * 1_000_000), "too long"),
    ):
        assert len(wrong) < line_table.LARGEST
        with pytest.raises(ValueError, match=why):
            list(line_table._rows(wrong))


def test_without_lines_or_when_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = re.sub(r"\.(loc|file) .*", "", PTX.replace("ARCH", "sm_80"))
    assert source_lines(assembled(text, "sm_80", tmp_path)[0].read_bytes()) == {}
    with pytest.raises(ImageError):
        source_lines(b"no cubin")
    whole, chance, refused = cubin_of("sm_80", tmp_path, "-lineinfo").read_bytes(), random.Random(1), 0
    (table,) = (section for section in of_bytes(whole).sections if section.name == line_table.OF_SOURCE)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(4):
            data[table.offset + chance.randrange(table.size)] = chance.randrange(256)
        try:
            source_lines(bytes(data))
        except ImageError:
            refused += 1
    assert refused
    without_span = bytearray(whole)
    without_span[table.offset + 13] = 0  # special opcodes divide by it
    with pytest.raises(ImageError, match="damaged"):
        source_lines(bytes(without_span))
    monkeypatch.setattr(line_table, "MOST_ROWS", 5)
    with pytest.raises(ImageError, match="too many rows"):
        source_lines(whole)
    monkeypatch.undo()
    monkeypatch.setattr(line_table, "LARGEST", 16)
    with pytest.raises(ImageError, match="too large"):
        source_lines(whole)
