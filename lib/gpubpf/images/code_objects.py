"""Make a sidecar for AMD GPUs: the instrumented code object, which is loaded in addition to the application's own.

    sidecar = instrument(data, [Probe(lowered, "exit", kernels=("vec*",))])
    sidecar.image                     # a code object
    sidecar.kernels, sidecar.refusals

Results are cached by the content of all inputs. AMD's code object manager reads the application's data, and crashes on some reserved
encodings. So it runs in a child process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from gpubpf import cache, names
from gpubpf.ebpf.probe import Probe
from gpubpf.errors import Error, ImageError, VerifyError
from gpubpf.gcn import POINTS, lacking
from gpubpf.gcn.code_object import CodeObject, GcnKernel
from gpubpf.gcn.comgr import LIBRARIES
from gpubpf.images.sidecar import STAGE, AmdKernel, RegisterUse, Sidecar, SidecarKernel, pack, unpack
from gpubpf.inject.values import Site
from gpubpf.kernel import privileges
from gpubpf.linux import libraries
from gpubpf.lower.amdgcn import WaveProgram
from gpubpf.process import children
from gpubpf.record import replace

if TYPE_CHECKING:
    from gpubpf.gcn.kernel_writer import GcnSite, InjectedGcnKernel
    from gpubpf.gcn.lines import SourceLines

# Returns the program for waves of 32 or 64 lanes. Raises VerifyError if the program cannot run in such waves.
ForWaves: TypeAlias = Callable[[int], WaveProgram]
_PATIENCE = 100  # seconds per code object
_MEMORY = 8 << 30  # bytes per code object
_LARGEST_FILE = 1 << 30  # bytes of a file that AMD's code object manager may write


def instrument(data: bytes, probes: Sequence[Probe[ForWaves]], virtual: bool = False) -> Sidecar:
    """Return the sidecar of a code object. A damaged code object raises nothing, because it is the application's.

    virtual: whether the sidecar will run on hipsim's virtual clock
    """
    try:
        code = CodeObject(data)
        kernels = code.kernels
    except Error:
        return Sidecar()
    lowered: dict[str, list[Probe[WaveProgram]]] = {}
    refusals: dict[str, str] = {}
    for kernel in kernels:
        try:
            if chosen := _lowered(kernel, probes):
                lowered[kernel.name] = chosen
        except VerifyError as error:
            refusals[kernel.name] = str(error)
    entries = tuple(kernel.name for kernel in kernels if not names.is_of_runtime(kernel.name))
    if not lowered:
        return Sidecar(refusals=refusals, entries=entries)
    store, key = (
        cache.default(),
        cache.key(_version(), data, _identity(lowered), repr((refusals, virtual))),
    )
    if (kept := store.get(STAGE, key)) is not None and (found := unpack(kept)) is not None:
        return found
    made = _in_child(data, lowered, refusals, entries, virtual)
    if isinstance(made, str):
        return Sidecar(refusals={**refusals, **dict.fromkeys(lowered, made)}, entries=entries)
    store.put(STAGE, key, pack(made))
    return made


def refused(data: bytes, probes: Sequence[Probe[ForWaves]], reason: str) -> Sidecar:
    """Return a sidecar in which each kernel of a code object that a probe chooses is refused for the same reason."""
    entries = instrument(data, ()).entries
    wanted = [name for name in entries if any(names.chosen(probe.kernels, name) for probe in probes)]
    return Sidecar(refusals=dict.fromkeys(wanted, reason), entries=entries)


def _lowered(kernel: GcnKernel, probes: Sequence[Probe[ForWaves]]) -> list[Probe[WaveProgram]]:
    """Return the probes of a kernel, with the programs lowered for the size of its waves.

    Raises VerifyError if a program must not run in these waves, or if kernels of AMD GPUs do not have the points of any program.
    """
    found, missing = [], ""
    for probe in probes:
        if not names.chosen(probe.kernels, kernel.name) or probe.kinds == ("async",):
            continue
        program = probe.program(kernel.descriptor.wave) if probe.point in POINTS else None
        lack = lacking(probe, program.arguments if program else ())
        if program is None or lack:
            missing = missing or lack
            continue
        found.append(probe.with_program(program))
    if missing and not found:
        raise VerifyError(f"kernels of AMD GPUs have no probes at {missing} yet")
    return found


def _in_child(data: bytes, *others: object) -> Sidecar | str:
    """Return the result of `_instrument` in a child process, or the reason if the child crashes or takes too long."""
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
    probes: Mapping[str, Sequence[Probe[WaveProgram]]],
    refusals: Mapping[str, str],
    entries: tuple[str, ...],
    virtual: bool,
) -> Sidecar:
    # Imported here, because nearly all sidecars come from the cache.
    from gpubpf.gcn.inject import inject
    from gpubpf.gcn.lines import SourceLines

    try:
        injected = inject(code, probes, virtual)
    except (ImageError, VerifyError) as error:
        return Sidecar(refusals={**refusals, **dict.fromkeys(probes, str(error))}, entries=entries)
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
    # Compilers may give the head of a loop, or a change of EXEC, no line.
    near = (lines.near(site.address, *extent) for extent in site.extents)
    line = next((place for place in near if place[1]), lines.at(site.address))
    where = (site.number, site.function, 0, *line)
    made = Site(
        *where,
        site.point,
        site.opcode,
        block=site.block,
        cause=site.cause,
        loop=site.loop,
        ends=site.ends,
        offset=site.offset,
    )
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
        "ptx/causes.py",
        "ptx/flow.py",
        "ptx/loop_ends.py",
        "ptx/module.py",
        "ptx/opcodes.py",
        "ptx/tokens.py",
    )
    files = [*sorted((package / "gcn").glob("*.py")), *(package / name for name in others)]
    with contextlib.suppress(ImportError, ValueError):
        if (llvmlite := importlib.util.find_spec("llvmlite")) is not None and llvmlite.origin is not None:
            files.append(Path(llvmlite.origin).with_name("_version.py"))
    return cache.key(cache.key_of_files(files), *_comgr_files())


def _comgr_files() -> Iterator[str]:
    """Yield the identity (path, size, inode, time of change) of each file that `Comgr` may load. Hashing the files takes too long."""
    names = libraries.LibraryNames(*LIBRARIES)
    directories = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    for path in sorted(libraries.files(names, also=map(Path, directories))):
        with contextlib.suppress(OSError):
            found = os.stat(path)
            yield f"{path} {found.st_size} {found.st_ino} {found.st_mtime_ns}"


def _identity(probes: Mapping[str, Sequence[Probe[WaveProgram]]]) -> str:
    programs: dict[int, WaveProgram] = {}
    for chosen in probes.values():
        programs.update((id(probe.program), probe.program) for probe in chosen)
    numbers = {identity: number for number, identity in enumerate(programs)}
    texts = [(program.text, program.arguments) for program in programs.values()]
    kernels = [
        (name, [probe.with_program(numbers[id(probe.program)]) for probe in chosen])
        for name, chosen in probes.items()
    ]
    return repr((texts, kernels))
