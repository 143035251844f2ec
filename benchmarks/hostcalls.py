#!/usr/bin/env python3
"""What it costs a program that its calls into a GPU's library are watched (docs/host-calls.md), and the tool that watches.

    sudo PYTHONPATH=lib python3 benchmarks/hostcalls.py [--rounds N] [--quick]

A program launches 10,000 kernels a second: before each launch, which does nothing, a loop takes 100 us. After every 1 ms it does
the same with a function that nobody watches, so that what else the machine does disturbs both alike; each mode is the ratio of
their processor time, and ns of a launch: median, lowest and highest of the rounds, in which the modes take turns. The same of
launches that follow each other at once. Then calls of two threads as fast as they come, what is lost of them, and the tool's
processor time at 100,000 calls a second.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / part) for part in ("lib", "tests/support")]

from gpubpf.calls import call_lines, delay_probes, probes, records  # noqa: E402
from gpubpf.calls.api import Api  # noqa: E402
from gpubpf.linux.host_programs import Host  # noqa: E402
from gpubpf.program import BPF  # noqa: E402
from gpubpf.show import cli  # noqa: E402
from gpubpf_calls import FUNCTIONS, build, by_function  # noqa: E402

EMPTY = """
#include <uapi/linux/ptrace.h>
int on_call(struct pt_regs *ctx) { return 0; }
int on_return(struct pt_regs *ctx) { return 0; }
"""
RATE = 10_000  # launches a second
LINES: dict[str, Callable[[records.CallGroup], Iterable[str]]] = {
    "-e": lambda group: call_lines.text_lines(group, call_lines.CallColumns(0, False)),
    "-e --json": call_lines.json_lines,
    "-e --csv": call_lines.csv_lines,
}


class Program:
    """tests/gpubpf/calls/program.c, which does as much at each line."""

    def __init__(self, built: Path, launches: int, turns: int) -> None:
        self.launches = launches
        self.process = subprocess.Popen(
            [built, "work", str(launches), str(turns)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def go(self) -> tuple[float, float]:
        """ns of processor time of a launch and what is before it: watched, and not."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        watched, other = self.process.stdout.readline().split()
        return int(watched) / self.launches, int(other) / self.launches

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def empty(library: Path, returns: bool) -> Iterator[Host]:
    b = BPF(text=EMPTY)
    names = [f.symbol for f in FUNCTIONS]
    b.attach_uprobe(str(library), names, fn_name="on_call", optional=True)
    if returns:
        b.attach_uprobe(str(library), names, fn_name="on_return", ret=True, optional=True)
    host = b.host(None, print)
    assert host is not None
    with host:
        yield host


@contextlib.contextmanager
def calls(
    library: Path, pid: int, off_cpu: bool = False, why: bool = False, each: bool = False
) -> Iterator[Any]:
    api = Api("test", (str(library),), FUNCTIONS, {})
    made = probes.CallProbes(api, api.choose(), probes.CallOptions(events=each), print, delay_probes.PROGRAM)
    if off_cpu or why:
        delay_probes.DelayProbes(made, print, why=why, spans=why)
    made.start()
    made.trace(pid)
    try:
        yield made
    finally:
        made.close()


def modes(library: Path, pid: int) -> dict[str, Callable[[], Any]]:
    return {
        "no probe": contextlib.nullcontext,
        "entry": lambda: empty(library, False),
        "entry and return": lambda: empty(library, True),
        "another process": lambda: calls(library, 0, off_cpu=True),
        "counted": lambda: calls(library, pid),
        "summary (with the time off the CPU)": lambda: calls(library, pid, off_cpu=True),
        "--why": lambda: calls(library, pid, why=True),
        "-e": lambda: calls(library, pid, off_cpu=True, each=True),
        "-e and --why": lambda: calls(library, pid, why=True, each=True),
    }


def turns_for(built: Path, ns: float) -> int:
    """Turns of the program's loop that take as long."""
    probe = Program(built, 1000, 10_000)
    took = min(probe.go()[1] for _ in range(8))
    probe.close()
    return max(1, round(10_000 * ns / took))


