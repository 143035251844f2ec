"""Make a report, as JSON and Markdown in benchmarks/results/, from the results of the stages."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gpu.machine import SIM_NOTE, Failure
from gpu.stage import NOTHING, Result, read, runs

STATES = ("done", "wrong", "failed", "missing", "ended", "not reached")


def summary(results: Sequence[Result]) -> str:
    """Return a line for each stage."""
    lines = []
    for result in results:
        seconds = sum(part["seconds"] for part in result["parts"])
        note = f"  ({result['note']})" if result["note"] else ""
        lines.append(
            f"{result['stage']}: {counts(result['parts']) or 'nothing was left to do'}; {seconds:.0f} s{note}\n"
        )
    return "".join(lines)


def counts(parts: Sequence[Result]) -> str:
    """Return how many parts are in each state."""
    states = Counter(part["state"] for part in parts)
    return ", ".join(f"{states[state]} {state}" for state in STATES if states[state])


def results_in(directory: Path) -> list[Result]:
    """Return what runs of stages wrote below `directory`, oldest first. Damaged files are named on stderr, and skipped."""
    written = [result for path in sorted(directory.rglob("*.json")) if (result := read(path))]
    return sorted((run for result in written for run in runs(result)), key=lambda run: str(run["date"]))


def done(directory: Path, device: str) -> set[tuple[str, str]]:
    """Return stage and name of each part that is done, by its latest result. Raises Failure: there is no such directory."""
    if not directory.is_dir():
        raise Failure(f"{directory} is not a directory")
    states = {
        (result["stage"], part["name"]): part["state"]
        for result in results_in(directory)
        if result["device"] == device
        for part in result["parts"]
        if part["state"] not in NOTHING
    }
    return {part for part, state in states.items() if state == "done"}


def write(directory: Path, where: Path) -> Path:
    """Write gpu-DATE.json and .md into `where`, from all stages found below `directory`.

    If there is a report of other runs with that date, the name is gpu-DATE-2. If a stage ran several times, the later result of a
    part counts. Raises Failure without results of a GPU.
    """
    everything = results_in(directory)
    found = [result for result in everything if result["device"] == "gpu"]
    if not everything:
        raise Failure(f"no stage wrote anything below {directory}")
    if not found:
        raise Failure(f"{directory} has results of the embedded device only; reports need results of a GPU")
    if left_out := len(everything) - len(found):
        print(f"gpu-check: left out {left_out} results of the {SIM_NOTE}", file=sys.stderr)
    stages: dict[str, Result] = {}
    for result in found:
        kept = stages.setdefault(result["stage"], {"stage": result["stage"], "parts": []})
        parts = {part["name"]: part for part in kept["parts"]}
        for part in result["parts"]:
            if part["state"] not in NOTHING or part["name"] not in parts:
                parts[part["name"]] = {**part, "run": run_of(result)}
        kept["parts"] = list(parts.values())
    # What a run gave of which nothing is left does not matter.
    of = {json.dumps(part["run"]): part["run"] for stage in stages.values() for part in stage["parts"]}
    report = {
        "date": found[0]["date"],
        "machine": found[0]["machine"],
        "runs": list(of.values()),
        "stages": list(stages.values()),
    }
    where.mkdir(parents=True, exist_ok=True)
    names = (
        where / f"gpu-{report['date'][:10]}{number}" for number in ("", *(f"-{n}" for n in range(2, 100)))
    )
    name = next(name for name in names if _is_free(name.with_suffix(".json"), report))
    name.with_suffix(".json").write_text(json.dumps(report) + "\n")
    name.with_suffix(".md").write_text(markdown(report))
    return name.with_suffix(".md")


def _is_free(file: Path, report: Result) -> bool:
    """Return whether a file does not exist, or has an earlier report of the same runs."""
    try:
        return bool(json.loads(file.read_text())["date"] == report["date"])
    except (OSError, ValueError, KeyError, TypeError):
        return True


def run_of(result: Result) -> Result:
    """Return what a result depends on: the code, and the machine."""
    machine = {key: result["machine"].get(key) for key in ("gpu", "driver", "kernel")}
    return {"commit": result["commit"], "code": result.get("code", ""), **machine}


def cell(text: object) -> str:
    """Return a text for a cell of a Markdown table."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return [*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows), ""]


