"""`BPF`, the object that tools use: it holds a C text, attaches its programs, reads its maps, and measures."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gpubpf.ebpf import filters, maps, sampling
from gpubpf.ebpf.bytecode import (
    HOST_POINTS,
    KINDS,
    SPACES,
    UNADDRESSED_SPACES,
    VALUE_KINDS,
    WIDE,
    WORK,
    Program,
)
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.ebpf.probe import LOOPS, Probe
from gpubpf.errors import UsageError
from gpubpf.kernel import privileges
from gpubpf.lower import programs
from gpubpf.lower.fragment import Fragment
from gpubpf.record import replace
from gpubpf.show import notices, progress
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
    from gpubpf.records.results import Instance
    from gpubpf.session.session import Session
    from gpubpf.session.tracing import ForAmd
    from gpubpf.show.output import Output
    from gpubpf.show.parsed import KernelOptions, Options, SamplingOptions
    from gpubpf.traced.measurement import Follow

# Null probes: kernels are replaced by copies whose probes are empty. The slowdown of a program is then the cost of the copies alone,
# such as loads from global memory in place of constant memory. This is for benchmarks. It is not an option, since nothing is measured.
NULL_PROBE_VARIABLE = "GPUBPF_NULL_PROBE"
EMPTY = Fragment(function="empty", ptx="{\n}", arguments=())


def null_probes() -> bool:
    """Return whether the environment asks for null probes."""
    return bool(os.environ.get(NULL_PROBE_VARIABLE))


class Companion(Protocol):
    """A part of a tool with separate host programs, which are attached and detached with the measurement's."""

    def host(
        self, options: Options | None, note: Callable[[str], None], virtual: bool = False
    ) -> Host | None: ...


class Map:
    """A map of a program: its definition and contents, and the value of a parameter."""

    def __init__(self, owner: BPF, definition: MapDefinition) -> None:
        self._owner, self.definition = owner, definition

    def set(self, value: Any) -> None:
        """Set the value of a parameter (GPU_PARAM) for all later launches.

        value: the bytes of the structure, a mapping of its fields, or anything that NumPy can convert to the structure.

        Raises UsageError for other kinds of map.
        """
        definition = self.definition
        if definition.kind != "param":
            raise UsageError(
                f"map {definition.name} is not a parameter; declare it with GPU_PARAM to set it from the tool"
            )
        value = maps.encode(definition, value)
        if len(value) != definition.value_size:
            raise UsageError(
                f"parameter {definition.name} has {definition.value_size} bytes, not {len(value)}"
            )
        self._owner.values[definition.name] = value

    def instances(self) -> list[Instance]:
        """Return what the last reading found: an instance for each process; for thread, warp, block, kernel and site arrays,
        also for each kernel and launch shape.

        The `array` of an instance is the NumPy array that `maps.decode` describes. The list is empty before the first reading.
        """
        session = self._owner.session
        return session.instances(self.definition.name) if session is not None else []


