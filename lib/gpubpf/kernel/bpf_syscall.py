"""Use eBPF in the Linux kernel through system calls: create maps, load and attach programs, read ring buffers.

The calls go through ctypes, so a tool with prebuilt programs starts without bcc, clang and kernel headers. Numbers and structures are
those of include/uapi/linux/bpf.h and perf_event.h. All functions raise OSError if the kernel refuses.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpubpf.errors import Error
from gpubpf.kernel import libc
from gpubpf.kernel.libc import bpf, system_call
from gpubpf.record import Record

if TYPE_CHECKING:
    import numpy as np

_MAP_CREATE, _MAP_LOOKUP, _MAP_UPDATE, _MAP_DELETE, _PROG_LOAD = 0, 1, 2, 3, 5
_OBJECT_INFO, _RAW_TRACEPOINT_OPEN, _MAP_FREEZE, _MAP_LOOKUP_BATCH = 15, 17, 22, 24
_LINK_CREATE, _ENABLE_STATISTICS = 28, 32
UPROBE_MULTI = 48  # enum bpf_attach_type: since Linux 6.6
KPROBE, TRACEPOINT, PERF_EVENT, RAW_TRACEPOINT = 2, 5, 7, 17  # enum bpf_prog_type
# enum bpf_map_type
HASH, ARRAY, PERF_EVENT_ARRAY, PERCPU_HASH, PERCPU_ARRAY, LRU_HASH, LRU_PERCPU_HASH, RINGBUF = (
    1,
    2,
    4,
    5,
    6,
    9,
    10,
    27,
)
NO_PREALLOC, CONSTANT, MMAPABLE = (
    1 << 0,
    1 << 7,
    1 << 10,
)  # BPF_F_NO_PREALLOC, BPF_F_RDONLY_PROG, BPF_F_MMAPABLE
_EXISTS = 2  # BPF_EXIST
_NO_BATCHES = 524  # ENOTSUPP: Linux before 5.13 reads no per-CPU array in batches
_PERCPU = (PERCPU_HASH, PERCPU_ARRAY, LRU_PERCPU_HASH)
_LOG_BYTES = 1 << 20
_LOADS = 100  # attempts to load a program; a signal, or a debugger's stop, ends an attempt
# Lines of the verifier's log that only state its position and the registers' contents.
_NO_MESSAGE = r"\d+: |;|from |\d+$|func#|R\d+\w*=|frame\d|caller:|callee:|returning from |to caller "

_PERF_SOFTWARE, _PERF_TRACEPOINT, _PERF_ATTRIBUTES, _PERF_CLOSE_ON_EXEC = 1, 2, 112, 8
_PERF_BY_FREQUENCY = 1 << 10  # the bit `freq` of struct perf_event_attr
_PERF_ENABLE, _PERF_DISABLE, _PERF_SET_BPF = 0x2400, 0x2401, 0x40042408
_KPROBE_TYPE = Path("/sys/bus/event_source/devices/kprobe/type")
_UPROBE_TYPE = Path("/sys/bus/event_source/devices/uprobe/type")
_TRACEFS = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))


class Rejected(OSError):
    """The kernel's verifier rejected a program. `log` is the verifier's log."""

    def __init__(self, error: OSError, log: str) -> None:
        super().__init__(error.errno, error.strerror)
        self.log = log

    def reason(self) -> tuple[str, int | None]:
        """Return the verifier's last message, and the number of the instruction that the message refers to (None: unknown)."""
        lines = [
            s for line in self.log.splitlines() if (s := line.strip()) and not s.startswith("processed ")
        ]
        message = next(
            (line for line in reversed(lines) if not re.match(_NO_MESSAGE, line)),
            lines[-1] if lines else self.strerror or "no reason given",
        )
        at = next((int(m[1]) for line in reversed(lines) if (m := re.match(r"(\d+): \(", line))), None)
        return message, at


# --- maps ---


def possible_cpus() -> int:
    """Return the number of possible CPUs, which is the number of values in an element of a per-CPU map."""
    last = Path("/sys/devices/system/cpu/possible").read_text().strip().split(",")[-1]
    return int(last.split("-")[-1]) + 1


def online_cpus() -> list[int]:
    """Return the numbers of the CPUs that are online."""
    found: list[int] = []
    for part in Path("/sys/devices/system/cpu/online").read_text().strip().split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


