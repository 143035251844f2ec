"""Events of the Linux kernel at which host programs run for the whole machine: functions of the kernel, and perf events.

    KernelFunction("vfs_read", returns=True).attach(program)
    perf_event("cpu-clock:99hz").attach(program)

Raises Error if this kernel does not have the event, or refuses it.
"""

from __future__ import annotations

import os
import re

from gpubpf.errors import Error, UsageError, out_of_files
from gpubpf.kernel import bpf_syscall
from gpubpf.record import Record

# enum perf_sw_ids of the kernel's include/uapi/linux/perf_event.h, by perf's names.
SOFTWARE = {
    "cpu-clock": 0,
    "task-clock": 1,
    "page-faults": 2,
    "context-switches": 3,
    "cpu-migrations": 4,
    "minor-faults": 5,
    "major-faults": 6,
}
_PERF_EVENT = re.compile(r"([\w-]+):([1-9]\d{0,17})(hz)?")
PERF_EVENT_FORM = "EVENT:N (each N events) or EVENT:Nhz (N times a second)"


class KernelFunction(Record):
    """A function of the Linux kernel: an instruction at `offset` in it, or its return."""

    name: str
    offset: int = 0
    returns: bool = False

    program_type = bpf_syscall.KPROBE

    def __str__(self) -> str:
        return self.name

    def attach(self, program: int) -> list[int]:
        """Attach a program. Return the file descriptors; closing them detaches it."""
        kind = kprobe_type(self.name)
        try:
            return [bpf_syscall.attach_kprobe(program, kind, self.name, self.offset, self.returns)]
        except OSError as error:
            if out_of_files(error):
                raise
            raise Error(
                f"the Linux kernel refuses a kprobe at its function {self.name} ({error.strerror}); use another function"
            ) from None


def kprobe_type(function: str) -> int:
    """Return perf_event_open(2)'s type of kprobes, for a probe at a function of the kernel. Raises Error without kprobes."""
    try:
        return bpf_syscall.kprobe_type()
    except FileNotFoundError:
        raise Error(
            f"this Linux kernel has no kprobes (CONFIG_KPROBES), so no program can run at its function {function}; use a tracepoint"
        ) from None


class PerfEvent(Record):
    """A software event on every CPU: each `count` events or, if `frequency` is set, `count` times a second."""

    name: str
    count: int
    frequency: bool = False

    program_type = bpf_syscall.PERF_EVENT

    def __str__(self) -> str:
        return f"{self.name}:{self.count}{'hz' if self.frequency else ''}"

    def attach(self, program: int) -> list[int]:
        """Attach a program. Return the file descriptors, one for each CPU; closing them detaches it."""
        files: list[int] = []
        try:
            for cpu in bpf_syscall.online_cpus():
                files.append(
                    bpf_syscall.attach_software_event(
                        program, SOFTWARE[self.name], self.count, self.frequency, cpu
                    )
                )
        except OSError as error:
            for file in files:
                os.close(file)
            if out_of_files(error):
                raise
            raise Error(
                f"the Linux kernel refuses the perf event {self} ({error.strerror}); choose another number of events, or of times a"
                " second"
            ) from None
        return files


def perf_event(text: str) -> PerfEvent:
    """Return the event that a text of PERF_EVENT_FORM names. Raises UsageError."""
    match = _PERF_EVENT.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} names no perf event; use {PERF_EVENT_FORM}, such as cpu-clock:99hz")
    name, count, frequency = match.groups()
    if name not in SOFTWARE:
        raise UsageError(f"there is no perf event {name!r}; use one of: {', '.join(SOFTWARE)}")
    return PerfEvent(name, int(count), frequency is not None)
