"""What tools see while a program runs: logs, rings, shared arrays, maps read in between. Known answers, on the embedded device."""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpubpf_cuda
from gpubpf.agent.definitions import CLOCK_KERNEL
from gpubpf.program import BPF
from gpubpf.records import operation_log
from gpubpf.records.results import Reading
from gpubpf.session.session import Session
from gpubpf.show.parsed import Options
from gpubpf.traced import workers
from gpubpf.traced.measurement import Follow, Kept
from gpubpf_bcc import compiled

CUDA = r"""
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <unistd.h>

__global__ void work(float *x) { x[blockIdx.x] = threadIdx.x; }
__global__ void spin(volatile int *until) { while (!*until) {} }
__global__ void fault(float *x) { x[0] = 1; asm volatile("trap;"); }

// MODE LAUNCHES BLOCKS THREADS: so many launches of `work`, by MODE "beside" a kernel that does not end, after a "cancel", "kill"ed …
static void *wait_for(void *stream) {
    cudaStreamSynchronize((cudaStream_t)stream);
    return nullptr;
}

int main(int n, char **a) {
    const char *mode = a[1];
    int launches = atoi(a[2]), blocks = atoi(a[3]), threads = atoi(a[4]);
    float *x;
    int *until;
    cudaStream_t one, other;
    cudaMalloc(&x, 4 * blocks);
    cudaMallocHost(&until, 4);
    cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    *until = 0;
    if (!strcmp(mode, "cancel")) {
        spin<<<1, 1, 0, other>>>(until);
        pthread_t waiting;
        pthread_create(&waiting, nullptr, wait_for, other);
        usleep(100000);
        pthread_cancel(waiting);
        pthread_join(waiting, nullptr);
    }
    if (!strcmp(mode, "beside")) spin<<<1, 1, 0, other>>>(until);
    for (int i = 0; i < launches; i++) {
        work<<<blocks, threads, 0, one>>>(x);
        if (!strcmp(mode, "slow")) usleep(2000);
        if (i % 64 == 63) cudaStreamSynchronize(one);
    }
    cudaError_t error = cudaStreamSynchronize(one);
    if (!strcmp(mode, "kill")) raise(SIGKILL);
    *(volatile int *)until = 1;
    if (!strcmp(mode, "fault")) fault<<<1, 1>>>(x);
    cudaDeviceSynchronize();
    if (!strcmp(mode, "reset")) cudaDeviceReset();
    return error != cudaSuccess;
}
"""

TEXT = r"""
#include <gpubpf.h>
struct event { u64 launch; u64 thread; };
struct slot { u64 call_ns, who, seen; };
GPU_RINGBUF(events, struct event, 8192);
GPU_KERNEL_ARRAY(last, u64, 8);
GPU_WARP_ARRAY(warps, u64, 2);
GPU_BLOCK_ARRAY(blocks, u64, 1);
GPU_SHARED_ARRAY(slots, struct slot, 4096);

int on_launch(struct gpu_launch *ctx) {
    int key = ctx->launch & 4095;
    struct slot *s = slots.lookup(&key);
    if (s) {
        s->call_ns = ctx->call_ns;
        s->who = bpf_get_current_pid_tgid();
    }
    return 0;
}

int on_exit(struct gpu_exit *ctx) {
    struct event event = {};
    int key = ctx->launch & 7, zero = 0, one = 1, slot = ctx->launch & 4095;
    event.launch = ctx->launch;
    event.thread = gpu_global_thread();
    events.ringbuf_output(&event, sizeof(event), 0);
    u64 *cell = warps.lookup(&one);
    if (cell)
        __sync_fetch_and_add(cell, 1);
    cell = blocks.lookup(&zero);
    if (cell)
        __sync_fetch_and_add(cell, 1);
    cell = last.lookup(&key);
    if (cell)
        *cell = ctx->launch;
    struct slot *s = slots.lookup(&slot);
    if (s)
        s->seen = ctx->launch;
    return 0;
}
"""
# Each thread raises a word: lane by lane in another row, for the launch's slot and those behind it.
ROWS_TEXT = r"""
#include <gpubpf.h>
struct slot { u64 launch, largest; };
GPU_ARRAY(front, u64, 3);
GPU_ARRAY(words, u64, ROWS * SLOTS);
GPU_ARRAY(last, u64, 3);
GPU_SHARED_ARRAY(slots, struct slot, SLOTS);

int on_exit(struct gpu_exit *ctx) {
    u64 thread = gpu_global_thread();
    int word = thread % ROWS * SLOTS + (ctx->launch + thread / ROWS) % SLOTS, other = thread % 3;
    int mine = ctx->launch % SLOTS;
    u64 *cell = words.lookup(&word);
    if (cell)
        gpu_max(cell, ctx->launch << 32 | (u32)(thread * 2654435761));
    cell = front.lookup(&other);
    if (cell)
        *cell = 4;
    cell = last.lookup(&other);
    if (cell)
        *cell = 5;
    struct slot *slot = slots.lookup(&mine);
    if (slot)
        slot->launch = ctx->launch;
    return 0;
}
"""
STRESS = int(os.environ.get("GPUBPF_RING_STRESS", "400000"))  # records; 100000000 takes minutes


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiled(TEXT)
    return gpubpf_cuda.build(CUDA, tmp_path_factory.mktemp("following") / "app")


