"""The thread that speaks with the agents of all processes: lets them in, takes what they say. They are untrusted."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import queue
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from gpubpf.agent import protocol
from gpubpf.agent.definitions import Message
from gpubpf.process import target
from gpubpf.session.traced_process import KEPT_RECORDS, PENDING_LIMIT, Process

if TYPE_CHECKING:
    from gpubpf.session.measurement import Measurement
    from gpubpf.session.workers import Workshop

SEND_WAIT = 5.0  # seconds for an agent to take what it is sent
BEAT = 1.0  # seconds; an agent that waits and hears nothing for ten goes on without its answer
KEEP = 0.01  # seconds between two looks into the logs
REFUSED_LIMIT = 10  # notices of that kind
_CHANGED = (
    ": another tool has changed its first instructions"  # an agent's words for a function that it cannot hook
)


class Server:
    """Serves until `close`. `probed` is called when probes are live in a process: with its pid, comm and the time (ns, CLOCK_MONOTONIC
    or virtual); `gone` when one has ended, or goes on without its agent."""

    def __init__(
        self,
        measured: Measurement,
        workshop: Workshop,
        probed: Callable[[int, str, int], None],
        gone: Callable[[], None],
    ) -> None:
        self._measured = measured
        self._workshop = workshop
        self._probed = probed
        self._gone = gone
        self._closing = False
        self._numbers = itertools.count(1)
        self._new: queue.SimpleQueue[Process] = queue.SimpleQueue()
        self._refused = 0  # connections that sent what no agent sends
        self.socket_name = f"@gpubpf-{secrets.token_hex(12)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.socket_name[1:])
        self._listener.listen(4096)
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)
        self._thread = threading.Thread(target=self._serve, name="gpubpf-server", daemon=True)
        self._keeper = threading.Thread(target=self._keep_logs, name="gpubpf-logs", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if self._measured.follow.log_records:
            self._keeper.start()

    def close(self) -> None:
        """Also of one that was never started."""
        self._closing = True
        if self._thread.ident is None:
            self._listener.close()
        else:
            self.wake()
            self._thread.join(5)
            if self._keeper.ident is not None:
                self._keeper.join(5)
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"w")

    def _serve(self) -> None:
        beaten = 0.0
        served: set[Process] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while not self._closing:
                waiting = [p for p in served if p.pending]
                if waiting and time.monotonic() >= beaten + BEAT:
                    beaten = time.monotonic()
                    for process in waiting:
                        process.beat()
                for key, _ in selector.select(BEAT if waiting else None):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_reader, 4096)
                    elif key.data.gone:
                        pass  # both of its files told so
                    elif key.fileobj == key.data.pidfd:
                        selector.unregister(key.fileobj)
                        with contextlib.suppress(
                            OSError
                        ):  # children may have its socket still; what it has sent is read
                            key.data.socket.shutdown(socket.SHUT_RD)
                    elif not self._receive(key.data):
                        selector.unregister(key.data.socket)
                        with contextlib.suppress(KeyError, ValueError):
                            selector.unregister(key.data.pidfd)
                        served.remove(key.data)
                        self._end(key.data)
                for process in self._admitted():
                    served.add(process)
                    selector.register(process.socket, selectors.EVENT_READ, process)
                    if process.pidfd is not None:
                        selector.register(process.pidfd, selectors.EVENT_READ, process)
            self._listener.close()
            for process in (*served, *self._admitted()):
                process.close()

    def _admitted(self) -> Iterator[Process]:
        """Those that are not served yet."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._new.get_nowait()

    def _end(self, process: Process) -> None:
        """Nothing more comes from it."""
        if process.control is not None and protocol.was_cut(process.control):
            self._measured.note(
                f"{process.who} closed all its files, ours too; what it launched then was not seen"
            )
        elif self._measured.whom.pids and process.hooked and target.executed_another_program(process.pid):
            self._measured.note(
                f"{process.who} executes another program now; what that launches is not measured"
            )
        with self._measured.lock:
            process.close()
            self._measured.lock.notify_all()
        self._workshop.end(process)
        self._gone()

    def _keep_logs(self) -> None:
        while not self._closing:
            time.sleep(KEEP)
            self._measured.privileges.apply()
            everyone = self._measured.active()
            kept = sum(process.kept for process in everyone)
            for process in everyone:
                if kept < KEPT_RECORDS:
                    before = process.kept
                    process.keep_log()
                    kept += max(process.kept - before, 0)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.1)  # another may end; who is not let in waits some seconds, then goes on alone
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid not in (self._measured.user.uid if self._measured.user else os.geteuid(), 0) or pid <= 0:
            connection.close()
            return
        self._admit(connection, pid)

    def adopt(self, connection: socket.socket, pid: int, pidfd: int) -> Process | None:
        """Takes over the connection of a process that ran already, and its pidfd; None: the measurement is over. From any thread."""
        process = self._admit(connection, pid, pidfd)
        if process is None:
            os.close(pidfd)
            return None
        self.wake()
        return process

    def dismiss(self, process: Process) -> None:
        """One that was adopted and did not become live: it is none of the processes any more. From any thread."""
        self._measured.dismiss(process)
        with contextlib.suppress(OSError):
            process.socket.shutdown(socket.SHUT_RDWR)  # `_serve` sees that, and closes its files

    def _admit(self, connection: socket.socket, pid: int, pidfd: int | None = None) -> Process | None:
        connection.settimeout(SEND_WAIT)
        with self._measured.lock:
            if self._measured.stopped:  # nothing is measured any more: the process goes on without us
                connection.close()
                return None
            process = Process(connection, pid, next(self._numbers))
            process.attached, process.pidfd = pidfd is not None, pidfd
            self._measured.admit(process)
        self._new.put(process)
        return process

    def _receive(self, process: Process) -> bool:
        """Takes what there is; False when the process is gone, or sends what no agent sends."""
        self._measured.privileges.apply()
        try:
            data, files, _, _ = socket.recv_fds(process.socket, 1 << 20, 8)
            if not data:
                return False
            frames = process.frames.feed(data, files)
            done = 0
            try:
                for kind, payload, file in frames:
                    with self._measured.lock:
                        self._handle(process, kind, payload, file)
                        self._measured.lock.notify_all()
                    done += 1
            finally:
                for _, _, file in frames[done:]:
                    if file is not None:
                        os.close(file)
        except OSError:
            return False
        except protocol.Malformed as error:
            self._refused += 1
            if self._refused <= REFUSED_LIMIT:
                self._measured.note(f"pid {process.pid}: {error}")
            return False
        return True

    def _handle(self, process: Process, kind: int, payload: bytes, file: int | None) -> None:
        """What a process says. Takes `file` over, unless it raises."""
        if kind in (Message.NAME, Message.REFUSED, Message.STACK):
            process.said(len(payload))
        if kind == Message.HELLO and file is not None and process.control is None:
            process.comm = protocol.hello(payload)
            process.control = file
        elif kind == Message.IMAGE and file is not None:
            image = protocol.image(payload)
            if process.pending >= PENDING_LIMIT:
                raise protocol.Malformed("more images at once than a program has")
            process.pending += 1
            self._workshop.make_sidecar(process, image, file)
        elif kind == Message.FOUND:
            process.said(len(payload))
            found = protocol.found(payload)
            if process.pending >= PENDING_LIMIT:
                raise protocol.Malformed("more modules at once than a program has")
            process.pending += 1
            self._workshop.make_found(process, found)
        elif kind == Message.NAME:
            slot, name = protocol.slot_and_text(payload)
            process.names[slot] = sys.intern(name)  # others have the same
        elif kind == Message.REFUSED:
            slot, reason = protocol.slot_and_text(payload)
            process.refused[slot] = reason
        elif kind == Message.SNAPSHOT and file is not None:
            process.took(protocol.snapshot(payload), file, bool(self._measured.follow.pump))
        elif kind == Message.MARKER and process.control is not None and not process.marked:
            process.marked = True
            self._workshop.welcome(process, file)
        elif kind == Message.CONTEXT:
            number, gpu = protocol.context(payload)
            process.said(4096)
            process.contexts[number] = gpu
        elif kind == Message.STACK:
            number, frames = protocol.stack(payload)
            process.stacks[number] = frames
        elif (
            kind == Message.LOG
            and file is not None
            and protocol.log(payload) == self._measured.follow.log_records
        ):
            process.made_log(file, self._measured.follow.log_records)
        elif kind == Message.RING:
            self._ring(process, payload, file)
        elif kind == Message.PATCHES and file is not None and process.attached and not process.asked:
            process.asked = True
            self._workshop.patch(process, file)
        elif kind == Message.HOOKED and not process.hooked:
            self._hooked(process, payload)
        elif kind == Message.DRAINED:
            process.answered, _ = protocol.drained(payload)
        else:
            raise protocol.Malformed("a message out of place")

    def _ring(self, process: Process, payload: bytes, file: int | None) -> None:
        """It has made a ring. Takes `file` over, unless it raises."""
        place = protocol.ring(payload)
        if (
            place.map >= len(self._measured.definitions)
            or self._measured.wanted.maps[place.map].place != place.place
        ):
            raise protocol.Malformed("a ring that nobody asked for")
        definition = self._measured.definitions[place.map]
        granted, taken = (
            self._measured.ring_size(definition),
            place.capacity * place.shards * place.stride,
        )
        process.made_ring(place, definition.value_dtype, granted, file)
        if taken > granted and self._measured.follow.ring_size:
            asked = f"{granted >> 20}M" if granted >= 1 << 20 else f"{granted >> 10}K"
            self._measured.note_once(
                f"ring {definition.name} takes {-(-taken >> 20)}M, not {asked}: each of {place.shards}"
                f" multiprocessors needs room for {place.capacity:,} records"
            )

    def _hooked(self, process: Process, payload: bytes) -> None:
        """Its hooks are in, or it is known why they are not."""
        process.told = True
        failed, left_out = (text.splitlines() for text in protocol.hooked(payload))
        if unlogged := [line for line in left_out if line.startswith("cu")]:
            self._measured.note_once(
                f"{len(unlogged)} functions of this driver cannot be hooked, their calls are not seen: {unlogged[0]}"
            )
        for line in left_out:
            if line.startswith("CUPTI: "):
                self._measured.note_once(
                    f"CUPTI gives no times, {line.removeprefix('CUPTI: ')}; timing events do instead"
                )
        if failed and process.attached:
            process.trouble = process.trouble or _unhooked(failed)
        elif failed:
            self._measured.note(f"{process.who} is not traced: cannot hook {'; '.join(failed[:3])}")
        else:
            process.hooked = True
            when = process.virtual_times()[0] or time.monotonic_ns()
            self._probed(process.pid, process.comm, when)


def _unhooked(failed: Sequence[str]) -> str:
    """Why a process that runs cannot be measured, for who asked for it; of an agent's lines, each a function and a reason."""
    probed = [line.partition(":")[0] for line in failed if line.endswith(_CHANGED)]
    if len(probed) < len(failed):
        return f"cannot be hooked at {'; '.join(failed[:3])}; start it with the tool instead"
    return f"has another tool's probes at {', '.join(probed[:3])}; end it first (cudasnoop, bpftrace, perf, gdb?)"
