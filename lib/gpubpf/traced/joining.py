"""Attach to running processes, and give the reason if that fails.

`Session.join` and `Session` call `Joining`. tracing.py and the package `calls` use the functions that describe processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpubpf import agent, elf
from gpubpf.agent.definitions import (
    ATTACH_FUNCTION,
    OWNER_SIZE,
    OWNER_VARIABLE,
    SOCKET_VARIABLE,
    AttachStatus,
    Vendor,
)
from gpubpf.errors import SessionError, out_of_files
from gpubpf.future import Future
from gpubpf.process import address_space, limits, proc, started_with, traceable
from gpubpf.process.patience import LOOK_WAIT, within
from gpubpf.records.reasons import (
    BUSY,
    ENDED,
    FORBIDDEN,
    NO_DRIVER,
    NO_ROCR,
    OTHER_DEVICE,
    OUT_OF_FILES,
    STOPPED,
    TOO_LATE,
    TRACED,
    UNHOOKED,
)
from gpubpf.traced.device import Device

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpubpf.traced.measurement import Measurement
    from gpubpf.traced.server import Server

# All in seconds.
ATTACH_WAIT = 30.0  # for the agent to install its hooks
PREVIOUS_TOOL_WAIT = 5.0  # for the agent to detach from the previous tool
FREE_WAIT = 1.0  # for another tracer that is attaching or detaching, and for a stopped process
RETRY_INTERVAL = 0.1
COPIES_WAIT = 2.0  # for the copies of kernels that a held process has loaded
EXIT_WAIT = 0.1  # between the first failure in an exiting process, whose memory disappears, and its pidfd becoming readable

_LIBRARIES = {
    Vendor.NVIDIA: re.compile(r".*/libcuda\.so[^/]*$"),
    Vendor.AMD: re.compile(r".*/libhsa-runtime64\.so[^/]*$"),
}
_CLOCKS = {Vendor.NVIDIA: "CUDASIM_CLOCK", Vendor.AMD: "HIPSIM_CLOCK"}  # environment variables
_AGENTS = {Vendor.NVIDIA: agent.LIBRARY, Vendor.AMD: agent.HSA_LIBRARY}
_THUNK = re.compile(r".*/libhsakmt\.so[^/]*$")  # hipsim's, or the one that ROCr uses for an AMD GPU
_ANY = re.compile("|".join(name.pattern for name in (*_LIBRARIES.values(), _THUNK)))
# Beside `AttachStatus`: a held thread was released before the hooks were in, so the agent has given up.
_RELEASED = -1


class Missed(SessionError):
    """A process cannot be traced. `reason`: one of `reasons.MISSED`. The text describes this process for the user."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Joining:
    """Attaches to running processes. Any thread may call `join`; `_lock` guards `_under_way` and `_given_up`."""

    def __init__(self, measurement: Measurement, server: Server) -> None:
        self._measurement = measurement
        self._server = server
        self._lock = threading.Lock()
        self._under_way: dict[int, Future[Missed | None]] = {}
        self._given_up: set[int] = set()

    @property
    def under_way(self) -> bool:
        """Whether an attach is in progress and was not given up."""
        with self._lock:
            return bool(self._under_way.keys() - self._given_up)

    def give_up(self, pid: int) -> Missed:
        """Give up an attach that does not end, because the process keeps the thread waiting for its memory. Return the reason.

        May be called from any thread."""
        with self._lock:
            self._given_up.add(pid)
        return Missed(
            FORBIDDEN,
            f"pid {pid} ({traceable.comm(pid)}) cannot be traced: the attach does not end; perhaps its memory cannot be read (FUSE?)",
        )

    def join(self, pid: int, starting: int | None = None) -> Missed | None:
        """Attach to a process. Return None once probes are live in it, or else the reason for the failure.

        From any thread. A second call for the same process waits for the first, and returns its result.
        `starting`: the thread that is held inside its first cuInit, if there is one."""
        with self._lock:
            attempt = self._under_way.get(pid)
            first = attempt is None
            if attempt is None:
                attempt = self._under_way[pid] = Future()
        if not first:
            return attempt.result()
        try:
            missed: Missed | None = None
            try:
                if not self._is_attached(pid):
                    self._join(pid, starting)
            except OSError as error:
                if not out_of_files(error):
                    raise
                raise _out_of_files(pid) from None
        except Missed as error:
            missed = error
        except BaseException as error:
            attempt.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._under_way[pid]
        attempt.set_result(missed)
        return missed

    def _is_attached(self, pid: int) -> bool:
        """Return whether the process is already traced: no longer, if it has just executed another program."""
        known = any(p.pid == pid and not p.disconnected for p in self._measurement.active())
        return known and not address_space.executed_another_program(pid)

    def _join(self, pid: int, starting: int | None) -> None:
        try:
            ended = os.pidfd_open(pid)
        except OSError as error:
            if out_of_files(error):
                raise
            # There is no such process, or `pid` is the id of a thread.
            try:
                traceable.check_traceable(pid)
            except SessionError as error:
                raise Missed(FORBIDDEN if traceable.status(pid) else ENDED, str(error)) from None
            raise Missed(ENDED, f"pid {pid} has ended; there is nothing left to trace") from None
        try:
            began = time.monotonic()
            while True:
                try:
                    vendors = self._check_device(pid, starting)
                    code = self._attach_all(pid, ended, starting, vendors)
                except traceable.RefusedForNow:
                    if time.monotonic() > began + FREE_WAIT:
                        raise
                else:
                    if code == _RELEASED:
                        starting = None  # attach while it runs
                    elif code != AttachStatus.ENDING or time.monotonic() > began + PREVIOUS_TOOL_WAIT:
                        break
                time.sleep(RETRY_INTERVAL)
            if code:
                raise _refused(pid, code, vendors)
        except traceable.OutOfFiles:
            raise _out_of_files(pid) from None
        except SessionError as error:
            # `ProcessEnded` is also raised if the process executed another program.
            if over := proc.has_ended(ended, EXIT_WAIT):
                what = "ended while the tool was attaching; there is nothing left to trace"
            else:
                what = "executed another program while the tool was attaching; run the tool again"
            if over or isinstance(error, traceable.ProcessEnded):
                raise Missed(ENDED, f"pid {pid} {what}") from None
            if isinstance(error, Missed):
                raise
            raise Missed(_reason(pid, error), str(error)) from None
        finally:
            os.close(ended)

    def _check_device(self, pid: int, starting: int | None) -> Sequence[Vendor]:
        """Return the vendors whose GPUs the process uses, or starts to use. Raises Missed if they are not the session's device."""
        found, chosen = devices_of(pid), self._measurement.device
        if starting is not None and len(found) > 1:
            begins = _vendor_at(pid, starting)
            found = {vendor: device for vendor, device in found.items() if vendor == begins}
        for vendor, device in found.items():
            if device.virtual != chosen.virtual or (vendor == Vendor.NVIDIA and device.kind != chosen.kind):
                raise Missed(
                    OTHER_DEVICE,
                    f"pid {pid} ({traceable.comm(pid)}) uses {device.name}, not {chosen.name}; trace it separately",
                )
        return tuple(found)

    def _attach_all(self, pid: int, ended: int, starting: int | None, vendors: Sequence[Vendor]) -> int:
        """Inject the agent for each vendor's GPUs. Return ATTACHED if one attaches, or else another result of `_attach`.

        Raises SessionError if none attaches and one of them failed with an error."""
        codes: list[int] = []
        errors: list[SessionError] = []
        for vendor in vendors:
            try:
                codes.append(self._attach(pid, ended, starting, _AGENTS[vendor]))
            except traceable.RefusedForNow:
                if AttachStatus.ATTACHED not in codes:
                    raise
            except SessionError as error:
                errors.append(error)
            starting = None
        if AttachStatus.ATTACHED not in codes:
            if errors:
                raise errors[0]
            return next((code for code in codes if code != AttachStatus.NO_DRIVER), codes[-1])
        for failed in errors:
            self._measurement.note(str(failed))
        return AttachStatus.ATTACHED

    def _attach(self, pid: int, ended: int, starting: int | None, library: Path) -> int:
        """Inject an agent. Return its `AttachStatus`, or _RELEASED. Raises SessionError."""
        from gpubpf.attach import loading

        injection = loading.inject(pid, library, ATTACH_FUNCTION, connect=True, starting=starting)
        assert injection.socket is not None
        process = self._server.adopt(injection.socket, pid, os.dup(ended))
        if process is None:
            raise Missed(TOO_LATE, f"pid {pid} appeared after the measurement had ended; run the tool again")
        process.from_before = starting is None
        code = -1
        try:
            code = injection.wait(ATTACH_WAIT)
            if not code and not self._server.wait_for_hooks(process, ATTACH_WAIT):
                code = AttachStatus.FAILED
        finally:
            process.stood_ns += injection.stood_ns
            if code == AttachStatus.FAILED:
                self._server.wait_for_reason(process)
            if code:
                self._server.remove(process)
        if starting is not None and not code:
            self._server.wait_for_copies(process, COPIES_WAIT)
        if code == AttachStatus.FAILED and process.out_of_files:
            raise _out_of_files(pid)
        if code == AttachStatus.FAILED and process.hook_failure:
            raise Missed(UNHOOKED, f"{process.label} {process.hook_failure}")
        return _RELEASED if code == AttachStatus.FAILED and injection.released_early else code


