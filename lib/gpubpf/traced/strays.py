"""Processes of a command that use the GPU but cannot get the agent from their environment, see `joining.is_stray`.

strays = Strays(pid, is_traced, join, before_each)     # a thread looks for them
strays.close()
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable

from gpubpf.process import traceable
from gpubpf.traced import joining

INTERVAL = 0.1  # seconds between two searches, at least
TRY_AGAIN = 1.0  # seconds until the next attempt to attach to a process that has not initialized the driver; at first INTERVAL
SHARE = 100  # searches take at most 1/SHARE of a core


class Strays:
    """Attaches to such processes while they run.

    command: process ID of the command, which may be such a process itself.
    is_traced: returns whether an agent is connected.
    join: attaches to a process that has loaded a driver; returns whether to try again later.
    before_each: called in the thread before each search.
    """

    def __init__(
        self,
        command: int,
        is_traced: Callable[[int], bool],
        join: Callable[[int], bool],
        before_each: Callable[[], None],
    ) -> None:
        self._command, self._is_traced, self._join, self._before_each = command, is_traced, join, before_each
        # (PID, start time) → earliest next attempt (time.monotonic), and the seconds from that attempt to the one after it
        self._next: dict[tuple[int, float], tuple[float, float]] = {}
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="gpubpf-strays", daemon=True).start()

    def close(self) -> None:
        """Attach to no further process."""
        self._closing.set()

    def _run(self) -> None:
        pause = INTERVAL
        while not self._closing.wait(pause):
            self._before_each()
            began = time.thread_time()
            for pid in (self._command, *traceable.descendants([self._command])):
                self._look(pid)
            pause = max(INTERVAL, SHARE * (time.thread_time() - began))

    def _look(self, pid: int) -> None:
        process = pid, traceable.started(pid)
        due, pause = self._next.get(process, (0.0, INTERVAL))
        if time.monotonic() < due or self._is_traced(pid):
            return
        with contextlib.suppress(OSError):  # the process has ended, or cannot be read
            if joining.is_stray(pid) and not self._closing.is_set():
                again = self._join(pid)
                self._next[process] = (
                    time.monotonic() + pause if again else math.inf,
                    min(2 * pause, TRY_AGAIN),
                )
