"""Host programs and shared arrays: the part of a measurement that does not run on the GPU (docs/timing.md).

Host programs run in the Linux kernel if the tool may load them there. Otherwise, programs for launches run in the traced process, as
native code that its agent calls. An array that device and host programs share is memory of one traced process; each process has its
own.

    host = Host(program, (HostProbe("on_launch", "launch"),))
    process = host.process()                # for each traced process
    process.attach(stubs)                   # the stubs in that process
    process.array("slots")                  # the contents of the shared array
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.ebpf import maps
from gpubpf.ebpf.bytecode import (
    HOST_POINTS,
    HOST_STUB,
    OPERATION_STUB,
    POISON,
    BpfFunction,
    Program,
    encode,
)
from gpubpf.ebpf.helpers import REAL_TIME
from gpubpf.ebpf.maps import MapDefinition, dtype, pad8
from gpubpf.errors import Error, SessionError, UsageError, VerifyError, out_of_files
from gpubpf.kernel import bpf_syscall, privileges
from gpubpf.linux import matched_calls
from gpubpf.linux.kernel_events import KernelFunction, PerfEvent
from gpubpf.lower import context
from gpubpf.process import kernel_waits
from gpubpf.process.patience import SHORT_WAIT, lock_holder
from gpubpf.record import Record

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.linux.process_functions import FunctionPlace, FunctionProbe
    from gpubpf.linux.uprobes import Table, Uprobes
    from gpubpf.lower.native import Native

_MOST_LEFT = 256  # programs and events of ended processes whose removal is put off
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class HostProbe(Record):
    """A host program and its event: `launch`, `operation`, a tracepoint CATEGORY:NAME, a raw tracepoint NAME, or another event of the
    kernel."""

    function: str
    event: str | KernelFunction | PerfEvent

    @property
    def program_type(self) -> int:
        """The kernel's type of the program (enum bpf_prog_type)."""
        if not isinstance(self.event, str):
            return self.event.program_type
        if self.event in HOST_POINTS:
            return bpf_syscall.KPROBE
        return bpf_syscall.TRACEPOINT if ":" in self.event else bpf_syscall.RAW_TRACEPOINT


class RunCount(Record):
    """How often a host program ran in the kernel, and its average time, according to the kernel."""

    function: str
    runs: int
    mean_ns: float
    missed: int  # runs skipped because the CPU was inside another program


