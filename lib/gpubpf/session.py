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
import errno
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
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from gpubpf import agent, maps, users
from gpubpf.agent import protocol
from gpubpf.device import Device
from gpubpf.errors import Error, SessionError
from gpubpf.results import Instance, KernelCount, merged

if TYPE_CHECKING:
    from gpubpf.assemble import Target
    from gpubpf.instrument import Sidecar
    from gpubpf.maps import MapDefinition
    from gpubpf.ptx.inject import LaunchBlock

IMAGE_WAIT = 120.0  # seconds that a process waits in a module load for the sidecar
REGISTERS_WAIT = 20.0  # seconds that results wait for ptxas to count registers
DRAIN_WAIT = 2.0  # seconds that kernels get to end before the last reading
LEAVING_WAIT = 0.4  # in the place of both when the tool is told to leave
ANSWER_WAIT = 5.0  # seconds, beyond that, for an agent to answer
BEAT = 1.0  # seconds; an agent that waits and hears nothing for ten goes on without its answer
MAP_MEMORY = 256 << 20
# Of one process; no program has so many, and the tool's memory and files are not theirs to use up.
TEXT_LIMIT, PENDING_LIMIT, CONTEXT_LIMIT = 64 << 20, 4096, 4096
REFUSED_LIMIT = 10  # notices of that kind
PARAM = "param"
T = TypeVar("T")


# An image that a program loaded, and the device it was loaded on → its sidecar.
Instrument = Callable[[bytes, "Target"], "Sidecar"]
# How many registers the kernels of a sidecar need: (as built, with the probe) by mangled name.
CountRegisters = Callable[[Any, "Target"], Mapping[str, tuple[int, int]]]


