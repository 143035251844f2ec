"""Every process of the machine that uses the CUDA driver (docs/attach.md, "Several processes, every process").

    machine = Machine(session.join, missed, note)
    machine.start()     # those that run have joined; those that come are seen
    machine.close()

**Those that run** are found by what they map. **Those that come** stop at the entry of their first cuInit, held there by a process of
its own (holding.py), until the agent is live in them.

Driver files are known from processes that run, from the loader's cache and from where they usually lie. One that no process had mapped
before (a container's own copy) is found when /proc is looked through again: at each process often while it is new, then seldom.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Set
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from gpubpf import elf
from gpubpf.attach import holding
from gpubpf.attach.loading import Held
from gpubpf.errors import SessionError
from gpubpf.process import target, target_files
from gpubpf.session import device
from gpubpf.session.joining import TRACED
from gpubpf.session.workers import Workers

HOLD = 3.0  # seconds for which a thread is held
LEAVE = 1.0  # and then, where the agent has begun to put in its hooks
STUCK = 0.2  # seconds until it is looked whether a thread waits for itself
RUNNING = 5.0  # seconds for those that run to join, before it is said that everybody is watched
TICK = 0.05  # seconds between two looks at those that are held
FILE = 2.0  # seconds for a driver's file to be read
START = 10.0  # seconds for the process that holds to start
ANSWER = 5.0  # and to answer
REACHED_LATE = "reached late"
JOINS = 8  # processes that join at the same time
OFTEN, SELDOM = 0.25, 60.0  # seconds between two looks at one process, when it is new and at last
_PLACES = (
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/lib/wsl/lib", "/usr/local/nvidia/lib64"),
    *("/usr/local/cuda/compat", "/run/opengl-driver/lib", str(device.LIBRARIES)),
)
_CACHED = re.compile(rb"/[^\0]*/libcuda\.so[^\0/]*")
_MAPPED = re.compile(rb"^([0-9a-f]+-[0-9a-f]+) \S+ [0-9a-f]+ (\S+) (\d+) +(/.*/libcuda\.so[^/\n]*)$", re.M)
_File = tuple[bytes, int]  # a mapped file: device and inode


class Machine:
    """Has processes join: `join(pid, tid)` measures one (`Session.join`); `tid` is the thread of it that is held, None: it just runs.
    It gives None, or why the process is missed, of which it takes note itself. `missed(pid, comm, reason)` takes note of what is
    known only here. `note`: called with notices for the user. All from several threads."""

    def __init__(
        self,
        join: Callable[[int, int | None], str | None],
        missed: Callable[[int, str, str], None],
        note: Callable[[str], None],
    ) -> None:
        self._join, self._missed, self._note = join, missed, note
        self._closing = threading.Event()
        self._placed: set[_File] = set()
        self._looks: dict[int, tuple[float, float]] = {}  # at a process: when next, how long after the last
        self._lost = 0
        self._since = 0.0  # the first probes were placed, CLOCK_BOOTTIME

    def start(self) -> None:
        """Returns when those that come are seen, and those that run have joined. Raises SessionError."""
        if platform.machine() != "x86_64":
            raise SessionError("processes that run are reached on x86-64 only; use TOOL -- COMMAND")
        self._joins = Workers(JOINS)
        self._scanner = threading.Thread(target=self._scan, name="gpubpf-scan", daemon=True)
        self._holder = Holder(self._comes, self._forget, self._alone)
        try:
            placed = [self._place(path) for path in _driver_files()]
            self._since = time.clock_gettime(time.CLOCK_BOOTTIME)
            wait(self._look(True, late=False), RUNNING)
            if not any(placed) and not self._placed:
                self._note("found no CUDA driver yet; waiting for a process that loads one")
        except BaseException:
            self.close()
            raise
        self._scanner.start()

    def close(self) -> None:
        """Lets all go, and sees none any more."""
        self._closing.set()
        if self._scanner.ident is not None:
            self._scanner.join(LEAVE)  # a file that it opens may be of a program that does not answer
        self._holder.close()
        self._joins.close()

    def _forget(self, pid: int) -> None:
        self._looks.pop(pid, None)

    def _alone(self) -> None:
        if not self._closing.is_set():
            self._note("the hold helper exited; new processes will be attached late")

    # --- who joins ---

    def _comes(self, pid: int, comm: str, held: Held | None, late: bool) -> None:
        self._joins.submit(self._joined, pid, comm, held, late)

    def _joined(self, pid: int, comm: str, held: Held | None, late: bool) -> None:
        """`late`: it is measured only from some moment on that nobody knows."""
        if self._closing.is_set():
            return
        try:
            if held is not None and _has_a_tool(pid):
                self._missed(pid, comm, TRACED)
                return
            reason = self._join(pid, held.tid if held is not None else None)
        finally:
            overtaken = self._holder.done(pid)
        if reason is None and (late or overtaken or (held is not None and held.late)):
            self._missed(pid, comm, REACHED_LATE)

    # --- those that run ---

    def _scan(self) -> None:
        while not self._closing.wait(OFTEN):
            lost, placed = self._holder.lost, set(self._placed)
            self._look(lost != self._lost, late=True)
            if new := self._placed - placed:  # who else uses it came before its probe, too
                self._look(True, late=True, new=new)
            self._lost = lost

    def _look(self, everything: bool, late: bool, new: Set[_File] | None = None) -> list[Future[None]]:
        """At processes whose turn it is, or `everything`; has those join that use a driver (one that is `new`) and came to it
        before there was a probe."""
        now = time.monotonic()
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
        for pid in self._looks.keys() - pids:
            self._looks.pop(pid, None)
        joins = []
        for pid in pids:
            due, pause = self._looks.get(pid, (0.0, OFTEN / 2))
            if due > now and not everything:
                continue
            pause = min(2 * pause, SELDOM)
            self._looks[pid] = now + pause, pause
            seen = time.monotonic_ns()
            files = _drivers(pid)
            placed = [self._place(path, file) for file, path in files.items() if file not in self._placed]
            meant = any(placed) or (everything and any(new is None or file in new for file in files))
            # Who began later is met by the probes.
            if meant and (late or _started(pid) <= self._since) and self._holder.ask(pid, seen):
                comm = target.status(pid).get("Name", "")
                joins.append(self._joins.submit(self._joined, pid, comm, None, late))
        return joins

    def _place(self, path: str, file: _File | None = None) -> bool:
        """A probe on a driver, `file` as maps name it."""
        if file is not None:
            self._placed.add(file)  # tried once
        found: Future[tuple[int, _File] | None] = Future()
        threading.Thread(
            target=lambda: found.set_result(_cu_init(path)), name="gpubpf-file", daemon=True
        ).start()
        try:
            where = found.result(FILE)
        except TimeoutError:  # its file system may be the process's own
            return False
        if where is None or not self._holder.place(path, where[0]):
            return False
        self._placed.add(where[1])
        return True


def _cu_init(path: str) -> tuple[int, _File] | None:
    """Where cuInit is in a driver's file, and which that is; None: it is none."""
    with contextlib.suppress(OSError), open(target_files.open_regular(path), "rb") as opened:
        driver = elf.LoadedFile(opened.fileno())
        found = elf.exports(driver).get("cuInit")
        state = os.fstat(opened.fileno())
        if found is not None:
            place = b"%02x:%02x" % (os.major(state.st_dev), os.minor(state.st_dev))
            return driver.offset(found.address), (place, state.st_ino)
    return None


