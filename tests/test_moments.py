"""Programs that launch at every moment of a process's life: what a tool sees, instruments and gives reasons for is what they launched.

moments/moments.cu is all of these programs: its arguments are moments, each with a number of launches. A seed chooses them. Without
GPUBPF_LOOKS=all, the first few seeds run. MOMENTS_SEEDS=FIRST:COUNT chooses others.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
import hipsim_device
from gpubpf.traced.device import LIBRARIES
from gpubpf_host import needs_bpf

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "tests" / "moments"
BATCH = 20  # programs of one measurement
LONG = 500  # seeds of each device in the long run


@dataclass(frozen=True)
class Moment:
    """A moment and its number n. launches: the kernels that run; calls, graphs: the calls that launch a kernel or a graph."""

    name: str
    launches: Callable[[int], int] = lambda n: n
    calls: Callable[[int], int] | None = None  # None: one for each kernel
    graphs: Callable[[int], int] = lambda n: 0
    cuda_only: bool = False
    once: bool = False
    forks: bool = False  # in the child, which needs a parent that has not used the GPU
    executes: bool = False  # in another program


def _graph(
    name: str,
    launches: Callable[[int], int],
    graphs: Callable[[int], int],
    captured: int = 0,
    cuda_only: bool = False,
) -> Moment:
    return Moment(name, launches, lambda n: captured, graphs, cuda_only)


MOMENTS = (
    Moment("main"),
    Moment("streams", lambda n: 2 * n),
    Moment("threads", lambda n: 3 * n),
    Moment("leaving", lambda n: 2 * n),
    Moment("detached", once=True),
    Moment("fork", forks=True),
    Moment("fork_exit", forks=True),
    Moment("exec", executes=True),
    Moment("spawn", executes=True),
    _graph("graph", lambda n: 2 * n, lambda n: n),
    _graph("child", lambda n: 2 * n, lambda n: n),
    _graph("captured", lambda n: n, lambda n: n, captured=1),
    _graph("cloned", lambda n: n, lambda n: n),
    _graph("updated", lambda n: 2 * n, lambda n: 2 * n),
    _graph("loop", lambda n: 6 * n, lambda n: 2, captured=1, cuda_only=True),
    _graph("choice", lambda n: 4 * n + 10, lambda n: 8, cuda_only=True),
    Moment("context", cuda_only=True),
    Moment("contexts", cuda_only=True),
    Moment("load"),
    Moment("stays", once=True),
    Moment("initialiser", once=True, cuda_only=True),  # hipcc registers a file's kernels after its objects
    Moment("atexit", once=True),
)
# Moments that no seed chooses: threads that launch as they end, that are cancelled while they wait, exceptions through a call.
UNUSUAL = (
    Moment("thread_end", lambda n: 2 * n),
    Moment("cancelled", lambda n: 2 * n),
    Moment("thrown", cuda_only=True),
)
BY_NAME = {moment.name: moment for moment in (*MOMENTS, *UNUSUAL)} | {
    name: Moment(name, once=True) for name in ("early", "static", "at_quick_exit")
}
# How the process ends, and which moments that leaves out.
ENDS = {
    "": (),
    "exit": (),
    "quick_exit": ("atexit", "static"),
    "_exit": ("atexit", "static", "at_quick_exit"),
    "abort": ("atexit", "static", "at_quick_exit"),
    "term": ("atexit", "static", "at_quick_exit"),
    "kill": ("atexit", "static", "at_quick_exit"),
}
SIGNALLED = {"abort": signal.SIGABRT, "term": signal.SIGTERM, "kill": signal.SIGKILL}


@dataclass(frozen=True)
class Program:
    """The arguments of moments.cu, and what they make it do."""

    moments: tuple[tuple[str, int], ...]
    end: str

    @property
    def words(self) -> list[str]:
        return [f"{name}:{n}" for name, n in self.moments] + ([f"end:{self.end}"] if self.end else [])

    def total(self, of: str) -> int:
        """Return the sum of a field of `Moment` over the moments that the program's end leaves."""
        left_out: tuple[str, ...] = ENDS[self.end]
        if self.end != "quick_exit":
            left_out = (*left_out, "at_quick_exit")
        coming = [(BY_NAME[name], n) for name, n in self.moments if name not in left_out]
        return sum((getattr(moment, of) or moment.launches)(n) for moment, n in coming)

    @property
    def status(self) -> int:
        return -SIGNALLED[self.end] if self.end in SIGNALLED else 0


