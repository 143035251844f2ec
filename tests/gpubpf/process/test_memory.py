"""Memory of a process that never arrives: the tool refuses to read it, and waits for nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import gpubpf_fuse
from gpubpf.process import proc, started_with
from gpubpf.process.address_space import Memory, Unreadable

pytestmark = [
    pytest.mark.without_driver,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs x86-64"),
]
needs_fuse = pytest.mark.skipif(bool(gpubpf_fuse.cannot_mount()), reason=gpubpf_fuse.cannot_mount())
T = TypeVar("T")

PAGES = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(int argc, char **argv) {
    char *at = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(at, "anonymous", 9);
    if (!strcmp(argv[1], "userfaultfd")) {
        int fault = syscall(SYS_userfaultfd, O_CLOEXEC);
        struct uffdio_api api = {UFFD_API, 0, 0};
        struct uffdio_register range = {{(unsigned long)at + 4096, 4096}, UFFDIO_REGISTER_MODE_MISSING, 0};
        if (fault < 0 || ioctl(fault, UFFDIO_API, &api) || ioctl(fault, UFFDIO_REGISTER, &range)) at = 0;
    } else {
        int file = strcmp(argv[1], "memfd") ? open(argv[1], O_RDWR) : memfd_create("m", 0);
        if (!strcmp(argv[1], "memfd")) ftruncate(file, 4096);
        mmap(at + 4096, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, 0);
    }
    printf("%ld\n", (long)at);
    fflush(stdout);
    return read(0, at, 1) < 0;
}
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with a page of memory that begins with "anonymous", and a page of the kind that its argument names."""
    place = tmp_path_factory.mktemp("pages")
    (place / "pages.c").write_text(PAGES)
    subprocess.run(["gcc", "-w", "-o", place / "pages", place / "pages.c"], check=True)
    return place / "pages"


@contextlib.contextmanager
def running(program: Path, kind: object) -> Iterator[tuple[int, int]]:
    """Yield the ID of a process and the address of its two pages."""
    process = subprocess.Popen([program, str(kind)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if (at := int(process.stdout.readline())) == 0:
            pytest.skip("userfaultfd is not allowed here")
        yield process.pid, at
    finally:
        process.kill()
        process.communicate()


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call, or raise its exception. The call must not wait longer than this."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert results or errors, "it waits"
    if errors:
        raise errors[0]
    return results[0]


@pytest.fixture(params=[True, False], ids=["queried", "read"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mappings are found by asking the kernel for one, and on an older kernel by reading the list."""
    if not request.param:

        def refused(*_: object) -> None:
            raise OSError(errno.ENOTTY, "")

        monkeypatch.setattr(proc.fcntl, "ioctl", refused)


@needs_fuse
@pytest.mark.usefixtures("way")
def test_a_page_of_a_file_that_a_program_serves(pages: Path, tmp_path: Path) -> None:
    with gpubpf_fuse.unanswered(tmp_path) as file, running(pages, file) as (pid, at), Memory(pid) as memory:
        assert memory.read(at, 9) == b"anonymous"
        for address, size in ((at + 4096, 1), (at + 8191, 1), (at + 4096, 8192)):
            with pytest.raises(Unreadable, match=rf"pid {pid} maps a file .* may never answer"):
                within(60, lambda address=address, size=size: memory.some(address, size))
        with pytest.raises(Unreadable):
            within(60, lambda: memory.write(at + 4096, b"x"))
        assert len(within(60, lambda: memory.some(at, 8192))) == 4096  # up to that page
        with pytest.raises(OSError, match="not mapped"):
            within(60, lambda: memory.write(at + 4000, bytes(200)))


@needs_fuse
def test_an_environment_that_never_arrives_is_not_read(tmp_path: Path) -> None:
    program = tmp_path / "large"
    subprocess.run(["gcc", "-w", "-o", program, Path(__file__).with_name("large.c"), "-ldl"], check=True)
    with gpubpf_fuse.unanswered(tmp_path) as file:
        command = [program, "served", file, "-"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            with pytest.raises(Unreadable):
                within(60, lambda: started_with.environment(process.pid, ["HOME"]))
            with pytest.raises(Unreadable):
                within(60, lambda: started_with.arguments(process.pid, 100))
            process.kill()


@pytest.mark.usefixtures("way")
def test_memory_files_and_local_files_are_read(pages: Path) -> None:
    for kind in ("memfd", pages):
        with running(pages, kind) as (pid, at), Memory(pid) as memory:
            assert len(memory.some(at, 8192)) == 8192
            memory.write(at + 4095, b"ab")
            assert memory.read(at + 4095, 2) == b"ab"


def test_a_page_that_userfaultfd_leaves_out_is_not_waited_for(pages: Path) -> None:
    with running(pages, "userfaultfd") as (pid, at), Memory(pid) as memory:
        assert within(60, lambda: memory.some(at + 4096, 8)) == b""
        assert memory.read(at, 9) == b"anonymous"


def test_nothing_is_mapped_there(pages: Path) -> None:
    with running(pages, "memfd") as (pid, _), Memory(pid) as memory:
        for address in (0, 8, (1 << 47) - 4096, (1 << 64) - 8, 1 << 64):
            assert memory.some(address, 8) == b""
