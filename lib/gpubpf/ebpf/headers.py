"""The headers that C text includes: gpubpf.h, and those beside it that hold parts of programs.

bcc finds what is done with maps only in the text that it is given, not in what that includes. So a header of ours other than
gpubpf.h is put in place of the line that includes it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gpubpf.ebpf.bytecode import without_comments

INCLUDE = Path(__file__).parent.parent / "include"
_LINE = re.compile(r"\s*#\s*include\s*<(gpubpf_\w+\.h)>\s*")


@dataclass(frozen=True)
class ExpandedText:
    """C text with its headers in it. `origins`: where each line comes from, as (name of the header or "", line from 1)."""

    text: str
    origins: tuple[tuple[str, int], ...]

    def origin(self, line: int) -> tuple[str, int]:
        return self.origins[line - 1] if 0 < line <= len(self.origins) else ("", line)


def content() -> bytes:
    """What is in all of them: what is made of a C text depends on it."""
    return b"\0".join(path.read_bytes() for path in sorted(INCLUDE.glob("*.h")))


def expand(text: str, name: str = "") -> ExpandedText:
    """The text, of the header `name` or one that was given, with the headers that it includes. One that is not there stays."""
    lines: list[str] = []
    origins: list[tuple[str, int]] = []
    plain = without_comments(text).split("\n")
    for number, (line, code) in enumerate(zip(text.split("\n"), plain, strict=True), 1):
        included = _LINE.fullmatch(code)
        if included is not None and (INCLUDE / included[1]).exists():
            header = expand((INCLUDE / included[1]).read_text(), included[1])
            lines += header.text.split("\n")
            origins += header.origins
        else:
            lines.append(line)
            origins.append((name, number))
    return ExpandedText("\n".join(lines), tuple(origins))
