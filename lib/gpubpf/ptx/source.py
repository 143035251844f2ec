"""Where the source of a statement is, by the `.file` and `.loc` directives (`-lineinfo`)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .module import Directive, Module, Statement

_FILE = re.compile(r'\.file\s+(\d+)\s+"((?:[^"\\]|\\.)*)"')
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")


def source_files(module: Module) -> dict[int, str]:
    """Names of source files by number, from the `.file` directives."""
    found = {}
    for item in module.items:
        if isinstance(item, Directive) and item.name == "file" and (match := _FILE.match(item.text)):
            found[int(match[1])] = match[2]
    return found


def source_lines(body: Sequence[Statement]) -> list[tuple[int, int]]:
    """File number and line of each statement, (0, 0) where there is none. Line 0 is the compiler's: the one before holds."""
    found = []
    current = 0, 0
    for statement in body:
        if isinstance(statement, Directive) and statement.name == "loc":
            match = _LOC.match(statement.text)
            if match and int(match[2]):
                current = int(match[1]), int(match[2])
        found.append(current)
    return found
