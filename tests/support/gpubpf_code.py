"""Whether the code of a process is that of its files, and of a library that of its file."""

from __future__ import annotations

import mmap
import os
import re
import time
from pathlib import Path

from gpubpf.process import address_space


def changed(pid: int, libraries: str) -> int:
    """Return how many bytes of code differ, of libraries whose paths match a regular expression; breakpoints do not count."""
    found = 0
    with address_space.Memory(pid) as memory:
        for m in address_space.mappings(pid):
            if m.code and re.search(libraries, m.path):
                with open(m.path, "rb") as file:
                    expected = os.pread(file.fileno(), m.end - m.start, m.offset)
                held = memory.read(m.start, len(expected))
                for page in (slice(at, at + 4096) for at in range(0, len(held), 4096)):
                    if held[page] != expected[page]:
                        found += sum(a != b != 0xCC for a, b in zip(expected[page], held[page], strict=True))
    return found


def wait_until_no_probe_is_in(library: Path) -> None:
    """Wait at most 10 s. The kernel may remove uprobes only after their tool has ended; until then, new programs cannot be traced."""
    for _ in range(200):
        with open(library, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
            with mapped:  # as a program would map it
                if mapped[:] == file.read():
                    return
        time.sleep(0.05)
