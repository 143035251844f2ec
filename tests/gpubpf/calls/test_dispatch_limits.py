"""What the processes of a command may make the reader of dispatches keep, all together."""

from __future__ import annotations

import os
import struct
from contextlib import closing

import numpy as np
import pytest

from gpubpf.calls.device_times import dispatches as reader
from gpubpf.calls.device_times.dispatches import Dispatches

pytestmark = pytest.mark.without_driver


def process(found: Dispatches, names: int, ended: int) -> None:
    """Add a process that has names of this many bytes, and this many ended dispatches."""
    file = os.memfd_create("ring")
    os.truncate(file, reader._SIZE)
    name = reader._NAME.pack(len(found.processes), names - reader._NAME.size, 1)
    os.pwrite(file, struct.pack("<5Q2I", reader.MAGIC, ended, ended, names, 0, 0, 1), 0)
    slots = np.zeros(ended, reader._SLOT)
    slots["number"], slots["end_ns"] = np.arange(1, ended + 1), 1
    os.pwrite(file, slots.tobytes(), reader.HEADER)
    os.pwrite(file, name, reader.HEADER + reader.SLOTS * reader._SLOT.itemsize)
    found._follow(os.getpid(), os.getpid(), "app", file)


def test_names_beyond_the_limit_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MOST_NAMES", 10_000)
    with closing(Dispatches([], {}, 0)) as found:
        for _ in range(5):
            process(found, 4096, 0)
        for _ in range(2):
            found.take()
            assert [len(one.names) for one in found.processes] == [1, 1, 0, 0, 0]
            assert found.names_lost == 3


@pytest.mark.parametrize("last", [False, True])
def test_dispatches_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch, last: bool) -> None:
    """Processes take turns; at the end, what is not taken is lost."""
    monkeypatch.setattr(reader, "MOST_TAKEN", 2 * reader.SLOTS)
    with closing(Dispatches([], {}, 0)) as found:
        for _ in range(5):
            process(found, 64, 30_000)
        taken = [np.unique(found.take(last)["process"]).tolist() for _ in range(4)]
        assert taken == ([[0, 1], [], [], []] if last else [[0, 1], [2, 3], [4], []])
        assert found.lost == (90_000 if last else 0)
        assert not found.unended or last
