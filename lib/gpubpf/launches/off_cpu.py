"""Record when launching threads are off the CPU, and why, and their long system calls.

    b = BPF(text=PROGRAM)
    off_cpu = OffCpu(b, least_ns=5000)
    with b.trace(options) as session:
        …
    for what, ns in off_cpu.activity().explain(thread, call_ns, start_ns): …
    off_cpu.forget(before_ns)

Host programs at launches and tracepoints record the activity of threads, each from its first launch on.
Nothing is recorded if this process may not load eBPF programs; then `known` is False.

calls/delay_probes.py also measures off-CPU times, and shares the decoding of context switches with this file
(gpubpf_switch.h, linux/tracepoints.py). The rest differs. This file records each off-CPU time and long system
call of the launching threads, to explain single launches afterwards. calls/ sums times by call and reason in
the kernel, so that it can measure for days.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpubpf.errors import Error
from gpubpf.kernel import privileges, syscalls
from gpubpf.linux import btf, tracepoints
from gpubpf.program import BPF
from gpubpf.record import Record, field

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.linux.host_programs import Host
    from gpubpf.show.parsed import Options

PROGRAM = r"""
#include <gpubpf_switch.h>

/* Arguments of a raw tracepoint. */
struct enter_arguments {
    u64 registers, number;
};

struct settings {
    u64 least_ns;      /* shorter times are not recorded */
    u64 device, inode; /* the tool's PID namespace */
    u64 pid;           /* offset of pid in struct task_struct */
    u64 thread_pid, level, numbers; /* offsets in struct task_struct and in struct pid; 0: unknown */
};
struct thread {
    u64 left_ns;    /* when it left the CPU; 0: it is on one */
    u64 entered_ns; /* when it entered the system call; 0: before its first launch */
    u64 state;
    s64 syscall; /* -1: none */
    u64 thread;  /* as the operation log has it: number of the process << 32 | TID in its own PID namespace */
};
struct record {
    u64 start_ns, end_ns;
    u64 state; /* ~0: a system call. Otherwise: a time off the CPU, and the state in which the thread left it */
    s64 syscall;
    u64 thread;
};

GPU_PARAM(settings, struct settings);
BPF_TABLE("lru_hash", u32, struct thread, threads, 16384);
BPF_RINGBUF_OUTPUT(records, 2048);
BPF_ARRAY(lost, u64, 1);

static __always_inline void lose(void)
{
    int zero = 0;
    u64 *n = lost.lookup(&zero);

    if (n)
        __sync_fetch_and_add(n, 1);
}

static __always_inline void record_time(struct thread *t, u64 start, u64 end, u64 state)
{
    int zero = 0;
    struct settings *s = settings.lookup(&zero);

    if (!s || end - start < s->least_ns)
        return;
    struct record r = {.start_ns = start, .end_ns = end, .state = state, .syscall = t->syscall, .thread = t->thread};
    if (records.ringbuf_output(&r, sizeof(r), 1 /* BPF_RB_NO_WAKEUP: the tool polls */))
        lose();
}

/* The thread that was off the CPU is back. */
static __always_inline void is_back(struct thread *t)
{
    if (!t->left_ns)
        return;
    record_time(t, t->left_ns, bpf_ktime_get_ns(), t->state);
    t->left_ns = 0;
}

/* It was back before, but the kernel did not report that switch. */
static __always_inline void was_back(struct thread *t)
{
    if (!t->left_ns)
        return;
    lose();
    t->left_ns = 0;
}

