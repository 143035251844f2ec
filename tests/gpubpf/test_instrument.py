"""Images and programs to sidecars: what is done when ptxas does not take them."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from gpubpf.errors import AssembleError
from gpubpf.images import instrument
from gpubpf.images.assemble import Assembled, Target
from gpubpf.images.fatbin import FatbinImage
from gpubpf.images.instrument import Attachment
from gpubpf_fragments import TIME

PTX = b""".version 8.3
.target sm_80
.address_size 64
.visible .entry fine() { ret; }
.visible .entry wide() { ret; }
"""


def _image() -> FatbinImage:
    return FatbinImage("ptx", 80, "", (8, 3), "", 0, "", 0, False, PTX)


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


HEAD = ".version 8.3\n.target sm_80\n.address_size 64\n"
FIRST = (
    HEAD
    + ".global .u32 mine;\n.extern .func helper ();\n"
    + ".visible .entry first() { .reg .b64 %a; mov.u64 %a, mine; st.global.u32 [%a], 1; call helper, (); ret; }\n"
)
SECOND = (
    HEAD
    + ".global .u32 mine;\n.visible .func helper () { ret; }\n.visible .entry second() { call helper, (); ret; }\n"
)


def test_texts_that_are_linked() -> None:
    """As the agent sends them; a variable of one file is not that of another, though they have one name."""
    data = b"\0".join(text.encode() for text in (FIRST, SECOND))
    joined = instrument.joined(data)
    made = instrument.instrument_image(joined, [Attachment(TIME, "exit")], Target("sim", (9, 0)))
    assert {kernel.name for kernel in made.kernels} == {"first", "second"} and not made.refusals
    assert all(variable.name != "mine" for variable in made.variables)
    for other in (FIRST.encode(), FIRST.encode() + b"\0", b"\x7fELF\0\0", b""):
        assert instrument.joined(other) == other


def test_texts_that_do_not_fit_together() -> None:
    data = b"\0".join(text.encode() for text in (FIRST, SECOND, SECOND))
    assert instrument.joined(data) == data
    made = instrument.instrument_image(data, [Attachment(TIME, "exit")], Target("sim", (9, 0)))
    assert made.refusals == dict.fromkeys(("first", "second"), "linked from several images")


def test_another_fault_is_a_refusal_of_that_kernel(asked: list[str]) -> None:
    made = instrument._instrument(
        PTX.decode().replace("wide", "broken"), _image(), [Attachment(TIME, "exit")], Target("gpu", (8, 0))
    )
    assert made.refusals == {"broken": "ptxas fatal: something else"}
    assert [kernel.name for kernel in made.kernels] == ["fine"] and "-Ofc=min" not in asked


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_registers_of_a_program_with_line_numbers_of_inlined_functions(tmp_path: Path) -> None:
    """Its PTX names the functions in a section of its own."""
    source = tmp_path / "k.cu"
    source.write_text(
        "__device__ __forceinline__ float f(float x) { return x * 2 + 1; }\n"
        "__global__ void k(float *a) { atomicAdd(a, f(a[threadIdx.x])); }\n"
    )
    command = ["nvcc", "-ptx", "-lineinfo", "-arch=sm_80", "-o", tmp_path / "k.ptx", source]
    subprocess.run(command, check=True, capture_output=True)
    text = (tmp_path / "k.ptx").read_text()
    assert "function_name" in text
    image = dataclasses.replace(_image(), options="--generate-line-info", stored=text.encode())
    made = instrument._instrument(text, image, [Attachment(TIME, "exit")], Target("gpu", (8, 0)))
    (used,) = instrument.register_use(made, Target("gpu", (8, 0))).values()
    assert 0 < used[0] <= used[1]
