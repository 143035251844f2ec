/*
 * gpubpf_switch.h: the data that programs get when a CPU switches from one thread to another, at the tracepoint sched_switch.
 * linux/tracepoints.py finds out which form of the tracepoint a kernel has, and checks the layout of the record.
 */
#ifndef GPUBPF_SWITCH_H
#define GPUBPF_SWITCH_H

#include <gpubpf.h>

/* Bits of the state in which a thread leaves the CPU; 0: it was preempted. */
#define SWITCH_STATES 0x907f  /* TASK_REPORT, TASK_RTLOCK_WAIT, TASK_FROZEN */
#define SWITCH_RUNNABLE 0x100 /* TASK_REPORT_MAX, in records: it could have continued */
#define SWITCH_STOPPED (4 | 8) /* by a signal, or by a debugger */

/* The arguments of the raw tracepoint. Before Linux 5.18 it does not pass the state. */
struct switch_arguments {
    u64 preempt, prev, next, prev_state;
};

/* The record of the ordinary tracepoint sched:sched_switch. */
struct switch_record {
    u64 common;
    char prev_comm[16];
    u32 prev_pid, prev_prio;
    u64 prev_state;
    char next_comm[16];
    u32 next_pid, next_prio;
};

/* Return the state as in a record: only these bits, and 0 for a preempted thread. */
static __always_inline u64 switch_state(struct switch_arguments *ctx)
{
    return (u8)ctx->preempt ? 0 : ctx->prev_state & SWITCH_STATES;
}

#endif
