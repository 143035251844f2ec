"""Copies round where the original does: `ptx.contraction`."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from gpubpf.attached import AttachedPipeline
from gpubpf.ebpf.probe import Probe
from gpubpf.images import fatbin
from gpubpf.images.assemble import Target
from gpubpf.images.instrument import instrument_image
from gpubpf.inject import body
from gpubpf.inject.contraction import functions_with_sums, products_before, with_roundings
from gpubpf.inject.inject import inject
from gpubpf.memory.memory_options import MemoryOptions
from gpubpf.program import BPF
from gpubpf.ptx.carry import live_carry
from gpubpf.ptx.flow import Flow
from gpubpf.ptx.module import PtxInstruction
from gpubpf.ptx.parser import parse
from gpubpf.show import cli
from gpubpf.tools import memtrace
from gpubpf_fragments import log
from gpubpf_points import HEAD
from gpubpf_sass import assembled, sass

KERNEL = """{head}
.visible .entry k(.param .u64 p) {{
    .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .f32 %f<30>; .reg .f64 %fd<30>; .reg .pred %p<9>; .reg .v2.f32 %v;
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
        ("div.approx.f32 %f3,%f1,%f2; add.f32 %f4,%f3,%f5;", [(["%f3"], "%f4")]),
        ("div.full.ftz.f32 %f3,%f1,%f2; add.ftz.f32 %f4,%f3,%f5;", [(["%f3"], "%f4")]),
        # ptxas does not contract these.
        ("div.rn.f32 %f3,%f1,%f2; add.f32 %f4,%f3,%f5;", []),
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
        ("mul.f32 %v.x,%f1,%f2; st.global.v2.f32 [%rd1],%v; add.f32 %f4,%v.x,%f5;", []),
        ("mul.f32 %f3,%v.x,%f2; ld.global.v2.f32 %v,[%rd1]; add.f32 %f4,%f3,%f5;", []),
    ],
)  # fmt: skip
def test_what_is_moved(lines: str, expected: list[tuple[list[str], str]]) -> None:
    assert moved(lines) == expected


MUL, ADD, BOTH = frozenset({"FMUL"}), frozenset({"FADD"}), frozenset({"FFMA"})


@pytest.mark.parametrize(
    "code, operations, rounded",
    [
        ("mul.f32 %f3,%f1,%f2; add.f32 %f4,%f3,%f5;", [None, BOTH], ""),
        ("mul.f32 %f3,%f1,%f2; add.f32 %f4,%f3,%f5;", [MUL, ADD], "01"),
        ("mul.ftz.f32 %f3,%f1,%f2; sub.ftz.f32 %f4,%f3,%f5;", [MUL, ADD], "01"),
        # Of two products, the sum has the second.
        ("mul.f32 %f3,%f1,%f2; mul.f32 %f4,%f1,%f1; sub.f32 %f5,%f3,%f4;", [MUL, None, BOTH], "0"),
        # Its other reader is contracted.
        ("mul.f32 %f3,%f1,%f2; add.f32 %f4,%f3,%f5; sub.f32 %f6,%f3,%f7;", [MUL, ADD, BOTH], "1"),
        # In a loop that is unrolled, ptxas does both, or takes one product here and the other there.
        ("mul.f32 %f3,%f1,%f2; add.f32 %f4,%f3,%f5;", [MUL, ADD | BOTH], ""),
        ("mul.f32 %f3,%f1,%f2; mul.f32 %f4,%f1,%f1; sub.f32 %f5,%f3,%f4;", [MUL, MUL, BOTH], ""),
        # ptxas has merged them with others, or they are not of this type.
        ("mul.f32 %f3,%f1,%f2; add.f32 %f4,%f3,%f5;", [None, None], ""),
        ("mul.f64 %fd3,%fd1,%fd2; add.f64 %fd4,%fd3,%fd5;", [MUL, ADD], ""),
        ("mul.rn.f32 %f3,%f1,%f2; add.sat.f32 %f4,%f3,%f5;", [MUL, ADD], ""),
    ],
)
def test_what_the_original_does_not_contract_is_rounded(
    code: str, operations: list[frozenset[str] | None], rounded: str
) -> None:
    lines = [f"{line.strip()};" for line in code.split(";") if line.strip()]
    module = parse(KERNEL.format(head=HEAD, lines="\n".join(lines)))
    first = next(s.line for s in module.entries["k"].body or () if str(s) == lines[0].replace(",", ", "))
    found = {first + n: made for n, made in enumerate(operations) if made is not None}
    made = with_roundings(module, ["k"], found).entries["k"].body
    texts = [str(s) for s in made or () if isinstance(s, PtxInstruction)][1:-1]
    expected = [re.sub(r"^(\w+)\.", r"\1.rn.", t) if str(n) in rounded else t for n, t in enumerate(lines)]
    assert texts == [line.replace(",", ", ") for line in expected]
    assert functions_with_sums(module, ["k"]) == ({"k"} if "sat" not in code else set())


