"""The thread that speaks with the agents of all processes: lets them in, takes what they say. They are untrusted."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpubpf.agent import protocol
from gpubpf.process import KEPT_RECORDS, PENDING_LIMIT, Process

if TYPE_CHECKING:
    from gpubpf.measurement import Measurement
    from gpubpf.workers import Workshop

SEND_WAIT = 5.0  # seconds for an agent to take what it is sent
BEAT = 1.0  # seconds; an agent that waits and hears nothing for ten goes on without its answer
KEEP = 0.01  # seconds between two looks into the logs
REFUSED_LIMIT = 10  # notices of that kind


class Server:
    """Serves until `close`. `probed` is called when probes are live in a process: with its pid, comm and the time (ns, CLOCK_MONOTONIC
    or virtual)."""

    def __init__(
        self, measured: Measurement, workshop: Workshop, probed: Callable[[int, str, int], None]
    ) -> None:
        self._measured = measured
        self._workshop = workshop
        self._probed = probed
        self._closing = False
        self._adopted: list[Process] = []
        self._refused = 0  # connections that sent what no agent sends
        self.socket_name = f"@gpubpf-{secrets.token_hex(12)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.socket_name[1:])
        self._listener.listen(128)
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
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            for process in self._adopted:
                selector.register(process.socket, selectors.EVENT_READ, process)
            while not self._closing:
                waiting = [p for p in self._measured.processes if p.pending and not p.gone]
                if waiting and time.monotonic() >= beaten + BEAT:
                    beaten = time.monotonic()
                    for process in waiting:
                        process.beat()
                for key, _ in selector.select(BEAT if waiting else None):
                    if key.fileobj is self._listener:
                        accepted = self._accept()
                        if accepted:
                            selector.register(accepted.socket, selectors.EVENT_READ, accepted)
                    elif key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_reader, 4096)
                    elif not self._receive(key.data):
                        selector.unregister(key.data.socket)
                        if key.data.control is not None and protocol.was_cut(key.data.control):
                            self._measured.note(
                                f"{key.data.who} closed all its files, ours too; what it launched then was not seen"
                            )
                        if key.data.host is not None:
                            self._workshop.end_host(key.data)
                        with self._measured.lock:
                            key.data.close()
                            self._measured.lock.notify_all()
            self._listener.close()
            for process in self._measured.processes:
                if not process.gone:
                    process.close()

    def _keep_logs(self) -> None:
        while not self._closing:
            time.sleep(KEEP)
            everyone = self._measured.everyone()
            kept = sum(process.kept for process in everyone)
            for process in everyone:
                if kept < KEPT_RECORDS:
                    before = process.kept
                    process.keep_log()
                    kept += max(process.kept - before, 0)

    def _accept(self) -> Process | None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.1)  # another may end; who is not let in waits some seconds, then goes on alone
            return None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid not in (self._measured.user.uid if self._measured.user else os.geteuid(), 0) or pid <= 0:
            connection.close()
            return None
        return self._admit(connection, pid)

    def adopt(self, connection: socket.socket, pid: int) -> None:
        """Takes over the connection of a process that ran already. Before `start`."""
        if (process := self._admit(connection, pid)) is not None:
            process.attached = True
            self._adopted.append(process)

    def _admit(self, connection: socket.socket, pid: int) -> Process | None:
        connection.settimeout(SEND_WAIT)
        with self._measured.lock:
            if self._measured.stopped:  # nothing is measured any more: the process goes on without us
                connection.close()
                return None
            process = Process(connection, pid, len(self._measured.processes) + 1)
            self._measured.processes.append(process)
        return process

    def _receive(self, process: Process) -> bool:
        """Takes what there is; False when the process is gone, or sends what no agent sends."""
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
        if kind in (protocol.NAME, protocol.REFUSED, protocol.STACK):
            process.said(len(payload))
        if kind == protocol.HELLO and file is not None and process.control is None:
            process.comm = protocol.hello(payload)
            process.control = file
        elif kind == protocol.IMAGE and file is not None:
            image = protocol.image(payload)
            if process.pending >= PENDING_LIMIT:
                raise protocol.Malformed("more images at once than a program has")
            process.pending += 1
            self._workshop.make_sidecar(process, image, file)
        elif kind == protocol.NAME:
            slot, name = protocol.slot_and_text(payload)
            process.names[slot] = name
        elif kind == protocol.REFUSED:
            slot, reason = protocol.slot_and_text(payload)
            process.refused[slot] = reason
        elif kind == protocol.SNAPSHOT and file is not None:
            process.took(protocol.snapshot(payload), file, bool(self._measured.follow.pump))
        elif kind == protocol.MARKER and process.control is not None and not process.marked:
            process.marked = True
            self._workshop.welcome(process, file)
        elif kind == protocol.CONTEXT:
            number, gpu = protocol.context(payload)
            process.said(4096)
            process.contexts[number] = gpu
        elif kind == protocol.STACK:
            number, frames = protocol.stack(payload)
            process.stacks[number] = frames
        elif (
            kind == protocol.LOG
            and file is not None
            and protocol.log(payload) == self._measured.follow.log_records
        ):
            process.made_log(file, self._measured.follow.log_records)
        elif kind == protocol.RING:
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
        elif kind == protocol.PATCHES and file is not None and process.attached and not process.asked:
            process.asked = True
            self._workshop.patch(process, file)
        elif kind == protocol.HOOKED and not process.hooked:
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
            if failed:
                self._measured.note(f"{process.who} is not traced: cannot hook {'; '.join(failed[:3])}")
            else:
                process.hooked = True
                when = process.virtual_times()[0] or time.monotonic_ns()
                self._probed(process.pid, process.comm, when)
        elif kind == protocol.DRAINED:
            process.answered, _ = protocol.drained(payload)
        else:
            raise protocol.Malformed("a message out of place")
