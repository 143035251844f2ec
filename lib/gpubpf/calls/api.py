"""Describe the functions that a GPU runtime library exports: where their arguments are, and what their results
mean.

`cuda()` and `hip()` read these descriptions from cuda.txt and hip.txt. A line `GROUP:` begins each group of
functions. A function is one row: its name, then `key=value` pairs in any order, separated by spaces:

    hipLaunchKernel kernel=0 grid=1:packed block=3:packed shared=s0 stream=s1
    hipStreamQuery returns=query stream=0
    cuMemcpyAsync{_v2}[_ptsz] stream=3 bytes=2

A suffix in braces belongs to the symbol, but not to the name that users write: the headers of CUDA add `_v2` with
macros. A suffix in brackets stands for a second function: `cuLaunchKernel[_ptsz]` means cuLaunchKernel and
cuLaunchKernel_ptsz, which uses the per-thread default stream.

The keys `symbol`, `returns` and `kernel_name` describe the function (`ApiFunction`). Every other key is one
of FIELDS, and its value says where that field is:

    0 to 5          a register: rdi, rsi, rdx, rcx, r8, r9 (System V ABI, 3.2.3)
    s0, s1, …       an 8-byte word on the stack, counted from the one above the return address
    2@24            the value 24 bytes into the memory that an argument points to
    #4              the number 4

The suffixes `:packed` and `:items` are explained at `ArgumentPlace`.

A line `errors PREFIX:` begins the error codes of the functions whose names begin with PREFIX: a number and a
name in each row. Lines that begin with `#` are comments.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path

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
_NAME = re.compile(
    r"(\w+)(?:\{(\w+)\})?(\w*)(?:\[(\w+)\])?\Z"
)  # name{suffix of the symbol}[suffix of a second function]


class ArgumentPlace(Record):
    """The location of a call's field.

    argument: 0 to 5 for registers, 6 and up for words on the stack.
    offset: the value is this many bytes into the memory that the argument points to; None: the argument is the value.
    number: the value itself, if the call has no such argument.
    packed: `grid` or `block` is a `dim3` passed by value: x | y << 32 in one argument, z in the next.
    items: the grid is given in threads, not in blocks.

    If they are not `packed`, `grid` and `block` are three 32-bit values: consecutive in memory, or in three arguments. Other fields
    have 64 bits, except `shared` and `copy`: only their low 32 bits count.
    """

    argument: int = 0
    offset: int | None = None
    number: int | None = None
    packed: bool = False
    items: bool = False


class ApiFunction(Record):
    """One function of a runtime library.

    symbol: the symbol that libraries export, without its version.
    name: the name that users write. Several functions share a name if versions of a library export the function
        under different symbols.
    group: one of GROUPS.
    layout: the places of its arguments.
    result: one of RESULTS. A `status` is an error unless it is 0. A `query` may also return "not ready", which is
        not an error. `other` is not an error code.
    kernel_name: one of KERNEL_NAMING if a call shows which kernel a handle stands for, because it registers the
        handle with a name, looks the handle up by name, or gets it for another handle; "" otherwise.
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

    libraries: names or paths, for `BPF.attach_uprobe`.
    errors: prefix of function names → names of error codes by number. The longest matching prefix counts.
    not_ready: the result of a `query` whose work has not finished.
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


@cache
def cuda() -> Api:
    """Return the host API of CUDA: the driver's and the runtime's functions."""
    return _read("CUDA", ("libcuda.so", "libcudart.so"))


@cache
def hip() -> Api:
    """Return the host API of HIP, with HIPRTC's functions."""
    return _read("HIP", ("libamdhip64.so", "libhiprtc.so"))


def _read(name: str, libraries: tuple[str, ...]) -> Api:
    text = Path(__file__).with_name(f"{name.lower()}.txt").read_text(encoding="utf-8")
    return Api(name, libraries, *parse(text))


def parse(text: str) -> tuple[tuple[ApiFunction, ...], dict[str, dict[int, str]]]:
    """Parse the text that describes an API, in the form that this module's docstring explains.

    Return its functions, and the names of its error codes: prefix of function names → number → name.
    Raise ValueError if a row is invalid.
    """
    functions: list[ApiFunction] = []
    errors: dict[str, dict[int, str]] = {}
    group = ""
    names: dict[int, str] | None = None  # of the error codes, below a line `errors PREFIX:`
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.endswith(":"):
            group, _, prefix = line[:-1].partition(" ")
            names = errors.setdefault(prefix, {}) if group == "errors" else None
            if names is None and line[:-1] not in GROUPS:
                raise ValueError(f"{line[:-1]!r} is not a group")
        elif names is not None:
            number, name = line.split()
            names[int(number)] = name
        else:
            functions.extend(_parse_functions(line, group))
    return tuple(functions), errors


def _parse_functions(row: str, group: str) -> list[ApiFunction]:
    """Parse the row of a function, or of two functions whose names differ in a suffix."""
    written, *parts = row.split()
    match = _NAME.match(written)
    if match is None:
        raise ValueError(f"{written!r} is not the name of a function")
    own = {"returns": "status", "kernel_name": ""}
    layout = []
    for part in parts:
        key, _, value = part.partition("=")
        if key in ("symbol", *own):
            own[key] = value
        else:
            layout.append(part)
    if own["returns"] not in RESULTS or own["kernel_name"] not in ("", *KERNEL_NAMING):
        raise ValueError(f"{row.strip()!r} has an unknown value of returns or kernel_name")
    base, version, rest, second = match.groups(default="")
    return [
        ApiFunction(
            base + rest + suffix,
            own.get("symbol", base + version + rest + suffix),
            group,
            " ".join(layout),
            own["returns"],
            own["kernel_name"],
        )
        for suffix in (("", second) if second else ("",))
    ]


def _matches(function: ApiFunction, glob: str) -> bool:
    return function.group == glob or fnmatch.fnmatchcase(function.name, glob)
