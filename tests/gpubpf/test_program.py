"""`BPF` as tools use it, and the programs that are shipped prebuilt."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import prebuild
from gpubpf.ebpf import maps
from gpubpf.ebpf.probe import Probe
from gpubpf.errors import CompileError, UsageError, VerifyError
from gpubpf.kernel import privileges
from gpubpf.lower import programs
from gpubpf.lower.programs import PREBUILT
from gpubpf.program import BPF
from gpubpf.show.parsed import Options, ThreadOptions
from gpubpf_bcc import compiled

TOOLS = prebuild.SOURCES
THREADHIST = prebuild.program_text(prebuild.TOOLS / "threadhist.py")
TEXT = """#include <gpubpf.h>
struct limits { u64 least; u32 most[2]; };
GPU_ARRAY(cells, u64, 8);
GPU_ARRAY(unused, u64, 8);
GPU_PARAM(limits, struct limits);
int begins(struct gpu_entry *ctx) { cells.increment(1); return 0; }
int leaves(struct gpu_exit *ctx) {
    int k = 0;
    struct limits *l = limits.lookup(&k);
    if (l && ctx->work > l->least)
        bpf_trace_printk("work %llu\\n", ctx->work);
    return 0;
}
int bad(struct gpu_exit *ctx) {
    ctx->site = 1;
    return 0;
}
int host(struct pt_regs *ctx) { return 0; }
int touches(struct gpu_access *ctx) { cells.increment(ctx->address & 7); return 0; }
"""


def made():
    compiled(TEXT)
    return BPF(text=TEXT)


def test_probes_are_collected():
    b = made()
    b.attach_gpu_entry(kernel="vec*", fn_name="begins")
    b.attach_gpu_exit(kernel=["a", "b"], fn_name="leaves", accumulate="loads")
    b.attach_gpu_exit(fn_name="leaves")
    assert b.attached.probes == [
        Probe("begins", "entry", kernels=("vec*",)),
        Probe("leaves", "exit", "loads", kernels=("a", "b")),
        Probe("leaves", "exit"),
    ]
    assert [d.name for d in b.attached.definitions()] == ["cells", "limits", maps.PRINTS]
    assert list(b.attached.formats().values()) == ["work %llu\n"]
    probes = b.attached.lowered_probes()
    assert [(a.point, a.kernels, a.accumulate) for a in probes] == [
        ("entry", ("vec*",), None),
        ("exit", ("a", "b"), "loads"),
        ("exit", (), None),
    ]
    assert probes[1].program is probes[2].program


def test_what_cannot_be_attached():
    b = made()
    for attach, match in [
        (lambda: b.attach_gpu_exit(fn_name="begins"), "attach_gpu_entry"),
        (lambda: b.attach_gpu_entry(fn_name="leaves"), "attach_gpu_exit"),
        (lambda: b.attach_gpu_exit(fn_name="nothing"), "there is no program nothing; use one of"),
        (lambda: b.attach_gpu_exit(fn_name="host"), "attach_uprobe"),
        (lambda: b.attach_gpu_exit(fn_name="leaves", accumulate="joules"), "work cannot be 'joules'"),
        (lambda: b.attach_launch("begins"), "struct gpu_entry; attach it with attach_gpu_entry"),
        (lambda: b.attach_operation("begins"), "begins cannot be attached to operation"),
        (lambda: b.attach_gpu_access(fn_name="begins"), "begins cannot be attached to access"),
        (
            lambda: b.attach_gpu_access(kinds="fetch"),
            "a kind of memory access cannot be 'fetch'; use one of: load",
        ),
        (lambda: b.attach_gpu_access(kinds=()), "no kind of memory access is chosen"),
        (
            lambda: b.attach_gpu_value(kinds="async"),
            "a kind of memory access with a value cannot be 'async'; use one of: load, store, atomic",
        ),
        (lambda: b.attach_gpu_access(spaces=("global", "param")), "a memory space cannot be 'param'"),
        (
            lambda: b.attach_gpu_access(fn_name="touches", spaces=("global", "texture")),
            "touches reads ctx->address, which accesses to textures, surfaces, tensors and tensor memory lack",
        ),
        (lambda: b["missing"], "no map missing"),
        (lambda: b["cells"].set(b""), "is not a parameter"),
        (lambda: b.trace(Options()), "nothing is attached"),
    ]:
        with pytest.raises(UsageError, match=match):
            attach()
    with pytest.raises(VerifyError, match="C line 15 `ctx->site = 1;`: writes to its context"):
        b.attach_gpu_exit(fn_name="bad")
    assert b.attached.probes == []


def test_parameters():
    b = made()
    assert b.attached.params() == {"limits": bytes(16)}
    b["limits"].set({"least": 7, "most": [1, 2]})
    expected = b"".join(n.to_bytes(s, "little") for n, s in ((7, 8), (1, 4), (2, 4)))
    assert b.attached.params() == {"limits": expected}
    b["limits"].set(bytes(16))
    assert b.attached.params() == {"limits": bytes(16)}
    with pytest.raises(UsageError, match="16 bytes, not 3"):
        b["limits"].set(b"abc")


def test_filters_come_from_the_command_line():
    b = BPF(text=THREADHIST)
    every = (0, 2**32 - 1)
    threads = ThreadOptions(block=((1, 3), every, every), thread=((5, 5), (0, 9), every))
    words = memoryview(b.attached.params(Options(threads=threads))["filter"]).cast("I").tolist()
    assert words == [1, 2, 0, every[1], 0, every[1], 5, 0, 0, 9, 0, every[1]]
    assert memoryview(b.attached.params()["filter"]).cast("I").tolist() == [0, every[1]] * 6
    assert b["filter"].definition.value_size == 48


# Prebuilt programs


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_prebuilt_files_are_for_the_texts_and_headers_of_now(tool):
    for path, text in prebuild.texts(tool).items():
        assert json.loads(path.read_bytes())["key"] == programs.prebuilt_key(text), "run script/prebuild.py"


@pytest.mark.every(3)  # compiles, verifies and lowers them, which takes half a minute for memtrace
@pytest.mark.without_driver
@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_shipped_programs_are_prebuilt_and_current(tool):
    text = prebuild.program_text(tool)
    if text is None:
        pytest.skip("no device programs")
    if not prebuild.texts(tool):
        pytest.skip("makes its programs of the command line")
    assert prebuild.current(PREBUILT / f"{tool.stem}.json", text), "run script/prebuild.py"
    kept = json.loads((PREBUILT / f"{tool.stem}.json").read_text())
    assert kept["verdict"]
    assert all(kept["verdict"].values())


def test_prebuilt_needs_neither_bcc_nor_llvm():
    """Nor NumPy, nor the compiler stages, nor privileges."""
    script = f"""
