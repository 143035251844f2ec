"""A session: attaches the agent to processes, serves the agents, and gives tools the collected results.

    with Session(Targets(["./app"]), Plan(device, maps), SidecarBuilder(instrument)) as session:
        for _ in session.intervals(None, None):
            for instance in session.instances("tallies"):
                …
    sys.exit(session.status)

A command's process loads the agent inside its first `cuInit` (docs/architecture.md, "In the traced process"). The session injects the
agent into running processes (joining.py; docs/attach.md). One thread serves all agents (server.py); slow work has its own threads
(workers.py). They share a `Measurement`. readout.py and summary.py read it for tools.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import selectors
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf import agent, own_files
from gpubpf.agent.definitions import DrainFlag
from gpubpf.errors import SessionError
from gpubpf.kernel import fresh_thread, libc, privileges
from gpubpf.process import proc, traceable, user_waits
from gpubpf.record import MutableRecord
from gpubpf.records import reasons
from gpubpf.records.reasons import (
    FORBIDDEN,
    NO_DRIVER,
    NO_ROCR,
    REACHED_LATE,
    TOO_LATE,
    TRACED,
    UNHOOKED,
)
from gpubpf.session import readout, summary, translating
from gpubpf.show import garbage, progress, table
from gpubpf.traced import joining
from gpubpf.traced.command import LONGEST_WAIT, Signals, other_tool, raise_file_limit, start_command
from gpubpf.traced.drain_request import DrainRequest
from gpubpf.traced.joining import Joining
from gpubpf.traced.measurement import Listener, Measurement, Plan, Targets
from gpubpf.traced.server import Server
from gpubpf.traced.workers import BackgroundWork, DaemonThreadPool, SidecarBuilder

if TYPE_CHECKING:
    from gpubpf.agent.protocol import KernelFault
    from gpubpf.inject.values import Site
    from gpubpf.records.results import (
        Instance,
        KernelCount,
        ProcessCounts,
        ProcessLog,
        Reading,
        RingCounts,
        RingRecords,
        SharedArray,
    )
    from gpubpf.session.budget import Budget
    from gpubpf.traced.machine import MachineWatcher
    from gpubpf.traced.strays import Strays
    from gpubpf.traced.traced_process import TracedProcess

# All in seconds.
DRAIN_WAIT = 2.0  # for running kernels to finish before the last reading
ANSWER_WAIT = 5.0  # after DRAIN_WAIT, for an agent to answer
HOST_WAIT = 0.5  # for agents to answer before the host programs are detached, which ends the measurement
WAIT_FOR_MEMORY = 2.0  # seconds until a thread waits for memory that does not arrive
LEAVING_WAIT = 0.4  # replaces each of these two after SIGTERM or SIGHUP
FIRST_ANSWER_WAIT = 0.15  # enough for a launching program to send its modules and get the sidecars
READY_WAIT = (
    1.0  # for copies of a running process's loaded kernels, before telling the user that some are missing
)
BEGIN_WAIT = 10.0  # for the same copies, before the time of -d begins without them
JOIN_WAIT = 90.0  # for attaching to the processes that the user chose; longer than the limits of an attach
TICK = 0.1  # between readings of logs and rings
FAST_TICK = 0.01  # the same, when they fill quickly

JOINS = 8  # concurrent attaches


def _named(processes: Sequence[TracedProcess]) -> str:
    """Return the processes' names, at most three, and the number of the others."""
    shown = ", ".join(process.label for process in processes[:3])
    return f"{shown} and {len(processes) - 3:,} more" if len(processes) > 3 else shown


class _NewlyHooked(MutableRecord):
    """A process whose hooks are live.

    until: when to report missing copies (time.monotonic).
    told: whether missing copies were reported.
    """

    process: TracedProcess
    until: float
    told: bool = False


