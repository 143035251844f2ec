"""Run a command, serve the agents in its processes, collect what they measured.

    with Session(["./app"], instrument=…, maps=…) as session:
        for _ in session.intervals(None, None):
            for instance in session.instances("tallies"):
                …
    sys.exit(session.status)

Each process of the command that uses CUDA loads the agent inside its first `cuInit` (docs/architecture.md, "In the
target"). One thread here serves all agents; what takes long, making sidecars, is done by workers, so that one process's
ptxas does not hold up another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import mmap
import os
import queue
import resource
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from gpubpf import agent, maps, users
from gpubpf.agent import protocol
from gpubpf.device import Device
from gpubpf.errors import Error, SessionError
from gpubpf.process import PENDING_LIMIT, Process, Ring
from gpubpf.results import (
    Instance,
    KernelCount,
    ProcessLog,
    Reading,
    RingCounts,
    RingRecords,
    SharedArray,
    merged,
)

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.assemble import Target
    from gpubpf.host import Host
    from gpubpf.instrument import Sidecar
    from gpubpf.maps import MapDefinition
    from gpubpf.ptx.inject import ExitSite, LaunchBlock

IMAGE_WAIT = 120.0  # seconds that a process waits in a module load for the sidecar
REGISTERS_WAIT = 20.0  # seconds that results wait for ptxas to count registers
DRAIN_WAIT = 2.0  # seconds that kernels get to end before the last reading
LEAVING_WAIT = 0.4  # in the place of both when the tool is told to leave
TICK = 0.1  # seconds between two looks at logs and rings
HURRY = 0.01  # where they fill quickly
FULL = 0.2  # part of a log or ring's shard at which that is so
ANSWER_WAIT = 5.0  # seconds, beyond that, for an agent to answer
BEAT = 1.0  # seconds; an agent that waits and hears nothing for ten goes on without its answer
MAP_MEMORY = 256 << 20
REFUSED_LIMIT = 10  # notices of that kind
PARAM, SHARED = "param", "shared_array"
UNITS = {
    "thread": protocol.Unit.THREAD,
    "warp": protocol.Unit.WARP,
    "block": protocol.Unit.BLOCK,
    "instance": protocol.Unit.INSTANCE,
}
T = TypeVar("T")


# An image that a program loaded, and the device it was loaded on → its sidecar.
Instrument = Callable[[bytes, "Target"], "Sidecar"]
# How many registers the kernels of a sidecar need: (as built, with the probe) by mangled name.
CountRegisters = Callable[[Any, "Target"], Mapping[str, tuple[int, int]]]


@dataclass(frozen=True)
class Follow:
    """What a tool wants of the processes beside its maps (docs/timing.md).

    log_records: of the operation log of each process, a power of two; 0: no log. stamps: timing events around what no probe times;
    cupti: where CUPTI may be, whose activity records do it in their place. stacks: the host stack of each launch. graphs: kernels in graphs are instrumented. pump: launches of a process after which its
    maps are read, for `readings`; 0: never by itself. ring_size: bytes of each ring and GPU, None: what the C text asks for; rings
    lie in host memory, or else in the GPU's. per_thread: records that a thread puts into the ring named, at most.
    """

    log_records: int = 0
    stamps: bool = False
    cupti: Sequence[str] = ()
    stacks: bool = False
    graphs: bool = False
    pump: int = 0
    ring_size: int | None = None
    ring_in_gpu: bool = False
    per_thread: Mapping[str, int] = field(default_factory=dict)


class _Workers:
    """Threads that a leaving tool does not wait for: what they make then, nobody needs. (ThreadPoolExecutor waits.)"""

    def __init__(self, count: int) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._left = count  # threads that are not started yet

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        if self._left:
            self._left -= 1
            threading.Thread(target=self._serve, name="gpubpf-worker", daemon=True).start()
        self._work.put(run)
        return future

    def _serve(self) -> None:
        while True:
            self._work.get()()


class Session:
    """A command under measurement. A context manager: entering starts the command, leaving waits for it (but see SIGTERM).

    instrument: see `Instrument`. It is called from several threads, once for each image that a process loads.
    definitions: the maps, in any order; `params` gives the bytes of those of kind "param".
    matches: whether a mangled name was asked for (None: every kernel is); `wanted` is how the user put it, for messages.
    launches, sample: as `--launch` and `--sample`. duration: seconds, None without end.
    note: called with notices for the user, from any thread. complain: with the error that "no kernel matches" is.
    attached: with pid, comm and time (ns, CLOCK_MONOTONIC or virtual) when probes are live, from the thread that runs `intervals`.
    loaded: with the name of a process and each image that it loads. warm_up: called while the command starts.
    registers: see `CountRegisters`; called when nobody waits for it. follow: see `Follow`. host: host programs and shared arrays,
    already loaded; the session takes them down at its end.
    image_wait: seconds that a process waits in a module load for the sidecar.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        instrument: Instrument,
        definitions: Sequence[MapDefinition] = (),
        params: Mapping[str, bytes] | None = None,
        device: Device,
        matches: Callable[[str], bool] | None = None,
        wanted: Sequence[str] = (),
        launches: tuple[int, int | None] | None = None,
        sample: int | None = None,
        map_memory: int | None = None,
        duration: float | None = None,
        user: str | None = None,
        note: Callable[[str], None] = lambda text: None,
        attached: Callable[[int, str, int], None] = lambda pid, comm, ts_ns: None,
        complain: Callable[[str], None] = lambda text: None,
        loaded: Callable[[str, bytes], None] = lambda comm, data: None,
        registers: CountRegisters = lambda sidecar, target: {},
        warm_up: Callable[[], object] = lambda: None,
        follow: Follow = Follow(),
        host: Host | None = None,
        image_wait: float = IMAGE_WAIT,
    ) -> None:
        self.command = list(command)
        self.device = device
        self._instrument = instrument
        self._complain = complain
        self._loaded = loaded
        self._warm_up = warm_up
        self._maps = [d for d in definitions if d.kind != PARAM]
        self._numbers = {d.name: number for number, d in enumerate(self._maps)}
        self._params = dict(params or {})
        self._matches = matches or (lambda name: True)
        self.wanted = tuple(wanted)
        self._duration = duration
        self._user = users.command_user(user)
        self._note = note
        self._attached = attached
        self._count_registers = registers
        self._probed: list[tuple[int, str, int]] = []  # for `attached`, which the main thread calls
        self.follow = follow
        self._host = host
        self._wanted = protocol.Wanted(
            [self._spec(d) for d in self._maps],
            map_memory or MAP_MEMORY,
            launches=launches or (1, None),
            sample=sample or 1,
            image_wait=image_wait,
            log_records=follow.log_records,
            stamps=follow.stamps,
            stacks=follow.stacks,
            graphs=follow.graphs,
            match_all=not wanted,
            pump=follow.pump,
            host=self._native_programs(host),
        )
        self._tick: Callable[[], object] | None = None
        self._every = TICK
        self._ticked = 0.0  # when the next tick is due
        self._hurry = False
        self._said: set[str] = set()  # notices that are given once
        self._lock = threading.Condition()
        self._processes: list[Process] = []
        self._sequence = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = False  # the measurement is over
        self._terminated = False  # SIGTERM: leave at once
        self._interrupted = False
        self._started_ns = self._ended_ns = 0
        self._returncode: int | None = None
        self._handlers: dict[int, Any] = {}
        self._workers = _Workers(4)
        self._welcomers = _Workers(1)  # a process that starts does not wait for another one's ptxas,
        self._enders = _Workers(2)  # nor for the kernel to take another one's probes down
        self._closing = False
        self._refused = 0  # connections that sent what no agent sends

    def _spec(self, definition: MapDefinition) -> protocol.MapSpec:
        if definition.kind == SHARED:
            place = protocol.Place.SHARED
            size = maps.pad8(definition.value_size) * definition.max_entries
            return protocol.MapSpec(size, 0, b"", place=place)
        if _is_ring(definition):
            place = protocol.Place.GPU_RING if self.follow.ring_in_gpu else protocol.Place.HOST_RING
            stride = maps.RECORD_HEADER + maps.pad8(definition.value_size)
            return protocol.MapSpec(self._ring_size(definition), stride, b"", place=place)
        fixed = maps.storage_size(definition)
        per_unit = maps.storage_size(definition, 1) - fixed
        unit = (
            UNITS[maps.SHAPED[definition.kind]] if definition.kind in maps.SHAPED else protocol.Unit.CONTEXT
        )
        return protocol.MapSpec(fixed, per_unit, maps.header(definition), unit)

    def _ring_size(self, definition: MapDefinition) -> int:
        """Bytes of records that a ring is granted for each GPU."""
        if definition.name == maps.PRINTS:
            return definition.capacity
        return self.follow.ring_size or definition.capacity

    def _native_programs(self, host: Host | None) -> Sequence[protocol.HostCode] | None:
        """What runs in the processes; None: host programs run in the kernel."""
        if host is None or not host.natives:
            return None if host is not None and host.in_kernel else ()
        made = []
        for native in host.natives:
            parameters, arguments, places = bytearray(), [], dict[str, int]()
            for value in native.values:
                if value.kind == "param" and value.map not in places:
                    parameters += bytes(-len(parameters) % 16)
                    places[value.map] = len(parameters)
                    parameters += self._params[value.map]
                arguments.append(
                    {
                        "context": (0, 0, value.number),
                        "map_base": (1, self._numbers.get(value.map, 0), 0),
                        "param": (2, 0, places.get(value.map, 0)),
                        "helper": (3, 0, value.number),
                    }[value.kind]
                )
            made.append(protocol.HostCode(native.code, bytes(parameters), tuple(arguments)))
        return made

    # --- start and end ---

    def __enter__(self) -> Session:
        if "CUDA_INJECTION64_PATH" in os.environ:
            raise SessionError("CUDA_INJECTION64_PATH is set, so another tool traces this command; unset it")
        if not agent.LIBRARY.exists():
            raise SessionError(f"{agent.LIBRARY} is not built; run script/setup")
        self.socket_name = f"@gpubpf-{secrets.token_hex(12)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.socket_name[1:])
        self._listener.listen(128)
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)
        self._signal_reader, self._signal_writer = os.pipe()
        os.set_blocking(self._signal_writer, False)
        os.set_blocking(self._signal_reader, False)
        self._server = threading.Thread(target=self._serve, name="gpubpf-server", daemon=True)
        self._started_ns = time.monotonic_ns()
        try:
            self._catch_signals()
            self._spawn()
            self._server.start()
            self._workers.submit(self._warm_up)
        except BaseException:
            self._restore_signals()
            self._listener.close()
            raise
        return self

    def _spawn(self) -> None:
        environment = dict(os.environ)
        environment.update(self.device.environment)
        environment["CUDA_INJECTION64_PATH"] = str(agent.LIBRARY)
        environment["GPUBPF_SOCKET"] = self.socket_name
        environment.pop("GPUBPF_CUPTI", None)
        if self.follow.cupti:
            environment["GPUBPF_CUPTI"] = ":".join(self.follow.cupti)
        as_user: dict[str, Any] = {}
        if self._user:
            if not users.can_read(self._user, agent.LIBRARY.resolve()):
                raise SessionError(
                    f"{self._user.name} cannot read {agent.LIBRARY}; install gpubpf where every user can, or use --user root"
                )
            as_user = {"user": self._user.uid, "group": self._user.gid, "extra_groups": self._user.groups}
            environment.update(HOME=self._user.home, USER=self._user.name, LOGNAME=self._user.name)
            environment["SHELL"] = self._user.shell or "/bin/sh"
            for name in ("SUDO_USER", "SUDO_UID", "SUDO_GID", "SUDO_COMMAND"):
                environment.pop(name, None)
        try:
            # Files that the caller's shell opened for the command stay open; ours are not inheritable.
            self._child = subprocess.Popen(self.command, env=environment, close_fds=False, **as_user)
        except OSError as error:
            if isinstance(error, FileNotFoundError) or not self.command[0]:
                raise _NotStarted(
                    127, f"{self.command[0] or repr('')}: not found; check the name and PATH"
                ) from None
            text = f"{self.command[0]}: {error.strerror}; check that it is a program that may be run"
            raise _NotStarted(126, text) from None
        self._pidfd = os.pidfd_open(self._child.pid)
        # Each process takes files of ours. The command keeps the limit that it was started with.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def _catch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # as under nohup: stays as it is
                self._handlers[number] = before
                signal.signal(number, self._on_signal)

    def _restore_signals(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupted = True
        else:
            self._terminated = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._signal_writer, b"s")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            self._stop()
            while not self._terminated and not self._wait_for_command(None):
                pass
            self._settle()
        finally:
            self._close()
        if kind is None and not self._terminated:
            if self.nothing_matched:
                from gpubpf.listing import no_match

                self._complain(no_match(self.wanted, self._seen_names()))
            elif not self.wanted and not any(k.launches for k in self.kernels()):
                self._note("no kernel was launched")

    def _settle(self) -> None:
        """Waits until what processes sent before they ended has been read."""
        deadline = time.monotonic() + LEAVING_WAIT
        with self._lock:
            while any(not p.gone and not Path(f"/proc/{p.pid}").exists() for p in self._processes):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._lock.wait(left)

    def _close(self) -> None:
        self._closing = True
        self._wake()
        self._server.join(5)
        for process in self._processes:
            process.end_host()
        if self._host is not None:
            self._host.detach()
        self._restore_signals()
        for file in (
            self._wake_reader,
            self._wake_writer,
            self._signal_reader,
            self._signal_writer,
            self._pidfd,
        ):
            os.close(file)

    def _seen_names(self) -> list[str]:
        """Kernels for the user, without arguments: those that were used, else all that were there."""
        from gpubpf import names

        used = [kernel.mangled for kernel in self.kernels()]
        there = used or sorted({name for process in self._processes for name in process.entries})
        return [name.short for name in names.demangle_all(there)]

    @property
    def status(self) -> int:
        """The exit status that the tool ends with."""
        if self._terminated or self._returncode is None:
            return 0
        command = self._returncode if self._returncode >= 0 else 128 - self._returncode
        return command or (1 if self.nothing_matched else 0)

    @property
    def stopped(self) -> bool:
        """The measurement is over: what comes now is the last."""
        return self._stopped

    @property
    def nothing_matched(self) -> bool:
        """Kernels were asked for by name, and none of those that were seen is meant."""
        return bool(self.wanted) and not any(k.matched for k in self.kernels())

    # --- time ---

    def intervals(
        self,
        interval: float | None = None,
        count: int | None = None,
        tick: Callable[[], object] | None = None,
        every: float = TICK,
    ) -> Iterator[int]:
        """Yields when it is time to show something: every `interval` seconds, `count` times, and at the end of the
        measurement, which is that of the command, of the duration, or Ctrl-C. What `instances` gives is fresh then.

        tick: called in between, about every `every` seconds, sooner where logs and rings fill quickly, and once before each
        yield: the place to take what `logs`, `rings` and `readings` give.
        """
        start = time.monotonic()
        self._tick, self._every, self._ticked = tick, every, start + every
        end = start + self._duration if self._duration is not None else None
        done = 0
        while True:
            done += 1
            until = min(
                (t for t in (end, start + done * interval if interval else None) if t is not None),
                default=None,
            )
            over = self._wait_for_command(until) or self._interrupted or self._terminated
            over = (
                over or (end is not None and time.monotonic() >= end) or (count is not None and done >= count)
            )
            if over:
                self._stop()
            else:
                self._drain(0.0, 0)
            self._run_tick()
            if over:
                self._tick = None
            yield done
            if over:
                return

    def _wait_for_command(self, until: float | None) -> bool:
        """Whether the command ended; False when `until` (time.monotonic) came first, or a signal that ends the measurement."""
        if self._returncode is not None:
            return True
        assert self._child is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._pidfd, selectors.EVENT_READ)
            selector.register(self._signal_reader, selectors.EVENT_READ)
            while True:
                due = [t for t in (until, self._ticked if self._tick else None) if t is not None]
                wait = max(0.0, min(due) - time.monotonic()) if due else None
                ready = {key.fd for key, _ in selector.select(wait)}
                if self._signal_reader in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._signal_reader, 64)
                    if not self._stopped:  # results end with the summary
                        self._tell_attached()
                if self._pidfd in ready:
                    self._returncode = self._child.wait()
                    return True
                if self._terminated or (self._interrupted and not self._stopped):
                    return False
                if until is not None and time.monotonic() >= until:
                    return False
                if self._tick and time.monotonic() >= self._ticked:
                    self._run_tick()

    def _run_tick(self) -> None:
        if self._tick is not None:
            self._hurry = False
            self._tick()
            self._ticked = time.monotonic() + (min(HURRY, self._every) if self._hurry else self._every)

    def _tell_attached(self) -> None:
        while self._probed:
            self._attached(*self._probed.pop(0))

    def _stop(self) -> None:
        """Ends the measurement: no launch is swapped from now on, and everything is read."""
        if self._stopped:
            return
        self._stopped = True
        self._drain(LEAVING_WAIT if self._terminated else DRAIN_WAIT, protocol.STOP)
        if self._returncode is not None:
            self._settle()
        if self._host is not None:
            self._host.detach()
        self._ended_ns = time.monotonic_ns()
        self._tell_attached()
        self._run_tick()  # what came into logs and rings: then it is known what did not
        for process, launches in self._missing():
            self._note(
                f"pid {process.pid} ({process.comm}) ended before it could be read; {self._loss(process, launches)}"
            )
        with self._lock:
            processes = list(self._processes)
        if graphs := sum(process.graph_launches() for process in processes):
            self._note(
                f"{graphs:,} launch{'es' if graphs > 1 else ''} of CUDA graphs that hold conditions, or that kernels launch:"
                " how often their kernels ran is not known"
            )

    def _drain(self, wait: float, flags: int) -> None:
        """Has every process send its maps, and waits for that within bounds. The dead have sent theirs: that is read, too."""
        with self._lock:
            self._sequence += 1
            sequence = self._sequence
            asked = [p for p in self._processes if not p.gone]
        for process in asked:
            process.send(protocol.drain(sequence, wait, flags))
        self._wake()
        deadline = time.monotonic() + wait + (LEAVING_WAIT if self._terminated else ANSWER_WAIT)
        with self._lock:
            while any(not p.gone and p.answered < sequence for p in asked):
                left = deadline - time.monotonic()
                if left <= 0:
                    late = [p for p in asked if not p.gone and p.answered < sequence]
                    self._note(
                        f"{len(late)} process(es) did not answer in time; what they counted since is not shown"
                    )
                    break
                self._lock.wait(min(left, self._every) if self._tick else left)
                if self._tick and time.monotonic() >= self._ticked:
                    self._lock.release()
                    try:
                        self._run_tick()
                    finally:
                        self._lock.acquire()

    # --- the server thread ---

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"w")

    def _serve(self) -> None:
        beaten = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while not self._closing:
                waiting = [p for p in self._processes if p.pending and not p.gone]
                if waiting and time.monotonic() >= beaten + BEAT:
                    beaten = time.monotonic()
                    for process in waiting:
                        process.beat()
                for key, _ in selector.select(BEAT if waiting else None):
                    if key.fileobj is self._listener:
                        accepted = self._accept()
                        if accepted:
                            selector.register(accepted.socket, selectors.EVENT_READ, accepted)
                    elif key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_reader, 4096)
                    elif not self._receive(key.data):
                        selector.unregister(key.data.socket)
                        if key.data.control is not None and protocol.was_cut(key.data.control):
                            name = f"pid {key.data.pid} ({key.data.comm})"
                            self._note(
                                f"{name} closed all its files, ours too; what it launched then was not seen"
                            )
                        if key.data.host is not None:
                            self._enders.submit(key.data.end_host)
                        with self._lock:
                            key.data.close()
                            self._lock.notify_all()
            self._listener.close()
            for process in self._processes:
                if not process.gone:
                    process.close()

    def _accept(self) -> Process | None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.1)  # another may end; who is not let in waits some seconds, then goes on alone
            return None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid not in (self._user.uid if self._user else os.geteuid(), 0) or pid <= 0:
            connection.close()
            return None
        connection.settimeout(ANSWER_WAIT)
        with self._lock:
            if self._stopped:  # nothing is measured any more: the process goes on without us
                connection.close()
                return None
            process = Process(connection, pid, len(self._processes) + 1)
            self._processes.append(process)
        return process

    def _receive(self, process: Process) -> bool:
        """Takes what there is; False when the process is gone, or sends what no agent sends."""
        try:
            data, files, _, _ = socket.recv_fds(process.socket, 1 << 20, 8)
            if not data:
                return False
            frames = process.frames.feed(data, files)
            done = 0
            try:
                for kind, payload, file in frames:
                    with self._lock:
                        self._handle(process, kind, payload, file)
                        self._lock.notify_all()
                    done += 1
            finally:
                for _, _, file in frames[done:]:
                    if file is not None:
                        os.close(file)
        except OSError:
            return False
        except protocol.Malformed as error:
            self._refused += 1
            if self._refused <= REFUSED_LIMIT:
                self._note(f"pid {process.pid}: {error}")
            return False
        return True

    def _handle(self, process: Process, kind: int, payload: bytes, file: int | None) -> None:
        """What a process says. Takes `file` over, unless it raises."""
        if kind in (protocol.NAME, protocol.REFUSED, protocol.STACK):
            process.said(len(payload))
        if kind == protocol.HELLO and file is not None and process.control is None:
            process.comm = protocol.hello(payload)
            process.control = file
        elif kind == protocol.IMAGE and file is not None:
            image = protocol.image(payload)
            if process.pending >= PENDING_LIMIT:
                raise protocol.Malformed("more images at once than a program has")
            process.pending += 1
            self._workers.submit(self._make_sidecar, process, image, file)
        elif kind == protocol.NAME:
            slot, name = protocol.slot_and_text(payload)
            process.names[slot] = name
        elif kind == protocol.REFUSED:
            slot, reason = protocol.slot_and_text(payload)
            process.refused[slot] = reason
        elif kind == protocol.SNAPSHOT and file is not None:
            process.took(protocol.snapshot(payload), file, bool(self.follow.pump))
        elif kind == protocol.MARKER and process.control is not None and not process.marked:
            process.marked = True
            self._welcomers.submit(self._welcome, process, file)
        elif kind == protocol.CONTEXT:
            number, gpu = protocol.context(payload)
            process.said(4096)
            process.contexts[number] = gpu
        elif kind == protocol.STACK:
            number, frames = protocol.stack(payload)
            process.stacks[number] = frames
        elif kind == protocol.LOG and file is not None and protocol.log(payload) == self.follow.log_records:
            process.made_log(file, self.follow.log_records)
        elif kind == protocol.RING:
            place = protocol.ring(payload)
            if place.map >= len(self._maps) or self._wanted.maps[place.map].place != place.place:
                raise protocol.Malformed("a ring that nobody asked for")
            definition = self._maps[place.map]
            granted, taken = self._ring_size(definition), place.capacity * place.shards * place.stride
            process.made_ring(place, definition.value_dtype, granted, file)
            if taken > granted and self.follow.ring_size:
                self._note_once(
                    f"ring {definition.name} takes {-(-taken >> 20)}M, not {granted >> 20}M: each of {place.shards}"
                    f" multiprocessors needs room for {place.capacity:,} records"
                )
        elif kind == protocol.HOOKED and not process.hooked:
            failed, left_out = (text.splitlines() for text in protocol.hooked(payload))
            if unlogged := [line for line in left_out if line.startswith("cu")]:
                self._note_once(
                    f"{len(unlogged)} functions of this driver cannot be hooked, their calls are not seen: {unlogged[0]}"
                )
            for line in left_out:
                if line.startswith("CUPTI: "):
                    self._note_once(
                        f"CUPTI gives no times, {line.removeprefix('CUPTI: ')}; timing events do instead"
                    )
            if failed:
                self._note(
                    f"pid {process.pid} ({process.comm}) is not traced: cannot hook {'; '.join(failed[:3])}"
                )
            else:
                process.hooked = True
                when = process.virtual_times()[0] or time.monotonic_ns()
                self._probed.append((process.pid, process.comm, when))
                with contextlib.suppress(BlockingIOError):
                    os.write(self._signal_writer, b"a")
        elif kind == protocol.DRAINED:
            process.answered, _ = protocol.drained(payload)
        else:
            raise protocol.Malformed("a message out of place")

    # --- workers ---

    def _note_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._note(text)

    def _welcome(self, process: Process, marker: int | None) -> None:
        """Its host programs and shared arrays, then what it is asked to do."""
        wanted = self._wanted
        try:
            if self._host is not None:
                host = self._host.process()
                for name, file in host.files.items():
                    number = self._numbers[name]
                    process.send(protocol.shared(number, wanted.maps[number].fixed), file)
                if marker is not None and self._host.in_kernel:
                    host.attach(marker)
                with self._lock:
                    process.host = host
                if process.gone:
                    process.end_host()
        except (Error, OSError) as error:
            self._note(f"pid {process.pid} ({process.comm}): no host program runs at its launches: {error}")
            wanted = dataclasses.replace(wanted, host=())
        finally:
            if marker is not None:
                os.close(marker)
            process.send(protocol.welcome(wanted, process.number))

    def _make_sidecar(self, process: Process, image: protocol.Image, file: int) -> None:
        answer = protocol.sidecar(image.request, 0, (), {}, ())
        sent: int | None = None
        sidecar: Sidecar | None = None
        try:
            data = protocol.read_file(file, image.size)
            self._loaded(process.comm, data)
            from gpubpf.assemble import Target

            target = Target(self.device.kind, divmod(image.compute_capability, 10))
            sidecar = self._instrument(data, target)
            with self._lock:
                process.refusals.update(sidecar.refusals)
                process.matched.update(sidecar.refusals)
                process.matched.update(kernel.name for kernel in sidecar.kernels)
                process.entries.update(sidecar.entries)
                process.add_sites(sidecar)
            answer, sent = self._encode(image.request, sidecar)
        except Error as error:
            self._note(f"pid {process.pid} ({process.comm}): a module is not instrumented: {error}")
        except Exception as error:  # our mistake, or no memory
            what = f"a module is not instrumented: internal error, {type(error).__name__}: {error}"
            self._note(f"pid {process.pid} ({process.comm}): {what}")
        finally:
            os.close(file)
            with self._lock:
                process.pending -= 1
            process.send(answer, sent)
            if sent is not None:
                os.close(sent)
        if sidecar is not None and sidecar.kernels:
            with self._lock:
                process.registers.append(self._workers.submit(self._count_registers, sidecar, target))

    def _encode(self, request: int, sidecar: Sidecar) -> tuple[bytes, int]:
        layouts = [
            protocol.KernelLayout(
                kernel.name,
                len(kernel.parameters),
                kernel.block_offset,
                self._block(kernel.block),
                tuple(
                    protocol.BlockField(self._numbers[name], offset, kernel.block.capacities.get(name))
                    for name, offset in kernel.block.bases.items()
                ),
                kernel.block.pid_tgid,
                kernel.waits,
            )
            for kernel in sidecar.kernels
        ]
        variables = [protocol.VariableSlot(v.name, v.index, v.copied, v.kernels) for v in sidecar.variables]
        file = os.memfd_create("gpubpf-sidecar")
        with open(file, "wb", closefd=False) as out:
            out.write(sidecar.image)
        size = len(sidecar.image) if layouts else 0
        return protocol.sidecar(request, size, layouts, sidecar.refusals, variables), file

    def _block(self, block: LaunchBlock) -> bytes:
        data = bytearray(block.size)
        for name, (offset, size) in block.params.items():
            data[offset : offset + size] = self._params.get(name, b"").ljust(size, b"\0")[:size]
        return bytes(data)

    # --- results ---

    def instances(self, map_name: str) -> list[Instance]:
        """What the map held when it was read last: one instance for every process, GPU, kernel and launch shape.

        Where a process had several (it reset the device, or loaded a module twice), their values are added up; kernels of one
        name count as one.
        """
        number = self._numbers[map_name]
        found: list[Instance] = []
        with self._lock:
            processes = list(self._processes)
        used = [(process, self._registers(process)) for process in processes]
        with self._lock:  # or else a file may be closed for a newer one
            for process, registers in used:
                for snapshot, file in process.snapshots.values():
                    found += self._instances_of(process, registers, snapshot, file, number)
        return merged(found)

    def _instances_of(
        self,
        process: Process,
        registers: Mapping[str, tuple[int, int]],
        snapshot: protocol.Snapshot,
        file: int,
        number: int,
    ) -> list[Instance]:
        """What one context held of map `number`."""
        definition = self._maps[number]
        found = []
        for instance in snapshot.instances:
            name = process.names.get(instance.slot, "")
            for array in instance.arrays:
                units = _units(definition, instance)
                if array.map != number or array.capacity != units or units > maps.MAX_THREADS:
                    continue
                if array.size != maps.storage_size(definition, units):
                    continue
                raw = protocol.read_file(file, array.size, array.offset)
                if len(raw) != array.size:
                    continue
                before, after = registers.get(name, (None, None))
                found.append(
                    Instance(
                        process.pid, process.comm, snapshot.gpu, name, instance.grid, instance.block_dim,
                        instance.launches, definition, raw, units, before, after, snapshot.taken_ns,
                    )
                )  # fmt: skip
        if number in snapshot.shared:
            offset, size = snapshot.shared[number]
            raw = protocol.read_file(file, size, offset)
            launches = sum(i.launches for i in snapshot.instances)
            if len(raw) == maps.storage_size(definition):
                found.append(
                    Instance(
                        process.pid, process.comm, snapshot.gpu, "", (0, 0, 0), (0, 0, 0),
                        launches, definition, raw, 0, None, None, snapshot.taken_ns,
                    )
                )  # fmt: skip
        return found

    def readings(self, *names: str) -> list[Reading]:
        """The maps as they were each time that they were read since the last call, in that order for each context: see `Follow.pump`.
        Registers are not known. From the thread that runs `intervals`."""
        numbers = [self._numbers[name] for name in names]
        found = []
        with self._lock:
            processes = list(self._processes)
        for process in processes:
            with self._lock:
                taken = list(process.readings)
                process.readings.clear()
                skipped, process.skipped = process.skipped, 0
            if skipped:
                self._note_once(f"{self.who(process)}: maps were read faster than they could be looked at")
            for one in taken:
                s = one.snapshot
                try:
                    parts = {
                        self._maps[n].name: self._instances_of(process, {}, s, one.file, n) for n in numbers
                    }
                finally:
                    os.close(one.file)
                idle = not s.flags & protocol.RUNNING
                found.append(
                    Reading(
                        process.pid, process.comm, s.gpu, s.context, s.taken_ns, idle, parts, process.names,
                        process.number,
                    )
                )
        return found

    def logs(self) -> list[ProcessLog]:
        """What came into the operation log of each process since the last call, see `Follow`. From `intervals`' thread."""
        found = []
        with self._lock:
            processes = list(self._processes)
        for process in processes:
            last = process.over or (process.gone and self._stopped)
            records = process.read_log(last)
            if records is None:
                continue
            self._hurry |= len(records) > FULL * self.follow.log_records
            found.append(
                ProcessLog(
                    process.pid, process.comm, records, process.log_lost, process.virtual,
                    process.names, process.contexts, process.stacks, last, process.number,
                )
            )  # fmt: skip
        return found

    def rings(self, map_name: str) -> list[RingRecords]:
        """What came into a ring since the last call, by process and context. From the thread that runs `intervals`."""
        found = []
        for process, context, ring in self._rings(map_name):
            if ring.done:
                continue
            last = ring.closed or process.over or (process.gone and self._stopped)
            place = ring.reader.place
            if place.place == protocol.Place.HOST_RING:
                records = ring.reader.read(last)
            else:
                copied = self._take_copy(process, ring, last)
                if copied is None and not last and not process.gone and not self._stopped:
                    process.send(protocol.drain(0, 0.0, protocol.ONLY_RINGS))
                if copied is None:
                    ring.done = last
                    continue
                records = copied
                if not process.gone:
                    process.send(protocol.consumed(place.map, context, ring.reader.consumed))
            self._hurry |= ring.reader.full > FULL
            if last:
                ring.done = True
                ring.reader.close()
            if len(records):
                found.append(
                    RingRecords(process.pid, process.comm, place.gpu, context, records, process.names)
                )
        return found

    def ring_counts(self, map_name: str) -> list[RingCounts]:
        """Reservations and losses of a ring, by process, context and shard, as last known."""
        return [
            RingCounts(process.pid, process.comm, ring.reader.place.gpu, tuple(ring.reader.counts()))
            for process, _, ring in self._rings(map_name)
        ]

    def _rings(self, map_name: str) -> list[tuple[Process, int, Ring]]:
        number = self._numbers[map_name]
        with self._lock:
            return [
                (process, context, ring)
                for process in self._processes
                for (of, context), ring in process.rings.items()
                if of == number
            ]

    def _take_copy(self, process: Process, ring: Ring, last: bool) -> np.ndarray[Any, Any] | None:
        """The new records of a ring in GPU memory; None: there is no copy that was not looked at."""
        with self._lock:
            copy, ring.copy = ring.copy, None
        if copy is None:
            return None
        file, offset = copy
        size = ring.reader.place.size
        try:
            if offset % mmap.PAGESIZE or not protocol.sealed(file, offset + size):
                return None
            with mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset) as area:
                return ring.reader.take(area, last)
        finally:
            os.close(file)

    def shared(self, map_name: str) -> list[SharedArray]:
        """A shared array, of every process that had one."""
        with self._lock:
            processes = list(self._processes)
        arrays = [(process, process.shared_array(map_name)) for process in processes]
        return [SharedArray(p.pid, p.comm, array, p.number) for p, array in arrays if array is not None]

    def sites(self, mangled: str, pid: int | None = None) -> dict[int, ExitSite]:
        """The ways out of a kernel by number (`ctx->site`), with the source where the program has line numbers. Of one process, or
        of all: left out is what they do not agree on (programs of different builds)."""
        with self._lock:
            tables = [
                process.sites[mangled]
                for process in self._processes
                if mangled in process.sites and pid in (None, process.pid)
            ]
        found: dict[int, ExitSite] = {}
        for number in {number for table in tables for number in table}:
            said = {table[number] for table in tables if number in table}
            if len(said) == 1 and (site := said.pop()) is not None:
                found[number] = site
        return found

    def who(self, process: Process) -> str:
        return f"pid {process.pid} ({process.comm})"

    def _registers(self, process: Process) -> dict[str, tuple[int, int]]:
        """Of its instrumented kernels, where it could be found out in time."""
        found: dict[str, tuple[int, int]] = {}
        for future in process.registers:
            with contextlib.suppress(Exception):  # what ptxas says of it does not concern the measurement
                found.update(future.result(REGISTERS_WAIT))
        return found

    def kernels(self) -> list[KernelCount]:
        """Every kernel that a process got hold of, most launches first."""
        counted: dict[str, tuple[int, bool, int, dict[str, int]]] = {}
        for process, name, counters in self._counted():
            matched = name in process.matched or self._matches(name)
            launches, was_matched, instrumented, reasons = counted.get(name, (0, False, 0, {}))
            if matched:
                for reason, n in _reasons(process, name, counters).items():
                    reasons[reason] = reasons.get(reason, 0) + n
            counted[name] = (
                launches + counters.seen,
                was_matched or matched,
                instrumented + counters.instrumented,
                reasons,
            )
        made = [KernelCount(name, *rest) for name, rest in counted.items()]
        return sorted(made, key=lambda k: (-k.launches, k.mangled))

    def _counted(self) -> Iterator[tuple[Process, str, protocol.Counters]]:
        with self._lock:
            processes = list(self._processes)
        for process in processes:
            slots, _ = process.counters()
            for slot, counters in enumerate(slots):
                name = process.names.get(slot, "" if slot < protocol.SLOTS - 1 else "(others)")
                if name:
                    yield process, name, counters

    def launches_by_comm(self) -> dict[str, dict[str, int]]:
        """By name of the process: launches by mangled name."""
        counted: dict[str, dict[str, int]] = {}
        for process, name, counters in self._counted():
            of_process = counted.setdefault(process.comm, {})
            of_process[name] = of_process.get(name, 0) + counters.seen
        return counted

    def summary(self) -> dict[str, Any]:
        """The fields of the summary record, but for `type` and `tool`."""
        kernels = self.kernels()
        unnamed = sum(process.counters()[1] for process in list(self._processes))
        reasons: dict[str, int] = {}
        for kernel in kernels:
            for reason, n in kernel.not_instrumented.items():
                reasons[reason] = reasons.get(reason, 0) + n
        summary = {
            "device": self.device.kind,
            "launches_seen": sum(k.launches for k in kernels) + unnamed,
            "launches_matched": sum(k.launches for k in kernels if k.matched),
            "launches_instrumented": sum(k.instrumented for k in kernels if k.matched),
            "not_instrumented": dict(sorted(reasons.items(), key=lambda item: -item[1])),
            "lost": self._lost(),
            "duration_ns": self._duration_ns(),
        }
        if self._host is not None and self._host.in_kernel:
            summary["host_programs"] = {
                r.function: {"runs": r.runs, "mean_ns": round(r.mean_ns)} for r in self._host.runs()
            }
        return summary

    def _duration_ns(self) -> int:
        """Of the measurement; on the virtual clock from the first process's beginning to the last one's end."""
        with self._lock:
            times = [process.virtual_times() for process in self._processes]
        started, ended = [s for s, _ in times if s], [e for _, e in times if e]
        if started and ended:
            return max(0, max(ended) - min(started))
        return (self._ended_ns or time.monotonic_ns()) - self._started_ns

    def _loss(self, process: Process, launches: int) -> str:
        """What of a process is lost of which so many launches were not read."""
        parts = []
        if any(not _is_ring(d) and d.kind != SHARED for d in self._maps):
            parts.append(f"what up to {launches:,} launches counted is lost")
        for name, received, _, most in self._unread(process):
            parts.append(f"{received:,} records of {name} were received, at most {most:,} are lost")
        return "; ".join(parts) or f"up to {launches:,} launches were not read"

    def _unread(self, process: Process) -> Iterator[tuple[str, int, int, int]]:
        """For each ring: its name, the records that were received, those that are known to be lost, and how many are at most."""
        threads = sum(c.threads for c in process.counters()[0])
        for number, definition in enumerate(self._maps):
            if not _is_ring(definition) or definition.name == maps.PRINTS:
                continue
            rings = [ring.reader for (of, _), ring in process.rings.items() if of == number]
            shards = [shard for reader in rings for shard in reader.counts()]
            received, known = sum(s.received for s in shards), sum(s.lost + s.incomplete for s in shards)
            most = threads * self.follow.per_thread.get(definition.name, 1) - received
            yield definition.name, received, known, max(known, most)

    def _missing(self) -> Iterator[tuple[Process, int]]:
        """Instrumented launches of each process whose counts never came, at most."""
        with self._lock:
            processes = list(self._processes)
        for process in processes:
            instrumented = sum(c.instrumented for c in process.counters()[0])
            received = sum(i.launches for s, _ in process.snapshots.values() for i in s.instances)
            if instrumented > received:
                yield process, instrumented - received

    def _lost(self) -> int:
        """Launches whose counts never came, records that a killed process wrote at most, and what found no room in maps."""
        lost = 0
        counted = any(not _is_ring(d) and d.kind != SHARED for d in self._maps)
        for process, launches in self._missing():
            bounds = [
                most - known
                for name, _, known, most in self._unread(process)
                if name in self.follow.per_thread
            ]
            lost += sum(bounds) + (launches if counted or not bounds else 0)
        with self._lock:
            lost += sum(self._lost_in(*part) for p in self._processes for part in p.snapshots.values())
            rings = [ring.reader for p in self._processes for ring in p.rings.values()]
            lost += sum(p.log_lost for p in self._processes)
        return lost + sum(shard.lost + shard.incomplete for reader in rings for shard in reader.counts())

    def _lost_in(self, snapshot: protocol.Snapshot, file: int) -> int:
        lost = 0
        places = [(a.map, a.offset, a.size) for i in snapshot.instances for a in i.arrays]
        places += [(number, *place) for number, place in snapshot.shared.items()]
        for number, offset, size in places:
            if number >= len(self._maps):
                continue
            definition = self._maps[number]
            if definition.kind in maps.SHAPED:  # the last value says it
                if size < definition.value_size:
                    continue
                offset, size = offset + size - definition.value_size, definition.value_size
            elif size > maps.HEADER:
                size = maps.HEADER
            raw = protocol.read_file(file, size, offset)
            if len(raw) == size:
                lost += maps.lost(definition, raw)
        return lost


