"""Known answers: every tool on programs with the shared and the static CUDA runtime, and on kernels by NVRTC, Triton and PyTorch.

A program must end the same, and write the same, with and without a tool; the tool must say what is known beforehand.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gpu import cases
from gpu.machine import Failure, Machine, Missing, Records, last_line, tool_said
from gpu.records import ANSWERS, of
from gpu.stage import Part, Result
from gpubpf.process import address_space

TOOLS = ("threadhist", "kernelretsnoop", "launchlate", "memtrace")

Done = subprocess.CompletedProcess[str]

# Programs that print a digest of all they computed: to be the same to the bit. Modules, arguments, the kernels that must be counted
# (none: SASS only, so that a tool has to say so).
SAME: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("programs/workloads all", (), ("addTo", "sums", "softmax", "tiled", "polynomial", "stencil")),
    ("programs/nvrtc.py", ("cuda.bindings", "numpy"), ("fill", "scale")),
    ("programs/triton_kernels.py", ("torch", "triton"), ("attention", "softmax")),
    ("programs/torch_work.py eager", ("torch",), ()),
    ("programs/torch_work.py compiled", ("torch", "triton"), ("triton_*",)),
)

# Programs that run on and on, for tools to be attached to. On the embedded device everything is smaller.
ATTACHED = ("programs/workloads triad 1048576 2000 1000000", "programs/workloads decode-graph 512 50 1000000")
ATTACHED_SECONDS = 2
LEAVES_SECONDS = 5
SLOW_RATIO, SLOW_US = 2, 20  # a launch that takes longer after a tool has left is noted
BREAKPOINT = 0xCC  # int3

# compute-sanitizer's tool, ours, the program: all kinds of checks over little and over much that is put in.
CHECKED = (
    ("memcheck", "memtrace", "memory"),
    ("racecheck", "memtrace", "reduction"),
    ("synccheck", "threadhist", "reduction"),
    ("memcheck", "kernelretsnoop", "exits"),
    ("memcheck", "threadhist", "bandwidth 8192"),
    ("initcheck", "memtrace", "bandwidth 8192"),
    ("racecheck", "threadhist", "memory"),
)

# A part is not begun if less is left. On an H200, an answer took a second, and the same program under a tool 1 to 11, or 25 where
# PyTorch compiles. What takes much longer is killed: a run after half of the limit of its part.
KNOWN_SECONDS, SAME_SECONDS, CHECKED_SECONDS = 4, 15, 10
KNOWN_LIMIT, SAME_LIMIT, CHECKED_LIMIT = 40, 180, 120


def parts(machine: Machine) -> list[Part]:
    """Return the parts, the most informative first and one of each kind before the second of any, since time may run out."""
    first: list[Part] = []
    then: list[Part] = []
    late: list[Part] = []
    runtimes = ("", "static/") if not machine.sim else ("",)  # NVIDIA's static runtime needs NVIDIA's driver
    for runtime in runtimes:
        seen: set[str] = set()
        for tool, options, program, right in ANSWERS:
            run = functools.partial(known, machine, tool, options, runtime + program, right)
            part = Part(named(tool, options, runtime + program), run, KNOWN_SECONDS, KNOWN_LIMIT)
            (first if tool not in seen else late if runtime else then).append(part)
            seen.add(tool)
    alone = functools.cache(functools.partial(run_alone, machine))  # once for all tools
    for program, modules, kernels in SAME:
        for tool in TOOLS:
            run = functools.partial(same, machine, alone, tool, program, modules, kernels)
            part = Part(f"same: {tool} -- {program}", run, SAME_SECONDS, SAME_LIMIT)
            (first if tool in ("threadhist", "memtrace") else then).append(part)
    for program in ATTACHED:
        run = functools.partial(attached, machine, program)
        first.append(Part(f"attached to: {program}", run, 60))
    for index, (checker, tool, program) in enumerate(CHECKED):
        run = functools.partial(sanitized, machine, checker, tool, program)
        part = Part(
            f"compute-sanitizer {checker} over {tool} -- {program}", run, CHECKED_SECONDS, CHECKED_LIMIT
        )
        (late if index else first).append(part)
    return first + cases.parts(machine) + then + late


def named(tool: str, options: str, program: str) -> str:
    return " ".join(filter(None, (tool, options, "--", program)))


def known(
    machine: Machine, tool: str, options: str, program: str, right: Callable[[Records], bool]
) -> Result:
    """Compare a tool's answer with the known one, and check that the program did not notice the tool."""
    command = machine.program(program)
    limit = KNOWN_LIMIT * machine.slower
    plain = machine.start(command, limit)
    if plain.returncode != 0:
        raise Failure(f"the program fails without the tool: {last_line(plain)}")
    done, records = machine.trace(tool, options, command, limit)
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
    """Run a program twice; return the digest of its results. Raises Missing, and Failure if the two differ."""
    digests = []
    for _ in range(2):
        done = machine.start(machine.program(program), 90)  # PyTorch compiles
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
    """Check that a program's results are the same to the bit under the tool, and that the tool counts each launch of these kernels."""
    machine.needs(*modules)
    right = alone(program)
    limit = SAME_LIMIT / 2 * machine.slower
    command = machine.program(program)
    done, records = machine.trace(tool, "", command, limit)
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


