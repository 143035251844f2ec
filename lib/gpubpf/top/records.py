"""gputop's JSON records and CSV columns."""

from __future__ import annotations

from typing import Any

from gpubpf import names
from gpubpf.agent.definitions import Vendor
from gpubpf.launches.launch_records import LOSSES
from gpubpf.records.fields import DEMANGLED, KERNEL, MANGLED, STAMP
from gpubpf.records.fields import GPU as ORDINAL
from gpubpf.records.launch_shape import NVIDIA
from gpubpf.session.records import of_every_tool
from gpubpf.show.fields import Field, Fields, having, many
from gpubpf.show.process_records import PROCESS as OF_PROCESS
from gpubpf.top.usage import GRAPH, KernelUse

GRAPHS = "[graphs]"  # what graphs are called whose kernels were not timed one by one


def kernel_name(one: KernelUse) -> str:
    """Return the short name of a kernel."""
    return GRAPHS if one.mangled == GRAPH else names.demangle(one.mangled).short or "?"


_KERNEL = having(
    Field("kernel", "string", f"{KERNEL.meaning}; {GRAPHS}: graphs whose kernels were not timed one by one"),
    Field("demangled", "string", DEMANGLED.meaning),
    Field("mangled", "string", MANGLED.meaning),
    Field("gpu_ns", "ns", "time in which launches ran in the interval, summed over launches"),
    Field("launches", "integer"),
)


def _kernels(use: Any) -> list[dict[str, Any]]:
    return [
        {
            "kernel": kernel_name(one),
            "demangled": GRAPHS if one.mangled == GRAPH else names.demangle(one.mangled).full,
            "mangled": one.mangled,
            "gpu_ns": one.gpu_ns,
            "launches": one.launches,
        }
        for one in use.kernels
    ]


def _wave(use: Any) -> int | None:
    wave: int | None = NVIDIA.lanes if use.vendor is Vendor.NVIDIA else use.wave
    return wave


_VENDOR = Field("vendor", f"{Vendor.NVIDIA.word}|{Vendor.AMD.word}", get="vendor.word")
_INTERVAL = Field("interval_ns", "ns", "length of the interval")
_SHARE = "share of the interval in which at least one kernel ran, from 0 to 1; null if no time is known"
PROCESS = Fields(
    "process",
    "One for each process and GPU in each interval, those with the most GPU time first (with --sort: the most of that).",
    (
        *OF_PROCESS,
        ORDINAL,
        _VENDOR,
        Field("wave", "integer?", "lanes of a warp or wave; null if not known", get=_wave),
        Field("gpu_share", "number?", _SHARE, get="share"),
        Field("busy_ns", "ns?", "the same as a time"),
        _INTERVAL,
        Field("launches", "integer", "kernels"),
        Field("running", "integer", "kernels that ran when the interval ended"),
        Field("copies", "integer", "copies from or to GPU memory"),
        Field("copies_bytes", "bytes", "of these copies"),
        Field(
            "memory_bytes",
            "bytes",
            "GPU memory that was held when the interval ended, of allocations that were seen",
        ),
        Field(
            "memory_complete", "boolean", "false if the process may have allocated memory before the attach"
        ),
        Field("waits", "integer", "calls that waited for the GPU and returned in the interval"),
        Field("wait_ns", "ns", "time of these calls, summed over threads"),
        Field("ended", "boolean", "whether the process has ended"),
        Field("kernels", many(_KERNEL), "the kernel with the most GPU time first", get=_kernels),
        STAMP,
    ),
    csv="pid comm gpu vendor gpu_share busy_ns interval_ns launches running copies copies_bytes memory_bytes "
    "waits wait_ns ended kernel",
    csv_fields=(Field("kernel", "string", "the kernel with the most GPU time"),),
)
GPU = Fields(
    "gpu",
    "One for each GPU in each interval.",
    (
        Field("gpu", "integer", "ordinal"),
        _VENDOR,
        Field("gpu_share", "number?", f"{_SHARE}; of all measured processes", get="share"),
        Field("busy_ns", "ns?", "the same as a time"),
        _INTERVAL,
        Field("processes", "integer", "measured processes that use the GPU"),
        STAMP,
    ),
)
_UNKNOWN = "null if not known"
_MEMORY = (
    Field("memory_used_bytes", "bytes?", _UNKNOWN),
    Field("memory_total_bytes", "bytes?", _UNKNOWN),
)
DEVICE = Fields(
    "device",
    "One in each interval for each GPU that NVML or AMD's driver knows.",
    (
        _VENDOR,
        Field("index", "integer", "the driver's number; a process may number its GPUs otherwise"),
        Field("name", "string?", _UNKNOWN),
        Field("id", "string?", "UUID of an NVIDIA GPU, PCI address of an AMD GPU"),
        Field("utilization", "number?", f"as the driver measures it, from 0 to 1; {_UNKNOWN}"),
        *_MEMORY,
        Field("clock_mhz", "integer?", f"of the multiprocessors; {_UNKNOWN}"),
        Field("power_mw", "integer?", f"in mW; {_UNKNOWN}"),
        Field("temperature_c", "integer?", f"in degrees Celsius; {_UNKNOWN}"),
        Field("mig", "boolean?", f"whether MIG is on; {_UNKNOWN}"),
        Field(
            "instances",
            many(having(name="string", id="string", memory_used_bytes="bytes", memory_total_bytes="bytes")),
            "of MIG",
            get=lambda one: list(one.instances),
        ),
        Field(
            "processes",
            many(having(pid="integer", memory_bytes="bytes?")),
            "all that use the GPU, as NVML knows them, measured or not",
            get=lambda one: list(one.processes),
        ),
        Field("unknown", "{string}", "by field: why it is not known", get=lambda one: dict(one.unknown)),
        STAMP,
    ),
)
RECORDS = (
    PROCESS,
    GPU,
    DEVICE,
    *of_every_tool(
        *LOSSES,
        Field(
            "late_ns", "ns", "GPU time that became known after the report of its interval; no record has it"
        ),
    ),
)
