"""Generate device programs, ask both gates about each, and run those that our gate accepts. Print how many there were.

PYTHONPATH=lib:tests/support python tests/support/gpubpf_verdicts.py --programs 10000 --lowered 10
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import hipsim_engine
from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import CONTEXTS, BpfFunction, Program
from gpubpf.ebpf.maps import MapDefinition, initial, record_stride
from gpubpf.errors import VerifyError
from gpubpf.lower import amdgcn, host_code, nvptx
from gpubpf.record import replace
from gpubpf.verify import kernel, rules
from gpubpf.verify.values import Checked, CheckedAccess
from gpubpf_generated import EDGES, FIELDS, POINT, WIDE_EDGES, Generated, generate, mutate
from gpubpf_generated import ROOM as STACK_ROOM
from gpubpf_guarded import (
    APART,
    COLLECTIVE,
    LANES,
    AmdCode,
    Case,
    Harmful,
    Job,
    StrictInterpreter,
    compile_for_amd,
    on_amd,
    on_device,
    on_host,
    readable,
    ring_results,
    room_of,
    values_of,
)

CASES = 8  # inputs of each program
EMBEDDED, ALONE, HOST = "embedded device", "embedded device, apart", "x86-64"
# How AMD's code runs: GPU, lanes of its waves, and whether each thread has a wave of its own. Each program runs in two of these ways.
ON_AMD = (
    ("gfx906", 64, True),
    ("gfx90a", 64, False),
    ("gfx1030", 32, True),
    ("gfx1030", 64, False),
    ("gfx90a", 64, True),
    ("gfx906", 64, False),
    ("gfx1030", 64, True),
    ("gfx1030", 32, False),
)
# Why only one gate accepts a program: what the other one says, and the row in docs/reliability.md.
_LESS = "numbers that our gate knows less about"
ONLY_THE_KERNEL = {
    r"adds a number without bounds": "an offset without bounds that is never used",
    r"not aligned|unaligned": "an access that is not aligned",
    r"never written": "bytes of the stack that were never written",
    r"compares an address": "an address compared with a number",
    r"an address; keep|holds an address|stores an address|calculates with an address|combines two addresses": "an address as a number",
    r"of its context, beyond": "bytes behind the context",
    r"unknown instruction|divides by the constant|shifts by": "instructions without a meaning that nothing reaches",
    r"parameter settings has no key|in a parameter": "a parameter's other keys",
    r"a record of \d+ bytes|with flags|a flag that is not|its argument (ctx|cell) is not": "a helper's argument",
    r"reaches offset|read before it has a value|may be NULL": _LESS,
    r"different memory on different paths": "one instruction for different memory",
    r"reads its context at an offset|reaches stack offset|only a number|reaches beyond|indexes an array on the stack": _LESS,
}
_BOUNDS = "numbers that the kernel knows less about"
ONLY_OURS = {
    r"unreachable insn": "instructions that nothing reaches",
    r"reserved fields": "fields without a meaning",
    r"unbounded m|out of bounds|outside of the allowed memory range|map_value_or_null|min value is negative": _BOUNDS,
    r"misaligned value access off": _BOUNDS,
    r"R[1-9] !read_ok|invalid mem access 'scalar'|math between map_value pointer": _BOUNDS,
    r"R0 !read_ok": "the result of a helper that returns none",
    r"subtraction from stack pointer|on pointer prohibited|pointer arithmetic": "arithmetic with an address of the stack",
    r"cannot return stack pointer": "an address of the caller's stack that a subprogram returns",
    r"modified ctx ptr": "the context's address plus a number",
    r"invalid size of register (spill|fill)|corrupted spill": "a number plus the stack's address, in a subprogram",
}


class Defect(AssertionError):
    """A program shows a defect of a gate or of a lowering."""


def _facts(program: Program, function: BpfFunction) -> tuple[Checked, str]:
    """Return what our gate learnt, and why it rejects the program. If it does, the facts are for `kernel.check` only."""
    checker = rules._Checker(program, function)
    try:
        return checker.run(), ""
    except VerifyError as error:
        why = str(error)
    names = {start: name for name, (start, _) in CONTEXTS[function.point].items()}
    accesses = dict(checker.accesses)
    for pc, i in enumerate(function.instructions):
        if i.cls == b.LDX and i.src == 6 and 0 <= i.offset < 8 * FIELDS:
            accesses.setdefault(((), pc), CheckedAccess("context", names[i.offset & ~7], i.offset & 7))
    return Checked(function, accesses, {}, frozenset(), frozenset(), {}, 0, STACK_ROOM - 8), why


def _difference(made: Generated, mutated: bool, checked: Checked, ours: str, kernels: str) -> str:
    """Return the class of a difference between the gates. Raises Defect if there is no such class."""
    table, said = (ONLY_THE_KERNEL, ours) if ours else (ONLY_OURS, kernels)
    if made.plain and not mutated and ours:
        raise Defect(f"only our gate rejects a program without anything special: {said}")
    where = re.search(r"instruction (\d+)", kernels)
    if where is not None and int(where[1]) not in {pc for _, pc in checked.reached}:
        return "instructions that only our gate knows to be out of reach"
    for pattern, name in table.items():
        if re.search(pattern, said):
            return name
    raise Defect(f"only one gate rejects the program, and nothing explains it: {said}")


def _cases(made: Generated, program: Program, rng: random.Random) -> list[Case]:
    """Return inputs near the bounds that the program tests, and others."""
    bounds = [i.imm for i in made.code]

    def word() -> int:
        if rng.random() < 0.5:
            number = rng.choice(bounds) + rng.choice((-1, 0, 1, 8))
        else:
            number = rng.choice((*EDGES, *WIDE_EDGES, rng.getrandbits(8), rng.getrandbits(64)))
        return number & (1 << 64) - 1

    def content(size: int) -> bytes:
        return b"".join(word().to_bytes(8, "little") for _ in range(size // 8))

    def stored(m: MapDefinition) -> bytes:
        return initial(m) if m.kind == "hash" else content(values_of(m) * m.value_size)

    rings = {m.name: record_stride(m) for m in program.maps.values() if m.kind == "ringbuf"}
    return [
        Case(
            tuple(word() for _ in range(FIELDS)),
            {m.name: stored(m) for m in program.maps.values() if m.kind != "ringbuf"},
            0,
            rings,
        )
        for _ in range(CASES)
    ]


@dataclass(frozen=True)
class Expected:
    """What the runs of a program must leave: None if that depends on which lanes run together. `kinds`: of its helpers."""

    number: int
    maps: Mapping[str, MapDefinition]
    left: list[dict[str, bytes]] | None
    kinds: frozenset[str] = frozenset()


KINDS = {"hash": {2, 3}, "ring": {25, 130, 131}, "print": {6}, "lanes": LANES}


def _interpreted(
    made: Generated, program: Program, cases: Sequence[Case], apart: bool
) -> tuple[list[dict[str, bytes]] | None, frozenset[int]]:
    """Return what runs of a program leave, as `on_device` does if it is known, and the helpers that they call."""
    runs = []
    for row, case in enumerate(case for case in cases for _ in range(2)):
        given = replace(case, thread=APART * row if apart else row)
        runs.append(StrictInterpreter(program, made.code, given, room_of(row, apart)))
        runs[-1].run()
    called = frozenset[int]().union(*(run.called for run in runs))
    left = [run.results() for run in runs]
    for name, stride in cases[0].rings.items():
        for number, group in enumerate([run] for run in runs) if apart else [(0, runs)]:
            records = [record for run in group for record in run.records[name]]
            left[number][name] = ring_results(
                records, sum(run.lost[name] for run in group), stride, not apart
            )
    known = all(run.clear for run in runs) and (apart or not called & COLLECTIVE)
    return left if known else None, called


class Batch:
    """Programs of one seed. `counts` says what became of them. collecting: all may use every helper and map."""

    def __init__(self, seed: int, lowered: int = 1, collecting: bool = False) -> None:
        self.with_amd = hipsim_engine.missing() is None
        self.rng, self.seed, self.lowered, self.collecting = random.Random(seed), seed, lowered, collecting
        self.counts: Counter[str] = Counter()
        self.fragments: list[tuple[nvptx.Fragment, list[Case]]] = []
        self.fragments_apart: list[tuple[nvptx.Fragment, list[Case]]] = []
        self.jobs: list[Job] = []
        self.expected: defaultdict[str, list[Expected]] = defaultdict(list)  # by where the programs run
        self.on_amd: defaultdict[str, list[tuple[AmdCode, list[Case]]]] = defaultdict(list)  # by GPU
        self.ways_on_amd = itertools.cycle(ON_AMD)

    def add(self, number: int) -> None:
        """Generate the next program, ask the gates, and interpret it. One of `lowered` programs is also lowered."""
        made = generate(self.rng, self.collecting)
        mutated = bool(number % 2)
        if mutated:
            made = mutate(made, self.rng)
        try:
            self._add(number, made, mutated)
        except (Defect, Harmful) as error:
            raise Defect(f"seed {self.seed}, program {number}: {error}") from None

    def _add(self, number: int, made: Generated, mutated: bool) -> None:
        kind = "mutated" if mutated else "sound"
        program, function = made.program()
        checked, ours = _facts(program, function)
        kernels: str | None = ""
        try:
            release = kernel.check(program, checked)
        except VerifyError as error:
            release, kernels = "", str(error)
        if release is None:  # without CAP_BPF
            verdict = "not asked"
        else:
            verdict = ("neither", "the kernel", "ours", "both")[2 * (not ours) + (not kernels)]
            if bool(ours) != bool(kernels):
                self.counts[f"only {verdict}: {_difference(made, mutated, checked, ours, str(kernels))}"] += 1
        self.counts[f"{kind}: {verdict}"] += 1
        if ours:
            return
        cases = _cases(made, program, self.rng)
        left, called = _interpreted(made, program, cases, apart=False)
        self.counts["interpreted"] += 1
        kinds = frozenset(kind for kind, helpers in KINDS.items() if called & helpers)
        if number // 2 % self.lowered:
            return
        expected = Expected(number, program.maps, left, kinds)
        try:
            fragment = nvptx.lower(program, checked)
        except VerifyError as error:
            if "does not fit into registers" not in str(error):
                raise Defect(str(error)) from None
            self.counts["no PTX: the stack does not fit into registers"] += 1
        else:
            self.fragments.append((fragment, cases))
            self.expected[EMBEDDED].append(expected)
            if made.record or made.on_lanes:
                alone, _ = _interpreted(made, program, cases, apart=True)
                self.fragments_apart.append((fragment, cases))
                self.expected[ALONE].append(replace(expected, left=alone))
        if not made.only_on_gpus:
            self.jobs.append(Job(host_code.lower(*made.program(host=True)), cases))
            self.expected[HOST].append(expected)
        if (
            made.record or made.on_lanes
        ):  # the tests pass no thread numbers to AMD's code, and have no rings there
            return
        for gpu, wave, apart in itertools.islice(self.ways_on_amd, 2 if self.with_amd else 0):
            lowered = amdgcn.lower(program, checked, wave)
            try:
                code = compile_for_amd(lowered, gpu, apart, POINT)
            except VerifyError as error:
                if "does not fit into registers" not in str(error):
                    raise Defect(str(error)) from None
                self.counts["no AMD code: the stack does not fit into registers"] += 1
            else:
                self.on_amd[gpu].append((code, cases))
                self.expected[gpu].append(expected)

    def run(self) -> None:
        """Run what was lowered. Raises Defect, or what `on_device`, `on_host` and `on_amd` raise."""
        for where, found in (
            (EMBEDDED, on_device(self.fragments, POINT) if self.fragments else []),
            (ALONE, on_device(self.fragments_apart, POINT, apart=True) if self.fragments_apart else []),
            (HOST, on_host(self.jobs)),
            *((gpu, on_amd(codes)) for gpu, codes in self.on_amd.items()),
        ):
            for wanted, got in zip(self.expected.pop(where, []), found, strict=True):
                if wanted.left is not None and wanted.left != [readable(wanted.maps, one) for one in got]:
                    raise Defect(
                        f"seed {self.seed}, program {wanted.number}: {where} computes something else"
                    )
                self.counts.update(f"run: {where}, {kind}" for kind in wanted.kinds)
                self.counts[f"run: {where}, known"] += wanted.left is not None
            self.counts[f"run: {where}"] += len(found)
        self.fragments, self.fragments_apart, self.jobs = [], [], []
        self.on_amd.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--programs", type=int, default=1000, help="how many programs (default: 1000)")
    parser.add_argument(
        "--seed", type=int, default=0, help="the first seed; 100 programs have one (default: 0)"
    )
    parser.add_argument("--lowered", type=int, default=1, help="lower and run one of so many (default: 1)")
    parser.add_argument(
        "--collecting", action="store_true", help="let all programs use hashes, rings, prints and lanes"
    )
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + -(-arguments.programs // 100)):
        batch = Batch(seed, arguments.lowered, arguments.collecting)
        try:
            for number in range(100):
                batch.add(number)
            batch.run()
        except Exception as error:  # one defect does not end the search for others
            counts["defect"] += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
        counts += batch.counts
    for name, count in sorted(counts.items()):
        print(f"{count:9,} {name}")


if __name__ == "__main__":
    main()
