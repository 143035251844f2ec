"""Attach host programs to the entry and return of functions in user-space libraries (docs/attach-points.md).

A uprobe is attached to a file, so it fires in every process that maps the file, in any namespace, whenever that process starts. One
program serves a whole table of functions, and distinguishes them by bpf_get_attach_cookie. The method depends on the kernel:

    multi     one link for all entries, one for all returns (Linux 6.6)
    event     one perf event per probe, and one program per function, with the function's number in its code

A probe at returns is a uprobe at each return instruction (`returns`). The kernel's return probes would change what the program does.

Libraries that processes load later are probed when they are mapped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gpubpf import elf, processor
from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import BpfFunction, Instruction, Program
from gpubpf.ebpf.helpers import number_of
from gpubpf.errors import Error, UsageError, in_words, out_of_files
from gpubpf.kernel import bpf_syscall
from gpubpf.linux import libraries, matched_calls
from gpubpf.linux.libraries import LibraryNames, MappedCode, Mappings
from gpubpf.linux.library_limits import LibraryLimits
from gpubpf.linux.returns import Code, Returns
from gpubpf.process import address_space, kernel_waits, limits, scans
from gpubpf.process.patience import NotLooked, Unanswered, within
from gpubpf.process.scans import ScanBudget
from gpubpf.record import Record, replace

METHODS = ("multi", "event")  # best first
_ATTACH = {"multi": bpf_syscall.UPROBE_MULTI, "event": 0}
_COOKIE = number_of("bpf_get_attach_cookie")
_NOTHING = bytes.fromhex("b700000000000000 9500000000000000")  # r0 = 0; exit
_BREAKPOINTS = (0xCC, 0xE8)  # written by the kernel for a uprobe: int3, or call in place of a nop
_RELATIVE = (0xE8, 0xE9)  # call, jmp: a hook may begin with the same byte, so all five bytes are compared
# Seconds between reads of mappings. The pause limits how often a machine that starts many programs wakes the tool.
_PAUSE = 0.002
_LAST_WAIT = 5.0  # seconds for the thread to end: it may be reading a file that does not answer
_LOOK_AGAIN = 0.5  # seconds for which one check for a lock holder is valid
_ATTACH_WAIT = 10.0  # seconds for the kernel to place probes
_TRY_AGAIN = 0.25  # seconds until a library of a user without time is tried again
_MOST_ATTEMPTS = 256  # to find the functions of a library that the kernel refuses
_MOST_NAMED = 8  # functions in one notice
_PLACE_AGAIN = 5.0  # seconds until libraries without probes are tried again, if a process held its lock
_MOST_BLOCKED = 64  # such libraries that are kept open
_MOST_MAPPERS = 64  # processes to ask for their user, of those that map a file


class Table(Record):
    """A program and the functions that it is attached to.

    functions: (name without symbol version, cookie).
    returns: attach at the functions' returns.
    optional: a library may lack some of the functions.
    mark: added to the cookie at the entry of a function that can end in a jump to another exported function, and at return
        instructions that only one function has.
    """

    function: str
    libraries: tuple[str, ...]
    functions: tuple[tuple[str, int], ...]
    returns: bool = False
    optional: bool = False
    mark: int = 0

    @property
    def what(self) -> str:
        return f"functions of {' or '.join(self.libraries)}"


def table(
    function: str,
    library: str | Iterable[str],
    functions: Sequence[str] | Mapping[str, int],
    returns: bool = False,
    optional: bool = False,
    mark: int = 0,
) -> Table:
    """Return a table. Functions in a sequence are numbered by position. Raises UsageError."""
    patterns = (library,) if isinstance(library, str) else tuple(library)
    LibraryNames(*patterns)
    if isinstance(functions, str) or not functions:
        raise UsageError(f"{function} is attached to no function; pass a list of function names")
    numbered = (
        functions.items() if isinstance(functions, Mapping) else ((n, i) for i, n in enumerate(functions))
    )
    made = tuple(numbered)
    if len(dict(made)) != len(made):
        raise UsageError(f"{function}: a function is named twice; name each function once")
    return Table(function, patterns, made, returns, optional, mark)


class ProbedFile(Record):
    """The probes on one file.

    functions: functions with probes.
    missing: functions that the library does not export.
    refused: by name of the other functions, why they have no probe.
    late: ID of the process that first mapped the file, if that was after the start. Calls before the probes are unknown.
    """

    path: str
    functions: tuple[str, ...]
    missing: tuple[str, ...]
    refused: Mapping[str, str]
    late: int | None = None


class _Group(Record):
    """Functions with a program at their entry, one at their return, or both."""

    names: LibraryNames
    functions: tuple[tuple[str, int], ...]
    at_entry: str | None
    at_return: str | None
    optional: bool
    mark: int = 0


class _Blocked(Record):
    """A library without probes, because a process holds the lock of its address space.

    file: a descriptor of the library.
    user: who pays for the probes, see `_payer`; None: nobody.
    placed: the entry in `Uprobes.placed`.
    """

    group: _Group
    file: int
    path: str
    mapped: tuple[MappedCode, ...]
    user: int | None
    placed: ProbedFile


class _Target(Record):
    """A function to probe. `at_entry`, `at_returns`: (offset in the file, cookie)."""

    name: str
    at_entry: tuple[int, int]
    at_returns: tuple[tuple[int, int], ...] = ()


def _groups(tables: Sequence[Table]) -> list[_Group]:
    """Combine tables of the same functions, one for entries and one for returns."""
    found: list[_Group] = []
    for t in tables:
        for i, g in enumerate(found):
            half = g.at_entry is None if not t.returns else g.at_return is None
            if half and g.names.patterns == t.libraries and g.functions == t.functions:
                found[i] = replace(
                    g,
                    at_entry=g.at_entry if t.returns else t.function,
                    at_return=t.function if t.returns else g.at_return,
                    mark=g.mark | t.mark,
                )
                break
        else:
            at_entry, at_return = (None, t.function) if t.returns else (t.function, None)
            found.append(
                _Group(LibraryNames(*t.libraries), t.functions, at_entry, at_return, t.optional, t.mark)
            )
    return found


def need_matching(tables: Sequence[Table]) -> bool:
    """Return whether some programs need the map of `matched_calls`: programs at returns without a program at the entries."""
    return any(group.at_entry is None for group in _groups(tables))


# --- programs ---


def _replace_exits(code: Sequence[Instruction], end: Sequence[Instruction]) -> list[Instruction]:
    """Return the code with each exit replaced by a jump to `end`, which is appended."""
    made = []
    for pc, i in enumerate(code):
        if i.opcode == b.JMP | b.EXIT:
            i = Instruction(b.JMP | b.JA, offset=len(code) - pc - 1, line=i.line)
        made.append(i)
    return made + list(end)


_ZERO = (Instruction(b.ALU64 | b.MOV, 0, imm=0), Instruction(b.JMP | b.EXIT))


def plain_program(function: BpfFunction, cookie: int | None = None) -> BpfFunction:
    """Return the program for one probe, which returns 0. `cookie`: replaces calls of bpf_get_attach_cookie by this number."""
    code = _replace_exits(function.instructions, _ZERO)
    if cookie is not None:
        value = b.signed(cookie, 32)
        if value != cookie:
            raise UsageError(
                f"{function.name}: the number {cookie} of a function is out of range; use 0 to 2147483647"
            )
        code = [
            Instruction(b.ALU64 | b.MOV, 0, imm=value, line=i.line)
            if (i.opcode, i.src, i.imm) == (b.JMP | b.CALL, 0, _COOKIE)
            else i
            for i in code
        ]
    return replace(function, instructions=tuple(code))


def best_method() -> str:
    """Return the best of METHODS that this kernel supports. Raises OSError if it has no uprobes."""
    with contextlib.suppress(OSError):
        program = bpf_syscall.load_program(
            bpf_syscall.KPROBE, _NOTHING, name="gpubpf_probe", attach=bpf_syscall.UPROBE_MULTI
        )
        try:  # older kernels ignore the attach type; a kernel with such links reports that "/" is not a regular file
            os.close(bpf_syscall.link_uprobes(program, "/", (0,), (0,)))
        except OSError as error:
            if error.errno == errno.EBADF:
                return "multi"
        finally:
            os.close(program)
    bpf_syscall.uprobe_type()
    return "event"


# --- probes ---


class Uprobes:
    """Probes for the functions of some tables, on all matching files: existing ones, and those that processes load later.

    load(function, attach): load a program into the kernel, see `host_programs.load`.
    note: called with notices for the user, also from another thread.
    hold: hold notices about a file until `told_of` names a process that maps the file.
    method: one of METHODS; None: the best method.

    Raises OSError, VerifyError, Error.
    """

    def __init__(
        self,
        program: Program,
        tables: Sequence[Table],
        load: Callable[[BpfFunction, int], int],
        note: Callable[[str], None],
        method: str | None = None,
        hold: bool = False,
    ) -> None:
        if not processor.IS_X86_64:
            raise Error("uprobes at library functions require x86-64; attach to something else")
        self._program, self._load, self._note = program, load, note
        self._groups = _groups(tables)
        self.method = method or best_method()
        self.placed: list[ProbedFile] = []
        self.incomplete = False  # a library that was loaded may have no probes
        self.programs: list[tuple[str, int]] = []  # (name, file descriptor)
        self._loaded: dict[tuple[str, int | None], int] = {}
        self._events: list[int] = []
        self._seen: set[tuple[str, int]] = set()  # files, as (device, inode) in /proc/PID/maps
        self._keys: set[tuple[int, libraries.Key]] = set()  # (group, file)
        self._limits = LibraryLimits()
        self._scans = ScanBudget()
        self._placing = 0.0  # seconds that the kernel took to place probes
        self._delayed: dict[tuple[str, int], MappedCode] = {}  # files that get probes later: (device, inode)
        self._notices: set[str] = set()
        self._held: dict[str, list[str]] | None = {} if hold else None  # held notices by path
        self._blocked: list[_Blocked] = []
        self._again = 0.0  # time.monotonic: when to try them again
        self._stopped = False
        self._closing = (
            threading.Lock()
        )  # guards what `stop` takes away: an attach may end late, on another thread
        self._closed = False
        self._looked = -math.inf  # time.monotonic of the latest check that found no lock holder
        self._mappings: Mappings | None = None
        self._thread: threading.Thread | None = None
        self._drop_privileges: Callable[[], None] = lambda: None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            self._start()
        except BaseException:
            for file in self.stop():
                os.close(file)
            raise

    def _start(self) -> None:
        for group in self._groups:  # fail now if a program cannot be loaded
            for _, function in self._functions_of(group):
                self._loaded_program(function, group.functions[0][1] if self.method == "event" else None)
        try:
            self._mappings = Mappings()
        except OSError as error:
            self.incomplete = True
            self._notice(f"libraries that processes load later are not traced ({error.strerror})")
        self._probe_running()
        for group in self._groups:
            for path in libraries.files(group.names):
                with contextlib.suppress(OSError):
                    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                    try:
                        self._probe_file(group, file, path, ())
                    finally:
                        os.close(file)
        for group in self._groups:
            if not any(group.names.match(p.path) for p in self.placed):
                self._notice(f"found no {group.names} yet; waiting for a process that loads it")
        if self._mappings is not None:
            self._thread = threading.Thread(target=self._run, name="gpubpf-libraries", daemon=True)
            self._thread.start()

    def limit_privileges(self, apply: Callable[[], None]) -> None:
        """Make the thread that looks for libraries drop privileges. `apply`: see `privileges.Privileges.apply`."""
        self._drop_privileges = apply
        os.eventfd_write(self._wake, 1)

    def stop(self) -> list[int]:
        """Stop attaching probes. Return the file descriptors of the probes, entries first, and of the programs.

        Closing the descriptors detaches the probes."""
        self._stopped = True
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)
            if self._thread is not None:
                self._thread.join(_LAST_WAIT)
            if self._thread is None or not self._thread.is_alive():  # otherwise the thread still uses these
                if self._mappings is not None:
                    self._mappings.close()
                os.close(self._wake)
                for blocked in self._blocked:
                    os.close(blocked.file)
            self._wake = -1
        with self._closing:
            self._closed = True
            files = [*reversed(self._events), *(file for _, file in self.programs)]
            self._events, self.programs = [], []
            self._loaded.clear()
        return files

    def detach(self) -> None:
        """Stop, and detach all probes, see `kernel_waits.close`."""
        kernel_waits.close(self.stop(), self._note)

    # --- files ---

    def _run(self) -> None:
        mappings = self._mappings
        assert mappings is not None
        poll = select.poll()
        for file in (*mappings.descriptors, self._wake):
            poll.register(file, select.POLLIN)
        names = [group.names for group in self._groups]
        stopped = False
        while not stopped:
            pause = _TRY_AGAIN if self._delayed else _PLACE_AGAIN if self._blocked else None
            ready = poll.poll(None if pause is None else 1000 * pause)
            stopped = self._stopped  # mappings up to now still count, because a process may be short-lived
            if any(file == self._wake for file, _ in ready):
                os.eventfd_read(self._wake)
                self._drop_privileges()
            found = mappings.read(names)
            for m in found:
                self._probe_mapped(m.device, m.inode, [m])
            if mappings.lost:
                mappings.lost = False
                self._probe_running()
            for (device, inode), m in list(self._delayed.items()):
                self._probe_mapped(device, inode, [m])
            if self._blocked and not stopped:
                self._try_blocked()
            if not found and not stopped:
                time.sleep(_PAUSE)

    def _try_blocked(self) -> None:
        """Probe the libraries that got no probes, if no process is in the way any longer."""
        if time.monotonic() < self._again:
            return
        if not kernel_waits.obstacle():
            blocked, self._blocked = self._blocked, []
            for one in blocked:
                try:
                    self._keys.discard((self._groups.index(one.group), libraries.key(one.file)))
                    self.placed.remove(one.placed)
                    self._probe_in_turn([one.group], one.file, one.path, one.mapped, one.user, again=True)
                finally:
                    os.close(one.file)
            if not self._blocked:
                self._notice("libraries that had no probes have them now; calls until now are not traced")
        self._again = time.monotonic() + _PLACE_AGAIN

    def _probe_running(self) -> None:
        """Probe the matching libraries of all running processes."""
        for group in self._groups:
            for (device, inode), mapped in libraries.running(
                group.names, self._not_searched, self._scans
            ).items():
                self._probe_mapped(device, inode, mapped)

    def _not_searched(self, who: str) -> None:
        """Give a notice that processes may use libraries without probes."""
        self.incomplete = True
        self._notice(f"{who} not searched for libraries: reading the list of mappings takes too long")

    def _probe_mapped(self, device: str, inode: int, mapped: Sequence[MappedCode]) -> None:
        """Probe a file that processes have mapped, unless that has already been done."""
        if (device, inode) in self._seen or (user := self._payer(device, inode, mapped)) is None:
            return
        self._seen.add((device, inode))
        first = mapped[0]
        try:
            file = libraries.open_mapped(first)
        except (
            FileNotFoundError,
            ProcessLookupError,
        ):  # the process has ended; the next process may be as short-lived
            try:
                file = libraries.open_here(first)
            except OSError:
                self._seen.discard((device, inode))
                self.incomplete = True
                self._notice(
                    f"process {first.pid} mapped {_printable(first.path)}, but ended before probes were attached;"
                    " its calls are not traced",
                    first.path,
                )
                return
        except OSError as error:
            self.incomplete = True
            self._notice(
                f"cannot open {_printable(first.path)} ({error.strerror}); calls of it are not traced",
                first.path,
            )
            return
        try:
            groups = [group for group in self._groups if group.names.match(first.path)]
            self._probe_in_turn(groups, file, first.path, mapped, user)
        finally:
            os.close(file)

    def _probe_in_turn(
        self,
        groups: Sequence[_Group],
        file: int,
        path: str,
        mapped: Sequence[MappedCode],
        user: int | None,
        again: bool = False,
    ) -> None:
        """Do the same as `_probe_file`, and count what it takes for a user. again: the file has been counted."""
        with contextlib.nullcontext() if user is None else self._limits.probing(user) as took:
            files, probes, placing = len(self.placed), len(self._events), self._placing
            for group in groups:
                self._probe_file(group, file, path, mapped, user)
            if took is not None:
                took(
                    not again and len(self.placed) > files,
                    len(self._events) - probes,
                    self._placing - placing,
                )

    def _payer(self, device: str, inode: int, mapped: Sequence[MappedCode]) -> int | None:
        """Return a user whose processes map a file, and may map another file with probes. None: there is no such user.

        If such a user's processes have only used up their time, the file is tried again later."""
        self._delayed.pop((device, inode), None)
        users = {scans.user_of(m.pid): m for m in mapped[:_MOST_MAPPERS]}
        if users and all(map(kernel_waits.has_stopped_machine, users)):
            self.incomplete = True
            self._notice(
                f"libraries that user {min(users)} alone maps are not traced: its processes stopped the machine"
            )
            return None
        delayed = [user for user in users if not self._limits.full(user)]
        for user in delayed:
            if not self._limits.exhausted(user):
                return user
        self.incomplete = True
        if delayed and len(self._delayed) < limits.DELAYED_LIBRARIES:
            self._delayed[device, inode] = users[delayed[0]]
            self._notice(f"some libraries of user {delayed[0]} get probes late: reading them takes too long")
        else:
            self._notice(f"some libraries of user {min(users)} are not traced: there are too many")
        return None

    def _probe_file(
        self,
        group: _Group,
        file: int,
        path: str,
        mapped: Sequence[MappedCode],
        user: int | None = None,
    ) -> None:
        """Attach a group's programs to an open file, unless that has already been done."""
        number = self._groups.index(group)
        mark = number, libraries.key(file)
        if mark in self._keys:
            return
        self._keys.add(mark)
        library = elf.LoadedFile(file)
        exported = elf.exports(library)
        code = Code(file)
        targets: list[_Target] = []
        missing: list[str] = []
        refused: dict[str, str] = {}
        for name, cookie in group.functions:
            symbol = exported.get(name)
            if symbol is None:
                missing.append(name)
                continue
            try:
                offset = library.offset(symbol.address)
            except OSError:
                refused[name] = "outside of the file"
                continue
            if code.is_misread(symbol.address):
                refused[name] = "it begins with a vector instruction that Linux takes for a jump"
                continue
            found = code.returns(symbol.address) if group.at_return is not None else Returns(())
            if found.unseen:
                refused[name] = f"{found.unseen}, so its return cannot be seen"
                continue
            ends = tuple(
                (library.offset(at), cookie + group.mark * (at in found.own)) for at in found.addresses
            )
            places = (offset, *(place for place, _ in ends))
            pids = (_hooked_in(os.pread(file, 5, place), place, mapped) for place in places)
            if (pid := next((pid for pid in pids if pid is not None), None)) is not None:
                refused[name] = f"hooked by another tool in process {pid}"
                continue
            targets.append(_Target(name, (offset, cookie + group.mark * found.jumps), ends))
        aliases = _aliases(targets)
        refused |= {name: f"it is an alias of {other}" for name, other in aliases.items()}
        targets = [t for t in targets if t.name not in aliases]
        holder = self._lock_holder() if targets else 0
        if holder:
            self.incomplete = True
            why = f"process {holder} keeps its address space locked, so a probe could stop the whole machine; end it"
            refused |= {t.name: why for t in targets}
            targets = []
        for part in [targets] if self.method != "event" else [[t] for t in targets]:
            if part:
                self._attach_in_time(group, file, part, refused)
        probed = tuple(t.name for t in targets if t.name not in refused)
        late = mapped[0].pid if mapped and self._thread is not None else None
        placed = ProbedFile(_printable(path), probed, tuple(missing), refused, late)
        self.placed.append(placed)
        if holder and len(self._blocked) < _MOST_BLOCKED:
            kept = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 0)
            self._blocked.append(_Blocked(group, kept, path, tuple(mapped), user, placed))
        base = os.path.basename(_printable(path))
        if late is not None and probed:
            self._notice(
                f"process {late} loaded {base} before it had probes; calls of any process until then are not traced",
                path,
            )
        if missing and not group.optional:
            self._notice(f"{base} has no {_some_of(missing)}; such calls are not traced", path)
        reasons: dict[str, list[str]] = {}
        for name, why in refused.items():
            if not group.optional or name not in aliases:
                reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            are = "is" if len(names) == 1 else "are"
            self._notice(f"{_some_of(names)} of {base} {are} not traced: {why}", path)

    def _lock_holder(self) -> int:
        """Return a process that would keep the kernel waiting, or 0. For files that are found at about the same time, check once."""
        holder = 0
        if time.monotonic() >= self._looked + _LOOK_AGAIN:
            holder = kernel_waits.obstacle()
            self._looked = -math.inf if holder else time.monotonic()
        return holder

    def _attach_in_time(
        self, group: _Group, file: int, targets: Sequence[_Target], refused: dict[str, str]
    ) -> None:
        """Do the same as `_attach`. If a process makes the kernel wait nevertheless, leave the wait to another thread."""
        found: dict[str, str] = {}
        attempts = itertools.count(1)
        own = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 0)  # that thread may need it for longer

        def attach() -> None:
            try:
                with kernel_waits.guarded(self._note):
                    self._attach(group, f"/proc/self/fd/{own}", targets, found, attempts)
            finally:
                os.close(own)

        began = time.monotonic()
        try:
            within(_ATTACH_WAIT, os.getpid(), attach)
            refused |= found
        except Unanswered as error:
            if isinstance(error, NotLooked):
                os.close(own)  # no thread has it
            self.incomplete = True
            refused |= {t.name: "the kernel does not finish placing the probe" for t in targets}
        self._placing += time.monotonic() - began

    def _attach(
        self,
        group: _Group,
        path: str,
        targets: Sequence[_Target],
        refused: dict[str, str],
        attempts: Iterator[int],
    ) -> None:
        """Attach a group's programs to the functions `targets`, to returns before entries, so that no entry is seen without its
        return.

        If the kernel refuses, halve the list to find the functions that it refuses, and add them to `refused`. Do not retry after
        _MOST_ATTEMPTS, or if the kernel has no room for any probe. Every attempt is slow, because the kernel waits until no CPU runs
        the removed probes.
        """
        made: list[int] = []
        try:
            for at_return, function in self._functions_of(group):
                places = [p for t in targets for p in (t.at_returns if at_return else (t.at_entry,))]
                if self.method == "event":
                    program = self._loaded_program(function, places[0][1])
                    made += (bpf_syscall.attach_uprobe(program, path, at) for at, _ in places)
                else:
                    program = self._loaded_program(function)
                    offsets, cookies = zip(*places, strict=True)
                    made.append(bpf_syscall.link_uprobes(program, path, offsets, cookies))
        except OSError as error:
            for event in reversed(made):
                os.close(event)
            late = next(attempts) > _MOST_ATTEMPTS
            if len(targets) == 1 or late or out_of_files(error) or error.errno == errno.ENOMEM:
                why = f"the kernel refused the probe ({in_words(error)})"
                refused |= {t.name: why for t in targets}
                return
        else:
            with self._closing:
                if not self._closed:
                    self._events += made
                    return
            bpf_syscall.close_all(made)  # the kernel placed them too late
            return
        half = len(targets) // 2
        self._attach(group, path, targets[:half], refused, attempts)
        self._attach(group, path, targets[half:], refused, attempts)

    def _functions_of(self, group: _Group) -> list[tuple[bool, BpfFunction]]:
        """Return the programs to attach to the functions of a group, in order: (at returns, program)."""
        functions, number = self._program.functions, self._groups.index(group)
        if group.at_return is None:
            return [(False, functions[str(group.at_entry)])]
        at_return = functions[group.at_return]
        if group.at_entry is not None:
            return [(True, at_return), (False, functions[group.at_entry])]
        return [
            (True, matched_calls.at_return(at_return, number)),
            (False, matched_calls.at_entry(at_return, number)),
        ]

    def _loaded_program(self, function: BpfFunction, cookie: int | None = None) -> int:
        """Return the file descriptor of a program in the kernel. `cookie`: for the method `event`, the program's only cookie."""
        key = function.name, cookie
        with self._closing:
            if self._closed:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            if key not in self._loaded:
                self._loaded[key] = self._load(plain_program(function, cookie), _ATTACH[self.method])
                self.programs.append((function.name, self._loaded[key]))
            return self._loaded[key]

    def _notice(self, text: str, path: str | None = None) -> None:
        """Pass on a notice, once. A notice about a file may be held, see `told_of`."""
        if text not in self._notices and len(self._notices) < limits.NOTICES:
            self._notices.add(text)
            if path is not None and self._held is not None:
                self._held.setdefault(path, []).append(text)
            else:
                self._note(text)

    def told_of(self, pid: int) -> None:
        """Pass on the held notices about files that a process maps; all held notices if the process has ended."""
        held = self._held or {}
        paths = set(held)
        with contextlib.suppress(OSError):
            paths = {m.path for group in self._groups for m in libraries.mapped(pid, group.names)}
        for path in paths:
            for text in held.pop(path, ()):
                self._note(text)


