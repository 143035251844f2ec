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

from gpubpf import cli, device
from gpubpf.device import Device
from gpubpf.errors import Error, SessionError, UsageError
from gpubpf.session import Follow, Session

if TYPE_CHECKING:
    from gpubpf import fatbin
    from gpubpf.assemble import Target
    from gpubpf.cli import Output
    from gpubpf.host import Host
    from gpubpf.instrument import Attachment, Sidecar
    from gpubpf.listing import Source
    from gpubpf.maps import MapDefinition


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
    go to, and whether the clock is virtual. `accesses`: see `Session`."""
    lowered = functools.cache(attachments)

    def attached(pid: int, comm: str, ts_ns: int) -> None:
        cli.note(tool, f"attached to {pid} ({comm})")
        if args.json and out is not None:
            out.record(type="attached", pid=pid, comm=comm, ts_ns=ts_ns)

    def instrument(data: bytes, target: Target) -> Sidecar:
        from gpubpf import instrument

        return instrument.instrument_image(data, lowered(), target)

    def registers(sidecar: Any, target: Target) -> Mapping[str, tuple[int, int]]:
        from gpubpf import instrument

        return instrument.register_use(sidecar, target)

    def matches(name: str) -> bool:
        from gpubpf import names

        return names.matches(wanted, name)

    tool = args.tool
    command = _command(args)
    chosen = _device(args)
    wanted = tuple(args.kernel)
    virtual = chosen.kind == "sim" and _virtual(chosen)
    host_side = host(lambda text: cli.note(tool, text), virtual)
    return Session(
        command,
        instrument=instrument,
        registers=registers,
        warm_up=lowered,
        definitions=definitions,
        params=params,
        device=chosen,
        matches=matches if wanted else None,
        wanted=wanted,
        launches=args.launch,
        sample=args.sample,
        map_memory=args.map_memory,
        duration=args.duration,
        user=args.user,
        follow=_follow(args, follow or Follow(), chosen),
        host=host_side,
        note=lambda text: cli.note(tool, text),
        complain=lambda text: cli.complain(tool, text),
        attached=attached,
        accesses=accesses,
        pid=args.pid[0] if args.pid else None,
    )


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
        cli.note(args.tool, "CUPTI works on a GPU only; timing events do instead")
    return device.cupti_libraries() if named is not None and chosen.kind == "gpu" else ()


def virtual(args: argparse.Namespace) -> bool:
    """Whether what the command line asks for will run on the embedded device's virtual clock."""
    try:
        chosen = device.choose(args.device)
    except SessionError:
        return False  # whoever runs it says why
    return chosen.kind == "sim" and _virtual(chosen)


def _virtual(chosen: Device) -> bool:
    """Whether the embedded device's clock will be virtual."""
    environment = {**os.environ, **chosen.environment}
    return environment.get("CUDASIM_CLOCK") == "virtual"


def target(args: argparse.Namespace) -> Target:
    """The device that `--device` means, for what needs no command."""
    from gpubpf.assemble import Target

    try:
        chosen = device.choose(args.device)
        return Target(chosen.kind, device.compute_capability(chosen))
    except SessionError:
        if args.device == "gpu" or not args.files:
            raise
        # Nothing runs: what files hold can be told without a device, as for the embedded one.
        return Target("sim", device.compute_capability(Device("sim")))


def observe(args: argparse.Namespace) -> tuple[list[Source], int]:
    """Runs the command to its end, its kernels as they are: the modules that its processes loaded (one source for each name of a
    process) with the launches of their kernels, and the exit status."""
    from gpubpf import fatbin, instrument
    from gpubpf.listing import Source

    if args.pid:
        raise UsageError(
            f"what a running process has loaded cannot be told yet; name its files: {args.tool} --list FILE"
        )
    loaded: dict[str, dict[bytes, bytes]] = {}

    def keep(comm: str, data: bytes) -> None:
        loaded.setdefault(comm, {})[hashlib.sha256(data).digest()] = data

    session = Session(
        _command(args),
        instrument=lambda data, target: instrument.Sidecar(),
        device=_device(args),
        user=args.user,
        duration=args.duration,
        note=lambda text: cli.note(args.tool, text),
        loaded=keep,
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
        sources.append(Source(comm, tuple(images), launches.get(comm, {}), pids.get(comm), comm))
    return sources, session.status


def _command(args: argparse.Namespace) -> list[str]:
    if len(args.pid) > 1:
        raise UsageError(
            f"measuring several processes is not there yet; name one: {args.tool} -p {args.pid[0]}"
        )
    if args.pid:
        return []
    if not args.command:
        raise UsageError(
            f"watching every process is not there yet; give the command to watch: {args.tool} -- COMMAND"
        )
    return list(args.command)


def _device_of(pid: int) -> Device:
    """The device that a process which runs uses, by the driver that it has loaded. Raises SessionError."""
    from gpubpf import target

    target.check(pid)
    try:
        with target.Memory(pid) as memory:
            drivers = [x for x in target.libraries(target.mappings(pid)) if x.name.startswith("libcuda.so")]
            symbols = [target.symbols(memory, library.base) for library in drivers]
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError as error:
        raise target.refusal(pid, error.errno or 0) from None
    if not drivers:
        name = target.status(pid).get("Name", "")
        raise SessionError(
            f"pid {pid} ({name}) has not loaded the CUDA driver; wait until it uses the GPU, or start it with the tool"
        )
    if not any("cudasim_untimed" in found for found in symbols):
        return Device("gpu")
    clock = next((v for v in variables if v.startswith(b"CUDASIM_CLOCK=")), b"=").partition(b"=")[2]
    return Device("sim", {"CUDASIM_CLOCK": os.fsdecode(clock)})


def _device(args: argparse.Namespace) -> Device:
    if args.pid:
        return _device_of(args.pid[0])
    chosen = device.choose(args.device)
    if chosen.notice:
        cli.note(args.tool, chosen.notice)
    return chosen
