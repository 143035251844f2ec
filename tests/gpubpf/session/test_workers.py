"""The slow work of serving processes, apart from any process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpubpf.images import assemble
from gpubpf.session import workers


def test_a_process_does_not_wait_until_all_clock_kernels_are_assembled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its agent waits 5 s for the welcome, and a slow machine may need longer for ptxas."""
    going_on, asked = threading.Event(), []

    def slow(ptx: str, driver: int) -> Iterator[tuple[int, bytes]]:
        asked.append(driver)
        yield 80, b"first"
        going_on.wait(60)
        yield 90, b"second"

    monkeypatch.setattr(assemble, "for_each_generation", slow)
    measurement: Any = SimpleNamespace(
        device=SimpleNamespace(kind="gpu"), privileges=SimpleNamespace(apply=lambda: None)
    )
    builder = workers.SidecarBuilder(instrument=lambda data, target: pytest.fail("not asked for"))
    background = workers.BackgroundWork(measurement, builder, lambda name, data: None, lambda: None)
    start = time.monotonic()
    try:
        assert background.clock_kernels(13) == {80: b"first"}  # for the others, the driver compiles the PTX
        assert time.monotonic() - start < 4
    finally:
        going_on.set()
    until = time.monotonic() + 60
    while background.clock_kernels(13) != {80: b"first", 90: b"second"}:
        assert time.monotonic() < until
    assert asked == [13]
    background.close()
