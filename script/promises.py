#!/usr/bin/env python3
"""Say whether the tools keep what earlier versions promised: options, fields of JSON records, exit statuses (docs/versions.md).

    script/promises.py           print what docs/promises.json names and the tools no longer have (exit status 1), and what is new
    script/promises.py --write   add what is new to docs/promises.json; nothing is ever removed

Options are those of the commands' parsers. Fields and statuses are those of real runs on the embedded device, with the programs of
examples/, which must be built.
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
PROGRAMS = ("vectoradd", "exits", "latency", "memory", "imbalance")
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
    "gpucount kernel:triangular load:triangular -- imbalance",
    "gpudist -H exit:triangular:loads:u64:work -C load:triangular:u32:width -- imbalance",
    "gputrace 'exit:triangular (gthread == 7) \"%lu\", gthread' -- imbalance",
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
)
# Keys of these objects are reasons, methods, patterns and numbers of SMs: data, not fields.
DATA = (
    "launches_timed",
    "methods",
    "missed",
    "not_instrumented",
    "patterns",
    "sm_idle_ns",
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
    module = f"{tool}.launcher" if tool.endswith("sim") else f"gpubpf.tools.{tool}"
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


def records(command: str) -> dict[str, set[str]]:
    """Return the fields of each type of record that a command prints. Raises RuntimeError if it fails."""
    tool, _, rest = command.partition(" ")
    done = run(f"{tool} --json -o /dev/fd/3 {rest} 3>&1 >/dev/null")
    if done.returncode:
        raise RuntimeError(f"{command}: status {done.returncode}\n{done.stderr}")
    found: dict[str, set[str]] = {}
    for line in done.stdout.splitlines():
        record = json.loads(line)
        found.setdefault(record["type"], set()).update(fields(record))
    return found


def now() -> dict[str, set[str]]:
    """Return what the tools have: the options of each command, the fields of each record, the statuses. Each is a set of texts."""
    found = {f"{name}: options": set(options(parser)) for name, parser in parsers().items()}
    for command in (*RUNS, *(() if os.geteuid() else ROOT_RUNS)):
        for kind, names in records(command).items():
            found.setdefault(f"{command.split()[0]}: {kind} record", set()).update(names)
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
    """Return whether only root could tell what the tool has of a part of docs/promises.json."""
    tools = {command.split()[0] for command in ROOT_RUNS}
    return bool(os.geteuid()) and name.endswith(" record") and name.partition(":")[0] in tools


def absent(first: Mapping[str, Iterable[str]], second: Mapping[str, set[str]]) -> list[str]:
    """Return what is in the first and not in the second, one line each."""
    return [
        f"{name}: {text}"
        for name in sorted(first)
        if not unknown(name)
        for text in sorted({*first[name]} - second.get(name, set()))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="add what is new to docs/promises.json")
    write = parser.parse_args().write
    sys.path.insert(0, str(ROOT / "lib"))
    subprocess.run(["make", "-s", "-C", EXAMPLES, *PROGRAMS], check=True)
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
