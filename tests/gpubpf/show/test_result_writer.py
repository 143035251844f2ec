"""The parts of the output that all tools share: timestamps, the header of CSV, the summary."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from gpubpf.show import cli
from gpubpf.show.parsed import OutputOptions

SUMMARY = {
    "launches_seen": 3,
    "launches_matched": 3,
    "launches_instrumented": 3,
    "not_instrumented": {},
    "lost": 0,
}


def results(path: Path, **options: bool) -> cli.ResultWriter:
    return cli.ResultWriter(OutputOptions("tool", **options), cli.Output(str(path)))


def shown(path: Path, **options: bool) -> str:
    """Two intervals with a row each, and the summary."""
    made = results(path, **options)
    for number in (1, 2):
        made.begin()
        if made.json:
            made.out.record(**({"type": "row", "n": number} | made.stamp))
        elif made.csv:
            made.table(
                ("n", "x", "y", "name"), [(number, (3, 4), "a,b")] if number == 1 else [(2, (3, 4), None)]
            )
        else:
            made.out.line(f"row {number}")
    made.end(SUMMARY | {"more": 5})
    return path.read_text()


def test_csv_has_one_header_and_no_summary(tmp_path: Path) -> None:
    assert shown(tmp_path / "out", csv=True) == 'n,x,y,name\n1,3,4,"a,b"\n2,3,4,\n'


def test_text_ends_with_the_summary(tmp_path: Path) -> None:
    assert shown(tmp_path / "out") == "row 1\nrow 2\ncounted 3 of 3 matching launches (3 in total)\n"
    made = results(tmp_path / "own")
    made.end(SUMMARY, ["lines of its own"])
    assert (tmp_path / "own").read_text() == "lines of its own\n"


def test_the_last_record_is_the_summary(tmp_path: Path) -> None:
    records = [json.loads(line) for line in shown(tmp_path / "out", json=True).splitlines()]
    assert records[:2] == [{"type": "row", "n": 1}, {"type": "row", "n": 2}]
    assert list(records[2])[:2] == ["type", "tool"]
    assert records[2] == {"type": "summary", "tool": "tool", "more": 5} | SUMMARY


@pytest.mark.parametrize("form", ["text", "json", "csv"])
def test_timestamps(tmp_path: Path, form: str) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    text = shown(tmp_path / "out", timestamps=True, **({} if form == "text" else {form: True}))
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    if form == "text":
        assert re.fullmatch(r"\d\d:\d\d:\d\d\nrow 1\n\d\d:\d\d:\d\d\nrow 2\ncounted .*\n", text)
        return
    if form == "json":
        records = [json.loads(line) for line in text.splitlines()]
        times = [record["ts_ns"] for record in records[:2]]
        assert "ts_ns" not in records[2]
    else:
        header, *rows = text.splitlines()
        assert header == "ts_ns,n,x,y,name"
        times = [int(row.split(",")[0]) for row in rows]
    assert before <= times[0] <= times[1] <= after
