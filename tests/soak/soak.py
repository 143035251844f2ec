"""Watches programs with the tools, while programs, tools and the machine fail in every way; accounts for each launch.

Each cycle takes a tool, a way in (a command, a running process, every process), a way in which the program ends, and a fault. After it
the program must have computed what it should and must have ended as it would have alone; the tool must have said what it saw, in
records or text that add up, and why it did not see the rest (accounts.py); and nothing may be left. A cycle is one function of its
number, so a defect can be repeated.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accounts
import churn
import hostile
from accounts import CALLS, EXITS, LAUNCHES, Account, Defect, demand

from gpubpf.traced import device
from gpubpf_code import changed, wait_until_no_probe_is_in
from gpubpf_objects import build as build_object

ROOT = Path(__file__).resolve().parent.parent.parent
OPTIONS: dict[str, Sequence[str]] = {
    **dict.fromkeys(("threadhist", "kernelretsnoop", "memtrace", "launchlate"), ("--kernel", "soak*")),
    "cudasnoop": (),
    "gpucount": (LAUNCHES, EXITS),
    "gpudist": ("-C", f"{LAUNCHES}:u64:threads", f"{EXITS}:u32:lane % 2"),
    "gpurun": (),
    "hipsnoop": (),
    "gputrace": (f'{LAUNCHES} "%lu", threads', f'{EXITS} (lane == 0) "%u", block'),
}
TOOLS = tuple(OPTIONS)
OBJECT = """
MAP(ends, GPU_ARRAY, u32, u64, 1);
SEC("kretprobe/_Z8soak_addPii") int on_end(void *ctx) {
    u32 zero = 0;
    u64 *sum = bpf_map_lookup_elem(&ends, &zero);
    if (sum)
        __sync_fetch_and_add(sum, 1);
    return 0;
}
SEC("kretprobe/_Z9soak_spinPVi") int never(void *ctx) { return 0; }
"""
FORMS = ("json", "json", "text")
MACHINE_CYCLES = 20  # so many that measure every process and have no fault must together have seen
MACHINE_SEEN = 0.5  # of the launches that are due
WAYS_IN = ("command", "process", "machine")
ENDS = "return exit _exit quick_exit abort kill running threads forks execs".split()
STATUS = {"abort": 128 + signal.SIGABRT, "kill": 128 + signal.SIGKILL}  # of a program that ended so; else 0
_CGROUPS = Path("/sys/fs/cgroup")
_VERSION_1 = (_CGROUPS / "memory").is_dir()  # of control groups
# Limits the memory of a tool.
MEMORY = _CGROUPS / ("memory/gpubpf-soak" if _VERSION_1 else "gpubpf-soak")
MEMORY_LIMIT = MEMORY / ("memory.limit_in_bytes" if _VERSION_1 else "memory.max")
LIMIT = 120.0  # seconds; what takes longer hangs
BUSY_THREADS = 2  # of lives.cu, that launch without a pause

# What goes wrong. With a fault of the tool, its records may be missing; with one of the program, the agent may be refused.
OF_TOOL = (
    "killed",
    "terminated",
    "interrupted",
    "stopped tool",
    "full output",
    "few files of the tool",
    "full disk",
    "little memory of the tool",  # the kernel kills it, or one of its children
)
MILD = ("interrupted", "stopped tool", "full disk")  # the tool ends as without the fault
OF_PROGRAM = (
    "stopped program",
    "few files of the program",
    "small files of the program",  # a write beyond the limit sends SIGXFSZ
    "full /dev/shm",
    "little memory of the program",
)
OF_BOTH = ("none", "none", "second tool", "clock steps")


@dataclass(frozen=True)
class Cycle:
    number: int
    tool: str
    way_in: str
    end: str
    fault: str
    launches: int
    moment: float  # seconds after which the fault happens
    form: str = "json"

    def __str__(self) -> str:
        return f"{self.number}: {self.tool} ({self.form}), {self.way_in}, {self.end}, {self.fault}"


def cycle_of(number: int, seed: int, alone: bool, tools: Sequence[str] = TOOLS) -> Cycle:
    """Return a cycle. `alone`: nothing else on this machine is disturbed by what concerns all of it."""
    chance = random.Random(seed * 1_000_003 + number)
    faults = [f for f in OF_TOOL + OF_PROGRAM + OF_BOTH if alone or f != "clock steps"]
    way_in = chance.choice(WAYS_IN if alone else WAYS_IN[:2])
    if way_in == "command":  # the program would have as little memory as the tool
        faults.remove("little memory of the tool")
    return Cycle(
        number=number,
        tool=chance.choice(tools),
        way_in=way_in,
        end="serve" if way_in == "process" else chance.choice(ENDS),
        fault=chance.choice(faults),
        launches=chance.choice((1, 10, 200, 2000)),
        moment=chance.choice((0.2, 0.4, 0.8, 1.5))
        * chance.uniform(0.5, 1.5),  # at first, Python itself would answer a signal
        form=chance.choice(FORMS),
    )


@dataclass
class Scene:
    """The files and processes of one cycle."""

    cycle: Cycle
    program: Path
    place: Path

    def __post_init__(self) -> None:
        self.lives, self.out, self.err = (self.place / name for name in ("lives", "out", "err"))
        self.processes: list[subprocess.Popen[str]] = []
        self.due: int | None = None  # the launches that the tool has to see; None: all that the program made
        self.live = False  # whether the tool measured when the fault came
        self.environment = {
            **os.environ,
            "SOAK_LIVES": str(self.lives),
            "CUDASIM_HOSTILE": "1",
            "HIPSIM_HOSTILE": "1",
            "PYTHONPATH": str(ROOT / "lib"),
            "PYTHONFAULTHANDLER": "1",  # for `stacks`
        }

    def start(self, command: Sequence[object], **options: Any) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            [str(c) for c in command], text=True, env=self.environment, cwd=self.place, **options
        )
        self.processes.append(started)
        return started

    def tool(self, *arguments: object) -> subprocess.Popen[str]:
        cycle = self.cycle
        command: list[object] = [sys.executable, ROOT / "tools" / f"{cycle.tool}.py", *OPTIONS[cycle.tool]]
        if cycle.tool == "gpurun":
            command.append(self.program.with_name("ends.o"))
        if cycle.form == "json":
            command.append("--json")
        if cycle.tool not in CALLS:
            command += ["--device", "sim"]
        if cycle.fault == "full output":
            command += ["-o", "/dev/full"]
        if cycle.fault == "few files of the tool":
            needed = 30 if cycle.tool in CALLS else 20  # about so many files does the tool open
            command = ["prlimit", f"--nofile={20 + int(cycle.moment * needed)}", *command]
        if cycle.fault == "full disk":
            caches = self.place / "caches"
            caches.mkdir()
            self.environment["XDG_CACHE_HOME"] = str(caches)
            mounts = f'mount -t tmpfs -o size=16k tmpfs "{caches}" && exec "$@"'
            command = ["unshare", "-m", "sh", "-c", mounts, "sh", *command]
        if cycle.fault == "little memory of the tool":
            MEMORY.mkdir(exist_ok=True)
            MEMORY_LIMIT.write_text(str(int(cycle.moment * 60) << 20))
            command = ["sh", "-c", f'echo $$ > "{MEMORY}/cgroup.procs" && exec "$@"', "sh", *command]
        with self.out.open("w") as out, self.err.open("w") as err:
            return self.start([*command, *arguments], stdout=out, stderr=err)

    def target(self, *arguments: object) -> list[object]:
        """Return the program's command line. A tool with a command chooses the embedded device itself; cudasnoop does not."""
        fault, command = self.cycle.fault, [self.program, *arguments]
        if self.cycle.way_in != "command" or self.cycle.tool == "cudasnoop":
            device = "hipsim" if self.cycle.tool == "hipsnoop" else "cudasim"
            command = [sys.executable, "-P", "-m", device, "--", *command]
        if fault == "few files of the program":
            return ["prlimit", f"--nofile={12 + int(self.cycle.moment * 20)}", *command]
        if fault == "small files of the program":
            return ["prlimit", f"--fsize={int(self.cycle.moment * 2**23)}", *command]
        if fault == "little memory of the program":
            return ["prlimit", "--memlock=65536", "--stack=1048576", *command]
        if fault == "full /dev/shm":
            return [
                "unshare",
                "-m",
                "sh",
                "-c",
                'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$@"',
                "sh",
                *command,
            ]
        return list(command)

    def records(self) -> list[dict[str, Any]]:
        """Return the tool's records."""
        text = self.out.read_text() if self.out.exists() else ""
        return accounts.read_records(text, self.cycle.fault in OF_TOOL)

    def wait_for(
        self, what: Callable[[], object], why: str, tool: subprocess.Popen[str] | None = None
    ) -> bool:
        """Wait for something. Return False if the tool has ended meanwhile."""
        until = time.monotonic() + LIMIT
        while not what():
            if tool is not None and tool.poll() is not None:
                return bool(what())
            demand(time.monotonic() < until, f"hangs: {why}")
            time.sleep(0.02)
        return True

    def made(self) -> list[tuple[int, int]]:
        lines = self.lives.read_text().splitlines() if self.lives.exists() else []
        return [(int(pid), int(launches)) for pid, launches in (line.split() for line in lines)]

    def last_said(self) -> str:
        """Return the last line of standard error, without the tool's name."""
        said = self.err.read_text().splitlines()
        return said[-1].removeprefix(f"{self.cycle.tool}: ") if said else ""

    def is_live(self) -> bool:
        """Return whether the tool has said that it measures."""
        if self.cycle.form == "json":
            return any(r["type"] in ("attached", "watching") and not r.get("waiting") for r in self.records())
        said = self.err.read_text() if self.err.exists() else ""
        return "watching every process\n" in said or re.search(r"attached to \d+ \(.*\)\n", said) is not None


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [
            int(child)
            for file in Path(f"/proc/{pid}/task").glob("*/children")
            for child in file.read_text().split()
        ]
    return []


