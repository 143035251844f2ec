#!/usr/bin/env python3
"""Say whether the tools keep what earlier versions promised: options, fields of JSON records, exit statuses (docs/versions.md).

    script/promises.py           print what docs/promises.json names and the tools no longer have (exit status 1), and what is new
    script/promises.py --write   add what is new to docs/promises.json; nothing is ever removed

Options are those of the commands' parsers, and the fields of gpubpf diff those that it declares. Other fields, and statuses, are those
of real runs on the embedded devices, with the programs of examples/. What cannot run here, without root, hipcc or clang, is neither
missing nor new.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs/promises.json"
EXAMPLES = ROOT / "examples"
PROGRAMS = (
    *("vectoradd", "exits", "latency", "memory", "imbalance", "softmax", "branches", "barriers"),
    *("training", "hangs"),
)
# Not every machine can build these: what a command line names, and where make builds it.
OPTIONAL = {"hip/saxpy": EXAMPLES / "hip", "threads.bpf.o": EXAMPLES}
# The words before the program, and the program: together they print every record that needs neither root nor a GPU.
RUNS = (
    "threadhist --by warp --work loads -T -- vectoradd 19 5 1 2",
    "threadhist --sample-blocks 1/2 -- imbalance",
    "threadhist --list -- vectoradd 19 5 1 2",
    "kernelretsnoop --kernel lateLane -- exits",
    "kernelretsnoop -e --kernel lateLane --launch 1:1 -- exits",
    "memtrace --kernel transposeNaive -- memory transposeNaive",
    "memtrace -e --block 0 --thread 0 -- vectoradd 19 5 1 2",
    "launchlate -- latency",
    "launchlate -v -- latency",
    "launchlate --timeline -- latency",
    "nansnoop --kernel naive -- softmax",
    "nansnoop --stores --kernel naive -- softmax",
    "barrierlate -- barriers",
    "warpdiv --threads -- branches",
    "gpuhang --after 0.5 -- hangs flag 3",
    "warpdiv --by line -- branches",
    "warpdiv --by function -- branches",
    "gpumem -- training",
    "gpuprofile -- training",
    "gputop -- training",
    "gpucount kernel:triangular load:triangular -- imbalance",
    "gpudist -H exit:triangular:loads:u64:work -C load:triangular:u32:width -- imbalance",
    "gputrace 'exit:triangular (gthread == 7) \"%lu\", gthread' -- imbalance",
    "gpurun threads.bpf.o -- vectoradd 19 5 1 2",
    "gpubpf check",
    "gpubpf check -p $PPID",
    "threadhist --work loads -- hip/saxpy 20",
    "kernelretsnoop -- hip/saxpy 20",
    "memtrace -- hip/saxpy 20",
    "launchlate -v -- hip/saxpy 20",
)
# Commands and the statuses that they end with: what they mean is in the man pages.
STATUSES = (
    "threadhist -- /bin/true",
    "threadhist -- /bin/sh -c 'exit 23'",
    "threadhist -- /bin/sh -c 'kill -TERM $$'",
    "threadhist -- /no/such/program",
    "threadhist -- /",
    "threadhist --kernel none -- vectoradd 19 5 1 2",
    "threadhist --no-such-option",
    "cudasim -- vectoradd 19 5 1 2",
    "cudasim -- /no/such/program",
    "cudasim",
)
# The same with uprobes, which need root.
ROOT_RUNS = (
    "cudasnoop -- cudasim -- vectoradd 19 5 1 2",
    "cudasnoop -e -- cudasim -- vectoradd 19 5 1 2",
    "hipsnoop -- hip/saxpy 20",
    "hipsnoop -e -- hip/saxpy 20",
)
# Keys of these objects are reasons, methods, patterns and numbers of SMs: data, not fields.
DATA = (
    "launches_timed",
    "methods",
    "missed",
    "not_instrumented",
    "not_looked_at",
    "patterns",
    "sm_idle_ns",
    "spent_ns",
    "unknown",
    "values",
)


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a command, as `--device` and, for what an option takes, `--device=gpu`; subcommands come before theirs."""
    for action in parser._actions:
        choices = action.choices or ()
        if isinstance(choices, Mapping):
            for name, inner in choices.items():
                yield from (f"{name} {option}" for option in options(inner))
            continue
        for option in action.option_strings:
            yield option
            yield from (f"{option}={choice}" for choice in choices)


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    from gpubpf import embedded

    found = {}
    for name, place in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].items():
        module = importlib.import_module(place.partition(":")[0])
        found[name] = (
            embedded.build_parser(module.DEVICE) if hasattr(module, "DEVICE") else module.build_parser()
        )
    return found


