"""threadhist on the embedded AMD device: probes in kernels of unmodified programs, on AMD's own runtime."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hipsim_device
from gpubpf_commands import quoted
from hipsim_device import ROOT, environment, libraries, program

measured = functools.partial(hipsim_device.measured, "threadhist")
TOOL = [sys.executable, str(ROOT / "tools" / "threadhist.py")]
GPUS = ("gfx906", "gfx90a", "gfx1030")
FUNCTIONS = """
import sys
from gpubpf.show import cli
from gpubpf.program import BPF

@cli.command("functions")
def main(argv=None):
    parser = cli.parser("functions", "Do nothing.", "examples:\\n    functions -- ./app\\n")
    for add in (cli.add_targets, cli.add_kernels, cli.add_device, cli.add_looks, cli.add_output):
        add(parser)
    args = cli.parse(parser, argv)
    options = cli.Options.of(args)
    out = cli.open_results(options.output)
    b = BPF(text="#include <gpubpf.h>\\nint on_begin(struct gpu_function_entry *ctx) { return 0; }\\n")
    b.attach_gpu_function_entry(fn_name="on_begin")
    if args.list:
        return b.show_kernels(options, out)
    with b.trace(options, out) as session:
        for _ in session.intervals(args.interval, args.count):
            pass
    return session.status

sys.exit(main())
"""


def kernels(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {record["kernel"]: record for record in records if record["type"] == "kernel"}


@pytest.mark.every(6)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("hostile", ["0", "1"])
def test_every_thread_is_counted_and_results_stay(tmp_path: Path, gpu: str, hostile: str) -> None:
    app = program("probed", gpu=gpu)
    records, done = measured(tmp_path / "out", "--", app, 5, HIPSIM_HOSTILE=hostile)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    (summary,) = (record for record in records if record["type"] == "summary")
    assert summary["launches_matched"] == summary["launches_instrumented"] == 5 + 4 * 5 + 3
    assert (summary["not_instrumented"], summary["lost"]) == ({}, 0)
    found = kernels(records)
    assert {name: (one["launches"], one["threads"], one["runs"]) for name, one in found.items()} == {
        "uses_variables": (5, 1024, 5 * 1024),
        "sums": (20, 1024, 20 * 1024),
        "leaves_early": (1, 1024, 1024),
        "rows": (1, 192, 192),
        "columns": (1, 192, 192),
    }
    assert all(
        one["work"] > 0 and one["registers"]["after"] >= one["registers"]["before"] for one in found.values()
    )


def test_work_of_single_threads(tmp_path: Path) -> None:
    """Threads that take the same path do the same work, and those that leave early do less."""
    records, done = measured(
        tmp_path / "out", "--kernel", "leaves_early", "--work", "blocks", "--", program("probed")
    )
    assert done.returncode == 0, done.stderr
    work = {
        record["block"][0] * 256 + record["thread"][0]: record["work"]
        for record in records
        if record["type"] == "thread"
    }
    assert len(work) == 1024
    for thread, blocks in work.items():
        assert blocks == work[thread % 8 if thread <= 500 else 504 + thread % 8], thread
    assert work[1] < work[504] < work[0]


def test_stores_and_atomics(tmp_path: Path) -> None:
    app = program("probed")
    for kind, each in (("atomics", None), ("stores", 1)):
        records, done = measured(tmp_path / kind, "--kernel", "uses_variables", "--work", kind, "--", app, 1)
        assert done.returncode == 0, done.stderr
        work = kernels(records)["uses_variables"]["work"]
        # LLVM makes one lane of a wave do the atomic operation for all.
        assert work == 1000 * each if each else 16 <= work <= 1000


def test_memory_for_maps_takes_none_until_it_is_used(tmp_path: Path) -> None:
    """Else each program would zero 256 MB before its first launch, for a second."""
    code = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True)"
    code += "; print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)"
    most = {}
    for size in ("1M", "512M"):
        command = [sys.executable, "-c", code, program("probed"), 1]
        _, done = measured(tmp_path / "out", "--map-memory", size, "--", *command)
        assert done.returncode == 0, done.stderr
        most[size] = int(done.stdout.splitlines()[-1])
    assert most["512M"] < most["1M"] + 256, "MB of the program"


def test_launches_that_are_chosen(tmp_path: Path) -> None:
    words = ("--kernel", "sums", "--launch", "3:12", "--sample", "2", "--", program("probed"))
    records, done = measured(tmp_path / "out", *words)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    (summary,) = (record for record in records if record["type"] == "summary")
    assert (summary["launches_matched"], summary["launches_instrumented"]) == (20, 5)
    assert summary["not_instrumented"] == {"filtered": 10, "sampled out": 5}
    assert list(kernels(records)) == ["sums"] and kernels(records)["sums"]["runs"] == 5 * 1024


def test_no_kernel_matches(tmp_path: Path) -> None:
    _, done = measured(tmp_path / "out", "--kernel", "absent", "--", program("probed"))
    assert (done.returncode, done.stdout) == (1, "right\n")
    assert "no kernel matches" in done.stderr.replace("\n", " "), done.stderr


@pytest.mark.every(6)
@pytest.mark.parametrize(
    "name",
    ["kernels", "streams", "cooperative", "devices", "output", "generic", "forks", "modules", "compiled"],
)
def test_programs_do_not_notice_the_tool(name: str, tmp_path: Path) -> None:
    """Graphs, callbacks, printf, barriers of whole grids, children, modules, code compiled at run time."""
    words = [program(name), *([program("store", "--genco")] if name == "modules" else [])]
    variables = environment(HIPSIM_DEVICES="2")
    alone, traced = (
        subprocess.run([*before, *words], capture_output=True, text=True, timeout=300, env=variables)
        for before in ((), (*TOOL, "-o", tmp_path / "out", "--"))
    )
    assert (alone.returncode, traced.returncode) == (0, 0), traced.stderr
    assert sorted(traced.stdout.splitlines()) == sorted(
        alone.stdout.splitlines()
    )  # blocks print in any order


@pytest.mark.every(3)
@pytest.mark.parametrize("gpu", GPUS)
def test_kernels_that_print(tmp_path: Path, gpu: str) -> None:
    """printf calls a function of AMD's device library, which is copied with the kernel."""
    records, done = measured(tmp_path / "out", "--work", "stores", "--", program("output", gpu=gpu))
    assert done.returncode == 0, done.stderr
    (summary,) = (record for record in records if record["type"] == "summary")
    assert (summary["launches_instrumented"], summary["not_instrumented"]) == (4, {})
    found = [one for one in records if one["type"] == "kernel" and one["kernel"] == "hello"]
    assert {(one["launches"], one["runs"]) for one in found} == {(1, 128), (3, 96)}
    assert all(one["work"] > 0 for one in found)


