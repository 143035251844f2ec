#!/usr/bin/env python3
"""What probes cost in kernels of AMD GPUs: instructions that a wave executes more, and registers.

    python3 benchmarks/amd_probes.py [FILE.md]

The kernels are put into a code object by hipcc, the probes by the library, and hipsim's engine counts the instructions. No time is
measured, so the machine need not be idle.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "lib"), str(ROOT / "tests" / "support")]

import numpy as np  # noqa: E402

import gpubpf_gcn  # noqa: E402
from gpubpf.ebpf.bytecode import WIDE, Program  # noqa: E402
from gpubpf.ebpf.probe import Probe  # noqa: E402
from gpubpf.expressions import programs, specs  # noqa: E402
from gpubpf.gcn.code_object import CodeObject, GcnKernel  # noqa: E402
from gpubpf.gcn.inject import inject  # noqa: E402
from gpubpf.lower.programs import load  # noqa: E402
from gpubpf.memory.granularity import Grain  # noqa: E402
from gpubpf.tools import gpucount, kernelretsnoop, launchlate, memtrace, threadhist  # noqa: E402
from hipsim_engine import GPUS, Engine  # noqa: E402

SHAPE = ((1280, 1, 1), (256, 1, 1))
KERNELS = (
    ("none", (), 0, "empty"),
    ("reversed", ("x",), 8, "all lanes end together; 4 accesses, a barrier"),
    ("scale", ("x", "u32 1000"), 12, "a bound, and a loop"),
)
# Kernels with one store for each lane.
PATTERNS = """
#include <hip/hip_runtime.h>
#define STORE(NAME, WHERE) extern "C" __global__ void NAME(int *x) { int t = threadIdx.x; WHERE = 1; }
STORE(unit, x[t])
STORE(strided, x[t * 8])
STORE(odd, if (t & 1) x[t])
STORE(padded, __shared__ volatile int s[300]; s[t + t / 32])
STORE(gather, x[t * 37 & 1023])
STORE(shared_gather, __shared__ volatile int s[256]; s[t * t & 255])
"""
REQUESTS = (
    ("unit", ("x",), 8, "a lane beside the other"),
    ("strided", ("x",), 8, "32 bytes from lane to lane"),
    ("odd", ("x",), 8, "every second lane"),
    ("padded", ("x",), 8, "shared memory, with padding"),
    ("gather", ("x",), 8, "no order"),
    ("shared_gather", ("x",), 8, "no order, in shared memory"),
)
MOVES, ATOMIC = ("load", "store"), ("atomic",)


def accesses(which: str) -> tuple[tuple[Any, ...], ...]:
    """Return memtrace's programs at accesses; which: "" or "covered_"."""
    return (
        (f"on_{which}global", "access", None, MOVES, ("global",)),
        (f"on_{which}updated", "access", None, ATOMIC, ("global",)),
        ("on_local", "access", None, (), ("local",)),
        ("on_shared", "access", None, MOVES, ("shared",)),
        ("on_shared_updated", "access", None, ATOMIC, ("shared",)),
    )


def counted(spec: str) -> tuple[tuple[Any, ...], ...]:
    """Return gpucount's program for a SPEC."""
    found = specs.count(spec).attachment
    opcodes = found.arguments.get("opcodes", ())
    return ((programs.function_name(0), found.method, None, (), (), (), (opcodes,) if opcodes else ()),)


SPECS = ("bb:*", "branch:*", "instruction:*:v_add*", "instruction:*")
# A label, the tool, and its programs with their points, as in `Probe`.
Placed = tuple[tuple[Any, ...], ...]
MEMTRACE: tuple[tuple[str, str, Placed], ...] = (
    ("memtrace --no-allocations", "memtrace", accesses("")),
    ("memtrace", "memtrace", accesses("covered_")),
)
PROBES: tuple[tuple[str, str, Placed], ...] = (
    ("threadhist runs only", "threadhist", (("on_exit", "exit"),)),
    ("threadhist instructions", "threadhist", (("on_exit", "exit", "instructions"),)),
    ("kernelretsnoop", "kernelretsnoop", (("on_exit", "exit"),)),
    ("launchlate", "launchlate", (("on_entry", "entry"), ("on_exit", "exit"))),
    *MEMTRACE,
    ("a count per block", "points", (("on_begin", "block_begin"), ("on_end", "block_end"))),
    ("the longest wait at barriers", "points", (("on_leave", "barrier_leave"),)),
    *((f"gpucount '{spec}'", spec, counted(spec)) for spec in SPECS),
)
GRAIN = Grain().parameter + bytes(40)
HEAD = """# Probes in kernels of AMD GPUs

Instructions that a wave executes more, prologue included, and registers. Counted on hipsim, never
on an AMD GPU; no times. The kernels have one-dimensional grids of 1,280 work-items.

    python3 benchmarks/amd_probes.py benchmarks/results/amd_probes.md
"""
POINTS = """
#include <gpubpf.h>
GPU_ARRAY(counts, u64, 3);
static inline int count(int key) {
    u64 *mine = counts.lookup(&key);
    if (mine) __sync_fetch_and_add(mine, 1);
    return 0;
}
int on_begin(struct gpu_block_begin *ctx) { return count(0); }
int on_end(struct gpu_block_end *ctx) { return count(1); }
int on_leave(struct gpu_barrier_leave *ctx) {
    int key = 2;
    u64 waited = ctx->waited, *mine = counts.lookup(&key);
    if (mine) gpu_max(mine, waited);
    return 0;
}
"""
TEXTS = {
    "threadhist": WIDE + threadhist.PROGRAM,
    "kernelretsnoop": WIDE + kernelretsnoop.PROGRAM,
    "launchlate": WIDE + launchlate.PROGRAM,
    "memtrace": WIDE + memtrace.PROGRAM,
    "points": POINTS,
    **{spec: WIDE + programs.counting(gpucount.PROGRAM, [specs.count(spec)], chosen=False) for spec in SPECS},
}


