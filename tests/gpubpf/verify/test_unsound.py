"""Programs of which one path is harmless and another is not: the second gate must reject them, whichever path it follows first.

The harmless path comes first. A gate that then takes the two states for the same never sees the other path. The kernel's verifier
judges the same programs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import CONTEXTS, STACK_SIZE
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import VerifyError
from gpubpf.record import replace
from gpubpf.verify import kernel, rules
from gpubpf.verify.rules import check
from gpubpf.verify.values import Checked, CheckedAccess
from gpubpf_asm import (
    CONTEXT,
    END,
    HASH,
    RING,
    STACK,
    VALUE,
    Code,
    Interpreter,
    alu,
    atomic,
    call,
    call_program,
    ja,
    jump,
    leave,
    load,
    load_map,
    lookup,
    mov,
    movi,
    program,
    store,
    storei,
)

CELL = MapDefinition("cell", "array", 4, 8, 1)
TWO = MapDefinition("two", "array", 4, 16, 2)
OTHER = replace(RING, name="other")
MAPS = (CELL, TWO, HASH, RING, OTHER)
FAR = 1 << 20  # this many bytes behind a value of 8 bytes
SLOT = -64  # the stack slot that differs between the paths
# r6: the context. r7: a number that decides between the paths. r9: the value of `cell`, of 8 bytes.
START = [mov(6, 1), load(7, 6, 16), *lookup("cell"), mov(9, 0)]


def either(first: Code, second: Code) -> Code:
    """One of both, by r7. The verifier follows `first` first."""
    return [jump(b.JNE, 7, len(first) + 1, imm=0), *first, ja(len(second)), *second]


# How a program may compute the address of SLOT. Each leaves it in r2, short of the offset of its load.
ADDRESSES: dict[str, tuple[Code, int]] = {
    "directly": ([mov(2, 10)], SLOT),
    "one add": ([mov(2, 10), alu(b.ADD, 2, imm=-64)], 0),
    "an add and an offset": ([mov(2, 10), alu(b.ADD, 2, imm=-24)], -40),
    "two adds": ([mov(2, 10), alu(b.ADD, 2, imm=-24), alu(b.ADD, 2, imm=-40)], 0),
    "eight adds": ([mov(2, 10), *[alu(b.ADD, 2, imm=-8)] * 8], 0),
    "too far, then back": ([mov(2, 10), alu(b.ADD, 2, imm=-128), alu(b.ADD, 2, imm=64)], 0),
    "up, then down": ([mov(2, 10), alu(b.ADD, 2, imm=16), alu(b.ADD, 2, imm=-80)], 0),
    "a subtraction": ([mov(2, 10), alu(b.SUB, 2, imm=64)], 0),
    "a negative subtraction": ([mov(2, 10), alu(b.ADD, 2, imm=-128), alu(b.SUB, 2, imm=-64)], 0),
    "a copy": ([mov(3, 10), alu(b.ADD, 3, imm=-24), mov(2, 3), alu(b.ADD, 2, imm=-40)], 0),
    "a copy of a copy": ([mov(5, 10), mov(4, 5), alu(b.ADD, 4, imm=-8), mov(2, 4), alu(b.ADD, 2, imm=-56)], 0),
    "a number in a register": ([mov(2, 10), movi(3, -64), alu(b.ADD, 2, 3)], 0),
    "a number plus the frame": ([movi(2, -64), alu(b.ADD, 2, 10)], 0),
    "a register subtracted": ([mov(2, 10), movi(3, 64), alu(b.SUB, 2, 3)], 0),
    "a sign-extended number": (
        [mov(2, 10), alu(b.MOV, 3, imm=-64, wide=False), alu(b.MOV, 3, 3, offset=32), alu(b.ADD, 2, 3)],
        0,
    ),
    "32-bit adds": (
        [
            mov(2, 10),
            movi(3, 24),
            alu(b.ADD, 3, imm=40, wide=False),
            alu(b.SUB, 2, 3),
        ],
        0,
    ),
    "32-bit negation, shifted back": (
        [
            mov(2, 10),
            movi(3, 64),
            alu(b.NEG, 3, wide=False),
            alu(b.LSH, 3, imm=32),
            alu(b.ARSH, 3, imm=32),
            alu(b.ADD, 2, 3),
        ],
        0,
    ),
    "a product": ([mov(2, 10), movi(3, 8), alu(b.MUL, 3, imm=8), alu(b.NEG, 3), alu(b.ADD, 2, 3)], 0),
    "a spilled address": (
        [mov(2, 10), alu(b.ADD, 2, imm=-24), store(10, -40, 2), load(3, 10, -40), alu(b.ADD, 3, imm=-40), mov(2, 3)],
        0,
    ),
    "the frame spilled": ([mov(1, 10), store(10, -40, 1), load(2, 10, -40), alu(b.ADD, 2, imm=-64)], 0),
    "adds in both branches": (
        [
            mov(2, 10),
            *either([alu(b.ADD, 2, imm=-64)], [alu(b.ADD, 2, imm=-24), alu(b.ADD, 2, imm=-40)]),
        ],
        0,
    ),
    "a loop": ([mov(2, 10), movi(3, 0), alu(b.ADD, 2, imm=-8), alu(b.ADD, 3, imm=1), jump(b.JNE, 3, -3, imm=8)], 0),
    "a distance between addresses": (
        [mov(3, 10), alu(b.ADD, 3, imm=-64), alu(b.SUB, 3, 10), mov(2, 10), alu(b.ADD, 2, 3)],
        0,
    ),
    "an and": ([mov(2, 10), movi(3, 127), alu(b.AND, 3, imm=64), alu(b.SUB, 2, 3)], 0),
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """What the paths leave in SLOT, and a use of it in r5 that only the first allows."""

    harmless: Code
    harmful: Code
    use: Code
    kernel: str = ""  # why the kernel's verifier accepts it


ADD_TO_VALUE = [alu(b.ADD, 9, 5), movi(1, 1), store(9, 0, 1)]
DIFFERENCES = {
    "far behind": Difference([storei(10, SLOT, 0)], [storei(10, SLOT, FAR)], ADD_TO_VALUE),
    "in front": Difference([storei(10, SLOT, 0)], [storei(10, SLOT, -8)], ADD_TO_VALUE),
    "one behind": Difference([storei(10, SLOT, 0)], [storei(10, SLOT, 8)], ADD_TO_VALUE),
    "anywhere": Difference([storei(10, SLOT, 0)], [store(10, SLOT, 7)], ADD_TO_VALUE),
    "never written": Difference(
        [storei(10, SLOT, 0)],
        [movi(0, 0)],
        [store(9, 0, 5)],
        "Linux 6.3 and newer let root read bytes of the stack that were never written",
    ),
    "a number for an address": Difference([store(10, SLOT, 9)], [storei(10, SLOT, 4096)], [storei(5, 0, 1)]),
    "maybe NULL": Difference(
        [storei(10, -8, 1), store(10, SLOT, 9)],
        [
            *[storei(10, -8, 1), *load_map(1, "hash"), mov(2, 10), alu(b.ADD, 2, imm=-8), call(1)],
            store(10, SLOT, 0),
        ],
        [storei(5, 0, 1)],
    ),
    "a value of another size": Difference(
        [*lookup("two"), store(10, SLOT, 0)], [store(10, SLOT, 9)], [storei(5, 8, 1)]
    ),
}


def slot_program(address: str, difference: str, *, sound: bool) -> Code:
    way, offset = ADDRESSES[address]
    what = DIFFERENCES[difference]
    harmful = what.harmless if sound else what.harmful
    branches = either(what.harmless, harmful)
    return [*START, *branches, *way, load(5, 2, offset), *what.use, *END]


# Others, each as (unsound, sound).
def linked(register: int, other: Code, test: Code) -> Code:
    """r1 and r2 are copies of one number, or, after `other`, two numbers. `test` bounds r1."""
    same = [load(1, 6, 16), mov(2, 1)]
    return [
        *START,
        *either(same, other),
        *test,
        alu(b.LSH, register, imm=3),
        alu(b.ADD, 9, register),
        storei(9, 0, 1),
        *END,
    ]


BELOW_ONE = [jump(b.JLT, 1, 2, imm=1), *END]
RESERVE = [*load_map(1, "ring"), movi(2, 8), movi(3, 0), call(131)]
RESERVE_OTHER = [*load_map(1, "other"), movi(2, 8), movi(3, 0), call(131)]
TESTED = [jump(b.JNE, 0, 2, imm=0), *END]


def submit(register: int) -> Code:
    return [mov(1, register), movi(2, 0), call(132)]


LOOK_HASH = [storei(10, -8, 1), *load_map(1, "hash"), mov(2, 10), alu(b.ADD, 2, imm=-8), call(1)]
TWO_KEYS = [*lookup("two", 0), mov(8, 0), *lookup("two", 1)]
KEY = [mov(2, 10), alu(b.ADD, 2, imm=-24), alu(b.ADD, 2, imm=-40)]


def subprogram(harmful: Code, sound: bool) -> Code:
    """A function reads SLOT of its caller, by an address that it was given."""
    body = [*START, *either([storei(10, SLOT, 0)], [storei(10, SLOT, 0)] if sound else harmful)]
    body += [mov(1, 10), alu(b.ADD, 1, imm=-24)]
    rest = [alu(b.ADD, 9, 0), storei(9, 0, 1), *END]
    return [*body, call_program(len(rest)), *rest, alu(b.ADD, 1, imm=-40), load(0, 1, 0), leave()]


def late(sound: bool) -> Code:
    """The slot is read only after another join, which prunes by what the first pass read."""
    return [
        *START,
        *either([storei(10, SLOT, 0)], [storei(10, SLOT, 0 if sound else FAR)]),
        load(3, 6, 8),
        *[jump(b.JEQ, 3, 1, imm=0), movi(4, 1)],
        *[jump(b.JEQ, 3, 1, imm=1), movi(4, 1)],
        *KEY,
        load(5, 2, 0),
        *ADD_TO_VALUE,
        *END,
    ]


def counted(sound: bool) -> Code:
    """A pointer into the stack walks down in a loop and overwrites the offset of a later store."""
    steps = 7 if sound else 8
    loop = [alu(b.ADD, 2, imm=-8), store(2, 0, 7), alu(b.ADD, 3, imm=1), jump(b.JNE, 3, -4, imm=steps)]
    return [
        *START,
        storei(10, SLOT, 0),
        mov(2, 10),
        movi(3, 0),
        *loop,
        load(5, 10, SLOT),
        *ADD_TO_VALUE,
        *END,
    ]


def key(first: int, second: int) -> Code:
    """A lookup cannot fail with key 0, but with another."""
    slot = SLOT
    return [
        *[mov(6, 1), load(7, 6, 16)],
        *either([storei(10, slot, first, 4)], [storei(10, slot, second, 4)]),
        *[*load_map(1, "cell"), *KEY, call(1), storei(0, 0, 1), *END],
    ]


def record(harmful: Code) -> Code:
    return [
        *START,
        *either([storei(10, SLOT, 0)], harmful),
        *[*load_map(1, "ring"), *KEY, movi(3, 8), movi(4, 0), call(130), *END],
    ]


def update(harmful: Code) -> Code:
    return [
        *START,
        *either([storei(10, SLOT, 0)], harmful),
        *[storei(10, -16, 1), *load_map(1, "hash"), *KEY, mov(3, 2), mov(2, 10), alu(b.ADD, 2, imm=-16)],
        *[movi(4, 0), call(2), *END],
    ]


def out_parameter(sound: bool) -> Code:
    """A helper writes the slot by an address that it is given."""
    axes = [
        *KEY,
        mov(1, 2),
        mov(2, 10),
        alu(b.ADD, 2, imm=-16),
        mov(3, 10),
        alu(b.ADD, 3, imm=-32),
        call(503),
    ]
    code = [*START, storei(10, SLOT, 0), *either([movi(0, 0)], [movi(0, 0)] if sound else axes)]
    return [*code, load(5, 10, SLOT), *ADD_TO_VALUE, *END]


def results(sound: bool) -> Code:
    """A test of one number that a helper wrote tells nothing about another."""
    code = list(START)
    for register, at in ((1, -16), (2, -24), (3, -32)):
        code += [mov(register, 10), alu(b.ADD, register, imm=at)]
    code += [call(503), load(1, 10, -16), mov(5, 1) if sound else load(5, 10, -24), jump(b.JEQ, 1, 2, imm=0)]
    return [*code, *END, *ADD_TO_VALUE, *END]


def atomics(sound: bool) -> Code:
    """An atomic reads the slot before it writes it."""
    code = [*START, *either([storei(10, SLOT, 0)], [storei(10, SLOT, 0)] if sound else [store(10, SLOT, 9)])]
    return [*code, *KEY, movi(5, 0), atomic(b.ATOMIC_ADD, 2, 0, 5), *END]


def parts(sound: bool) -> Code:
    """One byte of the offset comes from a path of its own."""
    high = 0 if sound else 1
    code = [
        *START,
        storei(10, SLOT, 0),
        *either([movi(0, 0)], [mov(2, 10), alu(b.ADD, 2, imm=-24), storei(2, -39, high, 1)]),
    ]
    return [
        *code,
        mov(2, 10),
        alu(b.ADD, 2, imm=-24),
        alu(b.ADD, 2, imm=-40),
        load(5, 2, 0),
        *ADD_TO_VALUE,
        *END,
    ]


def upper_half(sound: bool) -> Code:
    """Only a part of the slot is read."""
    high = [movi(1, 0 if sound else 8), alu(b.LSH, 1, imm=32), store(10, SLOT, 1)]
    return [*START, *either([storei(10, SLOT, 0)], high), *KEY, load(5, 2, 4, 4), *ADD_TO_VALUE, *END]


def spilled_link(sound: bool) -> Code:
    """A test of a register bounds the copy of it on the stack, but only if it is one."""
    other = [mov(1, 3)] if sound else [load(4, 6, 8), mov(1, 4), mov(4, 1)]
    code = [*START, load(3, 6, 16), mov(8, 3), store(10, SLOT, 3), *either([mov(1, 3)], other)]
    return [*code, *BELOW_ONE, load(5, 10, SLOT), alu(b.LSH, 5, imm=3), *ADD_TO_VALUE, *END]


def nullable_link(sound: bool) -> Code:
    """A test of r0 against NULL says something of the copy on the stack, but only if it is one."""
    again = [movi(0, 0)] if sound else LOOK_HASH[1:]
    code = [*START, *LOOK_HASH, mov(8, 0), store(10, SLOT, 0)]
    other = [mov(0, 8)] if sound else again
    return [*code, *either([mov(0, 8)], other), *TESTED, load(5, 10, SLOT), storei(5, 0, 1), *END]


def nullable_registers(sound: bool) -> Code:
    other = [*LOOK_HASH, mov(8, 0)] + ([] if sound else LOOK_HASH)
    return [*START, *either([*LOOK_HASH, mov(8, 0)], other), *TESTED, storei(8, 0, 1), *END]


def distance(sound: bool) -> Code:
    """The distance of two addresses is known in the same value, not between two values."""
    same = [*lookup("two", 0), mov(8, 0)]
    return [
        *START,
        *either(same, same if sound else TWO_KEYS),
        alu(b.SUB, 0, 8),
        mov(5, 0),
        *ADD_TO_VALUE,
        *END,
    ]


def swapped_record(sound: bool) -> Code:
    """Two records are reserved, and both registers must name different ones."""
    first = [*RESERVE, *TESTED, mov(8, 0)]
    second = [*RESERVE, jump(b.JNE, 0, 5, imm=0), *submit(8), *END, mov(6, 0)]
    lost = [mov(6, 8)]
    return [
        *START,
        *first,
        *second,
        *either([movi(0, 0)], [movi(0, 0)] if sound else lost),
        *submit(8),
        *submit(6),
        *END,
    ]


def ring_of_record(sound: bool) -> Code:
    """A record goes back to the ring buffer that it came from."""
    code = [*START, *either(RESERVE, RESERVE if sound else RESERVE_OTHER), *TESTED]
    return [*code, *submit(0), *END]


def frame_pointer(imm: int) -> Code:
    return [movi(10, imm), *END]


def variable(mask: int) -> Code:
    """An address of the stack that depends on a number."""
    code = [
        *START,
        storei(10, -8, 0),
        storei(10, -16, FAR),
        mov(2, 10),
        alu(b.AND, 7, imm=mask),
        alu(b.NEG, 7),
    ]
    return [*code, alu(b.ADD, 2, 7), load(5, 2, -8), *ADD_TO_VALUE, *END]


def joined(other: int) -> Code:
    """Two addresses of the stack come to one load."""
    code = [*START, storei(10, -8, 0), storei(10, -16, other), mov(2, 10)]
    return [
        *code,
        *either([alu(b.ADD, 2, imm=-8)], [alu(b.ADD, 2, imm=-16)]),
        load(5, 2, 0),
        *ADD_TO_VALUE,
        *END,
    ]


OTHERS: dict[str, tuple[Code, Code]] = {
    "a caller's slot": (subprogram([storei(10, SLOT, FAR)], False), subprogram([], True)),
    "a slot after two more joins": (late(False), late(True)),
    "a loop that walks down the stack": (counted(False), counted(True)),
    "a key that a map lacks": (key(0, 1), key(0, 0)),
    "a record never written": (record([movi(0, 0)]), record([storei(10, SLOT, 1)])),
    "a record with an address": (record([store(10, SLOT, 9)]), record([store(10, SLOT, 7)])),
    "a value never written": (update([movi(0, 0)]), update([storei(10, SLOT, 1)])),
    "a value with an address": (update([store(10, SLOT, 9)]), update([store(10, SLOT, 7)])),
    "a helper's result": (out_parameter(False), out_parameter(True)),
    "two results of a helper": (results(False), results(True)),
    "an atomic on the stack": (atomics(False), atomics(True)),
    "one byte of a slot": (parts(False), parts(True)),
    "the upper half of a slot": (upper_half(False), upper_half(True)),
    "two numbers for one": (
        linked(2, [load(1, 6, 16), mov(3, 1), load(2, 6, 8), mov(4, 2)], BELOW_ONE),
        linked(2, [load(2, 6, 16), mov(1, 2)], BELOW_ONE),
    ),
    "two unlinked numbers for one": (
        linked(2, [load(1, 6, 16), load(2, 6, 8)], BELOW_ONE),
        linked(2, [load(2, 6, 16), mov(1, 2)], BELOW_ONE),
    ),
    "a number on the stack and another": (spilled_link(False), spilled_link(True)),
    "a result on the stack and another": (nullable_link(False), nullable_link(True)),
    "two results for one": (nullable_registers(False), nullable_registers(True)),
    "two values for one": (distance(False), distance(True)),
    "one record for two": (swapped_record(False), swapped_record(True)),
    "a record of another ring buffer": (ring_of_record(False), ring_of_record(True)),
    "the frame pointer written": (frame_pointer(0xF1), END),
    "an offset of 32 bits that wraps": (
        [*START, movi(5, -1), alu(b.ADD, 5, imm=9, wide=False), *ADD_TO_VALUE, *END],
        [*START, movi(5, -1), alu(b.ADD, 5, imm=1, wide=False), *ADD_TO_VALUE, *END],
    ),
    "a signed test only": (
        [*START, load(5, 6, 8), jump(b.JSLT, 5, 2, imm=1), *END, *ADD_TO_VALUE, *END],
        [*START, load(5, 6, 8), jump(b.JLT, 5, 2, imm=1), *END, *ADD_TO_VALUE, *END],
    ),
    "a test of the low half": (
        [*START, load(5, 6, 8), jump(b.JEQ, 5, 2, imm=0, wide=False), *END, *ADD_TO_VALUE, *END],
        [*START, load(5, 6, 8), jump(b.JEQ, 5, 2, imm=0), *END, *ADD_TO_VALUE, *END],
    ),
    "a variable offset in the stack": (variable(8), variable(0)),
    "addresses that join": (joined(FAR), joined(0)),
}  # fmt: skip
# Where the kernel's verdict differs, and why.
ACCEPTED_BY_THE_KERNEL = {
    "a record never written": DIFFERENCES["never written"].kernel,
    "a value never written": DIFFERENCES["never written"].kernel,
    "a record with an address": "root may publish addresses of the kernel; on a GPU they mean nothing",
    "a value with an address": "root may publish addresses of the kernel; on a GPU they mean nothing",
    "an atomic on the stack": "root may calculate with addresses as numbers",
    "a record of another ring buffer": "the record itself says where it belongs; here the call's map is one",
}
REJECTED_BY_THE_KERNEL = {
    "two values for one": "the kernel does not know distances of addresses",
    "one byte of a slot": "the kernel takes a slot that was written in parts for unknown",
}
# Ways to compute an address of the stack that the kernel does not let programs take.
NOT_IN_THE_KERNEL = {
    "a subtraction",
    "a negative subtraction",
    "a register subtracted",
    "32-bit adds",
    "a distance between addresses",
    "an and",
}  # "R2 subtraction from stack pointer prohibited"
SLOTS = [(address, difference) for address in ADDRESSES for difference in DIFFERENCES]


def verdict(code: Code) -> str | None:
    """Return why the second gate rejects a program, or None."""
    made, function = program(code, MAPS)
    try:
        check(made, function)
    except VerifyError as error:
        return str(error)
    return None


def asked(code: Code) -> str | None:
    """Return why the kernel's verifier rejects a program, or None. Skip the test if it may not be asked."""
    made, function = program(code, MAPS)
    fields = {start: name for name, (start, _) in CONTEXTS["exit"].items()}
    reads = {
        ((), pc): CheckedAccess("context", fields[i.offset])
        for pc, i in enumerate(code)
        if i.cls == b.LDX and i.src == 6
    }
    facts = Checked(function, reads, {}, frozenset(), frozenset(), {}, 0, -128)
    try:
        if kernel.check(made, facts) is None:
            pytest.skip("the kernel's verifier needs CAP_BPF")
    except VerifyError as error:
        return str(error)
    return None


