"""The connection to a traced process. No call waits for the process longer than the caller allows.

    ours, theirs = pair()                # `theirs` is for the process
    ours.send(message, [file], until=time.monotonic() + 5)
    received = ours.receive(1 << 20)     # None: nothing has arrived

The tool creates both ends of a connection, and only the tool ever has its own end. A process with a duplicate of the tool's end could
take messages from that end, fill it, or make it blocking, because all duplicates of a file share O_NONBLOCK. The process could even
make the tool's recvmsg(2) wait in spite of MSG_DONTWAIT: the kernel holds a lock of the socket while it copies a message, and a
process chooses the memory to which its own call copies. In addition, each call here passes MSG_DONTWAIT, and the class waits by
itself, with a deadline.
"""

from __future__ import annotations

import array
import contextlib
import functools
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Sequence

from gpubpf.record import Record

_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_MOST_FILES = 8  # files to receive at once
_PAUSE = 0.01  # seconds, if the socket is writable but takes nothing


class Received(Record):
    """Data and files that have arrived. No data: the other end is closed. truncated: the kernel dropped files that came with them."""

    data: bytes
    files: list[int]
    truncated: bool


class TargetSocket:
    """One end of a Unix stream socket whose other end an untrusted process has. Takes ownership of `connection`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(True)  # with a timeout, Python itself would wait in sendmsg and recvmsg

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self, size: int) -> Received | None:
        """Return what has arrived, at most `size` bytes; None if nothing has. Never waits. Raises OSError."""
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC  # socket.recv_fds ignores its flags
        try:
            data, messages, told, _ = self._socket.recvmsg(size, socket.CMSG_SPACE(4 * _MOST_FILES), flags)
        except BlockingIOError:
            return None
        files = array.array("i")
        for level, kind, content in messages:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files.frombytes(content[: len(content) - len(content) % files.itemsize])
        return Received(data, list(files), bool(told & socket.MSG_CTRUNC))

    def send(self, data: bytes, files: Sequence[int] = (), until: float = 0.0) -> bool:
        """Send all of `data`, and `files` with its first byte. Raises OSError.

        Return False if the process has not taken all data by `until`. Then a part of the data may have been sent.

        until: time.monotonic; a time in the past: do not wait.
        """
        rest = memoryview(data)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        while rest:
            try:
                rest = rest[self._socket.sendmsg([rest], rights, _FLAGS) :]
                rights = []
            except BlockingIOError:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                if self._is_writable(0):  # there is room, but not enough for this message
                    time.sleep(min(_PAUSE, left))
                else:
                    self._is_writable(left)
        return True

    def _is_writable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(seconds * 1000))

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """End the connection, in both directions or in one. A call of `send` on another thread then fails. Never raises."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> TargetSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def discard(file: int) -> None:
    """Close a file that a process handed over, without waiting.

    close(2) waits for the program that serves the file's file system (FUSE). Even an ordinary user can mount one, in a user namespace.
    So a single thread closes all these files. If it waits for ever, the remaining files stay open."""
    _closing().put(file)


@functools.cache
def _closing() -> queue.SimpleQueue[int]:
    files: queue.SimpleQueue[int] = queue.SimpleQueue()

    def close() -> None:
        while True:
            with contextlib.suppress(OSError):
                os.close(files.get())

    threading.Thread(target=close, name="gpubpf-close", daemon=True).start()
    return files


def pair() -> tuple[TargetSocket, socket.socket]:
    """Return the ends of a new connection: the tool's, and the one to pass to the process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return TargetSocket(ours), theirs
