"""Products stay beside the sums that ptxas contracts them with, so that copies round where the original does."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from gpubpf.ptx import body
from gpubpf.ptx.carry import live_carry
from gpubpf.ptx.contraction import products_before
from gpubpf.ptx.flow import Flow
from gpubpf.ptx.inject import inject
from gpubpf.ptx.module import PtxInstruction
from gpubpf.ptx.parser import parse
from gpubpf.ptx.values import Placement
from gpubpf_fragments import log
from gpubpf_points import HEAD
from gpubpf_sass import assembled, sass

KERNEL = """{head}
.visible .entry k(.param .u64 p) {{
    .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .f32 %f<30>; .reg .f64 %fd<30>; .reg .pred %p<9>;
    ld.param.u64 %rd1, [p];
    {lines}
    ret;
}}
"""


def moved(lines: str) -> list[tuple[list[str], str]]:
    """The products that are moved and the sum before which they come, by the registers that they write."""
    function = parse(KERNEL.format(head=HEAD, lines=lines)).entries["k"]
    flow = Flow(function.body or ())

    def register(index: int) -> str:
        statement = flow.body[index]
        assert isinstance(statement, PtxInstruction)
        return str(statement.operands[0])

    found = products_before(flow, live_carry(flow))
    return [([register(n) for n in products], register(index)) for index, products in sorted(found.items())]


@pytest.mark.parametrize(
    "lines, expected",
    [
        ("mul.f32 %f3,%f1,%f2; st.global.f32 [%rd1],%f9; add.f32 %f4,%f3,%f5;", [(["%f3"], "%f4")]),
        ("mul.ftz.f32 %f3,%f1,%f2; sub.ftz.f32 %f4,%f5,%f3;", [(["%f3"], "%f4")]),
        ("mul.f64 %fd3,%fd1,%fd2; mul.f64 %fd4,%fd1,%fd1; sub.f64 %fd5,%fd4,%fd3;", [(["%fd3", "%fd4"], "%fd5")]),
        ("mul.f32 %f3,%f1,%f2; @%p1 add.f32 %f4,%f3,%f5;", [(["%f3"], "%f4")]),
        # A scope between them changes nothing if the names mean the same.
        ("mul.f32 %f3,%f1,%f2; { add.f32 %f4,%f3,%f5; }", [(["%f3"], "%f4")]),
        ("mul.f32 %f3,%f1,%f2; { .reg .f32 %f1; add.f32 %f4,%f3,%f5; }", []),
        # ptxas does not contract these.
        ("mul.rn.f32 %f3,%f1,%f2; add.f32 %f4,%f3,%f5;", []),
        ("mul.f32 %f3,%f1,%f2; add.rn.f32 %f4,%f3,%f5;", []),
        ("mul.sat.f32 %f3,%f1,%f2; add.f32 %f4,%f3,%f5;", []),
        ("mul.lo.u32 %r3,%r1,%r2; add.u32 %r4,%r3,%r5;", []),
        ("mul.f32 %f3,%f1,%f2; add.f32 %f4,%f3,%f5; st.global.f32 [%rd1],%f3;", []),
        ("mul.f32 %f3,%f1,%f2; add.f32 %f4,%f3,%f3;", []),
        ("mul.f32 %f3,%f1,%f2; @%p1 bra L; L: add.f32 %f4,%f3,%f5;", []),
        # Moving these would change a value.
        ("@%p1 mul.f32 %f3,%f1,%f2; add.f32 %f4,%f3,%f5;", []),
        ("mul.f32 %f3,%f1,%f2; mov.f32 %f1,%f5; add.f32 %f4,%f3,%f5;", []),
        ("mul.f32 %f3,%f1,%f2; ld.global.v2.f32 {%f7,%f2},[%rd1]; add.f32 %f4,%f3,%f5;", []),
        ("mul.f32 %f3,%f1,%f2; call f; add.f32 %f4,%f3,%f5;", []),
        ("mul.f32 %f3,%f3,%f2; add.f32 %f4,%f3,%f5;", []),
    ],
)  # fmt: skip
def test_what_is_moved(lines: str, expected: list[tuple[list[str], str]]) -> None:
    assert moved(lines) == expected


def contractions(code: list[str]) -> Counter[str]:
    """Operations on floats: which of the three operands of an FFMA or DFMA are negated."""
    found: Counter[str] = Counter()
    for line in code:
        if operation := re.match(r"(?:@!?U?P\d )?([FD](?:FMA|ADD|MUL))\S* (.*)", line):
            operands = operation[2].rstrip(" ;").split(", ")[1:]
            factors = sum(o.startswith("-") for o in operands[:2]) % 2
            found[f"{operation[1]}{'-' * factors}{'|-' * operands[-1].startswith('-')}"] += 1
    return found


@pytest.mark.parametrize("sm", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kind, size", [("f32", 4), ("f64", 8)])
def test_a_copy_contracts_as_the_original(
    sm: str, kind: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = {"f32": "%f", "f64": "%fd"}[kind]
    lines = f"""
        ld.global.{kind} {register}1, [%rd1]; ld.global.{kind} {register}2, [%rd1+{size}];
        mul.{kind} {register}3, {register}1, {register}2;
        ld.global.{kind} {register}4, [%rd1+{2 * size}];
        mul.{kind} {register}5, {register}4, {register}2;
        sub.{kind} {register}6, {register}3, {register}5;
        mul.{kind} {register}7, {register}6, {register}4;
        st.global.{kind} [%rd1+{9 * size}], {register}6;
        add.{kind} {register}8, {register}1, {register}7;
        st.global.{kind} [%rd1+{10 * size}], {register}8;
    """
    text = KERNEL.format(head=HEAD.replace("8.3", "8.7").replace("sm_80", sm), lines=lines)
    original = contractions(sass(assembled(text, sm, tmp_path)[0])["k"])
    letter = {"f32": "F", "f64": "D"}[kind]
    assert original == {f"{letter}FMA|-": 1, f"{letter}FMA": 1, f"{letter}MUL": 1}

    def copy() -> Counter[str]:
        injected = inject(parse(text), {"k": [Placement(log("access"), "access")]})
        return contractions(sass(assembled(injected.text, sm, tmp_path)[0])["k"])

    assert copy() == original
    monkeypatch.setattr(body, "products_before", lambda flow, carry: {})
    assert copy() != original
