"""A process of its own that holds those who begin to use the CUDA driver (machine.py starts it).

It watches the `cuInit` of driver files (cuinit.py). A process that comes for the first time is stopped there by ptrace, which no
shell and no parent sees; the thread makes another one for the tool, and waits, untraced, for the word to go on (borrow.py, `park`): it
would not wait for ever, nor is it lost when the tool is. Others of its threads that come meanwhile stand until then.

It is one thread that runs before ordinary ones, and does nothing else: the tool has other things to do, and Python lets only one
of its threads run at a time; who is stopped must not wait for that. When the tool is gone, it lets all go, and ends.

Messages are JSON objects, one in each packet. To it: `place` (a path, an offset), `release` (a process goes on), `done` (it is not
held again, and goes on; did it come while it joined as it ran?), `ask` (a process that runs, and when it was looked at in ns: is it
to join?), `lost`; what has an `id` is answered with that. From it, beside `answer`: `held`, `late` (it could not be held),
`forget` (it executes another program, or has ended).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from gpubpf.attach import borrow
from gpubpf.attach.borrow import Code
from gpubpf.attach.cuinit import CALLED_CUINIT, CuInitProbes, Event
from gpubpf.errors import SessionError
from gpubpf.process import ptrace, target
from gpubpf.process.ptrace import Gone, Refused

LIMIT = 5.0  # seconds for which a process is held at most
BORROW = 0.2  # seconds for finding a place where it can be borrowed
AGAIN = 0.001  # seconds until it is stopped again
ENTRY = 16  # bytes behind the entry of cuInit that its first instruction may lead to
PACKET = 1 << 16
FORGOTTEN = 4096  # processes of which it is remembered when they ended

_ANOTHER: dict[str, Any] = {}
_EXITING = 4  # PF_EXITING
_C_LIBRARY = re.compile(
    r".*/(ld-musl.*|libc\.musl.*|libc(\.so\.6|-2\.\d+\.so)|lib(pthread|dl)(\.so\.\d|-2\.\d+\.so))"
)


@dataclass
class _Thread:
    """One that is inside cuInit, as far as is known. `traced` None: it is stopped again at `again`."""

    event: Event
    traced: ptrace.Thread | None = None
    again: float = 0.0


@dataclass
class _Arrival:
    """A process that is in its first cuInit. `base`: of the memory in which one of its threads waits, and of which the tool knows.
    `late`: another one could not be held."""

    pid: int
    comm: str
    since: float = field(default_factory=time.monotonic)
    threads: dict[int, _Thread] = field(default_factory=dict)
    base: int = 0
    late: bool = False


class _Holding:
    def __init__(self, connection: socket.socket, probes: CuInitProbes) -> None:
        self._connection, self._probes = connection, probes
        self._arrivals: dict[int, _Arrival] = {}
        self._leaving: list[ptrace.Thread] = []  # they are let go as soon as they stand
        # Of processes that the tool knows: since when it is done with them, in ns; None: not yet.
        self._known: dict[int, int | None] = {}
        # Of those that it is not done with, what came after: `_ANOTHER` where it executed another program, or ended and its number is
        # another's; then what is to be said of that one, when the tool is done with the one before.
        self._next: dict[int, list[dict[str, Any]]] = {}
        # When those that were known executed another program, or ended; the last ones, the oldest first.
        self._forgotten: dict[int, int] = {}
        self._overtaken: set[int] = set()  # they came to cuInit while they joined as they ran

    def run(self) -> None:
        while True:
            self._pause(self._due(), self._connection)
            while (message := self._received()) is not None:
                if not message:
                    time.sleep(0.02)  # agents that were putting in their hooks notice it, too
                    for pid in list(self._arrivals):
                        self._release(pid)
                    return
                self._obey(message)
            self._leaving = [thread for thread in self._leaving if not self._left(thread)]
            for arrival in list(self._arrivals.values()):
                if self._arrivals.get(arrival.pid) is arrival:
                    self._advance(arrival, time.monotonic())
                self._read()  # who comes waits for an answer

    def _pause(self, seconds: float | None, *others: socket.socket) -> None:
        """Sleeps for so long at most; who comes meanwhile is stopped."""
        files: list[Any] = [self._probes.file, *others]
        select.select(files, [], [], seconds)
        self._read()

    def _due(self) -> float | None:
        """When to look at what tells nobody."""
        if self._leaving or any(
            thread.traced is None or thread.traced.status is None
            for arrival in self._arrivals.values()
            for thread in arrival.threads.values()
        ):
            return 50e-6
        return 0.05 if self._arrivals else None

    # --- the tool ---

    def _received(self) -> dict[str, Any] | None:
        """None: there is no message; an empty one: the tool is gone."""
        try:
            data = self._connection.recv(PACKET, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return {}
        return dict(json.loads(data)) if data else {}

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(
            OSError
        ):  # gone, which is noticed; or it does not read, and is not waited for
            self._connection.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)

    def _obey(self, message: dict[str, Any]) -> None:
        answer: Any = None
        if "place" in message:
            answer = self._place(*message["place"])
        elif "ask" in message:
            pid, seen = message["ask"]
            answer = pid not in self._known and seen > self._forgotten.get(pid, 0)
            if answer:
                self._known[pid] = None
                self._probes.track_process(pid)
                if not _runs(pid):  # its end is told no more
                    self._over(pid, time.monotonic_ns())
        elif "done" in message:
            answer = self._done(message["done"])
        elif "release" in message:
            self._release(message["release"])
        elif "lost" in message:
            answer = self._probes.lost
        if "id" in message:
            self._send(id=message["id"], answer=answer)

    def _place(self, path: str, offset: int) -> bool:
        try:
            self._probes.attach(path, offset)
        except OSError:
            return False
        return True

    def _done(self, pid: int) -> bool:
        """Whether it came while it joined as it ran."""
        overtaken = pid in self._overtaken
        self._overtaken.discard(pid)
        self._read()
        if pid not in self._next:
            self._probes.ignore_process(pid)
            self._known[pid] = time.monotonic_ns()
            self._release(pid)
            return overtaken
        after = self._next.pop(pid)
        while after and after[0] is _ANOTHER:
            del after[0]
        if after:
            self._send(**after.pop(0))
        elif pid not in self._arrivals:
            del self._known[pid]
        if after:
            self._next[pid] = after
        return overtaken

    def _tell(self, pid: int, **message: Any) -> None:
        """Of a process that came: when the tool is done with the one before of that number."""
        if pid in self._next:
            self._next[pid].append(message)
        else:
            self._send(**message)

    # --- who comes ---

    def _over(self, pid: int, ts: int) -> None:
        """It executed another program, or ended, at `ts`."""
        self._release(pid, gone=True)
        self._probes.stop_ignoring(pid)  # it happened as it was `done`
        if pid in self._known:
            if self._known[pid] is None:
                self._next.setdefault(pid, []).append(_ANOTHER)
            else:
                del self._known[pid]
            self._forgotten.pop(pid, None)
            self._forgotten[pid] = ts
            if len(self._forgotten) > FORGOTTEN:
                del self._forgotten[next(iter(self._forgotten))]
        self._send(forget=pid)

    def _read(self) -> None:
        for event in self._probes.events():
            if event.kind != CALLED_CUINIT:
                self._over(event.pid, event.ts)
            elif (arrival := self._arrivals.get(event.pid)) is not None or self._is_new(event):
                if arrival is None:
                    arrival = self._arrivals[event.pid] = _Arrival(event.pid, event.comm)
                    self._probes.track_process(event.pid)
                self._stop(arrival, arrival.threads.setdefault(event.tid, _Thread(event)))
            else:
                self._probes.release_thread(event.tid)
                self._probes.forget_thread(event.tid)

    def _is_new(self, event: Event) -> bool:
        if self._next.get(event.pid, [{}])[-1] is _ANOTHER:
            return True
        done = self._known.get(event.pid, 0)
        if done is None:
            self._overtaken.add(event.pid)
            return False
        if event.ts < done:  # of another of its threads, when it was held
            return False
        self._known[event.pid] = None
        return True

    def _stop(self, arrival: _Arrival, thread: _Thread) -> None:
        try:
            traced = ptrace.Thread(arrival.pid, thread.event.tid)
            traced.interrupt()
            thread.traced = traced
        except (Gone, Refused):  # why, is found out by who has it join
            self._lose(arrival, thread)
        self._probes.release_thread(thread.event.tid)

    def _advance(self, arrival: _Arrival, now: float) -> None:
        try:
            for thread in list(arrival.threads.values()):
                try:
                    if thread.traced is None:
                        if now >= thread.again:
                            self._stop(arrival, thread)
                    elif thread.traced.status is not None:
                        thread.traced.check()
                    elif thread.traced.poll():
                        self._stands(arrival, thread, thread.traced)
                except Gone:
                    self._lose(arrival, thread)
            limit = LIMIT if arrival.base else BORROW
            over = now > arrival.since + limit or not (arrival.threads or arrival.base)
        except (SessionError, Refused):  # likewise
            over = True
        if over and self._arrivals.get(arrival.pid) is arrival:  # events were read meanwhile
            self._release(arrival.pid)

    def _lose(self, arrival: _Arrival, thread: _Thread) -> None:
        """It ended, which it may have done long after cuInit, or somebody else traces it."""
        if arrival.threads.pop(thread.event.tid, None) is not None:
            arrival.late = True
            if arrival.base:
                self._overtaken.add(arrival.pid)

    def _stands(self, arrival: _Arrival, thread: _Thread, traced: ptrace.Thread) -> None:
        """What is to be done with a thread that has just stopped. Raises Gone, Refused, SessionError."""
        event = thread.event
        registers = traced.registers()
        with target.refusals(arrival.pid), target.Memory(arrival.pid) as memory:
            inside = (
                memory.some(event.sp, 8) == event.return_address.to_bytes(8, "little")
                and registers.rsp <= event.sp
            )
            if not inside and arrival.base:  # the others stand on; the tool hears of it when it is done
                self._overtaken.add(arrival.pid)
                del arrival.threads[event.tid]
                self._probes.forget_thread(event.tid)
                traced.release()
            elif not inside:
                self._release(arrival.pid)
            elif not arrival.base:
                at_entry = event.entry <= registers.rip < event.entry + ENTRY
                mapped = target.mappings(arrival.pid, _C_LIBRARY if at_entry else None)
                code = Code(arrival.pid, memory, mapped)
                functions = code.functions(arrival.pid)
                traced.pause = self._pause
                arrival.base = borrow.park(traced, memory, code, functions, at_entry)
                if arrival.base:
                    del arrival.threads[event.tid]
                    self._probes.forget_thread(event.tid)
                    self._tell(
                        arrival.pid, held=arrival.pid, tid=event.tid, comm=arrival.comm, late=arrival.late,
                        since=arrival.since, base=arrival.base, functions=functions,
                    )  # fmt: skip
                else:
                    traced.release()
                    thread.traced, thread.again = None, time.monotonic() + AGAIN

    def _release(self, pid: int, gone: bool = False) -> None:
        """All its threads go on. `gone`: its memory is no more."""
        arrival = self._arrivals.pop(pid, None)
        if arrival is None:
            return
        for tid, thread in arrival.threads.items():
            if thread.traced is not None and not self._left(thread.traced):
                self._leaving.append(thread.traced)
            self._probes.forget_thread(tid)
        if arrival.base and not gone:
            with contextlib.suppress(OSError), target.Memory(pid) as memory:
                memory.write(arrival.base + borrow.DATA + borrow.GO, b"\1")
        late = {"late": pid, "comm": arrival.comm}
        if not arrival.base:
            self._tell(pid, **late)
        elif "held" in self._next.get(pid, [_ANOTHER])[-1]:  # the tool does not know of it yet
            self._next[pid][-1] = late

    @staticmethod
    def _left(thread: ptrace.Thread) -> bool:
        """Whether it has been let go, or is seen to have ended, which nobody else sees before."""
        try:
            if thread.status is not None:
                thread.check()
            return thread.poll() and thread.release()
        except Gone:
            return True


def _runs(pid: int) -> bool:
    """Whether its end is still to come."""
    with (
        contextlib.suppress(OSError, IndexError, ValueError),
        open(f"/proc/{pid}/stat", errors="replace") as file,
    ):
        return not int(file.read().rpartition(")")[2].split()[6]) & _EXITING
    return False


def _before_all() -> int:
    """The processor on which this thread now runs, and before ordinary ones; -1: it may not, and runs anywhere."""
    cpu = max(os.sched_getaffinity(0))
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        os.sched_setaffinity(0, {cpu})
    except OSError:
        return -1
    return cpu


def main(file: int, tool: int) -> None:
    """`file`: the connection. `tool`: its process, which is not held."""
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT:
        signal.signal(number, signal.SIG_IGN)  # it ends with the tool
    with contextlib.suppress(OSError, ValueError):  # kernels before 5.11 count maps as locked memory
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    connection = socket.socket(fileno=file)
    try:
        probes = CuInitProbes(tool, _before_all())
    except OSError as error:
        text = f"the kernel lets nobody watch here ({error.strerror}); use sudo, on the host, or name processes with -p"
        connection.send(json.dumps({"failed": text}).encode())
        return
    connection.send(json.dumps({"ready": True}).encode())
    _Holding(connection, probes).run()
