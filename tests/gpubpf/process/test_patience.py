"""Looks at processes that keep the tool waiting: each has a deadline, and few of them wait at a time."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpubpf_locked
from gpubpf.errors import SessionError
from gpubpf.process import address_space, limits, patience, proc
from gpubpf.process.patience import Unanswered, within
from gpubpf.traced import joining

# A process that holds its lock keeps tools from placing probes, so no other test may run then.
holds_its_lock = pytest.mark.whole_machine


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[tuple[int, int]]:
    with gpubpf_locked.process(tmp_path) as made:
        yield made


@pytest.fixture
def waiting() -> Iterator[threading.Event]:
    """An event that ends the looks of a test."""
    event = threading.Event()
    yield event
    event.set()
    while patience._waiting:
        time.sleep(0.01)


@holds_its_lock
def test_its_mappings_do_not_arrive(locked: tuple[int, int]) -> None:
    pid, page = locked
    for look in (
        lambda: list(proc.lines(pid, "maps")),
        lambda: address_space.mapping_at(pid, page),
        lambda: address_space.Memory(pid).some(page, 8),
    ):
        with pytest.raises(Unanswered):
            within(0.5, pid, look)


@holds_its_lock
def test_nobody_waits_for_its_mappings(locked: tuple[int, int]) -> None:
    pid, page = locked
    began = time.monotonic()
    assert not address_space.executed_another_program(pid)
    assert not address_space.is_return_probe(pid, page)
    with pytest.raises(SessionError, match=rf"pid {pid} \(locked\) cannot be traced: .* does not arrive"):
        joining.devices_of(pid)
    assert joining.untraced_descendants([pid]) == {}
    assert time.monotonic() < began + 60


@holds_its_lock
def test_a_process_that_holds_its_lock_is_found(tmp_path: Path, waiting: threading.Event) -> None:
    assert patience.lock_holder() == 0
    with gpubpf_locked.process(tmp_path) as (pid, _):
        assert patience.lock_holder() == pid
    assert patience.lock_holder() == 0


def test_a_look_that_makes_progress_is_not_given_up() -> None:
    def work() -> int:
        until = time.thread_time() + 1
        while time.thread_time() < until:
            pass
        return 7

    assert within(0.2, os.getpid(), work) == 7


def test_what_it_raises() -> None:
    with pytest.raises(proc.TooLarge):
        within(60, os.getpid(), lambda: list(proc.lines(os.getpid(), "maps", 100)))


def test_few_looks_at_processes_of_a_user_wait(waiting: threading.Event) -> None:
    with subprocess.Popen(["sleep", "100"], user=65534 if os.geteuid() == 0 else None) as theirs:
        try:
            for _ in range(limits.UNANSWERED_OF_USER):
                with pytest.raises(Unanswered):
                    within(0.01, theirs.pid, waiting.wait)
            before = threading.active_count()
            with pytest.raises(Unanswered):
                within(60, theirs.pid, lambda: None)
            assert threading.active_count() == before
            if os.geteuid() == 0:
                assert within(60, os.getpid(), lambda: 7) == 7  # another user's
            waiting.set()
            while patience._waiting:
                time.sleep(0.01)
            assert within(60, theirs.pid, lambda: 7) == 7
        finally:
            theirs.kill()
