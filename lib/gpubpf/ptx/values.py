"""The arguments and results of `inject`: placements; the launch block, sites, instrumented kernels.

block = launch_block([fragment])
block.bases["times"]      # the offset of that map's address in the hidden last parameter
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpubpf.errors import Error

from .module import Directive, Function, Module, render

if TYPE_CHECKING:
    from gpubpf.lower.fragment import Argument, Fragment

TABLE = "gpubpf_variables"
LAUNCH = "gpubpf_launch"
PREFIX = "gpubpf"
LIMITED = "$gpubpf_limited"  # behind the name of a copy that is limited to fewer registers
WAYS_OUT = ("exit", "block_end")  # the points before each exit of the kernel


@dataclass(frozen=True)
class Placement:
    """A fragment, its point (one of `bytecode.DEVICE_POINTS`), and the kind of work that is counted for it (one of `bytecode.WORK`).

    At `access`, `kinds` (load, store, atomic, async) and `spaces` (global, shared, local, const) restrict the accesses; () means all.
    At `function_entry` and `function_exit`, `functions` are globs of demangled names; () means all.
    """

    fragment: Fragment
    point: str
    accumulate: str | None = None
    kinds: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchBlock:
    """The layout of the hidden last parameter: offsets in bytes, those of maps by name.

    The number of a launch is the u64 at `launch_id`. If the u64 at `replay` is not 0, it is the address of a u64 in GPU memory that is
    added (a kernel node of a graph, docs/timing.md).
    """

    size: int
    launch_id: int = 0
    replay: int = 8
    bases: Mapping[str, int] = dataclasses.field(default_factory=dict)
    capacities: Mapping[str, int] = dataclasses.field(default_factory=dict)
    params: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)  # offset, size
    # None if no program reads it:
    pid_tgid: int | None = None  # process << 32 | thread that launched (u64)
    kernel: int | None = None  # the kernel's number in its process (u64)
    epoch: int | None = None  # the launch's epoch of allocations (u64)


@dataclass(frozen=True)
class Site:
    """One probed place: its number (`ctx->site`), its function (mangled), and its line in the original PTX.

    A kernel's numbers begin at 0 without gaps. Sites in called functions come first, and are the same for all kernels of the module.
    The kernel's own sites follow. An exit is at the line that decides to leave: of the branch if several lead to one `ret`, else of
    the `ret` or `exit`. All programs of one point at one place share a site.

    source, source_line  the place in the source (`-lineinfo`), in an inlined function if it is in one; "" and 0 if unknown
    opcode               of accesses and barriers, with modifiers: `ld.global.f32`; else ""
    kind, space          of accesses, as in ptx/access.py (so also `generic`); else ""
    width                of accesses: bytes, 0 if only the execution determines it
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
    """An instrumented kernel.

    parameters    the application's, as (offset, size) in bytes; the launch block follows at `block_offset`
    sites         those that the kernel's threads may reach; their numbers are below `site_count`
    shared_exits  the number of branches that share a probe with others
    unknown       opcodes that count as instructions only, because it is unknown what else they do
    waits         whether its blocks may wait for each other (flow.may_wait)
    unprobed      if a program is attached to memory accesses: places by opcode whose accesses no program sees
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
    """A variable of the application, whose address must be written to slot `index` of `gpubpf_variables`.

    `copied`: the sidecar holds a copy with the same name, which is used if the driver does not find the original.
    """

    name: str
    index: int
    space: str  # global or const
    size: int  # bytes; 0 if the length is unknown
    copied: bool
    kernels: tuple[str, ...] = ()  # that use it (mangled)


@dataclass(frozen=True)
class Injected:
    """The instrumented module. `text` has no kernel if all were refused. `refusals`: reasons by mangled name.

    module: what `text` was rendered from.
    """

    text: str
    kernels: dict[str, InjectedKernel]
    variables: tuple[InjectedVariable, ...]
    refusals: dict[str, str]
    module: Module = dataclasses.field(repr=False)

    def limited(self, limits: Mapping[str, int]) -> str:
        """Return `text` with a second copy of these kernels, NAME$gpubpf_limited, which uses at most so many registers."""
        made = []
        for name, registers in limits.items():
            kernel = self.module.functions[name]
            others = tuple(d for d in kernel.directives if d.name not in ("maxnreg", "minnctapersm"))
            limit = Directive("maxnreg", f".maxnreg {registers}")
            made.append(dataclasses.replace(kernel, name=name + LIMITED, directives=(*others, limit)))
        return render(dataclasses.replace(self.module, items=(*self.module.items, *made)))


class Refusal(Error):
    """A kernel cannot be instrumented. `str()` is the reason, as the user sees it."""


def launch_block(fragments: Iterable[Fragment]) -> LaunchBlock:
    """Return the layout that these fragments need.

    It has the launch's number and its replay cell, the base and capacity of each map, the bytes of `param` maps, and the optional
    words that some fragment reads. Raises Error for an argument without a map.
    """
    bases: dict[str, int] = {}
    capacities: dict[str, int] = {}
    sizes: dict[str, int] = {}
    arguments = [a for f in fragments for a in f.arguments]
    for argument in arguments:
        if argument.kind == "param":
            sizes[map_of(argument)] = max(sizes.get(map_of(argument), 0), argument.offset + argument.width)
    position = LaunchBlock.replay + 8
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
    """Return the name of an argument's map. Raises Error if it has none."""
    if not argument.map:
        raise Error(
            f"argument {argument.name} of a device program names no map; this is a fault of the lowering"
        )
    return argument.map


def align(value: int, to: int) -> int:
    """Round `value` up to a multiple of `to`."""
    return -(-value // to) * to


def parameter_layout(function: Function) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return (offset, size) of each parameter of a kernel, and the end of the last, in bytes (PTX ISA 5.1.6: natural alignment)."""
    found = []
    end = 0
    for parameter in function.parameters:
        # in `.param .u64 .ptr .global .align 16 p`, the alignment is that of the memory which p points to
        natural = 8 if "ptr" in parameter.attributes else parameter.alignment
        offset = align(end, natural)
        found.append((offset, parameter.size))
        end = offset + parameter.size
    return tuple(found), end
