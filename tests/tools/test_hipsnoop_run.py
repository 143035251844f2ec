"""hipsnoop end to end: on a library whose calls take known times, and on AMD's own library without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpubpf_hip
import gpubpf_scenes as scenes
from gpubpf import elf
from gpubpf.process import address_space
from gpubpf_hip import needs_hip
from gpubpf_host import needs_bpf

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(REPOSITORY / "tools/hipsnoop.py")]
PROGRAMS = Path(__file__).with_name("hipsnoop_programs")
MS = 1_000_000

pytestmark = needs_bpf


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a program that calls the stand-in; see hip/program.c."""
    directory = tmp_path_factory.mktemp("hipsnoop")
    return gpubpf_hip.program(directory, gpubpf_hip.standin(directory))


def run(
    *arguments: object, standin: str = "", command: tuple[object, ...] = (), status: int | None = 0
) -> subprocess.CompletedProcess[str]:
    words = [*TOOL, *map(str, arguments), *(("--", *map(str, command)) if command else ())]
    environment = {**os.environ, "STANDIN": standin}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)
    assert status is None or done.returncode == status, done.stderr
    return done


def records(output: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in output.read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["type"], []).append(record)
    assert list(found)[-1] == "summary" and len(found["summary"]) == 1
    assert all("pid" in r and "comm" in r for kind in found if kind != "summary" for r in found[kind])
    return found


def measured(tmp_path: Path, *arguments: object, **more: Any) -> dict[str, list[dict[str, Any]]]:
    run("--json", "-o", tmp_path / "out", *arguments, **more)
    return records(tmp_path / "out")


def test_a_summary_counts_what_the_program_counts(program: Path, tmp_path: Path) -> None:
    made = ["hipMalloc", "hipMemcpy", "hipLaunchKernel", "launch", "hipDeviceSynchronize"]
    done = run(
        *("--json", "-o", tmp_path / "out"),
        command=(program, "-t", 2, "-n", 50, *made),
        standin="hipDeviceSynchronize=sleep:3000 hipMemcpy=result:1",
    )
    told = gpubpf_hip.told(done.stdout)
    found = records(tmp_path / "out")
    apis = {record["api"]: record for record in found["api"]}
    assert {name: record["count"] for name, record in apis.items()} == {
        **{name: told[name].count for name in made if name != "launch"},
        "hipLaunchKernel": told["hipLaunchKernel"].count + told["launch"].count,
    }
    assert {name: r["errors"] for name, r in apis.items() if r["errors"]} == {"hipMemcpy": 100}
    assert apis["hipMemcpy"]["last_error"] == "hipErrorInvalidValue"
    wait = apis["hipDeviceSynchronize"]
    assert 3 * MS < wait["lat_ns"]["p50"] <= wait["lat_ns"]["max"]
    assert wait["off_cpu_ns"] > 0.8 * wait["total_ns"]
    kernels = {record["kernel"]: record for record in found["kernel"]}
    assert {name: record["count"] for name, record in kernels.items()} == {"saxpy": 100, "math::reduce": 100}
    assert kernels["saxpy"]["demangled"] == "saxpy(float, float const*, float*, int)"
    assert kernels["saxpy"]["gap_ns"]["p50"] > 3 * MS  # a thread waits for the device between these
    summary = found["summary"][0]
    assert (summary["tool"], summary["calls"], summary["lost"]) == ("hipsnoop", 500, 0)
    assert summary["duration_ns"] > 150 * MS and summary["processes"] == 1
    (attached,) = found["attached"]
    assert attached["pid"] == wait["pid"] and f"attached to {attached['pid']} (" in done.stderr


