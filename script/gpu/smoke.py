"""The smoke stage: ten parts, the most basic first, in at most 90 seconds. The first that fails ends it, with one sentence.

Each part takes for granted what those before it have shown, so the first failure is the root of those that would follow.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable, Sequence

from gpu import answers, facts, questions
from gpu.machine import AGENT, Failure, Machine, Missing, Records, last_line
from gpu.records import latency, of, work
from gpu.stage import Part, Result

SECONDS = 90  # for all parts together
# A worse relation of the clocks explains no launch. The embedded device shares its CPUs.
CLOCK_ERROR_NS = {"gpu": 100_000, "sim": 5_000_000}
SPIN_US = 2000
LONGER = {
    "gpu": 1.02,
    "sim": 3.0,
}  # a kernel of known length may seem so much longer; the embedded device shares its CPUs


def parts(machine: Machine) -> list[Part]:
    """Return the parts. Their names begin with their number."""
    runs: list[tuple[str, Callable[[Machine], Result], float]] = [
        ("the machine", surroundings, 12),
        ("exact counts", counts, 12),
        ("module symbols", functools.partial(asked, name="module symbols"), 5),
        ("registered memory and the ring", ring, 10),
        ("clocks", clocks, 16),
        ("a kernel of known length", lengths, 10),
        ("Triton under memtrace", triton, 20),
        ("PyTorch under threadhist", pytorch, 20),
        ("attach and leave", attach, 15),
        (
            "a kernel that does not end",
            functools.partial(asked, name="spinning kernel", arguments=("none",)),
            15,
        ),
    ]
    return [
        Part(f"{number} {name}", functools.partial(run, machine), seconds)
        for number, (name, run, seconds) in enumerate(runs, 1)
    ]


def asked(machine: Machine, name: str, arguments: Sequence[str] = ()) -> Result:
    """Ask a question of questions/; an answer that differs from what the code assumes is wrong."""
    question = questions.named(name)
    result = facts.ask(machine, question, *arguments)
    wrong = f"{result['answer']}; the code assumes: {question.believed}" if result["agrees"] is False else ""
    return {**result, "wrong": wrong}


def surroundings(machine: Machine) -> Result:
    """Record what the driver and the kernel allow. Only a missing context, agent or assembler is a failure."""
    try:
        result = facts.ask(machine, questions.named("machine"))
    except Failure as failure:
        raise Failure(f"the driver gives no context on GPU 0: {failure}") from None
    library = next(iter(sorted(AGENT.glob("*.so"))))
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    done = machine.start([machine.python, "-c", load, str(library)], 10)
    if done.returncode:
        raise Failure(f"the agent cannot be loaded here: {last_line(done)}")
    find = "from gpubpf.images.assemble import find_ptxas; print(find_ptxas() or '')"
    ptxas = machine.start([machine.python, "-c", find], 10).stdout.strip()
    if not ptxas:
        raise Failure("there is no ptxas, so no instrumented kernel can be assembled")
    done = machine.start([ptxas, "--version"], 10)
    if done.returncode:
        raise Failure(f"{ptxas} does not run: {last_line(done)}")
    version = re.search(r"release ([\d.]+)", done.stdout)
    return {**result, "ptxas": f"{ptxas}, {version[1] if version else 'unknown version'}"}


def counts(machine: Machine) -> Result:
    """Run threadhist on vectoradd, with the shared and the static runtime; its counts must be exact."""
    found: Result = {"counts": {}, "wrong": ""}
    for runtime in ("", "static/") if not machine.sim else ("",):
        done, records = traced(machine, "threadhist", "--work stores", f"{runtime}vectoradd")
        counted = found["counts"][runtime + "vectoradd"] = work(records, "vectorAdd")
        if counted != [4, 4, 4, 4, 3]:
            why = (of(records, "summary") or [{}])[-1].get("not_instrumented") or last_line(done)
            found["wrong"] = (
                f"threadhist counts {counted} stores of {runtime}vectoradd, not [4, 4, 4, 4, 3] ({why})"
            )
            break
    found["answer"] = f"stores {found['counts']}"
    return found


def ring(machine: Machine) -> Result:
    """Check that the driver registers a mapped memfd, and that each record of a ring in one arrives."""
    result = asked(machine, "host register")
    if result["found"]["memfd"].get("seen"):
        result["wrong"] = ""  # a BPF array that cannot be registered has a substitute
        _, records = traced(machine, "kernelretsnoop", "-e", "exits")
        summary = of(records, "summary")[-1]
        exits = len(of(records, "exit"))
        result |= {"exits": exits, "lost": summary["lost"], "records": summary["records"]}
        if summary["lost"] or not exits or exits != summary["records"]:
            result["wrong"] = (
                f"kernelretsnoop -e shows {exits} of {summary['records']} exits, {summary['lost']} are lost"
            )
    return result


def clocks(machine: Machine) -> Result:
    """Record the GPU's tick; check how well times on the host's clock are known: alone, with CUPTI, without a PTX compiler."""
    tick = facts.ask(machine, questions.named("globaltimer tick"))
    found: Result = {"tick": tick["answer"], "clock_error_ns": {}, "wrong": ""}
    for way, option, environment in (
        ("alone", " --no-cupti", {}),
        ("with CUPTI", " --cupti", {}),
        ("without the PTX compiler", " --no-cupti", {"CUDA_DISABLE_PTX_JIT": "1"}),
    ):
        if way != "alone" and machine.sim:
            continue
        with machine.setting(environment):
            done, records = traced(machine, "launchlate", f"-v --graphs{option}", "latency 500")
        if "CUPTI provides no timestamps" in done.stderr:
            found["clock_error_ns"][way] = "CUPTI cannot be used"
            continue
        errors = [r["clock_error_ns"] for r in of(records, "launch") if r["method"] == "device"]
        if not errors or any(error is None for error in errors):
            found["wrong"] = f"launchlate, {way}: no launch has a time of its own on the host's clock"
            break
        error = found["clock_error_ns"][way] = statistics.median(errors)
        if error > CLOCK_ERROR_NS[machine.device]:
            found["wrong"] = f"launchlate, {way}: times on the host's clock are known to {error} ns only"
            break
        if not latency(records):
            found["wrong"] = (
                f"launchlate, {way}: waits and their reasons on examples/latency are not the known ones"
            )
            break
    found["answer"] = (
        f"globaltimer ticks {tick['answer'].partition(';')[0]}; errors in ns: {found['clock_error_ns']}"
    )
    return found


def lengths(machine: Machine) -> Result:
    """Measure a kernel that spins for a known time by the device probe, and its twin without a probe by timing events and CUPTI."""
    found: Result = {"us": {}, "wrong": ""}
    for options in ("--no-cupti", "--cupti") if not machine.sim else ("--no-cupti",):
        done, records = traced(
            machine, "launchlate", f"--timeline --kernel first {options}", f"latency {SPIN_US}"
        )
        spans = {r["name"]: r["dur_ns"] for r in of(records, "op") if r["op"] == "kernel"}
        if "CUPTI provides no timestamps" in done.stderr:
            found["us"]["CUPTI"] = "CUPTI cannot be used"
            continue
        own = {"device probe": "first", "timing events": "alone"}
        ways = {"CUPTI": "alone"} if options == "--cupti" else own
        for way, kernel in ways.items():
            ns = spans.get(kernel)
            found["us"][way] = ns / 1000 if ns else None
            if not ns or not SPIN_US * 1000 <= ns <= LONGER[machine.device] * SPIN_US * 1000:
                shown = f"{ns / 1000:.1f} us" if ns else "no time"
                found["wrong"] = found["wrong"] or f"a kernel of {SPIN_US} us has {shown} by {way}"
    found["answer"] = f"of {SPIN_US} us: {found['us']}"
    return found


def triton(machine: Machine) -> Result:
    """Run a softmax by Triton under memtrace: the result must be the same, and its accesses seen."""
    machine.needs("torch", "triton")
    return alike(machine, "memtrace", "programs/triton_kernels.py softmax", instrumented=True)


def pytorch(machine: Machine) -> Result:
    """Time the first use of the GPU by PyTorch under threadhist, which must say that its kernels have no PTX."""
    machine.needs("torch")
    return alike(machine, "threadhist", "programs/torch_work.py ones", instrumented=False)


def alike(machine: Machine, tool: str, program: str, instrumented: bool) -> Result:
    """Run a program alone and under a tool; the result must be the same, and the tool must say what it did."""
    plain = machine.start(machine.program(program), 30)
    if plain.returncode == 77:
        raise Missing(last_line(plain))
    if plain.returncode:
        raise Failure(f"{program} fails without a tool: {last_line(plain)}")
    done, records = traced(machine, tool, "", program, status=None)
    summary = (of(records, "summary") or [{}])[-1]
    result: Result = {
        "first_ms": [first(plain.stdout), first(done.stdout)],  # alone, with the tool
        "instrumented": summary.get("launches_instrumented"),
        "not_instrumented": summary.get("not_instrumented"),
        "overhead": summary.get("overhead"),
        "wrong": "",
    }
    if done.returncode or answers.digest(done.stdout) != answers.digest(plain.stdout):
        result["wrong"] = f"{program} ends differently under {tool}: {last_line(done)}"
    elif instrumented and not result["instrumented"]:
        result["wrong"] = f"{tool} instruments no launch of {program}: {result['not_instrumented']}"
    elif not instrumented and not result["instrumented"] and not result["not_instrumented"]:
        result["wrong"] = f"{tool} sees no launch of {program}"
    result["answer"] = f"first use of the GPU, ms alone and with {tool}: {result['first_ms']}"
    return result


def first(output: str) -> float | None:
    """Return the milliseconds that a program reports for its first use of the GPU."""
    found = re.search(r"^first ([\d.]+)$", output, re.MULTILINE)
    return float(found[1]) if found else None


def attach(machine: Machine) -> Result:
    """Attach threadhist to a running program: it must count and leave, and the program's result must be the same."""
    result = answers.attached(machine, answers.ATTACHED[0], ("threadhist",), seconds=4 if machine.sim else 2)
    instrumented, others = result["instrumented"]["threadhist"]
    if not result["wrong"] and not instrumented:
        result["wrong"] = f"threadhist -p instruments no launch of the running program: {others}"
    result["answer"] = f"us of a launch before, during, after: {result['us']['threadhist']}"
    return result


def traced(
    machine: Machine, tool: str, options: str, program: str, status: int | None = 0
) -> tuple[answers.Done, Records]:
    """Run a tool on a packed program. Raises Failure unless it ends with `status` (None: any)."""
    done, records = machine.trace(tool, options, machine.program(program), 30)
    if status is not None and done.returncode != status:
        raise Failure(f"{tool} {options} -- {program} ends with status {done.returncode}: {last_line(done)}")
    return done, records
