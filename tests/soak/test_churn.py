"""Programs that come and go under `gpubpf exporter`, for seconds. script/soak --exporter does so for hours."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
from gpubpf.record import replace
from gpubpf_cuda import build
from gpubpf_exporter import PROGRAM

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test modules without it

import churn
from churn import Defect, Findings, Phase

MB = 1 << 20
GOOD = Findings(
    Phase(10, 0.1, 0, 500), Phase(20, 0.4, 10, 500), 1000, 1000, 400, {"sampled out": 590}, 12, {}, [MB] * 4
)


@pytest.mark.own_processes
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_each_launch_of_programs_that_come_and_go_is_in_a_metric(tmp_path: Path) -> None:
    """How much CPU time that takes depends on the machine, so script/soak judges it, and this test does not."""
    found = churn.run(9, 0.5, build(PROGRAM, tmp_path / "napping"))
    found.check()
    assert found.churn.came >= 1 and found.steady.came == 0
    assert found.steady.cpu_s > 0 and found.launches > churn.PROGRAMS
    assert found.memory[-1] - found.memory[0] < found.churn.came * MB + 8 * MB


def test_what_programs_that_come_cost() -> None:
    """The first phase took 1 % of a core, the second 2 %: 200 ms more for ten programs."""
    assert (GOOD.steady.share, GOOD.churn.share) == (pytest.approx(1), pytest.approx(2))
    assert GOOD.per_process_ms == pytest.approx(20)
    assert "a program that comes costs 20.0 ms of CPU time" in [*GOOD.lines()]
    assert replace(GOOD, memory=[100, 101, 110, 112]).growth == pytest.approx(111 / 100.5 - 1)


def test_launches_that_do_not_add_up_are_a_defect() -> None:
    GOOD.check()
    for changed in (
        replace(GOOD, seen=989),  # fewer than have a reason
        replace(GOOD, measured=300),  # some are nowhere
        replace(GOOD, launches=999),  # more than there were
        replace(GOOD, launches=1001),  # one was not seen
    ):
        with pytest.raises(Defect):
            changed.check()
    replace(GOOD, launches=1001, missed={"reached late": 1}).check()


def test_a_counter_that_decreases_is_a_defect() -> None:
    scrapes = iter([{("launches_total", frozenset()): 5.0}, {("launches_total", frozenset()): 4.0}])

    class Scraped:
        def scrape(self) -> churn.Samples:
            return next(scrapes)

    counters = churn.Counters(Scraped())  # type: ignore[arg-type]
    counters.scrape()
    with pytest.raises(Defect, match="decreased"):
        counters.scrape()


def test_an_exporter_that_does_not_answer_is_a_defect_with_its_notices() -> None:
    class Ended:
        notices = ("gpubpf exporter: why it ended\n",)

        def scrape(self) -> churn.Samples:
            raise ConnectionRefusedError(111, "refused")

    with pytest.raises(Defect, match=r"does not answer.*refused\ngpubpf exporter: why"):
        churn.Counters(Ended()).scrape()  # type: ignore[arg-type]