def run(command: str) -> subprocess.CompletedProcess[str]:
    """Run a tool of this checkout on an example, as a shell would."""
    tool, _, rest = command.partition(" ")
    modules = {"cudasim": "cudasim.launcher", "hipsim": "hipsim.launcher", "gpubpf": "gpubpf"}
    module = modules.get(tool, f"gpubpf.tools.{tool}")
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "lib"), "PATH": f"{EXAMPLES}:{os.environ['PATH']}"}
    line = f"exec '{sys.executable}' -m {module} {rest}"
    return subprocess.run(
        ["/bin/sh", "-c", line], env=variables, cwd=EXAMPLES, capture_output=True, text=True
    )


def fields(value: Any, path: str = "") -> Iterator[str]:
    """Yield the fields of a record: `kernel`, `registers.before`."""
    if isinstance(value, list):
        for inner in value:
            yield from fields(inner, path)
    elif isinstance(value, dict):
        for name, inner in value.items():
            place = f"{path}.{name}" if path else name
            yield place
            if name not in DATA:
                yield from fields(inner, place)


def possible(command: str) -> bool:
    """Return whether this user can run a command here."""
    built = all((EXAMPLES / name).exists() for name in OPTIONAL if name in command)
    return built and not (command in ROOT_RUNS and os.geteuid())


def label(command: str) -> str:
    """Return how docs/promises.json names a command: its tool, and whether it measures a HIP program."""
    tool = command.split()[0]
    return f"{tool} with HIP" if "hip/" in command and tool != "hipsnoop" else tool


def records(command: str) -> dict[str, set[str]]:
    """Return the fields of each type of record that a command prints. Raises RuntimeError if it fails."""
    tool, _, rest = command.partition(" ")
    if tool == "gpubpf":  # it has no -o, and its status says what it found
        done = run(f"{command} --json")
        failed = not done.stdout
    else:
        done = run(f"{tool} --json -o /dev/fd/3 {rest} 3>&1 >/dev/null")
        failed = done.returncode != 0
    if failed:
        raise RuntimeError(f"{command}: status {done.returncode}\n{done.stderr}")
    found: dict[str, set[str]] = {}
    for record in map(json.loads, done.stdout.splitlines()):
        found.setdefault(record["type"], set()).update(fields(record))
    return found


def now() -> dict[str, set[str]]:
    """Return what the tools have: the options of each command, the fields of each record, the names of checks, and the statuses."""
    from gpubpf.check import table
    from gpubpf.query import difference_records

    found = {f"{name}: options": set(options(parser)) for name, parser in parsers().items()}
    found["gpubpf: checks"] = {check.name for check in table.CHECKS}
    for command in filter(possible, (*RUNS, *ROOT_RUNS)):
        for kind, names in records(command).items():
            found.setdefault(f"{label(command)}: {kind} record", set()).update(names)
    for declared in difference_records.RECORDS:
        found[f"gpubpf diff: {declared.name} record"] = set(declared.schema["properties"])
    found["exit statuses"] = {f"{command}: {run(command).returncode}" for command in STATUSES}
    return found


def promised() -> dict[str, set[str]]:
    """Return what docs/promises.json names."""
    return (
        {name: set(texts) for name, texts in json.loads(RECORD.read_text()).items()}
        if RECORD.exists()
        else {}
    )


def unknown(name: str) -> bool:
    """Return whether this machine and this user cannot tell what the tool has of a part of docs/promises.json."""
    of = [command for command in (*RUNS, *ROOT_RUNS) if label(command) == name.partition(":")[0]]
    return name.endswith(" record") and not all(map(possible, of))


def absent(first: Mapping[str, Iterable[str]], second: Mapping[str, set[str]]) -> list[str]:
    """Return what is in the first and not in the second, one line each."""
    return [
        f"{name}: {text}"
        for name in sorted(first)
        if not unknown(name)
        for text in sorted({*first[name]} - second.get(name, set()))
    ]


def build_optional() -> None:
    """Build the programs that not every machine can build."""
    for name, directory in OPTIONAL.items():
        subprocess.run(["make", "-s", "-C", directory, os.path.basename(name)], capture_output=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="add what is new to docs/promises.json")
    write = parser.parse_args().write
    sys.path.insert(0, str(ROOT / "lib"))
    subprocess.run(["make", "-s", "-C", EXAMPLES, *PROGRAMS], check=True)
    build_optional()
    have, before = now(), promised()
    broken, new = absent(before, have), absent(have, before)
    for word, lines in (("missing", broken), ("new", new)):
        for line in lines:
            print(f"{word}: {line}")
    if write:
        merged = {
            name: sorted({*before.get(name, ()), *have.get(name, ())}) for name in sorted({*before, *have})
        }
        RECORD.write_text(json.dumps(merged, indent=1) + "\n")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