def test_there_are_enough():
    assert len(SLOTS) + len(OTHERS) >= 48


@pytest.mark.parametrize(("address", "difference"), SLOTS)
def test_a_slot_that_differs_is_seen_however_it_is_addressed(address: str, difference: str):
    assert verdict(slot_program(address, difference, sound=False))
    assert verdict(slot_program(address, difference, sound=True)) is None


@pytest.mark.parametrize("name", OTHERS)
def test_paths_that_differ_otherwise(name: str):
    unsound, sound = OTHERS[name]
    assert verdict(unsound)
    assert verdict(sound) is None


@pytest.mark.parametrize(("address", "difference"), SLOTS)
def test_the_kernel_agrees_about_slots(address: str, difference: str):
    said = asked(slot_program(address, difference, sound=False))
    assert said or DIFFERENCES[difference].kernel
    assert bool(asked(slot_program(address, difference, sound=True))) is (address in NOT_IN_THE_KERNEL)


@pytest.mark.parametrize("name", OTHERS)
def test_the_kernel_agrees_about_the_others(name: str):
    unsound, sound = OTHERS[name]
    assert asked(unsound) or name in ACCEPTED_BY_THE_KERNEL
    assert bool(asked(sound)) is (name in REJECTED_BY_THE_KERNEL)


