"""A sidecar: the instrumented copy of a module, as a value, and what it is made from.

`images.instrument` makes sidecars of NVIDIA's images, `images.code_objects` those of AMD's. The cache keeps them packed:

    kept = pack(sidecar)
    unpack(kept)                      # the sidecar, or None
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf import names
from gpubpf.inject.values import InjectedVariable, Site
from gpubpf.lower.launch_block import LaunchBlock
from gpubpf.record import Record, asdict, field, replace

if TYPE_CHECKING:
    from gpubpf.inject.values import PtxProbe

STAGE = "sidecar"  # in the cache


class SidecarKernel(Record):
    """How to launch the instrumented copy of the kernel `name` (mangled).

    parameters    the application's own parameters, as (offset, size) in bytes
    block_offset  the offset of the launch block, which follows the parameters, in bytes
    limited       the name of a second copy, for launches where the first does not fit; "" without a second copy

    The other attributes are as in `InjectedKernel`.
    """

    name: str
    parameters: tuple[tuple[int, int], ...]
    block_offset: int
    block: LaunchBlock
    sites: tuple[Site, ...] = ()
    waits: bool = True
    site_count: int = 0
    unprobed: Mapping[str, int] = field(default_factory=dict)  # unprobed accesses by opcode
    limited: str = ""
    amd: AmdKernel | None = None  # for a kernel on an AMD GPU
    patched: bool = False  # launch the kernel itself, which has patches (images/patches.py)
    numbered: bool = False  # the patches read the launch's number
    programs: int = 0  # if patched: a bit for each program that the kernel wants


class AmdKernel(Record):
    """Attributes of kernels on AMD GPUs only: see `gcn.kernel_writer.InjectedGcnKernel`. registers: VGPRs."""

    wave: int
    compute_units: int
    most_threads: int
    original_threads: int
    registers: RegisterUse
    references: tuple[tuple[int, int], ...]


class RegisterUse(Record):
    """The registers per thread of a kernel, of its copy, and of its limited copy (0 if there is none).

    spilled, spilled_limited: the additional local memory of these copies compared to the original, in bytes per thread.
    """

    before: int
    after: int
    limited: int = 0
    spilled: int = 0
    spilled_limited: int = 0

    def in_launches(self, instrumented: int, limited: int) -> tuple[int, int, int]:
        """Return the registers before and after, and the bytes spilled. `limited`: the launches of the limited copy."""
        if not limited or not self.limited:
            return self.before, self.after, self.spilled
        after = self.limited if limited >= instrumented else self.after
        return self.before, after, max(self.spilled, self.spilled_limited)


class Sidecar(Record):
    """The image that the agent loads, and what is known about its kernels. Kernel names are mangled.

    image     empty if no kernel matched, or if all were refused
    kernels   how to launch each copy
    refusals  the reason for each matched kernel that is not in `kernels`
    entries   all kernels of the module
    launched  (kernel, copy) for each kernel that has a copy for other kernels to launch
    later     the kernels whose copies are made at their first launch; None: the image has all copies
    """

    image: bytes = field(default=b"", repr=False)
    kernels: tuple[SidecarKernel, ...] = ()
    refusals: Mapping[str, str] = field(default_factory=dict)
    variables: tuple[InjectedVariable, ...] = ()
    entries: tuple[str, ...] = ()
    launched: tuple[tuple[str, str], ...] = ()
    # For `register_use`, which later computes how many registers the probes cost.
    original: str = field(default="", repr=False)
    text: str = field(default="", repr=False)
    options: str = ""
    release: str = ""
    later: Later | None = None
    # The image has these patches: (number of instructions, name of the function) (images/patches.py).
    patches: tuple[tuple[int, str], ...] = ()


class Source(Record):
    """The inputs that a module's sidecar is made from.

    stored   the PTX, perhaps compressed
    digest   the digest of the PTX, a part of cache keys
    options  the application's ptxas options
    release  the ptxas release that made the module's cubin, if known
    before   the registers per thread of the original kernels, as far as known
    own      whether the target would run the code that has these registers
    """

    stored: str | bytes = field(repr=False)
    digest: str
    options: str
    release: str
    before: Mapping[str, int]
    own: bool

    @property
    def text(self) -> str:
        """The PTX."""
        if isinstance(self.stored, str):
            return self.stored
        return zlib.decompress(self.stored).decode("utf-8", "surrogateescape")

    def compressed(self) -> Source:
        """Return the source with compressed PTX, to be kept while the module is loaded."""
        return replace(self, stored=zlib.compress(self.text.encode("utf-8", "surrogateescape"), 1))


class Later(Record):
    """The kernels of a large module (mangled) whose copies are made at their first launch: see `instrument_kernels`."""

    kernels: tuple[str, ...]
    source: Source

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The kernels as a set, for membership tests."""
        return frozenset(self.kernels)


def matching(entries: Sequence[str], probes: Sequence[PtxProbe]) -> tuple[str, ...]:
    """Return those of `entries` (mangled names) that the pattern of a probe matches."""
    return tuple(name for name in entries if any(names.chosen(probe.kernels, name) for probe in probes))


def refuse(entries: Sequence[str], probes: Sequence[PtxProbe], reason: str) -> Sidecar:
    """Return the sidecar of a module without copies: each kernel that a probe matches is refused for `reason`."""
    return Sidecar(refusals=dict.fromkeys(matching(entries, probes), reason), entries=tuple(entries))


# --- the cache ---------------------------------------------------------------------------------------


def pack(sidecar: Sidecar) -> bytes:
    """Return a sidecar in its cache format."""
    head = asdict(replace(sidecar, image=b""))
    head["image"] = ""
    encoded = json.dumps(head).encode()
    return len(encoded).to_bytes(4, "little") + encoded + sidecar.image


def unpack(data: bytes) -> Sidecar | None:
    """Return a cached sidecar; None if its writer was interrupted or used another format."""
    try:
        length = int.from_bytes(data[:4], "little")
        head = json.loads(data[4 : 4 + length])
        return Sidecar(
            data[4 + length :],
            tuple(
                SidecarKernel(
                    kernel["name"],
                    tuple((offset, size) for offset, size in kernel["parameters"]),
                    kernel["block_offset"],
                    LaunchBlock(
                        **kernel["block"]
                        | {"params": {k: (o, s) for k, (o, s) in kernel["block"]["params"].items()}}
                    ),
                    tuple(Site(**site) for site in kernel["sites"]),
                    kernel["waits"],
                    kernel["site_count"],
                    kernel["unprobed"],
                    kernel["limited"],
                    _unpack_amd(kernel["amd"]),
                )
                for kernel in head["kernels"]
            ),
            head["refusals"],
            tuple(
                InjectedVariable(**variable | {"kernels": tuple(variable["kernels"])})
                for variable in head["variables"]
            ),
            tuple(head["entries"]),
            tuple((name, copy) for name, copy in head["launched"]),
            head["original"],
            head["text"],
            head["options"],
            head["release"],
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _unpack_amd(kernel: dict[str, Any] | None) -> AmdKernel | None:
    if kernel is None:
        return None
    references = tuple((place, distance) for place, distance in kernel["references"])
    counts = kernel["wave"], kernel["compute_units"], kernel["most_threads"], kernel["original_threads"]
    return AmdKernel(*counts, RegisterUse(**kernel["registers"]), references)