/* Return the current thread's TID in its own PID namespace, as gettid(2) does. */
static __always_inline u32 own_tid(struct settings *s)
{
    u32 tid = bpf_get_current_pid_tgid(), level = 0;
    struct bpf_pidns_info seen = {};
    u64 pid = 0;

    if (s->thread_pid) {
        bpf_probe_read_kernel(&pid, sizeof(pid), (void *)(bpf_get_current_task() + s->thread_pid));
        bpf_probe_read_kernel(&level, sizeof(level), (void *)(pid + s->level));
        bpf_probe_read_kernel(&tid, sizeof(tid), (void *)(pid + s->numbers + 16 * level)); /* nr of struct upid */
    } else if (!bpf_get_ns_current_pid_tgid(s->device, s->inode, &seen, sizeof(seen))) {
        tid = seen.pid;
    }
    return tid;
}

int offcpu_launch(struct gpu_launch *ctx)
{
    u32 tid = bpf_get_current_pid_tgid();
    u64 process = ctx->launch >> 40 << 32;
    int zero = 0;
    struct settings *s = settings.lookup(&zero);
    struct thread *known = threads.lookup(&tid);

    if (known) {
        known->thread = process | (u32)known->thread; /* after exec, it is another process */
    } else if (s) {
        struct thread t = {.syscall = -1, .thread = process | own_tid(s)};
        threads.update(&tid, &t);
    }
    return 0;
}

