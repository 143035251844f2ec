"""What programs are told of instructions that compute: by form, by ptxas, and by execution on the embedded device's engine."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array
from gpubpf.ebpf.bytecode import CONTEXTS, FLOAT_OPERATIONS, TYPES
from gpubpf.ebpf.probe import Probe
from gpubpf.inject.computation import computation, is_chosen, unseen_float
from gpubpf.inject.inject import inject
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.ptx.module import PtxInstruction
from gpubpf.ptx.parser import parse
from gpubpf_fragments import log
from gpubpf_points import HEAD, Run
from gpubpf_sass import assembled


def parsed(text: str) -> PtxInstruction:
    body = parse(f"{HEAD}.visible .entry k() {{ {text} }}").functions["k"].body
    assert body is not None
    (instruction,) = (s for s in body if isinstance(s, PtxInstruction))
    return instruction


# --- forms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "type_", "operand_type", "written", "read", "operation"),
    [
        ("add.f32 %f1, %f1, 0f3F800000;", "f32", "f32", "%f1", "%f1, 0f3F800000", "add"),
        ("fma.rn.ftz.f32 %f1, %f2, %f3, %f4;", "f32", "f32", "%f1", "%f2, %f3, %f4", "fma"),
        ("mad.rn.f64 %d1, %d2, %d3, %d4;", "f64", "f64", "%d1", "%d2, %d3, %d4", "fma"),
        ("mad.lo.s32 %r1, %r2, %r3, -1;", "s32", "s32", "%r1", "%r2, %r3, -1", ""),
        ("mul.wide.s32 %rd1, %r2, 4;", "s64", "s32", "%rd1", "%r2, 4", ""),
        ("fma.rn.bf16x2 %r1, %r2, %r3, %r4;", "bf16", "bf16", "%r1", "%r2, %r3, %r4", "fma"),
        ("mul.f32x2 %rd1, %rd2, %rd3;", "f32", "f32", "%rd1", "%rd2, %rd3", "mul"),
        ("min.NaN.xorsign.abs.f16x2 %r1, %r2, %r3;", "f16", "f16", "%r1", "%r2, %r3", "min"),
        ("ex2.approx.ftz.f32 %f1, %f2;", "f32", "f32", "%f1", "%f2", "ex2"),
        ("cvt.rn.f32.s8 %f1, %r1;", "f32", "s8", "%f1", "%r1", "cvt"),
        ("cvt.rn.bf16x2.f32 %r1, %f1, %f2;", "bf16", "f32", "%r1", "%f1, %f2", "cvt"),
        ("cvt.rna.tf32.f32 %r1, %f1;", "f32", "f32", "%r1", "%f1", "cvt"),
        ("cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2;", "b8", "f32", "%h1", "%f1, %f2", ""),
        ("cvt.rn.f16x2.e2m1x2 %r1, %h1;", "f16", "b8", "%r1", "%h1", "cvt"),
        ("cvt.rzi.s32.f32 %r1, %f1;", "s32", "f32", "%r1", "%f1", ""),
        ("setp.lt.and.f32 %p1|%p2, %f1, %f2, !%p3;", "pred", "f32", "%p1", "%f1, %f2, !%p3", ""),
        ("vmad.u32.s32.u32.sat.shr7 %r1, -%r2.h0, %r3.b3, %r4;", "u32", "s32", "%r1", "%r2, %r3, %r4", ""),
        ("vadd4.s32.u32.u32.sat %r1.b320, %r2.b7001, %r3, %r4;", "s32", "u32", "%r1", "%r2, %r3, %r4", ""),
        ("vset2.u32.u32.ne.add %r1.h1, %r2.h30, %r2, %r4;", "u32", "u32", "%r1", "%r2, %r2, %r4", ""),
        ("setp.lt.s32 _|%p2, %r1, 5;", "pred", "s32", "%p2", "%r1, 5", ""),
        ("selp.f32 %f1, %f2, 0f00000000, %p1;", "f32", "f32", "%f1", "%f2, 0f00000000, %p1", ""),
        ("slct.f32.s32 %f1, %f2, %f3, %r1;", "f32", "f32", "%f1", "%f2, %f3, %r1", ""),
        (
            "tex.2d.v4.f32.f32 {%f1, %f2, _, _}, [%rd1, {%f5, %f6}];",
            *("f32", "f32", "%f1 %f2 _ _", "%f5, %f6", ""),
        ),
        (
            "@%p1 tex.level.a2d.v4.u32.f32 {%r1, _, _, _}, [%rd1, {%r2, %f5, %f6, %f6}], 0f00000000;",
            *("u32", "f32", "%r1 _ _ _", "%r2, %f5, %f6, 0f00000000", ""),
        ),
        (
            "tld4.r.2d.v4.s32.f32 {%r1, %r2, %r3, %r4}, [t, {%f1, %f2}];",
            *("s32", "f32", "%r1 %r2 %r3 %r4", "%f1, %f2", ""),
        ),
        (
            "tex.1d.v4.s32.s32 {%r1, %r2, %r3, %r4}|%p1, [t, s, {%r5}];",
            "s32",
            "s32",
            "%r1 %r2 %r3 %r4",
            "%r5",
            "",
        ),
        ("suld.b.1d.b32.trap {%r1}, [%rd1, {%r2}];", "b32", "s32", "%r1", "%r2", ""),
        (
            "sust.b.3d.b16.trap [%rd1, {%r1, %r2, %r3, %r3}], {%h1};",
            "b16",
            "s32",
            "",
            "%r1, %r2, %r3, %h1",
            "",
        ),
        ("sured.b.add.2d.u32.trap [%rd1, {%r1, %r2}], %r3;", "u32", "s32", "", "%r1, %r2, %r3", ""),
        ("popc.b64 %r1, %rd1;", "u32", "b64", "%r1", "%rd1", ""),
        ("vshr.s32.u32.u32.clamp.add %r1, %r2.b3, %r3.h1, 4;", "s32", "u32", "%r1", "%r2, %r3, 4", ""),
        ("vadd.u32.s32.u32 %r1.h0, %r2, %r3.b0, %r4;", "u32", "s32", "%r1", "%r2, %r3, %r4", ""),
        ("mov.b64 {%r1, _}, %rd1;", "b64", "b64", "%r1 _", "%rd1", ""),
        ("mov.u32 %r1, %tid.x;", "u32", "u32", "%r1", "%tid.x", ""),
        ("shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1;", "b32", "b32", "%r1", "%r2, 1, 31, -1", ""),
        (
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1, %f2, %f3, %f4}, "
            "{%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f2, %f3, %f4};",
            *("f32", "f32", "%f1 %f2 %f3 %f4", "%r1 %r2 %r3 %r4, %r5 %r6, %f1 %f2 %f3 %f4", "mma"),
        ),
        (
            "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1, %r2}, {%r3, %r4, %r5, %r6}, {%r7, %r8}, {%r9, %r10};",
            *("f16", "f16", "%r1 %r2", "%r3 %r4 %r5 %r6, %r7 %r8, %r9 %r10", "mma"),
        ),
        (
            "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r1, %r2}, {%r3}, {%r4}, {%r5, %r6};",
            *("s32", "s8", "%r1 %r2", "%r3, %r4, %r5 %r6", ""),
        ),
    ],
)
def test_what_instructions_read_and_write(
    text: str, type_: str, operand_type: str, written: str, read: str, operation: str
) -> None:
    found = computation(parsed(text))
    assert found is not None
    assert (found.type, found.operand_type, found.operation) == (type_, operand_type, operation)
    assert " ".join(map(str, found.written)) == written
    assert ", ".join(" ".join(map(str, items)) for items in found.read) == read
    assert {found.type, found.operand_type} <= set(TYPES)


@pytest.mark.parametrize(
    "text",
    [
        *("ld.global.f32 %f1, [%rd1];", "st.global.f32 [%rd1], %f1;", "ld.param.f32 %f1, [p];"),
        *("atom.global.add.u32 %r1, [%rd1], %r2;", "bar.sync 0;", "barrier.cta.red.popc.u32 %r1, 0, %p1;"),
        *("atom.global.exch.b32 %r1, [%rd1], %r2;", "red.global.max.f32 [%rd1], %f2;"),
        *("bra over;", "@%p1 exit;", "ret;", "call f, (a);", "cp.async.wait_group 1;", "membar.gl;"),
        *("nanosleep.u32 100;", "wgmma.fence.sync.aligned;", "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];"),
    ],
)  # fmt: skip
def test_what_computes_nothing(text: str) -> None:
    assert computation(parsed(text)) is None and unseen_float(parsed(text)) is None


@pytest.mark.parametrize(
    "text, name",
    [
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 0;", "wgmma.mma_async"),
        ("atom.global.add.f32 %f1, [%rd1], %f2;", "atom.add.f32"),
        ("red.global.add.noftz.f16x2 [%rd1], %r1;", "red.add.f16x2"),
        ("cvt.rn.satfinite.e5m2x2.f32 %rs1, %f1, %f2;", "cvt.e5m2x2"),
        ("cvt.rn.f16x2.e5m2x2 %r1, %rs1;", None),
    ],
)  # fmt: skip
def test_floating_point_results_that_no_program_sees_have_a_name(text: str, name: str | None) -> None:
    assert unseen_float(parsed(text)) == name


def test_opcodes_are_chosen_by_globs() -> None:
    assert is_chosen((), "fma.rn.f32")
    for pattern in ("fma", "fma.rn", "fma.rn.f32", "f*", "*.f32", "fma.*.f32"):
        assert is_chosen(("mul", pattern), "fma.rn.f32"), pattern
    for pattern in ("fm", "fma.r", "FMA", "rn", "f32"):
        assert not is_chosen((pattern,), "fma.rn.f32"), pattern


# --- executed -----------------------------------------------------------------------------------------

# Each marked line is known: its results and operands are computed below by other means.
KERNEL = f"""{HEAD}
.visible .entry k(.param .u64 p) {{
    .reg .pred %p<6>; .reg .b16 %h<6>; .reg .b32 %r<16>; .reg .f32 %f<8>; .reg .b64 %rd<9>; .reg .f64 %d<4>;
    .reg .v2 .f32 %v; .reg .v2.b32 %w;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, %tid.x;                      //? special
    cvt.rn.f32.u32 %f1, %r1;                  //? convert
    add.f32 %f1, %f1, 0f3F000000;             //? overwritten
    mul.f32 %f1, %f1, %f1;                    //? squared
    fma.rn.f32 %f2, %f1, 0fBF800000, %f1;     //? zero
    setp.gt.u32 %p1, %r1, 9;                  //? compared
    @%p1 sqrt.rn.f32 %f1, %f1;                //? predicated
    @!%p1 neg.f32 %f1, %f1;                   //? negated
    @%p1 setp.gt.u32 %p1, %r1, 20;            //? own predicate
    selp.b32 %r2, %r1, -1, %p1;               //? selected
    cvt.rn.f16.f32 %h1, %f2;                  //? half
    mov.b32 %r3, 0x3C004000;                  // {{2, 1}}
    add.f16x2 %r3, %r3, %r3;                  //? pair
    mov.b32 {{%h2, _}}, %r3;                  //? unpacked
    cvt.f64.f32 %d1, %f1;                     //? widened
    div.rn.f64 %d1, %d1, 0d4000000000000000;  //? halved
    mul.wide.s32 %rd2, %r2, -3;               //? wide
    mov.f32 %v.x, %f1;                        //? component
    max.f32 %f3, %v.x, 0f00000000;            //? maximum
    mov.b64 %w, %rd2;                         //? parts
    mov.b64 %rd3, %w;                         //? parts put together
    ret; }}"""


def bits(form: str, *values: float) -> int:
    return int.from_bytes(struct.pack("<" + form, *values), "little")


def rows() -> dict[str, Callable[[int], tuple[int, ...] | None]]:
    """Return for each mark: thread → low, operands, operand0, operand1, operand2; None: it does not run there."""
    one = np.float32(1)

    def base(t: int) -> np.float32:
        return (np.float32(t) + np.float32(0.5)) * one

    def square(t: int) -> np.float32:
        return base(t) * base(t)

    def after(t: int) -> np.float32:  # the value of %f1 from there on
        return base(t) if t > 9 else -square(t)

    def kept(t: int) -> int:
        return t if t > 20 else 2**32 - 1

    def product(t: int) -> int:
        return -3 * (t if t > 20 else -1) % 2**64

    def single(value: float) -> int:
        return bits("f", value)

    minus = bits("f", -1)
    return {
        "special": lambda t: (t, 1, 0, 0, 0),
        "convert": lambda t: (single(t), 1, t, 0, 0),
        "overwritten": lambda t: (single(base(t)), 2, single(t), single(0.5), 0),
        "squared": lambda t: (single(square(t)), 2, single(base(t)), single(base(t)), 0),
        "zero": lambda t: (0, 3, single(square(t)), minus, single(square(t))),
        "compared": lambda t: (int(t > 9), 2, t, 9, 0),
        "predicated": lambda t: (single(base(t)), 1, single(square(t)), 0, 0) if t > 9 else None,
        "negated": lambda t: (single(-square(t)), 1, single(square(t)), 0, 0) if t <= 9 else None,
        "own predicate": lambda t: (int(t > 20), 2, t, 20, 0) if t > 9 else None,
        "selected": lambda t: (kept(t), 3, t, 2**32 - 1, int(t > 20)),
        "half": lambda t: (0, 1, 0, 0, 0),
        "pair": lambda t: (bits("ee", 4, 2), 2, bits("ee", 2, 1), bits("ee", 2, 1), 0),
        "unpacked": lambda t: (bits("e", 4), 1, bits("ee", 4, 2), 0, 0),
        "widened": lambda t: (bits("d", after(t)), 1, single(after(t)), 0, 0),
        "halved": lambda t: (bits("d", after(t) / 2), 2, bits("d", after(t)), bits("d", 2), 0),
        "wide": lambda t: (product(t), 2, kept(t), 2**32 - 3, 0),
        "component": lambda t: (single(after(t)), 1, single(after(t)), 0, 0),
        "maximum": lambda t: (single(max(after(t), 0)), 2, single(after(t)), 0, 0),
        "parts": lambda t: (product(t), 1, product(t), 0, 0),
        "parts put together": lambda t: (product(t), 1, product(t), 0, 0),
    }


@pytest.mark.parametrize("point", ["instruction", "float"])
def test_programs_are_told_what_was_read_and_written(point: str) -> None:
    """Also where the instruction overwrites what it reads, or its own predicate."""
    told = ("site", "low", "operands", "operand0", "operand1", "operand2")
    run = Run(KERNEL, [Probe(log(point, "log", *told), point)])
    run("k", 32, Array(np.zeros(32, np.uint32)))
    sites = run.sites("k")
    marks = {
        number: match[1]
        for number, line in enumerate(KERNEL.split("\n"), 1)
        if (match := re.search(r"//\? (.*)", line))
    }
    found: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for thread, site, *rest in run.records(6):
        if sites[site].line in marks:
            assert thread not in found[marks[sites[site].line]]
            found[marks[sites[site].line]][thread] = tuple(rest)
    integers = {"special", "compared", "own predicate", "selected", "unpacked", "wide", "component", "parts"}
    integers.add("parts put together")
    for mark, row in rows().items():
        right = {t: told for t in range(32) if (told := row(t)) is not None}
        if point == "instruction" or mark not in integers:
            assert found.pop(mark) == right, mark
    assert not found
    assert run.injected.kernels["k"].unprobed == {}


def test_results_of_matrices_have_a_site_for_each_16_bytes() -> None:
    """The product is that of zeros, so each result is what was added, which the instruction overwrites."""
    eight, zeros = (
        ", ".join(f"{name}{n}" for n in numbers) for name, numbers in (("%f", range(8)), ("%r", [9] * 8))
    )
    text = f"""{HEAD}
