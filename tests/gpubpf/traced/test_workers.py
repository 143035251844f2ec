"""The slow work of serving processes, apart from any process."""

from __future__ import annotations

import builtins
import errno
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpubpf.agent import protocol
from gpubpf.agent.definitions import Vendor
from gpubpf.images import assemble
from gpubpf.images.sidecar import Sidecar, SidecarKernel
from gpubpf.lower.launch_block import LaunchBlock
from gpubpf.process import limits
from gpubpf.process.target_socket import TargetSocket
from gpubpf.traced import workers
from gpubpf.traced.device import Device
from gpubpf.traced.measurement import Follow, Measurement, Plan, Targets
from gpubpf.traced.traced_process import TracedProcess


def test_a_process_does_not_wait_until_all_clock_kernels_are_assembled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its agent waits 5 s for the welcome, and a slow machine may need longer for ptxas."""
    going_on, asked = threading.Event(), []

    def slow(ptx: str, driver: int) -> Iterator[tuple[int, bytes]]:
        asked.append(driver)
        yield 80, b"first"
        going_on.wait(60)
        yield 90, b"second"

    monkeypatch.setattr(assemble, "for_each_generation", slow)
    measurement: Any = SimpleNamespace(
        device=SimpleNamespace(kind="gpu"), privileges=SimpleNamespace(apply=lambda: None)
    )
    builder = workers.SidecarBuilder(instrument=lambda data, target: pytest.fail("not asked for"))
    background = workers.BackgroundWork(measurement, builder, lambda name, data: None, lambda: None)
    start = time.monotonic()
    try:
        assert background.clock_kernels(13) == {80: b"first"}  # for the others, the driver compiles the PTX
        assert time.monotonic() - start < 50  # not until `slow` goes on
    finally:
        going_on.set()
    until = time.monotonic() + 60
    while background.clock_kernels(13) != {80: b"first", 90: b"second"}:
        assert time.monotonic() < until
    assert asked == [13]
    background.close()


@pytest.mark.parametrize("failing", ["gpubpf.images", "gpubpf.images.assemble"])
def test_a_program_gets_an_answer_even_if_no_file_can_be_opened(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """It would wait for ever: while an answer is pending, the tool says every second that it is working on it."""
    importing = builtins.__import__

    def without_files(name: str, *arguments: Any) -> Any:
        if name == failing and threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EMFILE, "too many open files")
        return importing(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_files)
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    notes: list[str] = []
    measurement: Any = SimpleNamespace(
        device=SimpleNamespace(kind="sim"),
        privileges=SimpleNamespace(apply=lambda: None),
        lock=threading.Condition(),
        note=notes.append,
    )
    process: Any = SimpleNamespace(
        label="pid 7 (app)",
        pending_images=1,
        driver_cuda=13,
        vendor=Vendor.NVIDIA,
        comm="app",
        mapped=SimpleNamespace(with_ptx=lambda data: data),
        send=lambda answer, file: answers.put(answer),
    )
    builder = workers.SidecarBuilder(instrument=lambda data, target: Sidecar())
    background = workers.BackgroundWork(measurement, builder, lambda name, data: None, lambda: None)
    image = protocol.Image(request=5, compute_capability=90, gpu=0, size=0)
    background.make_sidecar(process, image, os.open("/dev/null", os.O_RDONLY))
    assert answers.get(timeout=60) == protocol.sidecar(5, 0, (), {}, ())
    until = time.monotonic() + 60
    while process.pending_images:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert notes == [
        "pid 7 (app): a module is not instrumented: too many open files; raise the limit (ulimit -n)"
    ]
    background.close()


def test_modules_of_a_user_beyond_the_limit_are_not_instrumented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names are not kept."""
    monkeypatch.setattr(limits, "MODULES_OF_USER", 1 << 20)
    notes: list[str] = []
    measurement = Measurement(Targets(), Plan(Device("sim")), notes.append)
    builder = workers.SidecarBuilder(instrument=lambda data, target: Sidecar(entries=("k" * (1 << 21),)))
    background = workers.BackgroundWork(measurement, builder, lambda name, data: None, lambda: None)
    for user, kept in ((1000, 0), (0, 1)):
        process = TracedProcess(TargetSocket(socket.socket()), 7, 1, user, comm="app", pending_images=1)
        image = protocol.Image(request=5, compute_capability=90, gpu=0, size=0)
        background.make_sidecar(process, image, os.open("/dev/null", os.O_RDONLY))
        with measurement.lock:
            assert measurement.lock.wait_for(lambda process=process: not process.pending_images, 60)
        assert len(process.entries) == kept
    assert notes == [
        "pid 7 (app): a module is not instrumented: the kernels and sites in modules of its user exceed 1 MiB"
    ]
    background.close()


@pytest.mark.parametrize("wanted", [True, False])
def test_registers_are_counted_if_the_summary_needs_them(wanted: bool) -> None:
    counted: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()

    def registers(sidecar: Sidecar, target: object, kernels: Any) -> dict[str, Any]:
        counted.put(tuple(kernels))
        return {}

    made = Sidecar(b"copy", (SidecarKernel("scale", (), 0, LaunchBlock(16)),), entries=("scale",))
    measurement = Measurement(Targets(), Plan(Device("sim"), follow=Follow(registers=wanted)), print)
    builder = workers.SidecarBuilder(lambda data, target: made, registers)
    background = workers.BackgroundWork(measurement, builder, lambda name, data: None, lambda: None)
    process = TracedProcess(TargetSocket(socket.socket()), 7, 1, 0, comm="app", pending_images=1)
    image = protocol.Image(request=5, compute_capability=90, gpu=0, size=0)
    background.make_sidecar(process, image, os.open("/dev/null", os.O_RDONLY))
    until = time.monotonic() + 60
    while process.pending_images or background.sidecar_threads._working:
        assert time.monotonic() < until
        time.sleep(0.01)
    process.registers.of(["scale"], until)
    assert counted.empty() is not wanted
    background.close()


