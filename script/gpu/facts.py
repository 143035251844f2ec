"""Facts about the driver: each question of questions.py is asked in a process of its own, so that a driver that waits ends nothing."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from gpu import questions
from gpu.machine import Failure, Machine, Missing, last_line
from gpu.stage import Part, Result
from gpubpf.device import cupti_libraries

GUARDED = ("threadhist", "memtrace")


def parts(machine: Machine) -> list[Part]:
    found = [
        Part(question.name, functools.partial(ask, machine, question), question.seconds)
        for question in questions.QUESTIONS
    ]
    for runtime in ("programs", "static"):
        found.append(Part(f"cudart's handles, {runtime}", functools.partial(handles, machine, runtime), 30))
    for tool in GUARDED:
        run = functools.partial(grid_barrier, machine, tool)
        found.append(Part(f"a grid-wide spin barrier under {tool}", run, 40))
    return found


def ask(machine: Machine, question: questions.Question) -> Result:
    """What the process says: its last line is JSON. One that is killed has no answer, which is one, too."""
    command = [machine.python, str(Path(questions.__file__)), question.name]
    result: Result = {"question": question.text, "believed": question.believed}
    try:
        done = machine.start(command, question.seconds)
    except Failure as failure:
        return {**result, "answer": f"no answer: {failure}", "agrees": False}
    if done.returncode == 77:
        raise Missing(last_line(done))
    lines = done.stdout.strip().splitlines()
    try:
        said = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise Failure(f"exit status {done.returncode}: {last_line(done)}") from None
    return {**result, **said}


def handles(machine: Machine, runtime: str) -> Result:
    """Which handle the CUDA runtime passes to the driver's launch functions: CUPTI's callbacks tell."""
    result: Result = {
        "question": "which handles does cudart pass to cuLaunchKernel, CUfunction or CUkernel?",
        "believed": "a CUkernel may come where a CUfunction is expected",
    }
    for library in ["", *cupti_libraries()] if machine.sim else cupti_libraries():
        done = machine.start([*machine.program(f"{runtime}/handles"), library])
        if done.returncode not in (0, 77):
            raise Failure(f"exit status {done.returncode}: {last_line(done)}")
        ways = [line.rsplit(" ", 2) for line in done.stdout.splitlines() if line.count(" ") > 1]
        same = done.stdout.startswith("handles equal")
        if done.returncode == 0:
            passed = {f"{way}: {call}": handle for way, call, handle in ways}
            kinds = sorted(set(passed.values()))
            return {
                **result,
                "answer": ", ".join(kinds),
                "agrees": "kernel" in kinds,
                "passed": passed,
                "equal": same,
            }
        if machine.sim:
            break
    raise Missing(last_line(done))


def grid_barrier(machine: Machine, tool: str) -> Result:
    """A program whose blocks all wait for each other must end as it does without the tool: its kernel is left alone, or still fits."""
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
