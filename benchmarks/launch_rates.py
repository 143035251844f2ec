#!/usr/bin/env python3
"""How many launches a second launchlate or gputop measures without a loss, and what that costs.

    python3 benchmarks/launch_rates.py [--tool gputop] [--seconds N] [--report FILE]

Builds launch_rates.cu with nvcc. It launches empty kernels of one thread on the embedded device, on its real clock, at several rates:
without a tool, then under the tool (gputop: with a report each second). The CPU time of the tool does not contain that of a run with
few launches. What runs besides takes part: the numbers are those of this machine at this moment.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Wanted launches a second (0: as many as possible), and kernels of a graph (0: no graph).
RUNS = (
    (50_000, 0),
    (100_000, 0),
    (200_000, 0),
    (300_000, 0),
    (400_000, 0),
    (0, 0),
    (300_000, 100),
    (300_000, 1000),
)
FEW = ("1000", "0.2")
TOOLS = {"launchlate": (), "gputop": ("1",)}  # and their arguments


@dataclass(frozen=True)
class Ran:
    """What a run came to. launched: kernels; rate: a second; cpu: ns of each launch in the process; total: seconds of CPU time of the
    process and the tool; summary: the last record of the tool."""

    launched: int
    rate: float
    cpu: float
    total: float
    summary: dict[str, int]


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(program: Path, arguments: tuple[str, ...], tool: str) -> Ran:
    """Run the program under a tool, or alone ("")."""
    output = program.parent / "records"
    traced = [str(ROOT / "tools" / f"{tool}.py"), "--clock", "real", "--json", "-o", str(output)]
    traced += TOOLS.get(tool, ())
    before = cpu_of_children()
    done = subprocess.run(
        [sys.executable, *(traced if tool else ("-m", "cudasim")), "--", str(program), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "lib"), "CUDASIM_HOSTILE": "0"},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    said = next((line.split()[1:] for line in done.stderr.splitlines() if line.startswith("rate ")), None)
    if done.returncode or said is None:
        sys.exit(done.stderr)
    launched, seconds, cpu = int(said[0]), float(said[1]), float(said[2])
    summary = json.loads(output.read_text().splitlines()[-1]) if tool else {}
    return Ran(launched, launched / seconds, 1e9 * cpu / launched, cpu_of_children() - before, summary)


def rows(program: Path, seconds: float, tool: str) -> list[list[str]]:
    """Return the rows of the table."""
    few = run(program, FEW, tool)
    fixed = few.total - few.cpu * few.launched / 1e9
    made = []
    for wanted, nodes in RUNS:
        arguments = (str(wanted), str(seconds), *((str(nodes),) if nodes else ()))
        alone, traced = (run(program, arguments, which) for which in ("", tool))
        own = 1e9 * (traced.total - fixed) / traced.launched - traced.cpu
        lost = [traced.summary[name] for name in ("launches_lost", "launches_untimed", "operations_lost")]
        cells = [f"{wanted:,}" if wanted else "all", f"graph of {nodes}" if nodes else "launch"]
        cells += [f"{alone.rate:,.0f}", f"{traced.rate:,.0f}", f"{traced.launched:,}"]
        cells += [f"{alone.cpu:,.0f}", f"{traced.cpu:,.0f}", f"{own:,.0f}", *(f"{n:,}" for n in lost)]
        made.append(cells)
        print(" | ".join(cells), flush=True)
    return made


HEADERS = (
    *("wanted", "by", "alone, launches/s", "under {tool}", "launches"),
    *("CPU alone, ns", "with probes", "{tool} itself", "times lost", "not timed", "records lost"),
)
TEXT = """# Launches a second that {tool} measures

Empty kernels of one thread on the embedded device, which executes them on the CPU, with {cores} cores (load average {load} at the
start, from other work). No GPU ran. CPU times are those of one launch: of the program with the embedded device, the same under
{tool}, and of {tool} itself.

    python3 benchmarks/launch_rates.py --tool {tool} --report {report}

"""


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description="Count the launches that a tool loses at several rates.")
    parser.add_argument("--tool", choices=TOOLS, default="launchlate", help="the tool (default: launchlate)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each run (default: 5)")
    parser.add_argument("--report", type=Path, help="write a table in Markdown to this file")
    args = parser.parse_args()
    text = TEXT.format(
        cores=len(os.sched_getaffinity(0)),
        load=f"{os.getloadavg()[0]:.1f}",
        tool=args.tool,
        report=args.report,
    )
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "launch_rates"
        source = ROOT / "benchmarks" / "launch_rates.cu"
        subprocess.run(["nvcc", "-std=c++17", "-O2", "-cudart", "shared", "-o", program, source], check=True)
        table = rows(program, args.seconds, args.tool)
    lines = [[title.format(tool=args.tool) for title in HEADERS], ["---"] * len(HEADERS), *table]
    if args.report:
        args.report.write_text(text + "".join(f"| {' | '.join(line)} |\n" for line in lines))


if __name__ == "__main__":
    main()
