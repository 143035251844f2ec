/*
 * gpubpf_kernels.h: record which kernel a handle stands for. calls/kernel_names.py attaches the programs and reads the ring. They
 * run in traced processes (gpubpf_calls.h):
 *
 *     kernel_told, kernel_given      uprobes at entries and returns of functions that register a kernel, or find one by a name or by
 *                                    another handle; the cookie is one of KERNEL_*
 */
#ifndef GPUBPF_KERNELS_H
#define GPUBPF_KERNELS_H

#include <gpubpf_calls.h>

#define KERNEL_TEXT 224 /* bytes of a name in one record; a longer name needs several records */
#define KERNEL_PARTS 18

enum {
    KERNEL_REGISTERED = 1, /* (_, handle, _, name, …): the result is not an error code */
    KERNEL_FOUND,          /* (&handle, _, name): 0 is success */
    KERNEL_SAME,           /* (&handle, other handle): 0 is success */
};

struct kernel_frame {
    u64 sp;
    u64 tid;
};

struct kernel_call {
    u64 handle; /* or the address where the function will write it */
    u64 source; /* address of the name, or another handle */
};

/* A part of a name, which begins at `part` * (KERNEL_TEXT - 1). The last part is not full. */
struct kernel_name {
    u64 handle;
    u64 source;
    u32 tgid;
    u32 kind;
    u32 part;
    u32 bytes; /* including the zero at the end; 0: the name could not be read */
    char text[KERNEL_TEXT];
};

BPF_TABLE("lru_hash", struct kernel_frame, struct kernel_call, kernel_calls, 8192);
BPF_ARRAY(kernel_lost, u64, 1); /* records that did not fit into the ring */

GPU_RINGBUF(kernel_names, struct kernel_name, 4096);

int kernel_told(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid();
    int zero = 0;
    struct call_settings *s = call_settings.lookup(&zero);
    struct kernel_frame frame = {.sp = PT_REGS_SP(ctx), .tid = (u32)id};
    struct kernel_call call = {};
    u64 kind = bpf_get_attach_cookie(ctx);
    u64 first = PT_REGS_PARM1(ctx), second = PT_REGS_PARM2(ctx), third = PT_REGS_PARM3(ctx), fourth = PT_REGS_PARM4(ctx);

    /* Read all registers here: the verifier rejects a register that is chosen by arithmetic. */
    asm volatile("" : "+r"(first), "+r"(second), "+r"(third), "+r"(fourth));
    if (!s || !call_measured(s, id >> 32))
        return 1;
    call.handle = kind == KERNEL_REGISTERED ? second : first;
    call.source = kind == KERNEL_REGISTERED ? fourth : kind == KERNEL_FOUND ? third : second;
    kernel_calls.update(&frame, &call);
    return 0;
}

int kernel_given(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid(), kind = bpf_get_attach_cookie(ctx), handle, source;
    struct kernel_frame frame = {.sp = PT_REGS_SP(ctx), .tid = (u32)id};
    struct kernel_call *call = kernel_calls.lookup(&frame);
    int zero = 0;
    struct call_settings *s = call_settings.lookup(&zero);
    struct bpf_pidns_info seen = {.tgid = id >> 32};
    struct kernel_name *record;
    u64 *lost;
    u32 part;
    int bytes;

    if (!call || !s)
        return 0;
    handle = call->handle;
    source = call->source;
    kernel_calls.delete(&frame);
    if (kind != KERNEL_REGISTERED) {
        if ((u32)PT_REGS_RC(ctx))
            return 0;
        handle = call_word(handle);
    }
    if (s->inode && bpf_get_ns_current_pid_tgid(s->device, s->inode, &seen, sizeof(seen)))
        seen.tgid = id >> 32;
    for (part = 0; part < KERNEL_PARTS; part++) {
        record = kernel_names.ringbuf_reserve(sizeof(struct kernel_name));
        if (!record) {
            lost = kernel_lost.lookup(&zero);
            if (lost)
                __sync_fetch_and_add(lost, 1);
            return 0;
        }
        bytes = 0;
        if (kind != KERNEL_SAME)
            bytes = bpf_probe_read_user_str(record->text, KERNEL_TEXT, (void *)(source + part * (KERNEL_TEXT - 1)));
        record->handle = handle;
        record->source = source;
        record->tgid = seen.tgid;
        record->kind = kind;
        record->part = part;
        record->bytes = bytes > 0 ? bytes : 0;
        kernel_names.ringbuf_submit(record, 1 /* BPF_RB_NO_WAKEUP: the tool polls */);
        if (bytes < KERNEL_TEXT)
            return 0;
    }
    return 0;
}

#endif
