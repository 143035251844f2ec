"""What the threads that launch were doing meanwhile: when they were off the CPU, and why; system calls that took long.

    b = BPF(text=PROGRAM)
    meanwhile = OffCpu(b, least_ns=5000)
    with b.trace(args) as session:
        …
    for what, ns in meanwhile.activity().explain(tid, call_ns, start_ns): …

Host programs at raw tracepoints write down what threads do that have launched something; nothing is known before a thread's
first launch, nor where this process may not load programs into the kernel (`known` tells).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpubpf.calls.probes import attach_records, raw_arguments
from gpubpf.ebpf.compile import capable
from gpubpf.errors import Error
from gpubpf.linux import btf
from gpubpf.process import syscalls
from gpubpf.program import BPF

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.linux.host_programs import Host

PROGRAM = r"""
#include <gpubpf.h>

#define STATES 0x907f /* TASK_REPORT, TASK_RTLOCK_WAIT, TASK_FROZEN */

/* Arguments of raw tracepoints. */
struct switch_arguments {
    u64 preempt, prev, next, prev_state;
};
struct enter_arguments {
    u64 registers, number;
};
/* The record of sched:sched_switch, for kernels before Linux 5.18, whose raw one does not have the state. */
struct switch_record {
    u64 common;
    char prev_comm[16];
    u32 prev_pid, prev_prio;
    u64 prev_state;
    char next_comm[16];
    u32 next_pid, next_prio;
};

struct settings {
    u64 least_ns;      /* shorter times are not written down */
    u64 device, inode; /* the tool's PID namespace: threads are told by their numbers there */
    u64 pid;           /* where it is in struct task_struct */
};
struct thread {
    u64 left_ns;    /* when it left the CPU; 0: it is on one */
    u64 entered_ns; /* when it entered the system call; 0: before it was watched */
    u64 state;
    s32 syscall; /* -1: none */
    u32 tid;
};
struct record {
    u64 start_ns, end_ns;
    u64 state; /* ~0: a system call; else off the CPU, with the state in which the thread left it */
    s32 syscall;
    u32 tid;
};

GPU_PARAM(settings, struct settings);
BPF_TABLE("lru_hash", u32, struct thread, threads, 16384);
BPF_RINGBUF_OUTPUT(records, 2048);
BPF_ARRAY(lost, u64, 1);

static __always_inline void write_down(struct thread *t, u64 start, u64 end, u64 state)
{
    int zero = 0;
    struct settings *s = settings.lookup(&zero);

    if (!s || end - start < s->least_ns)
        return;
    struct record r = {.start_ns = start, .end_ns = end, .state = state, .syscall = t->syscall, .tid = t->tid};
    if (records.ringbuf_output(&r, sizeof(r), 1 /* BPF_RB_NO_WAKEUP: the tool looks by itself */)) {
        u64 *n = lost.lookup(&zero);

        if (n)
            __sync_fetch_and_add(n, 1);
    }
}

int offcpu_launch(struct gpu_launch *ctx)
{
    u32 tid = bpf_get_current_pid_tgid();
    int zero = 0;
    struct settings *s = settings.lookup(&zero);

    if (!s || threads.lookup(&tid))
        return 0;
    struct bpf_pidns_info seen = {};
    struct thread t = {.syscall = -1, .tid = tid};
    if (!bpf_get_ns_current_pid_tgid(s->device, s->inode, &seen, sizeof(seen)))
        t.tid = seen.pid;
    threads.update(&tid, &t);
    return 0;
}

static __always_inline int switched(u32 leaves, u32 comes, u64 state)
{
    struct thread *t = threads.lookup(&leaves);

    if (t) {
        t->state = state;
        t->left_ns = bpf_ktime_get_ns();
    }
    t = threads.lookup(&comes);
    if (t && t->left_ns) {
        write_down(t, t->left_ns, bpf_ktime_get_ns(), t->state);
        t->left_ns = 0;
    }
    return 0;
}

/* The thread that leaves is still the current one. */
int offcpu_switch(struct switch_arguments *ctx)
{
    int zero = 0;
    u32 comes = 0;
    struct settings *s = settings.lookup(&zero);

    if (s)
        bpf_probe_read_kernel(&comes, sizeof(comes), (void *)(ctx->next + s->pid));
    return switched(bpf_get_current_pid_tgid(), comes, (u8)ctx->preempt ? 0 : ctx->prev_state & STATES);
}

