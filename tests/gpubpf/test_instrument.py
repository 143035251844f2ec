"""Images and programs to sidecars: what is done when ptxas does not take them."""

from __future__ import annotations

import pytest

from gpubpf import instrument
from gpubpf.assemble import Assembled, Target
from gpubpf.errors import AssembleError
from gpubpf.fatbin import Image
from gpubpf.instrument import Attachment
from gpubpf_fragments import TIME

PTX = b""".version 8.3
.target sm_80
.address_size 64
.visible .entry fine() { ret; }
.visible .entry wide() { ret; }
"""


def _image() -> Image:
    return Image("ptx", 80, "", (8, 3), "", 0, "", 0, False, PTX)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ptxas is asked for; it gives up on `wide` unless it may be careful, and on `broken`."""
    asked: list[str] = []

    def assemble(text: str, target: Target, options: str = "") -> Assembled:
        asked.append(options.strip())
        if "entry broken" in text:
            raise AssembleError("ptxas fatal: something else")
        if "entry wide" in text and "-Ofc=min" not in options:
            raise AssembleError(
                "ptxas fatal   : (C7600) Register allocation failed with register count of '7'."
            )
        return Assembled(text.encode(), {})

    monkeypatch.setattr(instrument, "assemble", assemble)
    return asked


def test_a_kernel_with_too_many_predicates_is_assembled_with_more_care(asked: list[str]) -> None:
    made = instrument._instrument(PTX.decode(), _image(), [Attachment(TIME, "exit")], Target("gpu", (8, 0)))
    assert {kernel.name for kernel in made.kernels} == {"fine", "wide"} and not made.refusals
    assert asked == ["", "-Ofc=min"] and made.options.strip() == "-Ofc=min"


def test_another_fault_is_a_refusal_of_that_kernel(asked: list[str]) -> None:
    made = instrument._instrument(
        PTX.decode().replace("wide", "broken"), _image(), [Attachment(TIME, "exit")], Target("gpu", (8, 0))
    )
    assert made.refusals == {"broken": "ptxas fatal: something else"}
    assert [kernel.name for kernel in made.kernels] == ["fine"] and "-Ofc=min" not in asked
