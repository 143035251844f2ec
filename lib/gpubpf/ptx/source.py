"""Find the source line of each statement from the `.file` and `.loc` directives (`-lineinfo`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .module import Directive, Module, Statement

_FILE = re.compile(r'\.file\s+([0-9]{1,9})\s+"((?:[^"\\]|\\.)*)"')
_NUMBER = "([0-9]{1,9})"
_LOC = re.compile(rf"\.loc\s+{_NUMBER}\s+{_NUMBER}(?:\s+[0-9]+)?(?:.*\binlined_at\s+{_NUMBER}\s+{_NUMBER})?")
# Headers of the CUDA toolkit, wherever it is installed: users want the line that calls atomicAdd, not a line inside atomicAdd. nvcc
# writes their paths relative to its own directory.
_TOOLKIT = re.compile(r"/(?:targets/[^/]+|cuda[^/]*|nvidia/\w+)(?:/bin/\.\./?)?/include/")


def source_files(module: Module) -> dict[int, str]:
    """Return the names of source files by number, from the `.file` directives."""
    found = {}
    for item in module.items:
        if isinstance(item, Directive) and item.name == "file" and (match := _FILE.match(item.text)):
            found[int(match[1])] = match[2]
    return found


def source_lines(body: Sequence[Statement], files: Mapping[int, str]) -> list[tuple[int, int]]:
    """Return the file number and line of each statement, (0, 0) if unknown.

    Line 0 marks compiler-generated code, which keeps the previous line. A statement of an inlined function gets the line in that
    function, or the line of the call if the function is in a header of the CUDA toolkit.
    """
    found = []
    current = 0, 0
    # The line of an inlined function → the line of the call. Outer calls come first.
    calls: dict[tuple[int, int], tuple[int, int]] = {}
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