def _aliases(targets: Sequence[_Target]) -> dict[str, str]:
    """Return the functions that are at the same offset as an earlier function: name → name of the earlier function."""
    first: dict[int, str] = {}
    return {
        t.name: first[t.at_entry[0]] for t in targets if first.setdefault(t.at_entry[0], t.name) != t.name
    }


def _some_of(names: Sequence[str]) -> str:
    """Return a list of names for a notice. A number replaces names that would make it long."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:_MOST_NAMED])} and {more} others"


def _hooked_in(code: bytes, offset: int, mapped: Sequence[MappedCode]) -> int | None:
    """Return the ID of a process whose code at `offset` differs from the file's, except by a kernel probe; None if there is none.

    Another tool has hooked the function there, and a probe would destroy that hook. The agent's own hooks do not change the first
    instruction.

    code: the bytes in the file."""
    if not code:
        return None
    size = len(code) if code[0] in _RELATIVE else 1
    for m in mapped:
        if m.offset <= offset < m.offset + m.end - m.start:
            with contextlib.suppress(OSError), address_space.Memory(m.pid) as memory:
                there = memory.some(m.start + offset - m.offset, size)
                if (
                    there
                    and there != code[:size]
                    and there[0] not in (_BREAKPOINTS if size == 1 else (0xCC,))
                ):
                    return m.pid
    return None


def _printable(path: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in path.removesuffix(" (deleted)"))
