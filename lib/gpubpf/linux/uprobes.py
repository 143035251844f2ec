"""Host programs at functions of user-space libraries, entered and returned from, in the Linux kernel (docs/attach-points.md).

A probe is on a file, so that it is met in every process that maps it, of whatever name space, whenever that starts. One program
serves a whole table of functions, and tells them apart by bpf_get_attach_cookie. How they are attached is what the kernel has:

    session   one link for all functions of a file, entry and return (Linux 6.13)
    multi     one link for all entries, one for all returns (Linux 6.6)
    event     a perf event for each, and a program for each function, with its number in it

Libraries that processes load later are noticed as they are mapped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import BpfFunction as Function
from gpubpf.ebpf.bytecode import Instruction, Program
from gpubpf.errors import Error, UsageError
from gpubpf.linux import bpf_syscall, libraries
from gpubpf.linux.libraries import Mapped, Mappings, Names
from gpubpf.process import target

WAYS = ("session", "multi", "event")
_ATTACH = {"session": bpf_syscall.UPROBE_SESSION, "multi": bpf_syscall.UPROBE_MULTI, "event": 0}
_FUNC_IP, _COOKIE = 173, 174  # helpers
_IP = 128  # of struct pt_regs, x86-64
_NOTHING = bytes.fromhex("b700000000000000 9500000000000000")  # r0 = 0; exit
_BREAKPOINTS = (0xCC, 0xE8)  # what the kernel puts there: int3, or in place of a nop a call
_RELATIVE = (0xE8, 0xE9)  # call, jmp: another one would begin with the same byte
_PAUSE = 0.002  # seconds, so that a machine that starts many programs wakes the tool seldom


@dataclass(frozen=True)
class Table:
    """A program and the functions that it goes to: names without version, each with the number by which the program tells it.
    `optional`: no library need have all of them."""

    function: str
    libraries: tuple[str, ...]
    functions: tuple[tuple[str, int], ...]
    returns: bool = False
    optional: bool = False

    @property
    def what(self) -> str:
        return f"functions of {' or '.join(self.libraries)}"


def table(
    function: str,
    library: str | Iterable[str],
    functions: Sequence[str] | Mapping[str, int],
    returns: bool = False,
    optional: bool = False,
) -> Table:
    """Raises UsageError."""
    patterns = (library,) if isinstance(library, str) else tuple(library)
    Names(*patterns)
    if isinstance(functions, str) or not functions:
        raise UsageError(f"{function} is attached to no function; give a list of their names")
    numbered = (
        functions.items() if isinstance(functions, Mapping) else ((n, i) for i, n in enumerate(functions))
    )
    made = tuple(numbered)
    if len(dict(made)) != len(made):
        raise UsageError(f"{function}: a function is named twice; name each once")
    return Table(function, patterns, made, returns, optional)


@dataclass(frozen=True)
class Placed:
    """What was put on one file: `functions` that have probes; `missing`: the library does not export them; `refused`: why not. `late`:
    the process that mapped it first, where that was after the start: its calls until then are not known."""

    path: str
    functions: tuple[str, ...]
    missing: tuple[str, ...]
    refused: Mapping[str, str]
    late: int | None = None


@dataclass(frozen=True)
class _Group:
    """Functions with a program at their entry, one at their return, or both."""

    names: Names
    functions: tuple[tuple[str, int], ...]
    call: str | None
    back: str | None
    optional: bool


def _groups(tables: Sequence[Table]) -> list[_Group]:
    """Tables of the same functions, one for entries and one for returns, are put together."""
    found: list[_Group] = []
    for t in tables:
        for i, g in enumerate(found):
            half = g.call is None if not t.returns else g.back is None
            if half and g.names.patterns == t.libraries and g.functions == t.functions:
                found[i] = replace(g, back=t.function) if t.returns else replace(g, call=t.function)
                break
        else:
            call, back = (None, t.function) if t.returns else (t.function, None)
            found.append(_Group(Names(*t.libraries), t.functions, call, back, t.optional))
    return found


# --- programs ---


def _ending(code: Sequence[Instruction], end: Sequence[Instruction]) -> list[Instruction]:
    """The same with another end in place of each exit."""
    made = []
    for pc, i in enumerate(code):
        if i.opcode == b.JMP | b.EXIT:
            i = Instruction(b.JMP | b.JA, offset=len(code) - pc - 1, line=i.line)
        made.append(i)
    return made + list(end)


_ZERO = (Instruction(b.ALU64 | b.MOV, 0, imm=0), Instruction(b.JMP | b.EXIT))
_ZERO_OR_ONE = (
    Instruction(b.JMP | b.JEQ, 0, imm=0, offset=1),
    Instruction(b.ALU64 | b.MOV, 0, imm=1),
    Instruction(b.JMP | b.EXIT),
)


def plain(function: Function, cookie: int | None = None) -> Function:
    """The program, whose result the kernel need not look at. `cookie`: what bpf_get_attach_cookie gives, in place of the call."""
    code = _ending(function.instructions, _ZERO)
    if cookie is not None:
        value = b.signed(cookie, 32)
        if value != cookie:
            raise UsageError(f"{function.name}: a function's number is {cookie}; number from 0 to 2147483647")
        code = [
            Instruction(b.ALU64 | b.MOV, 0, imm=value, line=i.line)
            if (i.opcode, i.src, i.imm) == (b.JMP | b.CALL, 0, _COOKIE)
            else i
            for i in code
        ]
    return replace(function, instructions=tuple(code))


def session(call: Function, back: Function) -> Function:
    """Both programs as one, which runs at the entry and at the return: at the entry the instruction pointer is the function's."""
    first = _ending(call.instructions, _ZERO_OR_ONE)
    head = [
        Instruction(b.ALU64 | b.MOV | 8, 6, 1),
        Instruction(b.JMP | b.CALL, imm=_FUNC_IP),
        Instruction(b.LDX | b.MEM | 0x18, 2, 6, _IP),
        Instruction(b.ALU64 | b.MOV | 8, 1, 6),
        Instruction(b.JMP | b.JNE | 8, 0, 2, len(first)),
    ]
    code = (*head, *first, *_ending(back.instructions, _ZERO))
    return Function(f"{call.name}.{back.name}", call.point, code)


