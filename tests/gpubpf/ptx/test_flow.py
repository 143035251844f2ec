"""Blocks, loops, tails, and what counts as what, against counts by hand."""

from __future__ import annotations

import pytest

from gpubpf.errors import PtxError
from gpubpf.ptx.call_graph import CallGraph, may_wait, references
from gpubpf.ptx.flow import Flow, find_names
from gpubpf.ptx.module import Module, PtxInstruction, Variable
from gpubpf.ptx.opcodes import counted
from gpubpf.ptx.parser import parse

HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"


def module(body: str, before: str = "") -> Module:
    registers = ".reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>;\n"
    return parse(f"{HEAD}{before}.visible .entry k(.param .u64 p) {{ {registers}{body} }}")


def flow(body: str) -> Flow:
    return Flow(module(body).functions["k"].body or ())


def instruction(text: str) -> PtxInstruction:
    found = [s for s in module(text).functions["k"].body or () if isinstance(s, PtxInstruction)]
    return found[0]


def test_names_are_those_of_whole_registers() -> None:
    vadd = instruction("vadd.u32.u32.u32.sat %r1.b0, %r2.h1, %r3.b, %r4;")
    assert list(find_names(vadd.operands)) == ["%r1", "%r2", "%r3.b", "%r4"]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("ld.param.u64 %rd1, [p];", ()),
        ("st.param.b32 [p], %r1;", ()),
        ("ld.param::entry.u64 %rd1, [p];", ()),
        ("ld.global.nc.v4.f32 {%r1, %r2, %r3, %r4}, [%rd1];", ("loads",)),
        ("ld.u32 %r1, [%rd1];", ("loads",)),
        ("ld.const.u32 %r1, [%rd1];", ("loads",)),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];", ("loads",)),
        ("st.local.u32 [%rd1], %r1;", ("stores",)),
        ("st.volatile.shared.u32 [%rd1], %r1;", ("stores",)),
        ("atom.global.add.u32 %r1, [%rd1], 1;", ("atomics",)),
        ("red.global.add.u32 [%rd1], 1;", ("atomics",)),
        ("sust.b.1d.b32.trap [%rd1, {%r1}], {%r2};", ()),
        ("sured.b.add.1d.u32.trap [%rd1, {%r1}], %r2;", ()),
        ("bar.sync 0;", ("barriers",)),
        ("bar.red.popc.u32 %r1, 0, %p1;", ("barriers",)),
        ("barrier.cluster.arrive.aligned;", ("barriers",)),
        ("bar.warp.sync 0xffffffff;", ()),
        ("mbarrier.arrive.shared.b64 %rd1, [%r1];", ()),
        ("cp.async.ca.shared.global [%r1], [%rd1], 4;", ("loads", "stores")),
        ("cp.async.commit_group;", ()),
        ("cp.async.wait_group 0;", ()),
        ("prefetch.global.L1 [%rd1];", ()),
        ("shfl.sync.down.b32 %r1, %r2, 1, 31, -1;", ()),
        ("add.u32 %r1, %r2, 1;", ()),
    ],
)
def test_counted(text: str, kinds: tuple[str, ...]) -> None:
    assert counted(instruction(text)) == kinds


def test_a_label_begins_a_block_only_where_something_branches_to_it() -> None:
    found = flow("mov.u32 %r1, 0;\n$L__tmp0:\nadd.u32 %r1, %r1, 1;\n$L__tmp1:\nret;")
    assert [len(b.instructions) for b in found.blocks] == [3]


def test_predicated_exits_end_a_block() -> None:
    found = flow("@%p1 ret; mov.u32 %r1, 0; @%p2 exit; @%p3 bra out; mov.u32 %r1, 1; out: ret;")
    assert [len(b.instructions) for b in found.blocks] == [1, 2, 1, 1, 1]
    assert [b.successors for b in found.blocks] == [(1,), (2,), (4, 3), (4,), ()]
    assert not found.falls_off


def test_a_body_may_end_without_return() -> None:
    assert flow("mov.u32 %r1, 0;").falls_off
    assert flow("@%p1 ret;").falls_off
    assert flow("@%p1 bra out; ret; out:").falls_off
    assert flow("").falls_off
    assert not flow("bra out; out: trap;").falls_off


def test_labels_are_local_to_their_scope() -> None:
    found = flow("{ bra L; mov.u32 %r1, 0; L: } { @%p1 bra L; mov.u32 %r1, 1; L: mov.u32 %r1, 2; } ret;")
    first, second = (t[0] for t in found.targets.values() if t)
    assert first < second
    with pytest.raises(PtxError, match="no label"):
        flow("{ L: } bra L;")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".visible", "PTX line 4: the text ends after .visible; it may be truncated"),
        (".global x;", "PTX line 4: this declaration has no type"),
        (".visible .entry k() { bra 3; ret; }", "PTX line 4: bra requires a label"),
        (
            ".visible .entry k() { .reg .b32 a; x: ret;\nbrx.idx a, x; }",
            "PTX line 5: brx requires the label of a .branchtargets statement",
        ),
    ],
)
def test_errors_say_where_and_what_is_missing(text: str, message: str) -> None:
    with pytest.raises(PtxError) as error:
        Flow(parse(HEAD + text).functions["k"].body or ())
    assert str(error.value).startswith(message)


