"""clang alone makes of a C text what bcc makes of it, for any user."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from gpubpf.ebpf import clang, compile
from gpubpf.ebpf.bytecode import WIDE, Program
from gpubpf.errors import CompileError
from gpubpf.expressions import points, programs, specs
from gpubpf.kernel import privileges
from gpubpf.lower import nvptx
from gpubpf.record import replace
from gpubpf.verify import rules
from gpubpf_host import needs_bpf

pytestmark = pytest.mark.skipif(clang.find() is None, reason="needs clang")
TOOLS = Path(__file__).resolve().parents[3] / "tools"

TEXT = """#include <gpubpf.h>

struct cell { u8 small; s32 pair[2]; struct { u16 inner; char name[5]; } part; u64 last; };
GPU_SITE_ARRAY(cells, struct cell);
GPU_HASH(sums, struct gpu_range, u32, 100);
GPU_ARRAY(numbers, s64, 7);
GPU_PARAM(filter, struct gpu_filter);
GPU_RINGBUF(records, u64, 4);
static inline int add(u64 to) {
    struct gpu_range key = {to, 1};
    sums.increment(key, 2);
    /* records.ringbuf_output(0) stays */
    return records.ringbuf_output(&to, sizeof(to), 0);
}
int on_exit(struct gpu_exit *ctx) {
    int site = ctx->site, zero = 0;
    struct cell *cell = cells.lookup(&site);
    struct gpu_filter *chosen = filter.lookup(&zero);
    s64 *number = numbers.lookup(&zero);
    if (cell && chosen && number && gpu_selected(chosen))
        __sync_fetch_and_add(&cell->last, *number);
    return add(ctx->work);
}
"""


def program_of(tool: str) -> str:
    if str(TOOLS) not in sys.path:
        sys.path.insert(0, str(TOOLS))
    return importlib.import_module(tool).PROGRAM


def texts() -> dict[str, str]:
    """A text of each tool that has none prebuilt, and one with types of every sort."""
    places = (
        "load:* (address / 4 % 2 && lane > 3)",
        "barrier:*:leave (waited > 3)",
        "exit:*:loads (work > 2)",
    )
    values = ("load:*:s32:lane, source", "barrier:*:u8:block, kernel")
    events = ('load:* "%u %u", lane, address', 'exit:* "%lu", clock')
    spread = [specs.distribution(text) for text in values]
    return {
        "types": TEXT,
        "gpucount": programs.counting(program_of("gpucount"), [specs.count(text) for text in places], True),
        "gpudist -H": programs.distributing(program_of("gpudist"), spread, 64, False),
        "gpudist -L": programs.distributing(
            program_of("gpudist"), [replace(one, kind="linear", width=9) for one in spread], 64, True
        ),
        "gputrace": programs.tracing(
            program_of("gputrace"), [specs.trace(text) for text in events], 4, False
        ),
    }


def by_clang(text: str) -> Program:
    return compile._compile_with_clang(text)


def lines(program: Program) -> dict[str, set[int]]:
    return {name: {i.line for i in function.instructions} for name, function in program.functions.items()}


@pytest.mark.every(2)
@needs_bpf
@pytest.mark.parametrize("name", texts())
def test_maps_points_and_lines_are_those_of_bcc(name: str) -> None:
    if not compile.usable():
        pytest.skip("needs bcc")
    text = texts()[name]
    theirs, ours = compile.compile_text(text), by_clang(text)
    assert ours.maps == theirs.maps
    assert {n: f.point for n, f in ours.functions.items()} == {
        n: f.point for n, f in theirs.functions.items()
    }
    for function, found in lines(theirs).items():
        assert len(found ^ lines(ours)[function]) <= 6  # another version of clang
    for function in ours.functions.values():
        nvptx.lower(ours, rules.check(ours, function))


def test_every_name_of_every_point_passes_our_verifier() -> None:
    """On both kinds of GPU, without any capability."""
    wanted = []
    for point in points.POINTS.values():
        attached = {(one.context, one.lacks): detail for detail, one in point.details.items()}
        for detail in attached.values() if not point.of_launch else ():
            known = point.names(point.attachment(detail))
            every = " + ".join(
                f"popcount(log2({name}) / 3)" for name in (*known.fields, *known.builtins)[::3]
            )
            wanted.append(specs.count(f"{point.name}:*{':' + detail if detail else ''} ({every} > 9)"))
    assert len(wanted) > 12
    text = programs.counting(program_of("gpucount"), wanted, True)
    for variant in (text, WIDE + text):
        program = by_clang(variant)
        assert len(program.functions) == len(wanted)
        for function in program.functions.values():
            rules.check(program, function)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "int site = ctx->site",
            "int site = ctx->sight",
            "C line 16: no member named 'sight' in 'struct gpu_exit'",
        ),
        ("return add(ctx->work)", "return other(ctx->work)", "refers to a function that is not inlined"),
        ("static inline int add", "static int seen;\nint unseen(void);\nstatic inline int add", None),
        ("s64 *number", "static const u64 table[] = {1, 5, 9};\n    s64 *number", None),
        ("return add(ctx->work)", "static u64 kept; return add(kept++)", "or to a variable"),
        ("int on_exit", "static int on_exit", "program on_exit is static or inline"),
    ],
)
def test_errors_are_one_line(old: str, new: str, message: str | None) -> None:
    if message is None:
        by_clang(TEXT.replace(old, new))
        return
    with pytest.raises(CompileError) as found:
        by_clang(TEXT.replace(old, new))
    assert message in str(found.value) and "\n" not in str(found.value)


def test_bcc_without_kernel_headers_leaves_it_to_clang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Debian's bcc does not bring the headers; without them, root could do less than an ordinary user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile, "found_bcc", lambda: True)
    monkeypatch.setattr(compile, "has_kernel_headers", lambda: False)
    if clang.find() is None:
        pytest.skip("needs clang")
    asked = compile.program_key(TEXT, any_user=True)
    assert "on_exit" in compile.compile_text(TEXT + "/* without headers */", any_user=True).functions
    monkeypatch.setattr(compile, "has_kernel_headers", lambda: True)
    assert compile.program_key(TEXT, any_user=True) != asked


def test_without_bcc_the_error_names_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bcc", None)
    monkeypatch.setattr(sys, "prefix", "/somewhere/venv")
    with pytest.raises(
        CompileError, match=r"python3-bpfcc and make .* --system-site-packages, or .*any_user=True"
    ):
        compile._import_bcc()
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with pytest.raises(CompileError, match=r"python3-bpfcc, or compile with clang: BPF\(text"):
        compile._import_bcc()


def test_it_is_only_used_where_it_is_asked_for(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(privileges, "capable", lambda: False)
    with pytest.raises(CompileError, match=r"compiling one needs CAP_BPF|bcc's Python module is missing"):
        compile.compile_text(TEXT + "/* refused */")
    assert "on_exit" in compile.compile_text(TEXT + "/* taken */", any_user=True).functions
    monkeypatch.setattr(clang, "find", lambda: None)
    with pytest.raises(CompileError, match=r"requires root and bcc .*, or clang"):
        compile.compile_text(TEXT + "/* no compiler */", any_user=True)
    keys = {compile.program_key(TEXT), compile.program_key(TEXT, any_user=True)}
    monkeypatch.setattr(privileges, "capable", lambda: True)
    monkeypatch.setattr(compile, "usable", lambda: False)
    assert len(keys | {compile.program_key(TEXT, any_user=True)}) == 3  # each verdict has a cache of its own
