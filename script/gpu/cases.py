"""Programs out of the ordinary, each with one question: other CUDA runtimes, setmaxnreg, device printf and limits, two contexts,
function pointers, and kernels that launch kernels.
"""

from __future__ import annotations

import functools
import re
import shutil
import statistics
from pathlib import Path

from gpu.machine import ROOT, Failure, Machine, Missing, Records, last_line
from gpu.records import of, work
from gpu.stage import Part, Result

# How they are packed (pack.py): those of pip's packages that have the static runtime are few.
RUNTIMES = ("shared-11.8", "static-12.9", "shared-12.1", "shared-12.4", "shared-12.9")
SIM_RUNTIMES = ("shared-13.0",)
CONTEXTS = {(32, 23), (64, 17)}  # threads of a block, launches


def parts(machine: Machine) -> list[Part]:
    found = []
    for name in SIM_RUNTIMES if machine.sim else RUNTIMES:
        found.append(
            Part(f"cudart {name.replace('-', ' ')}", functools.partial(runtime, machine, name), 4, 30)
        )
    for tool in ("threadhist", "memtrace"):
        found.append(
            Part(f"printf and limits under {tool}", functools.partial(printing, machine, tool), 5, 40)
        )
    found.append(Part("two contexts", functools.partial(contexts, machine), 5, 40))
    for tool in ("threadhist", "memtrace"):
        found.append(Part(f"pointers under {tool}", functools.partial(pointers, machine, tool), 5, 40))
    # The last: should a warp group get no registers, its kernel does not end, and is killed with its process.
    found.append(Part("setmaxnreg under memtrace", functools.partial(setmaxnreg, machine), 15, 60))
    return found


def summary_of(records: Records) -> dict:
    return (of(records, "summary") or [{}])[-1]


def traced(machine: Machine, tool: str, options: str, program: str) -> tuple[str, str, Records]:
    """Return what a program prints alone and under a tool, and the tool's records. Raises Failure unless it succeeds alone."""
    command, limit = machine.program(program), 120 if machine.sim else 30
    plain = machine.start(command, limit)
    if plain.returncode:
        raise Failure(f"the program fails without the tool: {last_line(plain)}")
    done, records = machine.trace(tool, options, command, limit)
    if done.returncode:
        raise Failure(f"{program} ends with status {done.returncode} under {tool}: {last_line(done)}")
    return plain.stdout, done.stdout, records


def runtime(machine: Machine, name: str) -> Result:
    """Check that threadhist is exact, and knows the kernel's name, in a program with this CUDA runtime."""
    plain, said, records = traced(machine, "threadhist", "--work stores", f"runtimes/{name}")
    counted = work(records, "vectorAdd")
    result: Result = {
        "question": "are counts exact and kernels named on this CUDA runtime?",
        "believed": "yes: hooks are in the driver, and module images are the same",
        "answer": f"{plain.strip()}; vectorAdd stores {counted}",
        "agrees": counted == [4, 4, 4, 4, 3] and said == plain,
        "not_instrumented": summary_of(records).get("not_instrumented"),
        "wrong": "",
    }
    if said != plain:
        result["wrong"] = f"the program prints {said.strip()!r} under threadhist, alone {plain.strip()!r}"
    elif not result["agrees"]:
        names = sorted({r["kernel"] for r in records if "kernel" in r})
        result["wrong"] = (
            f"vectorAdd stores {counted}, not [4, 4, 4, 4, 3]; kernels seen: {', '.join(names) or 'none'}"
        )
    return result


def setmaxnreg(machine: Machine) -> Result:
    """Check that a kernel whose warps give registers to each other does so in its copy: by ptxas, by local memory, by its result."""
    if not machine.sim and machine.facts.get("cc") != "9.0":
        raise Missing("setmaxnreg in this program is of compute capability 9.0 alone")
    program = "programs/specialised" + (" 1 1 1" if machine.sim else "")
    plain, said, records = traced(machine, "memtrace", "", program)
    digests = [re.findall(r"^digest (\w+)$", text, re.MULTILINE) for text in (plain, said)]
    ratio = statistics.median(gpu_us(said)) / statistics.median(gpu_us(plain))
    summary = summary_of(records)
    copy = assembled_copy(machine, program)
    result: Result = {
        "question": "does setmaxnreg work in the copy that memtrace launches?",
        "believed": "yes: probes stay inline, so ptxas heeds it, and consumers have 232 registers without local memory",
        "answer": f"{copy['setmaxnreg']} in the copy, local memory {copy['local']}, {ratio:.2f} times as long, same result",
        "agrees": True,
        "copy": copy,
        "ratio": ratio,
        "wrong": "",
    }
    if digests[0] != digests[1] or not digests[0]:
        result["wrong"] = f"the results differ: {digests[0]}, under memtrace {digests[1]}"
    elif not summary.get("launches_instrumented"):
        result["wrong"] = f"no launch was instrumented: {summary.get('not_instrumented')}"
    elif copy["setmaxnreg"] != 2 or copy["ignored"]:
        result["wrong"] = (
            f"setmaxnreg is not heeded in the copy: {copy['ignored'] or '{setmaxnreg} of 2 are there'.format(**copy)}"
        )
    elif copy["local"] not in ("0 bytes", "unknown"):
        result["wrong"] = f"the copy keeps {copy['local']} of a thread in local memory, the original none"
    result["agrees"] = not result["wrong"]
    return result


