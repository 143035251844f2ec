"""``--list`` and ``--ptx``: kernels of files, processes and commands; which can be instrumented, or why not.

    for kernel in listed([Source("app", images_of_file("app"))], Target("gpu", (9, 0))):
        kernel.record()       # the JSON record "listed"

Whether a kernel can be instrumented is asked of those who do it: `instrument.choose` for PTX that suits the
device, then the injector, with a tool's own probes where there are some.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from gpubpf import names
from gpubpf.errors import Error, ImageError, PtxError
from gpubpf.images import fatbin
from gpubpf.images.assemble import Target
from gpubpf.images.fatbin import Image
from gpubpf.images.instrument import choose
from gpubpf.lower.fragment import Fragment
from gpubpf.ptx import inject, module
from gpubpf.show import cli, table

if TYPE_CHECKING:
    import argparse

_ENTRY = re.compile(r"^[^\n/]*\.entry\s+([\w$%]+)", re.MULTILINE)

# Given a module of PTX and kernels of it: why some of these can't be instrumented, by mangled name.
Check = Callable[[module.Module, Sequence[str]], Mapping[str, str]]
# Given an image and kernels of it: PTX in which they are instrumented, and the reasons of those that are not.
Instrument = Callable[[Image, Sequence[str]], tuple[str, Mapping[str, str]]]


@dataclass(frozen=True)
class Source:
    """Where images came from, as the user knows it, and what of it was launched."""

    file: str
    images: tuple[Image, ...]
    launches: Mapping[str, int] | None = None  # by mangled name; None: nothing was run
    pid: int | None = None  # of the process that has them; of several of one name the first
    comm: str | None = None


@dataclass(frozen=True)
class Listed:
    """One kernel of one file."""

    name: names.Name
    source: Source
    ptx: tuple[str, ...]  # compute capabilities: "7.5"
    sass: tuple[str, ...]
    reason: str | None  # why it can't be instrumented
    launches: int | None = None

    def record(self) -> dict[str, Any]:
        """The JSON record of ``--list``."""
        return {
            "type": "listed",
            "pid": self.source.pid,
            "comm": self.source.comm,
            "kernel": self.name.short,
            "demangled": self.name.full,
            "mangled": self.name.mangled,
            "file": self.source.file,
            "ptx": list(self.ptx),
            "sass": list(self.sass),
            "instrumentable": self.reason is None,
            "reason": self.reason,
            "launches": self.launches,
        }


# The device program that does nothing: what can't carry this one can't carry any.
NOTHING = Fragment("nothing", "{\n}", ())


def check_injection(parsed: module.Module, kernels: Sequence[str]) -> Mapping[str, str]:
    """A `Check`: whether any probe can be put at the exit of these kernels."""
    placements = [inject.Placement(NOTHING, "exit")]
    return inject.inject(parsed, dict.fromkeys(kernels, placements)).refusals


def listed(sources: Iterable[Source], target: Target, check: Check = check_injection) -> list[Listed]:
    """The kernels of each source, by name; `target` is the device in question.

    A form of a module that is damaged is left out; the others may have its kernels.
    """
    found: list[Listed] = []
    for source in sources:
        kernels: dict[str, _Kernel] = {}
        for images in fatbin.modules(source.images):
            _add_module(kernels, images, target, check)
        for mangled in source.launches or ():
            if mangled not in kernels:
                kernels[mangled] = _Kernel(reasons=["image not seen"])
        ordered = names.demangle_all(kernels)
        for name in sorted(ordered, key=lambda name: (name.short, name.full)):
            launches = None if source.launches is None else source.launches.get(name.mangled, 0)
            found.append(kernels[name.mangled].listed(name, source, launches))
    return found


@dataclass
class _Kernel:
    """What the modules of one file say of one kernel."""

    ptx: set[tuple[int, str]] = field(default_factory=set)
    sass: set[tuple[int, str]] = field(default_factory=set)
    # One for each module; None: it can be instrumented.
    reasons: list[str | None] = field(default_factory=list)

    def listed(self, name: names.Name, source: Source, launches: int | None) -> Listed:
        # A kernel of an -rdc program is in two modules: linked SASS, and PTX that is still to be linked.
        reasons = sorted(self.reasons, key=lambda reason: (reason is not None, reason == fatbin.SASS_ONLY))
        return Listed(name, source, _capabilities(self.ptx), _capabilities(self.sass), reasons[0], launches)


def _capabilities(archs: set[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(f"{sm // 10}.{sm % 10}{suffix}" for sm, suffix in sorted(archs))


def _add_module(kernels: dict[str, _Kernel], images: Sequence[Image], target: Target, check: Check) -> None:
    """Adds one module's kernels to `kernels`."""
    chosen = choose(images, target)
    reasons: dict[str, str | None] = {}
    # A kernel may be in the SASS and not in the PTX, behind #if __CUDA_ARCH__.
    otherwise = chosen if isinstance(chosen, str) else f"not in the PTX for {chosen.arch}"
    for image in images:
        try:
            mangled = fatbin.kernel_names(image.read()) if image.kind == "elf" else _entries(image)
        except ImageError:  # this form is damaged; the others may serve
            continue
        for name in mangled:
            kernel = kernels.setdefault(name, _Kernel())
            (kernel.sass if image.kind == "elf" else kernel.ptx).add((image.sm, image.suffix))
            reasons.setdefault(name, otherwise)
    if isinstance(chosen, Image):
        try:
            parsed = module.parse(chosen.text)
            own = tuple(parsed.entries)
            refusals = check(parsed, own)
            reasons |= {name: refusals.get(name) for name in own}
        except (PtxError, ImageError) as error:
            reasons |= dict.fromkeys(reasons, str(error))
    for name, reason in reasons.items():
        kernels[name].reasons.append(reason)