class Host:
    """The host side of one measurement. Raises VerifyError if a program is rejected, and Error if it cannot run here.

    functions: programs at library functions.
    own: programs at functions of each traced process alone.
    params: the values of parameters, in bytes.
    native: returns the native form of a launch program, or raises VerifyError; called if this process may not load programs into the
        kernel.
    virtual: the embedded device has a virtual clock, so programs that read the time cannot run in the kernel.
    companions: other hosts that are attached, detached and closed together with this one.
    statistics: the kernel counts runs.
    hold_notices: hold notices about libraries, see `Uprobes`.
    note: called with notices for the user.
    """

    def __init__(
        self,
        program: Program,
        attachments: Sequence[HostProbe],
        *,
        functions: Sequence[Table] = (),
        own: Sequence[FunctionProbe] = (),
        shared: Sequence[MapDefinition] = (),
        params: Mapping[str, bytes] | None = None,
        native: Callable[[str], Native] | None = None,
        virtual: bool = False,
        companions: Sequence[Host] = (),
        statistics: bool = True,
        hold_notices: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._program = program
        self._attachments = tuple(attachments)
        self._params = dict(params or {})
        self._note = note
        self._companions = tuple(companions)
        self._statistics = statistics
        self._hold_notices = hold_notices
        # Called when no program runs any longer, while the maps still exist.
        self.on_detached: Callable[[], None] = lambda: None
        self._tables = tuple(functions)
        self._own = tuple(own)
        self.uprobes: Uprobes | None = None  # the programs at library functions
        programs = [a.function for a in attachments] + [t.function for t in functions]
        programs += [o.function for o in own]
        used = {i.map for name in programs for i in program.functions[name].instructions if i.map}
        self._shared = {d.name: d for d in shared} | {
            name: program.maps[name] for name in used if program.maps[name].kind == "shared_array"
        }
        self._used = sorted(used - set(self._shared))
        self._files: dict[str, int] = {}  # file descriptors of maps shared by all processes
        self._rings: dict[str, bpf_syscall.BpfRingBuffer] = {}
        self._programs: list[tuple[str, int]] = []
        self._events: list[int] = []
        self._processes: list[HostProcess] = []
        self._ended_runs: list[RunCount] = []  # counts of detached programs
        self._left: list[int] = []  # programs and events of processes, which are to be closed
        self._closing: list[threading.Thread] = []  # threads that close detached programs
        self._lock = threading.Lock()
        self.natives: tuple[Native, ...] = ()
        self._loaded = False
        if programs:
            self._start(native, virtual)

    @property
    def shared(self) -> Mapping[str, MapDefinition]:
        """The shared arrays, by name."""
        return self._shared

    @property
    def in_kernel(self) -> bool:
        """Whether programs of this host or of a companion run in the kernel, so that they must be attached to processes."""
        return self._loaded or any(companion.in_kernel for companion in self._companions)

    @property
    def points(self) -> frozenset[str]:
        """The HOST_POINTS at which programs run in the kernel."""
        own = {str(a.event) for a in self._attachments if a.event in HOST_POINTS} if self._loaded else set()
        return frozenset(own).union(*(companion.points for companion in self._companions))

    def point_of(self, function: str) -> str:
        """Return the attach point of a program that runs in traced processes."""
        return self._program.functions[function].point

    # --- startup ---

    def _start(self, native: Callable[[str], Native] | None, virtual: bool) -> None:
        launches = [a.function for a in self._attachments if a.event in HOST_POINTS]
        tracepoints = [a for a in self._attachments if a.event not in HOST_POINTS]
        reason = ""
        asks_time = [name for name in launches if _calls(self._program.functions[name], REAL_TIME)]
        if not (virtual and asks_time):
            try:
                self._load(tracepoints)
                self._loaded = True
                return
            except OSError as error:
                reason = (
                    f"cannot load eBPF programs ({error.strerror})" if privileges.capable() else "no CAP_BPF"
                )
                self._release()
            except BaseException:
                self._release()
                raise
        if tracepoints or self._tables or self._own:
            what = [*(str(a.event) for a in tracepoints), *(t.what for t in self._tables)]
            names = ", ".join([*what, *(o.what for o in self._own)])
            raise Error(f"{reason}: host programs at {names} require CAP_BPF and CAP_PERFMON; run as root")
        if native is None:
            raise Error(f"{reason}: host program {launches[0]} requires it; run as root")
        self.natives = tuple(native(name) for name in launches)
        if reason:
            self._note(f"{reason}: the host program runs in the agent")

    def _load(self, tracepoints: Sequence[HostProbe]) -> None:
        if any(a.event in HOST_POINTS for a in self._attachments):
            bpf_syscall.uprobe_type()
        if self._statistics:
            with contextlib.suppress(OSError):  # without statistics, only the counts of runs are missing
                self._events.append(bpf_syscall.enable_statistics())
        for name in self._used:
            definition = self._program.maps[name]
            if definition.kernel_type == 4:
                raise UsageError(
                    f"map {name}: host programs cannot use BPF_PERF_OUTPUT; declare it with BPF_RINGBUF_OUTPUT"
                )
            self._files[name] = _create(definition)
            if definition.kind == "param":
                size = definition.value_size
                bpf_syscall.update(
                    self._files[name], bytes(4), self._params.get(name, b"").ljust(size, b"\0")[:size]
                )
        matched = any(probe.returns for probe in self._own)
        if self._tables:
            from gpubpf.linux import uprobes  # imported here, because few tools have such programs

            matched = matched or uprobes.need_matching(self._tables)
        if matched:
            self._files[matched_calls.MAP] = matched_calls.create_map()
        for name in [a.function for a in tracepoints] + [t.function for t in self._tables]:
            code = self._program.functions[name].instructions
            if any(self._program.maps[i.map].kind == "shared_array" for i in code if i.map):
                raise UsageError(
                    f"host program {name} runs for the whole machine, but a shared array belongs to one process;"
                    " use another map"
                )
        for attachment in tracepoints:
            function = self._program.functions[attachment.function]
            file = load(self._program, function, self._files, kind=attachment.program_type)
            self._programs.append((function.name, file))
            self._events += _attach(file, attachment.event)
        for (
            attachment
        ) in self._attachments:  # load now to report errors; they are loaded again for each process
            if attachment.event in HOST_POINTS:
                try_load(self._program, self._program.functions[attachment.function])
        for one in self._own:
            try_load(self._program, self._program.functions[one.function])
        if self._tables:
            self.uprobes = uprobes.Uprobes(
                self._program,
                self._tables,
                lambda function, attach: load(self._program, function, self._files, attach),
                self._note,
                hold=self._hold_notices,
            )

    # --- processes ---

    def process(self, user: int = 0) -> HostProcess:
        """Return the host side for another traced process. `user`: see `scans.user_of`."""
        made = HostProcess(self, user)
        with self._lock:
            self._processes.append(made)
        return made

    def _remove(self, process: HostProcess) -> None:
        with self._lock:
            if process in self._processes:
                self._processes.remove(process)
                self._ended_runs += process._runs()

    def runs(self) -> list[RunCount]:
        """Return every program's counts, summed over all processes. Empty if programs run in the agents, or without statistics."""
        if not self._statistics:
            return []
        with self._lock:
            found = list(self._ended_runs)
            for process in self._processes:
                found += process._runs()
        found += _count([*self._programs, *(self.uprobes.programs if self.uprobes is not None else ())])
        for companion in self._companions:
            found += companion.runs()
        total: dict[str, tuple[int, float, int]] = {}
        for r in found:
            runs, ns, missed = total.get(r.function, (0, 0.0, 0))
            total[r.function] = runs + r.runs, ns + r.mean_ns * r.runs, missed + r.missed
        return [
            RunCount(name, runs, ns / runs if runs else 0.0, missed)
            for name, (runs, ns, missed) in total.items()
        ]

    def missed(self) -> dict[str, int]:
        """Return how often the kernel skipped runs of this host's programs, by name. This also works without statistics."""
        with self._lock:
            found = list(self._ended_runs)
        found += _count([*self._programs, *(self.uprobes.programs if self.uprobes is not None else ())])
        total: dict[str, int] = {}
        for r in found:
            total[r.function] = total.get(r.function, 0) + r.missed
        return total

    # --- maps ---

    def items(self, name: str) -> np.ndarray[Any, Any]:
        """Return all elements of a map in the kernel, with fields `key` and `value`.

        Values of a per-CPU map have shape (CPUs,). Values that are arrays have their dimensions in addition."""
        import numpy as np

        definition = self._program.maps[name]
        kind, key, size, entries, _ = definition.kernel_attributes
        keys, values = bpf_syscall.read_all(self._files[name], kind, key, size, entries)
        step = bpf_syscall.value_bytes(kind, size)
        count = len(values) // step
        value = dtype(definition.value_type, size)
        shape: tuple[int, ...] = ()
        if step != size:
            shape = (bpf_syscall.possible_cpus(),)
            cells = np.frombuffer(values, np.uint8).reshape(count, *shape, pad8(size))
            values = cells[:, :, :size].tobytes()
        held = np.frombuffer(values, value.base).reshape(count, *shape, *value.shape)
        found = np.empty(count, [("key", dtype(definition.key_type, key)), ("value", value, shape)])
        found["key"] = np.frombuffer(keys, found.dtype["key"])
        found["value"] = held
        return found

    def records(self, name: str) -> np.ndarray[Any, Any]:
        """Return the new records of a ring buffer since the last call, with its `value_dtype`."""
        definition = self._program.maps[name]
        if name not in self._rings:
            self._rings[name] = bpf_syscall.BpfRingBuffer(self._files[name], definition.capacity)
        return self._rings[name].read(definition.value_dtype)

    def lookup(self, name: str, key: bytes) -> bytes | None:
        """Return an element's value; None without such an element. For a per-CPU map: all CPUs' values, each padded to 8 bytes."""
        definition = self._program.maps[name]
        kind, _, size, _, _ = definition.kernel_attributes
        return bpf_syscall.lookup(self._files[name], key, bpf_syscall.value_bytes(kind, size))

    def stack(self, name: str, number: int) -> tuple[int, ...]:
        """Return the addresses of a stack, innermost first. Empty if `get_stackid` failed, or if the stack has been replaced.

        number: the result of `get_stackid`."""
        if number < 0 or (value := self.lookup(name, number.to_bytes(4, "little"))) is None:
            return ()
        return tuple(at for (at,) in struct.iter_unpack("<Q", value) if at)

    def update(self, name: str, key: bytes, value: bytes) -> None:
        bpf_syscall.update(self._files[name], key, value)

    def delete(self, name: str, key: bytes) -> None:
        """Delete an element, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            bpf_syscall.delete(self._files[name], key)

    # --- shutdown ---

    def detach(self) -> None:
        """Detach all programs. The kernel takes 0.1 s for that; `wait_until_detached` and `close` wait for it. Maps keep their
        contents, and run counts keep their last values."""
        with self._lock:
            processes = list(self._processes)
        self._ended_runs += _count(self._programs)
        files = [*self._events, *(file for _, file in self._programs)]
        self._events.clear()
        self._programs.clear()
        if self.uprobes is not None:  # first, because these programs may rely on the data of other programs
            self._ended_runs += _count(self.uprobes.programs)
            self.uprobes.detach()
        probes = self._take_left([file for process in processes for file in process._stop()])
        bpf_syscall.disable(probes)
        if probes:
            closing = threading.Thread(target=kernel_waits.close, args=(probes, self._note))
            closing.start()
            self._closing.append(closing)
        self._closing += bpf_syscall.start_closing(files)
        for companion in self._companions:
            companion.detach()
        on_detached, self.on_detached = self.on_detached, lambda: None
        on_detached()

    def _take_left(self, files: list[int]) -> list[int]:
        """Return these file descriptors, and those of probes that could not be removed before."""
        with self._lock:
            left, self._left = self._left, []
        return left + files

    def _close_of_process(self, files: list[int]) -> None:
        """Detach the programs of a process, and wait until none runs any longer. If the kernel would have to wait for a process, keep
        the probes for a later call, unless they are too many. From any thread."""
        if not (files := self._take_left(files)):
            return
        bpf_syscall.disable(files)
        if len(files) < _MOST_LEFT and lock_holder(SHORT_WAIT):
            with self._lock:
                self._left += files
            return
        with kernel_waits.guarded(self._note):
            bpf_syscall.close_all(files)

    def wait_until_detached(self) -> None:
        """Wait until none of the detached programs runs any longer."""
        closing, self._closing = self._closing, []
        for thread in closing:
            thread.join()

    def close(self) -> None:
        self.detach()
        self.wait_until_detached()
        for companion in self._companions:
            companion.close()
        for process in list(self._processes):
            process.close()
        self._release()

    def _release(self) -> None:
        kernel_waits.close(self._take_left([]), self._note)
        for ring in self._rings.values():
            ring.close()
        left = self.uprobes.stop() if self.uprobes is not None else ()
        for file in (*left, *self._events, *(file for _, file in self._programs), *self._files.values()):
            os.close(file)
        self._rings.clear()
        self._events.clear()
        self._programs.clear()
        self._files.clear()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HostProcess:
    """The host side of one traced process: its own shared arrays, and the programs that write to them."""

    def __init__(self, host: Host, user: int) -> None:
        self._host, self._user = host, user
        self._companions = [companion.process(user) for companion in host._companions]
        self._programs: list[tuple[str, int]] = []
        self._events: list[int] = []
        self._ended: list[RunCount] = []
        self._stopped = False
        self._lock = threading.Lock()
        self._mapped: dict[str, mmap.mmap] = {}
        self.files: dict[str, int] = {}  # file descriptors of the shared arrays, for the agent to map
        try:
            for name, definition in host.shared.items():
                size = maps.storage_size(definition)
                self.files[name] = _create(definition) if host._loaded else _memory(definition, size)
                self._mapped[name] = mmap.mmap(self.files[name], size, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            self.close()
            raise

    def attach(self, stubs: int, offset: int = 0) -> None:
        """Attach the programs for launches and operations to their stubs, at `offset` in the file `stubs`, which the process sent.

        The caller keeps ownership of `stubs`. If programs run in the agent, this does nothing. Raises SessionError if the kernel
        refuses, or if the file does not contain the stub: the probe would then slow down and trace other programs.
        """
        for companion in self._companions:
            companion.attach(stubs, offset)
        host = self._host
        wanted = [(a.function, a.event == "operation") for a in host._attachments if a.event in HOST_POINTS]
        if not host._loaded or not wanted:
            return
        places = {operation: offset + OPERATION_STUB * operation for _, operation in wanted}
        if not all(_is_stub(stubs, place) for place in places.values()):
            raise SessionError("a traced process sent a file without the stub; its launches are not traced")
        _refuse_locks(self._user)
        files = {**host._files, **self.files}
        with self._lock:
            # Reversed, because the kernel first runs the program that was attached last. Loading needs no lock of a process, so it is
            # done before the block that watches for such locks.
            loaded: list[tuple[int, int]] = []  # file descriptors, and places in `stubs`
            try:
                for name, operation in reversed(wanted) if not self._stopped else ():
                    file = load(host._program, host._program.functions[name], files)
                    self._programs.append((name, file))
                    loaded.append((file, places[operation]))
                with kernel_waits.guarded(host._note):
                    for file, place in loaded:
                        self._events.append(bpf_syscall.attach_uprobe(file, f"/proc/self/fd/{stubs}", place))
            except OSError as error:
                if out_of_files(error):
                    raise
                raise SessionError(
                    f"the kernel refused a uprobe ({error.strerror}); launches of the process are not traced"
                ) from None

    def attach_functions(self, pid: int) -> None:
        """Attach the programs at functions of this process alone. Give a notice about a function that the process does not have."""
        for companion in self._companions:
            companion.attach_functions(pid)
        host = self._host
        if not host._loaded or not host._own:
            return
        _refuse_locks(self._user)
        files = {**host._files, **self.files}
        with self._lock:
            from gpubpf.linux import process_functions  # imported here, because few tools have such programs

            for number, probe in enumerate(host._own if not self._stopped else ()):
                with process_functions.found(pid, probe) as places:
                    if isinstance(places, str):
                        host._note(f"process {pid} {places}; program {probe.function} does not run there")
                    else:
                        self._attach_function(pid, number, probe, places, files)

    def _attach_function(
        self,
        pid: int,
        number: int,
        probe: FunctionProbe,
        places: Sequence[FunctionPlace],
        files: Mapping[str, int],
    ) -> None:
        program, function = self._host._program, self._host._program.functions[probe.function]
        parts = [(function, [(place.path, place.offset) for place in places])]
        if probe.returns:  # first, so that no entry is seen without its return
            at_returns = [(place.path, offset) for place in places for offset in place.returns]
            parts.insert(0, (matched_calls.at_return(function, number, 0), at_returns))
            parts[1] = matched_calls.at_entry(function, number, 0), parts[1][1]
        loaded = []
        for code, offsets in parts:
            file = load(program, code, files)
            self._programs.append((code.name, file))
            loaded.append((file, offsets))
        with kernel_waits.guarded(self._host._note):
            for file, offsets in loaded:
                self._events += (bpf_syscall.attach_uprobe(file, path, at, pid) for path, at in offsets)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return a copy of a shared array, with shape (entries,) and the map's `value_dtype`."""
        definition = self._host.shared[name]
        return maps.decode(definition, self._mapped[name][: maps.storage_size(definition)])

    def _runs(self) -> list[RunCount]:
        with self._lock:
            return self._ended + _count(self._programs)

    def detach(self) -> None:
        """Detach the programs, and wait until none runs any longer, which takes 0.1 s. The arrays stay."""
        self._host._close_of_process(self._stop())

    def _stop(self) -> list[int]:
        """Return the file descriptors of the programs and events. Closing them detaches the programs."""
        with self._lock:  # the process may end at the same time as the measurement
            self._stopped = True
            programs, self._programs = self._programs, []
            events, self._events = self._events, []
            self._ended += _count(programs)
        files = [*events, *(file for _, file in programs)]
        for companion in self._companions:
            files += companion._stop()
        return files

    def close(self) -> None:
        self.detach()
        for companion in self._companions:
            companion.close()
        with self._lock:  # the end of the process and the end of the measurement may both close it
            mapped, self._mapped = self._mapped, {}
            files, self.files = self.files, {}
        for area in mapped.values():
            area.close()
        for file in files.values():
            os.close(file)
        self._host._remove(self)


def _attach(program: int, event: str | KernelFunction | PerfEvent) -> list[int]:
    """Attach a program to an event of the kernel, as in HostProbe. Return file descriptors; closing them detaches the program.

    Raises Error if there is no such event."""
    if not isinstance(event, str):
        return event.attach(program)
    if ":" in event:
        return [bpf_syscall.attach_tracepoint(program, bpf_syscall.tracepoint(event).number)]
    try:
        return [bpf_syscall.attach_raw_tracepoint(program, event)]
    except FileNotFoundError:
        raise Error(f"this kernel has no tracepoint {event}; check its name") from None


def load(
    program: Program,
    function: BpfFunction,
    files: Mapping[str, int],
    attach: int = 0,
    kind: int = bpf_syscall.TRACEPOINT,
) -> int:
    """Load a host program into the kernel. Return its file descriptor.

    files: file descriptors of the maps, by name.
    attach: see `bpf_syscall.load_program`.
    kind: the type of a program whose context is not that of a launch or operation, and not a struct pt_regs.

    Raises VerifyError; PermissionError if this process may not load it.
    """
    if function.point in HOST_POINTS:
        registers = context.REGISTERS[function.point]
        function, kind = context.copied(function, registers), bpf_syscall.KPROBE
    elif function.point == "uprobe":
        kind = bpf_syscall.KPROBE
    try:
        return bpf_syscall.load_program(
            kind, encode(function.instructions, files), program.license, function.name, attach
        )
    except bpf_syscall.Rejected as error:
        if out_of_files(error):
            raise
        raise VerifyError(_rejection(program, function, error)) from None


def try_load(program: Program, function: BpfFunction, raw: bool | None = None) -> None:
    """Have the kernel verify a host program.

    raw: whether the program is for a raw tracepoint; None: try both kinds of tracepoint.

    Raises VerifyError; PermissionError if this process may not load programs.
    """
    kind = bpf_syscall.RAW_TRACEPOINT if raw else bpf_syscall.TRACEPOINT
    with contextlib.ExitStack() as stack:
        files: dict[str, int] = {}
        for name in {i.map for i in function.instructions if i.map is not None}:
            files[name] = _create(program.maps[name])
            stack.callback(os.close, files[name])
        try:
            os.close(load(program, function, files, kind=kind))
        except VerifyError:
            if raw is not None or function.point != "host":
                raise
            os.close(load(program, function, files, kind=bpf_syscall.RAW_TRACEPOINT))


def _create(definition: MapDefinition) -> int:
    kind, key, value, entries, flags = definition.kernel_attributes
    try:
        file = bpf_syscall.create_map(kind, key, value, entries, flags, definition.name)
        maps.fill(definition, file)
        return file
    except PermissionError:
        raise
    except OSError as error:
        if out_of_files(error):
            raise
        raise Error(
            f"the kernel cannot create map {definition.name} ({error.strerror}); make it smaller, or free some memory"
        ) from None


def _memory(definition: MapDefinition, size: int) -> int:
    """Create a memfd with a shared array. It is sealed against shrinking, which would kill the other process that maps it (SIGBUS)."""
    file = os.memfd_create(f"gpubpf-{definition.name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    for number, at in enumerate(range(0, len(definition.contents), definition.value_size)):
        os.pwrite(file, definition.contents[at : at + definition.value_size], number * definition.stride)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return file


def _refuse_locks(user: int) -> None:
    """Raise SessionError if a uprobe in a process of a user could stop the whole machine: if processes of this user have done that, or
    if a process holds the lock of its address space."""
    if kernel_waits.has_stopped_machine(user):
        raise SessionError("processes of its user stopped the machine, so host programs are not attached")
    if holder := kernel_waits.obstacle():
        raise SessionError(
            f"process {holder} keeps its address space locked, so host programs are not attached; end it"
        )


def _is_stub(stubs: int, offset: int) -> bool:
    """Return whether `stubs` has the stub at `offset` and is sealed against writing.

    Only a memfd can be sealed, so a sealed file is not one that other programs execute."""
    try:
        return (
            stat.S_ISREG(os.fstat(stubs).st_mode)
            and fcntl.fcntl(stubs, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            and os.pread(stubs, len(HOST_STUB), offset) == HOST_STUB
        )
    except OSError:
        return False


def _count(programs: Sequence[tuple[str, int]]) -> list[RunCount]:
    found = []
    for name, file in programs:
        with contextlib.suppress(OSError):
            s = bpf_syscall.statistics(file)
            found.append(RunCount(name, s.runs, s.total_ns / s.runs if s.runs else 0.0, s.missed))
    return found


def _calls(function: BpfFunction, helpers: Collection[int]) -> bool:
    return any(i.opcode == 0x85 and i.src == 0 and i.imm in helpers for i in function.instructions)


def _rejection(program: Program, function: BpfFunction, error: bpf_syscall.Rejected) -> str:
    """Return the verifier's last message, with the C line that it refers to."""
    message, at = error.reason()
    if str(POISON) in message:
        message = "it uses a member or type that this kernel does not have; test that with bpf_core_field_exists first"
        return f"host program {function.name}: {message}"
    where = f"host program {function.name}"
    if at is not None and at < len(function.instructions):
        line = function.instructions[at].line
        text = program.quote(line)
        where += f", C line {line}" + (f" `{text}`" if text else "")
    return f"{where}: the kernel's verifier says: {message}; correct the C text"
