"""What processes say and hand over, what Linux and drivers say of them, and caches. See targets.py."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from fuzz.targets import (
    PTX,
    cubins,
    log_seeds,
    memory_file,
    message_seeds,
    overlapping_sections,
    patch_seeds,
    ring_seeds,
    target,
)
from gpubpf import cache
from gpubpf.agent import protocol
from gpubpf.agent.definitions import CONTROL, LEAST_CAPACITY, PROTOCOL_VERSION, Message, Place, SnapshotFlag
from gpubpf.attach import patching
from gpubpf.calls import driver_log, kfd
from gpubpf.calls.device_times import dispatches
from gpubpf.ebpf import maps
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import Error, ImageError
from gpubpf.exporter import gpu_time
from gpubpf.images import assemble, fatbin
from gpubpf.images.triton import TritonCache
from gpubpf.kernel import seccomp
from gpubpf.process import containers, limits
from gpubpf.process.target_socket import TargetSocket
from gpubpf.session import readout, summary
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.threads import thread_counts
from gpubpf.traced.device import Device
from gpubpf.traced.measurement import Follow, Measurement, Plan, Targets, is_ring
from gpubpf.traced.server import Server
from gpubpf.traced.traced_process import TracedProcess
from gpubpf.traced.workers import BackgroundWork

# --- the messages of one agent ----------------------------------------------------------------------------

# One step of an agent: the kind of a message, which file comes with it (and how often it comes again, in the upper four bits), and the
# sizes of its payload and of that file's contents. The payload and the contents follow.
STEP = struct.Struct("<BBHH")
READ = 0xFF  # the kind of a step in which the tool reads everything
MOST_READINGS = 8
LOG_RECORDS = 16
_UNIT = 1 << 16

_EVERY = ((0, (1 << 32) - 1),) * 3
_TALLY = {"fields": [["runs", "<u8", 0], ["work", "<u8", 8]], "size": 16}
DEFINITIONS = (
    MapDefinition("tallies", "thread_array", 4, 16, 1, "<u4", _TALLY),
    MapDefinition("names", "hash", 4, 8, 8, "<u4", "<u8"),
    MapDefinition("sites", "site_array", 4, 8, 1, "<u4", "<u8"),
    MapDefinition("events", "ringbuf", 0, 8, 4096, None, "<u8"),
)


def _sealed(data: bytes) -> int:
    file = memory_file(data)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, patching.SEALS)
    return file


def _large(data: bytes) -> int:
    """Return a file large enough for a ring, and all but its beginning without memory."""
    file = memory_file(data)
    os.truncate(file, 4 * _UNIT)
    return file


def _write_only(data: bytes) -> int:
    file = memory_file(data)
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_CLOEXEC)
    finally:
        os.close(file)


def _pipe(data: bytes) -> int:
    file, end = os.pipe()
    os.close(end)
    return file


FILES: tuple[Callable[[bytes], int], ...] = (
    memory_file,
    _large,
    _sealed,
    _write_only,
    _pipe,
    lambda data: os.memfd_create("fuzz", os.MFD_HUGETLB | os.MFD_CLOEXEC),
    lambda data: os.open("/", os.O_RDONLY | os.O_DIRECTORY),
    lambda data: os.open("/dev/null", os.O_RDWR),
)


class _Background:
    """Does at once, and without an answer, what `BackgroundWork` does with what a process sends."""

    def make_sidecar(self, process: TracedProcess, image: protocol.Image, file: int) -> None:
        protocol.read_file(file, min(image.size, _UNIT))
        os.close(file)
        process.pending_images -= 1

    def make_found(self, process: TracedProcess, found: protocol.Found) -> None:
        process.pending_images -= 1

    def make_wanted(self, process: TracedProcess, wanted: protocol.WantedKernel) -> None:
        process.pending_images -= 1

    def patch(self, process: TracedProcess, file: int) -> None:
        with contextlib.suppress(Error):
            patching.read_patches(file)
        os.close(file)

    def welcome(self, process: TracedProcess, stubs: int | None) -> None:
        if stubs is not None:
            os.close(stubs)

    def make_ahead(self, process: TracedProcess, capabilities: object) -> None:
        process.preparing.pop(0, None)

    def end(self, process: TracedProcess) -> None:
        process.close_host()


def _step(kind: int, payload: bytes = b"", file: int = 0, contents: bytes = b"") -> bytes:
    return STEP.pack(kind, file, len(payload), len(contents)) + payload + contents


def conversation_seeds() -> Iterable[bytes]:
    frames = {frame[0]: frame[8:] for frame in message_seeds()}
    (log,), (ring,), (patches,) = log_seeds(), ring_seeds(), patch_seeds()
    frames[Message.HELLO] = struct.pack("<3I4s", PROTOCOL_VERSION, 12080, 4, b"name") + bytes(4)
    frames[Message.LOG] = struct.pack("<Q", LOG_RECORDS)
    frames[Message.HOOKED] = struct.pack("<II", 0, 0) + frames[Message.HOOKED][-8:]
    control = bytes(CONTROL.size) + bytes(range(256)) * 8
    begin = [
        _step(Message.HELLO, frames[Message.HELLO], 1, control),
        _step(Message.STUBS, struct.pack("<I", 1), 1),
        _step(Message.HOOKED, frames[Message.HOOKED]),
        *(_step(Message.NAME, struct.pack("<II", slot, 5) + b"name%d" % slot) for slot in range(3)),
        _step(Message.CONTEXT, frames[Message.CONTEXT]),
        _step(Message.STACK, frames[Message.STACK]),
        _step(Message.LOG, frames[Message.LOG], 1, log),
    ]
    images = [
        _step(Message.IMAGE, frames[Message.IMAGE], 1, PTX),
        _step(Message.FOUND, frames[Message.FOUND]),
        _step(Message.KERNEL, frames[Message.KERNEL]),
        _step(Message.READY, frames[Message.READY]),
        _step(Message.REFUSED, frames[Message.NAME]),
        _step(Message.NO_ROOM, struct.pack("<IIQQII", 1, 32, 4, 2, 40, 32)),
        _step(
            Message.KERNEL_FAILED,
            struct.pack("<4I5sI4s7IQ", 0, 700, 1, 5, b"name1", 4, b"a.cu", 8, *range(6), 64),
        ),
        _step(Message.DRAINED, frames[Message.DRAINED]),
        _step(Message.NO_FILE),
    ]
    place = [3, 0, 0, Place.HOST_RING, 1, LEAST_CAPACITY, 16]
    rings = [_step(Message.RING, struct.pack("<5IQQ", *place), 2, ring[: _UNIT - 1])]
    place[3] = Place.GPU_RING
    in_gpu = _step(Message.RING, struct.pack("<5IQQ", *place))
    # Two threads of slot 1, a hash, a site array of 4 sites; a ring in the pages behind them.
    hashed = maps.storage_size(DEFINITIONS[1])
    sizes = maps.storage_size(DEFINITIONS[0], 2), maps.storage_size(DEFINITIONS[2], 4)
    begun, copied = 2 * sum(sizes) + hashed, protocol.ring(struct.pack("<5IQQ", *place)).size

    def snapshot(flags: int, ring: int) -> bytes:
        """Return the payload: an instance, a shared map, and a ring if there is one."""
        size = 4096 + copied if ring else begun
        parts = [
            struct.pack("<IIIIQQ", 1, 0, 0, flags, size, 123),
            struct.pack("<I 2I3I3IQ", 1, 1, 0, 1, 1, 1, 2, 1, 1, 5),
            struct.pack("<I IQQQ IQQQ", 2, 0, 0, sizes[0], 2, 2, sizes[0], sizes[1], 4),
            struct.pack("<I IQQ", 1, 1, sum(sizes), hashed),
            struct.pack("<I", ring) + ring * struct.pack("<IQQQ", 3, 1024, 4096, copied),
        ]
        return b"".join(parts)

    memory = bytes(sum(sizes)) + maps.initial(DEFINITIONS[1]) + bytes(64)
    read = [
        _step(Message.SNAPSHOT, snapshot(SnapshotFlag.RUNNING, 0), 1, memory),
        _step(READ),
        _step(Message.SNAPSHOT, snapshot(0, 0), 1, memory),
        _step(READ),
    ]
    copy = memory.ljust(4096, b"\0") + ring[: 16 * 1024]
    closed = _step(Message.SNAPSHOT, snapshot(SnapshotFlag.CLOSED, 1), 2, copy)
    yield b"\0" + b"".join((*begin, *images, *rings, *read))
    yield b"\1" + b"".join((*begin, *images, _step(Message.PATCHES, b"", 3, patches), *read))
    yield b"\2" + b"".join((*begin, in_gpu, _step(READ), closed, _step(READ), *read))


def conversation_hard() -> Iterable[bytes]:
    """Too many files; a grid without threads; each kind of file with each message that has one, read as long as it runs, and later."""
    unneeded = _step(Message.DRAINED, bytes(8), 0x71)
    yield b"\0" + 2 * unneeded + _step(Message.PATCHES, b"", 0x71)
    grid = struct.pack(
        "<4I2Q I 8IQ I I3Q 2I",
        1,
        0,
        0,
        0,
        16,
        1,
        1,
        1,
        0,
        *[0xFFFFFFFF] * 3,
        1,
        1,
        0,
        5,
        1,
        0,
        0,
        16,
        0,
        0,
        0,
    )
    yield b"\0" + _step(Message.SNAPSHOT, grid, 1, bytes(16)) + _step(READ)
    for seed in conversation_seeds():
        for file in range(1, len(FILES) + 1):
            made, at = bytearray(seed), 1
            while at < len(seed):
                _, sent, payload, contents = STEP.unpack_from(seed, at)
                if sent:
                    made[at + 1] = file
                at += STEP.size + payload + contents
            yield bytes(made)


def _read_all(measurement: Measurement) -> None:
    """Read what a tool reads in an interval and at its end."""
    names = [d.name for d in measurement.definitions if not is_ring(d)]
    for name in names:
        for instance in readout.instances(measurement, name):
            instance.array  # noqa: B018  decodes it
    for reading in readout.readings(measurement, *names):
        assert reading.pid
    threads = thread_counts.Reader(_EVERY, ((0, 0), *_EVERY[1:]), since_last=False)
    counts = threads.read(
        cast(Any, SimpleNamespace(instances=functools.partial(readout.instances, measurement)))
    )
    list(thread_counts.lines(counts, "launches", "thread", 10, OwnerColumns(), True))
    readout.rings(measurement, "events")
    readout.ring_counts(measurement, "events")
    readout.logs(measurement)
    summary.summary(measurement)
    summary.launches_by_comm(measurement)
    for process, launches in summary.unread_launches(measurement):
        summary.describe_loss(measurement, process, launches)
    for process in (*summary.partly_counted(measurement), *summary.ended_while_running(measurement)):
        assert process.label


@target(seeds=conversation_seeds, hard=conversation_hard)
def conversation(data: bytes) -> None:
    """Handle an agent's messages in any order, with files of any kind, and read what a tool reads from such a process."""
    before = set(os.listdir("/proc/self/fd"))
    _converse(data)
    # Fewer is no defect: what others left open may be closed meanwhile, when Python finds it. Files of the process are closed by a
    # thread (target_socket.discard).
    until = time.monotonic() + 10
    while not set(os.listdir("/proc/self/fd")) <= before:
        assert time.monotonic() < until
        time.sleep(0.001)


