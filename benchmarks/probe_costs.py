#!/usr/bin/env python3
"""What the shipped probes cost in a kernel with one exit and one access: SASS instructions, and registers.

    python3 benchmarks/probe_costs.py [FILE.md]

ptxas assembles the kernel with and without the probes, and nvdisasm lists both. Nothing runs and no time is measured, so the machine
need not be idle.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "lib"), str(ROOT / "tests" / "support")]

import access_paths  # noqa: E402
from gpubpf.ebpf.sampling import Sampling, Unit  # noqa: E402
from gpubpf.images.occupancy import limit_of_copy  # noqa: E402
from gpubpf.inject.inject import inject  # noqa: E402
from gpubpf.inject.injected import Injected  # noqa: E402
from gpubpf.inject.probe_text import FREQUENT  # noqa: E402
from gpubpf.memory.memory_options import MemoryOptions  # noqa: E402
from gpubpf.program import BPF  # noqa: E402
from gpubpf.ptx.parser import parse  # noqa: E402
from gpubpf.show import cli  # noqa: E402
from gpubpf.tools import kernelretsnoop, launchlate, memtrace, threadhist  # noqa: E402
from gpubpf_sass import assembled, registers, sass  # noqa: E402

TARGETS = ("sm_75", "sm_80", "sm_90")
KERNEL = """.version 8.3
.target {arch}
.address_size 64
.visible .entry k(.param .u64 p, .param .u64 q) {{
    .reg .b32 %r<2>; .reg .b64 %rd<5>;
    mov.u32 %r1, %tid.x;
    ld.param.u64 %rd1, [p];
    ld.param.u64 %rd4, [q];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.volatile.global.u32 [%rd3], %r1;
{more}    ret;
}}
"""
MORE = """    add.s64 %rd3, %rd3, %rd4;
    st.volatile.global.u32 [%rd3], %r1;
"""
STORES = 5  # of the kernel that tells what each further store costs
VALUES = (20, 36, 64, 100)  # that live across the store of a crowded kernel
OWN = ("store",)  # what the kernel itself does with memory
# What paths are told by: operations on memory.
OPERATIONS = (
    ("max", r"(?:RED|ATOM)G?\.E\.MAX"),
    ("add", r"(?:RED|ATOM)G?\.E\.ADD"),
    ("load", r"LDG?\.E"),
    ("store", r"STG?\.E"),
    ("other", r"(?:RED|ATOM)"),
)
# Those of kernelretsnoop's probe in a lane.
EXITS = {
    "all lanes of a warp together": ("add", "max"),
    "the same in a block's first warp": ("add", "max", "store", "store"),
    "one lane alone, late": ("max", "max", "max", "add", "add", "add", "max", "add"),
}
CHOSEN_EXITS = {**EXITS, "one lane alone, late": ("add", "max", "max", "max", "add", "add", "add", "max")}
NOT_CHOSEN = "a thread of a block that is not chosen"
HEAD = f"""# Probes on NVIDIA GPUs

What probes add to a kernel with one store and one exit: SASS instructions (ptxas, nvdisasm), and
registers. No GPU ran, and no time is measured. "In the code" are all instructions of the probes.
"Each further store" is measured in a kernel with {STORES} stores: what a probe costs without the part
that is done once, where the kernel begins. A store in a loop costs that much in each turn.
"Executed" are those that the warp issues on the path named, the shortest one with its accesses to
memory, in the lane that executes most; what a false predicate switches off counts. No launch is that
of a graph. With sampling, these are the choice at the beginning of the kernel, and the branch to the
original's instructions.

    python3 benchmarks/probe_costs.py benchmarks/results/probe_costs.md
"""
CROWDED = """
## Registers of kernels with many values

A thread may use 32 registers without fewer warps. From 36 values on, these kernels need more: so many
values live across a store in a loop. `41+5`: the kernel has 41 registers, and its copy 5 more. Copies
have the limit that tools set. In parentheses: the bytes per thread that ptxas spills for it.

"""


@dataclass(frozen=True)
class Probes:
    """Probes of a tool. paths: what a lane executes, told by what happens on the way (`access_paths.executed`). repeated: the
    path, with its store, that a lane executes once more for each further store."""

    label: str
    bpf: BPF
    paths: dict[str, Sequence[str]]
    landmarks: Sequence[tuple[str, str]] = OPERATIONS
    repeated: Sequence[str] = ()


def probes() -> list[Probes]:
    """Return the probes to measure: those of the default mode of each tool, and what options make of them."""
    made = []
    for work in ("stores", "instructions"):
        b = BPF(text=threadhist.PROGRAM)
        b.attach_gpu_exit(fn_name="on_exit", accumulate=work)
        made.append(Probes(f"threadhist --work {work}", b, {"each thread": (*OWN, "add")}))
    for label, function, exits in (
        ("kernelretsnoop", "on_exit", EXITS),
        ("kernelretsnoop --block", "on_chosen_exit", CHOSEN_EXITS),
    ):
        b = BPF(text=kernelretsnoop.PROGRAM)
        b.attach_gpu_exit(fn_name=function)
        made.append(Probes(label, b, {name: (*OWN, *path) for name, path in exits.items()}))
    b = BPF(text=launchlate.PROGRAM)
    b.attach_gpu_entry(fn_name="on_entry")
    b.attach_gpu_exit(fn_name="on_exit")
    late = {
        "not the first thread of one of the first 256 blocks": (*OWN, "max"),
        "the first thread of one of the first 256 blocks": ("max", "store", *OWN, "max"),
    }
    made.append(Probes("launchlate", b, late))
    made += [sampled("block"), sampled("warp")]
    for option in ("--no-allocations", ""):
        b = BPF(text=memtrace.PROGRAM)
        memtrace.attach(
            b, MemoryOptions.of(cli.parse(memtrace.build_parser(), [*option.split(), "--", "true"]))
        )
        (path,) = [name for name in access_paths.paths(not option, False) if "first" not in name]
        unit = (*access_paths.PATHS[path], *OWN)
        label = f"memtrace {option}".strip()
        made.append(Probes(label, b, {"unit stride": unit}, access_paths.LANDMARKS, unit))
    return made


def sampled(unit: Unit) -> Probes:
    """Return memtrace's probes with sampling."""
    b = BPF(text=memtrace.PROGRAM)
    b.attached.sampling = Sampling(unit, 16, 1)
    memtrace.attach(
        b, MemoryOptions.of(cli.parse(memtrace.build_parser(), ["--no-allocations", "--", "true"]))
    )
    return Probes(f"memtrace --sample-{unit}s 1/16", b, {NOT_CHOSEN.replace("block", unit): OWN})


