"""Off-CPU times of launching threads: with known answers, and with threads that sleep."""

from __future__ import annotations

import multiprocessing
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpubpf.ebpf import headers
from gpubpf.errors import Error
from gpubpf.kernel import bpf_syscall, syscalls
from gpubpf.launches import off_cpu
from gpubpf.launches.off_cpu import Activity, OffCpu, activity_of, explain
from gpubpf.linux import tracepoints
from gpubpf.linux.host_programs import Host
from gpubpf.program import BPF
from gpubpf_bcc import compiled
from gpubpf_host import ROOTLESS, libc, needs_bpf, open_stub


@pytest.fixture
def stub() -> Iterator[tuple[int, Callable[..., None]]]:
    with open_stub() as made:
        yield made


RECORD = np.dtype(
    [("start_ns", "<u8"), ("end_ns", "<u8"), ("state", "<u8"), ("syscall", "<i8"), ("thread", "<u8")]
)
CALL = (1 << 64) - 1
FUTEX, IOCTL, UPROBE = 202, 16, 336


def activity(*records: tuple[int, int, int, int, int]) -> Activity:
    return activity_of(np.array(list(records), RECORD))


def test_the_header_for_switches_has_the_numbers_that_python_reads(tmp_path: Path) -> None:
    header = (headers.INCLUDE / "gpubpf_switch.h").read_text()
    values = {"SWITCH_RUNNABLE": off_cpu._PREEMPTED, "SWITCH_STOPPED": off_cpu._STOPPED}
    wrong = [f"{name} != {value}" for name, value in values.items()]
    for name, (offset, size) in tracepoints.SWITCH_RECORD.items():
        wrong.append(f"offsetof(struct switch_record, {name}) != {offset}")
        wrong.append(f"sizeof ((struct switch_record *)0)->{name} != {size}")
    checks = "".join(f'_Static_assert(!({what}), "{what}");\n' for what in wrong)
    types = "typedef unsigned char u8; typedef unsigned u32; typedef unsigned long long u64;\n"
    text = header.replace("#include <gpubpf.h>", "#include <stddef.h>\n#define __always_inline\n" + types)
    (tmp_path / "switch.c").write_text(text + checks)
    subprocess.run(["cc", "-fsyntax-only", tmp_path / "switch.c"], check=True)


def test_explains_by_overlap() -> None:
    found = activity(
        (500, 700, 1, FUTEX, 7),
        (100, 300, 0x100, -1, 7),  # preempted
        (460, 760, CALL, FUTEX, 7),
        (800, 900, 2, -1, 7),  # a page fault that waits
        (910, 950, 0, IOCTL, 7),  # it yielded
        (100, 900, 4, -1, 8),  # another thread
        (905, 995, CALL, IOCTL, 7),
    )
    assert found.explain(7, 0, 10_000) == [
        ("off-CPU, preempted", 240),
        ("off-CPU, blocked in futex", 200),
        ("off-CPU, blocked", 100),
        ("in futex", 100),
        ("in ioctl", 50),
    ]
    assert found.explain(7, 200, 600) == [
        ("off-CPU, preempted", 100),
        ("off-CPU, blocked in futex", 100),
        ("in futex", 40),
    ]
    assert found.explain(7, 300, 460) == []
    assert found.explain(8, 0, 200) == [("off-CPU, stopped", 100)]
    assert found.explain(9, 0, 10_000) == []
    assert found.explain(7, 600, 600) == []


def test_our_own_way_into_the_kernel_is_no_system_call_of_the_programs() -> None:
    found = activity((0, 100, CALL, UPROBE, 7), (20, 60, 0x100, UPROBE, 7))
    assert found.explain(7, 0, 200) == [("off-CPU, preempted", 40)]


def test_random_records_add_up() -> None:
    rng = np.random.default_rng(5)
    edges = np.sort(rng.choice(100_000, 2000, replace=False))
    records = np.zeros(1000, RECORD)
    records["start_ns"], records["end_ns"] = edges[::2], edges[1::2]
    records["state"], records["thread"] = 1, 3
    found = activity_of(rng.permutation(records))
    for low, high in rng.integers(0, 100_000, (50, 2)).tolist():
        low, high = min(low, high), max(low, high)
        covered = np.minimum(records["end_ns"], high).astype("i8") - np.maximum(records["start_ns"], low)
        total = int(covered[covered > 0].sum())
        assert sum(ns for _, ns in found.explain(3, low, high)) == total


