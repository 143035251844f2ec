"""A module with many kernels, which get their copies when they are launched for the first time.

A program launches few of the kernels of a large library, and assembling the copies of all takes minutes. `images.instrument` decides
which modules are large, and the agent asks for a kernel's copy (src/copies/sidecar.cpp). The cache remembers which kernels were
launched, so that a later run gets their copies when it loads the module.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from enum import Enum
from typing import TYPE_CHECKING, Any

from gpubpf import cache

if TYPE_CHECKING:
    from gpubpf.images.instrument import Later

STAGE = "launched"  # in the cache: the digest of a module's PTX → the names of kernels
# If more than one in so many of its kernels is launched, all others get their copies at once: a copy that is assembled alone takes two
# to three times as long.
ALL_ABOVE = 4


class Step(Enum):
    """What to do when a kernel is launched for the first time: `LargeModule.launched`."""

    NOTHING = 0  # it is no kernel of the module
    ONE = 1  # make its copy
    ALL = 2  # make the copies of all kernels, then set the result of `LargeModule.all`
    WAIT = 3  # all copies are being made: wait for `LargeModule.all`


class LargeModule:
    """A large module of a process. Its methods may be called from any thread."""

    def __init__(self, later: Later) -> None:
        self.source = later.source
        self._later = later  # which processes and loads of equal modules share
        self.all: Future[None] = Future()  # done once the copies of all kernels were sent
        self._launched: set[str] = set()
        self._all_asked = False
        self._lock = threading.Lock()
        self._before = self._remembered()
        few = len(later.kernels) // ALL_ABOVE
        # The kernels that earlier runs launched, to be launched again.
        self.first = tuple(name for name in later.kernels if name in self._before)[:few]

    def launched(self, name: str) -> Step:
        """Return what to do now that this kernel (mangled) is launched."""
        with self._lock:
            if name not in self._later.names:
                return Step.NOTHING
            if self._all_asked:
                return Step.WAIT
            self._launched.add(name)
            if name not in self._before:
                self._before |= self._remembered() | {name}
                cache.default().put(STAGE, self.source.digest, json.dumps(sorted(self._before)).encode())
            self._all_asked = len(self._launched) * ALL_ABOVE > len(self._later.kernels)
            return Step.ALL if self._all_asked else Step.ONE

    def _remembered(self) -> set[str]:
        """Return the kernels that were launched before, from the cache."""

        def read(names: Any) -> set[str]:
            return {str(name) for name in names}

        return cache.from_json(cache.default().get(STAGE, self.source.digest), read) or set()