def attached(
    machine: Machine, program: str, tools: Sequence[str] = TOOLS, seconds: int = ATTACHED_SECONDS
) -> Result:
    """Attach each tool in turn to a running program, which must be as before when the tool has left.

    "us" of the result: the time of a launch before, during and after, in microseconds."""
    words = program.split()
    if machine.sim:
        words[2:4] = ["64", "2"]
    command = machine.program(" ".join(words))
    environment = {**machine.environment, **machine.libraries(command)}
    result: Result = {"us": {}, "instrumented": {}, "changed": {}, "notices": [], "wrong": ""}
    once = machine.start([*command[:-1], "1"], 60)
    if once.returncode:
        raise Failure(f"the program fails without a tool: {last_line(once)}")
    running = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert running.stdout is not None
    told: list[tuple[float, float]] = []  # when, microseconds
    last = [""]

    def listen(lines: Iterable[str]) -> None:
        for line in lines:
            last[0] = line
            if line.startswith("round"):
                told.append((time.monotonic(), float(line.split()[1])))

    listener = threading.Thread(target=listen, args=(running.stdout,), daemon=True)
    listener.start()

    def rate(begin: float) -> float:
        found = [us for when, us in told if when >= begin]
        return round(statistics.median(found), 3) if found else 0.0

    try:
        time.sleep(seconds)
        before, code = rate(0), driver_code(running.pid)
        if not code:
            result["notices"].append("the driver's code cannot be read here, so it was not compared")
        for tool in tools:
            options = f"-p {running.pid} -d {seconds}"
            began = time.monotonic()
            done, records = machine.trace(tool, options, (), 40)
            during, left = rate(began), time.monotonic()
            time.sleep(1)
            while (
                not (after := rate(left))
                and running.poll() is None
                and time.monotonic() < min(left + 20, machine.ends)
            ):
                time.sleep(0.1)
            summary = (of(records, "summary") or [{}])[-1]
            result["us"][tool] = [before, during, after]
            result["instrumented"][tool] = [
                summary.get("launches_instrumented"),
                summary.get("not_instrumented"),
            ]
            if running.poll() is not None:
                raise Failure(
                    f"the program ended by itself, {running.returncode}, after {tool}: {tool_said(done, tool)}"
                )
            if done.returncode or not (summary.get("launches_matched") or summary.get("graphs_before")):
                result["wrong"] = (
                    result["wrong"] or f"{tool}, exit status {done.returncode}: {tool_said(done, tool)}"
                )
            elif not after:
                result["wrong"] = result["wrong"] or f"the program does not go on after {tool}"
            elif changed := bytes_changed(running.pid, code, machine.ends):
                result["changed"][tool] = changed
                result["wrong"] = (
                    result["wrong"] or f"{tool} leaves {changed} bytes of the driver's code changed"
                )
            if after > SLOW_RATIO * before and after - before > SLOW_US:
                result["notices"].append(
                    f"launches take {after / before:.1f} times as long after {tool} left"
                )
        running.terminate()
        listener.join(10)
        result["digest"] = digest(last[0])
        # Each launch computes the same anew, unless what it computes is the next one's input.
        if "graph" not in program and result["digest"] != digest(once.stdout):
            result["wrong"] = result["wrong"] or "its results are not those it has without tools"
    finally:
        running.kill()
        listener.join(5)
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver, which does not let it go
            running.wait(5)
    return result


def driver_code(pid: int) -> dict[int, bytes]:
    """Return the driver's code in a process by address; nothing if it cannot be read."""
    try:
        with address_space.Memory(pid) as memory:
            return {
                m.start: memory.read(m.start, m.end - m.start)
                for m in address_space.mappings(pid)
                if m.code and "/libcuda.so" in m.path
            }
    except OSError:
        return {}


