"""Programs between an instruction that sets the carry and one that adds it: the application's sums stay as they are."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array, Device
from gpubpf.ebpf.probe import Probe
from gpubpf.inject import body, plan
from gpubpf.inject.inject import inject
from gpubpf.lower.fragment import Argument, Fragment
from gpubpf.ptx.carry import Carry, live_carry
from gpubpf.ptx.flow import Flow
from gpubpf.ptx.parser import parse
from gpubpf_fragments import log
from gpubpf_points import HEAD, Run
from gpubpf_sass import assembled, sass

WORDS = 8
THREADS = 40
# Sums and differences of numbers of 8 words of 32 bits: the carry is live at loads, stores, atomics, barriers, branches, an exit
# that is not taken, and the loop's branch back. Behind the last word of each result comes the carry.
KERNEL = f"""{HEAD}
.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 sums, .param .u64 differences, .param .u64 cells) {{
    .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<5>; .reg .f32 %f<5>;
    ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [sums]; ld.param.u64 %rd4, [differences];
    ld.param.u64 %rd5, [cells];
    mov.u32 %r1, %tid.x; setp.gt.u32 %p1, %r1, 1000; setp.lt.u32 %p2, %r1, 20;
    mul.wide.u32 %rd6, %r1, {4 * WORDS}; add.u64 %rd1, %rd1, %rd6; add.u64 %rd2, %rd2, %rd6;
    mul.wide.u32 %rd6, %r1, {4 * WORDS + 4}; add.u64 %rd3, %rd3, %rd6; add.u64 %rd4, %rd4, %rd6;
    mov.u32 %r2, 0; mov.f32 %f1, 0f3F800000;
    add.cc.u32 %r3, 0, 0;
turn:
    ld.global.u32 %r4, [%rd1];
    ld.global.u32 %r5, [%rd2];
    @%p1 exit;
    addc.cc.u32 %r6, %r4, %r5;
    st.global.u32 [%rd3], %r6;
    bar.sync 0;
    add.f32 %f1, %f1, %f1;
    @%p2 bra over;
    atom.global.add.u32 %r7, [%rd5], 1;
    add.u32 %r8, %r7, %r7;
over:
    add.u64 %rd1, %rd1, 4; add.u64 %rd2, %rd2, 4; add.u64 %rd3, %rd3, 4;
    add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, {WORDS}; @%p3 bra turn;
    addc.u32 %r6, 0, 0;
    st.global.u32 [%rd3], %r6;
    sub.u64 %rd1, %rd1, {4 * WORDS}; sub.u64 %rd2, %rd2, {4 * WORDS}; mov.u32 %r2, 0;
    sub.cc.u32 %r3, 0, 0;
again:
    ld.global.v2.u32 {{%r4, %r9}}, [%rd1];
    ld.global.v2.u32 {{%r5, %r10}}, [%rd2];
    subc.cc.u32 %r6, %r4, %r5;
    st.global.u32 [%rd4], %r6;
    subc.cc.u32 %r6, %r9, %r10;
    st.global.u32 [%rd4+4], %r6;
    add.u64 %rd1, %rd1, 8; add.u64 %rd2, %rd2, 8; add.u64 %rd4, %rd4, 8;
    add.u32 %r2, %r2, 2; setp.lt.u32 %p3, %r2, {WORDS}; @%p3 bra again;
    subc.u32 %r6, 0, 0;
    st.global.u32 [%rd4], %r6;
    ret;
}}
"""
COUNT = "red.global.add.u64 [%gpubpf_counts], 1;"
PROGRAMS = {
    "sets": "add.u32 %r1, %r1, 1; add.cc.u32 %r1, %r1, 4294967295;",
    "clears": "add.cc.u32 %r1, %r1, 1;",
    "calls": "",
}
POINTS = (
    "access",
    "value",
    "basic_block",
    "branch",
    "barrier_arrive",
    "barrier_leave",
    "float",
    "instruction",
    "exit",
)


def counting(program: str) -> Fragment:
    return Fragment(
        "count",
        f"{{\n.reg .b32 %r1;\nmov.u32 %r1, %laneid;\n{PROGRAMS[program]}\n{COUNT}\n}}",
        (Argument("counts", "b64", "map_base", "counts"),),
    )


def numbers(device: Array) -> list[int]:
    return [int.from_bytes(row.tobytes(), "little") for row in device.host]


@pytest.mark.parametrize("program", PROGRAMS)
def test_sums_are_those_of_the_application(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program at each point, whether it leaves a carry, leaves none, or is a call."""
    if program == "calls":
        monkeypatch.setattr(plan, "MAX_INLINE", 0)
        monkeypatch.setattr(plan, "MIN_FUNCTION", 0)
    fragment = counting(program)
    run = Run(KERNEL, [Probe(fragment, point) for point in POINTS])
    assert ("call gpubpf_program0" in run.injected.text) == (program == "calls")
    assert {site.point for site in run.injected.kernels["k"].sites} == set(POINTS)
    generator = random.Random(1)
    top = 2 ** (32 * WORDS) - 1
    a, b = (
        [generator.choice((0, 1, top, generator.randint(0, top))) for _ in range(THREADS)] for _ in range(2)
    )
    given = [Array(np.array([list(n.to_bytes(4 * WORDS, "little")) for n in of], np.uint8)) for of in (a, b)]
    sums, differences = (Array(np.zeros((THREADS, WORDS + 1), np.uint32)) for _ in range(2))
    run("k", THREADS, *given, sums, differences, Array(np.zeros(4, np.uint32)), seed=1)
    assert numbers(sums) == [x + y for x, y in zip(a, b, strict=True)]
    assert numbers(differences) == [(x - y) % 2 ** (32 * WORDS + 32) for x, y in zip(a, b, strict=True)]