class _Process:
    """A process with an agent, as the server thread knows it. `Session._lock` guards it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.socket = connection
        self.pid = pid
        self.comm = ""
        self.frames = protocol.Frames()
        self.outgoing = threading.Lock()
        self.control: int | None = None
        self.hooked = False
        self.gone = False
        self.answered = 0  # sequence number of the last drain that is done
        self.names: dict[int, str] = {}
        self.refused: dict[int, str] = {}  # by slot, from the agent
        self.refusals: dict[str, str] = {}  # by name, from the sidecars
        self.matched: set[str] = set()
        self.entries: set[str] = set()  # kernels of its modules, whether it uses them or not
        self.registers: list[Future[Mapping[str, tuple[int, int]]]] = []
        self.snapshots: dict[int, tuple[protocol.Snapshot, int]] = {}  # by context: with the memory's file
        self.pending = 0  # images without an answer
        self.text = 0  # bytes of names and reasons
        self._reading = threading.Lock()
        # of a process that is gone
        self._last: tuple[list[protocol.Counters], int] = [], 0
        self._last_graphs = 0

    def counters(self) -> tuple[list[protocol.Counters], int]:
        with self._reading:
            return protocol.read_control(self.control) if self.control is not None else self._last

    def graph_launches(self) -> int:
        with self._reading:
            return protocol.graph_launches(self.control) if self.control is not None else self._last_graphs

    def beat(self) -> None:
        """Says that its images are worked on. Never waits."""
        if self.outgoing.acquire(blocking=False):
            with contextlib.suppress(OSError):
                os.write(self.socket.fileno(), protocol.working())
            self.outgoing.release()

    def send(self, data: bytes, file: int | None = None) -> None:
        """From any thread. A process that does not read is given up."""
        with self.outgoing:
            try:
                if file is None:
                    self.socket.sendall(data)
                else:
                    sent = socket.send_fds(self.socket, [data], [file])
                    self.socket.sendall(data[sent:])
            except OSError:
                with contextlib.suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """It is gone. A command may have very many processes, so what can be closed is."""
        self.gone = True
        self.frames.close()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes who sends
        with self.outgoing:
            self.socket.close()
        last, graphs = self.counters(), self.graph_launches()
        with self._reading:
            self._last, self._last_graphs = last, graphs
            if self.control is not None:
                os.close(self.control)
                self.control = None


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
    attached: with pid, comm and CLOCK_MONOTONIC time (ns) when probes are live, from the thread that runs `intervals`.
    loaded: with the name of a process and each image that it loads. warm_up: called while the command starts.
    registers: see `CountRegisters`; called when nobody waits for it.
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
        self._welcome = protocol.welcome(
            [self._spec(d) for d in self._maps],
            map_memory or MAP_MEMORY,
            launches or (1, None),
            sample or 1,
            image_wait,
            False,
        )
        self._lock = threading.Condition()
        self._processes: list[_Process] = []
        self._sequence = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = False  # the measurement is over
        self._terminated = False  # SIGTERM: leave at once
        self._interrupted = False
        self._started_ns = self._ended_ns = 0
        self._returncode: int | None = None
        self._handlers: dict[int, Any] = {}
        self._workers = _Workers(4)
        self._closing = False
        self._refused = 0  # connections that sent what no agent sends

    @staticmethod
    def _spec(definition: MapDefinition) -> protocol.MapSpec:
        fixed = maps.storage_size(definition)
        per_thread = maps.storage_size(definition, 1) - fixed
        return protocol.MapSpec(fixed, per_thread, maps.header(definition))

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
    def nothing_matched(self) -> bool:
        """Kernels were asked for by name, and none of those that were seen is meant."""
        return bool(self.wanted) and not any(k.matched for k in self.kernels())

    # --- time ---

    def intervals(self, interval: float | None = None, count: int | None = None) -> Iterator[int]:
        """Yields when it is time to show something: every `interval` seconds, `count` times, and at the end of the
        measurement, which is that of the command, of the duration, or Ctrl-C. What `instances` gives is fresh then."""
        start = time.monotonic()
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
                wait = None if until is None else max(0.0, until - time.monotonic())
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

    def _tell_attached(self) -> None:
        while self._probed:
            self._attached(*self._probed.pop(0))

    def _stop(self) -> None:
        """Ends the measurement: no launch is swapped from now on, and everything is read."""
        if self._stopped:
            return
        self._stopped = True
        self._drain(LEAVING_WAIT if self._terminated else DRAIN_WAIT, protocol.STOP)
        self._ended_ns = time.monotonic_ns()
        self._tell_attached()
        for process, launches in self._missing():
            self._note(
                f"pid {process.pid} ({process.comm}) ended before it could be read; "
                f"what up to {launches} launches counted is lost"
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
                self._lock.wait(left)

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
                        with self._lock:
                            key.data.close()
                            self._lock.notify_all()
            self._listener.close()
            for process in self._processes:
                if not process.gone:
                    process.close()

    def _accept(self) -> _Process | None:
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
        process = _Process(connection, pid)
        with self._lock:
            if self._stopped:  # nothing is measured any more: the process goes on without us
                connection.close()
                return None
            self._processes.append(process)
        process.send(self._welcome)
        return process

    def _receive(self, process: _Process) -> bool:
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

    def _handle(self, process: _Process, kind: int, payload: bytes, file: int | None) -> None:
        """What a process says. Takes `file` over, unless it raises."""
        if kind in (protocol.NAME, protocol.REFUSED):
            process.text += len(payload)
            if process.text > TEXT_LIMIT:
                raise protocol.Malformed("more names than a program has")
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
            snapshot = protocol.snapshot(payload)
            before = process.snapshots.get(snapshot.context)
            if before is None and len(process.snapshots) >= CONTEXT_LIMIT:
                raise protocol.Malformed("memory of more contexts than can be kept")
            if snapshot.flags & protocol.FAILED and (before or snapshot.size):
                os.close(file)  # an older one is better than none
                return
            if snapshot.size > os.fstat(file).st_blocks * 512:
                raise protocol.Malformed("memory that is not there")
            if before:
                os.close(before[1])
            process.snapshots[snapshot.context] = (snapshot, file)
        elif kind == protocol.HOOKED and not process.hooked:
            failed = protocol.hooked(payload).splitlines()
            if failed:
                self._note(
                    f"pid {process.pid} ({process.comm}) is not traced: cannot hook {'; '.join(failed[:3])}"
                )
            else:
                process.hooked = True
                self._probed.append((process.pid, process.comm, time.monotonic_ns()))
                with contextlib.suppress(BlockingIOError):
                    os.write(self._signal_writer, b"a")
        elif kind == protocol.DRAINED:
            process.answered, _ = protocol.drained(payload)
        else:
            raise protocol.Malformed("a message out of place")

    # --- workers ---

    def _make_sidecar(self, process: _Process, image: protocol.Image, file: int) -> None:
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
        process: _Process,
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
                threads = _volume(instance.grid) * _volume(instance.block_dim)
                if array.map != number or array.capacity != threads or threads > maps.MAX_THREADS:
                    continue
                if array.size != maps.storage_size(definition, threads):
                    continue
                raw = protocol.read_file(file, array.size, array.offset)
                if len(raw) != array.size:
                    continue
                found.append(
                    Instance(
                        process.pid, process.comm, snapshot.gpu, name, instance.grid, instance.block_dim,
                        instance.launches, definition, raw, threads, *registers.get(name, (None, None)),
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
                        launches, definition, raw, 0, None, None,
                    )
                )  # fmt: skip
        return found

    def _registers(self, process: _Process) -> dict[str, tuple[int, int]]:
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

    def _counted(self) -> Iterator[tuple[_Process, str, protocol.Counters]]:
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
        return {
            "device": self.device.kind,
            "launches_seen": sum(k.launches for k in kernels) + unnamed,
            "launches_matched": sum(k.launches for k in kernels if k.matched),
            "launches_instrumented": sum(k.instrumented for k in kernels if k.matched),
            "not_instrumented": dict(sorted(reasons.items(), key=lambda item: -item[1])),
            "lost": self._lost(),
            "duration_ns": (self._ended_ns or time.monotonic_ns()) - self._started_ns,
        }

    def _missing(self) -> Iterator[tuple[_Process, int]]:
        """Instrumented launches of each process whose counts never came, at most."""
        with self._lock:
            processes = list(self._processes)
        for process in processes:
            instrumented = sum(c.instrumented for c in process.counters()[0])
            received = sum(i.launches for s, _ in process.snapshots.values() for i in s.instances)
            if instrumented > received:
                yield process, instrumented - received

    def _lost(self) -> int:
        """Launches whose counts never came, and what found no room in maps."""
        lost = sum(launches for _, launches in self._missing())
        with self._lock:
            return lost + sum(self._lost_in(*part) for p in self._processes for part in p.snapshots.values())

    def _lost_in(self, snapshot: protocol.Snapshot, file: int) -> int:
        lost = 0
        places = [(a.map, a.offset, a.size) for i in snapshot.instances for a in i.arrays]
        places += [(number, *place) for number, place in snapshot.shared.items()]
        for number, offset, size in places:
            if number >= len(self._maps):
                continue
            definition = self._maps[number]
            if definition.kind == "thread_array":  # the last value says it
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


def _reasons(process: _Process, name: str, counters: protocol.Counters) -> dict[str, int]:
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
