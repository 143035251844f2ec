"""Calls and accesses that a compiler has merged are told apart again, without a change to what the program does."""

from __future__ import annotations

import ctypes
import random

import pytest

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.helpers import number_of
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import VerifyError
from gpubpf.verify import verify
from gpubpf.verify.copies import separate
from gpubpf_asm import (
    END,
    OUT,
    Interpreter,
    Native,
    alu,
    call,
    call_program,
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

COLLECTIVE = number_of("gpu_active")
SMALL = MapDefinition("out", "array", 4, 8, 1)


def run(code, work):
    """Return the value of the map after the lowered program ran on this CPU."""
    made, function = program(code, [SMALL])
    verify(made, function)
    memory = (ctypes.c_uint64 * 3)()
    at = -(-ctypes.addressof(memory) // 16) * 16
    Native(made, function)(map_out=at, work=work)
    return ctypes.c_uint64.from_address(at).value


def merged(before=()):
    """A program that updates its map from two branches: with 5 on the stack, or for work 0 with its own value, 77."""
    code = [load(8, 1, 16), storei(10, -16, 5), *lookup("out"), storei(0, 0, 77)]
    code += [mov(2, 10), alu(b.ADD, 2, imm=-4), *load_map(1, "out"), mov(3, 10), alu(b.ADD, 3, imm=-16)]
    code += [movi(4, 0), jump(b.JNE, 8, 2, imm=0), mov(3, 0), movi(4, 2)]
    return [*code, *before, call(2), *END]


@pytest.mark.parametrize("before", [(), (movi(5, 1), movi(0, 2))], ids=["at the call", "before it"])
def test_a_call_with_memory_and_flags_by_branch(before):
    code = merged(before)
    assert (run(code, work=0), run(code, work=1)) == (77, 5)
    made, function = program(code, [SMALL])
    checked, _ = verify(made, function)
    updates = [call for call in checked.calls.values() if call.helper == 2]
    assert sorted((call.flags, call.pointers[3]) for call in updates) == [(0, "stack"), (2, "memory")]


def test_lanes_that_work_together_are_not_separated():
    kept, back = map(mov, (6, 7, 8, 9), (1, 2, 3, 4)), map(mov, (1, 2, 3, 4), (6, 7, 8, 9))
    with pytest.raises(VerifyError, match="different maps, sizes or texts on different paths"):
        run(merged([*kept, call(COLLECTIVE), *back]), 0)


def test_lanes_that_work_together_in_a_function_are_not_separated():
    """The end of `merged`, with a call of a function between, which calls another one."""
    kept, back = [mov(5 + n, n) for n in (1, 2, 3, 4)], [mov(n, 5 + n) for n in (1, 2, 3, 4)]
    for helper, together in ((COLLECTIVE, True), (number_of("gpu_clock"), False)):
        between = [*kept, call_program(len(back) + 1 + len(END)), *back]
        code = [*merged(between), movi(0, 0), call_program(len(END)), *END, call(helper), *END]
        update = max(n for n, i in enumerate(code) if i == call(2))
        assert (separate(code, update) is None) is together


def test_what_differs_only_on_the_way_to_another_block_stays_rejected():
    with pytest.raises(VerifyError, match="on different paths"):
        run(merged([ja(1), movi(0, 0)]), 0)


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_do_the_same(seed):
    """Forward jumps between random blocks; each copy is made at a random instruction."""
    rng = random.Random(seed)
    code = [*lookup("out"), jump(b.JNE, 0, 2, imm=0), *END, mov(9, 0), *(load(n, 9, 8 * n) for n in range(6))]
    length = 40
    for at in range(length):
        kind = rng.random()
        if kind < 0.3:
            code.append(
                jump(
                    rng.choice((b.JEQ, b.JGT, b.JSLT, b.JSET)),
                    rng.randrange(6),
                    rng.randrange(length - at),
                    imm=rng.randrange(4),
                )
            )
        elif kind < 0.35:
            code.append(ja(rng.randrange(length - at)))
        elif kind < 0.6:
            code.append(store(9, 64 + 8 * rng.randrange(8), rng.randrange(6)))
        else:
            code.append(alu(rng.choice((b.ADD, b.XOR, b.MUL)), rng.randrange(6), rng.randrange(6)))
    code += END
    changed, made = tuple(code), 0
    for _ in range(8):
        copied = separate(changed, rng.randrange(8, len(changed) - 2))
        changed, made = (changed, made) if copied is None else (copied, made + 1)
    assert made
    for _ in range(4):
        value = bytes(rng.choice((0, 0, 1, 2, 255)) for _ in range(OUT.value_size))
        results = [Interpreter(tuple(one), value) for one in (code, changed)]
        for one in results:
            one.run()
        assert results[0].value == results[1].value
