"""For tests of host programs: the stub that an agent has, in this process, and native code run as an agent does.

For tests of other users and of machines without a GPU: how to run a command there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpubpf.ebpf.bytecode import HOST_STUB, Program
from gpubpf.kernel import privileges
from gpubpf.linux import host_programs
from gpubpf.lower import host_code
from gpubpf.lower.native import Native

# What runs a command as an ordinary user; the second one, so that it cannot gain a capability either.
ORDINARY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
ROOTLESS = [*ORDINARY, "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]

_CHECKOUT = Path(__file__).resolve().parents[2]
needs_open_checkout = pytest.mark.skipif(
    any(not place.stat().st_mode & 0o001 for place in (_CHECKOUT, *_CHECKOUT.parents)),
    reason="other users cannot read this checkout",
)
needs_bpf = pytest.mark.skipif(not privileges.capable(), reason="needs CAP_BPF")
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]


@contextlib.contextmanager
def open_directory() -> Iterator[Path]:
    """A temporary directory that every user can read; pytest's own are private."""
    with tempfile.TemporaryDirectory(prefix="gpubpf-test-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def executable(file: int) -> int:
    address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, file, 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    return int(address)


@contextlib.contextmanager
def open_stub() -> Iterator[tuple[int, Callable[..., None]]]:
    """The stub that an agent has, and a function that calls it."""
    file = os.memfd_create("stubs", os.MFD_ALLOW_SEALING)
    os.write(file, HOST_STUB.ljust(mmap.PAGESIZE, b"\xcc"))
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, host_programs._SEALS)
    yield file, ctypes.CFUNCTYPE(None, *[ctypes.c_uint64] * 6)(executable(file))
    os.close(file)


def helpers() -> dict[int, Any]:
    """What an agent gives native code."""

    def comm(buffer: int, size: int) -> int:
        name = Path("/proc/self/comm").read_bytes()[:-1]
        ctypes.memmove(buffer, name.ljust(size, b"\0"), size)
        return 0

    number = ctypes.c_uint64
    plain = ctypes.CFUNCTYPE(number)
    return {
        5: plain(time.monotonic_ns),
        8: plain(lambda: 0),
        14: plain(lambda: os.getpid() << 32 | threading.get_native_id()),
        15: plain(lambda: os.getgid() << 32 | os.getuid()),
        16: ctypes.CFUNCTYPE(number, ctypes.c_void_p, ctypes.c_uint32)(comm),
        80: plain(lambda: 80),
        123: ctypes.CFUNCTYPE(number, ctypes.c_int32)(lambda level: [1, 80, 0][min(level, 2)]),
    }


class Agent:
    """Runs native code as an agent does."""

    def __init__(self, native: Native, bases: Mapping[str, int], params: Mapping[str, bytes]) -> None:
        self.file = os.memfd_create("code")
        os.write(self.file, native.code.ljust(mmap.PAGESIZE, b"\xcc"))
        self.run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(executable(self.file))
        self.helpers = helpers()
        self.params = {name: ctypes.create_string_buffer(data, len(data)) for name, data in params.items()}
        self.native, self.bases = native, bases

    def __call__(self, *fields: int) -> None:
        values = []
        for value in self.native.values:
            if value.kind == "context":
                values.append(fields[value.number])
            elif value.kind == "map_base":
                values.append(self.bases[value.map])
            elif value.kind == "param":
                values.append(ctypes.addressof(self.params[value.map]))
            else:
                values.append(ctypes.cast(self.helpers[value.number], ctypes.c_void_p).value)
        self.run((ctypes.c_uint64 * len(values))(*values))


def native_of(program: Program, name: str = "on_launch") -> Native:
    made = host_code.lower(program, program.functions[name])
    return Native.from_json(made.to_json())


_ENTER = """
mount -t tmpfs -o mode=755 tmpfs "$1"
for node in null zero full random urandom tty; do touch "$1/$node"; mount --bind "/dev/$node" "$1/$node"; done
mkdir -m 1777 "$1/shm"
ln -s /proc/self/fd "$1/fd"
mount --rbind "$1" /dev
shift
exec "$@"
"""


def without_gpu(place: Path) -> list[str]:
    """Return the beginning of a command that runs with a /dev of its own, in which there is no GPU and none can be made.

    As root, the command is also another user's, with no capability. `place` is an empty folder. Skip where this is not possible.
    """
    root = os.geteuid() == 0
    spaces = ["unshare", "--mount", *([] if root else ["--user", "--map-root-user"])]
    prefix = [*spaces, "sh", "-ec", _ENTER, "sh", str(place), *(ROOTLESS if root else [])]
    try:
        done = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"needs {error.filename}")
    if done.returncode:
        pytest.skip(f"cannot make a /dev of its own: {done.stderr.strip().splitlines()[-1:]}")
    return prefix
