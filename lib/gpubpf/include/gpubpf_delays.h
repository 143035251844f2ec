/*
 * gpubpf_delays.h: what delayed the threads of gpubpf_calls.h: times off the CPU, memory pressure, page faults, retransmits. docs/host-calls.md
 * explains the reasons. calls/delay_probes.py attaches the programs and reads the maps:
 *
 *     delay_switch                       sched_switch: time off the CPU by reason
 *     delay_switch_time                  sched_switch: time off the CPU only
 *     delay_switch_record, delay_switch_time_record    the same at the ordinary tracepoint sched:sched_switch
 *     delay_reclaim, delay_reclaimed     mm_vmscan_{direct,memcg}_reclaim_{begin,end}
 *     delay_switch_old, delay_reclaimed_old    the same without bpf_task_pt_regs, which exists since Linux 5.15
 *     delay_fault                        page_fault_user
 *     delay_exit                         sched_process_{exit,exec}, before the program that forgets the thread
 *     delay_retransmit                   tcp_retransmit_skb
 *
 * These are raw tracepoints. At an ordinary tracepoint, the kernel skips a program if the CPU is already in another one, or if a process
 * on it is in a bpf(2) call for a map, even if preempted. Ordinary ones are used only if the kernel's raw ones do not pass enough.
 *
 * The programs run for every thread of the machine. For a thread that has made no call, they end after one lookup.
 */
#ifndef GPUBPF_DELAYS_H
#define GPUBPF_DELAYS_H

#include <gpubpf_calls.h>
#include <gpubpf_switch.h>

enum delay_reason {
    DELAY_PREEMPTED,
    DELAY_BLOCKED,
    DELAY_BLOCK_IO,
    DELAY_PAGE_FAULT,
    DELAY_MEMORY,
    DELAY_STOPPED,
    DELAY_FAULTS, /* from here on events, not times */
    DELAY_RETRANSMITS
};
#define DELAY_OUTSIDE (-1)      /* in place of a system call: the thread is in none */
#define DELAY_UNKNOWN (-2)      /* in place of a system call: it is not known */
#define DELAY_IO 0x100          /* added to the reason in left_state: it waits for a block device */
#define DELAY_ORIG_AX 15        /* offset in struct pt_regs, in words */
#define DELAY_PARTS 8
#define DELAY_BETWEEN 0x10000   /* added to a function's number: only its calls between launches, which the row without it also has */
#define DELAY_NOBODY 0xffffffffu /* owner of a socket: no process that has made calls */

/* Arguments of a raw tracepoint. */
struct delay_retransmit_arguments {
    u64 sk, skb;
};

/* Offsets of members of the kernel's structures. The mask of a bit field is 0 if the kernel does not have it. */
struct delay_settings {
    u64 span_ns; /* record each delay that takes at least this long; 0: record none */
    u32 iowait, iowait_mask;       /* in struct task_struct */
    u32 memstall, memstall_mask;
    u32 socket;                    /* in struct sock */
    s32 inode;                     /* from struct socket to the number of its inode */
};

struct delay_key {
    u32 tgid, tid, function, reason;
    s32 syscall;
};
struct delay_sum {
    u64 count, ns, largest_ns;
};
struct delay_span {
    u64 start_ns, end_ns;
    u64 inode; /* of a socket that retransmitted; such a span has no thread and no length */
    u32 tgid, tid, function, reason;
    s32 syscall;
    u32 zero;
};
/* A delay since the return of a thread's launch, in a call or outside. It belongs to a gap if another launch follows. */
struct delay_part {
    u32 reason;
    s32 syscall;
    u64 count, ns, largest_ns;
    u64 function; /* or CALL_GAP; set by delay_tell */
};
struct delay_gap {
    u64 launched_ns; /* of struct call_thread, for that launch */
    u32 tgid, tid;
    struct delay_part parts[DELAY_PARTS];
};
struct delay_socket {
    u32 tgid; /* the process that has the socket; 0: not known yet */
    u32 count;
};

enum { DELAY_LOST_SUMS, DELAY_LOST_SPANS, DELAY_SENT_AGAIN, DELAY_COUNTS };

GPU_PARAM(delay_settings, struct delay_settings);
BPF_ARRAY(delay_counts, u64, DELAY_COUNTS);
BPF_HASH(call_why, struct delay_key, struct delay_sum, 32768);
BPF_TABLE("lru_hash", u32, struct delay_gap, delay_gaps, 16384); /* by thread, like call_threads */
BPF_ARRAY(delay_no_gap, struct delay_gap, 1);
BPF_TABLE("lru_hash", u64, struct delay_socket, delay_sockets, 4096); /* by inode */
BPF_HASH(delay_retransmits, u32, u64, 4096);                           /* by process */
GPU_RINGBUF(delay_spans, struct delay_span, 512);

