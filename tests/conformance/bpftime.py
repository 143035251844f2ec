"""bpftime's own GPU examples: their eBPF programs, unmodified, under gpurun, on their own victims.

bpftime's CI looks for a word in the output of each example's loader. Here everything that the programs print and store is compared.
Victims run for ever, with a pause in each turn; a small library ends them after PAUSES of these.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from conformance.outcome import DIFFERENT, REFUSED, SAME, Outcome
from gpubpf.ebpf import clang
from gpubpf.kernel.privileges import capable

URL = "https://github.com/eunomia-bpf/bpftime"
COMMIT = "ec26daecc8e787fb80fd95dd596a576404a5e36e"
ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "conformance" / "bpftime"
PAUSES = 3
LIMIT = float(os.environ.get("CONFORMANCE_LIMIT", "120"))  # seconds for one example
# Ends the program at its PAUSES-th pause. The embedded device in the same process has pauses of its own.
ENDING = f"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <time.h>
static int rest(void *caller, long ns) {{
    static int times;
    struct timespec time = {{ns / 1000000000, ns % 1000000000}};
    Dl_info of;
    if (!dladdr(caller, &of) || ((unsigned long)of.dli_fbase ^ getauxval(AT_PHDR)) >= 4096)
        return nanosleep(&time, 0);
    if (++times == {PAUSES})
        exit(0);
    return 0;
}}
unsigned sleep(unsigned s) {{ return rest(__builtin_return_address(0), s * 1000000000l), 0; }}
int usleep(unsigned us) {{ return rest(__builtin_return_address(0), us * 1000l); }}
"""
# The function that CUDA 13 puts into a program for each launch. The examples name that of CUDA 12, or leave it to their loaders.
LAUNCHES = "./vec_add:_ZL25__cudaLaunchKernel_helperP9CUkern_st4dim3S1_PPvmP11CUstream_st"
VECTOR_ADD = "_Z9vectorAddPKfS0_Pf"


@dataclass
class Found:
    """What gpurun reported: maps (by name, values by key), records of rings, prints, and the summary. `pid`: of the victim."""

    maps: dict[str, dict[Any, Any]] = field(default_factory=dict)
    rings: dict[str, list[Any]] = field(default_factory=dict)
    prints: list[tuple[str, str]] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)
    pid: int = 0

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Found:
        made = cls(summary=records[-1] if records else {})
        for one in records:
            if one["type"] == "print":
                made.prints.append((one["program"], one["text"]))
            elif one["type"] == "map" and one["kind"] == "ringbuf":
                made.rings.setdefault(one["map"], []).extend(entry["value"] for entry in one["entries"])
            elif one["type"] == "map":
                made.maps[one["map"]] = {entry["key"]: entry["value"] for entry in one["entries"]}
            elif one["type"] == "attached":
                made.pid = one["pid"]
        return made

    @property
    def launches(self) -> int:
        return int(self.summary.get("launches_instrumented", 0))

    def words(self, program: str, number: int = 0) -> list[list[str]]:
        """Return the words of the lines of one program; with `number` the first ones."""
        return [text.split()[: number or None] for name, text in self.prints if name == program]


# What must be there, as (what, found, expected).
Facts = Iterator[tuple[str, Any, Any]]


def atomizer(found: Found) -> Facts:
    """Ten blocks of one thread in two parts: the first part is left out of each launch, and says so."""
    expected = Counter(
        line
        for block in range(10)
        for line in (
            f"partition_num is 2 for block {block}",
            f"partition_index is 1 for block {block}",
            f"{'Enter' if block >= 5 else 'Exited'} {VECTOR_ADD} block_id={block}, L=5, H=10",
        )
        for _ in range(PAUSES)
    )
    yield "prints", Counter(text for _, text in found.prints), expected


def kernel_trace(found: Found) -> Facts:
    """The first thread of each launch sends where and when it is."""
    events = found.rings.get("events", [])
    times = [event["globaltimer"] for event in events]
    yield (
        "events",
        [{**event, "globaltimer": 0} for event in events],
        [dict.fromkeys(events[0] if events else (), 0)] * PAUSES,
    )
    yield "times in order", times == sorted(set(times)), True


