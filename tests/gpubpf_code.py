"""Whether the code of a process is that of its files."""

from __future__ import annotations

import os
import re

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
