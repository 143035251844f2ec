"""The programs at a library's functions, and what they counted and recorded (docs/amd.md, include/gpubpf_calls.h).

calls = Calls(api, api.choose(), Options(), note)
calls.bpf …                         # programs of others, which come and go with these
calls.start()
calls.targets(pid)                  # this process, and all that it starts from then on
…
calls.sums(), calls.events()        # since the last call
calls.stop(); calls.sums() …; calls.close()
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpubpf.calls import arrays
from gpubpf.calls.api import Api, Function
from gpubpf.ebpf.filters import host_filter_bytes
from gpubpf.errors import Error
from gpubpf.linux import bpf_syscall, btf, uprobes
from gpubpf.process import libc
from gpubpf.program import BPF
from gpubpf.session.command import raise_file_limit

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.linux.host_programs import Host
    from gpubpf.linux.uprobes import ProbedFile
    from gpubpf.process.privileges import Privileges

PROGRAM = "#include <gpubpf_calls.h>\n"
RING = 1 << 26  # bytes: 200,000 records
_FIRST_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO
_GLOBAL = 1
_COUNTS = ("records", "sums", "calls", "processes", "nested", "abandoned")  # as CALL_LOST_RECORDS and so on
_NEWTASK = {"pid": (8, 4), "clone_flags": (32, 8)}  # what a program relies on in the tracepoint's record


@dataclass(frozen=True)
class Options:
    """What is counted. `events`: each call is a record, too; `everybody`: of all processes; `slow_ns`, `errors`: only calls that took
    as long, that failed; `cgroup` (its id), `comm`, `tid`: only of such threads.
    `statistics`: the kernel counts how often programs run, and how long, which takes 100 ns of a call."""

    events: bool = False
    everybody: bool = False
    slow_ns: int = 0
    errors: bool = False
    cgroup: int | None = None
    comm: str | None = None
    tid: int | None = None
    statistics: bool = False


@dataclass(frozen=True)
class Counts:
    """What is counted beside. Lost: `records` that found no room in the ring; `sums`: calls that are in no sum; `calls` whose
    beginning was forgotten, as too many threads were inside of some; `processes` that are not followed. Not lost: `nested`, in calls
    of the same thread, so part of one that the program made; `abandoned`, which never returned (longjmp, a thread's end)."""

    records: int = 0
    sums: int = 0
    calls: int = 0
    processes: int = 0
    nested: int = 0
    abandoned: int = 0


class Calls:
    """Raises Error where programs cannot run in the kernel, VerifyError for those that may not. `chosen`: functions with their numbers
    in `api.functions`. `note`: called with notices for the user."""

    def __init__(
        self,
        api: Api,
        chosen: Sequence[tuple[int, Function]],
        options: Options,
        note: Callable[[str], None],
        text: str = PROGRAM,
    ) -> None:
        self.api, self.chosen, self.options = api, tuple(chosen), options
        self._note = note
        self._host: Host | None = None
        self._over = False
        place = os.stat("/proc/self/ns/pid")
        first = place.st_ino == _FIRST_NAMESPACE
        self._numbers_differ = not first
        self.pid: int | None = None  # where the kernel has a thread's number; None: it does not tell
        with contextlib.suppress(Error):
            self.pid = btf.member("task_struct", "pid").offset
        self._settings = {
            "pid": self.pid or 0,
            "slow_ns": options.slow_ns,
            "inode": 0 if first else place.st_ino,
            "device": 0 if first else place.st_dev,
            "generation": 1,
            "ready": max(api.ok),
            "events": options.events,
            "errors": options.errors,
            "everybody": options.everybody,
        }
        self.bpf = BPF(text=text)
        self.bpf.statistics = options.statistics
        self.bpf.entries["call_events"] = RING if options.events else 4096
        self.bpf["call_settings"].set(self._settings)
        self.bpf["call_layouts"].set(arrays.layouts(self.chosen, self.bpf.maps["call_layouts"].value_size))
        self.bpf["call_filter"].set(host_filter_bytes(options.cgroup, options.comm, options.tid))
        numbers = {function.symbol: number for number, function in self.chosen}
        for name, returns in (("call_entry", False), ("call_return", True)):
            self.bpf.attach_uprobe(api.libraries, numbers, fn_name=name, ret=returns, optional=True)
        self.bpf.attach_raw_tracepoint("sched_process_exec", "call_exec")
        self.bpf.attach_raw_tracepoint(
            "sched_process_exit",
            "call_exit" if raw_arguments("sched_process_exit", 2) else "call_exit_thread",
        )
        if options.everybody:
            return
        if self.pid is not None:
            self.bpf.attach_raw_tracepoint("task_newtask", "call_newtask")
        else:
            attach_records(self.bpf, "task:task_newtask", _NEWTASK, "call_newtask_record")

    # --- start and end ---

    def start(self) -> None:
        """Has the programs run. Where no library is found yet a note says so."""
        if uprobes.best_method() == "event":  # which takes several files for each function
            raise_file_limit()
        self._host = self.bpf.host(None, self._note)

    @property
    def host(self) -> Host:
        """The maps that all programs share, from `start` to `close`."""
        assert self._host is not None
        return self._host

    def limit(self, privileges: Privileges) -> None:
        """Has what waits for libraries go by these privileges, too."""
        if self.host.uprobes is not None:
            self.host.uprobes.limit_privileges(privileges.apply)

    def stop(self) -> None:
        """Has the programs run no more. What they counted can still be read."""
        if not self._over:
            self._over = True
            self.host.detach()
            self.host.wait_until_detached()
            _wait_for_programs()  # at raw tracepoints, where that is all

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None

    # --- whose calls ---

    def targets(self, pid: int) -> None:
        """Calls of this process are counted, and of all that it starts from now on."""
        self.host.update(self._chosen_pids, pid.to_bytes(4, "little"), b"\1")

    def forget(self, pid: int) -> None:
        """Calls of this process are not, of what it started before they are."""
        self.host.delete(self._chosen_pids, pid.to_bytes(4, "little"))

    def ended(self, pid: int) -> None:
        """A process that was chosen is no more, and another may get its number. Numbers of the kernel's own it looks after itself."""
        if self._numbers_differ:
            self.forget(pid)

    @property
    def _chosen_pids(self) -> str:
        return "call_wanted" if self._numbers_differ else "call_targets"

    @property
    def seen(self) -> dict[int, str]:
        """Processes that have made calls, with the name that each had then."""
        found = self.host.items("call_processes")
        order = found[found["value"]["first_ns"].argsort()]
        names = (
            name.tobytes().partition(b"\0")[0].decode("utf-8", "replace") for name in order["value"]["comm"]
        )
        return dict(zip(order["key"].tolist(), names, strict=True))

    @property
    def placed(self) -> Sequence[ProbedFile]:
        """Of each library file: which functions are watched there."""
        put = self.host.uprobes
        return tuple(put.placed) if put is not None else ()

    @property
    def absent(self) -> tuple[str, ...]:
        """Names of chosen functions that no library found so far exports. None while there is no library."""
        exported = {name for p in self.placed for name in (*p.functions, *p.refused)}
        return tuple(f.name for _, f in self.chosen if f.symbol not in exported) if self.placed else ()

    # --- what was counted ---

    def sums(self) -> np.ndarray[Any, Any]:
        """By process, function and kernel, what ended since the last time: see arrays.py. While programs run, takes as long as
        an RCU grace period, some 10 ms."""
        import numpy as np

        ended = None
        if not self._over:
            ended = self._settings["generation"]
            self._settings["generation"] = ended + 1
            self.bpf["call_settings"].set(self._settings)
            self.host.update("call_settings", bytes(4), self.bpf.values["call_settings"])
            _wait_for_programs()
        items = self.host.items("call_sums")
        if ended is not None:
            items = items[items["key"]["generation"] <= ended]
        made = np.empty(len(items), arrays.sum_dtype(items.dtype["key"], items.dtype["value"]))
        for part in ("key", "value"):
            for name in items.dtype[part].names or ():
                if name in (made.dtype.names or ()):
                    made[name] = items[part][name]
        for key in items["key"]:
            self.host.delete("call_sums", key.tobytes())
        return made

    def events(self) -> np.ndarray[Any, Any]:
        """The records since the last time, in the order in which calls returned: see arrays.py."""
        return self.host.records("call_events")

    def under_way(self) -> np.ndarray[Any, Any]:
        """Of threads that are inside of a call: `tgid`, `tid`, `function`, `kernel`, `entry_ns`, …, see struct call_thread."""
        threads = self.host.items("call_threads")["value"]
        return threads[threads["function"] != arrays.GAP]

    @property
    def counts(self) -> Counts:
        found = self.host.items("call_counts")["value"].tolist()
        return Counts(**dict(zip(_COUNTS, found, strict=True)))

    @property
    def missed(self) -> dict[str, int]:
        """How often programs did not run where something happened, as the CPU was inside another one; by name, of those of which that
        is so. Of call_entry or call_return it is a call that is not known."""
        return {name: count for name, count in self.host.missed().items() if count}

    @property
    def lost_by(self) -> dict[str, int]:
        """Calls that are not shown, or not with all that was asked for, by reason: those of `Counts`, and `missed`: those of which a
        program did not see the entry or the return, at most that many."""
        counts, missed = self.counts, self.missed
        unseen = sum(missed[name] for name in missed if name.startswith(("call_entry", "call_return")))
        return {"records": counts.records, "sums": counts.sums, "calls": counts.calls, "missed": unseen}

    @property
    def lost(self) -> int:
        """All of `lost_by`."""
        return sum(self.lost_by.values())


def raw_arguments(name: str, count: int) -> bool:
    """Whether a raw tracepoint has as many; True where this process may not ask, and will hear that it may not attach."""
    try:
        return bpf_syscall.raw_arguments(name, count)
    except PermissionError:
        return True


def attach_records(bpf: BPF, event: str, layout: Mapping[str, tuple[int, int]], function: str) -> None:
    """Has a program run at a tracepoint with records. `layout`: what it relies on there, offset and size by field. Raises Error where
    that is not so."""
    fields = bpf_syscall.tracepoint(event).fields
    if any(fields.get(key) != at for key, at in layout.items()):
        raise Error(f"this kernel's tracepoint {event} has another layout; use a kernel from Linux 5.8 on")
    bpf.attach_tracepoint(event, function)


def _wait_for_programs() -> None:
    """Until those have ended that run now: they are in RCU read-side critical sections, and such a barrier waits for these."""
    try:
        libc.system_call(libc.MEMBARRIER, _GLOBAL, 0, 0)
    except OSError:
        # where CPUs are kept free of ticks the kernel has none for us; programs take microseconds
        time.sleep(0.02)
