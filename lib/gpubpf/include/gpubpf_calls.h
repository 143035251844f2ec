/*
 * gpubpf_calls.h: count and time the calls that threads make to functions of a library, and optionally record each call.
 * docs/host-calls.md defines what is counted. calls/probes.py attaches the programs and reads the maps:
 *
 *     call_entry, call_return        uprobes at a function's entry and returns; bpf_get_attach_cookie returns the function's number
 *     call_newtask                   raw tracepoint task_newtask: trace the children of traced processes
 *     call_newtask_record            tracepoint task:task_newtask: the same on kernels without BTF
 *     call_exec, call_exit           raw tracepoints sched_process_exec and sched_process_exit: forget threads that end
 *     call_exit_thread               in place of call_exit if the raw tracepoint does not say whether the process ends
 *
 * Times are CLOCK_BOOTTIME. PIDs and TIDs are those of the tool's PID namespace if they exist there. The keys of call_threads and
 * call_targets are the kernel's own numbers.
 */
#ifndef GPUBPF_CALLS_H
#define GPUBPF_CALLS_H

#include <gpubpf.h>
#include <uapi/linux/ptrace.h>

#define CALL_GAP 0xffffffffu /* in place of a function's number: in no call */
#define CALL_NOWHERE 255     /* place of an argument that the function does not have */
#define CALL_MEMORY 10       /* place: the first word of `memory`; 0 to 5 are registers, 6 to 9 are words on the stack */
#define CALL_WORDS 5         /* words to read from the memory that an argument points to */
#define CALL_FUNCTIONS 2048
/* Added to a function's number: at its entry, that it can end in a jump to another function; at a return instruction, that no other
   function has it. */
#define CALL_MARK 0x10000
#define CALL_STEPS 8         /* buckets of a histogram for each factor of two */
#define CALL_SHIFT 6         /* the first bucket counts less than 1 << CALL_SHIFT ns */
#define CALL_BUCKETS 288     /* the last bucket counts 70 minutes and more */

/* How to interpret a call. */
struct call_layout {
    u8 launch; /* the function launches a kernel */
    u8 kernel; /* place of the kernel's handle */
    u8 result; /* 0: an error unless 0; 1: an error unless 0 or settings.ready; 2: not an error code */
    u8 stack;  /* number of arguments on the stack */
    u8 out;    /* place of the pointer to the handle or address that the call produces */
    u8 memory[2];  /* places of pointers to further arguments */
    u16 offset[2]; /* of these arguments in the memory, in bytes */
};

struct call_layouts {
    struct call_layout of[CALL_FUNCTIONS]; /* by the function's number */
};

struct call_settings {
    u64 slow_ns;      /* skip calls that took less */
    u64 inode, device; /* the tool's PID namespace; 0: the initial one, whose numbers are the kernel's */
    u32 generation;   /* of sums: the tool increments it, then reads the sums of the previous one */
    u32 ready;        /* the result "not ready", see struct call_layout */
    u32 pid;          /* offset of pid in struct task_struct */
    u32 many;         /* with more threads than this, entries of call_threads may have been evicted */
    u8 events;        /* record each call */
    u8 errors;        /* skip calls that succeeded */
    u8 everybody;     /* trace every process */
    u8 over;          /* ignore all events: the programs are detached one after another, which takes 0.1 s or more */
};

/* What a thread spent its time on, added up by gpubpf_delays.h. The first four are times off the CPU. */
struct call_spent {
    u64 preempted_ns, blocked_ns, io_ns, fault_ns, reclaim_ns;
    u32 faults, switches;
};

