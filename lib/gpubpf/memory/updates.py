"""Count how often the atomic instructions of each site updated each address of global memory.

Device programs (gpubpf_updates.h) fill three maps, with one element per pair of site and address that found room:

    update_tags   a number derived from address, kernel and site; 0: the element is empty
    update_sites  number of the kernel << 32 | number of the site
    updates       how many lanes updated the address
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf.record import Record, replace

if TYPE_CHECKING:
    from gpubpf.session.session import Session

MAPS = ("update_tags", "update_sites", "updates")


_MIX = np.uint64(0x9E3779B97F4A7C15)  # in the tags of gpubpf_updates.h


class Updates(Record):
    """The updates by one or several sites of a kernel since the beginning.

    counts  the updates of each address
    blocks  how many blocks ran the kernel
    """

    counts: Mapping[int, int]
    blocks: int = 0

    @property
    def addresses(self) -> int:
        """The number of distinct addresses."""
        return len(self.counts)

    @property
    def hottest(self) -> int:
        """The updates of the address with the most updates."""
        return max(self.counts.values())

    @property
    def total(self) -> int:
        """The updates of all addresses."""
        return sum(self.counts.values())

    @classmethod
    def sum(cls, some: Iterable[Updates]) -> Updates:
        """Return the updates by all of the sites, which belong to one kernel."""
        counts: dict[int, int] = {}
        blocks = 0
        for one in some:
            blocks = max(blocks, one.blocks)
            for address, count in one.counts.items():
                counts[address] = counts.get(address, 0) + count
        return cls(counts, blocks)


def read_updates(session: Session) -> dict[tuple[int, int, str], dict[int, Updates]]:
    """Return the updates by (process, GPU, mangled kernel name), then by site number.

    Empty if the programs do not count them.
    """
    by_context: dict[tuple[int, int, int], list[Any]] = {}
    for name in MAPS if session.has_map(MAPS[0]) else ():
        for instance in session.instances(name):
            key = (instance.process, instance.context, instance.gpu)
            by_context.setdefault(key, []).append(instance.array)
    names, blocks = (session.kernel_names(), session.blocks()) if by_context else ({}, {})
    found: dict[tuple[int, int, str], dict[int, Updates]] = {}
    for (process, _, gpu), arrays in by_context.items():
        if len(arrays) != len(MAPS):
            continue
        for (kernel, site), one in decode_updates(*arrays).items():
            if mangled := names.get(process, {}).get(kernel):
                sites = found.setdefault((process, gpu, mangled), {})
                one = replace(one, blocks=blocks.get((process, gpu, mangled), 0))
                sites[site] = Updates.sum((sites[site], one)) if site in sites else one
    return found


def decode_updates(tags: Any, sites: Any, updates: Any) -> dict[tuple[int, int], Updates]:
    """Return the updates in one context, by (kernel number, site number), from the arrays of its maps."""
    there = np.flatnonzero(tags)
    order = there[np.argsort(sites[there], kind="stable")]
    keys, first = np.unique(sites[order], return_index=True)
    if not len(keys):
        return {}
    addresses = np.split(tags[order] - (sites[order] * _MIX | np.uint64(1)), first[1:])
    counts = np.split(updates[order], first[1:])
    return {
        (key >> 32, key & 0xFFFFFFFF): Updates(dict(zip(at.tolist(), count.tolist(), strict=True)))
        for key, at, count in zip(keys.tolist(), addresses, counts, strict=True)
    }
