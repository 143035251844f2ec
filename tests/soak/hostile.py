"""A hostile user beside programs that root measures: `script/soak --hostile`.

The user's processes flood the tool's sockets with connections, have huge environments and lists of mappings, map hundreds of files
named like a driver, stop and continue themselves while they start to use a GPU, come and go, and wait for file systems of their own
(FUSE) with the locks that the tool needs to look at them. Meanwhile a tool measures every process for some seconds, again and again,
and programs of another user launch kernels. In each round

- the measurement ends at most SLACK seconds after the time that -d says, which begins when the tool watches every process; the tool
  ends within PATIENCE seconds after that, and never needs more than MEMORY;
- every program computes what it should;
- each program's launches are measured, or the summary counts as many missed processes as there are programs that lack some.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from accounts import Defect, demand

from gpubpf.traced import device

ROOT = Path(__file__).resolve().parent.parent.parent
USER, OTHER = 65534, 65533  # the hostile user's ID, and that of the measured programs
SECONDS = 5.0  # of one measurement
SLACK = 1.0
PATIENCE = 15.0  # the hostile user's processes use all CPUs, too
MEMORY = 300  # MB, of the tool and its helper together
PROGRAMS = 4  # in each round
LAUNCHES = 50
HALF = 20.0  # seconds for which a process holds the lock of its address space, and then does not: no driver has a probe meanwhile
PROCESSES = ROOT / "tests" / "gpubpf" / "process"
LARGE, LOCKED = PROCESSES / "large.c", PROCESSES / "locked.c"
DRIVER = device.LIBRARIES / "libcuda.so.1"


def build(place: Path) -> None:
    for source in (Path(__file__).with_name("hostile.c"), LARGE, LOCKED):
        made = place / source.stem
        subprocess.run(["gcc", "-O1", "-w", "-pthread", "-o", made, source, "-ldl"], check=True)
        made.chmod(0o755)
    os.mknod(place / "fuse", stat.S_IFCHR, os.stat("/dev/fuse").st_rdev)
    (place / "fuse").chmod(0o666)


@contextlib.contextmanager
def hostile_user(place: Path) -> Iterator[None]:
    """Run the processes of the hostile user. One that ends is started again."""
    theirs = place / "theirs"
    theirs.mkdir()
    os.chown(theirs, USER, USER)
    commands = [
        ["hostile", "connect"],
        ["hostile", "drivers", theirs, 500],
        ["hostile", "stops", DRIVER],
        ["hostile", "comes", DRIVER],
        ["large", "environ", 500, DRIVER],
        ["large", "maps", theirs, 12, 20000, DRIVER],
        ["locked", theirs / "served", place / "fuse"],
        ["locked", theirs / "served", place / "fuse", DRIVER],
    ]
    ended = threading.Event()

    def keep(number: int, command: list[object]) -> None:
        holds_lock = command[0] == "locked" and DRIVER not in command
        while not ended.is_set():
            own = theirs / f"{number}-{time.monotonic_ns()}"
            own.mkdir()
            os.chown(own, USER, USER)
            words = [str(word).replace(str(theirs), str(own)) for word in command]
            words[0] = str(place / words[0])
            with subprocess.Popen(
                words,
                user=USER,
                group=USER,
                extra_groups=(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "HOME": str(own), "CUDASIM_CC": "90"},
            ) as process:
                until = time.monotonic() + (HALF if holds_lock else math.inf)
                while process.poll() is None and time.monotonic() < until and not ended.wait(0.1):
                    pass
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
            ended.wait(HALF if holds_lock else 0.2)

    threads = [threading.Thread(target=keep, args=given) for given in enumerate(commands)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def memory(pids: list[int]) -> float:
    """Return the most memory that these processes have needed so far, in MB."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) / 1024
    return total


