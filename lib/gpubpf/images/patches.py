"""Measure kernels without PTX: NVIDIA's Compute Sanitizer API calls the programs as patches (`lower.patch_function`).

sidecar = with_patched(instrument_image(data, probes, target), probes)   # kernels without PTX are `patched`
patches = patches_at(table, probes, target)                              # once for each context
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpubpf.errors import Error, ImageError
from gpubpf.images import fatbin, line_table
from gpubpf.images.assemble import Target, assemble_patches
from gpubpf.images.sidecar import Sidecar, SidecarKernel
from gpubpf.inject.values import LINE, PtxProbe, Site
from gpubpf.lower.launch_block import LaunchBlock, launch_block
from gpubpf.lower.patch_function import (
    BLOCK_ENTER,
    INSTRUCTION_SIZE,
    MOST_PROGRAMS,
    SIGNATURES,
    Choice,
    Patch,
    PatchProgram,
    Signature,
    patch_module,
    reads_number,
    refusal,
)
from gpubpf.names import matches
from gpubpf.ptx.symbols import FUNCTION
from gpubpf.record import replace

_NO_PTX = (fatbin.SASS_ONLY, fatbin.LINKED)  # reasons of kernels that patches can measure
# A launch block in the table is that of all launches of a shape.
_PER_LAUNCH = {"pid_tgid": "host thread", "epoch": "allocations"}
PATCHED_KINDS = frozenset(("load", "store", "atomic", "async"))
PATCHED_SPACES = frozenset(access.space for signature in SIGNATURES.values() for access in signature.accesses)


class Instructions(dict[int, Site]):
    """The sites of a kernel without PTX, where every instruction is a site. The items are those at which source lines begin."""

    def get(self, number: int, otherwise: Any = None) -> Any:
        """Return the site of an instruction, with its source line. There is always an item at the first instruction."""
        begin = self._begins[bisect.bisect_right(self._begins, number) - 1]
        return replace(self[begin], number=number, offset=number * INSTRUCTION_SIZE)

    @functools.cached_property
    def _begins(self) -> list[int]:
        return sorted(self)


def sites_of(tables: Sequence[Sequence[Site]]) -> Instructions | None:
    """Return the sites of a kernel without PTX, from those of its builds (`SidecarKernel.sites`); None if it is a kernel with PTX.

    If the builds differ, no source line is known."""
    if not tables or any(site.point != LINE for table in tables for site in table) or not all(tables):
        return None
    same = all(table == tables[0] for table in tables)
    return Instructions(
        {site.number: site for site in tables[0]} if same else {0: _first(tables[0][0].function)}
    )


def refusal_of(probes: Sequence[PtxProbe]) -> str | None:
    """Return why these programs cannot run as patches; None if they can."""
    if len(probes) > MOST_PROGRAMS:
        return f"there are more than {MOST_PROGRAMS} programs"
    return next((reason for probe in probes if (reason := _refusal(probe)) is not None), None)


def _refusal(probe: PtxProbe) -> str | None:
    if (reason := refusal(probe.program, probe.point)) is not None:
        return reason
    if probe.accumulate is not None:
        return f"machine code is not counted, so {probe.accumulate} are unknown"
    for argument in probe.program.arguments:
        if argument.kind in _PER_LAUNCH:
            return f"the program reads its launch's {_PER_LAUNCH[argument.kind]}, which patches do not know"
    if probe.functions:
        return "Compute Sanitizer does not name the functions that a kernel calls"
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
    block, lines = _block(probes), _lines(data, target)
    kernels = tuple(
        SidecarKernel(
            name,
            (),
            0,
            block,
            _sites(name, lines),
            waits=False,
            patched=True,
            numbered=_numbered(probes),
            programs=sum(
                1 << bit
                for bit, probe in enumerate(probes)
                if not probe.kernels or matches(probe.kernels, name)
            ),
        )
        for name in names
    )
    return replace(sidecar, kernels=kernels, refusals=refusals)


def patches_at(table: int, probes: Sequence[PtxProbe], target: Target) -> Sidecar:
    """Return the patches for a context whose table is at this address in GPU memory. Raises Error, such as AssembleError."""
    if (why := refusal_of(probes)) is not None:
        raise Error(why)
    differ = len({probe.kernels for probe in probes}) > 1
    found = {
        number: tuple(
            PatchProgram(probe.program, probe.kinds, bit if differ else None, index)
            for bit, probe in enumerate(probes)
            if signature.point == probe.point
            for index in _accesses(signature, probe)
        )
        for number, signature in SIGNATURES.items()
    }
    choice, numbered = _choice(probes), _numbered(probes)
    numbers = [n for n, programs in found.items() if programs or ((choice or numbered) and n == BLOCK_ENTER)]
    made = [Patch(number, f"{FUNCTION}{index}", found[number]) for index, number in enumerate(numbers)]
    # Unless every kernel is wanted, functions of others are patched, too.
    every = any(not probe.kernels for probe in probes)
    text = patch_module(made, _block(probes), table, target.cc, every, choice)
    image = assemble_patches(text, target)
    return Sidecar(image, patches=tuple((patch.instruction, patch.name) for patch in made))


def _accesses(signature: Signature, probe: PtxProbe) -> Iterator[int]:
    """Yield the numbers of the accesses of an instruction at which a program runs; 0 for an instruction that is not an access."""
    if not signature.accesses:
        yield 0
    addressed = any(argument.field == "address" for argument in probe.program.arguments)
    for index, access in enumerate(signature.accesses):
        if (
            (not probe.spaces or access.space in probe.spaces)
            and (not probe.kinds or not access.kind or access.kind in probe.kinds)
            and (access.address or not addressed)
        ):
            yield index


def _first(name: str) -> Site:
    """Return the first instruction of a kernel, at an unknown source line."""
    return Site(0, name, 0, point=LINE, offset=0)


def _sites(name: str, lines: Mapping[str, tuple[Site, ...]]) -> tuple[Site, ...]:
    known = lines.get(name, ())
    return known if known and not known[0].number else (_first(name), *known)


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


def _numbered(probes: Sequence[PtxProbe]) -> bool:
    return any(reads_number(probe.program) for probe in probes)


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
