"""Measure kernels without PTX: NVIDIA's Compute Sanitizer API calls the programs as patches (`lower.patch_function`).

sidecar = with_patched(instrument_image(data, probes, target), probes)   # kernels without PTX are `patched`
patches = patches_at(table, probes, target)                              # once for each context
"""

from __future__ import annotations

from collections.abc import Sequence

from gpubpf.errors import Error, ImageError
from gpubpf.images import fatbin, line_table
from gpubpf.images.assemble import Target, assemble_patches
from gpubpf.images.sidecar import Sidecar, SidecarKernel
from gpubpf.inject.values import LINE, PtxProbe, Site
from gpubpf.lower.launch_block import LaunchBlock, launch_block
from gpubpf.lower.patch_function import (
    BLOCK_ENTER,
    INSTRUCTION_SIZE,
    SIGNATURES,
    Choice,
    Patch,
    PatchProgram,
    patch_module,
    refusal,
)
from gpubpf.ptx.symbols import FUNCTION
from gpubpf.record import replace

_NO_PTX = (fatbin.SASS_ONLY, fatbin.LINKED)  # reasons of kernels that patches can measure
# A launch block in the table is that of all launches of a shape.
_PER_LAUNCH = ("launch", "replay", "pid_tgid", "epoch")
PATCHED_KINDS = frozenset(("load", "store", "atomic"))
PATCHED_SPACES = frozenset(signature.space for signature in SIGNATURES.values() if signature.space)


def refusal_of(probes: Sequence[PtxProbe]) -> str | None:
    """Return why these programs cannot run as patches; None if they can."""
    return next((reason for probe in probes if (reason := _refusal(probe)) is not None), None)


def _refusal(probe: PtxProbe) -> str | None:
    if (reason := refusal(probe.program, probe.point)) is not None:
        return reason
    if probe.accumulate is not None:
        return f"machine code is not counted, so {probe.accumulate} are unknown"
    if any(argument.kind in _PER_LAUNCH for argument in probe.program.arguments):
        return "the program reads the number of its launch or its host thread, which patches do not know"
    for what, wanted, known in (
        ("kind", probe.kinds, PATCHED_KINDS),
        ("space", probe.spaces, PATCHED_SPACES),
    ):
        if wanted and known.isdisjoint(wanted):
            return f"Compute Sanitizer has no patches at accesses of the {what} {' or '.join(wanted)}"
    return None


def with_patched(
    sidecar: Sidecar, probes: Sequence[PtxProbe], data: bytes = b"", target: Target | None = None
) -> Sidecar:
    """Return the sidecar of a module, with kernels to patch in place of those that are refused because they have no PTX.

    A module has PTX or has none, so the sidecar of such a module has no image.

    data: the module's image, for its source lines.
    target: the device, if the lines are wanted.
    """
    names = [name for name, reason in sidecar.refusals.items() if reason in _NO_PTX]
    if not names or sidecar.image or sidecar.later is not None:
        return sidecar
    refusals = {name: reason for name, reason in sidecar.refusals.items() if name not in names}
    if (why := refusal_of(probes)) is not None:
        return replace(sidecar, refusals=refusals | dict.fromkeys(names, f"no PTX, and {why}"))
    block = _block(probes)
    lines = _lines(data, target) if any(probe.point == "access" for probe in probes) else {}
    kernels = tuple(
        SidecarKernel(name, (), 0, block, lines.get(name, ()), waits=False, patched=True) for name in names
    )
    return replace(sidecar, kernels=kernels, refusals=refusals)


def patches_at(table: int, probes: Sequence[PtxProbe], target: Target) -> Sidecar:
    """Return the patches for a context whose table is at this address in GPU memory. Raises Error, such as AssembleError."""
    if (why := refusal_of(probes)) is not None:
        raise Error(why)
    found = {
        number: tuple(
            PatchProgram(probe.program, probe.kinds)
            for probe in probes
            if signature.point == probe.point and (not probe.spaces or signature.space in probe.spaces)
        )
        for number, signature in SIGNATURES.items()
    }
    choice = _choice(probes)
    numbers = [n for n, programs in found.items() if programs or (choice and n == BLOCK_ENTER)]
    made = [Patch(number, f"{FUNCTION}{index}", found[number]) for index, number in enumerate(numbers)]
    # Unless every kernel is wanted, functions of others are patched, too.
    every = any(not probe.kernels for probe in probes)
    text = patch_module(made, _block(probes), table, target.cc, every, choice)
    image = assemble_patches(text, target)
    return Sidecar(image, patches=tuple((patch.instruction, patch.name) for patch in made))


def _lines(data: bytes, target: Target | None) -> dict[str, tuple[Site, ...]]:
    """Return where the source lines of kernels begin; {} if that is unknown, as on the embedded device, which runs no SASS."""
    if target is None or target.device != "gpu":
        return {}
    try:
        image = fatbin.cubin_for(fatbin.images_of_bytes(data), target.cc)
        found = line_table.source_lines(image.read()) if image is not None else {}
    except ImageError:
        return {}
    return {
        name: tuple(
            Site(at // INSTRUCTION_SIZE, name, 0, file, line, LINE, offset=at) for at, file, line in lines
        )
        for name, lines in found.items()
    }


def _choice(probes: Sequence[PtxProbe]) -> Choice | None:
    """Return how blocks or warps are chosen; None without sampling."""
    from gpubpf.inject import sampling  # imported here, because few measurements have patches

    units = sampling.units([probes])
    if not units:
        return None
    code, counting = (sampling.choice(units[0], counts) for counts in (False, True))
    return Choice(code, counting, sampling.SKIPS, sampling.GROUP)


def _block(probes: Sequence[PtxProbe]) -> LaunchBlock:
    choice = _choice(probes)
    return launch_block([*(probe.program for probe in probes), *([choice.counting] if choice else [])])