def one_round(program: Path, place: Path, figures: collections.Counter[str]) -> None:
    """Measure every process once, while programs run. Raises Defect."""
    lives = place / "launches"
    lives.unlink(missing_ok=True)
    lives.touch()
    os.chown(lives, OTHER, OTHER)
    tool_of = [
        sys.executable,
        Path(__file__).with_name("noting_end.py"),
        place / "ended",
        ROOT / "tools" / "threadhist.py",
    ]
    command = [*tool_of, "--json", "--device", "sim", "-d", SECONDS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
    out = place / "out"
    with out.open("w") as output, (place / "err").open("w+") as error:
        tool = subprocess.Popen(list(map(str, command)), stdout=output, stderr=error, env=environment)
        try:
            while tool.poll() is None and '"watching"' not in out.read_text():
                time.sleep(0.02)
            began, most = time.monotonic(), 0.0
            running = [
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "cudasim", "--", program, "return", str(LAUNCHES)],
                    user=OTHER,
                    group=OTHER,
                    extra_groups=(),
                    env={**environment, "SOAK_LIVES": str(lives), "XDG_CACHE_HOME": str(place / "cache")},
                    stdout=subprocess.DEVNULL,
                )
                for _ in range(PROGRAMS)
            ]
            while tool.poll() is None and time.monotonic() < began + 60:
                children = Path(f"/proc/{tool.pid}/task/{tool.pid}/children")
                with contextlib.suppress(OSError):
                    most = max(most, memory([tool.pid, *map(int, children.read_text().split())]))
                time.sleep(0.05)
            took = time.monotonic() - began
        finally:
            tool.kill()
            tool.wait()
            statuses = [process.wait() for process in running]
        error.seek(0)
        said = error.read()
    demand("Traceback" not in said, f"a traceback: {said}")
    demand(tool.returncode == 0, f"status {tool.returncode} of the tool: {said}")
    demand(not any(statuses), f"programs ended with {statuses}")
    demand(most < MEMORY, f"the tool needed {most:.0f} MB")
    demand(took < SECONDS + PATIENCE, f"the tool ended after {took:.1f} s: {said}")
    records = [json.loads(line) for line in out.read_text().splitlines()]
    summary = records[-1]
    watching = next(record["ts_ns"] for record in records if record["type"] == "watching")
    measured = (int((place / "ended").read_text()) - watching) / 1e9
    demand(measured < SECONDS + SLACK, f"the tool measured for {measured:.1f} s, not {SECONDS:.0f}: {said}")
    seen: collections.Counter[int] = collections.Counter()
    for record in records:
        if record["type"] == "kernel":
            seen[record["pid"]] += record["launches"]
    made = [tuple(map(int, line.split())) for line in lives.read_text().splitlines()]
    lacking = [(pid, launches, seen[pid]) for pid, launches in made if seen[pid] < launches]
    missed = sum(summary["processes"]["missed"].values()) + sum(summary["not_instrumented"].values())
    demand(missed >= len(lacking), f"of {lacking}, only {missed} are counted as missed: {summary}")
    figures["rounds"] += 1
    figures["programs"] += len(made)
    figures["programs that were measured whole"] += len(made) - len(lacking)
    figures["launches"] += sum(launches for _, launches in made)
    figures["most MB"] = max(figures["most MB"], round(most))
    figures["most ms beyond -d"] = max(figures["most ms beyond -d"], round(1000 * (measured - SECONDS)))
    figures["most ms until the tool ends"] = max(
        figures["most ms until the tool ends"], round(1000 * (took - SECONDS))
    )


def row(figures: collections.Counter[str]) -> str:
    """Return the figures as a row of the table in docs/reliability.md."""
    programs, whole = figures["programs"], figures["programs that were measured whole"]
    late = figures["most ms beyond -d"] / 1000
    cells = (
        f"{figures['rounds']:,}",
        f"{programs:,}",
        f"{whole:,}",
        f"{programs - whole:,}",
        f"{figures['most MB']} MB",
        f"{late:.2f} s",
        f"{figures['defects']}",
    )
    return f"| {' | '.join(cells)} |"


def run(minutes: float, build_program: Callable[[Path], Path], report: Path | None) -> int:
    """Run rounds for some minutes, and print the figures. Return 1 if there were defects."""
    figures: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        place.chmod(0o755)
        (place / "cache").mkdir()
        os.chown(place / "cache", OTHER, OTHER)
        program = build_program(place)
        build(place)
        program.chmod(0o755)
        until = time.monotonic() + 60 * minutes
        with hostile_user(place):
            while time.monotonic() < until:
                try:
                    one_round(program, place, figures)
                except Defect as defect:
                    figures["defects"] += 1
                    print(f"round {figures['rounds']}: {defect}", flush=True)
    text = json.dumps(dict(figures), indent=1)
    if report:
        report.write_text(text + "\n")
    print(text)
    print(row(figures))
    return 1 if figures["defects"] else 0
