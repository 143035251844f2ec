"""Attach to every process on the machine that uses the CUDA driver or AMD's ROCr (docs/attach.md, "Several processes, every process").

    watcher = MachineWatcher(session.join, missed, note)
    watcher.start()             # attaches to running processes; new ones will be attached
    watcher.stop_attaching()    # when the measurement ends
    watcher.close()
    watcher.unattached()        # processes that came too late

`Session` uses it when it traces all processes.

**Running processes** are found in /proc/PID/maps. **New processes** are stopped at the entry of their first cuInit. The hold helper, a
separate process (holding.py), holds them there until the agent's hooks are live.

Driver files are found in the maps of running processes, in the loader's cache and in the usual folders. A file that no process had
mapped before, such as a container's copy, is found by rescanning /proc: often for a new process, less often later.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import queue
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path
from typing import Any

from gpubpf import agent, elf, processor
from gpubpf.attach import holding
from gpubpf.attach.loading import Held
from gpubpf.errors import SessionError, in_words, out_of_files
from gpubpf.future import Future, wait
from gpubpf.kernel import fresh_thread
from gpubpf.linux import libraries
from gpubpf.process import (
    address_space,
    kernel_waits,
    limits,
    proc,
    scans,
    started_with,
    target_files,
    traceable,
    user_waits,
)
from gpubpf.process.patience import LOOK_WAIT, Unanswered, lock_holder, within
from gpubpf.process.scans import ScanBudget
from gpubpf.record import MutableRecord, Record
from gpubpf.records.reasons import FORBIDDEN, NO_ROCR, REACHED_LATE, TOO_LATE, TRACED
from gpubpf.traced import device
from gpubpf.traced.driver_files import DriverFiles, FileId
from gpubpf.traced.workers import DaemonThreadPool

# All in seconds.
HOLD = 3.0  # longest time that a thread is held
LEAVE = 1.0  # after HOLD, if the agent has begun to install its hooks
STUCK_WAIT = 0.2  # before checking whether a held thread is deadlocked with its worker
FIRST_JOINS_WAIT = 5.0  # for attaching to running processes, before the tool reports that it watches all
TICK = 0.05  # between checks of held threads
FILE_WAIT = 2.0  # for reading a driver file
START_WAIT = 10.0  # for the hold helper to start
ANSWER_WAIT = 5.0  # for the hold helper to answer
PROGRESS_WAIT = 1.0  # for it to do anything, if it works on a process that may keep it waiting
HELPER_EXIT_WAIT = 10.0  # for the hold helper to end after the tool has disconnected
PLACE_AGAIN = 5.0  # between attempts to place probes that would have stopped the machine
MIN_SCAN_INTERVAL, MAX_SCAN_INTERVAL = 0.25, 60.0  # between scans of one process; doubles each time

JOINS, JOINS_OF_USER = 8, 6  # concurrent attaches: to all processes, and to those of one user
_DRIVER = libraries.LibraryNames("libcuda.so", "libhsa-runtime64.so")
_DRIVER_FILE = re.compile(rb"/lib(?:cuda|hsa-runtime64)\.so")  # faster than _MAPPED, which few lines match
_MAPPED = re.compile(
    rb"([0-9a-f]+)-([0-9a-f]+) \S+ [0-9a-f]+ (\S+) (\d+) +/.*/lib(?:cuda|hsa-runtime64)\.so[^/]*$"
)
FIRST_USE = ("cuInit", "hsa_queue_create")  # functions that a process must call before it can launch a kernel
_NO_DRIVER, _NO_PROBE = -math.inf, math.inf  # stored instead of a probe's time


class _Schedule(MutableRecord):
    """When a process is scanned next.

    due: time.monotonic of the next scan.
    pause: seconds from the next scan to the scan after it.
    user: user ID of the process.
    """

    user: int
    due: float = 0.0
    pause: float = MIN_SCAN_INTERVAL / 2

    def scanned(self, now: float) -> None:
        self.pause = min(2 * self.pause, MAX_SCAN_INTERVAL)
        self.due = now + self.pause

    def found(self, now: float) -> None:
        """Scan the process rarely: its driver was found, so it is unlikely to map another one soon."""
        self.pause = MAX_SCAN_INTERVAL
        self.due = now + self.pause


class _Driver(Record):
    """A driver file.

    path: a path that works in this process's mount namespace.
    file: its id in /proc/PID/maps; None: the file was found without a process.
    pid: a process that maps the file; 0 for a file that was found without a process.
    """

    path: str
    file: FileId | None = None
    pid: int = 0

    @property
    def name(self) -> str:
        """The file's name in notices. (Reading the link in map_files would take the lock of the process.)"""
        if self.pid:
            return f"a GPU driver that pid {self.pid} ({traceable.comm(self.pid)}) maps"
        return os.path.basename(self.path)


