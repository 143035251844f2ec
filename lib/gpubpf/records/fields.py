"""Fields that the records of several tools have. `show/fields.py` explains declarations."""

from __future__ import annotations

from typing import Any

from gpubpf import names
from gpubpf.agent.definitions import Vendor
from gpubpf.record import replace
from gpubpf.records.launch_shape import NVIDIA, vendor_fields
from gpubpf.show.fields import Field, having
from gpubpf.show.process_records import NOW, PROCESS


def _vendor(one: Any) -> Vendor:
    """Return the vendor of an object's GPU. An object without the attribute `vendor` is of a measured kernel, so its wave is known."""
    found: Vendor = getattr(one, "vendor", Vendor.AMD if one.wave else Vendor.NVIDIA)
    return found


def _lanes(one: Any) -> int | None:
    """Return the lanes of a warp or wave; None: not known, which may be so on an AMD GPU."""
    return NVIDIA.lanes if _vendor(one) is Vendor.NVIDIA else one.wave


# Of objects with the attributes pid, comm, gpu, wave and mangled.
GPU = Field("gpu", "integer", "ordinal")
_NVIDIA, _AMD = Vendor.NVIDIA.word, Vendor.AMD.word
VENDOR = Field("vendor", f"{_NVIDIA}|{_AMD}", get=lambda one: _vendor(one).word)
WAVE = Field("wave", "integer", "lanes of a warp or wave", get=_lanes)
OWNER = (*PROCESS, GPU, VENDOR, WAVE)
# Of objects with the attribute `vendor`, too, which are not of a measured kernel.
OWNER_OF_HOST = (
    *(*PROCESS, GPU, VENDOR),
    Field("wave", "integer?", "lanes of the GPU's warps or waves; null if not known", get=_lanes),
)
KERNEL = Field(
    "kernel",
    "string",
    "demangled, without template arguments and parameters",
    get=lambda one: names.demangle(one.mangled).short,
    header="KERNEL",
    left=True,
)
DEMANGLED = Field("demangled", "string", "in full", get=lambda one: names.demangle(one.mangled).full)
MANGLED = Field("mangled", "string", "the name in the device code")
SHAPE = tuple(
    Field(name, "index", "dimensions, [x,y,z]", get=f"shape.{name}") for name in ("grid", "block_dim")
)
BLOCK = Field("block", "index", "index, [x,y,z]")
THREAD = Field("thread", "index", "index, [x,y,z]")
STAMP = replace(NOW, when="with -T")
REGISTERS = Field(
    "registers",
    having(
        Field("before", "integer?"),
        Field("after", "integer?"),
        Field("spilled_bytes", "bytes", when="if a copy has fewer than it needs"),
    ),
    "per thread, before and after the probe was put in; null if not known",
)
SAMPLED = Field(
    "sampled",
    having(
        Field("unit", "block|warp"),
        Field("one_in", "integer", "N"),
        Field("seed", "integer"),
        Field("chosen", "integer", "measured in all launches, or in the interval"),
        Field(
            "of",
            "integer?",
            "how many there were; null if launches may have been running when maps were read",
        ),
    ),
    "the sample",
    when="with --sample-blocks or --sample-warps",
)


def owner_of(one: Any) -> dict[str, Any]:
    """Return the values of OWNER for an object with pid, comm, gpu, vendor, and wave, which may be unknown (None)."""
    return {"pid": one.pid, "comm": one.comm, "gpu": one.gpu, **vendor_fields(one.vendor, one.wave)}


def registers(before: int | None, after: int | None, spilled: int) -> dict[str, int | None]:
    """Return the value of REGISTERS."""
    return {"before": before, "after": after} | ({"spilled_bytes": spilled} if spilled else {})