def _out_of_files(pid: int) -> Missed:
    return Missed(OUT_OF_FILES, str(traceable.OutOfFiles(pid)))


def _refused(pid: int, code: int, vendors: Sequence[Vendor]) -> Missed:
    label = f"pid {pid} ({traceable.comm(pid)})"
    if code == AttachStatus.NO_DRIVER and Vendor.NVIDIA not in vendors:
        return Missed(
            NO_ROCR,
            f"{label} has not initialized ROCr; wait until it uses the GPU, or start it with the tool",
        )
    if code == AttachStatus.NO_DRIVER:
        return _no_driver(pid)
    if code == AttachStatus.IN_USE:
        return Missed(
            TRACED, f"{label} is already traced by {owner(pid) or 'another tool'}; stop that tool first"
        )
    if code == AttachStatus.ENDING:
        return Missed(BUSY, f"{label} is still detaching from the previous tool; try again in a few seconds")
    return Missed(UNHOOKED, f"{label} cannot be hooked; start it with the tool instead")


def _no_driver(pid: int) -> Missed:
    return Missed(
        NO_DRIVER,
        f"pid {pid} ({traceable.comm(pid)}) has not loaded the CUDA driver or ROCr; wait until it uses the GPU, or start it with the"
        " tool",
    )


def devices_of(pid: int) -> dict[Vendor, Device]:
    """Return the devices that a running process uses, by vendor, from the libraries that it has loaded. Raises SessionError."""
    traceable.check_traceable(pid)
    try:
        found = within(LOOK_WAIT, pid, lambda: _devices_of(pid))
    except OSError as error:
        raise traceable.refusal(pid, error.errno or 0) from None
    if not found:
        raise _no_driver(pid)
    return found