def test_a_launch_with_very_many_system_calls() -> None:
    """Each system call takes 60 us, of which the thread is off the CPU for 50 us. The time grows with their number, not its square."""
    count = 50_000
    records = np.zeros(2 * count, RECORD)
    records["thread"], records["syscall"] = 7, FUTEX
    calls, spans = records[:count], records[count:]
    calls["start_ns"], calls["state"] = np.arange(count) * 100_000, CALL
    calls["end_ns"] = calls["start_ns"] + 60_000
    spans["start_ns"], spans["state"] = calls["start_ns"] + 5000, 1
    spans["end_ns"] = calls["start_ns"] + 55_000
    found = activity_of(records)
    begin = time.process_time()
    told = found.explain(7, 0, count * 100_000)
    assert told == [("off-CPU, blocked in futex", count * 50_000), ("in futex", count * 10_000)]
    assert time.process_time() - begin < 5


def test_records_in_parts_and_what_is_dropped() -> None:
    rng = np.random.default_rng(6)
    records = np.zeros(3000, RECORD)
    for kind, state in ((slice(0, 1500), CALL), (slice(1500, 3000), 1)):
        edges = np.sort(rng.choice(100_000, 3000, replace=False))
        records[kind]["start_ns"], records[kind]["end_ns"] = edges[::2], edges[1::2]
        records[kind]["state"], records[kind]["thread"] = state, rng.integers(3, 6, 1500)
    records["syscall"] = FUTEX
    records = records[np.argsort(records["end_ns"])]  # in the order in which they are written
    at_once, in_parts = activity_of(records, 2), Activity()
    for part in np.array_split(records, 7):
        in_parts = in_parts.added(activity_of(part, 2))
    late = Activity().added(activity_of(records[1000:])).added(activity_of(records[:1000], 2))
    rest = in_parts.since(50_000)
    assert in_parts.lost == rest.lost == 2
    for low, high in np.sort(rng.integers(0, 100_000, (50, 2))).tolist():
        for tid in range(3, 6):
            expected = at_once.explain(tid, low, high)
            assert in_parts.explain(tid, low, high) == late.explain(tid, low, high) == expected
            if low >= 50_000:
                assert rest.explain(tid, low, high) == expected
    kept = sum(map(len, [*rest.spans.values(), *rest.syscalls.values()]))
    assert kept == np.count_nonzero(records["end_ns"] >= 50_000)
    assert in_parts.since(100_000) == Activity(lost=2)


def test_old_records_are_dropped_unless_a_launch_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(off_cpu, "_FULL", 3)
    minute, now = 60_000_000_000, time.monotonic_ns() + 600_000_000_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    meanwhile = OffCpu(BPF(text=off_cpu.PROGRAM))
    for ago in (5, 3, 0):
        assert not meanwhile.full
        start = now - ago * minute - 2000
        meanwhile._records.append(np.array([(start, start + 1000, 1, FUTEX, 7)], RECORD))
    assert meanwhile.full and len(meanwhile.activity().spans[7]) == 3 and not meanwhile.full
    for open_since, left in ((now - 4 * minute, 2), (now, 1)):
        meanwhile.forget(open_since)
        assert len(meanwhile.activity().spans[7]) == left


def test_names_of_system_calls() -> None:
    names = {
        0: "read",
        16: "ioctl",
        202: "futex",
        230: "clock_nanosleep",
        334: "rseq",
        435: "clone3",
        399: "syscall 399",
    }
    assert {number: syscalls.name(number) for number in names} == names
    assert explain(None, None, 0, 5) == []


