"""How a process that runs already comes into the measurement, and why one does not."""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from gpubpf import agent, elf
from gpubpf.agent.definitions import AttachStatus
from gpubpf.errors import SessionError
from gpubpf.process import target
from gpubpf.session.device import Device

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpubpf.session.measurement import Measurement
    from gpubpf.session.server import Server

ATTACH_WAIT = 30.0  # seconds for the agent to get into a process
PATIENCE = 5.0  # seconds for the agent to leave the tool that measured last
PASSING = 1.0  # for another tool that is on its way in or out
PAUSE = 0.1
ENDING = 0.1  # seconds that the end of a process takes
_DRIVER = re.compile(r".*/libcuda\.so[^/]*$")
OWNER = 128  # bytes of who is said to measure a process
DESCENDANTS = 4096  # that are looked at
# What processes are missed for.
ENDED, NO_DRIVER, TRACED, BUSY = "ended", "no CUDA driver", "traced by another", "not free in time"
UNHOOKED, FORBIDDEN, TOO_LATE = "cannot be hooked", "cannot be traced", "measurement over"
OTHER_DEVICE, UNREACHED = "another device", "not reached in time"


class Missed(SessionError):
    """A process is not measured: `reason` in a word or two, the text for who asked for this very one."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Joining:
    """Has the agent in processes, any number of them at the same time."""

    def __init__(self, measured: Measurement, server: Server) -> None:
        self._measured = measured
        self._server = server
        self._lock = threading.Lock()
        self._under_way: dict[int, Future[Missed | None]] = {}

    @property
    def under_way(self) -> bool:
        with self._lock:
            return bool(self._under_way)

    def join(self, pid: int, starting: int | None = None) -> Missed | None:
        """None when probes are live in the process, else why they are not. From any thread; two at once are told the same."""
        with self._lock:
            going = self._under_way.get(pid)
            first = going is None
            if going is None:
                going = self._under_way[pid] = Future()
        if not first:
            return going.result()
        try:
            missed: Missed | None = None
            if not self._is_in(pid):
                self._join(pid, starting)
        except Missed as error:
            missed = error
        except BaseException as error:
            going.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._under_way[pid]
        going.set_result(missed)
        return missed

    def _is_in(self, pid: int) -> bool:
        """It is measured already, and has not become another program, whose news is on its way."""
        known = any(p.pid == pid and not p.gone for p in self._measured.active())
        return known and not target.executed_another_program(pid)

    def _join(self, pid: int, starting: int | None) -> None:
        try:
            ended = os.pidfd_open(pid)
        except OSError:  # none, or a thread
            try:
                target.check_traceable(pid)
            except SessionError as error:
                raise Missed(FORBIDDEN if target.status(pid) else ENDED, str(error)) from None
            raise Missed(ENDED, f"pid {pid} ended; nothing is left to be measured") from None
        try:
            began = time.monotonic()
            while True:
                try:
                    self._check_device(pid)
                    code = self._attach(pid, ended, starting)
                except target.AlreadyTraced:
                    if time.monotonic() > began + PASSING:
                        raise
                else:
                    if code == AttachStatus.FAILED and starting is not None:
                        starting = None  # let go before the hooks were in: they go in as it runs
                    elif code != AttachStatus.ENDING or time.monotonic() > began + PATIENCE:
                        break
                time.sleep(PAUSE)
            if code:
                raise _refused(pid, code)
        except SessionError as error:
            if isinstance(error, target.ProcessEnded) or has_ended(ended):  # or it has become another program
                raise Missed(ENDED, f"pid {pid} ended during attach; name a running process") from None
            raise error if isinstance(error, Missed) else Missed(_reason(pid), str(error)) from None
        finally:
            os.close(ended)

    def _check_device(self, pid: int) -> None:
        found, chosen = device_of(pid), self._measured.device
        if (found.kind, found.virtual) != (chosen.kind, chosen.virtual):
            raise Missed(
                OTHER_DEVICE,
                f"pid {pid} ({comm(pid)}) uses {found.name}, not {chosen.name}; measure it by itself",
            )

    def _attach(self, pid: int, ended: int, starting: int | None) -> int:
        """What the agent says to it. Raises SessionError."""
        from gpubpf.attach import loading

        injection = loading.inject(pid, agent.LIBRARY, "gpubpf_attach", connect=True, starting=starting)
        assert injection.socket is not None
        process = self._server.adopt(injection.socket, pid, os.dup(ended))
        if process is None:
            raise Missed(TOO_LATE, f"pid {pid} comes when the measurement is over; measure again")
        code = -1
        try:
            code = injection.wait(ATTACH_WAIT)
        finally:
            process.stood_ns += injection.stood_ns
            if code:
                self._server.dismiss(process)
        if code == AttachStatus.FAILED and process.trouble:
            raise Missed(UNHOOKED, f"{process.who} {process.trouble}")
        return code


def _refused(pid: int, code: int) -> Missed:
    who = f"pid {pid} ({comm(pid)})"
    if code == AttachStatus.NO_DRIVER:
        return _no_driver(pid)
    if code == AttachStatus.IN_USE:
        return Missed(TRACED, f"{who} is measured by {_owner(pid)} already; end that first")
    if code == AttachStatus.ENDING:
        return Missed(BUSY, f"{who} is not done with the tool that measured it last; try again in a while")
    return Missed(UNHOOKED, f"{who} could not be hooked; start it with the tool instead")


def _no_driver(pid: int) -> Missed:
    return Missed(
        NO_DRIVER,
        f"pid {pid} ({comm(pid)}) has not loaded the CUDA driver; wait until it uses the GPU, or start it with the tool",
    )


def device_of(pid: int) -> Device:
    """The device that a process which runs uses, by the driver that it has loaded. Raises SessionError."""
    target.check_traceable(pid)
    try:
        drivers = target.libraries(target.mappings(pid, _DRIVER))
        exports = [target.exports(pid, library) for library in drivers]
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError as error:
        raise target.refusal(pid, error.errno or 0) from None
    if not drivers:
        raise _no_driver(pid)
    if not any("cudasim_untimed" in found for found in exports):
        return Device("gpu")
    return Device("sim", {"CUDASIM_CLOCK": "virtual" if b"CUDASIM_CLOCK=virtual" in variables else "real"})


def _owner(pid: int) -> str:
    """The tool that measures the process, as its agent has been told. Untrusted, but what it says is for people only."""
    with contextlib.suppress(OSError), target.Memory(pid) as memory:
        for library in target.libraries(target.mappings(pid, target.AGENT)):
            if symbol := elf.exports(memory, library.base).get("gpubpf_owner"):
                text = memory.some(symbol.address, OWNER).partition(b"\0")[0].decode(errors="replace")
                return "".join(c if c.isprintable() else "?" for c in text) or "another tool"
    return "another tool"


def unfollowed(pids: Iterable[int]) -> dict[int, str]:
    """Processes, by number with their names, that these have started and that have a CUDA driver of their own: not the copy that a
    fork left them, which no driver works in."""
    known, bases = set(pids), {base for pid in pids for base in _drivers(pid)}
    found: dict[int, str] = {}
    queue = deque(known)
    while queue and len(known) < DESCENDANTS:
        for child in _children(queue.popleft()) - known:
            known.add(child)
            queue.append(child)
            if own := _drivers(child) - bases:
                bases |= own
                found[child] = comm(child)
    return found


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= set(map(int, file.read_text().split()))
    return found


def _drivers(pid: int) -> set[int]:
    with contextlib.suppress(OSError):
        return {library.base for library in target.libraries(target.mappings(pid, _DRIVER))}
    return set()


def _reason(pid: int) -> str:
    """Of what could not be attached to."""
    return TRACED if int(target.status(pid).get("TracerPid", 0)) else FORBIDDEN


def has_ended(pidfd: int) -> bool:
    """Also of one that is about to: its memory goes some time before the news of its end."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(ENDING * 1000))


def comm(pid: int) -> str:
    """Its name; "" where it has none any more."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    return ""


def nobody(errors: Sequence[SessionError]) -> SessionError:
    """None of the processes that were asked for can be measured."""
    if len(errors) == 1:
        return errors[0]
    return SessionError(f"none of the {len(errors)} processes can be measured: {errors[0]}")
