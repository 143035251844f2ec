"""``--list`` and ``--ptx``: the kernels of files, processes and commands, and whether each can be instrumented.

    for kernel in listed([ImageFile("app", images_of_file("app"))], Target("gpu", (9, 0))):
        kernel.record()       # the JSON record "listed"

The answer comes from the code that instruments kernels: `instrument.choose` looks for PTX that suits the device. Then the injector
tries the tool's own probes, if it has any.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gpubpf import names
from gpubpf.ebpf.probe import Probe
from gpubpf.errors import Error, ImageError, PtxError
from gpubpf.gcn.code_object import CodeObject
from gpubpf.images import device_link, fatbin, offload_bundle, tile_ir
from gpubpf.images.assemble import Target
from gpubpf.images.fatbin import FatbinImage
from gpubpf.images.instrument import choose
from gpubpf.images.sidecar import Sidecar
from gpubpf.inject.inject import inject
from gpubpf.lower.fragment import Fragment
from gpubpf.process import children
from gpubpf.ptx import module, parser
from gpubpf.record import MutableRecord, Record, field
from gpubpf.show import cli, progress, table
from gpubpf.show.process_records import LISTED
from gpubpf.show.remedies import remedy

if TYPE_CHECKING:
    from gpubpf.show.parsed import Options

MOST_NAMES = 12  # kernels that a message names
_ENTRY = re.compile(r"^[^\n/]*\.entry\s+([\w$%]+)", re.MULTILINE)

# Takes a PTX module and some of its kernels. Returns the reason for each kernel that cannot be instrumented, by mangled name.
Check = Callable[[module.Module, Sequence[str]], Mapping[str, str]]
# Takes a code object for AMD GPUs. Returns a sidecar with its kernels, and the reasons for those that cannot be instrumented.
CheckAmd = Callable[[bytes], Sidecar]
# Takes an image and some of its kernels. Returns the instrumented PTX, and the reasons for those that cannot be instrumented.
Instrument = Callable[[FatbinImage, Sequence[str], Target], tuple[str, Mapping[str, str]]]


class ImageFile(Record):
    """A file with images: its name as the user knows it, and the launches of its kernels."""

    file: str
    images: tuple[FatbinImage, ...]
    launches: Mapping[str, int] | None = None  # by mangled name; None: nothing was run
    pid: int | None = None  # the process that mapped it; the first one if several share a name
    comm: str | None = None
    code_objects: tuple[bytes, ...] = field(default=(), repr=False)  # for AMD GPUs


class ListedFileKernel(Record):
    """One kernel of one file."""

    name: names.KernelName
    source: ImageFile
    ptx: tuple[str, ...]  # compute capabilities: "7.5"
    sass: tuple[str, ...]
    reason: str | None  # why it cannot be instrumented; None: it can
    launches: int | None = None
    gpus: tuple[str, ...] = ()  # AMD GPUs: "gfx90a:xnack+"

    def record(self) -> dict[str, Any]:
        """Return the JSON record of ``--list``."""
        return LISTED.record(self)


# A device program that does nothing. A kernel that cannot carry it cannot carry any program.
NOTHING = Fragment("nothing", "{\n}", ())


def check_injection(parsed: module.Module, kernels: Sequence[str]) -> Mapping[str, str]:
    """Check whether a probe can be placed at the exits of these kernels. This is a `Check`."""
    probes = [Probe(NOTHING, "exit")]
    return inject(parsed, dict.fromkeys(kernels, probes)).refusals


def listed(
    sources: Iterable[ImageFile],
    target: Target,
    check: Check = check_injection,
    check_amd: CheckAmd = lambda data: Sidecar(),
    patterns: Sequence[str] = (),
) -> list[ListedFileKernel]:
    """Return the kernels of each file, sorted by name. Several processes look at the modules of a large library.

    Damaged images are left out, because other forms of the module may have the same kernels.

    target: the device that the kernels would run on.
    check, check_amd: the functions that find the reasons.
    patterns: globs (``--kernel``) of the kernels to return; none: all kernels.

    Raises Error if no kernel matches the patterns. The message names the kernels.
    """
    found: list[ListedFileKernel] = []
    others: list[str] = []
    for source in sources:
        kernels: dict[str, _Kernel] = {}
        modules = device_link.modules(source.images)
        look = functools.partial(_kernels_of_module, target=target, check=check, patterns=patterns)
        with progress.work(f"listing the modules of {source.file}", len(modules)) as task:
            for of_module in children.spread(look, modules):
                task.step()
                for name, kernel in of_module.items():
                    kernels.setdefault(name, _Kernel()).add(kernel)
            for data in source.code_objects:
                _add_code_object(kernels, data, check_amd)
        for mangled in source.launches or ():
            if mangled not in kernels and not names.is_of_runtime(mangled):
                kernels[mangled] = _Kernel(reasons=["image not seen"])
        ordered = names.demangle_all(name for name in kernels if device_link.DEVICE_RUNTIME not in name)
        for named in sorted(ordered, key=lambda named: (named.short, named.full)):
            launches = None if source.launches is None else source.launches.get(named.mangled, 0)
            if not patterns or names.matches(patterns, named.mangled):
                found.append(kernels[named.mangled].listed(named, source, launches))
            else:
                others.append(named.short)
    if patterns and not found:
        raise Error(no_match(patterns, others))
    return found


class _Kernel(MutableRecord):
    """Facts about one kernel from the modules of one file."""

    ptx: set[tuple[int, str]] = field(default_factory=set)
    sass: set[tuple[int, str]] = field(default_factory=set)
    gpus: set[str] = field(default_factory=set)
    # One per module; None: it can be instrumented.
    reasons: list[str | None] = field(default_factory=list)

    def add(self, other: _Kernel) -> None:
        """Add what is known about a kernel of the same name in another module."""
        self.ptx |= other.ptx
        self.sass |= other.sass
        self.gpus |= other.gpus
        self.reasons += other.reasons

    def listed(self, name: names.KernelName, source: ImageFile, launches: int | None) -> ListedFileKernel:
        # Several modules may contain instances of the same template.
        reasons = sorted(self.reasons, key=lambda reason: (reason is not None, reason == fatbin.SASS_ONLY))
        return ListedFileKernel(
            name,
            source,
            _capabilities(self.ptx),
            _capabilities(self.sass),
            reasons[0],
            launches,
            tuple(sorted(self.gpus)),
        )


def _capabilities(archs: set[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(f"{sm // 10}.{sm % 10}{suffix}" for sm, suffix in sorted(archs))


def _kernels_of_module(
    images: Sequence[FatbinImage], target: Target, check: Check, patterns: Sequence[str]
) -> dict[str, _Kernel]:
    """Return the kernels of one module, by mangled name. Only those that match `patterns` are checked."""
    chosen = choose(images, target)
    own: Sequence[str] = ()  # the kernels of the chosen PTX
    reasons: Mapping[str, str | None] = {}
    if isinstance(chosen, FatbinImage):
        own, reasons, otherwise = _checked(chosen, check, patterns)
    else:
        otherwise = chosen
    kernels = {name: _Kernel() for name in own}
    for image in images:
        try:
            mangled = own if image is chosen else _entries(image)
        except ImageError:  # this form is damaged; another one may be intact
            continue
        for name in mangled:
            kernel = kernels.setdefault(name, _Kernel())
            if image.kind != "tile":
                (kernel.sass if image.kind == "elf" else kernel.ptx).add((image.sm, image.suffix))
    for name, kernel in kernels.items():
        kernel.reasons.append(reasons.get(name, otherwise))
    return kernels


def _checked(
    image: FatbinImage, check: Check, patterns: Sequence[str]
) -> tuple[Sequence[str], Mapping[str, str | None], str]:
    """Return the kernels of PTX, the reason for each that cannot be instrumented (None: it can be), and the reason for all others."""
    own: Sequence[str] = ()
    try:
        own = _ENTRY.findall(image.text)  # the PTX cannot be parsed
        parsed = parser.parse(image.text)
        own = tuple(parsed.entries)
        wanted = [name for name in own if not patterns or names.matches(patterns, name)]
        refusals = check(parsed, wanted) if wanted else {}
    except (PtxError, ImageError) as error:
        return own, {}, str(error)
    # #if __CUDA_ARCH__ can leave a kernel out of the PTX although the SASS has it.
    return own, {name: refusals.get(name) for name in own}, f"not in the PTX for {image.arch}"


def _add_code_object(kernels: dict[str, _Kernel], data: bytes, check: CheckAmd) -> None:
    """Add the kernels of a code object for AMD GPUs to `kernels`, unless it is damaged."""
    try:
        gpu = CodeObject(data).target
    except ImageError:
        return
    sidecar = check(data)
    for name in sidecar.entries:
        kernel = kernels.setdefault(name, _Kernel())
        kernel.gpus.add(gpu)
        kernel.reasons.append(sidecar.refusals.get(name))


def _entries(image: FatbinImage) -> list[str]:
    """Return the kernels of an image. If PTX cannot be parsed, return what looks like kernels. Raises ImageError."""
    if image.kind == "tile":
        return tile_ir.kernel_names(image.read())
    if image.kind != "ptx":
        return fatbin.kernel_names(image.read()) if image.kind == "elf" else []
    try:
        return list(parser.parse(image.text).entries)
    except PtxError:
        return _ENTRY.findall(image.text)


# --- sources of images --------------------------------------------------------------------------


def sources_of_files(files: Iterable[str]) -> list[ImageFile]:
    """Return the files that a user named, with their images. Raises ImageError for a file without images."""
    sources = []
    for file in files:
        with progress.work(f"reading {file}"):
            code_objects = tuple(offload_bundle.code_objects_of_file(file))
            images = () if code_objects else fatbin.images_of_file(file)
        if not images and not code_objects:
            raise fatbin.no_code(file)
        sources.append(ImageFile(file, images, code_objects=code_objects))
    return sources


def sources_of_process(pid: int) -> list[ImageFile]:
    """Return the files with images that a process has mapped. Raises Error if the process cannot be read.

    Code that the process compiled at run time (NVRTC, Triton) is not included.
    """
    from gpubpf.images.mapped import MappedImages
    from gpubpf.process import traceable

    known = traceable.status(pid)
    if not known:
        raise Error(f"there is no process {pid}; run ps to list the processes")
    files: dict[str, list[FatbinImage]] = {}
    mapped, comm = MappedImages(pid), known.get("Name", "")
    try:
        for file, image in mapped.images():
            files.setdefault(file, []).append(image)
        for_amd = list(mapped.code_objects())
    except OSError as error:
        raise traceable.refusal(pid, error.errno or 0) from None
    return [
        *(ImageFile(file, tuple(images), pid=pid, comm=comm) for file, images in files.items()),
        *(ImageFile(file, (), pid=pid, comm=comm, code_objects=found) for file, found in for_amd),
    ]


# --- the two options ---------------------------------------------------------------------------------


class Pipeline(Protocol):
    """The functions that ``--list`` and ``--ptx`` need from a tool's device programs (program.py, `BPF`)."""

    def target(self, options: Options) -> Target:
        """Return the device that would be used."""

    def refusals(self, parsed: module.Module, kernels: Sequence[str]) -> Mapping[str, str]:
        """Check kernels with these programs, as a `Check` does."""

    def late_refusals(self, parsed: module.Module, kernels: Sequence[str]) -> Mapping[str, str]:
        """Check kernels of a module that a process has loaded."""

    def instrumented_ptx(
        self, image: FatbinImage, kernels: Sequence[str], target: Target
    ) -> tuple[str, Mapping[str, str]]:
        """Instrument `kernels` with these programs, as an `Instrument` does."""

    def checked_code_object(self, data: bytes) -> Sidecar:
        """Return the sidecar of a code object with these programs in every kernel, as a `CheckAmd` does."""

    def observe(self, options: Options) -> tuple[list[ImageFile], int]:
        """Run COMMAND to its end. Return the modules that it loaded, with their kernels' launches, and its exit status."""


