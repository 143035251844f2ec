"""Run functions on threads of their own.

Linux keeps some state per thread, not per process: which threads it traces, its capabilities, its user. That state ends with the
thread (`run`).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class NoThread(OSError):
    """Linux starts no more threads: other processes may have used up what the machine or the cgroup allows."""


def start(work: Callable[[], object], name: str) -> threading.Thread:
    """Call `work` on a new thread, and return the thread. It does not delay the tool's exit. `name`: the thread's name.

    Raises NoThread."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        raise NoThread(errno.EAGAIN, "no more threads can be started") from None
    return thread


def run(work: Callable[[], T], name: str) -> T:
    """Call `work` on a new thread. Return its result, or raise its exception; or NoThread.

    The kernel has removed the thread by then, so every thread that it still traced continues. `name`: the thread's name.
    The tool may exit while the thread works, as on a file system that does not answer.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = start(call, name)
    thread.join()
    until = time.monotonic() + 1
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < until:
        time.sleep(0.0002)  # Python's join returns slightly before the kernel has removed the thread
    if errors:
        raise errors[0]
    return results[0]
