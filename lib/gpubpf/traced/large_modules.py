"""A module with many kernels, which get their copies when they are launched for the first time.

A program launches few of the kernels of a large library, and assembling the copies of all takes minutes. `images.instrument` decides
which modules are large, and the agent asks for a kernel's copy (src/copies/sidecar.cpp). The cache remembers which kernels were
launched, so that a later run gets their copies when it loads the module.
"""

from __future__ import annotations

import json
import threading
from enum import Enum
from typing import TYPE_CHECKING, Any

from gpubpf import cache
from gpubpf.future import Future

if TYPE_CHECKING:
    from gpubpf.images.sidecar import Later

STAGE = "launched"  # in the cache: digest of a module's PTX → names of launched kernels, those of the latest run first
# If a larger share of a module's kernels than one in this many is launched, all kernels get their copies at once: assembling copies
# one by one takes two to four times as much CPU time (benchmarks/results/large_module.md).
ALL_ABOVE = 4
# What the cache remembers of a module. The list is written anew for each kernel.
MOST_NAMES, MOST_BYTES = 1024, 1 << 18


class Step(Enum):
    """What to do when a kernel is launched for the first time: `LargeModule.launched`."""

    NOTHING = 0  # the module has no such kernel
    ONE = 1  # make its copy
    ALL = 2  # make the copies of all kernels, then set the result of `LargeModule.all`
    WAIT = 3  # all copies are being made: wait for `LargeModule.all`


class LargeModule:
    """A large module of a process. Its methods may be called from any thread."""

    def __init__(self, later: Later) -> None:
        self.source = later.source
        self._later = later  # which processes and loads of equal modules share
        self.all: Future[None] = Future()  # done once the copies of all kernels were sent
        self._launched: list[str] = []
        self._changed = False  # what the cache remembers
        self._all_asked = False
        self._lock = threading.Lock()
        few = len(later.kernels) // ALL_ABOVE
        # The kernels that earlier runs launched: their copies are made now.
        self.first = tuple(name for name in self._remembered() if name in later.names)[:few]

    def launched(self, name: str) -> Step:
        """Return what to do now that this kernel (mangled) is launched."""
        with self._lock:
            if name not in self._later.names:
                return Step.NOTHING
            if self._all_asked:
                return Step.WAIT
            if name not in self._launched:
                self._launched.append(name)
                self._changed |= name not in self.first
                if self._changed and len(self._launched) <= MOST_NAMES:
                    names = list(dict.fromkeys((*self._launched, *self._remembered())))[:MOST_NAMES]
                    if len(text := json.dumps(names).encode()) <= MOST_BYTES:
                        cache.default().put(STAGE, self.source.digest, text)
            self._all_asked = len(self._launched) * ALL_ABOVE > len(self._later.kernels)
            return Step.ALL if self._all_asked else Step.ONE

    def _remembered(self) -> list[str]:
        """Return the kernels that earlier runs launched, from the cache."""

        def read(names: Any) -> list[str]:
            return [str(name) for name in names][:MOST_NAMES]

        return cache.from_json(cache.default().get(STAGE, self.source.digest), read) or []
