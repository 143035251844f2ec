"""The PTX model reads what compilers emit and writes it back unchanged in meaning."""

import re
from pathlib import Path

import pytest

from gpubpf.errors import PtxError
from gpubpf.ptx import parser
from gpubpf.ptx.module import (
    Address,
    Close,
    Directive,
    Generic,
    Group,
    Immediate,
    Label,
    Masked,
    Name,
    Not,
    Open,
    Pair,
    PtxInstruction,
    Variable,
    Vector,
    render,
)
from gpubpf.ptx.parser import parse

HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"


def body_of(text):
    module = parse(HEAD + ".visible .entry k()\n{\n" + text + "\n}\n")
    return module.functions["k"].body


def one(text):
    (statement,) = body_of(text)
    return statement


def test_long_and_short_lists_of_numbers():
    """A list of decimal numbers is read at once. What follows it is read as after any other list, and on the right line."""
    text = """.global .u8 a[4] = {1, 017
        ,3,4 }; .global .u32 b[2][2] = {{1, 2}, {0x3, 4U}}, c[2] = { -5, 6 };
        .global .f32 d[2] = {1, 2.5}, e[1] = {7};"""
    module = parse(HEAD + text)
    found = {name: variable.initializer for name, variable in module.variables.items()}
    a, b, c, d, e = (
        tuple(Immediate(n) for n in numbers.split()) for numbers in ("1 017 3 4", "1 2", "-5 6", "1 2.5", "7")
    )
    assert found == {"a": a, "b": (b, (Immediate("0x3"), Immediate("4U"))), "c": c, "d": d, "e": e}
    assert [variable.line for variable in module.variables.values()] == [4, 5, 5, 6, 6]
    for wrong in ("{1 2}", "{1, 2,}}", "{,}", "{1, 2", "{1, 2a}", "{08}}"):
        with pytest.raises(PtxError):
            parse(HEAD + f".global .u32 a[9] = {wrong};\n.global .u32 b;")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ld.global.f32 %f1, [%rd1+4];", PtxInstruction("ld", ("global", "f32"), (Name("%f1"), Address("%rd1", 4)), line=6)),
        ("@!%p1 bra.uni $L__BB0_2;", PtxInstruction("bra", ("uni",), (Name("$L__BB0_2"),), "%p1", True, line=6)),
        ("mov.u32 %r1, %tid.x;", PtxInstruction("mov", ("u32",), (Name("%r1"), Name("%tid.x")), line=6)),
        (
            "vmin.u32.u32.u32 low.b3, %r2.h1, %r3, 0;",
            PtxInstruction(
                "vmin",
                ("u32", "u32", "u32"),
                (Name("low.b3"), Name("%r2.h1"), Name("%r3"), Immediate("0")),
                line=6,
            ),
        ),
        (
            "vmad.u32.u32.s32 %r0, -%r1.b3, - low, 5;",
            PtxInstruction(
                "vmad",
                ("u32", "u32", "s32"),
                (Name("%r0"), Name("%r1.b3", negative=True), Name("low", negative=True), Immediate("5")),
                line=6,
            ),
        ),
        (
            "vadd4.u32.u32.u32.add %r1.b3210, %r2.b7770, %r3, %r1;",
            PtxInstruction(
                "vadd4",
                ("u32", "u32", "u32", "add"),
                (Name("%r1.b3210"), Name("%r2.b7770"), Name("%r3"), Name("%r1")),
                line=6,
            ),
        ),
        ("ret;", PtxInstruction("ret", line=6)),
        ("mov.b64 {%r1, _}, %rd1;", PtxInstruction("mov", ("b64",), (Vector((Name("%r1"), Name("_"))), Name("%rd1")), line=6)),
        (
            "setp.lt.and.s32 %p1|%p2, %r1, -7, !%p3;",
            PtxInstruction(
                "setp",
                ("lt", "and", "s32"),
                (Pair(Name("%p1"), Name("%p2")), Name("%r1"), Immediate("-7"), Not(Name("%p3"))),
                line=6,
            ),
        ),
        (
            "call.uni (retval0), f, (param0, param1);",
            PtxInstruction("call", ("uni",), (Group((Name("retval0"),)), Name("f"), Group((Name("param0"), Name("param1")))), line=6),
        ),
        ("mov.u64 %rd1, table+8;", PtxInstruction("mov", ("u64",), (Name("%rd1"), Name("table", 8)), line=6)),
        ("st.shared.u32 [s-4], 0x10U;", PtxInstruction("st", ("shared", "u32"), (Address("s", -4), Immediate("0x10U")), line=6)),
        ("ld.global.L1::evict_last.L2::128B.v2.b32 {%r1,%r2}, [%rd1+-8];",
         PtxInstruction("ld", ("global", "L1::evict_last", "L2::128B", "v2", "b32"),
                     (Vector((Name("%r1"), Name("%r2"))), Address("%rd1", -8)), line=6)),
        ("tex.2d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [t, {%f5, %f6}];",
         PtxInstruction("tex", ("2d", "v4", "f32", "f32"),
                     (Vector(tuple(Name(f"%f{i}") for i in (1, 2, 3, 4))),
                      Address("t", 0, (Vector((Name("%f5"), Name("%f6"))),))), line=6)),
        ("mov.u32 %r1, WARP_SZ;", PtxInstruction("mov", ("u32",), (Name("%r1"), Immediate("32")), line=6)),
        ("mov.u32 %r1, (4*3)+1;", PtxInstruction("mov", ("u32",), (Name("%r1"), Immediate("13")), line=6)),
    ],
)  # fmt: skip
def test_instruction(text, expected):
    assert one(text) == expected
    assert one(str(expected)) == expected


