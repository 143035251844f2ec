"""Where the arguments of kernels are, from a code object's metadata.

    places(code)["_Z5scalePfi"]        # (ArgumentPlace(0, 8), ArgumentPlace(8, 4)): offset and size in the kernarg segment, in bytes

Source: LLVM, "User Guide for AMDGPU Backend", Code Object V3 Metadata: a MessagePack map in an ELF note. It is untrusted.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from gpubpf.errors import ImageError
from gpubpf.gcn.code_object import CodeObject

_SHT_NOTE, _METADATA = 7, 32  # NT_AMDGPU_METADATA
_NOTE = struct.Struct("<III")  # bytes of the name, bytes of the content, type
_LARGEST = 1 << 26  # bytes of metadata
_HIDDEN = "hidden_"  # HIP's own arguments


class ArgumentPlace(NamedTuple):
    """Where an argument is in the kernarg segment, and its size: both in bytes."""

    offset: int
    size: int


def places(code: CodeObject) -> dict[str, tuple[ArgumentPlace, ...]]:
    """Return the arguments of each kernel, in the order of its parameters. A kernel without (intact) metadata is left out."""
    import msgpack

    found: dict[str, tuple[ArgumentPlace, ...]] = {}
    try:
        known = msgpack.unpackb(_metadata(code), strict_map_key=False)
        kernels = known["amdhsa.kernels"]
    except (ImageError, ValueError, TypeError, KeyError, struct.error, msgpack.UnpackException):
        return {}
    for kernel in kernels if isinstance(kernels, list) else ():
        try:
            arguments = [one for one in kernel.get(".args", ()) if not _kind(one).startswith(_HIDDEN)]
            found[kernel[".symbol"].removesuffix(".kd")] = tuple(map(_place, arguments))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return found


def _kind(argument: dict[str, Any]) -> str:
    return str(argument[".value_kind"])


def _place(argument: dict[str, Any]) -> ArgumentPlace:
    offset, size = argument[".offset"], argument[".size"]
    if not (isinstance(offset, int) and isinstance(size, int) and offset >= 0 and 0 < size < 1 << 16):
        raise ValueError
    return ArgumentPlace(offset, size)


def _metadata(code: CodeObject) -> bytes:
    """Return the metadata, which is in an ELF note; b"" if the code object has none."""
    for section in code.elf.sections:
        if section.type != _SHT_NOTE or section.size > _LARGEST:
            continue
        data, at = code.elf.contents(section), 0
        while at + _NOTE.size <= len(data):
            name, content, kind = _NOTE.unpack_from(data, at)
            begin = at + _NOTE.size + (name + 3 & ~3)
            if kind == _METADATA and data[at + _NOTE.size :][:name] == b"AMDGPU\0":
                return data[begin : begin + content]
            at = begin + (content + 3 & ~3)
    return b""
