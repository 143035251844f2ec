"""Whose calls are watched, and for how long: a command, processes that run, or the whole machine. No agent is in any of them.

watch = Watch(args, environment, note)
with watch.follow(calls):
    for _ in watch.intervals(tick, calls.stop):
        …                               # `watch.stopped`: what is shown now is the last
sys.exit(watch.status)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from gpubpf.errors import SessionError
from gpubpf.process import privileges, users
from gpubpf.session import joining
from gpubpf.session.command import Signals, raise_file_limit, run

if TYPE_CHECKING:
    from gpubpf.calls.probes import Calls


class Watch:
    """`environment` is added to the command's. Raises SessionError."""

    def __init__(
        self, args: argparse.Namespace, environment: Mapping[str, str], note: Callable[[str], None]
    ) -> None:
        self._args, self._environment, self._note = args, environment, note
        self._user = users.command_user(args.user) if args.command else None
        self._signals = Signals()
        self._privileges = privileges.Privileges()
        self._child: subprocess.Popen[bytes] | None = None
        self._files: dict[int, int] = {}  # of processes that have not ended: their pidfds
        self._returncode: int | None = None
        self._calls: Calls | None = None
        self.stopped = False
        self.unread = False  # whoever reads the results has gone: set by who shows them, ends the measurement
        self.started_ns = self.ended_ns = 0

    @property
    def everyone(self) -> bool:
        """Every process of the machine is watched."""
        return not self._args.command and not self._args.pid

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the command, or that were asked for, and run."""
        return tuple(self._files)

    @contextlib.contextmanager
    def follow(self, calls: Calls) -> Iterator[None]:
        """Has the calls of the command, which it starts, or of the processes counted; gives up what privileges that took. At the end
        waits for the command, but after SIGTERM."""
        self._calls = calls
        self._signals.catch()
        try:
            self.started_ns = time.monotonic_ns()
            if self._args.command:
                self._start(calls)
            else:
                self._find(calls)
            raise_file_limit()  # the command keeps the one that it was started with
            self._privileges.keep(privileges.MEASURING | privileges.PROGRAMS, self._args.alone)
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

    def _start(self, calls: Calls) -> None:
        """What this process starts is followed from its first instruction on."""
        calls.targets(os.getpid())
        try:
            self._child = run(self._args.command, {**os.environ, **self._environment}, self._user)
        finally:
            calls.forget(os.getpid())
        self._files[self._child.pid] = os.pidfd_open(self._child.pid)

    def _find(self, calls: Calls) -> None:
        missed = []
        for pid in dict.fromkeys(self._args.pid):
            try:
                self._files[pid] = os.pidfd_open(pid)
            except OSError as error:
                where = (
                    "is no process, but a thread of one" if os.path.exists(f"/proc/{pid}") else "does not run"
                )
                missed.append(SessionError(f"pid {pid} {where} ({error.strerror}); look at ps"))
                continue
            calls.targets(pid)
        if missed and not self._files:
            raise joining.all_failed(missed)
        for one in missed:
            self._note(str(one))

    @property
    def status(self) -> int:
        """The exit status of the tool: the command's, but for SIGTERM, which the command need not have noticed."""
        code = 0 if self._signals.terminated else self._returncode or 0
        return code if code >= 0 else 128 - code

    @property
    def terminated(self) -> bool:
        """The tool is told to leave at once."""
        return self._signals.terminated

    def intervals(self, tick: Callable[[], float], stop: Callable[[], object]) -> Iterator[int]:
        """Yields when it is time to show something: every `interval` seconds, `count` times, and at the end of the measurement,
        which is that of the command, of the duration, or Ctrl-C. `tick`: called in between, and before each yield, says in how many
        seconds again; `stop`: before the last."""
        start = time.monotonic()
        interval, count = self._args.interval, self._args.count
        end = start + self._args.duration if self._args.duration is not None else None
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
        """Whether all that is watched has ended; False when `until` (time.monotonic) came first, or a signal that ends it."""
        due = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.reader, selectors.EVENT_READ)
            for pid, file in self._files.items():
                selector.register(file, selectors.EVENT_READ, pid)
            while not self._ended():
                times = [t for t in (until, due if tick else None) if t is not None]
                ready = selector.select(max(0.0, min(times) - time.monotonic()) if times else None)
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