def create_map(kind: int, key: int, value: int, entries: int, flags: int = 0, name: str = "") -> int:
    """Create a map. Return its file descriptor. `entries` 0: one per possible CPU. bpftool shows 15 characters of `name`."""
    label = "".join(c for c in name if c.isascii() and (c.isalnum() or c in "_."))[:15].encode()
    attributes = struct.pack("<7I16s", kind, key, value, entries or possible_cpus(), flags, 0, 0, label)
    return bpf(_MAP_CREATE, attributes)[0]


def update(file: int, key: bytes, value: bytes, existing: bool = False) -> None:
    """Set an element of a map. `existing`: raise FileNotFoundError if the map has no such element."""
    k, v = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(value, len(value))
    flags = _EXISTS if existing else 0
    bpf(_MAP_UPDATE, struct.pack("<I4xQQQ", file, ctypes.addressof(k), ctypes.addressof(v), flags))


def freeze(file: int) -> None:
    """Make the elements of a map constant. If its flags have CONSTANT, the verifier then knows them."""
    bpf(_MAP_FREEZE, struct.pack("<I", file))


def delete(file: int, key: bytes) -> None:
    """Delete an element of a map. Raises FileNotFoundError if the map has no such element."""
    k = ctypes.create_string_buffer(key, len(key))
    bpf(_MAP_DELETE, struct.pack("<I4xQ", file, ctypes.addressof(k)))


def lookup(file: int, key: bytes, size: int) -> bytes | None:
    """Return an element's value of `size` bytes (for a per-CPU map: of all CPUs); None if the map has no such element."""
    k, v = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(size)
    try:
        bpf(_MAP_LOOKUP, struct.pack("<I4xQQQ", file, ctypes.addressof(k), ctypes.addressof(v), 0))
    except FileNotFoundError:
        return None
    return v.raw


def value_bytes(kind: int, value_size: int) -> int:
    """Return the size of an element's value as the kernel returns it: for a per-CPU map, of all CPUs, each padded to 8 bytes."""
    return (value_size + 7 & ~7) * possible_cpus() if kind in _PERCPU else value_size


def read_all(file: int, kind: int, key_size: int, value_size: int, entries: int) -> tuple[bytes, bytes]:
    """Return the keys and the values (see `value_bytes`) of all elements, each concatenated. Elements may be missing if the map
    changes meanwhile."""
    size = value_bytes(kind, value_size)
    room = min(entries, 4096) + 1024  # a whole bucket of a hash table must fit
    keys, values = ctypes.create_string_buffer(room * key_size), ctypes.create_string_buffer(room * size)
    at = ctypes.create_string_buffer(max(key_size, 8))
    found: list[tuple[bytes, bytes]] = []
    first = True
    while True:
        where = ctypes.addressof(at)
        attributes = struct.pack(
            "<QQQQIIQQ",
            0 if first else where,
            where,
            ctypes.addressof(keys),
            ctypes.addressof(values),
            room,
            file,
            0,
            0,
        )
        buffer = libc.bpf_attributes(attributes)
        complete = False
        try:
            bpf(_MAP_LOOKUP_BATCH, buffer)
        except FileNotFoundError:
            complete = True
        except OSError as error:
            if error.errno != _NO_BATCHES or kind != PERCPU_ARRAY:
                raise
            indexes = [index.to_bytes(4, "little") for index in range(entries)]
            return b"".join(indexes), b"".join(lookup(file, index, size) or b"" for index in indexes)
        count = int.from_bytes(buffer.raw[32:36], "little")
        found.append((keys.raw[: count * key_size], values.raw[: count * size]))
        first = False
        if complete:
            return b"".join(k for k, _ in found), b"".join(v for _, v in found)


# --- programs ---


def load_program(kind: int, code: bytes, license: str = "GPL", name: str = "", attach: int = 0) -> int:
    """Load a program. Return its file descriptor. `attach`: the expected attach type, for program kinds that need one. Raises Rejected
    if the verifier refuses it."""
    try:
        return _load(kind, code, license, name, attach, None)
    except PermissionError:  # a capability is missing, or the verifier found a leaking pointer
        log = ctypes.create_string_buffer(_LOG_BYTES)
        try:
            return _load(kind, code, license, name, attach, log)
        except OSError as error:
            if log.value:
                raise Rejected(error, log.value.decode("utf-8", "replace")) from None
            raise
    except OSError:
        log = ctypes.create_string_buffer(_LOG_BYTES)
        try:
            return _load(kind, code, license, name, attach, log)
        except OSError as error:
            raise Rejected(error, log.value.decode("utf-8", "replace")) from None


