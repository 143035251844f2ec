"""The data that this kernel's tracepoints pass to programs, and the layouts that programs rely on.

A raw tracepoint passes its arguments as words. An ordinary tracepoint passes a record, whose layout the kernel describes in tracefs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from gpubpf.errors import Error
from gpubpf.kernel import bpf_syscall

RecordLayout: TypeAlias = Mapping[str, tuple[int, int]]  # offset and size in bytes, by field

# The structures are in include/gpubpf_switch.h.
RAW_SWITCH, SWITCH = "sched_switch", "sched:sched_switch"
_SWITCH_ARGUMENTS = 4  # the fourth, since Linux 5.18, is the state of the thread that leaves the CPU
SWITCH_RECORD: RecordLayout = {"prev_pid": (24, 4), "prev_state": (32, 8), "next_pid": (56, 4)}


def has_arguments(name: str, count: int) -> bool:
    """Return whether the raw tracepoint has at least `count` arguments.

    Return True if this process may not ask the kernel: attaching then fails with its own message. Raises Error if there is no such
    tracepoint.
    """
    try:
        return bpf_syscall.raw_arguments(name, count)
    except PermissionError:
        return True


def check_record(event: str, layout: RecordLayout) -> None:
    """Raise Error unless the record of the tracepoint CATEGORY:NAME has these fields at these offsets."""
    fields = bpf_syscall.tracepoint(event).fields
    if any(fields.get(name) != place for name, place in layout.items()):
        raise Error(f"this kernel's tracepoint {event} has an unknown layout; use Linux 5.8 or newer")


def switch_event(raw: bool) -> str:
    """Return the tracepoint for switches between threads: RAW_SWITCH if it passes the thread's state, otherwise SWITCH.

    raw: programs can use the raw tracepoint.

    Raises Error if this kernel has neither, or if the record of SWITCH has another layout.
    """
    if raw and has_arguments(RAW_SWITCH, _SWITCH_ARGUMENTS):
        return RAW_SWITCH
    check_record(SWITCH, SWITCH_RECORD)
    return SWITCH