def test_registers_are_not_counted_after_the_end() -> None:
    """Nor in the thread that asks, which would wait for ptxas."""
    measurement = Measurement(Targets(), Plan(Device("sim")), print)
    builder = workers.SidecarBuilder(lambda image, target: Sidecar())
    work = workers.BackgroundWork(measurement, builder, lambda comm, data: None, lambda: None)
    assert work._register_threads.submit(lambda: 1).result() == 1
    work.close()
    with pytest.raises(RuntimeError, match="closed"):
        work._register_threads.submit(lambda: 1).result(0)
    assert work.sidecar_threads.submit(lambda: 1).result() == 1


def test_work_for_a_pool_that_is_just_being_closed_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first thread has started and has no work yet. Nobody would do what came behind the end."""
    pool = workers.DaemonThreadPool(1, drops=True)
    start, closing = threading.Thread.start, threading.Thread(target=pool.close)

    def start_and_close(thread: threading.Thread) -> None:
        start(thread)
        start(closing)
        closing.join(0.2)

    monkeypatch.setattr(threading.Thread, "start", start_and_close)
    assert pool.submit(lambda: 7).result(30) == 7
    closing.join(30)
    assert not closing.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(lambda: 7).result(0)


def test_work_waits_while_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's processes may have used up what the machine allows."""
    pool = workers.DaemonThreadPool(1)
    with monkeypatch.context() as changed:
        changed.setattr(threading.Thread, "start", no_thread)
        done = pool.submit(lambda: 7)
        assert not pool.replace_stuck() and not done.done()
    pool.replace_stuck()
    assert done.result(30) == 7


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_owners_of_work_take_turns() -> None:
    """A process with many images occupies neither all threads nor the queue."""
    pool = workers.DaemonThreadPool(4, each=2)
    going_on, order, began = threading.Event(), list[str](), threading.Semaphore(0)

    def work(name: str) -> None:
        order.append(name)
        began.release()
        going_on.wait(60)

    many, one, other = object(), object(), object()
    futures = [pool.submit(work, f"many {number}", owner=many) for number in range(20)]
    for _ in range(2):
        assert began.acquire(timeout=60)
    futures.append(pool.submit(work, "one", owner=one))
    assert began.acquire(timeout=60)  # at once, although 18 others came before
    assert order[2] == "one" and sorted(order[:2]) == ["many 0", "many 1"]
    futures.append(pool.submit(work, "other", owner=other))
    assert began.acquire(timeout=60) and order[3] == "other"
    going_on.set()
    for future in futures:
        future.result(60)
    assert len(order) == 22
    pool.close()


def test_threads_that_are_stuck_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one only once, and only so many. Those that do go on end."""
    monkeypatch.setattr(workers.limits, "STUCK_THREADS", 2)
    pool = workers.DaemonThreadPool(1, patience=0.0)
    going_on = threading.Event()

    def stuck() -> Any:
        began = threading.Event()

        def wait() -> int:
            began.set()
            going_on.wait(60)
            return threading.get_ident()

        future = pool.submit(wait)
        return future, began

    assert not pool.replace_stuck()
    first, second, third = stuck(), stuck(), stuck()
    assert first[1].wait(60) and not second[1].is_set()
    assert pool.replace_stuck() and second[1].wait(60) and not third[1].is_set()
    assert pool.replace_stuck() and third[1].wait(60)
    last = pool.submit(threading.get_ident)
    assert pool.replace_stuck() and not last.done()
    going_on.set()
    threads = [future.result(60) for future, _ in (first, second, third)]
    assert len(set(threads)) == 3 and last.result(60) == threads[2]
    until = time.monotonic() + 60
    while {thread.ident for thread in threading.enumerate()} & set(threads[:2]):
        assert time.monotonic() < until
        time.sleep(0.001)
    assert pool._replaced == 0
    assert pool.submit(threading.get_ident).result(60) == threads[2]
    pool.close()


def test_a_user_whose_processes_keep_threads_waiting_leaves_one_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of a process may never arrive while the tool changes its code."""
    go_on, done = threading.Event(), queue.SimpleQueue[int]()

    def patch(measurement: Measurement, process: TracedProcess, file: int) -> None:
        if process.user == 1000:
            go_on.wait(100)
        done.put(process.user)

    monkeypatch.setattr(workers, "_patch", patch)
    measurement = Measurement(Targets(), Plan(Device("sim")), print)
    builder = workers.SidecarBuilder(instrument=lambda data, target: Sidecar())
    background = workers.BackgroundWork(measurement, builder, lambda name, data: None, lambda: None)
    try:
        for user in (*[1000] * 8, 1001, 0):
            background.patch(TracedProcess(TargetSocket(socket.socket()), 7, 1, user), -1)
        assert {done.get(timeout=60), done.get(timeout=60)} == {1001, 0}
        background._attach_threads._patience = 0  # others take the places of the stuck ones
        background.patch(TracedProcess(TargetSocket(socket.socket()), 7, 1, 1001), -1)
        background.replace_stuck()
        assert done.get(timeout=60) == 1001
    finally:
        go_on.set()
        background.close()
