"""What the kernel's driver of AMD GPUs tells of its own accord: queues evicted, memory that moves, faults, resets, throttling.

    driver = kfd.open_devices(note)         # None where there is no such GPU
    for happened in driver.take(): …        # what has ended since the last time

/dev/kfd gives for each GPU a file of events, one line of text each, in the order in which they happened (the kernel's
include/uapi/linux/kfd_ioctl.h: struct kfd_ioctl_smi_events_args, enum kfd_smi_event, KFD_EVENT_FMT_…). Events that find no room
in the file's 1 KB are lost, and the driver does not say so. Read as documented; not verified with a GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpubpf.calls.why import DRIVER, Cause
from gpubpf.process.privileges import SYS_ADMIN, effective

_DEVICE = Path("/dev/kfd")
_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_SMI_EVENTS = 0xC0084B1F  # AMDKFD_IOC_SMI_EVENTS
(
    VMFAULT,
    THROTTLE,
    BEFORE_RESET,
    AFTER_RESET,
    MIGRATE,
    MIGRATED,
    FAULT,
    FAULTED,
    EVICTED,
    RESTORED,
    UNMAPPED,
) = range(1, 12)
_ALL_PROCESSES = 1 << 63
_PAIRS = {MIGRATED: MIGRATE, FAULTED: FAULT, RESTORED: EVICTED, AFTER_RESET: BEFORE_RESET}  # end: beginning
_WHAT = {
    VMFAULT: "memory fault on the GPU",
    THROTTLE: "clocks throttled",
    BEFORE_RESET: "GPU reset",
    MIGRATE: "memory migrated",
    FAULT: "page fault on the GPU",
    EVICTED: "queues evicted",
    UNMAPPED: "memory unmapped from the GPU",
}
_TRIGGERS = {
    MIGRATE: ("prefetch", "page fault on the GPU", "page fault on the CPU", "eviction"),
    EVICTED: ("SVM", "USERPTR", "TTM", "SUSPEND", "CRIU checkpoint", "CRIU restore"),
    UNMAPPED: ("MMU notifier", "MMU notifier, migration", "unmapped by the CPU"),
}
_MOST = 4096  # bytes of a line that has not ended, and beginnings whose end has not come
# After the event's number. Those with a time: ns, process, and then `@address(size)`, or what the event has.
_TIMED = re.compile(r"(\d+) -(\d+) (?:@([0-9a-f]+)\(([0-9a-f]+)\) ?)?(.*)")
_VMFAULT = re.compile(r"([0-9a-f]+):")


@dataclass(frozen=True)
class Happened:
    """Times are CLOCK_BOOTTIME; what takes no time, or whose end is not told, has the same twice. `pid`: 0 for all. `gpu`: its place
    among the machine's."""

    start_ns: int
    end_ns: int
    pid: int
    gpu: int
    what: str

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class _Event:
    number: int
    ns: int
    pid: int
    address: str
    why: str
    again: bool  # a restore that failed, and is tried again


class Driver:
    """`files`: of events, by GPU. They are closed with it."""

    def __init__(self, files: Mapping[int, int]) -> None:
        self._files = dict(files)
        self._rest = dict.fromkeys(files, b"")
        self._open: dict[
            tuple[int, int, int, str], _Event
        ] = {}  # by GPU, beginning's number, process, address

    def take(self) -> list[Happened]:
        """What ended since the last time."""
        found: list[Happened] = []
        for gpu in self._files:
            for line in self._lines(gpu):
                event = _parsed(line)
                if event is not None and (happened := self._happened(gpu, event)) is not None:
                    found.append(happened)
        return found

    def under_way(self) -> list[Happened]:
        """What has begun, and not ended yet."""
        now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return [self._told(gpu, event, max(now, event.ns)) for (gpu, *_), event in self._open.items()]

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _lines(self, gpu: int) -> list[str]:
        """Whole ones: some kernels give eight bytes at a time."""
        data = self._rest[gpu]
        with contextlib.suppress(OSError):  # EAGAIN: there is no more
            while part := os.read(self._files[gpu], 1024):
                data += part
        *lines, rest = data.split(b"\n")
        self._rest[gpu] = rest[-_MOST:]
        return [line.replace(b"\0", b"").decode("ascii", "replace") for line in lines]

    def _happened(self, gpu: int, event: _Event) -> Happened | None:
        begun = _PAIRS.get(event.number)
        if begun is not None:
            start = None if event.again else self._open.pop((gpu, begun, event.pid, event.address), None)
            return self._told(gpu, start, event.ns) if start is not None else None
        if event.number in _PAIRS.values():
            if len(self._open) < _MOST:
                self._open.setdefault((gpu, event.number, event.pid, event.address), event)
            return None
        return self._told(gpu, event, event.ns)

    def _told(self, gpu: int, event: _Event, end_ns: int) -> Happened:
        what = _WHAT[event.number] + (f" ({event.why})" if event.why else "")
        return Happened(event.ns, max(event.ns, end_ns), event.pid, gpu, what)