def test_of_several_instructions_on_one_line_nothing_is_known() -> None:
    module = parse(KERNEL.format(head=HEAD, lines="{mul.f32 %f3,%f1,%f2; add.f32 %f4,%f3,%f5;}"))
    operations = dict.fromkeys(range(1, 20), MUL | ADD)
    assert with_roundings(module, ["k"], operations).entries["k"].body == module.entries["k"].body


def test_integers_and_damaged_kernels_have_no_sums() -> None:
    assert not functions_with_sums(
        parse(KERNEL.format(head=HEAD, lines="mul.lo.u32 %r3,%r1,%r2; add.u32 %r4,%r3,%r5;")), ["k"]
    )
    assert not functions_with_sums(
        parse(KERNEL.format(head=HEAD, lines="mul.f32 %f3,,; add.f32 %f4,%f3,%f5;")), ["k"]
    )


def contractions(code: list[str]) -> Counter[str]:
    """Operations on floats: which of the three operands of an FFMA or DFMA are negated."""
    found: Counter[str] = Counter()
    for line in code:
        if operation := re.match(r"(?:@!?U?P\d )?([FD](?:FMA|ADD|MUL))\S* (.*)", line):
            operands = operation[2].rstrip(" ;").split(", ")[1:]
            factors = sum(o.startswith("-") for o in operands[:2]) % 2
            found[f"{operation[1]}{'-' * factors}{'|-' * operands[-1].startswith('-')}"] += 1
    return found


# In the original, a division between product and sum ends the basic block. In a copy, probes do.
SHAPES = {
    "two products": """
        mul.T %3, %1, %2;
        ld.global.T %4, [%rd1+16];
        mul.T %5, %4, %2;
        sub.T %6, %3, %5;
        mul.T %7, %6, %4;
        st.global.T [%rd1+72], %6;
        add.T %8, %1, %7;
        st.global.T [%rd1+80], %8;
        """,
    "division between": """
        mul.T %3, %1, %1;
        div.rn.T %4, %1, %2;
        sub.T %5, %4, %3;
        st.global.T [%rd1+72], %5;
        """,
    "quotient": """
        div.approx.f32 %f3, %f1, %f2;
        ld.global.f32 %f4, [%rd1+16];
        add.f32 %f5, %f3, %f4;
        st.global.f32 [%rd1+72], %f5;
        """,
}


def typed(shape: str, kind: str, sm: str) -> str:
    """The PTX of a kernel of this shape, with registers of this type."""
    register = {"f32": "%f", "f64": "%fd"}[kind]
    lines = f"ld.global.T %1, [%rd1]; ld.global.T %2, [%rd1+8];{SHAPES[shape]}"
    lines = re.sub(r"%(\d)", rf"{register}\1", lines).replace(".T", f".{kind}")
    return KERNEL.format(head=HEAD.replace("8.3", "8.7").replace("sm_80", sm), lines=lines)


@pytest.mark.every(4)
@pytest.mark.parametrize("sm", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "shape, kind", [(s, k) for s in SHAPES for k in ("f32", "f64") if (s, k) != ("quotient", "f64")]
)
def test_a_copy_contracts_as_the_original(
    shape: str, kind: str, sm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = typed(shape, kind, sm)
    original = contractions(sass(assembled(text, sm, tmp_path)[0])["k"])
    target = Target("gpu", (int(sm[3]), int(sm[4])))
    made = instrument_image(text.encode(), [Probe(log("access"), "access")], target)
    path = tmp_path / "copy.cubin"
    path.write_bytes(made.image)
    assert original and contractions(sass(path)["k"]) == original
    # With nothing moved, or with no rounding modes, it would not.
    if shape != "division between":
        monkeypatch.setattr(body, "products_before", lambda flow, carry: {})
    injected = inject(parse(text), {"k": [Probe(log("access"), "access")]})
    assert contractions(sass(assembled(injected.text, sm, tmp_path)[0])["k"]) != original


def test_a_copy_contracts_as_the_original_beside_a_kernel_that_calls_a_missing_function(
    tmp_path: Path,
) -> None:
    """As in linked code whose other parts have no PTX. ptxas accepts it only as code to be linked."""
    text = typed("division between", "f32", "sm_80")
    original = contractions(sass(assembled(text, "sm_80", tmp_path)[0])["k"])
    text += ".extern .func missing();\n.visible .entry calls() { call missing; ret; }\n"
    made = instrument_image(text.encode(), [Probe(log("access"), "access")], Target("gpu", (8, 0)))
    path = tmp_path / "copy.cubin"
    path.write_bytes(made.image)
    assert made.refusals.keys() == {"calls"} and contractions(sass(path)["k"]) == original


def test_the_ptx_that_a_tool_prints_has_the_rounding_modes_of_its_copy() -> None:
    b = BPF(text=memtrace.PROGRAM)
    memtrace.attach(b, MemoryOptions.of(cli.parse(memtrace.build_parser(), ["--", "true"])))
    image = fatbin.ptx_image(typed("division between", "f32", "sm_80").encode())
    assert image is not None
    for target, rounded in (Target("gpu", (8, 0)), True), (Target("sim"), False):
        text, refusals = AttachedPipeline(b.attached).instrumented_ptx(image, ["k"], target)
        assert ("sub.rn.f32 %f5, %f4, %f3;" in text) == rounded and not refusals
