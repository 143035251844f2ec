"""Tile IR: the code of tile kernels, such as cuTile's. It is written for blocks and has no threads, so no programs can be put into it.

The driver or NVIDIA's tileiras makes machine code of it. The format: the CUDA Tile IR specification, "Binary Format".
"""

from __future__ import annotations

from gpubpf.errors import ImageError

MAGIC = b"\x7fTileIR\0"
IN_CUBINS = b"___NV_TILE_LAUNCH_META_DATA___"  # a symbol of cubins that tileiras made
REASON = "Tile IR (cuTile)"  # why kernels cannot be instrumented
_STRINGS, _FUNCTIONS = 1, 2  # kinds of sections
_ALIGNED = 0x80  # in the kind of a section: the alignment follows
_ENTRY, _HINTS = 2, 4  # flags of a function
_HINTS_FOLLOW = (
    13,
    5,
)  # from this version on, every entry has hints, and every function an array of attributes
_INTEGER, _BOOL, _TYPE, _STRING, _ARRAY, _DICTIONARY, _OF_ARCHITECTURES = 1, 3, 4, 5, 6, 10, 11  # attributes
_DEEPEST = 8  # attributes in attributes


def kernel_names(data: bytes) -> list[str]:
    """Return the names of the kernels in Tile IR bytecode, as they are in the driver. Raises ImageError."""
    if not data.startswith(MAGIC):
        raise ImageError("it is not Tile IR; name a program, library, fatbin or cubin")
    reader = _Reader(data, len(MAGIC))
    version = reader.byte(), reader.byte()
    reader.at += 2
    sections: dict[int, tuple[int, int]] = {}
    while kind := reader.byte():
        size = reader.number()
        if kind & _ALIGNED:
            reader.align(reader.number())
        sections[kind & ~_ALIGNED] = reader.at, size
        reader.skip(size)
    if not {_STRINGS, _FUNCTIONS} <= sections.keys():
        raise ImageError("its Tile IR has no functions; build it again")
    numbers = _entries(_Reader(data, sections[_FUNCTIONS][0]), version)
    return [_string(data, sections[_STRINGS], number) for number in numbers]


class _Reader:
    """Reads numbers from bytes. Raises ImageError at the end of the bytes."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def byte(self) -> int:
        self.skip(1)
        return self._data[self.at - 1]

    def number(self) -> int:
        """Read a number in groups of seven bits, the lowest first."""
        value = 0
        for shift in range(0, 64, 7):
            group = self.byte()
            value |= (group & 0x7F) << shift
            if not group & 0x80:
                return value
        raise ImageError("its Tile IR is damaged; build it again")

    def skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise ImageError("its Tile IR is truncated; build it again")

    def align(self, to: int) -> None:
        self.skip(-self.at % max(to, 1))


def _string(data: bytes, section: tuple[int, int], number: int) -> str:
    """Return a string of the table of strings, by its number."""
    start, size = section
    reader = _Reader(data, start)
    count = reader.number()
    reader.at += -(reader.at - start) % 4  # offsets are aligned in the section, which is aligned itself
    offsets, text = reader.at, reader.at + 4 * count
    if number >= count or text > start + size or start + size > len(data):
        raise ImageError("its Tile IR names a string that is not there; build it again")
    begin, end = (
        int.from_bytes(data[offsets + 4 * k : offsets + 4 * k + 4], "little")
        if k < count
        else start + size - text
        for k in (number, number + 1)
    )
    return data[text + begin : text + end].decode("utf-8", "replace")


def _entries(reader: _Reader, version: tuple[int, int]) -> list[int]:
    """Return the numbers of the names of the functions that are kernels."""
    found = []
    for _ in range(reader.number()):
        name, _type, flags = reader.number(), reader.number(), reader.byte()
        reader.number()  # its place in the debug information
        later = version >= _HINTS_FOLLOW
        if flags & _ENTRY:
            found.append(name)
            if later or flags & _HINTS:
                _skip_attribute(reader)
        if later:
            _skip_attribute(reader)
        reader.skip(reader.number())
    return found


def _skip_attribute(reader: _Reader, depth: int = 0) -> None:
    kind = reader.byte()
    if kind == _INTEGER:
        reader.number()
        reader.number()
    elif kind == _BOOL:
        reader.byte()
    elif kind in (_TYPE, _STRING):
        reader.number()
    elif kind in (_ARRAY, _DICTIONARY, _OF_ARCHITECTURES) and depth < _DEEPEST:
        for _ in range(reader.number()):
            if kind != _ARRAY:
                reader.number()
            _skip_attribute(reader, depth + 1)
    else:
        raise ImageError(
            "its Tile IR has attributes that are not known; a newer version of gpubpf may know them"
        )