def gpu_shared_map(found: Found) -> Facts:
    """Ten threads add 1 each; the first one of a launch stores what it made of it, so 21 in the third launch."""
    yield "counter", found.maps["counter"], {0: 10 * PAUSES}
    yield "counter_per_thread", found.maps["counter_per_thread"], {found.pid: 10 * (PAUSES - 1) + 1}
    lines = [("cuda__probe", "gpu_update_kprobe")] * PAUSES + [("cuda__retprobe", "gpu_update")] * PAUSES
    yield "prints", sorted(found.prints), sorted(lines)


def threadscheduling(found: Found, blocks: int = 4, threads: int = 64) -> Facts:
    """Each thread notes where it runs. The lanes that find no count all insert 1: one does, so 31 of them are not counted."""
    places = found.maps["thread_mapping"]
    yield "threads", len(places), blocks * threads
    keys = [(one["block_x"], one["thread_x"]) for _, one in sorted(places.items())]
    yield "indices", keys, [(block, thread) for block in range(blocks) for thread in range(threads)]
    yield (
        "lanes",
        [one["lane_id"] for _, one in sorted(places.items())],
        [*range(32)] * (blocks * threads // 32),
    )
    yield (
        "zeros",
        {one[name] for one in places.values() for name in ("block_y", "block_z", "thread_y", "thread_z")},
        {0},
    )
    multiprocessors = {one["sm_id"] for one in places.values()}
    yield (
        "sm_histogram",
        found.maps["sm_histogram"],
        dict.fromkeys(multiprocessors, threads * found.launches - 31),
    )
    warps = {one["sm_id"] << 16 | one["warp_id"] for one in places.values()}
    yield "warp_histogram", found.maps["warp_histogram"], dict.fromkeys(warps, 32 * found.launches - 31)
    yield "launches", found.launches > 0, True


def cudagraph(found: Found) -> Facts:
    """The first thread counts each launch: one before the graph, then one of the graph in each turn. All take the same time."""
    yield "call_count", found.maps["call_count"], {found.pid: PAUSES + 1}
    total = found.maps["total_time_ns"].get(found.pid, 0)
    yield "total_time_ns is a multiple", (total > 0, total % (PAUSES + 1)), (True, 0)
    yield "start_ts", found.maps["start_ts"], {}


def threadhist_shared(found: Found) -> Facts:
    """Ten threads add to one element on the GPU, and each launch adds to the other on the host."""
    yield "call_count", found.maps["call_count"], {0: 10 * PAUSES, 1: PAUSES}


def kernelretsnoop(found: Found) -> Facts:
    """Each of five threads sends its index and the time as it leaves; thread 0 has more to do, and is the last."""
    records = found.rings.get("rb", [])
    yield "indices", Counter(tuple(one[:3]) for one in records), {(x, 0, 0): PAUSES for x in range(5)}
    yield "times", len({one[3] for one in records}) >= PAUSES, True


def threadhist(found: Found) -> Facts:
    """Each of 524,288 threads counts how often it runs."""
    yield "call_count", found.maps["call_count"], {0: [PAUSES] * 524288}


def cuda_counter(found: Found) -> Facts:
    """Ten threads count, and measure. In the first launch all find nothing, and one of them inserts its 1 and its duration."""
    ways = {("cuda__probe", "Entered"): 10 * PAUSES, ("cuda__retprobe", "Exited"): 10 * PAUSES}
    yield "prints", Counter((name, text.split()[0]) for name, text in found.prints), ways
    durations = {int(words[5].partition("=")[2]) for words in found.words("cuda__retprobe")}
    yield "durations are equal", len(durations), 1
    yield "call_count", found.maps["call_count"], {found.pid: 10 * PAUSES - 9}
    yield (
        "total_time_ns",
        found.maps["total_time_ns"],
        {found.pid: (10 * PAUSES - 9) * max(durations, default=0)},
    )
    yield "start_ts", set(found.maps["start_ts"]), {0}


def launchlate(found: Found) -> Facts:
    """Each of ten threads finds the time of its launch, and adds to the histogram."""
    histogram = found.maps["time_histogram"]
    yield "keys", sorted(histogram), list(range(10))
    yield "samples", sum(histogram.values()), 10 * PAUSES
    yield "last_uprobe_time", [key for key, value in found.maps["last_uprobe_time"].items() if value], [0]
    yield (
        "prints",
        Counter(tuple(words) for words in found.words("cuda__probe", 3)),
        {("GPU:", "Kernel", "executing,"): 10 * PAUSES},
    )


def mem_trace(found: Found) -> Facts:
    """Ten threads load two numbers and a constant, and store one."""
    yield "counter", found.maps["counter"], {0: 10 * 4 * PAUSES, 1: 0, 2: 0, 3: 0}


def host_map_test(found: Found) -> Facts:
    """Ten threads count for themselves, and in an element of an array that all share."""
    own = found.maps["perthread_counter"]
    yield "counts", (own[0], own[2]), ([PAUSES] * 10, list(range(10)))
    yield "durations", (len(set(own[1])), min(own[1]) > 0), (1, True)
    yield "shared_counter", found.maps["shared_counter"], dict.fromkeys(range(10), PAUSES)
    ways = {("cuda__probe", "entered"): 10 * PAUSES, ("cuda__retprobe", "exited"): 10 * PAUSES}
    yield "prints", Counter((name, text.split()[2]) for name, text in found.prints), ways


def directly_run(found: Found) -> Facts:
    """A product of matrices of 32 x 32 numbers, each 1.0 in one matrix and 0.01 in the other, in units of 1 / 65,536."""
    product = (1 << 16) * 655 * 32
    yield "gemm_C", found.maps["gemm_C"], {key: product if key < 1024 else 0 for key in range(4096)}
    yield "launches", found.launches, 1


@dataclass(frozen=True)
class Example:
    """An example: its directory, the object's source, the victim's, how it is run, and what must be found.

    victim: "" if a program is a kernel of its own. on_host: it has programs on the host. running: gpurun attaches to the victim, which
    runs already."""

    name: str
    source: str
    facts: Callable[[Found], Facts]
    victim: str = "vec_add.cu"
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    on_host: bool = False
    running: bool = False


_MATRICES = ("--set", "gemm_dims=32,32,32", "--set", "gemm_A=65536*1024", "--set", "gemm_B=655*1024")
_CUDA_LAUNCH = ("--attach", f"uprobe_cuda_launch=uprobe/{LAUNCHES}")
EXAMPLES = (
    Example("atomizer", "atomizer", atomizer, options=("--set", "partition_num_map=2", "--set", "partition_index_map=1")),
    Example("cuda-counter", "cuda_probe", cuda_counter),
    Example("cudagraph", "cuda_probe", cudagraph, "vec_add_graph.cu"),
    Example(
        "directly_run_on_gpu",
        "directly_run",
        directly_run,
        victim="",
        options=("--run", "cuda__gemm", "--grid", "4,4", "--block", "16,16", *_MATRICES),
    ),
    Example("gpu_shared_map", "gpu_shared_map", gpu_shared_map),
    Example("host_map_test", "host_map_test", host_map_test),
    Example("kernel_trace", "kernel_trace", kernel_trace),
    Example("kernelretsnoop", "kernelretsnoop", kernelretsnoop),
    Example("launchlate", "launchlate", launchlate, options=_CUDA_LAUNCH, on_host=True),
    Example("launchlate-kernel-gpu-shared-map", "launchlate", launchlate, options=_CUDA_LAUNCH, on_host=True),
    Example("mem_trace", "mem_trace", mem_trace),
    Example("threadhist", "threadhist", threadhist),
    Example(
        "threadhist-gpu-kernel-shared-map",
        "threadhist",
        threadhist_shared,
        options=("--attach", f"launch_kernel_ret_probe=uretprobe/{LAUNCHES}"),
        on_host=True,
    ),
    Example("threadscheduling", "threadscheduling", threadscheduling),
    Example("threadscheduling_dynamic_hook", "threadscheduling", threadscheduling, arguments=("4", "64"), running=True),
)  # fmt: skip


def run(directory: Path, jobs: int) -> Iterator[Outcome]:
    """Build and run each example of a checkout."""
    BUILT.mkdir(parents=True, exist_ok=True)
    ending = BUILT / "ending.so"
    (BUILT / "ending.c").write_text(ENDING)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", ending, BUILT / "ending.c", "-ldl"], check=True)
    for example in EXAMPLES:
        yield outcome(example, directory, ending)


def outcome(example: Example, directory: Path, ending: Path) -> Outcome:
    """Build an example, run it, and compare what it found."""
    if example.on_host and not capable():
        return Outcome(example.name, "gpurun", REFUSED, "programs on the host require root")
    place = BUILT / example.name
    place.mkdir(exist_ok=True)
    if why := _build(example, directory, place):
        return Outcome(example.name, "gpurun", REFUSED, why)
    out = place / "out.jsonl"
    out.unlink(missing_ok=True)
    tool = [sys.executable, str(ROOT / "tools" / "gpurun.py"), "probe.bpf.o", *example.options]
    tool += ["--json", "-o", str(out)]
    victim = [f"./{Path(example.victim).stem}", *example.arguments]
    try:
        if example.running:
            done = _beside(tool, victim, place)
        else:
            ended = ["--device", "sim"]
            ended += ["--", "env", f"LD_PRELOAD={ending}", *victim] if example.victim else []
            done = subprocess.run([*tool, *ended], cwd=place, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return Outcome(example.name, "gpurun", REFUSED, f"takes longer than {LIMIT:.0f} s")
    said = next(
        (line for line in done.stderr.splitlines() if line.startswith("gpurun: ") and ": note: " not in line),
        "",
    )
    if done.returncode:
        return Outcome(example.name, "gpurun", DIFFERENT, said or f"it ended with status {done.returncode}")
    found = Found.of([json.loads(line) for line in out.read_text().splitlines()])
    counts = partial(Outcome, launches=found.summary["launches_matched"], instrumented=found.launches)
    if found.summary["lost"]:
        return counts(example.name, "gpurun", DIFFERENT, f"{found.summary['lost']} were lost")
    return counts(example.name, "gpurun", *compared(example, found))


def _beside(tool: Sequence[str], victim: Sequence[str], place: Path) -> subprocess.CompletedProcess[str]:
    """Run the tool for some seconds on a victim that runs already."""
    command = [sys.executable, "-m", "cudasim.launcher", "--clock", "virtual", "--", *victim]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
    with subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        program.stdout.readline()  # it has begun
        try:
            attached = ["-p", str(program.pid), "-d", "8"]
            return subprocess.run(
                [*tool, *attached], cwd=place, capture_output=True, text=True, timeout=LIMIT
            )
        finally:
            program.kill()


def compared(example: Example, found: Found) -> tuple[str, str]:
    """Return the verdict on what was found, and what is different."""
    try:
        for what, there, expected in example.facts(found):
            if there != expected:
                return DIFFERENT, f"{what}: {_short(there)}, expected {_short(expected)}"
    except (KeyError, IndexError, ValueError) as error:
        return DIFFERENT, f"there is no {error}"
    return SAME, ""


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 200 else f"{text[:200]}…"


def _build(example: Example, directory: Path, place: Path) -> str:
    """Build the object and the victim. Return why that is not possible, or ""."""
    own = directory / "example" / "gpu" / example.name
    headers = directory / "third_party" / "vmlinux" / "x86"
    compiler = clang.find()
    if compiler is None or shutil.which("nvcc") is None:
        return f"{'nvcc' if compiler else 'clang'} is missing"
    flags = ["-target", "bpf", "-g", "-O2", "-D__TARGET_ARCH_x86", f"-I{headers}"]
    object_file = [compiler, *flags, "-c", own / f"{example.source}.bpf.c", "-o", place / "probe.bpf.o"]
    victim = [
        "nvcc",
        "-cudart",
        "shared",
        "-g",
        own / example.victim,
        "-o",
        place / Path(example.victim).stem,
    ]
    for command in (object_file, *([victim] if example.victim else [])):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            what = (errors or ["it cannot be built"])[0]
            return "libbpf's headers are missing (libbpf-dev)" if "bpf_helpers.h" in what else what
    return ""
