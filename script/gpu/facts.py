"""Facts about the driver. Each question of questions/ has its own process, so that a driver that hangs ends only that."""

from __future__ import annotations

import contextlib
import functools
import json

from gpu import questions
from gpu.machine import Failure, Machine, Missing, last_line
from gpu.stage import Part, Result

GUARDED = ("threadhist", "memtrace")
MATRICES = ("capture", "capture during a wait", "spinning kernel")


def parts(machine: Machine) -> list[Part]:
    """Return the questions that are not of the stage matrices, and what programs of the kit show."""
    found = [part for part in asked(machine) if part.name not in MATRICES]
    for runtime in ("programs", "static"):
        found.append(Part(f"cudart's handles, {runtime}", functools.partial(handles, machine, runtime), 30))
    for tool in GUARDED:
        run = functools.partial(grid_barrier, machine, tool)
        found.append(Part(f"a grid-wide spin barrier under {tool}", run, 40))
    return found


def matrices(machine: Machine) -> list[Part]:
    """Return the parts that take long and may leave the GPU in a bad state."""
    return [part for part in asked(machine) if part.name in MATRICES]


def asked(machine: Machine) -> list[Part]:
    return [
        Part(question.name, functools.partial(ask, machine, question), question.seconds)
        for question in questions.QUESTIONS
    ]


def ask(machine: Machine, question: questions.Question, *arguments: str) -> Result:
    """Ask a question in its own process; return the last JSON that it prints. A process that had to be killed has answered, too."""
    command = [machine.python, "-m", "gpu.questions", question.name, *arguments]
    result: Result = {"question": question.text, "believed": question.believed}
    try:
        done = machine.start(command, question.seconds)
    except Failure as failure:
        return {**result, **seen(failure.output), "answer": f"no answer: {failure}", "agrees": False}
    said = seen(done.stdout)
    if done.returncode == 77:
        raise Missing(last_line(done))
    if done.returncode and said:
        return {**result, **said, "answer": f"not asked to the end: {last_line(done)}", "agrees": False}
    if done.returncode or not said:
        raise Failure(f"exit status {done.returncode}: {last_line(done)}")
    return {**result, **said}


def seen(output: str) -> Result:
    """Return the last line of JSON in an output."""
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(said := json.loads(line), dict):
                return said
    return {}


def handles(machine: Machine, runtime: str) -> Result:
    """Return which handles the CUDA runtime passes to the driver's launch functions, as CUPTI's callbacks see them."""
    result: Result = {
        "question": "which handles does cudart pass to cuLaunchKernel, CUfunction or CUkernel?",
        "believed": "a CUkernel may come where a CUfunction is expected",
    }
    why = "there is no CUPTI here"
    for library in [""] if machine.sim else machine.cupti():
        done = machine.start([*machine.program(f"{runtime}/handles"), library], 20)
        if done.returncode == 0:
            ways = [line.rsplit(" ", 2) for line in done.stdout.splitlines() if line.count(" ") > 1]
            passed = {f"{way}: {call}": handle for way, call, handle in ways}
            kinds = sorted(set(passed.values()))
            return {
                **result,
                "answer": ", ".join(kinds),
                "agrees": "kernel" in kinds,
                "passed": passed,
                "equal": done.stdout.startswith("handles equal"),
            }
        why = last_line(done)
        if done.returncode != 77:
            raise Failure(f"exit status {done.returncode}: {why}")
    raise Missing(why)


def grid_barrier(machine: Machine, tool: str) -> Result:
    """Check that a program whose blocks wait for each other ends under the tool as it does alone."""
    command = machine.program("programs/gridbarrier 20")
    plain = machine.start(command, 30)
    if plain.returncode:
        raise Failure(f"it does not pass without a tool: {last_line(plain)}")
    done, records = machine.trace(tool, "", command, 40)
    summary = records[-1] if records else {}
    reasons = summary.get("not_instrumented") or {}
    result: Result = {
        "question": f"does the occupancy guard keep a grid-wide spin barrier from hanging under {tool}?",
        "believed": "yes: a copy of which fewer blocks fit is not launched",
        "answer": f"exit status {done.returncode}, instrumented {summary.get('launches_instrumented')}, left alone {reasons}",
        "agrees": (done.returncode, done.stdout) == (0, plain.stdout),
        "wrong": "",
    }
    if not result["agrees"]:
        result["wrong"] = f"the program ends differently: {last_line(done)}"
    return result