def descendants(pid: int) -> list[int]:
    below = children_of(pid)
    return [*below, *(d for child in below for d in descendants(child))]


def is_program(pid: int, program: Path) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/exe").readlink() == program
    return False


@contextlib.contextmanager
def stepping_clock() -> Iterator[None]:
    """Set the machine's clock two seconds back and forth."""
    steps = []

    def step(by: float) -> None:
        time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME) + by)
        steps.append(by)

    try:
        step(2)
        time.sleep(0.1)
        step(-4)
        yield
    finally:
        step(-sum(steps))


def disturb(scene: Scene, tool: subprocess.Popen[str], launched: Callable[[], int]) -> None:
    """Make the fault happen that comes at a moment. `launched` returns the launches up to then that the tool has to see."""
    cycle = scene.cycle
    signals = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM, "interrupted": signal.SIGINT}
    with contextlib.suppress(subprocess.TimeoutExpired):
        tool.wait(cycle.moment)
    if cycle.fault in signals:
        scene.live = scene.is_live()
        scene.due = launched() if scene.due is None else scene.due
        tool.send_signal(signals[cycle.fault])
    elif cycle.fault == "stopped tool":
        tool.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        tool.send_signal(signal.SIGCONT)
    elif cycle.fault == "stopped program":
        pids = [pid for pid in descendants(os.getpid()) if is_program(pid, scene.program)]
        for one in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, one)
            time.sleep(0.3)
    elif cycle.fault == "clock steps":
        with stepping_clock():
            time.sleep(0.2)


