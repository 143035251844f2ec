"""Loops whose length is only known when the program runs: what holds in all their turns is enough, and they have a limit."""

from __future__ import annotations

import ctypes

import pytest

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf import maps
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import VerifyError
from gpubpf.lower import ir, nvptx
from gpubpf.lower.programs import verified
from gpubpf.verify import rules, verify
from gpubpf.verify.rules import check
from gpubpf_asm import (
    END,
    OUT,
    RING,
    Native,
    alu,
    call,
    ja,
    jump,
    load,
    load_map,
    lookup,
    mov,
    movi,
    program,
    store,
    storei,
)
from gpubpf_ring import Ring

MOST = 4000  # instructions that the gate follows here, to fail sooner
TOO_LONG = f"more than {MOST} instructions; bound its loops"
SUM = 8  # where a program leaves its result in the value; at 0 is the number of turns


@pytest.fixture(autouse=True)
def sooner(monkeypatch):
    monkeypatch.setattr(rules, "MAX_STEPS", MOST)


def counted(*body, turns=None):
    """r7 runs from 0 to the number of turns, which is in the value that r9 leads to; r8 is 0 at first, and then the result."""
    code = [
        *lookup("out"),
        mov(9, 0),
        load(6, 9, 0) if turns is None else movi(6, turns),
        movi(7, 0),
        movi(8, 0),
    ]
    code += [jump(b.JGE, 7, len(body) + 2, 6), *body, alu(b.ADD, 7, imm=1), ja(-len(body) - 3)]
    return [*code, store(9, SUM, 8), *END]


def run(code, turns):
    """Return the result of the lowered program on this CPU, and what it printed."""
    made, function = program(code, (OUT,))
    verify(made, function)
    prints = Ring(maps.prints_definition())
    memory = (ctypes.c_uint64 * 34)()
    at = -(-ctypes.addressof(memory) // 16) * 16
    ctypes.c_uint64.from_address(at).value = turns
    native = Native(made, function)
    native(**prints.given(map_out=at))
    return ctypes.c_uint64.from_address(at + SUM).value, list(
        maps.prints(native.module.formats, prints.take())
    )


def rejected(code, match, *more):
    made, function = program(code, (OUT, *more))
    with pytest.raises(VerifyError, match=match):
        check(made, function)


@pytest.mark.every(2)
@pytest.mark.parametrize("turns", [0, 1, 19, 20, 21, 1000, ir.LOOP_TURNS - 1])
def test_a_loop_counts_to_a_number_in_a_map(turns):
    assert run(counted(alu(b.ADD, 8, 7)), turns) == (turns * (turns - 1) // 2 if turns else 0, [])


def test_a_loop_that_takes_too_many_turns_is_stopped():
    """The program ends there, and says so."""
    said = f"device program probe: a loop was stopped after {ir.LOOP_TURNS} turns\n"
    assert run(counted(alu(b.ADD, 8, 7)), 1 << 40) == (0, [said])


def test_loops_in_loops():
    """The inner one is followed to its end in each turn of the outer one: its index stays within the value."""
    inner = [movi(1, 0), mov(2, 9), mov(3, 1), alu(b.LSH, 3, imm=3), alu(b.ADD, 2, 3), load(3, 2, 16)]
    inner += [
        alu(b.ADD, 8, 3),
        alu(b.ADD, 3, imm=1),
        store(2, 16, 3),
        alu(b.ADD, 1, imm=1),
        jump(b.JLT, 1, -10, imm=4),
    ]
    assert run(counted(*inner), 50) == (4 * sum(range(50)), [])
    both = [movi(1, 0), jump(b.JGE, 1, 3, 7), alu(b.ADD, 8, imm=1), alu(b.ADD, 1, imm=1), ja(-4)]
    assert run(counted(*both), 300) == (sum(range(300)), [])


def test_an_index_that_is_tested_in_each_turn():
    """Here what is stored depends on a bound that holds in all turns."""
    body = [
        mov(1, 7),
        alu(b.AND, 1, imm=15),
        alu(b.LSH, 1, imm=3),
        alu(b.ADD, 1, 9),
        store(1, 128, 7),
        mov(8, 7),
    ]
    assert run(counted(*body), 100) == (99, [])


def test_a_loop_with_a_constant_end_has_no_limit():
    made, function = program(counted(alu(b.ADD, 8, 7), turns=400))
    assert not verify(made, function)[0].loops
    made, function = program(counted(alu(b.ADD, 8, 7), turns=4000))
    assert len(verify(made, function)[0].loops) == 1


def test_what_changes_must_be_a_number_that_is_tested():
    index = [mov(1, 9), mov(2, 7), alu(b.LSH, 2, imm=3), alu(b.ADD, 1, 2)]
    rejected(counted(*index, store(1, 0, 8)), "reaches offset 256")
    rejected(counted(alu(b.ADD, 9, imm=8)), TOO_LONG)  # an address that moves


def test_no_record_is_held_meanwhile():
    hold = [*load_map(1, "ring"), movi(2, 8), movi(3, 0), call(131), jump(b.JEQ, 0, 8, imm=0), mov(9, 0)]
    code = [*lookup("out"), load(6, 0, 0), *hold, storei(9, 0, 1), movi(7, 0)]
    code += [jump(b.JGE, 7, 2, 6), alu(b.ADD, 7, imm=1), ja(-3), mov(1, 9), movi(2, 0), call(132), *END]
    rejected(code, TOO_LONG, RING)


def test_a_host_program_has_no_such_loops():
    code = [load(6, 1, 8), *counted(alu(b.ADD, 8, 7))]
    made, function = program(code, (MapDefinition("out", "shared_array", 4, 256, 1),), point="launch")
    with pytest.raises(VerifyError, match=TOO_LONG):
        check(made, function)


def test_what_a_gpu_gets():
    """One counter in a register, one way out."""
    made, function = program(counted(alu(b.ADD, 8, 7)))
    fragment, _ = verified(made, "probe")
    assert ".local" not in fragment.ptx and {a.map for a in fragment.arguments} == {"out", maps.PRINTS}
    assert list(fragment.formats.values()) == [
        f"device program probe: a loop was stopped after {ir.LOOP_TURNS} turns\n"
    ]
    assert nvptx.lower(made, check(made, function)) == fragment