def generated(seed: int, hip: bool, own_process: bool = False, ends: Sequence[str] = tuple(ENDS)) -> Program:
    """Return the program of a seed. own_process: all its launches are in the process itself, in main or later, after it has used
    the GPU."""
    rng = random.Random(seed)
    left_out = {m.name for m in MOMENTS if m.forks or m.executes} | {"initialiser"} if own_process else set()
    able = [m for m in MOMENTS if not (hip and m.cuda_only) and m.name not in left_out]
    chosen = [rng.choice(able) for _ in range(rng.randint(1, 6))]
    names: list[str] = []
    for moment in chosen:
        if not (moment.once and moment.name in names):
            names.append(moment.name)
    if {"stays", "initialiser"} <= set(names):
        names.remove("stays")  # the library's initialiser runs once
    forks = [name for name in names if BY_NAME[name].forks]
    # First the initialiser: after other launches, its own are "before ready", because the thread with which the agent waits for them
    # cannot begin while the loader runs initialisers. Last what leaves the library loaded, so that the initialiser runs in each load.
    names.sort(key=lambda name: (not BY_NAME[name].forks, name != "initialiser", name == "stays"))
    if "initialiser" in names:
        names = [name for name in names if name not in ("load", "atexit")]
    elif not forks and not own_process and rng.random() < 0.25:
        names.insert(0, "early")
    if rng.random() < 0.2:
        names.append("at_quick_exit")
    end = rng.choice(ends)
    if end == "kill":  # what the GPU counts was not read
        names = [name for name in names if name not in ("loop", "choice")]
    return Program(tuple((name, rng.randint(1, 4)) for name in names), end)


def seeds(count: int, of_all: int = LONG) -> range:
    """Return the first `count` seeds, those that MOMENTS_SEEDS names, or with GPUBPF_LOOKS=all the first `of_all`."""
    if chosen := os.environ.get("MOMENTS_SEEDS"):
        first, number = map(int, chosen.split(":"))
        return range(first, first + number)
    return range(of_all if os.environ.get("GPUBPF_LOOKS") == "all" else count)


# --- the two devices ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """Where the programs run. environment: for a tool and its command."""

    hip: bool
    program: Path
    environment: Mapping[str, str]
    few: int  # programs that do not take long

    def run(self, tool: str, out: Path, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "tools" / f"{tool}.py", "--json", "-o", out, *words]
        return subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            timeout=600,
            env={**self.environment, **variables},
        )

    def measured_all(self, summary: Mapping[str, Any], launches: int) -> bool:
        """Return whether all launches were seen and instrumented. HIP's own kernels, which fill memory, are seen but do not match."""
        seen, matched, instrumented = (
            summary[f"launches_{word}"] for word in ("seen", "matched", "instrumented")
        )
        return self.accounted(summary, launches) and matched == instrumented == launches and seen >= matched

    def accounted(self, summary: Mapping[str, Any], launches: int) -> bool:
        """Return whether all launches were seen, and each that was not instrumented has a reason.

        If originals ran in bodies of conditional nodes, `graphs_unknown` says that their number is unknown."""
        seen, matched = (summary[f"launches_{word}"] for word in ("seen", "matched"))
        reasons = sum(summary["not_instrumented"].values())
        known = "graphs_unknown" not in summary
        return matched == summary["launches_instrumented"] + reasons and (
            matched == launches and (self.hip or seen == matched) if known else matched > 0
        )


@functools.cache
def _directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="gpubpf-moments-"))


@functools.cache
def cuda() -> Device:
    gpubpf_cuda.skip_without_cuda()
    place, options = _directory(), ("-std=c++17", "-Xcompiler", "-pthread,-fPIC")
    program = gpubpf_cuda.build(
        SOURCES / "moments.cu",
        place / "moments",
        SOURCES / "early.cpp",
        *options,
        f"-L{LIBRARIES}",
        "-l:libcuda.so.1",
    )
    part = gpubpf_cuda.build(SOURCES / "part.cu", place / "part.so", "-shared", *options)
    return Device(False, program, {**os.environ, "MOMENTS_PART": str(part)}, few=12)