def main(arguments: list[str]) -> int:
    """Measure, and print a table; also write it to a file, if one is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", help="write the table to this file, too")
    file = parser.parse_args(arguments).file
    lines = [
        "| probes | GPU | registers before | after | in the code | path | executed |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as place:
        for found in probes():
            lines += [row for arch in TARGETS for row in rows(Path(place), arch, found)]
        table = [
            f"| probes | GPU | {' | '.join(f'{values} values' for values in VALUES)} |",
            f"|---|---|{'---|' * len(VALUES)}",
        ]
        for found in probes():
            for arch in TARGETS:
                cells = []
                for values in VALUES:
                    before, after, spilled = crowded_registers(Path(place), arch, found, values)
                    cells.append(f"{before}{after - before:+}" + (f" ({spilled})" if spilled else ""))
                table.append(f"| {found.label} | {arch} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n" + CROWDED + "\n".join(table) + "\n"
    print(text, end="")
    if file:
        file.write_text(f"{HEAD}\n{text}")
    return 0


def kernel(arch: str, stores: int = 1) -> str:
    """Return the kernel in PTX, with so many stores."""
    return KERNEL.format(arch=arch, more=MORE * (stores - 1))


def crowded(arch: str, values: int) -> str:
    """Return a kernel in PTX that has so many values of 4 bytes in a loop with a store."""
    kept = range(3, values + 3)
    lines = [f"mul.lo.u32 %r{n}, %r1, {7 * n + 3};" for n in kept]
    lines += ["mov.u32 %r2, 0;", "AGAIN:"]
    lines += [f"xor.b32 %r{n}, %r{n}, %r{3 + (5 * n + 1) % values};" for n in kept]
    lines += ["st.volatile.global.u32 [%rd3], %r3;", "add.s64 %rd3, %rd3, %rd4;", "add.u32 %r2, %r2, 1;"]
    lines += ["setp.lt.u32 %p1, %r2, %r1;", "@%p1 bra AGAIN;"]
    lines += [f"mad.lo.u32 %r1, %r1, 3, %r{n};" for n in kept]
    text = kernel(arch).replace("%r<2>;", f"%r<{values + 3}>; .reg .pred %p<2>;")
    return text.replace("    st.volatile", "\n".join(lines) + "\n    st.volatile")


def crowded_registers(place: Path, arch: str, found: Probes, values: int) -> tuple[int, int, int]:
    """Return the registers of a crowded kernel and of its copy, and the bytes per thread that the copy spills."""
    plain = crowded(arch, values)
    before = registers(assembled(plain, arch, place)[1])["k"]
    said = assembled(limited_copy(plain, found, before).text, arch, place)[1]
    spilled = re.search(r"(\d+) bytes spill stores", said)
    return before, registers(said)["k"], int(spilled[1]) if spilled else 0


def limited_copy(plain: str, found: Probes, before: int) -> Injected:
    """Return the copy of a kernel that has `before` registers, with the limit that images/copies.py sets."""
    probes = found.bpf.attached.probes_of(["k"])
    made = inject(parse(plain), probes)
    lines = max((p.program.ptx.count("\n") + 1 for p in probes["k"] if p.point in FREQUENT), default=0)
    return made.within({"k": limit_of_copy(before, 0 if made.kernels["k"].split else lines)})


def rows(place: Path, arch: str, found: Probes) -> list[str]:
    """Return the rows of some probes on a GPU: one for each path."""
    (before, short, alone), (after, long, executed) = costs(place, arch, found, 1, list(found.paths.values()))
    first = [more - own for more, own in zip(executed, alone, strict=True)]
    counts = dict(zip(found.paths, map(str, first), strict=True))
    if found.repeated:
        (*_, (own,)), (*_, (more,)) = costs(place, arch, found, STORES, [found.repeated * STORES])
        counts["each further store"] = f"{(more - own - first[0]) / (STORES - 1):.0f}"
    return [
        f"| {found.label} | {arch} | {before} | {after} | {long - short} | {name} | {count} |"
        for name, count in counts.items()
    ]


def costs(
    place: Path, arch: str, found: Probes, stores: int, paths: Sequence[Sequence[str]]
) -> list[tuple[int, int, list[int]]]:
    """Return registers, instructions, and those executed on each path, of the kernel without and with the probes."""
    plain = kernel(arch, stores)
    made = limited_copy(plain, found, registers(assembled(plain, arch, place)[1])["k"])
    result = []
    for text, wanted in ((plain, [OWN * stores] * len(paths)), (made.text, paths)):
        cubin, said = assembled(text, arch, place)
        length = sum(not line.startswith(".L") for line in sass(cubin)["k"])
        ways = [access_paths.executed(cubin.read_bytes(), "k", path, found.landmarks) for path in wanted]
        result.append((registers(said)["k"], length, [len(way) for way in ways]))
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
