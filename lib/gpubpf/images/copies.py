"""Make the copies of a module's kernels: parse the PTX, inject the device programs, assemble.

    sidecar = make_copies(text, options, probes, target)

This needs most of `ptx`, which takes a while to import. `images.instrument` imports this module only if the cache lacks the sidecar.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpubpf import names
from gpubpf.errors import AssembleError, ImageError, PtxError
from gpubpf.images.assemble import (
    KernelResources,
    Target,
    TemporaryFailure,
    assemble,
    registers,
    with_lines,
)
from gpubpf.images.compiled_sums import operations_by_line
from gpubpf.images.occupancy import MOST, limit_of_copy, most_registers
from gpubpf.images.sidecar import Sidecar, SidecarKernel, refuse
from gpubpf.images.stack import deeper, recursive
from gpubpf.inject import contraction
from gpubpf.inject.device_launches import launched_name
from gpubpf.inject.inject import inject
from gpubpf.inject.injected import Injected
from gpubpf.inject.probe_text import DIVIDING, FREQUENT, SEEING_RESULTS
from gpubpf.inject.values import PtxProbe
from gpubpf.ptx import module, parser
from gpubpf.ptx.call_graph import CallGraph
from gpubpf.ptx.symbols import LIMITED
from gpubpf.ptx.trim import trim
from gpubpf.record import Record, replace
from gpubpf.show import progress, table

_CAREFUL = "-Ofc=min"
# The embedded device does not assemble, so a copy's register count is unknown beforehand. Probes rarely need more
# than this, except in kernels with few registers, whose copies fit anyway.
_PROBE_REGISTERS = 24


def make_copies(
    text: str,
    options: str,
    probes: Sequence[PtxProbe],
    target: Target,
    before: Mapping[str, int] | None = None,
    own: bool = True,
    failures: list[AssembleError] | None = None,
    only: Collection[str] = (),
    known: dict[str, bool] | None = None,
) -> Sidecar:
    """Return the sidecar of a module.

    text: the module's PTX
    options: the application's ptxas options
    before: the registers per thread of the original kernels, as far as known
    own: whether the target runs the code that has these registers
    failures: a list that gets every failure of the assembler that affects the sidecar
    only: the kernels to copy, by mangled name; () for all
    known: `Module.known_constants`
    """
    failures = [] if failures is None else failures
    try:
        with progress.work("reading PTX"):
            parsed = parser.parse(text)
        entries = tuple(parsed.entries)
    except PtxError as error:
        return refuse((), probes, str(error))
    kernels = _probes_of_kernels(probes, [name for name in entries if not only or name in only])
    if not kernels:
        return Sidecar(entries=entries)
    if known is not None:
        parsed = replace(parsed, known_constants=known)
    try:
        parsed = rounded(parsed, text, kernels, target, options)
    except TemporaryFailure as error:
        failures.append(error)
        return refuse(entries, probes, str(error))
    with progress.work("instrumenting kernels", len(kernels)) as task:
        injected = inject(parsed, kernels, each=task.step, counts_executions=True)
    before = before or {}
    longest = max((a.program.ptx.count("\n") + 1 for a in probes if a.point in FREQUENT), default=0)
    if longest or injected.launched:
        try:
            counted = injected.kernels.keys() | injected.launched
            before = _registers(parsed, counted, target, options, before)
        except TemporaryFailure as error:
            failures.append(error)
    # Another kernel may launch as many threads as fit with the original's registers.
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


def _probes_of_kernels(probes: Sequence[PtxProbe], entries: Sequence[str]) -> dict[str, list[PtxProbe]]:
    """Return kernel → its probes, for each kernel that the pattern of a probe matches."""
    kernels: dict[str, list[PtxProbe]] = {}
    for probe in probes:
        for name in entries:
            if names.chosen(probe.kernels, name):
                kernels.setdefault(name, []).append(probe)
    return kernels


class _Copies(Record):
    """The copies of a module's kernels that the assembler accepts. Without any, image and text are empty.

    injected  the copies
    image     the assembled copies
    text      the PTX of the copies, with the register limits that the assembler accepted
    options   the options of the assembler
    limited   the kernels that also have a copy with a stricter register limit
    refusals  the other kernels, each with the reason
    """

    injected: Injected
    image: bytes
    text: str
    options: str
    limited: frozenset[str]
    refusals: Mapping[str, str]


def _assembled_copies(
    parsed: module.Module,
    kernels: Mapping[str, Sequence[PtxProbe]],
    injected: Injected,
    target: Target,
    options: str,
    before: Mapping[str, int],
    limits: tuple[Mapping[str, int], Mapping[str, int]],
    failures: list[AssembleError],
) -> _Copies:
    """Assemble the copies, and leave out those that the assembler rejects or whose stack may be too deep.

    limits: the register limits to try, and the register limits that are necessary
    failures: a list that gets every failure of the assembler
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
                injected = inject(parsed, kept, counts_executions=True).within(wanted)
                continue
            if stricter := _limits(parsed, injected, target, options, needs, before):
                text, image, limited = _with_limits(injected, target, options, stricter, image, failures)
            break
        except AssembleError as error:
            guilty = _rejected(parsed, kernels, injected, target, own_options)
            if not guilty and wanted == necessary:
                guilty = dict.fromkeys(injected.kernels, error)
            wanted = wanted if guilty else necessary  # perhaps ptxas needs more registers than the limit
            failures += [error, *guilty.values()]
            refusals |= {name: str(failure) for name, failure in guilty.items()}
            kept = {name: kernels[name] for name in injected.kernels if name not in guilty}
            injected = inject(parsed, kept, counts_executions=True).within(wanted)
    return _Copies(injected, image, text, options, limited, refusals)


