"""The smoke stage: ten parts in at most 90 seconds. The first that fails ends it, with one sentence.

Each part takes for granted what those before it have shown, so the first failure is the root of those that would follow. The limits
of the parts fit into the time together. 7 and 8, which import PyTorch, come last, since how long that takes is not known.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import statistics
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu import answers, facts, questions
from gpu.machine import AGENT, PROGRAMS_CUDA, Failure, Machine, Missing, Records, last_line, tool_said
from gpu.records import latency, of, work
from gpu.stage import Part, Result
from gpubpf.agent.definitions import PROTOCOL_VERSION, SOCKET_VARIABLE, Message

Done = answers.Done
SECONDS = 90  # for all parts together
# A worse relation of the clocks explains no launch. The embedded device shares its CPUs.
CLOCK_ERROR_NS = {"gpu": 100_000, "sim": 5_000_000}
SPIN_US = 2000
NO_TIMES = " (times on the embedded device say nothing)"
LONGER = {
    "gpu": 1.02,
    "sim": 3.0,
}  # a kernel of known length may seem so much longer; the embedded device shares its CPUs


def parts(machine: Machine) -> list[Part]:
    """Return the parts. Their names begin with their number."""
    # Both parts with PyTorch use the same run of the program without a tool: importing it takes long.
    alone = functools.cache(functools.partial(run_alone, machine))
    spinning = functools.partial(asked, name="spinning kernel", arguments=("none",))
    runs: list[tuple[str, Callable[[Machine], Result], float]] = [
        ("1 the machine", surroundings, 10),
        ("2 exact counts", counts, 8),
        ("3 module symbols", functools.partial(asked, name="module symbols"), 4),
        ("4 registered memory and the ring", ring, 7),
        ("5 clocks", clocks, 10),
        ("6 a kernel of known length", lengths, 6),
        ("9 attach and leave", attach, 10),
        ("10 a kernel that does not end", spinning, 8),
        ("7 Triton under memtrace", functools.partial(triton, alone=alone), 17),
        ("8 PyTorch under threadhist", functools.partial(pytorch, alone=alone), 10),
    ]
    return [Part(name, functools.partial(run, machine), seconds) for name, run, seconds in runs]


def unreached(result: Result) -> bool:
    """Return whether this is the smoke stage, and no time was left for one of its parts."""
    return result["stage"] == "smoke" and any(part["state"] == "not reached" for part in result["parts"])


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
    release = str(machine.facts.get("driver_cuda") or PROGRAMS_CUDA)
    if int(release.partition(".")[0]) < PROGRAMS_CUDA:
        raise Failure(
            f"a driver of CUDA {release} does not run the packed programs, which need driver 580 (CUDA {PROGRAMS_CUDA});"
            " try --stage facts,frameworks,matrices"
        )
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
    if (version := spoken(machine, library)) is None:
        raise Failure(f"the driver does not start the agent {library} in cuInit: it sends no greeting")
    if version != PROTOCOL_VERSION:
        raise Failure(
            f"the agent {library} has protocol version {version}, the tools have {PROTOCOL_VERSION}; build or pack it again"
        )
    found = re.search(r"release ([\d.]+)", done.stdout)
    return {
        **result,
        "ptxas": f"{ptxas}, {found[1] if found else 'unknown version'}",
        "protocol": version,
    }


def spoken(machine: Machine, library: Path) -> int | None:
    """Return the protocol version in the greeting that the agent sends when the driver loads it; None without a greeting."""
    name, heard = f"@gpu-check-{os.getpid()}", list[bytes]()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name[1:])
        listener.listen()
        listener.settimeout(10)

        def listen() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(5)
                    heard.append(connection.recv(12, socket.MSG_WAITALL))

        listener_thread = threading.Thread(target=listen, daemon=True)
        listener_thread.start()
        more = {"CUDA_INJECTION64_PATH": str(library), SOCKET_VARIABLE: name}
        machine.start([machine.python, "-c", "from gpu.driver import Driver; Driver().open()"], 10, more)
        listener.shutdown(socket.SHUT_RDWR)
        listener_thread.join(5)
    if not heard or len(heard[0]) < 12:
        return None
    kind, _, version = struct.unpack("<3I", heard[0])
    return int(version) if kind == Message.HELLO else None


def counts(machine: Machine) -> Result:
    """Run threadhist on vectoradd, with the shared and the static runtime; its counts must be exact."""
    found: Result = {"counts": {}, "wrong": ""}
    for runtime in ("", "static/") if not machine.sim else ("",):
        done, records = traced(machine, "threadhist", "--work stores", f"{runtime}vectoradd")
        counted = found["counts"][runtime + "vectoradd"] = work(records, "vectorAdd")
        if counted != [4, 4, 4, 4, 3]:
            reasons = (of(records, "summary") or [{}])[-1].get("not_instrumented")
            said = tool_said(done, "threadhist")
            why = "; ".join(filter(None, (str(reasons or ""), "" if reasons and said == "nothing" else said)))
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
        + (NO_TIMES if machine.sim else "")
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
    found["answer"] = f"of {SPIN_US} us: {found['us']}{NO_TIMES if machine.sim else ''}"
    return found


ONES = "programs/torch_work.py ones"
SOFTMAX = "programs/triton_kernels.py softmax"


def triton(machine: Machine, alone: Callable[[str], Done]) -> Result:
    """Run a softmax by Triton under memtrace: the result must be the same, and its accesses seen."""
    machine.needs("torch", "triton")
    return alike(machine, "memtrace", SOFTMAX, alone(SOFTMAX), instrumented=True)


def pytorch(machine: Machine, alone: Callable[[str], Done]) -> Result:
    """Time the first use of the GPU by PyTorch under threadhist, which must say that its kernels have no PTX."""
    machine.needs("torch")
    try:
        machine.needs("triton")
        plain = alone(SOFTMAX)  # it begins with the same
    except Missing:
        plain = alone(ONES)
    return alike(machine, "threadhist", ONES, plain, instrumented=False)


def run_alone(machine: Machine, program: str) -> Done:
    """Run a program without a tool. Raises Missing if it cannot run here, and Failure."""
    plain = machine.start(machine.program(program), 30)
    if plain.returncode == 77:
        raise Missing(last_line(plain))
    if plain.returncode:
        raise Failure(f"{program} fails without a tool: {last_line(plain)}")
    return plain


def alike(machine: Machine, tool: str, program: str, plain: Done, instrumented: bool) -> Result:
    """Compare a run under a tool with `plain`, one without: the results must be the same, and the tool must say what it did."""
    done, records = traced(machine, tool, "", program, status=None)
    summary = (of(records, "summary") or [{}])[-1]
    # Both programs print the same digest first; only the softmax has another.
    right, results = (digests(output)[: 2 if instrumented else 1] for output in (plain.stdout, done.stdout))
    result: Result = {
        "first_ms": [first(plain.stdout), first(done.stdout)],  # alone, with the tool
        "instrumented": summary.get("launches_instrumented"),
        "not_instrumented": summary.get("not_instrumented"),
        "overhead": summary.get("overhead"),
        "wrong": "",
    }
    if done.returncode or results != right:
        result["wrong"] = f"{program} ends differently under {tool}: {tool_said(done, tool)}"
    elif instrumented and not result["instrumented"]:
        result["wrong"] = (
            f"{tool} instruments no launch of {program}: {result['not_instrumented']}; {tool_said(done, tool)}"
        )
    elif not instrumented and not result["instrumented"] and not result["not_instrumented"]:
        result["wrong"] = f"{tool} sees no launch of {program}: {tool_said(done, tool)}"
    overhead = summary.get("overhead") or {}
    result["answer"] = (
        f"first use of the GPU, ms alone and with {tool}: {result['first_ms']};"
        f" {overhead.get('images')} images, {overhead.get('image_bytes')} bytes"
    )
    return result


def digests(output: str) -> list[str]:
    """Return the digests that a program printed, in order."""
    return re.findall(r"^digest (\w+)$", output, re.MULTILINE)


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
        raise Failure(
            f"{tool} {options} -- {program} ends with status {done.returncode}: {tool_said(done, tool)}"
        )
    return done, records
