"""The hold helper: a separate process that holds processes in their first cuInit until the tool has attached (machine.py starts it).

It has a probe at `cuInit` in driver files, and at `hsa_queue_create` in AMD's ROCr files (cuinit.py). Statements about cuInit here
apply to both. When a process calls cuInit for the first time, the helper stops the thread with ptrace; no shell and no parent process
notices. The thread creates a worker thread for the tool. Then it waits, no longer traced, until it is released (borrow.py,
`make_worker_and_wait`). This wait has a time limit, and ends even if the tool is killed. If other threads of the process call cuInit
during the wait, the helper keeps them stopped until it ends.

The helper is a single thread with real-time priority, and does nothing else. A stopped process must not wait for the other work of the
tool, in which Python runs only one thread at a time. When the tool exits, the helper releases all processes and exits.

Messages are JSON objects, one per packet. To the helper:

    place       path, offset and a name: attach a probe there. Answer: 0, or the errno value
    remove      a name: remove the probes that were attached with it
    release     let the process continue
    done        let the process continue, and do not hold it again, unless `again` is set. Answer: whether it called cuInit while the
                tool attached to it as a running process
    ask         a running process, and when it was seen (ns). Answer: whether to attach to it
    lost        Answer: how many events were lost, and how often the kernel skipped the program at cuInit
    unheld      user IDs: from now on, do not hold the processes of these users

A message with an `id` gets a reply with the same `id`, and `answer`. Other messages from the helper:

    held        a process is held
    late        a process called cuInit, but could not be held
    forget      a process has executed another program, or has ended

A process can make the helper wait for ever, for its memory or for the lock that ptrace takes. So before the helper touches a process,
it writes the ID of the process into memory that it shares with the tool. The tool ends a helper that does not answer, and starts a new
helper, which does not hold the processes of that user.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import re
import resource
import select
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from gpubpf.attach import borrow
from gpubpf.attach.borrow import ProcessCode
from gpubpf.attach.cuinit import CALLED_CUINIT, CuInitProbes, Event
from gpubpf.errors import SessionError
from gpubpf.process import address_space, limits, ptrace, scans, traceable
from gpubpf.process.patience import wait_for_locks
from gpubpf.process.ptrace import ThreadEnded, TraceRefused
from gpubpf.record import MutableRecord, field

LIMIT = 5.0  # longest time in seconds that a process is held
BORROW = 0.2  # seconds to reach a position where a thread can be borrowed
MISSED = 0.002  # seconds until the helper checks for stops itself, in case no signal came
AGAIN = 0.001  # seconds until a thread is stopped again
# Seconds within which an interrupted thread stops, unless it sleeps in the kernel or has ended.
SOON = 1.0
# Bytes after the entry of cuInit that still count as the entry: its first instruction may have run.
ENTRY = 16
PACKET = 1 << 16
# Bytes of a process's list of mappings: about 20,000 mappings. A process with a longer list is not held.
MAPPINGS = 2 << 20
FORGOTTEN = 4096  # ended processes to remember

_ANOTHER: dict[str, Any] = {}  # in _HoldHelper._pending: the process has executed another program or ended
_C_LIBRARY = re.compile(
    r".*/(ld-musl.*|libc\.musl.*|libc(\.so\.6|-2\.\d+\.so)|lib(pthread|dl)(\.so\.\d|-2\.\d+\.so))"
)


class _Thread(MutableRecord):
    """A thread that is inside cuInit, as far as known. `traced` None: stop it again at time `again`."""

    event: Event
    traced: ptrace.TracedThread | None = None
    again: float = 0.0


class _Arrival(MutableRecord):
    """A process in its first cuInit.

    base: address of the worker's memory, once a thread has created the worker and `held` was sent to the tool; otherwise 0.
    late: one of its threads could not be held.
    worked: how long the helper had worked on other processes when this one arrived, in seconds.
    """

    pid: int
    user: int
    comm: str
    worked: float
    since: float = field(default_factory=time.monotonic)
    threads: dict[int, _Thread] = field(default_factory=dict)
    base: int = 0
    late: bool = False


class _HoldHelper:
    """Holds threads that call cuInit until the tool has attached to their process.

    touched: memory that the tool reads: the ID of the process that the helper works on, or 0."""

    def __init__(
        self, connection: socket.socket, probes: CuInitProbes, touched: ctypes.c_int32 | None = None
    ) -> None:
        self._connection, self._probes = connection, probes
        self._touched = ctypes.c_int32() if touched is None else touched
        self._unheld: frozenset[int] = frozenset()  # users
        self._arrivals: dict[int, _Arrival] = {}
        self._worked = 0.0  # seconds spent on threads that had stopped
        # Threads to detach from as soon as they stop, each with the time since when this is due. Nobody else can trace them before.
        self._leaving: list[tuple[ptrace.TracedThread, float]] = []
        # `late` messages to send once the helper has detached from all threads of the process.
        self._late: dict[int, dict[str, Any]] = {}
        # When the tool finished with a process that it knows, in ns; None: it has not finished yet.
        self._known: dict[int, int | None] = {}
        # What happened to a process ID before the tool finished with the process. `_ANOTHER`: the process executed another program, or
        # ended and its ID was reused. The message about the new program or process follows. It is sent once the tool has finished with
        # the previous one.
        self._pending: dict[int, list[dict[str, Any]]] = {}
        # When known processes executed another program or ended, in ns: only the latest FORGOTTEN, oldest first.
        self._forgotten: dict[int, int] = {}
        # Processes that called cuInit while the tool attached to them as running processes.
        self._overtaken: set[int] = set()
        self._unsent: deque[bytes] = deque()  # messages to the tool
        # SIGCHLD comes when a traced thread stops or ends. It writes to `_signalled`, so that the helper need not poll.
        self._signalled, end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)

    def run(self) -> None:
        while True:
            self._pause(self._poll_interval(), self._connection)
            while (message := self._received()) is not None:
                if not message:
                    # Agents that are installing their hooks must also notice that the tool has exited.
                    time.sleep(0.02)
                    for pid in list(self._arrivals):
                        self._release(pid)
                    return
                self._handle(message)
            self._send_all()
            self._detach_from_leaving()
            for arrival in list(self._arrivals.values()):
                if self._arrivals.get(arrival.pid) is arrival:
                    self._advance(arrival, time.monotonic())
                self._read_events()  # a thread that calls cuInit waits for this

    def _pause(self, seconds: float | None, *others: socket.socket) -> None:
        """Sleep until there is an event, or for the longer of `seconds` and MISSED. Stop threads that call cuInit meanwhile."""
        files: list[Any] = [self._probes.file, self._signalled, *others]
        ready, _, _ = select.select(files, [], [], None if seconds is None else max(seconds, MISSED))
        if self._signalled in ready:
            os.read(self._signalled, PACKET)
        self._read_events()

    def _poll_interval(self) -> float | None:
        """Return the seconds until the next check for conditions without events (stops and time limits); None: nothing to check."""
        if any(time.monotonic() < since + SOON for _, since in self._leaving) or any(
            thread.traced is None or thread.traced.status is None
            for arrival in self._arrivals.values()
            for thread in arrival.threads.values()
        ):
            return 50e-6
        return 0.05 if self._arrivals or self._leaving or self._unsent else None

    # --- messages from the tool ---

    def _received(self) -> dict[str, Any] | None:
        """Return the next message; None if no message has arrived; an empty message if the tool has exited."""
        try:
            data = self._connection.recv(PACKET, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return {}
        return dict(json.loads(data)) if data else {}

    def _send(self, **message: Any) -> None:
        self._unsent.append(json.dumps(message).encode())
        self._send_all()

    def _send_all(self) -> None:
        """Send the messages that fit into the socket. The helper does not wait: the tool may be stopped, and reads them later."""
        with contextlib.suppress(OSError):  # the tool has exited; `_received` detects that
            while self._unsent:
                self._connection.send(self._unsent[0], socket.MSG_DONTWAIT)
                self._unsent.popleft()

    def _handle(self, message: dict[str, Any]) -> None:
        answer: Any = None
        if "place" in message:
            answer = self._attach(*message["place"])
        elif "remove" in message:
            self._probes.remove(message["remove"])
        elif "ask" in message:
            pid, seen = message["ask"]
            answer = pid not in self._known and seen > self._forgotten.get(pid, 0)
            if answer:
                self._known[pid] = None
                self._probes.track_process(pid)
                if traceable.is_exiting(pid):  # it may have ended before the probes tracked it
                    self._ended(pid, time.monotonic_ns())
        elif "done" in message:
            answer = self._done(message["done"], bool(message.get("again")))
        elif "release" in message:
            self._release(message["release"])
        elif "unheld" in message:
            self._unheld = frozenset(message["unheld"])
        elif "lost" in message:
            answer = self._probes.lost, self._probes.skipped
        if "id" in message:
            self._send(id=message["id"], answer=answer)

    def _attach(self, path: str, offset: int, name: str) -> tuple[int, list[str]]:
        """Return an error number, or 0, and notices for the user."""
        notes: list[str] = []
        try:
            self._probes.attach(path, offset, name, notes.append)
        except OSError as error:
            return error.errno or errno.EIO, notes
        return 0, notes

    def _done(self, pid: int, again: bool) -> bool:
        """Record that the tool has finished with a process or, with `again`, will attach to it later.

        Return whether the process called cuInit while the tool attached to it as a running process."""
        overtaken = pid in self._overtaken
        self._overtaken.discard(pid)
        self._read_events()
        if pid not in self._pending:
            if again:
                self._known.pop(pid, None)
            else:
                self._probes.ignore_process(pid)
                self._known[pid] = time.monotonic_ns()
            self._release(pid)
            return overtaken
        after = self._pending.pop(pid)
        while after and after[0] is _ANOTHER:
            del after[0]
        if after:
            self._send(**after.pop(0))
        elif pid not in self._arrivals:
            del self._known[pid]
        if after:
            self._pending[pid] = after
        return overtaken

    def _report(self, pid: int, **message: Any) -> None:
        """Send a message about a process that called cuInit, once the tool has finished with the previous process with this ID."""
        if pid in self._pending:
            self._pending[pid].append(message)
        else:
            self._send(**message)

    # --- processes that call cuInit ---

    def _ended(self, pid: int, ts: int) -> None:
        """Record that a process executed another program, or ended, at `ts`."""
        self._release(pid, unmapped=True)
        self._probes.stop_ignoring(pid)  # the tool may have finished with the process at this moment
        if pid in self._known:
            if self._known[pid] is None:
                self._pending.setdefault(pid, []).append(_ANOTHER)
            else:
                del self._known[pid]
            self._forgotten.pop(pid, None)
            self._forgotten[pid] = ts
            if len(self._forgotten) > FORGOTTEN:
                del self._forgotten[next(iter(self._forgotten))]
        self._send(forget=pid)

    def _read_events(self) -> None:
        for event in self._probes.events():
            if event.kind != CALLED_CUINIT:
                self._ended(event.pid, event.ts)
            elif (arrival := self._arrivals.get(event.pid)) is not None or self._is_new(event):
                user = scans.user_of(event.pid) if arrival is None else -1
                if arrival is None and (user in self._unheld or self._crowded(user)):
                    self._probes.release_thread(event)
                    self._probes.forget_thread(event.tid)
                    self._report(event.pid, late=event.pid, comm=event.comm)
                    continue
                if arrival is None:
                    arrival = self._arrivals[event.pid] = _Arrival(event.pid, user, event.comm, self._worked)
                    self._probes.track_process(event.pid)
                self._stop(arrival, arrival.threads.setdefault(event.tid, _Thread(event)))
            else:
                self._probes.release_thread(event)
                self._probes.forget_thread(event.tid)

    def _crowded(self, user: int) -> bool:
        """Return whether the limit of held processes is reached, in all or for this user, whose next process is then not held."""
        if len(self._arrivals) < limits.HELD_OF_USER:
            return False
        held = Counter(arrival.user for arrival in self._arrivals.values())
        return bool(limits.exceeded(held, user, limits.HELD, limits.HELD_OF_USER, 1))

    def _is_new(self, event: Event) -> bool:
        if self._pending.get(event.pid, [{}])[-1] is _ANOTHER:
            return True
        done = self._known.get(event.pid, 0)
        if done is None:
            self._overtaken.add(event.pid)
            return False
        if event.ts < done:  # another of its threads called cuInit while the process was held
            return False
        self._known[event.pid] = None
        return True

    @contextlib.contextmanager
    def _touching(self, pid: int) -> Iterator[None]:
        """Show the tool which process the helper works on, in case that process makes the helper wait."""
        before, self._touched.value = self._touched.value, pid
        try:
            yield
        finally:
            self._touched.value = before

    def _stop(self, arrival: _Arrival, thread: _Thread) -> None:
        try:
            if thread.traced is None:  # otherwise it has not stopped yet, and has called cuInit again
                with self._touching(arrival.pid):
                    thread.traced = ptrace.TracedThread(arrival.pid, thread.event.tid)
                    thread.traced.interrupt()
        except (ThreadEnded, TraceRefused):  # the tool finds the reason when it attaches
            self._lose(arrival, thread)
        self._probes.release_thread(thread.event)

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
                        began = time.monotonic()
                        with self._touching(arrival.pid):
                            self._handle_stop(arrival, thread, thread.traced)
                        self._worked += time.monotonic() - began
                except ThreadEnded:
                    self._lose(arrival, thread)
            # While the helper works on one process, the others wait for it.
            limit = LIMIT if arrival.base else min(LIMIT, BORROW + self._worked - arrival.worked)
            over = now > arrival.since + limit or not (arrival.threads or arrival.base)
        except (SessionError, TraceRefused):  # the tool finds the reason when it attaches
            over = True
        if over and self._arrivals.get(arrival.pid) is arrival:  # reading events may have replaced it
            self._release(arrival.pid)

    def _lose(self, arrival: _Arrival, thread: _Thread) -> None:
        """Record that a thread cannot be held: it has ended, possibly long after cuInit, or another process traces it."""
        if arrival.threads.pop(thread.event.tid, None) is not None:
            self._leave(thread)
            arrival.late = True
            if arrival.base:
                self._overtaken.add(arrival.pid)

    def _handle_stop(self, arrival: _Arrival, thread: _Thread, traced: ptrace.TracedThread) -> None:
        """Handle a thread that has just stopped. Raises ThreadEnded, TraceRefused, SessionError."""
        event = thread.event
        registers = traced.registers()
        with traceable.refusals(arrival.pid), address_space.Memory(arrival.pid) as memory:
            inside = (
                memory.some(event.sp, 8) == event.return_address.to_bytes(8, "little")
                and registers.rsp <= event.sp
            )
            if not inside and arrival.base:
                # This thread has left cuInit. The other threads stay held. The answer to `done` reports this to the tool.
                self._overtaken.add(arrival.pid)
                del arrival.threads[event.tid]
                self._probes.forget_thread(event.tid)
                self._leave(thread)
            elif not inside:
                self._release(arrival.pid)
            elif not arrival.base:
                at_entry = event.entry <= registers.rip < event.entry + ENTRY
                with _ordinary_priority():
                    mapped = address_space.mappings(arrival.pid, _C_LIBRARY if at_entry else None, MAPPINGS)
                    code = ProcessCode(arrival.pid, memory, mapped)
                    functions = code.functions(arrival.pid)
                    if not at_entry:  # at the entry, the thread holds no lock
                        _ = code.unsafe
                traced.pause = self._pause
                arrival.base = borrow.make_worker_and_wait(traced, memory, code, functions, at_entry)
                if arrival.base:
                    del arrival.threads[event.tid]
                    self._leave(thread)
                    self._probes.forget_thread(event.tid)
                    self._report(
                        arrival.pid, held=arrival.pid, tid=event.tid, comm=arrival.comm, late=arrival.late,
                        since=arrival.since, base=arrival.base, functions=functions, entry=event.entry,
                    )  # fmt: skip
                elif traced.release():
                    thread.traced, thread.again = None, time.monotonic() + AGAIN

    def _release(self, pid: int, unmapped: bool = False) -> None:
        """Let all threads of a process continue. `unmapped`: the worker's memory no longer exists."""
        arrival = self._arrivals.pop(pid, None)
        if arrival is None:
            if unmapped and (late := self._late.pop(pid, None)):
                self._report(pid, **late)
            return
        for tid, thread in arrival.threads.items():
            self._leave(thread)
            self._probes.forget_thread(tid)
        if arrival.base and not unmapped:
            with self._touching(pid), contextlib.suppress(OSError), address_space.Memory(pid) as memory:
                memory.write(arrival.base + borrow.DATA + borrow.RELEASED, b"\1")
        late = {"late": pid, "comm": arrival.comm}
        if not arrival.base:
            if not unmapped and any(thread.pid == pid for thread, _ in self._leaving):
                self._late[pid] = late  # the tool cannot attach yet
            else:
                self._report(pid, **late)
        elif "held" in self._pending.get(pid, [_ANOTHER])[-1]:  # not sent to the tool yet
            self._pending[pid][-1] = late

    def _leave(self, thread: _Thread) -> None:
        """Detach from a thread, now or as soon as it stops.

        Until then, or until the thread is reaped, the helper must keep it. Otherwise the thread would stay stopped, or its parent
        would not be notified of its end."""
        if thread.traced is not None and not self._detached(thread.traced):
            self._leaving.append((thread.traced, time.monotonic()))

    def _detach_from_leaving(self) -> None:
        self._leaving = [(thread, since) for thread, since in self._leaving if not self._detached(thread)]
        for pid in self._late.keys() - {thread.pid for thread, _ in self._leaving}:
            self._report(pid, **self._late.pop(pid))

    @staticmethod
    def _detached(thread: ptrace.TracedThread) -> bool:
        """Detach from a thread if it is stopped. Return whether it is detached, or has ended."""
        try:
            if not thread.detached and thread.status is not None:
                thread.check()
            return thread.detached or (thread.poll() and thread.release())
        except ThreadEnded:
            return True