static __always_inline int switched(u32 leaves, u32 comes, u64 state)
{
    struct thread *t = threads.lookup(&leaves);

    if (t) {
        was_back(t);
        t->state = state;
        t->left_ns = bpf_ktime_get_ns();
    }
    t = threads.lookup(&comes);
    if (t)
        is_back(t);
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
    return switched(bpf_get_current_pid_tgid(), comes, switch_state(ctx));
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
        was_back(t);
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
        is_back(t); /* at the latest now, if the kernel did not report the switch */
        if (t->entered_ns)
            record_time(t, t->entered_ns, bpf_ktime_get_ns(), ~0ULL);
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
_SYSCALL = (1 << 64) - 1  # `state` of a system call
_PREEMPTED, _STOPPED = 0x100, 4 | 8  # SWITCH_RUNNABLE, SWITCH_STOPPED; a state of 0 means preempted, too
_PROGRAMS = {"sys_enter": "offcpu_enter", "sys_exit": "offcpu_exit", "sched_process_exit": "offcpu_ends"}
_POLL = 0.1  # seconds; the ring has room for 200,000 records
_FULL = 1 << 18  # new records after which `forget` is due
_LONGEST_CALL = 60_000_000_000  # ns; a launch is in the log only after its call has returned


class Activity(Record):
    """What was recorded, by thread and sorted by time: off-CPU times (`spans`) and long system calls
    (`syscalls`).

    A thread is the number of its process in the session << 32 | its TID in its own PID namespace. Records have the
    fields start_ns, end_ns (CLOCK_MONOTONIC), state, syscall (-1: none) and thread. Records of one kind and thread
    do not overlap. `lost`: how many did not fit into the ring buffer, or have no known end.
    """

    spans: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    syscalls: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    lost: int = 0

    def added(self, new: Activity) -> Activity:
        """Return the activity together with newer records."""
        return Activity(_added(self.spans, new.spans), _added(self.syscalls, new.syscalls), new.lost)

    def since(self, ns: int) -> Activity:
        """Return the activity without the records that ended before a time."""
        return Activity(_since(self.spans, ns), _since(self.syscalls, ns), self.lost)

    def explain(self, thread: int, start_ns: int, end_ns: int) -> list[tuple[str, int]]:
        """Call the function `explain` for a thread. The list is empty if nothing is known about the thread."""
        return explain(self.spans.get(thread), self.syscalls.get(thread), start_ns, end_ns)


def activity_of(records: np.ndarray[Any, Any], lost: int = 0) -> Activity:
    """Return records, which may be in any order, by thread and sorted by time."""
    import numpy as np

    made = Activity({}, {}, lost)
    ordered = records[np.lexsort((records["start_ns"], records["thread"]))]
    is_call = ordered["state"] == _SYSCALL
    for kind, found in ((made.syscalls, ordered[is_call]), (made.spans, ordered[~is_call])):
        threads, first = np.unique(found["thread"], return_index=True)
        for thread, part in zip(threads.tolist(), np.split(found, first[1:]), strict=bool(len(threads))):
            kind[thread] = part
    return made


def _added(
    known: dict[int, np.ndarray[Any, Any]], new: dict[int, np.ndarray[Any, Any]]
) -> dict[int, np.ndarray[Any, Any]]:
    import numpy as np

    made = known | new
    for tid in known.keys() & new.keys():
        made[tid] = np.concatenate([known[tid], new[tid]])
        if new[tid]["start_ns"][0] < known[tid]["start_ns"][-1]:
            made[tid] = made[tid][np.argsort(made[tid]["start_ns"], kind="stable")]
    return made


def _since(known: dict[int, np.ndarray[Any, Any]], ns: int) -> dict[int, np.ndarray[Any, Any]]:
    rest = {tid: part[part["end_ns"].searchsorted(ns) :].copy() for tid, part in known.items()}
    return {tid: part for tid, part in rest.items() if len(part)}


def explain(
    spans: np.ndarray[Any, Any] | None,
    calls: np.ndarray[Any, Any] | None,
    start_ns: int,
    end_ns: int,
) -> list[tuple[str, int]]:
    """Return what a thread did from `start_ns` to `end_ns` besides running its own code, as (what, ns), the
    longest first.

    `spans` and `calls` are those of the thread, sorted. Examples: ("off-CPU, blocked in futex", 180000),
    ("off-CPU, preempted", 4000), and for time on the CPU in a long system call ("in ioctl", 12000).
    """
    total: Counter[str] = Counter()
    off, inside = _within(spans, start_ns, end_ns), _within(calls, start_ns, end_ns)
    for begin, end, state, number in off:
        total["off-CPU, " + _reason(state, number)] += end - begin
    for (begin, end, _, number), away in zip(inside, _away(off, inside), strict=True):
        if syscalls.name(number) not in ("uprobe", "uretprobe"):
            # Probes enter the kernel through these two, so they are gpubpf's own overhead.
            total[f"in {syscalls.name(number)}"] += end - begin - away
    return [(what, ns) for what, ns in total.most_common() if ns > 0]


def _away(off: list[tuple[int, int, int, int]], calls: list[tuple[int, int, int, int]]) -> list[int]:
    """Return how long the thread was off the CPU in each system call."""
    import numpy as np

    if not off or not calls:
        return [0] * len(calls)
    starts, ends = np.array([span[:2] for span in off], np.int64).T
    before = np.append(0, np.cumsum(ends - starts))  # the time off the CPU before each span
    times = np.array([call[:2] for call in calls], np.int64)
    last = starts.searchsorted(times, "right") - 1  # the span that began last; -1: none
    until = before[last + 1] - np.where(last >= 0, np.maximum(ends[last] - times, 0), 0)
    return [int(ns) for ns in until[:, 1] - until[:, 0]]


def _within(
    records: np.ndarray[Any, Any] | None, start_ns: int, end_ns: int
) -> list[tuple[int, int, int, int]]:
    """Return (start, end, state, syscall) of the records that overlap an interval, clipped to it."""
    if records is None or start_ns >= end_ns:
        return []
    first = records["end_ns"].searchsorted(start_ns, "right")
    last = records["start_ns"].searchsorted(end_ns, "left")
    columns = (records[name][first:last].tolist() for name in ("start_ns", "end_ns", "state", "syscall"))
    return [
        (max(start, start_ns), min(end, end_ns), state, number)
        for start, end, state, number in zip(*columns, strict=True)
    ]


def _reason(state: int, number: int) -> str:
    if state & _PREEMPTED or not state:
        return "preempted"
    what = "stopped" if state & _STOPPED else "blocked"
    return f"{what} in {syscalls.name(number)}" if number >= 0 else what


class OffCpu:
    """The programs that record off-CPU times. They are attached and detached together with the tool's own
    programs.
    """

    def __init__(self, owner: BPF, least_ns: int = 5000) -> None:
        """Prepare the programs. Off-CPU times and system calls shorter than `least_ns` are not recorded."""
        self.known = False
        self._records: list[np.ndarray[Any, Any]] = []  # records that are not in `_activity` yet
        self._activity = Activity()
        self._host: Host | None = None
        self._lost = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._bpf = BPF(text=PROGRAM)
        place = os.stat("/proc/self/ns/pid")
        self._settings = {"least_ns": least_ns, "device": place.st_dev, "inode": place.st_ino}
        self._bpf.attach_launch("offcpu_launch")
        for name, function in _PROGRAMS.items():
            self._bpf.attach_raw_tracepoint(name, function)
        owner.attached.companions.append(self)

    def host(
        self, options: Options | None, note: Callable[[str], None], virtual: bool = False
    ) -> Host | None:
        """Load and attach the programs. If that fails, pass a notice to `note`; the measurement continues
        without them.
        """
        try:
            if virtual:
                raise Error("they are on the real clock, and the measurement is on the virtual clock")
            if not privileges.capable():
                raise Error("no CAP_BPF")
            self._attach_switch()
            self._host = self._bpf.host(options, note)
        except (Error, OSError) as error:
            said = str(error).split(";")[0]
            note(f"off-CPU times of launching threads are unknown: {said}")
            return None
        if self._host is None:
            return None
        self._host.on_detached = self._end
        self.known = True
        threading.Thread(target=self._poll, name="gpubpf-offcpu", daemon=True).start()
        return self._host

    def _attach_switch(self) -> None:
        """Attach to the raw tracepoint if it passes the thread's state, otherwise to the ordinary tracepoint."""
        with contextlib.suppress(Error):
            self._settings["pid"] = btf.member("task_struct", "pid").offset
        with contextlib.suppress(Error):
            self._settings |= {
                name: btf.member(structure, name).offset
                for structure, name in (("task_struct", "thread_pid"), ("pid", "level"), ("pid", "numbers"))
            }
        self._bpf["settings"].set(self._settings)
        event = tracepoints.switch_event(raw="pid" in self._settings)
        if event == tracepoints.RAW_SWITCH:
            self._bpf.attach_raw_tracepoint(event, "offcpu_switch")
        else:
            self._bpf.attach_tracepoint(event, "offcpu_switch_record")

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
        """Read the last records, and record what is still open when the measurement ends."""
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
            dtype = self._bpf.attached.programs.maps["records"].value_dtype
            for start in ("left_ns", "entered_ns"):
                still = state[state[start] > 0]
                open_ = np.zeros(len(still), dtype)
                open_["start_ns"], open_["end_ns"] = still[start], now
                open_["thread"], open_["syscall"] = still["thread"], still["syscall"]
                open_["state"] = still["state"] if start == "left_ns" else _SYSCALL
                self._records.append(open_[open_["start_ns"] < now])

    @property
    def full(self) -> bool:
        """Whether it is time to use `activity` and then `forget`."""
        return sum(map(len, self._records)) >= _FULL

    def activity(self) -> Activity:
        """Return what has been recorded so far and was not forgotten."""
        import numpy as np

        self._take()
        with self._lock:
            lost = int(self._host.items("lost")["value"][0]) if self._host is not None else self._lost
            new = Activity(lost=lost)
            if self._records:
                new = activity_of(np.concatenate(self._records), lost)
                self._records = []
            self._activity = self._activity.added(new)
            return self._activity

    def forget(self, before_ns: int) -> None:
        """Drop the records that ended before `before_ns`, the call time of the oldest launch that is still to be explained.

        A launch is in the log only after its call has returned, so the records of the last minute remain. If a call takes longer, its
        earlier records are lost.
        """
        until = max(min(before_ns, time.monotonic_ns() - _LONGEST_CALL), 0)
        with self._lock:
            self._activity = self._activity.since(until)
