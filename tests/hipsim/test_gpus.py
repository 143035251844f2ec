"""Which GPU hipsim is for a program."""

from __future__ import annotations

import io
import re

import pytest

from hipsim.gpus import GPUS, architectures, suitable
from hipsim_device import HIPSIM

ENTRY = b"\x00hipv4-amdgcn-amd-amdhsa--%s\x00"


def test_the_device_knows_the_same_gpus() -> None:
    table = (HIPSIM / "src" / "thunk" / "gpus.h").read_text()
    assert tuple(re.findall(r'^    \{"(gfx\w+)"', table, re.M)) == GPUS


@pytest.mark.parametrize(
    ("names", "gpu"),
    [
        ([b"gfx90a:xnack-"], "gfx90a"),
        ([b"gfx1100", b"gfx1030"], "gfx1030"),
        ([b"gfx1030", b"gfx906:sramecc+:xnack-"], "gfx906"),
        ([b"gfx9060"], "gfx906"),  # none of its GPUs: the default
        ([], "gfx906"),
    ],
)
def test_the_first_gpu_that_has_code(names: list[bytes], gpu: str) -> None:
    content = b"\x7fELF" + b"".join(ENTRY % name for name in names)
    found = architectures(io.BytesIO(content))
    assert found == {name.decode().partition(":")[0] for name in names}
    assert suitable(found) == gpu


@pytest.mark.parametrize("before", range((1 << 20) - 60, (1 << 20) + 3))
def test_a_name_between_two_parts_of_a_file(before: int) -> None:
    assert architectures(io.BytesIO(b"x" * before + ENTRY % b"gfx90a")) == {"gfx90a"}
    assert architectures(io.BytesIO(b"x" * before + ENTRY.rstrip(b"\0") % b"gfx90a")) == {"gfx90a"}
