"""Find the offsets of structure members in the kernel's BTF type information, /sys/kernel/btf/vmlinux.

The format is described in the kernel's Documentation/bpf/btf.rst. To be fast, `member` does not walk all types. It finds the offset
of the structure's name among the strings, and searches the types for that number.
"""

from __future__ import annotations

import functools
import struct
from pathlib import Path

from gpubpf.ebpf.btf import Types
from gpubpf.errors import Error
from gpubpf.record import Record

_FILE = Path("/sys/kernel/btf/vmlinux")
# Magic, version, flags, size of the header, types (offset, length), strings (offset, length).
_HEADER = struct.Struct("<HBBIIIII")
# Name, info, size. Members of a structure have the same layout: name, type, offset.
_TYPE = struct.Struct("<III")
_MAGIC, _STRUCT = 0xEB9F, 4
_BIT_FIELDS = 1 << 31  # in `info`: the highest byte of the members' offsets is the size of a bit field


class Member(Record):
    """A member of a structure.

    offset: offset of the byte with the member's first bit.
    shift: number of that bit in the byte.
    bits: size of a bit field; 0 if the member is not a bit field.
    """

    offset: int
    shift: int = 0
    bits: int = 0


def member(structure: str, name: str, kernel: bytes | None = None) -> Member:
    """Return the member `name` of `struct structure`. `kernel`: BTF data; None: that of the running kernel.

    Raises Error if the kernel has no type information, or the structure has no such member.
    """
    missing = Error(
        f"the kernel's type information has no {structure}.{name}; use a kernel with CONFIG_DEBUG_INFO_BTF"
    )
    try:
        data = kernel if kernel is not None else _FILE.read_bytes()
        magic, _, _, header, at, size, strings, length = _HEADER.unpack_from(data)
    except (OSError, struct.error):
        raise missing from None
    begin, end = header + at, header + at + size
    text = data[header + strings : header + strings + length]
    names = [text.find(b"\0" + word.encode() + b"\0") + 1 for word in (structure, name)]
    if magic != _MAGIC or not all(names) or end > len(data):
        raise missing
    pattern = names[0].to_bytes(4, "little")
    found = data.find(pattern, begin, end)
    while found >= 0:
        if (found - begin) % 4 == 0 and (result := _member_at(data, found, end, names[1])) is not None:
            return result
        found = data.find(pattern, found + 1, end)
    raise missing


def _member_at(data: bytes, at: int, end: int, name: int) -> Member | None:
    """Return the member if a structure is at offset `at`; None if the number of its name occurs there by chance."""
    if at + _TYPE.size > end:
        return None
    _, info, size = _TYPE.unpack_from(data, at)
    count = info & 0xFFFF
    if info >> 24 & 31 != _STRUCT or at + _TYPE.size * (1 + count) > end:
        return None
    for number in range(1, count + 1):
        member_name, _, offset = _TYPE.unpack_from(data, at + _TYPE.size * number)
        bits = offset >> 24 if info & _BIT_FIELDS else 0
        first = offset & 0xFFFFFF if info & _BIT_FIELDS else offset
        if member_name == name and first <= 8 * size:  # a flexible array may begin where the structure ends
            return Member(first // 8, first % 8, bits)
    return None


@functools.cache
def types() -> Types:
    """Return all types of the running kernel. Raises Error if it has no type information."""
    try:
        return Types(_FILE.read_bytes())
    except OSError:
        raise Error(
            "the kernel has no type information, which CO-RE relocations require; use a kernel with CONFIG_DEBUG_INFO_BTF"
        ) from None