struct call_thread { /* members that each call needs are adjacent */
    u32 tgid, tid;
    u32 function; /* the function that it is in, or CALL_GAP */
    u32 jumps; /* that function can end in a jump to another one */
    u64 sp, entry_ns; /* of that call */
    u64 caller;       /* its return address */
    u64 inner;        /* calls of the same function inside it that have not returned */
    u64 kernel;
    u64 entry_off_ns;    /* its time off the CPU up to entry_ns */
    u64 launched_ns;     /* when its last launch returned; 0: it has not launched */
    u64 launched_off_ns; /* its time off the CPU up to launched_ns */
    struct call_spent spent; /* since its first call */
    u64 left_ns;             /* the members up to all_retransmits are gpubpf_delays.h's: when it left the CPU */
    u32 left_state;
    s32 left_syscall;
    u64 reclaim_ns; /* when it began to reclaim memory */
    u32 retransmits, all_retransmits;
    struct call_spent before; /* from here on, for the record of the call: `spent` at its entry, and its arguments */
    u64 out;                  /* address of the handle or address that the call produces */
    u64 arguments[6], stack[4], memory[2 * CALL_WORDS];
};

struct call_key {
    u32 tgid, function;
    u64 kernel;
    u32 generation, zero;
};

struct call_sum {
    u64 count, errors, ns, largest_ns, off_ns;
    u64 gaps, gap_ns, gap_largest_ns, gap_off_ns; /* since the return of the thread's previous launch */
    u64 error; /* the last error */
    u32 latency[CALL_BUCKETS];
    u32 gap[CALL_BUCKETS];
};

struct call_event {
    u64 start_ns, end_ns;
    u64 result;
    u64 out;    /* the handle or address that the call produced */
    u64 kernel;
    u64 gap_ns, gap_off_ns; /* of a launch: since the return of the thread's previous launch */
    struct call_spent spent;
    u64 cgroup;
    u64 arguments[6], stack[4], memory[2 * CALL_WORDS];
    u32 tgid, tid, function;
    u8 failed, launch, after; /* `after`: the thread has launched before */
    u8 zero;
    char comm[16];
};

struct call_process {
    u64 first_ns, cgroup;
    u64 ended_ns; /* 0: it has not ended, as far as is known */
    char comm[16];
};

/* Counters: see CallCounts in calls/probes.py. */
enum { CALL_LOST_RECORDS, CALL_LOST_SUMS, CALL_LOST_CALLS, CALL_LOST_PROCESSES, CALL_NESTED, CALL_ABANDONED, CALL_UNSEEN, CALL_COUNTS };

GPU_PARAM(call_settings, struct call_settings);
GPU_PARAM(call_filter, struct gpu_host_filter);
GPU_PARAM(call_layouts, struct call_layouts);
BPF_ARRAY(call_counts, u64, CALL_COUNTS);
BPF_ARRAY(call_known, u64, 1); /* how many threads have been put into call_threads, and have not ended */
BPF_ARRAY(call_no_thread, struct call_thread, 1); /* zeros, because the stack is too small for them */
BPF_ARRAY(call_no_sum, struct call_sum, 1);
BPF_TABLE("lru_hash", u32, struct call_thread, call_threads, 16384);
BPF_TABLE("lru_hash", u32, struct call_process, call_processes, 16384); /* processes that have made calls */
BPF_HASH(call_targets, u32, u8, 65536);
BPF_HASH(call_wanted, u32, u8, 1024); /* targets by their PID in the tool's PID namespace, if that is not the initial one */
BPF_F_TABLE("hash", struct call_key, struct call_sum, call_sums, 32768, 1 /* BPF_F_NO_PREALLOC */);

GPU_RINGBUF(call_events, struct call_event, 1); /* the tool sets the size */

static __always_inline void call_count(int which)
{
    u64 *n = call_counts.lookup(&which);

    if (n)
        __sync_fetch_and_add(n, 1);
}

static __always_inline u64 call_off_ns(const struct call_spent *s)
{
    return s->preempted_ns + s->blocked_ns + s->io_ns + s->fault_ns;
}

/* Return whether the measurement is over. The state of threads then no longer changes, because some programs may already be detached. */
static __always_inline int call_over(void)
{
    int zero = 0;
    struct call_settings *s = call_settings.lookup(&zero);

    return !s || s->over;
}

/* Count a missed switch: the current thread has come back to the CPU, and the kernel did not report it. It is not known how
   long it was off the CPU. */
static __always_inline void call_seen(struct call_thread *t)
{
    if (!t->left_ns)
        return;
    t->left_ns = 0;
    call_count(CALL_UNSEEN);
}