import sys
for name in ("bcc", "llvmlite", "numpy"):
    sys.modules[name] = None
from gpubpf.program import BPF
b = BPF(text={THREADHIST!r})
b.attach_gpu_exit(kernel="vec*", fn_name="on_exit", accumulate="instructions")
assert not {{"gpubpf.verify", "gpubpf.lower.ir", "gpubpf.ebpf.compile"}} & set(sys.modules)
assert "tallies" in [d.name for d in b.attached.definitions()]
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_changed_text_is_not_the_prebuilt_one():
    assert programs.find_prebuilt(THREADHIST) is not None
    assert programs.find_prebuilt(THREADHIST + " ") is None


def test_damaged_prebuilt_files_are_passed_over(monkeypatch, tmp_path):
    for number, content in enumerate((b"", b"[1]", b"\xff", json.dumps({"key": "0"}).encode())):
        (tmp_path / f"{number}.json").write_bytes(content)
    monkeypatch.setattr(programs, "PREBUILT", tmp_path)
    assert programs.find_prebuilt(THREADHIST) is None
    monkeypatch.setattr(programs, "PREBUILT", tmp_path / "missing")
    assert programs.find_prebuilt(THREADHIST) is None


def test_custom_text_without_the_right_to_compile(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(privileges, "capable", lambda: False)
    with pytest.raises(CompileError, match="not one of the prebuilt programs"):
        BPF(text=TEXT + "/* new */")


def test_prebuild_writes_and_checks(monkeypatch, tmp_path, capsys):
    compiled(TEXT)
    tool = tmp_path / "probe.py"
    tool.write_text(
        f"PROGRAM = r'''{TEXT.replace(TEXT[TEXT.index('int bad') : TEXT.index('int host')], '')}'''\n"
    )
    monkeypatch.setattr(prebuild, "PREBUILT", tmp_path)
    assert prebuild.main([str(tool), "--check"]) == 1
    assert prebuild.main([str(tool)]) == 0
    assert prebuild.main([str(tool), "--check"]) == 0
    tool.write_text(
        "PROGRAM = '#include <gpubpf.h>\\nint f(struct gpu_exit *ctx) { ctx->work = 1; return 0; }'\n"
    )
    assert prebuild.main([str(tool)]) == 1
    assert "writes to its context" in capsys.readouterr().err
    assert prebuild.program_text(prebuild.TOOLS / "threadhist.py") == THREADHIST


# What a probe costs


def test_fragments_are_kept(monkeypatch, tmp_path):
    """The second BPF of a text does not verify or lower again."""
    compiled(TEXT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = BPF(text=TEXT)
    first.attach_gpu_entry(fn_name="begins")
    monkeypatch.setattr(programs, "verified", lambda *_: pytest.fail("lowered again"))
    again = BPF(text=TEXT)
    again.attach_gpu_entry(fn_name="begins")
    assert again.attached.lowered_probes()[0].program == first.attached.lowered_probes()[0].program
