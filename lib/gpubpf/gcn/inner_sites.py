"""Probes inside a kernel, at accesses, branches, instructions, blocks and barriers: each site's code, and the probes that it calls.

    probes = InnerProbes(attached, block, gpu)        # for all kernels of a code object
    sites = InnerSites(kernel, body, gpu, probes, first=3)
    insertions = sites.insertions(comgr, registers)     # code inserted before and after instructions

In the middle of a kernel, all of its registers may be in use, so a probe uses registers above them (registers.py). A site's code sets
the probe's registers and calls the probe. At an access, the active lanes first copy the address into the probe's VGPRs. All sites of
a kernel share the probe's code, which preserves VCC, EXEC and SCC. If there are too few SGPRs, the probe uses the highest ones, and
the kernel's SGPRs among them are saved in VGPR lanes.

A barrier has code on both sides. Before it, the code calls the probe for arriving threads and reads the time. After it, the code calls
the probe for leaving threads.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpubpf.ebpf.bytecode import COMPARES, KINDS, RETURNS, SWAPS
from gpubpf.ebpf.probe import LOOPS, Probe
from gpubpf.errors import Refusal
from gpubpf.gcn import calls
from gpubpf.gcn.access import GcnAccess, accesses, is_memory, scalar_loads
from gpubpf.gcn.branches import GcnBranch, branches
from gpubpf.gcn.causes import GcnCauses
from gpubpf.gcn.code_object import GcnKernel
from gpubpf.gcn.comgr import Comgr, GcnInstruction
from gpubpf.gcn.computation import is_chosen, is_computation
from gpubpf.gcn.kernel_code import KernelCode, Region, entered, writes_exec
from gpubpf.gcn.loops import GcnLoops, operands_of_atomic, polled_access
from gpubpf.gcn.registers import renumbered
from gpubpf.gcn.start import SAVED, Save
from gpubpf.lower import amdgcn
from gpubpf.lower.amdgcn import ProbeCode, WaveProgram
from gpubpf.lower.launch_block import LaunchBlock, align
from gpubpf.record import Record, replace

SGPRS = 102  # available on every GPU
_OWN = 5  # SGPRs after the probe's, which save VCC (2), EXEC (2) and SCC
ALIGNED_SGPR, _ALIGNED_VGPR = (
    8,
    4,
)  # alignment of the first registers, so that similar kernels share a probe
_MOST_SITES = 1 << 15
_LOADS = re.compile(r"(?:global|flat)_(?:load|atomic)")  # an atomic may return a value
_LOADS_VCC = re.compile(  # scalar memory instructions with VCC as their result
    r"s_(?:(?:buffer_|scratch_)?(?:load|atomic)_\w+|mem(?:real)?time|get_waveid_in_workgroup) vcc"
)
_BARRIER = "s_barrier"
_SWAPS = re.compile(r"_(?:swap|wrxchg)")
_GIVEN = ("dispatch_pointer", "queue_pointer", "kernarg")  # addresses of memory that is not the program's
_SKIP = 0xBF880000  # s_cbranch_execz


class InnerProbes:
    """The inner probes of a code object: one per set of programs at an access or an instruction, and one per other point."""

    def __init__(self, attached: Sequence[Probe[WaveProgram]], block: LaunchBlock, gpu: str) -> None:
        self._at = {point: [p for p in attached if p.point == point] for point in amdgcn.INSIDE}
        self._block, self._gpu = block, gpu
        self._made: dict[tuple[tuple[str, tuple[int, ...]], ...], ProbeCode] = {}

    def has(self, point: str) -> bool:
        """Return whether a program is attached to a point of `amdgcn.INSIDE`."""
        return bool(self._at[point])

    def selects(self, kind: str, space: str) -> bool:
        """Return whether a program selects accesses of this kind to this space."""
        return bool(self._selecting("access", kind, space))

    @property
    def select_loops(self) -> bool:
        """Whether a program selects loops."""
        return any(one.loops for probes in self._at.values() for one in probes)

    def _selecting(self, point: str, kind: str, space: str) -> tuple[int, ...]:
        return tuple(
            number
            for number, one in enumerate(self._at[point])
            if (not one.kinds or kind in one.kinds) and (not one.spaces or space in one.spaces)
        )

    def of_access(self, access: GcnAccess, point: str = "access") -> ProbeCode | None:
        """Return the probe for an access; None if no program selects it. Raises VerifyError if the probe cannot be compiled.

        point: `access`, or `value` for a probe that receives the loaded value
        """
        spaces = amdgcn.GENERIC_SPACES if access.space == "generic" else (access.space,)
        attached = self._at[point]
        chosen = {space: self._selecting(point, access.kind, space) for space in spaces}
        if not any(chosen.values()):
            return None
        key = ((point, ()), *chosen.items())
        if key not in self._made:
            programs = {space: [attached[n].program for n in numbers] for space, numbers in chosen.items()}
            self._made[key] = amdgcn.compile_access_probe(programs, self._block, self._gpu, point == "value")
        return self._made[key]

    def of_point(
        self, point: str, opcode: str = "", in_loop: Callable[[str], bool] = lambda loops: True
    ) -> ProbeCode | None:
        """Return the probe for another point of `amdgcn.INSIDE`; None if no program selects it.

        Raises VerifyError if the probe cannot be compiled.

        opcode: at `instruction`, the name of the instruction
        in_loop: at `basic_block`, whether the block is the head of such a loop (`Probe.loops`)
        """
        attached = self._at[point]
        chosen = tuple(
            n
            for n, one in enumerate(attached)
            if is_chosen(one.opcodes, opcode) and (not one.loops or in_loop(one.loops))
        )
        if not chosen:
            return None
        key = ((point, chosen),)
        if key not in self._made:
            programs = [attached[n].program for n in chosen]
            self._made[key] = amdgcn.compile_inner_probe(programs, self._block, self._gpu, point)
        return self._made[key]

    def names(self, opcode: str) -> bool:
        """Return whether the globs of a program at instructions match this name. A program without globs does not count."""
        return any(one.opcodes and is_chosen(one.opcodes, opcode) for one in self._at["instruction"])


class InnerRegisters(Record):
    """The registers of probes in the middle of a kernel.

    sgpr   the first SGPR
    sgprs  the number of SGPRs
    given  the SGPRs that a site sets, relative to `sgpr`
    lanes  the kernel's SGPRs in this range, each with the VGPR and lane that save it
    """

    sgpr: int
    sgprs: int
    given: range
    vgpr: int
    save: Save
    lanes: Mapping[int, tuple[int, int]]

    @property
    def call(self) -> str:
        """The assembly text that calls a probe."""
        back = self.sgpr + amdgcn.BACK
        return f"s_call_b64 s[{back}:{back + 1}], 0"

    @property
    def arrived(self) -> str:
        """The pair of SGPRs with the time at which the wave arrived at a barrier."""
        return f"s[{self.sgpr + amdgcn.TIME}:{self.sgpr + amdgcn.TIME + 1}]"

    @property
    def saved(self) -> list[tuple[int, int, int]]:
        """The kernel's SGPRs that a site sets, each with the VGPR and lane that save it."""
        numbers = range(self.sgpr + self.given.start, self.sgpr + self.given.stop)
        return [(n, *self.lanes[n]) for n in numbers if n in self.lanes]

    @property
    def saved_by_probe(self) -> list[tuple[int, int, int]]:
        """The kernel's SGPRs that only the probe changes, each with the VGPR and lane that save it."""
        return [(n, *where) for n, where in self.lanes.items() if n - self.sgpr not in self.given]


