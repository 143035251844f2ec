"""Virtual calls: which functions they can reach, and what a copy calls. tests/tools/test_indirect_calls.py runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpubpf.ebpf.probe import Probe
from gpubpf.inject.inject import inject
from gpubpf.inject.injected import Injected
from gpubpf.ptx.call_graph import CallGraph
from gpubpf.ptx.indirect import MAX_TARGETS, Entry, Shape, entries, indirect_calls, shape_of
from gpubpf.ptx.link import Input, link
from gpubpf.ptx.parser import parse
from gpubpf.ptx.symbols import TABLE
from gpubpf_fragments import log, tally
from gpubpf_sass import assembled

HEAD = ".version 9.0\n.target sm_80\n.address_size 64\n"
F = ".func {}(.param .b64 x, .param .b32 y) {{ ret; }}\n"
TABLES = (
    "{}.global .align 8 .u64 _ZTV1A[4] = {{0, 0, f, g}};\n.global .align 8 .u64 _ZTV1B[3] = {{0, 0, f}};\n"
)
CALL = """{{
    .param .b64 p0; st.param.b64 [p0], %rd1;
    .param .b32 p1; st.param.b32 [p1], 7;
    t: .callprototype ()_ (.param .b64 _, .param .b32 _);
    {} %rd2, (p0, p1), t;
}}"""

PICKS = "mov.u64 %rd3, f; mov.u64 %rd4, g; selp.b64 %rd2, %rd3, %rd4, %p1;"
TWO = F.format("f") + F.format("g")


def module(body: str, before: str = TABLES.format(F.format("f") + F.format("g"))) -> str:
    registers = ".reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .pred %p<2>;"
    return (
        f"{HEAD}{before}\n.visible .entry k(.param .u64 a) {{ {registers} ld.param.u64 %rd1, [a];"
        f" ld.global.u64 %rd2, [%rd1];\n{body}\nret; }}"
    )


def instrumented(text: str) -> Injected:
    found = parse(text)
    probes = (Probe(tally(), "exit", "instructions"),)
    return inject(found, dict.fromkeys(found.entries, probes))


@pytest.mark.parametrize("call", ["call", "call.uni", "@%p1 call"])
def test_an_indirect_call_becomes_calls_of_the_copies(call: str, tmp_path: Path) -> None:
    found = parse(module(CALL.format(call)))
    (made,) = indirect_calls(found.functions["k"].body or ()).values()
    assert made.register == "%rd2" and made.shape == Shape((), ((8, 8), (4, 4))) == shape_of(
        found.functions["f"]
    )
    assert entries(found) == {"f": Entry("_ZTV1A", 16, True), "g": Entry("_ZTV1A", 24, True)}
    assert CallGraph(found).reach("k") == {"k", "f", "g"}
    points = [Probe(log(p, p), p) for p in ("function_entry", "basic_block", "access", "entry", "exit")]
    injected = inject(found, {"k": points})
    assert not injected.refusals
    kernel = injected.text[injected.text.index(".entry k(") :]
    # One comparison with each function's address, and the call through the register if all differ.
    assert kernel.count("setp.ne.b64 %gpubpf_0differs") == 2
    assert [kernel.count(f"%gpubpf_0address{n}, [{TABLE}+{8 * n}];") for n in (0, 1)] == [1, 1]
    assert kernel.count("%rd2, (p0, p1), t;") == 1
    assert [(v.name, v.entry, v.fixed) for v in injected.variables] == [("_ZTV1A", n, True) for n in (16, 24)]
    assert not any(variable.copied for variable in injected.variables)
    assembled(injected.text, "sm_80", tmp_path)


def test_results_and_counts_of_an_indirect_call(tmp_path: Path) -> None:
    functions = "".join(
        f".func (.param .align 16 .b8 r[16]) {name}(.param .b64 x)"
        " { st.param.b32 [r+12], 1; st.param.b32 [r], 2; ret; }\n"
        for name in "fg"
    )
    body = """{ .param .b64 p0; st.param.b64 [p0], %rd1; .param .align 16 .b8 q[16];
        t: .callprototype (.param .align 16 .b8 _[16]) _ (.param .b64 _);
        call (q), %rd2, (p0), t; ld.param.b32 %r1, [q+12]; ld.param.b32 %r2, [q]; }
        st.global.u32 [%rd1], %r1;"""
    injected = instrumented(module(body, TABLES.format(functions)))
    assert not injected.refusals
    kernel = injected.text[injected.text.index(".entry k(") :]
    # The copies return the work that they count behind their result; what is called through the register does not.
    assert (kernel.count("q[24]"), kernel.count("q[16]"), kernel.count("[q+16]")) == (2, 1, 2)
    assembled(injected.text, "sm_80", tmp_path)


@pytest.mark.parametrize(
    ("before", "body", "reason"),
    [
        (F.format("f"), CALL.format("call"), "indirect call; no table has a function for it"),
        (
            TABLES.format(F.format("f") + F.format("g") + F.format("h")) + ".global .v2 .u64 v = {h, h};",
            CALL.format("call"),
            "indirect call; v has the address of h",
        ),
        (
            F.format("f") + ".global .attribute(.managed) .u64 v = f;",
            CALL.format("call"),
            "indirect call; v has the address of f",
        ),
        (
            TABLES.format(F.format("f") + F.format("g") + F.format("h"))
            + ".func takes(.param .b64 x) { .reg .b64 %rd<3>; ld.param.u64 %rd2, [x]; mov.u64 %rd1, h;"
            " st.u64 [%rd2], %rd1; ret; }",
            CALL.format("call"),
            "indirect call; takes passes on the address of h",
        ),
        (
            TABLES.format(F.format("f") + F.format("g") + F.format("h"))
            + ".func other(.param .b64 x) { .global .u64 v = h; ret; }",
            CALL.format("call"),
            "indirect call; v has the address of h",
        ),
        (
            TABLES.format(F.format("f") + ".func g(.reg .b64 x, .reg .b32 y) { ret; }"),
            CALL.format("call"),
            "indirect call; g takes its parameters in registers",
        ),
        (
            TABLES.format(".func f(.param .b64 x, .param .b32 y) { exit; }" + F.format("g")),
            CALL.format("call"),
            "indirect call; perhaps of a function that leaves the kernel",
        ),
        (
            TABLES.format(".extern .func f(.param .b64 x, .param .b32 y);" + F.format("g")),
            CALL.format("call"),
            "needs device linking: f",
        ),
        (
            "".join(F.format(f"f{n}") for n in range(MAX_TARGETS + 1))
            + f".global .u64 _ZTV1A[{MAX_TARGETS + 1}] = {{{', '.join(f'f{n}' for n in range(MAX_TARGETS + 1))}}};",
            CALL.format("call"),
            f"indirect call; it may reach {MAX_TARGETS + 1} functions, in 1 place",
        ),
    ],
    ids=[
        *("no table", "another variable", "managed", "another kernel", "another kernel's variable"),
        *("parameters in registers", "leaves", "undefined", "too many"),
    ],
)
def test_calls_that_may_reach_other_functions(before: str, body: str, reason: str) -> None:
    assert instrumented(module(body, before)).refusals == {"k": reason}


@pytest.mark.parametrize("local", [True, False], ids=["tables", "an address that is taken"])
def test_linked_code_is_followed_only_if_all_of_it_is_there(local: bool) -> None:
    """Code that is not there may have other functions for a call, whose addresses come through memory."""
    text = module(CALL.format("call")) if local else module(PICKS + CALL.format("call"), TWO)
    text = text.replace(".global .align", ".weak .global .align").replace(".func g(", ".weak .func g(")
    second = f"{HEAD}{F.format('h').replace('.func', '.visible .func')}"
    second += ".weak .global .align 8 .u64 _ZTV1C[1] = {h};\n"
    inputs = [Input("first", text), Input("second", second)]
    for given in (inputs[:1], inputs):
        assert not instrumented(link(given)).refusals
        partial = link(given, partial=True)
        assert instrumented(partial).refusals == {"k": "indirect call; it may reach code without PTX"}
        assert "k" in instrumented(partial.replace("call %rd2, (p0, p1), t;", "")).kernels
    assert link(inputs[:1]) == text
    assert CallGraph(parse(link(inputs))).reach("k") == {"k", "f", "g", "h"}


def test_tables_of_anonymous_namespaces() -> None:
    tables = TABLES.format(F.format("f") + F.format("g"))
    named = tables.replace("_ZTV1A", "__nv_static_25__37d95081_4_b_cu_3ee392db__ZTVN12_GLOBAL__N_11AE")
    assert not instrumented(module(CALL.format("call"), named)).refusals
    others = instrumented(module(CALL.format("call"), tables.replace("_ZTV1A", "table_ZTV1A"))).variables
    assert [v.fixed for v in others] == [True, False]  # f is also in the other table


def test_only_functions_of_the_same_shape_count() -> None:
    other = ".func h(.param .b64 x) { ret; }\n.global .u64 v = h;\n"
    before = TABLES.format(F.format("f") + F.format("g")) + other
    assert not instrumented(module(CALL.format("call"), before)).refusals


def test_arguments_may_be_computed_in_the_scope(tmp_path: Path) -> None:
    """nvcc does so in unrolled loops."""
    scope = """{ .reg .b32 temp_param_reg; .param .b64 param0; st.param.b64 [param0], %rd1;
        .param .b32 param1; add.s32 %r3, %r2, 1; st.param.b32 [param1], %r3;
        t: .callprototype ()_ (.param .b64 _, .param .b32 _); call %rd2, (param0, param1), t; }"""
    found = parse(module(scope))
    points = [Probe(log("instruction"), "instruction"), Probe(tally(), "exit", "instructions")]
    injected = inject(found, {"k": points})
    assert not injected.refusals and injected.text.count("add.s32 %r3, %r2, 1;") == 3
    added = [site for site in injected.kernels["k"].sites if site.opcode == "add.s32"]
    assert len(added) == 3 and len({site.line for site in added}) == 1
    assembled(injected.text, "sm_80", tmp_path)


@pytest.mark.parametrize(
    "scope",
    [
        "{ .param .b32 q; { .param .b64 p; st.param.b64 [p], %rd1;"
        " t: .callprototype (.param .b32 _) _ (.param .b64 _); call (q), %rd2, (p), t; } }",
        "{ .reg .b64 %rd2; t: .callprototype ()_ (); call %rd2, (), t; }",
        "{ .reg .b64 %rd<9>; t: .callprototype ()_ (); call %rd2, (), t; }",
        "{ .local .b32 x; t: .callprototype ()_ (); call %rd2, (), t; }",
        "{ t: .callprototype ()_ (); ld.global.u64 %rd3, [%rd1]; call %rd2, (), t; }",
        "{ .param .b64 p0; st.param.b64 [p0], %rd1; t: .callprototype ()_ (.param .b64 _);"
        " mov.u64 %rd2, %rd1; call %rd2, (p0), t; }",
        "{ t: .callprototype ()_ (); call %rd2, (), t; call %rd2, (), t; }",
        "{ t: .callprototype ()_ (); { call %rd2, (), t; } }",
        "{ t: .callprototype ()_ (); @%p1 bra over; call %rd2, (), t; over: }",
        "{ .reg .b32 %a; t: .callprototype ()_ (.reg .b32 _); call %rd2, (%a), t; }",
        "{ t: .callprototype ()_ () .noreturn; call %rd2, (), t; }",
        "t: .callprototype ()_ (); call %rd2, (), t;",
    ],
)
def test_calls_in_other_scopes_are_refused(scope: str) -> None:
    before = ".func f() { ret; }\n.global .u64 _ZTV1A[1] = {f};\n"
    assert instrumented(module(scope, before)).refusals["k"].startswith("indirect call")


def test_functions_that_call_each_other() -> None:
    body = "{ .reg .b64 %rd<3>; ld.param.u64 %rd1, [x]; ld.u64 %rd2, [%rd1];" + CALL.format("call") + "ret; }"
    before = TABLES.format(f".func f(.param .b64 x, .param .b32 y) {body}\n" + F.format("g"))
    injected = instrumented(module(CALL.format("call"), before))
    assert not injected.refusals and set(injected.kernels) == {"k"}


# --- addresses that code takes, and constant arrays of function pointers ----------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        PICKS,
        ".local .align 8 .b8 depot[16]; mov.u64 %rd5, depot; mov.u64 %rd3, f; st.local.u64 [%rd5], %rd3;"
        " mov.u64 %rd4, g; st.local.u64 [%rd5+8], %rd4; ld.local.u64 %rd2, [%rd5+8];",
        ".local .align 8 .b8 depot[16]; mov.u64 %rd5, depot; cvta.local.u64 %rd6, %rd5; mov.u64 %rd3, f;"
        " st.u64 [%rd6], %rd3; mov.u64 %rd4, g; st.u64 [%rd6+8], %rd4; add.u64 %rd7, %rd6, 8; ld.u64 %rd2, [%rd7];",
    ],
    ids=["picked", "local array", "generic addresses"],
)
def test_functions_whose_addresses_stay_in_the_thread(body: str, tmp_path: Path) -> None:
    text = module(body + CALL.format("call"), TWO)
    for probes in (
        [Probe(tally(), "exit", "instructions")],
        [Probe(log("function_entry"), "function_entry")],
    ):
        injected = inject(parse(text), {"k": probes})
        assert not injected.refusals and not injected.variables
        assembled(injected.text, "sm_80", tmp_path)
    # In the copy, these are the addresses of the copies.
    assert injected.text.count("mov.u64 %rd3, f$gpubpf1;") == injected.text.count("f$gpubpf1, (p0, p1,") == 1


@pytest.mark.parametrize(
    "body",
    [
        "st.global.u64 [%rd1], %rd2;",
        "setp.eq.u64 %p1, %rd2, %rd1;",
        "add.s64 %rd4, %rd2, 8;",
        "{ .param .b64 q; st.param.b64 [q], %rd3; call (q), %rd5, (q, q); }",
        "{ .param .b64 q; st.param.b64 [q], %rd3; call keeps, (q); }",
        "{ .param .b64 q; st.param.b64 [q], %rd3; call gives, (q); }",
        "{ .param .b64 q; st.param.b64 [q], %rd3; call (q), returns, (q); }",
        "{ .param .b64 q; st.param.b64 [q], %rd3; call vprintf, (q); }",
        "{ .reg .b64 q; mov.b64 q, %rd3; call keeps, (q); }",
        ".local .b64 l; st.local.u64 [l], %rd3; ld.local.u64 %rd5, [l]; st.global.u64 [%rd1], %rd5;",
        ".local .b64 l; st.local.u64 [l], %rd3; mov.u64 %rd5, l; cvta.local.u64 %rd6, %rd5; ld.u64 %rd7, [%rd6];"
        " st.global.u64 [%rd1], %rd7;",
        ".local .b64 l; st.local.u64 [l], %rd3; ld.volatile.local.u64 %rd5, [l]; st.global.u64 [%rd1], %rd5;",
        ".local .b64 l; st.local.u64 [l], %rd3; mov.u64 %rd5, l; { .param .b64 q; st.param.b64 [q], %rd5; call f, (q, q); }",
        ".reg .v2 .b64 %v; mov.b64 %v.x, %rd3; mov.b64 %rd5, %v.r; st.global.u64 [%rd1], %rd5;",
        ".local .b64 l; st.local.v2.u64 [l], {%rd1, %rd3}; ld.local.v2.u64 {%rd5, %rd6}, [l]; st.global.u64 [%rd1], %rd6;",
    ],
    ids=[
        "stored",
        "compared",
        "computed",
        *(
            "passed to an unknown function",
            "passed and kept",
            "passed twice",
            "returned",
            "printed",
            "in a register",
        ),
        "through local memory",
        "generic",
        "volatile",
        "place passed",
        "element",
        "vector",
    ],
)
def test_functions_whose_addresses_leave_the_thread(body: str) -> None:
    """`keeps` stores its parameter, and `gives` passes it to `keeps`."""
    others = (
        ".func keeps(.param .b64 a) { .reg .b64 %r; ld.param.u64 %r, [a]; st.u64 [0], %r; ret; }\n"
        ".func gives(.param .b64 a) { .reg .b64 %r; ld.param.u64 %r, [a];"
        " { .param .b64 q; st.param.b64 [q], %r; call keeps, (q); } ret; }\n"
        ".func (.param .b64 o) returns(.param .b64 a) { .reg .b64 %r; ld.param.u64 %r, [a];"
        " st.param.b64 [o], %r; ret; }\n.extern .func vprintf(.param .b64 a);\n"
    )
    refusals = instrumented(module(PICKS + body + CALL.format("call"), TWO + others)).refusals
    assert refusals["k"] in (
        "indirect call; k passes on the address of f",
        "indirect call; k passes on the address of g",
    )


def test_addresses_may_be_passed(tmp_path: Path) -> None:
    """A function may call what it is given, or pass it on, also to itself."""
    registers = ".reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .pred %p<2>;"
    calls = CALL.format("call").replace("t:", "u:").replace(", t;", ", u;")
    others = (
        f".func apply(.param .b64 a, .param .b64 call) {{ {registers} ld.param.u64 %rd1, [a];"
        f" ld.param.u64 %rd2, [call]; {calls} ret; }}\n"
        f".func again(.param .b64 call, .param .b64 a) {{ {registers} ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [call];"
        " { .param .b64 param0; st.param.b64 [param0], %rd2; .param .b64 param1; st.param.b64 [param1], %rd1;"
        " call again, (param0, param1); call apply, (param1, param0); } ret; }\n"
    )
    body = """mov.u64 %rd3, f; { .param .b64 param0; st.param.b64 [param0], %rd3; .param .b64 param1; st.param.b64 [param1], %rd1;
        call again, (param0, param1); }"""
    injected = instrumented(module(body, TWO + others))
    assert not injected.refusals and not injected.variables
    # `apply` calls the copy of f, and not g, whose address nothing takes.
    assert [injected.text.count(f" {name}, (p0, p1)") for name in "fg"] == [1, 0]
    assembled(injected.text, "sm_80", tmp_path)
    stored = instrumented(module(body + "st.global.u64 [%rd1], %rd3;", TWO + others))
    assert stored.refusals == {"k": "indirect call; k passes on the address of f"}


def test_each_address_is_followed_by_itself() -> None:
    """f is in a table, so that it may go anywhere; only g must stay."""
    table = ".global .align 8 .u64 _ZZ1kvE1t[1] = {f};"
    assert not instrumented(
        module(PICKS.replace("selp", "st.u64 [%rd1], %rd3; selp") + CALL.format("call"), TWO + table)
    ).refusals
    inside = module("mov.u64 %rd3, f+8;" + CALL.format("call"), TWO + table)
    assert instrumented(inside).refusals == {"k": "an address inside of f"}


def test_an_address_in_a_constant_table_is_that_of_the_original(tmp_path: Path) -> None:
    """It may go anywhere: the copy has it from the table."""
    table = ".global .align 8 .u64 _ZZ1kvE1t[2] = {f, g};"
    body = "st.global.u64 [%rd1], %rd3; ld.global.u64 %rd5, [_ZZ1kvE1t];"
    injected = instrumented(module(PICKS + body + CALL.format("call"), TWO + table))
    # Its own address, and those of the functions
    assert not injected.refusals and {v.name for v in injected.variables} == {"_ZZ1kvE1t"}
    assert {(v.entry, v.fixed) for v in injected.variables} == {(None, True), (0, True), (8, True)}
    assert "mov.u64 %rd3, f;" not in injected.text and "mov.u64 %rd3, %gpubpf_0address" in injected.text
    assembled(injected.text, "sm_80", tmp_path)
    for changed in (
        "st.global.u64 [_ZZ1kvE1t], %rd5;",
        "mov.u64 %rd6, _ZZ1kvE1t; st.global.u64 [%rd1], %rd6;",
    ):
        injected = instrumented(module(PICKS + body + changed + CALL.format("call"), TWO + table))
        assert {(v.entry, v.fixed) for v in injected.variables} == {(None, True), (0, False), (8, False)}


@pytest.mark.parametrize(
    "variable",
    [
        ".global .u64 named = f;",
        ".const .u64 named[1] = {f};",
        ".global .u64 named[2] = {0, f};",
    ],
)
def test_entries_that_the_program_may_change(variable: str) -> None:
    """The agent reads them when it loads the copy with the module. Only kernels that need them depend on that."""
    body = "ld.global.u64 %rd2, [%rd1];" + CALL.format("call")
    other = ".visible .entry other(.param .u64 a) { .reg .b64 %rd<2>; mov.u64 %rd1, named; ret; }"
    injected = instrumented(module(body, F.format("f") + variable) + other)
    assert not injected.refusals
    assert [(v.entry, v.fixed, v.kernels) for v in injected.variables if v.entry is not None] == [
        (8 * ("named[2]" in variable), False, ("k",))
    ]
