"""The overhead of each tool: the time of a launch with it, as a ratio to the time without it, measured in turns.

A turn has every way to run a program once, in random order. The program prints its rounds (programs/workloads.cu); a run counts as
the median of its rounds. A ratio is made within a turn; of several turns the median is given, and the extremes. "again" is the
program alone once more: its ratio is what noise does.
"""

from __future__ import annotations

import functools
import random
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu.machine import Failure, Machine, last_line
from gpu.records import of
from gpu.stage import Part, Result


@dataclass(frozen=True)
class Load:
    """A program whose slowdown is measured: `program` on a GPU, `sim` on the embedded device, where only the exit status counts."""

    name: str
    program: str
    sim: str
    modes: Sequence[str]
    seconds: float = 40
    modules: tuple[str, ...] = ()
    question: str = ""


# Tool and options. "nothing" selects a kernel that is never launched, so it measures the hooks alone. "null" launches copies of
# the kernels with empty programs, so it separates the cost of a copy from that of a probe.
MODES = {
    "nothing": ("threadhist", "--kernel tiled"),
    "null": ("threadhist", "--top 1"),
    "threadhist": ("threadhist", "--top 1"),
    "threadhist stores": ("threadhist", "--top 1 --work stores"),
    "kernelretsnoop": ("kernelretsnoop", ""),
    "kernelretsnoop -e": ("kernelretsnoop", "-e --ring-size 1G"),
    "launchlate": ("launchlate", ""),
    "memtrace": ("memtrace", ""),
    "memtrace, no allocations": ("memtrace", "--no-allocations"),
    "memtrace -e": ("memtrace", "-e --ring-size 1G"),
    "threadhist --sass": ("threadhist", "--sass --top 1"),
    "kernelretsnoop --sass": ("kernelretsnoop", "--sass"),
    "launchlate --sass": ("launchlate", "--sass"),
    "memtrace --sass": ("memtrace", "--sass"),
    "memtrace --sass, all blocks": ("memtrace", "--sass --sample-blocks 1/1"),
}
EACH = ("null", "threadhist", "kernelretsnoop", "launchlate", "memtrace")
GRAPHS = ("threadhist", "launchlate")

# The most telling first. `seconds` is for all turns together.
LOADS = (
    Load("empty kernel", "programs/workloads empty 1 10000", "programs/workloads empty 1 3", ("nothing", *EACH)),
    Load("triad, 64 Mi elements", "programs/workloads triad 67108864 200", "programs/workloads triad 512 2",
         (*EACH, "threadhist stores", "memtrace, no allocations")),
    Load("polynomial, constant memory", "programs/workloads polynomial 16777216 100", "programs/workloads polynomial 512 2",
         EACH, question="copies read constants from global memory: what does that cost (null) next to the probes?"),
    Load("tiled GEMM, 2048", "programs/workloads tiled 2048 20", "programs/workloads tiled 32 2", EACH),
    Load("softmax, 64 Mi elements", "programs/workloads softmax 67108864 100", "programs/workloads softmax 512 2", EACH),
    Load("reduction, 64 Mi elements", "programs/workloads sums 67108864 200", "programs/workloads sums 512 2", EACH),
    Load("decode, eager", "programs/workloads decode 1024 100", "programs/workloads decode 64 1", ("nothing", *EACH)),
    Load("decode, graph", "programs/workloads decode-graph 1024 100", "programs/workloads decode-graph 64 1", GRAPHS, 20),
    *(
        Load(f"vec_add, {n} threads", f"programs/workloads addTo {n} 10000", "programs/workloads addTo 64 3", EACH, 30)
        for n in (32, 1048576, 32768, 1024, 262144)
    ),
    Load("records of triad, 64 Ki elements", "programs/workloads triad 65536 3", "programs/workloads triad 512 2",
         ("kernelretsnoop -e", "memtrace -e"), 20),
)  # fmt: skip

