"""Put probes into the kernels of a code object.

    injected = inject(CodeObject(data), {"kernel": [GcnPlacement(program, "exit")]})
    injected.image            # a code object with the same kernels and probes in them
    injected.refusals         # why a kernel has none

A new segment behind all others holds what is added. For each kernel this is a prologue, a copy of the kernel's instructions, and
its sites. The prologue saves what probes need into registers that the kernel does not use. In place of each s_endpgm the copy has
a branch to a site: it switches on all lanes that the wave began with, since EXEC may have lost some of them, sets the probe's
registers, and goes to the probe, which ends the wave. The copy also counts work (work.py).

The launch block lies behind the kernel's arguments: whoever launches the kernel gives it a copy of its arguments and the block.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from gpubpf.errors import ImageError, Refusal
from gpubpf.gcn import work
from gpubpf.gcn.code_object import PT_GNU_STACK, PT_LOAD, CodeObject, GcnKernel
from gpubpf.gcn.comgr import Comgr
from gpubpf.gcn.kernel_code import KernelCode, read, words
from gpubpf.lower import amdgcn
from gpubpf.lower.amdgcn import Probe, WaveProgram
from gpubpf.lower.launch_block import LaunchBlock, align, launch_block

# Registers that the prologue saves: address of the arguments (2), EXEC (2), indices of the workgroup (3), the first lane's work-item.
SAVED = 8
_MOST_SGPRS, _MOST_VGPRS = 102, 256
_AT_SITE = 10  # SGPRs that a site uses: the probe's, and a pair for a jump
_PAGE = 4096
_ENTRY = 256  # alignment of a kernel's first instruction
_NEAR = 1 << 17  # bytes that s_branch reaches
_PADDING = 256  # bytes behind the last instruction, which the instruction cache may fetch
_ALIGNED = 64  # bytes: a copy lies to the instruction cache's lines as the original does
# Not gfx101x, where a branch over 64 words goes wrong (LLVM: FeatureOffset3fBug), and copies have other distances.
_FAMILIES = re.compile(r"gfx(90[0-9ac]|103[0-6])")


@dataclass(frozen=True)
class GcnPlacement:
    """A program, its point, and the kind of work that is counted for it (one of `bytecode.WORK`)."""

    program: WaveProgram
    point: str
    accumulate: str | None = None


@dataclass(frozen=True)
class GcnSite:
    """A probed place: its number, and the address of its instruction in the original code object."""

    number: int
    address: int


@dataclass(frozen=True)
class InjectedGcnKernel:
    """An instrumented kernel: the bytes of its arguments, the offset of the launch block behind them, and its sites.

    references: what makes it use the variables of the code object that it comes from, once both are loaded: for each address that
    its code computes from the program counter, where s_getpc_b64 is, in bytes from the kernel's descriptor, and the sum of the two
    literals behind it. registers: VGPRs before and after. waits: its workgroups may wait for each other, and fewer fit at once than
    of the original. most_threads: of a workgroup that fits. wave: lanes of a wave.
    """

    argument_bytes: int
    block_offset: int
    block: LaunchBlock
    sites: tuple[GcnSite, ...]
    references: tuple[tuple[int, int], ...]
    registers: tuple[int, int]
    waits: bool
    most_threads: int
    wave: int


@dataclass(frozen=True)
class GcnInjected:
    """A code object with probes. Kernels of `refusals` are as they were."""

    image: bytes
    kernels: Mapping[str, InjectedGcnKernel]
    refusals: Mapping[str, str]


_Change: TypeAlias = tuple[int, bytes]  # an offset in the file, and what to write there


@dataclass
class _Code:
    """What is added behind the code object, from address `begin` on."""

    begin: int
    content: bytearray = field(default_factory=bytearray)

    @property
    def here(self) -> int:
        return self.begin + len(self.content)

    def align(self, to: int) -> None:
        self.content += bytes(-self.here % to)

    def add(self, code: bytes) -> int:
        """Add code and return its address."""
        at = self.here
        self.content += code
        return at


def inject(code: CodeObject, kernels: Mapping[str, Sequence[GcnPlacement]]) -> GcnInjected:
    """Return the code object with the programs in these kernels. Raises ImageError if it cannot be read or there is no room."""
    comgr = Comgr(code.isa)
    added = _Code(align(code.end, _PAGE))
    image = bytearray(code.data)
    made: dict[str, InjectedGcnKernel] = {}
    refusals: dict[str, str] = {}
    probes: dict[tuple[tuple[str, int, str | None], ...], tuple[Probe, int, LaunchBlock]] = {}
    for kernel in code.kernels:
        placements = kernels.get(kernel.name)
        if not placements:
            continue
        mark = len(added.content)
        try:
            if not _FAMILIES.fullmatch(code.gpu):
                raise Refusal(f"no probes for {code.gpu} yet")
            if kernel.descriptor.preload:
                raise Refusal("its arguments are preloaded into registers")
            body = read(code, comgr, kernel)
            programs = [placement.program for placement in placements]
            kinds = tuple(dict.fromkeys(p.accumulate for p in placements if p.accumulate))
            key = tuple((p.program.function, p.program.wave, p.accumulate) for p in placements)
            if key not in probes:
                block = launch_block(programs)
                counters = [kinds.index(p.accumulate) if p.accumulate else None for p in placements]
                probe = amdgcn.compile_probe(programs, block, code.gpu, counters)
                probes[key] = probe, added.add(probe.code), block
            mark = len(added.content)
            made[kernel.name], changes = _write(code, comgr, kernel, body, kinds, added, *probes[key])
            for offset, content in changes:
                image[offset : offset + len(content)] = content
        except Refusal as reason:
            refusals[kernel.name] = str(reason)
            del added.content[mark:]
    if made:
        _append(code, image, added)
    return GcnInjected(bytes(image), made, refusals)


@dataclass(frozen=True)
class _Save:
    """Where the prologue saves values: in SGPRs from `sgpr` on, or where there are too few in lanes of a VGPR."""

    sgpr: int
    vgpr: int | None

    def put(self, number: int, source: str) -> str:
        """Return the text that saves a register as value `number`."""
        if self.vgpr is None:
            return f"s_mov_b32 s{self.sgpr + number}, {source}"
        return f"v_writelane_b32 v{self.vgpr}, {source}, {number}"

    def get(self, number: int, to: int) -> str:
        """Return the text that restores value `number` to an SGPR."""
        if self.vgpr is None:
            return f"s_mov_b32 s{to}, s{self.sgpr + number}"
        return f"v_readlane_b32 s{to}, v{self.vgpr}, {number}"


def _write(
    code: CodeObject, comgr: Comgr, kernel: GcnKernel, body: KernelCode, kinds: Sequence[str], added: _Code,
    probe: Probe, probe_at: int, block: LaunchBlock,
) -> tuple[InjectedGcnKernel, list[_Change]]:  # fmt: skip
    """Add the prologue, the copy and the sites of a kernel. Return also how its descriptor changes. Raises Refusal."""
    start = _Start.of(kernel, packed=code.gpu == "gfx90a")
    first = max(body.sgprs, start.sgprs, amdgcn.BLOCK_REGISTERS + len(amdgcn.REGISTERS))
    save = _Save(first, None)
    sgprs = max(first + SAVED, _AT_SITE, probe.sgprs)
    vgprs = max(body.vgprs, _own_vgprs(code, kernel)) if body.is_indexed else body.vgprs
    if first + SAVED > _MOST_SGPRS:
        save = _Save(0, vgprs)
        sgprs, vgprs = max(body.sgprs, start.sgprs + 2, _AT_SITE, probe.sgprs), vgprs + 1
    counters = range(vgprs, vgprs + len(kinds))  # VGPRs in which the kernel's work is counted
    vgprs += len(kinds)
    if vgprs > _MOST_VGPRS:
        raise Refusal("it leaves no register free")
    additions: dict[int, bytes] = {}
    for kind, counter in zip(kinds, counters, strict=True):
        add = work.adder(comgr, code.gpu, counter)
        for address, number in work.counted(body, kind).items():
            additions[address] = additions.get(address, b"") + add(number)
    if body.inside_indexing & additions.keys():
        raise Refusal("it changes EXEC while it computes the numbers of VGPRs")
    block_offset = align(kernel.descriptor.kernarg_bytes, 8)
    added.align(_ENTRY)
    zeros = "".join(f"\nv_mov_b32 v{counter}, 0" for counter in counters)
    entry = added.add(comgr.assemble(start.prologue(save, kernel.descriptor.wave) + zeros))
    at = align(added.here - kernel.begin, _ALIGNED) + kernel.begin
    if at != added.here:
        added.add(_branch(added.here, at))
        added.content += bytes(at - added.here)
    copy = body.moved(at, additions)
    sites_at, sites = at + len(copy.content), []
    texts = bytearray()
    for number, exit_ in enumerate(body.exits):
        here, place = sites_at + len(texts), copy.places[exit_.address]
        copy.content[place - at : place - at + 4] = _branch(place, here)
        texts += comgr.assemble(_site(kernel, save, number, block_offset, counters))
        texts += _jump(comgr, sites_at + len(texts), probe_at)
        sites.append(GcnSite(number, exit_.address))
    added.add(bytes(copy.content) + bytes(texts))
    changes, before, after = _describe(code, kernel, start, entry, sgprs, max(vgprs, probe.vgprs))
    units = 2 if code.gpu.startswith("gfx10") else 4  # SIMD units that a workgroup's waves share
    made = InjectedGcnKernel(
        kernel.descriptor.kernarg_bytes,
        block_offset,
        block,
        tuple(sites),
        tuple((place - kernel.descriptor_address, sum_) for place, sum_ in copy.references),
        (before.vgprs, after.vgprs),
        body.waits and after.waves < before.waves,
        after.waves * units * kernel.descriptor.wave,
        kernel.descriptor.wave,
    )
    return made, changes


def _branch(at: int, to: int) -> bytes:
    """Return s_branch at an address. Raises Refusal if it does not reach so far."""
    return struct.pack("<I", 0xBF820000 | words(at, to) & 0xFFFF)


def _jump(comgr: Comgr, at: int, to: int) -> bytes:
    """Return a jump at an address to any other, which may change s8 and s9."""
    if -_NEAR <= to - at - 4 < _NEAR:
        return _branch(at, to)
    distance = to - at - 4 & (1 << 64) - 1  # s_getpc_b64 gives the address of the next instruction
    return comgr.assemble(
        f"s_getpc_b64 s[8:9]\ns_add_u32 s8, s8, {distance & 0xFFFFFFFF:#x}\n"
        f"s_addc_u32 s9, s9, {distance >> 32:#x}\ns_setpc_b64 s[8:9]"
    )


def _site(kernel: GcnKernel, save: _Save, number: int, block_offset: int, counters: Sequence[int]) -> str:
    """Return the text of a site. Loads in flight must not write to registers of the probe.

    Two hazards that compilers avoid, too: on GFX10.1, a store that has not read its SGPRs before they change (v_nop); on GFX9, an
    SGPR that a vector instruction has written and a memory access reads within five instructions (s_nop).
    """
    whole = kernel.descriptor.wave == 64
    return "\n".join(
        [
            "s_waitcnt vmcnt(0) lgkmcnt(0)",
            "v_nop",
            save.get(2, 0),
            *((save.get(3, 1), "s_mov_b64 exec, s[0:1]") if whole else ("s_mov_b32 exec_lo, s0",)),
            save.get(0, 0),
            save.get(1, 1),
            f"s_add_u32 s0, s0, {block_offset:#x}",
            "s_addc_u32 s1, s1, 0",
            *(save.get(4 + n, 2 + n) for n in range(4)),
            f"s_mov_b32 s6, {number:#x}",
            *(f"v_mov_b32 v{n}, v{counter}" for n, counter in enumerate(counters)),
            *(() if save.vgpr is None else ("s_nop 4",)),
        ]
    )


@dataclass(frozen=True)
class _Start:
    """The registers when a wave starts: as the kernel expects them, and as the prologue needs them.

    `kernarg`: register of the address of the arguments. `indices`: registers of the workgroup's indices. `moves`: (from, to),
    in this order. `packed`: one VGPR has all indices of a work-item. `items`: what of them the kernel asks for: x (0), x and y (1), or
    all (2). `sgprs`: how many are set. `resources`: COMPUTE_PGM_RSRC2. `properties`: of the descriptor.
    """

    kernarg: int
    indices: tuple[int, int, int]
    moves: tuple[tuple[int, int], ...]
    sgprs: int
    resources: int
    properties: int
    packed: bool
    items: int

    @classmethod
    def of(cls, kernel: GcnKernel, packed: bool) -> _Start:
        """Raises Refusal if there are too few user SGPRs for the address of the arguments."""
        descriptor = kernel.descriptor
        kernarg = descriptor.register("kernarg")
        more = 0 if descriptor.has("kernarg") else 2
        users = descriptor.user_sgprs
        if users + more > 16:
            raise Refusal("all its user SGPRs are taken")
        moves = [(register + more, register) for register in range(kernarg, users) if more]
        old = users
        new = users + more
        indices = []
        for wanted in descriptor.workgroup_ids:
            indices.append(new)
            if wanted:
                moves += [(new, old)] if new != old else []
                old += 1
            new += 1
        for _ in range(descriptor.last_sgprs):
            moves += [(new, old)] if new != old else []
            old, new = old + 1, new + 1
        resources = descriptor.resources[1] & ~(31 << 1) & ~(3 << 11)
        resources |= (users + more) << 1 | 7 << 7 | 2 << 11  # all indices, of work-items too
        x, y, z = indices
        items = descriptor.resources[1] >> 11 & 3
        properties = descriptor.properties | 1 << 3
        return cls(kernarg, (x, y, z), tuple(moves), new, resources, properties, packed, items)

    def prologue(self, save: _Save, wave: int) -> str:
        """Return the text of the prologue. The registers behind those that are set are free."""
        one, two = f"s{self.sgprs}", f"s{self.sgprs + 1}"
        lines = [f"v_readfirstlane_b32 {one}, v0"]
        for number in () if self.packed else (1, 2):
            lines += [
                f"v_readfirstlane_b32 {two}, v{number}",
                f"s_lshl_b32 {two}, {two}, {10 * number}",
                f"s_or_b32 {one}, {one}, {two}",
            ]
        # The last value first: its place may be that of the registers in use here.
        lines += [
            save.put(7, one),
            *(save.put(4 + n, f"s{register}") for n, register in enumerate(self.indices)),
            save.put(2, "exec_lo"),
            *((save.put(3, "exec_hi"),) if wave == 64 else ()),
            save.put(0, f"s{self.kernarg}"),
            save.put(1, f"s{self.kernarg + 1}"),
            *(f"s_mov_b32 s{to}, s{source}" for source, to in self.moves),
            # In v0 are now all three indices of the work-item. The kernel may expect that there is nothing but what it asked for.
            *(
                (f"v_and_b32 v0, {(1 << 10 * (self.items + 1)) - 1:#x}, v0",)
                if self.packed and self.items < 2
                else ()
            ),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Use:
    """How many VGPRs a kernel has, and how many waves fit on a SIMD unit."""

    vgprs: int
    waves: int


def _describe(
    code: CodeObject, kernel: GcnKernel, start: _Start, entry: int, sgprs: int, vgprs: int
) -> tuple[list[_Change], _Use, _Use]:
    """Return the changes of the descriptor: the new entry, the registers at the start, and as many registers as the probe needs.

    Return also what the kernel uses before and after.
    """
    descriptor = kernel.descriptor
    first, _, third = descriptor.resources
    has_choice = code.gpu.startswith("gfx10")
    size = _vgpr_size(code, kernel)
    had = ((first & 63) + 1) * size
    needed = max(had, vgprs)
    if code.gpu == "gfx90a":  # AGPRs lie behind the VGPRs
        own = _own_vgprs(code, kernel)
        moved = max(own, align(vgprs, 4))
        needed = had - own + moved if had > own else max(had, moved)
        third = third & ~63 | moved // 4 - 1
    if needed > (512 if code.gpu == "gfx90a" else 256):
        raise Refusal("it leaves too few VGPRs")
    needed = align(needed, size)
    first = first & ~63 | needed // size - 1
    scalars = had_scalars = 0  # GFX10 always has all SGPRs
    if not has_choice:  # with VCC, FLAT_SCRATCH and XNACK_MASK
        had_scalars = ((first >> 6 & 15) + 1) * 8
        scalars = max(had_scalars, align(sgprs + 6, 16))
        first = first & ~(15 << 6) | scalars // 8 - 1 << 6
    at = kernel.descriptor_offset
    registers = struct.pack("<IIIH", third, first, start.resources, start.properties)
    changes = [(at + 16, struct.pack("<q", entry - kernel.descriptor_address)), (at + 44, registers)]
    return (
        changes,
        _Use(had, _waves(code.gpu, descriptor.wave, had, had_scalars)),
        _Use(needed, _waves(code.gpu, descriptor.wave, needed, scalars)),
    )


def _vgpr_size(code: CodeObject, kernel: GcnKernel) -> int:
    """Return how many VGPRs a descriptor counts as one."""
    return 8 if code.gpu == "gfx90a" or (code.gpu.startswith("gfx10") and kernel.descriptor.wave == 32) else 4


def _own_vgprs(code: CodeObject, kernel: GcnKernel) -> int:
    """Return how many VGPRs a kernel has, without AGPRs."""
    first, _, third = kernel.descriptor.resources
    if code.gpu == "gfx90a":
        return ((third & 63) + 1) * 4
    return ((first & 63) + 1) * _vgpr_size(code, kernel)


def _waves(gpu: str, wave: int, vgprs: int, sgprs: int) -> int:
    """Return how many waves with so many registers fit on a SIMD unit."""
    if gpu.startswith("gfx10"):  # gfx103x allocates twice as many at once as the descriptor counts
        return min(16, 1024 // align(vgprs, 16) if wave == 32 else 512 // align(vgprs, 8))
    total, most = (512, 8) if gpu == "gfx90a" else (256, 10)
    return min(most, total // vgprs, 800 // align(sgprs, 16))


def _append(code: CodeObject, image: bytearray, added: _Code) -> None:
    """Append what was added as a segment, in place of the program header PT_GNU_STACK. Raises ImageError without one."""
    added.content += struct.pack("<I", 0xBF800000) * (_PADDING // 4)  # s_nop
    image += bytes(-len(image) % _PAGE)
    table, count = struct.unpack_from("<Q", image, 32)[0], struct.unpack_from("<H", image, 56)[0]
    for number in range(count):
        at = table + 56 * number
        if struct.unpack_from("<I", image, at)[0] == PT_GNU_STACK:
            size = len(added.content)
            fields = (PT_LOAD, 5, len(image), added.begin, added.begin, size, size, _PAGE)
            struct.pack_into("<II6Q", image, at, *fields)
            image += added.content
            return
    raise ImageError("it has no program header that can be replaced (PT_GNU_STACK)")
