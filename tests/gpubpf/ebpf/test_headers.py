"""Headers that hold parts of programs: bcc sees them as if they stood in the text, and lines are still those of the text."""

import runpy

import pytest

from gpubpf.ebpf import headers
from gpubpf.ebpf.compile import compile_text, to_json
from gpubpf.errors import CompileError
from gpubpf.lower.programs import prebuilt_key
from gpubpf.verify import verify
from gpubpf_bcc import compiled
from gpubpf_host import needs_bpf

SUMS = """#ifndef GPUBPF_SUMS_H
#define GPUBPF_SUMS_H
GPU_ARRAY(sums, u64, 4);

static inline void add(int key, u64 more) {
    u64 *sum = sums.lookup(&key);
    if (sum)
        *sum += more;
}
#endif
"""
TEXT = """#include <gpubpf.h>
# include <gpubpf_sums.h> /* once */
#include <gpubpf_sums.h>
/*
#include <gpubpf_nothing.h>
*/
int on_exit(struct gpu_exit *ctx) {
    add(3, ctx->work);
    return gpu_warp();
}
"""


@pytest.fixture
def sums(monkeypatch, tmp_path):
    """A directory with the library's headers, and one more."""
    for header in headers.INCLUDE.glob("*.h"):
        (tmp_path / header.name).write_text(header.read_text())
    (tmp_path / "gpubpf_sums.h").write_text(SUMS)
    monkeypatch.setattr(headers, "INCLUDE", tmp_path)
    return tmp_path / "gpubpf_sums.h"


def test_a_header_stands_in_place_of_its_line(sums):
    made = headers.expand(TEXT)
    lines = made.text.split("\n")
    assert made.text == TEXT.replace("# include <gpubpf_sums.h> /* once */", SUMS).replace(
        "#include <gpubpf_sums.h>", SUMS
    )
    assert made.origin(lines.index("GPU_ARRAY(sums, u64, 4);") + 1) == ("gpubpf_sums.h", 3)
    assert made.origin(lines.index("    add(3, ctx->work);") + 1) == ("", 8)
    assert made.origin(len(lines) + 9) == ("", len(lines) + 9)


def test_headers_include_headers(sums):
    (sums.parent / "gpubpf_outer.h").write_text("int outer;\n#include <gpubpf_sums.h>\n")
    made = headers.expand("#include <gpubpf_outer.h>")
    assert made.text == f"int outer;\n{SUMS}\n"
    assert made.origins[:2] == (("gpubpf_outer.h", 1), ("gpubpf_sums.h", 1))


def test_a_header_is_part_of_what_a_program_is_made_from(sums):
    before = prebuilt_key(TEXT)
    sums.write_text(SUMS + "\n")
    assert prebuilt_key(TEXT) != before


def test_maps_of_a_header(sums):
    """And what it does is told with the line of the text that called it."""
    made = compiled(TEXT)
    assert made.maps["sums"].max_entries == 4
    code = made.functions["on_exit"].instructions
    assert {i.line for i in code if i.opcode == 0x85 and i.imm == 1} == {8}
    assert {i.line for i in code if i.opcode == 0x85 and i.imm == 603} == {9}


def test_errors_in_headers_name_them(sums):
    compiled(TEXT)
    sums.write_text(SUMS.replace("+= more", "+= most"))
    with pytest.raises(CompileError, match=r"^gpubpf_sums\.h line 8: use of undeclared identifier 'most'"):
        compile_text(TEXT)
    sums.write_text(SUMS)
    with pytest.raises(CompileError, match=r"^C line 9: "):
        compile_text(TEXT.replace("gpu_warp()", "weft"))


def test_the_example_in_the_header_is_a_program():
    text = (headers.INCLUDE / "gpubpf_traffic.h").read_text()
    example = "\n".join(line[7:] for line in text.split("\n") if line.startswith(" *     "))
    made = compiled("#include <gpubpf_traffic.h>\n" + example)
    assert made.maps["global_cells"].value_dtype.names[0] == "requests"
    verify(made, made.functions["on_access"])


@needs_bpf
@pytest.mark.every(2)
@pytest.mark.parametrize("tool", ["hipsnoop", "memtrace"])
def test_the_self_contained_text_is_the_same_program(tool, repository):
    """Lines apart, which are others where headers are in the text."""
    text = runpy.run_path(str(repository / f"tools/{tool}.py"))["PROGRAM"]
    whole = headers.self_contained(text)
    assert "#include <gpubpf" not in whole and whole.count("struct gpu_entry {") == 1
    made, expected = to_json(compile_text(whole)), to_json(compile_text(text))
    for found in (made, expected):
        for function in found["functions"].values():
            del function["lines"]
    assert made == expected
