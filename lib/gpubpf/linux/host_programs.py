"""Host programs and shared arrays: what a measurement has beside the GPU (docs/timing.md).

Host programs run in the Linux kernel where the tool may load them, else those for launches run in the traced process, as
native code that its agent calls. Arrays that programs on both sides share are memory of one traced process, each its own.

    host = Host(program, (HostProbe("on_launch", "launch"),))
    process = host.process()                # for each traced process
    process.attach(marker)                  # the stub in that process
    process.array("slots")                  # what the shared array holds
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import stat
import struct
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpubpf.ebpf import maps
from gpubpf.ebpf.bytecode import HOST_POINTS, Program, encode
from gpubpf.ebpf.bytecode import BpfFunction as Function
from gpubpf.ebpf.compile import capable
from gpubpf.ebpf.helpers import REAL_TIME
from gpubpf.ebpf.maps import MapDefinition, dtype, pad8
from gpubpf.errors import Error, SessionError, UsageError, VerifyError
from gpubpf.linux import bpf_syscall, uprobes
from gpubpf.lower import context

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.linux.uprobes import Table
    from gpubpf.lower.native import Native

OPERATION_STUB = 64  # where in the agent's file the stub for operations is; that for launches begins it
STUB = bytes.fromhex("0f1f440000c3")  # nop5; ret: a nop that the kernel can make a call of
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(frozen=True)
class HostProbe:
    """A host program and where it goes: `launch`, `operation`, or a tracepoint of the kernel, CATEGORY:NAME, or its NAME alone for one
    without a record."""

    function: str
    event: str


@dataclass(frozen=True)
class Runs:
    """How often a host program ran in the kernel, by the kernel's own count, and how long it took on average."""

    function: str
    runs: int
    mean_ns: float
    missed: int  # the CPU was inside another program