static __always_inline void delay_count(int which)
{
    u64 *n = delay_counts.lookup(&which);

    if (n)
        __sync_fetch_and_add(n, 1);
}

static __always_inline void delay_add(u32 tgid, u32 tid, u32 function, const struct delay_part *part)
{
    struct delay_key key = {.tgid = tgid, .tid = tid, .function = function, .reason = part->reason, .syscall = part->syscall};
    struct delay_sum *sum = call_why.lookup(&key), first = {part->count, part->ns, part->largest_ns};

    if (sum) { /* a thread is on one CPU at a time */
        sum->count += part->count;
        sum->ns += part->ns;
        if (part->largest_ns > sum->largest_ns)
            sum->largest_ns = part->largest_ns;
    } else if (call_why.update(&key, &first)) {
        delay_count(DELAY_LOST_SUMS);
    }
}

static __always_inline void delay_add_gap(u32 tgid, u32 tid, u32 function, const struct delay_part *part)
{
    delay_add(tgid, tid, function == CALL_GAP ? CALL_GAP : function | DELAY_BETWEEN, part);
}

/* Add the delays of a gap that has ended. */
static __always_inline void delay_close(const struct delay_gap *g)
{
    int i;

    for (i = 0; i < DELAY_PARTS; i++)
        if (g->parts[i].count)
            delay_add_gap(g->tgid, g->tid, g->parts[i].function, &g->parts[i]);
}

static __always_inline void delay_tell(struct call_thread *t, u32 id, const struct delay_part *part)
{
    struct delay_gap *g;
    struct delay_part *p;
    int zero = 0, i;

    if (t->function != CALL_GAP)
        delay_add(t->tgid, t->tid, t->function, part);
    if (!t->launched_ns) /* a gap begins with a launch */
        return;
    g = delay_gaps.lookup(&id);
    if (!g || g->launched_ns != t->launched_ns) {
        if (g && g->tid == t->tid && g->tgid == t->tgid)
            delay_close(g);
        g = delay_no_gap.lookup(&zero);
        if (!g)
            return;
        delay_gaps.update(&id, g);
        g = delay_gaps.lookup(&id);
        if (!g)
            return;
        g->launched_ns = t->launched_ns;
        g->tgid = t->tgid;
        g->tid = t->tid;
    }
    for (i = 0; i < DELAY_PARTS; i++) {
        p = &g->parts[i];
        if (p->count && (p->function != t->function || p->reason != part->reason || p->syscall != part->syscall))
            continue;
        p->function = t->function;
        p->reason = part->reason;
        p->syscall = part->syscall;
        p->count += part->count;
        p->ns += part->ns;
        if (part->largest_ns > p->largest_ns)
            p->largest_ns = part->largest_ns;
        return;
    }
    delay_add_gap(t->tgid, t->tid, t->function, part); /* a gap has room for DELAY_PARTS delays */
}

static __always_inline void delay_put(struct delay_settings *s, struct delay_span *span)
{
    if (delay_spans.ringbuf_output(span, sizeof(*span), 1 /* BPF_RB_NO_WAKEUP: the tool polls */))
        delay_count(DELAY_LOST_SPANS);
}

static __always_inline void delay_took(struct call_thread *t, u32 id, u32 reason, s32 syscall, u64 start_ns, u64 end_ns, u64 ns)
{
    int zero = 0;
    struct delay_settings *s = delay_settings.lookup(&zero);
    struct delay_part part = {reason, syscall, 1, ns, ns};

    delay_tell(t, id, &part);
    if (s && s->span_ns && ns >= s->span_ns) {
        struct delay_span span = {.start_ns = start_ns, .end_ns = end_ns, .tgid = t->tgid, .tid = t->tid,
                                    .function = t->function, .reason = reason, .syscall = syscall};
        delay_put(s, &span);
    }
}

/* Return the number of retransmits of the thread's process. Look it up only if any socket has retransmitted since the last time. */
static __always_inline u32 delay_sent_again(struct call_thread *t)
{
    int which = DELAY_SENT_AGAIN;
    u32 tgid = t->tgid;
    u64 *all = delay_counts.lookup(&which), *own;

    if (all && (u32)*all != t->all_retransmits) {
        t->all_retransmits = *all;
        own = delay_retransmits.lookup(&tgid);
        if (own)
            t->retransmits = *own;
    }
    return t->retransmits;
}

