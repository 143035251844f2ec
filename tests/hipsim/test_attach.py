"""The tools on HIP programs that run already: they attach, count exactly, detach, and come again. The programs do not notice."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpubpf.ebpf import clang, compile
from gpubpf.images import offload_bundle
from gpubpf.process import address_space, traceable
from gpubpf_objects import build, needs_clang
from hipsim_device import ROOT, Serving, environment, program, serving

GPUS = ("gfx906", "gfx90a", "gfx1030")
WORK = ("rounds 5", "threads 3 4")  # 5 launches of work, and of tiny 5 + 3 * 4
LAUNCHES = {"work": 5, "tiny": 17}
Records = list[dict[str, Any]]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
needs_specs = pytest.mark.skipif(
    not compile.usable() and clang.find() is None, reason="compiling a SPEC requires bcc, or clang"
)


def start(tool: str, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@contextlib.contextmanager
def attached(tool: str, pid: int, out: Path, *options: object) -> Iterator[Records]:
    """A tool on a process, from when all kernels are instrumented. Its records are in the list afterwards."""
    process, records = start(tool, "--json", "-o", out, "-p", pid, *options), []  # type: subprocess.Popen[str], Records
    try:
        assert process.stderr is not None
        notes = []
        while not notes or f"attached to {pid}" not in notes[-1] or "not instrumented yet" in notes[-1]:
            notes.append(process.stderr.readline())
            assert notes[-1], notes
        yield records
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, process.stderr.read()
    finally:
        process.kill()
        process.wait()
    records += [json.loads(line) for line in out.read_text().splitlines()]


def summary(records: Records) -> dict[str, Any]:
    (found,) = (record for record in records if record["type"] == "summary")
    return found


def launches(records: Records) -> dict[str, int]:
    assert (summary(records)["not_instrumented"], summary(records)["lost"]) == ({}, 0)
    return {record["kernel"]: record["launches"] for record in records if record["type"] == "kernel"}


def left(pid: int) -> list[str]:
    """Return what a process has of a tool, apart from the agent's code: names of threads, and files in memory."""
    threads = [traceable.comm(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]
    files = [mapping.path for mapping in address_space.mappings(pid)]
    for file in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            files.append(os.readlink(f"/proc/{pid}/fd/{file}"))
    return [name for name in (*threads, *files) if name.startswith(("gpubpf", "/memfd:gpubpf"))]


def wait_until_detached(pid: int, files: int) -> None:
    until = time.monotonic() + 30
    while left(pid) or len(os.listdir(f"/proc/{pid}/fd")) != files:
        assert time.monotonic() < until, left(pid)
        time.sleep(0.01)


@pytest.mark.every(6)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("hostile", ["0", "1"])
def test_launches_are_counted_each_time_a_tool_comes(tmp_path: Path, gpu: str, hostile: str) -> None:
    with serving(gpu=gpu, HIPSIM_GPU=gpu, HIPSIM_HOSTILE=hostile) as program_:
        pid = program_.process.pid
        program_.does("rounds 2", "threads 3 1")
        files = len(os.listdir(f"/proc/{pid}/fd"))
        for _ in range(2):
            with attached("threadhist", pid, tmp_path / "out") as records:
                program_.does(*WORK)
            assert launches(records) == LAUNCHES
            wait_until_detached(pid, files)
            program_.does("rounds 2")


@pytest.mark.parametrize(
    ("option", "value"), [("--budget", "5"), ("--sample-blocks", "1/2"), ("--sample-warps", "1/2")]
)
def test_launches_that_an_option_leaves_out_have_the_true_reason(
    tmp_path: Path, option: str, value: str
) -> None:
    """It is not "before ready", which would end soon. Kernels that the user did not ask for have no reason."""
    with (
        serving() as program_,
        attached(
            "threadhist", program_.process.pid, tmp_path / "out", option, value, "--kernel", "tiny"
        ) as records,
    ):
        program_.does(*WORK)
    named = "--budget" if option == "--budget" else "--sample-blocks or --sample-warps"
    why = f"this tool does not measure AMD GPUs with {named} yet"
    assert summary(records)["not_instrumented"] == {why: LAUNCHES["tiny"]}
    assert summary(records)["launches_seen"] == sum(LAUNCHES.values())


def test_results_come_if_the_process_ends_by_exit_without_handlers(tmp_path: Path) -> None:
    with serving() as program_:
        program_.does("rounds 2")
        with attached("threadhist", program_.process.pid, tmp_path / "out") as records:
            program_.does(*WORK)
            assert program_.process.stdin is not None
            program_.process.stdin.write("leave\n")
            program_.process.stdin.flush()
            assert program_.process.wait(60) == 0
        assert launches(records) == LAUNCHES


@pytest.mark.parametrize(
    ("way", "status", "launches"),
    [("older", 4, 9), ("quick_older", 4, 8), ("fault", -signal.SIGSEGV, 6), ("exec", 0, 6)],
)
def test_results_come_if_the_process_ends_late_or_early(
    tmp_path: Path, way: str, status: int, launches: int
) -> None:
    ending = subprocess.Popen(
        [program("ends"), way, "wait"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with ending:
        assert ending.stdin is not None and ending.stdout is not None
        assert ending.stdout.readline() == "ready\n"
        with attached("threadhist", ending.pid, tmp_path / "out", "--kernel", "increment") as records:
            ending.communicate("\n", timeout=60)
        assert ending.returncode == status
    assert summary(records)["launches_matched"] == launches
    assert {record["kernel"]: record["launches"] for record in records if record["type"] == "kernel"} == {
        "increment": launches
    }
    assert (summary(records)["not_instrumented"], summary(records)["lost"]) == ({}, 0)


@pytest.mark.every(6)
@pytest.mark.parametrize("tool", ["kernelretsnoop", "memtrace"])
def test_the_answers_are_those_for_a_command(tmp_path: Path, tool: str) -> None:
    """In the middle of its life, a process gives what its kernels give from the beginning."""
    kept = ("requests", "bytes", "lanes", "threads", "exits", "pattern", "op", "space")

    def answers(records: Records) -> list[list[tuple[str, Any]]]:
        rows = [record for record in records if record["type"] in ("kernel", "site", "access")]
        return sorted([(key, row[key]) for key in ("kernel", *kept) if key in row] for row in rows)

    with serving() as program_, attached(tool, program_.process.pid, tmp_path / "a") as running:
        program_.does(*WORK)
    out = tmp_path / "b"
    with serving(sys.executable, ROOT / "tools" / f"{tool}.py", "--json", "-o", out, "--") as program_:
        program_.does(*WORK)
    command = [json.loads(line) for line in out.read_text().splitlines()]
    assert launches(running) == launches(command) == LAUNCHES
    assert answers(running) == answers(command)


@needs_specs
@pytest.mark.every(3)
@pytest.mark.parametrize("tool", ["gpucount", "gpudist", "gputrace"])
def test_specs_in_a_running_process(tmp_path: Path, tool: str) -> None:
    """WORK: 5 launches of work with 16 blocks of 256 threads, and 17 of tiny with 64 threads."""
    specs = {
        "gpucount": [
            "kernel:*",
            "entry:work (block < 2)",
            "store:*:global (lane >= 60)",
            "instruction:tiny:v_add_f32",
            "bb:tiny",
        ],
        "gpudist": ["-C", "entry:work:u32:args"],
        "gputrace": ['entry:* (gthread == 0 && args == 1) "%s", kernel'],
    }[tool]
    with serving() as program_:
        program_.does("rounds 2")
        with attached(tool, program_.process.pid, tmp_path / "out", *specs) as records:
            program_.does(*WORK)
    assert (summary(records)["not_instrumented"], summary(records)["lost"]) == ({}, 0)
    if tool == "gpucount":
        found = {
            (one["spec"], one["kernel"]): (one["count"], one["threads"]) for one in records if "spec" in one
        }
        assert found == {
            ("kernel:*", "work"): (5, 5 * 4096),
            ("kernel:*", "tiny"): (17, 17 * 64),
            ("entry:work (block < 2)", "work"): (5 * 8, 5 * 512),
            ("store:*:global (lane >= 60)", "work"): (5 * 64, 5 * 64 * 4),
            ("store:*:global (lane >= 60)", "tiny"): (17, 17 * 4),
            ("instruction:tiny:v_add_f32", "tiny"): (17, 17 * 64),
            ("bb:tiny", "tiny"): (17, 17 * 64),
        }
    elif tool == "gpudist":
        assert [one["values"] for one in records if one["type"] == "dist"] == [{"2": 5 * 4096}]
    else:
        assert [one["text"] for one in records if one["type"] == "event"] == ["tiny"] * 17


# A program for gpurun: threads by the kernel, whose blocks have 64 or 256 threads.
OBJECT = """
MAP(threads, GPU_ARRAY, u32, u64, 257);
static u64 (*bpf_get_block_dim)(u64 *x, u64 *y, u64 *z) = (void *)504;
SEC("kretprobe/*") int on_exit(void *ctx) {
    u64 x, y, z;
    bpf_get_block_dim(&x, &y, &z);
    u32 key = x;
    u64 *count = bpf_map_lookup_elem(&threads, &key);
    if (count)
        __sync_fetch_and_add(count, 1);
    return 0;
}
"""


@needs_clang
def test_an_object_in_a_running_process(tmp_path: Path) -> None:
    path = build(OBJECT, tmp_path / "probe.bpf.o")
    with serving() as program_:
        program_.does("rounds 2")
        with attached("gpurun", program_.process.pid, tmp_path / "out", path) as records:
            program_.does(*WORK)
    assert (summary(records)["not_instrumented"], summary(records)["lost"]) == ({}, 0)
    assert of_object(records) == {"hip-serves": {64: 17 * 64, 256: 5 * 4096}}


def of_object(records: Records) -> dict[str, dict[int, int]]:
    """Return what gpurun counted with OBJECT, by program."""
    found: dict[str, Counter[int]] = {}
    for one in records:
        if one["type"] == "map":
            found.setdefault(of_program(one), Counter()).update(
                {e["key"]: e["value"] for e in one["entries"]}
            )
    return {name: {key: value for key, value in counts.items() if value} for name, counts in found.items()}


def of_program(record: dict[str, Any]) -> str:
    """Return the name of a record's program, without its digest."""
    return record["comm"].rpartition("-")[0]


def test_launch_latency_is_measured_in_a_running_process(tmp_path: Path) -> None:
    with serving(HIPSIM_CLOCK="virtual") as program_:
        program_.does("rounds 2")
        with attached("launchlate", program_.process.pid, tmp_path / "out", "-v") as records:
            program_.does("rounds 5", "threads 3 4")
        program_.does("rounds 2")
    found = [record for record in records if record["type"] == "launch"]
    assert (summary(records)["not_instrumented"], summary(records)["lost"]) == ({}, 0)
    assert {name: sum(r["kernel"] == name for r in found) for name in LAUNCHES} == LAUNCHES
    assert all(r["vendor"] == "amd" and r["exec_ns"] > 0 for r in found)
    found.sort(key=lambda record: record["call_ns"])
    for work, tiny in zip(found[:10:2], found[1:10:2], strict=True):
        # In one stream. `work` is over when the launch of `tiny` returns.
        assert (work["api_ns"], tiny["api_ns"], tiny["latency_ns"]) == (1000, 1000, 1000)
        assert work["end_ns"] < tiny["return_ns"] == tiny["start_ns"] and tiny["waited_for"] is None


def test_code_that_is_loaded_while_a_tool_is_there_is_instrumented(tmp_path: Path) -> None:
    module = program("store", "--genco")
    with serving() as program_:
        program_.does(f"module {module} 2")
        with attached("threadhist", program_.process.pid, tmp_path / "out") as records:
            program_.does(f"module {module} 3", "rounds 1", f"module {module} 4")
        program_.does(f"module {module} 2")
    assert launches(records) == {"store": 7, "work": 1, "tiny": 1}


def test_code_that_is_loaded_while_a_tool_attaches_is_not_awaited_for_ever(tmp_path: Path) -> None:
    """`attached` waits until the tool says that the copies of all kernels are ready."""
    module = program("store", "--genco")
    with serving() as program_:
        attaching = threading.Event()
        attaching.set()

        def load() -> None:
            while attaching.is_set():
                program_.does(f"module {module} 1")

        loading = threading.Thread(target=load)
        loading.start()
        try:
            with attached("threadhist", program_.process.pid, tmp_path / "out") as records:
                attaching.clear()
                loading.join()
                program_.does(f"module {module} 3")
        finally:
            attaching.clear()
            loading.join()
    assert summary(records)["not_instrumented"].keys() <= {"loaded before"} and summary(records)["lost"] == 0
    assert sum(record["launches"] for record in records if record["type"] == "kernel") >= 3


@pytest.mark.every(3)
@pytest.mark.parametrize("first", ["threadhist", "hipsnoop"])
def test_queues_that_another_tool_intercepts(tmp_path: Path, first: str) -> None:
    """The process was started by a tool, whose measurement is over, or goes on: ROCr intercepts its queues for good."""
    over = ["-d", "1"] if first == "threadhist" else []
    command = [sys.executable, ROOT / "tools" / f"{first}.py", *over, "-o", tmp_path / "first", "--"]
    with serving(*command) as program_:
        (pid,) = _children(program_.process.pid)
        program_.does("rounds 2")
        if over:
            until = time.monotonic() + 30
            while any(name.startswith("/memfd:gpubpf-control") for name in left(pid)):
                assert time.monotonic() < until
                time.sleep(0.05)
        with attached("threadhist", pid, tmp_path / "out") as records:
            program_.does(*WORK)
        program_.does("rounds 2")
    assert launches(records) == LAUNCHES


def _children(pid: int) -> list[int]:
    return [
        int(child)
        for thread in os.listdir(f"/proc/{pid}/task")
        for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        if traceable.comm(int(child)).startswith("hip-serves")
    ]


def test_the_kernels_of_a_process_are_listed() -> None:
    with serving() as program_:
        tool = [
            sys.executable,
            ROOT / "tools" / "threadhist.py",
            "--list",
            "--json",
            "-p",
            str(program_.process.pid),
        ]
        done = subprocess.run(tool, capture_output=True, text=True, timeout=100)
    listed = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["kernel"], row["gpus"], row["pid"]) for row in listed if row["type"] == "listed"] == [
        (name, ["gfx906"], program_.process.pid) for name in ("tiny", "work")
    ]


def test_a_second_tool_is_refused(tmp_path: Path) -> None:
    with serving() as program_, attached("threadhist", program_.process.pid, tmp_path / "out"):
        second = start("launchlate", "-p", program_.process.pid)
        _, error = second.communicate(timeout=60)
        assert second.returncode == 1
        assert f"pid {program_.process.pid} (hip-serves" in error
        assert "is already traced by threadhist, pid " in error and "; stop that tool first" in error


def test_a_process_that_does_not_use_rocr_yet_is_refused() -> None:
    code = "import ctypes, sys; ctypes.CDLL('libhsa-runtime64.so.1'); print('ready', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    tool = start("threadhist", "-p", process.pid)
    _, error = tool.communicate(timeout=60)
    assert tool.returncode == 1
    assert f"pid {process.pid} (" in error and "has not initialized ROCr; wait until it uses the GPU" in error
    process.communicate()


def of_the_machine(tool: str, out: Path, *words: object) -> Records:
    """What a tool shows of every process: one that runs ("rounds 1"), one that has loaded ROCr and begins to use it later (WORK), and
    one that is over at once (vectoradd). The first two also launch before the tool comes, or after it has gone."""
    late = subprocess.Popen(
        [program("serves"), "late"], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert late.stdin is not None and late.stdout is not None and late.stdout.readline() == "loaded\n"
    with serving() as runs:
        runs.does("rounds 2")
        watches = start(tool, "--json", "-o", out, *words)
        assert watches.stderr is not None
        notes = [""]
        while not any(
            f"attached to {runs.process.pid} " in note and "not instrumented yet" not in note
            for note in notes
        ) or not any("watching every process" in note for note in notes):
            notes.append(watches.stderr.readline())
            assert notes[-1], notes
        runs.does("rounds 1")
        late.stdin.write("\n")
        begins = Serving(late)
        begins.does(*WORK)
        subprocess.run([program("vectoradd")], env=environment(), check=True, timeout=100)
        watches.send_signal(signal.SIGINT)
        assert watches.wait(60) == 0, watches.stderr.read()
        runs.does("rounds 1")
    begins.does("rounds 1")
    late.communicate(timeout=60)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert summary(records)["processes"]["missed"] == {}
    assert (summary(records)["not_instrumented"], summary(records)["lost"]) == ({}, 0)
    return records


# The threads that the tool sees there.
THREADS = Counter(
    {("hip-serves", "work"): 6 * 4096, ("hip-serves", "tiny"): 18 * 64, ("hip-vectoradd", "vectorAdd"): 1024}
)


@pytest.mark.every(3)
@pytest.mark.own_processes
@pytest.mark.may_come_too_late
def test_every_process_of_the_machine(tmp_path: Path) -> None:
    kernels = [one for one in of_the_machine("threadhist", tmp_path / "out") if one["type"] == "kernel"]
    found: Counter[tuple[str, str]] = Counter()
    for one in kernels:
        found[of_program(one), one["kernel"]] += one["runs"]
    assert found == THREADS
    assert sorted(one["launches"] for one in kernels) == [1, 1, 1, *sorted(LAUNCHES.values())]


@needs_specs
@pytest.mark.long
@pytest.mark.own_processes
@pytest.mark.may_come_too_late
@pytest.mark.parametrize("tool", ["gpucount", "gpudist", "gputrace"])
def test_specs_in_every_process_of_the_machine(tmp_path: Path, tool: str) -> None:
    specs = {
        "gpucount": ["entry:*"],
        "gpudist": ["-C", "entry:*:u32:lane, kernel"],
        "gputrace": ['entry:* (gthread == 0) "%u", block_dim * grid'],
    }[tool]
    found: Counter[tuple[str, str]] = Counter()
    for one in of_the_machine(tool, tmp_path / "out", *specs):
        if one["type"] == "count":
            found[of_program(one), one["kernel"]] += one["threads"]
        elif one["type"] == "dist":
            assert len(set(one["values"].values())) == 1 and len(one["values"]) == 64
            found[of_program(one), one["key"]] += one["count"]
        elif one["type"] == "event":
            found[of_program(one), one["kernel"]] += int(one["text"])
    assert found == THREADS


@needs_clang
@pytest.mark.long
@pytest.mark.own_processes
@pytest.mark.may_come_too_late
def test_an_object_in_every_process_of_the_machine(tmp_path: Path) -> None:
    records = of_the_machine("gpurun", tmp_path / "out", build(OBJECT, tmp_path / "probe.bpf.o"))
    assert of_object(records) == {"hip-serves": {64: 18 * 64, 256: 6 * 4096}, "hip-vectoradd": {256: 1024}}


@pytest.mark.every(6)
@pytest.mark.parametrize("gpu", GPUS)
def test_tools_come_and_go_and_are_killed(tmp_path: Path, gpu: str) -> None:
    """Threads launch all the time and check each result. Nothing of the tools stays in the process."""
    chance = random.Random(gpu)
    process = subprocess.Popen(
        [program("steady", gpu=gpu), "3"],
        env=environment(HIPSIM_GPU=gpu), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    files = len(os.listdir(f"/proc/{process.pid}/fd"))
    for tool in ("threadhist", "launchlate", "kernelretsnoop", "memtrace", "launchlate", "threadhist"):
        traced = start(tool, "-p", process.pid)
        time.sleep(chance.uniform(0.3, 1.5))
        traced.send_signal(chance.choice([signal.SIGINT, signal.SIGKILL]))
        _, error = traced.communicate(timeout=60)
        assert "Traceback" not in error, error
        # On a busy machine, the last answer may come too late.
        assert "still have been running" not in error or "did not answer in time" in error, error
        assert process.poll() is None
        wait_until_detached(process.pid, files)
    with attached("threadhist", process.pid, tmp_path / "out") as records:
        time.sleep(0.5)
    assert summary(records)["lost"] == 0
    assert sum(record["launches"] for record in records if record["type"] == "kernel") > 10
    wait_until_detached(process.pid, files)
    output, _ = process.communicate(timeout=60)
    assert output.startswith("right ") and process.returncode == 0


@pytest.mark.every(6)
@pytest.mark.parametrize("how", ["add", "store", "cas", "signal"])
def test_programs_that_write_packets_themselves(tmp_path: Path, how: str) -> None:
    """Without HIP. Others take no place where the write index is stored. There, the first launch is not seen."""
    unseen = how in ("store", "cas")
    code = tmp_path / "store.co"
    code.write_bytes(offload_bundle.code_objects_of_file(program("store", "--genco"))[0])
    app = subprocess.Popen(
        [program("queues", "-lhsa-runtime64"), code, how], env=environment(hostile=True),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        serves = Serving(app)
        serves.does("go")
        for number in range(2):
            with attached("threadhist", app.pid, tmp_path / f"out{number}") as records:
                serves.does("go", "go", "go")
            assert launches(records) == {"store": 60 - unseen}
            serves.does("go")
        app.communicate(timeout=60)
        assert app.returncode == 0
    finally:
        app.kill()
        app.wait()