class Host:
    """The host side of one measurement. Raises VerifyError for a program that may not run, Error where it cannot.

    `functions`: programs at functions of libraries. `params`: the bytes of parameters. `native`: gives the native form of a launch
    program, or raises VerifyError; asked where this process may not load programs into the kernel. `virtual`: the embedded device's
    clock is virtual, so that programs which ask for the time cannot run in the kernel. `companions`: other hosts, which come, go
    and are attached with this one. `statistics`: the kernel counts runs. `note`: called with notices for the user.
    """

    def __init__(
        self,
        program: Program,
        attachments: Sequence[HostProbe],
        *,
        functions: Sequence[Table] = (),
        shared: Sequence[MapDefinition] = (),
        params: Mapping[str, bytes] | None = None,
        native: Callable[[str], Native] | None = None,
        virtual: bool = False,
        companions: Sequence[Host] = (),
        statistics: bool = True,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._program = program
        self._attachments = tuple(attachments)
        self._params = dict(params or {})
        self._note = note
        self._companions = tuple(companions)
        self._statistics = statistics
        self.ending: Callable[[], None] = lambda: (
            None
        )  # called when nothing runs any more and maps are still there
        self._tables = tuple(functions)
        self.uprobes: uprobes.Uprobes | None = None  # where the programs at functions of libraries are
        programs = [a.function for a in attachments] + [t.function for t in functions]
        used = {i.map for name in programs for i in program.functions[name].instructions if i.map}
        self._shared = {d.name: d for d in shared} | {
            name: program.maps[name] for name in used if program.maps[name].kind == "shared_array"
        }
        self._used = sorted(used - set(self._shared))
        self._files: dict[str, int] = {}  # of the maps that all processes have together
        self._rings: dict[str, bpf_syscall.Ring] = {}
        self._programs: list[tuple[str, int]] = []
        self._events: list[int] = []
        self._processes: list[HostProcess] = []
        self._past: list[Runs] = []
        self._closing: list[threading.Thread] = []  # of programs that run no more
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
        """Whether processes are to be attached to: programs of this host or a companion's run in the kernel."""
        return self._loaded or any(companion.in_kernel for companion in self._companions)

    @property
    def points(self) -> frozenset[str]:
        """At which of HOST_POINTS programs run in the kernel."""
        own = {a.event for a in self._attachments if a.event in HOST_POINTS} if self._loaded else set()
        return frozenset(own).union(*(companion.points for companion in self._companions))

    def point_of(self, function: str) -> str:
        """Where a program goes that runs in processes."""
        return self._program.functions[function].point

    # --- start ---

    def _start(self, native: Callable[[str], Native] | None, virtual: bool) -> None:
        launches = [a.function for a in self._attachments if a.event in HOST_POINTS]
        tracepoints = [a for a in self._attachments if a.event not in HOST_POINTS]
        said = ""
        asks_time = [name for name in launches if _calls(self._program.functions[name], REAL_TIME)]
        if not (virtual and asks_time):
            try:
                self._load(tracepoints)
                self._loaded = True
                return
            except OSError as error:
                said = (
                    f"the kernel runs no programs of ours ({error.strerror})" if capable() else "no CAP_BPF"
                )
                self._release()
            except BaseException:
                self._release()
                raise
        if tracepoints or self._tables:
            names = ", ".join([*(a.event for a in tracepoints), *(t.what for t in self._tables)])
            raise Error(f"{said}: host programs at {names} need CAP_BPF and CAP_PERFMON; run as root")
        if native is None:
            raise Error(f"{said}: host program {launches[0]} needs it; run as root")
        self.natives = tuple(native(name) for name in launches)
        if said:
            self._note(f"{said}: the host program runs in the agent")

    def _load(self, tracepoints: Sequence[HostProbe]) -> None:
        if any(a.event in HOST_POINTS for a in self._attachments):
            bpf_syscall.uprobe_type()
        if self._statistics:
            with contextlib.suppress(OSError):  # less is known then, and nothing else
                self._events.append(bpf_syscall.enable_statistics())
        for name in self._used:
            definition = self._program.maps[name]
            if definition.kernel_type == 4:
                raise UsageError(
                    f"map {name}: host programs have no BPF_PERF_OUTPUT here; declare it with BPF_RINGBUF_OUTPUT"
                )
            self._files[name] = _create(definition)
            if definition.kind == "param":
                size = definition.value_size
                bpf_syscall.update(
                    self._files[name], bytes(4), self._params.get(name, b"").ljust(size, b"\0")[:size]
                )
        for name in [a.function for a in tracepoints] + [t.function for t in self._tables]:
            code = self._program.functions[name].instructions
            if any(self._program.maps[i.map].kind == "shared_array" for i in code if i.map):
                raise UsageError(
                    f"host program {name} runs for the whole machine, and a shared array is one process's;"
                    " use another map"
                )
        for attachment in tracepoints:
            function = self._program.functions[attachment.function]
            raw = ":" not in attachment.event
            file = load(self._program, function, self._files, raw=raw)
            self._programs.append((function.name, file))
            self._events.append(_attach(file, attachment.event))
        for attachment in self._attachments:  # what each process will get, so that the user hears of it now
            if attachment.event in HOST_POINTS:
                try_load(self._program, self._program.functions[attachment.function])
        if self._tables:
            self.uprobes = uprobes.Uprobes(
                self._program,
                self._tables,
                lambda function, attach: load(self._program, function, self._files, attach),
                self._note,
            )

    # --- processes ---

    def process(self) -> HostProcess:
        """The host side of one more traced process."""
        made = HostProcess(self)
        with self._lock:
            self._processes.append(made)
        return made

    def _gone(self, process: HostProcess) -> None:
        with self._lock:
            if process in self._processes:
                self._processes.remove(process)
                self._past += process._runs()

    def runs(self) -> list[Runs]:
        """Of every program, in all processes together. Empty where they run in the agents, or without statistics."""
        if not self._statistics:
            return []
        with self._lock:
            found = list(self._past)
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
            Runs(name, runs, ns / runs if runs else 0.0, missed) for name, (runs, ns, missed) in total.items()
        ]

    def missed(self) -> dict[str, int]:
        """How often programs of this host did not run where they should have, by name, with or without statistics."""
        with self._lock:
            found = list(self._past)
        found += _count([*self._programs, *(self.uprobes.programs if self.uprobes is not None else ())])
        total: dict[str, int] = {}
        for r in found:
            total[r.function] = total.get(r.function, 0) + r.missed
        return total

    # --- maps ---

    def items(self, name: str) -> np.ndarray[Any, Any]:
        """All elements of a map in the kernel: fields `key` and `value`, a per-CPU map's values of shape (CPUs,)."""
        import numpy as np

        definition = self._program.maps[name]
        kind, key, size, entries, _ = definition.kernel_attributes
        keys, values = bpf_syscall.read_all(self._files[name], kind, key, size, entries)
        step = bpf_syscall.value_bytes(kind, size)
        count = len(values) // step
        value = dtype(definition.value_type, size)
        if step != size:
            cells = np.frombuffer(values, np.uint8).reshape(count, bpf_syscall.possible_cpus(), pad8(size))
            held = np.frombuffer(cells[:, :, :size].tobytes(), value).reshape(count, -1)
        else:
            held = np.frombuffer(values, value)
        shape = held.shape[1:]
        found = np.empty(count, [("key", dtype(definition.key_type, key)), ("value", value, shape)])
        found["key"] = np.frombuffer(keys, found.dtype["key"])
        found["value"] = held
        return found

    def records(self, name: str) -> np.ndarray[Any, Any]:
        """The records that came into a ring buffer since the last time, of its `value_dtype`."""
        definition = self._program.maps[name]
        if name not in self._rings:
            self._rings[name] = bpf_syscall.Ring(self._files[name], definition.capacity)
        return self._rings[name].read(definition.value_dtype)

    def lookup(self, name: str, key: bytes) -> bytes | None:
        """One element's value, of a per-CPU map the values of all CPUs, each padded to 8; None where there is none."""
        definition = self._program.maps[name]
        kind, _, size, _, _ = definition.kernel_attributes
        return bpf_syscall.lookup(self._files[name], key, bpf_syscall.value_bytes(kind, size))

    def stack(self, name: str, number: int) -> tuple[int, ...]:
        """The addresses of a stack that `get_stackid` numbered, the innermost first; none where it failed, or is gone."""
        if number < 0 or (value := self.lookup(name, number.to_bytes(4, "little"))) is None:
            return ()
        return tuple(at for (at,) in struct.iter_unpack("<Q", value) if at)

    def update(self, name: str, key: bytes, value: bytes) -> None:
        bpf_syscall.update(self._files[name], key, value)

    def delete(self, name: str, key: bytes) -> None:
        """One that is not there is none."""
        with contextlib.suppress(FileNotFoundError):
            bpf_syscall.delete(self._files[name], key)

    # --- end ---

    def detach(self) -> None:
        """Has programs run no more, which takes the kernel 0.1 s; `settle` and `close` wait for it. Maps keep what they hold. Counts
        of runs are those of the end."""
        with self._lock:
            processes = list(self._processes)
        self._past += _count(self._programs)
        files = [*self._events, *(file for _, file in self._programs)]
        self._events.clear()
        self._programs.clear()
        if self.uprobes is not None:  # first: what their programs count may need what others see
            self._past += _count(self.uprobes.programs)
            bpf_syscall.close_all(self.uprobes.take())
        for process in processes:
            files += process._take()
        self._closing += bpf_syscall.begin_to_close(files)
        for companion in self._companions:
            companion.detach()
        ending, self.ending = self.ending, lambda: None
        ending()

    def settle(self) -> None:
        """Waits until no program runs that was detached."""
        closing, self._closing = self._closing, []
        for thread in closing:
            thread.join()

    def close(self) -> None:
        self.detach()
        self.settle()
        for companion in self._companions:
            companion.close()
        for process in list(self._processes):
            process.close()
        self._release()

    def _release(self) -> None:
        for ring in self._rings.values():
            ring.close()
        left = self.uprobes.take() if self.uprobes is not None else ()
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
    """What one traced process has: shared arrays of its own, and programs that write to them."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._companions = [companion.process() for companion in host._companions]
        self._programs: list[tuple[str, int]] = []
        self._events: list[int] = []
        self._ended: list[Runs] = []
        self._over = False
        self._lock = threading.Lock()
        self._mapped: dict[str, mmap.mmap] = {}
        self.files: dict[str, int] = {}  # of the shared arrays: for the agent to map
        try:
            for name, definition in host.shared.items():
                size = maps.storage_size(definition)
                self.files[name] = _create(definition) if host._loaded else _memory(name, size)
                self._mapped[name] = mmap.mmap(self.files[name], size, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            self.close()
            raise

    def attach(self, marker: int, offset: int = 0) -> None:
        """Puts the programs for launches and operations on their stubs, from `offset` in the file `marker`, which the process sent;
        it stays the caller's.
        Raises SessionError where that fails, also for a file that is no such stub: others would be slowed down, and watched.
        Nothing where programs run in the agent."""
        for companion in self._companions:
            companion.attach(marker, offset)
        host = self._host
        wanted = [(a.function, a.event == "operation") for a in host._attachments if a.event in HOST_POINTS]
        if not host._loaded or not wanted:
            return
        places = {operation: offset + OPERATION_STUB * operation for _, operation in wanted}
        if not all(_is_stub(marker, place) for place in places.values()):
            raise SessionError("a traced process sent a file that is no stub; its launches are not followed")
        files = {**host._files, **self.files}
        with self._lock:
            for name, operation in (
                reversed(wanted) if not self._over else ()
            ):  # the kernel runs the last one first
                try:
                    file = load(host._program, host._program.functions[name], files)
                    self._programs.append((name, file))
                    self._events.append(
                        bpf_syscall.attach_uprobe(file, f"/proc/self/fd/{marker}", places[operation])
                    )
                except OSError as error:
                    raise SessionError(
                        f"the kernel takes no uprobe ({error.strerror}); its launches are not followed"
                    ) from None

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A copy of a shared array, shape (entries,), of the map's `value_dtype`."""
        definition = self._host.shared[name]
        return maps.decode(definition, self._mapped[name][: maps.storage_size(definition)])

    def _runs(self) -> list[Runs]:
        with self._lock:
            return self._ended + _count(self._programs)

    def detach(self) -> None:
        """The programs run no more; the arrays stay. Takes a while (0.1 s): the kernel waits until none is running."""
        bpf_syscall.close_all(self._take())

    def _take(self) -> list[int]:
        """The files that keep the programs running, to be closed."""
        with self._lock:  # the process may end while the measurement does
            self._over = True
            programs, self._programs = self._programs, []
            events, self._events = self._events, []
            self._ended += _count(programs)
        files = [*events, *(file for _, file in programs)]
        for companion in self._companions:
            files += companion._take()
        return files

    def close(self) -> None:
        self.detach()
        for companion in self._companions:
            companion.close()
        with self._lock:  # whoever notices the process's end, and the measurement's, may both close it
            mapped, self._mapped = self._mapped, {}
            files, self.files = self.files, {}
        for area in mapped.values():
            area.close()
        for file in files.values():
            os.close(file)
        self._host._gone(self)


