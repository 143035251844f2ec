"""Attach and detach under full launch load from eight threads: no crash, no wrong result, exact counts, nothing left behind.

A short form by default. The long one (200 times, tools killed 50 times) with GPUBPF_STRESS=1, whose numbers go to the file that
GPUBPF_STRESS_RESULTS names, as JSON; benchmarks/attach.py runs it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpubpf import agent
from gpubpf.process import address_space, traceable
from gpubpf.program import BPF
from gpubpf.show import cli
from gpubpf.traced import device
from gpubpf_code import changed
from gpubpf_commands import words

HERE = Path(__file__).parent
TOOL = [sys.executable, str(Path(__file__).parents[3] / "tools" / "threadhist.py")]
HEADERS = [
    *sorted(Path("/usr/local").glob("cuda*/include")),
    *(Path(place) / "nvidia/cu13/include" for place in sys.path),
]
LONG = os.environ.get("GPUBPF_STRESS") == "1"
ROUNDS, KILLS, THREADS = (200, 50, 8) if LONG else (6, 3, 8)
WARM = 2  # attachments after which memory is compared

pytestmark = pytest.mark.skipif(
    os.uname().machine != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64"
)

TEXT = r"""
#include <gpubpf.h>
GPU_THREAD_ARRAY(runs, u64, 1);
int on_exit(struct gpu_exit *ctx) {
    int key = 0;
    u64 *mine = runs.lookup(&key);
    if (mine)
        (*mine)++;
    return 0;
}
"""


@pytest.fixture(scope="module")
def launching(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (device.LIBRARIES / "libcuda.so.1").exists() or not agent.LIBRARY.exists():
        pytest.skip("the embedded device or the agent is not built (script/setup)")
    headers = [d for d in HEADERS if (d / "cuda.h").exists()]
    if not headers:
        pytest.skip("needs cuda.h")
    program = tmp_path_factory.mktemp("stress") / "launching"
    libraries = device.LIBRARIES
    command = (
        "g++ -O1 -pthread -I{headers} {here}/launching.cpp -o {program} -L{place} -lcuda -Wl,-rpath,{place}"
    )
    names = {"headers": headers[0], "here": HERE, "program": program, "place": libraries}
    subprocess.run(words(command, **names), check=True)
    return program


class Target:
    """A program that launches without end, and checks itself."""

    def __init__(self, program: Path, threads: int = THREADS) -> None:
        self.process = subprocess.Popen(
            [program, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    @property
    def pid(self) -> int:
        return self.process.pid

    def say(self, text: str) -> int:
        """Its launches so far."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.process.stderr.read() if self.process.stderr else ""
        return int(answer)

    def end(self) -> None:
        out, error = self.process.communicate("quit\n", timeout=100)
        assert self.process.returncode == 0, error
        assert int(out.split()[-1]) > 0


@contextlib.contextmanager
def launched(program: Path, threads: int = THREADS) -> Iterator[Target]:
    made = Target(program, threads)
    timer = threading.Timer(3000 if LONG else 300, made.process.kill)
    timer.start()
    try:
        yield made
    finally:
        timer.cancel()
        made.process.kill()
        made.process.communicate()


@dataclass(frozen=True)
class State:
    """What a process has: memory in KB, numbers of files, threads and mappings; changed bytes of the driver's and libc's code,
    but for breakpoints."""

    resident: int
    files: int
    threads: int
    mappings: int
    changed: int


def state(pid: int) -> State:
    return State(
        int(traceable.status(pid)["VmRSS"].split()[0]),
        len(os.listdir(f"/proc/{pid}/fd")),
        len(os.listdir(f"/proc/{pid}/task")),
        len(address_space.mappings(pid)),
        changed(pid, r"/lib(cuda|c)\.so") if pid != os.getpid() else 0,
    )


def settled(pid: int, like: State | None = None) -> State:
    """When what is under way has ended: code as it was, no more threads and files than before."""
    until = time.monotonic() + 60
    while True:
        now = state(pid)
        done = now.changed == 0 and (
            like is None or (now.threads <= like.threads and now.files <= like.files)
        )
        if done or time.monotonic() > until:
            return now
        time.sleep(0.05)


def measure(
    pid: int, seconds: float, first: Callable[[], object] = int, last: Callable[[], object] = int
) -> dict[str, Any]:
    """A tool's session on the process, in this one, for so long: `first` is called when probes are live, `last` before they go."""
    made = cli.parser("stress", "", "")
    for add in (cli.add_targets, cli.add_kernels, cli.add_device, cli.add_output):
        add(made)
    args = cli.parse(made, ["-p", str(pid), "--map-memory", "1M"])
    b = BPF(text=TEXT)
    b.attach_gpu_exit(kernel=args.kernel, fn_name="on_exit")
    with b.trace(cli.Options.of(args)) as session:
        first()
        for turn in session.intervals(seconds / 2, 2):
            if turn == 1:
                last()
        runs = sum(int(i.array.sum()) for i in session.instances("runs"))
        return {**session.summary(), "runs": runs}