def test_each_call_is_a_record_with_its_arguments(program: Path, tmp_path: Path) -> None:
    made = ("hipMalloc", "hipMemcpy", "hipLaunchKernel", "hipModuleLoad", "hipModuleGetFunction")
    made += ("hipModuleLaunchKernel", "hipStreamCreate", "hipMemcpyAsync", "hipGetDevice")
    found = measured(tmp_path, "-e", command=(program, *made), standin="hipMemcpy=result:1")["call"]
    calls = {record["api"]: record for record in found}
    assert [record["api"] for record in found] == [*made[:-1]]  # the last one is trivial, so it has no probe
    assert [record["ts_ns"] for record in found] == sorted(record["ts_ns"] for record in found)
    launch = calls["hipLaunchKernel"]
    shape = {"grid": [10, 2, 3], "block_dim": [64, 4, 1], "shared_bytes": 64, "stream": "0x0"}
    assert {**launch, **shape, "kernel": "saxpy", "ret": 0} == launch and int(launch["fn_addr"], 16)
    module = calls["hipModuleLaunchKernel"]
    shape = {"grid": [7, 6, 5], "block_dim": [32, 2, 4], "shared_bytes": 96}
    assert {**module, **shape, "kernel": "from_file"} == module and module["gap_ns"] >= 0
    failed = {"ret": 1, "error": "hipErrorInvalidValue", "bytes": 4096, "copy": "h2d"}
    assert {**calls["hipMemcpy"], **failed} == calls["hipMemcpy"] and "error" not in calls["hipMalloc"]
    assert calls["hipMalloc"]["bytes"] == 65536
    assert calls["hipMemcpyAsync"]["stream"] == calls["hipStreamCreate"]["out"] != "0x0"
    assert launch["cgroup_id"] and launch["tid"] == launch["pid"]


def test_tables_and_lines_fit_a_terminal(program: Path) -> None:
    made = ("hipMalloc", "hipStreamCreate", "hipMemcpyAsync", "launch", "hipDeviceSynchronize")
    standin = "hipDeviceSynchronize=sleep:2000 hipMemcpyAsync=result:1"
    for options in (("--why", "-v"), ("--slow", 1000), ("-T", 1, 1)):
        done = run(*options, command=(program, "-n", 20, *made), standin=standin)
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "\ncounted " in done.stdout
    lines = run("-e", command=(program, *made), standin=standin).stdout.splitlines()
    (launch,) = (line for line in lines if "hipLaunchKernel" in line)
    assert launch.endswith("hipLaunchKernel math::reduce<<<10x2x3, 64x4, 48>>>" + launch.partition(">>>")[2])
    assert any(line.endswith("= hipErrorInvalidValue") for line in lines)
    text = run(command=(program, "-n", 20, *made), standin=standin).stdout
    assert "in hipDeviceSynchronize" in text and "20 calls failed (hipErrorInvalidValue)" in text
    assert text.index("took") < text.index("API  ") < text.index("KERNEL  ")


