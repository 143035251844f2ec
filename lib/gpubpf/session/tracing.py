"""A tool's command line (`cli`) → a session: which device, which command, what of it is told to the user."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpubpf.errors import Error, SessionError
from gpubpf.session import device, joining
from gpubpf.session.device import Device
from gpubpf.session.measurement import Follow, Listener, Plan, Whom
from gpubpf.session.session import Session
from gpubpf.session.workers import Makers
from gpubpf.show import notices

if TYPE_CHECKING:
    from gpubpf.ebpf.maps import MapDefinition
    from gpubpf.images import fatbin
    from gpubpf.images.assemble import Target
    from gpubpf.images.instrument import Attachment, Sidecar
    from gpubpf.images.listing import ImageFile
    from gpubpf.linux.host_programs import Host
    from gpubpf.show.output import Output


def trace(
    args: argparse.Namespace,
    attachments: Callable[[], Sequence[Attachment]],
    definitions: Sequence[MapDefinition],
    params: Mapping[str, bytes],
    out: Output | None = None,
    follow: Follow | None = None,
    host: Callable[[Callable[[str], None], bool], Host | None] = lambda note, virtual: None,
    accesses: bool = False,
) -> Session:
    """The measurement that a tool's command line asks for. `attachments` makes the lowered programs, `definitions` are the maps
    that they use, `params` the bytes of those that travel by value. With `--json`, `out` gets "attached" records. `follow`: what is
    wanted beside maps, where `--graphs`, `--ring-size` and `--ring` say nothing else. `host` makes the host side, given what notices
    go to, and whether the clock is virtual. `accesses`: see `Plan`."""
    lowered = functools.cache(attachments)

    def attached(pid: int, comm: str, ts_ns: int) -> None:
        note(f"attached to {pid} ({comm})")
        if args.json and out is not None:
            out.record(type="attached", pid=pid, comm=comm, ts_ns=ts_ns)

    def instrument(data: bytes, target: Target) -> Sidecar:
        from gpubpf.images import instrument

        return instrument.instrument_image(data, lowered(), target)

    def registers(sidecar: Any, target: Target) -> Mapping[str, tuple[int, int]]:
        from gpubpf.images import instrument

        return instrument.register_use(sidecar, target)

    def matches(name: str) -> bool:
        from gpubpf import names

        return names.matches(wanted, name)

    tool = args.tool

    def note(text: str) -> None:
        notices.note(tool, text)

    def watching(ts_ns: int) -> None:
        note("watching every process")
        if args.json and out is not None:
            out.record(type="watching", ts_ns=ts_ns)

    whom = _whom(args)
    chosen = _device(args)
    wanted = tuple(args.kernel)
    plan = Plan(
        chosen,
        definitions,
        params,
        matches if wanted else None,
        wanted,
        args.launch or Plan.launches,
        args.sample or Plan.sample,
        args.map_memory or Plan.map_memory,
        follow=_follow(args, follow or Follow(), chosen),
        host=host(note, chosen.virtual),
        accesses=accesses,
        alone=getattr(args, "alone", False),
    )
    listener = Listener(note, lambda text: notices.complain(tool, text), attached, watching)
    return Session(whom, plan, Makers(instrument, registers, lowered), listener, args.duration)


def _follow(args: argparse.Namespace, follow: Follow, chosen: Device) -> Follow:
    """With what the command line says. Graphs are instrumented by default where no real driver has to play along."""
    graphs = getattr(args, "graphs", None)
    size, place = getattr(args, "ring_size", None), getattr(args, "ring", None)
    return dataclasses.replace(
        follow,
        graphs=chosen.kind == "sim" if graphs is None else bool(graphs),
        cupti=_cupti(args, chosen),
        ring_size=size or follow.ring_size,
        ring_in_gpu=place == "gpu" if place else follow.ring_in_gpu,
    )


def _cupti(args: argparse.Namespace, chosen: Device) -> Sequence[str]:
    """The libraries that `--cupti` means."""
    named = getattr(args, "cupti", None)
    if named:
        return (named,)
    if named is not None and chosen.kind == "sim":
        notices.note(args.tool, "CUPTI works on a GPU only; timing events do instead")
    return device.cupti_libraries() if named is not None and chosen.kind == "gpu" else ()


def device_of(args: argparse.Namespace) -> Device:
    """Return the device that a command line measures: the one that the processes of -p use, or else the one that --device names.

    Raises SessionError when that device cannot be used, or when the processes of -p use different ones.
    """
    return _device_of_all(args.pid) if args.pid else device.choose(args.device)


def virtual(args: argparse.Namespace) -> bool:
    """Return whether the measurement will run on the virtual clock of the embedded device."""
    try:
        return device_of(args).virtual
    except SessionError:
        return False  # starting the session raises the same error


def target(args: argparse.Namespace) -> Target:
    """The device that `--device` means, for what needs no command."""
    from gpubpf.images.assemble import Target

    with contextlib.suppress(SessionError, OSError):  # one that has not loaded the driver may use any
        if args.pid:
            chosen = joining.device_of(args.pid[0])
            variables = Path(f"/proc/{args.pid[0]}/environ").read_bytes().split(b"\0")
            theirs = dict(os.fsdecode(v).partition("=")[::2] for v in variables)
            return Target(chosen.kind, device.compute_capability(chosen, theirs))
    try:
        chosen = device.choose(args.device)
        return Target(chosen.kind, device.compute_capability(chosen))
    except SessionError:
        if args.device == "gpu" or not (args.files or args.pid):
            raise
        # Nothing runs: what files hold can be told without a device, as for the embedded one.
        return Target("sim", device.compute_capability(Device("sim")))


def observe(args: argparse.Namespace) -> tuple[list[ImageFile], int]:
    """Runs the command to its end, its kernels as they are: the modules that its processes loaded (one source for each name of a
    process) with the launches of their kernels, and the exit status."""
    from gpubpf.images import fatbin, instrument
    from gpubpf.images.listing import ImageFile

    loaded: dict[str, dict[bytes, bytes]] = {}

    def keep(comm: str, data: bytes) -> None:
        loaded.setdefault(comm, {})[hashlib.sha256(data).digest()] = data

    session = Session(
        _whom(args),
        Plan(_device(args)),
        Makers(lambda data, target: instrument.Sidecar()),
        Listener(lambda text: notices.note(args.tool, text), loaded=keep),
        args.duration,
    )
    with session:
        for _ in session.intervals():
            pass
    launches = session.launches_by_comm()
    pids = session.pids()
    sources = []
    for comm in dict.fromkeys([*loaded, *launches]):
        images: list[fatbin.Image] = []
        for data in loaded.get(comm, {}).values():
            first = max((image.module for image in images), default=-1) + 1
            with contextlib.suppress(Error):
                images += [
                    dataclasses.replace(image, module=first + image.module)
                    for image in fatbin.images_of_bytes(data)
                ]
        sources.append(ImageFile(comm, tuple(images), launches.get(comm, {}), pids.get(comm), comm))
    return sources, session.status


def _whom(args: argparse.Namespace) -> Whom:
    if args.command or args.pid:
        return Whom(args.command or (), args.pid, user=args.user)
    if os.geteuid() != 0:
        raise SessionError(
            f"watching every process takes root; use sudo, or name whom to watch: {args.tool} -p PID, {args.tool} -- COMMAND"
        )
    return Whom(everyone=True)


def _device_of_all(pids: Sequence[int]) -> Device:
    """The device that these processes use: those of them that can be measured. Raises SessionError."""
    found: dict[int, Device] = {}
    errors: list[SessionError] = []
    for pid in pids:
        try:
            found[pid] = joining.device_of(pid)
        except SessionError as error:
            errors.append(error)  # it is told when it is attached to
    if not found:
        raise joining.nobody(errors)
    first, *rest = found
    for pid in rest:
        if found[pid] != found[first]:
            what = [f"pid {p} uses {found[p].name}" for p in (first, pid)]
            raise SessionError(
                f"{' and '.join(what)}, whose times and memory have nothing in common; measure them one by one"
            )
    return found[first]


def _device(args: argparse.Namespace) -> Device:
    chosen = device_of(args)
    if chosen.notice:
        notices.note(args.tool, chosen.notice)
    return chosen
