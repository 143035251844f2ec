/*
 * gpubpf.h: what a device program sees. Include it in the C text given to BPF(text=…); bcc's own types (u8 … u64,
 * s8 … s64), map macros and helpers are there as well. Programs are told by their argument:
 *
 *     int on_entry(struct gpu_entry *ctx)     on the GPU: in each thread, as it enters the kernel
 *     int on_access(struct gpu_access *ctx)   on the GPU: in each thread, before it loads, stores …
 *     int on_launch(struct gpu_launch *ctx)   on the host: in the thread that launches, before the driver's call
 *
 * and so on for every point in docs/attach-points.md. Any other context (TRACEPOINT_PROBE and the like) makes a program of the
 * Linux kernel's.
 */
#ifndef GPUBPF_H
#define GPUBPF_H

/* Contexts: read-only, fields in this order; later fields may be added at the end. */
struct gpu_entry {
    u64 launch; /* number of the launch, unique on the machine while the process lives */
    u64 site;   /* number of the place in the kernel that the probe was put at */
};

struct gpu_exit {
    u64 launch;
    u64 site;
    u64 work; /* what accumulate= counted in this thread, since it entered the kernel */
};

struct gpu_function_entry {
    u64 launch;
    u64 site; /* tells the function */
};

struct gpu_function_exit {
    u64 launch;
    u64 site;
};

/* In one thread of each block. */
struct gpu_block_begin {
    u64 launch;
    u64 site;
};

struct gpu_block_end {
    u64 launch;
    u64 site;
};

struct gpu_barrier_arrive {
    u64 launch;
    u64 site;
    u64 barrier; /* its number in the block; of the cluster's ~0 */
    u64 threads; /* how many it waits for; 0: all of the block */
};

struct gpu_barrier_leave {
    u64 launch;
    u64 site;
    u64 barrier;
    u64 threads;
    u64 waited; /* cycles of this multiprocessor's clock */
};

struct gpu_access {
    u64 launch;
    u64 site;
    u64 address; /* of the first byte; in shared and local memory the offset in the block's or thread's */
    u64 width;   /* bytes that this lane accesses */
    u64 space;   /* GPU_GLOBAL … */
    u64 kind;    /* GPU_LOAD … */
    u64 active;  /* the lanes that do it together, a bit for each */
    u64 effect;  /* GPU_READS | GPU_WRITES: of a copy its source is read, its destination written */
};

enum gpu_space { GPU_GLOBAL, GPU_SHARED, GPU_LOCAL, GPU_CONST };
enum gpu_kind { GPU_LOAD, GPU_STORE, GPU_ATOMIC, GPU_ASYNC };
enum gpu_effect { GPU_READS = 1, GPU_WRITES = 2 };

/* Once for each launch of a kernel that matches; for a whole graph once, with kernel ~0 and the first number of its launches. */
struct gpu_launch {
    u64 launch;  /* what the kernel's device programs see as ctx->launch */
    u64 kernel;  /* number of the kernel in this process; the tool has its name */
    u64 stream;  /* its handle */
    u64 call_ns; /* CLOCK_MONOTONIC when the program called the driver */
    u64 threads; /* of the whole grid */
    u64 gpu;     /* ordinal of the GPU */
};

/* What the program asks of the driver beside launches of kernels. */
struct gpu_operation {
    u64 id;          /* its number in the process's log */
    u64 kind;        /* GPU_OP_… */
    u64 stream;      /* its handle */
    u64 call_ns;     /* CLOCK_MONOTONIC when the program called the driver */
    u64 bytes;       /* of a copy, memset or allocation */
    u64 destination; /* addresses, 0 where there is none */
    u64 source;
    u64 gpu; /* ordinal of the GPU */
};

