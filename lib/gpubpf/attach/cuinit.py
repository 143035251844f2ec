"""Report every process that starts to use the CUDA driver, with eBPF programs at `cuInit` in driver files (`CuInitProbes`).

The programs are also attached at `hsa_queue_create` in AMD's ROCr files: a process needs a queue before it can launch a kernel.
Statements about cuInit here apply to both.

A uprobe is attached to a file, so it fires in every process that maps the file, in any namespace. When a process calls cuInit for the
first time, the program reports the thread through a ring buffer. Then the thread waits in the program until the hold helper has
stopped it (`release_thread`). So the thread is stopped at the entry of cuInit, where it holds no lock and has run no instruction of
the driver. It waits for WAIT_NS at most: if the helper is slow, or has exited, the thread continues.

For a process that the tool has finished with (`ignore_process`), the program does one hash lookup. When such a process executes
another program, or ends, that is reported, and the process is forgotten. The programs for this are at raw tracepoints, because the
kernel sometimes skips programs at tracepoints with records. A process that is not forgotten would not be reported again, and neither
would the next process with its ID.

The programs wait in a loop that the verifier can follow to its end, and restart themselves by tail calls. That works on every kernel
with the ring buffer (Linux 5.8). script/prebuild.py compiles them, so the hold helper needs neither bcc nor clang.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
from collections.abc import Callable

from gpubpf import own_files
from gpubpf.ebpf import bytecode, compile
from gpubpf.ebpf.bytecode import Program
from gpubpf.kernel import bpf_syscall
from gpubpf.kernel.bpf_syscall import KPROBE, RAW_TRACEPOINT, BpfRingBuffer
from gpubpf.lower.programs import PREBUILT
from gpubpf.process import kernel_waits
from gpubpf.record import Record

PROGRAM = r"""
#include <uapi/linux/ptrace.h>

#define TRACKED 1 /* states of a process: its exec and its end are reported */
#define IGNORED 2 /* ... and its calls of cuInit are not */
/*
 * Turns of the wait loop in one run of gpubpf_wait, which calls itself up to 33 times. The verifier follows every turn, and at most
 * 8192 branches.
 */
#define TURNS 2500

enum kind { CALLED_CUINIT, EXECUTED, ENDED };

struct settings {
    u64 device, inode; /* the tool's PID namespace; inode 0: the initial one, whose IDs are the kernel's */
    u64 wait_ns;
    u32 tool;          /* process that is never reported */
    u32 cpu;           /* the hold helper's; ~0: none */
};
struct waiting {
    u64 sp, since_ns;
    u64 released; /* the thread need not wait any longer */
};
struct event {
    u64 ts;
    u32 tid, pid;
    u64 sp, return_address;
    char comm[16];
    u32 kind, zero;
    u64 entry;
};

BPF_ARRAY(settings, struct settings, 1);
BPF_TABLE("lru_hash", u32, u32, processes, 65536); /* state by process ID */
BPF_HASH(threads, u32, struct waiting, 4096);      /* by thread ID */
BPF_RINGBUF_OUTPUT(events, 64);                    /* pages: 4000 events */
BPF_ARRAY(lost, u64, 1);
BPF_PROG_ARRAY(wait_program, 1);

/* The IDs of the current thread as the tool sees them. -1: its PID namespace has none for it. */
static __always_inline int current_ids(struct settings *s, u32 *pid, u32 *tid)
{
    struct bpf_pidns_info ids = {};
    u64 both;

    if (s->inode) {
        if (bpf_get_ns_current_pid_tgid(s->device, s->inode, &ids, sizeof(ids)))
            return -1;
        *pid = ids.tgid;
        *tid = ids.pid;
    } else {
        both = bpf_get_current_pid_tgid();
        *pid = both >> 32;
        *tid = both;
    }
    return 0;
}

static __always_inline void count_lost(void)
{
    int zero = 0;
    u64 *n = lost.lookup(&zero);

    if (n)
        __sync_fetch_and_add(n, 1);
}

static __always_inline int report(u32 kind, u64 ts, u32 pid, u32 tid, u64 sp, u64 return_address, u64 entry)
{
    struct event *e = events.ringbuf_reserve(sizeof(struct event));

    if (!e) {
        count_lost();
        return -1;
    }
    e->ts = ts;
    e->tid = tid;
    e->pid = pid;
    e->sp = sp;
    e->return_address = return_address;
    e->kind = kind;
    e->zero = 0;
    e->entry = entry;
    bpf_get_current_comm(e->comm, sizeof(e->comm));
    events.ringbuf_submit(e, BPF_RB_FORCE_WAKEUP);
    return 0;
}