def main(arguments: list[str]) -> int:
    """Measure, and print a table; also write it to a file, if one is named."""
    loaded = {tool: load(text).program for tool, text in TEXTS.items()}
    lines = [
        "| GPU | kernel | tool | per wave, without | more | VGPRs before | after |",
        "|---|---|---|---|---|---|---|",
    ]
    for gpu in GPUS:
        with tempfile.TemporaryDirectory() as place:
            code = gpubpf_gcn.build(Path(place), gpu)
            lines += rows(Path(place), gpu, CodeObject(code.read_bytes()), loaded, KERNELS, PROBES)
            code = gpubpf_gcn.build(Path(place), gpu, text=PATTERNS)
            lines += rows(Path(place), gpu, CodeObject(code.read_bytes()), loaded, REQUESTS, MEMTRACE)
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if arguments:
        Path(arguments[0]).write_text(f"{HEAD}\n{text}")
    return 0


def rows(
    place: Path, gpu: str, code: CodeObject, programs: Mapping[str, Program],
    kernels: Sequence[tuple[str, tuple[str, ...], int, str]], probes: Sequence[tuple[str, str, Placed]],
) -> list[str]:  # fmt: skip
    """Return the rows of a GPU."""
    made = []
    engine = Engine(place, gpu=gpu)
    for name, given, size, what in kernels:
        kernel = next(each for each in code.kernels if each.name == name)
        waves = SHAPE[0][0] // kernel.descriptor.wave
        before = run(engine, place, code.data, name, list(given))
        for label, tool, placed in probes:
            more, registers = probed(engine, place, code, kernel, programs[tool], placed, list(given), size)
            cells = (
                gpu,
                f"{name} ({what})",
                label,
                f"{before / waves:.0f}",
                f"{(more - before) / waves:.0f}",
                *registers,
            )
            made.append(f"| {' | '.join(map(str, cells))} |")
    engine.close()
    return made


def probed(
    engine: Engine, place: Path, code: CodeObject, kernel: GcnKernel, program: Program,
    placed: Sequence[tuple[Any, ...]], given: list[str], size: int,
) -> tuple[int, tuple[int, int]]:  # fmt: skip
    """Return the instructions of all waves with probes, and the VGPRs before and after."""
    wave = kernel.descriptor.wave
    probes = [Probe(gpubpf_gcn.lowered(program, name, wave), *where) for name, *where in placed]
    made = inject(code, {kernel.name: probes})
    found = made.kernels[kernel.name]
    for name in found.block.bases:
        engine.put(name, np.zeros(1 << 24, np.uint8))
    buffers = {name: name for name in found.block.bases}
    parameters = GRAIN if "grain" in found.block.params else bytes(64)
    rest = gpubpf_gcn.block_arguments(made, kernel.name, size, SHAPE, buffers, parameters)
    if (
        "departures" in found.block.bases
    ):  # a ring: its header says that there is no room, so a record is counted as lost
        engine.put("departures", np.ones(1 << 22, np.uint8))
    return run(engine, place, made.image, kernel.name, given + rest), found.registers


def run(engine: Engine, place: Path, image: bytes, name: str, arguments: list[str]) -> int:
    """Return how many instructions all waves execute."""
    file = place / f"image{len(list(place.glob('image*')))}.co"
    file.write_bytes(image)
    engine.load(file)
    engine.put("x", gpubpf_gcn.content(name))
    outcome = engine.run(name, arguments, *SHAPE)
    if outcome.fault is not None:
        raise SystemExit(f"{name}: {outcome.fault}")
    return outcome.instructions


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