enum gpu_operation_kind {
    GPU_OP_H2D = 2,
    GPU_OP_D2H,
    GPU_OP_D2D,
    GPU_OP_H2H,
    GPU_OP_MEMSET,
    GPU_OP_EVENT_RECORD,
    GPU_OP_STREAM_WAIT, /* for an event */
    GPU_OP_GRAPH,
    GPU_OP_SYNC,
    GPU_OP_API /* an allocation, a free */
};

/* Helpers with the numbers of bpftime, where it has them. Clocks are read where the program says; read them first. The text of puts must be an array on the stack: gpu_puts makes one. */
static long (*gpubpf_puts)(const char *text) = (void *)501;
static u64 (*bpf_get_globaltimer)(void) = (void *)502;
static void (*bpf_get_block_idx)(u64 *x, u64 *y, u64 *z) = (void *)503;
static void (*bpf_get_block_dim)(u64 *x, u64 *y, u64 *z) = (void *)504;
static void (*bpf_get_thread_idx)(u64 *x, u64 *y, u64 *z) = (void *)505;
static void (*bpf_gpu_membar)(void) = (void *)506;
/* Ours. */
static void (*gpu_grid_dim)(u64 *x, u64 *y, u64 *z) = (void *)601;
static u32 (*gpu_lane)(void) = (void *)602; /* 0 to 31 */
static u32 (*gpu_warp)(void) = (void *)603; /* number of the warp in its block, by thread index */
static u32 (*gpu_sm)(void) = (void *)604;
static u64 (*gpu_clock)(void) = (void *)605;         /* this SM's clock64 */
static u64 (*gpu_global_thread)(void) = (void *)606; /* number of the thread in its grid, x fastest */
/* Makes *cell, a value of a map, at least `value`, atomically for the whole GPU; gives what it was. */
static u64 (*gpu_max)(u64 *cell, u64 value) = (void *)607;
static u32 (*gpu_log2)(u64 value) = (void *)609; /* place of the highest bit that is set; of 0: 0 */
static u64 (*gpu_kernel)(void) = (void *)613; /* number of the kernel in this process: struct gpu_launch's `kernel` */
/* How often addresses had come to mean another allocation when the launch was made: (address, epoch) tells an allocation. */
static u64 (*gpu_epoch)(void) = (void *)614;
static u32 (*gpu_popcount)(u64 value) = (void *)615;  /* how many bits are set */
static u32 (*gpu_lanes_below)(void) = (void *)616; /* the lanes with a lower number than this one, a bit for each */
/* Whether this is the lowest lane of a mask. Where nothing but it goes on, additions cost a third: let it speak for all. */
static u32 (*gpu_first)(u32 lanes) = (void *)617;

/*
 * What the lanes of a warp that run this together find out together; masks have one bit each, bit 0 is lane 0. Behind a branch
 * these are the lanes that took it, so the compiler must not make one call of two, nor two of one.
 */
static u32 (*gpubpf_active)(void) = (void *)608;
static u32 (*gpubpf_match)(u64 value) = (void *)610;
static u32 (*gpubpf_ballot)(u64 predicate) = (void *)611;
static u64 (*gpubpf_shuffle)(u64 value, u32 lane) = (void *)612;

#define GPUBPF_HERE(_type, _call)                              \
    ({                                                         \
        _type _gpubpf_found;                                   \
        __attribute__((nomerge)) _gpubpf_found = _call;        \
        asm volatile("");                                      \
        _gpubpf_found;                                         \
    })
/* Those lanes. */
#define gpu_active() GPUBPF_HERE(u32, gpubpf_active())
/* Those with the same value, a u64. */
#define gpu_match(_value) GPUBPF_HERE(u32, gpubpf_match(_value))
/* Those whose predicate is not 0. */
#define gpu_ballot(_predicate) GPUBPF_HERE(u32, gpubpf_ballot(_predicate))
/* What the value, a u64, is in that lane (modulo 32); of a lane that is none of them: any number. */
#define gpu_shuffle(_value, _lane) GPUBPF_HERE(u64, gpubpf_shuffle(_value, _lane))