/* At the entry of cuInit. */
int gpubpf_cuinit(struct pt_regs *ctx)
{
    u64 return_address = 0;
    u32 pid, tid, tracked = TRACKED, *state;
    struct waiting *before, w = {};
    int zero = 0;
    struct settings *s = settings.lookup(&zero);

    if (!s)
        return 0;
    if (current_ids(s, &pid, &tid)) {
        count_lost(); /* the tool looks through /proc then */
        return 0;
    }
    if (pid == s->tool)
        return 0;
    state = processes.lookup(&pid);
    if (!state)
        processes.update(&pid, &tracked);
    else if (*state == IGNORED)
        return 0;
    w.sp = PT_REGS_SP(ctx);
    before = threads.lookup(&tid);
    if (before && before->sp == w.sp)
        return 0; /* another probe on the same file, or a thread that is not held: reported once */
    w.since_ns = bpf_ktime_get_ns();
    threads.update(&tid, &w);
    bpf_probe_read_user(&return_address, sizeof(return_address), (void *)w.sp);
    if (report(CALLED_CUINIT, w.since_ns, pid, tid, w.sp, return_address, PT_REGS_IP(ctx)))
        return 0;
    if (bpf_get_smp_processor_id() == s->cpu)
        return 0; /* the hold helper preempts this thread, so it cannot go on anyway */
    wait_program.call(ctx, 0);
    return 0;
}

/* Runs until the tool releases the thread, or its time is up. */
int gpubpf_wait(struct pt_regs *ctx)
{
    struct waiting *w;
    u32 pid, tid;
    int zero = 0;
    u64 turn;
    struct settings *s = settings.lookup(&zero);

    if (!s || current_ids(s, &pid, &tid))
        return 0;
    w = threads.lookup(&tid);
    if (!w || bpf_ktime_get_ns() - w->since_ns > s->wait_ns)
        return 0;
#pragma clang loop unroll(disable)
    for (turn = 0; turn < TURNS; turn++) {
        if (*(volatile u64 *)&w->released)
            return 0;
        bpf_ktime_get_ns(); /* takes at least 20 ns */
        bpf_ktime_get_ns();
    }
    wait_program.call(ctx, 0);
    return 0;
}

static __always_inline int forget(u32 kind)
{
    u32 pid, tid;
    int zero = 0;
    struct settings *s = settings.lookup(&zero);

    if (!s || current_ids(s, &pid, &tid))
        return 0;
    if (kind == ENDED)
        threads.delete(&tid);
    if (!processes.lookup(&pid))
        return 0;
    if (kind == ENDED && tid != pid)
        return 0; /* the process counts as ended with its main thread: nobody can reach the others then */
    processes.delete(&pid);
    report(kind, bpf_ktime_get_ns(), pid, tid, 0, 0, 0);
    return 0;
}

/* At sched_process_exec. */
int gpubpf_exec(void *ctx)
{
    return forget(EXECUTED);
}

