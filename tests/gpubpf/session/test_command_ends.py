"""A session knows when its command has ended, also while the tool traces the command to attach to it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

from gpubpf.process.ptrace import TracedThread
from gpubpf.session.session import Session


def test_a_tracing_stop_of_the_command_is_not_its_end() -> None:
    session = Session.__new__(Session)
    stopped, asked = threading.Event(), threading.Event()

    def trace(pid: int) -> None:
        thread = TracedThread(pid, pid)
        thread.interrupt()
        while not thread.poll():
            time.sleep(0.001)
        stopped.set()
        asked.wait(60)

    with subprocess.Popen(["sleep", "100"]) as child:
        session._child, session._returncode, session._pidfd = child, None, os.pidfd_open(child.pid)
        tracing = threading.Thread(target=trace, args=(child.pid,))
        tracing.start()
        try:
            assert stopped.wait(60) and not session._ended()
        finally:
            asked.set()
            tracing.join()
            os.kill(child.pid, signal.SIGKILL)  # send_signal would take the stop for its end, too
        while not session._ended():
            time.sleep(0.001)
        assert session._returncode == -signal.SIGKILL
        os.close(session._pidfd)