def test_a_queue_that_is_full(tmp_path: Path) -> None:
    """ROCr's own way of waiting for room ends the program, or reorders its packets."""
    words = ("--", program("probed"), 1000)
    records, done = measured(tmp_path / "out", *words, ROC_AQL_QUEUE_SIZE="64")
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    (summary,) = (record for record in records if record["type"] == "summary")
    assert summary["launches_instrumented"] == 1000 + 4 * 1000 + 3 and summary["lost"] == 0


@pytest.mark.every(3)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_tool_ends_and_the_program_goes_on(end: int, tmp_path: Path) -> None:
    app, out = program("probed"), tmp_path / "program"
    libraries()
    with open(out, "wb") as into:
        tool = subprocess.Popen(
            [*TOOL, "-o", tmp_path / "out", "0.1", "--", "setsid", "sh", "-c", f"{quoted(app)} 3000; echo status $?"],
            stdout=into, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        assert tool.stderr is not None
        while "attached" not in (line := tool.stderr.readline()):
            assert line
        tool.send_signal(end)
        tool.communicate(timeout=300)
    for _ in range(3000):
        if "status" in (said := out.read_text()):
            break
        subprocess.run(["sleep", "0.1"], check=True)
    assert said == "right\nstatus 0\n"


def test_list(tmp_path: Path) -> None:
    """Which kernels of a program can be measured, in the file and when it runs."""
    app = program("kernels")
    for words, launched in (((app,), False), (("--", app), True)):
        records, done = measured(tmp_path / "out", "--list", *words)
        assert done.returncode == 0, done.stderr
        listed = {record["kernel"]: record for record in records}
        assert all(record["gpus"] == ["gfx906"] for record in listed.values()), listed
        assert {record["reason"] for record in listed.values()} <= {None, "it calls functions"}
        assert any(record["launches"] for record in records) == launched


def test_a_tool_that_cannot_says_so(tmp_path: Path) -> None:
    """Kernels of AMD GPUs have no probes at device functions yet."""
    tool = tmp_path / "functions"
    tool.write_text(FUNCTIONS)
    words = [sys.executable, str(tool)]
    variables = environment() | {"PYTHONPATH": str(ROOT / "lib")}
    done = subprocess.run(
        [*words, "--list", program("vectoradd")], capture_output=True, text=True, timeout=300, env=variables
    )
    assert "no: kernels of AMD GPUs have no probes at function_entry yet" in done.stdout, done.stderr
    done = subprocess.run(
        [*words, "--", program("kernels")], capture_output=True, text=True, timeout=300, env=variables
    )
    assert done.returncode == 0, done.stderr  # the program has its device
    assert "functions: note: kernels of AMD GPUs have no probes at function_entry yet, which " in done.stderr


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("way", "status", "launches"),
    [
        *((way, 4, 6) for way in ("return", "exit", "_exit", "_Exit", "quick_exit", "thread", "child")),
        ("older", 4, 9),
        ("quick_older", 4, 8),
        ("exec", 0, 6),
        ("fault", 128 + signal.SIGSEGV, 6),
        ("handlers", 128 + signal.SIGPIPE, 6),
        ("quiet", 128 + signal.SIGKILL, 6),
        *((str(int(number)), 128 + number, 6) for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXCPU)),
    ],
)
def test_results_come_however_the_program_ends(tmp_path: Path, way: str, status: int, launches: int) -> None:
    records, done = measured(tmp_path / "out", "--", program("ends"), way)
    older = {"older": "found 8\n", "quick_older": "found 8\n"}
    assert (done.returncode, done.stdout) == (status, "launched\n" + older.get(way, "")), done.stderr
    found = kernels(records)["increment"]
    assert (found["launches"], found["runs"]) == (launches, launches * 512)
    summary = records[-1]
    assert (summary["launches_matched"], summary["not_instrumented"], summary["lost"]) == (launches, {}, 0)
    assert "note: attached" in done.stderr
    assert done.stderr.count("note:") == 2, done.stderr  # the embedded device; attached
