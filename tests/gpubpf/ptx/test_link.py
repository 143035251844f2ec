"""Several PTX texts joined into one: what is local stays apart, what is declared finds its definition, errors say who."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpubpf.errors import PtxError
from gpubpf.ptx.link import Input, LinkError, link
from gpubpf.ptx.parser import parse
from gpubpf.ptx.source import source_files, source_lines

HEAD = ".version {}\n.target {}\n.address_size 64\n"
# kernel(p): p[t] = twice(t) + 1, with a local function and a local table whose names the other text uses as well.
FIRST = (
    HEAD.format("7.0", "sm_70")
    + """
.extern .func (.param .b32 r) twice(.param .b32 a);
.extern .global .align 4 .u32 shared_table[2];
.extern .shared .align 8 .b8 dynamic[];
.global .align 4 .u32 table[2] = {1, 2};
.func (.param .b32 r) own(.param .b32 a)
{ .reg .b32 %r<3>; ld.param.b32 %r1, [a]; ld.global.u32 %r2, [table]; add.u32 %r1, %r1, %r2; st.param.b32 [r], %r1; ret; }
.visible .entry kernel(.param .u64 p)
{
 .reg .b64 %rd<4>; .reg .b32 %r<5>;
 ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x;
 { .param .b32 a0; .param .b32 r0; st.param.b32 [a0], %r1; call (r0), twice, (a0); ld.param.b32 %r2, [r0]; }
 { .param .b32 a0; .param .b32 r0; st.param.b32 [a0], %r2; call (r0), own, (a0); ld.param.b32 %r2, [r0]; }
 ld.global.u32 %r3, [shared_table+4]; add.u32 %r2, %r2, %r3;
 mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2; st.global.u32 [%rd1], %r2;
 ret;
}
"""
)
SECOND = (
    HEAD.format("7.8", "sm_75")
    + """
.visible .global .align 4 .u32 shared_table[2] = {10, 100};
.extern .shared .align 16 .b8 dynamic[];
.global .align 4 .u32 table[2] = {0, 0};
.func (.param .b32 r) own(.param .b32 a)
{ .reg .b32 %r<3>; ld.param.b32 %r1, [a]; add.u32 %r1, %r1, %r1; st.param.b32 [r], %r1; ret; }
.visible .func (.param .b32 r) twice(.param .b32 a)
{
 .reg .b32 %r<3>; ld.param.b32 %r1, [a];
 { .param .b32 a0; .param .b32 r0; st.param.b32 [a0], %r1; call (r0), own, (a0); ld.param.b32 %r2, [r0]; }
 st.param.b32 [r], %r2; ret;
}
"""
)
WEAK = HEAD.format("7.0", "sm_70") + ".weak .func f()\n{ .reg .b32 %r<2>; mov.u32 %r1, NUMBER; ret; }\n"


def test_two_texts_become_one(tmp_path: Path) -> None:
    text = link([Input("first", FIRST), Input("second", SECOND)])
    module = parse(text)
    assert (module.version, module.sm) == ((7, 8), "sm_75")
    assert list(module.entries) == ["kernel"]
    own = [name for name in module.functions if name.startswith("own")]
    tables = [name for name in module.variables if name.startswith("table")]
    assert len(own) == len(tables) == 2 and all(module.functions[name].defined for name in own)
    assert "extern" not in module.functions["twice"].linkage and module.functions["twice"].defined
    assert len(re.findall(r"\bshared_table\[2\]", text)) == 1 and len(re.findall(r"\bdynamic\[", text)) == 1
    assembled(text, tmp_path)


def assembled(text: str, tmp_path: Path, *options: str) -> None:
    if (ptxas := shutil.which("ptxas")) is not None:
        (tmp_path / "linked.ptx").write_text(text)
        options = options or ("-arch=sm_75",)
        subprocess.run([ptxas, *options, tmp_path / "linked.ptx", "-o", tmp_path / "out"], check=True)


def linked(*texts: str, complete: bool = True) -> str:
    head = HEAD.format("7.8", "sm_75")
    return link([Input(str(k), head + text) for k, text in enumerate(texts)], complete)


def test_one_text_is_left_alone() -> None:
    assert link([Input("second", SECOND)]) == SECOND


def test_undefined_and_twice_defined() -> None:
    with pytest.raises(LinkError, match=r"Undefined reference to 'twice' in 'first'"):
        link([Input("first", FIRST)])
    assert link([Input("first", FIRST)], complete=False) == FIRST
    with pytest.raises(LinkError, match=r"Multiple definition of '\w+' in 'b', first defined in 'a'"):
        link([Input("a", SECOND), Input("b", SECOND)])


def test_weak_definitions_give_way() -> None:
    one, two = WEAK.replace("NUMBER", "1"), WEAK.replace("NUMBER", "2")
    strong = two.replace(".weak", ".visible").replace("2;", "3;")
    assert "%r1, 1;" in link([Input("a", one), Input("b", two)])
    for order in ([one, strong], [strong, one]):
        text = link([Input(str(k), text) for k, text in enumerate(order)])
        assert "%r1, 3;" in text and "%r1, 1;" not in text


def test_weak_definitions_that_other_code_overrides_are_declarations(tmp_path: Path) -> None:
    caller = ".visible .entry kernel() { call NAME; ret; }\n"
    weak = ".weak .func NAME() { ret; }\n" + caller
    one = "".join(weak.replace("NAME", name).replace("kernel", f"k_{name}") for name in ("f", "g"))
    for texts in ([one], [one, ".weak .func f() { ret; }\n"]):
        text = link(
            [Input(str(k), HEAD.format("7.8", "sm_75") + t) for k, t in enumerate(texts)], False, {"f"}
        )
        functions = parse(text).functions
        assert (functions["f"].defined, functions["f"].linkage) == (False, ("extern",))
        assert functions["g"].defined and list(parse(text).entries) == ["k_f", "k_g"]
        assembled(text, tmp_path, "-c", "-arch=sm_75")


def test_what_cannot_be_read_is_named_by_its_line() -> None:
    with pytest.raises(PtxError, match=r"PTX line 10"):
        link(
            [Input("bad", FIRST.replace("own(.param .b32 a)\n{", "own(.param .b32 a)\n{ st [", 1))],
            complete=False,
        )
    with pytest.raises(PtxError, match=r"no \.version"):
        link([Input("empty", "")])


LINES = HEAD.format("7.0", "sm_70") + (
    """