# Random programs


class Harmful(Exception):
    """A program does what no device program may do."""


class StrictInterpreter(Interpreter):
    """Runs a program and raises Harmful where it leaves its memory or reads bytes that were never written.

    context: its last two fields.
    """

    def __init__(self, code: Code, context: tuple[int, int]) -> None:
        super().__init__(tuple(code), bytes(GRID.value_size))
        self.context = context
        self.written: set[int] = set()

    def read(self, address: int, size: int) -> int:
        if CONTEXT <= address < CONTEXT + 24:
            return self.context[address == CONTEXT + 8]
        bytes_ = set(range(address, address + size))
        if VALUE <= address <= VALUE + GRID.value_size - size:
            return super().read(address, size)
        if not bytes_ <= self.written:
            raise Harmful(f"reads {address:#x}")
        return super().read(address, size)

    def write(self, address: int, size: int, number: int) -> None:
        on_stack = STACK - STACK_SIZE <= address <= STACK - size
        if not on_stack and not (VALUE <= address <= VALUE + GRID.value_size - size):
            raise Harmful(f"writes {address:#x}")
        if on_stack:
            self.written |= set(range(address, address + size))
        super().write(address, size, number)


INPUTS = (0, 1, 7, 8, 56, 57, 64, 1 << 20, 1 << 32, (1 << 32) + 8, 1 << 63, (1 << 64) - 8, (1 << 64) - 1)
GRID = MapDefinition("grid", "array", 4, 64, 1)


