"""What is proved of registers holds in all lanes of random blocks, for random programs."""

from __future__ import annotations

import random

import pytest

from gpubpf.ptx.congruence import UNIFORM, common_bits
from gpubpf.ptx.parser import parse

HEAD = ".version 8.3\n.target sm_80\n.address_size 64\n.shared .align 16 .b8 tile[64];\n.shared .b32 tile2;\n"
REGISTERS = ".reg .b32 %r<99>; .reg .b64 %rd<99>; .reg .pred %p<3>;"


def bits(body: str, name: str) -> int:
    text = f"{HEAD}.visible .entry k(.param .u64 p, .param .u32 n) {{ {REGISTERS} {body} ret; }}"
    module = parse(text)
    return common_bits(module.functions["k"], module.variables).get(name, 0)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("mov.u32 %r1, %tid.x;", 0),
        ("mov.u32 %r1, %laneid;", 0),
        ("mov.u32 %r1, %ctaid.y;", UNIFORM),
        ("mov.u32 %r1, tile;", UNIFORM),
        ("ld.param.u32 %r1, [n];", UNIFORM),
        ("mov.u32 %r2, %tid.y; shl.b32 %r1, %r2, 6;", 6),
        ("mov.u32 %r2, %tid.y; mul.lo.u32 %r1, %r2, 48;", 4),
        ("mov.u32 %r2, %tid.y; mov.u32 %r3, tile; mad.lo.u32 %r1, %r2, 160, %r3;", 5),
        ("mov.u32 %r2, %tid.y; ld.param.u32 %r3, [n]; mad.lo.u32 %r1, %r2, %r3, 8;", 0),
        ("mov.u32 %r2, %tid.y; and.b32 %r1, %r2, -32;", 5),
        ("mov.u32 %r2, %tid.y; shl.b32 %r3, %r2, 5; and.b32 %r1, %r3, 31;", UNIFORM),
        ("mov.u32 %r2, %tid.y; shr.u32 %r1, %r2, 5;", 0),
        ("mov.u32 %r2, %tid.y; shl.b32 %r1, 1, %r2;", 0),  # by another distance in each lane
        ("ld.global.u32 %r1, [tile];", 0),  # memory may change between two lanes
        ("mov.u32 %r1, 1; @%p1 mov.u32 %r1, 2;", 0),
        ("@%p1 mov.u32 %r1, 2;", 0),
        (
            "mov.u32 %r1, 0; $L: add.u32 %r1, %r1, 32; @%p1 bra $L;",
            0,
        ),  # lanes may leave the loop at different turns
        ("mov.u32 %r1, 0; { .reg .b32 %r1; mov.u32 %r1, %tid.x; }", 0),
        ("mov.b64 {%r1, %r2}, 5;", 0),
        ("add.cc.u32 %r1, 1, 2;", 0),
        (".reg .b32 tile; mov.u32 tile, %tid.x; mov.u32 %r1, tile;", 0),  # hides the variable
        (".reg .b32 tile<3>; mov.u32 tile2, %tid.x; mov.u32 %r1, tile2;", 0),
        ("mov.u32 %r1, tile2;", UNIFORM),
        (".reg .b32 tile; mov.u32 tile, %tid.x; add.u32 tile, tile, 1; mov.u32 %r1, tile;", 0),
    ],
)
def test_of_one_register(body: str, expected: int) -> None:
    assert bits(body, "%r1") == expected


@pytest.mark.parametrize("other", ["ld.global.v2.u32 %v, [tile];", "mov.u32 %v.r, %tid.x;"])
def test_elements_of_vector_registers_are_written_by_other_names(other: str) -> None:
    assert bits(f".reg .v2.u32 %v; mov.u32 %v.x, 4; {other}", "%v.x") == 0


def test_parameters_of_functions_may_differ_by_lane() -> None:
    module = parse(f"{HEAD}.func f(.param .u32 n) {{ .reg .b32 %r<3>; ld.param.u32 %r1, [n]; ret; }}")
    assert "%r1" not in common_bits(module.functions["f"])


def signed(value: int, width: int) -> int:
    return value - (1 << width) if value >> width - 1 else value


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed: int) -> None:
    chosen = random.Random(seed)
    lines = [
        "mov.u32 %r0, %tid.x;",
        "mov.u32 %r1, %tid.y;",
        "mov.u32 %r2, %ctaid.x;",
        "ld.param.u32 %r3, [n];",
    ]
    shape = chosen.choice([(32, 1), (16, 2), (8, 4), (5, 7)])
    block, n = chosen.randrange(1 << 10), chosen.randrange(1 << 32)
    values = [
        [lane % shape[0] for lane in range(32)],
        [lane // shape[0] for lane in range(32)],
        [block] * 32,
        [n] * 32,
    ]
    mask = (1 << 32) - 1
    operations = {
        "add.u32": lambda a, b: a + b,
        "sub.s32": lambda a, b: a - b,
        "mul.lo.u32": lambda a, b: a * b,
        "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b,
        "xor.b32": lambda a, b: a ^ b,
        "shl.b32": lambda a, b: a << b if b < 32 else 0,
    }
    constants = [1, 2, 4, 8, 12, 31, 32, 48, 64, 96, 128, 255, 4096, mask - 31]
    for at in range(4, 60):
        name = chosen.choice([*operations])
        a = chosen.randrange(at)
        if name == "shl.b32" or chosen.random() < 0.6:
            b = chosen.randrange(8) if name == "shl.b32" else chosen.choice(constants)
            lines.append(f"{name} %r{at}, %r{a}, {b};")
            given = [b] * 32
        else:
            other = chosen.randrange(at)
            lines.append(f"{name} %r{at}, %r{a}, %r{other};")
            given = values[other]
        values.append([operations[name](x, y) & mask for x, y in zip(values[a], given, strict=True)])
    wide = [[signed(x, 32) * 24 & (1 << 64) - 1 for x in values[at]] for at in range(60)]
    lines += [f"mul.wide.s32 %rd{at}, %r{at}, 24;" for at in range(60)]
    text = f"{HEAD}.visible .entry k(.param .u64 p, .param .u32 n) {{ {REGISTERS} {' '.join(lines)} ret; }}"
    found = common_bits(parse(text).functions["k"])
    assert any(0 < count < UNIFORM for count in found.values())
    for name, of in [(f"%r{at}", values[at]) for at in range(60)] + [
        (f"%rd{at}", wide[at]) for at in range(60)
    ]:
        count = found.get(name, 0)
        assert len({value & ((1 << count) - 1) for value in of}) == 1, (name, count)
