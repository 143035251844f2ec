"""Everything that launchlate prints of generated logs: text that fits a terminal, valid JSON and CSV."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import gpubpf_traces
from gpubpf.agent.definitions import Kind
from gpubpf.launches import latency, launch_report
from gpubpf.launches.device_times import MASK
from gpubpf.launches.launches import Launches, LoggedProcess
from gpubpf.launches.overlap import Overlap
from gpubpf.launches.sums import LaunchLosses, LaunchSums
from gpubpf.process.host_frames import HostFrame
from gpubpf.records import operation_log
from gpubpf.show import cli, perfetto
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf_properties import generated, number, rare
from gpubpf_text import COMMS, FILES, KERNELS, PIDS, check, opened

SLOTS, SHARDS = 64, 8
LONGEST = 10**14  # ns, a day
LOOKS = (
    *((), ("-s",), ("-v",), ("--timeline",), ("--slow", "1"), ("--stacks",), ("--csv",), ("-s", "--csv")),
    *(("--json", "-v", "--timeline", "--stacks", "--graphs"), ("--graphs",), ("-T", "-s", "--graphs")),
    *(("--json", "--slow", "1"), ("--slow", "123456", "-s")),
)
OPERATIONS = (
    *3 * (Kind.KERNEL,),
    *(Kind.H2D, Kind.D2H, Kind.D2D, Kind.H2H, Kind.MEMSET, Kind.RECORDED, Kind.WAIT),
    *(Kind.GRAPH, Kind.SYNC, Kind.API),
)
SUMMARY = {"launches_seen": 9, "launches_matched": 9, "launches_instrumented": 9, "lost": 0, "device": "sim"}


class Activity:
    """What launching threads did meanwhile."""

    lost = 0

    def explain(self, tid: int, start_ns: int, end_ns: int) -> list[tuple[str, int]]:
        return [("off-CPU, blocked in futex", max(end_ns - start_ns, 0)), ("page faults", 0)][: tid % 3]


def process(rng: random.Random, pid: int, launches: Launches) -> None:
    """Put up to 20 operations of a process into the log, most of which have times."""
    stack = tuple(
        HostFrame(0x1000, 0, rng.choice(FILES), rng.choice(KERNELS)) for _ in range(rng.randrange(3))
    )
    known = {slot: rng.choice(KERNELS) for slot in range(3)}
    gpus = {0: rng.choice((0, 0, 7))}
    one = LoggedProcess(pid, rng.choice(COMMS), not rare(rng), known, gpus, {1: stack}, number=pid)
    starts, ends = np.zeros(SLOTS, np.uint64), np.zeros(SLOTS * SHARDS, np.uint64)
    now, most = 10**6, rng.choice((1, 1000, 10**6, LONGEST // 100))
    rows: list[Any] = []
    replay = 0

    def put(kind: int, **fields: Any) -> Any:
        row = np.zeros((), operation_log.DTYPE)
        row["id"], row["kind"], row["thread"], row["queue"] = (pid << 40) + len(rows), kind, 70, 1
        for name, value in fields.items():
            if isinstance(value, dict):
                for part, of in value.items():
                    row[name][part] = of
            else:
                row[name] = value
        rows.append(row)
        return row

    for queue, kind in (
        (1, operation_log.BLOCKING),
        (2, operation_log.LEGACY),
        (3, operation_log.PER_THREAD),
    ):
        put(
            operation_log.QUEUE,
            queue=queue,
            queue_kind=kind,
            flags=rng.choice((0, operation_log.FROM_BEFORE)),
        )
    for at in range(2):
        clock = {"host_before": at * 10**6, "gpu": at * 10**6, "host_after": at * 10**6 + 10, "tick_ns": 1}
        put(operation_log.CLOCK, clock=clock)
    for _ in range(rng.randrange(20)):
        kind, call = rng.choice(OPERATIONS), now + rng.randint(0, most)
        ret = call + rng.randint(0, most)
        common = {"queue": rng.choice((1, 1, 2, 3)), "thread": rng.choice((1, 70, 4194304)), "stack": 1}
        fields: dict[str, Any] = {}
        if kind == Kind.KERNEL:
            inside = replay > 0 and rare(rng)
            shape = {"grid": (4, 1, 1), "block": (32, 1, 1)}
            node = {"exec": 5, "replay": replay, "node": 2} if inside else {}
            fields = {"kernel": {"slot": rng.randrange(3), **shape, **node}}
            fields["flags"] = operation_log.GRAPH_NODE if inside else 0
        elif kind in (Kind.RECORDED, Kind.WAIT):
            fields = {"event": {"event": 0x7FFF12345678, "record": rng.randrange(max(len(rows), 1))}}
        elif kind == Kind.GRAPH:
            replay += 1
            fields = {
                "graph": {"exec": 5, "replay": replay, "first": (pid << 40) + len(rows) + 1, "kernels": 1}
            }
        elif kind == Kind.SYNC:
            fields = {"sync": {"what": rng.randrange(4)}}
        elif kind == Kind.API:
            fields = {"api": {"function": 1, "name": rng.choice((b"", b"cuMemAlloc_v2", b"c" * 40))}}
        else:
            fields = {"copy": {"bytes": number(rng)}}
        row = put(kind, call_ns=call, return_ns=ret, stream=rng.choice((0, 2, 2**64 - 1)), **common, **fields)
        start = rng.choice((call, ret, ret + rng.randint(0, most)))
        end = start + rng.randint(0, most)
        if kind == Kind.KERNEL and not rare(rng):
            launch = int(row["id"]) & (1 << 40) - 1
            starts[launch % SLOTS] = np.uint64(~start & MASK)
            if not rare(rng):
                ends[launch % SLOTS] = np.uint64(end & MASK)
        elif not rare(rng):
            error = rng.choice((0, 500, 10**9))
            put(
                operation_log.SPAN,
                span={"of": int(row["id"]), "start": start, "end": end, "error_ns": error},
            )
        now = ret
    launches.log(one, np.array(rows, operation_log.DTYPE))
    launches.reading(one, starts, ends, now + 2 * most, not rare(rng))


@generated(30)
def test_a_generated_report(rng: random.Random, tmp_path: Path) -> None:
    launches = Launches(SLOTS)
    for pid in PIDS[: rng.choice((0, 1, 1, 2, 12))]:
        process(rng, pid, launches)
    columns, asked = launches.columns(), rare(rng)
    for look in LOOKS:
        _, args, page, results = opened("launchlate", *look)
        views = cli.group(launch_report.LaunchViews, args)
        view = latency.LaunchView(columns, Activity() if args.slow else None)  # type: ignore[arg-type]
        by = (("queue",) if args.streams else ()) + (("graph", "node") if args.graphs else ())
        sums, losses = LaunchSums(by, bool(args.graphs)), LaunchLosses()
        new = launches.fresh(columns, True)
        launched = new[columns.wanted[new]]
        owners = OwnerColumns(asked).see(view.owners(launched))
        chosen = latency.slower(view, launched, 1000 * args.slow) if args.slow else launched
        launch_report.show_each(view, new, chosen, launched, owners, views, results)
        sums.add(view, chosen, bool(args.stacks))
        losses.add(view, new)
        launch_report.show_sums(sums, owners, views, results)
        session = SimpleNamespace(summary=lambda: {"not_instrumented": {}, **SUMMARY})
        overlap = Overlap()
        overlap.add(view, new)
        launch_report.show_summary(session, losses.fields(number(rng)), overlap.records(), results)
        # On the real clock, times have errors.
        lines = check(page, args, negative=True)
        assert lines or args.csv
        if not args.json and not args.csv and sums.groups and sums.whole["count"]:
            assert sum(sums.whole[name] for name in latency.SPLIT) >= 0
    trace = perfetto.Trace(str(tmp_path / "trace"))
    latency.write_trace(view, trace, new)
    trace.close()
    made = json.loads((tmp_path / "trace").read_text())
    assert list(gpubpf_traces.problems(made)) == []