def random_program(rng: random.Random, looped: bool = False) -> Code:
    """Return numbers in r1, r2, r7, r8 and SLOTS, addresses of the stack in r3 and r4, branches, and stores to a value of 64 bytes.

    looped: the branches are in a loop of up to 7 turns, which are counted at r10 - 56."""
    numbers, addresses = (1, 2, 7, 8), (3, 4)
    slots = (-16, -24, -32, -40)

    def statement() -> Code:
        kind = rng.randrange(11)
        x, y = rng.choice(numbers), rng.choice(numbers)
        p, q = rng.choice(addresses), rng.choice(addresses)
        slot = rng.choice(slots)
        if kind == 0:
            return [movi(x, rng.choice((0, 0, 8, 16, 56, 64, FAR, -8)))]
        if kind == 1:
            return [load(x, 6, rng.choice((8, 16)))]
        if kind == 2:
            return [mov(x, y)]
        if kind == 3:
            op = rng.choice((b.ADD, b.SUB, b.AND, b.OR, b.XOR, b.LSH, b.RSH, b.ARSH, b.MUL))
            shift = op in (b.LSH, b.RSH, b.ARSH)
            imm = rng.randrange(5) if shift else rng.choice((1, 7, 8, 24, 56, -8))
            return [alu(op, x, imm=imm, wide=rng.random() < 0.7)]
        if kind == 4:
            return [alu(rng.choice((b.ADD, b.SUB, b.AND, b.OR)), x, y, wide=rng.random() < 0.7)]
        if kind == 5:
            return [store(10, slot, x), *([store(10, rng.choice(slots), x)] if rng.random() < 0.3 else [])]
        if kind == 6:
            return [load(x, 10, slot)]
        if kind == 7:
            first = rng.choice((-8, -16, -24, -32))
            return [mov(p, 10), alu(b.ADD, p, imm=first), alu(b.ADD, p, imm=slot - first)]
        if kind == 8:
            return [rng.choice((load(x, p, 0), store(p, 0, x), mov(p, q)))]
        if kind == 9:
            return [store(10, -48, p), load(q, 10, -48)]
        return [alu(b.AND, x, imm=56), *use(x)]

    def use(x: int) -> Code:
        return [mov(5, 9), alu(b.ADD, 5, x), store(5, 0, 8)]

    code = [mov(6, 1), *lookup("grid"), mov(9, 0)]
    for register in numbers:
        code += [load(register, 6, 16) if rng.random() < 0.3 else movi(register, 0)]
    code += [storei(10, slot, 0) for slot in slots if rng.random() < 0.9]
    code += [mov(3, 10), alu(b.ADD, 3, imm=-16), mov(4, 10), alu(b.ADD, 4, imm=-8), alu(b.ADD, 4, imm=-16)]
    inner: Code = []
    for _ in range(rng.randrange(2, 9)):
        body = [i for _ in range(rng.randrange(1, 4)) for i in statement()]
        if rng.random() < 0.6:
            x, y = rng.sample(numbers, 2)
            op = rng.choice(
                (b.JEQ, b.JNE, b.JLT, b.JLE, b.JGT, b.JGE, b.JSLT, b.JSGT, b.JSGE, b.JSLE, b.JSET)
            )
            other = [i for _ in range(rng.randrange(3)) for i in statement()]
            wide = rng.random() < 0.7
            if rng.random() < 0.3:
                test = jump(op, x, len(body) + 1, y, wide=wide)
            else:
                test = jump(op, x, len(body) + 1, imm=rng.choice((0, 1, 8, 57, 64)), wide=wide)
            body = [test, *body, ja(len(other)), *other]
        inner += body
    if looped:
        turn = [
            load(0, 10, -56),
            alu(b.ADD, 0, imm=1),
            store(10, -56, 0),
            load(5, 6, 16),
            alu(b.AND, 5, imm=7),
        ]
        turn.append(jump(b.JGT, 0, len(inner) + 1, 5))
        inner = [storei(10, -56, 0), *turn, *inner, ja(-len(turn) - len(inner) - 1)]
    code += inner
    x, y = rng.sample(numbers, 2)
    found = rng.choice(([], [load(x, 10, rng.choice(slots))], [load(x, rng.choice(addresses), 0)]))
    test = [jump(b.JLE, y, 2, imm=56), *END] if rng.random() < 0.3 else []
    return [*code, *found, *test, *use(x), *END]


@pytest.mark.every(4)
@pytest.mark.parametrize("seed", range(10))
def test_what_the_gate_accepts_does_no_harm(seed: int):
    harmless(random.Random(seed), False)


@pytest.mark.every(10)
@pytest.mark.parametrize("seed", range(10))
def test_what_holds_in_all_turns_of_a_loop_does_no_harm(seed: int, monkeypatch: pytest.MonkeyPatch):
    """The gate follows two turns, and takes the others for one."""
    monkeypatch.setattr(rules, "TURNS", 2)
    harmless(random.Random(seed), True)


def harmless(rng: random.Random, looped: bool) -> None:
    accepted = widened = 0
    for _ in range(300):
        code = random_program(rng, looped)
        made, function = program(code, (GRID,))
        try:
            widened += bool(rules._separated(made, function, False, looped).loops)
        except VerifyError:
            continue
        accepted += 1
        for _ in range(12):
            StrictInterpreter(code, (rng.choice(INPUTS), rng.choice(INPUTS))).run()
    assert accepted > 10 and bool(widened) is looped
