"""What programs are told of arguments and results of kernels and device functions. On the embedded device's engine."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array
from gpubpf.ebpf.probe import Probe
from gpubpf.inject.inject import inject
from gpubpf.ptx.parser import parse
from gpubpf_fragments import log, tally
from gpubpf_points import HEAD, Run
from gpubpf_sass import assembled

ARGUMENTS = f"""{HEAD}
.func (.param .b32 r) _Z4grewji(.param .b32 n, .param .b32 by) {{
    .reg .pred %p<4>; .reg .b32 %r<9>;
    ld.param.b32 %r1, [n]; ld.param.b32 %r2, [by];
    setp.eq.u32 %p1, %r1, 0;
    st.param.b32 [r], 77;
    @%p1 ret;
    sub.u32 %r3, %r1, 1;
    {{ .param .b32 q; .param .b32 a; .param .b32 b;
      st.param.b32 [a], %r3; st.param.b32 [b], %r2; call (q), _Z4grewji, (a, b); ld.param.b32 %r4, [q]; }}
    add.u32 %r4, %r4, %r2;
    st.param.b32 [r], %r4;
    ret;
}}
.func (.param .align 8 .b8 r[24]) _Z4pairtd(.param .b16 n, .param .f64 d) {{
    .reg .pred %p<4>; .reg .b16 %h<3>; .reg .b32 %r<9>; .reg .f64 %fd<3>; .reg .f32 %f<3>;
    ld.param.b16 %h1, [n]; ld.param.f64 %fd1, [d];
    setp.gt.u16 %p1, %h1, 9;
    cvt.rn.f32.f64 %f1, %fd1;
    cvt.u32.u16 %r1, %h1;
    st.param.v2.b32 [r], {{%r1, -1}};
    @%p1 st.param.b16 [r+2], 0x1234;
    @!%p1 st.param.b8 [r+7], %r1;
    st.param.f32 [r+8], %f1;
    st.param.f32 [r+12], 0f3F800000;
    st.param.b64 [r+16], 99;
    ret;
}}
.func _Z5emptyv() {{ ret; }}
.visible .entry k(.param .u64 .ptr .global .align 8 p, .param .f32 x, .param .u8 c, .param .align 4 .b8 s[7],
                  .param .align 2 .b8 t[12], .param .s16 h) {{
    .reg .b16 %h<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f64 %fd<2>; .reg .f32 %f<2>;
    ld.param.u64 %rd1, [p];
    ld.param.f32 %f1, [x];
    cvt.f64.f32 %fd1, %f1;
    mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 3;
    mul.wide.u32 %rd2, %r1, 16;
    add.u64 %rd1, %rd1, %rd2;
    {{ .param .b32 r; .param .b32 a; .param .b32 b;
      st.param.b32 [a], %r2; st.param.b32 [b], -3; call (r), _Z4grewji, (a, b); ld.param.b32 %r3, [r]; }}
    cvt.u16.u32 %h1, %r1;
    {{ .param .align 8 .b8 r[24]; .param .b16 a; .param .f64 b;
      st.param.b16 [a], %h1; st.param.f64 [b], %fd1; call (r), _Z4pairtd, (a, b); ld.param.b32 %r4, [r]; ld.param.b64 %rd3, [r+16]; }}
    call _Z5emptyv;
    cvt.u32.u64 %r5, %rd3;
    st.global.v4.b32 [%rd1], {{%r3, %r4, %r5, %r1}};
    ret;
}}"""
THREADS = 16
FIRST = [f"arg{n}" for n in range(6)]


def _launched(run: Run, data: Array) -> None:
    structure, more = bytes(range(1, 8)), bytes(range(20, 32))
    run("k", THREADS, data, np.float32(2.5), b"\xfe", structure, more, struct.pack("<h", -2))


def _right(t: int) -> list[int]:
    grown = 77 - 3 * (t % 4)
    return [grown, t if t <= 9 else 0x12340000 | t, 99, t]


def test_arguments_and_results_by_position() -> None:
    run = Run(
        ARGUMENTS,
        [
            Probe(log("entry", "began", "args", *FIRST), "entry"),
            Probe(log("entry", "others", "site", "arg6", "arg15"), "entry"),
            Probe(log("function_entry", "entered", "site", "args", "arg0", "arg1", "arg2"), "function_entry"),
            Probe(log("function_exit", "left", "site", "low", "high"), "function_exit"),
            Probe(log("function_exit", "upper", "high"), "function_exit", functions=("pair",)),
            Probe(tally("instructions"), "exit", "instructions"),
        ],
    )
    data = Array(np.zeros(4 * THREADS, np.uint32))
    _launched(run, data)
    assert data.host.reshape(-1, 4).tolist() == [_right(t) for t in range(THREADS)]
    s, more = int.from_bytes(bytes(range(1, 8)), "little"), int.from_bytes(bytes(range(20, 28)), "little")
    x = struct.unpack("<I", struct.pack("<f", 2.5))[0]
    given = (6, data.address, x, 0xFE, s, more, 0xFFFE)
    assert run.records(7, "began") == [(t, *given) for t in range(THREADS)]
    assert {row[2:] for row in run.records(3, "others")} == {(0, 0)}
    functions = {n: site.function for n, site in run.sites("k").items()}
    double = struct.unpack("<Q", struct.pack("<d", 2.5))[0]
    entered, left = [], []
    for t in range(THREADS):
        entered += [(t, "_Z4grewji", 2, n, 2**32 - 3, 0) for n in range(t % 4 + 1)]
        left += [(t, "_Z4grewji", 77 - 3 * n, 0) for n in range(t % 4 + 1)]
        low = t | 0xFFFFFFFF << 32
        low = low & ~0xFFFF0000 | 0x1234 << 16 if t > 9 else low & ~(0xFF << 56) | t << 56
        entered += [(t, "_Z4pairtd", 2, t, double, 0), (t, "_Z5emptyv", 0, 0, 0, 0)]
        left += [(t, "_Z4pairtd", low, x | 0x3F800000 << 32), (t, "_Z5emptyv", 0, 0)]
    assert sorted((t, functions[n], *rest) for t, n, *rest in run.records(5, "entered")) == sorted(entered)
    assert sorted((t, functions[n], *rest) for t, n, *rest in run.records(3, "left")) == sorted(left)
    assert run.records(1, "upper") == [(t, x | 0x3F800000 << 32) for t in range(THREADS)]


@pytest.mark.parametrize("sm", ["sm_75", "sm_80", "sm_90"])
def test_ptxas_takes_them(sm: str, tmp_path: Path) -> None:
    probes = [
        Probe(log("entry", "began", *FIRST), "entry"),
        Probe(log("function_entry", "entered", "args", *FIRST), "function_entry"),
        Probe(log("function_exit", "left", "low", "high"), "function_exit"),
        Probe(tally("stores"), "exit", "stores"),
    ]
    for text in (ARGUMENTS.replace("sm_80", sm), (Path(__file__).parent / "edges.ptx").read_text()):
        module = parse(text)
        injected = inject(module, dict.fromkeys(module.entries, probes))
        assert not injected.refusals
        assembled(injected.text, sm, tmp_path)


def test_what_no_program_reads_is_not_kept() -> None:
    for name, fields, kept in (("entry", ("args",), ""), ("function_exit", ("low",), "%gpubpf_0result0")):
        text = inject(parse(ARGUMENTS), {"k": [Probe(log(name, "log", *fields), name)]}).text
        assert "%gpubpf_0part" not in text or name == "function_exit"
        assert ("%gpubpf_0result0" in text) is bool(kept) and "%gpubpf_0result1" not in text
