"""Start a measurement, serve the agents in its processes, collect what they measured.

    with Session(Whom(["./app"]), Plan(device, maps), Makers(instrument)) as session:
        for _ in session.intervals(None, None):
            for instance in session.instances("tallies"):
                …
    sys.exit(session.status)

Each process of a command that uses CUDA loads the agent inside its first `cuInit` (docs/architecture.md, "In the traced process").
Into a process that runs already, joining.py loads it (docs/attach.md). One thread serves all agents (server.py); what takes long is
done by others (workers.py). What they share is a `Measurement`; what tools get of it is in readout.py and summary.py.
"""

from __future__ import annotations

import os
import select
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpubpf import agent
from gpubpf.agent import protocol
from gpubpf.agent.definitions import DrainFlag
from gpubpf.errors import SessionError
from gpubpf.process import libc, privileges
from gpubpf.session import joining, readout, summary
from gpubpf.session.command import Signals, raise_file_limit, start_command
from gpubpf.session.joining import Joining
from gpubpf.session.measurement import Follow, Listener, Measurement, Plan, Whom
from gpubpf.session.server import Server
from gpubpf.session.workers import Makers, Workers, Workshop

__all__ = ["Follow", "Listener", "Makers", "Plan", "Session", "Whom"]

if TYPE_CHECKING:
    from gpubpf.ptx.inject import Site
    from gpubpf.session.machine import Machine
    from gpubpf.session.results import (
        Instance,
        KernelCount,
        ProcessLog,
        Reading,
        RingCounts,
        RingRecords,
        SharedArray,
    )

DRAIN_WAIT = 2.0  # seconds that kernels get to end before the last reading
LEAVING_WAIT = 0.4  # in its place, and in that of the next, when the tool is told to leave
JOINS = 8  # processes that are attached to at the same time
ANSWER_WAIT = 5.0  # seconds, beyond that, for an agent to answer
ANSWERED = 0.15  # seconds in which a program that launches is met, and its modules are answered
TICK = 0.1  # seconds between two looks at logs and rings
HURRY = 0.01  # where they fill quickly