def way() -> str:
    """The best of WAYS that this kernel has. Raises OSError where it runs no programs of ours."""
    for name in WAYS[:-1]:
        with contextlib.suppress(OSError):
            program = bpf_syscall.load_program(
                bpf_syscall.KPROBE, _NOTHING, name="gpubpf_probe", attach=_ATTACH[name]
            )
            try:  # older kernels load a program for anything; who knows such links finds that this is no file
                os.close(bpf_syscall.link_uprobes(program, _ATTACH[name], "/", (0,), (0,)))
            except OSError as error:
                if error.errno == errno.EBADF:
                    return name
            finally:
                os.close(program)
    bpf_syscall.uprobe_type()
    return "event"


# --- where they go ---


class Uprobes:
    """The probes of some tables on all files that there are and come. `load(function, attach)`: puts a program into the kernel, see
    `host.load`. `note`: called with notices for the user, from another thread too. Raises OSError, VerifyError, Error."""

    def __init__(
        self,
        program: Program,
        tables: Sequence[Table],
        load: Callable[[Function, int], int],
        note: Callable[[str], None],
        way_: str | None = None,
    ) -> None:
        if platform.machine() != "x86_64":
            raise Error("functions of libraries are reached on x86-64 only; attach to something else")
        self._program, self._load, self._note = program, load, note
        self._groups = _groups(tables)
        self.way = way_ or way()
        self.placed: list[Placed] = []
        self.programs: list[tuple[str, int]] = []  # name, file
        self._loaded: dict[tuple[str, int | None], int] = {}
        self._events: list[int] = []
        self._seen: set[tuple[str, int]] = set()  # files as maps name them
        self._keys: set[tuple[int, libraries.Key]] = set()  # group, file
        self._said: set[str] = set()
        self._over = False
        self._watch: Mappings | None = None
        self._thread: threading.Thread | None = None
        self._settle: Callable[[], None] = lambda: None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            self._start()
        except BaseException:
            for file in self.take():
                os.close(file)
            raise

    def _start(self) -> None:
        for group in self._groups:  # what does not load is known now
            self._programs(group, group.functions[0][1])
        try:
            self._watch = Mappings()
        except OSError as error:
            self._say(f"libraries that processes load later are not noticed ({error.strerror})")
        self._look()
        for group in self._groups:
            for path in libraries.files(group.names):
                with contextlib.suppress(OSError):
                    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                    try:
                        self._place(group, file, path, ())
                    finally:
                        os.close(file)
        for group in self._groups:
            if not any(group.names.match(p.path) for p in self.placed):
                self._say(f"no {group.names} is found here yet; processes that bring one are looked for")
        if self._watch is not None:
            self._thread = threading.Thread(target=self._run, name="gpubpf-libraries", daemon=True)
            self._thread.start()

    def limit(self, settle: Callable[[], None]) -> None:
        """Has the thread that looks for libraries give up privileges: see `privileges.Privileges.settle`."""
        self._settle = settle
        os.eventfd_write(self._wake, 1)

    def take(self) -> list[int]:
        """No probe is put anywhere any more. The files that keep those there, and the programs, to be closed: the entries first."""
        self._over = True
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)
            if self._thread is not None:
                self._thread.join()
            if self._watch is not None:
                self._watch.close()
            os.close(self._wake)
            self._wake = -1
        files = [*reversed(self._events), *(file for _, file in self.programs)]
        self._events, self.programs = [], []
        self._loaded.clear()
        return files

    # --- files that come ---

    def _run(self) -> None:
        watch = self._watch
        assert watch is not None
        poll = select.poll()
        for file in (*watch.descriptors, self._wake):
            poll.register(file, select.POLLIN)
        names = [group.names for group in self._groups]
        over = False
        while not over:
            ready = poll.poll()
            over = self._over  # what was mapped until then is looked at: a process may be as short as that
            if any(file == self._wake for file, _ in ready):
                os.eventfd_read(self._wake)
                self._settle()
            found = watch.read(names)
            for m in found:
                self._met(m.place, m.inode, [m])
            if watch.lost:
                watch.lost = False
                self._look()
            if not found and not over:
                time.sleep(_PAUSE)

    def _look(self) -> None:
        """At all processes that run."""
        for group in self._groups:
            for (place, inode), mapped in libraries.running(group.names).items():
                self._met(place, inode, mapped)

    def _met(self, place: str, inode: int, mapped: Sequence[Mapped]) -> None:
        if (place, inode) in self._seen:
            return
        self._seen.add((place, inode))
        first = mapped[0]
        try:
            file = libraries.open_mapped(first)
        except (FileNotFoundError, ProcessLookupError):  # the process ended: the next one may be as short
            try:
                file = libraries.open_here(first)
            except OSError:
                self._seen.discard((place, inode))
                self._say(
                    f"{_shown(first.path)} was mapped by process {first.pid}, which ended before there could be"
                    " probes; its calls are not seen"
                )
                return
        except OSError as error:
            self._say(f"{_shown(first.path)} cannot be opened ({error.strerror}); calls of it are not seen")
            return
        try:
            for group in self._groups:
                if group.names.match(first.path):
                    self._place(group, file, first.path, mapped)
        finally:
            os.close(file)

    def _place(self, group: _Group, file: int, path: str, mapped: Sequence[Mapped]) -> None:
        number = self._groups.index(group)
        mark = number, libraries.key(file)
        if mark in self._keys:
            return
        self._keys.add(mark)
        elf = target.ElfFile(file)
        exported = target.symbols(elf, 0)
        places: list[tuple[str, int, int]] = []
        missing: list[str] = []
        refused: dict[str, str] = {}
        for name, cookie in group.functions:
            symbol = exported.get(name)
            if symbol is None:
                missing.append(name)
                continue
            try:
                offset = elf.offset(symbol.address)
            except OSError:
                refused[name] = "outside of the file"
                continue
            if (pid := _hooked(os.pread(file, 5, offset), offset, mapped)) is not None:
                refused[name] = f"another tool has put a jump there, in process {pid}"
                continue
            places.append((name, offset, cookie))
        same = _same(places)
        refused |= {name: f"it is {other} by another name" for name, other in same.items()}
        places = [p for p in places if p[0] not in same]
        for part in [places] if self.way != "event" else [[p] for p in places]:
            if part:
                self._attach(group, f"/proc/self/fd/{file}", part, refused)
        put = tuple(name for name, _, _ in places if name not in refused)
        late = mapped[0].pid if mapped and self._thread is not None else None
        self.placed.append(Placed(_shown(path), put, tuple(missing), refused, late))
        base = os.path.basename(_shown(path))
        if missing and not group.optional:
            self._say(f"{base} has no {', '.join(missing)}; such calls are not seen")
        reasons: dict[str, list[str]] = {}
        for name, why in refused.items():
            if not group.optional or name not in same:
                reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            are = "is" if len(names) == 1 else "are"
            self._say(f"{', '.join(names)} of {base} {are} left out: {why}")

    def _attach(
        self, group: _Group, path: str, places: Sequence[tuple[str, int, int]], refused: dict[str, str]
    ) -> None:
        """Returns before entries, so that no entry waits for a return that nobody sees."""
        offsets, cookies = [p[1] for p in places], [p[2] for p in places]
        made: list[int] = []
        try:
            for returns, program in self._programs(group, cookies[0]):
                if self.way == "event":
                    made.append(bpf_syscall.attach_uprobe(program, path, offsets[0], returns))
                    continue
                attach = _ATTACH["session" if self._is_session(group) else "multi"]
                made.append(bpf_syscall.link_uprobes(program, attach, path, offsets, cookies, returns))
        except OSError as error:
            for event in reversed(made):
                os.close(event)
            if len(places) == 1:
                refused[places[0][0]] = f"the kernel takes no probe there ({error.strerror})"
                return
        else:
            self._events += made
            return
        half = len(places) // 2
        self._attach(group, path, places[:half], refused)
        self._attach(group, path, places[half:], refused)

    def _is_session(self, group: _Group) -> bool:
        return self.way == "session" and group.call is not None and group.back is not None

    def _programs(self, group: _Group, cookie: int) -> list[tuple[bool, int]]:
        """What goes to a function of the group, in order: whether at its return, the program's file."""
        functions = self._program.functions
        if self._is_session(group):
            made = session(functions[str(group.call)], functions[str(group.back)])
            return [(False, self._file(made, _ATTACH["session"], None))]
        own = cookie if self.way == "event" else None
        attach = 0 if self.way == "event" else _ATTACH["multi"]
        return [
            (returns, self._file(plain(functions[name], own), attach, own))
            for returns, name in ((True, group.back), (False, group.call))
            if name is not None
        ]

    def _file(self, function: Function, attach: int, cookie: int | None) -> int:
        key = function.name, cookie
        if key not in self._loaded:
            self._loaded[key] = self._load(function, attach)
            self.programs.append((function.name, self._loaded[key]))
        return self._loaded[key]

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._note(text)


def _same(places: Sequence[tuple[str, int, int]]) -> dict[str, str]:
    """Names of functions that lie where one before them does."""
    first: dict[int, str] = {}
    return {name: first[at] for name, at, _ in places if first.setdefault(at, name) != name}


def _hooked(code: bytes, offset: int, mapped: Sequence[Mapped]) -> int | None:
    """A process that has other code there than the file, beside a probe of the kernel's: a hook that would be torn apart. Our own
    hooks lie behind the first instruction, which is left alone. `code`: what the file has."""
    if not code:
        return None
    size = len(code) if code[0] in _RELATIVE else 1
    for m in mapped:
        if m.offset <= offset < m.offset + m.end - m.start:
            with contextlib.suppress(OSError), open(f"/proc/{m.pid}/mem", "rb", buffering=0) as memory:
                there = os.pread(memory.fileno(), size, m.start + offset - m.offset)
                if (
                    there
                    and there != code[:size]
                    and there[0] not in (_BREAKPOINTS if size == 1 else (0xCC,))
                ):
                    return m.pid
    return None


def _shown(path: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in path.removesuffix(" (deleted)"))
