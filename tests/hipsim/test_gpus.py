"""Which GPU hipsim is for a program."""

from __future__ import annotations

import io
import re

import pytest

from gpubpf.gcn.code_object import CodeObject
from hipsim.gpus import GPUS, architectures, other_code, target
from hipsim_device import HIPSIM, code_object, program, run

ENTRY = b"\x00hipv4-amdgcn-amd-amdhsa--%s\x00"


def test_the_device_knows_the_same_gpus() -> None:
    table = (HIPSIM / "src" / "thunk" / "gpus.h").read_text()
    with_ecc = re.findall(r'^    \{"(gfx\w+)".* true\},$', table, re.M)
    assert with_ecc == [name for name in GPUS if "sramecc+" in target(name)]
    assert tuple(re.findall(r'^    \{"(gfx\w+)"', table, re.M)) == GPUS


@pytest.mark.parametrize(
    "names", [[], [b"gfx9060"], [b"gfx90a:xnack-"], [b"gfx1030", b"gfx906:sramecc+:xnack-"]]
)
def test_the_gpus_that_a_program_has_code_for(names: list[bytes]) -> None:
    content = b"\x7fELF" + b"".join(ENTRY % name for name in names)
    found = architectures(io.BytesIO(content))
    assert found == {name.decode() for name in names}


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
        (
            ["gfx90a:xnack+"],
            None,
            "app has code for gfx90a:xnack+, not for gfx906, gfx90a:sramecc+:xnack- or gfx1030",
        ),
        (["gfx90a:xnack+"], "gfx90a", "app has code for gfx90a:xnack+, not for gfx90a:sramecc+:xnack-"),
        (["gfx906:sramecc-"], "gfx906", "app has code for gfx906:sramecc-, not for gfx906:sramecc+:xnack-"),
        (["gfx90a:xnack+", "gfx90a:xnack-"], "gfx90a", None),
        (["gfx906:sramecc+:xnack-"], None, None),
        (["gfx90a"], "gfx90a", None),
        ([], "gfx90a", None),  # unknown: a script, for example
    ],
)
def test_a_program_with_code_for_other_gpus(names: list[str], asked: str | None, text: str | None) -> None:
    assert other_code("app", set(names), asked) == text


@pytest.mark.parametrize(("feature", "asked"), [("xnack+", "gfx90a"), ("sramecc-", "gfx90a"), ("xnack+", "")])
def test_hipsim_explains_code_for_other_features(feature: str, asked: str) -> None:
    """HIP's own message names no GPU."""
    done = run([program("vectoradd", gpu=f"gfx90a:{feature}")], **({"HIPSIM_GPU": asked} if asked else {}))
    ours = target(asked) if asked else GPUS[0]
    assert f"has code for gfx90a:{feature}, not for {ours}; build it with --offload-arch=" in done.stderr


@pytest.mark.parametrize("gpu", ["gfx90a:xnack+", "gfx90a:sramecc-:xnack-", "gfx906", "gfx1030"])
def test_a_code_object_says_what_features_it_depends_on(gpu: str) -> None:
    """--list shows that."""
    assert CodeObject(code_object("seen", gpu).read_bytes()).target == gpu
