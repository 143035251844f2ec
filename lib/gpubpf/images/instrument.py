"""Make a sidecar: the instrumented copy of a module, which is loaded in addition to the application's own.

The steps are: choose the PTX among the images, find the matching kernels, inject the device programs, assemble. Copies with many
probes get a register limit (`limit_of_copy`), so that most of the original's warps fit. If a copy needs so many registers that it may
not fit where the original does, the sidecar also has a copy with a stricter limit. Results are cached by the content of all inputs.

    sidecar = instrument_image(data, [Probe(fragment, "exit", "instructions", kernels=("vec*",))], target)
    sidecar.image                     # a cubin for a GPU, PTX for the embedded device
    sidecar.kernels, sidecar.refusals

A program launches few of a large module's kernels, so such a module may get the copy of a kernel at its first launch (`later`):

    sidecar = instrument_image(data, probes, target, later=True)
    if sidecar.later is not None:
        copy = instrument_kernels(sidecar.later.source, probes, target, sidecar.later.kernels[:1])
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from gpubpf import cache
from gpubpf.errors import AssembleError, ImageError, PtxError
from gpubpf.images import device_link, fatbin, tile_ir
from gpubpf.images.assemble import KernelResources, Target, TemporaryFailure, assemblers, registers
from gpubpf.images.fatbin import FatbinImage
from gpubpf.images.sidecar import (
    STAGE,
    Later,
    RegisterUse,
    Sidecar,
    Source,
    matching,
    pack,
    refuse,
    unpack,
)
from gpubpf.inject.values import PtxProbe
from gpubpf.lower.fragment import Fragment
from gpubpf.ptx.symbols import LIMITED
from gpubpf.record import asdict, replace

COUNTING_NICENESS = 10  # added niceness of a ptxas that only counts registers
# A module with more kernels to instrument is large. With memtrace, the copies of 500 kernels take 100 s of CPU time, one copy 0.5 s.
MANY_KERNELS = 32
MOST_TEXTS = 4096  # PTX texts that one cubin is linked from
# Environment variable for tests: the embedded device's programs are taken to have no PTX, which it runs nevertheless.
HIDDEN_VARIABLE = "CUDASIM_SASS"
# Facts about the whole text of this many large modules stay in memory.
_KNOWN_MODULES = 64
# Modules with these words get all copies at once: a copy may need a variable's value from when the module is loaded
# (`InjectedVariable.fixed`), or copies of other kernels.
_NEEDS_ALL = (".callprototype", ".calltargets", "cudaLaunchDevice", "cudaGetParameterBuffer")


def instrument_image(data: bytes, probes: Sequence[PtxProbe], target: Target, later: bool = False) -> Sidecar:
    """Return the sidecar of an image that was passed to `cuModuleLoadData` or `cuLibraryLoadData`: a fatbin, cubin or PTX.

    A damaged image raises nothing, because it is the application's. Its kernels are refused instead.

    later: as in `instrument_module`
    """
    try:
        images = fatbin.images_of_bytes(data)
    except ImageError:
        return refuse((), probes, fatbin.SASS_ONLY)
    return instrument_module(images, probes, target, later)


def instrument_module(
    images: Sequence[FatbinImage], probes: Sequence[PtxProbe], target: Target, later: bool = False
) -> Sidecar:
    """Return the sidecar of a module, given the images that are its forms. Raises nothing, like `instrument_image`.

    later: whether a large module may get a sidecar without copies (`Sidecar.later`), unless a complete sidecar is in the cache
    """
    chosen = choose(images, target)
    if isinstance(chosen, str):
        return refuse(_entries_for(images, target), probes, chosen)
    try:
        text = chosen.text
    except ImageError as error:
        return refuse(_entries_for(images, target), probes, str(error))
    before, own = _registers_of(images, replace(target, release=chosen.release))
    source = Source(text, cache.key(text), chosen.options, chosen.release, before, own)
    return _of_source(source, probes, target, (), later)


def instrument_kernels(
    source: Source, probes: Sequence[PtxProbe], target: Target, kernels: Collection[str] = ()
) -> Sidecar:
    """Return the sidecar with the copies of some of a module's kernels. Raises nothing.

    kernels: the mangled names; () for all kernels
    """
    return _of_source(source, probes, target, kernels, False)


def _of_source(
    source: Source,
    probes: Sequence[PtxProbe],
    target: Target,
    kernels: Collection[str],
    later: bool,
) -> Sidecar:
    """Return a module's sidecar, from the cache if it is there. Parameters as in `instrument_module` and `instrument_kernels`."""
    target = replace(target, release=source.release)
    key = cache.key(
        _version(),
        source.digest,
        repr((source.before, source.own)),
        source.options,
        repr(target),
        *assemblers(target),
        *(_identity(probe) for probe in probes),
        *sorted(kernels),
    )
    store = cache.default()
    if (kept := store.get(STAGE, key)) is not None and (found := unpack(kept)) is not None:
        return found
    text = source.text
    if later and (entries := _large(text)) and len(matched := matching(entries, probes)) > MANY_KERNELS:
        return Sidecar(entries=entries, later=Later(matched, source.compressed()))
    from gpubpf.images.copies import (
        make_copies,  # imported here, because nearly all sidecars come from the cache
    )

    failures: list[AssembleError] = []
    known = _known_constants(source.digest) if kernels else None
    made = make_copies(
        text, source.options, probes, target, source.before, source.own, failures, kernels, known
    )
    if not any(isinstance(failure, TemporaryFailure) for failure in failures):
        store.put(STAGE, key, pack(made))
    return made


