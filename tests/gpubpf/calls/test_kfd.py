"""Events of AMD's driver, written to stand-ins for its files as its documentation describes them."""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpubpf_hip
from gpubpf.calls import delay_text, kfd, traced_processes
from gpubpf.calls.kfd import DriverEvent, DriverEvents
from gpubpf_host import needs_bpf


@pytest.fixture
def driver() -> Iterator[tuple[DriverEvents, int, int]]:
    """Yield a reader of two GPUs' files, and the ends that the driver writes to."""
    pairs = [os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) for _ in range(2)]
    made = DriverEvents({number: pair[0] for number, pair in enumerate(pairs)})
    yield made, pairs[0][1], pairs[1][1]
    made.close()
    for _, end in pairs:
        os.close(end)


def test_queues_are_evicted_and_restored(driver: tuple[DriverEvents, int, int]) -> None:
    made, first, second = driver
    os.write(first, b"9 1000 -42 a1b2 2\n9 1100 -43 a1b2 0\na 1300 -43 a1b2 R\n")
    os.write(second, b"9 1200 -42 c3d4 1\n")
    assert made.take() == []
    os.write(
        first, b"a 1500 -42 a1b2 \0\na 1600 -43 a1b2\na 1700 -44 a1b2 0\n"
    )  # the formats of three kernel versions
    assert made.take() == [
        DriverEvent(1000, 1500, 42, 0, "queues evicted (TTM)"),
        DriverEvent(1100, 1600, 43, 0, "queues evicted (SVM)"),
    ]
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    (still,) = made.under_way()
    assert (still.start_ns, still.pid, still.gpu, still.what) == (1200, 42, 1, "queues evicted (USERPTR)")
    assert now <= still.end_ns <= now + 10**10 and still.ns == still.end_ns - 1200


def test_memory_moves_and_pages_fault(driver: tuple[DriverEvents, int, int]) -> None:
    made, first, _ = driver
    os.write(
        first,
        b"5 100 -42 @7f001(10) 0->a1b2 a1b2:0 1\n"
        b"5 110 -42 @7f800(10) 0->a1b2 a1b2:0 0\n"
        b"7 90 -42 @7f001(a1b2) W\n"
        b"6 190 -42 @7f800(10) 0->a1b2 0\n"
        b"6 200 -42 @7f001(10) 0->a1b2 1 0\n"  # with the error code of newer kernels
        b"8 210 -42 @7f001(a1b2) M\n"
        b"b 220 -42 @7f001(10) a1b2 2\n",
    )
    assert made.take() == [
        DriverEvent(110, 190, 42, 0, "memory migrated (prefetch)"),
        DriverEvent(100, 200, 42, 0, "memory migrated (page fault on the GPU)"),
        DriverEvent(90, 210, 42, 0, "page fault on the GPU"),
        DriverEvent(220, 220, 42, 0, "memory unmapped from the GPU (unmapped by the CPU)"),
    ]
    assert made.under_way() == [] and made.take() == []


def test_what_has_no_time_has_that_of_reading(driver: tuple[DriverEvents, int, int]) -> None:
    made, first, second = driver
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    os.write(first, b"1 2a:python3\n2 4:1f\n3 1\n")
    os.write(second, b"3 1 unknown cause\n4 1\n")
    found = made.take()
    assert [(h.pid, h.gpu, h.what) for h in found] == [
        (42, 0, "memory fault on the GPU"),
        (0, 0, "clocks throttled"),
        (0, 1, "GPU reset"),
    ]
    assert all(before <= h.start_ns <= h.end_ns for h in found)
    assert [h.gpu for h in made.under_way()] == [0]


def test_lines_come_in_pieces_and_what_is_not_understood_is_left(
    driver: tuple[DriverEvents, int, int],
) -> None:
    made, first, _ = driver
    for part in (b"9 1000 -", b"42 a1b2 ", b"5\na 1100 ", b"-42 a1b2"):
        os.write(first, part)
        assert made.take() == []
    os.write(first, b" 0\n\n\xff\xfe\nc 42 python3\nzz 1\n9\n9 x -1 a 1\n9 5 -1 a 77\n1 no\na 1 -1 a1b2 0\n")
    assert made.take() == [
        DriverEvent(1000, 1100, 42, 0, "queues evicted (CRIU restore)"),
        DriverEvent(5, 5, 1, 0, "queues evicted"),  # an unknown trigger, and a clock that went back
    ]


def test_a_line_without_end_takes_no_memory(driver: tuple[DriverEvents, int, int]) -> None:
    made, first, _ = driver
    for _ in range(100):
        os.write(first, b"x" * 4096)
        assert made.take() == []
    assert len(made._rest[0]) <= 4096
    for number in range(5000):
        os.write(first, b"9 %d -%d a1b2 1\n" % (number, number + 1))
        made.take()
    assert len(made.under_way()) <= 4096


