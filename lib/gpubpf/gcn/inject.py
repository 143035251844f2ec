"""Put probes into the kernels of a code object.

    injected = inject(CodeObject(data), {"kernel": [GcnPlacement(program, "exit")]})
    injected.image            # a code object with the same kernels and probes in them
    injected.refusals         # why a kernel has none

A new segment behind all others holds what is added. For each kernel this is a prologue, a copy of the kernel's instructions, and
its sites. The prologue saves what probes need into registers that the kernel does not use, and calls the probe at the entry. In
place of each s_endpgm the copy has a branch to a site: it switches on all lanes that the wave began with, since EXEC may have lost
some of them, sets the probe's registers, and goes to the probe, which ends the wave. The copy also counts work (work.py).

The launch block lies behind the kernel's arguments: whoever launches the kernel gives it a copy of its arguments and the block.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpubpf.errors import ImageError, Refusal
from gpubpf.gcn import registers, work
from gpubpf.gcn.code_object import PT_GNU_STACK, PT_LOAD, CodeObject, GcnKernel
from gpubpf.gcn.comgr import Comgr
from gpubpf.gcn.kernel_code import KernelCode, read, words
from gpubpf.gcn.start import KEPT, SAVED, Save, Start, keep, restore, site
from gpubpf.lower import amdgcn
from gpubpf.lower.amdgcn import WaveProgram
from gpubpf.lower.launch_block import LaunchBlock, align, launch_block

_MOST_SGPRS, _MOST_VGPRS = 102, 256
_TO = f"s[{amdgcn.BACK}:{amdgcn.BACK + 1}]"  # the registers of a jump
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
    known: dict[tuple[tuple[str, str, int, str | None], ...], tuple[Mapping[str, _Placed], LaunchBlock]] = {}
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
            kinds = tuple(dict.fromkeys(p.accumulate for p in placements if p.accumulate))
            key = tuple((p.point, p.program.function, p.program.wave, p.accumulate) for p in placements)
            if key not in known:
                block = launch_block([placement.program for placement in placements])
                known[key] = _placed(code, comgr, placements, kinds, block, added), block
            mark = len(added.content)
            made[kernel.name], changes = _write(code, comgr, kernel, body, kinds, added, *known[key])
            for offset, content in changes:
                image[offset : offset + len(content)] = content
        except Refusal as reason:
            refusals[kernel.name] = str(reason)
            del added.content[mark:]
    if made:
        _append(code, image, added)
    return GcnInjected(bytes(image), made, refusals)


@dataclass(frozen=True)
class _Placed:
    """The probe of a point: where its code is, and how many registers it needs."""

    at: int
    sgprs: int
    vgprs: int


_NONE = _Placed(0, 0, 0)


def _placed(
    code: CodeObject,
    comgr: Comgr,
    placements: Sequence[GcnPlacement],
    kinds: Sequence[str],
    block: LaunchBlock,
    added: _Code,
) -> dict[str, _Placed]:
    """Add the probe of each point. Raises VerifyError."""
    found = {}
    for point in dict.fromkeys(placement.point for placement in placements):
        chosen = [placement for placement in placements if placement.point == point]
        counters = [kinds.index(p.accumulate) if p.accumulate else None for p in chosen]
        returns = point != "exit"
        probe = amdgcn.compile_probe([p.program for p in chosen], block, code.gpu, counters, returns)
        back = comgr.assemble("s_setpc_b64 s[0:1]") if returns else b""
        vgprs = max(probe.vgprs, KEPT - 1) if returns else probe.vgprs  # v0 to v2 are the work-item
        found[point] = _Placed(added.add(probe.code + back), probe.sgprs, vgprs)
    return found


def _write(
    code: CodeObject, comgr: Comgr, kernel: GcnKernel, body: KernelCode, kinds: Sequence[str], added: _Code,
    probes: Mapping[str, _Placed], block: LaunchBlock,
) -> tuple[InjectedGcnKernel, list[registers.Change]]:  # fmt: skip
    """Add the prologue, the copy and the sites of a kernel. Return also how its descriptor changes. Raises Refusal."""
    start, wave = Start.of(kernel, packed=code.gpu == "gfx90a"), kernel.descriptor.wave
    at_entry, at_exit = probes.get("entry", _NONE), probes.get("exit", _NONE)
    first = max(body.sgprs, start.sgprs, amdgcn.BLOCK_REGISTERS + len(amdgcn.REGISTERS), at_entry.sgprs)
    save = Save(first, None)
    needed = max(_AT_SITE, at_entry.sgprs, at_exit.sgprs)
    sgprs = max(first + SAVED, needed)
    vgprs = max(body.vgprs, registers.own_vgprs(code, kernel)) if body.is_indexed else body.vgprs
    if first + SAVED > _MOST_SGPRS:
        vgprs = max(vgprs, at_entry.vgprs + KEPT)
        save = Save(0, vgprs)
        sgprs, vgprs = max(body.sgprs, start.sgprs + 2, needed), vgprs + 1
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
    entry = added.add(comgr.assemble(start.prologue(save, wave)))
    if at_entry is not _NONE:
        added.add(comgr.assemble("\n".join(keep(start, at_entry.vgprs) + site(save, wave, 0, block_offset))))
        added.add(_call(comgr, added.here, at_entry.at))
        added.add(comgr.assemble("\n".join(restore(start, at_entry.vgprs, save, wave))))
        vgprs = max(vgprs, at_entry.vgprs + KEPT)
    if counters:
        added.add(comgr.assemble("\n".join(f"v_mov_b32 v{counter}, 0" for counter in counters)))
    at = align(added.here - kernel.begin, _ALIGNED) + kernel.begin
    if at != added.here:
        added.add(_branch(added.here, at))
        added.content += bytes(at - added.here)
    copy = body.moved(at, additions)
    sites_at, sites = at + len(copy.content), []
    texts = bytearray()
    for number, exit_ in enumerate(body.exits if at_exit is not _NONE else ()):
        here, place = sites_at + len(texts), copy.places[exit_.address]
        copy.content[place - at : place - at + 4] = _branch(place, here)
        texts += comgr.assemble("\n".join(site(save, wave, number, block_offset, counters)))
        texts += _jump(comgr, sites_at + len(texts), at_exit.at)
        sites.append(GcnSite(number, exit_.address))
    added.add(bytes(copy.content) + bytes(texts))
    changes, before, after = registers.changed(code, kernel, start, entry, sgprs, max(vgprs, at_exit.vgprs))
    units = 2 if code.gpu.startswith("gfx10") else 4  # SIMD units that a workgroup's waves share
    made = InjectedGcnKernel(
        kernel.descriptor.kernarg_bytes,
        block_offset,
        block,
        tuple(sites),
        tuple((place - kernel.descriptor_address, sum_) for place, sum_ in copy.references),
        (before.vgprs, after.vgprs),
        body.waits and after.waves < before.waves,
        after.waves * units * wave,
        wave,
    )
    return made, changes


def _branch(at: int, to: int) -> bytes:
    """Return s_branch at an address. Raises Refusal if it does not reach so far."""
    return struct.pack("<I", 0xBF820000 | words(at, to) & 0xFFFF)


def _jump(comgr: Comgr, at: int, to: int) -> bytes:
    """Return a jump at an address to any other, which may change s8 and s9."""
    if -_NEAR <= to - at - 4 < _NEAR:
        return _branch(at, to)
    return comgr.assemble("\n".join([*_address(at, to), f"s_setpc_b64 {_TO}"]))


def _call(comgr: Comgr, at: int, to: int) -> bytes:
    """Return a call at an address of a probe that returns."""
    return comgr.assemble("\n".join([*_address(at, to), f"s_swappc_b64 {_TO}, {_TO}"]))


def _address(at: int, to: int) -> list[str]:
    """Return the text that, at an address, computes another in _TO."""
    distance = to - at - 4 & (1 << 64) - 1  # s_getpc_b64 gives the address of the next instruction
    low, high = (f"s{amdgcn.BACK + n}" for n in range(2))
    add = f"s_add_u32 {low}, {low}, {distance & 0xFFFFFFFF:#x}"
    return [f"s_getpc_b64 {_TO}", add, f"s_addc_u32 {high}, {high}, {distance >> 32:#x}"]


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
