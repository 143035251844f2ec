"""`images.tile_ir`: kernels of Tile IR bytecode, by name; and what --list says of them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from gpubpf.errors import ImageError
from gpubpf.images import fatbin, listing, tile_ir
from gpubpf.images.assemble import Target

INTEGER, ARRAY, DICTIONARY, HINTS = 1, 6, 10, 11  # attributes


def number(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + number(rest) if rest else bytes([low])


def section(kind: int, contents: bytes, before: int, alignment: int) -> bytes:
    head = bytes([kind | 0x80]) + number(len(contents)) + number(alignment)
    return head + b"\xcb" * (-(before + len(head)) % alignment) + contents


def hints(arch: int, name: int, value: int) -> bytes:
    """Return the hints of an entry for one architecture: one number."""
    one = bytes([DICTIONARY]) + number(1) + number(name) + bytes([INTEGER]) + number(0) + number(value)
    return bytes([HINTS]) + number(1) + number(arch) + one


def bytecode(version: tuple[int, int], names: list[str], kernels: list[str]) -> bytes:
    """Return bytecode with functions of these names; every second kernel has hints, and each function a body of 300 bytes."""
    strings = [*names, "sm_100", "occupancy"]
    functions = number(len(names))
    for k, name in enumerate(names):
        hinted = bool(k % 2)
        flags = (2 | (4 if hinted and version < (13, 5) else 0)) if name in kernels else 0
        functions += number(k) + number(5) + bytes([flags]) + number(k + 1)
        if flags and (hinted or version >= (13, 5)):
            functions += hints(len(names), len(names) + 1, 300) if hinted else bytes([HINTS, 0])
        if version >= (13, 5):
            functions += bytes([ARRAY, 0])
        functions += number(300) + bytes(300)
    made = tile_ir.MAGIC + bytes(version) + bytes(2)
    made += section(2, functions, len(made), 8)
    offsets = [sum(map(len, strings[:k])) for k in range(len(strings))]
    table = number(len(strings))
    table += bytes(-len(table) % 4) + struct.pack(f"<{len(strings)}I", *offsets) + "".join(strings).encode()
    made += section(1, table, len(made), 4)
    return made + b"\0"


NAMES, KERNELS = ["scale", "helper", "add_one", "other"], ["scale", "add_one", "other"]


@pytest.mark.parametrize("version", [(13, 1), (13, 4), (13, 5)])
def test_names_of_kernels(version: tuple[int, int]) -> None:
    assert tile_ir.kernel_names(bytecode(version, NAMES, KERNELS)) == KERNELS


def test_damaged_bytecode_is_refused() -> None:
    whole = bytecode((13, 1), NAMES, KERNELS)
    for end in range(len(whole) - 1):
        with pytest.raises(ImageError):
            tile_ir.kernel_names(whole[:end])
    for at in range(8, len(whole)):  # nothing else is raised
        damaged = whole[:at] + b"\xff" + whole[at + 1 :]
        try:
            tile_ir.kernel_names(damaged)
        except ImageError:
            continue


def fatbin_of(code: bytes, sm: int = 100) -> bytes:
    """Return a fatbin with Tile IR, as nvFatbinAddTileIR makes it."""
    image = struct.pack("<HHIQIIHHIIIQQQ", 0x80, 0x101, 64, len(code), 0, 0, 0, 0, sm, 0, 0, 0, 0, 0)
    return struct.pack("<IHHQ", fatbin.FATBIN_MAGIC, 1, 16, len(image) + len(code)) + image + code


@pytest.mark.parametrize("wrapped", [False, True])
def test_list_names_tile_kernels(wrapped: bool, tmp_path: Path) -> None:
    file = tmp_path / "kernels"
    code = bytecode((13, 1), NAMES, KERNELS)
    code += bytes(-len(code) % 8)
    file.write_bytes(fatbin_of(code) if wrapped else code)
    found = listing.listed(
        listing.sources_of_files([str(file)]),
        Target("gpu", (10, 0)),
        lambda parsed, wanted: {},
        lambda data: None,
    )
    assert {kernel.name.short: (kernel.reason, kernel.ptx, kernel.sass) for kernel in found} == dict.fromkeys(
        KERNELS, (tile_ir.REASON, (), ())
    )


def test_a_cubin_of_tile_ir_has_no_ptx_to_instrument() -> None:
    """tileiras keeps PTX in its cubins, but that of a kernel with threads, and the program launches the kernel without threads."""
    image = fatbin.FatbinImage(
        "elf", 100, "", (1, 8), "", 0, "", 0, False, b"\x7fELF..." + tile_ir.IN_CUBINS + b"\0"
    )
    assert fatbin.choose([image], (10, 0)) == tile_ir.REASON
    assert fatbin.choose([image], (9, 0)) == fatbin.SASS_ONLY