def _attach(program: int, event: str) -> int:
    """To a tracepoint, as HostProbe says. Raises Error where there is none."""
    if ":" in event:
        return bpf_syscall.attach_tracepoint(program, bpf_syscall.tracepoint(event).number)
    try:
        return bpf_syscall.attach_raw_tracepoint(program, event)
    except FileNotFoundError:
        raise Error(f"this kernel has no tracepoint {event}; check its name") from None


def load(
    program: Program, function: Function, files: Mapping[str, int], attach: int = 0, raw: bool = False
) -> int:
    """Loads a host program into the kernel, with its maps' file descriptors. `attach`: see `bpf_syscall.load_program`. `raw`: for a
    tracepoint without a record. Raises VerifyError; PermissionError where this process may not load it."""
    kind = bpf_syscall.RAW_TRACEPOINT if raw else bpf_syscall.TRACEPOINT
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
        raise VerifyError(_rejection(program, function, error)) from None


def try_load(program: Program, function: Function, raw: bool | None = None) -> None:
    """Has the kernel judge a host program. `raw`: as for `load`; None: one for a tracepoint may be of either kind.
    Raises VerifyError; PermissionError where this process may not ask."""
    with contextlib.ExitStack() as stack:
        files: dict[str, int] = {}
        for name in {i.map for i in function.instructions if i.map is not None}:
            files[name] = _create(program.maps[name])
            stack.callback(os.close, files[name])
        try:
            os.close(load(program, function, files, raw=bool(raw)))
        except VerifyError:
            if raw is not None or function.point != "host":
                raise
            os.close(load(program, function, files, raw=True))


