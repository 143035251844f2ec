"""Finds code objects for one GPU in files that hipcc or AMD's libraries have put them in."""

import struct
from pathlib import Path

MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


def code_objects(path: Path, gpu: str) -> list[bytes]:
    """Give the code objects of one GPU in a file: of all bundles in it, or the file itself if it is one."""
    data = path.read_bytes()
    if data[:4] == b"\x7fELF" and struct.unpack_from("<H", data, 18)[0] == 224:  # EM_AMDGPU
        return [data]
    found = []
    begin = data.find(MAGIC)
    while begin >= 0:
        (count,) = struct.unpack_from("<Q", data, begin + len(MAGIC))
        at = begin + len(MAGIC) + 8
        for _ in range(count):
            offset, size, length = struct.unpack_from("<QQQ", data, at)
            target = data[at + 24 : at + 24 + length].decode()
            at += 24 + length
            if gpu in target and size:
                found.append(data[begin + offset : begin + offset + size])
        begin = data.find(MAGIC, begin + len(MAGIC))
    return found
