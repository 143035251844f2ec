"""The arguments and results of `inject`: placements, sites, instrumented kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gpubpf.lower.launch_block import LaunchBlock, align

from .module import Directive, Function, Module, render

if TYPE_CHECKING:
    from gpubpf.ebpf.sampling import Unit
    from gpubpf.lower.fragment import Fragment

TABLE = "gpubpf_variables"
LAUNCH = "gpubpf_launch"
PREFIX = "gpubpf"
LIMITED = "$gpubpf_limited"  # suffix of the name of a copy that is limited to fewer registers
LAUNCHED = "$gpubpf_launched"  # suffix of the name of a copy that other kernels launch (device_launches.py)


def original_name(copy: str) -> str:
    """Return the name of the kernel that a copy in a sidecar was made of."""
    return copy.removesuffix(LIMITED).removesuffix(LAUNCHED)


WAYS_OUT = ("exit", "block_end")  # the points before each exit of the kernel


@dataclass(frozen=True)
class Placement:
    """A fragment, its point (one of `bytecode.DEVICE_POINTS`), and the kind of work to count for it: one of `bytecode.WORK`, or
    of `cost.ADDED` and `cost.SKIPPED`.

    At `access` and `value`, `kinds` (load, store, atomic, async) and `spaces` (global, shared, local, const) restrict the accesses;
    () means all.
    At `function_entry` and `function_exit`, `functions` are globs of demangled names; () means all.
    At `float` and `instruction`, `opcodes` are globs of opcodes (`computation.is_chosen`); () means all.
    sampled: run the program only in some blocks or warps, chosen anew in each launch; "": in all. All programs of a kernel
    have the same value, except `cost.SAMPLED_COST`, which runs in all.
    alike: at `access`, the program does the same for accesses by the same lanes whose addresses differ by a multiple of so many bytes;
    or by any constant, if the addresses of all lanes are equal modulo so many. If several loads or stores in a basic block are known
    to differ this way, only the first gets a probe (`Site.like`). A power of two; 0: the program may do something else.
    unconditional: only chosen threads reach the probe (split.py), so it does not test whether its thread is one.
    """

    fragment: Fragment
    point: str
    accumulate: str | None = None
    kinds: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    opcodes: tuple[str, ...] = ()
    sampled: Unit | Literal[""] = ""
    alike: int = 0
    unconditional: bool = False

    @property
    def checks_choice(self) -> bool:
        """Whether a probe checks that its thread is chosen."""
        return bool(self.sampled) and not self.unconditional


@dataclass(frozen=True)
class Site:
    """One probed place: its number (`ctx->site`), its function (mangled), and its line in the original PTX.

    Numbers begin at 0. Sites in called functions come first; all kernels of the module share them. The kernel's own sites follow. The
    line of an exit is that of the branch that leads to it, if there is exactly one, else that of the `ret` or `exit`. All programs of
    one point at one place share a site.

    source, source_line  the source location (`-lineinfo`), inside an inlined function if there is one; "" and 0 if unknown
    opcode               of accesses, branches, barriers and instructions, with modifiers: `ld.global.f32`; else ""
    kind, space          of accesses and values, as in ptx/access.py (including `generic`); else ""
    width                of accesses and values: bytes, 0 if known only at run time
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
    effect: int = (
        0  # of accesses: 1 reads, 2 writes, 3 both; of values: plus 4 if an atomic's old value is used
    )
    like: int | None = (
        None  # of accesses: the number of an earlier site, whose probe also stands for this site (`Placement.alike`)
    )
    block: int | None = None  # of basic blocks: the number in the function, from 0; copies keep it
    type: str = ""  # of values and results of instructions: the type of an element, one of bytecode.TYPES
    offset: int | None = None  # on AMD GPUs, which have no PTX: bytes from the function's beginning


