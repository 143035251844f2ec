#!/usr/bin/env python3
"""Attaching to what runs: how long it takes, what it costs who is not meant, and what is left of it. On the embedded device.

benchmarks/attach.py                 results/attach.json, results/attach.md; about four minutes
benchmarks/attach.py --only cost     this part anew, the others as they were measured last; under three minutes
benchmarks/attach.py --only arrivals many programs that start at once while a tool watches the machine
benchmarks/attach.py --only stress   200 attachments under load, 50 tools killed; some minutes, only when asked for
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "lib")]

from gpubpf.traced import device  # noqa: E402

PROGRAM = ROOT / "tests" / "gpubpf" / "attach" / "rate.cpp"
HEADERS = [
    *sorted(Path("/usr/local").glob("cuda*/include")),
    *(Path(place) / "nvidia/cu13/include" for place in sys.path),
]
TOOLS = ("threadhist", "launchlate", "kernelretsnoop", "memtrace")
# What the tools import of the standard library before their probes are live.
STANDARD = (
    "argparse, contextlib, ctypes, enum, fcntl, functools, json, mmap, pathlib, queue, re, resource, select, shlex, signal, socket,"
    " struct, subprocess, threading, typing"
)
# Fields of what was instrumented, by record.
LAUNCHED = {"kernel": ("launches", "count"), "site": ("requests",)}


class Rate:
    """A program that launches one kernel (rate.cpp): without end until it is asked something, then only when it is. `cpu`: where."""

    def __init__(self, program: Path, cpu: int | None = None) -> None:
        command = [str(program), *([] if cpu is None else [str(cpu)])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, launches: int, work: int) -> tuple[int, int]:
        """Nanoseconds of processor time for so many launches, with so many turns of a loop before each: of the process, of the
        launching thread."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{launches} {work}\n")
        self.process.stdin.flush()
        process, thread = map(int, self.process.stdout.readline().split())
        return process, thread

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval (Student's t)."""
    if len(values) < 2:
        return values[0], math.inf
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
    wide = t.get(len(values), 2.26 if len(values) < 20 else 2.09 if len(values) < 60 else 2.0)
    return statistics.mean(values), wide * statistics.stdev(values) / math.sqrt(len(values))


def processor_time(*pids: int) -> float:
    """Seconds of processor time of these processes."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)  # their CLOCK_PROCESS_CPUTIME_ID


def start(
    name: str, pid: int, *arguments: str, root: Path = ROOT
) -> tuple[subprocess.Popen[str], float, dict[str, float]]:
    """A tool that is attached, when it was started, and the seconds from then until it said so,
    with the processor time that it took."""
    began = time.monotonic()
    tool = subprocess.Popen(
        [sys.executable, str(root / "tools" / f"{name}.py"), "-p", str(pid), "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert tool.stderr is not None
    said = ""
    for line in tool.stderr:
        if "attached to" in line:
            return tool, began, {"attached": time.monotonic() - began, "own": processor_time(tool.pid)}
        said += line
    raise SystemExit(f"{name} did not attach: {said}")


def leave(tool: subprocess.Popen[str]) -> None:
    tool.terminate()
    tool.communicate(timeout=30)


# --- how long it takes ---


def first_launch(program: Path, rounds: int, before: Path | None) -> dict[str, Any]:
    """Seconds from the start of `TOOL -p PID` to its attachment, and to a result with an instrumented launch, by tool; and what
    Python takes to start.

    before: a checkout of an earlier version. Its tools run in turn with these."""
    found: dict[str, Any] = {name: {"attached": [], "own": [], "launched": []} for name in TOOLS}
    for what in ("python", "start", "standard"):
        found[what] = []
    for i, name in product(range(rounds + 1), TOOLS):
        rate = Rate(program)
        try:
            if before is not None:
                tool, _, times = start(name, rate.process.pid, root=before)
                leave(tool)
                if i:
                    found[name].setdefault("before", []).append(times["own"])
                rate.close()
                rate = Rate(program)
            tool, began, times = start(name, rate.process.pid, "0.02")
            assert tool.stdout is not None
            for line in tool.stdout:
                record = json.loads(line)
                if any(record.get(field) for field in LAUNCHED.get(record["type"], ())):
                    break
            times["launched"] = time.monotonic() - began
            leave(tool)
        finally:
            rate.close()
        began = time.monotonic()
        own = python_time("pass")
        took = time.monotonic() - began
        standard = python_time(f"import {STANDARD}")
        if i:  # the first one fills the caches
            found["python"].append(took)
            found["start"].append(own)
            found["standard"].append(standard)
            for what, seconds in times.items():
                found[name][what].append(seconds)
    return found


def python_time(code: str) -> float:
    """Seconds of processor time of a Python that runs this code."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    subprocess.run([sys.executable, "-c", code], check=True)
    return used() - before


def describe_first_launch(found: dict[str, Any]) -> list[str]:
    lines = [
        f"From the start of `TOOL -p PID`, in seconds ({found['rounds']} rounds; of that `python3 -c pass`:"
        f" {statistics.median(found['python']):.3f}):",
        "",
        "| | probes live | processor time of the tool until then | an instrumented launch in a result |",
        "|---|---|---|---|",
    ]
    for name in TOOLS:
        cells = []
        for what in ("attached", "own", "launched"):
            mean, wide = interval(found[name][what])
            cells.append(f"{mean:.2f} ± {wide:.2f} (least {min(found[name][what]):.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if found.get("standard"):
        start, standard = (
            f"{statistics.median(found[what]):.3f} (least {min(found[what]):.3f})"
            for what in ("start", "standard")
        )
        lines += [
            "",
            f"Of the processor time, Python takes {start} to start, and {standard} to start and to import those modules of",
            "its standard library that the tools use by then. No tool takes less.",
        ]
    if found.get("before"):
        lines += [
            "",
            f"Processor time until probes are live, in turn with commit {found['before']}:",
            "",
            "| | before | now | now / before |",
            "|---|---|---|---|",
        ]
        for name in TOOLS:
            now, before = found[name]["own"], found[name]["before"]
            ratio, wide = interval([a / b for a, b in zip(now, before, strict=True)])
            cells = [f"{statistics.median(times):.3f} (least {min(times):.3f})" for times in (before, now)]
            lines.append(f"| {name} | {' | '.join(cells)} | {ratio:.2f} ± {wide:.2f} |")
    return lines


# --- many at once ---

ARRIVALS = 50


def arrivals(program: Path, rounds: int) -> dict[str, Any]:
    """Start ARRIVALS programs at once while threadhist watches the machine: how many were measured, from their first launch, and the
    seconds of processor time of the tool and its hold helper for each."""

    def run(number: int) -> None:
        started = [
            subprocess.Popen([str(program)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            for _ in range(number)
        ]
        for one in started:
            one.communicate(b"4 0\n", timeout=300)

    found: dict[str, Any] = {"own": [], "measured": [], "missed": [], "launches": []}
    for _ in range(rounds):
        tool = subprocess.Popen(
            [sys.executable, str(ROOT / "tools" / "threadhist.py"), "--device", "sim", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert tool.stderr is not None
        for line in tool.stderr:
            if "watching every process" in line:
                break
        run(1)  # fills the caches
        children = Path(f"/proc/{tool.pid}/task/{tool.pid}/children").read_text().split()
        processes = [tool.pid, *map(int, children)]
        before = processor_time(*processes)
        run(ARRIVALS)
        found["own"].append((processor_time(*processes) - before) / ARRIVALS)
        tool.terminate()
        summary = json.loads(tool.communicate(timeout=60)[0].splitlines()[-1])
        found["measured"].append(summary["processes"]["measured"] - 1)
        found["missed"].append(sum(summary["processes"]["missed"].values()))
        found["launches"].append(summary["launches_seen"])
    return found


def describe_arrivals(found: dict[str, Any]) -> list[str]:
    mean, wide = interval(found["own"])
    programs = ARRIVALS * found["rounds"]
    return [
        f"{ARRIVALS} programs start at once while `threadhist` watches the machine, {found['rounds']} times. Of {programs},"
        f" {sum(found['measured'])} were measured; {sum(found['missed'])} were counted as missed. The tool and its hold helper took"
        f" {1000 * mean:.0f} ± {1000 * wide:.0f} ms of processor time for each.",
    ]


# --- what it costs ---


@dataclass(frozen=True)
class Load:
    """What a program does in one turn: so many launches, each after `work_ns` of its own."""

    name: str
    launches: int
    work_ns: int


LOADS = (
    Load("back to back, of a kernel that is one store", 300, 0),
    Load("10,000 a second", 5, 100_000),
)
PHASES = ("before", "a tool is there, nothing matches", "the tool has left")
WHO = ("attached to", "to compare with", "control")
AIM = 1.01
LOOP = 1_000_000


def cost(program: Path, groups: int, turns: int = 250) -> dict[str, Any]:
    """What a tool costs a program in which nothing matches, and what is left when it has gone: processor time.

    Three processes of one program share a CPU: one that is attached to, one to compare with, and a control, which nobody touches
    either. They take turns of half a millisecond, in an order by chance. Of each turn the times of the first and of the control are
    divided by that of the second; `middle` of these, divided by what it was for the same processes before, is what a group
    finds. So moods of the machine and what differs between processes from the start, such as where their memory lies, do not count.

    A row for each load, process and phase: `process` and `thread` (the launching one's time), a number for each group; `ns` what
    a launch took in the process to compare with.
    """
    cpus = os.sched_getaffinity(0)
    cpu = max(cpus)
    chance = random.Random(1)
    rows: dict[tuple[str, int, int], dict[str, Any]] = {}
    for _ in range(groups):
        rates = [Rate(program, cpu) for _ in WHO]
        os.sched_setaffinity(0, cpus - {cpu} or cpus)
        try:
            turn_ns = statistics.median(rates[0].ask(1, LOOP)[0] for _ in range(9)) / LOOP
            before: dict[tuple[str, int], list[float]] = {}
            tool = None
            for phase, said in enumerate(PHASES):
                if phase == 1:
                    tool, _, _ = start(
                        TOOLS[0], rates[0].process.pid, "--kernel", "nothing_is_called_so", "60"
                    )
                elif tool is not None:
                    leave(tool)
                for load, taken in turned(rates, turns, turn_ns, chance).items():
                    for who in 0, 2:
                        logs = [middle([math.log(t[who][i] / t[1][i]) for t in taken]) for i in range(2)]
                        first = before.setdefault((load.name, who), logs)
                        row = rows.setdefault(
                            (load.name, who, phase),
                            {
                                "load": load.name,
                                "who": WHO[who],
                                "phase": said,
                                "process": [],
                                "thread": [],
                                "ns": [],
                            },
                        )
                        row["process"].append(math.exp(logs[0] - first[0]))
                        row["thread"].append(math.exp(logs[1] - first[1]))
                        row["ns"].append([middle([t[1][i] for t in taken]) / load.launches for i in range(2)])
        finally:
            os.sched_setaffinity(0, cpus)
            for rate in rates:
                rate.close()
    return {"groups": groups, "turns": turns, "rows": [row for (_, _, phase), row in rows.items() if phase]}


def turned(
    rates: list[Rate], turns: int, turn_ns: float, chance: random.Random
) -> dict[Load, list[list[tuple[int, int]]]]:
    """Of each load and turn: what each process took. Some turns come before and are not counted: a tool that has just come
    asks for the kernel."""
    found: dict[Load, list[list[tuple[int, int]]]] = {load: [] for load in LOADS}
    for turn, load in product(range(-turns // 10, turns), LOADS):
        took = [(0, 0)] * len(rates)
        for i in chance.sample(range(len(rates)), len(rates)):
            took[i] = rates[i].ask(load.launches, round(load.work_ns / turn_ns))
        if turn >= 0:
            found[load].append(took)
    return found


def middle(values: list[float]) -> float:
    """Mean of the middle half."""
    cut = len(values) // 4
    return statistics.mean(sorted(values)[cut : len(values) - cut])


def describe_cost(found: dict[str, Any]) -> list[str]:
    lines = [
        "Processor time of a program, as times of what it was before, and how much more for each launch:"
        f" {found['groups']} groups of three processes, {found['turns']:,} turns for a number (`benchmarks/attach.py`, `cost`)."
        f" The control is a process that nobody attaches to: what it differs from 1 is the method's. Aim: at most {AIM - 1:.0%} more,"
        " with 95 % confidence.",
        "",
        "| launches | | the whole process | aim | the launching thread |",
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        cells = []
        for i, what in enumerate(("process", "thread")):
            mean, wide = interval(row[what])
            ns = statistics.median(pair[i] for pair in row["ns"])
            cells.append(
                f"{mean:.4f} ± {wide:.4f}, {(mean - 1) * ns:+,.0f} ± {wide * ns:,.0f} of {ns:,.0f} ns"
            )
        mean, wide = interval(row["process"])
        met = "met" if mean + wide <= AIM else "not met" if mean - wide > AIM else "open"
        lines.append(
            f"| {row['load']} | {row['who']}: {row['phase']} | {cells[0]} | {met if row['who'] == WHO[0] else ''} | {cells[1]} |"
        )
    return lines


# --- all of it ---


def stress(at: Path) -> dict[str, Any]:
    results = at / "stress"
    environment = {**os.environ, "GPUBPF_STRESS": "1", "GPUBPF_STRESS_RESULTS": str(results)}
    stress_tests = "tests/gpubpf/attach/test_attach_stress.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", stress_tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    found = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return {"passed": done.returncode == 0, "reports": found}


def describe_stress(found: dict[str, Any]) -> list[str]:
    lines = [
        "Attached again and again, and tools killed: " + ("passed." if found["passed"] else "FAILED."),
        "",
    ]
    for record in found["reports"]:
        rest = ", ".join(f"{k} {v}" for k, v in record.items() if k != "name")
        lines.append(f"- {record['name']}: {rest}")
    return lines


def built(at: Path) -> Path:
    headers = next(d for d in HEADERS if (d / "cuda.h").exists())
    program = at / "rate"
    libraries = device.LIBRARIES
    command = f"g++ -std=c++17 -O2 -pthread -I{headers} {PROGRAM} -o {program} -L{libraries} -lcuda"
    subprocess.run([*command.split(), f"-Wl,-rpath,{libraries}"], check=True)
    return program


def describe(found: dict[str, Any]) -> str:
    lines = ["# Attaching to what runs", "", "The embedded device; 95 % confidence intervals."]
    for name, tell in (
        ("first_launch", describe_first_launch),
        ("arrivals", describe_arrivals),
        ("cost", describe_cost),
        ("stress", describe_stress),
    ):
        if part := found.get(name):
            lines += ["", f"## {name.replace('_', ' ').capitalize()}", ""]
            lines += [
                f"{part['when']}, {part['machine']}, load {part['load']:.1f} on {part['cpus']} CPUs.",
                "",
            ]
            lines += tell(part)
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("first_launch", "arrivals", "cost", "stress"))
    parser.add_argument("--rounds", type=int, default=10, help="of each tool")
    parser.add_argument("--before", type=Path, help="of first_launch: a built checkout to compare with")
    parser.add_argument("--groups", type=int, default=24, help="of processes")
    args = parser.parse_args()
    results = ROOT / "benchmarks" / "results"
    file = results / "attach.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory(prefix="attach-") as place:
        at = Path(place)
        program = built(at)
        for name in [args.only] if args.only else ["first_launch", "arrivals", "cost"]:
            state = {
                "when": time.strftime("%Y-%m-%d"),
                "machine": f"Linux {platform.release()}",
                "cpus": os.cpu_count(),
                "load": os.getloadavg()[0],
            }
            if name == "first_launch":
                if args.before is not None:
                    commit = ["git", "-C", str(args.before), "rev-parse", "--short", "HEAD"]
                    state["before"] = subprocess.check_output(commit, text=True).strip()
                found[name] = {
                    **state,
                    "rounds": args.rounds,
                    **first_launch(program, args.rounds, args.before),
                }
            elif name == "arrivals":
                found[name] = {**state, "rounds": args.rounds, **arrivals(program, args.rounds)}
            elif name == "cost":
                found[name] = {**state, **cost(program, args.groups)}
            else:
                found[name] = {**state, **stress(at)}
    file.write_text(json.dumps(found) + "\n")
    text = describe(found)
    (results / "attach.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