def gpu_us(output: str) -> list[float]:
    found = [float(us) for us in re.findall(r"^round [\d.]+ ([\d.]+)$", output, re.MULTILINE)]
    if not found:
        raise Failure("the program told no rounds")
    return found


def assembled_copy(machine: Machine, program: str) -> dict:
    """Return of memtrace's copy of `specialised`: how often it has setmaxnreg, what ptxas says of it, local memory of a thread."""
    tool = [machine.python, str(ROOT / "tools" / "memtrace.py"), "--device", machine.device]
    made = machine.start([*tool, "--ptx", "--kernel", "specialised", machine.program(program)[0]], 60)
    if made.returncode or "//gpubpf{" not in made.stdout:
        raise Failure(f"memtrace --ptx shows no copy: {last_line(made)}")
    copy = {"setmaxnreg": made.stdout.count("setmaxnreg."), "ignored": "", "local": "unknown"}
    ptxas = shutil.which("ptxas", path=machine.environment.get("PATH"))
    if ptxas:
        scratch = Path(machine.environment["XDG_CACHE_HOME"])
        (scratch / "copy.ptx").write_text(made.stdout)
        command = [ptxas, "-arch=sm_90a", "-v", "-o", str(scratch / "copy.cubin"), str(scratch / "copy.ptx")]
        done = machine.start(command, 60)
        if done.returncode:
            raise Failure(f"ptxas refuses memtrace's copy: {last_line(done)}")
        text = done.stdout + done.stderr
        copy["ignored"] = next((line for line in text.splitlines() if "setmaxnreg" in line), "")
        frames = re.findall(r"(\d+) bytes stack frame", text)
        copy["local"] = f"{max(map(int, frames), default=0)} bytes"
    return copy


def printing(machine: Machine, tool: str) -> Result:
    """Check that a program prints the same from the GPU under the tool, and can still set the limits of heap and printf."""
    plain, said, records = traced(machine, tool, "", "programs/printing")
    summary = summary_of(records)
    limits = [line for line in said.splitlines() if line.startswith(("heap", "printf"))]
    result: Result = {
        "question": "does device printf print the same, and can a program set heap and printf limits after copies were loaded?",
        "believed": "yes: a copy shares the context's heap and buffer, and loading one uses neither",
        "answer": f"{'the same' if said == plain else 'different'}: {'; '.join(limits)}",
        "agrees": said == plain,
        "alone": plain,
        "wrong": "",
    }
    if said != plain:
        pairs = zip(plain.splitlines(), said.splitlines(), strict=False)
        line = next(((a, b) for a, b in pairs if a != b), ("a line more or less", ""))
        result["wrong"] = f"the program prints {line[1]!r} under {tool}, alone {line[0]!r}"
        result["said"] = said
    elif not summary.get("launches_instrumented"):
        result["wrong"] = f"no launch was instrumented: {summary.get('not_instrumented')}"
    return result


def contexts(machine: Machine) -> Result:
    """Check that a kernel that is launched in two contexts of a process is counted exactly in each."""
    plain, said, records = traced(machine, "threadhist", "", "programs/contexts.py")
    counted = {(r["block_dim"][0], r["runs"]) for r in of(records, "thread", "count")}
    result: Result = {
        "question": "are counts exact in each of two contexts of a process?",
        "believed": "yes: each context has copies and maps of its own",
        "answer": ", ".join(
            f"{launches} launches of {threads} threads" for threads, launches in sorted(counted)
        ),
        "agrees": counted == CONTEXTS and said == plain,
        "wrong": "",
    }
    if said != plain:
        result["wrong"] = "the program's results differ under threadhist"
    elif not result["agrees"]:
        result["wrong"] = (
            f"counted {result['answer'] or 'nothing'}; right are 23 launches of 32 threads and 17 of 64"
        )
    return result


def pointers(machine: Machine, tool: str) -> Result:
    """Check that calls through pointers reach the copies of functions, and that copies launch copies of kernels."""
    plain, said, records = traced(machine, tool, "", "programs/pointers")
    summary = summary_of(records)
    counted, grids = summary.get("launches_instrumented"), summary.get("launches_by_kernels")
    result: Result = {
        "question": "do copies call through pointers that the program changes, call back, and launch kernels?",
        "believed": "yes: a table's entries are noted when the program loads the module, and copies are linked with libcudadevrt.a",
        "answer": f"{said.strip()}; {counted} of 3 launches are instrumented, whose kernels launch {grids} grids, of 30",
        "agrees": said == plain and (counted, grids) == (3, 30),
        "not_instrumented": summary.get("not_instrumented"),
        "wrong": "",
    }
    if said != plain:
        result["wrong"] = f"the program prints {said.strip()!r} under {tool}, alone {plain.strip()!r}"
    elif not result["agrees"]:
        result["wrong"] = f"{result['answer']}: {result['not_instrumented']}"
    return result
