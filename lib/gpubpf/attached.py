"""What a tool has attached: device programs and their places, host programs, maps and parameters. For measurements and for --list."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from gpubpf.ebpf import filters, maps, sampling
from gpubpf.ebpf.bytecode import HOST_POINTS, WIDE
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.ebpf.probe import Probe
from gpubpf.errors import UsageError
from gpubpf.lower import programs
from gpubpf.lower.fragment import Fragment
from gpubpf.record import replace
from gpubpf.show import progress
from gpubpf.show.parsed import ThreadOptions

if TYPE_CHECKING:
    from gpubpf.ebpf.sampling import Sampling
    from gpubpf.images.assemble import Target
    from gpubpf.images.code_objects import ForWaves
    from gpubpf.images.fatbin import FatbinImage
    from gpubpf.images.listing import ImageFile
    from gpubpf.images.sidecar import Sidecar
    from gpubpf.inject.values import PtxProbe
    from gpubpf.linux.host_programs import Host, HostProbe
    from gpubpf.linux.kernel_events import KernelFunction, PerfEvent
    from gpubpf.linux.process_functions import FunctionProbe
    from gpubpf.linux.uprobes import Table
    from gpubpf.lower.programs import LoweredPrograms
    from gpubpf.ptx.module import Module
    from gpubpf.session.tracing import ForAmd
    from gpubpf.show.parsed import Options

# Null probes: kernels are replaced by copies whose probes are empty. The slowdown of a program is then the cost of the copies alone,
# such as loads from global memory in place of constant memory. This is for benchmarks. It is not an option, since nothing is measured.
NULL_PROBE_VARIABLE = "GPUBPF_NULL_PROBE"
# Programs at accesses run for each access at each execution: also where accesses could share a program (Probe.alike), or registers
# could count executions (Probe.keeps). Tests compare both.
EACH_ACCESS_VARIABLE = "GPUBPF_EACH_ACCESS"
EMPTY = Fragment(function="empty", ptx="{\n}", arguments=())


def null_probes() -> bool:
    """Return whether the environment asks for null probes."""
    return bool(os.environ.get(NULL_PROBE_VARIABLE))


class Companion(Protocol):
    """A part of a tool with separate host programs, which are attached and detached with the measurement's."""

    def host(
        self, options: Options | None, note: Callable[[str], None], virtual: bool = False
    ) -> Host | None: ...


