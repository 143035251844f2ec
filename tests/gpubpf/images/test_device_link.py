"""Which parts of a file belong to one device link, and their PTX."""

from __future__ import annotations

import struct

import pytest

from gpubpf.images import device_link, fatbin
from gpubpf.images.device_link import LTO
from gpubpf.images.fatbin import FatbinImage
from gpubpf.ptx import parser

CC = (9, 0)
HEAD = ".version 9.0\n.target sm_75\n.address_size 64\n"
KERNEL = ".extern .func helper();\n.visible .entry NAME() { call helper; ret; }\n"
HELPER = ".visible .func helper() { ret; }\n"


def part(module: int, text: str, options: str = "--compile-only", sm: int = 75) -> FatbinImage:
    return FatbinImage("ptx", sm, "", (9, 0), options, 0, "", module, True, (HEAD + text).encode())


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


def test_the_smallest_limit_of_registers() -> None:
    limits = ["--compile-only -dlcm=cg", "--compile-only  -maxrregcount=64", "-maxrregcount 32"]
    chosen = device_link.choose(
        [part(k, KERNEL.replace("NAME", f"k{k}") if k else HELPER, o) for k, o in enumerate(limits)], CC
    )
    assert isinstance(chosen, FatbinImage) and chosen.options == "-dlcm=cg -maxrregcount=32"


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
