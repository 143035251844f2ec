"""Describe the functions that a GPU runtime library exports: where their arguments are, and what their results
mean.

A function is one row of text: its name, then `key=value` pairs in any order, separated by spaces:

    hipLaunchKernel kernel=0 grid=1:packed block=3:packed shared=s0 stream=s1
    hipStreamQuery returns=query stream=0

The keys `symbol`, `returns` and `kernel_name` describe the function (`ApiFunction`). Every other key is one
of FIELDS, and its value says where that field is:

    0 to 5          a register: rdi, rsi, rdx, rcx, r8, r9 (System V ABI, 3.2.3)
    s0, s1, …       an 8-byte word on the stack, counted from the one above the return address
    2@24            the value 24 bytes into the memory that an argument points to
    #4              the number 4

The suffixes `:packed` and `:items` are explained at `ArgumentPlace`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from functools import cached_property

from gpubpf.errors import UsageError
from gpubpf.record import Record

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
KERNEL_NAMING = ("registered", "by_name", "by_handle")
REGISTERS = 6  # arguments in registers; the seventh is the first word on the stack
_PLACE = re.compile(
    r"(?:#(?P<number>\d+)|(?P<stack>s?)(?P<index>\d+)(?:@(?P<offset>\d+))?)(?P<kinds>(?::\w+)*)\Z"
)


class ArgumentPlace(Record):
    """The location of a call's field.

    `argument`: 0 to 5 for registers, 6 and up for words on the stack. `offset`: the value is this many bytes
    into the memory that the argument points to. `number`: the value itself, if the call has no such argument.

    `grid` and `block` are three 32-bit values: consecutive in memory, or in three arguments. If `packed`,
    they are a `dim3` passed by value: x | y << 32 in one argument, z in the next. `items`: the grid is given
    in threads, not in blocks. Other fields have 64 bits, except `shared` and `copy`: only their low 32 bits count.
    """

    argument: int = 0
    offset: int | None = None
    number: int | None = None
    packed: bool = False
    items: bool = False


class ApiFunction(Record):
    """One function of a runtime library.

    `symbol`: the symbol that libraries export, without its version. `name`: the name that users write;
    several functions share it if versions of a library export the function under different symbols. `group`:
    one of GROUPS. `layout`: the places of its arguments.

    `result`: one of RESULTS. A `status` is an error unless it is 0. A `query` may also return "not ready",
    which is no error. `other` is not an error code.

    `kernel_name`: one of KERNEL_NAMING if a call tells which kernel a handle stands for, because it registers
    the handle with a name, looks it up by name, or gets it for another handle. Otherwise empty.
    """

    name: str
    symbol: str
    group: str
    layout: str = ""
    result: str = "status"
    kernel_name: str = ""

    @cached_property
    def places(self) -> Mapping[str, ArgumentPlace]:
        """The place of each field. Raise ValueError if the layout is invalid."""
        found = {}
        for part in self.layout.split():
            field, _, text = part.partition("=")
            if field not in FIELDS:
                raise ValueError(f"{field!r} is not a field")
            found[field] = _parse_place(text)
        return found


def _parse_place(text: str) -> ArgumentPlace:
    match = _PLACE.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a place")
    kinds = match["kinds"].split(":")[1:]
    if not set(kinds) <= {"packed", "items"}:
        raise ValueError(f"{text!r} is not a place")
    if match["number"] is not None:
        return ArgumentPlace(number=int(match["number"]))
    index = int(match["index"])
    if not match["stack"] and index >= REGISTERS:
        raise ValueError(f"{text!r}: arguments from the seventh on are on the stack")
    return ArgumentPlace(
        index + REGISTERS if match["stack"] else index,
        None if match["offset"] is None else int(match["offset"]),
        packed="packed" in kinds,
        items="items" in kinds,
    )


class Api(Record):
    """The host API of a GPU vendor. A function's number is its index in `functions`.

    `libraries`: names or paths, for `BPF.attach_uprobe`. `errors`: prefix of function names → names of error
    codes by number; the longest matching prefix counts. `not_ready`: the result of a `query` whose work has not
    finished.
    """

    name: str
    libraries: tuple[str, ...]
    functions: tuple[ApiFunction, ...]
    errors: Mapping[str, Mapping[int, str]]
    not_ready: int = 600  # hipErrorNotReady, cudaErrorNotReady, CUDA_ERROR_NOT_READY

    def choose(self, globs: Iterable[str] = ()) -> tuple[tuple[int, ApiFunction], ...]:
        """Return the functions whose name or group matches a glob, with their numbers.

        Without globs, return all functions except trivial ones. Raise UsageError if a glob matches nothing.
        """
        wanted = tuple(globs)
        if not wanted:
            return tuple((i, f) for i, f in enumerate(self.functions) if f.group != "trivial")
        for glob in wanted:
            if not any(_matches(f, glob) for f in self.functions):
                raise UsageError(
                    f"no function is named {glob!r}; give a glob such as '*Launch*', or one of {', '.join(GROUPS)}"
                )
        return tuple(
            (i, f) for i, f in enumerate(self.functions) if any(_matches(f, glob) for glob in wanted)
        )

    def failed(self, function: ApiFunction, value: int) -> bool:
        """Return whether this result of the function is an error."""
        if function.result == "other":
            return False
        return value != 0 and (function.result != "query" or value != self.not_ready)

    def error(self, function: ApiFunction, value: int) -> str:
        """Return the name of a result, such as hipErrorNoDevice, or the number if it has no name."""
        if function.result == "other":
            return f"{value:#x}"
        prefixes = [p for p in self.errors if function.name.removeprefix("__").startswith(p)]
        names = self.errors[max(prefixes, key=len)] if prefixes else {}
        return names.get(value, str(value))


def parse_functions(text: str) -> tuple[ApiFunction, ...]:
    """Parse rows as described above. A line `GROUP:` begins each group. Raise ValueError if a row is invalid."""
    functions: list[ApiFunction] = []
    group = ""
    for line in text.split("\n"):
        if not line:
            continue
        if line.endswith(":"):
            group = line[:-1]
            if group not in GROUPS:
                raise ValueError(f"{group!r} is not a group")
            continue
        name, *parts = line.split()
        own = {"symbol": name, "returns": "status", "kernel_name": ""}
        layout = []
        for part in parts:
            key, _, value = part.partition("=")
            if key in own:
                own[key] = value
            else:
                layout.append(part)
        if own["returns"] not in RESULTS or own["kernel_name"] not in ("", *KERNEL_NAMING):
            raise ValueError(f"{line.strip()!r} has an unknown value of returns or kernel_name")
        functions.append(
            ApiFunction(name, own["symbol"], group, " ".join(layout), own["returns"], own["kernel_name"])
        )
    return tuple(functions)


def parse_names(text: str) -> dict[int, str]:
    """Parse lines of a number and a name."""
    return {int(number): name for number, name in (line.split() for line in text.split("\n") if line)}


def _matches(function: ApiFunction, glob: str) -> bool:
    return function.group == glob or fnmatch.fnmatchcase(function.name, glob)