def rounded(
    parsed: module.Module, text: str, kernels: Mapping[str, Sequence[PtxProbe]], target: Target, options: str
) -> module.Module:
    """Return the module, parsed from `text`, with products and sums rounded as in the original (`inject.contraction`).

    The module is unchanged for the embedded device, if no probe divides a basic block (DIVIDING), and if programs see the result of
    each product and sum (SEEING_RESULTS). Raises TemporaryFailure.
    """
    points = {probe.point for chosen in kernels.values() for probe in chosen}
    if target.device == "sim" or points.isdisjoint(DIVIDING) or not points.isdisjoint(SEEING_RESULTS):
        return parsed
    functions = contraction.functions_with_sums(parsed, kernels)
    if not functions:
        return parsed
    with progress.work(f"compiling the original of {table.count(len(kernels), 'kernel')}"):
        cubin = with_lines(parser.only_bodies_of(text, parsed, kernels), target, options, kernels)
    try:
        operations = operations_by_line(cubin) if cubin is not None else {}
    except ImageError:  # another assembler may write the table in another way
        operations = {}
    return contraction.with_roundings(parsed, functions, operations) if operations else parsed


def _registers(
    parsed: module.Module,
    kernels: Collection[str],
    target: Target,
    options: str,
    before: Mapping[str, int],
) -> Mapping[str, int]:
    """Return `before` with the registers of those `kernels` that it lacks, as ptxas assigns them to the original for a GPU.

    Raises TemporaryFailure.
    """
    if target.device == "sim" or not (unknown := kernels - before.keys()):
        return before
    original = module.render(trim(parsed, dict.fromkeys(unknown)))
    counted = registers(original, target, options) or {}
    return {**before, **{name: kernel.registers for name, kernel in counted.items()}}


def _limits_of_copies(
    parsed: module.Module, injected: Injected, options: str, before: Mapping[str, int], longest: int
) -> dict[str, int]:
    """Return the register limits of copies whose originals have known registers.

    In a copy with a second body, most blocks execute no probe, so as many of its warps should fit as of the original's. Modules with a
    limit for all kernels, and kernels with `setmaxnreg`, which distribute registers themselves, do not get limits.

    longest: as in `limit_of_copy`
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
    """Return the PTX and the cubin with limited copies, and the kernels that have a limited copy.

    If the assembler rejects them, the result has no limited copies.

    image: the cubin without limited copies
    """
    text = injected.limited(limits)
    try:
        made = assemble(text, target, options)
    except AssembleError as error:  # for example, a kernel needs more registers than its limit
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
    kernels: Mapping[str, Sequence[PtxProbe]],
    injected: Injected,
    target: Target,
    options: str,
) -> dict[str, AssembleError]:
    """Assemble each kernel of a module alone. Return those that the assembler rejects, with the error."""
    found = {}
    with progress.work("assembling kernels one by one", len(injected.kernels)) as task:
        for name in injected.kernels:
            try:
                _assembled(
                    parsed, inject(parsed, {name: kernels[name]}, counts_executions=True), target, options
                )
            except AssembleError as error:
                found[name] = error
            task.step()
    return found