def _entries(image: Image) -> list[str]:
    """The kernels of a PTX image; of PTX that cannot be parsed those that look like it."""
    try:
        return list(module.parse(image.text).entries)
    except PtxError:
        return _ENTRY.findall(image.text)


# --- where images come from --------------------------------------------------------------------------


def sources_of_files(files: Iterable[str]) -> list[Source]:
    """The images in files that a user named. Raises ImageError for one that holds none."""
    sources = []
    for file in files:
        if not (images := fatbin.images_of_file(file)):
            raise ImageError(f"there is no CUDA code in {file}; name the program or library that nvcc built")
        sources.append(Source(file, images))
    return sources


def sources_of_process(pid: int) -> list[Source]:
    """The images in the files that a process has mapped. Raises Error where it cannot be looked into.

    What it made at run time (NVRTC, Triton) is not among them.
    """
    from gpubpf.images.mapped import Mapped
    from gpubpf.process import target

    known = target.status(pid)
    if not known:
        raise Error(f"there is no process {pid}; run ps to list the processes")
    files: dict[str, list[Image]] = {}
    try:
        for file, image in Mapped(pid).images():
            files.setdefault(file, []).append(image)
    except OSError as error:
        raise target.refusal(pid, error.errno or 0) from None
    return [
        Source(file, tuple(images), pid=pid, comm=known.get("Name", "")) for file, images in files.items()
    ]


# --- the two options ---------------------------------------------------------------------------------


class Pipeline(Protocol):
    """What a tool's device programs (program.py, `BPF`) have to tell for ``--list`` and ``--ptx``."""

    def target(self, args: argparse.Namespace) -> Target:
        """The device that would be used."""

    def refusals(self, parsed: module.Module, kernels: Sequence[str]) -> Mapping[str, str]:
        """A `Check` with these programs."""

    def instrumented_ptx(self, image: Image, kernels: Sequence[str]) -> tuple[str, Mapping[str, str]]:
        """The PTX of a sidecar in which `kernels` carry these programs, and the reasons of those that do not."""

    def observe(self, args: argparse.Namespace) -> tuple[list[Source], int]:
        """Runs COMMAND to its end: the modules that it loaded, what it launched, and its exit status."""


def show(b: Pipeline, args: argparse.Namespace, out: cli.Output) -> int:
    """``--list`` or ``--ptx`` of a tool, in any of the three forms; the exit status."""
    status = 0
    if args.files:
        sources = sources_of_files(args.files)
    elif args.pid:
        sources = [source for pid in args.pid for source in sources_of_process(pid)]
    else:
        sources, status = b.observe(args)
    try:
        if args.ptx:
            for file, image, text in instrumented(sources, b.target(args), args.kernel, b.instrumented_ptx):
                out.line(f"// {file}: from the PTX for {image.arch}")
                out.write(text if text.endswith("\n") else text + "\n")
            return status
        kernels = matching(listed(sources, b.target(args), b.refusals), args.kernel)
    except Error:
        if status:  # COMMAND failed: its status counts
            return status
        raise
    if args.json:
        out.records(kernel.record() for kernel in kernels)
    elif args.csv:
        out.write("".join(csv_rows(kernels)))
    elif kernels:
        for line in rows(kernels, args.verbose):
            out.line(line)
    else:
        out.line("no kernels")
    return status