def compared(built: Path, library: Path, rounds: int, launches: int, turns: int) -> dict[str, Any]:
    """Of each mode: the ratio to what is not watched, and ns of a launch; [median, lowest, highest]."""
    program = Program(built, launches, turns)
    found: dict[str, tuple[list[float], list[float]]] = {}
    program.go()
    try:
        for _ in range(rounds):
            for name, begin in modes(library, program.process.pid).items():
                with begin():
                    took, without = program.go()
                ratios, times = found.setdefault(name, ([], []))
                ratios.append(took / without)
                times.append(took - without)
    finally:
        program.close()
    return {
        name: {"ratio": _spread(ratios, 4), "ns": _spread(times, 0)}
        for name, (ratios, times) in found.items()
    }


def _spread(values: list[float], digits: int) -> list[float]:
    return [round(v, digits) for v in (statistics.median(values), min(values), max(values))]


def as_fast_as_they_come(built: Path, library: Path, each: bool) -> dict[str, float]:
    """Two threads that do nothing but call: calls a second, how many of the records found no room, read by one reader."""
    threads, times = 2, 500_000
    with calls(library, os.getpid(), off_cpu=True, each=each) as made:
        start = time.perf_counter()
        process = subprocess.Popen([built, "quick", str(threads), str(times)])
        made.forget(os.getpid())
        found = 0
        while process.poll() is None:
            found += len(made.events()) if each else 0
            time.sleep(0.02)
        took = time.perf_counter() - start
        made.stop()
        found += len(made.events()) if each else 0
        assert sum(by_function(made.sums()).values()) == threads * times
        assert not each or found + made.lost == threads * times
        return {"calls_per_s": round(threads * times / took), "lost": made.lost}


def tool_cpu(built: Path, library: Path, how: str, seconds: float, rate: int = 100_000) -> dict[str, float]:
    """Processor time of this process while it reads what a program does that makes as many calls a second."""
    turns = turns_for(built, (1e9 / rate - 1600) / 2)  # half of the launches are not watched
    program = Program(built, round(rate * seconds), turns)
    api, out = Api("test", (str(library),), FUNCTIONS, {}), cli.Output(os.devnull)
    try:
        with calls(library, program.process.pid, off_cpu=True, each=how != "summary") as made:
            assert program.process.stdin is not None and program.process.stdout is not None
            program.process.stdin.write("\n")
            start, cpu, seen = time.perf_counter(), time.process_time(), 0
            until = start + seconds
            while time.perf_counter() < until:
                time.sleep(0.1)
                if how == "summary":
                    continue
                found = made.events()
                seen += len(found)
                if lines := LINES.get(how):
                    for text in records.format_calls(found, api, lambda pid, handle: None, lines):
                        out.write(text)
                elif how == "--timeline":
                    records.call_records(found, api, lambda pid, handle: None)
            took, cpu = time.perf_counter() - start, time.process_time() - cpu
            if how == "summary":
                made.stop()
                seen = int(made.sums()["count"].sum())
            return {
                "calls_per_s": round((seen + made.lost) / took),
                "cpu": round(cpu / took, 4),
                "us_a_call": round(1e6 * cpu / seen, 2),
                "lost": made.lost,
            }
    finally:
        program.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="less of everything, to see that it runs")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="gpubpf-"))
    built = build(place)
    library = place / "libgpucalls.so.1"
    rounds, launches = (2, 500) if args.quick else (args.rounds, 3000)
    result = {
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()[0]},
        "at_10000_a_second": compared(built, library, rounds, launches, turns_for(built, 1e9 / RATE)),
        "at_once": compared(built, library, rounds, 20 * launches, 1),
        "as_fast_as_they_come": {
            name: as_fast_as_they_come(built, library, each)
            for name, each in (("summary", False), ("-e", True))
        },
        "tool_at_100000_a_second": {
            how: tool_cpu(built, library, how, 1 if args.quick else 5)
            for how in ("summary", "records read", *LINES, "--timeline")
        },
    }
    for part, rows in result.items():
        print(part)
        for name, value in rows.items():
            print(f"    {name:40} {value}")


if __name__ == "__main__":
    main()
