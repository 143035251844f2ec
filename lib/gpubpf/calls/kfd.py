"""Read the events of AMD's kernel driver (amdkfd): evicted queues, migrated memory, faults, resets,
throttling.

    driver = kfd.open_devices(note)         # None without an AMD GPU
    for event in driver.take(): …           # the events that ended since the last call

/dev/kfd provides an event file for each GPU, with one line of text per event, in order (the kernel's
include/uapi/linux/kfd_ioctl.h: struct kfd_ioctl_smi_events_args, enum kfd_smi_event, KFD_EVENT_FMT_…). The file
buffers 1 KB; the driver drops further events silently. This follows the documentation; it has not been tested
with a GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gpubpf.calls.delays import DRIVER, Cause
from gpubpf.kernel.privileges import SYS_ADMIN, effective
from gpubpf.record import Record

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
_MOST = 4096  # bytes of an incomplete line; also the number of events that have begun but not ended
# What follows the event's number. Events with a time have ns, the process, then `@address(size)` or other details.
_TIMED = re.compile(r"(\d{1,20}) -(\d{1,10}) (?:@([0-9a-f]+)\(([0-9a-f]+)\) ?)?(.*)")
_VMFAULT = re.compile(r"([0-9a-f]+):")


class DriverEvent(Record):
    """An event of the driver.

    Times are CLOCK_BOOTTIME. Start and end are equal if the event takes no time, or if the driver does not report
    its end.

    pid: the process that the event concerns; 0: all processes.
    gpu: index among the machine's GPUs.
    """

    start_ns: int
    end_ns: int
    pid: int
    gpu: int
    what: str

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


class _Line(Record):
    """A parsed line of an event file: the event's number, time, process and details."""

    number: int
    ns: int
    pid: int
    address: str
    why: str
    again: bool  # a restore that failed and will be retried


class DriverEvents:
    """Read events from `files`, open files by GPU, which `close` closes."""

    def __init__(self, files: Mapping[int, int]) -> None:
        self._files = dict(files)
        self._rest = dict.fromkeys(files, b"")
        # Events that have begun but not ended, by GPU, number, process and address.
        self._open: dict[tuple[int, int, int, str], _Line] = {}

    def take(self) -> list[DriverEvent]:
        """Return the events that ended since the last call."""
        found: list[DriverEvent] = []
        for gpu in self._files:
            for line in self._lines(gpu):
                event = _parse(line)
                if event is not None and (ended := self._end(gpu, event)) is not None:
                    found.append(ended)
        return found

    def under_way(self) -> list[DriverEvent]:
        """Return the events that have begun but not ended, with the current time as their end."""
        now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return [self._event(gpu, event, max(now, event.ns)) for (gpu, *_), event in self._open.items()]

    def close(self) -> None:
        """Close the event files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _lines(self, gpu: int) -> list[str]:
        """Return the complete lines that have arrived. Some kernels return eight bytes at a time."""
        data = self._rest[gpu]
        with contextlib.suppress(OSError):  # EAGAIN: nothing more to read
            while part := os.read(self._files[gpu], 1024):
                data += part
        *lines, rest = data.split(b"\n")
        self._rest[gpu] = rest[-_MOST:]
        return [line.replace(b"\0", b"").decode("ascii", "replace") for line in lines]

    def _end(self, gpu: int, event: _Line) -> DriverEvent | None:
        begun = _PAIRS.get(event.number)
        if begun is not None:
            start = None if event.again else self._open.pop((gpu, begun, event.pid, event.address), None)
            return self._event(gpu, start, event.ns) if start is not None else None
        if event.number in _PAIRS.values():
            if len(self._open) < _MOST:
                self._open.setdefault((gpu, event.number, event.pid, event.address), event)
            return None
        return self._event(gpu, event, event.ns)

    def _event(self, gpu: int, event: _Line, end_ns: int) -> DriverEvent:
        what = _WHAT[event.number] + (f" ({event.why})" if event.why else "")
        return DriverEvent(event.ns, max(event.ns, end_ns), event.pid, gpu, what)


def _parse(line: str) -> _Line | None:
    """Parse a line. Return None for an unknown event, such as one of a newer kernel."""
    head, _, rest = line.partition(" ")
    try:
        number = int(head, 16)
    except ValueError:
        return None
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    if number in (THROTTLE, BEFORE_RESET, AFTER_RESET):
        return _Line(number, now, 0, "", "", False)
    if number == VMFAULT:
        match = _VMFAULT.match(rest)
        return _Line(number, now, int(match[1], 16), "", "", False) if match else None
    match = (
        _TIMED.fullmatch(rest)
        if number in (MIGRATE, MIGRATED, FAULT, FAULTED, EVICTED, RESTORED, UNMAPPED)
        else None
    )
    if match is None:
        return None
    words = match[5].split()
    # The trigger is the last word. At the end of a migration, another word is last, but no trigger is needed there.
    names, trigger = _TRIGGERS.get(number, ()), words[-1] if words else ""
    why = next((name for n, name in enumerate(names) if trigger == str(n)), "")
    return _Line(
        number, int(match[1]), int(match[2]), match[3] or "", why, trigger == "R" and number == RESTORED
    )


def causes_during(events: Iterable[DriverEvent], pid: int, start_ns: int, end_ns: int) -> list[Cause]:
    """Return the events that concern a process or all processes, as causes. Only the part of an event between
    the two times counts.
    """
    total: dict[str, list[int]] = {}
    for event in events:
        if event.pid in (0, pid) and event.start_ns <= end_ns and event.end_ns >= start_ns:
            ns = min(event.end_ns, end_ns) - max(event.start_ns, start_ns)
            total.setdefault(event.what, []).append(ns)
    return [Cause(DRIVER, what, len(times), sum(times), max(times)) for what, times in total.items()]


def open_devices(note: Callable[[str], None]) -> DriverEvents | None:
    """Open the event files of all AMD GPUs. Return None without an AMD GPU, or if opening fails; then a
    notice says why.
    """
    ids = _gpu_ids()
    if not ids or not _DEVICE.exists():
        return None
    if SYS_ADMIN not in effective():
        note("cannot read events of AMD's driver (queues, memory); run as root")
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
        note(f"cannot read events of AMD's driver (queues, memory): {error.strerror}")
        return None
    return DriverEvents(files)


def _gpu_ids() -> list[int]:
    """Return the IDs of the topology nodes that are GPUs, in order. The ID of other nodes is 0."""
    found = []
    with contextlib.suppress(OSError):
        for node in sorted((n for n in _NODES.iterdir() if n.name.isdecimal()), key=lambda n: int(n.name)):
            with contextlib.suppress(OSError, ValueError):
                if number := int((node / "gpu_id").read_text()):
                    found.append(number)
    return found