class Followed:
    """One run, and all that came."""

    def __init__(self, command: list[str], follow: Follow, text: str = TEXT, **options: Any) -> None:
        every = [(0, 2**32 - 1)] * 3
        defaults = {
            "tool": "followed",
            "pid": [],
            "files": [],
            "kernel": ["work"],
            "launch": None,
            "sample": None,
        }
        defaults |= {
            "block": every,
            "thread": every,
            "device": "sim",
            "map_memory": 1 << 20,
            "duration": None,
            "user": None,
            "ptx_options": True,
        }
        defaults |= {"json": False, "cgroup": None, "comm": None, "tid": None}
        args = argparse.Namespace(command=command, **(defaults | options))
        program = BPF(text=text)
        program.attach_gpu_exit(kernel=args.kernel, fn_name="on_exit")
        if "on_launch" in text:
            program.attach_launch(fn_name="on_launch")
        self.parts: list[np.ndarray[Any, Any]] = []
        self.logs: list[np.ndarray[Any, Any]] = []
        self.readings: list[Reading] = []
        self.received = self.during = 0  # records, those that came before the end
        self.session: Session = program.trace(Options.of(args), follow=follow)
        with self.session as session:
            for _ in session.intervals(tick=self.look, every=0.02):
                pass

    def look(self) -> None:
        for part in self.session.rings("events") if "events" in self.session._measurement.numbers else ():
            self.received += len(part.records)
            if self.received < 1 << 20:  # a stress is only counted
                self.parts.append(part.records)
        self.logs += [log.records for log in self.session.logs()]
        self.readings += self.session.readings("last")
        if self.session._returncode is None:
            self.during = self.received

    @property
    def lost(self) -> int:
        return sum(s.lost for counts in self.session.ring_counts("events") for s in counts.shards)

    @property
    def log(self) -> np.ndarray[Any, Any]:
        return np.concatenate(self.logs)


@pytest.mark.parametrize("place", ["host", "gpu"])
def test_every_thread_leaves_one_record(app: Path, place: str) -> None:
    run = Followed([str(app), "plain", "100", "3", "40"], Follow(log_records=1024), ring=place)
    assert run.session.status == 0
    records = np.concatenate(run.parts)
    assert len(records) == 100 * 120 and run.lost == 0
    launches = Counter(records["launch"].tolist())
    assert len(launches) == 100 and set(launches.values()) == {120}
    one = records[records["launch"] == records["launch"][0]]
    assert sorted(one["thread"].tolist()) == list(range(120))
    kernels = run.log[run.log["kind"] == operation_log.KERNEL]
    assert set(kernels["id"].tolist()) == set(launches)
    assert set(kernels["kernel"]["outcome"].tolist()) == {operation_log.INSTRUMENTED}
    # A shard's counts: everything that was reserved came.
    (counts,) = run.session.ring_counts("events")
    assert sum(s.reserved for s in counts.shards) == 12000
    assert all(s.reserved == s.received and s.incomplete == 0 for s in counts.shards)
    # Arrays by warp, block, launch shape.
    (warps,) = run.session.instances("warps")
    assert warps.array.shape == (2, 6) and warps.array.tolist() == [[0] * 6, [3200, 800] * 3]
    (blocks,) = run.session.instances("blocks")
    assert blocks.array.tolist() == [[4000] * 3]
    (last,) = run.session.instances("last")
    assert sorted(last.array[:, 0].tolist()) == sorted(launches)[-8:]
    # Both sides wrote to the same elements.
    (slots,) = run.session.shared("slots")
    used = slots.array[slots.array["seen"] != 0]
    assert set(used["seen"].tolist()) == set(launches)
    called = dict(zip((kernels["id"] & 4095).tolist(), kernels["call_ns"].tolist(), strict=True))
    assert all(int(s["call_ns"]) <= called[int(s["seen"]) & 4095] for s in used)
    assert {int(who) >> 32 for who in used["who"]} == {slots.pid}
    assert run.session.summary()["lost"] == 0


