#!/usr/bin/env python3
"""How fast the embedded CUDA device runs programs, alone and under tools, compared with an older commit.

    python3 benchmarks/device_speed.py --before DIR --report benchmarks/results/device_speed.md 'hecbench=DIRECTORY:[ft]s*'

DIR is a checkout of the older commit with its libraries built (make -C lib/cudasim, and lib/gpubpf/agent for tools); without --before,
only this commit is measured. The programs are those of the suites that are named, with a checkout of each (docs/conformance.md). Both
commits run each program in turn: once to fill the caches, and then --runs times. The table has the least of these times. It is CPU
time, user and system, of the program with what the tool does in its process. The tool's own process, and translating and assembling
kernels, are not in it. So the machine need not be idle, but CPU time also grows on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("lib", "tests", "tests/support", "benchmarks")]

from conformance import build  # noqa: E402
from conformance.tools import finished  # noqa: E402
from executed import programs  # noqa: E402

ALONE = "alone"
LIMIT = 600.0  # seconds for one run
# Runs a command, and writes the CPU time of the shell and of the command to a file.
TIMED = ["bash", "-c", 'file=$1; shift; "$@" >/dev/null; status=$?; times >"$file"; exit $status', "timed"]
HEAD = """\
# Speed of the embedded CUDA device

`benchmarks/device_speed.py` makes the tables of CPU time; anything else is by hand.

CPU time (user and system) of each program in seconds, with what a tool does in its process;
without the tool's own process, and without translating and assembling kernels. {compared}After a first run, which fills the caches,
the table has the least time of all further runs (here {runs}). On a busy machine, CPU time varies by a tenth or two.
"""
COMPARED = (
    "Each program ran in turn with the older commit\n({:.8}), and with its tools, which are older, too. "
)


@dataclass(frozen=True)
class Row:
    """The CPU time of one program in one way, in seconds, with the older commit and with this one."""

    program: str
    way: str
    before: float | None  # None if the older commit was not measured, or cannot run it
    after: float


def seconds(checkout: Path, way: str, command: Sequence[str], place: Path | None) -> float | None:
    """Return the CPU time of a command on the embedded device of a checkout, alone or under a tool; None if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "times"
        tool = [str(checkout / "tools" / f"{way}.py"), "--device", "sim", "--json", "-o", os.devnull]
        how = ["-m", "cudasim.launcher"] if way == ALONE else tool
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CUDASIM_")}
        environment["PYTHONPATH"] = str(checkout / "lib")
        environment["CUDASIM_OPTIMIZE_AFTER"] = "never"  # what is measured would depend on earlier runs
        whole = [sys.executable, *how, "--", *TIMED, str(file), *command]
        status = finished(whole, LIMIT, place, environment)[2]
        return total(file.read_text()) if status == 0 else None


def total(times: str) -> float:
    """Return the seconds that bash's `times` printed for the commands that it ran: user and system."""
    return sum(
        int(m) * 60 + float(s) for m, s in (t.rstrip("s").split("m") for t in times.split("\n")[1].split())
    )


def measure(
    name: str, way: str, checkouts: Sequence[Path], command: Sequence[str], place: Path | None, runs: int
) -> Row | None:
    """Run a program in one way with each checkout in turn; the last one is this commit. Return None if it fails with this commit."""
    rounds = [[seconds(checkout, way, command, place) for checkout in checkouts] for _ in range(runs + 1)][1:]
    *before, after = ([s for s in column if s is not None] for column in zip(*rounds, strict=True))
    if len(after) < runs:
        return None
    return Row(name, way, min(before[0]) if before and len(before[0]) == runs else None, min(after))


def report(rows: Sequence[Row]) -> str:
    """Return the tables: one line for each program and way, and the medians."""
    alone = {r.program: r.after for r in rows if r.way == ALONE}
    lines = ["| program | | before | after | before / after | after / alone |", "|---|---|---|---|---|---|"]
    for r in rows:
        before = "" if r.before is None else f"{r.before:.2f}"
        cells = (
            r.program,
            r.way,
            before,
            f"{r.after:.2f}",
            ratio(r.before, r.after),
            ratio(r.after, alone.get(r.program)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| | programs | median of before / after | median of after / alone | most |",
        "|---|---|---|---|---|",
    ]
    for way in dict.fromkeys(r.way for r in rows):
        of_way = [r for r in rows if r.way == way and r.after]
        faster = [r.before / r.after for r in of_way if r.before is not None]
        slower = [r.after / alone[r.program] for r in of_way if alone.get(r.program)]
        cells = (
            way,
            str(len(of_way)),
            _of(statistics.median, faster),
            _of(statistics.median, slower),
            _of(max, slower),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.1f}" if one is not None and other else ""


def _of(what: Callable[[Sequence[float]], float], values: Sequence[float]) -> str:
    return f"{what(values):.1f}" if values else ""


def main(arguments: Sequence[str]) -> int:
    """Measure the programs of the command line; print a report, or write it to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("suites", nargs="+", metavar="SUITE=DIRECTORY[:GLOB]")
    parser.add_argument("--before", type=Path, help="a checkout of an older commit, to compare with")
    parser.add_argument("--ways", default=ALONE, help=f"{ALONE}, or tools, with commas (default {ALONE})")
    parser.add_argument("--runs", type=int, default=2, help="runs of each program (default 2)")
    parser.add_argument("--report", type=Path, help="write the tables to this file after each program")
    args = parser.parse_args(arguments)
    checkouts = [args.before.resolve(), ROOT] if args.before else [ROOT]
    head = HEAD.format(
        runs=args.runs,
        compared=COMPARED.format(build.commit(args.before) or "unknown") if args.before else "",
    )
    rows = []
    for name, command, place, _ in programs(args.suites):
        for way in args.ways.split(",") if place else ():
            row = measure(name, way, checkouts, command, place, args.runs)
            print(f"{name} {way}: {'failed' if row is None else row}", file=sys.stderr)
            rows += [row] if row else []
            if rows and args.report:  # also of a run that is stopped
                args.report.write_text(f"{head}\n{report(rows)}")
    if not rows:
        print("no program could be measured", file=sys.stderr)
        return 1
    if not args.report:
        print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
