"""Probes at memory accesses: the code before each access, and the probes that it calls, as a kernel needs them.

    probes = AccessProbes(placements, block, gpu)       # for all kernels of a code object
    sites = AccessSites(code, kernel, body, probes, first=3)
    before = sites.before(comgr, registers)             # what is put before each instruction

In the middle of a kernel, all its registers may be in use. So a probe has registers above them (renumber.py). Before an access, the
lanes that make it put its address into the probe's VGPRs and what is known of it into its SGPRs, and call it. The probe's code, which
the kernel's places share, keeps VCC, EXEC and SCC. If there are too few SGPRs, it has the highest ones, and those that are the
kernel's are kept in lanes of VGPRs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpubpf.ebpf.bytecode import KINDS
from gpubpf.errors import Refusal
from gpubpf.gcn import calls
from gpubpf.gcn.access import GcnAccess, accesses, is_memory
from gpubpf.gcn.code_object import GcnKernel
from gpubpf.gcn.comgr import Comgr, GcnInstruction
from gpubpf.gcn.kernel_code import KernelCode
from gpubpf.gcn.renumber import renumbered
from gpubpf.gcn.start import SAVED, Save
from gpubpf.lower import amdgcn
from gpubpf.lower.amdgcn import Probe, WaveProgram
from gpubpf.lower.launch_block import LaunchBlock, align

SGPRS = 102  # that every GPU has
_OWN = 5  # SGPRs behind the probe's: for VCC (2), EXEC (2), SCC
ALIGNED_SGPR, _ALIGNED_VGPR = (
    8,
    4,
)  # of the first register of each kind: so kernels that differ little have the same probe
_MOST_SITES = 1 << 15
_LOADS = re.compile(r"(?:global|flat)_(?:load|atomic)")  # an atomic may have a result
_SET = range(amdgcn.SITE, amdgcn.BACK + 2)  # SGPRs of the probe that a place sets


class Placed(Protocol):
    """A program at memory accesses of these kinds and in these spaces (all: none are named)."""

    @property
    def program(self) -> WaveProgram: ...
    @property
    def kinds(self) -> tuple[str, ...]: ...
    @property
    def spaces(self) -> tuple[str, ...]: ...


class AccessProbes:
    """The probes for accesses, one for each set of programs."""

    def __init__(self, placements: Sequence[Placed], block: LaunchBlock, gpu: str) -> None:
        self._placements, self._block, self._gpu = placements, block, gpu
        self._made: dict[tuple[tuple[str, tuple[int, ...]], ...], Probe] = {}

    def __bool__(self) -> bool:
        return bool(self._placements)

    def of(self, access: GcnAccess) -> Probe | None:
        """Return the probe for an access; None if no program is for it. Raises VerifyError."""
        spaces = amdgcn.GENERIC_SPACES if access.space == "generic" else (access.space,)
        chosen = {
            space: tuple(
                number
                for number, one in enumerate(self._placements)
                if (not one.kinds or access.kind in one.kinds) and (not one.spaces or space in one.spaces)
            )
            for space in spaces
        }
        if not any(chosen.values()):
            return None
        key = tuple(chosen.items())
        if key not in self._made:
            programs = {
                space: [self._placements[n].program for n in numbers] for space, numbers in chosen.items()
            }
            self._made[key] = amdgcn.compile_access_probe(programs, self._block, self._gpu)
        return self._made[key]


@dataclass(frozen=True)
class AccessRegisters:
    """Where probes at accesses have their registers. sgprs: how many they use, from `sgpr` on. lanes: the kernel's SGPRs among these
    that must be kept, with the VGPR and the lane for each."""

    sgpr: int
    sgprs: int
    vgpr: int
    save: Save
    lanes: Mapping[int, tuple[int, int]]

    @property
    def call(self) -> str:
        """The text that calls a probe."""
        back = self.sgpr + amdgcn.BACK
        return f"s_call_b64 s[{back}:{back + 1}], 0"

    def numbers(self, which: range) -> range:
        return range(self.sgpr + which.start, self.sgpr + which.stop)


@dataclass(frozen=True)
class AccessSite:
    """An access that is probed, and its number."""

    number: int
    instruction: GcnInstruction
    access: GcnAccess
    probe: Probe


@dataclass(frozen=True)
class Call:
    """A call of a probe, in the code that is put before the instruction at `address`: `offset` bytes from its beginning."""

    address: int
    offset: int
    probe: Probe


class AccessSites:
    """The places of a kernel at which its threads access memory, with numbers from `first` on."""

    def __init__(
        self, kernel: GcnKernel, body: KernelCode, gpu: str, probes: AccessProbes, first: int
    ) -> None:
        self._gpu, self._wave = gpu, kernel.descriptor.wave
        scratch = kernel.descriptor.has("private_buffer") and not any(
            {2, 3} & calls.use(instruction)[0] for instruction in body.instructions
        )
        self.sites: list[AccessSite] = []
        self.unprobed: dict[str, int] = {}
        for instruction in body.instructions if probes else ():
            found = accesses(instruction, scratch)
            if not found and is_memory(instruction):
                self.unprobed[instruction.name] = self.unprobed.get(instruction.name, 0) + 1
            for access in found:
                if (probe := probes.of(access)) is not None:
                    self.sites.append(AccessSite(first + len(self.sites), instruction, access, probe))
        if len(self.sites) > _MOST_SITES:
            raise Refusal(f"it accesses memory at {len(self.sites)} places")
        self.probes = list(dict.fromkeys(site.probe for site in self.sites))

    @property
    def sgprs(self) -> int:
        """How many SGPRs the probes use."""
        return align(max((probe.sgprs for probe in self.probes), default=0), 2) + _OWN if self.probes else 0

    def registers(self, save: Save, own_sgprs: int, vgprs: int) -> tuple[AccessRegisters, int]:
        """Return where the probes have their registers, and how many VGPRs there are with them. own_sgprs: the kernel's."""
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
        return AccessRegisters(sgpr, self.sgprs, vgpr, save, lanes), vgpr + max(p.vgprs for p in self.probes)

    def before(self, comgr: Comgr, at: AccessRegisters) -> tuple[dict[int, bytes], list[Call]]:
        """Return what is put before instructions, by address, and where in it probes are called: by s_call_b64, without its target."""
        groups = [self._before(site.access, site.number, at) for site in self.sites]
        found: dict[int, bytes] = {}
        called = []
        for site, lines, parts in zip(self.sites, groups, comgr.assemble_each(groups), strict=True):
            address, code = site.instruction.address, bytearray().join(parts)
            struct.pack_into("<H", code, 0, len(code) // 4 - 1)  # s_cbranch_execz: over all of this
            before = found.get(address, b"")
            offset = len(before) + sum(map(len, parts[: lines.index(at.call)]))
            called.append(Call(address, offset, site.probe))
            found[address] = before + code
        return found, called

    def _before(self, access: GcnAccess, number: int, at: AccessRegisters) -> list[str]:
        facts = amdgcn.facts(access.offset, access.width, KINDS.index(access.kind), access.effect)
        kept = [(n, *at.lanes[n]) for n in at.numbers(_SET) if n in at.lanes]
        return [
            "s_cbranch_execz 0",
            *(["s_waitcnt lgkmcnt(0)"] if at.lanes else []),  # loads in flight may write to what is kept
            *(f"v_writelane_b32 v{vgpr}, s{n}, {lane}" for n, vgpr, lane in kept),
            *self._address(access, at),
            f"s_movk_i32 s{at.sgpr + amdgcn.SITE}, {number:#x}",
            f"s_mov_b32 s{at.sgpr + amdgcn.FACTS}, {facts:#x}",
            at.call,
            *(f"v_readlane_b32 s{n}, v{vgpr}, {lane}" for n, vgpr, lane in kept),
            *(["s_nop 4"] if kept else []),
        ]

    def _address(self, access: GcnAccess, at: AccessRegisters) -> list[str]:
        """Return the text that puts the address, or an offset of 32 bits, into the probe's first VGPRs. It changes no flag."""
        low, high, vgpr, sgpr = at.vgpr, at.vgpr + 1, access.vgpr, access.sgpr
        gfx9 = self._gpu.startswith("gfx9")
        add = "v_add_u32_e32" if gfx9 else "v_add_nc_u32_e32"
        if access.space in ("global", "generic"):
            assert vgpr is not None
            if sgpr is None:
                return [f"v_mov_b32 v{low}, v{vgpr}", f"v_mov_b32 v{high}, v{vgpr + 1}"]
            first = at.sgpr + amdgcn.SITE  # the carry: comgr assembles for waves of 32 lanes on GFX10
            carry = f"s[{first}:{first + 1}]" if gfx9 else f"s{first}"
            one, two = (
                ("v_add_co_u32_e64", "v_addc_co_u32_e64") if gfx9 else ("v_add_co_u32", "v_add_co_ci_u32_e64")
            )
            return [
                f"v_mov_b32 v{high}, {_sgpr(sgpr + 1)}",  # first: the carry may be where the address is
                f"{one} v{low}, {carry}, {_sgpr(sgpr)}, v{vgpr}",
                f"{two} v{high}, {carry}, 0, v{high}, {carry}",
            ]
        if sgpr is None:
            return [f"v_mov_b32 v{low}, {0 if vgpr is None else f'v{vgpr}'}"]
        shift = self._wave.bit_length() - 1 if access.scaled else 0
        text = [f"v_lshrrev_b32_e64 v{low}, {shift}, {_sgpr(sgpr)}"]
        return text if vgpr is None else [*text, f"{add} v{low}, v{vgpr}, v{low}"]

    def code(self, comgr: Comgr, probe: Probe, at: AccessRegisters) -> bytes:
        """Return the code of a probe, which all of its places call."""
        b64, own = "s_mov_b64", at.sgpr + at.sgprs - _OWN
        vcc, exec_, scc = f"s[{own}:{own + 1}]", f"s[{own + 2}:{own + 3}]", f"s{own + 4}"
        kept = [(n, *at.lanes[n]) for n in at.lanes if n not in at.numbers(_SET)]
        loads = any(_LOADS.match(one.name) for one in comgr.probe(probe.code))
        head = [f"v_writelane_b32 v{vgpr}, s{n}, {lane}" for n, vgpr, lane in kept]
        head += [f"s_cselect_b32 {scc}, 1, 0", f"{b64} {vcc}, vcc", f"{b64} {exec_}, exec"]
        if at.save.vgpr is not None:
            head += [at.save.get(n, at.sgpr + n) for n in range(SAVED)] + ["s_nop 4"]
        tail = [
            f"s_waitcnt {'vmcnt(0) ' if loads else ''}lgkmcnt(0)",
            f"{b64} exec, {exec_}",
            f"{b64} vcc, {vcc}",
            f"s_cmp_lg_u32 {scc}, 0",
            *(f"v_readlane_b32 s{n}, v{vgpr}, {lane}" for n, vgpr, lane in kept),
            *(["s_nop 4"] if kept else []),
            f"s_setpc_b64 s[{at.sgpr + amdgcn.BACK}:{at.sgpr + amdgcn.BACK + 1}]",
        ]
        middle = renumbered(comgr, probe.code, at.sgpr, at.vgpr)
        return comgr.assemble("\n".join(head)) + middle + comgr.assemble("\n".join(tail))


def _sgpr(number: int) -> str:
    return {calls.VCC: "vcc_lo", calls.VCC + 1: "vcc_hi"}.get(number, f"s{number}")