FRAMEWORKS = (
    Load("Triton attention", "programs/triton_kernels.py attention 20", "", EACH, 100, ("torch", "triton")),
    Load("PyTorch decode, graph", "programs/torch_work.py decode-graph 50", "", GRAPHS, 60, ("torch",)),
    Load("PyTorch decode, eager", "programs/torch_work.py decode-eager 50", "", GRAPHS, 50, ("torch",)),
    Load("PyTorch decode, compiled", "programs/torch_work.py decode-compiled 50", "", GRAPHS, 50, ("torch", "triton")),
)  # fmt: skip

# Wanted of a mode: the ratio at most, and of which loads.
LONG = ("triad", "polynomial", "tiled", "reduction", "softmax", "Triton")  # kernels of 100 µs and more
GOALS: dict[str, tuple[float, Callable[[str], bool]]] = {
    "threadhist": (1.01, lambda load: load.startswith(LONG)),
    "kernelretsnoop": (1.03, lambda load: load.startswith(LONG)),
    "launchlate": (1.03, lambda load: load.startswith(LONG)),
    "memtrace": (3.0, lambda load: load.startswith("triad")),
    "memtrace, typical": (1.5, lambda load: load.startswith(("tiled", "reduction", "softmax", "Triton"))),
}
NOTHING_NS = 50  # wanted of the path of a launch without programs
TURNS = 3


def parts(machine: Machine) -> list[Part]:
    found = [
        Part(load.name, functools.partial(compared, machine, load), load.seconds, 2 * load.seconds)
        for load in LOADS
    ]
    return [
        *found[:3],
        Part("first launches", functools.partial(first_launches, machine), 60, 120),
        *found[3:],
    ]


def framework_parts(machine: Machine) -> list[Part]:
    return [
        Part(load.name, functools.partial(compared, machine, load), load.seconds, 2 * load.seconds)
        for load in FRAMEWORKS
    ]


Times = tuple[float, float]


def rounds(output: str) -> Times:
    """Return the median microseconds of a launch, by the host's clock and by GPU events. Raises Failure."""
    found = re.findall(r"^round ([\d.]+) ([\d.]+)$", output, re.MULTILINE)
    if not found:
        raise Failure("the program told no rounds")
    host, device = zip(*((float(a), float(b)) for a, b in found), strict=True)
    return statistics.median(host), statistics.median(device)


def compared(machine: Machine, load: Load) -> Result:
    """Return the ratios of each mode for a load."""
    machine.needs(*load.modules)
    words = load.sim if machine.sim and load.sim else load.program
    command = machine.program(words)
    notes: dict[str, Result] = {}

    def alone() -> Times:
        done = machine.start(command, 60)
        if done.returncode != 0:
            raise Failure(f"the program fails: {last_line(done)}")
        return rounds(done.stdout)

    def traced(mode: str) -> Times:
        tool, options = MODES[mode]
        more = {"GPUBPF_NULL_PROBE": "1"} if mode == "null" else None
        done, records = machine.trace(tool, options, command, 90, more, "summary")
        if done.returncode != 0:
            raise Failure(f"the program fails with {tool}: {last_line(done)}")
        summary = (of(records, "summary") or [{}])[-1]
        wanted = ("launches_matched", "launches_instrumented", "not_instrumented", "lost", "overhead")
        notes[mode] = {name: summary.get(name) for name in wanted}
        if mode != "nothing" and "torch_work" not in words and not summary.get("launches_instrumented"):
            raise Failure(f"{tool} instrumented no launch")  # what was timed is the program alone
        return rounds(done.stdout)

    ways: dict[str, Callable[[], Times]] = {"alone": alone, "again": alone}
    ways |= {mode: functools.partial(traced, mode) for mode in load.modes}
    found = by_turns(ways, 1 if machine.sim else TURNS, machine, load.seconds)
    wrong = "; ".join(f"{mode}: {why}" for mode, why in found["failed"].items())
    result: Result = {"program": words, **found, "summaries": notes, "wrong": wrong}
    result["answer"] = ", ".join(f"{mode} {ratio[0]:.3f}x" for mode, ratio in found["ratio"].items())
    if load.question:
        result["question"] = load.question
    result["goals"] = goals(load.name, found)
    return result


