"""The rates that --budget chooses, and what it reports."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpubpf.agent.protocol import Counters, HookCalls
from gpubpf.ebpf.maps import SPENT, SPENT_SHAPE
from gpubpf.ebpf.sampling import PARAMETER, Sampling
from gpubpf.inject.cost import COST
from gpubpf.program import BPF
from gpubpf.session import budget, readout
from gpubpf.session.budget import NEVER, SAMPLED_OUT, Budget, one_in
from gpubpf.show.parsed import KernelOptions
from gpubpf.show.summary_text import _budget_lines
from gpubpf.tools import threadhist

SECOND = 10**9
KERNEL = "_Z4workPi"


class Process:
    """A process of which the agent's counters are given; `rates` are those written for its kernels."""

    comm, virtual, disconnected_at = "app", False, 0.0

    def __init__(self, number: int = 1) -> None:
        self.number, self.pid = number, 6 + number
        self.label = f"pid {self.pid} (app)"
        self.names = {0: KERNEL, 1: "_Z5otherv"}
        self.other = Counters()
        self.counted = Counters(seen=1, instrumented=1)
        self.calls = HookCalls()
        self.rates: dict[int, int] = {}

    def counters(self) -> tuple[list[Counters], int]:
        return [self.counted, self.other], 0

    def hook_calls(self) -> HookCalls:
        return self.calls

    def virtual_times(self) -> tuple[int, int]:
        return 0, 0

    def set_one_in(self, slot: int, rate: int) -> None:
        self.rates[slot] = rate


class Scene:
    """A measurement of one process, or several. `clock` is the time in ns; `spent` what readings find."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, percent: float) -> None:
        self.process, self.clock, self.readings = Process(), 0, 0
        self.processes = [self.process]
        self.spent: dict[tuple[int, str], tuple[int, float]] = {}
        self.said: list[str] = []
        self.took = 0
        self.answered: int | None = (
            None  # time after which the last process answers, in ns; None: at the end of a reading
        )
        self.measurement: Any = SimpleNamespace(
            all_processes=lambda: list(self.processes),
            stopped=False,
            note=self.said.append,
        )
        monkeypatch.setattr(readout, "spent", lambda measurement: self.spent)
        monkeypatch.setattr(budget.time, "monotonic", lambda: self.clock / SECOND)
        monkeypatch.setattr(budget.time, "monotonic_ns", lambda: self.clock)
        self.budget = Budget(percent)

    def read(self) -> int | None:
        self.readings += 1
        began = self.clock
        self.clock += self.took
        for process in self.processes:
            measured = process.counted.instrumented
            self.spent[process.number, KERNEL] = 1000 * measured, 700 * measured
        return None if self.answered is None else began + self.answered

    def tick(self, seconds: float) -> int:
        """Let this time pass, then tick. Return how many readings were made so far."""
        self.clock += int(seconds * SECOND)
        self.budget.tick(self.measurement, self.read)
        return self.readings

    def start(self) -> Process:
        self.processes.append(Process(len(self.processes) + 1))
        return self.processes[-1]

    def end(self, process: Process) -> None:
        process.disconnected_at = self.clock / SECOND

    def counted(self, measured: int, launches: int) -> None:
        reasons = {SAMPLED_OUT: launches - measured}
        self.process.counted = Counters(seen=launches, instrumented=measured, reasons=reasons)

    @property
    def record(self) -> dict[str, Any]:
        (found,) = self.budget.record(self.measurement)["kernels"]
        return found


@pytest.mark.parametrize(
    ("cost", "left", "rate"),
    [(70, 100, 1), (100, 100, 1), (101, 100, 2), (70, 5, 14), (71, 5, 15), (3, 0, NEVER), (3, -1, NEVER)],
)
def test_one_in(cost: float, left: float, rate: int) -> None:
    assert one_in(cost, left) == rate


def test_a_rate_follows_from_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 5)
    assert scene.tick(1) == 1 and scene.process.rates == {0: 14}
    assert scene.said == ["budget of 5 %: measuring one launch in 14 of work in pid 7 (app)"]
    scene.counted(70, 1000)
    record = scene.record
    assert (record["launches"], record["measured"], record["one_in"]) == (1000, 70, 14)
    assert (record["launch_percent"], record["overhead_percent"], record["held"]) == (70, 4.9, True)


def test_maps_are_read_again_only_after_further_launches_and_more_and_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, 5)
    assert scene.tick(0) == 1
    assert scene.tick(60) == 1  # nothing was measured since
    for measured, pause in ((2, 0.4), (3, 0.8), (4, 1.6), (5, 3.2), (6, 6.4), (7, 10), (8, 10)):
        scene.counted(measured, 100)
        assert scene.tick(0) == measured
        assert scene.tick(pause - 0.01) == measured
        scene.clock += SECOND // 50
    assert len(scene.said) == 1


def test_the_wait_for_a_stopped_process_is_not_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 5)
    scene.took, scene.answered = 7 * SECOND, SECOND // 1000
    assert scene.tick(0) == 1
    assert scene.process.rates[0] == one_in(70, 5 - 0.1)
    assert (scene.budget.host(scene.process) or 0) < 0.02
    scene.counted(2, 100)
    assert scene.tick(1) == 2


def test_readings_take_a_quarter_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first one: the rate expects the time until the next."""
    scene = Scene(monkeypatch, 5)
    scene.took = SECOND
    assert scene.tick(0) == 1 and scene.process.rates == {0: one_in(70, 5 - 100 / 81)}
    scene.counted(2, 100)
    assert scene.tick(79.9) == 1
    assert scene.tick(0.2) == 2


