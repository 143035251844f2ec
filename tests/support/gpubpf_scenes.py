"""What makes programs wait for a known reason: files on a disk, CPUs that others take, little memory, a network that loses."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpubpf_commands import words

HERE = Path(__file__).parents[1] / "gpubpf" / "calls" / "scenes"
# Calls that wait while the kernel looks at how a program uses its memory, as some machines have it do (DAMON, huge pages).
LAYOUT = {"mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "madvise": 28}


class UntoldError(Exception):
    """The kernel did not report some switches of the thread, and the tool says so."""


def told(test: Callable[..., None]) -> Callable[..., None]:
    """Repeat a test until the kernel reports every switch. Some kernels sometimes skip a switch from the idle task."""

    @functools.wraps(test)
    def again(*arguments: Any, **named: Any) -> None:
        for _ in range(20):
            with contextlib.suppress(UntoldError):
                return test(*arguments, **named)
        pytest.fail("the kernel never tells of all switches")

    return again


def build(place: Path) -> None:
    """The library and the program that makes calls to it, and a file of 16 MB."""
    flags = "-O1 -Wall -Wextra -Werror -D_GNU_SOURCE"
    for command in (
        f"gcc {flags} -shared -fPIC -Wl,-soname,libscenes.so {{here}}/library.c -o {{place}}/libscenes.so",
        f"gcc {flags} {{here}}/scenes.c -o {{place}}/scenes -L{{place}} -lscenes -Wl,-rpath,$ORIGIN",
    ):
        subprocess.run(words(command, here=HERE, place=place), check=True)
    (place / "file").write_bytes(os.urandom(1 << 20) * 16)


def uncached(path: Path) -> str:
    """A file that is on the disk only."""
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return str(path)


def needs_disk(file: str) -> None:
    """That a file can be read past the cache, and the CPU does something else meanwhile."""
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("files of this file system cannot be read past the cache")
    device = os.stat(file).st_dev
    if not Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").exists():
        pytest.skip("the file is on no block device")


@contextlib.contextmanager
def hogs(cpu: int) -> Iterator[None]:
    """Two processes that want a CPU for themselves."""
    spin = f"import os; os.sched_setaffinity(0, [{cpu}])\nprint(flush=True)\nwhile True: pass"
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            hog = stack.enter_context(subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE))
            stack.callback(hog.kill)
            assert hog.stdout is not None and hog.stdout.readline()
        yield


@contextlib.contextmanager
def map_reader(cpu: int) -> Iterator[None]:
    """A process that is in the middle of a bpf(2) call for a map, on that CPU, whenever nothing else wants it: it looks through a map
    of many empty buckets."""
    read = f"""import os
from gpubpf.kernel import bpf_syscall
file = bpf_syscall.create_map(bpf_syscall.HASH, 4, 8, 1 << 20, 1)
os.sched_setaffinity(0, [{cpu}])
os.nice(19)
print(flush=True)
while True:
    bpf_syscall.read_all(file, bpf_syscall.HASH, 4, 8, 1)
"""
    with subprocess.Popen([sys.executable, "-c", read], stdout=subprocess.PIPE) as reader:
        try:
            assert reader.stdout is not None and reader.stdout.readline()
            yield
        finally:
            reader.kill()


@contextlib.contextmanager
def small_group() -> Iterator[Path]:
    """A memory control group of 12 MB. Skips the test where there are none."""
    name = f"gpubpf-test-{os.getpid()}"
    for root, limit in ((Path("/sys/fs/cgroup"), "memory.max"), (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes")):  # fmt: skip
        group = root / name
        with contextlib.suppress(OSError):
            group.mkdir()
        if not (group / limit).exists():
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        (group / limit).write_text(str(12 << 20))
        try:
            yield group
        finally:
            group.rmdir()
        return
    pytest.skip("no control groups of memory here")


def filled(group: Path, place: Path) -> tuple[str, ...]:
    """What runs a command in the group when that is full of a file that was written, which has to go."""
    write = f"dd if=/dev/zero of={place}/written bs=1M count=16 conv=fsync status=none"
    return ("sh", "-c", f'echo $$ > {group}/cgroup.procs; {write}; exec "$@"', "sh")


class Wire:
    """Two network name spaces with a wire between them, and in the second a server that sends back what it gets."""

    SERVER = """
import socket, threading
def serve(peer):
    while byte := peer.recv(1):
        peer.send(byte)
with socket.create_server(("10.77.0.2", 5000)) as server:
    print("up", flush=True)
    while True:
        threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
    CLIENT = """
import os, socket, sys
connection = socket.create_connection(("10.77.0.2", 5000))
os.dup2(connection.fileno(), 3)
os.set_inheritable(3, True)
print("up", flush=True)
os.read(0, 1)
os.execv(sys.argv[1], sys.argv[1:])
"""
    OTHER = """
import socket
connection = socket.create_connection(("10.77.0.2", 5000))
print("up", flush=True)
input()
connection.send(b"1")
print(connection.recv(1), flush=True)
"""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.near, self.far = (f"gpubpf-{side}-{os.getpid()}" for side in ("a", "b"))
        for name in (self.near, self.far):
            self.ip("netns", "add", name)
            stack.callback(self.ip, "netns", "del", name)
        self.ip("-n", self.near, "link", "add", "va", "type", "veth", "peer", "name", "vb", "netns", self.far)
        for name, link, address in ((self.near, "va", "10.77.0.1/24"), (self.far, "vb", "10.77.0.2/24")):
            self.ip("-n", name, "addr", "add", address, "dev", link)
            self.ip("-n", name, "link", "set", link, "up")
        self.start(stack, self.far, self.SERVER)

    def ip(self, *arguments: str) -> str:
        return subprocess.run(["ip", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout

    def start(self, stack: contextlib.ExitStack, name: str, program: str) -> subprocess.Popen[str]:
        """In a name space; it says "up" when it is."""
        command = ["ip", "netns", "exec", name, sys.executable, "-c", program]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        return process

    def cut(self, whether: bool) -> None:
        """What is sent to the server goes to nobody."""
        address = "02:00:00:00:00:99"
        if not whether:
            address = self.ip("-n", self.far, "link", "show", "vb").split("link/ether ")[1].split()[0]
        where = ("10.77.0.2", "lladdr", address, "dev", "va", "nud", "permanent")
        self.ip("-n", self.near, "neigh", "replace", *where)

    def sent_again(self) -> int:
        """Segments that were sent again, of all connections to the server."""
        lines = self.ip("netns", "exec", self.near, "cat", "/proc/net/snmp").splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return int(dict(zip(names, values, strict=True))["RetransSegs"])
