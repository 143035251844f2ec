"""Kernels without PTX under --sass: known answers, exact counts in graphs, the same results, the overhead.

On a GPU, the packed programs in machine/ have no PTX. On the embedded device, the PTX is hidden from the tools.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from gpu.answers import KNOWN_LIMIT, digest, known, named
from gpu.machine import PLACE, SIMULATOR, Failure, Machine, Missing, Records, last_line
from gpu.overhead import Load, compared
from gpu.records import latency, leaving, of, replays
from gpu.stage import Part, Result

LIBRARY = "libsanitizer-public.so"
EXAMPLES = ("vectoradd", "streams", "cooperative", "exits", "latency", "bandwidth")


def exact(records: Records) -> bool:
    """Return whether every launch is measured, and every thread of every launch was counted."""
    kernels, summary = of(records, "kernel"), of(records, "summary")[-1]
    return (
        bool(kernels)
        and all(r["runs"] == r["launches"] * r["threads"] for r in kernels)
        and summary["launches_instrumented"] == summary["launches_matched"]
        and not summary["lost"]
    )


def touched(records: Records) -> bool:
    """Return whether the triad's 8,192 elements are 256 requests at each of two loads and a store."""
    sites = [(r["op"], r["space"], r["requests"]) for r in of(records, "site", "triad")]
    return sorted(sites) == [("load", "global", 256)] * 2 + [("store", "global", 256)]


ANSWERS: tuple[tuple[str, str, str, Callable[[Records], bool]], ...] = (
    ("threadhist", "", "streams", exact),
    ("threadhist", "", "vectoradd 19 5 1 23", exact),
    ("threadhist", "", "cooperative", exact),
    ("memtrace", "--sample-blocks 1/1", "bandwidth 8192", touched),
    ("launchlate", "-v --graphs --kernel step", "latency 200", replays),
    ("launchlate", "-v", "latency", latency),
    ("kernelretsnoop", "", "exits", leaving),
)
TOOLS = ("threadhist", "memtrace", "kernelretsnoop", "launchlate")
TORCH = ("eager", "compiled", "add", "matmul", "replay")
COSTS = (
    Load("triad, 64 Mi elements", "triad 67108864 20 3", "triad 512 2", TOOLS),
    Load("tiled GEMM, 1024", "tiled 1024 5 3", "tiled 32 2", TOOLS),
    Load("decode, graph", "decode-graph 512 10 3", "decode-graph 64 1", ("threadhist", "launchlate")),
)


def parts(machine: Machine) -> list[Part]:
    """Return the parts, those that decide about the back end first."""
    graph = "programs/workloads decode-graph 256 2 1"
    run_graph = functools.partial(under, machine, same, machine, "threadhist", place(machine, graph))
    found = [Part(f"same: threadhist --sass -- {graph}", run_graph, 6, KNOWN_LIMIT)]
    for tool, options, program, right in ANSWERS:
        words, run = place(machine, program), f"--sass {options}".strip()
        answer = functools.partial(under, machine, known, machine, tool, run, words, right)
        found.append(Part(named(tool, run, program), answer, 6, KNOWN_LIMIT))
    for tool in TOOLS:
        run = functools.partial(under, machine, same, machine, tool, place(machine, "programs/workloads all"))
        found.append(Part(f"same: {tool} --sass -- workloads all", run, 10, KNOWN_LIMIT))
    leaves = functools.partial(under, machine, left_early, machine)
    found.append(Part("threadhist --sass leaves a running program", leaves, 10, KNOWN_LIMIT))
    for work in TORCH:
        for tool in ("threadhist", "memtrace"):
            program = f"programs/torch_work.py {work}"
            run = functools.partial(under, machine, same, machine, tool, program, ("torch",))
            found.append(Part(f"same: {tool} --sass -- torch_work.py {work}", run, 30, 90))
    for load in COSTS:
        paths = (place(machine, f"programs/workloads {words}") for words in (load.program, load.sim))
        modes = [f"{tool} --sass" for tool in load.modes]
        modes += ["memtrace --sass, all blocks"] * ("memtrace" in load.modes)
        patched = Load(load.name, *paths, modes)
        run = functools.partial(under, machine, compared, machine, patched)
        found.append(Part(f"overhead of --sass: {load.name}", run, 40, 80))
    return found


def place(machine: Machine, program: str) -> str:
    """Return the program without PTX."""
    return program if machine.sim else f"machine/{program.removeprefix('programs/')}"


def under(machine: Machine, run: Callable[..., Result], *arguments: object) -> Result:
    """Run with the Compute Sanitizer library that is packed, or with that of the embedded device. Raises Missing."""
    library = SIMULATOR / LIBRARY if machine.sim else PLACE / "lib" / LIBRARY
    if not library.exists():
        raise Missing(f"{LIBRARY} is missing")
    hidden = {"CUDASIM_SASS": "1"} if machine.sim else {}
    with machine.setting({"GPUBPF_SANITIZER": str(library), **hidden}):
        return run(*arguments)


def same(machine: Machine, tool: str, program: str, modules: tuple[str, ...] = ()) -> Result:
    """Check that a program's results are the same to the bit under a tool that patches its kernels; record what was measured."""
    machine.needs(*modules)
    command = machine.program(program)
    alone = machine.start(command, 60)
    if alone.returncode == 77:  # the program cannot run here
        raise Missing(last_line(alone))
    if alone.returncode:
        raise Failure(f"the program fails without the tool: {last_line(alone)}")
    done, records = machine.trace(tool, "--sass", command, 80 * machine.slower)
    summary = (of(records, "summary") or [{}])[-1]
    names = ("launches_matched", "launches_instrumented", "not_instrumented", "lost", "patch_calls_lost")
    result: Result = {name: summary.get(name) for name in names} | {"wrong": ""}
    if done.returncode or digest(done.stdout) != digest(alone.stdout):
        result["wrong"] = f"the program ends differently: {done.returncode}, {last_line(done)}"
    elif not summary.get("launches_instrumented"):
        result["wrong"] = "no launch was measured"
    elif "not exact" in done.stderr or (tool == "threadhist" and not modules and not exact(records)):
        result["wrong"] = "the counts are not exact"
    result["answer"] = f"{result['launches_instrumented']} of {result['launches_matched']} launches"
    if result["wrong"]:
        result["said"] = done.stderr[-2000:]
    return result


def left_early(machine: Machine) -> Result:
    """Check that the patches are removed while the program launches kernels, and that its results stay the same."""
    size = "4096 20 10" if machine.sim else "1048576 2000 200"
    command = machine.program(place(machine, f"programs/workloads triad {size}"))
    alone = machine.start(command, KNOWN_LIMIT * machine.slower)
    done, records = machine.trace("threadhist", "--sass -d 1", command, KNOWN_LIMIT * machine.slower)
    result: Result = {"rounds": done.stdout.splitlines()[-5:], "wrong": ""}
    if (done.returncode, digest(done.stdout)) != (0, digest(alone.stdout)):
        result["wrong"] = f"the program ends differently: {done.returncode}, {last_line(done)}"
    elif not exact(records):
        result["wrong"] = "not every thread was counted"
    return result