@functools.cache
def hip() -> Device:
    compiler: list[str | Path] = [
        hipsim_device.hipcc(),
        "--offload-arch=gfx906",
        "-w",
        "-std=c++17",
        "-x",
        "hip",
    ]
    program, part = _directory() / "moments-hip", _directory() / "part-hip.so"
    platform = {**os.environ, "HIP_PLATFORM": "amd"}
    whole: list[str | Path] = [
        *compiler,
        SOURCES / "moments.cu",
        SOURCES / "early.cpp",
        "-o",
        program,
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(whole, check=True, env=platform)
    shared: list[str | Path] = [*compiler, SOURCES / "part.cu", "-shared", "-fPIC", "-o", part]
    subprocess.run(shared, check=True, env=platform)
    return Device(True, program, hipsim_device.environment(MOMENTS_PART=str(part)), few=2)


def script(device: Device, programs: Iterable[Program]) -> str:
    """Return a shell command that runs all programs and exits with 0 if each ended as it should."""
    lines = []
    for program in programs:
        status = 128 - program.status if program.status < 0 else 0
        command = shlex.join([str(device.program), *program.words])
        lines.append(f"{command}; [ $? = {status} ] || {{ echo wrong: {shlex.quote(command)}; exit 1; }}")
    return "ulimit -c 0\n" + "\n".join(lines)


def differences(device: Device, programs: Sequence[Program], tmp_path: Path) -> list[str]:
    """Measure all programs with one tool. Return what is wrong: "" if nothing is."""
    out = tmp_path / "out"
    out.unlink(missing_ok=True)
    done = device.run("threadhist", out, "--", "sh", "-c", script(device, programs))
    found = []
    if done.returncode or done.stdout:
        return [f"status {done.returncode}: {done.stdout}{done.stderr}"]
    summary = json.loads(out.read_text().splitlines()[-1])
    expected = sum(program.total("launches") for program in programs)
    if not device.measured_all(summary, expected):
        found.append(f"{expected} launches: {summary} {done.stderr}")
    return found


def check(device: Device, numbers: Iterable[int], tmp_path: Path) -> None:
    """Measure the programs of these seeds together. Where something is wrong, measure each alone to find which."""
    numbers = list(numbers)
    wrong = []
    for at in range(0, len(numbers), BATCH):
        batch = numbers[at : at + BATCH]
        if differences(device, [generated(seed, device.hip) for seed in batch], tmp_path):
            for seed in batch:
                program = generated(seed, device.hip)
                for line in differences(device, [program], tmp_path):
                    wrong.append(f"seed {seed}: {' '.join(program.words)}: {line}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.every(2)
@pytest.mark.parametrize("of", [cuda, hip])
def test_each_launch_is_measured(of: Callable[[], Device], tmp_path: Path) -> None:
    check(of(), seeds(of().few), tmp_path)


def unusual(device: Device) -> Program:
    return Program(tuple((m.name, 2) for m in UNUSUAL if not (device.hip and m.cuda_only)), "exit")


@pytest.mark.every(2)
@pytest.mark.parametrize("of", [cuda, hip])
def test_unusual_moments(of: Callable[[], Device], tmp_path: Path) -> None:
    device = of()
    assert not differences(device, [unusual(device)], tmp_path)
    assert not with_gate(device, unusual(device), tmp_path)


def with_gate(device: Device, program: Program, tmp_path: Path) -> str:
    """Attach to a program that has used the GPU, and let it launch. Return what is not accounted for: "" if nothing is."""
    out, gate = tmp_path / "out", tmp_path / "gate"
    gate.unlink(missing_ok=True)
    program_command = [str(device.program), *program.words]
    environment = {**device.environment, "MOMENTS_GATE": str(gate)}
    if not device.hip:
        environment["LD_LIBRARY_PATH"] = str(LIBRARIES)
    with subprocess.Popen(program_command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None and running.stdout.readline() == "ready\n"
        words = [sys.executable, str(ROOT / "tools/threadhist.py"), "--json", "-o", str(out)]
        with subprocess.Popen(
            [*words, "-p", str(running.pid)], stderr=subprocess.PIPE, text=True, env=device.environment
        ) as tool:
            assert tool.stderr is not None
            said = ""
            while "attached to" not in said:
                line = tool.stderr.readline()
                assert line, said
                said += line
            gate.touch()
            status = running.wait(60)
            said += tool.communicate(timeout=60)[1]
    summary = json.loads(out.read_text().splitlines()[-1])
    if not status and device.accounted(summary, program.total("launches")):
        return ""
    return (
        f"{' '.join(program.words)}: {program.total('launches')} launches, status {status}: {summary} {said}"
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("of", [cuda, hip])
def test_each_launch_after_an_attach_is_accounted_for(of: Callable[[], Device], tmp_path: Path) -> None:
    chosen = {*seeds(1, LONG // 10), 41}  # 41: a graph with bodies, often launched before copies are ready
    wrong = []
    for seed in sorted(chosen):
        program = generated(seed, of().hip, own_process=True, ends=("", "exit"))
        if line := with_gate(of(), program, tmp_path):
            wrong.append(f"seed {seed}: {line}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.whole_machine
@needs_bpf
@pytest.mark.every(2)
@pytest.mark.parametrize("of", [cuda, hip])
def test_each_call_is_seen_from_outside(of: Callable[[], Device], tmp_path: Path) -> None:
    """By probes in the Linux kernel, which count calls of libraries, not kernels in graphs."""
    device, out = of(), tmp_path / "out"
    programs = [generated(seed, device.hip) for seed in seeds(device.few // 2, LONG // 5)]
    for at in range(0, len(programs), BATCH):
        batch = programs[at : at + BATCH]
        command = ["sh", "-c", script(device, batch)]
        tool = "hipsnoop" if device.hip else "cudasnoop"
        simulated = command if device.hip else [sys.executable, "-m", "cudasim.launcher", "--", *command]
        done = device.run(tool, out, "--", *simulated)
        assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr
        records = [json.loads(line) for line in out.read_text().splitlines()]
        kernels = [r for r in records if r["type"] == "kernel" and "GraphLaunch" not in r["kernel"]]
        graphs = [r for r in records if r["type"] == "api" and r["api"].endswith("GraphLaunch")]
        assert (sum(r["count"] for r in kernels), sum(r["count"] for r in graphs)) == (
            sum(program.total("calls") for program in batch),
            sum(program.total("graphs") for program in batch),
        ), done.stderr
        assert records[-1]["lost"] == 0


def on_the_machine(device: Device, programs: Sequence[Program], tmp_path: Path) -> str:
    """Run programs while a tool watches every process. Return what is not accounted for: "" if nothing is."""
    out = tmp_path / "machine"
    environment = dict(device.environment)
    if not device.hip:
        environment["LD_LIBRARY_PATH"] = str(LIBRARIES)
    words = [sys.executable, str(ROOT / "tools/threadhist.py"), "--json", "-o", str(out)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=device.environment) as tool:
        assert tool.stderr is not None
        said = ""
        while "watching every process" not in said:
            line = tool.stderr.readline()
            assert line, said
            said += line
        done = subprocess.run(
            ["sh", "-c", script(device, programs)], stdout=subprocess.PIPE, text=True, env=environment
        )
        tool.send_signal(signal.SIGINT)
        said += tool.communicate(timeout=60)[1]
    summary = json.loads(out.read_text().splitlines()[-1])
    expected = sum(program.total("launches") for program in programs)
    if done.returncode or done.stdout:
        return f"status {done.returncode}: {done.stdout}{said}"
    matched = summary["launches_matched"]
    if summary["processes"]["missed"]:  # on a busy machine, a process may have ended before it was held
        expected = min(expected, matched)
    if device.accounted(summary, expected):
        return ""
    return f"{expected} launches: {summary} {said}"


@pytest.mark.own_processes
@needs_bpf
@pytest.mark.every(2)
@pytest.mark.parametrize("of", [cuda, hip])
def test_each_launch_on_the_machine_is_accounted_for(of: Callable[[], Device], tmp_path: Path) -> None:
    device = of()
    numbers = list(seeds(device.few // 2, LONG // 5))
    batches = [numbers[at : at + BATCH] for at in range(0, len(numbers), BATCH)]
    for batch in batches:
        found = on_the_machine(device, [generated(seed, device.hip) for seed in batch], tmp_path)
        assert not found, f"seeds {batch}: {found}"
