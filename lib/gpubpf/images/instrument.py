"""Make a sidecar: the instrumented copy of a module, which is loaded in addition to the application's own.

The steps are: choose the PTX among the images, find the matching kernels, inject the device programs, assemble. Copies with many
probes get a register limit (`limit_of_copy`), so that most of the original's warps fit. If a copy needs so many registers that it may
not fit where the original does, the sidecar also has a copy with a stricter limit. Results are cached by the content of all inputs.

    sidecar = instrument_image(data, [Attachment(fragment, "exit", ("vec*",), "instructions")], target)
    sidecar.image                     # a cubin for a GPU, PTX for the embedded device
    sidecar.kernels, sidecar.refusals

A program launches few of a large module's kernels, so such a module may get the copy of a kernel at its first launch (`later`):

    sidecar = instrument_image(data, attachments, target, later=True)
    if sidecar.later is not None:
        copy = instrument_kernels(sidecar.later.source, attachments, target, sidecar.later.kernels[:1])
"""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpubpf import cache, names
from gpubpf.errors import AssembleError, ImageError, PtxError
from gpubpf.images import device_link, fatbin
from gpubpf.images.assemble import (
    KernelResources,
    Target,
    TemporaryFailure,
    assemble,
    assemblers,
    registers,
    with_lines,
)
from gpubpf.images.compiled_sums import operations_by_line
from gpubpf.images.fatbin import FatbinImage
from gpubpf.images.occupancy import MOST, limit_of_copy, most_registers
from gpubpf.images.stack import deeper, recursive
from gpubpf.lower.fragment import Fragment
from gpubpf.lower.launch_block import LaunchBlock
from gpubpf.ptx import contraction, flow, module, parser
from gpubpf.ptx.call_graph import CallGraph
from gpubpf.ptx.device_launches import launched_name
from gpubpf.ptx.inject import inject
from gpubpf.ptx.probe import DIVIDING, FREQUENT, SEEING_RESULTS
from gpubpf.ptx.values import LIMITED, Injected, InjectedVariable, Placement, Site
from gpubpf.show import progress, table

if TYPE_CHECKING:
    from gpubpf.ebpf.sampling import Unit

STAGE = "sidecar"  # in the cache
COUNTING_NICENESS = 10  # of ptxas where it only counts registers
_CAREFUL = "-Ofc=min"
# The embedded device does not assemble, so a copy's register count is unknown beforehand. Probes rarely need more
# than this, except in kernels with few registers, whose copies fit anyway.
_PROBE_REGISTERS = 24
# A module with more kernels to instrument is a large one. Of 500 kernels, memtrace's copies take 100 s of CPU time, one alone 0.5 s.
MANY_KERNELS = 32
# Facts about the whole text of this many large modules stay in memory.
_KNOWN_MODULES = 64
# Copies of these need variables as they are when the module is loaded (`InjectedVariable.fixed`), or copies of other kernels.
_NEEDS_ALL = (".callprototype", ".calltargets", "cudaLaunchDevice", "cudaGetParameterBuffer")


@dataclass(frozen=True)
class Attachment:
    """A lowered device program, the point it is attached to, and the `--kernel` patterns of its kernels (none: every kernel).

    `accumulate`, `kinds`, `spaces`, `functions`, `opcodes`, `sampled` and `alike` are as in `Placement`.
    """

    fragment: Fragment
    point: str
    kernels: tuple[str, ...] = ()
    accumulate: str | None = None
    kinds: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    opcodes: tuple[str, ...] = ()
    sampled: Unit | Literal[""] = ""
    alike: int = 0


@dataclass(frozen=True)
class SidecarKernel:
    """How to launch the instrumented copy of the kernel `name` (mangled).

    It takes the application's own `parameters`, as (offset, size) in bytes, then the launch block at `block_offset`. The other
    attributes are as in `InjectedKernel`. `limited`: the name of a second copy, for launches where the first does not fit; "" if there
    is none.
    """

    name: str
    parameters: tuple[tuple[int, int], ...]
    block_offset: int
    block: LaunchBlock
    sites: tuple[Site, ...] = ()
    waits: bool = True
    site_count: int = 0
    unprobed: Mapping[str, int] = field(default_factory=dict)  # unprobed accesses by opcode
    limited: str = ""
    amd: AmdKernel | None = None  # for a kernel on an AMD GPU