def test_launches_are_measured_again_once_the_host_time_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 5)
    scene.process.calls = HookCalls(64, 1, SECOND // 64)  # one second
    assert scene.tick(0) == 1 and scene.process.rates == {0: NEVER}
    assert scene.said == ["budget of 5 %: measuring no further launches of work in pid 7 (app)"]
    scene.tick(15)
    assert scene.process.rates == {0: NEVER}
    assert scene.tick(10) == 1 and scene.process.rates == {0: 70}  # 1 s in 25 s is 4 %


def test_a_new_kernel_is_read_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 5)
    for measured in range(1, 7):
        scene.counted(measured, 100)
        scene.tick(10)
    scene.process.other = Counters(seen=1, instrumented=1)
    scene.spent[1, "_Z5otherv"] = (100, 20)
    assert scene.tick(0.11) == 7 and scene.process.rates == {0: 14, 1: 4}
    assert "measuring one launch in 4 of other" in scene.said[-1]


def test_a_launch_that_still_runs_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 5)
    monkeypatch.setattr(scene, "read", lambda: None)
    scene.tick(1)
    assert scene.process.rates == {} and scene.record["held"] is None
    monkeypatch.undo()
    again = Scene(monkeypatch, 5)
    again.budget, again.clock = scene.budget, scene.clock
    assert again.tick(0.19) == 0
    assert again.tick(0.02) == 1 and again.process.rates == {0: 14}


def test_host_time_comes_off_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call in 64 is timed: 640 calls of 3 ms are 1.92 s. Rare work is left out."""
    scene = Scene(monkeypatch, 5)
    scene.tick(0)
    scene.process.calls = HookCalls(640, 10, 30_000_000, rare_ns=5 * SECOND)
    scene.counted(2, 100)
    scene.tick(64)  # 3 %
    assert scene.process.rates == {0: 35}
    scene.counted(3, 100)
    scene.process.calls = HookCalls(640 * 4, 40, 120_000_000)
    scene.tick(64)  # 6 %
    assert scene.process.rates == {0: NEVER}
    record = scene.record
    assert record["host_percent"] == pytest.approx(6, abs=0.01)
    assert record["one_in"] is None and record["held"] is False


def test_readings_before_and_after_a_process_are_not_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that run for 2 s one after the other, as in a test suite; each is read once, which takes 10 ms."""
    scene = Scene(monkeypatch, 5)
    scene.took = SECOND // 100
    for _ in range(60):
        scene.tick(0.1)
        scene.tick(1.89)
        scene.end(scene.processes[-1])
        scene.start()
    scene.processes.pop()
    assert scene.readings == 60 and all("measuring one launch in 19 " in text for text in scene.said)
    shares = [kernel["host_percent"] for kernel in scene.budget.record(scene.measurement)["kernels"]]
    assert shares == pytest.approx([0.5] * 60, abs=0.05)


def test_a_reading_counts_while_a_process_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """During a reading of 1 s, one process ends and another begins. The tick is called while the reading waits."""
    scene, read = Scene(monkeypatch, 50), Scene.read

    def change(scene: Scene) -> None:
        if not scene.readings:
            scene.clock += SECOND // 4
            scene.end(scene.process)
            scene.clock += SECOND // 4
            scene.start()
            scene.tick(0)
            scene.clock += SECOND // 2
        read(scene)

    monkeypatch.setattr(Scene, "read", change)
    scene.tick(0)
    scene.tick(0)
    scene.clock = 5 * SECOND
    shares = [scene.budget.host(process) for process in scene.processes]
    assert shares == pytest.approx([100, 100 / 9])  # 0.25 s of 0.25 s, 0.5 s of 4.5 s
    scene.took = SECOND
    scene.tick(5)  # reads for the second process
    assert scene.readings == 2
    shares = [scene.budget.host(process) for process in scene.processes]
    assert shares == pytest.approx([100, 100 * 1.5 / 10.5])


