"""Inject probes into the kernels of a code object.

    injected = inject(CodeObject(data), {"kernel": [Probe(program, "exit")]})
    injected.image            # a code object with the same kernels, plus probes
    injected.refusals         # for each kernel without probes, the reason

All added code is in a new segment after the existing ones. For each kernel, it has a prologue, a copy of the instructions, and sites.
The prologue saves the values that probes need into registers that the kernel does not use, and calls the entry probe. In the copy,
each s_endpgm is a branch to a site. EXEC may have lost lanes by then, so the site re-enables all lanes that the wave started with. It
sets the probe's registers and jumps to the probe, which ends the wave. If a program reads the time at which lanes left the kernel, the
site calls the probe once per group of lanes instead (times.py). The copy also counts work (work.py).

The launch block follows the kernel's arguments: whoever launches the kernel passes a copy of its arguments and the block.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from gpubpf.ebpf.probe import Probe
from gpubpf.errors import Refusal
from gpubpf.gcn import arguments, calls
from gpubpf.gcn.added import PAGE, Added, append, hide_variables
from gpubpf.gcn.code_object import CodeObject, GcnKernel
from gpubpf.gcn.comgr import Comgr
from gpubpf.gcn.inner_sites import InnerProbes
from gpubpf.gcn.kernel_code import KernelCode, read
from gpubpf.gcn.kernel_writer import InjectedGcnKernel, KernelWriter, PlacedProbe, block_offset
from gpubpf.gcn.loops import GcnLoops
from gpubpf.gcn.start import KEPT
from gpubpf.lower import amdgcn
from gpubpf.lower.amdgcn import WaveProgram
from gpubpf.lower.launch_block import LaunchBlock, align, launch_block
from gpubpf.record import Record

# Not gfx101x: its branches over 64 words go wrong (LLVM: FeatureOffset3fBug), and copying changes branch distances.
_FAMILIES = re.compile(r"gfx(90[0-9ac]|103[0-6])")

_WHOLE = ("entry", "exit")  # points where `Probe.loops` chooses kernels


class GcnInjected(Record):
    """A code object with probes. Kernels in `refusals` are unchanged."""

    image: bytes
    kernels: Mapping[str, InjectedGcnKernel]
    refusals: Mapping[str, str]


def inject(
    code: CodeObject, kernels: Mapping[str, Sequence[Probe[WaveProgram]]], virtual: bool = False
) -> GcnInjected:
    """Return the code object with programs injected into these kernels. Raises ImageError if it is unreadable or has no room.

    kernels: the probes of each kernel to instrument, by mangled name
    virtual: whether the code object will run on hipsim's virtual clock; then marks around the added code say that it takes no time
    """
    comgr = Comgr(code.isa)
    added = Added(align(code.end, PAGE))
    image = bytearray(code.data)
    made: dict[str, InjectedGcnKernel] = {}
    refusals: dict[str, str] = {}
    places = functools.cache(functools.partial(arguments.places, code))
    known: dict[
        tuple[tuple[object, ...], ...],
        tuple[Mapping[tuple[str, ...], PlacedProbe], LaunchBlock, InnerProbes],
    ] = {}
    for kernel in code.kernels:
        probes = kernels.get(kernel.name)
        if not probes:
            continue
        mark = len(added.content)
        try:
            if not _FAMILIES.fullmatch(code.gpu):
                raise Refusal(f"no probes for {code.gpu} yet")
            if kernel.descriptor.preload:
                raise Refusal("its arguments are preloaded into registers")
            body = read(code, comgr, kernel)
            probes = [p for p in probes if not (p.loops and p.point in _WHOLE) or _may_hang(body)]
            if not probes:
                continue
            kinds = tuple(dict.fromkeys(p.accumulate for p in probes if p.accumulate))
            asked = any(p.program.reads_arguments for p in probes)
            passed = _from_block(kernel, places().get(kernel.name)) if asked else ()
            key = (
                passed,
                *(
                    (
                        p.point,
                        p.program.function,
                        p.program.wave,
                        p.accumulate,
                        p.kinds,
                        p.spaces,
                        p.opcodes,
                        p.loops,
                    )
                    for p in probes
                ),
            )
            if key not in known:
                block = launch_block([probe.program for probe in probes])
                inside = InnerProbes(probes, block, code.gpu)
                known[key] = (
                    _placed(code, comgr, probes, kinds, block, added, passed),
                    block,
                    inside,
                )
            mark = len(added.content)
            writer = KernelWriter(code, comgr, kernel, body, kinds, added, virtual, *known[key])
            made[kernel.name], changes = writer.write()
            for offset, content in changes:
                image[offset : offset + len(content)] = content
        except Refusal as reason:
            refusals[kernel.name] = str(reason)
            del added.content[mark:]
    if made:
        hide_variables(code, image)
        append(code, image, added)
    return GcnInjected(bytes(image), made, refusals)


def _may_hang(body: KernelCode) -> bool:
    """Return whether a kernel may not end by itself: it has a loop, a barrier or a call."""
    waits = any(one.name in ("s_barrier", calls.CALL) for one in body.instructions)
    return waits or bool(GcnLoops(body).ends)


def _from_block(
    kernel: GcnKernel, places: Sequence[arguments.ArgumentPlace] | None
) -> tuple[tuple[int, int], ...]:
    """Return the arguments of a kernel as (offset from its launch block, size), in bytes.

    Raises Refusal if the arguments are unknown, or cannot be right.
    """
    if places is None or any(at + size > kernel.descriptor.kernarg_bytes for at, size in places):
        raise Refusal("its metadata does not say what arguments it has")
    return tuple((at - block_offset(kernel), size) for at, size in places)


def _placed(
    code: CodeObject,
    comgr: Comgr,
    probes: Sequence[Probe[WaveProgram]],
    kinds: Sequence[str],
    block: LaunchBlock,
    added: Added,
    passed: Sequence[tuple[int, int]],
) -> dict[tuple[str, ...], PlacedProbe]:
    """Add the probes that run where waves begin and end. Return them by points. Raises VerifyError if a probe cannot be compiled."""
    found: dict[tuple[str, ...], PlacedProbe] = {}
    for points in (amdgcn.AT_ENTRY, amdgcn.AT_EXIT):
        chosen = [probe for point in points for probe in probes if probe.point == point]
        if not chosen:
            continue
        at_exit, used = points == amdgcn.AT_EXIT, tuple(dict.fromkeys(one.point for one in chosen))
        counters = [kinds.index(p.accumulate) if p.accumulate else None for p in chosen]
        asked = {time for p in chosen for time in p.program.times} if at_exit else set()
        given = tuple(time for time in amdgcn.TIMES if time in asked)
        returns = not at_exit or bool(given)
        sites = [used.index(p.point) for p in chosen]
        probe = amdgcn.compile_probe(
            [p.program for p in chosen], block, code.gpu, counters, returns, bool(given), sites, passed
        )
        back = comgr.assemble("s_setpc_b64 s[0:1]") if returns else b""
        vgprs = max(probe.vgprs, KEPT - 1) if returns else probe.vgprs  # v0 to v2 hold the work-item indices
        found[points] = PlacedProbe(added.add(probe.code + back), probe.sgprs, vgprs, given, used)
    return found