@dataclass(frozen=True)
class InjectedKernel:
    """An instrumented kernel.

    parameters    the application's parameters as (offset, size) in bytes; the launch block follows at `block_offset`
    sites         the sites that the kernel's threads may reach; their numbers are below `site_count`
    shared_exits  the number of branches that share a probe with others
    unknown       opcodes with unknown effects, which count only as instructions
    waits         whether its blocks may wait for each other (call_graph.may_wait)
    split         whether it has a second body without probes (split.py)
    unprobed      opcode → number of places that no program sees, at the points where programs are attached
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
    split: bool = False


@dataclass(frozen=True)
class InjectedVariable:
    """A variable of the application. Its address must be written to slot `index` of `gpubpf_variables`.

    `copied`: the sidecar has a copy with the same name, for use if the driver does not find the original. `entry`: not the address is
    written, but the function's address that the variable holds at this offset in bytes. If it is not `fixed`, that must be read before
    the program can change it.
    """

    name: str
    index: int
    space: str  # global or const
    size: int  # bytes; 0 if the length is unknown
    copied: bool
    kernels: tuple[str, ...] = ()  # the kernels that use it (mangled)
    entry: int | None = None
    fixed: bool = True

    @property
    def refusal(self) -> str:
        """Why these kernels cannot be instrumented if the program has loaded the module before; "" if they can."""
        return "" if self.fixed else f"indirect call; the program may have changed {self.name}"


@dataclass(frozen=True)
class Injected:
    """The instrumented module. `text` has no kernels if all were refused. `refusals`: reasons by mangled name.

    `text` is the rendered `module`. launched: the kernels that have a copy for other kernels to launch (device_launches.py).
    """

    text: str
    kernels: dict[str, InjectedKernel]
    variables: tuple[InjectedVariable, ...]
    refusals: dict[str, str]
    module: Module = dataclasses.field(repr=False)
    launched: tuple[str, ...] = ()

    @property
    def late_refusals(self) -> dict[str, str]:
        """The kernels that cannot be instrumented in a program that has loaded the module before, each with the reason."""
        return {k: v.refusal for v in self.variables if v.refusal for k in v.kernels} | self.refusals

    def limited(self, limits: Mapping[str, int]) -> str:
        """Return `text` with a second copy of each kernel in `limits`, NAME$gpubpf_limited, limited to that many registers."""
        made = [
            dataclasses.replace(_limit(self.module.functions[name], registers), name=name + LIMITED)
            for name, registers in limits.items()
        ]
        return render(dataclasses.replace(self.module, items=(*self.module.items, *made)))

    def within(self, limits: Mapping[str, int]) -> Injected:
        """Return the same with each kernel in `limits` limited to that many registers, unless it has a limit of its own."""
        items = [
            _limit(item, limits[item.name])
            if isinstance(item, Function) and item.defined and item.name in limits and not _limits(item)
            else item
            for item in self.module.items
        ]
        module = dataclasses.replace(self.module, items=tuple(items))
        return dataclasses.replace(self, text=render(module), module=module) if limits else self


_LIMITS = ("maxnreg", "minnctapersm")  # directives that limit a kernel's registers


def _limits(kernel: Function) -> bool:
    return any(directive.name in _LIMITS for directive in kernel.directives)


def _limit(kernel: Function, registers: int) -> Function:
    """Return the kernel with a limit of its registers, which takes the place of those that it has."""
    others = tuple(d for d in kernel.directives if d.name not in _LIMITS)
    return dataclasses.replace(kernel, directives=(*others, Directive("maxnreg", f".maxnreg {registers}")))


def parameter_layout(function: Function) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return (offset, size) of each parameter of a kernel, and the end of the last, in bytes (PTX ISA 5.1.6: natural alignment)."""
    found = []
    end = 0
    for parameter in function.parameters:
        # In `.param .u64 .ptr .global .align 16 p`, the alignment is that of the memory that p points to.
        natural = 8 if "ptr" in parameter.attributes else parameter.alignment
        offset = align(end, natural)
        found.append((offset, parameter.size))
        end = offset + parameter.size
    return tuple(found), end
