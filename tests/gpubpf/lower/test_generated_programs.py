"""Programs that a seed decides: what the gates say about them, and what they do on every lowering.

No program that our gate accepts leaves its memory, and all lowerings compute the same. GPUBPF_PROGRAMS=N tries N times as many.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from engine_device import DeviceFault
from gpubpf.ebpf import bytecode as b
from gpubpf.lower import amdgcn, host_code, nvptx
from gpubpf.record import replace
from gpubpf.verify.rules import check
from gpubpf_asm import END, alu, load, lookup, mov, store
from gpubpf_generated import POINT, Generated, generate, mutate
from gpubpf_guarded import Case, Harmful, Job, StrictInterpreter, compile_for_amd, on_amd, on_device, on_host
from gpubpf_verdicts import ALONE, EMBEDDED, KINDS, ON_AMD, ONLY_OURS, ONLY_THE_KERNEL, Batch
from hipsim_engine import missing

TIMES = int(os.environ.get("GPUBPF_PROGRAMS", "1"))
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.mark.every(3)
@pytest.mark.parametrize("seed", range(3 * TIMES))
def test_accepted_programs_stay_in_their_memory_and_compute_the_same(seed: int):
    batch = Batch(seed, lowered=4)
    for number in range(100):
        batch.add(number)
    assert batch.counts["interpreted"] > 50
    batch.run()
    assert batch.counts["run: embedded device"] > 10
    assert batch.counts["run: x86-64"] > 10
    if missing() is None:
        for gpu in {gpu for gpu, _, _ in ON_AMD}:
            assert batch.counts[f"run: {gpu}"] > 5


@pytest.mark.parametrize("seed", range(4 * TIMES))
@pytest.mark.every(4)
def test_accepted_programs_collect_the_same(seed: int):
    """Programs with hashes, rings, prints and lanes: in a warp that shares its rings, and each input alone in a warp."""
    batch = Batch(1000 * int(os.environ["GPUBPF_CHOICE"]) + seed, lowered=2, collecting=True)
    for number in range(50):
        batch.add(number)
    batch.run()
    for where in (EMBEDDED, ALONE):  # of one kind, a choice may have none
        assert sum(batch.counts[f"run: {where}, {kind}"] for kind in KINDS) >= 2
        assert batch.counts[f"run: {where}, known"]


def test_a_seed_decides_the_programs():
    first, second = random.Random(7), random.Random(7)
    for _ in range(5):
        one, other = generate(first), generate(second)
        assert one == other
        assert mutate(one, first) == mutate(other, second)


# Each way to run a program finds what our gate prevents: accesses at an offset, of which some or all bytes are outside of a value of
# 64 bytes. Scalar loads of AMD GPUs ignore the two low bits of an address, so the offsets are multiples of 4.

AMD_WAYS = {"AMD, lanes": ("gfx90a", 64, False), "AMD, waves": ("gfx1030", 32, True)}
WAYS = {
    "interpreter": Harmful,
    "embedded device": DeviceFault,
    "x86-64": Harmful,
    **dict.fromkeys(AMD_WAYS, Harmful),
}


def run_unsound(way: str, code: list[b.Instruction], sound: list[b.Instruction]) -> None:
    """Run `code` with what the gate learnt about `sound`, which has the same accesses."""
    made = Generated(tuple(code), 64, 1, True)
    given, function = made.program(host=way == "x86-64")
    case = Case((0, 1, 2, 3, 4), {m.name: bytes(m.value_size) for m in given.maps.values()}, 0)
    if way == "interpreter":
        StrictInterpreter(given, code, case).run()
    elif way == "embedded device":
        checked = check(given, replace(function, instructions=tuple(sound)))
        fragment = nvptx.lower(given, replace(checked, function=function))
        on_device([(fragment, [case])], POINT)
    elif way in AMD_WAYS:
        gpu, wave, apart = AMD_WAYS[way]
        checked = check(given, replace(function, instructions=tuple(sound)))
        program = amdgcn.lower(given, replace(checked, function=function), wave)
        on_amd([(compile_for_amd(program, gpu, apart, POINT), [case])])
    else:
        with pytest.MonkeyPatch.context() as patch:
            taught = check

            def misled(program_: object, given_: b.BpfFunction) -> object:
                accepted = given_.instructions[: -len(code)] + tuple(sound)
                return replace(taught(program_, replace(given_, instructions=accepted)), function=given_)  # type: ignore[arg-type]

            patch.setattr(host_code, "check", misled)
            native = host_code.lower(given, function)
        on_host([Job(native, [case])])


@pytest.mark.every(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [0, 60, 64, -8])
@pytest.mark.parametrize("writes", [False, True])
def test_each_way_to_run_notices_accesses_outside(way: str, at: int, writes: bool):
    if way in AMD_WAYS and (reason := missing()) is not None:
        pytest.skip(reason)

    def code(offset: int) -> list[b.Instruction]:
        access = store(0, 0, 7) if writes else load(7, 0, 0)
        again = [] if writes else [*lookup("out"), store(0, 0, 7)]  # so that no compiler leaves the load out
        return [load(7, 1, 8), mov(6, 1), *lookup("grid"), alu(b.ADD, 0, imm=offset), access, *again, *END]

    if at == 0:
        run_unsound(way, code(at), code(0))
    else:
        with pytest.raises(WAYS[way]):
            run_unsound(way, code(at), code(0))


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize(("gpu", "wave", "apart"), ON_AMD)
@pytest.mark.parametrize(("bound", "by"), [(b.AND, 0xFFFFFF), (b.MOD, 9)])
def test_factors_on_amd_gpus_keep_their_bounds(gpu: str, wave: int, apart: bool, bound: int, by: int):
    """LLVM 22.1 multiplied all 32 bits of a register, although the program had masked the factor."""
    code = [load(7, 1, 8), load(8, 1, 16), alu(bound, 7, imm=by), alu(b.MUL, 7, imm=6), alu(b.ADD, 7, 8)]
    code += [*lookup("out"), store(0, 0, 7), *END]
    given, function = Generated(tuple(code), 64, 1, True).program()
    maps = {m.name: bytes(m.value_size) for m in given.maps.values()}
    cases = [Case((0, (1 << 64) - 1 - k, 5 << 31, 0, 0), maps, 0) for k in range(8)]
    expected = []
    for case in cases:
        run = StrictInterpreter(given, code, case)
        run.run()
        expected += [run.results()] * 2
    program = amdgcn.lower(given, check(given, function), wave)
    assert on_amd([(compile_for_amd(program, gpu, apart, POINT), cases)]) == [expected]


def test_what_is_explained_is_documented():
    text = (Path(__file__).resolve().parents[3] / "docs" / "reliability.md").read_text()
    for name in {*ONLY_THE_KERNEL.values(), *ONLY_OURS.values()}:
        assert name in text