static __always_inline u8 delay_bit(void *task, u32 offset, u32 mask)
{
    u8 byte = 0;

    if (mask)
        bpf_probe_read_kernel(&byte, 1, (char *)task + offset);
    return byte & mask;
}

/* Return the system call of the current thread. `old`: there is no bpf_task_pt_regs. */
static __always_inline s32 delay_syscall(int old)
{
    u64 *registers;

    if (old)
        return DELAY_UNKNOWN;
    registers = (void *)bpf_task_pt_regs((void *)bpf_get_current_task_btf());
    return (s64)registers[DELAY_ORIG_AX] < 0 ? DELAY_OUTSIDE : registers[DELAY_ORIG_AX];
}

static __always_inline void delay_leaves(struct call_thread *t, u64 state, int old)
{
    int zero = 0;
    struct delay_settings *s = delay_settings.lookup(&zero);
    void *task;

    t->left_state = DELAY_PREEMPTED;
    t->left_syscall = DELAY_OUTSIDE;
    if (s && state && !(state & SWITCH_RUNNABLE)) {
        task = (void *)bpf_get_current_task();
        t->left_syscall = delay_syscall(old);
        t->left_state = t->left_syscall == DELAY_OUTSIDE ? DELAY_PAGE_FAULT : DELAY_BLOCKED;
        if (state & SWITCH_STOPPED)
            t->left_state = DELAY_STOPPED;
        if (delay_bit(task, s->iowait, s->iowait_mask))
            t->left_state = DELAY_BLOCK_IO | DELAY_IO;
        if (delay_bit(task, s->memstall, s->memstall_mask))
            t->left_state = DELAY_MEMORY | (t->left_state & DELAY_IO);
        delay_sent_again(t);
    }
    t->left_ns = bpf_ktime_get_boot_ns();
}

static __always_inline void delay_comes(struct call_thread *t, u32 id)
{
    u64 now = bpf_ktime_get_boot_ns(), start_ns = t->left_ns, ns = now - start_ns;
    u32 reason = t->left_state & 0xff, was;

    t->left_ns = 0;
    t->spent.switches++;
    if (reason == DELAY_PREEMPTED)
        t->spent.preempted_ns += ns;
    else if (t->left_state & DELAY_IO)
        t->spent.io_ns += ns;
    else if (t->left_syscall == DELAY_OUTSIDE)
        t->spent.fault_ns += ns;
    else
        t->spent.blocked_ns += ns;
    if (reason != DELAY_PREEMPTED) {
        was = t->retransmits;
        if (delay_sent_again(t) != was) {
            struct delay_part again = {DELAY_RETRANSMITS, t->left_syscall, t->retransmits - was, ns, ns};
            delay_tell(t, id, &again);
        }
    }
    if (t->reclaim_ns && reason != DELAY_PREEMPTED)
        return; /* delay_reclaimed records the whole time */
    if (t->reclaim_ns)
        t->reclaim_ns += ns;
    if (reason == DELAY_MEMORY)
        t->spent.reclaim_ns += ns;
    delay_took(t, id, reason, t->left_syscall, start_ns, now, ns);
}

/* Count a missed switch: a thread leaves the CPU, but was not seen to come back. Some kernels skip switches from the idle task. */
static __always_inline void delay_check(struct call_thread *t)
{
    if (t->left_ns)
        delay_count(DELAY_LOST_SUMS);
}

static __always_inline int delay_switched(u32 leaves, u32 comes, u64 state, int old)
{
    struct call_thread *t = leaves ? call_threads.lookup(&leaves) : 0;

    if (call_over())
        return 0;
    if (t) {
        delay_check(t);
        delay_leaves(t, state, old);
    }
    t = comes ? call_threads.lookup(&comes) : 0;
    if (t && t->left_ns)
        delay_comes(t, comes);
    return 0;
}

static __always_inline int delay_switched_time(u32 leaves, u32 comes, u64 state)
{
    struct call_thread *t = leaves ? call_threads.lookup(&leaves) : 0;
    u64 ns;

    if (call_over())
        return 0;
    if (t) {
        delay_check(t);
        t->left_state = state && !(state & SWITCH_RUNNABLE) ? DELAY_BLOCKED : DELAY_PREEMPTED;
        t->left_ns = bpf_ktime_get_boot_ns();
    }
    t = comes ? call_threads.lookup(&comes) : 0;
    if (t && t->left_ns) {
        ns = bpf_ktime_get_boot_ns() - t->left_ns;
        t->left_ns = 0;
        t->spent.switches++;
        if (t->left_state == DELAY_PREEMPTED)
            t->spent.preempted_ns += ns;
        else
            t->spent.blocked_ns += ns;
    }
    return 0;
}