class BPF:
    """A C text with device programs.

        b = BPF(text=PROGRAM)
        b.attach_gpu_exit(kernel=["vec*"], fn_name="on_exit", accumulate="instructions")
        with b.trace(options) as session:
            …

    any_user: let users without bcc and CAP_BPF compile programs, with clang. Then only gpubpf's own verifier judges the programs
        (`verified_by`). Prebuilt programs never need bcc or privileges.
    source: programs that do not come from a C text, in place of `text`.

    Raises CompileError. Attaching a device program raises VerifyError if the program must not run.
    """

    def __init__(self, text: str = "", any_user: bool = False, source: LoweredPrograms | None = None) -> None:
        self.text, self._any_user = text, any_user
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
        self.session: Session | None = None  # the last measurement
        self.host_side: Host | None = None  # the host side of the last measurement
        self._programs = source if source is not None else programs.load(text, any_user)
        self._for_amd: LoweredPrograms | None = None
        self._fragments: dict[str, Fragment] = {}

    @functools.cached_property  # tools give up privileges once their programs are attached
    def verified_by(self) -> tuple[str, ...]:
        """The owners of the verifiers that judge newly compiled device programs: gpubpf, and the kernel if this process may ask it."""
        return ("gpubpf", "kernel") if privileges.capable() else ("gpubpf",)

    def say_verdict(self, tool: str) -> None:
        """Print a notice if the kernel's verifier does not judge the programs. Call this before privileges are given up."""
        if "kernel" not in self.verified_by:
            text = (
                "the programs were checked by gpubpf's verifier alone; that of the Linux kernel requires root"
            )
            notices.note(tool, text)

    @property
    def program(self) -> Program:
        """The compiled text."""
        return self._programs.program

    @property
    def maps(self) -> Mapping[str, MapDefinition]:
        """The definitions of all maps of the text."""
        return self._programs.maps

    def __getitem__(self, name: str) -> Map:
        if name not in self.maps:
            raise UsageError(f"the program has no map {name}; use one of: {', '.join(self.maps) or 'none'}")
        return Map(self, self.maps[name])

    def sample(self, options: SamplingOptions) -> Sampling | None:
        """Let device programs run only in the blocks or warps that --sample-blocks or --sample-warps choose, and return the choice.

        Return None without either option.
        """
        self.sampling = sampling.of_options(options)
        return self.sampling

    def limit(self, options: KernelOptions) -> None:
        """If the command line has --budget, measure only as many launches of each kernel as keep the overhead below it."""
        self.budget = options.budget

    def attach_gpu_entry(
        self, kernel: str | Iterable[str] = (), fn_name: str = "", may_hang: bool = False
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_entry`, in each thread of matching kernels when it starts.

        may_hang: only in kernels that may not end by themselves: those with a loop, a barrier or a call.
        """
        self._attach(Probe(fn_name, "entry", kernels=_patterns(kernel), loops="all" if may_hang else ""))

    def attach_gpu_exit(
        self,
        kernel: str | Iterable[str] = (),
        fn_name: str = "",
        accumulate: str | None = None,
        may_hang: bool = False,
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_exit`, in each thread when it leaves the kernel.

        accumulate: what the context's `work` counts, one of WORK. Without it, `work` is 0.
        may_hang: as for `attach_gpu_entry`.
        """
        if accumulate is not None and accumulate not in WORK:
            raise UsageError(f"work cannot be {accumulate!r}; use one of: {', '.join(WORK)}")
        loops = "all" if may_hang else ""
        self._attach(Probe(fn_name, "exit", accumulate, kernels=_patterns(kernel), loops=loops))

    def attach_gpu_function_entry(
        self, kernel: str | Iterable[str] = (), fn_name: str = "", function: str | Iterable[str] = ()
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_function_entry`, in each thread that calls a matching device function.

        function: one or more globs for demangled names; empty: every function that the compiler did not inline.
        """
        self._attach(
            Probe(fn_name, "function_entry", kernels=_patterns(kernel), functions=_patterns(function))
        )

    def attach_gpu_function_exit(
        self, kernel: str | Iterable[str] = (), fn_name: str = "", function: str | Iterable[str] = ()
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_function_exit`, in each thread that returns from a device function."""
        self._attach(
            Probe(fn_name, "function_exit", kernels=_patterns(kernel), functions=_patterns(function))
        )

    def attach_gpu_block_begin(self, kernel: str | Iterable[str] = (), fn_name: str = "") -> None:
        """Run `fn_name`, whose context is `struct gpu_block_begin`, once per thread block: in the first thread that enters the
        kernel."""
        self._attach(Probe(fn_name, "block_begin", kernels=_patterns(kernel)))

    def attach_gpu_block_end(self, kernel: str | Iterable[str] = (), fn_name: str = "") -> None:
        """Run `fn_name`, whose context is `struct gpu_block_end`, once per thread block: in the last thread that leaves the
        kernel."""
        self._attach(Probe(fn_name, "block_end", kernels=_patterns(kernel)))

    def attach_gpu_barrier_arrive(self, kernel: str | Iterable[str] = (), fn_name: str = "") -> None:
        """Run `fn_name`, whose context is `struct gpu_barrier_arrive`, in each thread before it arrives at a barrier."""
        self._attach(Probe(fn_name, "barrier_arrive", kernels=_patterns(kernel)))

    def attach_gpu_barrier_leave(self, kernel: str | Iterable[str] = (), fn_name: str = "") -> None:
        """Run `fn_name`, whose context is `struct gpu_barrier_leave`, in each thread after it has waited at a barrier."""
        self._attach(Probe(fn_name, "barrier_leave", kernels=_patterns(kernel)))

    def attach_gpu_access(
        self,
        kernel: str | Iterable[str] = (),
        fn_name: str = "",
        kinds: str | Iterable[str] = KINDS,
        spaces: str | Iterable[str] = SPACES,
        alike: int = 0,
        repeats: bool = False,
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_access`, in each thread before a memory access.

        kinds: the kinds of access to probe, from KINDS.
        spaces: the spaces to probe, from SPACES and UNADDRESSED_SPACES. Accesses to textures, surfaces and tensors have no address.
            For textures and surfaces, the width is that of the elements in registers that the kernel uses. For a bulk tensor copy, the
            width is 0. For wgmma, the width is that of one of 128 parts of the matrices in shared memory.
        alike: a power of two, or 0. If it is not 0, the program must do the same when all addresses move by a multiple of this many
            bytes, or, if the addresses are equal modulo this number, by any constant. Then the program runs only once for loads or
            stores that are known to differ in this way. The sites of the other accesses name the probed site as `like`.
        repeats: run the program only for those other accesses.
        """
        probe = Probe(
            fn_name,
            "access",
            kernels=_patterns(kernel),
            kinds=_selected(KINDS, kinds, "a kind of memory access"),
            spaces=_selected((*SPACES, *UNADDRESSED_SPACES), spaces, "a memory space"),
            alike=alike,
            repeats=repeats,
        )
        reads = {argument.field for argument in self._fragment(probe).arguments}
        if "address" in reads and set(UNADDRESSED_SPACES) & set(probe.spaces):
            raise UsageError(
                f"{fn_name} reads ctx->address, which accesses to textures, surfaces and tensors lack"
            )
        self._attach(probe)

    def attach_gpu_basic_block(
        self, kernel: str | Iterable[str] = (), fn_name: str = "", loops: str = ""
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_basic_block`, in each thread when it enters a basic block.

        loops: one of LOOPS: only at heads of these loops, once for each turn. `Site.ends` says what ends a loop.
        """
        if loops:
            _selected(LOOPS, loops, "a kind of loop")
        self._attach(Probe(fn_name, "basic_block", kernels=_patterns(kernel), loops=loops))

    def attach_gpu_branch(self, kernel: str | Iterable[str] = (), fn_name: str = "") -> None:
        """Run `fn_name`, whose context is `struct gpu_branch`, in each thread before a conditional branch: a `bra`, `ret` or
        `exit` with a predicate."""
        self._attach(Probe(fn_name, "branch", kernels=_patterns(kernel)))

    def attach_gpu_value(
        self,
        kernel: str | Iterable[str] = (),
        fn_name: str = "",
        kinds: str | Iterable[str] = VALUE_KINDS,
        spaces: str | Iterable[str] = SPACES,
        loops: str = "",
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_value`, in each thread before a store, after a load, and after an atomic.

        kinds, spaces: the accesses to probe, from VALUE_KINDS and SPACES.
        loops: "waiting": only at loads and atomics in loops that go on as long as their values stay the same. AMD GPUs have only
            these.
        """
        if loops:
            _selected(LOOPS[1:2], loops, "a kind of loop with values")
        self._attach(
            Probe(
                fn_name,
                "value",
                kernels=_patterns(kernel),
                kinds=_selected(VALUE_KINDS, kinds, "a kind of memory access with a value"),
                spaces=_selected(SPACES, spaces, "a memory space"),
                loops=loops,
            )
        )

    def attach_gpu_float(
        self, kernel: str | Iterable[str] = (), fn_name: str = "", opcodes: str | Iterable[str] = ()
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_float`, in each thread after a floating-point instruction.

        opcodes: one or more globs for the PTX instruction, such as fma, *.f64 or mul.rn.f32; empty: every floating-point instruction.
        """
        self._attach(Probe(fn_name, "float", kernels=_patterns(kernel), opcodes=_patterns(opcodes)))

    def attach_gpu_instruction(
        self, kernel: str | Iterable[str] = (), fn_name: str = "", opcodes: str | Iterable[str] = ()
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_instruction`, in each thread after an instruction that computes something from
        registers.

        opcodes: as for `attach_gpu_float`; empty: every such instruction.
        """
        self._attach(Probe(fn_name, "instruction", kernels=_patterns(kernel), opcodes=_patterns(opcodes)))

    def attach_operation(self, fn_name: str) -> None:
        """Run `fn_name`, whose context is `struct gpu_operation`, on the host before each copy, memset, event or stream
        operation, synchronization and allocation. As for `attach_launch`, it runs in the Linux kernel or in the traced process."""
        self._attach_host(fn_name, "operation", "operation")

    def attach_launch(self, fn_name: str) -> None:
        """Run `fn_name`, whose context is `struct gpu_launch`, on the host before each launch of a matching kernel, in the thread
        that launches.

        It runs in the Linux kernel if the tool may load programs there, otherwise in the traced process.
        """
        self._attach_host(fn_name, "launch", "launch")

    def attach_tracepoint(self, tp: str, fn_name: str) -> None:
        """Run `fn_name` in the Linux kernel at the tracepoint `tp`, CATEGORY:NAME, for the whole machine.

        Its context is the tracepoint's record: see /sys/kernel/tracing/events/CATEGORY/NAME/format.
        """
        self._attach_host(fn_name, "host", tp)

    def attach_raw_tracepoint(self, tp: str, fn_name: str) -> None:
        """Run `fn_name` in the Linux kernel at the tracepoint NAME, with the tracepoint's arguments as its context.

        The context is a structure of u64, in the order of TP_PROTO in the kernel's include/trace/events. This takes less time than
        `attach_tracepoint`. It also runs while a process on the same CPU reads or writes maps, even if that process is preempted:
        at such times the kernel skips programs of `attach_tracepoint`.
        """
        self._attach_host(fn_name, "host", tp)

    def attach_kprobe(self, function: str, fn_name: str, offset: int = 0, ret: bool = False) -> None:
        """Run `fn_name`, whose context is `struct pt_regs`, when this function of the Linux kernel is entered, for the whole machine.

        offset: of another instruction in the function, in bytes. ret: run it when the function returns.
        """
        from gpubpf.linux.kernel_events import KernelFunction

        self._attach_host(fn_name, "uprobe", KernelFunction(function, offset, ret))

    def attach_perf_event(self, event: str, fn_name: str) -> None:
        """Run `fn_name`, whose context is `struct bpf_perf_event_data`, at a software event of the Linux kernel, on every CPU.

        event: EVENT:N runs the program every N events (page-faults:1), EVENT:Nhz runs it N times a second (cpu-clock:99hz). EVENT is
            one of `kernel_events.SOFTWARE`.

        Raises UsageError.
        """
        from gpubpf.linux.kernel_events import perf_event

        self._attach_host(fn_name, "host", perf_event(event))

    def attach_uprobe(
        self,
        library: str | Iterable[str],
        functions: Sequence[str] | Mapping[str, int],
        fn_name: str,
        ret: bool = False,
        optional: bool = False,
        mark: int = 0,
    ) -> None:
        """Run `fn_name`, whose context is `struct pt_regs`, in the Linux kernel when any process enters one of these functions of a
        library, or with `ret` returns from it.

        library: a file name without version or with a glob for the version (libcuda.so, libamdhip64.so.[567]), a path, or several.
        functions: names without symbol version. bpf_get_attach_cookie(ctx) returns the function's index in this list, or its
            number in this mapping.
        ret: attach the program to the return instructions, where the stack pointer has the same value as at the entry, unless another
            tool has hooked the function: then it is lower. Functions that end in a jump share return instructions. If another program
            is at the entries of the same functions, this program runs for each function that can return there. It must match entry and
            return by the stack pointer and the number. Without a program at the entries, this program runs only for calls whose entry
            was seen.
        optional: a library need not have all of the functions. There is no notice for functions that it lacks or has under two names.
        mark: added to the number at the entry of a function that can end in a jump to another exported function, and at return
            instructions that only one function has.
        """
        from gpubpf.linux import uprobes

        found = self._programs.points.get(fn_name)
        if found != "uprobe":
            raise UsageError(f"{fn_name} cannot be attached to functions: {self._belongs(fn_name)}")
        self.tables.append(uprobes.table(fn_name, library, functions, ret, optional, mark))

    def attach_process_function(
        self, path: str, function: str, fn_name: str, ret: bool = False, offset: int = 0
    ) -> None:
        """Run `fn_name`, whose context is `struct pt_regs`, in the Linux kernel when a traced process enters this function of a
        program or library, or with `ret` returns from it.

        path: see `library` of `attach_uprobe`.
        offset: offset of another instruction in the function, in bytes.

        The program runs from the process's first call of cuInit on. It may use shared arrays.
        """
        from gpubpf.linux.process_functions import FunctionProbe

        if self._programs.points.get(fn_name) != "uprobe":
            raise UsageError(f"{fn_name} cannot be attached to functions: {self._belongs(fn_name)}")
        self.process_functions.append(FunctionProbe(fn_name, path, function, ret, offset))

    def _attach_host(self, name: str, point: str, event: str | KernelFunction | PerfEvent) -> None:
        from gpubpf.linux.host_programs import HostProbe

        found = self._programs.points.get(name)
        if found != point:
            raise UsageError(f"{name} cannot be attached to {event}: {self._belongs(name)}")
        self.host_programs.append(HostProbe(name, event))

    def _attach(self, probe: Probe[str]) -> None:
        self._fragment(probe)  # raises VerifyError if the program must not run
        self.probes.append(probe)

    def _fragment(self, probe: Probe[str]) -> Fragment:
        name = probe.program
        if self._programs.points.get(name) != probe.point:
            raise UsageError(f"{name} cannot be attached to {probe.point}: {self._belongs(name)}")
        if name not in self._fragments:
            self._fragments[name] = self._programs.fragment(name)
        return self._fragments[name]

    def _belongs(self, name: str) -> str:
        """Return the name of the call that attaches a program, for an error message about another call."""
        points = self._programs.points
        if name not in points:
            return f"there is no program {name}; use one of: {', '.join(points) or 'none'}"
        point = points[name]
        if point == "host":
            return "it takes a context of the Linux kernel; attach it with attach_tracepoint or attach_perf_event"
        if point == "uprobe":
            return "it takes a struct pt_regs; attach it with attach_uprobe or attach_kprobe"
        call = f"attach_{point}" if point in HOST_POINTS else f"attach_gpu_{point}"
        return f"it takes a struct gpu_{point}; attach it with {call}"

    # For the measurement

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
            for name, definition in self.program.maps.items()
        }
        return Host(
            replace(self.program, maps=sized),
            self.host_programs,
            functions=self.tables,
            own=self.process_functions,
            shared=shared,
            params=self.params(options),
            native=self._programs.native,
            virtual=virtual,
            companions=companions,
            statistics=self.statistics,
            hold_notices=self.hold_notices,
            note=note,
        )

    def lowered_probes(self) -> list[PtxProbe]:
        """Return the probes with their lowered programs, for `images.instrument`; with null probes, with empty programs."""
        empty = null_probes()
        made = [
            replace(
                probe.with_program(EMPTY if empty else self._fragment(probe)),
                accumulate=None if empty else probe.accumulate,
                sampled=self.sampling.unit if self.sampling else "",
            )
            for probe in self.probes
        ]
        if self.budget is not None and self.probes:
            from gpubpf.inject import cost

            patterns = [probe.kernels for probe in self.probes]
            every = () if () in patterns else tuple(dict.fromkeys(itertools.chain(*patterns)))
            program, work = (cost.SAMPLED_COST, cost.SKIPPED) if self.sampling else (cost.COST, cost.ADDED)
            made.append(Probe(program, "exit", work, kernels=every))
        return made

    @property
    def _amd_programs(self) -> LoweredPrograms:
        """The programs for AMD GPUs. If the text depends on the largest number of lanes, these are its variant for 64 lanes."""
        if self._for_amd is None:
            wide = programs.is_by_lanes(self.text)
            self._for_amd = programs.load(WIDE + self.text, self._any_user) if wide else self._programs
        return self._for_amd

    def amd_probes(self) -> list[Probe[ForWaves]]:
        """Return the probes for kernels of AMD GPUs, for `images.code_objects`. With null probes there are none."""
        return [
            probe.with_program(
                functools.cache(functools.partial(self._amd_programs.wave_program, probe.program))
            )
            for probe in (() if null_probes() else self.probes)
            if not probe.repeats  # no accesses are known to be alike
        ]

    def runs_on_amd(self) -> bool:
        """Return whether the measurement also works for kernels of AMD GPUs: if device programs run in every block, and no program is
        at operations. Programs at points that kernels of AMD GPUs do not have are left out there."""
        return (
            not self.sampling
            and self.budget is None
            and all(program.event != "operation" for program in self.host_programs)
        )

    def for_amd(self) -> ForAmd:
        """Return what a measurement needs for kernels of AMD GPUs."""
        from gpubpf.gcn import lacking
        from gpubpf.session.tracing import ForAmd

        missing: dict[str, list[str]] = {}  # what kernels of AMD GPUs lack → the programs that need it
        for probe in self.probes:
            if lack := lacking(probe, self._fragment(probe).arguments):
                missing.setdefault(lack, []).append(
                    self.titles.get(probe.program, f"{probe.program} ({probe.point})")
                )
        if not isinstance(self._programs, programs.PrebuiltPrograms):
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
        used = {argument.map for probe in self.probes for argument in self._fragment(probe).arguments}
        used |= {name for probe in self.probes for name in self._programs.maps_of(probe.program)}
        used |= {name for name in self._host_maps() if self.maps[name].kind == "shared_array"}
        used |= {maps.SAMPLED} if self.sampling else set()
        used |= {maps.SPENT} if self.budget is not None else set()
        result = [definition for name, definition in self.maps.items() if name in used]
        return result + [d for name in sorted(used) if (d := maps.internal(name)) is not None]

    def _host_maps(self) -> set[str]:
        names = [probe.function for probe in self.host_programs] + [table.function for table in self.tables]
        names += [probe.function for probe in self.process_functions]
        if not names:
            return set()
        functions = [self.program.functions[name] for name in names]
        return {i.map for function in functions for i in function.instructions if i.map is not None}

    def formats(self) -> dict[int, str]:
        """Return the texts that attached programs print, by number (see `maps.prints`)."""
        return {n: t for probe in self.probes for n, t in self._fragment(probe).formats.items()}

    def printing(self) -> dict[int, tuple[str, ...]]:
        """Return the attached programs that print each text of `formats`, by its number."""
        found: dict[int, tuple[str, ...]] = {}
        for probe in self.probes:
            for number in self._fragment(probe).formats:
                found[number] = tuple(dict.fromkeys((*found.get(number, ()), probe.program)))
        return found

    def params(self, options: Options | None = None) -> dict[str, bytes]:
        """Return the bytes of every parameter.

        A parameter that was not set takes its value from the command line: a `struct gpu_filter` from `--block` and `--thread`, a
        `struct gpu_host_filter` from `--cgroup`, `--comm` and `-t`. Other parameters are zero. Without `options`, filters select
        every thread.
        """
        result = {sampling.PARAMETER: self.sampling.parameter} if self.sampling else {}
        for name, definition in self.maps.items():
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

    def trace(self, options: Options, out: Output | None = None, follow: Follow | None = None) -> Session:
        """Return the measurement that the command line asks for, a context manager.

        options: the command line.
        out: gets the records about attached processes; None: they are not written.
        follow: what to collect besides maps, such as the operation log.
        """
        from gpubpf.session import tracing

        command = options.targets.command

        def host(note: Callable[[str], None], virtual: bool) -> Host | None:
            self.host_side = self.host(options, note, virtual)
            return self.host_side

        if not (self.probes or self.host_programs or self.tables or self.process_functions):
            raise UsageError(
                "nothing is attached; call attach_gpu_entry, attach_launch or another attach method first"
            )
        if command and (self.sampling or self.budget is not None):
            from gpubpf.traced import amd_device

            if amd_device.is_for_hip(command[0]):
                what = "--sample-blocks and --sample-warps do" if self.sampling else "--budget does"
                them = "them" if self.sampling else "it"
                raise UsageError(f"{command[0]} is for AMD GPUs, where {what} not work yet; leave {them} out")
        if options.kernels.sass:
            self._check_patches()
        if null_probes():
            notices.note(
                options.output.tool, f"{NULL_PROBE_VARIABLE} is set: probes are empty, so nothing is measured"
            )
        self.session = tracing.trace(
            options,
            self.lowered_probes,
            self.definitions(),
            self.params(options),
            out,
            follow,
            host,
            any(
                probe.point in ("access", "branch", "barrier_leave", "value", "float", "instruction")
                for probe in self.probes
            ),
            self.for_amd() if self.runs_on_amd() else None,
        )
        return self.session

    def _check_patches(self) -> None:
        """Raise UsageError if a program cannot measure kernels without PTX."""
        from gpubpf.images.patches import refusal_of

        for probe in self.lowered_probes():
            if (reason := refusal_of([probe])) is not None:
                name = probe.program.function
                raise UsageError(f"--sass cannot measure {self.titles.get(name, name)}: {reason}")

    # For --list and --ptx (listing.Pipeline)

    def target(self, options: Options) -> Target:
        """Return the device that a measurement would use."""
        from gpubpf.session import tracing

        return tracing.target(options)

    def checked_code_object(self, data: bytes) -> Sidecar:
        """Return the sidecar of a code object for AMD GPUs with these programs in every kernel."""
        from gpubpf.images import code_objects

        probes = [replace(probe, kernels=()) for probe in self.amd_probes()]
        if self.runs_on_amd():
            return code_objects.instrument(data, probes)
        with_sampling = " with --sample-blocks or --sample-warps" if self.sampling else ""
        with_sampling += " with --budget" if self.budget is not None else ""
        return code_objects.refused(data, f"this tool does not measure AMD GPUs{with_sampling} yet")

    def observe(self, options: Options) -> tuple[list[ImageFile], int]:
        """Run COMMAND to its end. Return the modules that it loaded, with what it launched, and its exit status."""
        from gpubpf.session import tracing

        return tracing.observe(options)

    def refusals(self, parsed: Module, kernels: Sequence[str]) -> Mapping[str, str]:
        """Return the kernels of a module that cannot be instrumented with these programs, each with the reason."""
        from gpubpf.inject import inject

        return inject.inject(parsed, self.probes_of(kernels)).refusals

    def late_refusals(self, parsed: Module, kernels: Sequence[str]) -> Mapping[str, str]:
        """Return the same as `refusals` for a process that loaded the module before the agent."""
        from gpubpf.inject import inject

        return inject.inject(parsed, self.probes_of(kernels)).late_refusals

    def instrumented_ptx(
        self, image: FatbinImage, kernels: Sequence[str], target: Target
    ) -> tuple[str, Mapping[str, str]]:
        """Return the PTX with these programs injected into `kernels`, and for each kernel without them the reason."""
        from gpubpf.images import copies
        from gpubpf.inject import inject
        from gpubpf.ptx import parser

        probes = self.probes_of(kernels)
        parsed = copies.rounded(parser.parse(image.text), image.text, probes, target, image.options)
        with progress.work("instrumenting kernels", len(probes)) as task:
            injected = inject.inject(parsed, probes, each=task.step, counts_executions=True)
        return injected.text, injected.refusals

    def probes_of(self, kernels: Sequence[str]) -> dict[str, list[PtxProbe]]:
        """Return these programs for each of `kernels`, whichever kernels they were attached to."""
        return dict.fromkeys(kernels, self.lowered_probes())


def _selected(known: tuple[str, ...], chosen: str | Iterable[str], what: str) -> tuple[str, ...]:
    """Return the chosen words, in the order of `known`. Raises UsageError if none is chosen, or a word is not in `known`."""
    words = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    for word in words:
        if word not in known:
            raise UsageError(f"{what} cannot be {word!r}; use one of: {', '.join(known)}")
    if not words:
        raise UsageError(f"no {what.split(' ', 1)[1]} is chosen; name some of: {', '.join(known)}")
    return tuple(word for word in known if word in words)


def _patterns(kernel: str | Iterable[str] | None) -> tuple[str, ...]:
    if kernel is None:
        return ()
    return (kernel,) if isinstance(kernel, str) else tuple(kernel)