def _large(text: str) -> tuple[str, ...]:
    """Return the kernels of a large module whose copies can be made at any time; () for any other module, and without PTX."""
    if text.count(".entry") <= MANY_KERNELS or any(word in text for word in _NEEDS_ALL):
        return ()
    from gpubpf.ptx import parser  # imported here, because few modules are large

    try:
        return tuple(parser.parse(text).entries)
    except PtxError:
        return ()


@functools.lru_cache(_KNOWN_MODULES)
def _known_constants(digest: str) -> dict[str, bool]:
    """Return `Module.known_constants` for the module whose text has this digest. All copies of the module's kernels share it."""
    return {}


def made_from(cubin: bytes, texts: bytes, inputs: int) -> bytes:
    """Return the PTX that a cubin was made from, as a fatbin with the options of the cubin's ptxas; else the cubin itself.

    texts: PTX texts separated by zero bytes.
    inputs: how many images of any kind the cubin was made from.
    """
    if len(texts) > fatbin.LARGEST_PTX or texts.count(b"\0") > MOST_TEXTS:
        return cubin
    images = _several(texts) or [image for image in (fatbin.ptx_image(texts),) if image is not None]
    if not images:
        return cubin
    from gpubpf.ptx.link import Input, LinkError, link  # imported here because few programs link

    try:
        made = images[0].payload
        if inputs > 1:
            # An input of another kind, such as a cubin, may define missing names.
            parts = [Input(f"text {k}", image.text) for k, image in enumerate(images)]
            made = link(parts, complete=False, partial=len(images) < inputs).encode(
                "utf-8", "surrogateescape"
            )
    except (PtxError, LinkError):
        return cubin
    run = fatbin.PtxasRun()
    with contextlib.suppress(ImageError):  # the embedded device's own cubins have no options
        run = fatbin.ptxas_run(cubin)
    options = " ".join(word for word in run.options.split() if word != fatbin.COMPILE_ONLY)
    image = fatbin.ptx_image(made, fatbin.PtxasRun(run.release, options))
    return cubin if image is None else fatbin.pack(image)


def _several(data: bytes) -> list[FatbinImage]:
    """Return the PTX texts that zero bytes separate; [] if `data` is anything else, or a single text."""
    images = [fatbin.ptx_image(text) for text in data.split(b"\0") if text.strip()]
    found = [image for image in images if image is not None]
    return found if len(found) == len(images) > 1 else []


def choose(images: Sequence[FatbinImage], target: Target) -> FatbinImage | str:
    """Return the module's PTX that the target's driver would load, or that its cubin was made from; or the reason for its lack."""
    if target.device == "sim" and HIDDEN_VARIABLE in os.environ:
        return fatbin.SASS_ONLY
    # The embedded device also runs PTX for a newer GPU.
    return device_link.choose(images, target.cc, newer=target.device == "sim")