def show(b: Pipeline, options: Options, out: cli.Output) -> int:
    """Print the result of ``--list`` or ``--ptx`` as text, JSON or CSV. Return the exit status. Raises Error."""
    status, targets, wanted = 0, options.targets, options.kernels.wanted
    if targets.files:
        sources = sources_of_files(targets.files)
    elif targets.pids:
        sources = [source for pid in targets.pids for source in sources_of_process(pid)]
    else:
        sources, status = b.observe(options)
    try:
        if options.looks.ptx:
            for file, image, text in instrumented(sources, b.target(options), wanted, b.instrumented_ptx):
                out.line(f"// {file}: from the PTX for {image.arch}")
                out.write(text if text.endswith("\n") else text + "\n")
            return status
        check = b.late_refusals if targets.pids else b.refusals
        kernels = listed(sources, b.target(options), check, b.checked_code_object, wanted)
    except Error:
        if status:  # COMMAND failed, so return its status
            return status
        raise
    if options.output.json:
        out.records(kernel.record() for kernel in kernels)
    elif options.output.csv:
        out.write("".join(csv_rows(kernels)))
    elif kernels:
        for line in (*rows(kernels, options.output.verbose), *advice(kernels)):
            out.line(line)
    else:
        out.line("no kernels")
    return status


