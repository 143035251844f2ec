"""Video instructions with parts of registers, secondary operations, masks and merges, against an evaluation in Python.

test_engine_forms.py has those without parts and a third operand.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array, Device
from engine_forms import HEAD, RELATIONS, SIGNS, accepted, legal
from engine_references import multiplied, parallel, video
from engine_values import COUNT, Reference, operands

PARTS = ["", "b0", "b1", "b2", "b3", "h0", "h1"]
MASKS = {
    2: ["", "h0", "h1", "h10"],
    4: ["", *(f"b{m}" for m in (0, 1, 10, 2, 20, 21, 210, 3, 30, 31, 310, 32, 320, 321, 3210))],
}
FORMS = 180  # of the many that exist, for each of scalar instructions, vmad and SIMD instructions


class Instruction:
    """A name with modifiers, the parts of the destination and two sources, whether there is a third source, and their signs."""

    def __init__(
        self, name: str, parts: tuple[str, str, str], third: bool = True, signs: Sequence[str] = ("", "", "")
    ) -> None:
        self.name, self.parts, self.third, self.signs = name, parts, third, signs

    def __str__(self) -> str:
        parts = (*self.parts, "") if self.third else self.parts
        signs = ("", *self.signs)
        names = (f"{signs[k]}%x32_{k}.{part}".rstrip(".") for k, part in enumerate(parts))
        return f"{self.name} {', '.join(names)};"

    @property
    def reference(self) -> Reference:
        if self.name.startswith("vmad"):
            return multiplied(self.name, self.parts[1:], self.signs)
        is_simd = self.name.split(".")[0][-1] in "24"
        return (parallel if is_simd else video)(self.name, self.parts)


def products() -> list[Instruction]:
    """Return some forms of vmad: .po has no negated operands, and others negate the product or the third operand."""
    rng = random.Random(8)
    found = []
    for _ in range(FORMS):
        types = ".".join(rng.choice(SIGNS) for _ in range(3))
        signs = rng.choice(
            [("", "", ""), ("-", "", ""), ("", "-", ""), ("-", "-", ""), ("", "", "-"), ("-", "-", "-")]
        )
        plus = "" if any(signs) else rng.choice(["", ".po"])
        name = f"vmad.{types}{plus}{rng.choice(['', '.sat'])}{rng.choice(['', '.shr7', '.shr15'])}"
        found.append(Instruction(name, ("", rng.choice(PARTS), rng.choice(PARTS)), signs=signs))
    return found


def parallels() -> list[Instruction]:
    """Return some forms of SIMD instructions, as many of each opcode."""
    rng = random.Random(9)
    opcodes = [
        f"{name}{n}" for n in (2, 4) for name in ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax", "vset")
    ]
    found = []
    for k in range(FORMS):
        opcode = opcodes[k % len(opcodes)]
        count = int(opcode[-1])
        signs = [rng.choice(SIGNS) for _ in range(3)]
        end = rng.choice(["", ".sat", ".add"])
        name = ".".join((opcode, *signs)) + end
        if opcode.startswith("vset"):
            name = ".".join((opcode, *signs[:2], rng.choice(RELATIONS))) + end.replace(".sat", "")
        orders = ["", "bh"[count == 2] + "".join(str(rng.randrange(2 * count)) for _ in range(count))]
        found.append(
            Instruction(name, (rng.choice(MASKS[count]), rng.choice(orders), rng.choice(orders[::-1])))
        )
    return found


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


@pytest.mark.parametrize("some", [candidates, products, parallels])
def test_instructions(
    some: Callable[[], list[Instruction]],
    tmp_path_factory: pytest.TempPathFactory,
    columns: list[list[int]],
) -> None:
    instructions = some()
    assert legal(tmp_path_factory.mktemp("video"), instructions) == instructions  # ptxas knows all of them
    wrong = []
    for instruction, got in zip(instructions, results(instructions, columns), strict=True):
        reference = instruction.reference
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


def test_products_by_hand() -> None:
    """The examples of the PTX ISA and its table of signs, with numbers at which signs and bits beyond 64 matter."""
    cases = {
        "vmad.u32.u32.u32 {}, 7, 9, 3;": 66,
        "vmad.u32.u32.u32.po {}, 7, 9, 3;": 67,
        "vmad.u32.u32.u32.po.shr7 {}, 7, 9, 255;": (63 + 256) >> 7,
        "vmad.s32.s32.u32.sat {}, a, a, -b;": 0x80000000,  # -1 * 4294967295 - -5: only the first a is signed
        "vmad.u32.u32.u32.shr15 {}, a.h0, a.h1, b;": (0xFFFF * 0xFFFF + 0xFFFFFFFB) >> 15,
        "vmad.u32.u32.u32.sat {}, a, a, b;": 0xFFFFFFFF,
        "vmad.s32.u32.u32.sat {}, -a, a, b;": 0x80000000,  # -(2^32-1)^2 - 5 has more than 64 bits
        "vmad.u32.u32.s32.shr7 {}, 256, -a, 0;": 2,
        "vmad.u32.u32.u32.sat {}, 0, 0, -b;": 5,  # the third operand is signed, once it is negated
    }
    lines = [s.format("%r") + f" st.global.b32 [at+{4 * k}], %r;" for k, s in enumerate(cases)]
    made = Array(np.zeros(len(cases), np.uint32))
    head = ".visible .entry k(.param .u64 out) { .reg .b32 a, b, %r; .reg .b64 at; ld.param.u64 at, [out];"
    Device(f"{HEAD}{head} mov.b32 a, -1; mov.b32 b, -5; {' '.join(lines)} ret; }}").launch("k", 1, 1, made)
    assert made.host.tolist() == list(cases.values())


def test_what_ptxas_refuses(tmp_path: Path) -> None:
    texts = [
        "vmad.u32.u32.u32.po %x32_0, -%x32_1, %x32_2, %x32_3;",
        "vmad.u32.u32.u32.po %x32_0, %x32_1, %x32_2, -%x32_3;",
        "vmad.u32.u32.u32 %x32_0, %x32_1, -%x32_2, -%x32_3;",
        "vmad.u32.u32.u32 %x32_0.h0, %x32_1, %x32_2, %x32_3;",
        "vmad.u32.u32.u32 %x32_0, %x32_1, %x32_2, %x32_3.b0;",
        "vadd.u32.u32.u32 %x32_0, %x32_1.h10, %x32_2;",
        "vadd.u32.u32.u32 %x32_0, %x32_1.h2, %x32_2;",
        "vadd2.u32.u32.u32.sat.add %x32_0, %x32_1, %x32_2, %x32_3;",
        "vadd2.u32.u32.u32 %x32_0.h01, %x32_1, %x32_2, %x32_3;",
        "vadd2.u32.u32.u32 %x32_0.b10, %x32_1, %x32_2, %x32_3;",
        "vadd2.u32.u32.u32 %x32_0, %x32_1.h1, %x32_2, %x32_3;",
        "vadd2.u32.u32.u32 %x32_0, %x32_1, 5, %x32_3;",
        "vadd2.u32.u32.u32 %x32_0, %x32_1, %x32_2, 5;",
        "vadd2.u32.u32.u32 %x32_0, %x32_1, %x32_2, %x32_3.h10;",
        "vadd2.u32.u32.u32 %x32_0, %x32_1, %x32_2;",
        "vset2.u32.u32.lo %x32_0, %x32_1, %x32_2, %x32_3;",
        "vadd4.u32.u32.u32 %x32_0.b123, %x32_1, %x32_2, %x32_3;",
        "vadd4.u32.u32.u32 %x32_0, %x32_1.b321, %x32_2, %x32_3;",
    ]
    assert legal(tmp_path, texts) == []
    assert accepted(texts) == []
