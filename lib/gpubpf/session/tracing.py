"""Make a session from the arguments of a tool's command line (`gpubpf.show.cli`).

Tools call `trace`. Listings and checks that precede a session use `observe`, `target` and `virtual`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf import agent, digest
from gpubpf.agent.definitions import SANITIZER_VARIABLE
from gpubpf.ebpf import sampling
from gpubpf.errors import Error, SessionError, UsageError
from gpubpf.process import started_with
from gpubpf.record import Record, replace
from gpubpf.session.session import Session
from gpubpf.show import notices
from gpubpf.show.parsed import Options
from gpubpf.traced import device, joining
from gpubpf.traced.command import NVTX_VARIABLE
from gpubpf.traced.device import Device
from gpubpf.traced.measurement import Follow, Listener, Plan, Targets
from gpubpf.traced.workers import SidecarBuilder

if TYPE_CHECKING:
    from gpubpf.ebpf.maps import MapDefinition
    from gpubpf.ebpf.probe import Probe
    from gpubpf.images import fatbin
    from gpubpf.images.assemble import Target
    from gpubpf.images.code_objects import ForWaves
    from gpubpf.images.listing import ImageFile
    from gpubpf.images.sidecar import RegisterUse, Sidecar, Source
    from gpubpf.inject.values import PtxProbe
    from gpubpf.linux.host_programs import Host
    from gpubpf.show.output import Output

CUPTI_STAND_IN = (
    "GPUBPF_CUPTI_STAND_IN"  # environment variable for tests: CUPTI's library for the embedded device
)


class ForAmd(Record):
    """What a measurement needs for AMD GPUs: functions that return the probes, and the maps of their programs.

    notice: a notice, printed once kernels for AMD GPUs are instrumented; "": none.
    refusal: why kernels that the probes choose are not measured; "": they are."""

    probes: Callable[[], Sequence[Probe[ForWaves]]]
    definitions: Callable[[], Sequence[MapDefinition]]
    notice: str = ""
    refusal: str = ""


def trace(
    options: Options,
    probes: Callable[[], Sequence[PtxProbe]] | None,
    definitions: Sequence[MapDefinition],
    params: Mapping[str, bytes],
    out: Output | None = None,
    follow: Follow | None = None,
    host: Callable[[Callable[[str], None], bool], Host | None] = lambda note, virtual: None,
    accesses: bool = False,
    amd: ForAmd | None = None,
) -> Session:
    """Return the session that a tool's command line requests. Raises SessionError.

    probes: return the lowered programs; called once. None: there are no programs, so no kernel is measured, and `follow` says what is
        collected.
    definitions: the maps that they use. params: the bytes of maps of kind "param".
    out: gets "attached" and "watching" records with `--json`.
    follow: what to collect besides maps; `--graphs`, `--ring-size`, `--ring`, `--cupti` and `--no-cupti` override it.
    host: return the host programs, given a function for notices and whether the clock is virtual.
    accesses: see `Plan`.
    amd: the probes and maps for AMD GPUs; None: there are none.
    """
    lowered = functools.cache(probes or tuple)
    if probes is None:
        amd = ForAmd(tuple, tuple)

    @functools.cache
    def for_amd() -> Sequence[Probe[ForWaves]]:
        if amd and amd.notice:
            note(amd.notice)
        if options.kernels.ranges:
            note("the ranges of HIP programs (ROCTX) are unknown, so --range leaves out all their launches")
        return amd.probes() if amd else ()

    def attached(pid: int, comm: str, ts_ns: int, again: str) -> None:
        note(f"attached to {pid} ({comm}){', ' if again else ''}{again}")
        if options.output.json and out is not None:
            from gpubpf.show.process_records import ATTACHED

            out.records([ATTACHED.record(pid=pid, comm=comm, ts_ns=ts_ns)])

    def waiting(pid: int, comm: str, ts_ns: int, kernels: int) -> None:
        what = "a kernel is" if kernels == 1 else f"{kernels} kernels are"
        note(f"attached to {pid} ({comm}), but {what} not instrumented yet: launches run the original")
        if options.output.json and out is not None:
            from gpubpf.show.process_records import ATTACHED

            out.records([ATTACHED.record(pid=pid, comm=comm, ts_ns=ts_ns, waiting=kernels)])

    def instrument(data: bytes, target: Target | None) -> Sidecar:
        if target is None:
            from gpubpf.images import code_objects

            if amd and amd.refusal:
                return code_objects.refused(data, amd.probes(), amd.refusal)
            return code_objects.instrument(data, for_amd(), chosen.virtual)
        from gpubpf.images import instrument

        made = instrument.instrument_image(data, lowered(), target, later=True)
        if not sass:
            return made
        from gpubpf.images.patches import with_patched

        return with_patched(made, lowered(), data, target)

    def patches(table: int, target: Target) -> Sidecar:
        from gpubpf.images.patches import patches_at

        return patches_at(table, lowered(), target)

    def kernels(source: Source, target: Target, names: Collection[str]) -> Sidecar:
        from gpubpf.images import instrument

        return instrument.instrument_kernels(source, lowered(), target, names)

    def registers(sidecar: Any, target: Target | None, kernels: Collection[str]) -> Mapping[str, RegisterUse]:
        from gpubpf.images import instrument

        if target is None:
            return {kernel.name: kernel.amd.registers for kernel in sidecar.kernels if kernel.name in kernels}
        return instrument.register_use(sidecar, target, kernels)

    def matches(name: str) -> bool:
        from gpubpf import names

        return probes is not None and names.matches(wanted, name)

    tool = options.output.tool

    def note(text: str) -> None:
        notices.note(tool, text)

    def watching(ts_ns: int) -> None:
        note("watching every process")
        if options.output.json and out is not None:
            from gpubpf.show.process_records import WATCHING

            out.records([WATCHING.record(ts_ns=ts_ns)])

    sass = options.kernels.sass
    if options.kernels.ranges and not options.targets.command:
        note(
            "a process shows its ranges only if a tool started it with --range, or if it was started with"
            f" {NVTX_VARIABLE}={agent.LIBRARY}"
        )
    targets = _targets(options)
    measures_amd = amd is not None and not amd.refusal
    chosen = _device(options, measures_amd)
    wanted = tuple(options.kernels.wanted)
    plan = Plan(
        chosen,
        definitions,
        params,
        matches if wanted or probes is None else None,
        wanted,
        options.kernels.launches,
        options.kernels.sample,
        options.kernels.budget,
        options.kernels.ranges,
        options.device.map_memory,
        follow=_follow(options, follow or Follow(), chosen),
        host=host(note, chosen.virtual),
        accesses=accesses,
        amd=measures_amd,
        amd_definitions=amd.definitions if amd else None,
        owns_process=options.targets.alone,
        registers=options.output.json or options.output.verbose,
        sampled="" if sampling.PARAMETER not in params else "block" if options.sampling.blocks else "warp",
    )
    listener = Listener(note, lambda text: notices.complain(tool, text), attached, waiting, watching)
    return Session(
        targets,
        plan,
        SidecarBuilder(instrument, registers, lowered, kernels, patches if sass else None),
        listener,
        options.targets.duration,
    )


def _follow(options: Options, follow: Follow, chosen: Device) -> Follow:
    """Return `follow` with the command line's options applied."""
    size, place = options.rings.size, options.rings.place
    return replace(
        follow,
        ranges=follow.ranges or bool(follow.log_records and options.kernels.ranges),
        graphs=options.kernels.graphs,
        cupti=_cupti(options, chosen),
        sanitizer=_sanitizer(options, chosen),
        cupti_automatic=options.device.cupti is None,
        ring_size=size or follow.ring_size,
        ring_in_gpu=place == "gpu" if place else follow.ring_in_gpu,
    )