def _send_note(connection: socket.socket, text: str) -> None:
    """Send a notice for the user, from any thread. It is lost if the tool has exited, or does not read."""
    with contextlib.suppress(OSError):
        connection.send(json.dumps({"note": text}).encode(), socket.MSG_DONTWAIT)


@contextlib.contextmanager
def _ordinary_priority() -> Iterator[None]:
    """Drop real-time priority for the block, which reads data that a process may make large: others need this CPU meanwhile."""
    policy = os.sched_getscheduler(0)
    if not policy & os.SCHED_RR:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, os.sched_param(1))


def _set_realtime_priority() -> int:
    """Give this thread real-time priority on one CPU. Return that CPU; -1 if not allowed, so that the thread may run on any CPU.

    The hold helpers of several tools take turns on this CPU (SCHED_RR)."""
    cpu = max(os.sched_getaffinity(0))
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        os.sched_setaffinity(0, {cpu})
    except OSError:
        return -1
    return cpu


def main(file: int, tool: int, touched: int) -> None:
    """Run the hold helper. `file`: descriptor of the connection. `tool`: process ID of the tool, which is never held.

    touched: descriptor of a file with the memory in which the helper names the process that it works on."""
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT:
        signal.signal(number, signal.SIG_IGN)  # the helper exits when the tool does
    with contextlib.suppress(OSError, ValueError):  # kernels before 5.11 count maps as locked memory
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    connection = socket.socket(fileno=file)
    try:
        probes = CuInitProbes(tool, _set_realtime_priority(), lambda text: _send_note(connection, text))
    except OSError as error:
        instead = "free some memory" if error.errno == errno.ENOMEM else "use sudo on the host"
        text = f"cannot watch all processes ({error.strerror}); {instead}, or name processes with -p"
        connection.send(json.dumps({"failed": text}).encode())
        return
    connection.send(json.dumps({"ready": True}).encode())
    _HoldHelper(connection, probes, ctypes.c_int32.from_buffer(mmap.mmap(touched, mmap.PAGESIZE))).run()
    with _ordinary_priority():
        wait_for_locks()  # if a process held its lock, removing the probes would stop the whole machine
        probes.close()