def _converse(data: bytes) -> None:
    options = data[0] if data else 0
    follow = Follow(log_records=LOG_RECORDS, pump=1, ring_in_gpu=bool(options & 2), ring_size=_UNIT)
    measurement = Measurement(
        Targets(pids=(1,)),
        Plan(Device("sim"), DEFINITIONS, follow=follow, accesses=True),
        lambda text: None,
    )
    background = cast(BackgroundWork, _Background())
    server = Server(measurement, background, lambda process: None, lambda: None, lambda: None)
    peer, connection = socket.socketpair()
    process: Any = None
    try:
        peer.setblocking(False)
        process = server._admit(TargetSocket(connection), os.getpid(), os.getuid())
        process.attached = bool(options & 1)
        server._newly_admitted.get()
        at, alive, readings = 1, True, 0
        while alive and at + STEP.size <= len(data):
            kind, sent, length, contents = STEP.unpack_from(data, at)
            at += STEP.size
            payload, rest = data[at : at + length], data[at + length : at + length + contents]
            at += length + contents
            if kind == READ:
                readings += 1
                if readings <= MOST_READINGS:
                    process.buffer_log()
                    _read_all(measurement)
                    with contextlib.suppress(OSError):
                        peer.recv(1 << 20)
                continue
            if sent:
                file = FILES[(sent & 15) % len(FILES) - 1](rest)
                try:
                    socket.send_fds(peer, [protocol.frame(kind, payload)], [file] * (1 + (sent >> 4) % 8))
                finally:
                    os.close(file)
            else:
                peer.sendall(protocol.frame(kind, payload))
            alive = server._receive(process)
        server._end_process(process)
        process.disconnected_at -= 1
        _read_all(measurement)
        process.compress_snapshots(measurement.agent_config.maps, measurement.lock)
        measurement.stopped = True
        _read_all(measurement)
    finally:
        peer.close()
        connection.close()
        server.close()


