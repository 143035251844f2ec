"""The server: one thread accepts the connections of all agents and handles their messages, which are untrusted.

`Session` creates one `Server`. `Joining` passes it the connections of running processes to which it attached.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import selectors
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gpubpf.agent import protocol
from gpubpf.agent.definitions import (
    ALREADY_CHANGED,
    LACKS_CALL,
    LACKS_COMPILERS,
    LACKS_CUPTI,
    LACKS_HOLDING,
    LACKS_LOG,
    LACKS_OBSOLETE,
    LACKS_SANITIZER,
    Message,
    Vendor,
)
from gpubpf.errors import TOO_MANY_FILES, SessionError, in_words, out_of_files
from gpubpf.process import address_space, limits, scans, target_socket, traceable
from gpubpf.process.target_socket import TargetSocket
from gpubpf.records import reasons
from gpubpf.show import table
from gpubpf.traced.connections import Connections
from gpubpf.traced.shares import Share
from gpubpf.traced.traced_process import TracedProcess

if TYPE_CHECKING:
    from gpubpf.traced.measurement import Measurement
    from gpubpf.traced.workers import BackgroundWork

WORKING_INTERVAL = 1.0  # seconds; an agent that waits to begin gives up after five without a message
LOG_INTERVAL = 0.01  # seconds between two readings of the logs


class Server:
    """Serves the agents of all processes until `close`.

    `_serve` runs in its own thread, the only one that reads from the connections. It holds `Measurement.lock` while it handles a
    message. A second thread empties operation logs, if there are any, into memory. `adopt`, `remove` and `wake` may be called from any
    thread.

    on_hooked: called when the hooks are live in a process.
    on_disconnected: called when an agent has disconnected, usually because its process ended.
    on_ready: called when copies of kernels loaded before the agent have become ready.
    All are called from the server's thread, `on_hooked` and `on_ready` with the lock held.
    """

    def __init__(
        self,
        measurement: Measurement,
        background: BackgroundWork,
        on_hooked: Callable[[TracedProcess], None],
        on_disconnected: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._measurement = measurement
        self._background = background
        self._on_hooked = on_hooked
        self._on_disconnected = on_disconnected
        self._on_ready = on_ready
        self._closing = False
        self._numbers = itertools.count(1)
        self._refused: set[int] = set()  # processes of other users
        self._connections = Connections()
        self._foreign_files: Counter[int] = Counter()  # number of files that are not in memory, by user
        self._unfinished = Share("incomplete messages", limits.UNFINISHED, limits.UNFINISHED_OF_USER)
        self._texts = Share("names and stacks", limits.TEXTS, limits.TEXTS_OF_USER)
        self._newly_admitted: queue.SimpleQueue[TracedProcess] = queue.SimpleQueue()
        self._settling: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()  # waiting `settle` calls
        self.socket_name = f"@gpubpf-{os.urandom(12).hex()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.socket_name[1:])
        self._listener.listen(4096)
        self._listener.setblocking(False)
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)
        self._thread = threading.Thread(target=self._serve, name="gpubpf-server", daemon=True)
        self._log_thread = threading.Thread(target=self._buffer_logs, name="gpubpf-logs", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if self._measurement.follow.log_records:
            self._log_thread.start()

    def close(self) -> None:
        """Stop the threads and close all connections. Also works for a server that was never started."""
        self._closing = True
        if self._thread.ident is None:
            self._listener.close()
        else:
            self.wake()
            self._thread.join(5)
            if self._log_thread.ident is not None:
                self._log_thread.join(5)
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def wake(self) -> None:
        """Make the server's thread check for new processes and for `close`."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"w")

    def settle(self, seconds: float) -> bool:
        """Wait until the server has admitted the processes that have connected. Return False if that takes longer than `seconds`."""
        settled = threading.Event()
        self._settling.put(settled)
        self.wake()
        return settled.wait(seconds)

    def _serve(self) -> None:
        last_working = 0.0
        served: set[TracedProcess] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while not self._closing:
                waiting = [p for p in served if p.pending_images or p.waits_for_welcome]
                if waiting and time.monotonic() >= last_working + WORKING_INTERVAL:
                    last_working = time.monotonic()
                    for process in waiting:
                        process.send_working()
                for key, _ in selector.select(WORKING_INTERVAL if waiting else None):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_reader, 4096)
                        with contextlib.suppress(queue.Empty):
                            while settled := self._settling.get_nowait():
                                # Any process may connect, any number of times.
                                until = time.monotonic() + limits.SETTLE_WAIT
                                while self._accept() and time.monotonic() < until:
                                    pass
                                settled.set()
                    elif key.data.disconnected:
                        pass  # its socket and pidfd were both readable, and the other was handled first
                    elif key.fileobj == key.data.pidfd:
                        selector.unregister(key.fileobj)
                        # Children of the process may still have the socket open. Messages that it already sent are still read.
                        key.data.socket.shutdown(socket.SHUT_RD)
                    elif not self._receive(key.data):
                        selector.unregister(key.data.socket)
                        with contextlib.suppress(KeyError, ValueError):
                            selector.unregister(key.data.pidfd)
                        served.remove(key.data)
                        self._end_process(key.data)
                for process in self._take_new():
                    served.add(process)
                    selector.register(process.socket, selectors.EVENT_READ, process)
                    if process.pidfd is not None:
                        selector.register(process.pidfd, selectors.EVENT_READ, process)
            self._listener.close()
            for process in (*served, *self._take_new()):
                process.close()

    def _take_new(self) -> Iterator[TracedProcess]:
        """Yield the processes that were admitted since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._newly_admitted.get_nowait()

    def _end_process(self, process: TracedProcess) -> None:
        """Close the files of a process whose agent has disconnected, and notify the other threads."""
        if traceable.started(process.pid) == process.started:
            process.executed |= address_space.executed_another_program(process.pid)
        if process.control is not None and protocol.was_cut(process.control):
            self._measurement.note(
                f"{process.label} closed all its file descriptors, including the agent's; its later launches may not be counted"
            )
        elif process.executed and process.hooked and self._measurement.targets.pids:
            self._measurement.note(
                f"{process.label} executed another program; that program's launches are not traced"
            )
        self._note_silent_cupti(process)
        self._discard(process, process.frames.take_files())
        with self._measurement.lock:
            self._connections.remove(process.socket.fileno())
            self._unfinished.take(process.user, -process.unfinished)
            process.close()
            self._measurement.lock.notify_all()
        self._background.end(process)
        self._on_disconnected()

    def _note_silent_cupti(self, process: TracedProcess) -> None:
        """Give a notice if the user requested CUPTI and it reported nothing."""
        follow = self._measurement.follow
        if process.control is None or not follow.cupti or follow.cupti_automatic:
            return
        given, reported = protocol.cupti_operations(process.control)
        if given and not reported:
            self._measurement.note_once(
                f"CUPTI reported none of {table.count(given, 'operation')}; their times are from timing events"
            )

    def _buffer_logs(self) -> None:
        while not self._closing:
            time.sleep(LOG_INTERVAL)
            self._measurement.privileges.apply()
            active = self._measurement.active()
            buffered: Counter[int] = Counter()  # by user
            for process in active:
                buffered[process.user] += process.buffered
            for process in active:
                if not limits.exceeded(
                    buffered, process.user, limits.BUFFERED_RECORDS, limits.BUFFERED_RECORDS_OF_USER
                ):
                    before = process.buffered
                    process.buffer_log()
                    buffered[process.user] += max(process.buffered - before, 0)

    def _accept(self) -> bool:
        """Admit the next process that has connected. Return False if none has, or if no more files can be opened."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if out_of_files(error):
                # A file may be closed soon. An agent waits a few seconds, then its process continues untraced.
                time.sleep(0.1)
            return False
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", credentials)
        expected = (self._measurement.user.uid if self._measurement.user else os.geteuid(), 0)
        # A process that the command starts may change its user.
        if pid > 0 and (uid in expected or traceable.descends(pid, os.getpid())):
            user = scans.user_of(pid)
            self._admit(TargetSocket(connection), pid, user if user >= 0 else scans.responsible(uid))
            return True
        connection.close()
        if pid > 0 and pid not in self._refused and len(self._refused) < limits.REFUSED:
            self._refused.add(pid)
            self._measurement.record_missed(reasons.OTHER_USER, traceable.started(pid))
        return True

    def adopt(self, connection: TargetSocket, pid: int, pidfd: int) -> TracedProcess | None:
        """Serve a running process to which the session attached. Return None if the measurement has ended.

        Takes ownership of `connection` and `pidfd`. From any thread."""
        process = self._admit(connection, pid, max(scans.user_of(pid), 0), pidfd)
        if process is None:
            os.close(pidfd)
            return None
        self.wake()
        return process

    def wait_for_reason(self, process: TracedProcess) -> None:
        """Wait, at most a second, until the agent has reported why attaching failed, or has disconnected. From any thread."""
        with self._measurement.lock:
            self._measurement.lock.wait_for(lambda: process.hook_failure or process.disconnected, 1)

    def wait_for_hooks(self, process: TracedProcess, seconds: float) -> bool:
        """Wait until the hooks of a process are known to be live, or the process has disconnected. May be called from any thread.

        Return False if the tool dropped the process."""
        with self._measurement.lock:
            self._measurement.lock.wait_for(lambda: process.hooked or process.disconnected, seconds)
        return not process.dropped

    def wait_for_copies(self, process: TracedProcess, seconds: float) -> None:
        """Wait until the copies of a process's already loaded kernels are ready, or it has disconnected. From any thread."""
        with self._measurement.lock:
            self._measurement.lock.wait_for(lambda: not process.preparing or process.disconnected, seconds)

    def remove(self, process: TracedProcess) -> None:
        """Forget an adopted process after attaching to it has failed. From any thread."""
        self._measurement.remove(process)
        process.socket.shutdown()  # `_serve` notices that and closes its files

    def forget(self, process: TracedProcess) -> None:
        """Forget a process that has ended and was read. What it took from the limits on entries, names and modules is free again."""
        self._measurement.remove(process)
        with self._measurement.lock:
            self._connections.forget(process.user)
            self._texts.take(process.user, -process.text)
            self._measurement.modules.take(process.user, -process.module_bytes)

    def _admit(
        self, connection: TargetSocket, pid: int, uid: int, pidfd: int | None = None
    ) -> TracedProcess | None:
        """Serve a new connection. `uid`: see `scans.user_of`.

        Return None, and close the connection, if the measurement has ended or a limit is exceeded."""
        started = traceable.started(pid)
        with self._measurement.lock:
            excess = self._connections.add(connection.fileno(), pid, started, uid)
            excess = excess or limits.exceeded(
                self._foreign_files, uid, limits.FOREIGN_FILES, limits.FOREIGN_FILES_OF_USER, 1
            )
            reported = bool(excess) and self._connections.report(pid, started)
            if excess or self._measurement.stopped:  # the process continues untraced
                self._connections.remove(connection.fileno())
                connection.close()
                process = None
            else:
                process = TracedProcess(connection, pid, next(self._numbers), uid)
                process.started, process.attached, process.pidfd = started, pidfd is not None, pidfd
                # This is the name until the agent reports it. A process without an agent may end before it is named.
                process.comm = traceable.comm(pid)
                self._measurement.add(process)
        if reported:
            comm = traceable.comm(pid)
            self._measurement.record_missed(reasons.UNHOOKED, started)
            self._measurement.note(
                f"pid {pid} ({comm}) is not fully traced: {excess} already has too many connections or files"
            )
        if process is not None:
            self._newly_admitted.put(process)
        return process

    def _receive(self, process: TracedProcess) -> bool:
        """Handle the messages that have arrived. Return False if the agent disconnected or sent a malformed message."""
        self._measurement.privileges.apply()
        try:
            received = process.socket.receive(1 << 20)
        except OSError:
            return False
        if received is None:
            return True
        try:
            if received.truncated:
                self._measurement.drop(process, TOO_MANY_FILES, lacking_files=True)
                self._discard(process, received.files)
                return False
            if not received.data:
                return False
            frames = process.frames.feed(received.data, received.files)
            done, told = 0, len(process.faults)
            try:
                for kind, payload, file in frames:
                    with self._measurement.lock:
                        self._handle(process, kind, payload, file)
                        self._measurement.lock.notify_all()
                    done += 1
            finally:
                self._discard(process, [file for _, _, file in frames[done:] if file is not None])
            self._count_unfinished(process)
            for fault in process.faults[told:]:
                self._measurement.note_once(reasons.kernel_failed(process.label, fault))
        except OSError as error:
            self._measurement.drop(process, in_words(error), out_of_files(error))
            return False
        except SessionError as error:
            self._measurement.drop(process, str(error))
            return False
        return True

    def _handle(self, process: TracedProcess, kind: int, payload: bytes, file: int | None) -> None:
        """Handle one message. The caller holds the lock. Takes ownership of `file`, unless it raises Malformed."""
        if file is not None and not protocol.in_memory(file):
            raise protocol.Malformed("a file that is not in memory")
        if kind in _WITH_FILE and file is not None:
            _WITH_FILE[kind](self, process, payload, file)
        elif kind in _WITHOUT_FILE:
            _WITHOUT_FILE[kind](self, process, payload)
        elif kind == Message.STUBS:
            self._stubs(process, file)
        elif kind == Message.RING:
            self._ring(process, payload, file)
        else:
            raise protocol.Malformed("an unexpected message")

    # Each method below handles one message, as the tables at the end of this file say.

    def _hello(self, process: TracedProcess, payload: bytes, file: int) -> None:
        _expect(process.control is None)
        greeting = protocol.hello(payload)
        process.driver_version, process.comm, process.vendor = greeting.driver, greeting.name, greeting.vendor
        process.control = file
        self._connections.greeted(process.socket.fileno())
        if (before := self._measurement.introduce(process)) is not None:
            before.executed = process.vendor is not Vendor.AMD or not process.driver_version
            what = "executed another program" if before.executed else "initialized ROCr again"
            process.again = f"after it {what}"
            before.socket.shutdown(socket.SHUT_RD)  # messages already sent are still read

    def _image(self, process: TracedProcess, payload: bytes, file: int) -> None:
        image = protocol.image(payload, process.vendor)
        self._count_file(process)
        _add_pending(process, "images")
        if process.attached and not process.reported_hooks:  # loaded before the agent
            process.preparing[image.request] = frozenset({""})
        process.images += 1
        process.image_bytes += image.size
        self._background.make_sidecar(process, image, file)

    def _found(self, process: TracedProcess, payload: bytes) -> None:
        self._count_text(process, len(payload))
        found = protocol.found(payload)
        _add_pending(process, "modules")
        process.preparing[found.request] = frozenset(kernel.name for kernel in found.kernels)
        self._background.make_found(process, found)

    def _wanted_kernel(self, process: TracedProcess, payload: bytes) -> None:
        wanted = protocol.wanted_kernel(payload)
        _add_pending(process, "kernels")
        self._background.make_wanted(process, wanted)

    def _patch_table(self, process: TracedProcess, payload: bytes) -> None:
        table = protocol.patch_table(payload)
        _add_pending(process, "tables")
        self._background.make_patches(process, table)

    def _ready(self, process: TracedProcess, payload: bytes) -> None:
        if process.preparing.pop(protocol.ready(payload), None):
            self._on_ready()

    def _name(self, process: TracedProcess, payload: bytes) -> None:
        self._count_text(process, len(payload))
        slot, name = protocol.slot_and_text(payload)
        process.names[slot] = sys.intern(name)  # other processes have the same kernel names

    def _refusal(self, process: TracedProcess, payload: bytes) -> None:
        self._count_text(process, len(payload))
        slot, reason = protocol.slot_and_text(payload)
        process.refused[slot] = reason

    def _no_room(self, process: TracedProcess, payload: bytes) -> None:
        lacking = protocol.no_room(payload)
        process.no_room[lacking.slot] = lacking

    def _kernel_failed(self, process: TracedProcess, payload: bytes) -> None:
        self._count_text(process, 4096 + len(payload))
        process.faults.append(protocol.kernel_failed(payload))

    def _snapshot(self, process: TracedProcess, payload: bytes, file: int) -> None:
        self._count_file(process)
        process.add_snapshot(protocol.snapshot(payload), file, bool(self._measurement.follow.pump))

    def _stubs(self, process: TracedProcess, file: int | None) -> None:
        _expect(process.control is not None and not process.sent_stubs)
        process.sent_stubs = True
        self._background.welcome(process, file)

    def _context(self, process: TracedProcess, payload: bytes) -> None:
        number, gpu = protocol.context(payload)
        self._count_text(process, 4096)
        process.contexts[number] = gpu

    def _stack(self, process: TracedProcess, payload: bytes) -> None:
        self._count_text(process, len(payload))
        process.add_stack(*protocol.stack(payload))

    def _ranges(self, process: TracedProcess, payload: bytes) -> None:
        self._count_text(process, len(payload))
        number, ranges = protocol.ranges(payload)
        process.ranges[number] = ranges

    def _log(self, process: TracedProcess, payload: bytes, file: int) -> None:
        records = protocol.log(payload)
        _expect(records == self._measurement.follow.log_records)
        process.add_log(file, records)

    def _patches(self, process: TracedProcess, payload: bytes, file: int) -> None:
        _expect(process.attached and not process.sent_patches)
        process.sent_patches = True
        self._background.patch(process, file)

    def _no_file(self, process: TracedProcess, payload: bytes) -> None:
        process.without_files = True

    def _drained(self, process: TracedProcess, payload: bytes) -> None:
        process.last_drain, _ = protocol.drained(payload)
        process.drained_ns = time.monotonic_ns()

    def _count_text(self, process: TracedProcess, size: int) -> None:
        """Count bytes of text that the tool keeps. Raises SessionError if a process, its user, or all together exceed the limit."""
        try:
            process.count_text(size)
        finally:  # so that `forget` takes back what was taken
            self._texts.take(process.user, size)

    def _discard(self, process: TracedProcess, files: Sequence[int]) -> None:
        """Close files without waiting. Files that may never close count for their user."""
        for file in files:
            self._foreign_files[process.user] += not protocol.in_memory(file)
            target_socket.discard(file)

    def _count_unfinished(self, process: TracedProcess) -> None:
        """Count bytes of incomplete messages. Raises SessionError if the process's user, or all together, exceed the limit."""
        before, process.unfinished = process.unfinished, process.frames.unfinished
        self._unfinished.take(process.user, process.unfinished - before)

    def _count_file(self, process: TracedProcess) -> None:
        """Raise SessionError if the process may not hand over another file: other users' processes need some of the tool's files."""
        if process.files >= limits.FILES:
            files: Counter[int] = Counter()  # by user
            for other in self._measurement.processes:
                files[other.user] += other.files
            if whose := limits.exceeded(files, process.user, *limits.files(), 1):
                raise SessionError(f"processes of {whose} have handed over too many files")

    def _ring(self, process: TracedProcess, payload: bytes, file: int | None) -> None:
        """The agent has created a ring. Takes ownership of `file`, unless it raises Malformed."""
        place = protocol.ring(payload)
        if (
            place.map >= len(self._measurement.definitions)
            or self._measurement.agent_config.maps[place.map].place != place.place
        ):
            raise protocol.Malformed("a ring that was not requested")
        definition = self._measurement.definitions_of(process.vendor)[place.map]
        granted, needed = (
            self._measurement.ring_size(definition),
            place.capacity * place.shards * place.stride,
        )
        process.add_ring(place, definition.value_dtype, granted, file)
        if needed > granted == self._measurement.follow.ring_size:
            shift, unit = next((at for at in ((20, "M"), (10, "K")) if granted % (1 << at[0]) == 0), (0, ""))
            requested = f"{granted >> shift}{unit}"
            self._measurement.note_once(
                f"--ring-size {requested} is too small: using {-(-needed >> 20)}M"
                f" ({place.shards} multiprocessors x {place.capacity:,} records)"
            )

    def _hooked(self, process: TracedProcess, payload: bytes) -> None:
        """The agent has installed its hooks, or reports why it could not."""
        _expect(not process.reported_hooks)
        process.reported_hooks = True
        failed, left_out, numbers = protocol.hooked(payload)
        capabilities = numbers if process.vendor is Vendor.NVIDIA else ()
        if process.vendor is Vendor.AMD:
            process.waves |= dict(enumerate(numbers))
        if unseen := left_out.get(LACKS_OBSOLETE):
            self._measurement.note_once(
                f"obsolete functions of this driver cannot be hooked; launches through them are not counted: {'; '.join(unseen)}"
            )
        held = "held back while the agent loads or frees"  # docs/attach.md, "A driver that waits"
        if self._measurement.agent_config.log_records:
            held += ", and may not be logged"
        for lack, consequence in ((LACKS_LOG, "logged"), (LACKS_CALL, "timed"), (LACKS_HOLDING, held)):
            if lines := left_out.get(lack):
                others = f" ({table.count(len(lines) - 1, 'other')})" if len(lines) > 1 else ""
                self._measurement.note_once(
                    f"calls of {lines[0].partition(':')[0]}{others} are not {consequence}, because this driver's"
                    f" functions cannot be hooked: {lines[0]}"
                )
        if unseen := left_out.get(LACKS_COMPILERS):
            self._measurement.note_once(
                "kernels that NVRTC or nvJitLink compiles to machine code stay without PTX, because these functions"
                f" cannot be hooked: {'; '.join(unseen)}"
            )
        for reason in left_out.get(LACKS_CUPTI, ()):
            self._measurement.note_once(
                f"CUPTI provides no timestamps: {reason}; using timing events instead"
            )
        for reason in left_out.get(LACKS_SANITIZER, ()):
            self._measurement.note_once(f"kernels without PTX are not measured: {reason}")
        if failed and process.attached:
            process.hook_failure = process.hook_failure or _hook_failure(failed)
        elif failed:
            why = _of_all(failed) or f"cannot hook {'; '.join(failed[:3])}"
            self._measurement.note(f"{process.label} is not traced: {why}")
            self._measurement.record_missed(reasons.UNHOOKED, process.started)
        else:
            process.hooked = True
            if process.attached and capabilities:
                process.preparing[0] = frozenset({""})
                self._background.make_ahead(process, capabilities)
            self._on_hooked(process)


