"""Which registers have the same value each time that a thread comes to an instruction in a loop, modulo a power of two."""

from __future__ import annotations

import pytest

from gpubpf.ptx.flow import Flow
from gpubpf.ptx.lanes import Lanes
from gpubpf.ptx.module import Address, PtxInstruction
from gpubpf.ptx.parser import parse
from gpubpf.ptx.steady import ALWAYS, Steady

HEAD = ".version 8.3\n.target sm_80\n.address_size 64\n.shared .align 16 .b8 tile[64];\n.func (.param .b32 r) f() { ret; }\n"
REGISTERS = ".reg .b32 %r<99>; .reg .b64 %rd<99>; .reg .pred %p<9>;"


def bits(body: str) -> int:
    """Return the bits of the address of the only load from shared memory."""
    text = f"{HEAD}.visible .entry k(.param .u64 p, .param .u32 n) {{ {REGISTERS} {body} ret; }}"
    module = parse(text)
    function = module.functions["k"]
    flow = Flow(function.body or ())
    steady = Steady(function, flow, Lanes(function, module.variables))
    ((index, address),) = [
        (index, operand)
        for index, statement in flow.instructions()
        if isinstance(statement, PtxInstruction) and "shared" in statement.modifiers
        for operand in statement.operands
        if isinstance(operand, Address)
    ]
    assert address.base is not None
    return steady.bits(index, address.base)


LOAD = "ld.shared.u32 %r9, [%r1];"
END = " setp.lt.u32 %p1, %r9, 5; @%p1 bra $L;"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("mov.u32 %r1, %tid.x; $L: " + LOAD + END, ALWAYS),  # set before the loop
        ("ld.global.u32 %r1, [%rd1]; $L: " + LOAD + END, ALWAYS),
        ("@%p2 mov.u32 %r1, 4; @!%p2 mov.u32 %r1, 8; $L: " + LOAD + END, ALWAYS),
        ("$L: mov.u32 %r1, tile;" + LOAD + END, ALWAYS),
        ("$L: mov.u32 %r1, %clock;" + LOAD + END, 0),
        ("$L: ld.global.u32 %r1, [%rd1];" + LOAD + END, 0),
        ("$L: ld.param.u32 %r1, [n];" + LOAD + END, ALWAYS),
        ("$L: { .param .b32 g; call (g), f; ld.param.b32 %r1, [g]; }" + LOAD + END, 0),
        ("$L: atom.global.add.u32 %r1, [%rd1], 1;" + LOAD + END, 0),
        # The register advances, itself or through others.
        ("mov.u32 %r1, 3; $L: " + LOAD + " add.u32 %r1, %r1, 64;" + END, 6),
        ("mov.u32 %r1, 3; $L: " + LOAD + " add.u32 %r1, %r1, 36;" + END, 2),
        ("mov.u32 %r1, 3; $L: " + LOAD + " sub.u32 %r1, %r1, 96;" + END, 5),
        ("mov.u32 %r1, 3; $L: " + LOAD + " @%p3 add.u32 %r1, %r1, 64; @%p4 add.u32 %r1, %r1, 96;" + END, 5),
        ("mov.u32 %r1, 3; $L: " + LOAD + " add.u32 %r2, %r1, 32; mov.u32 %r1, %r2;" + END, 5),
        ("mov.u32 %r1, 3; $L: " + LOAD + " add.u32 %r1, %r1, %r5;" + END, 0),
        ("mov.u32 %r1, 3; $L: " + LOAD + " shl.b32 %r1, %r1, 1;" + END, 0),
        # It begins again: in the same place, or elsewhere.
        ("$M: mov.u32 %r1, 3; $L: " + LOAD + " add.u32 %r1, %r1, 64;" + END + " bra $M;", 6),
        ("mov.u32 %r2, %tid.x; $M: mov.u32 %r1, %r2; $L: " + LOAD + " add.u32 %r1, %r1, 64;" + END + " bra $M;", 6),
        ("$M: mov.u32 %r1, %r9; $L: " + LOAD + " add.u32 %r1, %r1, 64;" + END + " bra $M;", 0),
        ("mov.u32 %r1, 3; $M: " + LOAD + " mov.u32 %r1, 4; $L:" + END + " bra $M;", 0),
        # A register of another value, computed before the loop, does not advance with this one.
        ("mov.u32 %r1, 8; add.u32 %r2, %r1, 32; mov.u32 %r1, 9; $L: " + LOAD + " mov.u32 %r1, %r2;" + END, 0),
        # Computed from a counter.
        ("mov.u32 %r2, 0; $L: shl.b32 %r1, %r2, 7;" + LOAD + " add.u32 %r2, %r2, 1;" + END, 7),
        ("mov.u32 %r2, 0; $L: mad.lo.s32 %r1, %r2, 48, %r7;" + LOAD + " add.u32 %r2, %r2, 2;" + END, 5),
        ("mov.u32 %r2, 0; $L: mul.lo.s32 %r1, %r2, %r7;" + LOAD + " add.u32 %r2, %r2, 32;" + END, 5),
        ("mov.u32 %r2, 0; $L: xor.b32 %r1, %r2, 5;" + LOAD + " add.u32 %r2, %r2, 32;" + END, 5),
        ("mov.u32 %r2, 0; $L: shr.u32 %r1, %r2, 1;" + LOAD + " add.u32 %r2, %r2, 64;" + END, 0),
        ("mov.u32 %r2, 0; $L: cvt.u32.u16 %r1, %r2;" + LOAD + " add.u32 %r2, %r2, 64;" + END, 0),
        ("mov.u32 %r2, 0; $L: add.cc.u32 %r1, %r2, 1;" + LOAD + " add.u32 %r2, %r2, 64;" + END, 0),
    ],
)  # fmt: skip
def test_bits(body: str, expected: int) -> None:
    assert bits(body) == expected
