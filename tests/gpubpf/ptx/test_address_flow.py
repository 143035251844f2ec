"""Which addresses of functions stay in the thread, by the statements of a function."""

from __future__ import annotations

import pytest

from gpubpf.ptx.address_flow import Parameter, passes
from gpubpf.ptx.parser import parse

HEAD = """.version 9.0
.target sm_80
.address_size 64
.func f(.param .b64 x) { ret; }
.func uses(.param .b64 x) { ret; }
.global .u64 x;
"""
# A struct of an address and a number, then an array, as nvcc puts local objects into one variable.
LOCAL = """.local .align 8 .b8 depot[64]; mov.u64 %rd1, depot; cvta.local.u64 %rd2, %rd1; mov.u64 %rd3, f;
    st.u64 [%rd2], %rd3; st.u32 [%rd2+8], 7; add.u64 %rd4, %rd2, 16; mul.wide.s32 %rd5, %r1, 4; add.s64 %rd6, %rd4, %rd5;
"""
REGISTERS = ".reg .f64 %fd<2>; .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .b16 %rs<5>; .reg .pred %p<2>;"


def found(body: str, parameters: str = ".param .b64 out", *given: Parameter) -> frozenset[Parameter] | None:
    text = f"{HEAD}.func made({parameters}) {{ {REGISTERS} ld.param.u64 %rd8, [out];\n{body}\nret; }}\n"
    return passes(parse(text).functions["made"], () if given else {"f"}, given)


@pytest.mark.parametrize(
    "body",
    [
        "ld.u32 %r2, [%rd2+8]; st.global.u32 [%rd8], %r2;",  # the number beside the address
        "ld.u32 %r2, [%rd6]; add.s32 %r2, %r2, 1; st.global.u32 [%rd8], %r2;",  # of the array
        "st.u32 [%rd6], %r1; mad.wide.s32 %rd7, %r1, 4, %rd4; ld.u16 %rs1, [%rd7+4]; st.global.u16 [%rd8], %rs1;",
        "{ .param .b64 q; st.param.b64 [q], %rd4; call uses, (q); }",  # a function gets the array
        "add.u64 %rd7, %rd2, 0; ld.u64 %rd7, [%rd7]; { p: .callprototype _ (); call %rd7, (), p; }",
        "setp.ne.s64 %p1, %rd3, 0; setp.eq.b64 %p1, %rd3, 0x0;",  # whether there is one
        "ld.f64 %fd1, [%rd6]; st.global.f64 [%rd8], %fd1;",
        "add.s64 %rd7, %rd4, 0xFFFFFFFFFFFFFFF8; ld.u32 %r2, [%rd7]; st.global.u32 [%rd8], %r2;",
    ],
    ids=[
        "a number",
        "an element",
        "half an element",
        "the array is passed",
        "called",
        "null",
        "floats",
        "negative",
    ],
)
def test_other_local_objects(body: str) -> None:
    assert found(LOCAL + body) == frozenset()


