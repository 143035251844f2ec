"""gputop's reports: printed one below the other, or on a screen that takes keys.

with view(…) as shown:
    for _ in session.intervals(…, tick=shown.tick):
        shown.show(interval)
shown.last()                             # behind the screen: the last report stays in the terminal

The screen uses what every terminal with a movable cursor has: no colours, bold and reverse text where they exist. The terminal is
restored when the block ends, and while the tool is stopped (Ctrl-Z).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpubpf.show.table import printable
from gpubpf.top.report import SORTS, Line, Report

if TYPE_CHECKING:
    from gpubpf.show.result_writer import ResultWriter
    from gpubpf.top.usage import Interval

QUIT, HELP = ("q", "Q"), ("h", "?")
KEYS = {word[0]: word for word in SORTS}
HELP_LINES = (
    "Keys:",
    *(f"  {key}   sort processes by {word}" for key, word in KEYS.items()),
    "  h   show or leave this help",
    "  q   end the measurement, and print the last report",
    "",
    "SHARE     how much of the interval at least one kernel of the process ran",
    "LAUNCH/s  kernels launched per second",
    "COPIED/s  bytes copied from or to GPU memory, per second",
    "MEMORY    GPU memory held, of the allocations that were seen",
    "WAITED    time in calls that waited for the GPU, and returned in the interval",
    "GPU TIME  time of the kernel's launches in the interval, summed",
)
FOOT = "q quit  h help  sort: " + "  ".join(f"{key} {word}" for key, word in KEYS.items())
MOST_NOTICES = 200


def is_possible() -> bool:
    """Return whether standard output is a terminal that has a movable cursor, and keys come from a terminal."""
    try:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            return False
        import curses  # imported here: not every Python has it
    except (ImportError, AttributeError, ValueError):
        return False
    try:
        curses.setupterm()
        return bool(curses.tigetstr("cup"))
    except curses.error:  # the terminal is not known
        return False


class Pages:
    """Reports, one below the other."""

    def __init__(self, report: Report, results: ResultWriter) -> None:
        self._report, self._results = report, results
        results.head(report.notice)

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: each report is complete."""

    def tick(self) -> None:
        """Do nothing: there are no keys."""

    def show(self, interval: Interval) -> None:
        """Write the report of an interval."""
        self._results.begin()
        self._report.write(interval, self._results)

    def last(self) -> None:
        """Do nothing: the last report was written."""


class _Notices:
    """Stands for standard error while the screen is shown, because both are the same terminal. Any thread may write."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=MOST_NOTICES)
        self._lock, self._open = threading.Lock(), ""

    def write(self, text: str) -> int:
        with self._lock:
            *whole, self._open = (self._open + text).split("\n")
            self.lines.extend(whole)
        return len(text)

    def flush(self) -> None:
        """Do nothing: the screen shows the lines."""

    def isatty(self) -> bool:
        return False


class Screen:
    """The report of the last interval on a terminal. `end` is called when the user quits."""

    def __init__(self, report: Report, results: ResultWriter, end: Callable[[], None]) -> None:
        self._report, self._results, self._end = report, results, end
        self._notices = _Notices()
        self._interval: Interval | None = None
        self._help = self._open = False

    def __enter__(self) -> Screen:
        import curses

        self._curses = curses
        self._catch_stop()
        self._window = curses.initscr()
        try:
            curses.noecho()
            curses.cbreak()  # Ctrl-C and Ctrl-Z still send their signals
            self._window.keypad(True)
            self._window.nodelay(True)
            with contextlib.suppress(curses.error):
                curses.curs_set(0)
            self._open = True
            self._stderr, sys.stderr = sys.stderr, self._notices
            self._draw()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _catch_stop(self) -> None:
        """Catch SIGTSTP (Ctrl-Z), unless it is ignored.

        The handler of curses may run in any thread. If that is not the main one, the process is not always stopped.
        """
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, self._stop)

    def _stop(self, *_: object) -> None:
        """Give the terminal back, stop, and take the terminal again when the process continues."""
        self._curses.endwin()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)  # returns when the process continues
        signal.signal(signal.SIGTSTP, self._stop)
        self._window.clearok(True)
        self._draw()

    def _leave(self) -> None:
        """Restore the terminal, and print what was said meanwhile."""
        self._open = False
        if signal.getsignal(signal.SIGTSTP) == self._stop:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        with contextlib.suppress(self._curses.error):
            self._curses.curs_set(1)
        with contextlib.suppress(self._curses.error):
            self._window.erase()  # not every terminal has a second screen to return from
            self._window.refresh()
            self._curses.endwin()
        if sys.stderr is self._notices:
            sys.stderr = self._stderr
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write("".join(f"{line}\n" for line in self._notices.lines))
                sys.stderr.flush()

    def tick(self) -> None:
        """Do what the keys say that were pressed."""
        if not self._open:
            return
        pressed = False
        while (key := self._key()) is not None:
            pressed = True
            if key in QUIT:
                self._end()
            elif key in HELP:
                self._help = not self._help
            elif key in KEYS:
                self._report.sort, self._help = KEYS[key], False
        if pressed or self._size() != self._drawn:
            self._draw()

    def _key(self) -> str | None:
        """Return the next key, or "" for one without a character; None if no key was pressed."""
        key: Any
        try:
            key = self._window.get_wch()
        except self._curses.error:
            return None
        return key if isinstance(key, str) else ""

    def show(self, interval: Interval) -> None:
        """Show the report of an interval."""
        self._results.begin()
        self._interval = interval
        self._draw()

    def last(self) -> None:
        """Write the last report, as text that stays in the terminal."""
        self._results.head(self._report.notice)
        if self._interval is not None:
            self._report.write(self._interval, self._results)

    def _size(self) -> tuple[int, int]:
        height, width = self._window.getmaxyx()
        return height, width

    def _draw(self) -> None:
        height, width = self._drawn = self._size()
        self._window.erase()
        lines = [*map(Line, HELP_LINES)] if self._help else self._lines(width, height - 2)
        for row, line in enumerate(lines[: height - 2]):
            self._put(row, line)
        if self._notices.lines:
            self._put(height - 2, Line(self._notices.lines[-1]))
        self._put(height - 1, Line(FOOT, "title"))
        self._window.refresh()

    def _lines(self, width: int, height: int) -> list[Line]:
        return self._report.screen(self._interval, width - 1, height)

    def _put(self, row: int, line: Line) -> None:
        """Draw a line, cut to the width of the screen."""
        style = {"title": self._curses.A_BOLD, "header": self._curses.A_REVERSE}.get(line.style, 0)
        known = self._window.encoding
        text = printable(line.text).encode(known, "backslashreplace").decode(known)
        with contextlib.suppress(self._curses.error):  # the terminal has become smaller
            self._window.addnstr(row, 0, text, self._drawn[1] - 1, style)


def view(report: Report, results: ResultWriter, end: Callable[[], None], wanted: bool) -> Pages | Screen:
    """Return a screen if it is wanted and possible, otherwise pages.

    end: ends the measurement.
    """
    suits = wanted and results.form == "text" and is_possible()
    return Screen(report, results, end) if suits else Pages(report, results)
