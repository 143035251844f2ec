"""The reasons of delays in calls and gaps: a program waits for a known reason, and only this reason is reported."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpubpf_scenes as scenes
from gpubpf.calls import arrays, delay_probes, delays
from gpubpf.calls.api import Api, ApiFunction
from gpubpf.calls.delay_probes import DelayProbes
from gpubpf.calls.probes import CallOptions, CallProbes
from gpubpf.errors import Error, VerifyError
from gpubpf.kernel import bpf_syscall
from gpubpf.linux import btf
from gpubpf_host import needs_bpf

MS = 1_000_000
LAUNCH, WORK = 0, 1
ALWAYS = {delays.PREEMPTED, delays.FAULTS}  # what happens to any program on a busy machine

pytestmark = [needs_bpf, pytest.mark.skipif(not bpf_syscall._UPROBE_TYPE.exists(), reason="needs uprobes")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("why")
    scenes.build(place)
    return place


@pytest.fixture
def file(built: Path) -> str:
    return scenes.uncached(built / "file")


@pytest.fixture
def small_group() -> Iterator[Path]:
    with scenes.small_group() as group:
        yield group


@dataclass
class Seen:
    """What a scene took in ns, and what was measured."""

    took: int
    cpu: int
    delay: int  # time in which it was runnable but did not run
    waits: int  # how often
    rows: np.ndarray[Any, Any]  # of the call, or the gap
    all_rows: np.ndarray[Any, Any]
    spent: dict[str, int]  # of the call
    off_ns: int  # of the call, or the gap before the last launch
    whole: int  # its length, which is that of the scene and what lies around it
    explained: list[delays.Cause]
    notes: list[str]

    @property
    def reasons(self) -> set[int]:
        layout = (self.rows["reason"] == delays.BLOCKED) & np.isin(
            self.rows["syscall"], list(scenes.LAYOUT.values())
        )
        return set(self.rows["reason"][~layout].tolist())

    @property
    def telling(self) -> set[int]:
        """Reasons for at least a twentieth of what is explained: a file system waits for this and that now and then."""
        whole = int(self.rows["ns"].sum())
        return {reason for reason in self.reasons if 20 * self.ns(reason) >= whole}

    def ns(self, reason: int) -> int:
        return int(self.rows["ns"][self.rows["reason"] == reason].sum())

    def count(self, reason: int) -> int:
        return int(self.rows["count"][self.rows["reason"] == reason].sum())

    @property
    def texts(self) -> set[str]:
        return {cause.text for cause in delays.causes(self.rows)}


class Watched:
    """A scene that is ready to start, and whose calls are traced."""

    def __init__(
        self,
        built: Path,
        where: str,
        what: str,
        argument: str = "-",
        before: Sequence[str] = (),
        whys: bool = True,
    ) -> None:
        api = Api(
            "scenes",
            (f"{built}/libscenes.so",),
            (
                ApiFunction("scene_launch", "scene_launch", "launch"),
                ApiFunction("scene_work", "scene_work", "other"),
            ),
            {},
        )
        self.notes: list[str] = []
        self.where = where
        self.calls = CallProbes(
            api,
            api.choose(),
            CallOptions(events=True, statistics=True),
            self.notes.append,
            text=delay_probes.PROGRAM,
        )
        self.delay_probes = DelayProbes(self.calls, self.notes.append, why=whys, spans=whys)
        self.calls.start()
        self.calls.trace(os.getpid())
        try:
            self.process = subprocess.Popen(
                [*before, str(built / "scenes"), where, what, argument],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
        finally:
            self.calls.forget(os.getpid())
        line = self._line()
        if line == "up\n":  # from the command before the program
            self._say()
            line = self._line()
        assert line == "ready\n"
        self.delay_probes.tick()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def _say(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")

    def _waits(self) -> None:
        """Wait until the program reads its next command, as delays during the reading of sums would be in the next ones."""
        until = time.monotonic() + 60
        while not Path(f"/proc/{self.process.pid}/syscall").read_text().startswith("0 0x0 "):
            assert time.monotonic() < until, "it does something else"
            time.sleep(0.001)

    def go(self) -> Seen:
        over = threading.Event()

        def ticks() -> None:
            while not over.wait(0.05):
                self.delay_probes.tick()

        thread = threading.Thread(target=ticks)
        thread.start()
        try:
            self._say()
            took, cpu, delay, waits = map(int, self._line().split())
        finally:
            over.set()
            thread.join()
        self._waits()
        (rows, between), spans, events = (
            self.delay_probes.delays(),
            self.delay_probes.spans(),
            self.calls.events(),
        )
        self._say()
        assert self.process.wait() == 0
        assert self.calls.lost == 0
        if lost := self.delay_probes.lost:
            raise scenes.UntoldError(lost)
        pid = self.process.pid
        assert set(rows["tgid"].tolist()) <= {pid} and set(events["tgid"].tolist()) == {pid}
        last = events[-1]
        if self.where == "call":
            event = events[events["function"] == WORK][0]
            start, end, off = (
                int(event["start_ns"]),
                int(event["end_ns"]),
                int(arrays.off_ns(event["spent"])),
            )
            assert events["function"].tolist() == [LAUNCH, LAUNCH, WORK, LAUNCH]
        else:
            event, end = last, int(last["start_ns"])
            start, off = end - int(last["gap_ns"]), int(last["gap_off_ns"])
            assert events["function"].tolist() == [LAUNCH, LAUNCH, LAUNCH]
        function = WORK if self.where == "call" else arrays.GAP
        mine = rows[rows["function"] == function]
        if self.where == "call":  # the call is between two launches
            assert mine.tolist() == between[between["function"] == WORK].tolist()
        return Seen(
            took,
            cpu,
            delay,
            waits,
            mine,
            rows,
            dict(zip(event.dtype["spent"].names, event["spent"].tolist(), strict=True)),
            off,
            end - start,
            delays.explain(spans, pid, int(event["tid"]), start, end),
            self.notes,
        )

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.calls.close()


def watch(built: Path, where: str, what: str, argument: str = "-", before: Sequence[str] = ()) -> Seen:
    with Watched(built, where, what, argument, before) as watched:
        return watched.go()


def read(built: Path, where: str, what: str, file: str, enough: int) -> Seen:
    """Run a scene until it waits for the disk at least `enough` times. Every run has to be right.

    In a virtual machine the host may take the CPU until the disk has answered, so that the scene does not wait.
    """
    for _ in range(10):
        seen = watch(built, where, what, file)
        others = seen.reasons - ALWAYS
        told = sum(seen.count(reason) for reason in others)
        assert told <= seen.waits <= told + 2  # times of less than 5 us are not told
        assert sum(seen.ns(reason) for reason in others) <= seen.took
        if seen.waits >= enough:
            return seen
    pytest.skip("this disk answers before anybody waits")


WHERES = pytest.mark.parametrize("where", ["call", "gap"])


@pytest.mark.every(2)
@WHERES
@pytest.mark.parametrize("what,call", [("sleep", "clock_nanosleep"), ("futex", "futex")])
@scenes.told
def test_what_sleeps_is_blocked_in_its_system_call(built: Path, where: str, what: str, call: str) -> None:
    seen = watch(built, where, what, "40")
    assert seen.reasons - ALWAYS == {delays.BLOCKED}
    assert f"blocked in {call}" in seen.texts
    assert 40 * MS <= seen.ns(delays.BLOCKED) <= seen.took
    assert seen.explained[0].text == f"blocked in {call}"
    assert 40 * MS <= seen.explained[0].ns <= seen.off_ns <= seen.whole
    if where == "call":
        assert seen.spent["blocked_ns"] == seen.ns(delays.BLOCKED) and seen.spent["io_ns"] == 0


@WHERES
@scenes.told
def test_what_reads_a_disk_waits_for_it(built: Path, where: str, file: str) -> None:
    scenes.needs_disk(file)
    seen = read(built, where, "disk", file, 8)
    assert seen.telling - ALWAYS == {delays.BLOCK_IO}
    assert "block I/O in pread64" in seen.texts
    assert seen.count(delays.BLOCK_IO) >= 8
    assert "block I/O in pread64" in {cause.text for cause in seen.explained}
    if where == "call":
        assert seen.spent["io_ns"] == seen.ns(delays.BLOCK_IO)


@WHERES
@scenes.told
def test_a_mapped_file_is_read_in_page_faults(built: Path, where: str, file: str) -> None:
    scenes.needs_disk(file)
    seen = read(built, where, "mapped", file, 128)
    assert seen.telling - ALWAYS == {delays.BLOCK_IO}
    assert "block I/O in a page fault" in seen.texts
    assert seen.count(delays.FAULTS) >= 16 * 256 / 16  # it touches every 16th page
    assert "block I/O in a page fault" in {cause.text for cause in seen.explained}


@WHERES
@scenes.told
def test_memory_that_is_used_first_is_page_faults(built: Path, where: str) -> None:
    seen = watch(built, where, "memory", "16")
    assert seen.reasons <= ALWAYS
    assert 4096 <= seen.count(delays.FAULTS) <= 4096 + 100
    assert seen.ns(delays.FAULTS) == 0


@pytest.mark.every(2)
@WHERES
@pytest.mark.parametrize("busy", [True, False])
@scenes.told
def test_what_others_take_the_cpu_from_is_preempted(built: Path, where: str, busy: bool) -> None:
    cpu = max(os.sched_getaffinity(0))
    with (
        Watched(built, where, "compute", "40", ("taskset", "-c", str(cpu))) as watched,
        scenes.hogs(cpu) if busy else contextlib.nullcontext(),
    ):
        seen = watched.go()
    assert seen.reasons <= ALWAYS
    # Times of less than 5 us are not among those; the gap begins and ends with calls of its own, and is measured by other clock reads.
    taken = sum(cause.ns for cause in seen.explained)
    outside = abs(seen.took - seen.whole)
    if taken < seen.delay * 0.8 - MS - outside:
        raise scenes.UntoldError  # the kernel skipped both switches, from the thread and back to it
    assert taken <= seen.whole - seen.cpu + MS + outside
    assert taken <= seen.ns(delays.PREEMPTED) and {cause.text for cause in seen.explained} <= {"preempted"}
    if busy:
        assert taken >= 20 * MS


@pytest.mark.every(2)
@WHERES
@pytest.mark.parametrize("short", [True, False])
@scenes.told
def test_memory_that_has_to_be_made_free_first_is_memory_pressure(
    built: Path, where: str, short: bool, small_group: Path
) -> None:
    seen = watch(built, where, "memory", "6", scenes.filled(small_group, built) if short else ())
    if not short:
        assert seen.reasons <= ALWAYS
        return
    assert seen.reasons - ALWAYS == {delays.MEMORY}
    assert "memory pressure in a page fault" in seen.texts
    assert 0 < seen.ns(delays.MEMORY) <= seen.took
    assert "memory pressure in a page fault" in {cause.text for cause in seen.explained}
    if where == "call":
        assert seen.spent["reclaim_ns"] == seen.ns(delays.MEMORY)


def _mend(watched: Watched, wire: scenes.Wire, own: bool) -> None:
    """When the other process has sent something again, and this one too, twice."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        sockets = watched.calls.host.items("delay_sockets")["value"]
        ours = sockets["tgid"] == watched.process.pid
        if sockets["count"][~ours].sum() > 0 and (not own or sockets["count"][ours].sum() > 1):
            break
        time.sleep(0.05)
    wire.cut(False)


