"""Show on a terminal that the embedded CUDA device is translating kernels, which delays their first launch in the program.

    with translating.shown(lambda: [pid]):
        ...                              # threadhist: translating kernels for the embedded device, 2 s

The translator is a child process of the program. A thread of the tool looks for it in /proc, without asking the program.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from gpubpf.process import started_with, traceable
from gpubpf.show import progress

PERIOD = 0.5  # seconds between two looks
TRANSLATOR = "cudasim.translate"  # the module that Python runs (lib/cudasim/src/engine/translator.cpp)


@contextlib.contextmanager
def shown(pids: Callable[[], Iterable[int]]) -> Iterator[None]:
    """Show on the tool's progress line, while the context lasts, that one of these processes translates kernels.

    `pids` is called in a thread."""
    if not progress.is_enabled():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(pids, ended), name="gpubpf-translating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(pids: Callable[[], Iterable[int]], ended: threading.Event) -> None:
    while not ended.wait(PERIOD):
        if any(translates(pid) for pid in pids()):
            with progress.work("translating kernels for the embedded device"):
                while not ended.wait(PERIOD) and any(translates(pid) for pid in pids()):
                    pass


def translates(pid: int) -> bool:
    """Return whether the embedded device translates kernels in a process."""
    return any(_is_translator(child) for child in traceable.children(pid))


def _is_translator(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return TRANSLATOR.encode() in started_with.arguments(pid, 8192)[:8]
    return False
