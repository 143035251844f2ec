"""The reasons in reports and in the JSON summary: why launches are not counted, and why processes are missed.

They are a stable interface: add reasons, but do not change them. The man pages explain all of them. Kernels that cannot be
instrumented have further reasons, defined where `images` and `ptx` refuse a kernel.
"""

from __future__ import annotations

from typing import Any

from gpubpf.agent.definitions import PatchFailed, Reason
from gpubpf.agent.protocol import REASON_NAMES, KernelFault, NoRoom
from gpubpf.ptx.symbols import original_name
from gpubpf.show import table

# --- why a launch is not counted: keys of `not_instrumented` -------------------------------------------------------

REFUSED = REASON_NAMES[Reason.REFUSED]  # a placeholder that the kernel's own reason replaces
LAUNCH_FAILED = REASON_NAMES[Reason.LAUNCH_FAILED]  # the driver rejected the launch: nothing ran
BEFORE_READY = "before ready"
LOADED_BEFORE = (
    "loaded before"  # the kernel's name is unknown, because its module was loaded before the agent
)
NOT_COUNTED = (*(name for name in REASON_NAMES if name != REFUSED), BEFORE_READY, LOADED_BEFORE)

# --- why a process is missed: keys of `missed` ----------------------------------------------------------------------

ENDED = "ended"
NO_DRIVER = "no CUDA driver"
NO_ROCR = "no ROCr"
TRACED = "traced by another"
BUSY = "not free in time"
UNHOOKED = "cannot be hooked"
FORBIDDEN = "cannot be traced"
STOPPED = "stopped"
OTHER_DEVICE = "another device"
OTHER_USER = "another user"
OUT_OF_FILES = "too many open files"
UNREACHED = "not reached in time"
TOO_LATE = "measurement over"
REACHED_LATE = "reached late"  # measured, but launches before the attach are missing
MISSED = (
    ENDED,
    NO_DRIVER,
    NO_ROCR,
    TRACED,
    BUSY,
    UNHOOKED,
    FORBIDDEN,
    STOPPED,
    OTHER_DEVICE,
    OTHER_USER,
    OUT_OF_FILES,
    UNREACHED,
    TOO_LATE,
    REACHED_LATE,
)


# Kernel errors that destroy the context (CUresult, cuda.h).
_FAULTS = {
    214: "uncorrectable memory error",
    700: "illegal address",
    702: "launch timeout",
    710: "assertion failed",
    714: "hardware stack error",
    715: "illegal instruction",
    716: "misaligned address",
    717: "invalid address space",
    718: "invalid program counter",
    719: "launch failure",
    721: "tensor memory leak",
}


def kernel_failed(label: str, fault: KernelFault) -> str:
    """Return a notice about a kernel that failed: which kernel, where and why, as far as known."""
    from gpubpf import names

    error = f"{_FAULTS.get(fault.error, 'error')} (CUDA error {fault.error})"
    if fault.kernel is None:
        told = f"{label}: a kernel failed: {error}; the driver does not say which: "
        if fault.patch:
            return f"{told}run the program without --sass; if it then does not fail, the tool's patches do"
        return f"{told}run the program under compute-sanitizer"
    where = f" at {_source(fault)}" if fault.source else ""
    accessed = f", address {fault.address:#x}" if fault.address is not None else ""
    block, thread = (f"({','.join(map(str, index))})" for index in (fault.block, fault.thread))
    kernel = names.demangle(original_name(fault.kernel)).full
    failed = f"{error}{accessed}, block {block}, thread {thread}"
    if fault.patch == PatchFailed.YES:
        return f"{label}: the tool's patch in kernel {kernel} failed, not the program: {failed}; run it without --sass"
    return f"{label}: kernel {kernel} failed{where}: {failed}"


def fault_record(pid: int, comm: str, fault: KernelFault) -> dict[str, Any]:
    """Return an element of `device_faults` in the summary record. None stands for unknown values."""
    from gpubpf import names

    known = fault.kernel is not None
    return {
        "pid": pid,
        "comm": comm,
        "gpu": fault.gpu,
        "error": fault.error,
        "kernel": names.demangle(original_name(fault.kernel)).short if fault.kernel is not None else None,
        "source": _source(fault),
        "block": fault.block if known else None,
        "thread": fault.thread if known else None,
        "address": f"{fault.address:#x}" if fault.address is not None else None,
        "patch": None if fault.patch == PatchFailed.PERHAPS else fault.patch == PatchFailed.YES,
    }


def _source(fault: KernelFault) -> str | None:
    """Return the source file and line, such as ``scale.cu:17``; None if unknown."""
    return f"{fault.source[0].rpartition('/')[2]}:{fault.source[1]}" if fault.source else None


def no_room(mangled: str, lacking: NoRoom) -> str:
    """Return a notice about a kernel whose launches run the original because no copy fits: the space needed, and a remedy."""
    from gpubpf import names

    kernel = names.demangle(mangled).short
    threads = table.count(lacking.threads, "thread")
    instead = "launch fewer or smaller blocks"
    if lacking.allowed is None:
        why = f"its blocks may wait for each other, and the driver does not say how many of {threads} fit"
    elif lacking.needed == 1:
        why = f"a block of {threads} needs more registers with the probe than a multiprocessor has{_registers(lacking)}"
        instead = "launch smaller blocks"
    else:
        why = (
            f"its blocks may wait for each other, so {lacking.needed:,} blocks of {threads} must fit at once;"
            f" with the probe, {lacking.allowed:,} do{_registers(lacking)}"
        )
    return f"{kernel}: launches run the original (occupancy): {why}; to measure it, {instead}"


def before_copies(launches: int) -> str:
    """Return a notice about kernels of large modules that ran before their copies were loaded."""
    return (
        f"{table.count(launches, 'launch')} of a module with many kernels ran before the copy was loaded: other kernels were"
        " running, or a stream was being captured; the next run has these copies from the start"
    )


def lost_calls(unknown: int, elsewhere: int) -> str:
    """Return a notice about patches that ran without counting.

    unknown: calls in launches that were not measured.
    elsewhere: calls in code of no measured kernel."""
    parts = []
    if unknown:
        parts.append(f"{table.count(unknown, 'time')} in launches that could not be measured")
    if elsewhere:
        parts.append(f"{table.count(elsewhere, 'time')} in functions that kernels call (not inlined)")
    return f"kernels without PTX: threads reached a point, but were not counted, {' and '.join(parts)}"


def _registers(lacking: NoRoom) -> str:
    """Return, in brackets, how many registers the probe costs; "" if that is unknown or none."""
    if not 0 < lacking.original < lacking.registers:
        return ""
    return f" ({lacking.registers:,} registers per thread, {lacking.original:,} without it)"
