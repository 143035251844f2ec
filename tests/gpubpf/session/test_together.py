"""Maps that the same kernels use are read at one moment: the server may store a new reading of a process at any time."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numpy")
from gpubpf.session import readout


class Lock:
    """Counts how often it is taken. Each time it is given back, the process gets a kernel more."""

    def __init__(self, readings: dict[int, dict[int, list[str]]]) -> None:
        self._lock, self._readings = threading.RLock(), readings
        self.taken = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        for parts in self._readings[1].values():
            parts.append("new")
        self._lock.release()


def measured(monkeypatch: pytest.MonkeyPatch, readings: dict[int, dict[int, list[str]]]) -> Any:
    """A measurement of two contexts. readings: by context and number of the map: its instances."""

    def instances_of(measurement: Any, process: Any, registers: Any, context: int, number: int) -> list[str]:
        return list(readings[context][number])

    monkeypatch.setattr(readout, "_instances_of", instances_of)
    process = SimpleNamespace(
        snapshots={context: context for context in readings},
        registers=SimpleNamespace(of=lambda kernels, until: {}),
        launched_copies=lambda: (),
    )
    return SimpleNamespace(
        numbers={"starts": 0, "ends": 1, "sums": 2},
        registers_until=lambda: 0.0,
        all_processes=lambda: [process],
        lock=Lock(readings),
    )


def test_no_reading_comes_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = measured(
        monkeypatch, {1: {n: ["a", "b"] for n in range(3)}, 2: {n: ["c"] for n in range(3)}}
    )
    for kernels in (["a", "b", "c"], ["a", "b", "new", "c"]):
        assert readout.together(measurement, ["starts", "ends", "sums"]) == [kernels] * 3
    assert measurement.lock.taken == 2
    assert readout.instances(measurement, "ends", separate=True) == ["a", "b", "new", "new", "c"]


def test_a_damaged_reading_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's message gives one map a wrong size, so it has no instance."""
    measurement = measured(monkeypatch, {1: {0: ["a"], 1: ["a"], 2: ["a"]}, 2: {0: ["b"], 1: [], 2: ["b"]}})
    assert readout.together(measurement, ["starts", "ends", "sums"]) == [["a"]] * 3
