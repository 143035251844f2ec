"""Each reader of untrusted bytes, on inputs that it accepts, on inputs that it once read wrongly, and on changed inputs.

Each commit makes other changes, the same in each run (GPUBPF_CHOICE). `script/fuzz` makes more of them, guided by coverage.
GPUBPF_FUZZ_RUNS: changed inputs for each target.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fuzz.targets import TARGETS, Target

RUNS = int(os.environ.get("GPUBPF_FUZZ_RUNS", "400" if os.environ.get("GPUBPF_LOOKS") == "all" else "100"))
LONGEST = 1 << 16  # bytes of a changed input
SECONDS, MEMORY = 10, 2 << 30  # for one input
PATIENCE = 120  # a busy machine may stop a process for many seconds


@pytest.fixture(params=TARGETS.values(), ids=TARGETS.keys())
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.param
    return found


def test_the_seeds_are_accepted(target: Target) -> None:
    """Otherwise the changed inputs would be refused at once."""
    accepted = [target.run(seed) for seed in target.seeds()]
    assert any(accepted)


def test_inputs_that_were_read_wrongly(target: Target) -> None:
    for data in (*target.kept, *target.hard()):
        check(target, data)


def test_changed_inputs(target: Target) -> None:
    seeds = [*target.seeds(), *target.kept]
    chance = random.Random(os.environ["GPUBPF_CHOICE"])
    for _ in range(RUNS):
        check(target, changed(chance, chance.choice(seeds), seeds))


def check(target: Target, data: bytes) -> None:
    try:
        with limited():
            target.run(data)
    except Exception as error:
        raise AssertionError(f"{target.name} reads {data[:200]!r} ({len(data)} bytes) wrongly") from error


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise TimeoutError or MemoryError in a reader that takes too much: processor time, or time if it waits."""

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s of processor time, or {PATIENCE} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, late), signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def changed(chance: random.Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Return `data` after a few changes: bytes, numbers at the edge of their range, pieces of other inputs, gaps, repetitions."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        at, other = chance.randrange(len(made) + 1), chance.choice(seeds)
        size = chance.choice((1, 2, 4, 8))
        edge = chance.choice((0, 1, (1 << 8 * size) - 1, 1 << 8 * size - 1, chance.randrange(256)))
        begin = chance.randrange(len(other) + 1)
        match chance.randrange(7):
            case 0:
                made[at : at + 1] = chance.randbytes(1)
            case 1:
                made[at : at + size] = edge.to_bytes(size, "little")
            case 2:
                del made[at : at + chance.randrange(1, 16)]
            case 3:
                made[at:at] = other[begin : begin + chance.randrange(1, 64)]
            case 4:
                made[at:at] = made[begin : begin + chance.randrange(1, 64)]
            case 5:
                made[at:at] = made[at : at + chance.randrange(1, 16)] * chance.choice((2, 50, 2000))
            case _:
                del made[chance.choice((at, len(made))) :]
    return bytes(made[:LONGEST])
