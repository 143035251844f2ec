"""Source lines of programs, with a line table that the compiler has just made, and with damaged ones."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gpubpf import elf
from gpubpf.errors import ImageError
from gpubpf.images.source_lines import SourceLines

SOURCE = """#include <stdio.h>
int first(int n) {
    return n + 1;
}
int main(void) {
    return first(2);
}
"""
COMPILERS = [found for name in ("gcc", "clang") if (found := shutil.which(name))]
pytestmark = pytest.mark.skipif(not COMPILERS, reason="needs a C compiler")


def program(place: Path, compiler: str, *options: str) -> Path:
    (place / "app.c").write_text(SOURCE)
    command = [compiler, "-O0", *options, "-o", "app", "app.c"]
    subprocess.run(command, cwd=place, check=True)
    return place / "app"


def lines(path: Path) -> dict[str, tuple[str, int] | None]:
    """The file and line at the beginning of each function of the program."""
    file = os.open(path, os.O_RDONLY)
    try:
        found = SourceLines(file)
        symbols, names = next(elf.of_file(file).symbol_tables((elf.STT_FUNC,)))
        at = {elf.string_at(names, int(one["name"])): int(one["value"]) for one in symbols}
        return {name: found.at(at[name]) for name in ("first", "main", "_start")}
    finally:
        os.close(file)


@pytest.mark.parametrize("compiler", COMPILERS, ids=os.path.basename)
@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_lines_of_functions(tmp_path: Path, compiler: str, version: int) -> None:
    found = lines(program(tmp_path, compiler, f"-gdwarf-{version}"))
    source = str(tmp_path / "app.c")
    assert (found["first"], found["main"]) == ((source, 2), (source, 5))
    assert found["_start"] is None or found["_start"][0] != source


def test_what_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImageError, match="no line table"):
        lines(program(tmp_path, COMPILERS[0], "-g0"))
    with pytest.raises(ImageError, match="compressed"):
        lines(program(tmp_path, COMPILERS[0], "-g", "-gz=zlib"))
    app = program(tmp_path, COMPILERS[0], "-g")
    monkeypatch.setattr("gpubpf.images.source_lines._MOST_LINES", 8)
    assert lines(app)["main"] is None
    monkeypatch.setattr("gpubpf.images.source_lines._MOST", 100)
    with pytest.raises(ImageError, match="too large"):
        lines(app)


def test_a_damaged_file_ends_in_an_exception_or_without_a_line(tmp_path: Path) -> None:
    app = program(tmp_path, COMPILERS[0], "-g")
    data = app.read_bytes()
    parts = [one for one in elf.of_bytes(data).sections if one.name.startswith(".debug_")]
    assert parts
    for part in parts:
        for at in range(part.offset, part.offset + part.size, max(part.size // 12, 1)):
            damaged = tmp_path / "damaged"
            damaged.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
            try:
                found = lines(damaged)
            except Exception:  # which `symbols.line_at` catches
                continue
            assert set(found) == {"first", "main", "_start"}