int offcpu_switch_record(struct switch_record *ctx)
{
    return switched(ctx->prev_pid, ctx->next_pid, ctx->prev_state);
}

int offcpu_enter(struct enter_arguments *ctx)
{
    u32 tid = bpf_get_current_pid_tgid();
    struct thread *t = threads.lookup(&tid);

    if (t) {
        t->syscall = ctx->number;
        t->entered_ns = bpf_ktime_get_ns();
    }
    return 0;
}

int offcpu_exit(void *ctx)
{
    u32 tid = bpf_get_current_pid_tgid();
    struct thread *t = threads.lookup(&tid);

    if (t) {
        if (t->entered_ns)
            write_down(t, t->entered_ns, bpf_ktime_get_ns(), ~0ULL);
        t->syscall = -1;
        t->entered_ns = 0;
    }
    return 0;
}

int offcpu_ends(void *ctx)
{
    u32 tid = bpf_get_current_pid_tgid();

    threads.delete(&tid);
    return 0;
}
"""
_SYSCALL = (1 << 64) - 1  # as `state`
_PREEMPTED = 0x100  # TASK_REPORT_MAX, in records; 0 is TASK_RUNNING: both could have gone on
_STOPPED = 4 | 8
_SWITCH = "sched_switch"
_SWITCH_ARGUMENTS = 4  # the state that a thread is left in is the last
_SWITCH_RECORD = {"prev_pid": (24, 4), "prev_state": (32, 8), "next_pid": (56, 4)}
_AT = {"sys_enter": "offcpu_enter", "sys_exit": "offcpu_exit", "sched_process_exit": "offcpu_ends"}
_POLL = 0.1  # seconds; the ring holds 200,000 records


@dataclass(frozen=True)
class Activity:
    """What was written down, by thread: records sorted by time, off the CPU (`spans`) and in long system calls (`syscalls`).

    Both have the fields start_ns, end_ns (CLOCK_MONOTONIC), state, syscall (-1: none), tid; those of one thread do not overlap.
    `lost` records found no room.
    """

    spans: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    syscalls: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    lost: int = 0

    def explain(self, tid: int, start_ns: int, end_ns: int) -> list[tuple[str, int]]:
        """See `explain`. Empty for a thread of which nothing is known."""
        return explain(self.spans.get(tid), self.syscalls.get(tid), start_ns, end_ns)


def activity_of(records: np.ndarray[Any, Any], lost: int = 0) -> Activity:
    """Records in any order, by thread."""
    import numpy as np

    made = Activity({}, {}, lost)
    ordered = records[np.lexsort((records["start_ns"], records["tid"]))]
    is_call = ordered["state"] == _SYSCALL
    for kind, found in ((made.syscalls, ordered[is_call]), (made.spans, ordered[~is_call])):
        tids, first = np.unique(found["tid"], return_index=True)
        for tid, part in zip(tids.tolist(), np.split(found, first[1:]), strict=bool(len(tids))):
            kind[tid] = part
    return made


def explain(
    spans: np.ndarray[Any, Any] | None,
    calls: np.ndarray[Any, Any] | None,
    start_ns: int,
    end_ns: int,
) -> list[tuple[str, int]]:
    """What a thread did from `start_ns` to `end_ns` beside running its own code: (what, ns), the longest first.

    `spans` and `calls` are that thread's, sorted. Such as ("off-CPU, blocked in futex", 180000), ("off-CPU, preempted", 4000)
    and, of the time in long system calls in which it was on the CPU, ("in ioctl", 12000).
    """
    total: Counter[str] = Counter()
    off = _within(spans, start_ns, end_ns)
    for begin, end, state, number in off:
        total["off-CPU, " + _reason(state, number)] += end - begin
    for begin, end, _, number in _within(calls, start_ns, end_ns):
        away = sum(max(0, min(end, e) - max(begin, b)) for b, e, _, _ in off)
        if syscalls.name(number) not in ("uprobe", "uretprobe"):  # that is our own way in
            total[f"in {syscalls.name(number)}"] += end - begin - away
    return [(what, ns) for what, ns in total.most_common() if ns > 0]


def _within(
    records: np.ndarray[Any, Any] | None, start_ns: int, end_ns: int
) -> list[tuple[int, int, int, int]]:
    """(start, end, state, syscall) of what lies in a time, cut to it."""
    if records is None or start_ns >= end_ns:
        return []
    first = records["end_ns"].searchsorted(start_ns, "right")
    last = records["start_ns"].searchsorted(end_ns, "left")
    return [
        (max(int(r["start_ns"]), start_ns), min(int(r["end_ns"]), end_ns), int(r["state"]), int(r["syscall"]))
        for r in records[first:last]
    ]


def _reason(state: int, number: int) -> str:
    if state & _PREEMPTED or not state:
        return "preempted"
    what = "stopped" if state & _STOPPED else "blocked"
    return f"{what} in {syscalls.name(number)}" if number >= 0 else what


class OffCpu:
    """Attaches itself to a tool's `BPF`: what it needs comes and goes with that measurement."""

    def __init__(self, owner: BPF, least_ns: int = 5000) -> None:
        """`least_ns`: shorter times off the CPU, and shorter system calls, are not written down."""
        self.known = False
        self._records: list[np.ndarray[Any, Any]] = []
        self._host: Host | None = None
        self._lost = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._bpf = BPF(text=PROGRAM)
        place = os.stat("/proc/self/ns/pid")
        self._settings = {"least_ns": least_ns, "device": place.st_dev, "inode": place.st_ino}
        self._bpf.attach_launch("offcpu_launch")
        for name, function in _AT.items():
            self._bpf.attach_raw_tracepoint(name, function)
        owner.companions.append(self)

    def host(
        self, args: argparse.Namespace | None, note: Callable[[str], None], virtual: bool = False
    ) -> Host | None:
        """Starts. Where it cannot, a note says what is not known, and the measurement goes on without."""
        try:
            if virtual:
                raise Error("the clock is virtual, and they run on the real one")
            if not capable():
                raise Error("no CAP_BPF")
            self._attach_switch()
            self._host = self._bpf.host(args, note)
        except (Error, OSError) as error:
            said = str(error).split(";")[0]
            note(f"what launching threads did meanwhile is unknown: {said}")
            return None
        if self._host is None:
            return None
        self._host.on_detached = self._end
        self.known = True
        threading.Thread(target=self._poll, name="gpubpf-offcpu", daemon=True).start()
        return self._host

    def _attach_switch(self) -> None:
        """At the raw tracepoint, if this kernel tells enough there."""
        with contextlib.suppress(Error):
            self._settings["pid"] = btf.member("task_struct", "pid").offset
        self._bpf["settings"].set(self._settings)
        if "pid" in self._settings and raw_arguments(_SWITCH, _SWITCH_ARGUMENTS):
            self._bpf.attach_raw_tracepoint(_SWITCH, "offcpu_switch")
        else:
            attach_records(self._bpf, f"sched:{_SWITCH}", _SWITCH_RECORD, "offcpu_switch_record")

    def _poll(self) -> None:
        while not self._over.wait(_POLL):
            self._take()

    def _take(self) -> None:
        with self._lock:
            if self._host is not None:
                found = self._host.records("records")
                if len(found):
                    self._records.append(found)

    def _end(self) -> None:
        """Takes the last records, and what still goes on when the measurement ends."""
        import numpy as np

        self._over.set()
        self._take()
        with self._lock:
            host, self._host = self._host, None
            if host is None:
                return
            self._lost = int(host.items("lost")["value"][0])
            now = time.monotonic_ns()
            state = host.items("threads")["value"]
            dtype = self._bpf.maps["records"].value_dtype
            for start in ("left_ns", "entered_ns"):
                still = state[state[start] > 0]
                open_ = np.zeros(len(still), dtype)
                open_["start_ns"], open_["end_ns"] = still[start], now
                open_["tid"], open_["syscall"] = still["tid"], still["syscall"]
                open_["state"] = still["state"] if start == "left_ns" else _SYSCALL
                self._records.append(open_[open_["start_ns"] < now])

    def activity(self) -> Activity:
        """What is known so far."""
        import numpy as np

        self._take()
        with self._lock:
            if not self._records:
                return Activity(lost=self._lost)
            lost = int(self._host.items("lost")["value"][0]) if self._host is not None else self._lost
            return activity_of(np.concatenate(self._records), lost)