/* At sched_process_exit, of a thread. */
int gpubpf_exit(void *ctx)
{
    return forget(ENDED);
}
"""

WAIT_NS = 4_000_000  # longest time that a thread waits for the hold helper at the entry of cuInit
CALLED_CUINIT, EXECUTED, ENDED = range(3)  # enum kind
_TRACKED, _IGNORED = 1, 2
_SETTINGS = struct.Struct("<QQQII")  # struct settings
_WAITING = struct.Struct("<QQQ")  # struct waiting
_EVENT = struct.Struct("<QIIQQ16sI4xQ")  # struct event
_ID = struct.Struct("<I")
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, the inode of /proc/self/ns/pid


class Event(Record):
    """An event at time `ts` (ns, CLOCK_MONOTONIC).

    For a call of cuInit, `entry` is the function's address, and `return_address` is stored at `sp`. For other kinds, all three are 0.
    """

    kind: int
    ts: int
    pid: int
    tid: int
    sp: int
    return_address: int
    entry: int
    comm: str


class CuInitProbes:
    """The programs, loaded into the kernel.

    tool: ID of a process that is never reported.
    note: called with notices for the user, on other threads.
    cpu: the CPU on which the reader of the events runs, at a higher priority than ordinary threads; -1: none. A thread that calls
        cuInit on this CPU need not wait, because it cannot continue before the reader has run.

    Raises OSError if the kernel refuses, or if this process lacks a privilege.
    """

    def __init__(self, tool: int, cpu: int, note: Callable[[str], None] = lambda text: None) -> None:
        self._note = note
        self._files = contextlib.ExitStack()
        self._uprobes: dict[str, list[int]] = {}
        program = _prebuilt_program()
        with contextlib.ExitStack() as stack:
            self._maps = {
                name: self._close_with(
                    stack, bpf_syscall.create_map(*map_.kernel_attributes, name=f"gpubpf_{name}")
                )
                for name, map_ in program.maps.items()
            }
            bpf_syscall.update(self._maps["settings"], bytes(4), _settings(tool, cpu))
            wait_program = self._load(stack, program, KPROBE, "gpubpf_wait")
            bpf_syscall.update(self._maps["wait_program"], bytes(4), struct.pack("<I", wait_program))
            self._cuinit_program = self._load(stack, program, KPROBE, "gpubpf_cuinit")
            for event in "exec", "exit":
                file = self._load(stack, program, RAW_TRACEPOINT, f"gpubpf_{event}")
                self._close_with(stack, bpf_syscall.attach_raw_tracepoint(file, f"sched_process_{event}"))
            self._ring = BpfRingBuffer(self._maps["events"], program.maps["events"].capacity)
            stack.callback(self._ring.close)
            self._files = stack.pop_all()

    @staticmethod
    def _close_with(stack: contextlib.ExitStack, file: int) -> int:
        stack.callback(os.close, file)
        return file

    def _load(self, stack: contextlib.ExitStack, program: Program, kind: int, name: str) -> int:
        code = bytecode.encode(program.functions[name].instructions, self._maps)
        return self._close_with(stack, bpf_syscall.load_program(kind, code, program.license, name))

    def close(self) -> None:
        """Detach and unload all programs. Waiting threads continue."""
        with kernel_waits.guarded(self._note):
            bpf_syscall.close_all([file for files in self._uprobes.values() for file in files])
        self._files.close()

    @property
    def file(self) -> int:
        """A file descriptor that is readable while events are pending."""
        return self._maps["events"]

    def attach(
        self, path: str, offset: int, name: str = "", note: Callable[[str], None] = lambda text: None
    ) -> None:
        """Attach to the function at `offset` in a driver file. Raises OSError.

        name: for `remove`.
        note: called with notices for the user, on another thread.
        """
        with kernel_waits.guarded(note):
            probe = bpf_syscall.attach_uprobe(self._cuinit_program, path, offset)
        self._uprobes.setdefault(name, []).append(probe)

    def remove(self, name: str) -> None:
        """Remove the probes that were attached with this name, on another thread: now, or when no process holds its lock."""
        if files := self._uprobes.pop(name, []):
            threading.Thread(target=kernel_waits.close_later, args=(files, self._note), daemon=True).start()

    def events(self) -> list[Event]:
        """Return the unread events, in order."""
        found = []
        for record in self._ring.records():
            if len(record) == _EVENT.size:
                ts, tid, pid, sp, return_address, comm, kind, entry = _EVENT.unpack(record)
                name = comm.partition(b"\0")[0].decode(errors="replace")
                found.append(Event(kind, ts, pid, tid, sp, return_address, entry, name))
        return found

    def release_thread(self, event: Event) -> None:
        """Let this event's thread leave the program without further waiting. Other calls in the same stack frame are not reported
        until `forget_thread`."""
        with contextlib.suppress(FileNotFoundError):  # it ended
            waiting = _WAITING.pack(event.sp, 0, 1)
            bpf_syscall.update(self._maps["threads"], _ID.pack(event.tid), waiting, existing=True)

    def forget_thread(self, tid: int) -> None:
        """Report the next cuInit of this thread again, unless its process is ignored."""
        with contextlib.suppress(FileNotFoundError):
            bpf_syscall.delete(self._maps["threads"], _ID.pack(tid))

    def track_process(self, pid: int) -> None:
        """Report when a process executes another program or ends, as for a process that called cuInit."""
        self._set_state(pid, _TRACKED)

    def ignore_process(self, pid: int) -> None:
        """Do not report cuInit in a process until it executes another program or ends. That is reported."""
        self._set_state(pid, _IGNORED)

    def _set_state(self, pid: int, state: int) -> None:
        bpf_syscall.update(self._maps["processes"], _ID.pack(pid), struct.pack("<I", state))

    def stop_ignoring(self, pid: int) -> None:
        """Report cuInit for this process ID again, because the ignored process executed another program or has ended."""
        key = _ID.pack(pid)
        if bpf_syscall.lookup(self._maps["processes"], key, 4) == struct.pack("<I", _IGNORED):
            with contextlib.suppress(FileNotFoundError):
                bpf_syscall.delete(self._maps["processes"], key)

    @property
    def lost(self) -> int:
        """Number of cuInit calls and process ends that could not be reported."""
        value = bpf_syscall.lookup(self._maps["lost"], bytes(4), 8)
        return int.from_bytes(value or b"", "little")

    @property
    def skipped(self) -> int:
        """How often the kernel did not run the program at cuInit, because the CPU was inside another program or bpf(2).

        Linux 6.0 and later always run it. Linux before 5.12 does not count this.
        """
        return bpf_syscall.statistics(self._cuinit_program).missed


def _prebuilt_program() -> Program:
    """Return the compiled PROGRAM. Tests check that it is current."""
    return compile.from_json(json.loads(own_files.read(PREBUILT / "cuinit.json"))["program"], PROGRAM)


def _settings(tool: int, cpu: int) -> bytes:
    namespace = os.stat("/proc/self/ns/pid")
    device, inode = namespace.st_dev, namespace.st_ino
    if inode == _INITIAL_PID_NAMESPACE:
        inode = 0
    return _SETTINGS.pack(device, inode, WAIT_NS, tool, cpu & 0xFFFFFFFF)