def _devices_of(pid: int) -> dict[Vendor, Device]:
    found: dict[Vendor, Device] = {}
    clocks = started_with.environment(pid, _CLOCKS.values())
    mapped = address_space.mappings(pid, _ANY)
    for vendor, library, symbol in (
        (Vendor.NVIDIA, _LIBRARIES[Vendor.NVIDIA], "cudasim_untimed"),
        (Vendor.AMD, _THUNK, "hipsim_virtual_now"),
    ):
        if not _named(mapped, _LIBRARIES[vendor]):
            continue
        named = _named(mapped, library)
        if len({lib.mappings[0].file for lib in named}) > limits.DRIVERS_OF_PROCESS:
            raise SessionError(
                f"pid {pid} cannot be traced: it has mapped more than {limits.DRIVERS_OF_PROCESS} drivers; use one"
            )
        embedded = any(symbol in address_space.exports(pid, lib) for lib in named)
        virtual = clocks.get(_CLOCKS[vendor]) == "virtual"
        environment = {"CUDASIM_CLOCK": "virtual" if virtual else "real"}
        found[vendor] = Device("sim", environment) if embedded else Device("gpu")
    return found


def has_driver(mapped: Iterable[address_space.Mapping]) -> bool:
    """Return whether a GPU driver's library is among a process's mappings."""
    mapped = tuple(mapped)
    return any(_named(mapped, name) for name in _LIBRARIES.values())


