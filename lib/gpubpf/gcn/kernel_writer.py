"""Write a kernel with probes: a prologue, a copy of the kernel's instructions, and sites at its exits."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from gpubpf.errors import Refusal
from gpubpf.gcn import registers, times, work
from gpubpf.gcn.access import GcnAccess
from gpubpf.gcn.added import NOP, Added, branch, call, jump
from gpubpf.gcn.code_object import CodeObject, GcnKernel
from gpubpf.gcn.comgr import Comgr
from gpubpf.gcn.inner_sites import (
    ALIGNED_SGPR,
    SGPRS,
    InnerProbes,
    InnerRegisters,
    InnerSite,
    InnerSites,
    Insertion,
    joined,
)
from gpubpf.gcn.kernel_code import KernelCode, MovedCode, words
from gpubpf.gcn.leaving import leaving
from gpubpf.gcn.start import KEPT, SAVED, Save, Start, keep, restore, site
from gpubpf.gcn.times import UNTIMED_BEFORE, UNTIMED_BEGIN, UNTIMED_END, UNTIMED_EXIT, Times
from gpubpf.lower import amdgcn
from gpubpf.lower.amdgcn import ProbeCode
from gpubpf.lower.launch_block import LaunchBlock, align
from gpubpf.record import Record, field

_MOST_VGPRS = 256
_AT_SITE = amdgcn.TIME + 2 * len(amdgcn.TIMES)  # SGPRs that a site sets, including the pair for a jump
_BRANCH_IF_SET, _END = 0xBF850000, 0xBF810000  # s_cbranch_scc1, s_endpgm
_BRANCH = 4  # bytes of s_branch
_ENTRY = 256  # alignment of a kernel's first instruction
_ALIGNED = 64  # bytes: the copy keeps the original's alignment to instruction cache lines


class GcnSite(Record):
    """A probed place.

    number    its number (`ctx->site`)
    address   its address in the original code object
    function  the mangled name of its function; "" without a symbol
    offset    its offset in the function, in bytes
    opcode    for a place inside the kernel, other than a basic block: the name of the instruction
    block     for a basic block: its number
    ends      for the head of a loop, if a program is only there: what ends the loop (loops.py)
    loop      for a branch: some lanes stay in a loop, others leave it
    cause     for a branch: what it depends on which lanes it parts (causes.py)
    extents   for the head of a loop and for a branch: ranges of addresses that have its source line, the best one first
    """

    number: int
    point: str
    address: int
    function: str
    offset: int
    opcode: str = ""
    access: GcnAccess | None = None
    block: int | None = None
    ends: str = ""
    loop: bool = False
    cause: str = ""
    extents: tuple[tuple[int, int], ...] = ()


class InjectedGcnKernel(Record):
    """An instrumented kernel.

    argument_bytes    the size of its arguments
    block_offset      the offset of the launch block, which follows the arguments, in bytes
    sites             its probed places
    references        the addresses to patch once both code objects are loaded, so that the copy uses the original's variables, each as
                      (bytes from the kernel's descriptor to the s_getpc_b64, sum of the two literals after it)
    registers         VGPRs of the original and of the copy
    waits             whether its workgroups may wait for each other
    compute_units     how many compute units a workgroup can use
    most_threads      how many threads of the copy fit on these compute units at once
    original_threads  how many threads of the original fit there
    wave              lanes per wave
    unprobed          name → number of instructions that no program sees: memory instructions if a program is attached to accesses,
                      changes of EXEC if a program is attached to branches, and those that a program at instructions selects
    """

    argument_bytes: int
    block_offset: int
    block: LaunchBlock
    sites: tuple[GcnSite, ...]
    references: tuple[tuple[int, int], ...]
    registers: tuple[int, int]
    waits: bool
    compute_units: int
    most_threads: int
    original_threads: int
    wave: int
    unprobed: Mapping[str, int] = field(default_factory=dict)


class PlacedProbe(Record):
    """A probe that runs where waves begin or end: its address, its register counts, the `amdgcn.TIMES` that it receives, and the
    points of its programs. Each point has its own site at each place."""

    at: int
    sgprs: int
    vgprs: int
    times: tuple[str, ...] = ()
    points: tuple[str, ...] = ()


NONE = PlacedProbe(0, 0, 0)


def block_offset(kernel: GcnKernel) -> int:
    """Return the offset of the launch block in the kernarg segment of the copy, in bytes. The block follows the arguments."""
    return align(kernel.descriptor.kernarg_bytes, 8)


class KernelWriter:
    """Writes the prologue, the copy and the sites of a kernel. Raises Refusal if there are too few registers."""

    def __init__(
        self, code: CodeObject, comgr: Comgr, kernel: GcnKernel, body: KernelCode, kinds: Sequence[str], added: Added,
        virtual: bool, probes: Mapping[tuple[str, ...], PlacedProbe], block: LaunchBlock, inside: InnerProbes,
    ) -> None:  # fmt: skip
        self._code, self._comgr, self._kernel, self._body = code, comgr, kernel, body
        self._kinds, self._added, self._virtual, self._block = kinds, added, virtual, block
        self._start, self._wave = Start.of(kernel, packed=code.gpu == "gfx90a"), kernel.descriptor.wave
        self._entry = probes.get(amdgcn.AT_ENTRY, NONE)
        self._exit = probes.get(amdgcn.AT_EXIT, NONE)
        self._block_offset = block_offset(kernel)
        self._begins = self._places([kernel.begin], self._entry, 0)
        self._exits = self._places(self._ways_out(), self._exit, len(self._begins))
        first = len(self._begins) + len(self._exits)
        self._inner = InnerSites(kernel, body, code.gpu, inside, first)
        self._choose_registers()

    def _choose_registers(self) -> None:
        """Choose the registers for saved values, work counters and times, and compute the register totals."""
        body, start, entry, exit_, inner = self._body, self._start, self._entry, self._exit, self._inner
        returning = max(entry.sgprs, exit_.sgprs if exit_.times else 0)
        first = max(body.sgprs, start.sgprs, amdgcn.BLOCK_REGISTERS + len(amdgcn.REGISTERS), returning)
        if exit_.times:
            first = max(first, _AT_SITE)
        first = align(first, ALIGNED_SGPR) if inner.sgprs else first
        save = Save(first, None)
        needed = max(_AT_SITE, entry.sgprs, exit_.sgprs)
        more = times.site_sgprs(save, needed) if exit_.times else first + SAVED
        more = max(more, first + inner.sgprs)
        sgprs = max(more, needed)
        vgprs = (
            max(body.vgprs, registers.own_vgprs(self._code, self._kernel)) if body.is_indexed else body.vgprs
        )
        if exit_.times:
            vgprs = max(vgprs, exit_.vgprs)
        if more > SGPRS:
            vgprs = max(vgprs, entry.vgprs + KEPT if entry is not NONE else 0)
            save = Save(0, vgprs)
            more = times.site_sgprs(save, needed) if exit_.times else 0
            more = max(more, SGPRS if inner.sgprs else 0)
            sgprs, vgprs = max(body.sgprs, start.sgprs + 2, needed, more), vgprs + 1
        self._counters = range(vgprs, vgprs + len(self._kinds))  # VGPRs in which the kernel's work is counted
        vgprs = align(self._counters.stop, 2) if exit_.times else self._counters.stop
        kept = {name: vgprs + 2 * n for n, name in enumerate(exit_.times)}
        place, vgprs = vgprs + 2 * len(kept), vgprs + (2 * len(kept) + 1 if kept else 0)
        self._inner_registers: InnerRegisters | None = None
        if inner.sgprs:
            self._inner_registers, vgprs = inner.registers(save, body.sgprs, vgprs)
        if vgprs > _MOST_VGPRS:
            raise Refusal("it leaves no register free")
        self._times = Times(kept, place, save, align(first + SAVED, 2) if save.vgpr is None else None)
        if entry is not NONE:
            vgprs = max(vgprs, entry.vgprs + KEPT)
        self._save, self._sgprs, self._vgprs = save, sgprs, max(vgprs, exit_.vgprs)
        self._exit_sgprs = needed

    def write(self) -> tuple[InjectedGcnKernel, list[registers.Change]]:
        """Add the kernel. Return its description, and the changes to its descriptor. Raises Refusal if the kernel does not fit."""
        insertions = self._insertions()
        entry = self._add_prologue()
        try:
            copy, content = self._copy(insertions, away=False)
        except Refusal:
            if not self._inner.sites:
                raise
            copy, content = self._copy(insertions, away=True)
        self._added.add(content)
        code, kernel, wave = self._code, self._kernel, self._wave
        changes, before, after = registers.changed(code, kernel, self._start, entry, self._sgprs, self._vgprs)
        compute_units = registers.compute_units(code, kernel)
        lanes = compute_units * registers.simd_units(code) * wave
        made = InjectedGcnKernel(
            kernel.descriptor.kernarg_bytes,
            self._block_offset,
            self._block,
            (*self._begins, *self._exits, *map(self._inside, self._inner.sites)),
            tuple((place - kernel.descriptor_address, sum_) for place, sum_ in copy.references),
            (before.vgprs, after.vgprs),
            self._body.waits,
            compute_units,
            after.waves * lanes,
            before.waves * lanes,
            wave,
            self._inner.unprobed,
        )
        return made, changes

    def _assemble(self, lines: Sequence[str]) -> bytes:
        return self._comgr.assemble("\n".join(lines))

    def _ways_out(self) -> list[int]:
        """Return the addresses where lanes leave: the exits and, if a program reads the time, other places (leaving.py)."""
        return [one.address for one in self._body.exits] + (leaving(self._body) if self._exit.times else [])

    def _places(self, addresses: Sequence[int], probe: PlacedProbe, first: int) -> list[GcnSite]:
        """Return the sites of a probe at these addresses, numbered from `first`."""
        each = [(address, point) for address in addresses for point in probe.points]
        return [self._at(first + n, point, address) for n, (address, point) in enumerate(each)]

    def _at(
        self,
        number: int,
        point: str,
        address: int,
        opcode: str = "",
        access: GcnAccess | None = None,
        block: int | None = None,
        ends: str = "",
        loop: bool = False,
        cause: str = "",
        extents: tuple[tuple[int, int], ...] = (),
    ) -> GcnSite:
        at = next(region for region in self._body.regions if region.begin <= address < region.end)
        function = self._kernel.name if at is self._body.regions[0] else at.name
        return GcnSite(
            number,
            point,
            address,
            function,
            address - at.begin,
            opcode,
            access,
            block,
            ends,
            loop,
            cause,
            extents,
        )

    def _inside(self, site: InnerSite) -> GcnSite:
        one, opcode = site.instruction, site.instruction.name if site.block is None else ""
        return self._at(
            site.number,
            site.point,
            one.address,
            opcode,
            site.access,
            site.block,
            site.ends,
            site.loop,
            site.cause,
            site.extents,
        )

    def _insertions(self) -> list[Insertion]:
        """Return the code to insert around instructions: work counters, reads of the time, and probe calls.

        Each instruction has at most one insertion before it and one after it.
        """
        every: list[Insertion] = []
        for kind, counter in zip(self._kinds, self._counters, strict=True):
            add = work.adder(self._comgr, self._code.gpu, counter)
            counted = work.counted(self._body, kind).items()
            every += [Insertion(address, False, add(number)) for address, number in counted]
        if self._exit.times:
            for place in self._exits[:: len(self._exit.points)][len(self._body.exits) :]:
                every.append(Insertion(place.address, False, self._keep(place.number)))
        if self._inner_registers is not None:
            every += self._inner.insertions(self._comgr, self._inner_registers)
        if self._body.inside_indexing & {one.address for one in every}:
            raise Refusal("it has places to probe while it computes the numbers of VGPRs")
        return joined(every)

    def _copy(self, insertions: Sequence[Insertion], away: bool) -> tuple[MovedCode, bytes]:
        """Return the copy of the kernel for the end of the added content, and its bytes, followed by sites and probes.

        away: whether insertions are also put after the copy, so that the copy's branches reach their targets
        """
        at, leaves = self._added.here, {place.address for place in self._exits}
        before: dict[int, bytes] = {}
        behind: dict[int, bytes] = {}
        marks = {}
        for one in insertions:
            leaving_here = one.address in leaves and not one.behind
            mark = marks[one] = self._mark(UNTIMED_BEFORE if leaving_here else UNTIMED_BEGIN)
            code = mark + (bytes(_BRANCH) if away else one.code) + self._mark(UNTIMED_END)
            (behind if one.behind else before)[one.address] = code
        copy = self._body.moved(at, before, behind)
        content = copy.content + self._sites(copy, at)
        probes_at: dict[ProbeCode, int] = {}
        for probe in self._inner.probes:
            assert self._inner_registers is not None
            probes_at[probe] = at + len(content)
            content += self._inner.code(self._comgr, probe, self._inner_registers)
        for one in insertions:
            begin = copy.starts[one.address]
            if one.behind:
                begin = copy.places[one.address] + len(self._body.code[one.address])
            begin += len(marks[one])
            if away:
                place, begin = begin, at + len(content)
                content[place - at : place - at + _BRANCH] = branch(place, begin)
                content += one.code
                content += branch(at + len(content), place + _BRANCH)
            for offset, probe in one.calls:
                called = begin + offset
                struct.pack_into("<h", content, called - at, words(called, probes_at[probe]))
        for instruction in self._body.instructions if self._inner.sites else ():
            if instruction.name == "s_clause":  # requires that the next memory accesses are consecutive
                struct.pack_into("<I", content, copy.places[instruction.address] - at, NOP)
        return copy, bytes(content)

    def _mark(self, mark: int) -> bytes:
        """Return a no-op that marks injected code for hipsim's virtual clock; nothing without a virtual clock."""
        return struct.pack("<I", NOP | mark) if self._virtual else b""

    def _keep(self, number: int) -> bytes:
        """Return the code with which lanes record the time and their place `number`."""
        return self._assemble(self._times.keep())[:-4] + struct.pack("<I", number)

    def _add_prologue(self) -> int:
        """Add the prologue, and padding up to the copy. Return the prologue's address."""
        added, save, start, at_entry = self._added, self._save, self._start, self._entry
        end = self._mark(UNTIMED_END)
        added.align(_ENTRY)
        prologue = start.prologue(save, self._wave, self._block_offset)
        entry = added.add(self._mark(UNTIMED_BEGIN) + self._assemble([prologue]))
        if at_entry is not NONE:
            lines = keep(start, at_entry.vgprs) + site(save, self._wave, 0)
            added.add(self._assemble(lines))
            added.add(call(self._comgr, added.here, at_entry.at))
            added.add(self._assemble(restore(start, at_entry.vgprs, save, self._wave)))
        if self._counters:
            added.add(self._assemble([f"v_mov_b32 v{counter}, 0" for counter in self._counters]))
        at = align(added.here + len(end) - self._kernel.begin, _ALIGNED) + self._kernel.begin - len(end)
        if at != added.here:
            added.add(branch(added.here, at))
            added.content += bytes(at - added.here)
        added.add(end)
        return entry

    def _sites(self, copy: MovedCode, at: int) -> bytes:
        """Return the code of the sites after a copy at address `at`. Replace the copy's exits with branches to them."""
        sites_at, texts = at + len(copy.content), bytearray()
        for exit_, first in zip(self._body.exits, self._exits[:: len(self._exit.points) or 1], strict=False):
            number = first.number
            here, place = sites_at + len(texts), copy.places[exit_.address]
            copy.content[place - at : place - at + 4] = branch(place, here)
            texts += self._mark(UNTIMED_EXIT)
            if self._exit.times:
                texts += self._site_of_groups(number, sites_at + len(texts))
            else:
                lines = site(self._save, self._wave, number, self._counters)
                texts += self._assemble(lines)
                texts += jump(self._comgr, sites_at + len(texts), self._exit.at)
        return bytes(texts)

    def _site_of_groups(self, number: int, here: int) -> bytes:
        """Return the site that calls the probe once per group of lanes."""
        groups = times.groups(self._times, self._code.gpu, self._wave, self._exit_sgprs, self._counters)
        head, body, tail = (self._assemble(lines) for lines in (groups.head, groups.body, groups.tail))
        head = self._keep(number) + head
        turn = body + call(self._comgr, here + len(head) + len(body), self._exit.at) + tail
        again = struct.pack("<I", _BRANCH_IF_SET | words(len(turn), 0) & 0xFFFF)
        return head + turn + again + struct.pack("<I", _END)