def csv_rows(kernels: Iterable[ListedFileKernel]) -> Iterator[str]:
    """Yield the table of ``--list`` as lines of CSV."""
    yield ",".join(LISTED.columns) + "\n"
    for kernel in kernels:
        lists = {"ptx": " ".join(kernel.ptx), "sass": " ".join(kernel.sass)}
        can = {"instrumentable": "no" if kernel.reason else "yes"}
        row = LISTED.row(kernel.record() | lists | can)
        yield cli.csv_cells("" if cell is None else cell for cell in row) + "\n"


def no_match(patterns: Sequence[str], seen: Iterable[str], most: int = MOST_NAMES) -> str:
    """Return the message for a ``--kernel`` that matches nothing. It names at most `most` of the kernels seen.

    HIP's own kernels are left out, unless there are no others. Without patterns, the message is that there are no kernels.
    """
    everything = sorted(set(seen))
    different = [name for name in everything if not names.is_of_runtime(name)] or everything
    shown = ", ".join(different[:most]) + (
        f", and {len(different) - most} more" if len(different) > most else ""
    )
    if not patterns:
        return "no kernels"
    return f"no kernel matches {' or '.join(map(repr, patterns))}; kernels seen: {shown or 'none'}"


def rows(kernels: Sequence[ListedFileKernel], verbose: bool = False) -> list[str]:
    """Return a table with one line per kernel. If there are several files, their names are headings."""
    launched = any(kernel.launches is not None for kernel in kernels)
    # Columns for NVIDIA GPUs, AMD GPUs, or both.
    codes = {"PTX": lambda k: k.ptx, "SASS": lambda k: k.sass} if any(not k.gpus for k in kernels) else {}
    if any(k.gpus for k in kernels):
        codes["GPU"] = lambda k: k.gpus
    headers = ["KERNEL", *codes, *(["LAUNCHES"] if launched else []), "INSTRUMENT"]
    shorts = Counter((kernel.source.file, kernel.name.short) for kernel in kernels)
    alike = [k.name.mangled for k in kernels if shorts[k.source.file, k.name.short] > 1]
    labels = names.labels(alike, 46 if launched else 56, full=True)  # with which the headers fit a terminal
    cells = []
    for kernel in kernels:
        ambiguous = shorts[kernel.source.file, kernel.name.short] > 1
        name = labels[kernel.name.mangled] if ambiguous else kernel.name.short
        row = [
            kernel.name.full if verbose else name,
            *(",".join(code(kernel)) or "-" for code in codes.values()),
        ]
        row += [f"{kernel.launches or 0:,}"] if launched else []
        cells.append((kernel.source.file, [*row, "yes" if kernel.reason is None else f"no: {kernel.reason}"]))
    lines = table.lines(headers, [row for _, row in cells], left=("KERNEL", *codes, "INSTRUMENT"))
    shown = [lines[0]]
    several = len({kernel.source.file for kernel in kernels}) > 1
    for (file, _), line in zip(cells, lines[1:], strict=True):
        if several and f"{file}:" not in shown:
            shown.append(f"{file}:")
        shown.append(line)
    return shown


