"""Which parts of a file belong to one device link, and their PTX."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpubpf.images import device_link, fatbin
from gpubpf.images.device_link import LTO
from gpubpf.images.fatbin import FatbinImage
from gpubpf.ptx import parser
from gpubpf.ptx.indirect import PARTIAL
from gpubpf.record import replace

needs_ptxas = pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
CC = (9, 0)
HEAD = ".version 9.0\n.target sm_75\n.address_size 64\n"
KERNEL = ".extern .func helper();\n.visible .entry NAME() { call helper; ret; }\n"
HELPER = ".visible .func helper() { ret; }\n"


def part(module: int, text: str, options: str = "--compile-only", sm: int = 75) -> FatbinImage:
    return FatbinImage("ptx", sm, "", (9, 0), options, 0, "", module, True, (HEAD + text).encode())


def cubin(module: int, text: str, path: Path, *options: str) -> FatbinImage:
    """Machine code by ptxas. With `-c`, it is still to be linked."""
    (path / "in.ptx").write_text(HEAD + text)
    command = ["ptxas", "-arch=sm_75", *options, path / "in.ptx", "-o", path / "out.cubin"]
    subprocess.run(command, check=True)
    code = (path / "out.cubin").read_bytes()
    return FatbinImage("elf", 75, "", (1, 7), "", 0, "", module, "-c" in options, code)


def entries(chosen: FatbinImage | str) -> list[str]:
    assert isinstance(chosen, FatbinImage), chosen
    return list(parser.parse(chosen.text).entries)


def test_parts_are_found_by_what_they_need() -> None:
    unused = part(5, ".visible .func unused() { ret; }\n")
    images = [part(3, KERNEL.replace("NAME", "first")), part(4, HELPER), unused]
    (module,) = device_link.modules(images)
    assert [(image.module, image.part) for image in module] == [(3, 4), (3, 5)]
    chosen = device_link.choose(module, CC)
    assert entries(chosen) == ["first"] and isinstance(chosen, FatbinImage)
    assert parser.parse(chosen.text).functions["helper"].defined


def test_text_that_is_not_all_code_of_its_module_says_so() -> None:
    """Then no call through a register is followed: code that is missing may have functions for it."""

    def is_partial(images: Sequence[FatbinImage]) -> bool:
        chosen = device_link.choose(images, CC)
        assert isinstance(chosen, FatbinImage), chosen
        return PARTIAL in parser.parse(chosen.text).functions

    used = [part(3, KERNEL.replace("NAME", "first")), part(4, HELPER)]
    unused = part(5, ".visible .func unused() { ret; }\n")
    (alone,), (with_rest,) = device_link.modules(used), device_link.modules([*used, unused])
    assert not is_partial(alone) and is_partial(with_rest)
    exact = [replace(image, module=1, part=k + 1) for k, image in enumerate((*used, unused))]
    assert not is_partial(exact)  # as the agent sends them
    without_ptx = FatbinImage("elf", 90, "", (1, 7), "", 0, "", 1, True, b"", part=4)
    assert is_partial([*exact, without_ptx])


def test_the_smallest_limit_of_registers() -> None:
    limits = ["--compile-only -dlcm=cg", "--compile-only  -maxrregcount=64", "-maxrregcount 32"]
    chosen = device_link.choose(
        [part(k, KERNEL.replace("NAME", f"k{k}") if k else HELPER, o) for k, o in enumerate(limits)], CC
    )
    assert isinstance(chosen, FatbinImage) and chosen.options == "-dlcm=cg -maxrregcount=32"
    other = "--device-function-maxrregcount=32 -O2"
    chosen = device_link.choose([part(0, HELPER, other)], CC)
    assert isinstance(chosen, FatbinImage) and chosen.options == other


@pytest.mark.parametrize("newer", [False, True])
def test_the_form_of_each_part_that_suits(newer: bool) -> None:
    images = [
        part(0, KERNEL.replace("NAME", name), sm=sm) for name, sm in (("old", 75), ("new", 90), ("no", 120))
    ]
    assert entries(device_link.choose(images, CC, newer)) == ["new"]
    images = images[2:]
    if newer:
        assert entries(device_link.choose(images, CC, newer)) == ["no"]
    else:
        assert device_link.choose(images, CC, newer) == "PTX for a newer GPU (sm_120)"


def test_parts_that_do_not_fit_together() -> None:
    reason = device_link.choose([part(0, HELPER), part(1, HELPER)], CC)
    assert isinstance(reason, str) and "Multiple definition of 'helper'" in reason


def test_code_for_link_time_optimisation() -> None:
    lto = FatbinImage("lto", 75, "", (9, 0), "", 0, "", 1, True, b"code")
    assert device_link.choose([lto], CC) == LTO
    assert entries(device_link.choose([part(0, KERNEL.replace("NAME", "first")), lto], CC)) == ["first"]


def test_what_the_agent_sends() -> None:
    parts = [part(0, KERNEL.replace("NAME", "first")), part(1, HELPER)]
    empty = struct.pack("<IHHQ", fatbin.FATBIN_MAGIC, 1, 16, 0)
    data = struct.pack("<IIQQ", fatbin.WRAPPER_MAGIC, 2, 0, 0) + empty
    for image in parts:
        data += fatbin.pack(image)
    images = fatbin.images_of_bytes(data)
    assert [(image.kind, image.relocatable) for image in images] == [("ptx", True)] * 2
    assert entries(device_link.choose(images, CC)) == ["first"]


def test_a_part_that_defines_a_function_by_an_alias() -> None:
    alias = ".visible .func helper();\n.func own() { ret; }\n.alias helper, own;\n"
    (module,) = device_link.modules([part(0, KERNEL.replace("NAME", "first")), part(1, alias)])
    chosen = device_link.choose(module, CC)
    assert entries(chosen) == ["first"] and isinstance(chosen, FatbinImage)
    assert parser.parse(chosen.text).aliases == {"helper": "own"}


LTO_PART = FatbinImage("lto", 75, "", (9, 0), "", 0, "", 9, True, b"code")
WEAK = HELPER.replace(".visible", ".weak")
OTHER = ".visible .func other() { ret; }\n"


@needs_ptxas
@pytest.mark.parametrize(
    "first, second, defined",
    [
        (HELPER, HELPER, [False, False]),
        (None, HELPER, [False, False]),  # the first module's helper has no PTX
        (LTO_PART, HELPER, [False, False]),
        (OTHER, HELPER, [True, True]),
        (WEAK, WEAK, [True, True]),
        (WEAK + OTHER, WEAK, [True, True]),
        (WEAK + OTHER, WEAK + OTHER, [False, False]),
        (WEAK, HELPER, [True, True]),
    ],
)
def test_several_modules_of_a_file(
    first: str | FatbinImage | None, second: str, defined: list[bool], tmp_path: Path
) -> None:
    """Two modules need `helper`. Which part each was linked with is certain if only one part defines it."""
    images = [cubin(k, f".visible .entry k{k}() {{ ret; }}\n", tmp_path) for k in range(2)]
    images += [part(2 + k, KERNEL.replace("NAME", f"k{k}")) for k in range(2)]
    if isinstance(first, FatbinImage):
        images.append(first)
    else:
        images.append(part(4, first) if first else cubin(4, HELPER, tmp_path, "-c"))
    images.append(part(5, second))
    found = [device_link.choose(module, CC) for module in device_link.modules(images)]
    assert [entries(chosen) for chosen in found] == [["k0"], ["k1"]]
    texts = [chosen.text for chosen in found if isinstance(chosen, FatbinImage)]
    assert [parser.parse(text).functions["helper"].defined for text in texts] == defined


@needs_ptxas
@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("other", [LTO_PART, "machine code", "PTX"])
def test_weak_definitions_that_another_part_may_override(
    other: FatbinImage | str, modules: int, tmp_path: Path
) -> None:
    """Each kernel's part has a weak `helper`. A strong one may be in a part without PTX. With several modules, it may be any one's."""
    images = []
    for k in range(modules):
        text = f"{WEAK}.visible .entry k{k}() {{ call helper; ret; }}\n"
        images += [cubin(k, text, tmp_path), part(10 + k, text)]
    if isinstance(other, FatbinImage):
        images.append(other)
    else:
        images.append(cubin(20, HELPER, tmp_path, "-c"))
        if other == "PTX":
            images.append(part(20, HELPER))
    found = [device_link.choose(module, CC) for module in device_link.modules(images)]
    assert [entries(chosen) for chosen in found] == [[f"k{k}"] for k in range(modules)]
    helpers = [parser.parse(one.text).functions["helper"] for one in found if isinstance(one, FatbinImage)]
    meant = ("visible",) if modules == 1 and other == "PTX" else ("extern",)
    assert {helper.linkage for helper in helpers} == {meant}
    assert {helper.defined for helper in helpers} == {meant == ("visible",)}


@needs_ptxas
def test_modules_whose_kernels_come_with_their_own_definition(tmp_path: Path) -> None:
    images = []
    for k in (0, 1):
        code = "".join(f".visible .entry {name}{k}() {{ ret; }}\n" for name in ("user", "owner"))
        owner = HELPER + f".visible .entry owner{k}() {{ ret; }}\n"
        images += [
            cubin(k, code, tmp_path),
            part(10 + k, KERNEL.replace("NAME", f"user{k}")),
            part(20 + k, owner),
        ]
    found = [device_link.choose(module, CC) for module in device_link.modules(images)]
    assert [entries(chosen) for chosen in found] == [["user0", "owner0"], ["user1", "owner1"]]


@needs_ptxas
def test_local_functions_of_machine_code_define_nothing_for_others(tmp_path: Path) -> None:
    local = HELPER.removeprefix(".visible ") + ".visible .func other() { call helper; ret; }\n"
    parts = [part(2, KERNEL.replace("NAME", "first")), part(3, HELPER), cubin(4, local, tmp_path, "-c")]
    for images in (parts, [*parts, LTO_PART]):  # in one module, LTO code defines nothing that a part defines
        (module,) = device_link.modules(images)
        assert [image.part for image in module] == [3, 4]