#define gpu_puts(_text)                               \
    ({                                                \
        char _gpubpf_text[] = _text;                  \
        gpubpf_puts(_gpubpf_text);                    \
    })

/* bcc loads no functions that are not inlined. */
#undef noinline
#define noinline
#undef __noinline
#define __noinline

/*
 * Maps. The key's type tells the library which kind is meant where bcc has none; the kind of GPU_THREAD_ARRAY and
 * GPU_PARAM is in memory an array.
 */
struct gpubpf_thread_array {
    int index;
};
struct gpubpf_warp_array {
    int index;
};
struct gpubpf_block_array {
    int index;
};
struct gpubpf_kernel_array {
    int index;
};
struct gpubpf_site_array {
    int index;
};
struct gpubpf_shared_array {
    int index;
};
struct gpubpf_param {
    int index;
};

#define GPUBPF_TABLE(_type, _key, _leaf, _name, _entries, _flags)                                  \
    struct _name##_table_t {                                                                       \
        _key key;                                                                                  \
        _leaf leaf;                                                                                \
        _leaf *(*lookup)(void *);                                                                  \
        _leaf *(*lookup_or_init)(void *, _leaf *);                                                 \
        _leaf *(*lookup_or_try_init)(void *, _leaf *);                                             \
        int (*update)(void *, _leaf *);                                                            \
        int (*insert)(void *, _leaf *);                                                            \
        int (*delete)(void *);                                                                     \
        void (*increment)(_key, ...);                                                              \
        void (*atomic_increment)(_key, ...);                                                       \
        u32 max_entries;                                                                           \
        int flags;                                                                                 \
    };                                                                                             \
    __attribute__((section("maps/" _type))) struct _name##_table_t _name = {.flags = (_flags),     \
                                                                            .max_entries = (_entries)}

/*
 * One value for each thread (warp, block) of the grid and each of `entries` keys, or `entries` values for the whole grid: for
 * all launches of one kernel and shape. Launches in several streams may overlap: count with __sync_fetch_and_add. A lookup finds
 * the value of the thread (warp, block) that the program runs in.
 */
#define GPU_THREAD_ARRAY(_name, _leaf, _entries) \
    GPUBPF_TABLE("array", struct gpubpf_thread_array, _leaf, _name, _entries, 0)
#define GPU_WARP_ARRAY(_name, _leaf, _entries) \
    GPUBPF_TABLE("array", struct gpubpf_warp_array, _leaf, _name, _entries, 0)
#define GPU_BLOCK_ARRAY(_name, _leaf, _entries) \
    GPUBPF_TABLE("array", struct gpubpf_block_array, _leaf, _name, _entries, 0)
#define GPU_KERNEL_ARRAY(_name, _leaf, _entries) \
    GPUBPF_TABLE("array", struct gpubpf_kernel_array, _leaf, _name, _entries, 0)
/*
 * One value for each site of the kernel, the key, in a part for each multiprocessor, so that they do not wait for each other:
 * lookup(&site) finds the one of the multiprocessor that the program runs on. Count with __sync_fetch_and_add.
 */
#define GPU_SITE_ARRAY(_name, _leaf) \
    GPUBPF_TABLE("array", struct gpubpf_site_array, _leaf, _name, 1, 0)
/*
 * Values in host memory that the GPU reaches too, for each process: what host programs write, device programs read, and the
 * other way around. Each side writes fields of its own: no atomic operation holds across.
 */
#define GPU_SHARED_ARRAY(_name, _leaf, _entries) \
    GPUBPF_TABLE("array", struct gpubpf_shared_array, _leaf, _name, _entries, BPF_F_MMAPABLE)
/* Values that all threads share: change them with __sync_fetch_and_add and its like, or NAME.increment(key, n). */
#define GPU_ARRAY(_name, _leaf, _entries) GPUBPF_TABLE("array", int, _leaf, _name, _entries, 0)
#define GPU_HASH(_name, _key, _leaf, _entries) \
    GPUBPF_TABLE("hash", _key, _leaf, _name, _entries, BPF_F_NO_PREALLOC)
