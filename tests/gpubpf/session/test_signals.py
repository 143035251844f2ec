"""Signals end a wait, whichever thread the kernel delivers them to."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The main thread blocks the signal, so the kernel delivers it to the other one. Python runs handlers in the main thread only.
PROGRAM = """
import os, selectors, signal, threading
from gpubpf.session.command import Signals

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
