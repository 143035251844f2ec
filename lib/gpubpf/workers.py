"""What takes long in serving processes, done by threads so that one process's ptxas does not hold up another: making sidecars."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from gpubpf.agent import protocol
from gpubpf.errors import Error

if TYPE_CHECKING:
    from gpubpf.assemble import Target
    from gpubpf.instrument import Sidecar
    from gpubpf.measurement import Measurement
    from gpubpf.process import Process
    from gpubpf.ptx.inject import LaunchBlock

T = TypeVar("T")
# An image that a program loaded, and the device it was loaded on → its sidecar.
Instrument = Callable[[bytes, "Target"], "Sidecar"]
# How many registers the kernels of a sidecar need: (as built, with the probe) by mangled name.
CountRegisters = Callable[[Any, "Target"], Mapping[str, tuple[int, int]]]


class Workers:
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


class Workshop:
    """Makes sidecars, and all else that serving a process takes long for. See `Session` for the arguments."""

    def __init__(
        self,
        measured: Measurement,
        instrument: Instrument,
        registers: CountRegisters,
        loaded: Callable[[str, bytes], None],
    ) -> None:
        self._measured = measured
        self._instrument = instrument
        self._count_registers = registers
        self._loaded = loaded
        self.makers = Workers(4)
        self._welcomers = Workers(4)  # a process that starts does not wait for another one's ptxas,
        self._enders = Workers(2)  # nor for the kernel to take another one's probes down

    def make_sidecar(self, process: Process, image: protocol.Image, file: int) -> None:
        """Answers with the sidecar of an image, in time. Takes `file` over."""
        self.makers.submit(self._make_sidecar, process, image, file)

    def welcome(self, process: Process, marker: int | None) -> None:
        """Tells a process what it is asked to do. Takes `marker` over: where the host programs are attached."""
        self._welcomers.submit(_welcome, self._measured, process, marker)

    def patch(self, process: Process, file: int) -> None:
        """Puts the hooks into a process that runs, and tells it so. Takes `file` over: the list of them."""
        self._welcomers.submit(_patch, self._measured, process, file)

    def end_host(self, process: Process) -> None:
        self._enders.submit(process.end_host)

    def _make_sidecar(self, process: Process, image: protocol.Image, file: int) -> None:
        answer = protocol.sidecar(image.request, 0, (), {}, ())
        sent: int | None = None
        sidecar: Sidecar | None = None
        try:
            data = protocol.read_file(file, image.size)
            self._loaded(process.comm, data)
            from gpubpf.assemble import Target

            target = Target(self._measured.device.kind, divmod(image.compute_capability, 10))
            sidecar = self._instrument(data, target)
            with self._measured.lock:
                process.refusals.update(sidecar.refusals)
                process.matched.update(sidecar.refusals)
                process.matched.update(kernel.name for kernel in sidecar.kernels)
                process.entries.update(sidecar.entries)
                process.add_sites(sidecar)
            answer, sent = _encode(self._measured, image.request, sidecar)
        except Error as error:
            self._measured.note(f"{process.who}: a module is not instrumented: {error}")
        except Exception as error:  # our mistake, or no memory
            what = f"a module is not instrumented: internal error, {type(error).__name__}: {error}"
            self._measured.note(f"{process.who}: {what}")
        finally:
            os.close(file)
            with self._measured.lock:
                process.pending -= 1
            process.send(answer, sent)
            if sent is not None:
                os.close(sent)
        if sidecar is not None and sidecar.kernels:
            with self._measured.lock:
                process.registers.append(self.makers.submit(self._count_registers, sidecar, target))


def _patch(measured: Measurement, process: Process, file: int) -> None:
    from gpubpf import patching

    try:
        patches = patching.read_patches(file)
        patching.apply(process.pid, patches)
        process.patches = patches
        process.send(protocol.patched())
    except Error as error:
        measured.note(f"{process.who} is not traced: {error}")
        with contextlib.suppress(OSError):
            process.socket.shutdown(socket.SHUT_RDWR)  # it waits for the answer
    finally:
        os.close(file)


def _encode(measured: Measurement, request: int, sidecar: Sidecar) -> tuple[bytes, int]:
    layouts = [
        protocol.KernelLayout(
            kernel.name,
            len(kernel.parameters),
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
