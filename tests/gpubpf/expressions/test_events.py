"""What gputrace makes of made-up logs and rings of a session."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpubpf.ebpf.compile import compile_text
from gpubpf.expressions import events, programs, specs
from gpubpf.record import replace
from gpubpf.records import operation_log
from gpubpf.records.results import ProcessLog, RingRecords
from gpubpf.session import readout
from gpubpf_host import needs_bpf

PID = 77
PLACE = np.dtype([("launch", "<u8"), ("time", "<u8"), ("thread", "<u8"), ("site", "<u4"), ("spec", "<u4")])
RECORD = np.dtype([("place", PLACE), ("values", "<u8", (1,))])


def log(launches: range) -> ProcessLog:
    made = np.zeros(len(launches), operation_log.DTYPE)
    made["id"], made["kind"] = list(launches), operation_log.KERNEL
    made["kernel"]["grid"], made["kernel"]["block"] = (1, 1, 1), (32, 1, 1)
    return ProcessLog(PID, "app", made, 0, True, {0: "_Z5scalePf"}, {0: 0}, {}, False)


def ring(launches: range) -> RingRecords:
    records = np.zeros(len(launches), RECORD)
    records["place"]["launch"] = list(launches)
    return RingRecords(PID, "app", 0, 0, records, {})


class Busy:
    """A program that launches a hundred kernels before each reading of its log or its rings."""

    def __init__(self) -> None:
        self.made = self.logged = self.recorded = 0
        self.stopped = False

    def logs(self) -> list[ProcessLog]:
        self.made += 100
        new, self.logged = range(self.logged + 1, self.made + 1), self.made
        return [log(new)]

    def rings(self, name: str) -> list[RingRecords]:
        self.made += 100
        new, self.recorded = range(self.recorded + 1, self.made + 1), self.made
        return [ring(new)]

    def has_map(self, name: str) -> bool:
        return True

    def sites(self, mangled: str, pid: int, build: int) -> Any:
        return {}


def test_events_of_a_program_that_launches_while_the_log_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "MOST_PENDING", 20)
    found, program = events.Events([specs.trace("exit:*")], [()]), Busy()
    told = [event.launch for _ in range(5) for event in found.take(program)]  # type: ignore[arg-type]
    assert found.unknown == 0
    assert told == list(range(1, program.recorded + 1))


def test_records_without_a_launch_are_counted_in_the_end() -> None:
    found = events.Events([specs.trace("exit:*")], [()])
    stopped = SimpleNamespace(
        logs=list, rings=lambda name: [ring(range(1, 4))], has_map=lambda name: True, stopped=True
    )
    assert not found.take(stopped) and found.unknown == 3  # type: ignore[arg-type]


def test_launches_whose_gpu_is_not_known_when_the_measurement_ends() -> None:
    """An interrupted tool may get the log before it is told which GPU a context belongs to."""
    first = replace(log(range(1, 4)), gpus={})
    logs = [first]
    found, session = (
        events.Events([specs.trace("kernel:*")], [()]),
        SimpleNamespace(logs=lambda: logs, has_map=lambda name: False, stopped=False),
    )
    assert not found.take(session)  # type: ignore[arg-type]
    logs[0] = replace(first, records=first.records[:0], final=True)
    assert [event.launch for event in found.take(session)] == [1, 2, 3]  # type: ignore[arg-type]


@pytest.mark.parametrize("ended", [False, True])
def test_logs_are_final_once_everything_was_read(ended: bool) -> None:
    empty = log(range(0)).records
    process = SimpleNamespace(
        pid=PID,
        comm="app",
        number=1,
        vendor="nvidia",
        virtual=True,
        no_more_data=False,
        disconnected=False,
        log_lost=0,
        read_log=lambda last: empty,
        names={},
        contexts={},
        stacks={},
        ranges={},
        waves={},
        user=0,
        from_before=False,
    )
    follow = SimpleNamespace(log_records=1 << 17)
    measurement = SimpleNamespace(
        active=lambda: [process], stopped=True, read=ended, follow=follow, drain_soon=False
    )
    (one,) = readout.logs(measurement)  # type: ignore[arg-type]
    assert (one.over, one.final) == (False, ended)


@needs_bpf
def test_a_record_holds_the_number_of_any_thread(repository: Path) -> None:
    """A grid may have more than 2^32 threads."""
    program = runpy.run_path(str(repository / "tools/gputrace.py"))["PROGRAM"]
    made = compile_text(programs.tracing(program, [specs.trace('load:* "%lu", gthread')], 16, False))
    assert made.maps["events"].value_dtype["place"] == PLACE