def _registers_of(images: Sequence[FatbinImage], target: Target) -> tuple[dict[str, int], bool]:
    """Return the registers per thread of a module's kernels, from a cubin, and whether the target would run this cubin.

    The embedded device does not run cubins. For it, any cubin of the module has to do if none suits the target.
    """
    running = fatbin.cubin_for(images, target.cc)
    own = running is not None
    if running is None and target.device == "sim":
        running = next((image for image in images if image.kind == "elf" and not image.relocatable), None)
    if running is None:
        return {}, own
    try:
        kernels = fatbin.kernels(running.read())
    except ImageError:
        return {}, own
    return {name: kernel.registers for name, kernel in kernels.items() if kernel.registers is not None}, own


def _entries_for(images: Sequence[FatbinImage], target: Target) -> list[str]:
    """Return the kernels of a module, if possible from the image that the target runs: the program waits, so read only that image."""
    running = fatbin.cubin_for(images, target.cc)
    return (_entries_of([running]) if running is not None else []) or _entries_of(images)


def _entries_of(images: Sequence[FatbinImage]) -> list[str]:
    """Return the kernels of a module, from all images that can be read, up to fatbin.LARGEST_IMAGE bytes in all."""
    from gpubpf.ptx import parser  # imported here, because nearly all sidecars come from the cache

    found: dict[str, None] = {}
    left = fatbin.LARGEST_IMAGE  # a module may claim to have any number of large images
    for image in images:
        left -= image.full_size
        if left < 0:
            break
        try:
            if image.kind == "elf":
                found |= dict.fromkeys(fatbin.kernels(image.read()))
            elif image.kind == "tile":
                found |= dict.fromkeys(tile_ir.kernel_names(image.read()))
            elif image.kind == "ptx":
                found |= dict.fromkeys(parser.parse(image.text).entries)
        except (ImageError, PtxError):
            continue
    return list(found)


def register_use(sidecar: Sidecar, target: Target, kernels: Collection[str]) -> dict[str, RegisterUse]:
    """Return the registers of `kernels` before and after instrumentation, for the target's architecture; empty without ptxas.

    The first call takes as long as ptxas. Do not call it while a launch waits.
    """
    if not sidecar.text:
        return {}
    target = replace(target, release=sidecar.release)
    # For a GPU, the whole sidecar has been assembled, and this result is in the cache.
    copies = [name for k in sidecar.kernels if k.name in kernels for name in (k.name, k.limited) if name]
    only = copies if target.device == "sim" else ()
    try:
        before = registers(sidecar.original, target, sidecar.options, kernels, COUNTING_NICENESS) or {}
        after = registers(sidecar.text, target, sidecar.options, only, COUNTING_NICENESS) or {}
    except TemporaryFailure:
        return {}
    found = {}
    for name in after.keys() & before.keys() & set(kernels):
        old, new = before[name], after[name]
        limited = after.get(name + LIMITED, KernelResources(0))
        found[name] = RegisterUse(
            old.registers,
            new.registers,
            limited.registers,
            max(0, new.stack - old.stack),
            max(0, limited.stack - old.stack),
        )
    return found


@functools.cache
def _version() -> str:
    """Return a key that changes with the code that makes a sidecar from PTX and fragments.

    How the PTX is found in an image (`fatbin`, `elf`) does not matter here, because the text itself is part of a sidecar's key.
    """
    package = Path(__file__).resolve().parents[1]
    others = (
        "names.py",
        "ebpf/bytecode.py",
        "ebpf/maps.py",
        "ebpf/probe.py",
        "ebpf/sampling.py",
        "images/assemble.py",
        "images/compiled_sums.py",
        "images/copies.py",
        "images/instrument.py",
        "images/line_table.py",
        "images/occupancy.py",
        "images/sidecar.py",
        "images/stack.py",
        "images/yields.py",
        "lower/fragment.py",
        "lower/launch_block.py",
        "lower/numbers.py",
        "record.py",
    )
    rooms = (file for room in ("ptx", "inject") for file in sorted((package / room).glob("*.py")))
    return cache.key_of_files([*rooms, *(package / name for name in others)])


def _identity(probe: PtxProbe) -> str:
    fragment = probe.program
    arguments = [(a.name, a.type, a.kind, a.map, a.offset, a.width, a.field) for a in fragment.arguments]
    rest = asdict(probe.with_program(Fragment("", "", ())))
    return repr((fragment.ptx, arguments, rest))
