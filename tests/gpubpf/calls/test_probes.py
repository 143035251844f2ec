"""Every call to a library is counted exactly once, for the traced processes and threads only, or counted as lost."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpubpf_calls
from gpubpf.calls import arrays, delay_probes, delays, device_times, kernel_names
from gpubpf.calls.api import Api, ApiFunction
from gpubpf.calls.device_times import dispatches
from gpubpf.calls.probes import CallCounts, CallOptions, CallProbes
from gpubpf.ebpf import headers
from gpubpf.kernel import bpf_syscall
from gpubpf.linux import uprobes
from gpubpf.memory import traffic
from gpubpf_calls import FUNCTIONS, NUMBER, by_function
from gpubpf_host import needs_bpf

HERE = Path(__file__).parent
API = Api("test", ("libgpucalls.so",), FUNCTIONS, {})

pytestmark = [needs_bpf, pytest.mark.skipif(not bpf_syscall._UPROBE_TYPE.exists(), reason="needs uprobes")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the program and the library that it links to."""
    return gpubpf_calls.build(tmp_path_factory.mktemp("calls"))


@contextlib.contextmanager
def counting(
    built: Path,
    entries: Mapping[str, int] | None = None,
    chosen: Any = None,
    library: Path | None = None,
    **options: Any,
) -> Iterator[CallProbes]:
    api = Api("test", (str(library or built.with_name("libgpucalls.so.1")),), FUNCTIONS, {})
    calls = CallProbes(api, chosen or api.choose(), CallOptions(**options), lambda text: None)
    calls.bpf.attached.entries.update(entries or {})
    calls.start()
    try:
        yield calls
    finally:
        calls.close()


def watched(calls: CallProbes, *command: Any, **how: Any) -> subprocess.Popen[str]:
    """Start a command whose calls are counted from the first one on."""
    calls.trace(os.getpid())
    try:
        return subprocess.Popen([str(part) for part in command], text=True, **how)
    finally:
        calls.forget(os.getpid())


def run(calls: CallProbes, *command: Any, **how: Any) -> int:
    """Run a command to its end with its calls counted. Return its PID."""
    process = watched(calls, *command, **how)
    try:
        assert process.wait(200) == 0
    finally:
        process.kill()
        process.wait()
    calls.stop()
    return process.pid