@dataclass(frozen=True)
class AmdKernel:
    """Attributes of kernels on AMD GPUs only: see `gcn.kernel_writer.InjectedGcnKernel`. registers: VGPRs."""

    wave: int
    compute_units: int
    most_threads: int
    original_threads: int
    registers: RegisterUse
    references: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RegisterUse:
    """The registers per thread of a kernel, of its copy, and of its limited copy (0 if there is none).

    spilled, spilled_limited: the additional local memory of these copies compared to the original, in bytes per thread.
    """

    before: int
    after: int
    limited: int = 0
    spilled: int = 0
    spilled_limited: int = 0

    def in_launches(self, instrumented: int, limited: int) -> tuple[int, int, int]:
        """Return the registers before and after, and the bytes spilled. `limited`: the launches of the limited copy."""
        if not limited or not self.limited:
            return self.before, self.after, self.spilled
        after = self.limited if limited >= instrumented else self.after
        return self.before, after, max(self.spilled, self.spilled_limited)


@dataclass(frozen=True)
class Sidecar:
    """The image that the agent loads. `image` is empty if no kernel matched, or if all were refused.

    `entries`: all kernels of the module (mangled). `refusals`: the reason for each matched kernel that is not in `kernels`.
    `launched`: kernels that the image has a copy of for other kernels to launch, and the names of these copies. `later`: the kernels
    whose copies have to be asked for; None: the image has all.
    """

    image: bytes = field(default=b"", repr=False)
    kernels: tuple[SidecarKernel, ...] = ()
    refusals: Mapping[str, str] = field(default_factory=dict)
    variables: tuple[InjectedVariable, ...] = ()
    entries: tuple[str, ...] = ()
    launched: tuple[tuple[str, str], ...] = ()
    # For `register_use`, which later computes how many registers the probes cost.
    original: str = field(default="", repr=False)
    text: str = field(default="", repr=False)
    options: str = ""
    release: str = ""
    later: Later | None = None


@dataclass(frozen=True)
class Source:
    """What a module's sidecar is made from.

    stored   the PTX, perhaps compressed
    digest   of the PTX, as a part of keys
    options  the application's ptxas options
    release  the ptxas release that it was made for, if known
    before   the kernels' registers, as far as known
    own      whether the target would run the code that has these registers
    """

    stored: str | bytes = field(repr=False)
    digest: str
    options: str
    release: str
    before: Mapping[str, int]
    own: bool

    @property
    def text(self) -> str:
        """The PTX."""
        if isinstance(self.stored, str):
            return self.stored
        return zlib.decompress(self.stored).decode("utf-8", "surrogateescape")

    def compressed(self) -> Source:
        """Return the same with compressed PTX, to be kept while the module is loaded."""
        return dataclasses.replace(
            self, stored=zlib.compress(self.text.encode("utf-8", "surrogateescape"), 1)
        )


@dataclass(frozen=True)
class Later:
    """A large module's kernels (mangled) that get copies when they are asked for: see `instrument_kernels`."""

    kernels: tuple[str, ...]
    source: Source

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The kernels, to look for one."""
        return frozenset(self.kernels)


def instrument_image(
    data: bytes, attachments: Sequence[Attachment], target: Target, later: bool = False
) -> Sidecar:
    """Return the sidecar of an image that was passed to `cuModuleLoadData` or `cuLibraryLoadData`: a fatbin, cubin or PTX.

    A damaged image raises nothing, because it is the application's. Its kernels are refused instead. later: as in
    `instrument_module`.
    """
    try:
        images = fatbin.images_of_bytes(data)
    except ImageError:
        return _refuse(_entries_of(_several(data)), attachments, fatbin.LINKED)
    return instrument_module(images, attachments, target, later)


def instrument_module(
    images: Sequence[FatbinImage], attachments: Sequence[Attachment], target: Target, later: bool = False
) -> Sidecar:
    """Return the sidecar of a module, given the images that are its forms. Raises nothing, like `instrument_image`.

    later: a large module may get a sidecar without copies (`Sidecar.later`), unless one with all of them is in the cache.
    """
    chosen = choose(images, target)
    if isinstance(chosen, str):
        return _refuse(_entries_for(images, target), attachments, chosen)
    try:
        text = chosen.text
    except ImageError as error:
        return _refuse(_entries_for(images, target), attachments, str(error))
    before, own = _registers_of(images, dataclasses.replace(target, release=chosen.release))
    source = Source(text, cache.key(text), chosen.options, chosen.release, before, own)
    return _of_source(source, attachments, target, (), later)


def instrument_kernels(
    source: Source, attachments: Sequence[Attachment], target: Target, kernels: Collection[str] = ()
) -> Sidecar:
    """Return the sidecar with the copies of some of a module's kernels (mangled); none named: of all. Raises nothing."""
    return _of_source(source, attachments, target, kernels, False)


