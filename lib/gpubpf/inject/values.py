"""What `inject` takes and returns, as values: probes, sites, instrumented kernels.

This module does not import the PTX model, so that a cached result does not load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpubpf.lower.launch_block import LaunchBlock
from gpubpf.record import Record, field

if TYPE_CHECKING:
    from typing import TypeAlias

    from gpubpf.ebpf.probe import Probe
    from gpubpf.lower.fragment import Fragment

LINE = "line"  # the point of a site that tells where a source line begins in machine code, and has no probe
WAYS_OUT = ("exit", "block_end")  # the points before each exit of the kernel
PtxProbe: TypeAlias = "Probe[Fragment]"  # a probe whose program is lowered to PTX


class Site(Record):
    """One probed place: its number (`ctx->site`), its function (mangled), and its line in the original PTX.

    Numbers begin at 0. Sites in called functions come first; all kernels of the module share them. The kernel's own sites follow. The
    line of an exit is that of the branch that leads to it, if there is exactly one, else that of the `ret` or `exit`. All programs of
    one point at one place share a site.

    source, source_line  the source location (`-lineinfo`), inside an inlined function if there is one; "" and 0 if unknown
    opcode               for accesses, branches, barriers and instructions: with modifiers, `ld.global.f32`; else ""
    kind, space          for accesses and values, as in ptx/access.py (including `generic`); else ""
    width                for accesses and values: bytes, 0 if known only at run time
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
    # For accesses: 1 reads, 2 writes, 3 both. For values, plus 4 if an atomic's old value is used, and SWAPS, COMPARES (bytecode.py).
    effect: int = 0
    like: int | None = (
        None  # for accesses: the number of an earlier site, whose probe also stands for this site (`Probe.alike`)
    )
    block: int | None = None  # for basic blocks: the number in the function, from 0; copies keep it
    cause: str = (
        ""  # for branches, if a program reads `region`: what the condition depends on (ptx/causes.py)
    )
    loop: bool = False  # for branches, likewise: some lanes stay in a loop, others leave it
    type: str = ""  # for values and results of instructions: the type of an element, one of bytecode.TYPES
    ends: str = ""  # for heads of loops, if a program is only there: what ends the loop (ptx/loops.py)
    offset: int | None = None  # on AMD GPUs, which have no PTX: bytes from the function's beginning


class InjectedKernel(Record):
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
    unprobed: Mapping[str, int] = field(default_factory=dict)
    split: bool = False


class InjectedVariable(Record):
    """A variable of the application. Its address must be written to slot `index` of `gpubpf_variables`.

    copied  whether the sidecar has a copy with the same name, for use if the driver does not find the original
    entry   for a table of functions: an offset in bytes. The slot then gets the address of the function that the variable holds
            there, instead of the variable's address
    fixed   whether that function's address never changes; if not, it must be read before the program can change it
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