def _create(definition: MapDefinition) -> int:
    kind, key, value, entries, flags = definition.kernel_attributes
    try:
        return bpf_syscall.create_map(kind, key, value, entries, flags, definition.name)
    except PermissionError:
        raise
    except OSError as error:
        raise Error(
            f"the kernel makes no map {definition.name} ({error.strerror}); make it smaller"
        ) from None


def _memory(name: str, size: int) -> int:
    """A file that two processes can map and neither can shrink, which would kill the other."""
    file = os.memfd_create(f"gpubpf-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return file


def _is_stub(marker: int, offset: int) -> bool:
    """Whether it is the stub, in a file that the process made for it: only anonymous memory can be sealed against writing, so
    it is no file that other programs run."""
    try:
        return (
            stat.S_ISREG(os.fstat(marker).st_mode)
            and fcntl.fcntl(marker, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            and os.pread(marker, len(STUB), offset) == STUB
        )
    except OSError:
        return False


def _count(programs: Sequence[tuple[str, int]]) -> list[Runs]:
    found = []
    for name, file in programs:
        with contextlib.suppress(OSError):
            s = bpf_syscall.statistics(file)
            found.append(Runs(name, s.runs, s.total_ns / s.runs if s.runs else 0.0, s.missed))
    return found


def _calls(function: Function, helpers: Collection[int]) -> bool:
    return any(i.opcode == 0x85 and i.src == 0 and i.imm in helpers for i in function.instructions)


def _rejection(program: Program, function: Function, error: bpf_syscall.Rejected) -> str:
    """The verifier's last words, with the place that they are about."""
    lines = [s for line in error.log.splitlines() if (s := line.strip()) and not s.startswith("processed ")]
    said = next(
        (line for line in reversed(lines) if not re.match(r"\d+: |;|from |\d+$|func#|R\d", line)),
        error.strerror or "no reason given",
    )
    at = next((int(m[1]) for line in reversed(lines) if (m := re.match(r"(\d+): \(", line))), None)
    where = f"host program {function.name}"
    if at is not None and at < len(function.instructions):
        line = function.instructions[at].line
        text = program.quote(line)
        where += f", C line {line}" + (f" `{text}`" if text else "")
    return f"{where}: the kernel's verifier says: {said}; correct the C text"