class Attached:
    """The programs that a tool has attached, and how they run.

    programs: the compiled text, or the object file.
    text, any_user: see `program.BPF`.
    """

    def __init__(self, programs: LoweredPrograms, text: str, any_user: bool) -> None:
        self.programs, self._text, self._any_user = programs, text, any_user
        self.probes: list[Probe[str]] = []
        self.host_programs: list[HostProbe] = []
        self.tables: list[Table] = []
        self.process_functions: list[FunctionProbe] = []
        self.companions: list[Companion] = []
        self.values: dict[str, bytes] = {}  # name of a parameter → its bytes
        # Map name → size, in place of the C text's, for maps of host programs: entries, or bytes of a ring buffer.
        self.entries: dict[str, int] = {}
        self.hold_notices = False  # about libraries, see `uprobes.Uprobes.told_of`
        self.statistics = True  # the kernel counts the runs of host programs, which takes 50 ns each
        self.sampling: Sampling | None = None  # the blocks or warps that device programs run in; None: all
        self.budget: float | None = None  # most per cent of overhead; None: no limit
        self.titles: dict[str, str] = {}  # name of a program → what notices call it instead
        self._for_amd: LoweredPrograms | None = None
        self._fragments: dict[str, Fragment] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is attached."""
        return not (self.probes or self.host_programs or self.tables or self.process_functions)

    @property
    def needs_accesses(self) -> bool:
        """See `traced.measurement.Plan.accesses`."""
        inside = ("access", "branch", "barrier_leave", "value", "float", "instruction")
        return any(probe.point in inside for probe in self.probes)

    def add(self, probe: Probe[str]) -> None:
        """Attach a device program. Raises UsageError if it is for another point, and VerifyError if it must not run."""
        self.fragment(probe)
        self.probes.append(probe)

    def add_host(self, name: str, point: str, event: str | KernelFunction | PerfEvent) -> None:
        """Attach a program of the host. Raises UsageError if it is for another point."""
        from gpubpf.linux.host_programs import HostProbe

        found = self.programs.points.get(name)
        if found != point:
            raise UsageError(f"{name} cannot be attached to {event}: {self.belongs(name)}")
        self.host_programs.append(HostProbe(name, event))

    def fragment(self, probe: Probe[str]) -> Fragment:
        """Return the lowered program of a probe. Raises as `add` does."""
        name = probe.program
        if self.programs.points.get(name) != probe.point:
            raise UsageError(f"{name} cannot be attached to {probe.point}: {self.belongs(name)}")
        if name not in self._fragments:
            self._fragments[name] = self.programs.fragment(name)
        return self._fragments[name]

    def belongs(self, name: str) -> str:
        """Return the name of the call that attaches a program, for an error message about another call."""
        points = self.programs.points
        if name not in points:
            return f"there is no program {name}; use one of: {', '.join(points) or 'none'}"
        point = points[name]
        if point == "host":
            return "it takes a context of the Linux kernel; attach it with attach_tracepoint or attach_perf_event"
        if point == "uprobe":
            return "it takes a struct pt_regs; attach it with attach_uprobe or attach_kprobe"
        call = f"attach_{point}" if point in HOST_POINTS else f"attach_gpu_{point}"
        return f"it takes a struct gpu_{point}; attach it with {call}"

    def host(
        self, options: Options | None, note: Callable[[str], None], virtual: bool = False
    ) -> Host | None:
        """Return the host side of the measurement: its host programs and shared arrays. None if there are none.

        The programs are attached to no process yet. Raises what `host_programs.Host` raises.
        """
        companions = [host for other in self.companions if (host := other.host(options, note, virtual))]
        shared = [definition for definition in self.definitions() if definition.kind == "shared_array"]
        if not (shared or self.host_programs or self.tables or self.process_functions or companions):
            return None
        from gpubpf.linux.host_programs import Host

        sized = {
            name: replace(definition, max_entries=self.entries.get(name, definition.max_entries))
            for name, definition in self.programs.program.maps.items()
        }
        return Host(
            replace(self.programs.program, maps=sized),
            self.host_programs,
            functions=self.tables,
            own=self.process_functions,
            shared=shared,
            params=self.params(options),
            native=self.programs.native,
            virtual=virtual,
            companions=companions,
            statistics=self.statistics,
            hold_notices=self.hold_notices,
            note=note,
        )

    def lowered_probes(self) -> list[PtxProbe]:
        """Return the probes with their lowered programs, for `images.instrument`; with null probes, with empty programs."""
        empty, each = null_probes(), bool(os.environ.get(EACH_ACCESS_VARIABLE))
        made = [
            replace(
                probe.with_program(EMPTY if empty else self.fragment(probe)),
                accumulate=None if empty else probe.accumulate,
                alike=0 if each else probe.alike,
                sampled=self.sampling.unit if self.sampling else "",
            )
            for probe in self.probes
            if not (each and (probe.keeps or probe.repeats))
        ]
        if self.budget is not None and self.probes:
            from gpubpf.inject import cost

            patterns = [probe.kernels for probe in self.probes]
            every = () if () in patterns else tuple(dict.fromkeys(itertools.chain(*patterns)))
            program, work = (cost.SAMPLED_COST, cost.SKIPPED) if self.sampling else (cost.COST, cost.ADDED)
            made.append(Probe(program, "exit", work, kernels=every))
        return made

    def probes_of(self, kernels: Sequence[str]) -> dict[str, list[PtxProbe]]:
        """Return these programs for each of `kernels`, whichever kernels they were attached to."""
        return dict.fromkeys(kernels, self.lowered_probes())

    @property
    def _amd_programs(self) -> LoweredPrograms:
        """The programs for AMD GPUs. If the text depends on the largest number of lanes, these are its variant for 64 lanes."""
        if self._for_amd is None:
            wide = programs.is_by_lanes(self._text)
            self._for_amd = programs.load(WIDE + self._text, self._any_user) if wide else self.programs
        return self._for_amd

    def amd_probes(self) -> list[Probe[ForWaves]]:
        """Return the probes for kernels of AMD GPUs, for `images.code_objects`. With null probes there are none."""
        return [
            probe.with_program(
                functools.cache(functools.partial(self._amd_programs.wave_program, probe.program))
            )
            for probe in (() if null_probes() else self.probes)
            if not probe.repeats
            and not probe.keeps
            and probe.point != "access_again"  # no accesses are known to be alike
        ]

    def amd_refusal(self) -> str:
        """Return why the measurement does not work for kernels of AMD GPUs; "" if it does.

        A program at a point that kernels of AMD GPUs do not have is left out there, but does not refuse them."""
        if not (
            self.sampling
            or self.budget is not None
            or any(program.event == "operation" for program in self.host_programs)
        ):
            return ""
        options = " with --sample-blocks or --sample-warps" if self.sampling else ""
        options += " with --budget" if self.budget is not None else ""
        return f"this tool does not measure AMD GPUs{options} yet"

    def for_amd(self) -> ForAmd:
        """Return what a measurement needs for kernels of AMD GPUs."""
        from gpubpf.gcn import lacking
        from gpubpf.session.tracing import ForAmd

        if refusal := self.amd_refusal():
            return ForAmd(self.amd_probes, tuple, refusal=refusal)
        missing: dict[str, list[str]] = {}  # what kernels of AMD GPUs lack → the programs that need it
        for probe in self.probes:
            if probe.keeps or probe.point == "access_again":
                continue
            if lack := lacking(probe, self.fragment(probe).arguments):
                missing.setdefault(lack, []).append(
                    self.titles.get(probe.program, f"{probe.program} ({probe.point})")
                )
        if not isinstance(self.programs, programs.PrebuiltPrograms):
            _ = self._amd_programs  # compiled while the tool has its privileges

        def maps() -> list[MapDefinition]:
            return [self._amd_programs.maps.get(one.name, one) for one in self.definitions()]

        needed = [
            f"no probes at {lack} yet, which {', '.join(programs)} need{'s' * (len(programs) == 1)}"
            for lack, programs in missing.items()
        ]
        notice = f"kernels of AMD GPUs have {'; '.join(needed)}" if needed else ""
        return ForAmd(self.amd_probes, maps, notice)

    def uses_maps(self, name: str) -> bool:
        """Return whether the attached device program `name` uses any map, after removal of code that never runs."""
        return any(one.map for one in self._fragments[name].arguments)

    def definitions(self) -> list[MapDefinition]:
        """Return the maps that attached device programs use, the maps that the library adds to them, and the shared arrays of all
        attached programs."""
        used = {argument.map for probe in self.probes for argument in self.fragment(probe).arguments}
        used |= {name for probe in self.probes for name in self.programs.maps_of(probe.program)}
        used |= {name for name in self._host_maps() if self.programs.maps[name].kind == "shared_array"}
        used |= {maps.SAMPLED} if self.sampling else set()
        used |= {maps.SPENT} if self.budget is not None else set()
        result = [definition for name, definition in self.programs.maps.items() if name in used]
        return result + [d for name in sorted(used) if (d := maps.internal(name)) is not None]

    def _host_maps(self) -> set[str]:
        names = [probe.function for probe in self.host_programs] + [table.function for table in self.tables]
        names += [probe.function for probe in self.process_functions]
        if not names:
            return set()
        functions = [self.programs.program.functions[name] for name in names]
        return {i.map for function in functions for i in function.instructions if i.map is not None}

    def formats(self) -> dict[int, str]:
        """Return the texts that attached programs print, by number (see `maps.prints`)."""
        return {n: t for probe in self.probes for n, t in self.fragment(probe).formats.items()}

    def printing(self) -> dict[int, tuple[str, ...]]:
        """Return the attached programs that print each text of `formats`, by its number."""
        found: dict[int, tuple[str, ...]] = {}
        for probe in self.probes:
            for number in self.fragment(probe).formats:
                found[number] = tuple(dict.fromkeys((*found.get(number, ()), probe.program)))
        return found

    def params(self, options: Options | None = None) -> dict[str, bytes]:
        """Return the bytes of every parameter.

        A parameter that was not set takes its value from the command line: a `struct gpu_filter` from `--block` and `--thread`, a
        `struct gpu_host_filter` from `--cgroup`, `--comm` and `-t`. Other parameters are zero. Without `options`, filters select
        every thread.
        """
        result = {sampling.PARAMETER: self.sampling.parameter} if self.sampling else {}
        for name, definition in self.programs.maps.items():
            if definition.kind != "param":
                continue
            if name in self.values:
                result[name] = self.values[name]
            elif filters.is_filter(definition):
                chosen = options.threads if options else ThreadOptions()
                result[name] = filters.filter_bytes(chosen.block, chosen.thread)
            elif filters.is_host_filter(definition) and options:
                chosen = options.threads
                result[name] = filters.host_filter_bytes(chosen.cgroup, chosen.comm, chosen.tid)
            else:
                result[name] = bytes(definition.value_size)
        return result

    def check_patches(self) -> None:
        """Raise UsageError if a program cannot measure kernels without PTX."""
        from gpubpf.images.patches import refusal_of

        for probe in self.lowered_probes():
            if (reason := refusal_of([probe])) is not None:
                name = probe.program.function
                raise UsageError(f"--sass cannot measure {self.titles.get(name, name)}: {reason}")


class AttachedPipeline:
    """What `images.listing.show` needs of the programs that a tool has attached (`listing.Pipeline`)."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached

    def target(self, options: Options) -> Target:
        """Return the device that a measurement would use."""
        from gpubpf.session import tracing

        return tracing.target(options)

    def checked_code_object(self, data: bytes) -> Sidecar:
        """Return the sidecar of a code object for AMD GPUs with these programs in every kernel."""
        from gpubpf.images import code_objects

        probes = [replace(probe, kernels=()) for probe in self._attached.amd_probes()]
        if refusal := self._attached.amd_refusal():
            return code_objects.refused(data, probes, refusal)
        return code_objects.instrument(data, probes)

    def observe(self, options: Options) -> tuple[list[ImageFile], int]:
        """Run COMMAND to its end. Return the modules that it loaded, with what it launched, and its exit status."""
        from gpubpf.session import tracing

        return tracing.observe(options)

    def refusals(self, parsed: Module, kernels: Sequence[str]) -> Mapping[str, str]:
        """Return the kernels of a module that cannot be instrumented with these programs, each with the reason."""
        from gpubpf.inject import inject

        return inject.inject(parsed, self._attached.probes_of(kernels)).refusals

    def late_refusals(self, parsed: Module, kernels: Sequence[str]) -> Mapping[str, str]:
        """Return the same as `refusals` for a process that loaded the module before the agent."""
        from gpubpf.inject import inject

        return inject.inject(parsed, self._attached.probes_of(kernels)).late_refusals

    def instrumented_ptx(
        self, image: FatbinImage, kernels: Sequence[str], target: Target
    ) -> tuple[str, Mapping[str, str]]:
        """Return the PTX with these programs injected into `kernels`, and for each kernel without them the reason."""
        from gpubpf.images import copies
        from gpubpf.inject import inject
        from gpubpf.ptx import parser

        probes = self._attached.probes_of(kernels)
        parsed = copies.rounded(parser.parse(image.text), image.text, probes, target, image.options)
        with progress.work("instrumenting kernels", len(probes)) as task:
            injected = inject.inject(parsed, probes, each=task.step, counts_executions=True)
        return injected.text, injected.refusals
