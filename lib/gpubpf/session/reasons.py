"""The reasons in reports and in the JSON summary: why launches are not counted, and why processes are missed.

They are promises: add to them, but do not change them. The man pages explain all of them. Kernels that cannot be instrumented have
further reasons, which `images` and `ptx` give where they refuse a kernel.
"""

from __future__ import annotations

from gpubpf.agent.definitions import Reason
from gpubpf.agent.protocol import REASON_NAMES, NoRoom

# --- why a launch is not counted: keys of `not_instrumented` -------------------------------------------------------

REFUSED = REASON_NAMES[Reason.REFUSED]  # stands for the kernel's own reason, which replaces it
BEFORE_READY = "before ready"
LOADED_BEFORE = (
    "loaded before"  # the kernel's name is unknown, because its module was loaded before the agent
)
NOT_COUNTED = (*(name for name in REASON_NAMES if name != REFUSED), BEFORE_READY, LOADED_BEFORE)

# --- why a process is missed: keys of `missed` ----------------------------------------------------------------------

ENDED = "ended"
NO_DRIVER = "no CUDA driver"
TRACED = "traced by another"
BUSY = "not free in time"
UNHOOKED = "cannot be hooked"
FORBIDDEN = "cannot be traced"
OTHER_DEVICE = "another device"
UNREACHED = "not reached in time"
TOO_LATE = "measurement over"
REACHED_LATE = "reached late"  # measured, but launches before attaching are missing
MISSED = (
    ENDED,
    NO_DRIVER,
    TRACED,
    BUSY,
    UNHOOKED,
    FORBIDDEN,
    OTHER_DEVICE,
    UNREACHED,
    TOO_LATE,
    REACHED_LATE,
)


def no_room(mangled: str, lacking: NoRoom) -> str:
    """Return a notice about a kernel whose launches run the original because no copy fits: what is needed, and what to do."""
    from gpubpf import names

    kernel = names.demangle(mangled).short
    threads = f"{lacking.threads:,} threads"
    instead = "launch fewer or smaller blocks"
    if lacking.allowed is None:
        why = f"its blocks may wait for each other, and the driver does not say how many of {threads} fit"
    elif lacking.needed == 1:
        why = f"a block of {threads} needs more registers with the probe than a multiprocessor has"
        instead = "launch smaller blocks"
    else:
        why = (
            f"its blocks may wait for each other, so {lacking.needed:,} blocks of {threads} must fit at once;"
            f" with the probe, {lacking.allowed:,} do"
        )
    return f"{kernel}: launches run the original (occupancy): {why}; to measure it, {instead}"