def know_all(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return the records if the kernel reported every switch between threads."""
    if found["summary"][0]["lost_why"]:
        raise scenes.UntoldError
    return found


@scenes.told
def test_slow_calls_are_told_with_what_happened_inside(program: Path, tmp_path: Path) -> None:
    made = ("hipMalloc", "hipMemcpy", "hipDeviceSynchronize")
    standin = "hipDeviceSynchronize=sleep:20000"
    options = ("--slow", 15000)
    found = know_all(measured(tmp_path, *options, command=(program, "-n", 3, *made), standin=standin))
    slow = [record for record in found["call"] if record["api"] == "hipDeviceSynchronize"]
    assert len(slow) == 3
    for record in slow:
        assert record["lat_ns"] > 15 * MS
        most = max(record["why"], key=lambda cause: cause["ns"] or 0)
        assert most["what"] == "blocked in clock_nanosleep" and most["ns"] > 10 * MS
    text = run(*options, command=(program, "-n", 3, *made), standin=standin).stdout
    assert "threads that make the slow calls" in text and "blocked in clock_nanosleep" in text


@scenes.told
def test_why_tells_functions_and_gaps_apart(program: Path, tmp_path: Path) -> None:
    made = ("hipDeviceSynchronize", "hipLaunchKernel")
    command = (program, "-n", 10, "-p", 4000, *made)
    standin = "hipDeviceSynchronize=sleep:3000"
    found = know_all(measured(tmp_path, "--why", command=command, standin=standin))["why"]
    asleep = {r["api"]: r for r in found if (r["reason"], r["syscall"]) == ("blocked", "clock_nanosleep")}
    assert asleep["hipDeviceSynchronize"]["count"] == 10 and asleep["hipDeviceSynchronize"]["ns"] > 25 * MS
    assert None in asleep and asleep[None]["ns"] > 25 * MS  # the program's own pauses


@scenes.told
def test_between_launches_is_nothing_that_came_after_the_last(program: Path) -> None:
    made = ("hipLaunchKernel", "hipDeviceSynchronize")
    done = run("--why", command=(program, "-n", 3, *made), standin="hipDeviceSynchronize=sleep:20000")
    if "off the CPU or with page faults" in done.stdout:
        raise scenes.UntoldError  # the last lines say that some are missing
    (row,) = (
        line.split() for line in done.stdout.splitlines() if line.startswith("hipDeviceSynchronize  bl")
    )
    assert row[:5] == ["hipDeviceSynchronize", "blocked", "in", "clock_nanosleep", "3"]
    said = " ".join(done.stdout.split()).partition(", between launches: ")[2]
    assert re.match(r"blocked in clock_nanosleep [\d.]+ ms \(2 times\) in hipDeviceSynchronize", said)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--api", "hipMem*"), {"hipMemcpy": 4}),
        (("--api", "sync"), {"hipDeviceSynchronize": 4}),
        (("--api", "hipGetDevice"), {"hipGetDevice": 4}),
        (("--errors",), {"hipMemcpy": 4}),
        (("--kernel", "math::*"), {"hipLaunchKernel": 4}),
        (("--kernel", "_Z5saxpyfPKfPfi"), {"hipLaunchKernel": 4}),
        (("--slow", "15000"), {"hipDeviceSynchronize": 4}),
        (("--comm", "nobody"), {}),
    ],
)
def test_filters(program: Path, tmp_path: Path, options: tuple[str, ...], expected: dict[str, int]) -> None:
    made = ("hipMemcpy", "hipGetDevice", "hipLaunchKernel", "launch", "hipDeviceSynchronize")
    standin = "hipMemcpy=result:1 hipDeviceSynchronize=sleep:20000"
    found = measured(tmp_path, "-e", *options, command=(program, "-n", 4, *made), standin=standin)
    counts = Counter(record["api"] for record in found.get("call", []))
    if "--slow" in options:  # other calls may have been slow by preemption
        counts = Counter({name: n for name, n in counts.items() if name in expected})
    assert counts == expected
    assert found["summary"][0]["calls"] >= sum(expected.values())


def test_some_launches_of_each_kernel(program: Path, tmp_path: Path) -> None:
    command = (program, "-n", 10, "hipMalloc", "hipLaunchKernel", "launch")
    for options, count in (
        (("--launch", "2:4"), 3),
        (("--sample", 4), 3),
        (("--launch", "9:", "--sample", 2), 1),
    ):
        found = measured(tmp_path, *options, command=command, standin="hipLaunchKernel=busy:50")
        assert {r["kernel"]: r["count"] for r in found["kernel"]} == {"saxpy": count, "math::reduce": count}
        (api,) = found["api"]
        assert (api["api"], api["count"], found["summary"][0]["calls"]) == (
            "hipLaunchKernel",
            2 * count,
            2 * count,
        )
        assert api["lat_ns"]["p50"] * 1.07 >= 50_000 and api["lat_ns"]["max"] <= api["total_ns"]


def test_a_kernel_that_nothing_launches_is_an_error(program: Path) -> None:
    done = run("--kernel", "nosuch", command=(program, "hipLaunchKernel"), status=1)
    assert done.stderr.splitlines()[-1] == "hipsnoop: no kernel matches 'nosuch'; kernels seen: saxpy"
    done = run("--kernel", "nosuch", command=("sh", "-c", "exit 3"), status=3)
    assert done.stderr.splitlines()[-1] == "hipsnoop: no kernel was launched"
    done = run("--kernel", "nosuch", "--kernel", "sax*", command=(program, "hipLaunchKernel"))
    assert done.stderr.splitlines()[-1] == "hipsnoop: note: no kernel matches 'nosuch'; kernels seen: saxpy"


@pytest.mark.every(2)
def test_exit_status_and_what_is_said_of_commands() -> None:
    assert run(command=("sh", "-c", "exit 7"), status=7).stderr.count("\n") == 1
    assert run(command=("sh", "-c", "kill -9 $$"), status=137)
    missing = run(command=("./no such command",), status=127).stderr
    assert missing == "hipsnoop: ./no such command: not found; check the name and PATH\n"
    assert run(command=("/etc/passwd",), status=126).stderr.startswith(
        "hipsnoop: /etc/passwd: Permission denied;"
    )
    assert "has loaded libamdhip64.so" in run(command=("true",)).stderr
    assert run("-p", 2**22 + 1, status=1).stderr.count("\n") == 1
    assert run("--api", "nosuch", command=("true",), status=2).stderr.startswith("hipsnoop: no function")


def test_results_that_cannot_be_written(program: Path) -> None:
    full = run("-e", "-o", "/dev/full", command=(program, "hipMalloc"), status=1)
    assert full.stdout == "hipMalloc 1 0\n" and "No space left" in full.stderr.splitlines()[-1]
    words = [*TOOL, "-e", "--", str(program), "-n", "2000", "hipMalloc"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None and tool.stderr is not None
        tool.stdout.readline()
        tool.stdout.close()
        assert all("Traceback" not in line for line in tool.stderr)
        assert tool.wait(100) in (0, 141)  # the program's status: it writes to the same pipe


def test_a_measurement_ends_whose_results_nobody_reads(program: Path) -> None:
    started = start(program, "-n", 1000000, "-p", 1000, "hipFree")
    try:
        words = [*TOOL, "-e", "-p", str(started.pid)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tool:
            try:
                assert tool.stdout is not None and tool.stderr is not None
                assert "attached to" in tool.stderr.readline()
                go(started)
                tool.stdout.readline()
                tool.stdout.close()
                assert tool.wait(60) == 0  # the program continues
                assert started.poll() is None
            finally:
                tool.kill()
    finally:
        started.kill()
        started.wait()


def test_a_trace_that_cannot_be_written_costs_no_table(program: Path, tmp_path: Path) -> None:
    command = (program, "-n", 2000, "hipMalloc", "hipFree")
    done = run("--trace", "/dev/full", command=command, status=1)
    expected = "hipsnoop: cannot write /dev/full: No space left on device; choose another file"
    assert done.stderr.splitlines() == [expected] and not done.stdout  # and the command was not run
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["head", "-c", "1", str(pipe)], stdout=subprocess.DEVNULL)
    done = run("--trace", pipe, command=command, status=1)
    assert reader.wait(60) == 0
    assert f"hipsnoop: cannot write {pipe}: Broken pipe; choose another file" in done.stderr.splitlines()
    assert "\ncounted 4,000 calls of 1 process; none lost" in done.stdout and "\nAPI " in done.stdout


def test_csv_says_what_it_leaves_out(program: Path) -> None:
    done = run("--csv", "--why", "--timeline", command=(program, "hipMalloc"))
    note = "hipsnoop: note: CSV holds only one table, without --why and --timeline; use --json for these"
    assert note in done.stderr.splitlines()
    assert [line.split(",")[0] for line in done.stdout.splitlines()[1:]] and "hipMalloc" in done.stdout
    assert "CSV" not in run("--csv", command=(program, "hipMalloc")).stderr


def start(program: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start a program that has loaded the library and waits for `go`."""
    words = [str(program), "-w", *map(str, arguments)]
    started = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None and started.stdout.readline() == "ready\n"
    return started


def eventually(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def attach(*arguments: object, times: int = 1) -> subprocess.Popen[str]:
    """Start hipsnoop, and wait until it has said `times` times that it is attached."""
    words = [*TOOL, *map(str, arguments)]
    tool = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert tool.stderr is not None
    for line in tool.stderr:
        times -= "attached to" in line
        if not times:
            return tool
    raise AssertionError(tool.wait())


def go(started: subprocess.Popen[str]) -> None:
    assert started.stdin is not None
    started.stdin.write("\n")
    started.stdin.close()


def test_processes_that_run_already(program: Path, tmp_path: Path) -> None:
    both = [start(program, "-n", 30, "hipLaunchKernel", "hipFree") for _ in range(2)]
    tool = attach("--json", "-o", tmp_path / "out", "-p", ",".join(str(p.pid) for p in both), times=2)
    for one in both:
        go(one)
        assert one.wait(100) == 0
    assert tool.wait(100) == 0  # all have ended
    found = records(tmp_path / "out")
    assert {record["pid"] for record in found["attached"]} == {p.pid for p in both}
    counts = {(record["pid"], record["api"]): record["count"] for record in found["api"]}
    assert counts == {(p.pid, name): 30 for p in both for name in ("hipLaunchKernel", "hipFree")}
    assert {(r["pid"], r["kernel"], r["count"]) for r in found["kernel"]} == {
        (p.pid, "saxpy", 30) for p in both
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="needs privileges to give up")
def test_a_kernel_is_named_though_its_process_has_ended(program: Path, tmp_path: Path) -> None:
    """Its file says nothing of device code, and cannot be opened any more."""
    copy = tmp_path / "copy"
    rename = ("--rename-section=.hip_fatbin=.one", "--rename-section=.hipFatBinSegment=.other")
    subprocess.run(["objcopy", *rename, program, copy], check=True)
    command = [copy, "-w", "-n", "3", "-p", "200000", "hipLaunchKernel"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        copy.unlink()
        tool = [*TOOL, "--json", "-p", str(process.pid)]
        with subprocess.Popen(tool, stdout=subprocess.PIPE, text=True) as measuring:
            assert measuring.stdout is not None and "attached" in measuring.stdout.readline()
            process.communicate("\n", timeout=60)
            found = [json.loads(line) for line in measuring.stdout]
    assert [r["kernel"] for r in found if r["type"] == "kernel"] == ["saxpy"]


def test_hooks_in_a_process_that_is_not_traced_are_not_its_concern(program: Path, tmp_path: Path) -> None:
    library = gpubpf_hip.standin(tmp_path)
    hooked = (
        "import ctypes, mmap, sys\n"
        f"f = ctypes.cast(ctypes.CDLL({str(library)!r}).hipMalloc, ctypes.c_void_p).value\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.mprotect(ctypes.c_void_p(f & ~4095), 8192, 7)\n"
        "ctypes.memmove(f, b'\\xe9\\0\\0\\0\\0', 5)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    words = [sys.executable, "-c", hooked]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        done = run(command=(program, "-n", 3, "-p", 200_000, "hipMalloc"))
        assert "hooked" not in done.stderr and "hipMalloc" in done.stdout
        own = run("-d", 1, "-p", other.pid)
        assert f"hipMalloc of {library.name} is not traced: hooked by another tool" in own.stderr
        other.communicate("\n")


def test_privileges_are_given_up_once_it_watches(program: Path) -> None:
    """The thread that waits for libraries drops them, too. Threads of NumPy do not run our code."""
    started = start(program, "-n", 1, "hipFree")
    try:
        tool = attach("-p", started.pid)

        def without() -> dict[int, int]:
            """Return the threads that have dropped privileges, with their capabilities."""
            found = {}
            for thread in Path(f"/proc/{tool.pid}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    lines = (line.split(":\t") for line in (thread / "status").read_text().splitlines())
                    status = dict(line for line in lines if len(line) == 2)
                    if status["NoNewPrivs"] == "1":
                        found[int(thread.name)] = int(status["CapEff"], 16)
            return found

        eventually(lambda: len(without()) == 2)
        found = without()
        assert tool.pid in found and len(found) == 2
        assert not any(capabilities >> 12 & 1 for capabilities in found.values())  # CAP_NET_ADMIN
        tool.terminate()
        assert tool.wait(100) == 0
    finally:
        started.kill()
        started.wait(100)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_measurement_and_leave_the_process(program: Path, tmp_path: Path, how: int) -> None:
    started = start(program, "-n", 100000, "-p", 1000, "hipFree")
    try:
        tool = attach("--json", "-o", tmp_path / "out", "-p", started.pid)
        go(started)
        time.sleep(1)
        tool.send_signal(how)
        assert tool.wait(100) == 0
        assert started.poll() is None
        assert records(tmp_path / "out")["api"][0]["count"] > 0
    finally:
        started.kill()
        started.wait(100)


@pytest.mark.every(2)
def test_duration_and_intervals_with_a_command_that_goes_on(program: Path, tmp_path: Path) -> None:
    command = (program, "-n", 300, "-p", 10000, "hipFree")
    began = time.monotonic()
    done = run("-d", 0.4, "--json", "-o", tmp_path / "out", command=command)
    assert time.monotonic() - began > 3 and done.stdout == "hipFree 300 0\n"
    assert 0 < records(tmp_path / "out")["summary"][0]["calls"] < 300
    found = measured(tmp_path, 0.5, 3, "-T", command=command)
    rows = [record for record in found["api"] if record["api"] == "hipFree"]
    assert len(rows) == 3 and rows[0]["ts_ns"] < rows[1]["ts_ns"] < rows[2]["ts_ns"]
    assert sum(row["count"] for row in rows) == found["summary"][0]["calls"]


def probed(pid: int, *functions: str) -> bool:
    """Return whether a process has the kernel's breakpoints at functions of the library."""
    code = [m for m in address_space.mappings(pid) if m.code and "/libamdhip64.so" in m.path]
    with address_space.Memory(pid) as memory, open(code[0].path, "rb") as file:
        library = elf.LoadedFile(file.fileno())
        symbols = elf.exports(library)
        offsets = [library.offset(symbols[name].address) for name in functions]
        return all(
            memory.read(m.start + at - m.offset, 1) == b"\xcc"
            for at in offsets
            for m in code
            if m.offset <= at < m.offset + m.end - m.start
        )


@pytest.mark.every(2)
@pytest.mark.own_processes
def test_the_whole_machine(program: Path, tmp_path: Path) -> None:
    words = [*TOOL, "--json", "-o", str(tmp_path / "out"), "-d", "30"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as tool:
        assert tool.stderr is not None
        assert any("watching every process" in line for line in tool.stderr)
        first = start(program, "hipFree")  # short processes may end before a new library is found
        eventually(lambda: probed(first.pid, "hipFree", "hipLaunchKernel"))
        pids = []
        for _ in range(3):
            started = subprocess.Popen([program, "-n", "20", "hipLaunchKernel"], stdout=subprocess.DEVNULL)
            assert started.wait(100) == 0
            pids.append(started.pid)
        go(first)
        assert first.wait(100) == 0
        tool.send_signal(signal.SIGINT)
        tool.stderr.read()
        assert tool.wait(100) == 0
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert next(line for line in lines if line["type"] == "watching")["ts_ns"] > 0
    counts = {line["pid"]: line["count"] for line in lines if line["type"] == "api"}
    assert counts[first.pid] == 1
    assert {pid: counts.get(pid) for pid in pids} == dict.fromkeys(pids, 20)


@pytest.mark.long
@pytest.mark.own_processes
def test_a_library_that_only_short_processes_bring(tmp_path: Path) -> None:
    """The first processes end before the library has probes. Later ones are counted."""
    program = gpubpf_hip.program(tmp_path, gpubpf_hip.standin(tmp_path))
    words = [*TOOL, "--json", "-o", str(tmp_path / "out"), "-d", "60"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as tool:
        assert tool.stderr is not None
        assert any("watching every process" in line for line in tool.stderr)
        pids = []
        for _ in range(10):
            started = subprocess.Popen([program, "-n", "5", "hipFree"], stdout=subprocess.DEVNULL)
            assert started.wait(100) == 0
            pids.append(started.pid)
            time.sleep(0.3)
        tool.send_signal(signal.SIGTERM)
        tool.stderr.read()
        assert tool.wait(100) == 0
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    counts = {line["pid"]: line["count"] for line in lines if line["type"] == "api"}
    assert counts.get(pids[-1]) == 5


LATE = """
import ctypes, pathlib, sys
library = ctypes.CDLL(f"{sys.argv[1]}/far/away/{sys.argv[3]}")
while "attached" not in pathlib.Path(sys.argv[2]).read_text():
    library.hipFree(None)
"""


def test_a_library_from_anywhere_is_said_to_have_had_its_probes_late(tmp_path: Path) -> None:
    (tmp_path / "far/away").mkdir(parents=True)
    library = gpubpf_hip.standin(tmp_path / "far/away")
    out = tmp_path / "out"
    found = measured(tmp_path, command=(sys.executable, "-c", LATE, tmp_path, out, library.name))
    (late,) = (one for one in found["summary"][0]["libraries"] if one["path"] == str(library))
    assert late["late"]["pid"] == found["attached"][0]["pid"]
    assert all("late" not in one for one in found["summary"][0]["libraries"] if one is not late)


@pytest.mark.every(4)
def test_timeline_trace_and_csv(program: Path, tmp_path: Path) -> None:
    command = (program, "-n", 2, "hipLaunchKernel", "hipDeviceSynchronize")
    text = run("--timeline", "--trace", tmp_path / "trace", command=command).stdout
    assert "thread " in text and text.count("hipLaunchKernel saxpy") == 2
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    assert Counter(e["name"] for e in events if e["ph"] == "X") == {
        "hipLaunchKernel saxpy": 2,
        "hipDeviceSynchronize": 2,
    }
    found = measured(tmp_path, "--timeline", command=command)
    assert [op["op"] for op in found["op"]] == ["api"] * 4
    run("--csv", "-o", tmp_path / "csv", command=command)
    header, *rows = ((tmp_path / "csv").read_text()).splitlines()
    assert header.startswith("pid,comm,api,count,errors,mean_ns") and len(rows) == 2
    run("--csv", "-e", "-o", tmp_path / "csv", command=command)
    header, *rows = ((tmp_path / "csv").read_text()).splitlines()
    assert header.startswith("ts_ns,pid,comm,tid") and len(rows) == 4
    assert {row.count(",") for row in rows} == {header.count(",")}


def test_list(program: Path, tmp_path: Path) -> None:
    library = program.parent / "libamdhip64.so.6"
    text = run("--list", program).stdout
    assert str(library) in text and "math::reduce" in text
    done = run("--list", "--json", "-o", tmp_path / "out", "--api", "hipLaunch*", library)
    listed = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert done.stdout == "" and {r["file"] for r in listed} == {str(library)}
    assert {r["api"]: r["instrumentable"] for r in listed}["hipLaunchKernel"] is True
    assert all((r["reason"] is None) == r["instrumentable"] for r in listed)
    run("--list", "--json", "-o", tmp_path / "out", command=(program, "-n", 3, "hipLaunchKernel"))
    listed = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [(r["kernel"], r["launches"]) for r in listed if "kernel" in r] == [("saxpy", 3)]
    started = start(program, "hipFree")
    try:
        assert str(library) in run("--list", "-p", started.pid).stdout
    finally:
        go(started)
        started.wait(100)
    assert run("--list", "/etc/passwd", status=1).stderr.count("\n") == 1


@needs_hip
def test_on_amds_own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ("hipMalloc", "hipMemcpy", "hipLaunchKernel", "launch", "hipDeviceSynchronize")
    program = gpubpf_hip.program(tmp_path, gpubpf_hip.real())
    monkeypatch.setenv("HIPSIM_DEVICES", "0")  # its launches name no kernel of any GPU, and HIP would end it
    done = run("--json", "-o", tmp_path / "out", command=(program, "-t", 4, "-n", 500, *made))
    told = gpubpf_hip.told(done.stdout)
    found = records(tmp_path / "out")
    counts = {record["api"]: (record["count"], record["errors"]) for record in found["api"]}
    for name in ("hipMalloc", "hipMemcpy", "hipDeviceSynchronize"):
        failed = told[name].count if told[name].result else 0
        assert counts[name] == (told[name].count, failed)
    assert counts["hipLaunchKernel"][0] == told["hipLaunchKernel"].count + told["launch"].count
    assert {r["kernel"]: r["count"] for r in found["kernel"]} == {"saxpy": 2000, "math::reduce": 2000}
    assert found["summary"][0]["lost"] == 0


def test_who_may_watch(program: Path) -> None:
    words = ["setpriv", "--reuid", "65534", "--clear-groups", *TOOL, "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if "Permission denied" in done.stderr:
        pytest.skip("another user cannot read this checkout")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == "hipsnoop: tracing calls of a library requires root, or CAP_BPF and CAP_PERFMON; use sudo\n"
    )


def test_a_library_that_is_in_no_file_system(tmp_path: Path) -> None:
    """The probes come a moment after the process has mapped it, so the first calls may be missing."""
    built = tmp_path / "in_memory"
    subprocess.run(["gcc", "-o", built, PROGRAMS / "in_memory.c", "-ldl"], check=True)
    found = measured(tmp_path, command=(built, gpubpf_hip.standin(tmp_path)))
    (api,) = found["api"]
    assert api["api"] == "hipMalloc" and 1 <= api["count"] <= 10
    assert any(one["path"] == "/memfd:libamdhip64.so.6" for one in found["summary"][0]["libraries"])


def test_calls_of_other_processes_are_not_missed(tmp_path: Path) -> None:
    """Another process loads a library during the measurement, and makes calls before it has probes."""
    built, out = tmp_path / "in_memory", tmp_path / "out"
    subprocess.run(["gcc", "-o", built, PROGRAMS / "in_memory.c", "-ldl"], check=True)
    library = gpubpf_hip.standin(tmp_path)
    with subprocess.Popen(["sleep", "100"]) as traced:
        command = [*TOOL, "--json", "-o", out, "-p", str(traced.pid)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tool:
            assert tool.stderr is not None
            while "has not loaded libamdhip64.so yet; waiting" not in (line := tool.stderr.readline()):
                assert line
            subprocess.run([built, library], check=True, stdout=subprocess.DEVNULL)
            traced.kill()
            assert tool.wait(60) == 0
    (summary,) = records(out)["summary"]
    probed = [one for one in summary["libraries"] if one["path"] == "/memfd:libamdhip64.so.6"]
    assert summary["calls"] == 0 and probed and not any("late" in one for one in probed)


def test_a_32_bit_program_is_named(tmp_path: Path) -> None:
    built = tmp_path / "exit32"
    subprocess.run(["as", "--32", "-o", tmp_path / "exit32.o", PROGRAMS / "exit32.S"], check=True)
    subprocess.run(["ld", "-m", "elf_i386", "-o", built, tmp_path / "exit32.o"], check=True)
    done = run(command=(built,), status=None)  # some kernels do not execute it
    assert done.stderr.count("exit32 is a 32-bit program; only calls of 64-bit libraries are traced") == 1
