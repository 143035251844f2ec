#!/usr/bin/env python3
"""Programs that start at once while a tool measures every process: how many it measures, and what a join costs. Needs root.

    python3 benchmarks/joins.py [PROGRAMS [TOOL [OPTION…]]]      default: 50 threadhist

Each program launches three kernels and ends. The CPU time is that of the tool and its helpers. Run it twice: the first run fills the
caches. What runs besides takes part: the numbers are those of this machine at this moment.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = [str(ROOT / "examples" / "vectoradd"), "19", "5", "1", "3"]
READY = "watching every process"


def cpu_time(pid: int) -> float:
    """Return the CPU time of a process and of its children, in seconds."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = 0
    for process in (pid, *children):
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def start_all(count: int) -> tuple[float, float]:
    """Run the programs. Return how long that took, and their CPU time, in seconds."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(ROOT / "lib" / "cudasim" / "lib")}
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    started = [
        subprocess.Popen(PROGRAM, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(count)
    ]
    failed = sum(process.wait() != 0 for process in started)
    if failed:
        sys.exit(f"{failed} programs failed")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(arguments: list[str]) -> None:
    """Measure, and print."""
    count, tool, *options = [*arguments, "50", "threadhist"][: max(2, len(arguments))]
    alone, own = start_all(int(count))
    with tempfile.TemporaryDirectory() as place:
        output, said = Path(place) / "records", Path(place) / "notices"
        command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *options, "--json", "-o", str(output)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
        with said.open("w") as notices:
            process = subprocess.Popen(command, stderr=notices, env=environment)
        while READY not in said.read_text():
            if process.poll() is not None:
                sys.exit(said.read_text())
            time.sleep(0.1)
        time.sleep(1)
        before = cpu_time(process.pid)
        took, more = start_all(int(count))
        time.sleep(1)
        cost = cpu_time(process.pid) - before
        process.send_signal(signal.SIGINT)
        process.wait()
        summary = json.loads(output.read_text().splitlines()[-1])
    print(f"{count} programs: {alone:.2f} s alone, {took:.2f} s under {tool}")
    print(
        f"CPU time for each: {own / int(count) * 1000:.0f} ms alone, {more / int(count) * 1000:.0f} ms under it"
    )
    print(f"CPU time of {tool} for each: {cost / int(count) * 1000:.0f} ms")
    print(f"launches instrumented: {summary['launches_instrumented']} of {3 * int(count)}")
    print(f"processes: {json.dumps(summary['processes'])}")


if __name__ == "__main__":
    main(sys.argv[1:])