@pytest.fixture(params=uprobes.METHODS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if uprobes.METHODS.index(request.param) < uprobes.METHODS.index(uprobes.best_method()):
        pytest.skip(f"this kernel has no {request.param}")
    monkeypatch.setattr(uprobes, "best_method", lambda: request.param)
    return str(request.param)


def test_constants_are_those_of_the_headers() -> None:
    found = {}
    for path in (*headers.INCLUDE.glob("gpubpf_*.h"), Path(device_times.__file__).with_name("ring.h")):
        for name, value in re.findall(r"^#define (\w+) \(?(-?\w+(?: << \d+)?)[)\s]", path.read_text(), re.M):
            number = re.fullmatch(r"(-?(?:0x)?[0-9a-f]+?)u?l*(?: << (\d+))?", value)
            if number is not None:
                found[name] = int(number[1], 0) << int(number[2] or 0)
    expected = {
        "CALL_GAP": arrays.GAP, "CALL_NOWHERE": arrays.NOWHERE, "CALL_MEMORY": arrays.MEMORY, "CALL_WORDS": arrays.WORDS,
        "CALL_STEPS": arrays.STEPS, "CALL_SHIFT": arrays.SHIFT, "CALL_BUCKETS": arrays.BUCKETS,
        "DELAY_OUTSIDE": delays.OUTSIDE, "DELAY_UNKNOWN": delays.UNKNOWN, "DELAY_BETWEEN": delays.BETWEEN,
        "DELAY_NOBODY": delay_probes._NOBODY, "KERNEL_TEXT": kernel_names._STRIDE + 1, "KERNEL_PARTS": kernel_names._PARTS,
        "RING_SLOTS": dispatches.SLOTS, "RING_HEADER": dispatches.HEADER, "RING_GPUS": dispatches.GPUS,
        "RING_NAMES": dispatches.NAMES,
        "RING_MAGIC": dispatches.MAGIC,
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected
    ring = Path(device_times.__file__).with_name("ring.h").read_text()
    assert f'#define SOCKET "{dispatches.SOCKET}"' in ring


def enumerators(text: str) -> dict[str, int]:
    """Return the constants of all enums in C code, by name."""
    found: dict[str, int] = {}
    for body in re.findall(r"\benum\s*\w*\s*\{([^}]*)\}", re.sub(r"/\*.*?\*/", "", text, flags=re.S)):
        value = -1
        for name, given in re.findall(r"(\w+)(?:\s*=\s*(\w+))?\s*(?:,|$)", body):
            value = int(given, 0) if given else value + 1
            found[name] = value
    return found


def test_enumerators_are_those_of_the_headers() -> None:
    ring = Path(device_times.__file__).with_name("ring.h")
    paths = (*headers.INCLUDE.glob("gpubpf_*.h"), ring)
    found = {name: value for path in paths for name, value in enumerators(path.read_text()).items()}
    reasons = ("PREEMPTED", "BLOCKED", "BLOCK_IO", "PAGE_FAULT", "MEMORY", "STOPPED", "FAULTS", "RETRANSMITS")
    patterns = ("UNIT", "SHIFTED", "BROADCAST", "STRIDED", "GATHER", "SINGLE", "PART")
    expected = {f"DELAY_{name}": getattr(delays, name) for name in reasons}
    expected |= {f"GPU_{name}": getattr(traffic, name) for name in patterns}
    expected |= {
        f"AGENT_{name}": getattr(dispatches, name)
        for name in ("STARTED", "NO_SDK", "OTHER_TOOL", "VERSION", "REFUSED", "NO_MEMORY")
    }
    expected |= {
        "KERNEL_REGISTERED": kernel_names.REGISTERED,
        "KERNEL_FOUND": kernel_names.BY_NAME,
        "KERNEL_SAME": kernel_names.BY_HANDLE,
    }
    assert {name: found.get(name) for name in expected} == expected


# --- what a call is ---


def test_arguments_and_results(built: Path, way: str) -> None:
    with counting(built, events=True) as calls:
        pid = run(calls, built, "each")
        events = calls.events()
        names = [FUNCTIONS[e["function"]].symbol.removeprefix("calls_") for e in events]
        assert names == [
            "quick",
            "quick",
            "launch",
            "launch_by",
            "launch_from",
            "gives",
            "query",
            "query",
            "text",
        ]
        assert set(events["tgid"].tolist()) == set(events["tid"].tolist()) == {pid}
        assert {e["comm"].tobytes().rstrip(b"\0") for e in events} == {b"program"}
        assert events["failed"].tolist() == [0, 1, 0, 0, 0, 0, 0, 1, 0]
        assert events["result"][:2].tolist() == [0, 2] and (events["result"][6:8] & 0xFFFFFFFF).tolist() == [
            600,
            1,
        ]
        assert (events["start_ns"] < events["end_ns"]).all() and (
            events["start_ns"][1:] > events["end_ns"][:-1]
        ).all()
        assert abs(int(events["end_ns"][-1]) - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) < 60e9

        def value(i: int, field: str) -> Any:
            one, function = events[i : i + 1], FUNCTIONS[events["function"][i]]
            if field in ("grid", "block"):
                found = arrays.shapes(function, one, field)
            else:
                found = arrays.values(function, one, field)
            return None if found is None else found[0].tolist()

        launch = {f: value(2, f) for f in ("kernel", "grid", "block", "shared", "stream", "bytes")}
        assert launch == {"kernel": 0x4000, "grid": [1, 2, 3], "block": [4, 5, 6], "shared": 77, "stream": 0x5000,
                          "bytes": None}  # fmt: skip
        launch = {f: value(3, f) for f in ("kernel", "grid", "block", "shared", "stream")}
        assert launch == {
            "kernel": 0x7000,
            "grid": [7, 8, 9],
            "block": [10, 11, 12],
            "shared": 13,
            "stream": 14,
        }
        assert events["kernel"][2:5].tolist() == [0x4000, 0x7000, 0x6000]
        assert (value(5, "bytes"), value(5, "out")) == (4096, 0x1234567890)
        sums = calls.sums()
        assert by_function(sums) == {"quick": 2, "launch": 1, "launch_by": 1, "launch_from": 1, "gives": 1, "query": 2,
                                     "text": 1}  # fmt: skip
        assert by_function(sums, "errors") == {**dict.fromkeys(by_function(sums), 0), "quick": 1, "query": 1}
        assert sorted(sums["kernel"].tolist()) == [0, 0, 0, 0, 0x4000, 0x6000, 0x7000][-len(sums) :]
        assert calls.counts == CallCounts() and calls.lost == 0 and calls.seen == {pid: "program"}
        assert calls.absent == ("callsabsent",)
        assert [p.functions for p in calls.placed] == [tuple(f.symbol for f in FUNCTIONS[:-1])]


def test_calls_inside_of_calls_are_not_counted(built: Path, way: str) -> None:
    with counting(built, events=True) as calls:
        run(calls, built, "nested")
        assert by_function(calls.sums()) == {"outer": 1, "ends_in_quick": 1, "back": 1}
        assert calls.counts == CallCounts(nested=6)
        assert (calls.events()["result"] & 0xFFFFFFFF).tolist() == [0, 3, 0]


def test_calls_that_are_jumped_out_of(built: Path, way: str) -> None:
    with counting(built) as calls:
        run(calls, built, "jump", 3)
        assert by_function(calls.sums()) == {"quick": 2}
        assert calls.counts == CallCounts(abandoned=3)


def test_threads_and_processes_that_end_inside(built: Path) -> None:
    with counting(built) as calls:
        run(calls, built, "thread-ends", 5)
        assert (
            calls.counts == CallCounts(abandoned=5) and not len(calls.sums()) and not len(calls.under_way())
        )
    with counting(built) as calls:
        run(calls, built, "ends")
        assert calls.counts == CallCounts(abandoned=1) and not len(calls.under_way())


def test_what_is_under_way(built: Path) -> None:
    with counting(built) as calls:
        process = watched(calls, built, "sleep", 30_000_000)
        with contextlib.ExitStack() as stack:
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert within(60, lambda: len(calls.under_way()) == 1)
            (one,) = calls.under_way()
            assert (one["tgid"], one["tid"], one["function"]) == (process.pid, process.pid, NUMBER["sleep"])
            assert 0 < one["entry_ns"] < time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            assert not len(calls.sums())
        assert within(60, lambda: not len(calls.under_way()))


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


# --- times ---


def test_latency(built: Path) -> None:
    with counting(built) as calls:
        run(calls, built, "sleep", 30_000)
        (s,) = calls.sums()
        assert s["ns"] == s["largest_ns"] >= 30e6 and s["latency"].sum() == 1 and s["gaps"] == 0
        edges = arrays.bounds()
        bucket = int(s["latency"].argmax())
        assert edges[bucket] <= s["ns"] < edges[bucket + 1]
        assert abs(arrays.percentile(s["latency"], 0.5) / s["ns"] - 1) < 0.0626


def test_gaps_between_launches(built: Path) -> None:
    with counting(built, events=True) as calls:
        run(calls, built, "gaps", 4, 20_000)
        (s,) = calls.sums()
        assert s["count"] == 4 and s["gaps"] == 3 and s["gap"].sum() == 3 and s["kernel"] == 0x4000
        assert s["gap_ns"] >= 60e6 and s["gap_largest_ns"] >= s["gap_ns"] / 3
        events = calls.events()
        assert events["after"].tolist() == [0, 1, 1, 1] and events["gap_ns"][0] == 0
        assert (events["gap_ns"][1:] == events["start_ns"][1:] - events["end_ns"][:-1]).all()


def test_percentiles() -> None:
    edges = arrays.bounds()
    assert (
        len(edges) == arrays.BUCKETS + 1
        and edges[:4].tolist() == [0, 64, 72, 80]
        and (np.diff(edges) > 0).all()
    )
    values = np.random.default_rng(1).lognormal(11, 1.5, 20_000).astype("u8") + 64
    hist = np.bincount(np.searchsorted(edges, values, "right") - 1, minlength=arrays.BUCKETS).astype("u4")
    for q in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = np.quantile(values, q, method="inverted_cdf")
        assert abs(arrays.percentile(hist, q) / exact - 1) < 0.0626
    assert arrays.percentile(hist, 1.0, int(values.max())) <= values.max()
    assert arrays.percentile(np.zeros(arrays.BUCKETS, "u4"), 0.5) == 0


def test_layouts() -> None:
    one = arrays.layout(FUNCTIONS[NUMBER["launch_by"]])
    assert (one.launch, one.kernel, one.windows, one.stack) == (True, 1, ((0, 0),), 0)
    one = arrays.layout(FUNCTIONS[NUMBER["launch_from"]])
    assert (one.kernel, one.windows) == (arrays.MEMORY, ((0, 0),))
    assert arrays.layout(FUNCTIONS[NUMBER["launch"]]).stack == 2
    for wrong in ("stream=s4", "bytes=0@0 count=0@48", "bytes=0@0 count=1@0 stream=2@0", "kernel=0@8 bytes=0@0",
                  "grid=s2"):  # fmt: skip
        with pytest.raises(ValueError, match="arguments"):
            arrays.layout(ApiFunction("f", "f", "launch", wrong))


# --- exact ---


def test_exact_at_eight_threads(built: Path) -> None:
    """Sums are read while threads make calls. Each call is in exactly one of them."""
    threads, each = 8, 100_000
    with counting(built) as calls:
        process = watched(calls, built, "failing", threads, each)
        found = []
        while process.poll() is None:
            found.append(calls.sums())
            time.sleep(0.1)
        calls.stop()
        found.append(calls.sums())
        sums = np.concatenate(found)
        assert by_function(sums) == {"quick": threads * each}
        assert by_function(sums, "errors") == {"quick": threads * each // 4}
        assert (
            sums["latency"].sum() == threads * each and (sums["latency"].sum(axis=1) == sums["count"]).all()
        )
        assert (sums["largest_ns"] * sums["count"] >= sums["ns"]).all() and calls.lost == 0
        assert len(found) > 2 and calls.counts == CallCounts()


def test_records_are_exact_or_lost_is(built: Path) -> None:
    threads, each = 8, 20_000
    with counting(built, events=True) as calls:
        process = watched(calls, built, "quick", threads, each)
        found = []
        while process.poll() is None:
            found.append(calls.events())
            time.sleep(0.02)
        calls.stop()
        found.append(calls.events())
        events = np.concatenate(found)
        assert len(events) + calls.counts.records == threads * each
        assert by_function(calls.sums()) == {"quick": threads * each}
        tids, counts = np.unique(events["tid"], return_counts=True)
        assert len(tids) == threads and (calls.lost or (counts == each).all())


def test_a_full_ring(built: Path) -> None:
    with counting(built, {"call_events": 1 << 16}, events=True) as calls:
        run(calls, built, "quick", 1, 5000)
        size = calls.bpf.attached.programs.maps["call_events"].value_size
        room = 16 * 4096 // (8 + size)
        assert (len(calls.events()), calls.lost) == (room, 5000 - room)
        assert by_function(calls.sums()) == {"quick": 5000}


def test_full_sums(built: Path) -> None:
    with counting(built, {"call_sums": 8}) as calls:
        run(calls, built, "kernels", 100)
        sums = calls.sums()
        assert len(sums) == 8 and sums["count"].sum() + calls.counts.sums == 100 and calls.lost == 92


def test_more_threads_than_are_remembered(built: Path) -> None:
    """All are in a call at once. A call whose entry was evicted is counted as lost when it returns."""
    threads = 2000
    with counting(built, {"call_threads": 256}) as calls:
        run(calls, built, "inside", threads)
        seen = by_function(calls.sums()).get("back", 0)
        assert 0 < seen < threads and seen + calls.lost == threads


def test_two_thousand_threads(built: Path) -> None:
    threads = 2000
    with counting(built) as calls:
        run(calls, built, "inside", threads)
        assert by_function(calls.sums()) == {"back": threads} and calls.counts == CallCounts()
        assert not len(calls.host.items("call_threads"))


# --- whose ---


def test_forks_and_what_they_execute(built: Path) -> None:
    with counting(built) as calls:
        pid = run(calls, built, "forks", 20)
        sums = calls.sums()
        assert by_function(sums) == {"quick": 20 * 3} and len(set(sums["tgid"].tolist())) == 40
        assert pid not in sums["tgid"] and calls.counts == CallCounts()
        assert not len(calls.host.items("call_targets"))  # all of them have ended


def test_a_thread_that_executes_another_program(built: Path) -> None:
    """It gets the TID of the main thread, which ends."""
    with counting(built) as calls:
        pid = run(calls, built, "executes")
        sums = calls.sums()
        assert by_function(sums) == {"quick": 2 + 6} and set(sums["tgid"].tolist()) == {pid}
        assert calls.counts == CallCounts() and not len(calls.host.items("call_threads"))


def test_processes_before_and_after_and_no_other(built: Path) -> None:
    serve = (str(built), "serve")
    how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with contextlib.ExitStack() as stack:

        def server() -> Callable[[], None]:
            process = subprocess.Popen(serve, **how)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == "ready\n"

            def call() -> None:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write("\n")
                assert process.stdout.readline() == "called\n"

            pids.append(process.pid)
            return call

        pids: list[int] = []
        before, other = server(), server()
        with counting(built) as calls:
            calls.trace(pids[0])
            for call in (before, other, before):
                call()
            sums = calls.sums()
            assert (sums["tgid"].tolist(), sums["count"].tolist()) == ([pids[0]], [2])
            assert not len(calls.sums())
            other()
            before()
            assert calls.sums()["count"].tolist() == [1]
        with counting(built, everybody=True) as calls:
            after = server()
            for call in (before, other, after):
                call()
            sums = calls.sums()
            assert sorted(sums["tgid"].tolist()) == sorted(pids) and set(calls.seen) == set(pids)
            before()
            calls.stop()
            before()
            assert by_function(calls.sums()) == {"quick": 1}


@pytest.mark.parametrize("inside", [False, True])
def test_another_process_namespace(built: Path, inside: bool) -> None:
    """The program has a PID namespace of its own, or shares one with the tool, which then uses its numbers."""
    unshare = ("unshare", "-pf", "--mount-proc", "--kill-child")
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no process name spaces here")
    if inside:
        path = [str(HERE), *sys.path]
        code = f"import sys; sys.path[:0] = {path!r}; import test_probes; test_probes.inside_a_namespace({str(built)!r})"
        subprocess.run([*unshare, sys.executable, "-c", code], check=True, timeout=60)
        return
    with counting(built) as calls:
        run(calls, *unshare, built, "forks", 2)
        assert by_function(calls.sums()) == {"quick": 6}


def inside_a_namespace(program: str) -> None:
    built = Path(program)
    with counting(built, events=True) as calls:
        pid = run(calls, built, "quick", 1, 3)
        events = calls.events()
        assert set(events["tgid"].tolist()) == {pid} and pid < 1000 and (events["tid"] > pid).all(), events
        assert by_function(calls.sums()) == {"quick": 3} and set(calls.seen) == {pid}
    with counting(built) as calls:
        run(calls, built, "forks", 2)
        assert by_function(calls.sums()) == {"quick": 6}
    with counting(built) as calls:  # two processes with the same PID, one after the other
        for name in ("first", "second"):
            shutil.copy(built, built.with_name(name))
            Path("/proc/sys/kernel/ns_last_pid").write_text("5000")
            assert watched(calls, built.with_name(name), "quick").wait() == 0
            assert calls.seen == {5001: name}


def test_a_library_that_comes_later(built: Path, tmp_path: Path) -> None:
    """The library is a file that no process had mapped before."""
    shutil.copy(built, tmp_path / "program")
    library = tmp_path / "libgpucalls.so.1"
    with counting(built, library=library) as calls:
        assert calls.placed == () and calls.absent == ()
        shutil.copy(built.with_name("libgpucalls.so.1"), library)
        process = watched(
            calls, tmp_path / "program", "serve", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        with contextlib.closing(process.stdout):
            process.stdout.readline()
            assert within(60, lambda: len(calls.placed) == 1)
            process.communicate("\n\n", timeout=60)
        calls.stop()
        assert by_function(calls.sums()) == {"quick": 2}


# --- filters ---


def test_only_what_failed(built: Path) -> None:
    with counting(built, events=True, errors=True) as calls:
        run(calls, built, "failing", 2, 100)
        assert calls.events()["result"].tolist() == [101] * 50 and by_function(calls.sums()) == {"quick": 50}


def test_only_what_was_slow(built: Path) -> None:
    with counting(built, slow_ns=20_000_000) as calls:
        run(calls, built, "quick", 1, 10)
        assert not len(calls.sums())
    with counting(built, slow_ns=20_000_000) as calls:
        run(calls, built, "sleep", 20_000)
        assert by_function(calls.sums()) == {"sleep": 1}


def test_only_threads_of_a_name(built: Path) -> None:
    with counting(built, comm="othername") as calls:
        run(calls, built, "named")
        assert by_function(calls.sums()) == {"quick": 2} and calls.counts == CallCounts()


@pytest.mark.every(3)
def test_only_one_thread(built: Path, way: str) -> None:
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen(
            [built, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        for tid, seen in ((process.pid, 1), (1, 0)):
            with counting(built, tid=tid, everybody=True) as calls:
                process.stdin.write("\n")
                process.stdout.readline()
                calls.stop()
                assert sum(by_function(calls.sums()).values()) == seen and calls.counts == CallCounts()


def test_chosen_functions(built: Path) -> None:
    with counting(built, chosen=API.choose(["callsquick"])) as calls:
        run(calls, built, "nested")
        assert by_function(calls.sums()) == {"quick": 6} and calls.absent == ()


def test_a_command_has_its_own_limit_of_files() -> None:
    """The tool raised its own limit before it started the command."""
    code = """if True:
        import os, resource
        from gpubpf.traced import command
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        command.raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
        command.run(["sh", "-c", "ulimit -n"], dict(os.environ), None).wait()
    """
    library = Path(bpf_syscall.__file__).parents[2]
    made = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(library)},
        capture_output=True,
        text=True,
    )
    assert (made.stdout, made.stderr) == ("200\n", "")


def test_calls_that_a_program_did_not_see_are_lost(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with counting(built) as calls:
        run(calls, built, "each")
        assert calls.lost == 0 and not calls.missed
        missed = {"call_entry.call_return": 2, "call_return": 1, "call_exit": 4, "call_newtask": 0}
        monkeypatch.setattr(calls.host, "missed", lambda: missed)
        assert calls.lost == calls.lost_by["missed"] == 3
        assert calls.missed == {name: count for name, count in missed.items() if count}
