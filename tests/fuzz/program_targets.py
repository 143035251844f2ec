"""Device programs, as a tool's own C text or somebody's object file may contain them. See targets.py."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterable, Mapping
from unittest import mock

import gpubpf_generated as generated
import gpubpf_guarded
from fuzz.targets import target
from gpubpf.ebpf import bytecode
from gpubpf.ebpf.bytecode import BpfFunction, Program
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import VerifyError
from gpubpf.verify import rules
from gpubpf_guarded import HELPERS, Case, Endless, StrictInterpreter, values_of

VALUE_SIZE, ENTRIES, RECORD = 64, 2, 16
MAX_STEPS = 2048  # longer programs are refused, so that more are tried


@functools.cache
def device_program() -> tuple[Program, BpfFunction]:
    """A program with maps of several kinds."""
    from gpubpf.lower import programs
    from gpubpf.tools import threadhist

    program = programs.load(threadhist.PROGRAM).program
    return program, program.device_functions[0]


def program_seeds() -> Iterable[bytes]:
    program, function = device_program()
    numbers = {name: at for at, name in enumerate(program.maps)}
    return [bytecode.encode(function.instructions, numbers)]


@target(VerifyError, ValueError, seeds=program_seeds)
def verifier(data: bytes) -> None:
    """Check a program."""
    program, function = device_program()
    code = bytecode.decode(data[: 8 * 256], maps=dict(enumerate(program.maps)))
    rules.check(program, BpfFunction(function.name, function.point, code))


def generated_seeds() -> Iterable[bytes]:
    """Programs for the maps of `generated_maps`, of which a half is sound."""
    rng, found = random.Random(0), []
    numbers = {name: at for at, name in enumerate(generated_maps())}
    for number in range(40):
        generator = generated.Generator(rng)
        generator.size, generator.entries = VALUE_SIZE, ENTRIES
        generator.record = RECORD if generator.record else 0
        made = generator.generate()
        if number % 2:
            made = generated.mutate(made, rng)
        found.append(bytecode.encode(made.code, numbers))
    return found


def generated_maps() -> Mapping[str, MapDefinition]:
    return generated.Generated((), VALUE_SIZE, ENTRIES, False, RECORD).program()[0].maps


@functools.cache
def generated_cases() -> list[Case]:
    """Inputs with numbers near the bounds of the values."""
    edges = (0, 1, -1, VALUE_SIZE - 8, VALUE_SIZE, 1 << 63, *generated.WIDE_EDGES)
    words = [edge & (1 << 64) - 1 for edge in edges]
    sizes = {m.name: m.value_size * values_of(m) for m in generated_maps().values() if values_of(m)}
    return [
        Case(
            tuple(words[(at + field) % len(words)] for field in range(generated.FIELDS)),
            {
                name: b"".join(words[(at + k) % len(words)].to_bytes(8, "little") for k in range(size // 8))
                for name, size in sizes.items()
            },
            at,
        )
        for at in range(0, len(words), 3)
    ]


@target(VerifyError, ValueError, seeds=generated_seeds)
def accepted_program(data: bytes) -> None:
    """Run a program that the gate accepts, in an interpreter: it stays in its memory"""
    maps = dict(generated_maps())
    code = bytecode.decode(data[: 8 * 256], maps=dict(enumerate(maps)))
    program = Program("", {}, maps)
    with mock.patch.object(rules, "MAX_STEPS", MAX_STEPS):
        checked = rules.check(program, BpfFunction("probe", generated.POINT, code))
    called = {i.imm for i in code if i.opcode == bytecode.JMP | bytecode.CALL and not i.src}
    if called <= HELPERS:
        # The lowering limits loops whose number of turns is not known.
        endless = contextlib.suppress(Endless) if checked.loops else contextlib.nullcontext()
        for case in generated_cases():
            with endless, mock.patch.object(gpubpf_guarded, "MAX_STEPS", 2 * MAX_STEPS):
                StrictInterpreter(program, code, case).run()
