"""Everything that kernelretsnoop prints of generated exits: text that fits a terminal, valid JSON and CSV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gpubpf.exits import exit_report
from gpubpf.exits.exit_log import ExitLog, ExitPrinter
from gpubpf.inject.values import Site
from gpubpf.records import operation_log
from gpubpf.records.results import ProcessLog, RingRecords
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.show.parsed import ThreadOptions
from gpubpf_properties import generated, lanes, seldom
from gpubpf_text import COMMS, FILES, KERNELS, PIDS, check, opened

RECORD = np.dtype(
    [("clock", "<u8"), ("time", "<u8"), ("launch", "<u8"), ("thread", "<u4"), ("sm", "<u2"), ("site", "<u2")]
)
EVERY = ((0, 2**32 - 1),) * 3
LOOKS = ((), ("-v",), ("--json",), ("--csv",), ("-e",), ("-e", "--json"), ("-e", "--csv"), ("-T",))
SHAPES = (((1, 1, 1), (1, 1, 1)), ((2, 1, 1), (33, 1, 1)), ((3, 2, 1), (8, 4, 2)), ((40, 1, 1), (32, 1, 1)))
SUMMARY = {"launches_seen": 3, "launches_matched": 3, "launches_instrumented": 3, "not_instrumented": {}}


@st.composite
def records(draw: st.DrawFn, launch: int, threads: int) -> Any:
    """Return the exits of a launch, or only of half of its threads."""
    made = np.zeros(threads, RECORD)
    made["launch"], made["thread"] = launch, np.arange(threads)
    latest = draw(st.sampled_from((1, 10**6, 10**9, 10**13)))
    begin = np.uint64(draw(st.sampled_from((1, 10**9, 10**13))))
    made["time"] = made["clock"] = begin + draw(lanes(threads, latest))
    made["sm"] = made["thread"] // 32 % draw(st.sampled_from((1, 3, 132)))
    made["site"] = draw(st.sampled_from((0, 1, 9, 0xFFFF)))
    return made[: max(1, threads // 2)] if draw(seldom) else made


@st.composite
def process(draw: st.DrawFn, pid: int) -> tuple[ProcessLog, list[RingRecords]]:
    """Return the log of a process with up to three launches, and their exits."""
    comm, (grid, block) = draw(st.sampled_from(COMMS)), draw(st.sampled_from(SHAPES))
    made = np.zeros(draw(st.integers(1, 3)), operation_log.DTYPE)
    made["id"], made["kind"] = 1 + np.arange(len(made)), operation_log.KERNEL
    made["kernel"]["grid"], made["kernel"]["block"] = grid, block
    made["kernel"]["slot"] = [draw(st.integers(0, 1)) for _ in made]
    names = {slot: draw(st.sampled_from(KERNELS)) for slot in range(2)}
    gpus = {0: draw(st.sampled_from((0, 7)))}
    log = ProcessLog(pid, comm, made, 0, True, names, gpus, {}, False, process=pid)
    threads = int(np.prod(grid) * np.prod(block))
    rings = [
        RingRecords(pid, comm, 0, 0, draw(records(launch, threads)), {}, process=pid)
        for launch in made["id"].tolist()
        if not draw(seldom)
    ]
    return log, rings


PROCESSES = st.sampled_from((0, 1, 1, 2, 12)).flatmap(lambda n: st.tuples(*map(process, PIDS[:n])))
SITES = st.tuples(*(st.sampled_from((None, *FILES)) for _ in range(2)))


@generated(12, parts=PROCESSES, files=SITES, asked=seldom)
def test_a_generated_report(parts: Any, files: tuple[str | None, ...], asked: bool) -> None:
    sites = {n: Site(n, "k", 40, file, 17) for n, file in enumerate(files)}
    for look in LOOKS:
        _, args, page, results = opened("kernelretsnoop", *look)
        owners = OwnerColumns(asked)
        printer = ExitPrinter(page, results.form, owners) if args.each else None
        log = ExitLog(True, EVERY, EVERY, False, printer, owners)
        session: Any = SimpleNamespace(
            logs=lambda: [log for log, _ in parts],
            rings=lambda name: [ring for _, rings in parts for ring in rings],
            stopped=True,
            sites=lambda mangled, pid: sites,
            ring_counts=lambda name: [],
            summary=lambda: {"lost": 0, "device": "sim", "duration_ns": 1, **SUMMARY},
        )
        log.take(session)
        if not args.each:
            exit_report.show(session, log, owners, ThreadOptions(), results)
        results.end(*log.summary(session))
        lines = check(page, args, negative=args.each)  # of a process that came later, but exited earlier
        assert lines or args.csv
