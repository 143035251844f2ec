"""The headers of the library that C text includes: gpubpf.h, and headers with parts of programs.

bcc rewrites map methods only in the text itself, not in included files. So each line that includes a header of the library other than
gpubpf.h is replaced by the header's text.
"""

from __future__ import annotations

import re
from pathlib import Path

from gpubpf.ebpf.bytecode import without_comments
from gpubpf.record import Record

INCLUDE = Path(__file__).parent.parent / "include"
_ANY_LINE = r"\s*#\s*include\s*<(gpubpf\w*\.h)>\s*"
_LINE = r"\s*#\s*include\s*<(gpubpf_\w+\.h)>\s*"


class ExpandedText(Record):
    """C text with its headers in place. `origins`: the origin of each line, as (name of the header or "", line from 1)."""

    text: str
    origins: tuple[tuple[str, int], ...]

    def origin(self, line: int) -> tuple[str, int]:
        return self.origins[line - 1] if 0 < line <= len(self.origins) else ("", line)


def content() -> bytes:
    """Return the contents of all headers, which are part of the key of every compiled text."""
    return b"\0".join(path.read_bytes() for path in sorted(INCLUDE.glob("*.h")))


def self_contained(text: str) -> str:
    """Return the text with each header of the library, gpubpf.h too, in place of the first line that includes it."""
    seen: set[str] = set()

    def insert(text: str) -> list[str]:
        lines: list[str] = []
        for line, code in zip(text.split("\n"), without_comments(text).split("\n"), strict=True):
            included = re.fullmatch(_ANY_LINE, code)
            if included is None or not (INCLUDE / included[1]).exists():
                lines.append(line)
            elif included[1] not in seen:
                seen.add(included[1])
                lines += insert((INCLUDE / included[1]).read_text())
        return lines

    return "\n".join(insert(text))


def expand(text: str, name: str = "") -> ExpandedText:
    """Return `text` with the headers that it includes in place. `name`: the header that the text is from, if any.

    An include of an unknown header stays as it is.
    """
    lines: list[str] = []
    origins: list[tuple[str, int]] = []
    plain = without_comments(text).split("\n")
    for number, (line, code) in enumerate(zip(text.split("\n"), plain, strict=True), 1):
        included = re.fullmatch(_LINE, code)
        if included is not None and (INCLUDE / included[1]).exists():
            header = expand((INCLUDE / included[1]).read_text(), included[1])
            lines += header.text.split("\n")
            origins += header.origins
        else:
            lines.append(line)
            origins.append((name, number))
    return ExpandedText("\n".join(lines), tuple(origins))
