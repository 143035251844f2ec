"""What other ways to look at the same programs cost, where they are there; and what others have published of theirs."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from gpu.answers import sanitizer_command
from gpu.machine import PLACE, Failure, Machine, Missing, last_line
from gpu.overhead import TURNS, Times, by_turns, rounds
from gpu.stage import Part, Result
from gpubpf.device import cupti_libraries

# Few launches: some of these take milliseconds for each.
LOADS = {
    "vec_add, 1048576 threads": ("programs/workloads addTo 1048576 200 3", "programs/workloads addTo 64 3 1"),
    "triad, 64 Mi elements": ("programs/workloads triad 67108864 20 3", "programs/workloads triad 512 2 1"),
    "decode, eager": ("programs/workloads decode 1024 5 3", "programs/workloads decode 64 1 1"),
}
OURS = {"threadhist": "--top 1", "launchlate": "", "memtrace": ""}

# Not measured here: what their authors wrote, on other machines, of other kernels.
BPFTIME = "https://github.com/eunomia-bpf/bpftime/blob/master/benchmark/gpu/"
PUBLISHED = (
    {
        "system": "bpftime",
        "figure": "vec_add of 32 elements: kernelretsnoop 1.12x, launchlate 1.18x, threadhist 1.67x, memory trace 3.11x",
        "on": "RTX 5090, 2025-10-16",
        "source": BPFTIME + "micro/examples_vec_add_result.md",
    },
    {
        "system": "NVBit, as measured by bpftime's authors",
        "figure": "vec_add of 32 elements: loaded alone 1.71x, instr_count 69.8x, instr_count_bb 82.3x, mem_trace 6.9x",
        "on": "RTX 5090, 2025-10-17",
        "source": BPFTIME + "nvbit/nvbit_vec_add_result.md",
    },
    {
        "system": "Neutrino",
        "figure": "light probes 1.04x kernel time and 3.8 registers more, memory trace 7.1x",
        "on": "see the paper",
        "source": "https://www.usenix.org/conference/osdi25/presentation/huang-songlin",
    },
)


def parts(machine: Machine) -> list[Part]:
    found = [Part(name, functools.partial(compared, machine, *words), 100) for name, words in LOADS.items()]
    return [Part("published figures", lambda: {"published": list(PUBLISHED)}, 0), *found]


def compared(machine: Machine, words: str, sim: str) -> Result:
    """Ratios to the program alone, as overhead.py makes them; what is not there is said."""
    command = machine.program(sim if machine.sim else words)
    scratch = Path(machine.environment["XDG_CACHE_HOME"])
    missing: dict[str, str] = {}

    def plain(head: list[str], more: dict[str, str]) -> Times:
        done = machine.start([*head, *command], 60, more)
        if done.returncode != 0:
            raise Failure(f"exit status {done.returncode}: {last_line(done)}")
        return rounds(done.stdout)

    def traced(tool: str) -> Times:
        done, _ = machine.trace(tool, OURS[tool], command, 60)
        if done.returncode != 0:
            raise Failure(last_line(done))
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
    found = by_turns(ways, 1 if machine.sim else TURNS, machine)
    return {"program": " ".join(words.split()), **found, "missing": missing}


Way = tuple[list[str], dict[str, str]]


def activity(machine: Machine, scratch: Path) -> Way:
    """A record of each kernel, as profilers ask CUPTI for it: a library of ours that the driver loads."""
    if machine.sim:
        raise Missing("CUPTI needs NVIDIA's driver")
    return [], {
        "CUDA_INJECTION64_PATH": str(PLACE / "programs" / "libactivity.so"),
        "ACTIVITY_CUPTI": ":".join(cupti_libraries()),
    }


def found(name: str) -> str:
    """A profiler of NVIDIA's. Raises Missing."""
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
    return [
        found("ncu"),
        *"--clock-control none --metrics gpu__time_duration.sum --log-file".split(),
        "/dev/null",
    ], {}


def nsys(machine: Machine, scratch: Path) -> Way:
    if machine.sim:
        raise Missing("nsys needs NVIDIA's driver")
    return [found("nsys"), *"profile -t cuda --force-overwrite true -o".split(), str(scratch / "nsys")], {}


def memcheck(machine: Machine, scratch: Path) -> Way:
    if machine.sim:
        raise Missing("compute-sanitizer needs NVIDIA's driver")
    return [sanitizer_command(), "--tool", "memcheck"], {}
