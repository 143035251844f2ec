"""Where the programs of an object go: what the names of its sections mean.

    attach_point("kprobe/_Z5scalePf")       in each thread that enters the kernel scale(float*)
    attach_point("uretprobe/./app:main")    on the host, when main returns

The names are those of libbpf and bpftime. A kprobe is on the GPU unless the Linux kernel has a function of this name. bpftime decides
by an option for the whole run; with it, names that begin with `cuda_` are on the GPU. This prefix is accepted here, and always means
the GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from gpubpf.errors import ImageError, UsageError
from gpubpf.linux.libraries import LibraryNames

_SYMBOLS = Path("/proc/kallsyms")
_ON_GPU = "cuda_"
_ACCESSES, _ALONE = "__memcapture", "__directly_run"
ALONE = f"kprobe/{_ALONE}"
# Sections on the host: the event, and whether the program runs at the function's return.
_HOST = {
    "tracepoint": ("tracepoint", False),
    "tp": ("tracepoint", False),
    "raw_tp": ("raw", False),
    "raw_tracepoint": ("raw", False),
    "uprobe": ("function", False),
    "uretprobe": ("function", True),
}
SECTIONS = "kprobe/KERNEL, kretprobe/KERNEL, kprobe/__memcapture, tracepoint/, raw_tp/, uprobe/ or uretprobe/"


@dataclass(frozen=True)
class AttachPoint:
    """Where a program goes.

    event     entry, exit, access: on the GPU. alone: it runs as a kernel of its own. tracepoint, raw, function: on the host
    kernels   on the GPU: mangled names; none: every kernel
    target    on the host: CATEGORY:NAME, the name of a raw tracepoint, or the function
    path      of the program or library that has the function
    returns   the program runs when the function returns
    """

    section: str
    event: str
    kernels: tuple[str, ...] = ()
    target: str = ""
    path: str = ""
    returns: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.event in ("entry", "exit", "access", "alone")

    @property
    def point(self) -> str:
        """The point of the function (`bytecode.BpfFunction`)."""
        if self.event == "alone":
            return "entry"
        return self.event if self.on_gpu else "uprobe" if self.event == "function" else "host"


def attach_point(section: str) -> AttachPoint:
    """Return where a program in a section goes. Raises ImageError for a section that is not supported."""
    kind, slash, rest = section.partition("/")
    if kind in ("kprobe", "kretprobe"):
        return _probe(section, kind == "kretprobe", rest)
    event, returns = _HOST.get(kind, ("", False))
    if not event:
        raise ImageError(f"section {section!r} is not supported; use {SECTIONS}")
    if not slash or not rest:
        raise ImageError(
            f"section {section!r} does not say where its program goes; name that with --attach, as in --attach PROGRAM={kind}/…"
        )
    if event == "tracepoint":
        category, slash, name = rest.partition("/")
        if not (category and name):
            raise ImageError(f"section {section!r} names no tracepoint; use tracepoint/CATEGORY/NAME")
        return AttachPoint(section, event, target=f"{category}:{name}")
    if event == "raw":
        return AttachPoint(section, event, target=rest)
    path, _, name = rest.rpartition(":")
    if not path or not name or "+" in name or name.startswith("0x"):
        raise ImageError(f"section {section!r} names no function; use {kind}/PATH:FUNCTION")
    try:
        LibraryNames(path)
    except UsageError as error:
        raise ImageError(f"section {section!r}: {error}") from None
    return AttachPoint(section, event, target=name, path=path, returns=returns)


def _probe(section: str, returns: bool, rest: str) -> AttachPoint:
    on_gpu = rest.startswith(_ON_GPU)
    names = tuple(name for name in rest.removeprefix(_ON_GPU).split(",") if name)
    if not names:
        kind = section.partition("/")[0]
        raise ImageError(
            f"section {section!r} names no kernel; name it with --attach, as in --attach PROGRAM={kind}/KERNEL"
        )
    if names == (_ACCESSES,) and not returns:
        return AttachPoint(section, "access")
    if names == (_ALONE,) and not returns:
        return AttachPoint(section, "alone")
    unknown = [name for name in names if name.startswith("__")]
    if unknown:
        raise ImageError(
            f"section {section!r} is not supported: bpftime's names are {_ACCESSES} and {_ALONE}, for kprobe"
        )
    if not on_gpu and (found := next((name for name in names if _in_linux(name)), None)):
        raise ImageError(
            f"section {section!r}: the Linux kernel has a function {found}, and probes on it are not supported;"
            f" if you mean a GPU kernel, name it {_ON_GPU}{found}"
        )
    return AttachPoint(section, "exit" if returns else "entry", names)


def _in_linux(name: str) -> bool:
    """Return whether the Linux kernel has a function of this name, as far as it says so."""
    return any(b" %s %s\n" % (kind, name.encode()) in _symbols() for kind in (b"t", b"T", b"w", b"W"))


@functools.cache
def _symbols() -> bytes:
    try:
        return _SYMBOLS.read_bytes()
    except OSError:
        return b""
