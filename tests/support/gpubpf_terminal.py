"""Run a program in a terminal, press its keys, and read its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

LONG = 300.0  # seconds; more than anything takes on a busy machine


class Terminal:
    """A program in a terminal of its own, as a context manager. `screen` is what a user sees."""

    def __init__(
        self,
        command: Sequence[str | Path],
        columns: int = 80,
        lines: int = 24,
        term: str = "xterm",
        **more: Any,
    ) -> None:
        pyte = pytest.importorskip("pyte", reason="no pyte here; script/setup --dev installs it")
        self._pyte_screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._pyte_screen)
        self.written = b""  # all that the program wrote
        self._own, theirs = pty.openpty()
        self._size(columns, lines)
        self.before = termios.tcgetattr(theirs)
        environment = {**more.pop("env", os.environ), "TERM": term}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            **more,
        )
        self._theirs = theirs  # stays open, so that the modes can be read when the program has ended

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)
        os.close(self._theirs)

    def _size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        self._pyte_screen.resize(lines, columns)
        self._size(columns, lines)

    def press(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def lines(self) -> list[str]:
        """The lines of the screen, without spaces at their ends."""
        return [line.rstrip() for line in self._pyte_screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def attributes(self, row: int) -> Any:
        """The first character of a line, with its attributes."""
        return self._pyte_screen.buffer[row][0]

    @property
    def modes(self) -> list[Any]:
        """The terminal's modes: echo, signals and the like."""
        return termios.tcgetattr(self._theirs)

    def read(self, seconds: float) -> None:
        """Read what the program writes for at most some seconds."""
        if select.select([self._own], [], [], seconds)[0]:
            try:
                data = os.read(self._own, 1 << 16)
            except OSError:  # the program has ended
                time.sleep(min(seconds, 0.05))
                return
            self.written += data
            self._stream.feed(data)

    def until(self, shown: str | Callable[[Terminal], bool]) -> None:
        """Wait until the screen has a text, or a condition holds."""
        until = time.monotonic() + LONG
        while not (shown in self.text if isinstance(shown, str) else shown(self)):
            assert time.monotonic() < until, self.text
            self.read(0.1)

    def ended(self) -> int:
        """Wait for the program's end; return its exit status."""
        self.until(lambda me: me.process.poll() is not None)
        for _ in range(5):
            self.read(0.05)
        return self.process.returncode
