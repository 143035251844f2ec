"""What takes long in serving processes, done by threads so that one process's ptxas does not hold up another: making sidecars."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import queue
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gpubpf.agent import protocol
from gpubpf.errors import Error

if TYPE_CHECKING:
    from gpubpf.images.assemble import Target
    from gpubpf.images.instrument import Sidecar
    from gpubpf.ptx.inject import LaunchBlock
    from gpubpf.session.measurement import Measurement
    from gpubpf.session.traced_process import Process

KEPT = 64  # processes that are gone and whose maps stay in the files that they handed over
SIDECARS, SIDECAR_BYTES = 32, 16 << 20  # that are kept for other processes: how many, the size of one

T = TypeVar("T")
# An image that a program loaded, and the device it was loaded on → its sidecar.
Instrument = Callable[[bytes, "Target"], "Sidecar"]
# How many registers the kernels of a sidecar need: (as built, with the probe) by mangled name.
CountRegisters = Callable[[Any, "Target"], Mapping[str, tuple[int, int]]]


@dataclass(frozen=True)
class Makers:
    """What makes sidecars. `instrument` is called from several threads, once for images that are the same; `registers` when
    nobody waits for it; `warm_up` once, while the command starts."""

    instrument: Instrument
    registers: CountRegisters = lambda sidecar, target: {}
    warm_up: Callable[[], object] = lambda: None


class Workers:
    """Threads that a leaving tool does not wait for: what they make then, nobody needs. (ThreadPoolExecutor waits.)
    `before` is called by each before it does what it is given."""

    def __init__(self, count: int, before: Callable[[], None] = lambda: None) -> None:
        self._before = before
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._count = self._left = count  # threads, those that are not started yet
        self._closed = False

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                self._before()
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        if self._closed:
            run()
            return future
        if self._left:
            self._left -= 1
            threading.Thread(target=self._serve, name="gpubpf-worker", daemon=True).start()
        self._work.put(run)
        return future

    def close(self) -> None:
        """They end when they have done what they were given; nobody waits for it. What comes later, who brings it does."""
        self._closed = True
        for _ in range(self._count - self._left):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class Workshop:
    """Makes sidecars, and all else that serving a process takes long for. `loaded`: see `Listener`."""

    def __init__(self, measured: Measurement, makers: Makers, loaded: Callable[[str, bytes], None]) -> None:
        self._measured = measured
        self._instrument = makers.instrument
        self._count_registers = makers.registers
        self._loaded = loaded
        settle = measured.privileges.apply
        self.makers = Workers(4, settle)
        self._welcomers = Workers(4, settle)  # a process that starts does not wait for another one's ptxas,
        self._enders = Workers(2, settle)  # nor for the kernel to take another one's probes down
        self._ended: deque[Process] = deque()  # whose files are open still
        self._known: OrderedDict[tuple[bytes, Target], Future[Sidecar]] = OrderedDict()
        self._knowing = threading.Lock()

    def close(self) -> None:
        for workers in (self.makers, self._welcomers, self._enders):
            workers.close()

    def make_sidecar(self, process: Process, image: protocol.Image, file: int) -> None:
        """Answers with the sidecar of an image, in time. Takes `file` over."""
        self.makers.submit(self._make_sidecar, process, image, file)

    def make_found(self, process: Process, found: protocol.Found) -> None:
        """Answers with the sidecar of a module that was there before its agent."""
        self.makers.submit(self._make_found, process, found)

    def welcome(self, process: Process, marker: int | None) -> None:
        """Tells a process what it is asked to do. Takes `marker` over: where the host programs are attached."""
        self._welcomers.submit(_welcome, self._measured, process, marker)

    def patch(self, process: Process, file: int) -> None:
        """Puts the hooks into a process that runs, and tells it so. Takes `file` over: the list of them."""
        self._welcomers.submit(_patch, self._measured, process, file)

    def end(self, process: Process) -> None:
        """It is gone: its host programs are taken down, and of those that are gone for longer the files closed."""
        process.__dict__.pop("mapped", None)
        self._enders.submit(process.end_host)
        self._ended.append(process)
        if len(self._ended) > KEPT:
            specs, lock = self._measured.wanted.maps, self._measured.lock
            self._enders.submit(self._ended.popleft().pack, specs, lock)

    def _sidecar(self, data: bytes, target: Target) -> Sidecar:
        """As `Instrument`; once for processes that have the same image at about the same time."""
        key = (hashlib.sha256(data).digest(), target)
        with self._knowing:
            known = self._known.get(key)
            future = known or self._known.setdefault(key, Future())
            self._known.move_to_end(key)
            while len(self._known) > SIDECARS:
                self._known.popitem(last=False)
        if known is not None:
            return known.result()
        try:
            sidecar = self._instrument(data, target)
        except BaseException as error:
            future.set_exception(error)
            self._forget(key)
            raise
        future.set_result(sidecar)
        if len(sidecar.image) > SIDECAR_BYTES:
            self._forget(key)
        return sidecar

    def _forget(self, key: tuple[bytes, Target]) -> None:
        with self._knowing:
            self._known.pop(key, None)

    def _make_sidecar(self, process: Process, image: protocol.Image, file: int) -> None:
        from gpubpf.images import fatbin, instrument

        def make(target: Target) -> Sidecar:
            data = process.mapped.with_ptx(protocol.read_file(file, image.size))
            if image.linked > 1:
                data = instrument.joined(data)
            self._loaded(process.comm, data)
            sidecar = self._sidecar(data, target)
            if image.linked > 1:  # the PTX of all its inputs is not at hand
                why = {
                    name: fatbin.LINKED if reason == fatbin.SASS_ONLY else reason
                    for name, reason in sidecar.refusals.items()
                }
                sidecar = dataclasses.replace(sidecar, refusals=why)
            return sidecar

        try:
            self._answer(process, image, make)
        finally:
            os.close(file)

    def _make_found(self, process: Process, found: protocol.Found) -> None:
        def make(target: Target) -> Sidecar:
            data, reasons = process.mapped.find(found, target)
            sidecar = self._sidecar(data or b"", target)
            refusals = {name: reason for name, reason in reasons.items() if self._measured.matches(name)}
            entries = tuple(dict.fromkeys((*sidecar.entries, *reasons)))
            return dataclasses.replace(sidecar, refusals={**refusals, **sidecar.refusals}, entries=entries)

        self._answer(process, found, make)

    def _answer(
        self, process: Process, asked: protocol.Image | protocol.Found, make: Callable[[Target], Sidecar]
    ) -> None:
        """Sends what `make` makes for a device; nothing where it fails."""
        answer = protocol.sidecar(asked.request, 0, (), {}, ())
        sent: int | None = None
        sidecar: Sidecar | None = None
        try:
            from gpubpf.images.assemble import Target

            target = Target(self._measured.device.kind, divmod(asked.compute_capability, 10))
            sidecar = make(target)
            with self._measured.lock:
                process.refusals.update(sidecar.refusals)
                process.matched.update(sidecar.refusals)
                process.matched.update(kernel.name for kernel in sidecar.kernels)
                process.entries.update(sidecar.entries)
                process.add_sites(sidecar)
            answer, sent = _encode(self._measured, asked.request, sidecar)
        except Error as error:
            self._measured.note(f"{process.who}: a module is not instrumented: {error}")
        except Exception as error:  # our mistake, or no memory
            what = f"a module is not instrumented: internal error, {type(error).__name__}: {error}"
            self._measured.note(f"{process.who}: {what}")
        finally:
            process.send(answer, sent)
            with self._measured.lock:
                process.pending -= 1
                process.served = True
                self._measured.lock.notify_all()
            if sent is not None:
                os.close(sent)
        if sidecar is not None and sidecar.kernels:
            with self._measured.lock:
                process.registers.append(self.makers.submit(self._count_registers, sidecar, target))


def _patch(measured: Measurement, process: Process, file: int) -> None:
    from gpubpf.attach import patching

    try:
        patches = patching.read_patches(file)
        process.stood_ns += int(patching.apply(process.pid, patches) * 1e9)
        process.send(protocol.patched())
    except Error as error:
        process.trouble = f"is not traced: {error}"
        with contextlib.suppress(OSError):
            process.socket.shutdown(socket.SHUT_RDWR)  # it waits for the answer
    finally:
        os.close(file)


def _encode(measured: Measurement, request: int, sidecar: Sidecar) -> tuple[bytes, int]:
    layouts = [
        protocol.KernelLayout(
            kernel.name,
            tuple(size for _, size in kernel.parameters),
            kernel.block_offset,
            _block(measured, kernel.block),
            tuple(
                protocol.BlockField(measured.numbers[name], offset, kernel.block.capacities.get(name))
                for name, offset in kernel.block.bases.items()
            ),
            kernel.block.pid_tgid,
            kernel.waits,
            kernel.site_count,
            kernel.block.kernel,
            kernel.block.epoch,
        )
        for kernel in sidecar.kernels
    ]
    variables = [protocol.VariableSlot(v.name, v.index, v.copied, v.kernels) for v in sidecar.variables]
    file = os.memfd_create("gpubpf-sidecar")
    with open(file, "wb", closefd=False) as out:
        out.write(sidecar.image)
    size = len(sidecar.image) if layouts else 0
    return protocol.sidecar(request, size, layouts, sidecar.refusals, variables), file


def _block(measured: Measurement, block: LaunchBlock) -> bytes:
    data = bytearray(block.size)
    for name, (offset, size) in block.params.items():
        data[offset : offset + size] = measured.params.get(name, b"").ljust(size, b"\0")[:size]
    return bytes(data)


def _welcome(measured: Measurement, process: Process, marker: int | None) -> None:
    """Its host programs and shared arrays, then what it is asked to do."""
    wanted = measured.wanted
    try:
        if measured.host is not None:
            host = measured.host.process()
            for name, file in host.files.items():
                number = measured.numbers[name]
                process.send(protocol.shared(number, wanted.maps[number].fixed), file)
            if marker is not None and measured.host.in_kernel:
                host.attach(marker)
            with measured.lock:
                process.host = host
            if process.gone:
                process.end_host()
    except (Error, OSError) as error:
        measured.note(f"{process.who}: no host program runs at its launches: {error}")
        wanted = dataclasses.replace(wanted, host=())
    finally:
        if marker is not None:
            os.close(marker)
        process.send(protocol.welcome(wanted, process.number))