def _of_source(
    source: Source,
    attachments: Sequence[Attachment],
    target: Target,
    kernels: Collection[str],
    later: bool,
) -> Sidecar:
    """See `instrument_module` and `instrument_kernels`. The sidecar comes from the cache if it has it."""
    target = dataclasses.replace(target, release=source.release)
    key = cache.key(
        _version(),
        source.digest,
        repr((source.before, source.own)),
        source.options,
        repr(target),
        *assemblers(target),
        *(_identity(attachment) for attachment in attachments),
        *sorted(kernels),
    )
    store = cache.default()
    if (kept := store.get(STAGE, key)) is not None and (found := unpack(kept)) is not None:
        return found
    text = source.text
    if (
        later
        and (entries := _large(text))
        and len(matched := _placements(attachments, entries)) > MANY_KERNELS
    ):
        return Sidecar(entries=entries, later=Later(tuple(matched), source.compressed()))
    failures: list[AssembleError] = []
    known = _known_constants(source.digest) if kernels else None
    made = _instrument(
        text, source.options, attachments, target, source.before, source.own, failures, kernels, known
    )
    if not any(isinstance(failure, TemporaryFailure) for failure in failures):
        store.put(STAGE, key, pack(made))
    return made


def _large(text: str) -> tuple[str, ...]:
    """Return the kernels of a large module whose copies can be made at any time; none if it is another module, or no PTX."""
    if text.count(".entry") <= MANY_KERNELS or any(word in text for word in _NEEDS_ALL):
        return ()
    try:
        return tuple(parser.parse(text).entries)
    except PtxError:
        return ()


@functools.lru_cache(_KNOWN_MODULES)
def _known_constants(digest: str) -> dict[str, bool]:
    """Return where to keep which variables are constants of the module whose text has this digest (`Module.known_constants`)."""
    return {}


def joined(data: bytes, inputs: int) -> bytes:
    """Link the PTX texts passed to cuLink, which are separated by zero bytes, into one.

    inputs: how many images of any kind were linked.
    Return `data` itself if it is anything else, or if the texts cannot be linked.
    """
    images = _several(data) or [image for image in (fatbin.ptx_image(data),) if image is not None]
    if not images or inputs < 2:
        return data
    from gpubpf.ptx.link import Input, LinkError, link  # imported here because few programs link

    try:
        # An input of another kind, such as a cubin, may define missing names.
        texts = [Input(f"text {k}", image.text) for k, image in enumerate(images)]
        made = link(texts, complete=False, partial=len(images) < inputs)
    except (PtxError, LinkError):
        return data
    return made.encode("utf-8", "surrogateescape")


def _several(data: bytes) -> list[FatbinImage]:
    """Return the PTX texts separated by zero bytes; none if `data` is anything else, or a single text."""
    images = [fatbin.ptx_image(text) for text in data.split(b"\0") if text.strip()]
    found = [image for image in images if image is not None]
    return found if len(found) == len(images) > 1 else []


def choose(images: Sequence[FatbinImage], target: Target) -> FatbinImage | str:
    """Return a module's PTX that the target's driver would load, or that its cubin was made from; else why there is none."""
    # The embedded device also runs PTX for a newer GPU.
    return device_link.choose(images, target.cc, newer=target.device == "sim")


def _registers_of(images: Sequence[FatbinImage], target: Target) -> tuple[dict[str, int], bool]:
    """Return the registers of a module's kernels from a cubin, and whether the target would run this cubin.

    It would, except on the embedded device, where any cubin may have to do."""
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


