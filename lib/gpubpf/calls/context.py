"""Programs at tracepoints that tell what threads did beside running, and why (docs/amd.md, include/gpubpf_context.h).

    calls = Calls(api, chosen, options, note, text=context.PROGRAM)
    context = Context(calls, note, why=True)
    calls.start()
    …
    context.tick()                      # every 0.1 s or so
    context.why(), context.spans()      # since the last call

Without `why` there is one program, which tells how long threads were off the CPU. What this kernel does not have is said once, and not
known; everything else is.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gpubpf.calls import why as reasons
from gpubpf.calls.arrays import GAP
from gpubpf.calls.probes import attach_records, raw_arguments
from gpubpf.errors import Error, VerifyError
from gpubpf.linux import btf
from gpubpf.linux.host_programs import HostProbe, try_load

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.calls.probes import Calls

PROGRAM = "#include <gpubpf_calls.h>\n#include <gpubpf_context.h>\n"
SPAN_NS = 5000  # shorter ones are not worth a record
_SWITCH = "sched_switch"
_SWITCH_ARGUMENTS = 4  # the state that a thread is left in is the last; there since Linux 5.18
_SWITCH_RECORD = {"prev_pid": (24, 4), "prev_state": (32, 8), "next_pid": (56, 4)}
_RECLAIM = "mm_vmscan_{}_reclaim_{}"
_FAULT, _RETRANSMIT = "page_fault_user", "tcp_retransmit_skb"
_ENDS = ("sched_process_exit", "sched_process_exec")  # of what a thread was
_NOBODY = 0xFFFFFFFF  # as a socket's owner
_MOST_FILES = 16_384
_LOOK = 2.0  # seconds between two looks at which process has which socket
_LOST_SUMS, _LOST_SPANS, _SENT_AGAIN = range(3)


class Context:
    """Adds its programs to those of `calls`, which have not been started. `why`: the reasons; `spans`: these, and each time off the
    CPU is a record. Raises Error where not even the time off the CPU can be known."""

    def __init__(
        self, calls: Calls, note: Callable[[str], None], why: bool = False, spans: bool = False
    ) -> None:
        self._calls, self._note = calls, note
        self._reasons = why or spans
        self._settings = {"span_ns": SPAN_NS if spans else 0}
        self._before: np.ndarray[Any, Any] | None = None
        self._gone: set[tuple[int, int]] = set()  # threads that had ended at the last reading
        self._spans: list[np.ndarray[Any, Any]] = []
        self._owners: dict[int, int] = {}  # processes by socket
        self._nobodys: list[int] = []  # sockets of others
        self._next_look = 0.0  # time.monotonic
        self._sockets = False  # whether it is known that they send something again
        raw = calls.pid is not None and raw_arguments(_SWITCH, _SWITCH_ARGUMENTS)
        if not self._reasons:
            self._attach_switch("context_switch_time", raw)
            return
        self._old = self._is_old()
        self._attach_switch("context_switch", raw and not self._old, self._old)
        self._find_bits()
        # Before the program that forgets the thread: the kernel runs them in this order.
        for event in _ENDS:
            calls.bpf.host_programs.insert(0, HostProbe("context_exit", event))
        self._optional("time spent on memory pressure", self._reclaim)
        self._optional("page faults", self._fault)
        self._optional("TCP retransmits", self._retransmit)
        calls.bpf["context_settings"].set(self._settings)

    # --- programs ---

    def _attach_switch(self, function: str, raw: bool, old: str = "") -> None:
        if raw:
            self._attach(_SWITCH, function)
        else:
            attach_records(self._calls.bpf, f"sched:{_SWITCH}", _SWITCH_RECORD, function + (old or "_record"))

    def _attach(self, event: str, function: str) -> None:
        raw_arguments(event, 1)  # or there is no such tracepoint
        self._calls.bpf.attach_raw_tracepoint(event, function)

    def _optional(self, what: str, attach: Callable[[], None]) -> None:
        try:
            attach()
        except Error as error:
            self._note(f"{what}: unknown, as {str(error).split(';')[0]}")

    def _is_old(self) -> str:
        """How the names of programs end that this kernel takes."""
        program = self._calls.bpf.program
        try:
            try_load(program, program.functions["context_switch"], raw=True)
        except VerifyError:
            self._note("in which system call a thread was blocked is not known before Linux 5.15")
            return "_old"
        return ""

    def _find_bits(self) -> None:
        for name, what in (("iowait", "waits for block devices"), ("memstall", "waits for memory")):
            try:
                bit = btf.member("task_struct", f"in_{name}")
            except Error as error:
                self._note(f"{what} are not told from others, as {str(error).split(';')[0]}")
                continue
            self._settings |= {
                name: bit.offset,
                f"{name}_mask": ((1 << max(bit.bits, 1)) - 1) << bit.shift & 0xFF,
            }

    def _reclaim(self) -> None:
        for kind in ("direct", "memcg"):
            self._attach(_RECLAIM.format(kind, "begin"), "context_reclaim")
            self._attach(_RECLAIM.format(kind, "end"), f"context_reclaimed{self._old}")

    def _fault(self) -> None:
        self._attach(_FAULT, "context_fault")

    def _retransmit(self) -> None:
        # A socket's inode lies behind it: struct socket_alloc.
        inode = btf.member("socket_alloc", "vfs_inode").offset - btf.member("socket_alloc", "socket").offset
        inode += btf.member("inode", "i_ino").offset
        self._settings |= {"socket": btf.member("sock", "sk_socket").offset, "inode": inode}
        self._attach(_RETRANSMIT, "context_retransmit")
        self._sockets = True

    # --- what they counted ---

    def tick(self) -> None:
        """Takes records, and finds out whose sockets sent something again. To be called often: of a socket that was made a moment ago
        the kernel counts what it sends again from then on, and no thread is known to have waited for what was before."""
        import numpy as np

        if not self._reasons:
            return
        found = self._calls.host.records("context_spans")
        again = found["reason"] == reasons.RETRANSMITS
        new = set(found["inode"][again & (found["tgid"] == 0)].tolist()) - set(self._owners)
        if self._sockets and (new or time.monotonic() >= self._next_look):
            self._look(new)
        if not self._settings["span_ns"] or not len(found):
            return
        which = np.flatnonzero(again & (found["tgid"] == 0))
        found["tgid"][which] = [self._owners.get(inode, 0) for inode in found["inode"][which].tolist()]
        self._spans.append(found[~again | (found["tgid"] != 0)])

    def _look(self, asked: set[int]) -> None:
        """Whose sockets there are. `asked`: those that sent something again."""
        host = self._calls.host
        for inode in self._nobodys:
            host.delete("context_sockets", _socket(inode))
        owners: dict[int, int] = {}
        for tgid in self._calls.seen:
            for inode in _sockets(tgid):
                owners.setdefault(inode, tgid)
        for inode in set(owners) - set(self._owners):
            value = host.lookup("context_sockets", _socket(inode))
            count = int.from_bytes(value[4:], "little") if value is not None else 0
            host.update("context_sockets", _socket(inode), _owned(owners[inode], count))
            self._add("context_retransmits", owners[inode], count)
            self._add("context_counts", _SENT_AGAIN, count)
        self._owners = owners
        self._nobodys = sorted(asked - set(owners))
        for inode in self._nobodys:
            host.update("context_sockets", _socket(inode), _owned(_NOBODY, 0))
        self._next_look = time.monotonic() + _LOOK

    def _add(self, name: str, key: int, count: int) -> None:
        """To a counter that the kernel counts up, too: what it adds at this moment may be lost, of what nobody is told exactly."""
        at = key.to_bytes(4, "little")
        value = int.from_bytes(self._calls.host.lookup(name, at) or bytes(8), "little") + count
        self._calls.host.update(name, at, value.to_bytes(8, "little"))

    def spans(self) -> np.ndarray[Any, Any]:
        """Records since the last time: see why.py."""
        import numpy as np

        self.tick()
        parts, self._spans = self._spans, []
        return (
            np.concatenate(parts) if parts else np.empty(0, self._calls.bpf.maps["context_spans"].value_dtype)
        )

    def why(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Rows since the last time, of times that go on up to now; of these what was between launches: see `why.parted`."""
        import numpy as np

        self.tick()
        now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        host = self._calls.host
        items = host.items("call_why")
        items = items[items["key"]["tgid"] != 0]  # else of a thread that was preempted as it became known
        rows = np.empty(len(items), reasons.ROW)
        for name in rows.dtype.names or ():
            rows[name] = items["key" if name in reasons.KEY else "value"][name]
        rows = reasons.together([rows, *self._open(now), self._sent_again()])
        before = self._before if self._before is not None else rows[:0]
        new = reasons.since(rows, before)
        ended = self._forget(items["key"])
        self._before = rows[np.array([who not in ended for who in _who(rows)], bool)]
        return reasons.parted(new)

    def _forget(self, keys: np.ndarray[Any, Any]) -> set[tuple[int, int]]:
        """Makes room where threads have ended, and were not there at the reading before either, so that nothing comes to their rows
        any more. Which threads these are."""
        host = self._calls.host
        there = set(_who(host.items("call_threads")["value"]))
        gone = set(_who(keys)) - there
        ended = gone & self._gone
        for key, who in zip(keys, _who(keys), strict=True):
            if who in ended:
                host.delete("call_why", key.tobytes())
        self._gone = gone
        return ended

    def _open(self, now: int) -> Iterable[np.ndarray[Any, Any]]:
        """What is in no sum yet: calls that a thread is blocked in, and gaps that ended a moment ago."""
        import numpy as np

        threads = self._calls.host.items("call_threads")["value"]
        away = threads[(threads["left_ns"] > 0) & (threads["left_ns"] < now) & (threads["function"] != GAP)]
        rows = np.zeros(len(away), reasons.ROW)
        for name in ("tgid", "tid", "function"):
            rows[name] = away[name]
        rows["reason"], rows["syscall"], rows["count"] = away["left_state"] & 0xFF, away["left_syscall"], 1
        rows["ns"] = rows["largest_ns"] = now - away["left_ns"]
        yield rows
        launched = dict(zip(_who(threads), threads["launched_ns"].tolist(), strict=True))
        gaps = self._calls.host.items("context_gaps")["value"]
        since = zip(_who(gaps), gaps["launched_ns"].tolist(), strict=True)
        gaps = gaps[np.array([launched.get(who, at) != at for who, at in since], bool)]
        parts = gaps["parts"].reshape(-1)
        rows = np.zeros(len(parts), reasons.ROW)
        for name in ("tgid", "tid"):
            rows[name] = np.repeat(gaps[name], gaps["parts"].shape[1])
        for name in ("reason", "syscall", "count", "ns", "largest_ns"):
            rows[name] = parts[name]
        inside = parts["function"] != GAP
        rows["function"] = np.where(inside, parts["function"] | np.uint64(reasons.BETWEEN), GAP)
        yield rows[rows["count"] > 0]

    def _sent_again(self) -> np.ndarray[Any, Any]:
        """Of processes as a whole."""
        import numpy as np

        items = self._calls.host.items("context_retransmits")
        items = items[items["value"] > 0]
        rows = np.zeros(len(items), reasons.ROW)
        rows["tgid"], rows["count"] = items["key"], items["value"]
        rows["function"], rows["reason"], rows["syscall"] = GAP, reasons.RETRANSMITS, reasons.OUTSIDE
        return rows

    @property
    def lost(self) -> int:
        """Times that found no room, in sums or as records, or whose end the kernel did not tell of."""
        found = self._calls.host.items("context_counts")["value"]
        return int(found[_LOST_SUMS] + found[_LOST_SPANS])


def _who(array: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    return list(zip(array["tgid"].tolist(), array["tid"].tolist(), strict=True))


def _socket(inode: int) -> bytes:
    """As the key of context_sockets."""
    return inode.to_bytes(8, "little")


def _owned(tgid: int, count: int) -> bytes:
    """As struct context_socket."""
    return tgid.to_bytes(4, "little") + count.to_bytes(4, "little")


def _sockets(pid: int) -> set[int]:
    """Inodes of the sockets that a process has open, of as many files as are looked at."""
    found = set()
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in itertools.islice(entries, _MOST_FILES):
            with contextlib.suppress(OSError, ValueError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found
