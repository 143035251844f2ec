"""How many registers the copies of a process's kernels need. ptxas counts them in the background, when no process waits for ptxas."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, TypeAlias

from gpubpf.future import Future

if TYPE_CHECKING:
    from gpubpf.images.sidecar import RegisterUse

# In a module with more kernels than this, only launched kernels are counted: for all copies of a large library, ptxas takes minutes.
FEW_KERNELS = 8

# A function that starts to count the registers of some kernels of one module.
Count: TypeAlias = Callable[[Collection[str]], "Future[Mapping[str, RegisterUse]]"]


class RegisterCounts:
    """The register use of one process's kernels. Any thread may call the methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._later: dict[str, Count] = {}  # by kernel
        self._started: list[Future[Mapping[str, RegisterUse]]] = []

    def add(self, kernels: Collection[str], count: Count) -> None:
        """Add the instrumented kernels of a module. `count` is called now for few kernels, otherwise when some are launched."""
        with self._lock:
            if len(kernels) <= FEW_KERNELS:
                self._started.append(count(kernels))
            else:
                self._later.update(dict.fromkeys(kernels, count))

    def of(self, launched: Collection[str], until: float = 0) -> dict[str, RegisterUse]:
        """Return the register use counted so far, by mangled name.

        launched: kernels to count if they are not counted yet.
        until: how long to wait for ptxas (time.monotonic)."""
        found: dict[str, RegisterUse] = {}
        with self._lock:
            wanted: dict[Count, list[str]] = {}
            for name in sorted(self._later.keys() & set(launched)):
                wanted.setdefault(self._later.pop(name), []).append(name)
            self._started += [count(kernels) for count, kernels in wanted.items()]
            started = list(self._started)
        for future in started:
            with contextlib.suppress(Exception):  # an error in ptxas does not affect the measurement
                found.update(future.result(max(0.0, until - time.monotonic())))
        return found
