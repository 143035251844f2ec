#!/usr/bin/env python3
"""How many instructions programs execute with and without the tools' probes. It stands in for slowdown until a GPU has measured it.

    python3 benchmarks/executed.py --report benchmarks/results/executed.md polybench=DIRECTORY 'hecbench=DIRECTORY:[ab]*'

    python3 benchmarks/executed.py --json before.jsonl workloads          in another checkout: the file of a version before
    python3 benchmarks/executed.py --before before.jsonl workloads        what became of it
    python3 benchmarks/executed.py --only 'workloads/t*' workloads        without examples/, and without most of these

Measured are the programs of examples/, and those of the suites that are named, with a checkout of each (docs/conformance.md), or of
`workloads`: the kernels that script/gpu-check times on a GPU (script/gpu/programs/workloads.cu), with sizes for this device. The
embedded device counts how often each basic block of the PTX runs (CUDASIM_COUNT): that is exact. ptxas assembles the same text with a
line number for each PTX instruction, so nvdisasm shows which machine instructions a block became: with both, the machine instructions
that warps execute are estimated. Everything is counted, and nothing is timed, so the machine need not be idle.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "lib"), str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from conformance import build  # noqa: E402
from conformance.tools import APIS, finished, under  # noqa: E402
from gpubpf.errors import Error  # noqa: E402
from gpubpf.ptx.module import PtxInstruction, type_size  # noqa: E402
from gpubpf.ptx.parser import parse  # noqa: E402
from gpubpf_sass import assembled, nvdisasm, registers  # noqa: E402

TOOLS = ("threadhist", "kernelretsnoop", "launchlate", "memtrace")
INSIDE = ("warpdiv", "barrierlate", "nansnoop", "gpuhang")  # measured on request: with --tools
EVERY = (*TOOLS, *INSIDE)
REAL_CLOCK = ("kernelretsnoop",)  # on the virtual clock, it records each exit as with -e
TARGET = "sm_90"
LIMIT = 120.0  # seconds for a program alone; five times as long under a tool
WORKLOADS = {  # sizes, launches and rounds
    "triad": "131072 2 1",
    "sums": "131072 2 1",
    "softmax": "65536 2 1",
    "polynomial": "32768 2 1",
    "tiled": "64 2 1",
}
OWN = "gpubpf_clock"  # a kernel of the tools, which is no part of the program
ARGUMENTS = {"vectoradd": ["100000", "256", "64", "3"], "imbalance": ["32", "24"], "matmul": ["64"]}
MOST_BLOCKS = 32  # of a multiprocessor
MOST_WARPS = {"sm_75": 32, "sm_80, sm_90, sm_100": 64}  # the same, with 65,536 registers
CLASSES = (16, 24, 32, 48, None)  # of kernels, by their registers
WARPS = 8  # of a block, where the warps that fit are computed
# Multiprocessors, clock in GHz, memory in GB/s, from NVIDIA's data sheets. A multiprocessor issues four instructions per clock.
GPUS = {"A100 80 GB": (108, 1.41, 2039), "H200": (132, 1.98, 4800)}
SECTOR = 32  # bytes that an atomic moves at least
_MEMORY = re.compile(r"(?:LD|ST|RED|ATOM|BAR)")
_OUTSIDE = ("shared", "local", "param", "const")  # spaces other than global memory


@dataclass(frozen=True)
class Block:
    """Executions of a basic block: by warps, by lanes. lines: of its instructions, in the PTX text."""

    warps: int
    lanes: int
    function: str
    lines: tuple[int, ...]


@dataclass(frozen=True)
class Executed:
    """What a program's kernels executed: PTX instructions by lanes and by warps, machine instructions by warps (estimated), bytes
    that lanes loaded and stored in global memory, atomic operations of lanes; starts of kernels, and accesses to memory."""

    lanes: int = 0
    warps: int = 0
    machine: float = 0.0
    bytes: int = 0
    atomics: int = 0
    spilled: int = 0  # bytes, of all kernels
    starts: int = 0  # warps
    accesses: int = 0  # of warps

    def __add__(self, other: Executed) -> Executed:
        return Executed(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


@dataclass(frozen=True)
class Result:
    """One program under one tool. registers: of each kernel, before and after."""

    program: str
    tool: str
    alone: Executed
    probed: Executed
    registers: Mapping[str, tuple[int, int]]
    worst: str  # the kernel with the most instructions added, in relation to its own

    @property
    def ratio(self) -> float:
        """Machine instructions with the probes, in relation to those without."""
        return self.probed.machine / self.alone.machine

    @property
    def own(self) -> tuple[float, float]:
        """The program's own machine instructions per warp, and per access of a warp to memory."""
        own = self.alone
        return own.machine / max(own.starts, 1), own.machine / max(own.accesses, 1)

    @property
    def more_registers(self) -> int:
        return max((after - before for before, after in self.registers.values()), default=0)

    def estimate(self, gpu: str) -> float:
        """How many times as long the kernels take if either issue slots or memory limit them."""
        multiprocessors, clock, bandwidth = GPUS[gpu]

        def seconds(executed: Executed) -> float:
            issued = executed.machine / (multiprocessors * 4 * clock * 1e9)
            moved = (executed.bytes + executed.atomics * SECTOR) / (bandwidth * 1e9)
            return max(issued, moved)

        return seconds(self.probed) / seconds(self.alone)


