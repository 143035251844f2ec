"""What the exporter makes of the counts of a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("numpy")
from gpubpf.exporter import gpu_time
from gpubpf.exporter.gpu_time import Measured
from gpubpf.exporter.pods import Place
from gpubpf.exporter.watch import Watch
from gpubpf.records.results import KernelCount, ProcessCounts

SCALE, HOSTILE = "_Z5scalePf", 'k"}\n# HELP x\x1b[31m<script>{pod="a"'
Labels = tuple[str, ...]


class Session:
    """A session whose counts are given. counts: by number of the process: comm, kernels, and whether the process is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[int, ProcessCounts] = {}
        self.measured: dict[tuple[int, str], Measured] = {}
        self.lacking: dict[str, int] = {}
        self.budget: dict[str, Any] | None = None
        self.forgotten: list[int] = []
        monkeypatch.setattr(gpu_time, "measured", lambda *maps: self.measured)

    def process(
        self,
        number: int,
        kernels: Mapping[str, tuple[int, int, dict[str, int]]],
        over: bool = False,
        lost: int = 0,
    ) -> None:
        made = [KernelCount(name, seen, True, n, why) for name, (seen, n, why) in kernels.items()]
        self.counts[number] = ProcessCounts(number, 100 + number, "app", over, made, lost, 1000 * number)

    def processes(self) -> dict[int, tuple[int, str]]:
        return {number: (one.pid, one.comm) for number, one in self.counts.items()}

    def by_process(self) -> list[ProcessCounts]:
        return list(self.counts.values())

    def instances_together(self, *names: str) -> list[list[Any]]:
        assert names == gpu_time.MAPS
        return [[] for _ in names]

    def forget(self, numbers: set[int]) -> None:
        self.forgotten += sorted(numbers)
        for number in numbers:
            del self.counts[number]

    def missed(self) -> dict[str, int]:
        return self.lacking

    def overhead(self) -> dict[str, Any] | None:
        return self.budget


def values(watch: Watch, name: str) -> dict[Labels, float]:
    """The samples of a metric that are not 0, by labels."""
    (family,) = [family for family in watch.latest() if family.name == f"gpubpf_{name}"]
    return {labels: value for labels, value in family.samples if value}


def place(pid: int) -> Place:
    return Place("team", f"pod-{pid}", "main")


OWNER = ("app", "team", "pod-101", "main")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    return Session(monkeypatch)


def test_counts_grow_by_what_is_new(session: Any) -> None:
    watch = Watch(5, place=place)
    session.process(1, {SCALE: (10, 4, {"sampled out": 6})})
    session.measured = {(1, SCALE): Measured(4, 4000, 32)}
    watch.update(session)
    watch.update(session)
    assert values(watch, "kernel_launches") == {("scale", *OWNER): 10}
    session.process(1, {SCALE: (25, 5, {"sampled out": 19, "before ready": 1})})
    session.measured = {(1, SCALE): Measured(5, 6000, 32)}
    watch.update(session)
    assert values(watch, "kernel_launches") == {("scale", *OWNER): 25}
    assert values(watch, "kernel_measured_launches") == {("scale", *OWNER): 5}
    assert values(watch, "kernel_measured_seconds") == {("scale", *OWNER): pytest.approx(6e-6)}
    assert values(watch, "launches_not_measured") == {("sampled out",): 19, ("before ready",): 1}
    assert values(watch, "process_launches") == {OWNER: 25}
    assert values(watch, "hook_seconds") == {(): 1e-6}


def test_a_reading_with_less_changes_nothing(session: Any) -> None:
    """While a launch moves to the sum, a reading may miss it."""
    watch = Watch(5, place=place)
    for launches, ns, expected in ((4, 4000, 4), (3, 3000, 4), (4, 4000, 4), (6, 6500, 6)):
        session.process(1, {SCALE: (10, 10, {})})
        session.measured = {(1, SCALE): Measured(launches, ns, 1)}
        watch.update(session)
        assert values(watch, "kernel_measured_launches") == {("scale", *OWNER): expected}
    assert values(watch, "kernel_measured_seconds") == {("scale", *OWNER): pytest.approx(6.5e-6)}


def test_processes_that_end_are_counted_once_and_forgotten(session: Any) -> None:
    watch = Watch(5, place=lambda pid: Place())
    owner = ("app", "", "", "")
    for number in range(1, 200):
        session.process(number, {SCALE: (10, 10, {})})
        watch.see(session)
        session.process(number, {SCALE: (12, 12, {})}, over=True, lost=2)
        watch.update(session)
        assert watch._known == {}
    assert session.forgotten == [*range(1, 200)]
    assert values(watch, "kernel_launches") == {("scale", *owner): 12 * 199}
    assert values(watch, "launches_lost") == {(): 2 * 199}
    assert values(watch, "processes") == {}


def test_names_and_reasons_of_hostile_programs(session: Any) -> None:
    watch = Watch(5, place=lambda pid: Place("", HOSTILE, "c" * 1000))
    session.process(1, {HOSTILE: (3, 0, {HOSTILE: 3}), "": (2, 0, {})})
    session.lacking = {"forbidden": 2}
    watch.update(session)
    ((kernel, comm, _, pod, container), n), *_ = values(watch, "kernel_launches").items()
    assert n == 3 and comm == "app" and len(container) == 120
    assert all(text.isprintable() for text in (kernel, pod))
    assert {labels[0] for labels in values(watch, "kernel_launches")} >= {"(unknown)"}
    ((reason,),) = values(watch, "launches_not_measured")
    assert reason.isprintable()
    assert values(watch, "processes_missed") == {("forbidden",): 2}


def test_any_number_of_reasons_and_kernels(session: Any) -> None:
    watch = Watch(5, place=place)
    kernels = {f"k{n}": (n + 1, 0, {f"variable v{n}": n + 1}) for n in range(500)}
    session.process(1, kernels)
    for _ in range(3):
        watch.update(session)
    total = sum(range(1, 501))
    for name, most in (("kernel_launches", 11), ("launches_not_measured", 61), ("process_launches", 11)):
        found = values(watch, name)
        assert len(found) <= most and sum(found.values()) == total


def test_the_budget_and_what_exceeds_it(session: Any) -> None:
    kernel = {"overhead_percent": 0.4, "host_percent": 0.2, "held": True}
    session.budget = {"kernels": [kernel, kernel | {"overhead_percent": 90.0, "held": False}]}
    watch = Watch(5, 1.0, place)
    assert not [family for family in watch.latest() if family.name == "gpubpf_overhead_ratio"]
    watch.update(session)
    assert values(watch, "budget_ratio") == {(): 0.01}
    assert values(watch, "overhead_ratio") == {(): pytest.approx(0.902)}
    assert values(watch, "kernels_over_budget") == {(): 1}


def test_the_clock_error_needs_enough_times(session: Any) -> None:
    watch = Watch(5, place=place)
    for launches, step, expected in ((3, 96, {}), (20, 64, {(): 32e-9})):
        session.process(1, {SCALE: (launches, launches, {})})
        session.measured = {(1, SCALE): Measured(launches, 1000 * launches, step)}
        watch.update(session)
        assert values(watch, "clock_error_seconds") == pytest.approx(expected)
