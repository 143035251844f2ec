"""CUDA and HIP programs, built here or before: each plain and under each tool, with the same output and every launch seen."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from unittest.mock import patch

from conformance import build
from conformance.outcome import DIFFERENT, REFUSED, SAME, Outcome
from conformance.tools import APIS, TOOLS, Api, Watched, finished, under

# Seconds for one program alone; under a tool, it may take five times as long.
LIMIT = float(os.environ.get("CONFORMANCE_LIMIT", "120"))
HIP_LAUNCHED = re.compile(r"\bhip\w*Launch\w*Kernel\w*: Returned hipSuccess")
LAUNCHES_OF_LOG = r"""{ "$@" 2>&1 >/dev/null; } | grep -aoE '\w*Launch\w*: Returned \w*|hipGraphLaunch'; exit ${PIPESTATUS[0]}"""
NOTHING = r"(?!)"  # a pattern that no line has
# Not the launch of a graph, which says nothing about how many kernels run.
LAUNCH = re.compile(r"(__)?cu(da)?Launch(Cooperative)?Kernel")
# Numbers that programs print beside one of these words, or in a unit of time or speed, are measured and differ between runs.
_MEASURED = re.compile(
    r"tim(e|ing)|second|elapsed|bandwidth|throughput|speedup|clocks|flop|\b[mun]?s(ec)?\b|/s\b", re.IGNORECASE
)


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


def run(
    directory: Path,
    jobs: int,
    tools: Sequence[str] = TOOLS,
    only: Sequence[str] = ("*",),
    done: Collection[str] = (),
    api: Api = APIS["cuda"],
) -> Iterator[Outcome]:
    """Run the programs below a directory that match one of `only`, but not those of `done`, alone and under each of the tools."""
    found = {str(Path(command[0]).relative_to(directory)): command for command in commands(directory)}
    wanted = [name for name in found if _wanted(name, only, done)]
    with ProcessPoolExecutor(jobs) as processes:
        work = partial(outcomes, tools=tools, api=api)
        for given in processes.map(work, wanted, [found[name] for name in wanted]):
            yield from given


def _wanted(name: str, only: Sequence[str], done: Collection[str]) -> bool:
    return name not in done and any(fnmatch(name, pattern) for pattern in only)


def run_list(
    suite: build.Suite,
    directory: Path,
    place: Path,
    jobs: int,
    only: Sequence[str] = ("*",),
    build_only: bool = False,
    done: Collection[str] = (),
    tools: Sequence[str] = TOOLS,
) -> Iterator[Outcome]:
    """Build the programs of a list that match one of `only`, but not those of `done`, and run each alone and under the tools."""
    work = partial(_listed, suite, directory, build.commit(directory), place, build_only, tools)
    wanted = [program for program in suite.programs if _wanted(program.name, only, done)]
    with ProcessPoolExecutor(jobs) as processes:
        for given in processes.map(work, wanted):
            yield from given


def _listed(
    suite: build.Suite,
    directory: Path,
    version: str | None,
    place: Path,
    build_only: bool,
    tools: Sequence[str],
    program: build.Program,
) -> list[Outcome]:
    command, reason = build.built(program, directory, version, place, suite.api)
    if reason:
        return [Outcome(program.name, "build", REFUSED, reason)]
    found = [Outcome(program.name, "build", SAME)]
    if not build_only:
        form = partial(comparable, measured=program.measured, unordered=program.unordered)
        with patch.dict(os.environ, program.environment):
            found += outcomes(program.name, command, suite.wrong, tools, form, suite.api, suite.right)
    return found


def comparable(printed: str, measured: str = "", unordered: bool = False) -> str:
    """Return an output without the numbers of lines that report a measurement, and of the line after such a line.

    measured: a pattern of other lines without whose numbers it is; "" for none. unordered: without the lines' order, too.
    """
    lines, before = [], False
    for line in printed.splitlines():
        reports = _MEASURED.search(line) is not None
        differs = reports or before or (measured != "" and re.search(measured, line) is not None)
        without = re.sub(
            r"\s*[-+]?(\d[\d.,]*(e[-+]?\d+)?|\binf\b)", " N", line
        )  # columns may have other widths
        lines.append(without if differs else line)
        before = reports
    return "\n".join(sorted(lines) if unordered else lines)


def outcomes(
    name: str,
    command: Sequence[str],
    wrong: str = NOTHING,
    tools: Sequence[str] = TOOLS,
    form: Callable[[str], str] = comparable,
    api: Api = APIS["cuda"],
    right: str = "",
) -> list[Outcome]:
    """Run one program alone, count its launches in another way than the tools do, and run it under each of the tools.

    wrong, right: patterns of what the program prints if its own check fails, and if it passes. form: makes outputs comparable.
    """
    place = Path(command[0]).parent
    plain = api.alone(command)
    slow = Outcome(name, "plain", REFUSED, f"too slow: takes longer than {LIMIT:.0f} s alone")
    began = time.monotonic()
    printed, said, status = finished(plain, LIMIT, place)
    if status is None:
        return [slow]
    if line := next((line for line in (printed + said).splitlines() if re.search(wrong, line)), None):
        return [Outcome(name, "plain", DIFFERENT, f"says that its result is wrong: {_last_line(line)}")]
    if status != 0:
        return [
            Outcome(name, "plain", REFUSED, f"status {status}: {_last_line(said) or _last_line(printed)}")
        ]
    if not re.search(right, printed):
        return [Outcome(name, "plain", DIFFERENT, "does not say that its result is right")]
    first, began = time.monotonic() - began, time.monotonic()  # the first run translates its kernels
    again, _, status = finished(plain, LIMIT, place)
    if status is None:  # on a busy machine
        return [slow]
    seconds = round(min(first, time.monotonic() - began), 2)
    expected = form(printed)
    if form(again) != expected:
        return [Outcome(name, "plain", REFUSED, "prints something different in each run")]
    found = [Outcome(name, "plain", SAME, seconds=seconds)]
    if not tools:
        return found
    if api == APIS["hip"]:  # a copy, in another process
        made = told_by_hip(plain, place)
    else:
        made = counted(under("cudasnoop", plain, 5 * LIMIT, place))
    for tool in tools:
        found.append(
            _timed(name, tool, _under(tool, command, place, api), expected, form, made, api == APIS["hip"])
        )
    return found


def counted(watched: Watched) -> int | None:
    """Return how many launches the program made, by uprobes; None without uprobes, and with graphs."""
    if not watched.summary or watched.summary["lost"]:
        return None
    calls = [r for r in watched.records if r["type"] == "api"]
    if any("GraphLaunch" in r["api"] for r in calls):
        return None
    return sum(r["count"] - r["errors"] for r in calls if LAUNCH.match(r["api"]))


def told_by_hip(command: Sequence[str], place: Path) -> int | None:
    """Return how many launches the HIP runtime's own log of calls has; None with graphs, whose kernels it does not tell."""
    told = {**os.environ, "AMD_LOG_LEVEL": "3", "AMD_LOG_MASK": "1"}  # on standard error: calls only
    # The log of a program with many calls is larger than memory.
    said, _, status = finished(["bash", "-c", LAUNCHES_OF_LOG, "-", *command], 5 * LIMIT, place, told)
    return len(HIP_LAUNCHED.findall(said)) if status == 0 and "hipGraphLaunch" not in said else None