def _load(
    kind: int, code: bytes, license: str, name: str, attach: int, log: ctypes.Array[ctypes.c_char] | None
) -> int:
    instructions = ctypes.create_string_buffer(code, len(code))
    license_ = ctypes.create_string_buffer(license.encode())
    attributes = struct.pack(
        "<IIQQIIQII16sII",
        kind,
        len(code) // 8,
        ctypes.addressof(instructions),
        ctypes.addressof(license_),
        1 if log is not None else 0,
        len(log) if log is not None else 0,
        ctypes.addressof(log) if log is not None else 0,
        0,
        0,
        name[:15].encode(),
        0,
        attach,
    )
    for _ in range(_LOADS - 1):
        with contextlib.suppress(BlockingIOError):  # EAGAIN: a signal came while the verifier ran
            return bpf(_PROG_LOAD, attributes)[0]
    return bpf(_PROG_LOAD, attributes)[0]


class Statistics(Record):
    """The kernel's counts for a program. `runs` and their total time are only counted while statistics are enabled. `missed` is always
    counted: the program was skipped because the CPU was inside another program."""

    runs: int
    total_ns: int
    missed: int


def enable_statistics() -> int:
    """Make the kernel count the runs of every program. Return a file descriptor; closing it stops the count."""
    return bpf(_ENABLE_STATISTICS, struct.pack("<I", 0))[0]


def statistics(program: int) -> Statistics:
    """Return the kernel's counts for a program."""
    info = ctypes.create_string_buffer(232)
    bpf(_OBJECT_INFO, struct.pack("<IIQ", program, len(info), ctypes.addressof(info)))
    return Statistics(*(struct.unpack_from("<QQQ", info.raw, 192)[i] for i in (1, 0, 2)))


# --- attach ---


def uprobe_type() -> int:
    """Return perf_event_open(2)'s event type for uprobes. Raises OSError if the kernel has no uprobes."""
    return int(_UPROBE_TYPE.read_text())


def attach_uprobe(program: int, path: str, offset: int, pid: int = -1) -> int:
    """Attach a KPROBE program to the instruction at `offset` in a file. It runs in any process that executes the instruction.

    `pid`: only in this process. Return a file descriptor; closing it detaches the program. The kernel's probes at returns are not
    used: they put another return address on the stack, where unwinding ends.
    """
    name = ctypes.create_string_buffer(path.encode())
    return _attach(program, uprobe_type(), 0, ctypes.addressof(name), offset, pid)


def kprobe_type() -> int:
    """Return perf_event_open(2)'s event type for kprobes. Raises FileNotFoundError if the kernel has no kprobes."""
    return int(_KPROBE_TYPE.read_text())


def attach_kprobe(program: int, kind: int, function: str, offset: int = 0, returns: bool = False) -> int:
    """Attach a KPROBE program to a function of the kernel, in any process. `kind`: the result of `kprobe_type`.

    `returns`: run it when the function returns. Return a file descriptor; closing it detaches the program."""
    name = ctypes.create_string_buffer(function.encode())
    return _attach(program, kind, int(returns), ctypes.addressof(name), offset)


def attach_software_event(program: int, event: int, count: int, frequency: bool, cpu: int) -> int:
    """Attach a PERF_EVENT program to a software event on one CPU. `event`: of enum perf_sw_ids.

    The program runs at each `count` events; with `frequency`, about `count` times a second. Return a file descriptor; closing it
    detaches the program."""
    flags = _PERF_BY_FREQUENCY if frequency else 0
    return _attach(program, _PERF_SOFTWARE, event, 0, 0, -1, cpu, count, flags)


def link_uprobes(program: int, path: str, offsets: Sequence[int], cookies: Sequence[int]) -> int:
    """Attach a program to many instructions of a file at once: to all or none. Return a file descriptor; closing it detaches.

    `program`: loaded with the attach type UPROBE_MULTI. `cookies`: the results of bpf_get_attach_cookie at each offset.
    """
    name = ctypes.create_string_buffer(path.encode())
    at = (ctypes.c_uint64 * len(offsets))(*offsets)
    values = (ctypes.c_uint64 * len(cookies))(*cookies)
    attributes = struct.pack(
        "<IIIIQQQQIII",
        program,
        0,
        UPROBE_MULTI,
        0,
        ctypes.addressof(name),
        ctypes.addressof(at),
        0,
        ctypes.addressof(values),
        len(offsets),
        0,
        0,
    )
    return bpf(_LINK_CREATE, attributes)[0]


