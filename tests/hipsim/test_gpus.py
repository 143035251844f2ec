"""Which GPU hipsim is for a program."""

from __future__ import annotations

import io
import re

import pytest

from hipsim.gpus import GPUS, architectures, other_code
from hipsim_device import HIPSIM

ENTRY = b"\x00hipv4-amdgcn-amd-amdhsa--%s\x00"


def test_the_device_knows_the_same_gpus() -> None:
    table = (HIPSIM / "src" / "thunk" / "gpus.h").read_text()
    assert tuple(re.findall(r'^    \{"(gfx\w+)"', table, re.M)) == GPUS


@pytest.mark.parametrize(
    "names", [[], [b"gfx9060"], [b"gfx90a:xnack-"], [b"gfx1030", b"gfx906:sramecc+:xnack-"]]
)
def test_the_gpus_that_a_program_has_code_for(names: list[bytes]) -> None:
    content = b"\x7fELF" + b"".join(ENTRY % name for name in names)
    found = architectures(io.BytesIO(content))
    assert found == {name.decode().partition(":")[0] for name in names}


@pytest.mark.parametrize("before", range((1 << 20) - 60, (1 << 20) + 3))
def test_a_name_between_two_parts_of_a_file(before: int) -> None:
    assert architectures(io.BytesIO(b"x" * before + ENTRY % b"gfx90a")) == {"gfx90a"}
    assert architectures(io.BytesIO(b"x" * before + ENTRY.rstrip(b"\0") % b"gfx90a")) == {"gfx90a"}


@pytest.mark.parametrize(
    ("names", "asked", "text"),
    [
        (
            ["gfx908", "gfx1100"],
            None,
            "app has code for gfx1100, gfx908, not for gfx906, gfx90a or gfx1030",
        ),
        (["gfx906"], "gfx90a", "app has code for gfx906, not for gfx90a"),
        (["gfx906", "gfx908"], None, None),
        (["gfx90a"], "gfx90a", None),
        ([], "gfx90a", None),  # unknown: a script, for example
    ],
)
def test_a_program_with_code_for_other_gpus(names: list[str], asked: str | None, text: str | None) -> None:
    assert other_code("app", set(names), asked) == text
