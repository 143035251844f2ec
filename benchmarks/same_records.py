#!/usr/bin/env python3
"""Compare the records of two versions of memtrace, field by field: their probes may differ, their numbers may not.

    python3 benchmarks/same_records.py --before OTHER_CHECKOUT [SUITE=DIRECTORY[:GLOB]…]

Runs the programs of examples/, and those of the suites that are named, on the embedded device under `memtrace --json` of both
checkouts, with each set of options. Prints what differs; the exit status is 1 if anything does. Runs of a program are comparable on
one host thread and the virtual clock, unless it uses the time or random numbers. Nothing is timed, so the machine need not be idle.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import executed

OPTIONS = ("", "--footprint", "--block 0", "--no-allocations", "--granule 4")
LIMIT = 300.0  # seconds for a program under memtrace
# What depends on the process or the probes: registers of copies, addresses, and times.
OWN = frozenset({"pid", "registers", "base", "ts_ns", "stack"})
TALK = frozenset({"attached", "ended", "summary"})  # records of the measurement


def records(checkout: Path, options: str, command: Sequence[str], place: Path | None) -> list[str] | None:
    """Return the records of a program, without the fields in OWN, sorted; None if it fails or takes too long."""
    with tempfile.NamedTemporaryFile() as file:
        tool = [sys.executable, str(checkout / "tools/memtrace.py"), "--device", "sim", "--clock", "virtual"]
        setting = {"PYTHONPATH": str(checkout / "lib"), "CUDASIM_THREADS": "1"}
        try:
            done = subprocess.run(
                [*tool, *options.split(), "--json", "-o", file.name, "--", *command],
                cwd=place,
                env={**os.environ, **setting},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        if done.returncode:
            return None
        found = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
    return sorted(json.dumps(kept(one), sort_keys=True) for one in found if one["type"] not in TALK)


def kept(record: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that both versions must agree on."""
    return {name: value for name, value in record.items() if name not in OWN}


def differences(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    """Yield the records that only one of both has."""
    for sign, ours, others in (("-", before, after), ("+", after, before)):
        left = list(others)
        for record in ours:
            if record in left:
                left.remove(record)
            else:
                yield f"{sign} {record}"


def main(arguments: Sequence[str]) -> int:
    """Compare; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE=DIRECTORY[:GLOB]")
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--options", action="append", help="a set of options, as in --options='--block 0'")
    parser.add_argument("--only", default="*", help="only programs whose name matches, such as 'examples/m*'")
    args = parser.parse_args(arguments)
    compared = different = failed = 0
    for name, command, place, environment in executed.programs(args.suites):
        if not fnmatch.fnmatch(name, args.only):
            continue
        os.environ.update(environment)
        for options in args.options or OPTIONS:
            both = [records(c.resolve(), options, command, place) for c in (args.before, executed.ROOT)]
            if both[0] is None or both[1] is None:
                failed += 1
                print(f"{name} {options}: fails or takes too long")
                continue
            compared += len(both[0])
            found = list(differences(both[0], both[1]))
            different += bool(found)
            print(f"{name} {options}: {len(both[0])} records, {len(found)} differ", flush=True)
            print("".join(f"  {line}\n" for line in found[:8]), end="", flush=True)
    print(f"{compared} records compared; {different} runs differ, {failed} failed")
    return 1 if different or not compared else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