def test_elements_of_arrays():
    """Constant indices become offsets in bytes; the innermost declaration of a name says what it is."""
    text = """.shared .v2 .u32 a[4][4]; .reg .b32 i;
        ld.shared.u32 i, a[2]; st.shared.u32 a[-1], i; mov.u32 i, a[1+1];
        ld.shared.u32 i, a[i+3]; mov.u32 i, a [ i ] ;
        { .local .b16 a[2]; ldu.u16 i, a[i+-1]; } cvta.shared.u64 i, a[i];"""
    operands = [s.operands for s in body_of(text) if isinstance(s, PtxInstruction)]
    assert [o for both in operands for o in both if o != Name("i")] == [
        Address("a", 8), Address("a", -4), Name("a", 8),
        Address("a", 12, index="i", unit=4), Address("a", 0, index="i", unit=4),
        Address("a", -2, index="i", unit=2), Address("a", 0, index="i", unit=4),
    ]  # fmt: skip
    again = body_of("\n".join(map(str, body_of(text))))
    assert [s.operands for s in again if isinstance(s, PtxInstruction)] == operands
    assert [str(o[1]) for o in operands[3:6]] == ["a[i+3]", "a[i]", "a[i+-1]"]


def test_statements_of_a_body():
    statements = body_of(
        """
        .reg .b32 %r<4>, extra;
        .loc 1 3 0, function_name $L__info_string0, inlined_at 1 6 2
        .pragma "nounroll";
        // { a comment with a brace
        ts: .branchtargets A, B;
        { .param .b32 param0; }
        A:
        """
    )
    kinds = [type(s) for s in statements]
    assert kinds == [Variable, Variable, Directive, Directive, Label, Directive, Open, Variable, Close, Label]
    assert statements[0].count == 4 and statements[1].name == "extra"
    assert statements[5].names == ("A", "B")
    assert str(statements[2]).startswith(".loc 1 3 0, function_name")


def test_variables_and_initialisers():
    module = parse(
        HEAD
        + """
        .visible .global .attribute(.managed) .align 8 .u64 total = 5;
        .const .align 4 .f32 coef[2][2] = {{0f3F800000, 1.5}, {2, -3}};
        .global .align 8 .u64 pointers[3] = {generic(total), total+8, generic(total)+4};
        .global .align 1 .b8 bytes[3] = {0xFF(total), 0xFF00(generic(total)), 7};
        .extern .shared .align 16 .b8 s[];
        .global .v4 .f32 quad;
        """
    )
    v = module.variables
    assert v["total"].attributes == ("managed",) and v["total"].size == 8
    assert v["coef"].size == 16 and v["coef"].initializer[0][0].real == 1.0
    assert v["pointers"].initializer == (Generic(Name("total")), Name("total", 8), Generic(Name("total", 4)))
    assert "generic(total)+4" in str(v["pointers"])
    assert v["bytes"].initializer[:2] == (Masked(0xFF, Name("total")), Masked(0xFF00, Generic(Name("total"))))
    assert v["s"].dimensions == (None,) and v["s"].size == 0 and v["s"].alignment == 16
    assert v["quad"].size == 16 and v["quad"].alignment == 16


