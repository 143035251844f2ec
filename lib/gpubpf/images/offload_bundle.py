"""Find code objects for AMD GPUs in files: in programs and libraries that hipcc built, in bundles, and as separate files.

    for data in code_objects_of_file("app"):
        CodeObject(data)

A bundle is `__CLANG_OFFLOAD_BUNDLE__`, the number of entries, and for each entry the offset and size of its code and its target's
name. Source: "Clang Offload Bundler" in Clang's documentation. A compressed bundle (`CCOB`) contains one of these.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator

from gpubpf import elf
from gpubpf.errors import ImageError
from gpubpf.gcn.code_object import EM_AMDGPU
from gpubpf.images import fatbin

MAGIC, COMPRESSED = b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB"
_SECTION = ".hip_fatbin"
_LONGEST_NAME = 256
_MOST_ENTRIES = 256
_LARGEST = 512 << 20  # bytes of a bundle, decompressed


def code_objects_of_file(path: str | os.PathLike[str]) -> list[bytes]:
    """Return the code objects in a file; none if it has another format. Raises ImageError for a damaged bundle."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return code_objects_of(elf.OpenFile(file.fileno(), os.fstat(file.fileno()).st_size))
    except OSError:
        return []


def code_objects_of(source: elf.ByteSource) -> list[bytes]:
    """Return the code objects in the bytes of a file. Raises OSError if it cannot be read, and ImageError for a damaged bundle."""
    begin = source.read(0, min(source.size, len(MAGIC)))
    if begin.startswith((MAGIC, COMPRESSED)):
        return list(code_objects(source.read(0, source.size)))
    if not begin.startswith(b"\x7fELF"):
        return []
    program = elf.Elf(source)
    if program.machine == EM_AMDGPU:
        return [source.read(0, source.size)]
    sections = [section for section in program.sections if section.name == _SECTION]
    return [data for section in sections for data in code_objects(program.contents(section))]


def code_objects(data: bytes) -> Iterator[bytes]:
    """Yield the code objects in consecutive bundles, which zeros may separate. Raises ImageError."""
    at = 0
    following = dict.fromkeys((MAGIC, COMPRESSED), -1)  # the next place of each magic number
    while at < len(data):
        if data.startswith(COMPRESSED, at):
            inner, size = _decompressed(data, at)
            if not inner.startswith(MAGIC):
                raise ImageError("compressed code objects are damaged; build them again")
            yield from code_objects(inner)
            at += size
        elif data.startswith(MAGIC, at):
            end = at
            for offset, size, name in _entries(data, at):
                elf.check_range(at + offset, size, len(data))
                end = max(end, at + offset + size)
                if "amdgcn" in name and size:
                    yield data[at + offset : at + offset + size]
            at = max(end, at + len(MAGIC))
        else:
            for magic, place in following.items():
                if place < at:
                    found = data.find(magic, at)
                    following[magic] = found if found >= 0 else len(data)
            at = min(following.values())


def _entries(data: bytes, at: int) -> Iterator[tuple[int, int, str]]:
    """Yield the offset, size and target of each entry of the bundle at `at`. Raises ImageError."""
    at += len(MAGIC)
    elf.check_range(at, 8, len(data))
    (count,) = struct.unpack_from("<Q", data, at)
    if count > _MOST_ENTRIES:
        raise ImageError(f"a bundle of {count} code objects is damaged; build it again")
    at += 8
    for _ in range(count):
        elf.check_range(at, 24, len(data))
        offset, size, length = struct.unpack_from("<3Q", data, at)
        elf.check_range(at + 24, min(length, _LONGEST_NAME + 1), len(data))
        if length > _LONGEST_NAME:
            raise ImageError("a bundle of code objects is damaged; build it again")
        yield offset, size, data[at + 24 : at + 24 + length].decode("ascii", "replace")
        at += 24 + length


def _decompressed(data: bytes, at: int) -> tuple[bytes, int]:
    """Return the content of the compressed bundle at `at`, and the bundle's size in bytes. Raises ImageError."""
    elf.check_range(at, 32, len(data))
    version, method = struct.unpack_from("<HH", data, at + 4)
    if version == 1:  # it does not state its size
        (size,), whole, header = struct.unpack_from("<I", data, at + 8), len(data) - at, 20
    elif version == 2:
        (whole, size), header = struct.unpack_from("<II", data, at + 8), 24
    elif version == 3:
        (whole, size), header = struct.unpack_from("<QQ", data, at + 8), 32
    else:
        raise ImageError(
            f"compressed code objects of version {version} are unknown; build without compression"
        )
    elf.check_range(at, whole, len(data))
    if not 0 < size <= _LARGEST or whole < header:
        raise ImageError("compressed code objects are damaged; build them again")
    stored = data[at + header : at + whole]
    if method == 1 and version > 1:
        return fatbin.decompress_zstd(stored, size), whole
    content, used = (_zstd_frame if method == 1 else _zlib_stream)(stored, size)
    return content, header + used if version == 1 else whole


def _zlib_stream(data: bytes, size: int) -> tuple[bytes, int]:
    """Decompress the stream at the beginning of `data`. Return at most `size` bytes, and the stream's length. Raises ImageError."""
    inflater = zlib.decompressobj()
    try:
        content = inflater.decompress(data, size + 1)
    except zlib.error:
        raise ImageError("compressed code objects are damaged; build them again") from None
    return content[:size], len(data) - len(inflater.unused_data)


def _zstd_frame(data: bytes, size: int) -> tuple[bytes, int]:
    """Do the same as `_zlib_stream` for zstd."""
    import zstandard

    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    content, at = bytearray(), 0
    try:
        while not reader.eof and at < len(data) and len(content) <= size:
            content += reader.decompress(data[at : at + 1024])  # may decompress to 32 MiB
            at += 1024
    except (zstandard.ZstdError, MemoryError):
        raise ImageError("compressed code objects are damaged; build them again") from None
    return bytes(content[:size]), min(at, len(data)) - len(reader.unused_data)