def attach_tracepoint(program: int, number: int) -> int:
    """Attach a TRACEPOINT program to a tracepoint, in any process. Return a file descriptor; closing it detaches the program."""
    return _attach(program, _PERF_TRACEPOINT, number, 0, 0)


def attach_raw_tracepoint(program: int, name: str) -> int:
    """Attach a RAW_TRACEPOINT program, whose context is the array of the tracepoint's arguments, 8 bytes each.

    Unlike a TRACEPOINT program, it also runs if the CPU is inside another program, or if a process there is inside a bpf(2) call for a
    map. Return a file descriptor; closing it detaches the program. Raises FileNotFoundError if there is no such tracepoint.
    """
    text = ctypes.create_string_buffer(name.encode())
    return bpf(_RAW_TRACEPOINT_OPEN, struct.pack("<QI", ctypes.addressof(text), program))[0]


def raw_arguments(name: str, count: int) -> bool:
    """Return whether a raw tracepoint has at least `count` arguments: the kernel refuses programs that read beyond the last one.

    Raises Error if there is no such tracepoint, and PermissionError without the capabilities.
    """
    code = struct.pack("<BBhi", 0x79, 0x10, 8 * (count - 1), 0)  # r0 = *(u64 *)(r1 + …)
    code += struct.pack("<BBhi", 0xB7, 0, 0, 0) + struct.pack("<BBhi", 0x95, 0, 0, 0)  # r0 = 0; exit
    program = load_program(RAW_TRACEPOINT, code, name="arguments")
    try:
        os.close(attach_raw_tracepoint(program, name))
    except FileNotFoundError:
        raise Error(f"this kernel has no tracepoint {name}; check its name") from None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        os.close(program)
    return True


def _attach(
    program: int,
    kind: int,
    config: int,
    config1: int,
    config2: int,
    pid: int = -1,
    cpu: int = 0,
    period: int = 1,
    flags: int = 0,
) -> int:
    """Open a perf event and attach a program to it. At tracepoints and probes, the kernel runs the program on every CPU unless there
    is a pid, although the event is opened for one CPU."""
    attributes = struct.pack(
        "<II5QIIQQ", kind, _PERF_ATTRIBUTES, config, period, 0, 0, flags, 1, 0, config1, config2
    )
    buffer = ctypes.create_string_buffer(attributes.ljust(_PERF_ATTRIBUTES, b"\0"), _PERF_ATTRIBUTES)
    cpu = cpu if pid < 0 else -1
    event = system_call("perf_event_open", ctypes.addressof(buffer), pid, cpu, -1, _PERF_CLOSE_ON_EXEC)
    try:
        fcntl.ioctl(event, _PERF_SET_BPF, program)
        fcntl.ioctl(event, _PERF_ENABLE, 0)
    except BaseException:
        os.close(event)
        raise
    return event


@contextlib.contextmanager
def tracefs() -> Iterator[Path]:
    """Yield the directory of tracefs, where the kernel describes its tracepoints.

    If it is not mounted, mount it detached: in no directory, invisible to other processes, and removed when its file descriptor is
    closed. Raises Error if that is not possible either.
    """
    for directory in _TRACEFS:
        if os.access(directory / "events", os.R_OK | os.X_OK):
            yield directory
            return
    name = ctypes.create_string_buffer(b"tracefs")
    files: list[int] = []
    try:
        files.append(system_call("fsopen", ctypes.addressof(name), 1))
        system_call("fsconfig", files[0], 6, 0, 0, 0)  # FSCONFIG_CMD_CREATE
        files.append(system_call("fsmount", files[0], 1, 0))
    except OSError as error:
        for file in files:
            os.close(file)
        raise Error(
            f"cannot read the kernel's tracepoints ({error.strerror}); run: mount -t tracefs tracefs {_TRACEFS[0]}"
        ) from None
    try:
        yield Path(f"/proc/self/fd/{files[1]}")
    finally:
        for file in files:
            os.close(file)