.visible .entry k() {{
    .reg .f32 %f<8>; .reg .b32 %r<10>;
    mov.u32 %r9, %laneid; cvt.rn.f32.u32 %f0, %r9; mov.b32 %r9, 0;
    {" ".join(f"add.f32 %f{n}, %f{n - 1}, 0f42800000;" for n in range(1, 8))}
    wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {{{eight}}}, {{{zeros}}}, {{{zeros}}}, {{{eight}}};
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
        {{%f0, %f1, %f2, %f3}}, {{%r9, %r9, %r9, %r9}}, {{%r9, %r9}}, {{%f0, %f1, %f2, %f3}};
    ret; }}"""
    fields = ("site", "operation", "low", "high", "operands", "operand1", "operand2")
    run = Run(text, [Probe(log("float", "log", *fields), "float", opcodes=("*mma",))])
    run("k", 32)
    sites = run.sites("k")
    assert [site.opcode.partition(".")[0] for site in sites.values()] == ["wmma", "wmma", "mma"]
    first = min(sites)
    mma = FLOAT_OPERATIONS.index("mma")
    assert run.records(7) == [
        (
            t,
            first + n,
            mma,
            *(bits("ff", t + 64 * at, t + 64 * (at + 1)) for at in (start, start + 2)),
            3,
            0,
            bits("ff", t, t + 64),
        )
        for t in range(32)
        for n, start in enumerate((0, 4, 0))
    ]


def test_what_is_computed_on_ways_out() -> None:
    """Each way out gets a copy of the instructions before the common return, with programs of its own."""
    text = f"""{HEAD}
