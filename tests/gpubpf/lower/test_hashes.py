"""Threads that use a hash table at once: the code of the operations, run step by step in any order."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Generator

import numpy as np
import pytest

from engine_device import Array
from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf import maps
from gpubpf.ebpf.maps import HEADER, MapDefinition, SlotState
from gpubpf.ebpf.probe import Probe
from gpubpf.lower import nvptx, storage
from gpubpf.lower.host_code import HOST
from gpubpf.verify.rules import check
from gpubpf_asm import END, alu, call, load_map, mov, movi, program, store
from gpubpf_points import HEAD, Run
from gpubpf_steps import basic_blocks, steps

TABLE = MapDefinition("table", "hash", 8, 8, 8, "<u8", "<u8")
KEYS_AT = HEADER + 8 * TABLE.slots
VALUES_AT = KEYS_AT + 8 * TABLE.slots
FIND, DELETE, UPDATE, INSERT, REPLACE = (
    basic_blocks(storage.hash_function("f", name, TABLE, HOST)) for name in storage.HASH_OPERATIONS
)
ABSENT, EXISTS, NO_ROOM, BUSY = (-error & (1 << 64) - 1 for error in (2, 17, 7, 16))
KEY, OTHER = 77, 78
MANY = 100  # more steps than an operation takes that does not wait
Thread = Generator[None, None, int]


def home(key: int) -> int:
    return maps.hash_of(key.to_bytes(8, "little")) >> 24 & TABLE.slots - 1


def neighbour(key: int) -> int:
    """Another key that begins at the same slot."""
    return next(n for n in itertools.count(key + 1) if home(n) == home(key))


def claimed(key: int, state: SlotState) -> Counter[int]:
    """The memory of a table in which a thread has claimed the key's slot and stopped."""
    tag = maps.hash_of(key.to_bytes(8, "little")) << maps.STATE_BITS & (1 << 64) - 1
    return Counter({HEADER + 8 * home(key): tag | state})


def operation(memory: Counter[int], blocks: dict[str, list[str]], key: int, value: int = 0) -> Thread:
    result = yield from steps(blocks, memory, {"%base": 0, "%k0": key, "%value0": value})
    return result & (1 << 64) - 1


def increment(memory: Counter[int], key: int) -> Thread:
    """What NAME.increment(key) becomes. Returns whether it counted."""
    at = yield from operation(memory, FIND, key)
    if not at:
        yield from operation(memory, INSERT, key)
        at = yield from operation(memory, FIND, key)
    if at:
        yield
        memory[at] += 1
    return bool(at)


def run(thread: Thread, most: int = MANY) -> int | None:
    """Let a thread take up to `most` steps. Return its result, or None if it has not ended."""
    for _ in range(most):
        try:
            next(thread)
        except StopIteration as end:
            return end.value
    return None


def shuffled(threads: list[Thread], rng: random.Random) -> list[int]:
    """Let the threads take their steps in any order. Return their results."""
    results: dict[int, int] = {}
    while len(results) < len(threads):
        number = rng.choice([n for n in range(len(threads)) if n not in results])
        result = run(threads[number], rng.choice((1, 1, 2, 5)))
        if result is not None:
            results[number] = result
    return [results[n] for n in range(len(threads))]


def words(memory: Counter[int]) -> list[int]:
    return [memory[at] for at in range(0, maps.storage_size(TABLE), 8)]


def content(memory: Counter[int]) -> dict[int, int]:
    """What a tool reads; each key is there once, and the header is right."""
    found = maps.decode(TABLE, np.array(words(memory), np.uint64).tobytes())
    assert len(set(found["key"].tolist())) == len(found) == memory[0]
    return dict(zip(found["key"].tolist(), found["value"].tolist(), strict=True))


def lost(memory: Counter[int]) -> int:
    return memory[8]


def test_increments_wait_for_no_thread():
    """One thread stops after each of its steps in turn. The other one counts all the same."""
    for stop in itertools.count():
        memory: Counter[int] = Counter()
        first, second = increment(memory, KEY), increment(memory, KEY)
        ended = run(first, stop)
        assert run(second), f"stopped after {stop} steps"
        assert ended or run(first)
        assert (content(memory), lost(memory)) == ({KEY: 2}, 0), f"stopped after {stop} steps"
        if ended:
            return


def test_increments_are_exact_in_any_order():
    keys = [KEY, neighbour(KEY), OTHER]
    for seed in range(200):
        rng = random.Random(seed)
        memory: Counter[int] = Counter()
        wanted = [rng.choice(keys) for _ in range(6)]
        assert all(shuffled([increment(memory, key) for key in wanted], rng))
        assert (content(memory), lost(memory)) == (Counter(wanted), 0), f"seed {seed}"


@pytest.mark.parametrize("value", [0, 5])
@pytest.mark.parametrize("blocks", [INSERT, UPDATE], ids=["insert", "update"])
def test_while_a_value_is_written_its_key_is_absent(blocks, value):
    """Only those wait that write the same key; they end when the value is there, or after a limit, which counts as lost."""
    memory = claimed(KEY, SlotState.WRITING)
    assert run(operation(memory, FIND, KEY)) == 0
    assert run(operation(memory, DELETE, KEY)) == run(operation(memory, REPLACE, KEY, 4)) == ABSENT
    assert run(increment(memory, neighbour(KEY)))
    waits = operation(memory, blocks, KEY, value)
    assert run(waits, 5_000) is None
    memory[KEYS_AT + 8 * home(KEY)] = KEY
    memory[HEADER + 8 * home(KEY)] |= SlotState.FULL
    memory[0] += 1
    assert run(waits) == (EXISTS if blocks is INSERT else 0)
    assert content(memory) == {KEY: 0 if blocks is INSERT else value, neighbour(KEY): 1}
    assert lost(memory) == 0