class Tracepoint(Record):
    """A tracepoint. `number`: for `attach_tracepoint`. `fields`: by name, (offset, size) in the record that programs receive."""

    number: int
    fields: dict[str, tuple[int, int]]


def tracepoint(name: str) -> Tracepoint:
    """Return the tracepoint CATEGORY:NAME. Raises Error if the kernel has no such tracepoint."""
    category, _, event = name.partition(":")
    with tracefs() as root:
        directory = root / "events" / category / event
        try:
            number = int((directory / "id").read_text())
            text = (directory / "format").read_text()
        except (OSError, ValueError):
            raise Error(f"this kernel has no tracepoint {name}; check its name") from None
    fields = {}
    for line in text.splitlines():
        parts = dict(part.strip().partition(":")[::2] for part in line.strip().split(";") if ":" in part)
        if "field" in parts and "offset" in parts and "size" in parts:
            words = parts["field"].split("[")[0].split()
            fields[words[-1].lstrip("*")] = int(parts["offset"]), int(parts["size"])
    return Tracepoint(number, fields)


def disable(files: Sequence[int]) -> None:
    """Disable events, so that their programs no longer run. Other files are left alone."""
    for file in files:
        with contextlib.suppress(OSError):  # fails for programs, which are not events
            fcntl.ioctl(file, _PERF_DISABLE, 0)


def start_closing(files: Sequence[int]) -> list[threading.Thread]:
    """Close events and programs in parallel, because the kernel waits up to 0.1 s for each until no CPU is inside. Return the closing
    threads. Events are disabled at once."""
    disable(files)
    threads = [threading.Thread(target=os.close, args=(file,)) for file in files]
    for thread in threads:
        thread.start()
    return threads


def close_all(files: Sequence[int]) -> None:
    """Close events and programs in parallel, and wait until all are closed."""
    for thread in start_closing(files):
        thread.join()


# --- ring buffers ---


class BpfRingBuffer:
    """A reader for a BPF_MAP_TYPE_RINGBUF that reads many records at once (kernel: Documentation/bpf/ringbuf.rst).

    The kernel maps two pages, with the consumer and the producer position, and then the data twice in a row. So every record is
    contiguous.
    """

    _BUSY, _DISCARDED = 1 << 31, 1 << 30

    def __init__(self, file: int, capacity: int) -> None:
        page = mmap.PAGESIZE
        self._capacity = capacity
        self._consumed = mmap.mmap(file, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._produced = mmap.mmap(file, page + 2 * capacity, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a caller's array still refers to it
            self._produced.close()
        self._consumed.close()

    def records(self) -> list[bytes]:
        """Return and consume the available records, in order, each with its own size. Slow, so only for few records."""
        taken = []
        at = int.from_bytes(self._consumed[:8], "little")
        end = int.from_bytes(self._produced[:8], "little")
        while at < end:
            start = mmap.PAGESIZE + (at & self._capacity - 1)
            length = int.from_bytes(self._produced[start : start + 4], "little")
            if length & self._BUSY:
                break
            size = length & ~self._DISCARDED
            if not length & self._DISCARDED:
                taken.append(self._produced[start + 8 : start + 8 + size])
            at += 8 + (size + 7 & ~7)
        self._consumed[:8] = at.to_bytes(8, "little")
        return taken

    def read(self, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return and consume the available records, in order. Records whose size differs from `dtype` are skipped."""
        import numpy as np

        taken: list[np.ndarray[Any, Any]] = [np.empty(0, dtype)]
        size = dtype.itemsize
        stride = 8 + (size + 7 & ~7)
        mask = self._capacity - 1
        at = int.from_bytes(self._consumed[:8], "little")
        end = int.from_bytes(self._produced[:8], "little")
        while at < end:
            start = mmap.PAGESIZE + (at & mask)
            count = (end - at) // stride
            lengths = np.ndarray((count,), "<u4", self._produced, start, (stride,))
            odd = np.flatnonzero(lengths != size)
            whole = int(odd[0]) if len(odd) else count
            if whole:
                taken.append(np.ndarray((whole,), dtype, self._produced, start + 8, (stride,)).copy())
                at += whole * stride
                continue
            length = int.from_bytes(self._produced[start : start + 4], "little")
            if length & self._BUSY:
                break
            at += 8 + ((length & ~self._DISCARDED) + 7 & ~7)
        self._consumed[:8] = at.to_bytes(8, "little")
        return np.concatenate(taken) if len(taken) > 1 else taken[0]