def markdown(report: Result) -> str:
    machine, runs = report["machine"], report["runs"]
    commits = sorted({run["commit"] for run in runs})
    lines = [
        f"# {machine.get('gpu')}, {report['date']}, {'commit' if len(commits) == 1 else 'commits'} {', '.join(commits)}",
        "",
    ]
    if len(runs) > 1:
        lines += ["**Put together from runs of different code or on different machines**:", ""]
        lines += [f"- {', '.join(f'{key} {value}' for key, value in run.items())}" for run in runs]
        lines += [""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += ["", *verified(report)]
    for stage in report["stages"]:
        lines += [f"## {stage['stage']}: {counts(stage['parts'])}", ""]
        of = sorted({part["run"]["commit"] for part in stage["parts"]})
        if len(commits) > 1:
            lines += [f"Commit {', '.join(of)}.", ""]
        lines += [*SHOWN.get(stage["stage"], plain)(stage["parts"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def verified(report: Result) -> list[str]:
    """Return a row for each run, as the tables of docs/gpu.md and README.md have them, and the parts without a result."""
    rows: dict[str, list[str]] = {}
    unknown = []
    for stage in report["stages"]:
        of = [part["run"] for part in stage["parts"]]
        for run in (run for index, run in enumerate(of) if run not in of[:index]):
            where = f"{run['gpu']}, driver {run['driver']}, commit {run['commit']}"
            counted = counts([part for part in stage["parts"] if part["run"] == run])
            rows.setdefault(where, []).append(f"{stage['stage']}: {counted}")
        if names := [part["name"] for part in stage["parts"] if part["state"] in NOTHING]:
            unknown.append(f"- {stage['stage']}: nothing is known of {'; '.join(names)}")
    return [
        "## What was verified",
        "",
        *table(("hardware", "what has been verified"), [(where, "; ".join(rows[where])) for where in rows]),
        *unknown,
        "",
    ]


def plain(parts: Sequence[Result]) -> list[str]:
    rows = [(part["name"], part["state"], part.get("answer", part["why"])) for part in parts]
    return table(("part", "state", ""), rows)


def facts(parts: Sequence[Result]) -> list[str]:
    words = {True: "yes", False: "NO", None: ""}
    rows = [
        (
            part.get("question", part["name"]),
            part.get("answer", f"{part['state']}: {part['why']}"),
            part.get("believed", ""),
            words[part.get("agrees")],
        )
        for part in parts
    ]
    return table(("question", "answer", "what was believed", "agrees"), rows)


def costs(parts: Sequence[Result]) -> list[str]:
    """Return the table of ratios to the program alone: median (least to most)."""
    rows: list[tuple[object, ...]] = []
    after: list[str] = []
    for part in parts:
        if "ratio" not in part:
            if part["state"] != "done":
                rows.append((part["name"], f"{part['state']}: {part['why']}", "", "", ""))
            elif "answer" in part:
                after.append(f"- {part['name']}: {part['answer']}")
            continue
        alone = part["us"]["alone"]
        for mode, (middle, least, most) in part["ratio"].items():
            device = part["gpu_ratio"].get(mode)
            shown = f"{device[0]:.3f}" if device else ""
            rows.append(
                (part["name"], mode, f"{middle:.3f} ({least:.3f} to {most:.3f})", shown, f"{alone[0]:.2f}")
            )
        for mode, why in {**part.get("failed", {}), **part.get("missing", {})}.items():
            rows.append((part["name"], mode, f"not measured: {why}", "", ""))
        if "nothing_ns" in part:
            middle, least, most = part["nothing_ns"]
            after.append(
                f"- {part['name']}: a launch (or token) that no program is on: {middle} ns more ({least} to {most})"
            )
        after += [
            f"- {part['name']}: {goal}: {'met' if met else 'NOT met'}"
            for goal, met in part.get("goals", {}).items()
        ]
    for part in parts:
        for other in part.get("published", ()):
            after.append(
                f"- published, not measured here: {other['system']}: {other['figure']} ({other['on']}; {other['source']})"
            )
    head = ("program", "with", "times as long, by the host's clock", "by GPU events", "alone, µs a launch")
    return [*table(head, rows), *after]


SHOWN = {"facts": facts, "overhead": costs, "frameworks": costs, "references": costs, "sanitizer": costs}