class Session:
    """A measurement under way. A context manager: entering starts the command, or has processes join; leaving waits for the command
    (but see SIGTERM). duration: seconds after which it ends, None: when all that is measured has ended."""

    def __init__(
        self,
        whom: Whom,
        plan: Plan,
        makers: Makers,
        listener: Listener | None = None,
        duration: float | None = None,
    ) -> None:
        self.whom = whom
        self.device = plan.device
        self.wanted = tuple(plan.wanted)
        self.follow = plan.follow
        self._alone = plan.alone
        self._listener = listener or Listener()
        self._measured = Measurement(whom, plan, self._listener.note)
        self._workshop = Workshop(self._measured, makers, self._listener.loaded)
        self._warm_up = makers.warm_up
        self._duration = duration
        self._signals = Signals()
        self._probed: list[tuple[int, str, int]] = []  # for `attached`, which the main thread calls
        self._tick: Callable[[], object] | None = None
        self._every = TICK
        self._ticked = 0.0  # when the next tick is due
        self._sequence = 0
        self._machine: Machine | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._returncode: int | None = None
        self._unfollowed: set[int] = set()  # processes that the ones asked for have started

    # --- start and end ---

    def __enter__(self) -> Session:
        if self.whom.command and "CUDA_INJECTION64_PATH" in os.environ:
            raise SessionError("CUDA_INJECTION64_PATH is set, so another tool traces this command; unset it")
        if not agent.LIBRARY.exists():
            raise SessionError(f"{agent.LIBRARY} is not built; run script/setup")
        self._server = Server(self._measured, self._workshop, self._on_probed, self._signals.wake)
        self._joining = Joining(self._measured, self._server)
        self.socket_name = self._server.socket_name
        self._measured.started_ns = time.monotonic_ns()
        try:
            self._signals.catch()
            self._start()
        except BaseException:
            self._signals.close()
            self._server.close()
            raise
        return self

    def _start(self) -> None:
        """Raises SessionError."""
        if self._alone:
            libc.limit_malloc_arenas()
        if self.whom.command:
            self._child = start_command(self.whom.command, self._measured, self.socket_name)
            self._pidfd = os.pidfd_open(self._child.pid)
        raise_file_limit()  # the command keeps the one that it was started with
        self._server.start()
        if self.whom.pids:
            # What is loaded meanwhile, and by whom, would keep the way into the processes waiting for Python's lock.
            self._join_all(tuple(dict.fromkeys(self.whom.pids)))
            self._workshop.makers.submit(self._warm_up)
            self._measured.privileges.keep(self._needed(), self._alone)
            self._let_answer()
            return
        self._workshop.makers.submit(self._warm_up)
        if self.whom.everyone:
            from gpubpf.session.machine import Machine

            machine = Machine(
                lambda pid, held: self.join(pid, starting=held), self._measured.miss, self._measured.note
            )
            machine.start()
            self._machine = machine
            self._tell_attached()
            self._listener.watching(time.monotonic_ns())
        self._measured.privileges.keep(self._needed(), self._alone)

    def _let_answer(self) -> None:
        """Waits, a moment at most, until processes that were joined have been answered what they asked for: the tool loads NumPy
        then."""
        until = time.monotonic() + ANSWERED
        with self._measured.lock:
            while not all(p.served and not p.pending for p in self._measured.active() if not p.gone):
                if (left := until - time.monotonic()) <= 0 or self._signals.terminated:
                    break
                self._measured.lock.wait(left)

    def _needed(self) -> frozenset[int]:
        """The capabilities that the rest takes."""
        everyone = self.whom.everyone
        needed = privileges.MEASURING
        if everyone or self._measured.host is not None:
            needed |= privileges.PROGRAMS
        return needed | privileges.JOINING if everyone else needed

    def join(self, pid: int, *, starting: int | None = None) -> str | None:
        """Measures a process that runs already, from now on: None when probes are live in it, else the reason it is missed for,
        which is counted. `starting`: the thread that is inside its first cuInit, held there. From any thread, at any time."""
        comm = joining.comm(pid)
        missed = self._joining.join(pid, starting)
        if missed and not self._measured.stopped:
            self._measured.miss(pid, comm, missed.reason)
        return missed.reason if missed else None

    def _join_all(self, pids: Sequence[int]) -> None:
        """All at the same time. Raises SessionError where none of them can be measured."""
        joins = Workers(JOINS)
        names = {pid: joining.comm(pid) for pid in pids}
        going = {pid: joins.submit(self._joining.join, pid, None) for pid in pids}
        for future in going.values():
            future.add_done_callback(lambda future: self._signals.wake())
        while not all(future.done() for future in going.values()):
            select.select([self._signals.reader], [], [])
            self._signals.taken()
            if self._signals.interrupted or self._signals.terminated:
                break
        joins.close()
        missed = {pid: error for pid, future in going.items() if future.done() and (error := future.result())}
        if len(missed) == len(pids):
            raise joining.nobody(list(missed.values()))
        for pid, error in missed.items():
            self._measured.miss(pid, names[pid], error.reason)
            self._measured.note(str(error))
        self._tell_attached()

    def _on_probed(self, pid: int, comm: str, ts_ns: int) -> None:
        self._probed.append((pid, comm, ts_ns))
        self._signals.wake()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is not None:
            self._tick = None  # what failed would fail again, and the command is waited for all the same
        try:
            self._stop()
            while self._child and not self._signals.terminated and not self._wait(None):
                pass
            self._settle()
        finally:
            self._close()
        if kind is None and not self._signals.terminated:
            if self.nothing_matched:
                from gpubpf.images.listing import no_match

                self._listener.complain(no_match(self.wanted, self._seen_names()))
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
        self._workshop.close()
        self._signals.close()
        if self._child:
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
        if self._signals.terminated:
            return 0
        code = self._returncode or 0
        command = code if code >= 0 else 128 - code
        return command or (1 if self.nothing_matched else 0)

    @property
    def stopped(self) -> bool:
        """The measurement is over: what comes now is the last."""
        return self._measured.stopped

    @property
    def several(self) -> bool:
        """Several processes were asked for, or all: each row of a result says whose it is."""
        return self._measured.several

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
            over = self._wait(until) or self._signals.interrupted or self._signals.terminated
            over = (
                over or (end is not None and time.monotonic() >= end) or (count is not None and done >= count)
            )
            if over:
                self._stop()
            else:
                self._tell_unfollowed()
                self._drain(0.0, 0)
            self._run_tick()
            if over:
                self._tick = None
            yield done
            if over:
                return

    def _wait(self, until: float | None) -> bool:
        """Whether all that is measured has ended; False when `until` (time.monotonic) came first, or a signal that ends the
        measurement."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.reader, selectors.EVENT_READ)
            if self._child and self._returncode is None:
                selector.register(self._pidfd, selectors.EVENT_READ)
            while not self._ended():
                due = [t for t in (until, self._ticked if self._tick else None) if t is not None]
                wait = max(0.0, min(due) - time.monotonic()) if due else None
                if self._signals.reader in {key.fd for key, _ in selector.select(wait)}:
                    self._signals.taken()
                    if not self._measured.stopped:  # results end with the summary
                        self._tell_attached()
                if self._ended():
                    break
                if self._signals.terminated or (self._signals.interrupted and not self._measured.stopped):
                    return False
                if until is not None and time.monotonic() >= until:
                    return False
                if self._tick and time.monotonic() >= self._ticked:
                    self._run_tick()
        return True

    def _ended(self) -> bool:
        """Whether the command has ended, or each of the processes that were asked for."""
        if self._child:
            self._returncode = self._child.poll()
            return self._returncode is not None
        return not (
            self.whom.everyone or self._joining.under_way or any(not p.gone for p in self._measured.active())
        )

    def _run_tick(self) -> None:
        if self._tick is not None:
            self._measured.hurry = False
            self._tick()
            self._ticked = time.monotonic() + (
                min(HURRY, self._every) if self._measured.hurry else self._every
            )

    def _tell_attached(self) -> None:
        while self._probed:
            self._listener.attached(*self._probed.pop(0))

    def _tell_unfollowed(self) -> None:
        """Of processes that the ones asked for have started."""
        if not self.whom.pids:
            return
        measured = {p.pid for p in self._measured.active()}
        found = joining.unfollowed(measured | self._unfollowed)
        for pid in found.keys() - measured - self._unfollowed:
            self._unfollowed.add(pid)
            self._measured.note(
                f"pid {pid} ({found[pid]}) is of a program that is measured, and uses the GPU, too; add it to -p"
            )

    def _stop(self) -> None:
        """Ends the measurement: no launch is swapped from now on, and everything is read."""
        if self._measured.stopped:
            return
        self._measured.stopped = True
        if self._machine is not None:
            self._machine.close()
        self._tell_unfollowed()
        self._drain(LEAVING_WAIT if self._signals.terminated else DRAIN_WAIT, DrainFlag.STOP)
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
        if silent := [p for p in self._measured.everyone() if p.marked and p.gone and not p.told]:
            for process in silent:
                self._measured.miss(process.pid, process.comm, joining.UNREACHED)
            self._measured.note(
                f"{len(silent):,} process{'es' if len(silent) > 1 else ''} ended or went on before the tool could attach;"
                " what they launched was not seen"
            )
        if graphs := sum(
            process.graph_launches() - process.graph_launches_before()
            for process in self._measured.everyone()
        ):
            self._measured.note(
                f"{graphs:,} launch{'es' if graphs > 1 else ''} of CUDA graphs that hold conditions, or that kernels launch:"
                " how often their kernels ran is not known"
            )

    def _drain(self, wait: float, flags: int) -> None:
        """Has every process send its maps, and waits for that within bounds. The dead have sent theirs: that is read, too."""
        self._sequence += 1
        sequence = self._sequence
        asked = [p for p in self._measured.active() if not p.gone]
        for process in asked:
            process.send(protocol.drain(sequence, wait, flags))
        self._server.wake()
        deadline = time.monotonic() + wait + (LEAVING_WAIT if self._signals.terminated else ANSWER_WAIT)

        def unanswered() -> int:
            return sum(not p.gone and p.answered < sequence for p in asked)

        while True:
            due = min(deadline, self._ticked) if self._tick else deadline
            with self._measured.lock:
                self._measured.lock.wait_for(lambda: not unanswered(), max(0.0, due - time.monotonic()))
                late = unanswered()
            if not late:
                return
            if time.monotonic() >= deadline:
                self._measured.note(
                    f"{late} process(es) did not answer in time; what they counted since is not shown"
                )
                return
            self._run_tick()

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