@pytest.mark.may_come_too_late
def test_clocks_are_compared_at_the_beginning_and_at_the_end(app: Path) -> None:
    run = Followed([str(app), "plain", "3", "1", "1"], Follow(log_records=256))
    brackets = run.log[run.log["kind"] == operation_log.CLOCK]["clock"]
    assert len(brackets) >= 2
    assert (brackets["host_before"] < brackets["host_after"]).all()
    kernels = run.log[run.log["kind"] == operation_log.KERNEL]
    assert (brackets["host_after"] < kernels["call_ns"].min()).any()
    assert (brackets["host_before"] > kernels["return_ns"].max()).any()
    apart = brackets["gpu"].astype(np.int64) - brackets["host_before"].astype(np.int64)
    widths = (brackets["host_after"] - brackets["host_before"]).astype(np.int64)
    assert apart.max() - apart.min() <= widths.max() + 1000  # neither clock runs away


MARKED = (
    CLOCK_KERNEL.read_text()
    .replace("st.volatile.global.u32 [%d0+92], %r3;", "st.volatile.global.u32 [%d0+92], 77;")
    .encode()
)


@pytest.mark.may_come_too_late
@pytest.mark.parametrize(
    ("sent", "used"),
    [
        ({75: b"", 80: b"", 90: MARKED, 100: b""}, True),
        ({75: b"", 80: MARKED, 100: MARKED}, False),  # none suits this GPU
        ({90: b"no code"}, False),  # the driver does not load it
    ],
)
def test_the_clock_kernel_of_the_tool_is_used_if_it_suits(
    app: Path, monkeypatch: pytest.MonkeyPatch, sent: dict[int, bytes], used: bool
) -> None:
    monkeypatch.setattr(workers.BackgroundWork, "clock_kernels", lambda self, driver: sent)
    run = Followed([str(app), "plain", "3", "1", "1"], Follow(log_records=256))
    brackets = run.log[run.log["kind"] == operation_log.CLOCK]["clock"]
    assert len(brackets) >= 2
    assert set(brackets["tick_ns"].tolist()) == {77} if used else 77 not in brackets["tick_ns"]


def test_maps_are_read_in_between(app: Path) -> None:
    for launches in (300, 1200, 4800):  # on a busy machine, a reading comes late
        run = Followed([str(app), "slow", str(launches), "1", "32"], Follow(log_records=8192, pump=8))
        if len(run.readings) >= 3:
            break
    ids = np.sort(run.log[run.log["kind"] == operation_log.KERNEL]["id"])
    times = [reading.taken_ns for reading in run.readings]
    assert len(times) >= 3 and times == sorted(times)
    assert run.readings[-1].idle and not run.readings[0].idle
    ends = dict(zip(ids.tolist(), range(len(ids)), strict=True))
    newest = [max(ends[int(n)] for n in r.instances["last"][0].array[:, 0] if n) for r in run.readings]
    assert newest == sorted(newest) and newest[0] < launches - 1 == newest[-1]


