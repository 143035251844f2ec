"""The overhead of other profilers on the same programs, if they are installed, and published figures of others."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from gpu.answers import sanitizer_command
from gpu.machine import PLACE, Failure, Machine, Missing, last_line
from gpu.overhead import TURNS, Times, by_turns, rounds
from gpu.records import of
from gpu.stage import Part, Result

# Few launches: some of these take milliseconds for each.
LOADS = {
    "vec_add, 1048576 threads": ("programs/workloads addTo 1048576 200 3", "programs/workloads addTo 64 3 1"),
    "triad, 64 Mi elements": ("programs/workloads triad 67108864 20 3", "programs/workloads triad 512 2 1"),
    "decode, eager": ("programs/workloads decode 1024 5 3", "programs/workloads decode 64 1 1"),
}
SECONDS = 50  # for the turns of one of them
OURS = {"threadhist": "--top 1", "launchlate": "", "memtrace": ""}

# Not measured here: what their authors wrote, on other machines, of other kernels.
BPFTIME = "https://github.com/eunomia-bpf/bpftime/blob/master/benchmark/gpu/"
PUBLISHED = (
    {
        "system": "bpftime",
        "figure": "vec_add of 32 elements, 3 launches: kernelretsnoop 1.12x, launchlate 1.18x, threadhist 1.67x, memory trace 3.11x",
        "on": "RTX 5090, 2025-10-16",
        "source": BPFTIME + "micro/examples_vec_add_result.md",
    },
    {
        "system": "NVBit, as measured by bpftime's authors",
        "figure": "vec_add of 32 elements, 3 launches (10,000 launches): a program that times kernels 1.71x (1.59x),"
        " instr_count 69.8x (13.4x), instr_count_bb 82.3x (2.5x), mem_trace 6.9x (7.3x)",
        "on": "RTX 5090, 2025-10-17",
        "source": BPFTIME + "nvbit/nvbit_vec_add_result.md",
    },
    {
        "system": "Neutrino",
        "figure": "mean of kernels: light probes 1.04x kernel time and 3.78 registers more, memory trace 7.12x",
        "on": "A100 and RTX 4090, OSDI 2025, as others quote the paper",
        "source": "https://www.usenix.org/conference/osdi25/presentation/huang-songlin",
    },
)


def parts(machine: Machine) -> list[Part]:
    found = [
        Part(name, functools.partial(compared, machine, *words), SECONDS, 2 * SECONDS)
        for name, words in LOADS.items()
    ]
    return [Part("published figures", lambda: {"published": list(PUBLISHED)}, 0), *found]


Done = subprocess.CompletedProcess[str]
Check = Callable[[Done], None]
# The words before the command, its environment, and a check whether it has measured.
Way = tuple[list[str], dict[str, str], Check]


def succeeded(done: Done) -> None:
    if done.returncode != 0:
        raise Failure(f"exit status {done.returncode}: {last_line(done)}")


def compared(machine: Machine, words: str, sim: str) -> Result:
    """Return ratios to the program alone, as overhead.py makes them, and which profilers are missing."""
    command = machine.program(sim if machine.sim else words)
    scratch = Path(machine.environment["XDG_CACHE_HOME"])
    missing: dict[str, str] = {}

    def plain(head: list[str], more: dict[str, str], check: Check = succeeded) -> Times:
        done = machine.start([*head, *command], 60, more)
        check(done)
        return rounds(done.stdout)

    def traced(tool: str) -> Times:
        done, records = machine.trace(tool, OURS[tool], command, 60)
        succeeded(done)
        if not any(record.get("launches_instrumented") for record in of(records, "summary")):
            raise Failure(f"{tool} instrumented no launch")
        return rounds(done.stdout)

    ways: dict[str, Callable[[], Times]] = {
        "alone": functools.partial(plain, [], {}),
        "again": functools.partial(plain, [], {}),
    }
    for name, other in (
        ("CUPTI activity", activity),
        ("ncu, time only", ncu),
        ("nsys", nsys),
        ("memcheck", memcheck),
    ):
        try:
            ways[name] = functools.partial(plain, *other(machine, scratch))
        except Missing as error:
            missing[name] = str(error)
    ways |= {tool: functools.partial(traced, tool) for tool in OURS}
    found = by_turns(ways, 1 if machine.sim else TURNS, machine, SECONDS)
    # What others cannot do here is no fault of ours.
    missing |= {name: why for name, why in found["failed"].items() if name not in OURS}
    failed = {name: why for name, why in found["failed"].items() if name in OURS}
    wrong = "; ".join(f"{name}: {why}" for name, why in failed.items())
    return {"program": words, **found, "failed": failed, "missing": missing, "wrong": wrong}


def activity(machine: Machine, scratch: Path) -> Way:
    """Return how to run the program under CUPTI's activity records, which profilers use: a library of ours that the driver loads."""
    if machine.sim:
        raise Missing("CUPTI needs NVIDIA's driver")
    environment = {
        "CUDA_INJECTION64_PATH": str(PLACE / "programs" / "libactivity.so"),
        "ACTIVITY_CUPTI": ":".join(machine.cupti()),
    }

    def check(done: Done) -> None:
        succeeded(done)
        said = re.search(r"^activity: (\d+) kernels$", done.stderr, re.MULTILINE)
        if not said or int(said[1]) == 0:
            raise Failure("CUPTI recorded no kernel")

    return [], environment, check


def found(name: str) -> str:
    """Return the path of a profiler. Raises Missing."""
    path = shutil.which(name)
    if path is None:
        places = sorted(Path("/opt/nvidia").glob(f"**/{name}")) if Path("/opt/nvidia").exists() else []
        path = next((str(file) for file in places if os.access(file, os.X_OK) and file.is_file()), None)
    if path is None:
        raise Missing(f"there is no {name} here")
    return path


def ncu(machine: Machine, scratch: Path) -> Way:
    if machine.sim:
        raise Missing("ncu needs NVIDIA's driver")
    log = scratch / "ncu.log"
    options = ["--clock-control", "none", "--metrics", "gpu__time_duration.sum", "--log-file", str(log)]

    def check(done: Done) -> None:
        # Where it may not read counters (ERR_NVGPUCTRPERM), it says so, and the program runs alone.
        said = log.read_text(errors="replace") if log.exists() else ""
        log.unlink(missing_ok=True)
        if errors := [line for line in said.splitlines() if "==ERROR==" in line]:
            raise Failure(errors[0])
        succeeded(done)
        if "gpu__time_duration" not in said:
            raise Failure("ncu measured no kernel")

    return [found("ncu"), *options], {}, check


def nsys(machine: Machine, scratch: Path) -> Way:
    if machine.sim:
        raise Missing("nsys needs NVIDIA's driver")
    report = scratch / "nsys"

    def check(done: Done) -> None:
        # nsys writes .nsys-rep, or .qdstrm if it cannot convert that. Either way it has measured.
        made = list(scratch.glob("nsys.*"))
        for file in made:
            file.unlink()
        if not made:
            succeeded(done)
            raise Failure("nsys wrote nothing")

    options = [
        "profile",
        "-t",
        "cuda",
        "-s",
        "none",
        "--cpuctxsw=none",
        "--force-overwrite=true",
        "-o",
        str(report),
    ]
    return [found("nsys"), *options], {}, check


def memcheck(machine: Machine, scratch: Path) -> Way:
    if machine.sim:
        raise Missing("compute-sanitizer needs NVIDIA's driver")
    return [sanitizer_command(), "--tool", "memcheck"], {}, succeeded