class Session:
    """A running measurement, as a context manager.

    Entering it starts the command, or attaches to processes. Leaving it waits for the command to exit, except after SIGTERM or SIGHUP.
    `intervals` and the methods that return results belong to one thread, usually the main thread. `join` may be called from any
    thread. `Measurement.lock` guards what the threads share.

    duration: seconds after which the measurement ends; None: it ends with the command or with the last traced process.
    """

    def __init__(
        self,
        targets: Targets,
        plan: Plan,
        builder: SidecarBuilder,
        listener: Listener | None = None,
        duration: float | None = None,
    ) -> None:
        self.targets = targets
        self.device = plan.device
        self.wanted = tuple(plan.wanted)
        self.follow = plan.follow
        self._owns_process = plan.owns_process
        self._listener = listener or Listener()
        self._measurement = Measurement(targets, plan, self._listener.note)
        self._budget: Budget | None = None
        if plan.budget is not None:
            from gpubpf.session.budget import Budget  # imported here, because few measurements have one

            self._budget = Budget(plan.budget)
        self._warm_up = builder.warm_up
        self._duration = duration
        self._only_host = plan.host is not None and all(d.kind == "shared_array" for d in plan.definitions)
        self._counts_launches = bool(plan.definitions) or not plan.follow.log_records
        self._started = 0.0  # when the command was started, or all processes were attached (time.monotonic)
        self._began_at: float | None = None  # see `_began`
        self._signals = Signals()
        self._background = BackgroundWork(
            self._measurement, builder, self._listener.loaded, self._signals.wake
        )
        self._newly_hooked: list[_NewlyHooked] = []
        self._tick: Callable[[], object] | None = None
        self._tick_interval = TICK
        self._next_tick = 0.0  # time.monotonic
        self._watcher: MachineWatcher | None = None
        self._strays: Strays | None = None
        self._traced_strays: set[int] = set()  # pids of processes that another tool seemed to trace
        self._shown = contextlib.ExitStack()  # what the progress line shows besides the tool's own work
        self._child: subprocess.Popen[bytes] | None = None
        self._returncode: int | None = None
        self._noted_descendants: set[int] = set()  # pids of untraced children already reported to the user

    # --- startup and shutdown ---

    def __enter__(self) -> Session:
        if self.targets.command and (why := other_tool(os.environ)):
            raise SessionError(why)
        if not agent.LIBRARY.exists():
            raise SessionError(f"{agent.LIBRARY} is not built; run script/setup")
        wake = self._signals.wake
        self._server = Server(self._measurement, self._background, self._on_hooked, wake, wake)
        self._joining = Joining(self._measurement, self._server)
        self.socket_name = self._server.socket_name
        self._measurement.started_ns = time.monotonic_ns()
        try:
            self._signals.catch()
            self._start()
            self._started = time.monotonic()
            if self.device.kind == "sim":  # its thread begins with the capabilities that are left
                traced = self._measurement.active
                self._shown.enter_context(translating.shown(lambda: [p.pid for p in traced()]))
        except BaseException:
            self._shown.close()
            self._signals.close()
            self._server.close()
            self._end_waits()
            raise
        return self

    def _start(self) -> None:
        """Start the command, or attach to the processes. Raises SessionError."""
        user_waits.prepare()
        if self._owns_process:
            libc.limit_malloc_arenas()
        if self.targets.command:
            self._child = start_command(self.targets.command, self._measurement, self.socket_name)
            self._pidfd = os.pidfd_open(self._child.pid)
        raise_file_limit()  # after the command has started, so that it keeps its own limit
        self._server.start()
        if self.targets.pids:
            # Attach before the warm-up starts. Otherwise its imports would make the attaching threads wait for Python's lock.
            self._join_all(tuple(dict.fromkeys(self.targets.pids)))
            self._background.sidecar_threads.submit(self._warm_up)
            self._background.joined.set()
            self._measurement.privileges.keep(self._needed_capabilities(), self._owns_process)
            self._wait_for_first_answers()
            self._report_attached()
            return
        self._background.joined.set()
        warm_up = self._background.sidecar_threads.submit(self._warm_up)
        if self.targets.all_processes:
            # The time of -d begins with the watcher. Its threads may be busy from then on, so this would take long.
            self._measurement.privileges.keep(self._needed_capabilities(), here=False)
            fresh_thread.run(self._import_numpy, "gpubpf-numpy")
            warm_up.wait()
            from gpubpf.traced.machine import MachineWatcher

            watcher = MachineWatcher(
                lambda pid, held: self.join(pid, starting=held),
                self._record_missed,
                self._measurement.note,
            )
            watcher.start()
            self._watcher = watcher
            self._report_attached()
            self._listener.watching(time.monotonic_ns())
        self._measurement.privileges.keep(self._needed_capabilities(), self._owns_process)
        if self._child:
            from gpubpf.traced.strays import Strays

            apply = self._measurement.privileges.apply
            self._strays = Strays(self._child.pid, self._is_traced, self._join_stray, apply)

    def _is_traced(self, pid: int) -> bool:
        return any(p.pid == pid and not p.disconnected for p in self._measurement.active())

    def _join_stray(self, pid: int) -> bool:
        """Attach to a process of the command that did not load the agent itself. Return whether to try again later."""
        started = traceable.started(pid)
        missed = self._joining.join(pid)
        if missed is not None and missed.reason in (NO_DRIVER, NO_ROCR):
            return True
        if missed is not None and missed.reason == TRACED and pid not in self._traced_strays:
            self._traced_strays.add(pid)  # perhaps its own agent still tries to connect
            return True
        if not self._measurement.stopped:
            self._measurement.record_missed(missed.reason if missed else REACHED_LATE, started)
            if missed is not None:
                self._measurement.note(str(missed))
        return False

    def _import_numpy(self) -> None:
        self._measurement.privileges.apply()  # NumPy starts threads, which have the capabilities of this one
        importlib.import_module("numpy")

    def _wait_for_first_answers(self) -> None:
        """Wait for answers to the processes: importing NumPy, which the tool does next, would delay them.

        Wait at most READY_WAIT for the copies of kernels that the processes had loaded, and at most FIRST_ANSWER_WAIT for the sidecars
        that they requested."""
        start = time.monotonic()
        with self._measurement.lock:
            while not self._signals.terminated and not self._signals.interrupted:
                live = [p for p in self._measurement.active() if not p.disconnected]
                answered = all(p.image_answered and not p.pending_images for p in live)
                wait = READY_WAIT if any(p.waiting for p in live) else 0.0 if answered else FIRST_ANSWER_WAIT
                if (left := start + wait - time.monotonic()) <= 0:
                    break
                self._measurement.lock.wait(left)

    def _needed_capabilities(self) -> frozenset[int]:
        """Return the capabilities that the rest of the session needs."""
        all_processes = self.targets.all_processes
        needed = privileges.MEASURING
        if all_processes or self._measurement.host is not None:
            needed |= privileges.PROGRAMS
        return needed | privileges.JOINING if all_processes else needed

    def join(self, pid: int, *, starting: int | None = None) -> str | None:
        """Attach to a running process. Return None once probes are live in it, or else the reason for the failure.

        The summary counts the reason, except TOO_LATE: then the measurement ended before the attach. May be called from any thread, at
        any time.

        starting: ID of the held thread, if the process is inside its first cuInit.
        """
        started = traceable.started(pid)
        missed = self._joining.join(pid, starting)
        if missed is None:
            return None
        if missed.reason == NO_ROCR and self.targets.all_processes:
            return NO_ROCR  # the process will be held when it starts to use ROCr
        if self._measurement.stopped:
            return TOO_LATE
        self._measurement.record_missed(missed.reason, started)
        if missed.reason in (FORBIDDEN, TRACED, UNHOOKED):  # the text has the reason, or the other tool
            self._measurement.note(str(missed))
        return missed.reason

    def only_process(self) -> dict[str, int | str | None]:
        """Return pid and comm of the command, or of the only process that the user chose; None for both if there are several."""
        pid = self._child.pid if self._child else None
        if len(set(self.targets.pids)) == 1:
            pid = self.targets.pids[0]
        known = [one.comm for one in self._measurement.all_processes() if one.pid == pid]
        comm = known[-1] if known else traceable.comm(pid) if pid is not None else None
        if not comm and self.targets.command:
            comm = os.path.basename(self.targets.command[0])[:15]
        return {"pid": pid, "comm": comm}

    def _record_missed(self, pid: int, comm: str, reason: str) -> None:
        """Count a process that the watcher found. From any thread."""
        self._measurement.record_missed(reason, traceable.started(pid))

    def _join_all(self, pids: Sequence[int]) -> None:
        """Attach to all of these processes concurrently. Raises SessionError if none of them can be traced."""
        pool = DaemonThreadPool(JOINS)
        started = {pid: traceable.started(pid) for pid in pids}
        attempts = {pid: pool.submit(self._joining.join, pid, None) for pid in pids}
        for future in attempts.values():
            future.add_done_callback(lambda future: self._signals.wake())
        until = time.monotonic() + JOIN_WAIT
        missed: dict[int, joining.Missed] = {}
        while not all(future.done() for future in attempts.values()):
            select.select([self._signals.reader], [], [], max(0.0, until - time.monotonic()))
            self._signals.clear()
            if self._signals.interrupted or self._signals.terminated:
                break
            if time.monotonic() >= until:
                endless = [pid for pid, future in attempts.items() if not future.done()]
                missed = {pid: self._joining.give_up(pid) for pid in endless}
                break
        pool.close()
        missed |= {
            pid: error for pid, future in attempts.items() if future.done() and (error := future.result())
        }
        if len(missed) == len(pids):
            raise joining.all_failed(list(missed.values()))
        for pid, error in missed.items():
            self._measurement.record_missed(error.reason, started[pid])
            self._measurement.note(str(error))
        self._report_attached()

    def _on_hooked(self, process: TracedProcess) -> None:
        self._newly_hooked.append(_NewlyHooked(process, time.monotonic() + READY_WAIT))
        self._signals.wake()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is not None:
            self._tick = None  # it may have raised this error, and would raise it again in the wait below
        try:
            self._stop()
            while self._child and not self._signals.terminated and not self._wait():
                pass
            self._wait_for_last_messages()
        finally:
            self._close()
        if kind is None and not self._signals.terminated:
            from gpubpf.images.listing import no_match

            say = self._listener.complain if self.nothing_matched else self._measurement.note
            total, seen = self.summary(), self._seen_names()
            launches = total["launches_seen"]
            unmatched = self.wanted if self.nothing_matched and launches else self._unmatched()
            if unmatched and (seen or launches):
                say(no_match(unmatched, seen))
            elif (
                self._counts_launches
                and not launches
                and not {"graphs_before", "graphs_unknown"} & total.keys()
            ):
                when = " before the interrupt" if self._signals.interrupted else ""
                if self.targets.pids:
                    when = " after the tool attached; it does not see what was launched before"
                what = (
                    "no traced process launched a kernel"
                    if self._measurement.missed
                    else "no kernel was launched"
                )
                if self._watcher is not None and self._watcher.blind:
                    what, when = "no launch was seen, but processes may have come and ended unseen", ""
                say(what + when)

    def _wait_for_last_messages(self) -> None:
        """Wait at most LEAVING_WAIT until the server has read all messages of ended processes."""
        deadline = time.monotonic() + LEAVING_WAIT
        with self._measurement.lock:
            while any(not p.disconnected and not proc.exists(p.pid) for p in self._measurement.processes):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._measurement.lock.wait(left)

    def _close(self) -> None:
        self._shown.close()
        self._server.close()
        for process in self._measurement.processes:
            process.close_host()
        if self._measurement.host is not None:
            self._measurement.host.detach()
        self._background.close()
        self._signals.close()
        if self._child:
            os.close(self._pidfd)
        self._end_waits()

    def _end_waits(self) -> None:
        """End the waits of threads for the memory of processes, if the tool's own process ends now."""
        if self._owns_process:
            for text in user_waits.end(WAIT_FOR_MEMORY):
                self._measurement.note(text)

    def _unmatched(self) -> list[str]:
        """Return the patterns of --kernel that match no launched or loaded kernel."""
        from gpubpf import names

        seen = {kernel.mangled for kernel in self.kernels()}.union(
            *(process.entries for process in self._measurement.processes)
        )
        return [
            pattern for pattern in self.wanted if not any(names.matches((pattern,), name) for name in seen)
        ]

    def _seen_names(self) -> list[str]:
        """Return short kernel names for a message: the launched kernels, or all loaded ones if none was launched."""
        from gpubpf import names

        used = [kernel.mangled for kernel in self.kernels()]
        candidates = used or sorted(
            {name for process in self._measurement.processes for name in process.entries}
        )
        return [name.short for name in names.demangle_all(candidates)]

    @property
    def status(self) -> int:
        """The tool's exit status."""
        if self._signals.terminated:
            return 0
        code = self._returncode or 0
        command = code if code >= 0 else 128 - code
        return command or (1 if self.nothing_matched else 0)

    def end(self) -> None:
        """End the measurement, as Ctrl-C does. From any thread."""
        self._signals.interrupted = True
        self._signals.wake()

    @property
    def stopped(self) -> bool:
        """Whether the measurement has ended, so that results no longer change."""
        return self._measurement.stopped

    @property
    def several(self) -> bool:
        """Whether the session traces several processes or all, so that each row of a result names its process."""
        return self._measurement.several

    def now_ns(self) -> int:
        """Return the time in ns: CLOCK_MONOTONIC or, on the virtual clock, the latest time that a traced process has reported."""
        if not self.device.virtual:
            return time.monotonic_ns()
        return max((max(p.virtual_times()) for p in self._measurement.all_processes()), default=0)

    def began_ns(self) -> int | None:
        """Return when the time of -d and of intervals began, on CLOCK_MONOTONIC; None: not yet, or the clock is virtual."""
        began = None if self.device.virtual else self._began()
        return None if began is None else int(1e9 * began)

    def end_ns(self) -> int:
        """Return the time until which results are complete: `now_ns`, or when the measurement ended, without the last readings."""
        if self.device.virtual or not self._measurement.ended_ns:
            return self.now_ns()
        return self._measurement.ended_ns

    @property
    def nothing_matched(self) -> bool:
        """Whether the user named kernels, and no kernel that was seen matches."""
        return bool(self.wanted) and not self._loadable and not any(k.matched for k in self.kernels())

    @property
    def _loadable(self) -> bool:
        """Whether a running process may have loaded a matching kernel before the tool attached."""
        return any(process.loadable for process in self._measurement.all_processes())

    # --- time ---

    def intervals(
        self,
        interval: float | None = None,
        count: int | None = None,
        tick: Callable[[], object] | None = None,
        every: float = TICK,
    ) -> Iterator[int]:
        """Yield 1, 2, … whenever it is time to show results; `instances` is up to date then.

        That is every `interval` seconds, at most `count` times, and once at the end. The measurement ends with the command or the
        traced processes, after the session's `duration`, after `count` intervals, or at Ctrl-C. Time begins when the probes are live
        (`_began`).

        tick: called about every `every` seconds, sooner if logs and rings fill quickly, and once before each yield. Call `logs`,
        `rings` and `readings` there.
        """
        garbage.as_usual()
        own_files.keep()
        self._tick = self._with_budget(tick)
        self._tick_interval, self._next_tick = every, time.monotonic() + every
        done = 0

        def end() -> float | None:
            return self._after_began(self._duration)

        def due() -> float | None:
            times = end(), self._after_began(done * interval if interval else None)
            return min((t for t in times if t is not None), default=None)

        while True:
            done += 1
            timed = self._duration is not None or interval
            over = self._wait(due if timed else None) or self._signals.interrupted or self._signals.terminated
            ended = end()
            over = (
                over
                or (ended is not None and time.monotonic() >= ended)
                or (count is not None and done >= count)
            )
            if over:
                with progress.work("reading the results"):
                    self._stop()
                    self._run_tick()
                self._tick = None
                with progress.work("preparing the report"):
                    yield done
                return
            self._note_untraced_descendants(self._measurement.active())
            self._drain()
            self._run_tick()
            yield done

    def _began(self) -> float | None:
        """Return when the time of -d and of intervals began (time.monotonic). None: it has not begun yet.

        A command: with its first launch, because setting up the GPU and instrumenting the first kernels may take seconds.
        -p: when the copies of the kernels that were loaded are ready, and BEGIN_WAIT after attaching at the latest.
        Every process, or host programs alone: when they are watched."""
        if self.targets.all_processes or self._only_host:
            return self._started  # the tool's preparations after that may take long on a busy machine
        if self._began_at is None and self._may_begin():
            self._began_at = time.monotonic()
        return self._began_at

    def _may_begin(self) -> bool:
        processes = self._measurement.all_processes()
        if self.targets.pids:
            late = time.monotonic() >= self._started + BEGIN_WAIT
            with self._measurement.lock:
                return late or not any(p.waiting for p in processes)
        return any(p.has_launched() for p in processes)

    def _after_began(self, seconds: float | None) -> float | None:
        """Return the time so many seconds after time began (time.monotonic). None: unlimited, or unknown yet."""
        began = self._began() if seconds is not None else None
        return began + seconds if began is not None and seconds is not None else None

    def _wait(self, due: Callable[[], float | None] | None = None) -> bool:
        """Wait, calling the tick, until the command or all traced processes have ended, and return True.

        Return False if a signal that ends the measurement, or the time that `due` returns (time.monotonic), comes first. `due`
        returns None while that time is unknown."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.reader, selectors.EVENT_READ)
            if self._child and self._returncode is None:
                selector.register(self._pidfd, selectors.EVENT_READ)
            while not self._ended():
                times = [self._next_tick] if self._tick else []
                if due:
                    until = due()
                    times.append(until if until is not None else time.monotonic() + FAST_TICK)
                if not self._measurement.stopped:
                    times += [newly.until for newly in self._newly_hooked if not newly.told]
                wait = min(max(0.0, min(times) - time.monotonic()) if times else LONGEST_WAIT, LONGEST_WAIT)
                if self._signals.reader in {key.fd for key, _ in selector.select(wait)}:
                    self._signals.clear()
                self._background.replace_stuck()
                if not self._measurement.stopped:  # nothing may follow the summary
                    self._report_attached()
                if self._ended():
                    break
                if self._signals.terminated or (self._signals.interrupted and not self._measurement.stopped):
                    return False
                if due and (until := due()) is not None and time.monotonic() >= until:
                    return False
                if self._tick and time.monotonic() >= self._next_tick:
                    self._run_tick()
        return True

    def _ended(self) -> bool:
        """Return whether the command, or every process that the user named, has ended."""
        if self._child:
            if proc.has_ended(self._pidfd):  # a thread may trace the command, see `Strays`
                self._returncode = self._child.poll()
            return self._returncode is not None
        return not (
            self.targets.all_processes
            or self._joining.under_way
            or any(not p.disconnected for p in self._measurement.active())
        )

    def _run_tick(self) -> None:
        if self._tick is not None:
            self._measurement.drain_soon = False
            self._tick()
            self._next_tick = time.monotonic() + (
                min(FAST_TICK, self._tick_interval) if self._measurement.drain_soon else self._tick_interval
            )

    def _with_budget(self, tick: Callable[[], object] | None) -> Callable[[], object] | None:
        """Return the tick, followed by that of --budget."""
        budget = self._budget
        if budget is None:
            return tick

        def both() -> None:
            if tick is not None:
                tick()
            budget.tick(self._measurement, self._drain)

        return both

    def _report_attached(self) -> None:
        """Report the processes in which all copies are ready, and, once each, those in which they are not ready after READY_WAIT.

        If a process ends or executes another program before all copies are ready, `attached` does not follow."""
        for newly in list(self._newly_hooked):
            process = newly.process
            with self._measurement.lock:
                waiting, disconnected = process.waiting, process.disconnected
            when = process.virtual_times()[0] or time.monotonic_ns()
            late = disconnected or time.monotonic() >= newly.until or self._measurement.stopped
            if disconnected or not waiting:
                self._newly_hooked.remove(newly)
            if not waiting:
                self._listener.attached(process.pid, process.comm, when, process.again)
                with self._measurement.lock:
                    process.announced = True
                    self._measurement.lock.notify_all()
            elif late and not newly.told:
                newly.told = True
                self._listener.waiting(process.pid, process.comm, when, waiting)

    def _note_untraced_descendants(self, processes: Iterable[TracedProcess]) -> None:
        """Give a notice about processes that use the GPU and that these traced processes (`-p`) have started."""
        if not self.targets.pids:
            return
        traced = {process.pid for process in processes}
        found = joining.untraced_descendants(traced | self._noted_descendants)
        for pid in found.keys() - traced - self._noted_descendants:
            self._noted_descendants.add(pid)
            self._measurement.note(
                f"pid {pid} ({found[pid]}) was started by a traced process and uses the GPU, but is not traced; add it to -p"
            )

    def _stop(self) -> None:
        """End the measurement: agents instrument no further launches, and everything is read one last time."""
        if self._measurement.stopped:
            return
        patience = LEAVING_WAIT if self._signals.terminated else DRAIN_WAIT
        if self._returncode is not None:  # an agent that failed early did not wait for an answer
            self._server.settle(patience)
        if self._watcher is not None:
            self._watcher.stop_attaching()
        if self._strays is not None:
            self._strays.close()
        self._measurement.stopped = True
        request = DrainRequest(self._measurement, patience, DrainFlag.STOP)
        if self._measurement.host is not None:
            # Launches that an agent lets begin before it has read the message need the host programs.
            self._wait_for_answers(request, time.monotonic() + HOST_WAIT)
            self._measurement.host.detach()
        self._measurement.end()
        # From here on, a process can delay the report, but not the end of the measurement.
        self._note_untraced_descendants(request.processes)
        if self._watcher is not None:
            self._watcher.close()
        self._finish(request)
        if self._watcher is not None:
            self._count_unattached(self._watcher, request)
        if self._returncode is not None:
            self._wait_for_last_messages()
        self._measurement.read = True
        self._report_attached()
        self._run_tick()  # read logs and rings before counting what they lack
        for process, launches in summary.unread_launches(self._measurement):
            if self._measurement.follow.kept and process.disconnected and not process.failed:
                continue  # perhaps nothing is lost; the tool knows
            why = (
                ": its CUDA context failed before its results could be read"
                if process.failed
                else ": its last results were not read"
                if process.dropped
                else ": it could not create a file in memory for its results (ulimit -n, ulimit -f)"
                if process.without_files
                else " executed another program before its results could be read"
                if process.executed
                else " ended before its results could be read"
                if process.disconnected
                else ": its results could not be read in time"
            )
            loss = summary.describe_loss(self._measurement, process, launches)
            if loss is not None:
                self._measurement.note(f"{process.label}{why}" + (f"; {loss}" if loss else ""))
        for process in self._measurement.all_processes():
            for slot, lacking in list(process.no_room.items()):
                self._measurement.note_once(reasons.no_room(process.names.get(slot, ""), lacking))
        if any(calls := summary.lost_calls(self._measurement)):
            self._measurement.note(reasons.lost_calls(*calls))
        if late := summary.before_their_copies(self._measurement):
            self._measurement.note(reasons.before_copies(late))
        for process in summary.partly_counted(self._measurement):
            self._measurement.note(
                f"{process.label}: some kernels may still have been running at the last reading; counts may be incomplete"
            )
        for process in summary.ended_while_running(self._measurement):
            self._measurement.note(
                f"{process.label} ended while a kernel was running or had failed; results may be incomplete"
            )
        if silent := [
            p
            for p in self._measurement.all_processes()
            if p.sent_stubs
            and p.disconnected
            and not p.reported_hooks
            and not p.dropped
            and not (
                p.attached and self._watcher
            )  # the attach is not over; the watcher has counted the process
        ]:
            for process in silent:
                self._measurement.record_missed(reasons.UNREACHED, process.started)
            self._measurement.note(
                f"{table.count(len(silent), 'process')} ended or continued before the tool could attach;"
                f" {'their' if len(silent) > 1 else 'its'} launches are missing: {_named(silent)}"
            )
        if graphs := summary.graphs_unknown(self._measurement):
            self._measurement.note(
                f"{table.count(graphs, 'launch')} of CUDA graphs whose kernels in conditional nodes are not instrumented,"
                " or that kernels may launch: how often the kernels of these graphs ran is unknown"
            )

    def _drain(self) -> int:
        """Request the maps of every live process, and wait for them until the end of -d at the latest.

        Return when the last one answered (time.monotonic_ns). Ended processes have already sent their maps."""
        began = time.monotonic_ns()
        request = DrainRequest(self._measurement)
        self._finish(request, self._after_began(self._duration))
        return max([began, *(process.drained_ns for process in request.processes)])

    def _finish(self, request: DrainRequest, until: float | None = None) -> None:
        """Wait for the answers to a request. Give a notice with the number of processes that did not answer.

        until: time.monotonic at which to stop waiting, without a notice.
        """
        deadline = request.finished + (LEAVING_WAIT if self._signals.terminated else ANSWER_WAIT)
        if until is not None and until < deadline:
            self._wait_for_answers(request, until)
        elif not self._wait_for_answers(request, deadline):
            late = request.unanswered()
            self._measurement.note(
                f"{table.count(len(late), 'process')} did not answer in time;"
                f" counts since the last reading are not shown: {_named(late)}"
            )

    def _wait_for_answers(self, request: DrainRequest, until: float) -> bool:
        """Wait for the answers to a request, calling the tick. Return False if some are missing at `until` (time.monotonic)."""
        while not request.wait(min(until, self._next_tick) if self._tick else until):
            if time.monotonic() >= until:
                return False
            self._run_tick()
        return True

    def _count_unattached(self, watcher: MachineWatcher, request: DrainRequest) -> None:
        """Count the processes that came too late. `request`: the last request, which went to every process with live hooks."""
        measured = {p.pid for p in self._measurement.all_processes() if p.hooked and p in request.processes}
        for pid in watcher.unattached():
            if pid not in measured:
                self._measurement.record_missed(TOO_LATE, traceable.started(pid))

    # --- results for tools ---

    def has_map(self, map_name: str) -> bool:
        """Return whether an attached program uses this map. Other maps cannot be read."""
        return map_name in self._measurement.numbers

    def instances(self, map_name: str, separate: bool = False) -> list[Instance]:
        """Return the last reading of a map: one instance per process, GPU, kernel and launch shape.

        separate: do not add up those of several contexts and modules.

        If a process has several (it reset the device, or loaded a module twice), their values are added up. Kernels of the same name
        count as one.
        """
        return readout.instances(self._measurement, map_name, separate)

    def instances_together(self, *map_names: str) -> list[list[Instance]]:
        """Return the last reading of maps that the same kernels use, at one moment: a new reading may come at any time.

        The instances of each map are separate, as with `instances`, and have the same order. A damaged reading is left out."""
        return readout.together(self._measurement, map_names)

    def blocks(self) -> dict[tuple[int, int, str], int]:
        """Return how many blocks the launches of the last reading had, by process number, GPU and mangled kernel name."""
        return readout.blocks(self._measurement)

    def readings(self, *names: str) -> list[Reading]:
        """Return every reading of these maps since the last call, in order for each context; see `Follow.pump`.

        Readings have no register counts. From the thread that runs `intervals`."""
        return readout.readings(self._measurement, *names)

    def logs(self) -> list[ProcessLog]:
        """Return the new records in each process's operation log since the last call; see `Follow`. From `intervals`' thread."""
        return readout.logs(self._measurement)

    def rings(self, map_name: str) -> list[RingRecords]:
        """Return the new records of a ring since the last call, by process and context. From the thread that runs `intervals`."""
        return readout.rings(self._measurement, map_name)

    def ring_counts(self, map_name: str) -> list[RingCounts]:
        """Return the last known numbers of reserved, received and lost records of a ring, by process, context and shard."""
        return readout.ring_counts(self._measurement, map_name)

    def shared(self, map_name: str, processes: Collection[int] | None = None) -> list[SharedArray]:
        """Return the contents of a shared array in each process.

        processes: numbers of processes: only in these; None: in all.
        """
        return readout.shared(self._measurement, map_name, processes)

    def sites(self, mangled: str, pid: int | None = None, build: int | None = None) -> dict[int, Site]:
        """Return the sites of a kernel by number (`ctx->site`), with source lines if the program has them.

        pid: only this process; None: all.
        build: only this build, from an `Instance` or a launch; None: all.

        Sites on which builds disagree are left out. A process may have different kernels with the same name (records/builds.py), and
        so may different processes."""
        return readout.sites(self._measurement, mangled, pid, build)

    def kernels(self) -> list[KernelCount]:
        """Return the launch counts of every kernel that a process looked up, most launches first."""
        return summary.kernels(self._measurement)

    def processes(self) -> dict[int, tuple[int, str]]:
        """Return pid and comm of the processes that are or were measured, by number, except those that `forget` has removed."""
        processes = self._measurement.all_processes()
        return {process.number: (process.pid, process.comm) for process in processes if process.hooked}

    def by_process(self) -> list[ProcessCounts]:
        """Return the launch counts of every process, except those that `forget` has removed. They change during the measurement."""
        return summary.by_process(self._measurement)

    def read(self) -> None:
        """Read the maps of every live process now, for `instances`. Call it in the tick of `intervals`, which runs meanwhile, too."""
        if self._budget is not None:
            self._budget.read(self._drain)
        else:
            self._drain()

    def overhead(self) -> dict[str, Any] | None:
        """Return the field `budget` of the summary; None without a budget."""
        return None if self._budget is None else self._budget.record(self._measurement)

    def missed(self) -> dict[str, int]:
        """Return how many processes could not be measured, by reason."""
        with self._measurement.lock:
            return {reason: found.count for reason, found in self._measurement.missed.items()}

    def forget(self, processes: Collection[int]) -> None:
        """Remove processes that are over (`ProcessCounts`), so that a measurement of weeks needs no more memory than one of minutes.

        processes: their numbers. The summary and all other results no longer have them.
        """
        for process in self._measurement.all_processes():
            if process.number in processes and process.fully_read:
                self._server.forget(process)
        if self._budget is not None:
            self._budget.forget(processes)

    def kernel_names(self) -> dict[int, dict[int, str]]:
        """Return, by process number, the mangled kernel names by the number that `gpu_kernel()` returns."""
        return {process.number: dict(process.names) for process in self._measurement.all_processes()}

    def waves(self) -> dict[int, dict[str | int, int]]:
        """Return the lanes per wave on AMD GPUs, by process number: by mangled name of a kernel, and by ordinal of a GPU."""
        return {process.number: dict(process.waves) for process in self._measurement.all_processes()}

    def launches_by_comm(self) -> dict[str, dict[str, int]]:
        """Return launches by process name (comm), then by mangled kernel name."""
        return summary.launches_by_comm(self._measurement)

    def pids(self) -> dict[str, int]:
        """Return, for each process name (comm), the pid of the first process with this name."""
        return {process.comm: process.pid for process in reversed(self._measurement.all_processes())}

    def failed(self) -> set[int]:
        """Return the numbers of processes with a context that failed: a kernel ended with an error."""
        return {process.number for process in self._measurement.all_processes() if process.failed}

    def faults(self) -> dict[int, tuple[KernelFault, ...]]:
        """Return the errors with which kernels ended, by process number."""
        return {process.number: tuple(process.faults) for process in self._measurement.all_processes()}

    def ended(self) -> set[int]:
        """Return the numbers of processes that have ended, or from which nothing more will come."""
        return {process.number for process in self._measurement.all_processes() if process.disconnected}

    def gpus(self) -> dict[int, int | None]:
        """Return the ordinal of each process's GPU, by process number; None if it uses several, or none."""
        used = {process.number: process.gpus for process in self._measurement.all_processes()}
        return {number: min(gpus) if len(gpus) == 1 else None for number, gpus in used.items()}

    def ended_unread(self) -> set[int]:
        """Return the numbers of processes that ended before their maps were read, or while kernels were running.

        Processes with a failed context are left out."""
        unread = [
            process for process, _ in summary.unread_launches(self._measurement) if process.disconnected
        ]
        unread += summary.ended_while_running(self._measurement)
        return {process.number for process in unread if not process.failed}

    def unread(self) -> set[int]:
        """Return the numbers of processes with incomplete counts: launches were instrumented, but their maps were not read.

        After the measurement ends, these counts are lost."""
        return {process.number for process, _ in summary.unread_launches(self._measurement)}

    def summary(self) -> dict[str, Any]:
        """Return the fields of the summary record, except `type` and `tool`."""
        record = summary.summary(self._measurement)
        return record if self._budget is None else record | {"budget": self._budget.record(self._measurement)}
