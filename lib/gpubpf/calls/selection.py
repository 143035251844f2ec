"""Which launches the user asked for: --kernel, --launch and --sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpubpf import names
from gpubpf.calls.statistics import NameOrAddress
from gpubpf.names import KernelName

_MOST_SEEN = 4096  # maximum kernel names to remember for an error message


class KernelSelection:
    """The kernels that --kernel selects; without globs, all."""

    def __init__(self, globs: Sequence[str]) -> None:
        self.globs = globs
        self.seen: set[str] = set()  # names of launched kernels
        self._matched: set[str] = set()  # globs that matched a launched kernel

    def includes(self, name: NameOrAddress) -> bool:
        """Return whether the kernel is selected. A string is the address of a kernel with an unknown name."""
        text = name.mangled if isinstance(name, KernelName) else name or ""
        matching = {glob for glob in self.globs if names.matches((glob,), text)}
        self._matched |= matching
        return not self.globs or bool(matching)

    def unmatched(self) -> list[str]:
        """Return the globs that matched no launched kernel."""
        return [glob for glob in self.globs if glob not in self._matched]

    def select(self, calls: Any, name_of: Callable[[int, int], NameOrAddress]) -> Any:
        """Return the sums or events of selected kernels. Without globs, return all, including calls without a
        kernel.
        """
        if not self.globs:
            return calls
        keys = list(zip(calls["tgid"].tolist(), calls["kernel"].tolist(), strict=True))
        wanted = {}
        for pid, handle in set(keys):
            name = (name_of(pid, handle) or f"{handle:#x}") if handle else None
            wanted[pid, handle] = name is not None and self.includes(name)
            if name is not None and len(self.seen) < _MOST_SEEN:
                self.seen.add(name.short if isinstance(name, KernelName) else name)
        return calls[np.fromiter((wanted[key] for key in keys), bool, len(keys))]


class LaunchSelection:
    """The launches that --launch and --sample select. Launches are counted from 1 per kernel and process."""

    def __init__(self, launches: tuple[int, int | None], sample: int) -> None:
        self._first, self._last = launches
        self._sample = sample
        self._seen: dict[tuple[int, object], int] = {}

    def select(self, events: Any, name_of: Callable[[int, int], NameOrAddress]) -> Any:
        """Return the selected launches of `CallProbes.events`. Call this with all events, in order."""
        wanted = np.zeros(len(events), bool)
        for at in np.flatnonzero(events["launch"]).tolist():
            pid, handle = int(events["tgid"][at]), int(events["kernel"][at])
            key = pid, (name_of(pid, handle) if handle else None) or (int(events["function"][at]), handle)
            number = self._seen[key] = self._seen.get(key, 0) + 1
            inside = self._first <= number and (self._last is None or number <= self._last)
            wanted[at] = inside and (number - self._first) % self._sample == 0
        return events[wanted]