FIRST = ("threadhist", "memtrace")


def first_launches(machine: Machine) -> Result:
    """Return the milliseconds of first launches: alone, hooked, and instrumented with an empty and a full cache."""
    command = machine.program("programs/first")
    cache = Path(machine.environment["XDG_CACHE_HOME"], "first")
    result: Result = {
        "question": "how long does the first launch of a kernel take: plain, hooked, instrumented with a cold and a warm cache?",
        "ms": {},
        "wrong": "",
    }

    def note(way: str, done: subprocess.CompletedProcess[str]) -> None:
        if done.returncode:
            raise Failure(f"{way}: exit status {done.returncode}: {last_line(done)}")
        times = re.findall(r"^([\w-]+) ([\d.]+)$", done.stdout, re.MULTILINE)
        result["ms"][way] = {name: round(float(us) / 1000, 3) for name, us in times}

    note("alone", machine.start(command, 30))
    note("hooked", machine.trace("threadhist", "--kernel never", command, 30)[0])
    for tool in FIRST:
        shutil.rmtree(cache, ignore_errors=True)
        for way in ("cold", "warm"):
            with machine.setting({"XDG_CACHE_HOME": str(cache)}):
                done, records = machine.trace(tool, "", command, 60)
            note(f"{tool}, {way}", done)
            summary = (of(records, "summary") or [{}])[-1]
            if summary.get("launches_instrumented") != 4:
                result["wrong"] = (
                    f"{tool}, {way}: not 4 launches instrumented, {summary.get('not_instrumented')}"
                )
    shutil.rmtree(cache, ignore_errors=True)
    result["answer"] = ", ".join(f"{way} {times.get('first')} ms" for way, times in result["ms"].items())
    return result


def by_turns(ways: Mapping[str, Callable[[], Times]], turns: int, machine: Machine, seconds: float) -> Result:
    """Return the times of each way to run a program, and their ratios to "alone" of the same turn.

    A way that fails is left out, with the reason. No turn but the first begins if it would not end within `seconds`.
    """
    taken: dict[str, list[Times]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    order = random.Random(0)
    began = time.monotonic()
    for turn in range(turns):
        taken_s = time.monotonic() - began
        if turn and min(machine.left(), seconds - taken_s) < taken_s / turn:
            break
        names = [name for name in ways if name not in failed]
        order.shuffle(names)
        for name in names:
            try:
                taken[name].append(ways[name]())
            except Failure as error:
                if name == "alone":
                    raise
                failed[name] = str(error)
    whole = {name: times for name, times in taken.items() if name not in failed}
    result: Result = {"turns": len(whole["alone"]), "us": {}, "ratio": {}, "gpu_ratio": {}, "failed": failed}
    for name, times in whole.items():
        result["us"][name] = [round(statistics.median(time[i] for time in times), 3) for i in (0, 1)]
        if name != "alone":
            for key, i in (("ratio", 0), ("gpu_ratio", 1)):
                each = [a[i] / b[i] for a, b in zip(times, whole["alone"], strict=True) if b[i]]
                if each:
                    result[key][name] = [round(x, 4) for x in (statistics.median(each), min(each), max(each))]
    if "nothing" in whole:
        extra = [a[0] - b[0] for a, b in zip(whole["nothing"], whole["alone"], strict=True)]
        result["nothing_ns"] = [round(1000 * x) for x in (statistics.median(extra), min(extra), max(extra))]
    return result


def goals(load: str, found: Result) -> dict[str, bool]:
    """Return whether each goal that applies to this load is met."""
    met = {}
    for goal, (most, concerns) in GOALS.items():
        mode = goal.partition(",")[0]
        if concerns(load) and mode in found["ratio"]:
            met[f"{mode} at most {most}x"] = found["ratio"][mode][0] <= most
    if load == "empty kernel" and "nothing_ns" in found:
        met[f"a launch without programs at most {NOTHING_NS} ns"] = found["nothing_ns"][0] <= NOTHING_NS
    return met