def bytes_changed(pid: int, code: dict[int, bytes], ends: float) -> int:
    """Return how many bytes differ from this code. Wait for a moment, until `ends` at most, as a process may be left late.

    Breakpoints of others (uprobes) do not count. Raises Failure if the code cannot be read any more."""
    ends = min(ends, time.monotonic() + LEAVES_SECONDS)
    while True:
        try:
            with address_space.Memory(pid) as memory:
                now = {start: memory.read(start, len(before)) for start, before in code.items()}
        except OSError as error:
            raise Failure(f"the driver's code cannot be read any more: {error.strerror}") from None
        changed = sum(differences(before, now[start]) for start, before in code.items())
        if not changed or time.monotonic() > ends:
            return changed
        time.sleep(0.1)


def differences(before: bytes, now: bytes) -> int:
    pages = (slice(at, at + 4096) for at in range(0, len(before), 4096)) if before != now else ()
    pairs = (
        pair
        for page in pages
        if before[page] != now[page]
        for pair in zip(before[page], now[page], strict=True)
    )
    return sum(a != b and BREAKPOINT not in (a, b) for a, b in pairs)


def missing(counted: Counter[str], kernels: Sequence[str]) -> list[str]:
    def there(glob: str) -> bool:
        pattern = re.compile(rf"(\w+::)*{glob.replace('*', '.*')}$")
        return any(pattern.match(name) for name in counted)

    return [glob for glob in kernels if not there(glob)]


def digest(text: str) -> str:
    """Return the digest that a program printed; "" if it printed none."""
    found = re.search(r"^digest (\w+)$", text, re.MULTILINE)
    return found[1] if found else ""


def sanitizer_command() -> str:
    """Return the path of compute-sanitizer, wherever a toolkit put it. Raises Missing."""
    places = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/compute-sanitizer")
    found = shutil.which("compute-sanitizer") or next(
        (str(file) for place in places if (file := Path(place, "compute-sanitizer")).exists()), None
    )
    if not found:
        raise Missing("there is no compute-sanitizer here")
    return found


def sanitized(machine: Machine, checker: str, tool: str, program: str) -> Result:
    """Check that compute-sanitizer reports no error in a program under the tool.

    compute-sanitizer comes in by LD_PRELOAD and passes CUDA_INJECTION64_PATH on, so the agent loads beside it. If the program has
    another value of that variable, the agent is missing, and the part fails with the variables that the program has.
    """
    command = machine.program(program)
    if machine.sim:
        raise Missing("compute-sanitizer needs NVIDIA's driver")
    words = [sanitizer_command(), "--tool", checker, "--error-exitcode", "99", "--target-processes", "all"]
    plain = machine.start([*words, *command], CHECKED_LIMIT / 2)
    if plain.returncode != 0:
        raise Failure(f"{checker} alone: {last_line(plain)}")
    done, records = machine.trace(tool, "", [*words, *command], CHECKED_LIMIT / 2)
    summary = (of(records, "summary") or [{}])[-1]
    result: Result = {
        "with": done.returncode,
        "launches_instrumented": summary.get("launches_instrumented"),
        "not_instrumented": summary.get("not_instrumented"),
        "wrong": "",
    }
    if done.returncode == 99:
        errors = [line for line in done.stdout.splitlines() if line.startswith("=========")]
        result["wrong"] = f"{checker} finds errors in the instrumented program"
        result["said"] = "\n".join(errors[:40])
    elif done.returncode != 0:
        result["wrong"] = f"the program does not run under both: {last_line(done)}"
    elif not summary.get("launches_matched"):
        ways = ", ".join(ways_in(machine, words)) or "nothing"
        raise Failure(f"the agent was not loaded beside {checker}; a program under it has {ways}")
    elif not summary.get("launches_instrumented"):
        result["wrong"] = f"no launch was instrumented under {checker}"
    return result


def ways_in(machine: Machine, words: Sequence[str]) -> list[str]:
    """Return the variables that load libraries, as a program under this command has them."""
    done = machine.start(
        [*words, shutil.which("env") or "env"], 20, {"CUDA_INJECTION64_PATH": "/the/agent's"}
    )
    return [line for line in done.stdout.splitlines() if re.match(r"\w*(INJECTION64_PATH|LD_PRELOAD)=", line)]
