"""A file whose pages never arrive: a FUSE file system that answers everything except reads (Documentation/filesystems/fuse.rst)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

SIZE = 1 << 20  # bytes of the file
_GETATTR, _OPEN, _READ, _FORGET, _FLUSH, _INTERRUPT, _INIT = 3, 14, 15, 2, 25, 36, 26
_IN, _OUT = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")  # struct fuse_in_header, fuse_out_header
_ATTRIBUTES = struct.pack("<QII6Q3I7I", 60, 0, 0, 1, SIZE, 8, 0, 0, 0, 0, 0, 0, 0o100644, 1, 0, 0, 0, 4096, 0)
_MNT_FORCE, _MNT_DETACH = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


def cannot_mount() -> str:
    """Return why FUSE file systems cannot be mounted here; "" if they can."""
    if os.geteuid() != 0:
        return "mounting FUSE file systems needs root"
    return "" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "this kernel has no FUSE"


@contextlib.contextmanager
def unanswered(
    directory: Path, closes: bool = True, user: int = 0, name: str = "unanswered", opens: bool = True
) -> Iterator[Path]:
    """Yield a file of SIZE bytes that can be opened and mapped. Reads wait until the block ends; without `closes`, so does closing,
    and without `opens`, opening.

    user: who has mounted it, as fusermount3 says it to the kernel."""
    place = directory / name
    place.touch()
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=100000,user_id={user},group_id={user},allow_other".encode()
    if _libc.mount(b"unanswered", os.fsencode(place), b"fuse", 0, options) != 0:
        os.close(device)
        raise OSError(ctypes.get_errno(), "cannot mount a FUSE file system")
    server = threading.Thread(target=_serve, args=(device, closes, opens), daemon=True)
    server.start()
    try:
        os.stat(place)  # asks for the size
        yield place
    finally:
        # With MNT_FORCE, all requests fail, so that readers continue and the server's read ends.
        _libc.umount2(os.fsencode(place), _MNT_FORCE)
        _libc.umount2(os.fsencode(place), _MNT_DETACH)
        server.join(10)
        os.close(device)


def _serve(device: int, closes: bool, opens: bool) -> None:
    while True:
        try:
            request = os.read(device, 1 << 20)
        except OSError as error:
            if error.errno == errno.EINTR:
                continue
            return
        _, kind, unique, *_ = _IN.unpack_from(request)
        if kind == _INIT:
            answer = struct.pack("<IIIIHHIIHH8I", 7, 31, 4096, 0, 8, 8, 4096, 1, 0, 0, *[0] * 8)
        elif kind == _GETATTR:
            answer = _ATTRIBUTES
        elif kind == _OPEN and opens:
            answer = struct.pack("<QII", 1, 0, 0)
        elif kind in (_OPEN, _READ, _FORGET, _INTERRUPT) or (kind == _FLUSH and not closes):
            continue
        else:
            _answer(device, _OUT.pack(_OUT.size, -errno.ENOSYS, unique))
            continue
        _answer(device, _OUT.pack(_OUT.size + len(answer), 0, unique) + answer)


def _answer(device: int, message: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):  # who asked has been interrupted
        os.write(device, message)
