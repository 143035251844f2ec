"""Attach eBPF programs to the functions of a library, and read what they count and record
(include/gpubpf_calls.h, docs/host-calls.md).

    calls = CallProbes(api, api.choose(), CallOptions(), note)
    calls.bpf …                         # add further programs, which run for the same time
    calls.start()
    calls.trace(pid)                    # count calls of this process, and of all that it starts from now on
    …
    calls.sums(), calls.events()        # what is new since the last read
    calls.stop(); calls.sums() …; calls.close()
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.calls import arrays
from gpubpf.calls.api import Api, ApiFunction
from gpubpf.ebpf.filters import host_filter_bytes
from gpubpf.errors import Error
from gpubpf.kernel import libc
from gpubpf.linux import btf, tracepoints, uprobes
from gpubpf.program import BPF
from gpubpf.record import Record
from gpubpf.traced.command import raise_file_limit

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.calls.snoop_options import SnoopOptions
    from gpubpf.kernel.privileges import Privileges
    from gpubpf.linux.host_programs import Host
    from gpubpf.linux.uprobes import ProbedFile

PROGRAM = "#include <gpubpf_calls.h>\n"
RING = 1 << 26  # bytes; room for 200,000 records
_INITIAL_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO
_GLOBAL = 1
_MARK = 1 << 16  # CALL_MARK
# In the order of CALL_LOST_RECORDS …
_COUNTS = ("records", "sums", "calls", "processes", "nested", "abandoned", "unseen")
_NEWTASK: tracepoints.RecordLayout = {"pid": (8, 4), "clone_flags": (32, 8)}


class CallOptions(Record):
    """Which calls the programs count.

    events: also record each call.
    everybody: count calls of every process.
    slow_ns: count only calls that took at least this long.
    errors: count only calls that failed.
    cgroup, comm, tid: count only calls of threads that match; `cgroup` is an id.
    statistics: have the kernel count how often and how long programs run, which costs 100 ns per call.
    """

    events: bool = False
    everybody: bool = False
    slow_ns: int = 0
    errors: bool = False
    cgroup: int | None = None
    comm: str | None = None
    tid: int | None = None
    statistics: bool = False

    @classmethod
    def of(cls, options: SnoopOptions, events: bool = False) -> CallOptions:
        """Return the options for a command line. `events`: record each call in any case."""
        calls, threads = options.calls, options.shared.threads
        return cls(
            events=events or calls.needs_events or options.selects_launches,
            everybody=options.everyone,
            slow_ns=1000 * (calls.slow or 0),
            errors=calls.errors,
            cgroup=threads.cgroup,
            comm=threads.comm,
            tid=threads.tid,
            statistics=options.shared.output.verbose,
        )


class CallCounts(Record):
    """What the programs count besides the sums.

    Losses:
    records: records that did not fit into the ring buffer.
    sums: calls that are missing from the sums.
    calls: calls whose entry was evicted because too many threads were in a call.
    processes: processes that are not followed because the map of targets was full.

    Not losses:
    nested: calls inside a call of the same thread, which are part of that call.
    abandoned: calls that never returned (longjmp, end of the thread).
    unseen: off-CPU times whose end the kernel did not report.
    """

    records: int = 0
    sums: int = 0
    calls: int = 0
    processes: int = 0
    nested: int = 0
    abandoned: int = 0
    unseen: int = 0


class CallProbes:
    """Programs at the entry and the return of functions.

    chosen: functions with their numbers in `api.functions`.
    note: called with notices for the user.

    Raises Error if the kernel cannot run the programs, and VerifyError if it rejects them.
    """

    def __init__(
        self,
        api: Api,
        chosen: Sequence[tuple[int, ApiFunction]],
        options: CallOptions,
        note: Callable[[str], None],
        text: str = PROGRAM,
    ) -> None:
        self.api, self.chosen, self.options = api, tuple(chosen), options
        self._note = note
        self._host: Host | None = None
        self.ended_ns: int | None = None  # when the measurement was over, CLOCK_BOOTTIME
        namespace = os.stat("/proc/self/ns/pid")
        initial = namespace.st_ino == _INITIAL_NAMESPACE
        self._numbers_differ = not initial
        self.pid_offset = _pid_offset()
        self._settings = {
            "pid": self.pid_offset or 0,
            "slow_ns": options.slow_ns,
            "inode": 0 if initial else namespace.st_ino,
            "device": 0 if initial else namespace.st_dev,
            "generation": 1,
            "ready": api.not_ready,
            "events": options.events,
            "errors": options.errors,
            "everybody": options.everybody,
            "over": False,
        }
        self.bpf = BPF(text=text)
        self.bpf.attached.statistics = options.statistics
        self.bpf.attached.hold_notices = not options.everybody
        self.bpf.attached.entries["call_events"] = RING if options.events else 4096
        self.bpf["call_settings"].set(self._settings)
        self.bpf["call_layouts"].set(
            arrays.layouts(self.chosen, self.bpf.attached.programs.maps["call_layouts"].value_size)
        )
        self.bpf["call_filter"].set(host_filter_bytes(options.cgroup, options.comm, options.tid))
        self._attach()

    def _attach(self) -> None:
        """Declare where each program runs; `start` attaches them."""
        numbers = {function.symbol: number for number, function in self.chosen}
        for name, returns in (("call_entry", False), ("call_return", True)):
            self.bpf.attach_uprobe(
                self.api.libraries, numbers, fn_name=name, ret=returns, optional=True, mark=_MARK
            )
        self.bpf.attach_raw_tracepoint("sched_process_exec", "call_exec")
        self.bpf.attach_raw_tracepoint(
            "sched_process_exit",
            "call_exit" if tracepoints.has_arguments("sched_process_exit", 2) else "call_exit_thread",
        )
        if self.options.everybody:
            return
        if self.pid_offset is not None:
            self.bpf.attach_raw_tracepoint("task_newtask", "call_newtask")
        else:
            tracepoints.check_record("task:task_newtask", _NEWTASK)
            self.bpf.attach_tracepoint("task:task_newtask", "call_newtask_record")

    # --- start and end ---

    def start(self) -> None:
        """Load and attach the programs. Give a notice if no library is found yet."""
        if uprobes.best_method() == "event":  # needs several open files for each function
            raise_file_limit()
        room = self.bpf.attached.entries.get(
            "call_threads", self.bpf.attached.programs.maps["call_threads"].max_entries
        )
        self._settings["many"] = room // 4  # the kernel evicts entries before the map is full
        self.bpf["call_settings"].set(self._settings)
        self._host = self.bpf.host(None, self._note)

    @property
    def host(self) -> Host:
        """The loaded programs and their maps, from `start` to `close`."""
        assert self._host is not None
        return self._host

    def limit(self, privileges: Privileges) -> None:
        """Also restrict the thread that attaches to new libraries to these privileges."""
        if self.host.uprobes is not None:
            self.host.uprobes.limit_privileges(privileges.apply)

    def _set(self, **changed: int) -> None:
        """Change settings while the programs run."""
        self._settings |= changed
        self.bpf["call_settings"].set(self._settings)
        self.host.update("call_settings", bytes(4), self.bpf.attached.values["call_settings"])

    def stop(self) -> None:
        """Detach the programs. What they counted can still be read."""
        if self.ended_ns is None:
            # Stop all programs at once first: otherwise, calls whose return probe is detached first would never end.
            self._set(over=True)
            self.ended_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            self.host.detach()
            self.host.wait_until_detached()
            _wait_for_programs()  # nothing else waits for programs at raw tracepoints

    def close(self) -> None:
        """Unload the programs and their maps."""
        if self._host is not None:
            self._host.close()
            self._host = None

    # --- traced processes ---

    def trace(self, pid: int) -> None:
        """Count calls of this process, and of all processes that it starts from now on."""
        self.host.update(self._chosen_pids, pid.to_bytes(4, "little"), b"\1")

    def forget(self, pid: int) -> None:
        """Stop counting calls of this process. Calls of processes that it has started still count."""
        self.host.delete(self._chosen_pids, pid.to_bytes(4, "little"))

    def announced(self, pid: int) -> None:
        """Pass on notices about the files of this process, which uses the library. Other notices are held back."""
        if self.host.uprobes is not None:
            self.host.uprobes.told_of(pid)

    def ended(self, pid: int) -> None:
        """Forget a chosen process that has ended, since another process may get its PID.

        In the initial PID namespace, the eBPF programs do this themselves.
        """
        if self._numbers_differ:
            self.forget(pid)

    def may_trace(self, pid: int) -> bool:
        """Return False only if calls of a process are known not to count. The process may have ended.

        In another PID namespace than the initial one, the children of traced processes have unknown numbers."""
        if self.options.everybody:
            return True
        if self._numbers_differ:
            return pid in self.seen or not self.seen
        return self.host.lookup("call_targets", pid.to_bytes(4, "little")) is not None

    @property
    def _chosen_pids(self) -> str:
        return "call_wanted" if self._numbers_differ else "call_targets"

    @property
    def seen(self) -> dict[int, str]:
        """The processes that have made calls, in order of their first call, with their names at that time."""
        found = self.host.items("call_processes")
        order = found[found["value"]["first_ns"].argsort()]
        names = (
            name.tobytes().partition(b"\0")[0].decode("utf-8", "replace") for name in order["value"]["comm"]
        )
        return dict(zip(order["key"].tolist(), names, strict=True))

    @property
    def placed(self) -> Sequence[ProbedFile]:
        """The library files that have probes, with the probed functions."""
        put = self.host.uprobes
        return tuple(put.placed) if put is not None else ()

    @property
    def incomplete(self) -> bool:
        """Whether a library that processes have loaded may have no probes, so that its calls are not seen."""
        put = self.host.uprobes
        return put is not None and (put.incomplete or any(p.refused and not p.functions for p in put.placed))

    @property
    def absent(self) -> tuple[str, ...]:
        """The names of chosen functions that no library found so far exports; empty before one is found."""
        exported = {name for p in self.placed for name in (*p.functions, *p.refused)}
        return tuple(f.name for _, f in self.chosen if f.symbol not in exported) if self.placed else ()

    # --- what was counted ---

    def sums(self) -> np.ndarray[Any, Any]:
        """Return sums of the calls that ended since the last read, by process, function and kernel: see
        arrays.py.

        While the programs run, this takes an RCU grace period: about 10 ms.
        """
        import numpy as np

        ended = None
        if self.ended_ns is None:
            ended = self._settings["generation"]
            self._set(generation=ended + 1)
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

    def launched(self) -> set[tuple[int, int]]:
        """Return the PIDs and handles of kernels launched since the sums were last read."""
        keys = self.host.items("call_sums")["key"]
        return {
            (pid, kernel)
            for pid, kernel in zip(*(keys[k].tolist() for k in ("tgid", "kernel")), strict=True)
            if kernel
        }

    def events(self) -> np.ndarray[Any, Any]:
        """Return the calls that ended since the last read, in the order in which they returned: see
        arrays.py.
        """
        return self.host.records("call_events")

    def under_way(self) -> np.ndarray[Any, Any]:
        """Return the threads that are in a call, as struct call_thread: `tgid`, `tid`, `function`, `kernel`,
        `entry_ns`, …
        """
        threads = self.host.items("call_threads")["value"]
        return threads[threads["function"] != arrays.GAP]

    @property
    def counts(self) -> CallCounts:
        """What the programs count besides the sums."""
        found = self.host.items("call_counts")["value"].tolist()
        return CallCounts(**dict(zip(_COUNTS, found, strict=True)))

    @property
    def missed(self) -> dict[str, int]:
        """How many runs each program missed because the CPU was already in an eBPF program; programs without
        misses are left out.

        A run that call_entry or call_return missed is a call that was not counted.
        """
        return {name: count for name, count in self.host.missed().items() if count}

    @property
    def lost_by(self) -> dict[str, int]:
        """Calls that are missing from the results, or incomplete there, by reason.

        The reasons are those of `CallCounts`, and `missed`: an upper bound on calls whose entry or return no
        program saw.
        """
        counts, missed = self.counts, self.missed
        unseen = sum(missed[name] for name in missed if name.startswith(("call_entry", "call_return")))
        return {"records": counts.records, "sums": counts.sums, "calls": counts.calls, "missed": unseen}

    @property
    def lost(self) -> int:
        """The sum of `lost_by`."""
        return sum(self.lost_by.values())


def _pid_offset() -> int | None:
    """Return the offset of `pid` in struct task_struct, or None if the kernel has no BTF."""
    with contextlib.suppress(Error):
        return btf.member("task_struct", "pid").offset
    return None


def _wait_for_programs() -> None:
    """Wait until every program that is now running has ended.

    Programs run in RCU read-side critical sections, for which MEMBARRIER_CMD_GLOBAL waits.
    """
    try:
        libc.system_call("membarrier", _GLOBAL, 0, 0)
    except OSError:
        time.sleep(0.02)  # with nohz_full CPUs, there is no such barrier; programs take microseconds
