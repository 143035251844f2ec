"""``--list``: which libraries there are, which of their functions can have probes, which kernels are registered or were launched."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpubpf import names
from gpubpf.calls import command_libraries, kernels
from gpubpf.calls.kernels import Kernels
from gpubpf.calls.probes import Calls, Options
from gpubpf.calls.sums import kernels as launched
from gpubpf.calls.watch import Watch
from gpubpf.errors import Error, ImageError
from gpubpf.linux import libraries
from gpubpf.linux.libraries import Names
from gpubpf.process import target, users
from gpubpf.session import joining
from gpubpf.show import cli, table

if TYPE_CHECKING:
    from gpubpf.calls.api import Api, Function

NOT_EXPORTED = "the library does not export it"


@dataclass(frozen=True)
class Library:
    """A file, and of each function why it can have no probe, None where it can."""

    path: str
    functions: Mapping[str, str | None]
    pid: int | None = None
    comm: str | None = None


@dataclass
class Listed:
    """What was found. `kernels`: of each file those that its code registers, or of each process (by its name) those that it launched,
    and how often."""

    libraries: list[Library] = field(default_factory=list)
    kernels: list[tuple[names.Name, str, int | None, int | None, str | None]] = field(default_factory=list)


def show(api: Api, text: str, args: argparse.Namespace, out: cli.Output) -> int:
    """Prints what the command line asks for. The exit status."""
    status, found = 0, Listed()
    wanted = [function for _, function in api.choose(args.api)]
    if args.command:
        status, found = _of_command(api, text, args)
    elif args.pid:
        for pid in args.pid:
            _add_process(found, pid, Names(*api.libraries), wanted)
    else:
        for path in args.files:
            _add_file(found, path, Names(*api.libraries), wanted)
    if args.kernel:
        seen = [kernel[0].short for kernel in found.kernels]
        found.kernels = [k for k in found.kernels if names.matches(args.kernel, k[0].mangled)]
        if not found.kernels:
            from gpubpf.images.listing import no_match

            raise Error(no_match(args.kernel, seen))
    if args.json:
        out.records(_records(found))
    elif args.csv:
        out.write("file,api,probe,reason\n")
        rows = (
            (lib.path, name, not why, why or "")
            for lib in found.libraries
            for name, why in lib.functions.items()
        )
        out.write("".join(cli.csv_cells(row) + "\n" for row in rows))
    else:
        out.lines(_lines(found, args.verbose))
    return status


def _of_file(
    path: str, file: int, wanted: Sequence[Function], pid: int | None = None, comm: str | None = None
) -> Library:
    exported = target.symbols(target.ElfFile(file), 0)
    reasons = {f.name: None if f.symbol in exported else NOT_EXPORTED for f in wanted}
    return Library(path, reasons, pid, comm)


def _add_kernels(
    found: Listed, path: str, file: int, pid: int | None = None, comm: str | None = None
) -> None:
    with contextlib.suppress(OSError, ImageError, ValueError):
        for name in names.demangle_all(kernels.registered(file)):
            found.kernels.append((name, path, None, pid, comm))


def _add_file(found: Listed, path: str, wanted_names: Names, wanted: Sequence[Function]) -> None:
    """A library itself, or a program and the libraries that are near it. Raises Error."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Error(f"{cli.printable(path)}: {error.strerror}; name a program or a library") from None
    try:
        if os.pread(file, 4, 0) != b"\x7fELF":
            raise Error(f"{cli.printable(path)} is no program or library (ELF); name one")
        if wanted_names.match(path):
            found.libraries.append(_of_file(path, file, wanted))
            return
        _add_kernels(found, path, file)
    except OSError as error:
        raise Error(f"{cli.printable(path)}: {error.strerror}; name a program or a library") from None
    finally:
        os.close(file)
    known = {library.path for library in found.libraries}
    for place in (
        *command_libraries.libraries([path], os.environ, wanted_names),
        *libraries.files(wanted_names),
    ):
        if place not in known:
            known.add(place)
            with contextlib.suppress(OSError):
                near_file = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    found.libraries.append(_of_file(place, near_file, wanted))
                finally:
                    os.close(near_file)