/* Return whether the current process is traced. */
static __always_inline int call_measured(const struct call_settings *s, u32 tgid)
{
    struct bpf_pidns_info seen = {};

    if (s->everybody || call_targets.lookup(&tgid))
        return 1;
    if (!s->inode || bpf_get_ns_current_pid_tgid(s->device, s->inode, &seen, sizeof(seen)))
        return 0;
    return call_wanted.lookup(&seen.tgid) != 0;
}

/* Get the PID and TID of the current thread in the tool's PID namespace, or the kernel's if they do not exist there. */
static __always_inline void call_numbers(const struct call_settings *s, u64 id, struct bpf_pidns_info *seen)
{
    seen->tgid = id >> 32;
    seen->pid = id;
    if (s->inode && bpf_get_ns_current_pid_tgid(s->device, s->inode, seen, sizeof(*seen))) {
        seen->tgid = id >> 32;
        seen->pid = id;
    }
}

static __always_inline struct call_thread *call_new_thread(const struct call_settings *s, u64 id)
{
    u32 tid = id;
    int zero = 0;
    struct call_thread *t = call_no_thread.lookup(&zero);
    struct call_process p = {}, *before;
    struct bpf_pidns_info seen;
    u64 *known;

    if (!t)
        return 0;
    call_threads.update(&tid, t);
    t = call_threads.lookup(&tid);
    if (!t)
        return 0;
    call_numbers(s, id, &seen);
    known = call_known.lookup(&zero);
    if (known)
        __sync_fetch_and_add(known, 1);
    t->function = CALL_GAP;
    t->left_syscall = -1;
    t->tgid = seen.tgid;
    t->tid = seen.pid;
    before = call_processes.lookup(&seen.tgid);
    if (!before || before->ended_ns) {
        p.first_ns = bpf_ktime_get_boot_ns();
        p.cgroup = bpf_get_current_cgroup_id();
        bpf_get_current_comm(p.comm, sizeof(p.comm));
        call_processes.update(&seen.tgid, &p);
    }
    return t;
}

static __always_inline u64 call_word(u64 address)
{
    u64 word = 0;

    bpf_probe_read_user(&word, sizeof(word), (void *)address);
    return word;
}

static __always_inline u64 call_argument(struct pt_regs *ctx, u8 place)
{
    if (place == 0)
        return PT_REGS_PARM1(ctx);
    if (place == 1)
        return PT_REGS_PARM2(ctx);
    if (place == 2)
        return PT_REGS_PARM3(ctx);
    if (place == 3)
        return PT_REGS_PARM4(ctx);
    if (place == 4)
        return PT_REGS_PARM5(ctx);
    if (place == 5)
        return PT_REGS_PARM6(ctx);
    return call_word(PT_REGS_SP(ctx) + 8 + 8 * (place - 6));
}

static __always_inline void call_read(struct pt_regs *ctx, u8 place, u16 offset, u64 *words)
{
    u64 at = call_argument(ctx, place) + offset;

    if (bpf_probe_read_user(words, CALL_WORDS * 8, (void *)at))
        bpf_probe_read_user(words, 8, (void *)at); /* the rest may not be mapped */
}

