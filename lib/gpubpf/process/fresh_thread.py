"""What belongs to a thread in Linux, and not to the process (who traces, capabilities, the user), had by a thread that then ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from gpubpf.process import libc

T = TypeVar("T")
_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h


def on_own(work: Callable[[], T], name: str) -> T:
    """What `work` returns, or raises, on a thread of its own that the kernel has taken down then: what it still traced is let go."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    until = time.monotonic() + 1
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < until:
        time.sleep(0.0002)  # Python is done with it a little earlier than the kernel
    if errors:
        raise errors[0]
    return results[0]


def share_heaps() -> None:
    """The C library gives each thread a heap of its own, and each keeps some MB of what was read in it. Of a tool's threads one runs
    at a time, but for what NumPy and the kernel do: two heaps are enough. For a process that is the tool's own."""
    libc.library.mallopt(_ARENA_MAX, 2)
