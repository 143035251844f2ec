"""Find out whether the Compute Sanitizer API can instrument kernels that are machine code alone: counts, overhead, limits.

programs/patches.cpp is loaded into the program by the driver; it patches every module with what probes.py makes: a call at each block
exit, and one at each access of global memory, which count for each launch. docs/gpu.md says what is asked.
"""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path

from gpu.machine import PLACE, Failure, Machine, Missing, last_line
from gpu.overhead import TURNS, Times, by_turns, rounds
from gpu.stage import Part, Result

Counts = dict[str, dict[str, int]]

# Program, Python modules it needs, and what is known of kernels in it: a part of the name (an expression); of a launch exits and
# accesses of global memory (0: not known, but some).
PROGRAMS: tuple[tuple[str, tuple[str, ...], tuple[tuple[str, int, int], ...]], ...] = (
    # 4,096 threads; of each two loads and a store.
    ("programs/workloads triad 4096 3 1", (), (("triad", 4096, 3 * 4096),)),
    # The same in a graph, and small kernels behind each other: 8 of softmax's blocks in a token and one at its end.
    ("programs/workloads decode-graph 256 2 1", (), (("multiply", 8192, 0), ("addTo", 256, 768))),
    ("streams", (), ()),
    ("programs/torch_work.py add", ("torch",), (("elementwise", 0, 0),)),
    ("programs/torch_work.py matmul", ("torch",), (("gemm|nvjet|cutlass", 0, 0),)),
    ("programs/torch_work.py replay", ("torch",), (("elementwise", 0, 0),)),
)
COSTS = {
    "triad, 1 Mi elements": ("programs/workloads triad 1048576 20 3", ()),
    "tiled GEMM, 1024": ("programs/workloads tiled 1024 5 3", ()),
    "decode, graph": ("programs/workloads decode-graph 512 10 3", ()),
    "cuBLAS GEMM": ("programs/torch_work.py matmul 20", ("torch",)),
}

LATE_PHASES, LATE_EXITS = 10, 100 << 16  # of late.cpp: phases, each in a stream and by a graph; exits in each

SECONDS = 40  # for the turns of one of them


def parts(machine: Machine) -> list[Part]:
    found = [Part("a running program is patched, and left again", functools.partial(late, machine), 20)]
    for program, modules, known in PROGRAMS:
        run = functools.partial(counts, machine, program, modules, known)
        found.append(Part(f"counts of {program.removeprefix('programs/')}", run, 30))
    found += [
        Part(name, functools.partial(cost, machine, *words), SECONDS, 2 * SECONDS)
        for name, words in COSTS.items()
    ]
    return found


def injected(machine: Machine, results: Path, which: str = "exits,accesses") -> dict[str, str]:
    """Return the environment that makes the driver load the patches. Raises Missing."""
    if machine.sim:
        raise Missing("the Compute Sanitizer API needs NVIDIA's driver")
    library, patches = PLACE / "programs" / "libpatches.so", PLACE / "programs" / "patches.cubin"
    if not library.exists() or not patches.exists():
        raise Missing("the packed file has no patches")
    return {
        "CUDA_INJECTION64_PATH": str(library),
        "PATCHES_CUBIN": str(patches),
        "PATCHES_LIBRARY": str(PLACE / "lib" / "libsanitizer-public.so"),
        "PATCHES_RESULTS": str(results),
        "PATCHES_WHICH": which,
    }


def late(machine: Machine) -> Result:
    """Find out whether a program can be patched after it made contexts and graphs: then `-p` could measure kernels without PTX."""
    injected(machine, Path(os.devnull))
    programs = PLACE / "programs"
    library, image, patches = PLACE / "lib" / "libsanitizer-public.so", "late.cubin", "patches.cubin"
    done = machine.start(
        [str(programs / "late"), str(library), str(programs / image), str(programs / patches)], 30
    )
    return judged(done.returncode, done.stdout)