def _add_process(found: Listed, pid: int, wanted_names: Names, wanted: Sequence[Function]) -> None:
    """What a process maps. Raises Error."""
    comm = joining.comm(pid)
    try:
        mapped = {m.file: m for m in target.mappings(pid) if m.code and m.file[1]}
    except (FileNotFoundError, ProcessLookupError):
        raise Error(f"pid {pid} does not run; look at ps") from None
    except OSError as error:
        raise Error(
            f"pid {pid}: {error.strerror}; name a process that runs, as root where it is not yours"
        ) from None
    for m in mapped.values():
        place = libraries.MappedCode(pid, m.start, m.end, m.offset, m.file[0], m.file[1], m.path)
        with contextlib.suppress(OSError):
            file = libraries.open_mapped(place)
            try:
                if wanted_names.match(m.path):
                    found.libraries.append(_of_file(m.path, file, wanted, pid, comm))
                else:
                    _add_kernels(found, m.path, file, pid, comm)
            finally:
                os.close(file)


def _of_command(api: Api, text: str, args: argparse.Namespace) -> tuple[int, Listed]:
    """Runs it to its end."""

    def note(said: str) -> None:
        cli.note(args.tool, said)

    found = Listed()
    chosen = api.choose(args.api)
    api = command_libraries.also(api, args.command, users.command_user(args.user))
    calls = Calls(api, chosen, Options(), note, text)
    named = Kernels(api, calls.bpf)
    watch = Watch(args, {}, note)
    seen: set[int] = set()

    def tick() -> float:
        for pid in set(calls.seen) - seen:
            seen.add(pid)
            named.look(pid)
        named.read(calls.host)
        return 0.02

    try:
        calls.start()
        with watch.follow(calls):
            for _ in watch.intervals(tick, calls.stop):
                pass
        comms = calls.seen
        for row in launched(calls.sums(), lambda pid: comms.get(pid, ""), named.name, api):
            name = row.kernel or names.Name(row.name, row.name, row.name)
            found.kernels.append((name, row.comm, row.times.count, row.pid, row.comm))
        told: dict[str, dict[str, str | None]] = {}  # by file, which programs of several kinds may be on
        for placed in calls.placed:
            told.setdefault(placed.path, {}).update({**dict.fromkeys(placed.functions), **placed.refused})
        for path, known in told.items():
            reasons = {f.name: known.get(f.symbol, NOT_EXPORTED) for _, f in chosen}
            found.libraries.append(Library(path, reasons))
    finally:
        calls.close()
    return watch.status, found


def _records(found: Listed) -> Iterator[dict[str, Any]]:
    for library in found.libraries:
        for function, reason in library.functions.items():
            yield {
                "type": "listed", "pid": library.pid, "comm": library.comm, "file": library.path, "api": function,
                "instrumentable": reason is None, "reason": reason,
            }  # fmt: skip
    for name, file, launches, pid, comm in found.kernels:
        yield {
            "type": "listed", "pid": pid, "comm": comm, "file": file, "kernel": name.short, "demangled": name.full,
            "mangled": name.mangled, "instrumentable": True, "reason": None, "launches": launches,
        }  # fmt: skip


def _lines(found: Listed, verbose: bool) -> Iterator[str]:
    """Libraries with how many of the functions can have probes, then kernels."""
    for library in found.libraries:
        probed = sum(reason is None for reason in library.functions.values())
        who = f" ({library.comm}, pid {library.pid})" if library.pid else ""
        yield f"{library.path}{who}"
        yield f"  {probed:,} of {table.count(len(library.functions), 'known function')} can have probes"
        if verbose:
            each = [(one, "yes" if why is None else f"no: {why}") for one, why in library.functions.items()]
            yield from (
                f"  {line}" for line in table.lines(("FUNCTION", "PROBE"), each, ("FUNCTION", "PROBE"))
            )
    if not found.libraries:
        yield "no such library"
    if found.kernels:
        yield ""
        counted = any(launches is not None for _, _, launches, _, _ in found.kernels)
        rows = [
            {"KERNEL": name.full if verbose else name.short}
            | ({"LAUNCHES": f"{launches or 0:,}"} if counted else {})
            | {"PROGRAM" if counted else "FILE": file}
            for name, file, launches, _, _ in found.kernels
        ]
        yield from table.within(rows, left=("KERNEL", "FILE", "PROGRAM"), cut=("FILE", "KERNEL"))