def stacks(scene: Scene) -> str:
    """Return where the threads of all processes are, and end the tool."""
    told = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            told += [f"-- {pid}: {name}", Path(f"/proc/{pid}/wchan").read_text()]
            if is_program(pid, scene.program) and shutil.which("eu-stack"):
                command = ["eu-stack", "-p", str(pid)]
                told.append(subprocess.run(command, capture_output=True, text=True, timeout=20).stdout)
            elif "python" in Path(f"/proc/{pid}/exe").readlink().name:
                os.kill(pid, signal.SIGABRT)
    time.sleep(1)
    return "\n  ".join([*told, scene.err.read_text()])


def ended(process: subprocess.Popen[str], what: str) -> int:
    try:
        return process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        raise Defect(f"hangs: {what} does not end") from None


def watch_command(scene: Scene) -> None:
    cycle = scene.cycle
    tool = scene.tool("--", *scene.target(cycle.end, cycle.launches))
    if cycle.fault == "second tool":
        begun = scene.wait_for(lambda: programs(scene), "the program does not begin", tool)
        for pid in programs(scene) if begun else ():
            second_tool(scene, pid)
    disturb(scene, tool, lambda: sum(launches for _, launches in scene.made()))
    status = ended(tool, "the tool")
    allowed = {STATUS.get(cycle.end, 0)}
    if may_end_anyhow(scene):
        allowed |= ANYHOW
    elif re.match(r"no (kernel was launched|traced process launched a kernel)", scene.last_said()):
        allowed = {STATUS.get(cycle.end, 1)}
    if cycle.fault == "interrupted":
        allowed |= TWICE
    demand(status in allowed, f"status {status}, not that of the program")


