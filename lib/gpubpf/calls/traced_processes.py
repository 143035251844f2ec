"""The processes whose calls are traced, and for how long: a command, running processes, or every process. None
of them gets an agent.

processes = TracedProcesses(options, environment, note)
with processes.follow(calls):
    for _ in processes.intervals(tick, calls.stop):
        …                           # the last report if `processes.stopped`
sys.exit(processes.status)
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gpubpf import own_files
from gpubpf.errors import SessionError
from gpubpf.kernel import privileges
from gpubpf.process import proc, traceable, users
from gpubpf.show import garbage
from gpubpf.traced import joining
from gpubpf.traced.command import LONGEST_WAIT, Signals, raise_file_limit, run

if TYPE_CHECKING:
    from gpubpf.calls.probes import CallProbes
    from gpubpf.show.parsed import Options, TargetOptions


def check_privileges(targets: TargetOptions) -> None:
    """Raise SessionError if this process may not load and attach eBPF programs."""
    if not privileges.capable():
        what = "calls of a library" if targets.command or targets.pids else "every process"
        raise SessionError(f"tracing {what} requires root, or CAP_BPF and CAP_PERFMON; use sudo")


class TracedProcesses:
    """The processes that the command line selects. `environment`: variables to add to the command's environment.
    Raise SessionError.
    """

    def __init__(self, options: Options, environment: Mapping[str, str], note: Callable[[str], None]) -> None:
        self._targets, self._output = options.targets, options.output
        self._environment, self._note = environment, note
        self._user = users.command_user(self._targets.user) if self._targets.command else None
        self._signals = Signals()
        self._privileges = privileges.Privileges()
        self._child: subprocess.Popen[bytes] | None = None
        self._files: dict[int, int] = {}  # PID → pidfd of processes that have not ended
        self._returncode: int | None = None
        self._calls: CallProbes | None = None
        self.stopped = False
        self.unread = False  # set by the report if nobody reads the results any longer: ends the measurement
        self.started_ns = self.ended_ns = 0

    @property
    def everyone(self) -> bool:
        """Whether every process of the machine is traced."""
        return not self._targets.command and not self._targets.pids

    @property
    def pids(self) -> tuple[int, ...]:
        """The PIDs of the command or of -p that are still running."""
        return tuple(self._files)

    @contextlib.contextmanager
    def follow(self, calls: CallProbes) -> Iterator[None]:
        """Start the command and count its calls, or count calls of running processes. Drop the privileges that
        this needed.

        On exit, wait for the command, except after SIGTERM.
        """
        self._calls = calls
        self._signals.catch()
        try:
            self.started_ns = time.monotonic_ns()
            if command := self._targets.command:
                self._start(calls, command)
            else:
                self._find(calls)
            raise_file_limit()  # only now, so that the command keeps the original limit
            self._privileges.keep(privileges.MEASURING | privileges.PROGRAMS, self._targets.alone)
            calls.limit(self._privileges)
            try:
                yield
            finally:
                self.stopped = True
                while self._child and not self._signals.terminated and not self._wait(None, None):
                    pass
        finally:
            self._signals.close()
            for file in self._files.values():
                os.close(file)
            self._files.clear()

    def _start(self, calls: CallProbes, command: Sequence[str]) -> None:
        """Start the command, which is traced from its first instruction on as a child of this process."""
        calls.trace(os.getpid())
        try:
            self._child = run(command, {**os.environ, **self._environment}, self._user)
        finally:
            calls.forget(os.getpid())
        self._files[self._child.pid] = os.pidfd_open(self._child.pid)

    def _find(self, calls: CallProbes) -> None:
        """Trace the processes of -p. Raise SessionError if none can be traced."""
        missed = []
        for pid in dict.fromkeys(self._targets.pids):
            try:
                traceable.check_64_bit(pid)
                self._files[pid] = os.pidfd_open(pid)
            except SessionError as error:
                missed.append(error)
            except OSError as error:
                missed.append(_cannot_open(pid, error))
            else:
                calls.trace(pid)
        if missed and not self._files:
            raise joining.all_failed(missed)
        for one in missed:
            self._note(str(one))

    @property
    def status(self) -> int:
        """The exit status of the tool: the command's, or 0 after SIGTERM, since the command may continue then."""
        code = 0 if self._signals.terminated else self._returncode or 0
        return code if code >= 0 else 128 - code

    @property
    def terminated(self) -> bool:
        """Whether the tool must exit at once because of SIGTERM."""
        return self._signals.terminated

    def intervals(self, tick: Callable[[], float], stop: Callable[[], object]) -> Iterator[int]:
        """Yield when a report is due: every `interval` seconds, at most `count` times, and at the end of the
        measurement.

        The measurement ends with the traced processes, after `duration` or `count` reports, or with Ctrl-C or
        SIGTERM. `tick` is called in between and before each report, and returns the seconds until its next call.
        `stop` is called before the last report.
        """
        garbage.as_usual()
        own_files.keep()
        start = time.monotonic()
        interval, count = self._output.interval, self._output.count
        end = start + self._targets.duration if self._targets.duration is not None else None
        done = 0
        while not self.stopped:
            done += 1
            times = (end, start + done * interval if interval else None)
            over = self._wait(min((t for t in times if t is not None), default=None), tick)
            over = over or self._signals.interrupted or self._signals.terminated or self.unread
            over = over or (end is not None and time.monotonic() >= end) or done == count
            if over:
                self.stopped = True
                stop()
                self.ended_ns = time.monotonic_ns()
            tick()
            yield done

    def _wait(self, until: float | None, tick: Callable[[], float] | None) -> bool:
        """Wait for all traced processes to end. Return False if `until` (time.monotonic) or a signal comes
        first.
        """
        due = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.reader, selectors.EVENT_READ)
            for pid, file in self._files.items():
                selector.register(file, selectors.EVENT_READ, pid)
            while not self._ended():
                times = [t for t in (until, due if tick else None) if t is not None]
                wait = max(0.0, min(times) - time.monotonic()) if times else LONGEST_WAIT
                ready = selector.select(min(wait, LONGEST_WAIT))
                for key, _ in ready:
                    if key.data is None:
                        self._signals.clear()
                    elif self._child is None:
                        selector.unregister(key.fileobj)
                        os.close(self._files.pop(key.data))
                        if self._calls is not None:
                            self._calls.ended(key.data)
                if self._ended():
                    break
                if self._signals.terminated:
                    return False
                if (self._signals.interrupted or self.unread) and not self.stopped:
                    return False
                if until is not None and time.monotonic() >= until:
                    return False
                if tick and time.monotonic() >= due:
                    due = time.monotonic() + tick()
        return True

    def _ended(self) -> bool:
        if self._child:
            with contextlib.suppress(ChildProcessError):
                self._returncode = self._child.poll()
            return self._returncode is not None
        return not self.everyone and not self._files


def _cannot_open(pid: int, error: OSError) -> SessionError:
    """Return the error for a process whose pidfd cannot be opened, with the reason."""
    if proc.exists(pid):
        return SessionError(
            f"pid {pid} is not a process but a thread of one ({error.strerror}); name the process"
        )
    return SessionError(f"there is no process {pid}; run ps to list the processes")
