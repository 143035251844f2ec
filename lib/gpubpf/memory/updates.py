"""Count how often the atomic instructions of each site updated each address of global memory.

Device programs (gpubpf_updates.h) fill three maps, with one element per pair of site and address that found room:

    update_tags   a number derived from address, kernel and site; 0: the element is empty
    update_sites  number of the kernel << 32 | number of the site
    updates       how many lanes updated the address
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gpubpf.session.session import Session

MAPS = ("update_tags", "update_sites", "updates")


@dataclass(frozen=True)
class Updates:
    """The updates by one site since the beginning.

    addresses  distinct addresses
    hottest    updates of the address with the most updates
    total      updates of all addresses
    """

    addresses: int
    hottest: int
    total: int


def read_updates(session: Session) -> dict[tuple[int, int, str], dict[int, Updates]]:
    """Return the updates by (process, GPU, mangled kernel name), then by site number.

    Empty if the programs do not count them.
    """
    by_context: dict[tuple[int, int, int], list[Any]] = {}
    for name in MAPS if session.has_map(MAPS[0]) else ():
        for instance in session.instances(name):
            key = (instance.process, instance.context, instance.gpu)
            by_context.setdefault(key, []).append(instance.array)
    names = session.kernel_names() if by_context else {}
    found: dict[tuple[int, int, str], dict[int, Updates]] = {}
    for (process, _, gpu), arrays in by_context.items():
        if len(arrays) != len(MAPS):
            continue
        for (kernel, site), one in decode_updates(*arrays).items():
            if mangled := names.get(process, {}).get(kernel):
                sites = found.setdefault((process, gpu, mangled), {})
                sites[site] = _both(sites[site], one) if site in sites else one
    return found


def decode_updates(tags: Any, sites: Any, updates: Any) -> dict[tuple[int, int], Updates]:
    """Return the updates in one context, by (kernel number, site number), from the arrays of its maps."""
    there = np.flatnonzero(tags)
    order = there[np.argsort(sites[there], kind="stable")]
    keys, first = np.unique(sites[order], return_index=True)
    if not len(keys):
        return {}
    counts = updates[order]
    sums = np.add.reduceat(counts, first).tolist()
    most = np.maximum.reduceat(counts, first).tolist()
    numbers = np.diff(np.append(first, len(order))).tolist()
    return {
        (key >> 32, key & 0xFFFFFFFF): Updates(number, hottest, total)
        for key, number, hottest, total in zip(keys.tolist(), numbers, most, sums, strict=True)
    }


def _both(a: Updates, b: Updates) -> Updates:
    """Return the sum of the updates in two contexts, which have no addresses in common."""
    return Updates(a.addresses + b.addresses, max(a.hottest, b.hottest), a.total + b.total)