@pytest.mark.every(2)
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip, of iproute2")
@WHERES
@pytest.mark.parametrize("what", ["ask", "sleep"])
@scenes.told
def test_what_waits_for_what_was_lost_is_next_to_retransmits(built: Path, where: str, what: str) -> None:
    with contextlib.ExitStack() as stack:
        try:
            wire = scenes.Wire(stack)
        except subprocess.CalledProcessError:
            pytest.skip("no network name spaces here")
        client = ("ip", "netns", "exec", wire.near, sys.executable, "-c", wire.CLIENT)
        watched = stack.enter_context(Watched(built, where, what, "900", client))
        other = wire.start(stack, wire.near, wire.OTHER)
        wire.cut(True)
        assert other.stdin is not None
        other.stdin.write("\n")
        mended = threading.Thread(target=_mend, args=(watched, wire, what == "ask"))
        mended.start()
        seen = watched.go()
        mended.join()
        assert other.stdout is not None and other.stdout.readline() == "b'1'\n"
    again = seen.all_rows[seen.all_rows["reason"] == delays.RETRANSMITS]
    if what == "sleep":  # the other process retransmitted
        assert not len(again) and seen.reasons - ALWAYS == {delays.BLOCKED}
        return
    assert seen.reasons - ALWAYS == {delays.BLOCKED, delays.RETRANSMITS}
    assert "blocked in recvfrom" in seen.texts
    whole, waited = again[again["tid"] == 0], again[again["tid"] != 0]
    assert len(whole) == len(waited) == 1
    assert waited["function"][0] == (WORK if where == "call" else arrays.GAP)
    assert 1 <= waited["count"][0] <= whole["count"][0] and waited["ns"][0] >= 200 * MS
    assert seen.explained[-1].text == "TCP retransmits" and seen.explained[-1].count == whole["count"][0]