/* The thread that leaves is still the current one. */
int delay_switch(struct switch_arguments *ctx)
{
    return delay_switched(bpf_get_current_pid_tgid(), call_pid(ctx->next), switch_state(ctx), 0);
}

int delay_switch_time(struct switch_arguments *ctx)
{
    return delay_switched_time(bpf_get_current_pid_tgid(), call_pid(ctx->next), switch_state(ctx));
}

int delay_switch_record(struct switch_record *ctx)
{
    return delay_switched(ctx->prev_pid, ctx->next_pid, ctx->prev_state, 0);
}

int delay_switch_old(struct switch_record *ctx)
{
    return delay_switched(ctx->prev_pid, ctx->next_pid, ctx->prev_state, 1);
}

int delay_switch_time_record(struct switch_record *ctx)
{
    return delay_switched_time(ctx->prev_pid, ctx->next_pid, ctx->prev_state);
}

int delay_reclaim(void *ctx)
{
    u32 tid = bpf_get_current_pid_tgid();
    struct call_thread *t = call_threads.lookup(&tid);

    if (t)
        t->reclaim_ns = bpf_ktime_get_boot_ns();
    return 0;
}

static __always_inline int delay_made_free(int old)
{
    u32 tid = bpf_get_current_pid_tgid();
    struct call_thread *t = call_threads.lookup(&tid);
    u64 now, ns;

    if (!t || !t->reclaim_ns || call_over())
        return 0;
    now = bpf_ktime_get_boot_ns();
    ns = now - t->reclaim_ns;
    t->spent.reclaim_ns += ns;
    delay_took(t, tid, DELAY_MEMORY, delay_syscall(old), t->reclaim_ns, now, ns);
    t->reclaim_ns = 0;
    return 0;
}

int delay_reclaimed(void *ctx)
{
    return delay_made_free(0);
}

int delay_reclaimed_old(void *ctx)
{
    return delay_made_free(1);
}

int delay_fault(void *ctx)
{
    u32 tid = bpf_get_current_pid_tgid();
    struct call_thread *t = call_threads.lookup(&tid);
    struct delay_part part = {DELAY_FAULTS, DELAY_OUTSIDE, 1};

    if (!t || call_over())
        return 0;
    t->spent.faults++;
    delay_tell(t, tid, &part);
    return 0;
}

int delay_exit(void *ctx)
{
    u32 tid = bpf_get_current_pid_tgid();
    struct call_thread *t = call_threads.lookup(&tid);
    struct delay_gap *g = delay_gaps.lookup(&tid);

    if (call_over())
        return 0;
    if (t && g && g->launched_ns != t->launched_ns)
        delay_close(g);
    if (g)
        delay_gaps.delete(&tid);
    return 0;
}

/* Runs in any thread, from a timer or for a packet. The tool finds the process by the socket's inode; see calls/delay_probes.py. */
int delay_retransmit(struct delay_retransmit_arguments *ctx)
{
    int zero = 0, which = DELAY_SENT_AGAIN;
    struct delay_settings *s = delay_settings.lookup(&zero);
    u64 socket = 0, inode = 0, *n;
    struct delay_socket *known, first = {.count = 1};
    u32 tgid = 0;

    if (!s || call_over())
        return 0;
    bpf_probe_read_kernel(&socket, sizeof(socket), (void *)(ctx->sk + s->socket));
    if (!socket) /* closed: no thread waits for it */
        return 0;
    bpf_probe_read_kernel(&inode, sizeof(inode), (void *)(socket + s->inode));
    known = delay_sockets.lookup(&inode);
    if (known) {
        __sync_fetch_and_add(&known->count, 1);
        tgid = known->tgid;
    } else {
        delay_sockets.update(&inode, &first);
    }
    if (tgid == DELAY_NOBODY)
        return 0;
    if (tgid) {
        n = delay_retransmits.lookup(&tgid);
        if (n)
            __sync_fetch_and_add(n, 1);
        n = delay_counts.lookup(&which);
        if (n)
            __sync_fetch_and_add(n, 1);
    }
    struct delay_span span = {.start_ns = bpf_ktime_get_boot_ns(), .inode = inode, .tgid = tgid, .function = CALL_GAP,
                                .reason = DELAY_RETRANSMITS, .syscall = DELAY_OUTSIDE};
    span.end_ns = span.start_ns;
    delay_put(s, &span);
    return 0;
}

#endif
