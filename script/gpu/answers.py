"""Known answers: every tool on programs built with the shared and the static CUDA runtime, on what NVRTC, Triton and PyTorch make.

A program must end the same, and write the same, with and without a tool; the tool must say what is known beforehand.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gpu.machine import Failure, Machine, Missing, Records, last_line
from gpu.records import ANSWERS, of
from gpu.stage import Part, Result

TOOLS = ("threadhist", "kernelretsnoop", "launchlate", "memtrace")
# Reasons for which a launch may run as it is although nothing is wrong.
WANTED = {"sampled out", "filtered"}

# Programs that print a digest of all they computed: to be the same to the bit. Modules, arguments, the kernels that must be counted
# (none: SASS only, so that a tool has to say so).
SAME: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("programs/workloads all", (), ("addTo", "sums", "softmax", "tiled")),
    ("programs/nvrtc.py", ("cuda.bindings", "numpy"), ("fill", "scale")),
    ("programs/triton_kernels.py", ("torch", "triton"), ("attention", "softmax")),
    ("programs/torch_work.py eager", ("torch",), ()),
    ("programs/torch_work.py compiled", ("torch", "triton"), ("triton_*",)),
)

# Programs that run on and on, for tools to be attached to. On the embedded device everything is smaller.
ATTACHED = ("programs/workloads triad 1048576 2000 1000000", "programs/workloads decode-graph 512 50 1000000")
ATTACHED_SECONDS = 2


def parts(machine: Machine) -> list[Part]:
    """The most telling first: what comes late may not be reached."""
    found = [Part(named(*answer[:3]), functools.partial(known, machine, *answer), 20) for answer in ANSWERS]
    alone = functools.cache(functools.partial(run_alone, machine))  # once for all tools
    for program, modules, kernels in SAME:
        for tool in TOOLS:
            run = functools.partial(same, machine, alone, tool, program, modules, kernels)
            found.append(Part(f"same: {tool} -- {program}", run, 45))
    for program in ATTACHED:
        run = functools.partial(attached, machine, program)
        found.append(Part(f"attached to: {program}", run, 60))
    if not machine.sim:  # NVIDIA's static runtime needs NVIDIA's driver
        for tool, options, program, right in ANSWERS:
            run = functools.partial(known, machine, tool, options, f"static/{program}", right)
            found.append(Part(named(tool, options, f"static/{program}"), run, 20))
    for checker in ("memcheck", "racecheck", "synccheck"):
        for program in ("memory", "reduction", "bandwidth 8192"):
            run = functools.partial(sanitized, machine, checker, program)
            found.append(Part(f"compute-sanitizer {checker} over threadhist -- {program}", run, 60))
    return found


def named(tool: str, options: str, program: str) -> str:
    return " ".join(filter(None, (tool, options, "--", program)))


def known(
    machine: Machine, tool: str, options: str, program: str, right: Callable[[Records], bool]
) -> Result:
    """One known answer, and whether the program noticed anything."""
    command = machine.program(program)
    plain = machine.start(command)
    if plain.returncode != 0:
        raise Failure(f"the program fails without the tool: {last_line(plain)}")
    done, records = machine.trace(tool, options, command)
    summary = (of(records, "summary") or [{}])[-1]
    result: Result = {"not_instrumented": summary.get("not_instrumented"), "wrong": ""}
    if (done.returncode, done.stdout) != (plain.returncode, plain.stdout):
        result["wrong"] = f"the program ends differently: {done.returncode}, {last_line(done)}"
    else:
        try:
            if not right(records):
                result["wrong"] = "the answer is not the known one"
        except (KeyError, IndexError, ValueError, TypeError) as error:
            result["wrong"] = f"the answer lacks something: {type(error).__name__}: {error}"
    if result["wrong"]:
        result |= {"said": done.stderr[-2000:], "records": records[-5:]}
    return result


def run_alone(machine: Machine, program: str) -> str:
    """The digest of a program's results, which must be the same in two runs. Raises Missing, Failure."""
    digests = []
    for _ in range(2):
        done = machine.start(machine.program(program), 60)
        if done.returncode == 77:  # it says itself that it cannot run here
            raise Missing(last_line(done))
        if done.returncode != 0:
            raise Failure(f"the program fails without the tool: {last_line(done)}")
        digests.append(digest(done.stdout))
    if len(set(digests)) > 1 or not digests[0]:
        raise Failure("the program alone does not give the same results twice")
    return digests[0]


def same(
    machine: Machine,
    alone: Callable[[str], str],
    tool: str,
    program: str,
    modules: Sequence[str],
    kernels: Sequence[str],
) -> Result:
    """The results of a program are the same to the bit with the tool, and the tool counts every launch of each of these kernels."""
    machine.needs(*modules)
    right = alone(program)
    command = machine.program(program)
    done, records = machine.trace(tool, "--graphs" if "torch" in program else "", command, 120)
    summary = (of(records, "summary") or [{}])[-1]
    result: Result = {
        "digest": right,
        "launches": summary.get("launches_matched"),
        "instrumented": summary.get("launches_instrumented"),
        "not_instrumented": summary.get("not_instrumented"),
        "wrong": "",
    }
    counted = Counter(
        r["kernel"].split("(")[0] for r in records if r.get("type") == "kernel" and "kernel" in r
    )
    result["kernels"] = dict(counted)
    if done.returncode != 0:
        result["wrong"] = f"the program ends differently: {done.returncode}, {last_line(done)}"
    elif digest(done.stdout) != right:
        result["wrong"] = f"the results differ: {right}, with the tool {digest(done.stdout)}"
    elif kernels and not summary.get("launches_instrumented"):
        result["wrong"] = "no launch was instrumented"
    elif kernels and tool == "threadhist" and (missed := missing(counted, kernels)):
        result["wrong"] = f"not counted: {', '.join(missed)}"
    elif not kernels and not summary.get("not_instrumented"):
        result["wrong"] = "kernels without PTX ran, and the tool does not say so"
    if result["wrong"]:
        result["said"] = done.stderr[-2000:]
    return result


