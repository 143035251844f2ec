"""`gpubpf check -p PID`: what each tool would measure in a process, without attaching to it and without changing it.

It only reads files of /proc/PID and the memory of the process, in the same way as the tools: the data is untrusted, and reading may
hang.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from gpubpf.agent.definitions import Vendor
from gpubpf.attach.borrow import ProcessCode
from gpubpf.calls import api as host_api
from gpubpf.check import kernel, probing
from gpubpf.check.finding import LIMITED, MISSING, OK, UNKNOWN, Finding, of_error, ok
from gpubpf.check.machine import Machine
from gpubpf.errors import Error, ImageError, SessionError
from gpubpf.gcn.code_object import CodeObject
from gpubpf.images import listing
from gpubpf.images.assemble import Target
from gpubpf.linux.libraries import LibraryNames
from gpubpf.process import address_space, proc, started_with, traceable
from gpubpf.ptx.module import Module
from gpubpf.record import Record
from gpubpf.show import table
from gpubpf.traced import device, joining
from gpubpf.traced.device import Device

T = TypeVar("T")
DEVICE_TOOLS = (
    *("threadhist", "kernelretsnoop", "memtrace", "nansnoop", "warpdiv", "barrierlate", "gpuhang"),
    *("gpucount", "gpudist", "gputrace", "gpurun"),
)
NVIDIA_ONLY = ("nansnoop",)  # kernels of AMD GPUs have no probes at their points
TIMING_TOOLS = ("launchlate", "gpuprofile", "gputop")  # they also measure launches without a probe
_INJECTED = (
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "HSA_TOOLS_LIB",
    "ROCP_TOOL_LIBRARIES",
    "LD_PRELOAD",
)
_NAMESPACES = ("mnt", "pid", "user", "net")
_RUNTIME, _CUPTI = LibraryNames("libcudart.so"), LibraryNames("libcupti.so")
_MOST_REASONS, _LONGEST_REASON = 3, 256
_MOST_NAMES, _LONGEST_NAME = 8, 64
SHARE = 0.5  # share of the time limit that may be used for trying to instrument kernels


class _Kernels(Record):
    """The kernels in files that the process has mapped, for GPUs of NVIDIA and AMD, and why some cannot be instrumented."""

    total: int
    refused: Counter[str]
    amd: int

    @property
    def instrumentable(self) -> int:
        return self.total - self.refused.total()


def findings(pid: int, machine: Machine) -> Iterator[tuple[str, Finding]]:
    """Yield (name, finding): first for each property of the process that decides what tools measure, then for each tool.

    Raises SessionError if the process does not exist, or if this user may not look at it.
    """

    def ask(read: Callable[[], T]) -> T | SessionError:
        """Return the result of `read`, or its error. The time is limited: a process may serve its own memory (FUSE) and not answer."""
        try:
            with traceable.refusals(pid):
                found = probing.within(machine.timeout, lambda: [read()])
        except SessionError as error:
            return error
        except Error as error:
            return SessionError(str(error))
        late = f"pid {pid} cannot be read in {machine.timeout:g} s; try again with a longer --timeout"
        return found[0] if found else SessionError(late)

    refused = _refused(pid)
    mapped = ask(lambda: address_space.mappings(pid))
    if isinstance(mapped, SessionError):
        raise mapped
    attach = _attach(pid, mapped, refused, ask)
    names = sorted({library.name for library in address_space.libraries(mapped)})
    devices = ask(lambda: _devices(pid, mapped))
    kernels = (
        ask(lambda: _kernels(pid, devices, machine.timeout * SHARE))
        if isinstance(devices, dict) and devices
        else None
    )
    agent = _agent(pid, mapped, ask)
    obstacle = attach if attach.state != OK else agent if agent.state != OK else None
    yield "process", ok(table.process(traceable.comm(pid), pid))
    yield "attach", attach
    yield "agent", agent
    yield "devices", _described(devices)
    yield "cuda-runtime", _runtime(devices, names)
    yield "kernels", _counted(kernels)
    yield "seccomp", _seccomp(pid)
    yield "namespaces", _namespaces(pid)
    yield "profilers", _profilers(pid, names, ask)
    for tool in DEVICE_TOOLS:
        yield tool, _device_tool(obstacle, devices, kernels, amd=tool not in NVIDIA_ONLY)
    for tool in TIMING_TOOLS:
        yield (
            tool,
            _every(obstacle, devices, "launch; those without a probe by timing events, on AMD GPUs by ROCr"),
        )
    yield (
        "gpumem",
        _every(obstacle, devices, "allocation from now on; what was allocated before is not known"),
    )
    bpf = kernel.bpf(machine)
    for tool, api in (("cudasnoop", host_api.cuda()), ("hipsnoop", host_api.hip())):
        yield tool, _snoop(bpf, mapped, LibraryNames(*api.libraries))


Devices = Mapping[Vendor, Device]
Ask = Callable[[Callable[[], T]], T | SessionError]


def _refused(pid: int) -> SessionError | None:
    """Return why the tools cannot attach to the process now. Raises SessionError if they never can, or if there is no such process."""
    try:
        traceable.check_traceable(pid)
    except traceable.RefusedForNow as error:
        return error
    return None


def _attach(
    pid: int, mapped: Sequence[address_space.Mapping], refused: SessionError | None, ask: Ask[dict[str, int]]
) -> Finding:
    """Whether the agent could be loaded: opening the memory needs the right to attach, but leaves the process alone."""
    consequence = "every tool but cudasnoop and hipsnoop"

    def functions() -> dict[str, int]:
        with address_space.Memory(pid) as memory:
            return ProcessCode(pid, memory, mapped).functions(pid)

    found = refused or ask(functions)
    if isinstance(found, SessionError):
        return of_error(found, f"{consequence} cannot measure it")
    return ok("allowed, and the C library has what the agent needs")


def _agent(pid: int, mapped: Sequence[address_space.Mapping], ask: Ask[str]) -> Finding:
    if not any(address_space.AGENT.match(mapping.path) for mapping in mapped):
        return ok("not in the process")
    owner = ask(lambda: joining.owner(pid))
    if isinstance(owner, SessionError):
        return Finding(UNKNOWN, str(owner))
    if not owner:
        return ok("in the process, and idle: a tool has measured it before")
    why = "no other tool can attach, except cudasnoop and hipsnoop"
    number = re.search(r"pid (\d+)$", owner)
    if number is not None and not proc.exists(int(number[1])):  # ended, or in another PID namespace
        value = f"a tool measures it, or has just ended: {owner}"
        return Finding(LIMITED, value, why, "try again in a few seconds")
    return Finding(LIMITED, f"a tool measures it now: {owner}", why, "end that tool first")


def _devices(pid: int, mapped: Sequence[address_space.Mapping]) -> Devices:
    """Return the devices by vendor; none if no driver is mapped. Raises SessionError."""
    try:
        return joining.devices_of(pid)
    except traceable.RefusedForNow:
        raise
    except SessionError:
        if joining.has_driver(mapped):
            raise
        return {}


def _described(devices: Devices | SessionError) -> Finding:
    if isinstance(devices, SessionError):
        return Finding(UNKNOWN, str(devices).partition("; ")[0], action=str(devices).partition("; ")[2])
    if not devices:
        action = "wait until it uses the GPU, or start it with the tool: TOOL -- COMMAND"
        return Finding(
            MISSING, "it has loaded neither the CUDA driver nor ROCr", "nothing to measure", action
        )
    return ok(", ".join(f"{_VENDORS[vendor]}: {found.name}" for vendor, found in devices.items()))


_VENDORS = {Vendor.NVIDIA: "CUDA", Vendor.AMD: "HIP"}


def _runtime(devices: Devices | SessionError, names: Sequence[str]) -> Finding:
    """The CUDA runtime of the process. A static runtime is part of the program, so its calls cannot be traced."""
    found = [name for name in names if _RUNTIME.match(name)]
    if found:
        return ok(_few(found))
    if isinstance(devices, SessionError) or Vendor.NVIDIA not in devices:
        return ok("none")
    why = "cudasnoop sees calls of the driver, and none of the runtime"
    action = "build it with nvcc -cudart shared"
    return Finding(LIMITED, "no shared libcudart: linked statically, or not used", why, action, needed=False)


def _kernels(pid: int, devices: Devices, seconds: float) -> _Kernels:
    """Return the kernels in the files that the process has mapped. Raises Error and OSError.

    seconds: after this time, no further kernel is checked. Libraries such as cuFFT have thousands of kernels.
    """
    until = time.monotonic() + seconds

    def check(parsed: Module, kernels: Sequence[str]) -> Mapping[str, str]:
        if time.monotonic() < until:
            return listing.check_injection(parsed, kernels)
        return dict.fromkeys(kernels, f"not checked within {seconds:g} s")

    chosen = next(iter(devices.values()))
    environment = started_with.environment(pid, ["CUDASIM_CC"])
    target = Target(chosen.kind, device.compute_capability(chosen, environment))
    sources = listing.sources_of_process(pid)
    kernels = listing.listed(sources, target, check)
    amd = 0
    for data in (data for source in sources for data in source.code_objects):
        with contextlib.suppress(ImageError):
            amd += len(CodeObject(data).kernels)
    reasons = Counter(kernel.reason for kernel in kernels if kernel.reason is not None)
    return _Kernels(len(kernels), reasons, amd)


def _counted(kernels: _Kernels | SessionError | None) -> Finding:
    if kernels is None:
        return ok("none")
    if isinstance(kernels, SessionError):
        return Finding(UNKNOWN, str(kernels).partition("; ")[0], action="threadhist --list -p PID lists them")
    value = f"{kernels.instrumentable:,} of {kernels.total:,} can be instrumented"
    if kernels.amd:
        of_amd = f"{table.count(kernels.amd, 'kernel')} for AMD GPUs"
        value = f"{value}; {of_amd}" if kernels.total else of_amd
    if not kernels.refused:
        return (
            ok(value) if kernels.total or kernels.amd else ok("none in its files; perhaps made at run time")
        )
    reasons = kernels.refused.most_common(_MOST_REASONS)
    shown = ", ".join(f"{reason[:_LONGEST_REASON]} ({count:,})" for reason, count in reasons)
    return Finding(LIMITED, value, f"the rest runs unchanged: {shown}", "threadhist --list -p PID lists them")


def _seccomp(pid: int) -> Finding:
    known = traceable.status(pid)
    if known.get("Seccomp", "0") == "0":
        return ok("no filter")
    count = known.get("Seccomp_filters", "")
    value = f"{count} filters" if count not in ("", "1") else "a filter"
    why = "a tool reads it when it attaches, and leaves the process alone if the filter would kill it"
    return Finding(UNKNOWN, f"{value}, which only a process that is stopped shows", why)


def _namespaces(pid: int) -> Finding:
    """The namespaces of the process. The agent can also be loaded in containers."""
    other = []
    for kind in _NAMESPACES:
        with contextlib.suppress(OSError):
            if proc.link(pid, f"ns/{kind}") != proc.link(os.getpid(), f"ns/{kind}"):
                other.append(kind)
    if not other:
        return ok("those of this command")
    inside = traceable.status(pid).get("NSpid", "").split()[1:]
    number = f"; its pid there is {inside[-1]}" if inside else ""
    return ok(f"others than those of this command ({', '.join(other)}), as in a container{number}")


def _profilers(pid: int, names: Sequence[str], ask: Ask[dict[str, str]]) -> Finding:
    variables = ask(lambda: started_with.environment(pid, _INJECTED))
    if isinstance(variables, SessionError):
        return Finding(UNKNOWN, str(variables))
    found = sorted(variables) + [name for name in names if _CUPTI.match(name)]
    if not found:
        return ok("none seen")
    why = "another profiler may be in the process: its times include both"
    if "CUDA_INJECTION64_PATH" in variables:
        why = "it was started with a tool, which measures it; without COMMAND and -p, it is left to that tool"
    return Finding(LIMITED, _few(found), why, needed=False)


def _device_tool(
    obstacle: Finding | None,
    devices: Devices | SessionError,
    kernels: _Kernels | SessionError | None,
    amd: bool,
) -> Finding:
    """What a tool with probes in GPU kernels would measure. amd: whether the tool also measures kernels of AMD GPUs."""
    if obstacle is not None:
        state = UNKNOWN if obstacle.state == UNKNOWN else MISSING
        return Finding(state, f"nothing: {obstacle.value}", action=obstacle.action)
    if isinstance(devices, SessionError) or isinstance(kernels, SessionError):
        return Finding(UNKNOWN, "which kernels is not known")
    if not devices or kernels is None:
        return Finding(MISSING, "nothing: it has not loaded a GPU's driver")
    if not kernels.total and not kernels.amd:
        return Finding(UNKNOWN, "kernels that the process makes at run time, if it has any with PTX")
    what = [f"launches of {table.count(kernels.instrumentable, 'kernel')}"] if kernels.total else []
    if kernels.amd and not amd:
        if not kernels.total:
            return Finding(MISSING, "nothing: kernels of AMD GPUs have no probes at its points yet")
    elif kernels.amd:
        what.append(f"{table.count(kernels.amd, 'kernel')} for AMD GPUs, where their code allows it")
    value = " and ".join(what)
    if kernels.refused and not (kernels.amd and amd) and not kernels.instrumentable:
        return Finding(MISSING, f"nothing: {kernels.refused.most_common(1)[0][0]}")
    if kernels.refused:
        return Finding(LIMITED, f"{value}; not of {kernels.refused.total():,}")
    return ok(value)


def _every(obstacle: Finding | None, devices: Devices | SessionError, what: str) -> Finding:
    """What a tool would measure that needs no probe in kernels. what: what the tool measures every one of."""
    if obstacle is not None:
        state = UNKNOWN if obstacle.state == UNKNOWN else MISSING
        return Finding(state, f"nothing: {obstacle.value}", action=obstacle.action)
    if isinstance(devices, SessionError):
        return Finding(UNKNOWN, "whether it uses a GPU is not known")
    if not devices:
        return Finding(MISSING, "nothing: it has not loaded a GPU's driver")
    return ok(f"every {what}")


def _snoop(bpf: Finding, mapped: Sequence[address_space.Mapping], names: LibraryNames) -> Finding:
    """What a tool with uprobes would measure. Such a tool works even if another tracer or an agent is in the process."""
    libraries = address_space.libraries(mapped)
    found = sorted({library.name for library in libraries if names.match(library.path)})
    if not found:
        return Finding(MISSING, f"nothing yet: it has not loaded {names}", needed=False)
    if bpf.state != OK:
        return Finding(bpf.state, f"nothing: {bpf.value}", action=bpf.action)
    return ok(f"calls of {_few(found)}")


def _few(names: Sequence[str]) -> str:
    """Return names in a sentence. A process can map any number of files, with long names."""
    shown = [name[:_LONGEST_NAME] for name in names[:_MOST_NAMES]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")