def test_a_name_means_what_was_declared_before() -> None:
    """The innermost declaration that precedes a statement; a range declares its registers (PTX ISA 5.1)."""
    found = flow(
        ".reg .b32 a; ret; { ret; .reg .b32 a; ret; { .reg .b32 b<3>; ret; } } ret; .reg .b64 b2; ret;"
    )
    at = [index for index, _ in found.instructions()]
    declared = [index for index, statement in enumerate(found.body) if isinstance(statement, Variable)]
    outer, inner, ranged, later = declared[-4:]
    assert [found.declaration(index, "a") for index in at] == [outer, outer, inner, inner, outer, outer]
    assert [found.declaration(index, "b2") for index in at] == [None, None, None, ranged, None, later]
    assert {found.declaration(index, name) for index in at for name in ("b", "b3", "b02", "c")} == {None}
    nested = flow(".reg .b32 a<20>; { .reg .b32 a1<2>; ret; }")
    (index,) = (index for index, _ in nested.instructions())
    assert str(nested.body[nested.declaration(index, "a11") or 0]) == ".reg .b32 a<20>;"


def test_indexed_branches() -> None:
    found = flow("ts: .branchtargets a, b, a; brx.idx %r1, ts; a: mov.u32 %r1, 0; b: ret;")
    assert found.blocks[0].successors == (1, 2)


def test_cycles() -> None:
    found = flow(
        "mov.u32 %r1, 0; outer: mov.u32 %r2, 0; inner: add.u32 %r2, %r2, 1; @%p1 bra inner; @%p2 bra outer; ret;"
    )
    assert set(found.cycles) == {1, 2, 3}
    assert len(set(found.cycles.values())) == 1
    assert flow("mov.u32 %r1, 0; bra out; out: ret;").cycles == {}
    assert flow("L: @%p1 bra L; ret;").cycles == {0: 0}


def test_tails() -> None:
    found = flow("bra a; a: mov.u32 %r1, 0; bra b; b: ret;")
    labels = sorted(found.leaders)
    tail = found.tail(labels[0], 4)
    assert tail is not None and len(tail) == 3
    assert found.tail(labels[0], 0) is None
    for body in ("st.global.u32 [%rd1], 1; ret;", "@%p1 ret; ret;", "bar.sync 0; ret;", "{ ret; }", "bra a;"):
        found = flow(f"bra a; a: {body}")
        assert found.tail(min(found.leaders), 4) is None, body


def test_references() -> None:
    before = (
        ".extern .func other(.param .b32 x);\n.global .u32 v;\n.shared .u32 s;\n"
        ".func f() { ret; }\n.func g() { exit; }\n.func h() { call g; ret; }\n"
    )
    found = module("call f; ld.global.u32 %r1, [v]; st.shared.u32 [s], %r1; frobnicate.x %r1; ret;", before)
    refs = references(found.functions["k"], found)
    assert refs.calls == {"f"} and refs.variables == {"v", "s"} and not refs.indirect
    assert refs.unknown == {"frobnicate.x"}
    found = module("mov.u64 %rd1, f;", before)
    assert references(found.functions["k"], found).taken == {"f"}
    for body in ("call %rd1, pt;", "call %rd1, (%r1), pt;"):
        found = module(body, before)
        assert references(found.functions["k"], found).indirect, body
    found = module("call h; ret;", before)
    graph = CallGraph(found)
    assert graph.reach("k") == {"k", "h", "g"}
    assert graph.leaving({"f", "g", "h"}) == {"g", "h"}


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        ("ld.volatile.global.u32 %r1, [%rd1]; ret;", False),  # once is not waiting
        ("$L: ld.global.u32 %r1, [%rd1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra $L; ret;", False),
        ("$L: ld.volatile.global.u32 %r1, [%rd1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra $L; ret;", True),
        ("$L: ld.volatile.u32 %r1, [%rd1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra $L; ret;", True),
        ("$L: ld.acquire.gpu.global.u32 %r1, [%rd1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra $L; ret;", True),
        ("$L: ld.global.cg.u32 %r1, [%rd1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra $L; ret;", True),
        ("$L: ld.volatile.shared.u32 %r1, [%rd1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra $L; ret;", False),
        ("$L: atom.global.add.u32 %r1, [%rd1], 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra $L; ret;", False),
        ("$L: atom.global.cas.b32 %r1, [%rd1], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra $L; ret;", True),
        ("$L: ld.global.u32 %r1, [%rd1]; membar.gl; setp.eq.u32 %p1, %r1, 0; @%p1 bra $L; ret;", True),
        ("$L: nanosleep.u32 40; setp.eq.u32 %p1, %r1, 0; @%p1 bra $L; ret;", True),
        ("call polls; ret;", True),
    ],
)
def test_kernels_whose_blocks_may_wait_for_each_other(body: str, waits: bool) -> None:
    made = module(body, ".func polls() { .reg .b32 %r1; .reg .b64 %rd1; ld.volatile.u32 %r1, [%rd1]; ret; }")
    assert may_wait(made.functions["k"], CallGraph(made)) is waits
