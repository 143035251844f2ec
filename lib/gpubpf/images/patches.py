"""Measure kernels without PTX: NVIDIA's Compute Sanitizer API calls the programs as patches (`lower.patch_function`).

sidecar = with_patched(instrument_image(data, probes, target), probes)   # kernels without PTX are `patched`
patches = patches_at(table, probes, target)                              # once for each context
"""

from __future__ import annotations

from collections.abc import Sequence

from gpubpf.errors import Error
from gpubpf.images import fatbin
from gpubpf.images.assemble import Target, assemble_patches
from gpubpf.images.sidecar import Sidecar, SidecarKernel
from gpubpf.inject.values import PtxProbe
from gpubpf.lower.launch_block import LaunchBlock, launch_block
from gpubpf.lower.patch_function import SIGNATURES, Patch, patch_module, refusal
from gpubpf.ptx.symbols import FUNCTION
from gpubpf.record import replace

_NO_PTX = (fatbin.SASS_ONLY, fatbin.LINKED)  # reasons of kernels that patches can measure
_PER_LAUNCH = (
    "launch",
    "replay",
    "pid_tgid",
    "epoch",
)  # all launches of a shape share a launch block in the table


def refusal_of(probes: Sequence[PtxProbe]) -> str | None:
    """Return why these programs cannot run as patches; None if they can."""
    for probe in probes:
        if (reason := refusal(probe.program, probe.point)) is not None:
            return reason
        if probe.sampled:
            return "patches cannot choose blocks or warps"
        if any(argument.kind in _PER_LAUNCH for argument in probe.program.arguments):
            return "the program reads the number of its launch, which patches do not know"
        if any(argument.kind == "shard" for argument in probe.program.arguments):
            return "the program counts by site, which patches do not do yet"
    return None


def with_patched(sidecar: Sidecar, probes: Sequence[PtxProbe]) -> Sidecar:
    """Return the sidecar of a module, with kernels to patch in place of those that are refused because they have no PTX.

    Without PTX, a module has no instrumented kernels, so such a sidecar has no image.
    """
    names = [name for name, reason in sidecar.refusals.items() if reason in _NO_PTX]
    if not names or sidecar.image or sidecar.later is not None:
        return sidecar
    refusals = {name: reason for name, reason in sidecar.refusals.items() if name not in names}
    if (why := refusal_of(probes)) is not None:
        return replace(sidecar, refusals=refusals | dict.fromkeys(names, f"no PTX, and {why}"))
    block = _block(probes)
    kernels = tuple(SidecarKernel(name, (), 0, block, waits=False, patched=True) for name in names)
    return replace(sidecar, kernels=kernels, refusals=refusals)


def patches_at(table: int, probes: Sequence[PtxProbe], target: Target) -> Sidecar:
    """Return the patches for a context whose table is at this address in GPU memory. Raises Error, such as AssembleError."""
    if (why := refusal_of(probes)) is not None:
        raise Error(why)
    made = [
        Patch(probe.program, number, f"{FUNCTION}{index}")
        for index, (probe, number) in enumerate(
            (probe, number)
            for probe in probes
            for number, signature in SIGNATURES.items()
            if signature.point == probe.point and (not probe.spaces or signature.space in probe.spaces)
        )
    ]
    text = patch_module(made, _block(probes), table, target.cc)
    image = assemble_patches(text, target)
    return Sidecar(image, patches=tuple((patch.instruction, patch.name) for patch in made))


def _block(probes: Sequence[PtxProbe]) -> LaunchBlock:
    return launch_block([probe.program for probe in probes])