def is_stray(pid: int) -> bool:
    """Return whether a process has loaded a driver but cannot load the agent, or its agent cannot connect to the tool.

    It was started with another environment (`env -i`, sudo), in another network namespace (the socket is an abstract one) or in
    another root directory. Raises OSError."""
    return within(LOOK_WAIT, pid, lambda: _is_stray(pid))


def _is_stray(pid: int) -> bool:
    cut_off = not started_with.environment(pid, (SOCKET_VARIABLE,)) or traceable.other_namespace(pid, "net")
    if not cut_off and traceable.has_other_files(pid):
        from gpubpf.attach import loading

        cut_off = not loading.is_visible(pid, agent.LIBRARY)
    return cut_off and has_driver(address_space.mappings(pid, _ANY))


def device_of(pid: int) -> Device:
    """Return the device that the session measures in a process: its CUDA device if it has one, else its AMD device.

    Raises SessionError."""
    return next(iter(devices_of(pid).values()))


def _vendor_at(pid: int, tid: int) -> Vendor:
    """Return the vendor of the library that a held thread of the process is in. Raises OSError if no more files can be opened."""
    from gpubpf.attach.loading import Held

    at = Held.entry_of(tid)
    try:
        for library in _libraries(pid, _LIBRARIES[Vendor.AMD]):
            if any(start <= at < end for start, end in library.code):
                return Vendor.AMD
    except OSError as error:
        if out_of_files(error):
            raise
    return Vendor.NVIDIA


def _named(mapped: Iterable[address_space.Mapping], name: re.Pattern[str]) -> Sequence[address_space.Library]:
    return address_space.libraries(m for m in mapped if name.match(m.path))


def _libraries(pid: int, name: re.Pattern[str]) -> Sequence[address_space.Library]:
    return address_space.libraries(address_space.mappings(pid, name))


def owner(pid: int) -> str:
    """Return the name of the tool that traces the process, according to its agent; "" if none does, or it cannot be read.

    The text is untrusted: use it only in messages."""
    with contextlib.suppress(OSError), address_space.Memory(pid) as memory:
        agents = address_space.libraries(address_space.mappings(pid, address_space.AGENT))
        for library in agents[: limits.DRIVERS_OF_PROCESS]:
            if symbol := elf.exports(memory, library.base, limits.EXPORTS).get(OWNER_VARIABLE):
                text = memory.some(symbol.address, OWNER_SIZE).partition(b"\0")[0].decode(errors="replace")
                return "".join(c if c.isprintable() else "?" for c in text)
    return ""


def untraced_descendants(pids: Iterable[int]) -> dict[int, str]:
    """Return the descendants of these processes that loaded a CUDA driver or ROCr themselves, as {pid: comm}.

    A driver inherited through `fork` does not count, because it does not work in the child."""
    known = tuple(pids)
    bases = {base for pid in known for base in _drivers(pid)}
    found: dict[int, str] = {}
    for child in traceable.descendants(known):
        if own := _drivers(child) - bases:
            bases |= own
            found[child] = traceable.comm(child)
    return found


def _drivers(pid: int) -> set[int]:
    with contextlib.suppress(OSError):
        return within(
            LOOK_WAIT,
            pid,
            lambda: {lib.base for name in _LIBRARIES.values() for lib in _libraries(pid, name)},
        )
    return set()


def _reason(pid: int, error: SessionError) -> str:
    """Return the reason for the failure of an attach."""
    if isinstance(error, traceable.Stopped):
        return STOPPED
    if isinstance(error, traceable.NotHookable):
        return UNHOOKED
    known = traceable.status(pid)
    if int(known.get("TracerPid", 0)):
        return TRACED
    return STOPPED if known.get("State", "").startswith("T") else FORBIDDEN


def all_failed(errors: Sequence[SessionError]) -> SessionError:
    """Return the error for a session that could not attach to any of its processes. `errors`: one per process."""
    if len(errors) == 1:
        return errors[0]
    return SessionError(f"cannot trace any of the {len(errors)} processes: {errors[0]}")