class Text:
    """A PTX text that ran, with what ptxas makes of it."""

    def __init__(self, file: Path) -> None:
        self.text = file.read_text()
        self.module = parse(self.text)
        self.at = {
            s.line: s
            for f in self.module.functions.values()
            for s in f.body or ()
            if isinstance(s, PtxInstruction)
        }
        self.kernels = {f.name for f in self.module.functions.values() if f.kind == "entry" and f.defined}

    @cached_property
    def _numbered(self) -> str:
        """The text with a line number for the debugger before each instruction, and no others."""
        text = re.sub(
            r"\.section\s+\.debug\w*\s*\{.*?\}", lambda m: "\n" * m[0].count("\n"), self.text, flags=re.DOTALL
        )
        lines = ["" if re.match(r"\s*\.(?:loc|file)\s", line) else line for line in text.split("\n")]
        for number in sorted(self.at, reverse=True):
            lines.insert(number - 1, f".loc 1 {number} 0")
        return "\n".join(lines).replace(".address_size 64", '.address_size 64\n.file 1 "k.ptx"', 1)

    @cached_property
    def _assembled(self) -> tuple[dict[int, list[list[str]]], dict[str, int], int]:
        """By line, the machine instructions in each kernel or function that has it; registers by kernel; bytes spilled."""
        with tempfile.TemporaryDirectory() as place:
            cubin, said = assembled(self._numbered, TARGET, Path(place), "-lineinfo")
            listing = subprocess.run(
                [nvdisasm(), "-g", "-c", str(cubin)], capture_output=True, text=True, check=True
            ).stdout
        found: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        section, line = "", 0
        for row in listing.splitlines():
            if named := re.match(r"\s*\.section\s+\.text\.([\w$]+)", row):
                section, line = named[1], 0
            elif row.startswith("$__internal"):  # a function of ptxas, for divisions of unusual numbers
                line = 0
            elif told := re.match(r'\s*//## File ".*?", line (\d+)', row):
                line = int(told[1])
            elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(?!NOP)(\w+)", row):
                found[line][section].append(code[1])
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
        return {n: list(by.values()) for n, by in found.items()}, registers(said), spilled

    @property
    def registers(self) -> dict[str, int]:
        return self._assembled[1]

    @property
    def spilled(self) -> int:
        return self._assembled[2]

    def machine(self, lines: Sequence[int]) -> float:
        """How many machine instructions a warp executes for these lines, which are one basic block's, on average.

        ptxas may put copies of a block into callers and unrolled loops: an instruction for memory tells how many there are."""
        found = self._assembled[0]
        copies: list[int] = []
        for number in lines:
            there = sum(bool(_MEMORY.match(code)) for codes in found.get(number, ()) for code in codes)
            if there and self._moves_memory(number):
                copies.append(there)
        each = min(copies, default=max((len(found.get(n, ())) for n in lines), default=1)) or 1
        return sum(len(codes) for n in lines for codes in found.get(n, ())) / each

    def _moves_memory(self, line: int) -> bool:
        i = self.at.get(line)
        return self.accesses(line) or (i is not None and i.opcode in ("bar", "barrier"))

    def accesses(self, line: int) -> bool:
        """Return whether the instruction accesses memory."""
        i = self.at.get(line)
        return i is not None and i.opcode in ("ld", "st", "red", "atom") and "param" not in i.modifiers

    def moved(self, line: int) -> tuple[int, int]:
        """Return the bytes that a lane moves between registers and global memory, and its atomic operations."""
        i = self.at.get(line)
        if (
            i is None
            or i.opcode not in ("ld", "st", "red", "atom")
            or any(s in i.modifiers for s in _OUTSIDE)
        ):
            return 0, 0
        if i.opcode in ("red", "atom"):
            return 0, 1
        count = next((int(m[1:]) for m in i.modifiers if re.fullmatch(r"v\d", m)), 1)
        return type_size(i.modifiers[-1]) * count, 0


