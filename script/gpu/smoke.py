"""The smoke stage: ten parts in at most 90 seconds. The first that fails ends it, with one sentence.

Each part takes for granted what those before it have shown, so the first failure is the root of those that would follow. The limits
of the parts fit into the time together, and leave some seconds. 9 and 10, which import PyTorch, come last, since how long that takes
is not known.
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
from gpubpf.session.tracing import CUPTI_STAND_IN

Done = answers.Done
SECONDS = 90  # for all parts together
# A worse relation of the clocks explains no launch. The embedded device shares its CPUs.
CLOCK_ERROR_NS = {"gpu": 100_000, "sim": 5_000_000}
SPIN_US = 2000
NO_TIMES = " (times on the embedded device say nothing)"
# A kernel of known length may seem so many times as long: clocks differ, and the embedded device shares its CPUs.
SHORTER = 0.995
LONGER = {"gpu": 1.02, "sim": 4.0}


def parts(machine: Machine) -> list[Part]:
    """Return the parts. Their names begin with their number."""
    # Both parts with PyTorch use the same run of the program without a tool: importing it takes long.
    alone = functools.cache(functools.partial(run_alone, machine))
    spinning = functools.partial(asked, name="spinning kernel", arguments=("none",))
    runs: list[tuple[str, Callable[[Machine], Result], float]] = [
        ("the machine", surroundings, 10),
        ("exact counts", counts, 7),
        ("module symbols", functools.partial(asked, name="module symbols"), 3),
        ("registered memory and the ring", ring, 6),
        ("clocks", clocks, 9),
        ("a kernel of known length", lengths, 8),
        ("attach and leave", attach, 9),
        ("a kernel that does not end", spinning, 8),
        ("Triton under memtrace", functools.partial(triton, alone=alone), 16),
        ("PyTorch under threadhist", functools.partial(pytorch, alone=alone), 9),
    ]
    return [
        Part(f"{number} {name}", functools.partial(run, machine), seconds)
        for number, (name, run, seconds) in enumerate(runs, 1)
    ]


def unreached(result: Result) -> bool:
    """Return whether this is the smoke stage, and no time was left for one of its parts."""
    return result["stage"] == "smoke" and any(part["state"] == "not reached" for part in result["parts"])


def unchecked(result: Result) -> str:
    """Return which parts this machine could not check, and why; "" if there are none."""
    whys: dict[str, list[str]] = {}
    for part in result["parts"]:
        if part["state"] == "missing":
            whys.setdefault(part["why"], []).append(part["name"].split(" ", 1)[1].split(" under ")[0])
    return "; ".join(
        f"{' and '.join(sorted(names))} {'was' if len(names) == 1 else 'were'} not checked: {why}"
        for why, names in whys.items()
    )


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
    library = AGENT / "libgpubpf-agent.so"
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
    gpu, driver = machine.facts.get("gpu"), machine.facts.get("driver")
    shown = f"{gpu}, driver {driver or 'unknown'}, CUDA {release}" if not machine.sim else gpu
    return {
        **result,
        "answer": f"{shown}; {result['answer']}",
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
    runtimes = " and ".join("static" if "/" in name else "shared" for name in found["counts"])
    found["answer"] = f"vectoradd: 4 4 4 4 3 stores, as expected ({runtimes} runtime)"
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
    shown = [f"globaltimer ticks {tick['answer'].partition(';')[0]}"]
    for way, option, environment in (
        ("alone", " --no-cupti", {}),
        ("with CUPTI", " --cupti", {}),
        ("without the PTX compiler", " --no-cupti", {"CUDA_DISABLE_PTX_JIT": "1"}),
    ):
        if machine.sim and (
            way == "without the PTX compiler" or (way == "with CUPTI" and not has_cupti(machine))
        ):
            continue
        with machine.setting(environment):
            done, records = traced(machine, "launchlate", f"-v --graphs{option}", "latency 500")
        if why := without_cupti(done):
            found["clock_error_ns"][way] = why
            shown.append(f"not measured {way}, because {why}")
            continue
        errors = [r["clock_error_ns"] for r in of(records, "launch") if r["method"] == "device"]
        if not errors or any(error is None for error in errors):
            found["wrong"] = f"launchlate, {way}: no launch has a time of its own on the host's clock"
            break
        error = found["clock_error_ns"][way] = statistics.median(errors)
        shown.append(f"{way}, times are known to {error:.0f} ns")
        if error > CLOCK_ERROR_NS[machine.device]:
            found["wrong"] = f"launchlate, {way}: times on the host's clock are known to {error} ns only"
            break
        if not latency(records):
            found["wrong"] = (
                f"launchlate, {way}: waits and their reasons on examples/latency are not the known ones"
            )
            break
    found["answer"] = "; ".join(shown) + (NO_TIMES if machine.sim else "")
    return found


def has_cupti(machine: Machine) -> bool:
    """Return whether CUPTI can be tried: on the embedded device only a stand-in."""
    return not machine.sim or CUPTI_STAND_IN in machine.environment


def without_cupti(done: Done) -> str:
    """Return the notice that the times are not from CUPTI, or ""."""
    found = re.search(r"CUPTI (?:provides no timestamps: |reported none of |requires )[^\n;]*", done.stderr)
    return found[0].strip() if found else ""


# How launchlate is called, the kernel of known length, the method that its record must have, and how people call that.
METHODS = (
    ("--no-cupti", "first", "device", "the device probe"),
    ("--no-cupti", "alone", "stamp", "timing events"),
    ("--cupti", "alone", "cupti", "CUPTI"),
)


def lengths(machine: Machine) -> Result:
    """Measure a kernel that spins for a known time by the device probe, and its twin without a probe by timing events and CUPTI.

    Without --cupti and --no-cupti, users get a private copy of CUPTI. It records copies at once, and kernels later or not at all.
    """
    found: Result = {"us": {}, "wrong": ""}
    notes = []
    for options in ("--no-cupti", "--cupti", ""):
        if options != "--no-cupti" and not has_cupti(machine):
            continue
        done, records = traced(
            machine, "launchlate", f"--timeline --kernel first {options}".strip(), f"latency {SPIN_US}"
        )
        if why := without_cupti(done):
            notes.append(f"CUPTI was not used: {why}")
            continue
        last = {(r["op"], r["name"]): r for r in of(records, "op")}
        if not options:
            methods = {r["op"]: r["method"] for r in last.values() if r["name"] in ("h2d", "alone")}
            found["default"] = {"copies": methods.get("h2d"), "kernels": methods.get("kernel")}
            used = [what for what, method in found["default"].items() if method == "cupti"]
            notes.append(f"by default, CUPTI times {' and '.join(used) or 'nothing'}")
            ways = [("alone", "cupti", "CUPTI by default")] if "kernels" in used else []
        else:
            ways = [(kernel, method, way) for option, kernel, method, way in METHODS if option == options]
        for kernel, method, way in ways:
            record = last.get(("kernel", kernel), {"dur_ns": None, "method": None})
            why = wrong_length(machine, record, method, way)
            found["wrong"] = found["wrong"] or why
            found["us"][way] = record["dur_ns"] / 1000 if record["dur_ns"] else None
    shown = ", ".join(f"{us or 0:.1f} us by {way}" for way, us in found["us"].items())
    found["answer"] = f"first: {shown} (set: {SPIN_US})"
    found["answer"] = "; ".join([found["answer"], *notes]) + (NO_TIMES if machine.sim else "")
    return found


def wrong_length(machine: Machine, record: Result, method: str, way: str) -> str:
    """Return why this is not the record of a kernel of SPIN_US, measured by this method; "" if it is."""
    ns = record["dur_ns"]
    if not ns:
        return f"a kernel of {SPIN_US} us has no time by {way}"
    if record["method"] != method:
        return f"a kernel that {way} must time has method {record['method']}, not {method}"
    if not SHORTER * SPIN_US * 1000 <= ns <= LONGER[machine.device] * SPIN_US * 1000:
        return f"a kernel of {SPIN_US} us has {ns / 1000:.1f} us by {way}"
    return ""


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
    alone, under = ("unknown" if ms is None else f"{ms:.1f} ms" for ms in result["first_ms"])
    result["answer"] = (
        f"first use of the GPU: {alone} alone, {under} with {tool};"
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
    before, during, after = result["us"]["threadhist"]
    times = f"a launch takes {before:.1f} us before, {during:.1f} us with threadhist, {after:.1f} us after it left"
    times += NO_TIMES if machine.sim else ""
    result["answer"] = "; ".join([times, *result["notices"]])
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