def test_the_device_is_asked_for_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(kfd, "_DEVICE", tmp_path / "kfd")
    monkeypatch.setattr(kfd, "_NODES", tmp_path / "nodes")
    assert kfd.open_devices(notes.append) is None
    for node, number in ((0, 0), (1, 0xA1B2), (10, 0xE5F6), (2, 0xC3D4)):
        (tmp_path / f"nodes/{node}").mkdir(parents=True)
        (tmp_path / f"nodes/{node}/gpu_id").write_text(f"{number}\n")
    (tmp_path / "kfd").touch()
    ends: dict[int, int] = {}
    plain = fcntl.ioctl

    def ioctl(file: int, request: int, argument: Any = 0) -> Any:
        if request != 0xC0084B1F:  # AMDKFD_IOWR(0x1F, struct of two 32-bit numbers)
            return plain(file, request, argument)
        number = struct.unpack("<II", argument)[0]
        there, ours = os.pipe()  # one direction suffices: the test reads what the tool writes
        ends[number] = there
        argument[:] = struct.pack("<II", number, ours)
        return 0

    monkeypatch.setattr(kfd.fcntl, "ioctl", ioctl)
    monkeypatch.setattr(kfd, "effective", lambda: frozenset())
    assert kfd.open_devices(notes.append) is None
    assert notes.pop() == "cannot read events of AMD's driver (queues, memory); run as root"
    monkeypatch.setattr(kfd, "effective", lambda: frozenset((kfd.SYS_ADMIN,)))
    made = kfd.open_devices(notes.append)
    assert made is not None and not notes
    assert list(ends) == [0xA1B2, 0xC3D4, 0xE5F6]
    for end in ends.values():
        assert os.read(end, 64) == struct.pack("<Q", 0x7FF | 1 << 63)
        os.close(end)
    made.close()
    monkeypatch.setattr(kfd.fcntl, "ioctl", plain)
    assert kfd.open_devices(notes.append) is None
    assert "cannot read events of AMD's driver (queues, memory): " in notes.pop()


def test_what_happened_during_a_call() -> None:
    found = [
        DriverEvent(100, 200, 42, 0, "queues evicted (TTM)"),
        DriverEvent(150, 350, 42, 1, "queues evicted (TTM)"),
        DriverEvent(150, 350, 43, 0, "queues evicted (SVM)"),
        DriverEvent(250, 250, 0, 0, "clocks throttled"),
        DriverEvent(600, 700, 42, 0, "GPU reset"),
    ]
    causes = kfd.causes_during(found, 42, 120, 300)
    assert [(c.text, c.count, c.ns, c.largest_ns, c.timeless) for c in causes] == [
        ("queues evicted (TTM)", 2, 80 + 150, 150, True),
        ("clocks throttled", 1, 0, 0, True),
    ]
    assert [delay_text.cause_text(c) for c in causes] == [
        "queues evicted (TTM) meanwhile for 230 ns",
        "clocks throttled meanwhile",
    ]
    assert kfd.causes_during(found, 42, 360, 500) == []


def test_what_the_driver_did_is_a_table() -> None:
    found = [
        DriverEvent(0, 2_000_000, 42, 0, "queues evicted (TTM)"),
        DriverEvent(0, 500_000, 42, 0, "queues evicted (TTM)"),
        DriverEvent(7, 7, 0, 1, "clocks throttled"),
    ]
    title, header, *rows = delay_text.driver_event_lines(found, {42: "train"}.__getitem__)
    assert title == "what the GPU driver did"
    assert header.split() == ["PID", "COMM", "GPU", "WHAT", "COUNT", "TOTAL", "ms", "MAX", "us"]
    assert [row.split() for row in rows] == [
        ["42", "train", "0", "queues", "evicted", "(TTM)", "2", "2.50", "2000.0"],
        ["-", "-", "1", "clocks", "throttled", "1", "-", "-"],
        [],
    ]
    assert list(delay_text.driver_event_lines([], str)) == []


@needs_bpf
def test_the_tool_tells_what_the_driver_did(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, driver: tuple[DriverEvents, int, int]
) -> None:
    made, first, _ = driver
    library = gpubpf_hip.standin(tmp_path)
    command = [str(gpubpf_hip.program(tmp_path, library)), "-n", "1", "hipDeviceSynchronize"]
    monkeypatch.setenv("STANDIN", "hipDeviceSynchronize=sleep:400000")
    pids: list[int] = []
    start, take = traced_processes.run, made.take

    def run(*arguments: Any) -> Any:
        process = start(*arguments)
        pids.append(process.pid)
        return process

    def taken() -> list[DriverEvent]:
        """Evict and restore the queues of the process after it has started, and those of another process."""
        if pids:
            now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            for pid in (pids.pop(), 1):
                os.write(first, b"9 %d -%d a1b2 2\na %d -%d a1b2 0\n" % (now, pid, now + 50_000_000, pid))
        return take()

    monkeypatch.setattr(kfd, "open_devices", lambda note: made)
    monkeypatch.setattr(traced_processes, "run", run)
    monkeypatch.setattr(made, "take", taken)
    tool = runpy.run_path(str(repository / "tools/hipsnoop.py"))
    out = tmp_path / "out"
    assert tool["main"](["--why", "--slow", "100000", "--json", "-o", str(out), "--", *command]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    (told,) = [r for r in records if r["type"] == "driver"]
    assert told["what"] == "queues evicted (TTM)" and told["ns"] == 50_000_000 and told["gpu"] == 0
    (call,) = [r for r in records if r["type"] == "call"]
    assert told["pid"] == call["pid"]
    assert [w["what"] for w in call["why"]][-1] == "queues evicted (TTM)"
