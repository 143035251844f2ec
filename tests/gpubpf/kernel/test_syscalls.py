"""The numbers of system calls, compared with the C library's headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpubpf.kernel import syscalls

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/aarch64-linux-gnu/include/asm-generic/unistd.h"),
}
OTHER_NAMES = {"fstatat": "newfstatat", "umount": "umount2"}


@pytest.mark.parametrize("machine", syscalls.TABLES)
def test_numbers_are_those_of_the_headers(machine: str) -> None:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"no {header} (linux-libc-dev, or linux-libc-dev-arm64-cross)")
    found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", header.read_text(), re.M)
    table = syscalls.TABLES[machine]
    wrong = {
        name: number
        for name, number in found
        if name not in ("syscalls", "arch_specific_syscall", "sync_file_range2")
        and table.get(int(number)) not in (name, OTHER_NAMES.get(name))
    }
    assert wrong == {} and len(found) > 300
