#!/usr/bin/env python3
"""How many instructions memtrace executes for one request of each pattern: python3 benchmarks/requests.py [FILE.md]

The kernels of requests.cu have one access in a loop. What they execute alone and under memtrace is counted and estimated as
executed.py does it; the difference is divided by the requests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import executed

SOURCE = Path(__file__).with_suffix(".cu")
REQUESTS = 8 * 4 * 4 * 64  # launches, blocks, warps of a block, turns
OPTIONS = (("--no-allocations",), ())
HEAD = """# What a request costs memtrace

SASS instructions for sm_90 that a warp executes for one more access with this pattern, and registers
that the kernel needs more: an estimate of what ptxas makes of what ran on the embedded device. No GPU
ran, and nothing is timed. Rows are those of a block of 16 x 8 threads. Of 8 launches, the last 7 touch
bytes that were touched before; "new bytes" are different ones in each launch.

    python3 benchmarks/requests.py benchmarks/results/requests.md

| access | without allocations | registers | with allocations | registers |
|---|---|---|---|---|
"""


def kernels() -> list[str]:
    """Return the names of the kernels, in the order of requests.cu."""
    table = SOURCE.read_text().split("kernels[])", 1)[1].split("};", 1)[0].split("{", 1)[1]
    table = re.sub(r"BOTH\((\w+)\)", r"global_\1, shared_\1", table)
    return re.findall(r"\w+", table)


def ran(command: list[str]) -> tuple[executed.Executed, int]:
    """Return what the kernel executed, and its registers."""
    with tempfile.TemporaryDirectory() as counts:
        environment = {
            **os.environ,
            "CUDASIM_COUNT": counts,
            "CUDASIM_CLOCK": "virtual",
            "PYTHONPATH": str(executed.ROOT / "lib"),
        }
        subprocess.run(command, env=environment, check=True, capture_output=True)
        whole, _, used = executed.executed(Path(counts), {})
        return whole, max(used.values())


def main() -> int:
    lines = []
    with tempfile.TemporaryDirectory() as place:
        program = Path(place) / "requests"
        options = ["-std=c++17", "-arch=sm_75", "-cudart", "shared"]
        subprocess.run(["nvcc", *options, "-o", str(program), str(SOURCE)], check=True)
        for number, name in enumerate(kernels()):
            command = [str(program), str(number)]
            alone, before = ran([sys.executable, "-m", "cudasim", "--", *command])
            cells = []
            for chosen in OPTIONS:
                tool = [sys.executable, str(executed.ROOT / "tools/memtrace.py"), *chosen, "--", *command]
                probed, after = ran(tool)
                cells.append(f"{(probed.machine - alone.machine) / REQUESTS:.0f} | +{after - before}")
            space, _, pattern = name.partition("_")
            lines.append(f"| {space}, {pattern.replace('_', ' ')} | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr)
    text = HEAD + "\n".join(lines) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