def attached(machine: Machine, program: str) -> Result:
    """Each tool in turn is attached to a program that runs, and leaves it: launches before, meanwhile and after, in microseconds."""
    words = program.split()
    if machine.sim:
        words[2:4] = ["64", "2"]
    command = machine.program(" ".join(words))
    environment = {**machine.environment, **machine.libraries(command)}
    result: Result = {"us": {}, "instrumented": {}, "wrong": ""}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment
    ) as running:
        assert running.stdout is not None
        told: list[tuple[float, float]] = []  # when, microseconds

        def listen(lines: Iterable[str]) -> None:
            told.extend(
                (time.monotonic(), float(line.split()[1])) for line in lines if line.startswith("round")
            )

        listener = threading.Thread(target=listen, args=(running.stdout,), daemon=True)
        listener.start()

        def rate(begin: float) -> float:
            found = [us for when, us in told if when >= begin]
            return round(statistics.median(found), 3) if found else 0.0

        try:
            time.sleep(ATTACHED_SECONDS)
            before = rate(0)
            for tool in TOOLS:
                options = f"-p {running.pid} -d {ATTACHED_SECONDS}" + (
                    " --graphs" if "graph" in program else ""
                )
                began = time.monotonic()
                done, records = machine.trace(tool, options, (), 40)
                during, left = rate(began), time.monotonic()
                time.sleep(1)
                after = rate(left)
                summary = (of(records, "summary") or [{}])[-1]
                result["us"][tool] = [before, during, after]
                result["instrumented"][tool] = [
                    summary.get("launches_instrumented"),
                    summary.get("not_instrumented"),
                ]
                if running.poll() is not None:
                    raise Failure(
                        f"the program ended by itself, {running.returncode}, after {tool}: {last_line(done)}"
                    )
                if done.returncode or not (summary.get("launches_matched") or summary.get("graphs_before")):
                    result["wrong"] = (
                        result["wrong"] or f"{tool}, exit status {done.returncode}: {last_line(done)}"
                    )
                elif not after:
                    result["wrong"] = result["wrong"] or f"the program does not go on after {tool}"
        finally:
            running.kill()
            listener.join(5)
    return result


def missing(counted: Counter[str], kernels: Sequence[str]) -> list[str]:
    def there(glob: str) -> bool:
        pattern = re.compile(rf"(\w+::)*{glob.replace('*', '.*')}$")
        return any(pattern.match(name) for name in counted)

    return [glob for glob in kernels if not there(glob)]


def digest(text: str) -> str:
    """Of a program's output: the line that says it."""
    found = re.search(r"^digest (\w+)$", text, re.MULTILINE)
    return found[1] if found else ""


def sanitizer_command() -> str:
    """compute-sanitizer, wherever toolkits put it. Raises Missing."""
    places = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/compute-sanitizer")
    found = shutil.which("compute-sanitizer") or next(
        (str(file) for place in places if (file := Path(place, "compute-sanitizer")).exists()), None
    )
    if not found:
        raise Missing("there is no compute-sanitizer here")
    return found


def sanitized(machine: Machine, checker: str, program: str) -> Result:
    """compute-sanitizer finds as much in the program with the tool as without: nothing."""
    command = machine.program(program)
    if machine.sim:
        raise Missing("compute-sanitizer needs NVIDIA's driver")
    words = [sanitizer_command(), "--tool", checker, "--error-exitcode", "99", "--target-processes", "all"]
    plain = machine.start([*words, *command], 60)
    results = Path(machine.environment["XDG_CACHE_HOME"], "sanitized.jsonl")
    tool = [
        machine.python,
        str(Path(__file__).parents[2] / "tools" / "threadhist.py"),
        "--device",
        machine.device,
    ]
    done = machine.start([*tool, "--json", "-o", str(results), "--", *words, *command], 60)
    lines = results.read_text().splitlines() if results.exists() else []
    results.unlink(missing_ok=True)
    summary = json.loads(lines[-1]) if lines else {}
    result: Result = {
        "alone": plain.returncode,
        "with": done.returncode,
        "launches_instrumented": summary.get("launches_instrumented"),
        "wrong": "",
    }
    if plain.returncode != 0:
        raise Failure(f"{checker} alone: {last_line(plain)}")
    if done.returncode == 99:
        errors = [line for line in done.stdout.splitlines() if line.startswith("=========")]
        result["wrong"] = f"{checker} finds errors in the instrumented program"
        result["said"] = "\n".join(errors[:40])
    elif done.returncode != 0:
        result["wrong"] = f"the program does not run under both: {last_line(done)}"
    elif not summary.get("launches_instrumented"):
        result["wrong"] = "no launch was instrumented under compute-sanitizer"
    return result
