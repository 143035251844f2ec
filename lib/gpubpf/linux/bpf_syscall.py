"""The kernel's side of eBPF by system call: maps, programs, what they are attached to, ring buffers.

By ctypes, so that a tool with prebuilt programs starts without bcc, clang and kernel headers. Numbers and structures are those of
include/uapi/linux/bpf.h and perf_event.h. Calls that the kernel refuses raise OSError.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpubpf.errors import Error
from gpubpf.process import libc
from gpubpf.process.libc import bpf, system_call

if TYPE_CHECKING:
    import numpy as np

MAP_CREATE, MAP_LOOKUP, MAP_UPDATE, MAP_DELETE, _PROG_LOAD = 0, 1, 2, 3, 5
_OBJECT_INFO, _RAW_TRACEPOINT_OPEN, _MAP_LOOKUP_BATCH, _LINK_CREATE, _ENABLE_STATISTICS = 15, 17, 24, 28, 32
UPROBE_MULTI, UPROBE_SESSION = 48, 57  # enum bpf_attach_type: since Linux 6.6 and 6.13
_MULTI_RETURN = 1  # BPF_F_UPROBE_MULTI_RETURN
KPROBE, TRACEPOINT, RAW_TRACEPOINT = 2, 5, 17  # enum bpf_prog_type
HASH, ARRAY, PROG_ARRAY, PERCPU_HASH, PERCPU_ARRAY, STACK_TRACE, LRU_HASH, RINGBUF = (
    1,
    2,
    3,
    5,
    6,
    7,
    9,
    27,
)  # enum bpf_map_type
_EXISTS = 2  # BPF_EXIST
_PERCPU = (PERCPU_HASH, PERCPU_ARRAY, 10)
_LOG_BYTES = 1 << 20

_PERF_TRACEPOINT, _PERF_ATTRIBUTES, _PERF_CLOSE_ON_EXEC = 2, 112, 8
_PERF_ENABLE, _PERF_DISABLE, _PERF_SET_BPF = 0x2400, 0x2401, 0x40042408
_UPROBE_TYPE = Path("/sys/bus/event_source/devices/uprobe/type")
_TRACEFS = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))


class Rejected(OSError):
    """The kernel's verifier rejected a program; `log` is what it says."""

    def __init__(self, error: OSError, log: str) -> None:
        super().__init__(error.errno, error.strerror)
        self.log = log


# --- maps ---


def possible_cpus() -> int:
    """As many values as an element of a per-CPU map has."""
    last = Path("/sys/devices/system/cpu/possible").read_text().strip().split(",")[-1]
    return int(last.split("-")[-1]) + 1


def create_map(kind: int, key: int, value: int, entries: int, flags: int = 0, name: str = "") -> int:
    """A file descriptor. `name` is for whoever looks with bpftool; its end is cut off."""
    label = "".join(c for c in name if c.isascii() and (c.isalnum() or c in "_."))[:15].encode()
    attributes = struct.pack("<7I16s", kind, key, value, entries or possible_cpus(), flags, 0, 0, label)
    return bpf(MAP_CREATE, attributes)[0]


def update(file: int, key: bytes, value: bytes, existing: bool = False) -> None:
    """`existing`: raises FileNotFoundError where there is no such element."""
    k, v = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(value, len(value))
    flags = _EXISTS if existing else 0
    bpf(MAP_UPDATE, struct.pack("<I4xQQQ", file, ctypes.addressof(k), ctypes.addressof(v), flags))


def delete(file: int, key: bytes) -> None:
    k = ctypes.create_string_buffer(key, len(key))
    bpf(MAP_DELETE, struct.pack("<I4xQ", file, ctypes.addressof(k)))


def lookup(file: int, key: bytes, size: int) -> bytes | None:
    """The value, `size` bytes (for a per-CPU map of all CPUs); None where there is none."""
    k, v = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(size)
    try:
        bpf(MAP_LOOKUP, struct.pack("<I4xQQQ", file, ctypes.addressof(k), ctypes.addressof(v), 0))
    except FileNotFoundError:
        return None
    return v.raw


def value_bytes(kind: int, value_size: int) -> int:
    """Bytes in which the kernel gives one element's value: of a per-CPU map the values of all CPUs, each padded to 8."""
    return (value_size + 7 & ~7) * possible_cpus() if kind in _PERCPU else value_size