class MachineWatcher:
    """Finds all processes that use a GPU driver, and has the session attach to them.

    join(pid, tid): attach to a process, and return None or the reason for the failure. This is `Session.join`, which also counts the
    reason, except TOO_LATE: then `unattached` returns the process. `tid`: the process's held thread; None if the process runs freely.
    missed(pid, comm, reason): count a process for a reason that only the watcher knows.
    note: gets notices for the user.

    These three are called from several threads. The other public methods belong to the session's main thread. A scanner thread looks
    for processes, the `HoldHelper` thread reports new ones, and a pool of JOINS threads attaches to them. The threads share only
    `_next_scan`, `_probed_files`, `_unused` and `_arrived`, with single dict operations.
    """

    def __init__(
        self,
        join: Callable[[int, int | None], str | None],
        missed: Callable[[int, str, str], None],
        note: Callable[[str], None],
    ) -> None:
        self._join, self._missed, self._note = join, missed, note
        self._closing = threading.Event()
        self._helpers = 0  # number of hold helpers that were started after the first
        self._unheld: set[int] = set()  # users whose processes are not held: one of them made a helper wait
        self.blind = False  # new processes are not held, so some may come and end unseen
        # CLOCK_BOOTTIME when a file's probe was in place; _NO_DRIVER: not a driver; _NO_PROBE: a driver without a probe.
        self._probed_files: dict[FileId, float] = {}
        self._driver_files = DriverFiles()
        self._installed: frozenset[FileId] = (
            frozenset()
        )  # driver files that `libraries.files` finds; no limit applies to them
        self._over_limit: dict[int, float] = {}  # processes with files beyond a limit: pid → start time
        self._unanswered: dict[int, float] = {}  # processes that cannot be looked at: pid → start time
        self._next_scan: dict[int, _Schedule] = {}  # by pid
        self._budget = ScanBudget()
        self._delayed: set[int] = set()  # users whose processes had to wait
        self._lost_before = 0, 0  # `HoldHelper.lost` at the last scan
        self._stuck = False  # an attach did not end
        self._unprobed: set[tuple[int, str]] = (
            set()
        )  # notices about files without a probe: (user, file and reason)
        # Driver files without a probe, because a process holds the lock of its address space: by path. Until they have a probe,
        # processes that map them are found by scanning.
        self._unplaced: dict[str, _Driver] = {}
        self._follows_mappings = False
        self._starting_to_follow = threading.Lock()
        # Processes that have loaded ROCr but do not use it yet: pid → start time. They will be held when they start to use it.
        self._unused: dict[int, float] = {}
        # Processes that are to be attached to, or are being attached to: pid → comm.
        self._arrived: dict[int, str] = {}
        self._users: dict[int, object] = {}  # owners of the attaching threads' work, by user ID

    def start(self) -> None:
        """Attach to running processes, and begin to hold new ones. Raises SessionError."""
        if not processor.IS_X86_64:
            raise SessionError("attaching to running processes requires x86-64; use TOOL -- COMMAND")
        self._joins = DaemonThreadPool(JOINS, each=JOINS_OF_USER)
        self._scanner = threading.Thread(target=self._scan_loop, name="gpubpf-scan", daemon=True)
        self._hold_helper = HoldHelper(
            self._on_arrival, self._on_exec_or_exit, self._on_helper_exit, self._note
        )
        try:
            self._probe_installed()
            self._installed = frozenset(self._probed_files)
            wait(self._scan(late=False, everything=True), FIRST_JOINS_WAIT)
            if set(self._probed_files.values()) <= {_NO_DRIVER}:
                self._note("no CUDA driver and no ROCr found yet; waiting for a process that loads one")
        except OSError as error:
            self.close()
            raise SessionError(in_words(error)) from error
        except BaseException:
            self.close()
            raise
        self._scanner.start()

    def _probe_installed(self) -> None:
        for path in libraries.files(_DRIVER, also=[device.LIBRARIES]):
            self._probe_driver(_Driver(path))

    def _replace_helper(self) -> None:
        """Start another hold helper if the last one did not answer. It does not hold the processes of the user who made it wait.

        Raises OSError."""
        before = self._hold_helper
        if not before.unanswered or self._helpers >= limits.HELPERS:
            return
        self._helpers += 1
        whose = ""
        if before.waits_for and (user := before.waits_for_user) >= 0:
            self._unheld.add(user)
            whose = f"; processes of user {user} are not held, and attached late"
        before.close()
        try:
            helper = HoldHelper(self._on_arrival, self._on_exec_or_exit, self._on_helper_exit, self._note)
        except SessionError:
            return
        helper.leave_unheld(self._unheld)
        for pid in list(before.finished):  # attaching threads still add to it
            if helper.claim(pid, time.monotonic_ns()):
                helper.finish(pid)
        self._hold_helper = helper
        for file in [file for file, since in self._probed_files.items() if since != _NO_DRIVER]:
            del self._probed_files[file]
        self._probe_installed()
        self._note(f"another hold helper was started{whose}")

    def stop_attaching(self) -> None:
        """Begin no more attaches. Never waits. Held processes stay held until `close`, or until their time is over."""
        self._closing.set()

    def close(self) -> None:
        """Release all held processes, and stop watching. A traced process can delay this by seconds."""
        self.stop_attaching()
        if self._scanner.ident is not None:
            # It may be blocked by a file on a FUSE file system that does not answer.
            self._scanner.join(LEAVE)
        self._hold_helper.close()
        self._joins.close()

    def unattached(self) -> dict[int, str]:
        """Return the processes to which the tool has not attached, although it began to or should have: pid → comm."""
        return dict(self._arrived)

    def _on_exec_or_exit(self, pid: int) -> None:
        self._next_scan.pop(pid, None)

    def _on_helper_exit(self, why: str) -> None:
        if not self._closing.is_set():
            self.blind = True
            self._note(f"the hold helper {why}; new processes will be attached late, or missed")

    # --- attaching ---

    def _on_arrival(self, pid: int, comm: str, held: Held | None, late: bool) -> None:
        self._begin_to_join(pid, comm, held, late)

    def _begin_to_join(self, pid: int, comm: str, held: Held | None, late: bool) -> Future[None]:
        self._arrived[pid] = comm
        user = -1
        with contextlib.suppress(OSError):
            user = scans.user_of(pid)
        owner = self._users.setdefault(user, object())
        return self._joins.submit(self._join_process, pid, comm, held, late, owner=owner)

    def _join_process(self, pid: int, comm: str, held: Held | None, late: bool) -> None:
        """Attach to a process. `late`: it may already have launched kernels, so it is counted as reached late."""
        if self._closing.is_set():
            return
        reason: str | None = None
        helper = self._hold_helper
        try:
            if held is not None and _started_by_a_tool(pid):
                self._missed(pid, comm, TRACED)
                self._note(f"pid {pid} ({comm}) is left to the tool that started it")
                return
            reason = self._join(pid, held.tid if held is not None else None)
        except Exception as error:
            self._missed(pid, comm, FORBIDDEN)
            self._note(
                f"pid {pid} ({comm}) cannot be traced: internal error, {type(error).__name__}: {error}"
            )
            raise
        finally:
            if reason != TOO_LATE:
                self._arrived.pop(pid, None)
            unused = reason == NO_ROCR
            if unused:
                self._unused[pid] = traceable.started(pid)
            overtaken = helper.finish(pid, again=unused)
            if helper is not self._hold_helper:  # it was replaced meanwhile
                self._hold_helper.finish(pid, again=unused)
        if reason is None and (late or overtaken or (held is not None and held.late)):
            self._missed(pid, comm, REACHED_LATE)

    # --- running processes ---

    def _scan_loop(self) -> None:
        failed = False  # whether the previous scan failed
        again = 0.0  # time.monotonic: when to place probes again
        while not self._closing.wait(MIN_SCAN_INTERVAL):
            if self._joins.replace_stuck() and not self._stuck:
                self._stuck = True
                self._note("an attach does not end: perhaps the memory of a process cannot be read (FUSE?)")
            replaced = False
            if self._hold_helper.exited:
                with contextlib.suppress(OSError):
                    self._replace_helper()
                    replaced = not self._hold_helper.exited
            if self._unplaced and time.monotonic() >= again:
                with contextlib.suppress(OSError):
                    self._place_again()
                again = time.monotonic() + PLACE_AGAIN
            lost = self._hold_helper.lost or self._lost_before
            if lost[1] and not self._lost_before[1]:
                self._note(
                    "the kernel skipped a probe; new processes may be attached late, and short-lived ones missed"
                )
            try:
                self._scan(late=True, everything=failed or replaced, lost=lost != self._lost_before)
            except OSError as error:
                if not failed:
                    self._note(f"processes may be attached late or missed: {in_words(error)}")
                failed = True
            else:
                failed = False
                self._lost_before = lost

    def _scan(self, late: bool, everything: bool = False, lost: bool = False) -> list[Future[None]]:
        """Scan processes that are due, or all (`everything`, `lost`), for driver files. Return the attaches that this started.

        `late`: count these processes as reached late. `lost`: the probes did not report every process.
        Raises OSError, usually when no more files can be opened."""
        before = set(self._probed_files)
        joins = self._scan_processes(late, everything or lost, lost)
        # Other processes may have mapped these files before the probes were in place.
        if new := self._probed_files.keys() - before:
            joins += self._scan_processes(late, True, new=new)
        return joins

    def _scan_processes(
        self, late: bool, everything: bool, lost: bool = False, new: Set[FileId] | None = None
    ) -> list[Future[None]]:
        """Attach to processes that may have mapped a driver (with `new`: one of these files) before it had a probe.

        The probe handles a process that started later: if it is not held yet, it has not called cuInit."""
        now = time.monotonic()
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
        for pid in self._next_scan.keys() - pids:
            self._next_scan.pop(pid, None)
            self._unused.pop(pid, None)
        for reported in (self._over_limit, self._unanswered):
            for pid in reported.keys() - pids:
                del reported[pid]
        self._driver_files.keep(pids)
        for file in self._driver_files.surplus():
            self._probed_files.pop(file, None)
            self._hold_helper.remove_probe(file)
        joins = []
        for pid in pids:
            schedule = self._next_scan.get(pid) or _Schedule(scans.user_of(pid))
            if schedule.due > now and not everything:
                continue
            self._next_scan[pid] = schedule
            if self._budget.exhausted(schedule.user):
                self._delay(schedule.user)
                continue
            schedule.scanned(now)
            seen = time.monotonic_ns()
            try:
                files = self._admitted(
                    pid, within(LOOK_WAIT, pid, partial(self._drivers, pid, schedule.user))
                )
            except Unanswered as error:
                schedule.due = now + MAX_SCAN_INTERVAL
                self._budget.spend(schedule.user, LOOK_WAIT)
                self._report_unanswered(pid, error)
                continue
            except proc.TooLarge:
                schedule.due = now + MAX_SCAN_INTERVAL
                # Attaching to the process fails for the same reason, and reports it.
                if self._hold_helper.claim(pid, seen):
                    joins.append(self._begin_to_join(pid, traceable.comm(pid), None, late))
                continue
            untried = files.keys() - self._probed_files.keys()
            stopped = kernel_waits.has_stopped_machine(schedule.user)
            for file in untried:
                driver = _Driver(files[file], file, pid)
                if not address_space.is_local(file[0].decode(), pid):
                    self._probed_files[file] = _NO_PROBE
                    self._leave_without_probe(
                        driver, "it may be in a FUSE file system, whose program may never answer"
                    )
                elif stopped:  # not recorded: the file gets a probe if a process of another user maps it
                    self._leave_without_probe(
                        driver, f"processes of user {schedule.user} have stopped the machine"
                    )
                else:
                    self._budget.spend(schedule.user, self._probe_driver(driver))
            # The time of each file's probe.
            probed = [
                since
                for file in files
                if (since := self._probed_files.get(file, _NO_PROBE if stopped else _NO_DRIVER)) == _NO_PROBE
                or (since != _NO_DRIVER and self._hold_helper.exited)
                or file in untried
                or (everything and (new is None or file in new))
            ]
            if any(_NO_DRIVER < self._probed_files.get(file, _NO_DRIVER) < _NO_PROBE for file in files):
                schedule.found(now)
            started = traceable.started(pid) if probed else 0.0
            if probed and not lost and self._unused.get(pid) == started:
                continue
            unheld = lost or self._hold_helper.exited
            if any(since != _NO_DRIVER if unheld else started <= since for since in probed) and (
                self._hold_helper.claim(pid, seen)
            ):
                comm = traceable.comm(pid)
                joins.append(self._begin_to_join(pid, comm, None, late))
        return joins

    def _delay(self, user: int) -> None:
        """Give a notice, once per user, that the scans of this user's processes are delayed."""
        if user not in self._delayed:
            self._delayed.add(user)
            self._note(
                f"processes of user {user} may be attached late or missed: searching them for GPU drivers takes too long"
            )

    def _drivers(self, pid: int, user: int) -> dict[FileId, str]:
        with self._budget.scan(user):
            return _drivers(pid)

    def _report_unanswered(self, pid: int, error: Unanswered) -> None:
        """Count, once, a process whose files in /proc cannot be read in time. Whether the process uses a GPU is unknown."""
        started = traceable.started(pid)
        if self._unanswered.get(pid) != started:
            self._unanswered[pid] = started
            self._missed(pid, traceable.comm(pid), FORBIDDEN)
            self._note(str(traceable.refusal(pid, error.errno or 0)))

    def _admitted(self, pid: int, files: dict[FileId, str]) -> dict[FileId, str]:
        """Return those driver files of a process that may have a probe. Report, once, a process that maps more than allowed."""
        found = [file for file in files if file not in self._installed]
        if not found:
            return files
        admitted = self._driver_files.admitted(pid, scans.user_of(pid), found)
        started = traceable.started(pid)
        if (more := len(found) - len(admitted)) and self._over_limit.get(pid) != started:
            self._over_limit[pid] = started
            comm = traceable.comm(pid)
            self._missed(pid, comm, FORBIDDEN)
            self._note(
                f"pid {pid} ({comm}) maps {len(files)} files as GPU drivers; {more} of them exceed the limits of a process or user,"
                " and launches through them are not counted"
            )
        return {file: path for file, path in files.items() if file in admitted or file in self._installed}

    def _leave_without_probe(self, driver: _Driver, why: str) -> None:
        """Record that processes that map a file are not held. Give a notice: one per reason for the files of a user."""
        self.blind = True
        key = (scans.user_of(driver.pid), why) if driver.pid else (-1, f"{driver.path}: {why}")
        if key not in self._unprobed:
            self._unprobed.add(key)
            self._note(
                f"{driver.name} has no probe: {why}; processes that map it may be attached late or missed"
            )

    def _probe_driver(self, driver: _Driver) -> float:
        """Put a probe on the first-use function of a driver file.

        Return the CPU time that this took, in seconds. Raises OSError if no more files can be opened."""
        failed: list[OSError] = []
        used: list[float] = []

        def place() -> None:
            self._place_probe(driver, failed)
            used.append(time.thread_time())

        placing = fresh_thread.start(place, "gpubpf-file")
        placing.join(FILE_WAIT)
        if placing.is_alive():  # the traced process itself may serve that file system (FUSE)
            if driver.file is not None:
                self._probed_files.setdefault(driver.file, _NO_PROBE)
            self._leave_without_probe(driver, "reading it and placing the probe takes too long")
        if failed:
            raise failed[0]
        return used[0] if used else FILE_WAIT

    def _place_probe(self, driver: _Driver, failed: list[OSError]) -> None:
        """Put a probe on the first-use function of a driver file, and record it. If the file has disappeared, a later scan retries.

        A scan also retries if no more files could be opened, here or in the hold helper. That error is added to `failed`."""
        files: list[FileId] = [] if driver.file is None else [driver.file]
        placed, why = _NO_PROBE, ""
        try:
            with open(target_files.open_regular(driver.path), "rb") as opened:
                loaded = elf.LoadedFile(opened.fileno())
                exports = elf.exports(loaded, most=limits.EXPORTS)
                found = next((exports[name] for name in FIRST_USE if name in exports), None)
                if found is None:
                    placed = _NO_DRIVER
                else:
                    state = os.fstat(opened.fileno())
                    files.append(
                        (b"%02x:%02x" % (os.major(state.st_dev), os.minor(state.st_dev)), state.st_ino)
                    )
                    if holder := kernel_waits.obstacle():
                        self._report_unplaced(driver, holder)
                        raise Unanswered
                    # `path` may already be invalid, because the dynamic linker changes mappings.
                    open_file = f"/proc/{os.getpid()}/fd/{opened.fileno()}"
                    with kernel_waits.guarded(self._note):
                        self._hold_helper.add_probe(
                            open_file, loaded.offset(found.address), driver.file, self._note
                        )
                    placed = time.clock_gettime(time.CLOCK_BOOTTIME)
        except FileNotFoundError:  # the process has ended, or the dynamic linker has just changed the mapping
            return
        except OSError as error:
            if out_of_files(error):
                failed.append(error)
                return
            if not isinstance(error, Unanswered) and not self._hold_helper.exited:  # those give a notice
                why = in_words(error)
        self._probed_files.update(dict.fromkeys(files, placed))
        if why:
            self._leave_without_probe(driver, why)

    def _report_unplaced(self, driver: _Driver, holder: int) -> None:
        self._unplaced[driver.path] = driver
        self._note(
            f"pid {holder} ({traceable.comm(holder)}) keeps its address space locked, so a probe could stop the whole machine:"
            f" {driver.name} has none, and new processes will be attached late until pid {holder} ends"
        )
        with self._starting_to_follow:
            if self._follows_mappings:
                return
            self._follows_mappings = True
        try:
            mappings = libraries.Mappings()
            try:
                fresh_thread.start(lambda: self._follow_mappings(mappings), "gpubpf-mappings")
            except OSError:
                mappings.close()
                raise
        except OSError as error:
            self.blind = True
            self._note(f"new processes may be missed meanwhile: {in_words(error)}")

    def _place_again(self) -> None:
        """Place the probes that could not be placed, if no process holds the lock of its address space any longer. Raises OSError."""
        if kernel_waits.obstacle():
            return
        unplaced, self._unplaced = self._unplaced, {}
        for driver in unplaced.values():
            if driver.file is not None:
                self._probed_files.pop(driver.file, None)
            self._probe_driver(driver)
        if not self._unplaced:
            self._follows_mappings = False
            self._note("drivers have probes again: new processes are held when they start to use the GPU")

    def _follow_mappings(self, mappings: libraries.Mappings) -> None:
        """Attach to each process that maps a driver. No probe holds these processes, so they count as reached late."""
        poll = select.poll()
        for file in mappings.descriptors:
            poll.register(file, select.POLLIN)
        while self._follows_mappings and not self._closing.is_set():
            poll.poll(1000 * MIN_SCAN_INTERVAL)
            seen = time.monotonic_ns()
            for pid in {found.pid for found in mappings.read([_DRIVER])}:
                if self._hold_helper.claim(pid, seen):
                    self._begin_to_join(pid, traceable.comm(pid), None, True)
            self.blind |= mappings.lost
        mappings.close()