@pytest.mark.parametrize(
    "body",
    [
        "ld.u64 %rd7, [%rd2]; st.global.u64 [%rd8], %rd7;",
        "ld.u32 %r2, [%rd2+4]; st.global.u32 [%rd8], %r2;",  # a half of the address
        "add.s64 %rd7, %rd2, %rd5; ld.u32 %r2, [%rd7]; st.global.u32 [%rd8], %r2;",
        "add.s64 %rd7, %rd6, -16; ld.u8 %rs1, [%rd7]; st.global.u8 [%rd8], %rs1;",
        "sub.s64 %rd7, %rd4, %rd5; ld.u32 %r2, [%rd7]; st.global.u32 [%rd8], %r2;",
        "ld.u64 %rd7, [%rd6]; st.global.u64 [%rd8], %rd7;",  # perhaps backwards through an array of addresses
        "{ .param .b64 q; st.param.b64 [q], %rd2; call uses, (q); }",
        "xor.b64 %rd7, %rd4, %rd5; ld.u32 %r2, [%rd7]; st.global.u32 [%rd8], %r2;",
        "st.u64 [%rd6], %rd3; ld.u32 %r2, [%rd4+12]; st.global.u32 [%rd8], %r2;",
        "selp.b64 %rd7, %rd8, %rd4, %p1; st.u64 [%rd7], %rd3;",
        "mov.u64 %rd7, %rd8; @%p1 mov.u64 %rd7, %rd4; st.u64 [%rd7], %rd3;",
        "st.local.u64 [%rd8], %rd3;",  # a caller's variable
        "alloca.u64 %rd7, 16; st.local.u64 [%rd7], %rd3; { .param .b64 q; st.param.b64 [q], %rd7; call uses, (q); }",
        "st.u64 [%rd4], %rd3; add.u64 %rd7, %rd2, 24; { .param .b64 q; st.param.b64 [q], %rd7; call uses, (q); }",
        "{ .param .b64 q; { st.param.b64 [q], %rd3; } call keeps, (q); ld.param.b64 %rd7, [q]; }",
        "add.s64 %rd7, %rd4, 0xFFFFFFFFFFFFFFF4; ld.u32 %r2, [%rd7]; st.global.u32 [%rd8], %r2;",
        "setp.ne.s64 %p1, %rd3, 1;",
        "{ .reg .b64 depot; mov.b64 depot, %rd8; st.u64 [depot], %rd3; }",
        ".local .b64 d1; { .reg .b64 d<3>; mov.b64 d1, %rd8; st.u64 [d1], %rd3; }",
        "{ .local .u64 x; st.local.u64 [x], 1; } st.u64 [x], %rd3;",
        "{ st.u64 [x], %rd3; .local .u64 x; }",
        ".reg .v2 .b64 vv; mov.b64 vv.x, %rd3; mov.b64 vv.y, 0; st.global.v2.b64 [%rd8], vv;",
        ".reg .v2 .b64 vv; mov.b64 vv.x, %rd3; st.global.b64 [%rd8], vv.r;",
    ],
    ids=[
        "stored",
        "a half",
        "anywhere",
        "before it",
        "backwards",
        "perhaps an address",
        "the struct is passed",
        "unknown",
        "in the array",
        *(
            "perhaps elsewhere",
            "moved from elsewhere",
            "another's local memory",
            "alloca",
            "the end of an array",
        ),
        *("read back", "a part before", "compared", "hidden", "hidden by a range"),
        *("the module's, after", "the module's, before", "a vector", "an element of a vector"),
    ],
)
def test_addresses_that_may_leave(body: str) -> None:
    assert found(LOCAL + body) is None


STRUCT = ".param .b64 out, .param .align 8 .b8 s[16]"


def test_structs_as_parameters() -> None:
    """A functor: a struct with an address at offset 8."""
    given = Parameter("made", 1, 8)
    passed = "{ .param .align 8 .b8 q[16]; st.param.b64 [q+8], %rd3; st.param.b32 [q], %r1; call uses, (q); }"
    read = "ld.param.u64 %rd3, [s+8]; ld.param.u32 %r1, [s]; st.global.u32 [%rd8], %r1;"
    assert found(read + passed, STRUCT, given) == {Parameter("uses", 0, 8)}
    for leaves in (
        "ld.param.u64 %rd3, [s+8]; st.global.u64 [%rd8], %rd3;",
        "ld.param.u32 %r1, [s+12]; st.global.u32 [%rd8], %r1;",
        "mov.b64 %rd4, s; st.global.u64 [%rd8], %rd4;",
        "{ call uses, (s); }",
    ):
        assert found(leaves, STRUCT, given) is None
    assert (
        found("ld.param.v2.u64 {%rd3, %rd4}, [s]; st.global.u64 [%rd8], %rd3;", STRUCT, given) == frozenset()
    )


def test_loops_come_to_an_end() -> None:
    forwards = "again: add.s64 %rd4, %rd4, 4; st.u32 [%rd4], %r1; bra again;"
    assert found(LOCAL + forwards) == frozenset()
    backwards = "again: add.s64 %rd4, %rd4, -4; ld.u32 %r2, [%rd4]; st.global.u32 [%rd8], %r2; bra again;"
    assert found(LOCAL + backwards) is None


def test_arguments_and_results() -> None:
    twice = "mov.u64 %rd3, f; { .param .b64 q; st.param.b64 [q], %rd3; call twice, (q, q); }"
    assert found(twice) == {Parameter("twice", 0), Parameter("twice", 1)}
    text = f"{HEAD}.func (.reg .b64 r) made() {{ mov.u64 r, f; ret; }}\n"
    assert passes(parse(text).functions["made"], {"f"}) is None