int call_entry(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid(), sp = PT_REGS_SP(ctx), word;
    u32 tid = id, cookie = bpf_get_attach_cookie(ctx), function = cookie & (CALL_MARK - 1);
    int zero = 0;
    struct call_settings *s = call_settings.lookup(&zero);
    struct gpu_host_filter *filter = call_filter.lookup(&zero);
    struct call_layouts *layouts = call_layouts.lookup(&zero);
    struct call_layout *l;
    struct call_thread *t = call_threads.lookup(&tid);

    if (!s || s->over || !filter || !layouts || function >= CALL_FUNCTIONS)
        return 1;
    l = &layouts->of[function];
    if (!t && !call_measured(s, id >> 32))
        return 1;
    if (!gpu_host_selected(filter))
        return 1;
    if (!t)
        t = call_new_thread(s, id);
    if (!t) {
        call_count(CALL_LOST_CALLS);
        return 0;
    }
    word = call_word(sp);
    if (t->function != CALL_GAP) {
        /* While that call has not returned, its return address is where it was. Then this call is inside it. If that call ended with a
           jump to this function, both have the same return address. */
        if ((sp < t->sp || (sp == t->sp && t->jumps && t->function != function)) && call_word(t->sp) == t->caller) {
            if (t->function == function)
                t->inner++;
            call_count(CALL_NESTED);
            return 1;
        }
        call_count(CALL_ABANDONED);
    }
    call_seen(t);
    t->kernel = l->kernel < CALL_MEMORY ? call_argument(ctx, l->kernel) : 0;
    if (s->events) {
        t->before = t->spent;
        t->arguments[0] = PT_REGS_PARM1(ctx);
        t->arguments[1] = PT_REGS_PARM2(ctx);
        t->arguments[2] = PT_REGS_PARM3(ctx);
        t->arguments[3] = PT_REGS_PARM4(ctx);
        t->arguments[4] = PT_REGS_PARM5(ctx);
        t->arguments[5] = PT_REGS_PARM6(ctx);
        if (l->stack)
            bpf_probe_read_user(t->stack, sizeof(t->stack), (void *)(sp + 8));
        t->out = l->out < CALL_MEMORY ? call_argument(ctx, l->out) : 0;
    }
    if (l->memory[0] < CALL_MEMORY && (s->events || l->kernel == CALL_MEMORY)) {
        call_read(ctx, l->memory[0], l->offset[0], t->memory);
        if (l->memory[1] < CALL_MEMORY)
            call_read(ctx, l->memory[1], l->offset[1], t->memory + CALL_WORDS);
        if (l->kernel == CALL_MEMORY)
            t->kernel = t->memory[0];
    }
    t->sp = sp;
    t->caller = word;
    t->jumps = cookie & CALL_MARK;
    t->inner = 0;
    t->entry_off_ns = call_off_ns(&t->spent);
    t->function = function;
    t->entry_ns = bpf_ktime_get_boot_ns();
    return 0;
}

static __always_inline void call_tally(u32 *buckets, u64 ns)
{
    u64 exponent, bucket = 0;

    if (ns >> CALL_SHIFT) {
        exponent = bpf_log2l(ns) - 1;
        bucket = 1 + (exponent - CALL_SHIFT) * CALL_STEPS + (ns >> (exponent - 3) & (CALL_STEPS - 1));
    }
    asm("" : "+r"(bucket)); /* otherwise the compiler compares a copy, and the verifier has no bounds for this one */
    if (bucket >= CALL_BUCKETS)
        bucket = CALL_BUCKETS - 1;
    __sync_fetch_and_add(&buckets[bucket], 1);
}

static __always_inline void call_raise(u64 *most, u64 value)
{
    u64 seen = *most, was;
    int tries;

#pragma unroll
    for (tries = 0; tries < 8; tries++) {
        if (value <= seen)
            return;
        was = __sync_val_compare_and_swap(most, seen, value);
        if (was == seen)
            return;
        seen = was;
    }
}

static __always_inline void call_add(const struct call_key *key, u64 ns, u64 off_ns, u64 error, int gap, u64 gap_ns, u64 gap_off_ns)
{
    struct call_sum *sum = call_sums.lookup((struct call_key *)key);
    int zero = 0;

    if (!sum) {
        sum = call_no_sum.lookup(&zero);
        if (!sum)
            return;
        call_sums.insert((struct call_key *)key, sum);
        sum = call_sums.lookup((struct call_key *)key);
        if (!sum) {
            call_count(CALL_LOST_SUMS);
            return;
        }
    }
    __sync_fetch_and_add(&sum->count, 1);
    __sync_fetch_and_add(&sum->ns, ns);
    if (error) {
        __sync_fetch_and_add(&sum->errors, 1);
        sum->error = error;
    }
    if (off_ns)
        __sync_fetch_and_add(&sum->off_ns, off_ns);
    call_raise(&sum->largest_ns, ns);
    call_tally(sum->latency, ns);
    if (!gap)
        return;
    __sync_fetch_and_add(&sum->gaps, 1);
    __sync_fetch_and_add(&sum->gap_ns, gap_ns);
    if (gap_off_ns)
        __sync_fetch_and_add(&sum->gap_off_ns, gap_off_ns);
    call_raise(&sum->gap_largest_ns, gap_ns);
    call_tally(sum->gap, gap_ns);
}