TWICE = {130, -signal.SIGINT}  # the second SIGINT ends the tool at once
ANYHOW = {0, 1, 130, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL}


def may_end_anyhow(scene: Scene) -> bool:
    """Return whether the fault may end the tool with any of the statuses ANYHOW."""
    fault = scene.cycle.fault
    return (fault == "interrupted" and not scene.live) or (fault in OF_TOOL and fault not in MILD)


def ended_well(tool: subprocess.Popen[str], scene: Scene) -> None:
    """Wait for a tool that has no command. Raise Defect if its status does not agree with what it said last."""
    status, last = ended(tool, "the tool"), scene.last_said()
    failed = accounts.is_ending(last, conditions_of(scene)) or accounts.NO_KERNEL.match(last)
    allowed = ANYHOW if may_end_anyhow(scene) else {0, 1} if failed else {0}
    if scene.cycle.fault == "interrupted":
        allowed |= TWICE
    demand(status in allowed, f"status {status} of the tool, which said last: {last}")


def watch_machine(scene: Scene) -> None:
    cycle = scene.cycle
    tool = scene.tool()
    if cycle.fault in ("killed", "terminated", "interrupted") and cycle.moment < 0.3:
        disturb(scene, tool, lambda: 0)
    scene.wait_for(scene.is_live, "the tool does not begin to watch", tool)
    program = scene.start(scene.target(cycle.end, cycle.launches), stderr=subprocess.DEVNULL)
    disturb(scene, tool, lambda: sum(launches for _, launches in scene.made()))
    status = ended(program, "the program")
    expected = STATUS.get(cycle.end, 0)
    demand(
        status == (expected if expected < 128 else 128 - expected), f"the program ended with status {status}"
    )
    tool.send_signal(signal.SIGINT)
    ended_well(tool, scene)


