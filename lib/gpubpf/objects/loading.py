"""Load an object: its programs and maps as a `Program`, verified and lowered like those of a C text.

    loaded = load("probe.bpf.o")
    b = BPF(source=loaded.programs)
    loaded.attach(b)

The other modules of this package define the values between these steps.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf import compile, maps
from gpubpf.ebpf.bytecode import BpfFunction, Program
from gpubpf.ebpf.helpers import HELPERS
from gpubpf.errors import Error, ImageError, UsageError, VerifyError
from gpubpf.linux import btf, kernel_events, process_functions
from gpubpf.lower.programs import CompiledPrograms
from gpubpf.objects import launch, map_kinds, settings
from gpubpf.objects.attach_points import ALONE, ON_GPU, AttachPoint, attach_point
from gpubpf.objects.core import Relocations
from gpubpf.objects.linking import Linker
from gpubpf.objects.object_file import LARGEST, ObjectFile
from gpubpf.objects.settings import Settings
from gpubpf.record import Record, replace
from gpubpf.show import notices
from gpubpf.verify import records

if TYPE_CHECKING:
    from gpubpf.lower.fragment import Fragment
    from gpubpf.program import BPF

_OPTIONAL = "?"  # before the name of a section: libbpf loads the program only on request
UNCHANGED = Settings()
_LARGEST_HOST_MAP = 1 << 30  # bytes
_OF_CONTEXT = ("context", "launch", "replay")  # kinds of argument that come from the context
_SPACES = ("global", "local", "const")  # of bpftime's __memcapture


class ObjectPrograms(CompiledPrograms):
    """The programs of an object."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, compile.object_key(program))

    def fragment(self, name: str) -> Fragment:
        """See `LoweredPrograms`. A program that reads its argument is refused, because it expects the registers of a CPU."""
        made = super().fragment(name)
        if any(argument.kind in _OF_CONTEXT for argument in made.arguments):
            raise VerifyError(
                f"device program {name} reads its argument, but a GPU has no struct pt_regs; use helpers such as bpf_get_thread_idx"
            )
        return made


class LoadedObject(Record):
    """An object: its programs, and where each is attached."""

    programs: ObjectPrograms
    places: Mapping[str, AttachPoint]

    @property
    def attached(self) -> tuple[str, ...]:
        """The programs that `attach` attaches: all except those that run as a separate kernel."""
        return tuple(name for name, place in self.places.items() if place.event != "alone")

    def kernels(self, wanted: Sequence[str]) -> list[str]:
        """Return the globs and names of the kernels of all programs; empty: every kernel.

        wanted: --kernel, for programs that name no kernel. Raises UsageError for --kernel if all programs name their kernels."""
        device = [place for place in self.places.values() if place.event in ("entry", "exit", "access")]
        named = dict.fromkeys(name for place in device for name in place.kernels)
        every = any(not place.kernels for place in device)
        if wanted and not every:
            raise UsageError(
                f"--kernel and the kernels that the programs name ({', '.join(named)}) exclude each other;"
                " give a program another kernel with --attach"
            )
        return [] if every and not wanted else [*dict.fromkeys((*wanted, *named))]

    def attach_alone(self, bpf: BPF, grid: Sequence[int] | None, block: Sequence[int] | None) -> list[str]:
        """Run the only program as a separate kernel: attach it to the entry of `launch.KERNEL`, an empty kernel.

        Return the command that launches this kernel, with these extents; None: 1."""
        (name,) = self.places
        bpf.attach_gpu_entry(launch.KERNEL, name)
        return [sys.executable, launch.__file__, *map(str, (*(grid or (1, 1, 1)), *(block or (1, 1, 1))))]

    def attach(self, bpf: BPF, kernels: Iterable[str] = (), own_files: bool = False) -> None:
        """Attach all programs except those that run as a separate kernel.

        kernels: globs, for programs that name no kernel.
        own_files: the tool starts the traced program, so paths of functions are valid in this process.

        Raises VerifyError, and Error if there is no program to attach, or if a file lacks the function of a program."""
        if not self.attached:
            raise Error(
                f"all programs ({', '.join(self.places)}) are kernels of their own; run one with --run"
            )
        for name, place in self.places.items():
            if place.event == "entry":
                bpf.attach_gpu_entry(place.kernels, name)
            elif place.event == "exit":
                bpf.attach_gpu_exit(place.kernels, name)
            elif place.event == "access":
                bpf.attach_gpu_access(tuple(kernels), name, kinds=("load", "store"), spaces=_SPACES)
            elif place.event == "tracepoint":
                bpf.attach_tracepoint(place.target, name)
            elif place.event == "raw":
                bpf.attach_raw_tracepoint(place.target, name)
            elif place.event == "kernel_function":
                bpf.attach_kprobe(place.target, name, place.offset, place.returns)
                _check_kprobes(name, place.target)
            elif place.event == "perf_event":
                bpf.attach_perf_event(place.target, name)
            elif place.event == "function":
                if own_files and (lack := process_functions.lacking(place.path, place.target, place.offset)):
                    raise Error(f"program {name}: {lack}; check section {place.section!r}")
                bpf.attach_process_function(place.path, place.target, name, place.returns, place.offset)