class InnerSite(Record):
    """A probed place: its number and point, the access at an access or a value, the block's number at a basic_block point, and the
    branch at a branch point.

    instructions: the number of instructions in the block at a basic_block point
    ends: what ends the loop whose head the block is, if a program selects loops
    loop: whether a branch decides which lanes stay in a loop
    cause: what it depends on which lanes a branch parts (causes.py)
    extents: for the head of a loop and for a branch, ranges of addresses (first instruction, behind the last one) that have its
        source line: the block, then the loop that a branch leaves
    """

    number: int
    point: str
    instruction: GcnInstruction
    probe: ProbeCode
    access: GcnAccess | None = None
    block: int | None = None
    branch: GcnBranch | None = None
    instructions: int = 0
    ends: str = ""
    loop: bool = False
    cause: str = ""
    extents: tuple[tuple[int, int], ...] = ()


class Insertion(Record):
    """Code to insert before or after the instruction at an address.

    behind  whether the code follows the instruction
    calls   (offset in bytes, probe) of each s_call_b64 in the code, whose target is not filled in yet
    """

    address: int
    behind: bool
    code: bytes
    calls: tuple[tuple[int, ProbeCode], ...] = ()


def joined(insertions: Iterable[Insertion]) -> list[Insertion]:
    """Merge insertions at the same place. Their order is kept: the first code runs first."""
    found: dict[tuple[int, bool], Insertion] = {}
    for one in insertions:
        if (first := found.get((one.address, one.behind))) is not None:
            calls = tuple((len(first.code) + offset, probe) for offset, probe in one.calls)
            one = replace(first, code=first.code + one.code, calls=first.calls + calls)
        found[one.address, one.behind] = one
    return list(found.values())