@pytest.fixture(params=["raw", "records"])
def point(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the raw tracepoint, which needs no tracefs, or the ordinary one, as before Linux 5.18."""

    def none(name: str) -> None:
        raise Error(f"this kernel has no tracepoint {name}; check its name")

    if request.param == "raw":
        monkeypatch.setattr(bpf_syscall, "tracepoint", none)
    else:
        monkeypatch.setattr(bpf_syscall, "raw_arguments", lambda name, count: False)


def recording(stub: tuple[int, Callable[..., None]], **options: int) -> tuple[OffCpu, Host]:
    """Record the threads that call the stub, until the host is closed."""
    tool = BPF(text=off_cpu.PROGRAM)  # any, with nothing attached
    meanwhile = OffCpu(tool, **options)
    host = tool.host(None, print)
    assert host is not None
    host.process().attach(stub[0])
    return meanwhile, host


def _until_it_reads(thread: threading.Thread) -> None:
    call, until = Path(f"/proc/self/task/{thread.native_id}/syscall"), time.monotonic() + 60
    while not call.read_text().startswith("0 "):
        assert time.monotonic() < until
        time.sleep(0.001)


@needs_bpf
@pytest.mark.usefixtures("point")
def test_threads_that_sleep_after_a_launch(stub: tuple[int, Callable[..., None]]) -> None:
    tool = BPF(text=off_cpu.PROGRAM)  # any, with nothing attached
    meanwhile = OffCpu(tool, least_ns=1000)
    said: list[str] = []
    host = tool.host(None, said.append)
    assert host is not None and meanwhile.known and not said
    process = host.process()
    process.attach(stub[0])
    reader, writer = os.pipe()
    times: dict[str, tuple[int, int, int]] = {}

    def sleeper() -> None:
        stub[1](1, 0, 0, 0, 1, 0)
        begun = time.monotonic_ns()
        select.poll().poll(30)  # time.sleep waits for a moment, which may have passed when it begins
        times["sleeper"] = threading.get_native_id(), begun, time.monotonic_ns()

    def waiter() -> None:
        stub[1](2, 0, 0, 0, 1, 0)
        begun = time.monotonic_ns()
        os.read(reader, 1)
        times["waiter"] = threading.get_native_id(), begun, time.monotonic_ns()

    def stranger() -> None:  # launches nothing
        begun = time.monotonic_ns()
        time.sleep(0.01)
        times["stranger"] = threading.get_native_id(), begun, time.monotonic_ns()

    threads = [threading.Thread(target=work) for work in (sleeper, waiter, stranger)]
    for thread in threads:
        thread.start()
    _until_it_reads(threads[1])
    time.sleep(0.05)
    os.write(writer, b"x")
    for thread in threads:
        thread.join()
    still = threading.Thread(target=lambda: (stub[1](3, 0, 0, 0, 1, 0), os.read(reader, 1)), daemon=True)
    still.start()
    _until_it_reads(still)
    time.sleep(0.02)
    host.close()
    os.write(writer, b"x")
    still.join()
    os.close(reader)
    os.close(writer)
    found = meanwhile.activity()
    assert found.lost < 5  # the kernel does not report each switch
    tid, begun, ended = times["sleeper"]
    told = dict(found.explain(tid, begun, ended))
    slept = told["off-CPU, blocked in poll"]
    assert 29e6 < slept <= ended - begun
    assert sum(told.values()) <= ended - begun
    assert list(told.values()) == sorted(told.values(), reverse=True)
    tid, begun, ended = times["waiter"]
    assert dict(found.explain(tid, begun, ended))["off-CPU, blocked in read"] > 25e6
    tid, begun, ended = times["stranger"]
    assert found.explain(tid, begun, ended) == []
    assert still.native_id is not None
    open_ = found.spans[still.native_id][-1]  # it was waiting when the measurement ended
    assert open_["end_ns"] - open_["start_ns"] > 10e6 and open_["syscall"] == 0


@needs_bpf
def test_a_thread_of_another_pid_namespace_has_the_number_that_it_sees(
    stub: tuple[int, Callable[..., None]],
) -> None:
    """So does its operation log. In both, the number of its process tells it from others with the same TID."""
    meanwhile, host = recording(stub)
    reader, writer = os.pipe()

    def inside() -> None:
        if libc.unshare(0x20000000):  # CLONE_NEWPID, for the children
            os._exit(1)
        if child := os.fork():
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        stub[1](5 << 40 | 1, 0, 0, 0, 1, 0)
        begun = time.monotonic_ns()
        select.poll().poll(30)
        os.write(writer, struct.pack("<3Q", threading.get_native_id(), begun, time.monotonic_ns()))
        os._exit(0)

    outer = multiprocessing.get_context("fork").Process(target=inside)
    outer.start()
    outer.join()
    host.close()
    if outer.exitcode == 1:
        pytest.skip("cannot make a PID namespace")
    tid, begun, ended = struct.unpack("<3Q", os.read(reader, 24))
    os.close(reader)
    os.close(writer)
    assert tid == 1
    told = dict(meanwhile.activity().explain(5 << 32 | tid, begun, ended))
    assert 29e6 < told["off-CPU, blocked in poll"] <= ended - begun


@needs_bpf
def test_a_thread_whose_return_the_kernel_does_not_report(
    stub: tuple[int, Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux 6.18 has been seen to report no switch from some threads: the end of its system call shows that a thread is back."""
    looked_up = "    t = threads.lookup(&comes);\n"
    assert looked_up in off_cpu.PROGRAM
    monkeypatch.setattr(
        off_cpu, "PROGRAM", off_cpu.PROGRAM.replace(looked_up, "    comes = 0;\n" + looked_up)
    )
    compiled(off_cpu.PROGRAM)
    meanwhile, host = recording(stub)
    times: dict[str, tuple[int, int, int]] = {}

    def sleeper() -> None:
        stub[1](1, 0, 0, 0, 1, 0)
        begun = time.monotonic_ns()
        select.poll().poll(30)
        times["sleeper"] = threading.get_native_id(), begun, time.monotonic_ns()

    thread = threading.Thread(target=sleeper)
    thread.start()
    thread.join()
    host.close()
    tid, begun, ended = times["sleeper"]
    told = dict(meanwhile.activity().explain(tid, begun, ended))
    assert 29e6 < told["off-CPU, blocked in poll"] <= ended - begun


@needs_bpf
@pytest.mark.usefixtures("point")
def test_of_two_threads_that_share_a_cpu_each_is_preempted(stub: tuple[int, Callable[..., None]]) -> None:
    cpu = min(os.sched_getaffinity(0))
    meanwhile, host = recording(stub, least_ns=1000)
    both = multiprocessing.get_context("fork").Barrier(2)

    def compute() -> None:
        os.sched_setaffinity(0, [cpu])
        stub[1](1, 0, 0, 0, 1, 0)
        both.wait()
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass

    children = [multiprocessing.get_context("fork").Process(target=compute) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    host.close()
    found = meanwhile.activity()
    for child in children:
        assert child.pid is not None
        told = dict(found.explain(child.pid, 0, time.monotonic_ns()))
        assert told["off-CPU, preempted"] > 1e6, told


@needs_bpf
def test_of_a_thread_that_has_ended_nothing_is_told(stub: tuple[int, Callable[..., None]]) -> None:
    meanwhile, host = recording(stub)
    thread = threading.Thread(target=stub[1], args=(1, 0, 0, 0, 1, 0))
    thread.start()
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        time.sleep(0.001)
    ended = time.monotonic_ns()
    time.sleep(0.01)
    host.close()
    assert thread.native_id is not None
    assert meanwhile.activity().explain(thread.native_id, ended, time.monotonic_ns()) == []


@needs_bpf
def test_on_the_virtual_clock_it_is_unknown() -> None:
    tool = BPF(text=off_cpu.PROGRAM)
    meanwhile = OffCpu(tool)
    said: list[str] = []
    assert tool.host(None, said.append, virtual=True) is None
    assert not meanwhile.known and meanwhile.activity() == Activity()
    assert said == [
        "off-CPU times of launching threads are unknown: they are on the real clock, and the measurement is on the virtual clock"
    ]


UNKNOWN = """
from gpubpf.launches import off_cpu
from gpubpf.program import BPF
tool = BPF(text=off_cpu.PROGRAM)
meanwhile = off_cpu.OffCpu(tool)
print(tool.host(None, print), meanwhile.known, meanwhile.activity().explain(1, 0, 10))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_without_capability_it_is_unknown() -> None:
    command = [*ROOTLESS, sys.executable, "-c", UNKNOWN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first.startswith("off-CPU times of launching threads are unknown: ")
    assert second == "None False []"
