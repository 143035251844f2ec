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
NOTHING = ("ended", "not reached")  # of these there is no result
HEAD = {"stage": str, "date": str, "device": str, "commit": str, "machine": dict, "parts": list}
PART = {"name": str, "state": str, "why": str}
SHOWN = 500  # characters of an answer in the line of a part; the JSON has all, and a reason is shown whole
BROKEN_OFF = "the call was ended while it ran"


@dataclass(frozen=True)
class Part:
    """A part of a stage. `run` returns the result. The part does not begin if less than `seconds` are left.

    Its commands are ended after `limit` seconds, which are `seconds` unless it says otherwise. The embedded device has longer.
    A result with a non-empty "wrong" is a wrong answer. `run` raises Missing if this machine lacks what it needs, and Failure if it
    cannot be done.
    """

    name: str
    run: Callable[[], Result]
    seconds: float = 30
    limit: float = 0


def run_stage(
    name: str,
    parts: Sequence[Part],
    machine: Machine,
    only: Sequence[str],
    where: Path,
    stops: bool = False,
) -> Result:
    """Run the parts that match `only` (globs; none: all); return their results.

    Before and after each part, `where`/NAME.json is written whole: it says what was found and begun, whenever the check is ended.
    Parts of earlier runs stay in that file until they have a new result.
    `stops`: the first part that is wrong or failed ends the stage, and a part may use the time that those before it have left.
    Raises Failure if `where` cannot be made.
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
    file = where / f"{name}.json"
    earlier = kept(file) if file.exists() else []
    chosen = matching(parts, only)
    for index, part in enumerate(chosen):
        spare = machine.left() - sum(later.seconds for later in chosen[index + 1 :]) if stops else 0
        result["parts"].append({"name": part.name, "state": "ended", "why": BROKEN_OFF, "seconds": 0.0})
        write(file, merged(earlier, result))
        done = run_part(part, machine, spare)
        result["parts"][-1] = done
        write(file, merged(earlier, result))
        said = str(done["why"] or str(done.get("answer", ""))[:SHOWN])
        print(f"  {done['state']:11} {done['seconds']:6.1f} s  {part.name}  {said}".rstrip(), flush=True)
        if stops and done["state"] in BAD:
            break
    return result


def matching(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """Return the parts whose names match one of the globs; all parts without a glob."""
    return [part for part in parts if not only or any(fnmatch.fnmatchcase(part.name, glob) for glob in only)]


def read(file: Path) -> Result | None:
    """Return what a stage wrote to a file. Say on stderr why a damaged file is skipped; None for that, and for other JSON."""
    try:
        result = json.loads(file.read_text())
        if not isinstance(result, dict) or "parts" not in result:
            return None
        check(result, HEAD)
        for part in result["parts"]:
            check(part, PART)
            check({"stage": "", "parts": [], **part.get("from", result)}, HEAD)
    except (OSError, TypeError, ValueError, RecursionError) as error:
        print(f"gpu-check: skipping {file}, which is damaged: {error}", file=sys.stderr)
        return None
    return result


def check(value: object, fields: dict[str, type]) -> None:
    """Raise ValueError unless a value is a dictionary with these fields."""
    lacking = [
        name
        for name, kind in fields.items()
        if not isinstance(value, dict) or not isinstance(value.get(name), kind)
    ]
    if lacking:
        raise ValueError(f"no valid {', '.join(lacking)}")


def runs(result: Result) -> list[Result]:
    """Return what each run of a stage contributed to the result in a file, oldest first. Parts of earlier runs have a "from"."""
    heads: dict[str, Result] = {}
    for part in result["parts"]:
        own = {key: value for key, value in part.items() if key != "from"}
        head = {**result, **part.get("from", {}), "parts": []}
        heads.setdefault(json.dumps(head), head)["parts"].append(own)
    return sorted(heads.values(), key=lambda run: str(run["date"]))


def kept(file: Path) -> list[Result]:
    """Return the parts in a file, each with the run that it is from."""
    result = read(file)
    found = []
    for run in runs(result) if result else ():
        head = {key: value for key, value in run.items() if key not in ("stage", "parts")}
        found += [{**part, "from": head} for part in run["parts"]]
    return found


def merged(earlier: Sequence[Result], result: Result) -> Result:
    """Return a result with those parts of earlier runs that have no new result."""
    begun = {part["name"] for part in result["parts"]}
    known = {part["name"] for part in result["parts"] if part["state"] not in NOTHING}
    left = [
        part
        for part in earlier
        if part["from"]["device"] != result["device"]
        or part["name"] not in (begun if part["state"] in NOTHING else known)
    ]
    return {**result, "parts": [*left, *result["parts"]]}


def write(file: Path, result: Result) -> None:
    """Write a result atomically. Values that JSON lacks become text."""
    whole = file.with_name(file.name + ".new")
    whole.write_text(json.dumps(result, indent=1, default=str) + "\n")
    whole.rename(file)


def run_part(part: Part, machine: Machine, spare: float = 0) -> Result:
    """Run a part; return its result. It may use `spare` seconds if these are more than its limit.

    State: "done", "wrong", "failed", "missing" (this machine lacks something), "not reached" (no time). "ended": the check
    was ended during the part.
    """
    began = time.monotonic()
    done: Result = {"name": part.name, "state": "done", "why": "", "seconds": 0.0}
    if machine.left() < part.seconds:
        return {**done, "state": "not reached", "why": f"it needs {part.seconds:.0f} s"}
    limit = max((part.limit or part.seconds) * machine.slower, spare)
    ends = machine.ends
    machine.ends = min(ends, began + limit)
    try:
        found = part.run()
        done |= found
        if found.get("wrong"):
            done |= {"state": "wrong", "why": found["wrong"]}
    except Missing as error:
        done |= {"state": "missing", "why": str(error)}
    except Failure as error:
        late = f"not done in {limit:.0f} s: " if machine.left() <= 0 else ""
        done |= {"state": "failed", "why": f"{late}{error}"}
    except Exception as error:  # whatever a part stumbles over, the others are still wanted
        print(f"gpu-check: {part.name}: {type(error).__name__}: {error}", file=sys.stderr)
        done |= {"state": "failed", "why": f"{type(error).__name__}: {error}"[:300]}
    finally:
        machine.ends = ends
    done["seconds"] = round(time.monotonic() - began, 1)
    return done