def _cupti(options: Options, chosen: Device) -> Sequence[str]:
    """Return possible paths of CUPTI's library. Give a notice if `--cupti` cannot be satisfied.

    Running processes may already use CUPTI themselves, so only a command gets it."""
    wanted = options.device.cupti  # "": --cupti; None: neither --cupti nor --no-cupti
    if wanted is False or options.kernels.sass:  # Compute Sanitizer excludes CUPTI
        return ()
    lacks = "a command that launchlate starts" if not options.targets.command else ""
    if not wanted and chosen.kind == "sim" and CUPTI_STAND_IN not in os.environ:
        lacks = "a GPU"
    if lacks and wanted is not None:
        notices.note(options.output.tool, f"CUPTI requires {lacks}; using timing events instead")
    if lacks:
        return ()
    if isinstance(wanted, str) and wanted:
        return (wanted,)
    return (os.environ[CUPTI_STAND_IN],) if chosen.kind == "sim" else device.cupti_libraries()


def _sanitizer(options: Options, chosen: Device) -> Sequence[str]:
    """Return possible paths of the Compute Sanitizer library; none without `--sass`. Raises SessionError if there is no library."""
    if not options.kernels.sass:
        return ()
    found = device.sanitizer_libraries(chosen)
    if not found:
        raise SessionError(
            "--sass needs libsanitizer-public.so; install the CUDA toolkit, or nvidia-cuda-sanitizer-api from PyPI,"
            f" or set {SANITIZER_VARIABLE} to its path"
        )
    return found


def device_of(options: Options) -> Device:
    """Return the device that a command line measures: the device that the processes of -p use, otherwise that of --device.

    Raises SessionError if that device cannot be used, or if the processes of -p use different devices; UsageError for --clock without
    a command.
    """
    clock = options.device.clock
    if clock and not options.targets.command:
        raise UsageError(
            "--clock chooses the clock of a COMMAND; start other programs with CUDASIM_CLOCK=virtual"
        )
    if options.targets.pids:
        return _device_of_all(options.targets.pids)
    for_hip = False
    if options.targets.command:
        from gpubpf.traced import amd_device  # imported here: not for -p

        for_hip = amd_device.is_for_hip(options.targets.command[0]) and amd_device.has_gpu()
    measures_times = options.targets.command and options.device.measures_times
    return device.choose(
        options.device.kind,
        clock=clock,
        default_clock="virtual" if measures_times else "real",
        amd_gpu=for_hip,
    )


