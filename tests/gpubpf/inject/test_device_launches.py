"""Kernels that launch kernels: what their copies launch, and what is refused. tests/cudasim/test_rdc.py runs them."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

from gpubpf.ebpf.probe import Probe
from gpubpf.images.assemble import Target, assemble, find_ptxas
from gpubpf.inject.device_launches import launched_name
from gpubpf.inject.inject import inject
from gpubpf.inject.injected import Injected
from gpubpf.ptx.parser import parse
from gpubpf.ptx.symbols import GRIDS
from gpubpf_fragments import log, tally

needs_ptxas = pytest.mark.skipif(find_ptxas() is None, reason="needs ptxas")

HEAD = """.version 9.0
.target sm_75
.address_size 64
.extern .func (.param .b64 r) cudaGetParameterBufferV2(.param .b64 f, .param .align 4 .b8 g[12], .param .align 4 .b8 b[12],
  .param .b32 s);
.extern .func (.param .b32 r) cudaLaunchDeviceV2(.param .b64 p, .param .b64 s);
.global .u32 total;
"""
LAUNCH = """{{ .param .b64 param0; st.param.b64 [param0], {address};
    .param .align 4 .b8 param1[12]; .param .align 4 .b8 param2[12]; .param .b32 param3; .param .b64 retval0;
    call.uni (retval0), cudaGetParameterBufferV2, (param0, param1, param2, param3); ld.param.b64 %rd2, [retval0]; }}
    {{ .param .b64 param0; st.param.b64 [param0], %rd2; .param .b64 param1; st.param.b64 [param1], 0;
    .param .b32 retval0; call.uni (retval0), cudaLaunchDeviceV2, (param0, param1); ld.param.b32 %r1, [retval0]; }}
