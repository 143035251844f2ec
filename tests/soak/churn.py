"""Lets ten programs at a time come and go under `gpubpf exporter`, and accounts for each launch and for what the exporter costs.

The cost has two parts, which are measured apart. In the first third of the time, the same ten programs launch kernels. After that, a
program ends and another one begins every few seconds: what the exporter's CPU time then exceeds that of the first part is the cost of
the programs that come. Every third program that goes is killed.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gpubpf.record import MutableRecord, Record, asdict
from gpubpf_cuda import build
from gpubpf_exporter import PROGRAM, Exporter, Program, Samples, exporting, until

PROGRAMS = 10
LAUNCHES = 10  # of `nap`, in a turn of a program, which also launches `one`
TURN = 0.1  # seconds between the turns of all programs
WARM_UP = 10.0  # seconds until the exporter's code has run once; at most a tenth of the time
MOST_SHARE = 1.0  # per cent of a core, apart from programs that come
MOST_GROWTH = 0.02  # of the exporter's memory in the last third of the time
TICK = os.sysconf("SC_CLK_TCK")
KERNELS = "gpubpf_kernel_launches_total"
MEASURED = "gpubpf_kernel_measured_launches_total"
NOT_MEASURED = "gpubpf_launches_not_measured_total"
LOST = "gpubpf_launches_lost_total"
MISSED = "gpubpf_processes_missed_total"


class Defect(Exception):
    """The exporter did not do what it should."""


class Phase(Record):
    """A part of the time.

    cpu_s: CPU time of the exporter and of its children.
    came: the number of programs that began.
    launches: of all programs.
    """

    seconds: float
    cpu_s: float
    came: int
    launches: int

    @property
    def share(self) -> float:
        """CPU time in per cent of a core."""
        return 100 * self.cpu_s / self.seconds


class Findings(Record):
    """What the exporter counted, and what it cost.

    launches: what the programs made.
    seen: what the exporter counted.
    measured, not_measured, lost: what became of those; `lost` is an upper bound.
    missed: processes that were not measured, or only later, by reason.
    memory: resident bytes of the exporter, several times in the last third of the time.
    """

    steady: Phase
    churn: Phase
    launches: int
    seen: int
    measured: int
    not_measured: Mapping[str, int]
    lost: int
    missed: Mapping[str, int]
    memory: list[int]

    @property
    def per_process_ms(self) -> float:
        """CPU time for each program that came, in ms: what exceeds the share of the first phase."""
        extra = self.churn.cpu_s - self.steady.cpu_s / self.steady.seconds * self.churn.seconds
        return 1000 * extra / max(1, self.churn.came)

    @property
    def growth(self) -> float:
        """By how much memory grew in the last third of the time, as a part of it: from the first half of the samples to the second."""
        half = len(self.memory) // 2
        before, after = statistics.median(self.memory[:half]), statistics.median(self.memory[half:])
        return after / before - 1

    def check(self) -> None:
        """Raise Defect if launches do not add up."""
        known = self.measured + sum(self.not_measured.values())
        if not known <= self.seen <= known + self.lost:
            raise Defect(
                f"{self.seen:,} launches seen, but {known:,} measured or not, and at most {self.lost:,} lost"
            )
        if self.seen > self.launches:
            raise Defect(f"{self.seen:,} launches seen, but only {self.launches:,} made")
        if self.seen < self.launches and not self.missed:
            raise Defect(
                f"{self.seen:,} of {self.launches:,} launches seen, but no process is said to be missed"
            )

    def lines(self) -> Iterator[str]:
        yield f"{self.launches:,} launches, {self.seen:,} seen: {self.measured:,} measured, at most {self.lost:,} lost"
        yield from (f"  not measured: {count:,} ({why})" for why, count in self.not_measured.items())
        yield from (f"  processes missed: {count:,} ({why})" for why, count in self.missed.items())
        for name, one in (("the same programs", self.steady), ("programs come and go", self.churn)):
            yield (
                f"{name}, {one.seconds:.0f} s: {one.share:.2f} % of a core,"
                f" {one.launches / one.seconds:,.0f} launches/s, {one.came} programs came"
            )
        yield f"a program that comes costs {self.per_process_ms:.1f} ms of CPU time"
        yield f"memory {max(self.memory) / 1e6:.1f} MB at most; it grew by {100 * self.growth:.2f} % in the last third"


class Fleet(MutableRecord):
    """The running programs. launches: what all programs have made. The oldest program is the first."""

    path: Path
    running: list[Program]
    launches: int = 0
    came: int = 0

    def begin(self) -> None:
        self.running.append(Program(self.path, "real"))
        self.launches += 1
        self.came += 1

    def turn(self) -> None:
        for program in self.running:
            program.launch(LAUNCHES)
            self.launches += LAUNCHES + 1

    def replace_oldest(self) -> None:
        """End the oldest program, or kill it, and begin another one."""
        self.running.pop(0).end(signal.SIGKILL if self.came % 3 == 0 else None)
        self.begin()

    def end(self) -> None:
        while self.running:
            self.running.pop().end()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, of its children that have ended, and of those that run."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    total = sum(map(int, fields[11:15])) / TICK
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            total += cpu_seconds(int(child))
    return total


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def phase(exporter: Exporter, fleet: Fleet, seconds: float, pause: float, note: Callable[[], None]) -> Phase:
    """Let the programs launch for some time. pause: seconds between programs that come; 0: none comes. note: called in each turn."""
    came, launches, cpu_s = fleet.came, fleet.launches, cpu_seconds(exporter.process.pid)
    began = time.monotonic()
    due = began + pause
    while (now := time.monotonic()) < began + seconds:
        if pause and now >= due:
            fleet.replace_oldest()
            due += pause
        fleet.turn()
        note()
        time.sleep(TURN)
    took, used = time.monotonic() - began, cpu_seconds(exporter.process.pid) - cpu_s
    return Phase(took, used, fleet.came - came, fleet.launches - launches)


def total(samples: Samples, name: str) -> int:
    return int(sum(value for (its, _), value in samples.items() if its == name))


def by_reason(samples: Samples, name: str) -> dict[str, int]:
    return {
        dict(labels)["reason"]: int(value)
        for (its, labels), value in samples.items()
        if its == name and value
    }


class Counters:
    """Scrapes of an exporter, in which no counter may decrease."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._before: Samples = {}

    def scrape(self) -> Samples:
        """Return a scrape. Raises Defect if a counter decreased, or if the exporter does not answer."""
        try:
            found = self._exporter.scrape()
        except OSError as error:
            notices = "".join(self._exporter.notices[-20:])
            raise Defect(f"the exporter does not answer: {error}\n{notices}") from None
        for key, value in found.items():
            if key[0].endswith("_total") and value < self._before.get(key, 0):
                raise Defect(f"{key} decreased from {self._before[key]} to {value}")
        self._before = found
        return found

    def settled(self, launches: int) -> Samples:
        """Return a scrape after the last program has ended and was counted. launches: what the programs made."""

        def look() -> Samples:
            found = self.scrape()
            known = total(found, MEASURED) + total(found, NOT_MEASURED) + total(found, LOST)
            over = not total(found, "gpubpf_processes") and total(found, KERNELS) <= known
            complete = total(found, KERNELS) == launches or total(found, MISSED)
            return found if over and complete else {}

        found: Samples = until(look, self._exporter.notices)
        return found


