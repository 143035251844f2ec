"""The slow work of serving processes, in separate threads: building sidecars, sending WELCOME, patching, cleaning up.

The server calls `BackgroundWork`, so that running ptxas for one process does not delay another's messages.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpubpf import digest, own_files
from gpubpf.agent import protocol
from gpubpf.agent.definitions import CLOCK_KERNEL, BlockField, Vendor
from gpubpf.errors import Error, in_words, missing_package, out_of_files
from gpubpf.future import Future
from gpubpf.kernel import fresh_thread
from gpubpf.lower import patch_function
from gpubpf.process import limits, traceable
from gpubpf.record import Record, replace
from gpubpf.traced.large_modules import LargeModule, Step

if TYPE_CHECKING:
    from gpubpf.images.assemble import Target
    from gpubpf.images.sidecar import AmdKernel, RegisterUse, Sidecar, Source
    from gpubpf.lower.launch_block import LaunchBlock
    from gpubpf.traced.measurement import Measurement
    from gpubpf.traced.traced_process import TracedProcess

RECENTLY_ENDED = 64  # ended processes whose maps stay in files; older ones are compressed
AHEAD_KERNELS = 256  # kernels of a running process that get copies ahead of a launch
_AHEAD_REQUESTS = 1 << 31  # above the request numbers that agents use
CLOCK_PATIENCE = 1.0  # seconds that WELCOME, and so the program, waits for clock kernels
REGISTERS_PATIENCE = 1.0  # seconds that counting registers waits for the end of an attach
ATTACH_PATIENCE = 60.0  # seconds until a thread that attaches to a process is replaced
SIDECAR_PATIENCE = 900.0  # the same for one that builds sidecars: ptxas may take ten minutes
CACHED_SIDECARS = 32
CACHED_SIDECAR_BYTES = 16 << 20  # a larger sidecar is not cached

T = TypeVar("T")
# (image that a program loaded, its device; None: an AMD GPU) → sidecar.
Instrument = Callable[[bytes, "Target | None"], "Sidecar"]
# (a large module, its device, the kernels to copy; none: all) → sidecar.
InstrumentKernels = Callable[["Source", "Target", Collection[str]], "Sidecar"]
# (sidecar, device, some of its kernels) → register use of these kernels, by mangled name.
CountRegisters = Callable[[Any, "Target | None", Collection[str]], Mapping[str, "RegisterUse"]]


# (address of a context's table in GPU memory, its device) → its patches (images/patches.py).
MakePatches = Callable[[int, "Target"], "Sidecar"]


class SidecarBuilder(Record):
    """The functions that build sidecars.

    instrument: build the sidecar of an image. Called from several threads, once for equal images.
    kernels: build the copies of some kernels of an image whose sidecar has `later`. Called from several threads.
    patches: make the patches for the context with this table, for kernels without PTX; None: such kernels are not measured.
    registers: count the registers of some of a sidecar's kernels. Called when no process waits for it.
    warm_up: called once, while the command starts.
    """

    instrument: Instrument
    registers: CountRegisters = lambda sidecar, target, kernels: {}
    warm_up: Callable[[], object] = lambda: None
    kernels: InstrumentKernels | None = None
    patches: MakePatches | None = None


class DaemonThreadPool:
    """A thread pool that does not delay the tool's exit, unlike ThreadPoolExecutor: it drops unfinished work.

    A worker thread calls `before_each` before each work item. With `drops`, it also drops work that comes after `close`.
    each: the most threads that work for one owner at a time. Owners take turns, so none of them can occupy the pool.
    patience: seconds after which `replace_stuck` replaces a thread that still works on one item."""

    def __init__(
        self,
        count: int,
        before_each: Callable[[], None] = lambda: None,
        drops: bool = False,
        each: int | None = None,
        patience: float = ATTACH_PATIENCE,
    ) -> None:
        self._before_each = before_each
        self._patience = patience
        self._drops = drops
        self._each = math.inf if each is None else each
        # By the owner's identity; the one whose turn is next is first. `_busy`: the threads that work for an owner.
        self._work: OrderedDict[int, deque[Callable[[], None]]] = OrderedDict()
        self._busy: Counter[int] = Counter()
        self._unstarted = count  # threads
        # Thread → when it began its current item (time.monotonic), and the item's owner.
        self._working: dict[int, tuple[float, int]] = {}
        self._replaced = 0  # number of replaced threads that still work
        self._closed = False
        self._changed = threading.Condition()  # guards all of these

    def submit(self, function: Callable[..., T], *arguments: Any, owner: object = None) -> Future[T]:
        """Call `function` in one of the threads. After `close`, call it in this thread, or drop it: the result is a RuntimeError.

        owner: whose work it is. The work of one owner begins in this order."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                self._before_each()
                result = function(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._changed:
            if not self._closed:
                self._start_thread()
                self._work.setdefault(id(owner), deque()).append(run)
                self._changed.notify()
                return future
        if self._drops:
            future.set_exception(RuntimeError("the pool is closed"))
        else:
            run()
        return future

    def close(self) -> None:
        """Let the threads exit after their queued work. Does not wait for them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def replace_stuck(self) -> bool:
        """Replace each thread that has worked on one item for too long by a new thread. Return whether any thread was replaced.

        A process can make a thread wait for ever for memory (`address_space.Memory`). At most limits.STUCK_THREADS threads are
        replaced. If a replaced thread does finish its item, the thread ends."""
        late = time.monotonic() - self._patience
        with self._changed:
            stuck = [thread for thread, (since, _) in self._working.items() if since < late]
            for thread in stuck[: limits.STUCK_THREADS - self._replaced]:
                _, owner = self._working.pop(thread)
                self._leave(owner)
                self._replaced += 1
                self._unstarted += 1
            if stuck or self._work:  # an idle pool is not woken
                for _ in range(len(self._work)):
                    self._start_thread()
                self._changed.notify_all()
        return bool(stuck)

    def _start_thread(self) -> None:
        if self._unstarted:
            try:
                fresh_thread.start(self._serve, "gpubpf-worker")
            except fresh_thread.NoThread:
                return  # it is tried again for the next work, and by `replace_stuck`
            self._unstarted -= 1

    def _serve(self) -> None:
        own, replaced = threading.get_ident(), False
        while not replaced:
            with self._changed:
                while (owner := self._next_owner()) is None:
                    if self._closed and not self._work:
                        return
                    self._changed.wait()
                work = self._work[owner].popleft()
                self._busy[owner] += 1
                self._work.move_to_end(owner)
                if not self._work[owner]:
                    del self._work[owner]
                self._working[own] = time.monotonic(), owner
            work()
            del work  # it refers to its arguments and its result
            with self._changed:
                replaced = self._working.pop(own, None) is None
                if replaced:
                    self._replaced -= 1
                else:
                    self._leave(owner)
                self._changed.notify_all()

    def _leave(self, owner: int) -> None:
        """Record that a thread no longer works for an owner."""
        self._busy[owner] -= 1
        if not self._busy[owner]:
            del self._busy[owner]

    def _next_owner(self) -> int | None:
        return next((owner for owner in self._work if self._busy[owner] < self._each), None)


def with_causes(sidecar: Sidecar, image: protocol.Image) -> Sidecar:
    """Return the sidecar of an image; its refusals say which inputs of the image had no PTX, if that is known."""
    from gpubpf.images import device_link, fatbin

    if image.linked < 2 and not image.lto:
        return sidecar
    cause = device_link.LTO if image.lto else fatbin.LINKED
    causes = {
        name: cause if reason == fatbin.SASS_ONLY else reason for name, reason in sidecar.refusals.items()
    }
    return replace(sidecar, refusals=causes)


class BackgroundWork:
    """The slow work for all processes. The public methods return at once, and are called from the server's thread.

    `_cache_lock` guards the cache of sidecars; `Measurement.lock` guards what changes in a process. `loaded`: see `Listener`.
    on_ready: called when a running process waits for fewer kernels."""

    def __init__(
        self,
        measurement: Measurement,
        builder: SidecarBuilder,
        loaded: Callable[[str, bytes], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._measurement = measurement
        self._instrument = builder.instrument
        self._instrument_kernels = builder.kernels
        self._patches = builder.patches
        self._count_registers = builder.registers
        self._loaded = loaded
        self._on_ready = on_ready
        settle = measurement.privileges.apply
        self.sidecar_threads = DaemonThreadPool(4, settle, each=2, patience=SIDECAR_PATIENCE)
        # Separate pools, so that a starting process waits neither for another's ptxas nor for the removal of another's probes.
        # A process can keep a thread waiting for its memory, so processes of one user leave a thread for those of others.
        self._attach_threads = DaemonThreadPool(4, settle, each=3)
        self._users: dict[int, object] = {}  # owners of work, by user ID
        self._cleanup_threads = DaemonThreadPool(2, settle)
        # Launched modules have priority, so modules that may be launched get only one thread.
        self._ahead_threads = DaemonThreadPool(1, settle, patience=SIDECAR_PATIENCE)
        self._clock_threads = DaemonThreadPool(1, settle)
        self._register_threads = DaemonThreadPool(4, settle, drops=True)
        # By the driver's CUDA version: the kernels assembled so far, and when all are. `_cache_lock` guards the dictionary.
        self._clock_kernels: dict[int, tuple[dict[int, bytes], Future[None]]] = {}
        self._ahead_requests = itertools.count(_AHEAD_REQUESTS)
        self.joined = threading.Event()  # set once the session has attached, which work ahead would delay
        self._ended: deque[TracedProcess] = deque()  # ended processes whose snapshots are still in files
        self._cache: OrderedDict[tuple[bytes, Target | None], Future[Sidecar]] = OrderedDict()
        self._cache_lock = threading.Lock()

    def close(self) -> None:
        for workers in (
            self.sidecar_threads,
            self._attach_threads,
            self._cleanup_threads,
            self._ahead_threads,
            self._clock_threads,
            self._register_threads,
        ):
            workers.close()

    def replace_stuck(self) -> None:
        """Replace threads that a process keeps waiting for its memory. Give a notice the first time."""
        pools = self.sidecar_threads, self._attach_threads, self._cleanup_threads, self._ahead_threads
        stuck = [pool.replace_stuck() for pool in pools]
        if any(stuck):
            self._measurement.note_once(
                "work for a process does not end: perhaps its memory cannot be read (FUSE?); its launches may be missing"
            )

    def make_sidecar(self, process: TracedProcess, image: protocol.Image, file: int) -> None:
        """Build and send the sidecar of an image that a process loads. Takes ownership of `file`, which contains the image."""
        self.sidecar_threads.submit(self._make_sidecar, process, image, file, owner=process)

    def make_found(self, process: TracedProcess, found: protocol.Found) -> None:
        """Build and send the sidecar of a module that was loaded before the agent."""
        self.sidecar_threads.submit(self._make_found, process, found, owner=process)

    def make_wanted(self, process: TracedProcess, wanted: protocol.WantedKernel) -> None:
        """Build and send the copy of a kernel of a large module."""
        self.sidecar_threads.submit(self._make_wanted, process, wanted, owner=process)

    def make_patches(self, process: TracedProcess, table: protocol.PatchTable) -> None:
        """Build and send the patches for a context."""
        self.sidecar_threads.submit(self._make_patches, process, table, owner=process)

    def make_ahead(self, process: TracedProcess, capabilities: Sequence[int]) -> None:
        """Build the sidecars of modules that a running process may have loaded, so that their next launches are instrumented.

        capabilities: the compute capabilities of its GPUs."""
        self._ahead_threads.submit(self._make_ahead, process, capabilities)

    def welcome(self, process: TracedProcess, stubs: int | None) -> None:
        """Attach host programs and send WELCOME. Takes ownership of `stubs`, the file that host programs are attached to."""
        owner = self._user_of(process)
        self._attach_threads.submit(
            _welcome, self._measurement, process, stubs, self.clock_kernels, owner=owner
        )

    def patch(self, process: TracedProcess, file: int) -> None:
        """Write the hooks into a running process, and tell its agent. Takes ownership of `file`, the list of patches."""
        self._attach_threads.submit(_patch, self._measurement, process, file, owner=self._user_of(process))

    def _user_of(self, process: TracedProcess) -> object:
        return self._users.setdefault(process.user, object())

    def end(self, process: TracedProcess) -> None:
        """Detach the host programs of a disconnected process. Compress the oldest one's maps if there are more than RECENTLY_ENDED."""
        process.__dict__.pop("mapped", None)
        process.large_modules.clear()
        self._cleanup_threads.submit(process.close_host)
        self._ended.append(process)
        if len(self._ended) > RECENTLY_ENDED:
            specs, lock = self._measurement.agent_config.maps, self._measurement.lock
            self._cleanup_threads.submit(self._ended.popleft().compress_snapshots, specs, lock)

    def clock_kernels(self, driver: int) -> Mapping[int, bytes]:
        """Return AgentConfig.clock_kernels for a driver of this CUDA version: those that are assembled within CLOCK_PATIENCE.

        Compiling PTX in the process instead would take time, may be disabled, and may lack its library."""
        if self._measurement.device.kind != "gpu":
            return {}
        with self._cache_lock:
            if driver not in self._clock_kernels:
                made: dict[int, bytes] = {}
                self._clock_kernels[driver] = (
                    made,
                    self._clock_threads.submit(_make_clock_kernels, made, driver),
                )
            made, finished = self._clock_kernels[driver]
        finished.wait(CLOCK_PATIENCE)
        return dict(made)

    def _sidecar(self, data: bytes, target: Target | None) -> Sidecar:
        """Return the sidecar of an image, from the cache if a process has recently loaded the same image."""
        key = (digest.sha256(data).digest(), target)
        with self._cache_lock:
            known = self._cache.get(key)
            future = known or self._cache.setdefault(key, Future())
            self._cache.move_to_end(key)
            while len(self._cache) > CACHED_SIDECARS:
                self._cache.popitem(last=False)
        if known is not None:
            return known.result()
        try:
            sidecar = self._instrument(data, target)
        except BaseException as error:
            future.set_exception(error)
            self._drop_cached(key)
            raise
        future.set_result(sidecar)
        if len(sidecar.image) > CACHED_SIDECAR_BYTES:
            self._drop_cached(key)
        return sidecar

    def _drop_cached(self, key: tuple[bytes, Target | None]) -> None:
        with self._cache_lock:
            self._cache.pop(key, None)

    def _make_sidecar(self, process: TracedProcess, image: protocol.Image, file: int) -> None:
        def make(target: Target | None) -> Sidecar:
            from gpubpf.images import instrument  # may also fail, because importing opens a file

            if target is None:
                data = protocol.read_file(file, image.size)
                self._loaded(process.comm, data)
                return self._sidecar(data, None)
            data = process.mapped.with_ptx(protocol.read_file(file, image.size))
            if image.ptx:
                texts = protocol.read_file(file, image.ptx, image.size)
                data = instrument.made_from(data, texts, image.linked)
            self._loaded(process.comm, data)
            sidecar = self._sidecar(data, target)
            return with_causes(sidecar, image)

        try:
            self._answer(process, image, make)
        finally:
            os.close(file)

    def _make_found(self, process: TracedProcess, found: protocol.Found) -> None:
        def make(target: Target | None) -> Sidecar:
            assert target is not None  # only agents for CUDA send FOUND
            data, reasons = process.mapped.find(found, target)
            sidecar = self._sidecar(data or b"", target)
            if sidecar.later is not None:
                sidecar = self._first_of(sidecar, [kernel.name for kernel in found.kernels], target)
            refusals = {name: reason for name, reason in reasons.items() if self._measurement.matches(name)}
            entries = tuple(dict.fromkeys((*sidecar.entries, *reasons)))
            kernels = tuple(kernel for kernel in sidecar.kernels if kernel.name not in reasons)
            refusals = {**sidecar.refusals, **refusals}
            return replace(sidecar, kernels=kernels, refusals=refusals, entries=entries)

        self._answer(process, found, make)

    def _first_of(self, sidecar: Sidecar, names: Collection[str], target: Target) -> Sidecar:
        """Return a large module's sidecar with the copies of some of its kernels, which have been launched."""
        later, instrument = sidecar.later, self._instrument_kernels
        assert later is not None and instrument is not None
        names = [name for name in names if name in later.kernels]
        if not names:
            return sidecar
        kept = tuple(name for name in later.kernels if name not in names)
        return replace(instrument(later.source, target, names), later=replace(later, kernels=kept))

    def _make_wanted(self, process: TracedProcess, wanted: protocol.WantedKernel) -> None:
        module = process.large_modules.get(wanted.module)
        step = module.launched(wanted.name) if module is not None else Step.NOTHING

        def make(target: Target | None) -> Sidecar:
            from gpubpf.images.sidecar import Sidecar

            if step not in (Step.ONE, Step.ALL):
                return Sidecar()
            assert module is not None and self._instrument_kernels is not None and target is not None
            return self._instrument_kernels(module.source, target, [wanted.name] if step is Step.ONE else ())

        if module is not None and step is Step.WAIT:
            module.all.add_done_callback(lambda _: self._answer(process, wanted, make))
            return
        self._answer(process, wanted, make)
        if module is not None and step is Step.ALL:
            module.all.set_result(None)

    def _make_patches(self, process: TracedProcess, table: protocol.PatchTable) -> None:
        def make(target: Target | None) -> Sidecar:
            if self._patches is None or target is None:
                raise Error("patches were not asked for")
            return self._patches(table.address, target)

        self._answer(process, table, make)

    def _make_ahead(self, process: TracedProcess, capabilities: Sequence[int]) -> None:
        self.joined.wait()
        matches, device = self._measurement.matches, self._measurement.device.kind
        try:
            from gpubpf.images.assemble import Target

            work = []
            for cc in capabilities:
                target = Target(device, divmod(cc, 10), process.driver_cuda)
                for data, kernels in process.mapped.modules(matches, target, AHEAD_KERNELS):
                    process.loadable = True
                    with self._measurement.lock:
                        process.entries.update(kernels)
                    work.append((next(self._ahead_requests), cc, target, data))
                    self._prepare(process, work[-1][0], kernels)
            self._prepare(process, 0, ())
            for request, cc, target, data in work:
                self._make_one_ahead(process, request, cc, target, data)
        finally:
            self._prepare(process, 0, ())

    def _make_one_ahead(
        self, process: TracedProcess, request: int, cc: int, target: Target, data: bytes
    ) -> None:
        """Send the sidecar of a module that may have been loaded. Errors are reported when the module is launched."""
        sent: int | None = None
        try:
            sidecar = self._sidecar(data, target)
            if sidecar.kernels:
                # The answer to the module's load will have the builds; these copies only wait for their module.
                message, sent = _encode(self._measurement, request, sidecar, {}, cc)
                process.send(message, sent)
        finally:
            if sent is None:
                self._prepare(process, request, ())
            else:
                os.close(sent)

    def _prepare(self, process: TracedProcess, request: int, kernels: Iterable[str]) -> None:
        """Record the kernels whose copies a request will make ready. No kernels: the request is done."""
        with self._measurement.lock:
            if process.disconnected:
                return  # copies that were not ready at the disconnect will never be ready
            if kernels:
                process.preparing[request] = frozenset(kernels)
                return
            process.preparing.pop(request, None)
            self._measurement.lock.notify_all()
        self._on_ready()

    def _target(
        self,
        process: TracedProcess,
        module: protocol.Image | protocol.Found | protocol.WantedKernel | protocol.PatchTable,
    ) -> Target | None:
        if process.vendor == Vendor.AMD:
            return None
        from gpubpf.images.assemble import Target

        return Target(
            self._measurement.device.kind, divmod(module.compute_capability, 10), process.driver_cuda
        )

    def _answer(
        self,
        process: TracedProcess,
        module: protocol.Image | protocol.Found | protocol.WantedKernel | protocol.PatchTable,
        make: Callable[[Target | None], Sidecar],
    ) -> None:
        """Send the sidecar that `make` returns for the process's device; an empty one if it raises."""
        answer = protocol.sidecar(module.request, 0, (), {}, ())
        sent: int | None = None
        sidecar: Sidecar | None = None
        try:
            target = self._target(process, module)
            sidecar = make(target)
            large = LargeModule(sidecar.later) if sidecar.later is not None else None
            with self._measurement.lock:
                needed = process.bytes_to_keep(sidecar)
                process.module_bytes += needed
                self._measurement.modules.take(process.user, needed)
                process.refusals.update(sidecar.refusals)
                process.matched.update(sidecar.refusals)
                process.matched.update(kernel.name for kernel in sidecar.kernels)
                process.entries.update(sidecar.entries)
                if large is not None and sidecar.later is not None:
                    process.matched.update(sidecar.later.kernels)
                    process.later.update(sidecar.later.kernels)
                    process.large_modules[module.request] = large
                builds = process.add_sites(sidecar)
                if sidecar.kernels and module.request in process.preparing:
                    process.preparing[module.request] = frozenset(k.name for k in sidecar.kernels)
            first = large.first if large is not None else ()
            answer, sent = _encode(self._measurement, module.request, sidecar, builds, first=first)
        except Error as error:
            self._measurement.note(f"{process.label}: a module is not instrumented: {error}")
        except ImportError as error:
            self._measurement.note_once(f"modules are not instrumented: {missing_package(error)}")
        except Exception as error:  # a bug, or out of memory or files
            why = (
                in_words(error) if out_of_files(error) else f"internal error, {type(error).__name__}: {error}"
            )
            self._measurement.note(f"{process.label}: a module is not instrumented: {why}")
        finally:
            process.send(answer, sent)
            with self._measurement.lock:
                process.pending_images -= 1
                process.image_answered = True
                self._measurement.lock.notify_all()
            if module.request in process.preparing and (sent is None or not sidecar or not sidecar.kernels):
                self._prepare(process, module.request, ())
            if sent is not None:
                os.close(sent)
        if sidecar is not None and sidecar.kernels and self._measurement.follow.registers:
            process.registers.add(
                [kernel.name for kernel in sidecar.kernels],
                lambda kernels: self._register_threads.submit(
                    self._registers, process, sidecar, target, kernels
                ),
            )

    def _registers(
        self, process: TracedProcess, sidecar: Sidecar, target: Target | None, kernels: Collection[str]
    ) -> Mapping[str, RegisterUse]:
        """Count the registers of these kernels. This waits until a running process is reported as attached, which it would delay."""
        with self._measurement.lock:
            self._measurement.lock.wait_for(
                lambda: not process.attached or process.announced or process.disconnected, REGISTERS_PATIENCE
            )
        return self._count_registers(sidecar, target, kernels)


def _patch(measurement: Measurement, process: TracedProcess, file: int) -> None:
    """See `BackgroundWork.patch`."""
    try:
        from gpubpf.attach import patching

        patches = patching.read_patches(file)
        process.stood_ns += int(patching.apply(process.pid, patches) * 1e9)
        process.send(protocol.patched())
    except (Error, OSError) as error:
        files = isinstance(error, traceable.OutOfFiles) or out_of_files(error)
        measurement.drop(process, in_words(error), lacking_files=files)
        process.socket.shutdown()  # the agent waits for the answer
    finally:
        os.close(file)


def _encode(
    measurement: Measurement,
    request: int,
    sidecar: Sidecar,
    builds: Mapping[str, int],
    ahead: int | None = None,
    first: Sequence[str] = (),
) -> tuple[bytes, int]:
    """Return the message, and a new file with the sidecar's image, which the caller closes.

    builds: see `TracedProcess.add_sites`. ahead, first: see `protocol.sidecar`."""
    layouts = [
        protocol.KernelLayout(
            kernel.name,
            tuple(size for _, size in kernel.parameters),
            kernel.block_offset,
            _block(measurement, kernel.block, kernel.programs),
            tuple(
                BlockField(measurement.numbers[name], offset, kernel.block.capacities.get(name))
                for name, offset in kernel.block.bases.items()
            ),
            kernel.block.pid_tgid,
            kernel.waits,
            kernel.site_count,
            kernel.block.kernel,
            kernel.block.epoch,
            kernel.limited,
            kernel.block.shape,
            kernel.block.tick,
            build=builds.get(kernel.name, 0),
            executions=kernel.block.executions,
            patched=kernel.patched,
            numbered=kernel.numbered,
            **_of_amd(kernel.amd),
        )
        for kernel in sidecar.kernels
    ]
    variables = [
        protocol.VariableSlot(v.name, v.index, v.copied, v.kernels, v.entry, v.refusal)
        for v in sidecar.variables
    ]
    file = os.memfd_create("gpubpf-sidecar")
    with open(file, "wb", closefd=False) as out:
        out.write(sidecar.image)
    size = len(sidecar.image) if layouts or sidecar.patches else 0
    return protocol.sidecar(
        request,
        size,
        layouts,
        sidecar.refusals,
        variables,
        ahead,
        sidecar.launched,
        () if sidecar.later is None else sidecar.later.kernels,
        first,
        sidecar.patches,
    ), file


def _of_amd(kernel: AmdKernel | None) -> dict[str, Any]:
    if kernel is None:
        return {}
    return {
        "wave": kernel.wave,
        "compute_units": kernel.compute_units,
        "most_threads": kernel.most_threads,
        "original_threads": kernel.original_threads,
        "references": kernel.references,
    }


def _block(measurement: Measurement, block: LaunchBlock, programs: int) -> bytes:
    data = bytearray(block.size)
    data[patch_function.WANTED : patch_function.WANTED + 4] = programs.to_bytes(4, "little")
    for name, (offset, size) in block.params.items():
        data[offset : offset + size] = measurement.params.get(name, b"").ljust(size, b"\0")[:size]
    return bytes(data)


def _welcome(
    measurement: Measurement,
    process: TracedProcess,
    stubs: int | None,
    clock_kernels: Callable[[int], Mapping[int, bytes]],
) -> None:
    """See `BackgroundWork.welcome`."""
    config = replace(
        measurement.agent_config,
        maps=measurement.maps_of(process.vendor),
        graphs=measurement.follow.instruments_graphs(process.driver_cuda),
    )
    if config.log_records:
        config = replace(config, clock_kernels=clock_kernels(process.driver_cuda))
    shared = measurement.host is None
    try:
        if measurement.host is not None:
            host = measurement.host.process(process.user)
            for name, file in host.files.items():
                number = measurement.numbers[name]
                process.send(protocol.shared(number, config.maps[number].fixed), file)
            shared = True
            if stubs is not None and measurement.host.in_kernel:
                host.attach(stubs)
            if measurement.host.in_kernel:
                host.attach_functions(process.pid)
            with measurement.lock:
                process.host = host
            if process.disconnected:
                process.close_host()
    except (Error, OSError) as error:
        # Device programs need the maps that they share with host programs.
        if out_of_files(error) and not shared:
            measurement.drop(process, in_words(error), lacking_files=True)
            process.socket.shutdown()
        else:
            measurement.note(f"{process.label}: host programs do not run at its launches: {in_words(error)}")
            config = replace(config, host=(), host_points=())
    finally:
        if stubs is not None:
            os.close(stubs)
        process.send(protocol.welcome(config, process.number))
        process.welcomed = True


def _make_clock_kernels(made: dict[int, bytes], driver: int) -> None:
    """Assemble the clock kernels. Each is added to `made` as soon as it is ready."""
    from gpubpf.images import assemble

    made.update(assemble.for_each_generation(own_files.read(CLOCK_KERNEL).decode(), driver))