int call_return(struct pt_regs *ctx)
{
    u64 end_ns = bpf_ktime_get_boot_ns(), id = bpf_get_current_pid_tgid(), value = PT_REGS_RC(ctx), ns, off_ns, gap_ns, gap_off_ns;
    u32 tid = id, cookie = bpf_get_attach_cookie(ctx), function = cookie & (CALL_MARK - 1);
    int zero = 0, failed, gap;
    struct call_settings *s = call_settings.lookup(&zero);
    struct gpu_host_filter *filter = call_filter.lookup(&zero);
    struct call_layouts *layouts = call_layouts.lookup(&zero);
    struct call_layout *l;
    struct call_thread *t = call_threads.lookup(&tid);
    struct call_event *e;
    u64 *known;

    if (!s || s->over || !filter || !layouts || function >= CALL_FUNCTIONS)
        return 0;
    l = &layouts->of[function];
    if (!t) { /* the entry was evicted, or nobody saw it: the call began before the probes, or other code ends here, too */
        known = call_known.lookup(&zero);
        if (known && *known > s->many && call_measured(s, id >> 32) && gpu_host_selected(filter))
            call_count(CALL_LOST_CALLS);
        return 0;
    }
    if (t->function != function)
        return 0;
    if (t->sp != PT_REGS_SP(ctx)) { /* below it: in a hook, which the function's entry jumps to and which calls the rest */
        if (!(cookie & CALL_MARK) || PT_REGS_SP(ctx) > t->sp)
            return 0;
        if (t->inner) {
            t->inner--;
            return 0;
        }
    }
    call_seen(t);
    t->function = CALL_GAP;
    ns = end_ns - t->entry_ns;
    off_ns = call_off_ns(&t->spent) - t->entry_off_ns;
    gap = l->launch && t->launched_ns;
    gap_ns = t->entry_ns - t->launched_ns;
    gap_off_ns = t->entry_off_ns - t->launched_off_ns;
    if (l->launch) {
        t->launched_ns = end_ns;
        t->launched_off_ns = call_off_ns(&t->spent);
    }
    failed = l->result == 2 ? 0 : (u32)value && (l->result == 0 || (u32)value != s->ready);
    if (ns < s->slow_ns || (s->errors && !failed))
        return 0;

    struct call_key key = {.tgid = t->tgid, .function = function, .kernel = t->kernel, .generation = s->generation};
    call_add(&key, ns, off_ns, failed ? (u32)value : 0, gap, gap_ns, gap_off_ns);
    if (!s->events)
        return 0;
    e = call_events.ringbuf_reserve(sizeof(struct call_event));
    if (!e) {
        call_count(CALL_LOST_RECORDS);
        return 0;
    }
    e->start_ns = t->entry_ns;
    e->end_ns = end_ns;
    e->result = value;
    e->out = t->out ? call_word(t->out) : 0;
    e->kernel = t->kernel;
    e->gap_ns = gap ? gap_ns : 0;
    e->gap_off_ns = gap ? gap_off_ns : 0;
    e->spent.preempted_ns = t->spent.preempted_ns - t->before.preempted_ns;
    e->spent.blocked_ns = t->spent.blocked_ns - t->before.blocked_ns;
    e->spent.io_ns = t->spent.io_ns - t->before.io_ns;
    e->spent.fault_ns = t->spent.fault_ns - t->before.fault_ns;
    e->spent.reclaim_ns = t->spent.reclaim_ns - t->before.reclaim_ns;
    e->spent.faults = t->spent.faults - t->before.faults;
    e->spent.switches = t->spent.switches - t->before.switches;
    e->cgroup = bpf_get_current_cgroup_id();
    __builtin_memcpy(e->arguments, t->arguments, sizeof(e->arguments));
    __builtin_memcpy(e->stack, t->stack, sizeof(e->stack));
    __builtin_memcpy(e->memory, t->memory, sizeof(e->memory));
    e->tgid = t->tgid;
    e->tid = t->tid;
    e->function = function;
    e->failed = failed;
    e->launch = l->launch;
    e->after = gap;
    e->zero = 0;
    bpf_get_current_comm(e->comm, sizeof(e->comm));
    call_events.ringbuf_submit(e, 1 /* BPF_RB_NO_WAKEUP: the tool polls */);
    return 0;
}