def test_what_instructions_with_the_carry_compute() -> None:
    run = Run(
        f"""{HEAD}
.visible .entry k(.param .u64 out) {{
    .reg .b32 %r<9>; .reg .b64 %rd1; ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x;
    sub.cc.u32 %r2, %r1, 2; subc.cc.u32 %r3, 7, %r1; madc.lo.cc.u32 %r4, %r1, 3, 4294967295; addc.u32 %r5, 0, 0;
    st.global.u32 [%rd1], %r5; ret; }}""",
        [Probe(log("instruction", "log", "site", "low"), "instruction", opcodes=("*.cc", "addc"))],
    )
    run("k", 4, Array(np.zeros(1, np.uint32)), seed=1)
    opcodes = {number: site.opcode for number, site in run.sites("k").items()}
    # The second lends from 7 - t if t < 2, and never borrows. The third adds the carry of that, 1.
    expected = [
        (t, opcode, value % 2**32)
        for t in range(4)
        for opcode, value in (
            ("sub.cc.u32", t - 2),
            ("subc.cc.u32", 7 - t - (t < 2)),
            ("madc.lo.cc.u32", 3 * t),
            ("addc.u32", 1),
        )
    ]
    found = [(thread, opcodes[site], low) for thread, site, low in run.records(2)]
    assert sorted(found) == sorted(expected)


def test_the_device_loses_the_carry_in_a_call_in_hostile_mode() -> None:
    device = Device(
        f"""{HEAD}
.func nothing() {{ ret; }}
.visible .entry k(.param .u64 out) {{
    .reg .b32 %r<4>; .reg .b64 %rd1; ld.param.u64 %rd1, [out];
    add.cc.u32 %r1, 1, 4294967295; call nothing; addc.u32 %r2, 0, 0; add.cc.u32 %r1, 1, 1; call nothing; addc.u32 %r3, 0, 0;
    st.global.v2.u32 [%rd1], {{%r2, %r3}}; ret; }}"""
    )
    out = Array(np.zeros(2, np.uint32))
    device.launch("k", 1, 1, out)
    assert out.host.tolist() == [1, 0]
    device.launch("k", 1, 1, out, seed=1)
    assert out.host.tolist() == [0, 1]


