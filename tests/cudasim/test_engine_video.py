"""Scalar video instructions with parts of registers, secondary operations and merges, against an evaluation in Python.

test_engine_forms.py has those without parts and a third operand.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from engine_device import Array, Device
from engine_forms import HEAD, RELATIONS, SIGNS, legal
from engine_references import video
from engine_values import COUNT, operands

PARTS = ["", "b0", "b1", "b2", "b3", "h0", "h1"]
FORMS = 180  # of the many that exist


class Instruction:
    """A name with modifiers, and the parts of the destination, the two sources and the third operand."""

    def __init__(self, name: str, parts: tuple[str, str, str], third: bool) -> None:
        self.name, self.parts, self.third = name, parts, third

    def __str__(self) -> str:
        names = (f"%x32_{k}.{part}".rstrip(".") for k, part in enumerate(self.parts))
        return f"{self.name} {', '.join(names)}{', %x32_3' if self.third else ''};"


def candidates() -> list[Instruction]:
    """Return some of the combinations, the same ones in each run. Each opcode has as many."""
    rng = random.Random(7)
    names: dict[str, list[str]] = {}
    for opcode in ("vadd", "vsub", "vabsdiff", "vmin", "vmax"):
        names[opcode] = [".".join((opcode, *t)) for t in itertools.product(SIGNS, SIGNS, SIGNS)]
    for opcode in ("vshl", "vshr"):
        names[opcode] = [f"{opcode}.{d}.{a}.u32" for d in SIGNS for a in SIGNS]
    names["vset"] = [f"vset.{a}.{b}.{r}" for a in SIGNS for b in SIGNS for r in RELATIONS]
    found = []
    for k in range(FORMS):
        opcode = list(names)[k % len(names)]
        name = rng.choice(names[opcode])
        if opcode != "vset":
            name += rng.choice(["", ".sat"])
        if opcode in ("vshl", "vshr"):
            name += rng.choice([".clamp", ".wrap"])
        second = rng.choice(["", "add", "min", "max"])
        part = rng.choice(PARTS) if not second else ""
        found.append(
            Instruction(
                f"{name}.{second}".rstrip("."),
                (part, rng.choice(PARTS), rng.choice(PARTS)),
                bool(second or part),
            )
        )
    return found


@pytest.fixture(scope="module")
def columns() -> list[list[int]]:
    return [operands("u32", k) for k in range(3)]


def results(instructions: list[Instruction], columns: list[list[int]]) -> list[list[int]]:
    """Run all instructions on the columns of operands."""
    lines = [".visible .entry k(.param .u64 out, .param .u64 in) { .reg .b32 %x32_<5>; .reg .b64 %rd<5>;"]
    lines.append("ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [in]; mov.u32 %x32_4, %tid.x;")
    lines.append("mul.wide.u32 %rd3, %x32_4, 4; add.u64 %rd1, %rd1, %rd3; add.u64 %rd2, %rd2, %rd3;")
    lines += [f"ld.global.b32 %x32_{k + 1}, [%rd2+{4 * COUNT * k}];" for k in range(3)]
    for number, instruction in enumerate(instructions):
        lines += [str(instruction), f"st.global.b32 [%rd1+{4 * COUNT * number}], %x32_0;"]
    device = Device(HEAD + "\n".join([*lines, "ret; }"]))
    made = Array(np.zeros((len(instructions), COUNT), np.uint32))
    device.launch("k", 1, COUNT, made, Array(np.array(columns, np.uint32)))
    return made.host.tolist()


def test_instructions(tmp_path_factory: pytest.TempPathFactory, columns: list[list[int]]) -> None:
    instructions = candidates()
    assert legal(tmp_path_factory.mktemp("video"), instructions) == instructions  # ptxas knows all of them
    wrong = []
    for instruction, got in zip(instructions, results(instructions, columns), strict=True):
        reference = video(instruction.name, instruction.parts)
        for value, *given in zip(got, *columns, strict=True):
            right = reference(*given)
            if right is not None and value != right:
                wrong.append(f"{instruction} {[hex(x) for x in given]}: {value:#x}, not {right:#x}")
                break
    assert not wrong, f"{len(wrong)} forms\n" + "\n".join(wrong)


def test_an_immediate_and_the_destination_as_a_source() -> None:
    """The merge reads the destination before it writes it, and a constant has no parts."""
    ptx = (
        HEAD
        + """
    .visible .entry k(.param .u64 out) { .reg .b32 a; .reg .b64 at; ld.param.u64 at, [out]; mov.b32 a, 0x11223344;
    vshr.u32.u32.u32.clamp.add a, a.h1, 4, 7; vshl.u32.u32.u32.wrap a.b3, a.b0, 33, a;
    st.global.b32 [at], a; ret; }"""
    )
    made = Array(np.zeros(1, np.uint32))
    Device(ptx).launch("k", 1, 1, made)
    first = (0x1122 >> 4) + 7
    assert int(made.host[0]) == (first & 0xFFFFFF) | (first << 1 & 0xFF) << 24