.visible .entry k() {{
    .reg .pred %p; .reg .f32 %f<3>; .reg .b32 %r1;
    mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %f1, %r1;
    setp.lt.u32 %p, %r1, 5; @%p bra out;
    neg.f32 %f1, %f1;
    setp.lt.u32 %p, %r1, 9; @%p bra out;
    neg.f32 %f1, %f1;
    out: add.f32 %f2, %f1, 0f3F800000;
    ret; }}"""
    probes = [
        Probe(log("float", "log", "low"), "float", opcodes=("add",)),
        Probe(log("exit", "left"), "exit"),
    ]
    run = Run(text, probes)
    run("k", 32)
    assert len([site for site in run.sites("k").values() if site.point == "float"]) == 3
    assert run.records(1) == [(t, bits("f", (-t if 5 <= t < 9 else t) + 1)) for t in range(32)]


# --- assembled ----------------------------------------------------------------------------------------

FORMS = """
    mov.u32 %r1, %tid.x; mov.u64 %rd1, %clock64; mov.u32 %r2, memory; mov.u64 %rd2, memory+4; mov.b32 %r3, {%h1, %h2};
    mov.b32 {%h1, %h2}, %r3; mov.b64 %rd3, {%r1, 7}; mov.b64 {%r1, _}, %rd3; mov.pred %p1, %p2; mov.f64 %d1, 0d3FF0000000000000;
    mov.b16 %h3, 7; mov.b32 %r4, -5; mov.f32 %f1, 1.5; mov.b128 %q1, {%rd1, %rd2}; mov.b128 {%rd1, %rd2}, %q1;
    cvt.rn.f32.s8 %f1, %r1; cvt.rn.f16.f32 %h1, %f1; cvt.f64.f32 %d1, %f2; cvt.rn.f16x2.f32 %r5, %f1, %f2;
    cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2; cvt.rna.tf32.f32 %r1, %f1; cvt.u8.u32 %r1, %r2; cvt.sat.f32.f32 %f1, %f1;
    add.f32 %f1, %f1, 0f3F800000; add.rn.f64 %d1, %d2, 2.5; add.f16 %h1, %h2, %h3; add.f16x2 %r1, %r2, %r3; sub.bf16 %h1, %h2, %h3;
    fma.rn.f32 %f1, %f2, 0f40000000, %f1; fma.rn.bf16x2 %r1, %r1, %r2, %r3; mad.rn.f32 %f1, %f2, %f3, %f4; mul.f64 %d1, %d1, %d1;
    div.rn.f32 %f1, %f2, %f3; sqrt.rn.f64 %d1, %d2; rcp.approx.ftz.f32 %f1, %f2; rsqrt.approx.f32 %f1, %f1; ex2.approx.f16x2 %r1, %r2;
    tanh.approx.f32 %f1, %f2; sin.approx.f32 %f1, %f2; lg2.approx.f32 %f1, %f2; max.NaN.f16 %h1, %h2, %h3;
    min.f32 %f1, %f2, 0f00000000; vmad.u32.u32.u32 %r1, -%r2, %r3.h1, %r4; vadd2.u32.u32.u32.add %r1.h1, %r2, %r3.h31, %r4;
    cvta.shared.u64 %rd1, memory[%r1+1];
    abs.f32 %f1, %f2; neg.f64 %d1, %d2; copysign.f32 %f1, %f2, %f3; @%p1 add.f32 %f1, %f2, %f3; @!%p1 mul.f32 %f1, %f1, %f1;
    setp.lt.f32 %p1, %f1, %f2; setp.eq.and.s64 %p1|%p2, %rd1, -1, !%p1; @%p1 setp.ne.f16 %p1, %h1, %h2; set.lt.u32.f32 %r1, %f1, %f2;
    selp.f32 %f1, %f2, 0f00000000, %p1; slct.f32.s32 %f1, 0f3F800000, %f2, %r1; testp.normal.f32 %p1, %f1; isspacep.shared %p1, %rd1;
    mul.wide.s16 %r1, %h1, -2; mad.wide.u32 %rd1, %r1, 3, %rd2; shl.b64 %rd1, %rd1, 3; bfi.b32 %r1, %r2, %r3, 4, 5;
    lop3.b32 %r1, %r2, %r3, %r4, 0x3c;
    popc.b64 %r1, %rd1; clz.b32 %r1, %r2; bfind.s64 %r1, %rd1; prmt.b32 %r1, %r2, %r3, 0x5410; dp4a.u32.s32 %r1, %r2, %r3, %r4;
    shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1; vote.sync.any.pred %p1, !%p2, -1; match.any.sync.b64 %r1, %rd1, -1; activemask.b32 %r1;
    redux.sync.add.s32 %r1, %r2, -1; cvta.to.shared.u64 %rd1, %rd2; mapa.shared::cluster.u32 %r1, %r2, 1; elect.sync _|%p1, -1;
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f2, %f3, %f4};
    mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%r1, %r2}, {%r3, %r4}, {%r5}, {%r1, %r2};
    mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64
        {%d1, %d2, %d3, %d4}, {%d1, %d2, %d3, %d4, %d1, %d2, %d3, %d4}, {%d1, %d2, %d3, %d4}, {%d1, %d2, %d3, %d4};
    mma.sp.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1, %r2}, {%r3, %r4}, {%r5, %r6}, {%r1, %r2}, %r3, 0x0;