def test_functions_parameters_and_directives():
    module = parse(
        HEAD
        + """
        .extern .func (.param .b32 func_retval0) vprintf (.param .b64 a, .param .b64 b);
        .visible .entry k(.param .u64 .ptr .global .align 16 p, .param .align 8 .b8 s[24])
        .maxntid 256, 1, 1
        .minnctapersm 2
        .pragma "used_bytes_mask 15";
        { ret; }
        .func die() .noreturn;
        .func (.param .b32 r) f(.param .b32 x) { ret; }
        .alias g, f;
        """
    )
    k = module.functions["k"]
    assert [p.name for p in k.parameters] == ["p", "s"] and k.parameters[1].size == 24
    assert [d.name for d in k.directives] == ["maxntid", "minnctapersm", "pragma"]
    assert not module.functions["vprintf"].defined and module.functions["f"].defined
    assert list(module.entries) == ["k"]
    again = parse(render(module))
    assert render(again) == render(module)


@pytest.mark.parametrize(
    "text", ["", "garbage", HEAD + ".visible .entry k() {", HEAD + "mov.u32;", ".version 8.0"]
)
def test_what_is_not_ptx_is_one_error(text):
    with pytest.raises(PtxError):
        parse(text)


ODD = """@%p1 add.s32 %r1, %r2, -4;  @ %p1 ret; @!%p1 exit ;
add.s32 %r1,
    %r2,
    { }; ret
;
ld .global.u32 %r1, [%rd1 + 4 * 2];
mov.b64 {%r1, %r2}, %rd1; mov.b64 {%r1, _}, {%r2, {%r3, %r4}};
wmma.load.a.sync.aligned.m16n16k16.row.f16 {%r1, %r2, %r3, %r4}, [%rd1+64], %r5;
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f5, %f6}].unified;
set.r1 %r1, %r2; vmin.u32.u32.u32 low.b3, %r2.h1, %r3, 0;
mov.u32 %r1, WARP_SZ; mov.u32 %r1, (4+2)*3; mov.u32 %r1, -4; mov.u32 %r1, 0f3F800000; mov.u32 %r1, ~4;
setp.lt.and.s32 %p1|%p2, %r1, -7, !%p3; shfl.sync.up.b32 %r1|%p1, %r2, 1, 0, -1;
top: again: bra top; $L_1: add.s32 a, b, c;
.loc 1 2 3
.loc\t1 5 0, function_name $L__info_string0, inlined_at 1 4 2
.loc
.loc 1 2 3 \t\r
call.uni (r), f, (a, b); mov.u64 %rd1, table+8; //gpubpf+3
//gpubpf{
bar.sync 0; //gpubpf}
mov.u32:: %r1, %r2;
mov.a::b %r1, %r2; a.x::y; mov.b0::u32 %r1;
.pragma "nounroll; top:"; .reg .b32 %x<3>, y; { .param .b32 p; } bar.warp.sync
-1;
add.s32 %r1,, %r2;
add.s32 %r1, %r2,;
add.s32 %r1, %r2
add.s32 %r1 %r2;
ld.u32 %r1, [%rd1;
mov.b64 {%r1, %r2, %rd1;
mov.b64 %r1}, %r2;
add.s32 %r1, "text";
add.s32 %r1, \u00e9; \u00e9: ret;
"""


@pytest.mark.parametrize(
    "text", [*ODD.splitlines(), ODD, (Path(__file__).parents[1] / "inject" / "edges.ptx").read_text()]
)
def test_common_lines_are_read_as_token_by_token(text, monkeypatch):
    def read():
        try:
            whole = text if text.startswith(".version") else f"{HEAD}.entry k()\n{{\n{text}\n}}\n"
            return [(f.name, f.body) for f in parse(whole).functions.values()]
        except PtxError as error:
            return str(error)

    quickly = read()
    monkeypatch.setattr(parser, "_COMMON", re.compile("(?!)"))
    assert read() == quickly


def test_without_the_bodies_of_other_kernels() -> None:
    """Every other line stays where it is."""
    kernel = ".visible .entry {}()\n{{ // first\n\t.reg .b32 %r;\n\tcall f, ();\n\tret;\n}}\n"
    text = HEAD + ".visible .func f()\n{\n\tret;\n}\n" + "".join(map(kernel.format, "abc"))
    made = parser.only_bodies_of(text, parse(text), ["b"])
    before, after = parse(text), parse(made)
    assert {n: f.line for n, f in after.functions.items()} == {n: f.line for n, f in before.functions.items()}
    assert len(made.splitlines()) == len(text.splitlines())
    for name, function in after.functions.items():
        body = [str(s) for s in function.body or ()]
        assert body == (["ret;"] if name in "ac" else [str(s) for s in before.functions[name].body or ()])
