"""Placing and removing uprobes while processes hold their locks; tests/gpubpf/linux/test_uprobes.py has real ones."""

from __future__ import annotations

import subprocess
import threading

import pytest

from gpubpf.process import fuse, kernel_waits

pytestmark = pytest.mark.without_driver


def test_this_process_does_not_fork_meanwhile() -> None:
    """fork(2) would wait, and no other thread of Python could run: Python forks with its lock."""
    order: list[str] = []
    entered, leave = threading.Event(), threading.Event()

    def place() -> None:
        with kernel_waits.guarded():
            entered.set()
            leave.wait(60)
            order.append("placed")

    placing = threading.Thread(target=place)
    placing.start()
    entered.wait()
    threading.Timer(0.2, leave.set).start()
    subprocess.run(["true"], check=True, preexec_fn=lambda: None)
    order.append("forked")
    placing.join()
    assert order == ["placed", "forked"]


def test_which_process_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that holds its lock for long, and whose user has no file system to disconnect."""
    held, disconnectable = {3}, {1}
    monkeypatch.setattr(kernel_waits, "lock_holders", lambda seconds: iter((10, 11, 20, 30)))
    monkeypatch.setattr(kernel_waits, "holds_lock", lambda pid: pid // 10 in held)
    monkeypatch.setattr(kernel_waits.scans, "user_of", lambda pid: pid // 10)
    monkeypatch.setattr(fuse, "unanswered", lambda user: ["40"] if user in disconnectable else [])
    assert kernel_waits.obstacle() == 30
    disconnectable.add(3)
    assert kernel_waits.obstacle() == 0