/* Counters by small number: NAME.increment(bpf_log2l(value)). */
#define GPU_HISTOGRAM(_name, _entries) GPUBPF_TABLE("array", int, u64, _name, _entries, 0)
/* A small structure that the tool sets and the program only reads; key 0. */
#define GPU_PARAM(_name, _leaf) GPUBPF_TABLE("array", struct gpubpf_param, _leaf, _name, 1, 0)
/*
 * Records of one type, which the tool reads while kernels run; pages of 4096 bytes for all of it, a power of two of them
 * (--ring-size says otherwise). What finds no room is counted. The order is kept within a multiprocessor.
 */
#define GPU_RINGBUF(_name, _leaf, _pages)                        \
    struct _name##_table_t {                                     \
        int key;                                                 \
        _leaf leaf;                                              \
        int (*ringbuf_output)(void *, u64, u64);                 \
        int (*perf_submit)(void *, void *, u32);                 \
        void *(*ringbuf_reserve)(u64);                           \
        void (*ringbuf_discard)(void *, u64);                    \
        void (*ringbuf_submit)(void *, u64);                     \
        u32 max_entries;                                         \
    };                                                           \
    __attribute__((section("maps/ringbuf"))) struct _name##_table_t _name = {.max_entries = (_pages) * PAGE_SIZE}

/* Which threads: for each dimension (x, y, z) those with index - lo <= span, as unsigned numbers. {0, ~0} takes all. */
struct gpu_range {
    u32 lo, span;
};

struct gpu_filter {
    struct gpu_range block[3];
    struct gpu_range thread[3];
};

#define GPUBPF_IN(_index, _range) ((u32)((u32)(_index) - (_range).lo) <= (_range).span)

/* Without short circuits: so it is one predicate and one branch. */
static __always_inline int gpu_selected(const struct gpu_filter *filter)
{
    u64 bx, by, bz, tx, ty, tz;

    bpf_get_block_idx(&bx, &by, &bz);
    bpf_get_thread_idx(&tx, &ty, &tz);
    return GPUBPF_IN(bx, filter->block[0]) & GPUBPF_IN(by, filter->block[1]) & GPUBPF_IN(bz, filter->block[2]) &
           GPUBPF_IN(tx, filter->thread[0]) & GPUBPF_IN(ty, filter->thread[1]) & GPUBPF_IN(tz, filter->thread[2]);
}

/* Which host threads: where something is 0, all. */
struct gpu_host_filter {
    u64 cgroup;  /* the thread is in this one (cgroup v2), or below it */
    u64 comm[2]; /* the thread's name, padded with zeros */
    u64 tid;
    u64 device, inode; /* the PID namespace in which the tool knows it by that number */
};

static __always_inline int gpu_host_selected(const struct gpu_host_filter *filter)
{
    if (filter->tid) {
        struct bpf_pidns_info seen = {};
        u32 tid = bpf_get_current_pid_tgid();

        if (!bpf_get_ns_current_pid_tgid(filter->device, filter->inode, &seen, sizeof(seen)))
            tid = seen.pid;
        if (filter->tid != tid)
            return 0;
    }
    if (filter->comm[0]) {
        u64 comm[2] = {};

        bpf_get_current_comm(comm, sizeof(comm));
        if (comm[0] != filter->comm[0] || comm[1] != filter->comm[1])
            return 0;
    }
    if (filter->cgroup) {
        int level;

#pragma unroll
        for (level = 0; level < 16; level++) {
            u64 id = bpf_get_current_ancestor_cgroup_id(level);

            if (id == filter->cgroup)
                return 1;
            if (!id)
                return 0;
        }
        return 0;
    }
    return 1;
}

#endif