"""
# Adds all that it is told to a word: nothing of it can be left out.
TOLD = [field for field in CONTEXTS["instruction"] if field != "launch"]
SUM = Fragment(
    "sum",
    "{ .reg .b64 %rd<4>; mov.b64 %rd1, 0;"
    + " ".join(f"mad.lo.u64 %rd1, %rd1, 31, %gpubpf_{field};" for field in TOLD)
    + " red.global.add.u64 [%gpubpf_sums], %rd1; }",
    (
        Argument("sums", "b64", "map_base", "sums"),
        *(Argument(field, "b64", "context", field=field) for field in TOLD),
    ),
)


def test_ptxas_takes_a_probe_at_every_form(tmp_path: Path) -> None:
    text = f"""{HEAD.replace("8.3", "8.6").replace("sm_80", "sm_90")}
.visible .entry k() {{
    .reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<7>; .reg .f32 %f<5>; .reg .b64 %rd<4>; .reg .f64 %d<5>; .reg .b128 %q<2>;
    .shared .b32 memory[4];
{FORMS} ret; }}"""
    injected = inject(parse(text), {"k": [Probe(SUM, "instruction"), Probe(SUM, "float")]})
    assert not injected.refusals
    places = [site.opcode for site in injected.kernels["k"].sites if site.point == "instruction"]
    body = parse(text).functions["k"].body or ()
    assert len(set(places)) == len({s.full_name for s in body if isinstance(s, PtxInstruction)} - {"ret"})
    assembled(injected.text, "sm_90", tmp_path, "-O0")


def test_ptxas_takes_registers_of_vectors(tmp_path: Path) -> None:
    """ptxas takes the name of such a register only where it expects a vector."""
    text = f"""{HEAD}