def read(place: Path, texts: dict[str, Text]) -> Iterator[tuple[Text, Block]]:
    """Yield the blocks that a program has executed, with the text that each is in."""
    for file in sorted(place.glob("*.counts")):
        name, *rows = file.read_text().splitlines()
        for row in rows:
            warps, lanes, function, *lines = row.split()
            if function != OWN:
                if name not in texts:
                    texts[name] = Text(place / name)
                yield texts[name], Block(int(warps), int(lanes), function, tuple(map(int, lines)))


def executed(place: Path, texts: dict[str, Text]) -> tuple[Executed, dict[str, Executed], dict[str, int]]:
    """Return what all functions of a program executed, the same by function, and the registers of its kernels."""
    by: dict[str, Executed] = defaultdict(Executed)
    used: dict[str, int] = {}
    # The warps that ran each block of a kernel, by the block's first line: all run the first one.
    begun: dict[tuple[Text, str], Counter[int]] = defaultdict(Counter)
    for text, block in read(place, texts):
        moved = [text.moved(line) for line in block.lines]
        by[block.function] += Executed(
            lanes=block.lanes * len(block.lines),
            warps=block.warps * len(block.lines),
            machine=block.warps * text.machine(block.lines),
            bytes=block.lanes * sum(size for size, _ in moved),
            atomics=block.lanes * sum(count for _, count in moved),
            accesses=block.warps * sum(text.accesses(line) for line in block.lines),
        )
        if block.function in text.kernels:
            used[block.function] = max(used.get(block.function, 0), text.registers[block.function])
            begun[text, block.function][min(block.lines, default=0)] += block.warps
    spilled = sum(text.spilled for text in {text for text, _ in begun})
    starts = sum(warps[min(warps)] for warps in begun.values())
    whole = sum(by.values(), Executed(spilled=spilled, starts=starts))
    return whole, dict(by), used


def programs(suites: Sequence[str]) -> Iterator[tuple[str, list[str], Path | None, Mapping[str, str]]]:
    """Yield the name, command, directory and environment of each program that was asked for and can be built."""
    for file in sorted((ROOT / "examples").glob("*.cu")):
        if (program := file.with_suffix("")).exists():
            yield f"examples/{file.stem}", [str(program), *ARGUMENTS.get(file.stem, [])], None, {}
    if "workloads" in suites:
        program = workloads()
        for work, sizes in WORKLOADS.items():
            yield f"workloads/{work}", [str(program), work, *sizes.split()], None, {}
    for suite in suites:
        if suite == "workloads":
            continue
        name, _, rest = suite.partition("=")
        where, _, only = rest.partition(":")
        checkout = Path(where).resolve()
        found = build.suite(build.LISTS / f"{name}.toml")
        for program in found.programs:
            if not fnmatch.fnmatch(program.name, only or "*"):
                continue
            command, reason = build.built(program, checkout, build.commit(checkout), build.BUILT / name)
            if not reason:
                yield f"{name}/{program.name}", command, Path(command[0]).parent, program.environment


