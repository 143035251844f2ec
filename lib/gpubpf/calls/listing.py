"""``--list``: the libraries, which of their functions can be probed, and the kernels that are registered or were
launched.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf import elf, names
from gpubpf.calls import command_libraries, kernel_names
from gpubpf.calls.call_fields import LISTED
from gpubpf.calls.kernel_names import KernelNames
from gpubpf.calls.probes import CallOptions, CallProbes
from gpubpf.calls.statistics import by_kernel
from gpubpf.calls.traced_processes import TracedProcesses, check_privileges
from gpubpf.errors import Error, ImageError
from gpubpf.linux import libraries
from gpubpf.linux.libraries import LibraryNames
from gpubpf.process import address_space, proc, traceable, users
from gpubpf.record import MutableRecord, Record, field
from gpubpf.show import cli, table

if TYPE_CHECKING:
    from gpubpf.calls.api import Api, ApiFunction
    from gpubpf.calls.snoop_options import SnoopOptions

NOT_EXPORTED = "the library does not export it"


class ListedLibrary(Record):
    """A library file. `functions`: name → why the function cannot be probed, or None if it can."""

    path: str
    functions: Mapping[str, str | None]
    pid: int | None = None
    comm: str | None = None


class RegisteredKernel(MutableRecord):
    """A kernel that the code of `file` registers. If a command launched the kernel, `file` is the name of the
    process that launched it.
    """

    name: names.KernelName
    file: str
    launches: int | None = None
    pid: int | None = None
    comm: str | None = None


class Listed(MutableRecord):
    """The libraries and kernels that were found."""

    libraries: list[ListedLibrary] = field(default_factory=list)
    kernels: list[RegisteredKernel] = field(default_factory=list)


def show(
    api: Api,
    text: str,
    options: SnoopOptions,
    out: cli.Output,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Print what --list asks for, and return the exit status.

    `text`, `environment`: for a command, the programs, and variables to add to its environment.
    """
    status, found = 0, Listed()
    targets, globs, form = options.shared.targets, options.shared.kernels.wanted, options.shared.output
    wanted = [function for _, function in api.choose(options.calls.api)]
    if targets.command:
        check_privileges(targets)
        status, found = _of_command(api, text, options, environment or {})
    elif targets.pids:
        for pid in targets.pids:
            _add_process(found, pid, LibraryNames(*api.libraries), wanted)
    else:
        for path in targets.files:
            _add_file(found, path, LibraryNames(*api.libraries), wanted)
    if globs:
        seen = [kernel.name.short for kernel in found.kernels]
        found.kernels = [k for k in found.kernels if names.matches(globs, k.name.mangled)]
        if not found.kernels:
            from gpubpf.images.listing import no_match

            raise Error(no_match(globs, seen))
    if form.json:
        out.records(_records(found))
    elif form.csv:
        out.write("file,api,probe,reason\n")
        rows = (
            (lib.path, name, not why, why or "")
            for lib in found.libraries
            for name, why in lib.functions.items()
        )
        out.write("".join(cli.csv_cells(row) + "\n" for row in rows))
    else:
        out.lines(_lines(found, form.verbose))
    return status


def _of_file(
    path: str, file: int, wanted: Sequence[ApiFunction], pid: int | None = None, comm: str | None = None
) -> ListedLibrary:
    exported = elf.exports(elf.LoadedFile(file))
    reasons = {f.name: None if f.symbol in exported else NOT_EXPORTED for f in wanted}
    return ListedLibrary(path, reasons, pid, comm)


def _add_kernels(
    found: Listed, path: str, file: int, pid: int | None = None, comm: str | None = None
) -> None:
    with contextlib.suppress(OSError, ImageError, ValueError):
        for name in names.demangle_all(kernel_names.registered(file)):
            found.kernels.append(RegisteredKernel(name, path, None, pid, comm))


