"""A module with probes on the embedded device's engine, for tests of what programs at each point are told."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np

from engine_device import Array, Device
from gpubpf.inject.inject import inject
from gpubpf.inject.injected import Injected
from gpubpf.inject.values import PtxProbe, Site
from gpubpf.ptx.parser import parse
from gpubpf.ptx.symbols import TABLE
from gpubpf_fragments import ROOM

HEAD = ".version 8.3\n.target sm_80\n.address_size 64\n"


class Run:
    """A module with probes, launched; `records` of a map: (thread, fields …) of each run of its program."""

    def __init__(self, text: str, probes: Iterable[PtxProbe], virtual: bool = False) -> None:
        application = parse(text)
        self.original = Device(text, virtual=virtual)
        self.injected: Injected = inject(application, dict.fromkeys(application.entries, tuple(probes)))
        assert not self.injected.refusals
        self.device = Device(self.injected.text, virtual=virtual)
        self.variables = {
            v.name: self.original.variable(v.name, np.uint8, (v.size,)) for v in self.injected.variables
        }
        if self.variables:
            assert all(v.entry is None for v in self.injected.variables)
            table = self.device.variable(TABLE, np.uint64, (len(self.variables),))
            table[:] = [place.ctypes.data for place in self.variables.values()]
        self.maps: dict[str, Array] = {}
        self.params: dict[str, bytes] = {}
        self.given: dict[str, Array] = {}  # maps with contents

    def __call__(
        self,
        kernel: str,
        block: int,
        *arguments: object,
        grid: int = 1,
        shared: int = 0,
        seed: int | None = None,
    ) -> None:
        layout = self.injected.kernels[kernel]
        hidden = bytearray(layout.block.size)
        for name, offset in layout.block.bases.items():
            self.maps[name] = self.given.get(name) or Array(np.zeros(2 + 9 * ROOM, np.uint64))
            struct.pack_into("<Q", hidden, offset, self.maps[name].address)
        for name, (offset, size) in layout.block.params.items():
            hidden[offset : offset + size] = self.params.get(name, b"").ljust(size, b"\0")
        for offset in layout.block.capacities.values():
            struct.pack_into("<Q", hidden, offset, block * grid)
        self.device.launch(kernel, grid, block, *arguments, bytes(hidden), shared=shared, seed=seed)

    def records(self, width: int, name: str = "log") -> list[tuple[int, ...]]:
        words = self.maps[name].host
        found = words[2 : 2 + 9 * int(words[0])].reshape(-1, 9)[:, : 1 + width]
        return sorted(tuple(map(int, row)) for row in found)

    def sites(self, kernel: str) -> dict[int, Site]:
        found = self.injected.kernels[kernel].sites
        assert len({site.number for site in found}) == len(found)
        return {site.number: site for site in found}
