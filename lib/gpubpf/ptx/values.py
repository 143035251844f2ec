"""What `inject` is given and what it gives: placements; the launch block, sites, instrumented kernels.

block = launch_block([fragment])
block.bases["times"]      # where in the hidden last parameter the address of that map goes
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpubpf.errors import Error

from .module import Function

if TYPE_CHECKING:
    from gpubpf.lower.fragment import Argument, Fragment

TABLE = "gpubpf_variables"
LAUNCH = "gpubpf_launch"
PREFIX = "gpubpf"
WAYS_OUT = ("exit", "block_end")  # points in front of each way out of the kernel


@dataclass(frozen=True)
class Placement:
    """A fragment, where it goes (one of `bytecode.DEVICE_POINTS`), and the work that is added up for it (one of `flow.WORK`).

    Of `access`: the `kinds` (load, store, atomic, async) and `spaces` (global, shared, local, const) that it is for, () for all.
    Of `function_entry` and `function_exit`: the `functions`, globs of demangled names, () for all.
    """

    fragment: Fragment
    point: str
    accumulate: str | None = None
    kinds: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchBlock:
    """What is where in the hidden last parameter: offsets in bytes, by the name of the map.

    The number of a launch is the u64 at `launch_id`, plus the u64 in GPU memory whose address is at `replay`, where that is not 0
    (a kernel node of a graph, docs/timing.md).
    """

    size: int
    launch_id: int = 0
    replay: int = 8
    bases: Mapping[str, int] = dataclasses.field(default_factory=dict)
    capacities: Mapping[str, int] = dataclasses.field(default_factory=dict)
    params: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)  # offset, size
    # None where no program asks for it:
    pid_tgid: int | None = None  # process << 32 | thread that launched (u64)
    kernel: int | None = None  # number of the kernel in its process (u64)
    epoch: int | None = None  # the launch's epoch of allocations (u64)


@dataclass(frozen=True)
class Site:
    """One probed place: its number (`ctx->site`), the function (mangled), and the line of the original PTX.

    Numbers are a kernel's, from 0 without gaps: first the places in functions that are called, the same for all kernels of the
    module, then the kernel's own. A way out is at the line that decides to leave: of the branch where several lead to one
    `ret`, else of the `ret` or `exit`. All programs of one point at one place have the same site.

    `source`, `source_line`: the same in the source (`-lineinfo`), of an inlined function where it is in one; "" and 0 without.
    `opcode` with its modifiers, as in `ld.global.f32`, of accesses and barriers; else "". Of accesses `kind`, `space` (as
    ptx/access.py has them, so also `generic`) and `width` in bytes, 0 where only the execution tells; else "", "" and 0.
    """

    number: int
    function: str
    line: int
    source: str = ""
    source_line: int = 0
    point: str = "exit"
    opcode: str = ""
    kind: str = ""
    space: str = ""
    width: int = 0
    effect: int = 0  # of accesses: 1 it reads, 2 it writes, 3 both


@dataclass(frozen=True)
class InjectedKernel:
    """`parameters` are the application's, as (offset, size) in bytes; the launch block follows at `block_offset`.

    `sites` are those that the kernel's threads may come to, numbers below `site_count`. `shared_exits`: branches that had to share
    a probe with others. `unknown`: opcodes that are counted as instructions although what else they do is not known. `waits`: its
    blocks may wait for each other (flow.may_wait). `unprobed`: places by opcode that access memory in a way that no program
    sees, where one is attached to memory accesses.
    """

    parameters: tuple[tuple[int, int], ...]
    block_offset: int
    block: LaunchBlock
    sites: tuple[Site, ...] = ()
    shared_exits: int = 0
    unknown: tuple[str, ...] = ()
    waits: bool = True
    site_count: int = 0
    unprobed: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class InjectedVariable:
    """Slot `index` of `gpubpf_variables` wants the address of the application's `name`.

    `copied`: the sidecar holds a copy of the same name, for use where the driver does not find the original.
    """

    name: str
    index: int
    space: str  # global or const
    size: int  # bytes; 0 where the length is not known
    copied: bool
    kernels: tuple[str, ...] = ()  # that reach it (mangled)


@dataclass(frozen=True)
class Injected:
    """The instrumented module. `text` holds no kernel where all were refused; `refusals`: reason by mangled name."""

    text: str
    kernels: dict[str, InjectedKernel]
    variables: tuple[InjectedVariable, ...]
    refusals: dict[str, str]


class Refusal(Error):
    """A kernel that cannot be instrumented. `str()` is the reason, as the user sees it."""


def launch_block(fragments: Iterable[Fragment]) -> LaunchBlock:
    """The layout that these fragments need: launch id and cell, each map's base and capacity, the bytes of `param` maps, words
    that only some ask for."""
    bases: dict[str, int] = {}
    capacities: dict[str, int] = {}
    sizes: dict[str, int] = {}
    arguments = [a for f in fragments for a in f.arguments]
    for argument in arguments:
        if argument.kind == "param":
            sizes[map_of(argument)] = max(sizes.get(map_of(argument), 0), argument.offset + argument.width)
    position = 16
    roomy = {argument.map for argument in arguments if argument.kind == "map_capacity"}
    for argument in arguments:
        if argument.kind not in ("map_base", "map_capacity") or map_of(argument) in bases:
            continue
        bases[map_of(argument)] = position
        position += 8
        if argument.map in roomy:
            capacities[map_of(argument)] = position
            position += 8
    params: dict[str, tuple[int, int]] = {}
    for name, size in sizes.items():
        params[name] = (position, size)
        position += align(size, 8)
    words: dict[str, int] = {}
    for kind in ("pid_tgid", "kernel", "epoch"):
        if any(argument.kind == kind for argument in arguments):
            words[kind], position = position, position + 8
    return LaunchBlock(position, bases=bases, capacities=capacities, params=params, **words)


def map_of(argument: Argument) -> str:
    if not argument.map:
        raise Error(
            f"argument {argument.name} of a device program names no map; this is a fault of the lowering"
        )
    return argument.map


def align(value: int, to: int) -> int:
    return -(-value // to) * to


def parameter_layout(function: Function) -> tuple[tuple[tuple[int, int], ...], int]:
    """(offset, size) of each parameter of a kernel, and the end of the last one (PTX ISA 5.1.6: each is naturally aligned)."""
    found = []
    end = 0
    for parameter in function.parameters:
        # in `.param .u64 .ptr .global .align 16 p` the alignment is that of the memory pointed to
        natural = 8 if "ptr" in parameter.attributes else parameter.alignment
        offset = align(end, natural)
        found.append((offset, parameter.size))
        end = offset + parameter.size
    return tuple(found), end