def _instrument(
    text: str,
    options: str,
    attachments: Sequence[Attachment],
    target: Target,
    before: Mapping[str, int] | None = None,
    own: bool = True,
    failures: list[AssembleError] | None = None,
    only: Collection[str] = (),
    known: dict[str, bool] | None = None,
) -> Sidecar:
    """Return the sidecar of a module. before: its kernels' register counts, as far as known. own: they are those on the target.

    failures: gets every failure of the assembler that affects the sidecar. only: the kernels to copy; none named: all. known:
    `Module.known_constants`."""
    failures = [] if failures is None else failures
    try:
        with progress.work("reading PTX"):
            parsed = parser.parse(text)
        entries = tuple(parsed.entries)
    except PtxError as error:
        return _refuse((), attachments, str(error))
    kernels = _placements(attachments, [name for name in entries if not only or name in only])
    if not kernels:
        return Sidecar(entries=entries)
    if known is not None:
        parsed = dataclasses.replace(parsed, known_constants=known)
    try:
        parsed = rounded(parsed, text, kernels, target, options)
    except TemporaryFailure as error:
        failures.append(error)
        return _refuse(entries, attachments, str(error))
    with progress.work("instrumenting kernels", len(kernels)) as task:
        injected = inject(parsed, kernels, each=task.step)
    before = before or {}
    longest = max((a.fragment.ptx.count("\n") + 1 for a in attachments if a.point in FREQUENT), default=0)
    if longest or injected.launched:
        try:
            counted = injected.kernels.keys() | injected.launched
            before = _registers(parsed, counted, target, options, before)
        except TemporaryFailure as error:
            failures.append(error)
    # A kernel may launch as many threads as fit with the original's registers.
    launched = {launched_name(name): before[name] for name in injected.launched if name in before}
    limits = dict(launched)
    if longest or own:
        limits |= _limits_of_copies(parsed, injected, options, before, longest)
    made = _assembled_copies(parsed, kernels, injected, target, options, before, (limits, launched), failures)
    injected = made.injected
    return Sidecar(
        made.image,
        tuple(
            SidecarKernel(
                name,
                kernel.parameters,
                kernel.block_offset,
                kernel.block,
                kernel.sites,
                kernel.waits,
                kernel.site_count,
                kernel.unprobed,
                name + LIMITED if name in made.limited else "",
            )
            for name, kernel in injected.kernels.items()
        ),
        made.refusals,
        injected.variables if injected.kernels else (),
        entries,
        tuple((name, launched_name(name)) for name in injected.launched),
        module.render(trim(parsed, injected.kernels)) if injected.kernels else "",
        made.text if injected.kernels else "",
        made.options,
        target.release,
    )


def _placements(attachments: Sequence[Attachment], entries: Sequence[str]) -> dict[str, list[Placement]]:
    """Return the placements in each kernel that an attachment chooses, by its name."""
    kernels: dict[str, list[Placement]] = {}
    for attachment in attachments:
        placement = placement_of(attachment)
        for name in entries:
            if names.chosen(attachment.kernels, name):
                kernels.setdefault(name, []).append(placement)
    return kernels


@dataclass(frozen=True)
class _Copies:
    """The copies of a module's kernels that the assembler accepts; none: no image and text.

    injected  the copies
    image     what it made of them
    text      their PTX, with the limits of registers that it accepted
    options   its options
    limited   the kernels that also have a copy with a stricter limit
    refusals  the other kernels, with the reason
    """

    injected: Injected
    image: bytes
    text: str
    options: str
    limited: frozenset[str]
    refusals: Mapping[str, str]


def _assembled_copies(
    parsed: module.Module,
    kernels: Mapping[str, Sequence[Placement]],
    injected: Injected,
    target: Target,
    options: str,
    before: Mapping[str, int],
    limits: tuple[Mapping[str, int], Mapping[str, int]],
    failures: list[AssembleError],
) -> _Copies:
    """Assemble the copies, and leave out those that the assembler rejects or whose stack may be too deep.

    limits: of registers, those to try, and those that are necessary. failures: gets every failure of the assembler.
    """
    own_options, refusals = options, dict(injected.refusals)
    wanted, necessary = limits
    injected = injected.within(wanted)
    image, text, limited = b"", injected.text, frozenset[str]()
    while injected.kernels:
        try:
            with progress.work(f"assembling {table.count(len(injected.kernels), 'kernel')}"):
                image, options, needs = _assembled(parsed, injected, target, own_options)
            text = injected.text
            if deep := _deeper(parsed, injected, target, options, needs):
                refusals |= deep
                kept = {name: kernels[name] for name in injected.kernels if name not in deep}
                injected = inject(parsed, kept).within(wanted)
                continue
            if stricter := _limits(parsed, injected, target, options, needs, before):
                text, image, limited = _with_limits(injected, target, options, stricter, image, failures)
            break
        except AssembleError as error:
            guilty = _rejected(parsed, kernels, injected, target, own_options)
            if not guilty and wanted == necessary:
                guilty = dict.fromkeys(injected.kernels, error)
            wanted = wanted if guilty else necessary  # perhaps ptxas cannot use so few registers
            failures += [error, *guilty.values()]
            refusals |= {name: str(failure) for name, failure in guilty.items()}
            kept = {name: kernels[name] for name in injected.kernels if name not in guilty}
            injected = inject(parsed, kept).within(wanted)
    return _Copies(injected, image, text, options, limited, refusals)


