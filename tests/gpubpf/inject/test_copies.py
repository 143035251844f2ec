"""ptxas assembles the copies of each kernel to which --list says yes, with the probes of each tool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import gpubpf_examples
from conformance import copies
from conformance.outcome import DIFFERENT, REFUSED, SAME, table

HERE = Path(__file__).parent
needs_ptxas = pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
HEAD = ".version 8.4\n.target sm_80\n.address_size 64\n"

# Kernels with what a copy could lose, each with a function or variable of its own.
UNUSUAL = {
    "constants": """.global .align 4 .u32 $str[2] = {1, 2}; .extern .global .align 4 .u32 $str[2];
        .global .u64 _ZZ1kE1p[2] = {generic($str)+-4, $str+(2*2)}; .const .u32 _ZZ1kE1c[2] = {!0, 1?5:6};
        .extern .const .u32 _ZZ1kE1c[2]; .extern .shared .align 16 .b8 dynamic[]; .shared .b32 fixed[WARP_SZ];
        .visible .entry k(.param .u64 out) .maxntid 32U, WARP_SZ {
        .reg .b64 %rd<4>; .reg .b32 %r<4>; ld.param.u64 %rd1, [out]; ld.global.u64 %rd2, [_ZZ1kE1p+(4+4)];
        ld.const.u32 %r1, [_ZZ1kE1c+!0*4]; ld.shared.u32 %r2, [dynamic+8|4]; st.shared.u32 [fixed+(1<<2)], %r2;
        add.u32 %r1, %r1, (1+2); st.global.u32 [%rd1+(4*2)], %r1; st.global.v2.u32 [%rd1], {1|4, !0}; ret; }""",
    "events": """.visible .entry k(.param .u64 out) { .reg .b64 %rd<2>; .reg .b32 %r<2>; .reg .pred %p<2>;
        ld.param.u64 %rd1, [out]; pmevent 1; mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, (3); @%p1 pmevent.mask 1|2;
        .pragma "nounroll"; st.global.u32 [%rd1], %r1; ret; }""",
}


def check(path: Path, ways: tuple[str, ...]) -> None:
    found = copies.outcomes(path.parent, path, ways)
    assert found and {outcome.verdict for outcome in found} == {SAME}, table(found)


@needs_ptxas
@pytest.mark.parametrize("name", ["directives.ptx", *UNUSUAL])
def test_copies_of_unusual_kernels(name: str, tmp_path: Path) -> None:
    path = HERE / name
    if name in UNUSUAL:
        path = tmp_path / f"{name}.ptx"
        path.write_text(HEAD + UNUSUAL[name])
    check(path, tuple(copies.WAYS))


@pytest.mark.every(9)
@needs_ptxas
@pytest.mark.parametrize("way", copies.WAYS)
def test_copies_of_the_edges(way: str) -> None:
    check(HERE / "edges.ptx", (way,))


@pytest.mark.every(60)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("options", [("-lineinfo",), ("-G",), ("-rdc=true",)], ids=" ".join)
@pytest.mark.parametrize("name", gpubpf_examples.NAMES)
def test_copies_of_examples(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / f"{name}.ptx"
    source = gpubpf_examples.ROOT / "examples" / f"{name}.cu"
    subprocess.run(["nvcc", "-ptx", "-arch=sm_80", "-std=c++17", *options, source, "-o", path], check=True)
    check(path, tuple(copies.WAYS))


@needs_ptxas
def test_what_ptxas_refuses_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = tmp_path / "good.ptx"
    call = ".reg .b64 %f; p: .callprototype _ (); ld.param.u64 %f, [f]; call %f, (), p; ret;"
    good.write_text(
        f"{HEAD}.visible .entry k() {{ ret; }}\n.visible .entry refused(.param .u64 f) {{ {call} }}\n"
    )
    broken = "// k: from the PTX for sm_80\n" + HEAD + ".visible .entry k() { add.u32 %r1, %r2, %r3; ret; }\n"
    asked = copies._printed
    monkeypatch.setattr(copies, "_printed", lambda way, *o: broken if o[0] == "--ptx" else asked(way, *o))
    found = {outcome.program: outcome for outcome in copies.outcomes(tmp_path, good, ("threadhist",))}
    assert found["good.ptx: k"].verdict == DIFFERENT and "error" in found["good.ptx: k"].reason
    assert found["good.ptx: refused"].verdict == REFUSED
    assert copies.figure([*found.values()]) == "ptxas assembled 0 of 1 copies: 1 kernels of 1 files in 1 ways"
