"""Tables of functions that a GPU's runtime exports: where their arguments lie, and what their results mean (docs/amd.md).

A layout is a string of `field=place`, parted by spaces:

    kernel=0 grid=1:packed block=3:packed shared=s0 stream=s1

A place is `0` to `5` for rdi, rsi, rdx, rcx, r8, r9 (System V ABI, 3.2.3), `s0` and so on for the 8-byte words on the stack above the
return address, `#4` for the number 4, or `2@24` for what lies 24 bytes into the memory that an argument points to.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from gpubpf.errors import UsageError

GROUPS = (
    "launch",
    "memory",
    "copy",
    "sync",
    "stream",
    "event",
    "graph",
    "module",
    "device",
    "other",
    "trivial",
)
FIELDS = ("kernel", "grid", "block", "shared", "stream", "bytes", "copy", "count", "out", "name")
RESULTS = ("status", "query", "other")
REGISTERS = 6  # arguments in them; the next is the first word on the stack
_PLACE = re.compile(
    r"(?:#(?P<number>\d+)|(?P<stack>s?)(?P<index>\d+)(?:@(?P<offset>\d+))?)(?P<kinds>(?::\w+)*)\Z"
)


@dataclass(frozen=True)
class Place:
    """Where a field of a call lies.

    `argument`: 0 to 5 are registers, 6 and on the words on the stack. `offset`: of a value in the memory that the argument points to.
    `number`: the value itself, without a place. Of `grid` and `block`: three 32-bit values, one after the other in memory; in three
    arguments; or `packed`, a `dim3` by value: x | y << 32 in one argument, z in the next. `items`: a grid in threads, not in blocks.
    Other fields are 64 bits, but `shared` and `copy`, of which the lower 32 count.
    """

    argument: int = 0
    offset: int | None = None
    number: int | None = None
    packed: bool = False
    items: bool = False


@dataclass(frozen=True)
class Function:
    """One function. `symbol`: as libraries export it, without version; `name`: as users write it; `group`: of GROUPS; `result`:
    of RESULTS. Several may have one name, where versions of a library export it under different symbols."""

    name: str
    symbol: str
    group: str
    layout: str = ""
    result: str = "status"

    @cached_property
    def places(self) -> Mapping[str, Place]:
        """By field. Raises ValueError."""
        found = {}
        for part in self.layout.split():
            field, _, text = part.partition("=")
            if field not in FIELDS:
                raise ValueError(f"{field!r} is no field")
            found[field] = _place(text)
        return found


def _place(text: str) -> Place:
    match = _PLACE.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no place")
    kinds = match["kinds"].split(":")[1:]
    if not set(kinds) <= {"packed", "items"}:
        raise ValueError(f"{text!r} is no place")
    if match["number"] is not None:
        return Place(number=int(match["number"]))
    index = int(match["index"])
    if not match["stack"] and index >= REGISTERS:
        raise ValueError(f"{text!r}: arguments from the seventh on are on the stack")
    return Place(
        index + REGISTERS if match["stack"] else index,
        None if match["offset"] is None else int(match["offset"]),
        packed="packed" in kinds,
        items="items" in kinds,
    )


@dataclass(frozen=True)
class Api:
    """A GPU vendor's host API. The place of a function in `functions` is its number.

    `libraries`: names as `attach_uprobe` takes them. `errors`: by the beginning of functions' names, number → name.
    `ok`: results of a `query` that are no errors; of a `status` 0 alone is none.
    """

    tool: str
    libraries: tuple[str, ...]
    functions: tuple[Function, ...]
    errors: Mapping[str, Mapping[int, str]]
    ok: tuple[int, ...] = (0, 600)

    def choose(self, globs: Iterable[str] = ()) -> tuple[tuple[int, Function], ...]:
        """Those whose names match, or whose group is named, with their numbers; without globs all but trivial ones. Raises
        UsageError."""
        wanted = tuple(globs)
        if not wanted:
            return tuple((i, f) for i, f in enumerate(self.functions) if f.group != "trivial")
        for glob in wanted:
            if not any(_is(f, glob) for f in self.functions):
                raise UsageError(
                    f"no function is named {glob!r}; give a glob such as '*Launch*', or one of {', '.join(GROUPS)}"
                )
        return tuple((i, f) for i, f in enumerate(self.functions) if any(_is(f, glob) for glob in wanted))

    def failed(self, function: Function, value: int) -> bool:
        """Whether a function's result says that it failed."""
        if function.result == "other":
            return False
        return value not in self.ok if function.result == "query" else value != 0

    def error(self, function: Function, value: int) -> str:
        """The name of a result, such as hipErrorNoDevice; the number where it has none."""
        if function.result == "other":
            return f"{value:#x}"
        prefixes = [p for p in self.errors if function.name.removeprefix("__").startswith(p)]
        names = self.errors[max(prefixes, key=len)] if prefixes else {}
        return names.get(value, str(value))


def table(
    text: str,
    symbols: Mapping[str, str] | None = None,
    queries: Collection[str] = (),
    other: Collection[str] = (),
) -> tuple[Function, ...]:
    """Functions from a text: a line `GROUP:`, then one of name and layout for each. `symbols`: of those whose names are others;
    `queries`, `other`: those of other results than `status`. Raises ValueError."""
    made: list[Function] = []
    group = ""
    for line in text.split("\n"):
        if not line:
            continue
        if line.endswith(":"):
            group = line[:-1]
            if group not in GROUPS:
                raise ValueError(f"{group!r} is no group")
            continue
        name, _, layout = line.strip().partition(" ")
        result = "query" if name in queries else "other" if name in other else "status"
        made.append(Function(name, (symbols or {}).get(name, name), group, layout, result))
    return tuple(made)


def numbered(text: str) -> dict[int, str]:
    """From lines of a number and a name."""
    return {int(number): name for number, name in (line.split() for line in text.split("\n") if line)}


def _is(function: Function, glob: str) -> bool:
    return function.group == glob or fnmatch.fnmatchcase(function.name, glob)