def read_all(file: int, kind: int, key_size: int, value_size: int, entries: int) -> tuple[bytes, bytes]:
    """The keys and the values (see `value_bytes`) of all elements, one after the other; of a map that changes meanwhile,
    those that were met."""
    size = value_bytes(kind, value_size)
    room = min(entries, 4096) + 1024  # a whole bucket of a hash has to fit
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
        over = False
        try:
            bpf(_MAP_LOOKUP_BATCH, buffer)
        except FileNotFoundError:
            over = True
        count = int.from_bytes(buffer.raw[32:36], "little")
        found.append((keys.raw[: count * key_size], values.raw[: count * size]))
        first = False
        if over:
            return b"".join(k for k, _ in found), b"".join(v for _, v in found)


# --- programs ---


def load_program(kind: int, code: bytes, license: str = "GPL", name: str = "", attach: int = 0) -> int:
    """A file descriptor. `attach`: what it is for, where the kind does not say it. Raises Rejected where it is the verifier that
    refuses."""
    try:
        return _load(kind, code, license, name, attach, None)
    except PermissionError:  # for want of a capability, or the verifier's answer to an address that leaks
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
    return bpf(_PROG_LOAD, attributes)[0]


@dataclass(frozen=True)
class Statistics:
    """What the kernel counted of a program: runs and ns in all, while statistics were enabled, and at any time runs that did not
    happen because the CPU was inside another one."""

    runs: int
    total_ns: int
    missed: int


def enable_statistics() -> int:
    """Has the kernel count the runs of every program, until the file descriptor is closed."""
    return bpf(_ENABLE_STATISTICS, struct.pack("<I", 0))[0]


def statistics(program: int) -> Statistics:
    info = ctypes.create_string_buffer(232)
    bpf(_OBJECT_INFO, struct.pack("<IIQ", program, len(info), ctypes.addressof(info)))
    return Statistics(*(struct.unpack_from("<QQQ", info.raw, 192)[i] for i in (1, 0, 2)))


# --- what programs are attached to ---


def uprobe_type() -> int:
    """What perf_event_open(2) calls a uprobe. Raises OSError where the kernel has none."""
    return int(_UPROBE_TYPE.read_text())


def attach_uprobe(program: int, path: str, offset: int, returns: bool = False) -> int:
    """Runs a KPROBE program wherever the instruction at `offset` of the file is executed, in any process, until the file
    descriptor is closed. `returns`: when the function that begins there returns."""
    kind = uprobe_type()
    name = ctypes.create_string_buffer(path.encode())
    return _attach(program, kind, int(returns), ctypes.addressof(name), offset)


def link_uprobes(
    program: int,
    attach: int,
    path: str,
    offsets: Sequence[int],
    cookies: Sequence[int],
    returns: bool = False,
) -> int:
    """The same at many places of a file at once, `cookies` being what bpf_get_attach_cookie gives there. `attach`: UPROBE_MULTI or
    UPROBE_SESSION, as the program was loaded for; a session's program runs at the entry, and where it gave 0 at the return, too.
    All or nothing."""
    name = ctypes.create_string_buffer(path.encode())
    at = (ctypes.c_uint64 * len(offsets))(*offsets)
    values = (ctypes.c_uint64 * len(cookies))(*cookies)
    attributes = struct.pack(
        "<IIIIQQQQIII",
        program,
        0,
        attach,
        0,
        ctypes.addressof(name),
        ctypes.addressof(at),
        0,
        ctypes.addressof(values),
        len(offsets),
        _MULTI_RETURN if returns else 0,
        0,
    )
    return bpf(_LINK_CREATE, attributes)[0]


def attach_tracepoint(program: int, number: int) -> int:
    """Runs a TRACEPOINT program at a tracepoint, in any process, until the file descriptor is closed."""
    return _attach(program, _PERF_TRACEPOINT, number, 0, 0)


def attach_raw_tracepoint(program: int, name: str) -> int:
    """Runs a RAW_TRACEPOINT program, whose context are the tracepoint's arguments as words, likewise. Unlike the other it runs also
    where the CPU is inside another program, or a process there is in the middle of a bpf(2) call for a map. Raises
    FileNotFoundError where there is no such tracepoint."""
    text = ctypes.create_string_buffer(name.encode())
    return bpf(_RAW_TRACEPOINT_OPEN, struct.pack("<QI", ctypes.addressof(text), program))[0]


def raw_arguments(name: str, count: int) -> bool:
    """Whether the raw tracepoint has as many arguments: else the kernel does not take a program that reads the last. Raises Error
    where there is no such tracepoint, PermissionError where this process may not ask."""
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


