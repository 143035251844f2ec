"""Signals end a wait, whichever thread the kernel delivers them to."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# The main thread blocks the signal, so the kernel delivers it to the other one. Python runs handlers in the main thread only.
PROGRAM = """
import os, selectors, signal, threading
from gpubpf.traced.command import Signals

signal.signal(signal.Signals[{number!r}], signal.SIG_DFL)  # under nohup, SIGHUP is ignored
before = signal.getsignal(signal.Signals[{number!r}])
signals = Signals()
signals.catch()
threading.Thread(target=threading.Event().wait, daemon=True).start()
number = signal.Signals[{number!r}]
signal.pthread_sigmask(signal.SIG_BLOCK, (number,))
with selectors.DefaultSelector() as selector:
    selector.register(signals.reader, selectors.EVENT_READ)
    threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
    print([key.fd == signals.reader for key, _ in selector.select(20)], end=" ")
    signals.clear()
print(signals.interrupted, signals.terminated, end=" ")
signals.wake()
signals.close()
print(signal.getsignal(number) is before)
"""


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("number", "flags"), [("SIGINT", "True False"), ("SIGTERM", "False True"), ("SIGHUP", "False True")]
)
def test_a_signal_that_another_thread_receives(number: str, flags: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(number=number)], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (f"[True] {flags} True\n", "")


AFTER = """
import os, signal
from gpubpf.traced.command import Signals
signal.signal(signal.SIGINT, signal.SIG_DFL)
signals = Signals()
signals.catch()
if {before}:
    os.kill(os.getpid(), signal.SIGINT)
signals.close()
for after in range({after}):
    os.kill(os.getpid(), signal.SIGINT)
print("results")
"""


@pytest.mark.parametrize(
    ("before", "after", "status"), [(0, 1, 0), (0, 2, -signal.SIGINT), (1, 0, 0), (1, 1, -signal.SIGINT)]
)
def test_an_interrupt_just_after_the_end_leaves_the_results(before: int, after: int, status: int) -> None:
    code = AFTER.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "" if status else "results\n"), done.stderr
