"""Everything that hipsnoop and cudasnoop print of generated calls: text that fits a terminal, valid JSON and CSV."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpubpf_traces
from gpubpf import names
from gpubpf.calls import arrays, delays
from gpubpf.calls.api import cuda, hip
from gpubpf.calls.report import CallReport, VendorInterfaces, without_views_that_csv_lacks
from gpubpf.calls.snoop_options import SnoopOptions
from gpubpf.calls.statistics import NameOrAddress, sums_of_events
from gpubpf_properties import generated, number, rare
from gpubpf_text import COMMS, KERNELS, PIDS, check, opened

SPENT = ("preempted_ns", "blocked_ns", "io_ns", "fault_ns", "reclaim_ns")
EVENT = np.dtype(
    [
        *((name, "<u8") for name in ("start_ns", "end_ns", "result", "out", "kernel", "gap_ns", "gap_off_ns")),
        ("spent", [*((name, "<u8") for name in SPENT), ("faults", "<u4"), ("switches", "<u4")]),
        ("cgroup", "<u8"), ("arguments", "<u8", 6), ("stack", "<u8", 4), ("memory", "<u8", 10),
        *((name, "<u4") for name in ("tgid", "tid", "function")),
        *((name, "u1") for name in ("failed", "launch", "after", "zero")), ("comm", "i1", 16),
    ]
)  # fmt: skip
SUM = np.dtype(
    [
        ("tgid", "<u4"), ("function", "<u4"), ("kernel", "<u8"),
        *((name, "<u8") for name in ("count", "errors", "ns", "largest_ns", "off_ns")),
        *((name, "<u8") for name in ("gaps", "gap_ns", "gap_largest_ns", "gap_off_ns", "error")),
        ("latency", "<u4", arrays.BUCKETS), ("gap", "<u4", arrays.BUCKETS),
    ]
)  # fmt: skip
SPAN = [
    ("start_ns", "<u8"), ("end_ns", "<u8"), ("inode", "<u8"),
    *((name, "<u4") for name in ("tgid", "tid", "function", "reason")), ("syscall", "<i4"),
]  # fmt: skip
LOOKS = (
    *((), ("-v",), ("--csv",), ("-e",), ("-e", "-v"), ("-e", "--csv"), ("--why",), ("--slow", "1")),
    *(("--timeline",), ("-T", "-e"), ("-T", "--why"), ("--errors",), ("--launch", "2:9")),
    *(("--json", "-e"), ("--json", "--why"), ("--json", "--timeline"), ("--json", "--slow", "1")),
)
LONGEST = 10**14  # ns, a day


def name_of(pid: int, handle: int) -> NameOrAddress:
    name = (*KERNELS, None)[handle % (len(KERNELS) + 1)]
    return names.demangle(name) if name and handle % 2 else name


def calls(rng: random.Random, api: Any, pids: list[int], count: int) -> Any:
    """Return events with common and extreme values; no call is off the CPU longer than it takes."""
    made = np.zeros(count, EVENT)
    comms = {pid: rng.choice(COMMS).encode("utf-8", "surrogateescape")[:15] for pid in pids}
    few = [rng.randrange(len(api.functions)) for _ in range(rng.choice((1, 3, 40)))]
    most, now = rng.choice((1, 1000, 10**6, LONGEST // 100)), 10**9
    for row in made:
        row["function"], row["tgid"] = rng.choice(few), rng.choice(pids)
        row["tid"] = rng.choice((int(row["tgid"]), 4194303))
        length = rng.randint(0, most)
        row["start_ns"], now = now, now + length
        row["end_ns"] = now
        row["spent"][rng.choice(SPENT)] = rng.choice((0, length, length // 2))
        row["spent"]["faults"] = rng.choice((0, 1, 10**6))
        row["failed"] = rare(rng)
        row["result"] = rng.choice((1, 2, 700, 2**32 - 3)) if row["failed"] else 0
        for part in ("out", "cgroup"):
            row[part] = number(rng)
        launch = api.functions[int(row["function"])].group == "launch"
        row["launch"] = launch
        row["kernel"] = rng.randrange(1, 100) if launch else 0
        row["after"], row["gap_ns"] = launch, rng.randint(0, most)
        row["gap_off_ns"] = rng.randint(0, int(row["gap_ns"]))
        for part in ("arguments", "stack", "memory"):
            row[part] = [rng.choice((0, 1, 2, 64, 2**32 + 7, 2**63 + 5)) for _ in row[part]]
        row["comm"] = np.frombuffer(comms[int(row["tgid"])].ljust(16, b"\0"), "i1")
    return made


def delay_rows(rng: random.Random, events: Any) -> Any:
    made = np.zeros(len(events), delays.ROW)
    made["tgid"], made["tid"] = events["tgid"], events["tid"]
    for row, event in zip(made, events, strict=True):
        row["function"] = rng.choice((int(event["function"]), arrays.GAP))
        row["reason"], row["syscall"] = rng.randrange(8), rng.choice((delays.OUTSIDE, delays.UNKNOWN, 0, 202))
        row["count"] = rng.choice((0, 1, 10**6))
        row["ns"] = int(event["end_ns"]) - int(event["start_ns"])
        row["largest_ns"] = rng.randint(0, int(row["ns"]))
    return made


def spans(rng: random.Random, events: Any) -> Any:
    made = np.zeros(len(events), SPAN)
    for field in ("start_ns", "end_ns", "tgid", "tid", "function"):
        made[field] = events[field]
    made["reason"] = [rng.randrange(8) for _ in made]
    made["syscall"] = [rng.choice((delays.OUTSIDE, 0, 202)) for _ in made]
    return made


@generated(30)
def test_a_generated_report(rng: random.Random, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool, api = rng.choice((("hipsnoop", hip()), ("cudasnoop", cuda())))
    pids = [*PIDS][: rng.choice((1, 1, 2, 12))]
    events = calls(rng, api, pids, rng.choice((0, 1, 5, 60)))
    comms = {
        int(row["tgid"]): row["comm"].tobytes().partition(b"\0")[0].decode("utf-8", "replace")
        for row in events
    }
    sums, rows, off = sums_of_events(events, SUM), delay_rows(rng, events), spans(rng, events)
    lost = {"records": number(rng), "sums": number(rng), "calls": 0} if rare(rng) else {}
    path = rng.choice(("/usr/lib/libcuda.so.1", "/" + "long/" * 30 + "libamdhip64.so", "/\x1b[31m.so"))
    for look in LOOKS:
        trace = tmp_path / "trace.json"
        options = (*look, "--trace", str(trace)) if look == ("-v",) else look
        _, args, page, _ = opened(tool, *options)
        options = without_views_that_csv_lacks(SnoopOptions.of(args), lambda text: None)
        inputs: Any = SimpleNamespace(
            api=api,
            vendor=VendorInterfaces(),
            calls=SimpleNamespace(
                api=api,
                seen=comms,
                events=lambda: events,
                sums=lambda: sums,
                launched=set,
                announced=lambda pid: None,
                may_trace=lambda pid: pid % 2 == 0,
                options=SimpleNamespace(events=True),
                lost_late=0,
                counts=SimpleNamespace(processes=number(rng), nested=0, abandoned=rng.choice((0, 7))),
                lost_by={"records": 0, "sums": 0, "calls": 0} | lost,
                missed=rng.choice(({}, {"call_entry": 10**9, "delay_switch": 1})),
                incomplete=rng.choice((False, True)),
                placed=[
                    SimpleNamespace(path=path, functions=[1], refused={}, late=rng.choice((None, *pids)))
                ],
                host=SimpleNamespace(
                    runs=lambda: [SimpleNamespace(function="call_entry", runs=9, mean_ns=1.5)]
                ),
            ),
            delay_probes=SimpleNamespace(
                tick=lambda: None,
                spans=lambda: off,
                delays=lambda: (rows, rows[:0]),
                lost=number(rng),
            ),
            kernels=SimpleNamespace(
                name=name_of, read=lambda host: None, look=lambda pid: None, lost=lambda host: 0
            ),
            processes=SimpleNamespace(
                everyone=False,
                pids=[],
                started_ns=0,
                ended_ns=9,
                stopped=True,
                unread=False,
                terminated=False,
            ),
        )
        report = CallReport(inputs, options, page)
        report._output.origin_ns = 10**9
        report.begin()
        report.tick()
        report.show()
        report.end()
        # Numbers and errors in the line of a call are not cut, and paths are not, either. An error may be -3.
        check(page, args, negative=True, wide="" if args.each else "/long/")
        if args.trace:
            assert list(gpubpf_traces.problems(json.loads(trace.read_text()))) == []
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert "no traced process has loaded" not in said or not (comms or inputs.calls.incomplete), said