def csv_rows(kernels: Iterable[Listed]) -> Iterator[str]:
    """The table of ``--list`` as CSV."""
    yield "kernel,demangled,mangled,file,ptx,sass,instrumentable,reason,launches\n"
    for kernel in kernels:
        name = kernel.name
        cells = (
            name.short,
            name.full,
            name.mangled,
            kernel.source.file,
            " ".join(kernel.ptx),
            " ".join(kernel.sass),
        )
        can = "no" if kernel.reason else "yes"
        launches = "" if kernel.launches is None else kernel.launches
        yield cli.csv_cells((*cells, can, kernel.reason or "", launches)) + "\n"


def matching(kernels: Iterable[Listed], patterns: Sequence[str]) -> list[Listed]:
    """Those that ``--kernel`` names. Raises Error when there are none, with the kernels that there are."""
    everything = list(kernels)
    chosen = [kernel for kernel in everything if not patterns or names.matches(patterns, kernel.name.mangled)]
    if patterns and not chosen:
        raise Error(no_match(patterns, (kernel.name.short for kernel in everything)))
    return chosen


def no_match(patterns: Sequence[str], seen: Iterable[str], most: int = 12) -> str:
    """The error of a ``--kernel`` that nothing matches: which kernels there are."""
    different = sorted(set(seen))
    shown = ", ".join(different[:most]) + (
        f", and {len(different) - most} more" if len(different) > most else ""
    )
    return f"no kernel matches {' or '.join(map(repr, patterns))}; kernels seen: {shown or 'none'}"


def rows(kernels: Sequence[Listed], verbose: bool = False) -> list[str]:
    """A table for people: a line per kernel, files as headings where there are several."""
    launched = any(kernel.launches is not None for kernel in kernels)
    headers = ["KERNEL", "PTX", "SASS", *(["LAUNCHES"] if launched else []), "INSTRUMENT"]
    shorts = Counter((kernel.source.file, kernel.name.short) for kernel in kernels)
    cells = []
    for kernel in kernels:
        ambiguous = shorts[kernel.source.file, kernel.name.short] > 1
        name = kernel.name.full if verbose else kernel.name.short
        row = [
            table.fit(kernel.name.full, 60) if ambiguous and not verbose else name,
            ",".join(kernel.ptx) or "-",
            ",".join(kernel.sass) or "-",
        ]
        row += [f"{kernel.launches or 0:,}"] if launched else []
        cells.append((kernel.source.file, [*row, "yes" if kernel.reason is None else f"no: {kernel.reason}"]))
    lines = table.lines(headers, [row for _, row in cells], left=("KERNEL", "PTX", "SASS", "INSTRUMENT"))
    shown = [lines[0]]
    several = len({kernel.source.file for kernel in kernels}) > 1
    for (file, _), line in zip(cells, lines[1:], strict=True):
        if several and f"{file}:" not in shown:
            shown.append(f"{file}:")
        shown.append(line)
    return shown


def instrumented(
    sources: Iterable[Source],
    target: Target,
    patterns: Sequence[str],
    instrument: Instrument,
) -> Iterator[tuple[str, Image, str]]:
    """``--ptx``: (file, image, instrumented PTX) of each module in which a kernel matches.

    Raises Error when nothing matches, or when what matches cannot be instrumented, with the reason.
    """
    seen: list[str] = []
    refused: list[str] = []
    done = False
    for source in sources:
        for images in fatbin.modules(source.images):
            chosen = choose(images, target)
            of_module = _names_of(images)
            seen += of_module
            matched = [name for name in of_module if not patterns or names.matches(patterns, name)]
            if not matched:
                continue
            if isinstance(chosen, str):
                refused += [f"{names.demangle(name).short}: {chosen}" for name in matched]
                continue
            text, refusals = instrument(chosen, matched)
            refused += [f"{names.demangle(name).short}: {reason}" for name, reason in refusals.items()]
            if len(refusals) < len(matched):
                done = True
                yield source.file, chosen, text
    if done:
        return
    if refused:
        raise Error(f"nothing that matches can be instrumented ({refused[0]}); --list says more")
    raise Error(no_match(patterns, (names.demangle(name).short for name in seen)))


def _names_of(images: Sequence[Image]) -> list[str]:
    found: dict[str, None] = {}
    for image in images:
        try:
            found |= dict.fromkeys(
                fatbin.kernel_names(image.read()) if image.kind == "elf" else _entries(image)
            )
        except ImageError:
            continue
    return list(found)
