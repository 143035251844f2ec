"""Heads of loops, against their definition; and what decides whether a loop ends."""

from __future__ import annotations

import random

import pytest

from gpubpf.ptx.flow import Flow
from gpubpf.ptx.loops import COUNTS, MBARRIER, NEVER, VALUE, Loops
from gpubpf.ptx.parser import parse

HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 p, .param .u32 n)\n{\n"
REGISTERS = ".reg .pred %p<9>;\n.reg .b32 %r<99>;\n.reg .b64 %rd<9>;\nld.param.u64 %rd1, [p];\nld.param.u32 %r9, [n];\n"


def flow_of(body: str) -> Flow:
    return Flow(parse(HEAD + REGISTERS + body + "\nret;\n}\n").functions["k"].body or ())


def loops_of(body: str) -> Loops:
    return Loops(flow_of(body))


def test_every_cycle_passes_a_head() -> None:
    chosen = random.Random(5)
    for _ in range(100):
        count = chosen.randint(1, 12)
        lines = []
        for number in range(count):
            lines.append(f"L{number}: add.s32 %r1, %r1, 1;")
            for _ in range(chosen.randint(0, 2)):
                lines.append(f"@%p{chosen.randint(1, 8)} bra L{chosen.randrange(count)};")
        flow = flow_of("\n".join(lines))
        heads = set(Loops(flow).ends)
        plain = {n for n, block in enumerate(flow.blocks) if block.instructions[0] not in heads}
        ways = {n: [one for one in flow.blocks[n].successors if one in plain] for n in plain}
        while leaves := [n for n in ways if not any(one in ways for one in ways[n])]:
            for n in leaves:
                del ways[n]
        assert not ways  # without the heads, no cycle is left
        on_cycles = {flow.blocks[n].instructions[0] for n in flow.cycles}
        assert heads <= on_cycles


POLL = "L1: ld.volatile.global.u32 %r1, [%rd1]; setp.eq.s32 %p1, %r1, 0; @%p1 bra L1;"
# name → body, what ends its loops in their order, how many loads and atomics decide.
CASES: dict[str, tuple[str, list[str], int]] = {
    "a loop without a way out": ("L1: add.s32 %r1, %r1, 1; bra L1;", [NEVER], 0),
    "a condition that no turn changes": (
        "L1: add.s32 %r1, %r1, 1; setp.eq.s32 %p1, %r9, 0; @%p1 bra L1;",
        [""],
        0,
    ),
    "a counter": ("L1: add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, %r9; @%p1 bra L1;", [COUNTS], 0),
    "a flag": (POLL, [VALUE], 1),
    "a flag that is loaded without volatile": (POLL.replace("volatile.", ""), [VALUE], 1),
    "a flag with a growing pause": (
        "L1: nanosleep.u32 %r3; shl.b32 %r3, %r3, 1; " + POLL.removeprefix("L1: "),
        [VALUE],
        1,
    ),
    "a lock": (
        "L1: atom.global.cas.b32 %r1, [%rd1], 0, 1; setp.ne.s32 %p1, %r1, 0; @%p1 bra L1;",
        [VALUE],
        1,
    ),
    "two flags": (
        "L1: ld.volatile.global.u32 %r1, [%rd1]; setp.ne.s32 %p1, %r1, 0; @%p1 bra L2;"
        " ld.volatile.global.u32 %r2, [%rd1+4]; setp.eq.s32 %p2, %r2, 0; @%p2 bra L1; L2:",
        [VALUE],
        2,
    ),
    "a flag or a counter": (
        "L1: ld.volatile.global.u32 %r1, [%rd1]; setp.ne.s32 %p1, %r1, 0; @%p1 bra L2;"
        " add.s32 %r2, %r2, 1; setp.lt.s32 %p2, %r2, 100; @%p2 bra L1; L2:",
        [COUNTS],
        0,
    ),
    "work until a flag": ("L1: st.global.u32 [%rd1+8], %r7; " + POLL.removeprefix("L1: "), [""], 0),
    "a flag with a loop as a pause": (
        "L1: mov.b32 %r2, 0; L2: add.s32 %r2, %r2, 1; setp.lt.s32 %p2, %r2, 100; @%p2 bra L2; "
        + POLL.removeprefix("L1: "),
        ["", ""],
        0,
    ),
    "loops that count in a loop that counts": (
        "L1: mov.b32 %r2, 0; L2: add.s32 %r2, %r2, 1; setp.lt.s32 %p2, %r2, 100; @%p2 bra L2;"
        " add.s32 %r3, %r3, 1; setp.lt.s32 %p1, %r3, %r9; @%p1 bra L1;",
        [COUNTS, COUNTS],
        0,
    ),
    "an mbarrier": (
        "L1: mbarrier.try_wait.parity.shared.b64 %p1, [%r4], 0; @!%p1 bra L1;",
        [MBARRIER],
        0,
    ),
    "a clock": ("L1: mov.u32 %r1, %clock; setp.lt.u32 %p1, %r1, %r9; @%p1 bra L1;", [""], 0),
    "a variable in local memory": (
        "L1: ld.local.u32 %r1, [%r5]; setp.lt.u32 %p1, %r1, %r9; @%p1 bra L1;",
        [""],
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_ends_a_loop(name: str) -> None:
    body, ends, polled = CASES[name]
    loops = loops_of(body)
    assert list(dict(sorted(loops.ends.items())).values()) == ends
    assert len(loops.polled) == polled
