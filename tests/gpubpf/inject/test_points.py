"""Every place where a program can be, by execution: who is there, how often, and what it is told. On the embedded device's engine."""

from __future__ import annotations

import importlib.util
import re
import struct
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array, Device, compile_cuda, nvcc
from gpubpf.ebpf.probe import Probe
from gpubpf.inject import plan
from gpubpf.inject.inject import inject
from gpubpf.inject.values import Site
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.ptx.module import render
from gpubpf.ptx.parser import parse
from gpubpf.record import replace
from gpubpf_fragments import log, tally
from gpubpf_points import HEAD, Run
from gpubpf_sass import assembled


@pytest.fixture(params=["inline", "functions"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Programs at memory accesses as they are where there are few, and where there are many."""
    if request.param == "functions":
        monkeypatch.setattr(plan, "MAX_INLINE", 0)
        monkeypatch.setattr(plan, "MIN_FUNCTION", 0)
    return str(request.param)


# --- memory accesses ----------------------------------------------------------------------------------

ACCESSES = f"""{HEAD}
.global .align 16 .b32 table[64];
.const .align 4 .b32 fixed[4] = {{1, 2, 3, 4}};
.shared .align 16 .b8 cells[256];
.visible .entry k(.param .u64 p) {{
    .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .b16 %h; .local .align 8 .b8 mine[32];
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd3, %rd1, %rd2;
    ld.global.nc.u32 %r2, [%rd3+-4];
    setp.lt.u32 %p1, %r1, 5;
    @%p1 st.global.v4.b32 [%rd1+512], {{%r1, %r1, %r1, %r1}};
    @!%p1 ld.global.u16 %h, [%rd3+2];
    ld.global.b64 %rd1, [%rd1];
    shl.b32 %r3, %r1, 3;
    mov.u32 %r4, cells;
    add.u32 %r4, %r4, %r3;
    st.shared.u32 [%r4+-0], %r1;
    @%p1 ld.shared.v2.b32 {{%r5, %r6}}, [%r4+8];
    ld.shared.u8 %r7, [cells+5];
    st.local.u64 [mine+8], %rd2;
    mov.u64 %rd4, mine;
    cvta.local.u64 %rd5, %rd4;
    ld.u32 %r8, [%rd5+8];
    mov.u64 %rd6, cells;
    cvta.shared.u64 %rd7, %rd6;
    add.u64 %rd7, %rd7, %rd2;
    st.u32 [%rd7+128], %r1;
    mov.u64 %rd8, table;
    add.u64 %rd9, %rd8, %rd2;
    cvta.global.u64 %rd9, %rd9;
    atom.add.u32 %r9, [%rd9], 7;
    red.global.add.u32 [table+16], 1;
    ld.const.u32 %r10, [fixed+4];
    ret;
}}"""


NAMED = f"""{HEAD}
.global .align 16 .b32 table[64];
.shared .align 16 .b8 cells[256];
.visible .entry k(.param .u64 p) {{
    .reg .b32 %r<20>; .local .align 8 .b8 mine[32];
    mov.u32 %r1, %tid.x;
    st.u32 [cells+4], %r1;
    st.u32 [mine+8], %r1;
    red.add.u32 [cells+8], 1;
    atom.add.u32 %r2, [table+16], 1;
    {{ .reg .b64 at; mov.u64 at, table; ld.u32 %r3, [at+4]; }}
    ret;
}}"""


def test_an_access_without_a_space_that_names_a_variable(form: str) -> None:
    """It is in the variable's space, and its address is an offset there, not a generic address."""
    run = Run(NAMED, [Probe(log("access"), "access")])
    run("k", 1, 0)
    spaces = [site.space for _, site in sorted(run.sites("k").items())]
    assert spaces == ["shared", "local", "shared", "global", "generic"]
    table = run.variables["table"].ctypes.data
    found = sorted((r[1], r[4], r[2]) for r in run.records(7))  # site, space, address
    assert [one[1] for one in found] == [1, 2, 1, 0, 0]
    (_, _, first), (_, _, own), (_, _, second), (_, _, atomic), (_, _, through_register) = found
    assert second == first + 4 and own < 1 << 20
    assert (atomic, through_register) == (table + 16, table + 4)


ELEMENTS = f"""{HEAD}
.global .align 16 .b32 table[64];
.const .b16 fixed[32] = {{{", ".join(str(3 * n) for n in range(32))}}};
.shared .v2 .b32 cells[32];
.visible .entry k(.param .u64 p) {{
    .reg .b32 %r<20>; .reg .b16 %h; .reg .b64 %rd<9>; .local .b64 mine[4]; .reg .pred %p;
    ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2;
    cvt.u16.u32 %h, %r1; setp.lt.u32 %p, %r1, 4; cvt.u64.u32 %rd3, %r1;
    st.u32 cells[%h+1], %r1;
    @%p st.local.u64 mine[%r1], %rd2;
    ld.const.u16 %r2, fixed[%rd3+2];
    st.global.u32 table[%r1], %r2;
    ld.global.u32 %r1, table[%r1+0];
    mov.u64 %rd4, table[%h+3];
    cvta.const.u64 %rd5, fixed[%r2];
    sub.u64 %rd4, %rd4, %rd5;
    st.global.u32 [%rd1], %r1;
    ret;
}}"""


def test_elements_of_arrays(form: str) -> None:
    """An index is added in elements: to variables that stay in the kernel, and to addresses from the table of variables."""
    run = Run(ELEMENTS, [Probe(log("access"), "access")])
    out = Array(np.zeros(8, np.uint32))
    run("k", 8, out)
    assert out.host.tolist() == [3 * (t + 2) for t in range(8)]
    table, fixed = (run.variables[name].ctypes.data for name in ("table", "fixed"))
    sites = [site for _, site in sorted(run.sites("k").items())]
    assert [(s.space, s.kind) for s in sites] == [
        ("shared", "store"), ("local", "store"), ("const", "load"),
        ("global", "store"), ("global", "load"), ("global", "store"),
    ]  # fmt: skip
    addresses = {n: [r[2] for r in run.records(7) if r[1] == n] for n in range(6)}
    cells, mine = addresses[0][0], addresses[1][0]
    assert addresses == {
        0: [cells + 4 * t for t in range(8)],
        1: [mine + 8 * t for t in range(4)],
        2: [fixed + 2 * (t + 2) for t in range(8)],
        3: [table + 4 * t for t in range(8)],
        4: [table + 4 * t for t in range(8)],
        5: [out.address + 4 * t for t in range(8)],
    }


def test_values_at_elements_of_arrays(form: str, tmp_path: Path) -> None:
    """A load may overwrite its index. An instruction that takes an element's address reads the index alone."""
    of_value = Probe(log("value", "log", "site", "address", "low"), "value")
    of_result = log("instruction", "results", "site", "low", "operand0", "operands")
    run = Run(ELEMENTS, [of_value, Probe(of_result, "instruction", opcodes=("mov.u64", "cvta"))])
    assembled(run.injected.text, "sm_80", tmp_path)
    run("k", 8, Array(np.zeros(8, np.uint32)))
    table, fixed = (run.variables[name].ctypes.data for name in ("table", "fixed"))
    sites = {n: site for n, site in run.sites("k").items() if site.point == "value"}
    (load,) = (n for n, site in sites.items() if site.space == "global" and site.kind == "load")
    loaded = [r[2:] for r in run.records(3) if r[1] == load]
    assert loaded == [(table + 4 * t, 3 * (t + 2)) for t in range(8)]
    results: dict[str, list[tuple[int, ...]]] = {opcode: [] for opcode in ("mov.u64", "cvta.const.u64")}
    for record in run.records(4, "results"):
        results[run.sites("k")[record[1]].opcode].append(record[2:])
    assert results == {
        "mov.u64": [(table + 4 * (t + 3), t, 1) for t in range(8)],
        "cvta.const.u64": [(fixed + 2 * (3 * (t + 2)), 3 * (t + 2), 1) for t in range(8)],
    }


def by_text(text: str, sites: dict[int, Site]) -> dict[str, list[int]]:
    lines = text.splitlines()
    found: dict[str, list[int]] = {}
    for number, site in sites.items():
        found.setdefault(lines[site.line - 1].strip().split("]")[0], []).append(number)
    return found


def test_what_an_access_program_is_told(form: str) -> None:
    run = Run(ACCESSES, [Probe(log("access"), "access")])
    data = Array(np.zeros(1024, np.uint32))
    at = data.address + 64
    data.host[16:18] = np.frombuffer(struct.pack("<Q", at), np.uint32)
    run("k", 16, at)
    assert ("call gpubpf_program0" in run.injected.text) is (form == "functions")
    sites = run.sites("k")
    assert sorted(sites) == list(range(13)) and run.injected.kernels["k"].site_count == 13
    lines = by_text(ACCESSES, sites)
    records = run.records(7)
    everyone, few, rest = range(16), range(5), range(5, 16)
    table, fixed = (run.variables[name].ctypes.data for name in ("table", "fixed"))

    def told(text: str, opcode: str) -> list[tuple[int, ...]]:
        (number,) = lines[text]
        assert sites[number].opcode == opcode and sites[number].point == "access"
        rows = [r[:1] + r[2:] for r in records if r[1] == number]
        site, effects = sites[number], {row[-1] for row in rows}
        assert effects == {site.effect}
        assert {row[2] for row in rows} == {site.width}
        return [r[:-1] for r in rows]

    all16, mask5, mask11 = 0xFFFF, 0x1F, 0xFFE0
    assert told("ld.global.nc.u32 %r2, [%rd3+-4", "ld.global.nc.u32") == [
        (t, at + 4 * t - 4, 4, 0, 0, all16) for t in everyone
    ]
    assert told("@%p1 st.global.v4.b32 [%rd1+512", "st.global.v4.b32") == [
        (t, at + 512, 16, 0, 1, mask5) for t in few
    ]
    assert told("@!%p1 ld.global.u16 %h, [%rd3+2", "ld.global.u16") == [
        (t, at + 4 * t + 2, 2, 0, 0, mask11) for t in rest
    ]
    # it overwrites the register that held its address
    assert told("ld.global.b64 %rd1, [%rd1", "ld.global.b64") == [(t, at, 8, 0, 0, all16) for t in everyone]
    stored = told("st.shared.u32 [%r4+-0", "st.shared.u32")
    cells = stored[0][1]
    assert cells < 1 << 16
    assert stored == [(t, cells + 8 * t, 4, 1, 1, all16) for t in everyone]
    assert told("@%p1 ld.shared.v2.b32 {%r5, %r6}, [%r4+8", "ld.shared.v2.b32") == [
        (t, cells + 8 * t + 8, 8, 1, 0, mask5) for t in few
    ]
    assert told("ld.shared.u8 %r7, [cells+5", "ld.shared.u8") == [
        (t, cells + 5, 1, 1, 0, all16) for t in everyone
    ]
    own = told("st.local.u64 [mine+8", "st.local.u64")
    mine = own[0][1]
    assert own == [(t, mine, 8, 2, 1, all16) for t in everyone] and mine < 1 << 16
    assert told("ld.u32 %r8, [%rd5+8", "ld.u32") == [(t, mine, 4, 2, 0, all16) for t in everyone]
    assert told("st.u32 [%rd7+128", "st.u32") == [(t, cells + 128 + 4 * t, 4, 1, 1, all16) for t in everyone]
    assert told("atom.add.u32 %r9, [%rd9", "atom.add.u32") == [
        (t, table + 4 * t, 4, 0, 2, all16) for t in everyone
    ]
    assert told("red.global.add.u32 [table+16", "red.global.add.u32") == [
        (t, table + 16, 4, 0, 2, all16) for t in everyone
    ]
    (constant,) = lines["ld.const.u32 %r10, [fixed+4"]
    assert [r[2:] for r in records if r[1] == constant] == [(fixed + 4, 4, 3, 0, all16, 1)] * 16
    generic = {
        lines[text][0] for text in ("ld.u32 %r8, [%rd5+8", "st.u32 [%rd7+128", "atom.add.u32 %r9, [%rd9")
    }
    assert {n for n, s in sites.items() if s.space == "generic"} == generic


def test_programs_are_where_their_kinds_and_spaces_are(form: str) -> None:
    """What does not match is not there at all; a generic address runs the programs of the space that it leads to."""
    probes = [
        Probe(log("access", "stores", "site", "space"), "access", kinds=("store",)),
        Probe(log("access", "shared", "site", "space"), "access", spaces=("shared",)),
        Probe(log("access", "local", "site", "space"), "access", kinds=("load",), spaces=("local", "const")),
        Probe(log("access", "rest", "site", "space"), "access", spaces=("global", "local")),
        Probe(log("access", "two", "site", "space"), "access", spaces=("shared", "local")),
    ]
    run = Run(ACCESSES, probes)
    data = Array(np.zeros(1024, np.uint32))
    at = data.address + 64
    data.host[16:18] = np.frombuffer(struct.pack("<Q", at), np.uint32)
    run("k", 16, at)
    lines = ACCESSES.splitlines()
    found = {
        name: Counter(
            (lines[run.sites("k")[site].line - 1].split(";")[0].split("[")[1].split("]")[0], space)
            for _, site, space in run.records(2, name)
        )
        for name in run.maps
    }
    shared = {("%r4+-0", 1): 16, ("%r4+8", 1): 5, ("cells+5", 1): 16, ("%rd7+128", 1): 16}
    local = {("mine+8", 2): 16, ("%rd5+8", 2): 16}
    assert found == {
        "stores": {("%rd1+512", 0): 5, ("%r4+-0", 1): 16, ("mine+8", 2): 16, ("%rd7+128", 1): 16},
        "shared": shared,
        "local": {("%rd5+8", 2): 16, ("fixed+4", 3): 16},
        "rest": {("%rd3+-4", 0): 16, ("%rd1+512", 0): 5, ("%rd3+2", 0): 11, ("%rd1", 0): 16, ("%rd9", 0): 16}
        | {("table+16", 0): 16}
        | local,
        "two": shared | local,
    }
    only = inject(parse(ACCESSES), {"k": [Probe(log("access"), "access", spaces=("const",))]})
    assert [s.space for s in only.kernels["k"].sites] == ["const"] and only.kernels["k"].site_count == 1


COPIES = f"""{HEAD}
.shared .align 16 .b8 cells[1024];
.visible .entry k(.param .u64 p) {{
    .reg .pred %p<9>, %skip; .reg .b32 %r<20>; .reg .b64 %rd<20>;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 4;
    mul.wide.u32 %rd2, %r1, 16;
    add.u64 %rd3, %rd1, %rd2;
    mov.u32 %r3, cells;
    add.u32 %r3, %r3, %r2;
    and.b32 %r4, %r1, 3;
    shl.b32 %r4, %r4, 2;
    setp.ge.u32 %p1, %r1, 16;
    @%p1 cp.async.cg.shared.global [%r3], [%rd3], 16, %r4;
    cp.async.ca.shared.global [%r3+0], [%rd3], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r5, %r6}}, [%r3];
    ret;
}}"""


def test_copies_and_matrices_are_accesses_of_some_lanes(form: str) -> None:
    run = Run(COPIES, [Probe(log("access"), "access")])
    run("k", 32, Array(np.zeros(1024, np.uint32)))
    sites = run.sites("k")
    assert [(s.kind, s.space, s.width, s.effect) for _, s in sorted(sites.items())] == [
        ("async", "global", 0, 1),
        ("async", "shared", 16, 2),
        ("async", "global", 4, 1),
        ("async", "shared", 4, 2),
        ("load", "shared", 16, 1),
    ]
    seen = [[r for r in run.records(7) if r[1] == number] for number in range(5)]
    some = [t for t in range(16, 32) if t % 4]
    assert [(t, width) for t, _, _, width, *_ in seen[0]] == [(t, 4 * (t % 4)) for t in some]
    assert {r[6] for r in seen[0]} == {sum(1 << t for t in some)}
    assert [r[0] for r in seen[1]] == list(range(16, 32)) and {r[6] for r in seen[1]} == {0xFFFF0000}
    assert [len(rows) for rows in seen[2:]] == [32, 32, 16]
    assert {r[6] for r in seen[4]} == {0xFFFF} and {r[3] for r in seen[4]} == {16}


WMMA = f"""{HEAD}
.shared .align 32 .b8 tile[2048];
.visible .entry k(.param .u64 p, .param .u32 stride) {{
    .reg .b32 %r<20>; .reg .b64 %rd<3>; .reg .f32 %f<9>;
    ld.param.u64 %rd1, [p];
    ld.param.u32 %r9, [stride];
    wmma.load.a.sync.aligned.row.m16n16k16.f16 {{%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}}, [%rd1+32], %r9;
    wmma.load.b.sync.aligned.row.m32n8k16.global.s8 {{%r10}}, [%rd1], 16;
    wmma.load.c.sync.aligned.row.m16n16k16.shared.f32 {{%f1, %f2, %f3, %f4, %f5, %f6, %f7, %f8}}, [tile+64];
    wmma.store.d.sync.aligned.col.m16n16k16.global.f32 [%rd1], {{%f1, %f2, %f3, %f4, %f5, %f6, %f7, %f8}}, %r9;
    ret;
}}"""


def test_a_matrix_is_rows_of_up_to_16_bytes_in_each_lane() -> None:
    """Together, the lanes access each byte of the matrix once."""
    run = Run(WMMA, [Probe(log("access", "log", "site", "address", "width"), "access")])
    data = Array(np.zeros(4096, np.uint8))
    run("k", 32, data, np.uint32(24))
    sites = run.sites("k")
    assert [(s.kind, s.space, s.width) for _, s in sorted(sites.items())] == [
        ("load", "generic", 16),
        ("load", "global", 8),
        ("load", "shared", 16),
        ("load", "shared", 16),
        ("store", "global", 16),
        ("store", "global", 16),
    ]

    def touched(begin: int, rows: int, length: int, step: int) -> list[int]:
        return [begin + step * row + byte for row in range(rows) for byte in range(length)]

    expected = [
        (touched(data.address + 32, 16, 32, 48), [0]),
        (touched(data.address, 16, 8, 16), [1]),
        (touched(64, 16, 64, 64), [2, 3]),
        (touched(data.address, 16, 64, 96), [4, 5]),
    ]
    for bytes_, numbers in expected:
        found = [r for r in run.records(4) if r[1] in numbers]
        assert sorted(r[2] + k for r in found for k in range(r[3])) == sorted(bytes_)


# --- functions ----------------------------------------------------------------------------------------

FUNCTIONS = f"""{HEAD}
.func (.param .b32 r) _Z5helpsjPj(.param .b32 n, .param .b64 p) {{
    .reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<4>;
    ld.param.b32 %r1, [n]; ld.param.b64 %rd1, [p];
    ld.global.b32 %r2, [%rd1];
    setp.gt.u32 %p1, %r1, 20;
    @%p1 exit;
    st.param.b32 [r], 1;
    setp.gt.u32 %p2, %r1, 10;
    @%p2 ret;
    atom.global.add.u32 %r3, [%rd1], 1;
    st.param.b32 [r], 2;
    ret;
}}
.func _Z5plainv() {{ .reg .b32 %r<2>; mov.u32 %r1, 1; }}
.func _Z6middlejPj(.param .b32 n, .param .b64 p) {{
    .reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<4>;
    ld.param.b32 %r1, [n]; ld.param.b64 %rd1, [p];
    call _Z5plainv;
    setp.eq.u32 %p1, %r1, 3;
    @%p1 bra out;
    {{ .param .b32 a; .param .b64 b; .param .b32 c; st.param.b32 [a], %r1; st.param.b64 [b], %rd1;
      call (c), _Z5helpsjPj, (a, b); ld.param.b32 %r2, [c]; }}
    st.global.b32 [%rd1+4], %r2;
    setp.eq.u32 %p2, %r1, 4;
    @%p2 bra out;
    add.u32 %r1, %r1, 1;
    out: ret;
}}
.func (.param .b32 r) _Z4downj(.param .b32 n) {{
    .reg .pred %p<4>; .reg .b32 %r<9>;
    ld.param.b32 %r1, [n];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra done;
    sub.u32 %r1, %r1, 1;
    {{ .param .b32 a; .param .b32 c; st.param.b32 [a], %r1; call (c), _Z4downj, (a); ld.param.b32 %r2, [c]; }}
    done: st.param.b32 [r], %r1;
    ret;
}}
.visible .entry first(.param .u64 p) {{
    .reg .b32 %r<9>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x;
    ld.global.b32 %r2, [%rd1+8];
    {{ .param .b32 a; .param .b64 b; st.param.b32 [a], %r1; st.param.b64 [b], %rd1; call _Z6middlejPj, (a, b); }}
    st.global.b32 [%rd1+12], %r2;
    ret;
}}
.visible .entry second(.param .u64 p) {{
    .reg .b32 %r<9>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x;
    {{ .param .b32 a; .param .b32 c; st.param.b32 [a], 3; call (c), _Z4downj, (a); ld.param.b32 %r2, [c]; }}
    call _Z5plainv;
    st.global.b32 [%rd1+12], %r2;
    ret;
}}"""


def runs(run: Run, kernel: str, name: str) -> dict[tuple[str, str], int]:
    """By function, and opcode or point, how many threads came there."""
    sites = run.sites(kernel)
    found: Counter[tuple[str, str]] = Counter()
    for _, number in run.records(1, name):
        site = sites[number]
        found[site.function, site.opcode or site.point] += 1
    return dict(found)


def test_functions_that_are_called(form: str) -> None:
    """32 threads: 11 to 20 return early, 21 to 31 leave the kernel inside, 3 never calls helps()."""
    text = FUNCTIONS
    run = Run(
        text,
        [
            Probe(log("function_entry", "entered"), "function_entry"),
            Probe(log("function_exit", "returned"), "function_exit"),
            Probe(log("function_exit", "some"), "function_exit", functions=("mid*", "_Z4downj")),
            Probe(log("access", "touched", "site"), "access"),
            Probe(log("entry", "began"), "entry"),
            Probe(log("exit", "left"), "exit"),
            Probe(tally("stores"), "exit", "stores"),
            Probe(tally("instructions"), "exit", "instructions"),
        ],
    )
    data = Array(np.zeros(64, np.uint32))
    run("first", 32, data)
    helps, middle, plain, down = "_Z5helpsjPj", "_Z6middlejPj", "_Z5plainv", "_Z4downj"
    assert runs(run, "first", "entered") == {
        (helps, "function_entry"): 31,
        (middle, "function_entry"): 32,
        (plain, "function_entry"): 32,
    }
    returned = {(helps, "function_exit"): 20, (middle, "function_exit"): 21, (plain, "function_exit"): 32}
    assert runs(run, "first", "returned") == returned
    assert runs(run, "first", "some") == {(middle, "function_exit"): 21}
    assert runs(run, "first", "touched") == {
        (helps, "ld.global.b32"): 31,
        (helps, "atom.global.add.u32"): 10,
        (middle, "st.global.b32"): 20,
        ("first", "ld.global.b32"): 32,
        ("first", "st.global.b32"): 21,
    }
    assert runs(run, "first", "began") == {("first", "entry"): 32}
    assert runs(run, "first", "left") == {("first", "exit"): 21, (helps, "exit"): 11}
    assert int(data.host[0]) == 10
    work = run.maps["stores"].host[:64].reshape(32, 2).tolist()
    assert work == [[1, 0 if t > 20 else 1 if t == 3 else 2] for t in range(32)]
    plain_run = Run(text, [Probe(tally("instructions"), "exit", "instructions")])
    plain_run("first", 32, Array(np.zeros(64, np.uint32)))
    assert (run.maps["instructions"].host[:64] == plain_run.maps["instructions"].host[:64]).all()

    run("second", 4, data)
    assert runs(run, "second", "entered") == {(down, "function_entry"): 16, (plain, "function_entry"): 4}
    assert runs(run, "second", "some") == {(down, "function_exit"): 16}
    assert runs(run, "second", "touched") == {("second", "st.global.b32"): 4}
    assert runs(run, "second", "left") == {("second", "exit"): 4}


def test_many_accesses_call_a_program_that_few_hold(tmp_path: Path) -> None:
    """Thousands of copies of a long program would take ptxas minutes."""
    long = log("access")
    long = replace(long, ptx=long.ptx.replace("$L_full:", "add.u32 %r1, %r1, 1;\n" * 300 + "$L_full:"))

    def module(accesses: int) -> str:
        loads = "".join(f"ld.global.u32 %r1, [%rd1+{4 * n}];\n" for n in range(accesses))
        return f"""{HEAD}.visible .entry k(.param .u64 p) {{ .reg .b32 %r<4>; .reg .b64 %rd<4>;
            ld.param.u64 %rd1, [p]; {loads} ret; }}"""

    few, many = (
        inject(parse(module(n)), {"k": [Probe(long, "access"), Probe(log("exit", "left"), "exit")]})
        for n in (10, 500)
    )
    assert few.text.count("$L_full:") == 11 and "gpubpf_program" not in few.text
    assert many.text.count("$L_full:") == 2 and many.text.count("call gpubpf_program0") == 500
    _, report = assembled(many.text, "sm_80", tmp_path)
    assert "spill stores" in report and not re.search(r"[1-9]\d* bytes (spill|stack)", report)


def test_sites_are_numbered_without_gaps(tmp_path: Path) -> None:
    """Functions first, for all kernels the same; a kernel that is refused takes no number away."""
    text = FUNCTIONS.replace(
        ".visible .entry second",
        """.func (.reg .b32 r) _Z3badj(.reg .b32 x) { .reg .b64 %rd<2>; ld.global.u64 %rd1, [%rd1]; mov.u32 r, x; ret; }
.visible .entry refused(.param .u64 p) { .reg .b32 %r<4>; .reg .b64 %rd<4>; st.global.u32 [%rd1], 1; call _Z5plainv;
  { .param .b32 a; .param .b64 b; .param .b32 c; st.param.b32 [a], 1; st.param.b64 [b], 0; call (c), _Z5helpsjPj, (a, b); }
  call (%r1), _Z3badj, (%r1); ret; }
.visible .entry second""",
    )
    every = [Probe(log(p, p), p) for p in ("access", "function_entry", "function_exit", "entry", "exit")]
    kernels = {"first": every, "refused": every[:2], "second": [*every, Probe(log("exit"), "block_end")]}
    injected = inject(parse(text), kernels)
    assert injected.refusals == {"refused": "function _Z3badj takes its parameters in registers"}
    assert set(injected.kernels) == {"first", "second"} and "refused" not in injected.text
    own = {name: [s.number for s in k.sites if s.function == name] for name, k in injected.kernels.items()}
    shared = own["first"][0]
    called = {s.number: s for k in injected.kernels.values() for s in k.sites if s.number < shared}
    assert sorted(called) == list(range(shared))
    for name, kernel in injected.kernels.items():
        assert own[name] == list(range(shared, kernel.site_count)), name
        assert [s.number for s in kernel.sites] == sorted({s.number for s in kernel.sites})
    alone = inject(parse(text), {name: kernels[name] for name in ("first", "second")})
    assert alone.text == injected.text and alone.kernels == injected.kernels
    assembled(injected.text, "sm_80", tmp_path)


def test_kernels_with_other_programs_have_functions_of_their_own() -> None:
    """One kernel with nothing in its functions, one with probes there."""
    text = f"""{HEAD}.func f(.param .b64 p) {{ .reg .b64 %rd<3>; ld.param.b64 %rd1, [p]; st.global.u32 [%rd1], 9; exit; }}
.alias g, f;
.visible .entry a(.param .u64 p) {{ .reg .b64 %rd<3>; ld.param.u64 %rd1, [p];
  {{ .param .b64 x; st.param.b64 [x], %rd1; call f, (x); }} ret; }}
.visible .entry b(.param .u64 p) {{ .reg .b64 %rd<3>; ld.param.u64 %rd1, [p];
  {{ .param .b64 x; st.param.b64 [x], %rd1; call f, (x); }} ret; }}
.visible .entry c(.param .u64 p) {{ .reg .b64 %rd<3>; ld.param.u64 %rd1, [p];
  {{ .param .b64 x; st.param.b64 [x], %rd1; call f, (x); }} ret; }}"""
    text = text.replace(".alias g, f;\n", "")
    module = parse(text)
    placed = {
        "a": [Probe(log("entry"), "entry")],
        "b": [Probe(log("exit"), "exit")],
        "c": [Probe(log("access"), "access", kinds=("store",))],
    }
    injected = inject(module, placed)
    functions = set(parse(injected.text).functions)
    assert {"f", "f$gpubpf1", "f$gpubpf2"} <= functions
    device = Device(injected.text)
    for name, runs_of in (("a", 1), ("b", 1), ("c", 1)):
        layout = injected.kernels[name].block
        records = Array(np.zeros(9 * 64, np.uint64))
        hidden = bytearray(layout.size)
        for offset in layout.bases.values():
            struct.pack_into("<Q", hidden, offset, records.address)
        data = Array(np.zeros(4, np.uint32))
        device.launch(name, 1, 1, data, bytes(hidden))
        assert int(records.host[0]) == runs_of and int(data.host[0]) == 9, name


# --- barriers -----------------------------------------------------------------------------------------

BARRIERS = f"""{HEAD}
.visible .entry k(.param .u64 p) {{
    .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, %tid.x;
    bar.sync 0;
    setp.lt.u32 %p1, %r1, 32;
    mov.u32 %r2, 3;
    @%p1 bar.sync %r2, 32;
    @%p1 bar.arrive 1, 64;
    @!%p1 barrier.sync.aligned 1, 64;
    setp.eq.u32 %p2, %r1, 40;
    setp.lt.u32 %p3, %r1, 64;
    @%p3 bar.red.and.pred %p3, 2, %p2;
    setp.lt.u32 %p4, %r1, 64;
    mov.u32 %r3, 5;
    bar.red.popc.u32 %r3, %r3, 64, %p4;
    @%p3 trap;
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd2, %rd1, %rd2;
    st.global.u32 [%rd2], %r3;
    barrier.cta.sync 4;
    bar.warp.sync 0xffffffff;
    ret;
}}"""


def test_barriers_as_threads_come_and_go() -> None:
    run = Run(
        BARRIERS,
        [
            Probe(log("barrier_arrive", "arrived"), "barrier_arrive"),
            Probe(log("barrier_leave", "left"), "barrier_leave"),
        ],
    )
    data = Array(np.zeros(64, np.uint32))
    run("k", 64, data)
    assert (data.host == 64).all()
    sites = run.sites("k")
    assert run.injected.kernels["k"].site_count == len(sites) == 7 + 6
    arrived = Counter(
        (sites[s].opcode, number, threads) for _, s, number, threads in run.records(3, "arrived")
    )
    left = Counter((sites[s].opcode, number, threads) for _, s, number, threads, _ in run.records(4, "left"))
    both = {
        ("bar.sync", 0, 0): 64,
        ("bar.sync", 3, 32): 32,
        ("barrier.sync.aligned", 1, 64): 32,
        ("bar.red.and.pred", 2, 0): 64,
        ("bar.red.popc.u32", 5, 64): 64,
        ("barrier.cta.sync", 4, 0): 64,
    }
    assert arrived == both | {("bar.arrive", 1, 64): 32}
    assert left == both
    assert {s.point for s in sites.values()} == {"barrier_arrive", "barrier_leave"}


def test_waiting_is_measured_from_arrival_to_leave() -> None:
    """On the virtual clock: the warp that works before the barrier makes the other wait for exactly that long."""
    text = f"""{HEAD}.visible .entry k(.param .u32 n) {{
    .reg .pred %p<9>; .reg .b32 %r<9>;
    mov.u32 %r1, %tid.x; ld.param.u32 %r2, [n]; setp.ge.u32 %p1, %r1, 32; @%p1 bra meet;
    turn: sub.u32 %r2, %r2, 1; setp.ne.u32 %p2, %r2, 0; @%p2 bra turn;
    meet: bar.sync 0; ret; }}"""
    waited = {}
    for turns in (100, 200, 300):
        run = Run(text, [Probe(log("barrier_leave"), "barrier_leave")], virtual=True)
        run("k", 64, struct.pack("<I", turns))
        waited[turns] = {thread: cycles for thread, *_, cycles in run.records(4)}
        assert (
            len({waited[turns][t] for t in range(32)}) == len({waited[turns][t] for t in range(32, 64)}) == 1
        )
        assert waited[turns][40] > waited[turns][0]
    assert waited[300][40] - waited[200][40] == waited[200][40] - waited[100][40] > 100
    assert waited[300][0] == waited[100][0]


# --- compiled kernels ---------------------------------------------------------------------------------

KINDS = ("loads", "stores", "atomics")


def counter(point: str, name: str, field: str = "") -> Fragment:
    """name[field] += 1"""
    index = f"shl.b64 %rd1, %gpubpf_{field}, 3;" if field else "mov.b64 %rd1, 0;"
    text = f"""{{ .reg .b64 %rd<4>; {index} add.u64 %rd2, %rd1, %gpubpf_{name}; red.global.add.u64 [%rd2], 1; }}"""
    arguments = [Argument(name, "b64", "map_base", name)]
    arguments += [Argument(field, "b64", "context", field=field)] if field else []
    return Fragment(name, text, tuple(arguments))


@pytest.mark.every(4)
@pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")
@pytest.mark.parametrize("options", [(), ("-G",)], ids=["optimized", "debug"])
def test_compiled_kernels_run_as_before_and_every_access_is_seen(options: tuple[str, ...]) -> None:
    """As many accesses of each kind, and arrivals at barriers, as the accumulators count instructions; the same results."""
    spec = importlib.util.spec_from_file_location(
        "inject_runs", Path(__file__).parent / "test_inject_runs.py"
    )
    assert spec is not None and spec.loader is not None
    runs_module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runs_module)
    chosen = (
        "calls|localTable"
        if options
        else "vectorAdd|reduce|calls|leaves|early|histogram|variables|groups|exitsBy"
    )
    kernels = {name: launch for name, launch in runs_module.LAUNCHES.items() if re.search(chosen, name)}
    source = (Path(__file__).parent / "corpus.cu").read_text()
    text = re.sub("_INTERNAL_[0-9a-f]+", "_INTERNAL_0", compile_cuda(source, *options))
    application = parse(text)
    kept = tuple(i for i in application.items if getattr(i, "kind", "func") == "func" or i.name in kernels)
    run = Run(
        render(replace(application, items=kept)),
        [
            Probe(counter("access", "seen", "kind"), "access"),
            Probe(counter("value", "valued", "kind"), "value"),
            Probe(counter("basic_block", "entered"), "basic_block"),
            Probe(counter("barrier_arrive", "arrived"), "barrier_arrive"),
            Probe(counter("barrier_leave", "released"), "barrier_leave"),
            Probe(counter("function_entry", "called"), "function_entry"),
            Probe(counter("function_exit", "returned"), "function_exit"),
            *(Probe(tally(kind), "exit", kind) for kind in (*KINDS, "barriers", "blocks")),
        ],
    )
    total: Counter[str] = Counter()
    for kernel, (grid, block, shared, parameters) in kernels.items():
        before = {name: place.copy() for name, place in run.variables.items()}
        results = []
        for launch in (run.original.launch, run):
            for name, place in run.variables.items():
                place[:] = before[name]
            arrays = [
                Array(np.frombuffer(runs_module.BUFFERS[p], np.uint8)) if isinstance(p, str) else p
                for p in parameters
            ]
            if launch is run:
                run(kernel, block, *arrays, grid=grid, shared=shared)
            else:
                run.original.launch(kernel, grid, block, *arrays, shared=shared)
            results.append([a.host.copy() for a in arrays if isinstance(a, Array)])
        assert all((a == b).all() for a, b in zip(*results, strict=True)), kernel
        work = {
            kind: int(run.maps[kind].host[1 : 2 * grid * block : 2].sum())
            for kind in (*KINDS, "barriers", "blocks")
        }
        seen, valued = (
            dict(zip(KINDS, map(int, run.maps[name].host[:3]), strict=True)) for name in ("seen", "valued")
        )
        entered = int(run.maps["entered"].host[0])
        words = {name: int(run.maps[name].host[0]) for name in ("arrived", "released", "called", "returned")}
        assert seen == valued == {kind: work[kind] for kind in KINDS}, kernel
        assert entered == work["blocks"] > 0, kernel
        assert words["arrived"] == words["released"] == work["barriers"], kernel
        assert words["called"] == words["returned"] or "leaves" in kernel or "exits" in kernel, kernel
        total.update(seen | words)
    assert min(total[kind] for kind in total if not options or kind in ("loads", "stores")) > 0


def test_parameters_are_no_memory_and_clusters_have_shared_memory(tmp_path: Path) -> None:
    text = """.version 8.3\n.target sm_90\n.address_size 64
.shared .align 8 .b8 cells[64];
.visible .entry k(.param .u64 p, .param .u32 n) {
    .reg .b32 %r<9>; .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [p];
    mov.b64 %rd2, n;
    cvta.param.u64 %rd3, %rd2;
    ld.u32 %r1, [%rd3];
    ld.u32 %r2, [%rd1];
    mov.u64 %rd4, cells;
    cvta.shared.u64 %rd5, %rd4;
    mapa.u64 %rd6, %rd5, 0;
    st.u32 [%rd6+8], %r1;
    ret;
}"""
    run = Run(text, [Probe(log("access", "log", "site", "space"), "access")])
    run("k", 4, Array(np.zeros(4, np.uint32)), struct.pack("<I", 7))
    spaces = {"ld.u32 %r2, [%rd1": 0, "st.u32 [%rd6+8": 1}
    lines = by_text(text, run.sites("k"))
    assert run.records(2) == sorted((t, lines[line][0], s) for t in range(4) for line, s in spaces.items())
    assembled(run.injected.text, "sm_90", tmp_path)


def test_a_pragma_stays_with_its_load_behind_the_probe(tmp_path: Path) -> None:
    text = f"""{HEAD}.visible .entry k(.param .u64 p) {{ .reg .b32 %r<6>; .reg .pred %p<2>; .reg .b64 %rd<2>;
ld.param.u64 %rd1, [p]; setp.eq.u64 %p1, %rd1, 5; .pragma "used_bytes_mask 0xfff";
@%p1 ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd1]; st.global.u32 [%rd1], %r1; ret; }}"""
    injected = inject(parse(text), {"k": [Probe(log("access"), "access"), Probe(tally(), "exit", "loads")]})
    lines = injected.text.splitlines()
    at = next(i for i, line in enumerate(lines) if "used_bytes_mask" in line)
    assert "ld.global.v4" in lines[at + 1] and lines[at - 2].strip() == "//gpubpf}"
    assert len(injected.kernels["k"].sites) == 3
    assembled(injected.text, "sm_80", tmp_path)


def test_injecting_takes_time_in_proportion_to_the_kernel() -> None:
    """An application waits for it."""
    program = log("access")
    long = replace(program, ptx=program.ptx.replace("$L_full:", "add.u32 %r1, %r1, 1;\n" * 300 + "$L_full:"))

    def taken(pairs: int) -> float:
        body = "".join(
            f"ld.global.f32 %f1, [%rd1+{4 * n}];\nst.shared.f32 [%r1+{4 * n % 64}], %f1;\n"
            for n in range(pairs)
        )
        text = f"""{HEAD}.visible .entry k(.param .u64 p) {{ .reg .f32 %f<2>; .reg .b32 %r<2>; .reg .b64 %rd<2>;
{body} ret; }}"""
        probes = {"k": [Probe(long, "access"), Probe(tally(), "exit", "stores")]}
        start = time.thread_time()
        injected = inject(parse(text), probes)
        assert injected.kernels["k"].site_count == 2 * pairs + 1
        return time.thread_time() - start

    few = min(taken(100) for _ in range(3))
    assert taken(1000) < 30 * few