def test_without_reasons_only_the_time_off_the_cpu_is_known(built: Path) -> None:
    with Watched(built, "call", "sleep", "20", whys=False) as watched:
        watched._say()
        watched._line()
        watched.delay_probes.tick()
        watched._say()
        watched.process.wait()
        event = watched.calls.events()
        event = event[event["function"] == WORK][0]
        programs = {r.function for r in watched.calls.host.runs()}
    assert 10 * MS <= arrays.off_ns(event["spent"]) <= event["end_ns"] - event["start_ns"]
    assert not {name for name in programs if name.startswith("delay")} - {"delay_switch_time"}


@scenes.told
def test_what_happens_while_the_programs_are_detached_is_in_no_call(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs at functions go first. The return of a call has none then, and the thread's later waits are not in that call."""
    with Watched(built, "call", "sleep", "500") as watched:
        host = watched.calls.host
        detach = host.detach

        def slowly() -> None:
            bpf_syscall.close_all(host.uprobes.stop())
            watched._line()
            watched._waits()
            detach()

        monkeypatch.setattr(host, "detach", slowly)
        watched._say()
        until = time.monotonic() + 60
        while not Path(f"/proc/{watched.process.pid}/syscall").read_text().startswith("230 "):
            assert time.monotonic() < until, "it does not sleep"
            time.sleep(0.001)
        watched.calls.stop()
        monkeypatch.setattr(host, "detach", detach)
        rows, _ = watched.delay_probes.delays()
        inside = rows[(rows["function"] == WORK) & ~np.isin(rows["reason"], list(ALWAYS))]
        assert [delays.text(*row) for row in inside[["reason", "syscall"]].tolist()] == [
            "blocked in clock_nanosleep"
        ]
        assert inside["count"].tolist() == [1] and inside["ns"][0] < 500 * MS


def test_rows_of_threads_that_ended_make_room(built: Path) -> None:
    with Watched(built, "call", "sleep", "20") as watched:
        seen = watched.go()
        assert seen.ns(delays.BLOCKED) >= 10 * MS
        assert len(watched.calls.host.items("call_why"))
        last, _ = watched.delay_probes.delays()  # the rows of its end
        assert "blocked in clock_nanosleep" not in {
            cause.text for cause in delays.causes(last)
        }  # it was in the previous rows
        assert len(watched.calls.host.items("call_why"))
        for _ in range(2):
            assert not any(map(len, watched.delay_probes.delays()))
            assert not len(watched.calls.host.items("call_why"))


@scenes.told
def test_what_a_kernel_does_not_have_is_said_and_the_rest_goes_on(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = bpf_syscall.raw_arguments

    def raw_arguments(name: str, count: int) -> bool:
        if name.startswith(("mm_vmscan", "tcp_", "page_fault")):
            raise Error(f"this kernel has no tracepoint {name}; check its name")
        return known(name, count)

    monkeypatch.setattr(bpf_syscall, "raw_arguments", raw_arguments)
    monkeypatch.setattr(btf, "_FILE", tmp_path / "none")
    seen = watch(built, "call", "sleep", "20")
    assert [note.split(":")[0].split(",")[0] for note in seen.notes] == [
        "waits for block I/O count as other waits",
        "waits for memory pressure count as other waits",
        "time spent on memory pressure",
        "page faults",
        "TCP retransmits",
    ]
    assert seen.ns(delays.BLOCKED) >= 20 * MS and seen.reasons <= {delays.BLOCKED, delays.PREEMPTED}


@WHERES
@scenes.told
def test_a_switch_in_the_middle_of_somebodys_look_at_a_map_is_seen(built: Path, where: str) -> None:
    # At ordinary tracepoints a preemptible kernel would miss it; kernels for servers are not preemptible.
    cpu = min(os.sched_getaffinity(0))
    with (
        scenes.map_reader(cpu),
        Watched(built, where, "sleep", "40", ["taskset", "-c", str(cpu)]) as watched,
    ):
        seen = watched.go()
        assert not watched.calls.missed
    assert seen.ns(delays.BLOCKED) >= 40 * MS and "blocked in clock_nanosleep" in seen.texts


@scenes.told
def test_where_raw_tracepoints_do_not_tell_enough_records_do(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = bpf_syscall.raw_arguments
    monkeypatch.setattr(bpf_syscall, "raw_arguments", lambda name, count: count == 1 and known(name, count))
    with Watched(built, "call", "sleep", "20") as watched:
        seen = watched.go()
        programs = watched.calls.host.missed()
    assert {"delay_switch_record", "call_exit_thread"} <= set(programs)
    assert "blocked in clock_nanosleep" in seen.texts and seen.ns(delays.BLOCKED) >= 20 * MS


@scenes.told
def test_what_an_old_kernel_cannot_tell_is_said(
    built: Path, monkeypatch: pytest.MonkeyPatch, small_group: Path
) -> None:
    def try_load(program: object, function: object, raw: bool) -> None:
        raise VerifyError("unknown func bpf_task_pt_regs")

    monkeypatch.setattr(delay_probes, "try_load", try_load)
    seen = watch(built, "call", "sleep", "20")
    assert seen.notes == ["the system call that blocked a thread is unknown before Linux 5.15"]
    assert seen.texts - {"preempted", "page faults"} == {"blocked"}
    assert seen.ns(delays.BLOCKED) >= 20 * MS
    seen = watch(built, "call", "memory", "6", scenes.filled(small_group, built))
    assert seen.texts - {"preempted", "page faults"} == {"memory pressure"}
