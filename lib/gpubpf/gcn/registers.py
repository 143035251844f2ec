"""Compute a kernel's registers, with and without probes, and its changed descriptor; renumber registers in a probe's code."""

from __future__ import annotations

import re
import struct
from typing import TypeAlias

from gpubpf.errors import Refusal
from gpubpf.gcn.code_object import CodeObject, GcnKernel
from gpubpf.gcn.comgr import Comgr
from gpubpf.gcn.start import Start
from gpubpf.lower.launch_block import align
from gpubpf.record import Record

_WGP_MODE = 29  # a bit of COMPUTE_PGM_RSRC1
_REGISTERS = re.compile(r"\b([sv])(?:(\d+)\b|\[(\d+):(\d+)\])")
Change: TypeAlias = tuple[int, bytes]  # a file offset, and the bytes to write there


class Use(Record):
    """The VGPRs of a kernel, and the waves that fit on a SIMD unit."""

    vgprs: int
    waves: int


def changed(
    code: CodeObject, kernel: GcnKernel, start: Start, entry: int, sgprs: int, vgprs: int
) -> tuple[list[Change], Use, Use]:
    """Return the changes to the descriptor (entry, initial registers, register counts), and the kernel's use before and after.

    start: the registers when a wave starts
    entry: the address of the new first instruction
    sgprs, vgprs: the register counts with probes

    Raises Refusal if there are too few VGPRs.
    """
    descriptor = kernel.descriptor
    first, _, third = descriptor.resources
    has_choice = code.gpu.startswith("gfx10")
    size = _vgpr_size(code, kernel)
    had = ((first & 63) + 1) * size
    needed = max(had, vgprs)
    if code.gpu == "gfx90a":  # AGPRs follow the VGPRs
        own = own_vgprs(code, kernel)
        moved = max(own, align(vgprs, 4))
        needed = had - own + moved if had > own else max(had, moved)
        third = third & ~63 | moved // 4 - 1
    if needed > (512 if code.gpu == "gfx90a" else 256):
        raise Refusal("it leaves too few VGPRs")
    needed = align(needed, size)
    first = first & ~63 | needed // size - 1
    scalars = had_scalars = 0  # GFX10 always has all SGPRs
    if not has_choice:  # counts include VCC, FLAT_SCRATCH and XNACK_MASK
        had_scalars = ((first >> 6 & 15) + 1) * 8
        scalars = max(had_scalars, align(sgprs + 6, 16))
        first = first & ~(15 << 6) | scalars // 8 - 1 << 6
    at = kernel.descriptor_offset
    registers = struct.pack("<IIIH", third, first, start.resources, start.properties)
    changes = [(at + 16, struct.pack("<q", entry - kernel.descriptor_address)), (at + 44, registers)]
    return (
        changes,
        Use(had, _waves(code.gpu, descriptor.wave, had, had_scalars)),
        Use(needed, _waves(code.gpu, descriptor.wave, needed, scalars)),
    )


def _vgpr_size(code: CodeObject, kernel: GcnKernel) -> int:
    """Return the descriptor's VGPR allocation granule."""
    return 8 if code.gpu == "gfx90a" or (code.gpu.startswith("gfx10") and kernel.descriptor.wave == 32) else 4


def own_vgprs(code: CodeObject, kernel: GcnKernel) -> int:
    """Return how many VGPRs a kernel has, without AGPRs."""
    first, _, third = kernel.descriptor.resources
    if code.gpu == "gfx90a":
        return ((third & 63) + 1) * 4
    return ((first & 63) + 1) * _vgpr_size(code, kernel)


def compute_units(code: CodeObject, kernel: GcnKernel) -> int:
    """Return how many compute units the waves of a workgroup can use: two in WGP mode."""
    return 2 if code.gpu.startswith("gfx10") and kernel.descriptor.resources[0] >> _WGP_MODE & 1 else 1


def simd_units(code: CodeObject) -> int:
    """Return how many SIMD units a compute unit has."""
    return 2 if code.gpu.startswith("gfx10") else 4


def _waves(gpu: str, wave: int, vgprs: int, sgprs: int) -> int:
    """Return how many waves with these register counts fit on a SIMD unit."""
    if gpu.startswith("gfx10"):  # gfx103x allocates in twice the descriptor's granule
        return min(16, 1024 // align(vgprs, 16) if wave == 32 else 512 // align(vgprs, 8))
    total, most = (512, 8) if gpu == "gfx90a" else (256, 10)
    return min(most, total // vgprs, 800 // align(sgprs, 16))


def renumbered(comgr: Comgr, code: bytes, sgpr: int, vgpr: int) -> bytes:
    """Return a probe's code with other registers: above the kernel's own, which may all be in use in the middle of a kernel.

    sgpr, vgpr: numbers to add to those of SGPRs and VGPRs. Register pairs require an even offset; loads of several scalars require a
        multiple of 4.

    Raises Refusal if the new code does not assemble.
    """

    def moved(match: re.Match[str]) -> str:
        kind, one, first, last = match.groups()
        by = sgpr if kind == "s" else vgpr
        return f"{kind}{int(one) + by}" if one else f"{kind}[{int(first) + by}:{int(last) + by}]"

    instructions = comgr.probe(code)
    text = "\n".join(f"{one.name} {_REGISTERS.sub(moved, one.operands)}" for one in instructions)
    made = bytearray(comgr.assemble(text))
    if len(made) != len(code):
        raise Refusal("AMD's assembler does not know an instruction of its probe")
    for one in instructions:
        if one.name.startswith("v_cmpx_") and one.size == 8:
            made[one.address] = code[one.address]  # a result in EXEC has two encodings: keep the original's
    return bytes(made)