"""
REGISTERS = ".reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .pred %p<3>;"
CHILD = f".visible .entry child(.param .u64 a) {{ {REGISTERS} red.global.add.u32 [total], 1; ret; }}\n"


def parent(body: str, name: str = "parent") -> str:
    return f".visible .entry {name}(.param .u64 a) {{ {REGISTERS} ld.param.u64 %rd1, [a];\n{body}\nret; }}\n"


TAKES = "mov.u64 %rd3, child;" + LAUNCH.format(address="%rd3")


def instrumented(text: str, *kernels: str) -> Injected:
    found = parse(HEAD + text)
    probes = [Probe(log("access", "access"), "access"), Probe(tally(), "exit", "instructions")]
    return inject(found, dict.fromkeys(kernels or found.entries, probes))


@needs_ptxas
@pytest.mark.parametrize("cc", [(7, 5), (9, 0)])
def test_a_launched_kernel_is_a_copy_without_probes(cc: tuple[int, int]) -> None:
    again = parent(TAKES + TAKES.replace("child", "again"), "again")
    made = instrumented(CHILD + again + parent(TAKES.replace("child", "again")), "parent")
    assert not made.refusals and made.launched == ("again", "child")
    assert list(made.kernels) == ["parent"]
    for name in made.launched:
        assert len(made.module.functions[launched_name(name)].parameters) == 1
        code = made.text.split(f".entry {launched_name(name)}(")[-1].split("\n}\n")[0]
        assert "gpubpf_launch," not in code and "[gpubpf_launch+" not in code
    # `parent` launches once, `again` twice. The variable that `child` uses is that of the application.
    assert made.text.count("red.global.add.u64 [%gpubpf_0address") == 1 + 2
    users = {variable.name: variable.kernels for variable in made.variables}
    assert users == {GRIDS: ("parent",), "total": ("parent",)}
    cubin = assemble(made.text, Target("gpu", cc))
    assert {"parent", launched_name("again"), launched_name("child")} <= set(cubin.functions)


def test_launched_copies_keep_the_registers_of_the_originals() -> None:
    made = instrumented(CHILD + parent(TAKES)).within({launched_name("child"): 12})
    assert f".entry {launched_name('child')}(.param .u64 a)\n.maxnreg 12\n{{" in made.text


OTHERS = (
    ".extern .entry declared(.param .u64 a);\n"
    ".func other(.param .b64 a) { .reg .b64 %rd<3>; ld.param.u64 %rd1, [a]; st.u64 [%rd1], %rd1; ret; }\n"
    ".func (.param .b64 r) given() { .reg .b64 %rd<3>; mov.u64 %rd1, child; st.param.b64 [r], %rd1; ret; }\n"
    ".func (.reg .b64 r) unknown() { ret; }\n.extern .func elsewhere();\n.global .u64 held = child;\n"
    f".visible .entry bad(.param .u64 a) {{ {REGISTERS} ld.param.u64 %rd1, [a];"
    " { t: .callprototype _ (); call %rd1, (), t; } ret; }\n"
    ".visible .entry missing(.param .u64 a) { call elsewhere, (); ret; }\n"
)
PASSED_ON = "launches child; its address is passed on"
POINTERS = "launches kernels through pointers"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("mov.u64 %rd3, child; st.global.u64 [%rd1], %rd3;", PASSED_ON),
        (TAKES + "add.s64 %rd4, %rd3, 8; st.global.u64 [%rd1], %rd4;", PASSED_ON),
        ("mov.u64 %rd3, child; { .param .b64 q; st.param.b64 [q], %rd3; call other, (q); }", PASSED_ON),
        ("mov.u64 %rd3, child; { .param .b64 q; st.param.b64 [q], %rd3; { call other, (q); } }", PASSED_ON),
        (
            "mov.u64 %rd3, child; { .param .b64 q; st.param.b64 [q], %rd3; ld.param.b64 %rd4, [q]; }",
            PASSED_ON,
        ),
        (".reg .v2 .b64 %v; mov.b64 %v.x, child; st.global.v2.b64 [%rd1], %v;", PASSED_ON),
        ("{ .param .b64 q; call (q), given, (); ld.param.b64 %rd4, [q]; }", PASSED_ON),
        ("ld.global.u64 %rd4, [held];" + LAUNCH.format(address="%rd4"), POINTERS),
        (LAUNCH.format(address="%rd1"), POINTERS),
        ("mov.u64 %rd3, child; selp.b64 %rd4, %rd3, %rd1, %p1;" + LAUNCH.format(address="%rd4"), POINTERS),
        (TAKES + "ld.global.u64 %rd3, [held];", POINTERS),
        (TAKES + "{ .reg .b64 q; call (%rd3), unknown, (); }", PASSED_ON),
        (TAKES.replace("child", "bad"), "launches bad; indirect call; no table has a function for it"),
        (TAKES.replace("child", "missing"), "launches missing; needs device linking: elsewhere"),
        (TAKES.replace("child", "declared"), "launches declared; needs device linking: declared"),
    ],
    ids=[
        *("stored", "computed with", "passed to a function", "passed in a scope", "read back", "in a vector"),
        *("a result", "in a variable", "a parameter", "perhaps another", "not only one", "perhaps a result"),
        *("calls by pointers", "calls another part", "of another part"),
    ],
)
def test_launches_that_are_refused(body: str, reason: str) -> None:
    made = instrumented(OTHERS + CHILD + parent(body), "parent")
    assert made.refusals == {"parent": reason}


@needs_ptxas
def test_launches_through_functions() -> None:
    """nvcc -G wraps the functions of the device runtime."""
    wrapper = (
        ".func (.param .b64 r) buffer(.param .b64 f, .param .align 4 .b8 g[12], .param .align 4 .b8 b[12], .param .b32 s)"
        f" {{ {REGISTERS} ld.param.u64 %rd3, [f]; {LAUNCH.format(address='%rd3').split('}')[0]} }}"
        " st.param.b64 [r], %rd2; ret; }\n"
    )
    body = TAKES.replace("cudaGetParameterBufferV2", "buffer")
    made = instrumented(wrapper + CHILD + parent(body), "parent")
    assert not made.refusals and made.launched == ("child",)
    assert launched_name("child") in assemble(made.text, Target("gpu", (8, 0))).functions
    other = parent(body.replace("mov.u64 %rd3, child;", "mov.u64 %rd3, %rd1;"))
    assert instrumented(wrapper + CHILD + other, "parent").refusals == {"parent": POINTERS}
    alias = wrapper + ".alias another, buffer;\n" + CHILD
    aliased = body.replace(" buffer,", " another,")
    declared = wrapper.split("{")[0].replace("buffer", "another").rstrip() + ";\n"
    assert not instrumented(declared + alias + parent(aliased), "parent").refusals
    other = parent(aliased.replace("mov.u64 %rd3, child;", "mov.u64 %rd3, %rd1;"))
    assert instrumented(declared + alias + other, "parent").refusals == {"parent": POINTERS}


def test_launches_by_functions_that_are_called_by_pointers() -> None:
    wrapper = f".func starts(.param .b64 f) {{ {REGISTERS} ld.param.u64 %rd3, [f]; {LAUNCH.format(address='%rd3')} ret; }}\n"
    table = ".global .u64 table[1] = {starts}; .global .u64 held = child;\n"
    call = (
        "ld.global.u64 %rd4, [table]; ld.global.u64 %rd5, [held]; { .param .b64 p0; st.param.b64 [p0], %rd5;"
        " t: .callprototype ()_ (.param .b64 _); call %rd4, (p0), t; }"
    )
    made = instrumented(wrapper + CHILD + table + parent(call), "parent")
    assert made.refusals == {"parent": POINTERS}


@needs_ptxas
@pytest.mark.parametrize("directive", ["", ".maxntid 128, 1, 1", ".minnctapersm 2 .maxntid 64, 1, 1"])
def test_ptxas_accepts_limits_of_launched_copies(directive: str) -> None:
    """A kernel is launched before its definition, so the copy declares it."""
    child = CHILD.replace(") {", f") {directive} {{")
    made = instrumented(parent(TAKES) + child, "parent").within({launched_name("child"): 24})
    found = assemble(made.text, Target("gpu", (8, 0)))
    assert found.functions[launched_name("child")].registers <= 24
    assert made.text.count(".maxnreg 24") == ("minncta" not in directive)


@needs_ptxas
def test_calls_do_not_reach_kernels() -> None:
    tables = ".global .u64 kernels[1] = {child}; .global .u64 mixed[2] = {f, child};\n"
    call = (
        "ld.global.u64 %rd2, [mixed]; { .param .b64 p0; st.param.b64 [p0], %rd1;"
        " t: .callprototype ()_ (.param .b64 _); call %rd2, (p0), t; }"
    )
    made = instrumented(".func f(.param .b64 a) { ret; }\n" + CHILD + tables + parent(call))
    assert not made.refusals and not made.launched
    assert [(v.name, v.entry) for v in made.variables if v.entry is not None] == [("mixed", 0)]
    assemble(made.text, Target("gpu", (8, 0)))


def test_addresses_may_be_chosen() -> None:
    chosen = "mov.u64 %rd3, child; mov.u64 %rd4, parent; selp.b64 %rd5, %rd3, %rd4, %p1;"
    made = instrumented(CHILD + parent(chosen + LAUNCH.format(address="%rd5")))
    assert not made.refusals and made.launched == ("child", "parent")


@needs_ptxas
def test_a_function_that_the_device_runtime_lacks_is_said() -> None:
    from gpubpf.errors import AssembleError

    unknown = ".extern .func cudaSomethingElse();\n"
    text = instrumented(unknown + CHILD + parent(TAKES + "call cudaSomethingElse, ();"), "parent").text
    with pytest.raises(AssembleError, match=r"^needs device linking: cudaSomethingElse$"):
        assemble(text, Target("gpu", (8, 0)))


@needs_ptxas
def test_a_missing_device_runtime_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gpubpf.errors import AssembleError

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(glob, "glob", lambda pattern: [])
    text = instrumented(CHILD + parent(TAKES)).text
    with pytest.raises(AssembleError, match=r"needs device linking, and libcudadevrt\.a is missing"):
        assemble(text, Target("gpu", (8, 0)))
