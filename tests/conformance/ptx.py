"""ZLUDA's PTX tests: kernels with input and output, on the embedded device alone and under each tool."""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from conformance.driver import Driver, DriverError, Job
from conformance.outcome import DIFFERENT, REFUSED, SAME, Outcome
from conformance.tools import TOOLS, Record, Watched, under

URL = "https://github.com/vosen/ZLUDA"
COMMIT = "8a7931be87d758835776f54ea2e33d30621c74ce"
PLACE = "ptx/src/test/spirv_run"
WARPS = 64  # threads of a `test_ptx_warp!`
AT_ONCE = 16  # kernels of one process under a tool
LIMIT = 300.0  # seconds for such a process
EXITS = {"threadhist": "runs", "kernelretsnoop": "exits"}  # the field that has the number of threads
# What else is asked of kernels. Each thread leaves once; the second specification of gpucount has a probe at each instruction.
SPECS = {
    "gpucount": ("exit:*", "instruction:*"),
    "gpudist": ("-C", "exit:*:instructions:u64:work, kernel"),
    "gputrace": ("exit:*",),
}

_TEST = re.compile(r"^test_ptx(_warp|_with_32)?!\(\s*(\w+)\s*,(.*?)\n?\);", re.MULTILINE | re.DOTALL)
_TYPES = {"f32": "f4", "f64": "f8", "f16": "f2"} | {
    f"{k}{8 * n}": f"{k}{n}" for k in "iu" for n in (1, 2, 4, 8)
}
_SUFFIXED = re.compile(r"(-?(?:0x[\da-fA-F_]+?|0b[01_]+|[\d_.]+))_*([iu](?:8|16|32|64)|f32|f64)?")


@dataclass(frozen=True)
class Case:
    """One kernel; the file and the kernel have the name of the test."""

    name: str
    ptx: str
    given: np.ndarray[Any, Any] | None
    expected: np.ndarray[Any, Any]
    threads: int

    @property
    def job(self) -> Job:
        given = None if self.given is None else self.given.tobytes()
        return Job(self.ptx, self.name, given, self.expected.nbytes, self.threads)

    def outcome(self, way: str, found: bytes) -> Outcome:
        values = np.frombuffer(found, self.expected.dtype)
        if np.array_equal(values, self.expected):
            return Outcome(self.name, way, SAME)
        wrong = np.flatnonzero(values != self.expected)
        first = int(wrong[0])
        text = (
            f"element {first} is {values[first]!r}, expected {self.expected[first]!r} ({wrong.size} differ)"
        )
        return Outcome(self.name, way, DIFFERENT, text)


def cases(directory: Path) -> Iterator[Case]:
    """Read the tests that mod.rs has values for."""
    place = directory / PLACE
    text = re.sub(r"//.*", "", (place / "mod.rs").read_text())
    for kind, name, values in _TEST.findall(text):
        arrays = [array(inside) for inside in re.findall(r"\[(.*?)\]", values, re.DOTALL)]
        warp = kind == "_warp"
        ptx = (place / f"{name}.ptx").read_text()
        yield Case(name, ptx, None if warp else arrays[0], arrays[-1], WARPS if warp else 1)


def array(text: str) -> np.ndarray[Any, Any]:
    """Return an array of Rust's literals. Its type is the suffix of any element, or that of Rust's default."""
    pairs = [_number(item.strip()) for item in text.split(",") if item.strip()]
    kinds = [kind for _, kind in pairs if kind]
    floats = any(isinstance(value, float) for value, _ in pairs)
    kind = _TYPES[kinds[0] if kinds else "f64" if floats else "i32"]
    return np.array([value for value, _ in pairs], dtype=kind)


def _number(text: str) -> tuple[float | int, str | None]:
    """Return a Rust literal's value and the name of its type."""
    if found := _SUFFIXED.fullmatch(text):
        digits, kind = found[1].replace("_", ""), found[2]
        if "." in digits or kind in ("f32", "f64"):
            return float(digits), kind
        return int(digits, 0), kind
    if found := re.fullmatch(r"([iu]\d+)::(MIN|MAX|max_value\(\))", text):
        limits = np.iinfo(_TYPES[found[1]])
        return int(limits.min if found[2] == "MIN" else limits.max), found[1]
    if found := re.fullmatch(r"(?:half::)?(f16|f32)::from_bits\((\w+)\)", text):
        kind = found[1]
        bits = np.array([int(found[2], 0)], dtype=_TYPES[kind.replace("f", "u")])
        return float(bits.view(_TYPES[kind])[0]), kind
    if found := re.fullmatch(r"half::f16::from_f(?:32|64)\((.*)\)", text):
        return float(found[1]), "f16"
    if found := re.fullmatch(r"half::f16::NAN\.to_bits\(\)", text):
        return 0x7E00, "u16"
    if found := re.fullmatch(r"(?:half::)?(f16|f32)::(NAN|INFINITY|NEG_INFINITY)", text):
        return {"NAN": math.nan, "INFINITY": math.inf, "NEG_INFINITY": -math.inf}[found[2]], found[1]
    if found := re.fullmatch(r"std::f32::consts::PI( / 2f32)?", text):
        return math.pi / (2 if found[1] else 1), "f32"
    raise ValueError(f"unknown literal: {text}")