def _check_kprobes(program: str, function: str) -> None:
    """Raise Error if programs cannot be attached to functions of the Linux kernel. Otherwise print a notice: the program is attached
    to the kernel's function, not to a GPU kernel with this name."""
    instead = f"kprobe/{ON_GPU}{function}"
    try:
        kernel_events.kprobe_type(function)
    except Error as error:
        raise Error(f"program {program}: {error}, or, for a GPU kernel of this name, {instead}") from None
    notices.note(
        "gpurun",
        f"program {program} runs at the function {function} of the Linux kernel; for a GPU kernel of this name, use {instead}",
    )


def load(path: str, given: Settings = UNCHANGED) -> LoadedObject:
    """Return the object in a file, with the command line's changes.

    Raises UsageError, and Error. A message about the file begins with its path."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise Error(
            f"{path}: cannot be read ({error.strerror}); check its name and its permissions"
        ) from None
    try:
        return read(data, given)
    except ImageError as error:
        raise Error(f"{path}: {error}") from None


def read(data: bytes, given: Settings = UNCHANGED) -> LoadedObject:
    """Return the object in these bytes; see `load`. Raises ImageError, UsageError, and Error if the kernel's types are needed and
    missing."""
    file = ObjectFile(data)
    types, named = file.types, {function.name for function in file.programs}
    for option, name in (("--run", given.alone), *(("--attach", name) for name in given.sections)):
        if name is not None and name not in named:
            programs = ", ".join(function.name for function in file.programs)
            raise UsageError(f"{option} {name!r}: there is no program {name}; use one of: {programs}")
    places = {}
    for function in file.programs:
        section = given.sections.get(function.name, file.sections[function.section].name)
        if section.startswith(_OPTIONAL) or given.alone not in (None, function.name):
            continue
        try:
            places[function.name] = attach_point(ALONE if given.alone else section)
        except ImageError as error:
            raise ImageError(f"program {function.name}: {error}") from None
    if not places:
        raise ImageError(
            "it loads none of its programs: the names of all sections begin with '?'; name some with --attach"
        )
    variables = map_kinds.names_of_variables(file.variables.values(), file.maps)
    linker = Linker(file, variables, functools.cache(lambda: Relocations(types, btf.types())))
    functions = {
        function.name: BpfFunction(function.name, places[function.name].point, linker.program(function))
        for function in file.programs
        if function.name in places
    }
    on_host = [one for one in functions.values() if one.point not in b.DEVICE_POINTS]
    sizes = map_kinds.record_sizes(function.instructions for function in on_host)
    definitions = {
        name: map_kinds.definition(one, types, sizes.get(name, 0)) for name, one in file.maps.items()
    }
    of_machine = [name for name, place in places.items() if place.of_machine]
    used = {i.map for function in functions.values() for i in function.instructions}
    for number, name in variables.items():
        if name in used:
            definitions[name] = map_kinds.of_variables(file.variables[number], name, types)
    definitions = settings.with_values(
        map_kinds.placed(definitions, functions.values(), of_machine), variables.values(), given.values
    )
    _check_helpers(functions.values())
    program = Program(linker.text(), functions, definitions, file.license)
    return LoadedObject(ObjectPrograms(_with_record_sizes(program)), places)


def _with_record_sizes(program: Program) -> Program:
    """Return the program with the size of the records in each ring buffer that device programs write. Raises VerifyError."""
    rings = {name for name, one in program.maps.items() if one.kind == "ringbuf"}
    using = {
        function.name: function
        for function in program.device_functions
        if any(i.map in rings for i in function.instructions)
    }
    return replace(program, maps=records.sized(replace(program, functions=using)).maps) if using else program


def check_room(path: str, bpf: BPF, memory: int) -> None:
    """Raise Error if a map needs more than `memory` bytes on the GPU, or more host memory than any measurement needs.

    path: path of the object, for the message."""
    left = memory
    for one in bpf.attached.definitions():
        size = maps.storage_size(one, 1)
        if one.kind not in ("ringbuf", "shared_array"):
            left -= size
        if left < 0:
            raise Error(
                f"{path}: map {one.name} of {size:,} bytes does not fit into {left + size:,} bytes of GPU memory,"
                f" of {memory:,} for all maps; make it smaller, or raise --map-memory"
            )
        if size > _LARGEST_HOST_MAP:
            raise Error(
                f"{path}: map {one.name} has {size:,} bytes (at most {_LARGEST_HOST_MAP:,}); make it smaller"
            )


_OTHERS = "; docs/bpftime.md lists the helpers that do; leave the call out, or move it to a program on the host, such as uprobe/"


def _check_helpers(functions: Iterable[BpfFunction]) -> None:
    """Raise ImageError if a program calls a helper that its side does not have."""
    for function in functions:
        on_gpu = function.point in b.DEVICE_POINTS
        for i in function.instructions:
            if i.opcode != b.JMP | b.CALL or i.src or i.imm == b.POISON:
                continue
            helper = HELPERS.get(i.imm)
            name = helper.name if helper is not None else f"helper number {i.imm}"
            if on_gpu and (helper is None or helper.device is None):
                instead = f"; use {helper.instead}" if helper is not None and helper.instead else _OTHERS
                raise ImageError(
                    f"program {function.name}, C line {i.line}: calls {name}, which does not exist on a GPU{instead}"
                )
            if not on_gpu and helper is not None and not helper.in_kernel:
                raise ImageError(
                    f"program {function.name}, C line {i.line}: calls {name}, which exists only on a GPU"
                )