.visible .entry k() {{
    .reg .b32 %r; .reg .b64 %rd; .reg .v2.b16 %h; .reg .v2.b32 %v; .reg .v4.u32 %q<2>; .reg .v4.b8 %c;
    mov.b32 %h, %r; mov.b32 %r, %h; mov.b64 %v, %rd; mov.b64 %rd, %v; mov.b32 %c, %r; mov.v4.u32 %q0, %q1; mov.v2.u32 %v, {{1, 2}};
    add.u32 %v.x, %v.g, 1;
    ret; }}"""
    injected = inject(parse(text), {"k": [Probe(SUM, "instruction")]})
    assert not injected.refusals and len(injected.kernels["k"].sites) == 8
    assembled(injected.text, "sm_80", tmp_path)


def test_results_that_come_later_are_named() -> None:
    text = f"""{HEAD}
.visible .entry k() {{
    .reg .f32 %f<5>; .reg .b64 %rd<3>; .reg .pred %p1;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f1, %f2, %f3, %f4}}, %rd1, %rd2, %p1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    ret; }}"""
    for point, missed in (("float", {"wgmma.mma_async": 1}), ("instruction", {})):
        kernel = inject(parse(text), {"k": [Probe(SUM, point)]}).kernels["k"]
        assert (kernel.sites, kernel.unprobed) == ((), missed)