def run(directory: Path, jobs: int) -> Iterator[Outcome]:
    """Run each kernel alone. Then run those that gave what was expected once more under each tool."""
    given = list(cases(directory))
    with ProcessPoolExecutor(jobs) as processes:
        plain = list(processes.map(alone, given))
        yield from plain
        good = [case for case, outcome in zip(given, plain, strict=True) if outcome.verdict == SAME]
        newer = [raised(case) for case in good]
        still = processes.map(alone, newer)
        chosen = [n if o.verdict == SAME else case for case, n, o in zip(good, newer, still, strict=True)]
        parts = [chosen[at : at + AT_ONCE] for at in range(0, len(chosen), AT_ONCE)]
        work = [(tool, part) for tool in (*TOOLS, *SPECS) for part in parts]
        for found in processes.map(watch, *zip(*work, strict=True)):
            yield from found


def raised(case: Case) -> Case:
    """Return a case for sm_70, the oldest target that gpubpf instruments, if it is for an older one."""
    return replace(case, ptx=re.sub(r"^\.target sm_[3-6]\d", ".target sm_70", case.ptx, flags=re.MULTILINE))


def alone(case: Case) -> Outcome:
    """Run a kernel on the embedded device."""
    try:
        return case.outcome("plain", Driver().run(case.job))
    except DriverError as error:
        said = str(error)
        verdict = DIFFERENT if said.startswith("cuCtxSynchronize") else REFUSED
        return Outcome(case.name, "plain", verdict, re.sub(r" *\n.*", "", said, flags=re.DOTALL))


def watch(tool: str, given: Sequence[Case]) -> list[Outcome]:
    """Run kernels in one process under a tool, and compare each output and each count."""
    with tempfile.TemporaryDirectory() as place:
        jobs, results = Path(place) / "jobs.json", Path(place) / "results.json"
        jobs.write_text(json.dumps([case.job.to_json() for case in given]))
        command = [sys.executable, "-m", "conformance.driver", str(jobs), str(results)]
        watched = under(tool, command, LIMIT, more=SPECS.get(tool, ()))
        if not results.exists():
            return [Outcome(case.name, tool, DIFFERENT, watched.said[-300:]) for case in given]
        found = json.loads(results.read_text())
    return [_watched(tool, watched, case, result) for case, result in zip(given, found, strict=True)]


def _watched(tool: str, watched: Watched, case: Case, result: str) -> Outcome:
    if result.startswith("error"):
        return Outcome(case.name, tool, DIFFERENT, result)
    outcome = case.outcome(tool, bytes.fromhex(result))
    if outcome.verdict != SAME:
        return outcome
    records = [
        r for r in watched.records if r.get("mangled", r.get("kernel")) == case.name
    ]  # events have the name only
    if not records:
        return Outcome(case.name, tool, REFUSED, "not instrumented; the output is the same")
    if tool in SPECS:
        expected, found = {"exits": case.threads}, {"exits": _exits(tool, records)}
    else:
        expected = {"count" if tool == "launchlate" else "launches": 1}
        if tool in EXITS:
            expected[EXITS[tool]] = case.threads
        found = {field: sum(r[field] for r in records) for field in expected}
    for field, number in expected.items():
        if found[field] != number:
            return Outcome(case.name, tool, DIFFERENT, f"{field}: {found[field]}, expected {number}")
    return outcome


def _exits(tool: str, records: Sequence[Record]) -> int:
    """Return how many threads left a kernel, by the records of a tool of `SPECS`."""
    if tool == "gpucount":
        return sum(r["threads"] for r in records if r["spec"] == SPECS[tool][0])
    return sum(r["count"] for r in records) if tool == "gpudist" else len(records)