def test_a_process_that_comes_and_goes_between_two_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had at most the time since the first of them."""
    scene = Scene(monkeypatch, 5)
    scene.tick(0)
    scene.tick(9)
    scene.clock += SECOND // 2
    short = scene.start()
    short.calls = HookCalls(64, 1, SECOND // 640)  # 0.1 s
    scene.end(short)
    assert scene.budget.host(short) == pytest.approx(20)
    scene.tick(1)
    assert scene.budget.host(short) == pytest.approx(20)


@pytest.mark.parametrize(("one_in", "added"), [(None, 560.0), (1, 560.0), (4, 160 + 400 / 4)])
def test_added_instructions_are_those_of_an_average_choice(
    one_in: int | None, added: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two contexts, in each of which two multiprocessors have counts."""
    counts = np.zeros(SPENT_SHAPE, np.uint64)
    counts[0, :, 5], counts[1, :, 9] = (600, 200, 80 if one_in else 0), (400, 80, 0)
    instance = SimpleNamespace(mangled=KERNEL, array=counts.reshape(-1, 1))
    monkeypatch.setattr(readout, "_instances_of", lambda *given: [instance])
    params = {PARAMETER: Sampling("block", one_in, 7).parameter} if one_in else {}
    process = SimpleNamespace(number=1, snapshots={1: None, 2: None})
    measurement: Any = SimpleNamespace(
        numbers={SPENT: 0}, params=params, processes=[process], lock=contextlib.nullcontext()
    )
    assert readout.spent(measurement) == {(1, KERNEL): (2000, added)}


def test_the_counting_is_attached_once_for_all_kernels() -> None:
    def attached(*patterns: tuple[str, ...]) -> BPF:
        b = BPF(text=threadhist.PROGRAM)
        b.limit(KernelOptions(budget=5.0))
        for kernel in patterns:
            b.attach_gpu_exit(kernel, "on_exit", "loads")
        return b

    def costs(b: BPF) -> list[tuple[str, ...]]:
        return [one.kernels for one in b.attached.lowered_probes() if one.program is COST]

    both = attached(("a*",), ("b", "a*"))
    assert costs(both) == [("a*", "b")] and costs(attached(("a*",), ())) == [()]
    assert (
        SPENT in {definition.name for definition in both.attached.definitions()}
        and both.attached.amd_refusal() == "this tool does not measure AMD GPUs with --budget yet"
    )
    assert costs(attached()) == []


def line(**fields: Any) -> str:
    kernel = {
        "pid": 7,
        "comm": "app",
        "kernel": "work",
        "mangled": KERNEL,
        "launches": 100,
        "measured": 10,
        "one_in": 10,
    }
    kernel |= {"launch_percent": 70.0, "overhead_percent": 7.0, "host_percent": None, "held": False}
    return "\n".join(_budget_lines({"percent": 5.0, "kernels": [kernel | fields]}))


def test_the_report_says_why_a_budget_is_not_held() -> None:
    assert line().endswith("7 % more instructions; about 140 launches would hold the budget")
    assert line(host_percent=6.0).endswith(
        "6 % of the time in hooks and readings, which no choice of launches reduces"
    )
    assert line(held=True).startswith("budget of 5 %: held\n")
    assert "measured 1 of 100 launches (only the first; each adds" in line(one_in=None, measured=1)
    assert "measured 10 of 100 launches (none at the end; each adds" in line(one_in=None)
    unread = line(launch_percent=None, overhead_percent=None, held=None)
    assert unread.startswith("budget of 5 %: unknown\n") and "their counts were not read" in unread


def test_kernels_of_the_same_name_are_told_apart() -> None:
    def lines(*kernels: str) -> str:
        common = {"pid": 7, "comm": "app", "kernel": "work", "launches": 9, "measured": 1, "one_in": None}
        common |= {"launch_percent": None, "overhead_percent": None, "host_percent": None, "held": None}
        every = [common | {"mangled": name, "demangled": f"void {name}()"} for name in kernels]
        return "\n".join(_budget_lines({"percent": 5.0, "kernels": every}))

    assert "  void a() (pid 7)" in lines("a", "b") and "  void b() (pid 7)" in lines("a", "b")
    assert lines("a", "a").count("  work (pid 7)") == 2  # of two processes


def test_the_report_is_short() -> None:
    kernel = {"pid": 7, "comm": "app", "launches": 9, "measured": 9, "one_in": 1}
    kernel |= {"launch_percent": 1.0, "overhead_percent": 1.0, "host_percent": None, "held": True}
    kernels = [kernel | {"kernel": f"k{n}", "mangled": f"k{n}"} for n in range(20)] + [
        kernel | {"kernel": "over", "mangled": "over", "held": False}
    ]
    lines = _budget_lines({"percent": 5.0, "kernels": kernels})
    assert lines[0] == "budget of 5 %: not held for 1 kernel" and lines[1].startswith("  over ")
    assert lines[-1] == "  11 more kernels: see --json" and len(lines) == 12
    assert _budget_lines({"percent": 5.0, "kernels": []}) == ["budget of 5 %: no launch was measured"]