class _NotStarted(SessionError):
    """The command could not be run at all."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def _volume(extents: tuple[int, int, int]) -> int:
    return extents[0] * extents[1] * extents[2]


def _is_ring(definition: MapDefinition) -> bool:
    return definition.kind == "ringbuf"


def _units(definition: MapDefinition, instance: protocol.InstancePart) -> int:
    """How many units the map has for an instance; 0: it is not by shape."""
    blocks, threads = _volume(instance.grid), _volume(instance.block_dim)
    kind = maps.SHAPED.get(definition.kind)
    return {
        "thread": blocks * threads,
        "warp": blocks * ((threads + 31) // 32),
        "block": blocks,
        "instance": 1,
    }.get(kind or "", 0)


def _reasons(process: Process, name: str, counters: protocol.Counters) -> dict[str, int]:
    """Why launches of a matched kernel ran the original. What has no reason of its own came before the copy was ready."""
    slots = [slot for slot, known in process.names.items() if known == name]
    reasons: dict[str, int] = {}
    for reason, n in counters.reasons.items():
        if reason == protocol.REASONS[protocol.REFUSED_REASON]:
            told = [process.refused[slot] for slot in slots if slot in process.refused]
            reason = told[0] if told else process.refusals.get(name, reason)
        reasons[reason] = reasons.get(reason, 0) + n
    rest = counters.seen - counters.instrumented - sum(counters.reasons.values())
    if rest > 0:
        reasons["before ready"] = reasons.get("before ready", 0) + rest
    return reasons