def advice(kernels: Iterable[ListedFileKernel]) -> list[str]:
    """Return what to do about kernels that cannot be instrumented, once for each reason, as lines."""
    counts = Counter(kernel.reason for kernel in kernels if kernel.reason and remedy(kernel.reason))
    lines = []
    for reason, number in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        lines += table.wrap(f"{table.count(number, 'kernel')} with {reason}: {remedy(reason)}")
    return lines


def instrumented(
    sources: Iterable[ImageFile],
    target: Target,
    patterns: Sequence[str],
    instrument: Instrument,
) -> Iterator[tuple[str, FatbinImage, str]]:
    """Yield the file, the image and the instrumented PTX of each module with a matching kernel, for ``--ptx``.

    Raises Error if no kernel matches, or if none of the matching ones can be instrumented. Then the message has a reason.
    """
    seen: list[str] = []
    refused: list[str] = []
    of_amd: list[str] = []
    done = False
    for source in sources:
        of_amd += _names_in_code_objects(source.code_objects)
        for images in device_link.modules(source.images):
            chosen = choose(images, target)
            of_module = _names_of(images)
            seen += of_module
            matched = [name for name in of_module if not patterns or names.matches(patterns, name)]
            if not matched:
                continue
            if isinstance(chosen, str):
                refused += [f"{names.demangle(name).short}: {chosen}" for name in matched]
                continue
            text, refusals = instrument(chosen, matched, target)
            refused += [f"{names.demangle(name).short}: {reason}" for name, reason in refusals.items()]
            if len(refusals) < len(matched):
                done = True
                yield source.file, chosen, text
    if done:
        return
    if refused:
        raise Error(
            f"none of the matching kernels can be instrumented ({refused[0]}); see --list for all reasons"
        )
    if matched := [name for name in of_amd if names.chosen(patterns, name)]:
        shown = ", ".join(sorted({names.demangle(name).short for name in matched})[:MOST_NAMES])
        raise Error(f"kernels for AMD GPUs have no PTX ({shown}); --list shows which can be instrumented")
    raise Error(no_match(patterns, (names.demangle(name).short for name in (*seen, *of_amd))))


def _names_in_code_objects(data: Iterable[bytes]) -> list[str]:
    """Return the kernels of code objects for AMD GPUs, except damaged ones."""
    found: list[str] = []
    for each in data:
        with contextlib.suppress(ImageError):
            found += [kernel.name for kernel in CodeObject(each).kernels]
    return found


def _names_of(images: Sequence[FatbinImage]) -> list[str]:
    found: dict[str, None] = {}
    for image in images:
        try:
            found |= dict.fromkeys(_entries(image))
        except ImageError:
            continue
    return list(found)
