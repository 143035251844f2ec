"""Where functions return: every return instruction, none in the middle of another instruction, and when that cannot be known."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpubpf import elf
from gpubpf.linux import x86_code
from gpubpf.linux.returns import Code

HERE = Path(__file__).with_name("returns")
LIBRARIES = (
    "/lib/x86_64-linux-gnu/libc.so.6",
    "/lib/x86_64-linux-gnu/libm.so.6",
    "/usr/lib/x86_64-linux-gnu/libamdhip64.so.5",
    "/usr/lib/x86_64-linux-gnu/libhsa-runtime64.so.1",
)
UNSEEN = {
    "to_another_library": "it ends in a jump to strtol",
    "to_anywhere": "it ends in a jump to a function that only the running program knows",
    "to_pointer": "it ends in a jump to a function that only the running program knows",
    "forever": "it has no return instruction",
    "table_in_code": "there is data in its code",
    "not_x86_64": "it has an instruction that is not known",
}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("returns") / "libshapes.so"
    subprocess.run(["gcc", "-shared", "-nostartfiles", "-o", made, HERE / "shapes.S"], check=True)
    return made


def symbols(path: Path) -> dict[str, int]:
    lines = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: int(at, 16) for at, _, name in (line.split() for line in lines if line[0] == "0")}


def test_shapes(shapes: Path) -> None:
    at = symbols(shapes)
    with shapes.open("rb") as file:
        code = Code(file.fileno())
        exported = elf.exports(elf.LoadedFile(file.fileno()))
        found = {name: code.returns(symbol.address) for name, symbol in exported.items()}
    wanted = {name: tuple(sorted(at[n] for n in at if n.startswith(f"{name}.returns."))) for name in exported}
    wanted["jumps_to_neighbour"] = wanted["neighbour"]
    assert {name: r.unseen for name, r in found.items() if r.unseen} == UNSEEN
    assert {name: r.addresses for name, r in found.items() if not r.unseen} == {
        name: places for name, places in wanted.items() if name not in UNSEEN
    }
    assert len(found) == 16


def test_a_stripped_library_has_the_same_returns(shapes: Path, tmp_path: Path) -> None:
    """Without its symbol table, only the table for unwinding says where functions begin that are not exported."""
    stripped = Path(shutil.copy(shapes, tmp_path))
    with shapes.open("rb") as file, stripped.open("rb") as other:
        subprocess.run(["strip", stripped], check=True)
        exported = elf.exports(elf.LoadedFile(file.fileno()))
        assert [Code(file.fileno()).returns(s.address) for s in exported.values()] == [
            Code(other.fileno()).returns(s.address) for s in exported.values()
        ]


@pytest.mark.parametrize(
    "compiler", ["gcc -O2", "gcc -O2 -fcf-protection", "gcc -O2 -fno-pic", "clang-15 -O2"]
)
def test_a_switch_with_a_table(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler.split()[0]) is None:
        pytest.skip(f"no {compiler}")
    made = tmp_path / "switch"
    kind = ["-nostdlib", "-no-pie", "-Wl,-e,0"] if "no-pic" in compiler else ["-shared", "-fPIC"]
    linked = [*kind, "-Wl,--unresolved-symbols=ignore-all", "-o", made, HERE / "switch.c"]
    subprocess.run([*compiler.split(), *linked], check=True)
    text = subprocess.run(["objdump", "-d", made], capture_output=True, text=True, check=True).stdout
    if not re.search(r"jmp +\*(?!0x)", text):
        pytest.skip("the compiler made no table")
    at = symbols(made)
    with made.open("rb") as file:
        code = Code(file.fileno())
        for name in ("chooses", "after"):
            body = text.partition(f"<{name}>:")[2].partition("\n\n")[0]
            wanted = [int(m[1], 16) for m in re.finditer(r"^ *([0-9a-f]+):.*\tret", body, re.M)]
            assert wanted and list(code.returns(at[name]).addresses) == wanted, body


@pytest.mark.parametrize("path", LIBRARIES)
def test_instructions_end_where_binutils_says(path: str) -> None:
    """The first 200,000 bytes of code."""
    if not Path(path).exists():
        pytest.skip(f"no {path}")
    command = ["objdump", "-d", "--no-show-raw-insn", "-j", ".text"]
    with open(path, "rb") as file:
        library = elf.LoadedFile(file.fileno())
        (text,) = (s for s in elf.of_file(file.fileno()).sections if s.name == ".text")
        first = elf.address_of(library.segments, text.offset) or 0
        size = min(text.size, 200_000)
        code = library.read(first, size)
    done = subprocess.run(
        [*command, f"--start-address={first}", f"--stop-address={first + size}", path],
        capture_output=True,
        text=True,
        check=True,
    )
    starts = [int(m[1], 16) - first for m in re.finditer(r"^ *([0-9a-f]+):\t", done.stdout, re.M)]
    assert len(starts) > 20_000
    wrong = [
        (hex(first + start), code[start:end].hex())
        for start, end in itertools.pairwise(starts[:-16])
        if code[start] != 0x9B and length(code[start : start + 16]) != end - start  # binutils combines fwait
    ]
    assert not wrong


def length(code: bytes) -> int:
    """Return the length of the first instruction in bytes."""
    block = x86_code.block(code, 0)
    if block.kind is not None and block.last == 0:
        return block.end
    return len(next(x86_code.instructions(code, 0, 1), (0, b""))[1])