def virtual(options: Options) -> bool:
    """Return whether the session will use the embedded device's virtual clock."""
    try:
        return device_of(options).virtual
    except SessionError:
        return False  # `trace` will raise the same error


def target(options: Options) -> Target:
    """Return the device that `--device` or `-p` selects, for listings, which need no session. Raises SessionError."""
    from gpubpf.images.assemble import Target

    with contextlib.suppress(SessionError, OSError):  # a process without a driver may use any device
        if options.targets.pids:
            chosen = joining.device_of(options.targets.pids[0])
            environment = started_with.environment(options.targets.pids[0], ["CUDASIM_CC"])
            return Target(chosen.kind, device.compute_capability(chosen, environment))
    try:
        chosen = device.choose(options.device.kind)
        return Target(chosen.kind, device.compute_capability(chosen))
    except SessionError:
        if options.device.kind == "gpu" or not (options.targets.files or options.targets.pids):
            raise
        # Nothing will run, so list files as for the embedded device.
        return Target("sim", device.compute_capability(Device("sim")))


def observe(options: Options) -> tuple[list[ImageFile], int]:
    """Run the command without instrumenting kernels. Return what its processes loaded, and the tool's exit status.

    There is one source per process name (comm): its loaded images, and launches by kernel. Raises SessionError."""
    from gpubpf.gcn.code_object import is_code_object
    from gpubpf.images import fatbin
    from gpubpf.images.listing import ImageFile
    from gpubpf.images.sidecar import Sidecar

    loaded: dict[str, dict[bytes, bytes]] = {}

    def keep(comm: str, data: bytes) -> None:
        loaded.setdefault(comm, {})[digest.sha256(data).digest()] = data

    session = Session(
        _targets(options),
        Plan(_device(options, amd=True), amd=True),
        SidecarBuilder(lambda data, target: Sidecar()),
        Listener(lambda text: notices.note(options.output.tool, text), loaded=keep),
        options.targets.duration,
    )
    with session:
        for _ in session.intervals():
            pass
    launches = session.launches_by_comm()
    pids = session.pids()
    sources = []
    for comm in dict.fromkeys([*loaded, *launches]):
        images: list[fatbin.FatbinImage] = []
        code_objects = tuple(data for data in loaded.get(comm, {}).values() if is_code_object(data))
        for data in loaded.get(comm, {}).values():
            first = max((image.module for image in images), default=-1) + 1
            with contextlib.suppress(Error):
                images += [
                    replace(image, module=first + image.module) for image in fatbin.images_of_bytes(data)
                ]
        launched = launches.get(comm, {})
        sources.append(ImageFile(comm, tuple(images), launched, pids.get(comm), comm, code_objects))
    return sources, session.status


def _targets(options: Options) -> Targets:
    """Return the targets of the command line. Raises SessionError if they are all processes and the user is not root."""
    of, tool = options.targets, options.output.tool
    if of.command or of.pids:
        return Targets(of.command or (), of.pids, user=of.user, ptx_options=of.ptx_options)
    if os.geteuid() != 0:
        raise SessionError(
            f"watching all processes requires root; use sudo, or name what to trace: {tool} -p PID, {tool} -- COMMAND"
        )
    return Targets(all_processes=True)


def _device_of_all(pids: Sequence[int]) -> Device:
    """Return the device that these processes share, ignoring those that cannot be traced.

    Raises SessionError if they use different devices, or if none can be traced."""
    found: dict[int, Device] = {}
    errors: list[SessionError] = []
    for pid in pids:
        try:
            found[pid] = joining.device_of(pid)
        except SessionError as error:
            errors.append(error)  # the session will report it when it attaches
    if not found:
        raise joining.all_failed(errors)
    first, *rest = found
    for pid in rest:
        if found[pid] != found[first]:
            what = [f"pid {p} uses {found[p].name}" for p in (first, pid)]
            raise SessionError(
                f"{' and '.join(what)}, which share neither clock nor memory; trace them one at a time"
            )
    return found[first]


def _device(options: Options, amd: bool = False) -> Device:
    chosen, tool, command = device_of(options), options.output.tool, options.targets.command
    unmeasured = False
    if command:
        from gpubpf.traced import amd_device

        chosen = amd_device.beside(chosen, options.device.kind, command[0])
        unmeasured = not amd and amd_device.is_for_hip(command[0])
    if chosen.notice:
        notices.note(tool, chosen.notice)
    if unmeasured and command:
        notices.note(tool, f"{command[0]} is for AMD GPUs, whose kernels {tool} does not measure yet")
    return chosen
