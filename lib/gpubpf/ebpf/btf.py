"""Read BTF, the types in an eBPF object file and in the Linux kernel (Documentation/bpf/btf.rst).

    types = Types(section)
    [types.name(member.type) for member in types.members(number)]
    types.layout(number)                        # as maps.dtype takes it

Everything read is untrusted: numbers of types, sizes and offsets are checked before they are used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from gpubpf.errors import ImageError

INT, POINTER, ARRAY, STRUCT, UNION, ENUM, FORWARD, TYPEDEF, VOLATILE, CONST, RESTRICT = range(1, 12)
FUNCTION, PROTOTYPE, VAR, SECTION, FLOAT, TAG, TYPE_TAG, ENUM64 = range(12, 20)
COMPOSITE = (STRUCT, UNION)
_TRANSPARENT = (TYPEDEF, VOLATILE, CONST, RESTRICT, TYPE_TAG)
_HEADER = struct.Struct("<HBBIIIII")  # magic, version, flags, header size; types and strings: offset, size
_TYPE = struct.Struct("<III")  # name, info, size or type; members have the same layout
_MAGIC = 0xEB9F
# Bytes that follow a type: in all, and for each member.
_MORE = {INT: (4, 0), ARRAY: (12, 0), STRUCT: (0, 12), UNION: (0, 12), ENUM: (0, 8), PROTOTYPE: (0, 8)}
_MORE |= {VAR: (4, 0), SECTION: (0, 12), TAG: (4, 0), ENUM64: (0, 12)}
_DEEPEST = 32  # maximum nesting of types
MOST_TEXT = 4096  # bytes of a string; names and lines of C are shorter
_SIGNED, _CHAR, _BOOL = 1, 2, 4  # encoding of an INT
_LARGEST = 1 << 30  # bytes of a type
_MOST_FIELDS = 4096  # fields of a layout, including the fields of fields


class Member(NamedTuple):
    """A member of a structure or union.

    offset  in bits
    bits    the size of a bit field in bits; 0 for other members
    """

    name: str
    type: int
    offset: int
    bits: int


class Types:
    """The types of a BTF section, by number from 1. Number 0 is void. Raises ImageError if the section is not valid BTF."""

    def __init__(self, data: bytes) -> None:
        try:
            magic, _, _, header, types, size, strings, length = _HEADER.unpack_from(data)
        except struct.error:
            raise _damaged("it is cut short") from None
        begin, end = header + types, header + types + size
        if magic != _MAGIC:
            raise _damaged("its first bytes are wrong")
        if end > len(data) or header + strings + length > len(data):
            raise _damaged("it is cut short")
        self._data = data
        self._strings = data[header + strings :][:length]
        self._at = [0, *self._places(begin, end)]

    def _places(self, begin: int, end: int) -> Iterator[int]:
        at = begin
        while at < end:
            if at + 12 > end:
                raise _damaged("it is cut short")
            info = int.from_bytes(self._data[at + 4 : at + 8], "little")
            kind = info >> 24 & 31
            if not INT <= kind <= ENUM64:
                raise _damaged(f"it has a type of kind {kind}")
            yield at
            fixed, each = _MORE.get(kind, (0, 0))
            at += 12 + fixed + each * (info & 0xFFFF)
        if at > end:
            raise _damaged("it is cut short")

    def __len__(self) -> int:
        return len(self._at)

    def _type(self, number: int) -> tuple[int, int, int]:
        """Return (name, info, size or type)."""
        if number == 0:
            return 0, 0, 0
        if not 0 < number < len(self._at):
            raise _damaged(f"it has no type {number}")
        name, info, size = _TYPE.unpack_from(self._data, self._at[number])
        return name, info, size

    def string(self, offset: int) -> str:
        """Return the string at an offset; "" for an offset outside the section, and for a string of more than MOST_TEXT bytes."""
        end = self._strings.find(b"\0", offset, max(offset, 0) + MOST_TEXT)
        return self._strings[offset:end].decode("utf-8", "replace") if end >= 0 else ""

    def name(self, number: int) -> str:
        return self.string(self._type(number)[0])

    def kind(self, number: int) -> int:
        """Return the kind of a type, such as STRUCT; 0 for void."""
        return self._type(number)[1] >> 24 & 31

    def target(self, number: int) -> int:
        """Return the type that a pointer, typedef, qualifier, variable or function refers to."""
        return self._type(number)[2]

    def plain(self, number: int) -> int:
        """Return a type without typedefs and qualifiers."""
        for _ in range(_DEEPEST):
            if self.kind(number) not in _TRANSPARENT:
                return number
            number = self.target(number)
        raise _damaged(f"type {number} refers to itself")

    def members(self, number: int) -> list[Member]:
        """Return the members of a structure or union; none for other types."""
        _, info, _ = self._type(number)
        if info >> 24 & 31 not in COMPOSITE:
            return []
        found = []
        for name, member, offset in self._items(number, _TYPE):
            bits = offset >> 24 if info >> 31 else 0
            found.append(Member(self.string(name), member, offset & 0xFFFFFF if info >> 31 else offset, bits))
        return found

    def _items(self, number: int, item: struct.Struct) -> Iterator[tuple[int, ...]]:
        at, count = self._at[number] + 12, self._type(number)[1] & 0xFFFF
        return item.iter_unpack(self._data[at : at + item.size * count])

    def values(self, number: int) -> list[tuple[str, int]]:
        """Return the names and values of an enumeration; none for other types."""
        _, info, _ = self._type(number)
        signed = info >> 31
        if info >> 24 & 31 == ENUM:
            kind = struct.Struct("<Ii" if signed else "<II")
            return [(self.string(name), value) for name, value in self._items(number, kind)]
        if info >> 24 & 31 != ENUM64:
            return []
        found = [(self.string(name), low | high << 32) for name, low, high in self._items(number, _TYPE)]
        return [(name, value - (value >> 63 << 64) if signed else value) for name, value in found]

    def array(self, number: int) -> tuple[int, int]:
        """Return (type of the elements, number of elements) of an array."""
        if self.kind(number) != ARRAY:
            raise _damaged(f"type {number} is not an array")
        element, _, count = _TYPE.unpack_from(self._data, self._at[number] + 12)
        return element, count

    def encoding(self, number: int) -> int:
        """Return the encoding of an INT."""
        return self._data[self._at[number] + 15] & 15

    def signed(self, number: int) -> bool:
        """Return whether a plain type is a signed number."""
        kind = self.kind(number)
        if kind == INT:
            return bool(self.encoding(number) & _SIGNED)
        return kind in (ENUM, ENUM64) and bool(self._type(number)[1] >> 31)

    def size(self, number: int) -> int:
        """Return the size of a type in bytes."""
        factor = 1
        for _ in range(_DEEPEST):
            number = self.plain(number)
            if self.kind(number) != ARRAY:
                size = 8 if self.kind(number) == POINTER else self._sized(number)
                if factor * size > _LARGEST:
                    raise _damaged(f"type {number} is too large")
                return factor * size
            number, count = self.array(number)
            factor *= count
        raise _damaged(f"type {number} refers to itself")

    def _sized(self, number: int) -> int:
        sized = (INT, STRUCT, UNION, ENUM, ENUM64, FLOAT, SECTION)
        return self._type(number)[2] if self.kind(number) in sized else 0

    def layout(self, number: int) -> Any:
        """Return a type as `maps.dtype` takes it; None for a type that has no such form, such as one with bit fields."""
        return self._layout(number, 0, [_MOST_FIELDS])

    def _layout(self, number: int, depth: int, left: list[int]) -> Any:
        number = self.plain(number)
        kind, size = self.kind(number), self.size(number)
        left[0] -= 1
        if depth > _DEEPEST or left[0] < 0:
            return None
        if kind == ARRAY:
            dimensions = []
            while self.kind(number) == ARRAY:
                number, count = self.array(number)
                number = self.plain(number)
                dimensions.append(count)
            depth += len(dimensions)
            if depth > _DEEPEST:  # NumPy has at most 64 dimensions, those of all levels together
                return None
            if self.kind(number) == INT and self._is_char(number):
                text = f"|S{dimensions.pop()}"
                return [text, dimensions] if dimensions else text
            element = self._layout(number, depth, left)
            return [element, dimensions] if element is not None else None
        if kind in COMPOSITE:
            fields: list[list[Any]] = []
            for member in self.members(number):
                inner = self._layout(member.type, depth + 1, left)
                if inner is None or member.bits or member.offset % 8:
                    return None
                if not member.name and isinstance(inner, dict):  # its fields belong to the outer type
                    fields += [[name, one, member.offset // 8 + at] for name, one, at in inner["fields"]]
                elif member.name:
                    fields.append([member.name, inner, member.offset // 8])
            return {"fields": fields, "size": size}
        if kind == FLOAT and size in (4, 8):
            return f"<f{size}"
        if size not in (1, 2, 4, 8):
            return None
        if kind == INT and self.encoding(number) & _BOOL and size == 1:
            return "|b1"
        sign = "i" if self.signed(number) else "u"
        return f"|{sign}1" if size == 1 else f"<{sign}{size}"

    def _is_char(self, number: int) -> bool:
        return bool(self.encoding(number) & _CHAR) or self.name(number) == "char"

    @cached_property
    def variables(self) -> dict[str, int]:
        """The types of variables, by name."""
        return {self.name(n): self.target(n) for n in range(1, len(self)) if self.kind(n) == VAR}

    @cached_property
    def by_name(self) -> dict[str, list[int]]:
        """Name → numbers of the types with that name. Names have no flavor: `task_struct___old` counts as `task_struct`."""
        found: dict[str, list[int]] = {}
        for number in range(1, len(self)):
            if name := essential_name(self.name(number)):
                found.setdefault(name, []).append(number)
        return found


LINES, RELOCATIONS = 1, 2  # parts of .BTF.ext: where instructions are from; CO-RE relocations


def extension(data: bytes, part: int) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """Yield the records of a part of .BTF.ext. Yield nothing without such a part. Raises ImageError.

    A record has the name of its ELF section, as an offset for `Types.string`, and the record's first four numbers.

    part: LINES or RELOCATIONS
    """
    if not data:
        return
    try:
        (header,) = struct.unpack_from("<I", data, 4)
        if header < 8 + 8 * (part + 1):
            return
        offset, size = struct.unpack_from("<II", data, 8 + 8 * part)
        at, end = header + offset, header + offset + size
        if not size:
            return
        (width,) = struct.unpack_from("<I", data, at)
        at += 4
        if width < 16 or end > len(data):
            raise _damaged("a record has the wrong size")
        while at + 8 <= end:
            section, count = struct.unpack_from("<II", data, at)
            at += 8
            for _ in range(count):
                yield section, struct.unpack_from("<IIII", data, at)
                at += width
    except struct.error:
        raise _damaged("it is cut short") from None


def essential_name(name: str) -> str:
    """Return the name of a type without the flavor that libbpf ignores: what follows three underscores."""
    return name.partition("___")[0] or name


def _damaged(why: str) -> ImageError:
    return ImageError(f"its type information (BTF) is damaged: {why}; compile it again with -g")