def _under(tool: str, command: Sequence[str], place: Path, api: Api) -> Watched:
    """Run a program under a tool, and up to twice again if another tool, of all processes, had hooked it."""
    for _ in range(3):
        watched = under(tool, command, 5 * LIMIT, place, api)
        if "another tool" not in watched.said:
            break
    return watched


def _timed(
    name: str,
    tool: str,
    watched: Watched,
    expected: str,
    form: Callable[[str], str],
    made: int | None,
    hip: bool,
) -> Outcome:
    """Return the outcome of a program under a tool, with its time and launches."""
    summary = watched.summary
    if watched.status is None:
        found = Outcome(name, tool, REFUSED, f"takes longer than {5 * LIMIT:.0f} s under the tool")
    elif watched.status != 0 or not summary:
        found = Outcome(name, tool, DIFFERENT, f"status {watched.status}: {_last_line(watched.said)}")
    elif form(watched.printed) != expected:
        found = Outcome(name, tool, DIFFERENT, "prints something different")
    elif tool == "hipsnoop":
        found = _traced(name, tool, watched, made)
    else:
        found = _watched(name, tool, watched, made, hip)
    return replace(
        found,
        seconds=None if watched.status is None else round(watched.seconds, 2),
        launches=traced_launches(watched) if tool == "hipsnoop" else summary.get("launches_matched"),
        instrumented=summary.get("launches_instrumented"),
    )


def traced_launches(watched: Watched) -> int:
    """Return how many launches of kernels hipsnoop counted."""
    kernels = [r for r in watched.records if r["type"] == "kernel" and "GraphLaunch" not in r["kernel"]]
    return sum(r["count"] - r["errors"] for r in kernels)


def _traced(name: str, tool: str, watched: Watched, made: int | None) -> Outcome:
    if watched.summary["lost"]:
        return Outcome(name, tool, DIFFERENT, f"{watched.summary['lost']} calls lost")
    if made is not None and (found := traced_launches(watched)) != made:
        return Outcome(name, tool, DIFFERENT, f"{found} launches seen, {made} made; {_notes(tool, watched)}")
    return Outcome(name, tool, SAME)


def _watched(name: str, tool: str, watched: Watched, made: int | None, hip: bool) -> Outcome:
    summary = watched.summary
    # HIP launches kernels of its own, which are seen, but never measured.
    seen = summary["launches_matched" if hip else "launches_seen"]
    if made is not None and seen != made:
        reason = f"{seen} launches seen, {made} made; {_notes(tool, watched)}"
        return Outcome(name, tool, DIFFERENT, reason)
    if summary["lost"] and "its CUDA context failed" in watched.said:
        return Outcome(
            name, tool, REFUSED, "its context fails; the tool says that it lost the launch's results"
        )
    if summary["lost"]:
        return Outcome(name, tool, DIFFERENT, f"{summary['lost']} records lost")
    explained = sum(summary["not_instrumented"].values())
    if summary["launches_instrumented"] + explained != summary["launches_matched"]:
        return Outcome(name, tool, DIFFERENT, f"launches do not add up: {dict(summary)}")
    if explained:
        reasons = ", ".join(summary["not_instrumented"])
        return Outcome(name, tool, REFUSED, f"same output, but launches not instrumented: {reasons}")
    return Outcome(name, tool, SAME)


def _notes(tool: str, watched: Watched) -> str:
    """Return what a tool said, without the names of attached processes."""
    said = [line for line in watched.said.splitlines() if line.startswith(f"{tool}: ")]
    return "; ".join(line for line in said if "attached to" not in line) or "no notes"


def _last_line(text: str) -> str:
    """Return the last line of a text, with names of files without their directories."""
    return re.sub(r"/\S*/", "", text.strip().split("\n")[-1])[:160]