/* Arguments of raw tracepoints. */
struct call_newtask_arguments {
    u64 task, flags;
};
struct call_exec_arguments {
    u64 task, old_pid;
};
struct call_exit_arguments {
    u64 task, group_dead;
};
/* The record of a tracepoint, as described in /sys/kernel/tracing/events. calls/probes.py checks the layout. */
struct call_newtask_record {
    u64 common;
    u32 pid;
    char comm[16];
    u32 unused;
    u64 flags;
};

/* Return the TID of a struct task_struct. */
static __always_inline u32 call_pid(u64 task)
{
    int zero = 0;
    u32 pid = 0;
    struct call_settings *s = call_settings.lookup(&zero);

    if (s)
        bpf_probe_read_kernel(&pid, sizeof(pid), (void *)(task + s->pid));
    return pid;
}

/* Trace a new process if its parent is traced. Otherwise do not trace it, even if a traced process had its PID before. */
static __always_inline int call_new_process(u32 pid, u64 flags)
{
    u8 one = 1;
    int zero = 0;
    struct call_settings *s = call_settings.lookup(&zero);

    if (!s || flags & 0x10000 /* CLONE_THREAD */)
        return 0;
    if (!call_measured(s, bpf_get_current_pid_tgid() >> 32))
        call_targets.delete(&pid);
    else if (call_targets.update(&pid, &one))
        call_count(CALL_LOST_PROCESSES);
    return 0;
}

int call_newtask(struct call_newtask_arguments *ctx)
{
    return ctx->flags & 0x10000 ? 0 : call_new_process(call_pid(ctx->task), ctx->flags);
}

int call_newtask_record(struct call_newtask_record *ctx)
{
    return call_new_process(ctx->pid, ctx->flags);
}

static __always_inline void call_thread_ends(u32 tid)
{
    struct call_thread *t = call_threads.lookup(&tid);
    int zero = 0;
    u64 *known;

    if (!t || call_over())
        return;
    known = call_known.lookup(&zero);
    if (known)
        __sync_fetch_and_add(known, -1);
    if (t->function != CALL_GAP)
        call_count(CALL_ABANDONED);
    call_threads.delete(&tid);
}

static __always_inline void call_process_ends(u64 id)
{
    int zero = 0;
    struct call_settings *s = call_settings.lookup(&zero);
    struct call_process *p;
    struct bpf_pidns_info seen;

    if (!s || s->over)
        return;
    call_numbers(s, id, &seen);
    p = call_processes.lookup(&seen.tgid);
    if (p)
        p->ended_ns = bpf_ktime_get_boot_ns();
}

/* A process executes another program. The thread that calls execve gets the TID of the main thread. */
int call_exec(struct call_exec_arguments *ctx)
{
    u64 id = bpf_get_current_pid_tgid();
    u32 old = ctx->old_pid;

    call_thread_ends(old);
    if (old != (u32)id)
        call_thread_ends(id);
    call_process_ends(id);
    return 0;
}

int call_exit_thread(void *ctx)
{
    call_thread_ends(bpf_get_current_pid_tgid());
    return 0;
}

int call_exit(struct call_exit_arguments *ctx)
{
    u64 id = bpf_get_current_pid_tgid();
    u32 tgid = id >> 32;

    call_thread_ends(id);
    if (!(u8)ctx->group_dead)
        return 0;
    call_targets.delete(&tgid);
    call_process_ends(id);
    return 0;
}

#endif