.visible .entry NAME(.param .u64 p)
{
 .reg .b64 %rd<3>;
 .loc 1 10 4
 ld.param.u64 %rd1, [p];
 .loc 2 5 1, function_name $L__info_string0, inlined_at 1 10 4
 st.global.u64 [%rd1], %rd1;
 ret;
}
.file 1 "NAME.cu"
.file 2 "header.h"
.section .debug_str
{
$L__info_string0:
.b8 95,90,0
}
.section .debug_info
{
.b32 5
}
"""
)


def test_lines_name_their_own_files(tmp_path: Path) -> None:
    inputs = [Input(name, LINES.replace("NAME", name)) for name in ("a", "b", "c")]
    text = link(inputs)
    module = parse(text)
    files = source_files(module)
    for name, kernel in module.entries.items():
        assert kernel.body is not None
        lines = source_lines(kernel.body, files)
        assert [(files[file], line) for file, line in (lines[2], lines[-1])] == [
            (f"{name}.cu", 10),
            ("header.h", 5),
        ]
        (calls,) = re.findall(r"inlined_at (\d+) 10", str(kernel))
        assert files[int(calls)] == f"{name}.cu"
    assert ".debug_info" not in text
    assembled(text, tmp_path)


def test_without_its_sections_a_text_is_not_for_a_debugger(tmp_path: Path) -> None:
    inputs = [Input(name, LINES.replace("NAME", name).replace("sm_70", "sm_70, debug")) for name in "ab"]
    assert "debug" in inputs[0].text.partition(".visible")[0]
    text = link(inputs)
    assert "debug" not in text.partition(".visible")[0]
    assembled(text, tmp_path)


def test_common_variables_and_dynamic_shared_memory() -> None:
    common = [
        HEAD.format("7.0", "sm_70") + f".common .global .align 4 .b8 buffer[{n}];\n" for n in (4, 16, 8)
    ]
    assert re.findall(r"buffer\[\d+\]", link([Input(str(k), t) for k, t in enumerate(common)])) == [
        "buffer[16]"
    ]
    strong = common[0].replace(".common", ".visible")
    assert re.findall(r"\.(\w+) .*buffer\[(\d+)\]", link([Input("a", common[1]), Input("b", strong)])) == [
        ("visible", "4")
    ]
    shared = [
        HEAD.format("7.0", "sm_70")
        + f".extern .shared .align {n} .b8 dynamic[];\n.weak .func f() {{ ret; }}\n"
        for n in (4, 16, 8)
    ]
    (line,) = re.findall(r".*dynamic\[.*", link([Input(str(k), t) for k, t in enumerate(shared)]))
    assert ".align 16" in line


DATA = '.visible .global .align 4 .u32 data = 5;\n.file 1 "data.cu"\n'


@pytest.mark.parametrize("order", [1, -1])
def test_a_text_with_a_file_and_no_lines(order: int, tmp_path: Path) -> None:
    text = linked(*[LINES.removeprefix(HEAD.format("7.0", "sm_70")).replace("NAME", "a"), DATA][::order])
    module = parse(text)
    files = source_files(module)
    assert sorted(files.values()) == ["a.cu", "data.cu", "header.h"]
    body = module.entries["a"].body
    assert body is not None
    lines = source_lines(body, files)
    assert [(files[file], line) for file, line in (lines[2], lines[-1])] == [("a.cu", 10), ("header.h", 5)]
    assembled(text, tmp_path)


def test_names_in_strings_are_kept(tmp_path: Path) -> None:
    text = '.func table() { ret; }\n.visible .entry NAME() { .loc 1 3 0\n call table; ret; }\n.file 1 "/src/table.cu"\n'
    made = linked(text.replace("NAME", "a"), text.replace("NAME", "b"))
    assert set(source_files(parse(made)).values()) == {"/src/table.cu"}
    assembled(made, tmp_path)


X = ".visible .global .align 4 .u32 x = 5;\n"
POINTER = ".extern .global .align 4 .u32 x;\n.visible .global .align 8 .u64 p = generic(x);\n"
KERNEL = ".visible .entry k(.param .u64 q)\n.maxntid 32, 1, 1\n{ ret; }\n"


@pytest.mark.parametrize(
    "texts",
    [
        (POINTER, X),
        (POINTER, X.replace("visible", "weak"), X),
        (X.replace("visible", "weak") + POINTER.partition("\n")[2], X),
        (POINTER, ".common .global .align 4 .u32 x;\n"),
        (POINTER.replace("global .align 4", "const .align 4"), X.replace("global", "const")),
        (POINTER.replace("x;", "x[];").replace("(x)", "(x)+4"), X.replace("x = 5", "x[2] = {1, 2}")),
        (POINTER, ".extern .global .align 8 .u64 p;\n.visible .global .align 8 .u64 x = generic(p);\n"),
        (POINTER, KERNEL),
        (".extern .entry k(.param .u64 q);\n.visible .global .align 8 .u64 p = k;\n", KERNEL),
    ],
)
def test_addresses_in_initializers(texts: tuple[str, ...], tmp_path: Path) -> None:
    text = linked(*texts, complete=False)
    assert "p = " in text
    assembled(text, tmp_path, "-arch=sm_75", "-c")


def test_a_kernel_that_is_declared_before_its_use(tmp_path: Path) -> None:
    launching = ".visible .entry k(.param .u64 q);\n.visible .entry first() { .reg .b64 %rd<2>; mov.u64 %rd1, k; ret; }\n"
    assembled(linked(launching + KERNEL, X), tmp_path)
    assembled(linked(launching.replace(".visible", ".extern", 1), KERNEL), tmp_path)


ALIAS = ".LINKAGE .func two();\n.func one() { ret; }\n.alias two, one;\n"
CALL = ".extern .func two();\n.visible .entry NAME() { call two; ret; }\n"


def test_aliases_are_definitions(tmp_path: Path) -> None:
    strong, weak = ALIAS.replace("LINKAGE", "visible"), ALIAS.replace("LINKAGE", "weak")
    local = ALIAS.replace(".LINKAGE ", "") + CALL.partition("\n")[2]
    whole = strong + CALL.partition("\n")[2]
    assert linked(whole) == HEAD.format("7.8", "sm_75") + whole
    function = ".visible .func two() { trap; }\n"
    for texts in (
        (CALL, strong),
        (strong, CALL),
        (CALL, weak, weak),
        (weak, strong, CALL),
        (CALL, weak, function),
        (function, weak, CALL),
        (local.replace("NAME", "k1"), local.replace("NAME", "k2")),
    ):
        text = linked(*texts)
        assert text.count("trap;") == texts.count(function)
        defined = [*parse(text).aliases, *re.findall(r"func (two\S*)\(\)\n\{", text)]
        assert len(defined) == len(set(defined)) == len(parse(text).entries)
        assembled(text, tmp_path)
    with pytest.raises(LinkError, match="Multiple definition of 'two'"):
        linked(strong, function)


@pytest.mark.parametrize(
    "targets", [("sm_90", "sm_90a"), ("sm_100f", "sm_100", "sm_100a"), ("sm_90", "sm_100f")]
)
def test_the_target_has_the_instructions_of_all_texts(targets: tuple[str, ...], tmp_path: Path) -> None:
    special = ".visible .entry k() { setmaxnreg.inc.sync.aligned.u32 96; ret; }\n"
    texts = [
        HEAD.format("8.8", target) + (special if target == targets[-1] else DATA.replace("data", target))
        for target in targets
    ]
    for order in (1, -1):
        text = link([Input("", text) for text in texts[::order]])
        assert parse(text).sm == targets[-1]
        assembled(text, tmp_path, f"-arch={targets[-1]}")