def rounded(
    parsed: module.Module, text: str, kernels: Mapping[str, Sequence[Placement]], target: Target, options: str
) -> module.Module:
    """Return the module, parsed from `text`, with products and sums as ptxas compiles them in the original: see `ptx.contraction`.

    Only for a GPU, and for placements that would change how ptxas compiles them. Raises TemporaryFailure."""
    points = {placement.point for placements in kernels.values() for placement in placements}
    if target.device == "sim" or points.isdisjoint(DIVIDING) or not points.isdisjoint(SEEING_RESULTS):
        return parsed
    functions = contraction.functions_with_sums(parsed, kernels)
    if not functions:
        return parsed
    with progress.work(f"compiling the original of {table.count(len(kernels), 'kernel')}"):
        cubin = with_lines(parser.only_bodies_of(text, parsed, kernels), target, options, kernels)
    try:
        operations = operations_by_line(cubin) if cubin is not None else {}
    except ImageError:  # from an assembler that writes it in another way
        operations = {}
    return contraction.with_roundings(parsed, functions, operations) if operations else parsed


def _registers(
    parsed: module.Module,
    kernels: Collection[str],
    target: Target,
    options: str,
    before: Mapping[str, int],
) -> Mapping[str, int]:
    """Return `before`, the registers of kernels, with those of `kernels` that it lacks: what ptxas makes of the original for a GPU.

    Raises TemporaryFailure."""
    if target.device == "sim" or not (unknown := kernels - before.keys()):
        return before
    original = module.render(trim(parsed, dict.fromkeys(unknown)))
    counted = registers(original, target, options) or {}
    return {**before, **{name: kernel.registers for name, kernel in counted.items()}}


def _limits_of_copies(
    parsed: module.Module, injected: Injected, options: str, before: Mapping[str, int], longest: int
) -> dict[str, int]:
    """Return the register limits of copies, where the registers of the originals are known. longest: as in `limit_of_copy`.

    In a copy with a second body, most blocks execute no probe, so that as many warps should fit as of the original.
    Excluded are modules with a limit for all kernels, and kernels with `setmaxnreg`, which distribute registers themselves.
    """
    if "maxrregcount" in options:
        return {}
    return {
        name: limit_of_copy(before[name], 0 if kernel.split else longest)
        for name, kernel in injected.kernels.items()
        if name in before and not parsed.functions[name].mentions("setmaxnreg")
    }


def _limits(
    parsed: module.Module,
    injected: Injected,
    target: Target,
    options: str,
    needs: Mapping[str, KernelResources],
    before: Mapping[str, int],
) -> dict[str, int]:
    """Return the kernels whose copy may not fit where the original does, with the most registers that a copy may use.

    Kernels with `setmaxnreg` are excluded, because they distribute registers themselves.
    """

    def allowed(name: str, registers: int) -> int:
        return most_registers(parsed.functions[name], registers, injected.kernels[name].waits)

    if target.device == "sim":
        after = {
            n: MOST if k.waits else before.get(n, 0) + _PROBE_REGISTERS for n, k in injected.kernels.items()
        }
    else:
        after = {name: needs[name].registers for name in injected.kernels if name in needs}
    after = {
        name: count
        for name, count in after.items()
        if count > allowed(name, 1) and not parsed.functions[name].mentions("setmaxnreg")
    }
    before = _registers(parsed, after.keys(), target, options, before)
    found = {
        name: allowed(name, before.get(name, 1)) for name in after if name in before or target.device == "sim"
    }
    return {name: most for name, most in found.items() if after[name] > most}


