"""A request to every live process to send its maps, and the wait for the answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gpubpf.agent import protocol
from gpubpf.process import limits

if TYPE_CHECKING:
    from gpubpf.traced.measurement import Measurement
    from gpubpf.traced.traced_process import TracedProcess

_PAUSE = 0.01  # seconds until a message is offered again


class DrainRequest:
    """Asks all processes for their maps when it is created, without waiting. Belongs to the thread that runs `Session.intervals`.

    A process that does not take the message does not delay the others: `wait` offers it the message again, and disconnects the process
    after limits.SEND_WAIT.

    patience: seconds that running kernels may take to finish.
    flags: of `DrainFlag`.

    processes: the processes that got the request.
    finished: when the running kernels' time is over (time.monotonic).
    """

    def __init__(self, measurement: Measurement, patience: float = 0.0, flags: int = 0) -> None:
        measurement.request += 1
        self._lock, self._number = measurement.lock, measurement.request
        self._message = protocol.drain(self._number, patience, flags)
        self.processes = frozenset(p for p in measurement.active() if not p.disconnected)
        self._waiting = list(self.processes)  # may contain some that have answered; see `_all_answered`
        self._unsent = list(self.processes)
        self._send_until = time.monotonic() + limits.SEND_WAIT
        self._send()
        self.finished = time.monotonic() + patience

    def wait(self, until: float) -> bool:
        """Wait until all processes have answered or disconnected. Return False if that takes longer than `until` (time.monotonic)."""
        while True:
            self._send()
            again = min(until, time.monotonic() + _PAUSE) if self._unsent else until
            with self._lock:
                if self._lock.wait_for(self._all_answered, max(0.0, again - time.monotonic())):
                    return True
            if time.monotonic() >= until:
                return False

    def unanswered(self) -> list[TracedProcess]:
        """Return the processes that have not answered yet."""
        with self._lock:
            return [process for process in self._waiting if not self._is_answered(process)]

    def _send(self) -> None:
        self._unsent = [process for process in self._unsent if not process.offer(self._message)]
        if self._unsent and time.monotonic() >= self._send_until:
            for process in self._unsent:
                process.socket.shutdown()
            self._unsent = []

    def _all_answered(self) -> bool:
        """Return whether all processes have answered. The caller holds the lock.

        This is called after each message from any process. To keep it fast, it checks only one process until that one has answered."""
        while self._waiting and self._is_answered(self._waiting[-1]):
            self._waiting.pop()
        return not self._waiting

    def _is_answered(self, process: TracedProcess) -> bool:
        return process.disconnected or process.last_drain >= self._number
