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
from gpubpf.process.patience import Holder, NotLooked, Unanswered, within
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


def test_a_process_that_was_not_looked_at_is_not_named(
    waiting: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many looks wait, so nobody knows whether the others hold their locks. One that makes a look wait is named, not they."""
    monkeypatch.setattr(limits, "UNANSWERED_OF_USER", 1)
    monkeypatch.setattr(limits, "UNANSWERED", 2)
    with subprocess.Popen(["sleep", "100"]) as innocent, subprocess.Popen(["sleep", "100"]) as guilty:
        try:
            with pytest.raises(Unanswered):
                within(0.01, guilty.pid, waiting.wait)
            assert set(patience.lock_holders(60)) == {Holder(guilty.pid, unseen=True)}
            assert patience.lock_holder() == guilty.pid
            assert patience.holds_lock(guilty.pid) and not patience.holds_lock(innocent.pid)
            with pytest.raises(SessionError, match=rf"pid {innocent.pid} \(sleep\) was not looked at"):
                joining.devices_of(innocent.pid)
            waiting.set()
            while patience._waiting:
                time.sleep(0.01)
            assert not patience.holds_lock(guilty.pid) and not patience._stuck
        finally:
            innocent.kill()
            guilty.kill()


def test_few_looks_at_processes_of_a_user_wait(waiting: threading.Event) -> None:
    with subprocess.Popen(["sleep", "100"], user=65534 if os.geteuid() == 0 else None) as theirs:
        try:
            for _ in range(limits.UNANSWERED_OF_USER):
                with pytest.raises(Unanswered):
                    within(0.01, theirs.pid, waiting.wait)
            before = threading.active_count()
            with pytest.raises(NotLooked, match="too many processes keep the tool waiting"):
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