def _with_limits(
    injected: Injected,
    target: Target,
    options: str,
    limits: Mapping[str, int],
    image: bytes,
    failures: list[AssembleError],
) -> tuple[str, bytes, frozenset[str]]:
    """Return the PTX and the cubin with limited copies, and the kernels that have one. `image`: the cubin without them."""
    text = injected.limited(limits)
    try:
        made = assemble(text, target, options)
    except AssembleError as error:  # for example, it cannot use so few registers
        failures.append(error)
        return injected.text, image, frozenset()
    needs = {name: made.functions.get(name + LIMITED) for name in limits}
    kept = [
        name for name, n in needs.items() if target.device == "sim" or (n and n.registers <= limits[name])
    ]
    return text, made.cubin, frozenset(kept)


def _assembled(
    parsed: module.Module, injected: Injected, target: Target, options: str
) -> tuple[bytes, str, Mapping[str, KernelResources]]:
    """Return the cubin, the options that it was assembled with, and its kernels' resources. Raises AssembleError.

    `setmaxnreg` moves registers between the warps of a block. If ptxas ignored it only in the copy, fewer blocks would fit, and the
    tool would measure a different kernel.

    ptxas fails on some kernels that hold many predicates at a probe: `Register allocation failed with register count of '7'`, as seen
    with radix sorts of CUB. It succeeds with slightly less optimization.
    """
    try:
        made = assemble(injected.text, target, options)
    except AssembleError as error:
        if "Register allocation failed" not in str(error):
            raise
        try:
            options = f"{options} {_CAREFUL}"
            made = assemble(injected.text, target, options)
        except AssembleError:  # an older ptxas does not support the option
            raise error from None
    for advisory in made.advisories:
        if "setmaxnreg" in advisory:
            original = assemble(module.render(trim(parsed, injected.kernels)), target, options)
            if not any("setmaxnreg" in other for other in original.advisories):
                raise AssembleError(
                    f"setmaxnreg would be ignored in the copy (ptxas {advisory.partition(':')[0]})"
                )
    return made.cubin, options, made.functions


def _deeper(
    parsed: module.Module,
    injected: Injected,
    target: Target,
    options: str,
    needs: Mapping[str, KernelResources],
) -> dict[str, str]:
    """Return the kernels whose copies may need more stack than a GPU has for the originals, with the reason. Raises AssembleError."""
    if target.device == "sim" or not (kernels := recursive(graph := CallGraph(parsed), injected.kernels)):
        return {}
    before = assemble(module.render(trim(parsed, dict.fromkeys(kernels))), target, options).functions
    return deeper(graph, kernels, before, needs)


def _rejected(
    parsed: module.Module,
    kernels: Mapping[str, Sequence[Placement]],
    injected: Injected,
    target: Target,
    options: str,
) -> dict[str, AssembleError]:
    """Assemble each kernel of a module alone. Return those that the assembler rejects, with the error."""
    found = {}
    with progress.work("assembling kernels one by one", len(injected.kernels)) as task:
        for name in injected.kernels:
            try:
                _assembled(parsed, inject(parsed, {name: kernels[name]}), target, options)
            except AssembleError as error:
                found[name] = error
            task.step()
    return found


def placement_of(attachment: Attachment) -> Placement:
    """Return where an attachment's fragment goes, for `inject`, without its kernels."""
    return Placement(
        attachment.fragment,
        attachment.point,
        attachment.accumulate,
        attachment.kinds,
        attachment.spaces,
        attachment.functions,
        attachment.opcodes,
        attachment.sampled,
        attachment.alike,
    )


def _refuse(entries: Sequence[str], attachments: Sequence[Attachment], reason: str) -> Sidecar:
    matched = [
        name for name in entries if any(names.chosen(attachment.kernels, name) for attachment in attachments)
    ]
    return Sidecar(refusals=dict.fromkeys(matched, reason), entries=tuple(entries))


def _entries_for(images: Sequence[FatbinImage], target: Target) -> list[str]:
    """Return the kernels of a module. The program waits, so if possible, only the image that the target runs is read."""
    running = fatbin.cubin_for(images, target.cc)
    return (_entries_of([running]) if running is not None else []) or _entries_of(images)


def _entries_of(images: Sequence[FatbinImage]) -> list[str]:
    """Return the kernels of a module, from all images that can be read."""
    found: dict[str, None] = {}
    for image in images:
        try:
            if image.kind == "elf":
                found |= dict.fromkeys(fatbin.kernels(image.payload))
            elif image.kind == "ptx":
                found |= dict.fromkeys(parser.parse(image.text).entries)
        except (ImageError, PtxError):
            continue
    return list(found)


