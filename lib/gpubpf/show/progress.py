"""Show long work on a terminal: one line on standard error, which is rewritten in place and cleared at the end.

    progress.enable("threadhist")
    with progress.work("assembling kernels", 500) as task:
        task.step()                          # threadhist: assembling kernels 1 of 500, 2 s

The line appears after a second of work, if standard error is a terminal.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

DELAY = 1.0  # seconds of work before the line appears
PERIOD = 0.2  # seconds between two looks at the work
IDLE = 1.0  # seconds; work that begins within this time after other work continues its line


class Task:
    """Work in `total` steps; 0: their number is not known."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0

    def step(self, *_: object) -> None:
        """Record that a step is done."""
        self.done = min(self.done + 1, self.total)


class ProgressLine:
    """The line of a tool. A thread draws it, so that no work waits for the terminal."""

    def __init__(self, tool: str) -> None:
        import atexit
        import threading  # here, since --help needs neither

        self._tool = tool
        self._tasks: list[Task] = []  # guarded by _lock, like the next three
        self._finished: Counter[str] = Counter()  # description of a task → steps of finished tasks
        self._since = self._until = 0.0  # when the work began, and when the latest work ended
        self._drawing = False  # whether the thread runs
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._terminal = threading.RLock()  # a signal handler may print; guards _shown
        self._shown = ""
        self._start = lambda: threading.Thread(
            target=self._draw_all, name="gpubpf-progress", daemon=True
        ).start()
        atexit.register(self._draw, "")

    def begin(self, task: Task) -> None:
        with self._lock:
            now = time.monotonic()
            if not self._tasks and now - self._until > IDLE:
                self._since = now
                self._finished.clear()
            self._tasks.append(task)
            start, self._drawing = not self._drawing, True
        if start:
            self._start()

    def end(self, task: Task) -> None:
        with self._lock:
            self._tasks.remove(task)
            self._finished[task.what] += task.total
            self._until = time.monotonic()
        self._wake.set()

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        with self._terminal:
            self._draw("")
            yield

    def _draw_all(self) -> None:
        while True:
            self._draw(self._text())
            self._wake.wait(PERIOD)
            self._wake.clear()
            with self._lock:
                self._drawing = bool(self._tasks) or time.monotonic() - self._until <= IDLE
                if not self._drawing:
                    return

    def _text(self) -> str:
        with self._lock:
            took = time.monotonic() - self._since
            if not self._tasks or took < DELAY:
                return ""
            what = self._tasks[0].what
            mine = [task for task in self._tasks if task.what == what]
            done, total = (
                self._finished[what] + sum(getattr(task, name) for task in mine) for name in ("done", "total")
            )
        steps = f" {done:,} of {total:,}" if total else ""
        return f"{self._tool}: {what}{steps}, {took:.0f} s"

    def _draw(self, text: str) -> None:
        """Replace the text of the line."""
        from gpubpf.show.table import WIDTH, printable

        with self._terminal:
            try:
                if text != self._shown:
                    width = (os.get_terminal_size(sys.stderr.fileno()).columns or WIDTH) - 1
                    new = printable(text)[:width]
                    rest = " " * (min(len(self._shown), width) - len(new))
                    os.write(sys.stderr.fileno(), f"\r{new}{rest}{chr(13) if not new else ''}".encode())
                    self._shown = new
            except (OSError, ValueError, AttributeError):  # the terminal has gone
                self._shown = ""


_line: ProgressLine | None = None  # one for the process, as there is one terminal


def enable(tool: str) -> None:
    """Show the line from now on, beginning with the name of this tool. Without a terminal, nothing is shown."""
    global _line
    if _line is None and is_terminal():
        _line = ProgressLine(tool)
        os.register_at_fork(after_in_child=_disable)  # only the parent has the thread


def is_enabled() -> bool:
    """Return whether work is shown."""
    return _line is not None


@contextlib.contextmanager
def work(what: str, total: int = 0) -> Iterator[Task]:
    """Show this work on the line while the context lasts. Any thread may call this."""
    task, line = Task(what, total), _line
    if line is not None:
        line.begin(task)
    try:
        yield task
    finally:
        if line is not None:
            line.end(task)


def hidden() -> contextlib.AbstractContextManager[object]:
    """Return a context in which the line is cleared, for writing something else to the terminal."""
    return contextlib.nullcontext() if _line is None else _line.hidden()


def _disable() -> None:
    global _line
    _line = None


def is_terminal() -> bool:
    """Return whether standard error is a terminal."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # it is closed
        return False
