"""gpucount, gpudist and gputrace on programs of examples/, whose first comments say what they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gpubpf_examples
import gpubpf_specs

pytestmark = gpubpf_specs.needs_all


def records(tool: str, out: Path, arguments: list[str], program: str, *words: str) -> list[dict]:
    path = gpubpf_examples.build(program) / program
    done = gpubpf_specs.run(tool, *arguments, "--json", "-o", out, "--", path, *words)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [f"{program}: PASSED"]), done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("program", "words", "answers"),
    [
        (
            *("vectoradd", ["19", "5", "2", "3"]),
            {"kernel:*": {"vectorAdd": (3, 30)}, "store:*:global (lane == 4)": {"vectorAdd": (9, 9)}},
        ),
        (
            *("divergence", []),
            {
                "load:*": {"laneHog": (3200, 15600), "even": (400, 12800)},
                "load:* (popcount(active) < 16)": {"laneHog": (2800, 2800), "even": (0, 0)},
            },
        ),
        (
            *("histogram", []),
            {
                "barrier:*": {"histogram": (64, 2048)},
                "exit:*:atomics (work > 10)": {"histogram": (13, 400)},
                "atomic:*:global": {"histogram": (16, 512)},
            },
        ),
    ],
)
def test_counts(program: str, words: list[str], answers: dict, tmp_path: Path) -> None:
    found: dict = {}
    for one in records("gpucount", tmp_path / "out", list(answers), program, *words):
        if one["type"] == "count":
            found.setdefault(one["spec"], {})[one["kernel"]] = (one["count"], one["threads"])
    assert found == answers


def test_loads_of_a_triangle(tmp_path: Path) -> None:
    """Of 256 threads, thread t adds up t + 1 elements; in the other kernel, all add up 257."""
    spec = "exit:*:loads:u64:work, kernel"
    found = {
        one["key"]: one
        for one in records("gpudist", tmp_path / "out", ["-L", "--width", "64", spec], "imbalance")
        if one["type"] == "dist"
    }
    slots = [[0, 63, 63], [64, 127, 64], [128, 191, 64], [192, 255, 64], [256, 319, 1]]
    assert (found["triangular"]["buckets"], found["triangular"]["sum"]) == (slots, 256 * 257 // 2)
    assert found["balanced"]["buckets"] == [[256, 319, 256]]


def test_late_lanes(tmp_path: Path) -> None:
    """Lane 31 leaves 500 cycles after the others, on the virtual clock 500 ns and what its loop takes."""
    spec = 'exit:lateLane (block == 0 && lane >= 30) "%u %lu", lane, globaltimer'
    events = [
        one
        for one in records("gputrace", tmp_path / "out", [spec], "exits", "500", "1")
        if one["type"] == "event"
    ]
    times: dict = {30: set(), 31: set()}
    for one in events:
        times[one["args"][0]].add(one["args"][1])
    assert len(events) == 8 and {len(some) for some in times.values()} == {1}
    assert 500 <= times[31].pop() - times[30].pop() < 520