def live(body: str) -> tuple[list[str], list[str]]:
    """The instructions before and after which the carry is live; registers are numbered in their order."""
    flow = Flow(
        parse(f"{HEAD}.visible .entry k() {{ .reg .b32 %r<9>; .reg .pred %p1; {body} }}").functions["k"].body
        or ()
    )
    carry = live_carry(flow)
    return tuple(
        [str(flow.instruction(i)).split()[0].rstrip(";") for i in sorted(of)]
        for of in (carry.before, carry.after)
    )


@pytest.mark.parametrize(
    ("body", "before", "after"),
    [
        ("add.u32 %r1, %r1, 1; add.cc.u32 %r1, %r2, %r3; ret;", "", ""),
        (
            "mov.u32 %r1, 5; add.cc.u32 %r1, %r2, %r3; bar.sync 0; addc.u32 %r4, 0, 0; mul.lo.u32 %r4, %r4, 3; ret;",
            "bar.sync addc.u32",
            "add.cc.u32 bar.sync",
        ),
        # one that may not set it does not end the life of the former carry
        (
            "sub.cc.u32 %r1, %r2, %r3; @%p1 add.cc.u32 %r1, %r1, %r3; madc.lo.u32 %r4, %r1, 2, 3; ret;",
            "@%p1 madc.lo.u32",
            "sub.cc.u32 @%p1",
        ),
        # one way out of a branch needs it
        (
            "add.cc.u32 %r1, %r2, %r3; @%p1 bra other; abs.s32 %r4, %r1; ret; other: neg.s32 %r5, %r1; addc.u32 %r6, 0, 0; ret;",
            "@%p1 neg.s32 addc.u32",
            "add.cc.u32 neg.s32",
        ),
        # around a loop
        (
            "add.cc.u32 %r1, %r2, %r3; turn: addc.cc.u32 %r2, %r2, %r3; abs.s32 %r4, %r1; @%p1 bra turn; ret;",
            "addc.cc.u32 abs.s32 @%p1",
            "add.cc.u32 addc.cc.u32 abs.s32",
        ),
        # a call ends it
        ("add.cc.u32 %r1, %r2, %r3; call f; subc.u32 %r4, 0, 0; ret;", "subc.u32", "call"),
    ],
)
def test_where_the_carry_is_live(body: str, before: str, after: str) -> None:
    assert live(body) == (before.split(), after.split())


@pytest.mark.every(2)
@pytest.mark.parametrize(("operation", "sm"), [("add", "sm_75"), ("sub", "sm_90")])
def test_ptxas_keeps_the_carry_in_its_predicate(
    operation: str, sm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second sum adds the carry of the first, whatever the program adds, and no instruction saves or restores it."""
    text = f"""{HEAD.replace("8.3", "8.7").replace("sm_80", sm)}
.visible .entry k(.param .u64 p) {{
    .reg .b32 %r<9>; .reg .b64 %rd1; ld.param.u64 %rd1, [p]; ld.global.v2.u32 {{%r1, %r2}}, [%rd1];
    {operation}.cc.u32 %r3, %r1, %r2;
    ld.global.v2.u32 {{%r4, %r5}}, [%rd1+8];
    {operation}c.u32 %r6, %r4, %r5; st.global.v2.u32 [%rd1], {{%r3, %r6}}; ret; }}"""

    def instructions(program: str) -> list[str]:
        injected = inject(parse(text), {"k": [Probe(counting(program), "access")]})
        return sass(assembled(injected.text, sm, tmp_path)[0])["k"]

    for program in PROGRAMS:
        code = instructions(program)
        (carry,) = (m[1] for line in code if (m := re.search(r"IADD3 R\d+, (P\d),.*, -?R\d+", line)))
        (added,) = (line for line in code if re.search(r"(IADD3|IMAD)\.X R\d+.*, ~?R\d+", line))
        assert re.search(rf"\b{carry}\b", added), code
    monkeypatch.setattr(body, "live_carry", lambda flow: Carry())
    plain = instructions("calls")  # which is inline here
    assert len(plain) == len(code)
