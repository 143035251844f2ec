"""`BPF`, the object that tools use: it holds a C text, attaches its programs, reads its maps, and measures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.attached import NULL_PROBE_VARIABLE, Attached, AttachedPipeline, null_probes
from gpubpf.ebpf import maps, sampling
from gpubpf.ebpf.bytecode import (
    KINDS,
    SPACES,
    UNADDRESSED_SPACES,
    VALUE_KINDS,
    WORK,
)
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.ebpf.probe import LOOPS, Probe
from gpubpf.errors import UsageError
from gpubpf.kernel import privileges
from gpubpf.lower import programs
from gpubpf.show import notices

if TYPE_CHECKING:
    from gpubpf.ebpf.sampling import Sampling
    from gpubpf.linux.host_programs import Host
    from gpubpf.lower.programs import LoweredPrograms
    from gpubpf.records.results import Instance
    from gpubpf.session.session import Session
    from gpubpf.show.output import Output
    from gpubpf.show.parsed import KernelOptions, Options, SamplingOptions
    from gpubpf.traced.measurement import Follow


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
        self._owner.attached.values[definition.name] = value

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
        found = source if source is not None else programs.load(text, any_user)
        self.attached = Attached(found, text, any_user)
        self.session: Session | None = None  # the last measurement
        self.host_side: Host | None = None  # the host side of the last measurement

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

    def __getitem__(self, name: str) -> Map:
        maps = self.attached.programs.maps
        if name not in maps:
            raise UsageError(f"the program has no map {name}; use one of: {', '.join(maps) or 'none'}")
        return Map(self, maps[name])

    def sample(self, options: SamplingOptions) -> Sampling | None:
        """Let device programs run only in the blocks or warps that --sample-blocks or --sample-warps choose, and return the choice.

        Return None without either option.
        """
        self.attached.sampling = sampling.of_options(options)
        return self.attached.sampling

    def limit(self, options: KernelOptions) -> None:
        """If the command line has --budget, measure only as many launches of each kernel as keep the overhead below it."""
        self.attached.budget = options.budget

    def attach_gpu_entry(
        self, kernel: str | Iterable[str] = (), fn_name: str = "", may_hang: bool = False
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_entry`, in each thread of matching kernels when it starts.

        may_hang: only in kernels that may not end by themselves: those with a loop, a barrier or a call.
        """
        self.attached.add(Probe(fn_name, "entry", kernels=_patterns(kernel), loops="all" if may_hang else ""))

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
        self.attached.add(Probe(fn_name, "exit", accumulate, kernels=_patterns(kernel), loops=loops))

    def attach_gpu_function_entry(
        self, kernel: str | Iterable[str] = (), fn_name: str = "", function: str | Iterable[str] = ()
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_function_entry`, in each thread that calls a matching device function.

        function: one or more globs for demangled names; empty: every function that the compiler did not inline.
        """
        self.attached.add(
            Probe(fn_name, "function_entry", kernels=_patterns(kernel), functions=_patterns(function))
        )

    def attach_gpu_function_exit(
        self, kernel: str | Iterable[str] = (), fn_name: str = "", function: str | Iterable[str] = ()
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_function_exit`, in each thread that returns from a device function."""
        self.attached.add(
            Probe(fn_name, "function_exit", kernels=_patterns(kernel), functions=_patterns(function))
        )

    def attach_gpu_block_begin(self, kernel: str | Iterable[str] = (), fn_name: str = "") -> None:
        """Run `fn_name`, whose context is `struct gpu_block_begin`, once per thread block: in the first thread that enters the
        kernel."""
        self.attached.add(Probe(fn_name, "block_begin", kernels=_patterns(kernel)))

    def attach_gpu_block_end(self, kernel: str | Iterable[str] = (), fn_name: str = "") -> None:
        """Run `fn_name`, whose context is `struct gpu_block_end`, once per thread block: in the last thread that leaves the
        kernel."""
        self.attached.add(Probe(fn_name, "block_end", kernels=_patterns(kernel)))

    def attach_gpu_barrier_arrive(self, kernel: str | Iterable[str] = (), fn_name: str = "") -> None:
        """Run `fn_name`, whose context is `struct gpu_barrier_arrive`, in each thread before it arrives at a barrier."""
        self.attached.add(Probe(fn_name, "barrier_arrive", kernels=_patterns(kernel)))

    def attach_gpu_barrier_leave(self, kernel: str | Iterable[str] = (), fn_name: str = "") -> None:
        """Run `fn_name`, whose context is `struct gpu_barrier_leave`, in each thread after it has waited at a barrier."""
        self.attached.add(Probe(fn_name, "barrier_leave", kernels=_patterns(kernel)))

    def attach_gpu_access(
        self,
        kernel: str | Iterable[str] = (),
        fn_name: str = "",
        kinds: str | Iterable[str] = KINDS,
        spaces: str | Iterable[str] = SPACES,
        alike: int = 0,
        repeats: bool = False,
        keeps: bool = False,
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_access`, in each thread before a memory access.

        kinds: the kinds of access to probe, from KINDS.
        spaces: the spaces to probe, from SPACES and UNADDRESSED_SPACES. Accesses to textures, surfaces, tensors and tensor
            memory ("tmem") have no address. For textures and surfaces, the width is that of the elements in registers that the
            kernel uses. For bulk tensor copies and tcgen05.mma, the width is 0. For wgmma, the width is that of one of 128 parts of
            the matrices in shared memory.
        alike: a power of two, or 0. If it is not 0, the program must do the same when all addresses move by a multiple of this many
            bytes, or, if the addresses are equal modulo this number, by any constant. Then the program runs only once for loads or
            stores that are known to differ in this way. The sites of the other accesses name the probed site as `like`. If no
            program with `alike` depends on whether an access is a load or a store, it runs once for one of each.
        repeats: run the program only for those other accesses.
        keeps: in loops, run the program only for the first of many executions that are known to be alike, in place of the other
            programs without `repeats`. It keeps a number (gpu_keep) for the program of `attach_gpu_access_again`. NVIDIA GPUs only.
        """
        probe = Probe(
            fn_name,
            "access",
            kernels=_patterns(kernel),
            kinds=_selected(KINDS, kinds, "a kind of memory access"),
            spaces=_selected((*SPACES, *UNADDRESSED_SPACES), spaces, "a memory space"),
            alike=alike,
            repeats=repeats,
            keeps=keeps,
        )
        reads = {argument.field for argument in self.attached.fragment(probe).arguments}
        if "address" in reads and set(UNADDRESSED_SPACES) & set(probe.spaces):
            raise UsageError(
                f"{fn_name} reads ctx->address, which accesses to textures, surfaces, tensors and tensor memory lack"
            )
        self.attached.add(probe)

    def attach_gpu_access_again(
        self,
        kernel: str | Iterable[str] = (),
        fn_name: str = "",
        kinds: str | Iterable[str] = KINDS,
        spaces: str | Iterable[str] = SPACES,
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_access_again`, for many executions of an access at once.

        It gets the number that the program attached with `keeps` has kept, and how often the thread has executed the access since.

        kinds, spaces: as for the program that keeps the number.
        """
        self.attached.add(
            Probe(
                fn_name,
                "access_again",
                kernels=_patterns(kernel),
                kinds=_selected(KINDS, kinds, "a kind of memory access"),
                spaces=_selected(SPACES, spaces, "a memory space"),
            )
        )

    def attach_gpu_basic_block(
        self, kernel: str | Iterable[str] = (), fn_name: str = "", loops: str = ""
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_basic_block`, in each thread when it enters a basic block.

        loops: one of LOOPS: only at heads of these loops, once for each turn. `Site.ends` says what ends a loop.
        """
        if loops:
            _selected(LOOPS, loops, "a kind of loop")
        self.attached.add(Probe(fn_name, "basic_block", kernels=_patterns(kernel), loops=loops))

    def attach_gpu_branch(self, kernel: str | Iterable[str] = (), fn_name: str = "") -> None:
        """Run `fn_name`, whose context is `struct gpu_branch`, in each thread before a conditional branch: a `bra`, `ret` or
        `exit` with a predicate."""
        self.attached.add(Probe(fn_name, "branch", kernels=_patterns(kernel)))

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
        self.attached.add(
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
        self.attached.add(Probe(fn_name, "float", kernels=_patterns(kernel), opcodes=_patterns(opcodes)))

    def attach_gpu_instruction(
        self, kernel: str | Iterable[str] = (), fn_name: str = "", opcodes: str | Iterable[str] = ()
    ) -> None:
        """Run `fn_name`, whose context is `struct gpu_instruction`, in each thread after an instruction that computes something from
        registers.

        opcodes: as for `attach_gpu_float`; empty: every such instruction.
        """
        self.attached.add(
            Probe(fn_name, "instruction", kernels=_patterns(kernel), opcodes=_patterns(opcodes))
        )

    def attach_operation(self, fn_name: str) -> None:
        """Run `fn_name`, whose context is `struct gpu_operation`, on the host before each copy, memset, event or stream
        operation, synchronization and allocation. As for `attach_launch`, it runs in the Linux kernel or in the traced process."""
        self.attached.add_host(fn_name, "operation", "operation")

    def attach_launch(self, fn_name: str) -> None:
        """Run `fn_name`, whose context is `struct gpu_launch`, on the host before each launch of a matching kernel, in the thread
        that launches.

        It runs in the Linux kernel if the tool may load programs there, otherwise in the traced process.
        """
        self.attached.add_host(fn_name, "launch", "launch")

    def attach_tracepoint(self, tp: str, fn_name: str) -> None:
        """Run `fn_name` in the Linux kernel at the tracepoint `tp`, CATEGORY:NAME, for the whole machine.

        Its context is the tracepoint's record: see /sys/kernel/tracing/events/CATEGORY/NAME/format.
        """
        self.attached.add_host(fn_name, "host", tp)

    def attach_raw_tracepoint(self, tp: str, fn_name: str) -> None:
        """Run `fn_name` in the Linux kernel at the tracepoint NAME, with the tracepoint's arguments as its context.

        The context is a structure of u64, in the order of TP_PROTO in the kernel's include/trace/events. This takes less time than
        `attach_tracepoint`. It also runs while a process on the same CPU reads or writes maps, even if that process is preempted:
        at such times the kernel skips programs of `attach_tracepoint`.
        """
        self.attached.add_host(fn_name, "host", tp)

    def attach_kprobe(self, function: str, fn_name: str, offset: int = 0, ret: bool = False) -> None:
        """Run `fn_name`, whose context is `struct pt_regs`, when this function of the Linux kernel is entered, for the whole machine.

        offset: of another instruction in the function, in bytes. ret: run it when the function returns.
        """
        from gpubpf.linux.kernel_events import KernelFunction

        self.attached.add_host(fn_name, "uprobe", KernelFunction(function, offset, ret))

    def attach_perf_event(self, event: str, fn_name: str) -> None:
        """Run `fn_name`, whose context is `struct bpf_perf_event_data`, at a software event of the Linux kernel, on every CPU.

        event: EVENT:N runs the program every N events (page-faults:1), EVENT:Nhz runs it N times a second (cpu-clock:99hz). EVENT is
            one of `kernel_events.SOFTWARE`.

        Raises UsageError.
        """
        from gpubpf.linux.kernel_events import perf_event

        self.attached.add_host(fn_name, "host", perf_event(event))

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

        found = self.attached.programs.points.get(fn_name)
        if found != "uprobe":
            raise UsageError(f"{fn_name} cannot be attached to functions: {self.attached.belongs(fn_name)}")
        self.attached.tables.append(uprobes.table(fn_name, library, functions, ret, optional, mark))

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

        if self.attached.programs.points.get(fn_name) != "uprobe":
            raise UsageError(f"{fn_name} cannot be attached to functions: {self.attached.belongs(fn_name)}")
        self.attached.process_functions.append(FunctionProbe(fn_name, path, function, ret, offset))

    def host(
        self, options: Options | None, note: Callable[[str], None], virtual: bool = False
    ) -> Host | None:
        """Return the host side alone, for programs that are attached without a measurement: see `Attached.host`."""
        return self.attached.host(options, note, virtual)

    def show_kernels(self, options: Options, out: Output) -> int:
        """Print what --list or --ptx asks for, in place of a measurement. Return the exit status. Raises Error."""
        from gpubpf.images import listing

        return listing.show(AttachedPipeline(self.attached), options, out)

    def trace(self, options: Options, out: Output | None = None, follow: Follow | None = None) -> Session:
        """Return the measurement that the command line asks for, a context manager.

        options: the command line.
        out: gets the records about attached processes; None: they are not written.
        follow: what to collect besides maps, such as the operation log.
        """
        from gpubpf.session import tracing

        attached, command = self.attached, options.targets.command

        def host(note: Callable[[str], None], virtual: bool) -> Host | None:
            self.host_side = attached.host(options, note, virtual)
            return self.host_side

        if attached.is_empty:
            raise UsageError(
                "nothing is attached; call attach_gpu_entry, attach_launch or another attach method first"
            )
        if command and (attached.sampling or attached.budget is not None):
            from gpubpf.traced import amd_device

            if amd_device.is_for_hip(command[0]):
                what = "--sample-blocks and --sample-warps do" if attached.sampling else "--budget does"
                them = "them" if attached.sampling else "it"
                raise UsageError(f"{command[0]} is for AMD GPUs, where {what} not work yet; leave {them} out")
        if options.kernels.sass:
            attached.check_patches()
        if null_probes():
            notices.note(
                options.output.tool, f"{NULL_PROBE_VARIABLE} is set: probes are empty, so nothing is measured"
            )
        self.session = tracing.trace(
            options,
            attached.lowered_probes,
            attached.definitions(),
            attached.params(options),
            out,
            follow,
            host,
            attached.needs_accesses,
            attached.for_amd(),
        )
        return self.session


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