def consistent(found: dict[str, Any]) -> None:
    """What a summary says adds up, and every thread of every instrumented launch was counted."""
    assert found["lost"] == 0
    assert found["launches_matched"] == found["launches_seen"]
    assert (
        found["launches_instrumented"] + sum(found["not_instrumented"].values()) == found["launches_matched"]
    )
    assert found["runs"] == 128 * found["launches_instrumented"], found


def report(name: str, **values: Any) -> None:
    """For benchmarks/attach.py."""
    print(name, values)
    if path := os.environ.get("GPUBPF_STRESS_RESULTS"):
        with open(path, "a") as out:
            out.write(json.dumps({"name": name, **values}) + "\n")


def attached(program: Target, still: bool) -> tuple[int, list[int], dict[str, Any]]:
    """The launches before, those when probes were live and before they went, and what was found. `still`: none are made while they
    come and go."""
    count: list[int] = []
    start = program.say("pause" if still else "go")
    found = measure(
        program.pid,
        0.4 if still else 0.1,
        lambda: count.append(program.say("go")),
        lambda: count.append(program.say("pause" if still else "go")),
    )
    return start, count, found


@pytest.mark.every(4)
def test_attached_and_detached_again_and_again(launching: Path) -> None:
    """In one tool process, so that what it leaks adds up; every fourth time with the program standing still at both ends, for exact
    counts."""
    with launched(launching) as program:
        instrumented = seen = exact = 0
        before = ours = None
        began = time.monotonic()
        for i in range(WARM + ROUNDS):
            still = i % 4 == 3
            start, count, found = attached(program, still)
            if still:
                assert found["launches_seen"] == count[1] - start > 0, (found, count, start)
                exact += found["launches_seen"]
            now = program.say("go")
            assert count[1] - count[0] - THREADS <= found["launches_seen"] <= now - start, (
                found,
                count,
                start,
            )
            consistent(found)
            seen += found["launches_seen"]
            instrumented += found["launches_instrumented"]
            if i == WARM - 1:
                gc.collect()
                before, ours = settled(program.pid), state(os.getpid())
        took = time.monotonic() - began
        assert before is not None and ours is not None
        gc.collect()
        after, mine = settled(program.pid, before), state(os.getpid())
        report(
            "attach", rounds=ROUNDS, threads=THREADS, seconds=took, launches_seen=seen, exact=exact, instrumented=instrumented,
            target_before=vars(before), target_after=vars(after), tool_before=vars(ours), tool_after=vars(mine),
        )  # fmt: skip
        assert instrumented > 10 * ROUNDS
        assert after.changed == 0 and after.files <= before.files and after.threads <= before.threads
        assert after.resident - before.resident < 2048 + 64 * ROUNDS
        assert after.mappings - before.mappings < 16 + ROUNDS / 4
        # Of the tool: the last session is still known, and threads that nobody waits for may be at work.
        assert mine.files <= ours.files + 12 and mine.threads <= ours.threads + 12
        program.end()


@pytest.mark.every(2)
def test_a_tool_that_is_killed_at_any_moment(launching: Path) -> None:
    """SIGKILL while it starts, attaches, measures or leaves: the program goes on, its code is its own, the next tool gets in."""
    chance = random.Random(7)
    with launched(launching) as program:
        before = settled(program.pid)
        moments = [chance.uniform(0.2, 2.5) for _ in range(KILLS)]
        for moment in moments:
            tool = subprocess.Popen(
                [*TOOL, "-p", str(program.pid), "-d", "1"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            time.sleep(moment)
            tool.send_signal(signal.SIGKILL)
            tool.wait()
            assert program.process.poll() is None
        after = settled(program.pid, before)
        consistent(measure(program.pid, 0.2))
        report("killed", kills=KILLS, target_before=vars(before), target_after=vars(after))
        assert after.changed == 0, after
        assert after.threads <= before.threads + 1 and after.files <= before.files + 1, (before, after)
        program.end()


@pytest.mark.every(2)
def test_two_tools_at_once(launching: Path) -> None:
    """Two different ones, the same one twice, one that comes while another goes: each measures, or says in a line why not."""
    with launched(launching, 2) as program:
        before = settled(program.pid)
        for pause in (0.0, 0.6):
            tools = []
            for name in ("threadhist", "threadhist", "launchlate"):
                path = Path(TOOL[1]).with_name(f"{name}.py")
                tools.append(
                    subprocess.Popen(
                        [TOOL[0], str(path), "-p", str(program.pid), "-d", "0.5"],
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
                time.sleep(pause)
            measured = 0
            for tool in tools:
                _, error = tool.communicate(timeout=100)
                assert tool.returncode in (0, 1) and "Traceback" not in error, error
                if tool.returncode == 0:
                    measured += 1
                else:
                    assert re.search(
                        rf"^\w+: pid {program.pid} \(\w+\) (is already traced by |is still detaching from )",
                        error,
                        re.M,
                    ), error
            assert measured >= 1
        assert settled(program.pid, before).changed == 0
        program.end()
