"""The registers of copies: those of small modules are counted at once, of large ones only those of launched kernels."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from gpubpf.ebpf.maps import MapDefinition
from gpubpf.future import Future
from gpubpf.images.sidecar import RegisterUse
from gpubpf.session import readout
from gpubpf.traced.device import Device
from gpubpf.traced.measurement import (
    REGISTERS_WAIT,
    SHOWN_REGISTERS_WAIT,
    Measurement,
    Plan,
    Targets,
)
from gpubpf.traced.register_counts import FEW_KERNELS, RegisterCounts


class Ptxas:
    """Counts at once. calls: the kernels of each count."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[list[str]] = []
        self._error = error

    def __call__(self, kernels: Collection[str]) -> Future[Mapping[str, RegisterUse]]:
        self.calls.append(list(kernels))
        future: Future[Mapping[str, RegisterUse]] = Future()
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result({name: RegisterUse(8, 8 + len(name)) for name in kernels})
        return future


def test_a_small_module_is_counted_before_it_runs() -> None:
    ptxas, counts = Ptxas(), RegisterCounts()
    counts.add(["a", "b"], ptxas)
    assert ptxas.calls == [["a", "b"]]
    assert counts.of([]) == {"a": RegisterUse(8, 9), "b": RegisterUse(8, 9)}


def test_of_a_large_module_only_launched_kernels_are_counted_each_once() -> None:
    ptxas, counts = Ptxas(), RegisterCounts()
    counts.add([f"k{n}" for n in range(FEW_KERNELS + 1)], ptxas)
    assert counts.of([]) == {} and ptxas.calls == []
    assert counts.of(["k3", "k1", "elsewhere"]).keys() == {"k1", "k3"}
    assert counts.of(["k3", "k1", "k2"]).keys() == {"k1", "k2", "k3"}
    assert ptxas.calls == [["k1", "k3"], ["k2"]]


def test_what_fails_or_takes_too_long_is_left_out() -> None:
    counts = RegisterCounts()
    counts.add(["a"], Ptxas(ValueError("ptxas")))
    counts.add(["b"], lambda kernels: Future())
    counts.add(["c"], Ptxas())
    assert counts.of(["a", "b", "c"], time.monotonic() + 0.01).keys() == {"c"}


class Slow(Future[Mapping[str, RegisterUse]]):
    """Never counts. until: when each call gave up."""

    def __init__(self) -> None:
        super().__init__()
        self.until: list[float] = []

    def result(self, timeout: float | None = None) -> Mapping[str, RegisterUse]:
        assert timeout is not None
        self.until.append(time.monotonic() + timeout if timeout else 0.0)
        raise TimeoutError


@pytest.mark.parametrize("shown", [False, True])
def test_all_readings_together_wait_once(shown: bool) -> None:
    """At the end, and not long unless the tool shows registers."""
    maps = [MapDefinition(name, "array", 4, 8, 1) for name in ("one", "two", "three")]
    measurement = Measurement(Targets(), Plan(Device("sim"), maps, registers=shown), print)
    process: Any = SimpleNamespace(registers=RegisterCounts(), launched_copies=lambda: ["b"], snapshots={})
    slow = Slow()
    process.registers.add(["b"], lambda kernels: slow)
    measurement.processes.append(process)
    before = time.monotonic()
    for measurement.stopped in (False, True):
        slow.until.clear()
        ends = []
        for one in maps:
            assert readout.instances(measurement, one.name) == []
            ends.append(measurement.registers_until())
        assert len(set(ends)) == 1
        assert all(slow.until) if measurement.stopped else slow.until == [0, 0, 0]
    least, most = (REGISTERS_WAIT, SHOWN_REGISTERS_WAIT) if shown else (0, REGISTERS_WAIT)
    assert before + least < ends[0] <= time.monotonic() + most