def judged(status: int, text: str) -> Result:
    """Return what late.cpp printed, and the answers. Only different results of the program are wrong."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    phases = [json.loads(line) for line in lines]
    of = {(one["phase"], one["graph"]): one for one in phases}
    result: Result = {"phases": phases, "wrong": ""}
    if status or len(of) != LATE_PHASES:
        result["wrong"] = f"the program ended with status {status} after {len(of)} of {LATE_PHASES} phases"
    elif len({one["sum"] for one in phases}) > 1:
        result["wrong"] = "the program's results differ between the phases"
    else:
        counted = [
            f"{'graph' if graph else 'stream'}: {of[phase, graph]['exits']:,} exits {phase}"
            for phase in ("patched", "unpatched", "patched again", "unsubscribed")
            for graph in (False, True)
        ]
        refused = [
            f"{one['phase']}: error {one['result']}" for one in phases if one["result"] and not one["graph"]
        ]
        result["answer"] = "; ".join([f"{LATE_EXITS:,} exits are all", *refused, *counted])
    return result


def counts(
    machine: Machine, program: str, modules: tuple[str, ...], known: tuple[tuple[str, int, int], ...]
) -> Result:
    """Compare counts by kernel with the known ones, and check that the program does not notice the patches."""
    results = Path(machine.environment["XDG_CACHE_HOME"], "patches.json")
    environment = injected(machine, results)
    machine.needs(*modules)
    command = machine.program(program)
    plain = machine.start(command, 60)
    if plain.returncode:
        raise Failure(f"the program fails alone: {last_line(plain)}")
    results.unlink(missing_ok=True)
    done = machine.start(command, 60, environment)
    if not results.exists():
        raise Failure(f"nothing was counted: exit status {done.returncode}, {last_line(done)}")
    said = json.loads(results.read_text())
    kernels: Counts = said["kernels"]
    result: Result = {"wrong": "", "answer": f"{len(kernels)} kernels counted", **said}
    ends = [line for line in done.stdout.splitlines() if not line.startswith("round ")]
    if (done.returncode, ends) != (
        plain.returncode,
        [x for x in plain.stdout.splitlines() if not x.startswith("round ")],
    ):
        result["wrong"] = f"the program ends differently: {done.returncode}, {last_line(done)}"
    for name, exits, accesses in known:
        of = [row for kernel, row in kernels.items() if re.search(name, kernel)]
        if not of or not of[0]["launches"]:
            result["wrong"] = result["wrong"] or f"{name} was not counted"
            continue
        launches, seen, touched = of[0]["launches"], of[0]["exits"], of[0]["accesses"]
        if (exits and seen != exits * launches) or (accesses and touched != accesses * launches) or not seen:
            result["wrong"] = (
                result["wrong"]
                or f"{name}: {seen} exits and {touched} accesses in {launches} launches,"
                f" known are {exits} and {accesses} of each"
            )
    return result


def cost(machine: Machine, program: str, modules: tuple[str, ...]) -> Result:
    """Return ratios to the program alone, for each kind of patch."""
    results = Path(machine.environment["XDG_CACHE_HOME"], "patches.json")
    injected(machine, results)
    machine.needs(*modules)
    command = machine.program(program)

    def timed(which: str | None) -> Times:
        environment = injected(machine, results, which) if which is not None else {}
        done = machine.start(command, 60, environment)
        if done.returncode:
            raise Failure(f"exit status {done.returncode}: {last_line(done)}")
        return rounds(done.stdout)

    ways = {
        "alone": functools.partial(timed, None),
        "again": functools.partial(timed, None),
        "loaded, no patch": functools.partial(timed, ""),
        "block exits": functools.partial(timed, "exits"),
        "global accesses": functools.partial(timed, "accesses"),
    }
    return {"program": program, **by_turns(ways, TURNS, machine, SECONDS)}