def workloads() -> Path:
    """Build the kernels that script/gpu-check times, unless they are there."""
    source = ROOT / "script/gpu/programs/workloads.cu"
    program = build.BUILT.parent / "workloads"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        program.parent.mkdir(parents=True, exist_ok=True)
        options = ["-O3", "-std=c++17", "-arch=sm_80", "-cudart", "shared"]
        subprocess.run(["nvcc", *options, "-o", str(program), str(source)], check=True)
    return program


def measure(
    name: str,
    command: Sequence[str],
    place: Path | None,
    environment: Mapping[str, str],
    tools: Sequence[str] = TOOLS,
    options: Sequence[str] = (),
) -> Iterator[Result]:
    """Run a program alone and under each tool. Yield a result for each tool that counted all of its launches."""
    texts: dict[str, Text] = {}
    runs: dict[str, tuple[Executed, dict[str, Executed], dict[str, int]]] = {}
    kept = dict(os.environ)
    try:
        os.environ.update(environment, PYTHONPATH=str(ROOT / "lib"))
        for tool in tools:
            clock = "real" if tool in REAL_CLOCK else "virtual"  # a kernel may wait for a time
            if clock not in runs:
                with tempfile.TemporaryDirectory() as counts:
                    os.environ.update(CUDASIM_COUNT=counts, CUDASIM_CLOCK=clock)
                    if finished(APIS["cuda"].alone(command), LIMIT, place)[2] != 0:
                        return
                    runs[clock] = executed(Path(counts), texts)
            alone, by, before = runs[clock]
            if not alone.machine:
                return
            with tempfile.TemporaryDirectory() as counts:
                os.environ.update(CUDASIM_COUNT=counts, CUDASIM_CLOCK=clock)
                more = (*options, *(("--clock", clock) if tool in REAL_CLOCK else ()))
                watched = under(tool, command, 5 * LIMIT, place, more=more)
                summary = watched.summary if watched.status == 0 else {}
                if not summary or summary["launches_instrumented"] != summary["launches_matched"]:
                    print(f"{name}: {tool}: not all launches were instrumented", file=sys.stderr)
                    continue
                probed, after, used = executed(Path(counts), texts)
            common = [k for k in used if k in by and by[k].machine]
            worst = max(common, key=lambda k: after[k].machine / by[k].machine, default="")
            both = {k: (before[k], used[k]) for k in common}
            yield Result(name, tool, alone, probed, both, worst)
    except Error as error:
        print(f"{name}: {error}", file=sys.stderr)
    finally:
        os.environ.clear()
        os.environ.update(kept)


def known(lines: str) -> list[Result]:
    """Return the results in a file of --json."""
    found = []
    for line in lines.splitlines():
        fields = json.loads(line)
        for name in ("alone", "probed"):
            fields[name] = Executed(**fields[name])
        found.append(Result(**fields))
    return found


HEAD = f"""# Instructions that probes add

What programs execute with and without each tool's probes, on the embedded device. No GPU ran, and
nothing is timed. Counts of PTX are exact. The machine instructions of {TARGET} are an estimate:
ptxas assembles the text that ran, nvdisasm tells which instructions each basic block became, and a
warp executes a block as often as on the embedded device. Functions of ptxas, such as those for
divisions of unusual numbers, are left out. Ratios are those of machine instructions that warps
execute, with probes to without. They stand in for slowdown until a GPU has measured it, and are not
the same: a kernel that waits for memory has issue slots to spare. Programs whose threads wait in
loops (examples/cooperative, exits, latency) execute another number of turns each time. launchlate's
are too high, in atomics most of all: on the embedded device each lane records its exit, on a GPU
one of those that exit together. memtrace's are highest where lanes do little but access memory with
strides or in no order: such a request takes 85 to 355 instructions, one of neighbouring lanes 16 to
40 (memtrace(8)).

    python3 benchmarks/executed.py --report benchmarks/results/executed.md SUITE=DIRECTORY …
"""


