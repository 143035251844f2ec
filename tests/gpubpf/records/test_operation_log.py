"""The operation log: records of a program whose operations, order and times are known; and a reader that trusts nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import struct
import time
from typing import Any

import numpy as np
import pytest

import gpubpf_cuda
from gpubpf.errors import TOO_MANY_FILES, SessionError, in_words
from gpubpf.images.sidecar import Sidecar
from gpubpf.records import operation_log
from gpubpf.records.log_file import LogFile
from gpubpf.records.operation_log import OpLog
from gpubpf.session.session import Session
from gpubpf.traced.device import choose
from gpubpf.traced.measurement import Follow, Plan, Targets
from gpubpf.traced.workers import SidecarBuilder


def file_of(capacity: int, seal: bool = True) -> int:
    file = os.memfd_create("log", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, operation_log.HEADER + capacity * operation_log.RECORD)
    os.pwrite(file, struct.pack("<QQ", capacity, 0), 0)
    if seal:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return file


def put(file: int, capacity: int, position: int, mark: bool = True, **fields: int) -> None:
    record = np.zeros(1, operation_log.DTYPE)
    for name, value in fields.items():
        record[name] = value
    record["mark"] = position + 1 if mark else 0
    os.pwrite(file, record.tobytes(), operation_log.HEADER + position % capacity * operation_log.RECORD)
    os.pwrite(file, struct.pack("<Q", position + 1), 64)


def test_records_come_once_and_in_order_over_the_end_of_the_ring() -> None:
    file = file_of(8)
    kept = os.dup(file)
    log = OpLog(LogFile(file))
    position = 0
    for count in (3, 5, 8, 0, 7):
        for _ in range(count):
            put(kept, 8, position, id=1000 + position)
            position += 1
        assert log.read()["id"].tolist() == list(range(1000 + position - count, 1000 + position))
        assert struct.unpack("<Q", os.pread(kept, 8, 192)) == (position,)
    os.close(kept)


def test_a_log_for_which_there_are_no_files_left_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapping it takes a file descriptor. That there is none is not the program's fault."""

    def none_left(*arguments: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("gpubpf.records.log_file.mmap.mmap", none_left)
    with pytest.raises(OSError) as error:
        LogFile(file_of(8))
    assert in_words(error.value) == TOO_MANY_FILES and in_words(OSError(12, "no memory")) == "no memory"


def test_what_is_not_complete_is_waited_for_until_the_end() -> None:
    file = file_of(8)
    kept = os.dup(file)
    log = OpLog(LogFile(file))
    for position, mark in enumerate((True, False, True)):
        put(kept, 8, position, mark, id=position)
    assert log.read()["id"].tolist() == [0]
    assert log.read()["id"].tolist() == []
    assert log.read(ended=True)["id"].tolist() == [2]
    os.close(kept)


def test_files_that_are_no_logs_are_refused() -> None:
    short = file_of(8)
    os.pwrite(short, struct.pack("<QQ", 16, 0), 0)
    odd = file_of(8)
    os.pwrite(odd, struct.pack("<QQ", 7, 0), 0)
    other_clock = file_of(8)
    os.pwrite(other_clock, struct.pack("<QQ", 8, 2), 0)
    pipe, end = os.pipe()
    os.close(end)
    empty = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    for file in (file_of(8, seal=False), short, odd, other_clock, pipe, empty):
        with pytest.raises(SessionError, match="an invalid log"):
            OpLog(LogFile(file))


def test_garbage_is_only_garbage() -> None:
    """Whatever a process writes, the reader gives arrays of at most the ring's size."""
    random.seed(2)
    file = file_of(64)
    kept = os.dup(file)
    log = OpLog(LogFile(file))
    size = operation_log.HEADER + 64 * operation_log.RECORD
    for _ in range(300):
        os.pwrite(kept, random.randbytes(random.randrange(1, 200)), random.randrange(24, size - 200))
        os.pwrite(kept, struct.pack("<Q", random.choice((0, 5, 64, 65, 1 << 63, (1 << 64) - 1))), 64)
        assert len(log.read(ended=random.random() < 0.2)) <= 64
        assert log.lost >= 0
    os.close(kept)


def test_reading_is_fast() -> None:
    """A floor that holds on a busy machine; benchmarks/run has the figure."""
    capacity = 1 << 16
    file = file_of(capacity)
    records = np.zeros(capacity, operation_log.DTYPE)
    records["mark"] = np.arange(1, capacity + 1)
    os.pwrite(file, records.tobytes(), operation_log.HEADER)
    os.pwrite(file, struct.pack("<Q", capacity), 64)
    log = OpLog(LogFile(file))
    start = time.process_time()
    assert len(log.read()) == capacity
    assert capacity / (time.process_time() - start) > 1e6


# --- a program, on the virtual clock ---

CUDA = r"""
#include <cuda_runtime.h>
#include <thread>
__global__ void work(int *p, int n) { for (int i = 0; i < n; ++i) p[threadIdx.x] += i; }
static void call(void *) {}
int main(int argc, char **) {
    int *p, *q, *pinned, h[1024];
    cudaMalloc(&p, 1 << 20);
    if (argc > 1) {
        std::thread threads[4];
        for (std::thread &t : threads) t = std::thread([&] { for (int i = 0; i < 500; i++) work<<<1, 1>>>(p, 0); });
        for (std::thread &t : threads) t.join();
        return cudaDeviceSynchronize();
    }
    cudaMalloc(&q, 1 << 20);
    cudaMallocHost(&pinned, 1 << 20);
    cudaStream_t a, b, c;
    cudaEvent_t e;
    cudaStreamCreate(&a);
    cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking);
    cudaEventCreate(&e);
    cudaMemsetAsync(p, 0, 4096, a);
    cudaMemcpyAsync(p, pinned, 100000, cudaMemcpyHostToDevice, a);
    work<<<1, 32, 0, a>>>(p, 100);
    cudaEventRecord(e, a);
    cudaStreamWaitEvent(b, e, 0);
    cudaMemcpyAsync(q, p, 1000, cudaMemcpyDeviceToDevice, b);
    cudaMemcpyAsync(pinned, q, 1000, cudaMemcpyDeviceToHost, b);
    cudaLaunchHostFunc(b, call, nullptr);
    cudaEventSynchronize(e);
    cudaStreamSynchronize(b);
    cudaMemcpy(h, q, sizeof h, cudaMemcpyDeviceToHost);
    cudaMemcpy2D(p, 64, h, 32, 32, 10, cudaMemcpyHostToDevice);
    cudaStreamDestroy(a);
    cudaStreamCreate(&c);
    work<<<1, 32, 0, c>>>(p, 1);
    std::thread([&] {
        work<<<1, 32, 0, cudaStreamPerThread>>>(p, 1);
        cudaStreamSynchronize(cudaStreamPerThread);
    }).join();
    work<<<1, 32, 0, cudaStreamPerThread>>>(p, 1);
    work<<<1, 32>>>(p, 1);
    cudaDeviceSynchronize();
    cudaFree(q);
}
"""


def logged(command: list[str], monkeypatch: pytest.MonkeyPatch, **environment: str) -> np.ndarray[Any, Any]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = []
    with Session(
        Targets(command),
        Plan(choose("sim"), follow=Follow(log_records=1 << 12, stamps=True, stacks=True)),
        SidecarBuilder(lambda image, target: Sidecar()),
    ) as session:
        for _ in session.intervals(0.05):
            found += session.logs()
        found += session.logs()
    assert session.status == 0 and found[-1].lost == 0 and found[-1].over
    assert all(log.stacks[stack] for log in found for stack in log.records["stack"].tolist() if stack)
    return np.concatenate([log.records for log in found])


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(gpubpf_cuda.build(CUDA, tmp_path_factory.mktemp("oplog") / "ops"))


@pytest.mark.parametrize("hostile", ["0", "1"])
def test_a_program_call_by_call(program: str, hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    records = logged([program], monkeypatch, CUDASIM_CLOCK="virtual", CUDASIM_HOSTILE=hostile)
    kinds = records["kind"]
    calls = records[kinds <= operation_log.HOST_FUNCTION]
    assert len(set(records["id"].tolist())) == len(records)
    assert [k for k in calls["kind"].tolist() if k != operation_log.API] == [
        *(
            operation_log.MEMSET,
            operation_log.H2D,
            operation_log.KERNEL,
            operation_log.RECORDED,
            operation_log.WAIT,
            operation_log.D2D,
            operation_log.D2H,
            operation_log.HOST_FUNCTION,
        ),
        *(operation_log.SYNC, operation_log.SYNC, operation_log.D2H, operation_log.H2D),
        *(
            operation_log.KERNEL,
            operation_log.KERNEL,
            operation_log.SYNC,
            operation_log.KERNEL,
            operation_log.KERNEL,
            operation_log.SYNC,
        ),
    ]
    copies = calls[np.isin(calls["kind"], (*operation_log.COPIES, operation_log.MEMSET))]["copy"]["bytes"]
    assert copies.tolist() == [4096, 100000, 1000, 1000, 4096, 320]
    names = [name.decode() for name in calls[calls["kind"] == operation_log.API]["api"]["name"].tolist()]
    assert names.count("cuMemAlloc") == 2 and names[-1] == "cuMemFree"
    # The event's record is named by who waits for it.
    record = calls[calls["kind"] == operation_log.RECORDED]
    assert calls[calls["kind"] == operation_log.WAIT]["event"]["record"].tolist() == record["id"].tolist()
    syncs = calls[calls["kind"] == operation_log.SYNC]["sync"]
    assert syncs["what"].tolist() == [
        operation_log.EVENT,
        operation_log.STREAM,
        operation_log.STREAM,
        operation_log.CONTEXT,
    ]
    assert syncs["record"].tolist() == [int(record["id"][0]), 0, 0, 0]
    # Streams: a blocking one, the one that came after it (perhaps by the same handle), each thread's own, the legacy one.
    kernels = calls[calls["kind"] == operation_log.KERNEL]
    assert len(set(kernels["queue"].tolist())) == 5
    assert kernels["stack"].all() and (kernels["kernel"]["block"][:, 0] == 32).all()
    queues = records[kinds == operation_log.QUEUE]
    kind_of = dict(zip(queues["queue"].tolist(), queues["queue_kind"].tolist(), strict=True))
    assert [kind_of[queue] for queue in kernels["queue"].tolist()] == [
        *(
            operation_log.BLOCKING,
            operation_log.BLOCKING,
            operation_log.PER_THREAD,
            operation_log.PER_THREAD,
            operation_log.LEGACY,
        )
    ]
    # When the GPU did it: a copy takes 1 ns for 10 bytes, a memset for 100, and each begins when the one before is over.
    spans = {
        int(s["of"]): (int(s["start"]), int(s["end"])) for s in records[kinds == operation_log.SPAN]["span"]
    }
    timed = calls[np.isin(calls["kind"], (operation_log.KERNEL, *operation_log.COPIES, operation_log.MEMSET))]
    times = [spans[number] for number in timed["id"].tolist()]
    memset, h2d, kernel, d2d, d2h, read, written = times[:7]
    first = int(timed["return_ns"][0])
    assert memset == (first, first + 41)
    assert h2d == (memset[1], memset[1] + 10000)
    assert kernel[0] == h2d[1] and d2d == (kernel[1], kernel[1] + 100) and d2h == (d2d[1], d2d[1] + 100)
    assert read == (int(timed["call_ns"][5]), int(timed["return_ns"][5])) and read[1] - read[0] == 410
    assert written[1] - written[0] == 32
    (function,) = calls[calls["kind"] == operation_log.HOST_FUNCTION]
    assert spans[int(function["id"])] == (d2h[1], d2h[1]) and function["api"]["name"] == b"cuLaunchHostFunc"
    for (start, _), call in zip(times[7:], timed[7:], strict=True):
        assert start == int(call["return_ns"]) == int(call["call_ns"]) + 1000


@pytest.mark.parametrize("size", [64, 4096])
def test_what_finds_no_room_is_counted(program: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads at once: every launch has a record, or is one of those that are lost."""
    monkeypatch.setattr("gpubpf.process.limits.BUFFERED_RECORDS", 0)  # nobody makes room meanwhile
    kernels = lost = 0
    ids: set[int] = set()
    with Session(
        Targets([program, "many"]),
        Plan(choose("sim"), follow=Follow(log_records=size)),
        SidecarBuilder(lambda image, target: Sidecar()),
    ) as session:
        for _ in session.intervals(0.2):
            pass
        for log in session.logs():
            found = log.records[log.records["kind"] == operation_log.KERNEL]
            kernels += len(found)
            ids |= set(found["id"].tolist())
            lost = log.lost
    assert len(ids) == kernels
    assert (kernels == 2000 and lost == 0) if size == 4096 else (0 < kernels <= 64 and lost > 1900)
    assert 2000 <= kernels + lost <= 2000 + 16  # and a few other calls


def test_room_is_made_while_the_tool_is_busy(program: str) -> None:
    with Session(
        Targets([program, "many"]),
        Plan(choose("sim"), follow=Follow(log_records=4096)),
        SidecarBuilder(lambda image, target: Sidecar()),
    ) as session:
        process = None
        for _ in range(500):
            time.sleep(0.01)  # the tool looks at nothing
            process = next(iter(session._measurement.all_processes()), None)
            if process is not None and process.buffered >= 2000:
                break
        assert process is not None and process.buffered >= 2000
        for _ in session.intervals():
            pass


def test_without_a_log_launches_are_counted_alone(program: str) -> None:
    with Session(
        Targets([program]),
        Plan(choose("sim"), follow=Follow()),
        SidecarBuilder(lambda image, target: Sidecar()),
    ) as session:
        for _ in session.intervals():
            pass
    assert session.logs() == [] and session.summary()["launches_seen"] == 5
