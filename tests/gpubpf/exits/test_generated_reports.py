"""Everything that kernelretsnoop prints of generated exits: text that fits a terminal, valid JSON and CSV."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpubpf.exits.exit_log import ExitLog, ExitPrinter
from gpubpf.ptx.values import Site
from gpubpf.session import operation_log
from gpubpf.session.results import ProcessLog, RingRecords
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf_text import COMMS, FILES, KERNELS, check, number, opened, seeds

RECORD = np.dtype(
    [("clock", "<u8"), ("time", "<u8"), ("launch", "<u8"), ("thread", "<u4"), ("sm", "<u2"), ("site", "<u2")]
)
EVERY = ((0, 2**32 - 1),) * 3
LOOKS = ((), ("-v",), ("--json",), ("--csv",), ("-e",), ("-e", "--json"), ("-e", "--csv"), ("-T",))
SHAPES = (((1, 1, 1), (1, 1, 1)), ((2, 1, 1), (33, 1, 1)), ((3, 2, 1), (8, 4, 2)), ((40, 1, 1), (32, 1, 1)))
SUMMARY = {"launches_seen": 3, "launches_matched": 3, "launches_instrumented": 3, "not_instrumented": {}}


def records(rng: random.Random, launch: int, threads: int) -> Any:
    """Return the exits of a launch: all at once, one late, at any time, or only some of them."""
    made = np.zeros(threads, RECORD)
    made["launch"], made["thread"] = launch, np.arange(threads)
    begin = rng.choice((1, 10**9, 10**13))
    how, late = rng.randrange(4), number(rng, rng.choice((1, 10**6, 10**9, 10**13)))
    since = np.zeros(threads, np.uint64)
    if how == 0:
        since[rng.randrange(threads)] = late
    elif how == 1:
        since[:] = [rng.randint(0, late) for _ in range(threads)]
    elif how == 2:
        since[::32] = late
    made["time"] = made["clock"] = np.uint64(begin) + since
    made["sm"] = made["thread"] // 32 % rng.choice((1, 3, 132))
    made["site"] = rng.choice((0, 1, 9, 0xFFFF))
    return made if rng.random() < 0.8 else made[: max(1, threads // 2)]


def process(rng: random.Random, pid: int) -> tuple[ProcessLog, list[RingRecords]]:
    """Return the log of a process with up to three launches, and their exits."""
    comm, (grid, block) = rng.choice(COMMS), rng.choice(SHAPES)
    made = np.zeros(rng.randrange(1, 4), operation_log.DTYPE)
    made["id"], made["kind"] = 1 + np.arange(len(made)), operation_log.KERNEL
    made["kernel"]["grid"], made["kernel"]["block"] = grid, block
    made["kernel"]["slot"] = [rng.randrange(2) for _ in made]
    names = {slot: rng.choice(KERNELS) for slot in range(2)}
    log = ProcessLog(pid, comm, made, 0, True, names, {0: rng.choice((0, 0, 7))}, {}, False, process=pid)
    threads = int(np.prod(grid) * np.prod(block))
    rings = [
        RingRecords(pid, comm, 0, 0, records(rng, launch, threads), {}, process=pid)
        for launch in made["id"].tolist()
        if rng.random() < 0.9
    ]
    return log, rings


@pytest.mark.parametrize("seed", seeds(30))
def test_a_generated_report(seed: int) -> None:
    rng = random.Random(seed)
    parts = [process(rng, pid) for pid in (1, 4194304, *range(2, 12))[: rng.choice((0, 1, 1, 2, 12))]]
    sites = {n: Site(n, "k", 40, rng.choice((None, *FILES)), 17) for n in (0, 1)}
    asked = rng.random() < 0.3
    for look in LOOKS:
        tool, args, page, results = opened("kernelretsnoop", *look)
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
            tool.report(session, log, owners, args, results)
        results.end(*log.summary(session))
        lines = check(page, args, negative=args.each)  # of a process that came later, but exited earlier
        assert lines or args.csv