KERNEL = (
    HEAD
    + """
.visible .entry k(.param .u64 state)
{
  .reg .pred %p<3>; .reg .b32 %r<3>; .reg .b64 %rd<3>;
  mov.u32 %r1, %ctaid.x;
  setp.eq.u32 %p1, %r1, 0;
  @%p1 bra $L_end;
  mov.u32 %r2, 0;
$L_loop:
  add.u32 %r2, %r2, 1;
  setp.lt.u32 %p2, %r2, 100000;
  @%p2 bra $L_loop;
  ld.param.u64 %rd1, [state];
  atom.global.or.b64 %rd2, [%rd1], 2;
$L_end:
  ret;
}
"""
)


def test_a_waiting_thread_lets_others_run_on_the_device():
    """Block 0 updates a key whose value is being written. The kernel itself publishes it, at the end of a long block 1."""
    code = [movi(1, KEY), store(10, -8, 1), movi(1, 5), store(10, -16, 1), *load_map(1, "table")]
    for register, at in ((2, -8), (3, -16)):
        code += [mov(register, 10), alu(b.ADD, register, imm=at)]
    made, function = program([*code, movi(4, 0), call(2), *END], (TABLE,))
    fragment = nvptx.lower(made, check(made, function))
    assert fragment.waits  # so that its function keeps the instructions that let other lanes run
    runs = Run(KERNEL, [Probe(fragment, "exit")])
    table = Array(np.array(words(claimed(KEY, SlotState.WRITING)), np.uint64))
    table.host[KEYS_AT // 8 + home(KEY)] = KEY
    table.host[0] = 1
    runs.given["table"] = table
    runs("k", 32, table.address + HEADER + 8 * home(KEY), grid=2)
    memory = Counter({8 * n: int(word) for n, word in enumerate(table.host)})
    assert (content(memory), lost(memory)) == ({KEY: 5}, 0)


def test_no_thread_waits_for_ever(monkeypatch):
    monkeypatch.setattr(storage, "WAITS", 20)
    for name in ("update", "insert"):
        blocks = basic_blocks(storage.hash_function("f", name, TABLE, HOST))
        memory = claimed(KEY, SlotState.WRITING)
        assert run(operation(memory, blocks, KEY, 5)) == BUSY
        assert lost(memory) == 1


def test_a_full_table_is_another_error():
    memory: Counter[int] = Counter()
    results = [run(operation(memory, UPDATE, key, 1), 1000) for key in range(TABLE.slots + 1)]
    assert results == [0] * TABLE.slots + [NO_ROOM]
    assert lost(memory) == 1


def test_a_key_that_comes_late_does_not_publish_a_value_that_is_being_written():
    """A thread stops before each of its steps. Its key is deleted, and another thread writes it again and stops, too."""
    seen = Counter[bool]()
    for stop, again in itertools.product(range(12), range(12)):
        memory: Counter[int] = Counter()
        first = operation(memory, INSERT, KEY)
        ended = run(first, stop)
        run(operation(memory, DELETE, KEY))
        second = operation(memory, UPDATE, KEY, 5)
        if run(second, again) is None:
            before = memory[HEADER + 8 * home(KEY)] & 7 == SlotState.WRITING
            _ = ended is not None or run(first)
            if before:
                seen[ended is None] += 1
                assert run(operation(memory, FIND, KEY)) == 0
            assert run(second) == 0
        else:
            _ = ended is not None or run(first)
        assert content(memory) == {KEY: 5} and not lost(memory), (stop, again)
    assert seen[True]


def apply(table: dict[int, int], blocks: dict[str, list[str]], key: int, value: int) -> int:
    """What an operation does to a table that no other thread uses."""
    there = key in table
    if blocks is FIND:
        return int(there)
    if (blocks is INSERT and there) or (blocks in (REPLACE, DELETE) and not there):
        return EXISTS if there else ABSENT
    if blocks is DELETE:
        del table[key]
    else:
        table[key] = value
    return 0


def perform(
    memory: Counter[int], plan: list[tuple[dict[str, list[str]], int, int]], results: list[int]
) -> Thread:
    """Perform operations one after the other, and append their results; of FIND whether the key is there."""
    for blocks, key, value in plan:
        result = yield from operation(memory, blocks, key, value)
        results.append(int(bool(result)) if blocks is FIND else result)
    return 1


def test_threads_at_once_have_the_results_of_some_order():
    """Three threads with two operations each, on a key and another one in the same slot."""
    keys = [KEY, KEY, neighbour(KEY)]
    for seed in range(400):
        rng = random.Random(seed)
        plans = [
            [
                (
                    rng.choice((FIND, DELETE, UPDATE, INSERT, REPLACE)),
                    rng.choice(keys),
                    rng.choice((0, n + 1)),
                )
                for n in range(2)
            ]
            for _ in range(3)
        ]
        memory: Counter[int] = Counter()
        results: list[list[int]] = [[], [], []]
        shuffled([perform(memory, plan, to) for plan, to in zip(plans, results, strict=True)], rng)
        found = content(memory)
        for order in set(itertools.permutations((0, 0, 1, 1, 2, 2))):
            table: dict[int, int] = {}
            again: list[list[int]] = [[], [], []]
            for number in order:
                again[number].append(apply(table, *plans[number][len(again[number])]))
            if again == results and table == found:
                break
        else:
            raise AssertionError(f"seed {seed}: no order explains {results} and {found}")
        assert not lost(memory)
