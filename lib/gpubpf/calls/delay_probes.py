"""Sum in the kernel what delayed threads in calls and between launches: off-CPU times, page faults and other
reasons (include/gpubpf_delays.h, docs/host-calls.md).

    calls = CallProbes(api, chosen, options, note, text=delay_probes.PROGRAM)
    probes = DelayProbes(calls, note, why=True)
    calls.start()
    …
    probes.tick()                       # about every 0.1 s
    probes.delays(), probes.spans()     # what is new since the last read

Without `why` and `spans`, there is only one program, which measures how long threads were off the CPU. If this
kernel lacks a tracepoint or a structure member, a notice says what is unknown, and the rest is measured.
launches/off_cpu.py explains why it measures off-CPU times in another way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gpubpf.calls import delays
from gpubpf.calls.arrays import GAP
from gpubpf.errors import Error, VerifyError
from gpubpf.linux import btf, tracepoints
from gpubpf.linux.host_programs import HostProbe, try_load
from gpubpf.process import proc

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.calls.probes import CallProbes

PROGRAM = "#include <gpubpf_calls.h>\n#include <gpubpf_delays.h>\n"
SPAN_NS = 5000  # shorter delays are not recorded individually
_RECLAIM = "mm_vmscan_{}_reclaim_{}"
_FAULT, _RETRANSMIT = "page_fault_user", "tcp_retransmit_skb"
_ENDS = ("sched_process_exit", "sched_process_exec")
_NOBODY = 0xFFFFFFFF  # DELAY_NOBODY: the owner of a socket that belongs to no traced process
_MOST_FILES = 16_384
_SOCKET_PERIOD = 2.0  # seconds between two searches for the owners of sockets
_LOST_SUMS, _LOST_SPANS, _SENT_AGAIN = range(3)


class DelayProbes:
    """Programs at tracepoints, added to those of `calls`, which must not be started yet.

    why: find the reasons of delays.
    spans: find the reasons, and record each delay.

    Raises Error if this kernel cannot even measure off-CPU times.
    """

    def __init__(
        self, calls: CallProbes, note: Callable[[str], None], why: bool = False, spans: bool = False
    ) -> None:
        self._calls, self._note = calls, note
        self._reasons = why or spans
        self._settings = {"span_ns": SPAN_NS if spans else 0}
        self._before: np.ndarray[Any, Any] | None = None
        self._ended: set[tuple[int, int]] = set()  # threads that had ended when rows were last read
        self._spans: list[np.ndarray[Any, Any]] = []
        self._owners: dict[int, int] = {}  # inode of a socket → process
        self._foreign: list[int] = []  # inodes of sockets of processes that are not traced
        self._next_look = 0.0  # time.monotonic
        self._sockets = False  # whether there is a program for TCP retransmits
        raw = calls.pid_offset is not None
        if not self._reasons:
            self._attach_switch("delay_switch_time", raw)
            return
        self._old = self._is_old()
        self._attach_switch("delay_switch", raw and not self._old, self._old)
        self._find_bits()
        # Insert before the program that forgets the thread: the kernel runs programs in the order of attachment.
        for event in _ENDS:
            calls.bpf.attached.host_programs.insert(0, HostProbe("delay_exit", event))
        self._optional("time spent on memory pressure", self._reclaim)
        self._optional("page faults", self._fault)
        self._optional("TCP retransmits", self._retransmit)
        calls.bpf["delay_settings"].set(self._settings)

    # --- programs ---

    def _attach_switch(self, function: str, raw: bool, old: str = "") -> None:
        event = tracepoints.switch_event(raw)
        if event == tracepoints.RAW_SWITCH:
            self._calls.bpf.attach_raw_tracepoint(event, function)
        else:
            self._calls.bpf.attach_tracepoint(event, function + (old or "_record"))

    def _attach(self, event: str, function: str) -> None:
        tracepoints.has_arguments(event, 1)  # raises Error if there is no such tracepoint
        self._calls.bpf.attach_raw_tracepoint(event, function)

    def _optional(self, what: str, attach: Callable[[], None]) -> None:
        try:
            attach()
        except Error as error:
            self._note(f"{what}: unknown, because {str(error).split(';')[0]}")

    def _is_old(self) -> str:
        """Return the suffix of the programs to load: "_old" if the kernel lacks bpf_task_pt_regs."""
        program = self._calls.bpf.attached.programs.program
        try:
            try_load(program, program.functions["delay_switch"], raw=True)
        except VerifyError:
            self._note("the system call that blocked a thread is unknown before Linux 5.15")
            return "_old"
        return ""

    def _find_bits(self) -> None:
        for name, what in (("iowait", "block I/O"), ("memstall", "memory pressure")):
            try:
                bit = btf.member("task_struct", f"in_{name}")
            except Error as error:
                self._note(f"waits for {what} count as other waits, because {str(error).split(';')[0]}")
                continue
            self._settings |= {
                name: bit.offset,
                f"{name}_mask": ((1 << max(bit.bits, 1)) - 1) << bit.shift & 0xFF,
            }

    def _reclaim(self) -> None:
        for kind in ("direct", "memcg"):
            self._attach(_RECLAIM.format(kind, "begin"), "delay_reclaim")
            self._attach(_RECLAIM.format(kind, "end"), f"delay_reclaimed{self._old}")

    def _fault(self) -> None:
        self._attach(_FAULT, "delay_fault")

    def _retransmit(self) -> None:
        # The inode of a socket follows it in memory: struct socket_alloc.
        inode = btf.member("socket_alloc", "vfs_inode").offset - btf.member("socket_alloc", "socket").offset
        inode += btf.member("inode", "i_ino").offset
        self._settings |= {"socket": btf.member("sock", "sk_socket").offset, "inode": inode}
        self._attach(_RETRANSMIT, "delay_retransmit")
        self._sockets = True

    # --- what the programs counted ---

    def tick(self) -> None:
        """Read spans, and find the processes whose sockets retransmitted.

        Call this often. The programs count retransmits of a new socket for its process only after this method
        has found the process. Until then, the threads that waited for these retransmits are unknown.
        """
        import numpy as np

        if not self._reasons:
            return
        found = self._calls.host.records("delay_spans")
        again = found["reason"] == delays.RETRANSMITS
        new = set(found["inode"][again & (found["tgid"] == 0)].tolist()) - set(self._owners)
        if self._sockets and (new or time.monotonic() >= self._next_look):
            self._find_owners(new)
        if not self._settings["span_ns"] or not len(found):
            return
        which = np.flatnonzero(again & (found["tgid"] == 0))
        found["tgid"][which] = [self._owners.get(inode, 0) for inode in found["inode"][which].tolist()]
        self._spans.append(found[~again | (found["tgid"] != 0)])

    def _find_owners(self, new: set[int]) -> None:
        """Find the process of each socket. `new`: inodes of sockets that retransmitted and whose process was
        not known before.
        """
        host = self._calls.host
        for inode in self._foreign:
            host.delete("delay_sockets", _socket(inode))
        owners: dict[int, int] = {}
        for tgid in self._calls.seen:
            for inode in _sockets(tgid):
                owners.setdefault(inode, tgid)
        for inode in set(owners) - set(self._owners):
            value = host.lookup("delay_sockets", _socket(inode))
            count = int.from_bytes(value[4:], "little") if value is not None else 0
            host.update("delay_sockets", _socket(inode), _owned(owners[inode], count))
            self._add("delay_retransmits", owners[inode], count)
            self._add("delay_counts", _SENT_AGAIN, count)
        self._owners = owners
        self._foreign = sorted(new - set(owners))
        for inode in self._foreign:
            host.update("delay_sockets", _socket(inode), _owned(_NOBODY, 0))
        self._next_look = time.monotonic() + _SOCKET_PERIOD

    def _add(self, name: str, key: int, count: int) -> None:
        """Add to a counter that programs also increment. A concurrent increment may be lost, which is harmless
        because no exact count is shown.
        """
        at = key.to_bytes(4, "little")
        value = int.from_bytes(self._calls.host.lookup(name, at) or bytes(8), "little") + count
        self._calls.host.update(name, at, value.to_bytes(8, "little"))

    def spans(self) -> np.ndarray[Any, Any]:
        """Return the spans since the last read: see delays.py."""
        import numpy as np

        self.tick()
        parts, self._spans = self._spans, []
        return (
            np.concatenate(parts)
            if parts
            else np.empty(0, self._calls.bpf.attached.programs.maps["delay_spans"].value_dtype)
        )

    def delays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the rows since the last read, and the rows between launches: see `delays.split_gaps`.

        A delay that has not ended counts up to now, or to the end of the measurement.
        """
        import numpy as np

        self.tick()
        now = self._calls.ended_ns or time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        host = self._calls.host
        items = host.items("call_why")
        items = items[items["key"]["tgid"] != 0]  # 0: the thread was preempted while its entry was made
        rows = np.empty(len(items), delays.ROW)
        for name in rows.dtype.names or ():
            rows[name] = items["key" if name in delays.KEY else "value"][name]
        rows = delays.merge_rows([rows, *self._open(now), self._retransmits()])
        before = self._before if self._before is not None else rows[:0]
        new = delays.rows_since(rows, before)
        forgotten = self._forget(items["key"])
        self._before = rows[np.array([thread not in forgotten for thread in _threads(rows)], bool)]
        return delays.split_gaps(new)

    def _forget(self, keys: np.ndarray[Any, Any]) -> set[tuple[int, int]]:
        """Delete the rows of threads that had already ended at the previous reading, and return these
        threads.

        No program adds to such rows any longer.
        """
        host = self._calls.host
        alive = set(_threads(host.items("call_threads")["value"]))
        ended = set(_threads(keys)) - alive
        forgotten = ended & self._ended
        for key, thread in zip(keys, _threads(keys), strict=True):
            if thread in forgotten:
                host.delete("call_why", key.tobytes())
        self._ended = ended
        return forgotten

    def _open(self, now: int) -> Iterable[np.ndarray[Any, Any]]:
        """Yield rows for what no sum includes yet: calls in which a thread is blocked, and gaps that have just
        ended.
        """
        import numpy as np

        threads = self._calls.host.items("call_threads")["value"]
        away = threads[(threads["left_ns"] > 0) & (threads["left_ns"] < now) & (threads["function"] != GAP)]
        rows = np.zeros(len(away), delays.ROW)
        for name in ("tgid", "tid", "function"):
            rows[name] = away[name]
        rows["reason"], rows["syscall"], rows["count"] = away["left_state"] & 0xFF, away["left_syscall"], 1
        rows["ns"] = rows["largest_ns"] = now - away["left_ns"]
        yield rows
        launched = dict(zip(_threads(threads), threads["launched_ns"].tolist(), strict=True))
        gaps = self._calls.host.items("delay_gaps")["value"]
        begun = zip(_threads(gaps), gaps["launched_ns"].tolist(), strict=True)
        gaps = gaps[np.array([launched.get(thread, at) != at for thread, at in begun], bool)]
        parts = gaps["parts"].reshape(-1)
        rows = np.zeros(len(parts), delays.ROW)
        for name in ("tgid", "tid"):
            rows[name] = np.repeat(gaps[name], gaps["parts"].shape[1])
        for name in ("reason", "syscall", "count", "ns", "largest_ns"):
            rows[name] = parts[name]
        inside = parts["function"] != GAP
        rows["function"] = np.where(inside, parts["function"] | np.uint64(delays.BETWEEN), GAP)
        yield rows[rows["count"] > 0]

    def _retransmits(self) -> np.ndarray[Any, Any]:
        """Return the rows for the retransmits of whole processes."""
        import numpy as np

        items = self._calls.host.items("delay_retransmits")
        items = items[items["value"] > 0]
        rows = np.zeros(len(items), delays.ROW)
        rows["tgid"], rows["count"] = items["key"], items["value"]
        rows["function"], rows["reason"], rows["syscall"] = GAP, delays.RETRANSMITS, delays.OUTSIDE
        return rows

    @property
    def lost(self) -> int:
        """The number of delays that did not fit into a map or the ring buffer, or whose end was not reported."""
        found = self._calls.host.items("delay_counts")["value"]
        return int(found[_LOST_SUMS] + found[_LOST_SPANS]) + self._calls.counts.unseen


def _threads(array: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    return list(zip(array["tgid"].tolist(), array["tid"].tolist(), strict=True))


def _socket(inode: int) -> bytes:
    """Return the key of delay_sockets."""
    return inode.to_bytes(8, "little")


def _owned(tgid: int, count: int) -> bytes:
    """Return a struct delay_socket."""
    return tgid.to_bytes(4, "little") + count.to_bytes(4, "little")


def _sockets(pid: int) -> set[int]:
    """Return the inodes of the sockets that a process has open, among its first _MOST_FILES files."""
    found = set()
    with contextlib.suppress(OSError):
        for target in proc.open_files(pid, _MOST_FILES):
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return found