def run(seconds: float, pause: float, path: Path, *options: str) -> Findings:
    """Run an exporter and the programs. pause: seconds between programs that come. path: the program. options: of the exporter."""
    memory: list[int] = []
    with exporting(*options) as exporter:
        exporter.noticed("watching every process")
        counters, fleet = Counters(exporter), Fleet(path, [])
        next_scrape = 0.0

        def note() -> None:
            nonlocal next_scrape
            if time.monotonic() >= next_scrape:
                counters.scrape()
                next_scrape = time.monotonic() + seconds / 60

        try:
            for _ in range(PROGRAMS):
                fleet.begin()
            phase(exporter, fleet, min(WARM_UP, seconds / 10), 0, note)
            steady = phase(exporter, fleet, seconds / 3, 0, note)
            first = phase(exporter, fleet, seconds / 3, pause, note)

            def note_memory() -> None:
                note()
                memory.append(resident(exporter.process.pid))

            last = phase(exporter, fleet, seconds / 3, pause, note_memory)
        finally:
            fleet.end()
        found = counters.settled(fleet.launches)
        churn = Phase(
            first.seconds + last.seconds,
            first.cpu_s + last.cpu_s,
            first.came + last.came,
            first.launches + last.launches,
        )
        if exporter.end():
            raise Defect("the exporter failed: " + "".join(exporter.notices))
    return Findings(
        steady,
        churn,
        fleet.launches,
        total(found, KERNELS),
        total(found, MEASURED),
        by_reason(found, NOT_MEASURED),
        total(found, LOST),
        by_reason(found, MISSED),
        memory,
    )


def main(minutes: float, pause: float, report: Path | None) -> int:
    """Run for some minutes. Return the exit status: 1 if there is a defect, or if the exporter costs too much.

    pause: seconds between programs that come.
    report: where to write the findings as JSON; None: nowhere.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = build(PROGRAM, Path(directory) / "napping")
        try:
            found = run(60 * minutes, pause, path, "--every", "5")
            found.check()
        except Defect as defect:
            print(defect, flush=True)
            return 1
    print(*found.lines(), sep="\n")
    if report:
        report.write_text(json.dumps(asdict(found), indent=2) + "\n")
    costly = found.steady.share > MOST_SHARE
    grows = found.growth > MOST_GROWTH
    if costly:
        print(f"more than {MOST_SHARE:g} % of a core for the same programs")
    if grows:
        print(f"memory grew by more than {100 * MOST_GROWTH:g} %")
    return int(costly or grows)
