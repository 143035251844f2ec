"""The registers of copies: those of small modules are counted at once, of large ones only those of launched kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future

from gpubpf.images.instrument import RegisterUse
from gpubpf.session.register_counts import FEW_KERNELS, RegisterCounts


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
    assert counts.of([], 0) == {"a": RegisterUse(8, 9), "b": RegisterUse(8, 9)}


def test_of_a_large_module_only_launched_kernels_are_counted_each_once() -> None:
    ptxas, counts = Ptxas(), RegisterCounts()
    counts.add([f"k{n}" for n in range(FEW_KERNELS + 1)], ptxas)
    assert counts.of([], 0) == {} and ptxas.calls == []
    assert counts.of(["k3", "k1", "elsewhere"], 0).keys() == {"k1", "k3"}
    assert counts.of(["k3", "k1", "k2"], 0).keys() == {"k1", "k2", "k3"}
    assert ptxas.calls == [["k1", "k3"], ["k2"]]


def test_what_fails_or_takes_too_long_is_left_out() -> None:
    counts = RegisterCounts()
    counts.add(["a"], Ptxas(ValueError("ptxas")))
    counts.add(["b"], lambda kernels: Future())
    counts.add(["c"], Ptxas())
    assert counts.of(["a", "b", "c"], 0.01).keys() == {"c"}
