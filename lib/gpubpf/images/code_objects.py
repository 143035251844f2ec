"""Make a sidecar for AMD GPUs: the instrumented code object, which is loaded in addition to the application's own.

    sidecar = instrument(data, [AmdAttachment(lowered, "exit", ("vec*",))])
    sidecar.image                     # a code object
    sidecar.kernels, sidecar.refusals

Results are cached by the content of all inputs. AMD's code object manager reads the application's data, and crashes on some reserved
encodings. So it runs in a child process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gpubpf import cache, names
from gpubpf.errors import Error, ImageError, VerifyError
from gpubpf.gcn import POINTS, lacking
from gpubpf.gcn.code_object import CodeObject, GcnKernel
from gpubpf.gcn.comgr import LIBRARIES
from gpubpf.gcn.inject import GcnPlacement, inject
from gpubpf.gcn.kernel_writer import GcnSite, InjectedGcnKernel
from gpubpf.gcn.lines import SourceLines
from gpubpf.images.sidecar import STAGE, AmdKernel, RegisterUse, Sidecar, SidecarKernel, pack, unpack
from gpubpf.linux import libraries
from gpubpf.lower.amdgcn import WaveProgram
from gpubpf.process import children, privileges
from gpubpf.ptx.values import Site
from gpubpf.record import Record, replace

_PATIENCE = 100  # seconds per code object
_MEMORY = 8 << 30  # bytes per code object
_LARGEST_FILE = 1 << 30  # bytes of a file that AMD's code object manager may write


class AmdAttachment(Record):
    """A device program, the point it is attached to, and the `--kernel` patterns of its kernels (none: every kernel).

    lowered: return the program for waves of 32 or 64 lanes. Raises VerifyError if it cannot run in such waves. accumulate: the kind of
    work that is counted for it. kinds, spaces: at `access`, the kinds and spaces of the accesses. opcodes: at `instruction`, globs.
    """

    lowered: Callable[[int], WaveProgram]
    point: str
    kernels: tuple[str, ...] = ()
    accumulate: str | None = None
    kinds: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()
    opcodes: tuple[str, ...] = ()


def instrument(data: bytes, attachments: Sequence[AmdAttachment], virtual: bool = False) -> Sidecar:
    """Return the sidecar of a code object. A damaged one raises nothing, because it is the application's.

    virtual: it will run on hipsim's virtual clock.
    """
    try:
        code = CodeObject(data)
        kernels = code.kernels
    except Error:
        return Sidecar()
    placements: dict[str, list[GcnPlacement]] = {}
    refusals: dict[str, str] = {}
    for kernel in kernels:
        try:
            if chosen := _placements(kernel, attachments):
                placements[kernel.name] = chosen
        except VerifyError as error:
            refusals[kernel.name] = str(error)
    entries = tuple(kernel.name for kernel in kernels if not names.is_of_runtime(kernel.name))
    if not placements:
        return Sidecar(refusals=refusals, entries=entries)
    store, key = (
        cache.default(),
        cache.key(_version(), data, _identity(placements), repr((refusals, virtual))),
    )
    if (kept := store.get(STAGE, key)) is not None and (found := unpack(kept)) is not None:
        return found
    made = _in_child(data, placements, refusals, entries, virtual)
    if isinstance(made, str):
        return Sidecar(refusals={**refusals, **dict.fromkeys(placements, made)}, entries=entries)
    store.put(STAGE, key, pack(made))
    return made


def refused(data: bytes, reason: str) -> Sidecar:
    """Return a sidecar in which every kernel of a code object is refused for the same reason."""
    entries = instrument(data, ()).entries
    return Sidecar(refusals=dict.fromkeys(entries, reason), entries=entries)


def _placements(kernel: GcnKernel, attachments: Sequence[AmdAttachment]) -> list[GcnPlacement]:
    """Return the placements for a kernel. Raises VerifyError if a program must not run in its waves, or if all are at points that
    such kernels do not have."""
    found, missing = [], ""
    for attachment in attachments:
        if not names.chosen(attachment.kernels, kernel.name) or attachment.kinds == ("async",):
            continue
        program = attachment.lowered(kernel.descriptor.wave) if attachment.point in POINTS else None
        lack = lacking(attachment.point, program.arguments if program else ())
        if program is None or lack:
            missing = missing or lack
            continue
        found.append(
            GcnPlacement(
                program,
                attachment.point,
                attachment.accumulate,
                attachment.kinds,
                attachment.spaces,
                attachment.opcodes,
            )
        )
    if missing and not found:
        raise VerifyError(f"kernels of AMD GPUs have no probes at {missing} yet")
    return found


def _in_child(data: bytes, *others: object) -> Sidecar | str:
    """Return the result of `_instrument`, or the reason if it crashes or takes too long."""
    try:
        done = subprocess.run(
            children.python(f"from gpubpf.images import code_objects; code_objects.serve({os.getpid()})"),
            input=pickle.dumps((data, *others)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=children.environment("LD_LIBRARY_PATH"),  # where AMD's code object manager may be
            start_new_session=True,  # so that Ctrl-C only reaches the tool
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return f"making the copies of its code object takes longer than {_PATIENCE} s"
    made = unpack(done.stdout) if done.returncode == 0 else None
    return made or "AMD's code object manager cannot read its code object"


def serve(parent: int) -> None:
    """Run the child: read the arguments of `_instrument` from stdin, and write the packed sidecar to stdout. `parent`: the tool."""
    import llvmlite.binding  # noqa: F401, before privileges are dropped

    privileges.drop_all()
    privileges.end_with_parent(parent)
    children.Limits(_MEMORY, _LARGEST_FILE, _PATIENCE).apply()
    data, *others = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pack(_instrument(CodeObject(data), *others)))


def _instrument(
    code: CodeObject,
    placements: Mapping[str, Sequence[GcnPlacement]],
    refusals: Mapping[str, str],
    entries: tuple[str, ...],
    virtual: bool,
) -> Sidecar:
    try:
        injected = inject(code, placements, virtual)
    except (ImageError, VerifyError) as error:
        return Sidecar(refusals={**refusals, **dict.fromkeys(placements, str(error))}, entries=entries)
    lines = SourceLines(code.data)
    return Sidecar(
        injected.image if injected.kernels else b"",
        tuple(_kernel(name, kernel, lines) for name, kernel in injected.kernels.items()),
        {**refusals, **injected.refusals},
        entries=entries,
    )


def _kernel(name: str, kernel: InjectedGcnKernel, lines: SourceLines) -> SidecarKernel:
    return SidecarKernel(
        name,
        ((0, kernel.argument_bytes),),
        kernel.block_offset,
        kernel.block,
        tuple(_site(site, lines) for site in kernel.sites),
        kernel.waits,
        len(kernel.sites),
        kernel.unprobed,
        amd=AmdKernel(
            kernel.wave,
            kernel.compute_units,
            kernel.most_threads,
            kernel.original_threads,
            RegisterUse(*kernel.registers),
            kernel.references,
        ),
    )


def _site(site: GcnSite, lines: SourceLines) -> Site:
    where = (site.number, site.function, 0, *lines.at(site.address))
    made = Site(*where, site.point, site.opcode, block=site.block, offset=site.offset)
    if (access := site.access) is None:
        return made
    made = replace(made, kind=access.kind, space=access.space)
    return replace(made, width=access.width, effect=access.effect)


# --- the cache ---


@functools.cache
def _version() -> str:
    """Return a key that changes with the code that makes a sidecar, the compiler of the programs and AMD's code object manager."""
    package = Path(__file__).resolve().parents[1]
    others = (
        "lower/amdgcn.py",
        "lower/fragment.py",
        "lower/launch_block.py",
        "images/code_objects.py",
        "images/sidecar.py",
    )
    files = [*sorted((package / "gcn").glob("*.py")), *(package / name for name in others)]
    return cache.key(cache.key_of_files(files), importlib.metadata.version("llvmlite"), *_comgr_files())


def _comgr_files() -> Iterator[str]:
    """Yield the identity of each file that `Comgr` may load: path, size, inode and time of change. It is too large to be hashed."""
    names = libraries.LibraryNames(*LIBRARIES)
    directories = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    for path in sorted(libraries.files(names, also=map(Path, directories))):
        with contextlib.suppress(OSError):
            found = os.stat(path)
            yield f"{path} {found.st_size} {found.st_ino} {found.st_mtime_ns}"


def _identity(placements: Mapping[str, Sequence[GcnPlacement]]) -> str:
    programs: dict[int, GcnPlacement] = {}
    for chosen in placements.values():
        programs.update((id(placement.program), placement) for placement in chosen)
    numbers = {identity: number for number, identity in enumerate(programs)}
    texts = [(one.program.text, one.program.arguments) for one in programs.values()]
    kernels = [
        (
            name,
            [
                (numbers[id(one.program)], one.point, one.accumulate, one.kinds, one.spaces, one.opcodes)
                for one in chosen
            ],
        )
        for name, chosen in placements.items()
    ]
    return repr((texts, kernels))
