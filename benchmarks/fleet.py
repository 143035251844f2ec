#!/usr/bin/env python3
"""Makes the records of a training run on many machines, and measures questions about them.

    benchmarks/fleet.py make DIR                    100 machines with 8 GPUs, 10^8 launches; some minutes, 2 GB
    benchmarks/fleet.py make DIR --machines 10 --launches 1000000
    benchmarks/fleet.py ask DIR                     the questions of docs/analysis.md, "A hundred machines": a table

The files are those that `launchlate -v --parquet DIR` writes: same names, columns and sizes. Each GPU has a process, a rank. In each
step, a rank launches `forward`, `backward` and `all_reduce`, and `all_reduce` ends when the last rank has begun it. Two machines are
not like the others:

- SLOW: after a third of the run, its GPUs take 8 % longer.
- LATE: in one step of 50, its launches of `forward` begin 5 ms late.

The same arguments give the same records.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from gpubpf.show.dataset import ROW_GROUP, Dataset
from gpubpf.show.fields import Fields
from gpubpf.tools import launchlate

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/analysis.md"
RANKS = 8  # of a machine
KERNELS = ("forward", "backward", "all_reduce")
SLOW, LATE = "node037", "node061"
FORWARD, BACKWARD, TRANSFER, LATENCY, CALL = 6_000_000, 11_000_000, 900_000, 7_000, 4_000  # ns
SLOWER, DELAY, DELAYED = 1.08, 5_000_000, 50
ROWS = 1 << 16  # of a file: about what 32 MB of JSON text have
DAY = "2026-11-30"


class Fleet:
    """The times of all ranks. The arrays have the shape (ranks, steps), and are in ns.

    machines: how many there are.
    launches: of all of them together.
    """

    def __init__(self, machines: int, launches: int):
        self.machines = [f"node{one:03}" for one in range(machines)]
        ranks = machines * RANKS
        self.steps = max(launches // (ranks * len(KERNELS)), 1)
        random = np.random.default_rng(1)
        shape = ranks, self.steps
        self.latency = random.gamma(4.0, LATENCY / 4, shape).astype(np.int64)
        self.forward = random.normal(FORWARD, FORWARD / 100, shape).astype(np.int64)
        self.backward = random.normal(BACKWARD, BACKWARD / 100, shape).astype(np.int64)
        for host, change in ((SLOW, self._slow), (LATE, self._late)):
            if host in self.machines:
                first = self.machines.index(host) * RANKS
                change(slice(first, first + RANKS))
        ready = self.latency + self.forward + self.backward
        self.step = ready.max(axis=0) + TRANSFER  # how long each step takes
        self.all_reduce = self.step - ready
        self.began = np.concatenate(([0], np.cumsum(self.step + 100_000)[:-1]))
        self.booted = random.integers(10**13, 10**15, machines)  # each machine has its own clock

    def _slow(self, ranks: slice) -> None:
        since = self.steps // 3
        for times in (self.forward, self.backward):
            times[ranks, since:] = (times[ranks, since:] * SLOWER).astype(np.int64)

    def _late(self, ranks: slice) -> None:
        self.latency[ranks, ::DELAYED] += DELAY


def of(kind: str) -> Fields:
    """Return the declaration of a type of records of launchlate."""
    return next(one for one in launchlate.build_parser().declared() if one.name == kind)


def schema_of(kind: str) -> pa.Schema:
    """Return the schema of the files that launchlate writes for a type of records."""
    with tempfile.TemporaryDirectory() as place:
        with contextlib.redirect_stderr(io.StringIO()):  # the notice of how much was written
            kept = Dataset(place, "launchlate", [of(kind)])
            kept.records([{"type": kind}])
            kept.close()
        (file,) = Path(place).rglob("*.parquet")
        return pq.read_schema(file)


def table(schema: pa.Schema, rows: int, columns: dict[str, Any]) -> pa.Table:
    """Return a table. A column is an array, or one value for all rows; columns that are not given are null."""

    def array(field: pa.Field) -> pa.Array:
        given = columns.get(field.name)
        if isinstance(given, (np.ndarray, pa.Array)):
            return pa.array(given, field.type)
        return pa.repeat(pa.scalar(given, field.type), rows)

    return pa.table([array(field) for field in schema], schema)


def write(records: pa.Table, file: Path) -> None:
    """Write a file as the tool does."""
    pq.write_table(records, file, compression="zstd", row_group_size=ROW_GROUP)


def make(directory: Path, machines: int, launches: int) -> None:
    """Write the records."""
    fleet = Fleet(machines, launches)
    schemas = {kind: schema_of(kind) for kind in ("launch", "kernel", "summary")}
    for number, host in enumerate(fleet.machines):
        place = directory / "tool=launchlate" / f"day={DAY}" / f"host={host}"
        place.mkdir(parents=True, exist_ok=True)
        run = f"{DAY.replace('-', '')}T080000Z-{4000 + number}-{number:06x}"
        all_launches = pa.concat_tables(
            launches_of(fleet, schemas["launch"], number, rank, run) for rank in range(RANKS)
        )
        all_launches = all_launches.sort_by("end_ns")
        for at, begin in enumerate(range(0, len(all_launches), ROWS)):
            write(all_launches.slice(begin, ROWS), place / f"launch-{run}-{at:04}.parquet")
        kernels = kernels_of(all_launches, schemas["kernel"], run)
        write(kernels, place / f"kernel-{run}-0000.parquet")
        summary = summary_of(fleet, schemas["summary"], number, len(all_launches), run)
        write(summary, place / f"summary-{run}-0000.parquet")


def launches_of(fleet: Fleet, schema: pa.Schema, machine: int, rank: int, run: str) -> pa.Table:
    """Return the launches of a rank."""
    row = machine * RANKS + rank
    forward = fleet.booted[machine] + fleet.began + fleet.latency[row]
    backward = forward + fleet.forward[row]
    reduced = backward + fleet.backward[row]
    start = np.stack((forward, backward, reduced), 1).ravel()
    took = np.stack((fleet.forward[row], fleet.backward[row], fleet.all_reduce[row]), 1).ravel()
    call = np.repeat(fleet.booted[machine] + fleet.began, len(KERNELS)) + np.tile(
        np.arange(len(KERNELS)) * CALL, fleet.steps
    )
    behind = np.tile([False, True, True], fleet.steps)  # launches that wait for the kernel before them
    wait = np.where(behind, start - call - CALL, 0)
    rows = len(start)
    names = pa.array(list(KERNELS))
    first = pa.array(np.tile(np.array([0, 0, 1], np.int32), fleet.steps), mask=~behind)
    waited = pa.StructArray.from_arrays(
        [pa.repeat("kernel", rows), pa.DictionaryArray.from_arrays(first, names).cast(pa.string()), pa.nulls(rows, pa.string())],
        ["kind", "name", "of"],
        mask=pa.array(~behind),
    )  # fmt: skip
    kernel = pa.DictionaryArray.from_arrays(
        pa.array(np.tile(np.arange(3, dtype=np.int32), fleet.steps)), names
    )
    return table(
        schema,
        rows,
        {
            "type": "launch", "pid": 5000 + rank, "comm": "train", "gpu": rank, "vendor": "nvidia", "wave": 32,
            "launch": np.arange(1, rows + 1), "kernel": kernel.cast(pa.string()), "tid": 5000 + rank, "stream": "0x7",
            "call_ns": call, "return_ns": call + CALL, "start_ns": start, "end_ns": start + took,
            "latency_ns": start - call, "api_ns": CALL, "wait_ns": wait, "overhead_ns": start - call - CALL - wait,
            "exec_ns": took, "waited_for": waited, "method": "cupti", "clock_error_ns": 200, "running": False,
            "grid": [1024, 1, 1], "block_dim": [256, 1, 1], "run": run,
        },
    )  # fmt: skip


def kernels_of(launches: pa.Table, schema: pa.Schema, run: str) -> pa.Table:
    """Return the records of the kernels of a machine, one for each rank and kernel."""
    records = []
    times = ("latency_ns", "api_ns", "wait_ns", "overhead_ns", "exec_ns")
    for rank in range(RANKS):
        for kernel in KERNELS:
            chosen = launches.filter(
                (pa.compute.field("gpu") == rank) & (pa.compute.field("kernel") == kernel)
            )
            record: dict[str, Any] = {
                "type": "kernel", "pid": 5000 + rank, "comm": "train", "gpu": rank, "vendor": "nvidia", "wave": 32,
                "kernel": kernel, "count": len(chosen), "clock_error_ns": 200, "unknown": 0, "run": run,
                "methods": [("cupti", len(chosen))], "waited_for": [],
            }  # fmt: skip
            for name in times:
                values = chosen[name].to_numpy()
                p50, p99 = np.percentile(values, (50, 99), method="lower")
                record[name] = {"mean": values.mean(), "p50": p50, "p99": p99, "max": values.max()}
            records.append(record)
    return pa.Table.from_pylist(records, schema)


def summary_of(fleet: Fleet, schema: pa.Schema, machine: int, launches: int, run: str) -> pa.Table:
    """Return the summary of a machine. On one machine in 20, some launches were made before the tool was ready."""
    missed = 3 * RANKS if machine % 20 == 7 else 0
    record = {
        "type": "summary", "tool": "launchlate", "device": "gpu", "launches_seen": launches + missed,
        "launches_matched": launches + missed, "launches_instrumented": launches, "lost": 0,
        "not_instrumented": [("before ready", missed)] if missed else [], "duration_ns": int(fleet.step.sum()),
        "run": run,
    }  # fmt: skip
    return pa.Table.from_pylist([record], schema)


def questions() -> list[tuple[str, str]]:
    """Return (question, SQL) of the page."""
    text = re.search(r"^## A hundred machines.*?^```sql\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert text is not None
    _, *parts = re.split(r"^-- (.*)\n", text[1], flags=re.M)
    return list(zip(parts[::2], (sql.strip().rstrip(";") for sql in parts[1::2]), strict=True))


def ask(directory: Path) -> None:
    """Print a table: how long each question takes, and how much memory."""
    print("| question | time | CPU time | memory |\n|---|---|---|---|")
    for question, sql in questions():
        begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        command = ["/usr/bin/time", "-f", "%M", sys.executable, "-m", "gpubpf", "query", sql, str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took = time.monotonic() - begun
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        memory = int(done.stderr.split()[-1]) / 1e6
        print(f"| {question} | {took:.1f} s | {cpu:.1f} s | {memory:.1f} GB |", flush=True)
        print(done.stdout, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make")
    making.add_argument("directory", type=Path)
    making.add_argument("--machines", type=int, default=100)
    making.add_argument("--launches", type=int, default=10**8)
    making.set_defaults(run=make)
    asking = commands.add_parser("ask")
    asking.add_argument("directory", type=Path)
    asking.set_defaults(run=ask)
    args = vars(parser.parse_args())
    args.pop("run")(**args)


if __name__ == "__main__":
    main()