def _add_file(found: Listed, path: str, wanted_names: LibraryNames, wanted: Sequence[ApiFunction]) -> None:
    """Add a library, or a program and the libraries that it is likely to load. Raise Error if the file is
    neither.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Error(f"{cli.printable(path)}: {error.strerror}; name a program or a library") from None
    try:
        if os.pread(file, 4, 0) != b"\x7fELF":
            raise Error(f"{cli.printable(path)} is not a program or library (ELF); name one")
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
        *command_libraries.find([path], os.environ, wanted_names),
        *libraries.files(wanted_names),
    ):
        if place not in known:
            known.add(place)
            with contextlib.suppress(OSError):
                library_file = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    found.libraries.append(_of_file(place, library_file, wanted))
                finally:
                    os.close(library_file)


def _add_process(found: Listed, pid: int, wanted_names: LibraryNames, wanted: Sequence[ApiFunction]) -> None:
    """Add the files that a process maps. Raise Error if its mappings cannot be read."""
    comm = traceable.comm(pid)
    try:
        mapped = {m.file: m for m in address_space.mappings(pid) if m.code and m.file[1]}
    except (FileNotFoundError, ProcessLookupError):
        raise Error(f"there is no process {pid}; run ps to list the processes") from None
    except proc.TooLarge as error:
        raise Error(f"pid {pid} cannot be listed: {error.strerror}; name another process") from None
    except OSError as error:
        raise Error(f"pid {pid}: {error.strerror}; name a process of yours, or run as root") from None
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


def _of_command(
    api: Api, text: str, options: SnoopOptions, environment: Mapping[str, str]
) -> tuple[int, Listed]:
    """Run the command to its end. Return its exit status, and its libraries and launched kernels."""

    def note(said: str) -> None:
        cli.note(options.shared.output.tool, said)

    found = Listed()
    targets, chosen = options.shared.targets, api.choose(options.calls.api)
    user = users.command_user(targets.user)
    api = command_libraries.with_command_libraries(api, targets.command or (), user)
    calls = CallProbes(api, chosen, CallOptions(), note, text)
    kernels = KernelNames(api, calls.bpf)
    processes = TracedProcesses(options.shared, environment, note)
    seen: set[int] = set()

    def tick() -> float:
        for pid in set(calls.seen) - seen:
            seen.add(pid)
            kernels.look(pid)
        kernels.read(calls.host)
        return 0.02

    try:
        calls.start()
        with processes.follow(calls):
            for _ in processes.intervals(tick, calls.stop):
                pass
        comms = calls.seen
        for row in by_kernel(calls.sums(), lambda pid: comms.get(pid, ""), kernels.name, api):
            name = row.kernel or names.KernelName(row.name, row.name, row.name)
            found.kernels.append(RegisteredKernel(name, row.comm, row.times.count, row.pid, row.comm))
        # By file, because several kinds of programs may probe the same file.
        refusals: dict[str, dict[str, str | None]] = {}
        for placed in calls.placed:
            refusals.setdefault(placed.path, {}).update({**dict.fromkeys(placed.functions), **placed.refused})
        for path, known in refusals.items():
            reasons = {f.name: known.get(f.symbol, NOT_EXPORTED) for _, f in chosen}
            found.libraries.append(ListedLibrary(path, reasons))
    finally:
        calls.close()
    return processes.status, found


def _records(found: Listed) -> Iterator[dict[str, Any]]:
    for library in found.libraries:
        for function, reason in library.functions.items():
            owner = {"pid": library.pid, "comm": library.comm, "file": library.path}
            yield LISTED.record(**owner, api=function, instrumentable=reason is None, reason=reason)
    for kernel in found.kernels:
        yield LISTED.record(
            pid=kernel.pid,
            comm=kernel.comm,
            file=kernel.file,
            kernel=kernel.name.short,
            demangled=kernel.name.full,
            mangled=kernel.name.mangled,
            instrumentable=True,
            reason=None,
            launches=kernel.launches,
        )


def _lines(found: Listed, verbose: bool) -> Iterator[str]:
    """Yield the libraries, with how many of the functions can be probed, then the kernels."""
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
        yield "no library found"
    if found.kernels:
        yield ""
        counted = any(kernel.launches is not None for kernel in found.kernels)
        rows = [
            {"KERNEL": kernel.name.full if verbose else kernel.name.short}
            | ({"LAUNCHES": f"{kernel.launches or 0:,}"} if counted else {})
            | {"PROGRAM" if counted else "FILE": kernel.file}
            for kernel in found.kernels
        ]
        yield from table.within(rows, left=("KERNEL", "FILE", "PROGRAM"), cut=("FILE", "KERNEL"))