def _started_by_a_tool(pid: int) -> bool:
    """Return whether the process was started under a tool, whose agent the driver loads during initialization."""
    with contextlib.suppress(OSError):
        variables = started_with.environment(pid, ("CUDA_INJECTION64_PATH", "HSA_TOOLS_LIB"))
        return "CUDA_INJECTION64_PATH" in variables or (
            agent.HSA_LIBRARY.name in variables.get("HSA_TOOLS_LIB", "")
        )
    return False


def _drivers(pid: int) -> dict[FileId, str]:
    """Return the driver files that a process maps: id → a path that works in this process's mount namespace.

    Empty if the process has ended or may not be read. Raises OSError if no more files can be opened; proc.TooLarge."""
    found: dict[FileId, str] = {}
    try:
        for line in proc.lines(pid, "maps"):
            if _DRIVER_FILE.search(line) and (m := _MAPPED.match(line)):
                place = target_files.mapped_path(pid, int(m[1], 16), int(m[2], 16))
                found.setdefault((m[3], int(m[4])), place)
    except proc.TooLarge:
        raise
    except OSError as error:
        if out_of_files(error):
            raise
    return found


def _name(file: FileId | None) -> str:
    return "" if file is None else f"{file[0].decode()} {file[1]}"


class HoldHelper:
    """The connection to the hold helper, a process that holds new processes inside their first cuInit (holding.py).

    on_arrival(pid, comm, held, late): a process is in its first cuInit. held: None if it could not be held. late: it, or one of its
    threads, may already have continued.
    on_exec_or_exit(pid): a process executed another program, or ended.
    on_helper_exit(why): the helper exited, or was killed because it did not answer, so new processes are no longer held.
    note: gets notices for the user, also after `close`, as long as the helper removes its probes.

    This class's thread receives messages, calls these functions and releases threads whose hold has timed out. Any thread may call the
    methods. `_request_lock` lets one request at a time wait for its answer.
    Raises SessionError if the helper does not start.
    """

    def __init__(
        self,
        on_arrival: Callable[[int, str, Held | None, bool], None],
        on_exec_or_exit: Callable[[int], None],
        on_helper_exit: Callable[[str], None],
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._on_arrival, self._on_exec_or_exit, self._on_helper_exit = (
            on_arrival,
            on_exec_or_exit,
            on_helper_exit,
        )
        self._note = note
        self._closing = False
        self._handles = threading.Lock()  # held while the thread handles messages
        self._request_lock = threading.Lock()
        self.exited = False  # new processes are no longer held
        self.unanswered = False  # the tool killed the helper, because it did not answer
        self.waits_for = 0  # the process that the helper was waiting for when the tool killed it; 0: none
        self.waits_for_user = -1
        self.finished: set[int] = set()  # processes that will not be held again
        self._claimed: dict[int, float] = {}  # processes to attach to: pid → start time
        self._last_id = 0
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._held: dict[int, Held] = {}
        self._lock = threading.Lock()  # guards _held, and the end of the helper
        self._connection, helper_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        library = str(Path(__file__).parents[2])
        start = f"import sys; sys.path.insert(0, {library!r}); from gpubpf.attach import holding; "
        start += "holding.main(*map(int, sys.argv[1:]))"
        marks = os.memfd_create("gpubpf-touched", os.MFD_CLOEXEC)
        os.truncate(marks, mmap.PAGESIZE)
        self._touched = mmap.mmap(marks, mmap.PAGESIZE)
        with helper_end, open(marks, "rb"):
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", start),
                    *map(str, (helper_end.fileno(), os.getpid(), marks)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(helper_end.fileno(), marks),
                start_new_session=True,
            )
        self._thread = threading.Thread(target=self._run, name="gpubpf-holder", daemon=True)
        self._connection.settimeout(START_WAIT)
        first: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            first = json.loads(self._connection.recv(holding.PACKET) or "{}")
        if "ready" not in first:
            self.close()
            raise SessionError(
                first.get("failed") or "the hold helper did not start; name running processes with -p"
            )
        self._connection.settimeout(None)
        self._thread.start()

    def close(self) -> None:
        """Release all held threads, and let the helper exit."""
        for held in self._all_held():
            self._expire(held)
        until = time.monotonic() + LEAVE
        while any(held.is_held for held in self._all_held()) and time.monotonic() < until:
            time.sleep(0.005)
        # This reads and writes memory of the processes, which may never arrive.
        with contextlib.suppress(OSError):
            fresh_thread.start(self._close_held, "gpubpf-holder").join(LEAVE)
        self._closing = True
        with contextlib.suppress(OSError):  # the helper then ends; it may still send notices
            self._connection.shutdown(socket.SHUT_WR)
        if self._handles.acquire(timeout=LEAVE):  # from now on, the thread only passes on notices
            self._handles.release()
        if not self._thread.is_alive():  # otherwise the thread closes it
            self._connection.close()
        # The kernel removes the helper's probes one by one, which takes a while. Do not wait for that.
        with contextlib.suppress(OSError):
            fresh_thread.start(self._end_helper, "gpubpf-holder")

    def _close_held(self) -> None:
        for held in self._all_held():
            held.close()

    def _end_helper(self) -> None:
        """Wait until the helper has ended, and kill it if that takes too long."""
        if self.waits_for:  # it was killed, but may wait for memory; until it ends, it keeps its probes
            pid = self.waits_for
            with user_waits.waiting(
                self.waits_for_user, pid, lambda: [one.file[0] for one in address_space.mappings(pid)]
            ):
                self._process.wait()
            return
        if self.unanswered:  # it was killed, perhaps while the kernel placed a probe for it
            with kernel_waits.guarded():
                self._process.wait()
            return
        try:
            self._process.wait(HELPER_EXIT_WAIT)
        except subprocess.TimeoutExpired:
            if (
                not lock_holder()
            ):  # otherwise the helper keeps its probes for as long as a process makes their removal wait
                self._process.kill()
                self._process.wait()

    def add_probe(self, path: str, offset: int, file: FileId | None, note: Callable[[str], None]) -> None:
        """Put a probe on a first-use function, at this offset in the file. Raises OSError.

        file: its name for `remove_probe`.
        note: called with the helper's notices for the user.
        """
        answer = self._request(place=[path, offset, _name(file)])
        failed, notes = answer or (errno.EIO, ())  # None: the helper has exited
        for text in notes:
            note(text)
        if failed:
            raise OSError(failed, os.strerror(failed))

    def remove_probe(self, file: FileId) -> None:
        """Remove the probe on a file, if there is one."""
        self._request(remove=_name(file))

    def leave_unheld(self, users: Set[int]) -> None:
        """Hold no processes of these users."""
        self._request(unheld=list(users))

    def claim(self, pid: int, seen: int) -> bool:
        """Return whether to attach to a running process.

        seen: time.monotonic_ns at which the process was found. Return False if an attach was already in progress or done then."""
        started = traceable.started(pid)
        if (answer := self._request(ask=[pid, seen])) is None:  # the helper has exited
            answer = self._claimed.get(pid) != started
        if answer:
            self._claimed[pid] = started
        return bool(answer)

    def finish(self, pid: int, again: bool = False) -> bool:
        """Release a process after an attach succeeded or failed. It will not be held again, unless `again` is set.

        Return whether the process reached cuInit unheld, while the tool attached to it as a running process."""
        with self._lock:
            held = self._held.pop(pid, None)
        overtaken = bool(self._request(done=pid, again=again))
        if not again:
            self.finished.add(pid)
        if held is not None:
            held.mark_released()
            held.close()
        return overtaken

    @property
    def lost(self) -> tuple[int, int] | None:
        """Two numbers: new processes that the helper's probes saw but could not report, and probe hits that the kernel skipped.

        None if the helper has exited."""
        if (answer := self._request(lost=True)) is None:
            return None
        reported, skipped = answer
        return int(reported), int(skipped)

    def _request(self, **message: Any) -> Any:
        """Send a request, and return the helper's answer; None if it has exited. A helper that does not answer is killed."""
        with self._request_lock, contextlib.suppress(OSError):
            if self.exited:
                return None
            self._last_id += 1
            self._connection.send(json.dumps({**message, "id": self._last_id}).encode(), socket.MSG_DONTWAIT)
            until = time.monotonic() + ANSWER_WAIT
            progress = self._progress()
            while True:
                try:
                    if not (answer := self._answers.get(timeout=min(PROGRESS_WAIT, ANSWER_WAIT))):
                        return None
                    if answer["id"] == self._last_id:
                        return answer["answer"]
                    continue
                except queue.Empty:
                    before, progress = progress, self._progress()
                    if time.monotonic() < until and (progress != before or not progress[0]):
                        continue
                self.unanswered = True
                self.waits_for = progress[0]
                self.waits_for_user = scans.user_of(self.waits_for) if self.waits_for else -1
                self._process.kill()  # the kernel lets the threads that it has stopped continue
                self._lose("does not answer")  # `_run` itself may wait for memory that never arrives
                # The killed helper may still wait in the kernel.
                self._connection.shutdown(socket.SHUT_RDWR)
                break
        return None

    def _progress(self) -> tuple[int, list[bytes]]:
        """Return the process that the helper works on, or 0, and the helper's CPU time."""
        pid = int.from_bytes(self._touched[:4], sys.byteorder)
        with contextlib.suppress(OSError):
            return pid, proc.stat(self._process.pid)[11:13]
        return pid, []

    def _all_held(self) -> list[Held]:
        with self._lock:
            return list(self._held.values())

    def _run(self) -> None:
        next_check = 0.0
        while True:
            ready, _, _ = select.select([self._connection], [], [], TICK)
            try:
                data = self._connection.recv(holding.PACKET) if ready else None
            except OSError:
                data = b""
            if data == b"":
                break
            # Do not check at each message: when many processes start, many threads are held.
            if time.monotonic() >= next_check and not self._closing:
                self._expire_late()
                next_check = time.monotonic() + TICK
            with self._handles:
                if data and "note" in (message := json.loads(data)):
                    self._note(message["note"])
                elif data and not self._closing:
                    self._handle(message)
        self._lose("exited")
        if self._closing:
            self._connection.close()

    def _lose(self, why: str) -> None:
        """Record, once, that the helper is lost."""
        with self._lock:
            before, self.exited = self.exited, True
        if not before:
            self._answers.put({})  # wake a thread that waits in `_request`
            self._on_helper_exit(why)

    def _expire_late(self) -> None:
        """Release threads that were held too long, or that hold a lock that their worker waits for."""
        now = time.monotonic()
        for held in self._all_held():
            late = now > held.since + HOLD or (now > held.since + STUCK_WAIT and held.is_deadlocked())
            if held.is_held and late:
                self._expire(held)

    def _handle(self, message: dict[str, Any]) -> None:
        if "held" in message:
            pid = message["held"]
            held: Held | None = None
            with contextlib.suppress(SessionError):  # the process has ended; the attach will detect that
                held = Held(
                    pid,
                    message["tid"],
                    message["base"],
                    message["functions"],
                    message["since"],
                    message["entry"],
                )
                with self._lock:
                    self._held[pid] = held
                # An earlier process with this pid delayed the message.
                if time.monotonic() > held.since + HOLD:
                    self._expire(held)
            self._on_arrival(pid, message["comm"], held, message["late"])
        elif "late" in message:
            self._on_arrival(message["late"], message["comm"], None, True)
        elif "forget" in message:
            self.finished.discard(message["forget"])
            self._on_exec_or_exit(message["forget"])
        else:
            self._answers.put(message)

    def _expire(self, held: Held) -> None:
        """Release a held thread. If the agent is installing its hooks, tell it to stop, and wait for up to LEAVE seconds."""
        if held.expire() or time.monotonic() > held.since + HOLD + LEAVE:
            with contextlib.suppress(OSError):
                self._connection.send(json.dumps({"release": held.pid}).encode())
            held.mark_released()