def _of_all(failed: Sequence[str]) -> str:
    """Return the reason why functions cannot be hooked if all have the same reason; "" otherwise."""
    return next((line.removeprefix("all: ") for line in failed if line.startswith("all: ")), "")


def _hook_failure(failed: Sequence[str]) -> str:
    """Return why a running process cannot be hooked, for the user. `failed`: the agent's lines, "function: reason"."""
    if of_all := _of_all(failed):
        return f"cannot be hooked: {of_all}"
    probed = [line.partition(":")[0] for line in failed if line.endswith(f": {ALREADY_CHANGED}")]
    if len(probed) < len(failed):
        return f"cannot be hooked at {'; '.join(failed[:3])}; start it with the tool instead"
    return f"has another tool's probes at {', '.join(probed[:3])}; stop that tool first (cudasnoop, bpftrace, perf, gdb?)"


def _expect(expected: bool) -> None:
    if not expected:
        raise protocol.Malformed("an unexpected message")


def _add_pending(process: TracedProcess, what: str) -> None:
    """Count a question that the tool has not answered yet. Raises Malformed if there are too many."""
    if process.pending_images >= limits.PENDING:
        raise protocol.Malformed(f"too many {what} at once")
    process.pending_images += 1


_WITH_FILE: Mapping[int, Callable[[Server, TracedProcess, bytes, int], None]] = {
    Message.HELLO: Server._hello,
    Message.IMAGE: Server._image,
    Message.SNAPSHOT: Server._snapshot,
    Message.LOG: Server._log,
    Message.PATCHES: Server._patches,
}
_WITHOUT_FILE: Mapping[int, Callable[[Server, TracedProcess, bytes], None]] = {
    Message.NAME: Server._name,
    Message.REFUSED: Server._refusal,
    Message.DRAINED: Server._drained,
    Message.HOOKED: Server._hooked,
    Message.STACK: Server._stack,
    Message.RANGES: Server._ranges,
    Message.CONTEXT: Server._context,
    Message.FOUND: Server._found,
    Message.READY: Server._ready,
    Message.NO_ROOM: Server._no_room,
    Message.KERNEL_FAILED: Server._kernel_failed,
    Message.NO_FILE: Server._no_file,
    Message.KERNEL: Server._wanted_kernel,
    Message.PATCH_TABLE: Server._patch_table,
}
