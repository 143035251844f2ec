"""Where the source of a statement is, by the `.file` and `.loc` directives (`-lineinfo`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .module import Directive, Module, Statement

_FILE = re.compile(r'\.file\s+(\d+)\s+"((?:[^"\\]|\\.)*)"')
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)(?:\s+\d+)?(?:.*\binlined_at\s+(\d+)\s+(\d+))?")
# Headers of the CUDA toolkit, wherever it is installed: what calls atomicAdd is meant, not how atomicAdd is written. nvcc names them
# from its own directory on.
_TOOLKIT = re.compile(r"/(?:targets/[^/]+|cuda[^/]*|nvidia/\w+)(?:/bin/\.\./?)?/include/")


def source_files(module: Module) -> dict[int, str]:
    """Names of source files by number, from the `.file` directives."""
    found = {}
    for item in module.items:
        if isinstance(item, Directive) and item.name == "file" and (match := _FILE.match(item.text)):
            found[int(match[1])] = match[2]
    return found


def source_lines(body: Sequence[Statement], files: Mapping[int, str]) -> list[tuple[int, int]]:
    """File number and line of each statement, (0, 0) where there is none. Line 0 is the compiler's: the one before holds. In an
    inlined function it is that function's line, but of one in a header of the CUDA toolkit the line of the call."""
    found = []
    current = 0, 0
    calls: dict[
        tuple[int, int], tuple[int, int]
    ] = {}  # where what is there was inlined: the outermost comes first
    for statement in body:
        if isinstance(statement, Directive) and statement.name == "loc":
            match = _LOC.match(statement.text)
            if match and int(match[2]):
                current = int(match[1]), int(match[2])
                if match[3]:
                    calls[current] = int(match[3]), int(match[4])
                for _ in range(len(calls)):
                    if not (
                        _TOOLKIT.search(files.get(current[0], "")) and current in calls and calls[current][1]
                    ):
                        break
                    current = calls[current]
        found.append(current)
    return found