def watch_process(scene: Scene) -> None:
    """A program that waits for its next line when the tool comes, so that the number of its launches is known."""
    cycle = scene.cycle
    complaints = (scene.place / "complaints").open("w+")
    program = scene.start(
        scene.target("serve"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints
    )
    assert program.stdin is not None and program.stdout is not None

    def say(line: str) -> str:
        assert program.stdin is not None and program.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            program.stdin.write(line + "\n")
            program.stdin.flush()
            answer = program.stdout.readline()
        if not answer:
            status = ended(program, "the program")
            complaints.seek(0)
            raise Defect(f"the program ended with status {status} before {line!r}: {complaints.read()}")
        return answer

    demand(program.stdout.readline() == "ready\n", "the program did not begin")
    pid = program.pid  # cudasim and the other wrappers execute the program in their own process
    busy = cycle.launches > 10 and cycle.fault in OF_TOOL
    if busy:
        say("run")
    before = int(say("count"))
    tool = scene.tool("-p", pid)
    if cycle.fault == "second tool":
        second_tool(scene, pid)
    if cycle.fault in OF_TOOL and cycle.moment < 0.3:
        disturb(scene, tool, lambda: 0)
    live = scene.wait_for(scene.is_live, "the tool does not attach", tool)
    # A launch counts when its call has returned. When the tool came, each thread may have been in a call.
    attached = int(say("count")) + (BUSY_THREADS if busy else 0)
    if not busy:
        say(f"go {cycle.launches // 2}")
    if live:
        disturb(scene, tool, lambda: max(0, int(say("count")) - attached))
    after = int(say("stop")) if busy else int(say(f"go {cycle.launches - cycle.launches // 2}"))
    if scene.due is None:
        scene.due = max(0, after - attached)
    if tool.poll() is None:
        tool.send_signal(signal.SIGINT)
    ended_well(tool, scene)
    for other in scene.processes[2:]:
        ended(other, "the second tool")
    scene.wait_for(
        lambda: changed(pid, r"/lib(cuda|c|amdhip64|hsa-runtime64)\.so") == 0,
        "the driver's code stays changed",
    )
    demand(int(say("go 3")) == after + 3, "launches are lost")
    with contextlib.suppress(OSError):
        program.stdin.close()
    demand(ended(program, "the program") == 0, f"the program ended with status {program.returncode}")
    scene.lives.write_text(f"{pid} {after - before}\n")


def programs(scene: Scene) -> list[int]:
    return [pid for pid in descendants(os.getpid()) if is_program(pid, scene.program)]


def second_tool(scene: Scene, pid: int) -> None:
    """Let another tool measure a process, too."""
    other = [sys.executable, ROOT / "tools" / "threadhist.py", "-p", pid, "-d", "0.5"]
    scene.start(other, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


WATCH = {"command": watch_command, "machine": watch_machine, "process": watch_process}


def account(scene: Scene) -> Account:
    """Compare what the program did with what the tool said."""
    cycle, tool = scene.cycle, scene.processes[scene.cycle.way_in == "process"]
    standard_error = scene.err.read_text()
    early = cycle.fault in ("terminated", "interrupted") and not scene.live
    made = scene.made()
    if early and standard_error.endswith("\nKeyboardInterrupt\n") and str(ROOT) not in standard_error:
        why = "Python was interrupted before the tool began"
        return Account(sum(launches for _, launches in made), scene.due or 0, None, [why])
    demand("Traceback" not in standard_error and "rror: [Errno" not in standard_error, "a traceback")
    prefix = f"{cycle.tool}: "
    lines = [line.removeprefix(prefix) for line in standard_error.splitlines()]
    for line in standard_error.splitlines():
        demand(line.startswith(prefix), f"not a notice: {line}")
    if cycle.form == "json":
        said = accounts.from_records(cycle.tool, scene.records())
    else:
        said = accounts.from_text(cycle.tool, scene.out.read_text())
    due = sum(launches for _, launches in made) if scene.due is None else scene.due
    by_kernel = cycle.fault in ("killed", "little memory of the tool") and tool.returncode == -signal.SIGKILL
    if said.seen is None and (by_kernel or (early and not due)):
        why = (
            f"the tool was {cycle.fault}, and had not begun"
            if early
            else f"the tool was killed ({cycle.fault})"
        )
        return Account(sum(launches for _, launches in made), due, None, [why])
    return accounts.account(said, lines, made, due, conditions_of(scene))


def conditions_of(scene: Scene) -> list[str]:
    """Return what `accounts` calls conditions."""
    cycle = scene.cycle
    found = [cycle.tool, cycle.fault, cycle.way_in, cycle.end]
    if cycle.way_in == "command" and cycle.fault == "few files of the tool":
        found.append("few files of the program")  # it has the tool's limit
    return found


def run(cycle: Cycle, program: Path, place: Path) -> Account:
    """Go through one cycle. Raise Defect."""
    if cycle.tool == "hipsnoop":
        program = program.with_name("lives_hip")
    scene = Scene(cycle, program, place)
    try:
        WATCH[cycle.way_in](scene)
        # A tool that was killed or ended by a signal leaves its command to itself, or ends it.
        scene.wait_for(
            lambda: not any(is_program(p, program) for p in descendants(os.getpid())),
            "the program does not end",
        )
        return account(scene)
    except Defect as defect:
        if str(defect).startswith("hangs"):
            raise Defect(f"{defect}\n  {stacks(scene)}") from None
        raise
    finally:
        live = [process.pid for process in scene.processes if process.poll() is None]
        own = [one for pid in live for one in (pid, *descendants(pid))]
        orphans = [pid for pid in descendants(os.getpid()) if is_program(pid, program)]
        for pid in own + orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in scene.processes:
            process.wait()


def build(place: Path) -> Path:
    program = place / "lives"
    source = Path(__file__).with_name("lives.cu")
    subprocess.run(["nvcc", "-std=c++17", "-O2", "-cudart", "shared", "-o", program, source], check=True)
    # The embedded device translates the kernels when they are first launched. With few files, its compiler would fail.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib"), "SOAK_LIVES": os.devnull}
    command = [sys.executable, "-P", "-m", "cudasim", "--", program, "running", "1"]
    subprocess.run(command, check=True, env=environment)
    return program


def build_others(program: Path) -> Sequence[str]:
    """Build what gpurun and hipsnoop need. Return the tools for which that was possible."""
    build_object(OBJECT, program.with_name("ends.o"))
    if not shutil.which("hipcc"):
        return [tool for tool in TOOLS if tool != "hipsnoop"]
    source, amd = Path(__file__).with_name("lives.cu"), {**os.environ, "HIP_PLATFORM": "amd"}
    options = ("--offload-arch=gfx90a", "-w", "-std=c++17", "-O2", "-x", "hip", source, "-lpthread", "-ldl")
    subprocess.run(["hipcc", *options, "-o", program.with_name("lives_hip")], check=True, env=amd)
    return TOOLS


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent has ended (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    import ctypes

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60, help="how long to run (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="number that decides all cycles (default: 1)")
    parser.add_argument("--cycle", type=int, help="only this one, with all that the tool printed")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help='only cycles whose line has this text, such as "few files"'
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="also watch every process, and set the machine's clock back and forth: do this where nothing else runs",
    )
    parser.add_argument(
        "--hostile",
        action="store_true",
        help="instead, measure every process while a hostile user does what it can (hostile.py); requires root",
    )
    parser.add_argument(
        "--exporter",
        type=float,
        metavar="S",
        help="instead, let a program come and go every S seconds under gpubpf exporter (churn.py); requires root",
    )
    parser.add_argument("--verbose", action="store_true", help="print the account of each cycle")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the results to FILE, as JSON")
    args = parser.parse_args()
    adopt_orphans()
    # If this runs in the background, the tools would inherit that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    figures: collections.Counter[str] = collections.Counter()
    faults: collections.Counter[str] = collections.Counter()
    explained: collections.Counter[str] = collections.Counter()
    slowest: list[tuple[float, str]] = []
    if args.exporter:
        return churn.main(args.minutes, args.exporter, args.report)
    if args.hostile:
        return hostile.run(args.minutes, build, args.report)
    with tempfile.TemporaryDirectory() as directory:
        program = build(Path(directory))
        tools = build_others(program)
        until = time.monotonic() + args.minutes * 60
        number = args.cycle or 0
        while args.cycle is not None or time.monotonic() < until:
            cycle = cycle_of(number, args.seed, args.alone, tools)
            if args.only not in str(cycle):
                number += 1
                continue
            place = Path(directory) / str(number)
            place.mkdir()
            wait_until_no_probe_is_in(device.LIBRARIES / "libcuda.so.1")
            began = time.monotonic()
            try:
                found = run(cycle, program, place)
            except Exception as defect:
                if not isinstance(defect, Defect):
                    traceback.print_exc(file=sys.stdout)
                figures["defects"] += 1
                said = (place / "err").read_text() if (place / "err").exists() else ""
                print(f"cycle {cycle}\n  {defect}\n  " + "\n  ".join(said.splitlines()[-8:]), flush=True)
                if args.cycle is not None and (place / "out").exists():
                    print((place / "out").read_text())
            else:
                figures["launches"] += found.made
                figures["launches seen"] += found.seen or 0
                figures["launches due"] += found.due
                if cycle.way_in == "machine" and cycle.fault == "none":
                    figures["machine, no fault: cycles"] += 1
                    figures["machine, no fault: due"] += found.due
                    figures["machine, no fault: due and seen"] += min(found.due, found.seen or 0)
                if found.explained:
                    figures["launches explained"] += found.made - (found.seen or 0)
                    figures["due, but explained"] += max(0, found.due - (found.seen or 0))
                    explained[re.sub(r"\d+", "N", found.explained[-1])[:100]] += 1
                if args.verbose or args.cycle is not None:
                    print(cycle, found, sep="\n  ", flush=True)
                if args.cycle is not None:
                    print((place / "err").read_text())
            figures["cycles"] += 1
            slowest = sorted([*slowest, (round(time.monotonic() - began, 1), str(cycle))])[-3:]
            faults[cycle.fault] += 1
            with contextlib.suppress(ChildProcessError):  # orphans that this process has adopted
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            shutil.rmtree(place, ignore_errors=True)
            number += 1
            if args.cycle is not None:
                break
    # With every process measured, each cycle may miss those that end early. A tool that missed all of them would be wrong.
    due, seen = (figures[f"machine, no fault: {what}"] for what in ("due", "due and seen"))
    if figures["machine, no fault: cycles"] >= MACHINE_CYCLES and seen < due * MACHINE_SEEN:
        figures["defects"] += 1
        print(f"with every process measured, and no fault: only {seen} launches seen of {due}")
    result = {
        "seed": args.seed,
        "figures": dict(figures),
        "faults": dict(faults),
        "explained": dict(explained),
        "slowest, in s": slowest,
    }
    if args.report:
        args.report.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if figures["defects"] else 0


if __name__ == "__main__":
    sys.exit(main())