class _Run(NamedTuple):
    """Assembly text at a site, one instruction per line.

    probe: the probe that the text calls. The text is skipped if EXEC is 0. None: the text does not call a probe.
    """

    lines: tuple[str, ...]
    probe: ProbeCode | None = None


class _Text(NamedTuple):
    """Assembly text to insert before or after the instruction at an address."""

    address: int
    behind: bool
    runs: tuple[_Run, ...]

    def insertion(self, parts: Sequence[bytes], call: str) -> Insertion:
        """Return the text as code.

        parts: the machine code of each line
        call: the line that calls a probe
        """
        code, called, rest = bytearray(), [], iter(parts)
        for run in self.runs:
            made = [next(rest) for _ in run.lines]
            if run.probe is not None:
                size = sum(map(len, made))
                code += struct.pack("<I", _SKIP | size // 4)
                called.append((len(code) + sum(map(len, made[: run.lines.index(call)])), run.probe))
            code += b"".join(made)
        return Insertion(self.address, self.behind, bytes(code), tuple(called))


class InnerSites:
    """The sites in the middle of a kernel, numbered from `first`."""

    def __init__(
        self, kernel: GcnKernel, body: KernelCode, gpu: str, probes: InnerProbes, first: int
    ) -> None:
        self._gpu, self._wave = gpu, kernel.descriptor.wave
        scratch = kernel.descriptor.has("private_buffer") and not any(
            {2, 3} & calls.use(instruction)[0] for instruction in body.instructions
        )
        self.sites: list[InnerSite] = []
        self.unprobed: dict[str, int] = {}

        def add(
            point: str,
            instruction: GcnInstruction,
            probe: ProbeCode | None,
            **details: Any,
        ) -> None:
            if probe is not None:
                self.sites.append(InnerSite(first + len(self.sites), point, instruction, probe, **details))

        blocks = _numbers_of_blocks(body)
        has_branches = probes.has("branch")
        has_loads = probes.selects("load", "global")
        scalar = _scalar_loads(kernel, body) if has_loads or has_branches else set()
        graph = None
        if has_branches or probes.select_loops:
            graph = GcnLoops(body, gpu.startswith("gfx10") and self._wave == 64)
        loops = graph if probes.select_loops else None
        causes = GcnCauses(graph, kernel, scalar) if graph is not None and has_branches else None
        called = {region.begin for region in body.regions[1:]} if probes.has("function_entry") else set()
        parting: dict[int, GcnBranch | None] = {}
        details: dict[int, dict[str, Any]] = {}  # for sites at branches
        for number, each in enumerate(body.blocks() if has_branches else ()):
            parting.update((one.address, branch) for one, branch in branches(each, self._wave))
            deciding = {each[-1].address, *[one.address for one in each if writes_exec(one)][-1:]}
            left = [graph.block(n) for n in sorted(graph.left_after(number))] if graph is not None else []
            own = (_extent(each),)
            whole = (*own, (left[0][0].address, _extent(left[-1])[1])) if left else own
            for one in each:
                is_loop = bool(left) and one.address in deciding
                details[one.address] = {"loop": is_loop, "extents": whole if is_loop else own}
        for instruction in body.instructions:
            if instruction.address in called:
                add("function_entry", instruction, probes.of_point("function_entry"))
            if (block := blocks.get(instruction.address)) is not None:
                number, length, extent = block
                at = instruction.address
                chosen = (which for which in LOOPS if loops and at in loops.heads(which))
                add(
                    "basic_block",
                    instruction,
                    probes.of_point("basic_block", in_loop=set(chosen).__contains__),
                    block=number,
                    instructions=length,
                    ends=loops.ends.get(at, "") if loops else "",
                    extents=(extent,) if loops else (),
                )
            if instruction.name == _BARRIER:
                for point in amdgcn.AT_BARRIER:
                    add(point, instruction, probes.of_point(point))
            branch = parting.get(instruction.address)
            unseen = branch is None and instruction.address in parting
            if branch is not None:
                add(
                    "branch",
                    instruction,
                    probes.of_point("branch"),
                    branch=branch,
                    cause=causes.of(instruction) if causes is not None else "",
                    **details[instruction.address],
                )
            found: Sequence[GcnAccess] = ()
            if is_computation(instruction):
                add("instruction", instruction, probes.of_point("instruction", instruction.name))
            elif probes.has("access"):
                found = accesses(instruction, scratch)
                unseen = (
                    unseen
                    or (not found and is_memory(instruction))
                    or (has_loads and instruction.address in scalar)
                )
            if unseen or (not is_computation(instruction) and probes.names(instruction.name)):
                self.unprobed[instruction.name] = self.unprobed.get(instruction.name, 0) + 1
            for access in found:
                add("access", instruction, probes.of_access(access), access=access)
            polled = polled_access(instruction) if loops and instruction.address in loops.polled else None
            if polled is not None:
                add("value", instruction, probes.of_access(polled, "value"), access=polled)
        if len(self.sites) > _MOST_SITES:
            raise Refusal(f"it has {len(self.sites)} places to probe")
        self.probes = list(dict.fromkeys(site.probe for site in self.sites))
        self._pair = any(site.point in amdgcn.WITH_PAIR for site in self.sites)
        self._loads_vcc = any(_LOADS_VCC.match(f"{one.name} {one.operands}") for one in body.instructions)

    @property
    def sgprs(self) -> int:
        """The number of SGPRs that the probes use."""
        if not self.probes:
            return 0
        given = amdgcn.TIME + 2 if self._pair else 0
        return align(max(given, *(probe.sgprs for probe in self.probes)), 2) + _OWN

    def registers(self, save: Save, own_sgprs: int, vgprs: int) -> tuple[InnerRegisters, int]:
        """Return the probes' registers, and the total number of VGPRs with them. Raises Refusal if there are too few SGPRs.

        save: where the prologue saves values
        own_sgprs: the number of the kernel's SGPRs
        vgprs: the number of VGPRs without the probes'
        """
        lanes: dict[int, tuple[int, int]] = {}
        sgpr = save.sgpr
        if save.vgpr is not None:
            sgpr = (SGPRS - self.sgprs) // ALIGNED_SGPR * ALIGNED_SGPR
            if sgpr < 0:
                raise Refusal("it leaves too few SGPRs")
            places = [save.vgpr, *range(vgprs, vgprs + (SAVED + SGPRS) // self._wave)]
            for number, one in enumerate(range(sgpr, min(own_sgprs, SGPRS)), SAVED):
                lanes[one] = (places[number // self._wave], number % self._wave)
            vgprs += (SAVED + len(lanes) - 1) // self._wave
        vgpr = align(vgprs, _ALIGNED_VGPR)
        given = range(amdgcn.SITE, amdgcn.TIME + 2 if self._pair else amdgcn.BACK + 2)
        made = InnerRegisters(sgpr, self.sgprs, given, vgpr, save, lanes)
        return made, vgpr + max(probe.vgprs for probe in self.probes)

    def insertions(self, comgr: Comgr, at: InnerRegisters) -> list[Insertion]:
        """Return the code to insert before and after instructions, in execution order."""
        texts: list[_Text] = []
        barriers: dict[int, dict[str, InnerSite]] = {}
        for site in self.sites:
            if site.point == "value":
                texts += self._around_load(site, at)
            elif site.point not in amdgcn.AT_BARRIER:
                lines = [*_saved(at), *self._set(site, at), *_restored(at)]
                texts.append(_Text(site.instruction.address, False, (_Run(tuple(lines), site.probe),)))
            else:
                barriers.setdefault(site.instruction.address, {})[site.point] = site
        for address, sites in barriers.items():
            texts += self._around(address, sites, at)
        groups = [[line for run in text.runs for line in run.lines] for text in texts]
        made = comgr.assemble_each(groups)
        return [text.insertion(parts, at.call) for text, parts in zip(texts, made, strict=True)]

    def _around(self, address: int, sites: Mapping[str, InnerSite], at: InnerRegisters) -> Iterator[_Text]:
        """Yield the text before and after a barrier. The SGPRs with the arrival time stay in use across the barrier."""
        called = {point: _Run(tuple(self._set(site, at)), site.probe) for point, site in sites.items()}
        arrive = [called[amdgcn.ARRIVE]] if amdgcn.ARRIVE in called else []
        save, restore = _Run(tuple(_saved(at))), _Run(tuple(_restored(at)))
        if amdgcn.LEAVE not in called:
            yield _Text(address, False, (save, *arrive, restore))
            return
        time = _Run((f"s_memtime {at.arrived}", "s_waitcnt lgkmcnt(0)"))
        yield _Text(address, False, (save, *arrive, time))
        yield _Text(address, True, (called[amdgcn.LEAVE], restore))

    def _around_load(self, site: InnerSite, at: InnerRegisters) -> Iterator[_Text]:
        """Yield the text before and after a load whose value a probe reads. The load may overwrite the registers of its address."""
        access, address = site.access, site.instruction.address
        assert access is not None
        operands = operands_of_atomic(site.instruction) if access.kind == "atomic" else ()
        kept = [
            f"v_mov_b32 v{at.vgpr + number}, {'0' if register is None else f'v{register}'}"
            for number, register in enumerate(operands, 4)
        ]
        yield _Text(address, False, (_Run((*_saved(at), *self._address(access, at), *kept, *_restored(at))),))
        first = re.match(r"v\[?(\d+)", site.instruction.operands)
        assert first is not None
        high = f"v{int(first[1]) + 1}" if access.width > 4 else "0"
        value = (f"v_mov_b32 v{at.vgpr + 2}, v{first[1]}", f"v_mov_b32 v{at.vgpr + 3}, {high}")
        set_ = (*_saved(at), "s_waitcnt vmcnt(0) lgkmcnt(0)", *value, *self._set(site, at), *_restored(at))
        yield _Text(address, True, (_Run(set_, site.probe),))

    def _set(self, site: InnerSite, at: InnerRegisters) -> list[str]:
        """Return the text that sets the registers of a site's probe and calls it. At a value, the address is there already."""
        address, facts = [], []
        if (access := site.access) is not None:
            returns = 0
            if site.point == "value" and access.kind == "atomic":
                name = site.instruction.name
                returns = RETURNS | (COMPARES if "cmp" in name else SWAPS if _SWAPS.search(name) else 0)
            known = amdgcn.facts(
                access.offset, access.width, KINDS.index(access.kind), access.effect | returns
            )
            address = self._address(access, at) if site.point == "access" else []
            facts = [f"s_mov_b32 s{at.sgpr + amdgcn.FACTS}, {known:#x}"]
        if (branch := site.branch) is not None:  # first, because it may read the registers that are set here
            address = [branch.mask(at.sgpr + amdgcn.TIME)]
            facts = [f"s_mov_b32 s{at.sgpr + amdgcn.FACTS}, {branch.facts}"]
        if site.instructions:
            facts = [f"s_mov_b32 s{at.sgpr + amdgcn.FACTS}, {site.instructions}"]
        number = f"s_movk_i32 s{at.sgpr + amdgcn.SITE}, {site.number:#x}"
        return [*address, number, *facts, at.call]

    def _address(self, access: GcnAccess, at: InnerRegisters) -> list[str]:
        """Return the text that puts the address, or a 32-bit offset, into the probe's first VGPRs. The text changes no flags."""
        low, high, vgpr, sgpr = at.vgpr, at.vgpr + 1, access.vgpr, access.sgpr
        gfx9 = self._gpu.startswith("gfx9")
        add = "v_add_u32_e32" if gfx9 else "v_add_nc_u32_e32"
        if access.space in ("global", "generic"):
            assert vgpr is not None
            if sgpr is None:
                return [f"v_mov_b32 v{low}, v{vgpr}", f"v_mov_b32 v{high}, v{vgpr + 1}"]
            first = at.sgpr + amdgcn.SITE  # for the carry: comgr assembles for 32-lane waves on GFX10
            carry = f"s[{first}:{first + 1}]" if gfx9 else f"s{first}"
            one, two = (
                ("v_add_co_u32_e64", "v_addc_co_u32_e64") if gfx9 else ("v_add_co_u32", "v_add_co_ci_u32_e64")
            )
            return [
                f"v_mov_b32 v{high}, {_sgpr(sgpr + 1)}",  # must come first: the carry may overwrite the SGPR address
                f"{one} v{low}, {carry}, {_sgpr(sgpr)}, v{vgpr}",
                f"{two} v{high}, {carry}, 0, v{high}, {carry}",
            ]
        if sgpr is None:
            return [f"v_mov_b32 v{low}, {0 if vgpr is None else f'v{vgpr}'}"]
        shift = self._wave.bit_length() - 1 if access.scaled else 0
        text = [f"v_lshrrev_b32_e64 v{low}, {shift}, {_sgpr(sgpr)}"]
        return text if vgpr is None else [*text, f"{add} v{low}, v{vgpr}, v{low}"]

    def code(self, comgr: Comgr, probe: ProbeCode, at: InnerRegisters) -> bytes:
        """Return the code of a probe, shared by all of its sites."""
        b64, own = "s_mov_b64", at.sgpr + at.sgprs - _OWN
        vcc, exec_, scc = f"s[{own}:{own + 1}]", f"s[{own + 2}:{own + 3}]", f"s{own + 4}"
        loads = any(_LOADS.match(one.name) for one in comgr.probe(probe.code))
        # A load in flight must reach VCC before VCC is saved. Otherwise, the tail would overwrite the loaded value.
        head = ["s_waitcnt lgkmcnt(0)"] if self._loads_vcc else []
        head += [f"v_writelane_b32 v{vgpr}, s{n}, {lane}" for n, vgpr, lane in at.saved_by_probe]
        head += [f"s_cselect_b32 {scc}, 1, 0", f"{b64} {vcc}, vcc", f"{b64} {exec_}, exec"]
        if at.save.vgpr is not None:
            head += [at.save.get(n, at.sgpr + n) for n in range(SAVED)] + ["s_nop 4"]
        tail = [
            f"s_waitcnt {'vmcnt(0) ' if loads else ''}lgkmcnt(0)",
            f"{b64} exec, {exec_}",
            f"{b64} vcc, {vcc}",
            f"s_cmp_lg_u32 {scc}, 0",
            *(f"v_readlane_b32 s{n}, v{vgpr}, {lane}" for n, vgpr, lane in at.saved_by_probe),
            *(["s_nop 4"] if at.saved_by_probe else []),
            f"s_setpc_b64 s[{at.sgpr + amdgcn.BACK}:{at.sgpr + amdgcn.BACK + 1}]",
        ]
        middle = renumbered(comgr, probe.code, at.sgpr, at.vgpr)
        return comgr.assemble("\n".join(head)) + middle + comgr.assemble("\n".join(tail))


def _scalar_loads(kernel: GcnKernel, body: KernelCode) -> set[int]:
    """Return the addresses of the scalar loads of a kernel and its functions that may read the program's memory."""
    begin, end = body.regions[0].begin, body.regions[0].end
    own = [one for one in body.instructions if begin <= one.address < end]
    called = [one for one in body.instructions if not begin <= one.address < end]
    given = {kernel.descriptor.register(name) for name in _GIVEN if kernel.descriptor.has(name)}
    return scalar_loads(own, body.branches, given) | scalar_loads(called, body.branches, set())


def _numbers_of_blocks(body: KernelCode) -> dict[int, tuple[int, int, tuple[int, int]]]:
    """Return each basic block's number in its function, its number of instructions, and its extent.

    The keys are the addresses where the blocks are entered.
    """
    found: dict[int, tuple[int, int, tuple[int, int]]] = {}
    counts: dict[Region, int] = {}
    for block in body.blocks():
        region = next(one for one in body.regions if one.begin <= block[0].address < one.end)
        counts[region] = counts.get(region, -1) + 1
        found[entered(block).address] = counts[region], len(block), _extent(block)
    return found


def _extent(block: Sequence[GcnInstruction]) -> tuple[int, int]:
    return block[0].address, block[-1].address + block[-1].size


def _saved(at: InnerRegisters) -> list[str]:
    """Return the text that saves the kernel's SGPRs before a site sets them. It first waits for loads that may still write them."""
    waits = ["s_waitcnt lgkmcnt(0)"] if at.lanes else []
    return waits + [f"v_writelane_b32 v{vgpr}, s{n}, {lane}" for n, vgpr, lane in at.saved]


def _restored(at: InnerRegisters) -> list[str]:
    """Return the text that restores the SGPRs saved by `_saved`."""
    lines = [f"v_readlane_b32 s{n}, v{vgpr}, {lane}" for n, vgpr, lane in at.saved]
    return [*lines, "s_nop 4"] if lines else []


def _sgpr(number: int) -> str:
    return {calls.VCC: "vcc_lo", calls.VCC + 1: "vcc_hi"}.get(number, f"s{number}")
