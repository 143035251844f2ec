"""CUDA programs that the user built: each plain and under each tool, with the same output and every launch seen."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from conformance.outcome import DIFFERENT, REFUSED, SAME, Outcome
from conformance.tools import TOOLS, Watched, finished, under

# Seconds for one program alone; under a tool, it may take five times as long.
LIMIT = float(os.environ.get("CONFORMANCE_LIMIT", "120"))
# Not the launch of a graph, which says nothing about how many kernels run.
LAUNCH = re.compile(r"(__)?cu(da)?Launch(Cooperative)?Kernel")
# Numbers that programs print beside one of these words, or in a unit of time or speed, are measured and differ between runs.
_MEASURED = re.compile(r"time|second|elapsed|bandwidth|throughput|flop|\b[mun]?s(ec)?\b|/s\b", re.IGNORECASE)


def commands(directory: Path) -> Iterator[list[str]]:
    """Return the command of each executable below a directory. A file NAME.args beside it has its arguments."""
    for path in sorted(directory.rglob("*")):
        if not path.is_file() or not os.access(path, os.X_OK) or ".so" in path.suffixes:
            continue
        with path.open("rb") as file:
            if file.read(4) != b"\x7fELF":
                continue
        arguments = path.with_name(f"{path.name}.args")
        yield [str(path), *(shlex.split(arguments.read_text()) if arguments.exists() else ())]


def run(directory: Path, jobs: int) -> Iterator[Outcome]:
    """Run each program alone and under each tool."""
    with ProcessPoolExecutor(jobs) as processes:
        for found in processes.map(partial(outcomes, directory), list(commands(directory))):
            yield from found


def outcomes(directory: Path, command: list[str]) -> list[Outcome]:
    """Run one program alone, count its launches from outside, and run it under each tool."""
    name = str(Path(command[0]).relative_to(directory))
    place = Path(command[0]).parent
    simulated = [sys.executable, "-m", "cudasim.launcher", "--", *command]
    printed, said, status = finished(simulated, LIMIT, place)
    if status is None:
        return [Outcome(name, "plain", REFUSED, f"takes longer than {LIMIT:.0f} s alone")]
    if status != 0:
        return [Outcome(name, "plain", REFUSED, f"status {status}: {_last_line(said + printed)}")]
    again, _, _ = finished(simulated, LIMIT, place)
    if comparable(again) != comparable(printed):
        return [Outcome(name, "plain", REFUSED, "prints something different in each run")]
    made = counted(under("cudasnoop", simulated, 5 * LIMIT, place))
    return [
        Outcome(name, "plain", SAME),
        *(_watched(name, tool, under(tool, command, 5 * LIMIT, place), printed, made) for tool in TOOLS),
    ]


def comparable(printed: str) -> str:
    """Return an output without the numbers of lines that report a measurement, and of the line after such a line."""
    lines, measured = [], False
    for line in printed.splitlines():
        reports = _MEASURED.search(line) is not None
        lines.append(re.sub(r"[-+]?[\d.]+(e[-+]?\d+)?", "N", line) if reports or measured else line)
        measured = reports
    return "\n".join(lines)


def counted(watched: Watched) -> int | None:
    """Return how many launches the program made, by uprobes; None without uprobes, and with graphs."""
    if not watched.summary or watched.summary["lost"]:
        return None
    calls = [r for r in watched.records if r["type"] == "api"]
    if any("GraphLaunch" in r["api"] for r in calls):
        return None
    return sum(r["count"] - r["errors"] for r in calls if LAUNCH.match(r["api"]))


def _watched(name: str, tool: str, watched: Watched, printed: str, made: int | None) -> Outcome:
    summary = watched.summary
    if watched.status is None:
        return Outcome(name, tool, REFUSED, f"takes longer than {5 * LIMIT:.0f} s under the tool")
    if watched.status != 0 or not summary:
        return Outcome(name, tool, DIFFERENT, f"status {watched.status}: {_last_line(watched.said)}")
    if comparable(watched.printed) != comparable(printed):
        return Outcome(name, tool, DIFFERENT, "prints something different")
    if made is not None and summary["launches_seen"] != made:
        return Outcome(name, tool, DIFFERENT, f"{summary['launches_seen']} launches seen, {made} made")
    if summary["lost"]:
        return Outcome(name, tool, DIFFERENT, f"{summary['lost']} records lost")
    explained = sum(summary["not_instrumented"].values())
    if summary["launches_instrumented"] + explained != summary["launches_matched"]:
        return Outcome(name, tool, DIFFERENT, f"launches do not add up: {dict(summary)}")
    if explained:
        reasons = ", ".join(summary["not_instrumented"])
        return Outcome(name, tool, REFUSED, f"same output, but launches not instrumented: {reasons}")
    return Outcome(name, tool, SAME)


def _last_line(text: str) -> str:
    return (text.strip().split("\n") or [""])[-1][:160]
