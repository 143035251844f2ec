"""The text that hipsnoop and cudasnoop print."""

from __future__ import annotations

from typing import Any

import pytest

from gpubpf.calls import delay_text, delays, statistics_text, summary_text
from gpubpf.calls.snoop_options import CallViews, SnoopOptions
from gpubpf.calls.statistics import CallStatistics, Durations
from gpubpf.names import demangle
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.show.parsed import Options, ThreadOptions


@pytest.mark.parametrize("several", [False, True])
def test_names_with_escapes_and_long_ones_keep_tables_straight(several: bool) -> None:
    names = ("plain", "\033[31m\a\nred", "k" * 500, "ü\ttab")
    rows = [CallStatistics(7, "a\033[0m\b", name, times=Durations(3, 3000, 2000)) for name in names]
    lines = list(statistics_text.kernel_table(rows, OwnerColumns(several)))[1:]
    assert "\\x1b[31m\\x07\\nred" in lines[2] and "\033" not in "".join(lines)
    assert len(set(map(len, lines))) == 1 and len(lines[0]) <= 80


def test_the_table_of_kernels_tells_those_that_share_a_name_apart() -> None:
    found = [demangle(f"_Z4gemmILi{n}EfEvPT0_{'i' * 60}") for n in (64, 128)]
    rows = [CallStatistics(7, "app", name.short, name, times=Durations(3, 3000, 2000)) for name in found]
    lines = list(statistics_text.kernel_table(rows, OwnerColumns()))[2:]
    assert [line.split("  ")[0] for line in lines] == ["gemm<64, float>", "gemm<128, float>"]


def summary(**changed: Any) -> dict[str, Any]:
    none = dict.fromkeys(("records", "sums", "calls", "missed"), 0)
    fields = ("calls", "lost", "processes", "abandoned", "lost_why", "lost_names", "lost_processes", "missed")
    return dict.fromkeys(fields, 0) | {"lost_by": none, "libraries": []} | changed


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ["counted nothing: no calls seen"]),
        ({"processes": 1}, ["counted nothing: no call of 1 process matched"]),
        ({"processes": 1, "abandoned": 1}, ["counted nothing; 1 call did not return"]),
        ({"calls": 1, "processes": 2}, ["counted 1 call of 2 processes; none lost"]),
        (
            {"calls": 9, "processes": 1, "abandoned": 2},
            ["counted 9 calls of 1 process; 2 calls did not return; none lost"],
        ),
        (
            {"calls": 9, "lost": 4, "lost_by": {"records": 3, "sums": 1, "calls": 0, "missed": 0}},
            [
                "counted 9 calls of 0 processes",
                "lost: the records of 3 calls, because the ring was full",
                "lost: 1 call, because a map was full",
            ],
        ),
        (
            {
                "calls": 9,
                "lost": 2,
                "lost_by": {"records": 0, "sums": 0, "calls": 0, "missed": 2},
                "missed": {"call_entry.call_return": 2, "delay_switch": 1},
            },
            [
                "counted 9 calls of 0 processes",
                "lost: runs that the kernel skipped, because the CPU was already in an eBPF",
                "  program: 2 runs of call_entry.call_return, 1 run of delay_switch",
            ],
        ),
        (
            {
                "calls": 9,
                "libraries": [{"path": "/x/lib.so"}, {"path": "/y/lib.so", "late": {"pid": 7, "comm": "a"}}],
            },
            [
                "counted 9 calls of 0 processes",
                "not counted: the first milliseconds of calls to /y/lib.so by a (pid 7), before",
                "  it had probes",
            ],
        ),
    ],
)
def test_what_was_counted_and_lost(changed: dict[str, Any], expected: list[str]) -> None:
    assert list(summary_text.coverage_lines(summary(**changed))) == expected


def test_filters_that_no_call_matched_are_named() -> None:
    threads = ThreadOptions(tid=1, comm="app")
    calls = CallViews(api=["cuM*", "*Free"], errors=True)
    given = SnoopOptions(Options(threads=threads), calls).filters
    (line,) = summary_text.coverage_lines(summary(), given)
    assert line == "counted nothing: no call matched -t 1 --comm app --api cuM* --api *Free --errors"
    assert threads.host_filters == "-t 1 --comm app"
    assert ThreadOptions().host_filters == ""


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (delays.Cause(delays.FAULTS, "page faults", 1, 0, 0), "1 page fault"),
        (delays.Cause(delays.FAULTS, "page faults", 1200, 0, 0, "hipFree"), "1,200 page faults in hipFree"),
        (
            delays.Cause(delays.PREEMPTED, "preempted", 1, 686_000, 9, "hipFree"),
            "preempted 686 us in hipFree",
        ),
        (
            delays.Cause(delays.BLOCKED, "blocked in futex", 2, 686_000, 9),
            "blocked in futex 686 us (2 times)",
        ),
    ],
)
def test_a_cause_in_a_sentence(cause: delays.Cause, expected: str) -> None:
    assert delay_text.cause_text(cause) == expected


def test_a_slow_call_has_one_unit() -> None:
    record = {"ts_ns": 2_000_000, "lat_ns": 10_500_000_000, "comm": "app", "pid": 7, "tid": 8}
    first, second, _ = delay_text.slow_call_lines(record, "hipFree", (), 1_000_000, False)
    assert first == "T+0.001000 s  hipFree: 10.5 s" and second == "  thread 8 of app: 10.5 s on the CPU"
    text = "hipMemcpyAsync 1,048,576 B h2d, stream 0x55e7ecd9d390 = hipErrorInvalidValue"
    lines = list(delay_text.slow_call_lines(record, text, (), 1_000_000, False))
    assert lines[:2] == [f"T+0.001000 s  {text.rpartition(' ')[0]}", "  hipErrorInvalidValue: 10.5 s"]
