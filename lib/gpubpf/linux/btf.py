"""Where members of the kernel's structures lie: from its type information, /sys/kernel/btf/vmlinux.

The format is that of the kernel's Documentation/bpf/btf.rst. Only what is asked for is looked at: a structure is found by its name's
place in the strings, not by walking all types.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from gpubpf.errors import Error

_FILE = Path("/sys/kernel/btf/vmlinux")
_HEADER = struct.Struct(
    "<HBBIIIII"
)  # magic, version, flags, header, types: offset, length, strings: offset, length
_TYPE = struct.Struct(
    "<III"
)  # name, info, size; a structure's members have the same form: name, type, offset
_MAGIC, _STRUCT = 0xEB9F, 4
_BIT_FIELDS = 1 << 31  # of info: a member's offset has the bits of its field in the highest byte


@dataclass(frozen=True)
class Member:
    """`offset` in bytes, of the byte that holds its first bit; `shift`: that bit in it. `bits`: 0 where it is no bit field."""

    offset: int
    shift: int = 0
    bits: int = 0


def member(structure: str, name: str, kernel: bytes | None = None) -> Member:
    """A member of `struct structure`. `kernel`: its type information, else that of the running one. Raises Error where that is not
    there, or does not have it."""
    missing = Error(
        f"this kernel does not tell where {structure}.{name} is; use one with CONFIG_DEBUG_INFO_BTF"
    )
    try:
        data = kernel if kernel is not None else _FILE.read_bytes()
        magic, _, _, header, at, size, strings, length = _HEADER.unpack_from(data)
    except (OSError, struct.error):
        raise missing from None
    begin, end = header + at, header + at + size
    text = data[header + strings : header + strings + length]
    places = [text.find(b"\0" + word.encode() + b"\0") + 1 for word in (structure, name)]
    if magic != _MAGIC or not all(places) or end > len(data):
        raise missing
    pattern = places[0].to_bytes(4, "little")
    found = data.find(pattern, begin, end)
    while found >= 0:
        if (found - begin) % 4 == 0 and (place := _look(data, found, end, places[1])) is not None:
            return place
        found = data.find(pattern, found + 1, end)
    raise missing


def _look(data: bytes, at: int, end: int, name: int) -> Member | None:
    """The member in what may be a structure of the right name: the same number stands elsewhere, too."""
    if at + _TYPE.size > end:
        return None
    _, info, size = _TYPE.unpack_from(data, at)
    count = info & 0xFFFF
    if info >> 24 & 31 != _STRUCT or at + _TYPE.size * (1 + count) > end:
        return None
    for number in range(1, count + 1):
        called, _, offset = _TYPE.unpack_from(data, at + _TYPE.size * number)
        bits = offset >> 24 if info & _BIT_FIELDS else 0
        first = offset & 0xFFFFFF if info & _BIT_FIELDS else offset
        if called == name and first < 8 * size:
            return Member(first // 8, first % 8, bits)
    return None