def _attach(program: int, kind: int, config: int, config1: int, config2: int) -> int:
    attributes = struct.pack("<II5QIIQQ", kind, _PERF_ATTRIBUTES, config, 1, 0, 0, 0, 1, 0, config1, config2)
    buffer = ctypes.create_string_buffer(attributes.ljust(_PERF_ATTRIBUTES, b"\0"), _PERF_ATTRIBUTES)
    # A program is run for every CPU and process, whichever its event was opened for.
    event = system_call(libc.PERF_EVENT_OPEN, ctypes.addressof(buffer), -1, 0, -1, _PERF_CLOSE_ON_EXEC)
    try:
        fcntl.ioctl(event, _PERF_SET_BPF, program)
        fcntl.ioctl(event, _PERF_ENABLE, 0)
    except BaseException:
        os.close(event)
        raise
    return event


@contextlib.contextmanager
def tracefs() -> Iterator[Path]:
    """Where the kernel describes its tracepoints. Where nobody mounted it, a mount of our own that is in no directory: it
    changes nothing for anybody, and goes with its file descriptor. Raises Error where that is not possible either."""
    for place in _TRACEFS:
        if os.access(place / "events", os.R_OK | os.X_OK):
            yield place
            return
    name = ctypes.create_string_buffer(b"tracefs")
    files: list[int] = []
    try:
        files.append(system_call(libc.FSOPEN, ctypes.addressof(name), 1))
        system_call(libc.FSCONFIG, files[0], 6, 0, 0, 0)  # FSCONFIG_CMD_CREATE
        files.append(system_call(libc.FSMOUNT, files[0], 1, 0))
    except OSError as error:
        for file in files:
            os.close(file)
        raise Error(
            f"the kernel's tracepoints cannot be seen ({error.strerror}); run: mount -t tracefs tracefs {_TRACEFS[0]}"
        ) from None
    try:
        yield Path(f"/proc/self/fd/{files[1]}")
    finally:
        for file in files:
            os.close(file)


@dataclass(frozen=True)
class Tracepoint:
    """`number` is what `attach_tracepoint` takes; `fields` are (offset, size) in the record that programs get, by name."""

    number: int
    fields: dict[str, tuple[int, int]]


def tracepoint(name: str) -> Tracepoint:
    """The tracepoint CATEGORY:NAME. Raises Error where there is none."""
    category, _, event = name.partition(":")
    with tracefs() as root:
        place = root / "events" / category / event
        try:
            number = int((place / "id").read_text())
            text = (place / "format").read_text()
        except (OSError, ValueError):
            raise Error(f"this kernel has no tracepoint {name}; check its name") from None
    fields = {}
    for line in text.splitlines():
        parts = dict(part.strip().partition(":")[::2] for part in line.strip().split(";") if ":" in part)
        if "field" in parts and "offset" in parts and "size" in parts:
            words = parts["field"].split("[")[0].split()
            fields[words[-1].lstrip("*")] = int(parts["offset"]), int(parts["size"])
    return Tracepoint(number, fields)


def begin_to_close(files: Sequence[int]) -> list[threading.Thread]:
    """Closes events and programs, at once: for each the kernel waits until nobody is inside, 0.1 s. The threads that do so; events
    are off already."""
    for file in files:
        with contextlib.suppress(OSError):  # a program is no event
            fcntl.ioctl(file, _PERF_DISABLE, 0)
    threads = [threading.Thread(target=os.close, args=(file,)) for file in files]
    for thread in threads:
        thread.start()
    return threads


def close_all(files: Sequence[int]) -> None:
    """The same; waits for it."""
    for thread in begin_to_close(files):
        thread.join()


# --- ring buffers ---


class Ring:
    """Reads a BPF_MAP_TYPE_RINGBUF, with many records at once (kernel: Documentation/bpf/ringbuf.rst).

    The kernel maps two pages, what was consumed and what was produced, and the data twice in a row, so that no record is cut.
    """

    _BUSY, _DISCARDED = 1 << 31, 1 << 30

    def __init__(self, file: int, capacity: int) -> None:
        page = mmap.PAGESIZE
        self._capacity = capacity
        self._consumed = mmap.mmap(file, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._produced = mmap.mmap(file, page + 2 * capacity, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # an array of a caller still looks at it
            self._produced.close()
        self._consumed.close()

    def records(self) -> list[bytes]:
        """Those that are there, in order, each as long as it was made, and makes room. For few."""
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
        """The records of this type that are there, in order, and makes room. Records of another size are left out."""
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