def _parsed(line: str) -> _Event | None:
    """None for a line that is not understood, such as a later kernel's."""
    head, _, rest = line.partition(" ")
    try:
        number = int(head, 16)
    except ValueError:
        return None
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    if number in (THROTTLE, BEFORE_RESET, AFTER_RESET):
        return _Event(number, now, 0, "", "", False)
    if number == VMFAULT:
        match = _VMFAULT.match(rest)
        return _Event(number, now, int(match[1], 16), "", "", False) if match else None
    match = (
        _TIMED.fullmatch(rest)
        if number in (MIGRATE, MIGRATED, FAULT, FAULTED, EVICTED, RESTORED, UNMAPPED)
        else None
    )
    if match is None:
        return None
    words = match[5].split()
    # The trigger is the last, but at the end of a migration, where it does not count.
    names, trigger = _TRIGGERS.get(number, ()), words[-1] if words else ""
    why = names[int(trigger)] if trigger.isdecimal() and int(trigger) < len(names) else ""
    return _Event(
        number, int(match[1]), int(match[2]), match[3] or "", why, trigger == "R" and number == RESTORED
    )


def during(found: Iterable[Happened], pid: int, start_ns: int, end_ns: int) -> list[Cause]:
    """What of it was a process's, or all processes', in a time: cut to it."""
    total: dict[str, list[int]] = {}
    for h in found:
        if h.pid in (0, pid) and h.start_ns <= end_ns and h.end_ns >= start_ns:
            ns = min(h.end_ns, end_ns) - max(h.start_ns, start_ns)
            total.setdefault(h.what, []).append(ns)
    return [Cause(DRIVER, what, len(times), sum(times), max(times)) for what, times in total.items()]


def open_devices(note: Callable[[str], None]) -> Driver | None:
    """None where there is no such GPU, or it cannot be asked, which a note says."""
    ids = _gpu_ids()
    if not ids or not _DEVICE.exists():
        return None
    if SYS_ADMIN not in effective():
        note("what AMD's driver does to queues and memory is told to root only")
        return None
    files: dict[int, int] = {}
    try:
        device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        try:
            for gpu, number in enumerate(ids):
                argument = bytearray(struct.pack("<II", number, 0))
                fcntl.ioctl(device, _SMI_EVENTS, argument)
                files[gpu] = struct.unpack("<II", argument)[1]
                os.set_inheritable(files[gpu], False)
                os.set_blocking(files[gpu], False)
                events = sum(1 << (event - 1) for event in range(VMFAULT, UNMAPPED + 1))
                os.write(files[gpu], struct.pack("<Q", events | _ALL_PROCESSES))
        finally:
            os.close(device)
    except OSError as error:
        for file in files.values():
            os.close(file)
        note(f"AMD's driver does not tell what it does to queues and memory ({error.strerror})")
        return None
    return Driver(files)


def _gpu_ids() -> list[int]:
    """Of the nodes that are GPUs, in order: the others have 0."""
    found = []
    with contextlib.suppress(OSError):
        for node in sorted((n for n in _NODES.iterdir() if n.name.isdecimal()), key=lambda n: int(n.name)):
            with contextlib.suppress(OSError, ValueError):
                if number := int((node / "gpu_id").read_text()):
                    found.append(number)
    return found
