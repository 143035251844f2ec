"""Run a stage of the check: its parts in order, each with a time limit, and the results as JSON."""

from __future__ import annotations

import datetime
import fnmatch
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.machine import SIM_NOTE, Failure, Machine, Missing, code, commit

Result = dict[str, Any]
BAD = ("wrong", "failed")
SHOWN = 300  # characters of an answer in the line of a part; the JSON has all, and a reason is shown whole
BROKEN_OFF = "the call was ended while it ran"


@dataclass(frozen=True)
class Part:
    """A part of a stage. `run` returns the result; `seconds` is its time limit, and it does not begin if less is left.

    A result with a non-empty "wrong" is a wrong answer. `run` raises Missing if this machine lacks what it needs, and Failure if it
    cannot be done.
    """

    name: str
    run: Callable[[], Result]
    seconds: float = 30


def run_stage(
    name: str,
    parts: Sequence[Part],
    machine: Machine,
    only: Sequence[str],
    where: Path,
    stops: bool = False,
) -> Result:
    """Run the parts that match `only` (globs; none: all); return the result of the stage.

    Before and after each part, `where`/NAME.json is written whole: it says what was found and begun, whenever the check is ended.
    `stops`: the first part that is wrong or failed ends the stage. Raises Failure if `where` cannot be made.
    """
    now = datetime.datetime.now(datetime.UTC)
    result: Result = {
        "stage": name,
        "date": now.strftime("%Y-%m-%d %H:%M UTC"),
        "device": machine.device,
        "note": SIM_NOTE if machine.sim else "",
        "commit": commit(),
        "code": code(),
        "machine": machine.facts,
        "parts": [],
    }
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"cannot make {where} for the results: {error.strerror}; set OUT to a folder") from None
    for part in parts:
        if only and not any(fnmatch.fnmatchcase(part.name, glob) for glob in only):
            continue
        result["parts"].append({"name": part.name, "state": "ended", "why": BROKEN_OFF, "seconds": 0.0})
        write(where / f"{name}.json", result)
        done = run_part(part, machine)
        result["parts"][-1] = done
        write(where / f"{name}.json", result)
        said = str(done["why"] or str(done.get("answer", ""))[:SHOWN])
        print(f"  {done['state']:11} {done['seconds']:6.1f} s  {part.name}  {said}".rstrip(), flush=True)
        if stops and done["state"] in BAD:
            break
    return result


def write(file: Path, result: Result) -> None:
    """Write a result atomically. Values that JSON lacks become text."""
    whole = file.with_name(file.name + ".new")
    whole.write_text(json.dumps(result, indent=1, default=str) + "\n")
    whole.rename(file)


def run_part(part: Part, machine: Machine) -> Result:
    """Run a part; return its result.

    State: "done", "wrong", "failed", "missing" (this machine lacks something), "not reached" (no time). "ended": the check
    was ended during the part.
    """
    began = time.monotonic()
    done: Result = {"name": part.name, "state": "done", "why": "", "seconds": 0.0}
    if machine.left() < part.seconds:
        return {**done, "state": "not reached", "why": f"it needs {part.seconds:.0f} s"}
    try:
        found = part.run()
        done |= found
        if found.get("wrong"):
            done |= {"state": "wrong", "why": found["wrong"]}
    except Missing as error:
        done |= {"state": "missing", "why": str(error)}
    except Failure as error:
        done |= {"state": "failed", "why": str(error)}
    except Exception as error:  # whatever a part stumbles over, the others are still wanted
        print(f"gpu-check: {part.name}: {type(error).__name__}: {error}", file=sys.stderr)
        done |= {"state": "failed", "why": f"{type(error).__name__}: {error}"[:300]}
    done["seconds"] = round(time.monotonic() - began, 1)
    return done