@pytest.mark.may_come_too_late  # what is kept, which waits for no reading that is under way
@pytest.mark.parametrize(
    ("slots", "rows", "launches", "blocks", "threads"),
    [(10, 4, 25, 2, 32), (1000, 2, 3, 10, 500), (20000, 3, 2, 80, 1000), (16384, 1, 1, 20, 1000)],
)
def test_of_rows_of_words_the_largest_are_read(
    app: Path, slots: int, rows: int, launches: int, blocks: int, threads: int
) -> None:
    """Also in the shared array after a wait, and the maps before and behind them."""
    text = f"#define SLOTS {slots}\n#define ROWS {rows}\n{ROWS_TEXT}"
    follow = Follow(log_records=1024, pump=1, kept=Kept("words", "slots", offset=8, slots=slots))
    run = Followed([str(app), "plain", str(launches), str(blocks), str(threads)], follow, text)
    kernels = run.log[run.log["kind"] == operation_log.KERNEL]["id"]
    assert len(kernels) == launches
    thread = np.arange(blocks * threads, dtype=np.uint64)
    largest = np.zeros(slots, np.uint64)
    for launch in kernels.tolist():
        low = thread * np.uint64(2654435761) & np.uint64(0xFFFFFFFF)
        cells = np.uint64(launch << 32 & (1 << 64) - 1) | low
        np.maximum.at(largest, (np.uint64(launch) + thread // np.uint64(rows)) % np.uint64(slots), cells)
    (words,), (front,), (last,) = (run.session.instances(name) for name in ("words", "front", "last"))
    assert words.array.tolist() == largest.tolist()
    assert (front.array.tolist(), last.array.tolist()) == ([4] * 3, [5] * 3)
    (snapshot,) = (
        each for process in run.session._measurement.processes for each in process.snapshots.values()
    )
    assert snapshot.snapshot.size < 8 * slots + 4 * 4096  # not all words
    assert {len(reading.instances["last"][0].array) for reading in run.readings} == {3}
    (shared,) = run.session.shared("slots")
    kept = np.flatnonzero(shared.array["largest"])
    assert shared.array["largest"][kept].tolist() == largest[kept].tolist()
    latest = (np.uint64(kernels.max()) - np.arange(min(launches, slots), dtype=np.uint64)) % np.uint64(slots)
    assert set(latest.tolist()) <= set(kept.tolist())
    # As when many processes have ended.
    snapshot.replace_file(snapshot.compressed(run.session._measurement.agent_config.maps))
    for name, before in (("words", words), ("front", front), ("last", last)):
        (again,) = run.session.instances(name)
        assert again.array.tolist() == before.array.tolist()


def test_records_come_while_a_kernel_does_not_end(app: Path) -> None:
    """Produced = received + lost, with a ring that is much smaller than what goes through it."""
    threads, blocks = 256, 32
    launches = STRESS // (blocks * threads)
    run = Followed([str(app), "beside", str(launches), str(blocks), str(threads)], Follow(ring_size=4 << 20))
    assert run.session.status == 0
    assert run.received + run.lost == launches * blocks * threads
    assert run.received > 0 and run.during > 0
    assert run.session.summary()["lost"] == run.lost


@pytest.mark.parametrize("place", ["host", "gpu"])
def test_a_ring_that_nobody_reads_loses_and_says_how_many(app: Path, place: str, monkeypatch: Any) -> None:
    looked = Followed.look
    monkeypatch.setattr(Followed, "look", lambda self: looked(self) if self.session.stopped else None)
    run = Followed([str(app), "plain", "64", "16", "256"], Follow(ring_size=4 << 20), ring=place)
    assert run.lost > 0 and run.received + run.lost == 64 * 16 * 256


def test_a_ring_size_that_is_too_small_is_told(app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Followed([str(app), "plain", "1", "1", "32"], Follow(ring_size=1))
    assert run.received == 32
    said = capsys.readouterr().err
    assert re.search(
        r"--ring-size 1 is too small: using \d+M \(\d+ multiprocessors x [\d,]+ records\)\n", said
    )


def test_what_a_killed_process_had_written_is_received(app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Followed([str(app), "kill", "50", "2", "64"], Follow(log_records=1024, per_thread={"events": 1}))
    assert run.session.status == 137
    assert run.received == 50 * 128
    assert (run.log["kind"] == operation_log.KERNEL).sum() == 50
    said = capsys.readouterr().err
    assert "the counts of up to 50 launches are lost" in said and "records of events" not in said


def test_what_a_killed_process_lost_has_a_bound(
    app: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = Followed.look
    monkeypatch.setattr(Followed, "look", lambda self: looked(self) if self.session.stopped else None)
    follow = Follow(log_records=1024, ring_size=4 << 20, per_thread={"events": 1})
    run = Followed([str(app), "kill", "64", "16", "256"], follow)
    produced = 64 * 16 * 256
    assert 0 < run.received < produced
    said = capsys.readouterr().err
    assert f"{run.received:,} records of events received, at most {produced - run.received:,} lost" in said
    assert run.session.summary()["lost"] == 64 + produced - run.received  # the launches' arrays, the records


def test_a_measurement_ends_before_the_program_does(app: Path) -> None:
    for duration in (1.0, 4.0, 16.0):  # on a busy machine, the first kernel comes late
        command = [str(app), "slow", str(round(1500 * duration)), "1", "32"]
        run = Followed(command, Follow(log_records=1024, pump=50), duration=duration)
        summary = run.session.summary()
        if summary["launches_instrumented"] > 0:
            break
    assert run.session.status == 0
    assert 0 < summary["launches_instrumented"] < 1500 * duration
    assert run.received == 32 * summary["launches_instrumented"] and summary["lost"] == 0


def test_a_fault_loses_no_record_that_was_written(app: Path) -> None:
    run = Followed([str(app), "fault", "20", "2", "64"], Follow(log_records=1024))
    assert run.received == 20 * 128


def test_a_thread_is_cancelled_while_it_waits_for_the_gpu(app: Path) -> None:
    """Unwinding goes through the agent's frames, with a libgcc that is not the agent's."""
    run = Followed([str(app), "cancel", "5", "2", "64"], Follow(log_records=1024))
    assert run.session.status == 0 and run.received == 5 * 128


def test_a_device_reset_is_no_end_of_the_records(app: Path) -> None:
    run = Followed([str(app), "reset", "20", "2", "64"], Follow(log_records=1024))
    assert run.received == 20 * 128 and run.session.summary()["lost"] == 0
