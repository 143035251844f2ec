"""Where the programs of an object are attached, according to the names of their sections.

    attach_point("kprobe/_Z5scalePf")       in each thread that enters the kernel scale(float*)
    attach_point("uretprobe/./app:main")    on the host, when main returns

The names are those of libbpf and bpftime. A kprobe is on the GPU unless the Linux kernel has a function with this name. In bpftime, an
option for the whole run decides; with the option, names that begin with `cuda_` are on the GPU. Here, this prefix always means the
GPU. For perf events, libbpf lets the loader choose the event; here the section names the event.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from gpubpf.errors import ImageError, UsageError
from gpubpf.linux import kernel_events
from gpubpf.linux.libraries import LibraryNames
from gpubpf.record import Record

_SYMBOLS = Path("/proc/kallsyms")
ON_GPU = "cuda_"
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
    "perf_event": ("perf_event", False),
}
SECTIONS = (
    "kprobe/KERNEL, kretprobe/KERNEL, kprobe/__memcapture,"
    " tracepoint/ or tp/, raw_tp/ or raw_tracepoint/, uprobe/, uretprobe/, perf_event/"
)
# FUNCTION+OFFSET; in C++, the name of an operator may have a plus sign.
_FUNCTION = re.compile(r"((?:[^+]|(?<=operator)\+[+=]?)+)(?:\+(0x[0-9a-fA-F]{1,8}|\d{1,8}))?")
# PATH:FUNCTION; in C++, FUNCTION may have colons in pairs.
_PATH = re.compile(r"(.*[^:]):(?!:)(.*)", re.DOTALL)


class AttachPoint(Record):
    """Where a program is attached.

    event     entry, exit, access: on the GPU. alone: the program runs as a separate kernel. function: on the host, in traced
              processes. tracepoint, raw, kernel_function, perf_event: on the host, for the whole machine
    kernels   on the GPU: mangled names; empty: every kernel
    target    on the host: CATEGORY:NAME, the name of a raw tracepoint, the function, or the perf event
    path      path of the program or library that has the function
    returns   the program runs when the function returns
    offset    offset of the instruction in the function, in bytes
    """

    section: str
    event: str
    kernels: tuple[str, ...] = ()
    target: str = ""
    path: str = ""
    returns: bool = False
    offset: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.event in ("entry", "exit", "access", "alone")

    @property
    def point(self) -> str:
        """The point of the function (`bytecode.BpfFunction`)."""
        if self.event == "alone":
            return "entry"
        if self.on_gpu:
            return self.event
        return "uprobe" if self.event in ("function", "kernel_function") else "host"

    @property
    def of_machine(self) -> bool:
        """Whether the program runs for the whole machine, not for traced processes."""
        return not self.on_gpu and self.event != "function"


def attach_point(section: str) -> AttachPoint:
    """Return where a program in a section is attached. Raises ImageError for a section that is not supported."""
    kind, slash, rest = section.partition("/")
    if kind in ("kprobe", "kretprobe"):
        return _probe(section, kind == "kretprobe", rest)
    event, returns = _HOST.get(kind, ("", False))
    if not event:
        raise ImageError(f"section {section!r} is not supported; use {SECTIONS}")
    if not slash or not rest:
        form = f"EVENT:N or {kind}/EVENT:Nhz" if event == "perf_event" else "…"
        raise ImageError(
            f"section {section!r} does not say where its program goes; name that with --attach, as in --attach PROGRAM={kind}/{form}"
        )
    if event == "perf_event":
        try:
            kernel_events.perf_event(rest)
        except UsageError as error:
            raise ImageError(f"section {section!r}: {error}") from None
        return AttachPoint(section, event, target=rest)
    if event == "tracepoint":
        category, slash, name = rest.partition("/")
        if not (category and name):
            raise ImageError(f"section {section!r} names no tracepoint; use tracepoint/CATEGORY/NAME")
        return AttachPoint(section, event, target=f"{category}:{name}")
    if event == "raw":
        return AttachPoint(section, event, target=rest)
    path, function = match.groups() if (match := _PATH.fullmatch(rest)) else ("", "")
    if not path or not function or function.startswith("0x"):
        raise ImageError(f"section {section!r} names no function; use {kind}/PATH:FUNCTION")
    name, offset = _function(section, function, returns)
    try:
        LibraryNames(path)
    except UsageError as error:
        raise ImageError(f"section {section!r}: {error}") from None
    return AttachPoint(section, event, target=name, path=path, returns=returns, offset=offset)


def _function(section: str, text: str, returns: bool) -> tuple[str, int]:
    """Return FUNCTION and OFFSET of FUNCTION+OFFSET."""
    match = _FUNCTION.fullmatch(text)
    if match is None:
        raise ImageError(
            f"section {section!r} has an offset that is not a number; use FUNCTION+OFFSET, such as main+0x10"
        )
    name, offset = match[1], int(match[2] or "0", 0)
    if returns and offset:
        raise ImageError(
            f"section {section!r} has an offset, but a function returns only once; leave +{match[2]} out"
        )
    return name, offset


def _probe(section: str, returns: bool, rest: str) -> AttachPoint:
    on_gpu = rest.startswith(ON_GPU)
    names = tuple(name for name in rest.removeprefix(ON_GPU).split(",") if name)
    if not names:
        kind = section.partition("/")[0]
        raise ImageError(
            f"section {section!r} names no kernel; name it with --attach, as in --attach PROGRAM={kind}/KERNEL"
        )
    if names == (_ACCESSES,) and not returns:
        return AttachPoint(section, "access")
    if names == (_ALONE,) and not returns:
        return AttachPoint(section, "alone")
    if not on_gpu and len(names) == 1 and _in_linux(names[0].partition("+")[0]):
        name, offset = _function(section, names[0], returns)
        return AttachPoint(section, "kernel_function", target=name, returns=returns, offset=offset)
    unknown = [name for name in names if name.startswith("__")]
    if unknown:
        raise ImageError(
            f"section {section!r} is not supported: bpftime's names are {_ACCESSES} and {_ALONE}, for kprobe"
        )
    if not on_gpu and (found := next((name for name in names if _in_linux(name)), None)):
        raise ImageError(
            f"section {section!r}: the Linux kernel has a function {found}, and a program there can have only one;"
            f" if you mean GPU kernels, write {ON_GPU} before the first name"
        )
    return AttachPoint(section, "exit" if returns else "entry", names)


def _in_linux(name: str) -> bool:
    """Return whether the Linux kernel or one of its modules has a function with this name, according to the kernel's own list."""
    return any(
        b" %c %s%c" % (kind, name.encode(), end) in _symbols() for kind in b"tTwW" for end in (b"\n", b"\t")
    )


@functools.cache
def _symbols() -> bytes:
    try:
        return _SYMBOLS.read_bytes()
    except OSError:
        return b""
