"""The bytes of the filters in gpubpf.h, which programs take as parameters: which threads a program runs for."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpubpf.ebpf.maps import MapDefinition

EVERY_INDEX = ((0, 2**32 - 1),) * 3  # ranges of x, y and z
_SIZE = 48
_HOST_FILTER_FIELDS = ["cgroup", "comm", "tid", "device", "inode"]


def filter_bytes(block: Sequence[tuple[int, int]], thread: Sequence[tuple[int, int]]) -> bytes:
    """Return a `struct gpu_filter` for inclusive ranges of the indices x, y and z, each from 0 to 2^32 - 1."""
    return b"".join(
        lo.to_bytes(4, "little") + (hi - lo).to_bytes(4, "little") for lo, hi in (*block, *thread)
    )


def host_filter_bytes(cgroup: int | None, comm: str | None, tid: int | None) -> bytes:
    """Return a `struct gpu_host_filter`: the id of a cgroup, a thread's name, a thread number in this PID namespace."""
    name = (comm or "").encode()[:15].ljust(16, b"\0")
    namespace = os.stat("/proc/self/ns/pid")
    numbers = (tid or 0, namespace.st_dev, namespace.st_ino)
    return (cgroup or 0).to_bytes(8, "little") + name + b"".join(n.to_bytes(8, "little") for n in numbers)


def is_filter(definition: MapDefinition) -> bool:
    """Return whether a parameter is a `struct gpu_filter`."""
    return _fields(definition) == ["block", "thread"] and definition.value_size == _SIZE


def is_host_filter(definition: MapDefinition) -> bool:
    """Return whether a parameter is a `struct gpu_host_filter`."""
    return _fields(definition) == _HOST_FILTER_FIELDS and definition.value_size == _SIZE


def _fields(definition: MapDefinition) -> list[str]:
    kind = definition.value_type
    return [field[0] for field in kind["fields"]] if isinstance(kind, dict) else []
