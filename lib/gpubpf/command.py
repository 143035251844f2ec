"""The command that is measured: how it is started, and the signals that end its measurement."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from gpubpf import agent, users
from gpubpf.errors import SessionError

if TYPE_CHECKING:
    from gpubpf.measurement import Measurement


class NotStarted(SessionError):
    """The command could not be run at all."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def start_command(command: Sequence[str], measured: Measurement, socket_name: str) -> subprocess.Popen[bytes]:
    """Starts it, with the agent for its processes that use CUDA. Raises SessionError, and `NotStarted` where it cannot be run."""
    environment = dict(os.environ)
    environment.update(measured.device.environment)
    environment["CUDA_INJECTION64_PATH"] = str(agent.LIBRARY)
    environment["GPUBPF_SOCKET"] = socket_name
    environment.pop("GPUBPF_CUPTI", None)
    if measured.follow.cupti:
        environment["GPUBPF_CUPTI"] = ":".join(measured.follow.cupti)
    as_user: dict[str, Any] = {}
    if measured.user:
        if not users.can_read(measured.user, agent.LIBRARY.resolve()):
            raise SessionError(
                f"{measured.user.name} cannot read {agent.LIBRARY}; install gpubpf where every user can, or use --user root"
            )
        as_user = {
            "user": measured.user.uid,
            "group": measured.user.gid,
            "extra_groups": measured.user.groups,
        }
        environment.update(HOME=measured.user.home, USER=measured.user.name, LOGNAME=measured.user.name)
        environment["SHELL"] = measured.user.shell or "/bin/sh"
        for name in ("SUDO_USER", "SUDO_UID", "SUDO_GID", "SUDO_COMMAND"):
            environment.pop(name, None)
    try:
        # Files that the caller's shell opened for the command stay open; ours are not inheritable.
        child = subprocess.Popen(command, env=environment, close_fds=False, **as_user)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or not command[0]:
            raise NotStarted(127, f"{command[0] or repr('')}: not found; check the name and PATH") from None
        text = f"{command[0]}: {error.strerror}; check that it is a program that may be run"
        raise NotStarted(126, text) from None
    # Each process takes files of ours. The command keeps the limit that it was started with.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return child


class Signals:
    """SIGINT, SIGTERM and SIGHUP, caught in the main thread; `reader` is readable after one, and after `wake`."""

    def __init__(self) -> None:
        self.interrupted = False  # SIGINT: the measurement is over
        self.terminated = False  # any other: leave at once
        self._handlers: dict[int, Any] = {}
        self.reader = self._writer = -1

    def catch(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        os.set_blocking(self.reader, False)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # as under nohup: stays as it is
                self._handlers[number] = before
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupted = True
        else:
            self.terminated = True
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"s")

    def taken(self) -> None:
        """What made `reader` readable was seen to."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 64)

    def close(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        os.close(self.reader)
        os.close(self._writer)