def trim(parsed: module.Module, kernels: Mapping[str, Any]) -> module.Module:
    """Return the application's module with only these kernels, and the functions and variables that they use."""
    graph = CallGraph(parsed)
    functions: set[str] = set()
    variables: set[str] = set()
    todo = list(kernels)
    while todo:
        name = todo.pop()
        if name in parsed.variables and name not in variables:
            variables.add(name)
            # A variable's initial value may refer to others, and to functions.
            todo += flow.find_initializer_names(parsed.variables[name].initializer)
        elif name in parsed.functions and name not in functions:
            reached = graph.reach(name)
            functions |= reached
            for used in map(graph.of, reached):
                todo += used.variables | used.launched | {graph.entries[f].table for f in used.originals}
    kept = []
    for item in parsed.items:
        if isinstance(item, module.Function):
            wanted = item.name in functions
        elif isinstance(item, module.Variable):
            wanted = item.name in variables or item.space == "shared"
        else:
            # Of the DWARF data, keep only the names that `.loc … function_name` refers to.
            wanted = item.name != "section" or item.text.split()[1].startswith(".debug_str")
        if wanted:
            kept.append(item)
    # With `debug`, ptxas would require the dropped sections.
    target = tuple(word for word in parsed.target if word != "debug")
    return dataclasses.replace(parsed, target=target, items=tuple(kept))


def register_use(sidecar: Sidecar, target: Target, kernels: Collection[str]) -> dict[str, RegisterUse]:
    """Return the registers of `kernels` before and after instrumentation, for the target's architecture; empty without ptxas.

    The first call takes as long as ptxas. Do not call it while a launch waits.
    """
    if not sidecar.text:
        return {}
    target = dataclasses.replace(target, release=sidecar.release)
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


# --- the cache ---------------------------------------------------------------------------------------


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
        "ebpf/sampling.py",
        "images/assemble.py",
        "images/compiled_sums.py",
        "images/instrument.py",
        "images/occupancy.py",
        "images/stack.py",
        "images/yields.py",
        "lower/fragment.py",
        "lower/launch_block.py",
    )
    return cache.key_of_files([*sorted((package / "ptx").glob("*.py")), *(package / name for name in others)])


def _identity(attachment: Attachment) -> str:
    fragment = attachment.fragment
    arguments = [(a.name, a.type, a.kind, a.map, a.offset, a.width, a.field) for a in fragment.arguments]
    rest = dataclasses.astuple(dataclasses.replace(attachment, fragment=Fragment("", "", ())))
    return repr((fragment.ptx, arguments, rest[1:]))


def pack(sidecar: Sidecar) -> bytes:
    """Return a sidecar in its cache format."""
    head = dataclasses.asdict(dataclasses.replace(sidecar, image=b""))
    head["image"] = ""
    encoded = json.dumps(head).encode()
    return len(encoded).to_bytes(4, "little") + encoded + sidecar.image


def unpack(data: bytes) -> Sidecar | None:
    """Return a cached sidecar; None if its writer was interrupted or used another format."""
    try:
        length = int.from_bytes(data[:4], "little")
        head = json.loads(data[4 : 4 + length])
        return Sidecar(
            data[4 + length :],
            tuple(
                SidecarKernel(
                    kernel["name"],
                    tuple((offset, size) for offset, size in kernel["parameters"]),
                    kernel["block_offset"],
                    LaunchBlock(
                        **kernel["block"]
                        | {"params": {k: (o, s) for k, (o, s) in kernel["block"]["params"].items()}}
                    ),
                    tuple(Site(**site) for site in kernel["sites"]),
                    kernel["waits"],
                    kernel["site_count"],
                    kernel["unprobed"],
                    kernel["limited"],
                    _unpack_amd(kernel["amd"]),
                )
                for kernel in head["kernels"]
            ),
            head["refusals"],
            tuple(
                InjectedVariable(**variable | {"kernels": tuple(variable["kernels"])})
                for variable in head["variables"]
            ),
            tuple(head["entries"]),
            tuple((name, copy) for name, copy in head["launched"]),
            head["original"],
            head["text"],
            head["options"],
            head["release"],
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _unpack_amd(kernel: dict[str, Any] | None) -> AmdKernel | None:
    if kernel is None:
        return None
    references = tuple((place, distance) for place, distance in kernel["references"])
    counts = kernel["wave"], kernel["compute_units"], kernel["most_threads"], kernel["original_threads"]
    return AmdKernel(*counts, RegisterUse(**kernel["registers"]), references)