def _has_a_tool(pid: int) -> bool:
    """Whether it was started with one, which the driver loads inside cuInit."""
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return any(variable.startswith(b"CUDA_INJECTION64_PATH=") for variable in variables)
    return False


def _drivers(pid: int) -> dict[_File, str]:
    """The drivers that a process maps, and by which paths they are reached from here."""
    found: dict[_File, str] = {}
    with contextlib.suppress(OSError):
        for where, place, inode, _ in _MAPPED.findall(Path(f"/proc/{pid}/maps").read_bytes()):
            found.setdefault((place, int(inode)), f"/proc/{pid}/map_files/{where.decode()}")
    return found


def _driver_files() -> Iterable[str]:
    """Those that lie where a loader finds them, each once."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found += map(os.fsdecode, _CACHED.findall(Path("/etc/ld.so.cache").read_bytes()))
    for place in _PLACES:
        found += map(str, Path(place).glob("libcuda.so*"))
    return dict.fromkeys(os.path.realpath(path) for path in found)


def _started(pid: int) -> float:
    """When it began, in seconds of CLOCK_BOOTTIME; 0: not known."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        ticks = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        return ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


class Holder:
    """The process that holds those who come (holding.py). `comes(pid, comm, held, late)`: one is in its first cuInit; held None:
    it could not be held there. `late`: it, or one of its threads, may have gone on. `forget(pid)`: it executes another program, or has
    ended. `alone`: nobody is held any more. All of them from a thread of its own. Raises SessionError."""

    def __init__(
        self,
        comes: Callable[[int, str, Held | None, bool], None],
        forget: Callable[[int], None],
        alone: Callable[[], None],
    ) -> None:
        self._comes, self._forget, self._alone = comes, forget, alone
        self._asking = threading.Lock()
        self._asked = 0
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._held: dict[int, Held] = {}
        self._lock = threading.Lock()  # guards _held
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        library = str(Path(__file__).parents[2])
        start = f"import sys; sys.path.insert(0, {library!r}); from gpubpf.attach import holding; "
        start += "holding.main(*map(int, sys.argv[1:]))"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", start, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._thread = threading.Thread(target=self._run, name="gpubpf-holder", daemon=True)
        self._connection.settimeout(START)
        first: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            first = json.loads(self._connection.recv(holding.PACKET) or "{}")
        if "ready" not in first:
            self.close()
            raise SessionError(
                first.get("failed")
                or "cannot watch all processes: the hold helper did not start; name processes with -p"
            )
        self._connection.settimeout(None)
        self._thread.start()

    def close(self) -> None:
        """It lets all go, and ends."""
        for held in self._everyone():
            self._expire(held)
        until = time.monotonic() + LEAVE
        while any(held.is_held for held in self._everyone()) and time.monotonic() < until:
            time.sleep(0.005)
        for held in self._everyone():
            held.close()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join()
        self._connection.close()
        # The kernel takes probes out one after the other, which nobody needs to see.
        threading.Thread(target=self._process.wait, name="gpubpf-holder", daemon=True).start()

    def place(self, path: str, offset: int) -> bool:
        """A probe on cuInit, which is there in the file. False: it cannot be placed."""
        return bool(self._ask(place=[path, offset]))

    def ask(self, pid: int, seen: int) -> bool:
        """Whether a process that runs is to join: nobody else has it do so, or had, when it was `seen` (ns, time.monotonic_ns)."""
        return bool(self._ask(ask=[pid, seen]))

    def done(self, pid: int) -> bool:
        """It has joined, or is missed: it goes on and is not held again. Whether it came to cuInit while it joined as it ran."""
        with self._lock:
            held = self._held.pop(pid, None)
        overtaken = bool(self._ask(done=pid))
        if held is not None:
            held.mark_released()
            held.close()
        return overtaken

    @property
    def lost(self) -> int:
        """Processes that came and were not told of."""
        return int(self._ask(lost=True) or 0)

    def _ask(self, **message: Any) -> Any:
        """None: nothing was heard."""
        with self._asking, contextlib.suppress(OSError, queue.Empty):
            self._asked += 1
            self._connection.send(json.dumps({**message, "id": self._asked}).encode())
            while answer := self._answers.get(timeout=ANSWER):
                if answer["id"] == self._asked:
                    return answer["answer"]
        return None

    def _everyone(self) -> list[Held]:
        with self._lock:
            return list(self._held.values())

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._connection], [], [], TICK)
            try:
                data = self._connection.recv(holding.PACKET) if ready else None
            except OSError:
                data = b""
            if data == b"":
                break
            now = time.monotonic()
            for held in self._everyone():
                late = now > held.since + HOLD or (now > held.since + STUCK and held.is_deadlocked())
                if held.is_held and late:
                    self._expire(held)
            if data:
                self._take(json.loads(data))
        self._answers.put({})  # to who waits
        self._alone()

    def _take(self, message: dict[str, Any]) -> None:
        if "held" in message:
            pid = message["held"]
            held: Held | None = None
            with contextlib.suppress(SessionError):  # it ended, which is found out again
                held = Held(pid, message["tid"], message["base"], message["functions"], message["since"])
                with self._lock:
                    self._held[pid] = held
                if time.monotonic() > held.since + HOLD:  # the one before it with its number took so long
                    self._expire(held)
            self._comes(pid, message["comm"], held, message["late"])
        elif "late" in message:
            self._comes(message["late"], message["comm"], None, True)
        elif "forget" in message:
            self._forget(message["forget"])
        else:
            self._answers.put(message)

    def _expire(self, held: Held) -> None:
        if held.expire() or time.monotonic() > held.since + HOLD + LEAVE:
            with contextlib.suppress(OSError):
                self._connection.send(json.dumps({"release": held.pid}).encode())
            held.mark_released()
