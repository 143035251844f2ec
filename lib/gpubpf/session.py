"""Run a command, serve the agents in its processes, collect what they measured.

    with Session(["./app"], instrument=…, maps=…) as session:
        for _ in session.intervals(None, None):
            for instance in session.instances("tallies"):
                …
    sys.exit(session.status)

Each process of the command that uses CUDA loads the agent inside its first `cuInit` (docs/architecture.md, "In the
target"). One thread serves all agents (server.py); what takes long is done by others (workers.py). What they share is a
`Measurement`; what tools get of it is in readout.py and summary.py.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpubpf import agent, readout, summary
from gpubpf.agent import protocol
from gpubpf.command import Signals, start_command
from gpubpf.device import Device
from gpubpf.errors import SessionError
from gpubpf.measurement import Follow, Measurement
from gpubpf.server import Server
from gpubpf.workers import CountRegisters, Instrument, Workshop

if TYPE_CHECKING:
    from gpubpf.host import Host
    from gpubpf.maps import MapDefinition
    from gpubpf.ptx.inject import Site
    from gpubpf.results import (
        Instance,
        KernelCount,
        ProcessLog,
        Reading,
        RingCounts,
        RingRecords,
        SharedArray,
    )

IMAGE_WAIT = 120.0  # seconds that a process waits in a module load for the sidecar
DRAIN_WAIT = 2.0  # seconds that kernels get to end before the last reading
LEAVING_WAIT = 0.4  # in its place, and in that of the next, when the tool is told to leave
ATTACH_WAIT = 30.0  # seconds for the agent to get into a process that runs
ANSWER_WAIT = 5.0  # seconds, beyond that, for an agent to answer
TICK = 0.1  # seconds between two looks at logs and rings
HURRY = 0.01  # where they fill quickly


class Session:
    """A command under measurement. A context manager: entering starts the command, leaving waits for it (but see SIGTERM).

    instrument: see `Instrument`. It is called from several threads, once for each image that a process loads.
    definitions: the maps, in any order; `params` gives the bytes of those of kind "param".
    matches: whether a mangled name was asked for (None: every kernel is); `wanted` is how the user put it, for messages.
    launches, sample: as `--launch` and `--sample`. duration: seconds, None without end.
    note: called with notices for the user, from any thread. complain: with the error that "no kernel matches" is.
    attached: with pid, comm and time (ns, CLOCK_MONOTONIC or virtual) when probes are live, from the thread that runs `intervals`.
    loaded: with the name of a process and each image that it loads. warm_up: called while the command starts.
    registers: see `CountRegisters`; called when nobody waits for it. follow: see `Follow`. host: host programs and shared arrays,
    already loaded; the session takes them down at its end.
    image_wait: seconds that a process waits in a module load for the sidecar. accesses: programs run at memory accesses, so the
    summary says which of them they cannot see. pid: a process that runs already, in place of the command.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        instrument: Instrument,
        definitions: Sequence[MapDefinition] = (),
        params: Mapping[str, bytes] | None = None,
        device: Device,
        matches: Callable[[str], bool] | None = None,
        wanted: Sequence[str] = (),
        launches: tuple[int, int | None] | None = None,
        sample: int | None = None,
        map_memory: int | None = None,
        duration: float | None = None,
        user: str | None = None,
        note: Callable[[str], None] = lambda text: None,
        attached: Callable[[int, str, int], None] = lambda pid, comm, ts_ns: None,
        complain: Callable[[str], None] = lambda text: None,
        loaded: Callable[[str, bytes], None] = lambda comm, data: None,
        registers: CountRegisters = lambda sidecar, target: {},
        warm_up: Callable[[], object] = lambda: None,
        follow: Follow | None = None,
        host: Host | None = None,
        image_wait: float = IMAGE_WAIT,
        accesses: bool = False,
        pid: int | None = None,
    ) -> None:
        self.command = list(command)
        self._pid = pid
        self.device = device
        self.wanted = tuple(wanted)
        self.follow = follow or Follow()
        self._measured = Measurement(
            definitions=definitions, params=params, device=device, matches=matches, wanted=wanted, launches=launches,
            sample=sample, map_memory=map_memory, user=user, note=note, follow=self.follow, host=host, image_wait=image_wait,
            accesses=accesses,
        )  # fmt: skip
        self._workshop = Workshop(self._measured, instrument, registers, loaded)
        self._signals = Signals()
        self._complain = complain
        self._warm_up = warm_up
        self._attached = attached
        self._probed: list[tuple[int, str, int]] = []  # for `attached`, which the main thread calls
        self._duration = duration
        self._tick: Callable[[], object] | None = None
        self._every = TICK
        self._ticked = 0.0  # when the next tick is due
        self._sequence = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._returncode: int | None = None

    # --- start and end ---

    def __enter__(self) -> Session:
        if "CUDA_INJECTION64_PATH" in os.environ:
            raise SessionError("CUDA_INJECTION64_PATH is set, so another tool traces this command; unset it")
        if not agent.LIBRARY.exists():
            raise SessionError(f"{agent.LIBRARY} is not built; run script/setup")
        self._server = Server(self._measured, self._workshop, self._on_probed)
        self.socket_name = self._server.socket_name
        self._measured.started_ns = time.monotonic_ns()
        try:
            self._signals.catch()
            if self._pid is not None:
                self._workshop.makers.submit(self._warm_up)
                self._attach(self._pid)
            else:
                self._child = start_command(self.command, self._measured, self.socket_name)
                self._pidfd = os.pidfd_open(self._child.pid)
                self._server.start()
                self._workshop.makers.submit(self._warm_up)
        except BaseException:
            self._unpatch()
            self._signals.close()
            self._server.close()
            raise
        return self

    def _attach(self, pid: int) -> None:
        """Has the agent in a process that runs. Raises SessionError."""
        from gpubpf import attach

        injection = attach.inject(pid, agent.LIBRARY, "gpubpf_attach", connect=True)
        self._pidfd = os.pidfd_open(pid)
        assert injection.socket is not None
        self._server.adopt(injection.socket, pid)
        self._server.start()
        what = {
            1: "has not loaded the CUDA driver; wait until it uses the GPU, or start it with the tool",
            2: "was measured before, and cannot be again; start it anew",
            3: "could not be hooked; start it with the tool instead",
        }.get(injection.wait(ATTACH_WAIT))
        if what:
            raise SessionError(f"pid {pid} {what}")
        self._measured.note(
            "what the process had loaded before is counted, not measured; modules that it loads now are"
        )

    def _unpatch(self) -> None:
        """Takes the hooks out of processes that go on without the tool."""
        from gpubpf import patching

        for process in self._measured.everyone():
            patches, process.patches = process.patches, ()
            if patches and Path(f"/proc/{process.pid}").exists():
                with contextlib.suppress(SessionError):  # it goes on with hooks that do nothing, or has ended
                    patching.apply(process.pid, [p.undone for p in patches], original=False)

    def _on_probed(self, pid: int, comm: str, ts_ns: int) -> None:
        self._probed.append((pid, comm, ts_ns))
        self._signals.wake()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is not None:
            self._tick = None  # what failed would fail again, and the command is waited for all the same
        try:
            self._stop()
            while self._child and not self._signals.terminated and not self._wait_for_command(None):
                pass
            self._settle()
        finally:
            self._close()
        if kind is None and not self._signals.terminated:
            if self.nothing_matched:
                from gpubpf.listing import no_match

                self._complain(no_match(self.wanted, self._seen_names()))
            elif not self.wanted and not self.summary()["launches_seen"]:
                self._measured.note("no kernel was launched")

    def _settle(self) -> None:
        """Waits until what processes sent before they ended has been read."""
        deadline = time.monotonic() + LEAVING_WAIT
        with self._measured.lock:
            while any(not p.gone and not Path(f"/proc/{p.pid}").exists() for p in self._measured.processes):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._measured.lock.wait(left)

    def _close(self) -> None:
        self._server.close()
        for process in self._measured.processes:
            process.end_host()
        if self._measured.host is not None:
            self._measured.host.detach()
        self._signals.close()
        os.close(self._pidfd)

    def _seen_names(self) -> list[str]:
        """Kernels for the user, without arguments: those that were used, else all that were there."""
        from gpubpf import names

        used = [kernel.mangled for kernel in self.kernels()]
        there = used or sorted({name for process in self._measured.processes for name in process.entries})
        return [name.short for name in names.demangle_all(there)]

    @property
    def status(self) -> int:
        """The exit status that the tool ends with."""
        if self._signals.terminated or self._returncode is None:
            return 0
        command = self._returncode if self._returncode >= 0 else 128 - self._returncode
        return command or (1 if self.nothing_matched else 0)

    @property
    def stopped(self) -> bool:
        """The measurement is over: what comes now is the last."""
        return self._measured.stopped

    @property
    def nothing_matched(self) -> bool:
        """Kernels were asked for by name, and none of those that were seen is meant."""
        return bool(self.wanted) and not any(k.matched for k in self.kernels())

    # --- time ---

    def intervals(
        self,
        interval: float | None = None,
        count: int | None = None,
        tick: Callable[[], object] | None = None,
        every: float = TICK,
    ) -> Iterator[int]:
        """Yields when it is time to show something: every `interval` seconds, `count` times, and at the end of the
        measurement, which is that of the command, of the duration, or Ctrl-C. What `instances` gives is fresh then.

        tick: called in between, about every `every` seconds, sooner where logs and rings fill quickly, and once before each
        yield: the place to take what `logs`, `rings` and `readings` give.
        """
        start = time.monotonic()
        self._tick, self._every, self._ticked = tick, every, start + every
        end = start + self._duration if self._duration is not None else None
        done = 0
        while True:
            done += 1
            until = min(
                (t for t in (end, start + done * interval if interval else None) if t is not None),
                default=None,
            )
            over = self._wait_for_command(until) or self._signals.interrupted or self._signals.terminated
            over = (
                over or (end is not None and time.monotonic() >= end) or (count is not None and done >= count)
            )
            if over:
                self._stop()
            else:
                self._drain(0.0, 0)
            self._run_tick()
            if over:
                self._tick = None
            yield done
            if over:
                return

    def _wait_for_command(self, until: float | None) -> bool:
        """Whether the command ended; False when `until` (time.monotonic) came first, or a signal that ends the measurement."""
        if self._returncode is not None:
            return True
        with selectors.DefaultSelector() as selector:
            selector.register(self._pidfd, selectors.EVENT_READ)
            selector.register(self._signals.reader, selectors.EVENT_READ)
            while True:
                due = [t for t in (until, self._ticked if self._tick else None) if t is not None]
                wait = max(0.0, min(due) - time.monotonic()) if due else None
                ready = {key.fd for key, _ in selector.select(wait)}
                if self._signals.reader in ready:
                    self._signals.taken()
                    if not self._measured.stopped:  # results end with the summary
                        self._tell_attached()
                if self._pidfd in ready:
                    self._returncode = self._child.wait() if self._child else 0
                    return True
                if self._signals.terminated or (self._signals.interrupted and not self._measured.stopped):
                    return False
                if until is not None and time.monotonic() >= until:
                    return False
                if self._tick and time.monotonic() >= self._ticked:
                    self._run_tick()

    def _run_tick(self) -> None:
        if self._tick is not None:
            self._measured.hurry = False
            self._tick()
            self._ticked = time.monotonic() + (
                min(HURRY, self._every) if self._measured.hurry else self._every
            )

    def _tell_attached(self) -> None:
        while self._probed:
            self._attached(*self._probed.pop(0))

    def _stop(self) -> None:
        """Ends the measurement: no launch is swapped from now on, and everything is read."""
        if self._measured.stopped:
            return
        self._measured.stopped = True
        self._drain(LEAVING_WAIT if self._signals.terminated else DRAIN_WAIT, protocol.STOP)
        self._unpatch()
        if self._returncode is not None:
            self._settle()
        if self._measured.host is not None:
            self._measured.host.detach()
        self._measured.ended_ns = time.monotonic_ns()
        self._tell_attached()
        self._run_tick()  # what came into logs and rings: then it is known what did not
        for process, launches in summary.missing(self._measured):
            self._measured.note(
                f"{process.who} ended before it could be read; {summary.loss(self._measured, process, launches)}"
            )
        if silent := sum(p.marked and p.gone and not p.told for p in self._measured.everyone()):
            self._measured.note(
                f"{silent:,} process{'es' if silent > 1 else ''} ended or went on before the tool could attach;"
                " what they launched was not seen"
            )
        if graphs := sum(process.graph_launches() for process in self._measured.everyone()):
            self._measured.note(
                f"{graphs:,} launch{'es' if graphs > 1 else ''} of CUDA graphs that hold conditions, or that kernels launch:"
                " how often their kernels ran is not known"
            )

    def _drain(self, wait: float, flags: int) -> None:
        """Has every process send its maps, and waits for that within bounds. The dead have sent theirs: that is read, too."""
        with self._measured.lock:
            self._sequence += 1
            sequence = self._sequence
            asked = [p for p in self._measured.processes if not p.gone]
        for process in asked:
            process.send(protocol.drain(sequence, wait, flags))
        self._server.wake()
        deadline = time.monotonic() + wait + (LEAVING_WAIT if self._signals.terminated else ANSWER_WAIT)
        with self._measured.lock:
            while any(not p.gone and p.answered < sequence for p in asked):
                left = deadline - time.monotonic()
                if left <= 0:
                    late = [p for p in asked if not p.gone and p.answered < sequence]
                    self._measured.note(
                        f"{len(late)} process(es) did not answer in time; what they counted since is not shown"
                    )
                    break
                self._measured.lock.wait(min(left, self._every) if self._tick else left)
                if self._tick and time.monotonic() >= self._ticked:
                    self._measured.lock.release()
                    try:
                        self._run_tick()
                    finally:
                        self._measured.lock.acquire()

    # --- what tools get ---

    def instances(self, map_name: str) -> list[Instance]:
        """What the map held when it was read last: one instance for every process, GPU, kernel and launch shape.

        Where a process had several (it reset the device, or loaded a module twice), their values are added up; kernels of one
        name count as one.
        """
        return readout.instances(self._measured, map_name)

    def readings(self, *names: str) -> list[Reading]:
        """The maps as they were each time that they were read since the last call, in that order for each context: see `Follow.pump`.
        Registers are not known. From the thread that runs `intervals`."""
        return readout.readings(self._measured, *names)

    def logs(self) -> list[ProcessLog]:
        """What came into the operation log of each process since the last call, see `Follow`. From `intervals`' thread."""
        return readout.logs(self._measured)

    def rings(self, map_name: str) -> list[RingRecords]:
        """What came into a ring since the last call, by process and context. From the thread that runs `intervals`."""
        return readout.rings(self._measured, map_name)

    def ring_counts(self, map_name: str) -> list[RingCounts]:
        """Reservations and losses of a ring, by process, context and shard, as last known."""
        return readout.ring_counts(self._measured, map_name)

    def shared(self, map_name: str) -> list[SharedArray]:
        """A shared array, of every process that had one."""
        return readout.shared(self._measured, map_name)

    def sites(self, mangled: str, pid: int | None = None) -> dict[int, Site]:
        """The probed places of a kernel by number (`ctx->site`), with the source where the program has line numbers. Of one
        process, or of all: left out is what they do not agree on (programs of different builds)."""
        return readout.sites(self._measured, mangled, pid)

    def kernels(self) -> list[KernelCount]:
        """Every kernel that a process got hold of, most launches first."""
        return summary.kernels(self._measured)

    def launches_by_comm(self) -> dict[str, dict[str, int]]:
        """By name of the process: launches by mangled name."""
        return summary.launches_by_comm(self._measured)

    def pids(self) -> dict[str, int]:
        """By name of the process: the first of that name."""
        return {process.comm: process.pid for process in reversed(self._measured.everyone())}

    def unread(self) -> set[int]:
        """Processes (by number) with instrumented launches whose counts have not come: at the end, those that never will."""
        return {process.number for process, _ in summary.missing(self._measured)}

    def summary(self) -> dict[str, Any]:
        """The fields of the summary record, but for `type` and `tool`."""
        return summary.summary(self._measured)
