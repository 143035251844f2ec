#!/usr/bin/env python3
"""Whether copies for memtrace round floating-point sums as the original kernels do: what ptxas contracts in the one and in the other.

    python3 benchmarks/roundings.py build/conformance/hecbench/*/*

Files are programs or PTX; others are skipped. ptxas assembles each module's PTX and that of the copy, with lines, and each sum is
looked up in both. A sum that ptxas has merged with another one in either has no code of its own, and is not compared. Nothing runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "lib"), str(ROOT / "tests" / "support")]

from gpubpf.errors import ImageError  # noqa: E402
from gpubpf.images import fatbin  # noqa: E402
from gpubpf.images.assemble import Target, with_lines  # noqa: E402
from gpubpf.images.compiled_sums import operations_by_line  # noqa: E402
from gpubpf.images.instrument import choose, instrument_module  # noqa: E402
from gpubpf.memory.memory_options import MemoryOptions  # noqa: E402
from gpubpf.program import BPF  # noqa: E402
from gpubpf.ptx.module import PtxInstruction, Statement  # noqa: E402
from gpubpf.ptx.parser import parse  # noqa: E402
from gpubpf.show import cli  # noqa: E402
from gpubpf.tools import memtrace  # noqa: E402

TYPES = {"f32": "F", "f64": "D"}  # half precision: ptxas also adds with a contraction that multiplies by 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--cc", default="9.0", metavar="CC", help="compute capability (default: 9.0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="files at once (default: CPUs)")
    args = parser.parse_args()
    major, minor = map(int, args.cc.split("."))
    counts: Counter[str] = Counter()
    with ProcessPoolExecutor(args.jobs) as pool:
        targets = [Target("gpu", (major, minor))] * len(args.files)
        for path, (found, lines) in zip(args.files, pool.map(compare, args.files, targets), strict=True):
            counts += found
            print(*(f"{Path(path).name}: {line}" for line in lines), sep="\n", end="\n" if lines else "")
    for what, count in sorted(counts.items()):
        print(f"{count:9,} {what}")


def compare(path: str, target: Target) -> tuple[Counter[str], list[str]]:
    """Return counts of kernels and sums in a file, and a line for each sum that is contracted in only one."""
    counts: Counter[str] = Counter()
    lines: list[str] = []
    try:
        modules = fatbin.modules(fatbin.images_of_file(path))
    except (OSError, ImageError):
        return counts, lines
    program = BPF(text=memtrace.PROGRAM)
    memtrace.attach(
        program, MemoryOptions.of(cli.parse(memtrace.build_parser(), ["--no-allocations", "--", "true"]))
    )
    for images in modules:
        chosen = choose(images, target)
        if isinstance(chosen, str):
            counts["modules without PTX for this GPU"] += 1
            continue
        sidecar = instrument_module(images, program.attached.lowered_probes(), target)
        kernels = {kernel.name for kernel in sidecar.kernels}
        counts["kernels refused"] += len(sidecar.refusals)
        if kernels:
            counts["kernels"] += len(kernels)
            before = sums(chosen.text, target, chosen.options, kernels)
            after = sums(sidecar.text, target, sidecar.options, kernels)
            both = before.keys() & after.keys()
            counts["sums with code of their own in both"] += len(both)
            for place in sorted(both):
                if before[place] != after[place]:
                    counts["sums contracted in only one"] += 1
                    lines.append(
                        f"{' '.join(place)}: {before[place]} in the original, {after[place]} in the copy"
                    )
    return counts, lines


def sums(text: str, target: Target, options: str, kernels: set[str]) -> Mapping[tuple[str, str], str]:
    """Return what ptxas makes of the sums of these kernels, by kernel and sum (without a rounding mode).

    For example "FADD, FFMA"; "FFMA with %f3" where two products could be contracted.
    """
    cubin = with_lines(text, target, options, kernels)
    operations = operations_by_line(cubin) if cubin is not None else {}
    found: dict[tuple[str, str], str] = {}
    several: set[tuple[str, str]] = set()  # the same text at several places of a kernel
    entries = parse(text).entries
    for kernel in kernels:
        products: dict[str, bool] = {}  # by register: whether the product has code of its own
        for instruction in filter(_rounds, entries[kernel].body or ()):
            rest = [word for word in instruction.modifiers if word != "rn"]
            result, *operands = map(str, instruction.operands)
            kinds = operations.get(instruction.line, frozenset())
            if instruction.opcode == "mul":
                products[result] = f"{TYPES[rest[-1]]}MUL" in kinds
                continue
            place = kernel, f"{'.'.join([instruction.opcode, *rest])} {result}, {', '.join(operands)}"
            several |= {place} & found.keys()
            if kinds := kinds & {TYPES[rest[-1]] + end for end in ("ADD", "FMA")}:
                contracted = [name for name in operands if products.get(name) is False]
                two = len(contracted) == 1 and set(operands) <= products.keys()
                found[place] = ", ".join(sorted(kinds)) + (f" with {contracted[0]}" if two else "")
    return {place: kinds for place, kinds in found.items() if place not in several}


def _rounds(statement: Statement) -> TypeGuard[PtxInstruction]:
    return (
        isinstance(statement, PtxInstruction)
        and statement.opcode in ("mul", "add", "sub")
        and bool(statement.modifiers)
        and statement.modifiers[-1] in TYPES
        and {"rz", "rm", "rp", "sat"}.isdisjoint(statement.modifiers)
    )


if __name__ == "__main__":
    main()