# --- an agent in a program that uses ROCm, and a filter of system calls ------------------------------------


def greeting_seeds() -> Iterable[bytes]:
    for state in range(dispatches.STARTED, dispatches.NO_MEMORY + 1):
        yield bytes([1]) + dispatches._HELLO.pack(dispatches.MAGIC, state, 0, 1, 7, b"app")


def greeting_hard() -> Iterable[bytes]:
    """A file of each kind."""
    for file in range(len(FILES)):
        yield bytes([file]) + next(iter(greeting_seeds()))[1:]


@target(OSError, seeds=greeting_seeds, hard=greeting_hard)
def dispatch_greeting(data: bytes) -> None:
    """Take the greeting of an agent in a program that uses ROCm, with a file of any kind, and read that file."""
    before = set(os.listdir("/proc/self/fd"))
    reader = dispatches.Dispatches([], {}, os.geteuid())
    peer, connection = socket.socketpair()
    sent = FILES[data[0] % len(FILES) - 1](b"") if data else memory_file(b"")
    received: list[int] = []
    try:
        with contextlib.suppress(OSError):
            os.truncate(f"/proc/self/fd/{sent}", dispatches._SIZE)
        fcntl.fcntl(sent, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        socket.send_fds(peer, [data[1:] or b"\0"], [sent])
        reader._greet(connection, received)
        try:
            reader.take(last=True)
        except OSError as error:
            raise AssertionError("the tool accepted a file that it cannot read") from error
        assert reader.processes or reader.reason
    finally:
        for file in (sent, *received):
            os.close(file)
        peer.close()
        connection.close()
        reader.close()
        assert set(os.listdir("/proc/self/fd")) <= before


# --- what Linux and AMD's driver say of a process ---------------------------------------------------------


def filter_seeds() -> Iterable[bytes]:
    """Load the number, compare and jump; calculate, store and load; return. As libseccomp and Docker do it."""
    for code in (
        "20 0 0 4  15 0 3 c000003e  20 0 0 0  15 0 1 ca  06 0 0 80000000  06 0 0 7fff0000",
        "20 0 0 10  02 0 0 3  54 0 0 ff  07 0 0 0  60 0 0 3  1c 0 0 0  16 0 0 0",
        "05 0 0 1  06 0 0 0  81 0 0 0  74 0 0 28  34 0 0 0  84 0 0 0  06 0 0 0",
    ):
        numbers = [int(number, 16) for number in code.split()]
        yield b"".join(struct.pack("<HBBI", *numbers[at : at + 4]) for at in range(0, len(numbers), 4))


@target(seeds=filter_seeds)
def system_call_filter(data: bytes) -> None:
    """Run a filter of system calls that a process has set, for the agent's calls."""
    seccomp.fatal_call([data[: len(data) // 8 * 8]])


def driver_event_seeds() -> Iterable[bytes]:
    yield b"\n".join(
        (
            b"9 1000 -7 3f1a 0", b"a 2000 -7 3f1a", b"a 2500 -7 3f1a R", b"5 3000 -7 @7f00(40) 0->3f1a 0:0 1",
            b"6 4000 -7 @7f00(40) 0->3f1a 1", b"7 4100 -7 @7f00(3f1a) W", b"8 4200 -7 @7f00(3f1a) M",
            b"b 5000 -7 @7f00(40) 3f1a 2", b"1 7:app", b"2 3f1a:2", b"3 3f1a", b"4 0", b"",
        )
    )  # fmt: skip


def driver_event_hard() -> Iterable[bytes]:
    for line in (b"9 %s -7 3f1a 0\n", b"9 1 -%s 3f1a 0\n", b"9 1 -7 3f1a %s\n", b"1 %s:app\n", b"%s 1 -7 \n"):
        yield line % (b"1" * 5000)


@target(seeds=driver_event_seeds, hard=driver_event_hard)
def driver_events(data: bytes) -> None:
    """Read the events of AMD's driver. A program chooses its own name in them."""
    half = len(data) // 2
    file = memory_file(data[:half])
    os.lseek(file, 0, os.SEEK_SET)
    events = kfd.DriverEvents({0: file})
    log = driver_log.DriverLog(events, report=True)
    try:
        log.read(lambda pid: pid == 7)
        os.pwrite(file, data[half:], half)
        log.read(lambda pid: pid == 7)
        found = [*log.recent, *events.under_way()]
        assert all(event.ns >= 0 for event in found)
        kfd.causes_during(found, 7, 0, 1 << 63)
    finally:
        events.close()


def ptxas_seeds() -> Iterable[bytes]:
    yield b"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'scale' for 'sm_90'
ptxas info    : Function properties for scale
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 26 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
"""


def ptxas_hard() -> Iterable[bytes]:
    (seed,) = ptxas_seeds()
    yield from (seed.replace(number, b"1" * 5000) for number in (b"26", b"8", b"1024"))
    yield from (
        seed + (1 << 20) // len(piece) * piece for piece in (b"1", b"(C7510", b"Compiling entry function '")
    )


@target(seeds=ptxas_seeds, hard=ptxas_hard)
def ptxas_output(data: bytes) -> None:
    """Read what ptxas says of a program's kernels, whose names are in it."""
    text = data.decode("utf-8", "replace")
    assemble.parse_verbose(text)
    assemble.parse_advisories(text)


# --- files that others made ----------------------------------------------------------------------------------


@functools.cache
def _scratch() -> Path:
    """Return a directory for files, which is removed at the end."""
    made = tempfile.TemporaryDirectory(prefix="gpubpf-fuzz-")
    atexit.register(made.cleanup)
    return Path(made.name)


class _TritonCache(TritonCache):
    def _places(self) -> Iterable[str]:
        return [str(_scratch() / "triton"), "/nonexistent", "/dev/null"]


def triton_seeds() -> Iterable[bytes]:
    for cubin in (*cubins(), overlapping_sections(b".text.scale", 2, bytes(64))):
        yield struct.pack("<BBH", 0, 5, len(cubin)) + b"scale" + cubin + PTX
        yield struct.pack("<BBH", 1, 5, len(cubin)) + b"scale" + cubin + PTX


def triton_hard() -> Iterable[bytes]:
    """In place of the cubin, a fatbin of no images and one of two."""
    for images in (0, 2):
        fatbins = struct.pack("<IHHQ", fatbin.FATBIN_MAGIC, 1, 16, 64 * images)
        fatbins += images * struct.pack("<HHIQ", 1, 0x101, 64, 0).ljust(64, b"\0")
        yield struct.pack("<BBH", 0, 5, len(fatbins)) + b"scale" + fatbins + PTX


@target(seeds=triton_seeds, hard=triton_hard)
def triton_cache(data: bytes) -> None:
    """Look for the PTX of a cubin, and for modules with a kernel, in Triton's cache, where a file may be of any kind."""
    kind, length, size = struct.unpack("<BBH", data[:4].ljust(4, b"\0"))
    name = os.fsdecode(data[4 : 4 + length].replace(b"/", b"_").replace(b"\0", b"_")[:200])
    cubin, text = data[4 + length : 4 + length + size], data[4 + length + size :]
    entry = _scratch() / "triton" / "KEY"
    entry.mkdir(parents=True)
    try:
        (entry / f"{name}.cubin").write_bytes(cubin)
        other = entry / f"{name}.ptx"
        match kind:
            case 1:
                os.mkfifo(other)
            case 2:
                other.mkdir()
            case 3:
                other.symlink_to("/dev/zero")
            case _:
                other.write_bytes(text)
        cache = _TritonCache(os.getpid())
        for found in (cache.ptx_of(cubin), cache.ptx_of(cubin + bytes(32))):
            with contextlib.suppress(ImageError):
                assert found is None or kind not in (1, 2, 3)
                assert found is None or isinstance(found.text, str)
        for _, ptx in cache.modules((name, f"{name}_0d1d", "other")):
            with contextlib.suppress(ImageError):
                ptx.read()
    finally:
        shutil.rmtree(entry)


CACHED, CACHED_KEY = b"content", cache.key("fuzz")


@functools.cache
def _cache() -> cache.Cache:
    return cache.Cache(_scratch())


def cache_seeds() -> Iterable[bytes]:
    for key in (CACHED_KEY, cache.key("other")):
        path = _cache().put("fuzz", key, CACHED)
        assert path is not None
        yield path.read_bytes()


@target(seeds=cache_seeds)
def cache_file(data: bytes) -> None:
    """Read a file of the cache: what is returned is a file's content whose digest is right, or nothing.

    The fuzzer sees what digests are compared with, and finds right ones."""
    path = _cache().put("fuzz", CACHED_KEY, CACHED)
    assert path is not None
    path.write_bytes(data)
    found = _cache().get("fuzz", CACHED_KEY)
    if found is not None:
        digest = hashlib.sha256(f"fuzz/{CACHED_KEY}\0".encode() + found).digest()
        assert data == found + digest + b"gpubpf cache 1.\n"


def cgroup_seeds() -> Iterable[bytes]:
    pod, container = b"96dd7de3_0783_4613_a707_e0effc077ef5", b"13a0f64b" * 8
    return [
        b"0::/kubepods.slice/kubepods-pod%s.slice/cri-containerd-%s.scope\n" % (pod, container),
        b"12:memory:/docker/%s\n1:name=systemd:/docker/%s\n" % (container, container),
        b"0::/kubepods/burstable/pod%s/crio-%s" % (pod.replace(b"_", b"-"), container),
        b"0::/system.slice/x.slice:cri-containerd:%s\n0::/" % container,
    ]


def hard_cgroups() -> Iterable[bytes]:
    """As long as a file of a process can be."""
    for piece in (b"/pod", b"/pod" + b"a" * 31, b"-" + b"f" * 64, b"/crio-conmon-", b"0::/a\n", b"::\n"):
        yield b"0::" + piece * (limits.SMALL_FILE // len(piece))


@target(seeds=cgroup_seeds, hard=hard_cgroups)
def cgroup(data: bytes) -> None:
    """Find the container and the pod in a process's cgroup file."""
    found = containers.in_paths(data.decode("utf-8", "replace"))
    assert len(found.id) in (0, 64) and len(found.pod) in (0, 32, 36)
    assert found.id.isascii() and found.pod.isascii()


def gpu_time_seeds() -> Iterable[bytes]:
    turn, time_ = 5 << 44, (1 << 44) - 1
    start, end = turn | (~1_000_000 & time_), turn | 1_000_640
    return [struct.pack("<4Q", 10, 5000, start, end), struct.pack("<4Q", 0, 0, 0, end), bytes(32)]


@target(seeds=gpu_time_seeds)
def gpu_times(data: bytes) -> None:
    """Add up the times of launches in a process's maps: its first two words are sums, then starts and ends alternate."""
    words = np.frombuffer(data[: len(data) // 8 * 8], np.uint64)
    if len(words) < 4:
        return
    launches, ns = map(int, words[:2])
    pairs = words[2 : 2 + (len(words) - 2) // 2 * 2].reshape(-1, 2)
    sums = np.array([(launches, ns)], [("launches", "<u8"), ("ns", "<u8")])
    found = gpu_time._of_shape(pairs[:, 0], np.repeat(pairs[:, 1], 3), sums)
    assert launches <= found.launches <= launches + len(pairs)
    assert ns <= found.ns <= ns + len(pairs) * 3600 * 10**9 and found.step >= 0