def report(results: Sequence[Result]) -> str:
    """Return the tables of all results."""
    lines = [
        "The first three tools add a number of instructions to each warp, memtrace adds them to each access.",
        "So the worst program is one whose warps execute few instructions of their own, or few between accesses.",
        "In parentheses: the median of all programs.",
        "",
        "| tool | programs | median | 90th percentile | worst | in | its own instructions per warp | per access |",
        "|---|---|---|---|---|---|---|---|",
    ]
    tools = [tool for tool in EVERY if any(r.tool == tool for r in results)]
    by = {tool: sorted((r for r in results if r.tool == tool), key=lambda r: r.ratio) for tool in tools}
    for tool, found in by.items():
        ratios = [r.ratio for r in found]
        worst = found[-1]
        per_warp, per_access = (
            statistics.median(values) for values in zip(*(r.own for r in found), strict=True)
        )
        lines.append(
            f"| {tool} | {len(found)} | {statistics.median(ratios):.2f} | {ratios[int(0.9 * (len(ratios) - 1))]:.2f}"
            f" | {worst.ratio:.2f} | {worst.program} | {worst.own[0]:.0f} ({per_warp:.0f})"
            f" | {worst.own[1]:.1f} ({per_access:.1f}) |"
        )
    lines += [
        "",
        "## Registers",
        "",
        "What kernels get more, by the registers that they have: the median, and the most. A thread may use",
        "32 without fewer warps, and ptxas saves none of them.",
        "",
        "| tool | " + " | ".join(f"up to {most}" if most else "more" for most in CLASSES) + " |",
        "|---|" + "---|" * len(CLASSES),
    ]
    for tool, found in by.items():
        pairs = [pair for r in found for pair in r.registers.values()]
        cells = []
        for least, most in zip((0, *CLASSES), CLASSES, strict=False):
            more = [after - before for before, after in pairs if least < before <= (most or before)]
            cells.append(f"{statistics.median(more):+.0f}, {max(more):+}" if more else "")
        lines.append(f"| {tool} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Warps that fit",
        "",
        f"A copy needs more registers, so fewer of its warps may fit on a multiprocessor. Blocks of {32 * WARPS}",
        "threads are assumed. The last column is the share that still fits, at worst. Copies have the",
        "limits that tools set (docs/instrumentation.md), by the registers of the program's cubin, which may",
        "be for another GPU; without a cubin, or with a limit of the kernel's own, they have none. All",
        f"registers are those that ptxas gives for {TARGET}.",
        "",
        "| tool | GPU | kernels | kernels with fewer warps | warps left |",
        "|---|---|---|---|---|",
    ]
    for tool, found in by.items():
        pairs = [pair for r in found for pair in r.registers.values()]
        for gpu, most in MOST_WARPS.items():
            left = [warps(after, most) / warps(before, most) for before, after in pairs]
            lines.append(f"| {tool} | {gpu} | {len(pairs)} | {sum(x < 1 for x in left)} | {min(left):.0%} |")
    lines += [
        "",
        "## What it might mean on a GPU",
        "",
        "An estimate, to be compared with what a GPU measures (docs/gpu.md): how many times as long kernels take",
        "if issue slots or memory limit them, whichever takes longer, and nothing else. Memory is all that",
        "lanes load and store, as if there were no cache, and 32 bytes for each atomic operation of a lane.",
        "Multiprocessors, clocks and bandwidths are those of NVIDIA's data sheets.",
        "",
        "| tool | " + " | ".join(f"{gpu}, median | worst" for gpu in GPUS) + " |",
        "|---|" + "---|---|" * len(GPUS),
    ]
    for tool, found in by.items():
        cells = []
        for gpu in GPUS:
            times = [r.estimate(gpu) for r in found]
            cells.append(f"{statistics.median(times):.2f} | {max(times):.2f}")
        lines.append(f"| {tool} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Each program",
        "",
        "PTX by lanes and by warps: how many times as many instructions. Atomics and bytes are those of the",
        "probes, for 1,000 machine instructions of the program itself. The kernel is the one with the most",
        "instructions added, in relation to its own.",
        "",
        "| program | tool | PTX by lanes | by warps | machine instructions | atomics | bytes | registers | spilled | kernel |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(results, key=lambda r: (r.program, EVERY.index(r.tool))):
        per = 1000 / r.alone.machine
        lines.append(
            f"| {r.program} | {r.tool} | {r.probed.lanes / r.alone.lanes:.2f} | {r.probed.warps / r.alone.warps:.2f}"
            f" | {r.ratio:.2f} | {(r.probed.atomics - r.alone.atomics) * per:.1f}"
            f" | {(r.probed.bytes - r.alone.bytes) * per:.0f} | {r.more_registers:+}"
            f" | {r.probed.spilled - r.alone.spilled} | {r.worst[:40]} |"
        )
    return "\n".join(lines) + "\n"


def comparison(before: Sequence[Result], after: Sequence[Result]) -> str:
    """Return a table of the programs that both have: machine instructions, atomics, bytes and registers with the probes."""
    then = {(r.program, r.tool): r for r in before}
    both = [(then[r.program, r.tool], r) for r in after if (r.program, r.tool) in then]
    lines = [
        "| program | tool | instructions of a warp: alone | probed before | now | times its own: before | now"
        " | atomics of a warp: before | now | registers: before | now | spilled: before | now |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for old, new in sorted(both, key=lambda pair: (pair[1].program, EVERY.index(pair[1].tool))):
        cells = [new.program, new.tool, f"{new.own[0]:.0f}"]
        cells += [f"{r.probed.machine / max(r.alone.starts, 1):.0f}" for r in (old, new)]
        cells += [f"{r.ratio:.2f}" for r in (old, new)]
        cells += [f"{(r.probed.atomics - r.alone.atomics) / max(r.alone.starts, 1):.1f}" for r in (old, new)]
        cells += [f"{r.more_registers:+}" for r in (old, new)]
        cells += [str(r.probed.spilled - r.alone.spilled) for r in (old, new)]
        lines.append(f"| {' | '.join(cells)} |")
    for tool in EVERY:
        of = [[r.ratio for r in pair] for pair in both if pair[1].tool == tool]
        if of:
            medians = [f"{statistics.median(ratios):.2f}" for ratios in zip(*of, strict=True)]
            lines.append(f"| median of {len(of)} | {tool} | | | | {' | '.join(medians)} | | | | | | |")
    return "\n".join(lines) + "\n"


def warps(used: int, most: int) -> int:
    """Return the warps that fit on a multiprocessor, in blocks of WARPS and `most` at most, with so many registers per thread."""
    registers_of_warp = -(-used * 32 // 256) * 256
    return WARPS * min(MOST_BLOCKS, most // WARPS, 65536 // (registers_of_warp * WARPS))


def main(arguments: Sequence[str]) -> int:
    """Measure the programs of the command line; print a report, or write it to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE=DIRECTORY[:GLOB]|workloads")
    parser.add_argument("--report", type=Path, help="write the tables to this file")
    parser.add_argument(
        "--json",
        type=Path,
        help="add a line for each program and tool to this file; what is in it already is not measured again",
    )
    parser.add_argument("--before", type=Path, help="compare with this file of --json, of another version")
    parser.add_argument("--tools", nargs="+", choices=EVERY, default=TOOLS, help="only these tools")
    parser.add_argument(
        "--options",
        type=shlex.split,
        default=(),
        help="further options of the tools: --options='--sample-warps 1/8'",
    )
    parser.add_argument("--only", default="*", metavar="GLOB", help="only programs with such a name")
    args = parser.parse_args(arguments)
    results = known(args.json.read_text()) if args.json and args.json.exists() else []
    done = {(r.program, r.tool) for r in results}
    for program in programs(args.suites):
        if not fnmatch.fnmatch(program[0], args.only):
            continue
        tools = [t for t in EVERY if t in args.tools and (program[0], t) not in done]
        for result in measure(*program, tools, args.options) if tools else ():
            results.append(result)
            print(f"{result.program} {result.tool}: {result.ratio:.2f}", file=sys.stderr)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    if not results:
        print("no program could be measured: build examples/ first, or correct --only", file=sys.stderr)
        return 1
    text = report(results)
    if args.before:
        text = comparison(known(args.before.read_text()), results)
    if args.report:
        args.report.write_text(f"{HEAD}\n{text}")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
